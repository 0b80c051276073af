"""How many completions differ by rounding: between 1 and 2 processes, and between micro-batches?

    python benchmark/hardware/completions.py                          # all
    python benchmark/hardware/completions.py ppo                      # this part alone

Runs each script's defaults in several ways, and compares the episodes of the whole runs token for
token. If a completion differs, what is trained on it differs, too. The runs of SmolLM2 (made by
`benchmark/smollm2/prepare.py`) have learning rate 0, so none of their completions depends on the
ones before. Writes completions.json, a comparison a line.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from architectures import prepare, receive, start
from run import SCRIPTS, Part, main
from whitening import count_different

RESULT = Path(__file__).with_suffix(".json")
MICRO_BATCHES, PROCESSES = "micro-batches of 64 and 16", "1 and 2 processes"
SMOLLM2 = "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl"
SMOLLM2 += " --reward benchmark/smollm2/chain_sum.py:score --learning-rate 0 --kl-coef 0"
SMOLLM2 += (
    " --batch-size 64 --response-length 24 --total-episodes 320 --per-device-train-batch-size 16"
)
BUILT_IN = "--model-path benchmark/default/policy --dataset benchmark/default/train.jsonl"
BUILT_IN += " --reward exact_match"
CASES = {script: (script, "", (MICRO_BATCHES, PROCESSES)) for script in SCRIPTS}
CASES |= {
    "ppo at learning rate 1e-4": ("ppo", "--learning-rate 1e-4", (MICRO_BATCHES,)),
    "rloo in bfloat16": ("rloo", "--dtype bfloat16", (PROCESSES,)),
    "SmolLM2": ("rloo", SMOLLM2, (PROCESSES,)),
}


def jobs_of(script: str, own: str, between: tuple[str, ...]) -> dict[tuple, dict]:
    """The first run is compared with the others. A job ends with its number of processes."""
    flags = f"--save-rollouts --num-sample-generations 0 {own}"
    jobs = {(script, flags, 1): {}}
    if MICRO_BATCHES in between:
        jobs[script, f"{flags} --per-device-train-batch-size 16", 1] = dict(between=MICRO_BATCHES)
    if PROCESSES in between:
        jobs[script, flags, 2] = dict(between=PROCESSES)
    return jobs


def compare(jobs: dict, smoke: bool) -> list[dict]:
    """Start all runs, beside each other, and compare the first with each of the others."""
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i, (script, flags, processes) in enumerate(jobs):
            started.append(start((script, flags, f"{folder}/{i}"), processes))
        results = []
        for receivers in started:
            result = receive(receivers)
            if isinstance(result, str):
                raise SystemExit(result)
            results.append(result)
    rows = []
    for names, result in zip(jobs.values(), results):
        if names:
            tokens = sum(len(row["token_ids"]) for row in results[0]["rollouts"])
            rows.append(names | dict(tokens=tokens) | count_different(results[0], result))
    return rows


PARTS = {name: Part(jobs_of(*case), measure=compare) for name, case in CASES.items()}
PARTS["SmolLM2"].needs = "the model of benchmark/smollm2/prepare.py"
PARTS["SmolLM2"].short = f"--total-episodes 128 {BUILT_IN}"

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
