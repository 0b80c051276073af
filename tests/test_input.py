"""Bad input. A run refuses it before it writes anything. The message names the flag or the line."""

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import tyro
import yaml
from conftest import (
    EOS,
    HERE,
    PAD,
    VOCAB,
    base_flags,
    fork_programs,
    import_file,
    launch,
    load_policy,
    make_args,
    make_prompts,
    make_rows,
    make_tokenizer,
    one_text,
    only,
    option,
    save_classifier,
    save_model,
    with_group,
    write_jsonl,
)
from plain import record_steps
from pytest import mark, raises
from tokenizers.processors import TemplateProcessing

# In each line the flags of a run, with `k` for the flag that has it. The message must name the
# first of them.
BAD_FLAGS = """
batch_size: -12
batch_size: 0
num_mini_batches: 0
num_train_epochs: 0.0
response_length: 0
max_grad_norm: 0.0
batch_size: 13, num_mini_batches: 2
num_mini_batches: -1
num_ppo_epochs: -1
per_device_train_batch_size: -1
per_device_rollout_batch_size: -1
response_length: -1
total_episodes: -1
max_prompt_length: -1
eval_every: -1
eval_k: 2
eval_temperature: -1.0
save_every: -1
lora_r: -1
lora_alpha: -1
plan: -1
num_train_epochs: -1.0
warmup_steps: -1
stop_token_id: -1
num_sample_generations: -1
seed: -1
temperature: 0.0
learning_rate: -0.001
kl_coef: -0.1
cliprange: -0.1
missing_eos_penalty: -1.0
weight_decay: -1.0
max_grad_norm: -1.0
resume: true
model_path: your/model
"""
# In bfloat16, the ratio of a completion would be rounding alone. With a horizon of 12, the KL
# coefficient of a batch of 64 episodes would be negative.
OWN_BAD_FLAGS = {
    "rloo": """
k: 1
k: -3
batch_size: 8, k: 3, num_mini_batches: 2
dtype: bfloat16, num_ppo_epochs: 2
""",
    "grpo": """
k: 1
cliprange_high: -0.1
batch_size: 8, k: 3, num_mini_batches: 2
dtype: bfloat16, num_ppo_epochs: 2, importance_sampling_level: sequence
""",
    "ppo": """
kl_horizon: 12, adaptive_kl: true
adaptive_kl: true, kl_coef: 0.0
ratio_threshold: -1.0
gamma: 1.1
lam: 1.1
lam: -0.1
cliprange_value: -0.1
vf_coef: -1.0
""",
}


def test_bad_flags_are_refused_by_name(script, tmp_path):
    """`Args` raises a ValueError. That is before anything is loaded or written."""
    lines = BAD_FLAGS + OWN_BAD_FLAGS[script.__name__]
    for line in filter(None, lines.splitlines()):
        flags = with_group(script, yaml.safe_load("{" + line + "}"))
        with raises(ValueError, match=option(next(iter(flags)))):
            script.Args(**flags)
    (tmp_path / "adapter_config.json").touch()
    with raises(ValueError, match="merge_and_unload"):
        script.Args(model_path=str(tmp_path), dataset="mine.jsonl")
    num_ppo_epochs = 1 if script.__name__ == "rloo" else 2  # of a ratio for each token
    make_args(script, dtype="bfloat16", num_ppo_epochs=num_ppo_epochs)
    args = make_args(script, seed=np.int64(3), kl_coef=np.float32(0.5))
    assert json.dumps(vars(script.check_flags(args)))  # numpy's numbers are plain ones
    make_args(script, seed=2**32 - 1, max_grad_norm=math.inf, cliprange=0.0, eval_temperature=0.0)


@one_text
def test_the_command_line_shows_them_with_status_2(script, capsys):
    """The message is in tyro's box, as for the flags that tyro itself refuses."""
    for line in ("--dtype float16", "--seed -1"):
        with raises(SystemExit) as stopped:
            tyro.cli(script.Args, args=line.split())
        assert stopped.value.code == 2
        assert line.split()[0] in capsys.readouterr().err


