"""Is it better? Runs of two or more methods with the same seeds, and whether their scores differ.

    python benchmark/compare.py rloo.py my_rloo.py --seeds 10 --total-episodes 4096
    python benchmark/compare.py rloo.py "rloo.py --rloo-k 8" --rates 5e-5 1e-4 2e-4

A method is a script with its own flags, as one text. Flags that are not below are of all runs. They
come after the methods. Each method is compared with the first one. Runs of the same seed have the
same prompts and the same random numbers, so it takes fewer seeds to see a difference. The program
prints how many seeds this saved.

The interval of a difference is over seeds of training, with these held-out questions and this
starting model, and over nothing else. An exact test decides, also where the interval says
otherwise: it flips the signs of the differences in all ways. With several comparisons, its p has
Holm's correction.

Choose the number of seeds before the first verdict. --folder remembers all verdicts, also those
with other flags or seeds. p is multiplied by the number of those beside the same first script. If
you edit a copy that has runs, give it a new name. Then its folder keeps the other runs, and all
verdicts count.

The same command again reads the runs that are finished, and goes on with those that were killed. If
this program is killed (kill -9), a run lives on, and the next start waits for it.

compare.json is {"comparisons": [..]}. Each entry has what was asked (`baseline`, which is the name
of the first script, `methods`, `flags`, `rates`, `seeds`, `metric`, `of`), the `commit` of this
repository, and the `versions` of the runs. Lists with an item for each method are `commands`,
`rate_scores` ({rate: scores in training}, only with --rates), and `scores`, `seconds` and `tokens`
of each seed. `found` has an item for each method but the first. `looks` is the number that
multiplied p, or 0 if there is no verdict.
"""

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import ChainMap
from dataclasses import dataclass
from math import ceil, log2
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import mean
from string import ascii_uppercase
from typing import Literal
from zlib import crc32

import draw
import numpy as np
import plot
import scipy
import tyro
from run import ROOT, SCRIPTS, column, find_original, git, having, read_run
from tqdm import tqdm

ALPHA = 0.05
RATE_SEEDS = (1001, 1002, 1003)  # none of those that compare methods
TRAINING = "objective/scores"


# ---- what scores say
def score(rows, metric, of):
    """Of a run's rows the last value of a metric (`end`), or the mean of all (`run`)."""
    values = [row[metric] for row in rows if metric in row]
    return values[-1] if of == "end" else mean(values)


def sign_flips(differences, most=2**16):
    """The two-sided p of differences [.., seeds]: how often their mean with random signs is as far
    from 0 as the one that was seen. It is exact if there are at most `most` ways to set signs."""
    return scipy.stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=most, axis=-1, rng=0
    ).pvalue


def holm(p_values):
    """Holm's correction: the smallest of n values is multiplied by n, the next one by n - 1, and so
    on. None gets smaller than the one before."""
    p_values = np.array(p_values)
    order = np.argsort(p_values)
    multiplied = p_values[order] * np.arange(len(p_values), 0, -1)
    p_values[order] = np.minimum(np.maximum.accumulate(multiplied), 1)
    return p_values.tolist()


def best_rate(scores):
    """The learning rate with the highest mean. scores: of each rate those of its runs"""
    return max(scores, key=lambda rate: mean(scores[rate]))


def visible(seeds, level):
    """The difference that has a p below this level with a chance of 80 %, in units of the standard
    deviation. It is found with 200 normal samples."""
    samples = np.random.default_rng(0).normal(size=(200, seeds))
    most = ceil(2**10 + 4 / level)  # The smallest p is 2 / most, or less.

    def too_rare(shift):
        return 0.8 - np.mean(sign_flips(samples + shift, most) < level)

    return scipy.optimize.bisect(too_rare, 0, 10, xtol=0.01)


def worth(one, other):
    """How many runs of each method with unlike seeds tell as much as these pairs."""
    unpaired = np.var(one, ddof=1) + np.var(other, ddof=1)
    return float(len(one) * unpaired / np.var(np.subtract(other, one), ddof=1))


