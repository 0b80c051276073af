"""What all tests share: scripts as modules, tiny models and datasets, and runs of the scripts.

    pytest                 the fast tests; they need no GPU and no network
    pytest -m slow         the tests that start several programs or take long
    pytest -k rloo         the tests of one script

The tests import the scripts. They never copy code from them. The models are tiny and random, and
they are made here. Their weights are large enough that a wrong position, temperature or mask
changes the results clearly. Some tests compute what a script should compute. They do so in the
slowest and plainest way: one episode and one token at a time.
"""

import contextlib
import gc
import importlib.util
import itertools
import json
import math
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

# This must come before torch is imported. Each worker of the tests has one core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
import transformers
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from program import run_program
from pytest import fixture, mark, raises
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent.parent
VOCAB = ["<pad>", "<eos>", *"0123456789+-= abcdef"]
PAD = 0
EOS = 1
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ '=' if m['role'] == 'user' else '' }}{% endfor %}"
    "{{ '-' if add_generation_prompt else mark }}"
)

# A launcher sets these variables. The tests begin without them.
for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
    os.environ.pop(name, None)
torch.set_num_threads(1)  # The models are too small to gain from more threads.
transformers.utils.logging.disable_progress_bar()


def pytest_collection_modifyitems(items):
    """The files with the longest tests come first, so that no worker ends long after others."""
    long = ("test_pages", "test_check_copy", "test_compare")
    items.sort(key=lambda item: item.path.stem not in long)


