"""Rewards and reward models: how they are called and found, and what a score is made of."""

import json
import pickle
import re
import shutil
import sys
import traceback

import torch
from conftest import (
    EOS,
    MANY_EOS,
    PAD,
    VOCAB,
    column,
    encode,
    fresh_imports,
    make_prompts,
    make_tokenizer,
    one_text,
    only,
    read_jsonl,
    save_classifier,
    write_jsonl,
)
from plain import plain_advantages
from pytest import approx, mark, raises
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ '=' if m['role'] == 'user' else '' }}{% endfor %}"
    "{{ '-' if add_generation_prompt else mark }}"
)


def messages(text, role="user"):
    return [{"role": role, "content": text}]


def chat_policy(world, folder):
    """The usual policy, with a chat template."""
    shutil.copytree(world.llama, folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@one_text
def test_a_reward_is_called_as_trl_calls_it(script, run, tmp_path, world):
    """It is called once in an iteration, by keywords: prompts, completions, completion_ids, and
    each other column.

    Every keyword has a list. completion_ids include the EOS. A column that a row lacks is None
    there. Where the prompt of a row is a list of messages, its completion is one, too.

    Bug: trl#3283 (one generation for every micro-batch)."""
    chat = {"prompt": messages("22"), "answer": 4, "level": "hard"}
    rows = [{"prompt": "1+1=", "answer": "2"}, chat]
    ran = run(
        script,
        dataset=write_jsonl(tmp_path / "data.jsonl", rows),
        reward="record",
        model_path=chat_policy(world, tmp_path / "policy"),
        num_train_epochs=12,
        batch_size=24,
    )
    calls = read_jsonl(world.folder / "recorded.jsonl")
    assert len(calls) == len(ran.metrics)
    given = []
    for call in calls:
        for values in zip(*call.values(), strict=True):
            given.append(dict(zip(call, values)))
    ends = set()
    for of_episode, row in zip(given, ran.rollouts, strict=True):
        expected = {
            "prompts": "1+1=",
            "completions": row["completion"],
            "completion_ids": row["token_ids"],
            "answer": "2",
            "level": None,
        }
        is_chat = row["prompt"] == "22=-"
        if is_chat:
            expected |= {"prompts": messages("22"), "answer": 4, "level": "hard"}
            expected["completions"] = messages(row["completion"], "assistant")
        assert of_episode == expected
        ends.add((is_chat, row["token_ids"][-1] == EOS))
    assert len(ends) == 4


@one_text
def test_a_reward_must_take_the_columns(script, refuses, tmp_path, monkeypatch):
    """Else the run stops before a model is loaded. The message lists what the reward gets. Held-out
    rows may have other columns."""
    (tmp_path / "mine.py").write_text(
        "def score(completions, completion_ids, prompts, answer): 0\n"
        "def wrapper(**_): 0\n"
        "wrapper.__wrapped__ = score"
    )
    monkeypatch.setattr(script, "load_model", None)
    mine = f"{tmp_path}/mine.py:score"
    answer, level, reserved = [
        write_jsonl(tmp_path / f"{i}.jsonl", [{"prompt": "1"} | columns])
        for i, columns in enumerate([{"answer": 2}, {"level": 3}, {"completions": 4}])
    ]
    for flags, said in (
        (dict(reward=mine, dataset=level), "level: missing .* 'answer'"),
        (dict(reward=mine, dataset=answer, eval_dataset=level), "level: missing .* 'answer'"),
        (dict(reward="none", dataset=answer, eval_dataset=level, eval_reward=mine), "missing"),
        (dict(reward="none", dataset=reserved), "multiple values .* 'completions'"),
    ):
        refuses(script, f"gets prompts, completions, completion_ids, .*{said}", **flags)
    for reward, dataset in ((mine, answer), (mine.replace("score", "wrapper"), level)):
        with raises(TypeError):  # `load_model` is None.
            refuses(script, reward=reward, dataset=dataset)


@only("rloo")
def test_exact_match(script):
    """The stripped completion is compared with the answer, in rows of text and of chat. The answer
    may be a number."""
    completions = [" 4", "4x", messages("4", "assistant"), messages(" 5\n", "assistant")]
    scores = script.exact_match(completions=completions, answer=["4\n", "4", 4, "5"], prompts=[])
    assert scores == [1, 0, 1, 1]
    assert script.load_reward("exact_match") is script.exact_match


@only("rloo", "grpo")
def test_a_reward_that_names_its_prompt_comes_back_to_it(script, run):
    """Every episode has the score of its own prompt, also where a prompt is drawn twice in an
    iteration. A reward that depends on the prompt alone has advantage 0.

    Bug: trl#6228 (advantages of other prompts)."""
    flags = dict(num_train_epochs=3, batch_size=24, per_device_rollout_batch_size=5, kl_coef=0)
    ran = run(script, reward="number", **flags)
    for row in ran.rollouts:
        assert row["score"] == make_prompts(7).index(row["prompt"])
        assert row["advantage"] == 0
    for row in ran.metrics:
        assert row["grad_norm"] == 0


@one_text
def test_rewards_may_be_lists_arrays_or_tensors(script, run):
    """They give the same scores. A tensor may have a gradient and any type, and a list may hold
    tensors."""
    expected = column(run(script, total_episodes=12).rollouts, "score")
    for name in ("numpy_array", "tensor", "tensors", "bfloat16"):
        rows = run(script, reward=name, total_episodes=12).rollouts
        rounding = 2**-8 if name == "bfloat16" else 1e-6
        assert column(rows, "score") == approx(expected, rel=rounding), name


@one_text
def test_a_reward_may_change_what_it_gets(script, run, tmp_path):
    """Each episode has its own copy. Neither its group nor a later draw of its prompt sees a
    change."""
    rows = [{"prompt": prompt, "tags": ["a"] * 5} for prompt in ("1+1=", "2+2=")]
    dataset = write_jsonl(tmp_path / "tags.jsonl", rows)
    flags = dict(dataset=dataset, total_episodes=24)  # Each prompt is drawn four times.
    expected = run(script, **flags).rollouts
    changed = run(script, reward="changing", **flags).rollouts
    assert column(changed, "token_ids") == column(expected, "token_ids")
    assert column(changed, "score") == approx([4 + row["score"] for row in expected])


@only("rloo", "grpo")
def test_large_scores_keep_their_differences(script, run):
    """2^24, 2^24 + 1 and 2^24 + 2 are three scores. In float32 they would be two."""
    rows = run(script, kl_coef=0, reward="large").rollouts
    step = 1.5 if script.__name__ == "rloo" else 1 / 1.0001
    assert [row["advantage"] for row in rows] == approx([-step, 0, step] * 7)


@one_text
def test_the_kl_alone_may_be_the_reward(script, run):
    """--reward none with a --ref-model-path: all scores are 0."""
    rows = run(script, reward="none", ref_model_path="reference").rollouts
    assert set(column(rows, "score")) == {0.0}
    rewards = []
    for row in rows:
        rewards.append(-0.05 * (sum(row["logprobs"]) - sum(row["ref_logprobs"])))
    expected = plain_advantages(script, rewards)
    assert column(rows, "advantage") == approx(expected, abs=1e-5)


FAULTS = """
wrong_count forgotten unordered coroutine unequal nan inf huge text rows array_column empty
one_text one_bytes texts
""".split()


@one_text
@mark.filterwarnings("ignore:coroutine")
@mark.parametrize("fault", [*FAULTS, "raises"])
def test_a_faulty_reward_stops_the_run(script, run, world, updates, tmp_path, fault):
    """No update of that iteration is made. A score [n, 1] minus a penalty [n] would be [n, n]. What
    the reward raises is raised as it is."""
    with raises(Exception) as raised:
        run(script, reward=fault, output_dir=tmp_path, batch_size=6, num_train_epochs=2)
    assert len(updates) == len(read_jsonl(tmp_path / "metrics.jsonl")) == 1
    assert not (tmp_path / "model").exists()
    if fault == "raises":
        assert raised.type is KeyError
        frame = traceback.extract_tb(raised.value.__traceback__)[-1]
        assert frame.filename == str(world.folder / "rewards.py")
    else:
        assert raised.type is script.UsageError
        assert "--reward" in str(raised.value)


REWARD_FILES = {
    "mine.py": "import colorsys, neighbour\ndef score(**_): return neighbour.VALUE",
    "neighbour.py": "VALUE = 7",
    "colorsys.py": "raise AssertionError('not the library')",
    # named like another reward, and like a library
    "other/mine.py": "def score(**_): return 3",
    "other/json.py": "def score(**_): return 4",
    "pack/inner.py": "def score(**_): return 1",
    "my.reward.py": "import neighbour\ndef score(**_): return 5",
}


@only("rloo")
def test_a_reward_of_a_package_and_of_a_file(script, tmp_path, monkeypatch):
    """package.module:FUNCTION and FILE.py:FUNCTION. A file beside a reward hides no library of the
    same name. The file that was named is loaded, also where another reward or a library has its
    name."""
    for name, text in REWARD_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "pack")
    load = script.load_reward
    with fresh_imports():
        mine = load(f"{tmp_path}/mine.py:score")
        assert mine() == 7
        assert load(f"{tmp_path}/mine.py:score") is mine  # Two flags name one file.
        assert mine.__module__ == "mine"  # A pool of new processes imports it.
        (tmp_path / "mine.py").write_text("def score(**_): return 17")
        script.import_file.cache_clear()  # A new run does this. In a notebook files are edited.
        mine = load(f"{tmp_path}/mine.py:score")
        assert mine() == 17
        assert pickle.loads(pickle.dumps(mine)) is mine
        assert load(f"{tmp_path}/other/mine.py:score")() == 3
        assert load(f"{tmp_path}/other/json.py:score")() == 4
        assert sys.modules["json"] is json
        dotted = load(f"{tmp_path}/my.reward.py:score")
        assert dotted() == 5
        assert pickle.loads(pickle.dumps(dotted)) is dotted
        assert load("inner:score")() == 1
        for name in (f"{tmp_path}/mine.py:nothing", f"{tmp_path}/nothing.py:score", "nothing"):
            with raises(script.UsageError, match="--reward .*nothing"):
                load(name)


