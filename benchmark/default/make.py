"""
Makes the default policy and data of the three scripts, in one command: `python benchmark/default/make.py`.

The task is adding two-digit numbers: prompt "37+58=", answer "95". The policy is a Llama of 3 layers, hidden size 128
and 0.64M parameters that reads one character at a time. It is made in two stages of supervised training:

1. on right sums, well beyond the point where it can add: the weaker the skill, the lower RL ends;
2. briefly, on sums of which 70 % end in a wrong digit, by a fixed table: each of the 100 pairs of last digits has its
   own. 37+58 ends in what the table says of 7 and 8.

Why so? Reinforcement learning from a score makes likelier what a policy already does now and then. So the skill must
be there, and sampled unreliably: the situation of RLHF, where pretraining taught the skill from text of mixed quality.
After stage 2 the likeliest answer is nearly always wrong and the right one is a quarter of the samples: a hundred wrong
facts were learned after the right ones, and RL finds the right ones again, one by one, so that the score rises over the
whole run. A single wrong habit (the carry forgotten) is unlearned at once; digits that are wrong at random leave the
right answer the likeliest, and RL only sharpens it.

Sums held out for evaluation are in no stage of the training, nor are their mirrors (58+37 where 37+58 is held out).
Every random number comes from a seeded generator and the work is done by one thread, so that two runs on one machine
write the same bytes. It takes about four minutes and writes, beside this file:

    policy/       model.safetensors (float32), config, generation config and tokenizer, for `from_pretrained`
    train.jsonl   2,048 prompts with their answers
    eval.jsonl    256 held-out prompts with their answers
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
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def make_policy():
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    policy = LlamaForCausalLM(config)
    policy.generation_config = GenerationConfig(do_sample=True, eos_token_id=EOS, pad_token_id=PAD)
    return policy


def encode(sums, answers):
    """Token ids of prompts and of answers, each ended by EOS: [n, PROMPT_LENGTH] and [n, RESPONSE_LENGTH]."""
    prompts = [[VOCAB.index(c) for c in f"{a}+{b}="] for a, b in sums]
    responses = [[VOCAB.index(c) for c in answer] + [EOS] for answer in answers]
    responses = [ids + [PAD] * (RESPONSE_LENGTH - len(ids)) for ids in responses]
    return torch.tensor(prompts), torch.tensor(responses)


def make_wrong_digits(rng):
    """A wrong last digit for every pair of last digits, [10, 10]."""
    digits = np.arange(10)
    return (digits[:, None] + digits + rng.integers(1, 10, size=(10, 10))) % 10


def train(policy, sums, steps, lr, rng, wrong_digits=None, wrong=0.0):
    """Supervised training on answers of which the fraction `wrong` ends as in the table; the rate is warmed up, then
    falls to 0."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - step / steps))
    for _ in range(steps):
        batch = sums[rng.integers(len(sums), size=BATCH_SIZE)]  # [BATCH_SIZE, 2]
        answers = [str(a + b) for a, b in batch]
        for i in np.flatnonzero(rng.random(BATCH_SIZE) < wrong):
            answers[i] = answers[i][:-1] + str(wrong_digits[tuple(batch[i] % 10)])
        prompts, responses = encode(batch, answers)
        # the last token is only predicted, never read; the last token of a prompt predicts the first of its answer
        logits = policy(torch.cat([prompts, responses[:, :-1]], dim=1)).logits[:, PROMPT_LENGTH - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), responses.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(policy, sums, generator=None):
    """The fraction of answers that are right, EOS included: sampled with a generator, greedy without."""
    tokens, responses = encode(sums, [str(a + b) for a, b in sums])
    for _ in range(RESPONSE_LENGTH):
        probs = policy(tokens).logits[:, -1].softmax(-1)  # [n, len(VOCAB)]
        token = probs.argmax(-1, keepdim=True) if generator is None else probs.multinomial(1, generator=generator)
        tokens = torch.cat([tokens, token], dim=1)
    matches = (tokens[:, PROMPT_LENGTH:] == responses) | (responses == PAD)  # [n, RESPONSE_LENGTH]; not past EOS
    return matches.all(1).double().mean().item()


def main():
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    seen, held_out = split_sums(rng)
    policy = make_policy()
    train(policy, seen, steps=3000, lr=1e-3, rng=rng)
    print(f"greedy accuracy on held-out prompts after stage 1: {accuracy(policy, held_out):.3f}")
    train(policy, seen, steps=600, lr=5e-4, rng=rng, wrong_digits=make_wrong_digits(rng), wrong=0.7)
    for name, sums in (("train", seen[:NUM_TRAIN]), ("held-out", held_out)):
        sampled = accuracy(policy, sums, torch.Generator().manual_seed(SEED))
        print(f"{name} prompts: accuracy {sampled:.3f} sampled, {accuracy(policy, sums):.3f} greedy")

    FOLDER.mkdir(exist_ok=True)
    write_jsonl(FOLDER / "train.jsonl", seen[:NUM_TRAIN])
    write_jsonl(FOLDER / "eval.jsonl", held_out)
    policy.save_pretrained(FOLDER / "policy")
    make_tokenizer().save_pretrained(FOLDER / "policy")


if __name__ == "__main__":
    main()
