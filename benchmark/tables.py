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
from statistics import fmean as mean
from statistics import median, stdev

import tyro
from draw import mean_and_band
from run import BENCHMARK, ROOT, SCRIPTS, read_rows

PAGES = [
    ROOT / "README.md",
    *ROOT.glob("docs/**/*.md"),
    *BENCHMARK.glob("*.md"),
    *BENCHMARK.glob("*/*.md"),
]
TABLES = {}  # the functions that a page may name


def table(function):
    """Marks a function that makes a table: it yields the head, and then each row."""
    TABLES[function.__name__] = function
    return function


def having(rows: list[dict], **wanted) -> list[dict]:
    """The rows that have these entries."""
    return [row for row in rows if all(row.get(name) == x for name, x in wanted.items())]


def load(path: str, **wanted) -> list[dict]:
    """The rows of a file of results that have these entries."""
    data = json.loads((BENCHMARK / path).read_text())
    return having(data["rows"], **wanted)


def column(rows: list[dict], name: str) -> list:
    """The entries of this name."""
    return [row[name] for row in rows]


def points(rows: list[dict], name: str, position: int) -> list[float]:
    """Of each row's curve of this name, the point at this position."""
    return [row[name][position] for row in rows]


def mean_of(rows: list[dict], name: str) -> float:
    """The mean of the entries of this name."""
    return mean(column(rows, name))


def grouped(rows: list[dict], name: str) -> dict[str, list[dict]]:
    """The rows by their entry of this name."""
    groups = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def minus(left: list[float], right: list[float]) -> list[float]:
    """The difference of each pair of numbers."""
    return [a - b for a, b in zip(left, right, strict=True)]


def small(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}e}".replace("e-0", "e-")


def over_seeds(values: list[float], digits: int = 2) -> str:
    """The mean over the seeds, and half of its 95 % interval."""
    middle, band = mean_and_band(values)
    return f"{middle:.{digits}f} ± {band:.{digits}f}"


def markdown(head: list, *rows: list) -> str:
    """A table in Markdown, without a line end after its last row."""
    lines = []
    for cells in (head, *rows):
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines)


# ========== benchmark/README.md ==========
def default(part: str = "default", **wanted) -> list[dict]:
    return load("default/curves.json", part=part, **wanted)


@table
def default_task():
    """The three scripts with default flags: means over the seeds, and their range."""
    columns = []
    for some in grouped(default(), "script").values():
        before = mean_of(some, "greedy_before")
        after = column(some, "greedy_after")
        held_out = f"{before:.3f} -> {mean(after):.3f} ({min(after):.3f} to {max(after):.3f})"
        first = mean_of(some, "sampled_before")
        last = mean_of(some, "sampled_after")
        episodes = some[0]["episode"][-1]
        seconds = mean(points(some, "eval_seconds", -1))
        columns.append([held_out, f"{first:.3f} -> {last:.3f}", f"{episodes:,}", f"{seconds:.0f}"])
    names = [
        "most likely answer, held-out prompts, before -> after",
        "sampled answers, first iteration -> last ten",
        "episodes",
        "seconds on one core in rollouts and training",
    ]
    yield ["right answers", *SCRIPTS]
    yield from zip(names, *columns)


@table
def default_clipping():
    """The default runs with other bounds of the gradient's norm."""
    yield ["right answers", "median norm", "steps above 1", "bound 1", "bound 10", "no bound"]
    for script, runs in grouped(default(), "script").items():
        norm = mean_of(runs, "grad_norm")
        above_one = mean_of(runs, "above_one")
        cells = [script, f"{norm:.1f}", f"{100 * above_one:.0f} %"]
        cells.append(over_seeds(column(runs, "greedy_after"), 3))
        for bound in ("10", "inf"):
            others = default("clipping", script=script, bound=bound)
            cells.append(over_seeds(column(others, "greedy_after"), 3))
        yield cells


def mini_batches(undone: bool) -> list[dict]:
    """The mini-batches of two programs: those with a difference that can be undone, or the
    others."""
    return [row for row in load("parity/mini_batch.json") if ("undone_by" in row) == undone]


def largest(part: str) -> float:
    """The largest difference to another program, where the settings are the same."""
    found = []
    for row in having(mini_batches(undone=False), part=part):
        for name in ("loss", "gradient", "value_loss", "value"):
            if name in row:
                found.append(row[name])
    return max(found)


def distances() -> dict[str, list[float]]:
    """How far two processes are from one, for each script."""
    groups = grouped(load("hardware/sharded.json"), "part")
    return {kind: column(runs, "relative_distance") for kind, runs in groups.items()}


