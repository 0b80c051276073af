"""The controls of docs/claims.md on the built-in task: what a claim about a method needs beside its
own runs.

    python benchmark/claims/claims.py                      # all of them
    python benchmark/claims/claims.py coin passes          # only these, the others are kept

At the end of the file stand the table, the numbers of sentences, and the figure.
"""

import importlib
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import (
    BENCHMARK,
    DEFAULTS,
    POLICY,
    ROOT,
    SCRIPTS,
    Part,
    column,
    complete,
    grouped,
    having,
    main,
    read_result,
    read_rows,
    run_all,
    write_rows,
)
from tables import with_band

RESULT = Path(__file__).with_suffix(".json")
REWARDS = "benchmark/claims/claims.py"
COMMON = "--num-sample-generations 0 --kl-coef 0"
SHORT = f"{COMMON} --total-episodes 4096"
SAMPLED = "--eval-temperature 1 --eval-k 16"  # an evaluation of samples
SEEDS = range(1, 6)
OTHER_SEEDS = range(4, 14)  # none of those that chose a learning rate
COIN = 0.26  # the share of right samples before training
SAMPLES = 32  # of each question, for pass@k
TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
SMOLLM2_TEMPERATURES = (0.1, 0.3, 0.6, 1.0)
SMOLLM2_SAMPLES = {"train": 4, "eval": 8}  # of each of 140 and 60 questions
TASKS = {  # of reasoning-gym, with their settings
    "chain_sum": "--max-terms 2 --max-digits 1",
    "products": "--max-digits 1",
    "spell_backward": "--max-word-len 3",
}
RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
FILTERED = "rloo reinforce.patch"  # With scores 0 and 1 wrong answers have no loss.
METHODS = {  # script and flags
    "RLOO": ("rloo", ""),
    "GRPO": ("grpo", ""),
    "PPO": ("ppo", ""),
    "filtered": (FILTERED, ""),
    "filtered, k = 1": (FILTERED, "--rloo-k 1"),
}
STARTS = (2, 3)  # seeds of other starting policies; that of the built-in one is 1
UNSEEN = 11  # of the 55 pairs of last digits, those that training does not show
TOSSES = np.random.default_rng(0)  # A hash of the text would be no coin: it could be learned.


def coin(completions, **_) -> list[float]:
    """1 with the probability COIN, whatever the answer is. For runs on one process that are not
    resumed."""
    return (TOSSES.random(len(completions)) < COIN).astype(float).tolist()


def digits(completions, **_) -> list[float]:
    """The format alone: 1 for any number without spaces around it."""
    return [float(completion.isdigit()) for completion in completions]


def exactly(completions, answer, **_) -> list[float]:
    """1 for the right answer in the right format. `exact_match` takes answers with spaces, too."""
    return [float(completion == right) for completion, right in zip(completions, answer)]


def rounded(values) -> float:
    """The mean of some numbers."""
    return round(float(np.mean(values)), 4)


# ---- a coin, and a format


def ends(result: dict) -> dict:
    """The held-out score before and after, and that of the best sample of each question."""
    first, *_, last = result["evaluations"]
    kept = dict(scores=[], best_of_k=[])
    for row in (first, last):
        kept["scores"].append(round(row["eval/scores"], 4))
        best = row[f"eval/best_of_{result['args']['eval_k']}"]
        kept["best_of_k"].append(round(best, 4))
    return kept


def coin_ends(result: dict) -> dict:
    """`ends`, and how sure the policy is: the entropy of a token, and the share of the most
    frequent answer."""
    entropy = column(result["metrics"][1:], "policy/entropy_avg")
    shares = []
    for rows in grouped(result["eval_rollouts"], "iteration").values():
        most = []
        for some in grouped(rows, "prompt").values():
            [(_, count)] = Counter(column(some, "completion")).most_common(1)
            most.append(count / len(some))
        shares.append(rounded(most))
    kept = ends(result)
    kept["entropy"] = [rounded(entropy[0]), rounded(entropy[-10:])]
    kept["mode"] = [shares[0], shares[-1]]
    return kept


UPDATES = {  # The clip cannot act, it acts, and it is off.
    "1": "",
    "4": "--num-mini-batches 4",
    "4, no clip": "--num-mini-batches 4 --cliprange 1000",
}
COINS = []
for script in ("rloo", "grpo"):
    names = dict(reward="exact_match", updates="1")
    COINS.append((names, script, "--reward exact_match"))
    for updates, own in UPDATES.items():
        names = dict(reward="coin", updates=updates)
        COINS.append((names, script, f"--reward {REWARDS}:coin {own}"))

