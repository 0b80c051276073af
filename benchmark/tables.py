"""Writes every table of measured numbers into its page, from the data in benchmark/.

    python benchmark/tables.py

A table stands in a page between two lines. The first one names a function of this file, and its
arguments:

    <!-- table: failure no_kl -->
    <!-- end of table -->

So a number is measured by a program, stored once as JSON, and shown once. tests/test_pages.py
checks that writing the tables again changes nothing.
"""

import json
import math
import operator
import re
from itertools import combinations, product
from pathlib import Path
from statistics import fmean as mean
from statistics import median, stdev

import tyro
from draw import mean_and_band

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("benchmark/*.md"),
    *ROOT.glob("benchmark/*/*.md"),
]
SCRIPTS = ("rloo", "grpo", "ppo")


def load(path: str):
    """The rows of a file of results."""
    data = json.loads((ROOT / "benchmark" / path).read_text())
    return data["rows"] if "rows" in data else data


def having(rows: list[dict], **wanted) -> list[dict]:
    """The rows that have these entries."""
    return [row for row in rows if all(row.get(name) == x for name, x in wanted.items())]


def column(rows: list[dict], name: str) -> list:
    """The entries of this name."""
    return [row[name] for row in rows]


def grouped(rows: list[dict], name: str) -> dict:
    """The rows by their entry of this name."""
    return {key: having(rows, **{name: key}) for key in dict.fromkeys(row[name] for row in rows)}


def small(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}e}".replace("e-0", "e-")


def over_seeds(values, digits: int = 2) -> str:
    """The mean over the seeds, and half of its 95 % interval."""
    middle, band = mean_and_band(list(values))
    return f"{middle:.{digits}f} ± {band:.{digits}f}"


def markdown(head: list, rows: list[list]) -> str:
    """A table in Markdown, without a line end after its last row."""
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


# ============================================ benchmark/README.md
# ===========================================
def default(part: str = "default") -> list[dict]:
    return having(load("default/curves.json"), part=part)


def default_task() -> str:
    """The three scripts with default flags: means over the seeds, and their range."""
    columns = []
    for some in grouped(default(), "script").values():
        after, before = column(some, "greedy_after"), mean(column(some, "greedy_before"))
        held_out = f"{before:.3f} -> {mean(after):.3f} ({min(after):.3f} to {max(after):.3f})"
        sampled = [
            f"{mean(c[name] for c in some):.3f}" for name in ("sampled_before", "sampled_after")
        ]
        seconds = f"{mean(c['eval_seconds'][-1] for c in some):.0f}"
        columns.append([held_out, " -> ".join(sampled), f"{some[0]['episode'][-1]:,}", seconds])
    names = [
        "most likely answer, held-out prompts, before -> after",
        "sampled answers, first iteration -> last ten",
    ]
    names += ["episodes", "seconds on one core in rollouts and training"]
    return markdown(["right answers", *SCRIPTS], list(zip(names, *columns)))


def default_clipping() -> str:
    """The default runs with other bounds of the gradient's norm."""
    rows = []
    for script, runs in grouped(default(), "script").items():
        at_one = column(runs, "greedy_after")
        cells = [
            f"{mean(row['grad_norm'] for row in runs):.1f}",
            f"{100 * mean(row['above_one'] for row in runs):.0f} %",
        ]
        cells.append(over_seeds(at_one, 3))
        for bound in ("10", "inf"):
            ends = [
                row["greedy_after"]
                for row in having(default("clipping"), script=script, bound=bound)
            ]
            cells.append(over_seeds(ends, 3))
        rows.append([script, *cells])
    head = ["right answers", "median norm", "steps above 1", "bound 1", "bound 10", "no bound"]
    return markdown(head, rows)


def largest(peer: str) -> float:
    """The largest difference to another program, where the settings are the same."""
    part = dict(trl="same", torchrl="ppo")[peer]
    rows = [
        row for row in having(load("parity/mini_batch.json"), part=part) if "undone_by" not in row
    ]
    names = ("loss", "gradient", "value_loss", "value")
    return max(row[name] for row in rows for name in names if name in row)


def distances() -> dict[str, list[float]]:
    """How far two processes are from one, for each script."""
    found = {}
    for kind, runs in grouped(load("hardware/sharded.json"), "part").items():
        found[kind] = column(runs, "relative_distance")
    return found


