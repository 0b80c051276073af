"""A 135M chat model learns a task from a rule, on a CPU: `python benchmark/smollm2_chain_sum.py`.

Trains SmolLM2-135M-Instruct with rloo.py on one-digit sums and differences (`benchmark/prepare_smollm2.py` makes the
model folder and the prompts, `benchmark/chain_sum.py` is the reward), then samples held-out questions from the model
before and after: share right, its standard error by question (the samples of one question are not independent), share
that end, the best constant answer. Writes benchmark/results/smollm2_chain_sum/. The committed run took 15 minutes on
one core of an AMD EPYC. `--evaluate-only`: the training of runs/smollm2_chain_sum is there already.
"""

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from chain_sum import score  # noqa: E402

import rloo  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RUN, RESULTS = ROOT / "runs/smollm2_chain_sum", ROOT / "benchmark/results/smollm2_chain_sum"
EVAL = "benchmark/smollm2/chain_sum_eval.jsonl"
FLAGS = (
    "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl --reward "
    f"benchmark/chain_sum.py:score --eval-dataset {EVAL} --eval-temperature 0.8 --eval-every 9 --dtype bfloat16 "
    "--rloo-k 8 --batch-size 64 --per-device-train-batch-size 16 --total-episodes 2880 --response-length 24 "
    "--temperature 0.8 --learning-rate 1e-5 --warmup-steps 4 --kl-coef 0.02 --missing-eos-penalty 0.5 "
    "--output-dir runs/smollm2_chain_sum"
).split()


def held_out(model_path: str, rows: list[dict]) -> dict:
    """Sample one completion per held-out row at temperature 0.8, with the same uniform numbers for every model."""
    tokenizer = rloo.AutoTokenizer.from_pretrained(model_path)
    language_model, _ = rloo.load_model("--model-path", model_path, rloo.AutoModelForCausalLM, torch.float32)
    model = rloo.CompletionModel(language_model, rloo.find_eos_ids(language_model, tokenizer, None), True)
    prompts = rloo.load_prompts(EVAL, None, tokenizer, None)
    uniforms = torch.from_numpy(rloo.keyed_rng(1, rloo.EVALUATION, 1000).random((len(rows), 24)))
    with torch.autocast("cpu", torch.bfloat16):
        batch = model.sample([p.token_ids for p in prompts], uniforms, 0.8)
    completions = tokenizer.batch_decode(rloo.trim_rows(batch["tokens"], batch["lengths"]), skip_special_tokens=True)
    right = score(completions, [row["answer"] for row in rows])
    by_question = collections.defaultdict(list)
    for row, value in zip(rows, right):
        by_question[row["prompt"][-1]["content"]].append(value)
    means = [np.mean(values) for values in by_question.values()]
    return {
        "right": float(np.mean(right)),
        "standard_error": float(np.std(means, ddof=1) / len(means) ** 0.5),
        "ended": float(batch["ended"].float().mean()),
        "tokens": float(batch["lengths"].float().mean()),
        "samples": len(rows),
        "questions": len(means),
        "completions": completions,
    }


def main():
    os.chdir(ROOT)
    if "--evaluate-only" not in sys.argv:
        subprocess.run([sys.executable, "rloo.py", *FLAGS], check=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in ("plan.yaml", "metrics.jsonl", "samples.jsonl"):
        shutil.copy(RUN / name, RESULTS / name)
    (RESULTS / "flags.txt").write_text("python rloo.py " + " ".join(FLAGS) + "\n")

    rows = [json.loads(line) for line in open(EVAL)]
    summary = {"before": held_out("benchmark/smollm2/model", rows), "after": held_out(str(RUN / "model"), rows)}
    answers = collections.Counter(row["answer"] for row in rows)
    summary["best_constant"] = answers.most_common(1)[0][1] / len(rows)
    with open(RESULTS / "before_after.jsonl", "w") as file:
        for row, before, after in zip(rows, summary["before"].pop("completions"), summary["after"].pop("completions")):
            entry = {"prompt": row["prompt"][-1]["content"], "answer": row["answer"], "before": before, "after": after}
            file.write(json.dumps(entry) + "\n")
    (RESULTS / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))

    metrics = [json.loads(line) for line in open(RESULTS / "metrics.jsonl")]
    training = [m for m in metrics if m["iteration"] > 0]
    evaluated = [m for m in metrics if "eval/scores" in m]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), constrained_layout=True)
    right_share = [m["eval/scores"] for m in evaluated]
    left.plot([m["episode"] for m in evaluated], right_share, "o-", label="held-out questions")
    left.axhline(summary["best_constant"], color="grey", linestyle=":", label="best constant answer")
    left.set(xlabel="episodes", ylabel="share right (T = 0.8)", ylim=(0, 1), title="SmolLM2-135M-Instruct, chain_sum")
    left.legend(frameon=False)
    episodes = [m["episode"] for m in training]
    right.plot(episodes, [m["val/num_eos_tokens"] / 64 for m in training], label="episodes that end")
    right.plot(episodes, [m["objective/kl"] for m in training], label="KL to the start, nats")
    right.set(xlabel="episodes", title="the training episodes")
    right.legend(frameon=False)
    figure.savefig(RESULTS / "curve.png", dpi=100)


if __name__ == "__main__":
    main()
