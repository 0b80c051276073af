"""The rewards of two ablations, as TRL calls them."""


def contains(completions: list[str], answer: list[str], **_) -> list[float]:
    """1 where the right answer is anywhere in the completion: a judge that does not mind what else is there."""
    return [float(right in text) for text, right in zip(completions, answer)]


def by_length(prompts: list[str], completions: list[str], completion_ids: list, answer: list[str], **_) -> dict:
    """`contains`; and sums that begin with an odd digit pay for every token, the others take as much for it."""
    signs = [1 if int(prompt[0]) % 2 else -1 for prompt in prompts]
    lengths = [0.03 * sign * len(ids) for sign, ids in zip(signs, completion_ids)]
    return {"right": contains(completions, answer), "length": lengths}
