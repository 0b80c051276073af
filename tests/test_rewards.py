"""Rewards and reward models: how they are called and found, and what a score is made of."""

import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import accelerate
from conftest import (
    EOS,
    HERE,
    VOCAB,
    base_flags,
    changed,
    column,
    fresh_imports,
    launched,
    make_tokenizer,
    one_text,
    only,
    read_jsonl,
    read_rollouts,
    save_classifier,
    write_jsonl,
)
from pytest import approx, mark, raises


def messages(text, role="user"):
    return [{"role": role, "content": text}]


@one_text
def test_a_reward_is_called_as_trl_calls_it(script, run, tmp_path, world):
    """It is called once in an iteration, by keywords: prompts, completions, completion_ids, and
    each other column.

    Every keyword has a list. completion_ids include the EOS. A column that a row lacks is None
    there. Where the prompt of a row is a list of messages, its completion is one, too. The reward
    `record` empties what it gets. Neither its group nor a later draw of its prompt sees that.

    Bug: trl#3283 (one generation for every micro-batch)."""
    rows = [
        {"prompt": "1+1=", "answer": "2", "tags": ["a"]},
        {"prompt": messages("22"), "answer": 4, "tags": [], "level": "hard"},
    ]
    ran = run(
        script,
        dataset=write_jsonl(tmp_path / "data.jsonl", rows),
        reward="record",
        num_train_epochs=12,
        batch_size=24,
    )
    given = read_jsonl(world.folder / "recorded.jsonl")
    for of_episode, row in zip(given, ran.rollouts, strict=True):
        expected = {"level": None} | rows[row["row"]] | {"count": 24}
        expected["prompts"] = expected.pop("prompt")
        expected["completions"] = row["completion"]
        if row["row"] == 1:
            expected["completions"] = messages(row["completion"], "assistant")
        assert of_episode == expected | {"completion_ids": row["token_ids"]}
    assert {row["token_ids"][-1] == EOS for row in ran.rollouts} == {True, False}


PLACES = """
import pathlib

def score(prompts, completions, level, **_):
    texts = [c if isinstance(p, str) else c[0]["content"] for p, c in zip(prompts, completions)]
    pathlib.Path(__file__).with_name("scored").open("a").write("x" * len(texts))
    places = []
    for first in range(0, len(texts), 3):
        group = texts[first : first + 3]
        places += [sum(other < text for other in group) for text in group]
    return [place * (own or 0) for place, own in zip(places, level)]
"""


@one_text
@mark.slow
def test_processes_score_whole_groups_of_any_rows(script, elsewhere, tmp_path):
    """A reward that compares the completions of a prompt gives the same run on three processes,
    also where one has only texts, another one only chats, with a column that texts lack, and the
    third one nothing. No completion is scored twice. Scores of texts are equal: some updates have
    fewer episodes than there are processes, and some have none."""
    chat = {"prompt": messages("22"), "level": 5}
    rows = [{"prompt": "1+1="}, chat, {"prompt": "3"}, chat]
    dataset = write_jsonl(tmp_path / "data.jsonl", rows)
    (tmp_path / "mine.py").write_text(PLACES)
    flags = dict(
        dataset=dataset,
        eval_dataset=dataset,
        reward=f"{tmp_path}/mine.py:score",
        batch_size=6,
        num_train_epochs=4.0,
        num_ppo_epochs=2,
        # A KL would be rounding at first, and so would the advantage of the middle place. Adam
        # would make it large.
        kl_coef=0.0,
        eval_k=3,
        eval_temperature=1.0,
    )
    alone, _ = elsewhere(script, 3, **flags)
    assert {line["grad_norm"] == 0 for line in alone.metrics[1:]} == {True, False}
    count = len(alone.rollouts + alone.eval_rollouts)
    assert (tmp_path / "scored").read_text() == "x" * 2 * count  # by both runs


@one_text
def test_exact_match(script):
    """The stripped completion is compared with the answer, in rows of text and of chat. The answer
    may be a number."""
    completions = [" 4", "4x", messages("4", "assistant"), messages(" 5\n", "assistant")]
    assert script.exact_match(completions, ["4\n", "4", 4, "5"]) == [1, 0, 1, 1]


