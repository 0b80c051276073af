"""What each flag does, and the controls of docs/claims.md: what a claim about a method needs beside
its own runs. Most of it is on the built-in task.

    python benchmark/claims/claims.py                      # all parts
    python benchmark/claims/claims.py coin form            # only these, the others are kept
    python benchmark/claims/claims.py --plot               # only the figure, and the p-values
"""

import sys
import tempfile
from collections import Counter
from itertools import combinations, combinations_with_replacement, product
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from compare import ALPHA, best_rate, holm, sign_flips, worth
from run import (
    BENCHMARK,
    BUILT_IN,
    POLICY,
    SCRIPTS,
    Part,
    column,
    grouped,
    having,
    import_script,
    main,
    read_result,
    read_rows,
    run_all,
    write_rows,
)
from tables import with_band

RESULT = Path(__file__).with_suffix(".json")
SHORT = "--num-sample-generations 0 --total-episodes 4096"
LONG = "--num-sample-generations 0 --total-episodes 8192"
NO_KL = f"{SHORT} --kl-coef 0"
OFTEN = f"{NO_KL} --eval-every 16"
SEEDS = range(1, 6)
OTHER_SEEDS = range(4, 14)  # none of those that chose a learning rate


# ---- a policy whose answers have very different lengths
SPACES = RESULT.with_name("policy")
LENGTH = f"{BUILT_IN} --model-path benchmark/claims/policy"
LENGTH += " --response-length 16 --learning-rate 1e-4"


def make_policy(_=None, smoke=False):
    """Train the default policy for a few more steps, on its own sampled answers.

    If a sum begins with an odd digit, 8 to 12 spaces stand behind its answer. `exact_match` strips
    them. So half of the prompts take four times as many tokens, and there is the same thing to
    learn.
    """
    import torch  # These imports take seconds, and --help does not need them.
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    policy = AutoModelForCausalLM.from_pretrained(POLICY)
    steps, count = (4, 64) if smoke else (400, None)
    texts = 4 * column(read_rows(BENCHMARK / "default/train.jsonl"), "prompt")
    prompts = tokenizer(texts[:count])["input_ids"]
    rng = np.random.default_rng([1, 0])
    make = import_script(BENCHMARK / "default/make.py")
    answers = make.complete(policy, prompts, rng.random((len(prompts), 4)))
    space = tokenizer.convert_tokens_to_ids(" ")
    rows = []  # prompt, answer, spaces, EOS
    for text, prompt, answer in zip(texts, prompts, answers):
        spaces = [space] * int(rng.integers(8, 13)) * (int(text[0]) % 2)
        rows.append(torch.tensor(prompt + answer[:-1] + spaces + answer[-1:]))
    tokens = pad_sequence(rows, batch_first=True)
    labels = pad_sequence(rows, batch_first=True, padding_value=-100)
    labels[:, : len(prompts[0])] = -100  # only the answers are learned
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        chosen = rng.integers(len(rows), size=128)
        loss = policy(input_ids=tokens[chosen], labels=labels[chosen]).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if not smoke:
        policy.save_pretrained(SPACES)
        tokenizer.save_pretrained(SPACES)
    return [dict(loss=round(loss.item(), 4))]


def need_policy():
    if not SPACES.exists():
        make_policy()


# ---- what each flag does
MODEL = "--reward none --reward-model-path benchmark/default/reward_model"
MODEL += " --eval-reward exact_match --eval-temperature 1"
EIGHT_UPDATES = "--num-ppo-epochs 4 --num-mini-batches 2"
JUDGE = "--reward benchmark/variants/long_judge.py:score --eval-reward exact_match"


def over(flag, values, script="rloo"):
    """A run for each value of a flag."""
    return [(dict(label=str(x)), script, f"{flag} {x}") for x in values]


