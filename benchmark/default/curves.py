"""The three scripts as they come, seeds 1 to 10, with an evaluation every 16 iterations more.

    python benchmark/default/curves.py                                # some ten minutes on two cores
    python benchmark/default/curves.py --plot                         # only the figure again

Writes curves.json, a run a line, and curves.png: the score of sampled training completions, mean of ten iterations, and
that of held-out prompts at temperature 0, against episodes and against seconds of rollout and training.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import SCRIPTS, update

RESULT = Path(__file__).with_suffix(".json")
RUNS = [dict(script=script, seed=seed) for script in SCRIPTS for seed in range(1, 11)]
JOBS = {(run["script"], f"--seed {run['seed']} --eval-every 16"): run for run in RUNS}


def to_curve(_, result: dict) -> dict:
    """What is kept of a run."""
    rows, evaluations = result["metrics"], result["evaluations"]
    sampled = [round(row["objective/scores"], 4) for row in rows[1:]]
    return {
        "sampled_before": sampled[0],
        "sampled_after": round(float(np.mean(sampled[-10:])), 4),
        "greedy_before": round(evaluations[0]["eval/scores"], 4),
        "greedy_after": round(evaluations[-1]["eval/scores"], 4),
        "episode": [row["episode"] for row in rows[1:]],
        "objective/scores": sampled,
        "eval_episode": [row["episode"] for row in evaluations],
        "eval_seconds": [round(row["seconds"], 2) for row in evaluations],
        "eval/scores": [round(row["eval/scores"], 4) for row in evaluations],
    }


def main():
    curves = update(RESULT, JOBS, to_curve)
    figure, [axes] = draw.panels(1, 3, width=3.3, sharey=True)
    axes[0].set(title="sampled, training prompts", ylabel="right answers", ylim=(0, 1.02))
    axes[1].set_title("greedy, held-out prompts")
    axes[2].set(title="greedy, held-out prompts", xlabel="seconds of one core")
    for script in SCRIPTS:
        some = [curve for curve in curves if curve["script"] == script]
        style = dict(color=draw.COLORS[script], label=f"{script}.py")
        draw.curve(axes[0], some[0]["episode"], [draw.running_mean(c["objective/scores"]) for c in some], **style)
        greedy = [c["eval/scores"] for c in some]
        draw.curve(axes[1], some[0]["eval_episode"], greedy, marker=".", **style)
        draw.curve(axes[2], np.mean([c["eval_seconds"] for c in some], 0), greedy, marker=".", **style)
    for axis in axes[:2]:
        draw.in_thousands(axis)
    axes[0].legend(frameon=False, loc="lower right")
    draw.save(figure, RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
