"""A run is the same on any hardware. The number of processes, micro-batches and sharding change only the speed."""

import os

import pytest
import torch
from conftest import (
    FSDP2,
    base_flags,
    compare_runs,
    distance,
    flat,
    launch,
    launch_twice,
    launched,
    one_text,
    only,
    read_jsonl,
    record_calls,
    result_of,
    save_model,
    weights_of,
)

# Three processes cannot divide the batch or its mini-batches evenly, and groups are divided between processes. The last
# batch has only two episodes. At three times this learning rate, rounding grows a hundredfold in three iterations.
STRADDLING = dict(k=2, batch_size=8, num_mini_batches=2, num_ppo_epochs=2, total_episodes=26, kl_coef=0.1)
STRADDLING |= dict(learning_rate=1e-3)
EVERYTHING = {  # the flags that compute something over the whole batch
    "rloo": dict(whiten_advantages=True),
    "grpo": dict(importance_sampling_level="sequence", mask_truncated_completions=True, loss_type="dapo"),
    "ppo": dict(score_norm=True, score_scaling=True, whiten_rewards=True, adaptive_kl=True, kl_horizon=50),
}


@pytest.mark.parametrize("features", ["everything", pytest.param("plain", marks=pytest.mark.slow)])
def test_memory_flags_give_the_same_run(script, run, world, features):
    """Micro-batches and rollouts of 1, 3 and all episodes give the same completions, metrics and weights."""
    sizes = STRADDLING | (EVERYTHING[script.__name__] if features == "everything" else {})
    sizes |= dict(model_path=world.many_eos, ref_model_path=world.reference)
    _, metrics, output_dir = run(script, **sizes)
    assert metrics[-1]["episode"] - metrics[-2]["episode"] == 2 and len(metrics) == 4
    for memory in (
        dict(per_device_train_batch_size=1, per_device_rollout_batch_size=1),
        dict(per_device_train_batch_size=3, per_device_rollout_batch_size=3, gradient_checkpointing=True),
    ):
        compare_runs(output_dir, run(script, **sizes, **memory)[2])


def test_gradients_do_not_depend_on_the_micro_batch(script, run, updates):
    """The gradient of every update is that of the whole mini-batch, for every size of the micro-batches."""
    sizes = dict(num_ppo_epochs=2, num_mini_batches=2, kl_coef=0.1, learning_rate=1e-3)
    run(script, **sizes)
    whole = list(updates)
    for size in (1, 4):
        updates.clear()
        run(script, per_device_train_batch_size=size, **sizes)
        for update, expected in zip(updates, whole, strict=True):
            assert distance(expected.gradients, update.gradients) < 1e-4


@pytest.mark.slow
def test_any_hardware_gives_the_same_run(script, same_on, world):
    """Two processes give the run of one. Everything that computes sums over the batch is on, and the prompts have 1 to
    16 tokens."""
    sizes = STRADDLING | EVERYTHING[script.__name__]
    sizes |= dict(model_path=world.many_eos, ref_model_path=world.reference)
    _, printed = same_on(script, 2, sizes, per_device_train_batch_size=3, per_device_rollout_batch_size=1)
    assert printed.startswith("2 x cpu")


@only("grpo")
@pytest.mark.slow
def test_processes_whose_share_has_no_gradient(script, same_on, world):
    """Most groups have equal scores, so some processes have no episode with a gradient. Three processes give the run of
    one, and none waits forever. An iteration in which all groups have equal scores has the gradient norm 0."""
    flags = dict(batch_size=9, num_train_epochs=4.0, kl_coef=0.0, reward=world.reward("seldom"))
    metrics, _ = same_on(script, 3, flags, per_device_train_batch_size=2)
    assert {row["grad_norm"] == 0 for row in metrics} == {True, False}


