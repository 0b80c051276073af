"""How often does a completion differ between 1 and 2 processes? `python benchmark/completions_by_processes.py`

Samples the same episodes from SmolLM2-135M-Instruct (vocabulary 49,152; `benchmark/prepare_smollm2.py` makes it) with
rloo.py at learning rate 0 on 1 and on 2 processes and compares them token for token: rounding depends on the shape of
a batch, and now and then a uniform number falls within rounding of a boundary. `--dtype bfloat16` does the same in
bfloat16. Writes benchmark/results/completions_by_processes.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = (
    "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl --learning-rate 0 "
    "--reward benchmark/chain_sum.py:score --batch-size 64 --response-length 24 --total-episodes 320 --kl-coef 0 "
    "--per-device-train-batch-size 16 --save-rollouts --num-sample-generations 0"
).split()


def rollouts(processes: int, dtype: str, folder: Path) -> list[dict]:
    """The rollouts of a run on this many processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    output_dir = folder / str(processes)
    command = [*launch, "rloo.py", *FLAGS, "--dtype", dtype, "--output-dir", str(output_dir)]
    subprocess.run(command, check=True, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in open(output_dir / "rollouts.jsonl")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    dtype = parser.parse_args().dtype
    with tempfile.TemporaryDirectory() as folder:
        one, two = (rollouts(processes, dtype, Path(folder)) for processes in (1, 2))
    differ = sum(a["token_ids"] != b["token_ids"] for a, b in zip(one, two, strict=True))
    tokens = sum(len(row["token_ids"]) for row in one)
    same = [(a, b) for a, b in zip(one, two) if a["token_ids"] == b["token_ids"]]
    rounding = max(abs(x - y) for a, b in same for x, y in zip(a["logprobs"], b["logprobs"]))
    path = ROOT / "benchmark/results/completions_by_processes.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    summary[dtype] = {"completions": len(one), "tokens": tokens, "completions_that_differ": differ}
    summary[dtype]["largest_logprob_difference"] = rounding  # where the tokens are the same
    print(summary)
    path.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
