"""The tests of the exercises in docs/exercises/README.md.

Each test gives your function a few small numbers, and compares its answer with the right one. If your answer is one
that a typical mistake gives, the message names the mistake. It knows only your numbers, and does not read your code.
"""

import math

import pytest
import torch

inf, nan = math.inf, math.nan


# =========================================== how answers are compared ===========================================
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
    pytest.fail("\n".join([message, *lines]), pytrace=False)


def is_close(answer, value) -> bool:
    """True if they have the same shape, and the same numbers up to rounding."""
    value = torch.as_tensor(value).double()
    answer = answer.detach().double()
    return answer.shape == value.shape and torch.allclose(answer, value, rtol=1e-4, atol=2e-4, equal_nan=True)


def check(answer, right, mistakes: list, **given):
    """Fail unless a tensor is right. mistakes: what typical mistakes give, each with the message for it."""
    if answer is None:
        stop("Your function returns None. Is there a return at its end?", **given)
    if not isinstance(answer, torch.Tensor):
        stop(f"Return a tensor. You return {type(answer).__name__}.", **given)
    right = torch.as_tensor(right)
    if is_close(answer, right):
        return
    message = "This is not right. Compute the first wrong number by hand, and compare."
    if answer.shape != right.shape:
        message = f"Return a tensor of the shape {list(right.shape)}. Yours has the shape {list(answer.shape)}."
    for value, about in mistakes:
        if is_close(answer, value):
            message = about
            break
    stop(message, **given, **{"your answer": answer, "right": right})


# ============================================ 1  the counts of a run ============================================
RUN = dict(num_prompts=490, num_train_epochs=1.0, k=4, batch_size=64, num_mini_batches=1, num_ppo_epochs=1)
RUN |= dict(per_device_train_batch_size=64, world_size=1)
RUNS = [  # what is given, and the right counts
    (RUN, dict(episodes=1960, iterations=31, last_batch_size=40, steps=31, gradient_accumulation_steps=1)),
    (  # The episodes fill the batches exactly.
        RUN | dict(num_prompts=16, num_train_epochs=3.0, batch_size=16),
        dict(episodes=192, iterations=12, last_batch_size=16, steps=12, gradient_accumulation_steps=1),
    ),
    (  # A quarter of an epoch of 5 prompts is 1 prompt. The run is shorter than one batch.
        RUN | dict(num_prompts=5, num_train_epochs=0.25, per_device_train_batch_size=8),
        dict(episodes=4, iterations=1, last_batch_size=4, steps=1, gradient_accumulation_steps=8),
    ),
    (  # There are several updates of each batch, and five processes. The last batch has mini-batches of 10, not of 16.
        RUN | dict(num_mini_batches=4, num_ppo_epochs=3, per_device_train_batch_size=3, world_size=5),
        dict(episodes=1960, iterations=31, last_batch_size=40, steps=372, gradient_accumulation_steps=2),
    ),
    (  # Half an epoch of 5 prompts is 3 prompts. The last batch has 2 episodes.
        RUN | dict(num_prompts=5, num_train_epochs=0.5, k=2, batch_size=4, num_mini_batches=4, num_ppo_epochs=2),
        dict(episodes=6, iterations=2, last_batch_size=2, steps=12, gradient_accumulation_steps=1),
    ),
]


ROUND_LATER = "You round the epochs. Multiply them by num_prompts first. Then round."
SAME_NUMBER = "The last batch is cut into num_mini_batches mini-batches, like the others. They are smaller."


