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
is --cliprange-value.

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

How to change it: for a reward, see --reward. The advantages are `gae`, the loss is `ppo_loss`.
docs/variants.md has more places, docs/coming_from.md has TRL's names of the flags.

Papers: Schulman et al. 2017, arXiv 1707.06347; Ziegler et al. 2019, arXiv 1909.08593; Huang et al.
2024, The N+ Implementation Details of RLHF with PPO, arXiv 2403.17031.
"""

import atexit
import contextlib
import copy
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import re
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, floor, inf, isfinite, isinf, isnan, lcm, nan, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple

import accelerate
import filelock
import numpy as np
import torch
import transformers
import tyro
import yaml
from accelerate.utils import concatenate, gather_object, recursively_apply
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

DEFAULT = Path(__file__).resolve().parent / "benchmark" / "default"


# ========================================= 1  flags =========================================
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "inverse_sqrt"
]


def alias(kind, name):
    """The type of a flag that has a second name, that of TRL."""
    return Annotated[kind, tyro.conf.arg(aliases=[name])]


@dataclass
class Args:
    # run
    seed: int = 1  # every random number depends only on this, its purpose and the iteration
    output_dir: str | None = None  # None: runs/<script>__<seed>__<unix time>__<process id>
    resume: bool = False  # continue from the newest checkpoint in --output-dir, if there is one
    save_every: int | None = 100  # iterations between checkpoints; None: no checkpoints
    keep_checkpoints: int | None = None
    """this many stay, also after the end, each with a `model/` for --model-path; None: the newest
    two, until the run is finished"""
    plan: int | None = None  # print every count for this many processes and exit; loads no model
    dtype: Literal["float32", "bfloat16"] | None = None  # of forward passes; None: accelerate's
    cuda_graphs: bool = True  # on a GPU, record the kernels of one token, and start them together
    # model and data
    model_path: str = str(DEFAULT / "policy")  # policy and tokenizer: a folder or a Hub name
    lora_r: int | None = None  # rank of LoRA adapters (arXiv 2106.09685); None: train all weights
    lora_alpha: int | None = None  # adapters are multiplied by this / rank; None: twice the rank
    gradient_checkpointing: bool = False  # compute activations again in the backward pass
    ref_model_path: str | None = None  # reference model of the KL; None: --model-path
    dataset: str | None = None
    """.jsonl file or Hub dataset NAME:SPLIT; None: the sums of the built-in policy"""
    max_prompt_length: int | None = None  # drop prompts with more tokens than this; None: no limit
    reward: str = "exact_match"  # or FILE.py:FUNCTION, package.module:FUNCTION, none
    reward_model_path: str | None = None  # one-label classifier; its score is added to --reward
    value_model_path: str | None = None
    """the value model before training; None: a copy of the reward model if that has the policy's
    vocabulary, else a copy of the policy with a new head"""
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
    response_length: alias(int | None, "--max-completion-length") = None
    """token limit of a completion; None: 256, built-in policy 8"""
    temperature: float = 1.0  # divides the logits, in sampling and in every log-probability
    stop_token_id: int | None = None  # this token ends a completion as an EOS does
    stop_string: str | None = None  # this text does, too, such as "</answer>"; a newline is $'\n'
    # algorithm
    kl_coef: alias(float, "--beta") = 0.01
    """weight of the KL in the reward; 0: no KL and no reference model"""
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
    cliprange: alias(float, "--epsilon") = 0.2
    """clips the ratio to 1 - this .. 1 + this (arXiv 1707.06347, eq. 7)"""
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
    save_rollouts: bool = False  # write every episode to rollouts.jsonl or eval_rollouts.jsonl

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
        # The policy has not changed since it sampled: p_old is p_new, as a constant.
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
# The accelerator knows which process this is, and connects all of them. `main` starts it.
accelerator: accelerate.Accelerator

# A model is called in one way: model(function) is function(model). Where processes share the
# weights of a model, its weights are whole only inside of such a call.


def main(args):
    """Set up, train, save. Each turn of the loop is one iteration, in the stages 4a to 4f.

    Returns the policy, and the metrics of all rows that this call has written.
    """
    args = check_flags(args)  # a copy, with all defaults filled in
    start_accelerator(args)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_path)
    prompts = load_prompts(args, args.dataset, args.reward, tokenizer)
    eval_prompts = load_prompts(args, args.eval_dataset, args.eval_reward or args.reward, tokenizer)
    plan = batch_arithmetic(args, len(prompts), args.plan or accelerator.num_processes)
    if args.plan is not None:
        print_plan(plan)
        return

    output_dir, settings = choose_output_dir(args, prompts)  # A finished run stops here.
    scorers, eval_scorers = load_scorers(args, tokenizer, prompts, eval_prompts)
    # The most tokens that a prompt with its completion may have.
    longest_row = max(len(p.token_ids) for p in prompts + eval_prompts) + args.response_length
    policy = load_policy(args, tokenizer, longest_row)
    add_value_model(args, policy, longest_row)  # It is a part of the module that is trained.
    reference = load_reference(args, policy, longest_row)  # None: there is no KL

    size = args.per_device_train_batch_size  # of a micro-batch, in episodes
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )
    # The schedule does not go through `prepare`: accelerate would step it once for each process.
    scheduler = transformers.get_scheduler(
        args.lr_scheduler_type, optimizer, plan.warmup_steps, plan.steps
    )
    policy, optimizer = accelerator.prepare(policy, optimizer)
    lock = claim_folder(output_dir, settings)
    # What one iteration hands to the next. With --resume, a checkpoint has it.
    state = {"iteration": 0, "step": 0, "kl_coef": args.kl_coef}
    state |= {"score_count": 0, "score_mean": 0.0, "score_squares": 0.0}
    state |= load_checkpoint(args, output_dir)
    announce(args, settings, plan, accelerator.unwrap_model(policy))
    scheduler.last_epoch = state["step"]
    # The bar counts optimizer steps. disable=None: there is a bar only in a terminal.
    progress = tqdm(
        total=plan.steps, initial=state["step"], disable=not accelerator.is_main_process or None
    )
    history = []  # the metrics of each row of metrics.jsonl
    if eval_prompts and state["iteration"] == 0:
        metrics = evaluate(args, policy, eval_prompts, eval_scorers, output_dir, iteration=0)
        metrics |= {"iteration": 0, "step": 0, "episode": 0, "epoch": 0.0}
        history.append(write_metrics(output_dir, metrics, progress))

    for iteration in range(state["iteration"] + 1, plan.iterations + 1):
        # ---- 4a  rollout: sample a completion of each drawn prompt, and compute its values
        rollout_start = time.perf_counter()
        is_last = iteration == plan.iterations
        num_episodes = plan.last_batch_size if is_last else args.batch_size
        first = (iteration - 1) * plan.prompts_per_iteration  # prompts that were drawn before
        indices = draw_prompts(args.seed, len(prompts), first, num_episodes // args.k)
        drawn = [prompts[index] for index in indices]  # [groups]
        rng = keyed_rng(args.seed, SAMPLING, iteration)
        batch = generate(args, policy, drawn, args.k, rng, args.temperature)
        one_pass = partial(forward_pass, accelerator.unwrap_model(policy), token_values, batch)
        values = map_episodes(one_pass, batch.pass_lengths, size)

        # ---- 4b  score
        # The score is the sum of its parts: of --reward, its dict's entries, and the reward model.
        scores, parts = score_episodes(batch, scorers, f"iteration {iteration}")
        refuse_missing_scores(batch, scores)
        scores = scores - args.missing_eos_penalty * ~batch.ended  # [episodes]
        scores = normalize_scores(args, state, scores)
        ref_logprobs = None
        if reference is not None:
            one_pass = partial(forward_pass, reference, token_logprobs, batch)
            ref_logprobs = map_episodes(one_pass, batch.pass_lengths, size)

        # ---- 4c  advantages
        rewards = torch.zeros_like(batch.logprobs)  # [episodes, response]
        if reference is not None:
            kl = token_kl(batch.logprobs, ref_logprobs, args.kl_estimator)
            rewards = -state["kl_coef"] * kl
        all_episodes = torch.arange(num_episodes, device=accelerator.device)
        # The score comes at the last token of each completion.
        rewards[all_episodes, batch.mask.sum(1) - 1] += scores.float()
        if args.whiten_rewards:
            rewards[batch.mask] = whiten(rewards[batch.mask]) + rewards[batch.mask].mean()
        advantages = gae(rewards, values, args.gamma, args.lam)  # [episodes, response]
        returns = advantages + values
        if args.whiten_advantages:
            advantages[batch.mask] = whiten(advantages[batch.mask])

        # ---- 4d  optimize
        train_start = time.perf_counter()
        updates = []  # the metrics of each update
        for ppo_epoch in range(args.num_ppo_epochs):
            for mini_batch in draw_mini_batches(args, iteration, ppo_epoch, num_episodes):
                learning_rate = optimizer.param_groups[0]["lr"]
                if updates_have_ended(args, updates):
                    # --target-kl drops the rest of the updates. They still count as steps.
                    updates.append({})
                    scheduler.step()
                    state["step"] += 1
                    progress.update()
                    continue
                optimizer.zero_grad()
                mini_batch_tokens = batch.mask[mini_batch].sum()
                passes = []  # what each pass computed
                for episodes, is_real, is_last_pass in micro_batches(
                    mini_batch, batch.pass_lengths, size
                ):
                    with exchange_gradients(policy, now=is_last_pass):
                        # DDP allows one forward pass for each backward pass, so it gives both.
                        logprobs, new_values = forward_pass(policy, compute_both, batch, episodes)
                        policy_losses, logratio, is_clipped = ppo_loss(
                            args, logprobs, batch.logprobs[episodes], advantages[episodes]
                        )
                        value_losses, value_is_clipped = clipped_value_loss(
                            new_values, values[episodes], returns[episodes], args.cliprange_value
                        )
                        losses = policy_losses + args.vf_coef * value_losses
                        assert losses.shape == advantages[episodes].shape, (
                            "losses are [episodes, response]: one for each token"
                        )
                        losses = losses * batch.mask[episodes]
                        # Divide by the tokens of the whole mini-batch, not of this micro-batch. So
                        # neither micro-batches nor processes change the gradient.
                        loss = (losses * is_real[:, None]).sum() / mini_batch_tokens
                        # DDP takes the mean of the processes' gradients. We need their sum.
                        accelerator.backward(loss * accelerator.num_processes)
                    outputs = (policy_losses, value_losses, logratio, is_clipped, value_is_clipped)
                    passes.append((episodes, is_real, (logprobs, *outputs)))
                # From here on, every process has what all processes computed.
                computed = [tensor[mini_batch] for tensor in collect(passes, num_episodes)]
                new_logprobs, *outputs = computed
                mask = batch.mask[mini_batch]
                update = update_metrics(*outputs, mask)
                if not updates:  # no step yet: trainer and sampler must agree up to rounding
                    difference = new_logprobs - batch.logprobs[mini_batch]
                    update |= compare_with_sampler(args, difference[mask])
                if not is_dropped(args, update):  # by --target-kl or --ratio-threshold
                    grad_norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    update["grad_norm"] = grad_norm
                    if not isfinite(grad_norm):
                        where = f"iteration {iteration}, step {state['step'] + 1}"
                        raise RuntimeError(f"{where}: gradient norm {grad_norm}")
                    optimizer.step()
                scheduler.step()
                updates.append(update)
                state["step"] += 1
                progress.update()

        # ---- 4e  log
        episode = (iteration - 1) * args.batch_size + num_episodes
        epoch = episode / (args.k * len(prompts))
        state["iteration"] = iteration
        metrics = {"iteration": iteration, "step": state["step"]}
        metrics |= {"episode": episode, "epoch": epoch, "lr": learning_rate}
        now = time.perf_counter()
        metrics["eps"] = num_episodes / (now - rollout_start)
        metrics["time/rollout_s"] = train_start - rollout_start
        metrics["time/train_s"] = now - train_start
        metrics |= rollout_metrics(batch, scores) | mean_metrics(parts) | mean_metrics(updates)
        if reference is not None:
            metrics["objective/kl"] = (batch.logprobs - ref_logprobs).sum(1).mean().item()
            metrics["objective/kl_coef"] = state["kl_coef"]
            metrics["objective/non_score_reward"] = -state["kl_coef"] * kl.sum(1).mean().item()
            adapt_kl_coef(args, state, metrics["objective/kl"], num_episodes)
        metrics["policy/skipped_updates"] = sum("grad_norm" not in update for update in updates)

        # ---- 4f  evaluate and save
        if eval_prompts and (is_last or iteration % (args.eval_every or plan.iterations) == 0):
            metrics |= evaluate(args, policy, eval_prompts, eval_scorers, output_dir, iteration)
        history.append(write_metrics(output_dir, metrics, progress))
        columns = {"score": scores, "advantage": advantages, "values": values, "returns": returns}
        columns |= {"logprobs": batch.logprobs, "ref_logprobs": ref_logprobs}
        write_rollouts(args, output_dir, plan, metrics, batch, columns, parts)
        if args.save_every and (is_last or iteration % args.save_every == 0):
            save_checkpoint(args, policy, state, output_dir)

    progress.close()
    if plan.steps > 0:
        save_value_model(args, policy, output_dir)
        save_result(args, policy, output_dir, plan)
    model = accelerator.unwrap_model(policy)
    # The end of the process group can hang while what `prepare` made exists.
    policy, optimizer = accelerator.free_memory(policy, optimizer)
    accelerator.end_training()
    lock.release(force=True)  # In a notebook it may be taken twice.
    return model, history


# ======================================== 5  the model =======================================
@dataclass
class Batch:
    """The episodes of one iteration. Every process holds all of them.

    The k episodes of a group are neighbours. The axis `response` has --response-length entries. In
    rows of tokens, -1 means that there is no token: before a prompt that is shorter than another,
    and after the end of a completion. The other tensors are 0 there, and `mask` is False.
    """

    k: int  # episodes of a group
    prompts: list["Prompt"]  # [episodes], each with row, text and token_ids
    prompt_tokens: Tensor  # [episodes, longest prompt], on the CPU
    completions: list[str]  # [episodes], as text, without the special token that ends one
    token_ids: list[list[int]]  # [episodes], tokens of each completion; its EOS is one of them
    tokens: Tensor  # [episodes, response], the same as a tensor
    mask: Tensor  # [episodes, response], True for the tokens that are in the loss
    ended: Tensor  # [episodes], False where the completion was cut off at --response-length
    logprobs: Tensor  # [episodes, response], of each token, by the policy that sampled it
    entropies: Tensor  # [episodes, response], exact entropy of each token's distribution
    pass_lengths: Tensor  # [episodes], tokens of the prompt and of the group's longest completion


def generate(args, policy, drawn, k, rng, temperature):
    """Sample k completions of every prompt. Each process samples a share, and then gets them all.

    An inference engine takes the place of `sample` here. First give it the new weights. It returns
    the same tensors. It may ignore `uniforms`, and return 0 as entropies.
    drawn: [groups]; rng: gives all processes the same random numbers in [0, 1)
    """
    prompts = [prompt for prompt in drawn for _ in range(k)]  # [episodes], group by group
    prompt_tokens = pad_left([prompt.token_ids for prompt in prompts])
    prompt_lengths = (prompt_tokens >= 0).sum(1)
    uniforms = torch.from_numpy(rng.random((len(prompts), args.response_length)))
    uniforms = uniforms.to(accelerator.device)  # [episodes, response], a number for each token
    model = accelerator.unwrap_model(policy)

    def one_pass(episodes):
        tokens = trim(prompt_tokens[episodes.cpu()]).to(accelerator.device)
        numbers = uniforms[episodes]
        return model(partial(sample, prompts=tokens, uniforms=numbers, temperature=temperature))

    with sampling_weights(policy):
        size = args.per_device_rollout_batch_size or args.batch_size
        samples = map_episodes(one_pass, prompt_lengths, size)
    token_ids = [[token for token in row if token >= 0] for row in samples["tokens"].tolist()]
    visible = list(map(partial(without_end, model.tokenizer), token_ids, samples["ended"].tolist()))
    # All episodes of a group get the same length. So sorting by it keeps them together, and a pass
    # that holds them runs their prompt once.
    lengths = torch.tensor([len(tokens) for tokens in token_ids])
    longest = lengths.view(-1, k).amax(1).repeat_interleave(k)
    return Batch(
        k=k,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        completions=model.tokenizer.batch_decode(visible),
        token_ids=token_ids,
        mask=samples["tokens"] >= 0,
        pass_lengths=prompt_lengths + longest,
        **samples,
    )


@torch.no_grad()
def sample(model, prompts, uniforms, temperature):
    """Sample a completion of every prompt, token by token.

    prompts: [episodes, longest prompt]; uniforms: [episodes, response], one number per token;
    temperature: 0 takes the most likely token.
    Returns tokens, ended, logprobs and entropies, as in Batch.
    """
    # In train mode, transformers drops the KV cache when gradient checkpointing is on.
    is_training = model.language_model.training
    model.eval()
    response = uniforms.shape[1]
    rows = torch.nn.functional.pad(prompts, (0, response), value=-1)  # -1: there is no token yet
    tokens = rows[:, -response:]  # These are the same memory: `rows` gets what is sampled, too.
    ended = torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    logprobs = torch.zeros_like(uniforms, dtype=torch.float)
    entropies = torch.zeros_like(logprobs)
    eos_ids = torch.tensor(model.eos_ids, device=uniforms.device)
    running = torch.arange(len(rows), device=rows.device)  # the episodes that have not ended
    steps = model.sampling_steps(model.language_model, rows, prompts.shape[1])
    logits = steps.first_logits
    for t in range(response):
        logits = logits[:, -1].float() / (temperature or 1.0)
        log_p = torch.log_softmax(logits, dim=-1)  # [running, vocabulary]
        p = log_p.exp()
        if temperature > 0:
            picked = pick_tokens(p, uniforms[running, t])
        else:
            picked = log_p.argmax(-1)
        tokens[running, t] = picked
        logprobs[running, t] = log_p.gather(-1, picked[:, None]).squeeze(1)
        # Where p is 0, log_p may be -inf, and 0 * -inf would be nan. Below -104, p is always 0.
        entropies[running, t] = -p.mul_(log_p.clamp_(min=-104)).sum(-1)  # overwrites p and log_p
        has_ended = torch.isin(picked, eos_ids)
        if model.ends_with_stop_string is not None:
            has_ended |= model.ends_with_stop_string(tokens[running, : t + 1], None)
        ended[running] = has_ended
        running = running[~has_ended]  # Completions that have ended get no more tokens.
        if t + 1 == response or len(running) == 0:
            break
        logits = steps.next_logits(running)
    model.train(is_training)
    return dict(tokens=tokens, ended=ended, logprobs=logprobs, entropies=entropies)


def pick_tokens(p, uniforms):
    """Inverse transform: the first token whose cumulative probability exceeds the uniform number.

    p: [rows, vocabulary], probabilities; uniforms: [rows]. Returns [rows].
    """
    cumulative = p.cumsum(-1, dtype=torch.double)
    total = cumulative[:, -1:]  # 1, up to rounding
    # right=True means strictly above. So a token of probability 0 is never picked.
    picked = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True).squeeze(1)
    return picked.clamp(max=p.shape[1] - 1)  # Only p = nan needs it; a later check stops the run.


def token_logprobs(model, prompts, tokens):
    """Log-probability of every completion token, with gradient. It is 0 where there is no token.

    prompts: [episodes, longest prompt]; tokens: [episodes, tokens]. Returns the shape of tokens.
    """
    # The hidden state at the position before a token gives the logits of this token.
    trunk = model.language_model.get_decoder()  # the model without its head
    hidden = model.completion_outputs(trunk, prompts, tokens)

    def logprobs_of(hidden, tokens):  # of some tokens: [tokens, hidden size], [tokens]
        logits = head_logits(model.language_model, hidden) / model.temperature
        log_p = torch.log_softmax(logits, dim=-1)
        return log_p.gather(-1, tokens.clamp(min=0)[:, None]).squeeze(1)

    # All logits at once would be the largest tensor of a run.
    head = model.language_model.get_output_embeddings()
    logprobs = in_pieces(logprobs_of, head, hidden.flatten(0, 1), tokens.flatten())
    return logprobs.view_as(tokens).masked_fill(tokens < 0, 0.0)


def token_values(model, prompts, tokens):
    """Value of every completion token, read one position before it. 0 where there is no token.

    prompts, tokens: as in `token_logprobs`, whose shape it returns
    """
    hidden = separate_rows(model.value_trunk, prompts, tokens)
    return model.value_head(hidden).float().squeeze(-1).masked_fill(tokens < 0, 0.0)


def compute_both(model, **inputs):
    return token_logprobs(model, **inputs), token_values(model, **inputs)


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
        device = accelerator.device
        yield episodes[piece].to(device), is_real[piece].to(device), piece is pieces[-1]


# =================================== MACHINERY ===================================
# You can skip everything below on a first reading. The lecture calls from it:
#   check_flags, start_accelerator, load_prompts, load_scorers, load_policy, load_reference: make
#     what a run needs. A scorer scores the episodes of a batch, and score_episodes calls them.
#   choose_output_dir, claim_folder, load_checkpoint, print_plan, announce: its folder and its start
#   keyed_rng, SAMPLING, draw_prompts, draw_mini_batches: random numbers, and what is drawn by them
#   pad_left, trim, without_end: token lists as a tensor, its columns with tokens, a text's tokens
#   forward_pass, map_episodes, collect: a model's results for some episodes, for all episodes, and
#     of passes that are done. The processes share the passes, and then all have the results.
#   exchange_gradients, sampling_weights: inside, processes add up gradients, or gather weights
#   sampling_steps, completion_outputs, head_logits, in_pieces: logits and hidden states of a model
#   normalize_scores, refuse_missing_scores, token_kl, adapt_kl_coef: what PPO does to scores and KL
#   updates_have_ended, is_dropped: whether an update is left out
#   add_value_model, save_value_model, separate_rows: the model that predicts rewards, and its rows
#   evaluate, compare_with_sampler, save_checkpoint, save_result, and *_metrics, write_*:
#     measure, log and save


# ==================================== 6  data and rewards ====================================
class Prompt(NamedTuple):
    number: int  # of its row in the dataset, from 0
    row: dict  # with all columns of the dataset
    text: str  # the prompt as the model reads it; a chat is rendered by its template
    token_ids: list[int]


def load_prompts(args, path, reward, tokenizer):
    """The prompts of a .jsonl file, or of a Hub dataset NAME:SPLIT or NAME:CONFIG:SPLIT."""
    if path is None:
        return []
    with blaming(f"--dataset or --eval-dataset {path}: a .jsonl file, or a Hub dataset NAME:SPLIT"):
        *names, split = re.split(r":(?![^\[]*\])", path)  # at colons that are not in brackets
        if path.endswith(".jsonl"):
            dataset = Path(path).read_bytes().rstrip().splitlines()
        elif not names:
            raise ValueError("this is neither")
        else:
            dataset = importlib.import_module("datasets").load_dataset(*names, split=split)
    config = transformers.AutoConfig.from_pretrained(args.model_path).get_text_config()
    prompts = []
    for number, row in enumerate(dataset, start=1):
        with blaming(f"{path}:{number} (a row has a `prompt`: text, or messages with a `role`)"):
            if isinstance(row, bytes):
                row = json.loads(row)
            text, token_ids = tokenize(tokenizer, row, add_generation_prompt=True)
            if not row["prompt"] or not token_ids:
                raise ValueError("the prompt is empty")
            if max(*token_ids, args.stop_token_id or 0) >= config.vocab_size:
                raise ValueError("--model-path has no embedding of a token, or of --stop-token-id")
            if isinstance(row["prompt"], list):
                check_chat(row["prompt"], text)
            if reward == "exact_match" and type(row.get("answer")) not in (str, int):
                raise ValueError("exact_match needs an `answer`, a text or an integer")
        prompts.append(Prompt(number - 1, row, text, token_ids))
    # A column that only some rows have is None in the others.
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.row)
    longest = args.max_prompt_length or inf
    kept = [p._replace(row=columns | p.row) for p in prompts if len(p.token_ids) <= longest]
    if not kept:
        raise UsageError(f"{path}: has no rows, or none within --max-prompt-length")
    if len(kept) < len(prompts):
        accelerator.print(
            f"{path}: {len(prompts) - len(kept)} of {len(prompts)} prompts dropped, over"
            " --max-prompt-length"
        )
    return kept


def check_chat(messages, text):
    """Refuse a chat whose questions are not in the text that its template makes of it."""
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's; add it to the one before")
    for message in messages:
        if not message.get("tool_calls"):
            content = message["content"].strip()
            is_read = content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text
            may_move = message["role"] in ("assistant", "system", "developer")
            if not is_read and (message is messages[-1] or not may_move):
                raise ValueError(f"the chat template leaves {content!r} out of {text!r}")


def tokenize(tokenizer, row, **settings):
    """The `prompt` of a row as the model reads it, and its tokens: one BOS, and no EOS of ours."""
    text = row["prompt"]
    is_chat = isinstance(text, list)
    if is_chat:
        chosen = row.get("chat_template_kwargs") or {}
        settings |= {name: value for name, value in chosen.items() if value is not None}
        text = tokenizer.apply_chat_template(text, tokenize=False, **settings)
    # A template writes the special tokens itself.
    has_bos = is_chat or text.startswith(tokenizer.bos_token or "\0")
    token_ids = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
    if token_ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
        token_ids.pop()  # The policy would go on after an end.
    return text, token_ids


def as_message(prompt, text):
    """A completion in the form of its prompt: text, or a chat of one message."""
    if isinstance(prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


def without_end(tokenizer, token_ids, ended):
    """The tokens of a completion that its text shows: all but the special one that ended it."""
    if ended and not tokenizer.decode(token_ids[-1:], skip_special_tokens=True):
        return token_ids[:-1]
    return token_ids


def exact_match(completions, answer, **_):
    """1 where the completion is the row's `answer`, without spaces around both, else 0."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.strip() == str(right).strip()) for text, right in zip(texts, answer)]


