"""Gradients: equal to those of plain passes, passes that are not needed, norms."""

import math

import torch
from conftest import (
    MANY_EOS,
    WINDOWS,
    distance,
    flat,
    one_text,
    only,
    record_calls,
    save_model,
    weights_of,
)
from plain import plain_gradient, row_logprobs, token_counts, token_weights
from pytest import approx, mark, raises


@mark.parametrize("policy", ["llama", "gpt2", "many_eos", "pad_is_eos", "emits_pad", *WINDOWS])
def test_gradient_is_that_of_plain_passes(script, run, world, updates, tmp_path, policy):
    """The gradient of a single update is that of plain passes, which have no padding, no cache
    and no dropout. So are the log-probabilities of the sampler and of the reference.

    Bugs: trl#5619, #6024, #2881, verl#906 (wrong denominators)."""
    path = getattr(world, policy, None)
    if path is None:
        path = save_model(tmp_path / policy, policy, eos_ids=MANY_EOS)
    rows = run(
        script,
        model_path=path,
        total_episodes=24,
        batch_size=24,
        temperature=0.7,
        per_device_train_batch_size=7,
    ).rollouts
    assert len(set(token_counts(rows))) > 1, "the test needs unequal lengths"
    for row, logprobs in zip(rows, row_logprobs(path, rows, 0.7)):
        assert row["logprobs"] == approx(logprobs, abs=1e-5)
        assert row["ref_logprobs"] == approx(logprobs, abs=1e-5)
    expected = plain_gradient(path, rows, token_weights(script, rows), temperature=0.7)
    assert len(updates) == 1
    assert distance(expected, updates[0].gradients[: len(expected)]) < 1e-5


def trained_episodes(calls):
    """Of the passes of a run. The check of a model before the run gives no inputs by name."""
    count = 0
    for call in calls:
        if call.training and call.inputs:
            count += len(call.inputs["prompts"])
    return count


@only("rloo", "grpo")
@mark.parametrize("kl_coef, path", [(0.0, None), (0.1, "reference")])
def test_episodes_without_gradient_take_no_pass(
    script, run, world, monkeypatch, updates, kl_coef, path
):
    """Where no KL is in the loss, episodes with advantage 0 take no pass. The gradient is that of
    all episodes."""
    calls = record_calls(monkeypatch, script, "token_logprobs")
    rows = run(
        script,
        batch_size=24,
        total_episodes=24,
        reward="seldom",
        ref_model_path=path,
        kl_coef=kl_coef,
        num_ppo_epochs=2,
        per_device_train_batch_size=2,
    ).rollouts
    count = sum(row["advantage"] != 0 for row in rows)
    if path:  # RLOO's KL is in the reward, so here no advantage is 0.
        count = 24
    else:
        expected = plain_gradient(world.llama, rows, token_weights(script, rows))
        assert distance(expected, updates[0].gradients) < 1e-5
        assert 0 < count < 20
    assert trained_episodes(calls) == 2 * count


@only("rloo", "grpo")
@mark.parametrize("reward", ["five", "silent"])
@mark.filterwarnings("ignore:--reward gave no score")
def test_all_advantages_zero_is_a_step_of_zero_gradients(
    script, run, world, monkeypatch, updates, reward
):
    """All scores are equal, or no completion has one. Each update takes one pass. Its gradients are
    0 and not None, and its weights stay. Without scores no mean of them is logged.

    A gradient of None would stop the run: `updates` copies all gradients."""
    calls = record_calls(monkeypatch, script, "token_logprobs")
    ran = run(script, reward=reward, kl_coef=0.0, num_train_epochs=2, eval_dataset=5)
    assert len(updates) == ran.metrics[-1]["step"] == trained_episodes(calls)
    assert distance(weights_of(world.llama), weights_of(ran.folder / "model")) == 0
    before, *lines = ran.metrics
    assert before["eval/num_unscored"] == (5 if reward == "silent" else 0)
    for line in lines:
        assert line["grad_norm"] == line["loss/policy_avg"] == 0
        assert not line.keys() & {"val/ratio", "val/sampling_logprob_difference"}
        assert ("objective/scores" in line) == (reward == "five")
    score = None if reward == "silent" else 5.0
    assert {row["score"] for row in ran.rollouts} == {score}


def test_rounding_is_not_trained(script, run):
    """Without a reward, and with a reference that is the policy, the KL is rounding alone. AdamW
    would make whole steps of it."""
    policy = script.Args.model_path
    ran = run(
        script,
        reward="none",
        kl_coef=0.1,
        model_path=policy,
        dataset=str(script.DEFAULT / "train.jsonl"),
        response_length=8,
        batch_size=48,
        total_episodes=48,
        per_device_train_batch_size=7,
        per_device_rollout_batch_size=5,
    )
    assert 0 < abs(ran.metrics[-1]["objective/kl"]) < 1e-5
    assert distance(weights_of(policy), weights_of(ran.folder / "model")) == 0


@mark.parametrize("norm", [math.inf, math.nan])
@only("rloo", "ppo")
def test_a_gradient_norm_that_is_not_finite_stops_the_run(
    script, run, monkeypatch, updates, tmp_path, norm
):
    """It stops before the weights move. The message names iteration and step."""
    norms = iter([1.0, 1.0, norm])
    accelerator = script.accelerate.Accelerator
    monkeypatch.setattr(accelerator, "clip_grad_norm_", lambda *_: torch.tensor(next(norms)))
    out = tmp_path / "out"
    with raises(RuntimeError, match=f"iteration 2, step 3: gradient norm {norm}"):
        run(script, output_dir=out, num_mini_batches=2, batch_size=6, num_train_epochs=2)
    assert len(updates) == 2
    assert not (out / "model").exists()


@one_text
def test_the_gradient_is_clipped_to_its_norm(script, run, updates):
    """--max-grad-norm scales the whole gradient. grad_norm is the norm before that. inf clips
    nothing."""
    whole = run(script, total_episodes=12).metrics[0]["grad_norm"]
    clipped = run(script, total_episodes=12, max_grad_norm=whole / 4).metrics[0]["grad_norm"]
    norms = [flat(update.gradients).norm().item() for update in updates]
    assert [clipped, *norms] == approx([whole, whole, whole / 4], rel=1e-4)
