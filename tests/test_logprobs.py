"""Log-probabilities: shared prompts, the sampler's, the reference's, precision, adapters, large
vocabularies.
"""

import contextlib
import json
import os
from functools import partial

import numpy as np
import pytest
import torch
from conftest import (
    CHANGED_LOGITS,
    EOS,
    USUAL,
    VOCAB,
    WINDOWS,
    column,
    distance,
    encode,
    load_policy,
    make_model,
    one_text,
    only,
    plain_logprobs,
    read_jsonl,
    weights_of,
)
from plain import completion_model, plain_gradient, row_logprobs, token_weights
from pytest import approx, mark, raises
from torch.nn.utils.rnn import pad_sequence

PROMPTS = ["12+34=", "12+34=", "7", "7"]
COMPLETIONS = [[5, 6, EOS], [7, EOS], [8, 9, 4, 5, 6, 7], [EOS]]


def gradient_of(model, logprobs):
    """The gradient of a weighted sum of log-probabilities, one tensor for each parameter."""
    weights = torch.arange(1.0, 1 + logprobs.numel())
    weighted_sum = weights @ logprobs.flatten()
    return torch.autograd.grad(weighted_sum, list(model.parameters()))


def one_pass(script, model, way="shared_prompts", prompts=PROMPTS, completions=COMPLETIONS):
    """The log-probabilities [completions, tokens] by a training pass, and the gradients of a
    weighted sum of them."""
    rows = [torch.tensor(completion) for completion in completions]
    tokens = pad_sequence(rows, batch_first=True, padding_value=-1)
    prompts = script.pad_left([encode(prompt) for prompt in prompts])
    policy = completion_model(script, model, [EOS], way, temperature=0.7)
    function = partial(script.token_logprobs, prompts=prompts, tokens=tokens)
    logprobs = policy(function)
    return logprobs.detach(), gradient_of(model, logprobs)


@contextlib.contextmanager
def shapes_kept():
    """The shapes of all tensors that are kept for the backward pass."""
    shapes = []

    def keep(tensor):
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield shapes


# Prompts of two groups of three, and the completions of the first. Which completion is longest
# differs.
GROUPS = {
    "equal": ("12", "34", [[5, 6, EOS], [7, EOS], [8, 9, 4]]),
    "beyond-the-window": ("1234567890123456", "5", [[5], [*range(5, 16), EOS], [EOS]]),
    "one-token": ("1", "2", [[EOS], [5], [EOS]]),
}


@one_text
@mark.parametrize("architecture", [*USUAL, *WINDOWS, *CHANGED_LOGITS])
@mark.parametrize("group", GROUPS)
def test_a_shared_prompt_gives_what_rows_of_their_own_give(script, architecture, group):
    """A group's prompt is run once, or each completion has a row with its prompt. Both give what
    plain passes give.

    This is tested for log-probabilities and gradients, in whole groups and in parts of them, also
    where the attention window is shorter than the prompt, and where a model bounds or scales its
    logits."""
    first, second, completions = GROUPS[group]
    prompts = [first] * 3 + [second] * 3
    completions = completions + completions[::-1]
    model = make_model(architecture)
    rows_in = []
    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(lambda _, args: rows_in.extend(map(len, args)))
    for indices in (range(6), [4, 5, 0, 1, 2], [2, 2]):
        texts = [prompts[i] for i in indices]
        tokens = [completions[i] for i in indices]
        plain = []
        for text, ids in zip(texts, tokens):
            plain.append(plain_logprobs(model, encode(text), ids, 0.7))
        expected = pad_sequence(plain, batch_first=True)
        expected_gradient = gradient_of(model, expected)
        for way, run_prompts in (("separate_rows", texts), ("shared_prompts", set(texts))):
            rows_in.clear()
            logprobs, gradient = one_pass(script, model, way, texts, tokens)
            assert rows_in[0] == len(run_prompts)
            torch.testing.assert_close(logprobs, expected.detach(), atol=1e-5, rtol=0)
            assert distance(expected_gradient, gradient) < 1e-5