@table
def hardware():
    """Two processes against one."""
    yield ["", *SCRIPTS]
    for kind, values in distances().items():
        yield [f"{kind}, 128 episodes", *map(small, values)]
    for what in ("1 and 2 processes", "micro-batches of 64 and 16"):
        cells = [f"completions of the default run that differ between {what}"]
        for script in SCRIPTS:
            [run] = load("hardware/rounding.json", part=script, between=what)
            cells.append(f"{run['completions_that_differ']} of {run['completions']:,}")
        yield cells


@table
def rounding():
    """PPO with micro-batches of 64 against 16: as it is, and with less that amplifies rounding."""
    groups = grouped(load("hardware/rounding.json"), "part")
    cases = [case for case in groups if case.startswith("PPO")]
    completions = groups[cases[-1]][0]["completions"]
    yield [
        "case",
        "distance, median and range",
        "seeds with other completions",
        f"at most, of {completions:,}",
        "the first in iteration",
    ]
    for case in cases:
        distances = column(groups[case], "distance")
        low = small(min(distances))
        middle = small(median(distances))
        high = small(max(distances))
        counts = column(groups[case], "completions_that_differ")
        parted = f"{sum(map(bool, counts))} of {len(counts)}"
        first = column(groups[case], "first_iteration")
        first = min(filter(None, first), default="none")
        yield [case, f"{middle} ({low} to {high})", parted, max(counts), first]


@table
def kills():
    """Runs that were killed, against those that were not."""
    yield ["", *SCRIPTS]
    names = {"1": "one process", "2": "two", "1, 2 by turns": "one and two in turn"}
    for processes, runs in grouped(load("hardware/kill_and_resume.json"), "processes").items():
        cells = [f"resumed on {names[processes]}"]
        for run in runs:
            cell = small(run["relative_distance"])
            if run["bitwise"]:
                cell = "bitwise equal"
            cells.append(cell)
        yield cells


@table
def kl_term():
    """The score that was learned, and the true one, at two coefficients."""
    head = ["`--kl-coef`"]
    for script in SCRIPTS:
        head += [f"{script}: learned", f"{script}: true"]
    yield head
    for kl_coef in (0.01, 0.3):
        cells = [kl_coef]
        for script in SCRIPTS:
            some = default("reward_model", script=script, kl_coef=kl_coef)
            first = mean(points(some, "objective/scores", 1))
            last = mean(points(some, "objective/scores", -1))
            true = mean(points(some, "eval/scores", -1))
            cells += [f"{first:.2f} -> {last:.2f}", f"{true:.2f}"]
        yield cells


@table
def speed():
    """Tally beside TRL."""
    yield [
        "case: model, prompt and completion tokens",
        "pairs of runs, measured steps in each",
        "RLOO: speed (of single pairs); memory",
        "GRPO: speed; memory",
    ]
    for case, some in grouped(load("throughput/throughput.json"), "part").items():
        cells = {"rloo": "not run", "grpo": "not run"}
        for row in some:
            spread = f"({row['lowest']:.1f} to {row['highest']:.1f})"
            tally = row["tally"]["peak_gib"]
            trl = row["trl"]["peak_gib"]
            memory = f"{tally:.2g}, {trl:.2g}"
            cells[row["algorithm"]] = f"{row['ratio']:.1f}x {spread}; {memory}"
        one = some[0]
        about = f"{case}: {one['about']}; batch {one['batch']}"
        yield [about, f"{one['pairs']}, {one['measured_steps']}", *cells.values()]


# ========== README.md ==========
def means_of_scripts(rows: list[dict], name: str, digits: int) -> str:
    means = []
    for some in grouped(rows, "script").values():
        means.append(f"{mean_of(some, name):.{digits}f}")
    return ", ".join(means)


