"""REINFORCE, RLOO, GRPO and PPO on one task: how they learn, and how noisy their gradients are.

    python benchmark/ladder/ladder.py          # measures everything, and draws the figure
    python benchmark/ladder/ladder.py --plot   # only draws, and prints the numbers of a sentence

"learning" has the rungs with as many episodes in each batch. Only the estimator differs, see
COMMON.

"gradients" needs runs with learning rate 0. They never change their weights, so each step is one
more estimate of the same gradient. The dataset of such a run is one batch, which each iteration
samples anew. "fresh" has other prompts in each iteration, as a training run has.
"""

import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import (
    BENCHMARK,
    Part,
    column,
    grouped,
    having,
    main,
    read_result,
    read_rows,
    run,
    run_all,
    write_rows,
)

RESULT = Path(__file__).with_suffix(".json")
BATCH = 64  # episodes, the default of all scripts
GROUP = 4  # completions of a prompt, the default of rloo.py and grpo.py
UPDATES = 64
SETS = range(1, 6)
REPETITIONS = 64  # estimates of one gradient
WEIGHTS = ("start", "half-way")


def no_values(ppo):
    """Compute the advantages of ppo.py as if all value predictions were 0."""
    gae = ppo.gae
    ppo.gae = lambda rewards, values, gamma, lam: gae(rewards, 0 * values, gamma, lam)


COMMON = "--kl-coef 0 --num-ppo-epochs 1 --learning-rate 1e-4 --lr-scheduler-type constant"
SHIFTED = f"{COMMON} --reward benchmark/ladder/shifted.py"
UNSCALED = f"{COMMON} --scale-rewards none"
RAW = f"{COMMON} --no-whiten-advantages"
REINFORCE = "rloo reinforce.patch"
FIXED = "--learning-rate 0 --max-grad-norm inf --num-sample-generations 0"

# name: script, flags, and functions that change the script before it runs
RUNGS = {
    "REINFORCE": (REINFORCE, COMMON),
    "RLOO": ("rloo", COMMON),
    "GRPO": ("grpo", COMMON),
    "PPO": ("ppo", COMMON),
    "REINFORCE, scores + 1": (REINFORCE, f"{SHIFTED}:plus_one"),
}
GRADIENTS = RUNGS | {
    "REINFORCE, scores - 1": (REINFORCE, f"{SHIFTED}:minus_one"),
    "GRPO, no deviation": ("grpo", UNSCALED),
    "GRPO, no deviation, no lengths": ("grpo", f"{UNSCALED} --loss-type dr_grpo"),
    "PPO, not whitened": ("ppo", RAW),
    "PPO, values 0, not whitened": ("ppo", RAW, no_values),
}
LEARNING = RUNGS | {
    "PPO, its own defaults": ("ppo", "--kl-coef 0"),
    "REINFORCE, k = 1": (REINFORCE, f"{COMMON} --rloo-k 1"),
}


def gradient_rows(_, smoke):
    """Measure the gradients of each rung at the start and half-way: a row for each rung and set of
    prompts."""
    rungs = {names["label"]: job for job, names in PARTS["gradients"].jobs().items()}
    # The learning rate is constant, so this is the first half of a whole run.
    episodes = BATCH * UPDATES // 2
    repetitions = REPETITIONS
    settings = product(WEIGHTS, (*SETS, "fresh"))
    if smoke:
        episodes = BATCH
        repetitions = 3
        settings = [("start", "fresh"), ("half-way", 1)]  # all rungs once
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run("ppo", f"{COMMON} --total-episodes {episodes}", f"{folder}/half_way")
        for weights, prompts in settings:
            chosen = {}
            for rung, job in rungs.items():
                # The value model begins with predictions of 0.
                is_known = weights == "start" and no_values in job
                if not is_known and (prompts != "fresh" or rung in RUNGS):
                    chosen[rung] = job
            for row in compare(chosen, Path(folder), weights, prompts, repetitions):
                rows.append(dict(weights=weights, prompts=prompts) | row)
    return rows


