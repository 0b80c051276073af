"""One measured run of a script for throughput.py, in a process of its own.

    python benchmark/throughput/tally_worker.py rloo.py --total-episodes 256

It prints the seconds and counts of each step, and the peak of memory. It imports the script as it
is, and replaces in the module only what a measurement needs:

    load_prompts    notes the length of each prompt
    draw_prompts    hands out the prompts in the order of the file, as TRL does here, and marks the
                    beginning of an iteration
    finish          writes nothing, and marks the end of the last iteration
    find_eos_ids    where the lengths are forced: no token ends a completion
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
    # Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    peak = int(line.split()[1]) * 2**10
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps(dict(steps=steps, peak_gib=peak / 2**30)))


def main(options: Options, flags: list[str]):
    module = import_script(options.script)
    args = tyro.cli(module.Args, args=flags)
    if options.forced:
        module.find_eos_ids = lambda *args: [2**31 - 1]
    moments, steps, prompt_lengths = [], [], []
    load_prompts = module.load_prompts

    def keep_lengths(*args):
        prompts = load_prompts(*args)
        prompt_lengths.extend(len(prompt.token_ids) for prompt in prompts)
        return prompts

    def in_file_order(seed, num_prompts, first, count):
        moments.append(now())
        order = [position % num_prompts for position in range(first, first + count)]
        lengths = [prompt_lengths[i] for i in order]
        steps.append(dict(prompt_tokens=args.k * sum(lengths), longest_prompt=max(lengths)))
        return order

    module.load_prompts = keep_lengths
    module.draw_prompts = in_file_order
    module.finish = lambda *args: moments.append(now())
    module.main(args)
    print_result(steps, moments)


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
