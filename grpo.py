"""GRPO, group relative policy optimization, for language models, in one file.

For every prompt x draw k completions y_1 .. y_k. Each token is an action; a completion's share an advantage:

    advantage   A_i   = (score(x, y_i) - mean of the group's scores) / (their standard deviation + 1e-4)
    ratio       r_it  = exp(log p_new(y_it | ..) - log p_old(y_it | ..))
    KL          K_it  = exp(d) - d - 1 with d = log p_ref(y_it | ..) - log p_new(y_it | ..), the k3 estimator
    loss        L     = mean over the mini-batch's episodes of the mean over an episode's tokens of
                        max(-A_i r_it, -A_i clip(r_it, 1 - c, 1 + c)) + kl_coef * K_it

With one PPO epoch and one mini-batch (the defaults) r_it is 1, nothing is clipped, and L itself is 0 without KL.

Launch grpo.py:
    python grpo.py                                                    # the embedded policy learns two-digit sums
    python grpo.py --plan 8                                           # the arithmetic for 8 processes, nothing is run
    accelerate launch grpo.py --num-generations 8                     # on a cluster
    torchrun --nproc-per-node 2 grpo.py                               # ACCELERATE_USE_CPU=true where there is no GPU

How it differs from rloo.py and ppo.py: scores are normalised by their group, the ratio is per token, KL is in the loss.
Papers: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; DAPO, arXiv 2503.14476;
GSPO, arXiv 2507.18071; CISPO, arXiv 2506.13585.
To change: the reward, `--reward`; the baseline, `grpo_advantages`; the loss, `grpo_losses` in 7d; sampling, `sample`.
Every count is made in `batch_arithmetic`, every random number by `keyed_rng`; after 7a each process holds all episodes.
Left out on purpose: encoder-decoder models, pushing to a hub, inference servers (put one in `sample`), tools, images.
"""

# ============================================== 1  imports ===============================================
import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from collections import namedtuple
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import numpy as np
import torch
import transformers
import tyro
import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin, concatenate, gather_object, recursively_apply
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, DynamicCache

DEFAULT = Path(__file__).resolve().parent / "benchmark" / "default"


