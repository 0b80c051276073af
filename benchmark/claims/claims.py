"""The controls of docs/claims.md on the built-in task: what a claim about a method needs beside its
own runs.

    python benchmark/claims/claims.py                      # all of them
    python benchmark/claims/claims.py coin passes          # only these, the others are kept
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
import tables
from run import (
    BENCHMARK,
    DEFAULTS,
    POLICY,
    ROOT,
    SCRIPTS,
    Part,
    main,
    read_result,
    read_rows,
    run_all,
)

RESULT = Path(__file__).with_suffix(".json")
REWARDS = "benchmark/claims/claims.py"
COMMON = "--num-sample-generations 0 --kl-coef 0"
SHORT = f"{COMMON} --total-episodes 4096"
SAMPLED = (
    "--eval-temperature 1 --eval-k 16"  # an evaluation of samples, not of the most likely answer
)
SEEDS = range(1, 6)
OTHER_SEEDS = range(4, 14)  # none of those that chose a learning rate
COIN = 0.26  # the share of right samples before training
SAMPLES = 32  # of each question, for pass@k
TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
SMOLLM2_TEMPERATURES = (0.1, 0.3, 0.6, 1.0)
SMOLLM2_SAMPLES = {"train": 4, "eval": 8}  # of each of 140 and 60 questions
RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
FILTERED = (
    "rloo ladder/reinforce.patch"  # REINFORCE with scores 0 and 1: wrong answers have no loss
)
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


def ends(_, result: dict) -> dict:
    """The held-out score before and after, and that of the best sample of each question."""
    first, *_, last = result["evaluations"]
    names = {"scores": "eval/scores", "best_of_k": f"eval/best_of_{result['args']['eval_k']}"}
    return {kept: [round(row[name], 4) for row in (first, last)] for kept, name in names.items()}


def coin_ends(names: dict, result: dict) -> dict:
    """`ends`, and how sure the policy is: the entropy of a token, and the share of the most
    frequent answer."""
    rows = result["metrics"][1:]
    entropy = [
        rows[0]["policy/entropy_avg"],
        np.mean([row["policy/entropy_avg"] for row in rows[-10:]]),
    ]
    evaluations = {}
    for row in result["eval_rollouts"]:
        answers = evaluations.setdefault(row["iteration"], {})
        answers.setdefault(row["prompt"], []).append(row["completion"])
    shares = []
    for answers in evaluations.values():
        most = [Counter(some).most_common(1)[0][1] / len(some) for some in answers.values()]
        shares.append(round(float(np.mean(most)), 4))
    return ends(names, result) | dict(
        entropy=[round(float(x), 4) for x in entropy], mode=[shares[0], shares[-1]]
    )


def coin_jobs() -> dict[tuple, dict]:
    """The coin where the clip cannot act, where it acts, and where it is off; and the true
    reward."""
    four = "--num-mini-batches 4"
    settings = {
        ("exact_match", "1"): "",
        (f"{REWARDS}:coin", "1"): "",
        (f"{REWARDS}:coin", "4"): four,
    }
    settings[f"{REWARDS}:coin", "4, no clip"] = f"{four} --cliprange 1000"
    jobs = {}
    for (reward, updates), script, seed in product(settings, ("rloo", "grpo"), SEEDS):
        flags = f"{SHORT} {SAMPLED} --reward {reward} --eval-reward exact_match"
        flags += f" --save-rollouts --seed {seed}"
        names = dict(script=script, reward=reward.split(":")[-1], updates=updates, seed=seed)
        jobs[script, f"{flags} {settings[reward, updates]}"] = names
    return jobs


def form_jobs() -> dict[tuple, dict]:
    """The policy of ablations.py writes spaces. It is rewarded for the format, or for answers in
    it."""
    policy, jobs = BENCHMARK / "ablations" / "policy", {}
    for reward, judge, seed in product(
        ("digits", "exactly"), ("exact_match", f"{REWARDS}:exactly"), SEEDS
    ):
        flags = f"{SHORT} {SAMPLED} --model-path {policy} --response-length 16"
        flags += f" --learning-rate 1e-4 --seed {seed}"
        names = dict(reward=reward, judge=judge.split(":")[-1], seed=seed)
        jobs["rloo", f"{flags} --reward {REWARDS}:{reward} --eval-reward {judge}"] = names
    return jobs


# ---- new answers, or more frequent ones


def passes_jobs() -> dict[tuple, dict]:
    """Training runs of each script, and one run for each temperature that only samples: its
    learning rate is 0."""
    jobs = {}
    for script, seed in product(SCRIPTS, SEEDS):
        jobs[script, f"{SHORT} --seed {seed}"] = dict(trained=script, seed=seed)
    for prompts, temperature in product(("eval", "train"), TEMPERATURES):
        flags = f"{COMMON} --response-length 8 --learning-rate 0 --save-rollouts"
        flags += f" --rloo-k {SAMPLES} --seed 1"
        flags += f" --dataset benchmark/default/{prompts}.jsonl --total-episodes {256 * SAMPLES}"
        flags += f" --batch-size {256 * SAMPLES} --per-device-train-batch-size 1024"
        flags += f" --temperature {temperature} --model-path {POLICY}"
        both = (prompts, temperature) == ("eval", 1)
        models = ("start", "trained") if both else ("start",)
        jobs["rloo", flags] = dict(temperature=temperature, prompts=prompts, models=models)
    return jobs


def run_passes(jobs: dict[tuple, dict], smoke: bool) -> list[dict]:
    """Train, then sample: for each model and temperature, how many answers to each question are
    right.

    A job is a training run, or a run that samples from the `models` it names: the starting policy,
    what was trained, or both.
    """
    with tempfile.TemporaryDirectory() as folder:
        trained = {job: names for job, names in jobs.items() if "trained" in names}
        folders = {
            job: f"{folder}/{names['trained']}{names['seed']}" for job, names in trained.items()
        }
        run_all([(*job, path) for job, path in folders.items()])
        samplings = {}
        for (script, flags), names in jobs.items():
            if "trained" in names:
                continue
            kept = {name: names[name] for name in ("temperature", "prompts")}
            if "start" in names["models"]:
                samplings[script, flags] = dict(model="start", seed=0) | kept
            for job, path in folders.items() if "trained" in names["models"] else ():
                model = dict(model=trained[job]["trained"], seed=trained[job]["seed"])
                samplings[script, f"{flags} --model-path {path}/model"] = model | kept
        return run_all(list(samplings), lambda job, result: samplings[job] | right_answers(result))


def right_answers(result: dict) -> dict:
    """The right samples of each question: those of the first evaluation, or else of training."""
    counts = Counter()
    first = [row for row in result["eval_rollouts"] if row["iteration"] == 0]
    for row in first or result["rollouts"]:
        counts[row["prompt"]] += int(row["score"])
    return dict(right=[right for _, right in sorted(counts.items())])


# ---- other methods, rates, starting policies and prompts


def of_methods(rates, seeds, flags: str, **names) -> dict[tuple, dict]:
    """The runs of each method at its rates."""
    jobs = {}
    for seed, (method, (script, own)) in product(seeds, METHODS.items()):
        for rate in rates(method):
            run_flags = f"{SHORT} --learning-rate {rate} --seed {seed} {own} {flags}"
            jobs[script, " ".join(run_flags.split())] = (
                dict(method=method, rate=rate, seed=seed) | names
            )
    return jobs


def end_of_training(_, result: dict) -> dict:
    """The score of training, over the last ten iterations."""
    return dict(
        score=round(
            float(np.mean([row["objective/scores"] for row in result["metrics"][1:][-10:]])), 4
        )
    )


def best_rate(method: str) -> list[float]:
    """The rate with the highest mean score in training."""
    scores = Counter()
    for row in read_result(RESULT)["rows"]:
        if row["part"] == "rates" and row["method"] == method:
            scores[row["rate"]] += row["score"]
    return [max(RATES, key=lambda rate: scores[rate])]


def right_in_the_end(_, result: dict) -> dict:
    return dict(right=round(result["evaluations"][-1]["eval/scores"], 4))


def starts_jobs() -> dict[tuple, dict]:
    """The methods from other starting policies, each with its own right facts, prompts and held-out
    prompts."""
    jobs = {}
    for start in STARTS:
        folder = f"runs/start_{start}"
        flags = f"--model-path {folder}/policy --response-length 8 --dataset {folder}/train.jsonl"
        flags += f" --eval-dataset {folder}/eval.jsonl --eval-every 64"
        jobs |= of_methods(best_rate, OTHER_SEEDS, flags, start=start)
    return jobs


def choose_rates():
    """Take the rates that the file has now: the same command may have measured them."""
    PARTS["methods"].jobs = of_methods(best_rate, OTHER_SEEDS, "--eval-every 64")
    PARTS["starts"].jobs = starts_jobs()


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


def pairs_jobs() -> dict[tuple, dict]:
    """The default runs without some pairs of last digits. The seed chooses the pairs."""
    jobs = {}
    for seed, (script, episodes) in product(
        OTHER_SEEDS, dict(rloo=16384, grpo=16384, ppo=8192).items()
    ):
        flags = f"--seed {seed} --total-episodes {episodes} --eval-every 1000"
        flags += f" --num-sample-generations 0 --dataset runs/pairs_{seed}_train.jsonl"
        flags += f" --eval-dataset runs/pairs_{seed}_eval.jsonl --save-rollouts"
        jobs[script, flags] = dict(script=script, seed=seed)
    return jobs


def last_digits(prompt: str) -> tuple[str, ...]:
    """The last digits of both numbers of a sum, the smaller one first."""
    return tuple(sorted(number[-1] for number in prompt.rstrip("=").split("+")))


def run_pairs(jobs: dict[tuple, dict], smoke: bool) -> list[dict]:
    """Train without some pairs: the right answers to held-out sums with seen pairs, and to all with
    unseen pairs."""
    pairs = [(str(a), str(b)) for a in range(10) for b in range(a, 10)]
    rows = {name: read_rows(BENCHMARK / f"default/{name}.jsonl") for name in ("train", "eval")}
    unseen = {}
    for seed in OTHER_SEEDS:
        chosen = np.random.default_rng(seed).permutation(len(pairs))[:UNSEEN]
        unseen[seed] = {pairs[i] for i in chosen}
        seen = [row for row in rows["train"] if last_digits(row["prompt"]) not in unseen[seed]]
        new = rows["eval"] + [
            row for row in rows["train"] if last_digits(row["prompt"]) in unseen[seed]
        ]
        for name, some in (("train", seen), ("eval", new)):
            path = ROOT / f"runs/pairs_{seed}_{name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in some))

    def finish(job, result):
        names, kept = jobs[job], {}
        last = result["evaluations"][-1]["iteration"]
        for row in result["eval_rollouts"]:
            kind = "unseen" if last_digits(row["prompt"]) in unseen[names["seed"]] else "seen"
            if row["iteration"] in (0, last):
                kept.setdefault(f"{kind}_{'after' if row['iteration'] else 'before'}", []).append(
                    row["score"]
                )
        return names | {
            name: round(float(np.mean(scores)), 4) for name, scores in sorted(kept.items())
        }

    return run_all(list(jobs), finish)


def run_gold(jobs: dict[tuple, dict], smoke: bool) -> list[dict]:
    """Fine-tune the starting policy on right answers at each rate, and then at the one with the
    best training score."""
    steps = 2 if smoke else 64
    rows = [
        fine_tune(rate, seed, steps)
        for rate, seed in product(RATES[:1] if smoke else RATES, range(1, 4))
    ]
    best = max(
        RATES, key=lambda rate: sum(row["on_training"] for row in rows if row["rate"] == rate)
    )
    return rows + [fine_tune(best, seed, steps) for seed in (() if smoke else OTHER_SEEDS)]


def fine_tune(rate: float, seed: int, steps: int) -> dict:
    """Fine-tune on 64 right answers in each step, without sampling or reward: the share of right
    answers, greedily."""
    make, win_rate = importlib.import_module("default.make"), importlib.import_module("win_rate")
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(POLICY)
    policy = transformers.AutoModelForCausalLM.from_pretrained(POLICY)
    train, held_out = (read_rows(BENCHMARK / f"default/{name}.jsonl") for name in ("train", "eval"))
    sums = np.array([[int(x) for x in row["prompt"].rstrip("=").split("+")] for row in train])
    losses = make.losses_on_answers(policy, sums, steps, np.random.default_rng(seed), batch_size=64)
    make.fit(policy, losses, steps, lr=rate, warmup=1)

    def right(rows):
        prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
        tokens, _ = win_rate.complete(
            policy.eval(), tokenizer, prompts, np.zeros((len(rows), 8)), temperature=0.0
        )
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return float(
            np.mean([text == row["answer"] for text, row in zip(texts, rows, strict=True)])
        )

    return dict(rate=rate, seed=seed, held_out=right(held_out), on_training=right(train[:256]))


# ---- a real model


def smollm2_jobs(script: str | None, seeds=()) -> dict[tuple, dict]:
    """Runs that only sample from a real model at each temperature, as it is or, where a script is
    given, after training."""
    path = "benchmark/smollm2/chain_sum"
    flags = f"{COMMON} --reward {path}.py:score --response-length 24"
    flags += " --per-device-train-batch-size 16 --model-path benchmark/smollm2/model"
    own = {"rloo": "--rloo-k 8", "grpo": "--num-generations 8", "ppo": "--num-ppo-epochs 1"}
    jobs = {}
    for seed in seeds:
        trained = f"--dataset {path}_train.jsonl --total-episodes 640 --learning-rate 1e-5"
        trained += f" {own[script]} --seed {seed}"
        jobs[script, f"{flags} {trained}"] = dict(trained=script, seed=seed)
    for prompts, temperature in product(SMOLLM2_SAMPLES, SMOLLM2_TEMPERATURES):
        # An evaluation alone: a run with learning rate 0 would make training passes, too.
        sampled = f"--dataset {path}_train.jsonl --eval-dataset {path}_{prompts}.jsonl"
        sampled += " --total-episodes 0 --save-rollouts --seed 1"
        sampled += f" --eval-k {SMOLLM2_SAMPLES[prompts]} --eval-temperature {temperature}"
        models = ("trained",) if script else ("start",)
        names = dict(temperature=temperature, prompts=prompts, models=models)
        jobs["rloo", f"{flags} {sampled}"] = names
    return jobs


BUILT_IN = "--model-path benchmark/default/policy --dataset benchmark/default/train.jsonl"
BUILT_IN += " --eval-dataset benchmark/default/eval.jsonl"
PARTS = {
    "coin": Part(coin_jobs(), coin_ends, short=f"{Part.short} --eval-k 2"),
    "form": Part(
        form_jobs(), ends, short=f"{Part.short} {BUILT_IN} --reward exact_match --eval-k 2"
    ),
    "passes": Part(
        passes_jobs(),
        measure=run_passes,
        short="--total-episodes 128",
        smoke=lambda names: names.get("temperature", 1.0) == 1.0,
    ),
    "rates": Part(
        of_methods(lambda method: RATES, range(1, 4), ""),
        end_of_training,
        smoke=lambda names: names["rate"] == 1e-4,
    ),
    "methods": Part({}, right_in_the_end, prepare=choose_rates),
    "starts": Part(
        {},
        right_in_the_end,
        prepare=make_starts,
        short=f"{Part.short} {BUILT_IN}",
        smoke=lambda names: names["start"] == STARTS[0],
    ),
    "pairs": Part(pairs_jobs(), measure=run_pairs),
    "gold": Part({}, measure=run_gold),
}
choose_rates()
for script, seeds in {None: (), "rloo": SEEDS, "grpo": (1,), "ppo": (1,)}.items():
    PARTS[f"smollm2_{script or 'start'}"] = Part(
        smollm2_jobs(script, seeds),
        measure=run_passes,
        short=f"{BUILT_IN} --reward exact_match --total-episodes 16 --batch-size 16",
        smoke=lambda names: names.get("temperature", 1.0) == 1.0,
        needs="benchmark/smollm2/prepare.py",
    )


def plot(_, folder: Path):
    """A forest plot: each difference with its 95 % interval."""
    effects = tables.claims_effects()
    figure, [[axis]] = draw.panels(1, 1, width=6.5, height=0.24 * len(effects) + 0.7)
    for y, (_, middle, band) in enumerate(effects):
        axis.errorbar(middle, y, xerr=band, fmt="o", ms=4, capsize=2, color=draw.COLORS["rloo"])
    axis.axvline(0, color=draw.GRAY, lw=0.8)
    axis.set_yticks(range(len(effects)), [label for label, *_ in effects], fontsize=7.5)
    axis.invert_yaxis()
    axis.set(
        xlabel="difference of the share of right answers",
        title="means and 95 % intervals over seeds, not corrected",
    )
    draw.save(figure, folder / "claims.png")


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
