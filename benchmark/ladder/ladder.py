"""REINFORCE, RLOO, GRPO and PPO on one task: how they learn, and how noisy their gradients are.

    python benchmark/ladder/ladder.py          # measures everything, and draws the figure
    python benchmark/ladder/ladder.py --draw   # only draws

Only the estimator differs, see COMMON. A run with learning rate 0 never changes its weights, so each step is one more
estimate of the same gradient. The dataset of such a run is one batch, which each iteration samples anew. "fresh" has
other prompts in each iteration, as a training run has. Writes ladder.json, a row for each run, and ladder.png.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
import tables
from run import BENCHMARK, read_rows, run, run_all, run_forked, write_lines

RESULT = Path(__file__).with_suffix(".json")
BATCH = 64  # episodes, the default of all scripts
GROUP = 4  # completions of a prompt, the default of rloo.py and grpo.py
EPISODES = 4096
SEEDS = range(1, 11)
SETS = range(1, 6)
REPETITIONS = 64  # estimates of one gradient


def no_values(ppo):
    """Compute the advantages of ppo.py as if all value predictions were 0."""
    gae = ppo.gae
    ppo.gae = lambda rewards, values, gamma, lam: gae(rewards, 0 * values, gamma, lam)


def only_divide(ppo):
    """Whiten without the mean: divide by the standard deviation, and subtract nothing."""
    ppo.whiten = lambda advantages: advantages / advantages.std(correction=0)


COMMON = "--kl-coef 0 --num-ppo-epochs 1 --learning-rate 1e-4 --lr-scheduler-type constant"
SHIFTED = f"{COMMON} --reward benchmark/ladder/shifted.py"
RAW = f"{COMMON} --no-whiten-advantages"

REINFORCE = "rloo ladder/reinforce.patch"

# name: script, flags, and functions that change the script before it runs
RUNGS = {
    "REINFORCE": (REINFORCE, COMMON),
    "RLOO": ("rloo", COMMON),
    "GRPO": ("grpo", COMMON),
    "PPO": ("ppo", COMMON),
    "REINFORCE, scores + 1": (REINFORCE, f"{SHIFTED}:plus_one"),
}
LEARNING = RUNGS | {"PPO, its own defaults": ("ppo", "--kl-coef 0")}
GRADIENTS = RUNGS | {
    "REINFORCE, scores - 1": (REINFORCE, f"{SHIFTED}:minus_one"),
    "GRPO, no deviation": ("grpo", f"{COMMON} --scale-rewards none"),
    "GRPO, no deviation, no lengths": ("grpo", f"{COMMON} --scale-rewards none --loss-type dr_grpo"),
    "PPO, lambda 1": ("ppo", f"{COMMON} --lam 1"),
    "PPO, only divided": ("ppo", COMMON, only_divide),
    "PPO, not whitened": ("ppo", RAW),
    "PPO, values 0": ("ppo", COMMON, no_values),
    "PPO, values 0, only divided": ("ppo", COMMON, no_values, only_divide),
    "PPO, values 0, not whitened": ("ppo", RAW, no_values),
}


def learning_rows() -> list[dict]:
    """Train each rung with each seed -> a row for each run, with its evaluations on held-out prompts."""
    jobs = {}
    for seed in SEEDS:
        for rung, (script, flags) in LEARNING.items():
            run_flags = f"--seed {seed} --total-episodes {EPISODES} --eval-every 4 --eval-reward exact_match {flags}"
            jobs[script, run_flags] = dict(measured="learning", rung=rung, seed=seed)

    def to_row(job, result):
        held_out = [round(row["eval/scores"], 4) for row in result["evaluations"]]
        return jobs[job] | dict(episode=[row["episode"] for row in result["evaluations"]], held_out=held_out)

    return run_all(list(jobs), to_row)


def gradient_rows(folder: Path) -> list[dict]:
    """Measure the gradients of each rung at the start and half-way -> a row for each rung and set of prompts."""
    half = folder / "half_way"  # The learning rate is constant, so this is the first half of a whole run.
    run("ppo", f"--seed 1 --total-episodes {EPISODES // 2} --num-sample-generations 0 {COMMON}", half)
    policy = f"--model-path {half / 'model'} --response-length 8"
    rows = []
    for weights in ("start", "half-way"):
        for prompts in [*SETS, "fresh"]:
            datasets, epochs = write_datasets(folder, prompts)
            jobs = {}
            rungs = RUNGS if prompts == "fresh" else GRADIENTS
            for rung, (script, flags, *edits) in rungs.items():
                if weights == "start" and no_values in edits:
                    continue  # The value model begins with predictions of 0.
                dataset = datasets["ppo" if script == "ppo" else "groups"]
                flags += f" --dataset {dataset} --num-train-epochs {epochs} --num-sample-generations 0"
                flags += " --learning-rate 0 --max-grad-norm inf"
                if weights == "half-way":
                    flags += f" {policy} --value-model-path {half / 'value_model'}" if script == "ppo" else f" {policy}"
                jobs[rung] = ((script, flags, *edits), str(folder / f"{len(jobs)}.npy"))
            for row in compare(jobs):
                rows.append(dict(measured="gradient", weights=weights, prompts=prompts) | row)
            print(f"gradients, {weights}, prompts {prompts}: done", file=sys.stderr, flush=True)
    return rows


def write_datasets(folder: Path, prompts: int | str) -> tuple[dict[str, str], int]:
    """Files with the prompts of a set for scripts with groups and for ppo.py, and how often they are passed over."""
    rows = read_rows(BENCHMARK / "default/train.jsonl")
    count, epochs = BATCH // GROUP, REPETITIONS
    if prompts == "fresh":  # the prompts of all batches, drawn independently
        positions, epochs = np.random.default_rng(0).integers(len(rows), size=count * REPETITIONS), 1
    else:
        positions = np.random.default_rng(prompts).permutation(len(rows))[:count]
    lines = [json.dumps(rows[position]) + "\n" for position in positions]
    files = {"groups": str(folder / f"{prompts}_groups.jsonl"), "ppo": str(folder / f"{prompts}_ppo.jsonl")}
    Path(files["groups"]).write_text("".join(lines))
    Path(files["ppo"]).write_text("".join(line * GROUP for line in lines))  # ppo.py samples a prompt once.
    return files, epochs


def record_gradients(job: tuple) -> dict:
    """Run a script in this process, and save the gradient of each step as a row of a .npy file -> what the run wrote.

    job: what `run_forked` gets, and the path of the .npy file
    """
    inner, file = job
    torch = importlib.import_module("torch")
    gradients = []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            parameters = self.param_groups[0]["params"]
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]).numpy())
            return super().step(closure)

    torch.optim.AdamW = Recorder
    result = run_forked(inner)
    np.save(file, np.stack(gradients))
    return result


def compare(jobs: dict[str, tuple]) -> list[dict]:
    """Run the jobs -> for each rung: variance, squared mean, the band of the noise, and the cosine with RLOO's mean."""
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        results = dict(zip(jobs, pool.imap(record_gradients, jobs.values(), chunksize=1)))
    rloo = np.load(jobs["RLOO"][-1]).astype(np.float64)
    rloo_squared, _ = moments(rloo @ rloo.T)
    rows = []
    for rung, (_, file) in jobs.items():
        # The policy's weights come first. ppo.py has those of its value model after them.
        gradients = np.load(file)[:, : rloo.shape[1]].astype(np.float64)
        products = gradients @ gradients.T
        squared_mean, variance = moments(products)
        # Products of two gradients from the same repetition are left out: they may come from the same completions.
        cosine = moments(gradients @ rloo.T)[0] / np.sqrt(squared_mean * rloo_squared)
        score = np.mean([row["objective/scores"] for row in results[rung]["metrics"] if "objective/scores" in row])
        numbers = dict(variance=variance, squared_mean=squared_mean, noise_band=noise_band(products))
        numbers |= dict(cosine=cosine, score=score)
        rows.append(dict(rung=rung) | {name: float(x) for name, x in numbers.items()})
    return rows


