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
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tally_worker import measured, now, timed

sys.path.append(str(Path(__file__).resolve().parent.parent / "parity"))
import trl_trainer
from run import import_script, read_rows


def counting(job: dict, trainer_class):
    """The trainer's class, which notes the beginning and the counts of each step. It gets LoRA as
    Tally does."""

    class Counting(trainer_class):
        steps = []

        def __init__(self, *args, **kwargs):
            if job["lora_r"]:
                import peft

                kwargs["peft_config"] = peft.LoraConfig(
                    r=job["lora_r"], lora_alpha=2 * job["lora_r"], target_modules="all-linear"
                )
            super().__init__(*args, **kwargs)

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            begin = now()
            sample = super()._generate_single_turn
            result, seconds = timed(sample, prompt_ids, *args, **kwargs)
            # GRPO's has log-probabilities, too
            completion_ids = result[0] if isinstance(result, tuple) else result
            counts = dict(
                begin=begin,
                prompt_tokens=sum(len(ids) for ids in prompt_ids),
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

    torch.set_num_threads(1)
    micro_batches = job["batch"] // job["micro_batch"]
    trainer = trl_trainer.make_trainer(
        job["algorithm"],
        read_rows(job["dataset"]),
        import_script("rloo").load_reward(job["reward"]),
        job["folder"],
        job["model"],
        subclass=partial(counting, job),
        seed=job["seed"],
        use_cpu=not torch.cuda.is_available(),
        bf16=job["dtype"] == "bfloat16",
        model_init_kwargs=dict(dtype=job["dtype"] if job["lora_r"] else "float32"),
        batch=job["micro_batch"],
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=micro_batches,
        max_steps=job["steps"],
        shuffle_dataset=False,
        max_completion_length=job["completion_tokens"],
        generation_kwargs={"eos_token_id": [-1]} if job["forced"] else None,
        beta=job["kl_coef"],
        learning_rate=1e-6,
    )
    if job["forced"]:
        # an EOS that is sampled all the same does not cut the completion
        trainer.eos_token_ids = [-1]
    trainer.train()
    return measured(trainer.steps)
