"""The tests of the exercises in docs/exercises/README.md.

Each test gives your function a few small numbers, and compares its answer with the right one. If
your answer is one that a typical mistake gives, the message names the mistake. It knows only your
numbers, and does not read your code.
"""

import copy

import pytest
import torch


# ==================================== how answers are compared ====================================
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
    """True if they have the same shape, and the same numbers up to rounding."""
    answer, value = answer.detach().double(), value.double()
    if answer.shape != value.shape:
        return False
    return torch.allclose(answer, value, rtol=1e-4, atol=2e-4, equal_nan=True)


def check(answer, right, mistakes: dict, **given):
    """Fail unless a tensor is right.

    mistakes: for each message the wrong answer that it is for, or a list of several
    """
    right = torch.as_tensor(right).float()
    if is_close(answer, right):
        return
    if answer.shape != right.shape:
        shapes = [list(right.shape), list(answer.shape)]
        stop("Return a tensor of the shape {}. Yours has the shape {}.".format(*shapes), **given)
    message = "This is not right. Compute the first wrong number by hand, and compare."
    for about, wrong in (mistakes | {"The sign is wrong.": -right}).items():
        several = torch.as_tensor(wrong).reshape(-1, *right.shape)
        if any(is_close(answer, one) for one in several):
            message = about
            break
    stop(message, **given, **{"your answer": answer, "right": right})


# ============================== 1  sampling by the inverse transform ==============================
def pick(answer, p, uniforms):
    uniforms = torch.tensor(uniforms, dtype=torch.float64)
    return call(answer.pick_tokens, p=torch.tensor(p), uniforms=uniforms)


def test_1_sampling_by_the_inverse_transform(answer):
    p = [[0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.6, 0.1, 0.3]]
    uniforms = [0.75, 0.1, 0.5, 0.65]
    many = [pick(answer, p * 100, uniforms * 100) for _ in range(2)]
    if not torch.equal(*many):
        stop("The same input gives different tokens. Use no random numbers of your own.")
    check(
        pick(answer, p, uniforms),
        [2, 0, 0, 1],
        {
            "You take the most likely token, and do not use the random number.": [1, 1, 0, 0],
            "You are one token too far to the left: -1 is not a token.": [1, -1, -1, 0],
            "You add up over the rows. Add up along each row, over the vocabulary.": [
                [1, 0, 0, 0],
                [3, 0, 0, 0],
            ],
            "You search in the probabilities themselves. First add them up along each row.": [
                [3, 0, 3, 3],
                [3, 0, 2, 3],
                [1, 0, 2, 2],
            ],
            "The cumulative probability of a token includes its own. You leave it out.": [
                [3, 1, 1, 2],
                [0, 1, 1, 2],
                [2, 1, 1, 1],
            ],
        },
        p=p,
        uniforms=uniforms,
    )

    message = "You pick a token of probability 0."
    message += " Its cumulative probability is not above the random number."
    p = [[0.0, 0.5, 0.5]]
    check(pick(answer, p, [0.0]), [1], {message: [0]}, p=p, uniforms="[0]")

    message = "By rounding, the sum of the probabilities is below 1."
    message += " Multiply the random number by it, in float64."
    shown = dict(p="[[0.3, 0.6999993, 0]]", uniforms="[0.999999999]")
    picked = pick(answer, [[0.3, 0.6999993, 0.0]], [1 - 1e-9])
    check(picked, [1], {message: [[3], [2], [0]]}, **shown)

    message = "You add up in float32, so 1 + 0.000000001 is 1."
    message += " First turn p into float64: p.double()."
    shown = dict(p="[[1, 0.000000001]]", uniforms="[0.9999999999]")
    check(pick(answer, [[1.0, 1e-9]], [1 - 1e-10]), [1], {message: [0]}, **shown)


# ========================================= 2  advantages ==========================================
GROUPS = torch.tensor([1.0, 2, 6, 0, 3, 0])  # two groups of three
MINUS_MEAN = torch.tensor([-2.0, -1, 3, -1, 2, -1])  # minus the mean of the group
DEVIATION = torch.tensor([7.0, 7, 7, 3, 3, 3]).sqrt()  # of the group
MIXED = "You mix the groups. The first k episodes are a group: a row of view(-1, k)."
BATCH = "You compare with the whole batch. Compare with the episode's own group."


