"""Start one of the three scripts, and read what it wrote: everything in benchmark/ does it in this
way.

    run("rloo", "--kl-coef 0 --seed 3")["metrics"]        # in a folder that is gone afterwards
    run_all([("rloo", "--seed 1"), ("ppo", "--seed 1")])  # as many at once as there are cores
    main(__doc__, path, {"name": Part(runs)})             # the command line of a program

In all of benchmark/ `rows` are a list of dicts, `flags` are one text, and a `path` or `folder` is a
Path.

    python benchmark/run.py                      # where each result comes from, a line for each
    python benchmark/default/curves.py default   # measures one again

The first command lists the commit, date, minutes and machine of each part of each program. After a
change of a default, an algorithm or random numbers, measure again what depends on it. Most parts
take minutes.
"""

import gc
import importlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import product
from math import inf, nan
from multiprocessing import connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import mean
from typing import Literal

import numpy as np
import tyro
import yaml
from safetensors.numpy import load_file
from tqdm import tqdm

BENCHMARK = Path(__file__).resolve().parent
ROOT = BENCHMARK.parent
POLICY = BENCHMARK / "default" / "policy"
BUILT_IN = "--model-path benchmark/default/policy --dataset benchmark/default/train.jsonl"
BUILT_IN += " --eval-dataset benchmark/default/eval.jsonl --reward exact_match"
SCRIPTS = ("rloo", "grpo", "ppo")
LIBRARIES = ("accelerate", "matplotlib.pyplot", "tyro", "typeguard", "yaml", "safetensors.numpy")
LIBRARIES += ("transformers.models.llama.modeling_llama", "transformers.optimization")
SUMS = ("seconds", "generated_episodes")  # metrics that add up over a run
DEFAULTS = dict(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")


def read_rows(path):
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in open(path, encoding="utf-8")]


def write_rows(path, rows):
    """Write a .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def having(rows, **wanted):
    """The rows that have these entries."""
    return [row for row in rows if all(row.get(name) == x for name, x in wanted.items())]


def column(rows, name):
    """The entries of this name."""
    return [row[name] for row in rows]


def grouped(rows, name):
    """The rows by their entry of this name."""
    groups = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def read_run(folder):
    """A run's flags, its `metrics`, each with the `seconds` of rollout and training until then,
    those of them that are `evaluations`, its `rollouts`, and its `eval_rollouts`."""
    folder = Path(folder)
    if not (folder / "metrics.jsonl").exists():
        raise SystemExit(f"{folder} holds no metrics.jsonl; name the --output-dir of a run")
    rows = read_rows(folder / "metrics.jsonl")
    seconds = 0.0
    for row in rows:
        if row["iteration"] > 0:  # not the evaluation before training
            seconds += row["time/rollout_s"] + row["time/train_s"]
        row["seconds"] = seconds
    found = dict(
        args=yaml.safe_load((folder / "args.yaml").read_bytes()),
        metrics=rows,
        evaluations=[row for row in rows if "eval/scores" in row],
    )
    for name, pattern in dict(rollouts="[0-9]*.jsonl", eval_rollouts="eval_*.jsonl").items():
        files = sorted(folder.glob(f"rollouts/{pattern}"))
        found[name] = [row for file in files for row in read_rows(file)]
    return found


def difference(value, right):
    """How far a number, or a list of them, is from the right one, in units of its size, or of 1 if
    it is smaller. nan is equal to nan."""
    if value == right:
        return 0.0
    try:
        value, right = np.array([value, right], float)
    except (TypeError, ValueError):  # texts, or lists of unequal length
        return inf
    apart = abs(value - right) / np.maximum(abs(right), 1)
    return float(np.where(np.isnan(value) & np.isnan(right), 0, apart).max())


def load_weights(folder):
    """The weights of a model, or of LoRA adapters, by name."""
    names = ("model.safetensors", "adapter_model.safetensors")
    [file] = [folder / name for name in names if (folder / name).exists()]
    return load_file(file)


def relative_distance(folder, right, start=POLICY):
    """How far the final weights of two runs are apart, by norm, in units of how far the second
    one's moved. start: the folder of the model before"""
    expected = load_weights(right / "model")

    def distance(weights):
        differences = [(expected[name] - weights[name]).ravel() for name in expected]
        return np.linalg.norm(np.concatenate(differences, dtype=np.float64))

    # New weights are left out. Only of adapters it is known that B is 0 at first.
    before = {name: weights * ("lora_B" not in name) for name, weights in expected.items()}
    apart = distance(load_weights(folder / "model"))
    return float(apart / distance(before | load_weights(start))) if apart else 0.0


