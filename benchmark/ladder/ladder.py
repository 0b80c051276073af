"""REINFORCE, RLOO, GRPO and PPO on one task: how they learn, and how noisy their gradients are.

    python benchmark/ladder/ladder.py                              # everything, about 25 minutes on one core
    python benchmark/ladder/ladder.py --only learning --seeds 1 2  # these runs, the others are kept
    python benchmark/ladder/ladder.py --only gradients --sets 1    # these gradients, the others are kept
    python benchmark/ladder/ladder.py --page                       # no runs: figure, tables and code of docs/ladder.md

The scripts run as they are. REINFORCE is rloo.py with reinforce.patch, in a temporary folder. All rungs have the flags
COMMON: no KL, one update for each batch, and the same constant learning rate. So only the estimator differs.

Learning: ten seeds with 4,096 episodes each.

Gradients: a run with learning rate 0 never changes its weights, so each step is one more estimate of the same gradient.
The dataset of such a run has just one batch. Each iteration samples it anew. This is done at the start, and with the
weights of a PPO run after half of its episodes. Each of the five sets has other prompts: 16, with four completions
each. ppo.py samples a prompt once, so its dataset has each prompt four times. The rows "fresh" have other prompts in
each repetition, as a training run has.

Writes ladder.json, a row for each run or gradient, and ladder.png, and changes docs/ladder.md between its marks.
"""

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw  # noqa: E402
from run import BENCHMARK, DEFAULTS, ROOT, read_rows, run, run_all, run_forked, write_lines  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULT = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs/ladder.md"
PATCH = HERE / "reinforce.patch"

SEEDS = tuple(range(1, 11))
SETS = (1, 2, 3, 4, 5)
BATCH = 64  # episodes, the default of all scripts
GROUP = 4  # completions of a prompt, the default of rloo.py and grpo.py
EVERY = 4  # iterations from one evaluation to the next
COMMON = "--kl-coef 0 --num-ppo-epochs 1 --learning-rate 1e-4 --lr-scheduler-type constant"


class Rung(NamedTuple):
    name: str
    script: str  # `reinforce` is rloo.py with the patch
    flags: str  # beside COMMON; a flag that is given twice has its last value
    learns: bool  # whether it is trained with all seeds, or only its gradient is measured


RUNGS = [
    Rung("REINFORCE", "reinforce", "", True),
    Rung("RLOO", "rloo", "", True),
    Rung("GRPO", "grpo", "", True),
    Rung("PPO", "ppo", "", True),
]
SHIFTED = "--reward benchmark/ladder/shifted.py:"
OTHERS = [
    Rung("REINFORCE, scores + 1", "reinforce", f"{SHIFTED}plus_one", True),
    Rung("REINFORCE, scores - 1", "reinforce", f"{SHIFTED}minus_one", False),
    Rung("GRPO, no deviation", "grpo", "--scale-rewards none", False),
    Rung("GRPO, no deviation, no lengths", "grpo", "--scale-rewards none --loss-type dr_grpo", False),
    Rung("PPO, lambda 1", "ppo", "--lam 1", False),
    Rung("PPO, not whitened", "ppo", "--no-whiten-advantages", False),
    Rung("PPO, lambda 1, not whitened", "ppo", "--lam 1 --no-whiten-advantages", False),
    Rung("PPO, its own defaults", "ppo", "--num-ppo-epochs 2 --learning-rate 5e-5 --lr-scheduler-type linear", True),
]
LEARNING = [rung for rung in RUNGS + OTHERS if rung.learns]
GRADIENTS = [rung for rung in RUNGS + OTHERS if "--num-ppo-epochs" not in rung.flags]  # the defaults: PPO's gradient
REFERENCE = "RLOO"  # with its mean gradient the others are compared


