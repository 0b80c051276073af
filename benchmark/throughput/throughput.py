"""Tally against TRL 1.16 on the same work: seconds per step, and memory.

    python benchmark/smollm2/prepare.py              # the model of cases c and d
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
the kernel clears their pages again for the next tensor.

A run that fails leaves its error in the row. The program stops if the prompts of the two had other
lengths at a step, or if they sampled other numbers of tokens. The tolerance for tokens is 10 %, or
3 standard errors where lengths are sampled. `trl_worker.py` has TRL's configuration, with the
reasons. Writes throughput.json. A smoke run has a tiny model, and uses TRL if it is installed.
"""

import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
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
TOKEN_TOLERANCE = 0.10
LIMIT = 1800  # seconds of a run
ENVIRONMENT = dict(MALLOC_TRIM_THRESHOLD_=str(2**31 - 1), MALLOC_MMAP_MAX_="0")
ENVIRONMENT["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # A look for GPUs starts none.


@dataclass
class Case:
    about: str
    model: str  # `built-in`, `SmolLM2`, or one of LLAMAS, in a smoke run `tiny`
    batch: int
    micro_batch: int
    prompt_tokens: tuple[int, int]  # least and most
    completion_tokens: int
    forced: bool  # Every completion has all its tokens, because no EOS ends it.
    steps: int
    pairs: int
    algorithms: tuple[str, ...] = ("rloo", "grpo")
    reward: str = "benchmark/throughput/rewards.py:share_of_letters"
    dtype: str = "float32"  # or bfloat16, where the weights are float32 all the same
    k: int = 4
    kl_coef: float = 0.05
    learning_rate: float = 1e-6


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads")
LLAMAS = {  # random Llamas; "0.5B" has the sizes of Qwen2.5-0.5B
    "tiny": (256, 256, 768, 4, 4, 4),
    "128": (256, 128, 384, 4, 4, 4),
    "42M": (151_936, 256, 768, 4, 4, 4),
    "0.5B": (151_936, 896, 4864, 24, 14, 2),
    "wide": (32_000, 4096, 14_336, 8, 32, 8),
}
LARGE = "a random Llama of 42M parameters with a vocabulary of 151,936"
CASES = {
    "a": Case(
        "the default policy, 6 and up to 8 tokens", "built-in", 256, 256, (6, 6), 8, False, 60, 5
    ),
    "c": Case("SmolLM2-135M, 30 and 32 tokens", "SmolLM2", 16, 16, (30, 30), 32, True, 5, 2),
    # With micro-batches of 16 TRL does not fit into 24 GiB.
    "d": Case(
        "SmolLM2-135M, 300 to 400 and up to 53 tokens",
        "SmolLM2",
        16,
        8,
        (300, 400),
        53,
        False,
        4,
        2,
    ),
    "e": Case(
        "a random Llama of 4 layers of 128, 5 and 32 tokens", "128", 64, 64, (5, 5), 32, True, 20, 3
    ),
    "h": Case(f"{LARGE}, 32 and 384 tokens", "42M", 8, 8, (32, 32), 384, True, 5, 3),
}
CASES["a"].reward = "exact_match"
CASES["d"].algorithms = ("rloo",)
CASES["h"].algorithms = ("grpo",)

# what a smoke run changes
TINY = dict(model="tiny", batch=8, micro_batch=4, prompt_tokens=(12, 12), completion_tokens=8)
TINY |= dict(forced=True, steps=3, pairs=1, reward=Case.reward)

# what the prompts of SmolLM2's cases are made of, in a drawn order and cut to length
SENTENCES = RESULT.with_name("sentences.txt").read_text().splitlines()
# The model ends most such answers by itself, which it does not when asked for a summary.
TITLE = "Give this post a title of at most five words."


# ---- models and prompts


def random_llama(folder: Path, sizes: dict):
    """Write a Llama of these SIZES with random weights, and a tokenizer whose words are `w2` and so
    on."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(2, sizes["vocab_size"])} | {"<pad>": 0, "<eos>": 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", eos_token="<eos>", model_max_length=1024)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    ids = dict(pad_token_id=0, bos_token_id=None, eos_token_id=1)
    config = LlamaConfig(**sizes, **ids, tie_word_embeddings=True, max_position_embeddings=1024)
    LlamaForCausalLM(config).save_pretrained(folder)


def post(draw: random.Random, tokenizer, tokens: int, chat: bool) -> dict:
    """A row whose prompt, as both programs render it, has exactly so many tokens: sentences in a
    drawn order, cut."""
    while True:  # until a cut falls on the number
        words = " ".join(draw.sample(SENTENCES, len(SENTENCES))).split()
        for count in range(tokens // 3, len(words)):
            prompt = " ".join(words[:count])
            text = prompt
            if chat:
                user = {"role": "user", "content": f"{text}\n\n{TITLE}"}
                prompt = [{"role": "system", "content": "You write short titles."}, user]
                text = tokenizer.apply_chat_template(
                    prompt, tokenize=False, add_generation_prompt=True
                )
            length = len(tokenizer(text)["input_ids"])
            if length == tokens:
                return {"prompt": prompt}
            if length > tokens:
                break


def make_world(case: Case) -> Path:
    """Write a case's prompts, and its model where there is none. Returns the model's folder."""
    count = case.steps * case.batch // case.k
    draw_words = random.Random(1)
    model = world / case.model
    if case.model == "built-in":
        model = POLICY
        rows = read_rows(BENCHMARK / "default" / "train.jsonl")[:count]
    elif case.model == "SmolLM2":
        from transformers import AutoTokenizer

        model = BENCHMARK / "smollm2" / "model"
        tokenizer = AutoTokenizer.from_pretrained(model)
        least, most = case.prompt_tokens
        is_chat = least < most
        rows = [
            post(draw_words, tokenizer, draw_words.randint(least, most), is_chat)
            for _ in range(count)
        ]
    else:
        sizes = dict(zip(SIZES, LLAMAS[case.model]))
        if not model.exists():
            random_llama(model, sizes)
        rows = []
        for _ in range(count):
            words = draw_words.choices(range(2, sizes["vocab_size"]), k=case.prompt_tokens[0])
            rows.append(dict(prompt=" ".join(f"w{word}" for word in words)))
    write_rows(world / "prompts.jsonl", rows)
    return model


# ---- runs


def check(ours: list[dict], theirs: list[dict]):
    """Stop where the two did not do the same work."""
    steps = [sum(column(runs, "steps"), []) for runs in (ours, theirs)]
    for name in ("prompt_tokens", "longest_prompt"):
        one, two = (column(some, name) for some in steps)
        if one != two:
            raise SystemExit(f"{name} of each step: {one}, {two}")
    tokens = [column(some, "tokens") for some in steps]
    one, two = map(statistics.mean, tokens)
    # 0 for forced lengths
    error = sum(statistics.variance(counts) / len(counts) for counts in tokens) ** 0.5
    if abs(one - two) > max(TOKEN_TOLERANCE * two, 3 * error):
        raise SystemExit(f"{one} and {two} tokens a step were sampled (error {error:.1f})")


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
        seconds_by_run=list(map(seconds_of, runs)),
        token_ms=1000 * statistics.median(column(steps, "sampling")) / case.completion_tokens,
        update_s=statistics.median(step["seconds"] - step["sampling"] for step in steps),
        kernels=runs[0].get("kernels"),
    )
    if runs is ours or not all("steps" in run for run in ours):
        return found
    check(ours, runs)
    ratios = [seconds_of(run) / seconds_of(own) for run, own in zip(runs, ours)]
    return found | dict(ratio=statistics.median(ratios), lowest=min(ratios), highest=max(ratios))


def in_turn(variants: dict, case: Case, script: str, flags: str) -> dict:
    """The row of a script: runs of it, of variants with other flags and edits, and of TRL. Ratios
    are to the first of them."""
    job = asdict(case) | dict(algorithm=script, model=str(make_world(case)))
    job |= dict(dataset=f"{world}/prompts.jsonl", folder=f"{world}/trl")
    edits = [watch, force_lengths] if case.forced else [watch]
    runs = {name: [] for name in variants}
    for seed, name in product(range(1, case.pairs + 1), variants):
        if name == "trl":
            runs[name].append(apart(train, job | dict(seed=seed), seconds=LIMIT))
        else:
            own, *change = variants[name]
            words = (script, f"{flags} {own} --seed {seed}", *edits, *change)
            runs[name].append(apart(run_here, words, seconds=LIMIT))
    row = dict(
        about=case.about,
        batch=case.batch,
        micro_batch=case.micro_batch,
        pairs=case.pairs,
        measured_steps=case.steps - DROPPED_STEPS,
    )
    ours = next(iter(runs.values()))
    return row | {name: summary(case, runs[name], ours) for name in runs}


def measure(row_of, case: Case, jobs: dict, smoke: bool) -> list[dict]:
    """The row of each job, printed as it comes."""
    os.environ |= DEFAULTS | ENVIRONMENT
    if smoke:
        case = replace(case, **TINY)
        jobs = dict([*jobs.items()][-1:])
    model = make_world(case)
    rows = []
    for (script, flags, *edits), names in jobs.items():
        flags = flags.replace("WORLD", str(world)).replace("MODEL", str(model))
        row = names | row_of(case, script, flags, *edits)
        print(json.dumps(row), flush=True)
        if smoke and "'failed'" in str(row):
            raise SystemExit(1)
        rows.append(row)
    return rows


def start(*program):
    """`main`, with a folder for models and prompts."""
    global world
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        main(*program)


# ---- the parts of the program


def flags_of(case: Case) -> str:
    return (
        "--model-path MODEL --dataset WORLD/prompts.jsonl "
        f"--reward {case.reward} "
        f"--total-episodes {case.steps * case.batch} --batch-size {case.batch} "
        f"--per-device-train-batch-size {case.micro_batch} "
        f"--response-length {case.completion_tokens} --kl-coef {case.kl_coef} "
        f"--learning-rate {case.learning_rate} --save-every None --dtype {case.dtype} "
        "--temperature 1 --max-grad-norm 1 --num-sample-generations 0"
    )


FEW = f"--total-episodes 24 --batch-size 8 --per-device-train-batch-size 4 --reward {Case.reward}"
FEW += " --response-length 8"


def part(row_of, case: Case, runs: list[tuple] = (), flags: str = "") -> Part:
    """Its runs are, if no others are given, those of a case, one for each algorithm."""
    own = [(dict(algorithm=name), name, f"{K_FLAGS[name]} {case.k}") for name in case.algorithms]
    measured = partial(measure, row_of, case)
    return Part(runs or own, f"{flags_of(case)} {flags}", measure=measured, short=FEW)


PARTS = {}
for name, case in CASES.items():
    PARTS[name] = part(partial(in_turn, dict(tally=[""], trl=[])), case)
    PARTS[name].needs = "TRL"

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start(__doc__, RESULT, PARTS)
