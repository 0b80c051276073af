"""Prints the signatures of the engine's calls that the patches use, as JSON. run.py starts it in the engine's Python.

A signature is written as in a `def`, without types, and with `...` for every default. Beside them stand the fields of
what the engine returns, and the values that two options may have.
"""

import inspect
import json
from typing import get_args

import vllm
from vllm.config.model import LogprobsMode
from vllm.config.parallel import DistributedExecutorBackend
from vllm.engine.arg_utils import EngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

CALLS = {
    "LLM": vllm.LLM,
    "EngineArgs": EngineArgs,  # LLM hands the arguments that it does not know to this class.
    "LLM.generate": vllm.LLM.generate,
    "LLM.collective_rpc": vllm.LLM.collective_rpc,
    "LLM.reset_prefix_cache": vllm.LLM.reset_prefix_cache,
    "SamplingParams": vllm.SamplingParams,
    "reload_weights": CPUModelRunner.reload_weights,  # The worker hands it all arguments.
    "engine_core.shutdown": InprocClient.shutdown,
}


def to_text(function) -> str:
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        default = inspect.Parameter.empty if parameter.default is inspect.Parameter.empty else ...
        parameters.append(parameter.replace(annotation=inspect.Parameter.empty, default=default))
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return text.replace("Ellipsis", "...")


def fields(cls) -> list[str]:
    """What an object of the class is made with."""
    return list(inspect.signature(cls).parameters)


if __name__ == "__main__":
    recorded = {
        "version": vllm.__version__,
        "signatures": {name: to_text(call) for name, call in CALLS.items()},
        "fields": {cls.__name__: fields(cls) for cls in (RequestOutput, CompletionOutput, FlatLogprobs)},
        "values": {
            "logprobs_mode": list(get_args(LogprobsMode)),
            "distributed_executor_backend": list(get_args(DistributedExecutorBackend)),
        },
    }
    print(json.dumps(recorded, indent=1))
