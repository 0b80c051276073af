"""Bad input. What would be silently wrong is refused before a run writes metrics or a model.

The message names the flag, the model or the line. A clear error of a library is left alone."""

import dataclasses
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import yaml
from conftest import (
    EOS,
    HERE,
    PAD,
    VOCAB,
    base_flags,
    changed_copy,
    command_line,
    fresh_imports,
    import_file,
    launch,
    launched,
    make_args,
    make_prompts,
    make_tokenizer,
    one_text,
    only,
    option,
    reset_accelerate,
    save_classifier,
    save_model,
    with_group,
)
from pytest import mark, raises
from tokenizers.processors import TemplateProcessing

# In each line the flags of a run, with `k` for the flag that has it. The message must name the
# first of them.
BAD_FLAGS = """
batch_size: 13, num_mini_batches: 2
learning_rate: .nan
eval_k: 2
resume: true
log_with: nothing
model_path: your/model
"""
# In bfloat16, the ratio of a completion would be rounding alone. With a horizon of 12, the KL
# coefficient of a batch of 64 episodes would be negative.
OWN_BAD_FLAGS = {
    "rloo": """
k: 1
batch_size: 8, k: 3
dtype: bfloat16, num_ppo_epochs: 2
""",
    "grpo": """
k: 1
batch_size: 8, k: 3
dtype: bfloat16, num_ppo_epochs: 2, importance_sampling_level: sequence
""",
    "ppo": """
kl_horizon: 12, adaptive_kl: true
adaptive_kl: true, kl_coef: 0.0
gamma: 1.1
lam: 1.1
""",
}
MAY_BE_ZERO = set(
    "seed total_episodes eval_temperature stop_token_id kl_coef cliprange cliprange_high"
    " cliprange_value vf_coef gamma lam missing_eos_penalty learning_rate weight_decay warmup_steps"
    " num_sample_generations".split()
)


def test_bad_flags_are_refused_by_name(script, tmp_path):
    """`Args` raises a ValueError. That is before anything is loaded or written."""
    bad = [yaml.safe_load("{" + line + "}") for line in BAD_FLAGS.split("\n")]
    bad += [yaml.safe_load("{" + line + "}") for line in OWN_BAD_FLAGS[script.__name__].split("\n")]
    numbers = set()
    for field in dataclasses.fields(script.Args):
        if field.type in (int, float, int | None, float | None):
            numbers.add(field.name)
    bad += [{name: -1} for name in numbers]
    bad += [{name: 0} for name in numbers - MAY_BE_ZERO]
    for flags in filter(None, bad):
        with raises(ValueError, match=option(next(iter(with_group(script, flags))))):
            make_args(script, **flags)
    for name in numbers & MAY_BE_ZERO:
        make_args(script, **{name: 0})
    (tmp_path / "adapter_config.json").touch()
    with raises(ValueError, match="merge_and_unload"):
        script.Args(model_path=str(tmp_path), dataset="mine.jsonl")
    make_args(script, dtype="bfloat16", num_ppo_epochs=1 if script.__name__ == "rloo" else 2)