def load_reward(spec):
    """The function that exact_match, FILE.py:FUNCTION, package.module:FUNCTION or none names."""
    built_in = {"exact_match": exact_match, "none": lambda prompts, **_: [0.0] * len(prompts)}
    if spec in built_in:
        return built_in[spec]
    module, _, function = spec.rpartition(":")
    if not module:
        raise UsageError(f"--reward must be exact_match, FILE.py:FUNCTION or none, not {spec}")
    if module.endswith(".py"):
        with blaming(f"--reward {spec}"):
            file = Path(module).resolve(strict=True)
        module = import_file(file)
    else:
        module = importlib.import_module(module)
    with blaming(f"--reward {spec}"):
        return getattr(module, function)


@cache
def import_file(file):
    """A Python file as a module. It is executed once in a run of ours."""
    # The file may import its neighbours. The folder comes last, so that it hides no library.
    sys.path.append(str(file.parent))
    name = file.stem  # A pool of processes imports it by this name.
    if "." in name or importlib.util.find_spec(name).origin != str(file):
        name = re.sub(r"\W", "_", str(file))  # The other name is that of another module.
    found = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def load_scorers(args, tokenizer, prompts, eval_prompts):
    """The scorers of training, and of evaluations. The scores that they give are added.

    A scorer is a function of a batch and a slice of its episodes: it gives lists of scores by name.
    """
    import_file.cache_clear()  # In a notebook a file may change between two runs.
    reward = eval_reward = load_reward(args.reward)
    if args.eval_reward is not None:
        eval_reward = load_reward(args.eval_reward)
    check_columns(reward, prompts)
    check_columns(eval_reward, eval_prompts)
    scorers = [partial(call_reward, reward)]
    if args.reward_model_path is not None:
        scorers.append(load_reward_model(args, tokenizer))
    if args.eval_reward is None:
        return scorers, scorers
    return scorers, [partial(call_reward, eval_reward)]


