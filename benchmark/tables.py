"""Writes every table of measured numbers into its page, from the data in benchmark/.

    python benchmark/tables.py

A table stands in a page between two lines. The first one names a function of this file, and its arguments:

    <!-- table: failure no_kl -->
    <!-- end of table -->

So a number is measured by a program, stored once as JSON, and shown once. tests/test_pages.py checks that writing the
tables again changes nothing.
"""

import json
import math
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmark/*.md"), *ROOT.glob("benchmark/*/*.md")]
TABLES = {}  # name: the function that makes the table


def table(function):
    TABLES[function.__name__] = function
    return function


def load(path: str):
    """The data of a file of benchmark/."""
    return json.loads((ROOT / "benchmark" / path).read_text())


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def markdown(head: list, rows: list[list]) -> str:
    """A table in Markdown, without a line end after its last row."""
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


# ============================================ benchmark/README.md ===========================================
@table
def default_task() -> str:
    """The three scripts with default flags: means over the seeds, and their range."""
    curves = load("default/curves.json")
    columns = {script: [c for c in curves if c["script"] == script] for script in ("rloo", "grpo", "ppo")}

    def held_out(some):
        after = [c["greedy_after"] for c in some]
        before = mean(c["greedy_before"] for c in some)
        return f"{before:.3f} -> {mean(after):.3f} ({min(after):.3f} to {max(after):.3f})"

    def sampled(some):
        return f"{mean(c['sampled_before'] for c in some):.3f} -> {mean(c['sampled_after'] for c in some):.3f}"

    rows = {
        "most likely answer, held-out prompts, before -> after": held_out,
        "sampled answers, first iteration -> last ten": sampled,
        "episodes": lambda some: f"{some[0]['episode'][-1]:,}",
        "seconds on one core in rollouts and training": lambda some: f"{mean(c['eval_seconds'][-1] for c in some):.0f}",
    }
    cells = [[name, *(cell(some) for some in columns.values())] for name, cell in rows.items()]
    return markdown(["right answers", *columns], cells)


# ============================================== docs/ladder.md ==============================================
def mean_and_band(values) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval, with Student's t. Five sets or ten seeds were measured."""
    values = list(values)
    return mean(values), {5: 2.78, 10: 2.26}[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def with_interval(middle: float, band: float, digits: int = 3) -> str:
    return f"{middle:.{digits}f} ({middle - band:.{digits}f}-{middle + band:.{digits}f})"


def ladder(**wanted) -> list[dict]:
    """The rows of ladder.json that have these entries."""
    return [row for row in load("ladder/ladder.json") if all(row.get(name) == x for name, x in wanted.items())]


def ladder_sets(rung: str, weights: str) -> list[dict]:
    return [row for row in ladder(rung=rung, weights=weights) if row["prompts"] != "fresh"]


def noise(row: dict) -> float:
    return row["variance"] / row["squared_mean"]


def ladder_relative_noise(rung: str, weights: str) -> tuple[float, float, float]:
    """A rung's noise, times RLOO's: the geometric mean over the sets, between the ends of its interval."""
    pairs = zip(ladder_sets(rung, weights), ladder_sets("RLOO", weights), strict=True)
    middle, band = mean_and_band(math.log(noise(row) / noise(rloo)) for row, rloo in pairs)
    return math.exp(middle - band), math.exp(middle), math.exp(middle + band)


@table
def ladder_learning() -> str:
    rows = []
    for rung in dict.fromkeys(row["rung"] for row in ladder(measured="learning")):
        curves = [row["held_out"] for row in ladder(measured="learning", rung=rung)]
        columns = [[curve[len(curve) // 2] for curve in curves], [curve[-1] for curve in curves]]
        cells = [with_interval(*mean_and_band(column)) for column in columns]
        fresh = ladder(measured="gradient", rung=rung, prompts="fresh")  # at the start, and half-way
        rows.append([rung, *cells, *([with_interval(noise(row), row["noise_band"], 1) for row in fresh] or ["", ""])])
    return markdown(["", "right, half-way", "right, end", "fresh noise, start", "fresh noise, half-way"], rows)


@table
def ladder_gradients() -> str:
    lines = {}
    for row in ladder(measured="gradient", prompts=1):
        rung, weights = row["rung"], row["weights"]
        cells = lines.setdefault(rung, [""] * 3)  # Some rungs were measured half-way only.
        cells[weights == "half-way"] = "{1:.2f} ({0:.2f}-{2:.2f})".format(*ladder_relative_noise(rung, weights))
        if weights == "start":
            cells[2] = with_interval(*mean_and_band(other["cosine"] for other in ladder_sets(rung, weights)))
    return markdown(["", "noise, start", "noise, half-way", "cosine, start"], [[rung, *lines[rung]] for rung in lines])


@table
def ladder_baselines() -> str:
    """The variance with a constant baseline is a parabola in it. Its values at -1, 0 and 1 were measured."""
    columns = []
    for weights in ("start", "half-way"):
        rungs = ("REINFORCE, scores + 1", "REINFORCE", "REINFORCE, scores - 1", "RLOO")
        below, zero, above, rloo = (mean(row["variance"] for row in ladder_sets(rung, weights)) for rung in rungs)
        slope, bend = (above - below) / 2, (above + below) / 2 - zero
        score, best = mean(row["score"] for row in ladder_sets("RLOO", weights)), -slope / bend / 2
        variances = [zero + slope * b + bend * b**2 for b in (0, best, score)]
        columns.append([f"{score:.2f}", f"{best:.2f}", *(f"{x:.0f}" for x in (*variances, rloo))])
    names = ["mean score", "best constant baseline"]
    names += [f"variance with {baseline}" for baseline in ("baseline 0", "the best", "the mean score", "RLOO's")]
    return markdown(["", "start", "half-way"], list(zip(names, *columns)))


# ============================================ writing ========================================================
def write_tables(text: str) -> str:
    """The text of a page with all its tables written again."""

    def write(found):
        name, *arguments = found[2].split()
        return f"{found[1]}\n{TABLES[name](*arguments)}\n{found[3]}"

    return re.sub(r"(<!-- table: (.*?) -->)\n.*?(<!-- end of table -->)", write, text, flags=re.S)


def main():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = write_tables(text)
        if written != text:
            page.write_text(written, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
