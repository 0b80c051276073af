"""One command for somebody who has a GPU: the speed and memory of rloo.py and grpo.py, beside TRL 1.16, in ten minutes.

    python benchmark/gpu/measure.py                       # on the first GPU, or on the CPU where there is none
    python benchmark/gpu/measure.py --tiny --no-trl       # a tiny model, and Tally alone, in less than a minute

It measures three models: the default policy, a random Llama with 135M parameters, and a random one with 1B. Each run is
a process of its own with a handful of steps. The first two steps are dropped. The numbers are medians of the others:

    rollout     completion tokens, divided by the seconds of a step without its training: sampling, the reference's
                log-probabilities, scores and metrics
    training    completion tokens, divided by the seconds of forward and backward passes and of the optimizer
    memory      the most that PyTorch's tensors had at once on the GPU. On a CPU: of the whole process (Linux)

Both programs do the same work. Every completion has the same number of tokens, and no group has equal scores, so each
episode is trained on. One batch gets one update, with a KL term and a reference model. The weights are float32. On a
GPU, both programs use autocast with bfloat16. ../throughput/trl_worker.py has TRL's settings.

A case that needs more memory than there is gets skipped. A run that takes more than its share of the time left is
stopped. Both are named under the table. TRL needs an environment of its own. Without --trl-python, one is made in
benchmark/.trl_environment. The ten minutes begin after that. If it cannot be made, Tally is measured alone.

The results are written to measure.json, and the table to measure.md beside it.
"""

import datetime
import itertools
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import rich.box
import torch
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "throughput"))
import throughput  # noqa: E402

