"""Will it fit? The memory that a run of a script, or of your copy, takes on a GPU.

    python benchmark/memory.py rloo.py --model-path Qwen/Qwen2.5-7B-Instruct --prompt-tokens 1000 \\
        --response-length 512 --dtype bfloat16 --lora-r 16 --gradient-checkpointing --gib 24

The script's own flags come after it. No GPU and no weights are needed: a model's configuration and
tokenizer are read. The script's functions run on fake tensors, which have a shape and no numbers,
and the bytes of living tensors are counted. If all layers are equal, three and five of them are
counted, and a line through both gives the rest. A copy's `load_policy`, `load_reference`,
`token_logprobs` and so on are counted as the copy has them. What `main` itself computes, or loads
in another way, is not, and the optimizer is AdamW. All prompts are as long as the longest one, and
all completions as --response-length. Where --share-prompts is not given, it is as on a GPU.

It prints what stays, and the peak of each stage, for micro-batches of 1, 2, 4, ... up to that of
--per-device-train-batch-size. With --gib it stops at the first size that does not fit. A
micro-batch changes a run by rounding alone.

With --processes, the numbers are of one process, which has a share of the batch. The others do not
exist: what they would send is fake, too. Under DDP a process has everything, and buckets for the
exchange of gradients. Under FSDP2 the policy and the value model are divided.

Not counted are CUDA's context, CUDA graphs, an allocator's fragments, an inference engine such as
vLLM, and models that a reward function loads.
"""

