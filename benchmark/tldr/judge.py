"""A judge of summaries for benchmark/win_rate.py, `--judge benchmark/tldr/judge.py:better`: fill in
`ask`, and run.

The win rate depends on the language model that is asked and on the question: name both beside every
number.
"""

from concurrent.futures import ThreadPoolExecutor

QUESTION = """Here is a post from a forum, and two summaries of it. Which summary is better? \
A good one says what
matters most in the post, says nothing that is not there, and is short.

{post}

Summary 0: {first}

Summary 1: {second}

Answer with the number of the better summary, 0 or 1, and with nothing else."""


def ask(question: str) -> str:
    """The answer of a language model, at temperature 0: call the client or the local model that you
    use here."""
    raise NotImplementedError("benchmark/tldr/judge.py asks no model yet: fill in `ask`")


def better(prompts: list[str], first: list[str], second: list[str], **_) -> list[int | None]:
    """0 or 1 for each pair; a tie where the answer is neither."""
    posts = [prompt.removesuffix("TL;DR:").strip() for prompt in prompts]
    shown = [
        QUESTION.format(post=p, first=a.strip(), second=b.strip())
        for p, a, b in zip(posts, first, second)
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = [answer.strip() for answer in pool.map(ask, shown)]
    return [int(answer) if answer in ("0", "1") else None for answer in answers]