@one_text
def test_rewards_may_be_lists_arrays_or_tensors(script, run):
    """They give the same scores. A tensor may have a gradient and any type, and a list may hold
    tensors."""
    expected = column(run(script, total_episodes=12).rollouts, "score")
    for name in ("numpy_array", "tensor", "tensors", "bfloat16"):
        rows = run(script, reward=name, total_episodes=12).rollouts
        assert column(rows, "score") == approx(expected, rel=2**-8), name


DRAWS = """
import random, numpy, torch
def score(prompts, **_):
    return [random.random() + numpy.random.rand() + torch.rand(()).item() for _ in prompts]
"""


@one_text
def test_random_numbers_of_a_reward_are_those_of_its_iteration(script, run, tmp_path, monkeypatch):
    """Whatever was drawn before, as after a resume on other processes. No number comes twice."""
    (tmp_path / "mine.py").write_text(DRAWS)
    flags = dict(reward=f"{tmp_path}/mine.py:score", batch_size=6)
    expected = column(run(script, **flags).rollouts, "score")
    assert len(set(expected)) == len(expected)
    monkeypatch.setattr(script, "save_checkpoint", lambda *_: accelerate.utils.set_seed(7))
    assert column(run(script, **flags).rollouts, "score") == expected


@mark.slow
def test_random_numbers_of_two_processes(world, tmp_path):
    """In a reward they differ. After it they are equal again, so `main` may draw some."""
    line = "        ref_logprobs = None\n"
    drawn = '        print(f"drawn {iteration} {torch.rand(()).item()}\\n", end="")\n'  # One write.
    copy = changed("rloo", tmp_path, texts={line: line + drawn})
    (tmp_path / "mine.py").write_text(DRAWS)
    flags = base_flags(world, dict(reward=f"{tmp_path}/mine.py:score", batch_size=6))
    printed = launched(copy, 2, tmp_path, flags)
    scores = column(read_rollouts(tmp_path / "out"), "score")
    assert len(set(scores)) == len(scores)
    lines = re.findall("drawn .*", printed)
    assert len(lines) == 8 and len(set(lines)) == 4


FAULTS = {  # what a reward returns for n completions, and what is said of it
    "[1.0] * (n - 1)": "--reward gave 5 scores for 6",
    "[float('nan')] * n": "--reward gave nan for ",
    "[1e39] * n": "--reward gave 1e[+]39 for ",
    "{'a': [1.0] * n, 'b': [1.0]}": "iteration 2: --reward [(]b[)] gave 1 scores for 6",
    "None": "--reward gave None in place of scores",  # A `return` was forgotten.
    "1.0": "--reward gave 1.0 in place of scores",
    "{'a': 1.0}": "--reward [(]a[)] gave 1.0 in place of scores",
    "[[1.0]] * n": "--reward gave \\[\\[1.0], .* in place of scores",
    "numpy.ones((n, 1))": "(?s)--reward gave array.* in place of scores",
    "coroutine()": "--reward gave <coroutine .* in place of scores",
    "{}": "--reward gave {} in place",
    "'1' * n": "--reward gave '111111' in place",
    "b'1' * n": "--reward gave b'111111' in place",
    "{'reward_model': [1.0] * n}": "reward_model",  # A part of this name would be lost.
    "sys.exit()": "--reward has called sys.exit",
    "1 / 0": "^division by zero$",
}


@one_text
@mark.parametrize("fault", FAULTS)
def test_a_faulty_reward_stops_the_run(script, run, updates, tmp_path, fault):
    """No update of that iteration is made, and no model is written. What the reward raises is
    raised as it is."""
    file = tmp_path / "mine.py"
    file.write_text(f"""
import sys, numpy
calls = 0
async def coroutine(): pass
def score(prompts, **_):
    global calls
    calls += 1
    n = len(prompts)
    return {fault} if calls == 2 else [1.0] * n
""")
    reward_model = "classifier" if "reward_model" in fault else None
    flags = dict(reward=f"{file}:score", reward_model_path=reward_model, batch_size=6)
    with raises(Exception, match=FAULTS[fault]):
        run(script, output_dir=tmp_path, **flags)
    assert len(updates) == len(read_jsonl(tmp_path / "metrics.jsonl")) == 1
    assert not (tmp_path / "model").exists()


