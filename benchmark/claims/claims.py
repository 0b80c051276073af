"""The controls of docs/claims.md on the built-in task: what a claim about a method needs beside its own runs.

    python benchmark/claims/claims.py                      # all of them, an hour and a half on one core
    python benchmark/claims/claims.py coin passes          # only these (see CONTROLS), the others are kept

Runs go one after another, so their CPU seconds can be compared. Writes claims.json, a run a line.
"""

import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import BENCHMARK, POLICY, SCRIPTS, machine, run_all, write_lines

RESULT = Path(__file__).with_suffix(".json")
REWARDS = "benchmark/claims/claims.py"
COMMON = "--num-sample-generations 0 --kl-coef 0"
SHORT = f"{COMMON} --total-episodes 4096"
SAMPLED = "--eval-temperature 1 --eval-k 16"  # an evaluation of samples, not of the most likely answer
SEEDS = range(1, 6)
OTHER_SEEDS = range(4, 14)  # none of those that chose a learning rate
COIN = 0.26  # the share of right samples before training
SAMPLES = 32  # of each question, for pass@k
TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
METHODS = {"RLOO": "rloo", "GRPO": "grpo", "PPO": "ppo", "filtered": "rloo ladder/reinforce.patch"}
TOSSES = np.random.default_rng(0)  # A hash of the text would be no coin: it could be learned.


def coin(completions, **_) -> list[float]:
    """1 with the probability COIN, whatever the answer is. For runs on one process that are not resumed."""
    return (TOSSES.random(len(completions)) < COIN).astype(float).tolist()


def digits(completions, **_) -> list[float]:
    """The format alone: 1 for any number without spaces around it."""
    return [float(completion.isdigit()) for completion in completions]


def exactly(completions, answer, **_) -> list[float]:
    """1 for the right answer in the right format. `exact_match` takes answers with spaces, too."""
    return [float(completion == right) for completion, right in zip(completions, answer)]


def run_named(jobs: dict[tuple, dict], finish) -> list[dict]:
    """Run the jobs -> for each a row with its names and what `finish(result)` keeps of it."""
    return run_all(list(jobs), lambda job, result: jobs[job] | finish(result), processes=1)


def ends(result: dict) -> dict:
    """The held-out score before and after, that of the best sample of each question, and the clipped ratios."""
    first, *_, last = result["evaluations"]
    names = {"scores": "eval/scores", "best_of_k": f"eval/best_of_{result['args']['eval_k']}"}
    found = {kept: [round(row[name], 4) for row in (first, last)] for kept, name in names.items()}
    clipped = [row["policy/clipfrac_avg"] for row in result["metrics"] if "policy/clipfrac_avg" in row]
    return found | dict(clipped=round(float(np.mean(clipped)), 5))


def run_coin() -> list[dict]:
    """The coin where the clip cannot act, where it acts, and where it is off; and the true reward."""
    four = "--num-mini-batches 4"
    settings = {("exact_match", "1"): "", (f"{REWARDS}:coin", "1"): "", (f"{REWARDS}:coin", "4"): four}
    settings[f"{REWARDS}:coin", "4, no clip"] = f"{four} --cliprange 1000"
    jobs = {}
    for (reward, updates), script, seed in product(settings, ("rloo", "grpo"), SEEDS):
        flags = f"{SHORT} {SAMPLED} --reward {reward} --eval-reward exact_match --seed {seed}"
        names = dict(script=script, reward=reward.split(":")[-1], updates=updates, seed=seed)
        jobs[script, f"{flags} {settings[reward, updates]}"] = names
    return run_named(jobs, ends)


def run_form() -> list[dict]:
    """The policy of ablations.py writes spaces. It is rewarded for the format, or for answers in it."""
    policy, jobs = BENCHMARK / "ablations" / "policy", {}
    for reward, judge, seed in product(("digits", "exactly"), ("exact_match", f"{REWARDS}:exactly"), SEEDS):
        flags = f"{SHORT} {SAMPLED} --model-path {policy} --response-length 16 --seed {seed}"
        names = dict(reward=reward, judge=judge.split(":")[-1], seed=seed)
        jobs["rloo", f"{flags} --reward {REWARDS}:{reward} --eval-reward {judge}"] = names
    return run_named(jobs, ends)


