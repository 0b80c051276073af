"""Tally against TRL 1.16, or against another checkout of Tally, on the same work: seconds per step, and memory.

    python benchmark/smollm2/prepare.py                                      # the model of cases c and d
    python benchmark/throughput/throughput.py                                # all cases, some hours on two cores
    python benchmark/throughput/throughput.py --case a b                     # some; results of the others stay
    python benchmark/throughput/throughput.py --device cuda --case a g i     # on the first GPU
    python benchmark/throughput/throughput.py --case a --against ../before   # another checkout instead of TRL
    python benchmark/throughput/throughput.py --plot                         # the chart of the results that are there

For every case and algorithm, the two run in turn, A B A B, each in a process of its own, with equal settings and equal
micro-batches. The first two steps of every run are dropped. The numbers are medians over the other steps of all pairs.
The seconds of a step last until the next step begins, so the start of the program does not count. They have four parts:

    generation     sampling
    logprobs       log-probabilities without gradient: the reference's, and the old policy's in TRL's RLOO
    train          forward, backward, clipping and the optimizer
    rest           tokenizing, decoding, scores and metrics

CPU seconds are those of all threads of the process. Memory
is the peak of the process's resident memory, with models and libraries (Linux). On a GPU it is the most that PyTorch's
tensors had at once. Every process gets the variables of `KEEP_FREED_MEMORY`. With them glibc keeps the memory of freed
tensors. Otherwise it gives large ones back at once, and the kernel clears their pages again for the next tensor.

The program checks that both trained on the same number of episodes, that their prompts had the same lengths at every
step, and that they sampled the same number of tokens. The tolerance for tokens is 10 %, or 3 standard errors where
lengths are sampled. If a check fails, the exit status is 1. `trl_worker.py` has TRL's configuration, with the reasons.
TRL needs an environment of its own, with the versions of requirements.txt:

    python -m venv benchmark/.trl_environment
    benchmark/.trl_environment/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.23.0 accelerate==1.15.0

TRL has no PPO, so `ppo` needs `--against`. The results against TRL are merged into throughput.json, case by case, and
the chart beside it is drawn from that file.
"""

import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import BENCHMARK, read_rows

os.environ["HF_HUB_OFFLINE"] = "1"

RESULT = Path(__file__).with_suffix(".json")
DROPPED_STEPS = 2
TOKEN_TOLERANCE = 0.10
PARTS = ("generation", "logprobs", "train", "rest")
KEEP_FREED_MEMORY = dict(MALLOC_TRIM_THRESHOLD_=str(2**31 - 1), MALLOC_MMAP_MAX_="0")

DEFAULTS = dict(reward="share_of_letters", k=4, batch=16, forced=False, kl_coef=0.05)
DEFAULTS |= dict(dtype="float32", learning_rate=1e-6)
FORCED = DEFAULTS | dict(forced=True)  # Every completion has all its tokens, because no EOS ends it.
SMOLLM2 = "SmolLM2-135M"
LARGE = "a random Llama of 42M parameters with a vocabulary of 151,936"
CASES = {
    "a": DEFAULTS | dict(about="the default policy, 6 and up to 8 tokens", batch=256, completion_tokens=8),
    "b": FORCED | dict(about="a random Llama of 0.9M parameters, 12 and 64 tokens", batch=64, completion_tokens=64),
    "c": FORCED | dict(about=f"{SMOLLM2}, 30 and 32 tokens", completion_tokens=32),
    "c-bf16": FORCED | dict(about=f"{SMOLLM2} in bfloat16, 30 and 32 tokens", completion_tokens=32),
    "d": DEFAULTS | dict(about=f"{SMOLLM2}, 300 to 400 and up to 53 tokens", completion_tokens=53),
    "g": FORCED | dict(about=f"{LARGE}, 32 and 128 tokens", batch=8, completion_tokens=128),
    "h": FORCED | dict(about=f"{LARGE}, 32 and 384 tokens", batch=8, completion_tokens=384),
    "i": FORCED | dict(about="a random Llama of 1.2B parameters in bfloat16, 64 and 128 tokens; it needs a GPU"),
}
CASES["a"] |= dict(reward="exact_match")
CASES["c-bf16"] |= dict(dtype="bfloat16")
CASES["d"] |= dict(micro_batch=8)  # With 16 TRL does not fit into 24 GiB.
CASES["i"] |= dict(reward="place_in_group", batch=64, micro_batch=8, completion_tokens=128, dtype="bfloat16")
BILLION = dict(num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192)

