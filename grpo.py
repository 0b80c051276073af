"""GRPO (group relative policy optimization) for language models, in one file.

For every prompt x, the policy samples a group of k completions y_1 .. y_k. A prompt with one of
its completions is an episode. Each token is one action. The tokens of an episode share A_i.

    advantage   A_i  = (score(x, y_i) - mean) / (standard deviation + 1e-4), over the group's scores
    ratio       r_it = p_new(y_it) / p_old(y_it)
    KL          K_it = exp(d) - d - 1 with d = log p_ref(y_it) - log p_new(y_it)
    loss        L    = mean over a mini-batch's episodes of the mean over an episode's tokens of
                       [max(-A_i r_it, -A_i clip(r_it, 1 - c, 1 + c)) + kl_coef * K_it]

p(y_it) is the probability of token t, given the prompt and the tokens before it. p_old is the
policy that sampled the completion. p_new is the policy that is being trained. p_ref is a frozen
reference model. c is --cliprange.

By default there is no KL, and a batch gets one update, which is one optimizer step. Then p_new is
p_old, and every ratio is 1. With the default --loss-type the loss is 0, because the advantages of a
group add up to 0. Its gradient is the mean of -A_i mean_t grad log p_new(y_it): p_old is constant.

The words: an iteration samples one batch of episodes and trains on it. A mini-batch holds the
episodes of one optimizer step, on all processes together. A micro-batch holds the episodes of one
forward and backward pass on one process. A PPO epoch is one pass over the batch.

A reward function may return None, which means "no score". If it returns nan, the run stops. The
script holds a missing score as nan. The advantage of such an episode is 0. It is still one of the
episodes that the mean of the loss counts.

How to run it:
    python grpo.py                         # trains the small built-in policy on two-digit sums
    python grpo.py --plan 8                # prints all counts of a run on 8 processes, and stops
    accelerate launch grpo.py              # with GPUs, on all of them
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 grpo.py    # two processes without GPUs

How to read it: first comes the lecture, sections 1 to 6. It explains the algorithm and the loop.
Then comes the machinery, sections 7 to 12. You can skip it on a first reading.
docs/nano/ makes the same run in few lines. Its README.md leads from there to this file.
docs/coming_from.md has TRL's names of the flags.

    what you look for              where it is             how to change it
    the reward                     --reward FILE.py:NAME   def NAME(prompts, completions, **columns)
    a length penalty               main, stage 5b          subtract it from `scores`
    a reward for each token        main, stage 5c          `rewards` [episodes, response]: 0 after
                                                           the end, nan without a score
    the baseline                   `grpo_advantages`       a reward of nan must give advantage 0
    the loss                       `grpo_loss`             return other losses
    an entropy bonus               `token_logprobs`        benchmark/variants/entropy_bonus.patch
    a second loss                  main, stage 5d          add to `losses`; `to_train = mini_batch`
    top-p, or other sampling       `sample`                keep the set of tokens that it drew from
                                                           in `Batch`; `token_logprobs` of the
                                                           policy needs it, the reference does not
    a number that must survive     `state` in main         state["name"] = plain number; it is saved
    an inference engine            `generate`              see there
    what ends a completion         `find_eos_ids`          --stop-token-id, --stop-string

How it differs: rloo.py has another baseline, one ratio for a whole completion, and the KL in the
reward. ppo.py trains a value model, and samples one completion for each prompt.

Papers: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; DAPO, arXiv
2503.14476; GSPO, arXiv 2507.18071; CISPO, arXiv 2506.13585.
"""

