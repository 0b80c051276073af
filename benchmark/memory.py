"""Will it fit? The memory that a run of a script, or of your copy, takes on a GPU.

    python benchmark/memory.py rloo.py --model-path Qwen/Qwen2.5-7B-Instruct --prompt-tokens 1000 \\
        --response-length 512 --dtype bfloat16 --lora-r 16 --gradient-checkpointing --gib 24

The script's own flags come after it. No GPU and no weights are needed: a model's configuration and
tokenizer are read. The script's functions run on fake tensors, which have a shape and no numbers,
and the bytes of living tensors are counted. A copy's `load_policy`, `load_reference`,
`token_logprobs` and so on are counted as the copy has them. What `main` itself computes, or loads
in another way, is not. All prompts are as long as the longest one, and all completions as
--response-length. Where --share-prompts is not given, it is as on a GPU.

It prints what stays, and the peak of each stage, for micro-batches of 1, 2, 4, ... up to that of
--per-device-train-batch-size. A micro-batch changes a run by rounding alone.

--processes is for FSDP2, and is arithmetic on these counts: weights, gradients and optimizer are
divided. A pass in training gathers two layers, with their gradients, and what is in no layer. With
several passes in an update, gradients are whole meanwhile.
Sampling holds all weights of the policy. Other models are whole.

Not counted are CUDA's context, fragments, graphs, and models that a reward function loads.
"""

import os
import sys
import weakref
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import transformers
import tyro
from run import import_script
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 2**30
USABLE = 0.85  # of a GPU's memory; the rest is for what is not counted
STAGES = ("sampling", "scoring", "training", "update")
CANNOT_FOLLOW = (
    UnsupportedFakeTensorException,
    torch._subclasses.fake_tensor.DataDependentOutputException,
    torch._subclasses.fake_tensor.DynamicOutputShapeException,
)


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.known = weakref.WeakSet()

    def free(self, count):
        self.alive -= count

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known.add(storage)
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self.free, storage.nbytes())
        return result

    def peak_of(self, stage):
        """The most bytes while a function runs."""
        self.peak = self.alive
        stage()
        return self.peak


