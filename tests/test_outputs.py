"""What a run leaves: rows of its rollouts, models that load, and what a stop string ended."""

import json
import math

import numpy as np
from conftest import MANY_EOS, VOCAB, column, one_text, only, write_jsonl
from plain import groups_of, without_none
from pytest import approx


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


@only("rloo", "grpo")
def test_groups_with_equal_scores_are_counted(script, run):
    """By scores, not by advantages, which the KL makes different. Missing scores do not count."""
    for reward in ("seldom", "unsure"):
        found = run(script, reward=reward, dataset=40, kl_coef=0.5)
        for line in found.metrics:
            groups = groups_of(column(found.rows_of(line["iteration"]), "score"))
            fraction = np.mean([len(set(without_none(group))) <= 1 for group in groups])
            assert line["group/equal_scores_fraction"] == approx(fraction)


@one_text
def test_a_text_is_what_the_model_wrote_up_to_its_end(script, run, tmp_path):
    """A completion ends with the token that completes --stop-string. Prompts end with "9": in
    prompt and completion together the string would be found too early.

    Its text shows all tokens, special ones, too, but for a special one at its end."""
    rows = [{"prompt": f"{number}9"} for number in range(16)]
    dataset = write_jsonl(tmp_path / "prompts.jsonl", rows)
    flags = dict(dataset=dataset, response_length=12, stop_token_id=VOCAB.index("7"))
    shown = ""
    for row in run(script, stop_string="9+", **flags).rollouts:
        tokens = [VOCAB[token] for token in row["token_ids"]]
        text = "".join(tokens)
        assert row["completion"] == text.removesuffix("<eos>")
        assert row["ended"] == text.endswith(("9+", "<eos>", "7"))
        assert row["ended"] or len(tokens) == 12
        assert not any(end in text[:-1] for end in ("9+", "<eos>", "7"))
        shown += "\n" + text + "\n"
    assert all(part in shown for part in ("\n+", "9+\n", "<eos>\n", "7\n", "<pad>"))