@only("rloo")
@pytest.mark.slow
def test_more_processes_than_episodes(script, same_on, world, tmp_path):
    """Three processes and two episodes in each iteration give the run of one process. No reward function is called with
    an empty list."""
    flags = dict(k=2, batch_size=2, num_ppo_epochs=2, num_train_epochs=1.0, dataset=world.dataset(3), kl_coef=0.1)
    metrics, _ = same_on(script, 3, flags, reward=f"{tmp_path / 'probe.py'}:probe")
    calls = read_jsonl(tmp_path / "calls.jsonl")
    assert {call["world_size"] for call in calls} == {3} and all(call["count"] > 0 for call in calls)
    assert sum(call["count"] for call in calls) == metrics[-1]["episode"]


@only("rloo")
@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_a_reward_sees_whole_groups(script, same_on, world, processes):
    """A reward that compares the completions of a prompt gives the same scores on any number of processes."""
    flags = dict(reward=world.reward("ranks"), eval_dataset=world.dataset(4, seed=2), eval_k=3, eval_temperature=1.0)
    # A KL would be rounding at first, and so would the advantage of the middle rank, which Adam would make large.
    same_on(script, processes, flags | dict(kl_coef=0.0))


@only("ppo")
@pytest.mark.slow
@pytest.mark.parametrize("program", [None, FSDP2], ids=["DDP", "FSDP2"])
def test_two_processes_drop_the_same_updates(script, same_on, world, program):
    """A dropped update leaves nothing behind. Two processes drop the same updates, and give the run of one process."""
    flags = dict(num_ppo_epochs=3, num_mini_batches=2, learning_rate=0.01, num_train_epochs=3.0, target_kl=1e-3)
    flags |= dict(dataset=world.dataset(5), batch_size=6)
    metrics, _ = same_on(script, 2, flags, program, per_device_train_batch_size=1)
    assert any(row["policy/skipped_updates"] for row in metrics)


@only("rloo", "ppo")
@pytest.mark.slow
def test_fsdp2_is_the_run_of_one_process(script, run, world, tmp_path):
    """With weights sharded over two processes a run that was stopped and resumed is the same, and its model/ loads."""
    flags = STRADDLING | dict(per_device_train_batch_size=1, save_every=2)
    output_dir = run(script, **flags)[2]
    flags = base_flags(world) | flags | dict(output_dir=tmp_path / "out")
    finished = launch_twice(lambda flags: launch(script, 2, tmp_path, flags, program=FSDP2), tmp_path, flags)
    assert "iteration_00000002; remove it if it is damaged" in finished.stdout
    compare_runs(output_dir, tmp_path / "out")


@only("rloo", "grpo")
def test_short_completions_take_as_many_passes(script, run, world, monkeypatch):
    """The processes gather sharded weights together in every pass. So each process must make the same number of passes,
    for every length of its completions."""
    passes, counts, longest = record_calls(monkeypatch, script, "run_network"), [], []
    forward = script.CompletionModel.forward

    def counted(self, function):
        before = len(passes)
        outputs = forward(self, function)
        if function.func is script.token_logprobs:
            counts.append(len(passes) - before)
            longest.append(int((function.keywords["tokens"] >= 0).sum(1).max()))
        return outputs

    monkeypatch.setattr(script.CompletionModel, "forward", counted)
    run(script, model_path=world.many_eos, per_device_train_batch_size=1)
    assert min(longest) == 1 < max(longest)
    assert set(counts) == {2}


@only("rloo", "ppo")
@pytest.mark.slow
def test_weights_without_gradient_on_two_processes(script, same_on, tmp_path):
    """A model with weights for images trains on text. DDP does not wait for their gradients."""
    path = save_model(tmp_path / "images", "images")
    same_on(script, 2, dict(model_path=path, num_ppo_epochs=2), per_device_train_batch_size=3)


