"""What only a GPU can tell, in one command. It is made for half an hour of an H100.

    pip install -r requirements.txt trl==1.16.0 math-verify==0.9.0
    python benchmark/throughput/gpu.py                  # all parts, the most important ones first
    python benchmark/throughput/gpu.py equal profile    # these; results of the others stay
    python benchmark/throughput/gpu.py --smoke          # all with a tiny model, also on a CPU

    equal       64 completions in float32, with CUDA graphs and without: how many differ?
    tokensA_microB
                Tally, Tally without CUDA graphs, and TRL in turn, as in throughput.py: completions
                of A tokens, micro-batches of B episodes
    profile     the kernels of one rollout, and of one update, with CUDA graphs and without. The
                profiler counts in its seconds.
    repeated    whole runs, each made twice: how far are they apart?
    killed      a run that is killed twice and resumed, and one that is not: how far are they apart?
    rows        updates with a row for each episode, and with shared prompts, in turn; `rows_wide`
                trains LoRA, where most of the time is arithmetic

Where a distance is 0, all bits are the same. Every run has a process of its own, and a time limit.
Where one fails, the others go on. gpu.json is written after each part. Then these are next:

    python benchmark/default/curves.py smollm2_rloo     # and smollm2_grpo, and smollm2_ppo
"""

import contextlib
import sys
import tempfile
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "hardware"))
import throughput
from kill_and_resume import FLAGS, kill_at
from rounding import count_different
from run import BUILT_IN, SCRIPTS, apart, relative_distance, run_here
from tally_worker import force_lengths, now
from throughput import Case, in_turn, part, start

RESULT = Path(__file__).with_suffix(".json")
throughput.LIMIT = 300
EAGER = "--no-cuda-graphs"
SHORT = Case(
    "a random Llama with the sizes of Qwen2.5-0.5B, in bfloat16, 256 and 64 tokens",
    "0.5B",
    64,
    16,
    (256, 256),
    64,
    True,
    5,
    2,
    dtype="bfloat16",
)
RLOO = replace(SHORT, algorithms=("rloo",))
WIDE = replace(
    RLOO,
    about="8 layers as wide as Mistral's of 7B, LoRA, 256 and 64 tokens",
    model="wide",
    steps=4,
    pairs=1,
)


# ---- changes of a script


def profile(module):
    """Note in `found` the kernels of the third rollout, and of the update after it."""
    module.found["kernels"] = {}
    opened = contextlib.ExitStack()

    def change(name: str, begins: str | None):
        function = getattr(module, name)

        def changed(*args, **inputs):
            opened.close()
            if begins and len(module.found["steps"]) == 3:
                opened.enter_context(kernels(module.found["kernels"], begins))
            return function(*args, **inputs)

        setattr(module, name, changed)

    change("generate", begins="rollout")
    change("score_episodes", begins=None)
    change("draw_mini_batches", begins="update")
    change("write_metrics", begins=None)


@contextlib.contextmanager
def kernels(found: dict, name: str):
    """Note what runs inside. Without a GPU it is the operations of the CPU."""
    import torch

    with torch.profiler.profile() as profiler:
        start = now()
        yield
        seconds = now() - start
    device, own = "CPU", "self_cpu_time_total"
    if torch.cuda.is_available():
        device, own = "CUDA", "self_device_time_total"
    events = profiler.key_averages()
    of_device = [event for event in events if event.device_type.name == device]
    found[name] = dict(
        seconds=seconds,
        launches=sum(event.count for event in events if "Launch" in event.key),
        kernels=sum(event.count for event in of_device),
        busy=sum(getattr(event, own) for event in of_device) / 1e6 / seconds,
    )


# ---- the row of a job


def difference(one: dict, two: dict) -> dict:
    """How far two runs are apart: how many completions differ, and the log-probabilities of those
    that do not."""
    for run in (one, two):
        if "failed" in run:
            return run
    apart = [0.0]
    for a, b in zip(one["rollouts"], two["rollouts"]):
        if a["token_ids"] == b["token_ids"]:
            apart += [abs(p - q) for p, q in zip(a["logprobs"], b["logprobs"])]
    return count_different(one, two) | dict(logprob=max(apart))


def run_of(*job) -> dict:
    return apart(run_here, job, seconds=throughput.LIMIT)


def with_and_without(case: Case, script: str, flags: str, *edits) -> dict:
    """A run with CUDA graphs, and one without."""
    return difference(*(run_of(script, f"{flags} {own}", *edits) for own in ("", EAGER)))


def repeated(kills: dict, case: Case, script: str, flags: str) -> dict:
    """The same run twice. The second one is killed at these calls of a phase, and resumed."""
    struck = 0
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder, "one"), Path(folder, "two")
        for phase, call in kills.items():
            kill = partial(kill_at, phase=phase, call=call)
            struck += "exit code -9" in run_of(script, flags, kill, two).get("failed", "")
        row = difference(run_of(script, flags, one), run_of(script, flags, two))
        if "failed" not in row:
            row |= dict(weights=relative_distance(two, one), kills=struck)
        return row


def find_gpu():
    """Stop where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU. Only --smoke needs none.")


# ---- the parts of the program

EQUAL = [
    (dict(model="built-in"), "rloo", f"{BUILT_IN} --response-length 8"),
    (dict(model="0.5B"), "rloo", "", force_lengths),
]
TWICE = []
for script, (dtype, epochs) in product(SCRIPTS, dict(float32=2, bfloat16=1).items()):
    TWICE.append((dict(dtype=dtype), script, f"--dtype {dtype} --num-ppo-epochs {epochs}"))
KILLED = [({}, script, "") for script in SCRIPTS]
KILLS = dict(rollout=5, training=2)
SAVED = "--save-rollouts --num-sample-generations 0 --total-episodes"
TRAINED = f"{BUILT_IN} {SAVED} 512 --learning-rate 1e-4 --response-length 8"
KILLED_RUN = f"{BUILT_IN} {FLAGS} --dtype float32 --response-length 8"
PROGRAMS = partial(in_turn, dict(tally=[""], eager=[EAGER], trl=[]))
PROFILES = partial(in_turn, dict(tally=["", profile], eager=[EAGER, profile]))
ROWS = dict(separate_rows=["--share-prompts False"], shared_prompts=["--share-prompts True"])
ROWS = partial(in_turn, ROWS)

PARTS = {
    "equal": part(with_and_without, SHORT, EQUAL, f"{SAVED} 64 --dtype float32"),
    "tokens64_micro16": part(PROGRAMS, SHORT),
    "tokens64_micro64": part(PROGRAMS, replace(RLOO, micro_batch=64)),
    "profile": part(PROFILES, replace(RLOO, completion_tokens=16, steps=3, pairs=1)),
    "repeated": part(partial(repeated, {}), SHORT, TWICE, TRAINED),
    "killed": part(partial(repeated, KILLS), SHORT, KILLED, KILLED_RUN),
    "rows_micro16": part(ROWS, RLOO),
    "rows_micro64": part(ROWS, replace(RLOO, micro_batch=64)),
    "rows_wide": part(ROWS, WIDE, flags="--lora-r 16"),
}
for each in PARTS.values():
    each.prepare = find_gpu

if __name__ == "__main__":
    start(__doc__, RESULT, PARTS)
    print("next: python benchmark/default/curves.py smollm2_rloo; then smollm2_grpo, smollm2_ppo")
