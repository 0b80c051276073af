"""Training: gradients and log-probabilities are those of plain passes. Also precision, adapters,
memory, norms, and episodes without a score.
"""

import contextlib
import json
import math
import os
import shutil
import statistics
from types import SimpleNamespace

import numpy as np
import torch
from conftest import (
    MANY_EOS,
    REWARDS,
    USUAL,
    VOCAB,
    changed,
    column,
    distance,
    encode,
    load_policy,
    make_rows,
    make_tokenizer,
    one_text,
    only,
    read_jsonl,
    record_calls,
    save_classifier,
    save_model,
    stages,
    weights_of,
    write_jsonl,
)
from plain import check_samples, groups_of, plain_outputs, row_logprobs, token_counts, without_none
from pytest import approx, mark, raises
from transformers import AutoModelForTokenClassification

grouped = only("rloo", "grpo")
rewards = {}
exec(REWARDS, rewards)
ENDS = ["many_eos", "pad_is_eos", "emits_pad"]
IDLE = "warning: no update had a gradient, or all scores of every group were equal\n"


def mean_of(rows, name):
    """The mean over rows. A row's numbers of tokens are added first."""
    return np.mean([np.sum(value) for value in column(rows, name)])


def check_metrics(line, rows, entropies):
    """Those of a rollout, and of ratios that are 1."""
    expected = {
        "objective/kl": mean_of(rows, "logprobs") - mean_of(rows, "ref_logprobs"),
        "objective/entropy": -mean_of(rows, "logprobs"),
        "objective/scores": mean_of(rows, "score"),
        "policy/entropy_avg": np.mean(entropies),
        "policy/approxkl_avg": 0,
        "val/ratio": 1,
        "val/ratio_var": 0,
    }
    assert {name: line[name] for name in expected} == approx(expected, rel=1e-4, abs=1e-5)


# What passes through a model is the same text in all scripts, but for the values of PPO.
@only("rloo", "ppo")
@mark.parametrize("policy", [*USUAL, *ENDS])
def test_a_run_is_that_of_plain_passes(script, policy, hold, world, tmp_path):
    """Tokens, log-probabilities, values, scores, evaluations, metrics and gradients, by two runs
    with other micro-batches and rollouts. In one of them a group shares a pass over its prompt. At
    learning rate 0 the weights stay, so every ratio is 1.

    From a score goes the penalty of a missing EOS, and then PPO clips it. A reward model reads the
    EOS, also where that is its pad. An evaluation has its own reward, without penalty.

    Bugs: trl#5619, #6024, #2881, verl#906 (wrong denominators), trl#454, #3029, #6800 (a first
    ratio that is not 1), #6228 (advantages of other prompts), PPOv2 (padding in the metrics)."""
    path = getattr(world, policy, None) or save_model(tmp_path / policy, policy, eos_ids=MANY_EOS)
    pad = "<eos>" if policy == "pad_is_eos" else "<pad>"
    pads = dict(tokenizer=make_tokenizer(pad), pad_token_id=VOCAB.index(pad))
    classifier_path, _ = save_classifier(tmp_path / "classifier", **pads)
    # This class gives the head's output at every token, not at the last one alone.
    classifier = AutoModelForTokenClassification.from_pretrained(classifier_path, num_labels=1)
    flags = dict(model_path=path, ref_model_path="reference", temperature=0.7, learning_rate=0.0)
    flags |= dict(batch_size=12, total_episodes=33, num_mini_batches=2, num_ppo_epochs=2)
    flags |= dict(missing_eos_penalty=0.3, kl_coef=0.2, eval_dataset=3, eval_every=2, eval_k=2)
    flags |= dict(eval_temperature=1.3, eval_reward="number")
    limit = math.inf
    by_value_model = dict(share_prompts=False, gradient_checkpointing=True)
    by_value_model |= dict(per_device_train_batch_size=2, per_device_rollout_batch_size=5)
    if script.__name__ == "ppo":
        limit = flags["score_clip"] = 2.0
        by_value_model["value_model_path"] = classifier_path
    by_reward_model = dict(share_prompts=True, per_device_train_batch_size=7)
    by_reward_model["reward_model_path"] = classifier_path
    for more in by_reward_model, by_value_model:
        ran, updates = hold(script, **flags, **more)
        distance, wrong = stages.judge_gradients(updates)
        assert distance < 1e-5, wrong
        assert len(set(token_counts(ran.rollouts))) > 1, "the test needs unequal lengths"
        assert len(set(column(ran.rollouts, "ended"))) == 2, "the test needs completions cut off"
        evaluations = [line for line in ran.metrics if "eval/scores" in line]
        assert column(evaluations, "iteration") == [0, 2, 3]
        for iteration in (0, 2, 3):
            rows = [row for row in ran.eval_rollouts if row["iteration"] == iteration]
            assert column(rows, "row") == column(rows, "score") == [0, 0, 1, 1, 2, 2]
            check_samples(ran, rows, path, 3, 1.3)
        for line in ran.metrics[1:]:
            rows = ran.rows_of(line["iteration"])
            entropies = check_samples(ran, rows, path, 2, 0.7)
            for row, expected in zip(rows, row_logprobs(world.reference, rows, 0.7)):
                assert row["ref_logprobs"] == approx(expected, abs=1e-5)
                *values, score_of_model = plain_outputs(classifier, row).squeeze(1).tolist()
                assert row.get("values", values) == approx(values, abs=1e-5)
                [score] = rewards["letters"]([row["prompt"]], [row["completion"]])
                score -= 0.3 * (not row["ended"])
                if more is by_reward_model:
                    score += score_of_model
                assert row["score"] == approx(min(score, limit), abs=1e-5)
            check_metrics(line, rows, entropies)


