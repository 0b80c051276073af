"""Runs each failure of docs/failures.md beside its healthy run, seeds 1 to 3.

    python benchmark/failures/failures.py                    # all of them
    python benchmark/failures/failures.py no_kl interleaved  # only these, the others are kept
    python benchmark/failures/failures.py --plot             # only the figures again

A failure has other flags than its healthy run, or it runs under broken.py. Writes failures.json, a
run a line, and a figure for each failure. A run is kept as POINTS points: a metric's mean since the
point before, and evaluations.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import broken
import draw
from run import Part, curves, main

RESULT = Path(__file__).with_suffix(".json")
SEEDS = (1, 2, 3)
POINTS = 16
JUDGES = "--reward benchmark/failures/judges.py"
TRUTH = "--eval-reward exact_match"
REWARD_MODEL = (
    f"--reward none --reward-model-path benchmark/default/reward_model {TRUTH} --eval-temperature 1"
)
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
    Failure(
        "missing_ends",
        "rloo",
        8192,
        f"{JUDGES}:likes_length {TRUTH}",
        healthy="--missing-eos-penalty 1",
    ),
    Failure("temperature", "ppo", 4096, healthy="--temperature 2", breaks="temperature no_check"),
    Failure(
        "eos_masked",
        "rloo",
        12288,
        f"{JUDGES}:first_two_digits --temperature 2",
        breaks="eos_masked no_check",
    ),
    Failure(
        "interleaved",
        "grpo",
        4096,
        f"{JUDGES}:kinder_to_some_prompts {TRUTH}",
        breaks="interleaved",
    ),
    Failure("no_clip", "grpo", 4096, "--num-ppo-epochs 8 --num-mini-batches 2", "--cliprange 10"),
    Failure(
        "equal_scores",
        "grpo",
        8192,
        f"{JUDGES}:likes_length_a_little {TRUTH}",
        healthy="--scale-rewards none",
    ),
]
PANELS = {  # the metrics that the figure shows
    "learning_rate": "eval/scores objective/kl grad_norm",
    "no_kl": "objective/scores eval/scores",
    "missing_ends": "val/num_eos_tokens response_length_mean eval/scores",
    "temperature": "objective/scores policy/clipfrac_avg policy/entropy_avg",
    "eos_masked": "eval/scores response_length_mean",
    "interleaved": "eval/scores group/equal_scores_fraction policy/entropy_avg",
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


def jobs_of(failure: Failure) -> dict[tuple, dict]:
    """The runs of a failure, and its healthy runs."""
    jobs = {}
    every = failure.episodes // 64 // POINTS  # an iteration has 64 episodes
    for run, own, breaks in (
        ("failure", failure.failure, failure.breaks),
        ("healthy", failure.healthy, ""),
    ):
        flags = " ".join(f"--total-episodes {failure.episodes} {failure.flags} {own}".split())
        program = (
            f"benchmark/failures/broken.py {breaks} {failure.script}.py"
            if breaks
            else f"{failure.script}.py"
        )
        edits = [broken.BREAKS[name] for name in breaks.split()]
        for seed in SEEDS:
            more = f"--num-sample-generations 0 --eval-every {every} --seed {seed}"
            names = {"run": run, "seed": seed, "command": f"python {program} {flags}"}
            jobs[failure.script, f"{flags} {more}", *edits] = names
    return jobs


def to_result(failure: str, result: dict) -> dict:
    """What is kept of a run: its first evaluation, and its curves in POINTS points."""
    points = curves(result, f"{PANELS[failure]} {TABLED.get(failure, '')}".split())
    kept = dict(episode=points.pop("episode")[1:], start=points["eval/scores"][0])
    return kept | dict(curves={name: values[1:] for name, values in points.items()})


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


PARTS = {}
for failure in FAILURES:
    PARTS[failure.name] = Part(
        jobs_of(failure), lambda _, result, name=failure.name: to_result(name, result)
    )


def plot(results: list[dict], folder: Path):
    for name, metrics in PANELS.items():
        metrics = metrics.split()
        figure, grid = draw.panels(1, len(metrics), width=2.5, height=2.2)
        for axis, metric in zip(grid.flat, metrics, strict=True):
            draw_panel(axis, [row for row in results if row["part"] == name], metric)
        labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(*labels, loc="outside lower center", ncols=2, frameon=False)
        draw.save(figure, folder / f"{name}.png")


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
