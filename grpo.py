"""GRPO, group relative policy optimization, for language models, in one file.

For every prompt x draw k completions y_1 .. y_k. Each token is an action; those of a completion share an advantage:

    advantage   A_i   = (score(x, y_i) - mean of the group's scores) / (their standard deviation + 1e-4)
    ratio       r_it  = exp(log p_new(y_it | ..) - log p_old(y_it | ..))
    KL          K_it  = exp(d) - d - 1 with d = log p_ref(y_it | ..) - log p_new(y_it | ..), the k3 estimator
    loss        L     = mean over the mini-batch's episodes of the mean over an episode's tokens of
                        max(-A_i r_it, -A_i clip(r_it, 1 - c, 1 + c)) + kl_coef * K_it

With one PPO epoch and one mini-batch (the defaults) r_it is 1 and nothing is clipped.

Launch:
    python grpo.py                                                    # the embedded policy learns two-digit sums
    python grpo.py --plan 8                                           # the arithmetic for 8 processes, nothing is run
    accelerate launch grpo.py --num-generations 4                     # on a cluster
    torchrun --nproc-per-node 2 grpo.py                               # ACCELERATE_USE_CPU=true where there is no GPU

The embedded policy (benchmark/make_default.py) was first taught two-digit sums, then for a while answers of which 65 %
were wrong on purpose: it has the skill, but samples it less than four times in ten, as policies that meet RL do.

How to read: top to bottom. Every count is made in `batch_arithmetic`, every random number by `keyed_rng`; after the
rollout every process holds the whole batch, and the code reads as if there were one process.

How it differs from rloo.py and ppo.py: scores are normalised by their group, the ratio is per token, KL is in the loss.
Left out on purpose: encoder-decoder models, pushing to a hub, inference servers (put one in `sample`), tools, images.

Papers: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; DAPO, arXiv 2503.14476;
GSPO, arXiv 2507.18071.
"""

# ============================================== 1  imports ===============================================
import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter, namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import transformers
import tyro
import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, broadcast_object_list, concatenate, gather_object
from rich.console import Console
from rich.table import Table
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
    StaticCache,
)

DEFAULT = Path(__file__).resolve().parent / "benchmark" / "default"
LARGEST_LOGITS = 2**25  # entries of a chunk of logits, 128 MiB in float32
LARGEST_MASK = 2**24  # entries of the mask of rows that share prompts
TOKENS_BETWEEN_CHECKS = {"cpu": 1}  # of who has finished, which means waiting for a GPU; there 8


# =============================================== 2  flags ================================================
@dataclass
class Args:
    # run
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """name of the run, the beginning of its default output folder"""
    seed: int = 1
    """every random number is a function of this seed and of what the number is for"""
    output_dir: str | None = None
    """folder for all that the run writes; None: runs/<exp_name>__<seed>__<unix time>"""
    resume: bool = False
    """continue the run in --output-dir from its newest whole checkpoint, or start it where there is none"""
    save_every: int | None = None
    """write a checkpoint every so many iterations, and at the end; None: never"""
    save_total_limit: int = 2
    """checkpoints to keep, the newest ones"""
    plan: int | None = None
    """print the arithmetic for this many processes and exit; loads no model"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """precision of forward passes; trained weights and the optimizer stay in float32"""

    # model and data
    model_path: str = str(DEFAULT / "policy")
    """the policy: a folder or Hub name that AutoModelForCausalLM loads, with its tokenizer"""
    lora_r: int | None = None
    """train LoRA adapters of this rank on all linear layers instead of all weights; needs peft (arXiv 2106.09685)"""
    compile: bool = False
    """decode with torch.compile, on a GPU under CUDA graphs, on a cache as long as the longest prompt and completion;
    takes some seconds to compile, and pays less in bfloat16, where every token casts the weights again"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time, the same result"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""
    ref_model_path: str | None = None
    """the reference model of the KL term; None: the policy before training"""
    dataset: str = str(DEFAULT / "train.jsonl")
    """a .jsonl file or a Hub dataset; each row has `prompt` (text or chat messages) and what the reward needs"""
    dataset_split: str = "train"
    """the split of a Hub dataset"""
    max_prompt_length: int | None = None
    """drop prompts of more tokens than this; None: no limit"""
    reward: str = "exact_match"
    """exact_match (the stripped completion equals the row's `answer`), FILE.py:FUNCTION, or none"""
    reward_model_path: str | None = None
    """a one-label sequence-classification model whose score is added to --reward"""
    eval_dataset: str | None = None
    """held-out prompts, read like --dataset; None: the embedded ones with the embedded --dataset, else none"""
    eval_every: int | None = None
    """evaluate every so many iterations, besides the start and the end; None: only there"""
    eval_temperature: float = 0.0
    """sampling temperature of the evaluation; 0 takes the most likely token"""
    eval_reward: str | None = None
    """the reward of the evaluation, as in --reward; None: --reward plus --reward-model-path"""

    # batch sizes
    num_train_epochs: float = 2.0
    """passes over the prompts of the dataset; may be a fraction"""
    total_episodes: int | None = None
    """train on this many episodes, rounded up to whole groups, instead of --num-train-epochs"""
    batch_size: int = 64
    """episodes of one iteration, over all processes; a multiple of the group size and of --num-mini-batches"""
    num_mini_batches: int = 1
    """optimizer steps that one pass over an iteration's batch is cut into"""
    num_ppo_epochs: int = 1
    """passes over each iteration's batch"""
    per_device_train_batch_size: int = 64
    """episodes of one pass of a model on one process, in training, for log-probabilities and by a reward model; changes
    memory and speed, never the result"""
    per_device_rollout_batch_size: int | None = None
    """episodes sampled at once on one process, None: all; changes memory and speed, never the result"""

    # sampling
    num_generations: int = 4
    """completions per prompt, at least 2: a group"""
    response_length: int = 8
    """longest completion, in tokens, its EOS included"""
    temperature: float = 1.0
    """divides the logits, in sampling and in every log-probability"""
    stop_token_id: int | None = None
    """a token that ends an episode, besides the model's EOS"""

    # algorithm
    kl_coef: float = 0.0
    """weight of the KL to the reference in the loss, per nat; 0 loads no reference model (arXiv 2402.03300, eq. 3); the
    loss differentiates the k3 estimate, whose gradient is a biased one of the KL"""
    cliprange: float = 0.2
    """clips the ratio to 1 +- this (PPO, arXiv 1707.06347, eq. 7); with a single update it does nothing"""
    cliprange_high: float | None = None
    """clips the ratio to at most 1 + this, DAPO's clip-higher (arXiv 2503.14476, eq. 8); None: --cliprange"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """what divides a centred score: the deviation of its group's scores (arXiv 2402.03300, section 4.1.2), that of the
    whole batch's, or nothing (Dr. GRPO, arXiv 2503.20783: a group's deviation favours prompts too easy or too hard)"""
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
    """how token losses add up: grpo, the mean over an episode's tokens, then over episodes (arXiv 2402.03300, eq. 3);
    dapo, the sum over the mini-batch's tokens divided by their number (arXiv 2503.14476, eq. 8); dr_grpo, that sum
    divided by episodes * response_length (arXiv 2503.20783, section 3.2)"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """sequence: one ratio for a completion, exp of its mean log-ratio (GSPO, arXiv 2507.18071, eq. 7), which needs a
    --cliprange near 3e-4"""
    mask_truncated_completions: bool = False
    """episodes that never ended leave the loss and its denominators; their scores stay in the group's statistics
    (arXiv 2503.14476, section 3.4)"""
    missing_eos_penalty: float = 0.0
    """subtracted from the score of an episode that never ended, the EOS trick (arXiv 2403.17031, detail 4)"""
    score_clip: float | None = None
    """clip scores to [-this, this], after --missing-eos-penalty; None: no clipping"""

    # optimizer
    learning_rate: float = 1e-4
    """AdamW's learning rate, at its highest"""
    adam_beta1: float = 0.9
    """AdamW's decay rate of the first moment"""
    adam_beta2: float = 0.999
    """AdamW's decay rate of the second moment"""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon"""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, of all parameters"""
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """learning-rate schedule over all optimizer steps, by its name in transformers"""
    warmup_steps: int = 0
    """optimizer steps of linear warm-up"""
    max_grad_norm: float = 1.0
    """clip the gradient's global norm to this; inf for no clipping"""

    # logging
    log_with: str | None = None
    """a tracker of accelerate besides metrics.jsonl: wandb, tensorboard, ..."""
    num_sample_generations: int = 10
    """how often over the run a few completions are shown and written to samples.jsonl"""
    save_rollouts: bool = False
    """write every episode to rollouts.jsonl"""

    @property
    def k(self) -> int:
        """Episodes of a group: completions per prompt."""
        return self.num_generations


def stop(message: str, status: int, local: bool = False):
    """End the program with one line on standard error (status 2: bad input, 1: a fault).

    The main process says it, and where only some processes may have stopped (`local`) each of them.
    """
    rank = int(os.environ.get("RANK", 0))
    if rank == 0 or local:  # `tqdm.write`: beside a progress bar, not in its line
        tqdm.write(f"{os.path.basename(__file__)}{f', process {rank}' if rank else ''}: {message}", file=sys.stderr)
    raise SystemExit(status)


def refuse(message: str):
    """Bad input: one line that names the flag or the file, exit status 2."""
    stop(message, status=2)


def check_ranges(args: Args, *ranges):
    """Refuse the first flag outside its range; each range is the names of flags, a test, and the test in words."""
    for names, is_valid, valid in ranges:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not is_valid(value):
                refuse(f"--{name.replace('_', '-')} must be {valid}, not {value}")