FEW = dict(total_episodes=3, batch_size=3)
LONGEST = max(map(len, make_prompts(7)))  # of the prompts of a run. Completions have 6 tokens.
FIT = LONGEST + 5  # The last token is no input.
LONG = dict(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=FIT - 1,
    short_factor=[1.0] * 4,
    long_factor=[4.0] * 4,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=FIT // 4 + 1)
MODELS = {  # the arguments of `save_model`, and what is changed in the saved config
    "bart": (dict(architecture="bart"), {}),  # Padding changes what it gives.
    "counted less": (dict(num_hidden_layers=3), dict(num_hidden_layers=1)),
    "counted more": ({}, dict(num_hidden_layers=3)),
    "short": (dict(max_position_embeddings=FIT - 1), {}),
    "fits": (dict(max_position_embeddings=FIT), {}),
    "yarn": (dict(max_position_embeddings=FIT // 4 + 1, rope_scaling=YARN), {}),
    "longrope": (dict(rope_scaling=LONG), {}),
    "tuple": ({}, dict(return_dict=False)),
    "few tokens": (dict(vocab_size=len(VOCAB) - 1), {}),
}


def made(folder, flags):
    """Flags, in which names of MODELS are folders, and the lines of a dataset are a file."""
    for flag, value in flags.items():
        if isinstance(value, list):
            flags[flag] = folder / "data.jsonl"
            flags[flag].write_text("\n".join(value))
        elif value in MODELS:
            settings, changed = MODELS[value]
            save = save_classifier if flag == "reward_model_path" else save_model
            save(folder / value, **settings)
            file = folder / value / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changed))
            flags[flag] = folder / value
    return flags


GOOD = '{"prompt": "1+1=", "answer": "2"}'
REFUSED = [  # what the message says, of which flags
    ("data.jsonl:2: JSONDecodeError", dict(dataset=[GOOD, '{"prompt": '])),
    ("data.jsonl:2: JSONDecodeError", dict(dataset=[GOOD, "", GOOD])),
    ("data.jsonl:1: KeyError.*'prompt'", dict(eval_dataset=['{"question": "1+1="}'])),
    ("data.jsonl:1: .*is empty", dict(dataset=['{"prompt": ""}'])),
    ("needs an `answer`", dict(dataset=['{"prompt": "1"}'], reward="exact_match")),
    ("no embedding of a token", dict(model_path="few tokens", dataset=['{"prompt": "f"}'])),
    ("--stop-token-id", dict(stop_token_id=len(VOCAB))),
    ("has no rows", dict(dataset=[""])),
    ("--max-prompt-length", dict(max_prompt_length=1)),
    ("none.jsonl:0: FileNotFoundError.*NAME:SPLIT", dict(dataset="none.jsonl")),
    ("no such file", dict(reward="none.py:score")),
    ("64 positions, .* 65", dict(response_length=65 - LONGEST + 1)),
    ("64 positions, .* 65", dict(eval_dataset=['{"prompt": "%s"}' % ("1" * 60)])),
    ("has .* positions", dict(ref_model_path="short")),
    ("has .* positions", dict(value_model_path="short")),
    # It reads the last token, too.
    ("has .* positions", dict(reward_model_path="fits", batch_size=21)),
    # A longer row would change its neighbours.
    ("has .* positions", dict(model_path="longrope")),
    ("rows with padding", dict(ref_model_path="bart", dtype="bfloat16")),
    # A missing weight would be random. One that the config does not count would be left out.
    (r"layers\.2\.", dict(model_path="counted less")),
    (r"layers\.2\.", dict(model_path="counted more")),
    (r"layers\.2\.", dict(ref_model_path="counted more")),
    (r"layers\.2\.", dict(value_model_path="counted more")),
    (r"score\.weight", dict(reward_model_path="reference")),
    ("vocabulary of --model-path", dict(ref_model_path="few tokens")),
]


@one_text
@mark.parametrize("said, flags", REFUSED)
def test_what_would_be_silently_wrong_is_refused(script, refuses, tmp_path, said, flags):
    if "value_model_path" in flags:
        [script] = only("ppo").args[1]
    refuses(script, said, **made(tmp_path, dict(flags)))


@only("rloo", "ppo")
@mark.parametrize("name", ["fits", "yarn", "tuple"])
def test_what_is_right_is_not_refused(script, run, tmp_path, name):
    """A model whose positions are just enough, also those of YaRN, or whose config asks for tuples,
    in each role."""
    flags = dict(model_path=name, ref_model_path=name)
    if name == "tuple":
        classifier = made(tmp_path, dict(reward_model_path=name))["reward_model_path"]
        flags["reward_model_path"] = classifier.rename(tmp_path / "classifier")
    run(script, **made(tmp_path, flags), **FEW)


@mark.parametrize("term", ["logprobs", "logprobs.sum(1, keepdim=True)"])
@only("rloo", "grpo")
def test_a_second_loss_is_summed_over_tokens(script, run, tmp_path, term):
    """A term for each token would count the first loss once for each of them, in silence."""
    shape = f"{' ' * 24}assert losses.shape =="
    second = f"{' ' * 24}losses = losses + 0 * {term}\n{shape}"
    copy = import_file(changed_copy(script, tmp_path, shape, second).__file__)
    copy.__file__ = script.__file__
    if "sum" in term:
        run(copy, **FEW)
    else:
        with raises(AssertionError, match="one for each"):
            run(copy, **FEW)


@one_text
def test_names_of_hub_datasets(script, run, monkeypatch):
    """NAME:SPLIT, or NAME:CONFIG:SPLIT. Colons in brackets belong to the split."""

    def load_dataset(*names, split):
        raise LookupError(*names, split)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for name, words in {
        "sums:train[2:5]": ("sums", "train[2:5]"),
        "sums:main:test": ("sums", "main", "test"),
    }.items():
        with raises(script.UsageError, match=re.escape(f"{name}:0: ")) as raised:
            run(script, dataset=name)
        assert raised.value.__cause__.args == words


@one_text
def test_long_prompts_are_dropped_and_counted_aloud(script, run, capsys):
    """Prompts over --max-prompt-length are dropped, and their number is printed. The counts are of
    the prompts that stay."""
    kept = [prompt for prompt in make_prompts(7) if len(prompt) <= 8]
    ran = run(script, max_prompt_length=8, num_train_epochs=2)
    assert f"{7 - len(kept)} of 7 prompts" in capsys.readouterr().err
    prompts = [row["prompt"] for row in ran.rollouts[:: ran.args.k]]
    assert sorted(prompts) == sorted(kept * 2)
    assert ran.metrics[-1]["epoch"] == 2


@one_text
def test_a_run_shows_what_it_reads(script, run, capsys):
    """It prints the first prompt, and the tokens that end a completion. Where neither tokenizer nor
    model has one, every completion runs to its limit."""
    for path, ends in {"llama": {EOS: "<eos>"}, "endless": {}}.items():
        ended = [row["ended"] for row in run(script, model_path=path).rollouts]
        printed = capsys.readouterr().out
        assert any(ended) == bool(ends)
        assert f"tokens that end a completion: {ends}; --stop-string: None" in printed
        assert f"the first prompt: {make_prompts(1)[0]!r}" in printed


REWARDS = """
import sys

def few(prompts, **_):
    return [0.0]

def interrupted(**_):
    raise KeyboardInterrupt

def raises(**_):
    raise ValueError("mine")

def exits(**_):
    sys.exit()

def named(prompts, **_):
    return {"\u00e9": [0.0] * len(prompts)}
"""


@one_text
def test_how_a_program_ends(script, world, tmp_path, monkeypatch, capsys):
    """A mistake and Ctrl-C end with one line, and bad flags with status 2. An error of a reward is
    Python's own. --plan prints nothing but the plan on stdout."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARDS)
    copy = shutil.copy(script.__file__, "copy.py")

    def end_of(*words, reward="few", file=script.__file__):
        """What ends a program: an error, or None. The copy gets no flags of ours."""
        reset_accelerate()
        flags = base_flags(world, FEW | dict(reward=f"mine.py:{reward}"))
        flags = [] if file == copy else command_line(with_group(script, flags))
        monkeypatch.setattr(sys, "argv", [file, *flags, *words])
        with fresh_imports():
            try:
                runpy.run_path(file, run_name="__main__")
            except BaseException as error:
                return error

    assert end_of().code.startswith("\nerror: iteration 1: --reward gave 1 scores for 3")
    goes_on = f"stopped; --resume --output-dir {tmp_path}/runs/rloo__1__"
    assert goes_on in end_of(reward="interrupted").code
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.Accelerator", Mock(side_effect=KeyboardInterrupt))
        assert "stopped" in end_of().code
    assert repr(end_of(reward="raises")) == "ValueError('mine')"
    assert "sys.exit" in repr(end_of(reward="exits"))
    assert end_of("--seed", "-1").code == end_of(file=copy).code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "--seed -1 must" in printed and "is missing, so --model-path and" in printed
    assert end_of("--plan", "2", "--max-prompt-length", "8") is None
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["steps"] > 0 and "dropped" in printed.err


@one_text
@mark.slow
def test_a_terminal_that_knows_only_ascii_stops_no_run(script, world, tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    flags = base_flags(world, FEW | dict(reward="mine.py:named"))
    printed = launched(script, 1, tmp_path, flags, start=launch, PYTHONIOENCODING="ascii")
    assert "reward/\\xe9" in printed


@one_text
def test_rows_of_text_and_of_chats_keep_their_order(script, tmp_path):
    """A text gets one BOS, and no EOS that it has not got. A chat gets what its template writes. A
    line may hold what other programs take for its end. A missing column is None."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ mark or '=' }}"
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", PAD), ("<eos>", EOS)]
    )
    tokenizer.bos_token = "<pad>"
    chat = [{"role": "user", "content": "1+1="}]
    rows = [
        dict(prompt="22", note="2\u20283\x85"),
        dict(prompt=chat),
        dict(prompt=chat, chat_template_kwargs=dict(mark="+")),
        dict(prompt="<pad>5"),
        dict(prompt="5<eos>"),
    ]
    path = tmp_path / "mixed.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    # A run has no tokenizer that writes both BOS and EOS, so this calls a function of the script.
    found = script.load_prompts(script.check_flags(script.Args()), str(path), "none", tokenizer)
    assert [prompt.text for prompt in found] == ["22", "1+1==", "1+1=+", "<pad>5", "5<eos>"]
    assert [row.row["note"] for row in found] == [rows[0]["note"], *[None] * 4]
    counts = [(row.token_ids.count(PAD), row.token_ids.count(EOS) > 0) for row in found]
    assert counts == [(1, False), (0, False), (0, False), (1, False), (1, True)]


def test_defaults_that_the_model_decides(script, tmp_path):
    """The learning rate and the length of a completion. What is given is taken."""
    link = tmp_path / "link"
    link.symlink_to(HERE / "benchmark" / "default" / "policy")
    own, other = (5e-5, 3e-6) if script.__name__ == "ppo" else (1e-4, 1e-6)
    mine = dict(model_path="me/mine", dataset="mine:train")
    for flags, learning_rate, response_length in (
        (dict(model_path=str(link), lora_r=2), own, 8),
        (mine, other, 256),
        (mine | dict(lora_r=2), 1e-5, 256),
        (dict(learning_rate=0.0, response_length=9), 0.0, 9),
    ):
        args = script.check_flags(script.Args(**flags))
        assert (args.learning_rate, args.response_length) == (learning_rate, response_length)
