"""Check a changed copy of a script: does it train on your loss, and is its run the same after kills
and on two processes?

    python benchmark/check_copy.py my_rloo.py --loss my_loss.py:loss   # two minutes
    python benchmark/check_copy.py my_rloo.py --my-new-flag 0.1        # with flags of the copy

The copy trains on seven prompts that return, with one update for each batch, and then with four.

The loss: the gradient of each update must be that of the function that --loss names. losses.py has
those of the scripts, and says what such a function gets. Without --loss the copy is held against
that of the script it came from. Then another loss is no fault, but it is not judged.

Processes and kills: the copy runs on one process, on two, on two that are killed twice by SIGKILL
and resumed, and on one that is killed and resumed on two. With the same number of processes, a
resumed run must be the same bit by bit. Two processes add numbers up in another order, and have
other micro-batches, so their run may differ by rounding from that of one. They share mini-batches
of five episodes, so their shares are not equal. A copy that samples or trains in bfloat16 fails
here, as does its loss: there, rounding is larger.

If something is broken, the exit status is 1, and the first thing that differs is named. The runs
after it are not made. With the package coverage, the program names changed lines that no run has
executed. Give each new flag a value with which it acts: at 0, its lines may run and do nothing.

Not judged are sampling and scores: scores of another row are "right". So is what goes wrong only
with three processes, or after more than six iterations.

All runs are on the CPU, at temperature 2. Numbers are compared in units of their size, or of 1 if
it is smaller, weights in units of the distance that they moved, and learning rates as they are.
AdamW has eps 1e-3: with less it makes whole steps of a gradient that is 0 up to rounding.
"""

import ast
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import inf
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import tyro
from run import (
    BENCHMARK,
    DEFAULTS,
    ROOT,
    SCRIPTS,
    import_script,
    read_run,
    relative_distance,
    run,
    write_rows,
)
from safetensors.numpy import load_file

sys.path.append(str(BENCHMARK / "hardware"))
from kill_and_resume import kill_at, start

try:
    import coverage
except ImportError:
    coverage = None

SUMS = "17+13=30 25+48=73 60+19=79 85+46=131 38+57=95 12+7=19 9+3=12"
# Six iterations. With four updates, each mini-batch has 5 episodes, or 3 in the last iteration: two
# processes share them as 3 and 2, or as 2 and 1.
FLAGS = (
    "--total-episodes 112 --batch-size 20 --num-ppo-epochs 1 --per-device-train-batch-size 2"
    " --learning-rate 1e-4 --temperature 2 --eval-every 2 --eval-temperature 1 --eval-k 4"
    " --save-every 1 --save-rollouts --resume"
)
# What a run computes of each episode, in this order.
COLUMNS = "prompt token_ids logprobs ref_logprobs score values returns advantage".split()
# Times differ, and so does the size of rounding itself.
NOT_COMPARED = "eps$|seconds$|time/|val/sampling_logprob_difference"

RANDOM = "random numbers: take them from `keyed_rng`, with the iteration in their key"
SAVED = (
    "what one iteration hands to the next: numbers belong in `state`, which is JSON, so keys become"
    " text. Modules and optimizers go through `accelerator.prepare`"
)
SCHEDULE = (
    "the schedule: it goes to `accelerator.register_for_checkpointing`, and never through `prepare`"
)
# Between one process and two. In six copies, with two seeds, at most 9e-6 was measured.
ROUNDING = 3e-5

# The most likely cause if this is the first to differ: after kills, and on two processes.
CAUSES = {
    "prompt|token_ids|eval/": (f"{SAVED}. Or {RANDOM}", RANDOM),
    "score|values|returns|advantage": (
        SAVED,
        "numbers that each process draws or computes alone: `main` has the whole batch, and"
        " `keyed_rng` gives all processes the same numbers",
    ),
    "lr$": (SCHEDULE, SCHEDULE),
    "": (
        SAVED,
        "a mean over a micro-batch or a process's share: divide by the size of the mini-batch."
        " Or a new module: it goes through `accelerator.prepare`. Or random numbers inside of the"
        " loop over micro-batches",
    ),
}