def mistakes_in_counts(given: dict, right: dict) -> dict:
    """For each count: what typical mistakes give, each with the message for it."""
    k = given["k"]
    batch_size = given["batch_size"]
    mini_batches = given["num_mini_batches"]
    ppo_epochs = given["num_ppo_epochs"]
    processes = given["world_size"]
    micro_batch = given["per_device_train_batch_size"]
    unrounded = given["num_train_epochs"] * given["num_prompts"]
    episodes = right["episodes"]
    iterations = right["iterations"]
    last_batch = right["last_batch_size"]
    mini_batch = batch_size // mini_batches
    whole_batches = (iterations - 1) * mini_batches  # the mini-batches of all batches but the last one
    mini_batch_of_last = last_batch / mini_batches
    accumulation = right["gradient_accumulation_steps"]
    return {
        "episodes": [
            (episodes // k, "You count prompts. Each prompt gets k completions, and each completion is an episode."),
            (int(unrounded) * k, "Half a prompt is rounded up. int(2.5) and Python's round(2.5) are both 2."),
            (unrounded * k, "You train on a part of a prompt. First round the prompts. Then multiply by k."),
            (math.floor(unrounded * k + 0.5), "First round the prompts. Then multiply by k."),
            (math.ceil(unrounded) * k, "You always round up. Round to the nearest whole number of prompts."),
            (given["num_prompts"] * k, "You forget num_train_epochs."),
            (math.floor(given["num_train_epochs"] + 0.5) * given["num_prompts"] * k, ROUND_LATER),
            (round(given["num_train_epochs"]) * given["num_prompts"] * k, ROUND_LATER),
            (episodes * ppo_epochs, "A PPO epoch trains on the same episodes again. It makes no new ones."),
            (iterations * batch_size, "You round up to whole batches. The last batch is smaller instead."),
            (episodes // batch_size * batch_size, "You drop the last, smaller batch."),
        ],
        "iterations": [
            (episodes // batch_size, "You drop the last, smaller batch. Round up."),
            (math.ceil(episodes / k / batch_size), "A batch holds episodes, not prompts. Divide the episodes."),
            (math.ceil(episodes / batch_size / processes), "batch_size is for all processes together."),
            (episodes // batch_size + 1, "No smaller batch comes after the batches that the episodes fill exactly."),
            (iterations * ppo_epochs, "A PPO epoch trains on the same batch again. It is not a new iteration."),
        ],
        "last_batch_size": [
            (0, "The episodes fill the batches exactly. So the last batch is a whole one, and not empty."),
            (batch_size, "The last batch holds only the episodes that are left."),
            (episodes - iterations * batch_size, "You subtract one batch too many. The last one is not yet taken."),
        ],
        "steps": [
            (iterations, "You count iterations. A whole batch gives num_ppo_epochs * num_mini_batches steps."),
            (iterations * mini_batches, "You forget the PPO epochs. Each is one more pass over the mini-batches."),
            (iterations * ppo_epochs, "You forget the mini-batches. Each is one optimizer step."),
            (whole_batches * ppo_epochs, "You forget the last, smaller batch. It gives steps, too."),
            ((whole_batches + math.ceil(last_batch / mini_batch)) * ppo_epochs, SAME_NUMBER),
            ((whole_batches + last_batch // mini_batch) * ppo_epochs, SAME_NUMBER),
            ((whole_batches + 1) * ppo_epochs, SAME_NUMBER),
            (right["steps"] * given["num_train_epochs"], "The train epochs are in the number of episodes already."),
            (right["steps"] * accumulation, "The micro-batches of a mini-batch give one step together."),
            (iterations * mini_batches * ppo_epochs, "A batch of 2 episodes has only 2 mini-batches: fewer steps."),
            (right["steps"] // processes, "All processes take a step together, so their number changes nothing."),
        ],
        "gradient_accumulation_steps": [
            (math.ceil(mini_batch / micro_batch), "You forget that the processes share a mini-batch."),
            (math.ceil(batch_size / processes / micro_batch), "One step takes a mini-batch, not the whole batch."),
            (mini_batch // processes // micro_batch, "You drop the last, smaller micro-batch. Round up."),
            (mini_batch / processes / micro_batch, "Episodes and micro-batches are whole. Round up."),
            (math.ceil(mini_batch_of_last / processes / micro_batch), "Count for a mini-batch of full size."),
        ],
    }


def test_1_counts_of_a_run(answer):
    types = {}
    for given, right in RUNS:
        counts = answer.count_run(**given)
        if counts is None:
            stop("Your function returns nothing. Its last line must be: return, and the dict.")
        if not isinstance(counts, dict):
            stop(f"Return a dict. You return {type(counts).__name__}.")
        for name, value in right.items():
            if name not in counts:
                stop(f"Your dict has no key {name!r}.", **{"your keys": list(counts)})
            types[name] = type(counts[name])
            if counts[name] == value:
                continue
            message = "This is not right. Count a smaller run by hand, one episode at a time."
            for wrong, about in mistakes_in_counts(given, right)[name]:
                if counts[name] == wrong:
                    message = about
                    break
            stop(f"{name}: {message}", **given, **{"your answer": counts[name], "right": value})
    for name, kind in types.items():
        if not issubclass(kind, int):
            stop(f"{name}: The numbers are right. But they must be int, and yours is a {kind.__name__}.")


# ====================================== 2  sampling by the inverse transform ====================================
IS_LOG = "You add up log-probabilities. First take the exponential of each."
OVER_ROWS = "You add up over the rows. Add up along each row, over the vocabulary."
NOT_CUMULATIVE = "You search in the probabilities themselves. First add them up along each row."
NOT_ITSELF = "The cumulative probability of a token includes its own probability. You leave it out."
TOO_LOW = "By rounding, the sum of the probabilities is below 1. Multiply the random number by it, in float64."


def test_2_sampling_by_the_inverse_transform(answer):
    probabilities = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.6, 0.1, 0.3]])
    uniforms = torch.tensor([0.75, 0.1, 0.5, 0.65], dtype=torch.float64)
    picked = answer.pick_tokens(probabilities.log(), uniforms.clone())
    check(
        picked,
        [2, 0, 0, 1],
        [
            ([1, 1, 0, 0], "You take the most likely token. That is not sampling: it does not use the random number."),
            ([1, -1, -1, 0], "You are one token too far to the left: -1 is not a token."),
            ([2, 2, 2, 2], "You use the random number of the first row for all rows."),
            ([2, 0, 1, 1], "You use the probabilities of the first row for all rows."),
            ([1, 2, 0, 0], "You add up the probabilities from right to left. Go from left to right."),
            ([3, 3, 3, 3], IS_LOG),
            ([0, 3, 3, 3], IS_LOG),
            ([1, 0, 0, 0], OVER_ROWS),
            ([3, 0, 0, 0], OVER_ROWS),
            ([3, 0, 3, 3], NOT_CUMULATIVE),
            ([3, 0, 2, 3], NOT_CUMULATIVE),
            ([1, 0, 2, 2], NOT_CUMULATIVE),
            ([3, 1, 1, 2], NOT_ITSELF),
            ([0, 1, 1, 2], NOT_ITSELF),
            ([2, 1, 1, 1], NOT_ITSELF),
            ([0, 0, 0, 0], "You pick token 0 in every row. Cumulative probabilities must rise to 1 along each row."),
            ([0.3, 0.2, 0.6, 0.1], "You return the probability of the token. Return its index."),
            ([-1.204, -1.6094, -0.5108, -2.3026], "You return the log-probability of the token. Return its index."),
        ],
        probabilities=probabilities,
        uniforms=uniforms,
    )
    if picked.is_floating_point() or picked.dtype == torch.bool:
        stop(f"Return whole numbers (torch.int64), because a token is an index. Yours have the type {picked.dtype}.")

    log_p = torch.tensor([[0.2, 0.5, 0.3]]).log().repeat(1000, 1)
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    picked, again = (answer.pick_tokens(log_p.clone(), uniforms.clone()) for _ in range(2))
    if not torch.equal(picked, again):
        stop("The same input gives different tokens. Use the uniforms, and no random numbers of your own.")
    check(
        torch.bincount(picked, minlength=3),
        [200, 500, 300],
        [],
        probabilities=[0.2, 0.5, 0.3],
        uniforms="0.0005, 0.0015, ..., 0.9995",
        compared="how often each token is picked",
    )

    check(
        answer.pick_tokens(torch.tensor([[0.0, 0.5, 0.5]]).log(), torch.tensor([0.0], dtype=torch.float64)),
        [1],
        [([0], "You pick a token of probability 0. Its cumulative probability is not above the random number.")],
        probabilities=[[0.0, 0.5, 0.5]],
        uniforms=[0.0],
    )

    log_p = torch.tensor([[-1.203973, -0.356676, -inf]])
    check(
        answer.pick_tokens(log_p.clone(), torch.tensor([1 - 1e-9], dtype=torch.float64)),
        [1],
        [
            ([3], f"You pick token 3, and the vocabulary has only 0, 1 and 2. {TOO_LOW}"),
            ([2], f"You pick the last token, and its probability is 0. {TOO_LOW}"),
            ([0], f"You pick the first token, and the random number is almost 1. {TOO_LOW}"),
            ([], f"You pick no token. {TOO_LOW}"),
        ],
        log_p=log_p,
        probabilities="[0.3, 0.6999993, 0]",
        uniforms="[0.999999999]",
    )

    log_p = torch.tensor([[0.0, -20.723266]])
    check(
        answer.pick_tokens(log_p.clone(), torch.tensor([1 - 1e-10], dtype=torch.float64)),
        [1],
        [([0], "You add up in float32, so 1 + 0.000000001 is 1. First turn log_p into float64: log_p.double().")],
        log_p=log_p,
        probabilities="[1, 0.000000001]",
        uniforms="[0.9999999999]",
    )


# ==================================== 3  log-probabilities of a padded batch ====================================
EOS = 0  # The padding is 0, too. So only the lengths say where a completion ends.
PROMPTS = [[3, EOS, 4, 5], [6, 2], [7]]
COMPLETIONS = [[2, 7, 1], [EOS], [5, EOS]]  # The first one did not end.


def make_model():
    """A tiny GPT-2 with random weights. Its positions are absolute, so wrong positions give other numbers."""
    import transformers

    torch.manual_seed(0)
    shape = dict(vocab_size=8, n_embd=16, n_layer=2, n_head=2, n_positions=16, initializer_range=0.4)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=EOS, eos_token_id=EOS)).eval()


@torch.no_grad()
def row_by_row(
    model, temperature=0.5, padding=0, shift=0, late=0, start=0, restart=False, hidden=None, skips=False, pick="token"
):
    """The log-probabilities [rows, tokens], by a pass without padding for each row; and what mistakes make of them.

    Each row is `missing` tokens shorter than the longest prompt. It gets this number of zeros in front, times
    `padding`. Its positions are shifted by this number, times `shift`. Logits are read `late` positions too late.
    Positions begin with `start`; with `restart`, those of the completion begin with 0 again. The mask is 0 for tokens
    that are `hidden`. With `skips`, the positions do not count them. `pick` is "token", "largest" or "logit": what is
    returned for a token is its log-probability, or the largest one at its position, or its logit.
    """
    longest = max(map(len, PROMPTS))
    table = torch.zeros(len(PROMPTS), max(map(len, COMPLETIONS)))
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        missing = longest - len(prompt)
        tokens = [0] * missing * padding + prompt + completion
        positions = (torch.arange(len(tokens)) + missing * shift).clamp(min=0)
        positions = positions + start
        if restart:
            positions[-len(completion) :] = torch.arange(len(completion))
        attention = torch.ones(1, len(tokens), dtype=torch.long)
        if hidden == "completion":
            attention[0, -len(completion) :] = 0
        if hidden == "EOS":
            attention[0] = torch.tensor(tokens) != EOS
        if skips:
            positions = (attention[0].cumsum(0) - 1).clamp(min=0)
        logits = model(torch.tensor([tokens]), attention_mask=attention, position_ids=positions[None]).logits[0]
        first = max(len(tokens) - len(completion) - 1 + late, 0)
        logits = logits[first : first + len(completion)] / temperature
        log_p = logits if pick == "logit" else torch.log_softmax(logits, -1)
        picked = log_p.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        table[row, : len(completion)] = log_p.amax(1) if pick == "largest" else picked
    return table


def where_to_look(result, right, mask) -> str:
    """The message for an answer that no known mistake gives: which numbers are right, and what that means."""
    wrong = ~torch.isclose(result.detach().double(), right.double(), rtol=1e-4, atol=2e-4) & mask
    if not wrong[0].any():
        return "Only the first row is right. Its prompt has no padding. Look at the mask and the positions."
    if not wrong[:, 0].any():
        return "Only the first token of each completion is right. Look at the mask and the positions."
    return "First try one row without padding. Look at the logits that you read, and at the axis of the softmax."


BY_IDS = "The mask comes from the token ids. But a prompt may hold the EOS, too. Use prompt_mask and lengths."
BEFORE = "Divide the logits, before the softmax."


def mistakes_in_logprobs(model, right) -> list:
    mask = right != 0
    no_eos = torch.tensor([[1.0, 1, 1], [0, 0, 0], [1, 0, 0]])
    no_last = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 0]])
    no_first = torch.tensor([0.0, 1, 1])
    by_ids = row_by_row(model, hidden="EOS", skips=True)  # The positions come from the same wrong mask.
    is_read = "The padding is read as if it were tokens. Give the model a mask of all tokens that are real."
    return [
        (row_by_row(model, shift=1), "The positions count the padding. The first token of a prompt has position 0."),
        (row_by_row(model, hidden="EOS"), BY_IDS),
        (by_ids, BY_IDS),
        (row_by_row(model, hidden="completion"), "The mask hides the completion. It is 1 for its tokens, too."),
        (row_by_row(model, start=1), "Your positions begin with 1. The first token of a prompt has position 0."),
        (row_by_row(model, restart=True), "The positions begin with 0 again in the completion. They must go on there."),
        (row_by_row(model, pick="logit"), "You return logits. Take their log_softmax first."),
        (row_by_row(model, pick="largest"), "You return the largest log-probability. Pick the token's own."),
        (row_by_row(model, padding=1), is_read),
        (row_by_row(model, padding=1, shift=-1), is_read),
        (row_by_row(model, late=1), "You read the logits one position too late. They are those of the next token."),
        (row_by_row(model, temperature=1.0), "You forget the temperature. It divides the logits."),
        (row_by_row(model, temperature=2.0), "You multiply the logits by the temperature. It divides them."),
        (row_by_row(model, temperature=1.0) / 0.5, "You divide the log-probabilities by the temperature. " + BEFORE),
        (right / 0.5, "You divide by the temperature twice. " + BEFORE),
        (right * no_eos, "The EOS gets 0, but the policy chose it. Make the mask from lengths, not from ids."),
        (right * no_last, "The last token of a completion gets 0. lengths counts it, too."),
        (right * no_first, "The first token of a completion gets 0. Its logits are at the end of the prompt."),
        (right.exp() * mask, "You return probabilities. Return their logarithms."),
        (-right, "The sign is wrong. A log-probability is never above 0."),
    ]


