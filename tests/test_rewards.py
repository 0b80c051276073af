"""Rewards and reward models: how they are called and found, the order of a score, which scores come from where."""

import json
import pickle
import shutil
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    EOS,
    MANY_EOS,
    PAD,
    VOCAB,
    base_flags,
    encode,
    fresh_imports,
    make_args,
    make_prompts,
    make_tokenizer,
    one_text,
    only,
    read_jsonl,
    reset_accelerate,
    save_classifier,
    write_jsonl,
)
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

RECORDING = '''
import json, pathlib

def record(**inputs):
    """Writes down all that it is called with."""
    assert all(isinstance(values, list) for values in inputs.values()), inputs
    with open(pathlib.Path(__file__).with_suffix(".jsonl"), "a") as file:
        file.write(json.dumps(inputs) + "\\n")
    return [float(len(ids)) for ids in inputs["completion_ids"]]
'''
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ '=' if m['role'] == 'user' else '' }}{% endfor %}"
    "{{ '-' if add_generation_prompt else mark }}"
)


def user(text):
    return [{"role": "user", "content": text}]


def chat_policy(world, folder):
    """The usual policy, with a chat template."""
    policy, tokenizer = shutil.copytree(world.llama, folder), make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(policy)
    return str(policy)


@one_text
def test_a_reward_is_called_as_trl_calls_it(script, run, tmp_path, world):
    """It is called once in an iteration, by keywords: prompts, completions, completion_ids, and each other column.

    Every keyword has a list. completion_ids include the EOS. A column that a row lacks is None there. Where the prompt
    of a row is a list of messages, its completion is one, too."""
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": user("22"), "answer": 4, "level": "hard"}]
    (tmp_path / "recording.py").write_text(RECORDING)
    flags = dict(dataset=write_jsonl(tmp_path / "data.jsonl", rows), reward=f"{tmp_path / 'recording.py'}:record")
    flags |= dict(model_path=chat_policy(world, tmp_path / "policy"), num_train_epochs=12, batch_size=24)
    ran = run(script, **flags)
    calls, episodes = read_jsonl(tmp_path / "recording.jsonl"), ran.rollouts
    assert len(calls) == len(ran.metrics)
    names = {"prompts", "completions", "completion_ids", "answer", "level"}
    assert all(set(call) == names for call in calls)
    called = {name: [x for call in calls for x in call[name]] for name in calls[0]}
    assert called["completion_ids"] == [row["token_ids"] for row in episodes]
    assert any(ids[-1] == EOS for ids in called["completion_ids"])
    assert {row["prompt"] for row in episodes} == {"1+1=", "22=-"}
    for i, row in enumerate(episodes):
        is_chat = row["prompt"] != "1+1="
        assert called["prompts"][i] == (user("22") if is_chat else "1+1=")
        expected = [{"role": "assistant", "content": row["completion"]}] if is_chat else row["completion"]
        assert called["completions"][i] == expected
        assert (called["answer"][i], called["level"][i]) == ((4, "hard") if is_chat else ("2", None))
        assert row["score"] == len(row["token_ids"])


@only("rloo")
def test_exact_match(script, run, tmp_path, world):
    """The stripped completion is compared with the answer, in rows of text and of chat. The answer may be a number."""
    chats = [[{"role": "assistant", "content": text}] for text in ("4", " 5\n")]
    assert script.exact_match(completions=[" 4", "4x", *chats], answer=["4", "4", 4, "5"], prompts=[]) == [1, 0, 1, 1]
    rows = [{"prompt": user(text), "answer": answer} for text in ("1", "2", "3") for answer in ("", 5, "a")]
    flags = dict(dataset=write_jsonl(tmp_path / "chat.jsonl", rows), reward="exact_match", batch_size=96)
    flags |= dict(model_path=chat_policy(world, tmp_path / "policy"), response_length=2, num_train_epochs=4)
    episodes = run(script, **flags).rollouts
    assert 0 < sum(row["score"] for row in episodes) < len(episodes)
    assert {row["completion"].strip() for row in episodes if row["score"]} <= {"", "5", "a"}


