"""Check a changed copy of a script: which stages of its run are its script's, which are not, and is
the run the same after kills and on two processes?

    python benchmark/check_copy.py my_rloo.py --loss my_loss.py:loss  # two minutes
    python benchmark/check_copy.py my_rloo.py --stages-only  # the first part
    python benchmark/check_copy.py my_rloo.py --changed scores --my-new-flag 0.1

The stages: the copy makes two small runs, one with a single update for each batch, and one with two
PPO epochs of four. The script that it was made of makes the same runs beside it. In each stage it
gets what the copy had, and stages.py says what must be equal then. This script is that of the
commit whose text is most like the copy. --beside names another commit, as for an edit that was
committed. Without git, it is the script beside benchmark/.

A stage that you changed is named by --changed. Then it may differ, and where it does is said. So is
what only the script has. What only the copy has is no fault. A changed loss is stated by --loss:
the gradient of each update must be that of this function, and advantages may differ. losses.py has
the losses of the scripts, and says what such a function gets. Without --loss, another loss is no
fault, but it is not judged. Give the program every flag of your own run.

The rewards of these runs are of both signs. Prompts return. One has equal scores, and in RLOO and
GRPO one has no scores, and another misses some. Many completions are cut off. So most cases come in
which a stage could go wrong. They are counted. What never came is not judged.

Processes and kills: the copy runs on one process, again with other micro-batches and another
PYTHONHASHSEED, on two processes, on two that are killed twice by SIGKILL and resumed, and on one
that is killed and resumed on two. With the same number of processes, a resumed run must be the same
bit by bit. Two processes, and other micro-batches, add numbers up in another order. What other
micro-batches change, up to 1e-3, is rounding. Two processes may change ten times as much. They
share mini-batches of five episodes, so their shares are not equal. A copy that samples or trains in
bfloat16 fails here, as do its stages: there, rounding is larger.

The first part that has a fault is the last one. Then the exit status is 1, and what differs first
is named. With the package coverage, the program names changed lines that no run has executed. Give
each new flag a value with which it acts: at 0, its lines may run and do nothing.

"right" is said if all stages were judged. Never judged are faults of the script itself, three
processes, what happens after more than five iterations, models and data other than these, and the
loss of a new module.

All runs are on the CPU, at temperature 2. Numbers are compared in units of their size, or of 1 if
it is smaller, weights in units of the distance that they moved, and learning rates as they are. In
the runs of processes and kills, AdamW has eps 1e-3: with less it makes whole steps of a gradient
that is 0 up to rounding.
"""

import ast
import os
import re
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import inf
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Literal

import tyro
from run import (
    BENCHMARK,
    DEFAULTS,
    POLICY,
    apart,
    difference,
    find_original,
    git,
    import_script,
    load_weights,
    read_run,
    relative_distance,
    run_here,
    write_rows,
)

sys.path.append(str(BENCHMARK / "hardware"))
from kill_and_resume import kill_at, start

try:
    import coverage
except ImportError:
    coverage = None

# The loss has a line of its own.
STAGES = "prompts sampling scores reference advantages mini-batches optimizer schedule evaluation"
STAGES = (*STAGES.split(), "result")

# Prompts, and what their texts get: many points of both signs, equal ones, or none.
POINTS = [-1.5, -1, -0.5, 0, 0.5, 1, 1.5]
PROMPTS = {
    "17+13=": POINTS,
    "9+3=": [None, 1, None, -1, None, 0.5, -0.5],
    "60+19=": [None] * 7,
    "85+46=": POINTS,
    "12+7=": [0.5] * 7,
    "38+57=": POINTS,
    "25+48=": POINTS,
}
# Five iterations. With four updates, a mini-batch has 5 episodes, or 3 in the last iteration: two
# processes share them as 3 and 2, or as 2 and 1.
FLAGS = (
    f"--model-path {POLICY} --reward {BENCHMARK}/stages.py:points --response-length 3"
    " --total-episodes 92 --batch-size 20 --per-device-train-batch-size 3 --temperature 2"
    " --eval-every 2 --eval-temperature 1 --eval-k 4 --save-rollouts --num-sample-generations 0"
)
# The runs that are made beside the script.
SMALL_RUNS = {
    "one update for each batch": "--num-ppo-epochs 1 --num-mini-batches 1 --max-grad-norm 0.1",
    "two PPO epochs of four updates": "--num-ppo-epochs 2 --num-mini-batches 4 --weight-decay 0.1"
    " --max-grad-norm inf --missing-eos-penalty 0.3 {more}",
}
RATE = "--learning-rate 1e-3"
MORE = dict(ppo="--gamma 0.9 --score-norm --score-scaling --score-clip 1", grpo="--kl-coef 0.05")
# The runs of processes and kills, with `count` updates for each batch.
RUNS = "--num-ppo-epochs 1 --num-mini-batches {count} --learning-rate 1e-4 --save-every 1 --resume"

