"""Check that 2 CPU processes compute what one process computes.

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

ppo.py does not run under DeepSpeed. Compared with one process are every metric (1e-4 relative or
5e-6 absolute) and the final weights (by norm, relative to how far they moved, 1e-3). A run that is
killed in its third iteration and resumed must give the same weights bit by bit. With DeepSpeed the
steps that its engine really took and their learning rates are compared, too, and no weight may be
gathered while completions are sampled. FSDP2 may gather each layer once for each rollout. The
program stops where something differs. Writes sharded.json. A smoke run has no DeepSpeed.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from check_copy import computed, difference
from kill_and_resume import kill_at, start
from run import SCRIPTS, Part, column, main, relative_distance, run
from shards import fsdp2, zero

RESULT = Path(__file__).with_suffix(".json")
FLAGS = (
    "--total-episodes 128 --batch-size 32 --num-mini-batches 1 --per-device-train-batch-size 4 "
    "--learning-rate 3e-4 --num-sample-generations 0 --max-grad-norm 1 --save-every 2 --resume"
)
LAYERS = 3  # of the default policy
KILL = partial(kill_at, phase="loading", call=3)
KINDS = {  # functions that change a script, so that it runs in this way
    "DDP": [],
    "FSDP2": [fsdp2],
    "ZeRO-2": [partial(zero, 2)],
    "ZeRO-3": [partial(zero, 3)],
}


def compare(kind, script, flags, work):
    """Train on one process and on two, and on two once more, with a kill. Returns how far the first
    two are apart."""
    edits = KINDS[kind]
    right, folder, killed = (work / name for name in ("one", "two", "killed"))
    one = run(script, flags, right)
    two = run(script, flags, *edits, folder, processes=2)
    was_killed = start(script, flags, killed, 2, *edits, KILL)
    start(script, flags, killed, 2, *edits)
    distance = relative_distance(folder, right)
    found, expected = computed(two), computed(one)
    other = [x for x in expected | found if difference(found.get(x), expected.get(x)) > 1e-4]
    checks = dict(
        weights=distance < 1e-3,
        metrics=not other,
        resumed=was_killed and relative_distance(killed, folder) == 0,
    )
    if edits:
        allowed = LAYERS * two["samplings"] if kind == "FSDP2" else 0
        checks["gathers"] = two["while_sampling"] <= allowed
    if "rates" in two:
        rates = column(one["metrics"][1:], "lr")
        checks["rates"] = np.allclose(two["rates"], rates, rtol=0, atol=1e-12)
    if not all(checks.values()):
        raise SystemExit(f"{kind}, {script}: {checks}, {distance}, {other}")
    return dict(relative_distance=distance)


def measure(kind, jobs, smoke):
    if smoke:
        jobs = {} if "ZeRO" in kind else dict([*jobs.items()][:1])
    rows = []
    for (script, flags), names in jobs.items():
        with tempfile.TemporaryDirectory(prefix="sharded_") as work:
            rows.append(names | compare(kind, script, flags, Path(work)))
    return rows


PARTS = {}
for kind in KINDS:
    scripts = SCRIPTS[:2] if "ZeRO" in kind else SCRIPTS
    runs = [({}, name, "") for name in scripts]
    PARTS[kind] = Part(runs, FLAGS, measure=partial(measure, kind), short="")

if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(__doc__, RESULT, PARTS)