@only("rloo", "grpo")
def test_some_flags_have_a_second_name(script):
    """It is that of the other script, or TRL's."""
    words = "--max-completion-length 8 --beta 0.5 --epsilon 0.1"
    args = tyro.cli(script.Args, args=words.split())
    assert (args.response_length, args.kl_coef, args.cliprange) == (8, 0.5, 0.1)
    for flag in ("--rloo-k", "--num-generations"):
        assert tyro.cli(script.Args, args=[flag, "8"]).k == 8


@one_text
def test_what_ends_a_program(script, tmp_path):
    """A copy that misses its default task, and Ctrl-C have a line of their own, without a
    traceback."""
    copy = shutil.copy(script.__file__, tmp_path)
    stop = tmp_path / "stop.py"
    stop.write_text("def stop(**_):\n    raise KeyboardInterrupt\n")  # as Ctrl-C does
    interrupted = [script.__file__, "--reward", f"{stop}:stop"]
    for words, said in (
        ([copy], "benchmark/default is missing"),
        (interrupted, f"--resume --output-dir {tmp_path}/runs/rloo__1__"),
    ):
        ended = fork_programs(words, tmp_path, [{}])
        assert ended.returncode and said in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr


@mark.parametrize("term", ["logprobs", "logprobs.sum(1, keepdim=True)"])
@only("rloo", "grpo")
def test_a_second_loss_is_summed_over_tokens(script, run, tmp_path, term):
    """A term for each token would count the first loss once for each of them, in silence."""
    shape = f"{' ' * 24}assert losses.shape =="
    text = Path(script.__file__).read_text()
    assert text.count(shape) == 1
    copy = tmp_path / f"second_{script.__name__}.py"
    copy.write_text(text.replace(shape, f"{' ' * 24}losses = losses + 0 * {term}\n{shape}"))
    copy = import_file(copy)
    copy.__file__ = script.__file__
    if "sum" in term:
        run(copy, **FEW)
    else:
        with raises(AssertionError, match="one for each"):
            run(copy, **FEW)


GOOD = '{"prompt": "1+1=", "answer": "2"}\n'
BAD_ROWS = [
    '{"prompt": ',
    "",
    '["1+1="]',
    '{"question": "1+1="}',
    '{"prompt": "1+1="}',  # There is no answer.
    '{"prompt": [{"content": "1+1="}], "answer": "2"}',
    '{"prompt": [[{"role": "user"}]], "answer": "2"}',
    '{"prompt": [{"role": "assistant", "content": "1"}], "answer": "2"}',
    # The template writes nothing, so there is no token to continue.
    '{"prompt": [{"role": "system", "content": "1"}], "answer": "2"}',
    '{"prompt": [{"role": "user"}], "answer": "2", "chat_template_kwargs": "deep"}',
    # The template writes another text than the question.
    '{"prompt": [{"role": "user", "text": "1+1="}], "answer": "2"}',
    '{"prompt": [{"role": "user", "content": null}], "answer": "2"}',
    '{"prompt": [{"role": "user", "content": [{"text": "1"}]}], "answer": "2"}',
    '{"prompt": [{"role": "user", "content": "1"}, {"role": "human", "content": "3"}],'
    ' "answer": "2"}',
    # exact_match compares texts and integers.
    '{"prompt": "1", "answer": 2.5}',
    '{"prompt": "1", "answer": true}',
    '{"prompt": "1", "answer": null}',
    '{"prompt": "1", "answer": ["2"]}',
    '{"prompt": 3, "answer": "2"}',
    '{"prompt": null, "answer": "2"}',
    '{"prompt": [], "answer": "2"}',
    '{"prompt": "", "answer": "2"}',
    '{"prompt": "\\ud83d", "answer": "2"}',  # half of a letter
    '{"prompt": "1", "answer": %s}' % ("9" * 5000),
    '{"prompt": %s' % ("[" * 10**5),
    '{"prompt": "1", "answer": "\udcff"}',  # no UTF-8
]


