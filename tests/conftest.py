"""What all tests share: the scripts as modules, tiny models and datasets, runs in this process and under a launcher.

    pytest                 the fast tests; they need no GPU and no network
    pytest -m slow         the tests that start several programs or take long
    pytest -k rloo         the tests of one script

The tests import the scripts. They never copy code from them. The models are tiny and random, and they are made here.
Their weights are large enough that a wrong position, temperature or mask changes the results clearly. Some tests
compute what a script should compute. They do so in the slowest and plainest way: one episode and one token at a time.
"""

import contextlib
import gc
import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

# This must come before torch is imported. Each worker of the tests has one core.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
import transformers
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent.parent
VOCAB = ["<pad>", "<eos>", *"0123456789+-= abcdef"]
PAD, EOS = 0, 1

# A launcher sets these variables. The tests begin without them.
for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
    os.environ.pop(name, None)
torch.set_num_threads(1)  # The models are too small to gain from more threads.
transformers.utils.logging.disable_progress_bar()


def is_script(path):
    text = path.read_text(encoding="utf-8")
    return bool(re.search(r"^class Args\b", text, re.M) and re.search(r"^def batch_arithmetic\(", text, re.M))


def import_file(path):
    """A Python file as a module, imported anew."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


# MODULES has every script in the folder by name, also your copy of one. SCRIPTS names the three of this repository.
MODULES = {path.stem: import_file(path) for path in sorted(HERE.glob("*.py")) if is_script(path)}
SCRIPTS = [name for name in ("rloo", "grpo", "ppo") if name in MODULES]
gc.freeze()  # Here and below: otherwise the garbage collector looks through all objects at the end of each run.


@pytest.fixture(params=SCRIPTS)
def script(request):
    return MODULES[request.param]


def only(*names):
    """Run a test on these scripts only, if they exist."""
    return pytest.mark.parametrize("script", [MODULES[n] for n in names if n in MODULES], ids=lambda m: m.__name__)


one_text = only("rloo")  # For code that is the same text in all three scripts. test_scripts.py checks that it is.


def group_flag(script):
    """The name of the flag that the property `k` reads. None in PPO, where a group is one episode."""
    found = re.search(r"^    k = property\(lambda self: self\.(\w+)\)", Path(script.__file__).read_text(), re.M)
    return found and found[1]


def with_group(script, flags):
    """The same flags, but `k` has the name that it has in the script. PPO has no such flag, so `k` is left out."""
    flags = dict(flags)
    k, name = flags.pop("k", None), group_flag(script)
    return flags | {name: k} if name and k is not None else flags


def make_args(script, **flags):
    return script.Args(**with_group(script, flags))


def read_jsonl(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")]


def write_jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_rows(prompts):
    """Rows of a dataset. The column `number` says which prompt it is."""
    return [{"prompt": prompt, "answer": "1", "number": number} for number, prompt in enumerate(prompts)]


def make_prompts(count, seed=0):
    """Different prompts of very different lengths, 1 to 16 characters."""
    rng = random.Random(seed)
    prompts = []
    while len(prompts) < count:
        prompt = "".join(rng.choices("0123456789+-=", k=rng.randint(1, 16)))
        prompts += [prompt] if prompt not in prompts else []
    return prompts


def make_tokenizer(pad_token="<pad>"):
    """One token per character."""
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCAB)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad_token, eos_token="<eos>", model_input_names=names
    )


def encode(text):
    return [VOCAB.index(character) for character in text]


COMMON = dict(vocab_size=len(VOCAB), bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD, initializer_range=0.4)
SHAPE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
SHAPE |= dict(max_position_embeddings=64)
GROUPED = SHAPE | dict(num_key_value_heads=1, head_dim=8)
GPT2_SHAPE = dict(n_embd=16, n_layer=2, n_head=2, n_positions=64)
BART_SHAPE = dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
VISION |= dict(image_size=14, patch_size=7)
MAMBA = dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False)
GEMMA3_LAYERS = ["sliding_attention", "full_attention"]
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, SHAPE),
    "qwen3": (transformers.Qwen3Config, GROUPED),
    "neox": (transformers.GPTNeoXConfig, SHAPE | dict(rotary_pct=1.0)),
    # This one has absolute positions, and every dropout is on.
    "gpt2": (transformers.GPT2Config, GPT2_SHAPE | dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)),
    # These have attention windows that are shorter than prompts or capped logits.
    "mistral": (transformers.MistralConfig, SHAPE | dict(num_key_value_heads=1, sliding_window=4)),
    "gemma2": (transformers.Gemma2Config, GROUPED | dict(sliding_window=4)),
    "gemma3": (transformers.Gemma3TextConfig, GROUPED | dict(sliding_window=4, layer_types=GEMMA3_LAYERS)),
    # Text gives no gradient to the weights for images.
    "images": (transformers.Gemma3Config, dict(text_config=COMMON | GROUPED, vision_config=VISION)),
    # Padding changes what BART's decoder gives. Jamba cannot go on from the cache of a shared prompt.
    "bart": (transformers.BartConfig, BART_SHAPE | dict(max_position_embeddings=64, init_std=0.4)),
    "jamba": (transformers.JambaConfig, GROUPED | MAMBA | dict(num_experts=2)),
    # The trunk of this one gives 8 numbers for a token. The next one draws experts at random in train mode.
    "opt": (transformers.OPTConfig, SHAPE | dict(word_embed_proj_dim=8, do_layer_norm_before=False, init_std=0.4)),
    "phimoe": (transformers.PhimoeConfig, GROUPED | dict(num_local_experts=2, router_jitter_noise=0.5)),
    "bert": (transformers.BertConfig, SHAPE),
    "phi3": (transformers.Phi3Config, SHAPE | dict(num_key_value_heads=1)),
    # These change what their head gives, each with the setting that does it. Its default may be 1; MPT has None.
    "capped": (transformers.Gemma2Config, GROUPED | dict(final_logit_softcapping=2.0)),
    "cohere": (transformers.CohereConfig, GROUPED | dict(logit_scale=0.25)),
    "cohere2": (transformers.Cohere2Config, GROUPED | dict(logit_scale=3.0)),
    "granite": (transformers.GraniteConfig, SHAPE | dict(logits_scaling=4.0)),
    "mpt": (transformers.MptConfig, dict(d_model=16, n_heads=2, n_layers=2, max_seq_len=64)),
}


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


USUAL = ["llama", "qwen3", "neox", "gpt2"]
WINDOWS = slow("mistral", "gemma2", "gemma3")
CHANGED_LOGITS = slow("capped", "cohere", "cohere2", "granite", "mpt")


def make_config(architecture, **changes):
    config_class, shape = ARCHITECTURES[architecture]
    return config_class(**COMMON | shape | changes)


def make_model(architecture, auto_class=AutoModelForCausalLM, seed=0, **changes):
    torch.manual_seed(seed)
    return auto_class.from_config(make_config(architecture, **changes)).eval()


def save_model(folder, architecture="llama", eos_ids=EOS, tokenizer=None, **config):
    """Save a policy. Returns its folder."""
    model = make_model(architecture, **config)
    model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=PAD)
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)


def save_classifier(folder, labels=1, pad_token_id=PAD, seed=3, tokenizer=None, architecture="llama", **config):
    """Save a reward model. Returns its folder and the model."""
    config |= dict(num_labels=labels, pad_token_id=pad_token_id)
    model = make_model(architecture, AutoModelForSequenceClassification, seed=seed, **config)
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder), model


REWARDS = '''
import os, pathlib
import numpy, torch

def letters(prompts, completions, **_):
    """Other scores for each completion of a prompt, and for each prompt."""
    return [len(set(c)) + 0.3 * c.count("1") - 0.1 * len(c) * (len(p) % 3) for p, c in zip(prompts, completions)]

def small(prompts, completions, **_):
    """A twentieth of `letters`."""
    return [score / 20 for score in letters(prompts, completions)]

def seldom(prompts, completions, **_):
    """Other scores for each completion of every third prompt. For the other prompts all scores are 0.1, and rounding
    makes their mean another number."""
    return [len(set(c)) if len(p) % 3 == 0 else 0.1 for p, c in zip(prompts, completions)]

def ranks(completions, **_):
    """The place of each completion in its group of three."""
    return [sum(other < c for other in completions[i - i % 3 : i - i % 3 + 3]) for i, c in enumerate(completions)]

def squares(prompts, **_):
    """No score is the mean of its group."""
    return [float(i * i) for i in range(len(prompts))]

def number(number, **_):
    """The score says which prompt it is."""
    return [float(n) for n in number]

def parts(completions, **_):
    return {"length": [float(len(c)) for c in completions], "ones": numpy.array([c.count("1") for c in completions])}

def numpy_array(prompts, completions, **_):
    return numpy.array(letters(prompts, completions))

def tensor(prompts, completions, **_):
    return torch.tensor(letters(prompts, completions), requires_grad=True)

def bfloat16(prompts, completions, **_):
    return torch.tensor(letters(prompts, completions), dtype=torch.bfloat16)

def tensors(prompts, completions, **_):
    return list(torch.tensor(letters(prompts, completions)))

def one_column(prompts, completions, **_):
    return torch.tensor(letters(prompts, completions))[:, None]

def array_column(prompts, completions, **_):
    return numpy.array(letters(prompts, completions))[:, None]

def list_of_columns(prompts, completions, **_):
    return list(torch.tensor(letters(prompts, completions))[:, None])

def silent(prompts, **_):
    return [None] * len(prompts)

def unsure(prompts, completions, **_):
    """The reward `letters`, but None for a completion with an "a"."""
    return [None if "a" in c else s for c, s in zip(completions, letters(prompts, completions))]

def unsure_parts(prompts, completions, **_):
    length = [None if len(c) < 4 else 0.5 * len(c) for c in completions]
    return {"letters": unsure(prompts, completions), "length": length, "never": silent(prompts)}

def five(prompts, **_):
    return [5] * len(prompts)

def large(prompts, **_):
    """Three numbers, of which float32 knows only two."""
    return [2.0**24 + i % 3 for i in range(len(prompts))]

calls = 0

async def answer():
    return [1.0]

def second_call(value):
    """A reward function that works at its first call and fails at its second."""
    def faulty(prompts, completions, **_):
        global calls
        calls += 1
        values = letters(prompts, completions)
        if calls == 2 and value == "raises":
            raise KeyError("the verifier is gone")
        if calls == 2 and value == "coroutine":
            return answer()
        faults = {"wrong count": values[1:], "empty": {}, "reserved": {"reward_model": values}, "forgotten": None}
        faults |= {"unequal": {"a": values, "b": values[1:]}, "rows": [{"score": value} for value in values]}
        if calls == 2:
            return faults[value] if value in faults else values[:-1] + [value]
        return values
    return faulty

def stops_once(prompts, completions, **_):
    """The reward `letters`. Its third call in the first program raises an error."""
    global calls
    calls += 1
    stopped = pathlib.Path(__file__).with_name("stopped_" + os.environ.get("RANK", "0"))
    if calls == 3 and not stopped.exists():
        stopped.touch()
        raise KeyError("stopped")
    return letters(prompts, completions)

nan, inf, huge, none = second_call(float("nan")), second_call(float("inf")), second_call(1e39), second_call(None)
text, raises, wrong_count = second_call("one"), second_call("raises"), second_call("wrong count")
empty, reserved, rows = second_call("empty"), second_call("reserved"), second_call("rows")
unequal, forgotten, coroutine = second_call("unequal"), second_call("forgotten"), second_call("coroutine")
'''


MANY_EOS = [EOS, 5, 9, 14]
POLICIES = {  # the arguments of `save_model`
    "llama": {},
    "gpt2": dict(architecture="gpt2"),
    "dropout": dict(attention_dropout=0.5),
    "reference": dict(seed=1),
    "mild": dict(initializer_range=0.1, eos_ids=MANY_EOS),
    "many_eos": dict(eos_ids=MANY_EOS),
    # <pad> is an ordinary token for these two policies. The first one emits it, the second one pads with its EOS.
    "emits_pad": dict(seed=2, eos_ids=[EOS, 7]),
    "pad_is_eos": dict(pad_token_id=EOS, tokenizer=make_tokenizer("<eos>")),
}


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Paths of the policies, datasets and rewards that runs read."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "rewards.py").write_text(REWARDS)
    return SimpleNamespace(
        folder=folder,
        reward=lambda name: f"{folder / 'rewards.py'}:{name}",
        dataset=lambda n, seed=0: write_jsonl(folder / f"{n}-{seed}.jsonl", make_rows(make_prompts(n, seed))),
        classifier=save_classifier(folder / "classifier")[0],
        **{name: save_model(folder / name, **settings) for name, settings in POLICIES.items()},
    )


def reset_accelerate():
    """Forget the run before. accelerate keeps its state in singletons."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


