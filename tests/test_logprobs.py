"""Log-probabilities: shared prompts, the sampler's, the reference's, precision, adapters, large vocabularies."""

import math
import os
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    CHANGED_LOGITS,
    EOS,
    FSDP2,
    USUAL,
    VOCAB,
    WINDOWS,
    changed_copy,
    distance,
    encode,
    make_model,
    one_text,
    only,
    plain_logprobs,
    record_calls,
    save_model,
    weights_of,
)
from plain import completion_model, row_logprobs, sample
from transformers import AutoModelForCausalLM

PROMPTS = ["12+34=", "12+34=", "7", "7"]
COMPLETIONS = [[5, 6, EOS], [7, EOS], [8, 9, 4, 5, 6, 7], [EOS]]


def gradient_of(model, logprobs):
    """The gradient of a weighted sum of log-probabilities, one tensor for each parameter."""
    weighted = logprobs * torch.arange(1.0, 1 + logprobs.numel()).view_as(logprobs)
    return torch.autograd.grad(weighted.sum(), list(model.parameters()))


def one_pass(script, model, shares_prompts=True, prompts=PROMPTS, completions=COMPLETIONS, width=6):
    """The log-probabilities [completions, width] by a training pass, and the gradients of a weighted sum of them."""
    tokens = torch.tensor([completion + [-1] * (width - len(completion)) for completion in completions])
    prompts = script.pad_left([encode(prompt) for prompt in prompts])
    policy = completion_model(script, model, [EOS], shares_prompts, temperature=0.7)
    logprobs = policy(partial(script.token_logprobs, prompts=prompts, tokens=tokens))
    return logprobs.detach(), gradient_of(model, logprobs)


GROUPS = {  # prompts of two groups of three, and the completions of the first; which completion is longest differs
    "equal": ("12", "34", [[5, 6, EOS], [7, EOS], [8, 9, 4]]),
    "beyond-the-window": ("1234567890123456", "5", [[5], [7, 8, 9, 10, 11, 12, 13, 5, 6, 7, 8, EOS], [EOS]]),
    "one-token": ("1", "2", [[EOS], [5], [EOS]]),
}


@one_text
@pytest.mark.parametrize("architecture", [*USUAL, *WINDOWS, *CHANGED_LOGITS])
@pytest.mark.parametrize("group", GROUPS)
def test_a_shared_prompt_gives_what_rows_of_their_own_give(script, architecture, group):
    """A group's prompt is run once, or each completion has a row with its prompt. Both give what plain passes give.

    This is tested for log-probabilities and gradients, in whole groups and in parts of them, also where the attention
    window is shorter than the prompt, and where a model bounds or scales its logits."""
    first, second, completions = GROUPS[group]
    prompts, completions = [first] * 3 + [second] * 3, completions + completions[::-1]
    model = make_model(architecture)
    for indices in ([0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2], [2, 2]):
        given = [[texts[i] for i in indices] for texts in (prompts, completions)]
        plain = [plain_logprobs(model, encode(prompt), completion, 0.7) for prompt, completion in zip(*given)]
        expected = torch.stack([torch.nn.functional.pad(row, (0, 13 - len(row))) for row in plain])
        expected_gradient = gradient_of(model, expected)
        for shares_prompts in (False, True):
            rows_in = []
            hook = model.get_decoder().register_forward_pre_hook(lambda _, args: rows_in.append(len(args[0])))
            logprobs, gradient = one_pass(script, model, shares_prompts, *given, width=13)
            hook.remove()
            assert rows_in[0] == (len(set(given[0])) if shares_prompts else len(indices))
            torch.testing.assert_close(logprobs, expected.detach(), atol=1e-5, rtol=0)
            assert distance(expected_gradient, gradient) < 1e-5


@pytest.mark.parametrize("architecture", ["gpt2", *WINDOWS])
def test_every_pass_gives_the_same_logprobs(script, run, tmp_path, architecture):
    """The sampler, the reference and training agree with plain forward passes."""
    path = save_model(tmp_path / "policy", architecture)
    flags = dict(temperature=0.7, num_ppo_epochs=2, total_episodes=21, batch_size=21, kl_coef=0.1)
    ran = run(script, model_path=path, per_device_train_batch_size=5, **flags)
    rows = ran.rollouts
    assert len({len(row["prompt"]) for row in rows}) > 3
    for row, expected in zip(rows, row_logprobs(path, rows, 0.7)):
        assert row["logprobs"] == pytest.approx(expected, abs=1e-5), "sampler"
        assert row["ref_logprobs"] == pytest.approx(expected, abs=1e-5), "reference"
    assert ran.metrics[0]["val/sampling_logprob_difference"] < 2e-5, "training"