def free_port():
    """A port that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def copy_script(folder, script, *patches):
    """A copy of a script, with patches of benchmark/patches/ or as it is, and beside it what its
    defaults need."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / f"{script}.py", folder)
    if not (folder / "benchmark").exists():
        (folder / "benchmark").symlink_to(BENCHMARK)
    for patch in patches:
        subprocess.run(["git", "apply", str(BENCHMARK / "patches" / patch)], cwd=folder, check=True)
    return folder / f"{script}.py"


def find_original(path, folder, commit=None):
    """The script that a copy was made of: its name, its commit, and a file with its text.

    It is that of the commit whose text has the fewest other lines, and of equals the newest.
    Without git, it is the one beside benchmark/. commit: another one; folder: for the file
    """
    lines = set(path.read_text(encoding="utf-8").splitlines())

    def distance(text):
        return len(lines ^ set(text.splitlines()))

    texts = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in SCRIPTS}
    script = min(texts, key=lambda name: distance(texts[name]))
    commits = git("log", "--format=%h", "--", f"{script}.py").split()
    found = {}
    for commit in [commit] if commit else commits:
        found[commit] = git("show", f"{commit}:./{script}.py")
        if not found[commit]:
            raise SystemExit(f"git knows no {script}.py of the commit {commit}")
    if not found:
        return script, None, ROOT / f"{script}.py"
    commit = min(found, key=lambda commit: distance(found[commit]))
    file = copy_script(folder, script)
    file.write_text(found[commit], encoding="utf-8")
    return script, commit, file


def import_script(script):
    """Import a script (`rloo`, or a path)."""
    path = (ROOT / script).with_suffix(".py").resolve()
    sys.path.insert(0, str(path.parent))
    loaded = sys.modules.get(path.stem)
    if loaded and Path(loaded.__file__).resolve() != path:
        del sys.modules[path.stem]  # another script of this name
    return importlib.import_module(path.stem)


def run_here(job):
    """What `read_run` reads of a run in this process. It makes no other one.

    A job is a script (`rloo`, or a path), its flags, functions that change the script before it
    starts, and where given the folder that keeps the run. `rloo reinforce.patch` is a script with a
    patch. What the functions leave in `found` of the script's module is returned, too.
    """
    script, flags, *more = job
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        output_dir = f"{folder}/run"
        try:
            if script.endswith(".patch"):
                script = copy_script(Path(folder), *script.split())
            module = import_script(script)
            for extra in more:
                if callable(extra):
                    extra(module)
                else:
                    output_dir = extra
            words = [*flags.split(), "--output-dir", str(output_dir)]
            module.main(tyro.cli(module.Args, args=words))
        except (Exception, SystemExit) as error:
            if getattr(error, "code", True):  # Otherwise the run was finished before.
                printed = Path(log.name).read_text("utf-8", "replace")[-4000:]
                raise RuntimeError(f"{script} {flags}\n{printed}") from error
        return read_run(output_dir) | getattr(module, "found", {})


def work(sender, variables, function, *args):
    """Send what a function returns, or why it failed."""
    os.environ |= variables
    gc.freeze()  # Otherwise a run's garbage collection copies the memory of all libraries.
    tqdm.set_lock(threading.RLock())  # Its own lock would outlive a process that is killed.
    try:
        result = function(*args)
    except (Exception, SystemExit):
        result = dict(failed=traceback.format_exc())
    sender.send(result)


