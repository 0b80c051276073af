"""What a run leaves: rows of its rollouts, checkpoints that load, and completions that a stop string ended."""

import datetime

import pytest
import torch
from conftest import (
    EOS,
    FSDP2,
    base_flags,
    launched,
    one_text,
    only,
    read_jsonl,
    result_of,
    save_model,
    weights_of,
    write_jsonl,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

KEPT = dict(keep_checkpoints=3, save_every=1, num_train_epochs=7.0, response_length=4)


def test_a_row_of_the_dataset_can_be_joined(script, run, world, tmp_path):
    """`row` counts dropped prompts, too. `columns` are the other columns. `ended` is not guessed from ids."""
    rows = [{"prompt": "1" * length, "score": length, "tags": ["a"]} for length in (9, 1, 8, 2, 3)]
    flags = dict(dataset=write_jsonl(tmp_path / "rows.jsonl", rows), max_prompt_length=3, model_path=world.many_eos)
    found = run(script, **flags, missing_eos_penalty=100.0, num_train_epochs=2.0, response_length=3)
    assert {row["row"] for row in found.rollouts} == {1, 3, 4}
    for row in found.rollouts:
        assert row["prompt"] == rows[row["row"]]["prompt"]
        assert row["columns"] == {"score": len(row["prompt"]), "tags": ["a"]}
        assert row["ended"] == (row["score"] > -50)
    assert {row["ended"] for row in found.rollouts} == {True, False}
    script.append_jsonl(tmp_path / "day.jsonl", [{"columns": {"day": datetime.date(2026, 1, 2)}}])
    assert read_jsonl(tmp_path / "day.jsonl") == [{"columns": {"day": "2026-01-02"}}]


def test_held_out_completions_are_written(script, run, world):
    """Also where nothing is trained. The rows of one evaluation have its score as their mean."""
    flags = dict(eval_dataset=world.dataset(5, seed=4), eval_every=1)
    trained = run(script, **flags)
    evaluated = run(script, **flags, total_episodes=0)
    for folder, metrics in ((trained.folder, trained.metrics), (evaluated.folder, evaluated.metrics)):
        rows = read_jsonl(folder / "eval_rollouts.jsonl")
        for row in metrics:
            scores = [r["score"] for r in rows if r["iteration"] == row["iteration"]]
            assert len(scores) == 5 and sum(scores) / 5 == pytest.approx(row["eval/scores"])
        assert len(rows) == 5 * len(metrics)
    assert not (run(script, **flags, save_rollouts=False).folder / "eval_rollouts.jsonl").exists()


@only("rloo", "grpo")
def test_groups_with_equal_scores_are_counted(script, run, world):
    """By scores, not by advantages, which the KL makes different."""
    found = run(script, reward=world.reward("seldom"), dataset=world.dataset(40, seed=2), kl_coef=0.5)
    for row in found.metrics:
        scores = [r["score"] for r in found.rollouts if r["iteration"] == row["iteration"]]
        groups = [scores[i : i + 3] for i in range(0, len(scores), 3)]
        equal = sum(len(set(group)) == 1 for group in groups) / len(groups)
        assert row["group/equal_scores_fraction"] == pytest.approx(equal)
    assert len({row["group/equal_scores_fraction"] for row in found.metrics}) > 1


# ---- --keep-checkpoints


def models_of(output_dir):
    return sorted(output_dir.glob("checkpoints/iteration_*/model"))


def check_kept(output_dir):
    """Three checkpoints stay after the end. Their models load, and the last one is that of the run."""
    _, earlier, last = models_of(output_dir)
    ends = [weights_of(folder) for folder in (earlier, last, output_dir / "model")]
    assert all(map(torch.equal, ends[1], ends[2])) and not all(map(torch.equal, ends[0], ends[1]))
    assert AutoTokenizer.from_pretrained(earlier).get_vocab()


def test_checkpoints_stay_and_load(script, run):
    check_kept(run(script, **KEPT).folder)


@one_text
def test_a_kept_checkpoint_is_a_policy(script, run, world):
    """A new run starts from it. With LoRA it holds the adapters, as `model/` does."""
    first = run(script, **KEPT)
    earlier, *_ = models_of(first.folder)
    run(script, model_path=str(earlier), total_episodes=12)
    pytest.importorskip("peft")
    lora = run(script, **KEPT, lora_r=2)
    assert all((folder / "adapter_model.safetensors").exists() for folder in models_of(lora.folder))


@one_text
def test_a_run_killed_between_model_and_name(script, run, monkeypatch):
    """The checkpoint is not whole then. The resumed run is the run that was never stopped."""
    expected = run(script, **KEPT)
    save_model = script.save_model

    class Killed(BaseException):
        pass

    def struck(policy, folder):
        save_model(policy, folder)
        if len(models_of(folder.parent.parent.parent)) == 1:
            raise Killed

    monkeypatch.setattr(script, "save_model", struck)
    flags = KEPT | dict(output_dir=str(expected.folder.with_name("out")), resume=True)
    with pytest.raises(Killed):
        run(script, **flags)
    monkeypatch.setattr(script, "save_model", save_model)
    resumed = run(script, **flags)
    assert result_of(resumed.folder) == result_of(expected.folder)
    check_kept(resumed.folder)


@pytest.mark.slow
@pytest.mark.parametrize("program", [None, FSDP2], ids=["ddp", "fsdp2"])
@only("rloo")
def test_processes_keep_whole_models(script, world, tmp_path, program):
    launched(script, 2, tmp_path, base_flags(world) | KEPT, program=program)
    check_kept(tmp_path / "out")


# ---- --stop-string

WORDS = ["<pad>", "<eos>", *"abcdef0123456789+-=", "ab", "bc"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A policy with a small byte-level BPE: "ab" is one token, or two, or comes with a "c"."""
    backend = Tokenizer(BPE({word: i for i, word in enumerate(WORDS)}, [("a", "b"), ("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    folder = tmp_path_factory.mktemp("byte_level")
    return save_model(folder, tokenizer=tokenizer, vocab_size=len(WORDS), initializer_range=0.1)


@pytest.fixture
def stopping(byte_level, world, tmp_path):
    """Prompts end with "a". A stop string that is looked for in prompt and completion together is found too early."""
    rows = [{"prompt": f"{number}a"} for number in range(16)]
    dataset = write_jsonl(tmp_path / "prompts.jsonl", rows)
    return dict(model_path=byte_level, dataset=dataset, stop_string="ab", response_length=12, num_train_epochs=2.0)


def test_a_stop_string_ends_a_completion(script, run, stopping):
    """It ends with the token that completes the string, which stays in the text with what else that token holds."""
    found = run(script, **stopping, missing_eos_penalty=100.0)
    tokenizer = AutoTokenizer.from_pretrained(stopping["model_path"])
    texts = []
    for row in found.rollouts:
        stopped = "ab" in row["completion"]
        assert row["ended"] == (stopped or EOS in row["token_ids"]) == (row["score"] > -50)
        assert "ab" not in tokenizer.decode(row["token_ids"][:-1])
        assert row["ended"] or len(row["token_ids"]) == 12
        texts += [row["completion"]] if stopped else []
    assert any(text.endswith("abc") for text in texts) and any(text.endswith("ab") for text in texts)
    assert any(row["completion"].startswith(("b", "bc")) and len(row["token_ids"]) > 1 for row in found.rollouts)
    ended = [row["val/num_eos_tokens"] for row in found.metrics]
    assert sum(ended) == sum(row["ended"] for row in found.rollouts)


@pytest.mark.slow
@only("grpo")
def test_a_stop_string_on_two_processes(script, stopping, same_on):
    same_on(script, 2, stopping)


@one_text
def test_a_tokenizer_may_not_allow_a_stop_string(script, refuses, tmp_path):
    """The built-in tokenizer has no token for most letters."""
    data = write_jsonl(tmp_path / "sums.jsonl", [{"prompt": "12+34=", "answer": "46"}])
    built_in = dict(model_path=script.Args.model_path, dataset=data, reward="exact_match")
    refuses(script, "--stop-string needs a tokenizer that can write any text: .*UNK", **built_in, stop_string="9")
    refuses(script, "--stop-string is empty", stop_string="")
