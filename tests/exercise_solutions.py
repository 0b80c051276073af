"""The solutions of docs/exercises, made of the functions of the scripts.

pytest docs/exercises --answer tests/exercise_solutions.py
"""

from functools import partial
from types import SimpleNamespace

import torch

import grpo
import ppo
import rloo


def count_run(num_prompts, world_size, **flags):
    plan = rloo.batch_arithmetic(SimpleNamespace(total_episodes=None, warmup_steps=0, **flags), num_prompts, world_size)
    return vars(plan)


def pick_tokens(log_p, uniforms):
    return rloo.pick_tokens(log_p.exp(), uniforms)


def completion_logprobs(model, prompts, prompt_mask, completions, lengths, temperature):
    model.can_share_prompts = True
    policy = rloo.CompletionModel(model, None, [0], rloo.Args(temperature=temperature))
    prompts = prompts.masked_fill(prompt_mask == 0, -1)
    tokens = completions.masked_fill(torch.arange(completions.shape[1]) >= lengths[:, None], -1)
    return policy(partial(rloo.token_logprobs, prompts=prompts, tokens=tokens))


leave_one_out_advantages = rloo.rloo_advantages


def group_normalized_advantages(scores, k):
    return grpo.grpo_advantages(scores, k, scale_rewards="group")


def clipped_loss(logprobs, old_logprobs, advantages, cliprange):
    return rloo.clipped_policy_loss(logprobs - old_logprobs, advantages, cliprange, cliprange)[0]


def micro_batch_losses(processes):
    micro_batches = [micro_batch for of_process in processes for micro_batch in of_process]
    lengths = torch.cat([mask.sum(1) for _, mask, _ in micro_batches])
    included = torch.cat([is_real for _, _, is_real in micro_batches])
    # 1 / tokens of the mini-batch, for the episodes that count
    weight = grpo.token_weights(SimpleNamespace(loss_type="dapo"), lengths, included).max() * len(processes)

    def loss(token_losses, mask, is_real):
        return ((token_losses * mask).sum(1) * is_real).sum() * weight

    return [[loss(*micro_batch) for micro_batch in of_process] for of_process in processes]


def gae_from_scores(scores, values, lengths, gamma, lam):
    mask = torch.arange(values.shape[1]) < lengths[:, None]
    rewards = torch.zeros_like(values)
    rewards[torch.arange(len(scores)), lengths - 1] = scores
    return ppo.gae(rewards, values * mask, gamma, lam)
