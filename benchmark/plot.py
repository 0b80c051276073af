"""Draw the metrics of runs side by side.

    python benchmark/plot.py                                          # the newest run in runs/
    python benchmark/plot.py runs/a runs/b                            # two runs
    python benchmark/plot.py runs/* --metrics eval/scores grad_norm --x step --output curves.png

Each metric has an axis, against `episode`, `step` or `seconds` of rollout and training. Runs that differ in the seed
alone are one curve, their mean, in a band of one standard deviation. The legend has a curve's first run, and the flags
in which curves differ.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import tyro
import yaml

NOT_THE_RUN = {"seed", "output_dir", "resume", "save_every", "log_with", "plan"}


@dataclass
class Args:
    folders: tyro.conf.Positional[tuple[Path, ...]] = ()  # output folders of runs; none: the newest in runs/
    metrics: tuple[str, ...] = ("objective/scores", "eval/scores", "objective/kl", "response_length_mean")  # to draw
    x: Literal["episode", "step", "seconds"] = "episode"  # what they are drawn against
    output: Path = Path("runs/plot.png")  # the picture


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """A run's flags, and its lines of metrics.jsonl, each with the `seconds` until then."""
    if not (folder / "metrics.jsonl").exists():
        raise SystemExit(f"plot.py: {folder} holds no metrics.jsonl; name the --output-dir of a run")
    rows = [json.loads(line) for line in open(folder / "metrics.jsonl", encoding="utf-8")]
    for row, seconds in zip(rows, np.cumsum([r.get("time/rollout_s", 0) + r.get("time/train_s", 0) for r in rows])):
        row["seconds"] = float(seconds)
    return yaml.safe_load((folder / "args.yaml").read_text()), rows


def group_runs(folders: list[Path]) -> dict[str, list[list[dict]]]:
    """The rows of the runs of each curve, under a label: its first run, and the flags in which curves differ."""
    runs = [read_run(folder) for folder in folders]
    settings = [{name: x for name, x in flags.items() if name not in NOT_THE_RUN} for flags, _ in runs]
    common = [name for name in settings[0] if all(name in flags for flags in settings)]
    differing = [name for name in common if any(flags[name] != settings[0][name] for flags in settings)]
    labels, groups = {}, {}
    for folder, flags, (_, rows) in zip(folders, settings, runs):
        label = ", ".join([folder.name, *(f"{name} {flags[name]}" for name in differing)])
        groups.setdefault(labels.setdefault(json.dumps(flags), label), []).append(rows)
    return groups


def mean_and_deviation(group: list[list[dict]], metric: str, x: str) -> tuple[np.ndarray, ...]:
    """x, mean and standard deviation of a metric over the runs of a group, as far as all of them have come."""
    curves = [[(row[x], row[metric]) for row in rows if row.get(metric) is not None] for rows in group]
    length = min(len(curve) for curve in curves)
    points = np.array([curve[:length] for curve in curves]).reshape(len(curves), length, 2)
    return points[..., 0].mean(0), points[..., 1].mean(0), points[..., 1].std(0)


def main(args: Args):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    newest = sorted(Path("runs").glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)[-1:]
    folders = args.folders or [file.parent for file in newest]
    if not folders:
        raise SystemExit("plot.py: no run in runs/; name the --output-dir of one")
    groups = group_runs(folders)
    metrics = [name for name in args.metrics if any(name in row for rows in sum(groups.values(), []) for row in rows)]
    if not metrics:
        raise SystemExit(f"plot.py: --metrics {' '.join(args.metrics)}: no run has one of them")
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    size = dict(figsize=(3.6 * len(metrics), 3), dpi=120, squeeze=False)
    figure, axes = plt.subplots(1, len(metrics), **size, layout="constrained")
    for axis, metric in zip(axes[0], metrics):
        for label, group in groups.items():
            x, mean, deviation = mean_and_deviation(group, metric, args.x)
            [line] = axis.plot(x, mean, lw=1.4, marker="." if len(x) < 10 else None, label=label)
            if len(group) > 1:
                axis.fill_between(x, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.2, lw=0)
        axis.set(title=metric, xlabel=args.x)
        axis.grid(alpha=0.25)
    if len(groups) > 1:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output)
    print(f"{len(folders)} runs as {len(groups)} curves: {args.output}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
