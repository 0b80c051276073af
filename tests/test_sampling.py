"""Sampling: the same as transformers' `generate`, the exact distribution, groups, ends of episodes,
random numbers and evaluations.
"""

import math

import numpy as np
import torch
from conftest import (
    EOS,
    PAD,
    USUAL,
    column,
    encode,
    load_policy,
    one_text,
    record_calls,
    save_model,
)
from plain import StandInGraph, record_steps, token_counts
from pytest import mark


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
    model = load_policy(path)
    for is_recorded in (False, True):
        if is_recorded:
            record_steps(monkeypatch, script)
        found = []
        ran = run(script, **flags)
        assert not (ran.folder / "model").exists()
        for row in ran.eval_rollouts:
            found.append(row["token_ids"])
            assert found[-1] == greedy_tokens(model, row["prompt"], 12, eos_ids)
        assert len(set(map(tuple, found))) > 4, "the prompts must matter"


@one_text
def test_a_window_that_counts_empty_columns_is_refused(script, refuses, monkeypatch, tmp_path):
    """Recorded steps have room for the tokens to come."""
    record_steps(monkeypatch, script)
    path = save_model(tmp_path / "policy", "gpt_neo")
    refuses(script, "sampling and training give", model_path=path, response_length=40)


@one_text
def test_a_run_with_recorded_steps_is_the_same(script, run, tmp_path, monkeypatch, capsys):
    """Steps are recorded in a graph of a batch, in which completions that have ended stay. A model
    whose steps wait for the device cannot be recorded. It takes plain steps, and a line says so."""
    flags = dict(lora_r=2, learning_rate=0.01, response_length=24, temperature=0.8)
    flags |= dict(stop_string="1", eval_dataset=5, total_episodes=24)
    expected = run(script, **flags)
    replays = record_calls(monkeypatch, StandInGraph, "replay")
    record_steps(monkeypatch, script)
    recorded = run(script, **flags)
    assert column(recorded.rollouts, "token_ids") == column(expected.rollouts, "token_ids")
    assert len(replays) > 30
    dynamic = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    run(script, model_path=save_model(tmp_path / "dynamic", rope_scaling=dynamic))
    assert "sampling without CUDA graphs: it waits for the device" in capsys.readouterr().out


@one_text
def test_no_token_of_probability_zero_is_ever_drawn(script):
    """The uniform numbers 0 and just below 1 pick the first and the last token whose probability is
    not 0. A float32 sum of the last logits would give the first token all of it. A run does not
    draw such numbers."""
    torch.manual_seed(0)
    wide = 3 * torch.randn(50_000)
    wide[[0, -1]] = -math.inf
    for logits, uniform, expected in (
        (wide, math.nextafter(1, 0), [1, 49_998]),
        (torch.tensor([20.0, 0.0, -20.0]), 1 - 1e-9, [0, 1]),
    ):
        p = logits.softmax(-1).expand(2, -1)
        uniforms = torch.tensor([0.0, uniform], dtype=torch.double)
        assert script.pick_tokens(p, uniforms).tolist() == expected


@one_text
def test_a_prompt_runs_once_and_finished_rows_leave(script, run, monkeypatch):
    """A group's prompt goes through the model once, in sampling and with --share-prompts in
    training. After that, only the episodes that have not ended are sampled."""
    calls = record_calls(monkeypatch, script, "forward")
    flags = dict(model_path="many_eos", batch_size=20, total_episodes=20, k=5, kl_coef=0.0)
    rows = run(script, share_prompts=True, reward="squares", **flags).rollouts
    lengths = np.array(token_counts(rows))
    sampled = [(lengths > t).sum() for t in range(1, max(lengths))]
    assert len(set(sampled)) > 3
    found = [len(call.args[1]) for call in calls]
    assert found[-len(sampled) - 3 :] == [4, *sampled, 4, 20]


@one_text
def test_no_random_number_is_used_twice(script, run, monkeypatch):
    """Each seed, purpose and iteration has its own. Keys of one purpose have one length."""
    keys = record_calls(monkeypatch, script, "keyed_rng")
    for seed in (1, 2):
        run(script, seed=seed, num_ppo_epochs=2, eval_dataset=5, eval_temperature=1.0, lora_r=2)
    keys = {call.args for call in keys}
    assert len({key[1] for key in keys}) == len({(key[1], len(key)) for key in keys}) == 6
    assert len({script.keyed_rng(*key).random() for key in keys}) == len(keys)