def trained_episodes(calls):
    """How many episodes went through training passes, by the calls of `token_logprobs`."""
    return sum(len(call.args[-1]) for call in calls if call.training)


@grouped
@mark.parametrize("kl_coef, path", [(0.0, None), (0.1, "reference")])
def test_episodes_without_gradient_take_no_pass(script, hold, monkeypatch, kl_coef, path):
    """Where no KL is in the loss, episodes with advantage 0 take no pass after three iterations.
    The gradient is that of all episodes."""
    calls = record_calls(monkeypatch, script, "token_logprobs")
    flags = dict(ref_model_path=path, kl_coef=kl_coef, num_ppo_epochs=2, batch_size=24)
    flags |= dict(total_episodes=120, per_device_train_batch_size=2, learning_rate=1e-6)
    ran, updates = hold(script, reward="seldom", **flags)
    assert stages.judge_gradients(updates)[1] is None
    counts = [sum(row["advantage"] != 0 for row in ran.rows_of(number)) for number in (4, 5)]
    assert ("objective/kl" in ran.metrics[0]) == bool(path)
    if path:  # RLOO's KL is in the reward, so here no advantage is 0.
        counts = [24, 24]
    else:
        assert counts == [0, 6]
    # Without any, one takes a pass that does not count.
    assert trained_episodes(calls) == 2 * (3 * 24 + max(counts[0], 1) + counts[1])


