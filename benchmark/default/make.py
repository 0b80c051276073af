"""Makes the default policy and data of the three scripts: `python benchmark/default/make.py`, some five minutes.

The task is adding two-digit numbers: prompt "37+58=", answer "95". The policy is a Llama of 0.64M parameters that reads
one character at a time. First it learns right sums, well beyond the point where it can add: the weaker the skill, the
lower RL ends. Then it briefly learns sums of which 70 % end in a wrong digit, by a fixed table for the 100 pairs of
last digits.

Why so? Reinforcement learning makes likelier what a policy already does now and then. So the skill must be there, and
sampled unreliably, as in RLHF. A single wrong habit (the carry forgotten) is unlearned at once. Digits that are wrong
at random leave the right answer the likeliest, and RL only sharpens it.

One thread and seeded generators write the same bytes again on the same machine: policy/, train.jsonl and eval.jsonl.
"""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

FOLDER = Path(__file__).resolve().parent
VOCAB = ["<pad>", "<eos>", *"0123456789+-= "]
PAD, EOS = 0, 1
PROMPT_LENGTH = len("37+58=")
RESPONSE_LENGTH = len("198") + 1  # the longest answer and its EOS
NUM_TRAIN, NUM_EVAL = 2048, 256
BATCH_SIZE = 128
SEED = 1


def split_sums(rng):
    """Returns all sums but the held-out ones and their mirrors, and the held-out ones: int arrays [n, 2], shuffled."""
    sums = rng.permutation([(a, b) for a in range(10, 100) for b in range(10, 100)])  # [8100, 2]
    held_out = {tuple(sorted(pair)) for pair in sums[:NUM_EVAL].tolist()}
    seen = [pair for pair in sums.tolist() if tuple(sorted(pair)) not in held_out]
    return np.array(seen), sums[:NUM_EVAL]


def write_jsonl(path, sums):
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums.tolist()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer():
    """One token per character; a character outside the vocabulary raises an error."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    special = dict(pad_token="<pad>", eos_token="<eos>", model_max_length=64, clean_up_tokenization_spaces=False)
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **special)


def make_policy():
    sizes = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4)
    sizes |= dict(vocab_size=len(VOCAB), max_position_embeddings=64, attention_dropout=0.0)
    policy = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD))
    policy.generation_config = GenerationConfig(do_sample=True, eos_token_id=EOS, pad_token_id=PAD)
    return policy


def encode(sums, answers):
    """Token ids of prompts and of answers, each ended by EOS: [n, PROMPT_LENGTH] and [n, RESPONSE_LENGTH]."""
    prompts = [[VOCAB.index(c) for c in f"{a}+{b}="] for a, b in sums]
    responses = [[VOCAB.index(c) for c in answer] + [EOS] for answer in answers]
    responses = [ids + [PAD] * (RESPONSE_LENGTH - len(ids)) for ids in responses]
    return torch.tensor(prompts), torch.tensor(responses)


def fit(model, losses, steps: int, lr: float, warmup: int):
    """A step of AdamW for each of `losses`, which a generator makes; the rate is warmed up, then falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / warmup, 1 - i / steps))
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def losses_on_answers(policy, sums, steps, rng, wrong_digits=None, wrong=0.0):
    """The losses of supervised training on answers of which the fraction `wrong` ends as in the table."""
    for _ in range(steps):
        batch = sums[rng.integers(len(sums), size=BATCH_SIZE)]  # [BATCH_SIZE, 2]
        answers = [str(a + b) for a, b in batch]
        for i in np.flatnonzero(rng.random(BATCH_SIZE) < wrong):
            answers[i] = answers[i][:-1] + str(wrong_digits[tuple(batch[i] % 10)])
        prompts, responses = encode(batch, answers)
        # the last token is only predicted, never read; the last token of a prompt predicts the first of its answer
        logits = policy(torch.cat([prompts, responses[:, :-1]], dim=1)).logits[:, PROMPT_LENGTH - 1 :]
        yield torch.nn.functional.cross_entropy(logits.flatten(0, 1), responses.flatten(), ignore_index=PAD)


def main():
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    seen, held_out = split_sums(rng)
    policy = make_policy()
    fit(policy, losses_on_answers(policy, seen, 3000, rng), steps=3000, lr=1e-3, warmup=50)
    # 10 x 10 wrong last digits, one for every pair of last digits
    wrong_digits = (np.add.outer(range(10), range(10)) + rng.integers(1, 10, size=(10, 10))) % 10
    fit(policy, losses_on_answers(policy, seen, 600, rng, wrong_digits, wrong=0.7), steps=600, lr=5e-4, warmup=50)

    write_jsonl(FOLDER / "train.jsonl", seen[:NUM_TRAIN])
    write_jsonl(FOLDER / "eval.jsonl", held_out)
    policy.save_pretrained(FOLDER / "policy")
    make_tokenizer().save_pretrained(FOLDER / "policy")


if __name__ == "__main__":
    main()
