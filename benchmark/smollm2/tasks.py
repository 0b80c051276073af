"""Questions of any task of reasoning-gym, and the reward of their answers:

    pip install reasoning-gym==0.1.25
    python benchmark/smollm2/tasks.py chain_sum --min-terms 2 --max-terms 2 --max-digits 1
    python rloo.py --reward benchmark/smollm2/tasks.py:score \\
        --dataset runs/chain_sum_train.jsonl --eval-dataset runs/chain_sum_eval.jsonl ...

The second line writes both files. Flags that --help does not list are settings of the task, as
max_digits. No question is in both files, and questions of the same characters are in one of them:
4 - 3 and 3 - 4.

A completion's answer is its last number, last word, last line, or all of it. A whole task has one
of these forms: the first in which the reward accepts the task's own answers. So working before the
answer ("3 + 4 = 7") costs nothing, and a list of guesses gains nothing. The verifiers of some
tasks, such as n_queens, run an answer as Python code.

chain_sum_train.jsonl and chain_sum_eval.jsonl beside this program have the questions of the command
above, without the columns `task`, `form` and `metadata`.
"""

import functools
import importlib
import json
import random
import re
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import tyro

# ---- the reward
# A minus right after a number, a letter or ")" is an operator, not a sign: the last number of
# "5-9" is 9.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number(text):
    """The last number written in digits, with its sign and without thousands separators; "" where
    there is none."""
    numbers = NUMBER.findall(text.replace("\u2212", "-"))  # U+2212 is the typographic minus
    return numbers[-1].replace(",", "") if numbers else ""


def last_word(text):
    """The last word, without quotes, stars and the marks that end a sentence."""
    words = [word.strip("\"'`*.,;:!?") for word in text.split()]
    return next(filter(None, reversed(words)), "")


def last_line(text):
    return text.strip().rpartition("\n")[2]


FORMS = {"number": last_number, "word": last_word, "line": last_line, "text": str.strip}


@functools.cache
def verifier(task):
    return importlib.import_module("reasoning_gym").get_score_answer_fn(task)


def score_one(completion, answer, task, form, metadata):
    text = completion if isinstance(completion, str) else completion[0]["content"]
    verify = verifier(task)
    try:
        value = verify(FORMS[form](text), entry={"answer": answer, "metadata": metadata})
    except Exception:  # Some verifiers raise where they cannot read an answer.
        return 0.0
    # Less than 1 is credit for an answer's length, or for a part of it. It does not count.
    return float(value == 1.0)


def score(
    completions, answer, task=repeat("chain_sum"), form=repeat("number"), metadata=repeat(None), **_
):
    """1.0 or 0.0 per completion, text or chat messages: whether the verifier of the row's task
    accepts its answer."""
    return list(map(score_one, completions, answer, task, form, metadata))


# ---- the questions
@dataclass
class Options:
    task: tyro.conf.Positional[str]
    """such as chain_sum; a wrong name prints all"""
    rows: int = 200
    """questions of both files, or fewer if ten times as many draws do not find so many"""
    held_out: float = 0.3
    """the share of the second file"""
    folder: Path = Path(__file__).resolve().parents[2] / "runs"
    """gets both files"""


def draw(options, settings):
    """Different entries of reasoning-gym: each has a question, an answer and metadata."""
    tasks = importlib.import_module("reasoning_gym.factory").DATASETS
    if options.task not in tasks:
        raise SystemExit(f"no task {options.task}; the tasks are {', '.join(sorted(tasks))}")
    make_dataset, make_config = tasks[options.task]
    default = make_config(seed=0, size=10 * options.rows)
    entries = {}
    for entry in make_dataset(tyro.cli(make_config, args=settings, default=default)):
        entries.setdefault(entry["question"], entry)
        if len(entries) == options.rows:
            break
    return list(entries.values())


def split(entries, num_held_out):
    """Those to train on, and those held out, in a seeded order. Questions that have the same
    characters are on the same side."""
    groups = {}
    for entry in sorted(entries, key=lambda entry: entry["question"]):
        groups.setdefault("".join(sorted(entry["question"])), []).append(entry)
    keys = sorted(groups)
    random.Random(1).shuffle(keys)
    train, held_out = [], []
    for key in keys:
        side = held_out if len(held_out) + len(groups[key]) <= num_held_out else train
        side += groups[key]
    return [train, held_out]


def to_row(entry, options, form):
    # Without a system message the chat template of SmolLM2 inserts one of its own.
    system = {"role": "system", "content": f"Answer with the {form} only."}
    return dict(
        prompt=[system, {"role": "user", "content": entry["question"]}],
        answer=entry["answer"],
        task=options.task,
        form=form,
        metadata=json.loads(json.dumps(entry["metadata"], default=str)),  # as a reward gets it
    )


def main():
    options, settings = tyro.cli(Options, description=__doc__, return_unknown_args=True)
    entries = draw(options, settings)
    sides = split(entries, round(options.held_out * len(entries)))
    if not all(sides):
        raise SystemExit("these questions have too few sets of characters to be divided")
    for form in FORMS:
        rows = [to_row(entry, options, form) for entry in entries]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        if all(score(list(map(str, columns["answer"])), **columns)):
            break
    else:
        raise SystemExit(f"the verifier of {options.task} does not accept the task's own answers")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, side in zip(("train", "eval"), sides):
        path = options.folder / f"{options.task}_{name}.jsonl"
        lines = [json.dumps(to_row(entry, options, form)) + "\n" for entry in side]
        path.write_text("".join(lines), encoding="utf-8")
        print(f"{path}: {len(lines)} rows, form: {form}")


if __name__ == "__main__":
    main()