def run_passes() -> list[dict]:
    """Train, then sample answers -> for each model and temperature, how many answers to each question are right."""
    with tempfile.TemporaryDirectory() as folder:
        models = list(product(SCRIPTS, SEEDS))
        jobs = [(script, f"{SHORT} --seed {seed}", f"{folder}/{script}{seed}") for script, seed in models]
        run_all(jobs, lambda job, result: None, processes=1)
        samplings = [(*model, "eval", 1.0) for model in models]
        samplings += [("start", 0, *others) for others in product(("eval", "train"), TEMPERATURES)]
        jobs = {}
        for model, seed, prompts, temperature in samplings:
            path = POLICY if model == "start" else f"{folder}/{model}{seed}/model"
            # With learning rate 0 a run only samples. Its one rollout is written to rollouts.jsonl.
            flags = f"{COMMON} --model-path {path} --learning-rate 0 --save-rollouts --rloo-k {SAMPLES} --seed 1"
            flags += f" --dataset {BENCHMARK}/default/{prompts}.jsonl --total-episodes {256 * SAMPLES}"
            flags += f" --batch-size {256 * SAMPLES} --per-device-train-batch-size 1024 --temperature {temperature}"
            jobs["rloo", flags] = dict(model=model, seed=seed, temperature=temperature, prompts=prompts)
        return run_named(jobs, right_answers)


def right_answers(result: dict) -> dict:
    counts = Counter()
    for row in result["rollouts"]:
        counts[row["prompt"]] += int(row["score"])
    return dict(right=[right for _, right in sorted(counts.items())])


def of_methods(rates: dict[str, tuple], seeds, flags: str, finish) -> list[dict]:
    """Run each method at its rates. Filtered: REINFORCE with scores 0 and 1, so wrong answers have no loss."""
    jobs = {}
    for seed, (method, script) in product(seeds, METHODS.items()):
        for rate in rates[method]:
            run_flags = f"{SHORT} --learning-rate {rate} --seed {seed} {flags}"
            jobs[script, run_flags] = dict(method=method, rate=rate, seed=seed)
    return run_named(jobs, finish)


def run_rates() -> list[dict]:
    """Each method at five rates -> the score of training, over the last ten iterations."""

    def finish(result):
        return dict(score=round(float(np.mean([row["objective/scores"] for row in result["metrics"][-10:]])), 4))

    return of_methods(dict.fromkeys(METHODS, RATES), range(1, 4), "", finish)


def run_methods() -> list[dict]:
    """Each method at the rate with the highest mean score in training."""
    scores = Counter()
    for row in json.loads(RESULT.read_text()):
        if row["control"] == "rates" and "score" in row:
            scores[row["method"], row["rate"]] += row["score"]
    best = {method: (max(RATES, key=lambda rate: scores[method, rate]),) for method in METHODS}
    return of_methods(best, OTHER_SEEDS, "--eval-every 4 --save-rollouts", to_curve)


def to_curve(result: dict) -> dict:
    """Held-out scores against episodes and seconds, and with --save-rollouts against the KL."""
    names = dict(episode="episode", seconds="seconds", held_out="eval/scores")
    curve = {name: [round(row[key], 4) for row in result["evaluations"]] for name, key in names.items()}
    return curve | (dict(kl=kl_to_start(result["rollouts"], curve["episode"])) if result["rollouts"] else {})


