"""What makes RLOO, GRPO and PPO: advantages, losses, KL, score scaling, dropped updates, and their metrics."""

import math
import statistics

import numpy as np
import pytest
import torch
from conftest import (
    MANY_EOS,
    MODULES,
    changed_copy,
    distance,
    encode,
    flat,
    import_file,
    one_text,
    only,
    record_calls,
    save_classifier,
    save_model,
)
from plain import DENOMINATORS, plain_gradient, row_logprobs
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM


def test_metrics_of_the_rollout_are_those_of_its_episodes(script, run, world):
    """KL, entropy, scores, and groups of equal scores in metrics.jsonl are those of rollouts.jsonl, without padding."""
    flags = dict(ref_model_path=world.reference, kl_coef=0.1, reward=world.reward("seldom"))
    ran = run(script, **flags, dataset=world.dataset(16), batch_size=24)
    rows = ran.rollouts
    for line in ran.metrics:
        episodes = [row for row in rows if row["iteration"] == line["iteration"]]
        kl = np.mean([sum(row["logprobs"]) - sum(row["ref_logprobs"]) for row in episodes])
        assert line["objective/kl"] == pytest.approx(kl, rel=1e-4) and abs(kl) > 0.5
        assert line["objective/entropy"] == pytest.approx(np.mean([-sum(r["logprobs"]) for r in episodes]), rel=1e-4)
        assert line["objective/scores"] == pytest.approx(np.mean([row["score"] for row in episodes]), rel=1e-4)
        if script.__name__ == "ppo":
            assert line["objective/non_score_reward"] == pytest.approx(-0.1 * line["objective/kl"], rel=1e-5)
        if script.__name__ == "grpo":
            groups = [{row["score"] for row in episodes[i : i + 3]} for i in range(0, len(episodes), 3)]
            share = np.mean([len(scores) == 1 for scores in groups])
            assert line["group/equal_scores_fraction"] == pytest.approx(share) and 0 < share < 1
    model = AutoModelForCausalLM.from_pretrained(world.llama).eval()
    entropies = []
    for row in rows[:24]:
        with torch.no_grad():
            logits = model(torch.tensor([encode(row["prompt"]) + row["token_ids"]])).logits[0]
        logprobs = logits.log_softmax(-1)[len(row["prompt"]) - 1 : -1]
        entropies += (-(logprobs.exp() * logprobs).sum(-1)).tolist()
    assert ran.metrics[0]["policy/entropy_avg"] == pytest.approx(np.mean(entropies), rel=1e-4)


def test_no_kl_loads_no_reference(script, run, world, monkeypatch):
    """At kl_coef 0 no reference is loaded, and no KL is logged. With --ref-model-path both happen all the same."""
    loaded = record_calls(monkeypatch, script, "load_model")
    for kl_coef, path, expected in ((0.0, None, 0), (0.1, None, 1), (0.0, world.reference, 1)):
        loaded.clear()
        ran = run(script, kl_coef=kl_coef, ref_model_path=path, total_episodes=12)
        assert len(loaded) == (2 if script.__name__ == "ppo" else 1) + expected
        assert ("objective/kl" in ran.metrics[0]) == bool(expected)
        assert (ran.rollouts[0]["ref_logprobs"] is not None) == bool(expected)


LEVELS = [("rloo", {}), ("grpo", {}), ("grpo", dict(importance_sampling_level="sequence")), ("ppo", {})]


