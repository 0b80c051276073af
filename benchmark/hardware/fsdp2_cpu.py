"""Run a script under FSDP2 on CPU processes, for tests. accelerate itself would silently use DDP
there.

    torchrun --nproc-per-node 2 benchmark/hardware/fsdp2_cpu.py rloo.py --total-episodes 128

At the end it prints how often weights were gathered, in all and while completions were sampled. On
GPUs benchmark/accelerate/fsdp2.yaml is enough.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import import_script

SETTINGS = dict(
    ACCELERATE_USE_CPU="true",
    ACCELERATE_USE_FSDP="true",
    FSDP_VERSION="2",
    FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
    FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer",
    FSDP_RESHARD_AFTER_FORWARD="true",
    FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
)


@dataclass
class Options:
    script: tyro.conf.Positional[str]
    """rloo.py, grpo.py or ppo.py. Its flags follow"""


def count_gathers(module, *owners_and_names) -> Counter:
    """Count how often the functions that gather weights are called, in all and while completions
    are sampled."""
    gathers = Counter(gathers=0, while_sampling=0, samplings=0)
    sample = module.sample

    def watched_sample(*args, **inputs):
        before = gathers["gathers"]
        result = sample(*args, **inputs)
        gathers.update(while_sampling=gathers["gathers"] - before, samplings=1)
        return result

    def counted(function):
        def gather(*args, **kwargs):
            gathers["gathers"] += 1
            return function(*args, **kwargs)

        return gather

    module.sample = watched_sample
    for owner, name in owners_and_names:
        setattr(owner, name, counted(getattr(owner, name)))
    return gathers


def main(options: Options, flags: list[str]):
    os.environ.update(SETTINGS)
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    PartialState(cpu=True)
    # accelerate turns FSDP on where it believes in several GPUs.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    module = import_script(options.script)
    gathers = count_gathers(module, (_fsdp_param_group, "foreach_all_gather"))
    module.main(tyro.cli(module.Args, args=flags))
    if os.environ["RANK"] == "0":
        print(json.dumps(gathers))


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