def kl_to_start(rollouts: list[dict], episode: list[int]) -> list[float]:
    """The KL to the policy before training, in nats: the mean over the samples since the evaluation before."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY)
    tokenizer = transformers.AutoTokenizer.from_pretrained(POLICY)
    prompts = torch.tensor(tokenizer([row["prompt"] for row in rollouts]).input_ids)  # all have six tokens
    tokens = [torch.tensor(row["token_ids"]) for row in rollouts]
    tokens = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)  # [episodes, response]
    with torch.no_grad():
        logits = model(torch.cat([prompts, tokens], dim=1)).logits[:, prompts.shape[1] - 1 : -1]
    log_p = logits.log_softmax(-1).gather(-1, tokens[:, :, None]).squeeze(-1)
    sums = [sum(row["logprobs"]) - sum(p[: len(row["logprobs"])]) for row, p in zip(rollouts, log_p.tolist())]
    return [0.0, *(round(float(np.mean(sums[a:b])), 4) for a, b in zip(episode, episode[1:]))]


def constant_runs(episodes: int) -> list[dict]:
    """The three scripts at a constant rate. The held-out score is that of samples, in every fourth iteration."""
    flags = f"{COMMON} --lr-scheduler-type constant --eval-temperature 1 --eval-every 4 --total-episodes {episodes}"
    runs = [dict(script=script, seed=seed) for script, seed in product(SCRIPTS, OTHER_SEEDS)]
    return run_named({(run["script"], f"{flags} --seed {run['seed']}"): run for run in runs}, to_curve)


def fit(episode: np.ndarray, score: np.ndarray) -> tuple[float, float, float]:
    """A, C and B of R = R_0 + (A - R_0) / (1 + (C / episodes)^B) (arXiv 2510.13786), by least squares on a grid."""
    start, gains = score[0], score[1:] - score[0]
    grid = np.array([(middle, power) for middle in np.geomspace(200, 20000, 80) for power in np.linspace(0.3, 4, 75)])
    shapes = 1 / (1 + (grid[:, :1] / episode[1:]) ** grid[:, 1:])  # [grid, points]
    limits = np.clip(shapes @ gains / (shapes**2).sum(1), 0, 1 - start)
    best = np.argmin(((limits[:, None] * shapes - gains) ** 2).sum(1))
    return float(start + limits[best]), *map(float, grid[best])


def predict(rows: list[dict], episodes: int) -> dict:
    """The score after so many episodes by a fit to the mean of the seeds, and by fits to 1,000 draws of seeds."""
    curves, episode = np.array([row["held_out"] for row in rows]), np.array(rows[0]["episode"])
    rng, predicted = np.random.default_rng(0), []
    for draw in [np.arange(len(curves)), *rng.integers(len(curves), size=(1000, len(curves)))]:
        mean = curves[draw].mean(0)
        limit, middle, power = fit(episode, mean)
        predicted.append((mean[0] + (limit - mean[0]) / (1 + (middle / episodes) ** power), limit, middle, power))
    low, high = np.quantile([score for score, *_ in predicted[1:]], (0.025, 0.975))
    names = dict(zip(("score", "limit", "middle", "power"), predicted[0])) | dict(low=low, high=high)
    return {name: float(f"{value:.4g}") for name, value in names.items()}


def run_first_quarter() -> list[dict]:
    """The first 4,096 of 16,384 episodes, and what they predict."""
    rows = constant_runs(4096)
    for script in SCRIPTS:
        some = [row for row in rows if row["script"] == script]
        rows.append(dict(script=script, predicted_for=16384) | predict(some, 16384))
    return rows


def run_whole() -> list[dict]:
    """All episodes. There must be a prediction before."""
    if not any("predicted_for" in row for row in json.loads(RESULT.read_text())):
        raise SystemExit("first: python benchmark/claims/claims.py first_quarter")
    return constant_runs(16384)


def run_smollm2() -> list[dict]:
    """RLOO on a real model, one seed (needs smollm2/prepare.py): a coin, the true reward, and other temperatures."""
    path, jobs = "benchmark/smollm2/chain_sum", {}
    flags = f"{COMMON} --model-path benchmark/smollm2/model --dataset {path}_train.jsonl --rloo-k 8 --eval-k 8"
    flags += f" --eval-dataset {path}_eval.jsonl --eval-reward {path}.py:score --response-length 24"
    flags += " --per-device-train-batch-size 16"
    settings = [("coin", 640, 1e-5, 1.0), ("chain_sum", 640, 1e-5, 1.0), ("none", 8, 0.0, 0.7), ("none", 8, 0.0, 0.3)]
    for name, episodes, rate, temperature in settings:
        own = f"--total-episodes {episodes} --learning-rate {rate} --eval-temperature {temperature} --seed 1"
        reward = f"{REWARDS}:coin" if name == "coin" else f"{path}.py:score"
        jobs["rloo", f"{flags} {own} --reward {reward}"] = dict(reward=name, temperature=temperature)
    return run_named(jobs, ends)


CONTROLS = dict(coin=run_coin, form=run_form, passes=run_passes, rates=run_rates, methods=run_methods)
CONTROLS |= dict(first_quarter=run_first_quarter, whole=run_whole, smollm2=run_smollm2)


def main():
    time.perf_counter = time.process_time  # The scripts' seconds are CPU seconds now, in each forked run.
    for name in sys.argv[1:] or CONTROLS:
        rows = [dict(environment=machine()), *CONTROLS[name]()]
        others = [row for row in json.loads(RESULT.read_text()) if row["control"] != name]
        write_lines(RESULT, others + [dict(control=name) | row for row in rows])


if __name__ == "__main__":
    main()
