"""TRL's rewards that are made by a call, as `--reward benchmark/parity/trl_rewards.py:repetition`
names them."""

from trl.rewards import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
)

repetition = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
overlong = get_soft_overlong_punishment(max_completion_len=12, soft_punish_cache=8)
cosine = get_cosine_scaled_reward(max_len=12)
