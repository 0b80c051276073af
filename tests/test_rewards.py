"""Rewards and reward models: how they are called and found, and what a score is made of."""

import re
import shutil
import sys
import traceback
from types import SimpleNamespace

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


PLACES = """
def score(prompts, completions, level, **_):
    texts = [c if isinstance(p, str) else c[0]["content"] for p, c in zip(prompts, completions)]
    places = []
    for first in range(0, len(texts), 3):
        group = texts[first : first + 3]
        places += [sum(other < text for other in group) for text in group]
    return [place + (own or 0) for place, own in zip(places, level)]
"""


@one_text
@mark.slow
@mark.parametrize("processes", [2, 3])
def test_processes_score_whole_groups_of_any_rows(script, same_on, world, tmp_path, processes):
    """A reward that compares the completions of a prompt gives the same scores on any number of
    processes, also where one process has only texts, and another one only chats, with a column
    that texts lack."""
    chat = {"prompt": messages("22"), "level": 5}
    rows = [{"prompt": "1+1="}, chat, {"prompt": "3"}, chat]
    (tmp_path / "mine.py").write_text(PLACES)
    flags = dict(
        dataset=write_jsonl(tmp_path / "data.jsonl", rows),
        reward=f"{tmp_path}/mine.py:score",
        model_path=chat_policy(world, tmp_path / "policy"),
        batch_size=6,
        # A KL would be rounding at first, and so would the advantage of the middle place. Adam
        # would make it large.
        kl_coef=0.0,
        eval_k=3,
        eval_temperature=1.0,
    )
    same_on(script, processes, flags | dict(eval_dataset=flags["dataset"]))


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


FAULTS = {  # what a reward returns for n completions, and what is said of it
    "[1.0] * (n - 1)": "--reward gave 5 scores for 6",
    "[float('nan')] * n": "--reward gave nan for ",
    "[1e39] * n": "--reward gave 1e[+]39 for ",
    "{'a': [1.0] * n, 'b': [1.0]}": "--reward gave 1 scores for 6",
    "{'reward_model': [1.0] * n}": "reward_model",  # A part of this name would be lost.
    "None": "NoneType",
    "['one'] * n": "'one'",
    "[[1.0, 2.0]] * n": "not 'list'",
    "sys.exit()": "--reward has called sys.exit",
    "1 / 0": "division by zero",
}


@one_text
@mark.parametrize("fault", FAULTS)
def test_a_faulty_reward_stops_the_run(script, run, updates, tmp_path, fault):
    """No update of that iteration is made, and no model is written. What the reward raises is
    raised as it is."""
    file = tmp_path / "mine.py"
    file.write_text(f"""
import sys
calls = 0
def score(prompts, **_):
    global calls
    calls += 1
    n = len(prompts)
    return {fault} if calls == 2 else [1.0] * n
""")
    reward_model = "classifier" if "reward_model" in fault else None
    flags = dict(reward=f"{file}:score", reward_model_path=reward_model, batch_size=6)
    with raises(Exception, match=FAULTS[fault]) as raised:
        run(script, output_dir=tmp_path, **flags)
    assert len(updates) == len(read_jsonl(tmp_path / "metrics.jsonl")) == 1
    assert not (tmp_path / "model").exists()
    if fault == "1 / 0":
        assert traceback.extract_tb(raised.value.__traceback__)[-1].filename == str(file)


REWARD_FILES = {
    "mine.py": """
import colorsys, multiprocessing, neighbour
def length(text): return len(text)
def score(completions, **_):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [neighbour.VALUE + count for count in pool.map(length, completions)]
""",
    "neighbour.py": "VALUE = 7",
    "colorsys.py": "raise AssertionError('not the library')",
    # named like another reward, and like a library
    "other/mine.py": "def score(**_): return 3",
    "other/json.py": "def score(**_): return 4",
    "pack/inner.py": "def score(**_): return 1",
}


@one_text
def test_a_reward_of_a_package_and_of_a_file(script, tmp_path, monkeypatch):
    """package.module:FUNCTION and FILE.py:FUNCTION. A file may use a pool of processes and its
    neighbours, which hide no library. A file whose name another module has is refused.

    This calls a function of the script, since a run would forget the modules of the run before."""
    for name, text in REWARD_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "pack")

    def load(reward, eval_reward=None):
        args = SimpleNamespace(reward=reward, eval_reward=eval_reward, reward_model_path=None)
        functions, eval_functions = script.load_rewards(args, None)
        assert functions == eval_functions  # Two flags may name one file.
        return functions[0]

    mine = f"{tmp_path}/mine.py:score"
    with fresh_imports():
        assert load(mine, mine)(completions=["1", "23"]) == [8, 9]
        (tmp_path / "mine.py").write_text("def score(**_): return 17")
        assert load(mine)() == 17  # In a notebook files are edited between two runs.
        assert load("inner:score")() == 1
        for name in ("other/mine", "other/json", "nothing"):
            with raises(script.UsageError, match="no such file, or another module has its name"):
                load(f"{tmp_path}/{name}.py:score")
        with raises(script.UsageError, match="must be exact_match, FILE.py:FUNCTION or none"):
            load("nothing")


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
