"""What a user asks, put to TRL 1.16 and to Tally: how many episodes, which run, also after a kill?

    python benchmark/questions/questions.py

It runs in the environment of benchmark/parity/trl_trainer.py, and takes a few minutes. Writes
questions.json. A smoke run asks Tally one question.

A question is one function, the same for both sides. It makes runs by `ask(name, **changes)`. Each
run has FLAGS, SETTINGS and these changes, and is made once, in processes of its own. It tells what
its reward function was shown, what it logged, and its final weights. The two sides draw different
random numbers, so a run is only compared with runs of its own side. How far two runs are apart:
|w1 - w2| / |w2 - w_start| of their final weights.

A question's docstring has three paragraphs: what is asked; what is equal on both sides, beside
FLAGS and SETTINGS; and how the answer of each case is shown. From them and the stored numbers
`table` makes the table in benchmark/README.md.
"""

import inspect
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in (".", "parity")]
from run import (
    BENCHMARK,
    Part,
    apart,
    having,
    main,
    read_result,
    read_rows,
    relative_distance,
    run_here,
    write_rows,
)
from tables import fill, pretty

RESULT = Path(__file__).with_suffix(".json")
SETTINGS = dict(
    rows=96,  # prompts of the dataset
    batch=16,  # episodes of a rollout, on all processes
    mini_batches=1,  # optimizer steps in a pass over it
    passes=1,  # over it
    micro=16,  # episodes that a process trains on at once
    processes=1,
    rate=1e-4,  # of the first step
    seed=1,
    save=6,  # steps between checkpoints; Tally's are between rollouts, one at least
    resume=False,
    file="train",  # or eval: only score a sample for each of its prompts
    die_at=None,  # the call of the reward function that kills its process
    ends="^$",  # what is said where it fails
)
FLAGS = "--response-length 8 --kl-coef 0.01 --num-train-epochs 1"
TWO = dict(processes=2, micro=8)
KILLED = dict(die_at=15, ends="exit code -9")
EIGHT_STEPS = dict(mini_batches=4, passes=2, micro=4, rows=48)  # in a rollout
LOGGED = {"lr": "learning_rate", "eval/scores": "eval_reward"}  # TRL's names
CALLS = itertools.count(1)  # each process counts its own


def score(prompts, completions, answer, **_):
    """The reward: 1 for a right sum. It writes down what it is shown."""
    if str(next(CALLS)) == os.environ["DIE_AT"]:
        os.kill(os.getpid(), signal.SIGKILL)
    scores = [float(text.strip() == right) for text, right in zip(completions, answer)]
    with open(f"{os.environ['CALLS']}.{os.environ.get('RANK', 0)}", "a") as file:
        file.write(json.dumps([*zip(prompts, scores)]) + "\n")
    return scores


# ---- both sides


def ask(side, script, flags, work, name, after="", **changes):
    """What a run did. after: a run before, in a copy of whose folder it goes on"""
    settings = SimpleNamespace(**SETTINGS | changes)
    run = SimpleNamespace(folder=work / name)
    if after:
        shutil.copytree(work / after, run.folder)
    rows = read_rows(BENCHMARK / f"default/{settings.file}.jsonl")[: settings.rows]
    run_side = {"TRL": run_trl, "Tally": run_tally}[side]
    job = (worker, run_side, script, flags, run.folder, settings, rows)
    run.failed = apart(*job, processes=settings.processes).get("failed", "")
    if not re.search(settings.ends, run.failed):
        raise SystemExit(f"{run.failed}\n{side} {script} {name}")
    calls = [read_rows(path) for path in sorted(work.glob(f"{name}.calls.*"))]
    run.rollouts = [sum(parts, []) for parts in zip(*calls)]  # [rollout]: its prompts and scores
    if (run.folder / "metrics.jsonl").exists():
        run.last = read_rows(run.folder / "metrics.jsonl")[-1]  # what it logged last
    return run


def worker(run_side, script, flags, folder, settings, rows):
    """One process of a run."""
    os.environ |= dict(CALLS=f"{folder}.calls", DIE_AT=str(settings.die_at))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    run_side(script, flags, folder, settings, rows)
    return {}


