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
from run import SCRIPTS, Part, curves, logged, main
from tables import column, having, points

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
    rows = result["metrics"][1:]
    evaluations = result["evaluations"]
    sampled = [round(row["objective/scores"], 4) for row in rows]
    greedy = [round(row["eval/scores"], 4) for row in evaluations]
    sampled_after = np.mean(sampled[-10:])
    norms = np.array(logged(rows, "grad_norm"))
    above_one = np.mean(norms > 1)
    return {
        "grad_norm": round(float(np.median(norms)), 3),
        "above_one": round(float(above_one), 4),
        "sampled_before": sampled[0],
        "sampled_after": round(float(sampled_after), 4),
        "greedy_before": greedy[0],
        "greedy_after": greedy[-1],
        "episode": column(rows, "episode"),
        "objective/scores": sampled,
        "eval_episode": column(evaluations, "episode"),
        "eval_seconds": [round(row["seconds"], 2) for row in evaluations],
        "eval/scores": greedy,
    }


def clipped(names: dict, result: dict) -> dict:
    """What is kept of a run with another bound."""
    kept = to_curve(names, result)
    return {name: kept[name] for name in ("grad_norm", "above_one", "greedy_after")}


def plot(rows: list[dict], folder: Path):
    plot_default(having(rows, part="default"), folder)
    plot_reward_model(having(rows, part="reward_model"), folder)


def plot_default(runs: list[dict], folder: Path):
    figure, [axes] = draw.panels(1, 3, width=3.3, sharey=True)
    axes[0].set_title("sampled, training prompts")
    axes[0].set_ylabel("right answers")
    axes[0].set_ylim(0, 1.02)
    axes[1].set_title("greedy, held-out prompts")
    axes[2].set_title("greedy, held-out prompts")
    axes[2].set_xlabel("seconds of one core")
    for script in SCRIPTS:
        some = having(runs, script=script)
        style = dict(color=draw.COLORS[script], label=f"{script}.py")
        sampled = list(map(draw.running_mean, column(some, "objective/scores")))
        episodes = some[0]["episode"]
        draw.curve(axes[0], episodes, sampled, **style)
        style["marker"] = "."
        greedy = column(some, "eval/scores")
        episodes = some[0]["eval_episode"]
        draw.curve(axes[1], episodes, greedy, **style)
        seconds = np.mean(column(some, "eval_seconds"), 0)
        draw.curve(axes[2], seconds, greedy, **style)
    for axis in axes[:2]:
        draw.in_thousands(axis)
    axes[0].legend(frameon=False, loc="lower right")
    draw.save(figure, folder / "curves.png")


def plot_reward_model(runs: list[dict], folder: Path):
    figure, axes = draw.panels(2, 3, width=3, height=2.3, sharex=True, sharey="row")
    axes[0, 0].set_ylabel("learned score\n(reward model, training)")
    axes[1, 0].set_ylabel("true score\n(held-out)")
    before = np.mean(points(runs, "eval/scores", 0))
    for (learned, true), script in zip(axes.T, SCRIPT_FLAGS):
        words = SCRIPT_FLAGS[script].split()
        learned.set_title(f"{script}.py {' '.join(words[:2])}", fontweight="bold")
        for kl_coef, line in zip(KL_COEFS, ("--", "-")):
            some = having(runs, script=script, kl_coef=kl_coef)
            style = dict(color=draw.COLORS[script], ls=line, label=f"--kl-coef {kl_coef}")
            episodes = some[0]["episode"]
            draw.curve(learned, episodes, column(some, "objective/scores"), **style)
            draw.curve(true, episodes, column(some, "eval/scores"), **style)
        draw.in_thousands(true)
        true.set_ylim(0, 1)
        true.axhline(before, color="gray", lw=1, ls=":", label="before RL")
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
    "clipping": Part(default_jobs(BOUNDS), clipped),
    "reward_model": Part(reward_model_jobs(), lambda _, result: curves(result, KEPT)),
}
PARTS["clipping"].smoke = lambda names: names["bound"] == "inf"

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
