"""The tests of the exercises in docs/exercises/README.md.

Each test gives your function a few small numbers, and compares its answer with the right one. If
your answer is one that a typical mistake gives, the message names the mistake. It knows only your
numbers, and does not read your code.
"""

import copy

import pytest
import torch


# ==================================== how answers are compared ====================================
def numbers(text: str) -> torch.Tensor:
    """The tensor of "1 2 / 3 4", which has two rows, or of "1 2", which has one axis."""
    rows = [list(map(float, row.split())) for row in text.split("/")]
    return torch.tensor(rows, dtype=torch.float64).squeeze(0)


def show(value) -> str:
    """A number, or a tensor as a list of short numbers."""
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    if isinstance(value, list):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, float):
        return f"{value + 0.0:.4g}"  # + 0.0: not -0
    return str(value)


def stop(message: str, **shown):
    """Fail with a message, and with the numbers that explain it."""
    width = max(map(len, shown), default=0)
    lines = [f"    {name.ljust(width)}  {show(value)}" for name, value in shown.items()]
    raise pytest.fail.Exception("\n".join([message, *lines]), pytrace=False) from None


def call(function, **given) -> torch.Tensor:
    """The answer for copies of these arguments. It must be a tensor, and may not change them."""
    copies = copy.deepcopy(given)
    answer = function(*copies.values())
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and not torch.equal(copies[name], value):
            stop(f"You change {name} in place. Make a new tensor: write a = a * b, not a *= b.")
    if answer is None:
        stop("Your function returns None. Is there a return at its end?")
    if isinstance(answer, tuple):
        stop("Return a tensor. You return a tuple. torch.max(x, dim) gives one: (values, indices).")
    if not isinstance(answer, torch.Tensor):
        stop(f"Return a tensor. You return {type(answer).__name__}.")
    return answer


def is_close(answer, value) -> bool:
    """True if they have the same numbers up to rounding."""
    answer = answer.detach().double()
    return torch.allclose(answer, value.double(), rtol=1e-4, atol=2e-4, equal_nan=True)


WRONG = "This is not right. Compute the first wrong number by hand, and compare."


def check(answer, right, mistakes: dict, message: str = WRONG, **given):
    """Fail unless a tensor is right.

    mistakes: for each message the wrong answer that it is for, or a row for each of several
    """
    if answer.shape != right.shape:
        shapes = [list(right.shape), list(answer.shape)]
        stop("Return a tensor of the shape {}. Yours has the shape {}.".format(*shapes), **given)
    if is_close(answer, right):
        return
    if is_close(answer, -right):
        message = "The sign is wrong."
    for about, wrong in mistakes.items():
        if any(is_close(answer, one) for one in numbers(wrong).view(-1, *right.shape)):
            message = about
            break
    stop(message, **given, **{"your answer": answer, "right": right})


# ============================== 1  sampling by the inverse transform ==============================
PICKED = [  # p, uniforms, the tokens to pick, and for each message the wrong ones
    (
        "0.2 0.5 0.3 / 0.2 0.5 0.3 / 0.6 0.1 0.3 / 0.6 0.1 0.3",
        "0.75 0.1 0.5 0.65",
        "2 0 0 1",
        {
            "You take the most likely token, and do not use the random number.": "1 1 0 0",
            "You are one token too far to the left: -1 is not a token.": "1 -1 -1 0",
            "You add up over the rows. Add up along each row.": "1 0 0 0 / 3 0 0 0",
            "You search in the probabilities. First add them up.": "3 0 3 3 / 3 0 2 3 / 1 0 2 2",
            "A token's sum includes its own. You leave it out.": "3 1 1 2 / 0 1 1 2 / 2 1 1 1",
        },
    ),
    (
        "0 0.5 0.5",
        "0",
        "1",
        {"A token of probability 0 is picked: its sum is not above the random number.": "0"},
    ),
    (
        "0.3 0.6999993 0",
        "0.999999999",
        "1",
        {"The sum of p is below 1. Multiply the random number by it, in float64.": "3 / 2 / 0"},
    ),
    ("1 0.000000001", "0.9999999999", "1", {"You add up in float32. First: p.double().": "0"}),
]