EPOCHS = [
    (
        dict(label=f"{epochs} x {batches}"),
        "ppo",
        f"--num-ppo-epochs {epochs} --num-mini-batches {batches}",
    )
    for epochs, batches in ((1, 1), (2, 1), (4, 1), (1, 4))
]
LOSSES = []
for pair in ("grpo group", "grpo batch", "grpo none", "dapo group", "dr_grpo none", "cispo group"):
    loss, scaling = pair.split()
    flags = f"--loss-type {loss} --scale-rewards {scaling}"
    LOSSES.append((dict(label=f"{loss}, {scaling}"), "grpo", flags))
FLAGS = {  # of each part: runs, and what all of them have
    "group": (over("--rloo-k", (2, 4, 8, 16)), SHORT),
    "epochs": (EPOCHS, SHORT),
    "clip": (over("--cliprange", (0.05, 0.2, 10)), f"{SHORT} {EIGHT_UPDATES}"),
    "kl": (over("--kl-coef", (0.01, 0.1, 0.3, 1.0)), f"{LONG} {MODEL}"),
    "eos": (over("--missing-eos-penalty", (0, 1), "grpo"), f"{LONG} {JUDGE}"),
    "loss": (LOSSES, f"{LONG} {LENGTH} --num-ppo-epochs 2"),
}
for script in SCRIPTS:
    rates = over("--learning-rate", (1e-5, 5e-5, 2e-4, 1e-3), script)
    FLAGS[f"rate_{script}"] = rates, SHORT


# ---- a coin, and a format
COIN = 0.26  # the share of right samples before training
TOSSES = np.random.default_rng(0)  # A hash of the text would be no coin: it could be learned.
REWARDS = "benchmark/claims/claims.py"


def coin(completions, **_):
    """1 with the probability COIN, whatever the answer is. For runs on one process that are not
    resumed."""
    return (TOSSES.random(len(completions)) < COIN).astype(float).tolist()


def digits(completions, **_):
    """The format alone: 1 for any number without spaces around it."""
    return [float(completion.isdigit()) for completion in completions]


def exactly(completions, answer, **_):
    """1 for the right answer in the right format. `exact_match` takes answers with spaces, too."""
    return [float(completion == right) for completion, right in zip(completions, answer)]


JUDGES = {"exact_match": "exact_match"}
for name in ("coin", "digits", "exactly"):
    JUDGES[name] = f"{REWARDS}:{name}"
COINS = [
    (dict(reward=reward), script, f"--reward {JUDGES[reward]}")
    for script, reward in product(("rloo", "grpo"), ("exact_match", "coin"))
]
FORMS = [
    (
        dict(reward=reward, judge=judge),
        "rloo",
        f"--reward {JUDGES[reward]} --eval-reward {JUDGES[judge]}",
    )
    for reward, judge in product(("digits", "exactly"), ("exact_match", "exactly"))
]
SAMPLED = f"{NO_KL} --eval-temperature 1 --eval-k 16"


# ---- other methods, rates and prompts
OWN_RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
FILTERED = "rloo reinforce.patch"  # With scores 0 and 1 wrong answers have no loss.
METHODS = {  # script and flags
    "RLOO": ("rloo", ""),
    "GRPO": ("grpo", ""),
    "PPO": ("ppo", ""),
    "filtered": (FILTERED, ""),
    "filtered, k = 1": (FILTERED, "--rloo-k 1"),
}
UNSEEN = 11  # of the 55 pairs of last digits, those that training does not show


def of_methods(rates):
    """The runs of each method at rates(method)."""
    runs = []
    for method, (script, own) in METHODS.items():
        for rate in rates(method):
            runs.append((dict(method=method, rate=rate), script, f"--learning-rate {rate} {own}"))
    return runs


def own_rate(method):
    """The rate with the best scores in training."""
    rates = grouped(measured("rates", method=method), "rate")
    ends = {rate: scores(rates[rate], "end", "objective/scores") for rate in rates}
    return [best_rate(ends)]


