"""Sampling: the same as transformers' `generate`, the exact distribution, groups, ends of episodes, random numbers."""

import itertools
import math
import random
from types import SimpleNamespace

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
    encode,
    make_args,
    make_model,
    make_prompts,
    one_text,
    record_calls,
)
from plain import sample
from transformers import AutoModelForCausalLM

UNSCORED = "eval/num_unscored"
PROMPTS = ["1", "23+45=", "0000-1111=22", "7="]


def random_uniforms(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random(shape))


def left_padded(prompts):
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[PAD] * (longest - len(p)) + encode(p) for p in prompts])
    return input_ids, torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])


def lengths_of(samples):
    return (samples["tokens"] >= 0).sum(1).tolist()


@one_text
@pytest.mark.parametrize("architecture", [*USUAL, *WINDOWS])
def test_greedy_sampling_equals_generate(script, architecture):
    """At temperature 0, with prompts of different lengths, `sample` gives what model.generate gives."""
    model = make_model(architecture)
    input_ids, mask = left_padded(PROMPTS)
    settings = dict(do_sample=False, max_new_tokens=12, eos_token_id=[EOS, 6], pad_token_id=PAD)
    expected = model.generate(input_ids, attention_mask=mask, **settings)[:, input_ids.shape[1] :]
    got = sample(script, model, PROMPTS, random_uniforms(len(PROMPTS), 12), 0.0, [EOS, 6])
    for row, n, right in zip(got["tokens"].tolist(), lengths_of(got), expected.tolist()):
        assert row[:n] == right[:n] and set(right[n:]) <= {PAD}
        assert n == 12 or row[n - 1] in (EOS, 6)
    assert len({str(row) for row in expected.tolist()}) > 2, "the prompts must matter"


def chi_square_excess(counts, probabilities):
    """How far counts are from probabilities: chi-square, in standard deviations above its mean."""
    expected = np.asarray(probabilities) * sum(counts)
    counts, rare = np.asarray(counts, float), expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    degrees = len(counts) - 1
    return (((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum() - degrees) / math.sqrt(2 * degrees)


@torch.no_grad()
def first_two_tokens(model, prompt, temperature):
    """Exact probabilities of the first two tokens of a completion, by plain forward passes. After EOS comes 0."""
    first = torch.softmax(model(torch.tensor([encode(prompt)])).logits[0, -1].double() / temperature, -1)
    extended = torch.tensor([encode(prompt) + [token] for token in range(len(VOCAB))])
    second = torch.softmax(model(extended).logits[:, -1].double() / temperature, -1)
    second[EOS] = 0
    second[EOS, 0] = 1
    return (first[:, None] * second).flatten().numpy()


@one_text
@pytest.mark.parametrize("architecture", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_sampling_follows_the_exact_distribution(script, architecture):
    """The first two tokens of 4,000 episodes of each of two prompts come as often as plain forward passes say."""
    model, count, temperature = make_model(architecture), 4000, 0.7
    prompts = ["7=", "0000-1111=22"]
    episodes = [prompt for prompt in prompts for _ in range(count)]
    tokens = sample(script, model, episodes, random_uniforms(2 * count, 2), temperature, [EOS])["tokens"].clamp(min=0)
    for i, prompt in enumerate(prompts):
        pairs = tokens[i * count : (i + 1) * count] @ torch.tensor([len(VOCAB), 1])
        exact = first_two_tokens(model, prompt, temperature)
        counts = np.bincount(pairs, minlength=len(exact))
        assert chi_square_excess(counts, exact) < 4
        # the test can fail: these counts are not those of temperature 1
        assert chi_square_excess(counts, first_two_tokens(model, prompt, 1.0)) > 10


@one_text
def test_no_token_of_probability_zero_is_ever_drawn(script):
    """The uniform numbers 0 and just below 1 pick the first and the last token whose probability is not 0."""
    logits = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf, 2.0, -math.inf, -math.inf]]).repeat(5, 1)
    uniforms = torch.tensor([0.0, 1e-300, 1 - 1e-12, math.nextafter(1, 0), 0.5], dtype=torch.float64)
    for temperature in (0.3, 1.0, 3.0):
        picked = script.pick_tokens((logits / temperature).softmax(-1), uniforms).tolist()
        assert picked[:4] == [1, 1, 4, 4] and picked[4] in (1, 2, 4)
    nearly_sure = torch.tensor([[20.0, 0.0, -20.0]]).softmax(-1)  # a float32 sum would give the first token all of it
    assert script.pick_tokens(nearly_sure, torch.tensor([1 - 1e-9], dtype=torch.float64)).item() == 1
    wide = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 3
    wide[-100:] = wide[:100] = -math.inf  # rows that pad a vocabulary
    wide = wide.softmax(-1)[None]
    assert script.pick_tokens(wide, uniforms[:1]).item() >= 100
    assert script.pick_tokens(wide, uniforms[3:4]).item() < 49_900


