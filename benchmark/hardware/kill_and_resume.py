"""Kill runs at drawn moments, start the same command again until it is done, and compare with a run
never killed.

    python benchmark/hardware/kill_and_resume.py

Every script trains a run of 12 iterations three times: on one process, on two, and on one and two
by turns. Each of the three is killed nine times, by SIGKILL of all its processes, at a drawn call
of a PHASE or after some seconds.

The weights must be those of the unbroken run: bitwise the same where the number of processes never
changed, else by norm, |w1 - w2| / |w1 - w_start| < 1e-3. Every iteration must stand once in each
file, and one more start must do nothing. The program stops where one of these fails. The learning
rate is 1e-4. At 3e-4 this PPO run is chaotic: even unbroken runs on 1 and on 2 processes end 0.2
apart. Writes kill_and_resume.json. A smoke run kills RLOO by turns.
"""

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from multiprocessing import connection
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import (
    SCRIPTS,
    Part,
    free_port,
    import_script,
    main,
    read_rows,
    relative_distance,
    torchrun_variables,
)

RESULT = Path(__file__).with_suffix(".json")
SEED = 1
# then `model`
PHASES = (
    "rollout",
    "training",
    "written",
    "removing",
    "metrics",
    "loading",
    "anywhere",
    "anywhere",
)
FLAGS = (
    "--total-episodes 188 --batch-size 16 --num-mini-batches 2 --num-ppo-epochs 1 "
    "--per-device-train-batch-size 3 --learning-rate 1e-4 --save-every 1 --save-rollouts "
    "--num-sample-generations 4 --resume"
)
PROCESSES = {"1": [1] * 9, "2": [2] * 9, "1, 2 by turns": [1, 2] * 5}