@grouped
@mark.parametrize("reward, score, unscored", [("five", 5.0, 0), ("silent", None, 12)])
def test_all_advantages_zero_is_a_step_of_zero_gradients(
    script, run, world, monkeypatch, updates, capsys, reward, score, unscored
):
    """All scores are equal, or no completion has one. Each update of a later iteration takes one
    pass. Its gradients are 0 and not None, and its weights stay. Without scores no mean of them is
    logged. At its end the run warns.

    A gradient of None would stop the run: `updates` copies all gradients."""
    calls = record_calls(monkeypatch, script, "token_logprobs")
    flags = dict(kl_coef=0.0, num_ppo_epochs=2, batch_size=12, total_episodes=48)
    ran = run(script, reward=reward, **flags)
    assert len(updates) == 8
    assert trained_episodes(calls) == 2 * (3 * 12 + 1)
    assert distance(weights_of(world.llama), weights_of(ran.folder / "model")) == 0
    assert set(column(ran.rollouts, "score")) == {score}
    for line in ran.metrics:
        assert line.get("objective/scores") == score
        assert line["val/num_unscored"] == unscored
        assert line["group/equal_scores_fraction"] == 1
        assert line["grad_norm"] == line["loss/policy_avg"] == 0
        assert not line.keys() & {"val/ratio", "val/sampling_logprob_difference"}
    assert IDLE in capsys.readouterr().err


@mark.parametrize("reward", ["five", "letters"])
def test_a_warning_if_no_score_taught_the_model_anything(script, run, capsys, reward):
    """A KL moves the weights also where all scores are equal. PPO has no groups to compare."""
    run(script, reward=reward, kl_coef=0.1, ref_model_path="reference")
    is_idle = reward == "five" and script.__name__ != "ppo"
    assert (IDLE in capsys.readouterr().err) == is_idle


@mark.parametrize(
    "name, loss, iteration",
    [
        ("rloo", "logprobs.sum(1, keepdim=True)", 1),
        ("grpo", "logprobs.sum(1, keepdim=True)", 1),
        # A KL to the policy itself is 0 before its first step.
        ("rloo", "hardshrink(logprobs - ref_logprobs[episodes], 1e-4).sum(1, keepdim=True)", 2),
    ],
)
def test_a_second_loss_is_trained_everywhere_or_stops_the_run(run, tmp_path, name, loss, iteration):
    """It has a gradient where the advantage is 0, too. `has_gradient` must say so."""
    check = "                        assert (losses[~has_gradient"
    loop = "        for ppo_epoch in range(args.num_ppo_epochs):\n"
    added = f"losses = losses + 0.1 * {loss.replace('hard', 'torch.nn.functional.hard')}"
    texts = {check: f"                        {added}\n{check}"}
    flags = dict(reward="seldom", total_episodes=72, batch_size=24, kl_coef=0.0)
    if "ref" in loss:
        flags["ref_model_path"] = "llama"
    script = changed(name, tmp_path / "wrong", texts=texts)
    with raises(AssertionError, match=r"has_gradient\[:\] = True"):
        run(script, output_dir=tmp_path / "out", **flags)
    assert (tmp_path / "out/metrics.jsonl").exists() == (iteration == 2)
    texts[loop] = f"        has_gradient[:] = True\n{loop}"
    run(changed(name, tmp_path / "right", texts=texts), **flags)


@only("rloo", "ppo")
@mark.parametrize("norm", [math.inf, math.nan])
def test_a_gradient_norm_that_is_not_finite_stops_the_run(script, run, monkeypatch, updates, norm):
    """It stops before the weights move. The message names iteration and step."""
    norms = iter([1.0, norm])
    accelerator = script.accelerate.Accelerator
    monkeypatch.setattr(accelerator, "clip_grad_norm_", lambda *_: torch.tensor(next(norms)))
    with raises(RuntimeError, match=f"iteration 2, step 2: gradient norm {norm}"):
        run(script, batch_size=6)
    assert len(updates) == 1


@only("rloo", "ppo")
def test_the_optimizer_is_adamw(script, run):
    with stages.record(script) as log:
        run(script, weight_decay=0.1, total_episodes=12)
    its = dict(weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8, maximize=False)
    assert set(stages.settings(log)) == {f"AdamW {[str(its)]}"}


