"""benchmark/win_rate.py: what a judge is shown, how its verdicts are counted, and the confidence interval."""

import math
import sys

import numpy as np
import pytest
import torch
from conftest import (
    HERE,
    MODULES,
    encode,
    import_file,
    make_model,
    make_prompts,
    make_rows,
    make_tokenizer,
    read_jsonl,
    save_model,
    write_jsonl,
)
from transformers import AutoModelForCausalLM

win_rate = import_file(HERE / "benchmark" / "win_rate.py")
JUDGES = '''
calls = []

def first_shown(prompts, first, second, **columns):
    calls.append(dict(prompts=prompts, first=first, second=second, **columns))
    return [0] * len(prompts)

def more_ones(first, second, **_):
    """The completion with more of the character 1."""
    ones = [(a.count("1"), b.count("1")) for a, b in zip(first, second)]
    return [None if a == b else int(b > a) for a, b in ones]

def ones(completions, **_):
    """A reward that likes the same completions."""
    return [c.count("1") / 6 for c in completions]

def failed(prompts, **_):
    return [0, 1, 0.5, -1] + [0] * (len(prompts) - 4)

def text(prompts, **_):
    return ["1"] * len(prompts)

def short(prompts, **_):
    return [0] * (len(prompts) - 1)
'''


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with a file of judges, and flags that compare two tiny policies."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "judges_of_pairs.py").write_text(JUDGES)
    sys.modules.pop("judges_of_pairs", None)  # of another folder: pytest may set this fixture up twice in a process
    sys.path[:] = [path for path in sys.path if not path.startswith(str(folder.parent / "pair"))]
    rows = [row | {"reference": str(row["number"])} for row in make_rows(make_prompts(12, seed=5))]
    flags = {"model": save_model(folder / "model", make_model("llama", seed=4))}
    flags |= {"baseline": save_model(folder / "baseline", make_model("llama", seed=5))}
    flags |= dict(dataset=write_jsonl(folder / "held_out.jsonl", rows), temperature=1.0)
    return folder, flags


@pytest.fixture
def compare(pair, tmp_path):
    """compare(judge, **flags) returns the win rate, its interval, and the pairs that were written."""
    folder, defaults = pair

    def compare(judge, **flags):
        judge = judge if judge == "exact_match" else f"{folder / 'judges_of_pairs.py'}:{judge}"
        args = win_rate.Args(**defaults | dict(judge=judge, output=tmp_path / "deep" / "pairs.jsonl") | flags)
        rate, low, high = win_rate.main(args)
        return rate, (low, high), read_jsonl(args.output)

    return compare


def judge_calls():
    import judges_of_pairs

    return judges_of_pairs.calls


# ============================================= what is compared =============================================
def test_a_judge_that_likes_a_position_gives_one_half(compare, capsys):
    """Exactly half of the pairs are swapped, in a mixed order. The win rate of each place shows the bias."""
    rate, _, pairs = compare("first_shown")
    assert rate == 0.5
    assert [row["win"] for row in pairs] == [float(row["model_shown"] == "first") for row in pairs]
    places = [row["model_shown"] for row in pairs]
    assert places.count("first") == 6 and places not in (sorted(places), sorted(places)[::-1])
    assert "shown first: 100.0 % of 6; shown second: 0.0 % of 6" in capsys.readouterr().out
    assert [row["model_shown"] for row in compare("first_shown")[2]] == places
    assert [row["model_shown"] for row in compare("first_shown", seed=2)[2]] != places
    counts = [row["model_shown"] for row in compare("first_shown", num_prompts=5)[2]]
    assert sorted(counts) == ["first"] * 3 + ["second"] * 2


def test_the_judge_is_called_as_rewards_are(compare):
    """The judge is called once, by keywords, with a list for each column. It gets the completions in the order in which
    they are shown. The file has them by model."""
    pairs = compare("first_shown")[2]
    call = judge_calls()[-1]
    assert call.keys() == {"prompts", "first", "second", "answer", "number", "reference"}
    assert call["prompts"] == [row["prompt"] for row in pairs] == make_prompts(12, seed=5)
    assert call["number"] == list(range(12)) == [row["pair"] for row in pairs]
    for row, first, second in zip(pairs, call["first"], call["second"]):
        shown = (row["model"], row["baseline"])
        assert (first, second) == (shown if row["model_shown"] == "first" else shown[::-1])