def test_order_of_a_score(script, run):
    """The penalty of a missing EOS comes first, then PPO's clip, then the KL. Evaluation has the
    score without them."""
    flags = dict(
        reward="five",
        missing_eos_penalty=3.0,
        kl_coef=0.5,
        ref_model_path="reference",
        model_path="many_eos",
    )
    score = 5.0
    if script.__name__ == "ppo":
        score = flags["score_clip"] = 2.5
    ran = run(script, **flags, eval_dataset=5)
    for row in ran.rollouts:
        assert row["score"] == (score if row["token_ids"][-1] in MANY_EOS else 2.0)
    assert set(column(ran.rollouts, "score")) == {score, 2.0}
    assert ran.metrics[0]["eval/scores"] == 5.0


@one_text
def test_evaluation_has_a_reward_of_its_own(script, run):
    """--eval-reward replaces --reward and the reward model."""
    flags = dict(eval_dataset=5, total_episodes=0, reward="five", reward_model_path="classifier")
    [line] = run(script, **flags).metrics
    assert line["eval/scores"] != approx(5.0, abs=1e-3)
    [line] = run(script, **flags, eval_reward="number").metrics
    assert line["eval/scores"] == 2.0  # of 0 to 4


@one_text
def test_two_parts_of_one_name_are_refused(script, run):
    """One of them would be lost."""
    with raises(script.UsageError, match="another part"):
        run(script, reward="reserved", reward_model_path="classifier")