import contextlib
import copy
import hashlib
import importlib.util
import inspect
import itertools
import json
import logging
import os
import re
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from math import ceil, comb, floor, inf, isfinite, isinf, lcm, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import accelerate
import filelock
import numpy as np
import torch
import transformers
import tyro
import yaml
from accelerate.utils import concatenate, gather_object, recursively_apply
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

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
    save_every: int | None = 100  # iterations between checkpoints; None: no checkpoints
    keep_checkpoints: int | None = None
    """this many stay, also after the end, each with a `model/` for --model-path; None: the newest
    two, until the run is finished"""
    plan: int | None = None  # print every count for this many processes and exit; loads no model
    dtype: Literal["float32", "bfloat16"] | None = None  # of forward passes; None: accelerate's
    # model and data
    model_path: str = str(DEFAULT / "policy")  # policy and tokenizer: a folder or a Hub name
    lora_r: int | None = None  # rank of LoRA adapters (arXiv 2106.09685); None: train all weights
    lora_alpha: int | None = None  # adapters are multiplied by this / rank; None: twice the rank
    gradient_checkpointing: bool = False  # compute activations again in the backward pass
    ref_model_path: str | None = None  # reference model of the KL; None: --model-path
    dataset: str = str(DEFAULT / "train.jsonl")  # .jsonl file or Hub dataset NAME:SPLIT
    max_prompt_length: int | None = None  # drop prompts with more tokens than this; None: no limit
    reward: str = "exact_match"
    """exact_match (with the row's `answer`), FILE.py:FUNCTION, package.module:FUNCTION, or none"""
    reward_model_path: str | None = None  # one-label classifier; its score is added to --reward
    eval_dataset: str | None = None  # held-out prompts; None: only the built-in task has some
    eval_every: int | None = None  # iterations between evaluations; None: only at start and end
    eval_temperature: float = 0.0  # sampling temperature of evaluations; 0: the most likely token
    eval_k: int = 1  # completions of each evaluation prompt; needs an --eval-temperature above 0
    eval_reward: str | None = None  # replaces --reward and --reward-model-path in evaluations
    # batch sizes
    num_train_epochs: float = 2.0  # passes over the prompts of the dataset; may be a fraction
    total_episodes: int | None = None  # instead of --num-train-epochs; 0: evaluate, and stop
    batch_size: int = 64  # episodes of one iteration, on all processes together
    num_mini_batches: int = 1  # optimizer steps in one pass over the batch
    num_ppo_epochs: int = 1  # passes over the batch of each iteration
    per_device_train_batch_size: int = 64  # episodes in one forward pass; fewer save memory
    per_device_rollout_batch_size: int | None = None  # episodes sampled at once; None: no limit
    # sampling
    response_length: int | None = None  # token limit of a completion; None: 256, built-in policy 8
    temperature: float = 1.0  # divides the logits, in sampling and in every log-probability
    stop_token_id: int | None = None  # this token ends a completion as an EOS does
    stop_string: str | None = None
    """this text ends a completion as an EOS does, such as "</answer>"; a newline is $'\\n'"""
    # algorithm
    num_generations: int = 4  # completions of each prompt; each is compared with their mean
    kl_coef: float = 0.0  # weight of the KL in the loss; 0: no KL and no reference model
    cliprange_high: float | None = None  # clips at 1 + this; None: --cliprange (2503.14476, eq. 8)
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide centred scores by the standard deviation of their group, of the batch, or not at all
    (Dr. GRPO: a small deviation gives too easy and too hard prompts a large weight)"""
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = "grpo"
    """grpo: the mean over an episode's tokens, then over episodes (arXiv 2402.03300, eq. 3);
    dapo, TRL's default: the mean over all tokens of the mini-batch (arXiv 2503.14476, eq. 8);
    dr_grpo: the sum divided by episodes * response_length (arXiv 2503.20783, section 3.2);
    cispo: as dapo, but the clipped ratio is a constant factor of log p (2506.13585, eq. 4)"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """sequence: one ratio for a completion (GSPO, 2507.18071, eq. 7); use a --cliprange of 3e-4"""
    mask_truncated_completions: bool = False  # no loss for completions without EOS (DAPO, 3.4)
    cliprange: float = 0.2  # clips the ratio to 1 - this .. 1 + this (arXiv 1707.06347, eq. 7)
    missing_eos_penalty: float = 0.0
    """subtracted from the score of a completion that has not ended (arXiv 2403.17031, detail 23)"""
    # optimizer
    lr_scheduler_type: Schedule = "linear"  # over all optimizer steps, as in transformers
    learning_rate: float | None = None  # of AdamW; None: 1e-6, LoRA 1e-5, built-in policy 1e-4
    weight_decay: float = 0.0  # weight decay of AdamW, on all parameters
    warmup_steps: float = 0  # optimizer steps of linear warm-up; below 1: their share of all steps
    max_grad_norm: float = 1.0  # the gradient's norm is clipped to this; inf: no clipping
    # logging
    log_with: str | None = None  # a tracker beside metrics.jsonl: wandb, tensorboard, ...
    num_sample_generations: int = 10  # number of times in a run that samples are shown
    save_rollouts: bool = False  # write every episode to rollouts.jsonl or eval_rollouts.jsonl

    # k and updates_per_batch are no flags, but follow from flags. All scripts have both names.
    k = property(lambda self: self.num_generations)
    updates_per_batch = property(lambda self: self.num_ppo_epochs * self.num_mini_batches)

    def __post_init__(self):
        check_flags(self)  # It also fills in what depends on the model or the launcher.


# ===================================== 2  the arithmetic =====================================
def batch_arithmetic(args: Args, num_prompts: int, world_size: int) -> SimpleNamespace:
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


# ======================================== 3  drawing ========================================
# What a random number is for. numpy gives the keys (1, 2) and (1, 2, 0) the same numbers. So all
# keys of one purpose are equally long.
PROMPT_ORDER = 1
SAMPLING = 2
EVALUATION = 3
MINI_BATCHES = 4
NEW_WEIGHTS = 5


def keyed_rng(seed: int, purpose: int, *key: int) -> np.random.Generator:
    """A random generator that depends on its key alone, on no process and no earlier draw."""
    return np.random.default_rng([seed, purpose, *key])


def draw_prompts(seed: int, num_prompts: int, first: int, count: int) -> list[int]:
    """The rows first .. first + count - 1 of an endless stream: each epoch is a permutation."""
    last_epoch = (first + count - 1) // num_prompts
    stream = []
    for epoch in range(first // num_prompts, last_epoch + 1):
        stream.append(keyed_rng(seed, PROMPT_ORDER, epoch).permutation(num_prompts))
    return np.concatenate(stream)[first % num_prompts :][:count].tolist()


def draw_mini_batches(args: Args, iteration: int, ppo_epoch: int, num_episodes: int) -> tuple:
    """The mini-batches of one PPO epoch: the groups in a new order, cut into near-equal pieces.

    For example, k = 2 and two groups, with the episodes 0 1 and 2 3. In the order 1, 0 they are
    2 3 0 1, and two mini-batches are (2 3) and (0 1).
    """
    num_groups = num_episodes // args.k
    order = keyed_rng(args.seed, MINI_BATCHES, iteration, ppo_epoch).permutation(num_groups)
    episodes = torch.from_numpy(order)[:, None] * args.k + torch.arange(args.k)  # [groups, k]
    return episodes.flatten().tensor_split(min(args.num_mini_batches, num_episodes))


# ===================================== 4  the algorithm =====================================
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
    completions: list[str]  # [episodes], as text, without special tokens
    token_ids: list[list[int]]  # [episodes], tokens of each completion; its EOS is one of them
    tokens: Tensor  # [episodes, response], the same as a tensor
    mask: Tensor  # [episodes, response], True for the tokens that are in the loss
    ended: Tensor  # [episodes], False where the completion was cut off at --response-length
    logprobs: Tensor  # [episodes, response], of each token, by the policy that sampled it
    entropies: Tensor  # [episodes, response], exact entropy of each token's distribution
    pass_lengths: Tensor  # [episodes], tokens of the prompt and of the group's longest completion


def grpo_advantages(rewards, k: int, scale_rewards: str):
    """A_i = (score - mean) / (standard deviation + 1e-4) in a group (arXiv 2402.03300, 4.1.2).

    rewards: [episodes, actions], the k episodes of a group side by side. Here all tokens share one
    reward, so there is one column. Returns the same shape. The reward nan means that an episode has
    no score: no mean counts it, and its advantage is 0.
    """
    groups = rewards.unflatten(0, (-1, k))  # [groups, k, actions]
    no_score = groups.isnan()
    advantages = groups - groups.nanmean(1, keepdim=True)
    if scale_rewards == "group":
        others = (~no_score).sum(1, keepdim=True) - 1  # how many, [groups, 1, actions]
        variance = advantages.square().nansum(1, keepdim=True) / others
        advantages = advantages / (variance.sqrt() + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (rewards[~rewards.isnan()].std() + 1e-4)
    # Equal rewards must give exactly 0, but a mean is rounded. A group's only scored episode has no
    # others: it gets 0, too.
    is_zero = all_equal(groups) | no_score
    return advantages.masked_fill(is_zero, 0.0).flatten(0, 1)


def token_weights(args: Args, lengths, included):
    """For each episode, the factor of the losses of its tokens: 1 / denominator, by --loss-type.

    The denominator is that of the whole mini-batch, on all processes. Episodes that are not
    included have weight 0, and the denominator does not count them.
    lengths, included: [episodes of the mini-batch, 1]. Returns the same shape.
    """
    included = included.float()
    if args.loss_type == "grpo":  # 1 / |y_i| / episodes
        return included / lengths / included.sum().clamp(min=1)
    if args.loss_type in ("dapo", "cispo"):  # 1 / tokens
        return included / (included * lengths).sum().clamp(min=1)
    return included / (included.sum().clamp(min=1) * args.response_length)  # dr_grpo


def grpo_loss(args: Args, logprobs, old_logprobs, advantages, mask):
    """The clipped loss of each token without its KL, the log of its ratio, and where the clip acts.

    logprobs: [episodes, response], with gradient; old_logprobs: the same of p_old; advantages:
    [episodes, 1], or [episodes, response]; mask: True for the tokens that are in the loss.
    Returns three tensors [episodes, response]. With one ratio for a completion: [episodes, 1]
    """
    if args.updates_per_batch == 1:
        # The policy has not changed since it sampled: p_old is p_new, as a constant.
        old_logprobs = logprobs.detach()
    logratio = logprobs - old_logprobs  # [episodes, response]
    if args.importance_sampling_level == "sequence":  # the mean over the tokens, [episodes, 1]
        logratio = logratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    low = args.cliprange
    high = low if args.cliprange_high is None else args.cliprange_high
    losses, is_clipped = clipped_policy_loss(logratio, advantages, low, high)
    if args.loss_type == "cispo":
        # The clipped ratio is a constant here. So a clipped token keeps its gradient.
        ratio = logratio.detach().exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        losses = -advantages * clipped * logprobs
        is_clipped = clipped != ratio
    return losses, logratio, is_clipped


def k3_kl(logprobs, ref_logprobs):
    """exp(d) - d - 1 with d = ref_logprobs - logprobs, for each token (arXiv 2402.03300, eq. 4).

    It is never negative, and unbiased if p_new sampled the token. Its gradient is biased.
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def clipped_policy_loss(logratio, advantages, low: float, high: float):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logratio) (arXiv 1707.06347, eq. 7).

    Returns the losses, and True where the clipped term is larger: above 1 + high for a positive
    advantage, below 1 - low for a negative one. There the gradient is 0. Shapes: as logratio.
    """
    # exp(89) is inf, and 0 * inf would be a gradient of nan. With a positive advantage the ratio is
    # clipped in any case, so it is clamped here. With a negative one inf stops the run in stage 5d.
    ratio = torch.where(advantages < 0, logratio, logratio.clamp(max=80)).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


# ======================================== 5  training ========================================
# The accelerator knows which process this is, and connects all of them. `main` starts it.
accelerator: accelerate.Accelerator


def main(args: Args):
    """Set up, train, save. Each turn of the loop is one iteration, in the stages 5a to 5f."""
    tokenizer = load_part("--model-path", args.model_path, transformers.AutoTokenizer)
    prompts = load_prompts(args, args.dataset, args.reward, tokenizer)
    if args.plan is not None:
        plan = batch_arithmetic(args, len(prompts), world_size=args.plan)
        print(yaml.safe_dump(vars(plan), sort_keys=False), end="")
        return
    eval_prompts = load_prompts(args, args.eval_dataset, args.eval_reward or args.reward, tokenizer)

    check_sizes(args, prompts + eval_prompts)
    start_accelerator(args)
    output_dir = choose_output_dir(args, prompts)
    exit_if_finished(output_dir)
    scorers, eval_scorers = load_scorers(args, tokenizer)
    policy = load_policy(args, tokenizer)
    reference = load_reference(args, policy)  # None: there is no KL

    size = args.per_device_train_batch_size  # of a micro-batch, in episodes
    plan = batch_arithmetic(args, len(prompts), accelerator.num_processes)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )
    # The schedule does not go through `prepare`: accelerate would step it once for each process.
    name = args.lr_scheduler_type
    scheduler = transformers.get_scheduler(name, optimizer, plan.warmup_steps, plan.steps)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    # With --resume, this also loads the weights, and the optimizer with its learning rate. Random
    # numbers need no state. `open_output_dir` cuts the files to what the checkpoint knows.
    state = load_state(output_dir)
    step = state["step"]
    scheduler.last_epoch = step
    progress = open_output_dir(args, output_dir, plan, state)
    if eval_prompts and state["iteration"] == 0:
        metrics = {"iteration": 0, "step": 0, "episode": 0, "epoch": 0.0}
        metrics |= evaluate(args, policy, eval_prompts, eval_scorers, output_dir, iteration=0)
        write_metrics(output_dir, metrics, progress)

    for iteration in range(state["iteration"] + 1, plan.iterations + 1):
        # ---- 5a  rollout: sample k completions of each drawn prompt
        rollout_start = time.perf_counter()
        is_last = iteration == plan.iterations
        num_episodes = plan.last_batch_size if is_last else args.batch_size
        first = (iteration - 1) * plan.prompts_per_iteration  # prompts that were drawn before
        positions = draw_prompts(args.seed, len(prompts), first, num_episodes // args.k)
        drawn = [prompts[position] for position in positions]  # [groups]
        rng = keyed_rng(args.seed, SAMPLING, iteration)
        batch = generate(args, policy, drawn, args.k, rng, args.temperature)

        # ---- 5b  score
        # The score is the sum of its parts: of --reward, its dict's entries, and the reward model.
        scores, parts = score_episodes(batch, scorers, f"iteration {iteration}")
        scores = scores - args.missing_eos_penalty * ~batch.ended  # [episodes]
        ref_logprobs = None
        if reference is not None:
            one_pass = partial(forward_pass, reference, token_logprobs, batch)
            ref_logprobs = map_episodes(one_pass, batch.pass_lengths, size)

        # ---- 5c  advantages
        rewards = scores[:, None]  # [episodes, 1]: all tokens of an episode share it
        advantages = grpo_advantages(rewards, args.k, args.scale_rewards)
        advantages = advantages.float()  # [episodes, 1]
        included = batch.ended[:, None] | (not args.mask_truncated_completions)  # [episodes, 1]
        # Without KL, advantage 0 gives gradient 0: no pass. With a second loss, take all.
        has_gradient = (included & ((advantages != 0) | (reference is not None))).any(1)
        weights = torch.zeros_like(included, dtype=torch.float)  # each mini-batch sets its own

        # ---- 5d  optimize
        train_start = time.perf_counter()
        updates = []  # the metrics of each update
        for ppo_epoch in range(args.num_ppo_epochs):
            for mini_batch in draw_mini_batches(args, iteration, ppo_epoch, num_episodes):
                optimizer.zero_grad()
                lengths = batch.mask[mini_batch].sum(1, keepdim=True)
                weights[mini_batch] = token_weights(args, lengths, included[mini_batch])
                to_train = mini_batch[has_gradient[mini_batch].cpu()]
                passes = []  # what each pass computed
                for episodes, is_real, is_last_pass in micro_batches(
                    to_train, batch.pass_lengths, size
                ):
                    with exchange_gradients(policy, now=is_last_pass):
                        logprobs = forward_pass(policy, token_logprobs, batch, episodes)
                        mask = batch.mask[episodes]
                        losses, logratio, is_clipped = grpo_loss(
                            args, logprobs, batch.logprobs[episodes], advantages[episodes], mask
                        )
                        if reference is not None:
                            losses = losses + args.kl_coef * k3_kl(logprobs, ref_logprobs[episodes])
                        # The weights divide by the size of the whole mini-batch. So neither
                        # micro-batches nor processes change the gradient.
                        losses = (losses * mask).sum(1, keepdim=True) * weights[episodes]
                        # [episodes, 1]; a second loss is added here, / len(mini_batch)
                        loss = (losses * is_real).sum()
                        # DDP takes the mean of the processes' gradients. We need their sum.
                        accelerator.backward(loss * accelerator.num_processes)
                    passes.append((episodes, (logprobs, losses, logratio, is_clipped)))
                grad_norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                # From here on, every process has the rows of all processes.
                new_logprobs, losses, logratio, is_clipped = gather_rows(passes, to_train)
                mask = batch.mask[to_train]
                update = update_metrics(logratio, is_clipped, mask)
                update["loss/policy_avg"] = losses.sum()
                update["grad_norm"] = grad_norm
                if not updates:  # no step yet: trainer and sampler must agree up to rounding
                    difference = new_logprobs - batch.logprobs[to_train]
                    update |= compare_with_sampler(args, difference[mask])
                if not isfinite(grad_norm):
                    raise RuntimeError(
                        f"iteration {iteration}, step {step + 1}: gradient norm {grad_norm}"
                    )
                learning_rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                scheduler.step()
                updates.append(update)
                step += 1
                progress.update()

        # ---- 5e  log
        episode = (iteration - 1) * args.batch_size + num_episodes
        epoch = episode / (args.k * len(prompts))
        metrics = {"iteration": iteration, "step": step, "episode": episode, "epoch": epoch}
        now = time.perf_counter()
        metrics |= {"lr": learning_rate, "eps": num_episodes / (now - rollout_start)}
        metrics["time/rollout_s"] = train_start - rollout_start
        metrics["time/train_s"] = now - train_start
        metrics |= rollout_metrics(batch, scores, parts) | mean_metrics(updates)
        if reference is not None:
            metrics["objective/kl"] = (batch.logprobs - ref_logprobs).sum(1).mean()
        equal_scores = all_equal(scores.view(-1, args.k))  # [groups, 1]
        metrics["group/equal_scores_fraction"] = equal_scores.float().mean()

        # ---- 5f  evaluate and save
        if eval_prompts and (is_last or iteration % (args.eval_every or plan.iterations) == 0):
            metrics |= evaluate(args, policy, eval_prompts, eval_scorers, output_dir, iteration)
        write_metrics(output_dir, metrics, progress)
        columns = {"score": scores} | parts | {"logprobs": batch.logprobs}
        columns |= {"advantage": advantages.squeeze(1), "ref_logprobs": ref_logprobs}
        write_rollouts(args, output_dir, plan, metrics, batch, columns)
        state |= {"iteration": iteration, "step": step}
        if args.save_every and (is_last or iteration % args.save_every == 0):
            save_checkpoint(args, policy, state, output_dir)

    progress.close()
    finish(args, policy, output_dir, plan)
    # The end of the process group can hang while a model exists, so the model is freed first.
    policy, optimizer = accelerator.free_memory(policy, optimizer)
    accelerator.end_training()


# ======================================== 6  the model =======================================
def generate(args: Args, policy, drawn, k: int, rng, temperature: float) -> Batch:
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
        size = args.per_device_rollout_batch_size or len(prompts)
        samples = map_episodes(one_pass, prompt_lengths, size)
    token_ids = [[token for token in row if token >= 0] for row in samples["tokens"].tolist()]
    # All episodes of a group get the same length. So sorting by it keeps them together, and a pass
    # that holds them runs their prompt once.
    lengths = torch.tensor([len(tokens) for tokens in token_ids])
    longest = lengths.view(-1, k).amax(1).repeat_interleave(k)
    return Batch(
        k=k,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        completions=model.tokenizer.batch_decode(token_ids, skip_special_tokens=True),
        token_ids=token_ids,
        mask=samples["tokens"] >= 0,
        pass_lengths=prompt_lengths + longest,
        **samples,
    )


@torch.no_grad()
def sample(model, prompts, uniforms, temperature: float) -> dict:
    """Sample a completion of every prompt, token by token.

    prompts: [episodes, longest prompt]; uniforms: [episodes, response], one number per token;
    temperature: 0 takes the most likely token.
    Returns tokens, ended, logprobs and entropies, as in Batch.
    """
    # In train mode, transformers drops the KV cache when gradient checkpointing is on. Dropout is
    # off in both modes.
    model.eval()
    tokens = torch.full_like(uniforms, -1, dtype=torch.long)
    ended = torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    logprobs = torch.zeros_like(uniforms, dtype=torch.float)
    entropies = torch.zeros_like(logprobs)
    eos_ids = torch.tensor(model.eos_ids, device=uniforms.device)
    active = torch.arange(len(prompts), device=uniforms.device)  # episodes that have not ended
    rows = prompts  # [active, tokens so far]
    logits, cache = prefill(model.language_model, prompts, logits_to_keep=1)
    for t in range(uniforms.shape[1]):
        logits = logits[:, -1].float() / (temperature or 1.0)
        log_p = torch.log_softmax(logits, dim=-1)  # [active, vocabulary]
        p = log_p.exp()
        if temperature > 0:
            picked = pick_tokens(p, uniforms[active, t])
        else:
            picked = log_p.argmax(-1)
        tokens[active, t] = picked
        logprobs[active, t] = log_p.gather(-1, picked[:, None]).squeeze(1)
        # Where p is 0, log_p may be -inf, and 0 * -inf would be nan. Below -104, p is always 0.
        entropies[active, t] = -p.mul_(log_p.clamp_(min=-104)).sum(-1)  # overwrites p and log_p
        has_ended = torch.isin(picked, eos_ids)
        if model.ends_with_stop_string is not None:
            has_ended |= model.ends_with_stop_string(tokens[active, : t + 1], None)
        ended[active] = has_ended
        goes_on = (~has_ended).nonzero().squeeze(1)  # rows of the completions that have not ended
        if t + 1 == uniforms.shape[1] or len(goes_on) == 0:
            break
        rows = torch.cat([rows, picked[:, None]], dim=1)
        if len(goes_on) < len(active):  # Completions that have ended leave the batch.
            active = active[goes_on]
            rows = rows[goes_on]
            cache.reorder_cache(goes_on)
        logits = run_network(model.language_model, rows, cache, start=rows.shape[1] - 1)
    model.train()
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
    hidden = completion_outputs(trunk, model.shares_prompts, prompts, tokens)

    def logprobs_of(hidden, tokens):  # of a piece: [piece, hidden size], [piece]
        logits = head_logits(model.language_model, hidden) / model.temperature
        log_p = torch.log_softmax(logits, dim=-1)
        return log_p.gather(-1, tokens.clamp(min=0)[:, None]).squeeze(1)

    # All logits at once would be the largest tensor of a run. Where they are many, they are made in
    # pieces, which the backward pass computes again.
    pieces = count_pieces(model.language_model.get_output_embeddings(), tokens.numel())
    if pieces > 1:
        logprobs_of = partial(checkpoint, logprobs_of, use_reentrant=False)
    inputs = hidden.flatten(0, 1).tensor_split(pieces), tokens.flatten().tensor_split(pieces)
    logprobs = torch.cat(list(map(logprobs_of, *inputs)))
    return logprobs.view_as(tokens).masked_fill(tokens < 0, 0.0)


class MicroBatch(NamedTuple):
    episodes: Tensor  # [size], indices into the batch
    is_real: Tensor  # [size, 1], False for a repeated episode, which does not count
    is_last: bool  # True for the last micro-batch of this process


def micro_batches(episodes, lengths, size: int) -> list[MicroBatch]:
    """This process's share of some episodes, in near-equal micro-batches of at most `size`.

    All processes make the same number of passes, so the last episode is repeated where needed:
    0 1 2 3 4 on 3 processes are 0 1 | 2 3 | 4 4, and the last 4 is not real.
    episodes: indices; lengths: [episodes of the batch]; a share is sorted by it, to save padding
    """
    count = len(episodes)
    if count == 0:  # A pass that does not count makes the gradients 0 instead of None.
        episodes = torch.zeros(1, dtype=torch.long)
    share = ceil(len(episodes) / accelerator.num_processes)
    positions = accelerator.process_index * share + torch.arange(share)
    is_real = (positions < count)[:, None]
    episodes = episodes[positions.clamp(max=len(episodes) - 1)]
    order = lengths[episodes].argsort(stable=True)
    pieces = ceil(share / size)
    episodes = episodes[order].to(accelerator.device).tensor_split(pieces)
    is_real = is_real[order].to(accelerator.device).tensor_split(pieces)
    is_last = [False] * (pieces - 1) + [True]
    return list(map(MicroBatch, episodes, is_real, is_last))


# =================================== MACHINERY ===================================
# You can skip everything below on a first reading. It loads data and models, divides the work over
# processes, logs, saves, resumes and checks. The algorithm is complete above.


# ==================================== 7  data and rewards ====================================
class Prompt(NamedTuple):
    number: int  # of its row in the dataset, from 0
    row: dict  # with all columns of the dataset
    text: str  # the prompt as the model reads it; a chat is rendered by its template
    token_ids: list[int]


ROW = (
    "a row is an object with a `prompt`, which is text or a list of messages with a `role`;"
    " `chat_template_kwargs` is an object"
)


def load_prompts(args: Args, path: str | None, reward: str, tokenizer) -> list[Prompt]:
    """The prompts of a .jsonl file, or of a Hub dataset NAME:SPLIT or NAME:CONFIG:SPLIT."""
    if path is None:
        return []
    if path.endswith(".jsonl"):
        flag = "--dataset" if path == args.dataset else "--eval-dataset"
        with blaming(f"{flag} {path}"):
            rows = Path(path).read_bytes().rstrip().splitlines()
    else:
        *names, split = re.split(r":(?![^\[]*\])", path)  # at colons that are not in brackets
        if not names:
            raise UsageError(f"{path}: must be a .jsonl file, or a Hub dataset as NAME:SPLIT")
        rows = importlib.import_module("datasets").load_dataset(*names, split=split)
    prompts = []
    columns = {}  # of all rows; a column that only some rows have is None in the others
    for number, row in enumerate(rows, start=1):
        with blaming(f"{path}:{number} ({ROW})"):
            if isinstance(row, bytes):
                row = json.loads(row)
            if not row.get("prompt"):
                raise ValueError("needs a `prompt`")
            if reward == "exact_match" and "answer" not in row:
                raise ValueError("needs an `answer`, for the reward exact_match")
            text, token_ids = tokenize(tokenizer, row, add_generation_prompt=True)
            if isinstance(row["prompt"], list) and row["prompt"][-1]["role"] == "assistant":
                raise ValueError(
                    "ends with an assistant message; add its text to the message before"
                )
            if not token_ids:
                raise ValueError("the prompt, as the model reads it, has no tokens")
        columns |= dict.fromkeys(row)
        if len(token_ids) <= (args.max_prompt_length or inf):
            prompts.append(Prompt(number - 1, row, text, token_ids))
    if not prompts:
        raise UsageError(f"{path}: has no rows, or none within --max-prompt-length")
    dropped = len(rows) - len(prompts)
    if dropped and os.environ.get("RANK", "0") == "0":
        print(f"{path}: {dropped} of {len(rows)} prompts dropped, over --max-prompt-length")
    return [prompt._replace(row=columns | prompt.row) for prompt in prompts]


def tokenize(tokenizer, row: dict, **settings) -> tuple[str, list[int]]:
    """The `prompt` of a row as the model reads it, and its tokens."""
    text = row["prompt"]
    is_chat = isinstance(text, list)
    if is_chat:  # The template writes the special tokens itself.
        if not all("role" in message for message in text):  # Calls of tools may lack content.
            raise ValueError("a message has no `role`")
        settings |= row.get("chat_template_kwargs") or {}
        text = tokenizer.apply_chat_template(text, tokenize=False, **settings)
    return text, tokenizer(text, add_special_tokens=not is_chat)["input_ids"]


def as_message(prompt: str | list, text: str):
    """A completion in the form of its prompt: text, or a chat of one message."""
    if isinstance(prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


def exact_match(completions: list, answer: list, **_) -> list[float]:
    """1 where the completion, without spaces around it, is the row's `answer`, else 0."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.strip() == str(right)) for text, right in zip(texts, answer)]


