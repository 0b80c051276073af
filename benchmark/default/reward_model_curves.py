"""What the KL term is for: each script trains on a reward model alone, and is judged by the rule.

    python benchmark/default/reward_model_curves.py                   # some ten minutes on two cores
    python benchmark/default/reward_model_curves.py --plot            # only the figure again

One KL coefficient is next to nothing, the other has the right size. The held-out evaluation goes by the rule: a sum is
right or wrong. No run has seen the rule. GRPO does not divide scores by the deviation of their group here, so that its
coefficient weighs the KL against scores of the same size as in the other scripts.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import curves, update

RESULT = Path(__file__).with_suffix(".json")
KL_COEFS = (0.01, 0.3)
METRICS = ("objective/scores", "objective/kl", "eval/scores")
SCRIPT_FLAGS = {"rloo": "", "grpo": "--scale-rewards none", "ppo": "--num-ppo-epochs 4 --learning-rate 1e-4"}
FLAGS = (
    "--reward none --reward-model-path benchmark/default/reward_model --total-episodes 12288 --eval-every 8 "
    "--eval-dataset benchmark/default/eval.jsonl --eval-reward exact_match --eval-temperature 1.0 "
    "--num-sample-generations 0"
)


def plot(runs: list[dict]):
    figure, axes = draw.panels(2, 3, width=3, height=2.3, sharex=True, sharey="row")
    rows = (("objective/scores", "learned score\n(reward model, training)"), ("eval/scores", "true score\n(held-out)"))
    for column, script in zip(axes.T, SCRIPT_FLAGS):
        column[0].set_title(f"{script}.py {' '.join(SCRIPT_FLAGS[script].split()[:2])}", fontweight="bold")
        for axis, (name, label) in zip(column, rows):
            if script == "rloo":
                axis.set_ylabel(label)
            for kl_coef, style in zip(KL_COEFS, ("--", "-")):
                some = [curve[name] for curve in runs if (curve["script"], curve["kl_coef"]) == (script, kl_coef)]
                settings = dict(color=draw.COLORS[script], ls=style, label=f"--kl-coef {kl_coef}")
                draw.curve(axis, runs[0]["episode"], some, **settings)
        draw.in_thousands(column[1])
        column[1].set_ylim(0, 1)
        column[1].axhline(np.mean([c["eval/scores"][0] for c in runs]), color="gray", lw=1, ls=":", label="before RL")
    axes[1, 0].legend(frameon=False, fontsize=8)
    draw.save(figure, RESULT.with_suffix(".png"))


def main():
    jobs = {
        (script, f"{FLAGS} {flags} --kl-coef {kl_coef} --seed {seed}"): dict(script=script, kl_coef=kl_coef, seed=seed)
        for script, flags in SCRIPT_FLAGS.items()
        for kl_coef in KL_COEFS
        for seed in (1, 2, 3)
    }
    plot(update(RESULT, jobs, lambda _, result: curves(result, METRICS)))


if __name__ == "__main__":
    main()
