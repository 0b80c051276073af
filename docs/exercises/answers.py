"""Your answers to the exercises in docs/exercises/README.md.

Copy this file, and write your answers into the copy:

    cp docs/exercises/answers.py my_answers.py
    pytest docs/exercises --answer my_answers.py
    pytest docs/exercises --answer my_answers.py -k 2        # only exercise 2

A shape such as [rows, tokens] names the axes of a tensor.
"""

import torch  # noqa: F401


# ============================== 1  sampling by the inverse transform ==============================
def pick_tokens(p, uniforms):
    """Pick a token in every row, with a random number that is given.

    p: [rows, vocabulary], float32, probabilities
    uniforms: [rows], float64, numbers in [0, 1)
    Returns [rows], the index of the picked token in the vocabulary, as whole numbers (torch.int64).
    """
    raise NotImplementedError


# ========================================= 2  advantages ==========================================
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


# ====================================== 3  the clipped loss =======================================
def clipped_loss(logprobs, old_logprobs, advantages, cliprange: float):
    """PPO's clipped loss of every token, which is minimized. It is not averaged.

    logprobs: [tokens], with gradient; old_logprobs, advantages: [tokens]
    Returns [tokens], with gradient.
    """
    raise NotImplementedError


# ================================= 4  GAE with rewards at the end =================================
def gae_from_scores(scores, values, lengths, gamma: float, lam: float):
    """Generalized advantage estimates. The only reward is the score, at a completion's last token.

    scores: [episodes]; values: [episodes, tokens], with any numbers after the end of a completion;
    lengths: [episodes], tokens of each completion, its EOS included. Do not change the arguments.
    Returns [episodes, tokens], 0 after the end of a completion.
    """
    raise NotImplementedError