# =============================================== 2  flags ================================================
@dataclass
class Args:
    # run
    seed: int = 1  # every random number is a function of this seed and of what the number is for
    output_dir: str | None = None  # folder for all that the run writes; None: runs/<script>__<seed>__<unix time>
    resume: bool = False  # continue the run in --output-dir from its newest whole checkpoint, or start it there
    save_every: int | None = None  # write a checkpoint every so many iterations, and at the end; None: never
    plan: int | None = None  # print the arithmetic for this many processes and exit; loads no model
    dtype: Literal["float32", "bfloat16"] | None = None  # of forward passes; None: the launcher's mixed precision
    # model and data
    model_path: str = str(DEFAULT / "policy")  # the policy, with its tokenizer: a folder or Hub name
    lora_r: int | None = None  # train LoRA adapters of this rank on all linear layers; needs peft (arXiv 2106.09685)
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, the same result
    ref_model_path: str | None = None  # reference of the KL, only logged at --kl-coef 0; None: --model-path
    dataset: str = str(DEFAULT / "train.jsonl")  # .jsonl file or Hub dataset NAME:SPLIT, each row with a `prompt`
    max_prompt_length: int | None = None  # drop prompts of more tokens than this; None: no limit
    reward: str = "exact_match"  # exact_match (of the row's `answer`), FILE.py:FUNCTION, package.module:FUNCTION, none
    reward_model_path: str | None = None  # a one-label sequence classifier whose score is added to --reward
    eval_dataset: str | None = None  # held-out prompts, as --dataset; None: the embedded ones where --dataset is, too
    eval_every: int | None = None  # evaluate every so many iterations, besides the start and the end; None: only there
    eval_temperature: float = 0.0  # sampling temperature of the evaluation; 0 takes the most likely token
    eval_k: int = 1  # completions of each evaluation prompt, at an --eval-temperature above 0
    eval_reward: str | None = None  # the evaluation's reward, as --reward; None: --reward plus --reward-model-path
    # batch sizes
    num_train_epochs: float = 2.0  # passes over the prompts of the dataset; may be a fraction
    total_episodes: int | None = None  # train on this many episodes, in whole groups, instead of --num-train-epochs
    batch_size: int = 64  # episodes of an iteration; a multiple of the group size and of --num-mini-batches
    num_mini_batches: int = 1  # optimizer steps that one pass over an iteration's batch is cut into
    num_ppo_epochs: int = 1  # passes over each iteration's batch
    per_device_train_batch_size: int = 64  # episodes of one pass of a model; changes memory, never the result
    per_device_rollout_batch_size: int | None = None  # episodes sampled at once, None: all; never the result either
    # sampling
    response_length: int = 8  # longest completion, in tokens, its EOS included
    temperature: float = 1.0  # divides the logits, in sampling and in every log-probability
    stop_token_id: int | None = None  # a token that ends an episode, besides the model's EOS
    # algorithm
    num_generations: Annotated[int, tyro.conf.arg(aliases=["--rloo-k"])] = 4  # completions per prompt: a group
    kl_coef: float = 0.0  # weight of the KL in the loss, per nat; 0: no reference (arXiv 2402.03300, eq. 3)
    cliprange_high: float | None = None  # clips to at most 1 + this; None: --cliprange (DAPO, arXiv 2503.14476, eq. 8)
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """what divides a centred score: the deviation of its group's scores (arXiv 2402.03300, section 4.1.2), that of the
    whole batch's, or nothing (Dr. GRPO, arXiv 2503.20783: a group's deviation favours prompts too easy or too hard)"""
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = "grpo"
    """how token losses add up: grpo, the mean over an episode's tokens, then over episodes (arXiv 2402.03300, eq. 3);
    dapo (TRL's default), the sum over the mini-batch's tokens divided by their number (arXiv 2503.14476, eq. 8);
    dr_grpo, divided by episodes * response_length (arXiv 2503.20783, 3.2: grpo favours long wrong answers); cispo, as
    dapo, the clipped ratio a constant that weighs -A log p and drops no token's gradient (arXiv 2506.13585, eq. 4)"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """sequence: one ratio for a completion, exp of its mean log-ratio (GSPO, arXiv 2507.18071, eq. 7), which needs a
    --cliprange near 3e-4"""
    mask_truncated_completions: bool = False  # leaves episodes that never ended out of the loss (arXiv 2503.14476, 3.4)
    cliprange: float = 0.2  # clips the ratio to 1 +- this (arXiv 1707.06347, eq. 7); nothing with a single update
    missing_eos_penalty: float = 0.0  # taken off the score of an episode that never ended (arXiv 2403.17031, detail 4)
    k = property(lambda self: self.num_generations)  # episodes of a group
    # optimizer
    lr_scheduler_type: Literal[  # learning-rate schedule over all optimizer steps, by its name in transformers
        "linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    learning_rate: float = 1e-4  # AdamW's learning rate, at its highest
    weight_decay: float = 0.0  # AdamW's decoupled weight decay, of all parameters
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    max_grad_norm: float = 1.0  # clip the gradient's global norm to this; inf: no clipping
    # logging
    log_with: str | None = None  # a tracker of accelerate besides metrics.jsonl: wandb, tensorboard, ...
    num_sample_generations: int = 10  # how often over the run a few completions are shown and written
    save_rollouts: bool = False  # write every episode to rollouts.jsonl

    def __post_init__(self):
        """Refuse what no run can use, and fill in what the launcher and other flags say."""
        may_be_0 = "seed warmup_steps num_sample_generations stop_token_id learning_rate weight_decay kl_coef cliprange"
        may_be_0 += " eval_temperature missing_eos_penalty cliprange_high"
        for name, value in vars(self).items():
            low = 0 if name in may_be_0.split() else 1 if isinstance(value, int) else 1e-30
            high = math.inf if name == "max_grad_norm" else 2**32 - 1  # the seed: one word of a key of `keyed_rng`
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not low <= value <= high:
                wanted = "at least 0" if low == 0 else "above 0"
                raise ValueError(f"--{name.replace('_', '-')} must be {wanted} and below 2**32, not {value}")
        launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        self.dtype = self.dtype or {"no": "float32", "bf16": "bfloat16"}.get(launcher)
        if self.eval_dataset is None and self.dataset == Args.dataset:
            self.eval_dataset = str(DEFAULT / "eval.jsonl")
        has_split = not self.eval_dataset or self.eval_dataset.endswith(".jsonl") or ":" in self.eval_dataset
        whole_ratios = self.importance_sampling_level == "sequence"
        multiple, updates = math.lcm(self.k, self.num_mini_batches), self.num_ppo_epochs * self.num_mini_batches
        has_no_reward = "none" in (self.reward, self.eval_reward) and not self.reward_model_path
        is_default_missing = not DEFAULT.exists() and str(DEFAULT) in self.model_path + self.dataset
        for is_wrong, message in (
            (self.num_generations < 2, "--num-generations must be at least 2: scores are compared in a group"),
            (whole_ratios and self.dtype == "bfloat16" and updates > 1, "--dtype bfloat16: would clip noise"),
            (self.batch_size % multiple, f"--batch-size must be a multiple of {multiple}: whole groups, mini-batches"),
            (self.dtype is None, f"--dtype float32 or bfloat16, not {launcher}, the launcher's mixed precision"),
            (has_no_reward, "--reward none and --eval-reward none need a --reward-model-path"),
            (self.eval_every and not self.eval_dataset, "--eval-every needs an --eval-dataset"),
            (self.eval_k > 1 and not self.eval_temperature, "--eval-k: completions are equal at --eval-temperature 0"),
            (not has_split, "--eval-dataset must be a .jsonl file or name a split of a Hub dataset, NAME:SPLIT"),
            (self.warmup_steps and self.lr_scheduler_type == "constant", "--warmup-steps: use constant_with_warmup"),
            (self.resume and not self.output_dir, "--resume needs the --output-dir of the run to continue"),
            (self.log_with not in [None, *map(str, get_available_trackers())], "--log-with: not an installed tracker"),
            (is_default_missing, "--model-path, --dataset: copy the folder benchmark/default to beside this file"),
        ):
            if is_wrong:
                raise ValueError(message)


# ========================================== 3  batch arithmetic ==========================================
def batch_arithmetic(args: Args, num_prompts: int, world_size: int) -> SimpleNamespace:
    """Every count of a run; nothing else derives one. `plan_table` parses these lines:

    prompts = floor(num_train_epochs * num_prompts + 0.5), at least 1; with total_episodes: ceil(total_episodes / k)
    episodes = prompts * k
    prompts_per_iteration = batch_size / k
    mini_batch_size = batch_size / num_mini_batches
    iterations = ceil(episodes / batch_size)
    last_batch_size = episodes - (iterations - 1) * batch_size
    steps = num_ppo_epochs * ((iterations - 1) * num_mini_batches + min(num_mini_batches, last_batch_size))
    epochs = prompts / num_prompts
    gradient_accumulation_steps = ceil(ceil(mini_batch_size / world_size) / per_device_train_batch_size), at most"""
    plan = SimpleNamespace()
    if args.total_episodes is None:
        plan.prompts = max(1, math.floor(args.num_train_epochs * num_prompts + 0.5))
    else:
        plan.prompts = math.ceil(args.total_episodes / args.k)
    plan.episodes = plan.prompts * args.k
    plan.prompts_per_iteration = args.batch_size // args.k
    plan.mini_batch_size = args.batch_size // args.num_mini_batches
    plan.iterations = math.ceil(plan.episodes / args.batch_size)
    plan.last_batch_size = plan.episodes - (plan.iterations - 1) * args.batch_size
    last_mini_batches = min(args.num_mini_batches, plan.last_batch_size)
    plan.steps = args.num_ppo_epochs * ((plan.iterations - 1) * args.num_mini_batches + last_mini_batches)
    plan.epochs = plan.prompts / num_prompts
    local_mini_batch_size = math.ceil(plan.mini_batch_size / world_size)
    plan.gradient_accumulation_steps = math.ceil(local_mini_batch_size / args.per_device_train_batch_size)
    return plan


def plan_table(args: Args, num_prompts: int, world_size: int) -> str:
    """`batch_arithmetic` and its formulas, with their numbers, as text that is also YAML: `name: value  # formula`."""
    plan = vars(batch_arithmetic(args, num_prompts, world_size))
    known = vars(args) | plan | {"k": args.k, "num_prompts": num_prompts, "world_size": world_size}
    table = ""
    for name, formula in re.findall(r"^ *(\w+) = (.*)$", batch_arithmetic.__doc__, re.MULTILINE):
        formula = formula.split("; with total_episodes: ")[0 if args.total_episodes is None else -1]
        numbers = re.sub("[a-z_]+", lambda word: str(known.get(word[0], word[0])), formula.split(", at ")[0])
        table += f"{name + ': ' + str(plan[name]):30} # {formula} = {numbers}\n"
    return table


# What a random number is for. Keys of one purpose must be equally long: numpy takes (1, 2) for (1, 2, 0).
PROMPT_ORDER, SAMPLING, EVALUATION, MINI_BATCHES, NEW_WEIGHTS = range(1, 6)


def keyed_rng(seed: int, purpose: int, *key: int) -> np.random.Generator:
    """A generator that is a function of its key alone: not of the process, nor of what was drawn before."""
    return np.random.default_rng([seed, purpose, *key])


def draw_prompts(seed: int, num_prompts: int, first: int, count: int) -> list[int]:
    """Positions first .. first + count - 1 of the endless stream of epochs; epoch e is the permutation of (seed, e)."""
    epochs = range(first // num_prompts, (first + count - 1) // num_prompts + 1)
    stream = np.concatenate([keyed_rng(seed, PROMPT_ORDER, epoch).permutation(num_prompts) for epoch in epochs])
    return stream[first % num_prompts :][:count].tolist()


def draw_mini_batches(args: Args, iteration: int, ppo_epoch: int, num_episodes: int) -> tuple[torch.Tensor, ...]:
    """One PPO epoch's mini-batches: the groups in a fresh order, the k episodes of each side by side, cut into
    near-equal pieces. Two groups of k = 2, 0 1 and 2 3, in the order 1, 0 are 2 3 0 1: mini-batches (2 3) and (0 1)."""
    groups = keyed_rng(args.seed, MINI_BATCHES, iteration, ppo_epoch).permutation(num_episodes // args.k)
    episodes = (torch.from_numpy(groups)[:, None] * args.k + torch.arange(args.k)).flatten()  # [num_episodes]
    return episodes.tensor_split(min(args.num_mini_batches, num_episodes))


def micro_batches(accelerator: Accelerator, episodes: torch.Tensor, lengths: torch.Tensor, size: int) -> list[tuple]:
    """This process's share of `episodes` in near-equal micro-batches of at most `size`, as many on each process, sorted
    by `lengths` [batch], so that little is padded -> the indices and weights of each, and whether it is the last.
    Where they do not split evenly the last episode is repeated with weight 0, which changes no sum:
    0 1 2 3 4 on 3 processes make 0 1 | 2 3 | 4 4, with weights 1 1 | 1 1 | 1 0."""
    count = math.ceil(len(episodes) / accelerator.num_processes)
    positions = accelerator.process_index * count + torch.arange(count)  # [share], the last ones maybe beyond the end
    share, weights = episodes[positions.clamp(max=len(episodes) - 1)], (positions < len(episodes)).float()
    pieces = lengths[share].argsort(stable=True).tensor_split(math.ceil(count / size))
    return [(share[piece], weights[piece].to(accelerator.device), piece is pieces[-1]) for piece in pieces]


def on_all_processes(accelerator: Accelerator, function, lengths: torch.Tensor, size: int):
    """Apply `function(indices)` to every episode, in micro-batches on all processes -> on every process all the rows of
    the tensors that it returns, in the episodes' order."""
    pieces = [indices for indices, *_ in micro_batches(accelerator, torch.arange(len(lengths)), lengths, size)]
    order = torch.cat(pieces).argsort(stable=True)  # back to the share's
    share = recursively_apply(lambda x: x[order], concatenate([function(indices) for indices in pieces]))
    return recursively_apply(lambda x: x[: len(lengths)], accelerator.gather(share))  # less the repeats at the end


