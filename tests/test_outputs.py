"""What a run leaves: rows of its rollouts, checkpoints that load, and what a stop string ended."""

import json
import os
from functools import partial

import numpy as np
import torch
from conftest import (
    EOS,
    FSDP2,
    KILLS,
    VOCAB,
    base_flags,
    column,
    flat,
    import_file,
    launched,
    only,
    read_jsonl,
    result_of,
    save_model,
    weights_of,
    write_jsonl,
)
from plain import groups_of
from pytest import approx, fixture, mark
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

KEPT = dict(keep_checkpoints=3, save_every=1, num_train_epochs=7.0, response_length=4)


def test_a_row_of_the_dataset_can_be_joined(script, run, tmp_path):
    """`row` counts dropped prompts, too. `columns` are the other columns. `ended` is not guessed
    from ids."""
    # The note is half of a letter.
    rows = [{"prompt": "1" * n, "score": n, "note": "\ud83d"} for n in (9, 1, 8, 2, 3)]
    found = run(
        script,
        dataset=write_jsonl(tmp_path / "rows.jsonl", rows),
        max_prompt_length=3,
        model_path="many_eos",
        missing_eos_penalty=100.0,
        response_length=3,
    ).rollouts
    assert set(column(found, "row")) == {1, 3, 4}
    for row in found:
        assert rows[row["row"]] == {"prompt": row["prompt"]} | row["columns"]
        assert row["ended"] == (row["score"] > -50)
    assert len(set(column(found, "ended"))) == 2


def test_a_saved_config_is_the_models_own(script, run):
    """A run has no dropout. A later fine-tuning of its model has that of the model before."""
    ran = run(script, model_path="dropout", batch_size=6)
    for folder in [ran.folder / "model", *ran.folder.glob("value_model")]:
        config = json.loads((folder / "config.json").read_text())
        assert (config["attention_dropout"], config["dtype"]) == (0.5, "float32")


def test_held_out_completions_are_written(script, run):
    """The rows of one evaluation have its score as their mean. --total-episodes 0 makes only the
    evaluation before training, and writes no model."""
    flags = dict(eval_dataset=5, eval_every=1)
    trained = run(script, **flags)
    evaluated = run(script, **flags, total_episodes=0)
    assert evaluated.metrics == trained.metrics[:1]
    for ran in (trained, evaluated):
        rows = read_jsonl(ran.folder / "eval_rollouts.jsonl")
        for line, group in zip(ran.metrics, groups_of(rows, 5), strict=True):
            assert set(column(group, "iteration")) == {line["iteration"]}
            assert np.mean(column(group, "score")) == approx(line["eval/scores"])
    files = {".lock", "args.yaml", "metrics.jsonl", "eval_rollouts.jsonl"}
    assert set(os.listdir(evaluated.folder)) == files


@only("rloo", "grpo")
def test_groups_with_equal_scores_are_counted(script, run):
    """By scores, not by advantages, which the KL makes different."""
    found = run(script, reward="seldom", dataset=40, kl_coef=0.5)
    fractions = set()
    for line in found.metrics:
        groups = groups_of(column(found.rows_of(line["iteration"]), "score"))
        fraction = np.mean([len(set(group)) == 1 for group in groups])
        assert line["group/equal_scores_fraction"] == approx(fraction)
        fractions.add(fraction)
    assert len(fractions) > 1


# ---- --keep-checkpoints


def models_of(output_dir):
    return sorted(output_dir.glob("checkpoints/iteration_*/model"))


def check_kept(output_dir):
    """Three checkpoints stay after the end. Their models load. The last one is that of the run."""
    _, earlier, last = models_of(output_dir)
    end = flat(weights_of(output_dir / "model"))
    assert torch.equal(flat(weights_of(last)), end)
    assert not torch.equal(flat(weights_of(earlier)), end)
    assert AutoTokenizer.from_pretrained(earlier).get_vocab()


def test_checkpoints_stay_and_load(script, run, killed, tmp_path):
    """Also where the run was killed when a checkpoint had its model, and not yet its name. The
    resumed run is the run that was never stopped."""
    unbroken = run(script, **KEPT).folder
    flags = KEPT | dict(output_dir=tmp_path / "out", resume=True)
    killed(script, partial(import_file(KILLS).kill_at, script, "written", 2), **flags)
    resumed = run(script, **flags).folder
    check_kept(unbroken)
    check_kept(resumed)
    assert result_of(resumed) == result_of(unbroken)


@mark.slow
@mark.parametrize("program", [None, FSDP2], ids=["ddp", "fsdp2"])
@only("rloo")
def test_processes_keep_whole_models(script, world, tmp_path, program):
    launched(script, 2, tmp_path, base_flags(world, KEPT), program=program)
    check_kept(tmp_path / "out")


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
def test_a_tokenizer_that_knows_no_stop_string_is_refused(script, refuses):
    """That of the tests has no token for what it does not know."""
    refuses(script, "--stop-string 'x' does not work with this tokenizer", stop_string="x")


@mark.slow
@only("grpo")
def test_a_stop_string_on_two_processes(script, stopping, same_on):
    same_on(script, 2, stopping)


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
