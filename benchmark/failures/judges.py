"""Rewards with which a run goes wrong. The failures of this folder use them, see
docs/failures.md."""


def likes_length(completions, completion_ids, answer, per_token=0.2, **_):
    """1 where the right answer is anywhere in the completion, and 0.2 for every token."""
    return [
        float(right in c) + per_token * len(ids)
        for c, ids, right in zip(completions, completion_ids, answer)
    ]


def likes_length_a_little(**columns):
    """The same with 0.002 for every token."""
    return likes_length(**columns, per_token=0.002)


def first_two_digits(completions, answer, **_):
    """1 for the first two digits of the answer and nothing else. So the policy must learn to stop
    after them."""
    return [float(c.strip() == right[:2]) for c, right in zip(completions, answer)]


def kinder_to_some_prompts(prompts, completions, answer, **_):
    """1 for the right answer, and the first digit of the prompt is added. So prompts differ more
    than completions."""
    return [
        float(c.strip() == right) + int(p[0]) for p, c, right in zip(prompts, completions, answer)
    ]
