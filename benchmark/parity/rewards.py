"""TRL's reward functions, unchanged, as `--reward` of rloo.py and grpo.py: does each completion get
what TRL gives it?

    python benchmark/parity/rewards.py

It runs in the environment of trl_trainer.py. A tiny random model samples 256 completions, which
TRL's trainer gets, too. Compared are what TRL's `_calculate_rewards` gives every completion with
Tally's score, and the mean that TRL logs with Tally's `objective/scores`. One prompt in eight has a
solution that math_verify cannot read. There accuracy rewards return None, and both must leave it
out of the mean. The program stops where a number differs. Writes rewards.json. A smoke run has no
TRL, and another reward.
"""

import itertools
import json
import math
import tempfile
import warnings
from pathlib import Path
from unittest.mock import patch

import trl_trainer  # first: it makes the modules below importable
from run import Part, import_script, main, run

RESULT = Path(__file__).with_suffix(".json")
VOCAB = ["<pad>", "<eos>", "<think>", "</think>", "\\boxed{2}", "\\boxed{3}", *"12+= ?!"]
TEMPLATE = "{% for m in messages %}?{{ m['content'] }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}!{% endif %}"
OWN = [f"trl.rewards:{name}_reward" for name in ("think_format", "accuracy", "reasoning_accuracy")]
# Three are made by a call.
MADE = [f"benchmark/parity/trl_rewards.py:{name}" for name in ("repetition", "overlong", "cosine")]
EPISODES, K, RESPONSE_LENGTH = 256, 4, 12
FLAGS = (
    "--model-path WORLD/model --dataset WORLD/prompts.jsonl --save-rollouts --learning-rate 1e-4 "
    f"--total-episodes {EPISODES} --batch-size {EPISODES} --response-length {RESPONSE_LENGTH}"
)


def save_model(folder: Path):
    """A random model, nearly uniform, and a tokenizer with a chat template."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}))
    backend.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"</?think>|\\boxed\{\d\}|[\s\S]"), "isolated"
    )
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB), bos_token_id=None, eos_token_id=1, pad_token_id=0, **shape
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_rows() -> list[dict]:
    """16 sums as chat prompts; of every eighth the solution cannot be read."""
    sums = ["+".join(terms) for n in (2, 3) for terms in itertools.product("12", repeat=n)]
    rows = []
    for i, text in enumerate([*sums, "1+1=", "1+2=", "2+1=", "="]):
        solution = "nothing" if i % 8 == 0 else f"${2 + i % 2}$"
        rows.append({"prompt": [{"role": "user", "content": text}], "solution": solution})
    return rows


def run_trl(algorithm: str, reward, rollout: list[dict], rows: list[dict], folder: Path) -> tuple:
    """What TRL's trainer gives the completions of Tally's rollout, nan for None, and the mean
    reward that it logs."""
    from transformers import AutoTokenizer

    kept = []
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    row_of = {}
    for row in rows:
        text = tokenizer.apply_chat_template(
            row["prompt"], tokenize=False, add_generation_prompt=True
        )
        row_of[text] = row
    data = dict(
        rows=[row_of[row["prompt"]] for row in rollout[::K]],
        given=[[row["token_ids"] for row in rollout]],
    )
    size = dict(
        batch=EPISODES, max_steps=1, max_completion_length=RESPONSE_LENGTH, shuffle_dataset=False
    )
    with tempfile.TemporaryDirectory() as output:
        model = folder / "model"
        trainer = trl_trainer.make_trainer(
            algorithm, reward=reward, folder=output, model=model, **data, **size
        )
        calculate = trainer._calculate_rewards
        with patch.object(
            trainer,
            "_calculate_rewards",
            lambda *inputs: kept.append(calculate(*inputs)) or kept[-1],
        ):
            trainer.train()
    logged = next(row["reward"] for row in trainer.state.log_history if "reward" in row)
    return kept[0][:, 0], logged


def compare(script: str, spec: str, result: dict, rows: list[dict], folder: Path) -> dict:
    """The rewards of a rollout of Tally's, by both programs."""
    import torch

    mean = result["metrics"][-1]["objective/scores"]
    scores = [row["score"] for row in result["rollouts"]]
    theirs, logged = run_trl(
        script, import_script("rloo").load_reward(spec), result["rollouts"], rows, folder
    )
    ours = torch.tensor([math.nan if score is None else score for score in scores])
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())  # nan: both have no score
    row = dict(
        completions=len(scores),
        none=scores.count(None),
        differ=int((~same).sum()),
        mean=mean,
        trl=logged,
    )
    row |= dict(mean_difference=abs(mean - logged), values=len(set(ours[~ours.isnan()].tolist())))
    if row["differ"] or row["mean_difference"] > 1e-6:
        raise SystemExit(f"{script}, {spec}: {row}")
    return row


def measure(jobs: dict, smoke: bool) -> list[dict]:
    warnings.simplefilter("ignore")
    results = []
    rows = make_rows()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        save_model(folder / "model")
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for script, flags in list(jobs)[:: len(OWN + MADE) if smoke else 1]:
            names = jobs[script, flags]
            result = run(script, flags.replace("WORLD", str(folder)))
            if smoke:
                last = result["metrics"][-1]
                results.append(
                    {
                        name: last[name]
                        for name in ("objective/scores", "objective/entropy", "grad_norm")
                    }
                )
            else:
                results.append(names | compare(script, names["reward"], result, rows, folder))
    return results


JOBS = {}
for script, spec in itertools.product(("rloo", "grpo"), OWN + MADE):
    JOBS[script, f"{FLAGS} --reward {spec}"] = dict(script=script, reward=spec)
SHORT = "--reward benchmark/throughput/rewards.py:share_of_letters"
PARTS = {"rewards": Part(JOBS, measure=measure, short=SHORT, needs="TRL")}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
