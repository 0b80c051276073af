"""Does bfloat16 with several updates per batch learn as float32 does? The default task, two PPO epochs, five seeds.

    python benchmark/hardware/bfloat16_learning.py                    # 20 minutes on two cores
    python benchmark/hardware/bfloat16_learning.py ppo                # one script, the other is kept

rloo.py refuses bfloat16 with several updates, so there are only grpo.py and ppo.py.

Writes bfloat16_learning.json, a run a line: held-out right answers before and after, the right answers of the last ten
iterations, and the mean of `policy/clipfrac_avg`. Prints the means over the seeds with their 95 % intervals.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from draw import mean_and_band  # noqa: E402
from run import run_all, write_lines  # noqa: E402

RESULT = Path(__file__).with_suffix(".json")
SCRIPTS = ("grpo", "ppo")
DTYPES = ("float32", "bfloat16")
SEEDS = range(1, 6)


def to_row(job: tuple, result: dict) -> dict:
    """What is kept of a run."""
    rows = result["metrics"]
    held_out = [row["eval/scores"] for row in rows if "eval/scores" in row]
    clipped = [row["policy/clipfrac_avg"] for row in rows if "policy/clipfrac_avg" in row]
    return dict(
        script=job[0],
        dtype=result["args"]["dtype"],
        seed=result["args"]["seed"],
        before=round(held_out[0], 4),
        held_out=round(held_out[-1], 4),
        sampled=round(float(np.mean([row["objective/scores"] for row in rows[-10:]])), 4),
        clipped=round(float(np.mean(clipped)), 5),
    )


def main():
    scripts = sys.argv[1:] or SCRIPTS
    jobs = []
    for script in scripts:
        for seed in SEEDS:
            jobs += [(script, f"--dtype {dtype} --num-ppo-epochs 2 --seed {seed}") for dtype in DTYPES]
    rows = run_all(jobs, to_row)
    if RESULT.exists():
        rows += [row for row in json.loads(RESULT.read_text()) if row["script"] not in scripts]
    rows.sort(key=lambda row: (row["script"], row["dtype"], row["seed"]))
    write_lines(RESULT, rows)
    for script in SCRIPTS:
        for dtype in DTYPES:
            found = [row for row in rows if (row["script"], row["dtype"]) == (script, dtype)]
            for name in ("held_out", "sampled", "clipped") if found else ():
                mean, band = mean_and_band([[row[name]] for row in found])
                print(f"{script} {dtype} {name}: {mean[0]:.4f} +- {band[0]:.4f}")


if __name__ == "__main__":
    main()
