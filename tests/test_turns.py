"""Two patches that change when the policy samples: turns with an environment, and batches that are one update late."""

import shutil
import subprocess

import conftest
import pytest
import torch
from conftest import HERE, MODULES, distance, encode, import_file, make_args, plain_logprobs, result_of
from plain import row_logprobs
from transformers import AutoModelForCausalLM

VARIANTS = HERE / "benchmark" / "variants"


def patched(patch, script, folder):
    """The patched script as a module, from a folder of its own."""
    folder.mkdir()
    for name in conftest.SCRIPTS:
        shutil.copy(HERE / f"{name}.py", folder)
    (folder / "benchmark").symlink_to(HERE / "benchmark")
    subprocess.run(["git", "apply", VARIANTS / patch], cwd=folder, check=True)
    return import_file((folder / f"{script}.py").rename(folder / f"{script}_{patch.split('.')[0]}.py"))


# ---- one batch late
@pytest.fixture(scope="module")
def late(tmp_path_factory):
    return patched("one_batch_late.patch", "grpo", tmp_path_factory.mktemp("late") / "scripts")


LATE = dict(k=3, total_episodes=45, kl_coef=0.0)  # four batches, the last one of 9 episodes
STEPS = ["iteration", "step", "episode", "epoch", "lr"]


def test_a_batch_comes_from_the_policy_of_one_iteration_before(late, run, world, updates):
    """The prompts and all counts are those of the script. The loss has the ratio to the older policy."""
    plain = run(MODULES["grpo"], **LATE)
    updates.clear()
    ran = run(late, **LATE)
    assert [[row[name] for name in STEPS] for row in ran.metrics] == [
        [row[name] for name in STEPS] for row in plain.metrics
    ]
    assert [row["prompt"] for row in ran.rollouts] == [row["prompt"] for row in plain.rollouts]
    assert ["val/sampling_logprob_difference" in row for row in ran.metrics] == [True, False, False, False]
    for iteration in range(1, 5):
        rows = [row for row in ran.rollouts if row["iteration"] == iteration]
        # An entry of `updates` has the weights before its step.
        sampler, trainer = (updates[max(0, i)].weights for i in (iteration - 2, iteration - 1))
        old, new = (row_logprobs(world.llama, rows, weights=weights) for weights in (sampler, trainer))
        for row, of_row in zip(rows, old):
            assert row["logprobs"] == pytest.approx(of_row, abs=1e-4)
        ratios = torch.tensor([b - a for of in zip(old, new) for a, b in zip(*of)]).exp()
        assert (iteration == 1) == bool((ratios - 1).abs().max() < 1e-3)
        model = AutoModelForCausalLM.from_pretrained(world.llama).eval()
        for parameter, weight in zip(model.parameters(), trainer):
            parameter.data = weight
        for row, of_row in zip(rows, old):
            logprobs = plain_logprobs(model, encode(row["prompt"]), row["token_ids"])
            ratio = (logprobs - torch.tensor(of_row)).exp()
            losses = torch.maximum(-row["advantage"] * ratio, -row["advantage"] * ratio.clamp(0.8, 1.2))
            (losses.mean() / len(rows)).backward()
        assert distance([p.grad for p in model.parameters()], updates[iteration - 1].gradients) < 1e-3


def test_the_ratio_may_be_left_out(late, run, updates):
    """Then no ratio is clipped. In bfloat16 the ratio of a completion would be rounding alone, so it is refused."""
    ran = run(late, **LATE, late_ratio=False)
    assert all(row["val/ratio"] == 1 and row["policy/clipfrac_avg"] == 0 for row in ran.metrics)
    flags = dict(importance_sampling_level="sequence", dtype="bfloat16")
    make_args(late, **flags, late_ratio=False)
    with pytest.raises(ValueError, match="--no-late-ratio"):
        make_args(late, **flags)


def test_a_checkpoint_holds_the_batch(late, run, tmp_path, monkeypatch):
    """A run that is killed before any iteration goes on bit for bit, also after the last one."""
    flags = LATE | dict(save_every=1, num_mini_batches=2, resume=True)
    expected = result_of(run(late, **flags, output_dir=str(tmp_path / "whole")).folder)
    for name, call in ("score_episodes", 2), ("score_episodes", 3), ("score_episodes", 4), ("finish", 1):
        killed, calls, original = f"{name}{call}", [], getattr(late, name)

        def struck(*args, call=call, calls=calls, original=original):
            calls.append(args)
            if len(calls) == call:
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(late, name, struck)
            run(late, **flags, output_dir=str(tmp_path / killed))
        assert result_of(run(late, **flags, output_dir=str(tmp_path / killed)).folder) == expected