def check_args(args: Args):
    """Refuse values that no run can use. Needs neither data nor models."""
    check_ranges(
        args,
        ("batch_size num_mini_batches num_ppo_epochs per_device_train_batch_size", lambda x: x >= 1, "at least 1"),
        ("per_device_rollout_batch_size response_length total_episodes lora_r", lambda x: x >= 1, "at least 1"),
        ("max_prompt_length eval_every save_every save_total_limit plan", lambda x: x >= 1, "at least 1"),
        ("warmup_steps num_sample_generations stop_token_id", lambda x: x >= 0, "at least 0"),
        ("num_train_epochs temperature adam_epsilon score_clip", lambda x: 0 < x < math.inf, "above 0 and finite"),
        ("learning_rate eval_temperature kl_coef cliprange", lambda x: 0 <= x < math.inf, "at least 0 and finite"),
        ("missing_eos_penalty weight_decay", lambda x: 0 <= x < math.inf, "at least 0 and finite"),
        ("adam_beta1 adam_beta2", lambda x: 0 <= x < 1, "at least 0 and below 1"),
        ("max_grad_norm", lambda x: x > 0, "above 0 (inf: no clipping)"),
        ("seed", lambda x: 0 <= x < 2**32, "between 0 and 2**32 - 1"),  # one word of a key of `keyed_rng`
    )
    if args.reward == "none" and args.reward_model_path is None:
        refuse("--reward none needs a --reward-model-path: without either there is nothing to learn from")
    if args.resume and args.output_dir is None:
        refuse("--resume needs the --output-dir of the run to continue")
    if args.lora_r is not None and importlib.util.find_spec("peft") is None:
        refuse("--lora-r needs peft: pip install peft")
    trackers = [str(name) for name in get_available_trackers()]
    if args.log_with is not None and args.log_with not in trackers:
        refuse(f"--log-with {args.log_with}: unknown or not installed; here there are {', '.join(trackers) or 'none'}")


def check_launch(accelerator: Accelerator):
    """Refuse where accelerate silently runs something else than the launcher was asked for."""
    instead = "without GPUs use ACCELERATE_USE_CPU=true torchrun --nproc-per-node N"
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        refuse(f"accelerate launch --cpu --num_processes N has started a single process; {instead}")
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)):
        processes = f"{os.environ['WORLD_SIZE']} processes were started, but each sees {accelerator.num_processes}"
        refuse(f"{processes}, so that no gradient would be shared; {instead}")
    for name in ("FSDP", "DEEPSPEED"):
        asked = os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("1", "true")
        if asked and accelerator.distributed_type != DistributedType[name]:
            refuse(
                f"{name} was asked for, but accelerate runs {accelerator.distributed_type.value}: it needs GPUs here"
            )


def keep_freed_memory():
    """On a CPU under Linux, keep the memory of freed tensors: glibc would give that of large ones back at once, and the
    kernel clears every page again for the next one, a tenth of the time of a 135M-parameter run."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library, or Windows
        mallopt, trim_threshold, mmap_max = ctypes.CDLL(None).mallopt, -1, -4  # malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


# ========================================== 3  batch arithmetic ==========================================
def batch_arithmetic(args: Args, num_prompts: int, world_size: int) -> SimpleNamespace:
    """Every count of a run, from the flags, the dataset's number of prompts and the number of processes.

    An episode is one completion; an iteration is one rollout of batch_size episodes and the optimization on it; a step
    is one optimizer step; an epoch is one pass over the prompts. Nothing else derives a count. `--plan` prints:

    prompts = floor(num_train_epochs * num_prompts + 0.5), at least 1; with total_episodes: ceil(total_episodes / k)
    episodes = prompts * k
    prompts_per_iteration = batch_size / k
    mini_batch_size = batch_size / num_mini_batches
    iterations = ceil(episodes / batch_size)
    last_batch_size = episodes - (iterations - 1) * batch_size
    steps = num_ppo_epochs * ((iterations - 1) * num_mini_batches + min(num_mini_batches, last_batch_size))
    epochs = prompts / num_prompts
    gradient_accumulation_steps = ceil(ceil(mini_batch_size / world_size) / per_device_train_batch_size), at most
    """
    multiple = math.lcm(args.k, args.num_mini_batches)
    if args.batch_size % multiple:
        below = args.batch_size // multiple * multiple
        nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
        refuse(
            f"--batch-size {args.batch_size} must be a multiple of the group size {args.k} and of --num-mini-batches "
            f"{args.num_mini_batches}; the nearest: {nearest}"
        )
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
    lines = []
    for name, value in plan.items():
        formula = re.search(rf"^ *{name} = (.*)$", batch_arithmetic.__doc__, re.MULTILINE)[1]
        if name == "prompts":
            formula = formula.split("; with total_episodes: ")[args.total_episodes is not None]
        numbers = re.sub("[a-z_]+", lambda word: str(known.get(word[0], word[0])), re.sub(", at .*", "", formula))
        lines.append(f"{name + ': ' + str(value):30} # {formula} = {numbers}\n")
    return "".join(lines)


# What a random number is for; a key of `keyed_rng`. All numbers of one purpose have keys of the same length.
PROMPT_ORDER, SAMPLING, EVALUATION, MINI_BATCHES, NEW_WEIGHTS = range(1, 6)


def keyed_rng(seed: int, purpose: int, *key: int) -> np.random.Generator:
    """A generator that is a function of its key alone: not of the process, nor of what was drawn before."""
    return np.random.default_rng([seed, purpose, *key])


def draw_prompts(seed: int, num_prompts: int, first: int, count: int) -> list[int]:
    """Positions first .. first + count - 1 of the endless stream of epochs; epoch e is the permutation of (seed, e)."""
    positions = range(first, first + count)
    epochs = {p // num_prompts for p in positions}
    orders = {epoch: keyed_rng(seed, PROMPT_ORDER, epoch).permutation(num_prompts) for epoch in epochs}
    return [int(orders[p // num_prompts][p % num_prompts]) for p in positions]


def draw_mini_batches(
    seed: int, iteration: int, ppo_epoch: int, num_episodes: int, k: int, num_mini_batches: int
) -> tuple[torch.Tensor, ...]:
    """One PPO epoch's mini-batches: the groups in a fresh order, the k episodes of each side by side, cut into
    near-equal pieces of episode indices.

    Two groups of k = 2 in the order 1, 0 give the episodes 2 3 0 1; two mini-batches are then (2 3) and (0 1).
    """
    groups = keyed_rng(seed, MINI_BATCHES, iteration, ppo_epoch).permutation(num_episodes // k)
    episodes = (torch.from_numpy(groups)[:, None] * k + torch.arange(k)).flatten()  # [num_episodes]
    return episodes.tensor_split(min(num_mini_batches, num_episodes))


def local_share(accelerator: Accelerator, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This process's share of `indices`, as long on every process, and its weights: where the indices do not split
    evenly the last one is repeated with weight 0, which changes no sum.

    Indices 0 1 2 3 4 on 3 processes: 0 1 | 2 3 | 4 4, with weights 1 1 | 1 1 | 1 0.
    """
    size = math.ceil(len(indices) / accelerator.num_processes)
    positions = accelerator.process_index * size + torch.arange(size)  # [size], the last ones maybe beyond the end
    return indices[positions.clamp(max=len(indices) - 1)], (positions < len(indices)).float()


def on_all_processes(accelerator: Accelerator, lengths: torch.Tensor, chunk_size: int, function):
    """Apply `function(indices)` to every episode, each process to its share, in chunks of episodes of similar
    `lengths` [episodes], so that little is padded; every process gets it all, in the episodes' order.

    `function` returns a dict of tensors of one row for each index; so does this.
    """
    share, _ = local_share(accelerator, torch.arange(len(lengths)))
    order = lengths[share].argsort(stable=True)  # [share]
    local_columns = concatenate([function(chunk) for chunk in share[order].split(chunk_size)])
    local_columns = {name: column[order.argsort()] for name, column in local_columns.items()}
    return {name: column[: len(lengths)] for name, column in accelerator.gather(local_columns).items()}


