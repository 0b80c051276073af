"""Trains grpo.py on batches in time and on batches that are one update late, seeds 1 to 10.

    python benchmark/variants/one_batch_late.py           # 12 minutes on two cores; `late`: only these runs
    python benchmark/variants/one_batch_late.py --plot    # runs nothing

Writes one_batch_late.json, a run a line, for the table in docs/variants.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import curves, update

RESULT = Path(__file__).with_suffix(".json")
KEPT = ("eval/scores", "objective/scores", "policy/entropy_avg", "policy/clipfrac_avg", "grad_norm")
FLAGS = "--total-episodes 4096 --eval-every 8"
KINDS = {  # the patch, and flags
    "in time": (False, ""),
    "late": (True, ""),
    "late, no ratio": (True, "--no-late-ratio"),
    "late, ratio not clipped": (True, "--cliprange 1e6"),
    "in time, gradient not clipped": (False, "--max-grad-norm inf"),
    "late, gradient not clipped": (True, "--max-grad-norm inf"),
    "in time, rate 7e-5": (False, "--learning-rate 7e-5"),
    "in time, rate 1.5e-4": (False, "--learning-rate 1.5e-4"),
}


def main():
    jobs = {}
    for kind, (is_late, own) in KINDS.items():
        script = "grpo variants/one_batch_late.patch" if is_late else "grpo"
        for seed in range(1, 11):
            flags = " ".join(f"--seed {seed} {FLAGS} {own}".split())
            jobs[script, flags] = dict(kind=kind, flags=flags, seed=seed)
    update(RESULT, jobs, lambda _, result: curves(result, KEPT))


if __name__ == "__main__":
    main()
