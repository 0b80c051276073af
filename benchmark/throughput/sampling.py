"""What the KV cache costs in a rollout: seconds and peak memory of `sample` with three kinds of cache.

    python benchmark/smollm2/prepare.py           # the model
    python benchmark/throughput/sampling.py       # half an hour on two cores

    script      the cache of the scripts, `KVCache`. It stores keys and values in the type of autocast, and its memory
                grows by 64 tokens at a time. So a new token does not copy the whole cache
    copies      as `script`, but without blocks: every new token copies the whole cache
    dynamic     DynamicCache of transformers: as `copies`, and under autocast it stores float32, which attention casts
                for every token

SmolLM2-135M continues prompts of 30 tokens by 256 tokens. No completion ends before. Every run is a process of its own,
and the kinds take turns. Seconds are CPU seconds of one thread, medians over the rounds. Memory is the peak of the
process's resident memory, model included. The program says if two kinds sampled different tokens. The results are
merged into sampling.json.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

RESULT = Path(__file__).with_suffix(".json")
ROOT = RESULT.parent.parent.parent
KINDS = ("script", "copies", "dynamic")
os.environ["HF_HUB_OFFLINE"] = "1"


@dataclass
class Args:
    episodes: tuple[int, ...] = (16, 64)
    """episodes that are sampled at once"""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """precisions of the forward passes"""
    kinds: tuple[str, ...] = KINDS
    """kinds of cache"""
    tokens: int = 256
    """tokens of each completion"""
    rounds: int = 2
    """how often each is measured"""
    model: str = str(ROOT / "benchmark" / "smollm2" / "model")
    """folder of the model"""
    one_run: str | None = None
    """used by the program itself: measure one run, and print the result"""


def measure(job: dict) -> dict:
    """Sample once -> CPU seconds, peak memory, and a sum over the tokens."""
    sys.path.insert(0, str(ROOT))
    import numpy as np
    import torch
    import transformers
    from tally_worker import read_kilobytes

    torch.set_num_threads(1)
    rloo = __import__("rloo")
    if job["kind"] == "copies":
        rloo.append_token = lambda old, new: torch.cat([old, new], dim=2)
    if job["kind"] == "dynamic":
        rloo.KVCache = transformers.DynamicCache
    args = rloo.Args(model_path=job["model"], dtype=job["dtype"], response_length=job["tokens"])
    policy = rloo.load_policy(args, transformers.AutoTokenizer.from_pretrained(job["model"]))
    policy.eos_ids = [-1]  # no token ends a completion
    draw = np.random.default_rng(0)
    prompts = draw.integers(100, 40_000, (job["episodes"] // 4, 30)).tolist()
    inputs = dict(
        prompts=[prompt for prompt in prompts for _ in range(4)],
        uniforms=torch.from_numpy(draw.random((job["episodes"], job["tokens"]))),
        temperature=1.0,
    )
    started = time.process_time()
    with rloo.sampling_weights(rloo.SimpleNamespace(is_fsdp2=False), policy):
        samples = policy(rloo.partial(rloo.sample, **inputs))
    seconds = time.process_time() - started
    return dict(seconds=seconds, peak_gib=read_kilobytes("VmHWM") / 2**20, tokens=int(samples["tokens"].sum()))


def main(args: Args):
    if args.one_run is not None:
        print(json.dumps(measure(json.loads(args.one_run))))
        return
    results = {}
    if RESULT.exists():
        results = {(row["episodes"], row["dtype"], row["kind"]): row for row in json.loads(RESULT.read_text())}
    for episodes in args.episodes:
        for dtype in args.dtypes:
            runs = {kind: [] for kind in args.kinds}
            for _ in range(args.rounds):
                for kind in args.kinds:
                    job = dict(model=args.model, tokens=args.tokens, episodes=episodes, dtype=dtype, kind=kind)
                    command = [sys.executable, __file__, "--one-run", json.dumps(job)]
                    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    runs[kind].append(json.loads(output.splitlines()[-1]))
            for kind, found in runs.items():
                row = dict(episodes=episodes, dtype=dtype, kind=kind, tokens=args.tokens)
                row["seconds"] = round(statistics.median(run["seconds"] for run in found), 2)
                row["peak_gib"] = round(max(run["peak_gib"] for run in found), 2)
                row["sum_of_tokens"] = found[0]["tokens"]
                results[episodes, dtype, kind] = row
                print(row, flush=True)
            if len({run["tokens"] for found in runs.values() for run in found}) > 1:
                print(f"{episodes} episodes in {dtype}: the kinds sampled different tokens")
    RESULT.write_text(json.dumps([results[key] for key in sorted(results)], indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
