"""The scripts on another device. It is simulated_device.py, which refuses and waits as a GPU does."""

import ast
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import HERE, MODULES, base_flags, compare_runs, launch, read_jsonl, result_of

NEEDED = "_setup_privateuseone_for_python_backend"
LACKING = not hasattr(torch.utils.backend_registration, NEEDED) or not hasattr(torch._C, "_acc")
REASON = f"torch {torch.__version__} has no {NEEDED}, with which Python makes a device"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(LACKING, reason=REASON)]

TWO_UPDATES = dict(num_mini_batches=2, per_device_train_batch_size=4, per_device_rollout_batch_size=8, save_every=1)
BFLOAT16 = dict(dtype="bfloat16", lora_r=4, gradient_checkpointing=True, total_episodes=24)
# Three bugs: random numbers, a mask, and what tells repeated episodes from others are on the CPU.
BUGS = {
    "torch.arange(args.response_length, device=accelerator.device)": "torch.arange(args.response_length)",
    "batch.mask[episodes, :longest]": "batch.mask[episodes, :longest].cpu()",
    "is_real[order].to(accelerator.device)": "is_real[order]",
}


def launch_on_device(script, folder, flags):
    program = HERE / "tests" / "simulated_device.py"
    return launch(script, 1, folder, flags, program=program, ACCELERATE_USE_CPU="false")


def run_on_device(script, world, output_dir, **flags):
    """A run with the flags of the fixture `run`, on the device. Returns its waits."""
    finished = launch_on_device(script, output_dir.parent, base_flags(world) | flags | dict(output_dir=output_dir))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.startswith("1 x sim")
    return json.loads(finished.stdout.splitlines()[-1])


def test_float32(script, run, world, tmp_path):
    """The device computes what the CPU computes. A run that goes on from a checkpoint is the run that never stopped."""
    flags = TWO_UPDATES | dict(eval_dataset=world.dataset(3, seed=4), reward_model_path=world.classifier)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_on_device(script, world, whole, **flags)
    compare_runs(run(script, **flags)[2], whole)
    shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns("model", "iteration_00000002"))
    run_on_device(script, world, resumed, **flags, resume=True)
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
    source = Path(MODULES["rloo"].__file__).read_text()
    assert source.count(text) == 1
    (tmp_path / "copy.py").write_text(source.replace(text, BUGS[text]))
    finished = launch_on_device(SimpleNamespace(__file__=str(tmp_path / "copy.py")), tmp_path, base_flags(world))
    assert "RuntimeError: Expected all tensors to be on the same device" in finished.stderr


def waits_in_loop(script, waits, function, variable):
    """The waits inside a function's loop over `variable`, by the line that waits."""
    source = Path(script.__file__).read_text()
    [definition] = [x for x in ast.parse(source).body if getattr(x, "name", None) == function]
    [loop] = [x for x in ast.walk(definition) if isinstance(x, ast.For) and getattr(x.target, "id", None) == variable]
    found = Counter()
    for kind, places in waits:
        if any(name == function and loop.lineno <= line <= loop.end_lineno for name, line in places):
            line = places[0][1]
            found[f"{kind}, line {line}: {source.splitlines()[line - 1].strip()}"] += 1
    return found


def test_waits(script, world, tmp_path):
    """The host waits for the device at most twice for a token, and a few times for a training micro-batch."""
    # No advantage is 0, so every episode is trained. Each micro-batch has one row, so none has padding.
    flags = dict(reward=world.reward("squares"), per_device_train_batch_size=1)
    six = run_on_device(script, world, tmp_path / "6", **flags, batch_size=6, total_episodes=6)
    twelve = run_on_device(script, world, tmp_path / "12", **flags, batch_size=12, total_episodes=12)
    longest = max(len(row["token_ids"]) for row in read_jsonl(tmp_path / "6" / "rollouts.jsonl"))
    sampling = waits_in_loop(script, six, "sample", "t")
    # What does not grow with the number of micro-batches falls out of the difference.
    training = waits_in_loop(script, twelve, "main", "micro_batch") - waits_in_loop(script, six, "main", "micro_batch")
    table = ""
    for unit, waits, count in (("token", sampling, longest), ("micro-batch", training, 12 - 6)):
        for place, number in waits.most_common():
            table += f"{number / count:6.2f} per {unit}: {place}\n"
    print(table)  # pytest -rP shows it
    assert 0 < sampling.total() <= 2 * longest, table
    assert 0 < training.total() <= (21 if script.__name__ == "ppo" else 8) * (12 - 6), table