def test_3_logprobs_of_a_padded_batch(answer):
    model = make_model()
    right = row_by_row(model)
    mistakes = mistakes_in_logprobs(model, right)
    passes = []
    model.transformer.h[0].register_forward_hook(lambda *_: passes.append(1))
    tensors = dict(
        prompts=torch.tensor([[3, 0, 4, 5], [0, 0, 6, 2], [0, 0, 0, 7]]),
        prompt_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]),
        completions=torch.tensor([[2, 7, 1], [0, 0, 0], [5, 0, 0]]),
        lengths=torch.tensor([3, 1, 2]),
    )
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    result = answer.completion_logprobs(model, *tensors.values(), 0.5)
    num_passes = len(passes)
    for name, tensor in tensors.items():
        if not torch.equal(tensor, copies[name]):
            stop(f"You change {name} in place. Work with a copy of it: {name}.clone()")
    given = dict(prompts=PROMPTS, completions=COMPLETIONS, EOS=EOS, padding=EOS, temperature=0.5)
    if isinstance(result, torch.Tensor) and result.shape == right.shape:
        mask = right != 0
        if is_close(result.where(mask, 0), right) and not is_close(result, right):
            message = "The tokens are right. But after the end of a completion the answer must be 0."
            stop(message, **given, **{"your answer": result, "right": right})
        early = row_by_row(model, late=-1)
        early[2] = result[2]  # The last prompt has one token. One position earlier there is only padding.
        mistakes.append((early, "You read the logits one position too early. They are those of the next token."))
        mistakes.append((result, where_to_look(result, right, mask)))
    check(result, right, mistakes, **given)
    if not result.requires_grad:
        stop("The numbers are right. But they have no gradient. Use no no_grad and no detach.")
    if num_passes > 2:
        stop(f"The numbers are right. But the model runs {num_passes} times. Run all rows in one pass.")


