"""The key to docs/exercises: one solution of each exercise, in the words of docs/nano.

pytest docs/exercises --answer tests/exercise_solutions.py
"""

import torch


def pick_tokens(p, uniforms):
    cumulative = p.double().cumsum(-1)  # [rows, vocabulary]
    darts = uniforms[:, None] * cumulative[:, -1:]  # times 1, up to rounding
    return (cumulative <= darts).sum(-1)  # how many tokens lie to the left of the dart


def leave_one_out_advantages(rewards, k):
    groups = rewards.view(-1, k)
    baselines = (groups.sum(1, keepdim=True) - groups) / (k - 1)  # the mean of the others
    return (groups - baselines).flatten()


def group_normalized_advantages(scores, k):
    groups = scores.view(-1, k)
    deviations = groups.std(1, keepdim=True) + 1e-4
    return ((groups - groups.mean(1, keepdim=True)) / deviations).flatten()


def clipped_loss(logprobs, old_logprobs, advantages, cliprange):
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def gae_from_scores(scores, values, lengths, gamma, lam):
    advantages = torch.zeros_like(values)
    for episode, length in enumerate(lengths.tolist()):
        reward = scores[episode]  # at the last token; 0 at the others
        next_value = 0.0
        next_advantage = 0.0
        for t in reversed(range(length)):
            delta = reward + gamma * next_value - values[episode, t]
            next_advantage = delta + gamma * lam * next_advantage
            advantages[episode, t] = next_advantage
            next_value = values[episode, t]
            reward = 0.0
    return advantages
