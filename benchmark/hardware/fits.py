"""What memory.py says, of three sizes, and beside the peaks of processes.

    python benchmark/hardware/fits.py             # all
    python benchmark/hardware/fits.py process     # beside runs on a CPU

The part `sizes` has the shapes of Qwen2.5 in bfloat16, prompts of 1,000 and completions of 512
tokens, and micro-batches of 8. The other parts make runs of random Llamas: `process` has the memory
of a process, with the libraries, and `two_processes` what the tensors of one of two processes take
in each stage, under DDP and FSDP2.

Writes fits.json.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "throughput"))
import memory
from run import Part, import_script, main, run, write_rows
from shards import fsdp2
from throughput import force_lengths, keep_peak, random_llama

RESULT = Path(__file__).with_suffix(".json")
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NAMES += ("num_key_value_heads", "vocab_size")
SIZES = {  # of Qwen2.5, and whether head and embedding are one
    "0.5B": ((896, 4864, 24, 14, 2, 151_936), True),
    "1.5B": ((1536, 8960, 28, 12, 2, 151_936), True),
    "7B": ((3584, 18_944, 28, 28, 4, 152_064), False),
}
LLAMAS = {
    "16M": (384, 1024, 8, 6, 2, 8192),
    "42M": (256, 768, 4, 4, 4, 151_936),
    "135M": (576, 1536, 30, 9, 3, 49_152),
}
TINY = (64, 128, 2, 2, 2, 512)  # of a smoke run
MEASURED = ("peak_gib", *memory.STAGES)
WAYS = {
    "all weights": "",
    "and checkpointing": "--gradient-checkpointing",
    "LoRA and checkpointing": "--lora-r 16 --gradient-checkpointing",
}


def predict(script, flags, tokens, **hardware):
    """What memory.py says of the flag's micro-batches, in GiB by name."""
    module = import_script(script)
    args = module.check_flags(memory.tyro.cli(module.Args, args=flags.split()))
    args.share_prompts = False
    line = memory.equal_layers(module, args, tokens, **hardware)
    row = memory.measure(module, args, tokens, line=line, **hardware)
    return {name: row[name] / memory.GIB for name in row} | dict(peak=memory.peak(row) / memory.GIB)


def predict_sizes(jobs, smoke):
    import transformers

    rows = []
    for (script, flags), names in jobs.items():
        with tempfile.TemporaryDirectory() as folder:
            shape, is_tied = (TINY, True) if smoke else SIZES[names["size"]]
            shape = dict(zip(NAMES, shape)) | dict(tie_word_embeddings=is_tied)
            transformers.Qwen2Config(**shape).save_pretrained(folder)
            rows.append(names | predict(script, f"{flags} --model-path {folder}", 1000))
    return rows


def count_tensors(module):
    """Leave in `found` the GiB of living tensors in each stage, at most."""
    import torch

    counted = memory.Memory()
    found = {}

    def note(owner, name, stage):
        function = getattr(owner, name)

        def noted(*args, **inputs):
            own = stage or ("training" if torch.is_grad_enabled() else "scoring")
            counted.peak = counted.alive
            result = function(*args, **inputs)
            found[own] = max(found.get(own, 0), counted.peak / memory.GIB)
            return result

        setattr(owner, name, noted)

    def main(args, function=module.main):
        with counted:
            function(args)
        module.found = found

    note(module, "generate", "sampling")
    note(module, "token_logprobs", None)
    note(module.accelerate.Accelerator, "backward", "training")
    module.main = main


def compare(jobs, smoke):
    """Runs of random Llamas, and what memory.py says of them."""
    rows = []
    for (script, flags, *edits), names in jobs.items():
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "model")
            shape = TINY if smoke else LLAMAS[names["size"]]
            random_llama(model, dict(zip(NAMES, shape)))
            data = Path(folder, "prompts.jsonl")
            words = [f"w{number}" for number in range(200, 456)]  # 8 prompts of 32
            prompts = [" ".join(words[i::8]) for i in range(8)]
            write_rows(data, [dict(prompt=prompt) for prompt in prompts])
            flags += f" --model-path {model} --dataset {data}"
            hardware = dict(processes=names["processes"], sharding=names["sharding"])
            edits += [force_lengths, Path(folder, "run")]
            found = run(script, flags, *edits, processes=names["processes"])
            real = {f"real_{name}": found[name] for name in MEASURED if name in found}
            rows.append(names | real | predict(script, flags, 32, **hardware))
    return rows


JOBS = [  # Another seed makes another job.
    (dict(size=size, way=way), "rloo", f"{WAYS[way]} --seed {seed}")
    for seed, size in enumerate(SIZES)
    for way in WAYS
]
ON_A_CPU = "--reward benchmark/throughput/throughput.py:share_of_letters --total-episodes 32"
ON_A_CPU += " --share-prompts False --no-cuda-graphs --no-save-rollouts --save-every None"
TWO = dict(size="16M", processes=2)
SHORT = "--response-length 8 --per-device-train-batch-size 1 --batch-size 4"
PARTS = {
    "sizes": Part(
        JOBS,
        "--dataset none --response-length 512 --dtype bfloat16 --per-device-train-batch-size 8",
        measure=predict_sizes,
        short=SHORT,
    ),
    "process": Part(
        [
            (dict(size=size, processes=1, sharding="none"), "rloo", f"--seed {seed}", keep_peak)
            for seed, size in enumerate(["42M", "135M"])
        ],
        f"{ON_A_CPU} --response-length 128 --batch-size 8 --per-device-train-batch-size 8",
        measure=compare,
        short=SHORT,
    ),
    "two_processes": Part(
        [
            (TWO | dict(sharding="none"), "rloo", "", count_tensors),
            (TWO | dict(sharding="fsdp2"), "rloo", "", count_tensors, fsdp2),
        ],
        f"{ON_A_CPU} --response-length 32 --batch-size 16 --per-device-train-batch-size 4",
        measure=compare,
        short=SHORT,
    ),
}

if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(__doc__, RESULT, PARTS)
