"""Gradients: equal to those of plain passes, one denominator, micro-batches, unneeded passes, what stops a run."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import (
    check_same_metrics,
    distance,
    flat,
    make_model,
    one_text,
    only,
    read_jsonl,
    record_calls,
    save_model,
    weights_of,
)
from plain import plain_gradient, token_weights


# =============================================== plain passes ===============================================
@pytest.mark.parametrize("policy", ["llama", "gpt2", "many_eos", "pad_is_eos", "emits_pad"])
def test_gradient_is_that_of_plain_passes(script, run, world, updates, policy):
    """The gradient of a single update is that of plain passes, which have no padding, no cache and no dropout.

    The EOS is trained, and nothing after it, whichever token is EOS or pad. The advantages are those of the rollout."""
    path = getattr(world, policy)
    flags = dict(total_episodes=24, batch_size=24, temperature=0.7, per_device_train_batch_size=7)
    rows = read_jsonl(run(script, model_path=path, **flags)[2] / "rollouts.jsonl")
    assert len({len(row["token_ids"]) for row in rows}) > 2, "the test needs unequal lengths"
    expected = plain_gradient(path, rows, token_weights(script, rows), temperature=0.7)
    assert len(updates) == 1
    assert distance(expected, updates[0].gradients[: len(expected)]) < 1e-5


@only("rloo", "grpo")
@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3", "qwen3"])
def test_gradient_of_models_with_windows(script, run, tmp_path, updates, architecture):
    """Through a shared prompt that is longer than the model's attention window."""
    path = save_model(tmp_path / architecture, make_model(architecture))
    flags = dict(total_episodes=24, batch_size=24, temperature=0.7)
    rows = read_jsonl(run(script, model_path=path, **flags)[2] / "rollouts.jsonl")
    assert max(len(row["prompt"]) for row in rows) > 8
    expected = plain_gradient(path, rows, token_weights(script, rows), temperature=0.7)
    assert distance(expected, updates[0].gradients[: len(expected)]) < 1e-5


# ============================================== micro-batches ===============================================
def test_unequal_lengths_have_one_denominator(script, run, world, monkeypatch, updates):
    """A mini-batch of completions of unequal lengths gives the same gradient at micro-batch 1, 5 and all."""
    gradients, passes = {}, record_calls(monkeypatch, script, "pass_logprobs")
    for size in (64, 1, 5):
        updates.clear(), passes.clear()
        flags = dict(model_path=world.mild, total_episodes=12, per_device_train_batch_size=size)
        flags |= dict(kl_coef=0.1, ref_model_path=world.reference)  # so that every episode has a gradient
        output_dir = run(script, **flags)[2]
        lengths = [len(row["token_ids"]) for row in read_jsonl(output_dir / "rollouts.jsonl")]
        assert len(set(lengths)) > 3, "the test needs unequal lengths"
        assert len(updates) == 1 and flat(updates[0].gradients).norm() > 0.1
        gradients[size] = updates[0].gradients
        assert sum(call.training for call in passes) == math.ceil(len(lengths) / size)
    for size in (1, 5):
        assert distance(gradients[64], gradients[size]) < 2e-6, f"micro-batch {size}"


@only("rloo")
def test_micro_batches_by_hand(script):
    """Every process gets a share of the same size, sorted by length.

    Where episodes are missing, the last one is repeated, and is not real. No episodes at all make one such pass."""

    def cut(episodes, lengths, size, processes):
        shares = []
        for rank in range(processes):
            accelerator = type("", (), dict(num_processes=processes, process_index=rank, device="cpu"))
            pieces = script.micro_batches(accelerator, torch.tensor(episodes), torch.tensor(lengths), size)
            assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            shares.append([list(zip(piece.episodes.tolist(), piece.is_real.tolist())) for piece in pieces])
        return shares

    same = [1] * 10
    assert cut([0, 1, 2, 3, 4], same, 64, 3) == [[[(0, 1), (1, 1)]], [[(2, 1), (3, 1)]], [[(4, 1), (4, 0)]]]
    assert cut([7], same, 1, 3) == [[[(7, 1)]], [[(7, 0)]], [[(7, 0)]]]
    assert cut([], same, 4, 1) == [[[(0, 0)]]] and cut([], same, 4, 2) == [[[(0, 0)]], [[(0, 0)]]]
    assert cut([2, 3, 4, 5, 6], [0, 0, 9, 3, 3, 1, 2], 2, 1) == [[[(5, 1), (6, 1)], [(3, 1), (4, 1)], [(2, 1)]]]
    sizes = {len(piece) for piece in cut(list(range(10)), same, 4, 1)[0]}
    assert sizes == {3, 4}  # near-equal, none larger than it may be


