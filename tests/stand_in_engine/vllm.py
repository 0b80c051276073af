"""A stand-in for the package vllm, for the patch vllm_rloo.

It samples with the function `sample` of the script that uses it, and with the script's own random
numbers. So a patched script makes the run of the plain script. Every call is checked against the
signatures that were recorded from the real engine. What the real engine needs and a patch might
forget is checked, too: new weights, an empty prefix cache, stop tokens, and room for prompt and
completion.
"""

import inspect
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

RECORDED = json.loads(
    (Path(__file__).parents[2] / "benchmark" / "engine" / "signatures.json").read_text()
)
engines = []  # all that were made


def check_call(name: str, *args, **kwargs) -> dict:
    """The arguments of a call by name. Python's own TypeError if the real engine would not take
    them."""
    namespace = {}
    exec(f"def call{RECORDED['signatures'][name]}: pass", namespace)
    return inspect.signature(namespace["call"]).bind(*args, **kwargs).arguments


def make(name: str, **fields) -> SimpleNamespace:
    """A result of the engine. The real one has these fields."""
    assert fields.keys() <= set(RECORDED["fields"][name]), name
    return SimpleNamespace(**fields)


class SamplingParams:
    def __init__(self, *args, **kwargs):
        defaults = dict(stop=None, skip_special_tokens=True, flat_logprobs=False)
        self.__dict__ |= defaults | check_call("SamplingParams", *args, **kwargs)


class LLM:
    def __init__(self, *args, **kwargs):
        given = check_call("LLM", *args, **kwargs)
        others = given.pop("kwargs", {})
        check_call("EngineArgs", **others)
        for name, values in RECORDED["values"].items():
            assert others[name] in values
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", (
            "weights are handed over in this process"
        )
        assert others["distributed_executor_backend"] == "uni"  # One process asks.
        assert others["logprobs_mode"] == "processed_logprobs", (
            "log-probabilities are at the temperature"
        )
        self.max_model_len = others["max_model_len"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            given["model"], dtype=given["dtype"]
        )
        self.model.is_recorded = False
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(given["model"])
        self.has_prompts = False
        self.is_stale = False
        self.is_shut_down = False
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shut_down))
        engines.append(self)

    def collective_rpc(self, *args, **kwargs):
        given = check_call("LLM.collective_rpc", self, *args, **kwargs)
        weights = check_call(given["method"], self, **given["kwargs"])["weights_iterator"]
        self.model.load_state_dict(dict(weights))
        self.is_stale = self.has_prompts  # The prompts that it holds were run by the old weights.

    def reset_prefix_cache(self, *args, **kwargs):
        check_call("LLM.reset_prefix_cache", self, *args, **kwargs)
        self.is_stale = False

    def generate(self, *args, **kwargs):
        given = check_call("LLM.generate", self, *args, **kwargs)
        prompts = given["prompts"]
        requests = given["sampling_params"]
        assert given["use_tqdm"] is False
        assert not self.is_shut_down
        assert not self.is_stale, "the prefix cache holds prompts that the old weights have run"
        self.has_prompts = True
        caller = sys._getframe(1)
        uniforms = caller.f_locals["uniforms"]  # The seeds stand for them.
        for prompt, request, row in zip(prompts, requests, uniforms, strict=True):
            assert request.seed == int(row[0] * 2**53)
            assert len(prompt) + request.max_tokens <= self.max_model_len
            # So the log-probabilities of the sampled tokens come in one list.
            assert request.flat_logprobs
            assert request.logprobs == 0
        # All requests have the same settings.
        ends = [transformers.EosTokenCriteria(request.stop_token_ids)]
        if request.stop is not None:
            assert request.detokenize, "the real engine finds stop strings in text only"
            assert request.include_stop_str_in_output, "the string belongs to the completion"
            ends.append(partial(self.has_stop_string, request))
        self.model.stopping_criteria = transformers.StoppingCriteriaList(ends)
        script = caller.f_globals
        tokens = script["pad_left"](prompts)
        samples = script["sample"](self.model, tokens, uniforms, request.temperature)
        outputs = []
        for i, row in enumerate(samples["tokens"].tolist()):
            token_ids = [token for token in row if token >= 0]
            logprobs = samples["logprobs"][i, : len(token_ids)]
            completion = make(
                "CompletionOutput",
                token_ids=token_ids,
                logprobs=make("FlatLogprobs", logprobs=logprobs.tolist()),
                finish_reason="stop" if samples["ended"][i] else "length",
            )
            outputs.append(make("RequestOutput", outputs=[completion]))
        return outputs

    def has_stop_string(self, request, rows, _):
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=request.skip_special_tokens)
        return torch.tensor([any(stop in text for stop in request.stop) for text in texts])

    def shut_down(self, *args, **kwargs):
        check_call("engine_core.shutdown", self, *args, **kwargs)
        self.is_shut_down = True
