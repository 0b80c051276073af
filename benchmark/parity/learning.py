"""Do Tally's RLOO and GRPO learn as TRL's do? The default policy, prompts and reward, 16,384 episodes.

    OMP_NUM_THREADS=1 python benchmark/parity/learning.py             # an hour on one core; what is done is kept
    OMP_NUM_THREADS=1 python benchmark/parity/learning.py replay      # four minutes

It runs in the environment of trl_trainer.py. Each program draws its prompts and samples with its own random numbers, so
only the distributions of the curves can be compared. Writes learning.png, and learning.json with a line for each run
and each test. `right` counts the right ones of an iteration's 64 completions.

`replay` trains TRL on the completions of Tally's default run, with TRL's own weights after each update. It writes how
far the final weights are apart, by the distance that Tally's moved.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import transformers
import trl_trainer  # first: it makes the modules below importable
from draw import COLORS, GRAY, curve, in_thousands, panels, running_mean, save
from run import read_rows, relative_distance, run, write_lines
from scipy.stats import ttest_ind

from rloo import exact_match

RESULT = Path(__file__).with_suffix(".json")
SEEDS = range(1, 11)
BATCH, ITERATIONS, K = 64, 256, 4


def train_tally(algorithm: str, seed: int) -> list[float]:
    """The score of each iteration of the default run."""
    rows = run(algorithm, f"--seed {seed} --num-sample-generations 1")["metrics"]
    return [row["objective/scores"] for row in rows if row["iteration"] > 0]


def train_trl(algorithm: str, seed: int) -> list[float]:
    """The score of each iteration of TRL's run."""
    with tempfile.TemporaryDirectory() as folder:
        data = dict(rows=read_rows(trl_trainer.TRAIN_ROWS), reward=exact_match, folder=folder)
        trainer = trl_trainer.make_trainer(algorithm, **data, batch=BATCH, max_steps=ITERATIONS, seed=seed)
        trainer.train()
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


TRAIN = {"tally": train_tally, "trl": train_trl}


def measure() -> list[dict]:
    """The runs that learning.json lacks, each written to it as it ends -> all of them."""
    rows = [row for row in json.loads(RESULT.read_text()) if "seed" in row] if RESULT.exists() else []
    done = {(row["program"], row["algorithm"], row["seed"]) for row in rows}
    jobs = [(program, algorithm, seed) for seed in SEEDS for algorithm in ("rloo", "grpo") for program in TRAIN]
    for program, algorithm, seed in (job for job in jobs if job not in done):
        scores = TRAIN[program](algorithm, seed)
        row = dict(program=program, algorithm=algorithm, seed=seed, score=float(np.mean(scores[-10:])))
        row |= dict(area=float(np.mean(scores)), right=[round(score * BATCH) for score in scores])
        rows.append(row)
        write_lines(RESULT, rows)
        print(f"{program} {algorithm} {seed}: {row['score']:.3f}", file=sys.stderr)
    return rows


def compare(rows: list[dict], algorithm: str, name: str) -> dict:
    """Welch's test of `name` between the runs of the two programs."""
    tally, trl = ([r[name] for r in rows if (r["program"], r["algorithm"]) == (p, algorithm)] for p in TRAIN)
    test = ttest_ind(tally, trl, equal_var=False)
    low, high = test.confidence_interval(0.95)
    row = dict(algorithm=algorithm, test=name, seeds=len(tally))
    row |= {p: [float(np.mean(x)), float(np.std(x, ddof=1))] for p, x in zip(TRAIN, (tally, trl))}
    difference = [float(x) for x in (np.mean(tally) - np.mean(trl), low, high)]
    return row | dict(difference=difference, t=float(test.statistic), p=float(test.pvalue))


def draw(rows: list[dict]):
    figure, axes = panels(1, 2, width=4.2, height=3.2, sharey=True)
    for axis, algorithm in zip(axes[0], ("rloo", "grpo")):
        for program, color, label in (("trl", GRAY, "TRL 1.16"), ("tally", COLORS[algorithm], "Tally")):
            mine = [r for r in rows if (r["program"], r["algorithm"]) == (program, algorithm)]
            scores = [running_mean(np.array(r["right"]) / BATCH) for r in mine]
            label = f"{label}, {len(mine)} seeds"
            curve(axis, BATCH * np.arange(1, ITERATIONS + 1), scores, color=color, label=label)
        axis.set_title(algorithm.upper())
        axis.legend(loc="lower right", frameon=False)
        in_thousands(axis)
    axes[0, 0].set_ylabel("sampled score, mean of ten iterations")
    axes[0, 0].set_ylim(0, 1)
    save(figure, RESULT.with_suffix(".png"))


def replay(algorithm: str) -> dict:
    """Run a script, and train TRL's trainer on its completions, iteration by iteration -> how far they are apart."""
    answers = {row["prompt"]: row["answer"] for row in read_rows(trl_trainer.TRAIN_ROWS)}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "run", Path(folder) / "trl"
        rollout = run(algorithm, "--seed 1 --save-rollouts --num-sample-generations 1", ours)["rollouts"]
        rows = [dict(prompt=row["prompt"], answer=answers[row["prompt"]]) for row in rollout[::K]]
        completion_ids = [row["token_ids"] for row in rollout]
        given = [completion_ids[first : first + BATCH] for first in range(0, len(rollout), BATCH)]
        size = dict(batch=BATCH, max_steps=len(given), shuffle_dataset=False)
        trainer = trl_trainer.make_trainer(algorithm, rows, exact_match, theirs, given=given, **size)
        trainer.train()
        trainer.model.save_pretrained(theirs / "model")
        distance = relative_distance(theirs, ours)
    return dict(algorithm=algorithm, updates=len(given), completions=len(rollout), distance=distance)


def main():
    if sys.argv[1:] == ["replay"]:
        transformers.utils.logging.disable_progress_bar()
        write_lines(RESULT.with_name("replay.json"), [replay(algorithm) for algorithm in ("rloo", "grpo")])
        return
    rows = measure()
    tests = [compare(rows, algorithm, name) for algorithm in ("rloo", "grpo") for name in ("score", "area")]
    write_lines(RESULT, rows + tests)
    draw(rows)


if __name__ == "__main__":
    main()
