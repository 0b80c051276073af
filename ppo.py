"""PPO (proximal policy optimization) for language models, in one file.

For every prompt x, the policy samples one completion y. Both together are an episode. Each token
is one action. A value model predicts the sum of the rewards from a token on.

    reward      R_t = -kl_coef * [log p_old(y_t) - log p_ref(y_t)], plus score(x, y) at the last t
    advantage   A_t = sum_i (gamma lam)^i delta_{t+i} with delta_t = R_t + gamma V_{t+1} - V_t
    return      G_t = A_t + V_t; after this, A_t is whitened: shifted and scaled over the batch
    ratio       r_t = p_new(y_t) / p_old(y_t)
    loss        L   = mean over the tokens of a mini-batch of
                      [max(-A_t r_t, -A_t clip(r_t, 1 - c, 1 + c))
                       + vf_coef / 2 * max((v_t - G_t)^2, (clip(v_t, V_t - d, V_t + d) - G_t)^2)]

p(y_t) is the probability of token t, given the prompt and the tokens before it. p_old is the
policy that sampled the completion. p_new is the policy that is being trained. p_ref is a frozen
reference model. V_t is the value before the updates, and v_t is the value that is being trained.
Both are read at the token before y_t. After the last token the value is 0. c is --cliprange, and d
is --cliprange-value. In the KL, a token's difference of up to 1e-4 nats counts as 0: it is
rounding.

In the first update of a batch every ratio is 1, up to rounding. Then the gradient of the policy
loss is the mean over the tokens of -A_t * grad log p_new(y_t).

The words: an iteration samples one batch of episodes and trains on it. A mini-batch holds the
episodes of one optimizer step, on all processes together. A micro-batch holds the episodes of one
forward and backward pass on one process. A PPO epoch is one pass over the batch. Every episode
needs a score.

How to run it:
    python ppo.py                         # trains the small built-in policy on two-digit sums
    python ppo.py --plan 8                # prints all counts of a run on 8 processes, and stops
    accelerate launch ppo.py              # with GPUs, on all of them
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 ppo.py    # two processes without GPUs

How to read it: the lecture comes first, sections 1 to 5. You can skip the machinery after it on a
first reading. docs/nano/ makes the same run in few lines.

How to change it: for a reward, see --reward. The advantages are `gae`, and the loss is
`ppo_loss`. benchmark/losses.py states the losses, too. docs/variants.md has more places, and
docs/coming_from.md has TRL's names of the flags. Between the stages of `main` every process holds
the whole batch, as tensors on the CPU. So a change of `main` needs no thought about processes.

Papers: Schulman et al. 2017, arXiv 1707.06347; Ziegler et al. 2019, arXiv 1909.08593; Huang et al.
2024, The N+ Implementation Details of RLHF with PPO, arXiv 2403.17031.
"""

import contextlib
import copy
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import ceil, floor, inf, isfinite, nan, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import accelerate
import filelock
import numpy as np
import torch
import torch.nn.functional as F
import transformers
import tyro
import yaml
from accelerate.utils import concatenate, gather_object, recursively_apply, set_seed
from torch import Tensor
from tqdm import tqdm

SCRIPT = Path(__file__).read_bytes()  # as it runs, whatever becomes of the file
DEFAULT = Path(__file__).resolve().parent / "benchmark" / "default"


# ========================================= 1  flags =========================================
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "inverse_sqrt"
]


@dataclass
class Args:
    # run
    seed: int = 1  # every random number depends only on this, its purpose and the iteration
    output_dir: str | None = None  # None: runs/<script>__<seed>__<unix time>__<process id>
    resume: bool = False  # continue from the newest checkpoint in --output-dir, if there is one
    save_every: int | None = 100  # iterations between checkpoints, at most ten minutes; None: none
    plan: int | None = None
    """print every count for this many processes and exit; loads no model. `prompts` are those that
    the run draws. Whether it fits into memory is what benchmark/memory.py says"""
    dtype: Literal["float32", "bfloat16"] | None = None  # of forward passes; None: accelerate's
    cuda_graphs: bool = True  # on a GPU, record the kernels of one token, and start them together
    # model and data
    model_path: str = str(DEFAULT / "policy")  # policy and tokenizer: a folder or a Hub name
    lora_r: int | None = None  # rank of LoRA adapters (arXiv 2106.09685); None: train all weights
    share_prompts: bool | None = None
    """in training, run a prompt once for all its completions; None: on a CPU, but not with
    --gradient-checkpointing, which excludes it"""
    gradient_checkpointing: bool = False  # compute activations again in the backward pass
    ref_model_path: str | None = None  # reference model of the KL; None: --model-path
    dataset: str | None = None  # .jsonl file or Hub dataset NAME:SPLIT; None: the built-in sums
    max_prompt_length: int | None = None  # drop prompts with more tokens than this; None: no limit
    reward: str = "exact_match"  # or FILE.py:FUNCTION, package.module:FUNCTION, none
    reward_model_path: str | None = None  # one-label classifier; its score is added to --reward
    value_model_path: str | None = None
    """the value model before training; it needs the policy's tokenizer. None: a copy of the reward
    model, or without one of the policy, with a new head"""
    eval_dataset: str | None = None  # held-out prompts; None: only the built-in task has some
    eval_every: int | None = None  # iterations between evaluations; None: only at start and end
    eval_temperature: float = 0.0  # sampling temperature of evaluations; 0: the most likely token
    eval_k: int = 1  # completions of each evaluation prompt; needs an --eval-temperature above 0
    eval_reward: str | None = None  # replaces --reward and --reward-model-path in evaluations
    # batch sizes
    num_train_epochs: float = 4.0  # passes over the prompts of the dataset; may be a fraction
    total_episodes: int | None = None  # instead of --num-train-epochs; 0: evaluate, and stop
    batch_size: int = 64  # episodes of one iteration, on all processes together
    num_mini_batches: int = 1  # optimizer steps in one pass over the batch
    num_ppo_epochs: int = 2  # passes over the batch of each iteration
    per_device_train_batch_size: int = 64  # episodes in one forward pass; fewer save memory
    per_device_rollout_batch_size: int | None = None  # episodes sampled at once; None: --batch-size
    # sampling
    response_length: int | None = None  # token limit of a completion; None: 256, built-in policy 8
    temperature: float = 1.0  # divides the logits, in sampling and in every log-probability
    stop_token_id: int | None = None  # this token ends a completion as an EOS does
    stop_string: str | None = None  # this text does, too, such as "</answer>"; a newline is $'\n'
    # algorithm
    kl_coef: float = 0.01  # weight of the KL in the reward; 0: none, and no reference model
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """x, |x|, x^2 / 2 or exp(-x) - 1 + x, where x is logprob - ref_logprob of a token"""
    adaptive_kl: bool = False  # change kl_coef to bring the KL near --kl-target (1909.08593, 2.2)
    kl_target: float = 6.0  # KL of an episode, in nats, at which --adaptive-kl aims
    kl_horizon: int = 10000  # episodes in which kl_coef grows by at most 22 %
    gamma: float = 1.0  # discount of rewards, per token
    lam: float = 0.95
    """lambda of generalized advantage estimation (GAE, arXiv 1506.02438, eq. 16): 1 uses all later
    rewards, 0 only the next reward and value"""
    cliprange_value: float = 0.2  # clips a value to the old one - this .. + this
    vf_coef: float = 0.1  # weight of the value loss
    target_kl: float | None = None
    """stop updating on a batch when the approximate KL from old to new policy is above 1.5 times
    this"""
    ratio_threshold: float | None = None  # drop an update whose mean ratio is above this
    whiten_advantages: bool = True  # shift and scale the batch's advantages to mean 0, variance 1
    whiten_rewards: bool = False
    """scale the rewards of tokens to variance 1 around their mean, which stays: a shift of each
    token's reward would favour long or short completions"""
    score_scaling: bool = False  # divide scores by the standard deviation of all scores so far
    score_norm: bool = False  # subtract the mean of all scores so far
    score_clip: float | None = None  # clip scores to -this .. this, as the last step
    cliprange: float = 0.2  # clips the ratio to 1 - this .. 1 + this (arXiv 1707.06347, eq. 7)
    missing_eos_penalty: float = 0.0
    """subtracted from the score of a completion that has not ended (arXiv 2403.17031, detail 23)"""
    # optimizer
    lr_scheduler_type: Schedule = "linear"  # over all optimizer steps, as in transformers
    learning_rate: float | None = None  # of AdamW; None: 3e-6, LoRA 1e-5, built-in policy 5e-5
    weight_decay: float = 0.0  # weight decay of AdamW, on all parameters
    warmup_steps: float = 0  # optimizer steps of linear warm-up; below 1: their share of all steps
    max_grad_norm: float = 1.0  # the gradient's norm is clipped to this; inf: no clipping
    # logging
    log_with: str | None = None  # a tracker beside metrics.jsonl: wandb, tensorboard, ...
    num_sample_generations: int = 10  # number of times in a run that samples are shown
    save_rollouts: bool = False  # write the episodes of each iteration to a file in rollouts/

    # k and updates_per_batch are no flags, but follow from flags. All scripts have both names.
    k = property(lambda self: 1)  # Groups are of one episode.
    updates_per_batch = property(lambda self: self.num_ppo_epochs * self.num_mini_batches)

    def __post_init__(self):
        check_flags(self)  # Only `main` fills in what depends on the model or the launcher.


# ===================================== 2  the arithmetic =====================================
def batch_arithmetic(args, num_prompts, world_size):
    """Every planned count of a run. `--plan` prints them.

    num_prompts: prompts in the dataset; world_size: processes
    """
    plan = SimpleNamespace()
    if args.total_episodes is None:
        plan.prompts = max(1, floor(args.num_train_epochs * num_prompts + 0.5))
    else:
        plan.prompts = ceil(args.total_episodes / args.k)
    plan.episodes = plan.prompts * args.k
    # Both divisions are exact: `check_flags` refuses other batch sizes.
    plan.prompts_per_iteration = args.batch_size // args.k
    plan.mini_batch_size = args.batch_size // args.num_mini_batches
    plan.iterations = ceil(plan.episodes / args.batch_size)
    full_batches = max(0, plan.iterations - 1)  # 0 iterations only evaluate.
    plan.last_batch_size = plan.episodes - full_batches * args.batch_size
    # The last batch may be smaller. Each of its mini-batches has at least one episode.
    last_mini_batches = min(args.num_mini_batches, plan.last_batch_size)
    mini_batches = full_batches * args.num_mini_batches + last_mini_batches
    plan.steps = args.num_ppo_epochs * mini_batches
    plan.warmup_steps = ceil(args.warmup_steps)
    if args.warmup_steps < 1:
        plan.warmup_steps = ceil(args.warmup_steps * plan.steps)
    plan.epochs = plan.prompts / num_prompts
    # This is the maximum: rloo.py and grpo.py skip episodes of gradient 0.
    process_share = ceil(plan.mini_batch_size / world_size)
    plan.gradient_accumulation_steps = ceil(process_share / args.per_device_train_batch_size)
    return plan