def import_file(path):
    """A Python file as a module, imported anew."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def read_changes(text):
    """Texts, and what takes their place. Lines begin with - or +, or with a space where they stay.
    An empty line divides two changes."""
    changes = {}
    for change in text.strip("\n").split("\n\n"):
        lines = change.splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        changes[old] = new
    return changes


def read_copies(text):
    """The changes of each copy. The name of a copy stands behind @@."""
    _, *parts = re.split("^@@ (.*)\n", text, flags=re.M)
    return {name: read_changes(changes) for name, changes in zip(parts[::2], parts[1::2])}


def write_copy(name, folder, patches=None, changes=()):
    """A copy of a script with patches and changes: texts, and what takes their place. folder: of
    its own"""
    path = launcher.copy_script(folder, name, *(patches or "").split())
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / f"{name}_changed.py"  # `import_file` must not replace the script itself.
    copy.write_text(text)
    return copy


def changed(*inputs, texts={}):
    """What `write_copy` writes, as a module."""
    return import_file(write_copy(*inputs, changes=texts.items()))


# MODULES has every script in the folder by name, also your copy of one. SCRIPTS names the three of
# this repository.
MODULES = {}
for path in sorted(HERE.glob("*.py")):
    if "\nclass Args:" in path.read_text(encoding="utf-8"):
        MODULES[path.stem] = import_file(path)
SCRIPTS = [name for name in ("rloo", "grpo", "ppo") if name in MODULES]
launcher = import_file(HERE / "benchmark/run.py")
stages = import_file(HERE / "benchmark/stages.py")
losses = import_file(HERE / "benchmark/losses.py")
read_jsonl = launcher.read_rows
column = launcher.column
# Here and below: otherwise the garbage collector looks through all objects after each run.
gc.freeze()


@fixture(params=SCRIPTS)
def script(request):
    return MODULES[request.param]


def only(*names):
    """Run a test on these scripts only, if they exist."""
    modules = [MODULES[name] for name in names if name in MODULES]
    return mark.parametrize("script", modules, ids=lambda module: module.__name__)


# For code that is the same text in all three scripts. test_scripts.py checks that it is.
one_text = only("rloo")


def group_flag(script):
    """The flag that the property `k` reads. None in PPO, where a group is one episode."""
    names = ("rloo_k", "num_generations")
    return next((name for name in names if hasattr(script.Args, name)), None)


def with_group(script, flags):
    """The same flags, but `k` has its name in the script. PPO has none, so it is left out."""
    flags = dict(flags)
    k = flags.pop("k", None)
    name = group_flag(script)
    if name is not None and k is not None:
        flags[name] = k
    return flags


def make_args(script, **flags):
    return script.Args(**with_group(script, flags))


def read_rollouts(output_dir):
    """The rows of all iterations of a run."""
    return launcher.read_run(output_dir)["rollouts"]


def write_jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_rows(prompts):
    """Rows of a dataset. The column `number` says which prompt it is."""
    return [dict(prompt=prompt, answer="1", number=number) for number, prompt in enumerate(prompts)]


def make_prompts(count, seed=0):
    """Different prompts of very different lengths, 1 to 16 characters."""
    rng = random.Random(seed)
    prompts = {}
    while len(prompts) < count:
        prompts["".join(rng.choices("0123456789+-=", k=rng.randint(1, 16)))] = True
    return list(prompts)


def make_tokenizer(pad_token="<pad>", eos_token="<eos>", vocab=VOCAB):
    """One token per character."""
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(vocab)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad_token,
        eos_token=eos_token,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )


def encode(text):
    return [VOCAB.index(character) for character in text]


SHAPE = dict(
    vocab_size=len(VOCAB),
    bos_token_id=None,
    eos_token_id=EOS,
    pad_token_id=PAD,
    initializer_range=0.4,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)
GROUPED = dict(num_key_value_heads=1, head_dim=8)
ARCHITECTURES = {  # what a config has beside SHAPE; its model_type is this name, or as here
    "llama": {},
    "qwen3": GROUPED,
    "neox": dict(model_type="gpt_neox", rotary_pct=1.0),
    "gpt2": dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),  # absolute positions
    "bloom": {},  # ALiBi takes positions from the mask.
    "phi": {},  # Its head has a bias.
    # Attention windows that are shorter than prompts.
    "mistral": dict(num_key_value_heads=1, sliding_window=4),
    "gemma3": GROUPED | dict(model_type="gemma3_text", sliding_window=4, sliding_window_pattern=2),
    "mixtral": GROUPED | dict(num_local_experts=2, output_router_logits=True),
    # The others compute otherwise, each in its own way. The positions of this one skip padding, and
    # begin at another number.
    "roberta": dict(is_decoder=True),
    # The window counts from the end of the row, also where that is empty.
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=30),
    # It cannot go on from a shared prompt.
    "jamba": GROUPED
    | dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, num_experts=2),
}
USUAL = ["llama", "qwen3", "neox", "gpt2", "bloom"]
USUAL += [pytest.param(name, marks=mark.slow) for name in ("mistral", "gemma3")]


def save_model(
    folder,
    architecture="llama",
    eos_ids=EOS,
    tokenizer=None,
    seed=0,
    auto_class=AutoModelForCausalLM,
    **config,
):
    """Save a policy. Returns its folder."""
    torch.manual_seed(seed)
    settings = SHAPE | dict(model_type=architecture) | ARCHITECTURES[architecture] | config
    model = auto_class.from_config(AutoConfig.for_model(**settings))
    model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=PAD)
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)


def save_classifier(folder, **settings):
    """Save a reward model. Returns its folder and the model."""
    auto_class = AutoModelForSequenceClassification
    save_model(folder, seed=3, auto_class=auto_class, num_labels=1, **settings)
    return str(folder), auto_class.from_pretrained(folder).eval()


REWARDS = '''
import json, os, pathlib
import numpy, torch

def letters(prompts, completions, **_):
    """Other scores for each completion of a prompt, and for each prompt."""
    scores = []
    for prompt, text in zip(prompts, completions):
        length = 0.1 * len(text) * (len(prompt) % 3)
        scores.append(len(set(text)) + 0.3 * text.count("1") - length)
    return scores

def small(prompts, completions, **_):
    """A twentieth of `letters`."""
    return [score / 20 for score in letters(prompts, completions)]

def seldom(prompts, completions, **_):
    """Other scores for each completion of every third prompt. For the other prompts all scores are
    0.1, and rounding makes their mean another number."""
    return [len(set(c)) if len(p) % 3 == 0 else 0.1 for p, c in zip(prompts, completions)]

def squares(prompts, **_):
    """No score is the mean of its group."""
    return [float(i * i) for i in range(len(prompts))]

def large(prompts, **_):
    return [2.0**24 + i % 3 for i in range(len(prompts))]

def number(number, **_):
    """The score says which prompt it is."""
    return [float(n) for n in number]

def tiny(number, **_):
    return [float(n) * 1e-9 for n in number]

def parts(completions, **_):
    ones = numpy.array([text.count("1") for text in completions])
    return {"length": [float(len(text)) for text in completions], "ones": ones}

def numpy_array(prompts, completions, **_):
    return numpy.array(letters(prompts, completions))

def tensor(prompts, completions, **_):
    return torch.tensor(letters(prompts, completions), requires_grad=True)

def bfloat16(prompts, completions, **_):
    return torch.tensor(letters(prompts, completions), dtype=torch.bfloat16)

def tensors(prompts, completions, **_):
    return list(torch.tensor(letters(prompts, completions)))

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

def record(**inputs):
    """Writes down what it is called with, a line for each episode, and empties the lists."""
    assert all(isinstance(values, list) for values in inputs.values()), inputs
    count = len(inputs["prompts"])
    with open(pathlib.Path(__file__).with_name("recorded.jsonl"), "a") as file:
        for values in zip(*inputs.values(), strict=True):
            file.write(json.dumps(dict(zip(inputs, values), count=count)) + "\\n")
            for value in values:
                if isinstance(value, list):
                    value.clear()
    inputs["prompts"].clear()
    return [0.1 * i for i in range(count)]

calls = 0

def no_score(prompts, completions, **_):
    """The reward `letters`, but in its second call one completion has no score."""
    global calls
    calls += 1
    scores = letters(prompts, completions)
    return [*scores[1:], None] if calls == 2 else scores

def stops_once(prompts, completions, **_):
    """The reward `letters`. Its third call in the first program raises an error."""
    global calls
    calls += 1
    stopped = pathlib.Path("stopped")
    if calls == 3 and not stopped.exists():
        stopped.touch()
        raise KeyError("stopped")
    return letters(prompts, completions)
'''


MANY_EOS = [EOS, 5, 9, 14]
POLICIES = {  # the arguments of `save_model`
    "llama": {},
    "gpt2": dict(architecture="gpt2"),
    "dropout": dict(attention_dropout=0.5),
    "reference": dict(seed=1),
    "mild": dict(initializer_range=0.1, eos_ids=MANY_EOS),
    "many_eos": dict(eos_ids=MANY_EOS),
    # <pad> is an ordinary token for these two policies. The first one emits it, the second one pads
    # with its EOS.
    "emits_pad": dict(seed=2, eos_ids=[EOS, 7]),
    "pad_is_eos": dict(pad_token_id=EOS, tokenizer=make_tokenizer("<eos>")),
    "endless": dict(eos_ids=None, tokenizer=make_tokenizer(eos_token=None)),
}


@fixture(scope="session")
def world(tmp_path_factory):
    """Paths of the policies, datasets and rewards that runs read."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "rewards.py").write_text(REWARDS)
    return SimpleNamespace(
        folder=folder,
        dataset=lambda n, seed=0: write_jsonl(
            folder / f"{n}-{seed}.jsonl", make_rows(make_prompts(n, seed))
        ),
        classifier=save_classifier(folder / "classifier")[0],
        **{name: save_model(folder / name, **settings) for name, settings in POLICIES.items()},
    )


