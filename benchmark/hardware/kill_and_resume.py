"""Kill runs at drawn moments, start the same command again until it is done, and compare with a run never killed.

    python benchmark/hardware/kill_and_resume.py                      # all three scripts, 27 kills each
    python benchmark/hardware/kill_and_resume.py --scripts ppo --seed 2 # other moments
    python benchmark/hardware/kill_and_resume.py --runs "1, 2 by turns" # 9 kills each

Every script trains a small run of 12 iterations, three times: on one process, on two, and on one and two by turns.
Each of the three is killed nine times. A kill is SIGKILL of all its processes, at a drawn call:

    rollout      the sampler, between two tokens
    training     the loss, between two micro-batches
    written      the tensors of a checkpoint are written, but not yet the state.json that makes it whole
    removing     half of the files of an old checkpoint are removed
    metrics      half of a line of metrics.jsonl is written
    loading      the checkpoint is loaded, but no iteration is made
    model        the trained model is written beside, but not yet renamed
    anywhere     a drawn number of seconds after the start

The learning rate is 1e-4. At 3e-4 this PPO run is chaotic: roundings grow by two to three times in each iteration, and
even unbroken runs on 1 and on 2 processes end 0.2 apart. The file says how far unbroken runs on 1 and 2 are apart.

Then the weights must be those of the unbroken run. They are bitwise the same where the number of processes never
changed. Otherwise they are compared by norm, |w1 - w2| / |w1 - w_start| < 1e-3. Every iteration must stand once in each
file, and one more start must do nothing. The exit status is 1 if one of these fails. Processes are forked from this
one, which has imported the libraries. So a start takes half a second, and the whole takes some minutes. The table goes
to kill_and_resume.json, too.
"""

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from sharded import load_script, relative_distance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import ROOT, SCRIPTS, read_rows  # noqa: E402

PHASES = ("rollout", "training", "written", "removing", "metrics", "loading", "anywhere", "anywhere")  # then `model`
FLAGS = """--total-episodes 188 --batch-size 16 --num-mini-batches 2 --num-ppo-epochs 1 --per-device-train-batch-size 3
    --learning-rate 1e-4 --save-every 1 --save-rollouts --num-sample-generations 4 --resume""".split()


@dataclass
class Args:
    scripts: tuple[str, ...] = SCRIPTS
    """the scripts to run"""
    seed: int = 1
    """of the drawn moments"""
    runs: tuple[str, ...] = ("1", "2", "1, 2 by turns")
    """the numbers of processes to run on; each of the three has nine kills, of every phase"""
    results: str = str(Path(__file__).with_suffix(".json"))
    """where the table goes"""


# ---- the runs


def kill_at(module, phase: str, call: int, strike):
    """Let call number `call` of what stands for a phase end the run, inside the script's module."""
    calls = 0

    def before(owner, name, applies=lambda *args: True, first=lambda *args: None):
        original = getattr(owner, name)

        def struck(*args, **kwargs):
            nonlocal calls
            calls += applies(*args)
            if applies(*args) and calls == call:
                first(*args)
                strike()
            return original(*args, **kwargs)

        setattr(owner, name, struck)

    def remove_half(folder):
        for file in sorted(folder.iterdir())[::2]:
            file.unlink()

    def write_half(_, path, rows):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(rows[0])[:40])

    if phase == "rollout":
        before(module, "pick_tokens")
    elif phase == "training":
        before(module, "clipped_policy_loss")
    elif phase == "written":
        before(Path, "replace", lambda path, _: path.name == "state.tmp")
    elif phase == "removing":
        before(module.shutil, "rmtree", lambda folder: folder.parent.name == "checkpoints", remove_half)
    elif phase == "metrics":
        before(module, "append_jsonl", lambda _, path, __: path.name == "metrics.jsonl", write_half)
    elif phase == "loading":
        before(module, "draw_prompts")
    elif phase == "model":
        before(Path, "rename", lambda path, _: path.name == "model.tmp")


