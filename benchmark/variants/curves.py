"""Runs variants beside the script that they change.

    python benchmark/variants/curves.py                               # all
    python benchmark/variants/curves.py dynamic_sampling original     # some; the others are kept
    python benchmark/variants/curves.py --plot                        # only the figure again

Writes curves.json, a run a line, and curves.png. The figure shows held-out right answers, at
temperature 0 but for the KL and MaxRL. Distillation and MaxRL have no patch in benchmark/patches/:
they are flags alone. The teacher is a run of rloo.py with its defaults.
"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import BENCHMARK, POLICY, ROOT, Part, copy_script, having, main, read_result, run
from tables import number, with_band

RESULT = Path(__file__).with_suffix(".json")
METRICS = "eval/scores eval/best_of_8 response_length_mean policy/entropy_avg objective/kl"
METRICS += " generated_episodes val/sampler_weight_std val/importance_std"
DRAWN = ("response_length_mean", "policy/entropy_avg", "eval/best_of_8")  # beside right answers
TEACHER = ROOT / "runs/teacher"
SHORT = "--total-episodes 4096"
LONG = "--total-episodes 8192"
JUDGE = f"{LONG} --reward benchmark/variants/long_judge.py:score --eval-reward exact_match"
REWARD_MODEL = f"{LONG} --reward none --reward-model-path benchmark/default/reward_model"
REWARD_MODEL += " --eval-reward exact_match --eval-temperature 1 --scale-rewards none --kl-coef 0.3"
DISTILL = "--reward none --ref-model-path runs/teacher/model --kl-coef 1 --eval-reward exact_match"
OF_WEIGHTS = "deviation of the weights"
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
        "grpo", SHORT, "", "bfloat16 sampler, masked", "val/importance_std", OF_WEIGHTS
    ),
    "overlong_punishment": Variant("grpo", JUDGE, "", "punished", "response_length_mean", "tokens"),
    "reinforce_plus_plus": Variant("rloo", SHORT, "--rloo-k 1", "REINFORCE++, k = 1"),
    "sampler_weights": Variant(
        "rloo", SHORT, "", "bfloat16 sampler, weighted", "val/sampler_weight_std", OF_WEIGHTS
    ),
    "unbiased_kl": Variant("grpo", REWARD_MODEL, "", "KL times the ratio", "objective/kl", "KL"),
    "distillation": Variant(
        "rloo", SHORT, DISTILL, "a teacher, no reward", "objective/kl", KL_OF_DISTILL
    ),
    "maxrl": Variant("grpo", FEW_RIGHT, MAXRL, "MaxRL", "eval/best_of_8", "best of 8 answers"),
}


def is_patch(name):
    return (BENCHMARK / f"patches/{name}.patch").exists()


def train_teacher():
    if not TEACHER.exists():
        run("rloo", "", TEACHER)


# The scripts as they are have one part, because some variants share them.
ORIGINALS = dict.fromkeys((variant.script, variant.flags) for variant in VARIANTS.values())
RUNS = {"original": [(dict(label=f"{script}.py"), script, own) for script, own in ORIGINALS]}
for name, (script, flags, own, label, *_) in VARIANTS.items():
    patched = f"{script} {name}.patch" if is_patch(name) else script
    RUNS[name] = [(dict(label=label), patched, f"{flags} {own}")]
PARTS = {name: Part(runs, "--eval-every 8", range(1, 6), METRICS) for name, runs in RUNS.items()}
PARTS["distillation"].prepare = train_teacher
PARTS["distillation"].short += f" --ref-model-path {POLICY}"


def runs_of(rows, name):
    """The runs of a variant, and those of the script as it is."""
    script, flags, *_ = VARIANTS[name]
    originals = having(rows, part="original", label=f"{script}.py")
    return having(rows, part=name), [row for row in originals if row["flags"].endswith(flags)]


def end_of(runs, metric):
    """The mean of a metric at the end of each run."""
    return number(mean(row[metric][-1] for row in runs)) if metric in runs[0] else ""


def table():
    """Each variant beside the script as it is, at the end of training: means over five seeds, with
    95 % intervals."""
    rows = read_result(RESULT)["rows"]
    for name, variant in VARIANTS.items():
        pair = runs_of(rows, name)
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


def plot(rows, folder):
    panels = []
    for name, variant in VARIANTS.items():
        runs, originals = runs_of(rows, name)
        both = originals + runs
        panels.append((f"{name}: right answers", both, "eval/scores"))
        if variant.metric in DRAWN:
            panels.append((f"{name}: {variant.about}", both, variant.metric))
    draw.figure_of(folder / "curves.png", 4, panels)


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