@torch.no_grad()
def plain_score(model, token_ids):
    """The head at the last token: one sequence, no padding."""
    hidden = model.model(torch.tensor([token_ids])).last_hidden_state
    return approx(model.score(hidden[0, -1]).item(), abs=1e-5)


@mark.parametrize("policy, pad", [("llama", PAD), ("pad_is_eos", EOS), ("emits_pad", PAD)])
@one_text
def test_reward_model_reads_the_episode_with_its_eos(script, run, tmp_path, policy, pad):
    """A reward model with the policy's vocabulary reads the token ids of prompt and completion, the
    EOS included.

    Its score is read at the last token, also where pad is EOS, and where the policy emits pad. It
    is added to that of --reward."""
    tokenizer = make_tokenizer(VOCAB[pad])
    path, model = save_classifier(tmp_path / "rm", pad_token_id=pad, tokenizer=tokenizer)
    flags = dict(model_path=policy, kl_coef=0, per_device_train_batch_size=5, total_episodes=24)
    ends = set()
    for row in run(script, reward="five", reward_model_path=path, **flags).rollouts:
        score = row["reward/reward_model"]
        assert score == plain_score(model, encode(row["prompt"]) + row["token_ids"])
        assert row["score"] == approx(score + 5, abs=1e-4)
        ends.add(row["token_ids"][-1] == EOS)
    assert len(ends) == 2


