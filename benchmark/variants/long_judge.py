"""A reward as judges are that like long answers.

It is 1 where the right one is anywhere in it, and 0.05 for every token.
"""


def score(completions, completion_ids, answer, **_):
    scores = []
    for text, ids, right in zip(completions, completion_ids, answer):
        scores.append(float(right in text) + 0.05 * len(ids))
    return scores
