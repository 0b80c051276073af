"""Which architectures can be trained? Runs a tiny random model of each causal one of transformers.

    python benchmark/hardware/architectures.py

rloo.py trains on prompts of different lengths, with a KL: with its default flags, and if this fails
with --share-prompts False. The truth is one pass of the whole model for each token, without padding
and cache. `difference` is how far the sampler and the reference are from it. The weights are so
large that a mistake shows. Writes architectures.json.
"""

import importlib
import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import POLICY, Part, apart, main, run_here, write_rows

RESULT = Path(__file__).with_suffix(".json")
SMOKE = ("llama", "gpt2", "mamba2")
LIMIT = 150  # seconds of a process
PROMPTS = ["1", "2+3=", "45-6+78=", "9+9+9+9+9+9+9="]
FLAGS = "--response-length 8 --batch-size 16 --total-episodes 32 --kl-coef 0.1 --learning-rate 1e-3"
FLAGS += " --save-rollouts --reward benchmark/hardware/architectures.py:count_ones"
TINY = {  # a value, and the names in a config that get it
    0: "pad_token_id num_kv_shared_layers",
    1: r"(bos|eos|sep|cls)_token_id (n|topk|num_expert)_group (mamba_)?expand "
    r"first_k_dense_replace attn_layer_offset",
    2: r"(attn|expert)_layer_period layer_group_size \w*experts_per_tok(en)? moe_(top)?_?k "
    r"\w*num_key_value_heads (num_)?kv_(n_)?heads linear_num_key_heads \w*n_groups "
    "num_shared_experts",
    3.0: r"logits?_scal\w+",
    4: r"(num_|n_)?(hidden_|encoder_|decoder_)?layers? depth \w*(attention|mamba|n|num)_heads? "
    r"linear_num_value_heads (moe_)?(n|num)_(routed_|local_)?experts zero_expert_num rotary_dim "
    "mamba_d_state mamba_dt_rank time_step_rank",
    6: r"\w*sliding_window(_size)? attention_chunk_size local_attention \w*window_len "
    "attention_window_size",
    8: r"(?!qk_head)\w*head_dim \w*headdim \w*d_head dim_head d_kv kv_channels "
    "attention_head_size state_size",
    16: r"\w*vocab_size\w* qk_head_dim \w*lora_rank index_n_heads index_topk "
    "hidden_size_per_layer_input",
    32: r"hidden_size attention_hidden_size d_model n_embd (emb_)?dim lru_width mamba_d_ssm "
    r"hidden_size_global \w*embedding_(size|dim) word_embed_proj_dim dim_model_base",
    48: r"\w*intermediate_size\w* \w*ffn_dim \w*ffn_hidden_size d_ff dff dim_ff n_inner "
    "d_inner mlp_dim",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
}
BY_TURNS = dict(layer_types=["linear_attention", "full_attention"] * 2)
QSA = dict(
    indexer_n_heads=4,
    indexer_kv_heads=1,
    indexer_head_dim=8,
    indexer_budget=8,
    indexer_compress_ratio=2,
)
MAMBA = dict(
    mamba_expand=2,
    attention_hidden_size=64,
    attention_head_dim=16,
    n_mamba_heads=4,
    mamba_headdim=16,
)
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


def shrink(config, also):
    """The entries of a config, and of the configs in it, that make its model tiny."""
    tiny = {"is_decoder": True} if "is_decoder" in config else {}
    for name, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            tiny[name] = {"model_type": value["model_type"]} | shrink(value, also.pop(name, {}))
        for number, patterns in TINY.items():
            fits = any(re.fullmatch(pattern, name) for pattern in patterns.split())
            if fits and (type(value) is type(number) or value is None and number != 3.0):
                tiny[name] = number
    if config.get("num_key_value_heads", 0) == config.get("num_attention_heads"):
        # Some models need equal numbers.
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    return tiny | also


def make_model(model_type, folder):
    import torch  # These imports take seconds, and --help does not need them.
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**shrink(config_class().to_dict(), dict(ALSO.get(model_type, {}))))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    # Some models have a list of tokens that the tiny one has not.
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    transformers.AutoModelForCausalLM.from_pretrained(folder)  # Some cannot be loaded again.
    transformers.AutoTokenizer.from_pretrained(POLICY).save_pretrained(folder)
    return {}


def compare(folder, rows):
    """How far rows of a rollout are from the truth."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def true_logprobs(tokens):
        return model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)

    apart = []
    for row in rows:
        tokens = tokenizer(row["prompt"])["input_ids"]
        for token, *logprobs in zip(row["token_ids"], row["logprobs"], row["ref_logprobs"]):
            truth = true_logprobs(tokens)
            apart += [abs(logprob - truth[token].item()) for logprob in logprobs]
            tokens.append(token)
    return max(apart)


def train(folder, *job):
    """Train a model. Returns how far it was from the truth."""
    return dict(difference=compare(folder, run_here(job)["rollouts"][:16]))


def attempt(model_type, script, flags, work):
    """Make a model, and train it. Returns how this ended."""
    folder = f"{work}/model"
    if "failed" in apart(make_model, model_type, folder, seconds=LIMIT):
        return dict(ended="cannot be made tiny here")
    write_rows(work / "prompts.jsonl", [dict(prompt=prompt) for prompt in PROMPTS])
    flags += f" --dataset {work}/prompts.jsonl --model-path {folder}"
    for own in ("", " --share-prompts False"):
        found = apart(train, folder, script, flags + own, seconds=LIMIT)
        if found.get("difference", 1) < 1e-3:
            return dict(ended="works" + own.replace(" --", " with --")) | found
    if "failed" not in found:
        return dict(ended="wrong") | found
    errors = re.findall(r"^\S*Error: .*", found["failed"].replace(f"{work}/", ""), re.M)
    message = [found["failed"], *errors][-1][:200]
    ended = "refused" if "UsageError" in message else "fails"
    return dict(ended=ended, message=message)


def measure(jobs, smoke):
    """Attempt every architecture."""
    [job] = jobs
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    rows = []
    for model_type in SMOKE if smoke else auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with tempfile.TemporaryDirectory() as work:
            row = dict(model_type=model_type) | attempt(model_type, *job, Path(work))
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


PARTS = {"architectures": Part([({}, "rloo", FLAGS)], measure=measure, short="")}

if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(__doc__, RESULT, PARTS)
