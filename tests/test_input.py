"""Bad input. A run refuses it before it writes anything. The message names the flag, or the file and the line."""

import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro
from conftest import (
    EOS,
    HERE,
    base_flags,
    group_flag,
    import_file,
    launch,
    make_args,
    make_prompts,
    make_rows,
    make_tokenizer,
    one_text,
    only,
    save_classifier,
    save_model,
    write_jsonl,
)
from tokenizers.processors import TemplateProcessing

BAD_FLAGS = [  # a flag, which the message must name, and its bad value
    *[("batch_size", value) for value in (0, -12, 13)],
    *[("num_mini_batches", value) for value in (0, -1)],
    *[("num_ppo_epochs", 0), ("per_device_train_batch_size", 0), ("per_device_rollout_batch_size", 0)],
    *[("response_length", 0), ("response_length", -1), ("total_episodes", -1), ("max_prompt_length", 0)],
    *[("eval_every", 0), ("save_every", 0), ("lora_r", 0), ("lora_alpha", 0), ("plan", 0), ("num_train_epochs", 0.0)],
    *[("warmup_steps", -1), ("stop_token_id", -1), ("num_sample_generations", -1), ("seed", -1)],
    *[("num_train_epochs", math.nan), ("temperature", 0.0), ("temperature", math.inf), ("eval_temperature", -1.0)],
    *[("learning_rate", -1e-3), ("learning_rate", math.nan), ("kl_coef", -0.1), ("cliprange", -0.1)],
    *[("missing_eos_penalty", -1.0), ("weight_decay", -1.0), ("max_grad_norm", 0.0), ("max_grad_norm", math.nan)],
    *[("log_with", "no_such_tracker"), ("log_with", "mlflow"), ("reward", "none")],
    *[("warmup_steps", 3), ("resume", True), ("eval_every", 2), ("eval_k", 2), ("eval_k", 3)],
    *[("eval_reward", "mine.py:score"), ("total_episodes", 0)],
]
ALSO = {  # other flags, which the value contradicts
    ("batch_size", 13): dict(num_mini_batches=2),
    ("warmup_steps", 3): dict(lr_scheduler_type="constant"),
    ("eval_every", 2): dict(dataset="mine.jsonl"),
    ("eval_k", 3): dict(dataset="mine.jsonl", eval_temperature=1.0),
    ("eval_reward", "mine.py:score"): dict(dataset="mine.jsonl"),
    ("total_episodes", 0): dict(dataset="mine.jsonl"),
}
OWN_BAD_FLAGS = {
    "rloo": [("rloo_k", 1), ("rloo_k", 0), ("rloo_k", -3), ("dtype", "bfloat16")],
    "grpo": [("num_generations", 1), ("num_generations", 0), ("cliprange_high", -0.1), ("dtype", "bfloat16")],
    "ppo": [("kl_target", 0.0), ("kl_horizon", 0), ("target_kl", 0.0), ("ratio_threshold", -1.0), ("gamma", 1.1)]
    + [("lam", -0.1), ("cliprange_value", -0.1), ("vf_coef", -1.0), ("score_clip", 0.0), ("adaptive_kl", True)]
    + [("kl_horizon", 12)],
}
ALSO[("kl_horizon", 12)] = dict(adaptive_kl=True)  # The coefficient of a batch of 64 episodes would be negative.
ALSO[("adaptive_kl", True)] = dict(kl_coef=0.0)
ALSO[("dtype", "bfloat16")] = dict(num_ppo_epochs=2, importance_sampling_level="sequence")  # the ratio of a completion


def test_bad_flags_are_refused_by_name(script):
    """`Args` raises a ValueError. That is before anything is loaded or written."""
    for flag, value in BAD_FLAGS + OWN_BAD_FLAGS[script.__name__]:
        with pytest.raises(ValueError) as raised:
            also = ALSO.get((flag, value), {})
            script.Args(**{flag: value} | {name: x for name, x in also.items() if hasattr(script.Args, name)})
        message, name = str(raised.value), f"--{flag.replace('_', '-')}"
        assert name in message, (name, message)
    ranges = {("max_grad_norm", 0.0): "above 0, or inf", ("kl_coef", -0.1): "above 0, or 0"}
    ranges |= {("temperature", math.inf): "a finite number above 0, or left out"}
    ranges |= {("log_with", "mlflow"): "is none of .*'tensorboard'"}
    for (flag, value), words in ranges.items():
        with pytest.raises(ValueError, match=words):
            script.Args(**{flag: value})
    make_args(script, dtype="bfloat16", num_ppo_epochs=1 if script.__name__ == "rloo" else 2)  # the ratio of a token
    make_args(script, seed=2**32 - 1, max_grad_norm=math.inf, cliprange=0.0, eval_temperature=0.0, k=2)
    if group_flag(script) is not None:
        with pytest.raises(ValueError, match="--batch-size.* 6"):
            make_args(script, k=3, num_mini_batches=2, batch_size=8)