def hardware() -> str:
    """Two processes against one."""
    rows = [[f"{kind}, 128 episodes", *map(small, values)] for kind, values in distances().items()]
    for what in ("1 and 2 processes", "micro-batches of 64 and 16"):
        cells = []
        for script in SCRIPTS:
            [run] = having(load("hardware/rounding.json"), part=script, between=what)
            cells.append(f"{run['completions_that_differ']} of {run['completions']:,}")
        rows.append([f"completions of the default run that differ between {what}", *cells])
    return markdown(["", *SCRIPTS], rows)


def rounding() -> str:
    """PPO with micro-batches of 64 against 16: as it is, and with less that amplifies rounding."""
    rows = []
    for case, some in grouped(load("hardware/rounding.json"), "part").items():
        if not case.startswith("PPO"):
            continue
        distances = column(some, "distance")
        low, middle, high = map(small, (min(distances), median(distances), max(distances)))
        counts = column(some, "completions_that_differ")
        first = [row["first_iteration"] for row in some if row["first_iteration"]]
        parted = f"{sum(map(bool, counts))} of {len(some)}"
        cells = [f"{middle} ({low} to {high})", parted, max(counts), min(first, default="none")]
        rows.append([case, *cells])
    head = ["case", "distance, median and range", "seeds with other completions"]
    return markdown(
        [*head, f"at most, of {some[0]['completions']:,}", "the first in iteration"], rows
    )


def kills() -> str:
    """Runs that were killed, against those that were not."""
    rows, names = [], {"1": "one process", "2": "two", "1, 2 by turns": "one and two in turn"}
    for processes, runs in grouped(load("hardware/kill_and_resume.json"), "processes").items():
        cells = [
            "bitwise equal" if run["bitwise"] else small(run["relative_distance"]) for run in runs
        ]
        rows.append([f"resumed on {names[processes]}", *cells])
    return markdown(["", *SCRIPTS], rows)


def kl_term() -> str:
    """The score that was learned, and the true one, at two coefficients."""
    curves, rows = default("reward_model"), []
    for kl_coef in (0.01, 0.3):
        cells = []
        for script in SCRIPTS:
            some = having(curves, script=script, kl_coef=kl_coef)
            first, last = (mean(c["objective/scores"][i] for c in some) for i in (1, -1))
            cells += [
                f"{first:.2f} -> {last:.2f}",
                f"{mean(c['eval/scores'][-1] for c in some):.2f}",
            ]
        rows.append([str(kl_coef), *cells])
    columns = [f"{script}: {name}" for script in SCRIPTS for name in ("learned", "true")]
    return markdown(["`--kl-coef`", *columns], rows)


def speed() -> str:
    """Tally beside TRL."""
    rows = []
    for case, some in grouped(load("throughput/throughput.json"), "part").items():
        cells = {"rloo": "not run", "grpo": "not run"}
        for row in some:
            spread = f" ({row['lowest']:.1f} to {row['highest']:.1f})" if row["pairs"] > 1 else ""
            memory = f"{row['tally']['peak_gib']:.2g}, {row['trl']['peak_gib']:.2g}"
            cells[row["algorithm"]] = f"{row['ratio']:.1f}x{spread}; {memory}"
        runs = f"{some[0]['pairs']}, {some[0]['measured_steps']}"
        rows.append(
            [f"{case}: {some[0]['about']}; batch {some[0]['batch']}", runs, *cells.values()]
        )
    head = ["case: model, prompt and completion tokens", "pairs of runs, measured steps in each"]
    return markdown([*head, "RLOO: speed (of single pairs); memory", "GRPO: speed; memory"], rows)


