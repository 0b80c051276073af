"""How many completions differ between 1 and 2 processes, and between micro-batches? Rounding depends on batch shapes.

    python benchmark/hardware/completions.py                          # all, 25 minutes on two cores
    python benchmark/hardware/completions.py --only ppo               # those whose name has this in it

Runs each script's defaults twice, and compares the episodes of the whole run token for token. If a completion differs,
what is trained on it differs, too. The runs of SmolLM2 (made by `benchmark/smollm2/prepare.py`) have learning rate 0,
so none of their completions depends on the ones before. Writes completions.json, case by case.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import SCRIPTS, machine, run, torchrun

RESULT = Path(__file__).with_suffix(".json")
SMOLLM2 = (
    "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl --learning-rate 0 "
    "--reward benchmark/smollm2/chain_sum.py:score --batch-size 64 --response-length 24 --total-episodes 320 "
    "--kl-coef 0 --per-device-train-batch-size 16"
)
MICRO_BATCHES, PROCESSES = ((1, ""), (1, "--per-device-train-batch-size 16")), ((1, ""), (2, ""))
CASES = {f"{script}, micro-batches of 64 and 16": (script, "", MICRO_BATCHES) for script in SCRIPTS}
CASES |= {f"{script}, 1 and 2 processes": (script, "", PROCESSES) for script in SCRIPTS}
CASES |= {
    "ppo at learning rate 1e-4, micro-batches of 64 and 16": ("ppo", "--learning-rate 1e-4", MICRO_BATCHES),
    "rloo in bfloat16, 1 and 2 processes": ("rloo", "--dtype bfloat16", PROCESSES),
    "SmolLM2, 1 and 2 processes": ("rloo", SMOLLM2, PROCESSES),
}


def compare(script: str, flags: str, runs: tuple) -> dict:
    """Run both, beside each other -> how many completions differ, and from which iteration on."""
    flags += " --save-rollouts --num-sample-generations 0"

    def episodes(settings):
        processes, more = settings
        launcher = torchrun(processes) if processes > 1 else ()
        return run(script, f"{flags} {more}", launcher=launcher, ACCELERATE_USE_CPU="true")["rollouts"]

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(episodes, runs)
    iterations = [a["iteration"] for a, b in zip(one, two, strict=True) if a["token_ids"] != b["token_ids"]]
    counts = dict(completions=len(one), tokens=sum(len(row["token_ids"]) for row in one))
    return counts | dict(completions_that_differ=len(iterations), first_iteration=min(iterations, default=None))


def main(only: str = ""):
    for name, case in CASES.items():
        if only in name:
            result = compare(*case) | dict(machine=machine())
            print(f"{name}: {result}", flush=True)
            RESULT.write_text(json.dumps(json.loads(RESULT.read_text()) | {name: result}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