def advantages_of(function, rewards, k):
    try:
        return call(function, rewards=rewards, k=k)
    except RuntimeError as error:
        if "must match the size" not in str(error):
            raise
        stop(
            "These shapes do not fit. Write keepdim=True, so that a mean has the shape [groups, 1]."
        )


def test_2a_leave_one_out_advantages(answer):
    right = 1.5 * MINUS_MEAN
    check(
        advantages_of(answer.leave_one_out_advantages, GROUPS, 3),
        right,
        {
            "You include the episode itself in its baseline. Take the mean of the others.": (
                MINUS_MEAN
            ),
            "You divide the sum of the others by k. There are k - 1 of them.": (
                GROUPS - (GROUPS - right) * 2 / 3
            ),
            "You return the baselines. Subtract them from the rewards.": GROUPS - right,
            MIXED: [
                [-3.5, 2, 4, -1, -0.5, -1],
                [-3.5, 4, -0.5, 2, -1, -1],
                [0, 1.5, 6, -3, 3, -1.5],
                [-1, 1, 6, -6, 3, -3],
            ],
            BATCH: torch.stack([GROUPS - 2, (GROUPS - 2) * 6 / 5]),
        },
        rewards=GROUPS,
        k=3,
    )
    rewards = torch.tensor([1.0, 3, 0, 4])
    advantages = advantages_of(answer.leave_one_out_advantages, rewards, 2)
    check(advantages, [-2, 2, -4, 4], {}, rewards=rewards, k=2)


def test_2b_group_normalized_advantages(answer):
    right = MINUS_MEAN / DEVIATION
    check(
        advantages_of(answer.group_normalized_advantages, GROUPS, 3),
        right,
        {
            "You use the biased variance. Divide the squares by k - 1, not by k.": right * 1.5**0.5,
            "You do not divide by the deviation.": MINUS_MEAN,
            MIXED: [
                [-0.9271, 1.1546, 1.0596, -0.5773, -0.1324, -0.5773],
                [-0.9271, 1.0596, -0.1324, 1.1546, -0.5773, -0.5773],
                [-0.7071, 0.7071, 0.7071, -0.7071, 0.7071, -0.7071],
            ],
            BATCH: torch.stack([MINUS_MEAN, GROUPS - 2]) / 5.2**0.5,
        },
        scores=GROUPS,
        k=3,
    )
    # With k = 2, the deviations here are 0 and 7.07e-5. So it matters what is added, and where.
    scores = torch.tensor([0.5, 0.5, 0, 1e-4])
    result = advantages_of(answer.group_normalized_advantages, scores, 2)
    if result.isnan().any():
        stop("The scores of a group are equal, so you divide 0 by 0. Add 1e-4 to the deviation.")
    mistakes = {
        "Add 1e-4 to the deviation itself: not less, not inside the root, and no clamp.": [
            [0, 0, -0.7071, 0.7071],
            [0, 0, -0.5, 0.5],
            [0, 0, -0.4082, 0.4082],
            [0, 0, -0.005, 0.005],
        ]
    }
    check(result, [0, 0, -0.2929, 0.2929], mistakes, scores=scores, k=2)


# ====================================== 3  the clipped loss =======================================
ADVANTAGES = torch.tensor([2.0, 2, 2, -2, -2, -2])
RATIOS = torch.tensor([0.5, 1, 1.5, 0.5, 1, 1.5])
OLD_LOGPROBS = torch.tensor([-1.0, -2, -3, -1, -2, -3])


def loss_of(ratios, low=0.8, high=1.2, worse=torch.maximum):
    """The losses of other ratios, with other bounds, or with another choice of the two losses."""
    return worse(-ADVANTAGES * ratios, -ADVANTAGES * ratios.clamp(low, high))


