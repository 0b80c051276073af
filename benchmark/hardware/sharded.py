"""Check that 2 CPU processes compute what one process computes, for all three scripts.

    python benchmark/hardware/sharded.py                 # DDP and FSDP2, 5 minutes; writes fsdp2_cpu.json
    python benchmark/hardware/sharded.py deepspeed       # ZeRO-2 and ZeRO-3, 10 minutes; writes sharded.json

DeepSpeed is not in the default environment: once it is there, accelerate and transformers import it at every start.
From the environment that runs the scripts:

    python -m venv /tmp/with_deepspeed
    python -c "import site; print(site.getsitepackages()[0])" > parent.pth
    mv parent.pth /tmp/with_deepspeed/lib/python3*/site-packages/
    /tmp/with_deepspeed/bin/pip install setuptools wheel
    DS_BUILD_OPS=0 /tmp/with_deepspeed/bin/pip install --no-build-isolation deepspeed==0.19.8
    /tmp/with_deepspeed/bin/python benchmark/hardware/sharded.py deepspeed

Compared with one process are every metric (1e-4 relative or 5e-6 absolute) and the final weights (by norm, relative to
how far they moved, 1e-3). With DeepSpeed the steps that its engine really took and their learning rates are compared,
too, no weight may be gathered while completions are sampled, and a run that is resumed from half of it must give the
same weights bit by bit. FSDP2 may gather each layer once for each rollout. The exit status is 1 if something differs.
"""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import POLICY, SCRIPTS, import_script, machine, read_rows, relative_distance, run, torchrun

FLAGS = (
    "--total-episodes 128 --batch-size 32 --num-mini-batches 1 --per-device-train-batch-size 4 "
    "--learning-rate 3e-4 --num-sample-generations 0 --max-grad-norm 1 --save-every 2"
)


def count_gathers(module, *owners_and_names) -> Counter:
    """Count how often the functions that gather weights are called, in all and while completions are sampled."""
    gathers = Counter(gathers=0, while_sampling=0, samplings=0)
    sample = module.sample

    def watched_sample(*args, **inputs):
        before = gathers["gathers"]
        result = sample(*args, **inputs)
        gathers.update(while_sampling=gathers["gathers"] - before, samplings=1)
        return result

    def counted(function):
        def gather(*args, **kwargs):
            gathers["gathers"] += 1
            return function(*args, **kwargs)

        return gather

    module.sample = watched_sample
    for owner, name in owners_and_names:
        setattr(owner, name, counted(getattr(owner, name)))
    return gathers


def worker(script: str, flags: list[str]):
    """One process of a DeepSpeed run (accelerate makes it DDP where there is no GPU); counts steps and gathers."""
    from accelerate import PartialState
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters as partition

    PartialState(cpu=True)
    module, rates, take_step = import_script(script), [], DeepSpeedEngine._take_model_step

    def noted_step(engine, *args):
        rates.append(engine.get_lr()[0])
        return take_step(engine, *args)

    def keep_checkpoints(policy, output_dir, *more):  # which a finished run removes
        if module.accelerator.is_main_process:
            shutil.copytree(output_dir / "checkpoints", output_dir / "kept")
        finish(policy, output_dir, *more)

    finish, module.finish = module.finish, keep_checkpoints
    DeepSpeedEngine._take_model_step = noted_step
    names = ("all_gather_into_tensor", "all_gather")
    gathers = count_gathers(module, (partition, "_dist_allgather_fn"), *((partition.dist, name) for name in names))
    args = tyro.cli(module.Args, args=flags)
    module.main(args)
    if int(os.environ["RANK"]) == 0:
        (Path(args.output_dir) / "engine.json").write_text(json.dumps(dict(rates=rates, gathers=gathers)))


def run_sharded(script: str, folder: Path, stage: int, more: str = ""):
    """Train on two processes with DeepSpeed's ZeRO at this stage."""
    config = folder.with_suffix(".json")  # threshold 0: else ZeRO-3 would not shard weights as small as these
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
    settings = dict(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(config))
    run(script, f"{FLAGS} {more}", folder, torchrun(2, __file__, "--worker"), **settings)


