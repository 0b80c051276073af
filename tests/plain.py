"""Gradients by plain passes, an episode at a time: what the runs of several tests are compared with."""

import torch
from conftest import encode, plain_logprobs
from transformers import AutoModelForCausalLM


def token_weights(script, rows):
    """-dLoss/dlogprob of every token at ratio 1: its advantage of rollouts.jsonl over the algorithm's denominator."""
    lengths = [len(row["token_ids"]) for row in rows]
    if script.__name__ == "rloo":  # a sum over an episode's tokens, a mean over episodes
        return [torch.full((n,), row["advantage"]) / len(rows) for n, row in zip(lengths, rows)]
    if script.__name__ == "grpo":  # a mean over an episode's tokens, then over episodes
        return [torch.full((n,), row["advantage"]) / n / len(rows) for n, row in zip(lengths, rows)]
    return [torch.tensor(row["advantage"]) / sum(lengths) for row in rows]  # a mean over all tokens


def plain_gradient(model_path, rows, weights, temperature=1.0):
    """Gradient of -sum weight * log p over all tokens, by plain passes, an episode at a time -> one per parameter."""
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    for row, weight in zip(rows, weights):
        logprobs = plain_logprobs(model, encode(row["prompt"]), row["token_ids"], temperature)
        (-(weight * logprobs).sum()).backward()
    return [p.grad for p in model.parameters()]
