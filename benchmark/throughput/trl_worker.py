"""A measured run of TRL's RLOOTrainer or GRPOTrainer for throughput.py.

The settings are those of benchmark/parity/trl_trainer.py, with its reasons. Besides:

    gradient_accumulation_steps   the same micro-batches as Tally's
    shuffle_dataset               off: both programs take the prompts in the file's order
    use_transformers_continuous_batching, cache_implementation
                                  left at their defaults, which are the fastest on a CPU: a static
                                  cache was no faster, and continuous batching was some 60 times
                                  slower
    eos_token_id                  -1 for forced lengths, so that nothing ends. This is cheaper than
                                  min_new_tokens, which rewrites the logits for every token

No setting changes two things. Without Triton, so on every CPU, TRL 1.16 also computes the
log-probabilities of the prompt's tokens, and masks them. And its backward pass computes the logits
again, which saves memory.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from tally_worker import measured, now, timed

sys.path.append(str(Path(__file__).resolve().parent.parent / "parity"))
import trl_trainer
from run import import_script, read_rows


def settings(job: dict) -> dict:
    """What differs from the settings in benchmark/parity/trl_trainer.py."""
    import torch

    micro_batches = job["batch"] // job["micro_batch"]
    return dict(
        seed=job["seed"],
        use_cpu=not torch.cuda.is_available(),
        bf16=job["dtype"] == "bfloat16",
        batch=job["micro_batch"],
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=micro_batches,
        max_steps=job["steps"],
        shuffle_dataset=False,
        num_generations=job["k"],
        max_completion_length=job["completion_tokens"],
        generation_kwargs={"eos_token_id": [-1]} if job["forced"] else None,
        beta=job["kl_coef"],
        learning_rate=job["learning_rate"],
    )


def counting(trainer_class):
    """The trainer's class with a list `steps`, which gets the counts of each step."""

    class Counting(trainer_class):
        def __init__(self, *args, **kwargs):
            self.steps = []
            super().__init__(*args, **kwargs)

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            sample = super()._generate_single_turn
            result, seconds = timed(sample, prompt_ids, *args, **kwargs)
            # GRPO's has log-probabilities, too
            completion_ids = result[0] if isinstance(result, tuple) else result
            counts = dict(
                prompt_tokens=sum(len(ids) for ids in prompt_ids),
                longest_prompt=max(len(ids) for ids in prompt_ids),
                tokens=sum(len(ids) for ids in completion_ids),
                sampling=seconds,
            )
            self.steps.append(counts)
            return result

    return Counting


def train(job: dict) -> dict:
    """Train, and return what was measured."""
    if not find_spec("trl"):
        return dict(skipped="TRL is not installed")
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    moments = []

    class StepEnds(TrainerCallback):
        """The moment that training began, and those at which each optimizer step was done."""

        def on_train_begin(self, *args, **kwargs):
            moments.append(now())

        on_step_end = on_train_begin

    data = dict(
        rows=read_rows(job["dataset"]),
        reward=import_script("rloo").load_reward(job["reward"]),
        model=job["model"],
    )
    data |= dict(folder=job["folder"], callbacks=[StepEnds()], subclass=counting)
    trainer = trl_trainer.make_trainer(job["algorithm"], **data, **settings(job))
    if job["forced"]:
        # an EOS that is sampled all the same does not cut the completion
        trainer.eos_token_ids = [-1]
    trainer.train()
    return measured(trainer.steps, moments)
