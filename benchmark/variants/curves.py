"""Runs variants beside the script that they change.

    python benchmark/variants/curves.py                               # all
    python benchmark/variants/curves.py dynamic_sampling original     # some; the others are kept
    python benchmark/variants/curves.py --plot                        # only the figure again

Writes curves.json, a run a line, and curves.png. The figure shows held-out right answers, at
temperature 0 but for the KL and MaxRL. Dynamic sampling has a second curve, over the episodes that
it generated. Distillation and MaxRL have no patch in benchmark/patches/: they are flags alone. The
teacher is a run of rloo.py with its defaults.
"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import (
    BENCHMARK,
    POLICY,
    ROOT,
    Part,
    column,
    copy_script,
    curves,
    having,
    main,
    read_result,
    run,
)
from tables import number, with_band

RESULT = Path(__file__).with_suffix(".json")
KEPT = "eval/scores eval/best_of_8 response_length_mean policy/entropy_avg objective/kl".split()
DRAWN = {  # metrics, how they are called, and where their axis ends
    "eval/scores": ("right answers", 1.02),
    "response_length_mean": ("tokens", 8.2),
    "policy/entropy_avg": ("entropy", None),
    "eval/best_of_8": ("best of 8", None),
}
MEANS = ("val/sampler_weight_std", "val/importance_std")
TEACHER = ROOT / "runs/teacher"
SHORT = "--total-episodes 4096"
LONG = "--total-episodes 8192"
JUDGE = f"{LONG} --reward benchmark/variants/long_judge.py:score --eval-reward exact_match"
REWARD_MODEL = f"{LONG} --reward none --reward-model-path benchmark/default/reward_model"
REWARD_MODEL += " --eval-reward exact_match --eval-temperature 1 --scale-rewards none --kl-coef 0.3"
DISTILL = "--reward none --ref-model-path runs/teacher/model --kl-coef 1 --eval-reward exact_match"
KL_OF_DISTILL = "KL to the teacher, or to the start"
BONUS = "--entropy-coef 0.3"
FEW_RIGHT = f"{LONG} --num-generations 16 --temperature 4 --eval-temperature 4 --eval-k 8"
MAXRL = "--scale-rewards none --reward benchmark/variants/maxrl.py:score --eval-reward exact_match"


class Variant(NamedTuple):
    script: str  # which it patches, where there is a patch of its name
    flags: str  # of the variant and of the original
    own_flags: str  # of the variant alone
    label: str  # in the figure
    metric: str = ""  # that the table shows beside the right answers, and the figure if it is DRAWN
    about: str = ""  # what this is


VARIANTS = {
    "dynamic_sampling": Variant(
        "grpo", SHORT, "", "dynamic sampling", "generated_episodes", "generated episodes"
    ),
    "entropy_bonus": Variant(
        "grpo", SHORT, BONUS, "with the bonus", "policy/entropy_avg", "entropy of a token"
    ),
    "masked_importance_sampling": Variant(
        "grpo", SHORT, "", "bfloat16 sampler, masked", MEANS[1], "deviation of the weights"
    ),
    "overlong_punishment": Variant("grpo", JUDGE, "", "punished", "response_length_mean", "tokens"),
    "reinforce_plus_plus": Variant("rloo", SHORT, "--rloo-k 1", "REINFORCE++, k = 1"),
    "sampler_weights": Variant(
        "rloo", SHORT, "", "bfloat16 sampler, weighted", MEANS[0], "deviation of the weights"
    ),
    "unbiased_kl": Variant("grpo", REWARD_MODEL, "", "KL times the ratio", "objective/kl", "KL"),
    "distillation": Variant(
        "rloo", SHORT, DISTILL, "a teacher, no reward", "objective/kl", KL_OF_DISTILL
    ),
    "maxrl": Variant("grpo", FEW_RIGHT, MAXRL, "MaxRL", "eval/best_of_8", "best of 8 answers"),
}


def is_patch(name):
    return (BENCHMARK / f"patches/{name}.patch").exists()


def kept(result):
    """What is kept of a run: its evaluations, and the means of some metrics between them."""
    last = result["metrics"][-1]
    curve = curves(result, [name for name in KEPT if name in last])
    if "generated_episodes" in last:
        generated = [row.get("generated_episodes", 0) for row in result["evaluations"]]
        curve["generated_episodes"] = generated
    for name in MEANS:
        if name in last:
            curve[name] = float(f"{np.mean(column(result['metrics'][1:], name)):.4g}")
    return curve


def train_teacher():
    if not TEACHER.exists():
        run("rloo", "", TEACHER)


# The scripts as they are have one part, because some variants share them.
RUNS = {"original": [({}, *run) for run in dict.fromkeys(v[:2] for v in VARIANTS.values())]}
for name, (script, flags, own, *_) in VARIANTS.items():
    patched = f"{script} {name}.patch" if is_patch(name) else script
    RUNS[name] = [({}, patched, f"{flags} {own}")]
PARTS = {name: Part(runs, "--eval-every 8", range(1, 6), kept) for name, runs in RUNS.items()}
PARTS["distillation"].prepare = train_teacher
PARTS["distillation"].short += f" --ref-model-path {POLICY}"


def runs_of(rows, name):
    """The runs of the script as it is, and those of a variant."""
    variant = VARIANTS[name]
    originals = having(rows, part="original", script=variant.script)
    originals = [row for row in originals if row["flags"].endswith(variant.flags)]
    return originals, having(rows, part=name)


def end_of(runs, metric):
    """The mean of a metric at the end of each run, or of its mean over the run."""
    ends = [np.ravel(row[metric])[-1] for row in runs if metric in row]
    return number(np.mean(ends)) if ends else ""


def table():
    """Each variant beside the script as it is, at the end of training: means over five seeds, with
    95 % intervals."""
    rows = read_result(RESULT)["rows"]
    for name, variant in VARIANTS.items():
        pair = runs_of(rows, name)[::-1]
        right = [with_band([row["eval/scores"][-1] for row in some]) for some in pair]
        shown = f"`{name}.patch`" if is_patch(name) else f"{name} (flags)"
        also = [end_of(some, variant.metric) for some in pair]
        yield [shown, f"{pair[0][0]['episode'][-1]:,}", *right, variant.about, *also]


def apply_in_order(patches):
    """The text of grpo.py with these patches. None: they do not apply."""
    with tempfile.TemporaryDirectory() as folder:
        path = copy_script(Path(folder), "grpo")
        for patch in patches:
            command = ["git", "apply", patch]
            if subprocess.run(command, cwd=folder, capture_output=True).returncode > 0:
                return None
        return path.read_text(encoding="utf-8")


def pairs():
    """Each patch of grpo.py, and those that make the same text before and after it."""
    patches = sorted((BENCHMARK / "patches").glob("*.patch"))
    patches = [patch for patch in patches if apply_in_order([patch])]
    texts = {pair: apply_in_order(pair) for pair in itertools.permutations(patches, 2)}
    for patch in patches:
        fitting = [
            b.stem for a, b in texts if a == patch and texts[a, b] and texts[a, b] == texts[b, a]
        ]
        yield [f"`{patch.stem}`", ", ".join(fitting)]


def draw_panel(axis, rows, name, metric):
    """The mean of the seeds of a variant and of its original."""
    variant = VARIANTS[name]
    colors = (draw.COLORS[variant.script], draw.OTHERS[0])
    labels = (f"{variant.script}.py", variant.label)
    for some, color, label in zip(runs_of(rows, name), colors, labels):
        style = dict(color=color, label=label)
        draw.curve(axis, some[0]["episode"], column(some, metric), **style)
        if "generated_episodes" in some[0]:
            style |= dict(ls=":", label="over generated episodes")
            generated = np.mean(column(some, "generated_episodes"), 0)
            axis.plot(generated, np.mean(column(some, metric), 0), **style)
    about, top = DRAWN[metric]
    axis.set_title(f"{name}: {about}", fontsize=9)
    axis.set_ylim(0, top)
    axis.legend(frameon=False)
    draw.in_thousands(axis)


def plot(rows, folder):
    figure, grid = draw.panels(3, 4, width=3.3, height=2.6)
    axes = iter(grid.flat)
    for name, variant in VARIANTS.items():
        for metric in ("eval/scores", variant.metric):
            if metric in DRAWN:
                draw_panel(next(axes), rows, name, metric)
    draw.save(figure, folder / "curves.png")


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
