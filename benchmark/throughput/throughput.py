"""Tally against TRL 1.16 on the same work: seconds of an iteration, and memory.

    python benchmark/throughput/throughput.py a c d e h i                            # on one core
    python benchmark/throughput/throughput.py gpu_64 gpu_512 gpu_smollm2 gpu_lora    # on one GPU
    python benchmark/throughput/throughput.py a      # one case; results of the others stay

The first command takes two hours. The second one has the most valuable case first. It stops after
GPU_LIMIT seconds, twelve minutes, and cases that are not finished keep their old results. The
models are random, but for the built-in one, and for SmolLM2 (benchmark/smollm2/prepare.py).

All runs have the environment of benchmark/parity/trl_trainer.py. The programs of a case run in
turn, A B A B, each in a process of its own with one thread, with equal settings and equal
micro-batches. The first two iterations of a run are dropped. Its number is the median over the
others. `ratio` is the median of the pairs' ratios to Tally, which lie between `lowest` and
`highest`. Tally's seconds are those of metrics.jsonl. TRL's last from the end of a step to the end
of the next one. So the start of a program does not count.

    eager    Tally without recorded steps
    large    Tally with pieces of logits that are four times as large

Memory is the peak of the resident memory, with models and used libraries (Linux). On a GPU it
is the most that PyTorch's tensors had at once. With the variables of MALLOC glibc keeps the memory
of freed tensors. Otherwise it gives large ones back at once, and the kernel clears their pages
again for the next tensor. Case i does without, as users do.

TRL's settings are those of trl_trainer.py, with its reasons. Besides:

    gradient_accumulation_steps   the same micro-batches as Tally's
    shuffle_dataset               off: a run takes each prompt once
    use_transformers_continuous_batching, cache_implementation
                                  left at their defaults, which are the fastest on a CPU: a static
                                  cache was no faster, and continuous batching was some 60 times
                                  slower
    eos_token_id                  -1 for forced lengths, so that nothing ends. This is cheaper than
                                  min_new_tokens, which rewrites the logits for every token

No setting changes two things. Without Triton, so on every CPU, TRL 1.16 also computes the
log-probabilities of the prompt's tokens, and masks them. And its backward pass computes the logits
again, which saves memory.

What fails leaves its error in the row: a run, or two programs whose numbers of sampled tokens are
more than 10 % apart. Writes throughput.json. A smoke run has a tiny model and no GPU, and uses TRL
if it is installed.
"""

import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in (".", "parity")]
import trl_trainer
from run import (
    BENCHMARK,
    DEFAULTS,
    POLICY,
    Part,
    apart,
    column,
    import_script,
    main,
    read_rows,
    run_here,
    write_rows,
)