def cut_share(
    share: torch.Tensor, lengths: torch.Tensor, k: int, size: int, num_micro_batches: int
) -> list[torch.Tensor]:
    """Positions in a process's `share` of episodes, in `num_micro_batches` near-equal pieces of at most `size`: groups
    sorted by length, so that little is padded, and kept whole where the sizes allow.

    The groups 0 1 | 2 3 | 4 5 of k = 2, of which the second is the shortest, in two passes of at most 4: 2 3 0 1 | 4 5.
    """
    groups = [list(members) for _, members in itertools.groupby(range(len(share)), lambda p: int(share[p]) // k)]
    groups.sort(key=lambda members: max(int(lengths[share[p]]) for p in members))
    pieces = [
        [p for g in piece for p in groups[g]] for piece in torch.arange(len(groups)).tensor_split(num_micro_batches)
    ]
    if max(map(len, pieces)) <= size:
        return [torch.tensor(piece, dtype=torch.long) for piece in pieces]
    return list(torch.tensor([p for members in groups for p in members]).tensor_split(num_micro_batches))


def micro_batches(
    accelerator: Accelerator, model, mini_batch: torch.Tensor, trained: torch.Tensor, lengths, args: Args
):
    """This process's share of the episodes `trained` of a mini-batch, in micro-batches -> indices, weights, is_last.

    There are as many as the whole mini-batch needs, on every process; one without episodes repeats one with weight 0,
    so that gradients are zero and never None. Forward and backward passes belong inside the loop: gradients are
    synchronised over processes on the last micro-batch of a mini-batch and nowhere else.
    """
    size, is_deepspeed = args.per_device_train_batch_size, accelerator.distributed_type == DistributedType.DEEPSPEED
    num_micro_batches = math.ceil(math.ceil(len(mini_batch) / accelerator.num_processes) / size)
    share, weights = local_share(accelerator, trained)  # [share]
    pieces = cut_share(share, lengths, args.k, size, num_micro_batches)
    for number, piece in enumerate(pieces, start=1):
        is_last = number == num_micro_batches
        indices, piece_weights = share[piece], weights[piece]
        if len(piece) == 0:
            indices, piece_weights = mini_batch[:1], torch.zeros(1)
        if is_deepspeed:  # its last backward pass takes the optimizer's step, too
            accelerator.gradient_state._set_sync_gradients(is_last)
        with contextlib.nullcontext() if is_last or is_deepspeed else accelerator.no_sync(model):
            yield indices, piece_weights.to(accelerator.device), is_last


# ========================================== 4  data and reward ===========================================
Prompt = namedtuple("Prompt", ["row", "text", "token_ids"])  # the dataset's row, its prompt as rendered, and tokenized


def read_rows(flag: str, path: str, split: str, needs_answer: bool) -> list[dict]:
    """The rows of a .jsonl file or of a Hub dataset. Refuses, by file and line, what is not a row with a prompt."""
    numbered = []
    if path.endswith((".jsonl", ".json")) or Path(path).is_file():
        try:
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        numbered.append((number, json.loads(line)))
        except json.JSONDecodeError as error:
            refuse(f"{path}:{number}: not JSON ({error}); every line must be one object")
        except (OSError, UnicodeDecodeError) as error:
            refuse(f"{flag} {path}: cannot be read ({error})")
    else:
        import datasets

        try:
            numbered = list(enumerate(datasets.load_dataset(path, split=split), start=1))
        except Exception as error:
            refuse(f"{flag} {path}: neither a .jsonl file nor a Hub dataset with the split {split!r} ({error})")
    if not numbered:
        refuse(f"{flag} {path}: holds no rows")
    for number, row in numbered:
        prompt = row.get("prompt") if isinstance(row, dict) else None
        is_chat = isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
        is_chat = is_chat and all("role" in m and isinstance(m.get("content"), (str, list)) for m in prompt)
        if not is_chat and not (isinstance(prompt, str) and prompt):
            refuse(f"{path}:{number}: needs a `prompt`: text, or a list of chat messages with `role` and `content`")
        if needs_answer and "answer" not in row:
            refuse(f"{path}:{number}: needs an `answer`, which the reward exact_match compares with")
    return [row for _, row in numbered]


def tokenize_prompts(flag: str, path: str, rows: list[dict], tokenizer, max_prompt_length: int | None) -> list[Prompt]:
    """Render and tokenize each row's prompt; drop, and count aloud, those of more than `max_prompt_length` tokens."""
    prompts = []
    for row in rows:
        text, is_chat = row["prompt"], not isinstance(row["prompt"], str)
        if is_chat and not tokenizer.chat_template:
            refuse(
                f"{flag} {path}: has chat messages, but the tokenizer of --model-path has no chat template; give text"
            )
        try:
            if is_chat:
                text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
            token_ids = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]  # a template writes its own
        except Exception as error:
            refuse(f"{flag} {path}: the tokenizer does not take the prompt {text!r} ({error})")
        prompts.append(Prompt(row, text, token_ids))
    kept = [p for p in prompts if max_prompt_length is None or len(p.token_ids) <= max_prompt_length]
    if len(kept) < len(prompts) and int(os.environ.get("RANK", 0)) == 0:
        dropped = len(prompts) - len(kept)
        print(f"{path}: {dropped} of {len(prompts)} prompts dropped, longer than {max_prompt_length} tokens")
    if not kept:
        shortest = min(len(p.token_ids) for p in prompts)
        refuse(f"--max-prompt-length {max_prompt_length}: drops all prompts of {path}; the shortest has {shortest}")
    if empty := [p.text for p in kept if not p.token_ids]:
        refuse(f"{flag} {path}: the prompt {empty[0]!r} has no tokens")
    return kept


def fingerprint(prompts: list[Prompt]) -> str:
    """SHA-256 of the dataset as the run sees it."""
    return hashlib.sha256(json.dumps([(p.row, p.token_ids) for p in prompts], default=str).encode()).hexdigest()


def exact_match(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """1 where the completion, stripped, is the row's `answer`, else 0."""
    return [float(completion.strip() == str(row["answer"])) for completion, row in zip(completions, rows)]


def load_reward(flag: str, spec: str):
    """The function that `exact_match` or FILE.py:FUNCTION names; None for `none`."""
    if spec in ("none", "exact_match"):
        return exact_match if spec == "exact_match" else None
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        refuse(f"{flag} {spec}: must be exact_match, none or FILE.py:FUNCTION with an existing file")
    module_spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        refuse(f"{flag} {spec}: {file} does not import ({type(error).__name__}: {error})")
    if not callable(getattr(module, name, None)):
        refuse(f"{flag} {spec}: {file} has no function {name!r}")
    return getattr(module, name)


def call_reward(reward, prompts: list[Prompt], completions: list[str]) -> dict[str, list[float]]:
    """Scores as named parts whose sum is the score; a function that returns a list has one part, without a name.

    Raises ValueError, naming a prompt, for what is not one finite number per completion.
    """
    parts = reward([p.text for p in prompts], completions, [p.row for p in prompts])
    parts = {name: list(values) for name, values in (parts if isinstance(parts, dict) else {"": parts}).items()}
    if not parts:
        raise ValueError("returned no scores")
    for name, values in parts.items():
        if len(values) != len(completions):
            raise ValueError(f"returned {len(values)} values for {len(completions)} completions {name}")
        for prompt, value in zip(prompts, values):
            if value is None or isinstance(value, str) or not math.isfinite(value):
                raise ValueError(f"returned {value!r}, not a finite number, for the prompt {prompt.text!r} {name}")
    return {name: [float(value) for value in values] for name, values in parts.items()}


def score_completions(accelerator: Accelerator, reward, prompts: list[Prompt], completions: list[str], where: str):
    """Score the whole batch, each process its share without repeats -> scores [episodes], {part: [episodes]}.

    A failure on one process travels with the gather, so that all stop together.
    """
    share, weights = local_share(accelerator, torch.arange(len(prompts)))
    share = share[weights > 0]  # a repeat would be scored, and paid for, twice
    local_parts, failure = {}, None
    if len(share) and reward is not None:
        try:
            local_parts = call_reward(reward, [prompts[i] for i in share], [completions[i] for i in share])
        except Exception as error:
            first = prompts[share[0]].text
            failure = f"{where}: the reward function, called with {len(share)} prompts from {first!r} on, failed: "
            failure += f"{type(error).__name__}: {error}"
    gathered = gather_object([(local_parts, failure)])
    for _, failure in gathered:
        if failure is not None:
            stop(failure, status=1)
    names = {tuple(sorted(local)) for local, _ in gathered if local}
    if len(names) > 1:
        stop(f"{where}: the reward function returned other parts on other processes: {sorted(names)}", status=1)
    parts = {name: [x for local, _ in gathered for x in local.get(name, [])] for name in gathered[0][0]}
    scores = np.sum([np.zeros(len(prompts)), *parts.values()], axis=0)  # [episodes]
    return torch.tensor(scores, dtype=torch.float32, device=accelerator.device), parts


# =========================================== 5  model helpers ============================================
def load_tokenizer(flag: str, path: str, args: Args):
    """The tokenizer of a model folder or Hub name."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        refuse(f"{flag} {path}: no tokenizer there ({str(error).strip().splitlines()[0]})")


def load_model(flag: str, path: str, auto_class, dtype: torch.dtype, args: Args, **config_changes):
    """`from_pretrained` with every dropout at 0 -> the model in train mode, and what its checkpoint lacked."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=args.trust_remote_code, **config_changes)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        settings = dict(config=config, dtype=dtype, trust_remote_code=args.trust_remote_code)
        settings |= dict(ignore_mismatched_sizes=True, output_loading_info=True)
        model, loading_info = auto_class.from_pretrained(path, **settings)
    except Exception as error:
        refuse(f"{flag} {path}: {auto_class.__name__} does not load it ({str(error).strip().splitlines()[0]})")
    if auto_class is AutoModelForCausalLM and loading_info["missing_keys"]:
        refuse(f"{flag} {path}: not a causal language model, it lacks {sorted(loading_info['missing_keys'])[0]}")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # dropout goes by p = 0, not by eval(): gradient checkpointing needs train mode
    return model.train(), loading_info


def check_vocabulary(flag: str, path: str, model, tokenizer, stop_token_id: int | None = None):
    """Refuse token ids that the embedding does not have."""
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        refuse(f"{flag} {path}: its tokenizer has {len(tokenizer)} tokens, but its embedding only {rows}")
    if stop_token_id is not None and stop_token_id >= rows:
        refuse(f"--stop-token-id {stop_token_id}: the model has only {rows} tokens")


def add_lora(model, args: Args, index: int):
    """Wrap a model with LoRA adapters whose first weights are a function of the seed and the model's index."""
    import peft

    torch.manual_seed(int(keyed_rng(args.seed, NEW_WEIGHTS, index).integers(2**32)))
    return peft.get_peft_model(
        model, peft.LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear")
    )


def configure_deepspeed(accelerator: Accelerator, args: Args):
    """Hand over what DeepSpeed's engine does itself: clipping, autocast, gathering the weights that are saved."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config |= {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": 1,  # `micro_batches` counts them
        "gradient_clipping": 0.0 if math.isinf(args.max_grad_norm) else args.max_grad_norm,
        "torch_autocast": {"enabled": args.dtype == "bfloat16", "dtype": "bfloat16"},
    }
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    # else transformers shards all that it loads, the reference too, which has no engine to gather it
    transformers.integrations.unset_hf_deepspeed_config()
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # its own loading would execute any pickle in a checkpoint: torch then allows these three classes and tensors only
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    torch.serialization.add_safe_globals([LossScaler, ZeroStageEnum, fragment_address])


@contextlib.contextmanager
def whole_weights(accelerator: Accelerator, model):
    """Gather sharded weights once for all the passes inside, instead of layer by layer for every token."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            hooks = getattr(model.optimizer, "parameter_offload", None)  # ZeRO-3's, which would release every layer
            if hooks is not None:
                hooks._remove_module_hooks()
                hooks.forward_hooks.clear(), hooks.backward_hooks.clear()
            yield
            if hooks is not None:
                hooks.setup_zero_stage3_hooks()
        return
    sharded = [module for module in model.modules() if hasattr(module, "set_reshard_after_forward")]  # FSDP2's
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
    if sharded:  # FSDP2's first pass must be the whole model's, also where only a part of it samples; it gathers all
        prompt, token = Prompt({}, "", [0]), torch.zeros((1, 1), dtype=torch.long, device=accelerator.device)
        batch = SimpleNamespace(tokens=token, token_ids=[[0]], lengths=token[0] + 1, mask=token == 0)
        with torch.no_grad():
            model(**completion_inputs([prompt], batch, torch.arange(1), 1, None), temperature=1.0)
    yield
    for module in sharded:  # as configured, but for the root, whose weights come first in the backward pass
        reshards = accelerator.state.fsdp_plugin.reshard_after_forward and module is not model
        module.set_reshard_after_forward(reshards, recurse=False)
        module.reshard()


def pad_left(sequences: list[list[int]], pad_token_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token lists as one tensor, padded on the left, and its mask (1 counts), both [rows, longest]."""
    longest = max(len(s) for s in sequences)
    input_ids = torch.tensor([[pad_token_id] * (longest - len(s)) + s for s in sequences], device=device)
    mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences], device=device)
    return input_ids, mask


def positions_from_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position of every token in its own row, whatever the padding, [rows, tokens]."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def scaled_logprobs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of the temperature-scaled distribution in float32, [..., vocabulary]."""
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    return torch.log_softmax(logits, dim=-1)


def pick_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    """Inverse-transform sampling: the first token whose cumulative probability is above the uniform number, [rows].

    Temperature 0 takes the most likely token. Float64, and `right=True`, so that no token of probability 0 is drawn.
    """
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits.double() / temperature, dim=-1).cumsum(-1)  # [rows, vocabulary]
    cumulative = cumulative / cumulative[:, -1:]  # the last is 1, whatever rounding summed up to
    picked = torch.searchsorted(cumulative, uniforms[:, None], right=True).squeeze(1)
    return picked.clamp(max=logits.shape[-1] - 1)  # beyond it only where the logits are NaN


@torch.no_grad()
def sample(model, prompts, uniforms: torch.Tensor, temperature: float, eos_ids, pad_token_id: int, decoder=None):
    """Sample a completion for every prompt on the model's KV cache.

    prompts: token lists, one per episode; equal neighbours (a group) are run through the model once
    uniforms: [episodes, response_length], float64, one number per token
    decoder: with --compile, the compiled `model`, its `caches` and their `length`: a decoding step has fixed shapes
    Returns a dict: tokens [episodes, response_length], padded after the end; lengths [episodes], the EOS included;
    ended [episodes], 1 where an EOS came; logprobs and entropies [episodes, response_length], 0 after the end.
    """
    device, (episodes, response_length) = uniforms.device, uniforms.shape
    tokens = torch.full((episodes, response_length), pad_token_id, device=device)
    logprobs, entropies = torch.zeros((2, episodes, response_length), device=device)
    lengths, ended = torch.zeros_like(tokens[:, 0]), torch.zeros_like(tokens[:, 0])
    eos_ids = torch.tensor(eos_ids, device=device)
    check_every = TOKENS_BETWEEN_CHECKS.get(device.type, 8)

    groups = [list(members) for _, members in itertools.groupby(prompts)]
    group = torch.tensor([i for i, members in enumerate(groups) for _ in members], device=device)  # [episodes]
    input_ids, mask = pad_left([members[0] for members in groups], pad_token_id, device)  # [groups, longest prompt]
    position_ids, width = positions_from_mask(mask), mask.shape[1]
    alive = torch.arange(episodes, device=device)  # the rows still in the batch: which episode each is
    cache = DynamicCache(config=model.config)
    for t in range(response_length):
        inputs = dict(position_ids=position_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if t == 0:  # a row per prompt, then a row per episode, with room in the mask for its tokens
            logits = model(input_ids, attention_mask=mask, **inputs).logits[group, -1]  # [alive, vocabulary]
            cache.batch_select_indices(group)
            length = width + response_length if decoder is None else decoder.length
            mask = torch.cat([mask[group], mask.new_zeros(episodes, length - width)], dim=1)  # [alive, length]
            if decoder is not None:
                cache = fixed_cache(decoder, cache, model.config)
        elif decoder is None:
            logits = model(input_ids, attention_mask=mask[:, : width + t], **inputs).logits[:, -1]
        else:
            logits = decoder.model(input_ids, attention_mask=mask, **inputs).logits[:, -1]
        picked = pick_tokens(logits, uniforms[alive, t], temperature)  # [alive]
        going = ended[alive] == 0  # [alive]; what others sample, between their end and the next check, does not count
        tokens[alive, t] = torch.where(going, picked, pad_token_id)
        picked_logprobs, picked_entropies = token_logprobs(logits, picked, temperature or 1.0)
        logprobs[alive, t], entropies[alive, t] = picked_logprobs * going, picked_entropies * going
        lengths[alive] += going
        ended[alive] |= going & torch.isin(picked, eos_ids)
        if (t + 1) % check_every == 0 and ended[alive].any():
            stay = (ended[alive] == 0).nonzero().squeeze(1)
            if len(stay) == 0:
                break
            if decoder is None:  # finished episodes leave the batch
                alive, picked, mask = alive[stay], picked[stay], mask[stay]
                cache.batch_select_indices(stay)
        mask[:, width + t] = 1  # the token just sampled
        input_ids, position_ids = picked[:, None], mask.sum(1, keepdim=True) - 1  # [alive, 1]
    return {"tokens": tokens, "lengths": lengths, "ended": ended, "logprobs": logprobs, "entropies": entropies}


def fixed_cache(decoder: SimpleNamespace, cache: DynamicCache, config) -> StaticCache:
    """The prompts' cache in one of fixed length, at the same address for as many rows, as a CUDA graph needs it."""
    rows = len(cache.layers[0].keys)
    fixed = decoder.caches.setdefault(rows, StaticCache(config=config, max_cache_len=decoder.length))
    fixed.reset()
    for index, layer in enumerate(cache.layers):
        fixed.update(layer.keys, layer.values, index)
    return fixed


def row_lengths(prompts: list[Prompt], batch: SimpleNamespace, k: int) -> torch.Tensor:
    """Tokens of each episode's prompt and of the longest completion of its group, [episodes], on the CPU."""
    longest = batch.lengths.view(-1, k).amax(1).repeat_interleave(k).cpu()
    return torch.tensor([len(p.token_ids) for p in prompts]) + longest


def lay_out_rows(groups: list[int], prompt_lengths: list[int], lengths: list[int], token_cost: int | None):
    """Which episodes of a model input share a row, as lists of their positions, and the longest row's length.

    Neighbours of a group share one, so that their prompt is computed once, where that costs less than a row for each:
    a row of n tokens, padding included, costs n * (token_cost + n), the linear layers and attention, and the mask of
    shared rows has at most LARGEST_MASK entries. A `token_cost` of None never shares. All lists are [episodes].
    """

    def length(row):
        return prompt_lengths[row[0]] + sum(lengths[p] - 1 for p in row)

    positions = range(len(groups))
    alone = [[p] for p in positions]
    shared = [list(members) for _, members in itertools.groupby(positions, lambda p: groups[p])]
    longest_alone, longest_shared = max(map(length, alone)), max(map(length, shared))
    if token_cost is None or len(shared) * longest_shared**2 > LARGEST_MASK:
        return alone, longest_alone
    cost_alone = len(alone) * longest_alone * (token_cost + longest_alone)
    cost_shared = len(shared) * longest_shared * (token_cost + longest_shared)
    return (shared, longest_shared) if cost_shared < cost_alone else (alone, longest_alone)


def completion_inputs(prompts: list[Prompt], batch: SimpleNamespace, indices, k: int, token_cost: int | None) -> dict:
    """The episodes `indices` of a batch as what `CompletionModel` takes.

    A row is a prompt and a completion without its last token or, where `lay_out_rows` says so, several completions side
    by side, each of which sees the prompt and itself; it is padded on the right. The prompt `a b` and its completions
    `x y eos` and `z eos` make the row `a b x y z` with the positions 0 1 2 3 2: the outputs at b, x and y predict
    x, y, eos, those at b and z predict z, eos.
    """
    device = batch.tokens.device
    episodes = [(i // k, prompts[i].token_ids, batch.token_ids[i]) for i in indices.tolist()]
    groups, prompt_ids, completions = zip(*episodes)
    rows, width = lay_out_rows(groups, list(map(len, prompt_ids)), list(map(len, completions)), token_cost)
    input_ids, position_ids, parts, predict_at = [], [], [], []
    for number, row in enumerate(rows):
        prompt = prompt_ids[row[0]]
        row_ids, row_positions, row_parts = list(prompt), list(range(len(prompt))), [0] * len(prompt)
        for part, p in enumerate(row, start=1):
            first, inputs = number * width + len(row_ids), completions[p][:-1]
            predict_at += [number * width + len(prompt) - 1, *range(first, first + len(inputs))]
            row_ids += inputs
            row_positions += range(len(prompt), len(prompt) + len(inputs))
            row_parts += [part] * len(inputs)
        padding = width - len(row_ids)
        input_ids.append(row_ids + [0] * padding)  # any token pads: nothing looks to its right
        position_ids.append(row_positions + [0] * padding)
        parts.append(row_parts + [-1] * padding)
    parts = torch.tensor(parts, device=device)  # [rows, width]: 0 in the prompt, 1 in its first completion, -1 padding
    attention_mask = (parts >= 0).long()
    if len(rows) < len(episodes):
        seen = (parts[:, None] == 0) | (parts[:, None] == parts[:, :, None])  # [rows, width, width], by whom and what
        attention_mask = torch.zeros(seen.shape, device=device).masked_fill(~seen.tril(), -math.inf)[:, None]
    longest = max(map(len, completions))
    return {
        "input_ids": torch.tensor(input_ids, device=device),
        "position_ids": torch.tensor(position_ids, device=device),
        "attention_mask": attention_mask,  # [rows, width], or added to attention's scores, [rows, 1, width, width]
        "predict_at": torch.tensor(predict_at, device=device),  # which of the rows * width outputs predict a target
        "targets": batch.tokens[indices, :longest],  # [episodes, longest]
        "mask": batch.mask[indices, :longest],
    }


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool = True):
    """Log-probability of each target token, with gradient, and the exact entropy in nats, without; both [tokens]."""
    logprobs = scaled_logprobs(logits, temperature)  # [tokens, vocabulary]
    chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    if not with_entropy:
        return (chosen,)
    with torch.no_grad():
        return chosen, -(logprobs.exp() * logprobs).sum(-1)


class CompletionModel(torch.nn.Module):
    """A causal language model whose forward pass gives log-probabilities and entropies of completions.

    One module, head included, so that accelerate, FSDP and DeepSpeed see every pass; and the logits of a whole
    micro-batch, the largest tensor of many a run, are never there at once (but in models that scale or cap them).
    """

    def __init__(self, language_model, adapter_off: bool = False):
        """`adapter_off`: without the LoRA adapters in it."""
        super().__init__()
        self.language_model, self.adapter_off = language_model, adapter_off
        self.has_plain_head = has_plain_head(without_peft(language_model))
        self.chunk_size = max(1, LARGEST_LOGITS // without_peft(language_model).config.get_text_config().vocab_size)

    def read(self, predict_at: torch.Tensor, **inputs):
        """What the head reads at the outputs `predict_at`, [tokens, hidden], and the head."""
        model = without_peft(self.language_model)
        with self.language_model.disable_adapter() if self.adapter_off else contextlib.nullcontext():
            if self.has_plain_head:
                outputs, head = model.base_model(**inputs).last_hidden_state, model.get_output_embeddings()
            else:  # its logits are made at once, but not those of what all rows begin with: prompts
                width = inputs["input_ids"].shape[1]
                first = int((predict_at % width).min())
                outputs, head = model(**inputs, logits_to_keep=width - first).logits, torch.nn.Identity()
                predict_at = predict_at // width * (width - first) + predict_at % width - first
        return outputs.flatten(0, 1)[predict_at], head

    def forward(self, targets, mask, predict_at, temperature: float, **inputs) -> dict[str, torch.Tensor]:
        """Log-probabilities and, in training, entropies of `targets` where `mask` is True, else 0; all are
        [episodes, tokens]."""
        hidden, head = self.read(predict_at, **inputs, use_cache=False)  # [tokens, hidden]
        is_training = torch.is_grad_enabled()

        def read_chunk(hidden, targets):
            return token_logprobs(head(hidden), targets, temperature, with_entropy=is_training)

        chunks = list(zip(hidden.split(self.chunk_size), targets[mask].split(self.chunk_size)))
        if len(chunks) > 1 and is_training:  # the backward pass makes the logits again, chunk by chunk
            again = dict(use_reentrant=False, preserve_rng_state=False)
            columns = zip(*(checkpoint(read_chunk, *chunk, **again) for chunk in chunks))
        else:
            columns = zip(*(read_chunk(*chunk) for chunk in chunks))
        return {name: spread(torch.cat(x), mask) for name, x in zip(("logprobs", "entropies"), columns)}


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One value for each True of the mask, in their places, 0 elsewhere; of the mask's shape."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


def without_peft(model):
    """The model that peft put its adapters into; the model itself where there are none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def nearly_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to the rounding of a whole model."""
    return bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max())


@torch.no_grad()
def has_plain_head(model) -> bool:
    """Whether the logits are the head's output as it is; some models scale or cap it. Tried on three tokens."""
    head, inputs = model.get_output_embeddings(), torch.arange(3, device=model.device)[None]
    enlarge = head.register_forward_hook(lambda module, inputs, output: 1000 * output)  # beyond every cap
    logits = model(inputs, use_cache=False).logits
    enlarge.remove()
    return nearly_equal(logits, 1000 * head(model.base_model(inputs, use_cache=False).last_hidden_state))


@torch.no_grad()
def can_share_prompts(model: CompletionModel) -> bool:
    """Whether attention does what a mask [rows, 1, width, width] and position ids say and nothing else. A window is not
    in such a mask; the rest is tried, on two completions of one prompt."""
    config = without_peft(model.language_model).config.get_text_config()
    windows = ("sliding_window", "attention_chunk_size", "window_size")
    if any(getattr(config, name, None) for name in windows):
        return False
    device, lengths = model.language_model.device, torch.tensor([3, 2])
    mask = torch.arange(3) < lengths[:, None]
    tokens = torch.tensor([[4, 5, 6], [6, 5, 0]], device=device)
    batch = SimpleNamespace(tokens=tokens, token_ids=trim_rows(tokens, lengths), lengths=lengths, mask=mask.to(device))
    outputs = []
    for token_cost in (None, 0):
        inputs = completion_inputs([Prompt({}, "", [1, 2, 3])] * 2, batch, torch.arange(2), 2, token_cost)
        reads = {name: x for name, x in inputs.items() if name not in ("targets", "mask")}
        if token_cost is not None:  # as autocast will: some kernels of a GPU take no other
            reads["attention_mask"] = reads["attention_mask"].to(model.language_model.dtype)
        try:
            outputs.append(model.read(**reads, use_cache=False)[0])
        except Exception:  # a model that builds something of its own from a mask [rows, tokens]
            return False
    return nearly_equal(*outputs)


@torch.no_grad()
def completion_pass(accelerator: Accelerator, model, prompts: list[Prompt], batch, args: Args, token_cost: int | None):
    """One pass without gradient over the whole batch, in micro-batches: what the model gives, [episodes, response]."""

    def read_micro_batch(indices):
        inputs = completion_inputs(prompts, batch, indices, args.k, token_cost)
        padding = (0, args.response_length - inputs["mask"].shape[1])
        columns = model(**inputs, temperature=args.temperature)
        return {name: torch.nn.functional.pad(column, padding) for name, column in columns.items()}

    lengths = row_lengths(prompts, batch, args.k)
    return on_all_processes(accelerator, lengths, args.per_device_train_batch_size, read_micro_batch)


def find_eos_ids(policy, tokenizer, stop_token_id: int | None) -> list[int]:
    """Every token that ends an episode: those of the model's configs, of the tokenizer, and --stop-token-id."""
    found = [policy.config.eos_token_id, policy.generation_config.eos_token_id, tokenizer.eos_token_id, stop_token_id]
    ids = {i for ids in found if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
    if not ids:
        refuse("--stop-token-id: neither the model nor its tokenizer has an EOS; name a token that ends an episode")
    return sorted(ids)


def load_reward_model(path: str, tokenizer, args: Args, device):
    """A one-label sequence-classification model and its tokenizer, None where its vocabulary is the policy's."""
    flag, dtype = "--reward-model-path", getattr(torch, args.dtype)
    model, info = load_model(flag, path, AutoModelForSequenceClassification, dtype, args, num_labels=1)
    if not hasattr(model, "score"):
        refuse(f"{flag} {path}: {type(model).__name__} has no `score` head on a decoder")
    if any("score" in str(key) for key in info["mismatched_keys"]):
        refuse(f"{flag} {path}: its head has several labels; a reward model has one")
    if any("score" in key for key in info["missing_keys"]):
        head = keyed_rng(args.seed, NEW_WEIGHTS, 0).normal(0, model.config.hidden_size**-0.5, model.score.weight.shape)
        model.score.weight.data = torch.from_numpy(head).to(dtype)
        print(f"warning: {flag} {path} has no trained head; its scores come from a random one", file=sys.stderr)
    reward_tokenizer = load_tokenizer(flag, path, args)
    check_vocabulary(flag, path, model, reward_tokenizer)
    same_vocabulary = reward_tokenizer.get_vocab() == tokenizer.get_vocab()
    return model.to(device), None if same_vocabulary else reward_tokenizer


@torch.no_grad()
def reward_model_scores(model, sequences: list[list[int]]) -> torch.Tensor:
    """The head's output at the last token of each sequence, [rows]: found by length, as pad may equal EOS."""
    input_ids, mask = pad_left(sequences, 0, model.device)  # masked, so any token of its vocabulary pads
    hidden = model.base_model(input_ids, attention_mask=mask, position_ids=positions_from_mask(mask), use_cache=False)
    return model.score(hidden.last_hidden_state[:, -1]).float().squeeze(-1)


def reward_model_sequence(prompt: Prompt, token_ids: list[int], completion: str, ended: bool, reward_tokenizer):
    """What the reward model reads: the token ids where its vocabulary is the policy's, else the text in its own."""
    if reward_tokenizer is None:
        return prompt.token_ids + token_ids
    if isinstance(prompt.row["prompt"], str):
        sequence = reward_tokenizer(prompt.text + completion)["input_ids"]
    else:
        messages = prompt.row["prompt"] + [{"role": "assistant", "content": completion}]
        sequence = reward_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    eos = reward_tokenizer.eos_token_id
    return sequence + [eos] if ended and eos is not None and sequence[-1:] != [eos] else sequence


# ========================================== 6  the algorithm: GRPO =======================================
def grpo_advantages(scores: torch.Tensor, k: int, scale_rewards: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A_i = (score - group mean) / (standard deviation + 1e-4), unbiased (arXiv 2402.03300, section 4.1.2), and whether
    the scores of its group are all equal, which gives 0.

    scores: [episodes], the k episodes of a group side by side -> [episodes], [groups]
    """
    groups = scores.view(-1, k)  # [groups, k]
    all_equal = (groups == groups[:, :1]).all(1)  # [groups]
    advantages = groups - groups.mean(1, keepdim=True)  # [groups, k]
    advantages = advantages.masked_fill(all_equal[:, None], 0.0)  # a mean may differ by rounding from equal scores
    if scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    return advantages.flatten(), all_equal


def token_weights(lengths: torch.Tensor, included: torch.Tensor, loss_type: str, response_length: int) -> torch.Tensor:
    """The weight in the loss of each token of a mini-batch's episodes, 0 for episodes that are not `included`.

    lengths, included: [episodes] -> [episodes]. One denominator: that of the whole mini-batch.
    """
    included = included.float()
    if loss_type == "grpo":  # sum_i 1/|y_i| sum_t / episodes
        return included / lengths / included.sum().clamp(min=1)
    if loss_type == "dapo":  # sum_i sum_t / tokens
        return included / (included * lengths).sum().clamp(min=1)
    return included / (included.sum().clamp(min=1) * response_length)  # dr_grpo: a constant for every token


def k3_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = ref_logprobs - logprobs, per token; unbiased, never negative (2402.03300, eq. 4)."""
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def clipped_policy_loss(logratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logratio) (arXiv 1707.06347, eq. 7), and where the clip
    really cuts: above with a positive advantage, below with a negative one. All of the same shape."""
    ratio = logratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def policy_sums(logratio, cut, entropy, weights, token_weights) -> dict[str, torch.Tensor]:
    """Sums over a micro-batch of what an update logs, to be added over micro-batches and processes.

    logratio, cut, weights: per unit, which is what has a ratio of its own: an episode in RLOO, a token in GRPO and PPO;
    entropy, token_weights: per token.
    """
    centred_ratio = logratio.exp() - 1  # its variance from sums would drown in rounding otherwise
    return {
        "units": weights.sum(),
        "tokens": token_weights.sum(),
        "approxkl": (0.5 * logratio.square() * weights).sum(),
        "clipfrac": (cut * weights).sum(),
        "ratio": (centred_ratio * weights).sum(),
        "ratio_squared": (centred_ratio.square() * weights).sum(),
        "entropy": (entropy * token_weights).sum(),
    }


def sums_without_pass(entropies: torch.Tensor, units: torch.Tensor, seen: torch.Tensor) -> dict[str, torch.Tensor]:
    """What episodes that take no training pass add to `policy_sums`: a ratio of exactly 1, and the entropy of sampling.

    units, seen: weights per unit and per token, divided by the number of processes, over which the sums are added.
    """
    no_change = torch.zeros_like(units)
    return policy_sums(no_change, no_change, entropies, units, seen)


def policy_metrics(sums: dict[str, float]) -> dict[str, float]:
    """An update's metrics from its sums over the whole mini-batch."""
    units, tokens = max(sums["units"], 1), max(sums["tokens"], 1)
    centred_ratio = sums["ratio"] / units
    return {
        "policy/approxkl_avg": sums["approxkl"] / units,
        "policy/clipfrac_avg": sums["clipfrac"] / units,
        "policy/entropy_avg": sums["entropy"] / tokens,
        "val/ratio": 1 + centred_ratio,
        "val/ratio_var": sums["ratio_squared"] / units - centred_ratio**2,
    }


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every metric over those of an iteration's updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: float(np.mean([update[name] for update in updates if name in update])) for name in names}


def check_finite(name: str, value: float, iteration: int, step: int):
    """Stop the run, before the weights are touched, on a value that is not finite."""
    if not math.isfinite(value):
        stop(
            f"iteration {iteration}, step {step}: the {name} is {value}; the weights are as before this step", status=1
        )


# ================================================ 7  main ================================================
@contextlib.contextmanager
def writing(path: Path):
    """Stop the run with one line where something cannot be written: a full disk."""
    try:
        yield
    except Exception as error:
        free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
        message = f"{path}: not written ({error}; {free:,} bytes free); the checkpoints before it are whole"
        stop(message.replace("\n", " "), status=1, local=True)


def append_jsonl(path: Path, rows: list[dict]):
    """Append one JSON object a line."""
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_whole(path: Path, text: str):
    """Write a file beside and rename it, so that it is never there in part."""
    beside = path.with_name(path.name + ".tmp")
    with writing(path):
        beside.write_text(text)
        beside.replace(path)


def drop_lines_after(path: Path, iteration: int):
    """Keep the whole lines of iterations up to this one: what a killed run wrote after its checkpoint is made again."""
    if path.exists():
        beside = path.with_name(path.name + ".tmp")
        # bytes: a kill may have cut a character in two
        with writing(path), open(path, "rb") as old, open(beside, "wb") as new:
            new.writelines(line for line in old if line.endswith(b"\n") and json.loads(line)["iteration"] <= iteration)
        beside.replace(path)


# Flags that may change when a run is resumed: they change what is shown and kept, or memory, never the run (the
# dataset may move: `check_same_run` compares its content).
FREE_FLAGS = (
    "exp_name output_dir resume save_every save_total_limit plan trust_remote_code gradient_checkpointing compile "
    "dataset dataset_split eval_dataset eval_every eval_temperature eval_reward per_device_train_batch_size "
    "per_device_rollout_batch_size log_with num_sample_generations save_rollouts"
).split()


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Whole checkpoints, the oldest first; one that is being written or removed has another name."""
    return sorted(output_dir.glob("checkpoints/iteration_" + "[0-9]" * 8))


def check_same_run(args: Args, dataset_sha256: str, output_dir: Path):
    """Refuse, by name, flags and prompts that would make the resumed run another run."""
    before = yaml.safe_load((output_dir / "args.yaml").read_text())
    settings = {name: value for name, value in vars(args).items() if name not in FREE_FLAGS}
    if unknown := [f"--{name.replace('_', '-')}" for name in settings if name not in before]:
        refuse(f"--output-dir {output_dir}: holds the run of another script, which has no {unknown[0]}")
    for name, value in settings.items():
        if before[name] != value:
            flag = f"--{name.replace('_', '-')}"
            refuse(f"{flag} {value}: would make it another run; the one in {output_dir} has {before[name]}")
    for newest in checkpoints_of(output_dir)[-1:]:
        with contextlib.suppress(OSError, ValueError):  # `load_checkpoint` says what cannot be read
            if json.loads((newest / "state.json").read_text())["dataset_sha256"] != dataset_sha256:
                refuse(f"--dataset {args.dataset}: its prompts are not those that the run in {output_dir} began with")


def save_checkpoint(accelerator: Accelerator, state: dict, output_dir: Path, save_total_limit: int):
    """Write weights, optimizer and `state` beside, rename when whole, then remove all but the newest checkpoints."""
    folder = output_dir / "checkpoints" / f"iteration_{state['iteration']:08d}"
    beside = folder.with_suffix(".tmp")
    with writing(folder):
        if accelerator.is_main_process:  # what a kill left
            for stale in output_dir.glob("checkpoints/*.tmp"):
                shutil.rmtree(stale)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(beside))
        if accelerator.is_main_process:
            (beside / "state.json").write_text(json.dumps(state))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
            for old in checkpoints_of(output_dir)[:-save_total_limit]:
                old.rename(old.with_suffix(".tmp"))
                shutil.rmtree(old.with_suffix(".tmp"))
    accelerator.wait_for_everyone()


def sharding(accelerator: Accelerator) -> str:
    """What a checkpoint's format depends on."""
    names = {DistributedType.FSDP: "FSDP", DistributedType.DEEPSPEED: f"DeepSpeed on {accelerator.num_processes}"}
    return names.get(accelerator.distributed_type, "whole weights")


def load_checkpoint(accelerator: Accelerator, state: dict, output_dir: Path) -> dict:
    """Load the newest whole checkpoint into what accelerate prepared -> its state, or `state` where there is none."""
    checkpoints = checkpoints_of(output_dir)
    if not checkpoints:
        return state
    *before, newest = checkpoints
    try:
        loaded = json.loads((newest / "state.json").read_text())
        if loaded["sharding"] != state["sharding"]:
            refuse(f"{newest}: written with {loaded['sharding']}; launch it so, not with {state['sharding']}")
        accelerator.load_state(str(newest))
    except Exception as error:
        other = f"remove it to resume from {before[-1]}" if before else "and there is none before it"
        message = f"{newest}: cannot be read ({type(error).__name__}: {error}); {other}".replace("\n", " ")
        stop(message, status=2, local="DeepSpeed" in state["sharding"])  # each process reads its own file
    return loaded


def save_model(accelerator: Accelerator, model, policy, tokenizer, args: Args, output_dir: Path):
    """The policy and tokenizer for `from_pretrained`, with a model card; written beside and renamed.

    The policy's weights are among those of `model`, which accelerate wraps and may have sharded.
    """
    state_dict, prefix = accelerator.get_state_dict(model), "language_model."
    if not accelerator.is_main_process:
        return
    state_dict = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
    beside = output_dir / "model.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    if args.lora_r is not None:
        policy.save_pretrained(output_dir / "adapter", state_dict=state_dict)
        merged, _ = load_model("--model-path", args.model_path, AutoModelForCausalLM, torch.float32, args)
        merged = add_lora(merged, args, index=1)
        merged.load_state_dict(state_dict)
        policy = merged.merge_and_unload()
        state_dict = policy.state_dict()
    policy.save_pretrained(beside, state_dict=state_dict)
    tokenizer.save_pretrained(beside)
    script = os.path.basename(__file__)
    card = f"# {args.exp_name}\n\n`{args.model_path}`, trained by Tally's `{script}` on `{args.dataset}`.\n"
    card += "Every flag is in `../args.yaml`, the counts in `../plan.yaml`, the curve in `../metrics.jsonl`.\n"
    (beside / "README.md").write_text(card)
    beside.rename(output_dir / "model")


def to_rows(**columns) -> list[dict]:
    """Columns of one entry per episode as one dict per episode."""
    return [dict(zip(columns, entries)) for entries in zip(*columns.values())]


def trim_rows(tensor: torch.Tensor, lengths: torch.Tensor) -> list[list]:
    """[episodes, tokens] as lists without padding."""
    return [row[:length] for row, length in zip(tensor.tolist(), lengths.tolist())]


def is_sample_iteration(iteration: int, iterations: int, num_sample_generations: int) -> bool:
    """True at `num_sample_generations` iterations spread evenly over the run, the last among them."""
    return iteration * num_sample_generations // iterations > (iteration - 1) * num_sample_generations // iterations


def closing_line(args: Args, plan: SimpleNamespace, state: dict, output_dir: Path, seconds: float) -> str:
    """What the run did, from its metrics: counts, scores before and after, seconds, where the model is."""
    if state["iteration"] < plan.iterations:
        return f"stopped after {state['step']:,} of {plan.steps:,} steps; --output-dir {output_dir} --resume continues"
    history = [json.loads(line) for line in open(output_dir / "metrics.jsonl", encoding="utf-8")]
    sampled = [metrics["objective/scores"] for metrics in history if "objective/scores" in metrics]
    tail = sampled[-10:]
    line = f"{plan.episodes:,} episodes, {plan.steps:,} steps, {plan.epochs:g} epochs in {seconds:.0f} s; "
    line += f"sampled score {sampled[0]:.3f} -> {sum(tail) / len(tail):.3f} (mean of the last {len(tail)} iterations)"
    if evaluations := [metrics["eval/scores"] for metrics in history if "eval/scores" in metrics]:
        kind = "greedy" if args.eval_temperature == 0 else f"temperature {args.eval_temperature:g}"
        line += f", {kind} held-out score {evaluations[0]:.3f} -> {evaluations[-1]:.3f}"
    return f"{line}; model in {output_dir / 'model'}"


def show_samples(accelerator: Accelerator, samples: list[dict], step: int):
    """A few completions as a table in the terminal, and in the trackers that have tables."""
    columns = list(samples[0])
    table = Table(*columns, title=f"samples at step {step}", title_justify="left")
    for sample_row in samples:
        table.add_row(*(str(value) for value in sample_row.values()))
    with tqdm.external_write_mode():
        Console().print(table, markup=False)
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table("samples", columns=columns, data=[list(row.values()) for row in samples], step=step)


def main(args: Args):
    """Check, set up, train, save; one pass of the loop, stages 7a to 7f, is an iteration."""
    started = time.time()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    check_args(args)
    if args.num_generations < 2:
        refuse(f"--num-generations must be at least 2, not {args.num_generations}: scores are compared in a group")
    check_ranges(args, ("cliprange_high", lambda x: 0 <= x < math.inf, "at least 0 and finite"))
    cliprange_high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    if args.eval_dataset is None and args.dataset == Args.dataset:
        args.eval_dataset = str(DEFAULT / "eval.jsonl")

    # ------------------------------------------ data and arithmetic ------------------------------------------
    reward = load_reward("--reward", args.reward)
    eval_reward = reward if args.eval_reward is None else load_reward("--eval-reward", args.eval_reward)
    rows = read_rows("--dataset", args.dataset, args.dataset_split, needs_answer=reward is exact_match)
    if args.plan is None or args.max_prompt_length is not None:
        tokenizer = load_tokenizer("--model-path", args.model_path, args)
        prompts = tokenize_prompts("--dataset", args.dataset, rows, tokenizer, args.max_prompt_length)
    num_prompts = len(rows) if args.plan is not None and args.max_prompt_length is None else len(prompts)
    if args.plan is not None:
        print(plan_table(args, num_prompts, world_size=args.plan), end="")
        return
    eval_prompts = []
    if args.eval_dataset is not None:
        flag, path = "--eval-dataset", args.eval_dataset
        rows = read_rows(flag, path, args.dataset_split, needs_answer=eval_reward is exact_match)
        eval_prompts = tokenize_prompts(flag, path, rows, tokenizer, args.max_prompt_length)

    accelerator = Accelerator(mixed_precision="no", log_with=args.log_with)  # precision: `autocast` below
    device, is_main = accelerator.device, accelerator.is_main_process
    check_launch(accelerator)
    if device.type == "cpu":
        keep_freed_memory()
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        configure_deepspeed(accelerator, args)
    is_sharded = accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    if args.compile and is_sharded:
        refuse("--compile needs weights that stay where they are; leave it out with sharded training")
    plan = batch_arithmetic(args, num_prompts, accelerator.num_processes)
    output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{int(started)}"
    output_dir = Path(broadcast_object_list([output_dir])[0])  # the clocks of two processes may differ
    dataset_sha256 = fingerprint(prompts)
    existing = next(folder for folder in (output_dir, *output_dir.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        refuse(f"--output-dir {output_dir}: {existing} is not a folder that can be written")
    if (output_dir / "args.yaml").exists():
        if not args.resume:
            refuse(f"--output-dir {output_dir}: already holds a run; give another folder, or --resume to continue it")
        check_same_run(args, dataset_sha256, output_dir)
        if (output_dir / "model").exists():
            if is_main:
                print(f"nothing to do: the run in {output_dir} is finished, its model is in {output_dir / 'model'}")
            accelerator.end_training()
            return

    # ------------------------------------------------ models -------------------------------------------------
    policy, _ = load_model("--model-path", args.model_path, AutoModelForCausalLM, torch.float32, args)
    check_vocabulary("--model-path", args.model_path, policy, tokenizer, args.stop_token_id)
    longest = max(len(p.token_ids) for p in prompts + eval_prompts) + args.response_length
    positions = getattr(policy.config, "max_position_embeddings", None) or math.inf
    if longest > positions:
        refuse(
            f"--response-length {args.response_length}: with the longest prompt that makes {longest} tokens, but the "
            f"model has {positions} positions; lower it, or --max-prompt-length to {positions - args.response_length}"
        )
    eos_ids = find_eos_ids(policy, tokenizer, args.stop_token_id)
    # may equal EOS: masks are made from lengths
    pad_token_id = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    reference = reward_model = reward_tokenizer = None
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.lora_r is not None:
        policy = add_lora(policy, args, index=1)
    if args.kl_coef > 0 and args.lora_r is not None and args.ref_model_path is None:
        reference = CompletionModel(policy, adapter_off=True)
    elif args.kl_coef > 0:
        path, dtype = args.ref_model_path or args.model_path, getattr(torch, args.dtype)
        reference, _ = load_model("--ref-model-path", path, AutoModelForCausalLM, dtype, args)
        if reference.config.vocab_size != policy.config.vocab_size:
            refuse(f"--ref-model-path {path}: its vocabulary is not the policy's")
        reference = CompletionModel(reference.to(device))
    if args.reward_model_path is not None:
        reward_model, reward_tokenizer = load_reward_model(args.reward_model_path, tokenizer, args, device)
    trained_model = CompletionModel(policy)
    can_share = [can_share_prompts(m) for m in (trained_model, reference) if m is not None]
    if args.compile and not can_share[0]:
        refuse("--compile: not for this model, whose attention has windows, or needs more than a mask and positions")
    # 12 hidden^2 weights a layer; None where a prompt has a row for each completion
    token_cost = 6 * policy.config.get_text_config().hidden_size if all(can_share) and args.k > 1 else None
    adam = dict(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
    parameters = [parameter for parameter in trained_model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, **adam, weight_decay=args.weight_decay, fused=not is_sharded)
    # not handed to `prepare`, which would step it once per process
    scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, plan.steps)
    model, optimizer = accelerator.prepare(trained_model, optimizer)  # wrapped for the launch: DDP, FSDP2, DeepSpeed
    decoder = None
    if args.compile:
        decoder = SimpleNamespace(model=torch.compile(policy, mode="reduce-overhead"), caches={}, length=longest)

    # all that an iteration hands to the next, besides weights and optimizer; a checkpoint's state.json
    state = {"iteration": 0, "step": 0, "dataset_sha256": dataset_sha256, "sharding": sharding(accelerator)}
    if args.resume:
        state = load_checkpoint(accelerator, state, output_dir)
        scheduler.last_epoch = state["step"]  # the rate is a function of it
        if is_main:
            for name in ("metrics", "samples", "rollouts"):
                drop_lines_after(output_dir / f"{name}.jsonl", state["iteration"] if state["iteration"] else -1)
    if args.log_with is not None:
        accelerator.project_configuration.set_directories(str(output_dir))
        try:
            accelerator.init_trackers("tally", config=vars(args), init_kwargs={"wandb": {"name": output_dir.name}})
        except Exception as error:  # no key, no network
            refuse(f"--log-with {args.log_with}: does not start ({str(error).strip().splitlines()[0]})")
    if is_main:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_whole(output_dir / "args.yaml", yaml.safe_dump(vars(args), sort_keys=False))
        write_whole(output_dir / "plan.yaml", plan_table(args, num_prompts, accelerator.num_processes))
        print(plan_table(args, num_prompts, accelerator.num_processes), end="")
        processes = f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)}"
        print(f"{processes} on {device.type}, {args.dtype}; writing to {output_dir}", flush=True)
        if args.resume:
            begin = (
                f"resuming after iteration {state['iteration']}" if state["iteration"] else "starting: no checkpoint"
            )
            print(f"{begin} in {output_dir}", flush=True)

    def autocast():
        # one context around many forwards, so that each weight is cast once
        return torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    def generate(prompts: list[Prompt], purpose: int, iteration: int, temperature: float) -> SimpleNamespace:
        """Sample a completion for every prompt; what `sample` returns for the whole batch, and the texts."""
        uniforms = keyed_rng(args.seed, purpose, iteration).random((len(prompts), args.response_length))
        uniforms = torch.from_numpy(uniforms).to(device)

        def sample_chunk(indices):
            token_ids = [prompts[i].token_ids for i in indices]
            return sample(policy, token_ids, uniforms[indices], temperature, eos_ids, pad_token_id, decoder)

        lengths = torch.tensor([len(p.token_ids) for p in prompts])
        chunk_size = args.per_device_rollout_batch_size or len(prompts)
        policy.eval()  # gradient checkpointing has no KV cache in train mode
        with autocast():
            batch = SimpleNamespace(**on_all_processes(accelerator, lengths, chunk_size, sample_chunk))
        policy.train()
        if not batch.logprobs.isfinite().all():
            stop(f"iteration {iteration}: the policy's log-probabilities are not finite", status=1)
        batch.mask = torch.arange(args.response_length, device=device) < batch.lengths[:, None]  # [episodes, response]
        batch.token_ids = trim_rows(batch.tokens, batch.lengths)
        batch.completions = tokenizer.batch_decode(batch.token_ids, skip_special_tokens=True)
        return batch

    def score(prompts: list[Prompt], batch: SimpleNamespace, function, use_reward_model: bool, where: str):
        """Scores from the reward function and the reward model -> [episodes], {part: [episodes]}."""
        scores, parts = score_completions(accelerator, function, prompts, batch.completions, where)
        if use_reward_model:
            episodes = zip(prompts, batch.token_ids, batch.completions, batch.ended.tolist())
            sequences = [reward_model_sequence(*episode, reward_tokenizer) for episode in episodes]

            def score_chunk(indices):
                return {"scores": reward_model_scores(reward_model, [sequences[i] for i in indices])}

            lengths, chunk_size = torch.tensor([len(s) for s in sequences]), args.per_device_train_batch_size
            with autocast():
                scores = scores + on_all_processes(accelerator, lengths, chunk_size, score_chunk)["scores"]
            if not scores.isfinite().all():
                stop(f"{where}: the reward model's score is not finite", status=1)
        return scores, parts

    def evaluate(iteration: int) -> float:
        """Mean raw score of the evaluation prompts."""
        with whole_weights(accelerator, model):
            batch = generate(eval_prompts, EVALUATION, iteration, args.eval_temperature)
        use_reward_model = reward_model is not None and args.eval_reward in (None, "none")
        where = f"evaluation at iteration {iteration}"
        scores, _ = score(eval_prompts, batch, eval_reward, use_reward_model, where)
        return scores.mean().item()

    # ------------------------------------------------- loop --------------------------------------------------
    received = []  # signals: the iteration is finished and saved, then the run ends; a second SIGINT ends it at once

    def on_signal(number, frame):
        received.append(number)
        if number == signal.SIGINT:  # a second SIGTERM is a scheduler's beside the launcher's
            signal.signal(number, signal.SIG_DFL)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    step, stopped_by = state["step"], 0
    progress = tqdm(total=plan.steps, initial=step, unit="step", disable=not is_main, dynamic_ncols=True)
    if eval_prompts and state["iteration"] == 0:
        metrics = {"iteration": 0, "step": 0, "episode": 0, "epoch": 0.0, "eval/scores": evaluate(0)}
        if is_main:
            append_jsonl(output_dir / "metrics.jsonl", [metrics])
        accelerator.log(metrics, step=0)

    for iteration in range(state["iteration"] + 1, plan.iterations + 1):
        # ---- 7a  rollout: k completions of each drawn prompt, side by side; then every process holds the whole batch
        rollout_started = time.perf_counter()
        batch_size = args.batch_size if iteration < plan.iterations else plan.last_batch_size
        first_prompt = (iteration - 1) * plan.prompts_per_iteration  # a position in the endless stream of epochs
        drawn = draw_prompts(args.seed, num_prompts, first_prompt, batch_size // args.k)
        episode_prompts = [prompts[i] for i in drawn for _ in range(args.k)]  # [batch]
        single_update = args.num_ppo_epochs * min(args.num_mini_batches, batch_size) == 1  # its ratio is 1 by itself
        with whole_weights(accelerator, model), autocast():
            batch = generate(episode_prompts, SAMPLING, iteration, args.temperature)
            lengths = row_lengths(episode_prompts, batch, args.k)  # [batch], to put rows of similar length together
            logprobs = batch.logprobs  # [batch, response], 0 where masked
            rollout = (episode_prompts, batch, args, token_cost)
            if not single_update:  # the ratio's old log-probabilities come from the pass that makes the new ones
                logprobs = completion_pass(accelerator, model, *rollout)["logprobs"]
            if reference is not None:
                ref_logprobs = completion_pass(accelerator, reference, *rollout)["logprobs"]

        # ---- 7b  score, in the order that counts: reward, missing EOS, clip
        scores, parts = score(episode_prompts, batch, reward, reward_model is not None, f"iteration {iteration}")
        scores = scores - args.missing_eos_penalty * (batch.ended == 0)  # [batch]
        if args.score_clip is not None:
            scores = scores.clamp(-args.score_clip, args.score_clip)

        # ---- 7c  baseline and advantages
        advantages, all_equal = grpo_advantages(scores, args.k, args.scale_rewards)  # [batch], [groups]
        included = batch.ended == 1 if args.mask_truncated_completions else torch.ones_like(batch.ended == 1)  # [batch]
        rollout_seconds = time.perf_counter() - rollout_started

        # ---- 7d  optimize
        train_started = time.perf_counter()
        updates = []  # the metrics of each
        sizes = (batch_size, args.k, args.num_mini_batches)
        ppo_epochs = (draw_mini_batches(args.seed, iteration, epoch, *sizes) for epoch in range(args.num_ppo_epochs))
        for mini_batch in itertools.chain.from_iterable(ppo_epochs):
            optimizer.zero_grad()
            # with a single update an episode of advantage 0 has no gradient: it takes no pass
            skips = (advantages[mini_batch] == 0).cpu() & single_update & (reference is None)
            skipped, trained = mini_batch[skips], mini_batch[~skips]
            seen = (batch.mask & included[:, None])[skipped] / accelerator.num_processes  # [skipped, response]
            units = seen
            if args.importance_sampling_level == "sequence":
                units = included[skipped][:, None] / accelerator.num_processes  # [skipped, 1]
            sums = Counter(sums_without_pass(batch.entropies[skipped], units, seen))  # its `update` adds
            loss_weights = torch.zeros(batch_size, device=device)  # [batch], per token of an episode
            loss_weights[mini_batch] = token_weights(
                batch.lengths[mini_batch], included[mini_batch], args.loss_type, args.response_length
            )
            for micro, weights, is_last in micro_batches(accelerator, model, mini_batch, trained, lengths, args):
                inputs = completion_inputs(episode_prompts, batch, micro, args.k, token_cost)
                with autocast():
                    output = model(**inputs, temperature=args.temperature)  # each [micro, tokens]
                new_logprobs, entropies, mask = output["logprobs"], output["entropies"], inputs["mask"]
                old_logprobs = new_logprobs.detach() if single_update else logprobs[micro, : mask.shape[1]]
                mask = mask & included[micro][:, None]
                logratio = (new_logprobs - old_logprobs) * mask  # [micro, tokens]
                units = mask * weights[:, None]
                if args.importance_sampling_level == "sequence":
                    logratio = logratio.sum(1, keepdim=True) / batch.lengths[micro][:, None]  # [micro, 1]
                    units = (included[micro] * weights)[:, None]
                advantage = advantages[micro][:, None]  # [micro, 1]
                losses, cut = clipped_policy_loss(logratio, advantage, args.cliprange, cliprange_high)  # as logratio
                if reference is not None:
                    losses = losses + args.kl_coef * k3_kl(new_logprobs, ref_logprobs[micro, : mask.shape[1]])
                # one denominator for all micro-batches and processes: it is in the token weights
                loss = (losses * mask * (loss_weights[micro] * weights)[:, None]).sum()
                with torch.no_grad():
                    sums.update(policy_sums(logratio, cut, entropies, units, mask * weights[:, None]))
                    low, high = cut & (advantage < 0), cut & (advantage > 0)
                    sums.update({"loss": loss, "low": (low * units).sum(), "high": (high * units).sum()})
                if is_last:  # all that can refuse an update falls before its last backward pass
                    totals = {name: x.item() for name, x in accelerator.reduce(dict(sums), reduction="sum").items()}
                    check_finite("loss", totals["loss"], iteration, step + 1)
                accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over processes
            grad_norm = float(accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm))
            check_finite("gradient norm", grad_norm, iteration, step + 1)
            learning_rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            step += 1
            progress.update()
            updates.append({"loss/policy_avg": totals["loss"], **policy_metrics(totals), "grad_norm": grad_norm})
            for side in ("low", "high"):
                updates[-1][f"policy/clipfrac_{side}_avg"] = totals[side] / max(totals["units"], 1)
        train_seconds = time.perf_counter() - train_started

        # ---- 7e  log
        episode = (iteration - 1) * args.batch_size + batch_size
        metrics = {
            "iteration": iteration,
            "step": step,
            "episode": episode,
            "epoch": episode / (args.k * num_prompts),
            "lr": learning_rate,
            "eps": batch_size / (rollout_seconds + train_seconds),
            "time/rollout_s": rollout_seconds,
            "time/train_s": train_seconds,
            "objective/scores": scores.mean().item(),
            "objective/entropy": -logprobs.sum(1).mean().item(),
            "val/num_eos_tokens": int(batch.ended.sum()),
            "response_length_mean": batch.lengths.float().mean().item(),
            "group/zero_advantage_fraction": all_equal.float().mean().item(),
        }
        metrics |= {f"reward/{name}": sum(values) / len(values) for name, values in parts.items() if name}
        metrics |= mean_metrics(updates)
        if reference is not None:
            metrics["objective/kl"] = (logprobs - ref_logprobs).sum(1).mean().item()
        postfix = {"score": "objective/scores", "kl": "objective/kl", "eps": "eps"}
        progress.set_postfix({name: f"{metrics[key]:.3g}" for name, key in postfix.items() if key in metrics})

        # ---- 7f  evaluate, save
        last = iteration == plan.iterations
        if eval_prompts and (last or (args.eval_every is not None and iteration % args.eval_every == 0)):
            metrics["eval/scores"] = evaluate(iteration)
        columns = dict(iteration=[iteration] * batch_size, index=range(batch_size))
        columns |= dict(prompt=[p.text for p in episode_prompts], completion=batch.completions, score=scores.tolist())
        if is_main and is_sample_iteration(iteration, plan.iterations, args.num_sample_generations):
            samples = to_rows(**columns)[:: args.k][:4]  # one of a group
            append_jsonl(output_dir / "samples.jsonl", samples)
            show_samples(accelerator, samples, step)
        if is_main and args.save_rollouts:
            columns |= dict(token_ids=batch.token_ids, logprobs=trim_rows(logprobs, batch.lengths))
            columns["ref_logprobs"] = trim_rows(ref_logprobs, batch.lengths) if reference else [None] * batch_size
            columns["advantage"] = advantages.tolist()
            append_jsonl(output_dir / "rollouts.jsonl", to_rows(**columns))
        if is_main:
            append_jsonl(output_dir / "metrics.jsonl", [metrics])
        accelerator.log(metrics, step=step)
        state |= {"iteration": iteration, "step": step}
        signals = accelerator.gather(torch.tensor([max(received, default=0)], device=device))  # [processes]
        stopped_by = 0 if last else int(signals.max())  # a process may have seen its signal in another iteration
        if stopped_by or (args.save_every is not None and (last or iteration % args.save_every == 0)):
            save_checkpoint(accelerator, state, output_dir, args.save_total_limit)
        if stopped_by:
            break

    # -------------------------------------------------- end --------------------------------------------------
    progress.close()
    if not stopped_by and not (output_dir / "model").exists():
        with writing(output_dir / "model"):
            save_model(accelerator, model, policy, tokenizer, args, output_dir)
    if is_main:
        print(closing_line(args, plan, state, output_dir, time.time() - started), flush=True)
    # in this order: a process group that is destroyed under a living model can hang at exit
    accelerator.wait_for_everyone()
    model, optimizer, policy = accelerator.free_memory(model, optimizer, policy)
    accelerator.end_training()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if stopped_by:
        raise SystemExit(128 + stopped_by)


# ============================================== 8  entry point ===========================================
if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