# ================================================= 4  advantages ================================================
GROUPS = torch.tensor([1.0, 2, 6, 0, 3, 0])  # two groups of three
MINUS_MEAN = torch.tensor([-2.0, -1, 3, -1, 2, -1])  # minus the mean of the group
DEVIATION = torch.tensor([7.0, 7, 7, 3, 3, 3]).sqrt()  # of the group
OF_BATCH = 5.2**0.5
MIXED = "You mix the groups. The first k episodes are a group. view(-1, k) makes them a row, and view(k, -1) does not."
KEEPDIM = "These shapes do not fit. Write keepdim=True, so that a mean has the shape [groups, 1], not [groups]."


def advantages_of(function, values, k):
    """The answer for a copy of these values."""
    try:
        return function(values.clone(), k)
    except RuntimeError as error:
        if "must match the size" not in str(error):
            raise
    stop(KEEPDIM)


def test_4a_leave_one_out_advantages(answer):
    check(
        advantages_of(answer.leave_one_out_advantages, GROUPS, 3),
        [-3, -1.5, 4.5, -1.5, 3, -1.5],
        [
            (MINUS_MEAN, "You include the episode itself in its baseline. Take the mean of the others."),
            (MINUS_MEAN * 2 / 3, "You multiply by (k - 1) / k. The factor is k / (k - 1)."),
            ([-1.6667, -0.3333, 5, -1, 3, -1], "You divide the sum of the others by k. There are k - 1 of them."),
            ([4, 3.5, 1.5, 1.5, 0, 1.5], "You return the baselines. Subtract them from the rewards."),
            ([3, 1.5, -4.5, 1.5, -3, 1.5], "The sign is wrong. Subtract the baseline from the reward."),
            ([-3.5, 2, 4, -1, -0.5, -1], MIXED),
            ([-3.5, 4, -0.5, 2, -1, -1], MIXED),  # the right numbers of the wrong groups, group by group
            ([0, 1.5, 6, -3, 3, -1.5], MIXED),  # groups of k - 1 = 2 episodes, with the factor of k
            ([-1, 1, 6, -6, 3, -3], MIXED),
            ([-1.2, 0, 4.8, -2.4, 1.2, -2.4], "You take the others of the whole batch. Take only those of the group."),
            (GROUPS - 2, "You subtract the mean of the whole batch. Take the others of the group."),
        ],
        rewards=GROUPS,
        k=3,
    )
    rewards = torch.tensor([1.0, 3, 0, 4])
    right = [-2, 2, -4, 4]
    check(advantages_of(answer.leave_one_out_advantages, rewards, 2), right, [], rewards=rewards, k=2)


