"""One measured run of a script for throughput.py, in a process of its own.

    python benchmark/throughput/tally_worker.py rloo.py --total-episodes 256

It prints the seconds and counts of each step, and the peak of memory. It imports the script as it
is, and replaces in the module only what a measurement needs:

    sample, forward_pass               get a clock. The second is for passes without gradient
    load_prompts                       notes the length of each prompt
    draw_prompts                       hands out the prompts in the order of the file, as TRL does
                                       here, and marks the beginning of an iteration
    draw_mini_batches, mean_metrics    mark the beginning and the end of training
    finish                             writes nothing, and marks the end of the last iteration
    find_eos_ids                       where the lengths are forced: no token ends a completion
"""

import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import import_script


@dataclass
class Options:
    script: tyro.conf.Positional[str]
    """rloo.py or grpo.py. Its flags follow"""
    forced: bool = False
    """no token ends a completion"""


def now() -> float:
    """The time. A GPU works on while the program goes on, so this waits until it has done all that
    it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def print_result(steps: list[dict], moments: list[float]):
    """moments: those at which each step began, and the end of the last one"""
    import torch

    for step, (begin, end) in zip(steps, itertools.pairwise(moments), strict=True):
        step["seconds"] = end - begin
        step["rest"] = step["seconds"] - step["generation"] - step["logprobs"] - step["train"]
    # Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    peak = int(line.split()[1]) * 2**10
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps(dict(steps=steps, peak_gib=peak / 2**30)))


def main(options: Options, flags: list[str]):
    import torch

    module = import_script(options.script)
    args = tyro.cli(module.Args, args=flags)
    if options.forced:
        module.find_eos_ids = lambda *args: [-1]
    moments, steps, prompt_lengths = [], [], []
    load_prompts, draw_mini_batches, mean_metrics = (
        module.load_prompts,
        module.draw_mini_batches,
        module.mean_metrics,
    )

    def put_a_clock_around(name: str, part: str):
        function = getattr(module, name)

        def clocked(*args, **inputs):
            # a pass of training, or the check of a model at its load
            if torch.is_grad_enabled() or not steps:
                return function(*args, **inputs)
            started = now()
            result = function(*args, **inputs)
            steps[-1][part] += now() - started
            return result

        setattr(module, name, clocked)

    def keep_lengths(*args):
        prompts = load_prompts(*args)
        prompt_lengths.extend(len(prompt.token_ids) for prompt in prompts)
        return prompts

    def in_file_order(seed, num_prompts, first, count):
        moments.append(now())
        order = [position % num_prompts for position in range(first, first + count)]
        lengths = [prompt_lengths[i] for i in order]
        counts = dict(prompt_tokens=args.k * sum(lengths), longest_prompt=max(lengths))
        steps.append(dict(generation=0.0, logprobs=0.0, **counts))
        return order

    def before_an_epoch(*args):
        steps[-1].setdefault("train", -now())
        return draw_mini_batches(*args)

    def after_the_updates(rows):
        steps[-1]["train"] += now()
        return mean_metrics(rows)

    put_a_clock_around("sample", "generation")
    put_a_clock_around("forward_pass", "logprobs")
    module.load_prompts = keep_lengths
    module.draw_prompts = in_file_order
    module.finish = lambda *args: moments.append(now())
    module.draw_mini_batches = before_an_epoch
    module.mean_metrics = after_the_updates
    module.main(args)
    print_result(steps, moments)


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