def apart(function, *args, processes=1, seconds=None, method="forkserver"):
    """What a function returns in a process of its own, or in the first of several, which get
    torchrun's variables. If one fails, dies or takes too long, all are killed. `failed` says why.

    The processes have imported the libraries already, and nothing else of this program's: a start
    costs little. They share PYTHONHASHSEED. With the method "spawn" a process imports all again,
    and obeys os.environ.
    """
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload([*LIBRARIES])
    shared = dict(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    shared |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), ACCELERATE_USE_CPU="true")
    family = {}  # each process, by the end of its pipe
    for rank in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        variables = {}
        if processes > 1:
            variables = shared | dict(RANK=str(rank), LOCAL_RANK=str(rank))
        family[receiver] = context.Process(target=work, args=(sender, variables, function, *args))
        family[receiver].start()
        sender.close()
    results = {}
    failures = []
    while len(results) < processes and not failures:
        ready = connection.wait(family.keys() - results.keys(), seconds)
        if not ready:
            failures.append(f"no result in {seconds:g} s")
            for process in family.values():
                process.kill()
        for receiver in ready:
            try:
                results[receiver] = receiver.recv()
                failures += filter(None, [results[receiver].get("failed")])
            except EOFError:
                failures.append("a process died")
    for process in family.values():
        process.join(2)
        if process.exitcode:
            failures.append(f"exit code {process.exitcode}")
        process.kill()
        process.join()
    first, *_ = family
    return dict(failed="\n".join(failures)) if failures else results[first]


def run(script, flags="", *more, processes=1):
    """`run_here` of a job, in processes of its own. Ends this program where it fails."""
    result = apart(run_here, (script, flags, *more), processes=processes)
    if "failed" in result:
        raise SystemExit(result["failed"])
    return result


def run_all(jobs, finish=lambda job, result: result):
    """`run_here` of every job in a process of its own, as many at once as there are cores: what
    `finish(job, result)` makes of each."""
    results = []
    with ThreadPool() as pool:
        for job, result in zip(jobs, pool.imap(partial(apart, run_here), jobs)):
            if "failed" in result:
                raise SystemExit(result["failed"])
            results.append(finish(job, result))
            print(f"{' '.join(job[:2])}: done", file=sys.stderr, flush=True)
    return results


def machine():
    """What numbers depend on besides the flags: the processor, a GPU, and the versions of
    libraries. Every run has one thread."""
    torch = importlib.import_module("torch")
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    processor, *_ = re.findall(r"^model name\s*: (.+)$", text, re.M) or [platform.machine()]
    if torch.cuda.is_available():
        processor += f" with {torch.cuda.get_device_name()}"
    return (
        f"{processor} {torch.backends.cpu.get_cpu_capability()}, python {platform.python_version()}"
        f", torch {torch.__version__}, transformers {version('transformers')}"
    )


# ---- a program that measures
SEEN = set()  # the kinds of jobs of smoke runs


@dataclass
class Part:
    """One measurement of a program: a set of runs, and their curves. Its rows and its minutes are
    kept apart from those of the other parts."""

    runs: list[tuple]
    """of each: the entries that name its row, the script, its flags, and functions that change the
    script before it starts"""
    flags: str = ""
    """flags of all runs"""
    seeds: Iterable[int] = (1,)
    """each run is made with each of them"""
    metrics: str = "objective/scores eval/scores"
    """the row of a run has their `curves`"""
    measure: Callable[[dict, bool], list[dict]] | None = None
    """measure(jobs, smoke) returns the rows, where a row is not the curves of one job"""
    prepare: Callable[[], None] | None = None
    """what must be made before, if this is no smoke run"""
    short: str = "--total-episodes 128 --eval-every 2"
    """flags that make a smoke run of each job: the last of two equal flags counts"""

    def jobs(self, smoke=False):
        """Each job, as `run_here` takes it, with the entries that name its row. Of each script,
        also of each that is changed by functions, a smoke run has the first of all the program's
        parts that keep or measure the same."""
        jobs = {}
        for seed, (names, script, own, *edits) in product(self.seeds, self.runs):
            flags = f"{self.flags} {own} --seed {seed}"
            if smoke:
                flags += f" {self.short}"
                kind = script, *edits, self.metrics, self.measure
                if kind in SEEN:
                    continue
                SEEN.add(kind)
            row = dict(script=script, flags=own.strip(), seed=seed) | names
            jobs[script, flags, *edits] = row
        return jobs

    def rows(self, smoke=False):
        """Run the jobs, or those of a smoke run."""
        jobs = self.jobs(smoke)
        if self.measure:
            return self.measure(jobs, smoke)
        return run_all(list(jobs), lambda job, result: jobs[job] | curves(result, self.metrics))


