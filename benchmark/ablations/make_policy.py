"""A policy whose answers have very different lengths: `python benchmark/ablations/make_policy.py`, two minutes.

The default policy is trained for a few more steps on its own sampled answers. If a sum begins with an odd digit, 8 to
12 spaces stand behind its answer. `exact_match` strips them. So half of the prompts take four times as many tokens, and
there is the same thing to learn. Writes policy/ beside this file.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import BENCHMARK, POLICY, read_rows
from win_rate import complete

FOLDER = Path(__file__).resolve().parent / "policy"
STEPS, BATCH_SIZE, LEARNING_RATE = 400, 128, 5e-4


def is_long(prompt: str) -> bool:
    return int(prompt[0]) % 2 == 1


def main():
    torch.set_num_threads(1)
    tokenizer, policy = AutoTokenizer.from_pretrained(POLICY), AutoModelForCausalLM.from_pretrained(POLICY)
    texts = [row["prompt"] for row in read_rows(BENCHMARK / "default" / "train.jsonl")] * 4
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    rng = np.random.default_rng([1, 0])
    answers, _ = complete(policy, tokenizer, prompts, rng.random((len(prompts), 4)))
    rows = []  # prompt, answer, spaces, EOS
    for text, prompt, answer in zip(texts, prompts, answers):
        spaces = [tokenizer.convert_tokens_to_ids(" ")] * int(rng.integers(8, 13)) * is_long(text)
        rows.append(prompt + answer[:-1] + spaces + answer[-1:])
    longest, start = max(map(len, rows)), len(prompts[0])
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    labels[:, :start] = -100  # only the answers are learned
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in range(STEPS):
        chosen = torch.from_numpy(rng.integers(len(rows), size=BATCH_SIZE))
        policy(input_ids=tokens[chosen], labels=labels[chosen]).loss.backward()
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    policy.save_pretrained(FOLDER), tokenizer.save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
