"""Gradients: equal to those of plain passes, passes that are not needed, norms."""

import math

import torch
from conftest import (
    MANY_EOS,
    WINDOWS,
    compare_runs,
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


def make_every_episode_count(monkeypatch, script):
    """Advantages of 0 become 1e-30: nothing to a gradient in float32, but not 0."""
    name = f"{script.__name__}_advantages"
    function = getattr(script, name)

    def tiny_for_none(*args):
        advantages = function(*args)
        return advantages.where(advantages != 0, 1e-30)

    monkeypatch.setattr(script, name, tiny_for_none)


def trained_episodes(calls):
    """Of the passes of a run. The check of a model before the run gives no inputs by name."""
    count = 0
    for call in calls:
        if call.training and call.inputs:
            count += len(call.inputs["prompts"])
    return count


def all_gradients(updates):
    """Those of all updates, one after the other."""
    gradients = []
    for update in updates:
        gradients += update.gradients
    return gradients


def ratio_names(script):
    """The metrics that an update logs of its ratios."""
    metrics = getattr(script, "update_metrics", script.ratio_metrics)
    one = torch.ones(1, 1, dtype=bool)
    return tuple(metrics(one.float(), one, one))


@only("rloo", "grpo")
@mark.parametrize("size, num_ppo_epochs", [(2, 1), (64, 2)])
def test_episodes_without_gradient_take_no_pass(
    script, run, monkeypatch, updates, size, num_ppo_epochs
):
    """Without a KL in the loss, episodes with advantage 0 take no pass.

    Gradients, weights and metrics are those of a run in which all episodes take a pass. Only the
    metrics of ratios are over fewer episodes. No gradient is ever None."""
    flags = dict(
        batch_size=24,
        num_train_epochs=4,
        kl_coef=0.0,
        reward="seldom",
        stop_token_id=5,
        num_ppo_epochs=num_ppo_epochs,
        per_device_train_batch_size=size,
    )
    calls = record_calls(monkeypatch, script, "token_logprobs")
    ran = run(script, **flags)
    gradients = all_gradients(updates)
    all_episodes = num_ppo_epochs * ran.metrics[-1]["episode"]
    assert trained_episodes(calls) < 0.7 * all_episodes
    make_every_episode_count(monkeypatch, script)
    calls.clear()
    updates.clear()
    other = run(script, **flags)
    assert trained_episodes(calls) == all_episodes
    assert distance(all_gradients(updates), gradients) < 1e-5
    compare_runs(other.folder, ran.folder, without=ratio_names(script))


@only("rloo", "grpo")
def test_episodes_that_have_a_gradient_take_a_pass(script, run, monkeypatch):
    """With a KL in the loss or in the reward, episodes with equal scores have a gradient, too."""
    calls = record_calls(monkeypatch, script, "token_logprobs")
    ran = run(script, batch_size=24, reward="seldom", ref_model_path="reference", kl_coef=0.1)
    assert trained_episodes(calls) == ran.metrics[-1]["episode"]


@only("rloo", "grpo")
def test_all_advantages_zero_is_a_step_of_zero_gradients(script, run, world, monkeypatch, updates):
    """Each update takes one pass. Its gradients are 0 and not None, and its weights stay.

    A gradient of None would stop the run: `updates` copies all gradients."""
    calls = record_calls(monkeypatch, script, "token_logprobs")
    ran = run(script, reward="five", kl_coef=0.0, num_train_epochs=2)
    assert len(updates) == ran.metrics[-1]["step"] == trained_episodes(calls)
    assert distance(weights_of(world.llama), weights_of(ran.folder / "model")) == 0
    for line in ran.metrics:
        assert line["grad_norm"] == line["loss/policy_avg"] == 0
        assert not line.keys() & {*ratio_names(script), "val/sampling_logprob_difference"}


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
    norm = run(script, total_episodes=12).metrics[0]["grad_norm"]
    clipped = run(script, total_episodes=12, max_grad_norm=norm / 4)
    assert clipped.metrics[0]["grad_norm"] == approx(norm, rel=1e-5)
    whole, part = [flat(update.gradients) for update in updates]
    assert whole.norm().item() == approx(norm, rel=1e-5)
    assert distance([whole / 4], [part]) < 1e-4
