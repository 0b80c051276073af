"""One measured run of a script for throughput.py, in a process of its own.

    python benchmark/throughput/tally_worker.py JOB.json RESULT.json

It imports the script as it is, and replaces in the module only what a measurement needs, see `measure`. The rewards
here are those of both programs. They get the whole batch, the k episodes of a group side by side.
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

ROOT = Path(__file__).resolve().parents[2]


def texts_of(completions: list) -> list[str]:
    """The texts of completions, each a text or a list of one chat message."""
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]


def exact_match(completions: list, answer: list[str], **_) -> list[float]:
    """1 where the completion, stripped, is the row's `answer`, else 0."""
    return [float(text.strip() == right) for text, right in zip(texts_of(completions), answer)]


def share_of_letters(completions: list, **_) -> list[float]:
    """The share of a completion's characters that are `e` or `1`, 0 for an empty one."""
    return [sum(character in "e1" for character in text) / max(len(text), 1) for text in texts_of(completions)]


def peak_bytes() -> int:
    """The most memory that this process had. Not getrusage's ru_maxrss: a process inherits that from its parent."""
    return 2**10 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))


def result_of(steps: list[dict], moments: list, episodes: int, packages: tuple[str, ...]) -> dict:
    """What a worker writes. moments: those at which each step began, and the end of the last one"""
    for step, (begin, end) in zip(steps, itertools.pairwise(moments), strict=True):
        step["seconds"] = end - begin
        step["rest"] = step["seconds"] - step["generation"] - step["logprobs"] - step["train"]
    versions = {name: version(name) for name in packages}
    return dict(steps=steps, episodes=episodes, peak_gib=peak_bytes() / 2**30, versions=versions)


def flags(job: dict) -> list[str]:
    """The script's command line for a job."""
    words = f"--model-path {job['model']} --dataset {job['dataset']} --reward {__file__}:{job['reward']}"
    words += f" --total-episodes {job['steps'] * job['batch']} --batch-size {job['batch']}"
    words += f" --per-device-train-batch-size {job['micro_batch']} --response-length {job['completion_tokens']}"
    words += f" --kl-coef {job['kl_coef']} --learning-rate {job['learning_rate']}"
    words += f" --save-every None --temperature 1 --max-grad-norm 1 --num-sample-generations 0 --seed {job['seed']}"
    group = {"rloo": "--rloo-k", "grpo": "--num-generations"}[job["algorithm"]]
    return f"{words} {group} {job['k']} --output-dir {job['output_dir']}".split()


def measure(job: dict) -> dict:
    """Run a job's steps -> the seconds and counts of each, and the run's memory."""
    import tyro  # not in TRL's environment

    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.path.insert(0, str(ROOT))
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
            started = time.perf_counter()
            result = function(*args, **inputs)
            steps[-1][part] += time.perf_counter() - started
            return result

        setattr(module, name, clocked)

    def keep_lengths(*args):
        prompts = load_prompts(*args)
        prompt_lengths.extend(len(prompt.token_ids) for prompt in prompts)
        return prompts

    def in_file_order(seed, num_prompts, first, count):  # as TRL takes them here
        moments.append(time.perf_counter())
        order = [position % num_prompts for position in range(first, first + count)]
        lengths = [prompt_lengths[i] for i in order]
        counts = dict(prompt_tokens=job["k"] * sum(lengths), longest_prompt=max(lengths))
        steps.append(dict(generation=0.0, logprobs=0.0, **counts))
        return order

    def before_an_epoch(*args):
        steps[-1].setdefault("train", -time.perf_counter())
        return draw_mini_batches(*args)

    def after_the_updates(rows):
        steps[-1]["train"] += time.perf_counter()
        return mean_metrics(rows)

    put_a_clock_around("sample", "generation")
    put_a_clock_around("run_pass", "logprobs")
    module.load_prompts = keep_lengths
    module.draw_prompts = in_file_order
    module.finish = lambda *args: moments.append(time.perf_counter())
    module.draw_mini_batches = before_an_epoch
    module.mean_metrics = after_the_updates
    module.main(tyro.cli(module.Args, args=flags(job)))
    rows = [json.loads(line) for line in open(Path(job["output_dir"]) / "metrics.jsonl", encoding="utf-8")]
    rows = [row for row in rows if row["iteration"] > 0]
    for step, row in zip(steps, rows, strict=True):
        step["tokens"] = round(row["response_length_mean"] * job["batch"])
    return result_of(steps, moments, rows[-1]["episode"], ("torch", "transformers", "accelerate"))


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(measure(job)))
