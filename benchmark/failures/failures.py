"""Runs each failure of docs/failures.md beside its healthy run, seeds 1 to 3.

    python benchmark/failures/failures.py                             # 12 minutes on one core
    python benchmark/failures/failures.py no_kl interleaved           # only these, the others are kept
    python benchmark/failures/failures.py --plot                      # only the figures and the tables again

A failure is a command, and for some a patch. Patches are applied to copies of the scripts in a temporary folder. As
many runs at once as there are cores, of one thread each. Writes failures.json, a run a line, and a figure for each
failure. Prints the tables of the page.

A run is kept as sixteen points. A point of a metric is its mean over a sixteenth of the run's iterations. A point of
eval/scores is the evaluation at the end of them. The tables show means over the second half of a run, and the last
evaluation.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw  # noqa: E402
from run import BENCHMARK, ROOT, SCRIPTS, run_all, write_lines  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULT = Path(__file__).with_suffix(".json")
SEEDS = (1, 2, 3)
POINTS = 16
BATCH_SIZE = 64  # of all these runs
JUDGES = "--reward benchmark/failures/judges.py"
TRUTH = "--eval-reward exact_match"
REWARD_MODEL = f"--reward none --reward-model-path benchmark/default/reward_model {TRUTH} --eval-temperature 1"
COLORS = {"failure": draw.OTHERS[4], "healthy": draw.OTHERS[0]}


class Failure(NamedTuple):
    name: str
    script: str
    episodes: int
    drawn: tuple[str, ...]  # a panel for each of these metrics
    tabled: tuple[str, ...] = ()  # more rows of the page's table
    flags: str = ""  # of both runs
    failure: str = ""  # flags of the failure alone
    healthy: str = ""  # flags of the healthy run alone
    patches: tuple[str, ...] = ()  # of the failure


FAILURES = [
    Failure(
        "learning_rate",
        "rloo",
        4096,
        drawn=("eval/scores", "objective/kl", "grad_norm"),
        failure="--learning-rate 1e-3",
    ),
    Failure(
        "no_kl",
        "rloo",
        8192,
        drawn=("objective/scores", "eval/scores"),
        flags=REWARD_MODEL,
        failure="--kl-coef 0",
        healthy="--kl-coef 0.1",
    ),
    Failure(
        "missing_ends",
        "rloo",
        8192,
        drawn=("val/num_eos_tokens", "response_length_mean", "eval/scores"),
        tabled=("objective/scores", "objective/kl"),
        flags=f"{JUDGES}:likes_length {TRUTH}",
        healthy="--missing-eos-penalty 1",
    ),
    Failure(
        "temperature",
        "ppo",
        4096,
        drawn=("objective/scores", "policy/clipfrac_avg", "policy/entropy_avg"),
        tabled=("val/sampling_logprob_difference", "policy/approxkl_avg", "eval/scores"),
        healthy="--temperature 2",
        patches=("temperature", "no_check"),
    ),
    Failure(
        "eos_masked",
        "rloo",
        12288,
        drawn=("eval/scores", "response_length_mean"),
        tabled=("val/sampling_logprob_difference", "objective/scores"),
        flags=f"{JUDGES}:first_two_digits --temperature 2",
        patches=("eos_masked", "no_check"),
    ),
    Failure(
        "interleaved",
        "grpo",
        4096,
        drawn=("eval/scores", "group/zero_advantage_fraction", "policy/entropy_avg"),
        flags=f"{JUDGES}:kinder_to_some_prompts {TRUTH}",
        patches=("interleaved",),
    ),
    Failure(
        "no_clip",
        "grpo",
        4096,
        drawn=("eval/scores", "policy/approxkl_avg", "grad_norm"),
        tabled=("val/ratio_var", "policy/clipfrac_avg", "objective/scores"),
        flags="--num-ppo-epochs 8 --num-mini-batches 2",
        failure="--cliprange 10",
    ),
    Failure(
        "equal_scores",
        "grpo",
        8192,
        drawn=("objective/scores", "eval/scores", "response_length_mean"),
        tabled=("val/num_eos_tokens",),
        flags=f"{JUDGES}:likes_length_a_little {TRUTH}",
        healthy="--scale-rewards none",
    ),
]


def command(failure: Failure, run: str) -> str:
    """The command of a run as the page shows it, without the seed."""
    own = failure.failure if run == "failure" else failure.healthy
    words = f"python {failure.script}.py --total-episodes {failure.episodes} {failure.flags} {own}"
    return " ".join(words.split())


def run_flags(failure: Failure, run: str, seed: int) -> str:
    every = failure.episodes // BATCH_SIZE // POINTS
    return f"{command(failure, run).split(' ', 2)[2]} --num-sample-generations 0 --eval-every {every} --seed {seed}"


def copy_scripts(folder: Path, patches: tuple[str, ...]) -> Path:
    """The three scripts in a folder of their own, patched, and what their defaults need."""
    folder.mkdir(parents=True)
    for script in SCRIPTS:
        shutil.copy(ROOT / f"{script}.py", folder)
    (folder / "benchmark").symlink_to(BENCHMARK)
    for patch in patches:
        subprocess.run(["git", "apply", str(HERE / f"{patch}.patch")], cwd=folder, check=True)
    return folder


def to_result(result: dict, metrics: tuple[str, ...]) -> dict:
    """What is kept of a run: its first evaluation, and its curves in POINTS points."""
    first, *rows = result["metrics"]
    pieces = np.array_split(rows, POINTS)
    kept = {"episode": [piece[-1]["episode"] for piece in pieces], "start": round(first["eval/scores"], 4)}
    curves = {}
    for name in metrics:
        if name == "eval/scores":
            curves[name] = [round(piece[-1][name], 4) for piece in pieces]
        elif any(name in row for row in rows):  # without a reference there is no KL
            curves[name] = [float(f"{mean_of(piece, name):.4g}") for piece in pieces]
    return kept | {"curves": curves}


def mean_of(rows: list[dict], name: str) -> float:
    """The mean of a metric over the iterations that have it."""
    return float(np.mean([row[name] for row in rows if name in row]))


def measure(failures: list[Failure]) -> list[dict]:
    """Run these failures and their healthy runs -> what is kept of the runs."""
    with tempfile.TemporaryDirectory() as temporary:
        jobs = {}  # of each job, which run it is
        for failure in failures:
            folder = copy_scripts(Path(temporary) / failure.name, failure.patches)
            scripts = {"failure": str(folder / f"{failure.script}.py"), "healthy": failure.script}
            for run, script in scripts.items():
                for seed in SEEDS:
                    jobs[script, run_flags(failure, run, seed)] = (failure, run, seed)

        def finish(job: tuple, result: dict) -> dict:
            failure, run, seed = jobs[job]
            names = {"failure": failure.name, "run": run, "seed": seed, "command": command(failure, run)}
            return names | to_result(result, failure.drawn + failure.tabled)

        return run_all(list(jobs), finish)


def runs_of(results: list[dict], failure: Failure, run: str) -> list[dict]:
    return [row for row in results if (row["failure"], row["run"]) == (failure.name, run)]


def number(value: float) -> str:
    """As the page writes it: with one, two or three decimals, and in powers of ten what is smaller."""
    if abs(value) >= 10:
        return f"{value:,.1f}"
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2f}"
    return f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.0e}"


def end_of(row: dict, metric: str) -> float:
    """The last evaluation of a run, or the mean of a metric over its second half."""
    curve = row["curves"][metric]
    return curve[-1] if metric == "eval/scores" else float(np.mean(curve[POINTS // 2 :]))


def mean_and_range(values: list[float]) -> str:
    """The mean over the seeds, and the lowest and the highest seed. Without values: a run does not log the metric."""
    if not values:
        return "not logged"
    low, high = number(min(values)), number(max(values))
    return f"{number(float(np.mean(values)))} ({low} to {high})" if low != high else low


def table(results: list[dict], failure: Failure) -> dict[str, tuple[str, str]]:
    """Of each metric, the end of the failure and of the healthy run, as the page writes them."""
    rows = {}
    for name in failure.drawn + failure.tabled:
        ends = []
        for run in COLORS:
            values = [end_of(row, name) for row in runs_of(results, failure, run) if name in row["curves"]]
            ends.append(mean_and_range(values))
        rows[name] = tuple(ends)
    return rows


def draw_panel(axis, results: list[dict], failure: Failure, metric: str):
    """A thin line for each seed, and a thick one for their mean."""
    for run, color in COLORS.items():
        some = [row for row in runs_of(results, failure, run) if metric in row["curves"]]
        values = [row["curves"][metric] for row in some]
        if not values:
            continue
        x = some[0]["episode"]
        if metric == "eval/scores":
            x = [0, *x]
            values = [[row["start"], *row["curves"][metric]] for row in some]
        style = dict(color=color, ls="-" if run == "failure" else "--")
        for of_seed in values:
            axis.plot(x, of_seed, lw=0.6, alpha=0.5, **style)
        axis.plot(x, np.mean(values, 0), lw=2, label=run, **style)
    axis.set_title(metric, fontsize=9)
    draw.in_thousands(axis)
    axis.set_ylim(0, {"eval/scores": 1.02}.get(metric))


def plot(results: list[dict], failure: Failure):
    figure, grid = draw.panels(1, len(failure.drawn), width=2.5, height=2.2)
    for axis, metric in zip(grid.flat, failure.drawn, strict=True):
        draw_panel(axis, results, failure, metric)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    draw.save(figure, HERE / f"{failure.name}.png")


def main():
    words = sys.argv[1:]
    results = json.loads(RESULT.read_text()) if RESULT.exists() else []
    chosen = [failure for failure in FAILURES if words in ([], ["--plot"]) or failure.name in words]
    if words != ["--plot"]:
        names = {failure.name for failure in chosen}
        results = [row for row in results if row["failure"] not in names] + measure(chosen)
        order = [failure.name for failure in FAILURES]
        write_lines(RESULT, sorted(results, key=lambda row: order.index(row["failure"])))
    for failure in chosen:
        print(failure.name)
        for name, (of_failure, of_healthy) in table(results, failure).items():
            print(f"| `{name}` | {of_failure} | {of_healthy} |")
        plot(results, failure)


if __name__ == "__main__":
    main()
