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
group add up to 0. Its gradient is not 0: the mean of -A_i * mean_t grad log p_new(y_it).

The words: an iteration samples one batch of episodes and trains on it. A mini-batch holds the
episodes of one optimizer step, on all processes together. A micro-batch holds the episodes of one
forward and backward pass on one process. A PPO epoch is one pass over the batch.

How to run it:
    python grpo.py                         # trains the small built-in policy on two-digit sums
    python grpo.py --plan 8                # prints all counts of a run on 8 processes, and stops
    accelerate launch grpo.py              # with GPUs, on all of them
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 grpo.py    # two processes without GPUs

How to read it: first comes the lecture, sections 1 to 5. It explains the algorithm and the loop.
Then comes the machinery, sections 6 to 11. You can skip it on a first reading.

    what you look for              where it is             how to change it
    the reward                     main, stage 4b          --reward FILE.py:FUNCTION
    a length penalty               main, stage 4b          subtract it from `scores`
    an inference engine            `generate`              see there
    every count of a run           `batch_arithmetic`
    every random number            `keyed_rng`             change the key that it is made from
    the baseline                   `grpo_advantages`       return other advantages
    the loss                       `grpo_loss`             return other losses
    an entropy bonus               `token_logprobs`        return entropies too; skip no episode

How it differs: rloo.py has another baseline, one ratio for a whole completion, and the KL in the
reward. ppo.py trains a value model, and samples one completion for each prompt.

Papers: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; DAPO, arXiv
2503.14476; GSPO, arXiv 2507.18071; CISPO, arXiv 2506.13585.
"""

import contextlib
import importlib
import itertools
import json
import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple

import accelerate
import numpy as np
import torch
import transformers
import tyro
import yaml
from accelerate.utils import concatenate, gather_object, recursively_apply
from rich.console import Console
from rich.table import Table
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
    seed: int = 1  # every random number depends only on this and on its purpose
    output_dir: str | None = None  # folder of the run; None: runs/<script>__<seed>__<unix time>
    resume: bool = False  # continue from the newest checkpoint in --output-dir, if there is one
    save_every: int | None = None  # iterations between checkpoints; None: no checkpoints
    plan: int | None = None  # print every count for this many processes and exit; loads no model
    dtype: Literal["float32", "bfloat16"] | None = None  # of forward passes; None: the launcher's
    # model and data
    model_path: str = str(DEFAULT / "policy")  # policy and tokenizer: a folder or a Hub name
    lora_r: int | None = None  # rank of LoRA adapters (arXiv 2106.09685); None: train all weights
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
    total_episodes: int | None = None  # train on this many episodes; overrides --num-train-epochs
    batch_size: int = 64  # episodes of one iteration, on all processes together
    num_mini_batches: int = 1  # optimizer steps in one pass over the batch
    num_ppo_epochs: int = 1  # passes over the batch of each iteration
    per_device_train_batch_size: int = 64  # episodes in one forward pass; fewer save memory
    per_device_rollout_batch_size: int | None = None  # episodes sampled at once; None: no limit
    # sampling
    response_length: int = 8  # maximum number of tokens in a completion, its EOS included
    temperature: float = 1.0  # divides the logits, in sampling and in every log-probability
    stop_token_id: int | None = None  # this token ends a completion as an EOS does
    # algorithm
    num_generations: Annotated[int, tyro.conf.arg(aliases=["--rloo-k"])] = 4
    """completions of each prompt; each is compared with their mean"""
    k = property(lambda self: self.num_generations)  # the same in all scripts
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
    mask_truncated_completions: bool = False  # leave out completions without EOS (DAPO, 3.4)
    cliprange: float = 0.2  # clips the ratio to 1 - this .. 1 + this (arXiv 1707.06347, eq. 7)
    missing_eos_penalty: float = 0.0
    """subtracted from the score of a completion without EOS (arXiv 2403.17031, detail 23)"""
    updates_per_batch = property(lambda self: self.num_ppo_epochs * self.num_mini_batches)
    # optimizer
    lr_scheduler_type: Schedule = "linear"  # over all optimizer steps, as in transformers
    learning_rate: float = 1e-4  # highest learning rate of AdamW
    weight_decay: float = 0.0  # weight decay of AdamW, on all parameters
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    max_grad_norm: float = 1.0  # the gradient's norm is clipped to this; inf: no clipping
    # logging
    log_with: str | None = None  # a tracker beside metrics.jsonl: wandb, tensorboard, ...
    num_sample_generations: int = 10  # number of times in a run that samples are shown and written
    save_rollouts: bool = False  # write every episode to rollouts.jsonl

    def __post_init__(self):
        fill_in_defaults(self)
        check_flags(self)


# ===================================== 2  the arithmetic =====================================
def batch_arithmetic(args: Args, num_prompts: int, world_size: int) -> SimpleNamespace:
    """Every planned count of a run. `--plan` prints them.

    num_prompts: prompts in the dataset; world_size: processes
    """
    plan = SimpleNamespace()
    if args.total_episodes is None:
        plan.prompts = max(1, math.floor(args.num_train_epochs * num_prompts + 0.5))
    else:
        plan.prompts = math.ceil(args.total_episodes / args.k)
    plan.episodes = plan.prompts * args.k
    # Both divisions are exact: `check_flags` refuses other batch sizes.
    plan.prompts_per_iteration = args.batch_size // args.k
    plan.mini_batch_size = args.batch_size // args.num_mini_batches
    plan.iterations = math.ceil(plan.episodes / args.batch_size)
    plan.last_batch_size = plan.episodes - (plan.iterations - 1) * args.batch_size
    # The last batch may be smaller. Each of its mini-batches has at least one episode.
    last_mini_batches = min(args.num_mini_batches, plan.last_batch_size)
    mini_batches = (plan.iterations - 1) * args.num_mini_batches + last_mini_batches
    plan.steps = args.num_ppo_epochs * mini_batches
    plan.epochs = plan.prompts / num_prompts
    # An upper bound: episodes without a gradient are skipped.
    process_share = math.ceil(plan.mini_batch_size / world_size)
    plan.gradient_accumulation_steps = math.ceil(process_share / args.per_device_train_batch_size)
    return plan


# ===================================== 3  the algorithm =====================================
@dataclass
class Batch:
    """The episodes of one iteration. Every process holds all of them.

    The k episodes of a group are neighbours. The axis `response` has --response-length entries.
    Entries after the end of a completion are 0.
    """

    prompts: list["Prompt"]  # [episodes], each with row, text and token_ids
    completions: list[str]  # [episodes], as text, without special tokens
    token_ids: list[list[int]]  # [episodes], lists of tokens, the EOS included
    tokens: torch.Tensor  # [episodes, response], token_ids as a tensor
    mask: torch.Tensor  # [episodes, response], True where a token belongs to the completion
    lengths: torch.Tensor  # [episodes], tokens of the completion, the EOS included
    ended: torch.Tensor  # [episodes], True where the completion has an EOS or the stop token
    logprobs: torch.Tensor  # [episodes, response], of each token, by the policy that sampled it
    entropies: torch.Tensor  # [episodes, response], exact entropy of each token's distribution
    pass_lengths: torch.Tensor  # [episodes], prompt and longest completion of the group, in tokens


@dataclass
class LossInputs:
    """What the loss reads besides the new log-probabilities."""

    old_logprobs: torch.Tensor  # [episodes, response]
    advantages: torch.Tensor  # [episodes]
    weights: torch.Tensor  # [episodes], a factor of the losses of all tokens of an episode
    mask: torch.Tensor  # [episodes, response], True for tokens of the completion
    ref_logprobs: torch.Tensor | None  # [episodes, response]

    def select(self, episodes: torch.Tensor) -> "LossInputs":
        """The inputs of some episodes, by their indices."""
        rows = {name: x if x is None else x[episodes] for name, x in vars(self).items()}
        return LossInputs(**rows)


class LossTerms(NamedTuple):
    """What the loss returns. `losses` is minimized. The rest is only logged."""

    losses: torch.Tensor  # [episodes], each already multiplied by its weight
    logratio: torch.Tensor  # [episodes, response], or [episodes, 1] with one ratio for a completion
    is_clipped: torch.Tensor  # shape of logratio, True where the clipped term is the larger one


def grpo_advantages(scores, k: int, scale_rewards: str):
    """A_i = (score - mean) / (standard deviation + 1e-4) in a group (arXiv 2402.03300, 4.1.2).

    scores: [episodes], the k episodes of a group side by side. Returns the advantages [episodes],
    and for each group [groups] whether its scores are all equal. If they are, the advantages are 0.
    An episode without a score has the score nan: no mean counts it, and its advantage is 0.
    """
    groups = scores.view(-1, k)  # [groups, k]
    no_score = groups.isnan()
    advantages = groups - groups.nanmean(1, keepdim=True)  # [groups, k]
    if scale_rewards == "group":
        others = (~no_score).sum(1, keepdim=True) - 1  # [groups, 1]
        variance = advantages.square().nansum(1, keepdim=True) / others
        advantages = advantages / (variance.sqrt() + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (scores[~scores.isnan()].std() + 1e-4)
    # Rounding may move the mean of equal scores off their value. Their advantages must be 0.
    all_equal = equal_groups(groups)  # [groups, 1]
    return advantages.masked_fill(all_equal | no_score, 0.0).flatten(), all_equal.squeeze(1)


def token_weights(args: Args, lengths, included):
    """What the losses of an episode's tokens are multiplied by: 1 / denominator, by --loss-type.

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


