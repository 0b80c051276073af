"""REINFORCE, RLOO, GRPO and PPO on one task: how they learn, and how noisy their gradients are.

    python benchmark/ladder/ladder.py          # measures everything, and draws the figure
    python benchmark/ladder/ladder.py --plot   # only draws

"learning" has the rungs with as many episodes in each batch. Only the estimator differs, see
COMMON.

"gradients" needs runs with learning rate 0. They never change their weights, so each step is one
more estimate of the same gradient. The dataset of such a run is one batch, which each iteration
samples anew. "fresh" has other prompts in each iteration, as a training run has.
"""

import math
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import (
    BENCHMARK,
    K_FLAGS,
    Part,
    column,
    grouped,
    having,
    logged,
    main,
    read_result,
    read_rows,
    run,
    run_all,
    write_rows,
)
from tables import interval

RESULT = Path(__file__).with_suffix(".json")
BATCH = 64  # episodes, the default of all scripts
GROUP = 4  # completions of a prompt, the default of rloo.py and grpo.py
UPDATES = 64
SETS = range(1, 6)
REPETITIONS = 64  # estimates of one gradient


def no_values(ppo):
    """Compute the advantages of ppo.py as if all value predictions were 0."""
    gae = ppo.gae
    ppo.gae = lambda rewards, values, gamma, lam: gae(rewards, 0 * values, gamma, lam)


COMMON = "--kl-coef 0 --num-ppo-epochs 1 --learning-rate 1e-4 --lr-scheduler-type constant"
SHIFTED = f"{COMMON} --reward benchmark/ladder/shifted.py"
UNSCALED = f"{COMMON} --scale-rewards none"
RAW = f"{COMMON} --no-whiten-advantages"
REINFORCE = "rloo reinforce.patch"

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
OTHERS = {  # beside the rungs, in the figure of learning
    "REINFORCE, k = 1": (REINFORCE, COMMON),
    "PPO, its own defaults": ("ppo", "--kl-coef 0"),
}


def learning_runs() -> list[tuple]:
    runs = []
    for rung, (script, flags) in (RUNGS | OTHERS).items():
        if script != "ppo":
            k = 1 if "k = 1" in rung else GROUP
            flags += f" {K_FLAGS[script.split()[0]]} {k}"
        runs.append((dict(rung=rung), script, flags))
    return runs


def to_curve(result: dict) -> dict:
    """The evaluations on held-out prompts."""
    evaluations = result["evaluations"]
    return dict(
        episode=column(evaluations, "episode"),
        held_out=[round(score, 4) for score in column(evaluations, "eval/scores")],
    )


def gradient_rows(_, smoke: bool) -> list[dict]:
    """Measure the gradients of each rung at the start and half-way: a row for each rung and set of
    prompts."""
    rungs = {names["rung"]: job for job, names in PARTS["gradients"].jobs().items()}
    # The learning rate is constant, so this is the first half of a whole run.
    script, flags = RUNGS["PPO"]
    flags += f" --total-episodes {64 if smoke else BATCH * UPDATES // 2}"
    repetitions = 3 if smoke else REPETITIONS
    settings = product(("start", "half-way"), (*SETS, "fresh"))
    if smoke:
        settings = [("start", "fresh"), ("half-way", 1)]  # all rungs once
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        run(script, flags, folder / "half_way")
        for weights, prompts in settings:
            chosen = rungs
            if prompts == "fresh":
                chosen = {rung: rungs[rung] for rung in RUNGS}
            if weights == "start":  # The value model begins with predictions of 0.
                chosen = {rung: job for rung, job in chosen.items() if no_values not in job}
            for row in compare(chosen, folder, weights, prompts, repetitions):
                rows.append(dict(weights=weights, prompts=prompts) | row)
    return rows


def write_datasets(folder: Path, prompts: int | str, repetitions: int) -> int:
    """Write the prompts of a set, for scripts with groups and for ppo.py. Returns how many times
    they are passed over."""
    rows = read_rows(BENCHMARK / "default/train.jsonl")
    count = BATCH // GROUP
    if prompts == "fresh":  # the prompts of all batches, drawn independently
        epochs = 1
        positions = np.random.default_rng(0).integers(len(rows), size=count * repetitions)
    else:
        epochs = repetitions
        positions = np.random.default_rng(prompts).permutation(len(rows))[:count]
    for name, copies in (("groups", 1), ("ppo", GROUP)):  # ppo.py samples a prompt once.
        chosen = np.repeat(positions, copies)
        write_rows(folder / f"{name}.jsonl", [rows[position] for position in chosen])
    return epochs


