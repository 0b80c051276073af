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
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
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


def kill_at(module, phase: str, call: int, rank: int = 0):
    """Let call number `call` of the function that stands for a phase end this process, if it is the
    one with this rank."""
    if int(os.environ.get("RANK", 0)) != rank:
        return
    calls = itertools.count(1)

    def write_half(path, rows):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(rows[0])[:40])

    def remove_half(folder):
        for file in sorted(folder.iterdir())[::2]:
            file.unlink()

    owner, name, applies, first = {  # of which calls, and what is done before the end
        # after the last token, and between two micro-batches
        "rollout": (module, "without_end", lambda *_: True, None),
        "training": (module.accelerate.Accelerator, "backward", lambda *_: True, None),
        # The tensors of a checkpoint are written, but it is not whole yet.
        "written": (Path, "rename", lambda path, _: path.name == "unfinished", None),
        "removing": (module.shutil, "rmtree", lambda path: path.exists(), remove_half),
        "metrics": (
            module,
            "write_jsonl",
            lambda path, _: path.name == "metrics.jsonl",
            write_half,
        ),
        # A checkpoint is loaded, but no iteration is made.
        "loading": (module, "draw_prompts", lambda *_: True, None),
        "model": (Path, "rename", lambda path, _: path.name == "model.tmp", None),
    }[phase]
    original = getattr(owner, name)

    def struck(*args, **inputs):
        if applies(*args) and next(calls) == call:
            if first:
                first(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **inputs)

    setattr(owner, name, struck)


def start(script: str, flags: str, folder: Path, processes: int, *edits, seconds=None) -> bool:
    """Start a run, and wait. Returns whether it was killed. If it fails, this program ends."""
    job = (script, flags, *edits, folder)
    failed = apart(run_here, job, processes=processes, seconds=seconds).get("failed", "")
    is_killed = "exit code -9" in failed
    if failed and not is_killed:
        raise SystemExit(failed)
    return is_killed


def kill_run(go_on, processes: list[int], draw: random.Random) -> Counter:
    """Kill a run nine times. Returns the kills by phase. go_on(processes, *edits, seconds=..)
    starts it"""
    hits = Counter()
    phases = [*PHASES, "anywhere", "anywhere"]
    for count, phase in zip(processes, [*draw.sample(phases, len(phases)), "model"]):
        if phase == "anywhere":
            hits[phase] += go_on(count, seconds=draw.uniform(0.3, 1.5))
            continue
        # Only the main process writes.
        rank = draw.randrange(count) if phase in ("rollout", "training", "loading") else 0
        call = draw.randint(1, PHASES.get(phase, 1))
        hits[phase] += go_on(count, partial(kill_at, phase=phase, call=call, rank=rank))
    return hits


def rows_of(folder: Path) -> list[tuple]:
    """Which rows stand in the files of a run."""
    found = read_run(folder)
    return [(row["iteration"], row.get("index")) for row in found["metrics"] + found["rollouts"]]


def kill_script(job: tuple, runs: list[str], draw: random.Random, work: Path) -> list[dict]:
    """Kill these runs of a script. Returns a row for each."""
    for count in (1, 2):
        start(*job, work / f"unbroken_{count}", count)
    rows = []
    hits = Counter()
    for name in runs:
        processes = PROCESSES[name]
        right = work / f"unbroken_{processes[0]}"
        folder = work / f"killed_{len(rows)}"
        go_on = partial(start, *job, folder)
        found = kill_run(go_on, processes, draw)
        hits += found
        go_on(processes[-1])
        written = (folder / "model").stat().st_mtime_ns
        go_on(processes[-1])
        one, two = ((path / "model" / "model.safetensors").read_bytes() for path in (folder, right))
        row = dict(
            processes=name,
            kills=found.total(),
            phases=dict(sorted(found.items())),
            bitwise=one == two,
            relative_distance=relative_distance(folder, right),
        )
        rows.append(row)
        is_right = row["bitwise"] or "," in name and row["relative_distance"] < 1e-3
        is_right &= (folder / "model").stat().st_mtime_ns == written
        if not is_right or rows_of(folder) != rows_of(right):
            raise SystemExit(f"{folder}: {row}")
    missed = {*PHASES, "anywhere", "model"} - {phase for phase in hits if hits[phase]}
    if hits.total() < 25 * len(runs) // 3 or missed:  # A drawn call may never come.
        found = f"{job}: {hits.total()} kills, phases missed: {missed}"
        raise SystemExit(f"{found}; draw again with another SEED")
    return rows


def measure(jobs: dict, smoke: bool) -> list[dict]:
    draw = random.Random(SEED)
    runs = list(PROCESSES)
    if smoke:
        jobs = dict([*jobs.items()][:1])
        runs = runs[-1:]
    rows = []
    for job, names in jobs.items():
        work = Path(tempfile.mkdtemp(prefix="kill_and_resume_"))  # It stays, if this fails.
        rows += [names | row for row in kill_script(job, runs, draw, work)]
    return rows


RUNS = [({}, script, "") for script in SCRIPTS]
PARTS = {"kills": Part(RUNS, FLAGS, measure=measure, short="")}

if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(__doc__, RESULT, PARTS)
