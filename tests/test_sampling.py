"""Sampling: the same as transformers' `generate`, the exact distribution, groups, ends of episodes,
random numbers, evaluations, and models that compute otherwise.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
from conftest import (
    EOS,
    MANY_EOS,
    PAD,
    USUAL,
    VOCAB,
    column,
    encode,
    load_policy,
    one_text,
    record_calls,
    save_model,
    write_jsonl,
)
from plain import StandInGraph, record_steps, row_logprobs, token_counts
from pytest import approx, mark, param
from transformers import GenerationConfig


def greedy_tokens(model, prompt, length, eos_ids):
    """The completion of transformers' `generate`, without what follows its end."""
    ids = torch.tensor([encode(prompt)])
    tokens = model.generate(
        ids,
        attention_mask=ids >= 0,
        eos_token_id=eos_ids,
        do_sample=False,
        max_new_tokens=length,
        pad_token_id=PAD,
    )
    return tokens[0, len(prompt) :].tolist()


@one_text
@mark.parametrize("architecture", USUAL)
def test_greedy_sampling_equals_generate(script, run, monkeypatch, tmp_path, architecture):
    """At temperature 0 an evaluation gives what model.generate gives, with recorded steps, too."""
    eos_ids = [EOS, 6]
    path = save_model(tmp_path / "policy", architecture, eos_ids=eos_ids)
    flags = dict(model_path=path, eval_dataset=9, total_episodes=0, response_length=12)
    plain = run(script, **flags).eval_rollouts
    record_steps(monkeypatch, script)
    recorded = run(script, **flags).eval_rollouts
    assert column(recorded, "token_ids") == column(plain, "token_ids")
    model = load_policy(path)
    completions = set()
    for row in plain:
        expected = greedy_tokens(model, row["prompt"], 12, eos_ids)
        assert row["token_ids"] == expected
        completions.add(str(expected))
    assert len(completions) > 4, "the prompts must matter"


REFUSED = "padding otherwise|sampling and training give"


@one_text
@mark.parametrize(
    "architecture, how, error",
    [
        ("gpt_neo", "", None),
        ("gpt_neo", "recorded", REFUSED),
        ("bloom", "recorded", None),
        ("jamba", "", None),
        ("jamba", "shared", "--share-prompts False"),
        ("roberta", "", REFUSED),
        ("mamba", "", REFUSED),
        param("mamba2", "", REFUSED, marks=mark.slow),
        param("bart", "", REFUSED, marks=mark.slow),
    ],
)
def test_a_model_that_computes_otherwise_is_refused_or_right(
    script, run, refuses, monkeypatch, tmp_path, architecture, how, error
):
    """Padding, positions, a window or steps change what these give. Such a model is refused before
    anything is sampled, or its log-probabilities are those of plain passes."""
    path = save_model(tmp_path / "policy", architecture)
    flags = dict(model_path=path, eval_dataset=9, total_episodes=0, response_length=40)
    flags["share_prompts"] = how == "shared"
    if how == "recorded":
        record_steps(monkeypatch, script)
    if error is not None:
        refuses(script, error, error=(script.UsageError, RuntimeError), **flags)
        return
    rows = run(script, **flags).eval_rollouts
    for row, logprobs in zip(rows, row_logprobs(path, rows)):
        assert row["logprobs"] == approx(logprobs, abs=1e-4)


