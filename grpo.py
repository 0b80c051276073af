"""GRPO (group relative policy optimization) for language models, in one file.

For every prompt x, the policy samples a group of k completions y_1 .. y_k. A prompt with one of
its completions is an episode. Each token is one action. The tokens of an episode share A_i.

    advantage   A_i  = (score(x, y_i) - mean) / (standard deviation + 1e-4), over the group's scores
    ratio       r_it = p_new(y_it) / p_old(y_it)
    KL          K_it = exp(d) - d - 1 with d = log p_ref(y_it) - log p_new(y_it)
    loss        L    = mean over the episodes of the mean over the tokens of an episode of
                       [max(-A_i r_it, -A_i clip(r_it, 1 - c, 1 + c)) + kl_coef * K_it]

p(y_it) is the probability of token t, given the prompt and the tokens before it. p_old is the
policy that sampled the completion. p_new is the policy that is being trained. p_ref is a frozen
reference model. c is --cliprange.

By default there is no KL, and a batch gets one update, which is one optimizer step. Then p_new is
p_old, and every ratio is 1. With the default --loss-type the loss is 0, because the advantages of a
group add up to 0. Its gradient is the mean of -A_i mean_t grad log p_new(y_it): p_old is constant.

The words: an iteration samples one batch of episodes and trains on it. A mini-batch holds the
episodes of one optimizer step, on all processes together. A micro-batch holds the episodes of one
forward and backward pass on one process. A PPO epoch is one pass over the batch. A reward function
may return None: then the episode has no score, which is written as nan.

How to run it:
    python grpo.py                         # trains the small built-in policy on two-digit sums
    python grpo.py --plan 8                # prints all counts of a run on 8 processes, and stops
    accelerate launch grpo.py              # with GPUs, on all of them
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 grpo.py    # two processes without GPUs

How to read it: first comes the lecture, sections 1 to 5. It explains the algorithm and the loop.
Then comes the machinery, sections 6 to 11. You can skip it on a first reading.
docs/nano/ makes the same runs in few lines. Its README.md leads from there to this file.

    what you look for              where it is             how to change it
    the reward                     main, stage 4b          --reward FILE.py:FUNCTION
    a length penalty               main, stage 4b          subtract it from `scores`
    the baseline                   main, stage 4c          `state` remembers; a nan reward gives 0
    the loss                       `grpo_loss`             return other losses
    an entropy bonus               `token_logprobs`        benchmark/variants/entropy_bonus.patch
    a second loss                  main, stage 4d          add to `losses`; `to_train = mini_batch`
    a number that must survive     `state` in main         state["name"] = plain number; it is saved
    an inference engine            `generate`              see there
    which tokens end a completion  `find_eos_ids`          --stop-token-id adds one

How it differs: rloo.py has another baseline, one ratio for a whole completion, and the KL in the
reward. ppo.py trains a value model, and samples one completion for each prompt.

Papers: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; DAPO, arXiv
2503.14476; GSPO, arXiv 2507.18071; CISPO, arXiv 2506.13585.
"""

import contextlib
import hashlib
import importlib
import itertools
import json
import logging
import os
import re
import shutil
import sys
import time
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
    """subtracted from the score of a completion without EOS (arXiv 2403.17031, detail 23)"""
    # optimizer
    lr_scheduler_type: Schedule = "linear"  # over all optimizer steps, as in transformers
    learning_rate: float | None = None  # of AdamW; None: 1e-6, LoRA 1e-5, built-in policy 1e-4
    weight_decay: float = 0.0  # weight decay of AdamW, on all parameters
    warmup_steps: float = 0  # optimizer steps of linear warm-up; below 1: their share of all steps
    max_grad_norm: float = 1.0  # the gradient's norm is clipped to this; inf: no clipping
    # logging
    log_with: str | None = None  # a tracker beside metrics.jsonl: wandb, tensorboard, ...
    num_sample_generations: int = 10  # number of times in a run that samples are shown
    save_rollouts: bool = False  # write every episode to rollouts.jsonl

    # These two are not flags. They follow from them, and have the same names in all scripts.
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


# ===================================== 3  the algorithm =====================================
@dataclass
class Batch:
    """The episodes of one iteration. Every process holds all of them.

    The k episodes of a group are neighbours. The axis `response` has --response-length entries.
    Entries after the end of a completion are 0.
    """

    k: int  # episodes of a group
    prompts: list["Prompt"]  # [episodes], each with row, text and token_ids
    completions: list[str]  # [episodes], as text, without special tokens
    token_ids: list[list[int]]  # [episodes], lists of tokens, the EOS included
    tokens: Tensor  # [episodes, response], token_ids as a tensor
    mask: Tensor  # [episodes, response], True where a token belongs to the completion
    lengths: Tensor  # [episodes], tokens of the completion, the EOS included
    ended: Tensor  # [episodes], True where the completion has an EOS or the stop token
    logprobs: Tensor  # [episodes, response], of each token, by the policy that sampled it
    entropies: Tensor  # [episodes, response], exact entropy of each token's distribution
    pass_lengths: Tensor  # [episodes], prompt and longest completion of the group, in tokens


class LossInputs(NamedTuple):
    """What the loss reads besides the new log-probabilities."""

    old_logprobs: Tensor | None  # [episodes, response]; None: p_old is p_new
    advantages: Tensor  # [episodes]
    weights: Tensor  # [episodes], a factor of the losses of all tokens of an episode
    mask: Tensor  # [episodes, response], True for tokens of the completion
    ref_logprobs: Tensor | None  # [episodes, response]


class LossOutputs(NamedTuple):
    """What the loss returns. `losses` is minimized. The rest is only logged."""

    losses: Tensor  # [episodes]
    logratio: Tensor  # log of the ratios, [episodes] or [episodes, ratios of an episode]
    is_clipped: Tensor  # shape of logratio, True where the clip acts


