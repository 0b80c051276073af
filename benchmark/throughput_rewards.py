"""The rewards of benchmark/throughput.py: cheap, deterministic, and the same functions for Tally and for TRL.

Called with the whole batch, the k episodes of a group side by side. No imports: it is read in both environments.
"""


def exact_match(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """1 where the completion, stripped, is the row's `answer`, else 0."""
    return [float(completion.strip() == row["answer"]) for completion, row in zip(completions, rows)]


def share_of_letters(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """The share of a completion's characters that are `e` or `1`, 0 for an empty one."""
    return [sum(character in "e1" for character in text) / max(len(text), 1) for text in completions]


def one_group_in_four(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """`share_of_letters` for groups 0, 4, 8, .. of a batch with k = 4; 0 for the others, whose scores are so equal."""
    shares = share_of_letters(prompts, completions, rows)
    return [share if episode // 4 % 4 == 0 else 0.0 for episode, share in enumerate(shares)]