def reset_accelerate():
    """Forget the run before. accelerate keeps its state in singletons."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@contextlib.contextmanager
def fresh_imports():
    """Afterwards, the folders that were added to `sys.path` inside are unknown, and so are the
    modules that were imported from them."""
    path = list(sys.path)
    try:
        yield
    finally:
        added = set(sys.path) - set(path)
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if os.path.dirname(getattr(module, "__file__", None) or "") in added:
                del sys.modules[name]
        importlib.invalidate_caches()


def base_flags(world, flags={}):
    """The flags of every run: a tiny policy, prompts of different lengths, the reward `letters`.

    Then these flags. A policy or a reward function of `world` may be given by its name, and a
    dataset by its number of prompts. An evaluation gets other prompts."""
    flags = (
        dict(
            model_path="llama",
            dataset=7,
            reward="letters",
            batch_size=12,
            k=3,
            response_length=6,
            learning_rate=3e-3,
            num_train_epochs=1.0,
            num_sample_generations=1,
            num_ppo_epochs=1,
            num_mini_batches=1,
            kl_coef=0.05,
            save_rollouts=True,
            max_grad_norm=math.inf,
        )
        | flags
    )
    for name, value in flags.items():
        if name.endswith("reward") and f"def {value}(" in REWARDS:
            flags[name] = f"{world.folder}/rewards.py:{value}"
        elif name.endswith("dataset") and isinstance(value, int):
            flags[name] = world.dataset(value, seed=9 if name == "eval_dataset" else 0)
        elif name.endswith("path"):
            flags[name] = getattr(world, str(value), value)
        if isinstance(flags[name], Path):
            flags[name] = str(flags[name])
    return flags


# The flags that compute something over the whole batch, or leave episodes out.
EVERYTHING = yaml.safe_load("""
rloo: {reward: unsure_parts, missing_eos_penalty: 1.0}
grpo: {reward: unsure, scale_rewards: batch, importance_sampling_level: sequence,
       mask_truncated_completions: true, loss_type: dapo}