def test_1_sampling_by_the_inverse_transform(answer):
    for shown_p, shown_uniforms, right, mistakes in PICKED:
        p = torch.atleast_2d(numbers(shown_p)).float()
        uniforms = numbers(shown_uniforms)
        many = dict(p=p.repeat(100, 1), uniforms=uniforms.repeat(100))
        tries = [call(answer.pick_tokens, **many) for _ in range(2)]
        if not torch.equal(*tries):
            stop("The same input gives different tokens. Use no random numbers of your own.")
        picked = call(answer.pick_tokens, p=p, uniforms=uniforms)
        check(picked, numbers(right), mistakes, p=shown_p, uniforms=shown_uniforms)


# ========================================= 2  advantages ==========================================
GROUPS = numbers("1 2 6 0 3 0")  # two groups of three
MIXED = "You mix the groups. The first k episodes are a group: a row of view(-1, k)."
BATCH = "You compare with the whole batch. Compare with the episode's own group."


def advantages_of(function, rewards, k):
    try:
        return call(function, rewards=rewards, k=k)
    except RuntimeError as error:
        if "must match the size" not in str(error):
            raise
        stop("These shapes do not fit. With keepdim=True a mean has the shape [groups, 1].")


def test_2a_leave_one_out_advantages(answer):
    check(
        advantages_of(answer.leave_one_out_advantages, GROUPS, 3),
        numbers("-3 -1.5 4.5 -1.5 3 -1.5"),
        {
            "You include the episode itself in its baseline. Take the mean of the others.": (
                "-2 -1 3 -1 2 -1"
            ),
            "You divide the sum of the others by k. There are k - 1 of them.": (
                "-1.66667 -0.33333 5 -1 3 -1"
            ),
            "You return the baselines. Subtract them from the rewards.": "4 3.5 1.5 1.5 0 1.5",
            MIXED: "-3.5 2 4 -1 -0.5 -1 / -3.5 4 -0.5 2 -1 -1 / 0 1.5 6 -3 3 -1.5 / -1 1 6 -6 3 -3",
            BATCH: "-1 0 4 -2 1 -2 / -1.2 0 4.8 -2.4 1.2 -2.4",
        },
        rewards=GROUPS,
        k=3,
    )
    rewards = numbers("1 3 0 4")
    advantages = advantages_of(answer.leave_one_out_advantages, rewards, 2)
    check(advantages, numbers("-2 2 -4 4"), {}, rewards=rewards, k=2)


def test_2b_group_normalized_advantages(answer):
    check(
        advantages_of(answer.group_normalized_advantages, GROUPS, 3),
        numbers("-0.7559 -0.378 1.1338 -0.5773 1.1546 -0.5773"),
        {
            "You use the biased variance. Divide the squares by k - 1, not by k.": (
                "-0.9258 -0.4629 1.3887 -0.707 1.4141 -0.707"
            ),
            "You do not divide by the deviation.": "-2 -1 3 -1 2 -1",
            MIXED: (
                "-0.9271 1.1546 1.0596 -0.5773 -0.1324 -0.5773 /"
                "-0.9271 1.0596 -0.1324 1.1546 -0.5773 -0.5773 /"
                "-0.7071 0.7071 0.7071 -0.7071 0.7071 -0.7071"
            ),
            BATCH: (
                "-0.8771 -0.4385 1.3156 -0.4385 0.8771 -0.4385 /"
                "-0.4385 0 1.7541 -0.8771 0.4385 -0.8771"
            ),
        },
        scores=GROUPS,
        k=3,
    )
    # With k = 2, the deviations here are 0 and 7.07e-5. So it matters what is added, and where.
    scores = numbers("0.5 0.5 0 0.0001")
    result = advantages_of(answer.group_normalized_advantages, scores, 2)
    if result.isnan().any():
        stop("The scores of a group are equal, so you divide 0 by 0. Add 1e-4 to the deviation.")
    mistakes = {
        "Add 1e-4 to the deviation itself: not less, not inside the root, and no clamp.": (
            "0 0 -0.7071 0.7071 / 0 0 -0.5 0.5 / 0 0 -0.4082 0.4082 / 0 0 -0.005 0.005"
        )
    }
    check(result, numbers("0 0 -0.2929 0.2929"), mistakes, scores=scores, k=2)


