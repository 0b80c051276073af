"""Look at what a model wrote: one HTML page, for any browser, with the rollouts of runs.

    python benchmark/look.py                  # the newest run in runs/
    python benchmark/look.py runs/a runs/b    # side by side: one seed draws the same prompts

The runs must be made with --save-rollouts. They may still be going on. The page loads nothing from
anywhere. It has at most 10 MB: of larger runs it shows evenly spaced iterations, and says so.
"""

import functools
import json
import math
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import tyro
import yaml

LIMIT = 10_000_000  # bytes of the page
CURVES = ("objective/scores", "eval/scores", "objective/kl", "response_length_mean")
CURVES += ("time/reward_s",)


@dataclass
class Args:
    folders: tyro.conf.Positional[tuple[Path, ...]] = ()  # none: the newest run with rollouts
    output: Path = Path("runs/look.html")  # the page


def whole_lines(file):
    """The lines of a file. A run may be writing the last: it has no end yet."""
    for line in open(file, "rb"):
        if line.endswith(b"\n"):
            yield line


@functools.cache
def load_run(folder):
    """The flags of a run, and the function that decodes its tokens, the special ones too."""
    from transformers import AutoTokenizer  # It takes seconds, and --help does not need it.

    flags = yaml.safe_load((folder / "args.yaml").read_bytes())
    model = folder / "model"  # It is there when the run is finished.
    if not model.exists():
        model = flags["model_path"]
    tokenizer = AutoTokenizer.from_pretrained(model)

    @functools.lru_cache(100_000)
    def decode(*ids):
        return tokenizer.decode(ids)

    return flags, decode


def read_lines(folder):
    """Each episode's line, and its place: iteration, whether the prompt is held out, and group.

    The line is not parsed, because most lines of a large run are left out.
    """
    flags, _ = load_run(folder)
    size = flags.get("rloo_k") or flags.get("num_generations") or 1  # of a group
    for file in sorted(folder.glob("rollouts/*.jsonl")):
        *held_out, iteration = file.stem.split("_")  # 00000012, or eval_00000012
        for index, line in enumerate(whole_lines(file)):
            group = index // (flags["eval_k"] if held_out else size)
            yield line, (int(iteration), bool(held_out), group)