def test_completions_are_the_models_own(compare, pair):
    """At temperature 0 the completions of both models are those of plain passes. The size of the batches and the other
    model do not change them."""
    _, flags = pair
    pairs = compare("first_shown", temperature=0.0, response_length=5)[2]
    for side in ("model", "baseline"):
        model = AutoModelForCausalLM.from_pretrained(flags[side]).eval()
        for row in pairs[:4]:
            tokens = encode(row["prompt"])
            for character in row[side]:
                logits = model(torch.tensor([tokens])).logits[0, -1]
                assert make_tokenizer().decode([logits.argmax()]) == character
                tokens += encode(character)
    assert any(len(row["model"]) == 5 for row in pairs) and max(len(row["baseline"]) for row in pairs) <= 5
    assert compare("first_shown", batch_size=5)[2] == compare("first_shown", batch_size=64)[2]
    alone = compare("first_shown", baseline="column:reference")[2]
    assert [row["model"] for row in alone] == [row["model"] for row in compare("first_shown")[2]]
    assert [row["baseline"] for row in alone] == [str(i) for i in range(12)]


def test_two_samples_of_one_model_are_two(compare, pair):
    """The two sides draw different random numbers. A model against itself has other completions at temperature 1, and
    the same ones at temperature 0."""
    itself = dict(baseline=pair[1]["model"], response_length=6)
    pairs = compare("exact_match", **itself)[2]
    assert any(row["model"] != row["baseline"] for row in pairs)
    pairs = compare("exact_match", temperature=0.0, **itself)[2]
    assert all(row["model"] == row["baseline"] for row in pairs)