@table
def evidence():
    """Every claim in one number."""
    before = mean_of(default(), "greedy_before")
    after = means_of_scripts(default(), "greedy_after", 3)
    unseen = means_of_scripts(claims("pairs"), "unseen_after", 2)
    models = smollm2_models()
    start = models["before"][3]
    five = [numbers[3] for name, numbers in models.items() if name.startswith("RLOO")]
    grpo = models["GRPO, seed 1"][3]
    ppo = models["PPO, seed 1"][3]
    trl = small(largest("same"), 0)
    torchrl = small(largest("ppo"), 0)
    undone = mini_batches(undone=True)
    different = len(set(column(undone, "what")))
    first, second = [row["gradient"] for row in undone if "TRL multiplies the KL" in row["what"]]
    replayed = max(column(load("parity/replay.json"), "distance"))
    apart = max(map(max, distances().values()))
    killed = sum(column(load("hardware/kill_and_resume.json"), "kills"))
    speeds = load("throughput/throughput.json")
    speeds = [row for row in speeds if row["part"] != "gpu"]
    short = [row for row in speeds if row["part"] != "d"]
    [long] = load("throughput/throughput.json", part="d")
    count = sum(column(speeds, "pairs"))
    few = sum(row["pairs"] for row in speeds if row["measured_steps"] <= 3)
    memory = []
    for row in speeds:
        tally = row["tally"]["peak_gib"]
        memory.append(100 * tally / row["trl"]["peak_gib"])
    rows = f"""
It learns | held-out sums whose most likely answer is right, ten seeds (RLOO, GRPO, PPO): \
{before:.2f} before; {after} after 16,384, 16,384 and 8,192 episodes. On pairs of last digits that \
RL did not show (the start had once learned them): {unseen} | \
[the default task](benchmark/README.md#the-default-task), \
[pairs](docs/claims.md#are-the-held-out-questions-new)
It computes what others compute | after {different} differences are removed, loss and \
gradient of a mini-batch differ by about {trl} from TRL 1.16, by {torchrl} from torchrl 0.14. In \
GRPO with KL, one difference (TRL's default) is {first:.2f} of a tiny random model's gradient in \
the first update on a rollout, {second:.2f} in the second, after a large step | \
[parity](benchmark/parity/README.md)
A whole run agrees with TRL (RLOO; GRPO without KL) | TRL, with its differences removed, trains on \
Tally's completions: the final weights differ by {small(replayed)} of the distance that they moved \
| [parity](benchmark/parity/README.md)
Two processes make the run of one | runs of 128 episodes, with DDP, FSDP2 and ZeRO, differ by \
about {small(apart)} of the distance that the weights moved, or less | \
[processes](benchmark/README.md#one-run-on-any-number-of-processes)
Nothing is lost | {killed} kills with SIGKILL: resumed runs of 188 episodes give the unbroken \
run's weights, bit for bit on as many processes | [kills](benchmark/README.md#kills)
A real model learns | SmolLM2-135M-Instruct, of 4-bit weights, on sums and differences of digits, \
each model at the best of four temperatures: of the answers to 60 held-out questions \
{start:.2f} are right before, {min(five):.2f} to {max(five):.2f} after 640 episodes of RLOO \
(five seeds), {grpo:.2f} of GRPO, {ppo:.2f} of PPO (one) | \
[a real model](docs/claims.md#and-a-real-model)
It is faster than TRL on one CPU core | beside TRL 1.16, with KL, {count} pairs of runs: with \
prompts of 6 to 32 tokens {min(column(short, "lowest")):.1f} to \
{max(column(short, "highest")):.1f} times its episodes per second (RLOO, GRPO), with 300 to 400 \
tokens {long["ratio"]:.1f} (RLOO); {min(memory):.0f} to \
{max(memory):.0f} % of its memory. {few} pairs have only two or three measured steps | \
[speed](benchmark/README.md#speed)
"""
    yield ["claim", "measured", "where"]
    for line in rows.strip().splitlines():
        yield line.split(" | ")


# ========== docs/ladder.md ==========
def with_interval(middle: float, band: float, digits: int = 3) -> str:
    low = middle - band
    high = middle + band
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def ladder(part: str, **wanted) -> list[dict]:
    return load("ladder/ladder.json", part=part, **wanted)


def ladder_sets(rung: str, weights: str) -> list[dict]:
    rows = ladder("gradients", rung=rung, weights=weights)
    return [row for row in rows if row["prompts"] != "fresh"]


def noise(row: dict) -> float:
    return row["variance"] / row["squared_mean"]


def ladder_relative_noise(rung: str, weights: str) -> tuple[float, float, float]:
    """A rung's noise, times RLOO's: the geometric mean over the sets, between the ends of its
    interval."""
    rows = ladder_sets(rung, weights)
    of_rloo = ladder_sets("RLOO", weights)
    ratios = []
    for row, rloo in zip(rows, of_rloo, strict=True):
        ratios.append(math.log(noise(row) / noise(rloo)))
    middle, band = mean_and_band(ratios)
    low = math.exp(middle - band)
    high = math.exp(middle + band)
    return low, math.exp(middle), high


def ladder_ends(part: str, **wanted) -> list[float]:
    """The last scores of the runs that have these entries, a number for each seed."""
    return points(ladder(part, **wanted), "held_out", -1)


