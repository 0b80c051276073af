"""The exercises of docs/exercises: each typical wrong answer fails with the message for it, here in exercises 1 to 4.

Exercises 5 to 7, and the right answers to all, are in test_exercises_5_to_7.py.
"""

import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import HERE, import_file, one_text

FOLDER = HERE / "docs/exercises"
TESTS = import_file(FOLDER / "test_answers.py")
TEMPLATE = import_file(FOLDER / "answers.py")
PARTS = {name: test for name, test in vars(TESTS).items() if name.startswith("test_")}
Failed = pytest.fail.Exception


def fails(part: str, message: str, **functions):
    """The test of a part of an exercise fails with this message, if the answer has these functions."""
    [test] = [test for name, test in PARTS.items() if name.startswith(f"test_{part}_")]
    with pytest.raises(Failed, match=re.escape(message)):
        test(SimpleNamespace(**functions))


# ========================================== 1  the counts of a run ==========================================
def count_run(given: dict) -> dict:
    g = SimpleNamespace(**given)
    prompts = math.floor(g.num_train_epochs * g.num_prompts + 0.5)
    counts = dict(episodes=prompts * g.k)
    counts["iterations"] = math.ceil(counts["episodes"] / g.batch_size)
    last = counts["episodes"] - (counts["iterations"] - 1) * g.batch_size
    mini_batches = (counts["iterations"] - 1) * g.num_mini_batches + min(last, g.num_mini_batches)
    share = math.ceil(g.batch_size / g.num_mini_batches / g.world_size)
    counts |= dict(last_batch_size=last, steps=mini_batches * g.num_ppo_epochs)
    return counts | dict(gradient_accumulation_steps=math.ceil(share / g.per_device_train_batch_size))


def steps(g, counts: dict, last_mini_batches: int) -> int:
    """The steps of a run whose last batch has this number of mini-batches."""
    return ((counts["iterations"] - 1) * g.num_mini_batches + last_mini_batches) * g.num_ppo_epochs


