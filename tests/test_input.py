"""Bad input. A run refuses it before it writes anything. The message names the flag or the line."""

import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import tyro
import yaml
from conftest import (
    EOS,
    HERE,
    base_flags,
    import_file,
    launch,
    launch_forked,
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
from pytest import raises
from tokenizers.processors import TemplateProcessing

# In each line the flags of a run, with `k` for the flag that has it. The message must name the
# first of them.
BAD_FLAGS = """
batch_size: 0
batch_size: -12
batch_size: 13, num_mini_batches: 2
num_mini_batches: 0
num_mini_batches: -1
num_ppo_epochs: 0
per_device_train_batch_size: 0
per_device_rollout_batch_size: 0
response_length: 0
response_length: -1
total_episodes: -1
total_episodes: 0, dataset: mine.jsonl
max_prompt_length: 0
eval_every: 0
eval_every: 2, dataset: mine.jsonl
eval_k: 2
eval_k: 3, dataset: mine.jsonl, eval_temperature: 1.0
eval_reward: mine.py:score, dataset: mine.jsonl
eval_temperature: -1.0
save_every: 0
lora_r: 0
lora_alpha: 0
plan: 0
num_train_epochs: 0.0
num_train_epochs: .nan
warmup_steps: -1
warmup_steps: 3, lr_scheduler_type: constant
stop_token_id: -1
num_sample_generations: -1
seed: -1
temperature: 0.0
temperature: .inf
learning_rate: -0.001
learning_rate: .nan
kl_coef: -0.1
cliprange: -0.1
missing_eos_penalty: -1.0
weight_decay: -1.0
max_grad_norm: 0.0
max_grad_norm: .nan
log_with: no_such_tracker
log_with: mlflow
reward: none
resume: true
"""
# In bfloat16, the ratio of a completion would be rounding alone. With a horizon of 12, the KL
# coefficient of a batch of 64 episodes would be negative.
OWN_BAD_FLAGS = {
    "rloo": """
k: 1
k: 0
k: -3
batch_size: 8, k: 3, num_mini_batches: 2
dtype: bfloat16, num_ppo_epochs: 2
""",
    "grpo": """
k: 1
k: 0
cliprange_high: -0.1
batch_size: 8, k: 3, num_mini_batches: 2
dtype: bfloat16, num_ppo_epochs: 2, importance_sampling_level: sequence
""",
    "ppo": """
kl_target: 0.0
kl_horizon: 0
kl_horizon: 12, adaptive_kl: true
adaptive_kl: true, kl_coef: 0.0
target_kl: 0.0
ratio_threshold: -1.0
gamma: 1.1
lam: -0.1
cliprange_value: -0.1
vf_coef: -1.0
score_clip: 0.0
""",
}
WORDS = {  # what else the message says
    "max_grad_norm: 0.0": "above 0, or inf",
    "kl_coef: -0.1": "above 0, or 0",
    "temperature: .inf": "a finite number above 0, or left out",
    "batch_size: 8, k: 3, num_mini_batches: 2": "whole groups need a multiple of 6",
    "log_with: no_such_tracker": "is none of .*'tensorboard'",
    "log_with: mlflow": "is none of .*'tensorboard'",
}


def test_bad_flags_are_refused_by_name(script):
    """`Args` raises a ValueError. That is before anything is loaded or written."""
    lines = BAD_FLAGS + OWN_BAD_FLAGS[script.__name__]
    for line in filter(None, lines.splitlines()):
        flags = with_group(script, yaml.safe_load("{" + line + "}"))
        with raises(ValueError, match=WORDS.get(line, "")) as raised:
            script.Args(**flags)
        assert option(next(iter(flags))) in str(raised.value), line
    num_ppo_epochs = 1 if script.__name__ == "rloo" else 2  # of a ratio for each token
    make_args(script, dtype="bfloat16", num_ppo_epochs=num_ppo_epochs)
    make_args(script, seed=2**32 - 1, max_grad_norm=math.inf, cliprange=0.0, eval_temperature=0.0)


@one_text
def test_the_command_line_shows_them_with_status_2(script, capsys):
    """The message is in tyro's box, as for the flags that tyro itself refuses. A misspelt flag gets
    the right name."""
    for line, words in {
        "--dtype float16": "--dtype",
        "--plan two": "--plan",
        "--batch-size 0": "--batch-size",
        "--learning-rat 1": "--learning-rate",
        "--no-such-flag": "no-such",
    }.items():
        with raises(SystemExit) as stopped:
            tyro.cli(script.Args, args=line.split())
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err, line


USER = {"role": "user", "content": "1+1="}
ROW = r" \(a row is an object with a `prompt`.*`role`.*chat_template_kwargs.*\): "
GOOD = '{"prompt": "1+1=", "answer": "2"}\n'
BAD_ROWS = {  # words that must be in the message
    '{"prompt": ': "Expecting value",
    "": "Expecting value",
    '["1+1="]': "'list'",
    '{"question": "1+1="}': "needs a `prompt`",
    '{"prompt": "1+1="}': "needs an `answer`",
    '{"prompt": [{"content": "1+1="}], "answer": "2"}': "a message has no `role`",
    '{"prompt": [[{"role": "user"}]], "answer": "2"}': "a message has no `role`",
    '{"prompt": [{"role": "user", "content": "1"}], "answer": "2"}': "chat_template",
    '{"prompt": [{"role": "user"}], "answer": "2", "chat_template_kwargs": "deep"}': "",
    '{"prompt": 3, "answer": "2"}': "",
    '{"prompt": null, "answer": "2"}': "",
    '{"prompt": [], "answer": "2"}': "",
    '{"prompt": "", "answer": "2"}': "",
    # half of a letter
    '{"prompt": "\\ud83d", "answer": "2"}': "(surrogate|UTF-8|TextEncodeInput)",
    '{"prompt": "1", "answer": %s}' % ("9" * 5000): "4300 digits",
    '{"prompt": %s' % ("[" * 10**5): "recursion",
    '{"prompt": "1", "answer": "\udcff"}': "codec can't decode",
}


@one_text
def test_bad_data_is_refused_by_file_and_line(script, refuses, tmp_path):
    file = tmp_path / "data.jsonl"
    for row, words in BAD_ROWS.items():
        file.write_text(GOOD + row + "\n" + GOOD, errors="surrogateescape")
        message = f"data.jsonl:2{ROW}.*{words}"
        refuses(script, message, dataset=file, reward="exact_match")
    refuses(script, "data.jsonl:2", eval_dataset=file)
    file.write_text("")
    refuses(script, "data.jsonl: has no rows", dataset=file)
    for flag in ("dataset", "eval_dataset"):
        refuses(script, f"{option(flag)} .*no_such.jsonl", **{flag: tmp_path / "no_such.jsonl"})
    for name in ("rows.csv", "rows.parquet", "someone/sums"):
        message = f"{name}: must be a .jsonl file, or a Hub dataset as NAME:SPLIT"
        refuses(script, message, eval_dataset=name)


@only("rloo")
def test_a_line_may_hold_what_other_programs_take_for_its_end(script, tmp_path):
    """Only a newline ends a line of a .jsonl file. The last line may end without one."""
    text = '{"prompt": "a", "answer": "2\u20283\x85"}\n{"prompt": "d"}'
    file = tmp_path / "data.jsonl"
    for end in ("", "\n"):
        file.write_text(text + end, encoding="utf-8")
        prompts = script.load_prompts(script.Args(), str(file), "none", make_tokenizer())
        assert [prompt.row["answer"] for prompt in prompts] == ["2\u20283\x85", None]


@one_text
def test_names_of_hub_datasets(script, monkeypatch):
    """NAME:SPLIT, or NAME:CONFIG:SPLIT. Colons in brackets belong to the split."""

    def load_dataset(*names, split):
        raise LookupError(" ".join([*names, split]))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for name, words in {
        "sums:test": "sums test",
        "sums:train[2:5]": "sums train[2:5]",
        "sums:main:train[:5]+test[5:]": "sums main train[:5]+test[5:]",
    }.items():
        with raises(LookupError, match=re.escape(words)):
            script.load_prompts(script.Args(), name, "exact_match", make_tokenizer())


@one_text
def test_long_prompts_are_dropped_and_counted_aloud(script, run, refuses, capsys):
    """Prompts over --max-prompt-length are dropped, and their number is printed. The counts are of
    the prompts that stay."""
    kept = [prompt for prompt in make_prompts(7) if len(prompt) <= 8]
    ran = run(script, max_prompt_length=8, num_train_epochs=2)
    assert f"{7 - len(kept)} of 7 prompts" in capsys.readouterr().out
    used = Counter(row["prompt"] for row in ran.rollouts)
    assert used == dict.fromkeys(kept, 2 * ran.args.k)
    assert ran.metrics[-1]["epoch"] == 2
    refuses(script, "none within --max-prompt-length", max_prompt_length=1)


FEW = dict(total_episodes=3, batch_size=3)
LONGEST = max(map(len, make_prompts(7)))  # of the prompts of a run


@only("rloo", "ppo")
def test_what_exceeds_the_models_positions_is_refused(script, run, refuses, tmp_path):
    """The longest prompt and its response, without the last token, must fit into each model that
    computes them. Evaluation prompts count, too. A run that just fits is not refused."""
    room = 65 - LONGEST
    too_few = "has 64 positions, .* needs 65; lower --response-length, or --max-prompt-length"
    refuses(script, f"--model-path .* {too_few}", response_length=room + 1)
    run(script, response_length=room, **FEW)
    longer = write_jsonl(tmp_path / "longer.jsonl", make_rows(["1" * (66 - room)]))
    refuses(script, too_few, response_length=room, eval_dataset=longer)
    short = save_model(tmp_path / "short", max_position_embeddings=63)
    flags = ["ref_model_path"]
    if script.__name__ == "ppo":
        flags.append("value_model_path")
    for flag in flags:
        message = rf"{short} has 63 positions, .* needs 64"
        refuses(script, message, response_length=room, **{flag: short})


@only("rloo", "ppo")
def test_longrope_stays_within_its_original_positions(script, run, refuses, tmp_path):
    """Beyond them, the longest row of a pass changes the results of all its rows. YaRN has no such
    limit."""
    longest = LONGEST + 3
    limit = dict(original_max_position_embeddings=longest)
    yarn = limit | dict(rope_theta=1e4, rope_type="yarn", factor=2.0)
    phi3 = limit | dict(
        rope_theta=1e4,
        rope_type="longrope",
        partial_rotary_factor=1.0,
        short_factor=[1.0] * 4,
        long_factor=[4.0] * 4,
    )
    path = save_model(tmp_path / "phi3", "phi3", rope_parameters=phi3, **limit)
    message = f"has {longest} positions, .* needs {longest + 1}"
    refuses(script, message, model_path=path, response_length=5)
    run(script, model_path=path, response_length=4, **FEW)
    path = save_model(tmp_path / "yarn", rope_parameters=yarn)
    run(script, model_path=path, response_length=5, **FEW)
    for config in (
        SimpleNamespace(rope_parameters={"full_attention": phi3}),  # for one type of layer
        SimpleNamespace(max_seq_len=longest),  # MPT's name
    ):
        with raises(script.UsageError, match=f"policy {message}"):
            script.check_positions("policy", config, longest + 1)


@one_text
def test_a_reward_model_must_have_enough_positions(script, run, tmp_path):
    """It reads whole episodes. One with RoPE would read on beyond its positions, and nobody would
    notice."""
    path, _ = save_classifier(tmp_path / "short", max_position_embeddings=8)
    message = f"--reward-model-path {path} has 8 positions, .* --response-length"
    with raises(script.UsageError, match=message):
        run(script, reward_model_path=path)
    path, _ = save_classifier(tmp_path / "enough", max_position_embeddings=LONGEST + 6)
    run(script, reward_model_path=path)


@one_text
def test_tokens_that_the_model_does_not_have(script, run, refuses, tmp_path):
    """A prompt, an EOS or the stop token outside of the vocabulary is refused. A tokenizer may have
    more tokens than the model, as long as no prompt has one."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["@"])
    more = save_model(tmp_path / "more", tokenizer=tokenizer)
    run(script, model_path=more, **FEW)
    dataset = write_jsonl(tmp_path / "at.jsonl", make_rows(["1+1=", "1@1="]))
    message = f"--model-path {more}: a prompt has token {len(tokenizer) - 1}, "
    refuses(script, message, model_path=more, dataset=dataset)
    message = "EOS or --stop-token-id 99 is outside of the vocabulary"
    refuses(script, message, stop_token_id=99)
    never = save_model(tmp_path / "never", eos_ids=[EOS, 99])
    refuses(script, message, model_path=never)


@one_text
def test_a_run_without_eos_says_so(script, run, tmp_path, capsys):
    """Neither the tokenizer nor the model has an EOS. Then every completion runs to its limit."""
    assert any(row["val/num_eos_tokens"] for row in run(script).metrics)
    assert "there is no EOS" not in capsys.readouterr().out
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    endless = save_model(tmp_path / "endless", eos_ids=None, tokenizer=tokenizer)
    assert not any(row["val/num_eos_tokens"] for row in run(script, model_path=endless).metrics)
    assert "there is no EOS" in capsys.readouterr().out


@only("rloo", "ppo")
def test_a_model_must_give_the_same_in_padded_rows(
    script, run, refuses, monkeypatch, tmp_path, capsys
):
    """Another model is refused, in each role and type. Where only a shared prompt changes the
    results, every episode gets a row of its own, and one line says so."""
    phimoe = save_model(tmp_path / "phimoe", "phimoe")
    scaled = save_model(tmp_path / "scaled", logit_scale=3.0)  # which Llama does not use
    for path in (phimoe, scaled):
        refuses(script, f"--model-path {path} .*head_logits", model_path=path)
    bart = save_model(tmp_path / "bart", "bart")
    for dtype in ("float32", "bfloat16"):
        for flag in ("model_path", "ref_model_path"):
            message = f"{option(flag)} {bart} .* padded rows"
            refuses(script, message, **{flag: bart}, dtype=dtype)
    models = 1  # The KL coefficient is 0 below, so there is no reference.
    if script.__name__ == "ppo":
        outputs = script.completion_outputs
        calls = []

        def off(network, shares_prompts, prompts, tokens):
            """From the third call on, which is of the value model, two rows give other results."""
            calls.append(len(tokens))
            return outputs(network, shares_prompts, prompts, tokens) + len(tokens) * (
                len(calls) > 2
            )

        with monkeypatch.context() as patch:
            patch.setattr(script, "completion_outputs", off)
            refuses(script, "--value-model-path .* padded rows")
        models = 2
    jamba = save_model(tmp_path / "jamba", "jamba")
    capsys.readouterr()
    first, *_ = run(script, model_path=jamba, kl_coef=0).metrics
    assert capsys.readouterr().out.count("a row for each episode") == models
    assert first["val/sampling_logprob_difference"] < 2e-5


@only("rloo", "ppo")
def test_weights_that_do_not_fit_their_config_are_refused_by_name(script, refuses, tmp_path):
    """A weight that is missing or has another shape would be random, and one of another layer would
    be left out. Such a policy, reference, reward model or value model is refused, and the message
    names the weight."""

    def misfit(**changed):
        """The built-in policy with another config."""
        folder = shutil.copytree(script.Args.model_path, tmp_path / str(changed))
        file = folder / "config.json"
        config = json.loads(file.read_text()) | changed
        file.write_text(json.dumps(config))
        return str(folder)

    def refuses_weight(weight, flag, path):
        flags = fits | {flag: path}
        refuses(script, re.escape(path), weight, **flags, error=ValueError)

    default = script.Args
    fits = dict(
        dataset=default.dataset,
        model_path=default.model_path,
        kl_coef=0.1,
        total_episodes=4,
        k=4,
        batch_size=16,
    )
    wide = misfit(intermediate_size=100)
    weight = "layers.0.mlp.down_proj.weight"
    refuses_weight("layers.3.input_layernorm.weight", "model_path", misfit(num_hidden_layers=4))
    refuses_weight("layers.1.input_layernorm.weight", "model_path", misfit(num_hidden_layers=1))
    refuses_weight(weight, "model_path", wide)
    refuses_weight(weight, "ref_model_path", wide)
    if script.__name__ == "ppo":
        refuses_weight(weight, "value_model_path", wide)
        fits["value_model_path"] = default.model_path
    refuses_weight("score.weight", "reward_model_path", wide)


@only("rloo", "ppo")
def test_models_that_are_not_there(script, refuses, tmp_path):
    """The folder does not exist, or it is empty, or the file with the weights is cut short."""
    (tmp_path / "empty").mkdir()
    cut = save_model(tmp_path / "cut")
    os.truncate(f"{cut}/model.safetensors", 2000)
    for flag in ("model_path", "ref_model_path", "reward_model_path"):
        refuses(script, "no/such/model", **{flag: "no/such/model"})
        # Here the libraries have messages of their own.
        refuses(script, error=Exception, **{flag: tmp_path / "empty"})
        refuses(script, error=Exception, **{flag: cut})
    if script.__name__ == "ppo":
        refuses(script, "no/such/model", value_model_path="no/such/model")
        other = save_model(tmp_path / "other", vocab_size=50)
        refuses(script, other, "the policy's vocabulary", value_model_path=other)


@one_text
def test_a_folder_without_a_whole_model(script, refuses, world, tmp_path):
    """The tokenizer is missing, or there are only LoRA adapters. The message names the flag and
    says what to do."""
    no_tokenizer = shutil.copytree(world.llama, tmp_path / "no_tokenizer")
    for file in no_tokenizer.glob("tokenizer*"):
        file.unlink()
    adapters = shutil.copytree(world.llama, tmp_path / "adapters")
    (adapters / "config.json").rename(adapters / "adapter_config.json")
    advice = "tokenizer; merge LoRA adapters first, see docs/recipes.md#lora"
    for flag, path in (
        ("model_path", no_tokenizer),
        ("model_path", adapters),
        ("ref_model_path", adapters),
    ):
        message = rf"{option(flag)} {path} \(.*{advice}"
        refuses(script, message, **{flag: path})


MISTAKES = """
def few(prompts, **_):
    return [0.0]

def raises(**_):
    raise ValueError("mine")

def named(prompts, **_):
    return {"\u00e9": [0.0] * len(prompts)}
"""


@one_text
@pytest.mark.slow
def test_a_mistake_ends_with_one_line(script, world, tmp_path):
    """A mistake of the user ends with one line and exit code 2, also in the middle of a run. What
    the reward function raises keeps its traceback. A terminal that knows only ASCII stops no
    run."""
    (tmp_path / "mine.py").write_text(MISTAKES)

    def start(**flags):
        return launch_forked(script, 1, tmp_path, base_flags(world, FEW | flags))

    for message, flags in {
        "iteration 1: --reward returned 1 scores for 3 completions": dict(reward="mine.py:few"),
        "--dataset none.jsonl: [Errno 2] No such file or directory: 'none.jsonl'": dict(
            dataset="none.jsonl"
        ),
    }.items():
        finished = start(**flags)
        assert finished.returncode == 2
        assert finished.stderr.endswith(f"\nerror: {message}\n"), finished.stderr
        assert "Traceback" not in finished.stderr
    finished = start(reward="mine.py:raises")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr
    assert "ValueError: mine" in finished.stderr
    flags = base_flags(world, FEW | dict(reward="mine.py:named"))
    finished = launch(script, 1, tmp_path, flags, PYTHONIOENCODING="ascii")
    assert finished.returncode == 0, finished.stderr
    assert "reward/\\xe9" in finished.stdout


@one_text
def test_a_template_that_writes_nothing_is_named_by_its_row(script, refuses, tmp_path):
    """A prompt without tokens has nothing to continue."""
    silent = make_tokenizer()
    silent.chat_template = (
        "{% if messages[0]['role'] == 'user' %}{{ messages[0]['content'] }}{% endif %}"
    )
    path = save_model(tmp_path / "silent", tokenizer=silent)
    rows = [{"prompt": [USER]}, {"prompt": [USER | {"role": "system"}]}]
    dataset = write_jsonl(tmp_path / "chat.jsonl", rows)
    refuses(script, "chat.jsonl:2", "no tokens", model_path=path, dataset=dataset, error=ValueError)


@one_text
def test_rows_of_text_and_of_chats_keep_their_order(script, tmp_path):
    """A text gets the special tokens of its tokenizer. A rendered chat gets no more of them."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ mark or '=' }}"
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", EOS)]
    )
    rows = [
        dict(prompt="22"),
        dict(prompt=[USER]),
        dict(prompt=[USER], chat_template_kwargs=dict(mark="+")),
        dict(prompt="5"),
    ]
    path = write_jsonl(tmp_path / "mixed.jsonl", rows)
    found = script.load_prompts(script.Args(), path, "none", tokenizer)
    for prompt, row, text in zip(found, rows, ["22", "1+1==", "1+1=+", "5"], strict=True):
        assert prompt.text == text
        assert prompt.row["prompt"] == row["prompt"]
        assert (prompt.token_ids[-1] == EOS) == isinstance(row["prompt"], str)