# ========================================== 4  data and reward ===========================================
Prompt = namedtuple("Prompt", ["row", "text", "token_ids"])  # the dataset's row, its prompt as rendered, and tokenized


def load_prompts(path: str, reward, tokenizer, max_prompt_length: int | None) -> list[Prompt]:
    """The rows of a .jsonl file or a Hub dataset NAME:SPLIT, each with all columns, their prompts rendered by the chat
    template and tokenized (without a tokenizer: neither). Names the line of a bad one; drops too long ones, aloud."""
    if path.endswith(".jsonl"):
        lines = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")
    else:
        name, _, split = path.partition(":")
        lines = importlib.import_module("datasets").load_dataset(name, split=split or "train")
    prompts, columns = [], {}
    for number, row in enumerate(lines, start=1):
        try:
            row = json.loads(row) if isinstance(row, str) else row
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error}); every line must be one object") from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), (str, list)) or not row["prompt"]:
            raise ValueError(f"{path}:{number}: needs a `prompt`: text, or a list of chat messages")
        if reward is exact_match and "answer" not in row:
            raise ValueError(f"{path}:{number}: needs an `answer`, which the reward exact_match compares with")
        text, is_chat, token_ids = row["prompt"], isinstance(row["prompt"], list), []
        if is_chat and tokenizer is not None:
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        if tokenizer is not None:
            token_ids = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]  # a template writes its own
        prompts.append(Prompt(row, text, token_ids))
        columns |= dict.fromkeys(row)
    kept = [p._replace(row=columns | p.row) for p in prompts if len(p.token_ids) <= (max_prompt_length or math.inf)]
    if not kept:
        raise ValueError(f"{path}: no prompts of at most --max-prompt-length {max_prompt_length} tokens")
    if len(kept) < len(prompts) and os.environ.get("RANK", "0") == "0":
        print(f"{path}: {len(prompts) - len(kept)} of {len(prompts)} prompts dropped, longer than --max-prompt-length")
    return kept


def exact_match(completions: list, answer: list, **_) -> list[float]:
    """1 where the completion, stripped, is the row's `answer`, else 0."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.strip() == str(right)) for text, right in zip(texts, answer)]


def load_reward(flag: str, spec: str):
    """The function that `exact_match`, FILE.py:FUNCTION or package.module:FUNCTION names; None for `none`."""
    if spec in ("none", "exact_match"):
        return exact_match if spec == "exact_match" else None
    path, _, function = spec.rpartition(":")
    if not path:
        raise ValueError(f"{flag} {spec}: not exact_match, FILE.py:FUNCTION, package.module:FUNCTION or none")
    if not path.endswith(".py"):
        return getattr(importlib.import_module(path), function)
    file = Path(path).resolve(strict=True)
    sys.path.append(str(file.parent))  # its neighbours are importable; at the end, so that none hides a library
    module = importlib.import_module(file.stem)
    if Path(getattr(module, "__file__", "")).resolve() != file:
        raise ValueError(f"{flag} {spec}: Python knows another module {file.stem}, {module}; rename yours")
    return getattr(module, function)


def score_episodes(accelerator: Accelerator, batch: SimpleNamespace, reward, score_by_model, where: str):
    """Scores [episodes] on every process, and a dict of each one's summands ("": of a reward that returns a list).

    Each process calls `reward` once, as TRL does: by keywords, a list for each column; its share has no repeats."""
    everything, parts = torch.arange(len(batch.prompts)), {}  # sorted by itself: in order, in one piece
    [(share, weights, _)] = micro_batches(accelerator, everything, lengths=everything, size=len(everything))
    share = share[weights.cpu() > 0].tolist()
    if share and reward is not None:
        rows, texts = [batch.prompts[i].row for i in share], [batch.completions[i] for i in share]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        columns["prompts"], columns["completion_ids"] = columns.pop("prompt"), [batch.token_ids[i] for i in share]
        chats = ([{"role": "assistant", "content": text}] for text in texts)
        columns["completions"] = [c if isinstance(r["prompt"], list) else t for r, t, c in zip(rows, texts, chats)]
        parts = reward(**columns)
        parts = dict(parts) if isinstance(parts, dict) else {"": parts}
    if share and score_by_model is not None:
        parts["reward_model"] = score_by_model(batch, share)
    local_parts = [dict(zip(parts, values)) for values in zip(*parts.values(), strict=True)]
    if len(local_parts) != len(share):
        raise ValueError(f"{where}: the reward returned {len(local_parts)} scores for {len(share)} completions")
    all_parts = gather_object([{name: float(x or 0.0) for name, x in named.items()} for named in local_parts])
    scores = torch.tensor([sum(named.values()) for named in all_parts], device=accelerator.device)
    for i in (~scores.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"{where}: the score of a completion of {batch.prompts[i].text!r} is {scores[i]}")
    return scores, all_parts


# =============================================== 5  models ===============================================
def load_model(flag: str, path: str, auto_class, dtype: torch.dtype, **config_changes):
    """`from_pretrained` with every dropout at 0 -> the model in train mode, and whether its checkpoint has a `score`
    head, as reward models have. Refuses any other weight that it lacks or has in another shape: it would be random."""
    config = transformers.AutoConfig.from_pretrained(path, **config_changes)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    settings = dict(config=config, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True)
    model, info = auto_class.from_pretrained(path, **settings)
    for name in sorted(info["missing_keys"] - {"score.weight"}) + sorted(name for name, *_ in info["mismatched_keys"]):
        raise ValueError(f"{flag} {path}: its weights lack {name}, or have it in another shape")
    return model.train(), "score.weight" not in info["missing_keys"]  # eval() would stop gradient checkpointing


def add_lora(model, args: Args, index: int):
    """Wrap a model with LoRA adapters whose first weights are a function of the seed and the model's index."""
    peft = importlib.import_module("peft")
    torch.manual_seed(int(keyed_rng(args.seed, NEW_WEIGHTS, index).integers(2**32)))
    config = peft.LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear")
    return peft.get_peft_model(model, config)


