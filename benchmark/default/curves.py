"""The three scripts on the default task: as they come, with other bounds of gradient clipping, and
with a reward model.

    python benchmark/default/curves.py                                # all of them
    python benchmark/default/curves.py --plot                         # only the figures again

curves.png shows the score of sampled training completions, mean of ten iterations, and that of
held-out prompts at temperature 0, against episodes and against seconds of rollout and training.
reward_model_curves.png shows what the KL term is for. There GRPO does not divide scores by the
deviation of their group, so that its coefficient weighs the KL against scores of the same size as
in the other scripts.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import SCRIPTS, Part, curves, main

RESULT = Path(__file__).with_suffix(".json")
SEEDS = range(1, 11)
BOUNDS = ("10", "inf")  # of the gradient's norm; all scripts have 1
KL_COEFS = (0.01, 0.3)
SCRIPT_FLAGS = {
    "rloo": "",
    "grpo": "--scale-rewards none",
    "ppo": "--num-ppo-epochs 4 --learning-rate 1e-4",
}
FLAGS = "--reward none --reward-model-path benchmark/default/reward_model --total-episodes 12288"
FLAGS += " --eval-every 8 --eval-reward exact_match --eval-temperature 1"
FLAGS += " --num-sample-generations 0"
KEPT = ("objective/scores", "objective/kl", "eval/scores")


def to_curve(_, result: dict) -> dict:
    """What is kept of a run."""
    rows, evaluations = result["metrics"], result["evaluations"]
    sampled = [round(row["objective/scores"], 4) for row in rows[1:]]
    norms = [row["grad_norm"] for row in rows[1:] if "grad_norm" in row]
    return {
        "grad_norm": round(float(np.median(norms)), 3),
        "above_one": round(float(np.mean(np.array(norms) > 1)), 4),
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


def clipped(names: dict, result: dict) -> dict:
    """What is kept of a run with another bound."""
    kept = to_curve(names, result)
    return {name: kept[name] for name in ("grad_norm", "above_one", "greedy_after")}


def plot(rows: list[dict], folder: Path):
    plot_default([row for row in rows if row["part"] == "default"], folder)
    plot_reward_model([row for row in rows if row["part"] == "reward_model"], folder)


def plot_default(runs: list[dict], folder: Path):
    figure, [axes] = draw.panels(1, 3, width=3.3, sharey=True)
    axes[0].set(title="sampled, training prompts", ylabel="right answers", ylim=(0, 1.02))
    axes[1].set_title("greedy, held-out prompts")
    axes[2].set(title="greedy, held-out prompts", xlabel="seconds of one core")
    for script in SCRIPTS:
        some = [curve for curve in runs if curve["script"] == script]
        style = dict(color=draw.COLORS[script], label=f"{script}.py")
        draw.curve(
            axes[0],
            some[0]["episode"],
            [draw.running_mean(c["objective/scores"]) for c in some],
            **style,
        )
        greedy = [c["eval/scores"] for c in some]
        draw.curve(axes[1], some[0]["eval_episode"], greedy, marker=".", **style)
        draw.curve(
            axes[2], np.mean([c["eval_seconds"] for c in some], 0), greedy, marker=".", **style
        )
    for axis in axes[:2]:
        draw.in_thousands(axis)
    axes[0].legend(frameon=False, loc="lower right")
    draw.save(figure, folder / "curves.png")


def plot_reward_model(runs: list[dict], folder: Path):
    figure, axes = draw.panels(2, 3, width=3, height=2.3, sharex=True, sharey="row")
    rows = (
        ("objective/scores", "learned score\n(reward model, training)"),
        ("eval/scores", "true score\n(held-out)"),
    )
    for column, script in zip(axes.T, SCRIPT_FLAGS):
        column[0].set_title(
            f"{script}.py {' '.join(SCRIPT_FLAGS[script].split()[:2])}", fontweight="bold"
        )
        for axis, (name, label) in zip(column, rows):
            if script == "rloo":
                axis.set_ylabel(label)
            for kl_coef, style in zip(KL_COEFS, ("--", "-")):
                some = [
                    curve[name]
                    for curve in runs
                    if (curve["script"], curve["kl_coef"]) == (script, kl_coef)
                ]
                settings = dict(color=draw.COLORS[script], ls=style, label=f"--kl-coef {kl_coef}")
                draw.curve(axis, runs[0]["episode"], some, **settings)
        draw.in_thousands(column[1])
        column[1].set_ylim(0, 1)
        column[1].axhline(
            np.mean([c["eval/scores"][0] for c in runs]),
            color="gray",
            lw=1,
            ls=":",
            label="before RL",
        )
    axes[1, 0].legend(frameon=False, fontsize=8)
    draw.save(figure, folder / "reward_model_curves.png")


def default_jobs(bounds: tuple[str, ...]) -> dict[tuple, dict]:
    """The default runs, with these bounds of gradient clipping."""
    jobs = {}
    for bound, script, seed in product(bounds, SCRIPTS, SEEDS):
        flags = f"--seed {seed} --eval-every 16 --max-grad-norm {bound}"
        jobs[script, flags] = dict(script=script, bound=bound, seed=seed)
    return jobs


def reward_model_jobs() -> dict[tuple, dict]:
    jobs = {}
    for script, kl_coef, seed in product(SCRIPTS, KL_COEFS, (1, 2, 3)):
        flags = f"{FLAGS} {SCRIPT_FLAGS[script]} --kl-coef {kl_coef} --seed {seed}"
        jobs[script, flags] = dict(script=script, kl_coef=kl_coef, seed=seed)
    return jobs


PARTS = {
    "default": Part(default_jobs(("1",)), to_curve),
    "clipping": Part(default_jobs(BOUNDS), clipped, smoke=lambda names: names["bound"] == "inf"),
    "reward_model": Part(reward_model_jobs(), lambda _, result: curves(result, KEPT)),
}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
