"""
Runs the three scripts as they come, without flags but the seed: `python benchmark/default_curves.py`.

As many runs at once as there are cores, of one thread each. It writes `results/default_curves.json` and `.png`; with
`--plot` it only draws the latter again. Names of scripts and seeds after the command (`rloo 1`) run only those, for a
try: they are printed and nothing is written.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import numpy as np

FOLDER = Path(__file__).resolve().parent
RESULT = FOLDER / "results" / "default_curves"
SCRIPTS = ("rloo", "grpo", "ppo")
SEEDS = (1, 2, 3, 4, 5)
COLORS = {"rloo": "#1f6fb4", "grpo": "#d1495b", "ppo": "#e0a030"}
WINDOW = 10  # iterations of the running mean, and of the score after


def run(script: str, seed: int) -> dict:
    """Runs a script with its defaults -> its curve and summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, FOLDER.parent / f"{script}.py", "--seed", str(seed), "--output-dir", f"{folder}/run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        finished = subprocess.run(command, capture_output=True, text=True, env=environment)
        if finished.returncode:
            raise SystemExit(finished.stderr)
        before, *iterations = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl", encoding="utf-8")]
    scores = [row["objective/scores"] for row in iterations]
    curve = {
        "script": script,
        "seed": seed,
        "sampled_before": round(scores[0], 4),
        "sampled_after": round(float(np.mean(scores[-WINDOW:])), 4),
        "greedy_before": round(before["eval/scores"], 4),
        "greedy_after": round(iterations[-1]["eval/scores"], 4),
        "episode": [row["episode"] for row in iterations],
        "objective/scores": [round(score, 4) for score in scores],
    }
    line = f"{script} --seed {seed}: {curve['episode'][-1]:,} episodes"
    for kind in ("greedy", "sampled"):
        line += f", {kind} {curve[f'{kind}_before']:.3f} -> {curve[f'{kind}_after']:.3f}"
    print(line, flush=True)
    return curve


def running_mean(values: list[float]) -> np.ndarray:
    """The mean of each value and those before it, `WINDOW` at most."""
    return np.array([np.mean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))])


def plot(curves: list[dict]):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    scripts = list(dict.fromkeys(curve["script"] for curve in curves))
    size = dict(figsize=(9, 3), dpi=100, sharey=True, squeeze=False)
    figure, axes = plt.subplots(1, len(scripts), **size, layout="constrained")
    for axis, script in zip(axes[0], scripts):
        some = [curve for curve in curves if curve["script"] == script]
        curves_of = np.array([running_mean(curve["objective/scores"]) for curve in some])  # [seeds, iterations]
        episode, color = some[0]["episode"], COLORS[script]
        for curve in curves_of:
            axis.plot(episode, curve, color=color, alpha=0.3, lw=0.7)
        axis.plot(episode, curves_of.mean(0), color=color, lw=1.8, label="sampled, training prompts")
        greedy = [np.mean([curve[f"greedy_{when}"] for curve in some]) for when in ("before", "after")]
        axis.plot([0, episode[-1]], greedy, "o", color="black", ms=5, clip_on=False, label="greedy, held-out prompts")
        axis.set_title(f"python {script}.py", family="monospace", fontsize=10)
        axis.set_xlabel("episodes")
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
        axis.set(xlim=(0, None), ylim=(0, 1.02))
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, loc="lower right")
    axes[0, 0].set_ylabel("right answers")
    figure.savefig(RESULT.with_suffix(".png"))


def main():
    asked = [word for word in sys.argv[1:] if word != "--plot"]
    if asked:
        for script in SCRIPTS:
            for seed in SEEDS:
                if script in asked and str(seed) in asked:
                    run(script, seed)
        return
    if "--plot" not in sys.argv:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            curves = list(pool.map(lambda job: run(*job), [(script, seed) for script in SCRIPTS for seed in SEEDS]))
        RESULT.parent.mkdir(exist_ok=True)
        # a run a line
        RESULT.with_suffix(".json").write_text("[\n" + ",\n".join(json.dumps(curve) for curve in curves) + "\n]\n")
    plot(json.loads(RESULT.with_suffix(".json").read_text()))


if __name__ == "__main__":
    main()