def grpo_advantages(rewards, k: int, scale_rewards: str):
    """A_i = (score - mean) / (standard deviation + 1e-4) in a group (arXiv 2402.03300, 4.1.2).

    rewards: [episodes], the k episodes of a group side by side. Returns the advantages [episodes],
    and for each group [groups] whether its rewards are all equal. Then the advantages are 0.
    An episode without a score has the reward nan: no mean counts it, and its advantage is 0.
    """
    groups = rewards.view(-1, k)  # [groups, k]
    no_score = groups.isnan()
    advantages = groups - groups.nanmean(1, keepdim=True)  # [groups, k]
    if scale_rewards == "group":
        others = (~no_score).sum(1, keepdim=True) - 1  # [groups, 1]
        variance = advantages.square().nansum(1, keepdim=True) / others
        advantages = advantages / (variance.sqrt() + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (rewards[~rewards.isnan()].std() + 1e-4)
    # Equal scores must give exactly 0, but a mean is rounded. A group's only scored episode has no
    # others: it gets 0, too.
    highest = groups.nan_to_num(nan=-inf).amax(1, keepdim=True)
    all_equal = (no_score | (groups == highest)).all(1, keepdim=True)  # [groups, 1]
    return advantages.masked_fill(all_equal | no_score, 0.0).flatten(), all_equal.squeeze(1)


def token_weights(args: Args, lengths, included):
    """For each episode, the factor of the losses of its tokens: 1 / denominator, by --loss-type.

    The denominator is that of the whole mini-batch, on all processes. Episodes that are not
    included have weight 0, and the denominator does not count them.
    lengths, included: [episodes of the mini-batch]. Returns the same shape.
    """
    included = included.float()
    if args.loss_type == "grpo":  # 1 / |y_i| / episodes
        return included / lengths / included.sum().clamp(min=1)
    if args.loss_type in ("dapo", "cispo"):  # 1 / tokens
        return included / (included * lengths).sum().clamp(min=1)
    return included / (included.sum().clamp(min=1) * args.response_length)  # dr_grpo


def grpo_loss(args: Args, logprobs, inputs: LossInputs) -> LossOutputs:
    """The weighted loss of each episode. logprobs: [episodes, response], with gradient."""
    old_logprobs = inputs.old_logprobs
    if old_logprobs is None:  # p_old is p_new, as a constant: the ratio is exactly 1.
        old_logprobs = logprobs.detach()
    logratio = logprobs - old_logprobs  # [episodes, response]
    if args.importance_sampling_level == "sequence":  # the mean over the tokens, [episodes, 1]
        logratio = logratio.sum(1, keepdim=True) / inputs.mask.sum(1, keepdim=True)
    advantages = inputs.advantages[:, None]  # [episodes, 1]
    low = args.cliprange
    high = low if args.cliprange_high is None else args.cliprange_high
    losses, is_clipped = clipped_policy_loss(logratio, advantages, low, high)
    if args.loss_type == "cispo":
        # The clipped ratio is a constant here. So a clipped token keeps its gradient.
        ratio = logratio.detach().exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        losses = -advantages * clipped * logprobs
        is_clipped = clipped != ratio
    if inputs.ref_logprobs is not None:
        losses = losses + args.kl_coef * k3_kl(logprobs, inputs.ref_logprobs)
    losses = (losses * inputs.mask).sum(1) * inputs.weights
    return LossOutputs(losses, logratio, is_clipped)


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
    # exp(89) is inf. With a positive advantage the ratio is clipped, and the gradient 0 * inf would
    # be nan, so it is clamped. With a negative one inf stays, and stops the run in stage 4d.
    ratio = torch.where(advantages < 0, logratio, logratio.clamp(max=80)).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


# ======================================== 4  training ========================================
# It knows which process this is, and connects all of them. `start_accelerator` assigns it.
accelerator: accelerate.Accelerator


def main(args: Args):
    """Set up, train, save. Each turn of the loop is one iteration, in the stages 4a to 4f."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_path)
    prompts = load_prompts(args, args.dataset, args.reward, tokenizer)
    if args.plan is not None:
        plan = batch_arithmetic(args, len(prompts), world_size=args.plan)
        print(yaml.safe_dump(vars(plan), sort_keys=False), end="")
        return
    eval_prompts = load_prompts(args, args.eval_dataset, args.eval_reward or args.reward, tokenizer)

    check_sizes(args, prompts + eval_prompts)
    start_accelerator(args)
    output_dir = open_output_dir(args, prompts)
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
    state = load_state(output_dir)
    step = state["step"]
    scheduler.last_epoch = step  # For --resume. The optimizer has loaded its rate.
    progress = start_logging(args, output_dir, plan, state)
    if eval_prompts and state["iteration"] == 0:
        metrics = {"iteration": 0, "step": 0, "episode": 0, "epoch": 0.0}
        metrics |= evaluate(args, policy, eval_prompts, eval_scorers, iteration=0)
        write_metrics(output_dir, metrics, state, progress)

    for iteration in range(state["iteration"] + 1, plan.iterations + 1):
        # ---- 4a  rollout: sample k completions of each drawn prompt
        rollout_start = time.perf_counter()
        is_last = iteration == plan.iterations
        num_episodes = plan.last_batch_size if is_last else args.batch_size
        first = (iteration - 1) * plan.prompts_per_iteration  # prompts that were drawn before
        positions = draw_prompts(args.seed, len(prompts), first, num_episodes // args.k)
        drawn = [prompts[position] for position in positions]  # [groups]
        rng = keyed_rng(args.seed, SAMPLING, iteration)
        batch = generate(args, policy, drawn, args.k, rng, args.temperature)

        # ---- 4b  score
        scores, parts = score_episodes(batch, scorers, f"iteration {iteration}")
        scores = scores - args.missing_eos_penalty * ~batch.ended  # [episodes]
        ref_logprobs = None
        if reference is not None:
            one_pass = partial(run_pass, reference, token_logprobs, batch)
            ref_logprobs = run_passes(one_pass, batch.pass_lengths, size)

        # ---- 4c  advantages
        advantages, all_equal = grpo_advantages(scores, args.k, args.scale_rewards)
        advantages = advantages.float()  # [episodes]
        included = batch.ended | (not args.mask_truncated_completions)  # [episodes]
        # Without KL, advantage 0 gives gradient 0: no pass. With a second loss, take all.
        has_gradient = included & ((advantages != 0) | (reference is not None))
        weights = torch.zeros_like(advantages)  # [episodes], each mini-batch sets its own
        # With one update per batch, the policy has not changed since it sampled: p_old is p_new.
        old_logprobs = batch.logprobs if args.updates_per_batch > 1 else None
        loss_inputs = LossInputs(old_logprobs, advantages, weights, batch.mask, ref_logprobs)

        # ---- 4d  optimize
        train_start = time.perf_counter()
        updates = []  # the metrics of each update
        for ppo_epoch in range(args.num_ppo_epochs):
            for mini_batch in draw_mini_batches(args, iteration, ppo_epoch, num_episodes):
                optimizer.zero_grad()
                lengths = batch.lengths[mini_batch]
                loss_inputs.weights[mini_batch] = token_weights(args, lengths, included[mini_batch])
                to_train = mini_batch[has_gradient[mini_batch].cpu()]
                passes = []  # what each pass computed
                for micro_batch in micro_batches(to_train, batch.pass_lengths, size):
                    with exchange_gradients(policy, now=micro_batch.is_last):
                        episodes = micro_batch.episodes
                        logprobs = run_pass(policy, token_logprobs, batch, episodes)
                        outputs = grpo_loss(args, logprobs, select_rows(loss_inputs, episodes))
                        # The weights divide by the size of the whole mini-batch. So neither
                        # micro-batches nor processes change the gradient.
                        losses = outputs.losses  # Add a second loss here, / len(mini_batch).
                        loss = (losses * micro_batch.is_real).sum()
                        # DDP takes the mean of the processes' gradients. We need their sum.
                        accelerator.backward(loss * accelerator.num_processes)
                    passes.append((micro_batch, (logprobs, outputs)))
                grad_norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                new_logprobs, outputs = gather_rows(passes, to_train)  # all processes
                update = update_metrics(outputs, batch.mask[to_train])
                update["loss/policy_avg"] = outputs.losses.sum()
                update["grad_norm"] = grad_norm
                if not updates:  # no step yet: trainer and sampler must agree up to rounding
                    update |= compare_with_sampler(args, new_logprobs, batch.logprobs[to_train])
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

        # ---- 4e  log
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
        metrics["group/zero_advantage_fraction"] = all_equal.float().mean()

        # ---- 4f  evaluate and save
        if eval_prompts and (is_last or iteration % (args.eval_every or plan.iterations) == 0):
            metrics |= evaluate(args, policy, eval_prompts, eval_scorers, iteration)
        write_metrics(output_dir, metrics, state, progress)
        columns = {"score": scores} | parts | {"logprobs": batch.logprobs}
        columns |= {"advantage": advantages, "ref_logprobs": ref_logprobs}
        write_rollouts(args, output_dir, plan, metrics, batch, columns)
        state |= {"iteration": iteration, "step": step}
        if args.save_every and (is_last or iteration % args.save_every == 0):
            save_checkpoint(state, output_dir)

    progress.close()
    finish(policy, output_dir, plan, state)
    # The end of the process group can hang while a model exists, so the model is freed first.
    policy, optimizer = accelerator.free_memory(policy, optimizer)
    accelerator.end_training()


# ======================================== 5  the model =======================================
# run_inside(model, f, ..) is f(model, ..), called by the model's forward. run_pass does it for some
# episodes of a batch. run_passes does it for all, shared by the processes, without gradient.
def generate(args: Args, policy, drawn, k: int, rng, temperature: float) -> Batch:
    """Sample k completions of every prompt. Each process samples a share, and then gets them all.

    An inference engine takes the place of `sample` here. First give it the new weights. It returns
    the same tensors. It may ignore `uniforms`, and return 0 as entropies.
    drawn: [groups]; rng: gives all processes the same random numbers in [0, 1)
    """
    prompts = [prompt for prompt in drawn for _ in range(k)]  # [episodes], group by group
    uniforms = torch.from_numpy(rng.random((len(prompts), args.response_length)))
    uniforms = uniforms.to(accelerator.device)  # [episodes, response], a number for each token
    prompt_lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts])
    size = args.per_device_rollout_batch_size or len(prompts)
    model = accelerator.unwrap_model(policy)

    def one_pass(episodes):
        token_ids = [prompts[i].token_ids for i in episodes.tolist()]
        inputs = dict(prompts=token_ids, uniforms=uniforms[episodes], temperature=temperature)
        return run_inside(model, sample, **inputs)

    with sampling_weights(policy):
        samples = run_passes(one_pass, prompt_lengths, size)
    lengths = samples["lengths"]
    token_ids = trim_rows(samples["tokens"], lengths)
    # Micro-batches are sorted by pass_lengths, which are equal within a group. So its episodes stay
    # neighbours, and a micro-batch that holds them runs their prompt once.
    longest = lengths.cpu().view(-1, k).amax(1).repeat_interleave(k)
    return Batch(
        k=k,
        prompts=prompts,
        completions=model.tokenizer.batch_decode(token_ids, skip_special_tokens=True),
        token_ids=token_ids,
        mask=torch.arange(args.response_length, device=accelerator.device) < lengths[:, None],
        pass_lengths=prompt_lengths + longest,
        **samples,
    )


@torch.no_grad()
def sample(model, prompts, uniforms, temperature: float) -> dict:
    """Sample a completion of every prompt, token by token.

    prompts: token lists, one per episode; uniforms: [episodes, response], one number per token;
    temperature: 0 takes the most likely token.
    Returns tokens, lengths, ended, logprobs and entropies, as in Batch.
    """
    model.eval()  # Checkpointing in train mode disables the cache. Dropout is off in both modes.
    tokens = torch.zeros_like(uniforms, dtype=torch.long)
    lengths = torch.zeros_like(tokens[:, 0])
    ended = torch.zeros_like(lengths, dtype=torch.bool)
    logprobs = torch.zeros_like(uniforms, dtype=torch.float)
    entropies = torch.zeros_like(logprobs)
    eos_ids = torch.tensor(model.eos_ids, device=uniforms.device)
    active = torch.arange(len(prompts), device=uniforms.device)  # episodes that have not ended
    logits, cache, mask = run_prompts(model.language_model, prompts, logits_to_keep=1)
    for t in range(uniforms.shape[1]):
        logits = logits[:, -1].float() / (temperature or 1.0)
        log_p = torch.log_softmax(logits, dim=-1)  # [active, vocabulary]
        p = log_p.exp()
        if temperature > 0:
            picked = pick_tokens(p, uniforms[active, t])
        else:
            picked = log_p.argmax(-1)
        tokens[active, t] = picked
        lengths[active] = t + 1
        logprobs[active, t] = log_p.gather(-1, picked[:, None]).squeeze(1)
        # Where p is 0, log_p may be -inf, and 0 * -inf would be nan. Below -104, p is always 0.
        entropies[active, t] = -(p * log_p.clamp(min=-104)).sum(-1)
        has_ended = torch.isin(picked, eos_ids)
        ended[active] = has_ended
        goes_on = (~has_ended).nonzero().squeeze(1)  # rows of the completions that have not ended
        if t + 1 == uniforms.shape[1] or len(goes_on) == 0:
            break
        if len(goes_on) < len(active):  # Completions that have ended leave the batch.
            active = active[goes_on]
            picked = picked[goes_on]
            mask = mask[goes_on]
            cache.reorder_cache(goes_on)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)  # [active, tokens so far]
        logits = run_tokens(model.language_model, picked[:, None], mask, cache)
    model.train()
    return dict(tokens=tokens, lengths=lengths, ended=ended, logprobs=logprobs, entropies=entropies)


def pick_tokens(p, uniforms):
    """Inverse transform: the first token whose cumulative probability exceeds the uniform number.

    p: [rows, vocabulary], probabilities; uniforms: [rows]. Returns [rows].
    """
    cumulative = p.cumsum(-1, dtype=torch.double)
    total = cumulative[:, -1:]  # 1, up to rounding
    # right=True means strictly above. So a token of probability 0 is never picked.
    picked = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True).squeeze(1)
    return picked.clamp(max=p.shape[1] - 1)  # Only p = nan needs it; a later check stops the run.


def token_logprobs(model, prompts, tokens, mask):
    """Log-probability of every completion token, with gradient. It is 0 where `mask` is False.

    prompts: token lists, one per episode; tokens, mask: [episodes, tokens]. Returns the same shape.
    """
    # The hidden state at the position before a token gives the logits of this token.
    trunk = model.language_model.get_decoder()  # the model without its head
    hidden = completion_outputs(trunk, model.shares_prompts, prompts, tokens, mask)

    def logprobs_of(hidden, tokens):  # of a piece: [piece, hidden size], [piece]
        logits = head_logits(model.language_model, hidden) / model.temperature
        log_p = torch.log_softmax(logits, dim=-1)
        return log_p.gather(-1, tokens[:, None]).squeeze(1)

    # All logits at once would be the largest tensor of a run.
    logprobs = in_pieces(model, logprobs_of, hidden, tokens)
    return logprobs.masked_fill(~mask, 0.0)


class MicroBatch(NamedTuple):
    episodes: Tensor  # [size], indices into the batch
    is_real: Tensor  # [size], 1.0; or 0.0 for a repeated episode, which does not count
    is_last: bool  # True for the last micro-batch of this process


def micro_batches(episodes, lengths, size: int) -> list[MicroBatch]:
    """This process's share of some episodes, in near-equal micro-batches of at most `size`.

    All processes make the same number of passes, so the last episode is repeated where needed:
    0 1 2 3 4 on 3 processes are 0 1 | 2 3 | 4 4, and is_real is 1 1 | 1 1 | 1 0.
    episodes: indices; lengths: [episodes of the batch]; a share is sorted by it, to save padding
    """
    count = len(episodes)
    if count == 0:  # A pass that does not count makes the gradients 0 instead of None.
        episodes = torch.zeros(1, dtype=torch.long)
    share = ceil(len(episodes) / accelerator.num_processes)
    positions = accelerator.process_index * share + torch.arange(share)
    is_real = (positions < count).float()
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


# ==================================== 6  data and rewards ====================================
class Prompt(NamedTuple):
    row: dict  # the row of the dataset, with all its columns
    text: str  # the prompt as the model reads it; a chat is rendered by its template
    token_ids: list[int]


def load_prompts(args: Args, path: str | None, reward: str, tokenizer) -> list[Prompt]:
    """The prompts of a .jsonl file, or of a Hub dataset NAME:SPLIT or NAME:CONFIG:SPLIT."""
    if path is None:
        return []
    if path.endswith(".jsonl"):
        rows = Path(path).read_bytes().rstrip().splitlines()
    else:
        *names, split = re.split(r":(?![^\[]*\])", path)  # at colons that are not in brackets
        if not names:
            raise ValueError(f"{path}: must be a .jsonl file, or a Hub dataset as NAME:SPLIT")
        rows = importlib.import_module("datasets").load_dataset(*names, split=split)
    prompts = []
    columns = {}  # of all rows; a column that only some rows have is None in the others
    for number, row in enumerate(rows, start=1):
        try:
            if isinstance(row, bytes):
                row = json.loads(row)
            if not row.get("prompt"):
                raise ValueError("needs a `prompt`: text, or a list of chat messages")
            if reward == "exact_match" and "answer" not in row:
                raise ValueError("needs an `answer`, for the reward exact_match")
            text, token_ids = tokenize(tokenizer, row, add_generation_prompt=True)
            if not token_ids:
                raise ValueError("the prompt, as the model reads it, has no tokens")
        except Exception as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        columns |= dict.fromkeys(row)
        if len(token_ids) <= (args.max_prompt_length or inf):
            prompts.append(Prompt(row, text, token_ids))
    if not prompts:
        raise ValueError(f"{path}: has no rows, or none within --max-prompt-length")
    dropped = len(rows) - len(prompts)
    if dropped and os.environ.get("RANK", "0") == "0":
        print(f"{path}: {dropped} of {len(rows)} prompts dropped, over --max-prompt-length")
    return [prompt._replace(row=columns | prompt.row) for prompt in prompts]


def tokenize(tokenizer, row: dict, **settings) -> tuple[str, list[int]]:
    """The `prompt` of a row as the model reads it, and its tokens."""
    text = row["prompt"]
    is_chat = isinstance(text, list)
    if is_chat:  # The template writes the special tokens itself.
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
        raise ValueError(f"--reward must be exact_match, FILE.py:FUNCTION or none, not {spec}")
    if module.endswith(".py"):
        file = Path(module).resolve(strict=True)
        # The file may import its neighbours. The folder comes last, so that it hides no library.
        sys.path.append(str(file.parent))
        module = file.stem
    return getattr(importlib.import_module(module), function)


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
                parts[name] = check_scores(f"{where}: --reward {name}", values, prompts)
    shares = list(filter(None, gather_object([parts])))  # of the processes with episodes
    names = {tuple(share) for share in shares}
    if len(names) > 1:
        raise ValueError(f"{where}: the score has parts that differ between processes: {names}")
    parts = concatenate(shares)
    table = torch.stack(list(parts.values())).to(accelerator.device)  # [parts, episodes]
    scores = table.nansum(0).masked_fill(table.isnan().all(0), nan)
    return scores, {f"reward/{name}": part for name, part in zip(parts, table) if name}


def check_scores(source: str, values, prompts: list[Prompt]) -> Tensor:
    """The scores of some prompts as numbers, None as nan. Each must be None or a finite number."""
    if not hasattr(values, "__len__") or len(values) != len(prompts):
        raise ValueError(f"{source} returned {values!r:.80}, and not {len(prompts)} scores")
    for value, prompt in zip(values, prompts):
        is_number = hasattr(value, "__float__") and abs(float(value)) < 1e38  # float32 holds it
        if value is not None and not is_number:
            raise ValueError(f"{source} gave a completion of {prompt.text!r} the score {value!r}")
    return torch.from_numpy(np.array(values, dtype=float))


def call_reward(function, batch: Batch, share: slice) -> dict[str, list]:
    """Call a reward function as TRL does, by keywords. Returns its lists of scores, by name."""
    rows = [prompt.row for prompt in batch.prompts[share]]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    completions = list(map(as_message, prompts, batch.completions[share]))
    scores = function(
        prompts=prompts, completions=completions, completion_ids=batch.token_ids[share], **columns
    )
    if not isinstance(scores, dict):
        return {"": scores}
    if not scores or "reward_model" in scores:
        raise ValueError("--reward: its dict must have parts, and none may be named reward_model")
    return scores


def load_reward_model(args: Args, tokenizer):
    """A classifier with one label, as a scorer. It reads token ids, the EOS included."""
    path = args.reward_model_path
    its_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    same_vocabulary = its_tokenizer.get_vocab() == tokenizer.get_vocab()
    auto_class = transformers.AutoModelForSequenceClassification
    model = load_model("--reward-model-path", path, args.dtype, auto_class, num_labels=1)
    head = model.score  # of the last token; a model that scores its first token has no `score`
    eos = its_tokenizer.eos_token_id

    @torch.no_grad()
    def reward_model(batch: Batch, share: slice) -> dict[str, list]:
        rows = []
        for i in range(len(batch.prompts))[share]:
            row, _, tokens = batch.prompts[i]
            tokens = tokens + batch.token_ids[i]
            if not same_vocabulary:  # It reads the text, and its own EOS where the episode ended.
                text = row["prompt"] + as_message(row["prompt"], batch.completions[i])
                _, tokens = tokenize(its_tokenizer, row | {"prompt": text})
                if batch.ended[i] and eos not in (None, tokens[-1]):
                    tokens = tokens + [eos]
            rows.append(tokens)
        scores = []
        size = args.per_device_train_batch_size
        for first in range(0, len(rows), size):
            tokens, mask = pad_left(rows[first : first + size], accelerator.device)
            hidden = run_tokens(model.base_model, tokens, mask)[:, -1]  # padding is on the left
            scores += head(hidden).float().squeeze(-1).tolist()
        return {"reward_model": scores}

    return reward_model


# ==================== 7  random numbers, and the work of each process ====================
# What a random number is for. All keys of one purpose have one length: (1, 2) would be (1, 2, 0).
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
        stream += keyed_rng(seed, PROMPT_ORDER, epoch).permutation(num_prompts).tolist()
    return stream[first % num_prompts :][:count]


def draw_mini_batches(args: Args, iteration: int, ppo_epoch: int, num_episodes: int) -> tuple:
    """The mini-batches of one PPO epoch: the groups in a new order, cut into near-equal pieces.

    For example, k = 2 and two groups, with the episodes 0 1 and 2 3. In the order 1, 0 they are
    2 3 0 1, and two mini-batches are (2 3) and (0 1).
    """
    num_groups = num_episodes // args.k
    order = keyed_rng(args.seed, MINI_BATCHES, iteration, ppo_epoch).permutation(num_groups)
    episodes = torch.from_numpy(order)[:, None] * args.k + torch.arange(args.k)  # [groups, k]
    return episodes.flatten().tensor_split(min(args.num_mini_batches, num_episodes))


@torch.no_grad()
def run_passes(one_pass, lengths, size: int):
    """What one_pass(episodes) gives for all episodes. lengths, size: as in `micro_batches`"""
    episodes = torch.arange(len(lengths))
    passes = []
    for micro_batch in micro_batches(episodes, lengths, size):
        passes.append((micro_batch, one_pass(micro_batch.episodes)))
    results = gather_rows(passes, episodes)
    recursively_apply(refuse_nan, results)
    return results


def refuse_nan(tensor: Tensor):
    """Stop at what a model could not compute. In a reward, nan would mean: there is no score."""
    if tensor.isnan().any():
        raise RuntimeError("a model gives nan; are its weights whole, and the learning rate low?")


@torch.no_grad()
def gather_rows(passes: list, episodes: Tensor):
    """What the passes of all processes computed: a row for each of `episodes`, in this order.

    passes: for each pass of this process its micro-batch, and a tensor, or a tuple or dict of them
    """
    rows = [(micro_batch[:2], tensors) for micro_batch, tensors in passes]
    (passed, is_real), tensors = accelerator.gather(concatenate(rows))
    real = is_real.nonzero().flatten()
    row_of = passed.new_zeros(int(passed.max()) + 1)  # of an episode, among the rows of all passes
    row_of[passed[real]] = real
    return select_rows(tensors, row_of[episodes])


def select_rows(tensors, rows):
    """Some rows of a tensor, or of each tensor in a tuple or dict. None stays None."""
    return recursively_apply(lambda tensor: tensor[rows], tensors)


def run_pass(model, function, batch: Batch, episodes: Tensor):
    """One pass: function(model, prompts, tokens, mask) of some episodes, [episodes, response].

    Of the batch it reads prompts, token_ids, tokens and mask. The columns after the longest
    completion are left out of the pass, and are 0 in what it returns.
    """
    chosen = episodes.tolist()
    # At least two columns: with one, `completion_outputs` would skip its second pass, and the other
    # processes of a sharded model would wait for it forever.
    longest = max(2, *(len(batch.token_ids[i]) for i in chosen))
    prompts = [batch.prompts[i].token_ids for i in chosen]
    tokens = batch.tokens[episodes, :longest]
    mask = batch.mask[episodes, :longest]
    outputs = run_inside(model, function, prompts=prompts, tokens=tokens, mask=mask)
    left_out = batch.tokens.shape[1] - tokens.shape[1]
    return recursively_apply(lambda x: torch.nn.functional.pad(x, (0, left_out)), outputs)


@contextlib.contextmanager
def exchange_gradients(policy, now: bool):
    """In the backward pass inside, the processes add up their gradients if `now` is True."""
    # DeepSpeed asks for this, and also takes its step then. It has no public setter.
    accelerator.gradient_state._set_sync_gradients(now)
    with contextlib.nullcontext() if now else accelerator.no_sync(policy):
        yield


def pad_left(sequences: list[list[int]], device):
    """Token lists -> tokens, padded with 0 on the left, and their mask, both [rows, longest]."""
    rows = [torch.tensor(sequence) for sequence in sequences]
    tokens = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=-1, padding_side="left"
    ).to(device)
    return tokens.clamp(min=0), (tokens >= 0).long()


def trim_rows(tensor: Tensor, lengths: Tensor) -> list[list]:
    """A tensor [episodes, tokens] as lists without padding."""
    return [row[:length] for row, length in zip(tensor.tolist(), lengths.tolist())]


# ============================== 8  loading and running models ==============================
class CompletionModel(torch.nn.Module):
    """A causal language model with what it needs to sample completions and to compute them."""

    def __init__(self, language_model, tokenizer, eos_ids: list[int], args: Args):
        super().__init__()
        self.language_model = language_model
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.temperature = args.temperature  # of the passes that compute log-probabilities
        # With gradient checkpointing there is no KV cache, which holds the shared prompts.
        can_share = language_model.can_share_prompts and not args.gradient_checkpointing
        self.shares_prompts = can_share and args.k > 1
        self.autocast = args.dtype == "bfloat16"
        # A checkpoint of LoRA holds only the adapters. The rest comes from --model-path.
        self.register_state_dict_post_hook(drop_frozen)
        self.register_load_state_dict_post_hook(expect_no_frozen)

    def forward(self, call):
        """One autocast around a whole function casts every weight only once."""
        device_type = self.language_model.device.type
        with torch.autocast(device_type, torch.bfloat16, enabled=self.autocast):
            return call(self)


def drop_frozen(model, state_dict: dict, prefix: str, _):
    for name, weight in model.named_parameters(remove_duplicate=False):
        if not weight.requires_grad:
            state_dict.pop(prefix + name, None)


def expect_no_frozen(model, keys):
    names = [name.removeprefix("module.") for name in keys.missing_keys]
    keys.missing_keys[:] = [name for name in names if model.get_parameter(name).requires_grad]


def run_inside(model, function, **inputs):
    """function(model, **inputs), called by the model's own forward.

    DDP, FSDP2 and DeepSpeed see a model only through its forward, so all passes go through it.
    They walk through lists that a forward gets. Inputs inside of a `partial` they leave alone.
    """
    return model(partial(function, **inputs))


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
                layer.keys = append_token(layer.keys, keys)
                layer.values = append_token(layer.values, values)
                return layer.keys, layer.values
        return super().update(keys, values, layer_idx, *args, **kwargs)


def append_token(old, new):
    """`new` [rows, heads, 1, size] after `old` [rows, heads, tokens, size], with room for more."""
    rows, heads, count, size = old.shape
    if old.stride(1) == count * size:  # The memory is full.
        old = torch.nn.functional.pad(old, (0, 0, 0, 8 + count // 4))
    # The beginning of a larger tensor, into which the next token is written.
    longer = old.as_strided((rows, heads, count + 1, size), old.stride())
    longer[:, :, count:] = new
    return longer


def run_tokens(network, tokens, mask, cache=None, **settings) -> Tensor:
    """Run `tokens` [rows, new], which follow what is in the KV cache; mask: [rows, all].

    Returns the logits of a language model, or the last hidden states of a trunk, a model without
    its head. Positions are counted from the mask, so padding on the left does not shift them.
    """
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    outputs = network(
        tokens,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
        **settings,
    )
    return outputs[0]


def run_prompts(network, prompts: list[list[int]], **settings):
    """Run the prompts; equal neighbours, as in a group, are run once and then repeated.

    prompts: token lists, one per episode. Returns what `run_tokens` gives for the last token of
    each prompt [episodes, 1, ...], the KV cache, and its mask [episodes, longest prompt].
    """
    different = []
    rows = []  # for each episode, the row of its prompt
    for prompt, equal in itertools.groupby(prompts):
        rows += [len(different) for _ in equal]
        different.append(prompt)
    tokens, mask = pad_left(different, network.device)
    rows = torch.tensor(rows, device=mask.device)
    cache = KVCache(config=network.config)
    outputs = run_tokens(network, tokens, mask, cache, **settings)[:, -1:]
    cache.reorder_cache(rows)
    return outputs.index_select(0, rows), cache, mask.index_select(0, rows)


def completion_outputs(network, shares_prompts: bool, prompts, tokens, mask) -> Tensor:
    """What `run_tokens` gives at the position before each completion token, [episodes, tokens, ..].

    With shared prompts, a prompt is run once for all its completions, which go on from its KV
    cache, with gradient. Otherwise each row holds a prompt and its completion.
    """
    inputs = tokens[:, :-1]  # Nothing follows the last token, so it is not read.
    row_mask = mask[:, :-1]
    if not shares_prompts:
        prompt_tokens, prompt_mask = pad_left(prompts, tokens.device)
        inputs = torch.cat([prompt_tokens, inputs], dim=1)
        row_mask = torch.cat([prompt_mask, row_mask], dim=1)
        return run_tokens(network, inputs, row_mask)[:, -tokens.shape[1] :]
    outputs, cache, prompt_mask = run_prompts(network, prompts)
    if tokens.shape[1] == 1:
        return outputs
    row_mask = torch.cat([prompt_mask, row_mask], dim=1)
    return torch.cat([outputs, run_tokens(network, inputs, row_mask, cache)], dim=1)


LOGITS_AT_ONCE = 2**25  # in a training pass; 128 MiB of float32


def in_pieces(model, function, hidden, tokens):
    """function(hidden, tokens), in pieces if there are many logits, which gradients compute again.

    It gets [piece, hidden size] and [piece], and gives a row for each token, or a tuple of such.
    """
    head = model.language_model.get_output_embeddings()
    count = ceil(tokens.numel() * head.out_features / LOGITS_AT_ONCE)
    if hasattr(head.weight, "ds_id"):
        # ZeRO-3 gathers the head at every call, so all processes must make as many calls.
        count = max(gather_object([count]))
    if count > 1:
        function = partial(checkpoint, function, use_reentrant=False)
    pieces = zip(hidden.flatten(0, 1).tensor_split(count), tokens.flatten().tensor_split(count))
    results = concatenate([function(*piece) for piece in pieces])
    return recursively_apply(lambda rows: rows.unflatten(0, tokens.shape), results)


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
    if wrong:  # They would be random.
        raise ValueError(f"{name}: weights missing or of another shape: {sorted(wrong)}")
    # Gradient checkpointing works only in train mode. Without dropout nothing there is random.
    model = model.to(accelerator.device).train()
    model.can_share_prompts = check_model(name, model)
    return model


def check_model(name: str, model) -> bool:
    """Refuse a model that needs more than masks and positions. May its prompts be shared?"""
    trunk = model.get_decoder()
    has_logits = model.get_output_embeddings() is not None  # for each token
    network = model if has_logits else trunk
    tokens = torch.arange(10, device=accelerator.device).view(2, 5)
    mask = tokens >= 0
    prompts = [[1, 2], [3, 4, 5, 6]]
    # The first of two short rows, alone: without padding and cache.
    alone = completion_outputs(network, False, prompts[:1], tokens[:1], mask[:1])
    for shares_prompts in (True, False):
        outputs = completion_outputs(trunk, shares_prompts, prompts, tokens, mask)
        if has_logits:
            outputs = head_logits(model, outputs)
        try:  # Some models change their cache in place, which has no gradient.
            torch.autograd.grad(outputs.sum(), model.get_input_embeddings().weight)
        except RuntimeError:
            continue
        if is_rounding(outputs[:1] - alone, model.dtype):
            if not shares_prompts:
                accelerator.print(f"{name} needs a row for each episode")
            return shares_prompts
    raise ValueError(f"{name} gives other results in padded rows, or needs another `head_logits`")


def is_rounding(difference: Tensor, dtype: torch.dtype):
    """True if numbers that should be equal are no further apart than rounding moves them."""
    if dtype == torch.float32:
        return difference.abs().max() < 1e-3
    return difference.abs().mean() < 0.3


def load_policy(args: Args, tokenizer) -> CompletionModel:
    """The model that is trained."""
    dtype = "float32" if args.lora_r is None else args.dtype
    model = load_model("--model-path", args.model_path, dtype)
    eos_ids = find_eos_ids(model, tokenizer, args.stop_token_id)
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
    return sorted({*eos_ids, tokenizer.eos_token_id, stop_token_id} - {None})


# ============================= 9  logging, samples, checkpoints =============================
JSONL_FILES = ("metrics.jsonl", "rollouts.jsonl")


def evaluate(args: Args, policy, prompts: list, scorers: list, iteration: int) -> dict:
    """The mean score of held-out prompts, and the expected best of m of --eval-k completions."""
    k = args.eval_k
    rng = keyed_rng(args.seed, EVALUATION, iteration)
    batch = generate(args, policy, prompts, k, rng, args.eval_temperature)
    scores, parts = score_episodes(batch, scorers, f"evaluation {iteration}")
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


def start_logging(args: Args, output_dir: Path, plan, state: dict) -> tqdm:
    """Write args.yaml, print the plan, start the trackers and a bar over all optimizer steps."""
    accelerator.project_configuration.logging_dir = str(output_dir)
    # tensorboard takes no None
    config = {name: value for name, value in vars(args).items() if value is not None}
    accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "tally"), config)
    if accelerator.is_main_process:
        temporary = output_dir / "args.tmp"
        temporary.write_text(yaml.safe_dump(vars(args), sort_keys=False))
        temporary.replace(output_dir / "args.yaml")
        print(yaml.safe_dump(vars(plan), sort_keys=False), end="")
    return tqdm(total=plan.steps, initial=state["step"], disable=not accelerator.is_main_process)


def append_jsonl(path: Path, rows: list[dict]):
    """The main process appends one JSON object per line."""
    if accelerator.is_main_process:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def rollout_metrics(batch: Batch, scores: Tensor, parts: dict) -> dict:
    """What the batch itself shows. Means are over its episodes or its tokens."""
    metrics = {
        "objective/scores": scores.nanmean(),
        "objective/entropy": -batch.logprobs.sum(1).mean(),  # an estimate, per episode
        "policy/entropy_avg": batch.entropies[batch.mask].mean(),  # exact, per token
        "val/num_eos_tokens": batch.ended.sum(),
        "val/num_unscored": scores.isnan().sum(),
        "response_length_mean": batch.lengths.float().mean(),
    }
    for name, part in parts.items():
        metrics[name] = part.nanmean()
    return metrics


def update_metrics(outputs: LossOutputs, mask: Tensor) -> dict:
    """What an update logs of its ratios. Both are of all episodes that took a pass."""
    units = mask[:, : outputs.logratio.shape[1]]  # a ratio for each token, or for each episode
    logratio = outputs.logratio[units]
    is_clipped = outputs.is_clipped[units]
    metrics = ratio_metrics(logratio, is_clipped)
    if metrics:
        metrics["policy/clipfrac_low_avg"] = (is_clipped & (logratio < 0)).float().mean()
        metrics["policy/clipfrac_high_avg"] = (is_clipped & (logratio > 0)).float().mean()
    return metrics


def ratio_metrics(logratio: Tensor, is_clipped: Tensor) -> dict:
    """What an update logs of its ratios, over the units that the algorithm clips; both [units]."""
    if len(logratio) == 0:
        return {}
    ratio = logratio.exp()
    return {
        "policy/approxkl_avg": 0.5 * logratio.square().mean(),
        "policy/clipfrac_avg": is_clipped.float().mean(),
        "val/ratio": ratio.mean(),
        "val/ratio_var": ratio.var(correction=0),
    }


def mean_metrics(rows: list[dict]) -> dict:
    """The mean of each metric over the rows that have it."""
    means = {}
    for name in dict.fromkeys(itertools.chain(*rows)):
        means[name] = float(np.mean([float(row[name]) for row in rows if name in row]))
    return means


def write_metrics(output_dir: Path, metrics: dict, state: dict, progress: tqdm):
    """Hand an iteration's metrics to the trackers, metrics.jsonl and the progress bar."""
    metrics = recursively_apply(Tensor.item, metrics)
    # The mean of no episodes is nan, and a ratio can be inf. JSON knows neither.
    metrics = {name: value for name, value in metrics.items() if isfinite(value)}
    accelerator.log(metrics, step=metrics["episode"])
    append_jsonl(output_dir / "metrics.jsonl", [metrics])
    state["first"] = metrics | state["first"]
    state["last"] |= metrics
    progress.set_postfix(score=metrics.get("objective/scores"))


def write_rollouts(args: Args, output_dir, plan, metrics: dict, batch: Batch, tensors: dict):
    """Append all episodes to rollouts.jsonl where asked, and now and then show a few of them.

    tensors: [episodes] or [episodes, response], by name; None is null
    """
    iteration = metrics["iteration"]
    columns = {"iteration": itertools.repeat(iteration), "index": itertools.count()}
    columns |= {"prompt": [prompt.text for prompt in batch.prompts]}
    columns |= {"completion": batch.completions, "token_ids": batch.token_ids}
    for name, tensor in tensors.items():
        if tensor is None:
            columns[name] = itertools.repeat(None)
        elif tensor.dim() == 2:
            columns[name] = trim_rows(tensor, batch.lengths)
        else:
            columns[name] = np.where(tensor.isnan().cpu(), None, tensor.cpu()).tolist()
    rows = [dict(zip(columns, entries)) for entries in zip(*columns.values())]
    if args.save_rollouts:
        append_jsonl(output_dir / "rollouts.jsonl", rows)
    # This is true --num-sample-generations times in a run, at equal distances.
    wanted = args.num_sample_generations
    if not accelerator.is_main_process or iteration * wanted % plan.iterations >= wanted:
        return
    names = ["prompt", "completion", "score", *(x for x in columns if x.startswith("reward/"))]
    samples = [[row[name] for name in names] for row in rows[:: args.k][:4]]  # of four groups
    for sample in samples:
        tqdm.write(f"episode {metrics['episode']}: {dict(zip(names, sample))}")
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table("samples", columns=names, data=samples, step=metrics["episode"])


def save_checkpoint(state: dict, output_dir: Path):
    """Write weights, optimizer and state. The folder gets its name when it is whole."""
    checkpoints = output_dir / "checkpoints"
    unfinished = checkpoints / "unfinished"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    files = map(output_dir.joinpath, JSONL_FILES)
    state["jsonl_sizes"] = {file.name: file.stat().st_size for file in files if file.exists()}
    (unfinished / "state.json").write_text(json.dumps(state))
    unfinished.rename(checkpoints / f"iteration_{state['iteration']:08d}")
    for old in sorted(checkpoints.glob("iteration_*"))[:-2]:  # The newest two are kept.
        shutil.rmtree(old.rename(unfinished))


def load_state(output_dir: Path) -> dict:
    """What one iteration hands to the next. A resumed run has it from its newest checkpoint."""
    state = {"iteration": 0, "step": 0, "first": {}, "last": {}, "jsonl_sizes": {}}
    for file in sorted(output_dir.glob("checkpoints/iteration_*/state.json"))[-1:]:
        accelerator.print(f"--resume from {file.parent}; remove it if it is damaged")
        state |= json.loads(file.read_text())
        accelerator.load_state(str(file.parent))
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        # This raises where another process holds the lock. A killed process gives it back.
        accelerator.lock = filelock.FileLock(output_dir / ".lock", blocking=False).acquire()
        shutil.rmtree(output_dir / "checkpoints" / "unfinished", ignore_errors=True)
        for file in map(output_dir.joinpath, JSONL_FILES):
            if file.exists():  # What was written after the checkpoint is cut off.
                size = state["jsonl_sizes"].get(file.name, 0)
                os.truncate(file, min(size, file.stat().st_size))
    return state


def finish(policy, output_dir: Path, plan: SimpleNamespace, state: dict):
    """Write policy and tokenizer, give the folder its name when it is whole, and sum the run up."""
    summary = f"{plan.episodes:,} episodes, {plan.steps:,} steps, {plan.epochs:g} epochs"
    for name in ("eval/scores", "objective/scores"):
        if name in state["last"]:
            summary += f"; {name} {state['first'][name]:.3f} -> {state['last'][name]:.3f}"
    state_dict = accelerator.get_state_dict(policy)
    if accelerator.is_main_process and plan.steps > 0:
        weights = {
            name.removeprefix("language_model."): weight
            for name, weight in state_dict.items()
            if name.startswith("language_model.")
        }
        model = accelerator.unwrap_model(policy)
        folder = output_dir / "model.tmp"
        model.language_model.save_pretrained(folder, state_dict=weights)
        model.tokenizer.save_pretrained(folder)
        summary += f"; model in {folder.rename(output_dir / 'model')}"
    accelerator.print(summary)
    accelerator.wait_for_everyone()  # Another process may still be reading a checkpoint.
    for folder in output_dir.glob("checkpoints/iteration_*"):
        shutil.rmtree(folder, ignore_errors=True)  # The processes do this together.


# ===================================== 10  sharded models =====================================
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
        yield


# ======================================== 11  checks ========================================
# --learning-rate of the built-in policy, of any other, and of LoRA adapters.
RATES = {"built-in": 1e-4, "other": 1e-6, "LoRA": 1e-5}

# Flags that may change when a run is resumed. They change memory, or what is shown and kept.
FREE_FLAGS = (
    "output_dir resume save_every plan gradient_checkpointing log_with eval_dataset eval_every "
    "eval_temperature eval_k eval_reward per_device_train_batch_size per_device_rollout_batch_size "
    "num_sample_generations save_rollouts"
).split()

# Numbers outside of 0 < number < inf that a flag of any of the three scripts may be.
MAY_BE_0 = (
    "seed warmup_steps num_sample_generations stop_token_id learning_rate weight_decay kl_coef "
    "cliprange cliprange_high cliprange_value eval_temperature missing_eos_penalty vf_coef gamma "
    "lam total_episodes"
)
MAY_BE = dict.fromkeys(MAY_BE_0.split(), 0) | {"max_grad_norm": inf}


def check_flags(args: Args):
    """Fill in defaults. Refuse flags that are out of range or contradict each other."""
    if args.dtype is None:
        launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
        args.dtype = "bfloat16" if launcher == "bf16" else "float32"
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
        if type(value) in (int, float) and not 0 < value < inf and value != MAY_BE.get(name):
            raise ValueError(f"--{name.replace('_', '-')} {value} is out of range")
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
        "--warmup-steps needs --lr-scheduler-type constant_with_warmup": (
            args.warmup_steps > 0 and args.lr_scheduler_type == "constant"
        ),
        "--resume needs the --output-dir of the run": args.resume and args.output_dir is None,
        f"--log-with: {args.log_with} is not an installed tracker": args.log_with not in trackers,
    }
    for message, is_true in faults.items():
        if is_true:
            raise ValueError(message)