import contextlib
import os
import sys
import weakref
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, isclose
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import torch
import transformers
import tyro
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from run import import_script
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 2**30
FEW = (3, 5)  # layers, for a line
USABLE = 0.85  # of a GPU's memory; the rest is for what is not counted
STAGES = ("sampling", "scoring", "training")  # An update adds nothing to the end of training.
SCORING = {"reward model", "value model"}  # beside the reference
CANNOT_FOLLOW = (
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.peaks = []  # of the parts of a stage
        self.sizes = {}  # bytes of each living storage, by its id

    def note(self, storage):
        """A storage is new, or has another size."""
        if id(storage) not in self.sizes:
            self.sizes[id(storage)] = 0
            weakref.finalize(storage, self.free, id(storage))
        self.alive += storage.nbytes() - self.sizes[id(storage)]
        self.sizes[id(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.alive)

    def free(self, name):
        self.alive -= self.sizes.pop(name)

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def noted_resize(storage, size):  # FSDP2 frees memory so.
            resize(storage, size)
            self.note(storage)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", noted_resize)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:  # the most frequent question
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                # Of a divided tensor only the share of this process is here.
                self.note(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        return result

    def begin_part(self, *_):
        """A part of a stage is the first or last layer, or what is between them. A line through
        numbers of layers needs parts, as with more layers another part may have the peak."""
        self.peaks.append(self.peak)
        self.peak = self.alive

    def watch(self, layer):
        """A part begins at the layer, at its end, and where its gradient arrives."""

        def end(layer, inputs, output):
            self.begin_part()
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self.begin_part)

        layer.register_forward_pre_hook(self.begin_part)
        layer.register_forward_hook(end)

    def peaks_of(self, stage):
        """The most bytes in each part of a function."""
        self.peaks, self.peak = [], self.alive
        stage()
        return [*self.peaks, self.peak]


@contextlib.contextmanager
def fake_processes(count):
    """Inside, this is the first of several processes. The others do not exist."""
    distributed = torch.distributed
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield distributed.init_device_mesh("cpu", (count,), mesh_dim_names=("shards",))
    finally:
        distributed.destroy_process_group()


def grouped_mm(meta, a, b, *inputs, **settings):
    """The shape of a mixture's product. Real tensors may be float32, but torch has fake ones of
    bfloat16 alone."""
    return meta(a.bfloat16(), b.bfloat16(), *inputs, **settings).to(a.dtype)


def read_config(script, path, **changes):
    """The configuration of a model, or why it cannot be counted."""
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, **changes)
    except (OSError, ValueError) as error:
        raise script.UsageError(f"{path}: {first_line(error)}") from error
    faults = {  # and whether the model has it
        "quantized weights are not counted": hasattr(config, "quantization_config"),
        "an encoder-decoder is not trained": config.is_encoder_decoder,
    }
    for fault, is_true in faults.items():
        if is_true:
            raise script.UsageError(f"{path}: {fault}")
    return config


def measure(*inputs, line=None, **hardware):
    """Bytes by name: of what stays, and of the peak of each stage. Inputs are those of `count`.

    line: the number of layers, all equal, or None, which counts all layers
    """
    if line is None:
        return {name: max(parts) for name, parts in count(*inputs, **hardware).items()}
    few, more = (count(*inputs, layers=layers, **hardware) for layers in FEW)
    steps = (line - FEW[0]) / (FEW[1] - FEW[0])
    return {
        name: max(low + (high - low) * steps for low, high in zip(few[name], more[name]))
        for name in few
    }


def equal_layers(script, args, tokens, **hardware):
    """Their number, or None if there are several kinds. Equal ones add equally to what stays."""
    text = read_config(script, args.model_path).get_text_config()
    number = text.num_hidden_layers
    if number <= FEW[1] or len({*(getattr(text, "layer_types", None) or [None])}) > 1:
        return None
    inputs = script, args, tokens, False
    try:
        line = measure(*inputs, line=number, **hardware)
    except Exception:  # It cannot have FEW layers. Other reasons come when all are counted.
        return None
    stays = measure(*inputs, **hardware)
    return number if all(isclose(stays[name], line[name], rel_tol=1e-4) for name in line) else None


def count(script, args, tokens, with_stages=True, processes=1, sharding="none", layers=None):
    """Lists of bytes by name, of what stays and of stages; of a stage those of its parts.

    tokens: of a prompt; with_stages: or only what stays; processes, sharding: as in Options
    layers: of each model, None: all
    """
    is_sharded = sharding == "fsdp2"
    memory = Memory()
    found = {}
    models = {}
    size = args.per_device_train_batch_size

    def load_model(path, dtype, longest, auto_class=transformers.AutoModelForCausalLM, **changes):
        config = read_config(script, path, **changes)
        text = config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None) or inf
        if positions < longest:
            raise script.UsageError(f"{path} has {positions} positions, and {longest} are needed")
        text.output_router_logits = False  # as in the script's own
        if layers is not None:
            text.num_hidden_layers = layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
        make = getattr(auto_class, "from_config", None) or auto_class._from_config
        model = make(config, dtype=getattr(torch, dtype)).eval()
        if layers is not None:
            lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
            [its_layers, *_] = [part for part in lists if len(part) == layers]
            memory.watch(its_layers[0])
            memory.watch(its_layers[-1])
        return model

    def load(name, function, *inputs):
        before = memory.alive
        models[name] = function(*inputs)
        found[name] = memory.alive - before

    def load_trained(name, function, *inputs):
        """As `prepare` of accelerate would change it."""
        load(name, function, *inputs)
        model = models[name]
        if is_sharded:
            names = {type(module).__name__ for module in model.modules()}
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=[*names.intersection(model._no_split_modules or ())],
                reshard_after_forward=True,
            )
            before = memory.alive
            fsdp2_prepare_model(accelerator, model)
            found[name] += memory.alive - before
        trained.append(model)
        weights.extend(weight for weight in model.parameters() if weight.requires_grad)

    share = ceil(args.batch_size / processes)  # of a process
    mini_batch = ceil(args.batch_size / args.num_mini_batches / processes)
    rollout = min(args.per_device_rollout_batch_size or share, share)
    longest = tokens + args.response_length
    prompts = torch.ones(rollout, tokens, dtype=torch.long)
    completions = torch.ones(rollout, args.response_length, dtype=torch.long)
    rows = torch.cat([prompts, completions], dim=1)
    batch = SimpleNamespace(
        prompts=[SimpleNamespace(token_ids=[1] * tokens)] * size,
        token_ids=[[1] * args.response_length] * size,
        tokens=completions,
    )
    trained = []
    weights = []  # that are trained
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        distributed_type="FSDP" if is_sharded else "NO",
        is_fsdp2=is_sharded,
        is_main_process=False,
        mixed_precision="no",
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shards",)),
        state=SimpleNamespace(),
    )

    def sample():
        """The first token, and the last one, on a cache of all tokens before it."""
        policy = models["policy"]
        with torch.no_grad(), script.ready_to_sample(args, policy):
            if args.cuda_graphs and not is_sharded:  # as `can_record` says on a GPU
                cache = script.RecordedKVCache(policy.config, longest)
                pick(script.run_prompts(policy, prompts, cache))
                pick(script.forward(policy, rows, cache, cache.layers[0].cumulative_length[None]))
                return
            pick(script.run_prompts(policy, prompts, script.KVCache(config=policy.config)))
            memory.begin_part()
            parts = len(memory.peaks)
            cache = script.KVCache(config=policy.config)
            script.run_prompts(policy, rows[:, :-1], cache)
            del memory.peaks[parts:]  # It stands for many steps, and is none.
            memory.peak = memory.alive
            pick(script.forward(policy, rows, cache, slice(-1, None)))

    def pick(logits):
        log_p = torch.log_softmax(logits[:, -1].float(), dim=-1)
        log_p.exp().cumsum(-1, dtype=torch.double)

    @torch.no_grad()
    def score():
        episodes = range(min(size, share))
        if models["reference"] is not None:
            script.token_logprobs(args, models["reference"], batch, episodes)
        if "reward model" in models:
            script.reward_model_scores(models["reward model"], batch, episodes)
        if "value model" in models:
            script.token_values(models["value model"], batch, episodes)

    def make_gradients():
        for weight in weights:
            weight.grad = torch.empty_like(weight)

    def train():
        """The last micro-batch of an update, beside the gradients of those before."""
        episodes = range(min(size, mini_batch))
        passes = [True]  # whether processes add up their gradients
        if mini_batch > size and is_sharded:
            passes = [False, True]  # Between passes, each process has whole gradients.
        elif mini_batch > size:
            make_gradients()
        for is_last in passes:
            for model in trained if is_sharded else ():
                model.set_requires_gradient_sync(is_last)
            backward(script.token_logprobs(args, models["policy"], batch, episodes))
            if "value model" in models:
                backward(script.token_values(models["value model"], batch, episodes))

    def backward(outputs):
        memory.begin_part()  # What the forward pass alone needed is gone.
        sum(output.sum() for output in tree_leaves(outputs)).backward()

    @contextlib.contextmanager
    def autocast():
        with torch.autocast("cpu", torch.bfloat16, args.dtype == "bfloat16"):
            yield
        memory.begin_part()  # The layers' copies in bfloat16 are gone.

    # What would look at numbers.
    changes = dict(
        accelerator=accelerator,
        autocast=autocast,
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
    # Fake weights cannot be moved.
    stay = mock.patch.object(torch.nn.Module, "_apply", lambda module, *_, **__: module)
    # peft copies the head of a value model. A copied mode breaks the memory of this process.
    same = mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True)
    meta = torch._meta_registrations._meta_grouped_mm_common
    products = mock.patch.object(
        torch._meta_registrations, meta.__name__, partial(grouped_mm, meta)
    )
    group = fake_processes(processes) if is_sharded else contextlib.nullcontext()
    with mock.patch.multiple(script, **changes), unique, stay, same, products, group as mesh:
        accelerator.torch_device_mesh = mesh
        with FakeTensorMode(allow_non_fake_inputs=True), memory:
            load_trained("policy", script.load_policy, args, longest)
            inputs = args, models["policy"], None, longest
            load("reference", script.load_reference, *inputs)
            if hasattr(script, "load_value_model"):
                load_trained("value model", script.load_value_model, *inputs)
            if args.reward_model_path is not None:
                auto_class = transformers.AutoModelForSequenceClassification
                make = partial(load_model, auto_class=auto_class, num_labels=1)
                load("reward model", make, args.reward_model_path, args.dtype, longest)
            if processes > 1 and not is_sharded:
                load("buckets of DDP", lambda: [torch.empty_like(weight) for weight in weights])
            is_scored = models["reference"] is not None or models.keys() & SCORING
            optimizers = [
                torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], fused=True)
                for model in trained
            ]
            start = memory.alive
            make_gradients()
            found["gradients"] = memory.alive - start
            for optimizer in optimizers:
                optimizer.step()  # It makes its state.
            found["optimizer"] = memory.alive - start - found["gradients"]
            found = {name: [bytes_] for name, bytes_ in found.items()}
            if with_stages:
                found["sampling"] = memory.peaks_of(sample)
                if is_scored:
                    found["scoring"] = memory.peaks_of(score)
                for optimizer in optimizers:
                    optimizer.zero_grad()  # Until here a run has those of its last update.
                found["training"] = memory.peaks_of(train)
    return found


