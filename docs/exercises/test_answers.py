"""The tests of the exercises in docs/exercises/README.md.

Each test gives your function a few small numbers, and compares its answer with the right one. If
your answer is one that a typical mistake gives, the message names the mistake. It knows only your
numbers, and does not read your code. For a new mistake, add a message with its wrong answer.
"""

import copy
import math
from functools import partial

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


def call(function, **given):
    """The answer for copies of these arguments. It may not change them."""
    copies = copy.deepcopy(given)
    answer = function(*copies.values())
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and not torch.equal(copies[name], value):
            stop(
                f"You change {name} in place. Make a new tensor: write a = a * b, not a *= b.",
                **{"before the call": value, "after the call": copies[name]},
            )
    return answer


def is_close(answer, value) -> bool:
    """True if they have the same shape, and the same numbers up to rounding."""
    answer, value = answer.detach().double(), value.double()
    if answer.shape != value.shape:
        return False
    return torch.allclose(answer, value, rtol=1e-4, atol=2e-4, equal_nan=True)


def check_type(answer, **given):
    """Fail unless the answer is a tensor."""
    if answer is None:
        stop("Your function returns None. Is there a return at its end?", **given)
    if isinstance(answer, tuple):
        stop("Return a tensor. You return a tuple. torch.max(x, dim) gives one: (values, indices).")
    if not isinstance(answer, torch.Tensor):
        stop(f"Return a tensor. You return {type(answer).__name__}.", **given)


def check(answer, right, mistakes: dict, **given):
    """Fail unless a tensor is right.

    mistakes: for each message the wrong answer that it is for, or a list of several
    """
    check_type(answer, **given)
    right = torch.as_tensor(right).float()
    if is_close(answer, right):
        return
    message = "This is not right. Compute the first wrong number by hand, and compare."
    if answer.shape != right.shape:
        shapes = [list(right.shape), list(answer.shape)]
        message = "Return a tensor of the shape {}. Yours has the shape {}.".format(*shapes)
    everywhere = {
        "The sign is wrong.": -right,
        "You return the mean. Return one number for each.": right.mean(),
        "You return the sum. Return one number for each.": right.sum(),
    }
    for about, wrong in (mistakes | everywhere).items():
        wrong = torch.as_tensor(wrong)
        rows = wrong.reshape(-1, *right.shape) if wrong.dim() else [wrong]
        if any(is_close(answer, row) for row in rows):
            message = about
            break
    stop(message, **given, **{"your answer": answer, "right": right})


AFTER_THE_END = "The tokens are right. But after the end of a completion the answer must be 0."


# ===================================== 1  the counts of a run =====================================
RUN = dict(
    num_prompts=490,
    num_train_epochs=1.0,
    k=4,
    batch_size=64,
    num_mini_batches=1,
    num_ppo_epochs=1,
    per_device_train_batch_size=64,
    world_size=1,
)
COUNTS = "episodes iterations last_batch_size steps gradient_accumulation_steps"
RUNS = [  # what differs from RUN, and the right COUNTS
    (dict(), (1960, 31, 40, 31, 1)),
    # The episodes fill the batches exactly.
    (dict(num_prompts=16, num_train_epochs=3.0, batch_size=16), (192, 12, 16, 12, 1)),
    # A quarter of an epoch of 5 prompts is 1 prompt. The run is shorter than one batch.
    (dict(num_prompts=5, num_train_epochs=0.25, per_device_train_batch_size=8), (4, 1, 4, 1, 8)),
    # There are several updates of each batch, and five processes. The last batch has mini-batches
    # of 10, not of 16.
    (
        dict(num_mini_batches=4, num_ppo_epochs=3, per_device_train_batch_size=3, world_size=5),
        (1960, 31, 40, 372, 2),
    ),
    # Half an epoch of 5 prompts is 3 prompts. The last batch has 2 episodes.
    (
        dict(
            num_prompts=5,
            num_train_epochs=0.5,
            k=2,
            batch_size=4,
            num_mini_batches=4,
            num_ppo_epochs=2,
        ),
        (6, 2, 2, 12, 1),
    ),
]