@one_text
def test_the_command_line_shows_them_with_status_2(script, capsys):
    """The message is in tyro's box, as for the flags that tyro itself refuses. A misspelt flag gets the right name."""
    lines = {"--dtype float16": "--dtype", "--plan two": "--plan", "--batch-size 0": "--batch-size"}
    lines |= {"--learning-rat 1": "--learning-rate", "--no-such-flag": "no-such"}
    for line, words in lines.items():
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            tyro.cli(script.Args, args=line.split())
        assert stopped.value.code == 2 and words in capsys.readouterr().err, line


USER = {"role": "user", "content": "1+1="}
ROW = r" \(a row is an object with a `prompt`.*`role`.*chat_template_kwargs.*\): "
GOOD = '{"prompt": "1+1=", "answer": "2"}\n'


def chat_line(messages, **more):
    return GOOD + json.dumps({"prompt": messages, "answer": "2"} | more) + "\n"


BAD_LINES = {  # the text of a dataset, and words that must be in the message
    "not-json": (GOOD + '{"prompt": \n', f"data.jsonl:2{ROW}Expecting value"),
    "empty-line": (GOOD + "\n" + GOOD, f"data.jsonl:2{ROW}Expecting value"),
    "not-an-object": (GOOD + '["1+1="]\n', f"data.jsonl:2{ROW}'list'"),
    "no-prompt": (GOOD + '{"question": "1+1="}\n', f"data.jsonl:2{ROW}needs a `prompt`"),
    "no-role": (chat_line([{"content": "1+1="}]), f"data.jsonl:2{ROW}a message has no `role`"),
    "nested-chat": (chat_line([[USER]]), f"data.jsonl:2{ROW}a message has no `role`"),
    "settings": (chat_line([USER], chat_template_kwargs="deep"), f"data.jsonl:2{ROW}"),
    "prompt-is-a-number": ('{"prompt": 3, "answer": "2"}\n', "data.jsonl:1"),
    "prompt-is-null": ('{"prompt": null, "answer": "2"}\n', "data.jsonl:1"),
    "no-messages": ('{"prompt": [], "answer": "2"}\n', "data.jsonl:1"),
    "empty-prompt": ('{"prompt": "", "answer": "2"}\n', "data.jsonl:1"),
    "no-answer": (GOOD + '{"prompt": "1+1="}\n', f"data.jsonl:2{ROW}needs an `answer`"),
    "empty-file": ("", "data.jsonl: has no rows"),
    "chat-without-template": (json.dumps({"prompt": [USER], "answer": "2"}) + "\n", "data.jsonl:1 .*chat_template"),
    "half-a-letter": ('{"prompt": "\\ud83d", "answer": "2"}\n', "data.jsonl:1 .*(surrogate|UTF-8|TextEncodeInput)"),
    "5,000-digits": ('{"prompt": "1", "answer": %s}\n' % ("9" * 5000), "data.jsonl:1 .*4300 digits"),
    "deep-nesting": ('{"prompt": %s\n' % ("[" * 10**5), "data.jsonl:1 .*recursion"),
    "not-utf-8": ('{"prompt": "1", "answer": "\udcff"}\n', "data.jsonl:1 .*codec can't decode"),
}


@one_text
def test_bad_data_is_refused_by_file_and_line(script, refuses, tmp_path):
    for text, words in BAD_LINES.values():
        (tmp_path / "data.jsonl").write_text(text, errors="surrogateescape")
        refuses(script, words, dataset=str(tmp_path / "data.jsonl"), reward="exact_match")
    (tmp_path / "data.jsonl").write_text(BAD_LINES["no-prompt"][0])
    refuses(script, "data.jsonl:2", eval_dataset=str(tmp_path / "data.jsonl"))
    for flag in ("dataset", "eval_dataset"):
        refuses(script, f"--{flag.replace('_', '-')} .*no_such.jsonl", **{flag: str(tmp_path / "no_such.jsonl")})
    for name in ("rows.csv", "rows.parquet", "someone/sums"):
        refuses(script, f"{name}: must be a .jsonl file, or a Hub dataset as NAME:SPLIT", eval_dataset=name)


