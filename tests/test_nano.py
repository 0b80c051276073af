"""docs/nano/: the short programs make the runs of the scripts."""

import re

from conftest import (
    HERE,
    column,
    distance,
    flat,
    import_file,
    launched,
    make_tokenizer,
    read_jsonl,
    save_model,
)
from pytest import approx, mark
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

# Prompts of different lengths, a smaller last batch, a second PPO epoch, and a model with positions
# and dropout.
FLAGS = dict(
    response_length=6,
    num_train_epochs=2,
    num_ppo_epochs=2,
    kl_coef=0.05,
    learning_rate=3e-3,
    cliprange=0.1,
)
OWN = {
    "rloo": dict(k=3, batch_size=12),
    "grpo": dict(k=3, batch_size=12),
    "ppo": dict(batch_size=4, cliprange_value=0.02, vf_coef=0.5, gamma=0.9),
}
# Of the generation config. The tokenizer has its own.
EOS_IDS = {"rloo": None, "grpo": [5, 9], "ppo": 7}
EXACT_MATCH = '[float(c.strip() == row["answer"]) for c, row in zip(completions, rows)]'


def run_nano(name, reward=None, **settings):
    """Run a program with other settings and another reward. Returns its variables.

    `completions` are the tokens of all iterations, and `evaluations` the held-out scores."""
    file = HERE / "docs/nano" / f"{name}.py"
    text = file.read_text(encoding="utf-8")
    for setting, value in settings.items():
        text, count = re.subn(rf"^{setting} = .*", f"{setting} = {value!r}", text, flags=re.M)
        assert count == 1, setting
    if reward:
        assert EXACT_MATCH in text
        text = text.replace(EXACT_MATCH, "reward([row['prompt'] for row in rows], completions)")
    completions = []
    evaluations = []

    def note(line):  # in place of `print`
        if line.startswith("iteration"):
            for row in names["tokens"]:
                completions.append(row[row >= 0].tolist())
        else:
            evaluations.append(float(line.split()[-1]))

    names = dict(print=note, reward=reward)
    exec(compile(text, file, "exec"), names)
    return names | dict(completions=completions, evaluations=evaluations)


def matrices(model):
    """Its weights without biases. The gradient of GPT-2's key bias is rounding alone."""
    return flat(w for w in model.parameters() if w.dim() > 1)


def compare(name, start, folder, nano):
    """How far apart the final weights are. The completions and evaluations must be the same."""
    rollouts = read_jsonl(folder / "rollouts.jsonl")
    assert nano["completions"] == column(rollouts, "token_ids")
    metrics = read_jsonl(folder / "metrics.jsonl")
    evaluations = [line["eval/scores"] for line in metrics if "eval/scores" in line]
    assert nano["evaluations"] == approx(evaluations, abs=6e-4)
    parts = [(AutoModelForCausalLM, "model", "policy")]
    distances = []
    if name == "ppo":
        parts.append((AutoModel, "value_model", "value_trunk"))
        head = load_file(folder / "value_model/value_head.safetensors")["weight"]
        distances.append(distance([head], [nano["value_head"].weight]))
    for auto_class, part, nano_name in parts:
        before = matrices(auto_class.from_pretrained(start))
        after = matrices(auto_class.from_pretrained(folder / part))
        difference = after - matrices(nano[nano_name])
        moved = after - before
        distances.append((difference.norm() / moved.norm()).item())
    return max(distances)


def test_nano_makes_the_run_of_the_script(script, world, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = script.__name__
    tokenizer = make_tokenizer(None)
    model = save_model(tmp_path / "model", "gpt2", eos_ids=EOS_IDS[name], tokenizer=tokenizer)
    flags = FLAGS | OWN[name] | dict(model_path=model, dataset=world.dataset(7))
    flags["eval_dataset"] = world.dataset(5, seed=1)
    # Large rewards hide a factor, since gradients are clipped.
    reward = "letters" if name == "ppo" else "small"
    ran = run(script, max_grad_norm=1.0, reward=reward, **flags)
    rewards = import_file(world.folder / "rewards.py")
    nano = run_nano(name, getattr(rewards, reward), **flags)
    # A gradient can be 0 up to rounding, and AdamW makes a step of it. On an EPYC with AVX2 one
    # weight of RLOO's model is such a case: 1.2e-3.
    assert compare(name, model, ran.folder, nano) < 3e-3


@mark.slow
def test_the_default_run_is_the_same(script, tmp_path, monkeypatch):
    """With -s it prints how far apart the weights are. GRPO and PPO run on 256 prompts: it takes
    less time, and PPO's rounding may grow later."""
    monkeypatch.chdir(tmp_path)
    name = script.__name__
    default = HERE / "benchmark/default"
    rows = (default / "train.jsonl").read_text().splitlines(keepends=True)
    if name != "rloo":
        rows = rows[:256]
    dataset = tmp_path / "train.jsonl"
    dataset.write_text("".join(rows))
    settings = dict(model_path=str(default / "policy"), dataset=str(dataset))
    settings["eval_dataset"] = str(default / "eval.jsonl")
    launched(script, 1, tmp_path, settings | dict(save_rollouts=True))
    nano = run_nano(name, **settings)
    apart = compare(name, default / "policy", tmp_path / "out", nano)
    count = len(nano["completions"])
    print(f"{name}: {count} completions, the same; weights: {apart:.1e} of the distance")
    assert apart < 1e-4
