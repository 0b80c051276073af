"""The exercises of docs/exercises: the solutions pass, and each typical wrong answer fails with the message for it."""

import inspect
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import exercise_solutions
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


# =========================================== 5  the clipped loss ============================================
def both(ratio, advantages, clip):
    return -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)


WRONG_LOSSES = {
    "You take the smaller": lambda new, old, a, c: torch.minimum(*both((new - old).exp(), a, c)),
    "This is maximized": lambda new, old, a, c: -torch.maximum(*both((new - old).exp(), a, c)),
    "You always clip. Take": lambda new, old, a, c: both((new - old).exp(), a, c)[1],
    "You never clip": lambda new, old, a, c: both((new - old).exp(), a, c)[0],
    "The ratio is upside down": lambda new, old, a, c: torch.maximum(*both((old - new).exp(), a, c)),
    "The ratio is the exponential": lambda new, old, a, c: torch.maximum(*both(new - old, a, c)),
    "Your ratio is always 1": lambda new, old, a, c: torch.maximum(*both((new - new.detach()).exp(), a, c)),
    "You return the mean": lambda new, old, a, c: torch.maximum(*both((new - old).exp(), a, c)).mean(),
    "You return the sum": lambda new, old, a, c: torch.maximum(*both((new - old).exp(), a, c)).sum(),
    "You forget the minus": lambda new, old, a, c: torch.maximum(*both((new - old).exp(), -a, c)),
    "First multiply both ratios": lambda new, old, a, c: -a * (new - old).exp().clamp(max=1 + c),
    "You clip only at 1 + c": lambda new, old, a, c: torch.maximum(
        -a * (new - old).exp(), -a * (new - old).exp().clamp(max=1 + c)
    ),
    "You clip only at 1 - c": lambda new, old, a, c: torch.maximum(
        -a * (new - old).exp(), -a * (new - old).exp().clamp(min=1 - c)
    ),
    "You clip at -c and c": lambda new, old, a, c: torch.maximum(
        -a * (new - old).exp(), -a * (new - old).exp().clamp(-c, c)
    ),
    "You clip the difference": lambda new, old, a, c: torch.maximum(
        -a * (new - old).exp(), -a * (new - old).clamp(-c, c).exp()
    ),
    "constant, not 0": lambda new, old, a, c: -a * (new - old).exp() * (((new - old).exp() - 1).abs() < c),
    "You divide the log-probabilities": lambda new, old, a, c: torch.maximum(*both(new / old, a, c)),
    "You subtract the mean of the advantages": lambda new, old, a, c: torch.maximum(
        *both((new - old).exp(), a - a.mean(), c)
    ),
    "or divide by their deviation": lambda new, old, a, c: torch.maximum(
        *both((new - old).exp(), (a - a.mean()) / a.std(), c)
    ),
    "Use the argument cliprange": lambda new, old, a, c: torch.maximum(*both((new - old).exp(), a, 0.2)),
    "You return a tuple": lambda new, old, a, c: torch.stack(both((new - old).exp(), a, c)).max(0),
    "You return list": lambda new, old, a, c: list(torch.maximum(*both((new - old).exp(), a, c))),
}
WRONG_GRADIENTS = {
    "Your losses have no gradient": lambda new, old, a, c: torch.maximum(*both((new - old).detach().exp(), a, c)),
    "These cut the gradient off": lambda new, old, a, c: (
        torch.maximum(*both((new - old).exp(), a, c)).detach().requires_grad_()
    ),
    "half of the right one": lambda new, old, a, c: torch.maximum(
        both((new - old).exp(), a, c)[0], both((new - old).exp(), a, c)[1].detach()
    ),
    "You return the mean": WRONG_LOSSES["You return the mean"],
    "You return list": WRONG_LOSSES["You return list"],
    "At ratio 1 your gradient is 0": lambda new, old, a, c: torch.maximum(*both((new - new).exp(), a, c)),
    "less likely": lambda new, old, a, c: -torch.maximum(*both((new - old).exp(), a, c)),
    "must still be corrected": WRONG_LOSSES["You always clip. Take"],
    "You never clip": WRONG_LOSSES["You never clip"],
    "You take the smaller": WRONG_LOSSES["You take the smaller"],
}


