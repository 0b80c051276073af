"""Advantages and gradients by plain computations, an episode at a time. A script's model without a
run. Groups of a run's rows."""

import statistics

import torch
from conftest import encode, load_policy, plain_logprobs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StandInGraph(TorchDispatchMode):
    """Stands for a CUDA graph. Recording notes each operation with its tensors: it computes nothing
    that lasts. `replay` runs them again, into the same memory."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.before = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(operation), "it waits for the device"
        if operation._schema.is_mutable:
            self.before.append((args[0], args[0].clone()))
        result = operation(*args, **kwargs or {})
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, old in reversed(self.before):
            tensor.copy_(old)
        for operation, _, _, result in self.calls:
            for memory in tree_leaves(result):
                is_new = operation._schema.returns[0].alias_info is None
                if is_new and isinstance(memory, torch.Tensor) and memory.is_floating_point():
                    memory.fill_(torch.nan)

    def replay(self):
        for operation, args, kwargs, result in self.calls:
            for memory, value in zip(tree_leaves(result), tree_leaves(operation(*args, **kwargs))):
                if isinstance(value, torch.Tensor) and memory.data_ptr() != value.data_ptr():
                    memory.copy_(value)


def record_steps(patch, script):
    """From now on, runs try to record their steps, in stand-ins of CUDA graphs, as on a GPU."""
    patch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    patch.setattr(torch.cuda, "graph", lambda graph, **_: graph)
    patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    load = script.load_policy

    def load_policy(args, *inputs):
        model = load(args, *inputs)
        model.is_recorded = args.cuda_graphs
        return model

    patch.setattr(script, "load_policy", load_policy)


def token_counts(rows):
    """The lengths of the completions."""
    return [len(row["token_ids"]) for row in rows]


def groups_of(values, k=3):
    return [values[first : first + k] for first in range(0, len(values), k)]


def without_none(values):
    return [value for value in values if value is not None]


def plain_advantages(script, rewards, k=3, deviation=statistics.stdev):
    """The advantages of RLOO or GRPO, in groups of k. None is an episode without a score.

    deviation: what GRPO divides by, a function of the scores of a group"""
    advantages = []
    for group in groups_of(rewards, k):
        scored = without_none(group)
        for reward in group:
            advantage = 0.0
            if reward is not None and len(scored) > 1:
                advantage = reward - statistics.mean(scored)
                if script.__name__ == "rloo":
                    # The mean of the others is further away than that of all.
                    advantage /= 1 - 1 / len(scored)
                else:
                    advantage /= deviation(scored) + 1e-4
            advantages.append(advantage)
    return advantages


def mean_weights(loss_type, slopes):
    """The weight of each token in the loss of a mini-batch: its slope, divided by the denominator.

    slopes: a tensor of each episode, [its tokens]; loss_type: of GRPO, or the name of a script"""
    episodes = len(slopes)
    all_tokens = sum(map(len, slopes))
    weights = []
    for slope in slopes:
        denominators = {
            "rloo": episodes,
            "ppo": all_tokens,
            "grpo": len(slope) * episodes,
            "dapo": all_tokens,
            "dr_grpo": 6 * episodes,  # 6 is --response-length.
            "cispo": all_tokens,
        }
        weights.append(slope / denominators[loss_type])
    return weights


def token_weights(script, rows, loss_type=None):
    """Minus the derivative of the loss by each token's log-probability, where every ratio is 1.

    This is the token's advantage, as rollouts.jsonl has it, divided by the denominator of the
    algorithm, or of this loss type."""
    slopes = []
    for row in rows:
        slopes.append(torch.tensor(row["advantage"]).expand(len(row["token_ids"])))
    return mean_weights(loss_type or script.__name__, slopes)


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
    return [parameter.grad for parameter in model.parameters()]
