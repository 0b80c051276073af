"""The scripts on another device. It is simulated_device.py, which refuses what a GPU refuses."""

import math

import torch
from conftest import (
    HERE,
    MODULES,
    base_flags,
    changed_copy,
    compare_runs,
    launch,
    launch_twice,
    launched,
    only,
    read_jsonl,
    result_of,
)
from pytest import approx, mark

NEEDED = "_setup_privateuseone_for_python_backend"
LACKING = not hasattr(torch.utils.backend_registration, NEEDED) or not hasattr(torch._C, "_acc")
REASON = f"torch {torch.__version__} has no {NEEDED}, with which Python makes a device"
pytestmark = [mark.slow, mark.skipif(LACKING, reason=REASON)]

# Three bugs: prompts, tokens, and what tells repeated episodes from others are on the CPU.
BUGS = {
    "trim(batch.prompt_tokens[chosen]).to(episodes.device)": "trim(batch.prompt_tokens[chosen])",
    "batch.tokens[episodes, :longest]": "batch.tokens[episodes, :longest].cpu()",
    "is_real[piece].to(device)": "is_real[piece]",
}


# how `launch` takes it
DEVICE = dict(program=HERE / "tests/simulated_device.py", ACCELERATE_USE_CPU="false")


def run_on_device(script, world, folder, flags):
    """A run with the flags of the fixture `run`, on the device. It writes into `out`."""
    printed = launched(script, 1, folder, base_flags(world, flags), start=launch, **DEVICE)
    assert printed.startswith("1 x sim")


@only("ppo")
def test_float32(script, run, world, tmp_path):
    """The device computes what the CPU computes. A run that goes on from a checkpoint is the run
    that never stopped."""
    flags = dict(
        num_mini_batches=2,
        per_device_train_batch_size=4,
        per_device_rollout_batch_size=8,
        save_every=1,
        eval_dataset=3,
        reward_model_path="classifier",
    )
    run_on_device(script, world, tmp_path, flags)
    compare_runs(run(script, **flags).folder, tmp_path / "out")
    flags = base_flags(world, flags | dict(output_dir="resumed"))
    launch_twice(script, 1, tmp_path, flags, start=launch, **DEVICE)
    assert result_of(tmp_path / "resumed") == result_of(tmp_path / "out")


def test_bfloat16(script, run, world, tmp_path):
    """In bfloat16, with LoRA and gradient checkpointing, device and CPU differ by rounding, which
    may change a completion."""
    flags = dict(
        dtype="bfloat16",
        lora_r=4,
        gradient_checkpointing=True,
        total_episodes=12,
        model_path="mild",
        reward_model_path="classifier",
    )
    run_on_device(script, world, tmp_path, flags)
    expected = run(script, **flags)
    [line] = read_jsonl(tmp_path / "out/metrics.jsonl")
    assert line.keys() == expected.metrics[0].keys()
    assert all(map(math.isfinite, line.values()))
    same = 0
    rollouts = read_jsonl(tmp_path / "out/rollouts.jsonl")
    for row, other in zip(rollouts, expected.rollouts, strict=True):
        if row["token_ids"] == other["token_ids"]:
            same += 1
            assert row["logprobs"] == approx(other["logprobs"], abs=0.03)
    assert same >= 9


@mark.parametrize("text", BUGS)
def test_tensors_on_two_devices_are_refused(text, world, tmp_path):
    """The device refuses bugs that a CPU does not show. Each is put into a copy of rloo.py. A run
    that ends so early leaves no folder."""
    copy = changed_copy(MODULES["rloo"], tmp_path, text, BUGS[text])
    flags = base_flags(world, dict(output_dir="out"))
    finished = launch(copy, 1, tmp_path, flags, **DEVICE)
    assert "RuntimeError: Expected all tensors to be on the same device" in finished.stderr
    assert not (tmp_path / "out").exists()
