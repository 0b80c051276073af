"""Check a changed copy of a script: kills and a second process must not change its run.

    python benchmark/check_copy.py my_rloo.py                    # less than a minute
    python benchmark/check_copy.py my_rloo.py --my-new-flag 0.1  # with flags of the copy

The copy trains on the built-in task: on one process, on two, and on two that are killed twice by
SIGKILL and resumed. The resumed run must be the same bit by bit. Two processes add numbers up in
another order, so their run may differ by rounding from that of one. They share mini-batches of five
episodes, so their shares are not equal. If a promise is broken, the exit status is 1. A copy that
samples or trains in bfloat16 breaks the second one: there, rounding depends on the share.

A flag that no script of this repository has is new. Give each new flag a value that lets its lines
run: the program names those that the command leaves out. What the program writes, it removes.

All runs are on the CPU. Weights are compared by the distance that they moved, and a metric by its
size, or by 0.05 if it is smaller. AdamW has eps 1e-5: with its default it makes a whole step of a
gradient that is 0 up to rounding.
"""

import os
import sys
import tempfile
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import tyro
from run import BENCHMARK, DEFAULTS, ROOT, SCRIPTS, import_script, read_run, relative_distance

sys.path.append(str(BENCHMARK / "hardware"))
from kill_and_resume import FLAGS, start
from rounding import count_different
from sharded import differences

# Six iterations. Each mini-batch has 5 episodes, or 3 in the last iteration: two processes share
# them as 3 and 2, or as 2 and 1.
UNEVEN = "--total-episodes 112 --batch-size 20 --num-mini-batches 4 --per-device-train-batch-size 2"
SECONDS = 600  # A run that takes longer hangs.


def compare(about: str, folder: Path, right: Path, allowed: float) -> bool:
    """Print how far a run is from the right one. Returns whether this is allowed."""
    found, expected = map(read_run, (folder, right))
    weights = relative_distance(folder, right, Path(expected["args"]["model_path"]))
    metric, name, iteration = max(differences(found["metrics"], expected["metrics"]))
    count = count_different(found, expected)
    is_right = max(weights, metric) <= allowed and count["completions_that_differ"] == 0
    print(
        f"{about}: {'right' if is_right else 'BROKEN'}; allowed is {allowed:g}\n"
        f"    weights: {weights:.1e} of the distance that they moved\n"
        f"    metrics: at most {metric:.1e}, of {name} in iteration {iteration}\n"
        "    completions: {completions_that_differ} of {completions} differ".format(**count)
    )
    return is_right


def flags_of(module) -> set[str]:
    """The flags of a script, as a command line has them."""
    return {"--" + field.name.replace("_", "-") for field in fields(module.Args)}


def new_flags_left_out(module, words: list[str]) -> list[str]:
    """Flags of the copy that no script of this repository has, and that the command leaves out."""
    known = set().union(*(flags_of(import_script(name)) for name in SCRIPTS))
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    given |= {name.replace("--no-", "--") for name in given}  # a flag that is switched off
    return sorted(flags_of(module) - known - given)


@dataclass
class Args:
    copy: tyro.conf.Positional[Path]
    """the changed script; after it come its flags"""


def main(args: Args, flags: list[str]):
    path = args.copy.resolve()
    sys.dont_write_bytecode = True  # beside the copy
    os.chdir(ROOT)
    os.environ |= DEFAULTS
    module = import_script(str(path))
    module.torch.optim.AdamW = partial(module.torch.optim.AdamW, eps=1e-5)
    settings = module.__name__, " ".join([FLAGS, UNEVEN, *flags])
    with tempfile.TemporaryDirectory(prefix="check_copy_") as work:
        one, two, killed = (Path(work, name) for name in ("one", "two", "killed"))
        start(*settings, one, 1)
        start(*settings, two, 2, seconds=SECONDS)
        for phase in ("written", "metrics"):  # in the second iteration, and in the third
            if not start(*settings, killed, 2, (phase, 2, 0), SECONDS):
                raise SystemExit("the run ended before a kill; it needs more iterations")
        start(*settings, killed, 2, seconds=SECONDS)
        is_right = [
            compare("two processes, killed twice and resumed, or never killed", killed, two, 0),
            compare("two processes, or one", two, one, 1e-3),
        ]
    for flag in new_flags_left_out(module, flags):
        print(f"{flag} is new, and the command leaves it out: what it switches on did not run")
    sys.exit(not all(is_right))


if __name__ == "__main__":
    main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