def computed(run):
    """What a run computed, in its order, by iteration, name and row."""
    entries = []
    for name in COLUMNS:
        for row in run["rollouts"]:
            entries.append((row["iteration"], name, row["index"], row.get(name)))
    for row in run["metrics"]:
        for name in row:
            if not re.match(NOT_COMPARED, name):
                entries.append((row["iteration"], name, 0, row[name]))
    entries.sort(key=lambda entry: entry[0])  # In an iteration the order stays.
    return {tuple(key): value for *key, value in entries}


def difference(value, right):
    """How far a number, or a list of them, is from the right one, in units of its size."""
    if value == right:
        return 0.0
    try:
        value, right = np.array([value, right], float)
    except (TypeError, ValueError):  # texts, or lists of unequal length
        return inf
    return float((abs(value - right) / np.maximum(abs(right), 1)).max())


def compare(about, folder, right, allowed, after_kills):
    """Print whether a run is the right one, or what differs first. Returns whether it is."""
    runs = read_run(folder), read_run(right)
    found, expected = map(computed, runs)
    print(f"  {about}: ", end="")
    for key in expected | found:
        value, its = found.get(key), expected.get(key)
        iteration, name, _ = key
        if not difference(value, its) <= (0 if name == "lr" else allowed):
            pair = f"{name} is {str(value):.60}, and not {str(its):.60}"
            print(f"BROKEN, first in iteration {iteration}: {pair}")
            break
    else:
        iteration = inf  # after the last one
        weights = relative_distance(folder, right, Path(runs[0]["args"]["model_path"]))
        distance = f"{weights:.1e} of the distance that they moved"
        if weights <= allowed:
            print(f"right; weights differ by {distance}")
            return True
        one, two = (load_file(path / "model/model.safetensors") for path in (folder, right))
        name = max(two, key=lambda name: abs(one[name] - two[name]).max())
        print(f"BROKEN, at the end: weights differ by {distance}, and most in {name}")
    lost, not_shared = next(CAUSES[pattern] for pattern in CAUSES if re.match(pattern, name))
    cause = lost if after_kills else not_shared
    if after_kills and iteration < 2:  # No run has been resumed yet.
        cause = RANDOM
    print(f"    The most likely cause is {cause}.")
    return False


def prepare(module, lines):
    """Change the module of a copy before it runs, and note which of its lines are executed."""
    module.torch.optim.AdamW = partial(module.torch.optim.AdamW, eps=1e-3)
    if coverage:
        recorder = coverage.Coverage(lines, data_suffix=True, include=module.__file__)
        recorder.start()
        Finalize(None, recorder.save, exitpriority=0)  # when this process ends


def make_flags(work, count, more=()):
    """The flags of all runs with `count` updates for each batch. Writes the prompts."""
    data = f"{work}/prompts.jsonl"
    sums = re.findall(r"(\S+)=(\d+)", SUMS)
    write_rows(Path(data), [dict(prompt=f"{asked}=", answer=right) for asked, right in sums])
    words = f"{FLAGS} --dataset {data} --eval-dataset {data} --num-mini-batches {count}"
    return " ".join([words, *more])


def hold(module, loss):
    """Let a run end with what the oracle says about a loss, FILE.py:FUNCTION."""
    oracle = import_module("oracle")
    updates = oracle.record(module)
    train = module.main

    def train_and_judge(args):
        train(args)
        file, _, function = loss.rpartition(":")
        stated = getattr(import_script(file), function)
        found = oracle.compare(read_run(args.output_dir), updates, stated)
        module.found = dict(count=len(updates), verdict=oracle.judge(found))

    module.main = train_and_judge


def check_loss(path, flags, loss, lines):
    """Make a run, and print how far its gradients are from those of a loss. Returns whether they
    are its."""
    flags += " --learning-rate 1e-3 --max-grad-norm inf"  # Ratios are clipped, and gradients not.
    found = run(str(path), flags, partial(prepare, lines=lines), partial(hold, loss=loss))
    distance, wrong = found["verdict"]
    if wrong:
        print(f"  the loss is not {Path(loss).name}, {wrong}")
    else:
        print(f"  the loss is {Path(loss).name}, in all {found['count']} updates:", end=" ")
        print(f"gradients differ by {distance:.1e} of their length")
    return not wrong


