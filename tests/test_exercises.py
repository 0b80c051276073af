"""docs/exercises: the solutions pass, and typical wrong answers get the message for them."""

import inspect
import re
import subprocess
import sys
from types import SimpleNamespace

import exercise_solutions as right
import pytest
import torch
from conftest import HERE, import_file

FOLDER = HERE / "docs/exercises"
MEMBERS = vars(import_file(FOLDER / "test_answers.py"))
TESTS = {name.split("_")[1]: test for name, test in MEMBERS.items() if name.startswith("test_")}  # "1" to "7"
TEMPLATE = import_file(FOLDER / "answers.py")
NAMES = "count_run pick_tokens completion_logprobs leave_one_out_advantages group_normalized_advantages"
NAMES += " clipped_loss clipped_loss micro_batch_losses gae_from_scores"
FUNCTIONS = dict(zip(TESTS, NAMES.split()))  # 4 and 5 have two tests


def count(**changes):
    """The counts of a run with other flags."""
    return lambda **given: right.count_run(**given | changes)


def normalized(divisor):
    """The scores minus the mean of their group, divided by divisor(its deviation)."""

    def advantages(scores, k):
        groups = scores.view(-1, k)
        return ((groups - groups.mean(1, keepdim=True)) / divisor(groups.std(1, keepdim=True))).flatten()

    return advantages


WRONG = [  # the exercise, the message, the wrong answer
    ("1", "You count prompts", count(k=1)),
    ("1", "You forget the PPO epochs", count(num_ppo_epochs=1)),
    ("1", "You forget that the processes share", count(world_size=1)),
    ("2", "You take the most likely token", lambda log_p, u: log_p.argmax(-1)),
    ("2", "a token of probability 0", lambda log_p, u: (log_p.double().exp().cumsum(-1) < u[:, None]).sum(-1)),
    ("2", "sum of the probabilities is", lambda log_p, u: (log_p.double().exp().cumsum(-1) <= u[:, None]).sum(-1)),
    ("3", "You forget the temperature", lambda *given: right.completion_logprobs(*given[:-1], 1.0)),
    ("3", "Give the model a mask", lambda m, p, mask, *given: right.completion_logprobs(m, p, mask | 1, *given)),
    ("3", "The EOS gets 0", lambda *given: right.completion_logprobs(*given) * (given[3] != 0)),
    ("4a", "You include the episode itself", normalized(torch.ones_like)),
    ("4a", "(k - 1) / k", lambda r, k: normalized(torch.ones_like)(r, k) * (k - 1) / k),
    ("4a", "You mix the groups", lambda r, k: right.leave_one_out_advantages(r.view(k, -1).t().flatten(), k)),
    ("4a", "You mix the groups", lambda r, k: right.leave_one_out_advantages(r, len(r) // k)),
    ("4a", "keepdim=True", lambda r, k: r.view(-1, k) - r.view(-1, k).mean(1)),
    ("4b", "you divide 0 by 0", normalized(lambda deviation: deviation)),
    ("4b", "You add less than 1e-4", normalized(lambda deviation: deviation + 1e-8)),
    ("4b", "the lowest deviation", normalized(lambda deviation: deviation.clamp(min=1e-4))),
    ("4b", "inside the root", normalized(lambda deviation: (deviation**2 + 1e-4).sqrt())),
    ("4b", "inside the root", normalized(lambda deviation: (deviation**2 + 1e-8).sqrt())),
    ("4b", "to the quotient", lambda s, k: normalized(lambda deviation: deviation)(s, k) + 1e-4),
    ("4b", "You mix the groups", lambda s, k: right.group_normalized_advantages(s.view(k, -1).t().flatten(), k)),
    ("5a", "You never clip", lambda new, old, a, c: right.clipped_loss(new, old, a, 10.0)),
    ("5a", "You take the smaller", lambda new, old, a, c: -right.clipped_loss(new, old, -a, c)),
    ("5b", "no gradient", lambda new, *given: right.clipped_loss(new.detach(), *given)),
    ("6", "a sum of means", lambda p: [[right.micro_batch_losses([[x]])[0][0] for x in mine] for mine in p]),
    ("6", "DDP takes a mean", lambda p: [[x / len(p) for x in mine] for mine in right.micro_batch_losses(p)]),
    ("6", "Each process divides", lambda p: [right.micro_batch_losses([mine])[0] for mine in p]),
    ("7", "You forget lam", lambda *given: right.gae_from_scores(*given[:4], 1.0)),
    ("7", "Monte Carlo returns", lambda s, v, *given: right.gae_from_scores(s, 0 * v, *given)),
    # gamma * lam is still 0.4, but gamma V_{t+1} is nearly 0.
    ("7", "You forget V of the next", lambda *given: right.gae_from_scores(*given[:3], 1e-6, 0.4e6)),
]


@pytest.mark.parametrize("exercise, message, wrong", WRONG, ids=[f"{row[0]} {row[1]}" for row in WRONG])
def test_a_wrong_answer_gets_its_message(exercise, message, wrong):
    with pytest.raises(pytest.fail.Exception, match=re.escape(message)):
        TESTS[exercise](SimpleNamespace(**{FUNCTIONS[exercise]: wrong}))


@pytest.mark.parametrize("exercise", TESTS)
def test_the_solutions_pass(exercise):
    TESTS[exercise](right)


def test_the_template_asks_for_what_the_page_shows():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in FUNCTIONS.values():
        [shown] = re.findall(rf"^    {name}\(([^)]*)\)", page, re.M)
        assert re.split(r",\s*", shown) == list(inspect.signature(getattr(TEMPLATE, name)).parameters)


ANSWERS = """
import torch
from answers import *
def pick_tokens(log_p, uniforms):
    return log_p.argmax(-1)
def leave_one_out_advantages(rewards, k):
    return ((rewards.view(-1, k) - rewards.view(-1, k).mean(1, keepdim=True)) * k / (k - 1)).flatten()
def clipped_loss(logprobs, *_):
    return torch.nn.Linear(7, 6)(logprobs)
"""


@pytest.mark.parametrize(
    "answers, status, messages",
    [
        (ANSWERS, 1, ["You take the most likely token", "in clipped_loss", "not written yet"]),
        ("x = 1\ndef (:\n", 4, ["line 2", "SyntaxError"]),
        (None, 4, ["no such Python file"]),
    ],
    ids=["some are wrong", "no Python", "no file"],
)
def test_what_a_student_sees(tmp_path, answers, status, messages):
    """The report has one line for each exercise. An error ends at its line of the student's file."""
    if answers:
        (tmp_path / "mine.py").write_text(answers)
    command = [sys.executable, "-m", "pytest", str(FOLDER), "--answer", "mine.py"]
    program = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    output = program.stdout + program.stderr
    assert program.returncode == status and all(message in output for message in messages)
    assert "INTERNAL" not in output and "site-packages" not in output and len(output.splitlines()) < 60
    if answers == ANSWERS:
        found = dict(re.findall(r"^exercise (\S+) .*?  +(.*)$", output, re.M))
        written = {"2": "wrong", "4a": "right", "5a": "wrong", "5b": "wrong"}
        assert found == dict.fromkeys(TESTS, "not written yet") | written
