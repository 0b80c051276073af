"""Tally against TRL 1.16 on the same work: seconds per step, and memory.

    python benchmark/smollm2/prepare.py              # the model of cases c and d
    python benchmark/throughput/throughput.py        # all cases, on one core; the last needs a GPU
    python benchmark/throughput/throughput.py a      # one; results of the others stay

It runs in the environment of benchmark/parity/trl_trainer.py. Only the case gpu sees a GPU. For
every case and algorithm, the two run in turn, A B A B, each in a process of its own with one
thread, with equal settings and equal micro-batches. The first two steps of every run are dropped.
A run's number is the median over its other steps. `ratio` is the median of the pairs' ratios, which
lie between `lowest` and `highest`. The seconds of a step last until the next step begins, so the
start of the program does not count.

Memory is the peak of the process's resident memory, with models and libraries (Linux). On a GPU it
is the most that PyTorch's tensors had at once. Every process gets the variables of
`KEEP_FREED_MEMORY`. With them glibc keeps the memory of freed tensors. Otherwise it gives large
ones back at once, and the kernel clears their pages again for the next tensor.

The program stops if the prompts of the two had other lengths at a step, or if they sampled other
numbers of tokens. The tolerance for tokens is 10 %, or 3 standard errors where lengths are sampled.
`trl_worker.py` has TRL's configuration, with the reasons. Writes throughput.json. In a smoke run
Tally alone trains a tiny model.
"""

import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import BENCHMARK, DEFAULTS, K_FLAGS, POLICY, Part, main, read_rows, run, write_rows

RESULT = Path(__file__).with_suffix(".json")
DROPPED_STEPS = 2
TOKEN_TOLERANCE = 0.10
KEEP_FREED_MEMORY = dict(MALLOC_TRIM_THRESHOLD_=str(2**31 - 1), MALLOC_MMAP_MAX_="0")


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
    visible_gpus: str = ""
    k: int = 4
    kl_coef: float = 0.05
    learning_rate: float = 1e-6


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads")
LLAMAS = {  # random Llamas, the largest with the sizes of Qwen2.5-0.5B
    "tiny": (256, 256, 768, 4, 4, 4),
    "42M": (151_936, 256, 768, 4, 4, 4),
    "0.5B": (151_936, 896, 4864, 24, 14, 2),
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
    "h": Case(f"{LARGE}, 32 and 384 tokens", "42M", 8, 8, (32, 32), 384, True, 5, 3),
    "gpu": Case(
        "a random Llama with the sizes of Qwen2.5-0.5B, in bfloat16, 256 and 64 tokens",
        "0.5B",
        64,
        16,
        (256, 256),
        64,
        True,
        6,
        2,
    ),
}
CASES["gpu"].dtype = "bfloat16"
CASES["gpu"].visible_gpus = "0"
CASES["a"].reward = "exact_match"
CASES["d"].algorithms = ("rloo",)
CASES["h"].algorithms = ("grpo",)

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


def make_world(case: Case, world: Path) -> Path:
    """Write a case's prompts, and its model where there is none. Returns the model's folder."""
    count = case.steps * case.batch // case.k
    draw_words = random.Random(1)
    model = world / "llama"
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
        random_llama(model, sizes)
        rows = []
        for _ in range(count):
            words = draw_words.choices(range(2, sizes["vocab_size"]), k=case.prompt_tokens[0])
            rows.append(dict(prompt=" ".join(f"w{word}" for word in words)))
    write_rows(world / "prompts.jsonl", rows)
    return model


# ---- runs


def run_tally(algorithm: str, flags: str, case: Case) -> dict:
    """Run a script, and return what the worker measured, with the tokens of each step."""
    worker = [str(RESULT.with_name("tally_worker.py")), *(["--forced"] if case.forced else [])]
    environment = KEEP_FREED_MEMORY | dict(CUDA_VISIBLE_DEVICES=case.visible_gpus)
    result = run(algorithm, flags, launcher=worker, **environment)
    measured = json.loads(result["output"].splitlines()[-1])
    rows = [row for row in result["metrics"] if row["iteration"] > 0]
    for step, row in zip(measured["steps"], rows, strict=True):
        step["tokens"] = round(row["response_length_mean"] * result["args"]["batch_size"])
        step["ended"] = row["val/num_eos_tokens"]
    return measured


