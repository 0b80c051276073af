"""Tally against TRL 1.16 on the same work: seconds per step, tokens per second, memory, and where the time goes.

    python benchmark/smollm2/prepare.py                               # the model of cases c to f
    python benchmark/throughput/throughput.py                         # all cases, some hours on two cores
    python benchmark/throughput/throughput.py --case a b              # some; results of the others stay
    python benchmark/throughput/throughput.py --plot                  # only the table and the chart, of what is there

For every case and algorithm, Tally and TRL run in turn, A B A B, each in a process of its own. Both have the same model
folder, prompts in the same order, group size, batch, length limit, KL coefficient with a reference model, learning
rate, precision and threads. The micro-batch is the same, too. It is the whole batch, except in case d. The first two
steps of every run are dropped. The numbers are medians over the other steps of all pairs. The seconds of a step last
until the next step begins, so the start of the program does not count. They have four parts:

    generation     sampling
    logprobs       log-probabilities without gradient: the reference's, and the old policy's in TRL's RLOO
    train          forward, backward, clipping and the optimizer
    rest           tokenizing, decoding, scores and metrics

The floor is the time of the bare model's passes for the same work. It computes every padded token, and repeats every
prompt k times (`floor_worker.py`). Memory is the peak of the process's resident memory, with models and libraries
(Linux).

Every process gets the environment variables of `KEEP_FREED_MEMORY`: Tally's, TRL's and the floor's. With them glibc
keeps the memory of freed tensors. Otherwise it gives large ones back at once, and the kernel clears their pages again
for the next tensor. The results name these variables, too.

The program checks that both trained on the same number of episodes, that their prompts had the same lengths at every
step, and that they sampled the same number of tokens. The tolerance for tokens is 10 %, or 3 standard errors where
lengths are sampled. If a check fails, the exit status is 1. `trl_worker.py` has TRL's configuration, with the reasons.
TRL needs an environment of its own. Without `--trl-python` one is made in benchmark/.trl_environment:

    python -m venv trl && trl/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.23.0 accelerate==1.15.0

TRL's current release has no PPO. For `--algorithms ppo` the table has only Tally's own figures, and how far they are
from the floor. PPO makes two updates for each batch, and its value model has the size of the policy.

The results are merged into throughput.json, case by case. The chart beside it is drawn from that file.
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
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"

RESULT = Path(__file__).with_suffix(".json")
BENCHMARK = RESULT.parent.parent
TRL_ENVIRONMENT = BENCHMARK / ".trl_environment"
TRL_VERSION = "1.16.0"
DROPPED_STEPS = 2
TOKEN_TOLERANCE = 0.10
RUN_TOLERANCE = 0.15  # between the runs of one program
PARTS = ("generation", "logprobs", "train", "rest")
SIDES = ("tally", "trl", "floor")
KEEP_FREED_MEMORY = dict(MALLOC_TRIM_THRESHOLD_=str(2**31 - 1), MALLOC_MMAP_MAX_="0")

BOTH = ("rloo", "grpo")  # what TRL has, too
ALL = (*BOTH, "ppo")
PPO = dict(k=1, updates=2)
CASES = {  # `aim`: how many times TRL's episodes per second
    "a": dict(
        about="the default policy and task",
        algorithms=ALL,
        reward="exact_match",
        k=4,
        batch=256,
        completion_tokens=8,
        aim=dict(rloo=2.0, grpo=1.7),
    ),
    "b": dict(
        about="random Llama of 0.9M parameters, 12 / 64 tokens",
        algorithms=ALL,
        k=4,
        batch=64,
        completion_tokens=64,
        forced=True,
        aim=dict(rloo=1.0, grpo=1.0),
    ),
    "c": dict(
        about="SmolLM2-135M, 30 / 32 tokens",
        algorithms=ALL,
        k=4,
        batch=16,
        completion_tokens=32,
        forced=True,
        aim=dict(rloo=2.0, grpo=1.7),
    ),
    "c-bf16": dict(
        about="the same in bfloat16",
        algorithms=BOTH,
        k=4,
        batch=16,
        completion_tokens=32,
        forced=True,
        dtype="bfloat16",
        aim=dict(rloo=2.0, grpo=1.7),
    ),
    "d": dict(
        about="SmolLM2-135M, the shape of TL;DR: 300 to 400 / up to 53 tokens",
        algorithms=("rloo",),
        k=4,
        batch=16,
        micro_batch=8,  # TRL at 16 does not fit into 24 GiB
        completion_tokens=53,
        aim=dict(rloo=3.5),
    ),
    "e": dict(
        about="SmolLM2-135M, late in training: 3 of 4 groups have equal scores, no KL; 30 / 32 tokens",
        algorithms=("rloo",),
        reward="one_group_in_four",
        k=4,
        batch=16,
        completion_tokens=32,
        forced=True,
        kl_coef=0.0,
        aim=dict(rloo=3.0),
    ),
    "f": dict(
        about="SmolLM2-135M, large groups: 120 / up to 64 tokens",
        algorithms=("rloo",),
        k=16,
        batch=32,
        completion_tokens=64,
        aim=dict(rloo=2.5),
    ),
    "g": dict(
        about="a large vocabulary: random Llama of 42M parameters, 151,936 words, 32 / 128 tokens",
        algorithms=("rloo",),
        k=4,
        batch=8,
        completion_tokens=128,
        forced=True,
        aim=dict(rloo=2.3),
    ),
    "h": dict(
        about="the same, 32 / 384 tokens",
        algorithms=("grpo",),
        k=4,
        batch=8,
        completion_tokens=384,
        forced=True,
        aim=dict(grpo=1.7),
    ),
}
# forced: every completion has all its tokens, no EOS ends it
CASE_DEFAULTS = dict(reward="share_of_letters", forced=False, kl_coef=0.05, dtype="float32", learning_rate=1e-6)

# what the prompts of SmolLM2's cases are made of, in a drawn order and cut to length
SENTENCES = """My sister and I have shared a small apartment in the city for almost three years now.
Last month she told me that her boyfriend would be staying with us until he finds a new job.
I said that a week or two would be fine, but he has been here for more than a month.
He does not pay any rent, he eats our food, and he leaves his clothes all over the living room.
When I asked her about it, she said that I was being selfish and that family should help each other.
I work long shifts at a hospital and I really need a quiet place where I can sleep during the day.
He plays loud video games in the afternoon and invites his friends without asking anybody.
Yesterday I came home after a night shift and found four strangers sitting in my kitchen.
I got angry, we had a big fight, and she has not talked to me since then.
Our parents think that I should just move out and let the two of them keep the apartment.
The problem is that my name is on the lease and I paid the whole deposit myself.
I have saved some money, but not enough to pay for a second deposit at the moment.
A friend from work offered me a room that will be free at the end of the summer.
I love my sister and I do not want to lose her over something like this.
At the same time I feel that nobody in my family takes me seriously when I complain.
I tried to write down some rules for the apartment, but he laughed and threw the paper away.
My boss has already noticed that I am tired and that I make more mistakes than before.
Two years ago there was a similar situation with another boyfriend, and it ended very badly.
She promised me back then that she would always ask me before somebody moves in.
The landlord does not know about him yet, and I am afraid that we could lose the apartment.
I thought about calling the landlord myself, but that feels like going behind her back.
She says he has had three interviews this week and that one of them went really well.
I have heard that before, and nothing has changed so far.
On the weekend I am supposed to drive to the coast with both of them for a birthday.
I do not know whether I should go or stay at home and pack my things.
My best friend says that I should set a clear date and tell them what happens after it.
I am bad at conflicts and I usually give in before the talk has really started.
Part of me also feels guilty, because she helped me a lot when I was sick last winter.""".splitlines()
# the model ends most such answers by itself, which it does not when asked for a summary
TITLE = "Give this post a title of at most five words."


@dataclass
class Args:
    case: tuple[str, ...] = tuple(CASES)
    """the cases to run: a b c c-bf16 d e f g h"""
    algorithms: tuple[Literal["rloo", "grpo", "ppo"], ...] = ALL
    """run only these of a case's algorithms"""
    pairs: int = 2
    """runs of each program, in turn"""
    steps: int = 5
    """iterations of a run, the two that are dropped included: an optimizer step each, in PPO two"""
    threads: int = os.cpu_count() or 1
    """threads of each program"""
    trl_python: str | None = None
    """the Python of an environment with TRL (default: one is made in benchmark/.trl_environment)"""
    seed: int = 1
    """of the prompts and, counted up from pair to pair, of the samples"""
    results: str = str(RESULT)
    """where the results are merged into; the chart is beside it"""
    profile: bool = False
    """instead of measuring, write Tally's time by operator, from torch.profiler, to throughput_profile_*.txt beside"""
    plot: bool = False
    """run nothing: show the table and draw the chart of the results that are there"""


