"""docs/exercises: the solutions pass, and typical wrong answers get the message for them."""

import re
from functools import partial
from types import SimpleNamespace

import exercise_solutions as right
import pytest
import torch
from conftest import HERE, import_file
from pytest import mark, raises

pytest_plugins = ["pytester"]
FOLDER = HERE / "docs/exercises"
MEMBERS = vars(import_file(FOLDER / "test_answers.py"))
TESTS = {}  # "1" to "4"
for name, member in MEMBERS.items():
    if name.startswith("test_"):
        TESTS[name.split("_")[1]] = member
FUNCTIONS = {
    "1": "pick_tokens",
    "2a": "leave_one_out_advantages",
    "2b": "group_normalized_advantages",
    "3": "clipped_loss",
    "4": "gae_from_scores",
}


def hit(log_p, uniforms, add_up=lambda p: p.double().cumsum(-1), compare=torch.le):
    """Sampling that adds up or compares in a wrong way, or does not multiply the random number."""
    return compare(add_up(log_p.exp()), uniforms[:, None]).sum(-1)


def in_float32(log_p, uniforms):
    cumulative = log_p.exp().cumsum(-1)
    return (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1)


def mixed(function):
    """Advantages of groups whose episodes do not stand side by side."""
    return lambda values, k: function(values.view(k, -1).t().flatten(), k)


def normalized(divisor):
    """The scores minus the mean of their group, divided by divisor(its deviation)."""

    def advantages(scores, k):
        groups = scores.view(-1, k)
        centred = groups - groups.mean(1, keepdim=True)
        return (centred / divisor(groups.std(1, keepdim=True))).flatten()

    return advantages


def larger_loss(ratio, advantages, low, high):
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))


def value_after_the_end(scores, values, lengths, gamma, lam):
    after = torch.nn.functional.pad(values, (0, 1))[range(len(lengths)), lengths]
    return gae(scores + gamma * after, values, lengths, gamma, lam)


pick = right.pick_tokens
leave_one_out = right.leave_one_out_advantages
group_normalized = right.group_normalized_advantages
undamped = normalized(lambda deviation: deviation)
clipped = right.clipped_loss
gae = right.gae_from_scores
WRONG = {  # the message of each wrong answer
    "1": {
        "The same input": lambda log_p, u: torch.multinomial(log_p.exp(), 1).squeeze(1),
        "You take the most likely token": lambda log_p, u: log_p.argmax(-1),
        "too far to the left": lambda log_p, u: pick(log_p, u) - 1,
        "You add up log-probabilities": partial(hit, add_up=lambda p: p.log().cumsum(-1)),
        "You add up over the rows": partial(hit, add_up=lambda p: p.cumsum(0)),
        "You search in the probabilities": partial(hit, add_up=lambda p: p),
        "You leave it out": partial(hit, add_up=lambda p: p.cumsum(-1) - p),
        "a token of probability 0": partial(hit, compare=torch.lt),
        "sum of the probabilities is": hit,
        "You add up in float32": in_float32,
    },
    "2a": {
        "You change rewards in place": lambda r, k: r.mul_(0),
        "Your function returns None": lambda r, k: None,
        "You return a tuple": lambda r, k: r.max(0),
        "You return list": lambda r, k: r.tolist(),
        "of the shape [6]. Yours has the shape [2, 3]": lambda r, k: r.view(-1, k),
        "The sign is wrong": lambda r, k: -leave_one_out(r, k),
        "Compute the first wrong number by hand": lambda r, k: 7 * leave_one_out(r, k),
        "You include the episode itself": normalized(torch.ones_like),
        "the others by k": lambda r, k: r - (r - leave_one_out(r, k)) * (k - 1) / k,
        "You return the baselines": lambda r, k: r - leave_one_out(r, k),
        "You mix the groups": mixed(leave_one_out),
        "You compare with the whole batch": lambda r, k: leave_one_out(r, len(r)),
        "keepdim=True": lambda r, k: r.view(-1, k) - r.view(-1, k).mean(1),
    },
    "2b": {
        "You use the biased variance": lambda s, k: undamped(s, k) * (k / (k - 1)) ** 0.5,
        "You do not divide by the deviation": normalized(torch.ones_like),
        "You mix the groups": mixed(group_normalized),
        "You compare with the whole batch": lambda s, k: group_normalized(s, len(s)),
        "you divide 0 by 0": undamped,
        "not less": normalized(lambda deviation: deviation + 1e-8),
        "not inside the root": normalized(lambda x: (x**2 + 1e-8).sqrt()),
    },
    "3": {
        "You take the smaller": lambda new, old, a, c: -clipped(new, old, -a, c),
        "You always clip.": lambda new, old, a, c: -a * (new - old).exp().clamp(1 - c, 1 + c),
        "You never clip": lambda new, old, a, c: clipped(new, old, a, 10.0),
        "You forget the minus": lambda new, old, a, c: clipped(new, old, -a, c),
        "You clip at -c and c": lambda new, old, a, c: larger_loss((new - old).exp(), a, -c, c),
        "The ratio is upside down": lambda new, old, a, c: clipped(old, new, a, c),
        "the exponential": lambda new, old, a, c: larger_loss(new - old, a, 1 - c, 1 + c),
        "Use the argument cliprange": lambda new, old, a, c: clipped(new, old, a, 0.2),
        "they have no gradient": lambda new, *rest: clipped(new.detach(), *rest),
    },
    "4": {
        "You forget lam": lambda *given: gae(*given[:4], 1.0),
        "in front of A_{t+1}": lambda s, v, n, gamma, lam: gae(s, v, n, gamma, lam / gamma),
        "You forget gamma in delta": lambda s, v, n, gamma, lam: gae(s, v, n, 1.0, lam * gamma),
        "You return the deltas": lambda *given: gae(*given[:4], 0.0),
        "These are the returns": lambda s, v, *rest: gae(s, v, *rest) + v,
        "Monte Carlo returns": lambda s, v, *rest: gae(s, 0 * v, *rest),
        "the last value twice": lambda s, v, *rest: gae(s + rest[1] * v[:, -1], v, *rest),
        "The score is in the last column": lambda s, v, n, *rest: gae(
            s, v.where(v < 9, 0.0), 0 * n + v.shape[1], *rest
        ),
        "You read the value after the end": value_after_the_end,
        "after the end of a completion the answer must be 0": lambda *given: gae(
            *given
        ).masked_fill(gae(*given) == 0, 7.0),
    },
}


