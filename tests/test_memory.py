"""benchmark/memory.py: what it predicts is what the tensors of a run take."""

import memory
from conftest import (
    MODULES,
    base_flags,
    make_args,
    make_rows,
    make_tokenizer,
    save_classifier,
    save_model,
    write_jsonl,
)
from pytest import approx, mark

CASES = {
    "all weights": {},
    "checkpointing": dict(gradient_checkpointing=True),
    "LoRA, bfloat16": dict(lora_r=4, dtype="bfloat16"),
    "one pass": dict(per_device_train_batch_size=12),
    # Sampling has the highest peak, beside the gradients of the update before.
    "sampling": dict(
        per_device_train_batch_size=1, response_length=36, gradient_checkpointing=True
    ),
    "mini-batches": dict(num_mini_batches=2, per_device_train_batch_size=12),
    "shared": dict(share_prompts=True),
    "reward model": dict(reward_model_path="classifier"),
}


OTHERS = ["grpo: all weights", "ppo: all weights", "ppo: LoRA, bfloat16", "ppo: reward model"]


@mark.parametrize("case", [*[f"rloo: {case}" for case in CASES], *OTHERS])
def test_a_prediction_is_the_peak_of_a_run(case, world, run, tmp_path):
    """Within a few percent. The run has real tensors, of equal lengths, as no token ends one."""
    name, case = case.split(": ")
    script = MODULES[name]
    shape = dict(vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=2)
    shape |= dict(tokenizer=make_tokenizer(eos_token=None), initializer_range=0.02)
    prompts = [f"{number:024b}" for number in range(8)]
    flags = dict(
        model_path=save_model(tmp_path / "model", eos_ids=None, **shape),
        dataset=write_jsonl(tmp_path / "data.jsonl", make_rows(prompts)),
        total_episodes=24,
        response_length=12,
        reward="squares",
        per_device_train_batch_size=4,  # of 12, which are divided evenly
        num_sample_generations=0,
        save_every=None,
    )
    flags |= dict(share_prompts=False) | CASES[case]
    if "reward_model_path" in flags:
        flags["reward_model_path"], _ = save_classifier(tmp_path / "classifier", **shape)
    counted = memory.Memory()
    with counted:
        run(script, **flags)
    args = script.check_flags(make_args(script, **base_flags(world, flags)))
    [row] = memory.measure(script, args, 24, [args.per_device_train_batch_size])
    assert memory.peak(row) == approx(counted.peak, rel=0.04)