PATH = {*sys.path, str(HERE), str(HERE / "tests")}


def forget_imports():
    """Remove the folders that runs added to `sys.path`, and the modules that were imported from them."""
    added = set(sys.path) - PATH
    for name, module in list(sys.modules.items()) if added else []:
        if os.path.dirname(getattr(module, "__file__", None) or "/") in added:
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in added]
    importlib.invalidate_caches()


@contextlib.contextmanager
def fresh_imports():
    """Inside, no module of another run's folders is known. Afterwards, none of this run's folders is."""
    forget_imports()
    try:
        yield
    finally:
        forget_imports()


def base_flags(world):
    """The flags of every run of these tests: a tiny policy, prompts of different lengths, and the reward `letters`."""
    flags = dict(model_path=world.llama, dataset=world.dataset(7), reward=world.reward("letters"), batch_size=12)
    flags |= dict(k=3, response_length=6, learning_rate=3e-3, num_train_epochs=1.0, num_sample_generations=1)
    flags |= dict(num_ppo_epochs=1, num_mini_batches=1, kl_coef=0.05)
    return flags | dict(save_rollouts=True, max_grad_norm=math.inf)


class Run(NamedTuple):
    args: object
    metrics: list[dict]  # the rows of metrics.jsonl
    folder: Path
    rollouts = property(lambda self: read_jsonl(self.folder / "rollouts.jsonl"))


