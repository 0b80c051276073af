"""One measured run of a script for throughput.py, in a process of its own.

    python benchmark/throughput/tally_worker.py JOB.json RESULT.json

It imports the script as it is, and replaces in the module only what a measurement needs:

    sample, forward_pass               get a clock; the second is for passes without gradient
    load_prompts                       notes the length of each prompt
    draw_prompts                       hands out the prompts in the order of the file, as TRL does here, and marks the
                                       beginning of an iteration
    draw_mini_batches, mean_metrics    mark the beginning and the end of training
    finish                             writes nothing, and marks the end of the last iteration
    find_eos_ids                       where the lengths are forced: no token ends a completion
"""

import importlib
import itertools
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
ROLLOUT_PARTS = {"sample": "generation", "forward_pass": "logprobs"}  # a function of the script, and its part


def read_kilobytes(name: str) -> int:
    """A line of /proc/self/status: VmHWM is the most memory this process had, VmRSS what it has now, in KiB.

    Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    """
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(f"{name}:")))


def now(job: dict) -> float:
    """The time. A GPU works on while the program goes on, so this waits until it is done with all that it was given."""
    if job["device"] == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def moment(job: dict) -> tuple[float, float]:
    """Wall and CPU seconds."""
    return now(job), time.process_time()


def result_of(job: dict, steps: list[dict], moments: list, episodes: int, packages: tuple[str, ...]) -> dict:
    """What a worker writes. moments: those at which each step began, and the end of the last one"""
    for step, (begin, end) in zip(steps, itertools.pairwise(moments), strict=True):
        step["seconds"], step["cpu"] = end[0] - begin[0], end[1] - begin[1]
        step["rest"] = step["seconds"] - step["generation"] - step["logprobs"] - step["train"]
    on_gpu = job["device"] == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else read_kilobytes("VmHWM") * 2**10
    return dict(
        steps=steps,
        episodes=episodes,
        peak_gib=peak / 2**30,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        versions={name: version(name) for name in packages},
    )


def flags(job: dict) -> list[str]:
    """The script's command line for a job."""
    words = f"--model-path {job['model']} --dataset {job['dataset']} --reward {FOLDER / 'rewards.py'}:{job['reward']}"
    words += f" --total-episodes {job['steps'] * job['batch']} --batch-size {job['batch']}"
    words += f" --per-device-train-batch-size {job['micro_batch']} --response-length {job['completion_tokens']}"
    words += f" --kl-coef {job['kl_coef']} --learning-rate {job['learning_rate']} --dtype {job['dtype']}"
    words += " --save-every None"
    words += f" --temperature 1 --max-grad-norm 1 --num-sample-generations 0 --seed {job['seed']}"
    own = {"rloo": "--rloo-k {k}", "grpo": "--num-generations {k}", "ppo": "--num-ppo-epochs {updates}"}
    return f"{words} {own[job['algorithm']].format(**job)} --output-dir {job['output_dir']}".split()


def measure(job: dict) -> dict:
    """Run a job's steps -> the seconds and counts of each, and the run's memory."""
    import tyro  # not in TRL's environment

    if job["device"] == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.path.insert(0, str(FOLDER.parent.parent))
    torch.set_num_threads(job["threads"])
    module = importlib.import_module(job["algorithm"])
    if job["forced"]:
        module.find_eos_ids = lambda *args: [-1]  # no token ends an episode
    moments, steps, prompt_lengths = [], [], []
    load_prompts, draw_mini_batches, mean_metrics = module.load_prompts, module.draw_mini_batches, module.mean_metrics

    def put_a_clock_around(name: str, part: str):
        function = getattr(module, name)

        def clocked(*args, **inputs):
            if torch.is_grad_enabled() or not steps:  # a pass of training, or the check of a model at its load
                return function(*args, **inputs)
            started = now(job)
            result = function(*args, **inputs)
            steps[-1][part] += now(job) - started
            return result

        setattr(module, name, clocked)

    def keep_lengths(*args):
        prompts = load_prompts(*args)
        prompt_lengths.extend(len(prompt.token_ids) for prompt in prompts)
        return prompts

    def in_file_order(seed, num_prompts, first, count):
        moments.append(moment(job))
        order = [position % num_prompts for position in range(first, first + count)]
        lengths = [prompt_lengths[i] for i in order]
        counts = dict(prompt_tokens=job["k"] * sum(lengths), longest_prompt=max(lengths))
        steps.append(dict(generation=0.0, logprobs=0.0, **counts))
        return order

    def before_an_epoch(*args):
        steps[-1].setdefault("train", -now(job))
        return draw_mini_batches(*args)

    def after_the_updates(rows):
        steps[-1]["train"] += now(job)
        return mean_metrics(rows)

    for name, part in ROLLOUT_PARTS.items():
        put_a_clock_around(name, part)
    module.load_prompts = keep_lengths
    module.draw_prompts = in_file_order
    module.finish = lambda *args: moments.append(moment(job))
    module.draw_mini_batches = before_an_epoch
    module.mean_metrics = after_the_updates
    module.main(tyro.cli(module.Args, args=flags(job)))
    rows = [json.loads(line) for line in open(Path(job["output_dir"]) / "metrics.jsonl", encoding="utf-8")]
    rows = [row for row in rows if row["iteration"] > 0]
    for step, row in zip(steps, rows, strict=True):
        step["tokens"] = round(row["response_length_mean"] * job["batch"])
        step["ended"] = row["val/num_eos_tokens"]
    return result_of(job, steps, moments, rows[-1]["episode"], ("torch", "transformers", "accelerate"))


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(measure(job)))
