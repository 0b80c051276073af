"""MBPP (arXiv 2108.07732): a program that a policy writes must pass the tests of its row.

    python benchmark/code/mbpp.py --parquet train.parquet test.parquet
    python grpo.py --reward benchmark/code/mbpp.py:score --dataset runs/code_train.jsonl ...

The first command needs `pip install datasets`. The page beside this program has a whole run.

The program is the last code block of a completion, or all of it if it has none. sandbox.py runs it,
and then the tests, in a process of its own.
"""

import importlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import warnings
from multiprocessing.pool import ThreadPool
from pathlib import Path

import tyro

if sys.platform != "linux":
    raise SystemExit("benchmark/code/mbpp.py needs Linux")

SANDBOX = Path(__file__).resolve().with_name("sandbox.py")
# Limits of each process: CPU seconds, and bytes of memory, of a file, and of a core dump.
LIMITS = {"RLIMIT_CPU": 5, "RLIMIT_AS": 2**31, "RLIMIT_FSIZE": 2**20, "RLIMIT_CORE": 0}
SECONDS = 100  # of the clock, for a program that sleeps. A busy machine should change no score.
PROCESSES = 20  # that a program may have at once
TASK = "Write a Python function, in a code block. {text}\nThis is one of its tests:\n{test_list[0]}"
BLOCK = re.compile(r"^ *```[^\n]*\n(.*?)(?:^ *```|\Z)", re.M | re.S)  # its end may be missing


def score(completions, tests, **_):
    """1.0 where the program of a completion, text or messages, runs, and then the row's `tests`, a
    list of statements. Else 0.0. None: the sandbox failed."""
    programs = []
    for completion, statements in zip(completions, tests, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        programs.append([*(BLOCK.findall(text) or [text])[-1:], *statements])
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    with ThreadPool(max(1, cores)) as pool:
        return pool.map(passes, programs, chunksize=1)


def passes(sources):
    """The score of one program."""
    word = secrets.token_hex()
    request = json.dumps([sources, word, LIMITS, SECONDS, PROCESSES])
    try:
        folder = tempfile.mkdtemp()
        # A file has a limit. A pipe could be held open by a process that is left.
        with tempfile.TemporaryFile() as output:
            keeper = subprocess.run(
                [sys.executable, SANDBOX],
                input=request.encode(),
                stdout=output,
                cwd=folder,
                env={"PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
            output.seek(0)
            passed = word.encode() in output.read()
        subprocess.run(["rm", "-rf", folder])  # `shutil.rmtree` fails if folders are very deep.
    except OSError as error:
        warnings.warn(f"the sandbox failed: {error}")
        return None
    return None if keeper.returncode > 0 else float(passed)


def prepare(
    parquet: tuple[Path, Path], folder: Path = Path(__file__).resolve().parents[2] / "runs"
):
    """Write both files of prompts. A prompt shows one test. All of them decide.

    parquet: files of MBPP's form, to train and to test on; folder: gets the prompts
    """
    read_table = importlib.import_module("pyarrow.parquet").read_table
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in zip(("train", "test"), parquet):
        path = folder / f"code_{name}.jsonl"
        rows = read_table(source).to_pylist()
        with open(path, "w", encoding="utf-8") as file:
            for row in rows:
                prompt = [{"role": "user", "content": TASK.format_map(row)}]
                tests = [row["test_setup_code"], *row["test_list"]]
                file.write(json.dumps(dict(prompt=prompt, tests=tests)) + "\n")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    tyro.cli(prepare, description=__doc__)