@pytest.fixture
def run(world, tmp_path):
    """run(script, **flags) runs `main` in this process, and returns a Run."""
    numbers = iter(range(100))

    def run(script, **flags):
        flags = {"output_dir": str(tmp_path / f"run{next(numbers)}")} | base_flags(world) | flags
        args = make_args(script, **flags)
        reset_accelerate()
        with fresh_imports():
            script.main(args)
        gc.freeze()
        folder = Path(args.output_dir)
        return Run(args, read_jsonl(folder / "metrics.jsonl"), folder)

    return run


@pytest.fixture
def refuses(run, tmp_path):
    """refuses(script, *words, **flags): the run must stop with these words in its message, and write nothing."""

    def refuses(script, *words, error=Exception, **flags):
        out = tmp_path / "out"
        with pytest.raises(error) as raised:
            run(script, **{"output_dir": str(out)} | flags)
        for word in words:
            assert re.search(word, str(raised.value)), f"{word!r} is not in: {raised.value}"
        assert not out.exists()

    return refuses


@pytest.fixture
def updates(monkeypatch):
    """A list with an entry for each optimizer step: weights and gradients of all parameters, and the learning rate."""
    record = []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            parameters = [p for group in self.param_groups for p in group["params"]]
            weights, gradients = zip(*((p.detach().clone(), p.grad.clone()) for p in parameters))
            record.append(SimpleNamespace(weights=weights, gradients=gradients, lr=self.param_groups[0]["lr"]))
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Recorder)
    return record


