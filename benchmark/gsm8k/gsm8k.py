"""GSM8K: its rows as prompts with answers, and a reward that reads the last number.

    python benchmark/gsm8k/gsm8k.py
    python rloo.py --dataset runs/gsm8k_train.jsonl --reward benchmark/gsm8k/gsm8k.py:score ..

The first command takes the rows from the Hub. It writes gsm8k_train.jsonl and gsm8k_test.jsonl.
"""

import json
import re
from decimal import Decimal
from pathlib import Path

import tyro

FOLDER = Path(__file__).resolve().parents[2] / "runs"
TASK = "\nThink step by step, and write the answer as a number at the end."
MARKED = re.compile(r"####(.*)|\\boxed\{([^}]*)")  # to the end of the line; to the brace
# A minus right after a number, a letter or ")" is an operator: the last number of "9-5" is 5.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")
# Dollars, LaTeX's thousands separators as in 1{,}000 and 1\,000, and its spaces
REMOVED = re.compile(r"\\?\$|(?<=\d)(?:\\[,!]|\{,\})(?=\d)")


def last_number(text: str) -> Decimal | None:
    """The number that a text answers with: the last one of its last mark, or else of the whole
    text.

    A mark is #### 42 or \\boxed{42}.
    """
    text = REMOVED.sub("", text.replace("\u2212", "-"))  # U+2212 is the typographic minus.
    marked = [found[1] or found[2] or "" for found in MARKED.finditer(text)]
    for part in (*reversed(marked), text):
        if numbers := NUMBER.findall(part):
            return Decimal(numbers[-1].replace(",", ""))
    return None


def score(completions: list, answer: list[str], **_) -> list[float]:
    """1.0 where a completion, text or chat messages, answers with the row's number, else 0.0."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(last_number(text) == Decimal(right)) for text, right in zip(texts, answer)]


def to_prompt(row: dict) -> dict:
    """A row of the Hub has a `question`, and an `answer` whose last line is "#### 42"."""
    answer = row["answer"].split("####")[1].strip().replace(",", "")
    return {"prompt": [{"role": "user", "content": row["question"] + TASK}], "answer": answer}


def main(folder: Path = FOLDER):
    """folder: gets the two files"""
    import datasets  # It takes a second, and --help does not need it.

    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = datasets.load_dataset("openai/gsm8k", "main", split=split)
        lines = [json.dumps(to_prompt(row)) + "\n" for row in rows]
        path = folder / f"gsm8k_{split}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        print(f"{path}: {len(lines)} rows")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