@one_text
def test_bad_data_is_refused_by_file_and_line(script, refuses, world, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages if m['role'] == 'user' %}{{ m.content }}=1{% endfor %}"
    )
    policy = shutil.copytree(world.llama, tmp_path / "policy")
    tokenizer.save_pretrained(policy)
    file = tmp_path / "data.jsonl"
    for row in BAD_ROWS:
        file.write_text(GOOD + row + "\n" + GOOD, errors="surrogateescape")
        refuses(script, "data.jsonl:2", dataset=file, model_path=policy, reward="exact_match")
    refuses(script, "data.jsonl:2", eval_dataset=file)
    file.write_text("")
    refuses(script, "data.jsonl: has no rows", dataset=file)
    # The policy has no embedding for the last token.
    policy = save_model(tmp_path / "few", vocab_size=len(VOCAB) - 1)
    last = make_rows([VOCAB[-1]])
    refuses(script, "l:1 .* no embedding", model_path=policy, dataset=write_jsonl(file, last))
    refuses(script, "--stop-token-id", stop_token_id=len(VOCAB))
    for name in (tmp_path / "no_such.jsonl", tmp_path, "~/x.jsonl", "rows.csv", "someone/sums"):
        for flag in ("dataset", "eval_dataset"):
            forms = "a .jsonl file, or a Hub dataset NAME:SPLIT"
            refuses(script, f"{option(flag)} .*{name}: {forms}", **{flag: name})


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
        with raises(script.UsageError, match=re.escape(f"{name}: ")) as raised:
            run(script, dataset=name)
        assert raised.value.__cause__.args == words


@one_text
def test_long_prompts_are_dropped_and_counted_aloud(script, run, refuses, capsys):
    """Prompts over --max-prompt-length are dropped, and their number is printed. The counts are of
    the prompts that stay."""
    kept = [prompt for prompt in make_prompts(7) if len(prompt) <= 8]
    ran = run(script, max_prompt_length=8, num_train_epochs=2)
    assert f"{7 - len(kept)} of 7 prompts" in capsys.readouterr().out
    prompts = [row["prompt"] for row in ran.rollouts[:: ran.args.k]]
    assert sorted(prompts) == sorted(kept * 2)
    assert ran.metrics[-1]["epoch"] == 2
    refuses(script, "--max-prompt-length", max_prompt_length=1)


FEW = dict(total_episodes=3, batch_size=3)
LONGEST = max(map(len, make_prompts(7)))  # of the prompts of a run


@only("rloo", "ppo")
def test_what_exceeds_the_models_positions_is_refused(script, run, refuses, world, tmp_path):
    """The longest prompt and its response, without the last token, must fit into each model that
    computes them. Evaluation prompts count, too. A run that just fits is not refused.

    A reward model reads the last token, too. With RoPE it would read on beyond its positions, and
    nobody would notice."""
    room = 65 - LONGEST
    refuses(script, f"{world.llama} .* 64 positions, .* 65", response_length=room + 1)
    run(script, response_length=room, **FEW)
    longer = write_jsonl(tmp_path / "longer.jsonl", make_rows(["1" * (66 - room)]))
    refuses(script, "64 positions, .* 65", response_length=room, eval_dataset=longer)
    short = save_model(tmp_path / "short", max_position_embeddings=63)
    flags = ["ref_model_path"]
    if script.__name__ == "ppo":
        flags.append("value_model_path")
    for flag in flags:
        refuses(script, f"{short} .* 63 positions", response_length=room, **{flag: short})
    path, _ = save_classifier(tmp_path / "reader", max_position_embeddings=8)
    with raises(script.UsageError, match=f"{path} has 8 positions"):
        run(script, reward_model_path=path)


@one_text
def test_a_run_without_eos(script, run, capsys):
    """Neither the tokenizer nor the model has an EOS. Then every completion runs to its limit.
    A run prints what ends one."""
    for path in ("llama", "endless"):
        ended = [row["ended"] for row in run(script, model_path=path).rollouts]
        assert any(ended) == (path == "llama")
        ends = {EOS: "<eos>"} if any(ended) else {}
        assert (
            f"tokens that end a completion: {ends}; --stop-string: None" in capsys.readouterr().out
        )