# ================================================== the runs =================================================
def patched_scripts(folder: Path) -> dict[str, str]:
    """The path of each script. `reinforce` is a patched copy in this folder, with what its defaults need beside it."""
    shutil.copy(ROOT / "rloo.py", folder)
    subprocess.run(["git", "apply", str(PATCH)], cwd=folder, check=True)
    (folder / "rloo.py").rename(folder / "reinforce.py")
    if not (folder / "benchmark").exists():
        (folder / "benchmark").symlink_to(BENCHMARK)
    paths = {name: str(ROOT / f"{name}.py") for name in ("rloo", "grpo", "ppo")}
    return paths | {"reinforce": str(folder / "reinforce.py")}


def learning_rows(seeds: list[int], episodes: int) -> list[dict]:
    """Train each rung with each seed -> a row for each run."""
    jobs = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = patched_scripts(Path(folder))
        for seed in seeds:
            for rung in LEARNING:
                flags = f"--seed {seed} --total-episodes {episodes} --eval-every {EVERY} --eval-reward exact_match"
                jobs[paths[rung.script], f"{flags} --num-sample-generations 0 {COMMON} {rung.flags}".strip()] = rung
        return run_all(list(jobs), lambda job, result: to_curve(jobs[job], job[1], result))


def shift(rung: Rung) -> int:
    """What the reward of this rung adds to every score."""
    return ("plus_one" in rung.flags) - ("minus_one" in rung.flags)


def to_curve(rung: Rung, flags: str, result: dict) -> dict:
    """What is kept of a training run: its evaluations, and the right answers that it sampled at the end."""
    evaluations = [row for row in result["metrics"] if "eval/scores" in row]
    sampled = np.mean([row["objective/scores"] for row in result["metrics"][1:][-10:]]) - shift(rung)
    return {
        "measured": "learning",
        "rung": rung.name,
        "seed": result["args"]["seed"],
        "flags": flags.split("generations 0 ")[1],
        "episode": [row["episode"] for row in evaluations],
        "held_out": [round(row["eval/scores"], 4) for row in evaluations],
        "sampled": round(float(sampled), 4),
    }


# ================================================ the gradients ==============================================
def write_datasets(folder: Path, name: str, positions: list[int]) -> dict[bool, str]:
    """The same prompts for scripts with groups (True), and for ppo.py (False): there each prompt stands four times."""
    rows = read_rows(BENCHMARK / "default/train.jsonl")
    paths = {}
    for has_groups in (True, False):
        paths[has_groups] = str(folder / f"{name}_{has_groups}.jsonl")
        with open(paths[has_groups], "w") as file:
            for position in positions:
                file.write((json.dumps(rows[position]) + "\n") * (1 if has_groups else GROUP))
    return paths


def record_gradients(job: tuple[str, str, str]) -> float:
    """Run a script in this process, and write the gradient of each step as a row of a .npy file -> the mean score."""
    script, flags, path = job
    torch = importlib.import_module("torch")
    gradients = []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            parameters = self.param_groups[0]["params"]
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]).numpy())
            return super().step(closure)

    torch.optim.AdamW = Recorder
    metrics = run_forked((script, flags))["metrics"]
    np.save(path, np.stack(gradients))
    return float(np.mean([row["objective/scores"] for row in metrics]))


def moments(products: np.ndarray) -> tuple[float, float]:
    """Of gradients whose inner products are [n, n]: the squared length of their true mean, and their variance.

    Both are unbiased. The variance is the sum over all weights. The products of two different gradients have the
    squared length of the true mean as their mean.
    """
    n = len(products)
    squared_length = (products.sum() - np.trace(products)) / n / (n - 1)
    return squared_length, np.trace(products) / n - squared_length