@only("rloo", "grpo")
def test_a_reward_that_names_its_prompt_comes_back_to_it(script, run, world):
    """Every episode has the score of its own prompt, also where a prompt is drawn twice in an iteration; a reward that
    depends on the prompt alone has advantage 0."""
    flags = dict(num_train_epochs=3, batch_size=24, per_device_rollout_batch_size=5, kl_coef=0)
    ran = run(script, reward=world.reward("number"), **flags)
    prompts, rows = make_prompts(7), ran.rollouts
    assert len({row["score"] for row in rows}) == 7
    assert all(row["score"] == prompts.index(row["prompt"]) and row["advantage"] == 0 for row in rows)
    assert all(row["grad_norm"] == 0 for row in ran.metrics)


@one_text
def test_rewards_may_be_lists_arrays_or_tensors(script, run, world):
    """They give the same scores. A tensor may have a gradient and any type, and a list may hold tensors. But [n, 1] is
    refused: minus a penalty [n] it would be [n, n]."""
    scores = {}
    for name in ("letters", "numpy_array", "tensor", "tensors", "bfloat16"):
        rows = run(script, reward=world.reward(name), total_episodes=12).rollouts
        scores[name] = [row["score"] for row in rows]
    for name, found in scores.items():
        assert found == pytest.approx(scores["letters"], rel=2**-8 if name == "bfloat16" else 1e-6), name
    for name, score in dict(one_column=r"\[", array_column=r"array\(\[", list_of_columns=r"tensor\(\[").items():
        with pytest.raises(script.UsageError, match=f"the score {score}.*; it must be one finite number, or None"):
            run(script, reward=world.reward(name), total_episodes=12)


CHANGING = """
from rewards import letters

def changing(prompts, completions, completion_ids, tags, **_):
    # Each completion takes the last tag of its row. The score counts the tags that are left.
    for ids, own in zip(completion_ids, tags):
        ids.clear()
        own.pop()
    return [len(own) + score for own, score in zip(tags, letters(prompts, completions))]
"""


@one_text
def test_a_reward_may_change_what_it_gets(script, run, world, tmp_path):
    """Each episode has its own copy. Neither its group nor a later draw of its prompt sees a change."""
    (world.folder / "changing.py").write_text(CHANGING)
    rows = [{"prompt": prompt, "tags": ["a"] * 5} for prompt in ("1+1=", "2+2=")]
    flags = dict(dataset=write_jsonl(tmp_path / "tags.jsonl", rows), total_episodes=24, batch_size=12)  # drawn twice
    expected = run(script, reward=world.reward("letters"), **flags).rollouts
    changed = run(script, reward=f"{world.folder / 'changing.py'}:changing", **flags).rollouts
    assert [row["token_ids"] for row in changed] == [row["token_ids"] for row in expected]
    assert [row["score"] for row in changed] == pytest.approx([4 + row["score"] for row in expected])