# ---- models and prompts


def random_llama(folder: Path, vocabulary: int, hidden: int, layers: int, dtype: str = "float32", **more) -> str:
    """Write a Llama with random weights and a tokenizer of `vocabulary` words, `w2` and so on -> its path.

    dtype: of the weights in the file; more: other sizes of LlamaConfig
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

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


def random_words(draw: random.Random, vocabulary: int, count: int) -> dict:
    """A row with a prompt of `count` words of `random_llama`'s."""
    return {"prompt": " ".join(f"w{draw.randrange(2, vocabulary)}" for _ in range(count))}


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
        rows = [json.loads(line) for line in open(BENCHMARK / "default" / "train.jsonl", encoding="utf-8")]
        return str(BENCHMARK / "default" / "policy"), (rows * (count // len(rows) + 1))[:count]
    if name == "b":
        return random_llama(folder / "llama", 256, 128, 4), [random_words(draw, 256, 12) for _ in range(count)]
    if name in "gh":
        vocabulary = 151_936
        rows = [random_words(draw, vocabulary, 32) for _ in range(count)]
        return random_llama(folder / "llama", vocabulary, hidden=256, layers=4), rows
    model = BENCHMARK / "smollm2" / "model"
    if not model.exists():
        raise SystemExit(f"throughput.py: case {name} needs {model}; run python benchmark/smollm2/prepare.py")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = {"d": range(300, 401), "f": [120]}.get(name, [30])
    return str(model), [post(draw, tokenizer, draw.choice(lengths), chat=name in "df") for _ in range(count)]


# ---- runs


def trl_python(given: str | None) -> str:
    """The Python that runs TRL, after making its environment where there is none."""
    if given is not None:
        return given
    python = TRL_ENVIRONMENT / "bin" / "python"
    if not python.exists():
        same = [f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers", "accelerate")]
        print(f"installing TRL into {TRL_ENVIRONMENT}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", TRL_ENVIRONMENT], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"trl=={TRL_VERSION}", *same], check=True)
    return str(python)


def run(worker: str, job: dict, folder: Path, python: str = sys.executable, limit: float | None = None) -> dict:
    """Run a worker script on a job in a process of its own, at most `limit` seconds -> what it measured."""
    job_file, result_file, log_file = (folder / name for name in ("job.json", "result.json", "log.txt"))
    folder.mkdir(parents=True)
    job_file.write_text(json.dumps(job | dict(output_dir=str(folder / "run"))))
    environment = os.environ | dict(OMP_NUM_THREADS=str(job["threads"]), TOKENIZERS_PARALLELISM="false")
    with open(log_file, "w") as log:
        command = [python, RESULT.parent / worker, job_file, result_file]
        finished = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit)
    if finished.returncode:
        raise SystemExit(f"{worker} ended with status {finished.returncode}; see {log_file}")
    return json.loads(result_file.read_text())


