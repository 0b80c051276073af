"""The identities of docs/theory.md, and the table of KL estimates in docs/papers.md, through the
scripts' functions.

Completions are enumerated, so a mean is exact.
"""

import itertools

import torch
from conftest import MODULES
from pytest import mark

rloo = MODULES["rloo"]
grpo = MODULES["grpo"]
ppo = MODULES["ppo"]
TOKENS = 3


def enumerate_all(count, length):
    """All sequences of numbers below count: [sequences, length]."""
    return torch.tensor(list(itertools.product(range(count), repeat=length)))


COMPLETIONS = enumerate_all(TOKENS, 2)  # [completions, 2]


def make_logits(seed):
    """The logits of the first token, then those of the second token after each first one:
    [1 + TOKENS, TOKENS]."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(1 + TOKENS, TOKENS, dtype=torch.float64, generator=generator)


def token_logprobs(logits):
    """The log-probability of both tokens of each completion: [completions, 2]."""
    logprobs = logits.log_softmax(-1)
    first, second = COMPLETIONS.T
    of_first = logprobs[0, first]
    of_second = logprobs[1 + first, second]
    return torch.stack([of_first, of_second], dim=1)


def same(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def far(a, b):
    return not torch.allclose(a, b, rtol=0.1, atol=0.01)


LOGITS = make_logits(1).requires_grad_()
LOGPROBS = token_logprobs(LOGITS)  # [completions, 2]
LOG_P = LOGPROBS.sum(1)  # [completions]
P = LOG_P.exp().detach()
REWARDS = torch.linspace(-1, 2, len(P)).double().roll(4).square()
OLD = token_logprobs(make_logits(7)).sum(1)
OLD_P = OLD.exp()
REF = token_logprobs(make_logits(8)).sum(1)


def mean_of(values, p=P):
    return (p * values).sum()


def gradient(objective, of=LOGITS):
    [found] = torch.autograd.grad(objective, of, retain_graph=True)
    return found


TRUE = gradient(mean_of(REWARDS, LOG_P.exp()))  # of the mean reward


def losses_of(advantages, logprobs=LOGPROBS):
    """The loss of each episode in rloo.py with one update per batch."""
    losses, *_ = rloo.rloo_loss(rloo.Args(), logprobs, None, advantages[:, None])
    return losses.squeeze(1)


def ascent(advantages, p, episodes=slice(None), logits=LOGITS):
    """The direction in which rloo.py moves: minus the gradient of the mean loss."""
    logprobs = token_logprobs(logits)
    losses = losses_of(advantages, logprobs[episodes])
    return -gradient(mean_of(losses, p), logits)


def squares(losses):
    """The squared length of each one's gradient."""
    return torch.stack([gradient(loss).square().sum() for loss in losses])


def groups_of(k, p):
    """All groups of k completions: the episodes, and the probability of each one's group divided by
    k."""
    groups = enumerate_all(len(p), k)
    of_groups = p[groups].prod(1)
    return groups.flatten(), of_groups.repeat_interleave(k) / k


@mark.parametrize("k", [2, 3])
def test_a_baseline_of_the_others_has_no_bias(k):
    """Sections 1 and 2. The group's mean makes the gradient shorter. The group's deviation turns
    it."""
    assert TRUE.abs().max() > 0.1
    assert same(ascent(REWARDS, P), TRUE)
    mean_of_grad_log_p = ascent(torch.ones_like(P), P)
    assert same(mean_of_grad_log_p, 0 * TRUE)
    episodes, p = groups_of(k, P)
    rewards = REWARDS[episodes]
    advantages = rloo.rloo_advantages(rewards, k)
    assert same(ascent(advantages, p, episodes), TRUE)
    centred = grpo.grpo_advantages(rewards, k, "none")
    assert same(ascent(centred, p, episodes), (k - 1) / k * TRUE)
    divided = grpo.grpo_advantages(rewards, k, "group")
    direction = ascent(divided, p, episodes).flatten()
    assert torch.cosine_similarity(direction, TRUE.flatten(), dim=0) < 0.98