def test_3_clipped_loss_and_its_gradient(answer):
    logprobs = OLD_LOGPROBS + RATIOS.log()
    given = dict(old_logprobs=OLD_LOGPROBS, advantages=ADVANTAGES)
    shown = dict(ratios=RATIOS, advantages=ADVANTAGES)
    check(
        call(answer.clipped_loss, logprobs=logprobs, **given, cliprange=0.2),
        [-1, -2, -2.4, 1.6, 2, 3],
        {
            "You take the smaller of the two losses. The clipped loss is the larger one.": (
                loss_of(RATIOS, worse=torch.minimum)
            ),
            "You always clip. Take the larger loss. (clamp_ changes the ratio. Use clamp.)": (
                -ADVANTAGES * RATIOS.clamp(0.8, 1.2)
            ),
            "You never clip.": -ADVANTAGES * RATIOS,
            "You forget the minus in front of A, in both of the losses.": (
                -loss_of(RATIOS, worse=torch.minimum)
            ),
            "You clip at -c and c. Clip at 1 - c and 1 + c.": loss_of(RATIOS, -0.2, 0.2),
            "The ratio is upside down. It is the new probability by the old one.": (
                loss_of(1 / RATIOS)
            ),
            "The ratio is the exponential of this difference.": loss_of(RATIOS.log()),
        },
        **shown,
        cliprange=0.2,
    )
    check(
        call(answer.clipped_loss, logprobs=logprobs, **given, cliprange=0.4),
        loss_of(RATIOS, 0.6, 1.4),
        {"You always clip at 0.8 and 1.2. Use the argument cliprange.": loss_of(RATIOS)},
        **shown,
        cliprange=0.4,
    )
    logprobs.requires_grad_()
    losses = answer.clipped_loss(logprobs, OLD_LOGPROBS, ADVANTAGES, 0.2)
    gradient = None
    if losses.requires_grad:
        [gradient] = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True)
    if gradient is None:
        message = "The losses are right. But they have no gradient."
        message += " These cut it off: detach, item, tolist, float, torch.tensor, no_grad."
        stop(message)
    compared = "the derivative of each loss by its log-probability"
    check(gradient, [-1, -2, 0, 0, 2, 3], {}, **shown, cliprange=0.2, compared=compared)


# ================================= 4  GAE with rewards at the end =================================
def test_4_gae_with_rewards_at_the_end(answer):
    given = dict(
        scores=torch.tensor([4.0]),
        values=torch.tensor([[1.0, 2, 3]]),
        lengths=torch.tensor([3]),
        gamma=0.5,
        lam=0.8,
    )
    right = torch.tensor([[-0.04, -0.1, 1]])
    check(
        call(answer.gae_from_scores, **given),
        right,
        {
            "You forget lam. Multiply A_{t+1} by gamma * lam.": [0, 0, 1],
            "You forget gamma in front of A_{t+1}. It is gamma * lam.": [0.24, 0.3, 1],
            "You forget gamma in delta. It multiplies the next value.": [1.56, 1.4, 1],
            "You return the deltas. Add gamma * lam * A_{t+1} to each.": [0, -0.5, 1],
            "These are the returns. Subtract the values from them.": right + given["values"],
            "You return Monte Carlo returns. Use V_t and V_{t+1} in delta.": [
                [1, 2, 4],
                [0.64, 1.6, 4],
            ],
            "You use the last value twice. After the last token it is 0.": [0.2, 0.5, 2.5],
        },
        **given,
    )

    given["scores"] = torch.tensor([4.0, 1])
    given["values"] = torch.tensor([[1.0, 2, 3, 9], [2, 9, 9, 9]])
    given["lengths"] = torch.tensor([3, 1])
    right = torch.tensor([[-0.04, -0.1, 1, 0], [-1, 0, 0, 0]])
    result = call(answer.gae_from_scores, **given)
    is_token = right != 0
    if result.shape == right.shape:
        check(
            result[is_token],
            right[is_token],
            {
                "The score is in the last column. Put it at the last token.": [
                    [-0.424, -1.06, -1.4, -1.936],
                    [-0.68, -1.7, -3, -2],
                    [-0.28, -0.7, -0.5, -0.532],
                ],
                "You read the value after the end of a completion. Put 0 in its place.": [
                    [0.104, 0.26, 1.9, 0.404],
                    [0.68, 1.7, 5.5, 3.5],
                ],
            },
            **given,
            compared="the three tokens of the first row, and the one of the second",
        )
    message = "The tokens are right. But after the end of a completion the answer must be 0."
    check(result, right, {message: result}, **given)