@pytest.mark.parametrize("policy", ["gpt2", "dropout"])
def test_ratio_is_one_while_the_weights_stand_still(script, run, world, policy):
    """At learning rate 0 every update of every iteration has ratio 1, at another temperature than 1, too."""
    flags = dict(temperature=0.7, num_ppo_epochs=2, num_mini_batches=3, learning_rate=0.0, kl_coef=0.1)
    _, metrics, _ = run(script, model_path=getattr(world, policy), num_train_epochs=2, **flags)
    for row in metrics:
        assert row["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert row["val/ratio_var"] == pytest.approx(0, abs=1e-9)
        assert row["policy/approxkl_avg"] == pytest.approx(0, abs=1e-9)
        assert row["policy/clipfrac_avg"] == 0
        assert row["objective/kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("dtype, logged, refused", [("float32", 5e-4, 0.01), ("bfloat16", 0.2, 0.4)])
@one_text
def test_a_sampler_that_is_not_the_training_pass_stops_the_run(
    script, run, monkeypatch, updates, dtype, logged, refused
):
    """In each iteration before its first update. A difference by rounding, of which bfloat16 has more, is logged."""
    sample, errors = script.sample, []

    def off(*args, **kwargs):
        result, error = sample(*args, **kwargs), (errors or [logged]).pop(0)
        return result | {"logprobs": result["logprobs"] + error * (result["logprobs"] != 0)}

    monkeypatch.setattr(script, "sample", off)
    for count in (0, 1):
        updates.clear()
        errors[:] = [logged] * count + [refused]
        with pytest.raises(RuntimeError, match=rf"sampling and training give log-probabilities .*{refused}\d* apart"):
            run(script, dtype=dtype, batch_size=6, kl_coef=0.0)
        assert len(updates) == count
    metrics = run(script, dtype=dtype).metrics
    assert all(logged / 2 < row["val/sampling_logprob_difference"] < 2 * logged for row in metrics)


def test_bfloat16_runs_and_keeps_weights_in_float32(script, run, world, monkeypatch):
    """Forward passes are in bfloat16. The weights that are trained stay in float32."""
    passes = record_calls(monkeypatch, torch.nn.functional, "linear")
    loaded, check = record_calls(monkeypatch, script, "load_model"), script.check_model
    # This check of a model, before the run, is in the type in which the model is held.
    monkeypatch.setattr(script, "check_model", lambda *args: (check(*args), passes.clear())[0])
    ran = run(script, dtype="bfloat16", ref_model_path=world.reference, num_train_epochs=2)
    assert {call.result.dtype for call in passes} == {torch.bfloat16}
    dtypes = {call.args[1]: call.result.dtype for call in loaded}
    assert dtypes[world.reference] == torch.bfloat16 and dtypes[world.llama] == torch.float32
    assert {w.dtype for w in weights_of(ran.folder / "model")} == {torch.float32}
    assert all(math.isfinite(value) for row in ran.metrics for value in row.values())
    rows = ran.rollouts[:12]  # the first iteration's
    pairs = zip(rows, row_logprobs(world.llama, rows))
    differences = np.hstack([np.subtract(row["logprobs"], plain) for row, plain in pairs])
    assert 1e-4 < np.abs(differences).mean() < 0.1


@one_text
def test_a_shared_prompt_is_checked_in_bfloat16(script, run, world, tmp_path, capsys):
    """Jamba's cache makes other results in bfloat16, too. Those of Llama and GPT-2 differ by rounding alone."""
    jamba = save_model(tmp_path / "jamba", "jamba", initializer_range=1.0)
    for path, needs_rows in ((world.reference, False), (world.gpt2, False), (jamba, True)):
        capsys.readouterr()
        run(script, ref_model_path=path, dtype="bfloat16", total_episodes=3)
        said = f"--ref-model-path {path} needs a row for each episode" in capsys.readouterr().out
        assert said == needs_rows


@only("ppo")  # It shares no prompts, with checkpointing or without.
def test_gradient_checkpointing_recomputes(script, run, monkeypatch):
    """Every pass of a layer with gradient is made twice. test_processes.py shows that the run is the same."""
    passes, layer, check = [], transformers.models.llama.modeling_llama.LlamaMLP, script.check_model
    forward = layer.forward  # counted as it begins: torch ends a recomputation as soon as it has what it needs
    # Its passes are before the run.
    monkeypatch.setattr(script, "check_model", lambda *args: (check(*args), passes.clear())[0])
    monkeypatch.setattr(layer, "forward", lambda *args: passes.append(torch.is_grad_enabled()) or forward(*args))
    counts = []
    for gradient_checkpointing in (False, True):
        passes.clear()
        run(script, gradient_checkpointing=gradient_checkpointing, per_device_train_batch_size=5)
        counts.append(passes.count(True))
    assert counts[1] == 2 * counts[0] > 0


@only("rloo", "ppo")
def test_lora_is_the_policy_with_its_adapter(script, run, world, monkeypatch):
    """The reference is the policy without its adapter, so no second model is loaded. model/ holds the adapter."""
    import peft

    loads = record_calls(monkeypatch, script, "load_model")
    flags = dict(lora_r=2, learning_rate=0.02, kl_coef=0.1, num_train_epochs=2)
    _, metrics, output_dir = ran = run(script, **flags)
    assert len(loads) == (2 if script.__name__ == "ppo" else 1)  # and PPO's value model
    rows = ran.rollouts
    for row, expected in zip(rows, row_logprobs(world.llama, rows)):
        assert row["ref_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert rows[-1]["logprobs"] != pytest.approx(rows[-1]["ref_logprobs"], abs=1e-3)
    model, prompt = AutoModelForCausalLM.from_pretrained(world.llama).eval(), torch.tensor([encode("12+34=")])
    with torch.no_grad():
        first = model(prompt).logits
        adapted = peft.PeftModel.from_pretrained(model, output_dir / "model").eval()
        assert (adapted(prompt).logits - first).abs().max() > 0.01
    assert not os.path.exists(output_dir / "model" / "model.safetensors")
    assert '"lora_alpha": 4,' in (output_dir / "model" / "adapter_config.json").read_text()
    with pytest.raises(ValueError, match="merge LoRA adapters first.*Unrecognized model in .*model"):
        run(script, model_path=str(output_dir / "model"))
    assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-5) and abs(metrics[-1]["objective/kl"]) > 1e-4
    assert run(script, **flags).rollouts == rows


@one_text
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("logits_at_once", [1, 3 * len(VOCAB), 7 * len(VOCAB)])
def test_pieces_change_nothing(script, monkeypatch, tied, logits_at_once):
    """In pieces of 1, 3 or 7 tokens, the log-probabilities and all gradients are those of one piece."""
    model = make_model("llama", tie_word_embeddings=tied)
    for shares_prompts in (True, False):
        expected, expected_gradients = one_pass(script, model, shares_prompts)
        with monkeypatch.context() as patch:
            patch.setattr(script, "LOGITS_AT_ONCE", logits_at_once)
            logprobs, gradients = one_pass(script, model, shares_prompts)
        torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
        assert distance(expected_gradients, gradients) < 1e-6


@one_text
def test_no_tensor_has_all_logits(script, monkeypatch):
    """The head gets at most as many rows as fit into a piece, in the forward and in the backward pass. Where all fit
    into one piece, it is not computed again."""
    model = make_model("llama")
    for logits_at_once, pieces in ((2**25, [24]), (4 * len(VOCAB), [4] * 12)):  # one, or six in both passes
        monkeypatch.setattr(script, "LOGITS_AT_ONCE", logits_at_once)
        calls, kept = record_calls(monkeypatch, script, "head_logits"), set()
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.add(x.shape) or x, lambda x: x):
            one_pass(script, model)
        assert [len(call.args[1]) for call in calls] == pieces
        assert (torch.Size([pieces[0], len(VOCAB)]) in kept) == (len(pieces) == 1)


@only("rloo", "ppo")
@pytest.mark.slow
def test_pieces_on_two_processes(script, same_on, world, tmp_path):
    """Two processes, whose passes have other numbers of pieces, give the run of one process in one piece. PPO's are of
    FSDP2."""
    program = FSDP2 if script.__name__ == "ppo" else None
    flags = dict(per_device_train_batch_size=3, kl_coef=0.1, total_episodes=24, model_path=world.many_eos)
    copy = changed_copy(script, tmp_path, "LOGITS_AT_ONCE = 2**25", "LOGITS_AT_ONCE = 64")
    same_on(script, 2, flags | dict(ref_model_path=world.reference), program, copy)


@one_text
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_of_sampling_has_the_type_of_autocast(script, monkeypatch, dtype):
    """In bfloat16 the keys and values of sampling are bfloat16, also where RoPE makes the keys float32."""
    updates = record_calls(monkeypatch, script.KVCache, "update")
    uniforms = torch.full((4, 5), 0.5, dtype=torch.float64)
    sample(script, make_model("llama"), PROMPTS, uniforms, 1.0, [EOS], dtype)
    assert {tensor.dtype for call in updates for tensor in call.result} == {getattr(torch, dtype)}


@one_text
def test_the_cache_of_sampling_grows_by_blocks(script, monkeypatch):
    """The memory of keys and values moves once in 8 tokens, and later less often. It holds what `torch.cat` would."""
    moves, append = [], script.KVCache.append

    def recorded(old, new):
        appended = append(old, new)
        assert torch.equal(appended, torch.cat([old, new], dim=2))
        moves.append(appended.data_ptr() != old.data_ptr())
        return appended

    monkeypatch.setattr(script.KVCache, "append", staticmethod(recorded))
    uniforms = torch.rand(4, 150, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sample(script, make_model("llama"), PROMPTS, uniforms, 1.0, [-1])
    assert len(moves) == 149 * 4 and sum(moves) < 12 * 4  # keys and values of 2 layers
