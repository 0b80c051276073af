"""A run is the same on any hardware. Processes, memory and sharding change only the speed."""

import torch
from conftest import (
    FSDP2,
    base_flags,
    changed_copy,
    column,
    compare_runs,
    launch,
    launch_twice,
    launched,
    one_text,
    only,
    read_jsonl,
    read_rollouts,
    result_of,
)
from plain import token_counts
from pytest import mark

# Three processes cannot divide the batch or its mini-batches evenly, and groups are divided between
# processes. The last batch has only two episodes. At three times this learning rate, rounding grows
# a hundredfold in three iterations.
STRADDLING = dict(
    k=2,
    batch_size=8,
    num_mini_batches=2,
    num_ppo_epochs=2,
    total_episodes=26,
    kl_coef=0.1,
    learning_rate=1e-3,
)
MODELS = dict(model_path="many_eos", ref_model_path="reference")
EVERYTHING = {  # the flags that compute something over the whole batch, or leave episodes out
    "rloo": dict(reward="unsure_parts", missing_eos_penalty=1.0),
    "grpo": dict(
        reward="unsure",
        scale_rewards="batch",
        importance_sampling_level="sequence",
        mask_truncated_completions=True,
        loss_type="dapo",
    ),
    "ppo": dict(
        score_norm=True, score_scaling=True, whiten_rewards=True, adaptive_kl=True, kl_horizon=50
    ),
}
# In a launch log-probabilities are computed in pieces. In this process there is one piece.
PIECES = ("LOGITS_AT_ONCE = 2**28", "LOGITS_AT_ONCE = 64")


def test_memory_flags_give_the_same_run(script, run):
    """Micro-batches and rollouts of 1, 3 and all episodes give the same completions, metrics and
    weights."""
    flags = STRADDLING | EVERYTHING[script.__name__] | MODELS
    alone = run(script, **flags)
    assert column(alone.metrics, "episode") == [8, 16, 24, 26]
    for size in (1, 3):
        sizes = dict(per_device_train_batch_size=size, per_device_rollout_batch_size=size)
        other = run(script, **flags, **sizes, gradient_checkpointing=size == 3)
        compare_runs(alone.folder, other.folder)


@mark.slow
def test_any_hardware_gives_the_same_run(script, same_on, tmp_path):
    """Two processes give the run of one. Everything that computes sums over the batch is on, and
    the prompts have 1 to 16 tokens."""
    flags = STRADDLING | EVERYTHING[script.__name__] | MODELS
    copy = changed_copy(script, tmp_path, *PIECES)
    sizes = dict(per_device_train_batch_size=3, per_device_rollout_batch_size=1)
    _, printed = same_on(script, 2, flags, copy=copy, **sizes)
    assert "\n2 x cpu, float32, " in printed


@only("grpo")
@mark.slow
def test_processes_whose_share_has_no_gradient(script, same_on):
    """Most groups have equal scores, so some processes have no episode with a gradient. Three
    processes give the run of one, and none waits forever. An iteration in which all groups have
    equal scores has the gradient norm 0."""
    flags = dict(batch_size=9, num_train_epochs=4.0, kl_coef=0.0, reward="seldom")
    metrics, _ = same_on(script, 3, flags, per_device_train_batch_size=2)
    assert {row["grad_norm"] == 0 for row in metrics} == {True, False}


@only("rloo")
@mark.slow
def test_more_processes_than_episodes(script, same_on, tmp_path):
    """Three processes and two episodes in each iteration give the run of one process. No reward
    function is called with an empty list."""
    flags = dict(k=2, batch_size=2, num_ppo_epochs=2, dataset=3, kl_coef=0.1)
    same_on(script, 3, flags, reward="probe")
    calls = read_jsonl(tmp_path / "calls.jsonl")
    assert [(call["world_size"], call["count"]) for call in calls] == 3 * [(3, 2)]


@only("ppo")
@mark.slow
@mark.parametrize("program", [None, FSDP2], ids=["DDP", "FSDP2"])
def test_two_processes_drop_the_same_updates(script, same_on, program):
    """A dropped update leaves nothing behind. Two processes drop the same updates, and give the run
    of one process."""
    flags = dict(num_ppo_epochs=3, num_mini_batches=2, num_train_epochs=3.0, target_kl=1e-3)
    flags |= dict(dataset=5, batch_size=6, learning_rate=0.01)
    metrics, _ = same_on(script, 2, flags, program, per_device_train_batch_size=1)
    assert any(row["policy/skipped_updates"] for row in metrics)


@only("rloo", "ppo")
@mark.slow
def test_fsdp2_is_the_run_of_one_process(script, run, world, tmp_path):
    """With weights sharded over two processes a run that was stopped and resumed is the same, and
    its model/ loads. Some passes hold one completion of one token: no process waits for ever."""
    flags = STRADDLING | dict(model_path="many_eos", per_device_train_batch_size=1, save_every=2)
    alone = run(script, **flags)
    assert 1 in token_counts(alone.rollouts)
    flags = base_flags(world, flags | dict(output_dir="out"))
    copy = changed_copy(script, tmp_path, *PIECES)
    finished = launch_twice(copy, 2, tmp_path, flags, program=FSDP2)
    assert "resuming after" in finished.stdout
    compare_runs(alone.folder, tmp_path / "out")