def load_reward(spec: str):
    """The function that exact_match, FILE.py:FUNCTION, package.module:FUNCTION or none names."""
    built_in = {"exact_match": exact_match, "none": lambda prompts, **_: [0.0] * len(prompts)}
    if spec in built_in:
        return built_in[spec]
    module, _, function = spec.rpartition(":")
    if not module:
        raise UsageError(f"--reward must be exact_match, FILE.py:FUNCTION or none, not {spec}")
    if module.endswith(".py"):
        with blaming("--reward"):
            file = Path(module).resolve(strict=True)
        # The file may import its neighbours. The folder comes last, so that it hides no library.
        sys.path.append(str(file.parent))
        module = file.stem
        found = importlib.util.find_spec(module)
        if found is None or Path(str(found.origin)).resolve() != file:
            module = str(file)  # Its short name is that of another module, which stays.
            found = importlib.util.spec_from_file_location(module, file)
            sys.modules[module] = importlib.util.module_from_spec(found)
            found.loader.exec_module(sys.modules[module])
    module = importlib.import_module(module)
    with blaming("--reward"):
        return getattr(module, function)


def load_scorers(args: Args, tokenizer) -> tuple[list, list]:
    """The scorers of training, and of evaluations. The scores that they give are added.

    A scorer is a function of a batch and a slice of its episodes: it gives lists of scores by name.
    """
    scorers = [partial(call_reward, load_reward(args.reward))]
    if args.reward_model_path is not None:
        scorers.append(load_reward_model(args, tokenizer))
    if args.eval_reward is None:
        return scorers, scorers
    return scorers, [partial(call_reward, load_reward(args.eval_reward))]


