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
    patch.setattr(script, "can_record", lambda args: args.cuda_graphs)


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


@torch.no_grad()
def row_logprobs(model_path, rows, temperature=1.0):
    """The log-probabilities of the tokens of each row, by plain passes."""
    model = load_policy(model_path)
    logprobs = []
    for row in rows:
        tokens = plain_logprobs(model, encode(row["prompt"]), row["token_ids"], temperature)
        logprobs.append(tokens.tolist())
    return logprobs


def plain_update(args, rows, model):
    """The loss of one update, its ratios, and where they are clipped, by plain passes of an episode
    at a time. A ratio is that of a token, or of an episode.

    rows: of the mini-batch, with advantages. GRPO's KL is a part of the loss. Masked episodes do
    not count in any denominator."""
    name = type(args).__module__
    flags = vars(args)
    loss_type = flags.get("loss_type", name)
    if flags.get("mask_truncated_completions"):
        rows = [row for row in rows if row["ended"]]
    loss = 0.0
    ratios = []
    cuts = []
    for row in rows:
        prompt = encode(row["prompt"])
        logprobs = plain_logprobs(model, prompt, row["token_ids"], args.temperature)
        advantage = torch.tensor(row["advantage"])
        logratio = logprobs - torch.tensor(row["logprobs"])
        if name == "rloo":
            logratio = logratio.sum(0, keepdim=True)
        if flags.get("importance_sampling_level") == "sequence":
            logratio = logratio.mean(0, keepdim=True)
        ratio = logratio.exp()
        high = flags.get("cliprange_high") or args.cliprange
        clipped = ratio.clamp(1 - args.cliprange, 1 + high)
        cut = clipped != ratio
        if loss_type == "cispo":  # The clipped ratio is a constant.
            losses = -advantage * clipped.detach() * logprobs
        else:
            losses = torch.maximum(-advantage * ratio, -advantage * clipped)
            cut &= (ratio - 1) * advantage > 0
        if name == "grpo":
            difference = torch.tensor(row["ref_logprobs"] or row["logprobs"]) - logprobs
            losses = losses + args.kl_coef * (difference.exp() - difference - 1)
        denominators = {
            "rloo": len(rows),
            "grpo": len(logprobs) * len(rows),
            "dr_grpo": args.response_length * len(rows),
        }  # Those of dapo, cispo and ppo are all tokens.
        loss = loss + losses.sum() / denominators.get(loss_type, sum(token_counts(rows)))
        if name != "rloo" or advantage != 0:  # RLOO makes no pass without a gradient.
            ratios.append(ratio)
            cuts.append(cut)
    return loss, torch.cat(ratios), torch.cat(cuts)


def plain_gradient(args, rows):
    """The gradient of the first update of a run, a tensor for each parameter of the policy."""
    model = load_policy(args.model_path)
    loss, *_ = plain_update(args, rows, model)
    return torch.autograd.grad(loss, list(model.parameters()))
