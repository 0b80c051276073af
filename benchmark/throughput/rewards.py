"""The reward of throughput.py and of smoke runs: cheap, and the same for Tally and for TRL."""


def share_of_letters(completions: list, **_) -> list[float]:
    """The share of a completion's characters that are `e` or `1`, 0 for an empty one."""
    shares = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[0]["content"]
        shares.append(sum(character in "e1" for character in text) / max(len(text), 1))
    return shares
