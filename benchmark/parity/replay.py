"""TRL is trained on the completions of Tally's default run, with TRL's own weights after each
update.

    python benchmark/parity/replay.py

It runs in the environment of trl_trainer.py. Writes replay.json: how far the final weights are
apart, by the distance that Tally's moved. In a smoke run there is no TRL.
"""

import tempfile
from pathlib import Path

import trl_trainer  # first: it makes the modules below importable
from run import Part, main, relative_distance, run

RESULT = Path(__file__).with_suffix(".json")
BATCH, K = 64, 4


def replay(script, rollout, folder):
    """Train TRL's trainer on completions, iteration by iteration, and save its model."""
    from rloo import exact_match

    rows = [dict(prompt=row["prompt"], answer=row["columns"]["answer"]) for row in rollout[::K]]
    completion_ids = [row["token_ids"] for row in rollout]
    given = [completion_ids[first : first + BATCH] for first in range(0, len(rollout), BATCH)]
    size = dict(batch=BATCH, max_steps=len(given), shuffle_dataset=False)
    trainer = trl_trainer.make_trainer(script, rows, exact_match, folder, given=given, **size)
    trainer.train()
    trainer.model.save_pretrained(folder / "model")


def measure(jobs, smoke):
    rows = []
    for (script, flags), names in jobs.items():
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = Path(folder, "run"), Path(folder, "trl")
            rollout = run(script, flags, ours)["rollouts"]
            row = names | dict(updates=len(rollout) // BATCH)
            if not smoke:
                replay(script, rollout, theirs)
                row["distance"] = relative_distance(theirs, ours)
        rows.append(row)
    return rows


FLAGS = "--save-rollouts --num-sample-generations 1"
RUNS = [({}, script, "") for script in ("rloo", "grpo")]
PARTS = {"replay": Part(RUNS, FLAGS, measure=measure)}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