def resumes_bitwise(script: str, folder: Path, stage: int) -> bool:
    """Resume a run from its second iteration -> whether its weights are the same in the end."""
    resumed = folder.with_name(folder.name + "_resumed")
    shutil.copytree(folder, resumed)
    shutil.rmtree(resumed / "model")
    (resumed / "kept").rename(resumed / "checkpoints")
    shutil.rmtree(resumed / "checkpoints" / "iteration_00000004")
    run_sharded(script, resumed, stage, "--resume")
    one, two = ((path / "model" / "model.safetensors").read_bytes() for path in (folder, resumed))
    return one == two


def compare(folder: Path, single: Path) -> dict:
    """What differs between a run on two processes and the one on a single process."""
    rows, expected = (read_rows(path / "metrics.jsonl") for path in (folder, single))
    differing = set()
    for row, right in zip(rows, expected, strict=True):
        differing |= {name for name in row.keys() | right.keys() if not np.isclose(row[name], right[name], 1e-4, 5e-6)}
    # times, and the size of rounding itself
    differing -= {"eps", "val/sampling_logprob_difference", *(name for name in differing if name.startswith("time/"))}
    return dict(relative_distance=relative_distance(folder, single), metrics_that_differ=sorted(differing))


def engine_of(folder: Path, single: Path) -> dict:
    """What DeepSpeed's engine did, and whether its steps and their rates are those that one process logs."""
    expected = read_rows(single / "metrics.jsonl")
    engine, rates = json.loads((folder / "engine.json").read_text()), [row["lr"] for row in expected if "lr" in row]
    steps = expected[-1]["step"]
    last_of_iteration = engine["rates"][:: -steps // len(rates)][::-1]  # which is what the log has
    as_planned = len(engine["rates"]) == steps and np.allclose(rates, last_of_iteration)
    return dict(steps=len(engine["rates"]), steps_and_rates_as_planned=bool(as_planned)) | engine["gathers"]


def train(script: str, folder: Path, single: Path, kind: str | int) -> dict:
    """Train on two processes -> what is kept of the run. kind: DDP, FSDP2, or the stage of ZeRO"""
    if kind in (2, 3):
        run_sharded(script, folder, kind)
        return engine_of(folder, single) | dict(resumed_bitwise=resumes_bitwise(script, folder, kind))
    program = [Path(__file__).with_name("fsdp2_cpu.py")] if kind == "FSDP2" else []
    output = run(script, FLAGS, folder, torchrun(2, *program), ACCELERATE_USE_CPU="true")["output"]
    return json.loads(output.splitlines()[-1]) if program else {}


def is_fine(row: dict) -> bool:
    layers = json.loads((POLICY / "config.json").read_text())["num_hidden_layers"]
    gathers = 0 if "stage" in row else layers * row.get("samplings", 0)
    as_planned = row.get("steps_and_rates_as_planned", True) and row.get("resumed_bitwise", True)
    near = row["relative_distance"] < 1e-3 and not row["metrics_that_differ"]
    return near and as_planned and row.get("while_sampling", 0) <= gathers


def main():
    name, kinds, result = "kind", ("DDP", "FSDP2"), "fsdp2_cpu.json"
    if sys.argv[1:] == ["deepspeed"]:
        name, kinds, result = "stage", (2, 3), "sharded.json"
    work, rows = Path(tempfile.mkdtemp(prefix="sharded_")), []
    for script in SCRIPTS:
        single = work / script
        run(script, FLAGS, single, ACCELERATE_USE_CPU="true")
        for kind in kinds:
            folder = work / f"{script}_{kind}"
            more = train(script, folder, single, kind)
            rows.append({"script": script, name: kind} | compare(folder, single) | more)
            print(json.dumps(rows[-1]), flush=True)
    result = Path(__file__).with_name(result)
    result.write_text(json.dumps(dict(machine=machine(), flags=FLAGS, runs=rows), indent=1) + "\n")
    raise SystemExit(0 if all(map(is_fine, rows)) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        main()
