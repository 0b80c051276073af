"""Runs each failure of docs/failures.md beside its healthy run, seeds 1 to 3.

    python benchmark/failures/failures.py                    # all of them
    python benchmark/failures/failures.py no_kl interleaved  # only these, the others are kept
    python benchmark/failures/failures.py --plot             # only the figures again

A failure has other flags than its healthy run, or it runs under broken.py. Writes failures.json, a
run a line, and a figure for each failure. A run is kept as POINTS points: a metric's mean since the
point before, and evaluations.
"""

import sys
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import broken
import draw
from run import Part, curves, having, main, read_result
from tables import number

RESULT = Path(__file__).with_suffix(".json")
POINTS = 16
JUDGES = "--reward benchmark/failures/judges.py"
TRUTH = "--eval-reward exact_match"
MODEL = f"--reward none --reward-model-path benchmark/default/reward_model {TRUTH}"
MODEL += " --eval-temperature 1"
COLORS = {"failure": draw.OTHERS[4], "healthy": draw.OTHERS[0]}
METRICS = {  # those of the figure, and after the bar those of the page's table alone
    "learning_rate": "eval/scores objective/kl grad_norm",
    "no_kl": "objective/scores eval/scores",
    "missing_ends": "val/num_eos_tokens response_length_mean eval/scores"
    " | objective/scores objective/kl",
    "temperature": "objective/scores policy/clipfrac_avg policy/entropy_avg",
    "eos_masked": "eval/scores response_length_mean",
    "interleaved": "eval/scores group/equal_scores_fraction policy/entropy_avg",
    "equal_scores": "objective/scores eval/scores response_length_mean | val/num_eos_tokens",
}


def kept(name, result):
    """What is kept of a run: its first evaluation, and its curves in POINTS points."""
    points = curves(result, METRICS[name].replace("|", "").split())
    episode = points.pop("episode")[1:]
    start, *_ = points.get("eval/scores", [None])
    points = {metric: values[1:] for metric, values in points.items()}
    return dict(episode=episode, start=start, curves=points)


LENGTH = f"{JUDGES}:likes_length {TRUTH}"
LITTLE_LENGTH = f"{JUDGES}:likes_length_a_little {TRUTH}"
KINDER = f"{JUDGES}:kinder_to_some_prompts {TRUTH}"
SHORT_ANSWERS = f"{JUDGES}:first_two_digits --temperature 2"
FAILURES = {  # script, episodes, flags of both runs, of the failure, of the healthy one; breaks
    "learning_rate": ("rloo", 4096, "", "--learning-rate 1e-3", ""),
    "no_kl": ("rloo", 8192, MODEL, "--kl-coef 0", "--kl-coef 0.1"),
    "missing_ends": ("rloo", 8192, LENGTH, "", "--missing-eos-penalty 1"),
    "temperature": ("ppo", 4096, "", "", "--temperature 2", "temperature", "no_check"),
    "eos_masked": ("rloo", 12288, SHORT_ANSWERS, "", "", "eos_masked", "no_check"),
    "interleaved": ("grpo", 4096, KINDER, "", "", "interleaved"),
    "equal_scores": ("grpo", 8192, LITTLE_LENGTH, "", "--scale-rewards none"),
}
PARTS = {}
for name, (script, episodes, flags, failure, healthy, *breaks) in FAILURES.items():
    edits = [broken.BREAKS[word] for word in breaks]
    runs = [
        (dict(run="failure"), script, f"{flags} {failure}", *edits),
        (dict(run="healthy"), script, f"{flags} {healthy}"),
    ]
    every = episodes // 64 // POINTS  # An iteration has 64 episodes.
    both = f"--total-episodes {episodes} --num-sample-generations 0 --eval-every {every}"
    PARTS[name] = Part(runs, both, (1, 2, 3), partial(kept, name))


def cell(runs, metric):
    """The mean over the seeds, and their range. Of each seed it is the last evaluation, or the mean
    of another metric over the second half."""
    ends = []
    for row in runs:
        curve = row["curves"][metric]
        ends.append(mean(curve[-1:] if metric == "eval/scores" else curve[len(curve) // 2 :]))
    low = number(min(ends))
    high = number(max(ends))
    return low if low == high else f"{number(mean(ends))} ({low}–{high})"


def table(name):
    """The metrics of a failure and of its healthy run."""
    rows = having(read_result(RESULT)["rows"], part=name)
    for metric in rows[-1]["curves"]:
        cells = [cell(having(rows, run=run), metric) for run in COLORS]
        yield [f"`{metric}`", *cells]


def draw_panel(axis, rows, metric):
    """Of one failure: a thin line for each seed, and a thick one for their mean."""
    for run, color in COLORS.items():
        style = dict(color=color, ls="-" if run == "failure" else "--")
        curves = []
        for row in having(rows, run=run):
            start = [row["start"]] if metric == "eval/scores" else []
            curves.append(start + row["curves"][metric])
            x = [0] * len(start) + row["episode"]
            axis.plot(x, curves[-1], lw=0.6, alpha=0.5, **style)
        axis.plot(x, np.mean(curves, 0), lw=2, label=run, **style)
    axis.set_title(metric, fontsize=9)
    draw.in_thousands(axis)
    top = 1.02 if metric == "eval/scores" else axis.get_ylim()[1]
    axis.set_ylim(-0.03 * top, top)  # A line at 0 does not lie on the axis.


def plot(rows, folder):
    for name, metrics in METRICS.items():
        metrics = metrics.split(" |")[0].split()
        figure, grid = draw.panels(1, len(metrics), width=2.5, height=2.2)
        for axis, metric in zip(grid.flat, metrics, strict=True):
            draw_panel(axis, having(rows, part=name), metric)
        labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(*labels, loc="outside lower center", ncols=2, frameon=False)
        draw.save(figure, folder / f"{name}.png")


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
