"""docs/exercises: the solutions pass, and typical wrong answers get the message for them."""

import re
from types import SimpleNamespace

import exercise_solutions as right
import pytest
import torch
from conftest import HERE, import_file
from pytest import mark, raises

pytest_plugins = ["pytester"]
FOLDER = HERE / "docs/exercises"
MEMBERS = vars(import_file(FOLDER / "test_answers.py"))
TESTS = {}  # "1" to "7"
for name, member in MEMBERS.items():
    if name.startswith("test_"):
        TESTS[name.split("_")[1]] = member
FUNCTIONS = {
    "1": "count_run",
    "2": "pick_tokens",
    "3": "completion_logprobs",
    "4a": "leave_one_out_advantages",
    "4b": "group_normalized_advantages",
    "5a": "clipped_loss",
    "5b": "clipped_loss",
    "6": "micro_batch_losses",
    "7": "gae_from_scores",
}


def count(**changes):
    """The counts of a run with other flags."""
    return lambda **given: right.count_run(**given | changes)


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


def hit(log_p, uniforms, compare):
    """Sampling that does not multiply the dart by the sum of the probabilities."""
    cumulative = log_p.double().exp().cumsum(-1)
    return compare(cumulative, uniforms[:, None]).sum(-1)


undamped = normalized(lambda deviation: deviation)
leave_one_out = right.leave_one_out_advantages
logprobs = right.completion_logprobs
clipped = right.clipped_loss
losses = right.micro_batch_losses
gae = right.gae_from_scores
WRONG = {  # the message of each wrong answer
    "1": {
        "You count prompts": count(k=1),
        "You forget the PPO epochs": count(num_ppo_epochs=1),
        "You forget that the processes share": count(world_size=1),
    },
    "2": {
        "You take the most likely token": lambda log_p, u: log_p.argmax(-1),
        "a token of probability 0": lambda log_p, u: hit(log_p, u, torch.lt),
        "sum of the probabilities is": lambda log_p, u: hit(log_p, u, torch.le),
    },
    "3": {
        "You forget the temperature": lambda *given: logprobs(*given[:-1], 1.0),
        "Give the model a mask": lambda m, p, mask, *rest: logprobs(m, p, mask | 1, *rest),
        "The EOS gets 0": lambda *given: logprobs(*given) * (given[3] != 0),
    },
    "4a": {
        "You include the episode itself": normalized(torch.ones_like),
        "(k - 1) / k": lambda r, k: leave_one_out(r, k) * (1 - 1 / k) ** 2,
        "You mix the groups": mixed(leave_one_out),
        "You mix the groups.": lambda r, k: leave_one_out(r, len(r) // k),
        "keepdim=True": lambda r, k: r.view(-1, k) - r.view(-1, k).mean(1),
    },
    "4b": {
        "you divide 0 by 0": undamped,
        "You add less than 1e-4": normalized(lambda deviation: deviation + 1e-8),
        "the lowest deviation": normalized(lambda deviation: deviation.clamp(min=1e-4)),
        "You add 1e-4 to the variance": normalized(lambda x: (x**2 + 1e-4).sqrt()),
        "You add 1e-8 to the variance": normalized(lambda x: (x**2 + 1e-8).sqrt()),
        "to the quotient": lambda s, k: undamped(s, k) + 1e-4,
        "You mix the groups": mixed(right.group_normalized_advantages),
    },
    "5a": {
        "You never clip": lambda new, old, a, c: clipped(new, old, a, 10.0),
        "You take the smaller": lambda new, old, a, c: -clipped(new, old, -a, c),
    },
    "5b": {"no gradient": lambda new, *rest: clipped(new.detach(), *rest)},
    "6": {
        "a sum of means": lambda p: [[losses([[x]])[0][0] for x in mine] for mine in p],
        "DDP takes a mean": lambda p: [[x / len(p) for x in mine] for mine in losses(p)],
        "Each process divides": lambda p: [losses([mine])[0] for mine in p],
    },
    "7": {
        "You forget lam": lambda *given: gae(*given[:4], 1.0),
        "Monte Carlo returns": lambda s, v, *rest: gae(s, 0 * v, *rest),
        # gamma * lam is still 0.4, but gamma V_{t+1} is nearly 0.
        "You forget V of the next": lambda *given: gae(*given[:3], 1e-6, 0.4e6),
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
        written = {"2": "wrong", "4a": "right", "5a": "wrong", "5b": "wrong"}
        assert found == dict.fromkeys(TESTS, "not written yet") | written