FORMS = []
for reward, judge in product(("digits", "exactly"), ("exact_match", "exactly")):
    path = {"exact_match": judge, "exactly": f"{REWARDS}:exactly"}[judge]
    flags = f"--reward {REWARDS}:{reward} --eval-reward {path}"
    FORMS.append((dict(reward=reward, judge=judge), "rloo", flags))


# ---- new answers, or more frequent ones


def samplings(prompts: tuple, temperatures: tuple, flags: str, **settings) -> Part:
    """Runs that only sample, at each temperature. PROMPTS in the flags is `train` or `eval`."""
    runs = []
    for name, temperature in product(prompts, temperatures):
        own = f"{flags.replace('PROMPTS', name)} --temperature {temperature}"
        runs.append((dict(temperature=temperature, prompts=name), "rloo", own))
    return Part(runs, **settings)


# Their learning rate is 0.
SAMPLE = f"{COMMON} --model-path {POLICY} --response-length 8 --learning-rate 0 --save-rollouts"
SAMPLE += f" --rloo-k {SAMPLES} --dataset benchmark/default/PROMPTS.jsonl"
SAMPLE += f" --batch-size {256 * SAMPLES} --total-episodes {256 * SAMPLES}"
SAMPLE += " --per-device-train-batch-size 1024"
BRIEF = "--total-episodes 128"
PASSES_OF_START = samplings(("eval", "train"), TEMPERATURES, SAMPLE, short=BRIEF)
PASSES_OF_TRAINED = samplings(("eval",), (1.0,), SAMPLE, short=BRIEF)


