"""Run a script under FSDP2 on CPU processes, for tests. accelerate itself would silently use DDP there.

    torchrun --nproc-per-node 2 benchmark/hardware/fsdp2_cpu.py rloo.py --total-episodes 128 --output-dir runs/fsdp2

FSDP2 shards the weights over the processes. The run computes what the same flags compute on one process. At the end it
prints how often weights were gathered, in all and while completions were sampled. While sampling, each layer is
gathered once for all tokens. On GPUs none of this is needed:
accelerate launch --config_file benchmark/accelerate/fsdp2.yaml rloo.py

    python benchmark/hardware/fsdp2_cpu.py

runs all three scripts on two processes, under DDP and under FSDP2, and compares them with one process. Flags and
measures are those of benchmark/hardware/sharded.py. Writes fsdp2_cpu.json. The exit status is 1 if something differs.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import tyro
from accelerate import PartialState
from accelerate.utils import DistributedType
from sharded import FLAGS, POLICY, compare, count_gathers, load_script
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run import SCRIPTS, run, torchrun  # noqa: E402

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
    module = load_script(sys.argv[1])
    gathers = count_gathers(module, (_fsdp_param_group, "foreach_all_gather"))
    module.main(tyro.cli(module.Args, args=sys.argv[2:]))
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(gathers))


def compare_with_one_process():
    work, results = Path(tempfile.mkdtemp(prefix="fsdp2_")), []
    layers = json.loads((POLICY / "config.json").read_text())["num_hidden_layers"]
    for script in SCRIPTS:
        run(script, FLAGS, work / script, ACCELERATE_USE_CPU="true")
        for kind, program in (("DDP", []), ("FSDP2", [__file__])):
            folder = work / f"{script}_{kind}"
            output = run(script, FLAGS, folder, torchrun(2, *program), ACCELERATE_USE_CPU="true")["output"]
            results.append(dict(script=script, kind=kind, **compare(folder, work / script)))
            if kind == "FSDP2":
                results[-1] |= json.loads(output.splitlines()[-1])
            print(json.dumps(results[-1]), flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(dict(flags=FLAGS, runs=results), indent=1) + "\n")
    fine = [
        row["relative_distance"] < 1e-3
        and not row["metrics_that_differ"]
        and row.get("while_sampling", 0) <= layers * row.get("samplings", 0)
        for row in results
    ]
    raise SystemExit(0 if all(fine) else 1)


if __name__ == "__main__":
    main() if len(sys.argv) > 1 else compare_with_one_process()