def check(where: str, job: dict, tally: list[dict], trl: list[dict]):
    """Stop where the two did not do the same work."""
    for run_of_tally, run_of_trl in zip(tally, trl, strict=True):
        counts = [result["episodes"] for result in (run_of_tally, run_of_trl)]
        if counts != [job["steps"] * job["batch"]] * 2:
            raise SystemExit(f"throughput.py: {where}: Tally trained on {counts[0]} episodes, TRL on {counts[1]}")
        lengths = [
            [(step["prompt_tokens"], step["longest_prompt"]) for step in result["steps"]]
            for result in (run_of_tally, run_of_trl)
        ]
        if lengths[0] != lengths[1]:
            raise SystemExit(f"throughput.py: {where}: prompt tokens (sum, longest) by step differ: {lengths}")
    tokens = [[step["tokens"] for result in runs for step in result["steps"]] for runs in (tally, trl)]
    means = [statistics.mean(counts) for counts in tokens]
    error = sum(statistics.variance(counts) / len(counts) for counts in tokens) ** 0.5  # 0 for forced lengths
    if abs(means[0] - means[1]) > max(TOKEN_TOLERANCE * means[1], 3 * error):
        sampled = f"Tally sampled {means[0]:.1f} tokens a step, TRL {means[1]:.1f} (standard error {error:.1f})"
        raise SystemExit(f"throughput.py: {where}: {sampled}: over 10 % apart")