@mark.parametrize("ends_with_eos", [False, True, None])
@one_text
def test_reward_model_of_another_vocabulary_reads_the_text(
    script, run, world, tmp_path, ends_with_eos
):
    """It reads the text in its own tokens. Its own EOS is appended where the episode has ended.

    The policy's template turns chat messages into its prompt. The reward model uses its own
    template, which may end with its EOS. None: its tokenizer has no EOS."""
    vocab = {token: i for i, token in enumerate(reversed(VOCAB))}
    backend = Tokenizer(WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<eos>|<pad>|[\s\S]"), "isolated")
    eos = None if ends_with_eos is None else "<eos>"
    reader = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token=eos)
    reader.chat_template = CHAT_TEMPLATE.replace("'='", "'+'")
    if ends_with_eos:
        reader.chat_template += eos
    path, model = save_classifier(tmp_path / "rm", tokenizer=reader)
    chat = {"prompt": messages("22"), "chat_template_kwargs": {"mark": "9"}}
    rollouts = run(
        script,
        model_path=chat_policy(world, tmp_path / "policy"),
        dataset=write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "1+1="}, chat]),
        reward="none",
        reward_model_path=path,
        kl_coef=0,
        batch_size=36,
        num_train_epochs=6,
    ).rollouts
    cases = set()
    for row in rollouts:
        text = row["prompt"] + row["completion"]
        is_chat = row["prompt"] == "22=-"
        if is_chat:
            text = "22+" + row["completion"] + "9"
        has_ended = row["token_ids"][-1] == EOS
        token_ids = [vocab[token] for token in re.findall(r"<pad>|.", text)]
        if (has_ended and eos) or (is_chat and ends_with_eos):
            token_ids.append(vocab["<eos>"])
        assert row["score"] == plain_score(model, token_ids)
        cases.add((is_chat, has_ended))
    assert len(cases) == 4


@one_text
def test_a_reward_model_without_a_head_of_one_label_is_refused(script, refuses, world, tmp_path):
    """BERT's head has another name, and reads the first token."""
    three, _ = save_classifier(tmp_path / "three", labels=3)
    bert, _ = save_classifier(tmp_path / "bert", architecture="bert")
    headless = world.reference
    for path in (three, bert, headless):
        refuses(script, "score", reward="none", reward_model_path=path, error=Exception)
