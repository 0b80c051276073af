"""Questions of reasoning-gym whose answers are numbers, and their reward:

    pip install reasoning-gym==0.1.25
    python benchmark/smollm2/tasks.py chain_sum --min-terms 2 --max-terms 2 --max-digits 1
    python rloo.py --reward benchmark/smollm2/tasks.py:score \\
        --dataset runs/chain_sum_train.jsonl --eval-dataset runs/chain_sum_eval.jsonl ...

The second line writes both files. Flags that --help does not list are settings of the task, as
max_digits. No question is in both files, and questions of the same characters are in one of them:
4 - 3 and 3 - 4.

A completion's answer is its last number. So working before the answer ("3 + 4 = 7") costs nothing,
and a list of guesses gains nothing.

chain_sum_train.jsonl and chain_sum_eval.jsonl beside this program have the questions of the command
above.
"""

import importlib
import json
import random
import re
from dataclasses import dataclass
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


def score(completions, answer, **_):
    """1.0 or 0.0 per completion, text or chat messages: whether its last number is the answer."""
    scores = []
    for completion, right in zip(completions, answer):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        scores.append(float(last_number(text) == right))
    return scores


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
    """Different entries of reasoning-gym: each has a question and an answer."""
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


def to_row(entry):
    # Without a system message the chat template of SmolLM2 inserts one of its own.
    system = {"role": "system", "content": "Answer with the number only."}
    question = {"role": "user", "content": entry["question"]}
    return dict(prompt=[system, question], answer=str(entry["answer"]))


def main():
    options, settings = tyro.cli(Options, description=__doc__, return_unknown_args=True)
    entries = draw(options, settings)
    sides = split(entries, round(options.held_out * len(entries)))
    if not all(sides):
        raise SystemExit("these questions have too few sets of characters to be divided")
    answers = [str(entry["answer"]) for entry in entries]
    if not all(score(answers, answers)):
        raise SystemExit(f"the answers of {options.task} are not all numbers")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, side in zip(("train", "eval"), sides):
        path = options.folder / f"{options.task}_{name}.jsonl"
        lines = [json.dumps(to_row(entry)) + "\n" for entry in side]
        path.write_text("".join(lines), encoding="utf-8")
        print(f"{path}: {len(lines)} rows")


if __name__ == "__main__":
    main()