def grpo_loss(args: Args, logprobs, given: LossInputs) -> LossTerms:
    """The weighted loss of each episode. logprobs: [episodes, response], with gradient."""
    logratio = logprobs - given.old_logprobs  # [episodes, response]
    if args.importance_sampling_level == "sequence":  # the mean over the tokens, [episodes, 1]
        logratio = logratio.sum(1, keepdim=True) / given.mask.sum(1, keepdim=True)
    advantages = given.advantages[:, None]  # [episodes, 1]
    low = high = args.cliprange
    if args.cliprange_high is not None:
        high = args.cliprange_high
    losses, is_clipped = clipped_policy_loss(logratio, advantages, low, high)
    if args.loss_type == "cispo":
        # The clipped ratio is a constant here. So a clipped token keeps its gradient.
        ratio = logratio.detach().exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        losses = -advantages * clipped * logprobs
        is_clipped = clipped != ratio
    if given.ref_logprobs is not None:
        losses = losses + args.kl_coef * k3_kl(logprobs, given.ref_logprobs)
    losses = (losses * given.mask).sum(1) * given.weights
    return LossTerms(losses, logratio, is_clipped)


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
    # A ratio that is clipped must not be inf: the backward pass would make nan of 0 * inf.
    ratio = torch.where(advantages < 0, logratio, logratio.clamp(max=80)).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


