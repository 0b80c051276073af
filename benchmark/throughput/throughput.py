"""Tally against TRL 1.16 on the same work: seconds per step, and memory.

    python benchmark/throughput/throughput.py        # all cases, on one core
    python benchmark/throughput/throughput.py a      # one; results of the others stay

It runs in the environment of benchmark/parity/trl_trainer.py, and sees no GPU: gpu.py is for GPUs.
For every case and algorithm, the two run in turn, A B A B, each in a process of its own with one
thread, with equal settings and equal micro-batches. The first two steps of every run are dropped.
A run's number is the median over its other steps. `ratio` is the median of the pairs' ratios, which
lie between `lowest` and `highest`. The seconds of a step last until the next step begins, so the
start of the program does not count. `token_ms` are the milliseconds of sampling a token, `update_s`
the seconds of a step without sampling.

Memory is the peak of the resident memory, with models and used libraries (Linux). On a GPU it
is the most that PyTorch's tensors had at once. Every process gets the variables of `ENVIRONMENT`.
With them glibc keeps the memory of freed tensors. Otherwise it gives large ones back at once, and
the kernel clears their pages again for the next tensor. Case i does without, as users do, and has
runs with larger pieces of logits.

What fails leaves its error in the row: a run, or a pair whose prompts had other lengths, or which
sampled other numbers of tokens. The tolerance for those is 10 %. `trl_worker.py` has TRL's
configuration, with the reasons. Writes throughput.json. A smoke run has a tiny model, and uses TRL
if it is installed.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import (
    BENCHMARK,
    DEFAULTS,
    K_FLAGS,
    POLICY,
    Part,
    apart,
    column,
    main,
    read_rows,
    run_here,
    write_rows,
)
from tally_worker import force_lengths, watch
from trl_worker import train

RESULT = Path(__file__).with_suffix(".json")
DROPPED_STEPS = 2
LIMIT = 1800  # seconds of a run
ends = inf  # the time at which runs are stopped
EDITS = []  # functions that change the script of every run
world = cache(tempfile.TemporaryDirectory)  # gets models and prompts
MALLOC = dict(MALLOC_TRIM_THRESHOLD_=str(2**31 - 1), MALLOC_MMAP_MAX_="0")
ENVIRONMENT = MALLOC | dict(PYTORCH_NVML_BASED_CUDA_CHECK="1")  # A look for GPUs starts none.


@dataclass
class Case:
    about: str
    model: str  # `built-in`, or one of LLAMAS, in a smoke run `tiny`
    batch: int
    micro_batch: int
    prompt_tokens: int
    completion_tokens: int
    steps: int
    pairs: int
    algorithms: tuple[str, ...] = ("rloo", "grpo")
    forced: bool = True  # Every completion has all its tokens, because no EOS ends it.
    reward: str = "benchmark/throughput/rewards.py:share_of_letters"
    dtype: str = "float32"  # or bfloat16, where the weights are float32 all the same
    lora_r: int | None = None
    kl_coef: float = 0.05
    keeps_memory: bool = True  # with MALLOC


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads")
LLAMAS = {  # random Llamas
    "tiny": (256, 256, 768, 4, 4, 4),
    "128": (256, 128, 384, 4, 4, 4),
    "42M": (151_936, 256, 768, 4, 4, 4),
    "135M": (49_152, 576, 1536, 30, 9, 3),  # as SmolLM2
    "0.5B": (151_936, 896, 4864, 24, 14, 2),  # as Qwen2.5
    "7B": (32_000, 4096, 14_336, 32, 32, 8),  # as Mistral
}
LARGE = "a random Llama of 42M parameters with a vocabulary of 151,936"
SMALL = "a random Llama with the sizes of SmolLM2-135M"
CASES = {
    "a": Case("the default policy, 6 and up to 8 tokens", "built-in", 256, 256, 6, 8, 60, 5),
    "c": Case(f"{SMALL}, 30 and 32 tokens", "135M", 16, 16, 30, 32, 5, 2),
    # With micro-batches of 16 TRL does not fit into 24 GiB.
    "d": Case(f"{SMALL}, 350 and 53 tokens", "135M", 16, 8, 350, 53, 4, 2, ("rloo",)),
    "e": Case("a random Llama of 4 layers of 128, 5 and 32 tokens", "128", 64, 64, 5, 32, 20, 3),
    "h": Case(f"{LARGE}, 32 and 128 tokens", "42M", 8, 8, 32, 128, 5, 3, ("rloo",)),
    "i": Case(f"{LARGE}, 32 and 256 tokens, no KL", "42M", 8, 8, 32, 256, 4, 5, ("grpo",)),
}
CASES["i"] = replace(CASES["i"], kl_coef=0.0, keeps_memory=False)
CASES["a"] = replace(CASES["a"], forced=False, reward="exact_match")

# what a smoke run changes
TINY = dict(model="tiny", batch=8, micro_batch=4, prompt_tokens=12, completion_tokens=8)
TINY |= dict(forced=True, steps=4, pairs=1, reward=Case.reward)


# ---- models and prompts


def random_llama(folder: Path, sizes: dict) -> dict:
    """Write a Llama of these SIZES with random weights, and a tokenizer whose words are `w2` and so
    on. A CPU would need minutes for one of 7B."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(sizes["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="w0", eos_token="w1", model_max_length=2048)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    ids = dict(pad_token_id=0, bos_token_id=None, eos_token_id=1)
    config = LlamaConfig(**sizes, **ids, tie_word_embeddings=True, max_position_embeddings=2048)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return {}