# ===================================== 3  the algorithm =====================================
def gae(rewards, values, gamma, lam):
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = R_t + gamma V_{t+1} - V_t (1506.02438, eq. 16).

    rewards, values: [episodes, response]. Both are 0 after the end of a completion, so the value
    after the last token is 0. Returns the same shape.
    """
    advantages = torch.zeros_like(rewards)
    next_advantage = torch.zeros_like(rewards[:, 0])  # [episodes]
    next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages


def whiten(values):
    """Shift and scale all entries together to mean 0 and population variance 1."""
    values = values.double()  # In float32, equal entries would not become 0.
    whitened = (values - values.mean()) * torch.rsqrt(values.var(correction=0) + 1e-8)
    return whitened.float()


def ppo_loss(args, logprobs, old_logprobs, advantages):
    """The clipped policy loss of each token, the log of its ratio, and True where the clip acts.

    logprobs, with gradient, old_logprobs and advantages: [episodes, response], as what it returns
    """
    if args.updates_per_batch == 1:
        # The policy has not changed since it sampled: p_old is p_new, as a constant. An episode
        # from elsewhere, such as a replay, has an own p_old, and must not take this line.
        old_logprobs = logprobs.detach()
    logratio = logprobs - old_logprobs  # [episodes, response]
    losses, is_clipped = clipped_policy_loss(logratio, advantages, args.cliprange, args.cliprange)
    return losses, logratio, is_clipped


def clipped_value_loss(values, old_values, returns, cliprange):
    """0.5 max((v - G)^2, (clip(v, V - d, V + d) - G)^2) (arXiv 2403.17031, detail 20).

    Returns the losses, and True where the clipped term is larger. Shapes: [episodes, response].
    """
    clipped = values.clamp(old_values - cliprange, old_values + cliprange)
    losses = (values - returns).square()
    clipped_losses = (clipped - returns).square()
    return 0.5 * torch.maximum(losses, clipped_losses), clipped_losses > losses


def clipped_policy_loss(logratio, advantages, low, high):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logratio) (arXiv 1707.06347, eq. 7).

    Returns the losses, and True where the clipped term is larger: above 1 + high for a positive
    advantage, below 1 - low for a negative one. There the gradient is 0. Shapes: as logratio.
    """
    # exp(89) is inf, and 0 * inf would be a gradient of nan. With a positive advantage the ratio is
    # clipped in any case, so it is clamped here. With a negative one inf stops the run in stage 4d.
    ratio = torch.where(advantages < 0, logratio, logratio.clamp(max=80)).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


# ======================================== 4  training ========================================
# `start_accelerator` sets both. The accelerator knows which process this is, and connects all of
# them. Inside of `autocast()`, forward passes compute in --dtype.
accelerator = None
autocast = None


