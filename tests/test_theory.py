"""The identities of docs/theory.md, and the table of KL estimates in docs/papers.md, through the
scripts' functions.

Completions are enumerated, so a mean is exact.
"""

import itertools

import pytest
import torch
from conftest import MODULES
from pytest import mark

rloo = MODULES["rloo"]
grpo = MODULES["grpo"]
ppo = MODULES["ppo"]
TOKENS = 3
COMPLETIONS = torch.tensor(list(itertools.product(range(TOKENS), repeat=2)))  # [completions, 2]


def make_logits(seed):
    """The logits of the first token, then those of the second token after each first one:
    [1 + TOKENS, TOKENS]."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(1 + TOKENS, TOKENS, dtype=torch.float64, generator=generator)


def token_logprobs(logits):
    """The log-probability of both tokens of each completion: [completions, 2]."""
    logprobs = logits.log_softmax(-1)
    first, second = COMPLETIONS.T
    return torch.stack([logprobs[0, first], logprobs[1 + first, second]], dim=1)


def same(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def far(a, b):
    return not torch.allclose(a, b, rtol=0.1, atol=0.01)


LOGITS = make_logits(1).requires_grad_()
LOGPROBS = token_logprobs(LOGITS)  # [completions, 2]
LOG_P = LOGPROBS.sum(1)  # [completions]
P = LOG_P.exp().detach()
REWARDS = torch.linspace(-1, 2, len(P), dtype=torch.float64).roll(4).square()
OLD = token_logprobs(make_logits(7)).sum(1)
REF = token_logprobs(make_logits(8)).sum(1)


def gradient(objective, of=LOGITS):
    return torch.autograd.grad(objective, of, retain_graph=True)[0]


TRUE = gradient((LOG_P.exp() * REWARDS).sum())  # of the mean reward


def ascent(advantages, probabilities, episodes=slice(None), logits=LOGITS):
    """The direction in which rloo.py moves with one update per batch: minus the gradient of the
    mean loss."""
    logprobs = token_logprobs(logits)[episodes]
    losses, *_ = rloo.rloo_loss(rloo.Args(), logprobs, None, advantages[:, None])
    return -gradient((probabilities * losses.squeeze(1)).sum(), logits)


def groups_of(k, p):
    """All groups of k completions: the episodes, and the probability of each one's group divided by
    k."""
    groups = torch.tensor(list(itertools.product(range(len(p)), repeat=k)))
    of_groups = p[groups].prod(1) / k
    return groups.flatten(), of_groups.repeat_interleave(k)


@mark.parametrize("k", [2, 3])
def test_a_baseline_of_the_others_has_no_bias(k):
    """Sections 1 and 2. The group's mean makes the gradient shorter. The group's deviation turns
    it."""
    assert TRUE.abs().max() > 0.1
    assert same(ascent(REWARDS, P), TRUE)
    assert same(ascent(torch.ones_like(P), P), torch.zeros_like(TRUE))  # the mean of grad log p
    episodes, p = groups_of(k, P)
    rewards = REWARDS[episodes]
    assert same(ascent(rloo.rloo_advantages(rewards, k), p, episodes), TRUE)
    centred = ascent(grpo.grpo_advantages(rewards, k, "none"), p, episodes)
    assert same(centred, (k - 1) / k * TRUE)
    divided = ascent(grpo.grpo_advantages(rewards, k, "group"), p, episodes)
    assert torch.cosine_similarity(divided.flatten(), TRUE.flatten(), dim=0) < 0.98


def test_the_best_constant_baseline():
    """Section 3. The variance is a parabola. It is lowest at E[|g|^2 R] / E[|g|^2]."""

    def squares(advantages):  # of the lengths of each completion's gradient
        completions = torch.eye(len(P)).double()
        return torch.stack([ascent(advantages, only).square().sum() for only in completions])

    def variance(baseline):
        return (P * squares(REWARDS - baseline)).sum() - TRUE.square().sum()

    weights = P * squares(torch.ones_like(P))
    best = (weights * REWARDS).sum() / weights.sum()
    assert same(variance(best - 0.1), variance(best + 0.1))
    assert same(variance(0), variance(2 * best))
    assert variance(best) < variance(best + 0.1)
    assert variance(best) < 0.99 * variance((P * REWARDS).sum())


@mark.parametrize("script", [rloo, grpo, ppo])
def test_ratios_correct_for_the_old_policy(script):
    """Section 4. Without a clip, the mean over old completions has the gradient of the mean over
    new ones. test_algorithms.py shows where the clip acts."""
    losses, _ = script.clipped_policy_loss(LOG_P - OLD, REWARDS, 1e9, 1e9)
    assert same(-gradient((OLD.exp() * losses).sum()), TRUE)
    assert far(ascent(REWARDS, OLD.exp()), TRUE)


def test_gae_trades_bias_for_noise():
    """Section 5. The score comes at the second token, whose true value is the mean score after the
    first one."""
    by_first = P.view(TOKENS, TOKENS)
    second = (by_first * REWARDS.view(TOKENS, TOKENS)).sum(1) / by_first.sum(1)
    first = (P * REWARDS).sum().expand(len(P))
    exact = torch.stack([first, second.repeat_interleave(TOKENS)], dim=1)
    wrong = exact + torch.stack([torch.full_like(P, 0.7), COMPLETIONS[:, 0] - 0.4], dim=1)
    rewards = torch.stack([0 * REWARDS, REWARDS], dim=1)

    def estimate(values, lam):
        """The mean of the gradient, and its variance."""
        advantages = ppo.gae(rewards, values, 1.0, lam)
        losses, _ = ppo.clipped_policy_loss(LOGPROBS - LOGPROBS.detach(), advantages, 0.2, 0.2)
        gradients = -torch.stack([gradient(loss) for loss in losses.sum(1)])
        weights = P[:, None, None]
        mean = (weights * gradients).sum(0)
        return mean, (weights * (gradients - mean).square()).sum()

    assert same(ppo.gae(rewards, wrong, 1.0, 1.0), REWARDS[:, None] - wrong)
    assert same(estimate(wrong, 1.0)[0], TRUE)
    assert far(estimate(wrong, 0.0)[0], TRUE)
    means, variances = zip(*[estimate(exact, lam) for lam in (0.0, 0.5, 1.0)])
    assert all(same(mean, TRUE) for mean in means)
    assert variances[0] < variances[1] < variances[2]


@mark.parametrize("scores, beta", [(REWARDS, 2.0), (0 * REWARDS, 1.0)])
def test_training_ends_at_the_optimum_under_the_kl(scores, beta):
    """Section 6: at ref * exp(R / beta) / Z, where every advantage is 0. Section 7: with scores
    of 0, at ref."""
    ref = token_logprobs(make_logits(8) / 2).sum(1)
    optimum = (ref + scores / beta).log_softmax(0)
    logits = make_logits(1).requires_grad_()
    for _ in range(600):
        log_p = token_logprobs(logits).sum(1).detach()
        rewards = scores - beta * (log_p - ref)
        episodes, p = groups_of(2, log_p.exp())
        advantages = rloo.rloo_advantages(rewards[episodes], 2)
        logits.data += 2 / beta * ascent(advantages, p, episodes, logits)
    assert torch.allclose(log_p, optimum, atol=0.01)
    assert advantages.abs().max() < 0.02


KL = (LOG_P.exp() * (LOG_P - REF)).sum()
OTHER_KL = (REF.exp() * (REF - LOG_P)).sum()
KL_GRADIENT = gradient(KL)
OTHER_GRADIENT = gradient(OTHER_KL)


@mark.parametrize(
    "name, mean, in_reward, in_loss",
    [
        ("k1", KL, KL_GRADIENT, 0 * KL_GRADIENT),
        ("k2", None, None, KL_GRADIENT),
        ("k3", KL, KL_GRADIENT - OTHER_GRADIENT, OTHER_GRADIENT),
    ],
)
def test_the_table_of_kl_estimates(name, mean, in_reward, in_loss):
    """Of each estimate the mean, the gradient in the reward and that in the loss. A completion
    is one action."""
    estimate = ppo.token_kl(LOG_P, REF, name)
    found_mean = (P * estimate).sum()
    found_in_reward = -ascent(-estimate.detach(), P)
    assert same(gradient(found_mean), in_loss)
    assert same(ppo.token_kl(LOG_P, REF, "abs"), (LOG_P - REF).abs())
    if name == "k2":
        assert far(found_mean, KL) and far(found_mean, OTHER_KL)
        for wrong in (KL_GRADIENT, OTHER_GRADIENT, KL_GRADIENT - OTHER_GRADIENT):
            assert far(found_in_reward, wrong)
    else:
        assert same(found_mean, mean)
        assert same(found_in_reward, in_reward)


def test_k3_in_the_loss():
    """Of grpo.py. Where the old policy sampled, it needs the ratio to it."""
    assert far(KL_GRADIENT, OTHER_GRADIENT)
    k3 = grpo.k3_kl(LOG_P, REF)
    assert same(gradient((P * k3).sum()), OTHER_GRADIENT)
    weighted = (OLD.exp() * (LOG_P - OLD).exp() * k3).sum()
    assert same(weighted, KL)
    assert same(gradient(weighted), KL_GRADIENT)
    plain = (OLD.exp() * k3).sum()
    assert far(plain, KL)
    assert far(gradient(plain), KL_GRADIENT)


@mark.parametrize("estimator, power", [("k1", 1), ("k2", 2), ("k3", 2)])
def test_near_the_reference_only_k1_pulls_back(estimator, power):
    """In the reward, k2 and k3 vanish with the square of the distance. k1 vanishes with the
    distance."""

    def pull(distance):
        logits = (make_logits(8) + distance * make_logits(4)).requires_grad_()
        p = token_logprobs(logits).sum(1).detach()
        return ascent(ppo.token_kl(p, REF, estimator), p.exp(), logits=logits).norm()

    assert (pull(2e-4) / pull(1e-4)).item() == pytest.approx(2**power, rel=0.01)