def check_columns(reward, prompts):
    """Refuse a reward function that cannot be called with the columns of the dataset."""
    for prompt in prompts[:1]:  # All rows have the same columns.
        columns = dict(prompt.row)
        del columns["prompt"]
        with blaming(f"--reward gets prompts, completions, completion_ids, {', '.join(columns)}"):
            signature = inspect.signature(reward, follow_wrapped=False)
            signature.bind(prompts=0, completions=0, completion_ids=0, **columns)


def score_episodes(batch, scorers, where):
    """Score the batch: every process scores a share of whole groups, and gets all.

    Returns the scores [episodes] in float64, nan where there is none, and a dict for each episode:
    the named parts of its score.
    """
    # The episodes of a share.
    count = ceil(len(batch.prompts) // batch.k / accelerator.num_processes) * batch.k
    share = slice(accelerator.process_index * count, (accelerator.process_index + 1) * count)
    prompts = batch.prompts[share]
    parts = [{} for _ in prompts]  # of the score of each episode
    for scorer in scorers if prompts else []:
        for name, values in scorer(batch, share).items():
            with blaming(f"{where}: --reward {name or 'scores'}: a number or None per completion"):
                if f"reward/{name}" in parts[0]:
                    raise ValueError("another part of the score has this name")
                if isinstance(values, bytes):
                    raise ValueError("bytes are no scores")
                for part, prompt, value in zip(parts, prompts, values, strict=True):
                    if value is not None:  # None means: no score.
                        if not abs(value) < 1e38:  # float32 holds it, and it is no text
                            raise ValueError(f"{prompt.text!r} got {value}")
                        value = float(value)
                    part[f"reward/{name}"] = value
    parts = gather_object(parts)
    table = [[value for value in part.values() if value is not None] for part in parts]
    scores = [sum(values) if values else nan for values in table]
    parts = [{name: part[name] for name in part if name != "reward/"} for part in parts]
    return torch.tensor(scores, dtype=torch.double, device=accelerator.device), parts


def call_reward(function, batch, share):
    """Call a reward function as TRL does, by keywords. Returns its lists of scores, by name."""
    # The function may change what it gets, so each episode has its own copy.
    rows = [copy.deepcopy(prompt.row) for prompt in batch.prompts[share]]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    completions = list(map(as_message, prompts, batch.completions[share]))
    token_ids = copy.deepcopy(batch.token_ids[share])
    scores = function(prompts=prompts, completions=completions, completion_ids=token_ids, **columns)
    if isinstance(scores, dict) and scores:
        return scores
    return {"": scores}


def load_reward_model(args, tokenizer):
    """A classifier with one label, as a scorer. It reads token ids, the EOS included."""
    path = args.reward_model_path
    its_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    vocabulary = its_tokenizer.get_vocab()
    auto_class = transformers.AutoModelForSequenceClassification
    model = load_model(path, args.dtype, 0, auto_class, num_labels=1)
    choose_way(path, model, [separate_rows], outputs_of_training)
    head = model.score  # of the last token; a model that scores its first token has no `score`
    eos = its_tokenizer.eos_token_id
    embeddings = model.get_input_embeddings().num_embeddings
    if embeddings <= max(vocabulary.values()):
        raise UsageError(f"{path} has {embeddings} embeddings, fewer than its tokenizer has tokens")
    config = transformers.AutoConfig.from_pretrained(args.model_path).get_text_config()
    same_vocabulary = vocabulary == tokenizer.get_vocab() and embeddings >= config.vocab_size

    @torch.no_grad()
    def reward_model(batch, share):
        rows = []
        for i in range(len(batch.prompts))[share]:
            row = batch.prompts[i].row
            tokens = batch.prompts[i].token_ids + batch.token_ids[i]
            if not same_vocabulary:  # It reads the text, and its own EOS where the episode ended.
                completion = batch.completions[i]
                if isinstance(row["prompt"], str):  # Alone, it may lose its first space.
                    before = batch.prompts[i].token_ids
                    shown = without_end(tokenizer, batch.token_ids[i], batch.ended[i])
                    completion = tokenizer.decode(before + shown)[len(tokenizer.decode(before)) :]
                text = row["prompt"] + as_message(row["prompt"], completion)
                _, tokens = tokenize(its_tokenizer, row | {"prompt": text})
                if batch.ended[i] and eos not in (None, tokens[-1]):
                    tokens = tokens + [eos]
            rows.append(tuple(tokens))
        # Equal rows get one score. Computed twice, it would differ by rounding.
        different = sorted(set(rows), key=len)  # neighbours are of similar length: less padding
        check_positions(path, model.config, len(different[-1]) + 1)  # Its last token is an input.
        scores = {}  # of each row
        size = args.per_device_train_batch_size
        for first in range(0, len(different), size):
            some = different[first : first + size]
            tokens = pad_left(some).to(accelerator.device)
            hidden = run_network(model.base_model, tokens)[:, -1]  # padding is on the left
            scores |= zip(some, head(hidden).float().squeeze(-1).tolist())
        return {"reward_model": [scores[row] for row in rows]}

    return reward_model


# ====================== 7  random numbers, and the work of each process ======================
# What a random number is for. numpy gives the keys (1, 2) and (1, 2, 0) the same numbers. So all
# keys of one purpose are equally long.
PROMPT_ORDER = 1
SAMPLING = 2
EVALUATION = 3
MINI_BATCHES = 4
NEW_WEIGHTS = 5


def keyed_rng(seed, purpose, *key):
    """A random generator that depends on its key alone, on no process and no earlier draw."""
    return np.random.default_rng([seed, purpose, *key])


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


@torch.no_grad()
def map_episodes(one_pass, lengths, size):
    """What one_pass(episodes) gives for all episodes, which the processes share, without gradient.

    lengths, size: as in `micro_batches`
    """
    passes = []
    for episodes, is_real, _ in micro_batches(torch.arange(len(lengths)), lengths, size):
        passes.append((episodes, is_real, one_pass(episodes)))
    results = collect(passes, len(lengths))
    recursively_apply(refuse_infinite, results)
    return results


def refuse_infinite(tensor):
    """Stop at what a model could not compute. In a reward, nan would mean: there is no score."""
    if not tensor.isfinite().all():
        raise RuntimeError(
            "a model gives nan or inf; are its weights whole, and the learning rate low?"
        )


@torch.no_grad()
def collect(passes, num_episodes):
    """What the passes of all processes computed, for each of the batch's episodes.

    It is 0 for an episode without a pass. passes: for each pass of this process its episodes,
    is_real, and a tensor, or a tuple or dict of them
    """
    episodes, is_real, outputs = concatenate(passes)

    def share(computed):
        table = computed.new_zeros(num_episodes, *computed.shape[1:])
        table[episodes[is_real]] = computed[is_real]
        return accelerator.reduce(table)  # An episode is 0 on all processes but one.

    return recursively_apply(share, outputs)


def forward_pass(model, function, batch, episodes):
    """function(model, prompts, tokens) of some episodes of the batch: [episodes, response].

    The model calls it in its forward. Columns after the longest completion are left out of the
    pass, and are 0 in what it returns.
    """
    chosen = episodes.tolist()
    prompts = trim(batch.prompt_tokens[chosen]).to(episodes.device)
    # At least two columns: with one, `shared_prompts` would skip its second pass, and the other
    # processes of a sharded model would wait for it forever.
    longest = max(2, *(len(batch.token_ids[i]) for i in chosen))
    tokens = batch.tokens[episodes, :longest]
    outputs = model(partial(function, prompts=prompts, tokens=tokens))
    left_out = batch.tokens.shape[1] - tokens.shape[1]
    return recursively_apply(lambda x: torch.nn.functional.pad(x, (0, left_out)), outputs)


@contextlib.contextmanager
def exchange_gradients(policy, now):
    """In the backward pass inside, the processes add up their gradients if `now` is True."""
    # DeepSpeed asks for this, and also takes its step then. It has no public setter.
    accelerator.gradient_state._set_sync_gradients(now)
    with contextlib.nullcontext() if now else accelerator.no_sync(policy):
        yield


def pad_left(rows):
    """Token lists -> tokens [rows, longest], with -1 on the left of shorter ones, on the CPU."""
    rows = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, True, padding_value=-1, padding_side="left")