def main(args):
    """Set up, train, save. Each turn of the loop is one iteration, in the stages 4a to 4f.

    Returns the policy, and the metrics of all rows that this call has written.
    """
    args = check_flags(args)  # a copy, with defaults filled in
    start_accelerator(args)  # The default of --share-prompts depends on the device.
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_path)
    prompts = load_prompts(args, args.dataset, args.reward, tokenizer)
    eval_prompts = load_prompts(args, args.eval_dataset, args.eval_reward or args.reward, tokenizer)
    plan = batch_arithmetic(args, len(prompts), args.plan or accelerator.num_processes)
    accelerator.print(yaml.safe_dump(vars(plan), sort_keys=False), end="")
    if args.plan:
        return

    # A finished run ends here. While the lock exists, no other run may write into the folder.
    output_dir, settings, lock = claim_output_dir(args, prompts)
    # The most tokens that a prompt with its completion may have.
    longest_row = max(len(p.token_ids) for p in prompts + eval_prompts) + args.response_length
    policy = load_policy(args, longest_row)
    ends = completion_ends(args, policy, tokenizer)
    value_model = load_value_model(args, policy, tokenizer, longest_row)
    reference = load_reference(args, policy, tokenizer, longest_row)  # None: there is no KL
    reward, eval_reward = load_rewards(args, policy, tokenizer, longest_row)

    size = args.per_device_train_batch_size  # of a micro-batch, in episodes
    adamw = partial(
        torch.optim.AdamW, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )
    optimizer = adamw(weight for weight in policy.parameters() if weight.requires_grad)
    value_optimizer = adamw(weight for weight in value_model.parameters() if weight.requires_grad)
    # The schedule does not go through `prepare`: accelerate would step it once for each process.
    scheduler = transformers.get_scheduler(
        args.lr_scheduler_type, optimizer, plan.warmup_steps, plan.steps
    )
    accelerator.register_for_checkpointing(scheduler)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    value_model, value_optimizer = accelerator.prepare(value_model, value_optimizer)
    sampler = Sampler(policy, tokenizer, ends, is_recorded=can_record(args))
    check_sampler(args, sampler, prompts + eval_prompts)
    # What one iteration hands to the next.
    state = {"iteration": 0, "step": 0, "learned": False, "kl_coef": args.kl_coef}
    state |= {"score_count": 0, "score_mean": 0.0, "score_squares": 0.0}
    load_checkpoint(args, state, output_dir)  # With --resume, it changes the state, too.
    announce(args, settings, sampler, prompts)
    # The bar counts optimizer steps. disable=None: there is a bar only in a terminal.
    progress = tqdm(
        total=plan.steps, initial=state["step"], disable=not accelerator.is_main_process or None
    )
    history = []  # the metrics of each row of metrics.jsonl
    if eval_prompts and state["iteration"] == 0:
        metrics = {"iteration": 0, "step": 0, "episode": 0, "epoch": 0.0}
        metrics |= evaluate(args, sampler, eval_prompts, eval_reward, output_dir, 0)
        history.append(write_metrics(state, output_dir, metrics, progress))

    for iteration in range(state["iteration"] + 1, plan.iterations + 1):
        # ---- 4a  rollout: sample a completion of each drawn prompt, and compute its values
        seed_libraries(args, iteration)  # for code that draws numbers by itself
        rollout_start = time.perf_counter()
        is_last = iteration == plan.iterations
        num_episodes = plan.last_batch_size if is_last else args.batch_size
        first = (iteration - 1) * plan.prompts_per_iteration  # prompts that were drawn before
        indices = draw_prompts(args.seed, len(prompts), first, num_episodes // args.k)
        drawn = [prompts[index] for index in indices]  # [groups]
        rng = keyed_rng(args.seed, ROLLOUT, iteration)
        batch = generate(args, sampler, drawn, args.k, rng, args.temperature)
        one_pass = partial(token_values, value_model, batch)
        values = map_episodes(one_pass, batch.lengths, size)  # [episodes, response]

        # ---- 4b  score
        # The score is the sum of its parts: of --reward, its dict's entries, and the reward model.
        score_start = time.perf_counter()
        scores, parts = score_episodes(args, batch, reward, f"iteration {iteration}")
        reward_seconds = time.perf_counter() - score_start
        refuse_missing_scores(batch, scores)
        scores = scores - args.missing_eos_penalty * ~batch.ended  # [episodes]
        scores = normalize_scores(args, state, scores)
        ref_logprobs = None
        if reference is not None:
            one_pass = partial(token_logprobs, args, reference, batch)
            ref_logprobs = map_episodes(one_pass, batch.lengths, size)  # [episodes, response]

        # ---- 4c  advantages
        rewards = torch.zeros_like(batch.logprobs)  # [episodes, response]
        if reference is not None:
            kl = token_kl(batch.logprobs, ref_logprobs, args.kl_estimator)
            rewards = -state["kl_coef"] * kl
        # The score comes at the last token of each completion.
        rewards[torch.arange(num_episodes), batch.mask.sum(1) - 1] += scores.float()
        if args.whiten_rewards:
            rewards[batch.mask] = whiten(rewards[batch.mask]) + rewards[batch.mask].mean()
        advantages = gae(rewards, values, args.gamma, args.lam)  # [episodes, response]
        returns = advantages + values
        if args.whiten_advantages:
            advantages[batch.mask] = whiten(advantages[batch.mask])

        # ---- 4d  optimize
        train_start = time.perf_counter()
        updates = []  # the metrics of each update
        is_far = False  # True once the approximate KL of an update is above 1.5 times --target-kl
        for ppo_epoch in range(args.num_ppo_epochs):
            for mini_batch in draw_mini_batches(args, iteration, ppo_epoch, num_episodes):
                learning_rate = optimizer.param_groups[0]["lr"]
                if is_far:  # The rest of the updates is dropped. They still count as steps.
                    updates.append({})
                    scheduler.step()
                    state["step"] += 1
                    progress.update()
                    continue
                optimizer.zero_grad()
                value_optimizer.zero_grad()
                mini_batch_tokens = batch.mask[mini_batch].sum()
                passes = []  # what each pass of this process computed
                for episodes, is_real, is_last_pass in micro_batches(
                    mini_batch, batch.lengths, size
                ):
                    # Divide by the tokens of the whole mini-batch, not of this micro-batch. So
                    # neither micro-batches nor processes change the gradient.
                    weights = batch.mask[episodes] * is_real[:, None] / mini_batch_tokens
                    # DDP takes the mean of the processes' gradients. We need their sum.
                    weights = weights * accelerator.num_processes  # [episodes, response]
                    with exchange_gradients(policy, now=is_last_pass):
                        logprobs = token_logprobs(args, policy, batch, episodes)
                        policy_losses, logratio, is_clipped = ppo_loss(
                            args, logprobs, batch.logprobs[episodes], advantages[episodes]
                        )
                        # A second loss is added here.
                        assert policy_losses.shape == weights.shape, (
                            "losses are [episodes, response]: one for each token"
                        )
                        accelerator.backward((policy_losses * weights).sum())
                    with exchange_gradients(value_model, now=is_last_pass):
                        new_values = token_values(value_model, batch, episodes)
                        value_losses, value_is_clipped = clipped_value_loss(
                            new_values, values[episodes], returns[episodes], args.cliprange_value
                        )
                        accelerator.backward(args.vf_coef * (value_losses * weights).sum())
                    outputs = (policy_losses, value_losses, logratio, is_clipped, value_is_clipped)
                    passes.append((episodes, is_real, (logprobs, *outputs)))
                # In the first update of a batch, the policy must agree with its sampler.
                update = update_metrics(args, batch, mini_batch, passes, not updates)
                is_far = update["policy/approxkl_avg"] > 1.5 * (args.target_kl or inf)
                if not is_far and update["val/ratio"] <= (args.ratio_threshold or inf):
                    # The norm is that of both models together.
                    parameters = [*policy.parameters(), *value_model.parameters()]
                    grad_norm = accelerator.clip_grad_norm_(parameters, args.max_grad_norm)
                    if not isfinite(grad_norm):
                        where = f"iteration {iteration}, step {state['step'] + 1}"
                        raise RuntimeError(f"{where}: gradient norm {grad_norm}")
                    update["grad_norm"] = grad_norm
                    optimizer.step()
                    value_optimizer.param_groups[0]["lr"] = learning_rate  # of the one schedule
                    value_optimizer.step()
                scheduler.step()
                updates.append(update)
                state["step"] += 1
                progress.update()

        # ---- 4e  log
        episode = (iteration - 1) * args.batch_size + num_episodes
        state["iteration"] = iteration
        now = time.perf_counter()
        metrics = {
            "iteration": iteration,
            "step": state["step"],
            "episode": episode,
            "epoch": episode / (args.k * len(prompts)),
            "lr": learning_rate,
            "eps": num_episodes / (now - rollout_start),
            "time/rollout_s": train_start - rollout_start,
            "time/reward_s": reward_seconds,
            "time/train_s": now - train_start,
        }
        metrics |= rollout_metrics(batch, scores) | mean_metrics(parts) | mean_metrics(updates)
        if reference is not None:
            metrics["objective/kl"] = (batch.logprobs - ref_logprobs).sum(1).mean().item()
            metrics["objective/kl_coef"] = state["kl_coef"]
            metrics["objective/non_score_reward"] = -state["kl_coef"] * kl.sum(1).mean()
            adapt_kl_coef(args, state, metrics["objective/kl"], num_episodes)
        metrics["policy/skipped_updates"] = sum("grad_norm" not in update for update in updates)

        # ---- 4f  evaluate and save
        if eval_prompts and (is_last or iteration % (args.eval_every or plan.iterations) == 0):
            metrics |= evaluate(args, sampler, eval_prompts, eval_reward, output_dir, iteration)
        history.append(write_metrics(state, output_dir, metrics, progress))
        columns = {"score": scores, "advantage": advantages, "values": values, "returns": returns}
        columns |= {"logprobs": batch.logprobs, "ref_logprobs": ref_logprobs}
        save_episodes(args, plan, output_dir, metrics, batch, columns, parts)
        save_checkpoint(args, state, output_dir, is_last)

    progress.close()
    if plan.steps > 0:
        if not args.lora_r:  # The adapters of the value model would be no model of their own.
            save_model(value_model, tokenizer, output_dir / "value_model")
        save_result(policy, tokenizer, output_dir, plan, state)
    model = accelerator.unwrap_model(policy)
    # The end of the process group can hang while what `prepare` made exists.
    policy, value_model, sampler = accelerator.free_memory(policy, value_model, sampler)
    optimizer, value_optimizer = accelerator.free_memory(optimizer, value_optimizer)
    end_run()
    return model, history


# ======================================== 5  the model =======================================
class Prompt(NamedTuple):
    number: int  # of its row in the dataset, from 0
    row: dict  # with all columns of the dataset
    text: str  # the prompt as the model reads it; a chat is rendered by its template
    token_ids: list[int]


@dataclass
class Batch:
    """The episodes of one iteration. Every process holds all of them, on the CPU.

    The k episodes of a group are neighbours. The axis `response` has --response-length entries. In
    rows of tokens, -1 means that there is no token: before a prompt that is shorter than another,
    and after the end of a completion. The other tensors are 0 there, and `mask` is False.
    """

    k: int  # episodes of a group
    prompts: list[Prompt]  # [episodes]
    prompt_tokens: Tensor  # [episodes, longest prompt]
    completions: list[str]  # [episodes], as text, without the special token that ends one
    token_ids: list[list[int]]  # [episodes], tokens of each completion; its EOS is one of them
    tokens: Tensor  # [episodes, response], the same as a tensor
    mask: Tensor  # [episodes, response], True for the tokens that are in the loss
    ended: Tensor  # [episodes], False where the completion was cut off at --response-length
    logprobs: Tensor  # [episodes, response], of each token, by the policy that sampled it
    entropies: Tensor  # [episodes, response], exact entropy of each token's distribution
    lengths: Tensor  # [episodes], tokens of the prompt and of the group's longest completion


@dataclass
class Sampler:
    """The policy, and what sampling from it needs."""

    policy: torch.nn.Module  # as `prepare` returned it
    tokenizer: transformers.PreTrainedTokenizerBase
    ends: transformers.StoppingCriteriaList  # ends(tokens, None): which rows have ended
    is_recorded: bool  # on a GPU: the pass over a new token is recorded once, and then replayed


def generate(args, sampler, drawn, k, rng, temperature):
    """Sample k completions of every prompt. Each process samples a share, and then gets them all.

    An inference engine takes the place of `sample` here. First give it the new weights. It returns
    the same tensors. It may ignore `uniforms`, and return 0 as entropies.
    drawn: [groups]; rng: gives all processes the same random numbers in [0, 1)
    """
    prompts = [prompt for prompt in drawn for _ in range(k)]  # [episodes], group by group
    prompt_tokens = pad_left([prompt.token_ids for prompt in prompts])
    prompt_lengths = (prompt_tokens >= 0).sum(1)
    # [episodes, response], a number for each token
    uniforms = torch.from_numpy(rng.random((len(prompts), args.response_length)))

    def one_pass(episodes):
        return sample(sampler, trim(prompt_tokens[episodes]), uniforms[episodes], temperature)

    with ready_to_sample(args, sampler.policy):
        size = args.per_device_rollout_batch_size or args.batch_size
        samples = map_episodes(one_pass, prompt_lengths, size)
    mask = samples["tokens"] >= 0
    token_ids = [row[row >= 0].tolist() for row in samples["tokens"]]
    as_text = partial(completion_text, sampler.tokenizer)
    # All episodes of a group get the same length. So sorting by it keeps them together, and a pass
    # that holds them can run their prompt once.
    longest = mask.sum(1).view(-1, k).amax(1).repeat_interleave(k)
    return Batch(
        k=k,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        completions=list(map(as_text, prompts, token_ids, samples["ended"].tolist())),
        token_ids=token_ids,
        mask=mask,
        lengths=prompt_lengths + longest,
        **samples,
    )


@torch.no_grad()
def sample(sampler, prompts, uniforms, temperature):
    """Sample a completion of every prompt, token by token.

    prompts: [episodes, longest prompt]; uniforms: [episodes, response], one number per token;
    temperature: 0 takes the most likely token.
    Returns tokens, ended, logprobs and entropies, as in Batch.
    """
    # Without what `prepare` added, a pass exchanges nothing with other processes.
    model = accelerator.unwrap_model(sampler.policy)
    prompts = prompts.to(accelerator.device)
    uniforms = uniforms.to(accelerator.device)
    start = prompts.shape[1]  # the column of the first token of the completions
    response = uniforms.shape[1]
    rows = F.pad(prompts, (0, response), value=-1)  # -1: there is no token yet
    logprobs = torch.zeros_like(uniforms, dtype=torch.float)
    entropies = torch.zeros_like(logprobs)
    running = torch.arange(len(rows), device=rows.device)  # the episodes that have not ended
    ended = torch.zeros_like(running, dtype=torch.bool)

    if sampler.is_recorded:
        cache = RecordedKVCache(model.config, rows.shape[1])
        recorded_steps = record_steps(model, rows, cache)
    else:
        cache = KVCache(config=model.config)
    logits = run_prompts(model, prompts, cache)
    for t in range(response):
        log_p = torch.log_softmax(logits[:, -1].float() / (temperature or 1.0), dim=-1)
        p = log_p.exp()  # [running, vocabulary]
        if temperature > 0:
            picked = pick_tokens(p, uniforms[running, t])
        else:
            picked = log_p.argmax(-1)
        rows[running, start + t] = picked
        logprobs[running, t] = log_p.gather(-1, picked[:, None]).squeeze(1)
        # Where p is 0, log_p may be -inf, and 0 * -inf would be nan. Below -104, p is always 0.
        entropies[running, t] = -p.mul_(log_p.clamp_(min=-104)).sum(-1)  # overwrites p and log_p
        has_ended = sampler.ends(rows[running, start : start + t + 1], None)
        ended[running] = has_ended
        goes_on = (~has_ended).nonzero().squeeze(1)
        running = running[goes_on]  # Completions that have ended get no more tokens.
        if t + 1 == response or len(running) == 0:
            break
        if sampler.is_recorded:  # The recorded pass reads the new tokens from `rows`.
            logits = next(recorded_steps)[running]
            continue
        if len(goes_on) < len(has_ended):
            cache.reorder_cache(goes_on)
        logits = forward(model, rows[running, : start + t + 1], cache, slice(-1, None))
    samples = dict(tokens=rows[:, start:], ended=ended, logprobs=logprobs, entropies=entropies)
    return {name: tensor.cpu() for name, tensor in samples.items()}


def pick_tokens(p, uniforms):
    """Inverse transform: the first token whose cumulative probability exceeds the uniform number.

    p: [rows, vocabulary], probabilities; uniforms: [rows]. Returns [rows].
    """
    cumulative = p.cumsum(-1, dtype=torch.double)
    total = cumulative[:, -1:]  # 1, up to rounding
    # right=True means strictly above. So a token of probability 0 is never picked.
    picked = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True).squeeze(1)
    return picked.clamp(max=p.shape[1] - 1)  # Only p = nan needs it; a later check stops the run.


def run_prompts(model, prompts, cache):
    """Run the prompts. Equal neighbours, as in a group, are run once and then repeated.

    prompts: [episodes, longest prompt]. Returns the logits of the token after each prompt,
    [episodes, 1, vocabulary]. The KV cache gets a row for each episode.
    """
    different, row_of = prompts.unique_consecutive(dim=0, return_inverse=True)
    logits = forward(model, different, cache, logits_to_keep=1)
    cache.reorder_cache(row_of)
    return logits.index_select(0, row_of)


def token_logprobs(args, model, batch, episodes):
    """Log-probability of every completion token of some episodes, with gradient, on the CPU.

    Returns [episodes, response]. It is 0 where there is no token.
    """
    prompts, tokens = pass_tokens(batch, episodes)
    rows = torch.cat([prompts, tokens[:, :-1]], dim=1)  # Nothing follows the last token.
    # The logits at the position before a token are of this token.
    if args.share_prompts:  # The completions of a group go on from one pass over their prompt.
        cache = KVCache()
        logits = run_prompts(model, prompts, cache)
        logprobs = logprobs_of(args, logits, tokens[:, :1])
        if tokens.shape[1] > 1:
            logits = forward(model, rows, cache, slice(prompts.shape[1], None))
            logprobs = torch.cat([logprobs, logprobs_of(args, logits, tokens[:, 1:])], dim=1)
    else:
        logits = forward(model, rows, logits_to_keep=tokens.shape[1])
        logprobs = logprobs_of(args, logits, tokens)
    left_out = batch.tokens.shape[1] - tokens.shape[1]  # columns after the longest completion
    return F.pad(logprobs, (0, left_out)).cpu()


