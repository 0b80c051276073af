"""What makes RLOO, GRPO and PPO: advantages, losses, KL, score scaling, dropped updates, and their
metrics.
"""

import math
import statistics

import numpy as np
import torch
from conftest import (
    MODULES,
    column,
    distance,
    encode,
    flat,
    load_policy,
    make_tokenizer,
    one_text,
    only,
    plain_logprobs,
    record_calls,
    save_classifier,
    save_model,
)
from plain import groups_of, plain_advantages, row_logprobs, token_counts, without_none
from pytest import approx, mark
from safetensors.torch import load_file
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM


def mean_of(rows, name):
    """The mean over rows. A row's numbers of tokens are added first."""
    return np.mean([np.sum(value) for value in column(rows, name)])


def test_metrics_of_the_rollout_are_those_of_its_episodes(script, run, tmp_path):
    """KL, entropy and scores in metrics.jsonl are those of the rollouts, without padding. A token
    of probability 0 adds 0 to -sum p log p, and not nan.

    Bug: trl PPOv2 (padding in the metrics)."""
    path = save_model(tmp_path / "policy", "phi")
    model = load_policy(path)
    model.lm_head.bias.data[[3, 7]] = -math.inf
    model.save_pretrained(path)
    flags = dict(model_path=path, kl_coef=0.1, reward="parts", ref_model_path="reference")
    ran = run(script, **flags)
    first, *_ = ran.metrics
    rows = ran.rows_of(1)
    logprobs = mean_of(rows, "logprobs")
    kl = logprobs - mean_of(rows, "ref_logprobs")
    entropies = []
    for row in rows:
        ids = torch.tensor([encode(row["prompt"]) + row["token_ids"]])
        logits = model(ids).logits[0, len(row["prompt"]) - 1 : -1]
        entropies += Categorical(logits=logits).entropy().tolist()
    for metric, expected in {
        "objective/kl": kl,
        "objective/entropy": -logprobs,
        "objective/scores": mean_of(rows, "score"),
        "reward/ones": mean_of(rows, "reward/ones"),
        "policy/entropy_avg": np.mean(entropies),
    }.items():
        assert first[metric] == approx(expected, rel=1e-4), metric


@mark.parametrize("kl_coef, path, count", [(0.0, None, 1), (0.1, None, 2), (0.0, "reference", 2)])
def test_no_kl_loads_no_reference(script, run, monkeypatch, kl_coef, path, count):
    """At kl_coef 0 no reference is loaded, and no KL is logged, but with --ref-model-path."""
    loaded = record_calls(monkeypatch, AutoModelForCausalLM, "from_pretrained")
    ran = run(script, kl_coef=kl_coef, ref_model_path=path, total_episodes=12)
    assert len(loaded) == count
    assert ("objective/kl" in ran.metrics[0]) == (count == 2)


# A script, and its flags.
SEQUENCE = dict(importance_sampling_level="sequence")
MASKED = dict(mask_truncated_completions=True)
UPDATES = {
    "rloo": {},
    "grpo": dict(cliprange_high=0.05, scale_rewards="batch"),
    "grpo sequence": SEQUENCE | MASKED,
    "grpo dapo": dict(loss_type="dapo", scale_rewards="none"),
    "grpo dr_grpo": dict(loss_type="dr_grpo") | MASKED,
    "grpo dr_grpo sequence": dict(loss_type="dr_grpo") | SEQUENCE,
    "grpo cispo": dict(loss_type="cispo") | MASKED,
    "grpo cispo sequence": dict(loss_type="cispo") | SEQUENCE,
    "ppo": dict(reward="letters"),
}


def textbook_advantages(script, args, rows):
    """Of RLOO and GRPO. RLOO's KL is a part of the reward."""
    rewards = column(rows, "score")
    if script.__name__ == "rloo":
        for i, row in enumerate(rows):
            if rewards[i] is not None:
                rewards[i] -= args.kl_coef * (sum(row["logprobs"]) - sum(row["ref_logprobs"]))
        return plain_advantages(script, rewards)
    of_batch = statistics.stdev(without_none(rewards))
    deviations = dict(group=statistics.stdev, batch=lambda _: of_batch, none=lambda _: 1)
    return plain_advantages(script, rewards, deviation=deviations[args.scale_rewards])


