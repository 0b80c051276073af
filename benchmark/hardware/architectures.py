"""Which architectures can be trained? Makes a tiny random model of each causal one that transformers has, and runs it.

    python benchmark/hardware/architectures.py                        # all, half an hour on one core
    python benchmark/hardware/architectures.py --only mamba2 jamba    # these, by their `model_type`

rloo.py trains on prompts of different lengths, with a KL. The truth is one pass of the whole model for each token,
without padding and cache. `difference` is how far the sampler and the reference are from it, and `unmasked` how far
padding that is not masked is from it: the weights are so large that a mistake shows. What works is trained again on two
processes: `other_completions` counts those that differ from one process. `bfloat16` says what the check at the load
makes of a reference in bfloat16: whether its prompts are shared, or why it is refused. Writes architectures.json.
"""

import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

import torch
import transformers
import tyro
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import DEFAULTS, POLICY, import_script, machine, run_forked, write_lines

RESULT = Path(__file__).with_suffix(".json")
PROMPTS = ["1", "2+3=", "45-6+78=", "9+9+9+9+9+9+9="]
FLAGS = "--response-length 8 --batch-size 16 --total-episodes 32 --kl-coef 0.1 --learning-rate 1e-3 --save-rollouts"
FLAGS += f" --reward {__file__}:count_ones"
HALF = "--dtype bfloat16 --total-episodes 0"  # loads the reference in bfloat16, and evaluates
TINY = {  # a value, and the names in a config that get it
    0: "pad_token_id num_kv_shared_layers",
    1: r"(bos|eos|sep|cls)_token_id (n|topk|num_expert)_group (mamba_)?expand first_k_dense_replace attn_layer_offset",
    2: r"(attn|expert)_layer_period layer_group_size \w*experts_per_tok(en)? moe_(top)?_?k \w*num_key_value_heads "
    r"(num_)?kv_(n_)?heads linear_num_key_heads \w*n_groups num_shared_experts",
    3.0: r"logits?_scal\w+",
    4: r"(num_|n_)?(hidden_|encoder_|decoder_)?layers? depth \w*(attention|mamba|n|num)_heads? linear_num_value_heads "
    r"(moe_)?(n|num)_(routed_|local_)?experts zero_expert_num rotary_dim mamba_d_state mamba_dt_rank time_step_rank",
    6: r"\w*sliding_window(_size)? attention_chunk_size local_attention \w*window_len attention_window_size",
    8: r"(?!qk_head)\w*head_dim \w*headdim \w*d_head dim_head d_kv kv_channels attention_head_size state_size",
    16: r"\w*vocab_size\w* qk_head_dim \w*lora_rank index_n_heads index_topk hidden_size_per_layer_input",
    32: r"hidden_size attention_hidden_size d_model n_embd (emb_)?dim lru_width mamba_d_ssm hidden_size_global "
    r"\w*embedding_(size|dim) word_embed_proj_dim dim_model_base",
    48: r"\w*intermediate_size\w* \w*ffn_dim \w*ffn_hidden_size d_ff dff dim_ff n_inner d_inner mlp_dim",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
}
BY_TURNS = dict(layer_types=["linear_attention", "full_attention"] * 2)
QSA = dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2)
MAMBA = dict(mamba_expand=2, attention_hidden_size=64, attention_head_dim=16, n_mamba_heads=4, mamba_headdim=16)
ALSO = {  # what their names do not tell
    "bamba": dict(attn_layer_indices=[1, 3]),
    "dots1": dict(n_shared_experts=1),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": BY_TURNS,
    "kimi_linear": BY_TURNS,
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "qwen4_exp": dict(text_config=QSA),
    "qwen4_exp_text": QSA,
    "zamba": MAMBA | dict(num_hidden_layers=9),
    "zamba2": MAMBA | dict(layers_block_type=["linear_attention", "hybrid"] * 2),
    "zaya": dict(num_experts_per_tok=1),
}


def count_ones(completions, **_):
    """A reward that differs between completions of random models."""
    return [completion.count("1") for completion in completions]


def shrink(config: dict, also: dict) -> dict:
    """The entries of a config, and of the configs in it, that make its model tiny."""
    tiny = {"is_decoder": True} if "is_decoder" in config else {}
    for name, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            tiny[name] = {"model_type": value["model_type"]} | shrink(value, also.pop(name, {}))
        for number, patterns in TINY.items():
            fits = any(re.fullmatch(pattern, name) for pattern in patterns.split())
            if fits and (type(value) is type(number) or value is None and number != 3.0):
                tiny[name] = number
    if config.get("num_key_value_heads", 0) == config.get("num_attention_heads"):  # Some must be equal.
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    return tiny | also