def score_episodes(batch: Batch, scorers: list, where: str):
    """Score the batch: every process scores a share of whole groups, and gets all.

    Returns the scores [episodes] and their parts, by name, in float64. What is None is nan.
    """
    groups = len(batch.prompts) // batch.k
    size = ceil(groups / accelerator.num_processes) * batch.k
    first = accelerator.process_index * size
    share = slice(first, first + size)
    prompts = batch.prompts[share]
    parts = {}
    if prompts:
        for scorer in scorers:
            for name, values in scorer(batch, share).items():
                parts[name] = check_scores(f"{where}: --reward {name}".rstrip(), values, prompts)
    shares = list(filter(None, gather_object([parts])))  # of the processes with episodes
    names = {tuple(share) for share in shares}
    if len(names) > 1:
        raise UsageError(f"{where}: the score has parts that differ between processes: {names}")
    parts = concatenate(shares)
    table = torch.stack(list(parts.values())).to(accelerator.device)  # [parts, episodes]
    scores = table.nansum(0).masked_fill(table.isnan().all(0), nan)
    if scores.isnan().all():
        warnings.warn(
            "--reward gave no score to any completion of a batch"
        )  # Python shows it once.
    return scores, {f"reward/{name}": part for name, part in zip(parts, table) if name}


def check_scores(source: str, values, prompts: list[Prompt]) -> Tensor:
    """The scores of some prompts as numbers, None as nan. Each must be None or a finite number."""
    if isinstance(values, Tensor):  # It may have any type and device, and a gradient.
        values = values.detach().tolist()
    returned = f"{len(values)} scores" if hasattr(values, "__len__") else repr(values)
    if returned != f"{len(prompts)} scores":
        raise UsageError(f"{source} returned {returned} for {len(prompts)} completions")
    scores = []
    for value, prompt in zip(values, prompts):
        # An array of one number is refused. Scores [n, 1] would be broadcast to [n, n] later.
        is_number = hasattr(value, "__float__") and np.ndim(value) == 0
        if value is not None and not (is_number and abs(float(value)) < 1e38):  # float32 holds it
            raise UsageError(
                f"{source} gave a completion of {prompt.text!r} the score {value!r}; it must be one"
                " finite number, or None. For parts of a score, return one dict of lists"
            )
        scores.append(nan if value is None else float(value))
    return torch.tensor(scores, dtype=torch.double)