def summary(runs: list[dict], batch: int) -> dict:
    """Medians over the measured steps of all runs, in seconds; memory in GiB, the most of any run."""
    steps = [step for result in runs for step in result["steps"][DROPPED_STEPS:]]
    seconds = statistics.median(step["seconds"] for step in steps)
    tokens = sum(step["tokens"] for step in steps)
    return dict(
        seconds_per_step=seconds,
        episodes_per_second=batch / seconds,
        tokens_per_second=statistics.median(step["tokens"] / step["seconds"] for step in steps),
        tokens_per_episode=tokens / len(steps) / batch,
        ended=sum(step["ended"] for step in steps) / len(steps) / batch,
        parts={part: statistics.median(step[part] for step in steps) for part in PARTS},
        peak_gib=max(result["peak_gib"] for result in runs),
        seconds_by_run=[
            statistics.median(step["seconds"] for step in result["steps"][DROPPED_STEPS:]) for result in runs
        ],
    )


def measure_floor(job: dict, runs: list[dict], folder: Path) -> dict:
    """Medians of the floor, for rows as long as the longest of the measured steps of `runs`."""
    steps = [step for result in runs for step in result["steps"][DROPPED_STEPS:]]
    sizes = {name: round(statistics.median(step[name] for step in steps)) for name in LONGEST}
    result = run("floor_worker.py", job | sizes, folder)
    steps = result["steps"][1:]  # the first has the memory to get
    parts = {part: statistics.median(step[part] for step in steps) for part in (*PARTS[:3], "optimizer")}
    seconds = statistics.median(step["seconds"] for step in steps)
    return dict(seconds_per_step=seconds, parts=parts, peak_gib=result["peak_gib"], **sizes)


LONGEST = ("longest_prompt", "longest_completion")