@mark.parametrize("policy", ["gpt2", "dropout"])
def test_ratio_is_one_while_the_weights_stand_still(script, run, policy):
    """At learning rate 0 every update of every iteration has ratio 1, at another temperature
    than 1, too.

    Bugs: trl#454, #3029, #6800 (a first ratio that is not 1)."""
    ran = run(
        script,
        model_path=policy,
        learning_rate=0.0,
        temperature=0.7,
        num_train_epochs=2,
        num_ppo_epochs=2,
        num_mini_batches=3,
        kl_coef=0.1,
        gradient_checkpointing=policy == "dropout",  # Only then a model is in train mode.
    )
    for row in ran.metrics:
        assert row["val/ratio"] == approx(1, abs=1e-5)
        assert row["val/ratio_var"] == approx(0, abs=1e-9)
        assert row["policy/approxkl_avg"] == approx(0, abs=1e-9)
        assert row["objective/kl"] == approx(0, abs=1e-5)


@mark.parametrize("dtype, small, large", [("float32", 5e-4, 0.01), ("bfloat16", 0.05, 0.2)])
@one_text
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
    with raises(RuntimeError, match="sampling and training give log-probabilities"):
        run(script, output_dir=tmp_path, dtype=dtype, batch_size=6, kl_coef=0.0)
    assert len(updates) == 1
    [logged] = read_jsonl(tmp_path / "metrics.jsonl")
    assert logged["val/sampling_logprob_difference"] == approx(small, rel=0.5)


def test_bfloat16_runs_and_keeps_weights_in_float32(script, run, world, updates):
    """Forward passes are in bfloat16. The weights that are trained stay in float32."""
    ran = run(script, dtype="bfloat16", ref_model_path="reference", num_train_epochs=2)
    for weights in (updates[0].weights, weights_of(ran.folder / "model")):
        assert {weight.dtype for weight in weights} == {torch.float32}
    rows = ran.rows_of(1)
    for name, path in (("logprobs", world.llama), ("ref_logprobs", world.reference)):
        plain = np.hstack(row_logprobs(path, rows))
        found = np.hstack(column(rows, name))
        assert 1e-4 < np.abs(plain - found).mean() < 0.1
    # Rounding of the training pass shows in its gradient.
    expected = plain_gradient(world.llama, rows, token_weights(script, rows))
    found = updates[0].gradients[: len(expected)]
    assert 1e-3 < distance(expected, found) < 0.3


def test_gradient_checkpointing_keeps_fewer_activations(script, run):
    """test_processes.py shows that the run is the same."""
    counts = []
    for gradient_checkpointing in (False, True):
        with shapes_kept() as shapes:
            run(script, gradient_checkpointing=gradient_checkpointing, total_episodes=48)
        counts.append(sum(shape.numel() for shape in shapes))
    assert 0 < counts[1] < counts[0] / 2


@only("rloo", "ppo")
def test_lora_is_the_policy_with_its_adapter(script, run, world):
    """The reference is the policy without its adapter. model/ holds the adapter alone, and names
    the folder of the policy in full."""
    peft = pytest.importorskip("peft")
    flags = dict(lora_r=2, learning_rate=0.02, kl_coef=0.1, num_train_epochs=2)
    ran = run(script, **flags, model_path=os.path.relpath(world.llama))
    config = json.loads((ran.folder / "model/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(world.llama)
    rows = ran.rollouts
    for row, expected in zip(rows, row_logprobs(world.llama, rows)):
        assert row["ref_logprobs"] == approx(expected, abs=1e-4)
    first, *_, last = rows
    assert first["logprobs"] == approx(first["ref_logprobs"], abs=1e-5)
    assert last["logprobs"] != approx(last["ref_logprobs"], abs=1e-3)
    adapter = ran.folder / "model"
    assert not (adapter / "model.safetensors").exists()
    model = load_policy(world.llama)
    prompt = torch.tensor([encode("12+34=")])
    before = model(prompt).logits
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    assert (adapted(prompt).logits - before).abs().max() > 0.01
    assert run(script, **flags).rollouts == rows


@one_text
@mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@mark.parametrize("rows", [1, 7])
def test_pieces_change_nothing(script, monkeypatch, tied, rows):
    """In pieces of 1 or 7 tokens, the log-probabilities and gradients are those of one piece. No
    tensor with all logits is kept for the backward pass."""
    model = make_model("llama", tie_word_embeddings=tied)
    for way in ("shared_prompts", "separate_rows"):
        with shapes_kept() as shapes:
            expected, expected_gradients = one_pass(script, model, way)
        assert (24, len(VOCAB)) in shapes
        with monkeypatch.context() as patch, shapes_kept() as shapes:
            patch.setattr(script, "LOGITS_AT_ONCE", rows * len(VOCAB))
            logprobs, gradients = one_pass(script, model, way)
        assert (24, len(VOCAB)) not in shapes
        torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
        assert distance(expected_gradients, gradients) < 1e-6
