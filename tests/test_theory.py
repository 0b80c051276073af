"""The identities of docs/theory.md, through the scripts' functions. Completions are enumerated, so a mean is exact."""

import pytest
import torch
from conftest import MODULES
from test_gradients import TOKENS, make_logits, same, token_logprobs

rloo, grpo, ppo = (MODULES[name] for name in ("rloo", "grpo", "ppo"))
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
    losses = rloo.rloo_loss(rloo.Args(), token_logprobs(logits)[episodes], rloo.LossInputs(None, advantages)).losses
    return -gradient((probabilities * losses).sum(), logits)


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
    centred, divided = (grpo.grpo_advantages(REWARDS[episodes], k, scale)[0] for scale in ("none", "group"))
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