@only("rloo")
@pytest.mark.slow
def test_lora_on_two_processes(script, run, world, tmp_path):
    """The first weights of LoRA adapters are random. They are the same on every process, and on one process. A resumed
    run is the run that never stopped."""
    import peft

    flags = STRADDLING | dict(lora_r=2, learning_rate=0.01, model_path=world.mild)
    _, metrics, output_dir = run(script, **flags)
    launched(script, 2, tmp_path, base_flags(world) | flags | dict(per_device_train_batch_size=3))
    folders = output_dir, tmp_path / "out"
    rollouts = [[row["token_ids"] for row in read_jsonl(folder / "rollouts.jsonl")] for folder in folders]
    assert rollouts[0] == rollouts[1]
    adapters = [peft.utils.load_peft_weights(str(folder / "model"), device="cpu").values() for folder in folders]
    assert flat(adapters[0]).norm() > 0.1 and distance(*adapters) < 1e-3
    flags = base_flags(world) | flags | dict(per_device_train_batch_size=3, save_every=1)
    flags["output_dir"] = tmp_path / "resumed"
    finished = launch_twice(lambda flags: launch(script, 2, tmp_path, flags), tmp_path, flags)
    assert "iteration_00000002; remove it if it is damaged" in finished.stdout
    assert result_of(tmp_path / "resumed") == result_of(tmp_path / "out")


@only("rloo")
@pytest.mark.slow
@pytest.mark.parametrize("fault, message", [("fails_on_rank_1", "only here"), ("names_of_rank", "the score has parts")])
def test_a_failing_process_ends_the_launch(script, world, tmp_path, fault, message):
    """A reward raises on one of two processes, or its parts have other names there. The launch ends without a model."""
    flags = base_flags(world) | dict(reward=f"{tmp_path / 'probe.py'}:{fault}", output_dir=tmp_path / "out")
    finished = launch(script, 2, tmp_path, flags)
    assert finished.returncode != 0 and message in finished.stderr
    assert not (tmp_path / "out" / "model").exists()


@only("rloo")
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs this launch is right")
def test_processes_that_think_they_are_alone_are_refused(script, world, tmp_path):
    """torchrun is started without ACCELERATE_USE_CPU on a machine without GPUs. Then the run has two processes that see
    each other, or it is refused."""
    flags = base_flags(world) | dict(reward=f"{tmp_path / 'probe.py'}:probe", output_dir=tmp_path / "out")
    finished = launch(script, 2, tmp_path, flags, ACCELERATE_USE_CPU="false")
    if finished.returncode == 0:
        assert {call["world_size"] for call in read_jsonl(tmp_path / "calls.jsonl")} == {2}
    else:
        assert "fewer processes" in finished.stderr and "ACCELERATE_USE_CPU=true torchrun" in finished.stderr
        assert not (tmp_path / "out").exists()


@one_text
def test_a_launch_that_starts_one_process_is_refused(script, run, refuses, monkeypatch):
    """`accelerate launch --cpu --num_processes 2` starts only one process, with both variables and without WORLD_SIZE.
    MASTER_ADDR alone may be left over in a shell, so it is not refused."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    expected = run(script)[1]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    refuses(script, "fewer processes.*no GPU was found.*ACCELERATE_USE_CPU=true torchrun", error=script.UsageError)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_ADDR")
    assert [row["objective/scores"] for row in run(script)[1]] == [row["objective/scores"] for row in expected]


@only("rloo", "ppo")
def test_the_launchers_gradient_accumulation_changes_nothing(script, run, monkeypatch):
    """A launcher's config may set ACCELERATE_GRADIENT_ACCUMULATION_STEPS. It divides no gradient and skips no step."""
    expected = result_of(run(script, per_device_train_batch_size=5).folder)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert result_of(run(script, per_device_train_batch_size=5).folder) == expected


@one_text
def test_the_launchers_mixed_precision_is_the_default_of_dtype(script, run, monkeypatch, capsys, world):
    """A launcher's bf16 makes --dtype bfloat16. The first line and args.yaml say so. A --dtype on the command line is
    stronger."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for flags, dtype in ((dict(), "bfloat16"), (dict(dtype="float32"), "float32")):
        capsys.readouterr()
        output_dir = run(script, num_ppo_epochs=1, num_mini_batches=1, **flags)[2]
        first = f"1 x cpu, {dtype}, --learning-rate 0.003, --response-length 6; writing to {output_dir}"
        assert capsys.readouterr().out.splitlines()[0] == first
        assert f"dtype: {dtype}\n" in (output_dir / "args.yaml").read_text()
        assert {weights.dtype for weights in weights_of(output_dir / "model")} == {torch.float32}
    assert "MASTER_ADDR" not in os.environ