# Times differ, and so does the size of rounding itself.
NOT_COMPARED = r".*(seconds|time|(^|[/_])eps|_s$)|val/sampling_logprob_difference"
# What a run computes of each episode, in this order.
COLUMNS = "prompt token_ids logprobs ref_logprobs score values returns advantage".split()

RANDOM = "random numbers: take them from `keyed_rng`, with the iteration in their key"
HASH = "the order of a set, or `hash` of a text, which PYTHONHASHSEED changes"
SAVED = (
    "what one iteration hands to the next: numbers belong in `state`, which is JSON, so keys become"
    " text. Modules and optimizers go through `accelerator.prepare`"
)
SCHEDULE = (
    "the schedule: it goes to `accelerator.register_for_checkpointing`, and never through `prepare`"
)
MICRO = (
    "a mean over a micro-batch or a process's share: divide by the size of the mini-batch. Or"
    " random numbers inside of the loop over micro-batches"
)
# Between one process and two. In six copies, with two seeds, at most 9e-6 was measured.
ROUNDING = 3e-5
# Between micro-batches of two sizes: more is no rounding.
MOST = 1e-3

# The most likely cause if this is the first to differ: with other micro-batches and another hash
# seed, on two processes, and after kills.
CAUSES = {
    "prompt|token_ids|eval/": (f"{HASH}. Or {RANDOM}", RANDOM, f"{SAVED}. Or {RANDOM}"),
    "score|values|returns|advantage": (
        f"{HASH}. Or {RANDOM}",
        "numbers that each process draws or computes alone: `main` has the whole batch, and"
        " `keyed_rng` gives all processes the same numbers",
        SAVED,
    ),
    "lr$": (SCHEDULE, SCHEDULE, SCHEDULE),
    "": (MICRO, f"{MICRO}. Or a new module: it goes through `accelerator.prepare`", SAVED),
}
OTHER, TWO, KILLED = range(3)


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


def compare(about, folder, right, allowed, kind):
    """Print whether a run is the right one, or what differs first. Returns the largest difference,
    or None if it is broken. kind: OTHER, TWO or KILLED"""
    runs = read_run(folder), read_run(right)
    found, expected = map(computed, runs)
    print(f"  {about}: ", end="")
    largest = 0.0
    for key in expected | found:
        value, its = found.get(key), expected.get(key)
        iteration, name, _ = key
        apart = difference(value, its)
        if not apart <= (0 if name == "lr" else allowed):
            pair = f"{name} is {str(value):.60}, and not {str(its):.60}"
            print(f"BROKEN, first in iteration {iteration}: {pair}")
            break
        largest = max(largest, apart)
    else:
        iteration = inf  # after the last one
        weights = relative_distance(folder, right, Path(runs[0]["args"]["model_path"]))
        distance = f"{weights:.1e} of the distance that they moved"
        if weights <= allowed:
            print(f"right; weights differ by {distance}")
            return max(largest, weights)
        one, two = (load_weights(path / "model") for path in (folder, right))
        name = max(two, key=lambda name: abs(one[name] - two[name]).max())
        print(f"BROKEN, at the end: weights differ by {distance}, and most in {name}")
    cause = next(CAUSES[pattern][kind] for pattern in CAUSES if re.match(pattern, name))
    if kind == KILLED and iteration < 2:  # No run has been resumed yet.
        cause = RANDOM
    print(f"    The most likely cause is {cause}.")
    return None


def note_lines(module, lines):
    """Note which lines of a copy are executed. lines: the file for it, or None"""
    if coverage and lines:
        recorder = coverage.Coverage(lines, data_suffix=True, include=module.__file__)
        recorder.start()
        Finalize(None, recorder.save, exitpriority=0)  # when this process ends


def larger_eps(module):
    module.torch.optim.AdamW = partial(module.torch.optim.AdamW, eps=1e-3)


