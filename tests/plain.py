"""What runs should compute, by plain passes: one episode at a time, without padding and cache. Also
groups of a run's rows, and stand-ins of CUDA graphs.
"""

import numpy as np
import torch
from conftest import encode, load_policy
from pytest import approx
from torch.distributions import Categorical
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
    patch.setattr(script, "can_record", lambda args: args.cuda_graphs)


def token_counts(rows):
    """The lengths of the completions."""
    return [len(row["token_ids"]) for row in rows]


def groups_of(values, k=3):
    return [values[first : first + k] for first in range(0, len(values), k)]


def without_none(values):
    return [value for value in values if value is not None]


@torch.no_grad()
def row_logprobs(model_path, rows, temperature=1.0):
    """The log-probabilities of the tokens of each row, by plain passes."""
    model = load_policy(model_path)
    logprobs = []
    for row in rows:
        choice = Categorical(logits=plain_outputs(model, row)[:-1] / temperature)
        logprobs.append(choice.log_prob(torch.tensor(row["token_ids"])).tolist())
    return logprobs


@torch.no_grad()
def plain_outputs(model, row):
    """A model's outputs one position before each token of a completion, and at its last one."""
    ids = torch.tensor([encode(row["prompt"]) + row["token_ids"]])
    return model(ids).logits[0, len(row["prompt"]) - 1 :]


def check_samples(ran, rows, model_path, purpose, temperature):
    """The tokens of an iteration's rows are those that its random numbers pick, and have their
    log-probabilities. Returns the entropy at each of them."""
    model = load_policy(model_path)
    rng = np.random.default_rng([ran.args.seed, purpose, rows[0]["iteration"]])
    entropies = []
    for row, numbers in zip(rows, rng.random((len(rows), ran.args.response_length))):
        tokens = torch.tensor(row["token_ids"])
        choice = Categorical(logits=plain_outputs(model, row)[:-1] / temperature)
        logprobs = choice.log_prob(tokens)
        assert row["logprobs"] == approx(logprobs.tolist(), abs=1e-5)
        top = choice.probs.cumsum(1)[range(len(tokens)), tokens]
        numbers = torch.from_numpy(numbers[: len(tokens)])
        assert ((top - logprobs.exp() - 1e-5 < numbers) & (numbers < top + 1e-5)).all()
        entropies += choice.entropy().tolist()
    return entropies
