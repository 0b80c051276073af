"""How every figure looks: one colour for each algorithm, and curves as means in 95 % bands."""

import sys

import numpy as np
from run import column, grouped

try:
    import matplotlib
    import scipy
except ImportError as error:
    sys.exit(f"this program needs {error.name}: pip install {error.name}")

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.dpi": 120,
    "figure.constrained_layout.use": True,
}
plt.rcParams.update(STYLE)
COLORS = {"rloo": "#1f6fb4", "grpo": "#d1495b", "ppo": "#e0a030"}
GRAY = "#7a7a7a"
# where no algorithm is meant
OTHERS = ("#3a9c74", "#7b5ea7", "#8c6d46", "#5b5b5b", "#c06fb0", "#9bb53c")


def panels(rows, columns, width, height, **settings):
    """A figure and its axes [rows, columns], `width` by `height` inches each."""
    size = (width * columns, height * rows)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, **settings)


def in_thousands(axis):
    """Episodes on the x axis, as 4k, 8k, .."""
    axis.set_xlabel("episodes")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")


def mean_and_band(values):
    """The mean over the seeds, and half the width of its 95 % confidence interval (Student's t).

    values: [seeds, ..]
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    mean = values.mean(0)
    if n < 2:
        return mean, np.zeros_like(mean)
    error = values.std(0, ddof=1) / n**0.5
    return mean, scipy.stats.t.ppf(0.975, n - 1) * error


def curve(axis, x, values, **style):
    """The mean of the seeds' curves in its 95 % band. x: [points]; values: [seeds, points]"""
    mean, band = mean_and_band(values)
    [line] = axis.plot(x, mean, lw=1.6, **style)
    axis.fill_between(x, mean - band, mean + band, color=line.get_color(), alpha=0.2, lw=0)


def panel(axis, title, rows, metric):
    """A metric against episodes, a curve for each `label` of the rows."""
    others = iter(OTHERS)
    for label, some in grouped(rows, "label").items():
        color = COLORS.get(label.removesuffix(".py").lower()) or next(others)
        curve(axis, some[0]["episode"], column(some, metric), color=color, label=label)
    if metric == "eval/scores":
        axis.set_ylim(-0.03, 1.03)  # A line at 0 does not lie on the axis.
    axis.set_title(title, fontsize=9)
    axis.legend(frameon=False, fontsize=7)
    in_thousands(axis)


def figure_of(path, columns, settings):
    """A figure of panels. settings: of each its title, rows and metric"""
    figure, grid = panels(len(settings) // columns, columns, width=3.3, height=2.4)
    for axis, own in zip(grid.flat, settings, strict=True):
        panel(axis, *own)
    save(figure, path)


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    print(path)