def make_model(model_type: str, folder: str):
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**shrink(config_class().to_dict(), dict(ALSO.get(model_type, {}))))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.generation_config.eos_token_id = 1  # Some have a list of tokens that the tiny model has not.
    model.save_pretrained(folder)
    transformers.AutoModelForCausalLM.from_pretrained(folder)  # Some cannot be loaded again.
    transformers.AutoTokenizer.from_pretrained(POLICY).save_pretrained(folder)


@torch.no_grad()
def compare(folder: str, rows: list) -> dict:
    """Rows of rollouts.jsonl beside the truth."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    apart, unmasked = [], []
    for row in rows:
        tokens = tokenizer(row["prompt"])["input_ids"]
        for token, *logprobs in zip(row["token_ids"], row["logprobs"], row["ref_logprobs"]):
            truth = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            apart += [abs(logprob - truth[token].item()) for logprob in logprobs]
            tokens.append(token)
        padded = model(torch.tensor([[0, 0, 0, *tokens[:-1]]])).logits[0, -1].log_softmax(-1)
        unmasked.append((padded - truth).abs().max().item())
    return {"difference": max(apart), "unmasked": max(unmasked)}


def send_run(sender, job: tuple, environment: dict):
    """In a process of its own: what a run printed and wrote, or the last line of its error."""
    os.environ |= environment
    try:
        sender.send(run_forked(job))
    except RuntimeError as error:
        sender.send([str(error), *re.findall(r"^\S*Error: .*", str(error), re.M)][-1])


def run_children(job: tuple, environments: list[dict]) -> list:
    """What each process sent: a run, or the text of an error."""
    fork = multiprocessing.get_context("fork")
    receivers = []
    for environment in environments:
        receiver, sender = fork.Pipe(duplex=False)
        fork.Process(target=send_run, args=(sender, job, environment), daemon=True).start()
        receivers.append(receiver)
    return [receiver.recv() if receiver.poll(40) else "took too long" for receiver in receivers]


def two_ranks() -> list[dict]:
    """The environments of two processes that find each other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    world = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    return [world | dict(RANK=rank, LOCAL_RANK=rank) for rank in "01"]


def attempt(model_type: str, work: Path):
    """Make a model, train it, and write to `work` how far this came. In a process of its own."""
    result = {"model_type": model_type, "ended": "cannot be made tiny here"}
    try:
        make_model(model_type, f"{work}/model")
        result["ended"] = "refused"
        (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        flags = f"{FLAGS} --dataset {work}/prompts.jsonl --model-path {work}/model"
        [run] = run_children(("rloo", flags), [{}])
        if isinstance(run, str):
            raise RuntimeError(run)
        own_rows = "a row for each episode" in run["output"]
        result["ended"] = "works with a row for each episode" if own_rows else "works"
        result["sampling_logprob_difference"] = run["metrics"][0]["val/sampling_logprob_difference"]
        result |= compare(f"{work}/model", run["rollouts"][:16])  # the first iteration
        if result["difference"] > 1e-3:
            result["ended"] = "wrong"
        [half] = run_children(("rloo", f"{flags} {HALF} --eval-dataset {work}/prompts.jsonl"), [{}])
        result["bfloat16"] = half if isinstance(half, str) else "a row for each episode" not in half["output"]
        two = run_children(("rloo", flags, f"{work}/two"), two_ranks())
        errors = [end for end in two if isinstance(end, str)]
        if errors:
            result["two_processes"] = errors[0]
        else:
            pairs = zip(run["rollouts"], two[0]["rollouts"], strict=True)
            result["other_completions"] = sum(one["token_ids"] != other["token_ids"] for one, other in pairs)
    except Exception as error:
        text = " ".join(str(error).split()).replace(f"{work}/", "")
        result["message"] = f"{type(error).__name__}: {text[:200]}".removeprefix("RuntimeError: ")
    (work / "result.json").write_text(json.dumps(result))


def main(only: tuple[str, ...] = tuple(NAMES)):
    os.environ |= DEFAULTS | {"ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    import_script("rloo")  # once for all the processes that are forked
    rows = {row["model_type"]: row for row in json.loads(RESULT.read_text())[1:]} if RESULT.exists() else {}
    for model_type in only:
        with tempfile.TemporaryDirectory() as work:
            process = multiprocessing.get_context("fork").Process(target=attempt, args=(model_type, Path(work)))
            process.start()
            process.join(150)
            process.kill()
            path = Path(work, "result.json")
            crashed = {"model_type": model_type, "ended": "crashed, or took too long"}
            rows[model_type] = json.loads(path.read_text()) if path.exists() else crashed
        print(rows[model_type], flush=True)
        write_lines(RESULT, [dict(machine=machine()), *rows.values()])


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
