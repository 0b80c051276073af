"""docs/nano/: the short programs make the runs of the scripts."""

import re
from ast import literal_eval

import yaml
from conftest import HERE, column, distance, import_file, make_tokenizer, read_rollouts, save_model
from pytest import approx
from safetensors.torch import load_file
from tokenizers import decoders

# Prompts of different lengths, a smaller last batch, a second PPO epoch, and a model with positions
# and dropout.
FLAGS = yaml.safe_load("""
all: {response_length: 6, num_train_epochs: 2, num_ppo_epochs: 2, kl_coef: 0.05,
      learning_rate: 0.003, cliprange: 0.1}
rloo: {k: 3, batch_size: 12}
grpo: {k: 3, batch_size: 12}
ppo: {batch_size: 4, cliprange_value: 0.02, vf_coef: 0.5, gamma: 0.9}
""")
# Of the generation config. The tokenizer has its own.
EOS_IDS = {"rloo": None, "grpo": [5, 9], "ppo": 7}
EXACT_MATCH = '[float(c.strip() == row["answer"]) for c, row in zip(completions, rows)]'


def nano_text(script):
    return (HERE / "docs/nano" / f"{script.__name__}.py").read_text(encoding="utf-8")


def run_nano(text, reward, **settings):
    """Run a program with other settings and another reward. Returns its variables.

    `completions` are the tokens of all iterations, and `evaluations` the held-out scores."""
    for setting, value in settings.items():
        text, count = re.subn(rf"^{setting} = .*", f"{setting} = {value!r}", text, flags=re.M)
        assert count == 1, setting
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
    exec(text, names)
    return names | dict(completions=completions, evaluations=evaluations)


def movement(before, after):
    """How far each matrix has moved. The gradient of GPT-2's key bias is rounding alone."""
    return [after[name] - before[name] for name in before if before[name].dim() > 1]


def test_nano_makes_the_run_of_the_script(script, world, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = script.__name__
    tokenizer = make_tokenizer(None)
    # As Llama 2's: it drops the first space of what it decodes.
    tokenizer._tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    model = save_model(tmp_path / "model", "gpt2", eos_ids=EOS_IDS[name], tokenizer=tokenizer)
    flags = FLAGS["all"] | FLAGS[name] | dict(model_path=model, dataset=world.dataset(7))
    flags["eval_dataset"] = world.dataset(5, seed=1)
    # Large rewards hide a factor, since gradients are clipped.
    reward = "letters" if name == "ppo" else "small"
    _, metrics, folder = run(script, max_grad_norm=1.0, reward=reward, **flags)
    rewards = import_file(world.folder / "rewards.py")
    nano = run_nano(nano_text(script), getattr(rewards, reward), **flags)
    assert nano["completions"] == column(read_rollouts(folder), "token_ids")
    scores = [line["eval/scores"] for line in metrics if "eval/scores" in line]
    assert nano["evaluations"] == approx(scores, abs=6e-4)
    before = load_file(tmp_path / "model/model.safetensors")
    for kind in ("policy", "value_model") if name == "ppo" else ("policy",):
        ours = load_file(folder / kind.replace("policy", "model") / "model.safetensors")
        own = dict(nano[kind].named_parameters())
        # A gradient can be 0 up to rounding, and AdamW makes a step of it. On an EPYC with AVX2 one
        # weight of RLOO's model is such a case: 1.2e-3.
        assert distance(movement(before, ours), movement(before, own)) < 3e-3
    if name == "ppo":
        assert distance([ours["score.weight"]], [nano["value_model"].lm_head.weight]) < 3e-3


def test_the_settings_are_the_defaults_of_the_script(script):
    defaults = vars(script.check_flags(script.Args()))
    found = dict(re.findall(r"^(\w+) = ([^\s#]+)", nano_text(script), re.M))
    settings = found.keys() & defaults.keys()
    assert len(settings) > 10
    for name in settings:
        value = literal_eval(found[name])
        assert defaults[name] in (value, f"{HERE}/{value}"), name
