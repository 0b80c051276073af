"""RLOO has no bias: the first identities of docs/theory.md, through the scripts' functions.

Completions are enumerated, so a mean is exact.
"""

import itertools

import torch
from conftest import MODULES
from pytest import mark

rloo = MODULES["rloo"]
grpo = MODULES["grpo"]
TOKENS = 3


def enumerate_all(count, length):
    """All sequences of numbers below count: [sequences, length]."""
    return torch.tensor(list(itertools.product(range(count), repeat=length)))


# The logits of the first token, then those of the second token after each first one.
torch.manual_seed(1)
LOGITS = (2 * torch.randn(1 + TOKENS, TOKENS, dtype=torch.double)).requires_grad_()
FIRST, SECOND = enumerate_all(TOKENS, 2).T
TABLE = LOGITS.log_softmax(-1)
LOGPROBS = torch.stack([TABLE[0, FIRST], TABLE[1 + FIRST, SECOND]], dim=1)  # [completions, 2]
P = LOGPROBS.sum(1).exp()
REWARDS = torch.linspace(-1, 2, len(P)).double().roll(4).square()


def gradient(mean):
    [found] = torch.autograd.grad(mean, LOGITS, retain_graph=True)
    return found


def ascent(advantages, p=P, episodes=slice(None)):
    """The direction in which rloo.py moves: minus the gradient of the mean loss.

    p: the probability of each episode"""
    losses, *_ = rloo.rloo_loss(rloo.Args(), LOGPROBS[episodes], None, advantages[:, None])
    return -gradient((p.detach() * losses.squeeze(1)).sum())


@mark.parametrize("k", [2, 3])
def test_a_baseline_of_the_others_has_no_bias(k):
    """Sections 1 and 2. The group's mean makes the gradient shorter. The group's deviation turns
    it."""
    true = gradient((P * REWARDS).sum())
    assert true.abs().max() > 0.1
    torch.testing.assert_close(ascent(REWARDS), true)
    torch.testing.assert_close(ascent(REWARDS + 1), true)
    groups = enumerate_all(len(P), k)
    episodes = groups.flatten()
    p = P[groups].prod(1).repeat_interleave(k) / k
    rewards = REWARDS[episodes]
    without_bias = ascent(rloo.rloo_advantages(rewards, k), p, episodes)
    torch.testing.assert_close(without_bias, true)
    centred = ascent(grpo.grpo_advantages(rewards, k, "none"), p, episodes)
    torch.testing.assert_close(centred, (k - 1) / k * true)
    divided = ascent(grpo.grpo_advantages(rewards, k, "group"), p, episodes)
    assert torch.cosine_similarity(divided.flatten(), true.flatten(), dim=0) < 0.98