def mistakes_in_counts(
    right: dict,
    num_prompts,
    num_train_epochs,
    k,
    batch_size,
    num_mini_batches,
    num_ppo_epochs,
    per_device_train_batch_size,
    world_size,
) -> dict:
    """For each count: for each message the wrong answer that it is for, or a list of several."""
    ceil = math.ceil
    unrounded = num_train_epochs * num_prompts
    rounded_epochs = [math.floor(num_train_epochs + 0.5), round(num_train_epochs)]
    episodes = right["episodes"]
    iterations = right["iterations"]
    last_batch = right["last_batch_size"]
    steps = right["steps"]
    mini_batch = batch_size // num_mini_batches
    whole_batches = (iterations - 1) * num_mini_batches  # mini-batches of all batches but the last
    in_last_batch = [ceil(last_batch / mini_batch), last_batch // mini_batch, 1]
    of_process = mini_batch / world_size
    micro_batch = per_device_train_batch_size
    return {
        "episodes": {
            "You count prompts. Each prompt gets k completions, and each is an episode.": (
                episodes // k
            ),
            "Half a prompt is rounded up. int(2.5) and Python's round(2.5) are both 2.": (
                int(unrounded) * k
            ),
            "You train on a part of a prompt. First round the prompts. Then multiply by k.": (
                unrounded * k
            ),
            "First round the prompts. Then multiply by k.": math.floor(unrounded * k + 0.5),
            "You always round up. Round to the nearest whole number of prompts.": (
                ceil(unrounded) * k
            ),
            "You forget num_train_epochs.": num_prompts * k,
            "You round the epochs. Multiply them by num_prompts first. Then round.": [
                epochs * num_prompts * k for epochs in rounded_epochs
            ],
            "A PPO epoch trains on the same episodes again. It makes no new ones.": (
                episodes * num_ppo_epochs
            ),
            "You round up to whole batches. The last batch is smaller instead.": (
                iterations * batch_size
            ),
            "You drop the last, smaller batch.": episodes // batch_size * batch_size,
        },
        "iterations": {
            "You drop the last, smaller batch. Round up.": episodes // batch_size,
            "A batch holds episodes, not prompts. Divide the episodes.": (
                ceil(episodes / k / batch_size)
            ),
            "batch_size is for all processes together.": ceil(episodes / batch_size / world_size),
            "No smaller batch comes after the batches that the episodes fill exactly.": (
                episodes // batch_size + 1
            ),
            "A PPO epoch trains on the same batch again. It is not a new iteration.": (
                iterations * num_ppo_epochs
            ),
        },
        "last_batch_size": {
            "The episodes fill the batches exactly. So the last batch is a whole one.": 0,
            "The last batch holds only the episodes that are left.": batch_size,
            "You subtract one batch too many. The last one is not yet taken.": (
                episodes - iterations * batch_size
            ),
        },
        "steps": {
            "A whole batch gives num_ppo_epochs * num_mini_batches steps.": iterations,
            "You forget the PPO epochs. Each is one more pass over the mini-batches.": (
                iterations * num_mini_batches
            ),
            "You forget the mini-batches. Each is one optimizer step.": iterations * num_ppo_epochs,
            "You forget the last, smaller batch. It gives steps, too.": (
                whole_batches * num_ppo_epochs
            ),
            "The last batch is cut into num_mini_batches, too. Its mini-batches are smaller.": [
                (whole_batches + count) * num_ppo_epochs for count in in_last_batch
            ],
            "The train epochs are in the number of episodes already.": steps * num_train_epochs,
            "The micro-batches of a mini-batch give one step together.": (
                steps * right["gradient_accumulation_steps"]
            ),
            "A batch of 2 episodes has only 2 mini-batches: fewer steps.": (
                iterations * num_mini_batches * num_ppo_epochs
            ),
            "All processes take a step together, so their number changes nothing.": (
                steps // world_size
            ),
        },
        "gradient_accumulation_steps": {
            "You forget that the processes share a mini-batch.": ceil(mini_batch / micro_batch),
            "One step takes a mini-batch, not the whole batch.": (
                ceil(batch_size / world_size / micro_batch)
            ),
            "You drop the last, smaller micro-batch. Round up.": (
                mini_batch // world_size // micro_batch
            ),
            "Episodes and micro-batches are whole. Round up.": of_process / micro_batch,
            "Count for a mini-batch of full size.": (
                ceil(last_batch / num_mini_batches / world_size / micro_batch)
            ),
        },
    }


def test_1_counts_of_a_run(answer):
    types = {}
    for changes, right in RUNS:
        given = RUN | changes
        right = dict(zip(COUNTS.split(), right))
        counts = answer.count_run(**given)
        if counts is None:
            stop("Your function returns nothing. Its last line must be: return, and the dict.")
        if not isinstance(counts, dict):
            stop(f"Return a dict. You return {type(counts).__name__}.")
        for name, value in right.items():
            if name not in counts:
                stop(f"Your dict has no key {name!r}.", **{"your keys": list(counts)})
            found = counts[name]
            types[name] = type(found)
            if found == value:
                continue
            message = "This is not right. Count a smaller run by hand, one episode at a time."
            for about, wrong in mistakes_in_counts(right, **given)[name].items():
                if found == wrong or isinstance(wrong, list) and found in wrong:
                    message = about
                    break
            stop(f"{name}: {message}", **given, **{"your answer": found, "right": value})
    for name, kind in types.items():
        if not issubclass(kind, int):
            stop(f"{name}: The numbers are right. But they must be int, not {kind.__name__}.")


# ============================== 2  sampling by the inverse transform ==============================
TOO_LOW = "By rounding, the sum of the probabilities is below 1."
TOO_LOW += " Multiply the random number by it, in float64."


def pick(answer, log_p, uniforms):
    return answer.pick_tokens(log_p.clone(), torch.tensor(uniforms, dtype=torch.float64))


def test_2_sampling_by_the_inverse_transform(answer):
    probabilities = torch.tensor(
        [[0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.6, 0.1, 0.3]]
    )
    uniforms = [0.75, 0.1, 0.5, 0.65]
    picked = pick(answer, probabilities.log(), uniforms)
    check_type(picked)
    if picked.is_floating_point() or picked.dtype == torch.bool:
        message = "Return whole numbers (torch.int64): the index of each token."
        message += f" Yours have the type {picked.dtype}."
        stop(message, **{"your answer": picked})
    check(
        picked,
        [2, 0, 0, 1],
        {
            "You take the most likely token, and do not use the random number.": [1, 1, 0, 0],
            "You are one token too far to the left: -1 is not a token.": [1, -1, -1, 0],
            "You use the random number of the first row for all rows.": [2, 2, 2, 2],
            "You use the probabilities of the first row for all rows.": [2, 0, 1, 1],
            "You add up the probabilities from right to left. Go from left to right.": [
                [1, 2, 0, 0]
            ],
            "You add up log-probabilities. First take the exponential of each.": [
                [3, 3, 3, 3],
                [0, 3, 3, 3],
            ],
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
            "You always pick token 0. Cumulative probabilities must rise to 1 along each row.": [
                [0, 0, 0, 0]
            ],
        },
        probabilities=probabilities,
        uniforms=uniforms,
    )

    log_p = torch.tensor([[0.2, 0.5, 0.3]]).log().repeat(1000, 1)
    uniforms = [(i + 0.5) / 1000 for i in range(1000)]
    picked = pick(answer, log_p, uniforms)
    if not torch.equal(picked, pick(answer, log_p, uniforms)):
        stop("The same input gives different tokens. Use no random numbers of your own.")
    check(
        torch.bincount(picked, minlength=3),
        [200, 500, 300],
        {},
        probabilities=[0.2, 0.5, 0.3],
        uniforms="0.0005, 0.0015, ..., 0.9995",
        compared="how often each token is picked",
    )

    message = "You pick a token of probability 0."
    message += " Its cumulative probability is not above the random number."
    check(
        pick(answer, torch.tensor([[0.0, 0.5, 0.5]]).log(), [0.0]),
        [1],
        {message: [0]},
        probabilities=[[0.0, 0.5, 0.5]],
        uniforms=[0.0],
    )

    log_p = torch.tensor([[-1.203973, -0.356676, -math.inf]])
    check(
        pick(answer, log_p, [1 - 1e-9]),
        [1],
        {
            f"You pick token 3, and the vocabulary has only 0, 1 and 2. {TOO_LOW}": [3],
            f"You pick the last token, and its probability is 0. {TOO_LOW}": [2],
            f"You pick the first token, and the random number is almost 1. {TOO_LOW}": [0],
        },
        log_p=log_p,
        probabilities="[0.3, 0.6999993, 0]",
        uniforms="[0.999999999]",
    )

    log_p = torch.tensor([[0.0, -20.723266]])
    message = "You add up in float32, so 1 + 0.000000001 is 1."
    message += " First turn log_p into float64: log_p.double()."
    check(
        pick(answer, log_p, [1 - 1e-10]),
        [1],
        {message: [0]},
        log_p=log_p,
        probabilities="[1, 0.000000001]",
        uniforms="[0.9999999999]",
    )


# ============================= 3  log-probabilities of a padded batch =============================
EOS = 0  # The padding is 0, too. So only the lengths say where a completion ends.
PROMPTS = [[3, EOS, 4, 5], [6, 2], [7]]
COMPLETIONS = [[2, 7, 1], [EOS], [5, EOS]]  # The first one did not end.


def make_model():
    """A tiny GPT-2 with random weights. Its positions are absolute, so wrong ones matter."""
    import transformers

    torch.manual_seed(0)
    shape = dict(
        vocab_size=8, n_embd=16, n_layer=2, n_head=2, n_positions=16, initializer_range=0.4
    )
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, bos_token_id=EOS, eos_token_id=EOS)
    ).eval()


