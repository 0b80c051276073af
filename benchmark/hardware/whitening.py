"""Why do two PPO runs part that differ only by rounding? Ten seeds, each with micro-batches of 64 and of 16.

    python benchmark/hardware/whitening.py                            # what has no line yet, one run at a time
    python benchmark/hardware/whitening.py --only "shift only"        # this case again

By default PPO whitens its advantages: it shifts them to mean 0, and scales them to variance 1. The cases leave a part
of this out, all of it (on three seeds), or the second PPO epoch. Writes whitening.json, a line for each case and seed.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import relative_distance, run_all, write_lines

RESULT = Path(__file__).with_suffix(".json")
SIZES = (64, 16)


def shift(values):
    return values - values.mean()


def scale(values):
    return values * torch.rsqrt(values.var(correction=0) + 1e-8)


def replace_whiten(other, script):
    script.whiten = other


CASES = {  # flags, what takes the place of `whiten`, and the number of seeds
    "shift and scale": ("", None, 10),
    "shift only": ("", shift, 10),
    "scale only": ("", scale, 10),
    "no whitening": ("--no-whiten-advantages", None, 3),
    "one PPO epoch": ("--num-ppo-epochs 1", None, 10),
}


def compare(case: str, seed: int) -> dict:
    """Run one seed with both sizes of micro-batches -> how far apart the runs end, and how many completions differ."""
    flags, other, _ = CASES[case]
    flags += f" --seed {seed} --save-rollouts --num-sample-generations 0 --save-every None"
    edits = [partial(replace_whiten, other)] if other else []
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(size) for size in SIZES]
        jobs = [
            ("ppo", f"{flags} --per-device-train-batch-size {size}", *edits, str(out))
            for size, out in zip(SIZES, folders)
        ]
        one, two = (result["rollouts"] for result in run_all(jobs, processes=1))
        distance = relative_distance(folders[1], folders[0])
    differ = [a["iteration"] for a, b in zip(one, two, strict=True) if a["token_ids"] != b["token_ids"]]
    return {
        "case": case,
        "seed": seed,
        "distance": float(f"{distance:.3g}"),
        "completions": len(one),
        "completions_that_differ": len(differ),
        "first_iteration": min(differ, default=None),
    }


def main(only: str | None = None):
    """only: a case"""
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else []
    for case in [only] if only else CASES:
        for seed in range(1, CASES[case][2] + 1):
            old = [row for row in rows if (row["case"], row["seed"]) == (case, seed)]
            if only or not old:
                rows = [row for row in rows if row not in old] + [compare(case, seed)]
                rows.sort(key=lambda row: ([*CASES].index(row["case"]), row["seed"]))
                write_lines(RESULT, rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