# what the prompts of SmolLM2's cases are made of, in a drawn order and cut to length
SENTENCES = RESULT.with_name("sentences.txt").read_text().splitlines()
# the model ends most such answers by itself, which it does not when asked for a summary
TITLE = "Give this post a title of at most five words."
Case = Literal["a", "b", "c", "c-bf16", "d", "g", "h", "i"]


@dataclass
class Args:
    case: tuple[Case, ...] = ("a", "b", "c", "c-bf16", "d", "g", "h")  # what to run
    algorithms: tuple[Literal["rloo", "grpo", "ppo"], ...] = ("rloo", "grpo")  # which to run
    against: Path | None = None  # another checkout, which takes the place of TRL; the results are only printed
    device: Literal["cpu", "cuda"] = "cpu"  # where both run
    pairs: int = 2  # runs of each program, in turn
    steps: int = 5  # iterations of a run, with the two that are dropped: an optimizer step each, in PPO two
    threads: int = os.cpu_count() or 1  # of each program
    trl_python: Path = BENCHMARK / ".trl_environment" / "bin" / "python"  # of an environment with TRL
    seed: int = 1  # of the prompts and, counted up from pair to pair, of the samples
    plot: bool = False  # run nothing: draw the chart of the results that are there


# ---- models and prompts