@only("rloo")
def test_a_line_may_hold_what_other_programs_take_for_its_end(script, tmp_path):
    """Only a newline ends a line of a .jsonl file. The last line may end without one."""
    text = '{"prompt": "a", "answer": "2\u20283\x85"}\n{"prompt": "d"}'
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
    for end in ("", "\n"):
        (tmp_path / "data.jsonl").write_text(text + end, encoding="utf-8")
        prompts = script.load_prompts(script.Args(), str(tmp_path / "data.jsonl"), "none", make_tokenizer())
        assert [prompt.row["answer"] for prompt in prompts] == ["2\u20283\x85", None]


@one_text
def test_names_of_hub_datasets(script, monkeypatch):
    """NAME:SPLIT, or NAME:CONFIG:SPLIT. Colons in brackets belong to the split."""

    def load_dataset(*names, split):
        raise LookupError(" ".join([*names, split]))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    names = {"sums:test": "test", "sums:train[2:5]": "train[2:5]"}
    names |= {"sums:main:train": "main train", "sums:main:train[:5]+test[5:]": "main train[:5]+test[5:]"}
    for name, words in names.items():
        with pytest.raises(LookupError, match=re.escape(f"sums {words}")):
            script.load_prompts(make_args(script), name, "exact_match", make_tokenizer())


@one_text
def test_long_prompts_are_dropped_and_counted_aloud(script, run, refuses, capsys):
    """Prompts over --max-prompt-length are dropped, and their number is printed. The counts are of the prompts that
    stay."""
    prompts = make_prompts(7)
    limit = sorted(map(len, prompts))[3]
    kept = [p for p in prompts if len(p) <= limit]
    capsys.readouterr()
    ran = run(script, max_prompt_length=limit, num_train_epochs=2)
    assert f"{len(prompts) - len(kept)} of 7 prompts" in capsys.readouterr().out
    used = Counter(row["prompt"] for row in ran.rollouts)
    assert used == {p: 2 * ran.args.k for p in kept} and ran.metrics[-1]["epoch"] == 2
    refuses(script, "none within --max-prompt-length", max_prompt_length=1)


@only("rloo", "ppo")
def test_what_exceeds_the_models_positions_is_refused(script, run, refuses, world, tmp_path):
    """The longest prompt and its response, without the last token, must fit into each model that computes them.
    Evaluation prompts count, too. A run that just fits is not refused."""
    room = 65 - max(map(len, make_prompts(7)))
    too_few = "has 64 positions, .* needs 65; lower --response-length, or --max-prompt-length"
    refuses(script, f"--model-path .* {too_few}", response_length=room + 1, error=script.UsageError)
    run(script, response_length=room, total_episodes=3, batch_size=3)
    longer = write_jsonl(tmp_path / "longer.jsonl", make_rows(["1" * (65 - room), "1" * (66 - room)]))
    refuses(script, too_few, response_length=room, eval_dataset=longer, error=script.UsageError)
    short = save_model(tmp_path / "short", max_position_embeddings=63)
    for flag in ("ref_model_path", "value_model_path")[: 1 + (script.__name__ == "ppo")]:
        refuses(script, rf"{short} has 63 positions, .* needs 64", response_length=room, **{flag: short})