@one_text
def test_entropies_are_exact_also_beside_tokens_of_probability_zero(script):
    """The entropy is -sum p log p. A token with p = 0 adds 0 to it, not NaN."""
    model = make_model("llama", tie_word_embeddings=False)
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: head(hidden).index_fill(-1, torch.tensor([3, 7]), -math.inf)
    got = sample(script, model, PROMPTS, random_uniforms(4, 1), 0.7, [EOS])
    for prompt, entropy in zip(PROMPTS, got["entropies"][:, 0].tolist()):
        with torch.no_grad():
            p = torch.softmax(model(torch.tensor([encode(prompt)])).logits[0, -1] / 0.7, -1).tolist()
        assert entropy == pytest.approx(-sum(x * math.log(x) for x in p if x), rel=1e-5) and p.count(0.0) == 2


@one_text
def test_a_prompt_runs_once_and_finished_rows_leave(script):
    """The prompt of a group goes through the model once. After that, only the episodes that have not ended do."""
    model, rows_in, eos_ids = make_model("llama"), [], [*MANY_EOS, 17]
    model.register_forward_pre_hook(lambda module, args, kwargs: rows_in.append(len(args[0])), with_kwargs=True)
    episodes = [prompt for prompt in PROMPTS for _ in range(5)]
    result = sample(script, model, episodes, random_uniforms(20, 8), 1.0, eos_ids)
    lengths = lengths_of(result)
    assert len(set(lengths)) > 4
    assert rows_in == [4] + [sum(n > t for n in lengths) for t in range(1, max(lengths))]
    last_tokens = [row[n - 1].item() for row, n in zip(result["tokens"], lengths)]
    assert result["ended"].tolist() == [token in eos_ids for token in last_tokens]
    for name, nothing in dict(tokens=-1, logprobs=0, entropies=0).items():
        assert all((row[n:] == nothing).all() for row, n in zip(result[name], lengths)), name
    assert all((row[:n] < 0).all() for row, n in zip(result["logprobs"], lengths))


@one_text
def test_an_episode_does_not_depend_on_its_neighbours(script):
    """The same prompt and uniform numbers give the same completion alone, in a group, and in any order."""
    model, uniforms = make_model("gpt2"), random_uniforms(12, 8, seed=1)
    episodes = [prompt for prompt in PROMPTS for _ in range(3)]
    together = sample(script, model, episodes, uniforms, 0.7, [EOS, 5])
    order = torch.tensor([7, 0, 3, 11, 1, 5])
    mixed = sample(script, model, [episodes[i] for i in order], uniforms[order], 0.7, [EOS, 5])
    alone = [sample(script, model, [episodes[i]], uniforms[i : i + 1], 0.7, [EOS, 5]) for i in range(12)]
    assert len(set(lengths_of(together))) > 2
    for name, rows in together.items():
        torch.testing.assert_close(mixed[name], rows[order], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.cat([one[name] for one in alone]), rows, atol=1e-5, rtol=0)


END_TOKENS = {"llama": {EOS}, "many_eos": {*MANY_EOS}, "emits_pad": {EOS, 7}, "pad_is_eos": {EOS}}


@pytest.mark.parametrize("policy", END_TOKENS)
@one_text
def test_an_episode_ends_with_its_first_eos(script, run, world, policy):
    """The first EOS is the last token, whichever EOS it is. Only the longest length ends an episode without one."""
    flags = dict(model_path=getattr(world, policy), total_episodes=48, batch_size=48)
    ran = run(script, **flags)
    [line], rows, eos_ids = ran.metrics, ran.rollouts, END_TOKENS[policy]
    ended = [row["token_ids"][-1] in eos_ids for row in rows]
    for row in rows:
        assert not set(row["token_ids"][:-1]) & eos_ids
        assert len(row["token_ids"]) == 6 or row["token_ids"][-1] in eos_ids
        assert len(row["logprobs"]) == len(row["token_ids"])
    assert any(ended) and not all(ended), "the test needs both"
    assert line["val/num_eos_tokens"] == sum(ended)
    assert line["response_length_mean"] == pytest.approx(np.mean([len(row["token_ids"]) for row in rows]))
    assert len({row["token_ids"][-1] for row, end in zip(rows, ended) if end}) > (policy == "many_eos")
    if policy == "emits_pad":
        assert any(PAD in row["token_ids"][:-1] for row in rows), "the policy must emit pad"


@one_text
def test_every_eos_is_found(script):
    """They are in the model's generation config, the tokenizer, and --stop-token-id. Each may be absent."""

    def found(generation_ids, tokenizer_id, stop):
        policy = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation_ids))
        policy.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=8))
        return script.find_eos_ids(policy, SimpleNamespace(eos_token_id=tokenizer_id), stop)

    assert found([1, 5], 7, 3) == [1, 3, 5, 7]
    assert found(None, None, None) == []
    assert found(0, None, None) == [0] and found([2], 2, 2) == [2]