def write_datasets(folder, prompts, repetitions):
    """Write the prompts of a set (its number), or "fresh" ones, for scripts with groups and for
    ppo.py. Returns how many times they are passed over."""
    rows = read_rows(BENCHMARK / "default/train.jsonl")
    count = BATCH // GROUP
    if prompts == "fresh":  # the prompts of all batches, drawn independently
        epochs = 1
        positions = np.random.default_rng(0).integers(len(rows), size=count * repetitions)
    else:
        epochs = repetitions
        positions = np.random.default_rng(prompts).permutation(len(rows))[:count]
    chosen = [rows[position] for position in positions]
    write_rows(folder / "groups.jsonl", chosen)
    # ppo.py samples a prompt once.
    write_rows(folder / "ppo.jsonl", [row for row in chosen for _ in range(GROUP)])
    return epochs


def keep_gradients(file, module):
    """Append the gradient of each step of the policy's optimizer to a file."""
    watched = {}

    def write(optimizer, *_):
        # In PPO, the value model's optimizer makes its step after the policy's.
        if watched.setdefault("policy", optimizer) is not optimizer:
            return
        with open(file, "ab") as out:
            for parameter in optimizer.param_groups[0]["params"]:
                out.write(parameter.grad.numpy().tobytes())

    register_optimizer_step_pre_hook(write)


def compare(rungs, folder, weights, prompts, repetitions):
    """For each rung: variance, squared mean, the band of the noise, and the cosine with RLOO's
    mean."""
    epochs = write_datasets(folder, prompts, repetitions)
    jobs = []
    for number, (script, flags, *edits) in enumerate(rungs.values()):
        name = "ppo" if script == "ppo" else "groups"
        # The last of two equal flags counts: here the learning rate is 0.
        flags += f" {FIXED} --dataset {folder}/{name}.jsonl --num-train-epochs {epochs}"
        if weights == "half-way":
            flags += f" --model-path {folder}/half_way/model --response-length 8"
            if script == "ppo":
                flags += f" --value-model-path {folder}/half_way/value_model"
        jobs.append((script, flags, *edits, partial(keep_gradients, f"{folder}/{number}.bin")))
    results = run_all(jobs)
    gradients = {}
    for number, rung in enumerate(rungs):
        file = folder / f"{number}.bin"
        numbers = np.fromfile(file, np.float32).astype(np.float64)
        gradients[rung] = numbers.reshape(repetitions, -1)
        file.unlink()
    rloo = gradients["RLOO"]
    rloo_squared, _ = moments(rloo @ rloo.T)
    rows = []
    for (rung, own), result in zip(gradients.items(), results):
        products = own @ own.T
        squared_mean, variance = moments(products)
        # Products of two gradients from the same repetition are left out: they may come from the
        # same completions.
        inner, _ = moments(own @ rloo.T)
        row = dict(
            rung=rung,
            variance=variance,
            squared_mean=squared_mean,
            noise_band=noise_band(products),
            cosine=inner / np.sqrt(squared_mean * rloo_squared),
            score=float(np.mean(column(result["metrics"], "objective/scores"))),
        )
        rows.append(row)
    return rows


def moments(products):
    """Of gradients whose inner products are [n, n]: the squared length of their true mean, and
    their variance.

    Both are unbiased: the product of two different gradients has the squared length of the true
    mean as its mean.
    """
    n = len(products)
    squares = np.trace(products)
    squared_mean = (products.sum() - squares) / n / (n - 1)
    return squared_mean, squares / n - squared_mean


def noise_band(products):
    """Half the width of the 95 % interval of variance / squared mean, from leaving out one gradient
    at a time."""
    n = len(products)
    without_one = []
    for left_out in range(n):
        rest = np.delete(products, left_out, 0)
        squared_mean, variance = moments(np.delete(rest, left_out, 1))
        without_one.append(variance / squared_mean)
    return 1.96 * np.sqrt((n - 1) * np.var(without_one))