ppo: {score_norm: true, score_scaling: true, whiten_rewards: true, adaptive_kl: true,
      kl_horizon: 50, target_kl: 0.001}
""")
for flags in EVERYTHING.values():
    flags |= dict(model_path="many_eos", ref_model_path="reference")


class Run(NamedTuple):
    args: object
    metrics: list[dict]  # the rows of metrics.jsonl
    folder: Path
    rollouts = property(lambda self: read_rollouts(self.folder))
    eval_rollouts = property(lambda self: launcher.read_run(self.folder)["eval_rollouts"])

    def rows_of(self, iteration):
        return [row for row in self.rollouts if row["iteration"] == iteration]


@fixture
def run(world, tmp_path):
    """run(script, **flags) runs `main` in this process, and returns a Run.

    All its metrics are finite."""
    numbers = iter(range(100))

    def run(script, **flags):
        flags = dict(output_dir=tmp_path / f"run{next(numbers)}") | flags
        args = make_args(script, **base_flags(world, flags))
        reset_accelerate()
        with fresh_imports():
            _, history = script.main(args)
        gc.freeze()
        folder = Path(args.output_dir)
        metrics = read_jsonl(folder / "metrics.jsonl")
        for line in metrics:
            assert all(map(math.isfinite, line.values())), line
        assert history == metrics[len(metrics) - len(history) :]
        return Run(args, metrics, folder)

    return run


@fixture
def hold(run):
    """hold(script, loss, **flags): a run, and its gradients beside those of a loss, which is the
    script's own if it is None."""

    def hold(script, loss=None, **flags):
        with stages.record(script) as log:
            ran = run(script, **flags)
        loss = loss or getattr(losses, script.__name__.partition("_")[0])
        return ran, stages.gradients(launcher.read_run(ran.folder), log, loss)

    return hold


@fixture
def elsewhere(run, world, tmp_path):
    """elsewhere(script, processes, start, more, **flags): a run here, and one that `start` makes,
    with passes and rollouts of one episode where flags say nothing else. Both must be the same.
    Returns the run here, and what the other one printed.

    start: `launched` or `launch_twice`; more: for `launch`"""

    def elsewhere(script, processes, start=launched, more={}, **flags):
        ran = run(script, **flags)
        flags = dict(per_device_train_batch_size=1, per_device_rollout_batch_size=1) | flags
        printed = start(script, processes, tmp_path, base_flags(world, flags), **more)
        compare_runs(ran.folder, tmp_path / "out")
        return ran, printed

    return elsewhere


@fixture
def refuses(run, tmp_path):
    """refuses(script, said, **flags): the run must stop with a message that matches `said`, of a
    UsageError or of the given error, before it writes metrics or a model."""

    def refuses(script, said, error=None, **flags):
        out = tmp_path / "out"
        with raises(error or script.UsageError, match=said):
            run(script, **dict(output_dir=out) | flags)
        assert not (out / "metrics.jsonl").exists() and not (out / "model").exists()

    return refuses


@fixture
def updates(monkeypatch):
    """A list with an entry for each optimizer step: the gradients of all parameters, in PPO of both
    models, and the learning rate."""
    record = []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            [group] = self.param_groups
            gradients = [parameter.grad.clone() for parameter in group["params"]]
            if "initial_lr" in group:
                record.append(SimpleNamespace(gradients=gradients, lr=group["lr"]))
            else:  # PPO's value model has an optimizer without a schedule. It is the second one.
                assert group["lr"] == record[-1].lr
                record[-1].gradients += gradients
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Recorder)
    return record


