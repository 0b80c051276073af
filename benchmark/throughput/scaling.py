"""How Tally's time and memory grow, on small random Llamas.

    python benchmark/throughput/scaling.py                            # some minutes on two cores

    micro_batches   the same batch in 1, 2, 4, 8 and 16 micro-batches takes about the same time, because the rollout
                    generates once for each batch
    episodes        seconds of an iteration for 16 to 1024 episodes of 32 tokens, in micro-batches of 64
    tokens          seconds of an iteration for 64 episodes of 16 to 512 tokens
    memory          at a vocabulary of 150,000, the peak of each part of an iteration. The unit is one float32 tensor
                    [completion tokens of a micro-batch, vocabulary]

Every run is a process of its own. All completions are forced to their length. The first two iterations of a run are
dropped. The runs of an experiment take turns, and their numbers are medians. `slope` is the slope of log(seconds) over
log(size), in the upper half of the sizes: 1 is linear. `--only memory` runs one experiment, and keeps the results of
the others. Writes scaling.json and .png.
"""

import datetime
import json
import os
import random
import statistics
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tyro
from throughput import DROPPED_STEPS, draw, random_llama, random_words, run

RESULT = Path(__file__).with_suffix(".json")
EXPERIMENTS = ("micro_batches", "episodes", "tokens", "memory")
PROMPT_TOKENS = 12
SMALL = dict(vocabulary=256, hidden=128, layers=4)  # 0.9M parameters
WIDE = dict(vocabulary=150_000, hidden=32, layers=2)  # 5M, nearly all of them the embedding


@dataclass
class Args:
    only: tuple[str, ...] = EXPERIMENTS
    """the experiments to run: micro_batches episodes tokens memory"""
    rounds: int = 2
    """how often each run is made"""
    steps: int = 5
    """iterations of a run, the two that are dropped included"""
    threads: int = os.cpu_count() or 1
    """threads of each run"""
    seed: int = 1
    """of prompts and samples"""
    memory_episodes: int = 32
    """episodes of a micro-batch in the experiment memory, of 64 tokens each"""
    results: str = str(RESULT)
    """where the results are merged into; the plot is beside it"""
    plot: bool = False
    """run nothing: draw the plot of the results that are there"""


def make_job(args: Args, folder: Path, llama: dict, **changes) -> dict:
    """A job for `tally_worker.py`, its model and prompts written to `folder` where they are not yet."""
    job = dict(algorithm="rloo", k=4, batch=64, completion_tokens=32, forced=True, reward="share_of_letters")
    job |= dict(kl_coef=0.05, dtype="float32", learning_rate=1e-6, threads=args.threads, seed=args.seed)
    job |= dict(steps=args.steps) | changes
    job.setdefault("micro_batch", job["batch"])
    model, dataset = folder / f"llama_{llama['vocabulary']}", folder / f"prompts_{llama['vocabulary']}.jsonl"
    if not model.exists():
        random_llama(model, **llama)
        draw = random.Random(args.seed)
        rows = [random_words(draw, llama["vocabulary"], PROMPT_TOKENS) for _ in range(1024)]
        dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return job | dict(model=str(model), dataset=str(dataset))


def measure(args: Args, folder: Path, experiment: str, jobs: dict[int, dict]) -> dict:
    """Run each job, in turn, `rounds` times -> medians of the seconds per iteration and of its parts, by size."""
    steps = {size: [] for size in jobs}
    for turn in range(args.rounds):
        for size, job in jobs.items():
            result = run("tally_worker.py", job, folder / f"{experiment}_{size}_{turn}")
            steps[size] += result["steps"][DROPPED_STEPS:]
            seconds = statistics.median(step["seconds"] for step in result["steps"][DROPPED_STEPS:])
            print(f"{experiment} {size}: {seconds:.3f} s an iteration", flush=True)
    names = ("seconds", "generation", "logprobs", "train")
    return {
        name: [round(statistics.median(step[name] for step in steps[size]), 4) for size in jobs] for name in names
    } | {"size": list(jobs)}


def slope(result: dict) -> float:
    """Of log(seconds) on log(size), over the upper half of the sizes."""
    half = len(result["size"]) // 2
    return float(np.polyfit(np.log(result["size"][half:]), np.log(result["seconds"][half:]), 1)[0])


