"""Makes the reward model of the default task, as RLHF does: `python benchmark/default/make_reward_model.py`, a minute.

1. The default policy draws 8 completions of each training prompt, at temperature 1.
2. A rule stands in for the people who compare answers: of two completions of a prompt, it prefers a right one to a
   wrong one. A pair counts once, however often its two completions were drawn.
3. A copy of the policy gets a head that gives one number instead of a distribution. It is trained on the pairs with the
   loss of Bradley and Terry, -log sigmoid(r_chosen - r_rejected) (Stiennon et al. 2020, arXiv 2009.01325).

The score is the output of the head at the last token. Only differences of scores mean something: the loss leaves the
zero open. As in RLHF, all pairs come from the policy before RL. So the model has never learned what to think of answers
that this policy never gives, and `reward_model_curves.py` shows what RL makes of that. It prints the accuracy on pairs
of held-out prompts (about six in seven are right), and writes `reward_model/`, the same bytes again on one machine.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
from make import fit
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from win_rate import complete

from rloo import keyed_rng, pad_left

FOLDER = Path(__file__).resolve().parent
NUM_SAMPLES = 8  # of each prompt
RESPONSE_LENGTH = 8
BATCH_SIZE = 64  # pairs
EPOCHS = 2
LEARNING_RATE = 3e-4
SEED = 1
TRAIN_SAMPLES, EVAL_SAMPLES, PAIR_ORDER = range(3)  # what random numbers are for


def draw_pairs(policy, tokenizer, path: Path, purpose: int) -> list[tuple[list[int], list[int]]]:
    """Samples completions of a file's prompts -> pairs (chosen, rejected) of token lists, prompt and completion."""
    rows = [json.loads(line) for line in path.read_text().splitlines() for _ in range(NUM_SAMPLES)]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    drawn, _ = complete(policy, tokenizer, prompts, keyed_rng(SEED, purpose).random((len(rows), RESPONSE_LENGTH)))
    chosen, rejected = {}, {}  # of each prompt; dicts as sets that keep their order
    for row, prompt, tokens in zip(rows, prompts, drawn):
        is_right = tokenizer.decode(tokens, skip_special_tokens=True).strip() == row["answer"]
        sequences = chosen if is_right else rejected
        sequences.setdefault(row["prompt"], {})[(*prompt, *tokens)] = None
    return [
        (list(right), list(wrong))
        for prompt in chosen
        for right, wrong in itertools.product(chosen[prompt], rejected.get(prompt, ()))
    ]


def scores_of(model, sequences: list[list[int]]) -> torch.Tensor:
    """The head's output at each last token, with gradient, [rows]."""
    input_ids, mask = pad_left(sequences, "cpu")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = model.base_model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return model.score(hidden.last_hidden_state[:, -1]).squeeze(-1)


def losses_of(model, pairs: list, batches: list):
    """Bradley and Terry's loss of each batch of pairs."""
    for batch in batches:
        chosen, rejected = zip(*(pairs[i] for i in batch))
        chosen_scores, rejected_scores = scores_of(model, chosen + rejected).chunk(2)
        yield -torch.nn.functional.logsigmoid(chosen_scores - rejected_scores).mean()


@torch.no_grad()
def accuracy(model, pairs: list) -> float:
    """The fraction of pairs whose right completion scores higher."""
    chosen, rejected = (scores_of(model, list(side)) for side in zip(*pairs))
    return (chosen > rejected).double().mean().item()


def main():
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # the new head is meant to be missing in the policy's checkpoint
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "policy")
    policy = AutoModelForCausalLM.from_pretrained(FOLDER / "policy", dtype=torch.float32).eval()
    pairs = draw_pairs(policy, tokenizer, FOLDER / "train.jsonl", TRAIN_SAMPLES)
    held_out = draw_pairs(policy, tokenizer, FOLDER / "eval.jsonl", EVAL_SAMPLES)

    model = AutoModelForSequenceClassification.from_pretrained(FOLDER / "policy", num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    rng = keyed_rng(SEED, PAIR_ORDER)
    order = np.concatenate([rng.permutation(len(pairs)) for _ in range(EPOCHS)])
    batches = np.array_split(order, len(order) // BATCH_SIZE)
    fit(model, losses_of(model, pairs, batches), len(batches), LEARNING_RATE, warmup=10)
    for name, some in (("training", pairs), ("held-out", held_out)):
        print(f"{len(some):,} {name} pairs: accuracy {accuracy(model, some):.3f}")
    model.save_pretrained(FOLDER / "reward_model")
    tokenizer.save_pretrained(FOLDER / "reward_model")


if __name__ == "__main__":
    main()
