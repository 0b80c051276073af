"""What makes RLOO, GRPO and PPO: advantages, losses, KL, score scaling, dropped updates, and their
metrics.
"""

import math
import statistics
from functools import partial

import numpy as np
import torch
from conftest import (
    MANY_EOS,
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
from plain import (
    mean_weights,
    plain_advantages,
    plain_gradient,
    row_logprobs,
    token_counts,
    without_none,
)
from pytest import approx, mark
from safetensors.torch import load_file
from torch.distributions import Categorical
from transformers import AutoModel, AutoModelForCausalLM


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
    flags = dict(model_path=path, kl_coef=0.1, reward="parts", lr_scheduler_type="constant")
    ran = run(script, batch_size=6, learning_rate=0.1, **flags)
    for line in ran.metrics:
        rows = ran.rows_of(line["iteration"])
        logprobs = mean_of(rows, "logprobs")
        kl = logprobs - mean_of(rows, "ref_logprobs")
        assert line["objective/kl"] == approx(kl, rel=1e-4, abs=1e-5)
        assert line["objective/entropy"] == approx(-logprobs, rel=1e-4)
        for name, metric in (("score", "objective/scores"), ("reward/ones", "reward/ones")):
            assert line[metric] == approx(mean_of(rows, name), rel=1e-4)
    assert abs(kl) > 0.5
    entropies = []
    for row in ran.rows_of(1):
        ids = torch.tensor([encode(row["prompt"]) + row["token_ids"]])
        logits = model(ids).logits[0, len(row["prompt"]) - 1 : -1]
        entropies += Categorical(logits=logits).entropy().tolist()
    assert ran.metrics[0]["policy/entropy_avg"] == approx(np.mean(entropies), rel=1e-4)


@mark.parametrize("kl_coef, path", [(0.0, None), (0.1, None), (0.0, "reference")])
def test_no_kl_loads_no_reference(script, run, monkeypatch, kl_coef, path):
    """At kl_coef 0 no reference is loaded, and no KL is logged, but with --ref-model-path."""
    loaded = record_calls(monkeypatch, AutoModelForCausalLM, "from_pretrained")
    ran = run(script, kl_coef=kl_coef, ref_model_path=path, total_episodes=12)
    has_reference = kl_coef > 0 or path is not None
    assert len(loaded) == 1 + has_reference
    assert ("objective/kl" in ran.metrics[0]) == has_reference
    assert (ran.rollouts[0]["ref_logprobs"] is not None) == has_reference


@mark.parametrize("case", ["rloo", "grpo", "grpo-sequence", "grpo-cispo", "ppo"])
def test_updates_are_those_of_the_textbook(case, run, world, updates):
    """The second update has ratios. Its gradient, and the metrics of both, are computed here by
    plain passes.

    The means of ratios are over what the algorithm clips, which is a token or an episode. The run
    has several micro-batches, which must change nothing."""
    name, _, kind = case.partition("-")
    flags = dict(
        per_device_train_batch_size=5,
        num_ppo_epochs=2,
        total_episodes=12,
        learning_rate=0.01,
        cliprange=0.1,
        kl_coef=0.0,
    )
    if kind == "sequence":
        flags["importance_sampling_level"] = kind
    if kind == "cispo":
        flags["loss_type"] = name = kind
    ran = run(MODULES[case.split("-")[0]], **flags)
    model = load_policy(world.llama)
    for parameter, weight in zip(model.parameters(), updates[1].weights):
        parameter.data = weight
    logprobs = []
    logratios = []
    advantages = []
    for row in ran.rollouts:
        new = plain_logprobs(model, encode(row["prompt"]), row["token_ids"])
        logratio = new - torch.tensor(row["logprobs"])
        if name == "rloo":
            logratio = logratio.sum(0, keepdim=True)
        elif kind == "sequence":
            logratio = logratio.mean(0, keepdim=True)
        logprobs.append(new)
        logratios.append(logratio)
        advantages.append(torch.tensor(row["advantage"]).expand_as(logratio))
    weights = torch.cat(mean_weights(name, list(map(torch.ones_like, logratios))))
    logratio = torch.cat(logratios)
    advantage = torch.cat(advantages)
    ratio = logratio.exp()
    clipped = ratio.clamp(0.9, 1.1)
    is_low = ratio < 0.9
    is_high = ratio > 1.1
    if name == "cispo":  # The clipped ratio is a constant.
        new = torch.cat(logprobs)
        first_losses = -advantage * (new - logratio)
        losses = -advantage * clipped.detach() * new
    else:
        is_low &= advantage < 0
        is_high &= advantage > 0
        first_losses = -advantage
        losses = torch.maximum(-advantage * ratio, -advantage * clipped)
    (weights @ losses).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    assert distance(expected, updates[1].gradients[: len(expected)]) < 1e-4
    [line] = ran.metrics

    def is_logged(name, first, second, **tolerance):
        """The first update clips nothing, and its ratios are 1."""
        assert line[name] == approx((first + second.item()) / 2, **tolerance)

    if "policy/clipfrac_low_avg" in line:
        is_logged("policy/clipfrac_low_avg", 0, is_low.float().mean())
        is_logged("policy/clipfrac_high_avg", 0, is_high.float().mean())
    share = (is_low | is_high).float().mean()
    assert 0 < share < 1
    is_logged("policy/clipfrac_avg", 0, share)
    is_logged("val/ratio", 1, ratio.mean(), rel=1e-5)
    is_logged("val/ratio_var", 0, ratio.var(correction=0), rel=1e-3)
    is_logged("policy/approxkl_avg", 0, logratio.square().mean() / 2, rel=1e-3)
    first_loss = (weights @ first_losses).item()
    is_logged("loss/policy_avg", first_loss, weights @ losses, rel=1e-3, abs=1e-5)


@one_text
def test_the_clip_cuts_where_it_helps(script):
    """By hand: a positive advantage is clipped above 1 + high, a negative one below 1 - 0.2.

    Where it is clipped, or the advantage is 0, the gradient is 0 also for a ratio of inf."""
    for advantage, logratio, high, loss, is_clipped in (
        (2.0, 0.5, 0.9, -2 * math.exp(0.5), False),
        (-2.0, -0.5, 0.9, 2 * 0.8, True),
        # Above e^88 a float32 ratio is inf. With a negative advantage it stops the run.
        (0.0, 200.0, 0.2, 0.0, False),
        (1.0, 200.0, 0.2, -1.2, True),
        (-1.0, 200.0, 0.2, math.inf, False),
    ):
        logratio = torch.tensor([logratio], requires_grad=True)
        losses, cut = script.clipped_policy_loss(logratio, torch.tensor([advantage]), 0.2, high)
        assert losses.tolist() == approx([loss])
        assert cut.tolist() == [is_clipped]
        losses.sum().backward()
        assert (logratio.grad.item() == 0) == (is_clipped or advantage == 0)


@only("rloo", "grpo")
@mark.parametrize("k", [2, 3, 7])
def test_advantages_by_hand(script, k):
    """Of some groups, without some scores. With a reward for each token, as a copy may have, the
    tokens at one place of a group's completions are compared. Equal rewards give 0, whatever their
    mean rounds to."""
    torch.manual_seed(k)
    rewards = torch.randn(8 * k, 2)
    rewards[torch.rand(8 * k) < 0.2] = math.nan
    rewards[:k] = 0.1
    rewards[k + 1 : 2 * k] = math.nan  # This group has one score.
    columns = []
    for numbers in rewards.T.tolist():
        columns.append([None if math.isnan(reward) else reward for reward in numbers])
    batch = statistics.stdev(without_none(columns[0] + columns[1]))
    deviations = {"group": statistics.stdev, "none": lambda _: 1, "batch": lambda _: batch}
    for scale, deviation in deviations.items():
        if script.__name__ == "rloo":
            advantages = partial(script.rloo_advantages, k=k)
        else:
            advantages = partial(script.grpo_advantages, k=k, scale_rewards=scale)
        expected = [plain_advantages(script, numbers, k, deviation) for numbers in columns]
        expected = torch.tensor(expected).T
        found = advantages(rewards)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        assert not found[: 2 * k].any()
        assert not advantages(rewards[k : 2 * k, :1]).any()  # a batch with one score


@only("grpo")
@mark.parametrize("level", ["token", "sequence"])
@mark.parametrize("masked", [False, True])
@mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_grpo_losses_by_plain_passes(script, run, world, updates, loss_type, masked, level):
    """The gradient of each loss type is that of plain passes. The k3 KL to another model is in it.

    Masked episodes are left out of the numerator and of the denominator, but not out of the
    statistics of their group. The ratio is 1, and there a ratio of a whole sequence gives every
    token the same share of A, as the ratio of a token does."""
    ran = run(
        script,
        loss_type=loss_type,
        mask_truncated_completions=masked,
        importance_sampling_level=level,
        kl_coef=0.3,
        ref_model_path="reference",
        model_path="many_eos",
        total_episodes=24,
        batch_size=24,
        per_device_train_batch_size=5,
    )
    rows = ran.rollouts
    advantages = plain_advantages(script, column(rows, "score"))
    assert column(rows, "advantage") == approx(advantages, abs=1e-4)
    kept = []
    slopes = []
    for row, advantage in zip(rows, advantages):
        if masked and row["token_ids"][-1] not in MANY_EOS:
            continue
        kept.append(row)
        difference = torch.tensor(row["ref_logprobs"]) - torch.tensor(row["logprobs"])
        slopes.append(advantage - 0.3 * (1 - difference.exp()))
    assert masked == (len(kept) < len(rows))
    weights = mean_weights(loss_type, slopes)
    assert distance(plain_gradient(world.many_eos, kept, weights), updates[0].gradients) < 1e-4


@only("grpo")
@mark.parametrize("kl_coef", [0.0, 0.1])
def test_grpo_with_every_completion_truncated_learns_nothing(script, run, updates, kl_coef):
    """All episodes are masked. The gradient is zero, and no metric is NaN."""
    for count in (1, 2):
        run(
            script,
            model_path="endless",
            mask_truncated_completions=True,
            num_mini_batches=count,
            num_ppo_epochs=count,
            kl_coef=kl_coef,
        )
    for update in updates:
        assert not flat(update.gradients).any()


@only("ppo")
@mark.parametrize(
    "source, whiten", [("value_model_path", False), ("reward_model_path", True), (None, False)]
)
def test_ppo_values_and_returns_by_plain_passes(
    script, run, world, updates, tmp_path, source, whiten
):
    """The value of a token is the head's output one position before it. After the last token it is
    0.

    The reward of a token is -kl_coef * KL. The last token of the completion, which is never
    padding, has the score. Without a value model, the policy's trunk gets a head of zeros.

    Bugs: trl#2596 (whitening on each process alone), #3750 (the score after the EOS; disputed
    there)."""
    path, model = save_classifier(tmp_path / "value")
    flags = {source: path}
    if source is None:
        flags = {}
        model.model = AutoModel.from_pretrained(world.pad_is_eos).eval()
        model.score.weight.data.zero_()
    ran = run(
        script,
        model_path="pad_is_eos",
        ref_model_path="reference",
        vf_coef=0.5,
        total_episodes=12,
        gamma=0.8,
        lam=0.9,
        kl_coef=0.2,
        whiten_advantages=whiten,
        per_device_train_batch_size=5,
        **flags,
    )
    rows = ran.rollouts
    lengths = token_counts(rows)
    assert min(lengths) < 6, "the test needs an episode that ended early"
    errors = 0.0
    for row, ref_logprobs in zip(rows, row_logprobs(world.reference, rows)):
        ids = torch.tensor([encode(row["prompt"]) + row["token_ids"]])
        hidden = model.model(ids).last_hidden_state[0]
        values = model.score(hidden[len(row["prompt"]) - 1 : -1]).squeeze(-1)
        numbers = values.tolist()
        assert row["values"] == approx(numbers, abs=1e-5)
        rewards = -0.2 * np.subtract(row["logprobs"], ref_logprobs)
        rewards[-1] += row["score"]
        next_value = 0.0
        advantage = 0.0
        advantages = []
        for reward, value in reversed(list(zip(rewards, numbers))):
            advantage = reward + 0.8 * next_value - value + 0.8 * 0.9 * advantage
            advantages.insert(0, advantage)
            next_value = value
        returns = np.add(advantages, numbers)
        assert row["returns"] == approx(returns, abs=1e-4)
        assert whiten or row["advantage"] == approx(advantages, abs=1e-4)
        errors += (values - torch.tensor(row["returns"])).square().sum()
    loss = 0.5 * errors / sum(lengths)
    assert ran.metrics[0]["loss/value_avg"] == approx(loss.item(), rel=1e-4)
    if whiten:  # over all tokens of the batch
        whitened = np.hstack(column(rows, "advantage"))
        assert whitened.mean() == approx(0, abs=1e-6)
        assert whitened.var() == approx(1, abs=1e-5)
    (0.5 * loss).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    # The last one is that of the head's bias.
    found = updates[0].gradients[-len(expected) - 1 : -1]
    assert distance(expected, found) < 1e-5


@only("ppo")
def test_ppo_writes_its_value_model(script, run, refuses, tmp_path):
    """--value-model-path takes the folder value_model/ of a run: the next run begins with the
    values it ended with. A model that reads other tokens is refused."""

    def value_model_of_run(**changed):
        flags = dict(learning_rate=0.01, kl_coef=0.0, total_episodes=12)
        return run(script, **flags | changed).folder / "value_model"

    first = value_model_of_run()
    second = value_model_of_run(
        model_path=first.parent / "model", value_model_path=first, learning_rate=0.0
    )
    weights = load_file(first / "model.safetensors")
    same = load_file(second / "model.safetensors")
    assert weights.keys() == same.keys()
    assert flat(weights.values()).equal(flat(same.values()))
    assert weights["score.bias"].abs() > 1e-4
    assert not value_model_of_run(lora_r=2).exists()
    other = save_model(tmp_path / "other")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens("x")
    tokenizer.save_pretrained(other)
    refuses(script, "--value-model-path must have the vocabulary", value_model_path=other)


@only("ppo")
def test_ppo_value_loss_is_clipped_around_the_old_value(script):
    """0.5 * max((v - G)^2, (v_clipped - G)^2), by hand."""
    values = torch.tensor([1.0, 1.0, 0.1, -1.0])
    returns = torch.tensor([2.0, 0.5, 0.0, 0.0])
    losses, cut = script.clipped_value_loss(values, torch.zeros(4), returns, 0.2)
    assert losses.tolist() == approx([0.5 * 1.8**2, 0.5 * 0.5**2, 0.5 * 0.1**2, 0.5])
    assert cut.tolist() == [True, False, False, False]
    torch.manual_seed(1)
    values, old = 0.05 * torch.randn(2, 1000)
    _, cut = script.clipped_value_loss(values, old, returns[0], 1.0)
    assert not cut.any()  # Rounding decides nothing.


@only("ppo")
@mark.parametrize("target", [0.001, 1000.0])
def test_ppo_adapts_the_kl_coefficient(script, run, target):
    """After each iteration kl_coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon."""
    ran = run(
        script,
        adaptive_kl=True,
        kl_coef=0.2,
        kl_target=target,
        kl_horizon=50,
        ref_model_path="reference",
        num_train_epochs=5,
        gamma=1.0,
        lam=1.0,
    )
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

    flags = dict(score_norm=bool(norm), score_scaling=bool(scaling))
    raw = scores_of("letters")
    for i, after in enumerate(scores_of("letters", score_clip=limit, **flags)):
        so_far = raw[: i - i % 3 + 3]
        expected = raw[i] - norm * statistics.mean(so_far)
        if scaling:
            expected /= statistics.pstdev(so_far)
        assert after == approx(min(max(expected, -limit), limit), rel=1e-4, abs=1e-5)
    assert set(scores_of("five", **flags)) == {0.0 if norm else 5.0}
    small = np.array(scores_of("tiny", **flags))
    assert small * (1 if scaling else 1e9) == approx(scores_of("number", **flags), rel=1e-4)


@only("ppo")
def test_ppo_whitens_rewards_without_moving_their_mean(script, run):
    """--whiten-rewards divides each token's distance from their mean by their population
    deviation."""
    rewards = {False: [], True: []}
    for whiten in rewards:
        ran = run(
            script,
            whiten_rewards=whiten,
            gamma=1.0,
            lam=1.0,
            kl_coef=0.2,
            ref_model_path="reference",
            total_episodes=12,
        )
        for returns in column(ran.rollouts, "returns"):
            # A return is the sum of the rewards to come.
            rewards[whiten].extend(-np.diff(returns, append=0.0))
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
    ran = run(
        script,
        num_ppo_epochs=3,
        num_mini_batches=2,
        learning_rate=0.01,
        num_train_epochs=3,
        per_device_train_batch_size=2,
        **{flag: 1e-9},
    )
    steps = 6
    taken = flag == "target_kl"  # The first has a KL of 0 and a ratio of 1.
    rates = np.linspace(0.01, 0, steps * len(ran.metrics), endpoint=False)
    if taken:
        assert [update.lr for update in updates] == approx(rates[::steps])
    else:
        assert not updates
    for iteration, line in enumerate(ran.metrics, start=1):
        assert line["step"] == steps * iteration
        assert line["policy/skipped_updates"] == steps - taken
        assert line["lr"] == approx(rates[line["step"] - 1])
        assert ("grad_norm" in line) == taken