def keep_gradients(file: str, module):
    """Append the gradient of each step of the policy's optimizer to a file."""
    make_optimizer = module.make_optimizer

    def write(optimizer, *_):
        with open(file, "ab") as out:
            for parameter in optimizer.param_groups[0]["params"]:
                out.write(parameter.grad.numpy().tobytes())

    def make_watched(*inputs):
        module.make_optimizer = make_optimizer  # PPO makes another one, for its value model.
        optimizer = make_optimizer(*inputs)
        optimizer.register_step_pre_hook(write)
        return optimizer

    module.make_optimizer = make_watched


def compare(
    rungs: dict, folder: Path, weights: str, prompts: int | str, repetitions: int
) -> list[dict]:
    """For each rung: variance, squared mean, the band of the noise, and the cosine with RLOO's
    mean."""
    epochs = write_datasets(folder, prompts, repetitions)
    files = {rung: folder / f"{number}.bin" for number, rung in enumerate(rungs)}
    jobs = []
    for rung, (script, flags, *edits) in rungs.items():
        name = "ppo" if script == "ppo" else "groups"
        flags += f" --dataset {folder}/{name}.jsonl --num-train-epochs {epochs}"
        if weights == "half-way":
            flags += f" --model-path {folder}/half_way/model --response-length 8"
            if script == "ppo":
                flags += f" --value-model-path {folder}/half_way/value_model"
        files[rung].unlink(missing_ok=True)
        jobs.append((script, flags, *edits, partial(keep_gradients, str(files[rung]))))
    results = run_all(jobs)

    def gradients_of(rung):  # [repetitions, weights]
        gradients = np.fromfile(files[rung], np.float32).astype(np.float64)
        return gradients.reshape(repetitions, -1)

    rloo = gradients_of("RLOO")
    rloo_squared, _ = moments(rloo @ rloo.T)
    rows = []
    for rung, result in zip(rungs, results):
        gradients = gradients_of(rung)
        products = gradients @ gradients.T
        squared_mean, variance = moments(products)
        # Products of two gradients from the same repetition are left out: they may come from the
        # same completions.
        inner, _ = moments(gradients @ rloo.T)
        row = dict(
            rung=rung,
            variance=variance,
            squared_mean=squared_mean,
            noise_band=noise_band(products),
            cosine=inner / np.sqrt(squared_mean * rloo_squared),
            score=float(np.mean(logged(result["metrics"], "objective/scores"))),
        )
        rows.append(row)
    return rows


def moments(products: np.ndarray) -> tuple[float, float]:
    """Of gradients whose inner products are [n, n]: the squared length of their true mean, and
    their variance.

    Both are unbiased: the product of two different gradients has the squared length of the true
    mean as its mean.
    """
    n = len(products)
    squares = np.trace(products)
    squared_mean = (products.sum() - squares) / n / (n - 1)
    return squared_mean, squares / n - squared_mean


def noise_band(products: np.ndarray) -> float:
    """Half the width of the 95 % interval of variance / squared mean, from leaving out one gradient
    at a time."""
    n = len(products)
    without_one = []
    for left_out in range(n):
        rest = np.delete(products, left_out, 0)
        squared_mean, variance = moments(np.delete(rest, left_out, 1))
        without_one.append(variance / squared_mean)
    return 1.96 * np.sqrt((n - 1) * np.var(without_one))


# ---- the table, and what sentences say


def noise(row: dict) -> float:
    return row["variance"] / row["squared_mean"]


def sets_of(rung: str, weights: str) -> list[dict]:
    """The rows of a rung, one of each set of prompts."""
    rows = having(read_result(RESULT)["rows"], part="gradients", rung=rung, weights=weights)
    return [row for row in rows if row["prompts"] != "fresh"]


def relative_noise(rung: str, weights: str) -> tuple[float, float, float]:
    """A rung's noise, times RLOO's: the geometric mean over the sets, between the ends of its
    interval."""
    ratios = []
    pairs = zip(sets_of(rung, weights), sets_of("RLOO", weights), strict=True)
    for row, of_rloo in pairs:
        ratios.append(math.log(noise(row) / noise(of_rloo)))
    middle, band = draw.mean_and_band(ratios)
    return math.exp(middle - band), math.exp(middle), math.exp(middle + band)