def record_calls(monkeypatch, owner, name):
    """Wrap a function so that its calls are recorded. Returns the list of the records."""
    calls = []
    function = getattr(owner, name)

    def wrapped(*args, **inputs):
        result = function(*args, **inputs)
        training = torch.is_grad_enabled()
        calls.append(SimpleNamespace(args=args, inputs=inputs, result=result, training=training))
        return result

    monkeypatch.setattr(owner, name, wrapped)
    return calls


def option(name):
    """The option of a flag on the command line."""
    return "--" + name.replace("_", "-")


def flat(tensors):
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def distance(tensors, others):
    """The norm of the difference, divided by the norm of the first."""
    first = flat(tensors)
    return ((first - flat(others)).norm() / first.norm()).item()


def load_policy(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


def weights_of(path):
    return [p.detach() for p in load_policy(path).parameters()]


TIMES = {"eps", "time/rollout_s", "time/reward_s", "time/train_s"}


def metrics_of(folder, may_differ=TIMES):
    """The rows of metrics.jsonl without what may differ between two equal runs."""
    rows = read_jsonl(folder / "metrics.jsonl")
    return [{name: row[name] for name in row.keys() - may_differ} for row in rows]


def compare_runs(output_dir, other_dir):
    """Fail unless two runs have the same completions, and the same metrics and weights up to
    rounding."""
    run, other = map(launcher.read_run, (output_dir, other_dir))
    for rows, name in itertools.product(("rollouts", "eval_rollouts"), ("prompt", "token_ids")):
        assert column(other[rows], name) == column(run[rows], name)
    # The difference of trainer and sampler is only rounding.
    may_differ = TIMES | {"val/sampling_logprob_difference"}
    lines = metrics_of(output_dir, may_differ)
    for line, its in zip(lines, metrics_of(other_dir, may_differ), strict=True):
        assert line == pytest.approx(its, rel=1e-4, abs=5e-6)
    start = Path(run["args"]["model_path"])
    assert launcher.relative_distance(other_dir, output_dir, start) < 1e-3


def contents(folder, pattern="*"):
    """The bytes of its files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob(pattern)
        if path.is_file()
    }


def result_of(output_dir):
    """Everything that a run computed: metrics without times, weights and rollouts."""
    weights = contents(output_dir, "*.safetensors")
    return metrics_of(output_dir), weights, contents(output_dir / "rollouts")


def command_line(flags):
    """Flags as a command line."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(option(name if value else f"no_{name}"))
        else:
            words += [option(name), str(value)]
    return words


def forked(folder, words, processes=1, **variables):
    """Run a Python file in `folder`, as a program in forks of a process that has the libraries.
    This saves most of the time of a start. Returns the finished program.

    variables: of its environment"""
    printed = [Path(folder, name) for name in ("stdout", "stderr")]
    for path in printed:
        path.unlink(missing_ok=True)
    ran = launcher.apart(run_program, folder, words, variables, processes=processes, seconds=600)
    stdout, stderr = (path.read_text() for path in printed)
    failed = ran.get("failed", "")
    return SimpleNamespace(returncode=bool(failed), stdout=stdout, stderr=stderr + failed)


def launch(script, processes, folder, flags, program=None, **variables):
    """Run a script as `forked` does. program: a Python file that runs it"""
    words = [script.__file__, *command_line(with_group(script, flags))]
    if program is not None:
        words.insert(0, str(program))
    return forked(folder, words, processes, **variables)


def launched(script, processes, folder, flags, **more):
    """Start a run that must end well, and that writes into `out` in the folder. Returns what it
    printed."""
    finished = launch(script, processes, folder, flags | dict(output_dir=folder / "out"), **more)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def launch_twice(script, processes, folder, flags, **more):
    """Start a run that its reward stops in the third call, and then as `launched` does."""
    (folder / "rewards.py").write_text(REWARDS)
    flags = flags | dict(reward="rewards.py:stops_once", resume=True, output_dir=folder / "out")
    stopped = launch(script, processes, folder, flags, **more)
    assert "KeyError: 'stopped'" in stopped.stderr, stopped.stderr
    return launched(script, processes, folder, flags, **more)