def worker(script: str, flags: list[str], rank: int, processes: int, port: int, log: str, kill):
    """One process of a run, with the environment that a launcher sets."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    os.environ |= dict(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    if processes > 1:
        names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes, MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    module = sys.modules[script]  # this process's own copy
    if kill is not None:
        phase, call, killer = kill
        if rank == killer:  # the parent kills the others as soon as it sees this one dead
            kill_at(module, phase, call, lambda: os.kill(os.getpid(), signal.SIGKILL))
    module.main(tyro.cli(module.Args, args=flags))


def start(script: str, folder: Path, processes: int, kill=None, seconds: float | None = None) -> str:
    """Start a run and wait -> `killed`, `done`, or the exit statuses of what should not have ended so."""
    fork = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = (processes, port, f"{folder}.log", kill)
    flags = [*FLAGS, "--output-dir", str(folder)]
    family = [fork.Process(target=worker, args=(script, flags, rank, *settings)) for rank in range(processes)]
    for member in family:
        member.start()
    ready = connection.wait([member.sentinel for member in family], timeout=seconds)
    ended = [member for member in family if member.sentinel in ready]
    for member in ended:
        member.join()
    if not ended or any(member.exitcode for member in ended):  # time is up, or one was struck: all go at once
        for member in family:
            member.kill()
    for member in family:
        member.join()
    statuses = [member.exitcode for member in family]
    if -signal.SIGKILL in statuses and set(statuses) <= {0, 1, -signal.SIGKILL}:
        return "killed"
    return "done" if not any(statuses) else str(statuses)


def draw_kills(draw: random.Random, processes: list[int]) -> list[tuple]:
    """Nine kills: their numbers of processes, phases, calls, the process that strikes, and seconds for `anywhere`."""
    phases = [*draw.sample(PHASES, len(PHASES)), "model"]
    kills = []
    for phase, count in zip(phases, processes):
        call = draw.randint(1, {"rollout": 15, "training": 12, "written": 2, "metrics": 2}.get(phase, 1))
        killer = draw.randrange(count) if phase in ("rollout", "training", "loading") else 0
        kills.append((count, (phase, call, killer), draw.uniform(0.2, 1.2) if phase == "anywhere" else None))
    return kills


# ---- what they left


def compare(folder: Path, unbroken: Path) -> tuple[bool, float, bool]:
    """Are the weights bitwise the same, how far are they in units of the way moved, is every row there once."""
    one, two = ((path / "model" / "model.safetensors").read_bytes() for path in (folder, unbroken))

    def keys(path):
        names = ("metrics", "samples", "rollouts")
        return [[(row["iteration"], row.get("index")) for row in read_rows(path / f"{name}.jsonl")] for name in names]

    return one == two, relative_distance(folder, unbroken), keys(folder) == keys(unbroken)


def broken_run(script: str, folder: Path, kills: list[tuple], processes: int) -> Counter:
    """Start a run until it is done, with a kill each time as long as there are some -> the kills by phase."""
    hits = Counter()
    for count, kill, seconds in kills:
        outcome = start(script, folder, count, kill, seconds)
        if outcome not in ("killed", "done"):
            raise SystemExit(f"{folder}: a process ended by itself with {outcome}; see {folder}.log")
        hits[kill[0]] += outcome == "killed"
    for attempt in ("finish", "do nothing"):
        before = (folder / "model").stat().st_mtime_ns if attempt == "do nothing" else None
        if (outcome := start(script, folder, processes)) != "done":
            raise SystemExit(f"{folder}: {outcome} where it should {attempt}; see {folder}.log")
        if before is not None and before != (folder / "model").stat().st_mtime_ns:
            raise SystemExit(f"{folder}: a finished run wrote its model again")
    return hits


def main(args: Args):
    started, draw, results = time.time(), random.Random(args.seed), []
    table = Table("script", "processes", "kills", "by phase", "weights", "each row once", title="kill and resume")
    work = Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    for script in args.scripts:
        load_script(ROOT / f"{script}.py")  # once for all the processes that are forked
        unbroken = {processes: work / f"{script}_unbroken_{processes}" for processes in (1, 2)}
        for processes, folder in unbroken.items():
            if (outcome := start(script, folder, processes)) != "done":
                raise SystemExit(f"{folder}: {outcome}; see {folder}.log")
        _, unbroken_distance, _ = compare(unbroken[2], unbroken[1])
        print(f"{script}, never killed, on 1 and on 2: {unbroken_distance:.1e} apart", flush=True)
        for name in args.runs:
            processes = {"1": [1] * 9, "2": [2] * 9, "1, 2 by turns": [1, 2] * 5}[name]
            folder = work / f"{script}_killed_{name[:4].strip(', ').replace(', ', '_')}"
            hits = broken_run(script, folder, draw_kills(draw, processes), processes[-1])
            same, relative, once = compare(folder, unbroken[processes[0]])
            fine = once and (same or (len(set(processes)) > 1 and relative < 1e-3))
            row = dict(script=script, processes=name, kills=hits.total(), phases=dict(sorted(hits.items())))
            row |= dict(unbroken_1_and_2_relative_distance=unbroken_distance)
            results.append(row | dict(bitwise=same, relative_distance=relative, each_row_once=once, fine=fine))
            phases = ", ".join(f"{phase} {count}" for phase, count in sorted(hits.items()))
            weights = "bitwise the same" if same else f"{relative:.1e} apart"
            table.add_row(script, name, str(hits.total()), phases, weights, "yes" if once else "NO")
            print(
                f"{script} on {name}: {hits.total()} kills, {weights}, rows {'once' if once else 'NOT ONCE'}",
                flush=True,
            )
    Console(width=140).print(table)
    for script in args.scripts:
        hit = Counter()
        for row in results:
            if row["script"] == script:
                hit.update(row["phases"])
        missed = [phase for phase in (*PHASES, "model") if not hit[phase]]
        if hit.total() < 25 * len(args.runs) // 3 or missed:  # a drawn call may never come
            raise SystemExit(f"{script}: {hit.total()} kills, phases missed: {missed}; draw again with another --seed")
    Path(args.results).parent.mkdir(exist_ok=True)
    summary = dict(seed=args.seed, kills=sum(row["kills"] for row in results), seconds=round(time.time() - started))
    Path(args.results).write_text(json.dumps(summary | dict(flags=" ".join(FLAGS), runs=results), indent=1) + "\n")
    raise SystemExit(0 if all(row["fine"] for row in results) else 1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
