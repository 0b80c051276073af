"""Kill runs at drawn moments, start the same command again until it is done, and compare with a run
never killed.

    python benchmark/hardware/kill_and_resume.py

Every script trains a run of 12 iterations three times: on one process, on two, and on one and two
by turns. Each of the three is killed nine times, by SIGKILL of all its processes: at a drawn call
of each of PHASES, twice after some seconds, and last while it writes its model.

The weights must be those of the unbroken run: bitwise the same where the number of processes never
changed, else by norm, |w1 - w2| / |w1 - w_start| < 1e-3. Every row must stand once in its file, and
one more start must do nothing. The program stops where one of these fails. The learning rate is
1e-4. At 3e-4 this PPO run is chaotic: even unbroken runs on 1 and on 2 processes end 0.2 apart.
Writes kill_and_resume.json. A smoke run kills RLOO by turns.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import SCRIPTS, Part, apart, main, read_run, relative_distance, run_here

RESULT = Path(__file__).with_suffix(".json")
SEED = 1
PHASES = dict(rollout=15, training=12, written=2, removing=1, metrics=2, loading=1)  # calls
FLAGS = (
    "--total-episodes 188 --batch-size 16 --num-mini-batches 2 --num-ppo-epochs 1 "
    "--per-device-train-batch-size 3 --learning-rate 1e-4 --save-every 1 --save-rollouts "
    "--num-sample-generations 4 --resume"
)
PROCESSES = {"1": [1] * 9, "2": [2] * 9, "1, 2 by turns": [1, 2] * 5}


def kill_at(module, phase, call, rank=0):
    """Let call number `call` of the function that stands for a phase end this process, if it is the
    one with this rank."""
    if int(os.environ.get("RANK", 0)) != rank:
        return
    calls = itertools.count(1)
    owner, name, file = {  # Where a file is named, only calls with this file count.
        # after the last token, and between two micro-batches
        "rollout": (module, "completion_text", None),
        "training": (module.accelerate.Accelerator, "backward", None),
        # The tensors of a checkpoint are written, but it is not whole yet.
        "written": (Path, "rename", "unfinished"),
        "removing": (module.shutil, "rmtree", "unfinished"),
        "metrics": (module, "write_jsonl", "metrics.jsonl"),
        # A checkpoint is loaded, but no iteration is made.
        "loading": (module, "draw_prompts", None),
        "model": (Path, "rename", "model.tmp"),
    }[phase]
    original = getattr(owner, name)

    def is_meant(path):
        if phase == "removing" and not path.exists():
            return False
        return file is None or path.name == file

    def struck(*args, **inputs):
        if is_meant(args[0]) and next(calls) == call:
            if phase == "removing":
                for half in sorted(args[0].iterdir())[::2]:
                    half.unlink()
            elif phase == "metrics":
                with open(args[0], "a", encoding="utf-8") as half:
                    half.write(json.dumps(args[1][0])[:40])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **inputs)

    setattr(owner, name, struck)


def start(script, flags, folder, processes, *edits, **settings):
    """Start a run, and wait. Returns whether it was killed. If it fails, this program ends.

    settings: of `apart`
    """
    job = (script, flags, *edits, folder)
    failed = apart(run_here, job, processes=processes, **settings).get("failed", "")
    is_killed = "exit code -9" in failed
    if failed and not is_killed:
        raise SystemExit(failed)
    return is_killed


def rows_of(folder):
    """Which rows stand in the files of a run."""
    found = read_run(folder)
    return [(row["iteration"], row.get("index")) for row in found["metrics"] + found["rollouts"]]


def kill_run(job, processes, draw, work):
    """Kill a run nine times, and let it end. Returns how far it is from the unbroken one."""
    right = work / "unbroken"
    folder = work / "killed"
    start(*job, right, processes[0])
    phases = [*PHASES, "anywhere", "anywhere"]
    for count, phase in zip(processes, [*draw.sample(phases, len(phases)), "model"]):
        if phase == "anywhere":
            is_killed = start(*job, folder, count, seconds=draw.uniform(0.3, 1.5))
        else:
            # Only the main process writes.
            rank = draw.randrange(count) if phase in ("rollout", "training", "loading") else 0
            call = draw.randint(1, PHASES.get(phase, 1))
            strike = partial(kill_at, phase=phase, call=call, rank=rank)
            is_killed = start(*job, folder, count, strike)
        if not is_killed:
            raise SystemExit(f"{job}: no kill at {phase}; draw again with another SEED")
    start(*job, folder, processes[-1])
    written = (folder / "model").stat().st_mtime_ns
    start(*job, folder, processes[-1])
    distance = relative_distance(folder, right)
    is_right = distance == 0 or (distance < 1e-3 and len({*processes}) > 1)
    is_right &= (folder / "model").stat().st_mtime_ns == written
    if not is_right or rows_of(folder) != rows_of(right):
        raise SystemExit(f"{job}: {folder} is not {right}, {distance}")
    return dict(kills=len(phases) + 1, relative_distance=distance)


def measure(jobs, smoke):
    draw = random.Random(SEED)
    cases = [*product(jobs.items(), PROCESSES.items())]
    rows = []
    for (job, names), (name, processes) in cases[2:3] if smoke else cases:
        work = Path(tempfile.mkdtemp(prefix="kill_and_resume_"))  # It stays, if this fails.
        rows.append(names | dict(processes=name) | kill_run(job, processes, draw, work))
        shutil.rmtree(work)
    return rows


RUNS = [({}, script, "") for script in SCRIPTS]
PARTS = {"kills": Part(RUNS, FLAGS, measure=measure, short="")}

if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(__doc__, RESULT, PARTS)