def judge(table, looks=1):
    """What the scores of each method say beside those of the first one. table: [methods, seeds]"""
    first, *others = np.array(table)
    p_values = sign_flips(others - first)
    found = []
    for scores, alone, p in zip(others, p_values, holm(p_values)):
        differences = scores - first
        difference, band = map(float, draw.mean_and_band(differences))
        entry = dict(difference=difference, band=band)
        found.append(entry)
        if not differences.any():
            entry["verdict"] = "equal in all seeds: other lines did not run, or change no score"
            continue
        p = min(1, p * looks)
        entry |= dict(p=p, uncorrected_p=float(alone), worth=worth(first, scores))
        if p < ALPHA:
            entry["verdict"] = "better" if difference > 0 else "worse"
        else:
            level = ALPHA / len(others) / looks
            entry["visible"] = float(visible(len(first), level) * differences.std(ddof=1))
            entry["verdict"] = (
                f"no difference is seen; one of about {entry['visible']:.3f} would be, with a"
                " chance of 80 %"
            )
    return found


# ---- the runs
def warn_of_commits(script):
    """Print if a script is not as it was committed, or if a copy was made of one that has changed
    since. The verdict would be on these changes, too."""
    if Path(script).resolve() in [ROOT / f"{name}.py" for name in SCRIPTS]:
        if git("diff", "HEAD", "--", Path(script).name):
            print(f"warning: {script} is not as it was committed. Its changes are in the verdict.")
        return
    with tempfile.TemporaryDirectory() as folder:
        name, commit, _ = find_original(Path(script), Path(folder))
    if commit and git("diff", commit, "HEAD", "--", f"{name}.py"):
        print(
            f"warning: {script} was made of {name}.py of commit {commit}, which has changed since."
            f" Beside {name}.py, those changes are in the verdict, too. docs/variants.md says how"
            " a copy gets them."
        )


def flags_of(words):
    """The flags of a command by name, the last of two equal ones."""
    texts = shlex.join(words).split(" --")[1:]
    return dict(re.split("[ =]|$", text, maxsplit=1) for text in texts)


def runs_of(args, words, seeds):
    """Of each run of a method its folder and its command. The order of flags changes no folder."""
    flags = sorted(flags_of(words).items())
    name = f"{Path(words[0]).stem}_{crc32(repr((words[0], flags)).encode()):08x}"
    return {args.folder / name / str(seed): [*words, "--seed", str(seed)] for seed in seeds}


def is_finished(folder):
    return (folder / "model").exists()


def fault_of(args, folder, words):
    """Why a finished run cannot be compared, or None. It must have had the files that its command
    names, as they are now. A run that is not finished checks this itself."""
    for file in re.findall(r"([^=\n]+\.py)\b", "\n".join(words)):
        kept = folder / Path(file).name
        if kept.exists() and kept.read_bytes() != Path(file).read_bytes():
            return (
                f"{file} differs from its copy in {folder}. If you edited it, give it a new name:"
                " the other runs are kept. If an update did, name a new --folder"
            )
    if f'"{args.metric}"' not in (folder / "metrics.jsonl").read_text():
        return f"the metrics in {folder} have no {args.metric}"


def shares_of_gpus(count):
    """The variables of each of several runs side by side."""
    import torch  # This takes seconds, and --help does not need it.

    name = "CUDA_VISIBLE_DEVICES"
    gpus = os.environ.get(name) or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = gpus.split(",")
    return [{name: ",".join(gpus[place % len(gpus) :: count])} for place in range(count)]


def make_runs(args, runs):
    """Make those of the runs that are not finished. If one fails, no other one is started. runs: of
    each folder the command"""
    shares = shares_of_gpus(args.at_once)
    faults = []

    def make(folder):
        if faults:
            return
        folder.mkdir(parents=True, exist_ok=True)
        command = [*shlex.split(args.launch), *runs[folder], "--output-dir", folder, "--resume"]
        with open(folder / "log.txt", "a") as log:
            # The run has this lock, too, as it writes into the same open file. So a run that
            # outlives this program keeps it.
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tqdm.write(f"waiting for the run that writes into {log.name}")
                fcntl.flock(log, fcntl.LOCK_EX)
            log.truncate(0)
            share = shares.pop()
            status = subprocess.run(
                command, stdout=log, stderr=log, env=os.environ | share
            ).returncode
            shares.append(share)
        bar.update()
        if status:
            lines = (folder / "log.txt").read_text(errors="replace").splitlines()
            fault = "\n  ".join([f"status {status}: {shlex.join(runs[folder])}", *lines[-20:]])
        else:
            fault = fault_of(args, folder, runs[folder])
        if fault:
            faults.append(fault)
            tqdm.write(fault)

    def check():
        for folder in filter(is_finished, runs):
            fault = fault_of(args, folder, runs[folder])
            if fault:
                sys.exit(f"no verdict: {fault}")

    check()
    missing = [folder for folder in runs if not is_finished(folder)]
    missing.sort(key=lambda folder: int(folder.name))  # A seed's runs are made together.
    bar = tqdm(total=len(runs), initial=len(runs) - len(missing), unit="run")
    with bar, ThreadPool(args.at_once) as pool:
        pool.map(make, missing, chunksize=1)
    if faults:
        sys.exit("no verdict: a run failed. This command goes on where it stopped")
    check()