def measure(script, args, tokens, sizes, processes=1):
    """Bytes by name, for each size of micro-batches: of what stays, and of the peak of each stage.

    tokens: of a prompt; processes: that divide the model by FSDP2
    """
    memory = Memory()
    found = {}  # the same for all sizes
    models = {}
    size = 1  # of the micro-batches that are measured now

    def load_model(path, dtype, longest, auto_class=transformers.AutoModelForCausalLM, **changes):
        config = transformers.AutoConfig.from_pretrained(path, **changes)
        if hasattr(config, "quantization_config"):
            raise script.UsageError(f"{path}: quantized weights are not counted")
        make = getattr(auto_class, "from_config", None) or auto_class._from_config
        return make(config, dtype=getattr(torch, dtype)).eval()

    def load(name, function, *inputs):
        before = memory.alive
        models[name] = function(*inputs)
        found[name] = memory.alive - before

    share = ceil(args.batch_size / processes)  # of a process
    mini_batch = ceil(args.batch_size / args.num_mini_batches / processes)
    rollout = min(args.per_device_rollout_batch_size or share, share)
    prompts = torch.ones(rollout, tokens, dtype=torch.long)
    completions = torch.ones(rollout, args.response_length, dtype=torch.long)
    rows = torch.cat([prompts, completions], dim=1)
    batch = SimpleNamespace(
        prompts=[SimpleNamespace(token_ids=[1] * tokens)] * max(sizes),
        token_ids=[[1] * args.response_length] * max(sizes),
        tokens=completions,
    )
    accelerator = SimpleNamespace(device=torch.device("cpu"), distributed_type="NO")

    def sample():
        """The first token, and the last one, on a cache of all tokens before it."""
        policy = models["policy"]
        script.set_checkpointing(policy, False)
        config = policy.config
        with torch.no_grad(), script.autocast():
            pick(script.run_prompts(policy, prompts, script.KVCache(config=config)))
            first = memory.peak
            cache = script.KVCache(config=config)
            script.run_prompts(policy, rows[:, :-1], cache)
            memory.peak = max(first, memory.alive)
            pick(script.forward(policy, rows, cache, slice(-1, None)))
        script.set_checkpointing(policy, args.gradient_checkpointing)

    def pick(logits):
        log_p = torch.log_softmax(logits[:, -1].float(), dim=-1)
        log_p.exp().cumsum(-1, dtype=torch.double)

    @torch.no_grad()
    def score():
        episodes = range(min(size, share))
        if models.get("reference") is not None:
            script.token_logprobs(args, models["reference"], batch, episodes)
        if "reward model" in models:
            script.reward_model_scores(models["reward model"], batch, episodes)
        if "value model" in models:
            script.token_values(models["value model"], batch, episodes)

    def train():
        """One micro-batch, and another one if there is one. Then the gradients exist before."""
        for _ in range(min(2, ceil(mini_batch / size))):
            episodes = range(min(size, mini_batch))
            outputs = script.token_logprobs(args, models["policy"], batch, episodes)
            sum(output.sum() for output in tree_leaves(outputs)).backward()
            if "value model" in models:
                script.token_values(models["value model"], batch, episodes).sum().backward()

    def update():
        for optimizer in optimizers:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            optimizer.step()

    # What would look at numbers.
    changes = dict(
        accelerator=accelerator,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16, args.dtype == "bfloat16"),
        load_model=load_model,
        check_vocabulary=lambda *_: None,
        pass_tokens=lambda _, episodes: [
            tokens[:1].expand(len(episodes), -1) for tokens in (prompts, completions)
        ],
    )
    unique = mock.patch.object(
        torch.Tensor,
        "unique_consecutive",
        lambda x, **_: (x[:: args.k], torch.arange(len(x)) // args.k),
    )
    stay = mock.patch.object(torch.nn.Module, "_apply", lambda module, *_, **__: module)
    # peft copies the head of a value model. A copied mode breaks the memory of this process.
    same = mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True)
    # Fake weights cannot be moved.
    with mock.patch.multiple(script, **changes), unique, stay, same:
        with FakeTensorMode(allow_non_fake_inputs=True), memory:
            load("policy", script.load_policy, args, 0)
            load("reference", script.load_reference, args, models["policy"], 0)
            if args.reward_model_path is not None:
                auto_class = transformers.AutoModelForSequenceClassification
                inputs = args.reward_model_path, args.dtype, 0, auto_class
                load("reward model", lambda: load_model(*inputs, num_labels=1))
            if hasattr(script, "load_value_model"):
                load("value model", script.load_value_model, args, models["policy"], None, 0)
            trained = [models[name] for name in ("policy", "value model") if name in models]
            optimizers = [script.make_optimizer(args, model) for model in trained]
            start = memory.alive
            train()
            found["gradients"] = memory.alive - start
            update()  # From now on there is the optimizer's state, too.
            updating = memory.peak_of(update)
            found["optimizer"] = memory.alive - start - found["gradients"]
            sampling = memory.peak_of(sample)
            rows = []
            for size in sizes:
                scoring = memory.peak_of(score)
                for optimizer in optimizers:
                    optimizer.zero_grad()  # Until here a run has those of its last update.
                training = memory.peak_of(train)
                row = found | dict(zip(STAGES, (sampling, scoring, training, updating)))
                if processes > 1:
                    divide(row, trained, processes, mini_batch > size)
                rows.append(row)
    return rows


def divide(row, trained, processes, has_several_passes):
    """Change what one process holds alone to what it holds under FSDP2.

    has_several_passes: of an update; between them each process keeps whole gradients
    """
    names = [name for name in ("policy", "value model", "gradients", "optimizer") if name in row]
    whole = {name: row[name] for name in names}
    for name in names:
        row[name] = whole[name] / processes
    saved = sum(whole[name] - row[name] for name in names)
    for stage in STAGES:
        row[stage] -= saved
    gathered = max(map(gathered_bytes, trained))
    row["sampling"] += whole["policy"]
    row["scoring"] += gathered
    row["training"] += gathered
    if has_several_passes:
        row["training"] += whole["gradients"] - row["gradients"]


