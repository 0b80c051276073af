"""Bad input. What would be silently wrong is refused before a run writes metrics or a model.

The message names the flag, the model or the line. A clear error of a library is left alone."""

import dataclasses
import io
import json
import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import yaml
from conftest import (
    EOS,
    HERE,
    MODULES,
    PAD,
    VOCAB,
    base_flags,
    command_line,
    fresh_imports,
    make_args,
    make_prompts,
    make_tokenizer,
    one_text,
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
BAD_FLAGS = yaml.safe_load("""
every script:
- {batch_size: 13, num_mini_batches: 2}
- {learning_rate: .nan}
- {eval_k: 2}
- {eval_k: 2, dataset: mine}
- {eval_temperature: 1.0, dataset: mine}
- {eval_every: 2, dataset: mine}
- {eval_reward: none, dataset: mine}
- {stop_string: ''}
- {resume: true}
- {model_path: your/model}
- {lr_scheduler_type: constant, warmup_steps: 2}
- {share_prompts: true, gradient_checkpointing: true}
rloo:
- {k: 1}
- {batch_size: 8, k: 3}
- {dtype: bfloat16, num_ppo_epochs: 2}  # The ratio of a completion would be rounding alone.
grpo:
- {k: 1}
- {batch_size: 8, k: 3}
- {dtype: bfloat16, num_ppo_epochs: 2, importance_sampling_level: sequence}
ppo:
- {kl_horizon: 12, adaptive_kl: true}  # With 64 episodes the KL coefficient would be negative.
- {adaptive_kl: true, kl_coef: 0.0}
- {gamma: 1.1}
- {lam: 1.1}
may be zero: >
  seed total_episodes eval_temperature stop_token_id kl_coef cliprange cliprange_high
  cliprange_value vf_coef gamma lam missing_eos_penalty learning_rate weight_decay warmup_steps
  num_sample_generations
""")


def test_bad_flags_are_refused_by_name(script):
    """`Args` raises a ValueError. That is before anything is loaded or written. No number may be
    negative, or infinite where no comment says what that means."""
    bad = BAD_FLAGS["every script"] + BAD_FLAGS[script.__name__]
    for field in dataclasses.fields(script.Args):
        if field.type in (int, float, int | None, float | None):
            bad.append({field.name: -1})
            if field.name != "max_grad_norm":  # inf: no clipping
                bad.append({field.name: math.inf})
            if field.name in BAD_FLAGS["may be zero"].split():
                make_args(script, **{field.name: 0})
            else:
                bad.append({field.name: 0})
    for flags in bad:
        with raises(ValueError, match=option(next(iter(with_group(script, flags))))):
            make_args(script, **flags)


FIT = max(map(len, make_prompts(7))) + 6  # tokens of a run's longest row
RIGHT = dict(max_position_embeddings=FIT, return_dict=False)
SHORT = dict(max_position_embeddings=FIT - 1)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
LONG = dict(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=FIT - 2,
    short_factor=[1.0] * 4,
    long_factor=[4.0] * 4,
)
FEW_TOKENS = dict(vocab_size=len(VOCAB) - 1)
OTHER_TOKENS = dict(tokenizer=make_tokenizer(vocab=VOCAB[::-1]))
MORE_TOKENS = dict(vocab_size=len(VOCAB) + 1, tokenizer=make_tokenizer(vocab=[*VOCAB, "[PAD]"]))
# Its chat template leaves out a system message, and roles that it does not know.
USERS = make_tokenizer()
USERS.chat_template = (
    "{% for m in messages %}{{ m.content if m.role in ('user', 'assistant') }}{% endfor %}"
)
USERS = dict(model_path=dict(tokenizer=USERS))


def row(**columns):
    return json.dumps({"prompt": "1"} | columns) + "\n"


def chat(*messages, **settings):
    """A dataset whose second row is a chat. messages: each a role and a content"""
    messages = [dict(role=role, content=content) for role, content in messages]
    return row() + row(prompt=messages, chat_template_kwargs=settings)


PREFILL = dict(continue_final_message=True, add_generation_prompt=False)
# What the message says, and of which flags. A dict is a model. Lines are a dataset.
CASES = [
    ("data.jsonl:2: KeyError.*'prompt'", dict(dataset='{"prompt": "1"}\n{"text": "2"}\n')),
    ("data.jsonl:1: .*is empty", dict(dataset='{"prompt": ""}\n')),
    *[
        ("needs an `answer`", dict(dataset=row(answer=answer), reward="exact_match"))
        for answer in (None, 2.0, ["2"], {}, True, " ")
    ],
    *[
        ("no column may be named", dict(dataset=row(**{name: 1})))
        for name in ("prompts", "completions", "completion_ids")
    ],
    # A text that the template does not show. A template may show "None".
    ("data.jsonl:2: .*'NoneType'.* with `role` and `content`", dict(dataset=chat(("user", None)))),
    ("'list'.* and `content`", dict(dataset=chat(("user", [{"type": "text", "text": "1"}])))),
    *[
        (f"does not show the {role}'s '2'", dict(dataset=chat((role, "2"), ("user", "1")), **USERS))
        for role in ("human", "system", "developer")
    ],
    ("KeyError.*'role'", dict(dataset='{"prompt": [{"from": "human", "value": "1"}]}\n')),
    ("last message is the assistant's", dict(dataset=chat(("user", "1"), ("assistant", "2")))),
    ("no embedding of a token", dict(dataset='{"prompt": "f"}\n', model_path=FEW_TOKENS)),
    ("--stop-token-id", dict(stop_token_id=len(VOCAB))),
    ("--max-prompt-length", dict(max_prompt_length=1)),
    # Colons in brackets belong to the split.
    (r"LookupError\('sums', 'train\[2:5\]'", dict(dataset="sums:train[2:5]")),
    (r"LookupError\('sums', 'main', 'test'.*NAME:SPLIT", dict(dataset="sums:main:test")),
    ("64 positions, .* 66", dict(eval_dataset='{"prompt": "%s"}\n' % ("1" * 60))),
    *[
        ("has .* positions", {flag: SHORT})
        for flag in ("ref_model_path", "value_model_path", "reward_model_path")
    ],
    ("has .* positions.* For YaRN", dict(model_path=SHORT | dict(rope_scaling=YARN))),
    # A longer row would change its neighbours.
    ("sampling and training give", dict(model_path=dict(rope_scaling=LONG))),
    ("--share-prompts False", dict(model_path=dict(architecture="jamba"), share_prompts=True)),
    ("rows with padding", dict(ref_model_path=dict(architecture="roberta"), dtype="bfloat16")),
    # A missing weight would be random. One that the config does not count would be left out.
    (r"layers\.1\.", dict(model_path=dict(counted=1))),
    (r"layers\.2\.", dict(model_path=dict(counted=3))),
    (r"score\.weight", dict(reward_model_path="reference")),
    *[
        (f"{flag}.* {said}", {flag: model})
        for flag in ("reward_model_path", "value_model_path", "ref_model_path")
        for model, said in (
            (FEW_TOKENS, "has 21 rows"),
            (
                OTHER_TOKENS,
                r"tokens of --model-path otherwise: \[\(' ', 15\), .*benchmark/reward_model",
            ),
        )
    ],
    ("needs the tokenizer of --model-path", dict(ref_model_path=dict(tokenizer=Mock()))),
    ("--log-with aim is not installed", dict(log_with="aim")),
    ("merge_and_unload", dict(model_path=".")),
    # These are right.
    (None, dict(model_path=RIGHT, ref_model_path=RIGHT)),
    (None, dict(model_path=RIGHT | dict(rope_scaling=YARN))),
    (None, dict(reward_model_path=dict(return_dict=False))),
    (None, dict(value_model_path=RIGHT)),
    (None, dict(reward_model_path=MORE_TOKENS)),
    (None, dict(ref_model_path=MORE_TOKENS)),
    (None, dict(dataset=chat(("user", "1"), ("assistant", "2"), **PREFILL))),
    (None, dict(seed=2**32 + 1)),
    # A mixture of experts whose first output is its balancing loss.
    (None, dict(model_path=dict(architecture="mixtral"))),
    (None, dict(value_model_path=dict(architecture="mixtral"))),
]
FEW = dict(total_episodes=3, batch_size=3)


def save(folder, counted=2, **config):
    """Save a model. Its config counts other layers than its two, if so asked."""
    if folder.name == "reward_model_path":
        save_classifier(folder, **config)
    else:
        save_model(folder, **config)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(num_hidden_layers=counted)))
    return folder


