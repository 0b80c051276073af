"""REINFORCE, RLOO, GRPO and PPO on one task: how they learn, and how noisy their gradients are.

    python benchmark/ladder/ladder.py          # measures everything, and draws the figure
    python benchmark/ladder/ladder.py --plot   # only draws

"learning" has the rungs with as many episodes in each batch, and again with as many prompts. Only
the estimator and these two numbers differ, see COMMON.

"gradients" needs runs with learning rate 0. They never change their weights, so each step is one
more estimate of the same gradient. The dataset of such a run is one batch, which each iteration
samples anew. "fresh" has other prompts in each iteration, as a training run has.
"""

import importlib
import math
import sys
import tempfile
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
    fresh_processes,
    grouped,
    having,
    logged,
    main,
    read_result,
    read_rows,
    run,
    run_here,
    write_rows,
)
from tables import interval

RESULT = Path(__file__).with_suffix(".json")
BATCH = 64  # episodes, the default of all scripts
GROUP = 4  # completions of a prompt, the default of rloo.py and grpo.py
UPDATES = 64
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
UNSCALED = f"{COMMON} --scale-rewards none"

REINFORCE = "rloo reinforce.patch"
HALF_WAY = "the policy half-way"

# name: script, flags, and functions that change the script before it runs
RUNGS = {
    "REINFORCE": (REINFORCE, COMMON),
    "RLOO": ("rloo", COMMON),
    "GRPO": ("grpo", COMMON),
    "PPO": ("ppo", COMMON),
    "REINFORCE, scores + 1": (REINFORCE, f"{SHIFTED}:plus_one"),
}
GROUPS = {  # k of each rung
    "REINFORCE": (1, 2, 4),
    "RLOO": (2, 4),
    "GRPO": (2, 4),
    "PPO": (1,),
    "REINFORCE, scores + 1": (4,),
}
GRADIENTS = RUNGS | {
    "REINFORCE, scores - 1": (REINFORCE, f"{SHIFTED}:minus_one"),
    "GRPO, no deviation": ("grpo", UNSCALED),
    "GRPO, no deviation, no lengths": ("grpo", f"{UNSCALED} --loss-type dr_grpo"),
    "PPO, lambda 1": ("ppo", f"{COMMON} --lam 1"),
    "PPO, only divided": ("ppo", COMMON, only_divide),
    "PPO, not whitened": ("ppo", RAW),
    "PPO, values 0": ("ppo", COMMON, no_values),
    "PPO, values 0, only divided": ("ppo", COMMON, no_values, only_divide),
    "PPO, values 0, not whitened": ("ppo", RAW, no_values),
}


def learning_runs(equal: str) -> list[tuple]:
    """The runs of each rung with each k. equal: what a batch has 64 of, `episodes` or `prompts`"""
    settings = []
    for rung, ks in GROUPS.items():
        script, flags = RUNGS[rung]
        for k in ks:
            settings.append((rung, k, script, flags))
    settings.append(("PPO, its own defaults", 1, "ppo", "--kl-coef 0"))
    runs = []
    for rung, k, script, flags in settings:
        size = BATCH
        if equal == "prompts":
            if k == 1 or "," in rung:
                continue  # With one completion of a prompt both are the same run.
            size = BATCH * k
        if script != "ppo":
            flags += f" {K_FLAGS[script.split()[0]]} {k}"
        flags += f" --batch-size {size} --total-episodes {UPDATES * size}"
        runs.append((dict(rung=rung, k=k, equal=equal), script, flags))
    return runs


def to_curve(result: dict) -> dict:
    """The evaluations on held-out prompts."""
    evaluations = result["evaluations"]
    return dict(
        episode=column(evaluations, "episode"),
        held_out=[round(score, 4) for score in column(evaluations, "eval/scores")],
    )


def gradient_runs() -> list[tuple]:
    """The rungs, without their data; and the run whose first half gives the second set of
    weights."""
    fixed = "--learning-rate 0 --max-grad-norm inf"
    runs = []
    for rung, (script, flags, *edits) in GRADIENTS.items():
        runs.append((dict(rung=rung), script, f"{flags} {fixed}", *edits))
    # The learning rate is constant, so this is the first half of a whole run.
    half = f"{COMMON} --total-episodes {BATCH * UPDATES // 2}"
    return [*runs, (dict(rung=HALF_WAY), "ppo", half)]


