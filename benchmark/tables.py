"""Writes every table of measured numbers into its page, from the data in benchmark/.

    python benchmark/tables.py

A table stands in a page between two lines. The first one names a function of this file, and its arguments:

    <!-- table: failure no_kl -->
    <!-- end of table -->

So a number is measured by a program, stored once as JSON, and shown once. tests/test_pages.py checks that writing the
tables again changes nothing.
"""

import json
import re
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


# ============================================ docs/failures.md ==============================================
def number(value: float) -> str:
    """With one, two or three decimals, and in powers of ten what is smaller."""
    if abs(value) >= 10:
        return f"{value:,.1f}"
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2f}"
    return f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.0e}"


@table
def failure(name: str) -> str:
    """A failure and its healthy run: the last evaluation, and means of the other metrics over the second half."""
    runs = [row for row in load("failures/failures.json") if row["failure"] == name]

    def cell(run, metric):
        ends = []  # of each seed
        for row in runs:
            if row["run"] == run and metric in row["curves"]:
                curve = row["curves"][metric]
                ends.append(curve[-1] if metric == "eval/scores" else mean(curve[len(curve) // 2 :]))
        if not ends:
            return "not logged"
        low, high = number(min(ends)), number(max(ends))
        return low if low == high else f"{number(mean(ends))} ({low}–{high})"

    rows = [[f"`{metric}`", cell("failure", metric), cell("healthy", metric)] for metric in runs[-1]["curves"]]
    return markdown(["metric", "failure", "healthy"], rows)


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