# ================================================= README.md
# ==========================================
def evidence() -> str:
    """Every claim in one number."""
    before = mean(column(default(), "greedy_before"))
    after = [mean(column(some, "greedy_after")) for some in grouped(default(), "script").values()]
    unseen = [
        mean(column(some, "unseen_after")) for some in grouped(claims("pairs"), "script").values()
    ]
    models = {name: right for name, (_, _, _, right, _) in smollm2_models().items()}
    five = [right for name, right in models.items() if name.startswith("RLOO")]
    replayed = max(column(load("parity/replay.json"), "distance"))
    apart = max(value for values in distances().values() for value in values)
    killed = sum(column(load("hardware/kill_and_resume.json"), "kills"))
    trl, torchrl = (small(largest(peer), 0) for peer in ("trl", "torchrl"))
    after, unseen = (
        ", ".join(f"{x:.{n}f}" for x in values) for values, n in ((after, 3), (unseen, 2))
    )
    removed = [row for row in load("parity/mini_batch.json") if "undone_by" in row]
    different = grouped(removed, "what")
    [kl] = [some for what, some in different.items() if "TRL multiplies the KL" in what]
    kl = max(column(kl, "gradient"))
    pairs = [row for row in load("throughput/throughput.json") if row["pairs"] > 1]
    low, high = min(column(pairs, "lowest")), max(column(pairs, "highest"))
    count = sum(column(pairs, "pairs"))
    memory = [100 * row["tally"]["peak_gib"] / row["trl"]["peak_gib"] for row in pairs]
    rows = f"""
It learns | right answers to held-out sums, ten seeds (RLOO, GRPO, PPO): {before:.2f} before; \
after {after}. On pairs of last digits that training did not show: {unseen} | [the default \
task](benchmark/README.md#the-default-task), [pairs](docs/claims.md#are-the-held-out-questions-new)
It computes what others compute | after {len(different)} differences are removed, loss and \
gradient of a mini-batch: within {trl} of TRL 1.16, within {torchrl} of torchrl 0.14. One of \
them is {kl:.2f} of the gradient under TRL's default | [parity](benchmark/parity/README.md)
A whole run agrees with TRL | TRL, with its differences removed, trains on Tally's completions: \
the final weights differ by {small(replayed)} of the distance that they moved | \
[parity](benchmark/parity/README.md)
Two processes make the run of one | runs of 128 episodes, with DDP, FSDP2 and ZeRO: at most \
{small(apart)} of the distance that the weights moved | \
[processes](benchmark/README.md#one-run-on-any-number-of-processes)
Nothing is lost | {killed} kills with SIGKILL: resumed runs give the unbroken run's weights, bit \
for bit on as many processes | [kills](benchmark/README.md#kills)
A real model learns | SmolLM2-135M on sums, each model at the best of four temperatures: \
{models["before"]:.2f} of held-out answers right before, {min(five):.2f} to {max(five):.2f} after \
640 episodes of RLOO (five seeds) | [a real model](docs/claims.md#and-a-real-model)
It is faster than TRL on one CPU core | beside TRL 1.16, RLOO and GRPO, prompts of 6 to 32 \
tokens: {low:.1f} to {high:.1f} times its episodes per second in {count} \
pairs of runs, with {min(memory):.0f} to {max(memory):.0f} % of its memory | \
[speed](benchmark/README.md#speed)
"""
    return markdown(
        ["claim", "measured", "where"], [line.split(" | ") for line in rows.strip().splitlines()]
    )


# ============================================== docs/ladder.md
# ==============================================
def with_interval(middle: float, band: float, digits: int = 3) -> str:
    return f"{middle:.{digits}f} ({middle - band:.{digits}f}-{middle + band:.{digits}f})"


def ladder(part: str, **wanted) -> list[dict]:
    return having(load("ladder/ladder.json"), part=part, **wanted)


def ladder_sets(rung: str, weights: str) -> list[dict]:
    return [
        row for row in ladder("gradients", rung=rung, weights=weights) if row["prompts"] != "fresh"
    ]


def noise(row: dict) -> float:
    return row["variance"] / row["squared_mean"]


def ladder_relative_noise(rung: str, weights: str) -> tuple[float, float, float]:
    """A rung's noise, times RLOO's: the geometric mean over the sets, between the ends of its
    interval."""
    pairs = zip(ladder_sets(rung, weights), ladder_sets("RLOO", weights), strict=True)
    middle, band = mean_and_band([math.log(noise(row) / noise(rloo)) for row, rloo in pairs])
    return math.exp(middle - band), math.exp(middle), math.exp(middle + band)


def ladder_ends(part: str, **wanted) -> list[float]:
    """The last scores of the runs that have these entries, a number for each seed."""
    return [row["held_out"][-1] for row in ladder(part, **wanted)]