def make_job(name: str, algorithm: str, args: Args, folder: Path) -> dict:
    """What the workers need to know of a case with one algorithm; its model and prompts are written to the folder."""
    folder.mkdir()
    case = CASE_DEFAULTS | CASES[name] | (PPO if algorithm == "ppo" else {})
    model, rows = model_and_rows(name, args.steps * case["batch"] // case["k"], folder, args.seed)
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = {key: value for key, value in case.items() if key not in ("about", "algorithms", "aim")}
    job.setdefault("micro_batch", case["batch"])
    job |= dict(algorithm=algorithm, model=model, dataset=str(dataset))
    return job | dict(steps=args.steps, threads=args.threads, seed=args.seed)


def profile(name: str, algorithm: str, args: Args, folder: Path):
    """Run a case with one algorithm under torch's profiler, and write the operators that took the most time."""
    result = run("tally_worker.py", make_job(name, algorithm, args, folder) | dict(profile=True), folder / "tally")
    path = Path(args.results).with_name(f"throughput_profile_{name}_{algorithm}.txt")
    path.write_text(result["profile"])
    print(path)


def measure(name: str, algorithm: str, args: Args, folder: Path) -> dict:
    """Run a case with one algorithm: the pairs, the checks, the floor -> its entry in the results."""
    job, tally, trl = make_job(name, algorithm, args, folder), [], []
    for pair in range(args.pairs):
        job["seed"] = args.seed + pair
        tally.append(run("tally_worker.py", job, folder / f"tally_{pair}"))
        if algorithm in BOTH:
            trl.append(run("trl_worker.py", job, folder / f"trl_{pair}", trl_python(args.trl_python)))
        print_run(name, algorithm, job, tally[-1], trl[-1] if trl else None)
    ours = summary(tally, job["batch"])
    floor = measure_floor(job, trl or tally, folder / "floor")
    against_trl = {}
    if trl:
        check(f"case {name}, {algorithm}", job, tally, trl)
        theirs = summary(trl, job["batch"])
        rates = ("episodes_per_second", "tokens_per_second")
        against_trl = {f"{rate}_ratio": ours[rate] / theirs[rate] for rate in rates}
        against_trl |= dict(aim=CASES[name]["aim"][algorithm], trl=theirs)
        against_trl |= dict(memory_ratio=ours["peak_gib"] / theirs["peak_gib"])
    settings = {key: job[key] for key in job if key not in ("algorithm", "model", "dataset", "seed", "threads")}
    processors = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return dict(
        case=name,
        algorithm=algorithm,
        about=CASES[name]["about"],
        **against_trl,
        of_floor=ours["seconds_per_step"] / floor["seconds_per_step"],
        tally=ours,
        floor=floor,
        settings=settings | dict(pairs=args.pairs, dropped_steps=DROPPED_STEPS, seed=args.seed),
        environment=KEEP_FREED_MEMORY,
        prompt_tokens=[step["prompt_tokens"] for step in tally[0]["steps"]],
        date=datetime.date.today().isoformat(),
        processor=processors[0] if processors else "unknown",
        threads=args.threads,
        versions=dict(python=sys.version.split()[0], **(trl or tally)[0]["versions"]),
    )


def print_run(name: str, algorithm: str, job: dict, tally: dict, trl: dict | None):
    """A pair's medians in a line, while the others run."""
    line, seconds = f"{name} {algorithm}:", []
    for program, result in (("Tally", tally), ("TRL", trl)):
        if result is not None:
            steps = result["steps"][DROPPED_STEPS:]
            seconds.append(statistics.median(step["seconds"] for step in steps))
            tokens = sum(step["tokens"] for step in steps) / len(steps) / job["batch"]
            line += f" {program} {seconds[-1]:.3f} s a step, {tokens:.1f} tokens an episode;"
    print(line + (f" {seconds[1] / seconds[0]:.2f}x" if trl else ""), flush=True)


# ---- results


def merge(entries: list[dict], path: Path) -> list[dict]:
    """Put new entries in the place of the old ones of the same threads, case and algorithm, in the cases' order."""
    old = json.loads(path.read_text()) if path.exists() else []
    kept = {(entry["threads"], entry["case"], entry["algorithm"]): entry for entry in old + entries}
    order = [(case, algorithm) for case in CASES for algorithm in ALL]
    merged = sorted(kept.values(), key=lambda e: (e["threads"], order.index((e["case"], e["algorithm"]))))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(merged, indent=1) + "\n")
    return merged


def with_peer(entries: list[dict]) -> list[dict]:
    """Those that were run against TRL."""
    return [entry for entry in entries if "trl" in entry]