def make_world(case: Case) -> str:
    """Write a case's prompts, and its model where there is none. Returns the model's folder."""
    folder = Path(world().name)
    count = case.steps * case.batch // 4
    if case.model == "built-in":
        model = POLICY
        rows = read_rows(BENCHMARK / "default" / "train.jsonl")[:count]
    else:
        sizes = dict(zip(SIZES, LLAMAS[case.model]))
        model = folder / case.model
        if not model.exists():
            start(random_llama, model, sizes)
        words = [f"w{i}" for i in range(2, sizes["vocab_size"])]
        draw = random.Random(1)
        rows = []
        for _ in range(count):
            rows.append(dict(prompt=" ".join(draw.choices(words, k=case.prompt_tokens))))
    write_rows(folder / "prompts.jsonl", rows)
    return str(model)


# ---- runs


def check(ours: list[dict], theirs: list[dict]):
    """Stop where the two did not do the same work."""
    steps = [sum(column(runs, "steps"), []) for runs in (ours, theirs)]
    for name, tolerance in dict(prompt_tokens=0, tokens=0.1).items():
        one, two = (statistics.mean(column(some, name)) for some in steps)
        if abs(one - two) > tolerance * two:
            raise SystemExit(f"{name} of a step: {one}, {two}")


def seconds_of(result: dict) -> float:
    """The median over a run's measured steps."""
    return statistics.median(column(result["steps"][DROPPED_STEPS:], "seconds"))


def summary(case: Case, runs: list[dict], ours: list[dict]) -> dict:
    """What was measured, or the first run that failed. Memory is the most of any run."""
    for run in runs:
        if "steps" not in run:
            return run
    steps = sum((run["steps"][DROPPED_STEPS:] for run in runs), [])
    found = dict(
        peak_gib=max(column(runs, "peak_gib")),
        peaks_by_run=column(runs, "peak_gib"),
        seconds_by_run=list(map(seconds_of, runs)),
        token_ms=1000 * statistics.median(column(steps, "sampling")) / case.completion_tokens,
        update_s=statistics.median(step["seconds"] - step["sampling"] for step in steps),
        stages=runs[0].get("stages"),
    )
    if runs is ours or not all("steps" in run for run in ours):
        return found
    check(ours, runs)
    ratios = [seconds_of(run) / seconds_of(own) for run, own in zip(runs, ours)]
    return found | dict(ratio=statistics.median(ratios), lowest=min(ratios), highest=max(ratios))