def test_4b_group_normalized_advantages(answer):
    normalized = MINUS_MEAN / DEVIATION
    check(
        advantages_of(answer.group_normalized_advantages, GROUPS, 3),
        normalized,
        [
            (normalized * 1.5**0.5, "You use the biased variance. Divide the squares by k - 1, not by k."),
            (normalized / DEVIATION, "You divide by the variance. The deviation is its root."),
            (MINUS_MEAN, "You do not divide by the deviation."),
            (GROUPS / DEVIATION, "You do not subtract the mean."),
            (1.5 * normalized, "You subtract the mean of the others. The group's mean includes the episode."),
            ([-0.9271, 1.1546, 1.0596, -0.5773, -0.1324, -0.5773], MIXED),
            ([-0.9271, 1.0596, -0.1324, 1.1546, -0.5773, -0.5773], MIXED),
            ([-0.7071, 0.7071, 0.7071, -0.7071, 0.7071, -0.7071], MIXED),
            (MINUS_MEAN / OF_BATCH, "You divide by the deviation of the whole batch. Each group has its own."),
            ((GROUPS - 2) / OF_BATCH, "You use mean and deviation of the whole batch. Each group has its own."),
        ],
        scores=GROUPS,
        k=3,
    )
    # With k = 2, the deviations here are 0 and 7.07e-5. So it matters what is added, and where.
    scores = torch.tensor([0.5, 0.5, 0, 1e-4])
    result = advantages_of(answer.group_normalized_advantages, scores, 2)
    mistakes = [
        ([0, 0, -0.7071, 0.7071], "You add less than 1e-4 to the deviation."),
        ([0, 0, -0.5, 0.5], "You use 1e-4 as the lowest deviation (clamp or max). Add it to every deviation."),
        ([0, 0, -0.005, 0.005], "You add 1e-4 to the variance, inside the root. Add it to the deviation."),
        ([0, 0, -0.4082, 0.4082], "You add 1e-8 to the variance, inside the root. Add 1e-4 to the deviation."),
    ]
    if isinstance(result, torch.Tensor) and result.isnan().any():
        message = "The scores of a group are equal, so you divide 0 by 0. Add 1e-4 to the deviation."
        if result[2:].sum() > 1e-4:
            message = "You add 1e-4 to the quotient. Add it to the deviation, in parentheses, before you divide."
        mistakes = [(result, message)]
    check(result, [0, 0, -0.2929, 0.2929], mistakes, scores=scores, k=2)


# =============================================== 5  the clipped loss ============================================
ADVANTAGES = torch.tensor([2.0, 2, 2, -2, -2, -2])
RATIOS = torch.tensor([0.5, 1, 1.5, 0.5, 1, 1.5])
FIRST_MULTIPLY = "You compare the ratios. First multiply both by -A. Then take the larger product."
USE_AS_GIVEN = "You subtract the mean of the advantages, or divide by their deviation. Use them as they are given."
GIVEN_5 = dict(ratios=RATIOS, advantages=ADVANTAGES, cliprange=0.2)


def losses_at(answer, ratios, advantages=ADVANTAGES, cliprange=0.2):
    """New log-probabilities that give these ratios, and the losses of the answer."""
    old_logprobs = torch.tensor([-1.0, -2, -3, -1, -2, -3])
    logprobs = (old_logprobs + ratios.log()).requires_grad_()
    losses = answer.clipped_loss(logprobs, old_logprobs, advantages.clone(), cliprange)
    if isinstance(losses, tuple):
        stop("Return a tensor. You return a tuple. torch.max(x, dim) gives a tuple, too: its .values are the maxima.")
    if not isinstance(losses, torch.Tensor):
        stop(f"Return a tensor. You return {type(losses).__name__}.")
    return logprobs, losses


def gradient_at(answer, ratios):
    """The derivative of the sum of the losses with respect to each new log-probability."""
    logprobs, losses = losses_at(answer, ratios)
    gradient = None
    if losses.requires_grad:
        [gradient] = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True)
    if gradient is None:
        stop("Your losses have no gradient. These cut it off: detach, item, tolist, float, torch.tensor, no_grad.")
    return gradient