def gathered_bytes(model):
    """Of two layers and what is in no layer, with gradients."""

    def size(module):
        return sum(w.nbytes * (1 + w.requires_grad) for w in module.parameters())

    names = model._no_split_modules or ()
    layers = [size(module) for module in model.modules() if type(module).__name__ in names]
    return size(model) - sum(layers) + 2 * max(layers, default=0)


def peak(row):
    return max(row[stage] for stage in STAGES)


def report(script, args, tokens, gib, processes):
    """Print the table, what fits, and what would help."""
    most = args.per_device_train_batch_size
    sizes = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    columns = measure(script, args, tokens, sizes, processes)
    print(f"{tokens} tokens of a prompt, {args.response_length} of a completion; GiB")
    print(f"{'micro-batch':20}" + "".join(f"{size:8}" for size in sizes))
    for name in columns[0]:
        title = f"peak of {name}" if name in STAGES else name
        print(f"{title:20}" + "".join(f"{row[name] / GIB:8.2f}" for row in columns))
    if gib is None:
        return
    limit = USABLE * gib * GIB
    fitting = [size for size, row in zip(sizes, columns) if peak(row) < limit]
    about = f"below {USABLE:.0%} of {gib:g} GiB"
    best = fitting[-1] if fitting else 1
    if fitting:
        print(f"{about}: --per-device-train-batch-size {best}")
    else:
        print(f"nothing stays {about}")
    now = peak(columns[sizes.index(best)])
    args = replace(args, per_device_train_batch_size=best)
    rollout = args.per_device_rollout_batch_size or args.batch_size
    changes = {
        f"--per-device-rollout-batch-size {ceil(rollout / 4)}": dict(
            per_device_rollout_batch_size=ceil(rollout / 4)
        ),
        "--gradient-checkpointing": dict(gradient_checkpointing=True),
        "--dtype bfloat16": dict(dtype="bfloat16"),
        "--lora-r 16": dict(lora_r=16),
    }
    tried = {}
    for words, change in changes.items():
        if change.items() <= vars(args).items():
            continue
        try:
            other = replace(args, **change)
        except ValueError:  # Not with these flags, such as bfloat16 with several updates.
            continue
        tried[words] = peak(*measure(script, other, tokens, [best], processes))
    if processes == 1:
        tried["FSDP2 on 8 processes"] = peak(*measure(script, args, tokens, [best], 8))
    print(f"the peak with micro-batches of {best} is {now / GIB:.2f}; with")
    for words in sorted(tried, key=tried.get):
        print(f"{tried[words] / GIB:8.2f}  {words}")


@dataclass
class Options:
    script: tyro.conf.Positional[Path]
    """rloo.py, grpo.py, ppo.py or a copy of one; after it come its flags"""
    prompt_tokens: int | None = None
    """of every prompt, and no --dataset is needed; None: of the longest one of --dataset"""
    gib: float | None = None
    """memory of the GPU: print what fits, and which change helps most"""
    processes: int = 1
    """that divide the model by FSDP2"""


def main(options, flags):
    script = import_script(options.script)
    if options.prompt_tokens is not None:
        flags = ["--dataset", "none", *flags]
    args = script.check_flags(tyro.cli(script.Args, args=flags))
    args.share_prompts = bool(args.share_prompts)
    tokens = options.prompt_tokens
    try:
        if tokens is None:
            script.accelerator = SimpleNamespace(print=print)
            tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_path)
            prompts = script.load_prompts(args, args.dataset, args.reward, tokenizer)
            tokens = max(len(prompt.token_ids) for prompt in prompts)
        report(script, args, tokens, options.gib, options.processes)
    except CANNOT_FOLLOW as error:
        sys.exit(f"error: a model that looks at numbers cannot be followed: {error}")
    except script.UsageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