@table
def ladder_learning():
    """Each rung with as many episodes, and with as many prompts in a batch."""
    yield ["", "k", "prompts in A", "A: 64 episodes a batch", "B: 64 prompts a batch"]
    for rung, runs in grouped(ladder("learning"), "rung").items():
        for k in grouped(runs, "k"):
            cells = [rung, k, 64 // k]
            for equal in ("episodes", "prompts"):
                if k == 1:  # Both are the same runs.
                    equal = "episodes"
                ends = ladder_ends("learning", rung=rung, k=k, equal=equal)
                cell = ""
                if ends:
                    cell = with_interval(*mean_and_band(ends))
                cells.append(cell)
            yield cells


@table
def ladder_clipping():
    """The runs with 64 episodes a batch without gradient clipping: the difference of each seed."""
    yield ["", "k", "median norm", "bound 10 minus bound 1", "no bound minus bound 1"]
    for rung, runs in grouped(ladder("clipping"), "rung").items():
        for k in grouped(runs, "k"):
            wanted = dict(rung=rung, k=k, equal="episodes")
            norm = mean_of(ladder("learning", **wanted), "grad_norm")
            cells = [rung, k, f"{norm:.1f}"]
            ends = ladder_ends("learning", **wanted)
            for bound in ("10", "inf"):
                others = ladder_ends("clipping", bound=bound, **wanted)
                middle, band = mean_and_band(minus(others, ends))
                low = middle - band
                high = middle + band
                cells.append(f"{middle:+.3f} ({low:+.3f} to {high:+.3f})")
            yield cells


@table
def ladder_fresh():
    """The noise of batches with other prompts in each."""
    yield ["", "start", "half-way"]
    for rung, runs in grouped(ladder("gradients", prompts="fresh"), "rung").items():
        cells = [rung]
        for row in runs:  # at the start, and half-way
            cells.append(with_interval(noise(row), row["noise_band"], 1))
        yield cells


@table
def ladder_gradients():
    lines = {}
    for row in ladder("gradients", prompts=1):
        rung = row["rung"]
        weights = row["weights"]
        # Some rungs were measured half-way only.
        cells = lines.setdefault(rung, [rung, "", "", ""])
        low, middle, high = ladder_relative_noise(rung, weights)
        relative = f"{middle:.2f} ({low:.2f}-{high:.2f})"
        if weights == "start":
            cosines = column(ladder_sets(rung, weights), "cosine")
            cells[1] = relative
            cells[3] = with_interval(*mean_and_band(cosines))
        else:
            cells[2] = relative
    yield ["", "noise, start", "noise, half-way", "cosine, start"]
    yield from lines.values()


@table
def ladder_baselines():
    """The variance with a constant baseline is a parabola in it. Its values at -1, 0 and 1 were
    measured."""
    columns = []
    for weights in ("start", "half-way"):
        below = mean_of(ladder_sets("REINFORCE, scores + 1", weights), "variance")
        zero = mean_of(ladder_sets("REINFORCE", weights), "variance")
        above = mean_of(ladder_sets("REINFORCE, scores - 1", weights), "variance")
        slope = (above - below) / 2
        bend = (above + below) / 2 - zero
        best = -slope / bend / 2
        rloo = ladder_sets("RLOO", weights)
        score = mean_of(rloo, "score")
        cells = [f"{score:.2f}", f"{best:.2f}"]
        for baseline in (0, best, score):
            variance = zero + slope * baseline + bend * baseline**2
            cells.append(f"{variance:.0f}")
        cells.append(f"{mean_of(rloo, 'variance'):.0f}")
        columns.append(cells)
    names = [
        "mean score",
        "best constant baseline",
        "variance with baseline 0",
        "variance with the best",
        "variance with the mean score",
        "variance with RLOO's",
    ]
    yield ["", "start", "half-way"]
    yield from zip(names, *columns)


# ========== docs/failures.md ==========
def number(value: float) -> str:
    """With one, two or three decimals, and in powers of ten what is smaller."""
    if abs(value) >= 10:
        return f"{value:,.1f}"
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2f}"
    if abs(value) >= 0.001:
        return f"{value:.3f}"
    return f"{value:.0e}"