@one_text
def test_a_run_with_recorded_steps_is_the_same(script, run, tmp_path, monkeypatch, capsys):
    """Steps are recorded in a graph of a batch, in which completions that have ended stay. A model
    whose steps wait for the device cannot be recorded. It takes plain steps, and a line says so."""
    flags = dict(lora_r=2, learning_rate=0.01, kl_coef=0.1, response_length=24, temperature=0.8)
    flags |= dict(stop_string="1", eval_dataset=5, total_episodes=24, batch_size=12)
    expected = run(script, **flags)
    replays = record_calls(monkeypatch, StandInGraph, "replay")
    record_steps(monkeypatch, script)
    recorded = run(script, **flags)
    assert column(recorded.rollouts, "token_ids") == column(expected.rollouts, "token_ids")
    norms = column(expected.metrics[1:], "grad_norm")
    assert column(recorded.metrics[1:], "grad_norm") == approx(norms, rel=1e-4)
    assert len(replays) > 30
    assert len(set(token_counts(expected.rollouts))) > 4
    dynamic = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    run(script, model_path=save_model(tmp_path / "dynamic", rope_scaling=dynamic))
    assert "sampling without CUDA graphs: it waits for the device" in capsys.readouterr().out


@torch.no_grad()
def first_two_tokens(model, prompt, temperature):
    """Exact probabilities of the first two tokens of a completion, by plain forward passes. After
    EOS comes 0."""

    def next_token(rows):
        logits = model(torch.tensor(rows)).logits[:, -1].double()
        return (logits / temperature).softmax(-1)

    prompt = encode(prompt)
    first = next_token([prompt])
    second = next_token([prompt + [token] for token in range(len(VOCAB))])
    second[EOS] = 0
    second[EOS, 0] = 1
    return (first.T * second).flatten().numpy()


@one_text
@mark.parametrize("architecture", ["llama", param("mistral", marks=mark.slow)])
def test_sampling_follows_the_exact_distribution(script, run, monkeypatch, tmp_path, architecture):
    """The first two tokens of 4,096 episodes come as often as plain forward passes say. Their
    uniform numbers are a grid, so little is left to chance. The model's generation config may ask
    for other sampling."""
    path = save_model(tmp_path / "policy", architecture)
    unlike = dict(do_sample=True, top_k=2, top_p=0.5, temperature=0.1)
    GenerationConfig(eos_token_id=EOS, **unlike).save_pretrained(path)
    grid = (np.arange(64) + 0.5) / 64
    uniforms = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(4096, 2)
    keyed_rng = SimpleNamespace(random=lambda shape: uniforms)
    monkeypatch.setattr(script, "keyed_rng", lambda *key: keyed_rng)
    prompt = "0000-1111=22"
    flags = dict(eval_dataset=write_jsonl(tmp_path / "one.jsonl", [dict(prompt=prompt)]))
    flags |= dict(eval_k=4096, eval_temperature=0.7, response_length=2, total_episodes=0)
    tokens = column(run(script, model_path=path, **flags).eval_rollouts, "token_ids")
    pairs = [first * len(VOCAB) + sum(second) for first, *second in tokens]
    shares = np.bincount(pairs, minlength=len(VOCAB) ** 2) / 4096
    for temperature in (0.7, 1.0):
        expected = first_two_tokens(load_policy(path), prompt, temperature)
        assert (np.abs(shares - expected).max() < 1 / 64) == (temperature == 0.7)


@one_text
def test_no_token_of_probability_zero_is_ever_drawn(script):
    """The uniform numbers 0 and just below 1 pick the first and the last token whose probability is
    not 0. A float32 sum of the last logits would give the first token all of it. A run does not
    draw such numbers."""
    below_one = math.nextafter(1, 0)
    nothing = -math.inf
    torch.manual_seed(0)
    wide = 3 * torch.randn(50_000)
    wide[[0, -1]] = nothing
    for logits, uniform, first, last in (
        (torch.tensor([nothing, 0.0, nothing, 2.0, nothing]), below_one, 1, 3),
        (wide, below_one, 1, 49_998),
        (torch.tensor([20.0, 0.0, -20.0]), 1 - 1e-9, 0, 1),
    ):
        p = logits.softmax(-1).expand(2, -1)
        uniforms = torch.tensor([0.0, uniform], dtype=torch.float64)
        assert script.pick_tokens(p, uniforms).tolist() == [first, last]


