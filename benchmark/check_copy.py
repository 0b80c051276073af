"""Check a changed copy of a script: kills and a second process must not change its run.

    python benchmark/check_copy.py my_rloo.py              # less than a minute
    python benchmark/check_copy.py my_rloo.py --rloo-k 2   # with flags of the copy

The copy trains on the built-in task: on one process, on two, and on one that is killed twice by
SIGKILL and resumed. The resumed run must be the same bit by bit. Two processes add numbers up in
another order, so theirs may differ by rounding. If a promise is broken, the exit status is 1.

All runs are on the CPU. Weights are compared by the distance that they moved, and a metric by its
size, or by 0.05 if it is smaller. AdamW has eps 1e-5: with its default it makes a whole step of a
gradient that is 0 up to rounding.
"""

import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from run import BENCHMARK, import_script, prepare_forks, read_run, relative_distance

sys.path.append(str(BENCHMARK / "hardware"))
from kill_and_resume import FLAGS, start
from rounding import count_different
from sharded import differences

SHORT = "--total-episodes 92"  # 6 iterations


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


@dataclass
class Args:
    copy: tyro.conf.Positional[Path]
    """the changed script; after it come its flags"""


def main(args: Args, flags: list[str]):
    path = args.copy.resolve()
    prepare_forks()
    module = import_script(str(path))
    module.torch.optim.AdamW = partial(module.torch.optim.AdamW, eps=1e-5)
    work = Path(tempfile.mkdtemp(prefix="check_copy_"))
    settings = module.__name__, " ".join([FLAGS, SHORT, *flags])
    one, two, killed = work / "one", work / "two", work / "killed"
    start(*settings, one, 1)
    start(*settings, two, 2, seconds=600)
    for phase in ("written", "metrics"):  # in the second iteration, and in the third
        if not start(*settings, killed, 1, (phase, 2, 0)):
            raise SystemExit(f"{killed} ended before a kill; it needs more iterations")
    start(*settings, killed, 1)
    is_right = [
        compare("killed twice and resumed, or never killed", killed, one, 0),
        compare("two processes, or one", two, one, 1e-3),
    ]
    sys.exit(not all(is_right))


if __name__ == "__main__":
    main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
