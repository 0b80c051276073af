"""What only a GPU can tell, in one command, for a quarter of an hour of an H100 or H200.

    pip install -r requirements-dev.txt trl==1.16.0 math-verify==0.9.0
    python benchmark/throughput/gpu.py --seconds 700        # what decides most comes first
    python benchmark/throughput/gpu.py compiled killed      # these; results of the others stay
    python benchmark/throughput/gpu.py --smoke              # all with a tiny model, without a GPU

    compiled        updates with compiled layers, and recorded steps of a compiled model
                    (compile_layers.patch), beside plain ones
    pieces          updates that read 2**22, 2**24 and 2**26 logits at once, and three with other
                    settings. `predicted_gib` is the peak by memory.py
    tokens64_micro16   Tally beside TRL, as in throughput.py: completions of 64 tokens,
                    micro-batches of 16 episodes. `eager` has no recorded steps
    profile         where an iteration's time goes: `reference` is the reference's pass,
                    `token_logprobs` the forward pass of training

These take 700 seconds at most. What follows was answered once, or decides less:

    lora_7B         does LoRA of 7B with prompts of 1,000 tokens fit, beside TRL?
    smollm2         do all scripts learn? Needs benchmark/smollm2/prepare.py, but no reasoning-gym
    killed          a run, and the same one that is killed twice and resumed. A distance of 0 means
                    that all bits are the same
    equal           64 completions with recorded steps and without, in float32 and in bfloat16: how
                    many differ?
    shared_prompts  updates with --share-prompts True, beside a row for each episode; prompts of
                    1,000 tokens

A part is a pair of runs, or one for each script. Every run has a process of its own. Nothing is
downloaded: the models are random, but for the last part. Where TRL is missing, Tally runs alone.

A part has a time limit, and begins if this much is left of --seconds. Its runs that take longer, or
fail, leave their error in the row, and the program goes on. gpu.json is written after each part. At
the end the program says what was left out. Without a GPU steps are recorded with the tests'
stand-in for a CUDA graph.
"""

import os
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "hardware"))
import throughput
import tyro
from kill_and_resume import FLAGS, kill_at
from rounding import count_different
from run import BUILT_IN, ROOT, import_script, measure_part, relative_distance
from tally_worker import force_lengths, profile, record_on_cpu
from throughput import FEW, Case, in_turn, pairs, part, start, tally

RESULT = Path(__file__).with_suffix(".json")
curves = import_script(ROOT / "benchmark/default/curves.py")
KILLS = dict(training=9, rollout=20)  # the call of each phase


def case(model: str, sizes: str, prompt: int, completion: int, **changes) -> Case:
    """Random weights of these sizes, and lengths in tokens."""
    settings = dict(batch=64, micro_batch=16, steps=5, pairs=1, algorithms=("rloo",))
    settings |= dict(prompt_tokens=prompt, completion_tokens=completion)
    about = f"a random Llama {sizes}, in bfloat16, {prompt:,} and {completion} tokens"
    return Case(about, model, dtype="bfloat16", **settings | changes)


# ---- the row of a job


def finished(*job) -> dict:
    """A run of Tally that must not fail."""
    run = tally(*job)
    if "failed" in run:
        raise SystemExit(run["failed"])
    return run


def recorded(case: Case, script: str, flags: str, *edits) -> dict:
    """How many completions differ with recorded steps, and without?"""
    one = finished(script, flags, *edits)
    return count_different(one, finished(script, f"{flags} --no-cuda-graphs", *edits))


def killed(case: Case, script: str, flags: str) -> dict:
    """How far is a run that is killed twice and resumed from one that is not?"""
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder, "one"), Path(folder, "two")
        kills = 0
        for phase, call in KILLS.items():
            kill = partial(kill_at, phase=phase, call=call)
            kills += "exit code -9" in tally(script, flags, kill, two).get("failed", "")
        row = count_different(finished(script, flags, one), finished(script, flags, two))
        return row | dict(kills=kills, weights=relative_distance(two, one))


def same_text(script):
    """The verifier of the sums, without reasoning-gym."""

    def verify(text, entry):
        return text == entry["answer"]

    sys.modules["reasoning_gym"] = SimpleNamespace(get_score_answer_fn=lambda task: verify)


def read_at_once(module, count):
    module.LOGITS_AT_ONCE = count


def predict(script: str, flags: str, tokens: int, *edits) -> dict:
    """What memory.py says of the peak of a run, whose prompts have so many tokens."""
    import memory

    os.environ["ACCELERATE_USE_CPU"] = "true"
    module = import_script(script)
    for edit in edits:
        edit(module)
    args = module.check_flags(tyro.cli(module.Args, args=flags.split()))
    [row] = memory.measure(module, args, tokens, [args.per_device_train_batch_size])
    return dict(predicted_gib=memory.peak(row) / memory.GIB)


def with_prediction(variants: dict, case: Case, script: str, flags: str) -> dict:
    """`in_turn`, and beside each peak the one that memory.py predicts."""
    row = in_turn(variants, case, script, flags)
    for name, (own, *edits) in variants.items():
        row[name] |= start(predict, script, f"{flags} {own}", case.prompt_tokens, *edits)
    return row


def learned(case: Case, script: str, flags: str) -> dict:
    return curves.to_curve(finished(script, flags, same_text))


# ---- the parts of the program

KILLED = [
    ({}, "rloo", "--dtype float32 --num-ppo-epochs 2"),
    ({}, "grpo", "--dtype bfloat16 --num-mini-batches 1"),
    ({}, "ppo", "--dtype float32 --num-ppo-epochs 2"),
]
KILLED_RUN = f"{BUILT_IN} {FLAGS} --per-device-train-batch-size 8 --response-length 8"
COMPILED = [({}, "rloo compile_layers.patch", "")]
RECORDED = [({}, "rloo", f"--dtype {name}", force_lengths) for name in ("float32", "bfloat16")]
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
    "compiled": (190, pairs(SHORT, COMPILED, compiled=["--compile"])),
    "pieces": (300, part(partial(with_prediction, PIECES), qwen(256, 512, steps=4))),
    "tokens64_micro16": (150, pairs(BOTH, eager=["--no-cuda-graphs"], trl=[])),
    "profile": (60, pairs(qwen(256, 16), tally=["", profile])),
    "lora_7B": (200, pairs(LARGE, trl=[])),
    "smollm2": (200, part(learned, SHORT, LEARNED, curves.SMOLLM2)),
    "killed": (120, part(killed, SHORT, KILLED, KILLED_RUN)),
    "equal": (80, part(recorded, SHORT, RECORDED, "--save-rollouts --total-episodes 64")),
    "shared_prompts": (80, pairs(qwen(1000, 64), shared=["--share-prompts True"])),
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
