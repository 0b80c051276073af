"""Draw the metrics of runs side by side.

    python benchmark/plot.py                                          # the newest run in runs/
    python benchmark/plot.py runs/a runs/b                            # two runs
    python benchmark/plot.py runs/* --metrics eval/scores grad_norm --x step --output curves.png
    python benchmark/plot.py runs/a --metrics time/rollout_s time/reward_s time/train_s

Runs that differ in the seed alone are one curve, their mean, in its 95 % confidence band. The
legend has a curve's first run, the flags in which curves differ, and in how many lines its script
and its reward differ from those of the first curve.
"""

import json
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal

import draw
import numpy as np
import tyro
from run import read_run

NOT_THE_RUN = {"seed", "output_dir", "resume", "save_every", "log_with", "plan"}
NOT_THE_RUN |= {"versions", "processes"}
METRICS = ("objective/scores", "eval/scores", "objective/kl", "response_length_mean")


@dataclass
class Args:
    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """output folders of runs; none: the newest in runs/"""
    metrics: tuple[str, ...] = METRICS
    """to draw"""
    x: Literal["episode", "step", "seconds"] = "episode"
    """what they are drawn against"""
    output: Path = Path("runs/plot.png")
    """the picture"""


def lines_that_differ(code, other):
    """In how many lines two texts differ. A run of an older script has kept none."""
    if not code or not other:
        return 0
    pieces = SequenceMatcher(None, code, other, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in pieces if kind != "equal")


def group_runs(folders):
    """The rows of the runs of each curve, under a label.

    The label is the curve's first run, the flags in which curves differ, and how many lines do.
    """
    runs = [read_run(folder) for folder in folders]
    codes = []  # the lines of the script and the reward of each run
    for folder in folders:
        texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))]
        codes.append("\n".join(texts).splitlines())
    settings = []
    for run in runs:
        flags = run["args"]
        settings.append({name: flags[name] for name in flags if name not in NOT_THE_RUN})
    differing = []
    for name in set.intersection(*map(set, settings)):
        if any(flags[name] != settings[0][name] for flags in settings):
            differing.append(name)
    labels = {}
    groups = {}
    for folder, flags, run, code in zip(folders, settings, runs, codes):
        words = [folder.name, *(f"{name} {flags[name]}" for name in sorted(differing))]
        count = lines_that_differ(code, codes[0])
        if count > 0:
            words.append(f"{count} lines differ")
        label = labels.setdefault(json.dumps([flags, code]), ", ".join(words))
        groups.setdefault(label, []).append(run["metrics"])
    return groups


def points(group, metric, x):
    """The mean x [points] and the metric [runs, points], as far as all runs of a group have
    come."""
    curves = []
    for rows in group:
        curves.append([(row[x], row[metric]) for row in rows if metric in row])
    length = min(map(len, curves))
    both = np.array([curve[:length] for curve in curves])
    both = both.reshape(len(curves), length, 2)
    return both[..., 0].mean(0), both[..., 1]


def main(args):
    files = sorted(Path("runs").glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    folders = args.folders or [file.parent for file in files[-1:]]
    if not folders:
        raise SystemExit("plot.py: no run in runs/; name the --output-dir of one")
    groups = group_runs(folders)
    logged = set()
    for group in groups.values():
        for rows in group:
            logged.update(*rows)
    metrics = [name for name in args.metrics if name in logged]
    if not metrics:
        raise SystemExit(f"plot.py: --metrics {' '.join(args.metrics)}: no run has one of them")
    figure, axes = draw.panels(1, len(metrics), width=3.6, height=3)
    for axis, metric in zip(axes[0], metrics):
        for label, group in groups.items():
            x, values = points(group, metric, args.x)
            marker = "." if len(x) < 10 else None
            draw.curve(axis, x, values, label=label, marker=marker)
        axis.set_title(metric)
        axis.set_xlabel(args.x)
    if len(groups) > 1:
        lines = axes[0, 0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", frameon=False)
    print(f"{', '.join(map(str, folders))} as {len(groups)} curves: ", end="")
    draw.save(figure, args.output)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