WRONG_COUNTS = [  # the count, the wrong formula, the message
    ("episodes", lambda g, c: c["episodes"] // g.k, "You count prompts"),
    ("episodes", lambda g, c: int(g.num_train_epochs * g.num_prompts) * g.k, "round(2.5) are both 2"),
    ("episodes", lambda g, c: round(g.num_train_epochs * g.num_prompts) * g.k, "round(2.5) are both 2"),
    ("episodes", lambda g, c: g.num_train_epochs * g.num_prompts * g.k, "part of a prompt"),
    ("episodes", lambda g, c: math.floor(g.num_train_epochs * g.num_prompts * g.k + 0.5), "First round the prompts"),
    ("episodes", lambda g, c: math.ceil(g.num_train_epochs * g.num_prompts) * g.k, "You always round up"),
    ("episodes", lambda g, c: g.num_prompts * g.k, "You forget num_train_epochs"),
    ("episodes", lambda g, c: math.floor(g.num_train_epochs + 0.5) * g.num_prompts * g.k, "You round the epochs"),
    ("episodes", lambda g, c: round(g.num_train_epochs) * g.num_prompts * g.k, "You round the epochs"),
    ("episodes", lambda g, c: float(c["episodes"]), "must be int, and yours is a float"),
    ("episodes", lambda g, c: c["episodes"] * g.num_ppo_epochs, "It makes no new ones"),
    ("episodes", lambda g, c: c["iterations"] * g.batch_size, "round up to whole batches"),
    ("episodes", lambda g, c: c["episodes"] // g.batch_size * g.batch_size, "drop the last, smaller batch"),
    ("iterations", lambda g, c: c["episodes"] // g.batch_size, "drop the last, smaller batch. Round up"),
    ("iterations", lambda g, c: math.ceil(c["episodes"] / g.k / g.batch_size), "A batch holds episodes"),
    ("iterations", lambda g, c: math.ceil(c["episodes"] / g.batch_size / g.world_size), "all processes together"),
    ("iterations", lambda g, c: c["episodes"] // g.batch_size + 1, "no smaller batch after them"),
    ("iterations", lambda g, c: torch.tensor(c["iterations"]), "must be int, and yours is a Tensor"),
    ("iterations", lambda g, c: c["iterations"] * g.num_ppo_epochs, "It is not a new iteration"),
    ("last_batch_size", lambda g, c: c["episodes"] % g.batch_size, "a whole one, and not empty"),
    ("last_batch_size", lambda g, c: g.batch_size, "only the episodes that are left"),
    ("last_batch_size", lambda g, c: c["episodes"] - c["iterations"] * g.batch_size, "one batch too many"),
    ("steps", lambda g, c: c["iterations"], "You count iterations"),
    ("steps", lambda g, c: c["iterations"] * g.num_mini_batches, "forget the PPO epochs"),
    ("steps", lambda g, c: c["iterations"] * g.num_ppo_epochs, "forget the mini-batches"),
    ("steps", lambda g, c: c["iterations"] * g.num_mini_batches * g.num_ppo_epochs, "so it gives fewer steps"),
    ("steps", lambda g, c: c["steps"] // g.world_size, "do not change the number of steps"),
    ("steps", lambda g, c: steps(g, c, 0), "You forget the last, smaller batch"),
    ("steps", lambda g, c: steps(g, c, 1), "like the others"),
    (
        "steps",
        lambda g, c: steps(g, c, -(-c["last_batch_size"] * g.num_mini_batches // g.batch_size)),
        "like the others",
    ),
    ("steps", lambda g, c: c["steps"] * int(g.num_train_epochs + 0.75), "in the number of episodes already"),
    ("steps", lambda g, c: c["steps"] * c["gradient_accumulation_steps"], "give one step together"),
    (
        "gradient_accumulation_steps",
        lambda g, c: math.ceil(g.batch_size / g.num_mini_batches / g.per_device_train_batch_size),
        "the processes share a mini-batch",
    ),
    (
        "gradient_accumulation_steps",
        lambda g, c: math.ceil(g.batch_size / g.world_size / g.per_device_train_batch_size),
        "not the whole batch",
    ),
    (
        "gradient_accumulation_steps",
        lambda g, c: max(1, g.batch_size // g.num_mini_batches // g.world_size // g.per_device_train_batch_size),
        "smaller micro-batch. Round up",
    ),
    (
        "gradient_accumulation_steps",
        lambda g, c: g.batch_size / g.num_mini_batches / g.world_size / g.per_device_train_batch_size,
        "Episodes and micro-batches are whole",
    ),
    (
        "gradient_accumulation_steps",
        lambda g, c: math.ceil(
            c["last_batch_size"] / g.num_mini_batches / g.world_size / g.per_device_train_batch_size
        ),
        "Count for one of full size",
    ),
    ("steps", lambda g, c: 7, "Count a smaller run by hand"),
]


@one_text
@pytest.mark.parametrize("count, formula, message", WRONG_COUNTS, ids=[row[2] for row in WRONG_COUNTS])
def test_wrong_counts(script, count, formula, message):
    def wrong(**given):
        counts = count_run(given)
        return counts | {count: formula(SimpleNamespace(**given), counts)}

    fails("1", f"{count}: ", count_run=wrong)
    fails("1", message, count_run=wrong)


@one_text
def test_counts_that_are_no_dict(script):
    fails("1", "Your function returns nothing", count_run=lambda **given: None)
    fails("1", "Return a dict. You return tuple", count_run=lambda **given: (1960, 31, 40, 31, 1))
    fails("1", "no key 'last_batch_size'", count_run=lambda **given: dict(episodes=1960, iterations=31))


# ================================== 2  sampling by the inverse transform ====================================
def cumulative(log_p):
    return log_p.double().exp().cumsum(-1)


def search(cumulative, uniforms, right=True):
    return torch.searchsorted(cumulative, uniforms[:, None].contiguous(), right=right).squeeze(1)


def scaled(log_p, uniforms):
    return uniforms * cumulative(log_p)[:, -1]


def picked_log_p(log_p, uniforms):
    return log_p.gather(1, search(cumulative(log_p), uniforms)[:, None]).squeeze(1)


WRONG_TOKENS = {
    "does not use the random number": lambda log_p, u: log_p.argmax(-1),
    "-1 is not a token": lambda log_p, u: search(cumulative(log_p), u) - 1,
    "random number of the first row": lambda log_p, u: search(cumulative(log_p), u[:1].expand(len(u))),
    "Go from left to right": lambda log_p, u: log_p.shape[1] - 1 - search(cumulative(log_p.flip(-1)), u),
    "probabilities of the first row": lambda log_p, u: search(cumulative(log_p[:1].repeat(len(log_p), 1)), u),
    "Add up along each row": lambda log_p, u: search(log_p.double().exp().cumsum(0), u),
    "First take the exponential of each": lambda log_p, u: search(log_p.double().cumsum(-1), u),
    "search in the probabilities themselves": lambda log_p, u: search(log_p.double().exp(), u),
    "You leave it out": lambda log_p, u: search(cumulative(log_p) - log_p.double().exp(), u),
    "You pick token 0 in every row": lambda log_p, u: (log_p.double().cumsum(-1) > u[:, None]).int().argmax(-1),
    "You return the probability": lambda log_p, u: picked_log_p(log_p, u).exp(),
    "You return the log-probability": lambda log_p, u: picked_log_p(log_p, u),
    "because a token is an index": lambda log_p, u: search(cumulative(log_p), scaled(log_p, u)).float(),
    "You add up in float32": lambda log_p, u: search(log_p.exp().cumsum(-1), u * log_p.exp().sum(-1)),
    "You pick no token": lambda log_p, u: torch.tensor(
        [token for token in search(cumulative(log_p), u).tolist() if token < log_p.shape[1]]
    ),
    "no random numbers of your own": lambda log_p, u: (
        search(cumulative(log_p), torch.rand_like(u)) if len(u) == 1000 else search(cumulative(log_p), u)
    ),
    "a token of probability 0. The": lambda log_p, u: search(cumulative(log_p), scaled(log_p, u), right=False),
    "You pick token 3": lambda log_p, u: search(cumulative(log_p), u),
    "You pick the last token": lambda log_p, u: search(cumulative(log_p), u).clamp(max=log_p.shape[1] - 1),
    "You pick the first token": lambda log_p, u: (cumulative(log_p) > u[:, None]).int().argmax(-1),
    "You return list": lambda log_p, u: search(cumulative(log_p), u).tolist(),
    "Yours has the shape [4, 1]": lambda log_p, u: search(cumulative(log_p), u)[:, None],
    "how often each token": lambda log_p, u: search(cumulative(log_p), u) * (len(u) < 1000),
}


@one_text
@pytest.mark.parametrize("message", WRONG_TOKENS)
def test_wrong_tokens(script, message):
    fails("2", message, pick_tokens=WRONG_TOKENS[message])


# ================================ 3  log-probabilities of a padded batch ====================================
def padded_logprobs(
    model, prompts, prompt_mask, completions, lengths, temperature, mask_is_given=True, positions="mask", late=0
):
    """Prompts and completions in one row. The last three arguments make a mistake each."""
    completion_mask = torch.arange(completions.shape[1]) < lengths[:, None]
    tokens = torch.cat([prompts, completions], 1)
    mask = torch.cat([prompt_mask, completion_mask], 1)
    settings = {}
    if mask_is_given:
        settings["attention_mask"] = mask
    if positions == "mask":
        settings["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    first = prompts.shape[1] - 1 + late
    logits = model(tokens, **settings).logits[:, first : first + completions.shape[1]] / temperature
    log_p = torch.log_softmax(logits, -1).gather(-1, completions[:, :, None]).squeeze(-1)
    return log_p * completion_mask


def one_row_at_a_time(model, prompts, prompt_mask, completions, lengths, temperature):
    rows = zip(prompts.split(1), prompt_mask.split(1), completions.split(1), lengths.split(1))
    return torch.cat([padded_logprobs(model, *row, temperature) for row in rows])


def without_eos(model, prompts, prompt_mask, completions, lengths, temperature):
    """The mask is made from the token ids. Padding is the EOS, so the EOS is dropped."""
    log_p = padded_logprobs(model, prompts, prompt_mask, completions, lengths, temperature)
    return log_p * (completions != TESTS.EOS)


def all_columns(model, prompts, prompt_mask, completions, lengths, temperature):
    lengths = torch.full_like(lengths, completions.shape[1])
    return padded_logprobs(model, prompts, prompt_mask, completions, lengths, temperature)


def with_switch(**switch):
    return lambda *inputs: padded_logprobs(*inputs, **switch)


def at_temperature(change):
    return lambda *inputs: padded_logprobs(*inputs[:-1], change(inputs[-1]))


def token_logprobs(logits, picks, temperature):
    return torch.log_softmax(logits, -1).gather(-1, picks).squeeze(-1)


def right_mask(prompts, prompt_mask, completions, inside):
    return torch.cat([prompt_mask, inside], 1)


def mask_of_ids(prompts, prompt_mask, completions, inside):
    return (torch.cat([prompts, completions], 1) != TESTS.EOS).long()


def mask_of_prompts(prompts, prompt_mask, completions, inside):
    return torch.cat([prompt_mask, 0 * completions], 1)


def in_steps(mask=right_mask, positions_from=right_mask, change=lambda positions: positions, finish=token_logprobs):
    """An answer whose steps can be replaced: the model's mask, the positions, and what is made of the logits."""

    def completion_logprobs(model, prompts, prompt_mask, completions, lengths, temperature):
        inside = torch.arange(completions.shape[1]) < lengths[:, None]
        inputs = (prompts, prompt_mask, completions, inside)
        positions = change((positions_from(*inputs).cumsum(1) - 1).clamp(min=0))
        tokens = torch.cat([prompts, completions], 1)
        logits = model(tokens, attention_mask=mask(*inputs), position_ids=positions).logits
        logits = logits[:, prompts.shape[1] - 1 : -1] / temperature
        return finish(logits, completions[:, :, None], temperature) * inside

    return completion_logprobs


def restarted(positions):
    """The completions begin with position 0. They have 3 columns."""
    return torch.cat([positions[:, :-3], torch.arange(3).expand(len(positions), 3)], 1)


def times(factors):
    return lambda *inputs: padded_logprobs(*inputs) * torch.tensor(factors)


def after_end(value):
    def completion_logprobs(*inputs):
        inside = torch.arange(inputs[3].shape[1]) < inputs[4][:, None]
        return padded_logprobs(*inputs).masked_fill(~inside, value)

    return completion_logprobs


def in_place_completions(model, prompts, prompt_mask, completions, *rest):
    result = padded_logprobs(model, prompts, prompt_mask, completions, *rest)
    completions += 1
    return result


def in_place_lengths(model, prompts, prompt_mask, completions, lengths, temperature):
    lengths -= 1
    return padded_logprobs(model, prompts, prompt_mask, completions, lengths, temperature)


def picked(logits, picks):
    return logits.gather(-1, picks).squeeze(-1)


WRONG_LOGPROBS = [
    ("The mask comes from the token ids", in_steps(mask_of_ids, mask_of_ids)),
    ("The mask comes from the token ids", in_steps(mask_of_ids)),
    ("The mask hides the completion", in_steps(mask_of_prompts)),
    ("Your positions begin with 1", in_steps(change=lambda positions: positions + 1)),
    ("They must go on there", in_steps(change=restarted)),
    ("You return logits", in_steps(finish=lambda logits, picks, t: picked(logits, picks))),
    ("the largest log-probability", in_steps(finish=lambda z, picks, t: z.log_softmax(-1).amax(-1))),
    ("Divide the logits, before", in_steps(finish=lambda z, p, t: picked((z * t).log_softmax(-1), p) / t)),
    ("the temperature twice", in_steps(finish=lambda z, p, t: picked(z.log_softmax(-1), p) / t)),
    ("First try one row", in_steps(finish=lambda z, p, t: picked(z.log_softmax(1), p))),
    ("one position too early", with_switch(late=-1)),
    ("The last token of each", times([[1.0, 1, 0], [0, 0, 0], [1, 0, 0]])),
    ("The first token of each completion gets 0", times([0.0, 1, 1])),
    ("The first token of each completion is right", times([1.0, 2, 3])),
    ("The first row is right", times([[1.0], [2], [3]])),
    ("after the end of a completion", after_end(-math.inf)),
    ("after the end of a completion", after_end(math.nan)),
    ("You change completions in place", in_place_completions),
    ("You change lengths in place", in_place_lengths),
    ("You return list", lambda *inputs: padded_logprobs(*inputs).tolist()),
    ("The positions count the padding", with_switch(positions="columns")),
    ("Give the model a mask", with_switch(positions="columns", mask_is_given=False)),
    ("Give the model a mask", with_switch(mask_is_given=False)),
    ("one position too late", with_switch(late=1)),
    ("You forget the temperature", at_temperature(lambda temperature: 1.0)),
    ("It divides them", at_temperature(lambda temperature: 1 / temperature)),
    ("The EOS gets 0", without_eos),
    ("after the end of a completion", all_columns),
    ("You return probabilities", lambda *inputs: padded_logprobs(*inputs).exp() * (padded_logprobs(*inputs) != 0)),
    ("The sign is wrong", lambda *inputs: -padded_logprobs(*inputs)),
    ("no gradient", lambda *inputs: padded_logprobs(*inputs).detach()),
    ("the model runs 3 times", one_row_at_a_time),
    ("Yours has the shape [3]", lambda *inputs: padded_logprobs(*inputs).sum(1)),
]


@one_text
@pytest.mark.parametrize("message, wrong", WRONG_LOGPROBS, ids=[row[0] for row in WRONG_LOGPROBS])
def test_wrong_logprobs(script, message, wrong):
    fails("3", message, completion_logprobs=wrong)


# ============================================= 4  advantages ================================================
def leave_one_out(rewards, k):
    groups = rewards.view(-1, k)
    return groups - (groups.sum(1, keepdim=True) - groups) / (k - 1)


def normalized(scores, k, correction=1, epsilon=1e-4):
    groups = scores.view(-1, k)
    return (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True, correction=correction) + epsilon)


def interleaved(function):
    """The groups are the columns."""
    return lambda rewards, k: function(rewards.view(k, -1).t().flatten(), k).view(-1, k).t().flatten()


def centred(scores, k):
    return scores.view(-1, k) - scores.view(-1, k).mean(1, keepdim=True)


def deviation(scores, k):
    return scores.view(-1, k).std(1, keepdim=True) + 1e-4


WRONG_LEAVE_ONE_OUT = {
    "You include the episode itself": lambda r, k: centred(r, k).flatten(),
    "There are k - 1 of them": lambda r, k: (
        r.view(-1, k) - (r.view(-1, k).sum(1, keepdim=True) - r.view(-1, k)) / k
    ).flatten(),
    "You return the baselines": lambda r, k: r - leave_one_out(r, k).flatten(),
    "The sign is wrong": lambda r, k: -leave_one_out(r, k).flatten(),
    "You mix the groups": interleaved(leave_one_out),
    "others of the whole batch": lambda r, k: leave_one_out(r, len(r)).flatten(),
    "mean of the whole batch": lambda r, k: r - r.mean(),
    "Yours has the shape [2, 3]": leave_one_out,
    "Compute the first wrong number by hand": lambda r, k: r**2,
}
WRONG_NORMALIZED = {
    "You use the biased deviation": lambda s, k: normalized(s, k, correction=0).flatten(),
    "You divide by the variance": lambda s, k: (centred(s, k) / deviation(s, k) ** 2).flatten(),
    "You do not divide": lambda s, k: centred(s, k).flatten(),
    "You do not subtract": lambda s, k: (s.view(-1, k) / deviation(s, k)).flatten(),
    "You subtract the mean of the others": lambda s, k: (leave_one_out(s, k) / deviation(s, k)).flatten(),
    "You mix the groups": interleaved(normalized),
    "deviation of the whole batch": lambda s, k: (centred(s, k) / (s.std() + 1e-4)).flatten(),
    "mean and deviation of the whole": lambda s, k: (s - s.mean()) / (s.std() + 1e-4),
    "you divide 0 by 0": lambda s, k: normalized(s, k, epsilon=0).flatten(),
}


@one_text
@pytest.mark.parametrize("message", WRONG_LEAVE_ONE_OUT)
def test_wrong_leave_one_out_advantages(script, message):
    fails("4a", message, leave_one_out_advantages=WRONG_LEAVE_ONE_OUT[message])


@one_text
@pytest.mark.parametrize("message", WRONG_NORMALIZED)
def test_wrong_group_normalized_advantages(script, message):
    fails("4b", message, group_normalized_advantages=WRONG_NORMALIZED[message])


# ============================================== what a student sees =========================================
def exercises(*words, folder=HERE):
    """`pytest docs/exercises` with some words, as a program of its own. Returns its exit status and what it printed."""
    command = [sys.executable, "-m", "pytest", str(FOLDER), *map(str, words)]
    program = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return program.returncode, program.stdout + program.stderr


@one_text
def test_the_command_of_the_page(script):
    """Every exercise is right with the solutions."""
    command = ("docs/exercises", "--answer", "tests/exercise_solutions.py")
    status, output = exercises(*command[1:])
    assert status == 0, output
    assert len(re.findall(r"^exercise .* right$", output, re.M)) == len(PARTS) == 9


ANSWERS = """
import torch
from answers import *

def pick_tokens(log_p, uniforms):
    return log_p.argmax(-1)

def leave_one_out_advantages(rewards, k):
    groups = rewards.view(-1, k)
    return (groups - (groups.sum(1, keepdim=True) - groups) / (k - 1)).flatten()

def clipped_loss(logprobs, old_logprobs, advantages, cliprange):
    return torch.nn.Linear(7, 6)(logprobs)
"""


def check_report(output):
    """One line for each exercise, in order. One exercise does not hide another."""
    lines = re.findall(r"^exercise (\S+) .*?  +(.*)$", output, re.M)
    assert lines == [
        ("1", "not written yet"),
        ("2", "wrong"),
        ("3", "not written yet"),
        ("4a", "right"),
        ("4b", "not written yet"),
        ("5a", "wrong"),
        ("5b", "wrong"),
        ("6", "not written yet"),
        ("7", "not written yet"),
    ]
    assert "You take the most likely token" in output
    assert "RuntimeError: " in output and "in clipped_loss" in output  # Python's own message
    assert "site-packages" not in output  # but not the lines of libraries
    assert len(output.splitlines()) < 60


@one_text
@pytest.mark.parametrize("words", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["", "xdist"])
def test_the_report(script, tmp_path, words):
    """Some answers are right, some wrong, and some not written. The file is in another folder."""
    (tmp_path / "my_answers.py").write_text(ANSWERS)
    status, output = exercises("--answer", "my_answers.py", *words, folder=tmp_path)
    assert status == 1
    check_report(output)


@one_text
def test_without_an_answer_the_template_is_tested(script):
    status, output = exercises()
    assert status == 1 and output.count("not written yet") == len(PARTS) + 1
    assert "cp docs/exercises/answers.py my_answers.py" in output


@one_text
def test_a_file_that_python_cannot_read(script, tmp_path):
    """There is one message, which shows the line."""
    (tmp_path / "broken.py").write_text("x = 1\ndef (:\n")
    status, output = exercises("--answer", "broken.py", folder=tmp_path)
    assert status == 4 and "line 2" in output and "SyntaxError" in output and "INTERNAL" not in output
    status, output = exercises("--answer", "missing.py", folder=tmp_path)
    assert status == 4 and "no such Python file" in output and "INTERNAL" not in output