@one_text
def test_random_numbers_are_functions_of_their_key(script):
    """Three seeds and three purposes give nine different streams. The same key always gives the same numbers."""
    purposes = (script.PROMPT_ORDER, script.SAMPLING, script.MINI_BATCHES)
    assert len({*purposes, script.EVALUATION, script.NEW_WEIGHTS}) == 5
    drawn = {}
    for seed in (1, 2, 3):
        for purpose in purposes:
            drawn[seed, purpose] = tuple(script.keyed_rng(seed, purpose, 1).random(4))
    assert len({x for numbers in drawn.values() for x in numbers}) == 36
    np.random.seed(5), torch.manual_seed(5), random.seed(5)
    for (seed, purpose), numbers in drawn.items():
        assert tuple(script.keyed_rng(seed, purpose, 1).random(4)) == numbers
        assert not set(script.keyed_rng(seed, purpose, 2).random(4)) & set(numbers)


@one_text
def test_every_iteration_draws_its_own_numbers(script, run, world, monkeypatch):
    """No uniform number is used twice in a run, neither in a group, nor in another iteration or evaluation."""
    calls = record_calls(monkeypatch, script, "sample")
    run(script, num_train_epochs=3, eval_dataset=world.dataset(5, seed=9), eval_temperature=1.0)
    numbers = [x for call in calls for x in call.inputs["uniforms"].flatten().tolist()]
    assert len(calls) > 3 and len(set(numbers)) == len(numbers)


@one_text
def test_evaluation_happens_when_asked_and_is_greedy(script, run, world):
    """eval/scores is logged at the start, every eval_every iterations, and at the end.

    It is the mean score of what transformers' `generate` gives."""
    flags = dict(eval_dataset=world.dataset(5, seed=9), eval_every=2, batch_size=3, reward=world.reward("letters"))
    _, metrics, output_dir = run(script, **flags)
    last = metrics[-1]["iteration"]
    expected = [i for i in range(last + 1) if i % 2 == 0 or i == last]
    assert [row["iteration"] for row in metrics if "eval/scores" in row] == expected
    assert set(metrics[0]) == {"iteration", "step", "episode", "epoch", "eval/scores", "eval/best_of_1", UNSCORED}
    letters = script.load_reward(world.reward("letters"))
    for row, path in ((metrics[0], world.llama), (metrics[-1], output_dir / "model")):
        model, completions = AutoModelForCausalLM.from_pretrained(path).eval(), []
        for prompt in make_prompts(5, seed=9):
            ids = torch.tensor([encode(prompt)])
            settings = dict(do_sample=False, max_new_tokens=6, eos_token_id=EOS, pad_token_id=PAD)
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :]
            completions.append("".join(VOCAB[t] for t in tokens if t not in (PAD, EOS)))
        scores = letters(prompts=make_prompts(5, seed=9), completions=completions)
        assert row["eval/scores"] == pytest.approx(np.mean(scores), rel=1e-5)


@one_text
def test_the_best_of_m_is_the_mean_over_all_choices(script, run, world, monkeypatch):
    """m of the k scores of a prompt are chosen without replacement. Prompts with missing scores are left out."""
    for k, counts in ((1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])):
        scores = torch.randn(4, k, generator=torch.Generator().manual_seed(k)).round(decimals=1).double()
        scores[2, 0] = math.nan
        with monkeypatch.context() as patch:
            patch.setattr(script, "generate", lambda *_: None)
            patch.setattr(script, "score_episodes", lambda *_: (scores.flatten(), {}))
            metrics = script.evaluate(make_args(script, eval_k=k, eval_temperature=1.0), None, [], [], None, 0)
        for m in counts:
            choices = [max(group) for row in scores[[0, 1, 3]].tolist() for group in itertools.combinations(row, m)]
            assert metrics.pop(f"eval/best_of_{m}") == pytest.approx(np.mean(choices))
        assert set(metrics) == {"eval/scores", "eval/num_unscored"}
    flags = dict(eval_dataset=world.dataset(5, seed=9), eval_k=4, eval_temperature=1.0, reward=world.reward("parts"))
    for row in run(script, **flags)[1][::2]:
        assert row["eval/best_of_1"] == pytest.approx(row["eval/scores"])
        assert row["eval/best_of_1"] < row["eval/best_of_2"] < row["eval/best_of_4"]
        assert row["eval/reward/length"] + row["eval/reward/ones"] == pytest.approx(row["eval/scores"])
        assert 0 < row["eval/reward/ones"] < row["eval/reward/length"]


@one_text
def test_evaluation_does_not_move_training(script, run, world):
    """A run with evaluations has the same episodes as a run without."""
    flags = dict(eval_dataset=world.dataset(5, seed=9), eval_every=1, eval_temperature=1.0)
    runs = [run(script, batch_size=6, **more)[2] / "rollouts.jsonl" for more in ({}, flags)]
    assert runs[0].read_text() == runs[1].read_text()
