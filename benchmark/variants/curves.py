"""Runs each variant of this folder beside the script that it changes, seeds 1 to 5.

    python benchmark/variants/curves.py                               # half an hour on two cores
    python benchmark/variants/curves.py dynamic_sampling original     # only these, the others are kept
    python benchmark/variants/curves.py --plot                        # only the figure again

Writes curves.json, a run a line, and curves.png. The figure shows held-out right answers, at temperature 0 but for the
KL and MaxRL. Dynamic sampling has a second curve, over the episodes that it generated. Distillation and MaxRL have no
patch: they are flags alone. The teacher is a run of rloo.py with its defaults.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import BENCHMARK, ROOT, curves, run, update

RESULT = Path(__file__).with_suffix(".json")
SEEDS = range(1, 6)
EVERY = 8  # iterations from one evaluation to the next
KEPT = ("eval/scores", "response_length_mean", "policy/entropy_avg", "objective/kl", "objective/scores")
METRICS = {"eval/scores": "right answers", "response_length_mean": "tokens"}  # drawn
METRICS |= {"policy/entropy_avg": "entropy", "eval/best_of_8": "best of 8"}
TEACHER = "runs/teacher"
SHORT = "--total-episodes 4096"
JUDGE = "--total-episodes 8192 --reward benchmark/variants/long_judge.py:score --eval-reward exact_match"
REWARD_MODEL = "--total-episodes 8192 --reward none --reward-model-path benchmark/default/reward_model"
REWARD_MODEL += " --eval-reward exact_match --eval-temperature 1 --scale-rewards none --kl-coef 0.3"
DISTILL = f"--reward none --ref-model-path {TEACHER}/model --kl-coef 1 --eval-reward exact_match"
FEW_RIGHT = "--total-episodes 8192 --num-generations 16 --temperature 4 --eval-temperature 4 --eval-k 8"
MAXRL = "--scale-rewards none --reward benchmark/variants/maxrl.py:score --eval-reward exact_match"


class Variant(NamedTuple):
    patch: str  # or only a name, where flags are enough
    script: str  # which it patches
    flags: str  # of the variant and of the original
    own_flags: str  # of the variant alone
    label: str  # in the figure
    also: tuple[str, ...] = ()  # metrics that are drawn beside the right answers


VARIANTS = [
    Variant("reinforce_plus_plus", "rloo", SHORT, "--rloo-k 1", "REINFORCE++, k = 1"),
    Variant("sampler_weights", "rloo", SHORT, "", "bfloat16 sampler, weighted"),
    Variant("masked_importance_sampling", "grpo", SHORT, "", "bfloat16 sampler, masked"),
    Variant("overlong_punishment", "grpo", JUDGE, "", "punished", ("response_length_mean",)),
    Variant("dynamic_sampling", "grpo", SHORT, "", "dynamic sampling"),
    Variant("unbiased_kl", "grpo", REWARD_MODEL, "", "KL times the ratio"),
    Variant("entropy_bonus", "grpo", SHORT, "--entropy-coef 0.3", "with the bonus", ("policy/entropy_avg",)),
    Variant("distillation", "rloo", SHORT, DISTILL, "a teacher, no reward"),
    Variant("maxrl", "grpo", FEW_RIGHT, MAXRL, "MaxRL", ("eval/best_of_8",)),
]


def jobs_of(variant: Variant, where: str) -> dict[tuple, dict]:
    """The runs of a variant, or of the script that it patches. where: the patch, or `original`"""
    jobs = {}
    for seed in SEEDS:
        own = "" if where == "original" else variant.own_flags
        flags = " ".join(f"--seed {seed} --eval-every {EVERY} {variant.flags} {own}".split())
        script = variant.script
        if (BENCHMARK / f"variants/{where}.patch").exists():
            script += f" variants/{where}.patch"
        jobs[script, flags] = dict(variant=where, script=variant.script, flags=flags, seed=seed)
    return jobs


def to_curve(_, result: dict) -> dict:
    """What is kept of a run: its evaluations, and the means of some metrics between them."""
    rows = result["metrics"]
    curve = curves(result, KEPT)
    for name in ("eval/best_of_8", "generated_episodes"):
        if name in rows[-1]:
            curve[name] = [round(row.get(name, 0), 4) for row in result["evaluations"]]
    for name in ("val/sampler_weight_std", "val/importance_std", "val/masked_fraction"):
        if name in rows[-1]:
            curve[name] = float(f"{np.mean([row[name] for row in rows[1:]]):.4g}")
    return curve


def draw_panel(axis, runs: list[dict], variant: Variant, metric: str):
    """The mean of the seeds of a variant and of its original."""
    styles = {"original": dict(color=draw.COLORS[variant.script], label=f"{variant.script}.py")}
    styles[variant.patch] = dict(color=draw.OTHERS[0], label=variant.label)
    for where, style in styles.items():
        names = list(jobs_of(variant, where).values())
        some = [row for row in runs if {name: row[name] for name in names[0]} in names]
        draw.curve(axis, some[0]["episode"], [row[metric] for row in some], **style)
        if "generated_episodes" in some[0]:
            generated, right = (np.mean([row[name] for row in some], 0) for name in ("generated_episodes", metric))
            axis.plot(generated, right, color=style["color"], ls=":", label="over generated episodes")
    draw.in_thousands(axis)


def main():
    if not (ROOT / TEACHER).exists() and "--plot" not in sys.argv:
        run("rloo", "", ROOT / TEACHER)
    jobs = {}  # Two variants of one script with the same flags have one original.
    for variant in VARIANTS:
        jobs |= jobs_of(variant, "original") | jobs_of(variant, variant.patch)
    runs = update(RESULT, jobs, to_curve)
    figure, grid = draw.panels(3, 4, width=3.3, height=2.6)
    panels = [(variant, metric) for variant in VARIANTS for metric in ("eval/scores", *variant.also)]
    for axis, (variant, metric) in zip(grid.flat, panels, strict=True):
        draw_panel(axis, runs, variant, metric)
        axis.set_title(f"{variant.patch}: {METRICS[metric]}", fontsize=9)
        axis.set_ylim(0, {"eval/scores": 1.02, "response_length_mean": 8.2}.get(metric))
        axis.legend(frameon=False)
    draw.save(figure, RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
