"""The whole of Tally's default run, trained by TRL: the same completions, and TRL's own weights after each update.

    OMP_NUM_THREADS=1 python benchmark/parity/replay.py               # four minutes on one core

It runs in the environment of trl_trainer.py. First rloo.py and grpo.py run with --save-rollouts. Then TRL's trainer
runs with the settings of learning.py. It gets Tally's completions, 256 times 64 of them, in place of its own samples.
It does not get Tally's weights. Reward, advantages, loss, clipping, AdamW and the learning-rate schedule are TRL's own.
So curves of the two programs can differ only by what is random in both: the order of prompts and the sampled tokens.

The final weights are compared: the norm of their difference by the norm of the distance that Tally's moved. Writes
replay.json.
"""

import tempfile
from pathlib import Path

import torch
import transformers
import trl_trainer  # first: it makes the modules below importable
from run import read_rows, run, write_lines
from transformers import AutoModelForCausalLM

from rloo import exact_match

HERE = Path(__file__).resolve().parent
BATCH, K = 64, 4


def weights_of(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def train_trl(algorithm: str, rollout: list[dict], answers: dict[str, str], folder: Path):
    """TRL's trainer after training on Tally's completions, iteration by iteration."""
    rows = [dict(prompt=row["prompt"], answer=answers[row["prompt"]]) for row in rollout[::K]]
    size = dict(batch=BATCH, max_steps=len(rollout) // BATCH, shuffle_dataset=False)
    trainer = trl_trainer.make_trainer(algorithm, rows, exact_match, folder, **size)
    batches = iter(range(0, len(rollout), BATCH))

    def generate(*_):
        first = next(batches)
        completion_ids = [row["token_ids"] for row in rollout[first : first + BATCH]]
        return completion_ids if algorithm == "rloo" else (completion_ids, None)

    trainer._generate_single_turn = generate
    trainer.train()
    return trainer


def replay(algorithm: str) -> dict:
    answers = {row["prompt"]: row["answer"] for row in read_rows(trl_trainer.TRAIN_ROWS)}
    with tempfile.TemporaryDirectory() as folder:
        ours = run(algorithm, "--seed 1 --save-rollouts --num-sample-generations 1", Path(folder) / "run")
        trainer = train_trl(algorithm, ours["rollouts"], answers, Path(folder) / "trl")
        before, after = (AutoModelForCausalLM.from_pretrained(p) for p in (trl_trainer.POLICY, f"{folder}/run/model"))
    scores = [row["objective/scores"] for row in ours["metrics"] if row["iteration"] > 0]
    theirs = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    norms = [row["grad_norm"] for row in ours["metrics"] if row["iteration"] > 0]
    their_norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    moved = (weights_of(after) - weights_of(before)).norm()
    return dict(
        algorithm=algorithm,
        updates=len(scores),
        completions=len(ours["rollouts"]),
        distance=float((weights_of(after) - weights_of(trainer.model)).norm() / moved),
        scores_that_differ=sum(a != b for a, b in zip(scores, theirs, strict=True)),
        furthest_gradient_norms=max(abs(a - b) / a for a, b in zip(norms, their_norms, strict=True) if a),
    )


def main():
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for algorithm in ("rloo", "grpo"):
        rows.append(replay(algorithm))
        print(rows[-1], flush=True)
    write_lines(HERE / "replay.json", rows)


if __name__ == "__main__":
    main()
