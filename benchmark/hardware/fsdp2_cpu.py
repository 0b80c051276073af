"""Run a script under FSDP2 on CPU processes, for tests. accelerate itself would silently use DDP there.

    torchrun --nproc-per-node 2 benchmark/hardware/fsdp2_cpu.py rloo.py --total-episodes 128 --output-dir runs/fsdp2

At the end it prints how often weights were gathered, in all and while completions were sampled. On GPUs
benchmark/accelerate/fsdp2.yaml is enough.
"""

import json
import os
import sys
from pathlib import Path

import tyro
from accelerate import PartialState
from accelerate.utils import DistributedType
from sharded import count_gathers
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

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


def main():
    os.environ.update(SETTINGS)
    PartialState(cpu=True)
    # accelerate turns FSDP on where it believes in several GPUs
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    module = import_script(sys.argv[1])
    gathers = count_gathers(module, (_fsdp_param_group, "foreach_all_gather"))
    module.main(tyro.cli(module.Args, args=sys.argv[2:]))
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(gathers))


if __name__ == "__main__":
    main()
