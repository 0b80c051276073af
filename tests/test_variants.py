"""benchmark/variants/: the patches are short, apply, compute what their papers say, learn, and do what they promise.

Runs are real: the embedded policy, patched and as it is, some seconds each (pytest -m slow).
"""

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import HERE, import_file, read_jsonl

VARIANTS = HERE / "benchmark" / "variants"
curves = import_file(VARIANTS / "curves.py")
PATCHES = {name: variant[0] for name, variant in curves.VARIANTS.items()}


@pytest.fixture
def patched(tmp_path):
    """patched(name): the patched script as a module, under the variant's name, with its `benchmark` beside it."""

    def patched(name):
        script = curves.copy_scripts(tmp_path / f"{name}_module", name) / f"{PATCHES[name]}.py"
        return import_file(script.rename(script.with_name(f"{name}.py")))

    return patched


@pytest.fixture
def train(tmp_path):
    """train(name, flags): run a variant (None: the script as it is), to its end or error -> what it wrote."""

    def train(name, flags, script=None, edit=lambda text: text):
        folder = curves.copy_scripts(tmp_path / f"{name}", name)
        path = folder / f"{script or PATCHES[name]}.py"
        path.write_text(edit(path.read_text()))
        command = [sys.executable, path, *flags.split(), "--save-rollouts", "--output-dir", folder / "run"]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if finished.returncode:
            return SimpleNamespace(error=finished.stderr)
        metrics, rollouts = (read_jsonl(folder / "run" / f"{file}.jsonl") for file in ("metrics", "rollouts"))
        evaluations = [row["eval/scores"] for row in metrics if "eval/scores" in row]
        return SimpleNamespace(metrics=metrics[1:], rollouts=rollouts, evaluations=evaluations, error=None)

    return train


def learned(run, at_least):
    """Right answers to held-out prompts: hardly any before, most of them after."""
    assert run.error is None, run.error[-3000:]
    assert run.evaluations[0] < 0.15 and run.evaluations[-1] > at_least, run.evaluations
    scores = [row["objective/scores"] for row in run.metrics]
    assert np.mean(scores[-4:]) > np.mean(scores[:4]) + 0.2, scores
    return True


