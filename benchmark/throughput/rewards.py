"""The rewards of throughput.py: cheap, deterministic, and the same functions for Tally and for TRL.

Called with the whole batch, the k episodes of a group side by side. No imports: it is read in both
environments.
"""


def texts_of(completions: list) -> list[str]:
    """The texts of completions, each a text or a list of one chat message."""
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]


def exact_match(completions: list, answer: list[str], **_) -> list[float]:
    """1 where the completion, stripped, is the row's `answer`, else 0."""
    return [float(text.strip() == right) for text, right in zip(texts_of(completions), answer)]


def share_of_letters(completions: list, **_) -> list[float]:
    """The share of a completion's characters that are `e` or `1`, 0 for an empty one."""
    return [sum(character in "e1" for character in text) / max(len(text), 1) for text in texts_of(completions)]


def place_in_group(completions: list, **_) -> list[float]:
    """0, 1, 2, 3, 0, 1, .. with k = 4. No group has equal scores, so every episode is trained
    on."""
    return [float(episode % 4) for episode in range(len(completions))]