def call_reward(function, batch: Batch, share: slice) -> dict[str, list]:
    """Call a reward function as TRL does, by keywords. Returns its lists of scores, by name."""
    # The function may change what it gets, so each episode has its own copy.
    rows = [copy.deepcopy(prompt.row) for prompt in batch.prompts[share]]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    completions = list(map(as_message, prompts, batch.completions[share]))
    token_ids = [list(tokens) for tokens in batch.token_ids[share]]
    inputs = dict(prompts=prompts, completions=completions, completion_ids=token_ids, **columns)
    with blaming(f"--reward, which is called with {', '.join(inputs)}"):
        inspect.signature(function).bind(**inputs)
    scores = function(**inputs)
    if not isinstance(scores, dict):
        return {"": scores}
    if not scores or "reward_model" in scores:
        raise UsageError("--reward: its dict must have parts, and none may be named reward_model")
    return scores


def load_reward_model(args: Args, tokenizer):
    """A classifier with one label, as a scorer. It reads token ids, the EOS included."""
    path = args.reward_model_path
    name = f"--reward-model-path {path}"
    its_tokenizer = load_part("--reward-model-path", path, transformers.AutoTokenizer)
    same_vocabulary = its_tokenizer.get_vocab() == tokenizer.get_vocab()
    auto_class = transformers.AutoModelForSequenceClassification
    model = load_model("--reward-model-path", path, args.dtype, auto_class, num_labels=1)
    with blaming(name):
        head = model.score  # of the last token; a model that scores its first token has no `score`
    eos = its_tokenizer.eos_token_id

    @torch.no_grad()
    def reward_model(batch: Batch, share: slice) -> dict[str, list]:
        rows = []
        for i in range(len(batch.prompts))[share]:
            row = batch.prompts[i].row
            tokens = batch.prompts[i].token_ids + batch.token_ids[i]
            if not same_vocabulary:  # It reads the text, and its own EOS where the episode ended.
                text = row["prompt"] + as_message(row["prompt"], batch.completions[i])
                _, tokens = tokenize(its_tokenizer, row | {"prompt": text})
                if batch.ended[i] and eos not in (None, tokens[-1]):
                    tokens = tokens + [eos]
            rows.append(tokens)
        check_positions(name, model.config, max(map(len, rows)))
        scores = []
        size = args.per_device_train_batch_size
        for first in range(0, len(rows), size):
            tokens = pad_left(rows[first : first + size]).to(accelerator.device)
            hidden = run_network(model.base_model, tokens)[:, -1]  # padding is on the left
            scores += head(hidden).float().squeeze(-1).tolist()
        return {"reward_model": scores}

    return reward_model


# ================================ 8  the work of each process ================================
@torch.no_grad()
def map_episodes(one_pass, lengths, size: int):
    """What one_pass(episodes) gives for all episodes, which the processes share, without gradient.

    lengths, size: as in `micro_batches`. Stops at what a model could not compute.
    """
    everything = torch.arange(len(lengths))
    passes = []
    for episodes, _, _ in micro_batches(everything, lengths, size):
        passes.append((episodes, one_pass(episodes)))
    results = gather_rows(passes, everything)
    recursively_apply(refuse_infinite, results)
    return results


def refuse_infinite(tensor: Tensor):
    """Stop at what a model could not compute. In a reward, nan would mean: there is no score."""
    if not tensor.isfinite().all():
        raise RuntimeError(
            "a model gives nan or inf; are its weights whole, and the learning rate low?"
        )


@torch.no_grad()
def gather_rows(passes: list, episodes: Tensor):
    """What the passes of all processes computed: a row for each of `episodes`, in this order.

    passes: for each pass of this process its episodes, and a tensor, or a tuple or dict of them
    """
    passed, tensors = accelerator.gather(concatenate(passes))
    row_of = {}  # of an episode, among the rows of all passes
    for row, episode in enumerate(passed.tolist()):
        row_of.setdefault(episode, row)  # An episode that is not real comes after the real one.
    rows = [row_of[episode] for episode in episodes.tolist()]
    rows = torch.tensor(rows, dtype=torch.long, device=passed.device)
    return recursively_apply(lambda tensor: tensor[rows], tensors)


def forward_pass(model, function, batch: Batch, episodes: Tensor):
    """function(model, prompts, tokens) of some episodes of the batch: [episodes, response].

    The model calls it in its forward. Columns after the longest completion are left out of the
    pass, and are 0 in what it returns.
    """
    chosen = episodes.cpu()
    prompts = trim(batch.prompt_tokens[chosen]).to(episodes.device)
    # At least two columns: with one, `completion_outputs` would skip its second pass, and the other
    # processes of a sharded model would wait for it forever.
    longest = max(2, *(len(batch.token_ids[i]) for i in chosen.tolist()))
    tokens = batch.tokens[episodes, :longest]
    outputs = model(partial(function, prompts=prompts, tokens=tokens))
    left_out = batch.tokens.shape[1] - tokens.shape[1]
    return recursively_apply(lambda x: torch.nn.functional.pad(x, (0, left_out)), outputs)


@contextlib.contextmanager
def exchange_gradients(policy, now: bool):
    """In the backward pass inside, the processes add up their gradients if `now` is True."""
    # DeepSpeed asks for this, and also takes its step then. It has no public setter.
    accelerator.gradient_state._set_sync_gradients(now)
    with contextlib.nullcontext() if now else accelerator.no_sync(policy):
        yield


def pad_left(rows: list[list[int]]) -> Tensor:
    """Token lists -> tokens [rows, longest], with -1 on the left of shorter ones, on the CPU."""
    longest = max(map(len, rows))
    return torch.tensor([[-1] * (longest - len(row)) + row for row in rows])


def trim(tokens: Tensor) -> Tensor:
    """The columns in which at least one row has a token."""
    return tokens[:, (tokens >= 0).any(0)]


# ============================== 9  loading and running models ==============================
class CompletionModel(torch.nn.Module):
    """A causal language model with what it needs to sample completions and to compute them."""

    def __init__(self, language_model, tokenizer, eos_ids: list[int], args: Args):
        super().__init__()
        self.language_model = language_model
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.ends_with_stop_string = find_stop_string(tokenizer, args.stop_string)
        self.temperature = args.temperature  # of the passes that compute log-probabilities
        # With gradient checkpointing there is no KV cache, which holds the shared prompts.
        can_share = language_model.can_share_prompts and not args.gradient_checkpointing
        self.shares_prompts = can_share and args.k > 1
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

    def leave_out_frozen(self, state_dict: dict, prefix: str, _):
        for name, weight in self.named_parameters(remove_duplicate=False):
            if not weight.requires_grad:
                state_dict.pop(prefix + name, None)

    def frozen_are_not_missing(self, keys):
        names = [name.removeprefix("module.") for name in keys.missing_keys]
        keys.missing_keys[:] = [name for name in names if self.get_parameter(name).requires_grad]