@one_text
@mark.parametrize("dtype, small, large", [("float32", 5e-4, 0.01), ("bfloat16", 0.05, 0.2)])
def test_a_sampler_that_is_not_the_training_pass_stops_the_run(
    script, run, monkeypatch, updates, tmp_path, dtype, small, large
):
    """It stops before the update. Here that is the second iteration. In the first one the sampler
    differs only by rounding, of which bfloat16 has more. That is logged."""
    errors = iter([small, large])
    generate = script.generate

    def imprecise(*args, **inputs):
        batch = generate(*args, **inputs)
        batch.logprobs += next(errors) * batch.mask
        return batch

    monkeypatch.setattr(script, "generate", imprecise)
    with raises(script.UsageError, match="sampling and training give log-probabilities"):
        run(script, output_dir=tmp_path, dtype=dtype, batch_size=6, kl_coef=0.0)
    assert len(updates) == 1
    [logged] = read_jsonl(tmp_path / "metrics.jsonl")
    assert logged["val/sampling_logprob_difference"] == approx(small, rel=0.5)


def test_bfloat16_runs_and_keeps_weights_in_float32(script, hold, world):
    """Forward passes are in bfloat16. The weights that are trained stay in float32."""
    ran, updates = hold(script, dtype="bfloat16", ref_model_path="reference", total_episodes=12)
    assert {weight.dtype for weight in weights_of(ran.folder / "model")} == {torch.float32}
    rows = ran.rollouts
    for name, path in (("logprobs", world.llama), ("ref_logprobs", world.reference)):
        difference = np.hstack(row_logprobs(path, rows)) - np.hstack(column(rows, name))
        assert 1e-4 < np.abs(difference).mean() < 0.1
    # Rounding of the training pass shows in its gradient.
    assert 1e-3 < stages.judge_gradients(updates)[0] < 0.3


@contextlib.contextmanager
def shapes_kept():
    """The shapes of all tensors that are kept for the backward pass."""
    shapes = []

    def keep(tensor):
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield shapes


def test_gradient_checkpointing_keeps_fewer_activations(script, run):
    """test_processes.py shows that the run is the same."""
    counts = []
    for gradient_checkpointing in (False, True):
        with shapes_kept() as shapes:
            run(script, gradient_checkpointing=gradient_checkpointing, total_episodes=48)
        counts.append(sum(shape.numel() for shape in shapes))
    assert 0 < counts[1] < counts[0] / 2


@one_text
@mark.parametrize("dtype, allowed", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_logprobs_in_pieces_are_those_of_log_softmax(script, monkeypatch, dtype, allowed):
    """Values and gradients, in pieces of 1, 5 and all tokens. -1 is no token. Of a piece only its
    logits are kept for the backward pass, and its gradient takes no more than these."""
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 11).to(dtype).requires_grad_()
    tokens = torch.tensor([[1, 2, 3, 4], [0, 10, -1, -1], [5, -1, -1, -1]])
    expected = (logits.float() / 0.7).log_softmax(-1)
    expected = expected.gather(-1, tokens.clamp(min=0)[:, :, None]).squeeze(-1) * (tokens >= 0)
    [right] = torch.autograd.grad((expected**2).sum(), logits)
    for count in (1, 5, 12):
        monkeypatch.setattr(script, "LOGITS_AT_ONCE", count * 11)
        with shapes_kept() as shapes:
            found = script.logprobs_of(SimpleNamespace(temperature=0.7), logits, tokens)
        assert {shape[0] for shape in shapes if len(shape) == 2} <= {count, 12 % count}
        [gradient] = torch.autograd.grad((found**2).sum(), logits)
        assert distance([expected], [found]) < 1e-6
        assert distance([right], [gradient]) < allowed


@one_text
@mark.parametrize("response_length", [1, 2])
def test_shared_prompts_with_short_completions(script, run, updates, response_length):
    """The longest completion has one token, or two. Then the second pass has no token, or one."""
    for share_prompts in (True, False):
        run(script, response_length=response_length, share_prompts=share_prompts, batch_size=24)
    assert distance(updates[0].gradients, updates[-1].gradients) < 1e-5