@pytest.mark.parametrize("name, level", LEVELS, ids=["rloo", "grpo", "grpo-sequence", "ppo"])
def test_metrics_of_updates_are_those_of_the_textbook(name, level, run, world, updates):
    """Ratio, its variance, approximate KL, clip fraction and loss are computed here, by plain passes.

    The passes use the weights that the second update had. The means are over what the algorithm clips, which is a
    token or an episode. The run has several micro-batches, which must change nothing."""
    flags = dict(num_ppo_epochs=2, total_episodes=12, learning_rate=0.01, cliprange=0.1, kl_coef=0.0)
    ran = run(MODULES[name], per_device_train_batch_size=5, **flags, **level)
    [line], rows = ran.metrics, ran.rollouts
    units, losses = [], []  # (log-ratio, advantage) of each unit; what the mean over the mini-batch is made of
    for row, new in zip(rows, row_logprobs(world.llama, rows, weights=updates[1].weights)):
        logratio, advantage = np.subtract(new, row["logprobs"]), row["advantage"]
        if name == "rloo":
            logratio = [sum(logratio)]
        elif level:
            logratio = [np.mean(logratio)]
        pairs = list(zip(logratio, advantage if name == "ppo" else [advantage] * len(logratio), strict=True))
        units += pairs
        cut = [max(-a * math.exp(d), -a * min(max(math.exp(d), 0.9), 1.1)) for d, a in pairs]
        losses += cut if name == "ppo" else [np.mean(cut)]
    ratios, advantages = np.exp([d for d, _ in units]), np.array([a for _, a in units])
    is_cut = (advantages > 0) & (ratios > 1.1) | (advantages < 0) & (ratios < 0.9)
    assert is_cut.any() and not is_cut.all()
    if name == "grpo":
        second = {"low": (is_cut & (advantages < 0)).mean(), "high": (is_cut & (advantages > 0)).mean()}
        assert line["policy/clipfrac_low_avg"] == pytest.approx(second["low"] / 2)
        assert line["policy/clipfrac_high_avg"] == pytest.approx(second["high"] / 2)
    first = -np.mean(advantages if name != "grpo" else [row["advantage"] for row in rows])
    assert line["val/ratio"] == pytest.approx((1 + ratios.mean()) / 2, rel=1e-5)
    assert line["val/ratio_var"] == pytest.approx(ratios.var() / 2, rel=1e-3)
    assert line["policy/approxkl_avg"] == pytest.approx(np.square(np.log(ratios)).mean() / 4, rel=1e-3)
    assert line["policy/clipfrac_avg"] == pytest.approx(is_cut.mean() / 2)
    assert line["loss/policy_avg"] == pytest.approx((first + np.mean(losses)) / 2, rel=1e-3, abs=1e-5)


def test_the_clip_cuts_where_it_helps(script):
    """By hand: a positive advantage is clipped above 1 + high, a negative one below 1 - low. Each has its own limit.

    Above e^88 a float32 ratio is inf. Where it is clipped, or the advantage is 0, its gradient is 0 all the same. With
    a negative advantage the loss is inf, and its gradient stops the run."""
    logratio, advantages = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1]), torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    losses, cut = script.clipped_policy_loss(logratio, advantages, 0.2, 0.2)
    expected = [-2 * 1.2, 2 * math.exp(0.5), -2 * math.exp(-0.5), 2 * 0.8, -2 * math.exp(0.1)]
    assert losses.tolist() == pytest.approx(expected) and cut.tolist() == [True, False, False, True, False]
    losses, cut = script.clipped_policy_loss(logratio, advantages, 0.2, 0.9)
    assert losses.tolist() == pytest.approx([-2 * math.exp(0.5), *expected[1:]])
    assert cut.tolist() == [False, False, False, True, False]
    logratio = torch.full((2,), 200.0, requires_grad=True)
    losses, cut = script.clipped_policy_loss(logratio, torch.tensor([0.0, 1.0]), 0.2, 0.2)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([0.0, -1.2]) and cut.tolist() == [False, True]
    assert logratio.grad.tolist() == [0.0, 0.0]
    assert script.clipped_policy_loss(logratio, -torch.ones(2), 0.2, 0.2)[0].tolist() == [math.inf] * 2