class KVCache(transformers.DynamicCache):
    """While sampling, keys have the type of the values, and their memory grows in steps.

    With autocast, keys would be float32, and attention would cast all of them again for every
    token. And every token would copy the whole cache.
    """

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if not torch.is_grad_enabled():
            keys = keys.to(values.dtype)  # Autocast has cast the values.
            layer = self.layers[layer_idx]
            # Layers of other types keep only some tokens, for instance those of a sliding window.
            is_plain = type(layer) is transformers.cache_utils.DynamicLayer
            if is_plain and layer.is_initialized and keys.shape[2] == 1:
                layer.keys = self.append(layer.keys, keys)
                layer.values = self.append(layer.values, values)
                return layer.keys, layer.values
        return super().update(keys, values, layer_idx, *args, **kwargs)

    @staticmethod
    def append(old, new):
        """`new` [rows, heads, 1, size] after `old` [rows, heads, tokens, size], and some room."""
        rows, heads, count, size = old.shape
        if old.stride(1) == count * size:  # The memory is full.
            old = torch.nn.functional.pad(old, (0, 0, 0, 8 + count // 4))
        # The beginning of a larger tensor, into which the next token is written.
        longer = old.as_strided((rows, heads, count + 1, size), old.stride())
        longer[:, :, count:] = new
        return longer


def run_network(network, rows, cache=None, start: int = 0, **settings) -> Tensor:
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


def completion_outputs(network, shares_prompts: bool, prompts, tokens) -> Tensor:
    """What `run_network` gives at the position before each completion token.

    With shared prompts, a prompt is run once for all its completions, which go on from its KV
    cache, with gradient. Otherwise each row holds a prompt and its completion.
    prompts: [episodes, longest prompt]; tokens: [episodes, tokens]. Returns [episodes, tokens, ..].
    """
    rows = torch.cat([prompts, tokens[:, :-1]], dim=1)  # Nothing follows the last token.
    start = prompts.shape[1]
    if not shares_prompts:
        return run_network(network, rows)[:, start - 1 :]
    outputs, cache = prefill(network, prompts)
    if tokens.shape[1] == 1:
        return outputs
    return torch.cat([outputs, run_network(network, rows, cache, start)], dim=1)


def head_logits(language_model, hidden) -> Tensor:
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


def count_pieces(head, num_tokens: int) -> int:
    """The number of near-equal pieces in which the head is called, at least 1."""
    pieces = ceil(num_tokens * head.out_features / LOGITS_AT_ONCE)
    if hasattr(head.weight, "ds_id"):
        # ZeRO-3 gathers the head at every call, so all processes must make as many calls.
        pieces = max(gather_object([pieces]))
    return pieces


MODEL = "a whole model with its tokenizer; merge LoRA adapters first, see docs/recipes.md#lora"


def load_part(flag: str, path: str, auto_class):
    """The tokenizer or the config of a model."""
    with blaming(f"{flag} {path} ({MODEL})"):
        return auto_class.from_pretrained(path)


def load_model(
    flag: str, path: str, dtype: str, auto_class=transformers.AutoModelForCausalLM, **changes
):
    """`from_pretrained` with all dropout off, on the device. changes: of its config"""
    name = f"{flag} {path}"
    config = transformers.AutoConfig.from_pretrained(path, **changes)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    model, info = auto_class.from_pretrained(
        path, config=config, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
    )
    wrong = {*info["missing_keys"], *(weight for weight, *_ in info["mismatched_keys"])}
    # A layer that the config does not count would be left out. A head may be.
    own = model.state_dict()
    wrong |= {w for w in info["unexpected_keys"] if re.sub(r"\.\d+\.", ".0.", w) in own}
    if wrong:  # The others would be random.
        raise UsageError(f"{name}: weights do not fit the config: {sorted(wrong)}")
    # Gradient checkpointing works only in train mode. Without dropout nothing there is random.
    model = model.to(accelerator.device).train()
    model.can_share_prompts = check_model(name, model)
    return model


def check_model(name: str, model) -> bool:
    """Refuse a model that needs more than masks and positions. May its prompts be shared?"""
    trunk = model.get_decoder()
    has_logits = model.get_output_embeddings() is not None  # for each token
    network = model if has_logits else trunk
    prompts = torch.tensor([[-1, -1, 1, 2], [3, 4, 5, 6]], device=accelerator.device)
    tokens = torch.arange(10, device=accelerator.device).view(2, 5)
    # The first of two short rows, alone: without padding and cache.
    alone = completion_outputs(network, False, prompts[:1, 2:], tokens[:1])
    for shares_prompts in (True, False):
        outputs = completion_outputs(trunk, shares_prompts, prompts, tokens)
        if has_logits:
            outputs = head_logits(model, outputs)
        try:  # Some models change their cache in place, which has no gradient.
            torch.autograd.grad(
                outputs.sum(), model.get_input_embeddings().weight, retain_graph=True
            )
        except RuntimeError:
            continue
        difference = outputs[:1] - alone
        if model.dtype == torch.float32:
            is_rounding = difference.abs().max() < 1e-3
        else:  # bfloat16: at most 0.10 was measured where it is right, and 0.31 where it is wrong
            is_rounding = difference.std() < 0.15 * alone.std()
        if is_rounding:
            if has_unused_weights(model if has_logits else model.base_model, outputs):
                # DDP would wait for their gradients. This makes it look for them.
                accelerator.ddp_handler = accelerate.DistributedDataParallelKwargs(
                    find_unused_parameters=True
                )
            if not shares_prompts:
                accelerator.print(f"{name} needs a row for each episode")
            return shares_prompts
    raise UsageError(f"{name} gives other results in padded rows, or needs another `head_logits`")


def has_unused_weights(model, outputs: Tensor) -> bool:
    """True if the outputs do not depend on some of the model's weights, as those for images."""
    used = set()
    nodes = {outputs.grad_fn}  # of the graph of gradients
    seen = set()
    while nodes:
        node = nodes.pop()
        seen.add(node)
        used.add(getattr(node, "variable", None))
        nodes |= {before for before, _ in node.next_functions if before is not None} - seen
    return not used.issuperset(model.parameters())


def load_policy(args: Args, tokenizer) -> CompletionModel:
    """The model that is trained."""
    dtype = "float32" if args.lora_r is None else args.dtype
    model = load_model("--model-path", args.model_path, dtype)
    eos_ids = find_eos_ids(model, tokenizer, args.stop_token_id)
    if not eos_ids:
        accelerator.print("there is no EOS, so every completion has --response-length tokens")
    model = prepare_for_training(args, model, index=1)
    return CompletionModel(model, tokenizer, eos_ids, args)


def prepare_for_training(args: Args, model, index: int):
    """Add gradient checkpointing and LoRA, as flags say. index: of the model, for new weights"""
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if args.lora_r is None:
        return model
    peft = importlib.import_module("peft")
    torch.manual_seed(int(keyed_rng(args.seed, NEW_WEIGHTS, index).integers(2**32)))
    config = peft.LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha or 2 * args.lora_r, target_modules="all-linear"
    )
    return peft.get_peft_model(model, config)


def load_reference(args: Args, policy: CompletionModel):
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
    model = load_model("--ref-model-path", path, args.dtype)
    return CompletionModel(model, policy.tokenizer, policy.eos_ids, args)


def find_eos_ids(model, tokenizer, stop_token_id: int | None) -> list[int]:
    """What ends an episode: tokens of the generation config and tokenizer, and --stop-token-id."""
    eos_ids = np.ravel(model.generation_config.eos_token_id).tolist()  # one, several, or None
    eos_ids = sorted({*eos_ids, tokenizer.eos_token_id, stop_token_id} - {None})
    if max(eos_ids, default=0) >= model.config.get_text_config().vocab_size:
        raise UsageError(f"EOS or --stop-token-id {eos_ids[-1]} is outside of the vocabulary")
    return eos_ids


def find_stop_string(tokenizer, stop_string: str | None):
    """A function of completions: True where the last token completes --stop-string. Or None."""
    if stop_string is not None:
        with blaming("--stop-string needs a tokenizer that can write any text"):
            return transformers.StopStringCriteria(tokenizer, [stop_string])


# ============================= 10  logging, samples, checkpoints =============================
JSONL_FILES = ("metrics.jsonl", "rollouts.jsonl", "eval_rollouts.jsonl")


def evaluate(args: Args, policy, prompts: list, scorers: list, output_dir, iteration: int) -> dict:
    """The mean score of held-out prompts, and the expected best of m of --eval-k completions."""
    k = args.eval_k
    rng = keyed_rng(args.seed, EVALUATION, iteration)
    batch = generate(args, policy, prompts, k, rng, args.eval_temperature)
    scores, parts = score_episodes(batch, scorers, f"evaluation {iteration}")
    if args.save_rollouts:
        columns = {"score": scores} | parts | {"logprobs": batch.logprobs}
        append_jsonl(output_dir / "eval_rollouts.jsonl", rollout_rows(batch, iteration, columns))
    metrics = {"eval/scores": scores.nanmean(), "eval/num_unscored": scores.isnan().sum()}
    for name, part in parts.items():
        metrics[f"eval/{name}"] = part.nanmean()
    groups = scores.view(-1, k)
    groups = groups[~groups.isnan().any(1)].sort(1).values  # prompts with all scores, low to high
    for m in [2**i for i in range(k) if 2**i < k] + [k]:
        # Of all choices of m scores, comb(i, m - 1) have score i as the best (2107.03374, eq. 1).
        weights = [comb(i, m - 1) / comb(k, m) for i in range(k)]
        metrics[f"eval/best_of_{m}"] = (groups @ groups.new_tensor(weights)).mean()
    return metrics


def append_jsonl(path: Path, rows: list[dict]):
    """The main process appends one JSON object per line."""
    if accelerator.is_main_process:
        # As in JSON, half of a character that needs two is written as an escape.
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def rollout_metrics(batch: Batch, scores: Tensor, parts: dict) -> dict:
    """What the batch itself shows. Means are over its episodes or its tokens."""
    metrics = {
        "objective/scores": scores.nanmean(),
        "objective/entropy": -batch.logprobs.sum(1).mean(),  # an estimate, per episode
        "policy/entropy_avg": batch.entropies[batch.mask].mean(),  # exact, per token
        "val/num_eos_tokens": batch.ended.sum(),
        "val/num_unscored": scores.isnan().sum(),
        "response_length_mean": batch.mask.sum(1).float().mean(),
    }
    for name, part in parts.items():
        metrics[name] = part.nanmean()
    return metrics


def all_equal(groups):
    """True where the rewards of a group are all equal, those of unscored episodes left out.

    groups: [groups, k, ..]. Returns [groups, 1, ..].
    """
    highest = groups.nan_to_num(nan=-inf).amax(1, keepdim=True)
    return (groups.isnan() | (groups == highest)).all(1, keepdim=True)


def ratio_metrics(logratio: Tensor, is_clipped: Tensor, mask: Tensor) -> dict:
    """What an update logs of its ratios.

    logratio, is_clipped: [episodes, ratios]; mask: [episodes, response]. An episode may have a
    ratio for each token, or only one. Those of tokens count where mask is True.
    """
    if len(logratio) == 0:
        return {}
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


def update_metrics(logratio: Tensor, is_clipped: Tensor, mask: Tensor) -> dict:
    """`ratio_metrics`, and where the clip acts: below 1, or above 1. Shapes: as there."""
    metrics = ratio_metrics(logratio, is_clipped, mask)
    if metrics:  # After the end of a completion, logratio is 0.
        count = mask[:, : logratio.shape[1]].sum()
        metrics["policy/clipfrac_low_avg"] = (is_clipped & (logratio < 0)).sum() / count
        metrics["policy/clipfrac_high_avg"] = (is_clipped & (logratio > 0)).sum() / count
    return metrics


def mean_metrics(rows: list[dict]) -> dict:
    """The mean of each metric over the rows that have it."""
    names = dict.fromkeys(itertools.chain(*rows))
    return {name: np.mean([float(row[name]) for row in rows if name in row]) for name in names}


def write_metrics(output_dir: Path, metrics: dict, progress: tqdm):
    """Hand an iteration's metrics to the trackers, metrics.jsonl and the progress bar."""
    metrics = recursively_apply(Tensor.item, metrics)
    # The mean of no episodes is nan, and a ratio can be inf. JSON knows neither.
    metrics = {name: value for name, value in metrics.items() if isfinite(value)}
    accelerator.log(metrics, step=metrics["episode"])
    append_jsonl(output_dir / "metrics.jsonl", [metrics])
    progress.set_postfix(score=metrics.get("objective/scores"))


def rollout_rows(batch: Batch, iteration: int, tensors: dict) -> list[dict]:
    """A row for each episode. tensors: [episodes] or [episodes, response], by name; None is null"""
    rows = []
    columns = zip(batch.prompts, batch.completions, batch.token_ids, batch.ended.tolist())
    for index, (prompt, completion, token_ids, ended) in enumerate(columns):
        row = dict(iteration=iteration, index=index, row=prompt.number, prompt=prompt.text)
        row |= dict(completion=completion, token_ids=token_ids, ended=ended)
        row["columns"] = {name: prompt.row[name] for name in prompt.row if name != "prompt"}
        rows.append(row)
    for name, tensor in tensors.items():
        values = [None] * len(rows)
        if tensor is not None:
            values = np.where(tensor.isnan().cpu(), None, tensor.cpu()).tolist()
        for row, value in zip(rows, values):
            is_list = isinstance(value, list)  # a number for each token, and then padding
            row[name] = value[: len(row["token_ids"])] if is_list else value
    return rows


def write_rollouts(args: Args, output_dir, plan, metrics: dict, batch: Batch, tensors: dict):
    """Append all episodes to rollouts.jsonl where asked, and now and then show a few of them."""
    iteration = metrics["iteration"]
    rows = rollout_rows(batch, iteration, tensors)
    if args.save_rollouts:
        append_jsonl(output_dir / "rollouts.jsonl", rows)
    # This is true --num-sample-generations times in a run, at equal distances.
    wanted = args.num_sample_generations
    if not accelerator.is_main_process or iteration * wanted % plan.iterations >= wanted:
        return
    numbers = [name for name, tensor in tensors.items() if tensor is not None and tensor.dim() == 1]
    names = ["prompt", "completion", *numbers]
    samples = [[row[name] for name in names] for row in rows[:: args.k][:4]]  # of four groups
    for sample in samples:
        tqdm.write(f"episode {metrics['episode']}: {dict(zip(names, sample))}")
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table("samples", columns=names, data=samples, step=metrics["episode"])


def save_checkpoint(args: Args, policy, state: dict, output_dir: Path):
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


def save_model(policy, folder: Path):
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
    model.language_model.save_pretrained(folder, state_dict=weights)
    model.tokenizer.save_pretrained(folder)


def load_state(output_dir: Path) -> dict:
    """What one iteration hands to the next. A resumed run has it from its newest checkpoint.

    The checkpoint's weights and optimizer are loaded, too.
    """
    state = {"iteration": 0, "step": 0, "jsonl_sizes": {}}
    for file in sorted(output_dir.glob("checkpoints/iteration_*/state.json"))[-1:]:
        accelerator.print(f"--resume from {file.parent}; remove it if it is damaged")
        state |= json.loads(file.read_text())
        accelerator.load_state(str(file.parent))
    return state


def open_output_dir(args: Args, output_dir: Path, plan, state: dict) -> tqdm:
    """Lock the folder, cut its files to the checkpoint, write args.yaml, start the trackers.

    Prints the plan. Returns a bar over all optimizer steps.
    """
    is_main = accelerator.is_main_process
    if is_main:
        output_dir.mkdir(parents=True, exist_ok=True)
        # This raises where another process holds the lock. A killed process gives it back.
        accelerator.lock = filelock.FileLock(output_dir / ".lock", blocking=False).acquire()
        shutil.rmtree(output_dir / "checkpoints" / "unfinished", ignore_errors=True)
        for file in map(output_dir.joinpath, JSONL_FILES):
            if file.exists():  # What was written after the checkpoint is cut off.
                size = state["jsonl_sizes"].get(file.name, 0)
                os.truncate(file, min(size, file.stat().st_size))
        temporary = output_dir / "args.tmp"
        temporary.write_text(yaml.safe_dump(vars(args), sort_keys=False))
        temporary.replace(output_dir / "args.yaml")
        chosen = f"--learning-rate {args.learning_rate:g}, --response-length {args.response_length}"
        processes = f"{accelerator.num_processes} x {accelerator.device.type}, {args.dtype}"
        print(f"{processes}, {chosen}; writing to {output_dir}")
        print(yaml.safe_dump(vars(plan), sort_keys=False), end="")
    accelerator.project_configuration.logging_dir = str(output_dir)
    # tensorboard takes no None
    config = {name: value for name, value in vars(args).items() if value is not None}
    accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "tally"), config)
    return tqdm(total=plan.steps, initial=state["step"], disable=not is_main)