def record_calls(monkeypatch, owner, name):
    """Wrap a function so that its arguments and results are recorded. Returns the list of the records."""
    calls, function = [], getattr(owner, name)

    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(SimpleNamespace(args=args, inputs=kwargs, result=result, training=torch.is_grad_enabled()))
        return result

    monkeypatch.setattr(owner, name, wrapped)
    return calls


def flat(tensors):
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def distance(tensors, others):
    """The norm of the difference, divided by the norm of the first."""
    first = flat(tensors)
    return ((first - flat(others)).norm() / first.norm()).item()


def weights_of(path):
    return [p.detach() for p in AutoModelForCausalLM.from_pretrained(path).parameters()]


def plain_logprobs(model, prompt_ids, token_ids, temperature=1.0):
    """Log-probabilities [tokens] of one completion, by one pass over all positions without padding and cache."""
    logits = model(torch.tensor([list(prompt_ids) + list(token_ids)])).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)[len(prompt_ids) - 1 : -1]
    return logprobs.gather(-1, torch.tensor(token_ids)[:, None]).squeeze(1)


TIMES = {"eps", "time/rollout_s", "time/train_s"}
UNEVEN_NAMES = TIMES | {"val/sampling_logprob_difference"}  # Times differ, and this metric is only rounding.


def compare_runs(output_dir, other_dir, without=()):
    """Fail unless two runs have the same completions, and the same metrics and weights up to rounding.

    without: beginnings of the names of metrics that may differ"""
    folders = Path(output_dir), Path(other_dir)
    rollouts = [[(r["prompt"], r["token_ids"]) for r in read_jsonl(folder / "rollouts.jsonl")] for folder in folders]
    assert rollouts[0] == rollouts[1]
    for row, other in zip(*(read_jsonl(folder / "metrics.jsonl") for folder in folders), strict=True):
        names, others = ({name for name in of if not name.startswith(tuple(without))} for of in (row, other))
        assert names == others
        for name in names - UNEVEN_NAMES:
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=5e-6), (row["iteration"], name)
    start = yaml.safe_load((folders[0] / "args.yaml").read_text())["model_path"]
    start, end, other_end = (flat(weights_of(path)) for path in (start, *(folder / "model" for folder in folders)))
    moved = (end - start).norm()
    assert moved > 1e-3
    assert (end - other_end).norm() / moved < 1e-3


