"""Draw the metrics of runs side by side.

    python benchmark/plot.py                                          # the newest run in runs/
    python benchmark/plot.py runs/a runs/b                            # two runs
    python benchmark/plot.py runs/* --metrics eval/scores grad_norm --x step --output curves.png

Runs that differ in the seed alone are one curve, their mean, in its 95 % confidence band. The legend has a curve's
first run, and the flags in which curves differ.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import draw
import numpy as np
import tyro
from run import read_run

NOT_THE_RUN = {"seed", "output_dir", "resume", "save_every", "log_with", "plan"}


@dataclass
class Args:
    folders: tyro.conf.Positional[tuple[Path, ...]] = ()  # output folders of runs; none: the newest in runs/
    metrics: tuple[str, ...] = ("objective/scores", "eval/scores", "objective/kl", "response_length_mean")  # to draw
    x: Literal["episode", "step", "seconds"] = "episode"  # what they are drawn against
    output: Path = Path("runs/plot.png")  # the picture


def group_runs(folders: list[Path]) -> dict[str, list[list[dict]]]:
    """The rows of the runs of each curve, under a label: its first run, and the flags in which curves differ."""
    runs = [read_run(folder) for folder in folders]
    settings = [{name: x for name, x in run["args"].items() if name not in NOT_THE_RUN} for run in runs]
    common = [name for name in settings[0] if all(name in flags for flags in settings)]
    differing = [name for name in common if any(flags[name] != settings[0][name] for flags in settings)]
    labels, groups = {}, {}
    for folder, flags, run in zip(folders, settings, runs):
        label = ", ".join([folder.name, *(f"{name} {flags[name]}" for name in differing)])
        groups.setdefault(labels.setdefault(json.dumps(flags), label), []).append(run["metrics"])
    return groups


def points(group: list[list[dict]], metric: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean x [points] and the metric [runs, points] of a group's runs, as far as all of them have come."""
    curves = [[(row[x], row[metric]) for row in rows if row.get(metric) is not None] for rows in group]
    length = min(len(curve) for curve in curves)
    both = np.array([curve[:length] for curve in curves]).reshape(len(curves), length, 2)
    return both[..., 0].mean(0), both[..., 1]


def main(args: Args):
    newest = sorted(Path("runs").glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)[-1:]
    folders = args.folders or [file.parent for file in newest]
    if not folders:
        raise SystemExit("plot.py: no run in runs/; name the --output-dir of one")
    groups = group_runs(folders)
    metrics = [name for name in args.metrics if any(name in row for rows in sum(groups.values(), []) for row in rows)]
    if not metrics:
        raise SystemExit(f"plot.py: --metrics {' '.join(args.metrics)}: no run has one of them")
    figure, axes = draw.panels(1, len(metrics), width=3.6, height=3)
    for axis, metric in zip(axes[0], metrics):
        for label, group in groups.items():
            x, values = points(group, metric, args.x)
            draw.curve(axis, x, values, label=label, marker="." if len(x) < 10 else None)
        axis.set(title=metric, xlabel=args.x)
    if len(groups) > 1:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    print(f"{len(folders)} runs as {len(groups)} curves: ", end="")
    draw.save(figure, args.output)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
