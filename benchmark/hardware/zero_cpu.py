"""Run a script under DeepSpeed on CPU processes. accelerate itself would silently use DDP there.

    torchrun --nproc-per-node 2 benchmark/hardware/zero_cpu.py rloo.py --total-episodes 128

ACCELERATE_DEEPSPEED_CONFIG_FILE names DeepSpeed's settings. At the end it prints the learning rate
of each step that the engine made, and how often weights were gathered.
"""

import json
import os

import tyro
from fsdp2_cpu import Options, count_gathers, import_script


def main(options: Options, flags: list[str]):
    from accelerate import PartialState
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters as partition

    PartialState(cpu=True)
    module = import_script(options.script)
    rates = []
    take_step = DeepSpeedEngine._take_model_step

    def noted_step(engine, *args):
        rates.append(engine.get_lr()[0])
        return take_step(engine, *args)

    DeepSpeedEngine._take_model_step = noted_step
    calls = [(partition, "_dist_allgather_fn")]
    calls += [(partition.dist, name) for name in ("all_gather_into_tensor", "all_gather")]
    gathers = count_gathers(module, *calls)
    module.main(tyro.cli(module.Args, args=flags))
    if os.environ["RANK"] == "0":
        print(json.dumps(dict(rates=rates, gathers=gathers)))


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
