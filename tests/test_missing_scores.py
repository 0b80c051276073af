"""Episodes without a score. The reward returns None for them, and they leave their group."""

import math
import shutil
import statistics

import numpy as np
import pytest
import torch
from conftest import distance, encode, only, read_jsonl, record_calls, weights_of
from plain import DENOMINATORS, plain_gradient
from transformers import AutoModelForCausalLM

UNSURE = """
from rewards import letters

calls = 0

def unsure(prompts, completions, **_):
    '''The reward `letters`, but None for a completion with an "a".'''
    return [None if "a" in c else s for c, s in zip(completions, letters(prompts, completions))]

def parts(prompts, completions, **_):
    length = [None if len(c) < 4 else 0.5 * len(c) for c in completions]
    return {"letters": unsure(prompts, completions), "length": length, "never": [None] * len(completions)}

def never(completions, **_):
    return [None] * len(completions)

def not_second(prompts, completions, **_):
    '''Every completion of the second iteration has no score.'''
    global calls
    calls += 1
    return never(completions) if calls == 2 else letters(prompts, completions)
"""
grouped = only("rloo", "grpo")
ONE_BATCH = dict(batch_size=24, total_episodes=24, seed=5)  # This batch has groups with 0, 1, 2 and 3 scores.
NAN = math.nan


@pytest.fixture
def unsure(world):
    """unsure(name): the --reward of a function above. It is None for some completions."""
    (world.folder / "unsure.py").write_text(UNSURE)
    return lambda name="unsure": f"{world.folder / 'unsure.py'}:{name}"


def own_advantage(script, rewards, i):
    """The advantage of the i-th episode of a group, in a loop over the others. None is an episode without a score."""
    scored = [r for r in rewards if r is not None]
    if rewards[i] is None or len(scored) < 2:
        return 0.0
    if script.__name__ == "rloo":
        others = [r for j, r in enumerate(rewards) if r is not None and j != i]
        return rewards[i] - sum(others) / len(others)
    return (rewards[i] - statistics.mean(scored)) / (statistics.stdev(scored) + 1e-4)


def groups_of(rows, k=3):
    """The groups of rollouts.jsonl, in which some episodes have no score."""
    groups = [rows[i : i + k] for i in range(0, len(rows), k)]
    counts = {sum(row["score"] is not None for row in group) for group in groups}
    assert counts == set(range(k + 1)), "the test needs groups with 0 to k scores"
    return groups