# ========================================= passes that are not needed =======================================
def make_every_episode_count(monkeypatch, script):
    """Advantages of 0 become 1e-30: nothing to a gradient in float32, but not 0."""
    name = f"{script.__name__}_advantages"
    function = getattr(script, name)

    def tiny_for_none(*args):
        result = function(*args)
        advantages, *others = result if isinstance(result, tuple) else (result,)
        advantages = advantages.masked_fill(advantages == 0, 1e-30)
        return (advantages, *others) if others else advantages

    monkeypatch.setattr(script, name, tiny_for_none)


def trained_episodes(calls):
    return sum(len(call.inputs["prompts"]) for call in calls if call.training)


@only("rloo", "grpo")
@pytest.mark.parametrize("size, num_ppo_epochs", [(2, 1), (64, 2)])
def test_episodes_without_gradient_take_no_pass(script, run, world, monkeypatch, updates, size, num_ppo_epochs):
    """Without a KL in the loss, episodes with advantage 0 take no pass.

    Gradients, weights and metrics are those of a run in which all episodes take a pass. Only the metrics of ratios are
    over fewer episodes. No gradient is ever None."""
    flags = dict(batch_size=24, num_train_epochs=4, kl_coef=0.0, reward=world.reward("seldom"), stop_token_id=5)
    flags |= dict(num_ppo_epochs=num_ppo_epochs)
    calls, runs = record_calls(monkeypatch, script, "pass_logprobs"), []
    for _ in range(2):
        calls.clear(), updates.clear()
        _, metrics, output_dir = run(script, per_device_train_batch_size=size, **flags)
        gradients = [update.gradients for update in updates]
        runs.append((metrics, trained_episodes(calls), weights_of(output_dir / "model"), gradients))
        make_every_episode_count(monkeypatch, script)
    (metrics, count, weights, gradients), (all_metrics, all_count, all_weights, all_gradients) = runs
    assert all_count == num_ppo_epochs * metrics[-1]["episode"] and count < 0.7 * all_count
    assert all(gradient is not None for update in gradients for gradient in update)
    assert distance(itertools.chain(*all_gradients), itertools.chain(*gradients)) < 1e-5
    before = weights_of(world.llama)
    moved = [a - b for a, b in zip(all_weights, before)]
    assert distance(moved, [a - b for a, b in zip(weights, before)]) < 1e-3
    for row in metrics + all_metrics:  # ratios are of the episodes that took a pass
        for name in [
            name for name in row if name.startswith(("val/ratio", "val/samp", "policy/approx", "policy/clip"))
        ]:
            del row[name]
    check_same_metrics(metrics, all_metrics)


@only("rloo", "grpo")
def test_episodes_that_have_a_gradient_take_a_pass(script, run, world, monkeypatch):
    """With a KL in the loss or in the reward, episodes with equal scores have a gradient, too."""
    calls = record_calls(monkeypatch, script, "pass_logprobs")
    flags = dict(batch_size=24, reward=world.reward("seldom"), ref_model_path=world.reference, kl_coef=0.1)
    metrics = run(script, **flags)[1]
    assert trained_episodes(calls) == metrics[-1]["episode"]


@only("rloo", "grpo")
def test_all_advantages_zero_is_a_step_of_zero_gradients(script, run, world, monkeypatch, updates):
    """Each update takes one pass. Its gradients are 0 and not None, and its weights stay.

    The step counts. Metrics of ratios are left out."""
    calls = record_calls(monkeypatch, script, "pass_logprobs")
    _, metrics, output_dir = run(script, reward=world.reward("five"), kl_coef=0.0, num_train_epochs=2)
    assert len(updates) == len(metrics) == metrics[-1]["step"] and trained_episodes(calls) == len(updates)
    assert all(flat(update.gradients).abs().max() == 0 for update in updates)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(world.llama), weights_of(output_dir / "model")))
    for row in metrics:
        assert row["grad_norm"] == row["loss/policy_avg"] == 0
        assert not {"val/ratio", "val/ratio_var", "policy/approxkl_avg", "policy/clipfrac_avg"} & row.keys()
        assert "val/sampling_logprob_difference" not in row