def failure_cell(runs: list[dict], metric: str) -> str:
    """The mean over the seeds, and their range. Of each seed it is the last evaluation, or the mean
    of another metric over the second half."""
    ends = []
    for row in runs:
        curve = row["curves"].get(metric)
        if not curve:
            continue
        if metric == "eval/scores":
            ends.append(curve[-1])
        else:
            ends.append(mean(curve[len(curve) // 2 :]))
    if not ends:
        return "not logged"
    low = number(min(ends))
    high = number(max(ends))
    if low == high:
        return low
    return f"{number(mean(ends))} ({low}–{high})"


@table
def failure(name: str):
    """A failure and its healthy run."""
    yield ["metric", "failure", "healthy"]
    runs = load("failures/failures.json", part=name)
    for metric in runs[-1]["curves"]:
        cells = [f"`{metric}`"]
        for run in ("failure", "healthy"):
            cells.append(failure_cell(having(runs, run=run), metric))
        yield cells


# ========== docs/variants.md ==========
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


def words_of(run: dict) -> set[str]:
    """The script and the flags of a run."""
    return {run["script"], *run["flags"].split()}


@table
def variants():
    """Each variant beside the script as it is, at the end of training: means over five seeds, with
    95 % intervals."""
    groups = grouped(load("variants/curves.json"), "part")
    originals = groups.pop("original")
    rows = []
    for patch, some in groups.items():
        flags = set().union(*map(words_of, some))
        original = [run for run in originals if words_of(run) <= flags]
        metric, name = ALSO.get(patch, ("", ""))
        right = []
        also = []
        for runs in (some, original):
            right.append(over_seeds(points(runs, "eval/scores", -1)))
            ends = []
            for run in runs:
                if metric not in run:
                    continue
                end = run[metric]
                if isinstance(end, list):  # a curve, not the mean of the run
                    end = end[-1]
                ends.append(end)
            also.append(number(mean(ends)) if ends else "")
        variant = f"{patch} (flags)"
        if (BENCHMARK / f"variants/{patch}.patch").exists():
            variant = f"`{patch}.patch`"
        episodes = some[0]["episode"][-1]
        rows.append([variant, f"{episodes:,}", *right, name, *also])
    yield ["variant", "episodes", "right answers", "without it", "also measured", "with", "without"]
    yield from sorted(rows)


@table
def one_batch_late():
    """Batches in time and late: right answers at the end, and over the curve what is more than in
    time."""
    yield ["batches", "right answers", "over the curve"]
    for kind, some in grouped(load("variants/one_batch_late.json"), "part").items():
        end = over_seeds(points(some, "eval/scores", -1), 3)
        means = [mean(curve[1:]) for curve in column(some, "eval/scores")]
        more = ""
        if kind == "in time":  # It comes first.
            in_time = means
        else:
            more = over_seeds(minus(means, in_time), 3)
        yield [kind, end, more]


# ========== benchmark/engine/README.md ==========
ENGINE = {  # of each part the columns, as measure.json names them
    "default": "held_out largest_logprob_difference weight_std median_rollout_s",
    "smollm2": "weight_std largest_logprob_difference sampled held_out_of_the_weights",
}


def engine_cell(value) -> str:
    if isinstance(value, list):
        return f"{engine_cell(value[0])} -> {engine_cell(value[-1])}"
    if isinstance(value, float):
        return f"{value:.2g}"
    return value


@table
def engine(part: str):
    """The runs of a part of benchmark/engine/measure.py."""
    names = ENGINE[part].split()
    yield ["run", *(name.replace("_", " ") for name in names)]
    for row in load("engine/measure.json", part=part):
        cells = [row["run"]]
        for name in names:
            cells.append(engine_cell(row.get(name, "")))
        yield cells


# ========== benchmark/parity/README.md ==========
def power(value: float) -> str:
    if value < 0.001:
        return small(value, 0)
    return f"{value:.2g}"


@table
def mini_batch():
    """The largest differences of loss and gradient in all cases that are the same in both
    programs."""
    yield ["what", "cases", "first: loss", "gradient", "second: loss", "gradient", "clipped"]
    updates = [row for row in mini_batches(undone=False) if "update" in row]
    for what, some in grouped(updates, "what").items():
        first = having(some, update=1)
        second = having(some, update=2)
        cells = [what, len(first)]
        for name in ("loss", "gradient"):
            cells.append(power(max(column(first, name))))
        if second:
            for name in ("loss", "gradient"):
                cells.append(power(max(column(second, name))))
            cut = [f"{x:.2f}" for x in column(second, "cut")]
            cells.append(f"{min(cut)}–{max(cut)}")
        else:
            cells += ["", "", ""]
        yield cells


@table
def differences():
    """The places where the programs mean different things."""
    yield ["difference", "of the gradient", "removed by", "left"]
    for what, some in grouped(mini_batches(undone=True), "what").items():
        name = "value"
        if "gradient" in some[0]:
            name = "gradient"
        found = max(column(some, name))
        left = max(column(some, f"undone_{name}"))
        yield [what, power(found), some[0]["undone_by"], power(left)]


@table
def replay():
    """TRL, trained on the completions of Tally's default run."""
    yield ["script", "updates", "distance"]
    for row in load("parity/replay.json"):
        yield [row["script"], row["updates"], f"{row['distance']:.1e}"]


# ========== docs/claims.md ==========
def claims(part: str, **wanted) -> list[dict]:
    """The runs of a part that have these entries."""
    return load("claims/claims.json", part=part, **wanted)


@table
def claims_coin():
    """Random and true rewards, and the best constant answer."""
    answers = column(read_rows(BENCHMARK / "default/eval.jsonl"), "answer")
    most_frequent = max(map(answers.count, answers))
    constant = f"{most_frequent / len(answers):.2f}"
    names = ("scores", "best_of_k", "entropy", "mode")
    all_runs = claims("coin")
    before = [f"{mean(points(all_runs, name, 0)):.2f}" for name in names]
    yield [
        "reward",
        "updates",
        "",
        "right",
        "pass@16",
        "entropy of a token",
        "share of the most frequent answer",
    ]
    yield ["best constant answer", "", "", constant, constant, "0.00", "1.00"]
    yield ["before training", "", "", *before]
    for reward, updates in sorted({(row["reward"], row["updates"]) for row in all_runs}):
        for script in ("rloo", "grpo"):
            cells = [f"`{reward}`", updates, script.upper()]
            runs = having(all_runs, reward=reward, updates=updates, script=script)
            for name in names:
                cells.append(over_seeds(points(runs, name, 1)))
            yield cells


@table
def claims_form():
    """Held-out answers after a reward for the format alone."""
    yield ["reward", "right answer, in any format", "right answer in the format"]
    judges = ("exact_match", "exactly")
    before = ["before training"]
    for judge in judges:
        first = mean(points(claims("form", judge=judge), "scores", 0))
        before.append(f"{first:.2f}")
    yield before
    for reward in ("digits", "exactly"):
        cells = [f"`{reward}`"]
        for judge in judges:
            runs = claims("form", reward=reward, judge=judge)
            cells.append(over_seeds(points(runs, "scores", 1)))
        yield cells


def pass_at(m: int, right: int, samples: int) -> float:
    """The chance that at least one of m samples is right, unbiased, from `samples` samples of which
    `right` are."""
    all_wrong = math.comb(samples - right, m)
    return 1 - all_wrong / math.comb(samples, m)


def over_questions(values: list[float], prompts: list[str]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval. The question a+b and its mirror b+a are one
    cluster."""
    middle = mean(values)
    clusters = {}
    for prompt, value in zip(prompts, values, strict=True):
        pair = tuple(sorted(prompt.rstrip("=").split("+")))
        clusters[pair] = clusters.get(pair, 0) + value - middle
    n = len(clusters)
    squares = sum(x**2 for x in clusters.values())
    variance = squares * n / (n - 1) / len(values) ** 2
    return middle, 1.96 * variance**0.5


def passes(m: int, **wanted) -> list[float]:
    """pass@m of each question, the mean over the seeds."""
    found = []
    for question in zip(*column(claims("passes", **wanted), "right")):
        found.append(mean(pass_at(m, right, 32) for right in question))
    return found


def passes_of(m: int, model: str) -> list[float]:
    """pass@m of each held-out question."""
    temperature = 1.0
    if model == "start, best temperature":  # the one that is best on training prompts
        model = "start"
        found = {}
        for tried in grouped(claims("passes", prompts="train"), "temperature"):
            found[tried] = mean(passes(m, prompts="train", temperature=tried))
        temperature = max(found, key=found.get)
    return passes(m, model=model, prompts="eval", temperature=temperature)


@table
def claims_passes():
    """pass@m before and after training, and the paired change at m = 16 from the start at its best
    temperature."""
    sizes = (1, 2, 4, 8, 16)
    yield ["m", *sizes, "change at 16"]
    prompts = sorted(column(read_rows(BENCHMARK / "default/eval.jsonl"), "prompt"))
    for model in ("start", "start, best temperature", *SCRIPTS):
        cells = [model]
        for m in sizes:
            values = passes_of(m, model)
            cells.append("{:.2f} ± {:.2f}".format(*over_questions(values, prompts)))
        change = ""
        if model in SCRIPTS:  # The values are those of m = 16 now.
            gains = minus(values, passes_of(16, "start, best temperature"))
            change = "{:+.3f} ± {:.3f}".format(*over_questions(gains, prompts))
        yield [*cells, change]


@table
def claims_rates():
    """The score of training at each rate."""
    rates = sorted(grouped(claims("rates"), "rate"))
    yield ["score of training", *map(small, rates)]
    for method, some in grouped(claims("rates"), "method").items():
        scores = []
        for rate in rates:
            runs = having(some, rate=rate)
            scores.append(mean_of(runs, "score"))
        cells = [method]
        for score in scores:
            cell = f"{score:.3f}"
            if score == max(scores):
                cell = f"**{cell}**"
            cells.append(cell)
        yield cells


def starts() -> dict[str, dict]:
    """The starting policies of the comparison of methods, and where their runs are."""
    found = {"built-in policy": dict(part="methods")}
    for start in grouped(claims("starts"), "start"):
        found[f"policy {start}"] = dict(part="starts", start=start)
    return found


@table
def claims_methods():
    """The methods at their best rates, from each starting policy."""
    yield ["right answers", *starts()]
    for method in grouped(claims("methods"), "method"):
        cells = [method]
        for wanted in starts().values():
            runs = claims(**wanted, method=method)
            cells.append(over_seeds(column(runs, "right"), 3))
        yield cells


def differences_of(part: str, **wanted) -> dict[tuple[str, str], list[float]]:
    """Of each pair of methods, the differences of their last scores, paired by seed."""
    methods = grouped(claims(part, **wanted), "method")
    pairs = {}
    for one, other in combinations(methods, 2):
        before = column(methods[one], "right")
        after = column(methods[other], "right")
        pairs[other, one] = minus(after, before)
    return pairs


def sign_flips(differences: list[float]) -> float:
    """The two-sided p of an exact test: how often a sum with random signs is as far from 0 as the
    one that was seen."""
    observed = abs(sum(differences)) - 1e-9
    as_far = []
    for signs in product((-1, 1), repeat=len(differences)):
        flipped = sum(map(operator.mul, differences, signs))
        as_far.append(abs(flipped) >= observed)
    return mean(as_far)


def holm(p_values: dict) -> dict:
    """Holm's correction: the smallest of n values is multiplied by n, the next one by n - 1, and so
    on."""
    corrected = {}
    largest = 0.0
    left = len(p_values)
    for name in sorted(p_values, key=p_values.get):
        largest = max(largest, min(1.0, p_values[name] * left))
        corrected[name] = largest
        left -= 1
    return corrected


@table
def claims_differences():
    """The differences of pairs of methods, with Holm's correction over all pairs of each starting
    policy. Pairs that differ from each policy are left out."""
    rows = {}
    shown = set()
    for wanted in starts().values():
        pairs = differences_of(**wanted)
        p_values = {}
        for pair, values in pairs.items():
            p_values[pair] = sign_flips(values)
        corrected = holm(p_values)
        for pair, values in pairs.items():
            middle, band = mean_and_band(values)
            cells = rows.setdefault(pair, [" minus ".join(pair)])
            cells.append(f"{middle:+.3f} ± {band:.3f}, {corrected[pair]:.3f}")
            if corrected[pair] > 0.05:
                shown.add(pair)
    yield ["difference, and Holm's p", *starts()]
    yield from (rows[pair] for pair in rows if pair in shown)


# its quantiles at 2.5 % and 97.5 % with 9 degrees of freedom, for ten seeds
CHI_SQUARED = (2.700, 19.023)


def seeds_needed(values: list[float], runs: int) -> str:
    """The seeds that show a mean difference of 0.02, 80 % of the time at a level of 5 %, with their
    95 % interval.

    runs: 2 for two methods with this deviation, 1 for differences that are paired by seed
    """
    needed = runs * (2.8 * stdev(values) / 0.02) ** 2
    squares = needed * (len(values) - 1)
    low = math.ceil(squares / CHI_SQUARED[1])
    high = math.ceil(squares / CHI_SQUARED[0])
    return f"{math.ceil(needed)} ({low} to {high})"


@table
def claims_seeds():
    """How many seeds a difference of 0.02 needs."""
    yield ["seeds for 0.02", "unpaired", "paired with RLOO"]
    to_others = differences_of("methods")
    for method, some in grouped(claims("methods"), "method").items():
        paired = ""
        if (method, "RLOO") in to_others:
            paired = seeds_needed(to_others[method, "RLOO"], 1)
        unpaired = seeds_needed(column(some, "right"), 2)
        yield [method, unpaired, paired]


@table
def claims_pairs():
    """Right answers to sums whose pair of last digits training showed, and to the others."""
    yield ["", "unseen pairs, before", "seen pairs, after", "unseen pairs, after", "difference"]
    for script, some in grouped(claims("pairs"), "script").items():
        before = mean_of(some, "unseen_before")
        seen = column(some, "seen_after")
        unseen = column(some, "unseen_after")
        cells = [script, f"{before:.3f}"]
        for values in (seen, unseen, minus(unseen, seen)):
            cells.append(over_seeds(values, 3))
        yield cells


@table
def claims_gold():
    """Fine-tuning on right answers at each rate, and with other seeds at the best one."""
    rates = grouped(claims("gold"), "rate")
    best = max(rates, key=lambda rate: len(rates[rate]))
    head = [""]
    cells = ["right answers"]
    for rate, some in rates.items():
        chosen = mean(row["on_training"] for row in some if row["seed"] < 4)
        head.append(f"rate {small(rate)}")
        cells.append(f"{chosen:.3f}")
    ends = [row["held_out"] for row in rates[best] if row["seed"] >= 4]
    head.append(f"held-out at {small(best)}")
    cells.append(over_seeds(ends, 3))
    yield head
    yield cells


def claims_effects() -> list[tuple[str, float, float]]:
    """Differences with half of their 95 % intervals, for a forest plot."""
    effects = {}
    for start, wanted in starts().items():
        for (one, other), values in differences_of(**wanted).items():
            if other == "RLOO":
                effects[f"{one} minus RLOO, {start}"] = values
    for script, some in grouped(claims("pairs"), "script").items():
        gaps = minus(column(some, "unseen_after"), column(some, "seen_after"))
        effects[f"unseen minus seen pairs, {script.upper()}"] = gaps
    for script, some in grouped(claims("coin", reward="coin", updates="1"), "script").items():
        effects[f"coin, after minus before, {script.upper()}"] = changes(some)
    for reward, some in grouped(claims("form", judge="exact_match"), "reward").items():
        effects[f"{reward}, after minus before, RLOO"] = changes(some)
    return [(label, *mean_and_band(values)) for label, values in effects.items()]


def changes(rows: list[dict]) -> list[float]:
    before = points(rows, "scores", 0)
    after = points(rows, "scores", 1)
    return minus(after, before)


def smollm2_right(runs: list[dict]) -> dict[float, list[float]]:
    """Of a model, for each temperature: the share of right samples, and that of questions with a
    right one. First of training questions (4 samples of each), then of held-out ones (8)."""
    found = {}
    for temperature, rows in grouped(runs, "temperature").items():
        right = {row["prompts"]: row["right"] for row in rows}
        found[temperature] = []
        for prompts, samples in (("train", 4), ("eval", 8)):
            counts = right[prompts]
            found[temperature] += [mean(counts) / samples, mean(count > 0 for count in counts)]
    return found


def smollm2_models() -> dict[str, tuple]:
    """Of each model: the temperature that is best on training questions; on held-out ones the right
    answers and pass@8 at temperature 1, and each at the best temperature on training questions."""
    models = {}
    for part in ("start", *SCRIPTS):
        for seed, runs in grouped(claims(f"smollm2_{part}"), "seed").items():
            found = smollm2_right(runs)
            best = max(found, key=lambda temperature: found[temperature][0])
            widest = max(found, key=lambda temperature: found[temperature][1])
            name = "before"
            if seed:
                name = f"{part.upper()}, seed {seed}"
            models[name] = (best, *found[1.0][2:], found[best][2], found[widest][3])
    return models


@table
def claims_smollm2():
    """A real model before and after training."""
    yield [
        "SmolLM2",
        "best temperature",
        "right at 1.0",
        "pass@8 at 1.0",
        "right at the best",
        "pass@8 at its best",
    ]
    models = smollm2_models()
    for name, (best, *numbers) in models.items():
        yield [name, best, *(f"{x:.2f}" for x in numbers)]
    trained = [numbers for name, numbers in models.items() if name.startswith("RLOO")]
    gains = []
    for i in range(1, 5):
        start = models["before"][i]
        gains.append(over_seeds([numbers[i] - start for numbers in trained]))
    yield ["gain of RLOO, five seeds", "", *gains]


# ========== writing ==========
def write_tables(text: str) -> str:
    """The text of a page with all its tables written again."""

    def write(found):
        name, *arguments = found[2].split()
        rows = TABLES[name](*arguments)
        return f"{found[1]}\n{markdown(*rows)}\n{found[3]}"

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
