"""The exercises 5 to 7 of docs/exercises, as in test_exercises.py. And the right answers to all of them pass."""

import inspect
import re
from types import SimpleNamespace

import exercise_solutions
import pytest
import torch
from conftest import one_text
from test_exercises import (
    FOLDER,
    PARTS,
    TEMPLATE,
    count_run,
    cumulative,
    fails,
    leave_one_out,
    normalized,
    padded_logprobs,
    scaled,
    search,
)


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
