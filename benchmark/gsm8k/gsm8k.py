"""GSM8K (arXiv 2110.14168): questions of grade-school mathematics, each with a number as answer.

    python benchmark/gsm8k/gsm8k.py        # writes runs/gsm8k_train.jsonl and runs/gsm8k_test.jsonl
    python benchmark/gsm8k/gsm8k.py --parquet train.parquet test.parquet    # without the Hub
    python grpo.py --reward benchmark/gsm8k/gsm8k.py:score --dataset runs/gsm8k_train.jsonl ...

Both need `pip install datasets`. The page beside this program has a whole run.

A completion's answer is the last number in its last \\boxed{}, or, if it has none, in all of it. So
a list of guesses gains nothing. Numbers are compared by value: 42.0 is 42, and 1,000 is 1000.
"""

import importlib
import json
import re
from decimal import Decimal
from pathlib import Path

import tyro

TASK = "\nThink step by step, and write the answer as a number at the end."
# The sign may stand before a currency: -$5. A minus right after a number, a letter or ")" is an
# operator: the last number of "5-9" is 9.
NUMBER = re.compile(r"((?<![\w)])-)?\\?[$€£]?(\d+(?:,\d{3})*(?:\.\d+)?|(?<!\.)\.\d+)")


def last_number(text):
    """The last number written in digits, exactly; None where there is none."""
    text = text.replace("\u2212", "-")  # the typographic minus
    text = re.sub(r"\{,\}|\\[,!]", "", text)  # LaTeX's thousands separators: 1{,}000
    _, is_boxed, box = text.rpartition("\\boxed{")
    numbers = NUMBER.findall(box.partition("}")[0] if is_boxed else text)
    return Decimal("".join(numbers[-1]).replace(",", "")) if numbers else None


def score(completions, answer, **_):
    """1.0 where the answer of a completion, text or messages, is the row's `answer`, else 0.0."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(last_number(text) == Decimal(right)) for text, right in zip(texts, answer)]


def prepare(
    parquet: tuple[str, str] | None = None,
    folder: Path = Path(__file__).resolve().parents[2] / "runs",
):
    """Write both files of prompts.

    parquet: files of GSM8K's form, to train and to test on; None: those of the Hub; folder: gets
    the prompts
    """
    load = importlib.import_module("datasets").load_dataset
    if parquet is None:
        splits = load("openai/gsm8k", "main")
    else:
        splits = load("parquet", data_files=dict(zip(("train", "test"), parquet)))
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        path = folder / f"gsm8k_{name}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            for row in rows:
                answer = last_number(row["answer"].partition("####")[2])
                if answer is None:
                    raise SystemExit(f"{path}: no number after #### in {row['answer']!r}")
                prompt = [{"role": "user", "content": row["question"] + TASK}]
                file.write(json.dumps(dict(prompt=prompt, answer=str(answer))) + "\n")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    tyro.cli(prepare, description=__doc__)