def logprobs_of(args, logits, tokens):
    """Log-probability of each token, given its logits. Returns [rows, columns].

    With a large vocabulary, logits take most of the memory of a pass. So they are read in small
    pieces, and what is computed of a piece is computed again in the backward pass.
    logits: [rows, columns, vocabulary]; tokens: [rows, columns]
    """

    def of_piece(logits, tokens):  # [tokens, vocabulary], [tokens]
        return -F.cross_entropy(
            logits.float() / args.temperature, tokens, ignore_index=-1, reduction="none"
        )

    size = max(1, LOGITS_AT_ONCE // logits.shape[2])  # tokens of a piece
    pieces = zip(logits.flatten(0, 1).split(size), tokens.flatten().split(size))
    once = partial(torch.utils.checkpoint.checkpoint, of_piece, use_reentrant=False)
    return torch.cat([once(*piece) for piece in pieces]).view_as(tokens)


LOGITS_AT_ONCE = 2**22  # of a piece; 16 MiB of float32


def token_values(model, batch, episodes):
    """Value of every completion token, read one position before it. 0 where there is no token.

    Shapes: as in `token_logprobs`
    """
    prompts, tokens = pass_tokens(batch, episodes)
    rows = torch.cat([prompts, tokens[:, :-1]], dim=1)
    values = forward(model, rows)[:, prompts.shape[1] - 1 :].float().squeeze(-1)
    left_out = batch.tokens.shape[1] - tokens.shape[1]
    return F.pad(values * (tokens >= 0), (0, left_out)).cpu()


def forward(model, rows, cache=None, columns=slice(None), **settings):
    """The logits of a model at some columns. The KV cache has those before them.

    rows: [rows, tokens], where -1 is no token: it is masked, and has no position. So padding does
    not shift the positions. Returns [rows, columns, vocabulary]. From a trunk, which is a model
    without its head, they are the last hidden states.
    """
    mask = (rows >= 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with autocast():
        outputs = model(
            rows[:, columns].clamp(min=0),
            attention_mask=mask,
            position_ids=positions[:, columns],
            past_key_values=cache,
            use_cache=cache is not None,
            **settings,
        )
    # By name: a mixture of experts may put its balancing loss first.
    return outputs["logits" if "logits" in outputs else "last_hidden_state"]


# =================================== MACHINERY ===================================
# You can skip everything below on a first reading. The first sentence of each function says what it
# does for the lecture.


# ============================= 6  the processes, random numbers =============================
def start_accelerator(args):
    """Connect the processes, and refuse a launch in which some of them are missing."""
    global accelerator, autocast
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # Each process loads its models.
    os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "false"  # `check_flags` has read it.
    accelerator = accelerate.Accelerator(
        # The script accumulates and casts by itself, whatever the launcher is set to.
        gradient_accumulation_plugin=accelerate.utils.GradientAccumulationPlugin(num_steps=1),
        mixed_precision="no",
        dynamo_backend="no",
        # How long a process waits for the others, such as for a slow reward. Its default is 10 min.
        kwargs_handlers=[accelerate.InitProcessGroupKwargs(timeout=timedelta(hours=2))],
        log_with=args.log_with,
        project_dir=args.output_dir or "runs",
        cpu=torch.mps.is_available(),  # Apple's GPUs have no float64, which sampling needs.
    )
    if args.log_with and not accelerator.log_with:
        raise UsageError(f"--log-with {args.log_with} is not installed")
    seed_libraries(args, 0)  # New modules, if any, begin equal in all processes.
    is_bfloat16 = args.dtype == "bfloat16"
    autocast = partial(torch.autocast, accelerator.device.type, torch.bfloat16, is_bfloat16)
    if args.share_prompts is None:  # A GPU runs a prompt again sooner than Python starts a pass.
        args.share_prompts = accelerator.device.type == "cpu" and args.k > 1
        args.share_prompts &= not args.gradient_checkpointing  # which has no KV cache
    # accelerate can start one process where several were asked for, or several that are alone.
    asked_for_more = {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys()
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1 + asked_for_more)):
        raise UsageError(
            "fewer processes than launched, or no GPU was found; without GPUs use"
            " ACCELERATE_USE_CPU=true torchrun. If one process is meant, unset MASTER_ADDR"
        )
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        raise UsageError("FSDP version 1 is not offered; the launcher needs fsdp_version: 2")
    if accelerator.distributed_type == "DEEPSPEED":
        # Its engine clips, casts and gathers by itself. `micro_batches` does the accumulation.
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config |= {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0 if args.max_grad_norm == inf else args.max_grad_norm,
            "torch_autocast": {"enabled": is_bfloat16, "dtype": "bfloat16"},
        }
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        # Otherwise transformers would shard every model that it loads, also the reference, which
        # has no engine to gather it.
        transformers.integrations.unset_hf_deepspeed_config()


def micro_batches(episodes, lengths, size):
    """This process's share of some episodes, in near-equal micro-batches of at most `size`.

    All processes make the same number of passes, so the last episode is repeated where needed:
    0 1 2 3 4 on 3 processes are 0 1 | 2 3 | 4 4, and the last 4 is not real.
    episodes: indices; lengths: [episodes of the batch]; a share is sorted by it, to save padding
    Yields episodes and is_real, both [size], and True for the last micro-batch.
    """
    count = len(episodes)
    if count == 0:  # A pass that does not count makes the gradients 0 instead of None.
        episodes = torch.zeros(1, dtype=torch.long)
    share = ceil(len(episodes) / accelerator.num_processes)
    mine = accelerator.process_index * share + torch.arange(share)
    is_real = mine < count
    episodes = episodes[mine.clamp(max=len(episodes) - 1)]
    pieces = lengths[episodes].argsort(stable=True).tensor_split(ceil(share / size))
    for piece in pieces:
        yield episodes[piece], is_real[piece], piece is pieces[-1]


@torch.no_grad()
def map_episodes(one_pass, lengths, size):
    """What one_pass(episodes) gives for all episodes, without gradient. The processes share the
    passes. lengths, size: as in `micro_batches`"""
    passes = []
    for episodes, is_real, _ in micro_batches(torch.arange(len(lengths)), lengths, size):
        passes.append((episodes, is_real, one_pass(episodes)))
    return collect(passes, len(lengths))


@torch.no_grad()
def collect(passes, num_episodes):
    """What the passes of all processes computed, for each of the batch's episodes.

    It is 0 for an episode without a pass. passes: for each pass of this process its episodes,
    is_real, and a tensor, or a tuple or dict of them, all on the CPU
    """
    passes = gather_object(recursively_apply(Tensor.detach, passes))
    episodes, is_real, outputs = concatenate(passes)

    def by_episode(computed):
        if not computed.isfinite().all():  # In a reward, nan would mean: there is no score.
            raise RuntimeError("a model gives nan or inf; is the learning rate low enough?")
        table = computed.new_zeros(num_episodes, *computed.shape[1:])
        table[episodes[is_real]] = computed[is_real]
        return table

    return recursively_apply(by_episode, outputs)


@contextlib.contextmanager
def exchange_gradients(policy, now):
    """In the backward pass inside, the processes add up their gradients if `now` is True."""
    # DeepSpeed asks for this, and also takes its step then. It has no public setter.
    accelerator.gradient_state._set_sync_gradients(now)
    with contextlib.nullcontext() if now else accelerator.no_sync(policy):
        yield


@contextlib.contextmanager
def ready_to_sample(args, model):
    """Inside, a model samples. What would be done again for every token is done once: gathering
    sharded weights, and casting weights to bfloat16."""
    set_checkpointing(model, False)
    zero3 = getattr(getattr(model, "optimizer", None), "parameter_offload", None)  # of DeepSpeed
    with autocast():
        if accelerator.is_fsdp2:
            model.set_reshard_after_forward(False)  # The first pass gathers everything.
            yield
            model.set_reshard_after_forward(accelerator.state.fsdp_plugin.reshard_after_forward)
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
        elif zero3 is not None:
            deepspeed = importlib.import_module("deepspeed")
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                # These hooks would release the weights of each layer after its pass.
                zero3._remove_module_hooks()
                zero3.forward_hooks.clear()
                zero3.backward_hooks.clear()
                yield
                zero3.setup_zero_stage3_hooks()
        else:
            yield
    set_checkpointing(model, args.gradient_checkpointing)


def set_checkpointing(model, now):
    """Let the layers compute their activations again in the backward pass, or keep the KV cache.
    transformers does so in layers that are in train mode. The modules in them stay in eval mode."""
    for module in model.modules():
        if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer):
            module.training = now


# What a random number is for. numpy gives the keys (1, 2) and (1, 2, 0) the same numbers. So all
# keys of one purpose are equally long.
PROMPT_ORDER, ROLLOUT, EVALUATION, MINI_BATCHES, NEW_WEIGHTS, LIBRARIES = range(1, 7)


def keyed_rng(seed, purpose, *key):
    """A random generator that depends on its key alone, on no process and no earlier draw."""
    return np.random.default_rng([seed, purpose, *key])


def seed_libraries(args, iteration):
    """Set the generators of Python, numpy and torch by the seed and the iteration alone."""
    rng = keyed_rng(args.seed, LIBRARIES, iteration)
    set_seed(int(rng.integers(2**31)))