def gradient_rows(_, smoke: bool) -> list[dict]:
    """Measure the gradients of each rung at the start and half-way: a row for each rung and set of
    prompts."""
    rungs = {}
    for job, names in PARTS["gradients"].jobs().items():
        rungs[names["rung"]] = job
    script, flags = rungs.pop(HALF_WAY)
    repetitions = REPETITIONS
    settings = product(("start", "half-way"), (*SETS, "fresh"))
    if smoke:
        repetitions = 3
        flags += " --total-episodes 64"
        settings = [("start", "fresh"), ("half-way", 1)]  # all rungs once
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        half = folder / "half_way"
        run(script, flags, half)
        for weights, prompts in settings:
            path = half
            chosen = rungs
            if prompts == "fresh":
                chosen = {rung: rungs[rung] for rung in RUNGS}
            if weights == "start":  # The value model begins with predictions of 0.
                path = None
                chosen = {rung: job for rung, job in chosen.items() if no_values not in job}
            for row in compare(with_data(chosen, folder, prompts, repetitions, path)):
                rows.append(dict(weights=weights, prompts=prompts) | row)
            print(f"gradients, {weights}, prompts {prompts}: done", file=sys.stderr, flush=True)
    return rows


def with_data(
    rungs: dict, folder: Path, prompts: int | str, repetitions: int, weights: Path | None
) -> dict:
    """The jobs of `compare`: those of the rungs with a set of prompts and with weights, and a file
    for gradients."""
    datasets, epochs = write_datasets(folder, prompts, repetitions)
    jobs = {}
    for rung, (script, flags, *edits) in rungs.items():
        dataset = datasets["groups"]
        if script == "ppo":
            dataset = datasets["ppo"]
        flags += f" --dataset {dataset} --num-train-epochs {epochs}"
        if weights:
            flags += f" --model-path {weights / 'model'} --response-length 8"
            if script == "ppo":
                flags += f" --value-model-path {weights / 'value_model'}"
        job = (script, flags, *edits)
        jobs[rung] = (job, f"{folder}/{len(jobs)}.npy")
    return jobs


def write_datasets(
    folder: Path, prompts: int | str, repetitions: int
) -> tuple[dict[str, Path], int]:
    """Files with the prompts of a set for scripts with groups and for ppo.py, and how often they
    are passed over."""
    rows = read_rows(BENCHMARK / "default/train.jsonl")
    count = BATCH // GROUP
    if prompts == "fresh":  # the prompts of all batches, drawn independently
        epochs = 1
        rng = np.random.default_rng(0)
        positions = rng.integers(len(rows), size=count * repetitions)
    else:
        epochs = repetitions
        rng = np.random.default_rng(prompts)
        positions = rng.permutation(len(rows))[:count]
    files = {}
    for name, copies in (("groups", 1), ("ppo", GROUP)):  # ppo.py samples a prompt once.
        files[name] = folder / f"{prompts}_{name}.jsonl"
        chosen = np.repeat(positions, copies)
        write_rows(files[name], [rows[position] for position in chosen])
    return files, epochs


def record_gradients(job: tuple) -> dict:
    """Run a script in this process, and save the gradient of each step as a row of a .npy file ->
    what the run wrote.

    job: what `run_here` gets, and the path of the .npy file
    """
    inner, file = job
    torch = importlib.import_module("torch")
    gradients = []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            parameters = self.param_groups[0]["params"]
            pieces = [parameter.grad.flatten() for parameter in parameters]
            gradients.append(torch.cat(pieces).numpy())
            return super().step(closure)

    torch.optim.AdamW = Recorder
    result = run_here(inner)
    np.save(file, np.stack(gradients))
    return result


