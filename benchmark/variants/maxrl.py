"""MaxRL (arXiv 2602.02710) as a reward: divided by the group's mean.

Less 1, this is MaxRL's advantage (r - mean) / mean.

    python grpo.py --num-generations 16 --scale-rewards none \
        --reward benchmark/variants/maxrl.py:score --eval-reward exact_match
"""

import numpy as np

K = 16  # completions of a prompt


def score(completions, answer, **_):
    """1 or 0, divided by the group's mean; a group without a right answer has 0."""
    right = np.array(
        [text.strip() == a for text, a in zip(completions, answer)], dtype=float
    ).reshape(-1, K)
    return (right / right.mean(1, keepdims=True).clip(1 / K)).flatten()
