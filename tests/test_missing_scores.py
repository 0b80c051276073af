"""Episodes without a score. The reward returns None for them, and they leave their group."""

import math
import re
import shutil
import statistics

import torch
from conftest import column, distance, encode, load_policy, only, read_jsonl
from plain import groups_of, mean_weights, plain_advantages, plain_gradient, without_none
from pytest import approx, mark, raises

grouped = only("rloo", "grpo")
ONE_BATCH = dict(batch_size=24, total_episodes=24, seed=5)


@grouped
@mark.parametrize("kl_coef, path", [(0.2, "reference"), (0.0, None)])
def test_gradient_without_some_scores(script, run, world, updates, kl_coef, path):
    """Advantages by a plain computation of each group, and gradients by plain passes. Denominators
    count all episodes.

    RLOO's KL is a part of the reward, so an episode without a score has no gradient. GRPO's KL is a
    part of the loss. Every episode has its gradient."""
    flags = dict(reward="unsure", kl_coef=kl_coef, ref_model_path=path)
    rows = run(script, per_device_train_batch_size=5, **flags, **ONE_BATCH).rollouts
    rewards = []
    slopes = []
    for row in rows:
        assert (row["score"] is None) == ("a" in row["completion"])
        ref_logprobs = row["ref_logprobs"] if path else row["logprobs"]
        difference = torch.tensor(ref_logprobs) - torch.tensor(row["logprobs"])
        reward = row["score"]
        slope = torch.full_like(difference, row["advantage"])
        if script.__name__ == "grpo":
            slope -= kl_coef * (1 - difference.exp())
        elif reward is not None:
            reward += kl_coef * difference.sum().item()
        rewards.append(reward)
        slopes.append(slope)
    counts = {len(without_none(group)) for group in groups_of(rewards)}
    assert counts == {0, 1, 2, 3}, "the test needs groups with 0 to 3 scores"
    advantages = plain_advantages(script, rewards)
    assert column(rows, "advantage") == approx(advantages, rel=1e-4, abs=1e-5)
    weights = mean_weights(script.__name__, slopes)
    assert distance(plain_gradient(world.llama, rows, weights), updates[0].gradients) < 1e-5


@only("rloo")
def test_a_part_that_is_none_adds_nothing(script, run):
    """The score is the sum of the parts that are there. An episode without any has no score."""
    ran = run(script, **ONE_BATCH | dict(reward="unsure_parts", seed=3))
    rows = ran.rollouts
    for row in rows:
        count = len(row["completion"])
        assert row["reward/length"] == (0.5 * count if count > 3 else None)
        parts = without_none([row["reward/letters"], row["reward/length"]])
        assert row["score"] == (approx(sum(parts), abs=1e-5) if parts else None)
    [line] = ran.metrics
    assert line["val/num_unscored"] == column(rows, "score").count(None) > 0
    assert "reward/never" not in line
    for metric, name in (("reward/length", "reward/length"), ("objective/scores", "score")):
        expected = statistics.mean(without_none(column(rows, name)))
        assert line[metric] == approx(expected, rel=1e-5)


def test_evaluation_without_some_scores(script, run):
    """eval/scores is the mean over the completions with a score, and eval/num_unscored counts the
    others. The best of k is that of the prompts whose completions all have one."""
    flags = dict(eval_dataset=20, eval_k=2, eval_temperature=1.0, total_episodes=0)
    [line], folder = run(script, eval_reward="unsure", **flags)[1:]
    scores = column(read_jsonl(folder / "eval_rollouts.jsonl"), "score")
    best = [max(group) for group in groups_of(scores, 2) if None not in group]
    assert 0 < len(best) < 20
    assert line["eval/scores"] == approx(statistics.mean(without_none(scores)))
    assert line["eval/best_of_2"] == approx(statistics.mean(best))
    assert line["eval/num_unscored"] == scores.count(None)


@only("ppo")
def test_ppo_refuses_an_episode_without_a_score(script, run, world, updates):
    """The error names the prompt. No update of that iteration is made."""
    prompts = "|".join(map(re.escape, column(read_jsonl(world.dataset(7)), "prompt")))
    with raises(script.UsageError, match=f"'({prompts})' has no score"):
        run(script, reward="no_score", batch_size=6, num_train_epochs=2)
    assert len(updates) == 1


@mark.parametrize("flag", ["model_path", "ref_model_path"])
def test_nan_of_a_model_is_not_a_missing_score(script, run, world, tmp_path, updates, flag):
    """A broken policy or reference stops the run, in sampling or before the first update."""
    broken = shutil.copytree(world.reference, tmp_path / "broken")
    model = load_policy(broken)
    model.model.embed_tokens.weight.data[encode("=")] = math.inf
    model.save_pretrained(broken)
    with raises(RuntimeError, match="nan or inf"):
        run(script, **{flag: broken}, kl_coef=0.1)
    assert not updates