def choose_rate(args, name, words):
    """The learning rate with the best scores in training, and the scores of all: those of the last
    ten iterations, or with `--of run` of the whole run."""
    tried = {}
    for rate in args.rates:
        tried[rate] = runs_of(args, [*words, "--learning-rate", rate], RATE_SEEDS)
    make_runs(args, ChainMap(*tried.values()))
    scores = {}
    for rate, folders in tried.items():
        scores[rate] = []
        for folder in folders:
            rows = read_run(folder)["metrics"]
            values = [row[TRAINING] for row in rows if TRAINING in row]
            scores[rate].append(mean(values[-10:] if args.of == "end" else values))
    best = best_rate(scores)
    means = ", ".join(f"{rate}: {mean(scores[rate]):.3f}" for rate in scores)
    print(f"{name}: --learning-rate {best} is best, of {means}")
    in_order = sorted(scores, key=float)
    if len(in_order) > 2 and best in (in_order[0], in_order[-1]):
        print("  It is at the end of the list. Try further rates.")
    return best, scores


# ---- the report
def tokens(rows):
    """How many a run sampled in training."""
    lengths = [row.get("response_length_mean", 0) for row in rows]
    return float(np.diff(column(rows, "episode"), prepend=0) @ lengths)


def count_looks(args, asked):
    """The folder's other comparisons, and how many verdicts there are beside the same script, with
    this one. Ends the program if there are too few seeds for them."""
    file = args.folder / "compare.json"
    kept = json.loads(file.read_bytes()) if file.exists() else {}
    others = [each for each in kept.get("comparisons", []) if not asked.items() <= each.items()]
    looks = 1 + sum(each["looks"] > 0 for each in having(others, baseline=asked["baseline"]))
    comparisons = len(args.methods) - 1
    fewest = ceil(log2(2 * comparisons * looks / ALPHA))  # The smallest p of n seeds is 2 / 2^n.
    if args.seeds < fewest:
        sys.exit(
            f"no verdict: --seeds {args.seeds} is too few, and {fewest} is enough. Comparisons:"
            f" {comparisons}. Verdicts beside {asked['baseline']} in {args.folder}: {looks}, with"
            " this one"
        )
    return others, looks


def report(args, result):
    """Print the scores of each seed, costs, and what was found."""
    letters = ascii_uppercase[: len(args.methods)]
    for letter, name in zip(letters, args.methods):
        print(f"{letter}: {name}")
    scores = np.transpose(result["scores"])
    rows = dict(enumerate(scores, 1)) | dict(mean=scores.mean(0))
    print("".join(f"{word:>10}" for word in ("seed", *letters)))
    for name, row in rows.items():
        print(f"{name:>10}" + "".join(f"{value:10.4f}" for value in row))
    for name in ("seconds", "tokens"):
        print(f"{name:>10}" + "".join(f"{mean(values):10,.0f}" for values in result[name]))
    p = "p" if len(letters) == 2 else "Holm's p"
    for letter, entry in zip(letters[1:], result["found"]):
        text = f"{letter} - A: {entry['difference']:+.4f} ± {entry['band']:.4f}"
        if "p" in entry:
            text += f", {p} = {entry['p']:.2g}"
        print(f"{text}: {entry['verdict']}")
        if "p" in entry:
            print(f"  {args.seeds} pairs are worth {entry['worth']:.0f} with unlike seeds.")
            if (abs(entry["difference"]) > entry["band"]) != (entry["p"] < ALPHA):
                print("  The interval says otherwise. The exact test, which gives p, decides.")
    if result["looks"] > 1:
        about = f"{result['looks']} verdicts beside {result['baseline']} in {args.folder}"
        print(f"p is multiplied by the {about}, this one included.")