def draw_prompts(seed, num_prompts, first, count):
    """The prompts first .. first + count - 1 of an endless stream, in which each epoch is a
    permutation. Returns their indices."""
    epochs = range(first // num_prompts, (first + count - 1) // num_prompts + 1)
    stream = [keyed_rng(seed, PROMPT_ORDER, epoch).permutation(num_prompts) for epoch in epochs]
    return np.concatenate(stream)[first % num_prompts :][:count].tolist()


def draw_mini_batches(args, iteration, ppo_epoch, num_episodes):
    """The mini-batches of one PPO epoch: the groups in a new order, cut into near-equal pieces.

    For example, k = 2 and two groups, with the episodes 0 1 and 2 3. In the order 1, 0 they are
    2 3 0 1, and two mini-batches are (2 3) and (0 1).
    """
    groups = torch.arange(num_episodes).view(-1, args.k)  # [groups, k], the numbers of episodes
    rng = keyed_rng(args.seed, MINI_BATCHES, iteration, ppo_epoch)
    episodes = groups[rng.permutation(len(groups))].flatten()
    return episodes.tensor_split(min(args.num_mini_batches, num_episodes))


# ==================================== 7  data and rewards ====================================
def load_prompts(args, path, reward, tokenizer):
    """The prompts of a .jsonl file, or of a Hub dataset NAME:SPLIT or NAME:CONFIG:SPLIT."""
    if path is None:
        return []
    config = transformers.AutoConfig.from_pretrained(args.model_path).get_text_config()
    prompts = []
    columns = {}  # of all rows, each with None
    number = 0
    try:
        if path.endswith(".jsonl"):
            dataset = Path(path).read_bytes().rstrip().splitlines()
        else:
            *names, split = re.split(r":(?![^\[]*\])", path)  # at colons that are not in brackets
            dataset = importlib.import_module("datasets").load_dataset(*names, split=split)
        for number, row in enumerate(dataset, start=1):
            if isinstance(row, bytes):
                row = json.loads(row)
            text, token_ids = tokenize(tokenizer, row)
            if not row["prompt"] or not token_ids:
                raise ValueError("the prompt is empty")
            columns |= dict.fromkeys(row)
            if {"prompts", "completions", "completion_ids"} & row.keys():  # of the reward's call
                raise ValueError("no column may be named prompts, completions or completion_ids")
            if max(*token_ids, args.stop_token_id or 0) >= config.vocab_size:
                raise ValueError("--model-path has no embedding of a token, or of --stop-token-id")
            answer = row.get("answer")
            can_match = type(answer) in (str, int) and str(answer).strip()
            if reward == "exact_match" and not can_match:
                raise ValueError("exact_match needs an `answer`: text, or an integer")
            if len(token_ids) <= (args.max_prompt_length or inf):
                prompts.append(Prompt(number - 1, row, text, token_ids))
    except Exception as error:
        raise UsageError(
            f"{path}:{number}: {error!r}. --dataset and --eval-dataset are a .jsonl file, or a Hub"
            " dataset NAME:SPLIT. A row has a `prompt`: text, or messages with `role` and `content`"
        ) from error
    if not prompts:
        raise UsageError(f"{path}: has no rows, or none within --max-prompt-length")
    if len(prompts) < number:
        dropped = f"{number - len(prompts)} of {number} prompts dropped, over --max-prompt-length"
        accelerator.print(f"{path}: {dropped}", file=sys.stderr)
    # A column that only some rows have is None in the others.
    return [prompt._replace(row=columns | prompt.row) for prompt in prompts]


def tokenize(tokenizer, row):
    """The `prompt` of a row as the model reads it, and its tokens: one BOS, and no EOS of ours."""
    text = row["prompt"]
    is_chat = isinstance(text, list)
    if is_chat:
        chosen = row.get("chat_template_kwargs") or {}
        settings = {name: value for name, value in chosen.items() if value is not None}
        settings = {"add_generation_prompt": True, "tools": row.get("tools") or None} | settings
        text = tokenizer.apply_chat_template(text, tokenize=False, **settings)
        check_chat(row["prompt"], text, settings)
    # A template writes the special tokens itself.
    has_bos = is_chat or text.startswith(tokenizer.bos_token or "\0")
    token_ids = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
    if token_ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
        token_ids.pop()  # With an EOS, the prompt would end before its completion begins.
    return text, token_ids


def check_chat(messages, text, settings):
    """Refuse a chat whose question the model would not read, or that ends with an answer. text:
    what the chat template made of it; settings: of the template"""
    for message in messages:
        role = message["role"]
        if role in ("assistant", "tool", "ipython"):
            continue  # Each template writes answers and results of tools in its own way.
        # A template may take out switches, such as "/no_think".
        for piece in map(str.strip, re.split(r"(?:^|\s)/\w+(?=\s|$)", message["content"])):
            if piece not in text:
                raise ValueError(f"the chat template does not show the {role}'s {piece!r:.60}")
    if role == "assistant" and not settings.get("continue_final_message"):
        raise ValueError("the last message is the assistant's, without continue_final_message")


def completion_text(tokenizer, prompt, token_ids, ended):
    """A completion as text, without the special token that ended it.

    Some tokenizers drop the first space of what they decode. So after a prompt that is a text, its
    last token is decoded, too, and then cut off.
    """
    if ended and not tokenizer.decode(token_ids[-1:], skip_special_tokens=True):
        token_ids = token_ids[:-1]
    before = prompt.token_ids[-1:] if isinstance(prompt.row["prompt"], str) else []
    return tokenizer.decode(before + token_ids).removeprefix(tokenizer.decode(before))


def pad_left(rows):
    """Token lists -> tokens [rows, longest], with -1 on the left of shorter ones."""
    rows = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, True, padding_value=-1, padding_side="left")


def trim(tokens):
    """The columns in which at least one row has a token."""
    return tokens[:, (tokens >= 0).any(0)]


def pass_tokens(batch, episodes):
    """Prompts and completions of some episodes, on the device, for a pass through a model. Returns
    [episodes, longest prompt] and [episodes, longest completion]."""
    tokens = batch.tokens[episodes]
    # At least two columns: with one, `token_logprobs` would skip its second pass, and the other
    # processes of a sharded model would wait for it forever.
    longest = max(2, (tokens >= 0).sum(1).max())
    inputs = trim(batch.prompt_tokens[episodes]), tokens[:, :longest]
    return [tensor.to(accelerator.device) for tensor in inputs]