@only("rloo", "ppo")
def test_lora_is_the_policy_with_its_adapter(script, run, world):
    """The reference is the policy without its adapter. model/ holds the adapter alone, and names
    the folder of the policy in full. So `from_pretrained` makes the policy that was trained."""
    flags = dict(lora_r=2, learning_rate=0.02, kl_coef=0.1, num_train_epochs=2)
    ran = run(script, **flags, model_path=os.path.relpath(world.llama), eval_dataset=5)
    adapter = ran.folder / "model"
    assert not (adapter / "model.safetensors").exists()
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(world.llama)
    rows = ran.rollouts
    for row, expected in zip(rows, row_logprobs(world.llama, rows)):
        assert row["ref_logprobs"] == approx(expected, abs=1e-4)
    assert rows[0]["logprobs"] == approx(rows[0]["ref_logprobs"], abs=1e-5)
    assert rows[-1]["logprobs"] != approx(rows[-1]["ref_logprobs"], abs=1e-3)
    evaluated = ran.eval_rollouts[-5:]  # by the policy that was written
    for row, expected in zip(evaluated, row_logprobs(adapter, evaluated)):
        assert row["logprobs"] == approx(expected, abs=1e-4)
    assert run(script, **flags).rollouts == rows


# ================================= episodes without a score =================================
@one_text
def test_a_part_that_is_none_adds_nothing(script, run):
    """The score is the sum of the parts that are there. An episode without any has no score: no
    mean has it, and a metric counts it. The best of k is that of the prompts whose completions all
    have a score."""
    flags = dict(eval_dataset=20, eval_k=2, eval_temperature=1.0, seed=3, total_episodes=24)
    ran = run(script, reward="unsure_parts", batch_size=24, **flags)
    line = ran.metrics[-1]
    evaluated = ran.eval_rollouts[-40:]
    for rows, mean, unscored in (
        (ran.rollouts, "objective/scores", "val/num_unscored"),
        (evaluated, "eval/scores", "eval/num_unscored"),
    ):
        for row in rows:
            parts = without_none([row["reward/letters"], row["reward/length"]])
            assert row["score"] == (approx(sum(parts), abs=1e-5) if parts else None)
        scores = column(rows, "score")
        assert line[mean] == approx(statistics.mean(without_none(scores)), rel=1e-5)
        assert line[unscored] == scores.count(None) > 0
    lengths = without_none(column(ran.rollouts, "reward/length"))
    assert line["reward/length"] == approx(statistics.mean(lengths), rel=1e-5)
    assert not any("never" in metric for metric in line)
    groups = groups_of(column(evaluated, "score"), 2)
    best = [max(group) for group in groups if None not in group]
    assert line["eval/best_of_2"] == approx(statistics.mean(best))


@only("ppo")
def test_ppo_refuses_an_episode_without_a_score(script, run, updates):
    """The error names the prompt. No update of that iteration is made."""
    with raises(script.UsageError, match=r"of '[\d+=-]+' has no score"):
        run(script, reward="no_score", batch_size=6, num_train_epochs=2)
    assert len(updates) == 1


@mark.parametrize("flag", ["model_path", "ref_model_path"])
def test_nan_of_a_model_is_not_a_missing_score(script, run, world, tmp_path, updates, flag):
    """A broken policy or reference stops the run before the first update. The prompts that are
    sampled at the start are not the broken one."""
    broken = tmp_path / "broken"
    shutil.copytree(world.reference, broken)
    model = load_policy(broken)
    model.model.embed_tokens.weight.data[encode("=")] = math.inf
    model.save_pretrained(broken)
    rows = make_rows(["1", "2=", "345"])
    flags = {flag: broken, "dataset": write_jsonl(tmp_path / "rows.jsonl", rows)}
    with raises(RuntimeError, match="nan or inf"):
        run(script, **flags)
    assert not updates
