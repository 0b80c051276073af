"""Log-probabilities without all logits: pieces, models that change their logits, memory, and the cache of sampling."""

import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import (
    ARCHITECTURES,
    EOS,
    GROUPED,
    HERE,
    PAD,
    SHAPE,
    VOCAB,
    base_flags,
    compare_runs,
    distance,
    encode,
    launch,
    launch_fsdp2,
    make_model,
    one_text,
    only,
    plain_logprobs,
    read_jsonl,
    record_calls,
    save_model,
)
from plain import completion_model

PROMPTS = ["12+34=", "12+34=", "7", "7"]
COMPLETIONS = [[5, 6, EOS], [7, EOS], [8, 9, 4, 5, 6, 7], [EOS]]
# Models that change what their head gives, each with the setting that does it. Its default may be 1.
CHANGED_LOGITS = {
    "gemma2": (transformers.Gemma2Config, GROUPED | dict(final_logit_softcapping=2.0)),
    "cohere": (transformers.CohereConfig, GROUPED | dict(logit_scale=0.25)),
    "cohere2": (transformers.Cohere2Config, GROUPED | dict(logit_scale=3.0)),
    "granite": (transformers.GraniteConfig, SHAPE | dict(logits_scaling=4.0)),
}


@pytest.fixture(params=CHANGED_LOGITS)
def changed_logits(request, monkeypatch):
    """The name of an architecture for `make_model`."""
    monkeypatch.setitem(ARCHITECTURES, request.param, CHANGED_LOGITS[request.param])
    return request.param


def one_pass(script, model, shares_prompts=True):
    """The log-probabilities of COMPLETIONS by a training pass, and the gradients of a weighted sum of them."""
    tokens = torch.tensor([completion + [PAD] * (6 - len(completion)) for completion in COMPLETIONS])
    mask = torch.arange(6) < torch.tensor([[len(completion)] for completion in COMPLETIONS])
    prompts = [encode(prompt) for prompt in PROMPTS]
    policy = completion_model(script, model, [EOS], shares_prompts)
    inputs = dict(prompts=prompts, tokens=tokens, mask=mask, temperature=0.7)
    logprobs = policy(partial(script.pass_logprobs, **inputs))
    model.zero_grad()
    (logprobs * torch.arange(1.0, 25.0).view(4, 6)).sum().backward()
    return logprobs.detach(), [parameter.grad.clone() for parameter in model.parameters()]


# ================================================ pieces ================================================
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
    """The head gets at most as many rows as fit into a piece, in the forward and in the backward pass.

    What the forward pass keeps for the backward pass does not grow with tokens * vocabulary."""
    model = make_model("llama")
    for logits_at_once, pieces in ((2**25, [24]), (4 * len(VOCAB), [4] * 12)):  # six pieces, in both passes
        monkeypatch.setattr(script, "LOGITS_AT_ONCE", logits_at_once)
        calls, kept = record_calls(monkeypatch, script, "head_logits"), set()
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.add(x.shape) or x, lambda x: x):
            one_pass(script, model)
        assert [len(call.args[1]) for call in calls] == pieces
        assert (torch.Size([24, len(VOCAB)]) in kept) == (len(pieces) == 1)
        assert not any(shape[-1] == len(VOCAB) and 1 < shape[0] < 16 for shape in kept)


ENTROPIES = {  # what a reader changes in `token_logprobs` to get entropies, too
    "return log_p.gather(-1, tokens[:, None]).squeeze(1)": "picked = log_p.gather(-1, tokens[:, None]).squeeze(1)\n"
    "        return torch.stack([picked, -(log_p.exp() * log_p).sum(-1)], dim=-1)",
    "view_as(tokens)": "view(*tokens.shape, 2)",
}


