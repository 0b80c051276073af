"""How far does rounding part two runs: on 1 and 2 processes, or with micro-batches of 64 and 16?

    python benchmark/hardware/rounding.py                             # all
    python benchmark/hardware/rounding.py ppo                         # this part alone

Runs are compared token for token. If a completion differs, what is trained on it differs, too. The
first parts are the defaults of each script. The runs of SmolLM2 (made by
`benchmark/smollm2/prepare.py`) have learning rate 0, so none of their completions depends on the
ones before.

By default PPO whitens its advantages: it shifts them to mean 0, and scales them to variance 1. The
next parts are PPO as it is, without the shift, and without the second PPO epoch.

The last part counts ratios outside of the clip range in bfloat16, where each true ratio is 1.
Writes rounding.json, a comparison or a run a line.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import BUILT_IN, SCRIPTS, Part, logged, main, relative_distance, run

RESULT = Path(__file__).with_suffix(".json")
MICRO_BATCHES, PROCESSES = "micro-batches of 64 and 16", "1 and 2 processes"
SMOLLM2 = "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl"
SMOLLM2 += " --reward benchmark/smollm2/tasks.py:score --learning-rate 0 --kl-coef 0"
SMOLLM2 += " --batch-size 64 --response-length 24 --total-episodes 320"
SMOLLM2 += " --per-device-train-batch-size 16"


def only_scale(ppo):
    """Whiten without the shift."""
    ppo.whiten = lambda values: values * (values.var(correction=0) + 1e-8).rsqrt()


def compare(comparisons: tuple, jobs: dict, _) -> list[dict]:
    """Make each run and others, and compare it with each of the others."""
    rows = []
    for (script, flags, *edits), names in jobs.items():
        with tempfile.TemporaryDirectory() as work:
            first = Path(work, "first")
            one = run(script, flags, *edits, first)
            for between in comparisons:
                other = Path(work, between)
                if between == PROCESSES:
                    found = count_different(one, run(script, flags, *edits, other, processes=2))
                else:
                    smaller = f"{flags} --per-device-train-batch-size 16"
                    found = count_different(one, run(script, smaller, *edits, other))
                    found["distance"] = float(f"{relative_distance(other, first):.3g}")
                rows.append(names | dict(between=between) | found)
    return rows


def count_different(one: dict, two: dict) -> dict:
    """How many completions of two runs differ, and from which iteration on."""
    iterations = []
    for first, second in zip(one["rollouts"], two["rollouts"], strict=True):
        if first["token_ids"] != second["token_ids"]:
            iterations.append(first["iteration"])
    counts = dict(completions=len(one["rollouts"]), completions_that_differ=len(iterations))
    return counts | dict(first_iteration=min(iterations, default=None))


# ---- ratios


def in_bfloat16(script):
    """The flag is refused where rounding alone would clip ratios. The metric `outside` is the share
    of ratios that are not in 0.8 .. 1.2."""
    check = script.check_flags
    of_update = script.ratio_metrics

    def check_flags(args):
        args = check(args)
        args.dtype = "bfloat16"
        return args

    def ratio_metrics(logratio, is_clipped, mask):
        ratio = logratio.exp()[mask[:, : logratio.shape[1]]]
        outside = ((ratio - 1).abs() > 0.2).float().mean()
        return of_update(logratio, is_clipped, mask) | dict(outside=outside)

    script.check_flags = check_flags
    script.ratio_metrics = ratio_metrics


# two updates with one batch, which do not move the weights
TWO_UPDATES = f"{SMOLLM2} --reward benchmark/throughput/rewards.py:share_of_letters"
TWO_UPDATES += " --total-episodes 32 --batch-size 32 --num-mini-batches 2"
RATIO_RUNS = [
    (dict(ratio="token"), "grpo", "", in_bfloat16),
    (dict(ratio="completion"), "rloo", "", in_bfloat16),
]


def outside(result: dict) -> dict:
    rows = result["metrics"]
    share = np.mean(logged(rows, "outside"))
    tokens = np.mean(logged(rows, "response_length_mean"))
    return dict(tokens=round(float(tokens), 1), outside=round(float(share), 4))


def compared(script: str, own: str, *edits, between=(MICRO_BATCHES,), seeds=range(1, 6)) -> Part:
    flags = "--save-rollouts --num-sample-generations 0 --save-every None"
    return Part([({}, script, own, *edits)], flags, seeds, measure=partial(compare, between))


BOTH = (PROCESSES, MICRO_BATCHES)
PARTS = {script: compared(script, "", between=BOTH, seeds=(1,)) for script in SCRIPTS}
PARTS |= {
    "rloo in bfloat16": compared("rloo", "--dtype bfloat16", between=(PROCESSES,), seeds=(1,)),
    "SmolLM2": compared("rloo", SMOLLM2, between=(PROCESSES,), seeds=(1,)),
    "PPO, shift and scale": compared("ppo", ""),
    "PPO, scale only": compared("ppo", "", only_scale),
    "PPO, one PPO epoch": compared("ppo", "--num-ppo-epochs 1"),
    "ratios": Part(RATIO_RUNS, TWO_UPDATES, keep=outside),
}
for name in ("SmolLM2", "ratios"):
    PARTS[name].needs = "the model of benchmark/smollm2/prepare.py"
    PARTS[name].short = f"--total-episodes 128 --response-length 8 {BUILT_IN}"

if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(__doc__, RESULT, PARTS)
