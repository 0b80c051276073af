"""How far are ratios from 1 in bfloat16 if the policy does not change? Two sources of log p_old are compared.

    python benchmark/smollm2/prepare.py                               # the model
    python benchmark/hardware/bfloat16_ratios.py                      # all cases, a quarter of an hour on one core
    python benchmark/hardware/bfloat16_ratios.py moved                # one case, the others are kept

    sampling    log p_old is what sampling computed, token by token. This is what the scripts do
    a pass      log p_old is what a training pass computed after the rollout

A script's own `main` samples completions of SmolLM2-135M-Instruct in bfloat16 and passes twice over them, with learning
rate 0. So every true ratio is 1, and what is measured is rounding. The backward passes are left out: they would change
nothing. Rounding depends on the shape of a micro-batch, which differs from pass to pass: an epoch has several
mini-batches, and the episodes of groups with equal scores are skipped. The cases:

    short       sums of one-digit numbers, up to 24 tokens. Half of the groups are skipped. There are two mini-batches,
                and micro-batches of 10 to 12 episodes
    long        as `short`, but stories of up to 256 tokens
    ppo         as `short`, by ppo.py, which does not share the prompts of a group, and skips no episodes
    same        as `short` with one mini-batch and no skipped episodes: all passes have micro-batches of the same shapes
    moved       as `same`, but after the pass for log p_old every weight moves by 1e-6 up or down, at random. A step of
                AdamW at a learning rate of 1e-6 moves them as far. It changes the policy very little
    float32     as `moved`, in float32. It shows how far `moved` changes the policy

The shares are those of the ratios that --cliprange 0.2 would clip, of tokens and of completions, and those of GRPO's
ratio of a sequence (the mean log-ratio of its tokens) that GSPO's range of 3e-4 below 1 and 4e-4 above 1 would clip.
Deviations are standard deviations of the log-ratio. Both epochs count. The results are merged into a JSON file.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path

import accelerate
import torch

HERE = Path(__file__).resolve()
RESULT = HERE.with_suffix(".json")
BENCHMARK = HERE.parent.parent
sys.path.insert(0, str(BENCHMARK.parent))
sys.path.insert(0, str(BENCHMARK / "throughput"))
SHORT = dict(
    script="rloo",
    dtype="bfloat16",
    episodes=128,
    response_length=24,
    mini_batches=2,
    one_in=2,  # so many groups: one is trained, the others are skipped
    micro_batch=12,
    move=0.0,  # of the weights, after the pass for log p_old
)
SAME = SHORT | dict(mini_batches=1, one_in=1)
CASES = dict(
    short=SHORT,
    long=SHORT | dict(episodes=64, response_length=256),
    ppo=SHORT | dict(script="ppo"),
    same=SAME,
    moved=SAME | dict(move=1e-6),
    float32=SAME | dict(move=1e-6, dtype="float32"),
)


def scores_that_differ(completions: list, one_in: int) -> list[float]:
    """One in so many groups of four has scores that differ. The episodes of the others are skipped."""
    return [number * float(number // 4 % one_in == 0) for number in range(len(completions))]


def one_in_1(completions: list, **_) -> list[float]:
    return scores_that_differ(completions, one_in=1)


def one_in_2(completions: list, **_) -> list[float]:
    return scores_that_differ(completions, one_in=2)


def write_prompts(name: str, folder: Path) -> str:
    """The dataset of a case."""
    if name != "long":
        return str(BENCHMARK / "smollm2" / "chain_sum_train.jsonl")
    from throughput import SENTENCES

    path = folder / "stories.jsonl"
    chats = [[dict(role="user", content=f"Continue this story in 300 words: {text}")] for text in SENTENCES]
    path.write_text("".join(json.dumps(dict(prompt=chat)) + "\n" for chat in chats))
    return str(path)


def record(name: str, case: dict, folder: Path) -> tuple:
    """Run the script's main -> its batch, log p_old of a pass, and the log-probabilities of both epochs.

    Log-probabilities: [episodes, response], and nan for an episode that was skipped.
    """
    script = importlib.import_module(case["script"])
    one_pass = script.completion_logprobs
    found = []  # the batch, and log p_old
    epochs = []

    def generate_and_pass(args, accelerator, policy, *more, generate=script.generate):
        batch = generate(args, accelerator, policy, *more)
        model = accelerator.unwrap_model(policy)
        found.extend([batch, script.run_whole_batch(args, accelerator, one_pass, model, batch)])
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            sign = torch.randint(2, weight.shape, generator=generator) * 2 - 1
            weight.data += case["move"] * sign
        return batch

    def record_epochs(function, first=lambda outputs: outputs):
        def recording(args, model, batch, episodes):
            outputs = function(args, model, batch, episodes)
            if torch.is_grad_enabled():
                # An epoch passes over an episode once at most.
                if not epochs or not epochs[-1][episodes].isnan().all():
                    epochs.append(torch.full_like(found[1], torch.nan))
                epochs[-1][episodes] = first(outputs).detach()
            return outputs

        return recording

    script.generate = generate_and_pass
    script.completion_logprobs = record_epochs(one_pass)
    if case["script"] == "ppo":
        both = script.completion_logprobs_and_values
        script.completion_logprobs_and_values = record_epochs(both, first=lambda outputs: outputs[0])
    accelerate.Accelerator.backward = lambda self, loss: None
    script.check_flags = lambda args: None  # rloo.py refuses bfloat16 with several updates
    flags = dict(
        model_path=str(BENCHMARK / "smollm2" / "model"),
        dataset=write_prompts(name, folder),
        reward=f"{HERE}:one_in_{case['one_in']}",
        dtype=case["dtype"],
        learning_rate=0.0,
        kl_coef=0.0,
        num_ppo_epochs=2,
        num_mini_batches=case["mini_batches"],
        batch_size=case["episodes"],
        total_episodes=case["episodes"],
        response_length=case["response_length"],
        per_device_train_batch_size=case["micro_batch"],
        num_sample_generations=0,
        output_dir=str(folder / "run"),
    )
    script.main(script.Args(**flags))
    return *found, epochs


def compare(old, new, mask) -> dict:
    """Shares of clipped ratios, and deviations of log-ratios. old, new, mask: [episodes, response]"""
    token = (new - old)[mask]
    completion = ((new - old) * mask).sum(1)
    sequence = completion / mask.sum(1)

    def outside(logratio, low, high):
        ratio = logratio.double().exp()
        return float(((ratio < 1 - low) | (ratio > 1 + high)).float().mean())

    return dict(
        tokens_outside=outside(token, 0.2, 0.2),
        completions_outside=outside(completion, 0.2, 0.2),
        sequences_outside=outside(sequence, 3e-4, 4e-4),
        token_deviation=float(token.std()),
        completion_deviation=float(completion.std()),
        sequence_deviation=float(sequence.std()),
    )


def measure(name: str) -> dict:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        batch, old, epochs = record(name, case, Path(folder))
    if len(epochs) != 2:
        raise RuntimeError(f"{name}: two epochs were expected, not {len(epochs)}")
    new = torch.cat(epochs)
    trained = ~new.isnan().all(1)
    mask = batch.mask.repeat(2, 1)[trained]
    lengths = batch.lengths.float()
    return dict(
        case=name,
        completions=int(trained.sum()) // 2,
        mean_tokens=float(lengths.mean()),
        sampling=compare(batch.logprobs.repeat(2, 1)[trained], new[trained], mask),
        a_pass=compare(old.repeat(2, 1)[trained], new[trained], mask),
    )


def main():
    names = sys.argv[1:] or list(CASES)
    if len(names) > 1:  # A case changes its script, so it gets a process of its own.
        import subprocess

        for name in names:
            subprocess.run([sys.executable, HERE, name], check=True)
        return
    [name] = names
    row = measure(name)
    print(json.dumps(row, indent=1))
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else []
    rows = [other for other in rows if other["case"] != name] + [row]
    rows.sort(key=lambda row: list(CASES).index(row["case"]))
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
