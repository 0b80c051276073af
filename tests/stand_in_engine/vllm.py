"""A stand-in for the package vllm: what vllm_rloo.patch and vllm_grpo.patch call.

It samples with the function `sample` of the script that uses it, and with the script's own random
numbers. So a patched script makes the run of the plain script. Every call is checked against the
signatures that were recorded from the real engine. What the real engine needs and a patch might
forget is checked, too: an empty prefix cache, stop tokens, and room for prompt and completion.
"""

import functools
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import transformers

RECORDED = json.loads((Path(__file__).parents[2] / "benchmark/engine/signatures.json").read_text())


def recorded(function):
    """Python's own TypeError if the real engine would not take a call."""
    namespace = {}
    exec(f"def call{RECORDED['signatures'][function.__qualname__]}: pass", namespace)
    signature = inspect.signature(namespace["call"])

    @functools.wraps(function)
    def checked(*args, **kwargs):
        signature.bind(*args, **kwargs)
        return function(*args, **kwargs)

    return checked


@recorded
def SamplingParams(**settings):
    return SimpleNamespace(**dict(stop=None, skip_special_tokens=True) | settings)


@recorded
def EngineArgs(**settings):
    return SimpleNamespace(**settings)


@recorded
def reload_weights(engine, weights_iterator):
    engine.model.load_state_dict(dict(weights_iterator))


class LLM:
    llm_engine = engine_core = property(lambda self: self)

    def __init__(self, model, **settings):
        args = EngineArgs(model=model, **settings)
        # Weights are handed over in this process, which alone asks.
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert args.distributed_executor_backend == "uni"
        assert args.logprobs_mode == "processed_logprobs"  # at the temperature
        assert 0 < args.gpu_memory_utilization < 1
        assert args.enforce_eager is False
        self.max_model_len = args.max_model_len
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=args.dtype)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        LLM.is_shut_down = False

    @recorded
    def collective_rpc(self, method, kwargs):
        globals()[method](self, **kwargs)
        self.is_stale = True  # The prefix cache has prompts that were run by the old weights.

    @recorded
    def reset_prefix_cache(self):
        self.is_stale = False

    @recorded
    def generate(self, prompts, sampling_params, use_tqdm):
        assert not self.is_stale, "the prefix cache holds prompts that the old weights have run"
        caller = sys._getframe(2)
        uniforms = caller.f_locals["uniforms"]  # The seeds stand for them.
        for prompt, request, row in zip(prompts, sampling_params, uniforms, strict=True):
            assert request.seed == int(row[0] * 2**53)
            assert len(prompt) + request.max_tokens <= self.max_model_len
        # All requests have the same settings. The log-probabilities are those of the sampled
        # tokens, in one list.
        assert (request.logprobs, request.flat_logprobs) == (0, True)
        ends = [transformers.EosTokenCriteria(request.stop_token_ids)]
        if request.stop is not None:
            # The real engine looks in the visible text only, and hides the string.
            needed = dict(detokenize=True, skip_special_tokens=False)
            needed |= dict(include_stop_str_in_output=True)
            assert needed.items() <= vars(request).items()
            ends.append(transformers.StopStringCriteria(self.tokenizer, request.stop))
        ends = transformers.StoppingCriteriaList(ends)
        script = caller.f_globals
        sampler = script["Sampler"](self.model, self.tokenizer, ends, False, self)
        tokens = script["pad_left"](prompts)
        samples = script["sample"](sampler, tokens, uniforms, request.temperature)
        outputs = []
        for i, row in enumerate(samples["tokens"]):
            token_ids = row[row >= 0].tolist()
            logprobs = samples["logprobs"][i, : len(token_ids)].tolist()
            completion = SimpleNamespace(
                token_ids=token_ids,
                logprobs=SimpleNamespace(logprobs=logprobs),
                finish_reason="stop" if samples["ended"][i] else "length",
            )
            outputs.append(SimpleNamespace(outputs=[completion]))
        return outputs

    def shutdown(self):
        LLM.is_shut_down = True