@only("grpo")
def test_grpo_advantages_without_some_scores(script):
    """By hand, for each --scale-rewards. Deviations are those of the scores that are there."""
    scores = [1.0, NAN, 2.0, 6.0, 5.0, NAN, NAN, 2.0, 1.0, 1.0, 1.0, 0.0]
    scores += [NAN, 7.0, NAN, NAN, *[NAN] * 4, 0.1, 0.1, NAN, NAN]
    centered = [-2, 0, -1, 3, 1.5, 0, 0, -1.5, 0.25, 0.25, 0.25, -0.75, *[0] * 12]
    own = [statistics.stdev(group) for group in ([1, 2, 6], [5, 2], [1, 1, 1, 0])]
    batch = statistics.stdev(score for score in scores if not math.isnan(score))
    all_equal = script.all_equal(torch.tensor(scores).view(-1, 4))
    assert all_equal.squeeze(1).tolist() == [False] * 3 + [True] * 3
    for scale, deviations in {"none": [1.0] * 4, "group": [*own, 1.0], "batch": [batch] * 4}.items():
        epsilon = 0 if scale == "none" else 1e-4
        expected = [a / (deviations[min(i // 4, 3)] + epsilon) for i, a in enumerate(centered)]
        advantages = script.grpo_advantages(torch.tensor(scores), 4, scale)
        assert advantages.tolist() == pytest.approx(expected, rel=1e-5), scale
        assert advantages[12:].tolist() == [0.0] * 12
        for few in ([NAN] * 4, [3.0, NAN, NAN, NAN]):  # the whole batch has at most one score
            assert script.grpo_advantages(torch.tensor(few), 4, scale).tolist() == [0.0] * 4


@grouped
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_gradient_without_some_scores(script, run, world, unsure, updates, kl_coef):
    """Advantages by a loop over the scores of a group, and gradients by plain passes. Denominators count all episodes.

    RLOO's KL is a part of the reward, so an episode without a score has no gradient. GRPO's KL is a part of the loss.
    Every episode has its gradient."""
    is_grpo = script.__name__ == "grpo"
    flags = dict(reward=unsure(), kl_coef=kl_coef, ref_model_path=world.reference, per_device_train_batch_size=5)
    for name in ("grpo", "dapo", "dr_grpo", "cispo") if is_grpo else ("rloo",):
        updates.clear()
        flags |= dict(loss_type=name) if is_grpo else {}
        rows, weights = run(script, **flags, **ONE_BATCH).rollouts, []
        all_tokens = sum(len(row["token_ids"]) for row in rows)
        for group in groups_of(rows):
            rewards = [row["score"] for row in group]
            for i, row in enumerate(group):
                assert (row["score"] is None) == ("a" in row["completion"])
                kl = sum(row["logprobs"]) - sum(row["ref_logprobs"])
                if not is_grpo and row["score"] is not None:
                    rewards[i] = row["score"] - kl_coef * kl
            for i, row in enumerate(group):
                advantage = own_advantage(script, rewards, i)
                assert row["advantage"] == pytest.approx(advantage, rel=1e-4, abs=1e-5)
                difference = torch.tensor(row["ref_logprobs"]) - torch.tensor(row["logprobs"])
                weight = advantage - is_grpo * kl_coef * (1 - difference.exp())
                weights.append(weight / DENOMINATORS[name](len(weight), all_tokens, 24, 6))
                assert (weight != 0).any() == (advantage != 0 or (is_grpo and kl_coef > 0))
        assert distance(plain_gradient(world.llama, rows, weights), updates[0].gradients) < 1e-5, name


@only("rloo")
def test_whitening_of_large_scores(script, run, world):
    """The squares of scores of 1e20 are inf in float32."""
    (world.folder / "large.py").write_text(
        "from rewards import letters\n\ndef large(**inputs):\n    return [1e20 * s for s in letters(**inputs)]\n"
    )
    rows = run(script, reward=f"{world.folder / 'large.py'}:large", whiten_advantages=True, **ONE_BATCH).rollouts
    assert np.mean(np.square([row["advantage"] for row in rows])) == pytest.approx(1, rel=1e-5)


@only("rloo")
def test_whitening_counts_only_scored_episodes(script, run, unsure):
    """The population variance of the advantages of all episodes with a score is 1. Without any score it stays 0."""
    flags = dict(whiten_advantages=True, kl_coef=0.0, **ONE_BATCH)
    rows = run(script, reward=unsure(), **flags).rollouts
    assert groups_of(rows) and all(row["advantage"] == 0 for row in rows if row["score"] is None)
    scored = [row["advantage"] for row in rows if row["score"] is not None]
    assert np.mean(scored) == pytest.approx(0, abs=1e-6) and np.var(scored) == pytest.approx(1, abs=1e-5)
    rows = run(script, reward=unsure("never"), **flags).rollouts
    assert [row["advantage"] for row in rows] == [0.0] * 24


@grouped
@pytest.mark.parametrize("has_model", [False, True])
def test_a_part_that_is_none_adds_nothing(script, run, world, unsure, has_model):
    """The score is the sum of the parts that are there. An episode without any part has no score. A reward model gives
    every episode a part."""
    flags = dict(reward=unsure("parts"), reward_model_path=world.classifier if has_model else None, seed=3)
    ran, plain = run(script, **flags, batch_size=24, total_episodes=24), {}
    [line], rows = ran.metrics, ran.rollouts
    for row in rows:
        text = row["completion"]
        letters = len(set(text)) + 0.3 * text.count("1") - 0.1 * len(text) * (len(row["prompt"]) % 3)
        named = {"letters": None if "a" in text else letters, "length": None if len(text) < 4 else 0.5 * len(text)}
        named["reward_model"] = row.get("reward/reward_model")
        named = {name: value for name, value in named.items() if value is not None}
        for name, value in named.items():
            plain.setdefault(name, []).append(value)
        assert row["score"] == (pytest.approx(sum(named.values()), abs=1e-5) if named else None)
    missing = sum(row["score"] is None for row in rows)
    assert bool(missing) != has_model and max(len(plain["letters"]), len(plain["length"])) < 24 - missing
    for name, values in plain.items():
        assert line[f"reward/{name}"] == pytest.approx(np.mean(values), rel=1e-5)
    assert line["objective/scores"] == pytest.approx(np.mean([r["score"] for r in rows if r["score"] is not None]))
    assert line["val/num_unscored"] == missing and "reward/never" not in line


@grouped
def test_a_run_without_any_score(script, run, world, unsure, capsys):
    """It ends, and the weights are as before. No mean of scores is logged, and no file has nan."""
    flags = dict(reward=unsure("never"), eval_dataset=world.dataset(5), kl_coef=0.0)
    flags |= dict(num_mini_batches=2, num_ppo_epochs=2)
    _, metrics, output_dir = run(script, **flags)
    assert " score " not in capsys.readouterr().out.splitlines()[-1]
    assert distance(weights_of(world.llama), weights_of(output_dir / "model")) == 0
    assert metrics[0] == {"iteration": 0, "step": 0, "episode": 0, "epoch": 0.0, "eval/num_unscored": 5}
    for line in metrics[1:]:
        assert line["val/num_unscored"] == 12 - 3 * (line is metrics[-1]) and line["grad_norm"] == 0
        assert not {"objective/scores", "reward/", "val/ratio"} & line.keys()
        assert all(math.isfinite(value) for value in line.values())
    assert metrics[-1]["eval/num_unscored"] == 5 and not {"eval/scores", "eval/best_of_1"} & metrics[-1].keys()
    assert {row["score"] for row in read_jsonl(output_dir / "rollouts.jsonl")} == {None}
    assert "NaN" not in (output_dir / "rollouts.jsonl").read_text()  # but null, which is valid JSON


@pytest.mark.parametrize("k, temperature", [(1, 0.0), (2, 1.0)])
def test_evaluation_without_some_scores(script, run, world, unsure, monkeypatch, k, temperature):
    """eval/scores is the mean over the completions with a score, and eval/num_unscored counts the others. The best of k
    is that of the prompts whose completions all have one."""
    flags = dict(eval_reward=unsure(), eval_dataset=world.dataset(20, seed=2), eval_k=k, eval_temperature=temperature)
    calls = record_calls(monkeypatch, script, "score_episodes")
    metrics = run(script, **flags).metrics
    scores, _ = calls[0].result
    scored, groups = scores[~scores.isnan()], scores.view(20, k)
    best = groups[~groups.isnan().any(1)].amax(1)
    assert 0 < len(best) < 20
    assert metrics[0]["eval/scores"] == pytest.approx(scored.mean().item())
    assert metrics[0][f"eval/best_of_{k}"] == pytest.approx(best.mean().item())
    assert metrics[0]["eval/num_unscored"] == 20 * k - len(scored)
    assert "objective/scores" in metrics[1] and metrics[1]["val/num_unscored"] == 0


@grouped
@pytest.mark.slow
def test_two_processes_without_some_scores(script, same_on, world, unsure):
    """Two processes give the run of one."""
    flags = dict(reward=unsure("parts"), num_train_epochs=2.0, num_mini_batches=2, num_ppo_epochs=2, learning_rate=1e-3)
    flags |= {"rloo": dict(whiten_advantages=True), "grpo": dict(scale_rewards="batch")}[script.__name__]
    flags |= dict(eval_dataset=world.dataset(3, seed=4), eval_reward=unsure(), kl_coef=0.1)
    metrics, _ = same_on(script, 2, flags, per_device_train_batch_size=3)
    assert any(line.get("val/num_unscored") for line in metrics)


@only("ppo")
def test_ppo_refuses_an_episode_without_a_score(script, run, world, updates, tmp_path):
    """The error names the prompt, and says what to return. No update of that iteration is made."""
    out = tmp_path / "out"
    with pytest.raises(ValueError) as raised:
        run(script, reward=world.reward("none"), output_dir=str(out), batch_size=6, num_train_epochs=2)
    assert len(updates) == len(read_jsonl(out / "metrics.jsonl")) == 1 and not (out / "model").exists()
    prompts = [row["prompt"] for row in read_jsonl(world.dataset(7))]
    named = [prompt for prompt in prompts if f"a completion of {prompt!r} has no score" in str(raised.value)]
    assert len(named) == 1 and "--reward gave None, and PPO needs a number for each completion" in str(raised.value)


@pytest.mark.parametrize("flag", ["model_path", "ref_model_path"])
def test_nan_of_a_model_is_not_a_missing_score(script, run, world, tmp_path, updates, flag):
    """A broken policy or reference stops the run, in sampling or before the first update."""
    broken = shutil.copytree(world.reference, tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(broken)
    model.model.embed_tokens.weight.data[encode("=")] = math.inf
    model.save_pretrained(broken)
    with pytest.raises(RuntimeError, match="a model gives nan or inf; are its weights whole"):
        run(script, **{flag: str(broken)}, kl_coef=0.1)
    assert not updates