def textbook_update(name, flags, rows, model):
    """The loss of one update, its ratios, and where they are clipped, by plain passes of an episode
    at a time. A ratio is that of a token, or of an episode.

    GRPO's KL is a part of the loss. Masked episodes do not count in any denominator."""
    loss_type = flags.get("loss_type", name)
    if flags.get("mask_truncated_completions"):
        rows = [row for row in rows if row["ended"]]
    loss = 0.0
    ratios = []
    cuts = []
    for row in rows:
        logprobs = plain_logprobs(model, encode(row["prompt"]), row["token_ids"])
        advantage = torch.tensor(row["advantage"])
        logratio = logprobs - torch.tensor(row["logprobs"])
        if name == "rloo":
            logratio = logratio.sum(0, keepdim=True)
        if flags.get("importance_sampling_level") == "sequence":
            logratio = logratio.mean(0, keepdim=True)
        ratio = logratio.exp()
        clipped = ratio.clamp(0.9, 1 + (flags.get("cliprange_high") or 0.1))
        cut = clipped != ratio
        if loss_type == "cispo":  # The clipped ratio is a constant.
            losses = -advantage * clipped.detach() * logprobs
        else:
            losses = torch.maximum(-advantage * ratio, -advantage * clipped)
            cut &= (ratio - 1) * advantage > 0
        if name == "grpo":
            difference = torch.tensor(row["ref_logprobs"]) - logprobs
            losses = losses + 0.3 * (difference.exp() - difference - 1)
        denominators = dict(grpo=len(logprobs) * len(rows), dr_grpo=6 * len(rows), rloo=len(rows))
        all_tokens = sum(token_counts(rows))  # of dapo, cispo and ppo
        loss = loss + losses.sum() / denominators.get(loss_type, all_tokens)
        if name != "rloo" or row["advantage"] != 0:  # RLOO makes no pass without a gradient.
            ratios.append(ratio)
            cuts.append(cut)
    return loss, torch.cat(ratios), torch.cat(cuts)


@mark.parametrize("case", UPDATES)
def test_updates_are_those_of_the_textbook(case, run, world, updates):
    """The gradients of two updates of a batch, and the mean of their metrics. In the second one the
    ratios are not 1. Some episodes have no score, and some are cut off. There are several
    micro-batches, which must change nothing."""
    name = case.split()[0]
    script = MODULES[name]
    flags = dict(kl_coef=0.3, ref_model_path="reference", cliprange=0.1, learning_rate=0.01)
    flags |= dict(batch_size=24, total_episodes=24, num_ppo_epochs=2, seed=5, reward="unsure")
    ran = run(script, per_device_train_batch_size=5, **flags | UPDATES[case])
    rows = ran.rollouts
    assert len(set(column(rows, "ended"))) == 2, "the test needs completions that are cut off"
    if name != "ppo":
        expected = textbook_advantages(script, ran.args, rows)
        assert column(rows, "advantage") == approx(expected, rel=2e-4, abs=1e-4)
        counts = {len(without_none(group)) for group in groups_of(column(rows, "score"))}
        assert counts == {0, 1, 2, 3}, "the test needs groups with 0 to 3 scores"
    model = load_policy(world.llama)
    found = []
    for update in updates:
        for parameter, weight in zip(model.parameters(), update.weights):
            parameter.data = weight
        loss, ratio, cut = textbook_update(name, vars(ran.args), rows, model)
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        assert distance(gradient, update.gradients[: len(gradient)]) < 1e-4
        metrics = {
            "loss/policy_avg": loss,
            "policy/approxkl_avg": ratio.log().square().mean() / 2,
            "policy/clipfrac_avg": cut.float().mean(),
            "val/ratio": ratio.mean(),
            "val/ratio_var": ratio.var(correction=0),
        }
        if name == "grpo":
            metrics["policy/clipfrac_low_avg"] = (cut & (ratio < 1)).float().mean()
            metrics["policy/clipfrac_high_avg"] = (cut & (ratio > 1)).float().mean()
        found.append(metrics)
    assert 0 < cut.sum() < len(cut)
    for metric in found[0]:
        expected = np.mean([metrics[metric].item() for metrics in found])
        assert ran.metrics[0][metric] == approx(expected, rel=1e-3, abs=1e-5), metric


@one_text
@mark.parametrize(
    "advantage, loss, is_clipped", [(0.0, 0.0, False), (1.0, -1.2, True), (-1.0, math.inf, False)]
)
def test_a_ratio_of_inf(script, advantage, loss, is_clipped):
    """Above e^88 a float32 ratio is inf. Where it is clipped, or the advantage is 0, its gradient
    is 0, and not nan. With a negative advantage it stops the run."""
    logratio = torch.tensor([200.0], requires_grad=True)
    losses, cut = script.clipped_policy_loss(logratio, torch.tensor([advantage]), 0.2, 0.2)
    losses.sum().backward()
    assert (losses.item(), cut.item()) == (approx(loss), is_clipped)
    assert (logratio.grad.item() == 0) == (advantage >= 0)