def gradient_rows(sets: list, repetitions: int, episodes: int) -> list[dict]:
    """Measure the gradients of each rung at the start and half-way, for some sets of prompts -> a row for each."""
    os.chdir(ROOT)
    os.environ |= DEFAULTS
    for library in ("accelerate", "transformers.models.llama.modeling_llama", "torch.utils.checkpoint"):
        importlib.import_module(library)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = patched_scripts(folder)
        half = folder / "half_way"  # the schedule is constant, so this is the first half of a run of all episodes
        run("ppo", f"--seed 1 --total-episodes {episodes // 2} --num-sample-generations 0 {COMMON}", half)
        models = {
            "start": {"ppo": ""},
            "half-way": {"ppo": f"--model-path {half / 'model'} --value-model-path {half / 'value_model'}"},
        }
        for weights, model_flags in models.items():
            policy = model_flags["ppo"].split("--value")[0]
            for prompts in sets:
                positions, epochs = draw_positions(prompts, repetitions)
                datasets = write_datasets(folder, f"{weights}_{prompts}", positions)
                jobs = []
                for number, rung in enumerate(GRADIENTS):
                    data = f"--dataset {datasets[rung.script != 'ppo']} --num-train-epochs {epochs}"
                    still = "--learning-rate 0 --max-grad-norm inf --num-sample-generations 0"
                    model = model_flags.get(rung.script, policy)
                    flags = f"{COMMON} {rung.flags} {data} {still} {model}".strip()
                    jobs.append((paths[rung.script], flags, str(folder / f"{number}.npy")))
                rows += compare(jobs, weights, prompts)
    return rows


def draw_positions(prompts: int | str, repetitions: int) -> tuple[list[int], int]:
    """Positions of prompts in train.jsonl, and the passes over them that make so many repetitions.

    A set has the prompts of one batch. `fresh` has the prompts of all batches, drawn independently.
    """
    count = BATCH // GROUP
    if prompts == "fresh":
        return np.random.default_rng(0).integers(2048, size=count * repetitions).tolist(), 1
    return np.random.default_rng(prompts).permutation(2048)[:count].tolist(), repetitions


def compare(jobs: list[tuple], weights: str, prompts: int | str) -> list[dict]:
    """Run the jobs of GRADIENTS -> a row for each: variance, squared mean, and product with the reference's mean."""
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        scores = {}
        for rung, score in zip(GRADIENTS, pool.imap(record_gradients, jobs, chunksize=1)):
            scores[rung.name] = score - shift(rung)
            print(f"{weights}, prompts {prompts}: {rung.name}: done", file=sys.stderr, flush=True)
    files = {rung.name: path for rung, (_, _, path) in zip(GRADIENTS, jobs)}
    reference = np.load(files[REFERENCE]).astype(np.float64)
    rows = []
    for rung in GRADIENTS:
        # The policy's weights come first. ppo.py has those of its value model after them.
        gradients = np.load(files[rung.name], mmap_mode="r")[:, : reference.shape[1]].astype(np.float64)
        squared_length, variance = moments(gradients @ gradients.T)
        row = {"measured": "gradient", "rung": rung.name, "weights": weights, "prompts": prompts}
        row |= {"repetitions": len(gradients), "variance": variance, "squared_mean": squared_length}
        row["score"] = scores[rung.name]
        # Products of two gradients from the same repetition are left out: they may come from the same completions.
        rows.append(row | {"product": moments(gradients @ reference.T)[0]})
    return rows


def summary(rows: list[dict], rung: str, weights: str, fresh: bool = False) -> dict:
    """The means over the sets of prompts, the noise, the noise divided by that of RLOO, and the cosine with RLOO.

    Noise is variance / squared mean. Sets have very different prompts. So a rung is compared with RLOO in each set, and
    `relative` is the geometric mean of the sets' quotients, with its 95 % interval (Student's t, of the logarithms).
    The band of the cosine comes from leaving out one set at a time (the jackknife).
    """
    some, reference = (gradients_of(rows, name, weights, fresh) for name in (rung, REFERENCE))
    found = {name: np.mean([row[name] for row in some]) for name in ("variance", "squared_mean")}
    found["noise"] = found["variance"] / found["squared_mean"]
    quotients = np.array([noise(row) / noise(other) for row, other in zip(some, reference)])
    middle, band = draw.mean_and_band(np.log(quotients))
    found |= {"relative": np.exp(middle), "relative_low": np.exp(middle - band), "relative_high": np.exp(middle + band)}
    numbers = range(len(some))
    found["cosine"] = cosine(some, reference)
    without_one = []
    for left_out in numbers:
        kept = [number for number in numbers if number != left_out]
        without_one.append(cosine([some[i] for i in kept], [reference[i] for i in kept]) if kept else found["cosine"])
    error = np.sqrt((len(some) - 1) * np.var(without_one))
    return found | {"cosine_band": draw.T975.get(len(some), 1.96) * error}