def draw_all(args, runs, scores):
    """Draw the curves, and the differences by seed."""
    figure, [[curves, differences]] = draw.panels(1, 2, width=3.6, height=3)
    for name, group, own in zip(args.methods, runs, scores):
        draw.curve(curves, *plot.points(group, args.metric, "episode"), marker=".", label=name)
        differences.plot(range(1, args.seeds + 1), np.subtract(own, scores[0]), ".")
    curves.set(title=args.metric, xlabel="episode")
    differences.set(title="difference from the first one", xlabel="seed")
    figure.legend(*curves.get_legend_handles_labels(), loc="outside lower center", frameon=False)
    draw.save(figure, args.folder / "compare.png")


@dataclass
class Args:
    methods: tyro.conf.Positional[tuple[str, ...]]
    """scripts, each with its own flags as one text"""
    seeds: int = 10
    """runs of each method, with the seeds 1, 2, ..."""
    metric: str = "eval/scores"
    """of metrics.jsonl; higher is better"""
    of: Literal["end", "run"] = "end"
    """the last value, or the mean over the run, which is higher if a method learns sooner"""
    rates: tuple[str, ...] = ()
    """learning rates: each method first gets the one with the best scores in training, over three
    other seeds; without them, the flags say it"""
    folder: Path = Path("runs/compare")
    """of all runs, of compare.json, which keeps all comparisons, and of compare.png"""
    launch: str = shlex.quote(sys.executable)
    """what starts a script, such as "accelerate launch" """
    at_once: int = 1
    """runs side by side, each with one thread of the CPU; they share out the GPUs"""


def main(args, flags):
    if len(args.methods) < 2:
        sys.exit("name two methods or more, before flags of their runs")
    commands = []
    for name in args.methods:
        script, *own = shlex.split(name)
        if not Path(script).is_file():
            sys.exit(f"there is no script {script}")
        commands.append([script, *flags, *own])
        is_mean = args.of == "run" and args.metric.startswith("eval/")
        if is_mean and "eval-every" not in flags_of(commands[-1]):
            sys.exit("--of run is the mean of all evaluations. It needs --eval-every")
    asked = dict(baseline=Path(commands[0][0]).name, methods=[*args.methods], flags=flags)
    asked |= dict(rates=[*args.rates], seeds=args.seeds, metric=args.metric, of=args.of)
    count_looks(args, asked)
    for script in dict.fromkeys(column(commands, 0)):
        warn_of_commits(script)
    rate_scores = []
    for name, words in zip(args.methods, commands):
        if args.rates:
            best, scores = choose_rate(args, name, words)
            words += ["--learning-rate", best]
            rate_scores.append(scores)
    folders = [runs_of(args, words, range(1, args.seeds + 1)) for words in commands]
    make_runs(args, ChainMap(*folders))
    groups = [[read_run(folder) for folder in group] for group in folders]
    runs = [column(group, "metrics") for group in groups]
    versions = {run["args"].get("versions") for group in groups for run in group}
    result = asked | dict(commands=commands, rate_scores=rate_scores)
    result |= dict(commit=git("describe", "--always", "--dirty"), versions=[*versions])
    result["scores"] = [[score(rows, args.metric, args.of) for rows in group] for group in runs]
    result["seconds"] = [[rows[-1]["seconds"] for rows in group] for group in runs]
    result["tokens"] = [[tokens(rows) for rows in group] for group in runs]
    others, looks = count_looks(args, asked)
    result["found"] = judge(result["scores"], looks)
    has_verdict = any("p" in entry for entry in result["found"])
    result["looks"] = looks if has_verdict else 0
    (args.folder / "compare.json").write_text(json.dumps(dict(comparisons=[*others, result])))
    report(args, result)
    draw_all(args, runs, result["scores"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
    except KeyboardInterrupt:
        sys.exit("\nstopped; this command goes on")