@mark.parametrize("said, flags", CASES)
def test_what_would_be_silently_wrong_is_refused(run, refuses, monkeypatch, tmp_path, said, flags):
    def load_dataset(*names, split):
        raise LookupError(*names, split)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.chdir(tmp_path)
    Path("adapter_config.json").touch()
    flags = dict(flags)
    for flag, value in flags.items():
        if isinstance(value, dict):
            flags[flag] = save(tmp_path / flag, **value)
        elif "\n" in str(value):
            flags[flag] = "data.jsonl"
            Path("data.jsonl").write_text(value)
    script = MODULES["ppo" if "value_model_path" in flags else "rloo"]
    if said is None:
        run(script, **flags, **FEW)
    else:
        refuses(script, said, error=(ValueError, RuntimeError), **flags)


REWARDS = """
def few(prompts, **_):
    return [0.0]

def interrupted(**_):
    raise KeyboardInterrupt

def named(prompts, **_):
    return {"\u00e9": [0.0] * len(prompts)}
"""


@one_text
def test_how_a_program_ends(script, world, tmp_path, monkeypatch):
    """A mistake and Ctrl-C end it with one line, and bad flags with status 2. A terminal that knows
    only ASCII does not end it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    Path("mine.py").write_text(REWARDS)
    stopped = f"\nstopped; --resume --output-dir {tmp_path}/out starts anew: there is no checkpoint"
    for words, end in {
        "--reward mine.py:few": "\nerror: iteration 1: --reward gave 1 scores for 3 completions",
        "--reward mine.py:interrupted": stopped,
        "--seed -1": 2,
        "--reward mine.py:named --resume": None,
    }.items():
        reset_accelerate()
        flags = command_line(with_group(script, base_flags(world, FEW | dict(output_dir="out"))))
        monkeypatch.setattr(sys, "argv", [script.__file__, *flags, *words.split()])
        code = None
        with fresh_imports():
            try:
                runpy.run_path(script.__file__, run_name="__main__")
            except SystemExit as error:
                code = error.code
        assert code == end
    assert Path("out/model").exists()


@one_text
def test_prompts_are_what_the_model_reads(script, tmp_path):
    """A text gets one BOS, and no EOS that it has not got. A chat gets what its template writes. A
    line may hold what other programs take for its end. A missing column is None."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ mark or '=' }}"
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", PAD), ("<eos>", EOS)]
    )
    tokenizer.bos_token = "<pad>"
    path = tmp_path / "mixed.jsonl"
    path.write_text(
        """{"prompt": "22", "note": "2\u20283\x85"}
{"prompt": [{"role": "user", "content": "1+1="}]}
{"prompt": [{"role": "user", "content": "1+1="}], "chat_template_kwargs": {"mark": "+"}}
{"prompt": "<pad>5"}""",
        encoding="utf-8",
    )
    # A run has no tokenizer that writes both BOS and EOS, so this calls a function of the script.
    found = script.load_prompts(script.check_flags(script.Args()), str(path), "none", tokenizer)
    read = [tokenizer.decode(prompt.token_ids) for prompt in found]
    assert [prompt.text for prompt in found] == ["22", "1+1==", "1+1=+", "<pad>5"]
    assert read == ["<pad>22", "1+1==", "1+1=+", "<pad>5"]
    assert [prompt.row["note"] for prompt in found] == ["2\u20283\x85", None, None, None]