@one_text
def test_a_prompt_runs_once_and_finished_rows_leave(script, run, monkeypatch):
    """A group's prompt goes through the model once, in sampling and with --share-prompts in
    training. After that, only the episodes that have not ended are sampled."""
    calls = record_calls(monkeypatch, script, "forward")
    flags = dict(model_path="many_eos", batch_size=20, total_episodes=20, k=5, kl_coef=0.0)
    rows = run(script, share_prompts=True, reward="squares", **flags).rollouts
    lengths = np.array(token_counts(rows))
    sampled = [4]
    for t in range(1, max(lengths)):
        sampled.append((lengths > t).sum())
    assert len(set(sampled)) > 4
    found = [len(call.args[1]) for call in calls]
    assert found[-len(sampled) - 2 :] == [*sampled, 4, 20]


@one_text
@mark.parametrize(
    "policy, stop_token_id, eos_ids",
    [
        ("llama", 9, {EOS, 9}),
        ("many_eos", None, set(MANY_EOS)),
        ("emits_pad", None, {EOS, 7}),
        ("pad_is_eos", None, {EOS}),
    ],
)
def test_an_episode_ends_with_its_first_eos(script, run, policy, stop_token_id, eos_ids):
    """The first EOS is the last token, whichever EOS it is: of the generation config, or
    --stop-token-id. Only the longest length ends an episode without one.

    Bug: many trainers have no loss for an EOS that equals padding."""
    flags = dict(model_path=policy, stop_token_id=stop_token_id)
    ran = run(script, total_episodes=48, batch_size=48, **flags)
    rows = ran.rollouts
    ends = []
    others = set()
    for row in rows:
        *tokens, last = row["token_ids"]
        others.update(tokens)
        if last in eos_ids:
            ends.append(last)
        else:
            assert len(tokens) == 5
    assert not eos_ids & others
    assert 0 < len(ends) < 48
    assert PAD in others  # They may emit pad.
    [line] = ran.metrics
    assert line["val/num_eos_tokens"] == len(ends)
    assert line["response_length_mean"] == approx(np.mean(token_counts(rows)))


@one_text
def test_no_random_number_is_used_twice(script, run, monkeypatch):
    """Each seed, purpose and iteration has its own numbers. Those of a purpose have keys of one
    length. No number is drawn for two tokens, in a group, in another iteration or evaluation."""
    keys = record_calls(monkeypatch, script, "keyed_rng")
    passes = record_calls(monkeypatch, script, "sample")
    flags = dict(num_ppo_epochs=2, eval_dataset=5, eval_temperature=1.0, lora_r=2)
    for seed in (1, 2):
        run(script, seed=seed, num_train_epochs=3, **flags)
    keys = {call.args for call in keys}
    assert len({key[1] for key in keys}) == len({(key[1], len(key)) for key in keys}) == 5
    assert len({script.keyed_rng(*key).random() for key in keys}) == len(keys) > 20
    # At the start, two prompts are sampled with the numbers 0.5.
    numbers = [call.args[2].flatten() for call in passes if len(call.args[2]) > 2]
    numbers = torch.cat(numbers)
    assert len(numbers.unique()) == len(numbers) > 500


@one_text
def test_evaluations_come_when_asked_and_do_not_move_training(script, run):
    """eval/scores is logged at the start, every eval_every iterations, and at the end. The last one
    is of the model that is written. A run without evaluations has the same episodes."""
    ran = run(script, eval_dataset=5, eval_every=2, batch_size=3)
    last = ran.metrics[-1]["iteration"]
    expected = [*range(0, last, 2), last]
    assert column([line for line in ran.metrics if "eval/scores" in line], "iteration") == expected
    model = load_policy(ran.folder / "model")
    for row in ran.eval_rollouts[-5:]:
        assert row["token_ids"] == greedy_tokens(model, row["prompt"], 6, EOS)
    sampled = run(script, eval_dataset=5, eval_every=1, eval_temperature=1.0, batch_size=3)
    assert ran.rollouts == sampled.rollouts == run(script, batch_size=3).rollouts
