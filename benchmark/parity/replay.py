"""The whole of Tally's default run, trained by TRL on the same completions, with TRL's own weights after each update.

    OMP_NUM_THREADS=1 python benchmark/parity/replay.py               # four minutes on one core

It runs in the environment of trl_trainer.py. Writes replay.json: how far the final weights are apart, by the distance
that Tally's moved.
"""

import tempfile
from pathlib import Path

import transformers
import trl_trainer  # first: it makes the modules below importable
from run import read_rows, relative_distance, run, write_lines

from rloo import exact_match

BATCH, K = 64, 4


def replay(algorithm: str) -> dict:
    """Run a script, and train TRL's trainer on its completions, iteration by iteration -> how far they are apart."""
    answers = {row["prompt"]: row["answer"] for row in read_rows(trl_trainer.TRAIN_ROWS)}
    with tempfile.TemporaryDirectory() as folder:
        ours = run(algorithm, "--seed 1 --save-rollouts --num-sample-generations 1", Path(folder) / "run")
        rollout = ours["rollouts"]
        rows = [dict(prompt=row["prompt"], answer=answers[row["prompt"]]) for row in rollout[::K]]
        completion_ids = [row["token_ids"] for row in rollout]
        given = [completion_ids[first : first + BATCH] for first in range(0, len(rollout), BATCH)]
        size = dict(batch=BATCH, max_steps=len(given), shuffle_dataset=False)
        trainer = trl_trainer.make_trainer(algorithm, rows, exact_match, Path(folder) / "trl", given=given, **size)
        trainer.train()
        trainer.model.save_pretrained(Path(folder) / "trl" / "model")
        distance = relative_distance(Path(folder) / "trl", Path(folder) / "run")
    return dict(algorithm=algorithm, updates=len(given), completions=len(rollout), distance=distance)


def main():
    transformers.utils.logging.disable_progress_bar()
    write_lines(Path(__file__).with_suffix(".json"), [replay(algorithm) for algorithm in ("rloo", "grpo")])


if __name__ == "__main__":
    main()