USER = dict(role="user", content="1")
# Messages before USER, what the template makes of all, and what is said.
CHATS = [
    ("user", "1 /no_think 2", "1 2", None),
    ("user", "3/no_think", "3", "the user's '3/no_think'"),
    ("system", "/think", "", None),
    ("system", "2", "", "the system's '2'"),
    # What a template makes of answers, and of what tools gave, is its matter.
    ("assistant", "<think>3</think> 2", "", None),
    ("assistant", None, "", None),
    ("tool", {"a": 2}, "", None),
    ("tool", '{"a": 2}', '{\\"a\\": 2}', None),
]


@one_text
@mark.parametrize("role, content, shown, said", CHATS)
def test_questions_are_shown(script, role, content, shown, said):
    """All texts that are neither an answer nor a tool's, but for switches."""
    messages = [dict(role=role, content=content), USER]
    if said is None:
        script.check_chat(messages, f"{shown} 1", {})
    else:
        with raises(ValueError, match=re.escape(said)):
            script.check_chat(messages, f"{shown} 1", {})


@one_text
def test_tools_of_a_row_reach_the_template(script):
    """As in TRL. Those of chat_template_kwargs count more. An empty list is none."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if tools is not none %}{{ tools[0].type }}"
    )
    tokenizer.chat_template += "{% endif %}"
    tools = [dict(type="a")]
    for row, text in (
        (dict(tools=tools), "1a"),
        (dict(tools=[]), "1"),
        (dict(tools=tools, chat_template_kwargs=dict(tools=[dict(type="b")])), "1b"),
    ):
        assert script.tokenize(tokenizer, dict(prompt=[USER]) | row)[0] == text


@one_text
def test_paths_may_begin_with_a_tilde(script, monkeypatch):
    """A shell leaves the one of --output-dir=~/x."""
    monkeypatch.setenv("HOME", "/home/me")
    names = "output_dir model_path ref_model_path reward_model_path dataset eval_dataset".split()
    names += ["reward", "eval_reward"]
    flags = dict.fromkeys(names, "~/x.py:f")
    found = vars(script.check_flags(script.Args(**flags, stop_string="~/")))
    assert found["stop_string"] == "~/"
    assert {found[name] for name in names} == {"/home/me/x.py:f"}


def test_defaults_that_the_model_decides(script):
    """The learning rate and the length of a completion. What is given is taken."""
    own, other = (5e-5, 3e-6) if script.__name__ == "ppo" else (1e-4, 1e-6)
    mine = dict(model_path="me/mine", dataset="mine:train")
    for flags, learning_rate, response_length in (
        (dict(model_path=f"{HERE}/docs/../benchmark/default/policy", lora_r=2), own, 8),
        (mine, other, 256),
        (mine | dict(lora_r=2), 1e-5, 256),
        (dict(learning_rate=0.0, response_length=9), 0.0, 9),
    ):
        args = script.check_flags(script.Args(**flags))
        assert (args.learning_rate, args.response_length) == (learning_rate, response_length)