@only("rloo", "ppo")
def test_longrope_stays_within_its_original_positions(script, run, refuses, tmp_path):
    """Beyond them, the longest row of a pass changes the results of all its rows. YaRN has no such limit."""
    longest = max(map(len, make_prompts(7))) + 3
    long = dict(original_max_position_embeddings=longest, rope_theta=1e4)
    phi3 = dict(rope_type="longrope", partial_rotary_factor=1.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    phi3 = save_model(tmp_path / "phi3", "phi3", rope_parameters=long | phi3, original_max_position_embeddings=longest)
    yarn = save_model(tmp_path / "yarn", rope_parameters=long | dict(rope_type="yarn", factor=2.0))
    refuses(script, f"has {longest} positions, .* needs {longest + 1}", model_path=phi3, response_length=5)
    few = dict(total_episodes=3, batch_size=3)
    run(script, model_path=phi3, response_length=4, **few)
    run(script, model_path=yarn, response_length=5, **few)
    for positions in (
        dict(rope_parameters={"full_attention": long | dict(rope_type="longrope")}),  # for one type of layer
        dict(max_seq_len=longest),  # MPT's name
    ):
        with pytest.raises(script.UsageError, match=f"policy has {longest} positions, .* needs {longest + 1}"):
            script.check_positions("policy", SimpleNamespace(**positions), longest + 1)


def test_what_is_said_once(script, run, world, monkeypatch):
    """The launcher's fp16 is not taken, and a batch without any score teaches nothing."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.warns(UserWarning, match="fp16 is not offered: passes are in float32"):
        assert make_args(script).dtype == "float32"
    monkeypatch.undo()
    if script.__name__ != "ppo":  # PPO refuses missing scores.
        with pytest.warns(UserWarning, match="no score to any completion"):
            run(script, reward=world.reward("silent"), total_episodes=12)


@one_text
def test_a_reward_model_must_have_enough_positions(script, run, refuses, tmp_path):
    """It reads whole episodes. One with RoPE would read on beyond its positions, and nobody would notice."""
    path = save_classifier(tmp_path / "short", max_position_embeddings=8)[0]
    with pytest.raises(script.UsageError, match=f"--reward-model-path {path} has 8 positions, .* --response-length"):
        run(script, reward_model_path=path)
    path = save_classifier(tmp_path / "enough", max_position_embeddings=max(map(len, make_prompts(7))) + 6)[0]
    run(script, reward_model_path=path)


@one_text
def test_tokens_that_the_model_does_not_have(script, run, refuses, world, tmp_path):
    """A prompt, an EOS or the stop token outside of the vocabulary is refused. A tokenizer may have more tokens than
    the model, as long as no prompt has one."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["@"])
    more = save_model(tmp_path / "more", tokenizer=tokenizer)
    run(script, model_path=more, total_episodes=3, batch_size=3)
    dataset = write_jsonl(tmp_path / "at.jsonl", make_rows(["1+1=", "1@1="]))
    token = len(tokenizer) - 1
    refuses(script, f"--model-path {more}: a prompt has token {token}, ", model_path=more, dataset=dataset)
    refuses(script, "--stop-token-id 99 is outside of the vocabulary", stop_token_id=99, error=script.UsageError)
    never = save_model(tmp_path / "never", eos_ids=[EOS, 99])
    refuses(script, "EOS .*99 is outside of the vocabulary", model_path=never, error=script.UsageError)


@one_text
def test_a_run_without_eos_says_so(script, run, world, tmp_path, capsys):
    """Neither the tokenizer nor the model has an EOS. Then every completion runs to its limit."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    for path, says_so in (
        (world.llama, False),
        (save_model(tmp_path / "endless", eos_ids=None, tokenizer=tokenizer), True),
    ):
        capsys.readouterr()
        ran = run(script, model_path=path)
        assert ("there is no EOS" in capsys.readouterr().out) == says_so
        assert all(row["val/num_eos_tokens"] == 0 for row in ran.metrics) == says_so


@only("rloo", "ppo")
def test_a_model_must_give_the_same_in_padded_rows(script, run, refuses, monkeypatch, tmp_path, capsys):
    """Another model is refused, in each role and type. Where only a shared prompt changes the results, every episode
    gets a row of its own, and one line says so."""
    bart, jamba, phimoe = (save_model(tmp_path / name, name) for name in ("bart", "jamba", "phimoe"))
    scaled = save_model(tmp_path / "scaled", logit_scale=3.0)  # which Llama does not use
    for path in (phimoe, scaled):
        refuses(script, f"--model-path {path} .*head_logits", model_path=path)
    for dtype in ("float32", "bfloat16"):
        for flag in ("model_path", "ref_model_path"):
            name = f"--{flag.replace('_', '-')} {bart}"
            refuses(script, f"{name} .* padded rows", **{flag: bart}, dtype=dtype)
    if script.__name__ == "ppo":
        outputs, calls = script.completion_outputs, []  # The first two calls are of the policy.
        off = lambda *args: calls.append(args) or outputs(*args) + len(args[2]) * (len(calls) > 2)  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(script, "completion_outputs", off)
            refuses(script, "--value-model-path .* padded rows")
    capsys.readouterr()
    metrics = run(script, model_path=jamba, kl_coef=0)[1]
    assert capsys.readouterr().out.count("a row for each episode") == 1 + (script.__name__ == "ppo")  # its value model
    assert metrics[0]["val/sampling_logprob_difference"] < 2e-5


@pytest.fixture(scope="module")
def misfit(tmp_path_factory):
    """The built-in policy, with another width in its config, and with more and fewer layers than it has weights for."""
    folder = tmp_path_factory.mktemp("misfit")
    wide = Path(shutil.copytree(HERE / "benchmark" / "default" / "policy", folder / "wide"))
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    deep = Path(shutil.copytree(wide, folder / "deep"))
    (deep / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    flat = Path(shutil.copytree(wide, folder / "flat"))
    (flat / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return SimpleNamespace(wide=str(wide), deep=str(deep), flat=str(flat))


@only("rloo", "ppo")
def test_weights_that_do_not_fit_their_config_are_refused_by_name(script, refuses, misfit):
    """A weight that is missing or has another shape would be random, and one of another layer would be left out. Such a
    policy, reference, reward model or value model is refused, and the message names the weight."""
    default = dict(dataset=script.Args.dataset, total_episodes=4, k=4, batch_size=16)
    fits = default | dict(model_path=script.Args.model_path, kl_coef=0.1)
    shape, layer = "model.layers.0.mlp.down_proj.weight", "model.layers.3.input_layernorm.weight"
    refuses(script, misfit.deep, layer, **default | dict(model_path=misfit.deep), error=ValueError)
    left_out = "model.layers.1.input_layernorm.weight"
    refuses(script, misfit.flat, left_out, **default | dict(model_path=misfit.flat), error=ValueError)
    refuses(script, misfit.wide, shape, **default | dict(model_path=misfit.wide), error=ValueError)
    refuses(script, misfit.wide, shape, **fits | dict(ref_model_path=misfit.wide), error=ValueError)
    if script.__name__ == "ppo":
        name = shape.removeprefix("model.")
        refuses(script, misfit.wide, name, **fits | dict(value_model_path=misfit.wide), error=ValueError)
        fits["value_model_path"] = script.Args.model_path
    refuses(script, misfit.wide, "score.weight", **fits | dict(reward_model_path=misfit.wide))


@only("rloo", "ppo")
def test_models_that_are_not_there(script, refuses, world, tmp_path):
    """The folder does not exist, or it is empty, or the file with the weights is cut short."""
    (tmp_path / "empty").mkdir()
    cut = save_model(tmp_path / "cut")
    os.truncate(f"{cut}/model.safetensors", 2000)
    # For the empty folder and the cut file the libraries have messages of their own.
    for path, words in {"no/such/model": "no/such/model", str(tmp_path / "empty"): "", cut: ""}.items():
        for flag in ("model_path", "ref_model_path", "reward_model_path"):
            refuses(script, words, **{flag: path})
    if script.__name__ == "ppo":
        refuses(script, "no/such/model", value_model_path="no/such/model")
        other = save_model(tmp_path / "other", vocab_size=50)
        refuses(script, other, "the policy's vocabulary", value_model_path=other, error=ValueError)


@one_text
def test_a_folder_without_a_whole_model(script, refuses, world, tmp_path):
    """The tokenizer is missing, or there are only LoRA adapters. The message names the flag and says what to do."""
    no_tokenizer = Path(shutil.copytree(world.llama, tmp_path / "no_tokenizer"))
    for file in no_tokenizer.glob("tokenizer*"):
        file.unlink()
    adapters = Path(shutil.copytree(world.llama, tmp_path / "adapters"))
    (adapters / "config.json").rename(adapters / "adapter_config.json")
    for flag, path in (("model_path", no_tokenizer), ("model_path", adapters), ("ref_model_path", adapters)):
        words = rf"--{flag.replace('_', '-')} {path} \(.*tokenizer; merge LoRA adapters first, see docs/recipes.md#lora"
        refuses(script, words, error=script.UsageError, **{flag: str(path)})


@one_text
@pytest.mark.slow
def test_a_mistake_ends_with_one_line(script, world, tmp_path):
    """A mistake of the user ends with one line and exit code 2, also in the middle of a run. What the reward function
    raises keeps its traceback. A terminal that knows only ASCII stops no run."""
    (tmp_path / "mine.py").write_text(
        "def few(prompts, **_):\n    return [0.0]\n\ndef raises(**_):\n    raise ValueError('mine')\n\n"
        "def named(prompts, **_):\n    return {'\u00e9': [0.0] * len(prompts)}\n"
    )
    flags = base_flags(world) | dict(total_episodes=3, batch_size=3)
    reward = f"{tmp_path / 'mine.py'}:few"
    mistakes = {"iteration 1: --reward returned 1 scores for 3 completions": dict(reward=reward)}
    mistakes["--dataset none.jsonl: [Errno 2] No such file or directory: 'none.jsonl'"] = dict(dataset="none.jsonl")
    for message, wrong in mistakes.items():
        finished = launch(script, 1, tmp_path, flags | wrong)
        assert finished.returncode == 2 and finished.stderr.endswith(f"\nerror: {message}\n"), finished.stderr
        assert "Traceback" not in finished.stderr
    finished = launch(script, 1, tmp_path, flags | dict(reward=reward.replace("few", "raises")))
    assert finished.returncode == 1 and "Traceback" in finished.stderr and "ValueError: mine" in finished.stderr
    flags |= dict(reward=reward.replace("few", "named"))
    finished = launch(script, 1, tmp_path, flags, PYTHONIOENCODING="ascii")
    assert finished.returncode == 0 and "reward/\\xe9" in finished.stdout, finished.stderr


@one_text
def test_a_template_that_writes_nothing_is_named_by_its_row(script, refuses, tmp_path):
    """A prompt without tokens has nothing to continue."""
    silent = make_tokenizer()
    silent.chat_template = "{% if messages[0]['role'] == 'user' %}{{ messages[0]['content'] }}{% endif %}"
    path = save_model(tmp_path / "silent", tokenizer=silent)
    rows = [{"prompt": [{"role": role, "content": "1+1="}], "answer": "2"} for role in ("user", "system")]
    dataset = write_jsonl(tmp_path / "chat.jsonl", rows)
    refuses(script, "chat.jsonl:2", "no tokens", model_path=path, dataset=dataset, error=ValueError)


@one_text
def test_rows_of_text_and_of_chats_keep_their_order(script, tmp_path):
    """A text gets the special tokens of its tokenizer. A rendered chat gets no more of them."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ mark or '=' }}"
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    prompts = ["1", "22", [USER | {"content": "3"}], [USER | {"content": "44"}], "5"]
    settings = [{"chat_template_kwargs": {"mark": "+"}} if "44" in str(prompt) else {} for prompt in prompts]
    path = write_jsonl(tmp_path / "mixed.jsonl", [{"prompt": p} | more for p, more in zip(prompts, settings)])
    found = script.load_prompts(script.Args(), path, "none", tokenizer)
    assert [prompt.text for prompt in found] == ["1", "22", "3=", "44+", "5"]
    assert [prompt.token_ids[-1] == EOS for prompt in found] == [True, True, False, False, True]
    assert [prompt.row["prompt"] for prompt in found] == prompts


@one_text
def test_a_copied_script_names_the_default_file_that_is_missing(script, run, refuses, tmp_path):
    """The default policy and dataset lie beside the script. A copy without them stops, and the message names the path
    that is missing. The copy accepts other paths."""
    shutil.copy(script.__file__, tmp_path / f"copied_{script.__name__}.py")
    copied = import_file(tmp_path / f"copied_{script.__name__}.py")
    policy, dataset = (str(tmp_path / "benchmark" / "default" / name) for name in ("policy", "train.jsonl"))
    assert (copied.Args.model_path, copied.Args.dataset) == (policy, dataset)
    refuses(copied, policy, model_path=policy)
    refuses(copied, dataset, dataset=dataset)
    run(copied, total_episodes=3, batch_size=3)  # other paths


def test_defaults_that_the_model_decides(script, tmp_path):
    """The learning rate and the length of a completion. What is given is taken."""
    (tmp_path / "link").symlink_to(HERE / "benchmark" / "default" / "policy")
    own, other = {"ppo": (5e-5, 3e-6)}.get(script.__name__, (1e-4, 1e-6))
    mine = dict(model_path="me/mine")
    cases = [({}, own, 8), (dict(model_path=str(tmp_path / "link"), lora_r=2), own, 8), (mine, other, 256)]
    cases += [(mine | dict(lora_r=2), 1e-5, 256), (dict(learning_rate=0.0), 0.0, 8)]
    cases += [(mine | dict(response_length=9), other, 9)]
    for flags, learning_rate, response_length in cases:
        args = script.Args(**flags)
        assert (args.learning_rate, args.response_length) == (learning_rate, response_length), flags