def exact_match(completions, answer, **_):
    """1 where the completion is the row's `answer`, without spaces around both, else 0."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.strip() == str(right).strip()) for text, right in zip(texts, answer)]


def load_rewards(args, policy, tokenizer, longest_row):
    """--reward and the reward model, which is None without one; and both of evaluations."""
    model = None
    if args.reward_model_path is not None:
        path = args.reward_model_path
        auto_class = transformers.AutoModelForSequenceClassification
        model = load_model(path, args.dtype, longest_row, auto_class, num_labels=1)
        check_vocabulary(path, model, policy, tokenizer)
    reward = load_reward(args.reward), model
    if not args.eval_reward:
        return reward, reward
    return reward, (load_reward(args.eval_reward), None)


def load_reward(spec):
    """The function that exact_match, FILE.py:FUNCTION, package.module:FUNCTION or none names."""
    built_in = {"exact_match": exact_match, "none": lambda prompts, **_: [0.0] * len(prompts)}
    if spec in built_in:
        return built_in[spec]
    module, _, function = spec.rpartition(":")
    if not module:
        raise UsageError(f"--reward must be exact_match, FILE.py:FUNCTION or none, not {spec}")
    if module.endswith(".py"):
        file = Path(module).resolve()
        # It may import its neighbours. A pool of processes imports it by this name.
        sys.path.append(str(file.parent))
        module = file.stem
        # The run keeps a copy of the file. A process imports a name only once, also a notebook's.
        text = file.read_bytes()
        loaded = importlib.import_module(module)
        found = loaded.__spec__.origin, vars(loaded).setdefault("__text__", text)
        if found != (str(file), text):
            raise UsageError(
                f"--reward {spec}: Python has loaded another {module}, or an older text of it;"
                " rename the file, or restart the kernel"
            )
    return getattr(importlib.import_module(module), function)


def score_episodes(args, batch, reward, where):
    """Score the batch: every process scores a share of whole groups, and gets all.

    reward: a function, and a reward model, or None. A score is the sum of what both give.
    Returns the scores [episodes] in float64, nan where there is none, and a dict for each episode:
    the named parts of its score.
    """
    function, model = reward
    groups = torch.arange(len(batch.prompts)).view(-1, batch.k)
    share = groups.tensor_split(accelerator.num_processes)[accelerator.process_index]
    # In the function, processes draw different random numbers. Afterwards they draw equal ones.
    seed = int(torch.randint(2**31, ()))
    set_seed(seed + 1 + accelerator.process_index)
    parts = gather_object(call_reward(function, batch, share.flatten().tolist(), where))
    set_seed(seed)
    if model is not None:
        one_pass = partial(reward_model_scores, model, batch)
        scores = map_episodes(one_pass, batch.lengths, args.per_device_train_batch_size)
        for part, score in zip(parts, scores[first_equal(batch)].tolist()):
            assert "reward/reward_model" not in part, "--reward may not name a part reward_model"
            part["reward/reward_model"] = score
    scores = []
    for part in parts:
        values = [value for value in part.values() if value is not None]
        scores.append(sum(values) if values else nan)
        part.pop("reward/", None)
    return torch.tensor(scores, dtype=torch.double), parts


def call_reward(function, batch, share, where):
    """Call a reward function as TRL does, by keywords, for some episodes, and check what it gives.

    That is a score for each completion, or a dict of lists of them. None is no score.
    Returns a dict for each of the episodes. A score without a name is its part "reward/".
    """
    parts = [{} for _ in share]
    if not share:
        return parts
    # The function may change what it gets, so each episode has its own copy.
    rows = [copy.deepcopy(batch.prompts[i].row) for i in share]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    texts = [batch.completions[i] for i in share]
    completions = [  # A chat is completed by a message.
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts)
    ]
    token_ids = [list(batch.token_ids[i]) for i in share]
    try:
        scores = function(
            prompts=prompts, completions=completions, completion_ids=token_ids, **columns
        )
    except SystemExit as error:  # The program would end as if all were well.
        raise RuntimeError("--reward has called sys.exit") from error
    if not isinstance(scores, dict) or not scores:
        scores = {"": scores}
    for name, values in scores.items():
        gave = f"{where}: --reward{name and f' ({name})'} gave"
        try:
            if isinstance(values, (str, bytes, dict)):  # Their items may be numbers, too.
                raise TypeError("a list of numbers is needed")
            values = [None if value is None else float(value) for value in values]
        except (TypeError, ValueError) as error:
            raise UsageError(f"{gave} {values!r:.60} in place of scores: {error}") from error
        if len(values) != len(share):
            raise UsageError(f"{gave} {len(values)} scores for {len(share)} completions")
        for i, part, value in zip(share, parts, values):
            if value is not None and not abs(value) < 1e38:  # float32 holds it
                raise UsageError(f"{gave} {value} for {batch.prompts[i].text!r}")
            part[f"reward/{name}"] = value
    return parts


def reward_model_scores(model, batch, episodes):
    """The score of some episodes by a classifier with one label: [episodes], on the CPU. It reads
    tokens, the EOS included, and scores the last one."""
    rows = pad_left([batch.prompts[i].token_ids + batch.token_ids[i] for i in episodes])
    hidden = forward(model.base_model, rows.to(accelerator.device))
    return model.score(hidden[:, -1]).float().squeeze(-1).cpu()  # The padding is on the left.


def first_equal(batch):
    """For each episode, the first one of its group that has the same completion: [episodes]. Two
    processes, or two passes, compute equal completions with other rounding."""
    first = {}
    return [first.setdefault((i // batch.k, *ids), i) for i, ids in enumerate(batch.token_ids)]


def refuse_missing_scores(batch, scores):
    """Stop at an episode without a score. PPO has no other episodes of its group to learn from."""
    for prompt, is_missing in zip(batch.prompts, scores.isnan()):
        if is_missing:
            raise UsageError(
                f"a completion of {prompt.text!r} has no score: --reward gave None, and PPO needs"
                " a number for each completion"
            )


def normalize_scores(args, state, scores):
    """--score-norm, --score-scaling and --score-clip, with the moments of all scores so far."""
    update_moments(state, scores)
    if args.score_norm:
        scores = scores - state["score_mean"]
    deviation = sqrt(state["score_squares"] / state["score_count"])
    # Otherwise all scores so far are equal, up to rounding.
    if args.score_scaling and deviation > 1e-8 * abs(state["score_mean"]):
        scores = scores / deviation
    if args.score_clip:
        scores = scores.clamp(-args.score_clip, args.score_clip)
    return scores


def update_moments(state, scores):
    """Add scores to the running count, mean and sum of squared deviations (Chan et al. 1979)."""
    count = state["score_count"] + len(scores)
    mean = scores.mean().item()
    shift = mean - state["score_mean"]
    state["score_squares"] += (scores - mean).square().sum().item()
    state["score_squares"] += shift**2 * state["score_count"] * len(scores) / count
    state["score_mean"] += shift * len(scores) / count
    state["score_count"] = count


def token_kl(logprobs, ref_logprobs, estimator):
    """The KL to the reference, estimated from each token (Schulman 2020, Approximating KL). A
    difference up to 1e-4 nats counts as 0: it is rounding, and AdamW makes whole steps of it."""
    d = F.hardshrink(logprobs - ref_logprobs, 1e-4)
    return {"k1": d, "abs": d.abs(), "k2": 0.5 * d.square(), "k3": torch.exp(-d) - 1 + d}[estimator]


def adapt_kl_coef(args, state, kl, num_episodes):
    """kl_coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon (1909.08593, 2.2)."""
    if args.adaptive_kl:
        error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
        state["kl_coef"] *= 1 + error * num_episodes / args.kl_horizon


# ===================================== 8  loading models =====================================
def load_model(path, dtype, longest_row, auto_class=transformers.AutoModelForCausalLM, **changes):
    """`from_pretrained`, on the device. A model stays in eval mode, so it has no dropout.
    longest_row: tokens that it must have positions for; changes: of its config"""
    model, info = auto_class.from_pretrained(
        path,
        dtype=dtype,
        return_dict=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # They are refused below, by name.
        **changes,
    )
    # A missing weight would be random. A layer that the config does not count would be left out.
    own = model.state_dict()
    uncounted = {w for w in info["unexpected_keys"] if re.sub(r"\.\d+\.", ".0.", w) in own}
    wrong = info["missing_keys"] | uncounted | {name for name, *_ in info["mismatched_keys"]}
    if wrong:
        raise UsageError(f"{path}: weights do not fit the config: {sorted(wrong)}")
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or inf
    if positions < longest_row:
        raise UsageError(
            f"{path} has {positions} positions, and the longest prompt with its completion needs"
            f" {longest_row}; lower --response-length, or --max-prompt-length. For YaRN, raise"
            " max_position_embeddings in config.json"
        )
    model = model.to(accelerator.device)
    if getattr(config, "output_router_logits", False):
        # The balancing loss of a mixture of experts is not trained, and does not know the KV cache.
        model.forward = partial(model.forward, output_router_logits=False)
    # Some models compute padded rows otherwise, or have positions of their own. So two rows are run
    # together, and each alone, as transformers does it.
    rows = torch.tensor([[-1, -1, 1, 2], [3, 4, 5, 6]], device=accelerator.device)
    with torch.no_grad(), autocast():
        padded = forward(model.base_model, rows)[:, -1]
        alone = torch.cat([model.base_model(trim(row))[0][:, -1] for row in rows.split(1)])
        # bfloat16: at most 0.009 was measured where it is right, and 0.045 where it is wrong
        limit = 0.02 if torch.is_autocast_enabled(accelerator.device.type) else 1e-3
    if not (padded - alone).std() < limit * alone.std():
        raise UsageError(f"{path} computes rows with padding otherwise than rows without")
    return model


def check_vocabulary(path, model, policy, tokenizer):
    """Refuse a model that reads a token of the policy as another one, or has no row for it."""
    try:
        known = transformers.AutoTokenizer.from_pretrained(path).get_vocab()
    except Exception as error:
        raise UsageError(f"{path} needs the tokenizer of --model-path: {error}")
    other = sorted(tokenizer.get_vocab().items() - known.items())
    rows, most = [m.config.get_text_config().vocab_size for m in (model, policy)]
    if other or rows < min(most, len(tokenizer)):  # A policy may lack rows for its last tokens.
        raise UsageError(
            f"{path} has {rows} rows, and reads tokens of --model-path otherwise: {other[:3]}. As"
            " a --reward, benchmark/reward_model.py:score takes other models"
        )


def load_policy(args, longest_row):
    """The model that is trained. longest_row: tokens of a prompt with its completion, at most"""
    # Trained weights are float32: bfloat16 rounds small updates away.
    dtype = args.dtype if args.lora_r else "float32"
    model = load_model(args.model_path, dtype, longest_row)
    if not args.lora_r and getattr(model, "is_quantized", False):
        raise UsageError(f"{args.model_path} has quantized weights, which need --lora-r")
    return prepare_for_training(args, model, 1)


def completion_ends(args, policy, tokenizer):
    """What ends a completion, as `generate` of transformers takes it: the EOS tokens of the
    generation config and of the tokenizer, --stop-token-id and --stop-string."""
    eos_ids = np.ravel(policy.generation_config.eos_token_id).tolist()  # one, several, or None
    eos_ids = sorted({*eos_ids, tokenizer.eos_token_id, args.stop_token_id} - {None})
    policy.generation_config.eos_token_id = eos_ids  # So `generate` of the saved model ends there.
    ends = [transformers.EosTokenCriteria(eos_ids)]
    if args.stop_string:
        ends.append(transformers.StopStringCriteria(tokenizer, [args.stop_string]))
    return transformers.StoppingCriteriaList(ends)


def can_record(args):
    """True if the passes of sampling can be CUDA graphs."""
    is_sharded = accelerator.distributed_type in ("FSDP", "DEEPSPEED")
    return args.cuda_graphs and accelerator.device.type == "cuda" and not is_sharded


def zero_weights(model, module):
    """The `_init_weights` of a value model: new weights are 0."""
    for weight in module.parameters(recurse=False):
        torch.nn.init.zeros_(weight)


def load_value_model(args, policy, tokenizer, longest_row):
    """The model with one output for each token, its value. It comes from --value-model-path, else
    the reward model, else the policy. A new head is 0."""
    if accelerator.distributed_type == "DEEPSPEED":
        raise UsageError("PPO trains two models, which DeepSpeed cannot do here; use FSDP2 or DDP")
    path = args.value_model_path or args.reward_model_path or args.model_path
    trunk = transformers.MODEL_MAPPING[type(transformers.AutoConfig.from_pretrained(path))]
    # AutoModelForTokenClassification would be the same, but knows only some kinds of models.
    bases = (transformers.modeling_layers.GenericForTokenClassification, trunk.__bases__[0])
    settings = {
        "base_model_prefix": trunk.base_model_prefix,
        "config_class": trunk.config_class,
        "_init_weights": zero_weights,
        "_keys_to_ignore_on_load_missing": ["score"],
    }
    value_class = type("ValueModel", bases, settings)
    model = load_model(path, "float32", longest_row, value_class, num_labels=1)
    check_vocabulary(path, model, policy, tokenizer)
    return prepare_for_training(args, model, 2, modules_to_save=["score"])


def prepare_for_training(args, model, index, **settings):
    """Add gradient checkpointing and LoRA, as flags say. index: of the model; settings: of LoRA"""
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if args.lora_r:
        peft = importlib.import_module("peft")
        if Path(model.name_or_path).exists():  # The adapters name it. Their folder may be moved.
            model.name_or_path = str(Path(model.name_or_path).resolve())
        torch.manual_seed(int(keyed_rng(args.seed, NEW_WEIGHTS, index).integers(2**32)))
        config = peft.LoraConfig(
            r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", **settings
        )
        model = peft.get_peft_model(model, config).eval()
        # A checkpoint of LoRA holds only what is trained. The rest comes from --model-path.
        model.register_state_dict_post_hook(leave_out_frozen)
        model.register_load_state_dict_post_hook(frozen_are_not_missing)
    set_checkpointing(model, args.gradient_checkpointing)
    return model


def leave_out_frozen(model, state_dict, *_):
    """A hook of `state_dict`: what is not trained is not in it."""
    for name in list(state_dict):
        if not is_lora(name):
            del state_dict[name]


def frozen_are_not_missing(model, keys):
    """A hook of `load_state_dict`: only what is trained can be missing."""
    keys.missing_keys[:] = filter(is_lora, keys.missing_keys)


is_lora = re.compile("lora_|modules_to_save").search  # in the names of weights that peft trains


def load_reference(args, policy, tokenizer, longest_row):
    """The frozen model of the KL, which is called like the policy. None where there is no KL.

    With LoRA it is the policy without its adapters, unless --ref-model-path names another model.
    """
    if args.kl_coef == 0 and args.ref_model_path is None:
        return None
    if not args.lora_r or args.ref_model_path is not None:
        path = args.ref_model_path or args.model_path
        model = load_model(path, args.dtype, longest_row)
        check_vocabulary(path, model, policy, tokenizer)
        return model

    def policy_without_adapters(*inputs, **settings):
        with policy.disable_adapter():
            return policy(*inputs, **settings)

    return policy_without_adapters


class CastKeys:
    """For a KV cache. Autocast casts only the values, and attention would cast all keys again."""

    def update(self, keys, values, *inputs, **settings):
        return super().update(keys.to(values.dtype), values, *inputs, **settings)


class KVCache(CastKeys, transformers.DynamicCache):
    """The keys and values of the tokens so far."""


class RecordedKVCache(CastKeys, transformers.StaticCache):
    """The same, with room for all tokens: what is recorded uses the same memory each time."""

    def __init__(self, config, length):
        super().__init__(config, max_cache_len=length)
        # A sliding window would count its tokens in Python. The masks hide what lies before it.
        full = transformers.cache_utils.StaticLayer
        self.layers = [full(length) if layer.is_sliding else layer for layer in self.layers]


def record_steps(model, rows, cache):
    """Record the pass over the newest token of all rows, for a GPU, which would wait for Python.

    A token is a thousand small kernels. A CUDA graph starts them together. No row leaves the cache.
    rows: [rows, tokens], the prompts, and room for completions. The caller writes new tokens into
    this memory before it asks for a step.
    Yields the logits of all rows, [rows, 1, vocabulary], once for each token.
    """
    # The column of the newest token is the number of those that the cache holds.
    step = partial(forward, model, rows, cache, cache.layers[0].cumulative_length[None])
    torch.cuda.set_sync_debug_mode("error")  # What waits for the GPU cannot be recorded.
    try:
        logits = step()  # The first step is not recorded. It also loads the kernels.
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield logits
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's, may use the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = step()  # This only reserves memory for the logits. A replay computes them.
    while True:
        graph.replay()
        yield logits


def check_sampler(args, sampler, prompts):
    """Refuse a model whose sampler and training passes differ by more than rounding. The shortest
    and the longest prompt are sampled together, and then each is passed alone."""
    prompts = sorted((prompt.token_ids for prompt in prompts), key=len)
    prompts = pad_left([prompts[0], prompts[-1]])
    uniforms = torch.full((2, args.response_length), 0.5, dtype=torch.double)
    # Eight tokens are enough, in rows that are as wide as those of the run.
    short = replace(sampler, ends=transformers.MaxLengthCriteria(8))
    with ready_to_sample(args, sampler.policy):
        try:
            samples = sample(short, prompts, uniforms, args.temperature)
        except Exception as error:
            if not sampler.is_recorded:
                raise
            accelerator.print(f"sampling without CUDA graphs: {error}")
            short.is_recorded = sampler.is_recorded = False
            samples = sample(short, prompts, uniforms, args.temperature)
    batch = SimpleNamespace(prompt_tokens=prompts, **samples)
    try:
        with torch.no_grad():
            alone = torch.cat([token_logprobs(args, sampler.policy, batch, [i]) for i in range(2)])
    except Exception as error:  # Such as a hybrid, which cannot go on from a prompt's cache.
        raise RuntimeError(f"{error}; does this model need --share-prompts False?") from error
    compare_with_sampler(args, alone - batch.logprobs)


# ============================= 9  logging, samples, checkpoints =============================
def evaluate(args, sampler, prompts, reward, output_dir, iteration):
    """The mean score of held-out prompts, and the mean of the best of their --eval-k scores."""
    k = args.eval_k
    rng = keyed_rng(args.seed, EVALUATION, iteration)
    batch = generate(args, sampler, prompts, k, rng, args.eval_temperature)
    scores, parts = score_episodes(args, batch, reward, f"evaluation {iteration}")
    if args.save_rollouts:
        columns = {"score": scores, "logprobs": batch.logprobs}
        records = episode_records(batch, iteration, columns, parts)
        write_jsonl(output_dir / f"rollouts/eval_{iteration:08d}.jsonl", records)
    metrics = {
        "eval/scores": scores.nanmean(),
        "eval/num_unscored": scores.isnan().sum(),
        # A prompt of which a score is missing does not count.
        f"eval/best_of_{k}": scores.view(-1, k).amax(1).nanmean(),
    }
    return metrics | {f"eval/{name}": mean for name, mean in mean_metrics(parts).items()}


def write_jsonl(path, records, mode="w"):
    """The main process writes one JSON object per line."""
    if not accelerator.is_main_process:
        return
    path.parent.mkdir(exist_ok=True)
    with open(path, mode) as file:
        for record in records:
            # JSON has null, and no NaN.
            record = json.loads(json.dumps(record, default=str), parse_constant=lambda _: None)
            file.write(json.dumps(record) + "\n")


def rollout_metrics(batch, scores):
    """What the batch itself shows. Means are over its episodes or its tokens."""
    return {
        "objective/scores": scores.nanmean(),
        "objective/entropy": -batch.logprobs.sum(1).mean(),  # an estimate, per episode
        "policy/entropy_avg": batch.entropies[batch.mask].mean(),  # exact, per token
        "val/num_eos_tokens": batch.ended.sum(),
        "val/cut_off_fraction": 1 - batch.ended.float().mean(),
        "val/num_unscored": scores.isnan().sum(),
        "response_length_mean": batch.mask.sum(1).float().mean(),
    }


def update_metrics(args, batch, mini_batch, passes, is_first):
    """What an update logs. From here on, every process has what the passes of all computed.
    is_first: the policy has not changed since it sampled, so both must agree up to rounding"""
    computed = [tensor[mini_batch] for tensor in collect(passes, len(batch.prompts))]
    logprobs, policy_losses, value_losses, logratio, is_clipped, value_is_clipped = computed
    mask = batch.mask[mini_batch]
    metrics = {
        "loss/policy_avg": (policy_losses * mask).sum() / mask.sum(),
        "loss/value_avg": (value_losses * mask).sum() / mask.sum(),
        "val/clipfrac_avg": value_is_clipped[mask].float().mean(),
    }
    metrics |= ratio_metrics(logratio, is_clipped, mask)
    if is_first:
        difference = logprobs - batch.logprobs[mini_batch]
        metrics |= compare_with_sampler(args, difference[mask])
    return metrics


def ratio_metrics(logratio, is_clipped, mask):
    """What an update logs of its ratios.

    logratio, is_clipped: [episodes, ratios]; mask: [episodes, response]. An episode may have a
    ratio for each token, or only one. Those of tokens count where mask is True.
    """
    has_ratio = mask[:, : logratio.shape[1]]
    logratio = logratio[has_ratio]
    is_clipped = is_clipped[has_ratio]
    ratio = logratio.exp()
    return {
        "policy/approxkl_avg": 0.5 * logratio.square().mean(),
        "policy/clipfrac_avg": is_clipped.float().mean(),
        "val/ratio": ratio.mean(),
        "val/ratio_var": ratio.var(correction=0),
    }


def compare_with_sampler(args, difference):
    """How far the first training pass of an iteration is from the sampler, at most, for any token.

    The weights are the same. Where more than rounding differs, the gradients would be wrong.
    difference: of their log-probabilities
    """
    largest = difference.abs().max()
    # In bfloat16 a mean of at most 0.05 was measured where it is right, and 0.15 where it is wrong.
    is_rounding = largest < 1e-3 if args.dtype == "float32" else difference.abs().mean() < 0.1
    if not is_rounding:
        raise UsageError(
            f"sampling and training give log-probabilities {largest:.2g} apart; does this model"
            " need --share-prompts False or --no-cuda-graphs?"
        )
    return {"val/sampling_logprob_difference": largest}


def mean_metrics(dicts):
    """The mean of each metric over the dicts that have it."""
    values = {}
    for metrics in dicts:
        for name, value in metrics.items():
            if value is not None:
                values.setdefault(name, []).append(float(value))
    return {name: np.mean(values[name]) for name in values}


def write_metrics(state, output_dir, metrics, progress):
    """Hand an iteration's metrics to metrics.jsonl, the trackers and the progress bar. The state
    notes whether an update had a gradient of scores."""
    metrics = recursively_apply(Tensor.item, metrics)
    # The mean of no episodes is nan, and a ratio can be inf. JSON knows neither.
    metrics = {name: value for name, value in metrics.items() if isfinite(value)}
    write_jsonl(output_dir / "metrics.jsonl", [metrics], mode="a")
    # Where all scores of every group are equal, only a KL moves the weights.
    if metrics.get("grad_norm") and metrics.get("group/equal_scores_fraction") != 1:
        state["learned"] = True
    track("log", metrics, step=metrics["episode"])
    progress.set_postfix(score=metrics.get("objective/scores"))
    for name in ("objective/scores", "eval/scores"):
        # Without a terminal there is no bar.
        if name in metrics and (progress.disable or name == "eval/scores"):
            with tqdm.external_write_mode():
                accelerator.print(f"episode {metrics['episode']}: {name} {metrics[name]:.3f}")
    return metrics


def track(method, *inputs, **settings):
    """Call a method of the trackers that have it. One that fails gets no more calls."""
    for tracker in list(accelerator.trackers):
        try:
            if hasattr(tracker, method):
                getattr(tracker, method)(*inputs, **settings)
        except Exception as error:  # The run is worth more than its plots.
            warnings.warn(f"--log-with {tracker.name} fails, and gets nothing more: {error!r}")
            accelerator.trackers.remove(tracker)


def end_run():
    """Close the trackers, and the connection of the processes."""
    track("finish")
    accelerator.trackers.clear()  # `end_training` would finish them again.
    accelerator.end_training()


def episode_records(batch, iteration, tensors, parts):
    """What a file in rollouts/ holds of each episode. tensors: [episodes] or [episodes, response],
    by name; None is null"""
    records = []
    for i, prompt in enumerate(batch.prompts):
        record = dict(iteration=iteration, index=i, row=prompt.number, prompt=prompt.text)
        record |= dict(completion=batch.completions[i], token_ids=batch.token_ids[i])
        record["columns"] = {name: prompt.row[name] for name in prompt.row if name != "prompt"}
        for name, tensor in ({"ended": batch.ended} | tensors).items():
            value = None if tensor is None else tensor[i].tolist()
            if isinstance(value, list):  # a number for each token, and then padding
                value = value[: len(batch.token_ids[i])]
            record[name] = value
        records.append(record | parts[i])
    return records


def save_episodes(args, plan, output_dir, metrics, batch, columns, parts):
    """Write all episodes with --save-rollouts. --num-sample-generations times, show one of each of
    four groups. metrics: of the iteration; columns, parts: as in `episode_records`"""
    iteration = metrics["iteration"]
    wanted = args.num_sample_generations
    is_shown = iteration * wanted % plan.iterations < wanted  # at equal distances
    if not accelerator.is_main_process or not (args.save_rollouts or is_shown):
        return
    records = episode_records(batch, iteration, columns, parts)
    if args.save_rollouts:
        write_jsonl(output_dir / f"rollouts/{iteration:08d}.jsonl", records)
    if is_shown:
        names = ["prompt", "completion", "score", *parts[0]]
        samples = [[record.get(name) for name in names] for record in records[:: args.k][:4]]
        for sample in samples:
            tqdm.write(f"---- a sample of episode {metrics['episode']}")
            for name, value in zip(names, sample):
                tqdm.write(f"{name}: {value}")
        track("log_table", "samples", columns=names, data=samples, step=metrics["episode"])


def claim_output_dir(args, prompts):
    """Choose the run's folder, the same on all processes, and let no other run use it.

    If its run is finished, --resume ends the program here. Returns the folder, what its args.yaml
    holds, and its lock, which is free again when nothing refers to it.
    """
    name = f"runs/{Path(__file__).stem}__{args.seed}__{int(time.time())}__{os.getpid()}"
    # The clocks of two processes may differ.
    output_dir = Path(gather_object([args.output_dir or name])[0]).absolute()
    accelerator.project_configuration.logging_dir = str(output_dir)
    digest = hashlib.sha256()
    for prompt in prompts:  # Without the addresses of objects, such as images.
        row = re.sub(r" at 0x\w+", "", repr((prompt.row, prompt.token_ids)))
        digest.update(row.encode())
    settings = vars(args) | {
        "output_dir": str(output_dir),
        "prompts": f"SHA-256 {digest.hexdigest()[:12]}",
        "processes": accelerator.num_processes,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__},"
        f" accelerate {accelerate.__version__}",
    }
    files = {Path(__file__).name: SCRIPT}
    if ".py:" in args.reward:
        reward = Path(args.reward.rpartition(":")[0])
        files[reward.name] = reward.read_bytes()
    # A killed process gives its lock back. A notebook may take its own again.
    lock = filelock.FileLock(output_dir / ".lock", blocking=False, is_singleton=True)
    refusal = None
    if accelerator.is_main_process:
        try:
            begin_run(args, output_dir, settings, files, lock)
        except (UsageError, OSError) as error:
            refusal = f"--output-dir {output_dir}: {error}"
    refusal = gather_object([refusal])[0]  # All processes stop, or none.
    if refusal:
        raise UsageError(refusal)
    if (output_dir / "model").exists():  # It is written last of all.
        accelerator.print(f"nothing to do: the run in {output_dir} is finished")
        accelerator.end_training()
        sys.exit()
    return output_dir, settings, lock


def begin_run(args, output_dir, settings, files, lock):
    """Lock the folder, and write into it what the run is: settings as args.yaml, and files.

    A folder holds a run if it has metrics, a checkpoint or a model. Then only --resume may use it.
    With a checkpoint or a model it must be this run. With neither, the run begins anew.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise UsageError("another run writes into it") from error
    except OSError:  # Some network disks have no locks.
        pass
    is_finished = (output_dir / "model").exists()
    has_result = is_finished or any(output_dir.glob("checkpoints/iteration_*"))
    if not args.resume and (has_result or (output_dir / "metrics.jsonl").exists()):
        raise UsageError("it holds a run; --resume continues a run")
    if has_result:
        before = yaml.safe_load((output_dir / "args.yaml").read_text())
        for name, content in files.items():
            kept = output_dir / name
            if not kept.exists() or kept.read_bytes() != content:
                raise UsageError(f"{name} differs from its copy; copy it there to go on with it")
        for name, new in settings.items():
            old = before.get(name)
            if name not in FREE_FLAGS and new != old:
                raise UsageError(f"--resume: {name} is {new}, but {old} in its args.yaml")
    elif args.resume:  # Rollouts may be left of a start that came to no checkpoint.
        for file in output_dir.glob("rollouts/*0???????.jsonl"):
            file.unlink()
    if is_finished:
        return
    # Checkpoints are folders that get their names when they are whole. A mounted bucket cannot
    # rename a folder, so this is tried now.
    trial = Path(tempfile.mkdtemp(dir=output_dir))
    (trial / "file").touch()
    trial = trial.rename(trial.with_suffix(".tmp"))
    shutil.rmtree(trial, ignore_errors=True)
    files["args.yaml"] = yaml.safe_dump(settings, sort_keys=False).encode()
    for name, content in files.items():  # A kill leaves a whole file, or none.
        temporary = output_dir / f"{name}.tmp"
        temporary.write_bytes(content)
        temporary.replace(output_dir / name)


