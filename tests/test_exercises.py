"""docs/exercises: the solutions pass, and typical wrong answers get the message for them."""

import re
from types import SimpleNamespace

from conftest import HERE, import_file
from pytest import fail, mark

pytest_plugins = ["pytester"]
FOLDER = HERE / "docs/exercises"
SOLUTIONS = (HERE / "tests/exercise_solutions.py").read_text(encoding="utf-8")
MEMBERS = vars(import_file(FOLDER / "test_answers.py"))
TESTS = [member for name, member in MEMBERS.items() if name.startswith("test_")]

# A message, what the solutions have, and what a wrong answer has in its place.
WRONG = """
The same input | (cumulative <= darts).sum(-1) | torch.multinomial(p, 1).squeeze(1)
You take the most likely token | (cumulative <= darts).sum(-1) | p.argmax(-1)
too far to the left | (cumulative <= darts).sum(-1) | (cumulative <= darts).sum(-1) - 1
You add up over the rows | cumsum(-1) | cumsum(0)
You search in the probabilities | cumulative <= darts | p <= darts
You leave it out | cumulative <= darts | cumulative - p <= darts
A token of probability 0 | <= | <
The sum of p is below 1 | * cumulative[:, -1:] |
You add up in float32 | p.double() | p
You change rewards in place | rewards.view | rewards.mul_(0).view
Your function returns None | return (groups - baselines).flatten() | groups
You return a tuple | (groups - baselines).flatten() | groups.max(0)
You return list | (groups - baselines).flatten() | groups.tolist()
of the shape [6]. Yours has the shape [2, 3] | (groups - baselines).flatten() | groups - baselines
The sign is wrong | groups - baselines | baselines - groups
Compute the first wrong number by hand | (groups - baselines) | 7 * (groups - baselines)
You include the episode itself | - groups) / (k - 1) | ) / k
the others by k | (k - 1) | k
You return the baselines | groups - baselines | baselines
You mix the groups | rewards.view(-1, k) | rewards.view(k, -1).t()
You compare with the whole batch | groups = rewards | k = len(rewards); groups = rewards
keepdim=True | groups.sum(1, keepdim=True) | groups.sum(1)
You use the biased variance | std(1, keepdim=True) | std(1, correction=0, keepdim=True)
You do not divide by the deviation | / deviations |
The first k episodes are a group | scores.view(-1, k) | scores.view(k, -1).t()
the episode's own group | groups = scores | k = len(scores); groups = scores
you divide 0 by 0 | + 1e-4 |
not less | 1e-4 | 1e-8
not inside the root | std(1, keepdim=True) + 1e-4 | var(1, keepdim=True).add(1e-8).sqrt()
You take the smaller | torch.maximum | torch.minimum
You always clip. | torch.maximum(-advantages * ratio, -advantages * clipped) | -advantages * clipped
You never clip | torch.maximum(-advantages * ratio, -advantages * clipped) | -advantages * ratio
You forget the minus | (-advantages * ratio, -adv | (advantages * ratio, adv
You clip at -c and c | 1 - cliprange, 1 + cliprange | -cliprange, cliprange
The ratio is upside down | logprobs - old_logprobs | old_logprobs - logprobs
the exponential | .exp() |
Use the argument cliprange | 1 - cliprange, 1 + cliprange | 0.8, 1.2
they have no gradient | (logprobs - old | (logprobs.detach() - old
You forget lam | gamma * lam | gamma
in front of A_{t+1} | gamma * lam | lam
You forget gamma in delta | gamma * next_value | next_value
You return the deltas | + gamma * lam * next_advantage |
These are the returns | return advantages | return advantages + values
Monte Carlo returns | + gamma * next_value - values[episode, t] |
the last value twice | next_value = 0.0 | next_value = values[episode, length - 1]
The score is in the last column | range(length) | range(len(values[episode]))
You read the value after the end | next_value = 0.0 | next_value = [*values[episode], 0.0][length]
the answer must be 0 | torch.zeros_like(values) | 1 * values
"""


def failures(text):
    """The messages that these answers get."""
    names = {}
    exec(text, names)
    messages = []
    for test in TESTS:
        try:
            test(SimpleNamespace(**names))
        except fail.Exception as error:
            messages.append(str(error))
    return messages


def test_the_solutions_pass():
    assert len(TESTS) == 5
    assert failures(SOLUTIONS) == []


@mark.parametrize("line", WRONG.strip().splitlines())
def test_a_wrong_answer_gets_its_message(line):
    message, right, wrong = map(str.strip, line.split("|"))
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
REPORT = """
exercise 1 .* wrong
exercise 2a .* right
exercise 2b .* not written yet
exercise 3 .* wrong
exercise 4 .* not written yet
"""


@mark.parametrize(
    "answers, status, said",
    [
        (ANSWERS, 1, f"(?s)You take the most likely.*in clipped_loss.*{REPORT}"),
        ("x = 1\ndef (:\n", 4, "(?s)line 2.*SyntaxError"),
        (None, 4, "no such Python file"),
    ],
    ids=["some are wrong", "no Python", "no file"],
)
def test_what_a_student_sees(pytester, answers, status, said):
    """The report has one line for each exercise. An error ends at its line of the answers."""
    if answers:
        (pytester.path / "mine.py").write_text(answers)
    ran = pytester.runpytest_inprocess(str(FOLDER), "--answer", "mine.py")
    output = "\n".join([*ran.outlines, *ran.errlines])
    assert ran.ret == status, output
    assert re.search(said.replace(" .* ", r"[^\n]* "), output), output
    assert "site-packages" not in output
