"""docs/exercises: the solutions pass, and typical wrong answers get the message for them."""

import re
from types import SimpleNamespace

import pytest
from conftest import HERE, import_file
from pytest import mark

pytest_plugins = ["pytester"]
FOLDER = HERE / "docs/exercises"
SOLUTIONS = (HERE / "tests/exercise_solutions.py").read_text(encoding="utf-8")
MEMBERS = vars(import_file(FOLDER / "test_answers.py"))
TESTS = [member for name, member in MEMBERS.items() if name.startswith("test_")]

PICKED = "(cumulative <= darts).sum(-1)"
LEFT_OUT = "(groups - baselines).flatten()"
CLIPPED = "torch.maximum(-advantages * ratio, -advantages * clipped)"
WRONG = {  # for each message what the solutions have, and what a wrong answer has in its place
    # 1
    "The same input": (PICKED, "torch.multinomial(p, 1).squeeze(1)"),
    "You take the most likely token": (PICKED, "p.argmax(-1)"),
    "too far to the left": (PICKED, f"{PICKED} - 1"),
    "You add up over the rows": ("cumsum(-1)", "cumsum(0)"),
    "You search in the probabilities": ("cumulative <= darts", "p <= darts"),
    "You leave it out": ("cumulative <= darts", "cumulative - p <= darts"),
    "a token of probability 0": ("<=", "<"),
    "sum of the probabilities is": (" * cumulative[:, -1:]", ""),
    "You add up in float32": ("p.double()", "p"),
    # 2a
    "You change rewards in place": ("rewards.view", "rewards.mul_(0).view"),
    "Your function returns None": (f"return {LEFT_OUT}", LEFT_OUT),
    "You return a tuple": (LEFT_OUT, "groups.max(0)"),
    "You return list": (LEFT_OUT, "groups.tolist()"),
    "of the shape [6]. Yours has the shape [2, 3]": (LEFT_OUT, "groups - baselines"),
    "The sign is wrong": ("groups - baselines", "baselines - groups"),
    "Compute the first wrong number by hand": (LEFT_OUT, f"7 * {LEFT_OUT}"),
    "You include the episode itself": (" - groups) / (k - 1)", ") / k"),
    "the others by k": ("(k - 1)", "k"),
    "You return the baselines": ("groups - baselines", "baselines"),
    "You mix the groups": ("rewards.view(-1, k)", "rewards.view(k, -1).t()"),
    "You compare with the whole batch": ("groups = rewards", "k = len(rewards); groups = rewards"),
    "keepdim=True": ("groups.sum(1, keepdim=True)", "groups.sum(1)"),
    # 2b
    "You use the biased variance": ("groups.std(1, ", "groups.std(1, correction=0, "),
    "You do not divide by the deviation": (" / deviations", ""),
    "The first k episodes are a group": ("scores.view(-1, k)", "scores.view(k, -1).t()"),
    "the episode's own group": ("groups = scores", "k = len(scores); groups = scores"),
    "you divide 0 by 0": (" + 1e-4", ""),
    "not less": ("1e-4", "1e-8"),
    "not inside the root": (
        "groups.std(1, keepdim=True) + 1e-4",
        "(groups.var(1, keepdim=True) + 1e-8).sqrt()",
    ),
    # 3
    "You take the smaller": ("torch.maximum", "torch.minimum"),
    "You always clip.": (CLIPPED, "-advantages * clipped"),
    "You never clip": (CLIPPED, "-advantages * ratio"),
    "You forget the minus": (CLIPPED, CLIPPED.replace("-", "")),
    "You clip at -c and c": ("1 - cliprange, 1 + cliprange", "-cliprange, cliprange"),
    "The ratio is upside down": ("logprobs - old_logprobs", "old_logprobs - logprobs"),
    "the exponential": (".exp()", ""),
    "Use the argument cliprange": ("1 - cliprange, 1 + cliprange", "0.8, 1.2"),
    "they have no gradient": ("(logprobs - old", "(logprobs.detach() - old"),
    # 4
    "You forget lam": ("gamma * lam", "gamma"),
    "in front of A_{t+1}": ("gamma * lam", "lam"),
    "You forget gamma in delta": ("gamma * next_value", "next_value"),
    "You return the deltas": (" + gamma * lam * next_advantage", ""),
    "These are the returns": ("return advantages", "return advantages + values"),
    "Monte Carlo returns": (" + gamma * next_value - values[episode, t]", ""),
    "the last value twice": ("next_value = 0.0", "next_value = values[episode, length - 1]"),
    "The score is in the last column": ("range(length)", "range(len(values[episode]))"),
    "You read the value after the end": (
        "next_value = 0.0",
        "next_value = [*values[episode], 0.0][length]",
    ),
    "the answer must be 0": ("torch.zeros_like(values)", "1 * values"),
}


def failures(text):
    """The messages that these answers get."""
    names = {}
    exec(text, names)
    messages = []
    for test in TESTS:
        try:
            test(SimpleNamespace(**names))
        except pytest.fail.Exception as error:
            messages.append(str(error))
    return messages


def test_the_solutions_pass():
    assert len(TESTS) == 5
    assert failures(SOLUTIONS) == []


@mark.parametrize("message", WRONG)
def test_a_wrong_answer_gets_its_message(message):
    right, wrong = WRONG[message]
    assert SOLUTIONS.count(right) == 1
    [found] = failures(SOLUTIONS.replace(right, wrong))
    assert message in found


ANSWERS = """
import torch
from answers import *
def pick_tokens(p, uniforms):
    return p.argmax(-1)
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
        not_yet = "not written yet"
        assert found == {"1": "wrong", "2a": "right", "2b": not_yet, "3": "wrong", "4": not_yet}