# ====================================== 3  the clipped loss =======================================
def test_3_clipped_loss_and_its_gradient(answer):
    ratios = numbers("0.5 1 1.5 0.5 1 1.5")
    advantages = numbers("2 2 2 -2 -2 -2")
    old_logprobs = numbers("-1 -2 -3 -1 -2 -3")
    logprobs = (old_logprobs + ratios.log()).requires_grad_()
    narrow = "-1 -2 -2.4 1.6 2 3"
    for cliprange, right, mistakes in (
        (
            0.2,
            narrow,
            {
                "You take the smaller of the two losses. The clipped loss is the larger one.": (
                    "-1.6 -2 -3 1 2 2.4"
                ),
                "You always clip. Take the larger loss. (clamp_ changes the ratio. Use clamp.)": (
                    "-1.6 -2 -2.4 1.6 2 2.4"
                ),
                "You never clip.": "-1 -2 -3 1 2 3",
                "You forget the minus in front of A, in both of the losses.": (
                    "1.6 2 3 -1 -2 -2.4"
                ),
                "You clip at -c and c. Clip at 1 - c and 1 + c.": "-0.4 -0.4 -0.4 1 2 3",
                "The ratio is upside down. It is the new probability by the old one.": (
                    "-2.4 -2 -1.33333 4 2 1.6"
                ),
                "The ratio is the exponential of this difference.": (
                    "1.38629 0 -0.81093 1.6 1.6 1.6"
                ),
            },
        ),
        (
            0.4,
            "-1 -2 -2.8 1.2 2 3",
            {"You always clip at 0.8 and 1.2. Use the argument cliprange.": narrow},
        ),
    ):
        losses = call(
            answer.clipped_loss,
            logprobs=logprobs.detach(),
            old_logprobs=old_logprobs,
            advantages=advantages,
            cliprange=cliprange,
        )
        shown = dict(ratios=ratios, advantages=advantages, cliprange=cliprange)
        check(losses, numbers(right), mistakes, **shown)
    losses = answer.clipped_loss(logprobs, old_logprobs, advantages, 0.4)
    gradient = None
    if losses.requires_grad:
        [gradient] = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True)
    if gradient is None:
        stop(
            "The losses are right. But they have no gradient. These cut it off: detach, item,"
            " tolist, float, torch.tensor, no_grad."
        )
    compared = "the derivative of each loss by its log-probability"
    check(gradient, numbers("-1 -2 0 0 2 3"), {}, **shown, compared=compared)


# ================================= 4  GAE with rewards at the end =================================
def test_4_gae_with_rewards_at_the_end(answer):
    given = dict(
        scores=numbers("4 1"),
        values=numbers("1 2 3 9 / 2 9 9 9"),
        lengths=torch.tensor([3, 1]),
        gamma=0.5,
        lam=0.8,
    )
    right = numbers("-0.04 -0.1 1 0 / -1 0 0 0")
    result = call(answer.gae_from_scores, **given)
    is_token = right != 0
    if result.shape == right.shape:
        check(
            result[is_token],
            right[is_token],
            {
                "You forget lam. Multiply A_{t+1} by gamma * lam.": "0 0 1 -1",
                "You forget gamma in front of A_{t+1}. It is gamma * lam.": "0.24 0.3 1 -1",
                "You forget gamma in delta. It multiplies the next value.": "1.56 1.4 1 -1",
                "You return the deltas. Add gamma * lam * A_{t+1} to each.": "0 -0.5 1 -1",
                "These are the returns. Subtract the values from them.": "0.96 1.9 4 1",
                "You return Monte Carlo returns. Use V_t and V_{t+1} in delta.": (
                    "1 2 4 1 / 0.64 1.6 4 1"
                ),
                "You use the last value twice. After the last token it is 0.": "0.2 0.5 2.5 0",
                "The score is in the last column. Put it at the last token.": (
                    "-0.424 -1.06 -1.4 -1.936 / -0.68 -1.7 -3 -2 / -0.28 -0.7 -0.5 -0.532"
                ),
                "You read the value after the end of a completion. Put 0 in its place.": (
                    "0.104 0.26 1.9 0.404 / 0.68 1.7 5.5 3.5"
                ),
            },
            **given,
            compared="the three tokens of the first row, and the one of the second",
        )
    message = "The tokens are right. But after the end of a completion the answer must be 0."
    check(result, right, {}, message, **given)