def finish(args: Args, policy, output_dir: Path, plan: SimpleNamespace):
    """Write the model, give its folder its name when it is whole, and sum the run up."""
    summary = f"{plan.episodes:,} episodes, {plan.steps:,} steps, {plan.epochs:g} epochs"
    if plan.steps > 0:
        save_model(policy, output_dir / "model.tmp")
    if accelerator.is_main_process:
        with open(output_dir / "metrics.jsonl", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        for name in ("eval/scores", "objective/scores"):
            values = [row[name] for row in rows if name in row]
            if values:
                summary += f"; {name} {values[0]:.3f} -> {values[-1]:.3f}"
        if plan.steps > 0:
            folder = (output_dir / "model.tmp").rename(output_dir / "model")
            summary += f"; model in {folder}"
    accelerator.print(summary)
    accelerator.wait_for_everyone()  # Another process may still be reading a checkpoint.
    if args.keep_checkpoints is None:
        for folder in output_dir.glob("checkpoints/iteration_*"):
            shutil.rmtree(folder, ignore_errors=True)  # The processes do this together.


# ===================================== 11  sharded models =====================================
@contextlib.contextmanager
def sampling_weights(model):
    """Inside, sharded weights are gathered as a whole, not layer by layer for every token."""
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
        rows = weight.data
        if rows.is_cpu and len(rows) > 100_000:  # tokens of the vocabulary
            # Laid out by column, the head computes a few tokens up to 1.6 times as fast.
            weight.data = rows.t().contiguous().t()
        yield
        weight.data = rows


# ======================================== 12  checks ========================================
# --learning-rate of the built-in policy, of any other, and of LoRA adapters.
RATES = {"built-in": 1e-4, "other": 1e-6, "LoRA": 1e-5}

# Flags that may change when a run is resumed. They change memory, or what is shown and kept.
FREE_FLAGS = (
    "output_dir resume save_every plan gradient_checkpointing log_with dataset eval_dataset "
    "eval_every eval_temperature eval_k eval_reward per_device_train_batch_size "
    "per_device_rollout_batch_size num_sample_generations save_rollouts keep_checkpoints"
).split()  # Instead of the path --dataset, its rows are compared.

# A number must be above 0 and finite. These flags, of all three scripts, may also be 0.
ZERO_IS_ALLOWED = (
    "seed warmup_steps num_sample_generations stop_token_id learning_rate weight_decay kl_coef "
    "cliprange cliprange_high cliprange_value eval_temperature missing_eos_penalty vf_coef gamma "
    "lam total_episodes"
)
ALSO_ALLOWED = dict.fromkeys(ZERO_IS_ALLOWED.split(), 0) | {"max_grad_norm": inf}


class UsageError(ValueError):
    """A mistake in flags or data. The program shows its message without a traceback."""


@contextlib.contextmanager
def blaming(cause: str):
    """An error inside is a mistake of the user. The message names its cause, a flag or a row."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{cause}: {error}") from error


def check_flags(args: Args):
    """Fill in defaults. Refuse flags that are out of range or contradict each other."""
    if args.dtype is None:
        launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
        args.dtype = "bfloat16" if launcher == "bf16" else "float32"
        if launcher == "fp16":
            warnings.warn("the launcher's fp16 is not offered: passes are in float32")
    if args.eval_dataset is None and args.dataset == Args.dataset:
        args.eval_dataset = str(DEFAULT / "eval.jsonl")
    kind = "other" if args.lora_r is None else "LoRA"
    if Path(args.model_path).resolve() == Path(Args.model_path).resolve():
        kind = "built-in"
    if args.learning_rate is None:
        args.learning_rate = RATES[kind]
    if args.response_length is None:
        args.response_length = 8 if kind == "built-in" else 256
    for name, value in vars(args).items():
        if type(value) in (int, float) and not 0 < value < inf and value != ALSO_ALLOWED.get(name):
            allowed = f"a finite number above 0, or {ALSO_ALLOWED.get(name, 'left out')}"
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {value} is out of range: it must be {allowed}")
    multiple = lcm(args.k, args.num_mini_batches)
    trackers = [None, *map(str, accelerate.tracking.get_available_trackers())]
    faults = {  # a message, and whether it is true
        "--num-generations must be at least 2, to compare scores": args.num_generations < 2,
        "--dtype bfloat16 with more than one update per batch: rounding alone would clip nearly all"
        " ratios of sequences, see docs/metrics.md": (
            args.importance_sampling_level == "sequence"
            and args.dtype == "bfloat16"
            and args.updates_per_batch > 1
        ),
        f"--batch-size: whole groups need a multiple of {multiple}": args.batch_size % multiple,
        "--reward none needs a --reward-model-path or a --ref-model-path": (
            args.reward == "none" and not (args.reward_model_path or args.ref_model_path)
        ),
        "--eval-every, --eval-reward, --eval-k and --total-episodes 0 need an --eval-dataset": (
            args.eval_dataset is None
            and (args.eval_every or args.eval_reward or args.eval_k > 1 or args.total_episodes == 0)
        ),
        "--eval-k needs an --eval-temperature": args.eval_k > 1 and args.eval_temperature == 0,
        "--stop-string is empty": args.stop_string == "",
        "--keep-checkpoints needs --save-every": args.keep_checkpoints and not args.save_every,
        "--warmup-steps needs --lr-scheduler-type constant_with_warmup": (
            args.warmup_steps > 0 and args.lr_scheduler_type == "constant"
        ),
        "--resume needs the --output-dir of the run": args.resume and args.output_dir is None,
        f"--log-with: {args.log_with} is none of {trackers}": args.log_with not in trackers,
    }
    for message, is_true in faults.items():
        if is_true:
            raise ValueError(message)


def check_sizes(args: Args, prompts: list[Prompt]):
    """Refuse a model that has too few positions, or another vocabulary than the policy."""
    # The last token is no input.
    needed = max(len(prompt.token_ids) for prompt in prompts) + args.response_length - 1
    largest = max(max(prompt.token_ids) for prompt in prompts)
    sizes = set()  # of vocabularies
    for flag in ("model_path", "ref_model_path", "value_model_path"):
        path = getattr(args, flag, None) or args.model_path
        flag = f"--{flag.replace('_', '-')}"
        config = load_part(flag, path, transformers.AutoConfig).get_text_config()
        check_positions(f"{flag} {path}", config, needed)
        sizes.add(config.vocab_size)
        if len(sizes) > 1:
            raise UsageError(f"{flag} {path} must have the policy's vocabulary")
        if largest >= config.vocab_size:
            raise UsageError(f"{flag} {path}: a prompt has token {largest}, but the model has none")


def check_positions(name: str, config, needed: int):
    """Refuse a model that has too few positions for the longest row."""
    names = ("max_position_embeddings", "max_seq_len")  # MPT has the second one.
    positions = min(getattr(config, name, None) or inf for name in names)
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):  # They may be set for each type of layer.
        if isinstance(settings, dict) and settings.get("rope_type") == "longrope":
            # Beyond these positions, the longest row of a pass would change all its other rows.
            positions = settings["original_max_position_embeddings"]
    if positions < needed:
        raise UsageError(
            f"{name} has {positions} positions, and the longest prompt with its completion needs"
            f" {needed}; lower --response-length, or --max-prompt-length"
        )


def start_accelerator(args: Args):
    """Start the processes' connection, and refuse a launch in which some of them are missing."""
    global accelerator
    accelerator = accelerate.Accelerator(
        # The scripts do accumulation and autocast themselves, whatever the launcher is set to.
        gradient_accumulation_plugin=accelerate.utils.GradientAccumulationPlugin(num_steps=1),
        mixed_precision="no",
        log_with=args.log_with,
        project_dir="runs",
        cpu=torch.mps.is_available(),  # Apple's GPUs have no float64, which sampling needs.
    )
    # accelerate can start one process where several were asked for, or several that are alone.
    asked_for_more = {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys()
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1 + asked_for_more)):
        raise UsageError(
            "fewer processes than launched, or no GPU was found; without GPUs use"
            " ACCELERATE_USE_CPU=true torchrun"
        )
    if accelerator.distributed_type == "DEEPSPEED":
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