RESULT = Path(__file__).with_suffix(".json")
START = time.time()
DROPPED = 2  # iterations
LIMIT = 1800  # seconds of a run on a CPU
GPU_LIMIT = 720  # seconds of all runs on a GPU
MALLOC = dict(MALLOC_TRIM_THRESHOLD_=str(2**31 - 1), MALLOC_MMAP_MAX_="0")
GROUPS = dict(rloo="--rloo-k 4", grpo="--num-generations 4", ppo="--num-ppo-epochs 1")
REAL = {  # models that are not random: folder and prompts
    "built-in": (POLICY, "default/train.jsonl"),
    "SmolLM2": (BENCHMARK / "smollm2/model", "smollm2/chain_sum_train.jsonl"),
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads")
LLAMAS = {
    "tiny": (256, 256, 768, 4, 4, 4),
    "128": (256, 128, 384, 4, 4, 4),
    "42M": (151_936, 256, 768, 4, 4, 4),
    "135M": (49_152, 576, 1536, 30, 9, 3),  # as SmolLM2
    "0.5B": (151_936, 896, 4864, 24, 14, 2),  # as Qwen2.5
    "7B": (32_000, 4096, 14_336, 32, 32, 8),  # as Mistral
}


def share_of_letters(completions, **_):
    """The reward: the share of a completion's characters that are `e` or `1`, 0 for an empty
    one."""
    return [sum(map(text.count, "e1")) / max(len(text), 1) for text in completions]


@dataclass
class Case:
    about: str
    model: str  # of REAL or LLAMAS
    batch: int
    micro_batch: int
    prompt_tokens: int
    completion_tokens: int
    steps: int
    pairs: int
    algorithms: tuple[str, ...] = ("rloo", "grpo")
    programs: tuple[str, ...] = ("tally", "trl")  # of PROGRAMS
    forced: bool = True  # Every completion has all its tokens, because no EOS ends it.
    reward: str = "benchmark/throughput/throughput.py:share_of_letters"
    learning_rate: float = 1e-6
    dtype: str = "float32"  # or bfloat16, where the weights are float32 all the same
    lora_r: int | None = None
    kl_coef: float = 0.05
    keeps_memory: bool = True  # with MALLOC
    on_gpu: bool = False


LARGE = "a random Llama of 42M parameters with a vocabulary of 151,936"
SMALL = "a random Llama with the sizes of SmolLM2-135M"
QWEN = "a random Llama with the sizes of Qwen2.5-0.5B, in bfloat16"
MISTRAL = "a random Llama with the sizes of Mistral-7B, in bfloat16, LoRA"
on_a_gpu = partial(Case, dtype="bfloat16", on_gpu=True, pairs=1)
CASES = {
    "a": Case(
        "the default policy, 6 and up to 8 tokens",
        *("built-in", 256, 256, 6, 8, 60, 5),
        forced=False,
        reward="exact_match",
    ),
    "c": Case(f"{SMALL}, 30 and 32 tokens", "135M", 16, 16, 30, 32, 5, 2),
    # With micro-batches of 16 TRL does not fit into 24 GiB.
    "d": Case(f"{SMALL}, 350 and 53 tokens", "135M", 16, 8, 350, 53, 4, 2, ("rloo",)),
    "e": Case("a random Llama of 4 layers of 128, 5 and 32 tokens", "128", 64, 64, 5, 32, 20, 3),
    "h": Case(f"{LARGE}, 32 and 128 tokens", "42M", 8, 8, 32, 128, 5, 3, ("rloo",)),
    "i": Case(
        f"{LARGE}, 32 and 256 tokens, no KL",
        *("42M", 8, 8, 32, 256, 4, 5, ("grpo",), ("tally", "large", "trl")),
        kl_coef=0.0,
        keeps_memory=False,
    ),
    "gpu_64": on_a_gpu(
        f"{QWEN}, 256 and 64 tokens",
        *("0.5B", 64, 16, 256, 64, 5),
        programs=("tally", "eager", "trl"),
    ),
    "gpu_512": on_a_gpu(
        f"{QWEN}, 256 and 512 tokens",
        *("0.5B", 64, 16, 256, 512, 4),
        algorithms=("rloo",),
        programs=("tally", "large", "trl"),
    ),
    "gpu_smollm2": on_a_gpu(
        "SmolLM2 learns sums, about 50 and up to 24 tokens",
        *("SmolLM2", 64, 16, 50, 24, 20),
        algorithms=("rloo", "grpo", "ppo"),
        programs=("tally",),
        forced=False,
        reward="benchmark/smollm2/tasks.py:score",
        learning_rate=3e-5,
        kl_coef=0.0,
    ),
    "gpu_lora": on_a_gpu(
        f"{MISTRAL}, 1,000 and 64 tokens",
        *("7B", 16, 2, 1000, 64, 3),
        algorithms=("rloo",),
        lora_r=16,
    ),
}
# what a smoke run changes
TINY = dict(model="tiny", batch=8, micro_batch=4, prompt_tokens=12, completion_tokens=8)
TINY |= dict(forced=True, steps=4, pairs=1, reward=Case.reward, on_gpu=False)
SHORT = f"--total-episodes 32 --batch-size 8 --per-device-train-batch-size 4 --reward {Case.reward}"
SHORT += " --response-length 8"


# ---- models and prompts
def random_llama(folder: Path, sizes: dict) -> dict:
    """Write a Llama of these SIZES with random weights, and a tokenizer whose words are `w2` and so
    on. A CPU would need minutes for one of 7B."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(sizes["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="w0", eos_token="w1", model_max_length=2048)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    ids = dict(pad_token_id=0, bos_token_id=None, eos_token_id=1)
    config = LlamaConfig(**sizes, **ids, tie_word_embeddings=True, max_position_embeddings=2048)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return {}


def make_world(case, folder):
    """Write a case's prompts, and its model if it is random. Returns the model's folder."""
    count = case.steps * case.batch // 4
    if case.model in REAL:
        model, prompts = REAL[case.model]
        rows = read_rows(BENCHMARK / prompts)[:count]
    else:
        sizes = dict(zip(SIZES, LLAMAS[case.model]))
        model = Path(folder, "model")
        apart(random_llama, model, sizes)
        draw = random.Random(1)
        rows = []
        for _ in range(count):
            words = draw.choices(range(2, sizes["vocab_size"]), k=case.prompt_tokens)
            rows.append(dict(prompt=" ".join(f"w{word}" for word in words)))
    write_rows(Path(folder, "prompts.jsonl"), rows)
    return model


# ---- runs
def memory_peak():
    """In GiB."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    # Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 2**20


def keep_peak(module):
    """Leave the peak of memory in `found`, and write no model."""
    module.found = {}
    module.save_result = lambda *_: module.found.update(peak_gib=memory_peak())


def force_lengths(module):
    """No token ends a completion."""
    criteria = module.transformers.EosTokenCriteria
    module.transformers.EosTokenCriteria = lambda _: criteria(2**31 - 1)


def read_more_at_once(module):
    module.LOGITS_AT_ONCE *= 4


def tally(case, script, flags, folder, model, seed, own="", *edits):
    """Of a run of Tally the seconds, tokens and scores of each iteration, and the peak of
    memory."""
    edits += (keep_peak, force_lengths) if case.forced else (keep_peak,)
    result = run_here((script, f"{flags} {own} --seed {seed}", *edits))
    rows = [row for row in result["metrics"] if row["iteration"] > 0]
    return dict(
        seconds=np.diff(column(rows, "seconds"), prepend=0).tolist(),
        tokens=column(rows, "response_length_mean"),
        scores=column(rows, "objective/scores"),
        peak_gib=result["peak_gib"],
    )


def trl(case, script, flags, folder, model, seed):
    """The same of a run of TRL."""
    import torch
    from peft import LoraConfig
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *inputs, **settings):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    lora = None
    if case.lora_r:  # as Tally has it
        lora = LoraConfig(r=case.lora_r, lora_alpha=2 * case.lora_r, target_modules="all-linear")
    micro_batches = case.batch // case.micro_batch
    trainer = trl_trainer.make_trainer(
        script,
        read_rows(Path(folder, "prompts.jsonl")),
        import_script("rloo").load_reward(case.reward),
        f"{folder}/trl",
        model,
        callbacks=[Clock()],
        peft_config=lora,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=case.dtype == "bfloat16",
        model_init_kwargs=dict(dtype=case.dtype if lora else "float32"),
        batch=case.micro_batch,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=micro_batches,
        max_steps=case.steps,
        shuffle_dataset=False,
        max_completion_length=case.completion_tokens,
        generation_kwargs={"eos_token_id": [-1]} if case.forced else None,
        beta=case.kl_coef,
        learning_rate=case.learning_rate,
    )
    if case.forced:
        # an EOS that is sampled all the same does not cut the completion
        trainer.eos_token_ids = [-1]
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    return dict(
        seconds=np.diff(ends, prepend=ends[0]).tolist(),
        tokens=column(logged, "completions/mean_length"),
        scores=column(logged, "reward"),
        peak_gib=memory_peak(),
    )