def load_checkpoint(args, state, output_dir):
    """Load the newest checkpoint of the folder, if there is one, and change the state to its."""
    checkpoints = sorted(output_dir.glob("checkpoints/iteration_*"))
    checkpoints = gather_object([checkpoints])[0]  # as the main process sees them
    if checkpoints:
        newest = checkpoints[-1]
        try:
            state |= json.loads((newest / "state.json").read_text())
            accelerator.load_state(str(newest))
        except Exception as error:
            raise RuntimeError(f"cannot load {newest}; if it is damaged, remove it") from error
        accelerator.print(f"resuming after iteration {state['iteration']}")
    elif args.resume:
        accelerator.print("no checkpoint, starting at 0")
    metrics = output_dir / "metrics.jsonl"
    if accelerator.is_main_process and metrics.exists():  # Cut what came after the checkpoint.
        os.truncate(metrics, state.get("metrics_bytes", 0))
    state["saved"] = time.monotonic()


def announce(args, settings, sampler, prompts):
    """Print what the run will do, and start the trackers."""
    names = {"NO": "alone", "FSDP": "FSDP2", "DEEPSPEED": "DeepSpeed"}
    folder = accelerator.logging_dir
    accelerator.print(
        f"{accelerator.num_processes} x {accelerator.device.type}"
        f" ({names.get(accelerator.distributed_type, 'DDP')}), {args.dtype}, learning rate"
        f" {args.learning_rate:g}, response length {args.response_length}; writing to {folder}"
    )
    eos_ids = sampler.ends[0].eos_token_id.tolist()
    ends = dict(zip(eos_ids, sampler.tokenizer.convert_ids_to_tokens(eos_ids)))
    accelerator.print(f"tokens that end a completion: {ends}; --stop-string: {args.stop_string!r}")
    accelerator.print(f"the first prompt: {sampler.tokenizer.decode(prompts[0].token_ids)!r}")
    # tensorboard takes no None
    config = {name: value for name, value in settings.items() if value is not None}
    name = {"name": os.environ.get("WANDB_NAME", Path(folder).name)}
    wandb = name | {"dir": os.environ.get("WANDB_DIR", folder)}
    accelerator.init_trackers(
        os.environ.get("WANDB_PROJECT", "tally"), config, {"wandb": wandb, "trackio": name}
    )