def peak(row):
    return max(row[stage] for stage in STAGES if stage in row)


def report(script, args, tokens, gib, **hardware):
    """Print the table, what fits, and what would help.

    hardware: processes and sharding
    """
    share = ceil(args.batch_size / hardware["processes"])
    most = min(args.per_device_train_batch_size, share)
    sizes = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    limit = inf if gib is None else USABLE * gib * GIB
    hardware |= dict(line=equal_layers(script, args, tokens, **hardware))
    columns = []
    for size in sizes:
        args = replace(args, per_device_train_batch_size=size)
        columns.append(measure(script, args, tokens, **hardware))
        if peak(columns[-1]) >= limit:
            break
    sizes = sizes[: len(columns)]
    print(f"{tokens} tokens of a prompt, {args.response_length} of a completion; GiB")
    print(f"{'micro-batch':20}" + "".join(f"{size:8}" for size in sizes))
    for name in columns[0]:
        title = f"peak of {name}" if name in STAGES else name
        print(f"{title:20}" + "".join(f"{row[name] / GIB:8.2f}" for row in columns))
    if gib is None:
        return
    fitting = [size for size, row in zip(sizes, columns) if peak(row) < limit]
    about = f"below {USABLE:.0%} of {gib:g} GiB"
    best = fitting[-1] if fitting else 1
    if fitting:
        print(f"{about}: --per-device-train-batch-size {best}")
    else:
        print(f"nothing stays {about}")
    now = peak(columns[sizes.index(best)])
    args = replace(args, per_device_train_batch_size=best)
    rollout = ceil(min(args.per_device_rollout_batch_size or share, share) / 4)
    changes = {
        f"--per-device-rollout-batch-size {rollout}": dict(per_device_rollout_batch_size=rollout),
        "--gradient-checkpointing": dict(gradient_checkpointing=True),
        "--dtype bfloat16": dict(dtype="bfloat16"),
        "--lora-r 16": dict(lora_r=16),
    }
    tries = {words: (change, hardware) for words, change in changes.items()}
    if hardware["processes"] == 1:
        words = "FSDP2 on 8 processes, each with an eighth of the batch"
        tries[words] = {}, hardware | dict(processes=8, sharding="fsdp2")
    elif hardware["sharding"] == "none":
        tries["--sharding fsdp2"] = {}, hardware | dict(sharding="fsdp2")
    tried = {}
    failed = {}
    for words, (change, machine) in tries.items():
        if change and change.items() <= vars(args).items():
            continue
        try:
            tried[words] = peak(measure(script, replace(args, **change), tokens, **machine))
        except (ValueError, ImportError, *CANNOT_FOLLOW) as error:
            failed[words] = first_line(error)
    print(f"the peak with micro-batches of {best} is {now / GIB:.2f}; with")
    for words in sorted(tried, key=tried.get):
        print(f"{tried[words] / GIB:8.2f}  {words}")
    for words, reason in failed.items():
        print(f"{'?':>8}  {words}: {reason}")