def compare(jobs: dict[str, tuple]) -> list[dict]:
    """Run the jobs -> for each rung: variance, squared mean, the band of the noise, and the cosine
    with RLOO's mean."""
    with fresh_processes().Pool(maxtasksperchild=1) as pool:
        results = dict(zip(jobs, pool.imap(record_gradients, jobs.values())))
        pool.close()
        pool.join()
    rloo = np.load(jobs["RLOO"][-1]).astype(np.float64)
    rloo_squared, _ = moments(rloo @ rloo.T)
    rows = []
    for rung, (_, file) in jobs.items():
        # The policy's weights come first. ppo.py has those of its value model after them.
        gradients = np.load(file)[:, : rloo.shape[1]]
        gradients = gradients.astype(np.float64)
        products = gradients @ gradients.T
        squared_mean, variance = moments(products)
        # Products of two gradients from the same repetition are left out: they may come from the
        # same completions.
        inner, _ = moments(gradients @ rloo.T)
        cosine = inner / np.sqrt(squared_mean * rloo_squared)
        scores = logged(results[rung]["metrics"], "objective/scores")
        row = dict(
            rung=rung,
            variance=variance,
            squared_mean=squared_mean,
            noise_band=noise_band(products),
            cosine=cosine,
            score=float(np.mean(scores)),
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


def gradients_of(rung: str, weights: str) -> list[dict]:
    """The rows of a rung, one of each set of prompts."""
    rows = having(read_result(RESULT)["rows"], part="gradients", rung=rung, weights=weights)
    return [row for row in rows if row["prompts"] != "fresh"]


def relative_noise(rung: str, weights: str) -> tuple[float, float, float]:
    """A rung's noise, times RLOO's: the geometric mean over the sets, between the ends of its
    interval."""
    ratios = []
    pairs = zip(gradients_of(rung, weights), gradients_of("RLOO", weights), strict=True)
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
    variances = [np.mean(column(gradients_of(rung, weights), "variance")) for rung in rungs]
    bend, slope, _ = np.polyfit((-1, 0, 1), variances, 2)
    return -slope / bend / 2


def cited():
    """What docs/ladder.md says in sentences."""
    numbers = []
    for weights in ("start", "half-way"):
        score = np.mean(column(gradients_of("RLOO", weights), "score"))
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
}


def plot(rows: list[dict], folder: Path):
    figure, [[learning, noises]] = draw.panels(1, 2, width=4.6, height=3.4)
    plot_learning(learning, having(rows, part="learning", equal="episodes"))
    plot_noises(noises)
    draw.save(figure, folder / "ladder.png")


def plot_learning(axis, rows: list[dict]):
    """The score on held-out prompts, a curve for each rung."""
    for name, style in STYLES.items():
        k = max(GROUPS.get(name, (1,)))
        plot_curve(axis, having(rows, rung=name, k=k), label=name, **style)
    single = having(rows, rung="REINFORCE", k=1)
    plot_curve(axis, single, label="REINFORCE, k = 1", color=draw.OTHERS[0], ls=":")
    axis.set_title("learning")
    axis.set_ylabel("right answers to held-out prompts")
    axis.set_ylim(0, 1.02)
    draw.in_thousands(axis)
    axis.legend(frameon=False, loc="lower right", fontsize=7.5)


def plot_curve(axis, runs: list[dict], **style):
    draw.curve(axis, runs[0]["episode"], column(runs, "held_out"), **style)


def plot_noises(axis):
    """The noise of each rung at the start and half-way, with its 95 % interval."""
    names = [*RUNGS, "PPO, not whitened", "PPO, values 0, not whitened"]
    for x, name in enumerate(names):
        color = STYLES.get(name, STYLES["PPO"])["color"]
        style = dict(fmt="o", ms=7, capsize=3, color=color)
        at_start = name.replace(", values 0", "")
        plot_noise(axis, x - 0.12, at_start, "start", markerfacecolor=color, **style)
        plot_noise(axis, x + 0.12, name, "half-way", markerfacecolor="white", **style)
    style = dict(ms=7, color=draw.GRAY)
    axis.plot([], [], "o", label="at the start", **style)
    axis.plot([], [], "o", markerfacecolor="white", label="half-way", **style)
    axis.axhline(1, color=draw.GRAY, lw=0.8, ls=":")
    labels = [name.replace(", ", ",\n") for name in names]
    places = range(len(names))
    axis.set_xticks(places, labels, fontsize=6)
    axis.set_title("noise of the gradient, fixed prompts")
    axis.set_ylabel("noise, times that of RLOO")
    axis.set_yscale("log")
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    axis.set_yticks(ticks, map(str, ticks))
    axis.legend(frameon=False, loc="upper left", fontsize=7.5)


def plot_noise(axis, x: float, rung: str, weights: str, **style):
    low, middle, high = relative_noise(rung, weights)
    below = middle - low
    above = high - middle
    axis.errorbar(x, middle, [[below], [above]], **style)


EVALUATED = "--eval-every 4 --eval-reward exact_match"
BOTH = learning_runs("episodes") + learning_runs("prompts")
PARTS = {
    "learning": Part(BOTH, EVALUATED, SEEDS, to_curve),
    "gradients": Part(gradient_runs(), "--num-sample-generations 0", measure=gradient_rows),
}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
