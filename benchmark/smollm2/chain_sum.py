"""The reward of one-digit sums and differences, checked by reasoning-gym's own verifier:

    --dataset benchmark/smollm2/chain_sum_train.jsonl --reward benchmark/smollm2/chain_sum.py:score

The last number of a completion is its answer: 1 if that is right, else 0. So working before it ("3
+ 4 = 7") costs nothing, and a list of guesses gains nothing. Needs `pip install
reasoning-gym==0.1.25`.
"""

import re

import reasoning_gym

# 200 questions exist; the 2,000 drawn here, each from its own seed, hold them all
SIZES = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
DATASET = reasoning_gym.create_dataset("chain_sum", **SIZES, size=2000, seed=0)
# A minus right after a number, a letter or ")" is an operator, not a sign: the last number of
# "5-9" is 9.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number(text: str) -> str:
    """The last number written in digits, with its sign and without thousands separators; "" where
    there is none."""
    numbers = NUMBER.findall(text.replace("\u2212", "-"))  # U+2212 is the typographic minus
    return numbers[-1].replace(",", "") if numbers else ""


def score(completions: list, answer: list[str], **_) -> list[float]:
    """1.0 or 0.0 per completion, text or chat messages: whether its last number equals the row's
    `answer`."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    scores = [
        DATASET.score_answer(last_number(t), entry={"answer": right})
        for t, right in zip(texts, answer)
    ]
    # the verifier's partial credit goes by length: not counted
    return [float(value == 1.0) for value in scores]
