"""Gradients: equal to those of plain passes, exact where every completion is enumerated, passes that are not needed."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import check_same_metrics, distance, flat, one_text, only, record_calls, weights_of
from plain import plain_gradient, token_weights


@pytest.mark.parametrize("policy", ["llama", "gpt2", "many_eos", "pad_is_eos", "emits_pad"])
def test_gradient_is_that_of_plain_passes(script, run, world, updates, policy):
    """The gradient of a single update is that of plain passes, which have no padding, no cache and no dropout."""
    path = getattr(world, policy)
    flags = dict(total_episodes=24, batch_size=24, temperature=0.7, per_device_train_batch_size=7)
    rows = run(script, model_path=path, **flags).rollouts
    assert len({len(row["token_ids"]) for row in rows}) > 2, "the test needs unequal lengths"
    expected = plain_gradient(path, rows, token_weights(script, rows), temperature=0.7)
    assert len(updates) == 1
    assert distance(expected, updates[0].gradients[: len(expected)]) < 1e-5


def make_every_episode_count(monkeypatch, script):
    """Advantages of 0 become 1e-30: nothing to a gradient in float32, but not 0."""
    name = f"{script.__name__}_advantages"
    function = getattr(script, name)

    def tiny_for_none(*args):
        result = function(*args)
        advantages, *others = result if isinstance(result, tuple) else (result,)
        advantages = advantages.masked_fill(advantages == 0, 1e-30)
        return (advantages, *others) if others else advantages

    monkeypatch.setattr(script, name, tiny_for_none)


def trained_episodes(calls):
    """Of the passes of a run. The check of a model before the run gives no inputs by name."""
    return sum(len(call.inputs["prompts"]) for call in calls if call.training and call.inputs)


@only("rloo", "grpo")
@pytest.mark.parametrize("size, num_ppo_epochs", [(2, 1), (64, 2)])
def test_episodes_without_gradient_take_no_pass(script, run, world, monkeypatch, updates, size, num_ppo_epochs):
    """Without a KL in the loss, episodes with advantage 0 take no pass.

    Gradients, weights and metrics are those of a run in which all episodes take a pass. Only the metrics of ratios are
    over fewer episodes. No gradient is ever None."""
    flags = dict(batch_size=24, num_train_epochs=4, kl_coef=0.0, reward=world.reward("seldom"), stop_token_id=5)
    flags |= dict(num_ppo_epochs=num_ppo_epochs)
    calls, runs = record_calls(monkeypatch, script, "token_logprobs"), []
    for _ in range(2):
        calls.clear(), updates.clear()
        _, metrics, output_dir = run(script, per_device_train_batch_size=size, **flags)
        gradients = [update.gradients for update in updates]
        runs.append((metrics, trained_episodes(calls), weights_of(output_dir / "model"), gradients))
        make_every_episode_count(monkeypatch, script)
    (metrics, count, weights, gradients), (all_metrics, all_count, all_weights, all_gradients) = runs
    assert all_count == num_ppo_epochs * metrics[-1]["episode"] and count < 0.7 * all_count
    assert all(gradient is not None for update in gradients for gradient in update)
    assert distance(itertools.chain(*all_gradients), itertools.chain(*gradients)) < 1e-5
    before = weights_of(world.llama)
    moved = [a - b for a, b in zip(all_weights, before)]
    assert distance(moved, [a - b for a, b in zip(weights, before)]) < 1e-3
    for row in metrics + all_metrics:  # ratios are of the episodes that took a pass
        for name in [
            name for name in row if name.startswith(("val/ratio", "val/samp", "policy/approx", "policy/clip"))
        ]:
            del row[name]
    check_same_metrics(metrics, all_metrics)


@only("rloo", "grpo")
def test_episodes_that_have_a_gradient_take_a_pass(script, run, world, monkeypatch):
    """With a KL in the loss or in the reward, episodes with equal scores have a gradient, too."""
    calls = record_calls(monkeypatch, script, "token_logprobs")
    flags = dict(batch_size=24, reward=world.reward("seldom"), ref_model_path=world.reference, kl_coef=0.1)
    metrics = run(script, **flags)[1]
    assert trained_episodes(calls) == metrics[-1]["episode"]


@only("rloo", "grpo")
def test_all_advantages_zero_is_a_step_of_zero_gradients(script, run, world, monkeypatch, updates):
    """Each update takes one pass. Its gradients are 0 and not None, and its weights stay."""
    calls = record_calls(monkeypatch, script, "token_logprobs")
    _, metrics, output_dir = run(script, reward=world.reward("five"), kl_coef=0.0, num_train_epochs=2)
    assert len(updates) == len(metrics) == metrics[-1]["step"] and trained_episodes(calls) == len(updates)
    assert all(flat(update.gradients).abs().max() == 0 for update in updates)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(world.llama), weights_of(output_dir / "model")))
    for row in metrics:
        assert row["grad_norm"] == row["loss/policy_avg"] == 0
        assert not {"val/ratio", "val/ratio_var", "policy/approxkl_avg", "policy/clipfrac_avg"} & row.keys()
        assert "val/sampling_logprob_difference" not in row


@pytest.mark.parametrize("norm", [math.inf, math.nan])
@only("rloo", "ppo")
def test_a_gradient_norm_that_is_not_finite_stops_the_run(script, run, monkeypatch, updates, tmp_path, norm):
    """It stops before the weights move. The message names iteration and step."""
    norms = iter([1.0, 1.0, norm])
    monkeypatch.setattr(script.accelerate.Accelerator, "clip_grad_norm_", lambda *args: torch.tensor(next(norms)))
    with pytest.raises(RuntimeError, match=f"iteration 2, step 3: the gradient norm is {norm}"):
        run(script, output_dir=str(tmp_path / "out"), num_mini_batches=2, batch_size=6, num_train_epochs=2)
    assert len(updates) == 2 and not (tmp_path / "out" / "model").exists()


@one_text
def test_the_gradient_is_clipped_to_its_norm(script, run, updates):
    """--max-grad-norm scales the whole gradient. grad_norm is the norm before that. inf clips nothing."""
    metrics = run(script, total_episodes=12)[1]
    [whole], norm = updates.copy(), metrics[0]["grad_norm"]
    assert flat(whole.gradients).norm().item() == pytest.approx(norm, rel=1e-5)
    metrics = run(script, total_episodes=12, max_grad_norm=norm / 4)[1]
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert distance([x / 4 for x in whole.gradients], updates[1].gradients) < 1e-4


TOKENS = 3
COMPLETIONS = torch.tensor(list(itertools.product(range(TOKENS), repeat=2)))  # [completions, 2]


def make_logits(seed):
    """The logits of the first token, then those of the second token after each first one: [1 + TOKENS, TOKENS]."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(1 + TOKENS, TOKENS, dtype=torch.float64, generator=generator)


