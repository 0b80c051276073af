"""One measured run of TRL's RLOOTrainer or GRPOTrainer for throughput.py, in TRL's own environment.

    python benchmark/throughput/trl_worker.py JOB.json RESULT.json

`settings` is TRL's whole configuration. These settings differ from TRL's defaults:

    bf16                          its default is True, also on a CPU; here as the case says. Both programs have float32
                                  weights, and bfloat16 is autocast in both
    gradient_checkpointing        its default is True, Tally's is False: off in both
    disable_dropout               on, as always in Tally
    steps_per_generation, ..      one rollout and one optimizer step for each batch, in micro-batches as Tally's
    shuffle_dataset               off: both programs take the prompts in the file's order
    beta, temperature, ..         the same in both; the reference model is loaded wherever beta is above 0
    loss_type, scale_rewards      GRPO's as in grpo.py's defaults
    use_transformers_continuous_batching, cache_implementation
                                  left at their defaults, which are the fastest on a CPU: a static cache was no faster,
                                  and continuous batching was some 60 times slower (case b)
    eos_token_id                  -1 for forced lengths, so that nothing ends; this is cheaper than min_new_tokens,
                                  which rewrites the logits for every token

No setting changes two things. Without Triton, so on every CPU, TRL 1.16 also computes the log-probabilities of the
prompt's tokens, and masks them. And its backward pass computes the logits again, which saves memory. In bfloat16 its
frozen reference keeps float32 weights under autocast, as the policy does. Tally loads its reference in bfloat16.
"""

import itertools
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the model is a folder; the model card's template is not needed

import rewards  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PrinterCallback, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402


def on_gpu(job: dict) -> bool:
    """True if the job's `device` is a GPU."""
    return job.get("device", "cpu") == "cuda"


def now(job: dict) -> float:
    """The time at which the device is done with all that it was given. See tally_worker.py."""
    if on_gpu(job):
        torch.cuda.synchronize()
    return time.perf_counter()


def settings(job: dict) -> dict:
    """The arguments of RLOOConfig or GRPOConfig."""
    chosen = dict(
        output_dir=job["output_dir"],
        seed=job["seed"],
        use_cpu=not on_gpu(job),
        bf16=job["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        disable_dropout=True,
        # one rollout and one optimizer step for each batch
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["batch"] // job["micro_batch"],
        steps_per_generation=job["batch"] // job["micro_batch"],
        num_iterations=1,
        max_steps=job["steps"],
        shuffle_dataset=False,
        # sampling
        num_generations=job["k"],
        max_completion_length=job["completion_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        generation_kwargs={"eos_token_id": [-1]} if job["forced"] else None,
        # algorithm and optimizer
        beta=job["kl_coef"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        # nothing is written or shown; metrics are made at every step, as Tally makes them
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    if job["algorithm"] == "grpo":
        chosen |= dict(loss_type="grpo", scale_rewards="group")
    return chosen


def clocked(trainer_class, job: dict):
    """The trainer with clocks around its parts; each step's seconds and counts are in its list `steps`."""

    class Clocked(trainer_class):
        def __init__(self, *args, **kwargs):
            self.steps, self.prepared = [], 0
            super().__init__(*args, **kwargs)

        def _prepare_inputs(self, *args, **kwargs):
            is_first = self.prepared % self.args.gradient_accumulation_steps == 0  # of a step's micro-batches
            self.prepared += 1
            if is_first:
                self.steps.append(dict(generation=0.0, logprobs=0.0))
            inputs = super()._prepare_inputs(*args, **kwargs)
            if is_first:
                self.steps[-1]["train_began"] = now(job)
            return inputs

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            started = now(job)
            result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.steps[-1]["generation"] += now(job) - started
            completion_ids = result[0] if isinstance(result, tuple) else result  # GRPO's has log-probabilities, too
            self.steps[-1] |= dict(
                prompt_tokens=sum(len(ids) for ids in prompt_ids),
                longest_prompt=max(len(ids) for ids in prompt_ids),
                tokens=sum(len(ids) for ids in completion_ids),
                longest_completion=max(len(ids) for ids in completion_ids),
                ended=sum(ids[-1] in self.eos_token_ids for ids in completion_ids),
            )
            return result

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            if torch.is_grad_enabled():  # a pass of training, which has its own clock
                return super()._get_per_token_logps_and_entropies(*args, **kwargs)
            started = now(job)  # a pass of the old policy or of the reference
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.steps[-1]["logprobs"] += now(job) - started
            return result

    return Clocked


class StepEnds(TrainerCallback):
    """The moment that training began, and those at which each optimizer step was done: wall and CPU seconds."""

    def __init__(self, job: dict):
        self.job = job
        self.moments = []

    def on_train_begin(self, *args, **kwargs):
        self.moments.append((now(self.job), time.process_time()))

    on_step_end = on_train_begin


def main(job: dict) -> dict:
    """Run a job's steps -> the seconds and counts of each, and the run's memory."""
    torch.set_num_threads(job["threads"])
    rows = [json.loads(line) for line in open(job["dataset"], encoding="utf-8")]
    reward, episodes = getattr(rewards, job["reward"]), 0

    def score(completions, **columns):
        nonlocal episodes
        episodes += len(completions)
        return reward(completions=completions, **columns)

    config, trainer_class = {"rloo": (RLOOConfig, RLOOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}[job["algorithm"]]
    ends, settled = StepEnds(job), config(**settings(job))
    data = dict(reward_funcs=score, train_dataset=Dataset.from_list(rows))
    trainer = clocked(trainer_class, job)(model=job["model"], args=settled, callbacks=[ends], **data)
    trainer.remove_callback(PrinterCallback)
    if job["forced"]:
        trainer.eos_token_ids = [-1]  # an EOS that is sampled all the same does not cut the completion
    trainer.train()

    for step, (begin, end) in zip(trainer.steps, itertools.pairwise(ends.moments), strict=True):
        step["seconds"], step["cpu"] = end[0] - begin[0], end[1] - begin[1]
        step["train"] = end[0] - step.pop("train_began")  # forward, backward, clipping and the optimizer
        step["rest"] = step["seconds"] - step["generation"] - step["logprobs"] - step["train"]
    if on_gpu(job):
        peak = torch.cuda.max_memory_allocated()
    else:  # see tally_worker.py
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
        peak = int(line.split()[1]) * 2**10
    return dict(
        steps=trainer.steps,
        episodes=episodes,
        peak_gib=peak / 2**30,
        versions={name: version(name) for name in ("trl", "torch", "transformers", "accelerate")},
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