def choose(places, fit):
    """Evenly spaced iterations, of which every n-th group is shown, and n.

    places: of all groups; fit: how many groups fit into the page
    """
    iterations = sorted({iteration for iteration, *_ in places})
    known = len(iterations)
    count = max(fit * known // len(places), min(fit, 8, known))
    n = math.ceil(count * len(places) / known / fit)
    chosen = []
    for i in range(count):
        position = i * (known - 1) // max(1, count - 1)
        chosen.append(iterations[position])
    return chosen, n


def token_texts(decode, ids):
    """The text of each token. Of tokens that share a character, the last one has it."""
    texts = []
    first = 0
    done = 0
    for end in range(1, len(ids) + 1):
        # The tokens first .. done - 1 are decoded again, because a space can depend on them.
        text = decode(*ids[first:end])
        if text.endswith("\ufffd") and end < len(ids):  # It ends within a character.
            texts.append("")
            continue
        known = decode(*ids[first:done])
        texts.append(text[len(known) :])
        first = done
        done = end
    whole = decode(*ids)
    if "".join(texts) == whole:
        return texts
    # With this tokenizer, a text depends on tokens further back. So decode from the first one on.
    texts = []
    start = 0
    for count in range(1, len(ids)):
        known = os.path.commonprefix([whole, decode(*ids[:count])])
        end = max(start, len(known))
        texts.append(whole[start:end])
        start = end
    return [*texts, whole[start:]]


def lost_space(decode, row):
    """The first space of a completion, which some tokenizers drop, where it stands alone."""
    found = [row["completion"], decode(*row["token_ids"])]
    kept, alone = [len(text) - len(text.lstrip(" ")) for text in found]
    return " " * (kept - alone)


def rounded(number, digits=3):
    """The first digits of a number. JSON has no nan and no inf: they are None."""
    if number is None or not math.isfinite(number):
        return None
    return float(f"{number:.{digits}g}")


def read_episode(row, decode):
    """What the page shows of an episode. `numbers`: one for each token, or one for all of them."""
    logprobs = row["logprobs"]
    numbers = {"-log p": [-x for x in logprobs]}
    kl = None
    if row.get("ref_logprobs") is not None:
        ratios = [x - y for x, y in zip(logprobs, row["ref_logprobs"])]
        numbers["log p - log p_ref"] = ratios
        kl = sum(ratios)
    advantage = row.get("advantage")
    numbers |= {"advantage": advantage, "value": row.get("values"), "return": row.get("returns")}
    if isinstance(advantage, list):
        advantage = sum(advantage) / max(1, len(advantage))
    texts = token_texts(decode, row["token_ids"])
    texts[:1] = [lost_space(decode, row) + first for first in texts[:1]]
    shown = {}
    for name, column in numbers.items():
        if isinstance(column, list):
            column = list(map(rounded, column))
        else:
            column = rounded(column)
        if column is not None:
            shown[name] = column
    notes = {
        "⚠ truncated": row.get("ended") is False,
        "⚠ empty": not row["completion"].strip(),
        "⚠ no score": row["score"] is None,
    }
    return {
        "score": rounded(row["score"], digits=8),  # Scores that are equal on the page are equal.
        "parts": {name[7:]: rounded(row[name]) for name in row if name.startswith("reward/")},
        "advantage": rounded(advantage),
        "kl": rounded(kl),
        "notes": [note for note in notes if notes[note]],
        "texts": texts,
        "numbers": shown,
    }


def read_curves(folder):
    """Of each metric (iteration, value), about 1,000 times at most."""
    rows = [json.loads(line) for line in whole_lines(folder / "metrics.jsonl")]
    curves = {}
    for name in CURVES:
        points = []
        for row in rows:
            value = rounded(row.get(name))
            if value is not None:
                points.append((row["iteration"], value))
        curves[name] = points[:: 1 + len(points) // 1000]
    return curves


def make_page(folders, places, fit):
    """The page, and what it says about itself."""
    iterations, n = choose(places, fit)
    known = {iteration for iteration, *_ in places}
    shown = set(iterations)
    cards = {}
    num_episodes = 0
    num_shown = 0
    for number, folder in enumerate(folders):
        _, decode = load_run(folder)
        for line, (iteration, held_out, group) in read_lines(folder):
            num_episodes += iteration in known  # The run may have written others since.
            if iteration not in shown or group % n:
                continue
            num_shown += 1
            row = json.loads(line)
            prompt = row["prompt"]
            key = (iteration, held_out, group, prompt)
            if key not in cards:
                columns = {"row": row.get("row")} | row.get("columns", {})
                cards[key] = {
                    "iteration": iteration,
                    "heldOut": held_out,
                    "columns": [f"{name}: {value}" for name, value in columns.items()],
                    "prompt": prompt,
                    "groups": [[] for _ in folders],
                }
            cards[key]["groups"][number].append(read_episode(row, decode))
    about = f"{num_shown:,} of {num_episodes:,} episodes"
    if num_shown < num_episodes:
        about += f": {len(iterations)} of {len(known)} iterations, evenly spaced"
        if n > 1:
            about += f", one group in {n}"
        about += f". The rest is left out, because a page has at most {LIMIT / 1e6:g} MB"
    data = {
        "runs": [{"name": str(folder), "curves": read_curves(folder)} for folder in folders],
        "cards": list(cards.values()),
        "iterations": iterations,
        "about": about,
    }
    # Without "<", no text can end the element that holds the data.
    data = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = PAGE.replace("NONCE", secrets.token_hex())
    return page.replace("DATA", data).encode(), about


def main(args):
    written = sorted(Path("runs").glob("*/rollouts"), key=lambda folder: folder.stat().st_mtime)
    folders = args.folders or [rollouts.parent for rollouts in written[-1:]]
    if not folders:
        raise SystemExit("look.py: no run in runs/ has rollouts; make one with --save-rollouts")
    size = 0
    places = set()
    for folder in folders:
        before = size
        for line, place in read_lines(folder):
            size += len(line)
            places.add(place)
        if size == before:
            raise SystemExit(f"look.py: {folder} has no rollouts; run it with --save-rollouts")
    # A first guess: the page has at least a quarter of the bytes of the lines that it shows.
    fit = min(len(places), 1 + 4 * LIMIT * len(places) // size)
    page, about = make_page(folders, places, fit)
    while len(page) > LIMIT and fit > 1:
        fit = max(1, int(0.95 * fit * LIMIT / len(page)))
        page, about = make_page(folders, places, fit)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_bytes(page)
    names = ", ".join(map(str, folders))
    print(f"{args.output}: {names}: {about}; {len(page) / 1e6:.1f} MB")


PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-NONCE'">
<title>Rollouts</title>
<style>
:root {
  color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif;
  --page: light-dark(#f4f4f2, #141518); --card: light-dark(#fff, #1e2024);
  --ink: light-dark(#1c1c1c, #ececec); --soft: light-dark(#595959, #aab0b8);
  --line: light-dark(#cfcfca, #43474e);
  --high: light-dark(#4a94d8, #2c78bd); --low: light-dark(#f0913a, #b4600f);
  --run0: light-dark(#0b62a4, #6cb4f0); --run1: light-dark(#b0480a, #f0a060);
}
body { margin: 0; padding: 0 1rem 5rem; background: var(--page); color: var(--ink) }
header { position: sticky; top: 0; background: var(--page); margin-bottom: .6rem }
header { border-bottom: 1px solid var(--line) }
@media (max-width: 45rem), (max-height: 35rem) { header { position: static } }
label { display: inline-block; margin-right: .8rem }
p { font-size: 13px; color: var(--soft); margin: .3rem 0 0; overflow-wrap: anywhere }
article { background: var(--card); border: 1px solid var(--line); padding: .4rem .8rem }
.wide { grid-column: 1 / -1 }
#curves, #cards, .runs, .episodes { display: grid; gap: .6rem }
#curves { grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)) }
#cards { grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--width)), 1fr)) }
.runs { grid-template-columns: repeat(auto-fit, minmax(min(100%, 14rem), 1fr)) }
.episodes { grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)) }
.chip { display: inline-block; padding: 0 .5em; margin-right: .3em; color: var(--ink) }
.chip { border: 1px solid var(--line); border-radius: 9px }
svg { width: 100%; height: 3rem; cursor: pointer }
polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; pointer-events: none }
#slider { width: 100%; margin: 0 }
pre { font: 14px/1.6 monospace; white-space: break-spaces; overflow-wrap: anywhere; margin: 0 }
pre, .columns { max-height: 20rem; overflow: auto }
.prompt, .columns { max-height: 8rem }
.prompt { font-weight: bold }
pre span { border-right: 1px dotted var(--soft) }
pre span:is(:hover, :focus) { outline: 2px solid var(--ink); outline-offset: -1px }
#numbers { position: fixed; inset: auto 0 0 0; padding: .3rem 1rem }
#numbers { background: var(--ink); color: var(--page) }
</style>
<header>
<div id="curves"></div>
<input type="range" id="slider" min="0" value="0" aria-label="iteration">
<label><b id="where" aria-live="polite"></b></label>
<label>colour <select id="colour"></select> <span id="legend"></span></label>
<label>sort <select id="sort"><option value="">as drawn<option value="score 1">lowest score
<option value="score -1">highest score<option value="length -1">longest
<option value="length 1">shortest<option value="kl -1">largest KL
<option value="advantage 1">lowest advantage
<option value="advantage -1">highest advantage</select></label>
<label>show <select id="filter"><option value="">everything<option>equal scores<option>scores differ
<option>truncated<option>empty<option>no score<option>held-out</select></label>
<label>find <input type="search" id="find"></label>
<label><input type="checkbox" id="everywhere"> in all iterations</label>
<p id="about"></p>
</header>
<main id="cards"></main>
<button id="more">more groups</button>
<output id="numbers" hidden></output>
<script type="application/json" id="data">DATA</script>
<script nonce="NONCE">
const $ = id => document.getElementById(id);
const { runs, cards, iterations, about } = JSON.parse($("data").textContent);
const ROOM = 20000;  // With many more tokens at once, a browser is slow.
let room = ROOM;

const show = x => Number.isFinite(x) ? String(Number(x.toPrecision(3))) : "none";
const mean = list => list.reduce((a, b) => a + b, 0) / list.length;
const at = (column, t) => Array.isArray(column) ? column[t] : column;

// A new element. A text among its children stays text: it is never read as HTML.
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Control characters, and marks that turn the direction of writing, are shown as numbers.
function visible(text) {
  const code = c => "\n\t".includes(c) ? c : `⟨${c.codePointAt().toString(16)}⟩`;
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, code);
}

function noteOfGroup(group) {
  if (group.length < 2) return "";
  const scored = group.filter(episode => episode.score !== null);
  if (scored.some(episode => episode.score !== scored[0].score)) return "scores differ";
  if (group[0].advantage === null) return "⚠ equal scores";
  const fromKl = group.some(episode => episode.advantage);
  return "⚠ equal scores: " + (fromKl ? "the advantages come from the KL alone"
    : "every advantage is 0, so this group teaches nothing");
}

for (const card of cards) {
  card.episodes = card.groups.flat();
  card.notes = [card.heldOut ? "held-out" : "", ...card.groups.map(noteOfGroup)];
  card.text = [card.prompt, ...card.columns];
  for (const episode of card.episodes) {
    episode.length = episode.texts.length;
    card.notes.push(...episode.notes);
    card.text.push(episode.texts.join(""));
  }
  card.notes = card.notes.join("\n");  // Here the choice under "show" is looked for,
  card.text = card.text.join("\n").toLowerCase();  // and here what is typed into "find".
}

// Blue is above 0, orange below. Full colour begins at the 98th percentile of the whole page, so
// iterations can be compared. `share` is -1 to 1.
function coloured(element, share) {
  const percent = 75 * Math.min(1, Math.abs(share || 0));
  const colour = share < 0 ? "low" : "high";
  element.style.background = `color-mix(in srgb, var(--${colour}) ${percent}%, transparent)`;
  return element;
}
const episodes = cards.flatMap(card => card.episodes);
const full = {};
for (const name of new Set(episodes.flatMap(episode => Object.keys(episode.numbers)))) {
  const sizes = episodes.flatMap(episode => episode.numbers[name] ?? []).map(Math.abs);
  full[name] = sizes.sort((a, b) => a - b)[Math.floor(.98 * sizes.length)] || 1;
  $("colour").append(make("option", {}, name));
}
const scores = episodes.map(episode => episode.score).filter(Number.isFinite).sort((a, b) => a - b);
const middle = (scores[0] + scores.at(-1)) / 2, reach = scores.at(-1) - middle;

function drawCurves(name) {
  const first = iterations[0], now = iterations[$("slider").value];
  const curves = runs.map(run => run.curves[name]), values = curves.flat().map(([, y]) => y);
  const low = Math.min(...values), high = Math.max(...values);
  const facts = make("p", {}, `${name}, ${show(low)} to ${show(high)}: `);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  function draw(points, style) {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const place = ([x, y]) => [100 * (x - first) / (iterations.at(-1) - first || 1),
      95 - 90 * (y - low) / (high - low || 1)];
    line.setAttribute("points", points.map(place).join(" "));
    line.style = style;
    svg.append(line);
  }
  draw([[now, low], [now, high]], "stroke: var(--ink); stroke-width: 1");
  curves.forEach((points, r) => {
    draw(points, `stroke: var(--run${r % 2}); stroke-dasharray: ${4 * r}`);
    const value = points.findLast(([x]) => x <= now)?.[1];
    facts.append(make("b", { style: `color: var(--run${r % 2})` }, `${show(value)} `));
  });
  svg.onclick = ({ offsetX }) => goTo(offsetX / svg.clientWidth * (iterations.length - 1));
  return make("div", {}, facts, svg);
}

function chip(text, share) {
  return coloured(make("span", { className: "chip" }, text), share);
}

function showEpisode({ score, parts, advantage, kl, length, notes, numbers, texts }) {
  const name = $("colour").value;
  const chips = [chip(`score ${show(score)}`, score === null ? 0 : (score - middle) / reach)];
  const facts = Object.entries(parts).map(([part, value]) => `${part} ${show(value)}`);
  if (advantage !== null)
    chips.push(chip(`advantage ${show(advantage)}`, advantage / full.advantage));
  if (kl !== null) facts.push(`KL ${show(kl)}`);
  facts.push(`length ${length}`, ...notes);
  const showToken = (text, t) => coloured(
    make("span", { tabIndex: -1, numbers, t }, visible(text).replaceAll("\n", "⏎\n") || "·"),
    at(numbers[name], t) / full[name]);
  return make("section", {}, make("p", {}, ...chips, facts.join(" · ")),
    make("pre", { className: "completion", tabIndex: 0 }, ...texts.map(showToken)));
}

function showCard({ iteration, heldOut, prompt, columns, groups, episodes }) {
  const facts = [`${heldOut ? "held-out, " : ""}iteration ${iteration}`, ...columns.map(visible)];
  const showGroup = (group, r) => make("div", {},
    make("p", { style: `color: var(--run${r % 2})` },
      runs.length > 1 ? `${runs[r].name} ` : "", noteOfGroup(group)),
    make("div", { className: "episodes" }, ...group.toSorted(byWorth).map(showEpisode)));
  return make("article", { className: episodes.some(({ length }) => length > 200) ? "wide" : "" },
    make("pre", { className: "prompt", tabIndex: 0 }, visible(prompt)),
    make("p", { className: "columns" }, facts.join(" · ")),
    make("div", { className: "runs" }, ...groups.map(showGroup)));
}

// What is sorted by: the smallest comes first, and what has no such number comes last.
function worth(episode) {
  const [name, sign] = $("sort").value.split(" ");
  if (!name) return 0;
  return episode[name] === null ? Infinity : sign * episode[name];
}
const byWorth = (a, b) => worth(a) - worth(b);

function render() {
  const now = iterations[$("slider").value], everywhere = $("everywhere").checked;
  const words = $("find").value.toLowerCase();
  const found = cards.filter(card => (everywhere || card.iteration === now)
    && card.notes.includes($("filter").value) && card.text.includes(words));
  for (const card of found) {  // A group's place is that of its first episode, then of its mean.
    const worths = card.episodes.map(worth);
    card.first = Math.min(...worths);
    card.mean = mean(worths);
  }
  found.sort((a, b) => a.first - b.first || a.mean - b.mean);
  let size = 0, count = 0;
  while (count < found.length && size < room) {
    for (const { length } of found[count].episodes) size += length + 20;  // 20 for its own line
    count += 1;
  }
  $("cards").replaceChildren(...found.slice(0, count).map(showCard));
  $("more").hidden = count === found.length;
  const place = everywhere ? "all iterations" : `iteration ${now}`;
  $("where").textContent = `${place}: ${count} of ${found.length} groups`;
  const hasCurve = name => runs.some(run => run.curves[name].length);
  $("curves").replaceChildren(...Object.keys(runs[0].curves).filter(hasCurve).map(drawCurves));
  const name = $("colour").value, shares = name === "-log p" ? [0, .5, 1] : [-1, -.5, 0, .5, 1];
  $("legend").replaceChildren(...shares.map(share => chip(show(share * full[name]), share)));
}

function goTo(position) {
  $("slider").value = position;
  room = ROOM;
  render();
}
document.querySelector("header").oninput = () => goTo($("slider").value);
$("more").onclick = () => { room += ROOM; render(); };

// The numbers of the token under the mouse, or of the one that has the keyboard's focus.
function tell({ target: { numbers, t, textContent } }) {
  $("numbers").hidden = !numbers;
  if (!numbers) return;
  const p = Math.exp(-(numbers["-log p"][t] ?? NaN));
  const facts = Object.entries(numbers).map(([name, column]) => `${name} ${show(at(column, t))}`);
  $("numbers").textContent = [`token ${t + 1}: ${textContent}`, `p ${show(p)}`]
    .concat(facts).join(" | ");
}
document.onmouseover = tell;
document.addEventListener("focusin", tell);
document.onkeydown = event => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || event.target.matches("input, select")) return;
  event.preventDefault();
  const completion = event.target.closest(".completion");
  if (completion) completion.children[(event.target.t ?? -1) + step]?.focus();
  else goTo(Number($("slider").value) + step);
};

$("slider").max = iterations.length - 1;
$("cards").style = `--width: ${9 + 16 * runs.length}rem`;
$("about").textContent = `${runs.map(run => run.name).join(" and ")}: ${about}. ` +
  "Keys: ← and → go to another iteration, and in a completion (Tab) to another token.";
render();
</script>
"""

if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