@only("rloo")
def test_rloo_advantages_by_hand(script):
    """Rewards 1, 2, 5, 8 and 2, 3, 6, 9; 3 right answers of 8; random rewards by a brute-force loop."""
    advantages = script.rloo_advantages(torch.tensor([1.0, 2, 5, 8, 2, 3, 6, 9]), 4)
    assert advantages.tolist() == pytest.approx([-4, -8 / 3, 4 / 3, 16 / 3, -4, -8 / 3, 4 / 3, 16 / 3])
    right = script.rloo_advantages(torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0]), 8)
    assert right.tolist() == pytest.approx([0.7143] * 3 + [-0.4286] * 5, abs=1e-4)
    for k in (2, 3, 7):
        rewards = torch.randn(4 * k, generator=torch.Generator().manual_seed(k))
        expected = []
        for i in range(4 * k):
            others = [rewards[j].item() for j in range(4 * k) if j // k == i // k and j != i]
            expected.append(rewards[i].item() - sum(others) / len(others))
        advantages = script.rloo_advantages(rewards, k)
        assert advantages.tolist() == pytest.approx(expected, abs=1e-5)
        assert advantages.view(4, k).sum(1).abs().max() < 1e-5
    assert script.rloo_advantages(torch.tensor([0.1] * 7), 7).tolist() == [0.0] * 7  # whatever a mean rounds to


@only("rloo", "grpo")
def test_advantages_of_tokens_are_those_of_their_column(script):
    """With a reward for each token, the tokens at one place of a group's completions are compared. One has no score."""
    rewards = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))  # as many episodes as tokens
    rewards[1] = math.nan
    rewards[:3, 2] = rewards[3:, 4] = 0.1  # equal
    for more in [("group",), ("none",)] if script.__name__ == "grpo" else [()]:
        of = getattr(script, f"{script.__name__}_advantages")
        found, *columns = (of(part, 3, *more) for part in (rewards, *rewards.split(1, 1)))
        assert torch.equal(found, torch.cat(columns, 1)) and (found == 0).sum() == 6 + 2 + 3


@only("rloo")
@pytest.mark.parametrize("response_length", [6, 12])  # 12 is the batch size
def test_a_reward_for_each_token(script, run, world, updates, tmp_path, response_length):
    """The change that the docstring's table describes: advantages, loss and gradient are those of a plain computation.

    A token's reward is its id. What follows it in the completion is added to it."""
    copy = changed_copy(script, tmp_path, "(logprobs - old_logprobs).sum(1, keepdim=True)", "logprobs - old_logprobs")
    to_go = "(batch.tokens * batch.mask).double().flip(1).cumsum(1).flip(1)"
    copy = changed_copy(copy, tmp_path / "copy", "rewards = scores[:, None]", f"rewards = {to_go}")
    flags = dict(kl_coef=0.0, total_episodes=12, response_length=response_length, per_device_train_batch_size=5)
    flags |= dict(model_path=world.many_eos)
    ran = run(import_file(copy.__file__), **flags)
    rows, weights = ran.rollouts, []
    to_go = [np.cumsum(row["token_ids"][::-1])[::-1].tolist() + [0] * 12 for row in rows]
    for i, row in enumerate(rows):
        others = [to_go[j] for j in range(i - i % 3, i - i % 3 + 3) if j != i]
        expected = [own - (a + b) / 2 for own, a, b in zip(to_go[i], *others)][: len(row["token_ids"])]
        assert row["advantage"] == pytest.approx(expected, abs=1e-4)
        weights.append(torch.tensor(expected) / 12)
    assert len({len(row["token_ids"]) for row in rows}) > 2
    assert ran.metrics[0]["loss/policy_avg"] == pytest.approx(-sum(flat(weights)).item(), rel=1e-5)
    assert distance(plain_gradient(ran.args.model_path, rows, weights), updates[0].gradients) < 1e-5


