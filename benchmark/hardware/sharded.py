"""Check that 2 CPU processes compute what one process computes, for all three scripts.

    python benchmark/hardware/sharded.py                 # all parts, which needs DeepSpeed
    python benchmark/hardware/sharded.py DDP FSDP2       # these need nothing more

DeepSpeed is not in the default environment: once it is there, accelerate and transformers import it
at every start. From the environment that runs the scripts:

    python -m venv /tmp/with_deepspeed
    python -c "import site; print(site.getsitepackages()[0])" > parent.pth
    mv parent.pth /tmp/with_deepspeed/lib/python3*/site-packages/
    /tmp/with_deepspeed/bin/pip install setuptools wheel
    DS_BUILD_OPS=0 /tmp/with_deepspeed/bin/pip install --no-build-isolation deepspeed==0.19.8
    /tmp/with_deepspeed/bin/python benchmark/hardware/sharded.py ZeRO-2 ZeRO-3

Compared with one process are every metric (1e-4 relative or 5e-6 absolute) and the final weights
(by norm, relative to how far they moved, 1e-3). With DeepSpeed the steps that its engine really
took and their learning rates are compared, too, no weight may be gathered while completions are
sampled, and a run that is resumed from half of it must give the same weights bit by bit. FSDP2 may
gather each layer once for each rollout. The program stops where something differs. Writes
sharded.json. A smoke run has no DeepSpeed. There only one process runs for those parts.
"""

import functools
import json
import re
import shutil
import sys
import tempfile
from math import inf
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import POLICY, SCRIPTS, Part, main, read_rows, relative_distance, run, torchrun

RESULT = Path(__file__).with_suffix(".json")
FLAGS = (
    "--total-episodes 128 --batch-size 32 --num-mini-batches 1 --per-device-train-batch-size 4 "
    "--learning-rate 3e-4 --num-sample-generations 0 --max-grad-norm 1 --save-every 2 "
    "--keep-checkpoints 2"
)
LAUNCHERS = {
    "DDP": [],
    "FSDP2": ["fsdp2_cpu.py"],
    "ZeRO-2": ["zero_cpu.py"],
    "ZeRO-3": ["zero_cpu.py"],
}


def run_twofold(kind: str, script: str, flags: str, folder: Path) -> str:
    """Train on two processes. Returns the last line that was printed."""
    settings = dict(ACCELERATE_USE_CPU="true")
    if kind.startswith("ZeRO"):
        # With another threshold ZeRO-3 would not shard weights as small as these.
        zero = dict(stage=int(kind[-1]), stage3_param_persistence_threshold=0)
        config = folder.with_suffix(".json")
        config.write_text(
            json.dumps(dict(train_micro_batch_size_per_gpu=1, zero_optimization=zero))
        )
        settings = dict(
            ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(config)
        )
    programs = [Path(__file__).with_name(name) for name in LAUNCHERS[kind]]
    output = run(script, flags, folder, torchrun(2, *programs), **settings)["output"]
    return output.splitlines()[-1]


def differences(rows: list[dict], expected: list[dict]) -> list[tuple]:
    """For each metric of each iteration the difference in units of its size, or of 0.05 if it is
    smaller; its name; and the iteration."""
    found = []
    for row, right in zip(rows, expected, strict=True):
        for name in row.keys() | right.keys():
            # Times differ, and so does the size of rounding itself.
            if not re.match("eps$|seconds$|time/|val/sampling_logprob_difference", name):
                difference = abs(row.get(name, inf) - right.get(name, -inf))  # inf: one is missing
                size = max(abs(right.get(name, 0)), 0.05)
                found.append((difference / size, name, row["iteration"]))
    return found


def compare(folder: Path, single: Path) -> dict:
    """What differs between a run on two processes and the one on a single process."""
    pair = [read_rows(path / "metrics.jsonl") for path in (folder, single)]
    differing = {name for difference, name, _ in differences(*pair) if difference > 1e-4}
    return dict(
        relative_distance=relative_distance(folder, single), metrics_that_differ=sorted(differing)
    )


def check_engine(found: dict, single: Path) -> dict:
    """What DeepSpeed's engine did, and whether its steps and their rates are those that one process
    logs."""
    expected = read_rows(single / "metrics.jsonl")
    rates = [row["lr"] for row in expected if "lr" in row]
    steps = expected[-1]["step"]
    last_of_iteration = found["rates"][:: -steps // len(rates)][::-1]  # The log has this one.
    as_planned = len(found["rates"]) == steps and np.allclose(rates, last_of_iteration)
    return (
        dict(steps=len(found["rates"]), steps_and_rates_as_planned=bool(as_planned))
        | found["gathers"]
    )


def resumes_bitwise(kind: str, script: str, flags: str, folder: Path) -> bool:
    """Resume a run from its second iteration. Returns whether its weights are the same in the
    end."""
    resumed = folder.with_name(folder.name + "_resumed")
    shutil.copytree(folder, resumed)
    shutil.rmtree(resumed / "model")
    shutil.rmtree(resumed / "checkpoints" / "iteration_00000004")
    run_twofold(kind, script, f"{flags} --resume", resumed)
    one, two = ((path / "model" / "model.safetensors").read_bytes() for path in (folder, resumed))
    return one == two


@functools.cache
def run_single(script: str, flags: str) -> tempfile.TemporaryDirectory:
    """Train on one process, once for all parts. The folder of the run lasts as long as this
    program."""
    folder = tempfile.TemporaryDirectory(prefix="sharded_")
    run(script, flags, Path(folder.name) / "run", ACCELERATE_USE_CPU="true")
    return folder


def train(kind: str, script: str, flags: str, folder: Path) -> dict:
    """Train on two processes. Returns what differs from one process."""
    single = Path(run_single(script, flags).name) / "run"
    printed = run_twofold(kind, script, flags, folder)
    row = compare(folder, single)
    is_right = row["relative_distance"] < 1e-3 and not row["metrics_that_differ"]
    if kind == "FSDP2":
        row |= json.loads(printed)
        layers = json.loads((POLICY / "config.json").read_text())["num_hidden_layers"]
        is_right &= row["while_sampling"] <= layers * row["samplings"]
    if kind.startswith("ZeRO"):
        row |= check_engine(json.loads(printed), single)
        row["resumed_bitwise"] = resumes_bitwise(kind, script, flags, folder)
        is_right &= row["steps_and_rates_as_planned"] and row["resumed_bitwise"]
        is_right &= row["while_sampling"] == 0
    if not is_right:
        raise SystemExit(f"{kind}, {script}: {row}")
    return row


def measure(kind: str, jobs: dict, smoke: bool) -> list[dict]:
    rows = []
    for (script, flags), names in jobs.items():
        if smoke and kind.startswith("ZeRO"):
            run_single(script, flags)
            continue
        with tempfile.TemporaryDirectory() as work:
            rows.append(names | train(kind, script, flags, Path(work) / "run"))
        if smoke:
            break
    return rows


PARTS = {}
for kind in LAUNCHERS:
    PARTS[kind] = Part(
        [({}, script, "") for script in SCRIPTS],
        FLAGS,
        measure=functools.partial(measure, kind),
        short="--total-episodes 64",
        needs="DeepSpeed" if kind.startswith("ZeRO") else "",
    )

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