def token_logprobs(logits):
    """The log-probability of both tokens of each completion: [completions, 2]."""
    logprobs = logits.log_softmax(-1)
    first, second = COMPLETIONS.T
    return torch.stack([logprobs[0, first], logprobs[1 + first, second]], 1)


@pytest.fixture
def case():
    """A policy, the policy that sampled, and a reference. They are clearly different."""
    logits = make_logits(1).requires_grad_()
    logprobs = token_logprobs(logits)
    old, ref = token_logprobs(make_logits(7)), token_logprobs(make_logits(8))
    return SimpleNamespace(logits=logits, logprobs=logprobs, old=old, ref=ref)


def gradient(case, loss):
    return torch.autograd.grad(loss, case.logits, retain_graph=True)[0]


def kl(p, q):
    """KL(p || q) of whole completions, as it is defined. p, q: [completions, 2]"""
    return (p.sum(1).exp() * (p.sum(1) - q.sum(1))).sum()


def kl_of_the_first_token(p, q):
    p, q = p[::TOKENS, 0], q[::TOKENS, 0]
    return (p.exp() * (p - q)).sum()


def kl_of_the_second_token(p, q):
    """The mean over the first tokens. Their probabilities are constants."""
    of_each_start = (p[:, 1].exp() * (p[:, 1] - q[:, 1])).view(TOKENS, TOKENS).sum(1)  # [first tokens]
    return (p[::TOKENS, 0].exp().detach() * of_each_start).sum()


def mean_under(p, values):
    """The mean over all completions. The probabilities are constants, as for completions that were sampled."""
    return (p.sum(1).exp().detach() * values).sum()