def run_trl(script, flags, folder, settings, rows):
    from datasets import Dataset
    from trl_trainer import make_trainer

    micro_batches = settings.batch // settings.mini_batches // settings.micro // settings.processes
    trainer = make_trainer(
        script,
        rows,
        score,
        folder,
        batch=settings.micro,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=micro_batches * settings.mini_batches,
        num_iterations=settings.passes,
        num_train_epochs=1,
        beta=0.01,
        learning_rate=settings.rate,
        seed=settings.seed,
        save_strategy="steps",
        save_steps=settings.save,
        per_device_eval_batch_size=settings.micro,
        num_generations_eval=1,
    )
    if settings.file == "eval":
        trainer.evaluate(Dataset.from_list(rows))
    else:
        trainer.train(resume_from_checkpoint=settings.resume)
    trainer.save_model(folder / "model")
    if trainer.is_world_process_zero():
        last = {}
        for row in trainer.state.log_history:
            last |= row
        write_rows(folder / "metrics.jsonl", [{name: last.get(LOGGED[name]) for name in LOGGED}])


def run_tally(script, flags, folder, settings, rows):
    dataset = folder.with_suffix(f".{os.getpid()}.jsonl")
    write_rows(dataset, rows)
    flags += (
        f" --dataset {dataset} --reward {__file__}:score"
        f" --batch-size {settings.batch} --num-mini-batches {settings.mini_batches}"
        f" --num-ppo-epochs {settings.passes} --per-device-train-batch-size {settings.micro}"
        f" --learning-rate {settings.rate} --seed {settings.seed}"
        f" --save-every {max(1, settings.save // settings.mini_batches // settings.passes)}"
    )
    if settings.file == "eval":
        flags += f" --eval-dataset {dataset} --eval-temperature 1 --total-episodes 0"
    if settings.resume:
        flags += " --resume"
    run_here((script, flags, folder))


# ---- the questions


def episodes(ask):
    """490 prompts make 1,960 episodes. On how many does an epoch train?

    Each batch is one micro-batch

    batches of 16: {batch_16:range,}
    batches of 256: {batch_256:range,}
    """
    found = {}
    for batch in (16, 256):
        run = ask(f"batch_{batch}", rows=490, batch=batch, micro=batch, save=10**6)
        found[f"batch_{batch}"] = sum(map(len, run.rollouts))
    return found


def again(ask):
    """How far apart are two runs of one command?

    Everything

    the same seed: {again:apart}
    another seed: {another_seed:apart}
    """
    one = ask("one")
    return dict(again=distance(ask("again"), one), another_seed=distance(ask("seed", seed=2), one))


def micro_batches(ask):
    """How far apart are runs with micro-batches of 16 and of 4?

    The batch of 16

    : {micro:apart}
    """
    one = ask("one")
    return dict(micro=distance(ask("four", micro=4), one))


def two_processes(ask):
    """How far apart are runs on one process and on two?

    The batch of 16

    final weights: {processes:apart}
    batches with the same prompts: {equal_prompts:range} of {rollouts:range}
    """
    two = ask("two", **TWO)
    one = ask("one")
    equal = 0
    for ours, theirs in zip(two.rollouts, one.rollouts, strict=True):
        equal += sorted(prompt for prompt, _ in ours) == sorted(prompt for prompt, _ in theirs)
    return dict(processes=distance(two, one), equal_prompts=equal, rollouts=len(one.rollouts))


def killed(ask):
    """A run is killed in step 15 of 24, and resumed. How far is it from an unbroken one?

    One step for each rollout, a checkpoint every 6 steps

    one step for each rollout: {resumed:apart}
    """
    ask("killed", **KILLED)
    return dict(resumed=distance(ask("resumed", "killed", resume=True), ask("one")))