def find_eos_ids(policy, tokenizer, stop_token_id: int | None) -> list[int]:
    """Every token that ends an episode: those of the model's configs, of the tokenizer, and --stop-token-id."""
    found = [policy.config.eos_token_id, policy.generation_config.eos_token_id, tokenizer.eos_token_id, stop_token_id]
    return sorted({i for ids in found if ids is not None for i in (ids if isinstance(ids, list) else [ids])})


def pad_left(sequences: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token lists -> tokens, padded on the left by any token, and their mask, from lengths: [rows, longest] each."""
    longest = max(len(s) for s in sequences)
    tokens = torch.tensor([[0] * (longest - len(s)) + s for s in sequences], device=device)
    return tokens, torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences], device=device)


def pick_tokens(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse-transform sampling: the first token whose cumulative probability is above the uniform number, [rows].
    In float64, and with `right=True`, so that no token of probability 0 is drawn. logprobs: [rows, vocabulary]"""
    cumulative = logprobs.double().exp().cumsum(-1)  # the last is 1, but for rounding
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True).squeeze(1)


class CompletionModel(torch.nn.Module):
    """A causal language model that samples completions and gives their log-probabilities. A prompt is run once for a
    group: its keys and values are repeated for the completions, on which sampling goes on token by token, and training,
    with gradient, with all tokens at once."""

    def __init__(self, language_model, eos_ids: list[int], shares_prompts: bool):
        """shares_prompts: in `logprobs`; else a row holds prompt and completion."""
        super().__init__()
        self.language_model, self.eos_ids, self.shares_prompts = language_model, eos_ids, shares_prompts

    def forward(self, method, *inputs):
        """Call a method: `forward` is all that DDP, FSDP2 and DeepSpeed see."""
        return method(self, *inputs)

    def run(self, tokens: torch.Tensor, mask: torch.Tensor, cache=None, **settings) -> torch.Tensor:
        """Logits of `tokens` [rows, new], the last ones of rows that begin in the KV cache; mask: [rows, all]."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]  # whatever the padding
        inputs = dict(attention_mask=mask, position_ids=positions, past_key_values=cache, **settings)
        return self.language_model(tokens, use_cache=cache is not None, **inputs).logits

    def run_prompts(self, prompts: list[list[int]]):
        """Run the prompts (token lists, one per episode), equal neighbours once -> the logits of the first completion
        token [episodes, 1, vocabulary], the KV cache, and its mask [episodes, longest prompt]."""
        groups = [(prompt, len(list(equal))) for prompt, equal in itertools.groupby(prompts)]
        tokens, mask = pad_left([prompt for prompt, _ in groups], self.language_model.device)
        repeats = torch.tensor([count for _, count in groups], device=mask.device)  # [groups]
        cache = DynamicCache(config=self.language_model.config)
        logits = self.run(tokens, mask, cache, logits_to_keep=1)
        cache.batch_repeat_interleave(repeats)
        return logits.repeat_interleave(repeats, 0), cache, mask.repeat_interleave(repeats, 0)

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], uniforms: torch.Tensor, temperature: float) -> dict[str, torch.Tensor]:
        """Sample a completion for every prompt, token by token; at temperature 0 each is the most likely one.
        prompts: token lists, one per episode; uniforms: [episodes, response_length], float64, one number per token
        Returns tokens [episodes, response_length], 0 after the end; lengths [episodes], the EOS included; ended
        [episodes], whether an EOS came; logprobs and entropies (exact) [episodes, response_length], 0 after the end."""
        self.eval()  # in train mode, gradient checkpointing silently drops the KV cache
        tokens = torch.zeros(uniforms.shape, dtype=torch.long, device=uniforms.device)
        logprobs, entropies = torch.zeros((2, *uniforms.shape), device=uniforms.device)
        lengths, eos_ids = torch.zeros_like(tokens[:, 0]), torch.tensor(self.eos_ids, device=uniforms.device)
        alive = torch.arange(len(prompts), device=uniforms.device)  # the rows still in the batch: which episode each is
        logits, cache, mask = self.run_prompts(prompts)
        for t in range(uniforms.shape[1]):
            vocab_logprobs = torch.log_softmax(logits[:, -1].float() / (temperature or 1.0), dim=-1)  # [alive, vocab]
            picked = pick_tokens(vocab_logprobs, uniforms[alive, t]) if temperature else vocab_logprobs.argmax(-1)
            tokens[alive, t], lengths[alive] = picked, t + 1
            logprobs[alive, t] = vocab_logprobs.gather(-1, picked[:, None]).squeeze(1)
            entropies[alive, t] = torch.special.entr(vocab_logprobs.exp()).sum(-1)  # entr(p) is -p log p
            goes_on = ~torch.isin(picked, eos_ids)
            if t + 1 == uniforms.shape[1] or not goes_on.any():
                break
            if not goes_on.all():  # finished episodes leave the batch
                alive, picked, mask = alive[goes_on], picked[goes_on], mask[goes_on]
                cache.batch_select_indices(goes_on.nonzero().squeeze(1))
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)  # [alive, prompt + sampled]
            logits = self.run(picked[:, None], mask, cache)
        self.train()
        ended = torch.isin(tokens.gather(1, lengths[:, None] - 1).squeeze(1), eos_ids)
        return dict(tokens=tokens, lengths=lengths, ended=ended, logprobs=logprobs, entropies=entropies)

    def logprobs(self, prompts: list[list[int]], tokens: torch.Tensor, mask: torch.Tensor, temperature: float):
        """Log-probability of every completion token, [episodes, response], 0 where `mask` is False.
        prompts: token lists, one per episode; tokens, mask: [episodes, response]; temperature: divides the logits"""
        if not self.shares_prompts:
            prompt_ids, prompt_mask = pad_left(prompts, tokens.device)
            rows, row_mask = torch.cat([prompt_ids, tokens[:, :-1]], 1), torch.cat([prompt_mask, mask[:, :-1]], 1)
            logits = self.run(rows, row_mask, logits_to_keep=tokens.shape[1])  # [episodes, response, vocabulary]
        else:
            logits, cache, prompt_mask = self.run_prompts(prompts)
            if tokens.shape[1] > 1:
                more = self.run(tokens[:, :-1], torch.cat([prompt_mask, mask[:, :-1]], 1), cache)
                logits = torch.cat([logits, more], 1)
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        return logprobs.gather(-1, tokens[:, :, None]).squeeze(-1).masked_fill(~mask, 0.0)


@contextlib.contextmanager
def sampling_weights(accelerator: Accelerator, model):
    """For all the passes inside, gather sharded weights once, instead of layer by layer for every token; on a CPU lay
    out those of linear layers by column: a product with few rows is faster so."""
    zero3 = getattr(getattr(model, "optimizer", None), "parameter_offload", None)  # DeepSpeed's
    if zero3 is not None:
        with importlib.import_module("deepspeed").zero.GatheredParameters(list(model.parameters())):
            zero3._remove_module_hooks()  # they would release every layer
            zero3.forward_hooks.clear(), zero3.backward_hooks.clear()
            yield
            zero3.setup_zero_stage3_hooks()
    elif accelerator.is_fsdp2:
        model.set_reshard_after_forward(False)  # the first pass gathers all
        yield
        model.set_reshard_after_forward(accelerator.state.fsdp_plugin.reshard_after_forward)
        for module in filter(lambda module: hasattr(module, "reshard"), model.modules()):
            module.reshard()
    else:
        kept = {m.weight: m.weight.data for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight.is_cpu}
        for weight, data in kept.items():
            weight.data = data.t().contiguous().t()
        yield
        for weight, data in kept.items():
            weight.data = data


def configure_deepspeed(accelerator: Accelerator, args: Args):
    """Hand over what DeepSpeed's engine does itself: clipping, autocast, gathering the weights that are saved."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"] = 1, 1  # `micro_batches` has them
    config["gradient_clipping"] = 0.0 if math.isinf(args.max_grad_norm) else args.max_grad_norm
    config["torch_autocast"] = {"enabled": args.dtype == "bfloat16", "dtype": "bfloat16"}
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    # else transformers shards all that it loads, the reference too, which has no engine to gather it
    transformers.integrations.unset_hf_deepspeed_config()


