"""TRL's RLOOTrainer and GRPOTrainer with the settings of Tally's scripts.

All of benchmark/parity/ and benchmark/throughput/ compares with them. They and Tally live in one
environment. The last two lines are for mini_batch.py's PPO:

    pip install -r requirements-dev.txt trl==1.16.0 math-verify==0.9.0
    pip install --no-deps torchrl==0.14.1 tensordict==0.15.3 pyvers==0.2.3
    pip install orjson==3.13.0 cloudpickle==3.1.2

`settings` has everything that differs from TRL's defaults. These are the same in both: a linear
schedule to 0 without warm-up, AdamW with betas 0.9 and 0.999, epsilon 1e-8 and no weight decay,
max_grad_norm 1, one update for each rollout, cliprange 0.2, scale_rewards group, temperature 1, no
top-p, no top-k, and prompts in a new order in each epoch (each program has its own order).
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmark"), str(ROOT)]  # run.py; the scripts
os.environ["HF_HUB_OFFLINE"] = "1"  # The model is a folder. A model card's template is not needed.
POLICY = ROOT / "benchmark" / "default" / "policy"


def settings(algorithm: str, folder, batch: int = 64, **changes) -> dict:
    """The arguments of RLOOConfig or GRPOConfig, Tally's defaults and `changes`. In brackets: TRL's
    defaults."""
    chosen = dict(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,  # [True, also on a CPU]
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,  # [True] It changes memory, not the result.
        disable_dropout=True,  # as always in Tally
        # one rollout for each batch, in one micro-batch; one optimizer step for it
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=4,  # [GRPO 8, RLOO 2]
        max_completion_length=8,  # [512]
        beta=0.01 if algorithm == "rloo" else 0.0,  # [RLOO 0.05] Tally's --kl-coef
        learning_rate=1e-4,  # [1e-6]
        # nothing is written or shown
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    if algorithm == "grpo":
        chosen["loss_type"] = "grpo"  # [dapo]
    return chosen | changes


def make_trainer(
    algorithm: str,
    rows: list[dict],
    reward,
    folder,
    model=POLICY,
    callbacks=(),
    peft_config=None,
    given=None,
    **changes,
):
    """A trainer of TRL's, unchanged, on `rows` with `reward` (one function, or several).

    given: batches of completions' token ids, which take the place of TRL's own
    """
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    name = algorithm.upper()
    args = getattr(trl, f"{name}Config")(**settings(algorithm, folder, **changes))
    trainer = getattr(trl, f"{name}Trainer")(
        model=str(model),
        args=args,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    if given is not None:
        batches = iter(given)
        trainer._generate_single_turn = lambda *_: (
            next(batches) if algorithm == "rloo" else (next(batches), None)
        )
    return trainer