@torch.no_grad()
def row_by_row(
    model,
    temperature=0.5,
    padding=0,
    shift=0,
    late=0,
    start=0,
    restart=False,
    hidden=None,
    skips=False,
    pick="token",
):
    """The log-probabilities [rows, tokens], by a pass without padding for each row; and what
    mistakes make of them.

    Each row is `missing` tokens shorter than the longest prompt. It gets this number of zeros in
    front, times `padding`. Its positions are shifted by this number, times `shift`, and begin with
    `start`; with `restart`, those of the completion begin with 0 again. What is read for a token is
    `late` positions too late. The mask is 0 for tokens that are `hidden`. With `skips`, the
    positions do not count them. `pick`: the log-probability of the "token", the "largest" one
    there, or the "logit" of the token.
    """
    longest = max(map(len, PROMPTS))
    table = torch.zeros(len(PROMPTS), max(map(len, COMPLETIONS)))
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        missing = longest - len(prompt)
        tokens = torch.tensor([0] * missing * padding + prompt + completion)
        positions = (torch.arange(len(tokens)) + missing * shift).clamp(min=0) + start
        if restart:
            positions[-len(completion) :] = torch.arange(len(completion))
        mask = torch.ones_like(tokens)
        if hidden == "completion":
            mask[-len(completion) :] = 0
        if hidden == "EOS":
            mask = (tokens != EOS).long()
        if skips:
            positions = (mask.cumsum(0) - 1).clamp(min=0)
        outputs = model(tokens[None], attention_mask=mask[None], position_ids=positions[None])
        first = max(len(tokens) - len(completion) - 1 + late, 0)
        log_p = outputs.logits[0, first : first + len(completion)] / temperature
        if pick != "logit":
            log_p = torch.log_softmax(log_p, -1)
        for position, token in enumerate(completion):
            if pick == "largest":
                token = log_p[position].argmax()
            table[row, position] = log_p[position, token]
    return table


