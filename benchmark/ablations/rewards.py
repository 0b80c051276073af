"""The reward of an ablation, as TRL calls it."""


def by_length(prompts: list[str], completions: list[str], completion_ids: list, answer: list[str], **_) -> dict:
    """1 where the right answer is anywhere in the completion; and sums that begin with an odd digit pay for every
    token, the others take as much for it."""
    signs = [1 if int(prompt[0]) % 2 else -1 for prompt in prompts]
    lengths = [0.05 * sign * len(ids) for sign, ids in zip(signs, completion_ids)]
    return {"right": [float(right in text) for text, right in zip(completions, answer)], "length": lengths}
