"""Sampling: the same as transformers' `generate`, the exact distribution, groups, ends of episodes,
random numbers, and evaluations.
"""

import itertools
import math
from itertools import product

import numpy as np
import pytest
import torch
from conftest import (
    EOS,
    MANY_EOS,
    PAD,
    USUAL,
    VOCAB,
    WINDOWS,
    column,
    encode,
    load_policy,
    make_model,
    one_text,
    read_jsonl,
    record_calls,
    save_model,
)
from plain import StandInGraph, groups_of, record_steps, sample, token_counts
from pytest import approx, mark
from torch.distributions import Categorical

PROMPTS = ["1", "23+45=", "0000-1111=22", "7="]


def random_uniforms(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random(shape))


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


STEPS = [*product(USUAL, ["PlainSteps", "RecordedSteps"])]
STEPS += [pytest.param(*window.values, "PlainSteps", marks=mark.slow) for window in WINDOWS]


@one_text
@mark.parametrize("architecture, steps", STEPS)
def test_greedy_sampling_equals_generate(script, architecture, steps):
    """At temperature 0, with prompts of different lengths, `sample` gives what model.generate
    gives, in steps of each kind."""
    model = make_model(architecture)
    eos_ids = [EOS, 6]
    uniforms = random_uniforms(4, 12)
    found = sample(script, model, PROMPTS, uniforms, 0.0, eos_ids, steps)["tokens"]
    completions = set()
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        expected = greedy_tokens(model, prompt, 12, eos_ids)
        assert tokens[tokens >= 0].tolist() == expected
        completions.add(str(expected))
    assert len(completions) > 2, "the prompts must matter"


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
    assert column(recorded.metrics[1:], "grad_norm") == approx(
        column(expected.metrics[1:], "grad_norm"), rel=1e-4
    )
    assert len(replays) > 30
    assert len(set(token_counts(expected.rollouts))) > 4
    dynamic = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    path = save_model(tmp_path / "dynamic", rope_scaling=dynamic)
    run(script, model_path=path)
    assert f"{path} is not run by RecordedSteps: it waits for the device" in capsys.readouterr().out


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
@mark.parametrize("architecture", ["llama", pytest.param("mistral", marks=mark.slow)])
def test_sampling_follows_the_exact_distribution(script, architecture):
    """The first two tokens of 4,096 episodes come as often as plain forward passes say. Their
    uniform numbers are a grid, so little is left to chance. The model's generation config may ask
    for other sampling."""
    model = make_model(architecture)
    model.generation_config.update(do_sample=True, top_k=2, top_p=0.5, temperature=0.1)
    grid = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    uniforms = torch.cartesian_prod(grid, grid)
    prompt = "0000-1111=22"
    tokens = sample(script, model, [prompt] * 4096, uniforms, 0.7, [EOS])["tokens"]
    pairs = tokens.clamp(min=0) @ torch.tensor([len(VOCAB), 1])
    shares = np.bincount(pairs, minlength=len(VOCAB) ** 2) / 4096
    for temperature in (0.7, 1.0):
        expected = first_two_tokens(model, prompt, temperature)
        assert (np.abs(shares - expected).max() < 1 / 64) == (temperature == 0.7)


@one_text
def test_no_token_of_probability_zero_is_ever_drawn(script):
    """The uniform numbers 0 and just below 1 pick the first and the last token whose probability is
    not 0. A float32 sum of the last logits would give the first token all of it."""
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
def test_entropies_are_exact_also_beside_tokens_of_probability_zero(script):
    """A token with p = 0 adds 0 to -sum p log p, not NaN."""
    model = make_model("llama", tie_word_embeddings=False)
    head = model.lm_head.forward
    zero = torch.tensor([3, 7])
    model.lm_head.forward = lambda hidden: head(hidden).index_fill(-1, zero, -math.inf)
    [[entropy]] = sample(script, model, ["7="], random_uniforms(1, 1), 1.0, [EOS])["entropies"]
    logits = model(torch.tensor([encode("7=")])).logits[0, -1]
    assert logits.isinf().sum() == 2
    assert entropy.item() == approx(Categorical(logits=logits).entropy().item(), rel=1e-5)