def first_line(error):
    return str(error).strip().split("\n")[0]


@dataclass
class Options:
    script: tyro.conf.Positional[Path]
    """rloo.py, grpo.py, ppo.py or a copy of one; after it come its flags"""
    prompt_tokens: int | None = None
    """of every prompt, and no --dataset is needed; None: of the longest one of --dataset"""
    gib: float | None = None
    """memory of the GPU: print what fits, and which change helps most"""
    processes: int = 1
    """that share a batch, each with a GPU"""
    sharding: Literal["none", "fsdp2"] = "none"
    """whether processes divide the model. none: as `accelerate launch` does without a
    configuration, which is DDP"""


def main(options, flags):
    path = options.script.with_suffix(".py").resolve()
    tokens = options.prompt_tokens
    if not path.exists():
        sys.exit(f"error: {path}: no such script")
    if options.processes < 1 or tokens is not None and tokens < 1:
        sys.exit("error: --prompt-tokens and --processes must be above 0")
    script = import_script(path)
    if tokens is not None:
        flags = ["--dataset", "none", *flags]
    args = script.check_flags(tyro.cli(script.Args, args=flags))
    args.share_prompts = bool(args.share_prompts)
    try:
        if tokens is None:
            read_config(script, args.model_path)
            script.accelerator = SimpleNamespace(print=print)
            tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_path)
            prompts = script.load_prompts(args, args.dataset, args.reward, tokenizer)
            tokens = max(len(prompt.token_ids) for prompt in prompts)
        hardware = dict(processes=options.processes, sharding=options.sharding)
        report(script, args, tokens, options.gib, **hardware)
    except CANNOT_FOLLOW as error:
        sys.exit(f"error: a model that looks at numbers cannot be followed: {first_line(error)}")
    except (script.UsageError, ImportError) as error:
        sys.exit(f"error: {first_line(error)}")


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