def moments(products: np.ndarray) -> tuple[float, float]:
    """Of gradients whose inner products are [n, n]: the squared length of their true mean, and their variance.

    Both are unbiased: the product of two different gradients has the squared length of the true mean as its mean.
    """
    n = len(products)
    squared_mean = (products.sum() - np.trace(products)) / n / (n - 1)
    return squared_mean, np.trace(products) / n - squared_mean


def noise_band(products: np.ndarray) -> float:
    """Half the width of the 95 % interval of variance / squared mean, from leaving out one gradient at a time."""
    n, without_one = len(products), []
    for left_out in range(n):
        squared_mean, variance = moments(np.delete(np.delete(products, left_out, 0), left_out, 1))
        without_one.append(variance / squared_mean)
    return 1.96 * np.sqrt((n - 1) * np.var(without_one))


STYLES = {  # of the figure
    "REINFORCE": dict(color=draw.OTHERS[0]),
    "RLOO": dict(color=draw.COLORS["rloo"]),
    "GRPO": dict(color=draw.COLORS["grpo"]),
    "PPO": dict(color=draw.COLORS["ppo"]),
    "REINFORCE, scores + 1": dict(color=draw.OTHERS[0], ls="--"),
    "PPO, its own defaults": dict(color=draw.COLORS["ppo"], ls="--"),
}


def plot(rows: list[dict]):
    figure, [[learning, noises]] = draw.panels(1, 2, width=4.6, height=3.4)
    for name, style in STYLES.items():
        runs = [row for row in rows if row["measured"] == "learning" and row["rung"] == name]
        draw.curve(learning, runs[0]["episode"], [row["held_out"] for row in runs], label=name, **style)
    learning.set(title="learning", ylabel="right answers to held-out prompts", ylim=(0, 1.02))
    draw.in_thousands(learning)
    learning.legend(frameon=False, loc="lower right", fontsize=7.5)
    names = [*RUNGS, "PPO, not whitened", "PPO, values 0, not whitened"]
    for x, name in enumerate(names):
        color = STYLES.get(name, STYLES["PPO"])["color"]
        for offset, weights, inside in ((-0.12, "start", color), (0.12, "half-way", "white")):
            measured = name if weights == "half-way" else name.replace(", values 0", "")
            low, middle, high = tables.ladder_relative_noise(measured, weights)
            style = dict(fmt="o", ms=7, capsize=3, color=color, markerfacecolor=inside)
            noises.errorbar(x + offset, middle, [[middle - low], [high - middle]], **style)
    noises.plot([], [], "o", ms=7, color=draw.GRAY, label="at the start")
    noises.plot([], [], "o", ms=7, color=draw.GRAY, markerfacecolor="white", label="half-way")
    noises.axhline(1, color=draw.GRAY, lw=0.8, ls=":")
    noises.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=6)
    noises.set(title="noise of the gradient", ylabel="noise, times that of RLOO", yscale="log")
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    noises.set_yticks(ticks, map(str, ticks))
    noises.legend(frameon=False, loc="upper left", fontsize=7.5)
    draw.save(figure, RESULT.with_suffix(".png"))


def main():
    if "--draw" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            rows = learning_rows()  # goes to the root, and imports what the scripts need
            rows += gradient_rows(Path(folder))
        write_lines(RESULT, rows)
    plot(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