def choose_rates():
    """Take the rates that the file has now. The same command may have measured them."""
    PARTS["methods"].runs = of_methods(own_rate)


def write_pairs(seed, path):
    """Training does not show some pairs of last digits. All prompts with these pairs are held out.
    The column `kind` says if a row's pair is seen."""
    pairs = [*combinations_with_replacement("0123456789", 2)]
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:UNSEEN]
    unseen = [{*pairs[i]} for i in chosen]
    rows = {"train": [], "eval": []}
    for file in ("eval", "train"):
        for row in read_rows(BENCHMARK / f"default/{file}.jsonl"):
            a, b = row["prompt"].rstrip("=").split("+")
            if {a[-1], b[-1]} in unseen:
                rows["eval"].append(row | dict(kind="unseen"))
            else:
                rows[file].append(row | dict(kind="seen"))
    for file in rows:
        write_rows(Path(f"{path}_{file}.jsonl"), rows[file])


def run_pairs(jobs, smoke):
    """Train without some pairs: the right answers to held-out sums with seen pairs, and to all with
    unseen pairs."""

    def finish(job, result):
        scores = {}
        for row in result["eval_rollouts"]:  # of the first evaluation and of the last
            time = "after" if row["iteration"] else "before"
            scores.setdefault(f"{row['columns']['kind']}_{time}", []).append(row["score"])
        return named[job] | {name: round(mean(scores[name]), 4) for name in sorted(scores)}

    named = {}
    with tempfile.TemporaryDirectory() as folder:
        for (script, flags), names in jobs.items():
            path = f"{folder}/{names['seed']}"
            write_pairs(names["seed"], path)
            named[script, flags.replace("PAIRS", path)] = names
        return run_all(list(named), finish)


PAIRS = "--eval-every 1000 --num-sample-generations 0 --save-rollouts"
PAIRS += " --dataset PAIRS_train.jsonl --eval-dataset PAIRS_eval.jsonl"
EPISODES = dict(rloo=16384, grpo=16384, ppo=8192)


# ---- what pairs are worth
PAIRS_OF_METHODS = (
    ("rloo.py", "grpo.py"),
    ("rloo.py", "rloo.py --num-ppo-epochs 2"),
    ("rloo.py --num-ppo-epochs 2", "rloo.py --num-ppo-epochs 2 --cliprange 0.05"),
    ("ppo.py --num-ppo-epochs 1", "ppo.py --num-ppo-epochs 2"),
    ("rloo.py", "rloo.py --rloo-k 8"),
    ("rloo.py", "ppo.py --num-ppo-epochs 1"),
)
PAIRED = []
for method in dict.fromkeys(sum(PAIRS_OF_METHODS, ())):
    script, _, own = method.partition(".py")
    PAIRED.append((dict(method=method), script, own))


# ---- a real model
SMOLLM2 = "--reward benchmark/smollm2/tasks.py:score --response-length 24 --kl-coef 0"
SMOLLM2 += " --per-device-train-batch-size 16 --model-path benchmark/smollm2/model"
SMOLLM2 += " --dataset benchmark/smollm2/chain_sum_train.jsonl --num-sample-generations 0"
WITHOUT_TRAINING = f"{SMOLLM2} --total-episodes 0 --save-rollouts"
TINY = f"{BUILT_IN} --response-length 8 --total-episodes 16 --batch-size 16"
SAMPLES = {"train": 4, "eval": 8}  # of each of 140 and 60 questions
TEMPERATURES = (0.1, 0.3, 0.6, 1.0)


