"""Run a script under FSDP2 on CPU processes, for tests: accelerate itself gives DDP there, without a word.

    torchrun --nproc-per-node 2 benchmark/fsdp2_cpu.py rloo.py --total-episodes 128 --output-dir runs/fsdp2

FSDP2 shards the weights over the processes; what the run computes is what the same flags compute on one process. At the
end it prints how often weights were gathered: while sampling and scoring (never: once before), and in all. On GPUs none
of this is needed: accelerate launch --config_file benchmark/accelerate/fsdp2.yaml rloo.py ...

    python benchmark/fsdp2_cpu.py

compares all three scripts on two processes, under DDP and under FSDP2, with one process, by the flags and measures of
benchmark/sharded.py, and writes benchmark/results/fsdp2_cpu.json. Exit status 1 where something differs.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

SETTINGS = dict(
    ACCELERATE_USE_CPU="true",
    ACCELERATE_USE_FSDP="true",
    FSDP_VERSION="2",
    FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
    FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer",
    FSDP_RESHARD_AFTER_FORWARD="true",
    FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
)
gathers = {"in rollout passes": 0, "in all": 0}


def count_gathers(module):
    """Count FSDP2's all-gathers of weights, and those inside the functions that make a rollout's passes."""
    in_rollout, all_gather = False, _fsdp_param_group.foreach_all_gather

    def counted(*args, **kwargs):
        gathers["in all"] += 1
        gathers["in rollout passes"] += in_rollout
        return all_gather(*args, **kwargs)

    def watched(function):
        def passes(*args, **kwargs):
            nonlocal in_rollout
            in_rollout = True
            try:
                return function(*args, **kwargs)
            finally:
                in_rollout = False

        return passes

    _fsdp_param_group.foreach_all_gather = counted
    module.sample, module.completion_pass = watched(module.sample), watched(module.completion_pass)


def main():
    os.environ.update(SETTINGS)
    PartialState(cpu=True)
    # accelerate turns FSDP on where it believes in several GPUs
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    spec = importlib.util.spec_from_file_location("script", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    sys.modules["script"] = module
    spec.loader.exec_module(module)
    count_gathers(module)
    module.main(tyro.cli(module.Args, args=sys.argv[2:]))
    if int(os.environ["RANK"]) == 0:
        print("all-gathers of weights:", ", ".join(f"{count} {where}" for where, count in gathers.items()))


def compare_with_one_process():
    from sharded import BENCHMARK, FLAGS, compare, run  # its folder is the first where Python looks

    work, results = Path(tempfile.mkdtemp(prefix="fsdp2_")), []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    for script in ("rloo", "grpo", "ppo"):
        run(script, work / script, stage=None)
        for kind, program in (("DDP", []), ("FSDP2", [__file__])):
            folder = work / f"{script}_{kind}"
            command = [*launcher, *program, f"{BENCHMARK.parent / script}.py", *FLAGS, "--output-dir", str(folder)]
            output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            results.append(dict(script=script, kind=kind, **compare(folder, work / script)))
            for in_rollouts, in_all in re.findall(r"all-gathers of weights: (\d+) in rollout passes, (\d+)", output):
                results[-1] |= dict(gathers=int(in_all), gathers_in_rollout_passes=int(in_rollouts))
            print(json.dumps(results[-1]), flush=True)
    path = BENCHMARK / "results" / "fsdp2_cpu.json"
    path.write_text(json.dumps(dict(flags=" ".join(FLAGS), runs=results), indent=1) + "\n")
    fine = [row["relative_distance"] < 1e-3 and not row["metrics_that_differ"] for row in results]
    raise SystemExit(0 if all(fine) and not any(row.get("gathers_in_rollout_passes") for row in results) else 1)


if __name__ == "__main__":
    main() if len(sys.argv) > 1 else compare_with_one_process()
