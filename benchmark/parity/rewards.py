"""TRL's own reward functions, unchanged, as `--reward` of Tally's scripts: the same numbers as TRL logs?

    OMP_NUM_THREADS=1 python benchmark/parity/rewards.py              # two minutes on one core

It runs in the environment of trl_trainer.py. A tiny random model samples 256 completions, which TRL's trainer gets,
too. Compared are what TRL's `_calculate_rewards` gives every completion with Tally's score, and the mean that TRL logs
with Tally's `objective/scores`. One prompt in eight has a solution that math_verify cannot read. There accuracy rewards
return None, and both must leave it out of the mean. The exit status is 1 if a number differs.
"""

import itertools
import json
import math
import sys
import tempfile
import warnings
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
import trl_rewards
import trl_trainer  # first: it makes the modules below importable
from run import run, write_lines
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import rewards as trl_own

HERE = Path(__file__).resolve().parent
VOCAB = ["<pad>", "<eos>", "<think>", "</think>", "\\boxed{2}", "\\boxed{3}", "1", "2", "+", "=", " ", "?", "!"]
TEMPLATE = "{% for m in messages %}?{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
OWN = ("think_format_reward", "accuracy_reward", "reasoning_accuracy_reward")
MADE = ("repetition", "overlong", "cosine")  # by a call, in trl_rewards.py
EPISODES, K, RESPONSE_LENGTH = 256, 4, 12


def save_model(folder: Path):
    """A random model, nearly uniform, and a tokenizer with a chat template."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?think>|\\boxed\{\d\}|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(VOCAB), bos_token_id=None, eos_token_id=1, pad_token_id=0, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_rows() -> list[dict]:
    """16 sums as chat prompts; of every eighth the solution cannot be read."""
    sums = ["+".join(terms) for n in (2, 3) for terms in itertools.product("12", repeat=n)]
    rows = []
    for i, text in enumerate([*sums, "1+1=", "1+2=", "2+1=", "="]):
        solution = "nothing" if i % 8 == 0 else f"${2 + i % 2}$"
        rows.append({"prompt": [{"role": "user", "content": text}], "solution": solution})
    return rows


def run_trl(algorithm: str, reward, rollout: list[dict], rows: list[dict], folder: Path) -> tuple[torch.Tensor, float]:
    """What TRL's trainer gives the completions of Tally's rollout, nan for None, and the mean reward that it logs."""
    model, kept = folder / "model", []
    tokenizer = AutoTokenizer.from_pretrained(model)
    rendered = dict(tokenize=False, add_generation_prompt=True)
    row_of = {tokenizer.apply_chat_template(row["prompt"], **rendered): row for row in rows}
    data = dict(rows=[row_of[row["prompt"]] for row in rollout[::K]], given=[[row["token_ids"] for row in rollout]])
    size = dict(batch=EPISODES, max_steps=1, max_completion_length=RESPONSE_LENGTH, shuffle_dataset=False)
    with tempfile.TemporaryDirectory(dir=folder) as output:
        trainer = trl_trainer.make_trainer(algorithm, reward=reward, folder=output, model=model, **data, **size)
        calculate = trainer._calculate_rewards
        with patch.object(trainer, "_calculate_rewards", lambda *inputs: kept.append(calculate(*inputs)) or kept[-1]):
            trainer.train()
    return kept[0][:, 0], next(row["reward"] for row in trainer.state.log_history if "reward" in row)


def compare(script: str, name: str, rows: list[dict], folder: Path) -> dict:
    """The rewards of a rollout of Tally's, by both programs."""
    spec = f"trl.rewards:{name}" if name in OWN else f"{HERE / 'trl_rewards.py'}:{name}"
    flags = f"--model-path {folder / 'model'} --dataset {folder / 'prompts.jsonl'} --reward {spec} --save-rollouts "
    flags += "--learning-rate 1e-4 "
    flags += f"--total-episodes {EPISODES} --batch-size {EPISODES} --response-length {RESPONSE_LENGTH}"
    result = run(script, flags)
    rollout, mean = result["rollouts"], result["metrics"][-1]["objective/scores"]
    theirs, logged = run_trl(script, getattr(trl_own if name in OWN else trl_rewards, name), rollout, rows, folder)
    ours = torch.tensor([math.nan if row["score"] is None else row["score"] for row in rollout])
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())  # nan: both have no score
    row = dict(script=script, reward=name, completions=len(ours), none=int(theirs.isnan().sum()))
    row |= dict(differ=int((~same).sum()), mean=mean, trl=logged, mean_difference=abs(mean - logged))
    return row | dict(values=len(set(ours[~ours.isnan()].tolist())))


def main():
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    results, rows = [], make_rows()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        save_model(folder / "model")
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for script, name in itertools.product(("rloo", "grpo"), OWN + MADE):
            results.append(compare(script, name, rows, folder))
    write_lines(HERE / "rewards.json", results)
    wrong = [row for row in results if row["differ"] or row["mean_difference"] > 1e-6]
    print(f"numbers that differ: {wrong}")
    sys.exit(len(wrong) > 0)


if __name__ == "__main__":
    main()
