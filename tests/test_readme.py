"""README.md's commands: each is run here as it stands, with a few episodes, or by .ci/run, or is marked as not run."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
from conftest import HERE, one_text, only

README = (HERE / "README.md").read_text(encoding="utf-8")
BY_CI = ("pip install -r requirements.txt && python rloo.py", "pip install -r requirements.txt && pytest")
FEW = "--total-episodes 64 --num-sample-generations 0"


def commands() -> list[str]:
    """The indented lines of README.md that begin with a program, their continuations joined."""
    joined = README.replace(" \\\n", " ")
    return [
        re.sub(" +", " ", line)
        for line in re.findall(r"^    ((?:pip|python|accelerate|torchrun|srun|git) .*)$", joined, re.M)
    ]


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository, and `clone(command)`, which runs one in it."""
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=HERE, capture_output=True, text=True)
    for file in files.stdout.split():
        if (HERE / file).exists() and not file.startswith("tests/"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / file, tmp_path / file)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    settings = dict(PATH=path, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")

    def run(command, wait=True, **environment):
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=os.environ | settings | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not wait:
            return process
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        return output

    run.folder = tmp_path
    return run


def run_plan(clone, command):
    assert "steps: 256" in clone(command)


def run_with_few_episodes(clone, command):
    output = clone(f"{command} {FEW}")
    assert "64 episodes, 1 steps" in output.splitlines()[-1], output


def run_with_your_own(clone, command):
    """Your model is a copy of the embedded one, your reward README's."""
    code = README[README.index("    def score(completions") :].split("\n\n")[0]
    (clone.folder / "reward.py").write_text(re.sub("^    ", "", code, flags=re.M))
    shutil.copytree(clone.folder / "benchmark/default/policy", clone.folder / "your/model")
    for name, file in (("prompts.jsonl", "train.jsonl"), ("held_out.jsonl", "eval.jsonl")):
        shutil.copy(clone.folder / "benchmark/default" / file, clone.folder / name)
    run_with_few_episodes(clone, command.replace("--response-length 256", "--response-length 12"))
    [run] = (clone.folder / "runs").iterdir()
    assert {"reward/right", "reward/length"} <= json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]).keys()


def run_and_resume(clone, command):
    for save_every in ("--save-every 1", "--save-every 1"):
        output = clone(f"{command.replace('--save-every 20', save_every)} {FEW}")
        shutil.rmtree(clone.folder / "runs/mine/model")
    assert "--resume: 1 iterations are done" in output


def run_on_adapter(clone, command):
    clone(f"python rloo.py --lora-r 2 --output-dir runs/x {FEW}")
    clone(command)
    run_with_few_episodes(clone, "python rloo.py --model-path merged")


def run_as_two_machines(clone, command):
    """Two launchers on one machine, of one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("29500", str(port))
    command = f"{command} {FEW} --output-dir runs/two"
    other = clone(command, wait=False, RANK="1", FIRST="127.0.0.1")
    output = clone(command, RANK="0", FIRST="127.0.0.1")
    assert other.wait(timeout=60) == 0 and "2 x cpu" in output


RUNS = {  # the beginning of a command, and how it is run
    "python rloo.py --plan": run_plan,
    "python rloo.py --output-dir runs/mine": run_and_resume,
    "python -c": run_on_adapter,
    "accelerate launch rloo.py --rloo-k 4 --model-path": run_with_your_own,
    "accelerate launch rloo.py --rloo-k 4": run_with_few_episodes,
    "torchrun --nnodes 2": run_as_two_machines,
}


@one_text
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [line for line in commands() if "variants/" not in line],
    ids=lambda command: shlex.split(command)[0] + command[-20:],
)
def test_every_command_of_the_readme(script, command, clone):
    """Or its paragraph says that it was not run here."""
    if command in BY_CI:
        assert "readme_command" in (HERE / ".ci/run").read_text()
    elif command.startswith("srun"):
        assert "by Slurm (not run here)" in README
    else:
        run = next(how for beginning, how in RUNS.items() if command.startswith(beginning))  # StopIteration: add a line
        run(clone, command)


@only("grpo")
@pytest.mark.slow
def test_the_variant_of_the_readme(script, clone):
    """Its lines are the patch's; it is applied, trained, and taken back by the three commands."""
    patch = (HERE / "benchmark/variants/overlong_punishment.patch").read_text()
    lines = re.findall(r"^    (\+ .*|\+def .*)$", README, re.M)
    assert len(lines) == 5 and all(f"\n{line}\n" in patch for line in lines)
    apply, train, take_back = [line for line in commands() if "variants/" in line]
    original = (clone.folder / "grpo.py").read_text()
    clone(apply)
    assert (clone.folder / "grpo.py").read_text() != original
    assert "64 episodes" in clone(f"{train.replace('8192', '64')} --overlong-cache 4")
    clone(take_back)
    assert (clone.folder / "grpo.py").read_text() == original


@one_text
def test_every_path_of_the_readme(script):
    """What README.md and benchmark/README.md name or link to is there."""
    for file in (HERE / "README.md", HERE / "benchmark/README.md"):
        text = file.read_text(encoding="utf-8")
        names = re.findall(r"\]\(([^)#:]+)\)", text)
        named = re.findall(r"\bbenchmark/[\w/.]+\w", text)
        missing = [name for name in names if not (file.parent / name).exists()]
        missing += [name for name in named if not (HERE / name).exists() and "smollm2/model" not in name]
        assert not missing, f"{file}: {missing}"
