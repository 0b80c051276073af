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
from run import BENCHMARK, POLICY, SCRIPTS, Part, main, read_rows

RESULT = Path(__file__).with_suffix(".json")
OWN_POLICY = RESULT.with_name("policy")
STEPS, BATCH_SIZE = 400, 128  # of its training
MODEL = "--reward none --reward-model-path benchmark/default/reward_model"
MODEL += " --eval-reward exact_match --eval-temperature 1"
LENGTH = "--model-path benchmark/ablations/policy --response-length 16 --learning-rate 1e-4"
LENGTH += " --num-ppo-epochs 2"
EIGHT_UPDATES = "--num-ppo-epochs 4 --num-mini-batches 2"
JUDGE = "--reward benchmark/variants/long_judge.py:score --eval-reward exact_match"
RATES = (1e-5, 5e-5, 2e-4, 1e-3)
LOSSES = [("grpo", scaling) for scaling in ("group", "batch", "none")]
LOSSES += [("dapo", "group"), ("dr_grpo", "none"), ("cispo", "group")]
STUDIES = {  # name: [(script, label, flags)]
    "group": [("rloo", f"k = {k}", f"--rloo-k {k}") for k in (2, 4, 8, 16)],
    "kl": [("rloo", str(kl), f"{MODEL} --kl-coef {kl}") for kl in (0.01, 0.1, 0.3, 1.0)],
    "epochs": [
        ("ppo", "1 x 1", "--num-ppo-epochs 1 --num-mini-batches 1"),
        ("ppo", "2 x 1", "--num-ppo-epochs 2 --num-mini-batches 1"),
        ("ppo", "4 x 1", "--num-ppo-epochs 4 --num-mini-batches 1"),
        ("ppo", "1 x 4", "--num-ppo-epochs 1 --num-mini-batches 4"),
    ],
    "loss": [
        ("grpo", f"{loss}\n{scaling}", f"{LENGTH} --loss-type {loss} --scale-rewards {scaling}")
        for loss, scaling in LOSSES
    ],
    "clip": [
        ("rloo", f"{clip:g}", f"{EIGHT_UPDATES} --cliprange {clip}") for clip in (0.05, 0.2, 10)
    ],
    "eos": [("grpo", str(p), f"{JUDGE} --missing-eos-penalty {p}") for p in (0, 1)],
    "learning_rate": [
        (script, f"{rate:g}", f"--learning-rate {rate}") for script in SCRIPTS for rate in RATES
    ],
}
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
ENDS = [  # lines of numbers at the end: study, script, number, label, color
    ("kl", "rloo", "scores", "learned score", draw.OTHERS[0]),
    ("kl", "rloo", "held_out", "right, held-out", draw.OTHERS[1]),
    ("eos", "grpo", "held_out", "right, held-out", draw.OTHERS[0]),
    ("eos", "grpo", "ended", "ended", draw.OTHERS[1]),
    ("learning_rate", "rloo", "held_out", "rloo.py", draw.COLORS["rloo"]),
    ("learning_rate", "grpo", "held_out", "grpo.py", draw.COLORS["grpo"]),
    ("learning_rate", "ppo", "held_out", "ppo.py", draw.COLORS["ppo"]),
]


def make_policy(_, smoke: bool = False) -> list[dict]:
    """Makes a policy whose answers have very different lengths.

    The default policy is trained for a few more steps on its own sampled answers. If a sum begins
    with an odd digit, 8 to 12 spaces stand behind its answer. `exact_match` strips them. So half of
    the prompts take four times as many tokens, and there is the same thing to learn.
    """
    import torch  # These imports take seconds, and --help does not need them.
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from win_rate import complete

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    policy = AutoModelForCausalLM.from_pretrained(POLICY)
    steps = 4 if smoke else STEPS
    texts = [row["prompt"] for row in read_rows(BENCHMARK / "default" / "train.jsonl")]
    texts = texts[:64] if smoke else texts * 4
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    rng = np.random.default_rng([1, 0])
    answers, _ = complete(policy, tokenizer, prompts, rng.random((len(prompts), 4)))
    rows = []  # prompt, answer, spaces, EOS
    for text, prompt, answer in zip(texts, prompts, answers):
        count = int(rng.integers(8, 13)) * (int(text[0]) % 2)
        spaces = [tokenizer.convert_tokens_to_ids(" ")] * count
        rows.append(prompt + answer[:-1] + spaces + answer[-1:])
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    labels[:, : len(prompts[0])] = -100  # only the answers are learned
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        chosen = torch.from_numpy(rng.integers(len(rows), size=BATCH_SIZE))
        loss = policy(input_ids=tokens[chosen], labels=labels[chosen]).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if not smoke:
        policy.save_pretrained(OWN_POLICY)
        tokenizer.save_pretrained(OWN_POLICY)
    return [dict(loss=round(loss.item(), 4))]


