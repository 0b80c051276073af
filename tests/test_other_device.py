"""The scripts on another device. It is simulated_device.py, which refuses what a GPU refuses."""

import yaml
from conftest import (
    HERE,
    base_flags,
    changed,
    launch,
    launch_twice,
    launched,
    only,
    read_jsonl,
    read_rollouts,
)
from pytest import approx, mark

pytestmark = mark.slow

BUGS = {  # What goes to the device, or comes from it, does not.
    "prompts = prompts.to(accelerator.device)": "pass",
    "uniforms = uniforms.to(accelerator.device)": "pass",
    "{name: tensor.cpu() for name, tensor in samples.items()}": "samples",
    "[tensor.to(accelerator.device) for tensor in inputs]": "inputs",
    "F.pad(logprobs, (0, left_out)).cpu()": "logprobs",
}


# for `launch`
DEVICE = dict(program=HERE / "tests/simulated_device.py", ACCELERATE_USE_CPU="false")


@only("ppo")
def test_float32(script, elsewhere):
    """The device computes what the CPU computes. A run that goes on from a checkpoint is the run
    that never stopped."""
    flags = dict(batch_size=4, num_mini_batches=2, per_device_train_batch_size=4)
    flags |= dict(per_device_rollout_batch_size=8, eval_dataset=3, reward_model_path="classifier")
    _, printed = elsewhere(script, 1, launch_twice, DEVICE, **flags, save_every=1)
    assert "\n1 x sim (alone), float32, " in printed
    assert "resuming after iteration " in printed


def test_bfloat16(script, run, world, tmp_path):
    """In bfloat16 and with LoRA, device and CPU differ by rounding, which may change a completion.
    In training only the CPU shares prompts."""
    flags = dict(dtype="bfloat16", lora_r=4, total_episodes=12, model_path="mild")
    flags |= dict(reward_model_path="classifier", gradient_checkpointing=script.__name__ == "ppo")
    launched(script, 1, tmp_path, base_flags(world, flags), **DEVICE)
    expected = run(script, **flags)
    for folder, shares in ((tmp_path / "out", False), (expected.folder, script.__name__ != "ppo")):
        assert yaml.safe_load((folder / "args.yaml").read_text())["share_prompts"] == shares
    [line] = read_jsonl(tmp_path / "out/metrics.jsonl")
    assert line.keys() == expected.metrics[0].keys()  # None of them is nan.
    same = 0
    for row, other in zip(read_rollouts(tmp_path / "out"), expected.rollouts, strict=True):
        if row["token_ids"] == other["token_ids"]:
            same += 1
            assert row["logprobs"] == approx(other["logprobs"], abs=0.03)
    assert same >= 9


@mark.parametrize("text", BUGS)
def test_tensors_on_two_devices_are_refused(text, world, tmp_path):
    """The device refuses bugs that a CPU does not show. Each is put into a copy of rloo.py."""
    copy = changed("rloo", tmp_path, texts={text: BUGS[text]})
    finished = launch(copy, 1, tmp_path, base_flags(world), **DEVICE)
    error = finished.stderr.splitlines()[-1]
    assert error.startswith("RuntimeError: ") and "on the same device" in error
