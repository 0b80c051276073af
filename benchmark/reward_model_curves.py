"""
Shows what the KL term is for, in one command: `python benchmark/reward_model_curves.py`.

Each script trains the default policy on the score of the reward model (`make_reward_model.py`) alone, on three seeds,
with a KL coefficient that is next to nothing and with one of the right size. The held-out evaluation samples at
temperature 1 and goes by the rule, which no run has seen: a sum is right or wrong. Its 256 samples before training are
the same in all runs of a seed.

GRPO runs without dividing scores by their group's deviation, so that its coefficient weighs KL against scores of the
same size as in the others. It stays another one all the same: its KL is in the loss, its gradient biased (grpo.py).

It takes some six minutes on two cores and writes `results/reward_model_curves.json` and `.png`; with `--plot` it only
draws the latter again.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import numpy as np

FOLDER = Path(__file__).resolve().parent
RESULT = FOLDER / "results" / "reward_model_curves"
SEEDS = (1, 2, 3)
KL_COEFS = (0.01, 0.3)
SCRIPT_FLAGS = {
    "rloo": [],
    "grpo": ["--scale-rewards", "none"],
    "ppo": ["--num-ppo-epochs", "4", "--learning-rate", "1e-4"],
}
FLAGS = f"""
    --reward none --reward-model-path {FOLDER}/default/reward_model --total-episodes 12288
    --eval-dataset {FOLDER}/default/eval.jsonl --eval-reward exact_match --eval-temperature 1.0 --eval-every 8
    --num-sample-generations 0
""".split()


def run(script: str, kl_coef: float, seed: int) -> dict:
    """Runs a script -> its curve, a point for each evaluation, its score and KL the means since the one before."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, FOLDER.parent / f"{script}.py", *FLAGS, *SCRIPT_FLAGS[script]]
        command += ["--kl-coef", str(kl_coef), "--seed", str(seed), "--output-dir", f"{folder}/run"]
        finished = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if finished.returncode:
            raise SystemExit(finished.stderr)
        metrics = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl", encoding="utf-8")]
    curve = {"script": script, "kl_coef": kl_coef, "seed": seed}
    curve |= {name: [] for name in ("episode", "objective/scores", "objective/kl", "eval/scores")}
    since = []
    for row in metrics:
        since += [row] * (row["iteration"] > 0)
        if "eval/scores" in row:
            curve["episode"].append(row["episode"])
            curve["eval/scores"].append(round(row["eval/scores"], 4))
            for name in ("objective/scores", "objective/kl"):
                curve[name].append(round(float(np.mean([r[name] for r in since])), 4) if since else None)
            since = []
    summary = ", ".join(f"{name} {curve[name][-1]:.3f}" for name in ("objective/scores", "eval/scores", "objective/kl"))
    print(f"{script} --kl-coef {kl_coef} --seed {seed}: {summary}", flush=True)
    return curve


def mean_of(curves: list[dict], name: str) -> np.ndarray:
    """The mean over seeds, [evaluations]."""
    return np.mean([np.array(curve[name], dtype=float) for curve in curves], axis=0)  # None becomes NaN


def report(curves: list[dict]):
    print("script  kl_coef   learned score   true score: start, highest, end    KL   (means of the seeds)")
    for script in SCRIPT_FLAGS:
        for kl_coef in KL_COEFS:
            some = [curve for curve in curves if (curve["script"], curve["kl_coef"]) == (script, kl_coef)]
            learned, true, kl = (mean_of(some, x) for x in ("objective/scores", "eval/scores", "objective/kl"))
            print(f"{script:6}  {kl_coef:7}   {learned[1]:5.2f} -> {learned[-1]:5.2f}   ", end="")
            print(f"{true[0]:.3f}, {true.max():.3f}, {true[-1]:.3f}   {kl[-1]:.2f}")


def plot(curves: list[dict]):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 3, figsize=(9, 4.6), dpi=100, sharex=True, sharey="row", layout="constrained")
    rows = (("objective/scores", "learned score\n(reward model, training)"), ("eval/scores", "true score\n(held-out)"))
    for column, script in zip(axes.T, SCRIPT_FLAGS):
        column[0].set_title(f"{script}.py {' '.join(SCRIPT_FLAGS[script][:2])}", fontweight="bold")
        column[1].set_xlabel("episodes")
        for axis, (name, label) in zip(column, rows):
            axis.grid(alpha=0.25)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
            if script == "rloo":
                axis.set_ylabel(label)
            for kl_coef, color in zip(KL_COEFS, ("#d1495b", "#1f6fb4")):
                some = [curve for curve in curves if (curve["script"], curve["kl_coef"]) == (script, kl_coef)]
                for curve in some:
                    axis.plot(curve["episode"], np.array(curve[name], dtype=float), color=color, alpha=0.25, lw=0.8)
                axis.plot(some[0]["episode"], mean_of(some, name), color=color, lw=2, label=f"--kl-coef {kl_coef}")
        column[1].set_ylim(0, 1)
        column[1].axhline(mean_of(curves, "eval/scores")[0], color="gray", lw=1, ls="--", label="before RL")
    handles = axes[1, 0].get_legend_handles_labels()
    axes[0, 0].legend(*handles, frameon=False, fontsize=8, loc="lower right")
    figure.savefig(RESULT.with_suffix(".png"))


def main():
    if "--plot" not in sys.argv:
        jobs = [(script, kl_coef, seed) for script in SCRIPT_FLAGS for kl_coef in KL_COEFS for seed in SEEDS]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            curves = list(pool.map(lambda job: run(*job), jobs))
        RESULT.parent.mkdir(exist_ok=True)
        # a curve a line
        RESULT.with_suffix(".json").write_text("[\n" + ",\n".join(json.dumps(curve) for curve in curves) + "\n]\n")
    curves = json.loads(RESULT.with_suffix(".json").read_text())
    report(curves)
    plot(curves)


if __name__ == "__main__":
    main()
