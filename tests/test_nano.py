"""docs/nano/: the short programs make the runs of the scripts."""

import difflib
import re

import pytest
from conftest import HERE, Run, flat, import_file, launched, make_tokenizer, read_jsonl, save_model, weights_of
from safetensors.torch import load_file
from transformers import AutoModel

# Prompts of different lengths, a smaller last batch, a second PPO epoch, and a model with positions and dropout.
FLAGS = dict(response_length=6, num_train_epochs=2, num_ppo_epochs=2, kl_coef=0.05, learning_rate=3e-3, cliprange=0.1)
OWN = {"ppo": dict(batch_size=4, cliprange_value=0.02, vf_coef=0.5, gamma=0.9)}  # of the others: groups of three
EOS_IDS = {"rloo": None, "grpo": [5, 9], "ppo": 7}  # of the generation config; the tokenizer has its own
REWARDS = {"rloo": "small", "grpo": "small", "ppo": "letters"}  # Large ones hide a factor: gradients are clipped.


def run_nano(name, reward=None, **settings):
    """Run the text of a program, with other settings and another reward. Returns its variables, what it printed, and
    the tokens of all iterations."""
    file = HERE / "docs/nano" / f"{name}.py"
    text = file.read_text(encoding="utf-8")
    edits = {rf"^{setting} = .*": f"{setting} = {value!r}" for setting, value in settings.items()}
    if reward:
        edits[r"(def score\(.*\n)    return .*"] = r"\1    return reward([row['prompt'] for row in rows], completions)"
    for old, new in edits.items():
        text, count = re.subn(old, new, text, flags=re.M)
        assert count == 1, old
    names, lines, tokens = {}, [], []

    def note(line):  # in place of `print`
        lines.append(line)
        if line.startswith("iteration"):
            tokens.extend(row[row >= 0].tolist() for row in names["tokens"])

    names |= dict(__file__=str(file), print=note, reward=lambda *columns: names["torch"].tensor(reward(*columns)))
    exec(compile(text, file, "exec"), names)
    return names | dict(tokens=tokens, lines=lines)


def distance(name, start, big, nano):
    """How far apart the final weights are. The completions and evaluations must be the same."""
    assert nano["tokens"] == [row["token_ids"] for row in big.rollouts]
    evaluations = [row["eval/scores"] for row in big.metrics if "eval/scores" in row]
    printed = [float(line.split()[-1]) for line in nano["lines"] if line.startswith("held-out")]
    assert printed == pytest.approx(evaluations, abs=6e-4)
    models = [(weights_of(start), weights_of(big.folder / "model"), nano["policy"].parameters())]
    if name == "ppo":
        trunks = [AutoModel.from_pretrained(path).parameters() for path in (start, big.folder / "value_model")]
        models.append((*trunks, nano["value_trunk"].parameters()))
        head = load_file(big.folder / "value_model/value_head.safetensors")["weight"]
        models.append(([head * 0], [head], [nano["value_head"].weight]))
    found = []
    for weights in models:  # without biases: the gradient of GPT-2's key bias is rounding alone
        start, end, nano_end = (flat(weight for weight in of if weight.dim() > 1) for of in weights)
        found.append(((end - nano_end).norm() / (end - start).norm()).item())
    return max(found)


def test_nano_makes_the_run_of_the_script(script, world, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = script.__name__
    reward = REWARDS[name]
    model = save_model(tmp_path / "model", "gpt2", eos_ids=EOS_IDS[name], tokenizer=make_tokenizer(None))
    flags = dict(model_path=model, dataset=world.dataset(7), eval_dataset=world.dataset(5, seed=1))
    flags |= FLAGS | OWN.get(name, dict(k=3, batch_size=12))
    big = run(script, max_grad_norm=1.0, reward=world.reward(reward), **flags)
    nano = run_nano(name, getattr(import_file(world.folder / "rewards.py"), reward), **flags)
    assert distance(name, model, big, nano) < 1e-3


@pytest.mark.slow
def test_the_default_run_is_the_same(script, tmp_path, monkeypatch):
    """With -s it prints how far apart the weights are. PPO runs on 256 prompts: later its rounding may grow."""
    monkeypatch.chdir(tmp_path)
    name, default = script.__name__, HERE / "benchmark/default"
    data = tmp_path / "train.jsonl"
    lines = (default / "train.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(lines[:256] if name == "ppo" else lines))
    settings = dict(dataset=str(data), eval_dataset=str(default / "eval.jsonl"))
    launched(script, 1, tmp_path, settings | dict(save_rollouts=True))
    big = Run(None, read_jsonl(tmp_path / "out/metrics.jsonl"), tmp_path / "out")
    apart = distance(name, default / "policy", big, run_nano(name, **settings))
    print(f"{name}: {len(big.rollouts)} completions, the same; weights: {apart:.1e} of the distance")
    assert apart < 1e-4


@pytest.mark.parametrize("name, places", [("grpo", 3), ("ppo", 7)])
def test_the_programs_differ_in_few_places(name, places):
    """Below the settings."""
    texts = [(HERE / f"docs/nano/{x}.py").read_text(encoding="utf-8").split("\ndef score")[1] for x in ("rloo", name)]
    matcher = difflib.SequenceMatcher(None, *(text.splitlines() for text in texts), autojunk=False)
    assert sum(tag != "equal" for tag, *_ in matcher.get_opcodes()) <= places
