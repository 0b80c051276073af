"""How much memory does a run need? A formula, and the peaks of runs of SmolLM2 beside it.

    python benchmark/hardware/memory.py

It needs `benchmark/smollm2/prepare.py`. Each run has two iterations on a CPU, each of 8 episodes in
one training pass. Every completion is as long as it may be. The peak is that of all tensors: of the
models, and of what torch's profiler counts after they are loaded. docs/recipes.md has the table,
and the formula in words. Writes memory.json.
"""

import re
import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in (".", "throughput")]
from run import BUILT_IN, Part, main, read_result
from tally_worker import force_lengths

RESULT = Path(__file__).with_suffix(".json")
GIB = 2**30
# Bytes for each weight: the weight itself, its gradient, AdamW's two moments, the reference.
BYTES = {
    "all weights, float32": (4, 4, 8, 4),
    "all weights, bfloat16": (4, 4, 8, 2),
    "LoRA, float32": (4, 0, 0, 0),
    "LoRA, bfloat16": (2, 0, 0, 0),
}
EPISODES, GROUPS, PROMPT = 8, 2, 36  # of a micro-batch; tokens of each prompt
LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49152  # SmolLM2-135M
ADAPTERS = 0.01  # of the weights: about the share of rank 16 in a model of 1.5B


def watch(module):
    """Print how many bytes the tensors hold at most, and how many weights there are."""
    import torch

    force_lengths(module)
    cpu = torch.profiler.ProfilerActivity.CPU
    profile = torch.profiler.profile(activities=[cpu], profile_memory=True)
    load_reference = module.load_reference
    loaded = []

    def load_and_start(args, policy, *more):
        reference = load_reference(args, policy, *more)
        models = [model for model in (policy, reference) if isinstance(model, torch.nn.Module)]
        loaded.append(sum(weight.nbytes for model in models for weight in model.parameters()))
        profile.start()
        return reference

    def stop_and_print(args, policy, *_):
        profile.stop()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = peak = loaded[0]
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in policy.parameters() if not p.requires_grad)
        print("memory", peak, trained, frozen)

    module.load_reference = load_and_start
    module.save_result = stop_and_print


def to_row(result: dict) -> dict:
    """What is kept of a run."""
    [found] = re.findall(r"^memory (\d+) (\d+) (\d+)$", result["output"], re.M)
    return dict(zip(("peak", "trained", "frozen"), map(int, found)))


def formula(row: dict) -> float:
    """The bytes that a run of SmolLM2 should need."""
    models = sum(BYTES[row["setting"]]) * (row["frozen"] or row["trained"])
    if row["frozen"]:
        models += 16 * row["trained"]  # the adapters
    tokens = EPISODES * row["response"] + GROUPS * PROMPT
    width = 2 if "bfloat16" in row["setting"] else 4
    activations = tokens * LAYERS * (8 * HIDDEN + 4 * INTERMEDIATE) * width
    if row["checkpointing"]:
        activations = 0  # nearly
    logits = min(EPISODES * row["response"] * VOCABULARY, 2**25)
    return models + activations + 12 * logits


def table():
    """The cells of each row of the table in docs/recipes.md."""
    for row in read_result(RESULT)["rows"]:
        bytes_each = BYTES[row["setting"]]
        per_weight = sum(bytes_each) + 16 * ADAPTERS * ("LoRA" in row["setting"])
        sizes = [f"{billions * 1e9 * per_weight / GIB:.1f}" for billions in (0.5, 1.5, 7)]
        name = f"{row['setting']}, {row['response']} tokens"
        if row["checkpointing"]:
            name += ", gradient checkpointing"
        measured = (f"{formula(row) / GIB:.2f}", f"{row['peak'] / GIB:.2f}")
        yield name, *bytes_each, f"{per_weight:g}", *sizes, *measured


FLAGS = "--model-path benchmark/smollm2/model --dataset benchmark/smollm2/chain_sum_train.jsonl"
FLAGS += " --reward benchmark/throughput/rewards.py:share_of_letters --total-episodes 16"
FLAGS += f" --batch-size {EPISODES} --per-device-train-batch-size {EPISODES}"
RUNS = []
for setting in BYTES:
    names = dict(setting=setting, response=24, checkpointing=False)
    weights, dtype = setting.split(", ")
    own = f"--dtype {dtype} --response-length 24"
    if weights == "LoRA":
        own += " --lora-r 16"
    RUNS.append((names, "rloo", own, watch))
for own in ("", " --gradient-checkpointing"):
    names = dict(setting="all weights, float32", response=120, checkpointing=bool(own))
    RUNS.append((names, "rloo", f"--dtype float32 --response-length 120{own}", watch))
PARTS = {"memory": Part(RUNS, FLAGS, keep=to_row, short=BUILT_IN, needs="smollm2/prepare.py")}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
