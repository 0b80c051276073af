"""A 135M chat model learns a task from a rule, on a CPU, by each of the three scripts.

    python benchmark/smollm2/prepare.py           # the model and the questions
    python benchmark/smollm2/train.py             # all parts
    python benchmark/smollm2/train.py before rloo # some of them; results of the others stay

Before and after training, 4 answers to each of 60 held-out questions are sampled, with the same
random numbers for every model. The standard error is that of questions, because answers to one
question are not independent. Writes train.json, samples.jsonl, with an answer of every model to
each question, and curves.png. A smoke run trains the built-in policy on sums.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
from run import BENCHMARK, POLICY, ROOT, SCRIPTS, Part, main, read_rows, run

RESULT = Path(__file__).with_suffix(".json")
FOLDER = RESULT.parent
SEEDS = (1, 2)
EVAL_K, TEMPERATURE, RESPONSE_LENGTH = 4, 0.8, 24
FLAGS = (
    "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl "
    "--reward benchmark/smollm2/chain_sum.py:score "
    "--eval-dataset benchmark/smollm2/chain_sum_eval.jsonl --eval-every 10 "
    f"--eval-k {EVAL_K} --eval-temperature {TEMPERATURE} --temperature {TEMPERATURE} "
    f"--response-length {RESPONSE_LENGTH} --batch-size 64 --per-device-train-batch-size 16 "
    "--total-episodes 1920 --learning-rate 1e-5 --warmup-steps 4 --kl-coef 0.02 "
    "--missing-eos-penalty 0.5"
)
MORE = {"rloo": "--rloo-k 8", "grpo": "--num-generations 8", "ppo": "--num-ppo-epochs 1"}
SHORT = (
    f"--model-path {POLICY} --dataset benchmark/default/train.jsonl --reward exact_match "
    "--eval-dataset benchmark/default/eval.jsonl --total-episodes 128 --eval-every 1 "
    "--learning-rate 1e-4 --response-length 8"
)
KEPT = ("episode", "objective/scores", "objective/kl", "val/num_eos_tokens", "response_length_mean")


def sample_held_out(model: Path, smoke: bool) -> dict:
    """Sample `EVAL_K` answers to every held-out question. Returns shares, and the texts of the
    first ones."""
    importlib.import_module("torch").set_num_threads(1)
    win_rate = importlib.import_module("win_rate")
    data, length = FOLDER / "chain_sum_eval.jsonl", RESPONSE_LENGTH
    if smoke:
        data, length, score = BENCHMARK / "default" / "eval.jsonl", 8, win_rate.rloo.exact_match
    else:
        score = importlib.import_module("chain_sum").score
    flags = dict(dataset=str(data), response_length=length, temperature=TEMPERATURE)
    args = win_rate.Args(model=str(model), baseline="", judge="", batch_size=240, **flags)
    answers, ended, lengths = win_rate.sample(args, args.model, 1000, k=EVAL_K)
    right = [row["answer"] for row in read_rows(data) for _ in range(EVAL_K)]
    by_question = np.reshape(score(answers, right), (-1, EVAL_K)).mean(1)
    return {
        "right": round(float(by_question.mean()), 4),
        "standard_error": round(float(by_question.std(ddof=1) / len(by_question) ** 0.5), 4),
        "ended": round(ended, 4),
        "tokens": round(float(np.mean(lengths)), 2),
        "answers": answers[::EVAL_K],
    }


def measure_before(jobs: dict, smoke: bool) -> list[dict]:
    return [dict(held_out=sample_held_out(POLICY if smoke else FOLDER / "model", smoke))]


def measure(jobs: dict, smoke: bool) -> list[dict]:
    """Run each job, and sample from what it trained."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary) if smoke else ROOT / "runs"
        for (script, flags), names in jobs.items():
            folder = runs / f"smollm2_{script}_{names['seed']}"
            result = run(script, flags, folder)
            row = names | dict(seconds=round(result["metrics"][-1]["seconds"]))
            for name in KEPT:
                row[name] = [round(step[name], 4) for step in result["metrics"][1:]]
            for name in ("episode", "eval/scores", f"eval/best_of_{EVAL_K}"):
                kept = [round(step[name], 4) for step in result["evaluations"]]
                row[name.replace("episode", "eval_episode")] = kept
            rows.append(row | dict(held_out=sample_held_out(folder / "model", smoke)))
    return rows


def plot(rows: list[dict], folder: Path):
    """Draw the figure, and write the samples."""
    questions = read_rows(FOLDER / "chain_sum_eval.jsonl")
    with open(folder / "samples.jsonl", "w", encoding="utf-8") as file:
        for i, question in enumerate(questions):
            sample = dict(question=question["prompt"][-1]["content"], answer=question["answer"])
            for row in rows:
                name = f"{row['part']} {row['seed']}" if "seed" in row else row["part"]
                sample[name] = row["held_out"]["answers"][i]
            file.write(json.dumps(sample) + "\n")
    figure, [[right, ends]] = draw.panels(1, 2, width=4.2)
    answers = [question["answer"] for question in questions]
    constant = max(map(answers.count, answers)) / len(answers)
    for row in rows:
        if row["part"] == "before":
            continue
        label = dict(color=draw.COLORS[row["part"]])
        if row["seed"] == 1:
            label["label"] = f"{row['part']}.py"
        right.plot(row["eval_episode"], row["eval/scores"], ".-", **label)
        ended = np.array(row["val/num_eos_tokens"]) / 64
        ends.plot(row["episode"], draw.running_mean(ended, 5), lw=1.2, **label)
    right.axhline(constant, color="gray", ls=":", lw=1, label="best constant answer")
    right.set(
        title="SmolLM2-135M-Instruct, chain_sum",
        ylabel="held-out answers that are right",
        ylim=(0, 1),
    )
    ends.set(title="training, mean of 5 iterations", ylabel="answers that end", ylim=(0, 1))
    right.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.12))
    draw.in_thousands(right)
    draw.in_thousands(ends)
    draw.save(figure, folder / "curves.png")


NEEDS = "smollm2/prepare.py"
PARTS = {"before": Part({}, measure=measure_before, needs=NEEDS)}
for script in SCRIPTS:
    jobs = {}
    for seed in SEEDS:
        flags = f"{FLAGS} {MORE[script]}"
        jobs[script, f"{flags} --seed {seed}"] = dict(seed=seed, flags=flags)
    PARTS[script] = Part(jobs, measure=measure, short=SHORT, needs=NEEDS)

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS, plot)