def same(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@only("ppo")
def test_k1_and_k3_estimate_the_kl_and_k2_does_not(script, case):
    """The means of k1 and k3 are the KL. The mean of k2 is not."""
    true = kl(case.logprobs, case.ref)
    p, ref = case.logprobs.sum(1), case.ref.sum(1)
    means = {name: mean_under(case.logprobs, script.token_kl(p, ref, name)) for name in ("k1", "k2", "k3")}
    assert same(means["k1"], true) and same(means["k3"], true)
    assert not torch.isclose(means["k2"], true, rtol=0.1)


@only("rloo")
def test_k1_in_the_reward_and_k2_in_the_loss_have_the_gradient_of_the_kl(script, case):
    """k1 goes through rloo.py's advantages and loss, averaged over all pairs of completions with k = 2."""
    true = gradient(case, kl(case.logprobs, case.ref))
    k1 = (case.logprobs - case.ref).sum(1).detach()
    pairs = torch.cartesian_prod(torch.arange(len(k1)), torch.arange(len(k1)))  # [pairs, 2], each a group
    episodes = pairs.flatten()
    given = script.LossInputs(case.logprobs[episodes].detach(), script.rloo_advantages(-k1[episodes], k=2))
    losses = script.rloo_loss(script.Args(), case.logprobs[episodes], given).losses
    probability = case.logprobs.sum(1).exp().detach()[pairs].prod(1)  # of each pair
    in_reward = gradient(case, (probability * losses.view(-1, 2).mean(1)).sum())
    k2 = (case.logprobs - case.ref).sum(1).square() / 2
    in_loss = gradient(case, mean_under(case.logprobs, k2))
    assert same(in_reward, true) and same(in_loss, true)
    assert true.abs().max() > 0.1


def test_k1_in_the_loss_has_no_gradient(case):
    in_loss = gradient(case, mean_under(case.logprobs, (case.logprobs - case.ref).sum(1)))
    assert same(in_loss, torch.zeros_like(in_loss))


def test_k2_of_single_tokens_misses_what_a_token_does_to_later_ones(case):
    """Its gradient is that of each token's KL, with the tokens before it held fixed."""
    k2 = (case.logprobs - case.ref).square().sum(1) / 2
    in_loss = gradient(case, mean_under(case.logprobs, k2))
    first = kl_of_the_first_token(case.logprobs, case.ref)
    fixed_start = first + kl_of_the_second_token(case.logprobs, case.ref)
    assert same(in_loss, gradient(case, fixed_start))
    assert not torch.allclose(in_loss, gradient(case, kl(case.logprobs, case.ref)), atol=0.01)


@only("grpo")
def test_k3_in_the_loss_has_the_gradient_of_the_other_kl(script, case):
    """That of KL(ref || p), for a token: the first one of the completion."""
    k3 = script.k3_kl(case.logprobs, case.ref)[:, 0]
    in_loss = gradient(case, mean_under(case.logprobs, k3))
    assert same(in_loss, gradient(case, kl_of_the_first_token(case.ref, case.logprobs)))
    true = gradient(case, kl_of_the_first_token(case.logprobs, case.ref))
    assert not torch.allclose(in_loss, true, atol=0.01)


@only("grpo")
def test_k3_times_the_ratio_has_the_gradient_of_the_kl(script, case):
    """Also if another policy sampled. Without the ratio neither the mean nor the gradient is right then."""
    ratio = (case.logprobs - case.old).exp()[:, 0]
    k3 = script.k3_kl(case.logprobs, case.ref)[:, 0]
    true = kl_of_the_first_token(case.logprobs, case.ref)
    assert same(mean_under(case.old, ratio * k3), true)
    assert same(gradient(case, mean_under(case.old, ratio * k3)), gradient(case, true))
    assert not torch.isclose(mean_under(case.old, k3), true, rtol=0.1)
    assert not torch.allclose(gradient(case, mean_under(case.old, k3)), gradient(case, true), atol=0.01)


@only("ppo")
def test_what_the_estimators_of_ppo_do_in_the_reward(script, case):
    """k1 gives the gradient of the KL. k3 gives that of KL(p || ref) - KL(ref || p). k2 gives neither."""
    p, ref = case.logprobs[:, :1], case.ref[:, :1]

    def in_reward(estimator):
        penalty = script.token_kl(p, ref, estimator).detach()
        return gradient(case, mean_under(case.logprobs, (penalty * p).sum(1)))

    forward = gradient(case, kl_of_the_first_token(case.ref, case.logprobs))
    reverse = gradient(case, kl_of_the_first_token(case.logprobs, case.ref))
    assert same(in_reward("k1"), reverse)
    assert same(in_reward("k3"), reverse - forward)
    for other in (reverse, forward, reverse - forward):
        assert not torch.allclose(in_reward("k2"), other, atol=0.01)


@only("ppo")
def test_near_the_reference_only_k1_pulls_back(script, case):
    """In the reward, k2 and k3 vanish with the square of the distance. k1 vanishes with the distance."""
    direction = make_logits(4)

    def pull(estimator, distance):
        logits = (make_logits(8) + distance * direction).requires_grad_()
        p, ref = token_logprobs(logits), token_logprobs(make_logits(8))
        penalty = script.token_kl(p, ref, estimator).sum(1).detach()
        loss = mean_under(p, penalty * p.sum(1))
        return torch.autograd.grad(loss, logits)[0].norm()

    for estimator, power in (("k1", 1), ("k2", 2), ("k3", 2)):
        assert float(pull(estimator, 2e-4) / pull(estimator, 1e-4)) == pytest.approx(2**power, rel=0.01)
