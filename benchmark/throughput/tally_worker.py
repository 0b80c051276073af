"""What throughput.py replaces in the module of a script, so that its run measures itself."""

import itertools
import time


def now() -> float:
    """The time. A GPU works on while the program goes on, so this waits until it has done all that
    it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(function, *args, **inputs):
    """What a function returns, and its seconds."""
    start = now()
    result = function(*args, **inputs)
    return result, now() - start


def measured(steps: list[dict], moments: list[float]) -> dict:
    """moments: those at which each step began, and the end of the last one"""
    import torch

    for step, (begin, end) in zip(steps, itertools.pairwise(moments), strict=True):
        step["seconds"] = end - begin
    # Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    peak = int(line.split()[1]) * 2**10
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    return dict(steps=steps, peak_gib=peak / 2**30)


def force_lengths(module):
    """No token ends a completion."""
    load_policy = module.load_policy

    def endless(*args):
        policy = load_policy(*args)
        never = module.transformers.EosTokenCriteria(2**31 - 1)
        policy.stopping_criteria = module.transformers.StoppingCriteriaList([never])
        return policy

    module.load_policy = endless


def watch(module):
    """Leave the seconds and counts of each step, and the peak of memory, in `module.found`:

    draw_prompts    hands out the prompts in the order of the file, as TRL does here, and marks the
                    beginning of an iteration
    sample          notes its seconds, and how many tokens there are
    save_result     writes nothing, and marks the end of the last iteration
    """
    moments, steps = [], []
    module.found = dict(steps=steps)
    sample = module.sample

    def in_file_order(seed, num_prompts, first, count):
        moments.append(now())
        steps.append({})
        return [position % num_prompts for position in range(first, first + count)]

    def timed_sample(model, prompts, *inputs):
        result, seconds = timed(sample, model, prompts, *inputs)
        if steps:  # The script tries its sampler before the first one.
            steps[-1] |= dict(
                prompt_tokens=(prompts >= 0).sum().item(),
                longest_prompt=prompts.shape[1],
                tokens=(result["tokens"] >= 0).sum().item(),
                sampling=seconds,
            )
        return result

    def end(*args):
        module.found |= measured(steps, [*moments, now()])

    module.draw_prompts = in_file_order
    module.sample = timed_sample
    module.save_result = end
