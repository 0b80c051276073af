"""One measured run of a script for throughput.py, in a process of its own.

    python benchmark/throughput/tally_worker.py JOB.json RESULT.json

It imports the script as it is, and replaces in the module only what a measurement needs:

    sample, run_whole_batch    get a clock; the second makes the passes of the reference, and of PPO's values
    load_prompts               notes the length of each prompt
    draw_prompts               hands out the prompts in the order of the file, as TRL does here, and marks the beginning
                               of an iteration
    save_model                 writes nothing, and marks the end of the last iteration
    find_eos_ids               where the lengths are forced: no token ends a completion
    time_metrics               waits until the GPU is done with the last update

The job's `device` is `cpu` or `cuda`. Without it, it is `cpu`. A GPU works on while the program goes on, so each clock
waits for it first. The memory of a GPU is the most that PyTorch's tensors had at once.
"""

import importlib
import itertools
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROLLOUT_PARTS = {"sample": "generation", "run_whole_batch": "logprobs"}  # a function of the script, and its part


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
    if job.get("device", "cpu") == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.path.insert(0, str(FOLDER.parent.parent))
    import torch

    torch.set_num_threads(job["threads"])
    module = importlib.import_module(job["algorithm"])
    if job["forced"]:
        module.find_eos_ids = lambda *args: [-1]  # no token ends an episode
    return module


def measure(module, job: dict) -> dict:
    """Run a job's steps -> the seconds and counts of each, and the run's memory."""
    import torch
    import tyro

    begins = []  # the moment at which each iteration begins, and the end of the last one; wall and CPU seconds
    steps = []
    prompt_lengths = []
    load_prompts = module.load_prompts
    time_metrics = module.time_metrics
    on_gpu = job.get("device", "cpu") == "cuda"

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def put_a_clock_around(name: str, part: str):
        function = getattr(module, name)

        def clocked(*args, **inputs):
            started = now()
            result = function(*args, **inputs)
            steps[-1][part] += now() - started
            if part == "generation":
                steps[-1]["longest_completion"] = int(result["lengths"].max())
            return result

        setattr(module, name, clocked)

    def keep_lengths(*args):
        prompts = load_prompts(*args)
        prompt_lengths.extend(len(prompt.token_ids) for prompt in prompts)
        return prompts

    def in_file_order(seed, num_prompts, first, count):
        begins.append((now(), time.process_time()))
        order = [position % num_prompts for position in range(first, first + count)]
        lengths = [prompt_lengths[i] for i in order]
        counts = dict(prompt_tokens=job["k"] * sum(lengths), longest_prompt=max(lengths))
        steps.append(dict(generation=0.0, logprobs=0.0, **counts))
        return order

    def after_the_update(*args):
        now()
        return time_metrics(*args)

    for name, part in ROLLOUT_PARTS.items():
        put_a_clock_around(name, part)
    module.load_prompts = keep_lengths
    module.draw_prompts = in_file_order
    module.save_model = lambda *args: begins.append((now(), time.process_time()))
    module.time_metrics = after_the_update
    module.main(tyro.cli(module.Args, args=flags(job)))
    rows = [json.loads(line) for line in open(Path(job["output_dir"]) / "metrics.jsonl", encoding="utf-8")]
    rows = [row for row in rows if row["iteration"] > 0]
    for step, row, (begin, end) in zip(steps, rows, itertools.pairwise(begins), strict=True):
        step["seconds"], step["cpu"] = end[0] - begin[0], end[1] - begin[1]
        step["train"] = row["time/train_s"]
        step["rest"] = step["seconds"] - step["generation"] - step["logprobs"] - step["train"]
        step["tokens"] = round(row["response_length_mean"] * job["batch"])
        step["ended"] = row["val/num_eos_tokens"]
    peak = torch.cuda.max_memory_allocated() if on_gpu else read_kilobytes("VmHWM") * 2**10
    return dict(
        steps=steps,
        episodes=rows[-1]["episode"],
        peak_gib=peak / 2**30,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        versions={name: version(name) for name in ("torch", "transformers", "accelerate")},
    )


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(measure(load_script(job), job)))