def start(function, *job) -> dict:
    """What a run in a process of its own returns."""
    return apart(function, *job, seconds=max(0, min(LIMIT, ends - time.time())))


def tally(script: str, flags: str, *edits) -> dict:
    return start(run_here, (script, flags, *EDITS, *edits))


def in_turn(variants: dict, case: Case, script: str, flags: str) -> dict:
    """The row of a script: runs of it, of variants with other flags and edits, and of TRL. Ratios
    are to the first of them."""
    row = asdict(case) | dict(measured_steps=case.steps - DROPPED_STEPS)
    folder = world().name
    job = row | dict(algorithm=script, model=make_world(case), folder=f"{folder}/trl")
    job["dataset"] = f"{folder}/prompts.jsonl"
    edits = [watch, force_lengths] if case.forced else [watch]
    runs = {name: [] for name in variants}
    for seed, name in product(range(1, case.pairs + 1), variants):
        if name == "trl":
            run = start(train, job | dict(seed=seed))
        else:
            own, *more = variants[name]
            run = tally(script, f"{flags} {own} --seed {seed}", *edits, *more)
        runs[name].append(run)
    ours = next(iter(runs.values()))
    return row | {name: summary(case, runs[name], ours) for name in runs}


def measure(row_of, case: Case, jobs: dict, smoke: bool) -> list[dict]:
    """The row of each job, printed as it comes."""
    os.environ |= DEFAULTS | ENVIRONMENT
    for name in () if case.keeps_memory else MALLOC:
        del os.environ[name]
    if smoke:
        case = replace(case, **TINY)
        jobs = dict([*jobs.items()][-1:])
    model = make_world(case)
    rows = []
    for (script, flags, *edits), names in jobs.items():
        flags = flags.replace("WORLD", world().name).replace("MODEL", model)
        try:
            row = names | row_of(case, script, flags, *edits)
        except SystemExit as error:
            row = names | dict(failed=str(error))
        print(json.dumps(row), flush=True)
        if smoke and "'failed'" in str(row):
            raise SystemExit(1)
        rows.append(row)
    return rows


# ---- the parts of the program


def flags_of(case: Case) -> str:
    return (
        "--model-path MODEL --dataset WORLD/prompts.jsonl "
        f"--reward {case.reward} "
        f"--total-episodes {case.steps * case.batch} --batch-size {case.batch} "
        f"--per-device-train-batch-size {case.micro_batch} "
        f"--response-length {case.completion_tokens} --kl-coef {case.kl_coef} "
        f"--learning-rate 1e-6 --save-every None --dtype {case.dtype} "
        f"--lora-r {case.lora_r} "
        "--temperature 1 --max-grad-norm 1 --num-sample-generations 0"
    )


FEW = f"--total-episodes 32 --batch-size 8 --per-device-train-batch-size 4 --reward {Case.reward}"
FEW += " --response-length 8"


def part(row_of, case: Case, runs: list[tuple] = (), flags: str = "") -> Part:
    """Its runs are, if no others are given, those of a case, one for each algorithm."""
    own = [(dict(algorithm=name), name, f"{K_FLAGS[name]} 4") for name in case.algorithms]
    measured = partial(measure, row_of, case)
    return Part(runs or own, f"{flags_of(case)} {flags}", measure=measured, short=FEW)


def pairs(case: Case, runs: list[tuple] = (), **variants) -> Part:
    """Tally, and beside it these variants."""
    return part(partial(in_turn, dict(tally=[""]) | variants), case, runs)


def read_at_once(module, count):
    module.LOGITS_AT_ONCE = count


PARTS = {name: pairs(case, trl=[]) for name, case in CASES.items()}
PARTS["i"] = pairs(CASES["i"], large=["", partial(read_at_once, count=2**24)], trl=[])
for each in PARTS.values():
    each.needs = "TRL"

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(__doc__, RESULT, PARTS)