@only("rloo")
def test_whitened_advantages_keep_exact_zeros(script, run, world, monkeypatch):
    """Leave-one-out advantages have mean 0 by construction, so whitening only divides them.

    Advantages of equal scores stay exactly 0, and their episodes take no pass. Subtracting the mean would add its
    rounding error to them, and the policy would be trained on noise."""
    calls = record_calls(monkeypatch, script, "pass_logprobs")
    flags = dict(batch_size=21, num_train_epochs=3, kl_coef=0.0, reward=world.reward("seldom"))
    _, metrics, output_dir = run(script, whiten_advantages=True, **flags)
    rows = read_jsonl(output_dir / "rollouts.jsonl")
    silent = [row["advantage"] for row in rows if len(row["prompt"]) % 3 != 0]
    assert len(silent) > 10 and set(silent) == {0.0}
    passes = 0
    for line in metrics:
        advantages = np.array([row["advantage"] for row in rows if row["iteration"] == line["iteration"]])
        passes += max(1, np.count_nonzero(advantages))
        if advantages.any():
            assert advantages.mean() == pytest.approx(0, abs=1e-6) and advantages.std() == pytest.approx(1, abs=1e-4)
    assert len(metrics) < passes == trained_episodes(calls)


# ============================================== what stops a run ============================================
@pytest.mark.parametrize("fault", ["nan", "inf"])
@one_text
def test_a_score_that_is_not_finite_stops_the_run(script, run, world, updates, tmp_path, fault):
    """The message names iteration and prompt. No update of that iteration is made, and no model is written."""
    flags = dict(output_dir=str(tmp_path / "out"), batch_size=6, num_train_epochs=2)
    with pytest.raises(ValueError, match=rf"iteration 2: the score of a completion of '[^']+' is {fault}"):
        run(script, reward=world.reward(fault), **flags)
    assert len(updates) == 1  # iteration 1's
    assert len(read_jsonl(tmp_path / "out" / "metrics.jsonl")) == 1
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("norm", [math.inf, math.nan])
@only("rloo", "ppo")
def test_a_gradient_norm_that_is_not_finite_stops_the_run(script, run, monkeypatch, updates, tmp_path, norm):
    """It stops before the weights move. The message names iteration and step."""
    norms = iter([1.0, 1.0, norm])
    monkeypatch.setattr(script.accelerate.Accelerator, "clip_grad_norm_", lambda *args: torch.tensor(next(norms)))
    with pytest.raises(RuntimeError, match=f"iteration 2, step 3: the gradient norm is {norm}"):
        run(script, output_dir=str(tmp_path / "out"), num_mini_batches=2, batch_size=6, num_train_epochs=2)
    assert len(updates) == 2 and not (tmp_path / "out" / "model").exists()


@only("rloo", "ppo")
def test_a_loss_that_is_not_finite_stops_the_run(script, run, monkeypatch, updates):
    """The norm of the gradient is not finite either, and that stops the run."""
    function, calls = script.clipped_policy_loss, itertools.count()

    def broken(*args):
        losses, cut = function(*args)
        return losses * (math.nan if next(calls) >= 1 else 1), cut  # from the second pass on

    monkeypatch.setattr(script, "clipped_policy_loss", broken)
    with pytest.raises(RuntimeError, match="iteration 2, step 2: the gradient norm is nan"):
        run(script, batch_size=6, num_train_epochs=2)
    assert len(updates) == 1


@one_text
def test_the_gradient_is_clipped_to_its_norm(script, run, updates):
    """--max-grad-norm scales the whole gradient. grad_norm is the norm before that. inf clips nothing."""
    metrics = run(script, total_episodes=12)[1]
    [whole], norm = updates.copy(), metrics[0]["grad_norm"]
    assert flat(whole.gradients).norm().item() == pytest.approx(norm, rel=1e-5)
    metrics = run(script, total_episodes=12, max_grad_norm=norm / 4)[1]
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert distance([x / 4 for x in whole.gradients], updates[1].gradients) < 1e-4
