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
    first, second = COMPLETIONS.T
    logprobs = logits.log_softmax(-1)
    return torch.stack([logprobs[0, first], logprobs[1 + first, second]], dim=1)


def same(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def far(a, b):
    return not torch.allclose(a, b, rtol=0.1, atol=0.01)


LOGITS = make_logits(1).requires_grad_()
LOGPROBS = token_logprobs(LOGITS)  # [completions, 2]
LOG_P = LOGPROBS.sum(1)  # [completions]
P = LOG_P.exp().detach()
OLD = token_logprobs(make_logits(7)).sum(1)
REF = token_logprobs(make_logits(8)).sum(1)
REWARDS = torch.linspace(-1, 2, len(P)).double().roll(4).square()


def gradient(values, p=P, of=LOGITS):
    """The gradient of the mean of values, if a completion has the probability p."""
    [found] = torch.autograd.grad((p * values).sum(), of, retain_graph=True)
    return found


def ascent(advantages, p=P, episodes=slice(None), logprobs=LOGPROBS, of=LOGITS):
    """The direction in which rloo.py moves: minus the gradient of the mean loss."""
    losses, *_ = rloo.rloo_loss(rloo.Args(), logprobs[episodes], None, advantages[:, None])
    return -gradient(losses.squeeze(1), p, of)


def groups_of(k, p):
    """All groups of k completions: the episodes, and the probability of each one's group divided by
    k."""
    groups = enumerate_all(len(p), k)
    of_groups = p[groups].prod(1)
    return groups.flatten(), of_groups.repeat_interleave(k) / k


TRUE = gradient(REWARDS, LOG_P.exp())  # of the mean reward


@mark.parametrize("k", [2, 3])
def test_a_baseline_of_the_others_has_no_bias(k):
    """Sections 1 and 2. The group's mean makes the gradient shorter. The group's deviation turns
    it."""
    assert TRUE.abs().max() > 0.1
    assert same(ascent(REWARDS), TRUE)
    assert same(ascent(REWARDS + 1), TRUE)
    episodes, p = groups_of(k, P)
    rewards = REWARDS[episodes]
    assert same(ascent(rloo.rloo_advantages(rewards, k), p, episodes), TRUE)
    centred = grpo.grpo_advantages(rewards, k, "none")
    assert same(ascent(centred, p, episodes), (k - 1) / k * TRUE)
    divided = ascent(grpo.grpo_advantages(rewards, k, "group"), p, episodes)
    assert torch.cosine_similarity(divided.flatten(), TRUE.flatten(), dim=0) < 0.98


def test_top_p_needs_its_own_probabilities():
    """Section 8. The first token decides the score, so the others' gradient is 0. With the
    log-probabilities of the whole softmax it is not."""
    logits = torch.tensor([0.6, 0.3, 0.1]).double().log().repeat(1 + TOKENS, 1).requires_grad_()
    drawn = token_logprobs(logits - torch.tensor([0, 0, 99]))  # top-k 2
    episodes, p = groups_of(2, drawn.sum(1).exp().detach())
    rewards = (COMPLETIONS[:, 0] == 0).double()[episodes]
    advantages = rloo.rloo_advantages(rewards, 2)
    found = ascent(advantages, p, episodes, token_logprobs(logits), logits)
    expected = [[222, -222, 0], [15, 7, -22], [-15, -7, 22], [0, 0, 0]]
    assert (1000 * found).round().tolist() == expected
    assert same(ascent(advantages, p, episodes, drawn, logits)[1:], torch.zeros(3, 3).double())


def test_the_bias_of_gae():
    """Section 5. The score comes at the second token, whose true value is the mean score after the
    first one. With lam = 1 no value makes a bias. With the true values no lam does."""
    rewards = torch.stack([0 * REWARDS, REWARDS], dim=1)
    means = (P * REWARDS).view(TOKENS, -1).sum(1)  # by the first token
    after_first = means / P.view(TOKENS, -1).sum(1)
    exact = torch.stack([means.sum().expand(TOKENS), after_first], dim=1)
    exact = exact.repeat_interleave(TOKENS, dim=0)  # [completions, 2]
    wrong = exact.clone()
    wrong[:, 1] += COMPLETIONS[:, 0]

    def direction(values, lam):
        advantages = ppo.gae(rewards, values, 1.0, lam)
        return gradient((advantages * LOGPROBS).sum(1))

    assert same(direction(wrong, 1.0), TRUE)
    assert far(direction(wrong, 0.0), TRUE)
    assert same(direction(exact, 0.0), TRUE)
    assert same(direction(exact, 0.5), TRUE)


@mark.parametrize("scores, beta", [(REWARDS, 2.0), (0 * REWARDS, 1.0)])
def test_training_ends_at_the_optimum_under_the_kl(scores, beta):
    """Section 6: at ref * exp(R / beta) / Z, where every advantage is 0. Section 7: with scores
    of 0, at ref."""
    ref = token_logprobs(make_logits(8) / 2).sum(1)
    logits = make_logits(1).requires_grad_()
    for _ in range(600):
        logprobs = token_logprobs(logits)
        log_p = logprobs.sum(1).detach()
        rewards = scores - beta * (log_p - ref)
        episodes, p = groups_of(2, log_p.exp())
        advantages = rloo.rloo_advantages(rewards[episodes], 2)
        logits.data += 2 / beta * ascent(advantages, p, episodes, logprobs, logits)
    assert torch.allclose(log_p, (ref + scores / beta).log_softmax(0), atol=0.01)
    assert advantages.abs().max() < 0.02


def test_the_table_of_kl_estimates():
    """Of each estimate the mean, the gradient in the reward and that in the loss. A completion
    is one action. In the loss of grpo.py, k3 needs the ratio to the policy that sampled."""
    k1, k2, k3 = [ppo.token_kl(LOG_P, REF, name) for name in ("k1", "k2", "k3")]
    kl = gradient(LOG_P - REF, LOG_P.exp())
    other = gradient(-LOG_P, REF.exp())  # of KL(ref, p)
    for estimate, in_reward, in_loss in ((k1, kl, 0 * kl), (k3, kl - other, other)):
        assert same((P * estimate).sum(), (P * (LOG_P - REF)).sum())
        assert same(-ascent(-estimate.detach()), in_reward)
        assert same(gradient(estimate), in_loss)
    assert same(gradient(k2), kl)
    assert same(ppo.token_kl(LOG_P, REF, "abs"), (LOG_P - REF).abs())
    k3 = grpo.k3_kl(LOG_P, REF)
    assert same(gradient(k3), other)
    assert same(gradient((LOG_P - OLD).exp() * k3, OLD.exp()), kl)
    assert far(gradient(k3, OLD.exp()), kl)
