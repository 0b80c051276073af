"""Why do two PPO runs part that differ only by rounding?

Each seed runs with micro-batches of 64 and of 16.

    python benchmark/hardware/whitening.py                            # all cases
    python benchmark/hardware/whitening.py "shift only"               # this case alone

By default PPO whitens its advantages: it shifts them to mean 0, and scales them to variance 1. The
cases leave a part of this out, all of it, or the second PPO epoch. Writes whitening.json, a line
for each case and seed.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import Part, main, relative_distance, run_all

RESULT = Path(__file__).with_suffix(".json")
FLAGS = "--save-rollouts --num-sample-generations 0 --save-every None"


def shift(values):
    return values - values.mean()


def scale(values):
    return values * (values.var(correction=0) + 1e-8).rsqrt()


def replace_whiten(other, script):
    script.whiten = other


CASES = {  # flags, what takes the place of `whiten`, and the number of seeds
    "shift and scale": ("", None, 10),
    "shift only": ("", shift, 10),
    "scale only": ("", scale, 10),
    "no whitening": ("--no-whiten-advantages", None, 3),
    "one PPO epoch": ("--num-ppo-epochs 1", None, 10),
}


def jobs_of(case: str) -> dict[tuple, dict]:
    """Each seed with both sizes of micro-batches."""
    jobs = {}
    own, other, seeds = CASES[case]
    edits = [partial(replace_whiten, other)] if other else []
    for seed in range(1, seeds + 1):
        for size in (64, 16):
            flags = f"{FLAGS} {own} --seed {seed} --per-device-train-batch-size {size}"
            jobs["ppo", flags, *edits] = dict(seed=seed, size=size)
    return jobs


def compare(jobs: dict, smoke: bool) -> list[dict]:
    """Of each seed: how far apart its two runs end, and how many completions differ."""
    rows, runs = [], list(jobs.values())
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / f"{run['seed']} {run['size']}" for run in runs]
        results = run_all([(*job, str(out)) for job, out in zip(jobs, folders)])
        for i in range(0, len(runs), 2):
            distance = relative_distance(folders[i + 1], folders[i])
            row = dict(seed=runs[i]["seed"], distance=float(f"{distance:.3g}"))
            rows.append(row | count_different(results[i], results[i + 1]))
    return rows


def count_different(one: dict, two: dict) -> dict:
    """How many completions of two runs differ, and from which iteration on."""
    iterations = []
    for first, second in zip(one["rollouts"], two["rollouts"], strict=True):
        if first["token_ids"] != second["token_ids"]:
            iterations.append(first["iteration"])
    counts = dict(completions=len(one["rollouts"]), completions_that_differ=len(iterations))
    return counts | dict(first_iteration=min(iterations, default=None))


PARTS = {case: Part(jobs_of(case), measure=compare) for case in CASES}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