# ================================================= patches ==================================================
def test_every_patch_is_known():
    assert {path.stem for path in VARIANTS.glob("*.patch")} == set(PATCHES)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_short_and_applies(name, tmp_path):
    """At most 25 lines, to one script, which stays clean; `-R` brings it back; the text above says how and whose."""
    head, diff = re.split(r"^(?=diff --git)", (VARIANTS / f"{name}.patch").read_text(), maxsplit=1, flags=re.M)
    changed = [line for line in diff.splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert 0 < len(changed) <= 25
    script = f"{PATCHES[name]}.py"
    assert f"    git apply benchmark/variants/{name}.patch && python {script}" in head
    assert re.search(r"arXiv \d{4}\.\d{5}|Ionides 2008", head)
    folder = curves.copy_scripts(tmp_path / name)
    before = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    subprocess.run(["git", "apply", VARIANTS / f"{name}.patch"], cwd=folder, check=True)
    after = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert [path for path in before if before[path] != after[path]] == [script]
    for command in (["check"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, "--quiet", "--config", HERE / ".ruff.toml"]
        subprocess.run([*words, "--line-length", "100", folder / script], check=True)
    subprocess.run(["git", "apply", "-R", VARIANTS / f"{name}.patch"], cwd=folder, check=True)
    assert before == {path.name: path.read_bytes() for path in folder.glob("*.py")}


# =============================================== mathematics ================================================
def test_reinforce_advantages_by_hand(patched):
    """Two episodes of 2 and 1 tokens with scores 1 and 0, and KL penalties 0.5 and -0.5, and 1. R is 1 - 0 and 0 - 1;
    from the second token on the first has 1 + 0.5 = 1.5. The tokens 1, 1.5 and -1 have mean 0.5, deviation 1.3229."""
    rewards, mask = torch.tensor([1.0, -1.0]), torch.tensor([[True, True], [True, False]])
    penalties = torch.tensor([[0.5, -0.5], [1.0, 0.0]])
    advantages = patched("reinforce_plus_plus").reinforce_advantages(rewards, penalties, mask)
    assert advantages[mask].tolist() == pytest.approx([0.5 / 1.3229, 1.0 / 1.3229, -1.5 / 1.3229], rel=1e-3)


def test_soft_overlong_punishment_by_hand(patched):
    """Of 8 tokens the last 5 are punished: nothing up to 3, then a fifth for each (arXiv 2503.14476, eq. 13)."""
    punishment = patched("overlong_punishment").soft_overlong_punishment
    lengths = torch.tensor([1, 3, 4, 5, 7, 8])
    assert punishment(lengths, 8, 5).tolist() == pytest.approx([0, 0, -0.2, -0.4, -0.8, -1.0])
    assert punishment(torch.tensor([16384, 18432, 20480]), 20480, 4096).tolist() == [0, -0.5, -1.0]  # the paper's


def test_sampler_weights_by_hand(patched):
    """Two completions, of probability 1/2 each to the sampler, 0.8 and 0.2 to the trainer: weights 1.6 and 0.4. A mean
    under the sampler, weighted, is the trainer's; a cap of 1.5 binds the first alone. Tokens multiply."""
    weights = patched("sampler_weights").sampler_weights
    trainer, sampler = torch.tensor([[0.8], [0.2]]).log(), torch.tensor([[0.5], [0.5]]).log()
    exact = weights(trainer, sampler, 2.0)
    assert exact.tolist() == pytest.approx([1.6, 0.4])
    values = torch.tensor([3.0, 7.0])
    assert (0.5 * exact * values).sum().item() == pytest.approx(0.8 * 3 + 0.2 * 7)
    assert weights(trainer, sampler, 1.5).tolist() == pytest.approx([1.5, 0.4])
    two_tokens = weights(torch.tensor([[0.9, 0.8]]).log(), torch.tensor([[0.6, 0.8]]).log(), 2.0)
    assert two_tokens.item() == pytest.approx(1.5)


# ================================================== runs ====================================================
@pytest.mark.slow
def test_reinforce_plus_plus_learns_from_one_completion_of_a_prompt(train):
    """Which the original refuses; every token's advantage is the paper's, computed plainly from what was sampled."""
    flags = "--rloo-k 1 --total-episodes 1536"
    assert "--rloo-k must be at least 2" in train(None, flags, script="rloo").error
    variant = train("reinforce_plus_plus", flags)
    assert learned(variant, at_least=0.5)
    for iteration in (1, 20):
        episodes = [row for row in variant.rollouts if row["iteration"] == iteration]
        returns = []
        for row in episodes:
            kl = [new - ref for new, ref in zip(row["logprobs"], row["ref_logprobs"])]
            returns += [row["score"] - 0.01 * sum(kl[t:]) for t in range(len(kl))]
        expected = (np.array(returns) - np.mean(returns)) / np.std(returns, ddof=1)
        advantages = [row["advantage"][: len(row["token_ids"])] for row in episodes]
        np.testing.assert_allclose(np.concatenate(advantages), expected, atol=2e-3)
        loss = -np.mean([np.mean(of_episode) for of_episode in advantages])  # the ratio is 1
        assert variant.metrics[iteration - 1]["loss/policy_avg"] == pytest.approx(loss, abs=1e-4)
    assert len({round(advantage, 4) for advantage in np.concatenate(advantages)}) > 2  # the KL differs by token


@pytest.mark.slow
def test_overlong_punishment_keeps_completions_short(train):
    """A judge pays for long answers: GRPO makes them long and wrong; with the punishment they are short and right."""
    flags = f"{curves.JUDGE} --total-episodes 3072 --lr-scheduler-type constant"
    original, variant = train(None, flags, script="grpo"), train("overlong_punishment", flags)
    assert learned(variant, at_least=0.6)
    lengths = [np.mean([row["response_length_mean"] for row in run.metrics[-4:]]) for run in (original, variant)]
    assert lengths[1] < 4 < lengths[0] - 0.5, lengths
    assert original.evaluations[-1] < variant.evaluations[-1] - 0.3
    judge = import_file(VARIANTS / "long_judge.py").score
    answers = {row["prompt"]: row["answer"] for row in read_jsonl(HERE / "benchmark" / "default" / "train.jsonl")}
    for row in variant.rollouts[:640] + original.rollouts[-640:]:
        [score] = judge([row["completion"]], [row["token_ids"]], [answers[row["prompt"]]])
        is_punished = row in variant.rollouts[:640]
        punishment = max(0, len(row["token_ids"]) - 3) / 5 if is_punished else 0
        assert row["score"] == pytest.approx(score - punishment, abs=1e-5)


@pytest.mark.slow
def test_sampler_weights_let_a_bfloat16_sampler_train_in_float32(train):
    """A sampler of another precision stops the original; the variant learns, with weights near 1, not equal to it."""
    patch = (VARIANTS / "sampler_weights.patch").read_text()
    [was] = re.findall(r"^-( +with torch.autocast.*\n)", patch, re.M)
    [lines] = re.findall(r"^\+( +is_bfloat16 = .*\n)\+( +with torch.autocast.*\n)", patch, re.M)
    refused = train(None, "--total-episodes 256", script="rloo", edit=lambda text: text.replace(was, "".join(lines)))
    assert re.search(r"sampling and training give log-probabilities 0\.\d+ apart", refused.error)
    variant = train("sampler_weights", "--total-episodes 2048")
    assert learned(variant, at_least=0.5)
    assert all(0.003 < row["val/sampler_weight_std"] < 0.2 for row in variant.metrics)
    assert all(row.get("val/sampling_logprob_difference", 0) < 1e-4 for row in variant.metrics)
    weights = []
    for i in range(0, len(variant.rollouts), 4):  # the stored log-probabilities are the trainer's
        group = variant.rollouts[i : i + 4]
        rewards = [r["score"] - 0.01 * (sum(r["logprobs"]) - sum(r["ref_logprobs"])) for r in group]
        plain = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
        weights += [row["advantage"] / x for row, x in zip(group, plain) if abs(x) > 0.1]
    assert np.mean(weights) == pytest.approx(1, abs=0.01) and 0.003 < np.std(weights) < 0.1