def show(entries: list[dict]):
    """The table that the README quotes."""
    columns = "threads|case|algorithm|Tally, s/step|TRL, s/step|ratio|aim|floor, s/step|Tally / floor|GiB: Tally|TRL"
    table = Table(*columns.split("|"), title="Tally and TRL on the same work")
    for entry in entries:
        seconds = {side: f"{entry[side]['seconds_per_step']:.3g}" for side in SIDES if side in entry}
        memory = {side: f"{entry[side]['peak_gib']:.2f}" for side in SIDES if side in entry}
        numbers = [seconds["tally"], "", "", ""]
        if "trl" in entry:
            ratio = f"{entry['episodes_per_second_ratio']:.2f}x"
            numbers = [seconds["tally"], seconds["trl"], ratio, f"{entry['aim']:g}x"]
        numbers += [seconds["floor"], f"{entry['of_floor']:.2f}", memory["tally"], memory.get("trl", "")]
        table.add_row(str(entry["threads"]), entry["case"], entry["algorithm"].upper(), *numbers)
    Console(width=140).print(table)
    for entry in entries:
        for side in ("tally", "trl"):
            seconds = entry[side]["seconds_by_run"] if side in entry else [1]
            if max(seconds) > (1 + RUN_TOLERANCE) * min(seconds):
                runs = ", ".join(f"{x:.3g}" for x in seconds)
                print(f"case {entry['case']}, {entry['algorithm']}: {side} took {runs} s a step; measure again, idle")
    for entry in with_peer(entries):
        if entry["episodes_per_second_ratio"] < entry["aim"]:
            missed = f"{entry['episodes_per_second_ratio']:.2f}x is below the aim of {entry['aim']:g}x"
            print(f"case {entry['case']}, {entry['algorithm']}: {missed}")
        if entry["memory_ratio"] > 1:
            print(
                f"case {entry['case']}, {entry['algorithm']}: more memory than TRL ({entry['memory_ratio']:.2f} of it)"
            )


def plot(entries: list[dict], path: Path):
    """For each case the time of TRL, Tally and the floor, cut into parts, in units of TRL's."""
    figure, [[axis]] = draw.panels(1, 1, width=9, height=1 + 0.62 * len(entries))
    axis.grid(visible=False)
    colors = dict(zip((*PARTS, "optimizer"), ("#1f6fb4", "#e0a030", "#d1495b", "#9a9a9a", "#9a9a9a")))
    names = dict(generation="generation", logprobs="log-probabilities", train="forward and backward", rest="rest")
    for row, entry in enumerate(entries):
        unit = entry["trl"]["seconds_per_step"]
        for offset, side in ((-0.27, "trl"), (0.0, "tally"), (0.27, "floor")):
            left = 0.0
            for part, seconds in entry[side]["parts"].items():
                style = dict(height=0.25, color=colors[part], alpha=0.45 if side == "floor" else 1.0)
                label = names.get(part) if row == 0 and side == "trl" else None
                axis.barh(row + offset, seconds / unit, left=left, label=label, **style)
                left += seconds / unit
            name = {"trl": "TRL", "tally": "Tally", "floor": "floor"}[side]
            text = f" {name} {entry[side]['seconds_per_step']:.3g} s"
            if side == "tally":
                text += f", {entry['episodes_per_second_ratio']:.2f} times as fast"
            axis.text(left, row + offset, text, va="center", fontsize=7.5)
    labels = []
    for entry in entries:
        threads = "1 thread" if entry["threads"] == 1 else f"{entry['threads']} threads"
        labels.append(f"{entry['case']}  {entry['algorithm'].upper()}, {threads}")
    axis.set_yticks(range(len(entries)), labels)
    axis.invert_yaxis()
    axis.set(xlim=(0, 1.6), xlabel="seconds per step, TRL's = 1")
    axis.legend(frameon=False, loc="lower right")
    draw.save(figure, path)


def main(args: Args):
    path = Path(args.results)
    if unknown := set(args.case) - set(CASES):
        raise SystemExit(f"throughput.py: --case {' '.join(sorted(unknown))}: there are {' '.join(CASES)}")
    if args.steps <= DROPPED_STEPS:
        raise SystemExit(f"throughput.py: --steps must be above {DROPPED_STEPS}, the steps that are dropped")
    if not args.plot:
        os.environ |= KEEP_FREED_MEMORY  # of every process that `run` starts
        work = Path(tempfile.mkdtemp(prefix="throughput_"))
        print(f"logs are in {work}", flush=True)
        for name in args.case:
            for algorithm in CASES[name]["algorithms"]:
                if algorithm in args.algorithms and args.profile:
                    profile(name, algorithm, args, work / f"{name}_{algorithm}")
                elif algorithm in args.algorithms:
                    merge([measure(name, algorithm, args, work / f"{name}_{algorithm}")], path)
    entries = merge([], path)
    show(entries)
    if with_peer(entries):
        plot(with_peer(entries), path.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
