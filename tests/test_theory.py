"""The identities of docs/theory.md, and the table of KL estimates in docs/papers.md, through the scripts' functions.

Completions are enumerated, so a mean is exact.
"""

import itertools

import pytest
import torch
from conftest import MODULES

rloo, grpo, ppo = (MODULES[name] for name in ("rloo", "grpo", "ppo"))
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


def same(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


LOGITS = make_logits(1).requires_grad_()
LOGPROBS = token_logprobs(LOGITS)  # [completions, 2]
P = LOGPROBS.sum(1).exp().detach()  # [completions]
REWARDS = torch.linspace(-1, 2, len(P), dtype=torch.float64).roll(4).square()
ALL = torch.arange(len(P))


def gradient(objective, of=LOGITS):
    return torch.autograd.grad(objective, of, retain_graph=True)[0]


TRUE = gradient((LOGPROBS.sum(1).exp() * REWARDS).sum())  # of the mean reward


def ascent(advantages, probabilities, episodes=ALL, logits=LOGITS):
    """The direction in which rloo.py moves with one update per batch: minus the gradient of the mean loss."""
    losses, *_ = rloo.rloo_loss(rloo.Args(), token_logprobs(logits)[episodes], None, advantages[:, None])
    return -gradient((probabilities * losses.squeeze(1)).sum(), logits)


def groups_of(k, p):
    """All groups of k completions: the episodes, and the probability of each one's group divided by k."""
    groups = torch.cartesian_prod(*[ALL] * k)
    return groups.flatten(), (p[groups].prod(1, keepdim=True) / k).expand(-1, k).flatten()


@pytest.mark.parametrize("k", [2, 3])
def test_a_baseline_of_the_others_has_no_bias(k):
    """Sections 1 and 2. The group's mean makes the gradient shorter. The group's deviation turns it."""
    assert same(ascent(REWARDS, P), TRUE) and TRUE.abs().max() > 0.1
    assert same(ascent(torch.ones_like(P), P), torch.zeros_like(TRUE))  # the mean of grad log p
    episodes, p = groups_of(k, P)
    assert same(ascent(rloo.rloo_advantages(REWARDS[episodes], k), p, episodes), TRUE)
    centred, divided = (grpo.grpo_advantages(REWARDS[episodes], k, scale) for scale in ("none", "group"))
    assert same(ascent(centred, p, episodes), (k - 1) / k * TRUE)
    assert torch.cosine_similarity(ascent(divided, p, episodes).flatten(), TRUE.flatten(), dim=0) < 0.98


def test_the_best_constant_baseline():
    """Section 3. The variance is a parabola. It is lowest at E[|g|^2 R] / E[|g|^2]."""

    def squares(advantages):  # of the lengths of each completion's gradient
        return torch.stack([ascent(advantages, only).square().sum() for only in torch.eye(len(P)).double()])

    variance = lambda baseline: (P * squares(REWARDS - baseline)).sum() - TRUE.square().sum()  # noqa: E731
    weights = P * squares(torch.ones_like(P))
    best = (weights * REWARDS).sum() / weights.sum()
    assert same(variance(0), variance(2 * best)) and same(variance(best - 0.1), variance(best + 0.1))
    assert variance(best) < variance(best + 0.1) and variance(best) < 0.99 * variance((P * REWARDS).sum())


@pytest.mark.parametrize("script", [rloo, grpo, ppo])
def test_ratios_correct_for_the_old_policy_and_the_clip_stops_them(script):
    """Section 4. Without a clip, the mean over old completions has the gradient of the mean over new ones."""
    old = token_logprobs(make_logits(7)).sum(1)
    losses, _ = script.clipped_policy_loss(LOGPROBS.sum(1) - old, REWARDS, 1e9, 1e9)
    assert same(-gradient((old.exp() * losses).sum()), TRUE) and not same(ascent(REWARDS, old.exp()), TRUE)
    logratio = torch.tensor([0.5, 1.5, 0.5, 1.5, 1.1, 1.1], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, 1, -1, -1, 1, -1])
    losses, _ = script.clipped_policy_loss(logratio, advantages, 0.2, 0.2)
    assert (losses >= -advantages * logratio.exp()).all()
    assert gradient(losses.sum(), logratio).sign().tolist() == [-1, 0, 0, 1, -1, 1]


