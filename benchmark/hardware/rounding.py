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

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import (
    BUILT_IN,
    SCRIPTS,
    Part,
    free_port,
    logged,
    main,
    prepare_forks,
    relative_distance,
    run_forked,
    torchrun_variables,
)

RESULT = Path(__file__).with_suffix(".json")
MICRO_BATCHES, PROCESSES = "micro-batches of 64 and 16", "1 and 2 processes"
SMOLLM2 = "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl"
SMOLLM2 += " --reward benchmark/smollm2/chain_sum.py:score --learning-rate 0 --kl-coef 0"
SMOLLM2 += " --batch-size 64 --response-length 24 --total-episodes 320"
SMOLLM2 += " --per-device-train-batch-size 16"
SEEDS = range(1, 6)


def only_scale(ppo):
    """Whiten without the shift."""
    ppo.whiten = lambda values: values * (values.var(correction=0) + 1e-8).rsqrt()


# script, flags, functions that change the script, comparisons, seeds
CASES = {script: (script, "", (), (MICRO_BATCHES, PROCESSES), (1,)) for script in SCRIPTS}
CASES |= {
    "rloo in bfloat16": ("rloo", "--dtype bfloat16", (), (PROCESSES,), (1,)),
    "SmolLM2": ("rloo", SMOLLM2, (), (PROCESSES,), (1,)),
    "PPO, shift and scale": ("ppo", "", (), (MICRO_BATCHES,), SEEDS),
    "PPO, scale only": ("ppo", "", (only_scale,), (MICRO_BATCHES,), SEEDS),
    "PPO, one PPO epoch": ("ppo", "--num-ppo-epochs 1", (), (MICRO_BATCHES,), SEEDS),
}


def jobs_of(script: str, own: str, edits, comparisons, seeds) -> dict[tuple, dict]:
    """The first run of each seed is compared with the others. A job ends with its number of
    processes."""
    jobs = {}
    for seed in seeds:
        flags = f"--save-rollouts --num-sample-generations 0 --save-every None --seed {seed} {own}"
        jobs[script, flags, *edits, 1] = dict(seed=seed)
        for between in comparisons:
            names = dict(seed=seed, between=between)
            if between == MICRO_BATCHES:
                jobs[script, f"{flags} --per-device-train-batch-size 16", *edits, 1] = names
            else:
                jobs[script, flags, *edits, 2] = names
    return jobs


def send_run(sender, job: tuple, environment: dict):
    """In a process of its own: what a run printed and wrote, or its error."""
    os.environ |= {name: str(value) for name, value in environment.items()}
    try:
        sender.send(run_forked(job))
    except RuntimeError as error:
        sender.send(str(error))


def start(job: tuple, processes: int) -> list:
    """Start a run on so many processes -> the ends of pipes that `receive` reads."""
    fork = multiprocessing.get_context("fork")
    receivers = []
    port = free_port()
    for rank in range(processes):
        environment = torchrun_variables(rank, processes, port)
        receiver, sender = fork.Pipe(duplex=False)
        fork.Process(target=send_run, args=(sender, job, environment), daemon=True).start()
        sender.close()
        receivers.append(receiver)
    return receivers


def receive(receivers: list) -> dict:
    """A run. An error of one of its processes ends this program."""
    ends = [receiver.recv() for receiver in receivers]
    for end in ends:
        if isinstance(end, str):
            raise SystemExit(end)
    return ends[0]


def measure(jobs: dict, smoke: bool) -> list[dict]:
    prepare_forks()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    rows = []
    for seed in dict.fromkeys(names["seed"] for names in jobs.values()):
        some = {job: names for job, names in jobs.items() if names["seed"] == seed}
        rows += compare(some)
    return rows


def compare(jobs: dict) -> list[dict]:
    """Start the runs of a seed beside each other, and compare the first with each of the others."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i, (*job, processes) in enumerate(jobs):
            started.append(start((*job, f"{folder}/{i}"), processes))
        results = [receive(receivers) for receivers in started]
        rows = []
        for i, names in list(enumerate(jobs.values()))[1:]:
            row = names | count_different(results[0], results[i])
            if names["between"] == MICRO_BATCHES:  # of runs that move the built-in policy
                distance = relative_distance(Path(folder, str(i)), Path(folder, "0"))
                row["distance"] = float(f"{distance:.3g}")
            rows.append(row)
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
        check(args)
        args.dtype = "bfloat16"

    script.check_flags = check_flags


# a ratio for each: script, flags, function
RATIOS = {
    "token": ("grpo", "", count_outside),
    "completion": ("rloo", "", count_outside),
    "sequence": ("grpo", "--importance-sampling-level sequence", count_outside_gspo),
}


def ratio_jobs() -> dict[tuple, dict]:
    """Two updates with one batch, which do not move the weights."""
    jobs = {}
    for name, (script, own, count) in RATIOS.items():
        flags = f"{SMOLLM2} --reward benchmark/throughput/rewards.py:share_of_letters --seed 1"
        flags += f" --total-episodes 32 --batch-size 32 --num-mini-batches 2 {own}"
        jobs[script, flags, count] = dict(ratio=name, dtype="float32")
        jobs[script, flags, count, in_bfloat16] = dict(ratio=name, dtype="bfloat16")
    return jobs


def outside(names: dict, result: dict) -> dict:
    rows = result["metrics"]
    share = np.mean(logged(rows, "outside"))
    tokens = np.mean(logged(rows, "response_length_mean"))
    return names | dict(tokens=round(float(tokens), 1), outside=round(float(share), 4))


PARTS = {name: Part(jobs_of(*case), measure=measure) for name, case in CASES.items()}
PARTS["ratios"] = Part(ratio_jobs(), outside)
for name in ("SmolLM2", "ratios"):
    PARTS[name].needs = "the model of benchmark/smollm2/prepare.py"
    PARTS[name].short = f"--total-episodes 128 --response-length 8 {BUILT_IN}"

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
