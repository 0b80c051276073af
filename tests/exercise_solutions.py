"""The key to docs/exercises: one solution of each exercise, in the words of docs/nano.

pytest docs/exercises --answer tests/exercise_solutions.py
"""

import math

import torch


def count_run(
    num_prompts,
    num_train_epochs,
    k,
    batch_size,
    num_mini_batches,
    num_ppo_epochs,
    per_device_train_batch_size,
    world_size,
):
    prompts = math.floor(num_train_epochs * num_prompts + 0.5)
    episodes = prompts * k
    iterations = math.ceil(episodes / batch_size)
    last_batch_size = episodes - (iterations - 1) * batch_size
    last_mini_batches = min(num_mini_batches, last_batch_size)  # Each has an episode, or more.
    mini_batches = (iterations - 1) * num_mini_batches + last_mini_batches
    process_share = math.ceil(batch_size // num_mini_batches / world_size)
    return dict(
        episodes=episodes,
        iterations=iterations,
        last_batch_size=last_batch_size,
        steps=num_ppo_epochs * mini_batches,
        gradient_accumulation_steps=math.ceil(process_share / per_device_train_batch_size),
    )


def pick_tokens(log_p, uniforms):
    cumulative = log_p.double().exp().cumsum(-1)  # [rows, vocabulary]
    darts = uniforms[:, None] * cumulative[:, -1:]  # times 1, up to rounding
    return (cumulative <= darts).sum(-1)  # how many tokens lie to the left of the dart


def completion_logprobs(model, prompts, prompt_mask, completions, lengths, temperature):
    is_token = torch.arange(completions.shape[1]) < lengths[:, None]
    rows = torch.cat([prompts, completions], dim=1)
    mask = torch.cat([prompt_mask, is_token.long()], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # Padding on the left does not count.
    logits = model(rows, attention_mask=mask, position_ids=positions).logits
    # The logits at a position are those of the next token.
    logits = logits[:, prompts.shape[1] - 1 : -1] / temperature
    log_p = logits.log_softmax(-1).gather(-1, completions[:, :, None])
    return log_p.squeeze(-1).where(is_token, 0.0)


def leave_one_out_advantages(rewards, k):
    groups = rewards.view(-1, k)
    baselines = (groups.sum(1, keepdim=True) - groups) / (k - 1)  # the mean of the others
    return (groups - baselines).flatten()


def group_normalized_advantages(scores, k):
    groups = scores.view(-1, k)
    advantages = groups - groups.mean(1, keepdim=True)
    return (advantages / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def clipped_loss(logprobs, old_logprobs, advantages, cliprange):
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def micro_batch_losses(processes):
    num_tokens = 0  # of the whole mini-batch, on all processes
    for micro_batches in processes:
        for _, mask, is_real in micro_batches:
            num_tokens = num_tokens + (mask.sum(1) * is_real).sum()
    losses = []
    for micro_batches in processes:
        of_process = []
        for token_losses, mask, is_real in micro_batches:
            total = ((token_losses * mask).sum(1) * is_real).sum()
            # DDP takes the mean of the processes' gradients. We need their sum.
            of_process.append(total / num_tokens * len(processes))
        losses.append(of_process)
    return losses


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