def test_gae_trades_bias_for_noise():
    """Section 5. The score comes at the second token, whose true value is the mean score after the first one."""
    second = (P * REWARDS).view(TOKENS, TOKENS).sum(1) / P.view(TOKENS, TOKENS).sum(1)
    exact = torch.stack([(P * REWARDS).sum().expand(len(P)), second.repeat_interleave(TOKENS)], 1)
    wrong = exact + torch.stack([torch.full_like(P, 0.7), ALL // TOKENS - 0.4], 1)

    def estimate(values, lam):
        """The mean of the gradient, and its variance."""
        advantages = ppo.gae(torch.stack([0 * REWARDS, REWARDS], 1), values, 1.0, lam)
        assert lam < 1 or same(advantages, REWARDS[:, None] - values)
        losses = ppo.clipped_policy_loss(LOGPROBS - LOGPROBS.detach(), advantages, 0.2, 0.2)[0].sum(1)
        gradients = -torch.stack([gradient(loss) for loss in losses])
        mean = (P[:, None, None] * gradients).sum(0)
        return mean, (P[:, None, None] * (gradients - mean).square()).sum()

    assert same(estimate(wrong, 1.0)[0], TRUE) and not torch.allclose(estimate(wrong, 0.0)[0], TRUE, atol=0.01)
    assert all(same(estimate(exact, lam)[0], TRUE) for lam in (0.0, 0.5, 1.0))
    assert estimate(exact, 0.0)[1] < estimate(exact, 0.5)[1] < estimate(exact, 1.0)[1]


@pytest.mark.parametrize("scores, beta", [(REWARDS, 2.0), (0 * REWARDS, 1.0)])
def test_training_ends_at_the_optimum_under_the_kl(scores, beta):
    """Section 6: at ref * exp(R / beta) / Z, where every advantage is 0. Section 7: with scores of 0, at ref."""
    ref = token_logprobs(make_logits(8) / 2).sum(1)
    log_z = (ref + scores / beta).logsumexp(0)
    optimum = ref + scores / beta - log_z
    reward = lambda log_p: scores - beta * (log_p - ref)  # noqa: E731
    assert same((P * reward(P.log())).sum(), beta * log_z - beta * (P * (P.log() - optimum)).sum())
    right = torch.arange(len(P)) % 2 == 0
    odds = [x[right].logsumexp(0) - x[~right].logsumexp(0) for x in (ref, ref + right / beta)]
    assert odds[1] == pytest.approx(odds[0] + 1 / beta)
    logits = make_logits(1).requires_grad_()
    for _ in range(600):
        log_p = token_logprobs(logits).sum(1).detach()
        episodes, p = groups_of(2, log_p.exp())
        advantages = rloo.rloo_advantages(reward(log_p)[episodes], 2)
        logits.data += 2 / beta * ascent(advantages, p, episodes, logits)
    assert torch.allclose(log_p, optimum, atol=0.01) and advantages.abs().max() < 0.02


def test_the_table_of_kl_estimates():
    """Of each estimate the mean, the gradient in the reward and that in the loss. A completion is one action."""
    p, old, ref = LOGPROBS.sum(1), *(token_logprobs(make_logits(seed)).sum(1) for seed in (7, 8))
    kl, other_kl = (p.exp() * (p - ref)).sum(), (ref.exp() * (ref - p)).sum()
    true, other = gradient(kl), gradient(other_kl)
    table = {"k1": (kl, true, 0 * true), "k2": (None, None, true), "k3": (kl, true - other, other)}
    for name, expected in table.items():
        estimate = ppo.token_kl(p, ref, name)
        found = (P * estimate).sum(), -ascent(-estimate.detach(), P), gradient((P * estimate).sum())
        assert all(right is None or same(x, right) for x, right in zip(found, expected)), name
        if name == "k2":
            assert not any(torch.isclose(found[0], wrong, rtol=0.1) for wrong in (kl, other_kl))
            assert not any(torch.allclose(found[1], wrong, atol=0.01) for wrong in (true, other, true - other))
    k3, ratio = grpo.k3_kl(p, ref), (p - old).exp()
    assert same(gradient((P * k3).sum()), other) and not torch.allclose(true, other, atol=0.01)
    means = [(old.exp() * estimate).sum() for estimate in (ratio * k3, k3)]  # The old policy sampled.
    assert same(means[0], kl) and not torch.isclose(means[1], kl, rtol=0.1)
    assert same(gradient(means[0]), true) and not torch.allclose(gradient(means[1]), true, atol=0.01)


def test_near_the_reference_only_k1_pulls_back():
    """In the reward, k2 and k3 vanish with the square of the distance. k1 vanishes with the distance."""
    ref = token_logprobs(make_logits(8)).sum(1)

    def pull(estimator, distance):
        logits = (make_logits(8) + distance * make_logits(4)).requires_grad_()
        p = token_logprobs(logits).sum(1).detach()
        return ascent(ppo.token_kl(p, ref, estimator), p.exp(), logits=logits).norm()

    for estimator, power in (("k1", 1), ("k2", 2), ("k3", 2)):
        assert float(pull(estimator, 2e-4) / pull(estimator, 1e-4)) == pytest.approx(2**power, rel=0.01)
