"""How many completions differ between 1 and 2 processes, and between micro-batches? Rounding depends on batch shapes.

    python benchmark/completions_by_processes.py                      # all, a quarter of an hour on two cores
    python benchmark/completions_by_processes.py --only ppo           # those whose name has this in it

Runs each script's defaults twice, and compares the episodes of the whole run token for token. Now and then a uniform
number falls within rounding of a boundary, and a completion differs; what is trained on it then goes another way. The
runs of SmolLM2-135M-Instruct (`benchmark/prepare_smollm2.py` makes it; vocabulary 49,152) have learning rate 0, so that
each of their completions tells only of itself. Writes benchmark/results/completions_by_processes.json, case by case.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmark" / "results" / "completions_by_processes.json"
SMOLLM2 = (
    "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl --learning-rate 0 "
    "--reward benchmark/chain_sum.py:score --batch-size 64 --response-length 24 --total-episodes 320 --kl-coef 0 "
    "--per-device-train-batch-size 16"
)
MICRO_BATCHES, PROCESSES = ((1, ""), (1, "--per-device-train-batch-size 16")), ((1, ""), (2, ""))
CASES = {f"{script}, micro-batches of 64 and 16": (script, "", MICRO_BATCHES) for script in ("rloo", "grpo", "ppo")}
CASES |= {f"{script}, 1 and 2 processes": (script, "", PROCESSES) for script in ("rloo", "grpo", "ppo")}
CASES |= {
    "ppo at learning rate 1e-4, micro-batches of 64 and 16": ("ppo", "--learning-rate 1e-4", MICRO_BATCHES),
    "rloo in bfloat16, 1 and 2 processes": ("rloo", "--dtype bfloat16", PROCESSES),
    "SmolLM2, 1 and 2 processes": ("rloo", SMOLLM2, PROCESSES),
    "SmolLM2 in bfloat16, 1 and 2 processes": ("rloo", f"{SMOLLM2} --dtype bfloat16", PROCESSES),
}


def rollouts(script: str, flags: str, processes: int, folder: str) -> list[dict]:
    """The episodes of a run on this many processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "0"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*(launch if processes > 1 else [sys.executable]), f"{script}.py", *flags.split()]
    command += ["--save-rollouts", "--num-sample-generations", "0", "--output-dir", folder]
    subprocess.run(command, check=True, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in open(f"{folder}/rollouts.jsonl", encoding="utf-8")]


def compare(script: str, flags: str, runs: tuple) -> dict:
    """Run both, beside each other -> how many completions differ, and from which iteration on."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        jobs = [(script, f"{flags} {more}", processes, f"{folder}/{i}") for i, (processes, more) in enumerate(runs)]
        one, two = pool.map(lambda job: rollouts(*job), jobs)
    iterations = [a["iteration"] for a, b in zip(one, two, strict=True) if a["token_ids"] != b["token_ids"]]
    counts = dict(completions=len(one), tokens=sum(len(row["token_ids"]) for row in one))
    return counts | dict(completions_that_differ=len(iterations), first_iteration=min(iterations, default=None))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    for name, case in CASES.items():
        if only in name:
            result = compare(*case)
            print(f"{name}: {result}", flush=True)
            summary = (json.loads(RESULT.read_text()) if RESULT.exists() else {}) | {name: result}
            RESULT.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
