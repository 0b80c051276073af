"""Your answers to the exercises in docs/exercises/README.md.

Copy this file, and write your answers into the copy:

    cp docs/exercises/answers.py my_answers.py
    pytest docs/exercises --answer my_answers.py
    pytest docs/exercises --answer my_answers.py -k 4        # only exercise 4

A shape such as [rows, tokens] names the axes of a tensor.
"""

import torch  # noqa: F401


# ===================================== 1  the counts of a run =====================================
def count_run(
    num_prompts: int,
    num_train_epochs: float,
    k: int,
    batch_size: int,
    num_mini_batches: int,
    num_ppo_epochs: int,
    per_device_train_batch_size: int,
    world_size: int,
) -> dict:
    """The counts of a run, before it starts.

    num_train_epochs: may be a fraction, such as 0.5; the other arguments are whole numbers
    Returns a dict of whole numbers (int) with these keys: episodes, iterations, last_batch_size,
    steps, gradient_accumulation_steps.
    """
    raise NotImplementedError


# ============================== 2  sampling by the inverse transform ==============================
def pick_tokens(log_p, uniforms):
    """Pick a token in every row, with a random number that is given.

    log_p: [rows, vocabulary], float32, log-probabilities
    uniforms: [rows], float64, numbers in [0, 1)
    Returns [rows], the index of the picked token in the vocabulary, as whole numbers (torch.int64).
    """
    raise NotImplementedError


# ============================= 3  log-probabilities of a padded batch =============================
def completion_logprobs(model, prompts, prompt_mask, completions, lengths, temperature: float):
    """The log-probability of every token of the completions, in one forward pass.

    model: a causal language model of transformers
    prompts: [rows, longest prompt], token ids, padded on the left
    prompt_mask: [rows, longest prompt], 1 for a token and 0 for padding
    completions: [rows, longest completion], token ids, padded on the right
    lengths: [rows], tokens of each completion, its EOS included
    Returns [rows, longest completion], with gradient, and 0 after the end of a completion.
    """
    raise NotImplementedError


# ========================================= 4  advantages ==========================================
def leave_one_out_advantages(rewards, k: int):
    """The reward minus the mean reward of the others in the group.

    rewards: [episodes], the k episodes of a group side by side. Returns [episodes].
    """
    raise NotImplementedError


def group_normalized_advantages(scores, k: int):
    """The score minus the group's mean, divided by the group's standard deviation plus 1e-4.

    scores: [episodes], the k episodes of a group side by side. Returns [episodes].
    """
    raise NotImplementedError


# ====================================== 5  the clipped loss =======================================
def clipped_loss(logprobs, old_logprobs, advantages, cliprange: float):
    """PPO's clipped loss of every token, which is minimized. It is not averaged.

    logprobs: [tokens], with gradient; old_logprobs, advantages: [tokens]
    Returns [tokens], with gradient.
    """
    raise NotImplementedError


# ======================================= 6  one denominator =======================================
def micro_batch_losses(processes: list) -> list:
    """One loss for each micro-batch, on which its process will call backward.

    processes: a list of micro-batches for each process. A micro-batch is a tuple of three tensors:
        token_losses: [episodes, tokens], with gradient
        mask: [episodes, tokens], True where a token belongs to the completion
        is_real: [episodes], 1.0; or 0.0 for a repeated episode, which must not count
    Returns a list for each process, with one loss (a tensor with one number) for each of its
    micro-batches.
    """
    raise NotImplementedError


# ================================= 7  GAE with rewards at the end =================================
def gae_from_scores(scores, values, lengths, gamma: float, lam: float):
    """Generalized advantage estimates. The only reward is the score, at a completion's last token.

    scores: [episodes]; values: [episodes, tokens], with any numbers after the end of a completion;
    lengths: [episodes], tokens of each completion, its EOS included. Do not change the arguments.
    Returns [episodes, tokens], 0 after the end of a completion.
    """
    raise NotImplementedError
