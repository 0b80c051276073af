"""Is it the same run, on 2 CPU processes, or with micro-batches of 16 in place of 64?

    python benchmark/hardware/same_run.py                 # all parts, which needs DeepSpeed
    python benchmark/hardware/same_run.py DDP FSDP2 rloo  # these need nothing more

Each run is compared with that of one process: its completions, token for token, and its final
weights, by norm, relative to how far they moved. If a completion differs, what is trained on it
differs, too.

The parts of SHARDED are short runs. In them every metric must be the same (1e-4 relative or 5e-6
absolute), and the weights (1e-3). A run that is killed in its third iteration and resumed must
give the same weights bit by bit. With DeepSpeed the steps that its engine really took and their
learning rates are compared, too, and no weight may be gathered while completions are sampled.
FSDP2 may gather each layer once for each rollout. The program stops where something differs.

The other parts are default runs, and count what differs. By default PPO whitens its advantages: it
shifts them to mean 0, and scales them to variance 1. The last parts are PPO as it is, without the
shift, and without the second PPO epoch.

ppo.py does not run under DeepSpeed. DeepSpeed is not in the default environment: once it is there,
accelerate and transformers import it at every start. From the environment that runs the scripts:

    python -m venv /tmp/with_deepspeed
    python -c "import site; print(site.getsitepackages()[0])" > parent.pth
    mv parent.pth /tmp/with_deepspeed/lib/python3*/site-packages/
    /tmp/with_deepspeed/bin/pip install setuptools wheel
    DS_BUILD_OPS=0 /tmp/with_deepspeed/bin/pip install --no-build-isolation deepspeed==0.19.8
    /tmp/with_deepspeed/bin/python benchmark/hardware/same_run.py ZeRO-2 ZeRO-3

Writes same_run.json, a comparison a line. A smoke run has no DeepSpeed.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from check_copy import computed
from kill_and_resume import kill_at, start
from run import SCRIPTS, Part, column, difference, main, relative_distance, run
from shards import fsdp2, zero

RESULT = Path(__file__).with_suffix(".json")
LAYERS = 3  # of the default policy
KILL = partial(kill_at, phase="loading", call=3)
MICRO_BATCHES = "micro-batches of 64 and 16"
PROCESSES = "1 and 2 processes"
SHARDED = {"DDP": [], "FSDP2": [fsdp2], "ZeRO-2": [partial(zero, 2)], "ZeRO-3": [partial(zero, 3)]}
WAYS = {  # of the second run: processes, flags, and functions that change the script
    PROCESSES: (2, ""),
    MICRO_BATCHES: (1, "--per-device-train-batch-size 16"),
} | {way: (2, "", *edits) for way, edits in SHARDED.items()}


def only_scale(ppo):
    """Whiten without the shift."""
    ppo.whiten = lambda values: values * (values.var(correction=0) + 1e-8).rsqrt()


def check(way, job, folder, one, two, distance):
    """Stop where a run on two processes, in `folder`, is not that of one, or where it is another
    one after a kill."""
    killed = folder.with_name("killed")
    was_killed = start(*job, killed, 2, *SHARDED[way], KILL)
    start(*job, killed, 2, *SHARDED[way])
    found, expected = computed(two), computed(one)
    other = [x for x in expected | found if difference(found.get(x), expected.get(x)) > 1e-4]
    checks = dict(
        weights=distance < 1e-3,
        metrics=not other,
        resumed=was_killed and relative_distance(killed, folder) == 0,
    )
    if SHARDED[way]:
        allowed = LAYERS * two["samplings"] if way == "FSDP2" else 0
        checks["gathers"] = two["while_sampling"] <= allowed
    if "rates" in two:
        rates = column(one["metrics"][1:], "lr")
        checks["rates"] = np.allclose(two["rates"], rates, rtol=0, atol=1e-12)
    if not all(checks.values()):
        raise SystemExit(f"{way}, {job}: {checks}, {distance}, {other}")


def compare(ways, jobs, smoke):
    """Make each run, and then in other ways, and compare."""
    rows = []
    for (script, flags, *edits), names in [*jobs.items()][: 1 if smoke else None]:
        with tempfile.TemporaryDirectory(prefix="same_run_") as work:
            right = Path(work, "right")
            one = run(script, flags, *edits, right)
            for way in ways:
                if smoke and "ZeRO" in way:
                    continue
                processes, own, *more = WAYS[way]
                folder = Path(work, way)
                job = script, f"{flags} {own}"
                two = run(*job, *edits, *more, folder, processes=processes)
                distance = relative_distance(folder, right)
                if way in SHARDED:
                    check(way, job, folder, one, two, distance)
                row = names | dict(between=way, distance=float(f"{distance:.3g}"))
                pairs = zip(one["rollouts"], two["rollouts"], strict=True)
                differ = [a["token_ids"] != b["token_ids"] for a, b in pairs]
                row |= dict(completions=len(differ), completions_that_differ=sum(differ))
                rows.append(row)
    return rows


SHORT = "--total-episodes 128 --batch-size 32 --num-mini-batches 1 --per-device-train-batch-size 4"
SHORT += " --learning-rate 3e-4 --max-grad-norm 1 --save-every 2 --resume"
LONG = "--save-every None"


def part(flags, ways, scripts, own="", *edits, seeds=(1,)):
    flags += " --num-sample-generations 0 --save-rollouts"
    runs = [({}, script, own, *edits) for script in scripts]
    return Part(runs, flags, seeds, measure=partial(compare, ways), short="--total-episodes 128")


PARTS = {way: part(SHORT, [way], SCRIPTS[: 2 if "ZeRO" in way else 3]) for way in SHARDED}
PARTS |= {script: part(LONG, [PROCESSES, MICRO_BATCHES], [script]) for script in SCRIPTS}
FIVE = partial(part, LONG, [MICRO_BATCHES], ["ppo"], seeds=range(1, 6))
PARTS |= {
    "rloo in bfloat16": part(LONG, [PROCESSES], ["rloo"], "--dtype bfloat16"),
    "PPO, shift and scale": FIVE(),
    "PPO, scale only": FIVE("", only_scale),
    "PPO, one PPO epoch": FIVE("--num-ppo-epochs 1"),
}

if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(__doc__, RESULT, PARTS)
