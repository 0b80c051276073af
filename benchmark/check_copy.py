"""Check a changed copy of a script: kills and a second process must not change its run.

    python benchmark/check_copy.py my_rloo.py                    # one or two minutes
    python benchmark/check_copy.py my_rloo.py --my-new-flag 0.1  # with flags of the copy

The copy trains on seven prompts that return, with one update for each batch, and then with four: on
one process, on two, and on two that are killed twice by SIGKILL and resumed. The resumed run must
be the same bit by bit. Two processes add numbers up in another order, so their run may differ by
rounding from that of one. They share mini-batches of five episodes, so their shares are not equal.
If a promise is broken, the exit status is 1, and the first thing that differs is named. A copy that
samples or trains in bfloat16 breaks the second one: there, rounding depends on the share.

With the package coverage, the program names changed lines that no run has executed. Give each new
flag a value with which it acts: at 0, its lines may run and do nothing.

Not judged is the algorithm: a baseline that counts the episode itself, the sign of a KL, or scores
of another row are "right". So is what goes wrong only with three processes, or after more than six
iterations.

All runs are on the CPU. Numbers are compared in units of their size, or of 0.05 if it is smaller,
and weights in units of the distance that they moved. AdamW has eps 1e-5: with its default it makes
a whole step of a gradient that is 0 up to rounding.
"""

import ast
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import tyro
from run import BENCHMARK, DEFAULTS, ROOT, SCRIPTS, read_run, relative_distance, write_rows
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
    " --learning-rate 1e-4 --eval-every 2 --eval-temperature 1 --eval-k 4 --save-every 1"
    " --save-rollouts --resume"
)
# What a run computes of each episode, in this order.
COLUMNS = "prompt token_ids logprobs ref_logprobs score values returns advantage".split()
# Times differ, and so does the size of rounding itself.
NOT_COMPARED = "eps$|seconds$|time/|val/sampling_logprob_difference"

RANDOM = "random numbers: take them from `keyed_rng`, with the iteration in their key"
SAVED = (
    "what one iteration hands to the next: numbers belong in `state`, and modules and optimizers go"
    " through `accelerator.prepare`"
)
# The most likely cause if this is the first to differ: after kills, and on two processes.
CAUSES = {
    "prompt|token_ids|eval/": (RANDOM, RANDOM),
    "score|values|returns|advantage": (
        SAVED,
        "numbers that each process draws or computes alone: `main` has the whole batch, and"
        " `keyed_rng` gives all processes the same numbers",
    ),
    "": (
        SAVED,
        "a mean over a micro-batch or a process's share: divide by the size of the mini-batch."
        " Or a new module: it goes through `accelerator.prepare`",
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
    return float((abs(value - right) / np.maximum(abs(right), 0.05)).max())


def compare(about, folder, right, allowed):
    """Print whether a run is the right one, or what differs first. Returns whether it is."""
    runs = read_run(folder), read_run(right)
    found, expected = map(computed, runs)
    print(f"  {about}: ", end="")
    iteration = inf  # after the last one
    for key in expected | found:
        value, its = found.get(key), expected.get(key)
        if not difference(value, its) <= allowed:
            iteration, name, _ = key
            pair = f"{name} is {str(value):.60}, and not {str(its):.60}"
            print(f"BROKEN, first in iteration {iteration}: {pair}")
            break
    else:
        weights = relative_distance(folder, right, Path(runs[0]["args"]["model_path"]))
        distance = f"{weights:.1e} of the distance that they moved"
        if weights <= allowed:
            print(f"right; weights differ by {distance}")
            return True
        one, two = (load_file(path / "model/model.safetensors") for path in (folder, right))
        name = max(two, key=lambda name: abs(one[name] - two[name]).max())
        print(f"BROKEN, at the end: weights differ by {distance}, and most in {name}")
    causes = next(CAUSES[pattern] for pattern in CAUSES if re.match(pattern, name))
    cause = causes[allowed > 0]
    if allowed == 0 and iteration < 2:  # No run has been resumed yet.
        cause = RANDOM
    print(f"    The most likely cause is {cause}.")
    return False


def prepare(module, lines):
    """Change the module of a copy before it runs, and note which of its lines are executed."""
    module.torch.optim.AdamW = partial(module.torch.optim.AdamW, eps=1e-5)
    if coverage:
        recorder = coverage.Coverage(lines, data_suffix=True, include=module.__file__)
        recorder.start()
        Finalize(None, recorder.save, exitpriority=0)  # when this process ends


def check(path, flags, folder, lines):
    """Make the three runs of a copy, and compare them."""
    edit = partial(prepare, lines=lines)
    go = partial(start, str(path), flags, seconds=600)  # A run that takes longer hangs.
    one, two, killed = (folder / name for name in ("one", "two", "killed"))
    go(one, 1, edit)
    go(two, 2, edit)
    for phase in ("written", "metrics"):  # in the second iteration, and in the third
        if not go(killed, 2, edit, partial(kill_at, phase=phase, call=2)):
            raise SystemExit("the run ended before a kill; it needs more iterations")
    go(killed, 2, edit)
    is_right = [
        compare("two processes, killed twice and resumed, or never killed", killed, two, 0),
        compare("two processes, or one", two, one, 1e-3),
    ]
    return all(is_right)


def changed_lines(texts):
    """The numbers of a copy's lines that the script which is most like it has not."""
    found = []
    for name in SCRIPTS:
        known = set((ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines())
        found.append({number for number, text in enumerate(texts, 1) if text not in known})
    return min(found, key=len)


def not_executed(path, lines):
    """The numbers of the lines in functions that no run has executed."""
    recorder = coverage.Coverage(lines)
    recorder.combine()
    missing = recorder.analysis2(str(path))[3]  # the first line of each statement
    numbers = set()
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.stmt) and node.lineno in missing:
                    body = getattr(node, "body", None)
                    end = body[0].lineno if body else node.end_lineno + 1
                    numbers |= set(range(node.lineno, end))
    return numbers


@dataclass
class Args:
    copy: tyro.conf.Positional[Path]
    """the changed script; after it come its flags"""


def main(args, flags):
    path = args.copy.resolve()
    texts = path.read_text(encoding="utf-8").splitlines()
    os.chdir(ROOT)
    os.environ |= DEFAULTS | dict(ACCELERATE_USE_CPU="true", PYTHONDONTWRITEBYTECODE="1")
    with tempfile.TemporaryDirectory(prefix="check_copy_") as work:
        os.environ["TMPDIR"] = work  # A process that is killed removes nothing.
        data, lines = f"{work}/prompts.jsonl", f"{work}/lines"
        rows = [
            dict(prompt=f"{asked}=", answer=right)
            for asked, right in re.findall(r"(\S+)=(\d+)", SUMS)
        ]
        write_rows(Path(data), rows)
        is_right = True
        for count in (1, 4):
            print(f"updates for each batch: {count}")
            words = f"{FLAGS} --dataset {data} --eval-dataset {data} --num-mini-batches {count}"
            is_right &= check(path, " ".join([words, *flags]), Path(work, str(count)), lines)
        never = changed_lines(texts) & not_executed(path, lines) if coverage else set()
    for number in sorted(never):
        print(f"not executed, line {number}: {texts[number - 1].strip()}")
    if not coverage:
        print("coverage is not installed: lines that were not executed are not named")
    verdict = "right, as far as it ran" if never or not coverage else "right"
    print(verdict if is_right else "BROKEN")
    print("not judged: the algorithm, and what needs three processes or more than six iterations")
    sys.exit(not is_right)


if __name__ == "__main__":
    main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
