"""Runs each variant of this folder beside the script that it changes, seeds 1 to 5.

    python benchmark/variants/curves.py                               # all
    python benchmark/variants/curves.py dynamic_sampling original     # some; the others are kept
    python benchmark/variants/curves.py --plot                        # only the figure again

Writes curves.json, a run a line, and curves.png. The figure shows held-out right answers, at
temperature 0 but for the KL and MaxRL. Dynamic sampling has a second curve, over the episodes that
it generated. Distillation and MaxRL have no patch: they are flags alone. The teacher is a run of
rloo.py with its defaults.
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import BENCHMARK, POLICY, ROOT, Part, curves, main, run

RESULT = Path(__file__).with_suffix(".json")
SEEDS = range(1, 6)
EVERY = 8  # iterations from one evaluation to the next
KEPT = "eval/scores response_length_mean policy/entropy_avg objective/kl objective/scores".split()
METRICS = {  # drawn
    "eval/scores": "right answers",
    "response_length_mean": "tokens",
    "policy/entropy_avg": "entropy",
    "eval/best_of_8": "best of 8",
}
MEANS = {  # of a variant: metrics that it adds. Their mean over the run is kept.
    "sampler_weights": ["val/sampler_weight_std"],
    "masked_importance_sampling": ["val/importance_std", "val/masked_fraction"],
}
TEACHER = ROOT / "runs/teacher"
SHORT = "--total-episodes 4096"
LONG = "--total-episodes 8192"
JUDGE = f"{LONG} --reward benchmark/variants/long_judge.py:score --eval-reward exact_match"
REWARD_MODEL = f"{LONG} --reward none --reward-model-path benchmark/default/reward_model"
REWARD_MODEL += " --eval-reward exact_match --eval-temperature 1 --scale-rewards none --kl-coef 0.3"
DISTILL = "--reward none --ref-model-path runs/teacher/model --kl-coef 1 --eval-reward exact_match"
FEW_RIGHT = f"{LONG} --num-generations 16 --temperature 4 --eval-temperature 4 --eval-k 8"
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
    Variant(
        "entropy_bonus",
        "grpo",
        SHORT,
        "--entropy-coef 0.3",
        "with the bonus",
        ("policy/entropy_avg",),
    ),
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
        jobs[script, flags] = dict(script=variant.script, flags=flags, seed=seed)
    return jobs


def to_curve(where: str, names: dict, result: dict) -> dict:
    """What is kept of a run: its evaluations, and the means of some metrics between them."""
    rows, evaluations = result["metrics"][1:], result["evaluations"]
    curve = curves(result, KEPT)
    if "--eval-k 8" in names["flags"]:
        curve["eval/best_of_8"] = [round(row["eval/best_of_8"], 4) for row in evaluations]
    if where == "dynamic_sampling":
        generated = [row["generated_episodes"] for row in evaluations[1:]]
        curve["generated_episodes"] = [0, *generated]
    for name in MEANS.get(where, []):
        curve[name] = float(f"{np.mean([row[name] for row in rows]):.4g}")
    return curve


def train_teacher():
    if not TEACHER.exists():
        run("rloo", "", TEACHER)


def make_parts() -> dict[str, Part]:
    """A part for each variant. The scripts as they are have one part: some variants share them."""
    parts = {"original": Part({}, partial(to_curve, "original"))}
    for variant in VARIANTS:
        parts["original"].jobs |= jobs_of(variant, "original")
        where = variant.patch
        parts[where] = Part(jobs_of(variant, where), partial(to_curve, where))
    parts["distillation"].prepare = train_teacher
    parts["distillation"].short += f" --ref-model-path {POLICY}"
    return parts


PARTS = make_parts()


def draw_panel(axis, runs: list[dict], variant: Variant, metric: str):
    """The mean of the seeds of a variant and of its original."""
    script = variant.script
    styles = {"original": dict(color=draw.COLORS[script], label=f"{script}.py")}
    styles[variant.patch] = dict(color=draw.OTHERS[0], label=variant.label)
    for where, style in styles.items():
        names = list(jobs_of(variant, where).values())
        of_part = [row for row in runs if row["part"] == where]
        some = [row for row in of_part if {name: row[name] for name in names[0]} in names]
        draw.curve(axis, some[0]["episode"], [row[metric] for row in some], **style)
        if where == "dynamic_sampling":
            generated = np.mean([row["generated_episodes"] for row in some], 0)
            right = np.mean([row[metric] for row in some], 0)
            axis.plot(
                generated, right, color=style["color"], ls=":", label="over generated episodes"
            )
    draw.in_thousands(axis)


def plot(runs: list[dict], folder: Path):
    figure, grid = draw.panels(3, 4, width=3.3, height=2.6)
    panels = [
        (variant, metric) for variant in VARIANTS for metric in ("eval/scores", *variant.also)
    ]
    for axis, (variant, metric) in zip(grid.flat, panels, strict=True):
        draw_panel(axis, runs, variant, metric)
        axis.set_title(f"{variant.patch}: {METRICS[metric]}", fontsize=9)
        axis.set_ylim(0, {"eval/scores": 1.02, "response_length_mean": 8.2}.get(metric))
        axis.legend(frameon=False)
    draw.save(figure, folder / "curves.png")


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
