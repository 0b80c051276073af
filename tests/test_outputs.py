"""What a run leaves: rows of its rollouts, models that load, and what a stop string ended."""

import json
import math
import os

import numpy as np
import pytest
from conftest import EOS, VOCAB, column, only, save_model, write_jsonl
from plain import groups_of, without_none
from pytest import approx, fixture, mark
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def test_a_row_of_the_dataset_can_be_joined(script, run, tmp_path):
    """`row` counts dropped prompts, too. `columns` are the other columns. `ended` is not guessed
    from ids. A list has a number for each token, and the named parts of a score are there. nan is
    null."""
    # The note is half of a letter.
    rows = [{"prompt": "1" * n, "score": n, "note": "\ud83d"} for n in (9, 1, 8, 2, 3)]
    for row in rows:
        row["weight"] = math.nan
    ran = run(
        script,
        dataset=write_jsonl(tmp_path / "rows.jsonl", rows),
        max_prompt_length=3,
        model_path="many_eos",
        missing_eos_penalty=100.0,
        response_length=3,
        reward="parts",
    )
    assert set(column(ran.rollouts, "row")) == {1, 3, 4}
    for row in ran.rollouts:
        joined = rows[row["row"]] | {"weight": None}
        assert joined == {"prompt": row["prompt"]} | row["columns"]
        score = row["reward/length"] + row["reward/ones"] - 100 * (not row["ended"])
        assert row["score"] == approx(score)
        lists = [value for value in row.values() if isinstance(value, list)]
        assert {len(values) for values in lists} == {len(row["token_ids"])}
    assert len(set(column(ran.rollouts, "ended"))) == 2
    for name in ("iteration", "step", "episode", "val/num_eos_tokens", "val/num_unscored"):
        assert {type(row[name]) for row in ran.metrics} == {int}


def test_a_saved_config_is_the_models_own(script, run, world, monkeypatch):
    """A run has no dropout. A later fine-tuning of its model has that of the model before. Adapters
    name their model by its whole path, which they keep where they are moved."""
    ran = run(script, model_path="dropout", batch_size=6)
    for folder in [ran.folder / "model", *ran.folder.glob("value_model")]:
        config = json.loads((folder / "config.json").read_text())
        assert (config["attention_dropout"], config["dtype"]) == (0.5, "float32")
    pytest.importorskip("peft")
    monkeypatch.chdir(world.folder)
    adapters = run(script, model_path="./llama", lora_r=2, batch_size=6).folder / "model"
    config = json.loads((adapters / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == world.llama


def test_held_out_completions_are_written(script, run):
    """The rows of one evaluation have its score as their mean. --total-episodes 0 makes only the
    evaluation before training, and writes no model."""
    flags = dict(eval_dataset=5, eval_every=1)
    trained = run(script, **flags)
    evaluated = run(script, **flags, total_episodes=0)
    assert evaluated.metrics == trained.metrics[:1]
    for ran in (trained, evaluated):
        for line, group in zip(ran.metrics, groups_of(ran.eval_rollouts, 5), strict=True):
            assert set(column(group, "iteration")) == {line["iteration"]}
            assert np.mean(column(group, "score")) == approx(line["eval/scores"])
    assert set(os.listdir(evaluated.folder)) == {".lock", "args.yaml", "metrics.jsonl", "rollouts"}


REWARD = """
def score(prompts, completions, **_):
    scores = [len(set(c)) if len(p) % 3 == 0 else 0.1 for p, c in zip(prompts, completions)]
    return [None if "1" in c else score for c, score in zip(completions, scores)]
"""


@only("rloo", "grpo")
def test_groups_with_equal_scores_are_counted(script, run, tmp_path):
    """By scores, not by advantages, which the KL makes different. Missing scores do not count."""
    (tmp_path / "mine.py").write_text(REWARD)
    found = run(script, reward=f"{tmp_path}/mine.py:score", dataset=40, kl_coef=0.5)
    assert None in column(found.rollouts, "score")
    fractions = set()
    for line in found.metrics:
        groups = groups_of(column(found.rows_of(line["iteration"]), "score"))
        fraction = np.mean([len(set(without_none(group))) <= 1 for group in groups])
        assert line["group/equal_scores_fraction"] == approx(fraction)
        fractions.add(fraction)
    assert len(fractions) > 1


# ---- --stop-string

WORDS = ["<pad>", "<eos>", *"abcdef0123456789+-=", "ab", "bc"]


@fixture(scope="module")
def byte_level(tmp_path_factory):
    """A policy with a small byte-level BPE: "ab" is one token, or two, or comes with a "c"."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    backend = Tokenizer(BPE(vocabulary, [("a", "b"), ("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    folder = tmp_path_factory.mktemp("byte_level")
    return save_model(folder, tokenizer=tokenizer, vocab_size=len(WORDS), initializer_range=0.1)


@fixture
def stopping(byte_level, tmp_path):
    """Prompts end with "a". A stop string that is looked for in prompt and completion together is
    found too early."""
    rows = [{"prompt": f"{number}a"} for number in range(16)]
    return dict(
        model_path=byte_level,
        dataset=write_jsonl(tmp_path / "prompts.jsonl", rows),
        stop_string="ab",
        response_length=12,
        num_train_epochs=2.0,
    )


def test_a_stop_string_ends_a_completion(script, run, stopping):
    """It ends with the token that completes the string, which stays in the text with what else that
    token holds."""
    found = run(script, **stopping, missing_eos_penalty=100.0)
    tokenizer = AutoTokenizer.from_pretrained(stopping["model_path"])
    stopped = ""
    begins = ""
    for row in found.rollouts:
        text = row["completion"]
        assert row["ended"] == ("ab" in text or EOS in row["token_ids"]) == (row["score"] > -50)
        assert row["ended"] or len(row["token_ids"]) == 12
        assert "ab" not in tokenizer.decode(row["token_ids"][:-1])
        if "ab" in text:
            stopped += text + "\n"
        if len(row["token_ids"]) > 1:
            begins += text[:1]
    assert "abc\n" in stopped
    assert "ab\n" in stopped
    assert "b" in begins  # This completion did not end there: its "ab" would begin in the prompt.
    ended = sum(row["val/num_eos_tokens"] for row in found.metrics)
    assert ended == sum(row["ended"] for row in found.rollouts)


@only("rloo")
@mark.parametrize("ends", [EOS, VOCAB.index("7")])
def test_a_completion_is_what_the_model_wrote(script, run, ends):
    """A text shows all tokens, special ones, too. It leaves out only a special one at its end."""
    rows = run(script, stop_token_id=ends).rollouts
    for row in rows:
        tokens = [VOCAB[token] for token in row["token_ids"]]
        assert row["completion"] == "".join(tokens).removesuffix("<eos>")
    assert any("<pad>" in row["completion"] for row in rows)
    assert any(row["token_ids"][-1] == ends for row in rows)