def test_5a_clipped_loss(answer):
    check(
        losses_at(answer, RATIOS)[1],
        [-1, -2, -2.4, 1.6, 2, 3],
        [
            ([-1.6, -2, -3, 1, 2, 2.4], "You take the smaller of the two losses. The clipped loss is the larger one."),
            ([1, 2, 2.4, -1.6, -2, -3], "The sign is wrong. This is maximized, and the loss is its negative."),
            (
                [-1.6, -2, -2.4, 1.6, 2, 2.4],
                "You always clip. Take the larger loss. (clamp_ changes the ratio. Use clamp.)",
            ),
            ([-1, -2, -3, 1, 2, 3], "You never clip."),
            ([1.6, 2, 3, -1, -2, -2.4], "You forget the minus in front of A, in both of the losses."),
            ([-1, -2, -2.4, 1, 2, 2.4], FIRST_MULTIPLY),
            ([-1.6, -2, -3, 1.6, 2, 3], FIRST_MULTIPLY),
            ([-1, -2, -2.4, 1, 2, 3], "You clip only at 1 + c. A bad token is clipped at 1 - c."),
            ([-1, -2, -3, 1.6, 2, 3], "You clip only at 1 - c. A good token is clipped at 1 + c."),
            ([-0.4, -0.4, -0.4, 1, 2, 3], "You clip at -c and c. Clip at 1 - c and 1 + c."),
            ([-1, -2, -2.4428, 1.6375, 2, 3], "You clip the difference of the log-probabilities. Clip the ratio."),
            ([0, -2, 0, 0, 2, 0], "You set the loss to 0 outside of 0.8 .. 1.2. A clipped loss is constant, not 0."),
            ([-2.4, -2, -1.7297, 3.3863, 2, 1.7297], "You divide log-probabilities. Divide probabilities."),
            ([-0.4564, -0.9129, -1.0954, 0.7303, 0.9129, 1.3693], USE_AS_GIVEN),
            ([-0.5, -1, -1.2, 0.8, 1, 1.5], USE_AS_GIVEN),
            ([-2.4, -2, -1.3333, 4, 2, 1.6], "The ratio is upside down. It is the new probability by the old one."),
            ([1.3863, 0, -0.8109, 1.6, 1.6, 1.6], "The ratio is the exponential of this difference."),
            ([-2, -2, -2, 2, 2, 2], "Your ratio is always 1. Use the old log-probabilities that are given."),
            (0.2, "You return the mean. Return the loss of each token."),
            (1.2, "You return the sum. Return the loss of each token."),
        ],
        **GIVEN_5,
    )

    advantages = torch.tensor([3.0, 3, 3, -1, -1, -1])
    check(
        losses_at(answer, RATIOS, advantages, 0.4)[1],
        [-1.5, -3, -4.2, 0.6, 1, 1.5],
        [
            ([-1.5, -3, -3.6, 0.8, 1, 1.5], "You always clip at 0.8 and 1.2. Use the argument cliprange."),
            ([-1, -2, -2.8, 1.2, 2, 3], USE_AS_GIVEN),
        ],
        **GIVEN_5 | dict(advantages=advantages, cliprange=0.4),
    )


def test_5b_gradient_of_the_clipped_loss(answer):
    check(
        gradient_at(answer, torch.ones(6)),
        [-2, -2, -2, 2, 2, 2],
        [
            ([0] * 6, "At ratio 1 your gradient is 0. But there each loss has the gradient -advantage."),
            ([2, 2, 2, -2, -2, -2], "The sign is wrong. A step would make good tokens less likely."),
            ([-1, -1, -1, 1, 1, 1], "Your gradient is half of the right one. Detach none of the two losses."),
            ([-1 / 3] * 3 + [1 / 3] * 3, "You return the mean. Return the loss of each token."),
        ],
        **GIVEN_5 | dict(ratios=torch.ones(6), compared="the derivative with respect to each log-probability"),
    )
    check(
        gradient_at(answer, RATIOS),
        [-1, -2, 0, 0, 2, 3],
        [
            ([0, -2, 0, 0, 2, 0], "Good tokens at ratio 0.5 and bad ones at 1.5 must have a gradient."),
            ([-1, -2, -3, 1, 2, 3], "You never clip. A good token that is already much more likely has gradient 0."),
            ([0, -2, -3, 1, 2, 0], "You take the smaller of the two losses. The clipped loss is the larger one."),
        ],
        **GIVEN_5 | dict(compared="the derivative with respect to each log-probability"),
    )


# ================================================ 6  one denominator ============================================
# A mini-batch of five episodes. The loss of a token is a parameter times its entry here. 7 is padding.
TOKENS = torch.tensor([[1.0, 2, 3], [4, 7, 7], [2, 2, 7], [6, 1, 7], [5, 5, 5]])
LENGTHS = torch.tensor([3, 1, 2, 2, 3])
REPEATED = -4  # episode 4 once more, which does not count
GRADIENT = 36 / 11  # the sum over all tokens, divided by their number
OWN_SIZE = "You divide each micro-batch by its own tokens. Divide by those of the whole mini-batch."
OWN_TOKENS = "Each process divides by its own tokens. Divide by the tokens of all processes."
STEPS = [  # the episodes of each micro-batch of each process; and what mistakes give
    (
        "one process, one micro-batch",
        [[[0, 1, 2, 3, 4]]],
        [
            (64 / 11, "You add up the padding, too. Use the mask."),
            (36 / 15, "You count the padding as tokens. Count the True entries of the masks."),
            (64 / 15, "The padding is in your sum and in your denominator. Use the mask for both."),
            (36 / 5, "You divide by the number of episodes. Divide by the number of tokens."),
            ((2 + 4 + 2 + 3.5 + 5) / 5, "You take a mean of the means of the episodes. Weigh all tokens alike."),
            (36, "You return the sum. Divide it by the number of tokens."),
            (-GRADIENT, "The sign is wrong. The losses of the tokens are given, and they are minimized."),
        ],
    ),
    (
        "one process, three micro-batches",
        [[[0, 1], [2], [3, 4]]],
        [
            ((10 / 4 + 4 / 2 + 22 / 5) / 3, f"This is a mean of means. {OWN_SIZE}"),
            (10 / 4 + 4 / 2 + 22 / 5, f"This is a sum of means. {OWN_SIZE}"),
            (3 * GRADIENT, "You multiply by the number of micro-batches. Their gradients add up to the right one."),
            (GRADIENT / 3, "You divide by the number of micro-batches, too. Their gradients add up to the right one."),
        ],
    ),
    (
        "two processes",
        [[[0, 1], [2]], [[3, 4], [REPEATED]]],
        [
            (GRADIENT / 2, "This is half of the right one: DDP takes a mean. Multiply by the number of processes."),
            ((14 / 6 + 22 / 5) / 2, OWN_TOKENS),
            (14 / 6 + 22 / 5, OWN_TOKENS),
            ((36 + 15) / 11, "You add up the repeated episode, which must not count. Multiply by is_real."),
            (36 / 14, "You count the tokens of the repeated episode. Leave out what is not real."),
            ((36 + 15) / 14, "The repeated episode is in your sum and in your denominator. It must not count."),
            (GRADIENT / 4, "You divide by the number of processes. DDP does so already: multiply by it."),
        ],
    ),
]


