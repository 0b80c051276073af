"""Runs each failure of docs/failures.md beside its healthy run, seeds 1 to 3.

    python benchmark/failures/failures.py                    # all of them
    python benchmark/failures/failures.py no_kl interleaved  # only these, the others are kept
    python benchmark/failures/failures.py --plot             # only the figures again

A failure has other flags than its healthy run, or it runs under broken.py. Writes failures.json, a
run a line, and a figure for each failure.
"""

import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import broken
import draw
from run import Part, having, main, read_result
from tables import number

RESULT = Path(__file__).with_suffix(".json")
POINTS = 16
JUDGES = "--reward benchmark/failures/judges.py"
TRUTH = "--eval-reward exact_match"
MODEL = f"--reward none --reward-model-path benchmark/default/reward_model {TRUTH}"
MODEL += " --eval-temperature 1"
METRICS = {  # those of the figure, and after the bar those of the page's table alone
    "learning_rate": "eval/scores objective/kl grad_norm",
    "no_kl": "objective/scores eval/scores",
    "missing_ends": "val/num_eos_tokens response_length_mean eval/scores"
    " | objective/scores objective/kl",
    "temperature": "objective/scores policy/clipfrac_avg policy/entropy_avg",
    "eos_masked": "eval/scores response_length_mean",
    "interleaved": "eval/scores group/equal_scores_fraction policy/entropy_avg",
    "equal_scores": "objective/scores eval/scores response_length_mean | val/num_eos_tokens",
}


LENGTH = f"{JUDGES}:likes_length {TRUTH}"
LITTLE_LENGTH = f"{JUDGES}:likes_length_a_little {TRUTH}"
KINDER = f"{JUDGES}:kinder_to_some_prompts {TRUTH}"
SHORT_ANSWERS = f"{JUDGES}:first_two_digits --temperature 2"
FAILURES = {  # script, episodes, flags of both runs, of the failure, of the healthy one; breaks
    "learning_rate": ("rloo", 4096, "", "--learning-rate 1e-3", ""),
    "no_kl": ("rloo", 8192, MODEL, "--kl-coef 0", "--kl-coef 0.1"),
    "missing_ends": ("rloo", 8192, LENGTH, "", "--missing-eos-penalty 1"),
    "temperature": ("ppo", 4096, "", "", "--temperature 2", "temperature", "no_check"),
    "eos_masked": ("rloo", 12288, SHORT_ANSWERS, "", "", "eos_masked", "no_check"),
    "interleaved": ("grpo", 4096, KINDER, "", "", "interleaved"),
    "equal_scores": ("grpo", 8192, LITTLE_LENGTH, "", "--scale-rewards none"),
}
PARTS = {}
for name, (script, episodes, flags, failure, healthy, *breaks) in FAILURES.items():
    edits = [broken.BREAKS[word] for word in breaks]
    runs = [
        (dict(label="healthy"), script, f"{flags} {healthy}"),
        (dict(label="failure"), script, f"{flags} {failure}", *edits),
    ]
    every = episodes // 64 // POINTS  # An iteration has 64 episodes.
    both = f"--total-episodes {episodes} --num-sample-generations 0 --eval-every {every}"
    PARTS[name] = Part(runs, both, (1, 2, 3), METRICS[name].replace("|", ""))


def cell(runs, metric):
    """The mean over the seeds, and their range. Of each seed it is the last evaluation, or the mean
    of another metric over the second half."""
    ends = []
    for row in runs:
        values = row[metric][1:]
        ends.append(mean(values[-1:] if metric == "eval/scores" else values[len(values) // 2 :]))
    low = number(min(ends))
    high = number(max(ends))
    return low if low == high else f"{number(mean(ends))} ({low}–{high})"


def table(name):
    """The metrics of a failure and of its healthy run."""
    rows = having(read_result(RESULT)["rows"], part=name)
    for metric in METRICS[name].replace("|", "").split():
        cells = [cell(having(rows, label=label), metric) for label in ("failure", "healthy")]
        yield [f"`{metric}`", *cells]


def plot(rows, folder):
    for name, metrics in METRICS.items():
        some = having(rows, part=name)
        panels = [(metric, some, metric) for metric in metrics.split("|")[0].split()]
        draw.figure_of(folder / f"{name}.png", len(panels), panels)


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
