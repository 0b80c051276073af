"""A 135M chat model learns a task from a rule, on a CPU, by each of the three scripts.

    python benchmark/smollm2/prepare.py                               # the model and the questions, half a minute
    python benchmark/smollm2/train.py                                 # six runs, 20 minutes of one core each, PPO 50
    python benchmark/smollm2/train.py rloo 1                          # one of them; results of the others stay
    python benchmark/smollm2/train.py --plot                          # only the figure again

Before and after training, 4 answers to each of 60 held-out questions are sampled, with the same random numbers for
every model. The standard error is that of questions, because answers to one question are not independent. Writes
results.json, samples.jsonl, with an answer of every model to each question, and curves.png.
"""

import json
import sys
from pathlib import Path

import numpy as np
from chain_sum import score

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw
import win_rate
from run import ROOT, SCRIPTS, read_rows, run, write_lines

FOLDER = Path(__file__).resolve().parent
SEEDS = (1, 2)
EVAL_K, TEMPERATURE, RESPONSE_LENGTH = 4, 0.8, 24
FLAGS = (
    "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl --reward "
    "benchmark/smollm2/chain_sum.py:score --eval-dataset benchmark/smollm2/chain_sum_eval.jsonl --eval-every 10 "
    f"--eval-k {EVAL_K} --eval-temperature {TEMPERATURE} --temperature {TEMPERATURE} --response-length "
    f"{RESPONSE_LENGTH} --batch-size 64 --per-device-train-batch-size 16 --total-episodes 1920 --learning-rate 1e-5 "
    "--warmup-steps 4 --kl-coef 0.02 --missing-eos-penalty 0.5"
)
MORE = {"rloo": "--rloo-k 8", "grpo": "--num-generations 8", "ppo": "--num-ppo-epochs 1"}


def held_out(model_path: Path) -> dict:
    """Sample `EVAL_K` answers to every held-out question -> shares, and the texts of the first ones."""
    flags = dict(dataset=str(FOLDER / "chain_sum_eval.jsonl"), response_length=RESPONSE_LENGTH, temperature=TEMPERATURE)
    args = win_rate.Args(model=str(model_path), baseline="", judge="", batch_size=240, **flags)
    answers, ended, lengths = win_rate.sample(args, args.model, 1000, k=EVAL_K)
    right = [row["answer"] for row in read_rows(Path(args.dataset)) for _ in range(EVAL_K)]
    by_question = np.reshape(score(answers, right), (-1, EVAL_K)).mean(1)
    return {
        "right": round(float(by_question.mean()), 4),
        "standard_error": round(float(by_question.std(ddof=1) / len(by_question) ** 0.5), 4),
        "ended": round(ended, 4),
        "tokens": round(float(np.mean(lengths)), 2),
        "answers": answers[::EVAL_K],
    }


def to_result(script: str, seed: int) -> dict:
    """Run a script, and sample from what it trained."""
    folder = ROOT / "runs" / f"smollm2_{script}_{seed}"
    rows = run(script, f"{FLAGS} {MORE[script]} --seed {seed}", folder)["metrics"]
    curve = {"script": script, "seed": seed, "flags": f"{FLAGS} {MORE[script]}", "seconds": round(rows[-1]["seconds"])}
    for name in ("episode", "objective/scores", "objective/kl", "val/num_eos_tokens", "response_length_mean"):
        curve[name] = [round(row[name], 4) for row in rows[1:]]
    for name in ("episode", "eval/scores", f"eval/best_of_{EVAL_K}"):
        curve[name.replace("episode", "eval_episode")] = [round(row[name], 4) for row in rows if "eval/scores" in row]
    return curve | {"after": held_out(folder / "model")}


def plot(results: list[dict]):
    figure, [[right, ends]] = draw.panels(1, 2, width=4.2)
    rows = read_rows(FOLDER / "chain_sum_eval.jsonl")
    answers = [row["answer"] for row in rows]
    constant = max(map(answers.count, answers)) / len(answers)
    for result in results:
        label = dict(color=draw.COLORS[result["script"]])
        if result["seed"] == 1:
            label["label"] = f"{result['script']}.py"
        right.plot(result["eval_episode"], result["eval/scores"], ".-", **label)
        ended = np.array(result["val/num_eos_tokens"]) / 64
        ends.plot(result["episode"], draw.running_mean(ended, 5), lw=1.2, **label)
    right.axhline(constant, color="gray", ls=":", lw=1, label="best constant answer")
    right.set(title="SmolLM2-135M-Instruct, chain_sum", ylabel="held-out answers that are right", ylim=(0, 1))
    ends.set(title="training, mean of 5 iterations", ylabel="answers that end", ylim=(0, 1))
    right.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.12))
    draw.in_thousands(right)
    draw.in_thousands(ends)
    draw.save(figure, FOLDER / "curves.png")


def main():
    path = FOLDER / "results.json"
    asked = [word for word in sys.argv[1:] if word != "--plot"]
    jobs = [(asked[0], int(asked[1]))] if asked else [(script, seed) for seed in SEEDS for script in SCRIPTS]
    runs = {(row["script"], row["seed"]): row for row in json.loads(path.read_text())}
    if "--plot" not in sys.argv:
        before, order = held_out(FOLDER / "model"), ("before", *SCRIPTS)
        runs["before", 0] = dict(script="before", seed=0, after=before)
        for job in jobs:
            runs[job] = to_result(*job)
            write_lines(path, sorted(runs.values(), key=lambda row: (order.index(row["script"]), row["seed"])))
        with open(FOLDER / "samples.jsonl", "w", encoding="utf-8") as file:
            for i, row in enumerate(read_rows(FOLDER / "chain_sum_eval.jsonl")):
                answers = {f"{script} {seed}": r["after"]["answers"][i] for (script, seed), r in runs.items() if seed}
                sample = dict(question=row["prompt"][-1]["content"], answer=row["answer"])
                file.write(json.dumps(sample | dict(before=before["answers"][i]) | answers) + "\n")
    plot([row for row in runs.values() if row["seed"]])


if __name__ == "__main__":
    main()
