"""What several tests need: gradients by plain passes, an episode at a time; and a script's model without a run."""

from functools import partial
from types import SimpleNamespace

import torch
from conftest import encode, plain_logprobs
from transformers import AutoModelForCausalLM


def completion_model(script, model, eos_ids, shares_prompts=True, temperature=1.0, dtype="float32"):
    """A CompletionModel as a script makes it, around a language model. It runs functions of itself."""
    args = SimpleNamespace(k=2, gradient_checkpointing=not shares_prompts, dtype=dtype, temperature=temperature)
    args.stop_string = None
    model.can_share_prompts = True  # what `load_model` finds out
    made = script.CompletionModel(model, None, eos_ids, args)
    assert made.shares_prompts == shares_prompts
    return made


def sample(script, model, prompts, uniforms, temperature, eos_ids, dtype="float32"):
    """A script's `sample`, of these texts."""
    policy = completion_model(script, model, eos_ids, dtype=dtype)
    tokens = script.pad_left([encode(prompt) for prompt in prompts])
    result = policy(partial(script.sample, prompts=tokens, uniforms=uniforms, temperature=temperature))
    model.eval()  # no dropout in what it is compared with; a script's models have none at all
    return result


DENOMINATORS = {  # (tokens of the episode, of the mini-batch, episodes, response_length) -> what divides a token's loss
    "rloo": lambda tokens, all_tokens, episodes, longest: episodes,
    "ppo": lambda tokens, all_tokens, episodes, longest: all_tokens,
    "grpo": lambda tokens, all_tokens, episodes, longest: tokens * episodes,
    "dapo": lambda tokens, all_tokens, episodes, longest: all_tokens,
    "dr_grpo": lambda tokens, all_tokens, episodes, longest: episodes * longest,
    "cispo": lambda tokens, all_tokens, episodes, longest: all_tokens,
}


def token_weights(script, rows):
    """Minus the derivative of the loss by each token's log-probability, where every ratio is 1.

    This is the token's advantage, as rollouts.jsonl has it, divided by the denominator of the algorithm."""
    lengths = [len(row["token_ids"]) for row in rows]
    divisors = [DENOMINATORS[script.__name__](n, sum(lengths), len(rows), 6) for n in lengths]
    return [torch.tensor(row["advantage"]).expand(n) / x for row, n, x in zip(rows, lengths, divisors)]


@torch.no_grad()
def row_logprobs(model_path, rows, temperature=1.0, weights=None):
    """The log-probabilities of the tokens of each row, by plain passes. weights: in place of the model's"""
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    for parameter, weight in zip(model.parameters(), weights or []):
        parameter.data = weight
    return [plain_logprobs(model, encode(row["prompt"]), row["token_ids"], temperature).tolist() for row in rows]


def plain_gradient(model_path, rows, weights, temperature=1.0):
    """The gradient of -sum weight * log p over all tokens, by plain passes, an episode at a time.

    Returns one tensor for each parameter."""
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    for row, weight in zip(rows, weights):
        logprobs = plain_logprobs(model, encode(row["prompt"]), row["token_ids"], temperature)
        (-(weight * logprobs).sum()).backward()
    return [p.grad for p in model.parameters()]