@one_text
def test_metrics_of_ratios_leave_padding_out(script):
    """By hand, with a ratio for each token. With one ratio for a completion each counts once."""
    logratio, mask = torch.tensor([[0.5, 0.0], [-0.1, 0.3]]), torch.tensor([[True, False], [True, True]])
    for columns, counted, share in ((2, [0.5, -0.1, 0.3], 1 / 3), (1, [0.5, -0.1], 1 / 2)):
        given = logratio[:, :columns]
        found = {name: float(x) for name, x in script.ratio_metrics(given, given > 0.4, mask).items()}
        ratios, squares = np.exp(counted), np.square(counted)
        expected = {"val/ratio": ratios.mean(), "val/ratio_var": ratios.var(), "policy/clipfrac_avg": share}
        assert found == pytest.approx(expected | {"policy/approxkl_avg": squares.mean() / 2})


@only("rloo")
def test_large_scores_are_whitened(script, run, monkeypatch):
    """The square of a score of 1e20 is no float32."""
    large = [0.0, 1e20, 2e20]
    monkeypatch.setattr(script, "load_reward", lambda *_: lambda prompts, **_: large * (len(prompts) // 3))
    ran = run(script, whiten_advantages=True, total_episodes=12)  # with a KL, rewards are float32
    assert [row["advantage"] for row in ran.rollouts] == pytest.approx([-(1.5**0.5), 0, 1.5**0.5] * 4)
    assert 0 < ran.metrics[0]["grad_norm"] < math.inf


@only("grpo")
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_grpo_losses_by_plain_passes(script, run, world, updates, loss_type, masked, level):
    """The gradient of each loss type is that of plain passes. The k3 KL to another model is in the loss.

    Masked episodes are left out of the numerator and of the denominator. The ratio is 1, and there a ratio of a whole
    sequence gives every token the same share of A, as the ratio of a token does."""
    flags = dict(loss_type=loss_type, mask_truncated_completions=masked, kl_coef=0.3, ref_model_path=world.reference)
    flags |= dict(model_path=world.many_eos, total_episodes=24, batch_size=24, importance_sampling_level=level)
    rows = run(script, **flags, per_device_train_batch_size=5).rollouts
    for group in (rows[i : i + 3] for i in range(0, 24, 3)):  # statistics of all scores, masked or not
        mean, deviation = (f([row["score"] for row in group]) for f in (statistics.mean, statistics.stdev))
        for row in group:
            assert row["advantage"] == pytest.approx((row["score"] - mean) / (deviation + 1e-4), abs=1e-4)
    kept = [row for row in rows if not masked or row["token_ids"][-1] in MANY_EOS]
    assert masked == (len(kept) < len(rows))
    all_tokens = sum(len(row["token_ids"]) for row in kept)
    weights = []
    for row in kept:
        tokens = len(row["token_ids"])
        difference = torch.tensor(row["ref_logprobs"]) - torch.tensor(row["logprobs"])
        kl_slope = 0.3 * (1 - difference.exp())
        spread = torch.full((tokens,), row["advantage"])
        weights.append((spread - kl_slope) / DENOMINATORS[loss_type](tokens, all_tokens, len(kept), 6))
    assert distance(plain_gradient(world.many_eos, kept, weights), updates[0].gradients) < 1e-4


@only("grpo")
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_grpo_with_every_completion_truncated_learns_nothing(script, run, monkeypatch, updates, kl_coef):
    """All episodes are masked. The gradient is zero, and no metric is NaN."""
    monkeypatch.setattr(script, "find_eos_ids", lambda *_: [])
    for flags in ({}, dict(num_mini_batches=2, num_ppo_epochs=2)):
        metrics = run(script, mask_truncated_completions=True, kl_coef=kl_coef, **flags)[1]
        assert all(math.isfinite(value) for row in metrics for value in row.values())
    assert all(flat(update.gradients).abs().max() == 0 for update in updates)


@only("grpo")
def test_cispo_weighs_by_the_clipped_ratio(script, run, updates):
    """The second update at two clips. With every ratio clipped to 1, CISPO is REINFORCE, where DAPO drops tokens."""
    flags = dict(total_episodes=12, learning_rate=0.01, kl_coef=0.0, cliprange=0.0)
    moved = run(script, loss_type="cispo", **flags)[2] / "model"  # the weights of the second update
    gradients, cut = {}, {}
    for loss_type in ("cispo", "dapo"):
        for cliprange, high in ((0.0, 0.0), (1.0, 1e9)):
            clips = dict(cliprange=cliprange, cliprange_high=high, loss_type=loss_type, num_ppo_epochs=2)
            updates.clear()
            ran = run(script, **flags | clips)
            gradients[loss_type, cliprange] = updates[1].gradients
            cut[loss_type, cliprange] = ran.metrics[0]["policy/clipfrac_avg"]
    rows = ran.rollouts
    all_tokens = sum(len(row["token_ids"]) for row in rows)
    weights = [torch.full((len(row["token_ids"]),), row["advantage"] / all_tokens) for row in rows]
    assert distance(plain_gradient(moved, rows, weights), gradients["cispo", 0.0]) < 1e-4
    assert distance(gradients["dapo", 0.0], gradients["cispo", 0.0]) > 0.1
    assert distance(gradients["dapo", 1.0], gradients["cispo", 1.0]) < 1e-4
    assert cut["cispo", 0.0] > 1.5 * cut["dapo", 0.0] > 0 == cut["cispo", 1.0] == cut["dapo", 1.0]  # on both sides


@only("ppo")
@pytest.mark.parametrize("source, whiten", [("value_model_path", False), ("reward_model_path", True), (None, False)])
def test_ppo_values_and_returns_by_plain_passes(script, run, world, updates, tmp_path, source, whiten):
    """The value of a token is the head's output one position before it. After the last token it is 0.

    The reward of a token is -kl_coef * KL. The last token of the completion, which is never padding, has the score.
    Without a value model, the policy's trunk gets a head of zeros."""
    path, model = save_classifier(tmp_path / "value")
    if source is None:
        model.model = AutoModel.from_pretrained(world.pad_is_eos).eval()
        model.score.weight.data.zero_()
    flags = {source: path} if source else {}
    flags |= dict(vf_coef=0.5, total_episodes=12, gamma=0.8, lam=0.9, kl_coef=0.2, ref_model_path=world.reference)
    flags |= dict(model_path=world.pad_is_eos, whiten_advantages=whiten, per_device_train_batch_size=5)
    ran = run(script, **flags)
    rows, ref_logprobs = ran.rollouts, row_logprobs(world.reference, ran.rollouts)
    count, loss = sum(len(row["token_ids"]) for row in rows), 0.0
    assert min(len(row["token_ids"]) for row in rows) < 6, "the test needs an episode that ended early"
    for row, ref in zip(rows, ref_logprobs):
        prompt = encode(row["prompt"])
        hidden = model.model(torch.tensor([prompt + row["token_ids"]])).last_hidden_state[0]
        values = model.score(hidden[len(prompt) - 1 : -1]).squeeze(-1)
        assert row["values"] == pytest.approx(values.tolist(), abs=1e-5)
        v, n = [*values.tolist(), 0.0], len(values)
        rewards = -0.2 * np.subtract(row["logprobs"], ref)
        rewards[-1] += row["score"]
        deltas = [rewards[t] + 0.8 * v[t + 1] - v[t] for t in range(n)]
        advantages = [sum(0.72 ** (s - t) * deltas[s] for s in range(t, n)) for t in range(n)]
        assert row["returns"] == pytest.approx([a + b for a, b in zip(advantages, v)], abs=1e-4)
        assert whiten or row["advantage"] == pytest.approx(advantages, abs=1e-4)
        loss = loss + 0.5 * (values - torch.tensor(row["returns"])).square().sum() / count
    assert ran.metrics[0]["loss/value_avg"] == pytest.approx(loss.item(), rel=1e-4)
    if whiten:  # over all tokens of the batch
        whitened = np.hstack([row["advantage"] for row in rows])
        assert whitened.mean() == pytest.approx(0, abs=1e-6) and whitened.var() == pytest.approx(1, abs=1e-5)
    (0.5 * loss).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    assert distance(expected, updates[0].gradients[-len(expected) - 1 : -1]) < 1e-5  # the last is the head's bias


@only("ppo")
def test_ppo_writes_its_value_model(script, run, tmp_path):
    """--value-model-path takes the folder value_model/ of a run: the next run begins with the values it ended with."""
    flags = dict(learning_rate=0.01, kl_coef=0.0, total_episodes=24, batch_size=12)
    first = run(script, **flags)[2]
    trained = load_file(first / "value_model" / "value_head.safetensors")
    assert trained["bias"].abs() > 1e-4 and trained["weight"].shape == (1, 16)
    second = run(script, **flags, model_path=str(first / "model"), value_model_path=str(first / "value_model"))
    row = second.rollouts[0]
    tokens = torch.tensor([encode(row["prompt"]) + row["token_ids"]])
    trunk = AutoModel.from_pretrained(first / "value_model").eval()
    hidden = trunk(tokens).last_hidden_state[0, -len(row["token_ids"]) - 1 : -1]
    expected = (hidden @ trained["weight"].T + trained["bias"]).squeeze(1)
    assert row["values"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert not (run(script, **flags, lora_r=2)[2] / "value_model").exists()
    path = save_model(tmp_path / "opt", "opt")  # Its trunk gives 8 numbers for a token, not hidden_size.
    head = load_file(run(script, **flags, model_path=path)[2] / "value_model" / "value_head.safetensors")
    assert head["weight"].shape == (1, 8)


@only("ppo")
def test_ppo_value_loss_is_clipped_around_the_old_value(script):
    """0.5 * max((v - G)^2, (v_clipped - G)^2), by hand."""
    values, old, returns = torch.tensor([1.0, 1.0, 0.1, -1.0]), torch.zeros(4), torch.tensor([2.0, 0.5, 0.0, 0.0])
    losses, cut = script.clipped_value_loss(values, old, returns, 0.2)
    assert losses.tolist() == pytest.approx([0.5 * 1.8**2, 0.5 * 0.5**2, 0.5 * 0.1**2, 0.5 * 1.0])
    assert cut.tolist() == [True, False, False, False]
    values, old = 0.05 * torch.randn((2, 1000), generator=torch.Generator().manual_seed(1))
    assert not script.clipped_value_loss(values, old, returns[0], 1.0)[1].any()  # rounding decides nothing


@only("ppo")
def test_ppo_kl_estimators(script, run, world):
    """Each equals its formula, also in a run. test_theory.py shows of which the mean is the KL."""
    p, q = torch.log_softmax(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)), -1)
    formulas = {"k1": lambda d: d, "abs": abs, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
    differences = (p - q).tolist()
    for estimator, formula in formulas.items():
        got = script.token_kl(p, q, estimator).tolist()
        assert got == pytest.approx([formula(d) for d in differences], rel=1e-5, abs=1e-6)
        flags = dict(kl_estimator=estimator, kl_coef=0.3, ref_model_path=world.reference, total_episodes=12)
        ran = run(script, **flags, temperature=0.7)
        pairs = [zip(row["logprobs"], row["ref_logprobs"]) for row in ran.rollouts]
        sums = [sum(formula(a - b) for a, b in row) for row in pairs]
        assert ran.metrics[0]["objective/non_score_reward"] == pytest.approx(-0.3 * np.mean(sums), rel=1e-4)


@only("ppo")
@pytest.mark.parametrize("target", [0.001, 1000.0])
def test_ppo_adapts_the_kl_coefficient(script, run, world, target):
    """After each iteration kl_coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon."""
    flags = dict(adaptive_kl=True, kl_coef=0.2, kl_target=target, kl_horizon=50, ref_model_path=world.reference)
    ran = run(script, **flags, num_train_epochs=5, gamma=1.0, lam=1.0)
    coefficient, episode, used = 0.2, 0, {}
    for row in ran.metrics:
        assert row["objective/kl_coef"] == pytest.approx(coefficient, rel=1e-6)
        used[row["iteration"]] = coefficient
        error = min(max(row["objective/kl"] / target - 1, -0.2), 0.2)
        coefficient *= 1 + error * (row["episode"] - episode) / 50
        episode = row["episode"]
    assert abs(coefficient - 0.2) > 0.01
    for row in ran.rollouts:
        kl = sum(row["logprobs"]) - sum(row["ref_logprobs"])
        assert row["returns"][0] == pytest.approx(row["score"] - used[row["iteration"]] * kl, rel=1e-4, abs=1e-4)


@only("ppo")
def test_ppo_scales_scores_by_all_scores_so_far(script, run):
    """--score-norm subtracts the mean of all scores so far. --score-scaling divides by their deviation. Then clip."""
    still = dict(learning_rate=0.0, num_train_epochs=4)  # the same episodes in every run

    def scores(**flags):
        return [(r["iteration"], r["score"]) for r in run(script, **still, **flags).rollouts]

    raw = scores()
    settings = dict(score_norm=True, score_scaling=True)
    for flags in (settings, {"score_norm": True}, {"score_scaling": True}, settings | {"score_clip": 0.5}):
        for (iteration, score), (_, got) in zip(raw, scores(**flags), strict=True):
            so_far = [s for i, s in raw if i <= iteration]
            expected = score - (statistics.mean(so_far) if flags.get("score_norm") else 0)
            expected /= statistics.pstdev(so_far) if flags.get("score_scaling") else 1
            limit = flags.get("score_clip", math.inf)
            assert got == pytest.approx(min(max(expected, -limit), limit), rel=1e-4, abs=1e-5)


@only("ppo")
def test_equal_scores_have_no_deviation_to_divide_by(script, run, world):
    """All scores so far are 5. --score-scaling leaves them as they are, and does not divide by a rounding error."""
    metrics = run(script, reward=world.reward("five"), score_scaling=True, batch_size=3)[1]
    assert [row["objective/scores"] for row in metrics] == [5.0] * len(metrics)


@only("ppo")
def test_ppo_whitens_rewards_without_moving_their_mean(script, run, world):
    """--whiten-rewards divides each token's distance from their mean by their population deviation."""
    flags = dict(gamma=1.0, lam=1.0, whiten_advantages=False, kl_coef=0.2, ref_model_path=world.reference)
    plain, whitened = (run(script, **flags, total_episodes=12, whiten_rewards=on).rollouts for on in (False, True))
    before, after = (  # returns are rewards to go
        np.hstack([np.append(-np.diff(row["returns"]), row["returns"][-1]) for row in rows])
        for rows in (plain, whitened)
    )
    assert after == pytest.approx((before - before.mean()) / before.std() + before.mean(), rel=1e-4, abs=1e-5)


@only("ppo")
@pytest.mark.parametrize("flag", ["target_kl", "ratio_threshold"])
def test_ppo_counts_dropped_updates(script, run, updates, flag, recwarn):
    """--target-kl ends the updates of an iteration. --ratio-threshold drops each update whose ratio is above it.

    Dropped updates never reach the optimizer. They still count in `step`, in the schedule and in the log. This holds
    also for the first update of a run."""
    flags = dict(num_ppo_epochs=3, num_mini_batches=2, learning_rate=0.01, num_train_epochs=3)
    args, metrics, _ = run(script, **flags, **{flag: 1e-9}, per_device_train_batch_size=2)
    steps, taken = 6, 1 if flag == "target_kl" else 0  # the first of an iteration has a KL of 0 and a ratio of 1
    rates = np.linspace(args.learning_rate, 0, steps * len(metrics), endpoint=False)
    assert len(updates) == taken * len(metrics)
    assert [update.lr for update in updates] == pytest.approx(rates[::steps][: len(updates)])
    for iteration, row in enumerate(metrics, start=1):
        assert row["step"] == steps * iteration
        assert row["policy/skipped_updates"] == steps - taken
        assert row["lr"] == pytest.approx(rates[row["step"] - 1])
        assert ("grad_norm" in row) == bool(taken)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]