def trim(tokens):
    """The columns in which at least one row has a token."""
    return tokens[:, (tokens >= 0).any(0)]


def normalize_scores(args, state, scores):
    """--score-norm, --score-scaling and --score-clip, with the moments of all scores so far."""
    update_moments(state, scores)
    if args.score_norm:
        scores = scores - state["score_mean"]
    deviation = sqrt(state["score_squares"] / state["score_count"])
    # Otherwise all scores so far are equal, up to rounding.
    if args.score_scaling and deviation > 1e-8 * abs(state["score_mean"]):
        scores = scores / deviation
    if args.score_clip is not None:
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
    """The KL to the reference, estimated from each token (Schulman 2020, Approximating KL).

    A difference up to 1e-4 nats counts as 0. It is rounding, and AdamW makes whole steps of that.
    """
    d = torch.nn.functional.hardshrink(logprobs - ref_logprobs, 1e-4)
    return {"k1": d, "abs": d.abs(), "k2": 0.5 * d.square(), "k3": torch.exp(-d) - 1 + d}[estimator]


def adapt_kl_coef(args, state, kl, num_episodes):
    """kl_coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon (1909.08593, 2.2)."""
    if args.adaptive_kl:
        error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
        state["kl_coef"] *= 1 + error * num_episodes / args.kl_horizon


def updates_have_ended(args, updates):
    """True once the approximate KL of one of an iteration's updates was too large."""
    limit = 1.5 * (args.target_kl or inf)
    return any(float(update.get("policy/approxkl_avg", 0.0)) > limit for update in updates)


def is_dropped(args, update):
    """True if --target-kl or --ratio-threshold forbids this update. The weights stay then."""
    ratio = update["val/ratio"].item()
    return updates_have_ended(args, [update]) or ratio > (args.ratio_threshold or inf)


