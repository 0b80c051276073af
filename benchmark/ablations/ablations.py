"""What each knob does, on the default task: README.md beside this file says what differs.

    python benchmark/ablations/ablations.py                           # all studies
    python benchmark/ablations/ablations.py group clip                # some; the others are kept
    python benchmark/ablations/ablations.py policy                    # only the policy of `loss`
    python benchmark/ablations/ablations.py --plot                    # only the figures again

Writes ablations.json, a run a line with its scores at the end and its curve in sixteen points, and
ablations.png.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import BENCHMARK, POLICY, SCRIPTS, Part, column, complete, grouped, having, main, read_rows

RESULT = Path(__file__).with_suffix(".json")
OWN_POLICY = RESULT.with_name("policy")
STEPS = 400  # of its training
BATCH_SIZE = 128
MODEL = "--reward none --reward-model-path benchmark/default/reward_model"
MODEL += " --eval-reward exact_match --eval-temperature 1"
LENGTH = "--model-path benchmark/ablations/policy --response-length 16 --learning-rate 1e-4"
LENGTH += " --num-ppo-epochs 2"
EIGHT_UPDATES = "--num-ppo-epochs 4 --num-mini-batches 2"
JUDGE = "--reward benchmark/variants/long_judge.py:score --eval-reward exact_match"
SHORT = "--num-sample-generations 0 --total-episodes 4096"
LONG = "--num-sample-generations 0 --total-episodes 8192"
SEEDS = range(1, 6)
TITLES = {
    "group": "RLOO: k completions per prompt",
    "epochs": "PPO: epochs x mini-batches",
    "loss": "GRPO: losses and scalings",
    "lengths": "the same: length, a dot a seed",
    "clip": "RLOO: clip range, eight updates a rollout",
    "kl": "RLOO: a reward model, and the truth",
    "eos": "GRPO: a judge that likes length",
    "learning_rate": "learning rate",
}


def make_policy(_=None, smoke: bool = False) -> list[dict]:
    """Makes a policy whose answers have very different lengths.

    The default policy is trained for a few more steps on its own sampled answers. If a sum begins
    with an odd digit, 8 to 12 spaces stand behind its answer. `exact_match` strips them. So half of
    the prompts take four times as many tokens, and there is the same thing to learn.
    """
    import torch  # These imports take seconds, and --help does not need them.
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    policy = AutoModelForCausalLM.from_pretrained(POLICY)
    steps = STEPS
    texts = 4 * column(read_rows(BENCHMARK / "default/train.jsonl"), "prompt")
    if smoke:
        steps = 4
        texts = texts[:64]
    prompts = tokenizer(texts)["input_ids"]
    rng = np.random.default_rng([1, 0])
    uniforms = rng.random((len(prompts), 4))
    answers = complete(policy, tokenizer, prompts, uniforms)
    space = tokenizer.convert_tokens_to_ids(" ")
    rows = []  # prompt, answer, spaces, EOS
    for text, prompt, answer in zip(texts, prompts, answers):
        count = int(rng.integers(8, 13))
        if int(text[0]) % 2 == 0:
            count = 0
        row = prompt + answer[:-1] + [space] * count + answer[-1:]
        rows.append(torch.tensor(row))
    tokens = pad_sequence(rows, batch_first=True)
    labels = pad_sequence(rows, batch_first=True, padding_value=-100)
    labels[:, : len(prompts[0])] = -100  # only the answers are learned
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        chosen = rng.integers(len(rows), size=BATCH_SIZE)
        loss = policy(input_ids=tokens[chosen], labels=labels[chosen]).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if not smoke:
        policy.save_pretrained(OWN_POLICY)
        tokenizer.save_pretrained(OWN_POLICY)
    return [dict(loss=round(loss.item(), 4))]


def mean_of(rows: list[dict], name: str) -> float:
    mean = np.mean(column(rows, name))
    return round(float(mean), 4)


def to_result(result: dict) -> dict:
    """What is kept of a run: means of its last ten iterations, and its curve."""
    rows = result["metrics"][1:]
    last = rows[-10:]
    ended = mean_of(last, "val/num_eos_tokens") / result["args"]["batch_size"]
    pieces = np.array_split(rows, min(16, len(rows)))
    return {
        "scores": mean_of(last, "objective/scores"),
        "held_out": round(rows[-1]["eval/scores"], 4),
        "tokens": mean_of(last, "response_length_mean"),
        "ended": round(ended, 4),
        "episode": [piece[-1]["episode"] for piece in pieces],
        "curve": [mean_of(piece, "objective/scores") for piece in pieces],
    }


def over(flag: str, values, script: str = "rloo", label: str = "{}") -> list[tuple]:
    """A run for each value of a flag."""
    return [(dict(label=label.format(x)), script, f"{flag} {x}") for x in values]


EPOCHS = []
for epochs, batches in ((1, 1), (2, 1), (4, 1), (1, 4)):
    flags = f"--num-ppo-epochs {epochs} --num-mini-batches {batches}"
    EPOCHS.append((dict(label=f"{epochs} x {batches}"), "ppo", flags))
LOSSES = []
for pair in ("grpo group", "grpo batch", "grpo none", "dapo group", "dr_grpo none", "cispo group"):
    loss, scaling = pair.split()
    flags = f"--loss-type {loss} --scale-rewards {scaling}"
    LOSSES.append((dict(label=f"{loss}\n{scaling}"), "grpo", flags))
RATES = []
for script in SCRIPTS:
    RATES += over("--learning-rate", (1e-5, 5e-5, 2e-4, 1e-3), script)
PARTS = {
    "group": Part(over("--rloo-k", (2, 4, 8, 16), label="k = {}"), SHORT, SEEDS, to_result),
    "kl": Part(over("--kl-coef", (0.01, 0.1, 0.3, 1.0)), f"{LONG} {MODEL}", SEEDS, to_result),
    "epochs": Part(EPOCHS, SHORT, SEEDS, to_result),
    "loss": Part(
        LOSSES,
        f"{LONG} {LENGTH}",
        SEEDS,
        to_result,
        prepare=lambda: OWN_POLICY.exists() or make_policy(),
        short=f"{Part.short} --model-path {POLICY}",
    ),
    "clip": Part(
        over("--cliprange", (0.05, 0.2, 10)), f"{SHORT} {EIGHT_UPDATES}", SEEDS, to_result
    ),
    "eos": Part(over("--missing-eos-penalty", (0, 1), "grpo"), f"{LONG} {JUDGE}", SEEDS, to_result),
    "learning_rate": Part(RATES, SHORT, range(1, 4), to_result),
    "policy": Part([], measure=make_policy),
}


def plot_curves(axis, results: list[dict]):
    """The score against episodes, a curve for each setting."""
    for (label, some), color in zip(grouped(results, "label").items(), draw.OTHERS):
        style = dict(color=color, label=label.replace("\n", ", "))
        draw.curve(axis, some[0]["episode"], column(some, "curve"), **style)
    draw.in_thousands(axis)
    axis.set_ylabel("right, sampled")
    axis.legend(frameon=False, fontsize=7, labelspacing=0.3, handlelength=1.2)


def plot_ends(axis, results: list[dict], name: str, label: str, color: str):
    """A number at the end against the settings, with its 95 % interval."""
    settings = grouped(results, "label")
    bars = []
    for some in settings.values():
        bars.append(draw.mean_and_band(column(some, name)))
    x = range(len(bars))
    style = dict(fmt="o-", ms=3.5, lw=1.3, capsize=2, color=color, label=label)
    axis.errorbar(x, *np.transpose(bars), **style)
    axis.set_xticks(x, settings)
    axis.legend(frameon=False, fontsize=7.5)


def plot_lengths(axis, results: list[dict]):
    """The tokens of an answer, a dot for each seed."""
    settings = grouped(results, "label")
    for x, some in enumerate(settings.values()):
        tokens = column(some, "tokens")
        places = [x] * len(tokens)
        axis.plot(places, tokens, "o", ms=4, alpha=0.7, color=draw.OTHERS[x])
    axis.set_xticks(range(len(settings)), settings, fontsize=6.5)
    axis.set_yticks(range(0, 17, 4))
    axis.set_ylim(0, 16.5)
    axis.set_ylabel("tokens of an answer at the end")


def plot(results: list[dict], folder: Path):
    figure, axes = draw.panels(4, 2, width=3.4, height=2.4)
    axes = dict(zip(TITLES, axes.flatten()))
    for name, title in TITLES.items():
        axes[name].set_title(title, fontsize=8.5)
    for study in ("group", "epochs", "loss", "clip"):
        plot_curves(axes[study], having(results, part=study))
    plot_lengths(axes["lengths"], having(results, part="loss"))
    kl = having(results, part="kl")
    plot_ends(axes["kl"], kl, "scores", "learned score", draw.OTHERS[0])
    plot_ends(axes["kl"], kl, "held_out", "right, held-out", draw.OTHERS[1])
    eos = having(results, part="eos")
    plot_ends(axes["eos"], eos, "held_out", "right, held-out", draw.OTHERS[0])
    plot_ends(axes["eos"], eos, "ended", "ended", draw.OTHERS[1])
    for script in SCRIPTS:
        some = having(results, part="learning_rate", script=script)
        color = draw.COLORS[script]
        plot_ends(axes["learning_rate"], some, "held_out", f"{script}.py", color)
    axes["kl"].set_xlabel("--kl-coef")
    axes["kl"].set_ylim(0, 1)
    axes["eos"].set_xlabel("--missing-eos-penalty")
    axes["eos"].set_xlim(-0.5, 1.5)
    axes["eos"].set_ylim(0, 1.05)
    axes["learning_rate"].set_xlabel("--learning-rate")
    axes["learning_rate"].set_ylabel("right, held-out, greedy")
    axes["learning_rate"].set_ylim(0, 1.05)
    draw.save(figure, folder / "ablations.png")


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