def load_reward_model(args: Args, tokenizer, device):
    """A one-label sequence classifier, as a function of the batch and the indices to score that gives scores.
    It reads token ids, EOS included, where its vocabulary is the policy's; else text, with its EOS where one came."""
    path, dtype = args.reward_model_path, getattr(torch, args.dtype)
    model, has_head = load_model("--reward-model-path", path, AutoModelForSequenceClassification, dtype, num_labels=1)
    if not has_head:
        new = keyed_rng(args.seed, NEW_WEIGHTS, 0).normal(0, model.config.hidden_size**-0.5, model.score.weight.shape)
        model.score.weight.data = torch.from_numpy(new).to(dtype)
        print(f"warning: --reward-model-path {path} has no trained head; its scores are random", file=sys.stderr)
    its_tokenizer, model, head = AutoTokenizer.from_pretrained(path), model.to(device), model.score
    eos, same_vocabulary = [its_tokenizer.eos_token_id], its_tokenizer.get_vocab() == tokenizer.get_vocab()

    @torch.no_grad()
    def score(batch: SimpleNamespace, indices: list[int]) -> list[float]:
        rows, scores, size = [], [], args.per_device_train_batch_size
        for i in indices:
            prompt, completion = batch.prompts[i], batch.completions[i]
            rows.append(prompt.token_ids + batch.token_ids[i])
            if not same_vocabulary:
                rows[-1] = its_tokenizer(prompt.text + completion)["input_ids"]
                if isinstance(prompt.row["prompt"], list):
                    messages = prompt.row["prompt"] + [{"role": "assistant", "content": completion}]
                    rows[-1] = its_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
                rows[-1] += eos if batch.ended[i] and eos != [None] and rows[-1][-1:] != eos else []
        for first in range(0, len(rows), size):
            tokens, mask = pad_left(rows[first : first + size], device)
            inputs = dict(attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False)
            hidden = model.base_model(tokens, **inputs).last_hidden_state[:, -1]  # padding is on the left
            scores += head(hidden).float().squeeze(-1).tolist()
        return scores

    return score


# ========================================== 6  the algorithm: GRPO =======================================
def grpo_advantages(scores: torch.Tensor, k: int, scale_rewards: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A_i = (score - group mean) / (standard deviation + 1e-4), unbiased (arXiv 2402.03300, section 4.1.2), and whether
    the scores of its group are all equal, which gives 0.
    scores: [episodes], the k episodes of a group side by side -> [episodes], [groups]"""
    groups = scores.view(-1, k)  # [groups, k]
    all_equal = (groups == groups[:, :1]).all(1)  # a mean may differ by rounding from equal scores
    advantages = (groups - groups.mean(1, keepdim=True)).masked_fill(all_equal[:, None], 0.0)  # [groups, k]
    if scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    return advantages.flatten(), all_equal


def token_weights(lengths: torch.Tensor, included: torch.Tensor, loss_type: str, response_length: int) -> torch.Tensor:
    """The weight in the loss of each token of a mini-batch's episodes, 0 for episodes that are not `included`.
    lengths, included: [episodes] -> [episodes]. One denominator: that of the whole mini-batch."""
    included = included.float()
    if loss_type == "grpo":  # sum_i 1/|y_i| sum_t / episodes
        return included / lengths / included.sum().clamp(min=1)
    if loss_type in ("dapo", "cispo"):  # sum_i sum_t / tokens
        return included / (included * lengths).sum().clamp(min=1)
    return included / (included.sum().clamp(min=1) * response_length)  # dr_grpo: a constant for every token


def k3_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = ref_logprobs - logprobs, per token, never negative: an unbiased estimate of the KL
    (arXiv 2402.03300, eq. 4), whose gradient is a biased one of the KL's."""
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def clipped_policy_loss(logratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logratio) (arXiv 1707.06347, eq. 7), and where the clip
    really cuts: above with a positive advantage, below with a negative one. Shapes broadcast."""
    ratio = logratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def ratio_metrics(logratio: torch.Tensor, cut: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an update logs of its ratios, one for each unit that the algorithm clips; both [units]."""
    return {
        "policy/approxkl_avg": 0.5 * logratio.square().mean(),
        "policy/clipfrac_avg": cut.float().mean(),
        "val/ratio": logratio.exp().mean(),
        "val/ratio_var": logratio.exp().var(correction=0),
    }


# ================================================ 7  main ================================================
JSONL_FILES = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")
# Flags that may change when a run is resumed: they change what is shown and kept, or memory, never the run.
FREE_FLAGS = """output_dir resume save_every plan gradient_checkpointing eval_dataset eval_every eval_temperature
    eval_k eval_reward per_device_train_batch_size per_device_rollout_batch_size log_with num_sample_generations
    save_rollouts""".split()


def append_jsonl(accelerator: Accelerator, path: Path, rows: list[dict]):
    """The main process appends a JSON object a line."""
    if accelerator.is_main_process:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def check_same_run(args: Args, output_dir: Path):
    """Refuse, by name, a flag that would make the resumed run another run; one that is new since counts as default."""
    before = yaml.safe_load((output_dir / "args.yaml").read_text())
    for name, value in ({name: getattr(Args, name) for name in vars(args)} | before).items():
        if name not in vars(args):
            raise ValueError(f"--output-dir {output_dir}: holds the run of another script, which has --{name}")
        if name not in FREE_FLAGS and value != getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: the run in {output_dir} has {value}")


def save_checkpoint(accelerator: Accelerator, state: dict, output_dir: Path):
    """Write weights, optimizer, then `state.json`, which makes the checkpoint whole; keep the newest two whole ones."""
    folder = output_dir / "checkpoints" / f"iteration_{state['iteration']:08d}"
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        sizes = {name: (output_dir / name).stat().st_size for name in JSONL_FILES if (output_dir / name).exists()}
        (folder / "state.tmp").write_text(json.dumps(state | {"jsonl_sizes": sizes}))
        (folder / "state.tmp").replace(folder / "state.json")
        newest = sorted(folder.parent.glob("*/state.json"))[-2:]
        for old in set(folder.parent.glob("iteration_*")) - {file.parent for file in newest}:
            (old / "state.json").unlink(missing_ok=True)
            shutil.rmtree(old)


def load_checkpoint(accelerator: Accelerator, state: dict, output_dir: Path):
    """Load the newest whole checkpoint, where there is one, and its state into `state`; cut off what came after."""
    for file in sorted(output_dir.glob("checkpoints/*/state.json"))[-1:]:
        saved = json.loads(file.read_text())
        if saved["num_prompts"] != state["num_prompts"]:
            raise ValueError(f"--dataset: {state['num_prompts']} prompts, the run had {saved['num_prompts']}")
        accelerator.load_state(str(file.parent))
        state |= saved
    for file in map(output_dir.joinpath, JSONL_FILES):
        if accelerator.is_main_process and file.exists() and (output_dir / "args.yaml").exists():
            os.truncate(file, state.get("jsonl_sizes", {}).get(file.name, 0))
    accelerator.print(f"--resume: {state['iteration']} iterations are done", flush=True)


def save_model(accelerator: Accelerator, model, policy, tokenizer, output_dir: Path, summary: str):
    """Policy (with LoRA its adapter; its weights are among those of `model`), tokenizer, card; beside, then renamed."""
    state_dict, prefix = accelerator.get_state_dict(model), "language_model."
    if accelerator.is_main_process:
        state_dict = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
        policy.save_pretrained(output_dir / "model.tmp", state_dict=state_dict)
        tokenizer.save_pretrained(output_dir / "model.tmp")
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
        (output_dir / "model.tmp" / "README.md").write_text(f"`{' '.join(sys.argv)}`: {summary}. {versions}.\n")
        (output_dir / "model.tmp").rename(output_dir / "model")


def trim_rows(tensor: torch.Tensor, lengths: torch.Tensor) -> list[list]:
    """[episodes, tokens] as lists without padding."""
    return [row[:length] for row, length in zip(tensor.tolist(), lengths.tolist())]


def mean_metrics(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every metric over those rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([float(row[name]) for row in rows if name in row])) for name in names}