def gradients_of(rows: list[dict], rung: str, weights: str, fresh: bool) -> list[dict]:
    """The rows of a rung's gradients, set by set."""
    chosen = [row for row in rows if (row["measured"], row["rung"]) == ("gradient", rung) and row["weights"] == weights]
    return sorted((row for row in chosen if (row["prompts"] == "fresh") == fresh), key=lambda row: row["prompts"])


def noise(row: dict) -> float:
    return row["variance"] / row["squared_mean"]


def cosine(some: list[dict], reference: list[dict]) -> float:
    """The cosine of two mean gradients, over all sets together."""
    squares = [sum(row["squared_mean"] for row in rows) for rows in (some, reference)]
    return sum(row["product"] for row in some) / np.sqrt(squares[0] * squares[1])


# ================================================== the figure ===============================================
STYLES = {
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
    learning.set(title="right answers, held-out prompts, ten seeds", ylim=(0, 1.02))
    draw.in_thousands(learning)
    learning.legend(frameon=False, loc="lower right", fontsize=7.5)
    names = [*(rung.name for rung in RUNGS), "REINFORCE, scores + 1", "PPO, not whitened"]
    for x, name in enumerate(names):
        for offset, weights, inside in ((-0.12, "start", True), (0.12, "half-way", False)):
            found = summary(rows, name, weights)
            color = STYLES.get(name, STYLES["PPO"])["color"]
            style = dict(fmt="o", ms=7, capsize=3, color=color, markerfacecolor=color if inside else "white")
            band = [[found["relative"] - found["relative_low"]], [found["relative_high"] - found["relative"]]]
            noises.errorbar(x + offset, found["relative"], band, **style)
    noises.plot([], [], "o", ms=7, color=draw.GRAY, label="at the start")
    noises.plot([], [], "o", ms=7, color=draw.GRAY, markerfacecolor="white", label="half-way")
    noises.axhline(1, color=draw.GRAY, lw=0.8, ls=":")
    noises.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=7)
    noises.set(title="noise of the gradient, times that of RLOO", yscale="log")
    noises.set_yticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
    noises.legend(frameon=False, loc="upper left", fontsize=7.5)
    draw.save(figure, RESULT.with_suffix(".png"))


# =================================================== the page ================================================
FUNCTIONS = {  # what the page shows of each script, beside stages 4b to 4d
    "reinforce": ("reinforce_advantages", "reinforce_loss"),
    "rloo": ("rloo_advantages", "rloo_loss", "clipped_policy_loss"),
    "grpo": ("grpo_advantages", "token_weights", "grpo_loss"),
    "ppo": ("gae", "whiten", "ppo_loss"),
}
FIRST_LINE, LAST_LINE = "        # ---- 4b  ", "        # ---- 4e  "  # of main; the last one is not shown
# The page leaves out what stands under these conditions. They are false in the runs of the four rungs.
FALSE_HERE = {
    "reference is not None",
    "given.ref_logprobs is not None",
    "args.cliprange_high is not None",
    "args.importance_sampling_level == 'sequence'",
    "args.loss_type == 'cispo'",
    "args.loss_type in ('dapo', 'cispo')",
    "scale_rewards == 'batch'",
    "args.whiten_rewards",
    "updates_have_ended(args, updates)",
}
FALSE_IN_RLOO = {"args.whiten_advantages"}  # in PPO it is true


def left_out_lines(script: str, source: str) -> set[int]:
    """The numbers of the lines that the page leaves out, of the conditions and of what stands under them."""
    conditions = FALSE_HERE | (FALSE_IN_RLOO if script == "rloo" else set())
    numbers = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test) in conditions:
            numbers |= set(range(node.lineno, node.body[-1].end_lineno + 1))
    return numbers