def check_processes(path, flags, folder, lines):
    """Make the runs on one and on two processes, and compare them, until something is broken.
    Returns whether all is right."""

    def go(where, processes, *edits):
        size = processes + 1  # Two processes have other micro-batches, too.
        words = f"{flags} --per-device-train-batch-size {size}"
        edits = partial(prepare, lines=lines), *edits
        # A run that takes longer hangs.
        return start(str(path), words, where, processes, *edits, seconds=600)

    def kill(where, processes, phase, call):
        if not go(where, processes, partial(kill_at, phase=phase, call=call)):
            raise SystemExit("the run ended before a kill; it needs more iterations")

    one, two, killed, moved = (folder / name for name in ("one", "two", "killed", "moved"))
    go(one, 1)
    go(two, 2)
    if not compare("two processes, or one", two, one, ROUNDING, after_kills=False):
        return False
    kill(killed, 2, "written", 2)  # in the second iteration
    kill(killed, 2, "metrics", 2)  # in the third
    go(killed, 2)
    about = "two processes, killed twice and resumed, or never killed"
    if not compare(about, killed, two, 0, after_kills=True):
        return False
    kill(moved, 1, "metrics", 3)  # in the second iteration
    go(moved, 2)
    about = "one process, killed and resumed on two, or never killed"
    return compare(about, moved, one, ROUNDING, after_kills=True)


def changed_lines(texts):
    """The script that a copy is most like, and the numbers of the lines that it has not."""
    found = {}
    for name in SCRIPTS:
        known = set((ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines())
        found[name] = {number for number, text in enumerate(texts, 1) if text not in known}
    return min(found.items(), key=lambda pair: len(pair[1]))


def not_executed(path, lines):
    """The numbers of the lines in functions that no run has executed."""
    recorder = coverage.Coverage(lines)
    recorder.combine()
    _, statements, _, missing, _ = recorder.analysis2(str(path))  # the first line of each
    executed = set(statements) - set(missing)
    numbers = set()
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.stmt) and node.lineno in missing:
                    body = getattr(node, "body", None)
                    end = body[0].lineno if body else node.end_lineno + 1
                    numbers |= set(range(node.lineno, end))
            # Its `def` ran before the recorder began. It counts as executed if its body is.
            if executed & set(range(function.lineno + 1, function.end_lineno + 1)):
                numbers -= set(range(function.lineno, function.body[0].lineno))
    return numbers


@dataclass
class Args:
    copy: tyro.conf.Positional[Path]
    """the changed script; after it come its flags"""
    loss: str | None = None
    """FILE.py:FUNCTION, the loss that it must train on; None: that of the script it came from"""


def main(args, flags):
    path = args.copy.resolve()
    texts = path.read_text(encoding="utf-8").splitlines()
    name, changed = changed_lines(texts)
    file, _, function = (args.loss or f"{BENCHMARK}/losses.py:{name}").rpartition(":")
    if not Path(file).is_file():
        sys.exit(f"--loss {args.loss}: there is no such file; it is FILE.py:FUNCTION")
    loss = f"{Path(file).resolve()}:{function}"
    os.chdir(ROOT)
    os.environ |= DEFAULTS | dict(ACCELERATE_USE_CPU="true", PYTHONDONTWRITEBYTECODE="1")
    is_loss = is_right = True
    with tempfile.TemporaryDirectory(prefix="check_copy_") as work:
        os.environ["TMPDIR"] = work  # A process that is killed removes nothing.
        lines = f"{work}/lines"
        for count in (1, 4):
            print(f"updates for each batch: {count}")
            words = make_flags(work, count, flags)
            is_loss &= check_loss(path, words, loss, lines)
            is_right &= check_processes(path, words, Path(work, str(count)), lines)
        never = changed & not_executed(path, lines) if coverage else set()
    for number in sorted(never):
        print(f"not executed, line {number}: {texts[number - 1].strip()}")
    if not coverage:
        print("coverage is not installed: lines that were not executed are not named")
    if not is_loss and not args.loss:
        print("not judged: the loss; state it with --loss")
    print(
        "not judged: sampling, scores, and what needs three processes or more than six iterations"
    )
    verdict = "right" if is_loss and coverage and not never else "right, as far as it was judged"
    is_right &= is_loss or not args.loss
    print(verdict if is_right else "BROKEN")
    sys.exit(not is_right)


if __name__ == "__main__":
    main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
