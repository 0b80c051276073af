"""Check on 2 CPU processes that DeepSpeed ZeRO-2 and ZeRO-3 compute what one process computes, for all three scripts.

DeepSpeed stays out of the default environment: accelerate and transformers import it at every start once it is there.
From the environment that runs the scripts:

    python -m venv /tmp/with_deepspeed
    python -c "import site; print(site.getsitepackages()[0])" > parent.pth
    mv parent.pth /tmp/with_deepspeed/lib/python3*/site-packages/
    /tmp/with_deepspeed/bin/pip install setuptools wheel
    DS_BUILD_OPS=0 /tmp/with_deepspeed/bin/pip install --no-build-isolation deepspeed==0.19.8
    /tmp/with_deepspeed/bin/python benchmark/sharded.py

The first run compiles a helper for a minute. Every run makes 4 micro-batches per step. Compared with one process: every
metric (1e-4 relative or 1e-6 absolute), the final weights (by norm, relative to how far they moved, 1e-3), the steps
that DeepSpeed's engine really took and their learning rates; and no weight is gathered inside a rollout's passes. Then
the run is resumed from half of it, which must give the same weights bit by bit, and with a pickle that makes a file in
place of each of the checkpoint's in turn, which must be refused, not executed.
Exit status 1 where something differs. The table goes to benchmark/results/sharded.json, too.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import tyro
from safetensors.numpy import load_file

BENCHMARK = Path(__file__).resolve().parent
FLAGS = """--total-episodes 128 --batch-size 32 --num-mini-batches 1 --per-device-train-batch-size 4
    --learning-rate 3e-4 --num-sample-generations 0 --max-grad-norm 1 --save-every 2""".split()


def worker(script: str, flags: list[str]):
    """One process of a DeepSpeed run (accelerate makes it DDP where there is no GPU); counts steps and gathers."""
    from accelerate import PartialState
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters

    PartialState(cpu=True)
    spec = importlib.util.spec_from_file_location("script", script)
    module = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen = {"lr": [], "gathers": 0, "gathers_in_rollout_passes": 0}
    in_rollout = False

    def before(owner, name, note):
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            note(*args)
            return original(*args, **kwargs)

        setattr(owner, name, noted)

    def gather(*_):
        seen["gathers"] += 1
        seen["gathers_in_rollout_passes"] += in_rollout

    def watched(function):
        def passes(*args, **kwargs):
            nonlocal in_rollout
            in_rollout = True
            result = function(*args, **kwargs)
            in_rollout = False
            return result

        return passes

    before(DeepSpeedEngine, "_take_model_step", lambda engine, *_: seen["lr"].append(engine.get_lr()[0]))
    for owner, name in (
        (partition_parameters, "_dist_allgather_fn"),
        (partition_parameters.dist, "all_gather_into_tensor"),
        (partition_parameters.dist, "all_gather"),
    ):
        before(owner, name, gather)
    module.sample, module.completion_pass = watched(module.sample), watched(module.completion_pass)
    args = tyro.cli(module.Args, args=flags)
    module.main(args)
    if int(os.environ["RANK"]) == 0:
        (Path(args.output_dir) / "engine.json").write_text(json.dumps(seen))


def run(script: str, folder: Path, stage: int | None, *more: str) -> bool:
    """Train on one process, or on two with DeepSpeed's ZeRO at this stage -> whether it ended well."""
    command, environment = [sys.executable, f"{BENCHMARK.parent / script}.py"], dict(os.environ, OMP_NUM_THREADS="1")
    if stage is None:
        environment["ACCELERATE_USE_CPU"] = "true"
    else:
        config = folder.with_suffix(".json")  # threshold 0: else ZeRO-3 would not shard weights as small as these
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
        environment |= dict(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(config))
        environment.pop("ACCELERATE_USE_CPU", None)
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, "--worker"]
    with open(folder.with_suffix(".log"), "w") as log:
        command += [*FLAGS, "--output-dir", str(folder), *more]
        return subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode == 0


