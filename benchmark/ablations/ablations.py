"""What each knob does, on the default task: README.md beside this file says what differs.

    python benchmark/ablations/ablations.py                           # all, 40 minutes on two cores
    python benchmark/ablations/ablations.py group clip                # some; results of the others stay
    python benchmark/ablations/ablations.py --plot                    # only the figures again
    python benchmark/ablations/ablations.py policy                    # only the policy of `loss`, two minutes

Writes ablations.json, a run a line with its scores at the end and its curve in sixteen points, and ablations.png.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import BENCHMARK, POLICY, SCRIPTS, read_rows, update
from win_rate import complete

RESULT = Path(__file__).with_suffix(".json")
OWN_POLICY = RESULT.with_name("policy")
STEPS, BATCH_SIZE = 400, 128  # of its training
SHORT = "--num-sample-generations 0 --total-episodes"
MODEL = "--reward none --reward-model-path benchmark/default/reward_model --eval-reward exact_match"
LENGTH = "--model-path benchmark/ablations/policy --response-length 16 --learning-rate 1e-4 --num-ppo-epochs 2"
LENGTH += " --save-rollouts"
JUDGE = "--reward benchmark/variants/long_judge.py:score --eval-reward exact_match"
RATES = (1e-5, 5e-5, 2e-4, 1e-3)
LOSSES = [("grpo", scaling) for scaling in ("group", "batch", "none")]
LOSSES += [("dapo", "group"), ("dr_grpo", "none"), ("cispo", "group")]
STUDIES = {  # name: [(script, label, flags)]
    "group": [("rloo", f"k = {k}", f"--rloo-k {k}") for k in (2, 4, 8, 16)],
    "kl": [("rloo", str(kl), f"{MODEL} --eval-temperature 1 --kl-coef {kl}") for kl in (0.01, 0.1, 0.3, 1.0)],
    "epochs": [
        ("ppo", f"{epochs} x {parts}", f"--num-ppo-epochs {epochs} --num-mini-batches {parts}")
        for epochs, parts in ((1, 1), (2, 1), (4, 1), (1, 4))
    ],
    "loss": [
        ("grpo", f"{loss}\n{scaling}", f"{LENGTH} --loss-type {loss} --scale-rewards {scaling}")
        for loss, scaling in LOSSES
    ],
    "clip": [
        ("rloo", f"{clip:g}", f"--num-ppo-epochs 4 --num-mini-batches 2 --cliprange {clip}") for clip in (0.05, 0.2, 10)
    ],
    "eos": [("grpo", str(p), f"{JUDGE} --missing-eos-penalty {p}") for p in (0, 1)],
    "learning_rate": [(script, f"{rate:g}", f"--learning-rate {rate}") for script in SCRIPTS for rate in RATES],
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
    *(("learning_rate", script, "held_out", f"{script}.py", draw.COLORS[script]) for script in SCRIPTS),
]


def is_long(prompt: str) -> bool:
    return int(prompt[0]) % 2 == 1


def make_policy():
    """A policy whose answers have very different lengths.

    The default policy is trained for a few more steps on its own sampled answers. If a sum begins with an odd digit, 8
    to 12 spaces stand behind its answer. `exact_match` strips them. So half of the prompts take four times as many
    tokens, and there is the same thing to learn.
    """
    torch.set_num_threads(1)
    tokenizer, policy = AutoTokenizer.from_pretrained(POLICY), AutoModelForCausalLM.from_pretrained(POLICY)
    texts = [row["prompt"] for row in read_rows(BENCHMARK / "default" / "train.jsonl")] * 4
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    rng = np.random.default_rng([1, 0])
    answers, _ = complete(policy, tokenizer, prompts, rng.random((len(prompts), 4)))
    rows = []  # prompt, answer, spaces, EOS
    for text, prompt, answer in zip(texts, prompts, answers):
        spaces = [tokenizer.convert_tokens_to_ids(" ")] * int(rng.integers(8, 13)) * is_long(text)
        rows.append(prompt + answer[:-1] + spaces + answer[-1:])
    longest, start = max(map(len, rows)), len(prompts[0])
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    labels[:, :start] = -100  # only the answers are learned
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in range(STEPS):
        chosen = torch.from_numpy(rng.integers(len(rows), size=BATCH_SIZE))
        policy(input_ids=tokens[chosen], labels=labels[chosen]).loss.backward()
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    policy.save_pretrained(OWN_POLICY), tokenizer.save_pretrained(OWN_POLICY)


def all_jobs() -> dict[tuple, dict]:
    """Every setting of every study, with every seed."""
    jobs = {}
    for study, settings in STUDIES.items():
        episodes = 8192 if study in ("kl", "eos", "loss") else 4096
        for script, label, own in settings:
            for seed in range(1, 6):
                names = dict(study=study, script=script, label=label, seed=seed)
                jobs[script, f"{SHORT} {episodes} {own} --seed {seed}"] = names
    return jobs


def to_result(_, result: dict) -> dict:
    """What is kept of a run."""
    rows = result["metrics"][1:]

    def end(name):
        return round(float(np.mean([row[name] for row in rows[-10:] if name in row])), 4)

    kept = {"scores": end("objective/scores"), "held_out": round(rows[-1]["eval/scores"], 4)}
    kept |= {"tokens": end("response_length_mean"), "entropy": end("policy/entropy_avg")}
    kept |= {"ended": round(end("val/num_eos_tokens") / result["args"]["batch_size"], 4)}
    for name in ("long", "short") if result["rollouts"] else ():  # the prompts that are answered at length, the others
        some = [e for e in result["rollouts"] if is_long(e["prompt"]) == (name == "long")]
        last = some[-len(some) // 8 :]
        kept[f"{name}_scores"] = round(float(np.mean([e["score"] for e in some])), 4)  # over the run
        kept[f"{name}_tokens"] = round(float(np.mean([len(e["token_ids"]) for e in last])), 2)
    pieces = [(piece[-1]["episode"], [row["objective/scores"] for row in piece]) for piece in np.array_split(rows, 16)]
    return kept | {"episode": [e for e, _ in pieces], "curve": [round(float(np.mean(x)), 4) for _, x in pieces]}


def of(results: list[dict], study: str, script: str, label: str) -> list[dict]:
    return [r for r in results if (r["study"], r["script"], r["label"]) == (study, script, label)]


def plot_curves(axis, results: list[dict], study: str):
    """The score against episodes, a curve for each setting."""
    for (script, label, _), color in zip(STUDIES[study], draw.OTHERS):
        some = of(results, study, script, label)
        draw.curve(axis, some[0]["episode"], [r["curve"] for r in some], color=color, label=label.replace("\n", ", "))
    draw.in_thousands(axis)
    axis.set_ylabel("right, sampled")
    axis.legend(frameon=False, fontsize=7, labelspacing=0.3, handlelength=1.2)


def plot_ends(axis, results: list[dict], study: str, script: str, name: str, label: str, color: str):
    """A number at the end against the settings, with its 95 % interval."""
    settings = [setting for its, setting, _ in STUDIES[study] if its == script]
    values = [[r[name] for r in of(results, study, script, setting)] for setting in settings]
    mean, band = np.transpose(list(map(draw.mean_and_band, values)))
    axis.errorbar(range(len(settings)), mean, band, fmt="o-", ms=3.5, lw=1.3, capsize=2, color=color, label=label)
    axis.set_xticks(range(len(settings)), settings)
    axis.legend(frameon=False, fontsize=7.5)


def plot(results: list[dict]):
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
    axes["learning_rate"].set(xlabel="--learning-rate", ylabel="right, held-out, greedy", ylim=(0, 1.05))
    lengths = axes["lengths"]
    lengths.set(ylabel="tokens of an answer at the end", ylim=(0, 16.5), yticks=range(0, 17, 4))
    for x, ((script, label, _), color) in enumerate(zip(STUDIES["loss"], draw.OTHERS)):
        tokens = [r["tokens"] for r in of(results, "loss", script, label)]
        lengths.plot([x] * len(tokens), tokens, "o", ms=4, alpha=0.7, color=color)
    lengths.set_xticks(range(len(LOSSES)), [label for _, label, _ in STUDIES["loss"]], fontsize=6.5)
    draw.save(figure, RESULT.with_suffix(".png"))


def main():
    if "--plot" not in sys.argv and not OWN_POLICY.exists():
        make_policy()
    plot(update(RESULT, all_jobs(), to_result))


if __name__ == "__main__":
    main()
