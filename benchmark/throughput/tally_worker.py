"""What throughput.py and gpu.py change in a script, so that its run measures itself."""

import sys
import time
from collections import Counter
from pathlib import Path


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


def measured(steps: list[dict]) -> dict:
    """A step lasts until the next one begins, and the last one until now."""
    import torch

    ends = [*(step["begin"] for step in steps[1:]), now()]
    for step, end in zip(steps, ends, strict=True):
        step["seconds"] = end - step["begin"]
    # Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    peak = int(line.split()[1]) * 2**10
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    return dict(steps=steps, peak_gib=peak / 2**30)


def force_lengths(module):
    """No token ends a completion."""
    criteria = module.transformers.EosTokenCriteria
    module.transformers.EosTokenCriteria = lambda _: criteria(2**31 - 1)


def record_on_cpu(module):
    """Record steps as on a GPU, with the tests' stand-in for a CUDA graph."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    from plain import record_steps
    from pytest import MonkeyPatch

    record_steps(MonkeyPatch(), module)


def watch(module):
    """Leave the seconds and counts of each step, and the peak of memory, in `module.found`:

    draw_prompts    hands out the prompts in the order of the file, as TRL does here, and marks the
                    beginning of an iteration
    generate        notes its seconds, and how many tokens there are
    save_result     writes nothing, and marks the end of the last iteration
    """
    steps = []
    module.found = dict(steps=steps)
    generate = module.generate

    def in_file_order(seed, num_prompts, first, count):
        steps.append(dict(begin=now()))
        return [position % num_prompts for position in range(first, first + count)]

    def timed_generate(*inputs):
        batch, seconds = timed(generate, *inputs)
        steps[-1] |= dict(
            prompt_tokens=(batch.prompt_tokens >= 0).sum().item(),
            tokens=batch.mask.sum().item(),
            sampling=seconds,
        )
        return batch

    def end(*args):
        module.found |= measured(steps)

    module.draw_prompts = in_file_order
    module.generate = timed_generate
    module.save_result = end


def profile(module):
    """Note in `found`, for each stage of an iteration, what the third one starts on the GPU, and
    the seconds of the fourth, which has no profiler."""
    import torch

    steps = module.found["steps"]
    stages = module.found["stages"] = {}

    def note(owner, name):
        function = getattr(owner, name)

        def noted(*args, **inputs):
            stage = name if torch.is_grad_enabled() else "reference"
            counts = stages.setdefault(stage, Counter())
            if len(steps) == 3:
                with torch.profiler.profile() as profiler:
                    result, _ = timed(function, *args, **inputs)
                counts.update(kernels(profiler.key_averages()))
                return result
            result, seconds = timed(function, *args, **inputs)
            if len(steps) == 4:
                counts["seconds"] += seconds
            return result

        setattr(owner, name, noted)

    note(module, "generate")
    note(module, "token_logprobs")
    note(module.accelerate.Accelerator, "backward")
    note(module.accelerate.Accelerator, "clip_grad_norm_")
    note(module.accelerate.optimizer.AcceleratedOptimizer, "step")


def kernels(events) -> dict:
    """How many launches and kernels there were, and how long the GPU was busy with them."""
    of_gpu = [event for event in events if event.device_type.name == "CUDA"]
    return dict(
        launches=sum(event.count for event in events if "Launch" in event.key),
        kernels=sum(event.count for event in of_gpu),
        busy_seconds=sum(event.self_device_time_total for event in of_gpu) / 1e6,
    )