class Pickle:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def resume(script: str, folder: Path, stage: int) -> dict:
    """Resume a run from its second iteration: as it was, and with a pickle in place of each file of the checkpoint."""
    resumed, executed, refused = folder.with_name(folder.name + "_resumed"), folder / "executed", 0
    shutil.copytree(folder, resumed)
    shutil.rmtree(resumed / "model")
    shutil.rmtree(resumed / "checkpoints" / "iteration_00000004")
    files = sorted((resumed / "checkpoints").glob("*/pytorch_model/*.pt"))
    for file in files:
        whole = file.read_bytes()
        torch.save(Pickle(executed), file)
        refused += (
            not run(script, resumed, stage, "--resume") and "cannot be read" in resumed.with_suffix(".log").read_text()
        )
        file.write_bytes(whole)
    fine = run(script, resumed, stage, "--resume")
    same = (
        fine
        and (resumed / "model" / "model.safetensors").read_bytes()
        == (folder / "model" / "model.safetensors").read_bytes()
    )
    return dict(
        resumed_bitwise=same, pickles=len(files), pickles_refused=refused, pickles_executed=int(executed.exists())
    )


def distance(weights: dict, others: dict) -> float:
    """Norm of the difference of two state dicts."""
    return float(np.sqrt(sum(np.square(weights[name] - others[name], dtype=np.float64).sum() for name in others)))


def compare(folder: Path, single: Path) -> dict:
    """What differs between a sharded run and the one on a single process."""
    rows, expected = ([json.loads(line) for line in open(path / "metrics.jsonl")] for path in (folder, single))
    differing = {
        name
        for row, right in zip(rows, expected, strict=True)
        for name in row.keys() | right.keys()
        if not name.startswith("time/") and name != "eps" and not np.isclose(row[name], right[name], 1e-4, 1e-6)
    }
    start = load_file(BENCHMARK / "default" / "policy" / "model.safetensors")
    weights, right = (load_file(path / "model" / "model.safetensors") for path in (folder, single))
    return dict(
        relative_distance=distance(weights, right) / distance(right, start), metrics_that_differ=sorted(differing)
    )


def engine_of(folder: Path, single: Path) -> dict:
    """What DeepSpeed's engine did, and whether its steps and their rates are those that one process logs."""
    expected = [json.loads(line) for line in open(single / "metrics.jsonl")]
    engine, rates = json.loads((folder / "engine.json").read_text()), [row["lr"] for row in expected if "lr" in row]
    steps = expected[-1]["step"]
    last_of_iteration = engine["lr"][:: -steps // len(rates)][::-1]  # which is what the log has
    return dict(
        optimizer_steps=len(engine["lr"]),
        steps_and_rates_as_planned=bool(len(engine["lr"]) == steps and np.allclose(rates, last_of_iteration)),
        gathers=engine["gathers"],
        gathers_in_rollout_passes=engine["gathers_in_rollout_passes"],
    )


def main():
    work, results = Path(tempfile.mkdtemp(prefix="sharded_")), []
    for script in ("rloo", "grpo", "ppo"):
        run(script, work / script, stage=None)
        for stage in (2, 3):
            folder = work / f"{script}_zero{stage}"
            if not run(script, folder, stage):
                raise SystemExit(f"{script} at stage {stage} failed; see {folder}.log")
            results.append(dict(script=script, stage=stage, **compare(folder, work / script)))
            results[-1] |= engine_of(folder, work / script) | resume(script, folder, stage)
            print(json.dumps(results[-1]), flush=True)
    (BENCHMARK / "results").mkdir(exist_ok=True)
    (BENCHMARK / "results" / "sharded.json").write_text(json.dumps(dict(flags=" ".join(FLAGS), runs=results), indent=1))
    fine = [
        row["relative_distance"] < 1e-3
        and row["steps_and_rates_as_planned"]
        and not row["metrics_that_differ"]
        and not row["gathers_in_rollout_passes"]
        and row["resumed_bitwise"]
        and row["pickles_refused"] == row["pickles"]
        and not row["pickles_executed"]
        for row in results
    ]
    raise SystemExit(0 if all(fine) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        main()