def experiment(name: str, args: Args, folder: Path) -> dict:
    """Run an experiment -> its entry in the results."""
    if name == "micro_batches":
        counts, result = (1, 2, 4, 8, 16), {}
        for algorithm in ("rloo", "grpo"):
            sizes = dict(algorithm=algorithm, batch=256, completion_tokens=64)
            jobs = {n: make_job(args, folder, SMALL, micro_batch=256 // n, **sizes) for n in counts}
            result[algorithm] = measure(args, folder, f"micro_batches_{algorithm}", jobs)
            seconds = result[algorithm]["seconds"]
            result[algorithm]["slowest_of_fastest"] = max(seconds) / min(seconds)
        return result
    if name == "episodes":
        batches = [16 * 2**i for i in range(7)]
        jobs = {batch: make_job(args, folder, SMALL, batch=batch, micro_batch=min(batch, 64)) for batch in batches}
    elif name == "tokens":
        jobs = {
            tokens: make_job(args, folder, SMALL, completion_tokens=tokens) for tokens in (16, 32, 64, 128, 256, 512)
        }
    else:
        tokens = args.memory_episodes * 64
        sizes = dict(batch=2 * args.memory_episodes, micro_batch=args.memory_episodes, completion_tokens=64, steps=4)
        job = make_job(args, folder, WIDE, **sizes)
        result = run("memory_worker.py", job, folder / "memory")
        unit = tokens * WIDE["vocabulary"] * 4 / 2**30
        units = {part: round(gib / unit, 3) for part, gib in result["parts"].items()}
        print(f"memory: one tensor is {unit:.2f} GiB; peaks, in such tensors: {units}")
        sizes = dict(completion_tokens_of_a_micro_batch=tokens, vocabulary=WIDE["vocabulary"], tensor_gib=unit)
        return sizes | dict(peak_in_tensors=units, **result)
    result = measure(args, folder, name, jobs)
    return result | dict(slope=slope(result))


def plot(results: dict, path: Path):
    """Three panels of seconds and one of memory, of what the results have."""
    figure, [axes] = draw.panels(1, 4, width=3, height=3)
    colors = dict(seconds="#1f6fb4", generation="#e0a030", train="#d1495b")
    labels = dict(seconds="iteration", generation="generation", train="forward and backward")
    if "micro_batches" in results:
        for algorithm, marker in (("rloo", "o-"), ("grpo", "s--")):
            result = results["micro_batches"][algorithm]
            for name, color in colors.items():
                label = labels[name] if algorithm == "rloo" else None
                axes[0].plot(result["size"], result[name], marker, color=color, ms=3.5, lw=1.2, label=label)
        axes[0].set_xscale("log", base=2)
        axes[0].set_xticks(result["size"], result["size"])
        axes[0].set(ylim=(0, None), xlabel="micro-batches of 256 episodes", ylabel="seconds per iteration")
        axes[0].set_title("RLOO (solid), GRPO (dashed)", fontsize=9)
    for axis, name, xlabel in ((axes[1], "episodes", "episodes"), (axes[2], "tokens", "tokens per completion")):
        if name not in results:
            continue
        result = results[name]
        for part, color in colors.items():
            axis.plot(result["size"], result[part], "o-", color=color, ms=3.5, lw=1.2, label=labels[part])
        last = result["seconds"][-1] / result["size"][-1]
        proportional = [last * size for size in result["size"]]
        axis.plot(result["size"], proportional, color="grey", ls=":", lw=1, label="proportional")
        axis.set_xscale("log", base=2)
        axis.set_xticks(result["size"], result["size"])
        axis.set(yscale="log", xlabel=xlabel)
        axis.set_title(f"slope {result['slope']:.2f}", fontsize=9)
    if "memory" in results:
        result = results["memory"]
        names = dict(generation="generation", logprobs="reference's pass", train="forward, backward")
        values = result["peak_in_tensors"]
        axes[3].barh([names[part] for part in values], list(values.values()), color="#1f6fb4", height=0.5)
        axes[3].invert_yaxis()
        axes[3].set_xlabel(f"[{result['completion_tokens_of_a_micro_batch']:,}, 150,000] float32 tensors")
        axes[3].set_title("peak memory", fontsize=9)
    axes[3].grid(visible=False)
    for axis in axes[:3]:
        if axis.lines:
            axis.legend(frameon=False, fontsize=7.5)
    draw.save(figure, path)


def main(args: Args):
    path = Path(args.results)
    if unknown := set(args.only) - set(EXPERIMENTS):
        raise SystemExit(f"scaling.py: --only {' '.join(sorted(unknown))}: there are {' '.join(EXPERIMENTS)}")
    results = json.loads(path.read_text()) if path.exists() else {}
    if not args.plot:
        work = Path(tempfile.mkdtemp(prefix="scaling_"))
        print(f"logs are in {work}", flush=True)
        processors = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        for name in args.only:
            about = dict(date=datetime.date.today().isoformat(), processor=(processors or ["unknown"])[0])
            about |= dict(threads=args.threads, torch=version("torch"), rounds=args.rounds, steps=args.steps)
            results[name] = experiment(name, args, work) | about
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({key: results[key] for key in EXPERIMENTS if key in results}, indent=1) + "\n")
    plot(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