def where_to_look(result, right) -> str:
    """The message for an answer that no known mistake gives: which numbers are right."""
    wrong = ~torch.isclose(result.detach(), right, rtol=1e-4, atol=2e-4)
    if not wrong[0].any():
        return "Only the row without padding is right. Look at the mask and the positions."
    if not wrong[:, 0].any():
        return "Only the first token of each row is right. Look at the mask and the positions."
    return (
        "First try one row without padding. Look at the logits that you read, and at the softmax."
    )


def mistakes_in_logprobs(model, right) -> dict:
    wrong = partial(row_by_row, model)
    no_eos = torch.tensor([[1.0, 1, 1], [0, 0, 0], [1, 0, 0]])
    no_last = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 0]])
    no_first = torch.tensor([0.0, 1, 1])
    by_ids = [wrong(hidden="EOS"), wrong(hidden="EOS", skips=True)]
    is_read = [wrong(padding=1), wrong(padding=1, shift=-1)]
    return {
        "The positions count the padding. The first token of a prompt has position 0.": (
            wrong(shift=1)
        ),
        "The mask comes from the token ids. But a prompt may hold the EOS, too.": (
            torch.stack(by_ids)
        ),
        "The mask hides the completion. It is 1 for its tokens, too.": wrong(hidden="completion"),
        "Your positions begin with 1. The first token of a prompt has position 0.": wrong(start=1),
        "You return logits. Take their log_softmax first.": wrong(pick="logit"),
        "You return the largest log-probability. Pick the token's own.": wrong(pick="largest"),
        "The positions begin with 0 again in the completion. They must go on there.": (
            wrong(restart=True)
        ),
        "You divide by the temperature twice. Divide the logits, before the softmax.": right / 0.5,
        "The sign is wrong. A log-probability is never above 0.": -right,
        "The padding is read as if it were tokens. Give the model a mask of all real tokens.": (
            torch.stack(is_read)
        ),
        "You read the logits one position too late. They are those of the next token.": (
            wrong(late=1)
        ),
        "You forget the temperature. It divides the logits.": wrong(temperature=1.0),
        "You multiply the logits by the temperature. It divides them.": wrong(temperature=2.0),
        "You divide the log-probabilities by the temperature. Divide the logits.": (
            wrong(temperature=1.0) / 0.5
        ),
        "The EOS gets 0, but the policy chose it. Make the mask from lengths, not from ids.": (
            right * no_eos
        ),
        "The last token of a completion gets 0. lengths counts it, too.": right * no_last,
        "The first token of a completion gets 0. Its logits are at the end of the prompt.": (
            right * no_first
        ),
        "You return probabilities. Return their logarithms.": right.exp() * (right != 0),
    }


def test_3_logprobs_of_a_padded_batch(answer):
    model = make_model()
    right = row_by_row(model)
    mistakes = mistakes_in_logprobs(model, right)
    passes = []
    model.transformer.h[0].register_forward_hook(lambda *_: passes.append(1))
    result = call(
        partial(answer.completion_logprobs, model),
        prompts=torch.tensor([[3, 0, 4, 5], [0, 0, 6, 2], [0, 0, 0, 7]]),
        prompt_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]),
        completions=torch.tensor([[2, 7, 1], [0, 0, 0], [5, 0, 0]]),
        lengths=torch.tensor([3, 1, 2]),
        temperature=0.5,
    )
    num_passes = len(passes)
    given = dict(prompts=PROMPTS, completions=COMPLETIONS, EOS=EOS, padding=EOS, temperature=0.5)
    check_type(result, **given)
    if result.shape == right.shape:
        of_tokens = result.where(right != 0, 0.0)
        early = row_by_row(model, late=-1)
        early[2] = of_tokens[2]  # One position before a prompt of one token is only padding.
        mistakes["You read the logits one position too early."] = early
        mistakes[where_to_look(of_tokens, right)] = of_tokens
        check(of_tokens, right, mistakes, **given)
    check(result, right, {AFTER_THE_END: result}, **given)
    if not result.requires_grad:
        stop("The numbers are right. But they have no gradient. Use no no_grad and no detach.")
    if num_passes > 2:
        stop(f"The numbers are right. But the model runs {num_passes} times. Run it once.")


# ========================================= 4  advantages ==========================================
GROUPS = torch.tensor([1.0, 2, 6, 0, 3, 0])  # two groups of three
MINUS_MEAN = torch.tensor([-2.0, -1, 3, -1, 2, -1])  # minus the mean of the group
DEVIATION = torch.tensor([7.0, 7, 7, 3, 3, 3]).sqrt()  # of the group
OF_BATCH = 5.2**0.5
MIXED = "You mix the groups. The first k episodes are a group: a row of view(-1, k)."