ALGORITHMS = ("rloo", "grpo")
WORKERS = dict(tally="tally_worker.py", trl="trl_worker.py")
NAMES = dict(tally="Tally", trl="TRL")
# The same for all cases. `place_in_group` gives no two episodes of a group the same score.
WORK = dict(k=4, forced=True, reward="place_in_group", kl_coef=0.05, learning_rate=1e-6, seed=1)
LONG = dict(batch=64, prompt_tokens=64, completion_tokens=128, steps=5)
SHORT = dict(batch=16, prompt_tokens=8, completion_tokens=16, steps=5)
SMOLLM2 = dict(hidden=576, layers=30, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
LLAMA = dict(hidden=2048, layers=16, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8)
SMOLLM2 |= dict(vocabulary=49_152)
LLAMA |= dict(vocabulary=128_256, dtype="bfloat16")  # The file has half the size of one in float32.
CASES = {  # The default policy has its own prompts.
    "default": dict(parameters=0.64e6, batch=256, micro_batch=256, completion_tokens=8, steps=10),
    "135M": LONG | dict(model=SMOLLM2, parameters=135e6, micro_batch=16),
    "1B": LONG | dict(model=LLAMA, parameters=1.24e9, micro_batch=8),
}
TINY = {"tiny": SHORT | dict(model=dict(vocabulary=256, hidden=64, layers=2), parameters=0.12e6, micro_batch=8)}
# float32 weights, gradients and two moments of AdamW, and a reference model; without activations
BYTES_PER_PARAMETER = dict(tally=18, trl=20)
SHORTEST_RUN = 10  # seconds; the start of the libraries takes about as long


@dataclass
class Args:
    tiny: bool = False
    """a tiny model instead of the three"""
    minutes: float = 10.0
    """the time for all runs together; what does not fit is named"""
    trl: bool = True
    """measure TRL, too"""
    trl_python: str | None = None
    """the Python of an environment with TRL (default: one is made in benchmark/.trl_environment)"""
    threads: int = os.cpu_count() or 1
    """threads of each program on the CPU"""
    results: str = str(Path(__file__).with_suffix(".json"))
    """the file of the results; the table is beside it, as .md"""


def describe_device() -> dict:
    """The kind of the device, its name, and its memory in GiB. On a CPU: the memory that is free now."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return dict(kind="cuda", name=properties.name, memory_gib=properties.total_memory / 2**30)
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    free = next(line for line in open("/proc/meminfo") if line.startswith("MemAvailable:"))
    name = names[0] if names else platform.machine()
    return dict(kind="cpu", name=name, memory_gib=int(free.split()[1]) / 2**20)


def find_pythons(args: Args) -> tuple[dict[str, str], list[str]]:
    """The Python of each program that can be measured, and notes on what cannot."""
    pythons = dict(tally=sys.executable)
    if not args.trl:
        return pythons, ["TRL was not measured."]
    try:
        return pythons | dict(trl=throughput.trl_python(args.trl_python)), []
    except (subprocess.CalledProcessError, OSError) as error:
        shutil.rmtree(throughput.TRL_ENVIRONMENT, ignore_errors=True)  # Half of it may be there.
        return pythons, [f"TRL could not be installed, so Tally was measured alone: {error}"]


def make_job(name: str, case: dict, device: dict, threads: int, folder: Path) -> dict:
    """What the workers need to know of a case. Its model and its prompts are written to the folder."""
    folder.mkdir()
    job = WORK | case | dict(device=device["kind"], threads=threads)
    job["dtype"] = "bfloat16" if device["kind"] == "cuda" else "float32"
    prompts = job["steps"] * job["batch"] // job["k"]
    if name == "default":
        job["model"], rows = throughput.model_and_rows("a", prompts, folder, job["seed"])
    else:
        draw, vocabulary = random.Random(job["seed"]), case["model"]["vocabulary"]
        rows = [throughput.random_words(draw, vocabulary, case["prompt_tokens"]) for _ in range(prompts)]
        job["model"] = throughput.random_llama(folder / "model", **case["model"])
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return job | dict(dataset=str(dataset))


def measure(program: str, job: dict, folder: Path, python: str, limit: float) -> dict:
    """Run a program on a job -> its medians. If there are none: the reason, as `skipped` or as `failed`."""
    if limit < SHORTEST_RUN:
        return dict(skipped=f"only {max(limit, 0):.0f} s were left for it")
    try:
        result = throughput.run(WORKERS[program], job, folder, python, limit)
    except subprocess.TimeoutExpired:
        return dict(skipped=f"not done after {limit:.0f} s")
    except SystemExit:
        lines = (folder / "log.txt").read_text(errors="replace").split("\n")
        return dict(failed=next((line for line in reversed(lines) if line.strip()), "no output")[:300])
    tokens = job["batch"] * job["completion_tokens"]
    counts = {step["tokens"] for step in result["steps"]}
    episodes = job["steps"] * job["batch"]
    if counts != {tokens} or result["episodes"] != episodes:
        found = f"{sorted(counts)} tokens a step and {result['episodes']} episodes"
        return dict(failed=f"it counted {found} instead of {tokens} and {episodes}")
    steps = result["steps"][throughput.DROPPED_STEPS :]
    train = statistics.median(step["train"] for step in steps)
    rollout = statistics.median(step["seconds"] - step["train"] for step in steps)
    return dict(
        rollout_tokens_per_second=tokens / rollout,
        training_tokens_per_second=tokens / train,
        peak_memory_gib=result["peak_gib"],
        seconds_per_step=statistics.median(step["seconds"] for step in steps),
        tokens_per_step=tokens,
        versions=result["versions"],
    )


def measure_all(args: Args, device: dict, pythons: dict[str, str], work: Path):
    """Every case, algorithm and program in turn -> an entry for each, as soon as it is there."""
    deadline = time.monotonic() + 60 * args.minutes
    cases = TINY if args.tiny else CASES
    runs = list(itertools.product(cases, ALGORITHMS, pythons))
    jobs, given_up = {}, {}  # by case; by case and program: the reason
    for name, program in itertools.product(cases, pythons):
        needed = cases[name]["parameters"] * BYTES_PER_PARAMETER[program] / 2**30
        if needed > device["memory_gib"]:
            reason = f"needs over {needed:.3g} GiB, and there are {device['memory_gib']:.3g}"
            given_up[name, program] = dict(skipped=reason)
    for number, (name, algorithm, program) in enumerate(runs):
        if (name, program) not in given_up:
            if name not in jobs and time.monotonic() + SHORTEST_RUN < deadline:
                jobs[name] = make_job(name, cases[name], device, args.threads, work / name)
            to_run = sum((name, program) not in given_up for name, _, program in runs[number:])
            limit = (deadline - time.monotonic()) / to_run  # an equal share of the time left
            job = jobs.get(name, {}) | dict(algorithm=algorithm)
            folder = work / f"{name}_{algorithm}_{program}"
            result = measure(program, job, folder, pythons[program], limit)
            if "tokens_per_step" not in result:
                given_up[name, program] = result  # The other algorithm would not do better.
        else:
            result = given_up[name, program]
        yield dict(model=name, algorithm=algorithm, program=program) | result


def markdown(report: dict) -> str:
    """The table of the results, and under it what is not in the table."""
    device = report["device"]
    columns = ["model", "algorithm", "program", "rollout, tokens/s", "training, tokens/s", "peak memory, GiB"]
    table = Table(*columns, box=rich.box.MARKDOWN)
    notes = [f"- {note}" for note in report["notes"]]
    for entry in report["results"]:
        row = [entry["model"], entry["algorithm"].upper(), NAMES[entry["program"]]]
        if "tokens_per_step" in entry:
            numbers = [entry["rollout_tokens_per_second"], entry["training_tokens_per_second"]]
            table.add_row(*row, *(f"{number:,.0f}" for number in numbers), f"{entry['peak_memory_gib']:.2f}")
        else:
            how = "skipped" if "skipped" in entry else "failed"
            notes.append(f"- {', '.join(row)}: {how}: {entry[how]}")
    console = Console(width=120)
    with console.capture() as text:
        console.print(table)
    title = f"{device['name']}, {report['dtype']}, {report['date']}"
    return "\n\n".join([title, text.get().strip(), "\n".join(notes)]).strip() + "\n"


def main(args: Args):
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = first_gpu  # with several, TRL would use them all
    device = describe_device()
    pythons, notes = find_pythons(args)
    print("\n".join(notes), flush=True)
    report = dict(
        device=device,
        dtype="bfloat16" if device["kind"] == "cuda" else "float32",
        date=datetime.date.today().isoformat(),
        threads=args.threads,
        settings=WORK | (TINY if args.tiny else CASES),
        notes=notes,
        results=[],
    )
    path = Path(args.results)
    with tempfile.TemporaryDirectory(prefix="measure_") as work:
        for entry in measure_all(args, device, pythons, Path(work)):
            reason = entry.get("skipped") or entry.get("failed")
            print(entry["model"], entry["algorithm"], entry["program"], reason or "done", sep=", ", flush=True)
            report["results"].append(entry)
            path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(report))
    print(f"\n{markdown(report)}\nwritten to {path} and {path.with_suffix('.md')}")
    if any("failed" in entry for entry in report["results"]):
        raise SystemExit("measure.py: some runs failed")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