@one_text
@pytest.mark.parametrize("message", WRONG_LOSSES)
def test_wrong_losses(script, message):
    fails("5a", message, clipped_loss=WRONG_LOSSES[message])


@one_text
@pytest.mark.parametrize("message", WRONG_GRADIENTS)
def test_wrong_gradients(script, message):
    fails("5b", message, clipped_loss=WRONG_GRADIENTS[message])


# ============================================ 6  one denominator ============================================
def tokens(micro_batches, mask_is_used=True, real_is_used=True):
    """The number of tokens of some micro-batches."""
    total = 0
    for losses, mask, is_real in micro_batches:
        counted = mask if mask_is_used else torch.ones_like(losses)
        total = total + (counted * (is_real[:, None] if real_is_used else 1)).sum()
    return total


def summed(losses, mask, is_real, mask_is_used=True, real_is_used=True):
    return (losses * (mask if mask_is_used else 1) * (is_real[:, None] if real_is_used else 1)).sum()


def by(divide, **switches):
    """An answer: the loss of a micro-batch is its sum, and divide(sum, micro_batch, of_process, everything, W)."""

    def micro_batch_losses(processes):
        everything = [micro_batch for of_process in processes for micro_batch in of_process]
        return [
            [divide(summed(*it, **switches), it, of_process, everything, len(processes)) for it in of_process]
            for of_process in processes
        ]

    return micro_batch_losses


def mean_of_episode_means(total, it, of_process, everything, W):
    losses, mask, is_real = it
    return ((losses * mask).sum(1) / mask.sum(1) * is_real).sum() / sum(x[2].sum() for x in everything) * W


def in_place(processes):
    """The padding of the token losses is set to 0, in the tensors that were given."""
    for of_process in processes:
        for losses, mask, _ in of_process:
            losses *= mask
    return processes


def backward(loss):
    loss.backward(retain_graph=True)
    return loss


