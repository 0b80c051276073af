"""Trains grpo.py on batches in time and on batches that are one update late, seeds 1 to 10.

    python benchmark/variants/one_batch_late.py           # all
    python benchmark/variants/one_batch_late.py late      # only these runs

Writes one_batch_late.json, a run a line.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import Part, curves, main

RESULT = Path(__file__).with_suffix(".json")
SEEDS = range(1, 11)
FLAGS = "--total-episodes 4096 --eval-every 8"


def held_out(result: dict) -> dict:
    return curves(result, ["eval/scores"])


PARTS = {
    "in time": Part([({}, "grpo", "")], FLAGS, SEEDS, held_out),
    "late": Part([({}, "grpo one_batch_late.patch", "")], FLAGS, SEEDS, held_out),
}


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