def ladder_learning() -> str:
    """Each rung with as many episodes, and with as many prompts in a batch."""
    rows = []
    for rung, runs in grouped(ladder("learning"), "rung").items():
        for k in grouped(runs, "k"):
            episodes = ladder_ends("learning", rung=rung, k=k, equal="episodes")
            prompts = (
                episodes if k == 1 else ladder_ends("learning", rung=rung, k=k, equal="prompts")
            )
            cells = [
                with_interval(*mean_and_band(ends)) if ends else "" for ends in (episodes, prompts)
            ]
            rows.append([rung, k, 64 // k, *cells])
    return markdown(
        ["", "k", "prompts in A", "A: 64 episodes a batch", "B: 64 prompts a batch"], rows
    )


def ladder_clipping() -> str:
    """The runs with 64 episodes a batch without gradient clipping: the difference of each seed."""
    rows = []
    for rung, runs in grouped(ladder("clipping"), "rung").items():
        for k in grouped(runs, "k"):
            wanted = dict(rung=rung, k=k, equal="episodes")
            norm = mean(column(ladder("learning", **wanted), "grad_norm"))
            cells = []
            for bound in ("10", "inf"):
                ends = zip(
                    ladder_ends("learning", **wanted),
                    ladder_ends("clipping", bound=bound, **wanted),
                    strict=True,
                )
                middle, band = mean_and_band([other - one for one, other in ends])
                cells.append(f"{middle:+.3f} ({middle - band:+.3f} to {middle + band:+.3f})")
            rows.append([rung, k, f"{norm:.1f}", *cells])
    return markdown(
        ["", "k", "median norm", "bound 10 minus bound 1", "no bound minus bound 1"], rows
    )


def ladder_fresh() -> str:
    """The noise of batches with other prompts in each."""
    rows = []
    for rung, runs in grouped(ladder("gradients", prompts="fresh"), "rung").items():
        # at the start, and half-way
        rows.append([rung, *(with_interval(noise(row), row["noise_band"], 1) for row in runs)])
    return markdown(["", "start", "half-way"], rows)


def ladder_gradients() -> str:
    lines = {}
    for row in ladder("gradients", prompts=1):
        rung, weights = row["rung"], row["weights"]
        cells = lines.setdefault(rung, [""] * 3)  # Some rungs were measured half-way only.
        cells[weights == "half-way"] = "{1:.2f} ({0:.2f}-{2:.2f})".format(
            *ladder_relative_noise(rung, weights)
        )
        if weights == "start":
            cells[2] = with_interval(*mean_and_band(column(ladder_sets(rung, weights), "cosine")))
    return markdown(
        ["", "noise, start", "noise, half-way", "cosine, start"],
        [[rung, *lines[rung]] for rung in lines],
    )


def ladder_baselines() -> str:
    """The variance with a constant baseline is a parabola in it. Its values at -1, 0 and 1 were
    measured."""
    columns = []
    for weights in ("start", "half-way"):
        rungs = ("REINFORCE, scores + 1", "REINFORCE", "REINFORCE, scores - 1", "RLOO")
        below, zero, above, rloo = (
            mean(column(ladder_sets(rung, weights), "variance")) for rung in rungs
        )
        slope, bend = (above - below) / 2, (above + below) / 2 - zero
        score, best = mean(column(ladder_sets("RLOO", weights), "score")), -slope / bend / 2
        variances = [zero + slope * b + bend * b**2 for b in (0, best, score)]
        columns.append([f"{score:.2f}", f"{best:.2f}", *(f"{x:.0f}" for x in (*variances, rloo))])
    names = ["mean score", "best constant baseline"]
    names += [
        f"variance with {baseline}"
        for baseline in ("baseline 0", "the best", "the mean score", "RLOO's")
    ]
    return markdown(["", "start", "half-way"], list(zip(names, *columns)))


# ============================================ docs/failures.md
# ==============================================
def number(value: float) -> str:
    """With one, two or three decimals, and in powers of ten what is smaller."""
    if abs(value) >= 10:
        return f"{value:,.1f}"
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2f}"
    return f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.0e}"


