"""Log-probabilities: shared prompts, the sampler's, the reference's, dropout, temperature, precision, adapters."""

import itertools
import json
import math
import os
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    EOS,
    HERE,
    PAD,
    distance,
    encode,
    make_args,
    make_model,
    one_text,
    only,
    plain_logprobs,
    read_jsonl,
    record_calls,
    result_of,
    save_model,
    weights_of,
)
from plain import completion_model
from transformers import AutoModelForCausalLM

ARCHITECTURES = ["llama", "neox", "gpt2", "qwen3", "mistral", "gemma2", "gemma3"]
GROUPS = {  # prompts of two groups of three, and the completions of the first; which completion is longest differs
    "equal": ("12", "34", [[5, 6, EOS], [7, EOS], [8, 9, 4]]),
    "beyond-the-window": ("1234567890123456", "5", [[5], [7, 8, 9, 10, 11, 12, 13, 5, 6, 7, 8, EOS], [EOS]]),
    "one-token": ("1", "2", [[EOS], [5], [EOS]]),
}


# ================================================ shared prompts ============================================
@one_text
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_shared_prompt_gives_what_rows_of_their_own_give(script, architecture, group):
    """A group's prompt is run once, or each completion has a row with its prompt. Both give the same.

    This is tested for log-probabilities and gradients, in whole groups and in parts of them, also where the attention
    window is shorter than the prompt. The log-probabilities are also those of plain passes."""
    first, second, completions = GROUPS[group]
    prompts = [encode(text) for text in (first, second) for _ in range(3)]
    completions = completions + completions[::-1]
    lengths, model = torch.tensor([len(c) for c in completions]), make_model(architecture)
    tokens = torch.tensor([c + [PAD] * (13 - len(c)) for c in completions])
    mask = torch.arange(13) < lengths[:, None]
    weights = torch.arange(1.0, 1 + tokens.numel()).view_as(tokens)
    for indices in (torch.arange(6), torch.tensor([4, 5, 0, 1, 2]), torch.tensor([2, 2])):
        seen = []
        for shares_prompts in (False, True):
            rows_in = []
            hook = model.get_decoder().register_forward_pre_hook(lambda _, args: rows_in.append(len(args[0])))
            policy = completion_model(script, model, [EOS], shares_prompts)
            chunk = [prompts[i] for i in indices]
            inputs = dict(prompts=chunk, tokens=tokens[indices], mask=mask[indices], temperature=0.7)
            logprobs = policy(partial(script.pass_logprobs, **inputs))
            hook.remove()
            assert rows_in[0] == (len({str(p) for p in chunk}) if shares_prompts else len(indices))
            model.zero_grad()
            (logprobs * weights[indices]).sum().backward()
            seen.append((logprobs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        (apart, gradient_apart), (shared, gradient) = seen
        torch.testing.assert_close(apart, shared, atol=5e-6, rtol=1e-6)
        assert distance(gradient_apart, gradient) < 5e-6
        assert not shared[~mask[indices]].any()
        for row, i in zip(shared, indices.tolist()):
            expected = plain_logprobs(model, prompts[i], completions[i], 0.7)
            torch.testing.assert_close(row[: len(expected)], expected.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["gpt2", "mistral", "gemma3"])
def test_every_pass_gives_the_same_logprobs(script, run, tmp_path, monkeypatch, architecture):
    """The sampler, the reference and training agree with plain forward passes.

    Prompts have 1 to 16 tokens, the temperature is 0.7, micro-batches cut groups, and there are two PPO epochs. GPT-2
    has dropout in its config."""
    path = save_model(tmp_path / "policy", make_model(architecture))
    ratios = record_calls(monkeypatch, script, "clipped_policy_loss")
    flags = dict(temperature=0.7, num_ppo_epochs=2, total_episodes=21, batch_size=21, kl_coef=0.1)
    _, metrics, output_dir = run(script, model_path=path, per_device_train_batch_size=5, **flags)
    rows, model = read_jsonl(output_dir / "rollouts.jsonl"), AutoModelForCausalLM.from_pretrained(path).eval()
    assert len({len(row["prompt"]) for row in rows}) > 3
    with torch.no_grad():
        for row in rows:
            expected = plain_logprobs(model, encode(row["prompt"]), row["token_ids"], 0.7).tolist()
            assert row["logprobs"] == pytest.approx(expected, abs=1e-5), "sampler"
            assert row["ref_logprobs"] == pytest.approx(expected, abs=1e-5), "reference"
    passes = ratios[: len(ratios) // 2]  # before the first update
    assert len(passes) > 2
    assert all(call.args[0].abs().max() < 1e-4 for call in passes), "training"  # RLOO's is the sum of 6
    assert metrics[0]["val/sampling_logprob_difference"] < 2e-5


def test_completions_of_one_token(script, run):
    """With one token there is only the pass over the prompt. It gives a gradient."""
    _, metrics, output_dir = run(script, response_length=1, num_train_epochs=2, kl_coef=0.1)
    assert {len(row["token_ids"]) for row in read_jsonl(output_dir / "rollouts.jsonl")} == {1}
    assert all(0 < row["grad_norm"] < math.inf for row in metrics)
    assert all(row["val/sampling_logprob_difference"] < 1e-5 for row in metrics)


@pytest.mark.parametrize("policy", ["gpt2", "dropout"])
def test_ratio_is_one_while_the_weights_stand_still(script, run, world, policy):
    """At learning rate 0 every update of every iteration has ratio 1, at another temperature than 1, too.

    Policy and reference have dropout in their configs."""
    flags = dict(temperature=0.7, num_ppo_epochs=2, num_mini_batches=3, learning_rate=0.0, kl_coef=0.1)
    _, metrics, _ = run(script, model_path=getattr(world, policy), num_train_epochs=2, **flags)
    for row in metrics:
        assert row["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert row["val/ratio_var"] == pytest.approx(0, abs=1e-9)
        assert row["policy/approxkl_avg"] == pytest.approx(0, abs=1e-9)
        assert row["policy/clipfrac_avg"] == 0
        assert row["objective/kl"] == pytest.approx(0, abs=1e-5)


def test_the_ratio_moves_with_the_weights(script, run):
    """From the second update of an iteration on, the ratio is not 1. It compares with the policy that sampled."""
    metrics = run(script, num_ppo_epochs=2, learning_rate=0.01, total_episodes=12)[1]
    assert metrics[0]["val/ratio_var"] > 1e-6 and metrics[0]["policy/approxkl_avg"] > 1e-6


# ======================================== sampling and training agree =======================================
def sample_off_by(script, monkeypatch, amount, first=0):
    """The sampler's log-probabilities are `amount` too large, from its call `first` on.

    A model that needs more than masks and positions would show such a difference."""
    sample, calls = script.sample, itertools.count()

    def off(*args, **kwargs):
        result = sample(*args, **kwargs)
        error = amount if next(calls) >= first else 0.0
        return result | {"logprobs": result["logprobs"] + error * (result["logprobs"] != 0)}

    monkeypatch.setattr(script, "sample", off)


@pytest.mark.parametrize("flags", [{}, dict(num_ppo_epochs=2, num_mini_batches=2)], ids=["single", "several"])
@only("rloo", "ppo")
def test_a_sampler_that_is_not_the_training_pass_stops_the_run(script, run, monkeypatch, updates, tmp_path, flags):
    """In float32 the run stops before the first update, and names the difference. A small one is only logged."""
    sample_off_by(script, monkeypatch, 0.01)
    with pytest.raises(RuntimeError, match=r"sampling and training give log-probabilities 0\.01 apart"):
        run(script, output_dir=str(tmp_path / "out"), **flags)
    assert not updates and not (tmp_path / "out" / "model").exists()
    monkeypatch.undo()
    sample_off_by(script, monkeypatch, 5e-4)
    metrics = run(script, **flags)[1]
    assert all(row["val/sampling_logprob_difference"] == pytest.approx(5e-4, rel=0.05) for row in metrics)


def test_a_sampler_is_compared_in_every_iteration(script, run, monkeypatch, updates):
    """A sampler that goes wrong in the second iteration stops the run before that iteration's first update."""
    sample_off_by(script, monkeypatch, 0.01, first=1)
    with pytest.raises(RuntimeError, match=r"sampling and training give log-probabilities 0\.01 apart"):
        run(script, batch_size=6, num_ppo_epochs=2)
    assert len(updates) == 2  # those of the first iteration


@one_text
def test_a_difference_that_is_not_a_number_stops_the_run(script, run, monkeypatch, updates):
    """NaN is not below the limit, so it counts as too large."""
    sample_off_by(script, monkeypatch, math.nan)
    with pytest.raises((RuntimeError, ValueError)):
        run(script, kl_coef=0.0)
    assert not updates


@one_text
def test_bfloat16_is_not_stopped(script, run, monkeypatch):
    """In bfloat16 the two differ by rounding. The difference is logged, and never stops the run."""
    sample_off_by(script, monkeypatch, 0.01)
    metrics = run(script, dtype="bfloat16")[1]
    assert all(row["val/sampling_logprob_difference"] > 5e-3 for row in metrics)


# ============================================ precision and memory ==========================================
def test_bfloat16_runs_and_keeps_weights_in_float32(script, run, world, monkeypatch):
    """Forward passes are in bfloat16. The weights that are trained stay in float32."""
    passes = record_calls(monkeypatch, torch.nn.functional, "linear")
    loaded = record_calls(monkeypatch, script, "load_model")
    _, metrics, output_dir = run(script, dtype="bfloat16", ref_model_path=world.reference, num_train_epochs=2)
    assert {call.result.dtype for call in passes} == {torch.bfloat16}
    dtypes = {call.args[0]: call.result[0].dtype for call in loaded}
    assert dtypes["--ref-model-path"] == torch.bfloat16 and dtypes["--model-path"] == torch.float32
    assert {w.dtype for w in weights_of(output_dir / "model")} == {torch.float32}
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    model, differences = AutoModelForCausalLM.from_pretrained(world.llama).eval(), []
    for row in read_jsonl(output_dir / "rollouts.jsonl")[:12]:  # the first iteration's
        plain = plain_logprobs(model, encode(row["prompt"]), row["token_ids"]).tolist()
        differences += list(np.abs(np.subtract(row["logprobs"], plain)))
    assert 1e-4 < np.mean(differences) < 0.1


BFLOAT16 = [  # script, several updates, the level of GRPO's ratio -> is it refused?
    ("rloo", dict(num_ppo_epochs=2), True),
    ("rloo", dict(num_mini_batches=2), True),
    ("rloo", {}, False),
    ("grpo", dict(num_ppo_epochs=2, importance_sampling_level="sequence"), True),
    ("grpo", dict(importance_sampling_level="sequence"), False),
    ("grpo", dict(num_mini_batches=2, num_ppo_epochs=2), False),
    ("ppo", dict(num_mini_batches=2, num_ppo_epochs=2), False),
]


@only("rloo", "grpo", "ppo")
def test_bfloat16_is_refused_where_it_would_clip_whole_ratios(script):
    """It is refused for several updates with a ratio of a whole completion.

    The log-ratio of a completion adds up the rounding errors of its tokens."""
    for name, flags, is_refused in BFLOAT16:
        if script.__name__ == name and is_refused:
            with pytest.raises(ValueError, match="--dtype bfloat16"):
                make_args(script, dtype="bfloat16", **flags)
        elif script.__name__ == name:
            make_args(script, dtype="bfloat16", **flags)
        make_args(script, dtype="float32", **flags if script.__name__ == name else {})


@one_text
def test_the_table_of_bfloat16_is_what_was_measured(script):
    """The rows of docs/metrics.md are those of bfloat16_ratios.json, in its order."""
    text = (HERE / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = text[text.index("## bfloat16 and ratios") :].split("\n\n")[3].splitlines()[2:]
    measured = json.loads((HERE / "benchmark" / "hardware" / "bfloat16_ratios.json").read_text())
    for line, row in zip(table, measured, strict=True):
        cells = []
        for kind in ("tokens", "completions", "sequences"):
            shares = [100 * row[source][f"{kind}_outside"] for source in ("sampling", "a_pass")]
            cells.append(", ".join(f"{share:.1g} %" if share < 1 else f"{share:.0f} %" for share in shares))
        assert line.split("|")[2:-1] == [f" {cell} " for cell in cells], row["case"]


def test_gradient_checkpointing_recomputes(script, run, monkeypatch):
    """Every pass of a layer with gradient is made twice. The run is, bit by bit, one without shared prompts."""
    passes, layer = [], transformers.models.llama.modeling_llama.LlamaMLP
    forward = layer.forward  # counted as it begins: torch ends a recomputation as soon as it has what it needs
    monkeypatch.setattr(layer, "forward", lambda *args: passes.append(torch.is_grad_enabled()) or forward(*args))
    flags = dict(num_mini_batches=2, num_ppo_epochs=2, per_device_train_batch_size=5)
    function, results, counts = script.CompletionModel.__init__, [], []

    def without_sharing(self, *inputs):
        function(self, *inputs)
        self.shares_prompts = False

    monkeypatch.setattr(script.CompletionModel, "__init__", without_sharing)
    for gradient_checkpointing in (False, True):
        passes.clear()
        output_dir = run(script, gradient_checkpointing=gradient_checkpointing, **flags)[2]
        counts.append([passes.count(with_gradient) for with_gradient in (True, False)])
        results.append(result_of(output_dir))
    (trained, sampled), recomputed = counts
    assert trained > 0 and sampled > 0 and recomputed == [2 * trained, sampled]
    assert results[0] == results[1]


# ================================================== adapters ================================================
@only("rloo", "ppo")
def test_lora_is_the_policy_with_its_adapter(script, run, world, monkeypatch):
    """The reference is the policy without its adapter, so no second model is loaded. model/ holds the adapter."""
    import peft

    loads = record_calls(monkeypatch, script, "load_model")
    flags = dict(lora_r=2, learning_rate=0.02, kl_coef=0.1, num_train_epochs=2)
    _, metrics, output_dir = run(script, **flags)
    assert "--ref-model-path" not in [call.args[0] for call in loads]
    model, rows = AutoModelForCausalLM.from_pretrained(world.llama).eval(), read_jsonl(output_dir / "rollouts.jsonl")
    with torch.no_grad():
        for row in rows[::7]:
            expected = plain_logprobs(model, encode(row["prompt"]), row["token_ids"]).tolist()
            assert row["ref_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert rows[-1]["logprobs"] != pytest.approx(rows[-1]["ref_logprobs"], abs=1e-3)
        prompt = torch.tensor([encode("12+34=")])
        first = model(prompt).logits
        adapted = peft.PeftModel.from_pretrained(model, output_dir / "model").eval()
        assert (adapted(prompt).logits - first).abs().max() > 0.01
    assert not os.path.exists(output_dir / "model" / "model.safetensors")
    assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-5) and abs(metrics[-1]["objective/kl"]) > 1e-4
    again = run(script, **flags)[2]
    assert (again / "rollouts.jsonl").read_text() == (output_dir / "rollouts.jsonl").read_text()