def check_sizes(args: Args, prompts: list[Prompt]):
    """Refuse a model that has too few positions, or another vocabulary than the policy."""
    # The last token is no input.
    needed = max(len(prompt.token_ids) for prompt in prompts) + args.response_length - 1
    sizes = set()  # of vocabularies
    for flag in ("model_path", "ref_model_path", "value_model_path"):
        path = getattr(args, flag, None) or args.model_path
        config = transformers.AutoConfig.from_pretrained(path).get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or inf
        sizes.add(config.vocab_size)
        if positions < needed or len(sizes) > 1 or (args.stop_token_id or 0) >= config.vocab_size:
            raise ValueError(
                f"--{flag.replace('_', '-')} {path} must have {needed} positions, for the longest"
                f" prompt with its response (it has {positions}), the policy's vocabulary, and the"
                " --stop-token-id"
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
        raise RuntimeError("fewer processes than launched; use ACCELERATE_USE_CPU=true torchrun")
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


def open_output_dir(args: Args, prompts: list[Prompt]) -> Path:
    """The folder of the run, the same on all processes. If the run is finished, stop here.

    Only --resume may use a folder that holds a run, and no flag or row may make it another run.
    """
    rows = repr([prompt.row for prompt in prompts]).encode()
    # This is kept and compared as a flag is.
    args.dataset_rows = f"{len(prompts)}, SHA-256 {hashlib.sha256(rows).hexdigest()[:12]}"
    name = f"runs/{Path(__file__).stem}__{args.seed}__{int(time.time())}__{os.getpid()}"
    # The clocks of two processes may differ.
    output_dir = Path(gather_object([args.output_dir or name])[0])
    chosen = f"--learning-rate {args.learning_rate:g}, --response-length {args.response_length}"
    processes = f"{accelerator.num_processes} x {accelerator.device.type}, {args.dtype}, {chosen}"
    accelerator.print(f"{processes}; writing to {output_dir}")
    names = (*JSONL_FILES, "checkpoints", "model")
    if any((output_dir / name).exists() for name in names):
        if not args.resume:
            raise ValueError(f"--output-dir {output_dir} holds a run; --resume continues it")
        theirs = yaml.safe_load((output_dir / "args.yaml").read_text())
        for name, its in (vars(Args()) | theirs).items():  # An older script had fewer flags.
            mine = getattr(args, name, None)
            if name not in FREE_FLAGS and its != mine:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} {mine}: the run in {output_dir} has {its}")
    if (output_dir / "model").exists():
        accelerator.print(f"nothing to do: the run in {output_dir} is finished")
        accelerator.end_training()
        sys.exit()
    return output_dir


def compare_with_sampler(args: Args, logprobs, sampler_logprobs) -> dict:
    """How far the first training pass of an iteration is from the sampler, at most, for any token.

    The weights are the same. Where more than rounding differs, the gradients would be wrong.
    """
    is_token = logprobs + sampler_logprobs != 0  # Both are 0 after the end of a completion.
    difference = (logprobs - sampler_logprobs)[is_token].abs()  # [tokens]
    if len(difference) == 0:
        return {}
    largest = difference.max()
    if not is_rounding(difference, getattr(torch, args.dtype)):
        raise RuntimeError(f"sampling and training give log-probabilities {largest:.2g} apart")
    return {"val/sampling_logprob_difference": largest}


transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# A checkpoint of tied weights holds them once. accelerate would warn about it every time.
logging.getLogger("accelerate.utils.other").setLevel("ERROR")

if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