def cut(script: str, source: str) -> dict[str, list[str]]:
    """The parts that the page shows: each function by its name, and `4b to 4d`. `# ...` is where lines are left out."""
    lines = source.splitlines()
    left_out = left_out_lines(script, source)
    spans = {}
    for node in ast.parse(source).body:
        if getattr(node, "name", None) in FUNCTIONS[script]:
            spans[node.name] = (node.lineno, node.end_lineno)
    parts = {name: spans[name] for name in FUNCTIONS[script]}
    first, last = (next(i for i, line in enumerate(lines, 1) if line.startswith(s)) for s in (FIRST_LINE, LAST_LINE))
    parts["4b to 4d"] = (first, last - 2)
    return {name: shorten(lines, start, end, left_out) for name, (start, end) in parts.items()}


def shorten(lines: list[str], start: int, end: int, left_out: set[int]) -> list[str]:
    """The lines start .. end, which count from 1, with `# ...` in place of each block that is left out."""
    shown = []
    for number in range(start, end + 1):
        line = lines[number - 1]
        if number not in left_out:
            shown.append(line)
        elif number - 1 not in left_out:
            indent = len(line) - len(line.lstrip())
            shown.append(" " * indent + "# ...")
    return shown


def code_of(lines: list[str]) -> list[str]:
    """For each line its code without indentation and comment, or "" for a comment, a docstring or an empty line."""
    text = re.sub(r'"""[\s\S]*?"""', lambda found: "\n" * found[0].count("\n"), "\n".join(lines))
    return [re.sub(r"(^|\s+)#.*$", "", line).strip() for line in text.split("\n")]


def sources() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        paths = patched_scripts(Path(folder))
        return {name: Path(paths[name]).read_text(encoding="utf-8") for name in FUNCTIONS}


def excerpts() -> dict[str, dict]:
    """Of each script the parts, and for each part of which lines the code is new: no rung below has it."""
    known, found = set(), {}
    for script, source in sources().items():
        parts = cut(script, source)
        new = {name: [bool(code) and code not in known for code in code_of(lines)] for name, lines in parts.items()}
        found[script] = {"parts": parts, "new": new}
        known |= {code for lines in parts.values() for code in code_of(lines)}
    return found


def new_lines(excerpt: dict) -> int:
    return sum(map(sum, excerpt["new"].values()))


def blocks(script: str, excerpt: dict) -> dict[str, str]:
    """What the page shows of a script, by the names of its marks."""
    functions = "\n\n\n".join("\n".join(excerpt["parts"][name]) for name in FUNCTIONS[script])
    loop = []
    for line, is_new in zip(excerpt["parts"]["4b to 4d"], excerpt["new"]["4b to 4d"]):
        line = line.removeprefix("        ")
        loop.append(f"{'+' if is_new and script != 'reinforce' else ' '} {line}".rstrip())
    title = "Stages 4b to 4d"
    if script != "reinforce":
        count = sum(excerpt["new"]["4b to 4d"])
        title += f": {count} lines have a +, because no rung below has them"
    code = "\n".join(loop)
    folded = f"<details>\n<summary>{title}</summary>\n\n```diff\n{code}\n```\n\n</details>"
    return {f"{script} functions": f"```python\n{functions}\n```", f"{script} loop": folded}


