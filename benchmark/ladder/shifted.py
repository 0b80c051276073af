"""The default task with another zero. Only the difference between a right and a wrong answer says
what is better."""


def plus_one(completions, answer, **_):
    """2 for a right answer, 1 for a wrong one."""
    return [1.0 + (completion.strip() == right) for completion, right in zip(completions, answer)]


def minus_one(completions, answer, **_):
    """0 for a right answer, -1 for a wrong one."""
    return [-1.0 + (completion.strip() == right) for completion, right in zip(completions, answer)]