def run_passes(of_start: Part, of_trained: Part, jobs: dict, smoke: bool) -> list[dict]:
    """Train, and then sample from the starting policy and from what was trained: how many answers
    to each question are right."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for job in jobs:
            paths[job] = f"{folder}/{len(paths)}"
        run_all([(*job, path) for job, path in paths.items()])
        sampled = {}
        for job, names in of_start.jobs(smoke).items():
            sampled[job] = names | dict(model="start", seed=0)
        trained = product(of_trained.jobs(smoke).items(), paths.items())
        for ((script, flags), names), (job, path) in trained:
            model = dict(model=jobs[job]["script"], seed=jobs[job]["seed"])
            sampled[script, f"{flags} --model-path {path}/model"] = names | model
        return run_all(list(sampled), lambda job, result: sampled[job] | right_answers(result))


def right_answers(result: dict) -> dict:
    """The right samples of each question: those of the first evaluation, or else of training."""
    counts = Counter()
    first = having(result["eval_rollouts"], iteration=0)
    for row in first or result["rollouts"]:
        counts[row["prompt"]] += int(row["score"])
    return dict(right=[right for _, right in sorted(counts.items())])


# ---- other methods, rates, starting policies and prompts


def of_methods(rates: Callable, flags: str = "", **names) -> list[tuple]:
    """The runs of each method at rates(method)."""
    runs = []
    for method, (script, own) in METHODS.items():
        for rate in rates(method):
            run_flags = f"{flags} --learning-rate {rate} {own}"
            runs.append((dict(method=method, rate=rate) | names, script, run_flags))
    return runs


def end_of_training(result: dict) -> dict:
    """The score of training, over the last ten iterations."""
    return dict(score=rounded(column(result["metrics"][1:][-10:], "objective/scores")))


def best_rate(method: str) -> list[float]:
    """The rate with the highest mean score in training."""
    scores = Counter()
    for row in having(read_result(RESULT)["rows"], part="rates", method=method):
        scores[row["rate"]] += row["score"]
    return [max(RATES, key=lambda rate: scores[rate])]


def right_in_the_end(result: dict) -> dict:
    return dict(right=round(result["evaluations"][-1]["eval/scores"], 4))


def choose_rates():
    """Take the rates that the file has now: the same command may have measured them. Other
    starting policies have their own right facts, prompts and held-out prompts."""
    PARTS["methods"].runs = of_methods(best_rate)
    PARTS["starts"].runs = []
    for start in STARTS:
        folder = f"runs/start_{start}"
        flags = f"--model-path {folder}/policy --response-length 8 --dataset {folder}/train.jsonl"
        flags += f" --eval-dataset {folder}/eval.jsonl"
        PARTS["starts"].runs += of_methods(best_rate, flags, start=start)


def make_starts():
    """Make the starting policies by the program that made the built-in one, all at once."""
    choose_rates()
    makers = []
    for start in STARTS:
        command = [sys.executable, BENCHMARK / "default/make.py", "--only-policy"]
        command += ["--seed", str(start), "--folder", ROOT / f"runs/start_{start}"]
        makers.append(subprocess.Popen(command, env=os.environ | DEFAULTS))
    codes = [maker.wait() for maker in makers]
    if any(codes):
        raise SystemExit("default/make.py failed")


def last_digits(prompt: str) -> tuple[str, ...]:
    """The last digits of both numbers of a sum, the smaller one first."""
    return tuple(sorted(number[-1] for number in prompt.rstrip("=").split("+")))


def unseen_pairs(seed: int) -> set[tuple]:
    """The pairs of last digits that training with this seed does not show."""
    pairs = [(str(a), str(b)) for a in range(10) for b in range(a, 10)]
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:UNSEEN]
    return {pairs[i] for i in chosen}


def write_pairs(seed: int, folder: Path):
    """The prompts of training without some pairs. All prompts with these pairs are held out."""
    unseen = unseen_pairs(seed)
    seen = []
    held_out = read_rows(BENCHMARK / "default/eval.jsonl")
    for row in read_rows(BENCHMARK / "default/train.jsonl"):
        if last_digits(row["prompt"]) in unseen:
            held_out.append(row)
        else:
            seen.append(row)
    write_rows(folder / f"{seed}_train.jsonl", seen)
    write_rows(folder / f"{seed}_eval.jsonl", held_out)


def run_pairs(jobs: dict[tuple, dict], smoke: bool) -> list[dict]:
    """Train without some pairs: the right answers to held-out sums with seen pairs, and to all with
    unseen pairs."""

    def finish(job, result):
        unseen = unseen_pairs(named[job]["seed"])
        last = result["evaluations"][-1]["iteration"]
        scores = {}
        for time, iteration in (("before", 0), ("after", last)):
            for row in having(result["eval_rollouts"], iteration=iteration):
                kind = "seen"
                if last_digits(row["prompt"]) in unseen:
                    kind = "unseen"
                scores.setdefault(f"{kind}_{time}", []).append(row["score"])
        return named[job] | {name: rounded(scores[name]) for name in sorted(scores)}

    named = {}
    with tempfile.TemporaryDirectory() as folder:
        for (script, flags), names in jobs.items():
            write_pairs(names["seed"], Path(folder))
            own = flags.replace("PAIRS", f"{folder}/{names['seed']}")
            named[script, own] = names
        return run_all(list(named), finish)


def run_gold(_, smoke: bool) -> list[dict]:
    """Fine-tune the starting policy on right answers at each rate, and then at the one with the
    best training score."""
    if smoke:
        return [fine_tune(RATES[0], 1, steps=2)]
    rows = [fine_tune(rate, seed) for rate, seed in product(RATES, range(1, 4))]
    best = max(RATES, key=lambda rate: sum(column(having(rows, rate=rate), "on_training")))
    return rows + [fine_tune(best, seed) for seed in OTHER_SEEDS]


def fine_tune(rate: float, seed: int, steps: int = 64) -> dict:
    """Fine-tune on 64 right answers in each step, without sampling or reward: the share of right
    answers, greedily."""
    make = importlib.import_module("default.make")
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(POLICY)
    policy = transformers.AutoModelForCausalLM.from_pretrained(POLICY)
    train = read_rows(BENCHMARK / "default/train.jsonl")
    held_out = read_rows(BENCHMARK / "default/eval.jsonl")
    sums = np.array([row["prompt"].rstrip("=").split("+") for row in train], int)
    losses = make.losses_on_answers(policy, sums, steps, np.random.default_rng(seed), batch_size=64)
    make.fit(policy, losses, steps, lr=rate, warmup=1)

    def right(rows):
        prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
        tokens = complete(
            policy.eval(), tokenizer, prompts, np.zeros((len(rows), 8)), temperature=0.0
        )
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return float(np.mean(np.equal(texts, column(rows, "answer"))))

    return dict(rate=rate, seed=seed, held_out=right(held_out), on_training=right(train[:256]))


# ---- a real model
SMOLLM2 = f"{COMMON} --reward benchmark/smollm2/tasks.py:score --response-length 24"
SMOLLM2 += " --per-device-train-batch-size 16 --model-path benchmark/smollm2/model"
SMOLLM2 += " --dataset benchmark/smollm2/chain_sum_train.jsonl"
BUILT_IN = "--model-path benchmark/default/policy --dataset benchmark/default/train.jsonl"
BUILT_IN += " --eval-dataset benchmark/default/eval.jsonl"
TINY = f"{BUILT_IN} --reward exact_match --total-episodes 16 --batch-size 16"


def passes_of_smollm2() -> Part:
    """Evaluations alone: a run with learning rate 0 would make training passes, too."""
    runs = []
    for prompts, temperature in product(SMOLLM2_SAMPLES, SMOLLM2_TEMPERATURES):
        flags = f"--eval-dataset benchmark/smollm2/chain_sum_{prompts}.jsonl"
        flags += f" --eval-k {SMOLLM2_SAMPLES[prompts]} --eval-temperature {temperature}"
        runs.append((dict(temperature=temperature, prompts=prompts), "rloo", flags))
    return Part(runs, f"{SMOLLM2} --total-episodes 0 --save-rollouts", short=TINY)


def train_smollm2(script: str, own: str, seeds) -> Part:
    """Train a real model, and sample from it at each temperature."""
    measure = partial(run_passes, Part([]), passes_of_smollm2())
    flags = f"{SMOLLM2} --total-episodes 640 --learning-rate 1e-5"
    return Part([({}, script, own)], flags, seeds, measure=measure, short=TINY, needs=MODEL)


def make_tasks():
    for task, settings in TASKS.items():
        command = [sys.executable, BENCHMARK / "smollm2/tasks.py", task, *settings.split()]
        subprocess.run(command, check=True)


def without_training() -> list[tuple]:
    """Evaluations of the real model: the most likely answer, and eight samples."""
    runs = []
    for task, sampled in product(TASKS, ("0", "1 --eval-k 8")):
        flags = f"--eval-dataset runs/{task}_eval.jsonl --eval-temperature {sampled}"
        runs.append((dict(task=task, temperature=float(sampled[0])), "rloo", flags))
    return runs


def share_right(result: dict) -> dict:
    answers = [row["columns"]["answer"] for row in result["eval_rollouts"]]
    constant = max(Counter(answers).values()) / len(answers)
    return dict(right=round(result["evaluations"][0]["eval/scores"], 4), constant=constant)


MODEL = "benchmark/smollm2/prepare.py"
EPISODES = dict(rloo=16384, grpo=16384, ppo=8192)
PAIRS = "--eval-every 1000 --num-sample-generations 0 --save-rollouts"
PAIRS += " --dataset PAIRS_train.jsonl --eval-dataset PAIRS_eval.jsonl"
COIN_FLAGS = f"{SHORT} {SAMPLED} --eval-reward exact_match --save-rollouts"
# The policy of ablations.py writes spaces. It is rewarded for the format, or for answers in it.
FORM_FLAGS = f"{SHORT} {SAMPLED} --model-path benchmark/ablations/policy --response-length 16"
FORM_FLAGS += " --learning-rate 1e-4"
TWO_SAMPLES = f"{Part.short} --eval-k 2"
PARTS = {
    "coin": Part(COINS, COIN_FLAGS, SEEDS, coin_ends, short=TWO_SAMPLES),
    "form": Part(FORMS, FORM_FLAGS, SEEDS, ends, short=f"{TWO_SAMPLES} {BUILT_IN}"),
    "passes": Part(
        [({}, script, "") for script in SCRIPTS],
        SHORT,
        SEEDS,
        measure=partial(run_passes, PASSES_OF_START, PASSES_OF_TRAINED),
    ),
    "rates": Part(of_methods(lambda method: RATES), SHORT, range(1, 4), end_of_training),
    "methods": Part(
        [], f"{SHORT} --eval-every 64", OTHER_SEEDS, right_in_the_end, prepare=choose_rates
    ),
    "starts": Part(
        [],
        f"{SHORT} --eval-every 64",
        OTHER_SEEDS,
        right_in_the_end,
        prepare=make_starts,
        short=f"{Part.short} {BUILT_IN}",
    ),
    "pairs": Part(
        [({}, script, f"--total-episodes {EPISODES[script]}") for script in SCRIPTS],
        PAIRS,
        OTHER_SEEDS,
        measure=run_pairs,
    ),
    "gold": Part([], measure=run_gold),
    "smollm2_start": Part(
        [], measure=partial(run_passes, passes_of_smollm2(), Part([])), needs=MODEL
    ),
    "smollm2_tasks": Part(
        without_training(),
        f"{SMOLLM2} --total-episodes 0 --save-rollouts",
        keep=share_right,
        prepare=make_tasks,
        short=TINY,
        needs=MODEL,
    ),
    "smollm2_rloo": train_smollm2("rloo", "--rloo-k 8", SEEDS),
    "smollm2_grpo": train_smollm2("grpo", "--num-generations 8", (1,)),
    "smollm2_ppo": train_smollm2("ppo", "--num-ppo-epochs 1", (1,)),
}
choose_rates()


# ---- the table, what sentences say, and the figure


def measured(part: str, **wanted) -> list[dict]:
    """The rows of a part that have these entries."""
    return having(read_result(RESULT)["rows"], part=part, **wanted)


def pass_at(m: int, right: int, samples: int = SAMPLES) -> float:
    """The chance that at least one of m samples is right, unbiased, from `samples` samples of which
    `right` are."""
    all_wrong = math.comb(samples - right, m)
    return 1 - all_wrong / math.comb(samples, m)


def passes(m: int, **wanted) -> float:
    """pass@m, the mean over questions and seeds."""
    rows = measured("passes", **wanted)
    return mean(pass_at(m, right) for row in rows for right in row["right"])


def passes_of_start(m: int) -> float:
    """The same of the start, at the temperature that is best on training prompts."""
    best = max(TEMPERATURES, key=lambda t: passes(m, prompts="train", temperature=t))
    return passes(m, model="start", prompts="eval", temperature=best)


def of_starts() -> dict[str, dict[str, list[dict]]]:
    """Of each starting policy, the rows of each method."""
    starts = {"built-in policy": grouped(measured("methods"), "method")}
    for start, rows in grouped(measured("starts"), "start").items():
        starts[f"policy {start}"] = grouped(rows, "method")
    return starts


def differences(methods: dict[str, list[dict]]) -> dict[tuple[str, str], np.ndarray]:
    """Of each pair of methods, the differences of their last scores, paired by seed."""
    pairs = {}
    for one, other in combinations(methods, 2):
        right = column(methods[other], "right")
        pairs[other, one] = np.subtract(right, column(methods[one], "right"))
    return pairs


def sign_flips(differences) -> float:
    """The two-sided p of an exact test: how often a sum with random signs is as far from 0 as the
    one that was seen."""
    signs = np.array([*product((-1, 1), repeat=len(differences))])
    sums = np.abs(signs @ differences)
    return float(np.mean(sums >= np.abs(np.sum(differences)) - 1e-9))


def holm(p_values: dict) -> dict:
    """Holm's correction: the smallest of n values is multiplied by n, the next one by n - 1, and so
    on."""
    corrected = {}
    largest = 0.0
    for name in sorted(p_values, key=p_values.get):
        left = len(p_values) - len(corrected)
        largest = max(largest, min(1.0, p_values[name] * left))
        corrected[name] = largest
    return corrected


def seeds_needed(values, runs: int = 2) -> list[int]:
    """The seeds that show a mean difference of 0.02, 80 % of the time at a level of 5 %, and the
    ends of their 95 % interval, from ten values.

    runs: 2 for two methods with this deviation, 1 for differences that are paired by seed
    """
    needed = runs * (2.8 * np.std(values, ddof=1) / 0.02) ** 2
    # its quantiles at 2.5 % and 97.5 %, with 9 degrees of freedom
    chi_squared = (2.700, 19.023)
    low, high = (9 * needed / quantile for quantile in reversed(chi_squared))
    return [math.ceil(x) for x in (needed, low, high)]


def cited():
    """What docs/claims.md says in sentences."""
    for m, words in ((1, "from {:.2f} to {:.2f}"), (16, "{:.2f} before, and {:.2f} to")):
        rloo = passes(m, model="rloo", prompts="eval", temperature=1.0)
        ppo = passes(m, model="ppo", prompts="eval", temperature=1.0)
        yield [words.format(passes_of_start(m), rloo), f"{ppo:.2f}"]
    pairs = {start: differences(methods) for start, methods in of_starts().items()}
    lead = -np.mean(pairs["policy 3"]["filtered, k = 1", "PPO"])
    yield [f"policy 3 alone, by {lead:.3f}"]
    leaders = {"PPO", "filtered, k = 1"}
    for some in pairs.values():
        corrected = holm({pair: sign_flips(some[pair]) for pair in some})
        for pair, p in corrected.items():
            if len(leaders.intersection(pair)) == 1:
                yield [f"(p = {p:.3f})"]
    methods = grouped(measured("methods"), "method")
    needed = {name: seeds_needed(column(rows, "right")) for name, rows in methods.items()}
    yield ["{} seeds".format(*needed["RLOO"]), "{1} to {2})".format(*needed["RLOO"])]
    yield ["like GRPO {},".format(*needed["GRPO"]), "like PPO {} ".format(*needed["PPO"])]
    paired = seeds_needed(pairs["built-in policy"]["GRPO", "RLOO"], 1)
    yield ["RLOO and GRPO need {}.".format(*paired)]


def smollm2_shares(runs: list[dict]) -> tuple:
    """Of a model: the temperature that is best on training questions; on held-out ones the right
    answers and pass@8 at temperature 1, and each at the best temperature on training questions."""
    shares = {}
    for row in runs:
        right = mean(row["right"]) / SMOLLM2_SAMPLES[row["prompts"]]
        solved = mean(count > 0 for count in row["right"])
        shares[row["prompts"], row["temperature"]] = right, solved

    def best(place):
        return max(SMOLLM2_TEMPERATURES, key=lambda t: shares["train", t][place])

    at_best = (shares["eval", best(0)][0], shares["eval", best(1)][1])
    return (best(0), *shares["eval", 1.0], *at_best)


def smollm2():
    """A real model before and after training."""
    before = smollm2_shares(measured("smollm2_start"))
    lines = {"before": before}
    gains = []
    for script in SCRIPTS:
        for seed, runs in grouped(measured(f"smollm2_{script}"), "seed").items():
            found = smollm2_shares(runs)
            lines[f"{script.upper()}, seed {seed}"] = found
            if script == "rloo":
                gains.append(np.subtract(found, before))
    for name, (best, *shares) in lines.items():
        yield [name, best, *(f"{share:.2f}" for share in shares)]
    gains = np.transpose(gains)[1:]
    yield ["gain of RLOO, five seeds", "", *map(with_band, gains)]


def effects() -> dict[str, list[float]]:
    """Differences, one of each seed, for the figure."""
    found = {}
    for start, methods in of_starts().items():
        for (one, other), values in differences(methods).items():
            if other == "RLOO":
                found[f"{one} minus RLOO, {start}"] = values
    for script, some in grouped(measured("pairs"), "script").items():
        gaps = np.subtract(column(some, "unseen_after"), column(some, "seen_after"))
        found[f"unseen minus seen pairs, {script.upper()}"] = gaps
    coins = grouped(measured("coin", reward="coin", updates="1"), "script")
    changed = {f"coin, after minus before, {script.upper()}": coins[script] for script in coins}
    for reward, some in grouped(measured("form", judge="exact_match"), "reward").items():
        changed[f"{reward}, after minus before, RLOO"] = some
    for label, some in changed.items():
        before, after = np.transpose(column(some, "scores"))
        found[label] = after - before
    return found


def plot(_, folder: Path):
    """A forest plot: each difference with its 95 % interval."""
    labels = effects()
    figure, [[axis]] = draw.panels(1, 1, width=6.5, height=0.24 * len(labels) + 0.7)
    for y, values in enumerate(labels.values()):
        middle, band = draw.mean_and_band(values)
        axis.errorbar(middle, y, xerr=band, fmt="o", ms=4, capsize=2, color=draw.COLORS["rloo"])
    axis.axvline(0, color=draw.GRAY, lw=0.8)
    axis.set_yticks(range(len(labels)), labels, fontsize=7.5)
    axis.invert_yaxis()
    axis.set_xlabel("difference of the share of right answers")
    axis.set_title("means and 95 % intervals over seeds, not corrected")
    draw.save(figure, folder / "claims.png")


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