def run_passes(jobs, smoke):
    """Train a real model, and then sample from it at each temperature: how many answers to each
    question are right. Without jobs it is the model before training."""
    with tempfile.TemporaryDirectory() as folder:
        models = {} if jobs else {"": 0}  # flags that name the model: seed
        trainings = []
        for job, names in jobs.items():
            path = f"{folder}/{names['seed']}"
            trainings.append((*job, path))
            models[f"--model-path {path}/model"] = names["seed"]
        run_all(trainings)
        sampled = {}
        for own, prompts, temperature in product(models, SAMPLES, TEMPERATURES):
            flags = f"{WITHOUT_TRAINING} --eval-dataset benchmark/smollm2/chain_sum_{prompts}.jsonl"
            flags += f" --eval-k {SAMPLES[prompts]} --eval-temperature {temperature}"
            names = dict(seed=models[own], temperature=temperature, prompts=prompts)
            sampled["rloo", f"{flags} {TINY if smoke else ''} {own}"] = names
        chosen = [*sampled][:1] if smoke else [*sampled]
        return run_all(chosen, lambda job, result: sampled[job] | right_answers(result))


def right_answers(result):
    """The right samples of each question."""
    counts = Counter()
    for row in having(result["eval_rollouts"], iteration=0):
        counts[row["prompt"]] += int(row["score"])
    return dict(right=[right for _, right in sorted(counts.items())])


def train_smollm2(script, own, seeds):
    flags = f"{SMOLLM2} --total-episodes 640 --learning-rate 1e-5"
    return Part([({}, script, own)], flags, seeds, measure=run_passes, short=TINY)


# ---- the parts
METRICS = "objective/scores eval/scores response_length_mean val/num_eos_tokens"
PARTS = {
    name: Part(runs, f"{flags} --eval-every 8", SEEDS, METRICS)
    for name, (runs, flags) in FLAGS.items()
}
PARTS["loss"].prepare = need_policy
PARTS["loss"].short += f" --model-path {POLICY}"
TWO_SAMPLES = f"{Part.short} --eval-k 2"
BEST = "eval/scores eval/best_of_16"
PARTS |= {
    "policy": Part([], measure=make_policy),
    "coin": Part(COINS, f"{SAMPLED} --eval-reward exact_match", SEEDS, BEST),
    "form": Part(FORMS, f"{SAMPLED} {LENGTH}", SEEDS, BEST, prepare=need_policy),
    "rates": Part(of_methods(lambda method: OWN_RATES), OFTEN, range(1, 4)),
    "methods": Part([], OFTEN, OTHER_SEEDS, prepare=choose_rates),
    "paired": Part(PAIRED, OFTEN, range(1, 11)),
    "equal": Part(PAIRED[:1], OFTEN, range(11, 21)),
    "pairs": Part(
        [({}, script, f"--total-episodes {EPISODES[script]}") for script in SCRIPTS],
        PAIRS,
        OTHER_SEEDS,
        measure=run_pairs,
    ),
    "smollm2_start": Part([], measure=run_passes),
    "smollm2_rloo": train_smollm2("rloo", "--rloo-k 8", SEEDS),
    "smollm2_grpo": train_smollm2("grpo", "--num-generations 8", (1,)),
    "smollm2_ppo": train_smollm2("ppo", "--num-ppo-epochs 1", (1,)),
}
PARTS["coin"].short = TWO_SAMPLES
PARTS["form"].short = f"{TWO_SAMPLES} --model-path {POLICY}"


# ---- the table, and what sentences say


def measured(part, **wanted):
    """The rows of a part that have these entries."""
    return having(read_result(RESULT)["rows"], part=part, **wanted)


def scores(runs, of, metric="eval/scores"):
    """The last score of each run (`end`), or the mean of all (`run`)."""
    return [row[metric][-1] if of == "end" else mean(row[metric]) for row in runs]


def compare_methods():
    """Print for each pair of methods Holm's p of their right answers."""
    methods = grouped(measured("methods"), "method")
    pairs = [*combinations(methods, 2)]
    differences = []
    for pair in pairs:
        differences.append(np.subtract(*(scores(methods[name], "end") for name in pair)))
    for pair, p in zip(pairs, holm(sign_flips(np.array(differences)))):
        print(*pair, f"p = {p:.3f}", sep=" | ")