def main(about, result, parts, plot=None):
    """The command line of a program that measures.

    result: the .json file of its rows; plot(rows, folder): draws the figures into a folder
    """
    Name = Literal[tuple(parts)]

    @dataclass
    class Options:
        parts: tyro.conf.Positional[tuple[Name, ...]] = ()
        """to measure; the results of the others stay. Without a name all parts are measured"""
        smoke: bool = False
        """run a short version of each part, and write nothing"""
        plot: bool = False
        """measure nothing, only draw the figures again"""

    options = tyro.cli(Options, description=about)
    os.chdir(ROOT)
    os.environ |= DEFAULTS
    for name in () if options.plot else options.parts or parts:
        if options.smoke:
            parts[name].rows(smoke=True)
        else:
            measure_part(result, name, parts)
    if plot:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) if options.smoke else result.parent
            plot(read_result(result)["rows"], folder)


def measure_part(path, name, parts):
    """Measure a part, and write its rows into the program's file, with what is known about their
    origin."""
    part = parts[name]
    start = time.time()
    commit = git("rev-parse", "--short", "HEAD")
    if git("status", "--porcelain", "--", "*.py", "*.patch"):
        commit += ", changed"
    if part.prepare:
        part.prepare()
    rows = [dict(part=name) | row for row in part.rows()]
    stamp = dict(
        commit=commit,
        date=date.today().isoformat(),
        minutes=round((time.time() - start) / 60, 1),
        machine=machine(),
    )
    old = read_result(path)
    in_order = []
    for other in parts | old["parts"]:  # also one that the program had before
        in_order += rows if other == name else having(old["rows"], part=other)
    write_result(path, old["parts"] | {name: stamp}, in_order)


def git(*words):
    """What git prints in the repository's root, or nothing without git."""
    if not shutil.which("git"):
        return ""
    finished = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return finished.stdout.strip()


def read_result(path):
    """A file of results: for each of its `parts` the commit, the date and more, and the `rows`,
    each with its part."""
    if not path.exists():
        return dict(parts={}, rows=[])
    return json.loads(path.read_bytes())


def write_result(path, parts, rows):
    """A file of results, with a line for each row."""
    text = json.dumps(dict(parts=parts, rows=rows))
    path.write_text(text.replace('{"part": ', '\n{"part": ') + "\n")


def curves(result, metrics):
    """A run in few points, one for each evaluation: its episode, and those of the metrics that the
    run has. A point of a metric of training is the mean since the evaluation before. The first
    point is that of iteration 1."""
    evaluations = result["evaluations"]
    rows = result["metrics"][1:]
    ends = column(evaluations, "iteration")
    points = {"episode": column(evaluations, "episode")}
    for name in metrics.split():
        spans = [rows[start:end] for start, end in zip([0, *ends], [1, *ends[1:]])]
        if name.startswith("eval/") or name in SUMS:
            spans = [[row] for row in evaluations]
        values = [[row[name] for row in span if name in row] for span in spans]
        if any(values):
            points[name] = [float(f"{mean(some or [nan]):.4g}") for some in values]
    return points


# The programs that measure. The data of each lies beside it.
FILES = [path for path in sorted(BENCHMARK.glob("*/*.py")) if path.with_suffix(".json").exists()]
PROGRAMS = [path.relative_to(BENCHMARK) for path in FILES]


def list_results():
    for program in PROGRAMS:
        for name, stamp in read_result(BENCHMARK / program.with_suffix(".json"))["parts"].items():
            print(program, name, *stamp.values(), sep=" | ")


if __name__ == "__main__":
    tyro.cli(list_results, description=__doc__)