PROGRAMS = {
    "tally": (tally,),
    "eager": (tally, "--no-cuda-graphs"),
    "large": (tally, "", read_more_at_once),
    "trl": (trl,),
}


def summary(runs, ours):
    """What was measured, and how it compares, or why not. Memory is the most of any run."""
    for run in runs + ours:
        if "failed" in run:
            return run
    tokens = [np.mean(column(some, "tokens")) for some in (runs, ours)]
    if abs(np.subtract(*tokens)) > 0.1 * tokens[1]:
        return dict(failed=f"tokens of a completion: {tokens}")
    seconds, own = ([median(run["seconds"][DROPPED:]) for run in some] for some in (runs, ours))
    ratios = np.divide(seconds, own).tolist()
    return dict(
        seconds_by_run=seconds,
        peaks_by_run=column(runs, "peak_gib"),
        peak_gib=max(column(runs, "peak_gib")),
        scores=np.mean(column(runs, "scores"), 0).tolist(),
        ratio=median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
    )


def measure(case, jobs, smoke):
    """The row of each algorithm, printed as it comes."""
    os.environ |= DEFAULTS | MALLOC
    for name in () if case.keeps_memory else MALLOC:
        del os.environ[name]
    if smoke:
        case = replace(case, **TINY)
        jobs = dict([*jobs.items()][-1:])
    if not case.on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    programs = [name for name in case.programs if name != "trl" or find_spec("trl")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_world(case, folder)
        for (script, flags), names in jobs.items():
            flags = flags.replace("WORLD", folder).replace("MODEL", str(model))
            runs = {name: [] for name in programs}
            for seed, name in product(range(1, case.pairs + 1), programs):
                function, *own = PROGRAMS[name]
                inputs = case, script, flags, folder, model, seed, *own
                left = START + GPU_LIMIT - time.time() if case.on_gpu else LIMIT
                # Only a process that is made anew has the variables of this case.
                method = "forkserver" if smoke else "spawn"
                runs[name].append(apart(function, *inputs, seconds=max(left, 0), method=method))
                if case.on_gpu and time.time() > START + GPU_LIMIT:
                    raise SystemExit("the time is over")
            row = names | asdict(case)
            row |= {name: summary(runs[name], runs["tally"]) for name in programs}
            print(json.dumps(row), flush=True)
            if smoke and "'failed'" in str(row):
                raise SystemExit(1)
            rows.append(row)
    return rows


# ---- the parts of the program
def need_gpu():
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU")


def part_of(case):
    flags = (
        "--model-path MODEL --dataset WORLD/prompts.jsonl --temperature 1 --max-grad-norm 1"
        f" --reward {case.reward} --total-episodes {case.steps * case.batch}"
        f" --batch-size {case.batch} --per-device-train-batch-size {case.micro_batch}"
        f" --response-length {case.completion_tokens} --kl-coef {case.kl_coef}"
        f" --learning-rate {case.learning_rate} --save-every None --num-sample-generations 0"
        f" --dtype {case.dtype} --lora-r {case.lora_r}"
    )
    runs = [(dict(algorithm=name), name, GROUPS[name]) for name in case.algorithms]
    prepare = need_gpu if case.on_gpu else None
    return Part(runs, flags, measure=partial(measure, case), prepare=prepare, short=SHORT)


PARTS = {name: part_of(case) for name, case in CASES.items()}

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