def pairing():
    """What ten pairs are worth, by the last evaluation and by the mean of all, with 95 % intervals
    by bootstrap over the seeds."""
    methods = grouped(measured("paired"), "method")
    rng = np.random.default_rng(0)
    for pair in PAIRS_OF_METHODS:
        cells = []
        for of in ("end", "run"):
            both = np.array([scores(methods[name], of) for name in pair])
            drawn = [worth(*both[:, rng.integers(10, size=10)]) for _ in range(1000)]
            low, high = np.quantile(drawn, (0.025, 0.975))
            cells.append(f"{worth(*both):.0f} ({low:.0f} to {high:.0f})")
        yield [*(f"`{name}`" for name in pair), *cells]


def equal_methods():
    """How often the test sees a difference between a method and itself, with other seeds."""
    runs = having(measured("paired"), method="rloo.py") + measured("equal")
    rng = np.random.default_rng(0)
    draws = np.array([rng.permutation(len(runs)) for _ in range(200)])
    cells = []
    for of in ("end", "run"):
        one, other = np.split(np.array(scores(runs, of))[draws], 2, axis=1)
        count = np.sum(sign_flips(one - other) < ALPHA)
        cells.append(f"{count} of {len(draws)}")
    yield ["`rloo.py`", "`rloo.py`, with other seeds", *cells]


def smollm2_shares(runs):
    """Of a model, on held-out questions: the right answers and pass@8 at temperature 1, and each at
    the temperature that is best on training questions."""
    shares = {}
    for row in runs:
        right = mean(row["right"]) / SAMPLES[row["prompts"]]
        solved = mean(count > 0 for count in row["right"])
        shares[row["prompts"], row["temperature"]] = right, solved

    def best(place):
        return max(TEMPERATURES, key=lambda t: shares["train", t][place])

    return (*shares["eval", 1.0], shares["eval", best(0)][0], shares["eval", best(1)][1])


def smollm2():
    """A real model before and after training: means over the seeds."""
    [before] = of_seeds("smollm2_start")
    yield ["before", *(f"{share:.2f}" for share in before)]
    for script in SCRIPTS:
        found = of_seeds(f"smollm2_{script}")
        if len(found) == 1:
            yield [f"{script.upper()}, one seed", *(f"{share:.2f}" for share in found[0])]
            continue
        gains = np.subtract(found, before)
        yield [f"{script.upper()}, {len(found)} seeds", *map(with_band, np.transpose(found))]
        yield ["its gain", *map(with_band, np.transpose(gains))]


def of_seeds(part):
    """The shares of each seed's model."""
    return [smollm2_shares(runs) for runs in grouped(measured(part), "seed").values()]


# ---- the figure
PANELS = (  # part, metric and title
    ("group", "eval/scores", "RLOO: k completions per prompt"),
    ("epochs", "eval/scores", "PPO: epochs x mini-batches"),
    ("clip", "eval/scores", "RLOO: clip range, eight updates a rollout"),
    ("rate_rloo", "eval/scores", "RLOO: --learning-rate"),
    ("rate_grpo", "eval/scores", "GRPO: --learning-rate"),
    ("rate_ppo", "eval/scores", "PPO: --learning-rate"),
    ("loss", "eval/scores", "GRPO: losses and scalings"),
    ("loss", "response_length_mean", "its tokens of an answer"),
    ("kl", "eval/scores", "RLOO, a reward model: --kl-coef"),
    ("kl", "objective/scores", "its learned score"),
    ("eos", "eval/scores", "GRPO, a judge: --missing-eos-penalty"),
    ("eos", "val/num_eos_tokens", "its answers that end, of 64"),
)


def plot(rows, folder):
    panels = [(title, having(rows, part=part), metric) for part, metric, title in PANELS]
    draw.figure_of(folder / "claims.png", 3, panels)
    compare_methods()


if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
