"""Gradients by plain passes, an episode at a time, and a script's model without a run."""

from functools import partial
from types import SimpleNamespace

import torch
from conftest import encode, load_policy, plain_logprobs


def completion_model(script, model, eos_ids, shares_prompts=True, temperature=1.0, dtype="float32"):
    """A CompletionModel as a script makes it, around a language model."""
    args = SimpleNamespace(k=2, dtype=dtype, temperature=temperature, stop_string=None)
    args.gradient_checkpointing = not shares_prompts
    model.can_share_prompts = True  # what `load_model` finds out
    made = script.CompletionModel(model, None, eos_ids, args)
    assert made.shares_prompts == shares_prompts
    return made


def sample(script, model, prompts, uniforms, temperature, eos_ids, dtype="float32"):
    """A script's `sample`, of these texts."""
    policy = completion_model(script, model, eos_ids, dtype=dtype)
    tokens = script.pad_left([encode(prompt) for prompt in prompts])
    result = policy(
        partial(script.sample, prompts=tokens, uniforms=uniforms, temperature=temperature)
    )
    model.eval()  # What it is compared with has no dropout, as a script's models have none.
    return result


# What divides a token's loss: a function of the tokens of the episode, of those of the mini-batch,
# its episodes, and response_length.
DENOMINATORS = {
    "rloo": lambda tokens, all_tokens, episodes, longest: episodes,
    "ppo": lambda tokens, all_tokens, episodes, longest: all_tokens,
    "grpo": lambda tokens, all_tokens, episodes, longest: tokens * episodes,
    "dapo": lambda tokens, all_tokens, episodes, longest: all_tokens,
    "dr_grpo": lambda tokens, all_tokens, episodes, longest: episodes * longest,
    "cispo": lambda tokens, all_tokens, episodes, longest: all_tokens,
}


def token_weights(script, rows):
    """Minus the derivative of the loss by each token's log-probability, where every ratio is 1.

    This is the token's advantage, as rollouts.jsonl has it, divided by the algorithm's
    denominator."""
    all_tokens = sum(len(row["token_ids"]) for row in rows)
    weights = []
    for row in rows:
        advantage = torch.tensor(row["advantage"]).expand(len(row["token_ids"]))
        divisor = DENOMINATORS[script.__name__](len(advantage), all_tokens, len(rows), 6)
        weights.append(advantage / divisor)
    return weights


@torch.no_grad()
def row_logprobs(model_path, rows, temperature=1.0, weights=None):
    """The log-probabilities of the tokens of each row, by plain passes. weights: in place of the
    model's"""
    model = load_policy(model_path)
    for parameter, weight in zip(model.parameters(), weights or []):
        parameter.data = weight
    logprobs = []
    for row in rows:
        tokens = plain_logprobs(model, encode(row["prompt"]), row["token_ids"], temperature)
        logprobs.append(tokens.tolist())
    return logprobs


def plain_gradient(model_path, rows, weights, temperature=1.0):
    """The gradient of -sum weight * log p over all tokens, by plain passes, an episode at a time.

    Returns one tensor for each parameter."""
    model = load_policy(model_path)
    for row, weight in zip(rows, weights):
        logprobs = plain_logprobs(model, encode(row["prompt"]), row["token_ids"], temperature)
        (-(weight * logprobs).sum()).backward()
    return [p.grad for p in model.parameters()]