@mark.parametrize("exercise", TESTS)
def test_a_wrong_answer_gets_its_message(exercise):
    for message, wrong in WRONG[exercise].items():
        answers = SimpleNamespace(**{FUNCTIONS[exercise]: wrong})
        with raises(pytest.fail.Exception, match=re.escape(message)):
            TESTS[exercise](answers)


@mark.parametrize("exercise", TESTS)
def test_the_solutions_pass(exercise):
    TESTS[exercise](right)


ANSWERS = """
import torch
from answers import *
def pick_tokens(log_p, uniforms):
    return log_p.argmax(-1)
def leave_one_out_advantages(rewards, k):
    groups = rewards.view(-1, k)
    return ((groups - groups.mean(1, keepdim=True)) * k / (k - 1)).flatten()
def clipped_loss(logprobs, *_):
    return torch.nn.Linear(7, 6)(logprobs)
"""


@mark.parametrize(
    "answers, status, messages",
    [
        (ANSWERS, 1, ["You take the most likely token", "in clipped_loss", "not written yet"]),
        ("x = 1\ndef (:\n", 4, ["line 2", "SyntaxError"]),
        (None, 4, ["no such Python file"]),
    ],
    ids=["some are wrong", "no Python", "no file"],
)
def test_what_a_student_sees(pytester, answers, status, messages):
    """The report has one line for each exercise. An error ends at its line of the answers."""
    if answers:
        (pytester.path / "mine.py").write_text(answers)
    ran = pytester.runpytest_inprocess(str(FOLDER), "--answer", "mine.py")
    output = "\n".join([*ran.outlines, *ran.errlines])
    assert ran.ret == status, output
    for message in messages:
        assert message in output, output
    assert "site-packages" not in output
    if answers == ANSWERS:
        found = dict(re.findall(r"^exercise (\S+) .*?  +(.*)$", output, re.MULTILINE))
        written = {"1": "wrong", "2a": "right", "3": "wrong"}
        assert found == dict.fromkeys(TESTS, "not written yet") | written