def make_flags(work, script, more=()):
    """The flags of all runs. Writes the prompts."""
    data = f"{work}/prompts.jsonl"
    rows = []
    for prompt, points in PROMPTS.items():
        if script == "ppo":  # It refuses a missing score.
            points = [0 if point is None else point for point in points]
        rows.append(dict(prompt=prompt, points=points))
    write_rows(Path(data), rows)
    return " ".join([FLAGS, f"--dataset {data} --eval-dataset {data}", *more])


def run_copy(path, flags, folder, lines):
    """Make a small run of the copy. Returns what stops it, if something does."""
    stages = import_module("stages")
    try:
        with stages.record(import_script(path)) as log:
            run_here((str(path), flags, partial(note_lines, lines=lines), folder / "run"))
        stages.save(log, folder / "noted")
    except (Exception, SystemExit) as error:
        cause = error.__cause__ or error  # the copy's; that of a flag has been printed
        said = error if isinstance(cause, SystemExit) else repr(cause)
        frames = traceback.extract_tb(cause.__traceback__)
        places = [f"line {x.lineno}: {x.line}" for x in frames if x.filename == str(path)]
        return dict(stopped="\n  ".join([f"{path.name} stopped: {said}", *places[-1:]]))
    return {}


def run_script(base, folder, loss):
    """Make the script's run beside it. Returns what the stages of the copy's are."""
    stages = import_module("stages")
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    try:
        function = loss and stages.load_loss(loss)
        return stages.judge(import_script(base), folder / "run", folder / "noted", function)
    except stages.Misstated as error:
        return dict(stopped=f"--loss {loss}: {error}")


def check_stages(path, script, base, flags, args, lines):
    """Make the small runs, and print what was judged. Returns whether nothing is broken, and what
    was not judged."""
    reports = {}
    for about, own in SMALL_RUNS.items():
        # The last of two equal flags counts, so those of the user come last.
        words = f"{RATE} {own.format(more=MORE.get(script, ''))} {flags}"
        with tempfile.TemporaryDirectory() as folder:
            report = apart(run_copy, path, words, Path(folder), lines)
            if not report:
                report = apart(run_script, base, Path(folder), args.loss)
        for kind in {"stopped", "failed"} & report.keys():
            sys.exit(f"{report[kind]}\n  with {about}")
        reports[about] = report
    not_judged = []
    is_right = print_stages(reports, script, args, not_judged)
    is_loss = print_loss(reports, Path(args.loss or f"{script}.py").name)
    if not (is_loss or args.loss):
        not_judged.append("the loss; state it with --loss")
    print_cases(reports, not_judged)
    return is_right and (is_loss or not args.loss), not_judged


def print_stages(reports, script, args, not_judged):
    """A line for the stages that are the script's, and one for each other. Returns whether all that
    differ may do so."""
    compared = set()
    differ = {}
    missing = set()
    for about, report in reports.items():
        compared |= report["compared"].keys()
        missing |= report["missing"]
        not_judged += report["not_judged"]
        for name, first in report["first"].items():
            differ.setdefault(name, f"{name}. With {about}, {first}")
    right = [name for name in STAGES if name in compared - differ.keys()]
    print(f"as in {script}.py: {', '.join(right)}")
    may_differ = {*args.changed, "loss"} | ({"advantages"} if args.loss else set())
    for name in filter(differ.get, STAGES):
        print(f"{'changed' if name in may_differ else f'not as in {script}.py'}: {differ[name]}")
    not_judged += [f"{name}: more than whether it differs" for name in args.changed]
    none = [name for name in STAGES if name not in {*compared, *differ}]
    not_judged += [f"{name}: nothing of it came" for name in none]
    if missing:
        print(f"only {script}.py has: {', '.join(sorted(missing))}")
    has_ended = any("loss" in report["ended"] for report in reports.values())
    return differ.keys() <= may_differ and not has_ended


def print_loss(reports, name):
    """Print how far gradients are from those of the loss. Returns whether they are its."""
    for about, report in reports.items():
        if "loss" in report["first"]:
            print(f"the loss is not {name}. With {about}, {report['first']['loss']}")
            return False
    count = sum(report["cases"]["updates"] for report in reports.values())
    distance = max(report["distance"] for report in reports.values())
    about = f"gradients differ by {distance:.1e} of their length"
    print(f"the loss is {name}, in all {count} updates: {about}")
    return True