# ============================== 8  loading and running models ==============================
class CompletionModel(torch.nn.Module):
    """A causal language model with what it needs to sample completions and to compute them."""

    def __init__(
        self, args, language_model, tokenizer, eos_ids, completion_outputs, steps=None, config=None
    ):
        """completion_outputs, steps: the ways that `choose_way` found for training and sampling;
        config: to save with the model"""
        super().__init__()
        self.config = config
        self.language_model = language_model
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.ends_with_stop_string = None  # a function of rows of tokens
        if args.stop_string is not None:
            with blaming(f"--stop-string {args.stop_string!r} does not work with this tokenizer"):
                self.ends_with_stop_string = transformers.StopStringCriteria(
                    tokenizer, [args.stop_string]
                )
        self.temperature = args.temperature  # of the passes that compute log-probabilities
        self.completion_outputs = completion_outputs
        self.sampling_steps = steps
        self.autocast = args.dtype == "bfloat16"
        # A checkpoint of LoRA holds only the adapters. The rest comes from --model-path.
        self.register_state_dict_post_hook(CompletionModel.leave_out_frozen)
        self.register_load_state_dict_post_hook(CompletionModel.frozen_are_not_missing)

    def forward(self, call):
        """call(self). DDP, FSDP2 and DeepSpeed see a model only through its forward.

        So all passes go through it. They walk through lists and dicts that a forward gets. Inputs
        inside of a `partial` they leave alone. One autocast around a whole function casts every
        weight only once.
        """
        device_type = self.language_model.device.type
        with torch.autocast(device_type, torch.bfloat16, enabled=self.autocast):
            return call(self)

    def leave_out_frozen(self, state_dict, prefix, _):
        weights = self.named_parameters(remove_duplicate=False)
        frozen = tuple(f"{prefix}{name}." for name, weight in weights if not weight.requires_grad)
        for name in list(state_dict):  # A quantized weight has others below its name.
            if f"{name}.".startswith(frozen):
                del state_dict[name]

    def frozen_are_not_missing(self, keys):
        names = [name.removeprefix("module.") for name in keys.missing_keys]
        keys.missing_keys[:] = [name for name in names if self.get_parameter(name).requires_grad]


class KVCache(transformers.DynamicCache):
    """The keys and values of the tokens so far.

    While sampling, keys have the type of the values. With autocast they would be float32, and
    attention would cast all of them again for every token.
    """

    column = None  # [1], where `RecordedSteps` writes the newest tokens

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if not torch.is_grad_enabled():
            keys = keys.to(values.dtype)  # Autocast has cast the values.
        if self.column is None:
            return super().update(keys, values, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self.column, keys)
        layer.values.index_copy_(2, self.column, values)
        return layer.keys, layer.values


class PlainSteps:
    """Runs a language model on the newest token of each row, again and again.

    rows: [episodes, tokens], the prompts, and room for completions, which the caller fills
    start: the number of columns that hold the prompts
    `first_logits`, of the first token of each completion: [episodes, 1, vocabulary]
    """

    def __init__(self, network, rows, start):
        self.network = network
        self.rows = rows
        self.count = start  # columns that the cache holds
        self.cached = torch.arange(len(rows), device=rows.device)  # episodes that it holds
        self.first_logits, self.cache = prefill(network, rows[:, :start], logits_to_keep=1)

    def next_logits(self, running):
        """The logits of the next token, [running, 1, vocabulary].

        running: the episodes that have not ended. Their newest tokens are in the next column of
        `rows`.
        """
        if len(running) < len(self.cached):
            self.cache.reorder_cache(torch.isin(self.cached, running).nonzero().squeeze(1))
            self.cached = running
        self.count += 1
        rows = self.rows[running, : self.count]
        return run_network(self.network, rows, self.cache, self.count - 1)


class RecordedSteps(PlainSteps):
    """As PlainSteps, on a GPU, which would wait for Python: a token is a thousand small kernels.

    So they are recorded once, as a CUDA graph, and then started together. A graph uses the same
    memory each time. So the cache has room for all tokens, and no episode leaves it.
    """

    def __init__(self, network, rows, start):
        super().__init__(network, rows, start)
        self.graph = None
        self.cache.column = torch.full_like(rows[0, :1], start - 1)
        for layer in self.cache.layers:
            if (getattr(layer, "sliding_window", None) or inf) <= rows.shape[1]:
                raise ValueError("a layer does not keep all tokens")
            missing = (0, 0, 0, rows.shape[1] - start)
            layer.keys = torch.nn.functional.pad(layer.keys, missing)
            layer.values = torch.nn.functional.pad(layer.values, missing)

    def next_logits(self, running):
        if self.graph is not None:
            self.graph.replay()
            return self.logits[running]
        torch.cuda.set_sync_debug_mode("error")  # What waits for the GPU cannot be recorded.
        try:
            logits = self.step()  # This one counts. It also loads the kernels.
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may use the GPU meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.logits = self.step()  # Memory for it. The replay computes it.
        return logits[running]

    def step(self):
        """The pass on the next column, with shapes and numbers that never change."""
        column = self.cache.column.add_(1)
        is_token = self.rows >= 0
        mask = torch.zeros_like(is_token, dtype=self.cache.layers[0].values.dtype)
        mask.masked_fill_(~is_token, torch.finfo(mask.dtype).min)  # added to attention's scores
        outputs = self.network(
            self.rows.index_select(1, column).clamp(min=0),
            attention_mask=mask[:, None, None],
            position_ids=is_token.sum(1, keepdim=True) - 1,
            past_key_values=self.cache,
            use_cache=True,
        )
        return outputs[0]


