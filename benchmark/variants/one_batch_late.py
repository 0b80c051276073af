"""Trains grpo.py on batches in time and on batches that are one update late, seeds 1 to 10.

    python benchmark/variants/one_batch_late.py           # all
    python benchmark/variants/one_batch_late.py late      # only these runs

Writes one_batch_late.json, a run a line, for the table in docs/variants.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import Part, curves, main

RESULT = Path(__file__).with_suffix(".json")
FLAGS = "--total-episodes 4096 --eval-every 8"
IN_TIME, LATE = "grpo", "grpo variants/one_batch_late.patch"
KINDS = {  # the script, and its flags
    "in time": (IN_TIME, ""),
    "late": (LATE, ""),
    "late, no ratio": (LATE, "--no-late-ratio"),
    "late, ratio not clipped": (LATE, "--cliprange 1e6"),
    "in time, gradient not clipped": (IN_TIME, "--max-grad-norm inf"),
    "late, gradient not clipped": (LATE, "--max-grad-norm inf"),
    "in time, rate 7e-5": (IN_TIME, "--learning-rate 7e-5"),
    "in time, rate 1.5e-4": (IN_TIME, "--learning-rate 1.5e-4"),
}


def held_out(result: dict) -> dict:
    return curves(result, ["eval/scores"])


PARTS = {}
for kind, (script, own) in KINDS.items():
    PARTS[kind] = Part([({}, script, own)], FLAGS, range(1, 11), held_out)


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