def fresh():
    """The noise of batches with other prompts in each, at the start and half-way."""
    rows = having(read_result(RESULT)["rows"], part="gradients", prompts="fresh")
    for rung, some in grouped(rows, "rung").items():
        yield [rung, *(interval(noise(row), row["noise_band"], ".1f") for row in some)]


def best_baseline(weights: str) -> float:
    """The variance with a constant baseline is a parabola in it. Its values at -1, 0 and 1 were
    measured."""
    rungs = ("REINFORCE, scores + 1", "REINFORCE", "REINFORCE, scores - 1")
    variances = [np.mean(column(sets_of(rung, weights), "variance")) for rung in rungs]
    bend, slope, _ = np.polyfit((-1, 0, 1), variances, 2)
    return -slope / bend / 2


def cited():
    """What docs/ladder.md says in sentences."""
    numbers = []
    for weights in ("start", "half-way"):
        score = np.mean(column(sets_of("RLOO", weights), "score"))
        numbers += [score, best_baseline(weights)]
    yield [
        "mean score, {:.2f}, is near the best baseline, {:.2f},".format(*numbers),
        "it is {2:.2f}, far above the best one, {3:.2f},".format(*numbers),
    ]


# ---- figure


STYLES = {  # of the figure
    "REINFORCE": dict(color=draw.OTHERS[0]),
    "RLOO": dict(color=draw.COLORS["rloo"]),
    "GRPO": dict(color=draw.COLORS["grpo"]),
    "PPO": dict(color=draw.COLORS["ppo"]),
    "REINFORCE, scores + 1": dict(color=draw.OTHERS[0], ls="--"),
    "PPO, its own defaults": dict(color=draw.COLORS["ppo"], ls="--"),
    "REINFORCE, k = 1": dict(color=draw.OTHERS[0], ls=":"),
}


def plot(rows: list[dict], folder: Path):
    figure, [[learning, noises]] = draw.panels(1, 2, width=4.6, height=3.4)
    plot_learning(learning, having(rows, part="learning"))
    plot_noises(noises)
    draw.save(figure, folder / "ladder.png")


def plot_learning(axis, rows: list[dict]):
    """The score on held-out prompts, a curve for each rung."""
    for rung, style in STYLES.items():
        runs = having(rows, rung=rung)
        draw.curve(axis, runs[0]["episode"], column(runs, "held_out"), label=rung, **style)
    axis.set_title("learning")
    axis.set_ylabel("right answers to held-out prompts")
    axis.set_ylim(0, 1.02)
    draw.in_thousands(axis)
    axis.legend(frameon=False, loc="lower right", fontsize=7.5)


def plot_noises(axis):
    """The noise of each rung at the start and half-way, with its 95 % interval."""
    names = [*RUNGS, "PPO, not whitened", "PPO, values 0, not whitened"]
    for x, name in enumerate(names):
        color = STYLES.get(name, STYLES["PPO"])["color"]
        for weights, side, fill in (("start", -0.12, color), ("half-way", 0.12, "white")):
            # At the start, all values are 0.
            rung = name.replace(", values 0", "") if weights == "start" else name
            low, middle, high = relative_noise(rung, weights)
            style = dict(fmt="o", ms=7, capsize=3, color=color, markerfacecolor=fill)
            axis.errorbar(x + side, middle, [[middle - low], [high - middle]], **style)
    style = dict(ms=7, color=draw.GRAY)
    axis.plot([], [], "o", label="at the start", **style)
    axis.plot([], [], "o", markerfacecolor="white", label="half-way", **style)
    axis.axhline(1, color=draw.GRAY, lw=0.8, ls=":")
    axis.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=6)
    axis.set_title("noise of the gradient, fixed prompts")
    axis.set_ylabel("noise, times that of RLOO")
    axis.set_yscale("log")
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    axis.set_yticks(ticks, map(str, ticks))
    axis.legend(frameon=False, loc="upper left", fontsize=7.5)


EVALUATED = f"--batch-size {BATCH} --total-episodes {UPDATES * BATCH} --eval-every 4"
EVALUATED += " --eval-reward exact_match"
FIXED = "--learning-rate 0 --max-grad-norm inf --num-sample-generations 0"
GRADIENT_RUNS = []
for rung, (script, flags, *edits) in GRADIENTS.items():
    GRADIENT_RUNS.append((dict(rung=rung), script, f"{flags} {FIXED}", *edits))
PARTS = {
    "learning": Part(learning_runs(), EVALUATED, range(1, 11), to_curve),
    "gradients": Part(GRADIENT_RUNS, measure=gradient_rows),
}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