def advantages_of(function, values, k):
    """The answer for a copy of these values."""
    try:
        return function(values.clone(), k)
    except RuntimeError as error:
        if "must match the size" not in str(error):
            raise
        stop(
            "These shapes do not fit. Write keepdim=True, so that a mean has the shape [groups, 1]."
        )


def test_4a_leave_one_out_advantages(answer):
    right = 1.5 * MINUS_MEAN
    check(
        advantages_of(answer.leave_one_out_advantages, GROUPS, 3),
        right,
        {
            "You include the episode itself in its baseline. Take the mean of the others.": (
                MINUS_MEAN
            ),
            "You multiply by (k - 1) / k. The factor is k / (k - 1).": MINUS_MEAN * 2 / 3,
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
            "You take the others of the whole batch. Take only those of the group.": (
                (GROUPS - 2) * 6 / 5
            ),
            "You subtract the mean of the whole batch. Take the others of the group.": GROUPS - 2,
        },
        rewards=GROUPS,
        k=3,
    )
    rewards = torch.tensor([1.0, 3, 0, 4])
    advantages = advantages_of(answer.leave_one_out_advantages, rewards, 2)
    check(advantages, [-2, 2, -4, 4], {}, rewards=rewards, k=2)


def test_4b_group_normalized_advantages(answer):
    normalized = MINUS_MEAN / DEVIATION
    check(
        advantages_of(answer.group_normalized_advantages, GROUPS, 3),
        normalized,
        {
            "You use the biased variance. Divide the squares by k - 1, not by k.": (
                normalized * 1.5**0.5
            ),
            "You divide by the variance. The deviation is its root.": normalized / DEVIATION,
            "You do not divide by the deviation.": MINUS_MEAN,
            "You do not subtract the mean.": GROUPS / DEVIATION,
            "You subtract the mean of the others. The group's mean includes the episode.": (
                normalized * 1.5
            ),
            MIXED: [
                [-0.9271, 1.1546, 1.0596, -0.5773, -0.1324, -0.5773],
                [-0.9271, 1.0596, -0.1324, 1.1546, -0.5773, -0.5773],
                [-0.7071, 0.7071, 0.7071, -0.7071, 0.7071, -0.7071],
            ],
            "You divide by the deviation of the whole batch. Each group has its own.": (
                MINUS_MEAN / OF_BATCH
            ),
            "You use mean and deviation of the whole batch. Each group has its own.": (
                (GROUPS - 2) / OF_BATCH
            ),
        },
        scores=GROUPS,
        k=3,
    )
    # With k = 2, the deviations here are 0 and 7.07e-5. So it matters what is added, and where.
    scores = torch.tensor([0.5, 0.5, 0, 1e-4])
    result = advantages_of(answer.group_normalized_advantages, scores, 2)
    check_type(result)
    if result.isnan().any():
        if result[2:].sum() > 1e-4:
            stop("You add 1e-4 to the quotient. Add it to the deviation, before you divide.")
        stop("The scores of a group are equal, so you divide 0 by 0. Add 1e-4 to the deviation.")
    mistakes = {
        "You add less than 1e-4 to the deviation.": [0, 0, -0.7071, 0.7071],
        "You use 1e-4 as the lowest deviation (clamp or max). Add it to every deviation.": [
            [0, 0, -0.5, 0.5]
        ],
        "You add 1e-4 to the variance, inside the root. Add it to the deviation.": [
            [0, 0, -0.005, 0.005]
        ],
        "You add 1e-8 to the variance, inside the root. Add 1e-4 to the deviation.": [
            [0, 0, -0.4082, 0.4082]
        ],
    }
    check(result, [0, 0, -0.2929, 0.2929], mistakes, scores=scores, k=2)


# ====================================== 5  the clipped loss =======================================
ADVANTAGES = torch.tensor([2.0, 2, 2, -2, -2, -2])
RATIOS = torch.tensor([0.5, 1, 1.5, 0.5, 1, 1.5])
OLD_LOGPROBS = torch.tensor([-1.0, -2, -3, -1, -2, -3])
CLIPPED = RATIOS.clamp(0.8, 1.2)
# The two losses. The right one is the larger one.
LOSS = -ADVANTAGES * RATIOS
CLIPPED_LOSS = -ADVANTAGES * CLIPPED
USE_AS_GIVEN = "You shift or scale the advantages. Use them as they are given."
GIVEN_5 = dict(ratios=RATIOS, advantages=ADVANTAGES, cliprange=0.2)


def loss_of(ratios, low=0.8, high=1.2):
    """The losses of other ratios, or with other bounds."""
    return torch.maximum(-ADVANTAGES * ratios, -ADVANTAGES * ratios.clamp(low, high))


def losses_at(answer, ratios, advantages=ADVANTAGES, cliprange=0.2):
    """New log-probabilities that give these ratios, and the losses of the answer."""
    logprobs = (OLD_LOGPROBS + ratios.log()).requires_grad_()
    losses = answer.clipped_loss(logprobs, OLD_LOGPROBS.clone(), advantages.clone(), cliprange)
    check_type(losses)
    return logprobs, losses


