"""The page of benchmark/look.py: what it holds of rollouts."""

import json
import math
import os
import random
import re
from itertools import groupby
from operator import itemgetter

import numpy as np
import yaml
from conftest import HERE, column, import_file, make_tokenizer, write_jsonl
from pytest import approx, fixture, mark, raises
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

look = import_file(HERE / "benchmark" / "look.py")
HOSTILE = [
    "</script><script>window.ran = 1</script>",
    '<img src="x" onError="window.ran = 1"><!-- <script>',
    "nul \0, bell \x07, turned \u202e and \u2066, lines \u2028 and \u2029\r\n",
    "DATA NONCE ${1 + 1} \\u003c \\ 😀 שלום",
]
SURROGATES = "\ud800 alone, and \udc00"  # UTF-8 has none, so they are in prompts and columns only


def byte_tokenizer():
    """One token for each byte, so most tokens end within a character."""
    vocab = {word: i for i, word in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = Tokenizer(BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZER = byte_tokenizer()


def episode(iteration, index, text, **changes):
    """A row of a file in rollouts/."""
    ids = TOKENIZER(text)["input_ids"]
    row = dict(
        iteration=iteration,
        index=index,
        prompt=f"{iteration}, {index // 2}",
        completion=text,
        token_ids=ids,
        row=index,
        ended=True,
        columns={"answer": "7"},
        score=float(index % 2),
        logprobs=[-0.5] * len(ids),
        ref_logprobs=[-0.75] * len(ids),
        advantage=0.25,
    )
    return row | changes


@fixture
def save(tmp_path):
    """save(rows, name) writes a run with groups of two, and returns its folder."""
    tokenizer = str(tmp_path / "tokenizer")
    TOKENIZER.save_pretrained(tokenizer)

    def save(rows, name="run", prefix=""):
        folder = tmp_path / name
        (folder / "rollouts").mkdir(exist_ok=True, parents=True)
        flags = dict(model_path=tokenizer, rloo_k=2, eval_k=1)
        (folder / "args.yaml").write_text(yaml.safe_dump(flags))
        for iteration, its in groupby(rows, itemgetter("iteration")):
            write_jsonl(folder / "rollouts" / f"{prefix}{iteration:08d}.jsonl", its)
        write_jsonl(folder / "metrics.jsonl", [{"iteration": 1, "objective/scores": 0.5}])
        return folder

    return save


@fixture
def open_page(tmp_path):
    """open_page(folders) writes their page, and returns its path and its data."""

    def open_page(*folders):
        look.load_run.cache_clear()
        path = tmp_path / "deep" / "look.html"
        look.main(look.Args(folders, path))
        text = path.read_bytes().decode()
        data = re.search('id="data">(.*)</script>\n<script', text, re.DOTALL)[1]
        assert "<" not in data  # So nothing in it ends its element.
        return path, json.loads(data)

    return open_page


def episodes_of(data):
    """Those of the first run."""
    return [episode for card in data["cards"] for episode in card["groups"][0]]


def test_the_texts_of_the_tokens_join_to_the_whole():
    """Also where a character has several tokens, or is cut. It belongs to its last token."""
    rng = random.Random(1)
    whole = TOKENIZER("a😀é")["input_ids"]
    for _ in range(400):
        ids = rng.choices(range(len(TOKENIZER)), k=rng.randint(0, 12)) + whole[:-1]
        texts = look.token_texts(decode, ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == decode(*ids)
    assert look.token_texts(decode, whole) == ["a", "", "", "", "😀", "", "é"]


def decode(*ids):
    return TOKENIZER.decode(ids)


def test_the_page_shows_the_rollouts_of_a_run(script, run, open_page):
    ran = run(script, total_episodes=24)
    _, data = open_page(ran.folder)
    tokenizer = make_tokenizer()
    for row, shown in zip(ran.rollouts, episodes_of(data), strict=True):
        assert "".join(shown["texts"]) == tokenizer.decode(row["token_ids"])
        numbers = shown["numbers"]
        assert numbers["-log p"] == approx(np.negative(row["logprobs"]), rel=0.01)
        assert numbers["advantage"] == approx(row["advantage"], rel=0.01)
        assert ("value" in numbers) == ("values" in row)
        assert ("⚠ truncated" in shown["notes"]) == (not row["ended"])
    _, shown = np.transpose(data["runs"][0]["curves"]["objective/scores"])
    assert shown == approx(column(ran.metrics, "objective/scores"), rel=0.01)


def test_what_the_model_writes_is_data(save, open_page):
    """The data of the page is what was written."""
    column = f"{HOSTILE} {SURROGATES}"
    rows = []
    for i, text in enumerate(HOSTILE):
        rows.append(episode(1, 2 * i, text, columns={column: text}, prompt=text + SURROGATES))
    _, data = open_page(save(rows))
    for i, (text, card) in enumerate(zip(HOSTILE, data["cards"], strict=True)):
        [[shown]] = card["groups"]
        assert "".join(shown["texts"]) == text
        assert card["prompt"] == text + SURROGATES
        assert card["columns"] == [f"row: {2 * i}", f"{column}: {text}"]


def test_numbers_that_are_missing_or_not_finite(save, open_page):
    """Half a line, as of a run that goes on, is left out. So are numbers that JSON does not
    have."""
    rows = [
        episode(1, 0, "abc", score=None, ref_logprobs=None),
        episode(1, 1, "abc", logprobs=[-math.inf, -1.0, math.nan], ended=False),
        episode(1, 2, "", completion=" ", advantage=[]),
        episode(1, 3, "abc", advantage=[1.0, 2.0, 4.5]),
    ]
    folder = save(rows)
    for name in ("rollouts/00000001.jsonl", "metrics.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"iteration": 1, "in')
    shown = episodes_of(open_page(folder)[1])
    assert column(shown, "notes") == [["⚠ no score"], ["⚠ truncated"], ["⚠ empty"], []]
    assert column(shown, "kl") == [None, None, 0, 0.75]
    assert column(shown, "advantage") == [0.25, 0.25, 0, 2.5]
    assert shown[1]["numbers"]["-log p"] == [None, 1, None]


@mark.parametrize("part", [4, 40])
def test_a_large_run_is_cut_to_even_distances(save, open_page, monkeypatch, part):
    """First iterations are left out. Of the last eight, it is groups."""
    rows = [episode(1 + i // 8, i % 8, "x" * 40) for i in range(800)]
    folder = save(rows)
    path, _ = open_page(folder)
    limit = len(look.PAGE) + path.stat().st_size // part
    monkeypatch.setattr(look, "LIMIT", limit)
    path, data = open_page(folder)
    assert limit / 2 < path.stat().st_size <= limit
    iterations = sorted({card["iteration"] for card in data["cards"]})
    assert data["iterations"] == iterations
    assert (iterations[0], iterations[-1]) == (1, 100)
    assert np.ptp(np.diff(iterations)) <= 1
    assert f"{len(episodes_of(data))} of 800 episodes" in data["about"]
    assert ("one group in" in data["about"]) == (part == 40)


def test_two_runs_and_held_out_prompts(save, open_page):
    """Groups of the same prompt share a card. A prompt that only one run has is there as well."""
    first = save([episode(1, i, "a") for i in range(4)], "first")
    rows = [episode(1, i, "b", prompt="1, 0" if i < 2 else "other") for i in range(4)]
    second = save(rows, "second")
    save([episode(0, 0, "c"), episode(0, 1, "c")], "second", "eval_")
    _, data = open_page(first, second)
    assert [
        (card["prompt"], card["heldOut"], *map(len, card["groups"])) for card in data["cards"]
    ] == [
        ("1, 0", False, 2, 2),
        ("1, 1", False, 2, 0),
        ("other", False, 0, 2),
        ("0, 0", True, 0, 1),
        ("0, 0", True, 0, 1),
    ]


def test_without_rollouts_it_says_what_to_do(save, tmp_path, monkeypatch):
    """Without a name it takes the newest run."""
    monkeypatch.chdir(tmp_path)
    with raises(SystemExit, match="no run in runs/ .*--save-rollouts"):
        look.main(look.Args())
    old = save([episode(1, 0, "a")], "runs/a")
    os.utime(old / "rollouts", (1, 1))
    new = save([episode(1, 0, "a")], "runs/b")
    look.main(look.Args())
    assert '"name":"runs/b"' in (tmp_path / "runs/look.html").read_text()
    (new / "rollouts/00000001.jsonl").unlink()
    with raises(SystemExit, match="runs/b .*--save-rollouts"):
        look.main(look.Args((old, new)))