def choose_output_dir(args: Args, prompts: list[Prompt]) -> Path:
    """The folder of the run, the same on all processes. Nothing is written.

    Only --resume may use a folder that holds a run, and no flag or row may make it another run.
    """
    rows = repr([prompt.row for prompt in prompts]).encode()
    # This is kept and compared as a flag is.
    args.dataset_rows = f"{len(prompts)}, SHA-256 {hashlib.sha256(rows).hexdigest()[:12]}"
    name = f"runs/{Path(__file__).stem}__{args.seed}__{int(time.time())}__{os.getpid()}"
    # The clocks of two processes may differ.
    output_dir = Path(gather_object([args.output_dir or name])[0]).absolute()
    names = (*JSONL_FILES, "checkpoints", "model")
    if any((output_dir / name).exists() for name in names):
        if not args.resume:
            raise UsageError(f"--output-dir {output_dir} holds a run; --resume continues it")
        theirs = yaml.safe_load((output_dir / "args.yaml").read_text())
        foreign = theirs.keys() - vars(args).keys()
        if foreign:
            raise UsageError(f"{output_dir} holds a run of another script, with {sorted(foreign)}")
        for name, its in (vars(Args()) | theirs).items():  # An older script had fewer flags.
            mine = getattr(args, name)
            if name not in FREE_FLAGS and its != mine:
                flag = f"--{name.replace('_', '-')}"
                if name == "dataset_rows":
                    flag = "the rows of --dataset changed:"
                raise UsageError(
                    f"{flag} {mine}: the run in {output_dir} has {its}. Only flags of memory,"
                    " evaluation and output may change. To train longer, start another run from its"
                    " model"
                )
    return output_dir


def exit_if_finished(output_dir: Path):
    """Stop here if the run in this folder is finished. Its `model/` is written last of all."""
    if (output_dir / "model").exists():
        accelerator.print(f"nothing to do: the run in {output_dir} is finished")
        accelerator.end_training()
        sys.exit()


def compare_with_sampler(args: Args, difference: Tensor) -> dict:
    """How far the first training pass of an iteration is from the sampler, at most, for any token.

    The weights are the same. Where more than rounding differs, the gradients would be wrong.
    difference: [tokens], of their log-probabilities
    """
    if len(difference) == 0:
        return {}
    largest = difference.abs().max()
    is_rounding = largest < 1e-3 if args.dtype == "float32" else difference.abs().mean() < 0.3
    if not is_rounding:
        raise RuntimeError(f"sampling and training give log-probabilities {largest:.2g} apart")
    return {"val/sampling_logprob_difference": largest}


transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# A checkpoint of tied weights holds them once. accelerate would warn about it every time.
logging.getLogger("accelerate.utils.other").setLevel("ERROR")

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # A terminal may know only ASCII.
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except UsageError as error:
        words = str(error).split()
    # The run is freed by now, so its progress bar has ended. That of another process may go on.
    print("\nerror:", *words, file=sys.stderr)
    sys.exit(2)
