"""What only a GPU can tell, in one command, for a quarter of an hour of an H100 or H200.

    pip install -r requirements-dev.txt trl==1.16.0 math-verify==0.9.0
    python benchmark/throughput/gpu.py --seconds 700        # what decides most comes first
    python benchmark/throughput/gpu.py pieces profile       # these; results of the others stay
    python benchmark/throughput/gpu.py --smoke              # all with a tiny model, without a GPU

    pieces          updates that read 2**22, 2**24 and 2**26 logits at once, and three with other
                    settings. `predicted_gib` is the peak by memory.py
    tokens64_micro16   Tally beside TRL, as in throughput.py: completions of 64 tokens,
                    micro-batches of 16 episodes. `eager` has no recorded steps
    profile         where an iteration's time goes: `reference` is the reference's pass,
                    `token_logprobs` the forward pass of training

These take 510 seconds at most. What follows decides less:

    lora_7B         does LoRA of 7B with prompts of 1,000 tokens fit, beside TRL?
    smollm2         do all scripts learn? Needs benchmark/smollm2/prepare.py, but no reasoning-gym

A part is a pair of runs, or one for each script. Every run has a process of its own. Nothing is
downloaded: the models are random, but for the last part. Where TRL is missing, Tally runs alone.

A part has a time limit, and begins if this much is left of --seconds. Its runs that take longer, or
fail, leave their error in the row, and the program goes on. gpu.json is written after each part. At
the end the program says what was left out. Without a GPU steps are recorded with the tests'
stand-in for a CUDA graph.
"""

import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import throughput
import tyro
from run import ROOT, import_script, measure_part
from tally_worker import profile, record_on_cpu
from throughput import FEW, Case, in_turn, pairs, part, read_at_once, start, tally

RESULT = Path(__file__).with_suffix(".json")
curves = import_script(ROOT / "benchmark/default/curves.py")


def case(model: str, sizes: str, prompt: int, completion: int, **changes) -> Case:
    """Random weights of these sizes, and lengths in tokens."""
    settings = dict(batch=64, micro_batch=16, steps=5, pairs=1, algorithms=("rloo",))
    settings |= dict(prompt_tokens=prompt, completion_tokens=completion)
    about = f"a random Llama {sizes}, in bfloat16, {prompt:,} and {completion} tokens"
    return Case(about, model, dtype="bfloat16", **settings | changes)


# ---- the row of a job


def same_text(script):
    """The verifier of the sums, without reasoning-gym."""

    def verify(text, entry):
        return text == entry["answer"]

    sys.modules["reasoning_gym"] = SimpleNamespace(get_score_answer_fn=lambda task: verify)


def predict(script: str, flags: str, tokens: int, *edits) -> dict:
    """What memory.py says of the peak of a run, whose prompts have so many tokens."""
    import memory

    os.environ["ACCELERATE_USE_CPU"] = "true"
    module = import_script(script)
    for edit in edits:
        edit(module)
    args = module.check_flags(tyro.cli(module.Args, args=flags.split()))
    row = memory.measure(module, args, tokens)
    return dict(predicted_gib=memory.peak(row) / memory.GIB)


def with_prediction(variants: dict, case: Case, script: str, flags: str) -> dict:
    """`in_turn`, and beside each peak the one that memory.py predicts."""
    row = in_turn(variants, case, script, flags)
    for name, (own, *edits) in variants.items():
        row[name] |= start(predict, script, f"{flags} {own}", case.prompt_tokens, *edits)
    return row


def learned(case: Case, script: str, flags: str) -> dict:
    run = tally(script, flags, same_text)
    if "failed" in run:
        raise SystemExit(run["failed"])
    return curves.to_curve(run)


# ---- the parts of the program

PIECES = {f"pieces_{n}": ["", partial(read_at_once, count=2**n)] for n in (22, 24, 26)}
PIECES |= dict(
    micro_4=["--per-device-train-batch-size 4"],
    checkpointing=["--gradient-checkpointing"],
    lora=["--lora-r 16"],
)
LEARNED = [({}, script, own) for script, own in curves.SMOLLM2_FLAGS.items()]

qwen = partial(case, "0.5B", "with the sizes of Qwen2.5-0.5B")
SHORT = qwen(256, 64)
BOTH = qwen(256, 64, algorithms=("rloo", "grpo"))
LARGE = case(
    "7B", "with the sizes of Mistral-7B", 1000, 64, lora_r=16, batch=16, micro_batch=2, steps=3
)
TABLE = {  # each part, and its seconds at most
    "pieces": (300, part(partial(with_prediction, PIECES), qwen(256, 512, steps=4))),
    "tokens64_micro16": (150, pairs(BOTH, eager=["--no-cuda-graphs"], trl=[])),
    "profile": (60, pairs(qwen(256, 16), tally=["", profile])),
    "lora_7B": (200, pairs(LARGE, trl=[])),
    "smollm2": (200, part(learned, SHORT, LEARNED, curves.SMOLLM2)),
}
PARTS = {name: own for name, (_, own) in TABLE.items()}
PARTS["smollm2"].short += f" {curves.TINY} {FEW}"
for own in PARTS.values():
    own.short += " --share-prompts False"  # as on a GPU


def main(
    parts: tyro.conf.Positional[tuple[str, ...]] = (), seconds: float = 700, smoke: bool = False
):
    import torch

    os.chdir(ROOT)
    if not torch.cuda.is_available():
        if not smoke:
            raise SystemExit("There is no GPU. Only --smoke needs none.")
        throughput.EDITS.append(record_on_cpu)
    end = time.time() + seconds
    left_out = []
    for name in parts or PARTS:
        limit, own = TABLE[name]
        if smoke:
            own.rows(smoke=True)
            continue
        throughput.ends = time.time() + limit
        if throughput.ends > end:
            left_out.append(name)
            continue
        try:
            measure_part(RESULT, name, PARTS)
        except (Exception, SystemExit):
            traceback.print_exc()
            left_out.append(name)
    print(f"left out: {', '.join(left_out) or 'nothing'}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
