"""The scripts on another device. It is simulated_device.py, which refuses what a GPU refuses."""

import math

import pytest
import torch
from conftest import (
    HERE,
    MODULES,
    base_flags,
    changed_copy,
    compare_runs,
    launch,
    launch_twice,
    only,
    read_jsonl,
    result_of,
)

NEEDED = "_setup_privateuseone_for_python_backend"
LACKING = not hasattr(torch.utils.backend_registration, NEEDED) or not hasattr(torch._C, "_acc")
REASON = f"torch {torch.__version__} has no {NEEDED}, with which Python makes a device"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(LACKING, reason=REASON)]

TWO_UPDATES = dict(num_mini_batches=2, per_device_train_batch_size=4, per_device_rollout_batch_size=8, save_every=1)
BFLOAT16 = dict(dtype="bfloat16", lora_r=4, gradient_checkpointing=True, total_episodes=24)
# Three bugs: prompts, tokens, and what tells repeated episodes from others are on the CPU.
BUGS = {
    "trim(batch.prompt_tokens[chosen]).to(episodes.device)": "trim(batch.prompt_tokens[chosen])",
    "batch.tokens[episodes, :longest]": "batch.tokens[episodes, :longest].cpu()",
    "is_real[order].to(accelerator.device)": "is_real[order]",
}


def launch_on_device(script, folder, flags):
    program = HERE / "tests" / "simulated_device.py"
    return launch(script, 1, folder, flags, program=program, ACCELERATE_USE_CPU="false")


def run_on_device(script, world, output_dir, **flags):
    """A run with the flags of the fixture `run`, on the device. Returns its folder and its flags."""
    flags = base_flags(world) | flags | dict(output_dir=output_dir)
    finished = launch_on_device(script, output_dir.parent, flags)
    assert finished.returncode == 0 and finished.stdout.startswith("1 x sim"), finished.stdout + finished.stderr
    return output_dir.parent, flags


@only("grpo", "ppo")
def test_float32(script, run, world, tmp_path):
    """The device computes what the CPU computes. A run that goes on from a checkpoint is the run that never stopped."""
    flags = TWO_UPDATES | dict(eval_dataset=world.dataset(3, seed=4), reward_model_path=world.classifier)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    folder, given = run_on_device(script, world, whole, **flags)
    compare_runs(run(script, **flags)[2], whole)
    launch_twice(lambda flags: launch_on_device(script, folder, flags), folder, given | dict(output_dir=resumed))
    assert result_of(resumed) == result_of(whole)


def test_bfloat16(script, run, world, tmp_path):
    """In bfloat16, with LoRA and gradient checkpointing, the device and the CPU differ by rounding."""
    flags = BFLOAT16 | dict(model_path=world.mild, reward_model_path=world.classifier)
    run_on_device(script, world, tmp_path / "device", **flags)
    folders = run(script, **flags)[2], tmp_path / "device"
    metrics = [read_jsonl(folder / "metrics.jsonl") for folder in folders]
    assert [row.keys() for row in metrics[0]] == [row.keys() for row in metrics[1]]
    assert all(math.isfinite(value) for row in metrics[1] for value in row.values())
    # Rounding may change a completion. So only the first iteration is compared, where completions are the same.
    pairs = list(zip(*(read_jsonl(folder / "rollouts.jsonl")[:12] for folder in folders), strict=True))
    same = [(row, other) for row, other in pairs if row["token_ids"] == other["token_ids"]]
    assert len(same) >= 9
    for row, other in same:
        assert row["logprobs"] == pytest.approx(other["logprobs"], abs=0.03)
    if len(same) == 12:
        assert metrics[0][0]["grad_norm"] == pytest.approx(metrics[1][0]["grad_norm"], rel=0.05)


@pytest.mark.parametrize("text", BUGS)
def test_tensors_on_two_devices_are_refused(text, world, tmp_path):
    """The device refuses bugs that a CPU does not show. Each is put into a copy of rloo.py."""
    copy = changed_copy(MODULES["rloo"], tmp_path, text, BUGS[text])
    finished = launch_on_device(copy, tmp_path, base_flags(world))
    assert "RuntimeError: Expected all tensors to be on the same device" in finished.stderr