WRONG_DENOMINATORS = {
    "You add up the padding": by(lambda s, it, p, all, W: s / tokens(all) * W, mask_is_used=False),
    "You count the padding": by(lambda s, it, p, all, W: s / tokens(all, mask_is_used=False) * W),
    "The padding is in your sum": by(
        lambda s, it, p, all, W: s / tokens(all, mask_is_used=False) * W, mask_is_used=False
    ),
    "number of episodes": by(lambda s, it, p, all, W: s / sum(x[2].sum() for x in all) * W),
    "means of the episodes": by(mean_of_episode_means),
    "You return the sum": by(lambda s, it, p, all, W: s),
    "This is a mean of means": by(lambda s, it, p, all, W: s / tokens([it]).clamp(min=1) / len(p)),
    "This is a sum of means": by(lambda s, it, p, all, W: s / tokens([it]).clamp(min=1)),
    "number of micro-batches": by(lambda s, it, p, all, W: s / tokens(all) * W / len(p)),
    "half of the right one": by(lambda s, it, p, all, W: s / tokens(all)),
    "Each process divides by its own": by(lambda s, it, p, all, W: s / tokens(p)),
    "You add up the repeated episode": by(lambda s, it, p, all, W: s / tokens(all) * W, real_is_used=False),
    "You count the tokens of the repeated": by(lambda s, it, p, all, W: s / tokens(all, real_is_used=False) * W),
    "The repeated episode is in your sum": by(
        lambda s, it, p, all, W: s / tokens(all, real_is_used=False) * W, real_is_used=False
    ),
    "DDP does so already": by(lambda s, it, p, all, W: s / tokens(all) / W),
    "The sign is wrong": by(lambda s, it, p, all, W: -s / tokens(all) * W),
    "You multiply by the number of micro-batches": by(lambda s, it, p, all, W: s / tokens(all) * W * len(p)),
    "Divide by the tokens of all processes": by(lambda s, it, p, all, W: s / tokens(p) * W),
    "its own micro-batch": by(lambda s, it, p, all, W: sum(summed(*x) for x in all) / tokens(all) / len(all) * W),
    "in place of a *= b": lambda processes: RIGHT.micro_batch_losses(in_place(processes)),
    "You change is_real in place": by(lambda s, it, p, all, W: (s / tokens(all) * W, it[2].zero_())[0]),
    "Do not call backward": by(lambda s, it, p, all, W: backward(s / tokens(all) * W)),
    "The operator & takes only": by(lambda s, it, p, all, W: (it[0] * (it[1] & it[2][:, None])).sum()),
    "backward on your loss stops": by(lambda s, it, p, all, W: s * W // tokens(all)),
    "Your function returns nothing": lambda processes: None,
    "You return Tensor": lambda processes: processes[0][0][0].sum(),
    "Yours holds Tensor": lambda processes: [x[0].sum() for p in processes for x in p],
    "Yours is [[loss], [loss]]": lambda processes: [[p[0][0].sum()] for p in processes] * 2,
    "Return a list for each process": lambda processes: [[torch.ones(())]] * 2,
    "one number and with gradient": by(lambda s, it, p, all, W: (s / tokens(all) * W).item()),
}


@one_text
@pytest.mark.parametrize("message", WRONG_DENOMINATORS)
def test_wrong_denominators(script, message):
    fails("6", message, micro_batch_losses=WRONG_DENOMINATORS[message])


# ===================================== 7  GAE with rewards at the end =======================================
def gae(
    scores,
    values,
    lengths,
    gamma,
    lam,
    place=lambda lengths, columns: lengths - 1,
    delta=lambda reward, gamma, value, following: reward + gamma * following - value,
    decay=lambda gamma, lam: gamma * lam,
    after_end=0.0,
    end=lambda values: 0 * values[:, -1],
    keep_rest=False,
    order=reversed,
    next_is_delta=False,
    skipped=0,
):
    """GAE token by token. Every argument after lam makes a mistake."""
    episodes, columns = values.shape
    mask = torch.arange(columns) < lengths[:, None]
    values = torch.where(mask, values, values * after_end)
    rewards = torch.zeros(episodes, columns + 1)
    rewards[torch.arange(episodes), place(lengths, columns)] = scores
    following = torch.cat([values[:, 1:], end(values)[:, None]], 1)
    advantages = torch.zeros(episodes, columns)
    later = torch.zeros(episodes)
    for t in order(range(columns - skipped)):
        now = delta(rewards[:, t], gamma, values[:, t], following[:, t])
        advantages[:, t] = now + decay(gamma, lam) * later
        later = now if next_is_delta else advantages[:, t]
    return advantages if keep_rest else advantages * mask


def score_everywhere(scores, values, lengths, gamma, lam):
    return gae(0 * scores, values, lengths, gamma, lam, delta=lambda r, g, v, f: scores + g * f - v)


def reset_at_the_end(scores, values, lengths, gamma, lam):
    """The recursion begins at the last token, but the value after it is that of the padding."""
    advantages = torch.zeros_like(values)
    for row, (score, length) in enumerate(zip(scores, lengths.tolist())):
        later = 0.0
        for t in reversed(range(length)):
            reward = score if t == length - 1 else 0.0
            following = values[row, t + 1] if t + 1 < values.shape[1] else 0.0
            later = reward + gamma * following - values[row, t] + gamma * lam * later
            advantages[row, t] = later
    return advantages


def forwards(scores, values, lengths, gamma, lam):
    """The loop goes from the first token to the last, and takes what came before for what comes next."""
    advantages = torch.zeros_like(values)
    for row, (score, length) in enumerate(zip(scores, lengths.tolist())):
        following = later = 0.0
        for t in range(length):
            reward = score if t == length - 1 else 0.0
            later = reward + gamma * following - values[row, t] + gamma * lam * later
            following = values[row, t]
            advantages[row, t] = later
    return advantages


def carried_over(scores, values, lengths, gamma, lam):
    """V and A are set to 0 once, not for each episode."""
    advantages = torch.zeros_like(values)
    following = later = 0.0
    for row, (score, length) in enumerate(zip(scores, lengths.tolist())):
        for t in reversed(range(length)):
            reward = score if t == length - 1 else 0.0
            later = reward + gamma * following - values[row, t] + gamma * lam * later
            following = values[row, t]
            advantages[row, t] = later
    return advantages


def in_all_rows(scores, values, lengths, gamma, lam, wide=False):
    """rewards[:, lengths - 1] = scores"""
    episodes, columns = values.shape
    mask = torch.arange(columns) < lengths[:, None]
    rewards = torch.zeros_like(values)
    rewards[:, lengths - 1] = scores[:, None] if wide else scores
    values = torch.cat([values * mask, torch.zeros(episodes, 1)], 1)
    advantages = torch.zeros(episodes, columns + 1)
    for t in reversed(range(columns)):
        delta = rewards[:, t] + gamma * values[:, t + 1] - values[:, t]
        advantages[:, t] = delta + gamma * lam * advantages[:, t + 1]
    return advantages[:, :columns] * mask


def mask_too_long(scores, values, lengths, gamma, lam):
    """The mask has one True too many, and the last token still has the score."""
    longer = (lengths + 1).clamp(max=values.shape[1])
    return gae(scores, values, longer, gamma, lam, place=lambda *_: lengths - 1)


def mask_too_short(scores, values, lengths, gamma, lam):
    return gae(scores, values, lengths - 1, gamma, lam, place=lambda *_: lengths - 1)


def in_last_column(scores, values, lengths, gamma, lam):
    """As a loop over the tokens of an episode would do it: a shorter episode gets no score."""
    return gae(scores * (lengths == values.shape[1]), values, lengths, gamma, lam)


def padding_set_to_0(scores, values, lengths, gamma, lam):
    values *= torch.arange(values.shape[1]) < lengths[:, None]
    return gae(scores, values, lengths, gamma, lam)


def by_the_name_of_values(scores, values, lengths, gamma, lam):
    """advantages = values, in place of a new tensor."""
    values[:] = gae(scores, values.clone(), lengths, gamma, lam)
    return values


def whitened(*inputs):
    advantages = gae(*inputs)
    return (advantages - advantages.mean()) / advantages.std()


def wrong_gae(**mistake):
    return lambda *inputs: gae(*inputs, **mistake)


WRONG_GAE = [
    ("You go from left to right", wrong_gae(order=iter)),
    ("You go from left to right", forwards),
    ("in reverse order", lambda *inputs: gae(*inputs).flip(1)),
    ("The sign is wrong", lambda *inputs: -gae(*inputs)),
    ("You leave out the last token", wrong_gae(skipped=1)),
    ("You leave out the last token", lambda s, v, n, *rest: gae(0 * s, v, n - 1, *rest)),
    ("You leave out the last token", mask_too_short),
    ("You leave out the last token", lambda s, v, n, *rest: gae(s, v, n, *rest) * (torch.arange(v.shape[1]) < n - 1)),
    ("to the token before the last one", wrong_gae(place=lambda lengths, columns: lengths - 2)),
    ("to the token before the last one", lambda s, v, n, *rest: gae(s, v, n - 1, *rest)),
    ("No token gets the score", wrong_gae(place=lambda lengths, columns: lengths)),
    ("You use lam in delta", wrong_gae(delta=lambda r, gamma, value, following: r + 0.8 * following - value)),
    (
        "In delta it is gamma alone",
        wrong_gae(delta=lambda r, gamma, value, following: r + gamma * 0.8 * following - value),
    ),
    ("as the value after the last token", lambda s, v, n, *rest: gae(0 * s, v, n, *rest, end=lambda values: s)),
    ("only for gamma = lam = 1", lambda s, v, n, gamma, lam: gae(s, v, n, 1.0, 1.0)),
    ("You normalize the advantages", whitened),
    ("which cuts off fractions", lambda *inputs: gae(*inputs).long()),
    ("Your function changes its argument values", padding_set_to_0),
    ("Your function changes its argument values", by_the_name_of_values),
    ("V and A of the episode before", carried_over),
    ("into the rows of other episodes", in_all_rows),
    ("into the rows of other episodes", lambda *inputs: in_all_rows(*inputs, wide=True)),
    ("one True too many", mask_too_long),
    ("The score is in the last column", in_last_column),
    ("You forget lam", wrong_gae(decay=lambda gamma, lam: gamma)),
    ("You forget gamma in front", wrong_gae(decay=lambda gamma, lam: lam)),
    ("You forget gamma in delta", wrong_gae(delta=lambda r, gamma, value, following: r + following - value)),
    ("You return the deltas", wrong_gae(decay=lambda gamma, lam: 0)),
    ("You add only the next delta", wrong_gae(next_is_delta=True)),
    ("These are the returns", lambda scores, values, *rest: gae(scores, values, *rest) + values),
    ("The next value is off by one", wrong_gae(delta=lambda r, gamma, value, following: r + gamma * value - value)),
    ("You swap", wrong_gae(delta=lambda r, gamma, value, following: r + gamma * value - following)),
    ("You do not subtract V_t", wrong_gae(delta=lambda r, gamma, value, following: r + gamma * following)),
    ("After the last token the value is 0", wrong_gae(end=lambda values: values[:, -1])),
    ("to every token", score_everywhere),
    ("to the first token", wrong_gae(place=lambda lengths, columns: 0 * lengths)),
    ("The score is in the last column", wrong_gae(place=lambda lengths, columns: columns - 1)),
    ("The score is off by one", wrong_gae(place=lambda lengths, columns: lengths - (lengths == columns).long())),
    ("You read the value after the end", wrong_gae(after_end=1.0)),
    ("You read the value after the end", wrong_gae(after_end=1.0, keep_rest=True)),
    ("You read the value after the end", reset_at_the_end),
    ("after the end of a completion the answer", lambda s, v, n, *rest: gae(s, v, n, *rest) + 9.0 * (v == 9)),
]


@one_text
@pytest.mark.parametrize("message, wrong", WRONG_GAE, ids=[row[0] for row in WRONG_GAE])
def test_wrong_gae(script, message, wrong):
    fails("7", message, gae_from_scores=wrong)


# ============================================== right answers ===============================================
RIGHT = SimpleNamespace(
    count_run=lambda **given: count_run(given),
    pick_tokens=lambda log_p, u: search(cumulative(log_p), scaled(log_p, u)),
    completion_logprobs=padded_logprobs,
    leave_one_out_advantages=lambda rewards, k: leave_one_out(rewards, k).flatten(),
    group_normalized_advantages=lambda scores, k: normalized(scores, k).flatten(),
    clipped_loss=lambda new, old, a, c: (
        -torch.minimum(a * (new - old).exp(), a * (new - old).exp().clamp(1 - c, 1 + c))
    ),
    micro_batch_losses=by(lambda s, it, p, all, W: s / tokens(all) * W),
    gae_from_scores=gae,
)


@one_text
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("answer", [exercise_solutions, RIGHT], ids=["solutions", "plain"])
def test_right_answers_pass(script, answer, part):
    """The functions of the scripts pass. So do the functions of this file, from which the wrong answers are made."""
    PARTS[part](answer)


@one_text
def test_the_template_asks_for_what_the_solutions_give(script):
    """The template has the functions of the solutions. The page shows each with the arguments of the template."""
    functions = dict(inspect.getmembers(TEMPLATE, inspect.isfunction))
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, function in functions.items():
        assert callable(getattr(exercise_solutions, name))
        [shown] = re.findall(rf"^    {name}\(([^)]*)\)", page, re.M)
        assert re.split(r",\s*", shown) == list(inspect.signature(function).parameters)
        with pytest.raises(NotImplementedError):
            function(*inspect.signature(function).parameters)
    assert len(functions) == 8


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