def show_samples(accelerator: Accelerator, samples: list[dict], episode: int):
    """A few completions as a table in the terminal, and in the trackers that have tables."""
    columns, rows = list(samples[0]), [list(sample.values()) for sample in samples]
    table = Table(*columns, title=f"samples at episode {episode}", title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    with tqdm.external_write_mode():
        Console(quiet=not accelerator.is_main_process).print(table, markup=False)
    for tracker in (tracker for tracker in accelerator.trackers if hasattr(tracker, "log_table")):
        tracker.log_table("samples", columns=columns, data=rows, step=episode)


def main(args: Args):
    """Set up, train, save; one pass of the loop, stages 7a to 7f, is an iteration."""
    started = time.time()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    # ------------------------------------------ data and arithmetic ------------------------------------------
    reward = load_reward("--reward", args.reward)
    eval_reward = reward if args.eval_reward is None else load_reward("--eval-reward", args.eval_reward)
    tokenizer = None if args.plan and not args.max_prompt_length else AutoTokenizer.from_pretrained(args.model_path)
    prompts, eval_prompts = load_prompts(args.dataset, reward, tokenizer, args.max_prompt_length), []
    if args.plan is not None:
        print(plan_table(args, len(prompts), world_size=args.plan), end="")
        return
    if args.eval_dataset is not None:
        eval_prompts = load_prompts(args.eval_dataset, eval_reward, tokenizer, args.max_prompt_length)

    # turn off what the launcher may ask of accelerate: `autocast` and `micro_batches` below do both; mps has no float64
    settings = dict(mixed_precision="no", log_with=args.log_with, project_dir="runs", cpu=torch.mps.is_available())
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1), **settings)
    device, is_main = accelerator.device, accelerator.is_main_process
    # accelerate silently runs one process of `accelerate launch --cpu`, and processes that don't see each other
    launched_more = {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys()
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1 + launched_more)):
        raise RuntimeError("fewer processes than launched: without GPUs, ACCELERATE_USE_CPU=true torchrun starts all")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        configure_deepspeed(accelerator, args)
    plan = batch_arithmetic(args, len(prompts), accelerator.num_processes)
    output_dir = args.output_dir or f"runs/{Path(__file__).stem}__{args.seed}__{int(started)}"
    output_dir = Path(gather_object([output_dir])[0])  # the clocks of two processes may differ
    accelerator.print(f"{accelerator.num_processes} x {device.type}, {args.dtype}; writing to {output_dir}", flush=True)
    holds_run = gather_object([any((output_dir / name).exists() for name in ("args.yaml", "model"))])
    if len(set(holds_run)) > 1:
        raise ValueError(f"--output-dir {output_dir}: only some machines see the run in it; use a disk that all share")
    if holds_run[0]:
        if not args.resume:
            raise ValueError(f"--output-dir {output_dir}: already holds a run; --resume continues it")
        check_same_run(args, output_dir)
        if (output_dir / "model").exists():
            accelerator.print(f"nothing to do: the run is finished, its model is in {output_dir / 'model'}")
            accelerator.end_training()
            return

    # ------------------------------------------------ models -------------------------------------------------
    dtype, float32 = getattr(torch, args.dtype), torch.float32  # of frozen weights; of those that are trained
    policy, _ = load_model("--model-path", args.model_path, AutoModelForCausalLM, dtype if args.lora_r else float32)
    eos_ids = find_eos_ids(policy, tokenizer, args.stop_token_id)
    needed = max(len(p.token_ids) for p in prompts + eval_prompts) + args.response_length
    if needed > (getattr(policy.config, "max_position_embeddings", None) or math.inf):
        raise ValueError(f"--response-length: with the longest prompt {needed} tokens, more than the model has")
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.lora_r is not None:
        policy = add_lora(policy, args, index=1)
    shares_prompts = args.k > 1 and not args.gradient_checkpointing  # checkpointing would drop the KV cache
    trained_model = CompletionModel(policy, eos_ids, shares_prompts)
    reference, as_reference = None, contextlib.nullcontext
    if args.kl_coef > 0 and args.lora_r is not None and args.ref_model_path is None:
        reference, as_reference = trained_model, policy.disable_adapter
    elif args.kl_coef > 0 or args.ref_model_path is not None:
        path = args.ref_model_path or args.model_path
        ref_model, _ = load_model("--ref-model-path", path, AutoModelForCausalLM, dtype)
        if ref_model.config.vocab_size != policy.config.vocab_size:
            raise ValueError(f"--ref-model-path {path}: its vocabulary is not the policy's")
        reference = CompletionModel(ref_model.to(device), eos_ids, shares_prompts)
    score_by_model = load_reward_model(args, tokenizer, device) if args.reward_model_path is not None else None
    parameters = [parameter for parameter in trained_model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)
    # not handed to `prepare`, which would step it once per process
    scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, plan.steps)
    model, optimizer = accelerator.prepare(trained_model, optimizer)  # `trained_model` in DDP, FSDP2, DeepSpeed

    # all that an iteration hands to the next, besides weights and optimizer; a checkpoint's state.json
    state = {"iteration": 0, "step": 0, "num_prompts": len(prompts), "run_id": f"{output_dir.name}-{int(started)}"}
    if args.resume:
        load_checkpoint(accelerator, state, output_dir)
        scheduler.last_epoch = state["step"]  # the rate is a function of it
    accelerator.project_configuration.logging_dir = str(output_dir)
    config = {name: value for name, value in vars(args).items() if value is not None}  # tensorboard takes no None
    wandb = {"name": output_dir.name, "id": state["run_id"], "resume": "allow"}  # a resumed run is the same one there
    accelerator.init_trackers("tally", config, init_kwargs={"wandb": wandb})
    if is_main:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "args.tmp").write_text(yaml.safe_dump(vars(args), sort_keys=False))
        (output_dir / "args.tmp").replace(output_dir / "args.yaml")
        (output_dir / "plan.yaml").write_text(plan_table(args, len(prompts), accelerator.num_processes))
        print((output_dir / "plan.yaml").read_text(), end="", flush=True)
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    def generate(prompts: list[Prompt], purpose: int, iteration: int, temperature: float) -> SimpleNamespace:
        """Sample a completion for every prompt; what `sample` returns for the whole batch, and the texts."""
        uniforms = keyed_rng(args.seed, purpose, iteration).random((len(prompts), args.response_length))
        uniforms = torch.from_numpy(uniforms).to(device)

        def sample(indices):
            chunk = [prompts[i].token_ids for i in indices]
            return trained_model(CompletionModel.sample, chunk, uniforms[indices], temperature)

        lengths, chunk_size = torch.tensor([len(p.token_ids) for p in prompts]), args.per_device_rollout_batch_size
        with sampling_weights(accelerator, model), autocast():  # around all tokens, so that each weight is cast once
            columns = on_all_processes(accelerator, sample, lengths, chunk_size or len(prompts))
        batch = SimpleNamespace(prompts=prompts, prompt_lengths=lengths, **columns)
        batch.mask = torch.arange(args.response_length, device=device) < batch.lengths[:, None]  # [episodes, response]
        batch.token_ids = trim_rows(batch.tokens, batch.lengths)
        batch.completions = tokenizer.batch_decode(batch.token_ids, skip_special_tokens=True)
        return batch

    def completion_pass(method, model, batch: SimpleNamespace, indices: torch.Tensor):
        """One pass of a model over the episodes `indices` of a batch: what a method like `logprobs` returns."""
        longest = max(int(batch.lengths[indices].max()), min(2, args.response_length))  # 1: a pass less than others
        tokens, mask = batch.tokens[indices, :longest], batch.mask[indices, :longest]
        with autocast():
            outputs = model(method, [batch.prompts[i].token_ids for i in indices], tokens, mask, args.temperature)
        return torch.nn.functional.pad(outputs, (0, args.response_length - longest))

    def evaluate(iteration: int) -> dict[str, float]:
        """Mean score of the evaluation prompts' completions, and of each prompt's best; no penalty, no KL."""
        drawn = [prompt for prompt in eval_prompts for _ in range(args.eval_k)]
        batch, where = generate(drawn, EVALUATION, iteration, args.eval_temperature), f"evaluation {iteration}"
        by_model = score_by_model if args.eval_reward in (None, "none") else None  # --eval-reward replaces it, too
        scores = score_episodes(accelerator, batch, eval_reward, by_model, where)[0].view(-1, args.eval_k)
        return {"eval/scores": scores.mean().item(), "eval/best_of_k": scores.amax(1).mean().item()}

    # ------------------------------------------------- loop --------------------------------------------------
    step, pass_size, is_checked = state["step"], args.per_device_train_batch_size, False
    progress = tqdm(total=plan.steps, initial=step, unit="step", disable=not is_main, dynamic_ncols=True)
    if eval_prompts and state["iteration"] == 0:
        metrics = {"iteration": 0, "step": 0, "episode": 0, "epoch": 0.0} | evaluate(0)
        accelerator.log(metrics, step=0)
        append_jsonl(accelerator, output_dir / "metrics.jsonl", [metrics])

    for iteration in range(state["iteration"] + 1, plan.iterations + 1):
        # ---- 7a  rollout: k completions of each drawn prompt, side by side; then every process holds the whole batch
        rollout_start = time.perf_counter()
        num_episodes = args.batch_size if iteration < plan.iterations else plan.last_batch_size
        first_prompt = (iteration - 1) * plan.prompts_per_iteration  # a position in the endless stream of epochs
        positions = draw_prompts(args.seed, len(prompts), first_prompt, num_episodes // args.k)
        drawn = [prompts[i] for i in positions for _ in range(args.k)]  # [batch]
        batch = generate(drawn, SAMPLING, iteration, args.temperature)
        # micro-batches are sorted by this: equal within a group, so that it stays together and its prompt runs once
        group_lengths = batch.lengths.cpu().view(-1, args.k).amax(1).repeat_interleave(args.k)
        sort_lengths = batch.prompt_lengths + group_lengths  # [batch]
        if reference is not None:
            ref_pass = functools.partial(completion_pass, CompletionModel.logprobs, reference, batch)
            with torch.no_grad(), as_reference():
                ref_logprobs = on_all_processes(accelerator, ref_pass, sort_lengths, pass_size)  # [batch, response]

        # ---- 7b  score, less the penalty; reward
        scores, parts = score_episodes(accelerator, batch, reward, score_by_model, f"iteration {iteration}")
        scores = scores - args.missing_eos_penalty * ~batch.ended  # [batch]

        # ---- 7c  baseline and advantages
        advantages, all_equal = grpo_advantages(scores, args.k, args.scale_rewards)  # [batch], [groups]
        included = batch.ended | (not args.mask_truncated_completions)  # [batch]

        # ---- 7d  optimize
        train_start, updates = time.perf_counter(), []  # the metrics of each update
        single_update = args.num_ppo_epochs * min(args.num_mini_batches, num_episodes) == 1  # p_old is p_new
        ppo_epochs = [draw_mini_batches(args, iteration, epoch, num_episodes) for epoch in range(args.num_ppo_epochs)]

        def grpo_losses(episodes, logprobs):  # [episodes, response] -> [episodes], twice [episodes, response or 1]
            old_logprobs = logprobs.detach() if single_update else batch.logprobs[episodes]
            logratio = logprobs - old_logprobs
            if args.importance_sampling_level == "sequence":
                logratio = logratio.sum(1, keepdim=True) / batch.lengths[episodes][:, None]
            cliprange_high = args.cliprange if args.cliprange_high is None else args.cliprange_high
            losses, cut = clipped_policy_loss(logratio, advantages[episodes][:, None], args.cliprange, cliprange_high)
            if args.loss_type == "cispo":
                ratio = logratio.detach().exp()
                clipped = ratio.clamp(1 - args.cliprange, 1 + cliprange_high)
                losses, cut = -advantages[episodes][:, None] * clipped * logprobs, clipped != ratio
            if reference is not None:
                losses = losses + args.kl_coef * k3_kl(logprobs, ref_logprobs[episodes])
            return (losses * batch.mask[episodes]).sum(1), cut, logratio

        for mini_batch in itertools.chain.from_iterable(ppo_epochs):
            optimizer.zero_grad()
            # without KL an episode of advantage 0 has no gradient: it takes no pass
            trained = mini_batch[(included & ((advantages != 0) | (reference is not None)))[mini_batch].cpu()]
            loss_weights = torch.zeros_like(advantages)  # [batch], of a token of each episode
            loss_weights[mini_batch] = token_weights(
                batch.lengths[mini_batch], included[mini_batch], args.loss_type, args.response_length
            )
            passes = trained if len(trained) else mini_batch[:1]  # one at least: gradients are zero then, never None
            new_logprobs = torch.zeros_like(batch.logprobs)  # [batch, response]: this process's rows, then all
            for micro_batch, weights, is_last in micro_batches(accelerator, passes, sort_lengths, pass_size):
                # processes exchange gradients in the last pass only; DeepSpeed takes its step in it
                accelerator.gradient_state._set_sync_gradients(is_last)
                with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                    logprobs = completion_pass(CompletionModel.logprobs, model, batch, micro_batch)
                    # one denominator for all micro-batches and processes: it is in the weights
                    loss = (grpo_losses(micro_batch, logprobs)[0] * loss_weights[micro_batch] * weights).sum()
                    accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over processes
                new_logprobs.index_add_(0, micro_batch.to(device), logprobs.detach() * weights[:, None])
            grad_norm = float(accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm))
            new_logprobs = accelerator.reduce(new_logprobs, reduction="sum")[trained]  # [trained, response]
            losses, cut, logratio = grpo_losses(trained, new_logprobs)  # again, of all processes, to be logged
            update = {"loss/policy_avg": (losses * loss_weights[trained]).sum(), "grad_norm": grad_norm}
            if len(trained):
                units = batch.mask[trained][:, : logratio.shape[1]]  # a ratio for every token, or for every episode
                update |= ratio_metrics(logratio[units], cut[units])
                is_positive = (advantages[trained][:, None] > 0).expand_as(cut)[units]
                update["policy/clipfrac_low_avg"] = (cut[units] & ~is_positive).float().mean()
                update["policy/clipfrac_high_avg"] = (cut[units] & is_positive).float().mean()
            if len(trained) and not updates:  # the weights are still those that sampled
                difference = (new_logprobs - batch.logprobs[trained]).abs().max()
                update["val/sampling_logprob_difference"] = difference
                if args.dtype == "float32" and not is_checked and not difference < 1e-3:  # or nan
                    raise RuntimeError(f"sampling and training give log-probabilities {difference:.2g} apart")
                is_checked = True
            if not math.isfinite(grad_norm):
                raise RuntimeError(f"iteration {iteration}, step {step + 1}: the gradient norm is {grad_norm}")
            learning_rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            updates.append(update)
            step += 1
            progress.update()

        # ---- 7e  log
        episode = (iteration - 1) * args.batch_size + num_episodes
        epoch = episode / (args.k * len(prompts))
        metrics = {"iteration": iteration, "step": step, "episode": episode, "epoch": epoch, "lr": learning_rate}
        metrics |= {"time/rollout_s": train_start - rollout_start, "time/train_s": time.perf_counter() - train_start}
        metrics["eps"] = num_episodes / (metrics["time/rollout_s"] + metrics["time/train_s"])
        metrics["objective/scores"] = scores.mean().item()
        metrics["objective/entropy"] = -batch.logprobs.sum(1).mean().item()  # an estimate, per episode
        metrics["policy/entropy_avg"] = batch.entropies[batch.mask].mean().item()  # exact, per token
        metrics["val/num_eos_tokens"] = int(batch.ended.sum())
        metrics["response_length_mean"] = batch.lengths.float().mean().item()
        metrics["group/zero_advantage_fraction"] = all_equal.float().mean().item()
        metrics |= mean_metrics(updates)
        metrics |= {f"reward/{name}": mean for name, mean in mean_metrics(parts).items() if name}
        if reference is not None:
            metrics["objective/kl"] = (batch.logprobs - ref_logprobs).sum(1).mean().item()
        progress.set_postfix(score=f"{metrics['objective/scores']:.3g}", eps=f"{metrics['eps']:.3g}")

        # ---- 7f  evaluate, save
        at_end = iteration == plan.iterations
        if eval_prompts and (at_end or (args.eval_every is not None and iteration % args.eval_every == 0)):
            metrics |= evaluate(iteration)
        accelerator.log(metrics, step=episode)
        append_jsonl(accelerator, output_dir / "metrics.jsonl", [metrics])
        columns = dict(iteration=[iteration] * num_episodes, index=range(num_episodes), prompt=[p.text for p in drawn])
        columns |= dict(completion=batch.completions, score=scores.tolist(), token_ids=batch.token_ids)
        columns |= dict(logprobs=trim_rows(batch.logprobs, batch.lengths), advantage=advantages.tolist())
        columns["ref_logprobs"] = trim_rows(ref_logprobs, batch.lengths) if reference else [None] * num_episodes
        rows = [dict(zip(columns, entries)) for entries in zip(*columns.values())]
        if args.save_rollouts:
            append_jsonl(accelerator, output_dir / "rollouts.jsonl", rows)
        if iteration * args.num_sample_generations % plan.iterations < args.num_sample_generations:  # spread evenly
            samples = [dict(list(row.items())[:5]) for row in rows[:: args.k][:4]]  # one of a group, up to its score
            append_jsonl(accelerator, output_dir / "samples.jsonl", samples)
            show_samples(accelerator, samples, episode)
        state |= {"iteration": iteration, "step": step}
        if args.save_every is not None and (at_end or iteration % args.save_every == 0):
            save_checkpoint(accelerator, state, output_dir)

    progress.close()
    line = f"{plan.episodes:,} episodes, {plan.steps:,} steps, {plan.epochs:g} epochs; "
    if is_main:
        history = [json.loads(row) for row in open(output_dir / "metrics.jsonl", encoding="utf-8")]
        sampled, held_out = ([row[x] for row in history if x in row] for x in ("objective/scores", "eval/scores"))
        if held_out:
            line += f"held-out score at temperature {args.eval_temperature:g} {held_out[0]:.3f} -> {held_out[-1]:.3f}, "
        line += f"sampled score {sampled[0]:.3f} -> {np.mean(sampled[-10:]):.3f}"
    save_model(accelerator, model, policy, tokenizer, output_dir, line)
    accelerator.print(f"{line} in {time.time() - started:.0f} s; model in {output_dir / 'model'}", flush=True)
    # in this order: a process group that is destroyed under a living model can hang at exit
    accelerator.wait_for_everyone()
    model, optimizer, policy, trained_model = accelerator.free_memory(model, optimizer, policy, trained_model)
    accelerator.end_training()


# ============================================== 8  entry point ===========================================
if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
