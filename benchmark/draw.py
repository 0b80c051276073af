"""How every figure looks: one colour for each algorithm, and curves as means in 95 % bands."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"rloo": "#1f6fb4", "grpo": "#d1495b", "ppo": "#e0a030"}
GRAY = "#7a7a7a"
# where no algorithm is meant
OTHERS = ("#3a9c74", "#7b5ea7", "#8c6d46", "#5b5b5b", "#c06fb0", "#9bb53c")
# Student's t at 97.5 %, by the number of samples
T975 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def panels(rows: int, columns: int, width: float = 3.2, height: float = 2.8, **settings) -> tuple:
    """A figure and its axes [rows, columns], `width` by `height` inches each."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    size = dict(
        figsize=(width * columns, height * rows), dpi=120, squeeze=False, layout="constrained"
    )
    figure, axes = plt.subplots(rows, columns, **(size | settings))
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    return figure, axes


def in_thousands(axis):
    """Episodes on the x axis, as 4k, 8k, .."""
    axis.set_xlabel("episodes")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")


def mean_and_band(values) -> tuple[np.ndarray, np.ndarray]:
    """The mean over the seeds, and half the width of its 95 % confidence interval (Student's t).

    values: [seeds, ..]
    """
    values = np.asarray(values, dtype=float)
    t = T975.get(len(values), 1.96)
    error = (
        values.std(0, ddof=1) / len(values) ** 0.5
        if len(values) > 1
        else np.zeros(values.shape[1:])
    )
    return values.mean(0), t * error


def curve(axis, x, values, color=None, label=None, **style):
    """The mean of the seeds' curves in its 95 % band. x: [points]; values: [seeds, points]"""
    mean, band = mean_and_band(values)
    [line] = axis.plot(x, mean, color=color, label=label, **({"lw": 1.6} | style))
    if len(values) > 1:
        axis.fill_between(x, mean - band, mean + band, color=line.get_color(), alpha=0.2, lw=0)


def running_mean(values, window: int = 10) -> np.ndarray:
    """The mean of each value and those before it, `window` at most. values: [points]"""
    return np.array([np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))])


def save(figure, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    print(path)