def learning_table(rows: list[dict]) -> str:
    lines = ["| | held-out, half-way | held-out, end | sampled, last ten iterations |", "|---|---|---|---|"]
    for rung in LEARNING:
        runs = [row for row in rows if row["measured"] == "learning" and row["rung"] == rung.name]
        half = len(runs[0]["held_out"]) // 2
        columns = [[row["held_out"][half] for row in runs], [row["held_out"][-1] for row in runs]]
        columns.append([row["sampled"] for row in runs])
        cells = ["{:.3f} +- {:.3f}".format(*draw.mean_and_band(column)) for column in columns]
        lines.append(f"| {rung.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def digits(number: float) -> str:
    """Three digits, without an exponent where that is readable."""
    return f"{number:.3g}" if 1e-3 <= abs(number) < 1e3 else f"{number:.2e}"


def gradient_table(rows: list[dict], weights: str) -> str:
    head = (
        "variance | squared length of the mean | noise | noise, times RLOO's | cosine with RLOO | noise, fresh prompts"
    )
    lines = [f"| {weights} | {head} |", "|---|---|---|---|---|---|---|"]
    for rung in GRADIENTS:
        found, fresh = summary(rows, rung.name, weights), summary(rows, rung.name, weights, fresh=True)
        cells = [digits(found[name]) for name in ("variance", "squared_mean", "noise")]
        cells.append("{relative:.2f} ({relative_low:.2f} to {relative_high:.2f})".format(**found))
        cells.append("{cosine:.3f} +- {cosine_band:.3f}".format(**found))
        lines.append(f"| {rung.name} | {' | '.join(cells)} | {digits(fresh['noise'])} |")
    return "\n".join(lines)


def constant_baselines(rows: list[dict], weights: str) -> dict[str, float]:
    """The variance with a constant baseline b is a parabola in b. Three points of it were measured: b = -1, 0 and 1."""
    names = {-1: "REINFORCE, scores + 1", 0: "REINFORCE", 1: "REINFORCE, scores - 1"}
    variance = {b: summary(rows, name, weights)["variance"] for b, name in names.items()}
    slope = (variance[1] - variance[-1]) / 2
    bend = (variance[1] + variance[-1]) / 2 - variance[0]
    best = -slope / bend / 2
    of_weights = [row for row in rows if row.get("weights") == weights and row["prompts"] != "fresh"]
    return {
        "mean score of the episodes": np.mean([row["score"] for row in of_weights]),
        "best constant baseline": best,
        "variance with the best constant baseline": variance[0] + slope * best + bend * best**2,
        "variance with the baseline 0 (REINFORCE)": variance[0],
        "variance with the baseline 1": variance[1],
        "variance with RLOO's baseline": summary(rows, "RLOO", weights)["variance"],
    }


def baseline_table(rows: list[dict]) -> str:
    start, half = (constant_baselines(rows, weights) for weights in ("start", "half-way"))
    lines = ["| | at the start | half-way |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {digits(start[name])} | {digits(half[name])} |" for name in start])


def fill_in(text: str, rows: list[dict]) -> str:
    """The page, with the tables of these rows and the code of the scripts between its marks."""
    filled = {
        "learning": learning_table(rows),
        "gradients start": gradient_table(rows, "start"),
        "gradients half-way": gradient_table(rows, "half-way"),
        "baselines": baseline_table(rows),
    }
    for script, excerpt in excerpts().items():
        filled |= blocks(script, excerpt)
    for name, block in filled.items():
        start, end = f"<!-- {name} -->\n", "\n<!-- end -->"
        before, rest = text.split(start)
        text = before + start + block + rest[rest.index(end) :]
    return text


# ==================================================== main ===================================================
def identity(row: dict) -> tuple:
    return row["measured"], row["rung"], str(row.get("seed")), row.get("weights", ""), str(row.get("prompts"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["learning", "gradients"])
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--sets", nargs="*", default=[*SETS, "fresh"], help="numbers, or `fresh`")
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=64)
    args = parser.parse_args()
    new = []
    if not args.page and args.only != "gradients":
        new += learning_rows(args.seeds, args.episodes)
    if not args.page and args.only != "learning":
        sets = [prompts if prompts == "fresh" else int(prompts) for prompts in args.sets]
        new += gradient_rows(sets, args.repetitions, args.episodes)
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else []
    rows = {identity(row): row for row in kept} | {identity(row): row for row in new}
    rows = [rows[key] for key in sorted(rows)]
    write_lines(RESULT, rows)
    plot(rows)
    PAGE.write_text(fill_in(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