@one_text
@pytest.mark.parametrize("logits_at_once", [2**25, 3 * len(VOCAB)], ids=["one piece", "pieces"])
def test_an_entropy_with_gradient_is_one_more_tensor(script, logits_at_once):
    """It has the gradient of a plain computation, for the hidden states and for the head."""
    source = inspect.getsource(script.token_logprobs)
    for before, after in ENTROPIES.items():
        assert before in source
        source = source.replace(before, after)
    names = vars(script) | {"LOGITS_AT_ONCE": logits_at_once}
    exec(source, names)
    model = make_model("llama")
    policy, head = completion_model(script, model, [EOS]), model.lm_head.weight
    hidden = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens = torch.arange(10).view(2, 5)
    weights = torch.arange(1.0, 21.0).view(2, 5, 2)

    def gradients(values):
        return torch.autograd.grad((values * weights).sum(), [hidden, head])

    log_p = torch.log_softmax(hidden @ head.T / 0.7, dim=-1)
    plain = [log_p.gather(-1, tokens[:, :, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)]
    expected = gradients(torch.stack(plain, dim=-1))
    assert distance(expected, gradients(names["token_logprobs"](policy, hidden, tokens, 0.7))) < 1e-6


FLAGS = {
    "plain": {},
    "several updates": dict(num_ppo_epochs=2, num_mini_batches=2, per_device_train_batch_size=5),
    "LoRA": dict(lora_r=2, learning_rate=0.01),
    "gradient checkpointing": dict(gradient_checkpointing=True, num_ppo_epochs=1),
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_run_in_pieces_is_the_same_run(script, run, world, monkeypatch, flags):
    """Policy, reference and value model take part."""
    flags = flags | dict(kl_coef=0.1, total_episodes=24)
    whole = run(script, **flags)[2]
    calls = record_calls(monkeypatch, script, "head_logits")
    monkeypatch.setattr(script, "LOGITS_AT_ONCE", 5 * len(VOCAB))
    in_pieces = run(script, **flags)[2]
    assert calls and all(len(call.args[1]) <= 5 for call in calls)
    if "lora_r" in flags:
        rows = [read_jsonl(folder / "rollouts.jsonl") for folder in (whole, in_pieces)]
        assert [row["token_ids"] for row in rows[0]] == [row["token_ids"] for row in rows[1]]
    else:
        compare_runs(whole, in_pieces)


def copy_in_pieces(script, folder):
    """A copy of a script whose pieces have at most 64 logits."""
    source = (HERE / f"{script.__name__}.py").read_text()
    assert source.count("LOGITS_AT_ONCE = 2**25") == 1
    path = folder / "copy" / f"{script.__name__}.py"
    path.parent.mkdir()
    path.write_text(source.replace("LOGITS_AT_ONCE = 2**25", "LOGITS_AT_ONCE = 64"))
    return SimpleNamespace(__file__=str(path), __name__=script.__name__)


@only("rloo", "ppo")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_pieces_on_two_processes(script, run, world, tmp_path, kind):
    """Two processes, whose passes have other numbers of pieces, give the run of one process in one piece."""
    flags = dict(per_device_train_batch_size=3, kl_coef=0.1, total_episodes=24, model_path=world.many_eos)
    flags |= dict(ref_model_path=world.reference)
    output_dir = run(script, **flags)[2]
    flags = base_flags(world) | flags | dict(output_dir=tmp_path / "out")
    copy = copy_in_pieces(script, tmp_path)
    if kind == "DDP":
        finished = launch(copy, 2, tmp_path, flags)
    else:
        finished = launch_fsdp2(copy, tmp_path, flags)
    assert finished.returncode == 0, finished.stderr
    compare_runs(output_dir, tmp_path / "out")


# ================================== models that change what their head gives ==================================
@one_text
def test_changed_logits_are_those_of_the_model(script, changed_logits):
    """Soft caps and scales are in the log-probabilities and in their gradients, as in plain passes."""
    model = make_model(changed_logits)
    logprobs, gradients = one_pass(script, model)
    model.zero_grad()
    total = 0.0
    for row, weights, prompt, completion in zip(
        logprobs, torch.arange(1.0, 25.0).view(4, 6), PROMPTS, COMPLETIONS, strict=True
    ):
        expected = plain_logprobs(model, encode(prompt), completion, 0.7)
        torch.testing.assert_close(row[: len(completion)], expected.detach(), atol=1e-5, rtol=0)
        total = total + (expected * weights[: len(completion)]).sum()
    total.backward()
    assert distance([parameter.grad for parameter in model.parameters()], gradients) < 1e-5


@one_text
def test_a_model_that_changes_its_logits_trains(script, run, tmp_path, changed_logits):
    """Sampling, reference and training agree."""
    path = save_model(tmp_path / "model", make_model(changed_logits))
    metrics = run(script, model_path=path, num_ppo_epochs=2, kl_coef=0.1)[1]
    assert max(row["val/sampling_logprob_difference"] for row in metrics) < 1e-4


@one_text
def test_a_change_that_nobody_thought_of_stops_the_run(script, run, monkeypatch, updates):
    """The sampler has the model's own logits. So a model that does something else with them is not trained."""
    forward = transformers.LlamaForCausalLM.forward

    def doubled(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        outputs.logits = outputs.logits * 2
        return outputs

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", doubled)
    with pytest.raises(RuntimeError, match="sampling and training give log-probabilities"):
        run(script)
    assert not updates


# ============================================== sampling and devices ==========================================
@one_text
def test_the_cache_of_sampling_has_the_type_of_autocast(script, monkeypatch):
    """In bfloat16, keys and values are stored as bfloat16 while sampling, and as float32 where there is a gradient.

    In float32 they are float32."""
    types = {}
    update = script.KVCache.update

    def recorded(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        types.setdefault(torch.is_grad_enabled(), set()).update({keys.dtype, values.dtype})
        return keys, values

    monkeypatch.setattr(script.KVCache, "update", recorded)
    inputs = dict(prompts=[encode(prompt) for prompt in PROMPTS], temperature=1.0)
    uniforms = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for autocast, expected in ((False, torch.float32), (True, torch.bfloat16)):
        types.clear()
        policy = completion_model(script, make_model("llama"), [EOS])
        policy.autocast = autocast
        samples = policy(partial(script.sample, uniforms=uniforms, **inputs))
        mask = torch.arange(5) < samples["lengths"][:, None]
        policy(partial(script.pass_logprobs, tokens=samples["tokens"], mask=mask, **inputs))
        assert types.pop(False) == {expected}
        # RoPE makes the keys float32. The first values have the type of their linear layer.
        assert torch.float32 in types.pop(True)


@one_text
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_the_cache_of_sampling_grows_by_blocks(script, architecture, monkeypatch):
    """The memory of keys and values moves once in 64 tokens, and when a completion ends. The samples stay the same.

    Mistral has a window of attention. Its layers are those of transformers, and have no blocks."""
    moves, samples = [], {}
    append = script.append_token

    def recorded(old, new):
        appended = append(old, new)
        assert torch.equal(appended, torch.cat([old, new], dim=2))
        moves.append(appended.data_ptr() != old.data_ptr())
        return appended

    model = make_model(architecture)
    inputs = dict(prompts=[encode(prompt) for prompt in PROMPTS], temperature=1.0)
    uniforms = torch.rand(4, 150, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for eos_ids in ([-1], [EOS, 6]):
        moves.clear()
        for name, function in (("blocks", recorded), ("copies", lambda old, new: torch.cat([old, new], dim=2))):
            monkeypatch.setattr(script, "append_token", function)
            policy = completion_model(script, model, eos_ids)
            samples[name] = policy(partial(script.sample, uniforms=uniforms, **inputs))
        for name, tensor in samples["copies"].items():
            assert torch.equal(tensor, samples["blocks"][name]), name
        if architecture == "mistral":
            assert not moves
        elif eos_ids == [-1]:  # 149 tokens of 2 layers, keys and values: new blocks after 0, 64 and 128
            assert len(moves) == 149 * 4 and sum(moves) == 3 * 4
        else:
            assert 0 < sum(moves) <= 4 * 4


def test_wrappers_have_nothing_to_walk_through(script, run, monkeypatch):
    """DDP and FSDP2 copy lists and dicts that a forward gets, token by token. So it gets one `partial`."""
    calls = record_calls(monkeypatch, script.CompletionModel, "forward")
    run(script, kl_coef=0.1)
    assert len(calls) > 3
    for call in calls:
        assert len(call.args) == 2 and type(call.args[1]) is partial and not call.inputs


@one_text
def test_a_gpu_in_float32_hears_of_bfloat16(script, tmp_path, capsys):
    """The first lines name the faster precision, and what float32 promises. Otherwise there is no such line."""
    for device, dtype, is_named in (("cuda", "float32", True), ("cuda", "bfloat16", False), ("cpu", "float32", False)):
        accelerator = SimpleNamespace(device=torch.device(device), num_processes=1, print=print)
        args = script.Args(output_dir=str(tmp_path / "out"), dtype=dtype)
        script.choose_output_dir(args, accelerator)
        assert ("--dtype bfloat16 is several times faster" in capsys.readouterr().out) == is_named
