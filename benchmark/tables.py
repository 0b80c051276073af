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


# ============================================ docs/variants.md ==============================================
ALSO = {  # what is shown beside the right answers
    "sampler_weights": ("val/sampler_weight_std", "deviation of the weights"),
    "masked_importance_sampling": ("val/importance_std", "deviation of the weights"),
    "overlong_punishment": ("response_length_mean", "tokens"),
    "dynamic_sampling": ("generated_episodes", "generated episodes"),
    "unbiased_kl": ("objective/kl", "KL"),
    "entropy_bonus": ("policy/entropy_avg", "entropy of a token"),
}


@table
def variants() -> str:
    """Each patch beside the script as it is, at the end of training: means over five seeds, with 95 % intervals."""
    groups = {}
    for curve in load("variants/curves.json"):
        groups.setdefault(curve["variant"], []).append(curve)
    rows = []
    for patch in groups.keys() - {"original"}:
        some = groups[patch]
        flags = {word for curve in some for word in (curve["script"], *curve["flags"].split())}
        original = [c for c in groups["original"] if flags >= {c["script"], *c["flags"].split()}]
        metric, name = ALSO.get(patch, ("", ""))
        right, also = [], []
        for runs in (some, original):
            ends = [run["eval/scores"][-1] for run in runs]
            right.append(f"{mean(ends):.2f} ± {2.78 * statistics.stdev(ends) / len(ends) ** 0.5:.2f}")  # t of 5 seeds
            ends = [run[metric] for run in runs if metric in run]  # a curve, or the mean of the run
            ends = [end[-1] if isinstance(end, list) else end for end in ends]
            also.append(number(mean(ends)) if ends else "")
        rows.append([f"`{patch}.patch`", f"{some[0]['episode'][-1]:,}", *right, name, *also])
    head = ["patch", "episodes", "right answers", "without the patch", "also measured", "with", "without"]
    return markdown(head, sorted(rows))


# ============================================ benchmark/engine/README.md ====================================
ENGINE = {  # of each case the columns, as run.json names them
    "default": "held_out largest_logprob_difference weight_std median_rollout_s",
    "equal": "completions_that_differ distance",
    "long": "largest_logprob_difference error",
    "smollm2": "weight_std largest_logprob_difference sampled held_out_of_the_weights",
}


@table
def engine(case: str) -> str:
    """The runs of a case of benchmark/engine/run.py."""

    def cell(value):
        if isinstance(value, list):
            return f"{cell(value[0])} -> {cell(value[-1])}"
        return f"{value:.2g}" if isinstance(value, float) else value

    runs = {name: run for name, run in load("engine/run.json")["runs"].items() if name.startswith(f"{case}, ")}
    if case == "equal":  # The other runs are those that these are compared with.
        runs = {name: run for name, run in runs.items() if "distance" in run}
    columns = ENGINE[case].split()
    rows = [[name.split(", ", 1)[1], *(cell(run.get(key, "")) for key in columns)] for name, run in runs.items()]
    return markdown(["run", *(key.replace("_", " ") for key in columns)], rows)


# ============================================ benchmark/parity/README.md ====================================
def power(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.001 else f"{value:.2g}"


@table
def mini_batch() -> str:
    """The largest differences of loss and gradient in all cases that are the same in both programs."""
    groups = {}
    for row in load("parity/mini_batch.json"):
        if "what" in row or "of" in row:
            continue
        name = f"GRPO, {row['loss_type']}" if "loss_type" in row else "RLOO"
        if row["peer"] == "torchrl":
            name = "PPO and torchrl's `ClipPPOLoss`"
        elif "patch" in row:
            name = "GRPO with `unbiased_kl.patch`, TRL with its default KL"
        elif "micro_batches" in row:
            name = "RLOO and GRPO in four micro-batches"
        elif "reward" in row:
            name = "RLOO and GRPO with a reward that returns None"
        groups.setdefault(name, []).append(row)
    rows = []
    for name, some in groups.items():
        cells = []
        for update in (1, 2):
            of_update = [row for row in some if row["update"] == update]
            cells += [power(max(row[x] for row in of_update)) if of_update else "" for x in ("loss", "gradient")]
        cut = [f"{row['cut']:.2f}" for row in some if row["update"] == 2]
        cells.append(f"{min(cut)}–{max(cut)}" if cut else "")
        rows.append([name, sum(row["update"] == 1 for row in some), *cells])
    head = ["what", "cases", "first: loss", "gradient", "second: loss", "gradient", "clipped"]
    return markdown(head, rows)


@table
def differences() -> str:
    """The places where the programs mean different things."""
    groups = {}
    for row in load("parity/mini_batch.json"):
        if "what" in row:
            groups.setdefault(row["what"], []).append(row)
    rows = []
    for what, some in groups.items():
        found = max(row.get("gradient", row.get("value")) for row in some)
        left = max(row.get("undone_gradient", row.get("undone_value")) for row in some)
        rows.append([what, power(found), some[0]["undone_by"], power(left)])
    return markdown(["difference", "of the gradient", "removed by", "left"], rows)


@table
def replay() -> str:
    """TRL, trained on the completions of Tally's default run."""
    rows = [[row["algorithm"], row["updates"], f"{row['distance']:.1e}"] for row in load("parity/replay.json")]
    return markdown(["script", "updates", "distance"], rows)


@table
def learning() -> str:
    """Tally and TRL, ten seeds each, and Welch's test."""
    names = {"score": "last ten iterations", "area": "mean of all 256"}
    rows = []
    for row in load("parity/learning.json"):
        if "test" in row:
            difference, low, high = row["difference"]
            cells = [f"{row['tally'][0]:.4f}", f"{row['trl'][0]:.4f}", f"{difference:+.4f} ({low:+.4f} to {high:+.4f})"]
            rows.append([f"{row['algorithm'].upper()}, {names[row['test']]}", *cells, f"{row['p']:.2f}"])
    return markdown(["sampled score", "Tally", "TRL", "difference (95 %)", "Welch's p"], rows)


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
