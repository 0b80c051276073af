"""What a run leaves: rows of its rollouts, models that load, and what a stop string ended."""

import json
import math
from types import SimpleNamespace

import look
import numpy as np
from conftest import EOS, MANY_EOS, VOCAB, column, encode, make_tokenizer, one_text, write_jsonl
from plain import token_counts
from pytest import approx, mark
from tokenizers import decoders


def test_a_row_of_the_dataset_can_be_joined(script, run, tmp_path, capsys):
    """`row` counts dropped prompts, too. Their number is printed, and so are the first prompt and
    the tokens that end a completion. `columns` are the other columns. `ended` is not guessed from
    ids. A list has a number for each token, and the named parts of a score are there. nan is null.
    """
    columns = {"note": "\ud83d", "weight": math.nan}  # half of a letter
    rows = [{"prompt": "1" * n, "score": n} | columns for n in (9, 1, 8, 2, 3)]
    ran = run(
        script,
        dataset=write_jsonl(tmp_path / "rows.jsonl", rows),
        max_prompt_length=3,
        model_path="many_eos",
        missing_eos_penalty=100.0,
        response_length=3,
        reward="parts",
    )
    assert sorted(column(ran.rollouts[:: ran.args.k], "row")) == [1, 3, 4]
    for row in ran.rollouts:
        joined = rows[row["row"]] | {"weight": None}
        assert joined == {"prompt": row["prompt"]} | row["columns"]
        score = row["reward/length"] + row["reward/ones"] - 100 * (not row["ended"])
        assert row["score"] == approx(score)
        lists = [value for value in row.values() if isinstance(value, list)]
        assert {len(values) for values in lists} == {len(row["token_ids"])}
    assert len(set(column(ran.rollouts, "ended"))) == 2
    printed = capsys.readouterr()
    assert "2 of 5 prompts dropped" in printed.err
    assert "the first prompt: '1'\n" in printed.out
    assert f"completion: { {token: VOCAB[token] for token in MANY_EOS} };" in printed.out


def test_a_saved_config_is_the_models_own(script, run):
    """A run has no dropout. A later fine-tuning of its models has that of the model before."""
    folder = run(script, model_path="dropout", total_episodes=6).folder
    configs = [json.loads(file.read_text()) for file in folder.glob("*model/config.json")]
    assert len(configs) == 1 + (script.__name__ == "ppo")
    for config in configs:
        assert (config["attention_dropout"], config["dtype"]) == (0.5, "float32")


@one_text
@mark.parametrize("policy, end", [("emits_pad", VOCAB[7]), ("pad_is_eos", "<eos>")])
def test_a_text_is_what_the_model_wrote_up_to_its_end(script, run, tmp_path, policy, end):
    """A completion ends with the first EOS, whichever it is: of the generation config, or
    --stop-token-id. It also ends with the token that completes --stop-string. Prompts end with "9":
    in prompt and completion together the string would be found too early.

    Its text shows all tokens, special ones, too, but for a special one at its end.

    Bug: many trainers have no loss for an EOS that equals padding."""
    rows = [{"prompt": f"{number}9"} for number in range(64)]
    flags = dict(dataset=write_jsonl(tmp_path / "prompts.jsonl", rows), response_length=12)
    flags |= dict(stop_string="9+", stop_token_id=VOCAB.index("7"), batch_size=192)
    ran = run(script, model_path=policy, **flags)
    ends = ("9+", "<eos>", "7", end)
    shown = ""
    for row in ran.rollouts:
        tokens = [VOCAB[token] for token in row["token_ids"]]
        text = "".join(tokens)
        assert row["completion"] == text.removesuffix("<eos>")
        assert row["ended"] == text.endswith(ends)
        assert row["ended"] or len(tokens) == 12
        assert not any(part in text[:-1] for part in ends)
        shown += "\n" + text + "\n"
    expected = {"\n+", "<pad>", *[f"{part}\n" for part in ends]}
    assert not {part for part in expected if part not in shown}
    [line] = ran.metrics
    assert line["val/num_eos_tokens"] == sum(column(ran.rollouts, "ended"))
    assert line["response_length_mean"] == approx(np.mean(token_counts(ran.rollouts)))
    # `generate` of the saved model ends there, too, but for the stop string.
    saved = json.loads((ran.folder / "model/generation_config.json").read_text())
    assert saved["eos_token_id"] == sorted({VOCAB.index(end) for end in ends[1:]})


@one_text
def test_a_text_keeps_its_first_space(script):
    """Also where the tokenizer drops the first space of what it decodes, as Llama 2's does. The
    message of a chat loses it, as in other trainers. The page of benchmark/look.py shows what it
    was. In test_nano.py runs have such a tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    for prompt, text in ("1", "  2"), ([{"role": "user", "content": "1"}], " 2"):
        asked = SimpleNamespace(row=dict(prompt=prompt), token_ids=encode("1"))
        ids = encode("  2")
        assert script.completion_text(tokenizer, asked, [*ids, EOS], True) == text
        row = dict(completion=text, token_ids=ids, logprobs=[-1.0] * 3, score=1.0)
        shown = look.read_episode(row, lambda *ids: tokenizer.decode(ids))
        assert "".join(shown["texts"]) == text
