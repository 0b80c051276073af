"""A run is the same on any hardware. Processes, memory and sharding change only the speed."""

import shutil

import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from conftest import (
    EVERYTHING,
    HERE,
    base_flags,
    column,
    compare_runs,
    distance,
    launch_twice,
    launched,
    one_text,
    only,
    read_rollouts,
    result_of,
    weights_of,
)
from plain import token_counts
from pytest import mark, raises
from test_pages import RECIPES, commands

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


@only("ppo")
@mark.slow
def test_fsdp2_is_the_run_of_one_process(script, elsewhere):
    """With weights sharded over two processes a run that was stopped and resumed is the same, and
    its model/ loads. Some passes hold one completion of one token: no process waits for ever. A
    dropped update leaves nothing behind. benchmark/hardware/same_run.py has the other scripts."""
    more = dict(program=HERE / "benchmark/hardware/shards.py")
    flags = STRADDLING | EVERYTHING["ppo"] | dict(save_every=2)
    alone, printed = elsewhere(script, 2, launch_twice, more, **flags)
    assert 1 in token_counts(alone.rollouts)
    skipped = column(alone.metrics, "policy/skipped_updates")
    assert 0 < sum(skipped) < 3 * len(skipped), "the test needs some dropped updates"
    assert "resuming after" in printed and "\n2 x cpu (FSDP2), " in printed


ANSWERS = f"""
import os, runpy, sys
os.environ |= dict(FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_ACTIVATION_CHECKPOINTING="true")
sys.argv[0] = "{HERE}/benchmark/hardware/shards.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@only("grpo", "ppo")
@mark.slow
def test_fsdp2_as_accelerate_config_sets_it_up(script, run, world, tmp_path):
    """By default one process loads the weights, and the others wait for them. But PPO's new head
    and LoRA's adapters come from no file. So here each process loads its models. Activation
    checkpointing is --gradient-checkpointing, which excludes shared prompts."""
    flags = dict(model_path="mild", learning_rate=0.01)
    if script.__name__ == "grpo":
        flags["lora_r"] = 2
    alone = run(script, **flags)
    program = tmp_path / "answers.py"
    program.write_text(ANSWERS)
    launched(script, 2, tmp_path, base_flags(world, flags), program=program)
    ids = column(alone.rollouts, "token_ids")
    assert column(read_rollouts(tmp_path / "out"), "token_ids") == ids
    models = [weights_of(folder / "model") for folder in (alone.folder, tmp_path / "out")]
    assert distance(*models) < 1e-3
    assert "gradient_checkpointing: true" in (tmp_path / "out/args.yaml").read_text()


@one_text
def test_activation_checkpointing_excludes_shared_prompts(script, monkeypatch):
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    assert script.check_flags(script.Args()).gradient_checkpointing
    with raises(ValueError, match="--share-prompts True"):
        script.Args(share_prompts=True)


@only("grpo")
@mark.slow
def test_the_launches_for_eight_gpus(script, run, world, tmp_path, monkeypatch):
    """What accelerate's launcher makes of them gives the run of one process."""
    alone = run(script)
    monkeypatch.chdir(HERE)
    programs = dict(DDP=None, FSDP2=HERE / "benchmark/hardware/shards.py")
    launches = [line for line in commands(RECIPES) if line.startswith("accelerate launch --config")]
    for (joined, program), command in zip(programs.items(), launches, strict=True):
        words = command.split()[2:]
        launch, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
        environment = prepare_multi_gpu_env(launch) | dict(ACCELERATE_USE_CPU="true")
        folder = tmp_path / joined
        folder.mkdir()
        printed = launched(script, 2, folder, base_flags(world), program=program, **environment)
        assert f"\n2 x cpu ({joined}), float32, " in printed
        compare_runs(alone.folder, folder / "out")


@only("rloo")
@mark.slow
def test_lora_on_two_processes(script, elsewhere):
    """The first weights of LoRA adapters are random. They are the same on every process, and on one
    process."""
    elsewhere(script, 2, **STRADDLING, lora_r=2, model_path="mild")


@one_text
def test_a_launch_without_its_processes_is_refused(script, run, refuses, monkeypatch):
    """`accelerate launch --cpu --num_processes 2` starts only one process, with both variables and
    without WORLD_SIZE. Without ACCELERATE_USE_CPU, torchrun starts two that think they are alone.
    MASTER_ADDR alone may be left over in a shell, so it is not refused."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    run(script)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    said = "fewer processes.*no GPU was found.*ACCELERATE_USE_CPU=true torchrun.*unset MASTER_ADDR"
    refuses(script, said)
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setenv("WORLD_SIZE", "1")
    run(script)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    refuses(script, said)


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
        assert f"\n1 x cpu (alone), {dtype}, " in capsys.readouterr().out
        assert f"dtype: {dtype}\n" in (folder / "args.yaml").read_text()


# A first batch of PPO has no right answer: it would whiten a KL that is rounding.
ROUNDING = yaml.safe_load("""
rloo: {k: 2, num_mini_batches: 15, batch_size: 30, total_episodes: 90}
grpo: {k: 2, num_mini_batches: 3, batch_size: 30, total_episodes: 90, reward: none}
ppo: {batch_size: 4, total_episodes: 16}
""")


@mark.slow
def test_rounding_does_not_choose_what_is_trained(script, run, tmp_path):
    """Equal completions of a group get KLs, or scores of a reward model, that differ by rounding.
    Their advantages stay 0, so the same episodes are trained, however passes are cut."""
    flags = dict(
        model_path=script.Args.model_path,
        # A copy: the built-in dataset would be evaluated.
        dataset=shutil.copy(script.DEFAULT / "train.jsonl", tmp_path),
        reward="exact_match",
        kl_coef=script.Args.kl_coef,
        learning_rate=1e-4,
        response_length=8,
        seed=6,
    )
    flags |= ROUNDING[script.__name__]
    if flags["reward"] == "none":
        flags["reward_model_path"] = str(script.DEFAULT / "reward_model")
    alone = run(script, **flags)
    sizes = dict(per_device_train_batch_size=3, per_device_rollout_batch_size=1)
    compare_runs(alone.folder, run(script, **flags, **sizes).folder)