def run_network(network, rows, cache=None, start=0, **settings):
    """Run the columns from `start` on of rows of tokens. The KV cache has those before them.

    rows: [rows, tokens], where -1 is no token: it is masked, and has no position. So padding does
    not shift the positions. Returns the logits of a language model, or the last hidden states of a
    trunk, a model without its head, [rows, tokens from start on, ..].
    """
    mask = (rows >= 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    outputs = network(
        rows[:, start:].clamp(min=0),
        attention_mask=mask,
        position_ids=positions[:, start:],
        past_key_values=cache,
        use_cache=cache is not None,
        **settings,
    )
    return outputs[0]


def prefill(network, prompts, **settings):
    """Run the prompts. Equal neighbours, as in a group, are run once and then repeated.

    prompts: [episodes, longest prompt]. Returns what `run_network` gives for the last token of each
    prompt [episodes, 1, ..], and the KV cache.
    """
    different, row_of = prompts.unique_consecutive(dim=0, return_inverse=True)
    cache = KVCache(config=network.config)
    outputs = run_network(network, different, cache, **settings)[:, -1:]
    cache.reorder_cache(row_of)
    return outputs.index_select(0, row_of), cache


def separate_rows(network, prompts, tokens):
    """What `run_network` gives at the position before each token of the completions.

    Each row holds a prompt and its completion.
    prompts: [episodes, longest prompt]; tokens: [episodes, tokens]. Returns [episodes, tokens, ..].
    """
    rows = torch.cat([prompts, tokens[:, :-1]], dim=1)  # Nothing follows the last token.
    return run_network(network, rows)[:, prompts.shape[1] - 1 :]


def shared_prompts(network, prompts, tokens):
    """As `separate_rows`, but a prompt is run once for all its completions.

    They go on from its KV cache, with gradient.
    """
    outputs, cache = prefill(network, prompts)
    if tokens.shape[1] == 1:
        return outputs
    rows = torch.cat([prompts, tokens[:, :-1]], dim=1)
    return torch.cat([outputs, run_network(network, rows, cache, prompts.shape[1])], dim=1)


def head_logits(language_model, hidden):
    """Logits in float32. Some models scale or bound what their head gives; their config says so."""
    config = language_model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere. MPT has None.
    scale /= getattr(config, "logits_scaling", 1.0)  # Granite
    # Scaled before the head, which has no bias in these models: there the tensor is small.
    logits = language_model.get_output_embeddings()(hidden * scale).float()
    bound = getattr(config, "final_logit_softcapping", None)  # Gemma
    if bound is not None:
        logits = bound * torch.tanh(logits / bound)
    return logits


LOGITS_AT_ONCE = 2**25  # in a training pass; 128 MiB of float32


def in_pieces(function, head, *inputs):
    """function(*inputs) in pieces of rows, where logits are many. Backward computes them again.

    head: of the language model, which `function` calls
    """
    at_once = 2**28 if head.weight.is_cuda else LOGITS_AT_ONCE  # A GPU needs large kernels.
    pieces = ceil(len(inputs[0]) * head.out_features / at_once)
    if hasattr(head.weight, "ds_id"):
        # ZeRO-3 gathers the head at every call, so all processes must make as many calls.
        pieces = max(gather_object([pieces]))
    if pieces > 1:
        function = partial(torch.utils.checkpoint.checkpoint, function, use_reentrant=False)
    return torch.cat(list(map(function, *(tensor.tensor_split(pieces) for tensor in inputs))))


def switch_off(config):
    """Switch off dropout, and outputs that nobody reads, also in the configs inside of a config."""
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            switch_off(value)
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
        elif "output_" in key and value is True:
            setattr(config, key, False)


def load_model(path, dtype, longest_row, auto_class=transformers.AutoModelForCausalLM, **changes):
    """`from_pretrained` with all dropout off, on the device.

    longest_row: tokens of the longest row that the model must have positions for; changes: of its
    config
    """
    config = transformers.AutoConfig.from_pretrained(path, **changes)
    check_positions(path, config, longest_row)
    switch_off(config)
    model, info = auto_class.from_pretrained(
        path, config=config, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
    )
    wrong = {*info["missing_keys"], *(weight for weight, *_ in info["mismatched_keys"])}
    # A layer that the config does not count would be left out. A head may be.
    own = model.state_dict()
    wrong |= {w for w in info["unexpected_keys"] if re.sub(r"\.\d+\.", ".0.", w) in own}
    if wrong:  # The others would be random.
        raise UsageError(f"{path}: weights do not fit the config: {sorted(wrong)}")
    return model.to(accelerator.device)


def choose_way(path, model, ways, outputs_of):
    """The first of some ways to run a model that gives, for three rows, what plain passes give.

    outputs_of: a function of a way, the model, prompts and tokens; it returns what `separate_rows`
    does. All processes take the same way: those of a sharded model wait for each other.
    """
    # Two rows of one prompt, and one of another.
    prompts = torch.tensor([[-1, -1, 1, 2], [-1, -1, 1, 2], [3, 4, 5, 6]]).to(accelerator.device)
    tokens = (torch.arange(15) % 10).view(3, 5).to(accelerator.device)
    network = model if model.get_output_embeddings() is not None else model.get_decoder()
    # Each row alone, without padding and cache.
    pairs = zip(map(trim, prompts.split(1)), tokens.split(1))
    alone = torch.cat([separate_rows(network, *pair) for pair in pairs])
    counts = alone > -1e9  # A head may rule tokens out.
    # bfloat16: at most 0.009 was measured where it is right, and 0.045 where it is wrong
    limit = 1e-3 if model.dtype == torch.float32 else 0.02
    faults = []
    for way in ways:
        fault = "its results are not those of a plain pass"
        try:
            difference = outputs_of(way, model, prompts, tokens) - alone
            if difference[counts].std() < limit * alone[counts].std():
                break
        except Exception as error:  # Some models change their cache in place, or repeat no rows.
            fault = error
        faults.append(f"{path} is not run by {way.__name__}: {fault}")
    faults = max(gather_object([faults]), key=len)
    if len(faults) == len(ways):
        raise UsageError("; ".join(faults))
    for fault in faults:
        accelerator.print(fault)
    return ways[len(faults)]


def outputs_of_training(way, model, prompts, tokens):
    """The logits of a training pass, with gradients. Without a head these are the hidden states."""
    outputs = way(model.get_decoder(), prompts, tokens)
    if model.get_output_embeddings() is not None:
        outputs = head_logits(model, outputs)
    torch.autograd.grad(outputs.sum(), model.get_input_embeddings().weight)
    return outputs


@torch.no_grad()
def outputs_of_sampling(way, model, prompts, tokens, longest_row):
    """The logits before each token, as `sample` gets them, in rows as long as those of the run."""
    start = prompts.shape[1]
    room = max(longest_row - start, tokens.shape[1])
    rows = torch.nn.functional.pad(prompts, (0, room), value=-1)
    steps = way(model, rows, start)
    logits = [steps.first_logits]
    for t in range(tokens.shape[1] - 1):
        rows[:, start + t] = tokens[:, t]
        logits.append(steps.next_logits(steps.cached))
    return torch.cat(logits, dim=1)


def load_policy(args, tokenizer, longest_row):
    """The model that is trained. longest_row: tokens of a prompt with its completion, at most"""
    path = args.model_path
    model = load_model(path, "float32" if args.lora_r is None else args.dtype, longest_row)
    if args.lora_r is None and getattr(model, "is_quantized", False):
        raise UsageError(f"{path} has quantized weights, which need --lora-r")
    ways = [PlainSteps]
    is_sharded = accelerator.distributed_type in ("FSDP", "DEEPSPEED")
    if args.cuda_graphs and accelerator.device.type == "cuda" and not is_sharded:
        ways = [RecordedSteps, PlainSteps]
    steps = choose_way(path, model, ways, partial(outputs_of_sampling, longest_row=longest_row))
    completion_outputs = choose_training_way(args, path, model)
    eos_ids = find_eos_ids(model, tokenizer, args.stop_token_id)
    model = prepare_for_training(args, model, 1)
    config = transformers.AutoConfig.from_pretrained(path)
    return CompletionModel(args, model, tokenizer, eos_ids, completion_outputs, steps, config)


def choose_training_way(args, path, model):
    """How the log-probabilities of completions are computed."""
    ways = [separate_rows]
    # A GPU runs a prompt again sooner than Python starts a second pass. Checkpointing drops caches.
    if accelerator.device.type == "cpu" and args.k > 1 and not args.gradient_checkpointing:
        ways = [shared_prompts, separate_rows]
    return choose_way(path, model, ways, outputs_of_training)


def prepare_for_training(args, model, index):
    """Add gradient checkpointing and LoRA, as flags say. index: of the model, for new weights"""
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()  # It works only there. Without dropout nothing there is random.
    if args.lora_r is None:
        return model
    peft = importlib.import_module("peft")
    if Path(model.name_or_path).exists():  # The adapters name it. Their folder may be moved.
        model.name_or_path = str(Path(model.name_or_path).resolve())
    torch.manual_seed(int(keyed_rng(args.seed, NEW_WEIGHTS, index).integers(2**32)))
    config = peft.LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha or 2 * args.lora_r, target_modules="all-linear"
    )
    return peft.get_peft_model(model, config)


def load_reference(args, policy, longest_row):
    """The frozen model of the KL, which is called like the policy. None where there is no KL.

    With LoRA it is the policy without its adapters, unless --ref-model-path names another model.
    """
    if args.kl_coef == 0 and args.ref_model_path is None:
        return None
    if args.lora_r is not None and args.ref_model_path is None:

        def policy_without_adapters(call):
            with policy.language_model.disable_adapter():
                return policy(call)

        return policy_without_adapters
    path = args.ref_model_path or args.model_path
    model = load_model(path, args.dtype, longest_row)
    completion_outputs = choose_training_way(args, path, model)
    vocabularies = {m.config.get_text_config().vocab_size for m in (model, policy.language_model)}
    if len(vocabularies) > 1:
        raise UsageError("--ref-model-path must have the vocabulary of --model-path")
    return CompletionModel(args, model, policy.tokenizer, policy.eos_ids, completion_outputs)


def find_eos_ids(model, tokenizer, stop_token_id):
    """What ends an episode: tokens of the generation config and tokenizer, and --stop-token-id."""
    eos_ids = np.ravel(model.generation_config.eos_token_id).tolist()  # one, several, or None
    return sorted({*eos_ids, tokenizer.eos_token_id, stop_token_id} - {None})


VALUE_HEAD = "value_head.safetensors"  # in the folder `value_model` of a run


def add_value_model(args, policy, longest_row):
    """Add the trunk and head of the value model to the module that is trained.

    They come from --value-model-path, else the reward model, else the policy. A new head is zero.
    """
    path = args.value_model_path or args.reward_model_path or args.model_path
    vocabulary = transformers.AutoTokenizer.from_pretrained(path).get_vocab()
    size = transformers.AutoConfig.from_pretrained(path).get_text_config().vocab_size
    policy_size = policy.config.get_text_config().vocab_size
    if vocabulary != policy.tokenizer.get_vocab() or size < policy_size:
        if args.value_model_path is not None:
            raise UsageError("--value-model-path must have the vocabulary of --model-path")
        path = args.model_path
    auto_class = transformers.AutoModel
    config = transformers.AutoConfig.from_pretrained(path)
    if (config.architectures or [""])[0].endswith("ForSequenceClassification"):
        auto_class = transformers.AutoModelForSequenceClassification
    model = load_model(path, "float32", longest_row, auto_class, num_labels=1)
    choose_way(path, model, [separate_rows], outputs_of_training)
    trunk = model.base_model
    token = torch.ones((1, 1), dtype=torch.long, device=accelerator.device)
    with torch.no_grad():
        hidden_size = run_network(trunk, token).shape[-1]
    policy.value_config = config
    policy.value_trunk = prepare_for_training(args, trunk, index=2)
    policy.value_head = torch.nn.Linear(hidden_size, 1, device=accelerator.device)
    for parameter in policy.value_head.parameters():
        torch.nn.init.zeros_(parameter)
    if auto_class is not transformers.AutoModel:
        policy.value_head.weight.data = model.score.weight.data
    file = Path(path) / VALUE_HEAD
    if file.exists():
        policy.value_head.load_state_dict(load_file(file))


# ============================= 9  logging, samples, checkpoints =============================
JSONL_FILES = ("metrics.jsonl", "rollouts.jsonl", "eval_rollouts.jsonl")


def evaluate(args, policy, prompts, scorers, output_dir, iteration):
    """The mean score of held-out prompts, and the mean of the best of their --eval-k scores."""
    k = args.eval_k
    rng = keyed_rng(args.seed, EVALUATION, iteration)
    batch = generate(args, policy, prompts, k, rng, args.eval_temperature)
    scores, parts = score_episodes(batch, scorers, f"evaluation {iteration}")
    if args.save_rollouts:
        columns = {"score": scores, "logprobs": batch.logprobs}
        records = episode_records(batch, iteration, columns, parts)
        append_jsonl(output_dir / "eval_rollouts.jsonl", records)
    metrics = {"eval/scores": scores.nanmean(), "eval/num_unscored": scores.isnan().sum()}
    for name, mean in mean_metrics(parts).items():
        metrics[f"eval/{name}"] = mean
    # A prompt of which a score is missing does not count.
    metrics[f"eval/best_of_{k}"] = scores.view(-1, k).amax(1).nanmean()
    return metrics


def append_jsonl(path, records):
    """The main process appends one JSON object per line."""
    if not accelerator.is_main_process:
        return
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        for record in records:
            text = json.dumps(record, default=str)
            record = json.loads(text, parse_constant=lambda _: None)  # JSON has null, and no NaN.
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


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