# ---- the table, the figure, and what a sentence says


def measured(**wanted):
    """The rows of gradients that have these entries, with their noise."""
    rows = having(read_result(RESULT)["rows"], part="gradients", **wanted)
    return [row | dict(noise=row["variance"] / row["squared_mean"]) for row in rows]


def fresh():
    """The noise of batches with other prompts in each, at the start and half-way."""
    for rung, rows in grouped(measured(prompts="fresh"), "rung").items():
        cells = [rung]
        for row in rows:
            noise, band = row["noise"], row["noise_band"]
            cells.append(f"{noise:.1f} ({noise - band:.1f} to {noise + band:.1f})")
        yield cells


def of_sets(rung, weights, name):
    """A rung's numbers of this name, one for each set of prompts."""
    rows = measured(rung=rung, weights=weights)
    return [row[name] for row in rows if row["prompts"] != "fresh"]


def plot(rows, folder):
    figure, [[learning, noises]] = draw.panels(1, 2, width=4.6, height=3.4)
    draw.panel(learning, "learning", having(rows, part="learning"), "eval/scores")
    learning.set_ylabel("right answers to held-out prompts")
    plot_noises(noises)
    draw.save(figure, folder / "ladder.png")
    for weights in WEIGHTS:
        # The variance with a constant baseline is a parabola in it. Three values were measured.
        rungs = ("REINFORCE, scores + 1", "REINFORCE", "REINFORCE, scores - 1")
        variances = [np.mean(of_sets(rung, weights, "variance")) for rung in rungs]
        bend, slope, _ = np.polyfit((-1, 0, 1), variances, 2)
        score = np.mean(of_sets("RLOO", weights, "score"))
        print(f"{weights}: best baseline {-slope / bend / 2:.2f}, mean score {score:.2f}")


def color_of(rung):
    return draw.COLORS.get(rung.split(",")[0].lower(), draw.OTHERS[0])


def plot_noises(axis):
    """The noise of each rung, times RLOO's: the geometric mean over the sets of prompts, with its
    95 % interval."""
    names = [*RUNGS, "PPO, not whitened", "PPO, values 0, not whitened"]
    for x, name in enumerate(names):
        for weights, side in zip(WEIGHTS, (-0.12, 0.12)):
            is_start = weights == "start"
            # At the start, all values are 0.
            rung = name.replace(", values 0", "") if is_start else name
            noises = [np.log(of_sets(each, weights, "noise")) for each in (rung, "RLOO")]
            middle, band = draw.mean_and_band(np.subtract(*noises))
            ends = np.exp([middle - band, middle, middle + band])
            color = color_of(name)
            style = dict(color=color, markerfacecolor=color if is_start else "white")
            label = weights if x == 0 else None
            axis.plot([x + side] * 3, ends, "o-", ms=7, markevery=[1], label=label, **style)
    axis.axhline(1, color=draw.GRAY, lw=0.8, ls=":")
    axis.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=6)
    axis.set_title("noise of the gradient, fixed prompts")
    axis.set_ylabel("noise, times that of RLOO")
    axis.set_yscale("log")
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    axis.set_yticks(ticks, ticks)
    axis.legend(frameon=False, loc="upper left", fontsize=7.5)


EVALUATED = f"--batch-size {BATCH} --total-episodes {UPDATES * BATCH} --eval-every 4"
EVALUATED += " --eval-reward exact_match"


def runs_of(rungs):
    return [(dict(label=rung), *job) for rung, job in rungs.items()]


PARTS = {
    "learning": Part(runs_of(LEARNING), EVALUATED, range(1, 11), "eval/scores"),
    "gradients": Part(runs_of(GRADIENTS), measure=gradient_rows),
}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
