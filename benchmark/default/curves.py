"""The three scripts as they learn: on the default task, and with a real model.

    python benchmark/default/curves.py                                # all of them
    python benchmark/default/curves.py --plot                         # only the figures again

curves.png shows the score of sampled training completions, and that of held-out prompts at
temperature 0. smollm2.png has the score of held-out prompts, a line for each seed.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import BUILT_IN, SCRIPTS, Part, column, having, main

RESULT = Path(__file__).with_suffix(".json")
# a real model, and in a smoke run of it the built-in one
SMOLLM2 = "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl"
SMOLLM2 += " --eval-dataset benchmark/smollm2/chain_sum_eval.jsonl --eval-every 2"
SMOLLM2 += " --reward benchmark/smollm2/tasks.py:score --response-length 24 --dtype bfloat16"
SMOLLM2 += " --per-device-train-batch-size 16 --total-episodes 1280 --learning-rate 3e-5"
SMOLLM2 += " --kl-coef 0"
TINY = f"{BUILT_IN} --total-episodes 128"


def plot(rows, folder):
    some = having(rows, part="default")
    panels = (
        ("sampled, training prompts", some, "objective/scores"),
        ("greedy, held-out prompts", some, "eval/scores"),
    )
    draw.figure_of(folder / "curves.png", 2, panels)
    draw_seeds([row for row in rows if row["part"] != "default"], folder / "smollm2.png")


def draw_seeds(runs, path):
    """A panel for each script, with the score before training, and the mean at the end in figures.
    On GitHub, letters in it are as large as those of the page."""
    figure, [axes] = draw.panels(1, 3, width=2.3, height=1.8, sharey=True, dpi=240)
    axes[0].set_ylabel("right answers")
    axes[0].set_ylim(0, 0.85)
    for axis, script in zip(axes, SCRIPTS):
        some = having(runs, script=script)
        color = draw.COLORS[script]
        for run in some:
            axis.plot(run["episode"], run["eval/scores"], color=color, lw=1.1)
        before, *_, after = np.mean(column(some, "eval/scores"), 0)
        end = some[0]["episode"][-1]
        axis.axhline(before, color=draw.GRAY, lw=1, ls="--")
        style = dict(color=draw.GRAY, ha="right", va="top")
        axis.text(end, before - 0.03, f"before: {before:.2f}", **style)
        axis.text(end + 40, after, f"{after:.2f}", color=color, weight="bold", va="center")
        axis.set_xlim(0, end + 40)
        axis.set_xticks((0, 500, 1000))
        axis.set_title(f"{script}.py")
        draw.in_thousands(axis)
    draw.save(figure, path)


METRICS = "objective/scores eval/scores seconds"
RUNS = [(dict(label=f"{script}.py"), script, "") for script in SCRIPTS]
PARTS = {"default": Part(RUNS, "--eval-every 16", range(1, 11), METRICS)}
SMOLLM2_FLAGS = dict(rloo="--rloo-k 8", grpo="--num-generations 8", ppo="--num-ppo-epochs 1")
for script, own in SMOLLM2_FLAGS.items():
    PARTS[f"smollm2_{script}"] = Part([({}, script, own)], SMOLLM2, (1, 2, 3), METRICS, short=TINY)

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
