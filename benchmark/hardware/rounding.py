"""How far does rounding part two runs: on 1 and 2 processes, or with micro-batches of 64 and 16?

    python benchmark/hardware/rounding.py        # all
    python benchmark/hardware/rounding.py ppo    # this part alone

Runs are compared token for token. If a completion differs, what is trained on it differs, too. The
first parts are the defaults of each script.

By default PPO whitens its advantages: it shifts them to mean 0, and scales them to variance 1. The
last parts are PPO as it is, without the shift, and without the second PPO epoch.

Writes rounding.json, a comparison a line.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import SCRIPTS, Part, main, relative_distance, run

RESULT = Path(__file__).with_suffix(".json")
MICRO_BATCHES = "micro-batches of 64 and 16"
PROCESSES = "1 and 2 processes"
OTHERS = {  # flags and processes of the second run
    PROCESSES: ("", 2),
    MICRO_BATCHES: ("--per-device-train-batch-size 16", 1),
}


def only_scale(ppo):
    """Whiten without the shift."""
    ppo.whiten = lambda values: values * (values.var(correction=0) + 1e-8).rsqrt()


def compare(comparisons, jobs, _):
    """Make each run and others, and compare it with each of the others."""
    rows = []
    for (script, flags, *edits), names in jobs.items():
        with tempfile.TemporaryDirectory() as work:
            first = Path(work, "first")
            one = run(script, flags, *edits, first)
            for between in comparisons:
                folder = Path(work, between)
                own, processes = OTHERS[between]
                two = run(script, f"{flags} {own}", *edits, folder, processes=processes)
                distance = float(f"{relative_distance(folder, first):.3g}")
                row = names | dict(between=between, distance=distance)
                rows.append(row | count_different(one, two))
    return rows


def count_different(one, two):
    """How many completions of two runs differ, and from which iteration on."""
    iterations = []
    for first, second in zip(one["rollouts"], two["rollouts"], strict=True):
        if first["token_ids"] != second["token_ids"]:
            iterations.append(first["iteration"])
    counts = dict(completions=len(one["rollouts"]), completions_that_differ=len(iterations))
    return counts | dict(first_iteration=min(iterations, default=None))


def compared(seeds, between, *run):
    flags = "--save-rollouts --num-sample-generations 0 --save-every None"
    return Part([({}, *run)], flags, seeds, measure=partial(compare, between))


PARTS = {script: compared([1], tuple(OTHERS), script, "") for script in SCRIPTS}
FIVE = partial(compared, range(1, 6), (MICRO_BATCHES,), "ppo")
PARTS |= {
    "rloo in bfloat16": compared([1], (PROCESSES,), "rloo", "--dtype bfloat16"),
    "PPO, shift and scale": FIVE(""),
    "PPO, scale only": FIVE("", only_scale),
    "PPO, one PPO epoch": FIVE("--num-ppo-epochs 1"),
}

if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(__doc__, RESULT, PARTS)