@one_text
def test_a_prompt_runs_once_and_finished_rows_leave(script):
    """The prompt of a group goes through the model once. After that, only the episodes that have
    not ended do."""
    model = make_model("llama")
    rows_in = []
    model.register_forward_pre_hook(lambda _, args: rows_in.append(len(args[0])))
    eos_ids = [*MANY_EOS, 17]
    episodes = np.repeat(PROMPTS, 5)
    result = sample(script, model, episodes, random_uniforms(20, 8), 1.0, eos_ids)
    lengths = (result["tokens"] >= 0).sum(1)
    expected = [4]
    for t in range(1, max(lengths)):
        expected.append((lengths > t).sum())
    assert rows_in == expected
    assert len(set(expected)) > 4


@mark.parametrize(
    "policy, stop_token_id, eos_ids",
    [
        ("llama", 9, {EOS, 9}),
        ("many_eos", None, set(MANY_EOS)),
        ("emits_pad", None, {EOS, 7}),
        ("pad_is_eos", None, {EOS}),
    ],
)
@one_text
def test_an_episode_ends_with_its_first_eos(script, run, policy, stop_token_id, eos_ids):
    """The first EOS is the last token, whichever EOS it is: of the generation config, or
    --stop-token-id. Only the longest length ends an episode without one.

    Bug: many trainers have no loss for an EOS that equals padding."""
    ran = run(
        script, model_path=policy, total_episodes=48, batch_size=48, stop_token_id=stop_token_id
    )
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
def test_random_numbers_are_functions_of_their_key(script):
    """All seeds, purposes and iterations give different streams. The same key always gives the same
    numbers."""
    purposes = [script.PROMPT_ORDER, script.SAMPLING, script.MINI_BATCHES]
    purposes += [script.EVALUATION, script.NEW_WEIGHTS]
    keys = list(itertools.product([1, 2, 3], purposes, [1, 2]))
    drawn = [script.keyed_rng(*key).random() for key in keys]
    assert len(set(drawn)) == len(keys)
    assert drawn == [script.keyed_rng(*key).random() for key in keys]


@one_text
def test_every_iteration_draws_its_own_numbers(script, run, monkeypatch):
    """No uniform number is used twice in a run, neither in a group, nor in another iteration or
    evaluation."""
    calls = record_calls(monkeypatch, script, "sample")
    run(script, num_train_epochs=3, eval_dataset=5, eval_temperature=1.0)
    assert len(calls) > 3
    numbers = torch.cat([call.inputs["uniforms"].flatten() for call in calls])
    assert len(numbers.unique()) == len(numbers)


@one_text
def test_evaluation_happens_when_asked_and_is_greedy(script, run, world):
    """eval/scores is logged at the start, every eval_every iterations, and at the end.

    The completions are those of transformers' `generate`. test_outputs.py shows that eval/scores is
    the mean of their scores."""
    _, metrics, folder = run(script, eval_dataset=5, eval_every=2, batch_size=3)
    last = metrics[-1]["iteration"]
    expected = [*range(0, last, 2), last]
    assert column([line for line in metrics if "eval/scores" in line], "iteration") == expected
    rows = read_jsonl(folder / "eval_rollouts.jsonl")
    for path, its_rows in ((world.llama, rows[:5]), (folder / "model", rows[-5:])):
        model = load_policy(path)
        for row in its_rows:
            assert row["token_ids"] == greedy_tokens(model, row["prompt"], 6, EOS)


@one_text
def test_the_best_of_k_is_the_mean_of_the_largest_scores(script, run):
    """test_missing_scores.py shows what a missing score does."""
    _, [line], folder = run(
        script, eval_dataset=5, eval_k=5, eval_temperature=1.0, total_episodes=0, reward="parts"
    )
    scores = column(read_jsonl(folder / "eval_rollouts.jsonl"), "score")
    assert line["eval/scores"] == approx(np.mean(scores))
    best = list(map(max, groups_of(scores, 5)))
    assert line["eval/best_of_5"] == approx(np.mean(best))
    assert 0 < line["eval/reward/ones"] < line["eval/reward/length"]
    assert line["eval/reward/length"] + line["eval/reward/ones"] == approx(line["eval/scores"])


@one_text
def test_evaluation_does_not_move_training(script, run):
    """A run with evaluations has the same episodes as a run without."""
    plain = run(script, batch_size=6)
    evaluated = run(script, batch_size=6, eval_dataset=5, eval_every=1, eval_temperature=1.0)
    assert evaluated.rollouts == plain.rollouts