def gradient_at(answer, ratios):
    """The derivative of the sum of the losses with respect to each new log-probability."""
    logprobs, losses = losses_at(answer, ratios)
    gradient = None
    if losses.requires_grad:
        [gradient] = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True)
    if gradient is None:
        message = "Your losses have no gradient."
        message += " These cut it off: detach, item, tolist, float, torch.tensor, no_grad."
        stop(message)
    return gradient


def test_5a_clipped_loss(answer):
    check(
        losses_at(answer, RATIOS)[1],
        [-1, -2, -2.4, 1.6, 2, 3],
        {
            "You take the smaller of the two losses. The clipped loss is the larger one.": (
                torch.minimum(LOSS, CLIPPED_LOSS)
            ),
            "You always clip. Take the larger loss. (clamp_ changes the ratio. Use clamp.)": (
                CLIPPED_LOSS
            ),
            "You never clip.": LOSS,
            "You forget the minus in front of A, in both of the losses.": (
                torch.maximum(-LOSS, -CLIPPED_LOSS)
            ),
            "You compare the ratios. First multiply both by -A. Then take the larger product.": [
                (-ADVANTAGES * torch.minimum(RATIOS, CLIPPED)).tolist(),
                (-ADVANTAGES * torch.maximum(RATIOS, CLIPPED)).tolist(),
            ],
            "You clip only at 1 + c. A bad token is clipped at 1 - c.": loss_of(RATIOS, 0, 1.2),
            "You clip only at 1 - c. A good token is clipped at 1 + c.": loss_of(RATIOS, 0.8, 9),
            "You clip at -c and c. Clip at 1 - c and 1 + c.": loss_of(RATIOS, -0.2, 0.2),
            "You clip the difference of the log-probabilities. Clip the ratio.": (
                loss_of(RATIOS, 0.8187, 1.2214)
            ),
            "You set the loss to 0 outside of 0.8 .. 1.2. A clipped loss is constant, not 0.": (
                LOSS * (RATIOS == CLIPPED)
            ),
            "Your ratio is always 1. Use the old log-probabilities that are given.": -ADVANTAGES,
            "You divide log-probabilities. Divide probabilities.": (
                loss_of(1 + RATIOS.log() / OLD_LOGPROBS)
            ),
            "The ratio is upside down. It is the new probability by the old one.": (
                loss_of(1 / RATIOS)
            ),
            "The ratio is the exponential of this difference.": loss_of(RATIOS.log()),
            USE_AS_GIVEN: [
                (loss_of(RATIOS) / ADVANTAGES.std()).tolist(),
                (loss_of(RATIOS) / ADVANTAGES.std(correction=0)).tolist(),
            ],
        },
        **GIVEN_5,
    )

    advantages = torch.tensor([3.0, 3, 3, -1, -1, -1])
    check(
        losses_at(answer, RATIOS, advantages, 0.4)[1],
        [-1.5, -3, -4.2, 0.6, 1, 1.5],
        {
            "You always clip at 0.8 and 1.2. Use the argument cliprange.": (
                torch.maximum(-advantages * RATIOS, -advantages * CLIPPED)
            ),
            USE_AS_GIVEN: [-1, -2, -2.8, 1.2, 2, 3],
        },
        **GIVEN_5 | dict(advantages=advantages, cliprange=0.4),
    )


def test_5b_gradient_of_the_clipped_loss(answer):
    compared = "the derivative with respect to each log-probability"
    check(
        gradient_at(answer, torch.ones(6)),
        -ADVANTAGES,
        {
            "At ratio 1 your gradient is 0. But there each loss has the gradient -advantage.": (
                torch.zeros(6)
            ),
            "The sign is wrong. A step would make good tokens less likely.": ADVANTAGES,
            "Your gradient is half of the right one. Detach none of the two losses.": (
                -ADVANTAGES / 2
            ),
            "You return the mean. Return the loss of each token.": -ADVANTAGES / 6,
        },
        **GIVEN_5 | dict(ratios=torch.ones(6), compared=compared),
    )
    check(
        gradient_at(answer, RATIOS),
        [-1, -2, 0, 0, 2, 3],
        {
            "Good tokens at ratio 0.5 and bad ones at 1.5 must have a gradient.": (
                LOSS * (RATIOS == CLIPPED)
            ),
            "You never clip. A good token that is already much more likely has gradient 0.": LOSS,
            "You take the smaller of the two losses. The clipped loss is the larger one.": (
                LOSS * (LOSS <= CLIPPED_LOSS)
            ),
        },
        **GIVEN_5 | dict(compared=compared),
    )