@only("rloo", "grpo")
def test_equal_rewards_give_no_advantage(script):
    """Whatever their mean rounds to. So does a single score. With a reward for each token, as a
    copy may have, the tokens at one place of a group's completions are compared."""
    torch.manual_seed(1)
    rewards = torch.randn(12, 2)
    rewards[:3] = 0.1
    rewards[4:6] = math.nan  # This group has one score.
    for scale in [()] if script.__name__ == "rloo" else [("group",), ("none",), ("batch",)]:

        def advantages(rewards):
            return getattr(script, f"{script.__name__}_advantages")(rewards, 3, *scale)

        found = advantages(rewards)
        assert found[6:].all() and not found[:6].any()
        assert not advantages(rewards[3:6, :1]).any()  # a batch with one score
        if scale != ("batch",):
            torch.testing.assert_close(found[:, :1], advantages(rewards[:, :1]))


@only("grpo")
def test_grpo_with_every_completion_truncated_learns_nothing(script, run, updates):
    """All episodes are masked. The gradient is zero, and no metric is NaN."""
    flags = dict(model_path="endless", num_mini_batches=2, num_ppo_epochs=2, kl_coef=0.1)
    run(script, mask_truncated_completions=True, **flags)
    for update in updates:
        assert not flat(update.gradients).any()


@only("ppo")
@mark.parametrize("source", ["value_model_path", "reward_model_path"])
def test_ppo_values_and_returns_by_plain_passes(script, run, world, updates, tmp_path, source):
    """The value of a token is the head's output one position before it. After the last token it is
    0. The reward of a token is -kl_coef * KL. The last token of the completion, which is never
    padding, has the score. Advantages are whitened over all tokens of the batch, after the returns.

    Bugs: trl#2596 (whitening on each process alone), #3750 (the score after the EOS; disputed
    there)."""
    path, model = save_classifier(tmp_path / "value")
    flags = {source: path, "model_path": "pad_is_eos", "ref_model_path": "reference"}
    flags |= dict(kl_coef=0.2, gamma=0.8, lam=0.9, vf_coef=0.5, total_episodes=12)
    ran = run(script, per_device_train_batch_size=5, **flags)
    rows = ran.rollouts
    lengths = token_counts(rows)
    assert min(lengths) < 6, "the test needs an episode that ended early"
    advantages = []
    errors = 0.0
    for row, ref_logprobs in zip(rows, row_logprobs(world.reference, rows)):
        ids = torch.tensor([encode(row["prompt"]) + row["token_ids"]])
        hidden = model.model(ids).last_hidden_state[0]
        values = model.score(hidden[len(row["prompt"]) - 1 : -1]).squeeze(-1)
        errors += (values - torch.tensor(row["returns"])).square().sum()
        values = values.detach().numpy()
        assert row["values"] == approx(values, abs=1e-5)
        rewards = -0.2 * np.subtract(row["logprobs"], ref_logprobs)
        rewards[-1] += row["score"]
        deltas = rewards + 0.8 * np.append(values[1:], 0.0) - values
        own = []
        for t in range(len(deltas)):
            own.append(sum(0.72**n * delta for n, delta in enumerate(deltas[t:])))
        assert row["returns"] == approx(own + values, abs=1e-4)
        advantages += own
    expected = (advantages - np.mean(advantages)) / np.std(advantages)
    assert np.hstack(column(rows, "advantage")) == approx(expected, abs=1e-4)
    loss = 0.5 * errors / sum(lengths)
    assert ran.metrics[0]["loss/value_avg"] == approx(loss.item(), rel=1e-4)
    gradient = torch.autograd.grad(0.5 * loss, list(model.parameters()))
    # The last one is that of the head's bias.
    assert distance(gradient, updates[0].gradients[-len(gradient) - 1 : -1]) < 1e-5


@only("ppo")
def test_ppo_writes_its_value_model(script, run, refuses, tmp_path):
    """--value-model-path takes the folder value_model/ of a run: the next run begins with the
    values it ended with. A model that reads other tokens is refused."""
    flags = dict(kl_coef=0.0, total_episodes=12)
    first = run(script, **flags).folder
    flags |= dict(model_path=first / "model", value_model_path=first / "value_model")
    second = run(script, learning_rate=0.0, **flags).folder
    before = load_file(first / "value_model/model.safetensors")
    after = load_file(second / "value_model/model.safetensors")
    assert flat(before.values()).equal(flat(after.values()))
    assert before["score.bias"].abs() > 1e-4
    assert not (run(script, lora_r=2, total_episodes=12).folder / "value_model").exists()
    tokenizer = make_tokenizer()
    tokenizer.add_tokens("x")
    other = save_model(tmp_path / "other", tokenizer=tokenizer)
    refuses(script, "--value-model-path must have the vocabulary", value_model_path=other)


@only("ppo")
def test_ppo_value_loss_is_clipped_around_the_old_value(script):
    """0.5 * max((v - G)^2, (v_clipped - G)^2), by hand."""
    values = torch.tensor([1.0, 1.0, 0.1, -1.0])
    returns = torch.tensor([2.0, 0.5, 0.0, 0.0])
    losses, cut = script.clipped_value_loss(values, torch.zeros(4), returns, 0.2)
    assert losses.tolist() == approx([0.5 * 1.8**2, 0.5 * 0.5**2, 0.5 * 0.1**2, 0.5])
    assert cut.tolist() == [True, False, False, False]