@one_text
def test_a_copied_script_names_the_default_file_that_is_missing(script, run, refuses, tmp_path):
    """The default policy and dataset lie beside the script. A copy without them stops, and the
    message names the path that is missing. The copy accepts other paths."""
    copied = import_file(shutil.copy(script.__file__, tmp_path / f"copied_{script.__name__}.py"))
    folder = tmp_path / "benchmark" / "default"
    for flag, name in dict(model_path="policy", dataset="train.jsonl").items():
        path = str(folder / name)
        assert getattr(copied.Args, flag) == path
        refuses(copied, path, **{flag: path})
    run(copied, **FEW)  # other paths


def test_defaults_that_the_model_decides(script, tmp_path):
    """The learning rate and the length of a completion. What is given is taken."""
    link = tmp_path / "link"
    link.symlink_to(HERE / "benchmark" / "default" / "policy")
    own = 1e-4
    other = 1e-6
    if script.__name__ == "ppo":
        own = 5e-5
        other = 3e-6
    for flags, learning_rate, response_length in (
        (dict(), own, 8),
        (dict(model_path=str(link), lora_r=2), own, 8),
        (dict(model_path="me/mine"), other, 256),
        (dict(model_path="me/mine", lora_r=2), 1e-5, 256),
        (dict(model_path="me/mine", response_length=9), other, 9),
        (dict(learning_rate=0.0), 0.0, 8),
    ):
        args = script.Args(**flags)
        assert args.learning_rate == learning_rate
        assert args.response_length == response_length
