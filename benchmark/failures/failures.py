"""Runs each failure of docs/failures.md beside its healthy run, seeds 1 to 3.

    python benchmark/failures/failures.py                             # 12 minutes on one core
    python benchmark/failures/failures.py no_kl interleaved           # only these, the others are kept
    python benchmark/failures/failures.py --plot                      # only the figures again

A failure has other flags than its healthy run, or it runs under broken.py. Writes failures.json, a run a line, and a
figure for each failure. Then `python benchmark/tables.py` writes the tables of the page.

A run is kept as sixteen points. A point of a metric is its mean over a sixteenth of the run's iterations. A point of
eval/scores is the evaluation at the end of them.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import run_all, write_lines

RESULT = Path(__file__).with_suffix(".json")
SEEDS = (1, 2, 3)
POINTS = 16
JUDGES = "--reward benchmark/failures/judges.py"
TRUTH = "--eval-reward exact_match"
REWARD_MODEL = f"--reward none --reward-model-path benchmark/default/reward_model {TRUTH} --eval-temperature 1"
COLORS = {"failure": draw.OTHERS[4], "healthy": draw.OTHERS[0]}


class Failure(NamedTuple):
    name: str
    script: str
    episodes: int
    flags: str = ""  # of both runs
    failure: str = ""  # flags of the failure alone
    healthy: str = ""  # flags of the healthy run alone
    breaks: str = ""  # of the failure: functions of broken.py


FAILURES = [
    Failure("learning_rate", "rloo", 4096, failure="--learning-rate 1e-3"),
    Failure("no_kl", "rloo", 8192, REWARD_MODEL, "--kl-coef 0", "--kl-coef 0.1"),
    Failure("missing_ends", "rloo", 8192, f"{JUDGES}:likes_length {TRUTH}", healthy="--missing-eos-penalty 1"),
    Failure("temperature", "ppo", 4096, healthy="--temperature 2", breaks="temperature no_check"),
    Failure("eos_masked", "rloo", 12288, f"{JUDGES}:first_two_digits --temperature 2", breaks="eos_masked no_check"),
    Failure("interleaved", "grpo", 4096, f"{JUDGES}:kinder_to_some_prompts {TRUTH}", breaks="interleaved"),
    Failure("no_clip", "grpo", 4096, "--num-ppo-epochs 8 --num-mini-batches 2", "--cliprange 10"),
    Failure("equal_scores", "grpo", 8192, f"{JUDGES}:likes_length_a_little {TRUTH}", healthy="--scale-rewards none"),
]
PANELS = {  # the metrics that the figure shows
    "learning_rate": "eval/scores objective/kl grad_norm",
    "no_kl": "objective/scores eval/scores",
    "missing_ends": "val/num_eos_tokens response_length_mean eval/scores",
    "temperature": "objective/scores policy/clipfrac_avg policy/entropy_avg",
    "eos_masked": "eval/scores response_length_mean",
    "interleaved": "eval/scores group/zero_advantage_fraction policy/entropy_avg",
    "no_clip": "eval/scores policy/approxkl_avg grad_norm",
    "equal_scores": "objective/scores eval/scores response_length_mean",
}
TABLED = {  # metrics that stand in the page's table alone
    "missing_ends": "objective/scores objective/kl",
    "temperature": "val/sampling_logprob_difference policy/approxkl_avg eval/scores",
    "eos_masked": "val/sampling_logprob_difference objective/scores",
    "no_clip": "val/ratio_var policy/clipfrac_avg objective/scores",
    "equal_scores": "val/num_eos_tokens",
}


def broken_script(failure: Failure, folder: str) -> str:
    """A file that `run_all` imports as if it were the script."""
    path = Path(folder, f"{failure.name}.py")
    load = f"from broken import load\nscript = load({failure.script!r}, {failure.breaks.split()})\n"
    path.write_text(f"{load}Args, main = script.Args, script.main\n")
    return str(path)


def to_result(result: dict, metrics: list[str]) -> dict:
    """What is kept of a run: its first evaluation, and its curves in POINTS points."""
    first, *rows = result["metrics"]
    pieces = np.array_split(rows, POINTS)
    kept = {"episode": [piece[-1]["episode"] for piece in pieces], "start": round(first["eval/scores"], 4)}
    curves = {}
    for name in metrics:
        if name == "eval/scores":
            curves[name] = [round(piece[-1][name], 4) for piece in pieces]
        elif any(name in row for row in rows):  # without a reference there is no KL
            means = [np.mean([row[name] for row in piece if name in row]) for piece in pieces]
            curves[name] = [float(f"{mean:.4g}") for mean in means]
    return kept | {"curves": curves}


def measure(failures: list[Failure]) -> list[dict]:
    """Run these failures and their healthy runs -> what is kept of the runs."""
    jobs = {}  # of each job, which run it is
    with tempfile.TemporaryDirectory() as folder:
        for failure in failures:
            every = failure.episodes // 64 // POINTS  # an iteration has 64 episodes
            for run, own in (("failure", failure.failure), ("healthy", failure.healthy)):
                flags = " ".join(f"--total-episodes {failure.episodes} {failure.flags} {own}".split())
                script, program = failure.script, f"{failure.script}.py"
                if run == "failure" and failure.breaks:
                    script = broken_script(failure, folder)
                    program = f"benchmark/failures/broken.py {failure.breaks} {program}"
                for seed in SEEDS:
                    more = f"--num-sample-generations 0 --eval-every {every} --seed {seed}"
                    names = {"failure": failure.name, "run": run, "seed": seed}
                    jobs[script, f"{flags} {more}"] = names | {"command": f"python {program} {flags}"}

        def finish(job: tuple, result: dict) -> dict:
            name = jobs[job]["failure"]
            return jobs[job] | to_result(result, f"{PANELS[name]} {TABLED.get(name, '')}".split())

        return run_all(list(jobs), finish)


def draw_panel(axis, results: list[dict], metric: str):
    """Of one failure: a thin line for each seed, and a thick one for their mean."""
    for run, color in COLORS.items():
        some = [row for row in results if row["run"] == run and metric in row["curves"]]
        if not some:
            continue
        x, values = some[0]["episode"], [row["curves"][metric] for row in some]
        if metric == "eval/scores":
            x, values = [0, *x], [[row["start"], *row["curves"][metric]] for row in some]
        style = dict(color=color, ls="-" if run == "failure" else "--")
        for of_seed in values:
            axis.plot(x, of_seed, lw=0.6, alpha=0.5, **style)
        axis.plot(x, np.mean(values, 0), lw=2, label=run, **style)
    axis.set_title(metric, fontsize=9)
    draw.in_thousands(axis)
    top = 1.02 if metric == "eval/scores" else axis.get_ylim()[1]
    axis.set_ylim(-0.03 * top, top)  # A line at 0 does not lie on the axis.


def plot(results: list[dict], name: str):
    metrics = PANELS[name].split()
    figure, grid = draw.panels(1, len(metrics), width=2.5, height=2.2)
    for axis, metric in zip(grid.flat, metrics, strict=True):
        draw_panel(axis, [row for row in results if row["failure"] == name], metric)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    draw.save(figure, RESULT.with_name(f"{name}.png"))


def main():
    words = sys.argv[1:]
    results = json.loads(RESULT.read_text())
    chosen = [failure for failure in FAILURES if words in ([], ["--plot"]) or failure.name in words]
    if words != ["--plot"]:
        names = [failure.name for failure in chosen]
        results = [row for row in results if row["failure"] not in names] + measure(chosen)
        order = [failure.name for failure in FAILURES]
        write_lines(RESULT, sorted(results, key=lambda row: order.index(row["failure"])))
    for failure in chosen:
        plot(results, failure.name)


if __name__ == "__main__":
    main()
