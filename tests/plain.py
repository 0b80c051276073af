"""Groups of a run's rows, and their log-probabilities by plain passes. Stand-ins of CUDA graphs."""

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
        tokens = plain_logprobs(model, encode(row["prompt"]), row["token_ids"], temperature)
        logprobs.append(tokens.tolist())
    return logprobs