# Then a return is the sum of the rewards to come.
SUMS = dict(gamma=1.0, lam=1.0, kl_coef=0.2, ref_model_path="reference")


@only("ppo")
@mark.parametrize("target", [0.001, 1000.0])
def test_ppo_adapts_the_kl_coefficient(script, run, target):
    """After each iteration kl_coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon."""
    flags = dict(adaptive_kl=True, kl_target=target, kl_horizon=50, num_train_epochs=5)
    ran = run(script, **flags, **SUMS)
    coefficient = 0.2
    for line in ran.metrics:
        assert line["objective/kl_coef"] == approx(coefficient, rel=1e-6)
        penalty = -coefficient * line["objective/kl"]
        assert line["objective/non_score_reward"] == approx(penalty, rel=1e-4)
        rows = ran.rows_of(line["iteration"])
        returns = np.mean([row["returns"][0] for row in rows])
        assert returns == approx(line["objective/scores"] + penalty, rel=1e-4, abs=1e-4)
        error = min(max(line["objective/kl"] / target - 1, -0.2), 0.2)
        coefficient *= 1 + error * len(rows) / 50
    assert abs(coefficient - 0.2) > 0.01


@only("ppo")
@mark.parametrize("norm, scaling, limit", [(1, 0, 99.0), (0, 1, 99.0), (1, 1, 0.5)])
def test_ppo_scales_scores_by_all_scores_so_far(script, run, norm, scaling, limit):
    """--score-norm subtracts the mean of all scores so far. --score-scaling divides by their
    deviation. Then --score-clip clips. Where all scores are 5, nothing is divided by a rounding
    error. Scores that are small without being equal are scaled as others are."""

    def scores_of(reward, **flags):
        """The learning rate 0 gives all runs the same episodes."""
        rows = run(script, reward=reward, learning_rate=0.0, batch_size=3, **flags).rollouts
        return column(rows, "score")

    flags = dict(score_norm=bool(norm), score_scaling=bool(scaling), score_clip=limit)
    raw = scores_of("letters")
    for i, after in enumerate(scores_of("letters", **flags)):
        so_far = raw[: i - i % 3 + 3]
        expected = raw[i] - norm * statistics.mean(so_far)
        if scaling:
            expected /= statistics.pstdev(so_far)
        assert after == approx(min(max(expected, -limit), limit), rel=1e-4, abs=1e-5)
    assert set(scores_of("five", **flags)) == {0.0 if norm else 5.0}
    if scaling:
        assert scores_of("tiny", **flags) == approx(scores_of("number", **flags), rel=1e-4)


@only("ppo")
def test_ppo_whitens_rewards_without_moving_their_mean(script, run):
    """--whiten-rewards divides each token's distance from their mean by their population
    deviation."""
    rewards = {}
    for whiten in (False, True):
        rows = run(script, whiten_rewards=whiten, total_episodes=12, **SUMS).rollouts
        rewards[whiten] = -np.hstack([np.diff(row["returns"], append=0.0) for row in rows])
    mean = np.mean(rewards[False])
    expected = (rewards[False] - mean) / np.std(rewards[False]) + mean
    assert rewards[True] == approx(expected, rel=1e-4, abs=1e-5)
    for count in range(3, 400):  # Equal entries are 0. In float32 the mean of some counts is not.
        assert not script.whiten(torch.full((count,), 1000.1)).any()


@only("ppo")
@mark.parametrize("flag", ["target_kl", "ratio_threshold"])
def test_ppo_counts_dropped_updates(script, run, updates, flag):
    """--target-kl ends the updates of an iteration. --ratio-threshold drops each update whose ratio
    is above it.

    Dropped updates never reach the optimizer. They still count in `step`, in the schedule and in
    the log. This holds also for the first update of a run."""
    flags = dict(num_ppo_epochs=3, num_mini_batches=2, num_train_epochs=3, learning_rate=0.01)
    ran = run(script, per_device_train_batch_size=2, **flags, **{flag: 1e-9})
    taken = flag == "target_kl"  # The first has a KL of 0 and a ratio of 1.
    rates = np.linspace(0.01, 0, 6 * len(ran.metrics), endpoint=False)
    assert [update.lr for update in updates] == approx(rates[::6] if taken else [])
    for iteration, line in enumerate(ran.metrics, start=1):
        assert line["step"] == 6 * iteration
        assert line["policy/skipped_updates"] == 6 - taken
        assert line["lr"] == approx(rates[line["step"] - 1])
        assert ("grad_norm" in line) == taken
