"""What each script trains on, in plain torch: the loss of a mini-batch, an episode at a time.

A copy of a script can be held against another such function:

    python benchmark/check_copy.py my_rloo.py --loss FILE.py:FUNCTION

    def loss(mini_batch, batch, args):  # REINFORCE without a baseline
        return -sum(e.score * e.logprobs.sum() for e in mini_batch) / len(mini_batch)

A loss gets two lists of episodes, and the flags. It returns a number with a gradient, or two, which
are added up. The batch has whole groups, side by side. An episode has what its row in rollouts/
has, such as iteration, row (of the dataset), prompt, token_ids, columns, ended, score, and index,
its place in the batch. The score has its penalty and its normalization already. It is None where
the reward function gave none. `vars(episode)` has parts of the score by their names. A copy may
write more `columns` into rollouts/ in stage 4f, and its loss reads them. A loss is called once for
each update, in their order, so its file may keep variables, such as those of earlier batches. These
are tensors, with an entry for each token:

    old_logprobs    log p_old
    ref_logprobs    log p_ref; None without a reference
    old_values      V_t, in PPO
    logprobs        log p_new, with gradient; this and the next are there only in the mini-batch
    log_p           the same of the whole vocabulary, [tokens, vocabulary]
    values          v_t, with gradient, in PPO

With --adaptive-kl, `args.kl_coef` is that of the iteration.

What other models or hidden states are in cannot be stated: the loss of a new module, a second pass
with dropout or with other tokens.
"""

import statistics

import torch


def difference(logprobs, others):
    """logprobs - others. The scripts count up to 1e-4 nats as 0: it is rounding."""
    return torch.nn.functional.hardshrink(logprobs - others, 1e-4)


def clipped_loss(logratio, advantage, low, high):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logratio)"""
    ratio = logratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def scored(rewards):
    return [reward for reward in rewards if reward is not None]


# ============================================ RLOO ============================================
def rloo_advantage(rewards, i, k):
    """The reward of episode i, minus the mean reward of the others of its group."""
    group = scored(rewards[i - i % k :][:k])
    if rewards[i] is None or len(group) == 1:
        return 0.0
    baseline = (sum(group) - rewards[i]) / (len(group) - 1)
    return rewards[i] - baseline


def rloo(mini_batch, batch, args, advantage_of=rloo_advantage):
    """The KL is in the reward. A completion has one ratio. The mean is over all episodes."""
    rewards = [episode.score for episode in batch]
    for i, episode in enumerate(batch):
        if rewards[i] is not None and episode.ref_logprobs is not None:
            kl = difference(episode.old_logprobs, episode.ref_logprobs).sum()
            rewards[i] -= args.kl_coef * kl.item()
    loss = 0.0
    for episode in mini_batch:
        advantage = advantage_of(rewards, episode.index, args.rloo_k)
        logratio = (episode.logprobs - episode.old_logprobs).sum()
        loss = loss + clipped_loss(logratio, advantage, args.cliprange, args.cliprange)
    return loss / len(mini_batch)


# ============================================ GRPO ============================================
def grpo_advantage(scores, i, k, scale_rewards):
    """The score of episode i minus the mean of its group, by (a standard deviation + 1e-4)."""
    group = scored(scores[i - i % k :][:k])
    if scores[i] is None or len(group) == 1:
        return 0.0
    centred = scores[i] - statistics.mean(group)
    if scale_rewards == "none":
        return centred
    compared = group if scale_rewards == "group" else scored(scores)
    return centred / (statistics.stdev(compared) + 1e-4)


def grpo(mini_batch, batch, args, advantage_of=grpo_advantage, clipped_loss=clipped_loss):
    """The KL is in the loss. No denominator counts an episode that is masked."""
    scores = [episode.score for episode in batch]
    if args.mask_truncated_completions:
        mini_batch = [episode for episode in mini_batch if episode.ended]
    num_tokens = sum(len(episode.token_ids) for episode in mini_batch)
    low = args.cliprange
    high = low if args.cliprange_high is None else args.cliprange_high
    loss = 0.0
    for episode in mini_batch:
        advantage = advantage_of(scores, episode.index, args.num_generations, args.scale_rewards)
        logratio = episode.logprobs - episode.old_logprobs  # [tokens]
        if args.importance_sampling_level == "sequence":  # the mean, for each token
            logratio = logratio.mean().expand(len(logratio))
        losses = clipped_loss(logratio, advantage, low, high)
        if args.loss_type == "cispo":
            ratio = logratio.detach().exp()
            losses = -advantage * ratio.clamp(1 - low, 1 + high) * episode.logprobs
        if episode.ref_logprobs is not None:
            d = difference(episode.ref_logprobs, episode.logprobs)
            losses = losses + args.kl_coef * (d.exp() - d - 1)
        denominators = {
            "grpo": len(mini_batch) * len(losses),
            "dr_grpo": len(mini_batch) * args.response_length,
        }  # in dapo and cispo all tokens
        loss = loss + losses.sum() / denominators.get(args.loss_type, num_tokens)
    return loss


# ============================================ PPO ============================================
def token_rewards(episode, args):
    """Minus the KL of each token. The last one has the score, too."""
    rewards = torch.zeros(len(episode.token_ids), dtype=torch.double)
    if episode.ref_logprobs is not None:
        d = difference(episode.old_logprobs, episode.ref_logprobs)
        estimates = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}
        rewards -= args.kl_coef * estimates[args.kl_estimator]
    rewards[-1] += episode.score
    return rewards


def gae(rewards, values, gamma, lam):
    """A_t = delta_t + gamma lam A_{t+1} with delta_t = R_t + gamma V_{t+1} - V_t"""
    advantages = torch.zeros_like(rewards)
    next_value = 0.0
    next_advantage = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[t]
        advantages[t] = next_advantage
    return advantages


def whiten(values):
    return (values - values.mean()) / (values.var(correction=0) + 1e-8).sqrt()


def ppo(mini_batch, batch, args, token_rewards=token_rewards, clipped_loss=clipped_loss):
    """The loss of the policy, and that of the value model. The means are over tokens."""
    lengths = [len(episode.token_ids) for episode in batch]
    rewards = torch.cat([token_rewards(episode, args) for episode in batch])
    if args.whiten_rewards:  # Their mean stays.
        rewards = whiten(rewards) + rewards.mean()
    values = torch.cat([episode.old_values for episode in batch])
    pairs = zip(rewards.split(lengths), values.split(lengths))
    advantages = torch.cat([gae(*pair, args.gamma, args.lam) for pair in pairs])
    returns = (advantages + values).split(lengths)
    if args.whiten_advantages:
        advantages = whiten(advantages)
    advantages = advantages.split(lengths)
    policy_losses = []
    value_losses = []
    for episode in mini_batch:
        logratio = episode.logprobs - episode.old_logprobs  # [tokens]
        advantage = advantages[episode.index]
        policy_losses.append(clipped_loss(logratio, advantage, args.cliprange, args.cliprange))
        change = episode.values - episode.old_values
        clipped = episode.old_values + change.clamp(-args.cliprange_value, args.cliprange_value)
        errors = torch.stack([episode.values, clipped]) - returns[episode.index]
        value_losses.append(errors.square().amax(0) / 2)
    return torch.cat(policy_losses).mean(), args.vf_coef * torch.cat(value_losses).mean()