def make_micro_batch(episodes, parameter):
    rows = torch.tensor(episodes).abs()
    mask = torch.arange(TOKENS.shape[1]) < LENGTHS[rows][:, None]
    is_real = (torch.tensor(episodes) >= 0).float()
    return parameter * TOKENS[rows], mask, is_real


def check_form(losses, split):
    """Fail unless there is a list for each process, with a loss for each of its micro-batches."""
    form = f"Return a list for each process, with one loss for each of its micro-batches: {form_of(split)}."
    if losses is None:
        stop("Your function returns nothing. Its last line must be: return, and the list. " + form)
    if not isinstance(losses, list) or not all(isinstance(of_process, (list, tuple)) for of_process in losses):
        stop(form, **{"your answer": repr(losses)})
    if list(map(len, losses)) != list(map(len, split)):
        stop(f"{form} Yours is {form_of(losses)}.")
    for of_process in losses:
        for loss in of_process:
            if not (isinstance(loss, torch.Tensor) and loss.shape == () and loss.requires_grad):
                stop("Each loss must be a tensor with one number and with gradient.", **{"your answer": repr(loss)})


def form_of(lists) -> str:
    """For example [[loss, loss], [loss]]."""
    return show([["loss"] * len(of_process) for of_process in lists])


def gradient_after_ddp(answer, split) -> torch.Tensor:
    """Each process adds up the gradients of its micro-batches. Then DDP takes the mean over the processes."""
    parameter = torch.tensor(1.0, requires_grad=True)
    processes = []
    for of_process in split:
        processes.append([make_micro_batch(episodes, parameter) for episodes in of_process])
    given = [micro_batch for of_process in processes for micro_batch in of_process]
    copies = [[tensor.detach().clone() for tensor in micro_batch] for micro_batch in given]
    try:
        losses = answer.micro_batch_losses(processes)
    except NotImplementedError as error:
        if not str(error):
            raise  # It is the template's: the exercise is not written yet.
        losses = error
    if isinstance(losses, NotImplementedError):
        stop(f"PyTorch stops: {losses}. The operator & takes only True and False. is_real has numbers: multiply.")
    check_form(losses, split)
    for micro_batch, copy in zip(given, copies):
        for name, tensor, original in zip(("token_losses", "mask", "is_real"), micro_batch, copy):
            if not torch.equal(tensor, original):
                stop(f"You change {name} in place. Write a = a * b in place of a *= b.")
    if parameter.grad is not None:
        stop("Do not call backward. Return the losses. The test calls backward on them.")
    flat = [loss for of_process in losses for loss in of_process]
    token_losses = [micro_batch[0] for micro_batch in given]
    for position, loss in enumerate(flat):
        try:
            gradients = torch.autograd.grad(loss, token_losses, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            gradients = error
        if isinstance(gradients, RuntimeError):
            stop(f"backward on your loss stops: {gradients}", **{"your answer": repr(loss)})
        for other, gradient in enumerate(gradients):
            if other != position and gradient is not None and gradient.any():
                stop("A loss must use only the token losses of its own micro-batch. Yours uses those of another one.")
    gradients = []
    for of_process in losses:
        gradients.append(torch.autograd.grad(sum(of_process), parameter, retain_graph=True)[0])
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


# ========================================= 7  GAE with rewards at the end =======================================
LEFT_OUT = "You leave out the last token. Its index is length - 1."
NO_NEXT_VALUE = "You forget V of the next token in delta. It is delta_t = R_t + gamma V_{t+1} - V_t."
RETURNS = "You return Monte Carlo returns: the score, discounted, and no V. Use V_t and V_{t+1} in delta."
TOO_EARLY = "You give the score to the token before the last one. The index of the last token is length - 1."
OTHER_ROWS = "You write a score into other rows: rewards[:, columns] means all rows. Name the rows, too."


def gae_of(answer, scores, values, lengths):
    """The answer for copies of these tensors. It may not change them."""
    given = dict(scores=scores.clone(), values=values.clone(), lengths=lengths.clone())
    result = answer.gae_from_scores(*given.values(), 0.5, 0.8)
    for name, before in dict(scores=scores, values=values, lengths=lengths).items():
        if not torch.equal(given[name], before):
            stop(
                f"Your function changes its argument {name}. Make a new tensor, for example with torch.zeros_like.",
                **{"before the call": before, "after the call": given[name]},
            )
    return result


def test_7_gae_with_rewards_at_the_end(answer):
    scores = torch.tensor([4.0])
    values = torch.tensor([[1.0, 2, 3]])
    result = gae_of(answer, scores, values, torch.tensor([3]))
    if isinstance(result, torch.Tensor) and not result.is_floating_point():
        stop(f"Your numbers have the type {result.dtype}, which cuts off fractions. Use the type of the values.")
    check(
        result,
        [[-0.04, -0.1, 1]],
        [
            ([[0, -0.5, 0.8]], "You go from left to right. A_t needs A_{t+1}, so begin at the last token."),
            ([[-1, -1.9, 1.24]], "You go from left to right. A_t needs A_{t+1}, so begin at the last token."),
            ([[1, -0.1, -0.04]], "The numbers are right, but in reverse order. The first token comes first."),
            ([[0.04, 0.1, -1]], "The sign is wrong. The advantage is what came minus what was expected."),
            ([[-0.2, -0.5, 0]], LEFT_OUT),
            ([[-0.8, -2, 0]], LEFT_OUT),
            ([[-0.16, -0.4, 0]], LEFT_OUT),
            ([[-0.04, -0.1, 0]], LEFT_OUT),
            ([[0.92, 2.3, -3]], TOO_EARLY),
            ([[0.8, 2, 0]], TOO_EARLY),
            ([[-0.68, -1.7, -3]], "No token gets the score. The index of the last token is length - 1."),
            ([[0.92, 0.8, 1]], "You use lam in delta. There it is gamma that multiplies the next value."),
            ([[-0.36, -0.4, 1]], "You multiply the next value by gamma * lam. In delta it is gamma alone."),
            ([[-1.64, -1.6, 1]], NO_NEXT_VALUE),
            ([[-1.75, -1.5, 1]], NO_NEXT_VALUE),
            ([[1, 2, 4]], RETURNS),
            ([[0.64, 1.6, 4]], RETURNS),
            ([[-0.36, -0.9, -1]], "You use the score as the value after the last token. It is the reward R_t there."),
            ([[3, 2, 1]], "You return the score minus the value. That is right only for gamma = lam = 1."),
            ([[-0.5282, -0.6252, 1.1534]], "You normalize the advantages. Return them as the formula gives them."),
            ([[0, 0, 1]], "You forget lam: this is the discounted score minus V_t. Multiply A_{t+1} by gamma * lam."),
            ([[0.24, 0.3, 1]], "You forget gamma in front of A_{t+1}: it is multiplied by gamma * lam."),
            ([[1.56, 1.4, 1]], "You forget gamma in delta. It multiplies the next value."),
            ([[0, -0.5, 1]], "You return the deltas. Add gamma * lam * A_{t+1} to each."),
            ([[-0.2, -0.1, 1]], "You add only the next delta. Add A_{t+1}, which holds all later ones."),
            ([[0.96, 1.9, 4]], "These are the returns. The advantages are the returns minus the values."),
            ([[-0.5, 0, 2.5]], "The next value is off by one: you use V_t in place of V_{t+1}."),
            ([[-1.42, 0.2, 5.5]], "You swap V_t and V_{t+1}."),
            ([[2.24, 3.1, 4]], "You do not subtract V_t."),
            ([[0.2, 0.5, 2.5]], "After the last token the value is 0. You use the last value once more."),
            ([[5.56, 3.9, 1]], "You give the score to every token. Only the last token gets it."),
            ([[3.32, -1.7, -3]], "You give the score to the first token. The last token gets it."),
        ],
        **dict(scores=scores, values=values, lengths=[3], gamma=0.5, lam=0.8),
    )

    scores = torch.tensor([4.0, 1])
    values = torch.tensor([[1.0, 2, 3, 9], [2, 9, 9, 9]])
    right = torch.tensor([[-0.04, -0.1, 1, 0], [-1, 0, 0, 0]])
    is_read = "You read the value after the end of a completion. Put 0 in its place."
    given = dict(scores=scores, values=values, lengths=[3, 1], gamma=0.5, lam=0.8)
    result = gae_of(answer, scores, values, torch.tensor([3, 1]))
    in_last_column = "The score is in the last column. Put it at the last token."
    mistakes = [
        ([[-0.424, -1.06, -1.4, 0], [-1.936, 0, 0, 0]], in_last_column),
        ([[-0.68, -1.7, -3, 0], [-2, 0, 0, 0]], in_last_column),
        ([[-0.04, -0.1, 1, 0], [-0.516, 0, 0, 0]], "V and A are still those of the episode before. Begin with 0."),
        ([[0.96, -0.1, 1, 0], [-0.36, 0, 0, 0]], OTHER_ROWS),
        ([[3.96, -0.1, 1, 0], [-0.84, 0, 0, 0]], OTHER_ROWS),
        ([[0.104, 0.26, 1.9, 0], [-0.1, 0, 0, 0]], "Your mask has one True too many in each row."),
        ([[-0.424, -1.06, -1.4, 0], [-1.6, 0, 0, 0]], "The score is after the last token, whose index is length - 1."),
        ([[0.104, 0.26, 1.9, 0], [0.404, 0, 0, 0]], is_read),
        ([[0.68, 1.7, 5.5, 0], [3.5, 0, 0, 0]], is_read),
    ]
    if isinstance(result, torch.Tensor) and result.shape == right.shape:
        is_token = right != 0
        rest = result * ~is_token
        # Where a completion has ended, the numbers differ from one program to the next. So they are told apart first.
        mistakes = [(torch.tensor(value) + rest, message) for value, message in mistakes]
        mistakes.append((right + rest, "The tokens are right. But after the end of a completion the answer must be 0."))
    check(result, right, mistakes, **given)