@one_text
def test_a_reward_may_change_the_folder(script, world, tmp_path, monkeypatch):
    """The output folder is still the one that was given."""
    (tmp_path / "moving.py").write_text(
        "import os\nfrom rewards import letters\n\ndef moving(**inputs):\n    os.makedirs('inner')\n"
        "    os.chdir('inner')\n    return letters(**inputs)\n"
    )
    shutil.copy(world.folder / "rewards.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    reset_accelerate()
    flags = base_flags(world) | dict(output_dir="out", reward=f"{tmp_path / 'moving.py'}:moving")
    with fresh_imports():
        script.main(make_args(script, **flags))
    assert Path.cwd() == tmp_path / "inner" / "inner" and (tmp_path / "out" / "model").exists()


@one_text
def test_what_a_reward_is_called_with_is_named(script, run, tmp_path):
    """A function that needs another column is refused before it is called. A TypeError of its own stays as it is."""
    (tmp_path / "wrong.py").write_text(
        "def missing(completions, solution, **_):\n    return []\n\n"
        "def surplus(completions):\n    return []\n\ndef own(**_):\n    raise TypeError('mine')\n"
    )
    called = "--reward, which is called with prompts, completions, completion_ids, answer, number: "
    faults = {"missing": "missing a required argument: 'solution'", "surplus": "got an unexpected keyword argument"}
    for name, message in faults.items():
        with pytest.raises(script.UsageError, match=called + message):
            run(script, reward=f"{tmp_path / 'wrong.py'}:{name}")
    with pytest.raises(TypeError, match="^mine$"):
        run(script, reward=f"{tmp_path / 'wrong.py'}:own")


@only("rloo", "grpo")
def test_large_scores_keep_their_differences(script, run, monkeypatch):
    """2^24, 2^24 + 1 and 2^24 + 2 are three scores. In float32 they would be two."""
    large = [2.0**24, 2.0**24 + 1, 2.0**24 + 2]
    monkeypatch.setattr(script, "load_reward", lambda *_: lambda prompts, **_: large * (len(prompts) // 3))
    rows = run(script, kl_coef=0).rollouts
    step = 1.5 if script.__name__ == "rloo" else 1 / 1.0001
    assert [row["advantage"] for row in rows] == pytest.approx([-step, 0, step] * 7)


@one_text
def test_the_kl_alone_may_be_the_reward(script, run, world):
    """--reward none with a --ref-model-path: all scores are 0."""
    rows = run(script, reward="none", ref_model_path=world.reference).rollouts
    kl = torch.tensor([sum(row["logprobs"]) - sum(row["ref_logprobs"]) for row in rows])
    assert {row["score"] for row in rows} == {0.0} and kl.std() > 0.5
    assert [row["advantage"] for row in rows] == pytest.approx(script.rloo_advantages(-0.05 * kl, 3).tolist(), abs=1e-5)


@one_text
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_faulty_reward_stops_the_run(script, run, world, updates, tmp_path):
    """What the reward raises is raised as it is. What it returns is named, with the iteration. No update of that
    iteration is made. In float32 the score `huge` would be inf."""
    returned = dict(wrong_count="5 scores", forgotten="None", coroutine="<coroutine .*")
    faults = {name: f"iteration 2: --reward returned {words} for 6 completions" for name, words in returned.items()}
    faults = {name: (script.UsageError, message) for name, message in faults.items()}
    gave = dict(nan="nan", inf="inf", huge=r"1e\+39", text="'one'", rows="{'score': ")
    for name, score in gave.items():
        message = f"iteration 2: --reward gave a completion of '[^']+' the score {score}.*; .* return one dict of lists"
        faults[name] = script.UsageError, message
    faults["unequal"] = script.UsageError, "iteration 2: --reward b returned 5 scores for 6 completions"
    faults |= dict.fromkeys(("reserved", "empty"), (ValueError, "--reward: .* none may be named reward_model"))
    faults["raises"] = KeyError, "the verifier is gone"
    for fault, (kind, message) in faults.items():
        updates.clear()
        out = tmp_path / fault
        with pytest.raises(kind, match=message) as raised:
            run(script, reward=world.reward(fault), output_dir=str(out), batch_size=6, num_train_epochs=2)
        assert len(updates) == len(read_jsonl(out / "metrics.jsonl")) == 1 and not (out / "model").exists()
        if fault == "raises":
            frame = traceback.extract_tb(raised.value.__traceback__)[-1]
            assert frame.filename == str(world.folder / "rewards.py") and "the verifier is gone" in frame.line


@only("rloo")
def test_a_reward_of_a_package_and_of_a_file(script, tmp_path, monkeypatch):
    """package.module:FUNCTION and FILE.py:FUNCTION. A file beside a reward hides no library of the same name. The file
    that was named is loaded, also where another reward or a library has its name."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "inner.py").write_text("def score(**_):\n    return [1.0]\n")
    for name in ("colorsys", "json"):  # named like a library: one not yet imported, and one that is
        (tmp_path / f"{name}.py").write_text("raise AssertionError('not the library')\n")
    (tmp_path / "tally_neighbour.py").write_text("VALUE = 7\n")
    (tmp_path / "tally_mine.py").write_text(
        "import colorsys, tally_neighbour\n\ndef score(**_):\n    return [tally_neighbour.VALUE, colorsys.ONE_THIRD]\n"
    )
    (tmp_path / "other").mkdir()
    for name, value in (("tally_mine", 3), ("json", 4)):  # named like another reward, and like a library
        (tmp_path / "other" / f"{name}.py").write_text(f"import colorsys\n\ndef score(**_):\n    return [{value}]\n")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with fresh_imports():
        mine = script.load_reward(f"{tmp_path / 'tally_mine.py'}:score")
        assert mine() == [7, 1 / 3] and pickle.loads(pickle.dumps(mine)) is mine  # as a pool of processes needs it
        assert script.load_reward(f"{tmp_path / 'other' / 'tally_mine.py'}:score")() == [3]
        assert script.load_reward(f"{tmp_path / 'other' / 'json.py'}:score")() == [4] and sys.modules["json"] is json
        assert script.load_reward(f"{tmp_path / 'tally_mine.py'}:score") is mine
        monkeypatch.syspath_prepend(tmp_path / "pack")
        assert script.load_reward("inner:score")() == [1.0]
        for spec, error, message in (
            (f"{tmp_path / 'tally_mine.py'}:no_such", script.UsageError, "--reward: .*no_such"),
            (f"{tmp_path / 'no_such_file.py'}:score", script.UsageError, "--reward: .*no_such_file.py"),
            ("no_such_module.inner:score", ModuleNotFoundError, "no_such_module"),
            (f"{tmp_path / 'json.py'}:score", AssertionError, "not the library"),
        ):
            with pytest.raises(error, match=message):
                script.load_reward(spec)
    assert script.load_reward("exact_match") is script.exact_match


def test_order_of_a_score(script, run, world):
    """The penalty of a missing EOS comes first, then PPO's clip, then the KL. Evaluation has the score without them."""
    flags = dict(reward=world.reward("five"), missing_eos_penalty=3.0, kl_coef=0.5, eval_dataset=world.dataset(5))
    flags |= dict(score_clip=2.5) if script.__name__ == "ppo" else {}
    paths = dict(ref_model_path=world.reference, model_path=world.many_eos)
    ran = run(script, **flags, **paths)
    rows, metrics = ran.rollouts, ran.metrics
    ended = [row["token_ids"][-1] in MANY_EOS for row in rows]
    assert any(ended) and not all(ended)
    assert [row["score"] for row in rows] == [flags.get("score_clip", 5.0) if end else 2.0 for end in ended]
    assert metrics[0]["eval/scores"] == metrics[-1]["eval/scores"] == 5.0
    for line in metrics[1:]:
        scores = [row["score"] for row in rows if row["iteration"] == line["iteration"]]
        assert line["objective/scores"] == pytest.approx(np.mean(scores))


@one_text
def test_evaluation_has_a_reward_of_its_own(script, run, world):
    """--eval-reward replaces --reward and the reward model."""
    flags = dict(eval_dataset=world.dataset(5, seed=9), total_episodes=3, learning_rate=0.0)
    flags |= dict(reward=world.reward("five"), reward_model_path=world.classifier)
    assert run(script, **flags)[1][0]["eval/scores"] != pytest.approx(5.0, abs=1e-3)
    assert run(script, **flags, eval_reward=world.reward("number"))[1][0]["eval/scores"] == 2.0  # of 0 to 4


@torch.no_grad()
def plain_score(model, token_ids):
    """The head at the last token: one sequence, no padding."""
    return model.score(model.model(torch.tensor([token_ids])).last_hidden_state[0, -1]).item()


@pytest.mark.parametrize("policy, pad_token_id", [("llama", PAD), ("pad_is_eos", EOS), ("emits_pad", PAD)])
@one_text
def test_reward_model_reads_the_episode_with_its_eos(script, run, world, tmp_path, policy, pad_token_id):
    """A reward model with the policy's vocabulary reads the token ids of prompt and completion, the EOS included.

    Its score is read at the last token, also where pad is EOS, and where the policy emits pad. It is added to that of
    --reward."""
    tokenizer = make_tokenizer("<eos>" if pad_token_id == EOS else "<pad>")
    path, model = save_classifier(tmp_path / "rm", pad_token_id=pad_token_id, tokenizer=tokenizer)
    flags = dict(reward_model_path=path, model_path=getattr(world, policy), kl_coef=0)
    flags |= dict(per_device_train_batch_size=5, total_episodes=36, batch_size=36)
    rows = run(script, reward="none", **flags).rollouts
    assert any(row["token_ids"][-1] == EOS for row in rows) and len({len(row["token_ids"]) for row in rows}) > 2
    for row in rows:
        assert row["score"] == pytest.approx(plain_score(model, encode(row["prompt"]) + row["token_ids"]), abs=1e-5)
    summed = run(script, reward=world.reward("five"), **flags)
    assert [row["score"] for row in summed.rollouts] == pytest.approx([row["score"] + 5 for row in rows], abs=1e-4)
    assert summed.metrics[0]["reward/reward_model"] == pytest.approx(np.mean([row["score"] for row in rows]), abs=1e-5)


@pytest.mark.parametrize("ends_with_eos", [False, True, None])
@one_text
def test_reward_model_of_another_vocabulary_reads_the_text(script, run, world, tmp_path, ends_with_eos):
    """It reads the text in its own tokens. Its own EOS is appended where the episode has ended.

    The policy's template turns chat messages into its prompt. The reward model uses its own template, which may end
    with its EOS. None: its tokenizer has no EOS."""
    vocab = {token: i for i, token in enumerate(["<eos>", "<pad>", *reversed(VOCAB[2:])])}
    backend = Tokenizer(WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<eos>|[\s\S]"), "isolated")
    eos = None if ends_with_eos is None else "<eos>"
    reader = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token=eos)
    reader.chat_template = CHAT_TEMPLATE.replace("'='", "'+'") + "<eos>" * bool(ends_with_eos)
    path, model = save_classifier(tmp_path / "rm", tokenizer=reader)
    rows = [{"prompt": "1+1="}]
    rows += [{"prompt": user(text), "chat_template_kwargs": {"mark": "9"}} for text in ("22", "3")]
    flags = dict(model_path=chat_policy(world, tmp_path / "policy"), kl_coef=0, batch_size=36, num_train_epochs=4)
    flags |= dict(dataset=write_jsonl(tmp_path / "chat.jsonl", rows), reward="none", reward_model_path=path)
    rollouts = run(script, **flags).rollouts
    assert {row["prompt"] for row in rollouts} == {"1+1=", "22=-", "3=-"}
    assert len({row["token_ids"][-1] == EOS for row in rollouts}) == 2
    for row in rollouts:
        is_chat, has_ended = row["prompt"].endswith("-"), row["token_ids"][-1] == EOS
        text = row["prompt"].replace("=-", "+") + row["completion"] + "9" * is_chat
        token_ids = [vocab[character] for character in text]
        token_ids += [vocab["<eos>"]] if eos and has_ended or (is_chat and ends_with_eos) else []
        assert row["score"] == pytest.approx(plain_score(model, token_ids), abs=1e-5)


@one_text
@pytest.mark.parametrize("labels", [3, None, 1])
def test_a_reward_model_without_a_head_of_one_label_is_refused(script, refuses, world, tmp_path, labels):
    """The error names the head, and nothing is written. None: a model without a head. 1: BERT's has another name."""
    architecture, fault = (
        ("bert", "--reward-model-path .*no attribute 'score'") if labels == 1 else ("llama", "score.weight")
    )
    path = save_classifier(tmp_path / "rm", labels, architecture=architecture)[0] if labels else world.reference
    refuses(script, fault, reward="none", reward_model_path=path)