def update_metrics(policy_losses, value_losses, logratio, is_clipped, value_is_clipped, mask):
    """What one update logs, of all episodes, on all processes; all [episodes, response]."""
    metrics = {
        "loss/policy_avg": (policy_losses * mask).sum() / mask.sum(),
        "loss/value_avg": (value_losses * mask).sum() / mask.sum(),
        "val/clipfrac_avg": value_is_clipped[mask].float().mean(),
    }
    return metrics | ratio_metrics(logratio, is_clipped, mask)


def mean_metrics(dicts):
    """The mean of each metric over the dicts that have it."""
    values = {}
    for metrics in dicts:
        for name, value in metrics.items():
            if value is not None:
                values.setdefault(name, []).append(float(value))
    return {name: np.mean(values[name]) for name in values}


def write_metrics(output_dir, metrics, progress):
    """Hand an iteration's metrics to the trackers, metrics.jsonl and the progress bar."""
    metrics = recursively_apply(Tensor.item, metrics)
    # The mean of no episodes is nan, and a ratio can be inf. JSON knows neither.
    metrics = {name: value for name, value in metrics.items() if isfinite(value)}
    accelerator.log(metrics, step=metrics["episode"])
    append_jsonl(output_dir / "metrics.jsonl", [metrics])
    progress.set_postfix(score=metrics.get("objective/scores"))
    for name in ("objective/scores", "eval/scores"):
        # Without a terminal there is no bar.
        if name in metrics and (progress.disable or name == "eval/scores"):
            with tqdm.external_write_mode():
                accelerator.print(f"episode {metrics['episode']}: {name} {metrics[name]:.3f}")
    return metrics


def episode_records(batch, iteration, tensors, parts):
    """What the .jsonl files hold of each episode.

    tensors: [episodes] or [episodes, response], by name; None is null
    """
    records = []
    for i, (prompt, token_ids) in enumerate(zip(batch.prompts, batch.token_ids)):
        record = dict(iteration=iteration, index=i, row=prompt.number, prompt=prompt.text)
        record |= dict(completion=batch.completions[i], token_ids=token_ids)
        record["columns"] = {name: prompt.row[name] for name in prompt.row if name != "prompt"}
        records.append(record | parts[i])
    for name, tensor in ({"ended": batch.ended} | tensors).items():
        values = [None] * len(records) if tensor is None else tensor.tolist()
        for record, value in zip(records, values):
            is_list = isinstance(value, list)  # a number for each token, and then padding
            record[name] = value[: len(record["token_ids"])] if is_list else value
    return records


def write_rollouts(args, output_dir, plan, metrics, batch, tensors, parts):
    """Append all episodes to rollouts.jsonl where asked, and now and then show a few of them."""
    records = episode_records(batch, metrics["iteration"], tensors, parts)
    if args.save_rollouts:
        append_jsonl(output_dir / "rollouts.jsonl", records)
    # This is true --num-sample-generations times in a run, at equal distances.
    wanted = args.num_sample_generations
    if not accelerator.is_main_process or metrics["iteration"] * wanted % plan.iterations >= wanted:
        return
    names = ["prompt", "completion", "score", *parts[0]]
    samples = [[record.get(name) for name in names] for record in records[:: args.k][:4]]
    for sample in samples:  # of four groups
        tqdm.write(f"---- a sample of episode {metrics['episode']}")
        for name, value in zip(names, sample):
            tqdm.write(f"{name}: {value}")
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table("samples", columns=names, data=samples, step=metrics["episode"])


def save_checkpoint(args, policy, state, output_dir):
    """Write weights, optimizer and state. The folder gets its name when it is whole."""
    checkpoints = output_dir / "checkpoints"
    unfinished = checkpoints / "unfinished"
    accelerator.save_state(str(unfinished))
    if args.keep_checkpoints is not None:
        save_model(policy, unfinished / "model")
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    files = map(output_dir.joinpath, JSONL_FILES)
    state["jsonl_sizes"] = {file.name: file.stat().st_size for file in files if file.exists()}
    (unfinished / "state.json").write_text(json.dumps(state))
    unfinished.rename(checkpoints / f"iteration_{state['iteration']:08d}")
    for old in sorted(checkpoints.glob("iteration_*"))[: -(args.keep_checkpoints or 2)]:
        shutil.rmtree(old.rename(unfinished))


def save_model(policy, folder):
    """Write policy and tokenizer for `from_pretrained`. With LoRA these are the adapters."""
    state_dict = accelerator.get_state_dict(policy)  # All processes take part in it.
    if not accelerator.is_main_process:
        return
    weights = {
        name.removeprefix("language_model."): weight
        for name, weight in state_dict.items()
        if name.startswith("language_model.")
    }
    model = accelerator.unwrap_model(policy)
    save_with_config(model.language_model, model.config, folder, weights)
    model.tokenizer.save_pretrained(folder)


def save_with_config(model, config, folder, weights):
    """Save a model with the config that it came with: `switch_off` has changed its own."""
    changed = model.config
    model.config = config
    model.save_pretrained(folder, state_dict=weights)
    model.config = changed


def claim_folder(output_dir, settings):
    """Make and lock the folder of the run, and write its args.yaml. Returns the lock."""
    # A killed process gives its lock back. A notebook may take its own again.
    lock = filelock.FileLock(output_dir / ".lock", blocking=False, is_singleton=True)
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        with blaming(f"another run writes into {output_dir}"):
            lock.acquire()
        # It is called when the program ends. Until then it keeps the lock: no other run comes in.
        atexit.register(remove_unused, output_dir, lock)
        temporary = output_dir / "args.tmp"
        temporary.write_text(yaml.safe_dump(settings, sort_keys=False))
        temporary.replace(output_dir / "args.yaml")
    return lock


def remove_unused(output_dir, lock):
    """Remove the folder if its start failed, so that it holds only what `claim_folder` makes."""
    if {file.name for file in output_dir.glob("*")} <= {".lock", "args.yaml"}:
        shutil.rmtree(output_dir, ignore_errors=True)


def load_checkpoint(args, output_dir):
    """Load the newest checkpoint. Returns its state, or an empty one where there is no checkpoint.

    What the state does not know is cut from the folder's files.
    """
    state = {"jsonl_sizes": {}}
    newest = sorted(output_dir.glob("checkpoints/iteration_*/state.json"))[-1:]
    for file in gather_object([newest])[0]:  # as the main process sees it
        with blaming(f"{file.parent} may be damaged; then remove it"):
            state = json.loads(file.read_text())
            accelerator.load_state(str(file.parent))
        accelerator.print(f"resuming after iteration {state['iteration']}")
    if args.resume and not newest:
        accelerator.print("no checkpoint, starting at 0")
    if accelerator.is_main_process:
        shutil.rmtree(output_dir / "checkpoints" / "unfinished", ignore_errors=True)
        for file in map(output_dir.joinpath, JSONL_FILES):
            if file.exists():
                os.truncate(file, state["jsonl_sizes"].get(file.name, 0))
    return state


def print_plan(plan):
    """Print every count of the run, as YAML."""
    accelerator.print(yaml.safe_dump(vars(plan), sort_keys=False), end="")


def announce(args, settings, plan, model):
    """Print what the run will do, and start the trackers."""
    accelerator.print(
        f"{accelerator.num_processes} x {accelerator.device.type}, {args.dtype}, learning rate"
        f" {args.learning_rate:g}, response length {args.response_length}; writing to"
        f" {settings['output_dir']}"
    )
    ends = dict(zip(model.eos_ids, model.tokenizer.convert_ids_to_tokens(model.eos_ids)))
    accelerator.print(f"tokens that end a completion: {ends}; --stop-string: {args.stop_string!r}")
    print_plan(plan)
    # tensorboard takes no None
    config = {name: value for name, value in settings.items() if value is not None}
    name = {"name": os.environ.get("WANDB_NAME", Path(settings["output_dir"]).name)}
    accelerator.init_trackers(
        os.environ.get("WANDB_PROJECT", "tally"), config, {"wandb": name, "trackio": name}
    )


def save_result(args, policy, output_dir, plan):
    """Write the model, and give its folder its name when it is whole."""
    save_model(policy, output_dir / "model.tmp")
    accelerator.wait_for_everyone()  # Another process may still be reading a checkpoint.
    if accelerator.is_main_process:
        (output_dir / "model.tmp").rename(output_dir / "model")
        if args.keep_checkpoints is None:
            for folder in output_dir.glob("checkpoints/iteration_*"):
                shutil.rmtree(folder)
    accelerator.print(
        f"{plan.episodes:,} episodes, {plan.steps:,} steps, {plan.epochs:g} epochs;"
        f" model in {output_dir / 'model'}"
    )


def save_value_model(args, policy, output_dir):
    """Write the value model to `value_model/`, for --value-model-path. With LoRA it is not written.

    Its adapters would be no model of their own.
    """
    if args.lora_r is not None:
        return
    state_dict = accelerator.get_state_dict(policy)
    if not accelerator.is_main_process:
        return
    weights = {"value_trunk": {}, "value_head": {}, "language_model": {}}
    for name, tensor in state_dict.items():
        part, _, rest = name.partition(".")
        weights[part][rest] = tensor
    folder = output_dir / "value_model"
    model = accelerator.unwrap_model(policy)
    save_with_config(model.value_trunk, model.value_config, folder, weights["value_trunk"])
    model.tokenizer.save_pretrained(folder)
    save_file(weights["value_head"], folder / VALUE_HEAD)