@only("rloo")
@mark.slow
def test_lora_on_two_processes(script, run, world, tmp_path):
    """The first weights of LoRA adapters are random. They are the same on every process, and on one
    process. So are the completions, up to the last iteration."""
    flags = STRADDLING | dict(lora_r=2, learning_rate=0.01, model_path="mild")
    alone = run(script, **flags)
    flags = base_flags(world, flags | dict(per_device_train_batch_size=3))
    launched(script, 2, tmp_path, flags)
    ids = column(alone.rollouts, "token_ids")
    assert column(read_rollouts(tmp_path / "out"), "token_ids") == ids


@only("rloo")
@mark.slow
def test_a_failing_process_ends_the_launch(script, world, tmp_path):
    """A reward raises on one of two processes. The launch ends without a model."""
    flags = base_flags(world, dict(reward="fails_on_rank_1", output_dir="out"))
    finished = launch(script, 2, tmp_path, flags)
    assert finished.returncode != 0
    assert "ValueError: only here" in finished.stderr
    assert not (tmp_path / "out" / "model").exists()


@only("rloo")
@mark.slow
@mark.skipif(torch.cuda.is_available(), reason="with GPUs this launch is right")
def test_processes_that_think_they_are_alone_are_refused(script, world, tmp_path):
    """torchrun is started without ACCELERATE_USE_CPU on a machine without GPUs."""
    flags = base_flags(world, dict(output_dir="out"))
    finished = launch(script, 2, tmp_path, flags, ACCELERATE_USE_CPU="false")
    assert "ACCELERATE_USE_CPU=true torchrun" in finished.stderr
    assert not (tmp_path / "out").exists()


@one_text
def test_a_launch_that_starts_one_process_is_refused(script, run, refuses, monkeypatch):
    """`accelerate launch --cpu --num_processes 2` starts only one process, with both variables and
    without WORLD_SIZE. MASTER_ADDR alone may be left over in a shell, so it is not refused."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    expected = result_of(run(script).folder)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    refuses(script, "fewer processes.*no GPU was found.*ACCELERATE_USE_CPU=true torchrun")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_ADDR")
    assert result_of(run(script).folder) == expected


@only("rloo", "ppo")
def test_the_launchers_settings_change_nothing(script, run, monkeypatch):
    """A launcher's config may set gradient accumulation, which divides no gradient and skips no
    step, and dynamo, which would change the names of the weights."""
    expected = result_of(run(script, per_device_train_batch_size=5).folder)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    assert result_of(run(script, per_device_train_batch_size=5).folder) == expected


@one_text
def test_the_launchers_mixed_precision_is_the_default_of_dtype(script, run, monkeypatch, capsys):
    """A launcher's bf16 makes --dtype bfloat16. The first line and args.yaml say so. A --dtype on
    the command line is stronger."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for flags, dtype in ((dict(), "bfloat16"), (dict(dtype="float32"), "float32")):
        capsys.readouterr()
        folder = run(script, **flags).folder
        assert f"\n1 x cpu, {dtype}, " in capsys.readouterr().out
        assert f"dtype: {dtype}\n" in (folder / "args.yaml").read_text()


def of_the_script(script, **flags):
    """Flags with the built-in task, and with the KL of the script."""
    flags |= dict(model_path=script.Args.model_path, dataset=str(script.DEFAULT / "train.jsonl"))
    return flags | dict(kl_coef=script.Args.kl_coef, learning_rate=None, response_length=8)


@mark.slow
@only("rloo", "grpo")
@mark.parametrize("seed", [1, 2, 3])
@mark.parametrize("processes", [2, 3])
def test_rounding_does_not_choose_what_is_trained(script, same_on, processes, seed):
    """Equal completions of a group get KLs, or scores of a reward model, that differ by rounding.
    Their advantages stay 0, so the same episodes are trained on any number of processes."""
    flags = of_the_script(script, seed=seed, k=2, num_mini_batches=3, num_ppo_epochs=2)
    flags |= dict(batch_size=30, total_episodes=100, reward="exact_match")
    if script.__name__ == "grpo":
        reward_model = str(script.DEFAULT / "reward_model")
        flags |= dict(reward="none", reward_model_path=reward_model)
    same_on(script, processes, flags, per_device_train_batch_size=3)


@mark.slow
@only("ppo")
@mark.parametrize("seed", [4, 5, 6])
def test_a_first_batch_without_a_right_answer(script, run, same_on, seed):
    """The policy is the reference, and all scores are 0: the KL is rounding, and PPO would whiten
    it. Rollouts of one episode and two processes give the same run."""
    flags = of_the_script(script, seed=seed, batch_size=4, total_episodes=128)
    flags["reward"] = "exact_match"
    ran = run(script, **flags)
    assert ran.metrics[1]["objective/scores"] == 0  # Row 0 has the evaluation before training.
    compare_runs(ran.folder, run(script, **flags, per_device_rollout_batch_size=1).folder)
    same_on(script, 2, flags)