def random_llama(folder: Path, vocabulary: int, hidden: int, layers: int, dtype: str = "float32", **more) -> str:
    """Write a Llama with random weights and a tokenizer of `vocabulary` words, `w2` and so on -> its path."""
    logging.disable_progress_bar()
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(2, vocabulary))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", eos_token="<eos>", model_max_length=1024)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=4)
    ids = dict(vocab_size=vocabulary, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    config = LlamaConfig(**(sizes | more), **ids, tie_word_embeddings=True, max_position_embeddings=1024)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def post(draw: random.Random, tokenizer, tokens: int, chat: bool) -> dict:
    """A row whose prompt, as both programs render it, has exactly so many tokens: sentences in a drawn order, cut."""
    while True:  # until a cut falls on the number
        words = " ".join(draw.sample(SENTENCES, len(SENTENCES))).split()
        for count in range(tokens // 3, len(words)):
            prompt = text = " ".join(words[:count])
            if chat:
                prompt = [{"role": "system", "content": "You write short titles."}]
                prompt += [{"role": "user", "content": f"{text}\n\n{TITLE}"}]
                text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            length = len(tokenizer(text)["input_ids"])
            if length == tokens:
                return {"prompt": prompt}
            if length > tokens:
                break


def model_and_rows(name: str, count: int, folder: Path, seed: int) -> tuple[str, list[dict]]:
    """The model folder of a case and its first `count` rows."""
    draw = random.Random(seed)
    if name == "a":
        rows = read_rows(BENCHMARK / "default" / "train.jsonl")
        return str(BENCHMARK / "default" / "policy"), (rows * (count // len(rows) + 1))[:count]
    if name in "bghi":
        vocabulary, tokens = {"b": (256, 12), "i": (128_256, 64)}.get(name, (151_936, 32))
        prompts = [[f"w{draw.randrange(2, vocabulary)}" for _ in range(tokens)] for _ in range(count)]
        rows = [{"prompt": " ".join(words)} for words in prompts]
        sizes = {"b": dict(hidden=128, layers=4), "i": dict(hidden=2048, layers=16, dtype="bfloat16") | BILLION}
        return random_llama(folder / "llama", vocabulary, **sizes.get(name, dict(hidden=256, layers=4))), rows
    model = BENCHMARK / "smollm2" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = range(300, 401) if name == "d" else [30]
    return str(model), [post(draw, tokenizer, draw.choice(lengths), chat=name == "d") for _ in range(count)]


# ---- runs


def run(worker: Path, job: dict, folder: Path, python: str = sys.executable) -> dict:
    """Run a worker script on a job in a process of its own -> what it measured."""
    job_file, result_file = folder / "job.json", folder / "result.json"
    folder.mkdir(parents=True)
    job_file.write_text(json.dumps(job | dict(output_dir=str(folder / "run"))))
    environment = os.environ | KEEP_FREED_MEMORY
    environment |= dict(OMP_NUM_THREADS=str(job["threads"]), TOKENIZERS_PARALLELISM="false")
    with open(folder / "log.txt", "w") as log:
        command = [python, worker, job_file, result_file]
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    return json.loads(result_file.read_text())


def check(where: str, job: dict, ours: list[dict], theirs: list[dict]):
    """Stop where the two did not do the same work."""
    for pair in zip(ours, theirs, strict=True):
        counts = [result["episodes"] for result in pair]
        lengths = [[(x["prompt_tokens"], x["longest_prompt"]) for x in result["steps"]] for result in pair]
        if counts != [job["steps"] * job["batch"]] * 2 or lengths[0] != lengths[1]:
            raise SystemExit(f"{where}: {counts} episodes; prompt tokens (sum, longest) of each step: {lengths}")
    tokens = [[step["tokens"] for result in runs for step in result["steps"]] for runs in (ours, theirs)]
    means = [statistics.mean(counts) for counts in tokens]
    error = sum(statistics.variance(counts) / len(counts) for counts in tokens) ** 0.5  # 0 for forced lengths
    if abs(means[0] - means[1]) > max(TOKEN_TOLERANCE * means[1], 3 * error):
        raise SystemExit(f"{where}: {means} tokens a step were sampled (standard error {error:.1f})")


def summary(runs: list[dict], batch: int) -> dict:
    """Medians over the measured steps of all runs, in seconds; memory in GiB, the most of any run."""
    steps = [step for result in runs for step in result["steps"][DROPPED_STEPS:]]
    seconds = statistics.median(step["seconds"] for step in steps)
    by_run = [[step["seconds"] for step in result["steps"][DROPPED_STEPS:]] for result in runs]
    return dict(
        seconds_per_step=seconds,
        cpu_seconds_per_step=statistics.median(step["cpu"] for step in steps),
        episodes_per_second=batch / seconds,
        tokens_per_second=statistics.median(step["tokens"] / step["seconds"] for step in steps),
        tokens_per_episode=statistics.mean(step["tokens"] for step in steps) / batch,
        ended=statistics.mean(step["ended"] for step in steps) / batch,
        parts={part: statistics.median(step[part] for step in steps) for part in PARTS},
        peak_gib=max(result["peak_gib"] for result in runs),
        seconds_by_run=[statistics.median(seconds) for seconds in by_run],
    )


def make_job(name: str, algorithm: str, args: Args, folder: Path) -> dict:
    """What the workers need to know of a case with one algorithm; its model and prompts are written to the folder."""
    folder.mkdir()
    case = CASES[name] | (dict(k=1, updates=2) if algorithm == "ppo" else {})
    model, rows = model_and_rows(name, args.steps * case["batch"] // case["k"], folder, args.seed)
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = {key: value for key, value in case.items() if key != "about"}
    job.setdefault("micro_batch", case["batch"])
    job |= dict(algorithm=algorithm, model=model, dataset=str(dataset), device=args.device)
    return job | dict(steps=args.steps, threads=args.threads, seed=args.seed)


def measure(name: str, algorithm: str, args: Args, folder: Path) -> dict:
    """Run a case with one algorithm: the pairs and the checks -> its entry in the results."""
    job, ours, theirs = make_job(name, algorithm, args, folder), [], []
    for pair in range(args.pairs):
        job["seed"] = args.seed + pair
        ours.append(run(RESULT.parent / "tally_worker.py", job, folder / f"tally_{pair}"))
        worker, python = RESULT.parent / "trl_worker.py", args.trl_python
        if args.against:
            worker, python = args.against.resolve() / "benchmark" / "throughput" / "tally_worker.py", sys.executable
        theirs.append(run(worker, job, folder / f"other_{pair}", python))
    check(f"case {name}, {algorithm}", job, ours, theirs)
    tally, other = summary(ours, job["batch"]), summary(theirs, job["batch"])
    rates = ("episodes_per_second", "tokens_per_second")
    settings = {key: job[key] for key in job if key not in ("algorithm", "model", "dataset", "seed", "threads")}
    processors = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return dict(
        case=name,
        algorithm=algorithm,
        about=CASES[name]["about"],
        **{f"{rate}_ratio": tally[rate] / other[rate] for rate in rates},
        cpu_seconds_ratio=other["cpu_seconds_per_step"] / tally["cpu_seconds_per_step"],
        trl=other,
        memory_ratio=tally["peak_gib"] / other["peak_gib"],
        tally=tally,
        settings=settings | dict(pairs=args.pairs, dropped_steps=DROPPED_STEPS, seed=args.seed),
        environment=KEEP_FREED_MEMORY,
        date=datetime.date.today().isoformat(),
        processor=processors[0] if processors else "unknown",
        device=ours[0]["device"],
        threads=args.threads,
        versions=dict(python=sys.version.split()[0], **theirs[0]["versions"]),
    )


# ---- results


def merge(entry: dict):
    """Put an entry in the place of the old one of the same device, threads, case and algorithm, in order."""
    kept = {(e["device"], e["threads"], e["case"], e["algorithm"]): e for e in json.loads(RESULT.read_text()) + [entry]}
    order = [(case, algorithm) for case in CASES for algorithm in ("rloo", "grpo")]
    place = lambda e: (e["device"], e["threads"], order.index((e["case"], e["algorithm"])))  # noqa: E731
    merged = sorted(kept.values(), key=place)
    RESULT.write_text(json.dumps(merged, indent=1) + "\n")


def show(entry: dict, other: str):
    speed, cpu = entry["episodes_per_second_ratio"], entry["cpu_seconds_ratio"]
    print(f"case {entry['case']}, {entry['algorithm']}: {speed:.2f} times as fast as {other}; {cpu:.2f} in CPU seconds")
    for program, side in (("Tally", entry["tally"]), (other, entry["trl"])):
        seconds = f"{side['seconds_per_step']:.3g} s and {side['cpu_seconds_per_step']:.3g} CPU s a step"
        print(f"    {program}: {seconds}, {side['peak_gib']:.2f} GiB", flush=True)


def plot():
    """For each case the time of TRL and Tally, cut into parts, in units of TRL's."""
    entries = json.loads(RESULT.read_text())
    figure, [[axis]] = draw.panels(1, 1, width=9, height=1 + 0.5 * len(entries))
    axis.grid(visible=False)
    names = dict(generation="generation", logprobs="log-probabilities", train="training", rest="rest")
    for row, entry in enumerate(entries):
        unit = entry["trl"]["seconds_per_step"]
        for offset, side, name in ((-0.2, "trl", "TRL"), (0.2, "tally", "Tally")):
            left = 0.0
            for part, color in zip(PARTS, ("#1f6fb4", "#e0a030", "#d1495b", "#9a9a9a")):
                width = entry[side]["parts"][part] / unit
                label = names[part] if row == 0 and side == "trl" else None
                axis.barh(row + offset, width, left=left, label=label, height=0.36, color=color)
                left += width
            text = f" {name} {entry[side]['seconds_per_step']:.3g} s"
            if side == "tally":
                text += f", {entry['episodes_per_second_ratio']:.2f} times as fast"
            axis.text(left, row + offset, text, va="center", fontsize=7.5)
    axis.set_yticks(range(len(entries)), [f"{entry['case']}  {entry['algorithm'].upper()}" for entry in entries])
    axis.invert_yaxis()
    axis.set(xlim=(0, 1.6), xlabel="seconds per step, TRL's = 1")
    axis.legend(frameon=False, loc="lower right")
    draw.save(figure, RESULT.with_suffix(".png"))


def main(args: Args):
    if not args.plot:
        work = Path(tempfile.mkdtemp(prefix="throughput_"))
        print(f"logs are in {work}", flush=True)
        for name in args.case:
            for algorithm in args.algorithms:
                entry = measure(name, algorithm, args, work / f"{name}_{algorithm}")
                show(entry, str(args.against or "TRL"))
                if not args.against:
                    merge(entry)
    if not args.against:
        plot()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
