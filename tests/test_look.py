"""The page of benchmark/look.py: what it holds of rollouts."""

import json
import math
import os
import random
import re
from pathlib import Path

import look
import numpy as np
from conftest import column, write_jsonl
from pytest import mark, raises
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

HOSTILE = """</script><script>window.ran = 1</script>
<img src="x" onError="window.ran = 1"><!-- <script>
nul \0, bell \x07, turned \u202e and \u2066, lines \u2028 and \u2029\r
DATA NONCE ${1 + 1} \\u003c \\ 😀 שלום"""
SURROGATES = "\ud800 alone, and \udc00"  # UTF-8 has none, so they are in prompts and columns only
# One token for each byte, so most tokens end within a character.
BYTES = Tokenizer(BPE({word: i for i, word in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
BYTES.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BYTES.decoder = decoders.ByteLevel()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=BYTES)


def episode(index, text="abc", **changes):
    """A row of a file in rollouts/. Two rows have the same prompt."""
    ids = TOKENIZER(text)["input_ids"]
    row = dict(
        prompt=f"prompt {index // 2}",
        completion=text,
        token_ids=ids,
        score=0.0,
        logprobs=[-0.5] * len(ids),
        ref_logprobs=[-0.75] * len(ids),
        advantage=0.25,
    )
    return row | changes


def save(folder, rollouts):
    """Write a run with groups of two: the rows of each file in rollouts/. Returns its folder."""
    (folder / "rollouts").mkdir(parents=True)
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "args.yaml").write_text("{rloo_k: 2, eval_k: 1}")
    write_jsonl(folder / "metrics.jsonl", [{"iteration": 1, "objective/scores": 0.5}])
    for name, rows in rollouts.items():
        write_jsonl(folder / f"rollouts/{name}.jsonl", rows)
    return folder


def open_page(*folders):
    """Write the page of these runs into a new folder of the first one. Returns its data."""
    path = folders[0] / "new/look.html"
    look.main(look.Args(folders, path))
    data = re.search('id="data">(.*)</script>\n<script', path.read_text("utf-8"), re.DOTALL)[1]
    assert "<" not in data  # So nothing in it ends its element.
    return json.loads(data)


def episodes_of(data):
    """Those of the first run."""
    return [episode for card in data["cards"] for episode in card["groups"][0]]


def test_the_texts_of_the_tokens_join_to_the_whole():
    """Also where a character has several tokens, or is cut. It belongs to its last token."""

    def decode(*ids):
        return TOKENIZER.decode(ids)

    rng = random.Random(1)
    whole = TOKENIZER("a😀é")["input_ids"]
    for _ in range(400):
        ids = rng.choices(range(len(TOKENIZER)), k=rng.randint(0, 12)) + whole[:-1]
        texts = look.token_texts(decode, ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == decode(*ids)
    assert look.token_texts(decode, whole) == ["a", "", "", "", "😀", "", "é"]


def test_what_the_model_writes_is_data(tmp_path):
    """The data of the page is what was written. Half a line, as of a run that goes on, is left out.
    So are numbers that JSON does not have. README's command reads the rows of runs."""
    text = HOSTILE + SURROGATES
    rows = [
        episode(0, HOSTILE, prompt=text, columns={text: text}, ended=True),
        episode(2, score=None, ref_logprobs=None),
        episode(3, logprobs=[-math.inf, -1.0, math.nan], values=[1.0, 2.0, 4.5], ended=False),
        episode(4, "", completion=" ", advantage=[]),
        episode(5, advantage=[1.0, 2.0, 4.5]),
    ]
    folder = save(tmp_path / "run", {"00000001": rows})
    for name in ("rollouts/00000001.jsonl", "metrics.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"iteration": 1, "in')
    data = open_page(folder)
    first, *shown = episodes_of(data)
    card = data["cards"][0]
    assert "".join(first["texts"]) == HOSTILE
    assert (card["prompt"], card["columns"][1]) == (text, f"{text}: {text}")
    assert column(shown, "notes") == [["⚠ no score"], ["⚠ truncated"], ["⚠ empty"], []]
    assert column(shown, "kl") == [None, None, 0, 0.75]
    assert column(shown, "advantage") == [0.25, 0.25, 0, 2.5]
    assert shown[1]["numbers"]["-log p"] == [None, 1, None]
    assert shown[1]["numbers"]["value"] == [1, 2, 4.5]
    assert data["runs"][0]["curves"]["objective/scores"] == [[1, 0.5]]


@mark.parametrize("part", [4, 40])
def test_a_large_run_is_cut_to_even_distances(part, tmp_path, monkeypatch):
    """First iterations are left out. Of the last eight, it is groups."""
    rows = [episode(i, "x" * 40) for i in range(8)]
    folder = save(tmp_path / "run", {f"{i:08d}": rows for i in range(1, 101)})
    open_page(folder)
    page = folder / "new/look.html"
    limit = len(look.PAGE) + page.stat().st_size // part
    monkeypatch.setattr(look, "LIMIT", limit)
    data = open_page(folder)
    assert limit / 2 < page.stat().st_size <= limit
    iterations = data["iterations"]
    assert iterations == sorted({card["iteration"] for card in data["cards"]})
    assert (iterations[0], iterations[-1]) == (1, 100)
    assert np.ptp(np.diff(iterations)) <= 1
    assert f"{len(episodes_of(data))} of 800 episodes" in data["about"]
    assert ("one group in" in data["about"]) == (part == 40)


def test_two_runs_and_held_out_prompts(tmp_path):
    """Groups of the same prompt share a card. A prompt that only one run has is there as well."""
    rows = [episode(i) for i in range(4)]
    first = save(tmp_path / "first", {"00000001": rows})
    changed = rows[:2] + [row | dict(prompt="other") for row in rows[2:]]
    second = save(tmp_path / "second", {"00000001": changed, "eval_00000000": rows[:2]})
    cards = []
    for card in open_page(first, second)["cards"]:
        cards.append((card["prompt"], card["heldOut"], *map(len, card["groups"])))
    assert cards == [
        ("prompt 0", False, 2, 2),
        ("prompt 1", False, 2, 0),
        ("other", False, 0, 2),
        ("prompt 0", True, 0, 1),
        ("prompt 0", True, 0, 1),
    ]


def test_without_rollouts_it_says_what_to_do(tmp_path, monkeypatch):
    """Without a name it takes the newest run."""
    monkeypatch.chdir(tmp_path)
    with raises(SystemExit, match="no run in runs/ .*--save-rollouts"):
        look.main(look.Args())
    old, new = (save(Path("runs", name), {"00000001": [episode(0)]}) for name in "ab")
    os.utime(old / "rollouts", (1, 1))
    look.main(look.Args())
    assert '"name":"runs/b"' in Path("runs/look.html").read_text("utf-8")
    (new / "rollouts/00000001.jsonl").unlink()
    with raises(SystemExit, match="runs/b .*--save-rollouts"):
        look.main(look.Args((old, new)))