def run_trl(job: dict, world: Path) -> dict:
    """Run TRL's trainer, and return what the worker measured."""
    file = world / "job.json"
    file.write_text(
        json.dumps(job | dict(dataset=str(world / "prompts.jsonl"), folder=str(world / "trl")))
    )
    command = [sys.executable, RESULT.with_name("trl_worker.py"), file]
    environment = os.environ | DEFAULTS | KEEP_FREED_MEMORY
    environment |= dict(CUDA_VISIBLE_DEVICES=job["visible_gpus"])
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"trl_worker.py failed:\n{finished.stderr[-4000:]}")
    return json.loads(finished.stdout.splitlines()[-1])


def check(ours: list[dict], theirs: list[dict]):
    """Stop where the two did not do the same work."""
    for pair in zip(ours, theirs, strict=True):
        lengths = [
            [(x["prompt_tokens"], x["longest_prompt"]) for x in result["steps"]] for result in pair
        ]
        if lengths[0] != lengths[1]:
            raise SystemExit(f"prompt tokens (sum, longest) of each step: {lengths}")
    tokens = [
        [step["tokens"] for result in runs for step in result["steps"]] for runs in (ours, theirs)
    ]
    means = [statistics.mean(counts) for counts in tokens]
    # 0 for forced lengths
    error = sum(statistics.variance(counts) / len(counts) for counts in tokens) ** 0.5
    if abs(means[0] - means[1]) > max(TOKEN_TOLERANCE * means[1], 3 * error):
        raise SystemExit(f"{means} tokens a step were sampled (standard error {error:.1f})")


def summary(runs: list[dict]) -> dict:
    """The median over the measured steps of each run, in seconds; memory in GiB, the most of any
    run."""
    by_run = [[step["seconds"] for step in result["steps"][DROPPED_STEPS:]] for result in runs]
    return dict(
        peak_gib=max(result["peak_gib"] for result in runs),
        seconds_by_run=[statistics.median(seconds) for seconds in by_run],
    )


def find_gpu():
    """Stop where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("The part gpu needs a GPU.")


def compare(case: Case, algorithm: str, flags: str, model: Path, world: Path) -> dict:
    """Run a case with one algorithm: the pairs and the checks. Returns its row."""
    ours, theirs = [], []
    for seed in range(1, case.pairs + 1):
        ours.append(run_tally(algorithm, f"{flags} --seed {seed}", case))
        theirs.append(
            run_trl(asdict(case) | dict(algorithm=algorithm, seed=seed, model=str(model)), world)
        )
    check(ours, theirs)
    tally, trl = summary(ours), summary(theirs)
    ratios = [a / b for a, b in zip(trl["seconds_by_run"], tally["seconds_by_run"])]
    return dict(
        about=case.about,
        batch=case.batch,
        pairs=case.pairs,
        measured_steps=case.steps - DROPPED_STEPS,
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        tally=tally,
        trl=trl,
    )


def measure(case: Case, jobs: dict, smoke: bool) -> list[dict]:
    rows = []
    if smoke and case.model != "built-in":
        case = replace(case, model="tiny")
    with tempfile.TemporaryDirectory() as world:
        world = Path(world)
        model = make_world(case, world)
        for (algorithm, flags), names in jobs.items():
            flags = flags.replace("WORLD", str(world)).replace("MODEL", str(model))
            if smoke:
                run_tally(algorithm, flags, case)
                break
            rows.append(names | compare(case, algorithm, flags, model, world))
    return rows


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


PARTS = {}
for name, case in CASES.items():
    runs = []
    for algorithm in case.algorithms:
        runs.append((dict(algorithm=algorithm), algorithm, f"{K_FLAGS[algorithm]} {case.k}"))
    PARTS[name] = Part(
        runs,
        flags_of(case),
        measure=functools.partial(measure, case),
        short=f"--total-episodes {3 * case.batch} --response-length 8",
        needs="TRL",
    )
PARTS["gpu"].needs += " and a GPU"
PARTS["gpu"].prepare = find_gpu

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