# ======================================= 6  one denominator =======================================
# A mini-batch of five episodes. The loss of a token is a parameter times its entry here. 7 is
# padding.
TOKENS = torch.tensor([[1.0, 2, 3], [4, 7, 7], [2, 2, 7], [6, 1, 7], [5, 5, 5]])
LENGTHS = torch.tensor([3, 1, 2, 2, 3])
REPEATED = -4  # episode 4 once more, which does not count
SUM = 36  # of all tokens, of which there are 11
GRADIENT = SUM / 11
STEPS = [  # the episodes of each micro-batch of each process; and what mistakes give
    (
        "one process, one micro-batch",
        [[[0, 1, 2, 3, 4]]],
        {
            "You add up the padding, too. Use the mask.": 64 / 11,
            "You count the padding as tokens. Count the True entries of the masks.": SUM / 15,
            "The padding is in your sum and in your denominator. Use the mask for both.": 64 / 15,
            "You divide by the number of episodes. Divide by the number of tokens.": SUM / 5,
            "You take a mean of the means of the episodes. Weigh all tokens alike.": 16.5 / 5,
            "You return the sum. Divide it by the number of tokens.": SUM,
        },
    ),
    (
        "one process, three micro-batches",
        [[[0, 1], [2], [3, 4]]],
        {
            "You take a mean of means. Divide by the tokens of the whole mini-batch.": 8.9 / 3,
            "You take a sum of means. Divide by the tokens of the whole mini-batch.": 8.9,
            "You multiply by the number of micro-batches. Their gradients are added up.": (
                GRADIENT * 3
            ),
            "You divide by the number of micro-batches, too. Their gradients are added up.": (
                GRADIENT / 3
            ),
        },
    ),
    (
        "two processes",
        [[[0, 1], [2]], [[3, 4], [REPEATED]]],
        {
            "This is half of it: DDP takes a mean. Multiply by the number of processes.": (
                GRADIENT / 2
            ),
            "Each process divides by its own tokens. Divide by the tokens of all processes.": [
                (14 / 6 + 22 / 5) / 2,
                14 / 6 + 22 / 5,
            ],
            "You add up the repeated episode, which must not count. Multiply by is_real.": 51 / 11,
            "You count the tokens of the repeated episode. Leave out what is not real.": SUM / 14,
            "The repeated episode is in your sum and in your denominator.": 51 / 14,
            "You divide by the number of processes. DDP does so already: multiply by it.": (
                GRADIENT / 4
            ),
        },
    ),
]


def make_micro_batch(episodes, parameter):
    rows = torch.tensor(episodes).abs()
    mask = torch.arange(TOKENS.shape[1]) < LENGTHS[rows][:, None]
    is_real = (torch.tensor(episodes) >= 0).float()
    return parameter * TOKENS[rows], mask, is_real


def form_of(split) -> str:
    """For example [[loss, loss], [loss]]."""
    return show([["loss"] * len(of_process) for of_process in split])


def check_form(losses, split):
    """Fail unless there is a list for each process, with a loss for each of its micro-batches."""
    try:
        lengths = [len(of_process) for of_process in losses]
    except TypeError:
        lengths = None
    if lengths != [len(of_process) for of_process in split]:
        message = "Return a list for each process, with one loss for each of its micro-batches:"
        message += f" {form_of(split)}."
        stop(message, **{"your answer": repr(losses)})
    for of_process in losses:
        for loss in of_process:
            check_type(loss)
            if loss.shape != () or not loss.requires_grad:
                stop(
                    "Each loss must be a tensor with one number and with gradient.",
                    **{"your answer": repr(loss)},
                )