def failure(name: str) -> str:
    """A failure and its healthy run: the last evaluation, and means of the other metrics over the
    second half."""
    runs = having(load("failures/failures.json"), part=name)

    def cell(run, metric):
        ends = []  # of each seed
        for row in having(runs, run=run):
            if curve := row["curves"].get(metric):
                ends.append(
                    curve[-1] if metric == "eval/scores" else mean(curve[len(curve) // 2 :])
                )
        if not ends:
            return "not logged"
        low, high = number(min(ends)), number(max(ends))
        return low if low == high else f"{number(mean(ends))} ({low}–{high})"

    rows = [
        [f"`{metric}`", cell("failure", metric), cell("healthy", metric)]
        for metric in runs[-1]["curves"]
    ]
    return markdown(["metric", "failure", "healthy"], rows)


# ============================================ docs/variants.md
# ==============================================
ALSO = {  # what is shown beside the right answers
    "sampler_weights": ("val/sampler_weight_std", "deviation of the weights"),
    "masked_importance_sampling": ("val/importance_std", "deviation of the weights"),
    "overlong_punishment": ("response_length_mean", "tokens"),
    "dynamic_sampling": ("generated_episodes", "generated episodes"),
    "unbiased_kl": ("objective/kl", "KL"),
    "entropy_bonus": ("policy/entropy_avg", "entropy of a token"),
    "distillation": ("objective/kl", "KL to the teacher, or to the start"),
    "maxrl": ("eval/best_of_8", "best of 8 answers"),
}


def variants() -> str:
    """Each variant beside the script as it is, at the end of training: means over five seeds, with
    95 % intervals."""
    groups, rows = grouped(load("variants/curves.json"), "part"), []
    for patch in groups.keys() - {"original"}:
        some = groups[patch]
        flags = {word for curve in some for word in (curve["script"], *curve["flags"].split())}
        original = [c for c in groups["original"] if flags >= {c["script"], *c["flags"].split()}]
        metric, name = ALSO.get(patch, ("", ""))
        right, also = [], []
        for runs in (some, original):
            ends = [run["eval/scores"][-1] for run in runs]
            right.append(over_seeds(ends))
            ends = [run[metric] for run in runs if metric in run]  # a curve, or the mean of the run
            ends = [end[-1] if isinstance(end, list) else end for end in ends]
            also.append(number(mean(ends)) if ends else "")
        variant = (
            f"`{patch}.patch`"
            if (ROOT / f"benchmark/variants/{patch}.patch").exists()
            else f"{patch} (flags)"
        )
        rows.append([variant, f"{some[0]['episode'][-1]:,}", *right, name, *also])
    head = [
        "variant",
        "episodes",
        "right answers",
        "without it",
        "also measured",
        "with",
        "without",
    ]
    return markdown(head, sorted(rows))


def one_batch_late() -> str:
    """Batches in time and late: right answers at the end, and over the curve what is more than in
    time."""
    kinds, rows = grouped(load("variants/one_batch_late.json"), "part"), []
    means = {kind: [mean(run["eval/scores"][1:]) for run in some] for kind, some in kinds.items()}
    for kind, some in kinds.items():
        more = [late - in_time for late, in_time in zip(means[kind], means["in time"])]
        end = over_seeds((run["eval/scores"][-1] for run in some), 3)
        rows.append([kind, end, "" if kind == "in time" else over_seeds(more, 3)])
    return markdown(["batches", "right answers", "over the curve"], rows)


# ============================================ benchmark/engine/README.md
# ====================================
ENGINE = {  # of each part the columns, as measure.json names them
    "default": "held_out largest_logprob_difference weight_std median_rollout_s",
    "smollm2": "weight_std largest_logprob_difference sampled held_out_of_the_weights",
}


def engine(part: str) -> str:
    """The runs of a part of benchmark/engine/measure.py."""

    def cell(value):
        if isinstance(value, list):
            return f"{cell(value[0])} -> {cell(value[-1])}"
        return f"{value:.2g}" if isinstance(value, float) else value

    columns = ENGINE[part].split()
    rows = []
    for row in having(load("engine/measure.json"), part=part):
        rows.append([row["run"], *(cell(row.get(name, "")) for name in columns)])
    return markdown(["run", *(name.replace("_", " ") for name in columns)], rows)


# ============================================ benchmark/parity/README.md
# ====================================
def power(value: float) -> str:
    return small(value, 0) if value < 0.001 else f"{value:.2g}"


def mini_batch() -> str:
    """The largest differences of loss and gradient in all cases that are the same in both
    programs."""
    updates = [
        row for row in load("parity/mini_batch.json") if "update" in row and "undone_by" not in row
    ]
    rows = []
    for name, some in grouped(updates, "what").items():
        cells = []
        for update in (1, 2):
            of_update = having(some, update=update)
            cells += [
                power(max(row[x] for row in of_update)) if of_update else ""
                for x in ("loss", "gradient")
            ]
        cut = [f"{row['cut']:.2f}" for row in having(some, update=2)]
        cells.append(f"{min(cut)}–{max(cut)}" if cut else "")
        rows.append([name, len(having(some, update=1)), *cells])
    return markdown(
        ["what", "cases", "first: loss", "gradient", "second: loss", "gradient", "clipped"], rows
    )


def differences() -> str:
    """The places where the programs mean different things."""
    rows = []
    for what, some in grouped(
        [row for row in load("parity/mini_batch.json") if "undone_by" in row], "what"
    ).items():
        found = max(row.get("gradient", row.get("value")) for row in some)
        left = max(row.get("undone_gradient", row.get("undone_value")) for row in some)
        rows.append([what, power(found), some[0]["undone_by"], power(left)])
    return markdown(["difference", "of the gradient", "removed by", "left"], rows)


def replay() -> str:
    """TRL, trained on the completions of Tally's default run."""
    rows = [
        [row["script"], row["updates"], f"{row['distance']:.1e}"]
        for row in load("parity/replay.json")
    ]
    return markdown(["script", "updates", "distance"], rows)


# ============================================== docs/claims.md
# ==============================================
def claims(part: str, **wanted) -> list[dict]:
    """The runs of a part that have these entries."""
    return having(load("claims/claims.json"), part=part, **wanted)


def claims_coin() -> str:
    """Random and true rewards, and the best constant answer."""
    answers = [json.loads(line)["answer"] for line in open(ROOT / "benchmark/default/eval.jsonl")]
    constant = f"{max(map(answers.count, answers)) / len(answers):.2f}"
    names = ("scores", "best_of_k", "entropy", "mode")
    before = [f"{mean(row[name][0] for row in claims('coin')):.2f}" for name in names]
    rows = [
        ["best constant answer", "", "", constant, constant, "0.00", "1.00"],
        ["before training", "", "", *before],
    ]
    for reward, updates in sorted({(row["reward"], row["updates"]) for row in claims("coin")}):
        for script in ("rloo", "grpo"):
            runs = claims("coin", reward=reward, updates=updates, script=script)
            cells = [over_seeds(row[name][1] for row in runs) for name in names]
            rows.append([f"`{reward}`", updates, script.upper(), *cells])
    head = [
        "reward",
        "updates",
        "",
        "right",
        "pass@16",
        "entropy of a token",
        "share of the most frequent answer",
    ]
    return markdown(head, rows)


def claims_form() -> str:
    """Held-out answers after a reward for the format alone."""
    judges = ("exact_match", "exactly")
    first = [mean(row["scores"][0] for row in claims("form", judge=judge)) for judge in judges]
    rows = [["before training", *(f"{x:.2f}" for x in first)]]
    for reward in ("digits", "exactly"):
        cells = [
            over_seeds(row["scores"][1] for row in claims("form", reward=reward, judge=j))
            for j in judges
        ]
        rows.append([f"`{reward}`", *cells])
    return markdown(["reward", "right answer, in any format", "right answer in the format"], rows)


def pass_at(m: int, right: int, samples: int) -> float:
    """The chance that at least one of m samples is right, unbiased, from `samples` samples of which
    `right` are."""
    return 1 - math.comb(samples - right, m) / math.comb(samples, m)


def over_questions(values: list[float], prompts: list[str]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval. The question a+b and its mirror b+a are one
    cluster."""
    middle, clusters = mean(values), {}
    for prompt, value in zip(prompts, values, strict=True):
        pair = tuple(sorted(prompt.rstrip("=").split("+")))
        clusters[pair] = clusters.get(pair, 0) + value - middle
    variance = (
        sum(x**2 for x in clusters.values())
        * len(clusters)
        / (len(clusters) - 1)
        / len(values) ** 2
    )
    return middle, 1.96 * variance**0.5


def claims_passes() -> str:
    """pass@m before and after training, and the paired change at m = 16 from the start at its best
    temperature."""
    prompts = sorted(
        json.loads(line)["prompt"] for line in open(ROOT / "benchmark/default/eval.jsonl")
    )

    def passes(m, **wanted):  # of each question, the mean over the seeds
        runs = column(claims("passes", **wanted), "right")
        return [mean(pass_at(m, right, 32) for right in question) for question in zip(*runs)]

    def start(m):  # at the temperature that is best on training prompts
        temperatures = {row["temperature"] for row in claims("passes", prompts="train")}
        best = max(temperatures, key=lambda x: mean(passes(m, prompts="train", temperature=x)))
        return passes(m, model="start", prompts="eval", temperature=best)

    def sampled(model):
        return lambda m: passes(m, model=model, prompts="eval", temperature=1.0)

    rows, models = [], {"start": sampled("start"), "start, best temperature": start}
    for name, of in (models | {script: sampled(script) for script in SCRIPTS}).items():
        cells = [
            "{:.2f} ± {:.2f}".format(*over_questions(of(m), prompts)) for m in (1, 2, 4, 8, 16)
        ]
        change = [after - before for after, before in zip(of(16), start(16))]
        cells.append(
            "{:+.3f} ± {:.3f}".format(*over_questions(change, prompts)) if name in SCRIPTS else ""
        )
        rows.append([name, *cells])
    return markdown(["m", *(1, 2, 4, 8, 16), "change at 16"], rows)


def claims_rates() -> str:
    """The score of training at each rate."""
    rates = sorted({row["rate"] for row in claims("rates")})
    rows = []
    for method, some in grouped(claims("rates"), "method").items():
        scores = [mean(column(having(some, rate=rate), "score")) for rate in rates]
        rows.append([method, *(f"**{x:.3f}**" if x == max(scores) else f"{x:.3f}" for x in scores)])
    return markdown(["score of training", *map(small, rates)], rows)


def starts() -> dict[str, dict]:
    """The starting policies of the comparison of methods, and where their runs are."""
    found = {"built-in policy": dict(part="methods")}
    for start in grouped(claims("starts"), "start"):
        found[f"policy {start}"] = dict(part="starts", start=start)
    return found


def claims_methods() -> str:
    """The methods at their best rates, from each starting policy."""
    rows = []
    for method in grouped(claims("methods"), "method"):
        cells = []
        for wanted in starts().values():
            cells.append(over_seeds((column(claims(**wanted, method=method), "right")), 3))
        rows.append([method, *cells])
    return markdown(["right answers", *starts()], rows)


def differences_of(part: str, **wanted) -> dict[tuple[str, str], list[float]]:
    """Of each pair of methods, the differences of their last scores, paired by seed."""
    ends = {}
    for method, some in grouped(claims(part, **wanted), "method").items():
        ends[method] = column(some, "right")
    pairs = {}
    for one, other in combinations(ends, 2):
        pairs[other, one] = [b - a for a, b in zip(ends[one], ends[other], strict=True)]
    return pairs


def sign_flips(differences: list[float]) -> float:
    """The two-sided p of an exact test: how often a sum with random signs is as far from 0 as the
    one that was seen."""
    observed = abs(sum(differences)) - 1e-9
    sums = [
        abs(sum(map(operator.mul, differences, signs)))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    return mean(found >= observed for found in sums)


def holm(p_values: dict) -> dict:
    """Holm's correction: the smallest of n values is multiplied by n, the next one by n - 1, and so
    on."""
    corrected, largest = {}, 0.0
    for i, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - i)))
        corrected[name] = largest
    return corrected


def claims_differences() -> str:
    """The differences of all pairs of methods, with Holm's correction over the pairs of each
    starting policy."""
    columns = [differences_of(**wanted) for wanted in starts().values()]
    corrected = [holm({pair: sign_flips(x) for pair, x in column.items()}) for column in columns]
    rows = []
    for one, other in columns[0]:
        cells = []
        for column, p in zip(columns, corrected, strict=True):
            middle, band = mean_and_band(column[one, other])
            cells.append(f"{middle:+.3f} ± {band:.3f}, {p[one, other]:.3f}")
        rows.append([f"{one} minus {other}", *cells])
    return markdown(["difference, and Holm's p", *starts()], rows)


# its quantiles at 2.5 % and 97.5 % with 9 degrees of freedom, for ten seeds
CHI_SQUARED = (2.700, 19.023)


def seeds_needed(values: list[float], runs: int) -> str:
    """The seeds that show a mean difference of 0.02, 80 % of the time at a level of 5 %, with their
    95 % interval.

    runs: 2 for two methods with this deviation, 1 for differences that are paired by seed
    """
    needed = runs * (2.8 * stdev(values) / 0.02) ** 2
    low, high = (math.ceil(needed * (len(values) - 1) / x) for x in reversed(CHI_SQUARED))
    return f"{math.ceil(needed)} ({low} to {high})"


def claims_seeds() -> str:
    """How many seeds a difference of 0.02 needs."""
    rows = []
    for method, some in grouped(claims("methods"), "method").items():
        ends = column(some, "right")
        paired = differences_of("methods").get((method, "RLOO"))
        cells = [seeds_needed(ends, 2), seeds_needed(paired, 1) if paired else ""]
        rows.append([method, *cells])
    return markdown(["seeds for 0.02", "unpaired", "paired with RLOO"], rows)


def claims_pairs() -> str:
    """Right answers to sums whose pair of last digits training showed, and to the others."""
    rows = []
    for script, some in grouped(claims("pairs"), "script").items():
        cells = [
            over_seeds((row[name] for row in some), 3) for name in ("seen_after", "unseen_after")
        ]
        gap = over_seeds((row["unseen_after"] - row["seen_after"] for row in some), 3)
        before = f"{mean(row['unseen_before'] for row in some):.3f}"
        rows.append([script, before, *cells, gap])
    return markdown(
        ["", "unseen pairs, before", "seen pairs, after", "unseen pairs, after", "difference"], rows
    )


def claims_gold() -> str:
    """Fine-tuning on right answers at each rate, and with other seeds at the best one."""
    grouped_rows = grouped(claims("gold"), "rate")
    best = max(grouped_rows, key=lambda rate: len(grouped_rows[rate]))
    chosen = [
        f"{mean(row['on_training'] for row in some if row['seed'] < 4):.3f}"
        for some in grouped_rows.values()
    ]
    ends = [row["held_out"] for row in grouped_rows[best] if row["seed"] >= 4]
    head = ["", *(f"rate {small(rate)}" for rate in grouped_rows), f"held-out at {small(best)}"]
    return markdown(head, [["right answers", *chosen, over_seeds(ends, 3)]])


def claims_effects() -> list[tuple[str, float, float]]:
    """Differences with half of their 95 % intervals, for a forest plot."""
    effects = []
    for start, wanted in starts().items():
        for (one, other), values in differences_of(**wanted).items():
            if other == "RLOO":
                effects.append((f"{one} minus RLOO, {start}", *mean_and_band(values)))
    for script, some in grouped(claims("pairs"), "script").items():
        gaps = [row["unseen_after"] - row["seen_after"] for row in some]
        effects.append((f"unseen minus seen pairs, {script.upper()}", *mean_and_band(gaps)))
    for script, some in grouped(claims("coin", reward="coin", updates="1"), "script").items():
        effects.append(
            (f"coin, after minus before, {script.upper()}", *mean_and_band(changes(some)))
        )
    for reward, some in grouped(claims("form", judge="exact_match"), "reward").items():
        effects.append((f"{reward}, after minus before, RLOO", *mean_and_band(changes(some))))
    return effects


def changes(rows: list[dict]) -> list[float]:
    return [row["scores"][1] - row["scores"][0] for row in rows]


def smollm2_right(runs: list[dict]) -> dict[float, tuple[float, float, float]]:
    """Of a model, for each temperature: the share of right samples of training questions (4 of
    each) and of held-out ones (8 of each), and pass@8 of the latter."""
    found = {}
    for temperature, rows in grouped(runs, "temperature").items():
        right = {row["prompts"]: row["right"] for row in rows}
        shares = [mean(right["train"]) / 4, mean(right["eval"]) / 8]
        found[temperature] = (*shares, mean(count > 0 for count in right["eval"]))
    return found


def smollm2_models() -> dict[str, tuple]:
    """Of each model: the temperature that is best on training questions; on held-out ones the right
    answers and pass@8 at temperature 1, and both at the best one."""
    models = {}
    for part in ("start", *SCRIPTS):
        for seed, runs in grouped(claims(f"smollm2_{part}"), "seed").items():
            found = smollm2_right(runs)
            best = max(found, key=lambda temperature: found[temperature][0])
            name = f"{part.upper()}, seed {seed}" if seed else "before"
            models[name] = (best, *found[1.0][1:], *found[best][1:])
    return models


def claims_smollm2() -> str:
    """A real model before and after training."""
    models = smollm2_models()
    rows = [[name, best, *(f"{x:.2f}" for x in of)] for name, (best, *of) in models.items()]
    before = models["before"][1:]
    after = [columns[1:] for name, columns in models.items() if name.startswith("RLOO")]
    gains = [over_seeds(x - start for x in some) for start, some in zip(before, zip(*after))]
    rows.append(["gain of RLOO, five seeds", "", *gains])
    head = ["SmolLM2", "best temperature", "right at 1.0", "pass@8 at 1.0"]
    return markdown([*head, "right at the best", "pass@8 at the best"], rows)


# ============================================ writing
# ========================================================
TABLES = [default_task, default_clipping, hardware, kills, kl_term, speed, evidence, failure]
TABLES += [ladder_learning, ladder_clipping, ladder_fresh, ladder_gradients, ladder_baselines]
TABLES += [variants, one_batch_late]
TABLES += [engine, mini_batch, differences, replay, rounding]
TABLES += [
    claims_coin,
    claims_form,
    claims_passes,
    claims_rates,
    claims_methods,
    claims_differences,
]
TABLES += [claims_seeds, claims_pairs, claims_gold, claims_smollm2]
TABLES = {function.__name__: function for function in TABLES}


def write_tables(text: str) -> str:
    """The text of a page with all its tables written again."""

    def write(found):
        name, *arguments = found[2].split()
        return f"{found[1]}\n{TABLES[name](*arguments)}\n{found[3]}"

    return re.sub(r"(<!-- table: (.*?) -->)\n.*?(<!-- end of table -->)", write, text, flags=re.S)


def main():
    """Write all tables."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = write_tables(text)
        if written != text:
            page.write_text(written, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
