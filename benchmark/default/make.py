"""Makes the default policy, its data and its reward model: `python benchmark/default/make.py`.

benchmark/README.md says what the policy learns. Why so? Reinforcement learning makes likelier what
a policy already does now and then. So the skill must be there, and sampled unreliably, as in RLHF.
A single wrong habit (the carry forgotten) is unlearned at once. Digits that are wrong at random
leave the right answer the likeliest, and RL only sharpens it. And the weaker the skill was at
first, the lower RL ends.

The reward model is made as in RLHF. The policy draws 8 completions of each training prompt. A rule
stands in for the people who compare answers: of two completions of a prompt, it prefers a right one
to a wrong one. A copy of the policy gets a head that gives one number instead of a distribution,
and is trained on these pairs (Stiennon et al. 2020, arXiv 2009.01325). Only differences of its
scores mean something: the loss leaves the zero open. It has never learned what to think of answers
that this policy never gives, and `curves.py` shows what RL makes of that.

The policy has the configuration and the tokenizer that are in policy/. One thread and seeded
generators write the same bytes again on the same machine.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
import tyro
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run import POLICY, import_script, read_rows, write_rows

rloo = import_script("rloo")
FOLDER = Path(__file__).resolve().parent
TOKENIZER = transformers.AutoTokenizer.from_pretrained(POLICY)  # a token for each character
PROMPT_LENGTH = len("37+58=")
NUM_TRAIN = 2048
NUM_EVAL = 256
BATCH_SIZE = 128
# for the reward model
NUM_SAMPLES = 8  # completions of each prompt
SAMPLED_LENGTH = 8  # of the longest
NUM_PAIRS = 64  # in a batch
EPOCHS = 2
# what its random numbers are for
SAMPLES = 0
PAIR_ORDER = 2


def split_sums(rng):
    """Returns all sums but the held-out ones and their mirrors, and the held-out ones: int arrays
    [n, 2], shuffled."""
    sums = rng.permutation(list(itertools.product(range(10, 100), repeat=2)))  # [8100, 2]
    held_out = sums[:NUM_EVAL]
    excluded = [*held_out.tolist(), *held_out[:, ::-1].tolist()]
    seen = [pair for pair in sums.tolist() if pair not in excluded]
    return np.array(seen), held_out


def write_jsonl(path, sums):
    rows = [dict(prompt=f"{a}+{b}=", answer=str(a + b)) for a, b in sums.tolist()]
    write_rows(path, rows)


def fit(model, losses, steps, lr, warmup):
    """A step of AdamW for each of `losses`, which a generator makes; the rate is warmed up, then
    falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def factor(i):
        return min((i + 1) / warmup, 1 - i / steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def losses_on_answers(policy, sums, steps, rng, wrong_digits=None, wrong=0.0):
    """The losses of supervised training on answers, of which the fraction `wrong` ends as in the
    table, and all with EOS."""
    for _ in range(steps):
        batch = sums[rng.integers(len(sums), size=BATCH_SIZE)]  # [BATCH_SIZE, 2]
        answers = [str(a + b) for a, b in batch]
        for i in np.flatnonzero(rng.random(BATCH_SIZE) < wrong):
            wrong_digit = wrong_digits[tuple(batch[i] % 10)]
            answers[i] = answers[i][:-1] + str(wrong_digit)
        texts = [f"{a}+{b}={answer}<eos>" for (a, b), answer in zip(batch, answers)]
        tokens = TOKENIZER(texts, padding=True, return_tensors="pt")["input_ids"]
        # The last token is only predicted, never read. The last token of a prompt predicts the
        # first of its answer.
        logits = policy(tokens[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
        targets = tokens[:, PROMPT_LENGTH:].flatten()
        pad = TOKENIZER.pad_token_id
        yield torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=pad)


def make_policy(folder, seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    seen, held_out = split_sums(rng)
    policy = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(POLICY))
    policy.generation_config = transformers.GenerationConfig.from_pretrained(POLICY)
    losses = losses_on_answers(policy, seen, 3000, rng)
    fit(policy, losses, 3000, lr=1e-3, warmup=50)
    # 10 x 10 wrong last digits, one for every pair of last digits
    last_digits = np.add.outer(range(10), range(10))
    wrong_digits = (last_digits + rng.integers(1, 10, size=(10, 10))) % 10
    losses = losses_on_answers(policy, seen, 600, rng, wrong_digits, wrong=0.7)
    fit(policy, losses, 600, lr=5e-4, warmup=50)
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", seen[:NUM_TRAIN])
    write_jsonl(folder / "eval.jsonl", held_out)
    policy.save_pretrained(folder / "policy")
    for file in POLICY.glob("tokenizer*"):
        (folder / "policy" / file.name).write_bytes(file.read_bytes())


# ---- the reward model


def complete(policy, prompts, uniforms):
    """Complete prompts as the scripts do -> the tokens of each completion.

    uniforms: [prompts, length], the random numbers
    """
    rloo.start_accelerator(rloo.check_flags(rloo.Args()))
    end = transformers.EosTokenCriteria(TOKENIZER.eos_token_id)
    ends = transformers.StoppingCriteriaList([end])
    sampler = rloo.Sampler(policy, TOKENIZER, ends, is_recorded=False)
    batch = rloo.sample(sampler, rloo.pad_left(prompts), torch.from_numpy(uniforms), 1.0)
    return [[token for token in row if token >= 0] for row in batch["tokens"].tolist()]


def draw_pairs(policy, path, seed):
    """Samples completions of a file's prompts -> pairs (chosen, rejected) of tokens, prompt and
    completion.

    A pair counts once, however often its two completions were drawn.
    """
    rows = read_rows(path)
    prompts = [TOKENIZER(row["prompt"])["input_ids"] for row in rows for _ in range(NUM_SAMPLES)]
    uniforms = rloo.keyed_rng(seed, SAMPLES).random((len(prompts), SAMPLED_LENGTH))
    drawn = complete(policy, prompts, uniforms)
    pairs = []
    for i, row in enumerate(rows):
        right, wrong = {}, {}  # as sets that keep their order
        for j in range(i * NUM_SAMPLES, (i + 1) * NUM_SAMPLES):
            text = TOKENIZER.decode(drawn[j], skip_special_tokens=True)
            side = right if text.strip() == row["answer"] else wrong
            side[(*prompts[j], *drawn[j])] = None
        pairs += itertools.product(right, wrong)
    return pairs


def scores_of(model, sequences):
    """The head's output at each last token, with gradient, [rows]."""
    hidden = rloo.forward(model.base_model, rloo.pad_left(sequences))
    return model.score(hidden[:, -1]).squeeze(-1)


def losses_of(model, pairs, batches):
    """Bradley and Terry's loss of each batch of pairs."""
    for batch in batches:
        chosen, rejected = zip(*(pairs[i] for i in batch))
        chosen_scores, rejected_scores = scores_of(model, chosen + rejected).chunk(2)
        yield -torch.nn.functional.logsigmoid(chosen_scores - rejected_scores).mean()


def make_reward_model(folder, seed):
    logging.set_verbosity_error()  # the new head is meant to be missing in the policy's checkpoint
    torch.manual_seed(seed)
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy")
    pairs = draw_pairs(policy, folder / "train.jsonl", seed)
    classifier = transformers.AutoModelForSequenceClassification
    model = classifier.from_pretrained(folder / "policy", num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    rng = rloo.keyed_rng(seed, PAIR_ORDER)
    order = np.concatenate([rng.permutation(len(pairs)) for _ in range(EPOCHS)])
    batches = np.array_split(order, len(order) // NUM_PAIRS)
    losses = losses_of(model, pairs, batches)
    fit(model, losses, len(batches), lr=3e-4, warmup=10)
    model.save_pretrained(folder / "reward_model")
    TOKENIZER.save_pretrained(folder / "reward_model")


def main(seed: int = 1, folder: Path = FOLDER):
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    make_policy(folder, seed)
    make_reward_model(folder, seed)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
