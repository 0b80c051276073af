"""How far does rounding part two runs: on 1 and 2 processes, or with micro-batches of 64 and 16?

    python benchmark/hardware/rounding.py                             # all
    python benchmark/hardware/rounding.py ppo                         # this part alone

Runs are compared token for token. If a completion differs, what is trained on it differs, too. The
first parts are the defaults of each script. The runs of SmolLM2 (made by
`benchmark/smollm2/prepare.py`) have learning rate 0, so none of their completions depends on the
ones before.

By default PPO whitens its advantages: it shifts them to mean 0, and scales them to variance 1. The
next parts are PPO as it is, without the shift, and without the second PPO epoch.

The last part counts ratios outside of the clip range, where each true ratio is 1. Writes
rounding.json, a comparison or a run a line.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kill_and_resume import start
from run import BUILT_IN, SCRIPTS, Part, import_script, logged, main, read_run, relative_distance

RESULT = Path(__file__).with_suffix(".json")
MICRO_BATCHES, PROCESSES = "micro-batches of 64 and 16", "1 and 2 processes"
SMOLLM2 = "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl"
SMOLLM2 += " --reward benchmark/smollm2/tasks.py:score --learning-rate 0 --kl-coef 0"
SMOLLM2 += " --batch-size 64 --response-length 24 --total-episodes 320"
SMOLLM2 += " --per-device-train-batch-size 16"
SEEDS = range(1, 6)


def only_scale(ppo):
    """Whiten without the shift."""
    ppo.whiten = lambda values: values * (values.var(correction=0) + 1e-8).rsqrt()


def measure(comparisons: tuple, jobs: dict, _) -> list[dict]:
    rows = []
    for job, names in jobs.items():
        rows += [names | row for row in compare(job, comparisons)]
    return rows


def compare(job: tuple, comparisons: tuple) -> list[dict]:
    """Make a run and others, and compare it with each of the others."""
    script, flags, *edits = job
    import_script(script)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "first")
        start(script, flags, first, 1, edits=edits)
        for between in comparisons:
            other = Path(folder, f"other{len(rows)}")
            if between == PROCESSES:
                start(script, flags, other, 2, edits=edits)
            else:
                smaller = f"{flags} --per-device-train-batch-size 16"
                start(script, smaller, other, 1, edits=edits)
            found = count_different(read_run(first), read_run(other))
            if between == MICRO_BATCHES:  # of runs that move the built-in policy
                found["distance"] = float(f"{relative_distance(other, first):.3g}")
            rows.append(dict(between=between) | found)
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


def count_outside(script, low=0.2, high=0.2):
    """The metric `outside` is the share of ratios that are not in 1 - low .. 1 + high."""
    of_update = script.ratio_metrics

    def ratio_metrics(logratio, is_clipped, mask):
        ratio = logratio.exp()[mask[:, : logratio.shape[1]]]
        outside = (ratio < 1 - low) | (ratio > 1 + high)
        metrics = of_update(logratio, is_clipped, mask)
        return metrics | dict(outside=outside.float().mean())

    script.ratio_metrics = ratio_metrics


def count_outside_gspo(grpo):
    """The range of arXiv 2507.18071."""
    count_outside(grpo, 3e-4, 4e-4)


def in_bfloat16(script):
    """The flag is refused where rounding alone would clip ratios."""
    check = script.check_flags

    def check_flags(args):
        args = check(args)
        args.dtype = "bfloat16"
        return args

    script.check_flags = check_flags


# a ratio for each: script, flags, function
RATIOS = {
    "token": ("grpo", "", count_outside),
    "completion": ("rloo", "", count_outside),
    "sequence": ("grpo", "--importance-sampling-level sequence", count_outside_gspo),
}


RATIO_RUNS = []
for name, (script, own, count) in RATIOS.items():
    RATIO_RUNS.append((dict(ratio=name, dtype="float32"), script, own, count))
    RATIO_RUNS.append((dict(ratio=name, dtype="bfloat16"), script, own, count, in_bfloat16))
# two updates with one batch, which do not move the weights
TWO_UPDATES = f"{SMOLLM2} --reward benchmark/throughput/rewards.py:share_of_letters"
TWO_UPDATES += " --total-episodes 32 --batch-size 32 --num-mini-batches 2"


def outside(result: dict) -> dict:
    rows = result["metrics"]
    share = np.mean(logged(rows, "outside"))
    tokens = np.mean(logged(rows, "response_length_mean"))
    return dict(tokens=round(float(tokens), 1), outside=round(float(share), 4))


def compared(script: str, own: str, *edits, between=(MICRO_BATCHES,), seeds=SEEDS) -> Part:
    flags = "--save-rollouts --num-sample-generations 0 --save-every None"
    return Part([({}, script, own, *edits)], flags, seeds, measure=partial(measure, between))


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
    main(__doc__, RESULT, PARTS)