def test_top_p_needs_its_own_probabilities():
    """Section 8. The first token decides the score, so the others' gradient is 0. With the
    log-probabilities of the whole softmax it is not."""
    logits = torch.tensor([0.6, 0.3, 0.1]).double().log().repeat(1 + TOKENS, 1).requires_grad_()
    drawn = logits - torch.tensor([0, 0, 99])  # top-k 2
    q = token_logprobs(drawn).sum(1).exp().detach()
    episodes, p = groups_of(2, q)
    rewards = (COMPLETIONS[:, 0] == 0).double()[episodes]
    advantages = rloo.rloo_advantages(rewards, 2)
    first, after_right, after_wrong, _ = ascent(advantages, p, episodes, logits)
    expected = torch.tensor([0.222, -0.222, 0.0, 0.015, 0.007, -0.022])
    assert torch.allclose(torch.cat([first, after_right]).float(), expected, atol=5e-4)
    assert same(after_wrong, -after_right)
    right = -gradient(mean_of(losses_of(advantages, token_logprobs(drawn)[episodes]), p), logits)
    assert same(right[0], first)
    assert same(right[1:], 0 * right[1:])


def test_the_best_constant_baseline():
    """Section 3. The variance is a parabola. It is lowest at E[|g|^2 R] / E[|g|^2]."""

    def variance(baseline):
        losses = losses_of(REWARDS - baseline)
        return mean_of(squares(losses)) - TRUE.square().sum()

    weights = squares(LOG_P)
    best = mean_of(weights * REWARDS) / mean_of(weights)
    assert same(variance(best - 0.1), variance(best + 0.1))
    assert same(variance(0), variance(2 * best))
    assert variance(best) < variance(best + 0.1)
    assert variance(best) < 0.99 * variance(mean_of(REWARDS))


def test_ratios_correct_for_the_old_policy():
    """Section 4. Without a clip, the mean over old completions has the gradient of the mean over
    new ones. test_algorithms.py shows where the clip acts."""
    losses, _ = rloo.clipped_policy_loss(LOG_P - OLD, REWARDS, 1e9, 1e9)
    assert same(-gradient(mean_of(losses, OLD_P)), TRUE)
    assert far(ascent(REWARDS, OLD_P), TRUE)


def test_gae_trades_bias_for_noise():
    """Section 5. The score comes at the second token, whose true value is the mean score after the
    first one."""
    rewards = torch.zeros_like(LOGPROBS)
    rewards[:, 1] = REWARDS
    exact = torch.zeros_like(LOGPROBS)
    exact[:, 0] = mean_of(REWARDS)
    for token in range(TOKENS):
        rows = COMPLETIONS[:, 0] == token
        exact[rows, 1] = mean_of(REWARDS[rows], P[rows]) / P[rows].sum()
    wrong = exact.clone()
    wrong[:, 0] += 0.7
    wrong[:, 1] += COMPLETIONS[:, 0] - 0.4

    def estimate(values, lam):
        """The mean of the gradient, and its variance."""
        advantages = ppo.gae(rewards, values, 1.0, lam)
        logratio = LOGPROBS - LOGPROBS.detach()
        losses, _ = ppo.clipped_policy_loss(logratio, advantages, 0.2, 0.2)
        losses = losses.sum(1)
        mean = -gradient(mean_of(losses))
        return mean, mean_of(squares(losses)) - mean.square().sum()

    assert same(ppo.gae(rewards, wrong, 1.0, 1.0), REWARDS[:, None] - wrong)
    assert same(estimate(wrong, 1.0)[0], TRUE)
    assert far(estimate(wrong, 0.0)[0], TRUE)
    variances = []
    for lam in (0.0, 0.5, 1.0):
        mean, variance = estimate(exact, lam)
        assert same(mean, TRUE)
        variances.append(variance)
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


KL = mean_of(LOG_P - REF, LOG_P.exp())
OTHER_KL = mean_of(REF - LOG_P, REF.exp())
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
    found_mean = mean_of(estimate)
    found_in_reward = -ascent(-estimate.detach(), P)
    assert same(gradient(found_mean), in_loss)
    assert same(ppo.token_kl(LOG_P, REF, "abs"), (LOG_P - REF).abs())
    if name == "k2":
        assert far(found_mean, KL)
        assert far(found_mean, OTHER_KL)
        for wrong in (KL_GRADIENT, OTHER_GRADIENT, KL_GRADIENT - OTHER_GRADIENT):
            assert far(found_in_reward, wrong)
    else:
        assert same(found_mean, mean)
        assert same(found_in_reward, in_reward)


def test_k3_needs_the_ratio_to_the_policy_that_sampled():
    """In the loss of grpo.py."""
    k3 = grpo.k3_kl(LOG_P, REF)
    ratio = (LOG_P - OLD).exp()
    weighted = mean_of(ratio * k3, OLD_P)
    assert same(weighted, KL)
    assert same(gradient(weighted), KL_GRADIENT)
    assert same(gradient(mean_of(k3)), OTHER_GRADIENT)
    assert far(gradient(mean_of(k3, OLD_P)), KL_GRADIENT)
    assert far(KL_GRADIENT, OTHER_GRADIENT)