def result_of(output_dir):
    """Everything that a run computed: its files without times and paths, and the bytes of its weights."""
    rows = read_jsonl(output_dir / "metrics.jsonl")
    lines = [{name: x for name, x in row.items() if name not in TIMES} for row in rows]
    weights = {file.name: file.read_bytes() for file in (output_dir / "model").glob("*.safetensors")}
    return lines, weights, "".join(file.read_text() for file in sorted(output_dir.glob("*rollouts.jsonl")))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


PROBE = '''
import atexit, json, os, pathlib

from __main__ import transformers  # The script's: transformers replaces its own module while it loads a model.
from accelerate.state import PartialState
from rewards import letters

folder, rank = pathlib.Path(os.environ["PROBE_FOLDER"]), os.environ.get("RANK", "0")
get_scheduler = transformers.get_scheduler

def probed_get_scheduler(*args, **kwargs):
    scheduler = get_scheduler(*args, **kwargs)
    atexit.register(lambda: (folder / f"last_lr_{rank}").write_text(repr(scheduler.get_last_lr()[0])))
    return scheduler

transformers.get_scheduler = probed_get_scheduler

def probe(prompts, completions, **_):
    """The reward `letters`. Each call writes a line: the process, and how many completions it scored."""
    state = PartialState()
    call = dict(rank=rank, count=len(prompts), world_size=state.num_processes, type=str(state.distributed_type))
    with open(folder / "calls.jsonl", "a") as file:
        file.write(json.dumps(call) + "\\n")
    return letters(prompts, completions)

def names_of_rank(prompts, completions, **_):
    return {"rank" + rank: letters(prompts, completions)}

def fails_on_rank_1(prompts, completions, **_):
    if rank == "1":
        raise ValueError("only here")
    return letters(prompts, completions)
'''


def command_line(flags):
    """Flags as a command line."""
    words = []
    for name, value in flags.items():
        name = name.replace("_", "-")
        words += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return words


def launch(script, processes, folder, flags, program=None, **environment):
    """Run a script in `folder` as a program of its own, and wait for its end. Several processes run under torchrun.

    Returns the finished program. The folder gets rewards.py and probe.py. program: a Python file that runs the script.
    """
    (folder / "probe.py").write_text(PROBE)
    (folder / "rewards.py").write_text(REWARDS)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    command = [sys.executable, *(launcher if processes > 1 else []), *([str(program)] if program else [])]
    command += [script.__file__, *command_line(with_group(script, flags))]
    environment = os.environ | {"PROBE_FOLDER": str(folder)} | environment
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)


def changed_copy(script, folder, old, new):
    """A copy of a script with another text in one place, in a folder of its own. `launch` takes it."""
    source = Path(script.__file__).read_text()
    assert source.count(old) == 1
    path = folder / "copy" / f"{script.__name__}.py"
    path.parent.mkdir()
    path.write_text(source.replace(old, new))
    return SimpleNamespace(__file__=str(path), __name__=script.__name__)


FSDP2 = HERE / "benchmark" / "hardware" / "fsdp2_cpu.py"  # a `program` that shards the weights over CPU processes


def launched(script, processes, folder, flags, **more):
    """`launch` a run that must end well, and that writes into `out` in the folder. Returns what it printed."""
    finished = launch(script, processes, folder, flags | dict(output_dir=folder / "out"), **more)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture
def same_on(run, world, tmp_path):
    """same_on(script, processes, flags, **own): fails unless a launch on so many processes, with these flags and its
    own, gives the run of one process. Returns the metrics, and what the launch printed. program: as `launch` takes it;
    copy: of the script, which is launched in its place."""

    def same_on(script, processes, flags, program=None, copy=None, **own):
        _, metrics, output_dir = run(script, **flags)
        flags = base_flags(world) | flags | own
        printed = launched(copy or script, processes, tmp_path, flags, program=program)
        compare_runs(output_dir, tmp_path / "out")
        return metrics, printed

    return same_on


def launch_twice(start, folder, flags):
    """Start a run that its reward stops in the third call, and then start it again. start: a function of the flags"""
    flags = flags | dict(reward=f"{folder / 'rewards.py'}:stops_once", resume=True)
    stopped, resumed = start(flags), start(flags)
    assert stopped.returncode != 0 and "KeyError: 'stopped'" in stopped.stderr, stopped.stderr
    assert resumed.returncode == 0, resumed.stderr
    return resumed