def save_checkpoint(args, state, output_dir, is_last):
    """Write weights, optimizer, schedule and state, if it is time. The folder gets its name when it
    is whole."""
    if not args.save_every:
        return
    is_time = state["iteration"] % args.save_every == 0 or time.monotonic() - state["saved"] > 600
    if not gather_object([is_last or is_time])[0]:  # The main process decides. Clocks may differ.
        return
    state["saved"] = time.monotonic()
    unfinished = output_dir / "checkpoints/unfinished"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state["metrics_bytes"] = (output_dir / "metrics.jsonl").stat().st_size
        (unfinished / "state.json").write_text(json.dumps(state))
        unfinished.rename(unfinished.with_name(f"iteration_{state['iteration']:08d}"))
        for old in sorted(unfinished.parent.glob("iteration_*"))[:-2]:
            # What is half deleted has no such name. A network disk may keep some of its files.
            shutil.rmtree(old.rename(unfinished), ignore_errors=True)


def save_model(model, tokenizer, folder):
    """Write a model and the tokenizer for `from_pretrained`. With LoRA these are the adapters."""
    weights = accelerator.get_state_dict(model)  # All processes take part in it.
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def save_result(policy, tokenizer, output_dir, plan, state):
    """Write the model. Its folder gets its name when it is whole, and then checkpoints go."""
    save_model(policy, tokenizer, output_dir / "model.tmp")
    accelerator.wait_for_everyone()  # Another process may still be reading a checkpoint.
    if accelerator.is_main_process:
        (output_dir / "model.tmp").rename(output_dir / "model")
        for folder in output_dir.glob("checkpoints/iteration_*"):
            shutil.rmtree(folder, ignore_errors=True)
    if not state["learned"]:
        accelerator.print(
            "warning: no update had a gradient, or all scores of every group were equal",
            file=sys.stderr,
        )
    accelerator.print(
        f"{plan.episodes:,} episodes, {plan.steps:,} steps, {plan.epochs:g} epochs;"
        f" model in {output_dir / 'model'}"
    )


# ========================================= 10  flags =========================================
BUILT_IN_DATASET = str(DEFAULT / "train.jsonl")

# --learning-rate of the built-in policy, of any other, and of LoRA adapters.
RATES = {"built-in": 5e-5, "other": 3e-6, "LoRA": 1e-5}

# What may change when a run is resumed: memory, evaluation, and what is shown or kept. In place of
# the path --dataset, its rows are compared.
FREE_FLAGS = """
    output_dir resume save_every plan dataset share_prompts gradient_checkpointing cuda_graphs
    eval_dataset eval_every eval_temperature eval_k eval_reward per_device_train_batch_size
    per_device_rollout_batch_size log_with num_sample_generations save_rollouts processes versions
""".split()

# Numbers that may not be 0. No number may be negative.
ABOVE_ZERO = """
    save_every plan lora_r max_prompt_length eval_every eval_k num_train_epochs batch_size
    num_mini_batches num_ppo_epochs per_device_train_batch_size per_device_rollout_batch_size
    response_length temperature rloo_k num_generations max_grad_norm kl_target kl_horizon target_kl
    ratio_threshold score_clip
""".split()


class UsageError(ValueError):
    """A mistake in flags or data. The program shows its message without a traceback."""


def check_flags(args):
    """A copy with defaults filled in. Flags that contradict each other are refused."""
    args = copy.copy(args)
    for name, value in vars(args).items():
        if isinstance(value, str) and name != "stop_string":  # A shell leaves the ~ of --flag=~/x.
            setattr(args, name, os.path.expanduser(value))
    args.gradient_checkpointing |= os.environ.get("FSDP_ACTIVATION_CHECKPOINTING") == "true"
    if not args.dtype:
        is_bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"  # of the launcher
        args.dtype = "bfloat16" if is_bf16 else "float32"
    kind = "LoRA" if args.lora_r else "other"
    if Path(args.model_path).resolve() == Path(Args.model_path).resolve():
        kind = "built-in"
        args.dataset = args.dataset or BUILT_IN_DATASET
    if args.eval_dataset is None and args.dataset == BUILT_IN_DATASET:
        args.eval_dataset = str(DEFAULT / "eval.jsonl")
    if args.learning_rate is None:
        args.learning_rate = RATES[kind]
    if args.response_length is None:
        args.response_length = 8 if kind == "built-in" else 256
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if isinstance(value, (int, float)) and not value >= 0:
            raise ValueError(f"{flag} must not be negative")
        if name in ABOVE_ZERO and value == 0:
            raise ValueError(f"{flag} must be above 0")
        if name != "max_grad_norm" and value == inf:
            raise ValueError(f"{flag} must be finite")
        if name.startswith("eval_") and value != getattr(Args, name) and not args.eval_dataset:
            raise ValueError(f"{flag} needs an --eval-dataset")
    faults = {  # a message, and whether it is true
        "--gamma and --lam must be at most 1": max(args.gamma, args.lam) > 1,
        "--adaptive-kl needs a --kl-coef above 0 to start from": (
            args.adaptive_kl and not args.kl_coef
        ),
        "--adaptive-kl needs a --kl-horizon above 0.2 * --batch-size": (
            args.adaptive_kl and args.kl_horizon <= 0.2 * args.batch_size
        ),
        f"--batch-size {args.batch_size} must be a multiple of k = {args.k} and of"
        f" --num-mini-batches {args.num_mini_batches}": (
            args.batch_size % args.k or args.batch_size % args.num_mini_batches
        ),
        "--model-path needs a --dataset": not args.dataset,
        f"{DEFAULT} is missing, so --model-path and --dataset are needed": (
            args.dataset == BUILT_IN_DATASET and not DEFAULT.exists()
        ),
        "--model-path has LoRA adapters; first merge them with peft: AutoPeftModelForCausalLM"
        ".from_pretrained(path).merge_and_unload().save_pretrained(folder)": (
            Path(args.model_path, "adapter_config.json").exists()
        ),
        "--lr-scheduler-type constant has no warm-up; constant_with_warmup has": (
            args.lr_scheduler_type == "constant" and args.warmup_steps
        ),
        "--stop-string is empty": args.stop_string == "",
        "--eval-k needs an --eval-temperature": args.eval_k > 1 and not args.eval_temperature,
        "--share-prompts True needs a KV cache, which --gradient-checkpointing excludes": (
            args.share_prompts and args.gradient_checkpointing
        ),
        "--resume needs the --output-dir of the run": args.resume and not args.output_dir,
    }
    for message, is_true in faults.items():
        if is_true:
            raise ValueError(message)
    return args


transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# Its new name, `cache`, is unknown to older versions.
warnings.filterwarnings("ignore", "`past_key_values`", FutureWarning)
# A checkpoint of tied weights holds them once. accelerate would warn about it every time.
logging.getLogger("accelerate.utils.other").setLevel("ERROR")

if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # Not so in a notebook. A terminal may know only ASCII.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main(tyro.cli(Args, description=__doc__))
    except UsageError as error:
        # The run is freed by now, so its progress bar has ended.
        sys.exit(f"\nerror: {error}")
    except KeyboardInterrupt:
        folder = accelerator.logging_dir if accelerator else "OUTPUT_DIR"
        has_checkpoint = any(Path(folder).glob("checkpoints/iteration_*"))
        then = "goes on" if has_checkpoint else "starts anew: there is no checkpoint"
        sys.exit(f"\nstopped; --resume --output-dir {folder} {then}")