# ===================================== 10  sharded models =====================================
@contextlib.contextmanager
def sampling_weights(model):
    """Inside, sharded weights are gathered as a whole, not layer by layer for every token.

    On a CPU, a large head is laid out for few tokens.
    """
    zero3 = getattr(getattr(model, "optimizer", None), "parameter_offload", None)  # of DeepSpeed
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
        weight = accelerator.unwrap_model(model).language_model.get_output_embeddings().weight
        by_row = weight.data
        if weight.is_cpu and len(weight) > 100_000:  # tokens of the vocabulary
            # By column it computes them up to 1.6 times as fast.
            weight.data = by_row.t().contiguous().t()
        yield
        weight.data = by_row


# ======================================== 11  checks ========================================
BUILT_IN_DATASET = str(DEFAULT / "train.jsonl")

# --learning-rate of the built-in policy, of any other, and of LoRA adapters.
RATES = {"built-in": 5e-5, "other": 3e-6, "LoRA": 1e-5}

# Flags that may change when a run is resumed. They change memory, or what is shown and kept.
FREE_FLAGS = (
    "output_dir resume save_every plan gradient_checkpointing log_with dataset eval_dataset "
    "eval_every eval_temperature eval_k eval_reward per_device_train_batch_size "
    "per_device_rollout_batch_size num_sample_generations save_rollouts keep_checkpoints "
    "cuda_graphs"
).split()  # Instead of the path --dataset, its rows are compared.


# Flags that may not be 0.
ABOVE_ZERO = (
    "num_train_epochs batch_size num_mini_batches num_ppo_epochs per_device_train_batch_size "
    "per_device_rollout_batch_size response_length max_prompt_length temperature eval_k lora_r "
    "lora_alpha max_grad_norm plan rloo_k num_generations"
).split()


class UsageError(ValueError):
    """A mistake in flags or data. The program shows its message without a traceback."""


@contextlib.contextmanager
def blaming(cause):
    """An error inside is a mistake of the user. The message names its cause, a flag or a row."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{cause}: {error}") from error


def check_flags(args):
    """A copy with all defaults filled in. Flags that contradict each other are refused."""
    args = copy.copy(args)
    if args.dtype is None:
        launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
        args.dtype = "bfloat16" if launcher == "bf16" else "float32"
    kind = "other" if args.lora_r is None else "LoRA"
    if Path(args.model_path).resolve() == Path(Args.model_path).resolve():
        kind = "built-in"
        args.dataset = args.dataset or BUILT_IN_DATASET
    if args.eval_dataset is None and args.dataset == BUILT_IN_DATASET:
        args.eval_dataset = str(DEFAULT / "eval.jsonl")
    if args.learning_rate is None:
        args.learning_rate = RATES[kind]
    if args.response_length is None:
        args.response_length = 8 if kind == "built-in" else 256
    for name, value in list(vars(args).items()):
        if isinstance(value, np.generic):
            value = value.item()
            setattr(args, name, value)
        flag = f"--{name.replace('_', '-')} {value}"
        if isinstance(value, (int, float)) and not value >= 0:
            raise ValueError(f"{flag} must not be negative")
        if name in ABOVE_ZERO and value == 0:
            raise ValueError(f"{flag} must be above 0")
    multiple = lcm(args.k, args.num_mini_batches)
    trackers = [None, *map(str, accelerate.tracking.get_available_trackers())]
    faults = {  # a message, and whether it is true
        "--gamma and --lam must be at most 1": max(args.gamma, args.lam) > 1,
        "--adaptive-kl needs a --kl-coef above 0 to start from": (
            args.adaptive_kl and args.kl_coef == 0
        ),
        "--adaptive-kl needs a --kl-horizon above 0.2 * --batch-size": (
            args.adaptive_kl and args.kl_horizon <= 0.2 * args.batch_size
        ),
        f"--batch-size must be a multiple of {multiple} (k, mini-batches)": args.batch_size
        % multiple,
        "--model-path needs a --dataset": args.dataset is None,
        "--model-path has LoRA adapters; first merge them with peft: AutoPeftModelForCausalLM"
        ".from_pretrained(path).merge_and_unload().save_pretrained(folder)": (
            Path(args.model_path, "adapter_config.json").exists()
        ),
        "--eval-k needs an --eval-temperature": args.eval_k > 1 and args.eval_temperature == 0,
        "--resume needs the --output-dir of the run": args.resume and args.output_dir is None,
        f"--log-with: {args.log_with} is none of {trackers}": args.log_with not in trackers,
    }
    for message, is_true in faults.items():
        if is_true:
            raise ValueError(message)
    return args


def check_positions(path, config, longest_row):
    """Refuse a model with too few positions for the longest row. Its last token is no input."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or inf
    if positions < longest_row - 1:
        raise UsageError(
            f"{path} has {positions} positions, and the longest prompt with its completion needs"
            f" {longest_row - 1}; lower --response-length, or --max-prompt-length"
        )


def start_accelerator(args):
    """Start the processes' connection, and refuse a launch in which some of them are missing."""
    global accelerator
    if args.dataset == BUILT_IN_DATASET and not DEFAULT.exists():
        raise UsageError(f"{DEFAULT} is missing, so --model-path and --dataset are needed")
    accelerator = accelerate.Accelerator(
        # The scripts do accumulation and autocast themselves, whatever the launcher is set to.
        gradient_accumulation_plugin=accelerate.utils.GradientAccumulationPlugin(num_steps=1),
        mixed_precision="no",
        log_with=args.log_with,
        project_dir=args.output_dir or "runs",
        cpu=torch.mps.is_available(),  # Apple's GPUs have no float64, which sampling needs.
    )
    # accelerate can start one process where several were asked for, or several that are alone.
    asked_for_more = {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys()
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1 + asked_for_more)):
        raise UsageError(
            "fewer processes than launched, or no GPU was found; without GPUs use"
            " ACCELERATE_USE_CPU=true torchrun"
        )
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        raise UsageError("FSDP version 1 is not offered; the launcher needs fsdp_version: 2")
    if accelerator.distributed_type == "DEEPSPEED":
        if args.target_kl or args.ratio_threshold:
            raise UsageError(
                "--target-kl and --ratio-threshold drop updates, which DeepSpeed cannot do; use"
                " FSDP2 or DDP"
            )
        # Its engine clips, casts and gathers by itself. `micro_batches` does the accumulation.
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = 1
        config["gradient_accumulation_steps"] = 1
        config["gradient_clipping"] = 0.0 if isinf(args.max_grad_norm) else args.max_grad_norm
        config["torch_autocast"] = {"enabled": args.dtype == "bfloat16", "dtype": "bfloat16"}
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        # Otherwise transformers would shard every model that it loads, also the reference, which
        # has no engine to gather it.
        transformers.integrations.unset_hf_deepspeed_config()


def sha_256(text):
    return f"SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def choose_output_dir(args, prompts):
    """The folder of the run, the same on all processes, and what its args.yaml will hold.

    Only --resume may use a folder that holds a run, and no flag or row may make it another run. If
    the run is finished, the program ends here.
    """
    name = f"runs/{Path(__file__).stem}__{args.seed}__{int(time.time())}__{os.getpid()}"
    # The clocks of two processes may differ.
    output_dir = Path(gather_object([args.output_dir or name])[0]).absolute()
    accelerator.project_configuration.logging_dir = str(output_dir)
    # Without the addresses of objects, such as images.
    rows = re.sub(r" at 0x\w+", "", repr([prompt.row for prompt in prompts]))
    settings = vars(args) | {
        "output_dir": str(output_dir),
        "dataset_rows": f"{len(prompts)}, {sha_256(rows)}",
        "prompt_tokens": sha_256(repr([prompt.token_ids for prompt in prompts])),
    }
    if not any((output_dir / name).exists() for name in (*JSONL_FILES, "checkpoints", "model")):
        return output_dir, settings
    if not args.resume:
        raise UsageError(f"--output-dir {output_dir} holds a run; --resume continues it")
    theirs = yaml.safe_load((output_dir / "args.yaml").read_text())
    for name, its in (vars(check_flags(Args())) | theirs).items():  # An older script had fewer.
        mine = settings.get(name)
        if name == "prompt_tokens" and its != mine:
            raise UsageError(
                f"--resume: the prompts have other tokens than in {output_dir}. Does the chat"
                " template write the date, or has it changed? See docs/recipes.md"
            )
        if name not in FREE_FLAGS and its != mine:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"--resume: {flag} is {mine}, but {its} in {output_dir}")
    if (output_dir / "model").exists():  # It is written last of all.
        accelerator.print(f"nothing to do: the run in {output_dir} is finished")
        accelerator.end_training()
        sys.exit()
    return output_dir, settings


def compare_with_sampler(args, difference):
    """How far the first training pass of an iteration is from the sampler, at most, for any token.

    The weights are the same. Where more than rounding differs, the gradients would be wrong.
    difference: [tokens], of their log-probabilities
    """
    largest = difference.abs().max()
    # In bfloat16 at most 0.05 was measured where it is right, and 0.15 where it is wrong.
    is_rounding = largest < 1e-3 if args.dtype == "float32" else difference.abs().mean() < 0.1
    if not is_rounding:
        raise RuntimeError(f"sampling and training give log-probabilities {largest:.2g} apart")
    return {"val/sampling_logprob_difference": largest}


def refuse_missing_scores(batch, scores):
    """Stop at an episode without a score. PPO has no other episodes of its group to learn from."""
    for prompt, score in zip(batch.prompts, scores.tolist()):
        if isnan(score):
            raise UsageError(
                f"a completion of {prompt.text!r} has no score: --reward gave None, and PPO needs"
                " a number for each completion"
            )


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
        sys.exit(f"\nstopped; --resume --output-dir {accelerator.logging_dir} goes on")