def kill_at(module, phase: str, call: int):
    """Let call number `call` of the function that stands for a phase end this process."""
    calls = itertools.count(1)

    def write_half(path, rows):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(rows[0])[:40])

    def remove_half(folder):
        for file in sorted(folder.iterdir())[::2]:
            file.unlink()

    owner, name, applies, first = {  # of which calls, and what is done before the end
        # between two tokens, and between two micro-batches
        "rollout": (module, "pick_tokens", lambda *_: True, None),
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


def worker(script: str, flags: str, rank: int, processes: int, port: int, log: str, kill, edits):
    """One process of a run, with the environment that a launcher sets."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    os.environ |= dict(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    for name, value in torchrun_variables(rank, processes, port).items():
        os.environ[name] = str(value)
    module = sys.modules[script]  # this process's own copy
    module.torch.set_num_threads(1)
    module.torch.seed(), module.np.random.seed()  # A fork would have this program's numbers.
    for edit in edits:
        edit(module)
    if kill is not None and kill[0] != "anywhere" and rank == kill[2]:
        kill_at(module, *kill[:2])  # The parent kills the others as soon as it sees this one dead.
    module.main(tyro.cli(module.Args, args=flags.split()))


def start(
    script: str,
    flags: str,
    folder: Path,
    processes: int,
    kill=None,
    seconds: float | None = None,
    edits=(),
) -> bool:
    """Start a run and wait. Returns whether it was killed. A run that fails ends this program.

    script: one that was imported before; edits: functions that change it
    """
    fork = multiprocessing.get_context("fork")
    port = free_port()
    flags = f"{flags} --output-dir {folder}"
    family = []
    for rank in range(processes):
        settings = (script, flags, rank, processes, port, f"{folder}.log", kill, edits)
        family.append(fork.Process(target=worker, args=settings))
    for member in family:
        member.start()
    ready = connection.wait([member.sentinel for member in family], timeout=seconds)
    ended = [member for member in family if member.sentinel in ready]
    for member in ended:
        member.join()
    # Time is up, or one was struck: all go at once.
    if not ended or any(member.exitcode for member in ended):
        for member in family:
            member.kill()
    for member in family:
        member.join()
    statuses = {member.exitcode for member in family}
    if -signal.SIGKILL in statuses and statuses <= {0, 1, -signal.SIGKILL} and kill:
        return True
    if statuses != {0}:
        printed = Path(f"{folder}.log").read_text()[-2000:]
        raise SystemExit(f"{printed}\n{folder}: a process ended with {statuses}")
    return False


def kill_run(
    script: str, flags: str, folder: Path, processes: list[int], draw: random.Random
) -> Counter:
    """Start a run with nine kills, and then until it is done. Returns the kills by phase."""
    hits = Counter()
    for count, phase in zip(processes, [*draw.sample(PHASES, len(PHASES)), "model"]):
        call = draw.randint(
            1, {"rollout": 15, "training": 12, "written": 2, "metrics": 2}.get(phase, 1)
        )
        killer = draw.randrange(count) if phase in ("rollout", "training", "loading") else 0
        seconds = draw.uniform(0.2, 1.2) if phase == "anywhere" else None
        hits[phase] += start(script, flags, folder, count, (phase, call, killer), seconds)
    start(script, flags, folder, processes[-1])
    written = (folder / "model").stat().st_mtime_ns
    start(script, flags, folder, processes[-1])
    if written != (folder / "model").stat().st_mtime_ns:
        raise SystemExit(f"{folder}: a finished run wrote its model again")
    return hits


def rows_of(folder: Path) -> dict:
    """Which rows stand in each file of a run."""
    files = {file.name: read_rows(file) for file in folder.glob("*.jsonl")}
    return {
        name: [(row["iteration"], row.get("index")) for row in rows] for name, rows in files.items()
    }


def kill_script(
    script: str, flags: str, runs: list[str], draw: random.Random, work: Path
) -> list[dict]:
    """Kill these runs of a script. Returns a row for each."""
    import_script(script)  # once for all the processes that are forked
    unbroken = {processes: work / f"{script}_unbroken_{processes}" for processes in (1, 2)}
    for processes, folder in unbroken.items():
        start(script, flags, folder, processes)
    apart = relative_distance(unbroken[2], unbroken[1])
    rows = []
    hits = Counter()
    for name in runs:
        folder = work / f"{script}_killed_{len(rows)}"
        right = unbroken[PROCESSES[name][0]]
        found = kill_run(script, flags, folder, PROCESSES[name], draw)
        hits += found
        one, two = ((path / "model" / "model.safetensors").read_bytes() for path in (folder, right))
        row = dict(
            processes=name,
            kills=found.total(),
            phases=dict(sorted(found.items())),
            unbroken_1_and_2_relative_distance=apart,
            bitwise=one == two,
            relative_distance=relative_distance(folder, right),
            each_row_once=rows_of(folder) == rows_of(right),
        )
        rows.append(row)
        may_differ = "," in name and row["relative_distance"] < 1e-3
        if not (row["each_row_once"] and (row["bitwise"] or may_differ)):
            raise SystemExit(f"{folder}: {row}")
    missed = [phase for phase in (*PHASES, "model") if not hits[phase]]
    if hits.total() < 25 * len(runs) // 3 or missed:  # A drawn call may never come.
        found = f"{script}: {hits.total()} kills, phases missed: {missed}"
        raise SystemExit(f"{found}; draw again with another SEED")
    return rows


def measure(jobs: dict, smoke: bool) -> list[dict]:
    draw = random.Random(SEED)
    work = Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    rows = []
    runs = list(PROCESSES)
    if smoke:
        jobs = dict([*jobs.items()][:1])
        runs = runs[-1:]
    for (script, flags), names in jobs.items():
        rows += [names | row for row in kill_script(script, flags, runs, draw, work)]
    return rows


RUNS = [({}, script, "") for script in SCRIPTS]
PARTS = {"kills": Part(RUNS, FLAGS, measure=measure, short="")}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
