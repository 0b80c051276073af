"""One measured run of a script for throughput.py and scaling.py, in a process of its own.

    python benchmark/throughput/tally_worker.py JOB.json RESULT.json

It imports the script as it is and replaces, in the module, only what a measurement needs: `on_all_processes`, by which
a rollout makes its passes, gets a clock, `draw_prompts` hands out the prompts in the file's order (as TRL is told to)
and marks where an iteration begins, and `save_model` writes nothing and marks where the last one ended.
"""

import contextlib
import functools
import importlib
import itertools
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def read_kilobytes(name: str) -> int:
    """A line of /proc/self/status: VmHWM is the most memory this process had, VmRSS what it has now, in KiB.

    Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    """
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(f"{name}:")))


def flags(job: dict) -> list[str]:
    """The script's command line for a job."""
    values = {
        "model-path": job["model"],
        "dataset": job["dataset"],
        "reward": f"{FOLDER / 'rewards.py'}:{job['reward']}",
        "total-episodes": job["steps"] * job["batch"],
        "batch-size": job["batch"],
        "per-device-train-batch-size": job["micro_batch"],
        "response-length": job["completion_tokens"],
        "temperature": 1.0,
        "kl-coef": job["kl_coef"],
        "learning-rate": job["learning_rate"],
        "max-grad-norm": 1.0,
        "dtype": job["dtype"],
        "num-sample-generations": 0,
        "seed": job["seed"],
        "output-dir": job["output_dir"],
    }
    values |= {
        "rloo": {"rloo-k": job["k"]},
        "grpo": {"num-generations": job["k"]},
        "ppo": {"num-ppo-epochs": job.get("updates")},
    }[job["algorithm"]]
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def load_script(job: dict):
    """Import the script, with the job's number of threads and, for forced lengths, without an EOS."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.path.insert(0, str(FOLDER.parent.parent))
    import torch

    torch.set_num_threads(job["threads"])
    module = importlib.import_module(job["algorithm"])
    if job["forced"]:
        module.find_eos_ids = lambda *args: [-1]  # no token ends an episode
    return module


def rollout_part(function) -> str:
    """What the function that makes one of a rollout's passes is for: to sample, or else (of the reference, values)."""
    return "logprobs" if isinstance(function, functools.partial) else "generation"


def measure(module, job: dict) -> dict:
    """Run a job's steps -> the seconds and counts of each, and the run's memory; or its `profile`, as a table."""
    import torch
    import tyro

    begins, steps, prompt_lengths = [], [], []

    on_all_processes, load_prompts = module.on_all_processes, module.load_prompts

    def clocked(accelerator, function, *args):
        started, key = time.perf_counter(), rollout_part(function)
        result = on_all_processes(accelerator, function, *args)
        steps[-1][key] += time.perf_counter() - started
        if key == "generation":
            steps[-1]["longest_completion"] = int(result["lengths"].max())
        return result

    def keep_lengths(*args):
        prompts = load_prompts(*args)
        prompt_lengths.extend(len(prompt.token_ids) for prompt in prompts)
        return prompts

    def in_file_order(seed, num_prompts, first, count):
        begins.append(time.perf_counter())
        order = [position % num_prompts for position in range(first, first + count)]
        lengths = [prompt_lengths[i] for i in order]
        counts = dict(prompt_tokens=job["k"] * sum(lengths), longest_prompt=max(lengths))
        steps.append(dict(generation=0.0, logprobs=0.0, **counts))
        return order

    module.on_all_processes, module.load_prompts, module.draw_prompts = clocked, keep_lengths, in_file_order
    module.save_model = lambda *args: begins.append(time.perf_counter())
    with torch.profiler.profile() if job.get("profile") else contextlib.nullcontext() as profile:
        module.main(tyro.cli(module.Args, args=flags(job)))
    if profile is not None:
        return dict(profile=profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))

    rows = [json.loads(line) for line in open(Path(job["output_dir"]) / "metrics.jsonl", encoding="utf-8")]
    rows = [row for row in rows if row["iteration"] > 0]
    for step, row, (begin, end) in zip(steps, rows, itertools.pairwise(begins), strict=True):
        step["seconds"] = end - begin
        step["train"] = row["time/train_s"]
        step["rest"] = step["seconds"] - step["generation"] - step["logprobs"] - step["train"]
        step["rollout_s"] = row["time/rollout_s"]  # as the script logs it: generation, log-probabilities, scores
        step["tokens"] = round(row["response_length_mean"] * job["batch"])
        step["ended"] = row["val/num_eos_tokens"]
    return dict(
        steps=steps,
        episodes=rows[-1]["episode"],
        peak_gib=read_kilobytes("VmHWM") / 2**20,
        versions={name: version(name) for name in ("torch", "transformers", "accelerate")},
    )


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(measure(load_script(job), job)))