def test_chat_prompts_have_chat_completions(compare, pair, tmp_path):
    """Completions of a chat are lists of messages, as in the scripts. So are references from a column. The file has
    texts."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    model = save_model(tmp_path / "chat", make_model("llama", seed=4), tokenizer=tokenizer)
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "reference": "a" * i} for i in range(4)]
    flags = dict(model=model, dataset=write_jsonl(tmp_path / "chat.jsonl", rows), baseline="column:reference")
    pairs = compare("first_shown", **flags)[2]
    call = judge_calls()[-1]
    assert call["prompts"] == [row["prompt"] for row in rows]
    for i, row in enumerate(pairs):
        messages = [[{"role": "assistant", "content": text}] for text in (row["model"], "a" * i)]
        assert [call["first"][i], call["second"][i]] == (messages if row["model_shown"] == "first" else messages[::-1])
        assert row["baseline"] == "a" * i


# ================================================ who wins =================================================
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_every_verdict_is_counted_for_the_right_side(seed, count):
    """Verdicts are 0, 1, 0.5 or None. They may be numbers of Python or of numpy. Half of the pairs are swapped, rounded
    down."""
    rows = [{"prompt": str(i)} for i in range(count)]
    said = [[0, 1, 0.5, None, np.int64(1), np.float32(0), True][(i * 3 + seed) % 7] for i in range(count)]
    models, baselines = [f"m{i}" for i in range(count)], [f"b{i}" for i in range(count)]
    shown = []
    pairs = win_rate.judge_pairs(lambda **columns: shown.append(columns) or said, rows, models, baselines, seed)
    swapped = [text[0] == "b" for text in shown[0]["first"]]
    assert sum(swapped) == count // 2
    for row, swap, verdict in zip(pairs, swapped, said):
        model_is = 1 if swap else 0
        expected = 0.5 if verdict in (0.5, None) else float(verdict == model_is)
        assert row["win"] == expected and row["model_shown"] == ("first", "second")[model_is]


def test_the_embedded_policy_against_itself_ties(compare, capsys):
    """With --judge exact_match at temperature 0 every pair is a tie, and the win rate is one half."""
    policy = str(HERE / "benchmark" / "default" / "policy")
    flags = dict(model=policy, baseline=policy, dataset=win_rate.Args.dataset, temperature=0.0, num_prompts=64)
    rate, (low, high), pairs = compare("exact_match", **flags)
    assert rate == 0.5 and {row["win"] for row in pairs} == {0.5} and low < 0.4 and high > 0.6
    printed = capsys.readouterr().out
    assert "win rate 50.0 %" in printed and "0 won, 64 tied, 0 lost" in printed
    assert "100 % of the model's completions ended, of the baseline's 100 %" in printed
    rate, _, pairs = compare("exact_match", **flags | dict(baseline="column:answer"))  # the right answers
    right = [row["model"].strip() == row["baseline"] for row in pairs]
    assert [row["win"] for row in pairs] == [0.5 * r for r in right] and rate == np.mean(right) / 2 < 0.5


def test_a_trained_model_wins(compare, pair, run):
    """A policy that was trained to write ones beats the policy before training. With the sides exchanged it still does,
    so the rate is small."""
    folder, flags = pair
    reward = f"{folder / 'judges_of_pairs.py'}:ones"
    training = dict(model_path=flags["baseline"], reward=reward, learning_rate=0.02, num_train_epochs=6.0, kl_coef=0.0)
    model = str(run(MODULES["rloo"], **training)[2] / "model")
    rate, (low, high), pairs = compare("more_ones", model=model, response_length=6)
    assert rate > 0.8 and 0.5 < low < rate <= high
    for row in pairs:
        ones = row["model"].count("1"), row["baseline"].count("1")
        assert row["win"] == (0.5 if ones[0] == ones[1] else float(ones[0] > ones[1]))
    rate, _, _ = compare("more_ones", model=flags["baseline"], baseline=model, response_length=6)
    assert rate < 0.2


# =============================================== what is refused ============================================
@pytest.mark.parametrize(
    "judge, message",
    [
        ("failed", r"^pair 3, .* for '.*': the judge said -1, not 0, 1, or for a tie 0.5 or None"),
        ("text", r"^pair 0, .*the judge said '1'"),
        ("short", "the judge returned 11 verdicts for 12 pairs"),
    ],
)
def test_a_verdict_that_is_none_is_refused(compare, tmp_path, judge, message):
    with pytest.raises(ValueError, match=message) as refused:
        compare(judge)
    assert judge == "short" or repr(make_prompts(12, seed=5)[3 if judge == "failed" else 0]) in str(refused.value)
    assert not list(tmp_path.glob("**/*.jsonl"))


def test_a_column_or_judge_that_is_not_there_is_refused(compare):
    with pytest.raises(ValueError, match="column:summary: the columns of .* are prompt, answer, number, reference"):
        compare("first_shown", baseline="column:summary")
    with pytest.raises(ValueError, match="--judge none"):
        win_rate.main(win_rate.Args(model="a", baseline="b", judge="none"))
    with pytest.raises(AttributeError, match="nobody"):
        compare("nobody")


# =============================================== the interval ===============================================
def test_the_interval_is_wilsons():
    """The observed rate is z standard errors away from each end, with the standard error at that end. The interval has
    some width also at 0 % and 100 %."""
    z = 1.959964
    for wins, count in ((0, 10), (10, 10), (1, 1), (7, 20), (512, 1000), (0, 1000)):
        rate = wins / count
        low, high = win_rate.interval(rate, count)
        assert 0 <= low <= rate <= high <= 1 and high - low > 0.003
        for p in {low, high} - {rate}:
            assert abs(rate - p) == pytest.approx(z * math.sqrt(p * (1 - p) / count), rel=1e-6)
    assert win_rate.interval(0.0, 100) == pytest.approx((0, z**2 / (100 + z**2)))
    assert win_rate.interval(1.0, 100) == pytest.approx((100 / (100 + z**2), 1))


def test_the_interval_holds_the_true_rate():
    """Without ties it does in about 95 of 100 repetitions, also near 0 and 1. With ties it does more often."""
    rng = np.random.default_rng(0)
    for win, tie, least, most in (
        (0.5, 0, 0.93, 0.97),
        (0.02, 0, 0.9, 0.99),
        (0.3, 0.4, 0.95, 1),
        (0.96, 0.04, 0.9, 1),
    ):
        drawn = rng.multinomial(100, [win, tie, max(0, 1 - win - tie)], size=2000)
        rates, truth = (drawn[:, 0] + drawn[:, 1] / 2) / 100, win + tie / 2
        inside = [low <= truth <= high for low, high in (win_rate.interval(rate, 100) for rate in rates)]
        assert least <= np.mean(inside) <= most, (win, tie, np.mean(inside))