@one_text
@mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_must_give_the_same_in_padded_rows(script, refuses, tmp_path, dtype):
    """Another model is refused, in each role and type."""
    scaled = save_model(tmp_path / "scaled", logit_scale=3.0)  # which Llama does not use
    refuses(script, f"{scaled} is not run by separate_rows", model_path=scaled, dtype=dtype)
    bart = save_model(tmp_path / "bart", "bart")
    for flag in ("model_path", "ref_model_path"):
        refuses(script, f"{bart} is not run by ", **{flag: bart}, dtype=dtype)


@one_text
@mark.parametrize("architecture", ["mamba", "mamba2"])
def test_a_model_that_cannot_go_on_from_its_cache_is_refused(
    script, refuses, tmp_path, architecture
):
    """Also for a run that only evaluates. It would sample what the model does not give."""
    path = save_model(tmp_path / architecture, architecture)
    for flags in (FEW, dict(total_episodes=0, eval_dataset=5)):
        refuses(script, f"{path} is not run by PlainSteps", model_path=path, **flags)


NOT_ALL = "RecordedSteps: a layer does not keep all tokens"
OTHER = "its results are not those of a plain pass"


@one_text
@mark.parametrize(
    "architecture, changes, faults",
    [
        ("gpt2", {}, []),
        ("mistral", dict(sliding_window=LONGEST + 7), []),
        ("mistral", dict(sliding_window=LONGEST + 6), [NOT_ALL]),
        ("gpt_neo", dict(window_size=LONGEST + 6), []),
        ("gpt_neo", dict(window_size=LONGEST + 5), [f"RecordedSteps: {OTHER}"]),
        ("jamba", {}, ["RecordedSteps: ", "shared_prompts: "]),
        ("bloom", {}, ["RecordedSteps: too many values to unpack"]),
        ("phi", {}, []),
    ],
)
def test_the_first_way_that_works_is_taken(
    script, run, tmp_path, monkeypatch, capsys, architecture, changes, faults
):
    """The others are named, each with its reason. A window must be longer than each row. A head may
    rule tokens out, by -inf. The run compares sampler and trainer."""
    path = save_model(tmp_path / "policy", architecture, **changes)
    if architecture == "phi":
        model = load_policy(path)
        model.lm_head.bias.data[3] = -math.inf
        model.save_pretrained(path)
    record_steps(monkeypatch, script)
    run(script, model_path=path, **FEW)
    said = dict.fromkeys(re.findall(f"{path} is not run by (.*)", capsys.readouterr().out))
    assert len(said) == len(faults), said
    for line, fault in zip(said, faults):
        assert line.startswith(fault)


def test_prompts_are_shared_in_training_on_a_cpu_alone(script, monkeypatch):
    """A GPU waits for Python where there are two passes in place of one."""
    monkeypatch.setattr(script, "choose_way", lambda path, model, ways, outputs_of: ways[0])
    for device, way in (("cpu", script.shared_prompts), ("cuda", script.separate_rows)):
        accelerator = SimpleNamespace(device=torch.device(device))
        monkeypatch.setattr(script, "accelerator", accelerator, raising=False)
        args = SimpleNamespace(k=4, gradient_checkpointing=False)
        assert script.choose_training_way(args, "", None) is way


@only("rloo", "ppo")
def test_weights_that_do_not_fit_their_config_are_refused_by_name(script, refuses, tmp_path):
    """A weight that is missing or has another shape would be random, and one of another layer would
    be left out. Such a policy, reference, reward model or value model is refused, and the message
    names the weight."""
    policy = script.Args.model_path
    dataset = HERE / "benchmark/default/eval.jsonl"
    flags = dict(model_path=policy, dataset=dataset, value_model_path=policy)
    if script.__name__ != "ppo":
        del flags["value_model_path"]
    wide = dict(intermediate_size=100)
    for flag, weight, changed in (
        ("model_path", "layers.3.input_layernorm.weight", dict(num_hidden_layers=4)),
        ("model_path", "layers.1.input_layernorm.weight", dict(num_hidden_layers=1)),
        ("model_path", "layers.0.mlp.down_proj.weight", wide),
        ("ref_model_path", "layers.0.mlp.down_proj.weight", wide),
        ("value_model_path", "layers.0.mlp.down_proj.weight", wide),
        ("reward_model_path", "score.weight", wide),
    ):
        if hasattr(script.Args, flag):
            folder = shutil.copytree(policy, tmp_path / f"{flag} {changed}")
            config = json.loads((folder / "config.json").read_text()) | changed
            (folder / "config.json").write_text(json.dumps(config))
            refuses(script, re.escape(weight), **flags | {flag: folder}, kl_coef=0.1)