def print_cases(reports, not_judged):
    """Print how often each case has come. One that never came is not judged."""
    counts = Counter()
    for report in reports.values():
        counts.update(report["cases"])
    print("cases:", ", ".join(f"{name} {count}" for name, count in counts.items()))
    not_judged += [name for name, count in counts.items() if count == 0]


def check_processes(path, flags, folder, lines, count):
    """Make the runs on one and on two processes, and compare them, until something is broken.
    Returns whether all is right."""
    words = f"{RUNS.format(count=count)} {flags}"

    def go(where, processes, *edits, size=2, **settings):
        edits = partial(note_lines, lines=lines), larger_eps, *edits
        # A run that takes longer hangs.
        more = f"{words} --per-device-train-batch-size {size}"
        return start(str(path), more, where, processes, *edits, seconds=600, **settings)

    def kill(where, processes, phase, call):
        if not go(where, processes, partial(kill_at, phase=phase, call=call)):
            raise SystemExit("the run ended before a kill; it needs more iterations")

    one, other, two, killed, moved = (folder / x for x in "one other two killed moved".split())
    go(one, 1)
    os.environ["PYTHONHASHSEED"] = "2"
    go(other, 1, size=3, method="spawn")
    os.environ["PYTHONHASHSEED"] = "1"
    about = "one process, with other micro-batches and another PYTHONHASHSEED"
    rounding = compare(about, other, one, MOST, OTHER)
    if rounding is None:
        return False
    allowed = min(max(ROUNDING, 10 * rounding), MOST)
    go(two, 2)
    if compare("two processes, or one", two, one, allowed, TWO) is None:
        return False
    kill(killed, 2, "written", 2)  # in the second iteration
    kill(killed, 2, "metrics", 2)  # in the third
    go(killed, 2)
    about = "two processes, killed twice and resumed, or never killed"
    if compare(about, killed, two, 0, KILLED) is None:
        return False
    kill(moved, 1, "metrics", 3)  # in the second iteration
    go(moved, 2)
    about = "one process, killed and resumed on two, or never killed"
    return compare(about, moved, one, allowed, KILLED) is not None


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
    """FILE.py:FUNCTION, the loss that it must train on; None: the loss of its script is held beside
    it, and another one is no fault"""
    beside: str | None = None
    """the commit whose script it came from; None: the one whose script is most like it"""
    changed: tuple[Literal[STAGES], ...] = ()
    """the stages that may differ from those of the script"""
    stages_only: bool = False
    """judge the stages, and make no other runs"""


def main(args, flags):
    path = args.copy.resolve()
    if not path.is_file():
        sys.exit(f"{args.copy}: there is no such file")
    texts = path.read_text(encoding="utf-8").splitlines()
    os.environ |= DEFAULTS | dict(ACCELERATE_USE_CPU="true", PYTHONHASHSEED="1")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with tempfile.TemporaryDirectory(prefix="check_copy_") as work:
        os.environ["TMPDIR"] = work  # A process that is killed removes nothing.
        lines = f"{work}/lines"
        script, commit, base = find_original(path, Path(work, "original"), args.beside)
        if commit:
            print(f"beside {script}.py of commit {commit}")
            if git("diff", commit, "HEAD", "--", f"{script}.py"):
                print(f"{script}.py has changed since: git diff {commit} -- {script}.py")
        words = make_flags(work, script, flags)
        is_right, not_judged = check_stages(path, script, base, words, args, lines)
        if args.stages_only:
            not_judged.append("processes and kills")
        for count in () if args.stages_only else (1, 4):
            if is_right:
                print(f"updates for each batch: {count}")
                is_right = check_processes(path, words, Path(work, str(count)), lines, count)
        known = base.read_text(encoding="utf-8").splitlines()
        changed = {number for number, text in enumerate(texts, 1) if text not in known}
        never = changed & not_executed(path, lines) if coverage and is_right else set()
    for number in sorted(never):
        print(f"not executed, line {number}: {texts[number - 1].strip()}")
    if not coverage:
        not_judged.append("whether changed lines were executed: coverage is not installed")
    for reason in dict.fromkeys(not_judged):
        print(f"not judged: {reason}")
    verdict = "right, as far as it was judged" if never or not_judged else "right"
    print(verdict if is_right else "BROKEN")
    sys.exit(not is_right)


if __name__ == "__main__":
    main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