# ======================================== 4  training ========================================
def main(args: Args):
    """Set up, train, save. Each turn of the loop is one iteration, in the stages 4a to 4f."""
    started = time.time()
    reward = load_reward("--reward", args.reward)
    eval_reward = load_reward("--eval-reward", args.eval_reward or args.reward)
    tokenizer = load_tokenizer(args)
    prompts = load_prompts(args.dataset, reward, tokenizer, args.max_prompt_length)
    if args.plan is not None:
        print(plan_table(args, len(prompts), world_size=args.plan), end="")
        return
    eval_prompts = load_prompts(args.eval_dataset, eval_reward, tokenizer, args.max_prompt_length)

    accelerator = start_accelerator(args)
    output_dir = choose_output_dir(args, accelerator)
    if is_finished(accelerator, output_dir):
        return
    policy = load_policy(args, tokenizer)
    check_lengths(args, policy, prompts + eval_prompts)
    reference = load_reference(args, policy, accelerator.device)  # None: there is no KL
    scorer, eval_scorer = load_scorers(args, reward, eval_reward, tokenizer, accelerator.device)

    plan = batch_arithmetic(args, len(prompts), accelerator.num_processes)
    optimizer = load_optimizer(args, policy)
    # The schedule does not go through `prepare`: accelerate would step it once for each process.
    name = args.lr_scheduler_type
    scheduler = transformers.get_scheduler(name, optimizer, args.warmup_steps, plan.steps)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    state = load_state(args, accelerator, output_dir, len(prompts))
    step = state["step"]
    scheduler.last_epoch = step  # A resumed run continues the schedule at its step.
    start_logging(args, accelerator, output_dir, state)
    progress = start_progress_bar(accelerator, plan.steps, step)
    if eval_prompts and state["iteration"] == 0:
        metrics = {"iteration": 0, "step": 0, "episode": 0, "epoch": 0.0}
        metrics |= evaluate(args, accelerator, policy, eval_prompts, eval_scorer, iteration=0)
        write_metrics(accelerator, output_dir, metrics, progress)

    for iteration in range(state["iteration"] + 1, plan.iterations + 1):
        # ---- 4a  rollout: sample k completions of each drawn prompt
        rollout_start = time.perf_counter()
        num_episodes = args.batch_size
        if iteration == plan.iterations:
            num_episodes = plan.last_batch_size
        first = (iteration - 1) * plan.prompts_per_iteration  # prompts that were drawn before
        positions = draw_prompts(args.seed, len(prompts), first, num_episodes // args.k)
        drawn = [prompts[position] for position in positions]  # [groups]
        shape = (len(drawn), args.k, args.response_length)
        uniforms = keyed_rng(args.seed, SAMPLING, iteration).random(shape)  # a number per token
        batch = generate(args, accelerator, policy, drawn, uniforms, args.temperature)

        # ---- 4b  score
        scores, parts = score_episodes(accelerator, batch, scorer, f"iteration {iteration}")
        scores = scores - args.missing_eos_penalty * ~batch.ended  # [episodes]
        ref_logprobs = None
        if reference is not None:
            ref_logprobs = run_whole_batch(args, accelerator, completion_logprobs, reference, batch)

        # ---- 4c  advantages
        advantages, all_equal = grpo_advantages(scores, args.k, args.scale_rewards)
        included = batch.ended | (not args.mask_truncated_completions)  # [episodes]
        # Without KL, an episode with advantage 0 has gradient 0, so it needs no forward pass.
        has_gradient = included & ((advantages != 0) | (reference is not None))
        weights = torch.zeros_like(advantages)  # [episodes], each mini-batch sets its own
        loss_inputs = LossInputs(batch.logprobs, advantages, weights, batch.mask, ref_logprobs)

        # ---- 4d  optimize
        train_start = time.perf_counter()
        updates = []  # the metrics of each update
        for ppo_epoch in range(args.num_ppo_epochs):
            for mini_batch in draw_mini_batches(args, iteration, ppo_epoch, num_episodes):
                optimizer.zero_grad()
                lengths = batch.lengths[mini_batch]
                loss_inputs.weights[mini_batch] = token_weights(args, lengths, included[mini_batch])
                to_train = mini_batch[has_gradient[mini_batch].cpu()]
                results = PassResults(accelerator, num_episodes)
                size = args.per_device_train_batch_size
                for micro_batch in micro_batches(accelerator, to_train, batch.pass_lengths, size):
                    with exchange_gradients(accelerator, policy, now=micro_batch.is_last):
                        logprobs = completion_logprobs(args, policy, batch, micro_batch.episodes)
                        given = loss_inputs.select(micro_batch.episodes)
                        if args.updates_per_batch == 1:
                            # p_new is p_old. Sampling and training round differently, so this
                            # makes the ratio exactly 1.
                            given.old_logprobs = logprobs.detach()
                        terms = grpo_loss(args, logprobs, given)
                        # The weights divide by the size of the whole mini-batch. So neither
                        # micro-batches nor processes change the gradient.
                        loss = (terms.losses * micro_batch.is_real).sum()
                        # DDP takes the mean of the processes' gradients. We need their sum.
                        accelerator.backward(loss * accelerator.num_processes)
                    results.add(micro_batch, (logprobs, terms))
                grad_norm = float(
                    accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                )
                new_logprobs, terms = results.gather(to_train)  # of all processes
                update = update_metrics(terms, loss_inputs.select(to_train))
                update["grad_norm"] = grad_norm
                if not updates:  # no step yet: trainer and sampler agree up to rounding
                    update |= compare_with_sampler(args, new_logprobs, batch.logprobs[to_train])
                check_gradient(grad_norm, iteration, step)
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
        metrics |= {"lr": learning_rate} | time_metrics(rollout_start, train_start, num_episodes)
        metrics |= rollout_metrics(batch, scores, parts) | mean_metrics(updates)
        if reference is not None:
            metrics["objective/kl"] = (batch.logprobs - ref_logprobs).sum(1).mean().item()
        metrics["group/zero_advantage_fraction"] = all_equal.float().mean().item()

        # ---- 4f  evaluate and save
        if eval_prompts and is_due(args.eval_every or plan.iterations, iteration, plan):
            metrics |= evaluate(args, accelerator, policy, eval_prompts, eval_scorer, iteration)
        write_metrics(accelerator, output_dir, metrics, progress)
        columns = {"advantage": advantages, "ref_logprobs": ref_logprobs}
        rows = rollout_rows(iteration, batch, scores, columns)
        write_rollouts(args, accelerator, output_dir, plan, rows, episode)
        state |= {"iteration": iteration, "step": step}
        if is_due(args.save_every, iteration, plan):
            save_checkpoint(accelerator, state, output_dir)

    progress.close()
    finish(args, accelerator, policy, output_dir, plan, started)
    # The end of the process group can hang while a model exists, so the model is freed first.
    policy, optimizer = accelerator.free_memory(policy, optimizer)
    accelerator.end_training()


# ======================================== 5  the model =======================================
def generate(args: Args, accelerator, policy, prompts, uniforms, temperature: float) -> Batch:
    """Sample k completions of every prompt. Each process samples a share, and then gets them all.

    An inference engine takes the place of `sample` here. First give it the new weights. It returns
    the same tensors. If it knows no entropies, they are 0.
    prompts: [groups]; uniforms: [groups, k, response], a random number in [0, 1) for each token
    """
    k = uniforms.shape[1]
    prompts = [prompt for prompt in prompts for _ in range(k)]  # [episodes], group by group
    uniforms = torch.from_numpy(uniforms).flatten(0, 1).to(accelerator.device)
    prompt_lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts])
    episodes = torch.arange(len(prompts))
    size = args.per_device_rollout_batch_size or len(prompts)
    model = accelerator.unwrap_model(policy)
    results = PassResults(accelerator, len(prompts))
    with sampling_weights(accelerator, policy):
        for micro_batch in micro_batches(accelerator, episodes, prompt_lengths, size):
            chosen = micro_batch.episodes
            token_ids = [prompts[i].token_ids for i in chosen.tolist()]
            inputs = dict(prompts=token_ids, uniforms=uniforms[chosen], temperature=temperature)
            # `model(function)` calls `function(model)`, see CompletionModel.forward.
            results.add(micro_batch, model(partial(sample, **inputs)))
    samples = results.gather(episodes)
    lengths = samples["lengths"]
    token_ids = trim_rows(samples["tokens"], lengths)
    # Micro-batches are sorted by pass_lengths. A group has one value, so its episodes stay
    # neighbours, and the prompt is run once in each micro-batch.
    longest = lengths.cpu().view(-1, k).amax(1).repeat_interleave(k)
    return Batch(
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
    model.eval()  # In train mode, gradient checkpointing would switch off the KV cache.
    tokens = torch.zeros(uniforms.shape, dtype=torch.long, device=uniforms.device)
    lengths = torch.zeros_like(tokens[:, 0])
    ended = torch.zeros_like(lengths, dtype=torch.bool)
    logprobs = torch.zeros(uniforms.shape, device=uniforms.device)
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
        entropies[active, t] = torch.special.entr(p).sum(-1)  # entr(p) is -p log p
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
    cumulative = p.double().cumsum(-1)
    total = cumulative[:, -1:]  # 1, up to rounding
    # right=True means strictly above. So a token of probability 0 is never picked.
    return torch.searchsorted(cumulative, uniforms[:, None] * total, right=True).squeeze(1)


def completion_logprobs(args: Args, model, batch: Batch, episodes):
    """Log-probabilities of the tokens of some episodes, [episodes, response], in one pass."""
    inputs = pass_inputs(batch, episodes)
    outputs = model(partial(pass_logprobs, **inputs, temperature=args.temperature))
    return pad_columns(outputs, args.response_length)


def pass_logprobs(model, prompts, tokens, mask, temperature: float):
    """Log-probability of every completion token, 0 where `mask` is False.

    prompts: token lists, one per episode; tokens, mask: [episodes, tokens]. Returns the same shape.
    """
    # The head makes a token's logits from the hidden state at the position before the token.
    hidden = completion_hidden(model, prompts, tokens, mask)  # [episodes, tokens, hidden size]
    logprobs = token_logprobs(model, hidden, tokens, temperature)
    return logprobs.masked_fill(~mask, 0.0)


class MicroBatch(NamedTuple):
    episodes: torch.Tensor  # [size], indices into the batch
    is_real: torch.Tensor  # [size], 1.0; or 0.0 for a repeated episode, which does not count
    is_last: bool  # True for the last micro-batch of this process


def micro_batches(accelerator, episodes, lengths, size: int) -> list[MicroBatch]:
    """This process's share of some episodes, in near-equal micro-batches of at most `size`.

    All processes make the same number of passes, so the last episode is repeated where needed:
    0 1 2 3 4 on 3 processes are 0 1 | 2 3 | 4 4, and is_real is 1 1 | 1 1 | 1 0.
    episodes: indices; lengths: [episodes of the batch]; a share is sorted by it, to save padding
    """
    count = len(episodes)
    if count == 0:  # Without a pass, gradients would be None. One that does not count makes 0s.
        episodes = torch.zeros(1, dtype=torch.long)
    share = math.ceil(len(episodes) / accelerator.num_processes)
    positions = accelerator.process_index * share + torch.arange(share)
    is_real = (positions < count).float()
    episodes = episodes[positions.clamp(max=len(episodes) - 1)]
    order = lengths[episodes].argsort(stable=True)
    pieces = math.ceil(share / size)
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


def load_tokenizer(args: Args):
    """The policy's tokenizer. --plan needs it only to drop prompts that are too long."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.plan is not None and args.max_prompt_length is None:
        return None
    return transformers.AutoTokenizer.from_pretrained(args.model_path)


def read_rows(path: str):
    """The rows of a .jsonl file or of a Hub dataset NAME:SPLIT. Names the line that is not JSON."""
    if not path.endswith(".jsonl"):
        name, _, split = path.partition(":")
        datasets = importlib.import_module("datasets")
        return datasets.load_dataset(name, split=split or "train")
    rows = []
    lines = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            message = f"{path}:{number}: not JSON ({error}); every line must be one object"
            raise ValueError(message) from None
    return rows


def load_prompts(path: str | None, reward, tokenizer, max_length: int | None) -> list[Prompt]:
    """Read, check, render and tokenize the prompts of a dataset. None: no prompts.

    Without a tokenizer they are only read and checked. Prompts over max_length tokens are dropped,
    and their number is printed. A column that only some rows have is None in the others.
    """
    if path is None:
        return []
    rows = []
    columns = {}
    for number, row in enumerate(read_rows(path), start=1):
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, (str, list)) or not prompt:
            raise ValueError(f"{path}:{number}: needs a `prompt`: text, or a list of chat messages")
        if reward is exact_match and "answer" not in row:
            message = "needs an `answer`, with which the reward exact_match compares"
            raise ValueError(f"{path}:{number}: {message}")
        columns |= dict.fromkeys(row)
        rows.append(row)
    prompts = tokenize_prompts(rows, tokenizer)
    kept = []
    for number, prompt in enumerate(prompts, start=1):
        if tokenizer is not None and not prompt.token_ids:
            raise ValueError(f"{path}:{number}: the prompt, as the model reads it, has no tokens")
        if len(prompt.token_ids) <= (max_length or math.inf):
            kept.append(prompt._replace(row=columns | prompt.row))
    if not kept:
        raise ValueError(f"{path}: no prompt has at most --max-prompt-length {max_length} tokens")
    if len(kept) < len(prompts) and os.environ.get("RANK", "0") == "0":
        dropped = len(prompts) - len(kept)
        print(f"{path}: {dropped} of {len(prompts)} prompts dropped, over --max-prompt-length")
    return kept


def tokenize_prompts(rows: list[dict], tokenizer) -> list[Prompt]:
    """Render the prompts that are chats, and tokenize them. One call for many rows is fast."""
    if tokenizer is None:
        return [Prompt(row, row["prompt"], token_ids=[]) for row in rows]
    prompts = []
    for is_chat, group in itertools.groupby(rows, lambda row: isinstance(row["prompt"], list)):
        same_kind = list(group)
        texts = [row["prompt"] for row in same_kind]
        if is_chat:
            texts = tokenizer.apply_chat_template(texts, tokenize=False, add_generation_prompt=True)
        # A chat template writes the special tokens itself.
        encoded = tokenizer(texts, add_special_tokens=not is_chat)["input_ids"]
        prompts += map(Prompt, same_kind, texts, encoded)
    return prompts


def exact_match(completions: list, answer: list, **_) -> list[float]:
    """1 where the completion, without spaces around it, is the row's `answer`, else 0."""
    scores = []
    for completion, right in zip(completions, answer):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        scores.append(float(text.strip() == str(right)))
    return scores


def load_reward(flag: str, spec: str):
    """The function that exact_match, FILE.py:FUNCTION or package.module:FUNCTION names.

    None for `none`.
    """
    if spec == "none":
        return None
    if spec == "exact_match":
        return exact_match
    path, _, function = spec.rpartition(":")
    if not path:
        choices = "exact_match, FILE.py:FUNCTION, package.module:FUNCTION or none"
        raise ValueError(f"{flag} {spec}: must be {choices}")
    if not path.endswith(".py"):
        return getattr(importlib.import_module(path), function)
    file = Path(path).resolve(strict=True)
    # The file may import its neighbours. The folder comes last, so that it hides no library.
    sys.path.append(str(file.parent))
    module = importlib.import_module(file.stem)
    if Path(getattr(module, "__file__", "")).resolve() != file:
        message = f"Python already knows another module {file.stem}, {module}; rename yours"
        raise ValueError(f"{flag} {spec}: {message}")
    return getattr(module, function)


class Scorer(NamedTuple):
    """What gives an episode its score: a function, a model, or both. Their scores are added."""

    function: object  # from load_reward, or None
    model: object  # from load_reward_model, or None


def load_scorers(args: Args, reward, eval_reward, tokenizer, device) -> tuple[Scorer, Scorer]:
    """The scorer of training, and that of evaluations, where --eval-reward replaces both parts."""
    model = load_reward_model(args, tokenizer, device)
    eval_model = model if args.eval_reward in (None, "none") else None
    return Scorer(reward, model), Scorer(eval_reward, eval_model)


def score_episodes(accelerator, batch: Batch, scorer: Scorer, where: str):
    """Score the batch: every process scores its share, and gets all.

    Returns the scores [episodes], and for every episode a dict of the parts of its score. The part
    of a function that returns a list has the name "". A part that is None is left out. An episode
    without parts has the score nan. where: the place, for an error message
    """
    count = math.ceil(len(batch.prompts) / accelerator.num_processes)
    first = count * accelerator.process_index
    share = range(len(batch.prompts))[first : first + count]
    parts = {}
    if share and scorer.function is not None:
        parts = call_reward(scorer.function, batch, share)
    if share and scorer.model is not None:
        parts["reward_model"] = scorer.model(batch, share)
    local_parts = []
    for values in zip(*parts.values(), strict=True):
        named = dict(zip(parts, values))
        local_parts.append({name: float(named[name]) for name in named if named[name] is not None})
    if len(local_parts) != len(share):
        message = f"the reward returned {len(local_parts)} scores for {len(share)} completions"
        raise ValueError(f"{where}: {message}")
    all_parts = gather_object(local_parts)
    scores = []
    for prompt, named in zip(batch.prompts, all_parts):
        score = sum(named.values())
        if not math.isfinite(score):
            raise ValueError(f"{where}: the score of a completion of {prompt.text!r} is {score}")
        if not named:
            score = math.nan
        scores.append(score)
    return torch.tensor(scores, device=accelerator.device), all_parts


def call_reward(function, batch: Batch, share: range) -> dict[str, list]:
    """Call a reward function as TRL does: by keywords, with a list for each column of the rows.

    Returns the lists of scores that are added, by name.
    """
    first = share.start
    last = share.stop
    prompts = batch.prompts[first:last]
    columns = {}
    for name in prompts[0].row:
        columns[name] = [prompt.row[name] for prompt in prompts]
    columns["prompts"] = columns.pop("prompt")
    columns["completion_ids"] = batch.token_ids[first:last]
    columns["completions"] = []
    for prompt, text in zip(prompts, batch.completions[first:last]):
        is_chat = isinstance(prompt.row["prompt"], list)
        message = [{"role": "assistant", "content": text}]
        columns["completions"].append(message if is_chat else text)
    scores = function(**columns)
    parts = dict(scores) if isinstance(scores, dict) else {"": scores}
    if "reward_model" in parts:
        raise ValueError("--reward: no part may have the name reward_model; it is the model's part")
    return parts


def load_reward_model(args: Args, tokenizer, device):
    """A classifier with one label, as a function: of a batch and a range of episodes -> scores.

    It reads token ids, the EOS included, where it has the policy's vocabulary. Otherwise it reads
    the text, and its own EOS is appended where the episode ended. None without --reward-model-path.
    """
    path = args.reward_model_path
    if path is None:
        return None
    dtype = getattr(torch, args.dtype)
    model, has_head = load_model(
        "--reward-model-path",
        path,
        transformers.AutoModelForSequenceClassification,
        dtype,
        num_labels=1,
    )
    if not has_head:
        shape = model.score.weight.shape
        scale = model.config.hidden_size**-0.5
        new = keyed_rng(args.seed, NEW_WEIGHTS, 0).normal(0, scale, shape)
        model.score.weight.data = torch.from_numpy(new).to(dtype)
        message = f"--reward-model-path {path} has no trained head; its scores are random"
        print(f"warning: {message}", file=sys.stderr)
    model = model.to(device)
    its_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    same_vocabulary = its_tokenizer.get_vocab() == tokenizer.get_vocab()

    @torch.no_grad()
    def score(batch: Batch, share: range) -> list[float]:
        rows = []
        for i in share:
            if same_vocabulary:
                rows.append(batch.prompts[i].token_ids + batch.token_ids[i])
            else:
                rows.append(retokenize(its_tokenizer, batch, i))
        scores = []
        size = args.per_device_train_batch_size
        for first in range(0, len(rows), size):
            tokens, mask = pad_left(rows[first : first + size], device)
            hidden = run_tokens(model.base_model, tokens, mask)[:, -1]  # padding is on the left
            scores += model.score(hidden).float().squeeze(-1).tolist()
        return scores

    return score


def retokenize(tokenizer, batch: Batch, i: int) -> list[int]:
    """Episode i of the batch in the tokens of another tokenizer."""
    prompt = batch.prompts[i]
    completion = batch.completions[i]
    if isinstance(prompt.row["prompt"], list):
        messages = prompt.row["prompt"] + [{"role": "assistant", "content": completion}]
        row = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    else:
        row = tokenizer(prompt.text + completion)["input_ids"]
    eos = tokenizer.eos_token_id
    if batch.ended[i] and eos is not None and row[-1:] != [eos]:
        row = row + [eos]
    return row


# ==================== 7  random numbers, and the work of each process ====================
# What a random number is for. All keys of one purpose must have the same length: NumPy makes the
# same generator of (1, 2) and (1, 2, 0).
PROMPT_ORDER = 1
SAMPLING = 2
EVALUATION = 3
MINI_BATCHES = 4
NEW_WEIGHTS = 5


def keyed_rng(seed: int, purpose: int, *key: int) -> np.random.Generator:
    """A random generator that depends on its key alone.

    It does not depend on the process, and not on what was drawn before.
    """
    return np.random.default_rng([seed, purpose, *key])


def draw_prompts(seed: int, num_prompts: int, first: int, count: int) -> list[int]:
    """The positions first .. first + count - 1 of the endless stream of epochs.

    Each epoch is a permutation of the dataset, which depends on the seed and the epoch.
    """
    last_epoch = (first + count - 1) // num_prompts
    stream = []
    for epoch in range(first // num_prompts, last_epoch + 1):
        stream += keyed_rng(seed, PROMPT_ORDER, epoch).permutation(num_prompts).tolist()
    return stream[first % num_prompts :][:count]


def draw_mini_batches(
    args: Args, iteration: int, ppo_epoch: int, num_episodes: int
) -> tuple[torch.Tensor, ...]:
    """The mini-batches of one PPO epoch: the groups in a new order, cut into near-equal pieces.

    For example, k = 2 and two groups, with the episodes 0 1 and 2 3. In the order 1, 0 they are
    2 3 0 1, and two mini-batches are (2 3) and (0 1).
    """
    num_groups = num_episodes // args.k
    order = keyed_rng(args.seed, MINI_BATCHES, iteration, ppo_epoch).permutation(num_groups)
    episodes = torch.from_numpy(order)[:, None] * args.k + torch.arange(args.k)  # [groups, k]
    return episodes.flatten().tensor_split(min(args.num_mini_batches, num_episodes))


class PassResults:
    """What the micro-batches of all processes computed: tensors with one row for each episode."""

    def __init__(self, accelerator, num_episodes: int):
        self.accelerator = accelerator
        self.num_episodes = num_episodes
        self.micro_batches = []
        self.tensors = []

    def add(self, micro_batch: MicroBatch, tensors):
        """Keep a tensor, or a tuple or dict of tensors, without gradient."""
        self.micro_batches.append(micro_batch)
        self.tensors.append(recursively_apply(torch.Tensor.detach, tensors))

    def gather(self, episodes: torch.Tensor):
        """The rows of `episodes`, in this order, on every process."""
        passed = torch.cat([micro_batch.episodes for micro_batch in self.micro_batches])
        is_real = torch.cat([micro_batch.is_real for micro_batch in self.micro_batches])
        everything = (passed, is_real, concatenate(self.tensors))
        passed, is_real, tensors = self.accelerator.gather(everything)
        is_real = is_real > 0

        def in_order(tensor):
            rows = tensor.new_zeros((self.num_episodes, *tensor.shape[1:]))
            rows[passed[is_real]] = tensor[is_real]
            return rows[episodes]

        return recursively_apply(in_order, tensors)


@contextlib.contextmanager
def exchange_gradients(accelerator, policy, now: bool):
    """In the backward pass inside, the processes add up their gradients if `now` is True.

    Once for each update is enough: in its last micro-batch. There DeepSpeed also takes its step.
    """
    accelerator.gradient_state._set_sync_gradients(now)
    with contextlib.nullcontext() if now else accelerator.no_sync(policy):
        yield


def equal_groups(groups) -> torch.Tensor:
    """True for a group whose scores are all equal. groups: [groups, k], nan where there is no score

    Returns [groups, 1].
    """
    highest = groups.nan_to_num(nan=-math.inf).amax(1, keepdim=True)
    return (groups.isnan() | (groups == highest)).all(1, keepdim=True)


def pass_inputs(batch: Batch, episodes: torch.Tensor) -> dict:
    """Prompts, tokens and mask of some episodes, without the columns after the longest one."""
    chosen = episodes.tolist()
    # At least two columns: with one, `completion_hidden` would skip its second pass, and the other
    # processes of a sharded model would wait for it forever.
    longest = max(2, *(len(batch.token_ids[i]) for i in chosen))
    return {
        "prompts": [batch.prompts[i].token_ids for i in chosen],
        "tokens": batch.tokens[episodes, :longest],
        "mask": batch.mask[episodes, :longest],
    }


def pad_columns(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Fill the last axis with zeros up to a number of columns."""
    return torch.nn.functional.pad(tensor, (0, columns - tensor.shape[-1]))


def pad_left(sequences: list[list[int]], device):
    """Token lists -> tokens, padded with 0 on the left, and their mask, both [rows, longest]."""
    longest = max(map(len, sequences))
    tokens = []
    mask = []
    for sequence in sequences:
        padding = [0] * (longest - len(sequence))
        tokens.append(padding + sequence)
        mask.append(padding + [1] * len(sequence))
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def trim_rows(tensor: torch.Tensor, lengths: torch.Tensor) -> list[list]:
    """A tensor [episodes, tokens] as lists without padding."""
    return [row[:length] for row, length in zip(tensor.tolist(), lengths.tolist())]


@torch.no_grad()
def run_whole_batch(args: Args, accelerator, one_pass, model, batch: Batch) -> torch.Tensor:
    """What one_pass(args, model, batch, episodes) gives for all episodes, [episodes, response].

    Each process runs a share, in micro-batches, and gets everything.
    """
    episodes = torch.arange(len(batch.prompts))
    size = args.per_device_train_batch_size
    results = PassResults(accelerator, len(batch.prompts))
    for micro_batch in micro_batches(accelerator, episodes, batch.pass_lengths, size):
        results.add(micro_batch, one_pass(args, model, batch, micro_batch.episodes))
    found = results.gather(episodes)
    if found.isnan().any():  # In rewards, nan would mean that there is no score.
        raise RuntimeError("a pass without gradient gave nan; are the weights of its model whole?")
    return found


# ============================== 8  loading and running models ==============================
class CompletionModel(torch.nn.Module):
    """A causal language model with what it needs to sample completions and to compute them."""

    def __init__(self, language_model, tokenizer, eos_ids: list[int], args: Args):
        super().__init__()
        self.language_model = language_model
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        # With gradient checkpointing there is no KV cache, which holds the shared prompts.
        self.shares_prompts = args.k > 1 and not args.gradient_checkpointing
        self.autocast = args.dtype == "bfloat16"

    def forward(self, function):
        """Call `function(self)`, for instance `sample` or `pass_logprobs` with their inputs.

        DDP, FSDP2 and DeepSpeed see a model only through its forward, so all passes go through it.
        They walk through lists that a forward gets. Inputs inside of a `partial` they leave alone.
        One autocast around a whole function casts every weight only once.
        """
        device_type = self.language_model.device.type
        with torch.autocast(device_type, torch.bfloat16, enabled=self.autocast):
            return function(self)


class KVCache(transformers.DynamicCache):
    """While sampling, keys and values have the type of autocast, and their memory grows by blocks.

    Otherwise they would be float32, and attention would cast all of them again for every token.
    And every token would copy the whole cache.
    """

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if torch.is_grad_enabled():
            return super().update(keys, values, layer_idx, *args, **kwargs)
        device_type = keys.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            keys = keys.to(dtype)
            values = values.to(dtype)
        layer = self.layers[layer_idx]
        # Layers of other types keep only some tokens, for instance those of a sliding window.
        is_plain = type(layer) is transformers.cache_utils.DynamicLayer
        if not is_plain or not layer.is_initialized or keys.shape[2] > 1:
            return super().update(keys, values, layer_idx, *args, **kwargs)
        layer.keys = append_token(layer.keys, keys)
        layer.values = append_token(layer.values, values)
        return layer.keys, layer.values


def append_token(old, new, block: int = 64):
    """`new` [rows, heads, 1, size] after `old` [rows, heads, tokens, size], with room for more.

    The result is the beginning of a larger tensor. The next token is written into this tensor.
    """
    count = old.shape[2]
    room = old._base  # the larger tensor, or None
    if room is None or room.shape[2] == count:
        room = torch.cat([old, old.new_empty((*old.shape[:2], block, old.shape[3]))], dim=2)
    room[:, :, count : count + 1] = new
    return room[:, :, : count + 1]


def run_tokens(network, tokens, mask, cache=None, **settings) -> torch.Tensor:
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
    if "logits" in outputs:
        return outputs.logits
    return outputs.last_hidden_state


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


def completion_hidden(model, prompts, tokens, mask) -> torch.Tensor:
    """Hidden states before each completion token, [episodes, tokens, hidden size].

    With shared prompts, a prompt is run once for all its completions, which go on from its KV
    cache, with gradient. Otherwise each row holds a prompt and its completion.
    """
    trunk = model.language_model.get_decoder()
    if not model.shares_prompts:
        rows, row_mask = join_rows(prompts, tokens, mask)
        return run_tokens(trunk, rows, row_mask)[:, -tokens.shape[1] :]
    hidden, cache, prompt_mask = run_prompts(trunk, prompts)
    if tokens.shape[1] == 1:
        return hidden
    row_mask = torch.cat([prompt_mask, mask[:, :-1]], dim=1)
    return torch.cat([hidden, run_tokens(trunk, tokens[:, :-1], row_mask, cache)], dim=1)


def join_rows(prompts, tokens, mask):
    """Prompts and completions side by side, and their mask. The last token is left out.

    The output at a position belongs to the next token.
    """
    prompt_tokens, prompt_mask = pad_left(prompts, tokens.device)
    rows = torch.cat([prompt_tokens, tokens[:, :-1]], dim=1)
    return rows, torch.cat([prompt_mask, mask[:, :-1]], dim=1)


LOGITS_AT_ONCE = 2**25  # in a training pass; 128 MiB of float32


def token_logprobs(model, hidden, tokens, temperature: float) -> torch.Tensor:
    """Log-probability of each token, from the hidden state before it.

    hidden: [episodes, tokens, hidden size]; tokens: [episodes, tokens]. Returns the same shape.
    The logits of all tokens would be the largest tensor of a run. So if there are many, they are
    computed piece by piece, and once more in the backward pass.
    """

    def logprobs_of(hidden, tokens):
        log_p = torch.log_softmax(head_logits(model, hidden) / temperature, dim=-1)
        return log_p.gather(-1, tokens[:, None]).squeeze(1)

    head = model.language_model.get_output_embeddings()
    pieces = math.ceil(tokens.numel() * head.out_features / LOGITS_AT_ONCE)
    if hasattr(head.weight, "ds_id"):
        # ZeRO-3 gathers the head at every call, so all processes must make as many calls.
        pieces = max(gather_object([pieces]))
    hidden = hidden.flatten(0, 1)
    if pieces == 1:
        return logprobs_of(hidden, tokens.flatten()).view_as(tokens)
    logprobs = []
    for piece in zip(hidden.tensor_split(pieces), tokens.flatten().tensor_split(pieces)):
        logprobs.append(checkpoint(logprobs_of, *piece, use_reentrant=False))
    return torch.cat(logprobs).view_as(tokens)


def head_logits(model, hidden) -> torch.Tensor:
    """Logits in float32. Some models scale or bound what their head gives; their config says so."""
    config = model.language_model.config
    logits = model.language_model.get_output_embeddings()(hidden).float()
    if hasattr(config, "logit_scale"):  # Cohere
        logits = logits * config.logit_scale
    if hasattr(config, "logits_scaling"):  # Granite
        logits = logits / config.logits_scaling
    bound = getattr(config, "final_logit_softcapping", None)  # Gemma
    if bound is not None:
        logits = bound * torch.tanh(logits / bound)
    return logits


def load_model(flag: str, path: str, auto_class, dtype: torch.dtype, **config_changes):
    """`from_pretrained` with all dropout off. Returns the model, and whether it has a `score` head.

    Every other weight must be in the checkpoint, in the right shape. Otherwise it would be random.
    """
    config = transformers.AutoConfig.from_pretrained(path, **config_changes)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model, info = auto_class.from_pretrained(
        path, config=config, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
    )
    missing = set(info["missing_keys"])
    has_head = "score.weight" not in missing
    mismatched = [name for name, *_ in info["mismatched_keys"]]
    for name in sorted(missing - {"score.weight"}) + sorted(mismatched):
        raise ValueError(f"{flag} {path}: {name} is missing in its weights, or has another shape")
    # Gradient checkpointing works only in train mode. Without dropout nothing there is random.
    return model.train(), has_head


def load_policy(args: Args, tokenizer) -> CompletionModel:
    """The model that is trained."""
    dtype = torch.float32 if args.lora_r is None else getattr(torch, args.dtype)
    model, _ = load_model("--model-path", args.model_path, transformers.AutoModelForCausalLM, dtype)
    eos_ids = find_eos_ids(model, tokenizer, args.stop_token_id)
    model = prepare_for_training(args, model, index=1)
    return CompletionModel(model, tokenizer, eos_ids, args)


def prepare_for_training(args: Args, model, index: int):
    """Turn on gradient checkpointing and add LoRA adapters, where the flags ask for them.

    index: the number of the model, so that each model gets its own first adapter weights
    """
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.lora_r is None:
        return model
    peft = importlib.import_module("peft")
    torch.manual_seed(int(keyed_rng(args.seed, NEW_WEIGHTS, index).integers(2**32)))
    config = peft.LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear")
    return peft.get_peft_model(model, config)


def load_reference(args: Args, policy: CompletionModel, device):
    """The frozen model of the KL, which is called like the policy. None where there is no KL.

    With LoRA it is the policy without its adapters, unless --ref-model-path names another model.
    """
    if args.kl_coef == 0 and args.ref_model_path is None:
        return None
    if args.lora_r is not None and args.ref_model_path is None:

        def policy_without_adapters(function):
            with policy.language_model.disable_adapter():
                return policy(function)

        return policy_without_adapters
    path = args.ref_model_path or args.model_path
    dtype = getattr(torch, args.dtype)
    model, _ = load_model("--ref-model-path", path, transformers.AutoModelForCausalLM, dtype)
    if model.config.vocab_size != policy.language_model.config.vocab_size:
        raise ValueError(f"--ref-model-path {path}: its vocabulary is not the policy's")
    return CompletionModel(model.to(device), policy.tokenizer, policy.eos_ids, args)


def find_eos_ids(model, tokenizer, stop_token_id: int | None) -> list[int]:
    """Every token that ends an episode: of the model, the tokenizer, and --stop-token-id."""
    found = set()
    of_model = model.config.eos_token_id
    of_generation = model.generation_config.eos_token_id
    for ids in (of_model, of_generation, tokenizer.eos_token_id, stop_token_id):
        found |= set(ids) if isinstance(ids, list) else {ids}
    return sorted(found - {None})


def load_optimizer(args: Args, policy: CompletionModel) -> torch.optim.Optimizer:
    """AdamW over all parameters that are trained."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )


# ============================= 9  logging, samples, checkpoints =============================
FORMULAS = {
    "prompts": "max(1, floor(num_train_epochs * num_prompts + 0.5)); if total_episodes is given:"
    " ceil(total_episodes / k)",
    "episodes": "prompts * k",
    "prompts_per_iteration": "batch_size / k",
    "mini_batch_size": "batch_size / num_mini_batches",
    "iterations": "ceil(episodes / batch_size)",
    "last_batch_size": "episodes - (iterations - 1) * batch_size",
    "steps": "num_ppo_epochs * ((iterations - 1) * num_mini_batches"
    " + min(num_mini_batches, last_batch_size))",
    "epochs": "prompts / num_prompts",
    "gradient_accumulation_steps": "at most"
    " ceil(ceil(mini_batch_size / world_size) / per_device_train_batch_size)",
}
JSONL_FILES = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")


def plan_table(args: Args, num_prompts: int, world_size: int) -> str:
    """The counts and their formulas as text that is also YAML: `name: value  # formula`."""
    table = ""
    for name, value in vars(batch_arithmetic(args, num_prompts, world_size)).items():
        table += f"{name}: {value}".ljust(32) + f" # {FORMULAS[name]}\n"
    return table


def evaluate(
    args: Args, accelerator, policy, prompts: list[Prompt], scorer, iteration: int
) -> dict:
    """The mean score of completions of the evaluation prompts, and of each prompt's best one.

    Completions without a score are left out, and counted.
    """
    shape = (len(prompts), args.eval_k, args.response_length)
    uniforms = keyed_rng(args.seed, EVALUATION, iteration).random(shape)
    batch = generate(args, accelerator, policy, prompts, uniforms, args.eval_temperature)
    scores, _ = score_episodes(accelerator, batch, scorer, f"evaluation {iteration}")
    best = scores.nan_to_num(nan=-math.inf).view(-1, args.eval_k).amax(1)  # [prompts]
    best_mean = best[best > -math.inf].mean().item()
    metrics = {"eval/scores": scores.nanmean().item(), "eval/best_of_k": best_mean}
    return metrics | count_unscored("eval/num_unscored", scores)


def start_logging(args: Args, accelerator, output_dir: Path, state: dict):
    """Start the trackers; write args.yaml and plan.yaml, and print the plan."""
    accelerator.project_configuration.logging_dir = str(output_dir)
    # tensorboard takes no None
    config = {name: value for name, value in vars(args).items() if value is not None}
    # A resumed run is the same run in wandb.
    wandb = {"name": output_dir.name, "id": state["run_id"], "resume": "allow"}
    accelerator.init_trackers("tally", config, init_kwargs={"wandb": wandb})
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        temporary = output_dir / "args.tmp"
        temporary.write_text(yaml.safe_dump(vars(args), sort_keys=False))
        temporary.replace(output_dir / "args.yaml")
        table = plan_table(args, state["num_prompts"], accelerator.num_processes)
        (output_dir / "plan.yaml").write_text(table)
        print(table, end="", flush=True)


def start_progress_bar(accelerator, steps: int, step: int) -> tqdm:
    """A bar over all optimizer steps, on the main process."""
    hidden = not accelerator.is_main_process
    return tqdm(total=steps, initial=step, unit="step", disable=hidden, dynamic_ncols=True)


def append_jsonl(accelerator, path: Path, rows: list[dict]):
    """The main process appends one JSON object per line."""
    if accelerator.is_main_process:
        with open(path, "a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def is_due(every: int | None, iteration: int, plan: SimpleNamespace) -> bool:
    """True every so many iterations, and at the last one. Never for None."""
    return every is not None and (iteration % every == 0 or iteration == plan.iterations)


def time_metrics(rollout_start: float, train_start: float, num_episodes: int) -> dict:
    """Seconds of the rollout and of the updates, and episodes per second of both together."""
    now = time.perf_counter()
    return {
        "time/rollout_s": train_start - rollout_start,
        "time/train_s": now - train_start,
        "eps": num_episodes / (now - rollout_start),
    }


def rollout_metrics(batch: Batch, scores: torch.Tensor, parts: list[dict]) -> dict:
    """What the batch itself shows. Means are over its episodes or its tokens."""
    metrics = {
        "objective/scores": scores.nanmean().item(),
        "objective/entropy": -batch.logprobs.sum(1).mean().item(),  # an estimate, per episode
        "policy/entropy_avg": batch.entropies[batch.mask].mean().item(),  # exact, per token
        "val/num_eos_tokens": int(batch.ended.sum()),
        "response_length_mean": batch.lengths.float().mean().item(),
    }
    for name, mean in mean_metrics(parts).items():
        if name:
            metrics[f"reward/{name}"] = mean
    return metrics | count_unscored("val/num_unscored", scores)


def count_unscored(name: str, scores: torch.Tensor) -> dict:
    """The number of episodes without a score, as a metric. No metric if all have one."""
    count = int(scores.isnan().sum())
    if count == 0:
        return {}
    return {name: count}


def update_metrics(terms: LossTerms, given: LossInputs) -> dict:
    """What one update logs, of all episodes that took a pass, on all processes."""
    metrics = {"loss/policy_avg": terms.losses.sum()}
    if len(terms.losses) == 0:
        return metrics
    units = given.mask[:, : terms.logratio.shape[1]]  # a ratio for each token, or for each episode
    is_clipped = terms.is_clipped[units]
    is_positive = (given.advantages[:, None] > 0).expand_as(units)[units]
    metrics["policy/clipfrac_low_avg"] = (is_clipped & ~is_positive).float().mean()
    metrics["policy/clipfrac_high_avg"] = (is_clipped & is_positive).float().mean()
    return metrics | ratio_metrics(terms.logratio[units], is_clipped)


def ratio_metrics(logratio: torch.Tensor, is_clipped: torch.Tensor) -> dict:
    """What an update logs of its ratios, over the units that the algorithm clips; both [units]."""
    ratio = logratio.exp()
    return {
        "policy/approxkl_avg": 0.5 * logratio.square().mean(),
        "policy/clipfrac_avg": is_clipped.float().mean(),
        "val/ratio": ratio.mean(),
        "val/ratio_var": ratio.var(correction=0),
    }


def mean_metrics(rows: list[dict[str, float]]) -> dict:
    """The mean of each metric over the rows that have it."""
    values = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(float(value))
    return {name: float(np.mean(column)) for name, column in values.items()}


def write_metrics(accelerator, output_dir: Path, metrics: dict, progress: tqdm):
    """Hand an iteration's metrics to the trackers, metrics.jsonl and the progress bar."""
    # The mean of no episodes is nan, and a ratio can be inf. JSON knows neither.
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    accelerator.log(metrics, step=metrics["episode"])
    append_jsonl(accelerator, output_dir / "metrics.jsonl", [metrics])
    if "objective/scores" in metrics:
        score = f"{metrics['objective/scores']:.3g}"
        progress.set_postfix(score=score, eps=f"{metrics['eps']:.3g}")


def rollout_rows(iteration: int, batch: Batch, scores: torch.Tensor, tensors: dict) -> list[dict]:
    """A row of rollouts.jsonl for every episode. tensors: more columns, by name; None is null."""
    columns = {
        "prompt": [prompt.text for prompt in batch.prompts],
        "completion": batch.completions,
        "score": np.where(scores.isnan().cpu(), None, scores.cpu()).tolist(),
        "token_ids": batch.token_ids,
        "logprobs": trim_rows(batch.logprobs, batch.lengths),
    }
    for name, tensor in tensors.items():
        if tensor is None:
            columns[name] = [None] * len(batch.prompts)
        elif tensor.dim() == 1:  # [episodes]
            columns[name] = tensor.tolist()
        else:  # [episodes, response]
            columns[name] = trim_rows(tensor, batch.lengths)
    rows = []
    for index, entries in enumerate(zip(*columns.values())):
        rows.append({"iteration": iteration, "index": index} | dict(zip(columns, entries)))
    return rows


def write_rollouts(args: Args, accelerator, output_dir: Path, plan, rows: list, episode: int):
    """Append rows to rollouts.jsonl where asked; now and then show and write a few as samples."""
    if args.save_rollouts:
        append_jsonl(accelerator, output_dir / "rollouts.jsonl", rows)
    iteration = rows[0]["iteration"]
    # This is true --num-sample-generations times in a run, at equal distances.
    if iteration * args.num_sample_generations % plan.iterations < args.num_sample_generations:
        samples = []
        for row in rows[:: args.k][:4]:  # one completion of a group
            names = ("iteration", "index", "prompt", "completion", "score")
            samples.append({name: row[name] for name in names})
        append_jsonl(accelerator, output_dir / "samples.jsonl", samples)
        show_samples(accelerator, samples, episode)


def show_samples(accelerator, samples: list[dict], episode: int):
    """A few completions as a table in the terminal, and in trackers that have tables."""
    columns = list(samples[0])
    rows = [list(sample.values()) for sample in samples]
    table = Table(*columns, title=f"samples at episode {episode}", title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    with tqdm.external_write_mode():
        Console(quiet=not accelerator.is_main_process).print(table, markup=False)
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table("samples", columns=columns, data=rows, step=episode)


def save_checkpoint(accelerator, state: dict, output_dir: Path):
    """Write weights and optimizer, then `state.json`, which makes the checkpoint whole.

    The newest two whole checkpoints are kept.
    """
    folder = output_dir / "checkpoints" / f"iteration_{state['iteration']:08d}"
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    sizes = {}
    for name in JSONL_FILES:
        if (output_dir / name).exists():
            sizes[name] = (output_dir / name).stat().st_size
    (folder / "state.tmp").write_text(json.dumps(state | {"jsonl_sizes": sizes}))
    (folder / "state.tmp").replace(folder / "state.json")
    newest = [file.parent for file in sorted(folder.parent.glob("*/state.json"))[-2:]]
    for old in folder.parent.glob("iteration_*"):
        if old not in newest:
            (old / "state.json").unlink(missing_ok=True)
            shutil.rmtree(old)


def load_state(args: Args, accelerator, output_dir: Path, num_prompts: int) -> dict:
    """What one iteration hands to the next, besides weights and optimizer.

    With --resume, load the newest whole checkpoint, and cut off what was written after it.
    """
    run_id = f"{output_dir.name}-{int(time.time())}"
    state = {"iteration": 0, "step": 0, "num_prompts": num_prompts, "run_id": run_id}
    if not args.resume:
        return state
    for file in sorted(output_dir.glob("checkpoints/*/state.json"))[-1:]:
        saved = json.loads(file.read_text())
        if saved["num_prompts"] != num_prompts:
            before = saved["num_prompts"]
            raise ValueError(f"--dataset: {num_prompts} prompts, but the run had {before}")
        accelerator.load_state(str(file.parent))
        state |= saved
    if accelerator.is_main_process and (output_dir / "args.yaml").exists():
        sizes = state.get("jsonl_sizes", {})
        for name in JSONL_FILES:
            if (output_dir / name).exists():
                os.truncate(output_dir / name, sizes.get(name, 0))
    accelerator.print(f"--resume: {state['iteration']} iterations are done", flush=True)
    return state


def finish(args: Args, accelerator, policy, output_dir: Path, plan: SimpleNamespace, started):
    """Save the model, and print what the run did. started: when, as time.time()"""
    summary = f"{plan.episodes:,} episodes, {plan.steps:,} steps, {plan.epochs:g} epochs; "
    if accelerator.is_main_process:
        summary += score_summary(args, output_dir)
    save_model(accelerator, policy, output_dir, summary)
    seconds = f"{time.time() - started:.0f} s"
    folder = output_dir / "model"
    accelerator.print(f"{summary} in {seconds}; model in {folder}", flush=True)
    accelerator.wait_for_everyone()


def score_summary(args: Args, output_dir: Path) -> str:
    """First and last scores of metrics.jsonl, in words."""
    sampled = []
    held_out = []
    for line in open(output_dir / "metrics.jsonl", encoding="utf-8"):
        row = json.loads(line)
        if "objective/scores" in row:
            sampled.append(row["objective/scores"])
        if "eval/scores" in row:
            held_out.append(row["eval/scores"])
    summary = "no sampled episode had a score"
    if sampled:
        summary = f"sampled score {sampled[0]:.3f} -> {np.mean(sampled[-10:]):.3f}"
    if held_out:
        change = f"{held_out[0]:.3f} -> {held_out[-1]:.3f}"
        where = f"at temperature {args.eval_temperature:g}"
        summary = f"held-out score ({where}) {change}, {summary}"
    return summary


def save_model(accelerator, policy, output_dir: Path, summary: str):
    """Write policy, tokenizer and card beside `model/`, and rename the folder when it is whole."""
    state_dict = accelerator.get_state_dict(policy)
    if not accelerator.is_main_process:
        return
    weights = {}
    for name, tensor in state_dict.items():
        if name.startswith("language_model."):
            weights[name.removeprefix("language_model.")] = tensor
    model = accelerator.unwrap_model(policy)
    folder = output_dir / "model.tmp"
    model.language_model.save_pretrained(folder, state_dict=weights)
    model.tokenizer.save_pretrained(folder)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    card = (
        f"`{shlex.join(sys.argv)}`: {summary}. {versions}, accelerate {accelerate.__version__}.\n"
    )
    (folder / "README.md").write_text(card)
    folder.rename(output_dir / "model")


# ===================================== 10  sharded models =====================================
@contextlib.contextmanager
def sampling_weights(accelerator, model):
    """Prepare the weights for many small passes, and put them back at the end.

    Sharded weights are gathered once, not layer by layer for every token. On a CPU the weights of
    linear layers are laid out by column, which makes a product with few rows faster.
    """
    if accelerator.is_fsdp2:
        model.set_reshard_after_forward(False)  # The first pass gathers everything.
        yield
        model.set_reshard_after_forward(accelerator.state.fsdp_plugin.reshard_after_forward)
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        return
    zero3 = getattr(getattr(model, "optimizer", None), "parameter_offload", None)  # of DeepSpeed
    if zero3 is not None:
        deepspeed = importlib.import_module("deepspeed")
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            # These hooks would release the weights of each layer after its pass.
            zero3._remove_module_hooks()
            zero3.forward_hooks.clear()
            zero3.backward_hooks.clear()
            yield
            zero3.setup_zero_stage3_hooks()
        return
    linear_weights = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.is_cpu:
            linear_weights.add(module.weight)
    kept = {weight: weight.data for weight in linear_weights}
    for weight in linear_weights:
        weight.data = weight.data.t().contiguous().t()
    yield
    for weight, data in kept.items():
        weight.data = data


def configure_deepspeed(accelerator, args: Args):
    """Hand over what DeepSpeed's engine does itself: clipping, autocast, gathering for saving."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    # `micro_batches` does the accumulation.
    config["train_micro_batch_size_per_gpu"] = 1
    config["gradient_accumulation_steps"] = 1
    config["gradient_clipping"] = 0.0 if math.isinf(args.max_grad_norm) else args.max_grad_norm
    config["torch_autocast"] = {"enabled": args.dtype == "bfloat16", "dtype": "bfloat16"}
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    # Otherwise transformers would shard every model that it loads, also the reference, which has no
    # engine to gather it.
    transformers.integrations.unset_hf_deepspeed_config()


# ======================================== 11  checks ========================================
# Flags that may change when a run is resumed. They change memory, or what is shown and kept.
FREE_FLAGS = {
    "output_dir",
    "resume",
    "save_every",
    "plan",
    "gradient_checkpointing",
    "eval_dataset",
    "eval_every",
    "eval_temperature",
    "eval_k",
    "eval_reward",
    "per_device_train_batch_size",
    "per_device_rollout_batch_size",
    "log_with",
    "num_sample_generations",
    "save_rollouts",
}

MAY_BE_0 = {
    "seed",
    "warmup_steps",
    "num_sample_generations",
    "stop_token_id",
    "learning_rate",
    "weight_decay",
    "kl_coef",
    "cliprange",
    "cliprange_high",
    "eval_temperature",
    "missing_eos_penalty",
}


def fill_in_defaults(args: Args):
    """Set the flags whose default depends on the launcher or on another flag."""
    if args.dtype is None:
        launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if launcher not in ("no", "bf16"):
            raise ValueError(f"--dtype must be given: the launcher's {launcher} is not supported")
        args.dtype = "bfloat16" if launcher == "bf16" else "float32"
    if args.eval_dataset is None and args.dataset == Args.dataset:
        args.eval_dataset = str(DEFAULT / "eval.jsonl")


def refuse(is_wrong, message: str):
    """Stop if flags are wrong. tyro shows the message, and the exit status is 2."""
    if is_wrong:
        raise ValueError(message)


def check_flags(args: Args):
    """Refuse flags that are out of range, or that contradict each other."""
    for name, value in vars(args).items():
        check_range(name, value)
    refuse(args.num_generations < 2, "--num-generations must be at least 2, to compare scores")
    whole_ratios = args.importance_sampling_level == "sequence"
    if whole_ratios and args.dtype == "bfloat16" and args.updates_per_batch > 1:
        message = "rounding alone would clip nearly all ratios of sequences, see docs/metrics.md"
        raise ValueError(f"--dtype bfloat16 with more than one update per batch: {message}")
    multiple = math.lcm(args.k, args.num_mini_batches)
    message = f"--batch-size must be a multiple of {multiple}, for whole groups and mini-batches"
    refuse(args.batch_size % multiple, message)
    if "none" in (args.reward, args.eval_reward) and not args.reward_model_path:
        raise ValueError("--reward none and --eval-reward none need a --reward-model-path")
    path = args.eval_dataset
    for flag in ("eval_every", "eval_reward", "eval_k"):
        is_used = getattr(args, flag) != getattr(Args, flag)
        refuse(is_used and not path, f"--{flag.replace('_', '-')} needs an --eval-dataset")
    if path and not path.endswith(".jsonl") and ":" not in path:
        raise ValueError("--eval-dataset must be a .jsonl file, or a Hub dataset as NAME:SPLIT")
    if args.eval_k > 1 and args.eval_temperature == 0:
        raise ValueError("--eval-k needs an --eval-temperature above 0, or all are equal")
    if args.warmup_steps and args.lr_scheduler_type == "constant":
        raise ValueError("--warmup-steps needs --lr-scheduler-type constant_with_warmup")
    refuse(args.resume and not args.output_dir, "--resume needs the --output-dir of the run")
    if args.log_with not in [None, *map(str, accelerate.tracking.get_available_trackers())]:
        raise ValueError(f"--log-with: {args.log_with} is not an installed tracker")


def check_range(name: str, value):
    """Refuse a number that its flag cannot have. 2**32: a seed is one word of a random key."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    flag = f"--{name.replace('_', '-')}"
    lowest = 1 if isinstance(value, int) else 1e-30
    if name in MAY_BE_0:
        refuse(not value >= 0, f"{flag} must be at least 0, not {value}")
    else:
        refuse(not value >= lowest, f"{flag} must be above 0, not {value}")
    is_too_high = value >= 2**32 and name != "max_grad_norm"
    refuse(is_too_high, f"{flag} must be below 2**32, not {value}")


def start_accelerator(args: Args) -> accelerate.Accelerator:
    """Start the processes' connection, and refuse a launch in which some of them are missing."""
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
    expected = int(os.environ.get("WORLD_SIZE", 1 + asked_for_more))
    if accelerator.num_processes != expected:
        advice = "without GPUs use ACCELERATE_USE_CPU=true torchrun"
        raise RuntimeError(f"fewer processes than launched; {advice}")
    if accelerator.distributed_type == accelerate.DistributedType.DEEPSPEED:
        configure_deepspeed(accelerator, args)
    return accelerator


def choose_output_dir(args: Args, accelerator) -> Path:
    """The folder of the run, the same on all processes. Only --resume may use one with a run."""
    name = args.output_dir or f"runs/{Path(__file__).stem}__{args.seed}__{int(time.time())}"
    output_dir = Path(gather_object([name])[0])  # the clocks of two processes may differ
    device = accelerator.device.type
    processes = f"{accelerator.num_processes} x {device}, {args.dtype}"
    accelerator.print(f"{processes}; writing to {output_dir}", flush=True)
    if device == "cuda" and args.dtype == "float32":
        promise = "float32 gives the same run on any number of processes"
        accelerator.print(f"{promise}; --dtype bfloat16 is several times faster", flush=True)
    holds_run = (output_dir / "args.yaml").exists() or (output_dir / "model").exists()
    if holds_run and not args.resume:
        raise ValueError(f"--output-dir {output_dir}: already holds a run; --resume continues it")
    if holds_run:
        check_same_run(args, output_dir)
    return output_dir


def check_same_run(args: Args, output_dir: Path):
    """Refuse flags that would make the resumed run another run. A new flag had its default."""
    before = {name: getattr(Args, name) for name in vars(args)}
    before |= yaml.safe_load((output_dir / "args.yaml").read_text())
    for name, value in before.items():
        flag = f"--{name.replace('_', '-')}"
        if name not in vars(args):
            message = f"holds the run of another script, which has {flag}"
            raise ValueError(f"--output-dir {output_dir}: {message}")
        if name not in FREE_FLAGS and value != getattr(args, name):
            message = f"the run in {output_dir} has {value}"
            raise ValueError(f"{flag} {getattr(args, name)}: {message}")


def is_finished(accelerator, output_dir: Path) -> bool:
    """True if the run has already saved its model. Then there is nothing to do."""
    folder = output_dir / "model"
    if not folder.exists():
        return False
    accelerator.print(f"nothing to do: the run is finished, its model is in {folder}")
    accelerator.end_training()
    return True


def check_lengths(args: Args, policy: CompletionModel, prompts: list[Prompt]):
    """Refuse a --response-length that does not fit into the model after the longest prompt."""
    longest = max(len(prompt.token_ids) for prompt in prompts) + args.response_length
    positions = getattr(policy.language_model.config, "max_position_embeddings", None)
    if longest > (positions or math.inf):
        message = f"with the longest prompt {longest} tokens, but the model has {positions}"
        raise ValueError(f"--response-length: {message}")


def compare_with_sampler(
    args: Args, logprobs: torch.Tensor, sampler_logprobs: torch.Tensor
) -> dict:
    """How far the first training pass of an iteration is from the sampler, at most, for any token.

    The weights are the same, so in float32 the two differ only by rounding. A larger difference
    means that the model needs more than masks and positions. Its gradients would be wrong.
    """
    if len(logprobs) == 0:
        return {}
    difference = (logprobs - sampler_logprobs).abs().max()
    if args.dtype == "float32" and not difference < 1e-3:  # "not" also catches nan
        message = f"sampling and training give log-probabilities {difference:.2g} apart"
        raise RuntimeError(message)
    return {"val/sampling_logprob_difference": difference}


def check_gradient(grad_norm: float, iteration: int, step: int):
    """Stop before an update whose gradient is not finite."""
    if not math.isfinite(grad_norm):
        where = f"iteration {iteration}, step {step + 1}"
        raise RuntimeError(f"{where}: the gradient norm is {grad_norm}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