@only("rloo", "grpo")
def test_large_scores_keep_their_differences(script, run):
    """2^24, 2^24 + 1 and 2^24 + 2 are three scores. In float32 they would be two."""
    rows = run(script, kl_coef=0, reward="large").rollouts
    step = 1.5 if script.__name__ == "rloo" else 1 / 1.0001
    assert [row["advantage"] for row in rows] == approx([-step, 0, step] * 7)


REWARD_FILES = {
    "mine.py": "import neighbour, tabnanny\ndef score(): return neighbour.VALUE",
    "neighbour.py": "VALUE = 7",
    "tabnanny.py": "raise AssertionError('not the library')",
    "json.py": "def score(): return 3",
    "sys.py": "def exit(): return 1",
    "my.own.py": "def score(): return 1",
    "pack/inner.py": "def score(): return 1",
}


@one_text
def test_a_reward_of_a_package_and_of_a_file(script, tmp_path, monkeypatch):
    """FILE.py:FUNCTION and package.module:FUNCTION. A file may use its neighbours, which hide no
    library. A pool of processes finds its functions. A file whose name another module has is
    refused, and so is one that was edited. Python says what it cannot import.

    This calls a function of the script, since a run would forget the modules of the run before."""
    monkeypatch.chdir(tmp_path)
    Path("pack").mkdir()
    for name, text in REWARD_FILES.items():
        Path(name).write_text(text)

    def load(spec):
        args = SimpleNamespace(reward=spec, eval_reward=spec, reward_model_path=None)
        (reward, _), (same, _) = script.load_rewards(args, None, None, 0)
        assert reward is same
        return pickle.loads(pickle.dumps(reward))

    with fresh_imports():
        assert load("mine.py:score")() == 7
        assert load("pack.inner:score")() == 1
        Path("mine.py").write_text("def score(): return 8")
        for spec, error, said in (
            ("mine.py:score", script.UsageError, "an older text of it; .* restart the kernel"),
            ("json.py:score", script.UsageError, "Python has loaded another json, .* rename the"),
            ("sys.py:exit", script.UsageError, "another sys"),
            ("my.own.py:score", ModuleNotFoundError, "No module named 'my'"),
            ("nothing.py:score", FileNotFoundError, "nothing.py"),
            ("pack.inner:nothing", AttributeError, "'pack.inner' has no attribute 'nothing'"),
            ("nothing", script.UsageError, "must be exact_match, FILE.py:FUNCTION or none"),
        ):
            with raises(error, match=said):
                load(spec)


@one_text
def test_the_reward_file_of_reward_models(script, run, refuses, world, tmp_path, monkeypatch):
    """benchmark/reward_model.py gives the scores of transformers, one episode at a time: a text in
    the reward model's own tokens, and a chat as its own template shows it, with its end.

    The model's pad is not that of its tokenizer. A model without a trained head is refused."""
    tokenizer = make_tokenizer(vocab=VOCAB[::-1])
    tokenizer.chat_template += "<eos>"
    path, model = save_classifier(tmp_path / "rm", tokenizer=tokenizer)
    rows = [{"prompt": "1+1="}, {"prompt": messages("22")}]
    dataset = write_jsonl(tmp_path / "data.jsonl", rows)
    flags = dict(dataset=dataset, reward=f"{HERE}/benchmark/reward_model.py:score")
    monkeypatch.setenv("REWARD_MODEL", world.llama)
    refuses(script, "lacks weights: .*score", ValueError, **flags)
    monkeypatch.setenv("REWARD_MODEL", path)
    for row in run(script, **flags).rollouts:
        text = ["1+1={}", "22={}<eos>"][row["row"]].format(row["completion"])
        logits = model(**tokenizer(text, return_tensors="pt")).logits
        assert row["score"] == approx(logits.item(), abs=1e-5)