@only("rloo", "ppo")
def test_models_that_are_not_there(script, refuses, tmp_path):
    """There is no folder, or it is empty, or the file with the weights is cut short. The libraries
    have messages of their own."""
    (tmp_path / "empty").mkdir()
    cut = save_model(tmp_path / "cut")
    os.truncate(f"{cut}/model.safetensors", 2000)
    for flag in ("model_path", "ref_model_path", "reward_model_path", "value_model_path"):
        if hasattr(script.Args, flag):
            for path in (tmp_path / "none", tmp_path / "empty", cut):
                refuses(script, error=Exception, **{flag: path})


MISTAKES = """
def few(prompts, **_):
    return [0.0]

def raises(**_):
    raise ValueError("mine")

def named(prompts, **_):
    return {"\u00e9": [0.0] * len(prompts)}
"""


@one_text
@mark.slow
def test_a_mistake_ends_with_one_line(script, world, tmp_path):
    """A mistake of the user ends with one line and exit code 1, also in the middle of a run. What
    the reward function raises keeps its traceback. A terminal that knows only ASCII stops no
    run."""
    (tmp_path / "mine.py").write_text(MISTAKES)

    def start(reward, **environment):
        flags = base_flags(world, FEW | dict(reward=f"mine.py:{reward}"))
        return launch(script, 1, tmp_path, flags, **environment)

    finished = start("few")
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1].startswith("error: iteration 1: --reward")
    assert "Traceback" not in finished.stderr
    finished = start("raises")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr
    assert "ValueError: mine" in finished.stderr
    finished = start("named", PYTHONIOENCODING="ascii")
    assert finished.returncode == 0, finished.stderr
    assert "reward/\\xe9" in finished.stdout


@one_text
def test_rows_of_text_and_of_chats_keep_their_order(script, tmp_path):
    """A text gets one BOS, and no EOS that it has not got. A chat gets what its template writes. A
    line may hold what other programs take for its end."""
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
    found = script.load_prompts(script.check_flags(script.Args()), str(path), "none", tokenizer)
    assert [prompt.text for prompt in found] == ["22", "1+1==", "1+1=+", "<pad>5", "5<eos>"]
    assert found[0].row["note"] == rows[0]["note"]
    counts = [(row.token_ids.count(PAD), row.token_ids.count(EOS) > 0) for row in found]
    assert counts == [(1, False), (0, False), (0, False), (1, False), (1, True)]


def test_defaults_that_the_model_decides(script, tmp_path):
    """The learning rate and the length of a completion. What is given is taken."""
    link = tmp_path / "link"
    link.symlink_to(HERE / "benchmark" / "default" / "policy")
    own, other = (5e-5, 3e-6) if script.__name__ == "ppo" else (1e-4, 1e-6)
    built_in = str(HERE / "benchmark/default/train.jsonl")
    for flags, learning_rate, response_length in (
        (dict(model_path=str(link), lora_r=2), own, 8),
        (dict(model_path="me/mine", dataset=built_in), other, 256),
        (dict(model_path="me/mine", dataset="mine:train"), other, 256),
        (dict(model_path="me/mine", dataset="mine:train", lora_r=2), 1e-5, 256),
        (dict(learning_rate=0.0, response_length=9), 0.0, 9),
    ):
        args = script.check_flags(script.Args(**flags))
        assert (args.learning_rate, args.response_length) == (learning_rate, response_length)
