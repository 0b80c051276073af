"""Run a script on CPU processes that share its weights, by FSDP2. accelerate itself would silently
use DDP there. On GPUs the configurations of benchmark/accelerate/ are enough.

    torchrun --nproc-per-node 2 benchmark/hardware/shards.py rloo.py --total-episodes 128

same_run.py does so with DeepSpeed, too. Both leave in `found` of the script's module how often
weights were gathered, in all and while completions were sampled.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import import_script

FSDP2 = dict(
    ACCELERATE_USE_FSDP="true",
    FSDP_VERSION="2",
    FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
    FSDP_RESHARD_AFTER_FORWARD="true",
    FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
)


def count_gathers(module, *owners_and_names):
    """Count how often the functions that gather weights are called."""
    module.found = gathers = Counter(gathers=0, while_sampling=0, samplings=0)
    sample = module.sample

    def watched_sample(*args):
        before = gathers["gathers"]
        samples = sample(*args)
        gathers.update(while_sampling=gathers["gathers"] - before, samplings=1)
        return samples

    def counted(function):
        def gather(*args, **inputs):
            gathers["gathers"] += 1
            return function(*args, **inputs)

        return gather

    module.sample = watched_sample
    for owner, name in owners_and_names:
        setattr(owner, name, counted(getattr(owner, name)))


def fsdp2(module):
    """Let the script run under FSDP2."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    os.environ |= FSDP2 | os.environ | dict(ACCELERATE_USE_CPU="true")
    PartialState(cpu=True)
    # accelerate turns FSDP on where it believes in several GPUs.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    count_gathers(module, (_fsdp_param_group, "foreach_all_gather"))


def zero(stage, module):
    """Let it run under DeepSpeed with this ZeRO stage. `found` has the learning rate of each step
    that the engine makes."""
    # With another threshold ZeRO-3 would not shard weights as small as these.
    settings = dict(stage=stage, stage3_param_persistence_threshold=0)
    config = Path(tempfile.mkdtemp(), "zero.json")
    config.write_text(
        json.dumps(dict(train_micro_batch_size_per_gpu=1, zero_optimization=settings))
    )
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(config)
    os.environ.pop("ACCELERATE_USE_CPU", None)  # With it accelerate would ignore these.
    from accelerate import PartialState
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters as partition

    PartialState(cpu=True)
    calls = [(partition.dist, name) for name in ("all_gather_into_tensor", "all_gather")]
    count_gathers(module, (partition, "_dist_allgather_fn"), *calls)
    module.found["rates"] = []
    take_step = DeepSpeedEngine._take_model_step

    def noted_step(engine, *args):
        module.found["rates"].append(engine.get_lr()[0])
        return take_step(engine, *args)

    DeepSpeedEngine._take_model_step = noted_step


@dataclass
class Options:
    script: tyro.conf.Positional[str]
    """rloo.py, grpo.py or ppo.py. Its flags follow"""


def main(options, flags):
    module = import_script(options.script)
    fsdp2(module)
    module.main(tyro.cli(module.Args, args=flags))


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