def jobs_of(study: str) -> dict[tuple, dict]:
    """Every setting of a study, with every seed."""
    jobs = {}
    episodes = 8192 if study in ("kl", "eos", "loss") else 4096
    seeds = (1, 2, 3) if study == "learning_rate" else (1, 2, 3, 4, 5)
    for script, label, own in STUDIES[study]:
        for seed in seeds:
            flags = f"--num-sample-generations 0 --total-episodes {episodes} {own} --seed {seed}"
            jobs[script, flags] = dict(script=script, label=label, seed=seed, flags=flags)
    return jobs


def to_result(_, result: dict) -> dict:
    """What is kept of a run: means of its last ten iterations, and its curve."""
    rows = result["metrics"][1:]

    def end(name):
        return round(float(np.mean([row[name] for row in rows[-10:]])), 4)

    kept = {"scores": end("objective/scores"), "held_out": round(rows[-1]["eval/scores"], 4)}
    kept["tokens"] = end("response_length_mean")
    kept["ended"] = round(end("val/num_eos_tokens") / result["args"]["batch_size"], 4)
    kept |= {"episode": [], "curve": []}
    for piece in np.array_split(rows, min(16, len(rows))):
        kept["episode"].append(piece[-1]["episode"])
        scores = [row["objective/scores"] for row in piece]
        kept["curve"].append(round(float(np.mean(scores)), 4))
    return kept


PARTS = {study: Part(jobs_of(study), to_result) for study in STUDIES}
PARTS["loss"].prepare = lambda: OWN_POLICY.exists() or make_policy({})
PARTS["learning_rate"].smoke = lambda names: names["label"] == "5e-05"
PARTS["loss"].short += f" --model-path {POLICY}"
PARTS["policy"] = Part({}, measure=make_policy)


def of(results: list[dict], study: str, script: str, label: str) -> list[dict]:
    wanted = (study, script, label)
    return [row for row in results if (row["part"], row["script"], row["label"]) == wanted]


def plot_curves(axis, results: list[dict], study: str):
    """The score against episodes, a curve for each setting."""
    for (script, label, _), color in zip(STUDIES[study], draw.OTHERS):
        some = of(results, study, script, label)
        style = dict(color=color, label=label.replace("\n", ", "))
        draw.curve(axis, some[0]["episode"], [row["curve"] for row in some], **style)
    draw.in_thousands(axis)
    axis.set_ylabel("right, sampled")
    axis.legend(frameon=False, fontsize=7, labelspacing=0.3, handlelength=1.2)


def plot_ends(
    axis, results: list[dict], study: str, script: str, name: str, label: str, color: str
):
    """A number at the end against the settings, with its 95 % interval."""
    settings = [setting for its, setting, _ in STUDIES[study] if its == script]
    bars = []
    for setting in settings:
        values = [row[name] for row in of(results, study, script, setting)]
        bars.append(draw.mean_and_band(values))
    style = dict(fmt="o-", ms=3.5, lw=1.3, capsize=2, color=color, label=label)
    axis.errorbar(range(len(bars)), *np.transpose(bars), **style)
    axis.set_xticks(range(len(bars)), settings)
    axis.legend(frameon=False, fontsize=7.5)


def plot(results: list[dict], folder: Path):
    figure, axes = draw.panels(4, 2, width=3.4, height=2.4)
    axes = dict(zip(TITLES, axes.flatten()))
    for name, title in TITLES.items():
        axes[name].set_title(title, fontsize=8.5)
    for study in ("group", "epochs", "loss", "clip"):
        plot_curves(axes[study], results, study)
    for study, *line in ENDS:
        plot_ends(axes[study], results, study, *line)
    axes["kl"].set(xlabel="--kl-coef", ylim=(0, 1))
    axes["eos"].set(xlabel="--missing-eos-penalty", xlim=(-0.5, 1.5), ylim=(0, 1.05))
    axes["learning_rate"].set(
        xlabel="--learning-rate", ylabel="right, held-out, greedy", ylim=(0, 1.05)
    )
    lengths = axes["lengths"]
    lengths.set(ylabel="tokens of an answer at the end", ylim=(0, 16.5), yticks=range(0, 17, 4))
    for x, ((script, label, _), color) in enumerate(zip(STUDIES["loss"], draw.OTHERS)):
        tokens = [row["tokens"] for row in of(results, "loss", script, label)]
        lengths.plot([x] * len(tokens), tokens, "o", ms=4, alpha=0.7, color=color)
    labels = [label for _, label, _ in STUDIES["loss"]]
    lengths.set_xticks(range(len(labels)), labels, fontsize=6.5)
    draw.save(figure, folder / "ablations.png")


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
