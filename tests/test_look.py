"""The page of benchmark/look.py: what it holds of rollouts, and (slow) how it works in a browser."""

import html
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import yaml
from conftest import HERE, import_file, make_tokenizer, read_jsonl
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
    backend = Tokenizer(BPE({x: i for i, x in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def fallback_tokenizer():
    """Bytes and words, as in Llama. An invalid byte changes how the bytes before it are decoded."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁▁"]
    backend = Tokenizer(BPE({x: i for i, x in enumerate(words)}, [], unk_token="<unk>"))
    bytes_to_text = [decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *bytes_to_text, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZER = byte_tokenizer()


def episode(iteration, index, text, **changes):
    """A row of rollouts.jsonl."""
    ids = TOKENIZER(text)["input_ids"]
    row = dict(iteration=iteration, index=index, prompt=f"{iteration}, {index // 2}")
    row |= dict(completion=text, token_ids=ids, row=index, ended=True, columns={"answer": "7"})
    row |= dict(score=float(index % 2), logprobs=[-0.5] * len(ids), advantage=0.25)
    return row | dict(ref_logprobs=[-0.75] * len(ids)) | changes


@pytest.fixture
def save(tmp_path):
    """save(rows, name) writes a run with groups of two, and returns its folder."""
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")

    def save(rows, name="run", file="rollouts.jsonl"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True, parents=True)
        flags = dict(model_path=str(tmp_path / "tokenizer"), rloo_k=2, eval_k=1)
        (folder / "args.yaml").write_text(yaml.safe_dump(flags))
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        metrics = [{"iteration": i, "objective/scores": i / 4} for i in range(1, 4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
        return folder

    return save


class Page(HTMLParser):
    """The tags of a page, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


@pytest.fixture
def open_page(tmp_path):
    """open_page(folders) writes their page, and returns its path and its data."""

    def open_page(*folders):
        look.load_run.cache_clear()
        path = tmp_path / "deep" / "look.html"
        look.main(look.Args(folders, path))
        return path, json.loads(Page(path.read_text(encoding="utf-8")).scripts[0])

    return open_page


@pytest.mark.parametrize("make", [make_tokenizer, byte_tokenizer, fallback_tokenizer])
def test_the_texts_of_the_tokens_join_to_the_whole(make):
    tokenizer, rng = make(), random.Random(1)
    # Whole characters are among the random tokens, and at the end one that is cut.
    names = {
        make_tokenizer: ["<eos>", "1"],
        byte_tokenizer: TOKENIZER.tokenize("é😀a你😀")[:-1],
        fallback_tokenizer: [f"<0x{byte:02X}>" for byte in "é😀a你😀".encode()[:-1]],
    }
    added = tokenizer.convert_tokens_to_ids(names[make])
    for _ in range(400):
        ids = rng.choices(range(len(tokenizer)), k=rng.randint(0, 12)) + added
        texts = look.token_texts(lambda *ids: tokenizer.decode(ids), ids)
        assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids)


def test_a_character_belongs_to_its_last_token():
    """A long completion is not decoded from its beginning on for each token."""
    sizes = []

    def decode(*ids):
        sizes.append(len(ids))
        return TOKENIZER.decode(ids)

    texts = look.token_texts(decode, TOKENIZER("a😀é" * 50)["input_ids"])
    assert texts == ["a", "", "", "", "😀", "", "é"] * 50
    assert sum(sizes) < 10 * len(texts)


def test_the_page_shows_the_rollouts_of_a_run(script, run, open_page):
    args, metrics, folder = run(script, total_episodes=24)
    _, data = open_page(folder)
    rollouts = read_jsonl(folder / "rollouts.jsonl")
    episodes = [episode for card in data["cards"] for [group] in [card["groups"]] for episode in group]
    tokenizer = make_tokenizer()
    for row, shown in zip(rollouts, episodes, strict=True):
        assert "".join(shown["texts"]) == tokenizer.decode(row["token_ids"])
        assert shown["score"] == pytest.approx(row["score"])
        surprise = [-x for x in row["logprobs"]]
        assert shown["numbers"]["-log p"] == pytest.approx(surprise, rel=0.01)
        assert shown["numbers"]["advantage"] == pytest.approx(row["advantage"], rel=0.01)
        assert ("value" in shown["numbers"]) == ("values" in row)
        assert ("⚠ truncated" in shown["notes"]) == (row.get("ended") is False)
    assert {len(card["groups"][0]) for card in data["cards"]} == {args.k}
    curve = data["runs"][0]["curves"]["objective/scores"]
    logged = [[row["iteration"], row["objective/scores"]] for row in metrics]
    assert curve == [[x, pytest.approx(y, rel=0.01)] for x, y in logged]


def test_what_the_model_writes_is_data(save, open_page):
    """The page has no tag but its own, and its JSON gives back what was written."""
    named = {f"{text} {SURROGATES}": {"nested": [text, math.nan]} for text in HOSTILE}
    rows = [episode(1, 2 * i, text, columns=named) for i, text in enumerate(HOSTILE)]
    for row in rows:
        row["prompt"] = row["completion"] + SURROGATES
    path, data = open_page(save(rows))
    page = Page(path.read_text(encoding="utf-8"))
    own = Page(look.PAGE)
    assert page.tags == own.tags and len(page.scripts) == page.tags.count("script") == 2
    assert [card["prompt"] for card in data["cards"]] == [row["prompt"] for row in rows]
    texts = ["".join(card["groups"][0][0]["texts"]) for card in data["cards"]]
    assert texts == HOSTILE
    columns = ["row: 0", *(f"{name}: {value}" for name, value in named.items())]
    assert data["cards"][0]["columns"] == columns


def test_numbers_that_are_missing_or_not_finite(save, open_page):
    """Half a line, as of a run that goes on, is left out. So are numbers that JSON does not have."""
    rows = [episode(1, i, "abc") for i in range(6)]
    rows[0] |= dict(score=None, ref_logprobs=None)
    rows[1] |= dict(logprobs=[-math.inf, -1.0, math.nan], ended=False)
    rows[2] |= dict(token_ids=[], logprobs=[], ref_logprobs=[], completion=" ", advantage=[])
    rows[3] |= dict(advantage=[1.0, 2.0, 4.5], values=[0.1, 0.2, 0.3], returns=[1.0, 2.0, 3.0])
    rows[4]["reward/right"], rows[4]["reward/long"] = 1.0, None
    folder = save(rows)
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        with open(folder / name, "a") as file:
            file.write((folder / name).read_text()[:20])
    _, data = open_page(folder)
    a, b, c, d, e, f = [x for card in data["cards"] for x in card["groups"][0]]
    assert a["score"] is None and a["kl"] is None and a["notes"] == ["⚠ no score"]
    assert b["numbers"]["-log p"] == [None, 1, None] and b["notes"] == ["⚠ truncated"]
    assert c["texts"] == [] and c["notes"] == ["⚠ empty"] and c["advantage"] == 0
    assert d["advantage"] == 2.5 and d["numbers"]["return"] == [1, 2, 3]
    assert e["parts"] == {"right": 1, "long": None}
    assert f["kl"] == 0.75 and f["notes"] == [] and f["numbers"]["log p - log p_ref"] == [0.25] * 3
    # What the run writes while the page is made is not counted.
    folder = save([*rows, episode(2, 0, "a")])
    assert look.make_page([folder], {(1, False, i) for i in range(3)}, 3)[1] == "6 of 6 episodes"


def test_a_large_run_is_cut_to_even_distances(save, open_page, monkeypatch, capsys):
    """First iterations are left out. Of the last eight, it is groups."""
    rows = [episode(i, j, "x" * 40) for i in range(1, 101) for j in range(8)]
    folder = save(rows)
    whole = open_page(folder)[0].stat().st_size
    assert "800 of 800 episodes;" in capsys.readouterr().out
    for limit, least in ((whole // 4, 15), (len(look.PAGE) + whole // 40, 4)):
        monkeypatch.setattr(look, "LIMIT", limit)
        path, data = open_page(folder)
        iterations, said = data["iterations"], data["about"]
        assert limit / 2 < path.stat().st_size <= limit
        assert least <= len(iterations) < 40
        assert (iterations[0], iterations[-1]) == (1, 100)
        steps = {after - before for before, after in zip(iterations, iterations[1:])}
        assert max(steps) - min(steps) <= 1
        shown = sum(len(card["groups"][0]) for card in data["cards"])
        assert f"{shown} of 800 episodes: {len(iterations)} of 100 iterations" in said
        assert {card["iteration"] for card in data["cards"]} == set(iterations)
        assert said in capsys.readouterr().out
    assert re.search("one group in [234]", said)


def test_two_runs_and_held_out_prompts(save, open_page):
    """Groups of the same prompt share a card, and a prompt that only one run has is there as well."""
    first = save([episode(1, i, "a") for i in range(4)], "first")
    second = save([episode(1, i, "b", prompt=f"1, {i // 2 * 9}") for i in range(4)], "second")
    held_out = [episode(0, i, "c") for i in range(2)]
    for row in held_out:
        del row["advantage"], row["ref_logprobs"]
    save(held_out, "second", "eval_rollouts.jsonl")
    _, data = open_page(first, second)
    assert [run["name"] for run in data["runs"]] == [str(first), str(second)]
    shared, *others = data["cards"]
    assert [[x["texts"] for x in group] for group in shared["groups"]] == [[["a"]] * 2, [["b"]] * 2]
    assert [list(map(len, card["groups"])) for card in others] == [[2, 0], [0, 2], [0, 1], [0, 1]]
    assert [card["heldOut"] for card in others] == [False, False, True, True]
    assert data["iterations"] == [0, 1]


def test_without_rollouts_it_says_what_to_do(save, tmp_path, monkeypatch):
    """Without a name it takes the newest run. --help does not load transformers."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="no run in runs/"):
        look.main(look.Args())
    old, new = (save([episode(1, 0, "a")], f"runs/{name}") for name in "ab")
    os.utime(old / "metrics.jsonl", (1, 1))
    look.main(look.Args())
    assert '"name":"runs/b"' in (tmp_path / "runs/look.html").read_text(encoding="utf-8")
    (new / "rollouts.jsonl").write_text("")
    with pytest.raises(SystemExit, match="runs/b has no rollouts; run it with --save-rollouts"):
        look.main(look.Args())
    command = [sys.executable, "-X", "importtime", look.__file__, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--output" in shown.stdout and "transformers" not in shown.stderr


BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
FLAGS += " --disable-background-networking --disable-component-update --enable-logging=stderr"
STEPS = """
const steps = [], say = (...facts) => steps.push([$("where").textContent, ...facts]);
const set = (id, value) => {
  $(id).value = value;
  $(id).dispatchEvent(new Event("input", { bubbles: true }));
};
const press = key => (document.activeElement ?? document.body).dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const scoresOfCards = () => [...document.querySelectorAll("article")].map(card =>
  [...card.querySelectorAll(".chip")].map(x => x.textContent).filter(x => x.startsWith("score")));
say();
set("slider", 1); say();
press("ArrowRight"); say();
set("sort", "score 1"); say(scoresOfCards()[0]);
set("filter", "truncated"); say(scoresOfCards().length);
set("filter", "equal scores"); say(document.querySelector(".runs p").textContent);
set("filter", ""); set("find", "ONERROR"); say(document.querySelector(".completion").textContent);
document.querySelector(".completion").focus(); press("ArrowRight"); say($("numbers").textContent);
press("ArrowRight"); say(document.activeElement.textContent);
set("find", ""); $("everywhere").click(); say();
say(document.images.length, document.scripts.length, window.ran ?? "nothing ran");
document.title = JSON.stringify(steps);
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium, a package of the distribution")
def test_the_page_in_a_browser(save, open_page, tmp_path):
    """The slider, the keys, sorting and filters work. Hostile text is text. The console is empty."""
    rows = []
    for iteration in (1, 2, 3):
        texts = [x for text in HOSTILE for x in (text, text[::-1].strip())]
        rows += [episode(iteration, i, text) for i, text in enumerate(texts)]
    rows[-1]["ended"] = False
    rows[-1] |= dict(score=-3.5)
    for row, score in zip(rows[-4:-2], (2.0, None)):
        row |= dict(score=score, advantage=0.0)
    for row in rows:
        row["prompt"] = HOSTILE[row["index"] // 2] + SURROGATES
    path, _ = open_page(save(rows))
    page = path.read_text(encoding="utf-8")
    nonce = re.search('<script nonce="(.*?)">', page)[1]
    path.write_text(f'{page}<script nonce="{nonce}">{STEPS}</script>', encoding="utf-8")
    command = [BROWSER, *FLAGS.split(), f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    shown = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    steps = json.loads(html.unescape(re.search("<title>(.*?)</title>", shown.stdout, re.S)[1]))
    assert steps == [
        ["iteration 1: 4 of 4 groups"],
        ["iteration 2: 4 of 4 groups"],
        ["iteration 3: 4 of 4 groups"],
        ["iteration 3: 4 of 4 groups", ["score -3.5", "score 0"]],
        ["iteration 3: 1 of 1 groups", 1],
        ["iteration 3: 1 of 1 groups", "⚠ equal scores: every advantage is 0, so this group teaches nothing"],
        ["iteration 3: 1 of 1 groups", HOSTILE[1]],
        ["iteration 3: 1 of 1 groups", "token 1: < | p 0.607 | -log p 0.5 | log p - log p_ref 0.25 | advantage 0.25"],
        ["iteration 3: 1 of 1 groups", "i"],
        ["all iterations: 12 of 12 groups"],
        ["all iterations: 12 of 12 groups", 0, 3, "nothing ran"],
    ]