def gradient_after_ddp(answer, split) -> torch.Tensor:
    """Each process adds up the gradients of its micro-batches. Then DDP takes their mean."""
    parameter = torch.tensor(1.0, requires_grad=True)
    processes = []
    for of_process in split:
        processes.append([make_micro_batch(episodes, parameter) for episodes in of_process])
    given = [micro_batch for of_process in processes for micro_batch in of_process]
    tensors = [tensor for micro_batch in given for tensor in micro_batch]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        losses = answer.micro_batch_losses(processes)
    except NotImplementedError as error:
        if not str(error):
            raise  # It is the template's: the exercise is not written yet.
        stop(f"PyTorch stops: {error}. The operator & takes True and False. is_real has numbers.")
    check_form(losses, split)
    if not all(map(torch.equal, tensors, before)):
        stop("You change a tensor that is given. Write a = a * b, not a *= b.")
    if parameter.grad is not None:
        stop("Do not call backward. Return the losses. The test calls backward on them.")
    token_losses = [micro_batch[0] for micro_batch in given]
    for position, loss in enumerate(loss for of_process in losses for loss in of_process):
        try:
            gradients = torch.autograd.grad(
                loss, token_losses, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            stop(f"backward on your loss stops: {error}", **{"your answer": repr(loss)})
        for other, gradient in enumerate(gradients):
            if other != position and gradient is not None and gradient.any():
                stop("A loss must use only the token losses of its own micro-batch.")
    sums = [sum(of_process) for of_process in losses]
    gradients = [torch.autograd.grad(x, parameter, retain_graph=True)[0] for x in sums]
    return torch.stack(gradients).mean()


def test_6_one_denominator(answer):
    for name, split, mistakes in STEPS:
        check(
            gradient_after_ddp(answer, split),
            GRADIENT,
            mistakes,
            split=f"{name}, with the episodes {str(split).replace('-4', '4 (not real)')}",
            lengths=LENGTHS,
            **{"token losses": "a parameter with the value 1, times " + show(TOKENS.int())},
            compared="the gradient by the parameter, after DDP",
        )


# ================================= 7  GAE with rewards at the end =================================
def gae_of(answer, scores, values, lengths):
    return call(
        answer.gae_from_scores,
        scores=scores,
        values=values,
        lengths=torch.tensor(lengths),
        gamma=0.5,
        lam=0.8,
    )


def test_7_gae_with_rewards_at_the_end(answer):
    scores = torch.tensor([4.0])
    values = torch.tensor([[1.0, 2, 3]])
    right = torch.tensor([[-0.04, -0.1, 1]])
    result = gae_of(answer, scores, values, [3])
    check_type(result)
    if not result.is_floating_point():
        stop(f"The type {result.dtype} cuts off fractions. Use the type of the values.")
    check(
        result,
        right,
        {
            "You go from left to right. A_t needs A_{t+1}, so begin at the last token.": [
                [0, -0.5, 0.8],
                [-1, -1.9, 1.24],
            ],
            "The numbers are in reverse order. The first token comes first.": right.flip(1),
            "You leave out the last token. Its index is length - 1.": [
                [-0.2, -0.5, 0],
                [-0.8, -2, 0],
                [-0.16, -0.4, 0],
                [-0.04, -0.1, 0],
            ],
            "You give the score to the token before the last one.": [[0.92, 2.3, -3], [0.8, 2, 0]],
            "No token gets the score. The last index is length - 1.": [-0.68, -1.7, -3],
            "You use lam in delta. There it is gamma.": [0.92, 0.8, 1],
            "You use gamma * lam in delta. There it is gamma alone.": [-0.36, -0.4, 1],
            "You forget V of the next token in delta: R_t + gamma V_{t+1} - V_t.": [
                [-1.64, -1.6, 1],
                [-1.75, -1.5, 1],
            ],
            "You return Monte Carlo returns. Use V_t and V_{t+1} in delta.": [
                [1, 2, 4],
                [0.64, 1.6, 4],
            ],
            "You use the score as a value after the last token. It is R_t.": [-0.36, -0.9, -1],
            "The score minus the value is right only for gamma = lam = 1.": scores - values,
            "You normalize the advantages. Return them as the formula gives them.": (
                (right - right.mean()) / right.std()
            ),
            "You forget lam. Multiply A_{t+1} by gamma * lam.": [0, 0, 1],
            "You forget gamma in front of A_{t+1}. It is gamma * lam.": [0.24, 0.3, 1],
            "You forget gamma in delta. It multiplies the next value.": [1.56, 1.4, 1],
            "You return the deltas. Add gamma * lam * A_{t+1} to each.": [0, -0.5, 1],
            "You add only the next delta. Add A_{t+1}, which has all later ones.": [-0.2, -0.1, 1],
            "These are the returns. Subtract the values from them.": right + values,
            "The next value is off by one: you use V_t for V_{t+1}.": [-0.5, 0, 2.5],
            "You swap V_t and V_{t+1}.": [-1.42, 0.2, 5.5],
            "You do not subtract V_t.": [2.24, 3.1, 4],
            "You use the last value twice. After the last token it is 0.": [0.2, 0.5, 2.5],
            "You give the score to every token. Only the last token gets it.": [5.56, 3.9, 1],
            "You give the score to the first token. The last token gets it.": [3.32, -1.7, -3],
        },
        scores=scores,
        values=values,
        lengths=[3],
        gamma=0.5,
        lam=0.8,
    )

    scores = torch.tensor([4.0, 1])
    values = torch.tensor([[1.0, 2, 3, 9], [2, 9, 9, 9]])
    right = torch.tensor([[-0.04, -0.1, 1, 0], [-1, 0, 0, 0]])
    given = dict(scores=scores, values=values, lengths=[3, 1], gamma=0.5, lam=0.8)
    result = gae_of(answer, scores, values, [3, 1])
    if result.shape == right.shape:
        is_token = right != 0
        check(
            result[is_token],
            right[is_token],
            {
                "The score is in the last column. Put it at the last token.": [
                    [-0.424, -1.06, -1.4, -1.936],
                    [-0.68, -1.7, -3, -2],
                ],
                "V and A are still those of the episode before. Begin with 0.": [
                    [-0.04, -0.1, 1, -0.516]
                ],
                "rewards[:, columns] means all rows. Name the rows, too.": [
                    [0.96, -0.1, 1, -0.36],
                    [3.96, -0.1, 1, -0.84],
                ],
                "Your mask has one True too many in each row.": [0.104, 0.26, 1.9, -0.1],
                "The score is after the last token, whose index is length - 1.": [
                    [-0.424, -1.06, -1.4, -1.6]
                ],
                "You read the value after the end of a completion. Put 0 in its place.": [
                    [0.104, 0.26, 1.9, 0.404],
                    [0.68, 1.7, 5.5, 3.5],
                ],
            },
            compared="the three tokens of the first row, and the one of the second",
            **given,
        )
    check(result, right, {AFTER_THE_END: result}, **given)