def killed_within(ask):
    """The same with 8 steps for each of 12 rollouts. How many rollouts are made?

    48 prompts, 2 passes over 4 mini-batches. Tally saves only between rollouts

    saved every 8 steps: {every_8:apart}
    its rollouts: {rollouts_8:range}
    saved every 6 steps: {every_6:apart}
    its rollouts: {rollouts_6:range}
    """
    unbroken = ask("unbroken", **EIGHT_STEPS)
    found = {}
    for save in (8, 6):
        dead = ask(f"killed_{save}", **EIGHT_STEPS | KILLED | dict(die_at=3, save=save))
        run = ask(f"resumed_{save}", f"killed_{save}", resume=True, save=save, **EIGHT_STEPS)
        found[f"every_{save}"] = distance(run, unbroken)
        found[f"rollouts_{save}"] = len(dead.rollouts) + len(run.rollouts)
    return found


def changed(ask):
    """It is resumed with a change. What happens?

    One step for each rollout, a checkpoint every 6 steps

    one row more than 96: {row}
    half of the rate: {rate}
    """
    dead = ask("killed", **KILLED)
    row = ask("row", "killed", ends="^$|UsageError", resume=True, rows=97)
    rate = ask("rate", "killed", ends="^$|UsageError", resume=True, rate=5e-5)
    # The checkpoint is that of step 12.
    times = Counter(prompt for prompt, _ in sum(dead.rollouts[:12] + row.rollouts, []))
    twice = sum(number > 4 for number in times.values())
    last = [pretty(run.last["lr"], ".3g") for run in (rate, ask("one"))]
    return dict(
        row=said(row, f"goes on; {twice} of 97 prompts come twice, {97 - len(times)} never"),
        rate=said(rate, f"goes on; the last rate is {last[0]}, and {last[1]} without the change"),
    )


def held_out(ask):
    """What mean of 101 held-out scores is logged?

    Batches of 16, on two processes 8 each

    one process: {logged_1:range.3f}
    the true mean: {mean_1:range.3f}
    two processes: {logged_2:range.3f}
    the true mean: {mean_2:range.3f}
    answers of two processes: {samples_2:range}
    """
    found = {}
    for processes in (1, 2):
        size = 16 // processes
        run = ask(f"held_out_{processes}", file="eval", rows=101, processes=processes, micro=size)
        samples = sum(run.rollouts, [])
        first = dict(reversed(samples))  # What fills the last batch comes after the others.
        found[f"samples_{processes}"] = len(samples)
        found[f"logged_{processes}"] = run.last["eval/scores"]
        found[f"mean_{processes}"] = sum(first.values()) / len(first)
    return found


def distance(a, b):
    """How far two runs are apart: 0 only if all bits are equal."""
    return relative_distance(a.folder, b.folder)


def said(run, goes_on):
    """What a resumed run with a change did."""
    stopped = re.search(r"--resume: (\w+) is", run.failed)
    return f"stops, and names {stopped[1]}" if stopped else goes_on


QUESTIONS = (
    episodes,
    again,
    micro_batches,
    two_processes,
    killed,
    killed_within,
    changed,
    held_out,
)


def measure(jobs, smoke, sides=("TRL", "Tally")):
    if smoke:
        sides = ["Tally"]
    rows = []
    for side, (job, names) in itertools.product(sides, jobs.items()):
        with tempfile.TemporaryDirectory() as work:
            asked = cache(partial(ask, side, *job, Path(work)))  # A run is made once.
            for question in [killed] if smoke else QUESTIONS:
                row = names | dict(side=side, question=question.__name__)
                rows.append(row | question(asked))
    return rows


def table():
    """The cells of each row of the table in benchmark/README.md."""
    rows = read_result(RESULT)["rows"]
    for question in QUESTIONS:
        asked, _, answers = inspect.getdoc(question).split("\n\n")
        of_question = having(rows, question=question.__name__)
        for line in answers.split("\n"):
            case, answer = line.split(": ")
            both = [fill(answer, of_question, dict(side=side)) for side in ("TRL", "Tally")]
            yield asked, case, *both
            asked = ""


RUNS = [({}, script, "") for script in ("rloo", "grpo")]
PARTS = {"questions": Part(RUNS, FLAGS, measure=measure, short="")}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
