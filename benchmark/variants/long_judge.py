"""A reward as judges are that like long answers: 1 where the right one is anywhere in it, and 0.05 for every token."""


def score(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_) -> list[float]:
    return [float(right in c) + 0.05 * len(ids) for c, ids, right in zip(completions, completion_ids, answer)]
