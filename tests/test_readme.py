"""README.md and docs/: their commands run, their links lead somewhere, and what they name exists.

A command is an indented line that begins with a program. Each is run here with a few episodes, or by .ci/run, or its
paragraph says that it was "not run here".
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HERE, MODULES, SCRIPTS, one_text, only

PAGES = [HERE / "README.md", HERE / "benchmark/README.md", *sorted((HERE / "docs").rglob("*.md"))]
WITH_COMMANDS = [page for page in PAGES if page.parent.name != "benchmark"]
README = (HERE / "README.md").read_text(encoding="utf-8")
BY_CI = ("pip install -r requirements.txt && python rloo.py", "pip install -r requirements.txt && pytest")
FEW = "--total-episodes 64 --num-sample-generations 0"


def commands(page: Path) -> list[tuple[str, str]]:
    """The commands of a page, each with the paragraph before it. A line that ends with \\ goes on in the next."""
    found = []
    paragraphs = page.read_text(encoding="utf-8").replace(" \\\n", " ").split("\n\n")
    for before, paragraph in zip(["", *paragraphs], paragraphs):
        for line in re.findall(
            r"^    ((?:[A-Z_]+=\S+ )*(?:pip|python|accelerate|torchrun|srun|git) .*)$", paragraph, re.M
        ):
            found.append((re.sub(" +", " ", line), before))
    return found


ALL_COMMANDS = {}  # command: the paragraph before it
for page in WITH_COMMANDS:
    ALL_COMMANDS |= dict(commands(page))


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
    assert output.splitlines()[-1].startswith("64 episodes, "), output


def run_with_your_own(clone, command):
    """Your model is a copy of the built-in one. Your reward is README's."""
    code = README[README.index("    def score(completions") :].split("\n\n")[0]
    (clone.folder / "reward.py").write_text(re.sub("^    ", "", code, flags=re.M))
    shutil.copytree(clone.folder / "benchmark/default/policy", clone.folder / "your/model")
    for name, file in (("prompts.jsonl", "train.jsonl"), ("held_out.jsonl", "eval.jsonl")):
        shutil.copy(clone.folder / "benchmark/default" / file, clone.folder / name)
    command = command.replace("--response-length 256", "--response-length 12").replace("--batch-size 32", "")
    run_with_few_episodes(clone, command)
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


def run_and_draw(clone, command):
    clone(f"python rloo.py {FEW}")
    clone(command)
    assert (clone.folder / "runs/plot.png").stat().st_size > 10_000


def run_with_patch(clone, command):
    run_with_few_episodes(clone, command)
    assert clone("git apply -R --check benchmark/ladder/reinforce.patch") == ""


def write_the_ladder_again(clone, command):
    """Without a run, the page and its data stay as they are."""
    before = [(clone.folder / name).read_text() for name in ("docs/ladder.md", "benchmark/ladder/ladder.json")]
    clone(command)
    after = [(clone.folder / name).read_text() for name in ("docs/ladder.md", "benchmark/ladder/ladder.json")]
    assert before == after


def climb_a_short_ladder(clone, command):
    """One seed, one set of prompts, and little of each."""
    (clone.folder / "benchmark/ladder/ladder.json").unlink()
    clone(f"{command} --seeds 1 --sets 1 fresh --episodes 128 --repetitions 2")
    rows = json.loads((clone.folder / "benchmark/ladder/ladder.json").read_text())
    assert {row["rung"] for row in rows} >= {"REINFORCE", "RLOO", "GRPO", "PPO"}
    assert {row["repetitions"] for row in rows if row["measured"] == "gradient"} == {2}


RUNS = {  # the beginning of a command, and how it is run
    "python rloo.py --plan": run_plan,
    "python rloo.py --output-dir runs/mine": run_and_resume,
    "python rloo.py": run_with_few_episodes,
    "python -c": run_on_adapter,
    "python grpo.py --batch-size 32": run_with_your_own,
    "python grpo.py": run_with_few_episodes,
    "python ppo.py": run_with_few_episodes,
    "python benchmark/plot.py": run_and_draw,
    "git apply benchmark/ladder/reinforce.patch && python rloo.py": run_with_patch,
    "python benchmark/ladder/ladder.py --page": write_the_ladder_again,
    "python benchmark/ladder/ladder.py": climb_a_short_ladder,
    "accelerate launch rloo.py --rloo-k 4 --model-path": run_with_your_own,
    "accelerate launch rloo.py": run_with_few_episodes,
    "ACCELERATE_USE_CPU=true torchrun": run_with_few_episodes,
    "torchrun --nnodes 2": run_as_two_machines,
}


@one_text
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [command for command in ALL_COMMANDS if "variants/" not in command and "failures/" not in command],
    ids=lambda command: shlex.split(command)[0] + command[-20:],
)
def test_every_command_of_the_pages(script, command, clone):
    """It runs, or the paragraph before it says that it was not run here."""
    if command in BY_CI:
        assert "readme_command" in (HERE / ".ci/run").read_text()
    elif "not run here" not in ALL_COMMANDS[command]:
        run = next(how for beginning, how in RUNS.items() if command.startswith(beginning))  # StopIteration: add a line
        run(clone, command)


@only("grpo")
@pytest.mark.slow
def test_the_variant_of_the_pages(script, clone):
    """docs/variants.md shows lines of a patch. Its three commands apply the patch, train, and take it back."""
    text = (HERE / "docs/variants.md").read_text()
    patch = (HERE / "benchmark/variants/overlong_punishment.patch").read_text()
    lines = re.findall(r"^    (\+ .*|\+def .*)$", text, re.M)
    assert len(lines) >= 4 and all(f"\n{line}\n" in patch for line in lines)
    apply, train, take_back = [line for line in ALL_COMMANDS if "overlong_punishment" in line or "long_judge" in line]
    original = (clone.folder / "grpo.py").read_text()
    clone(apply)
    assert (clone.folder / "grpo.py").read_text() != original
    assert "64 episodes" in clone(f"{train.replace('8192', '64')} --overlong-cache 4")
    clone(take_back)
    assert (clone.folder / "grpo.py").read_text() == original


# ============================================== what the pages name =========================================
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@one_text
def test_no_link_is_dead(script):
    """Every link leads to a file, and to a heading of it. Every path of benchmark/ or docs/ that is named exists."""
    dead = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append((page.name, link))
        for path in re.findall(r"\b(?:benchmark|docs)/[\w/.]+\w", text):
            if not (HERE / path).exists() and "smollm2/model" not in path:
                dead.append((page.name, path))
    assert not dead


FLAGS = {name.replace("_", "-") for module in MODULES.values() for name in module.Args.__dataclass_fields__}
# Flags of other programs: the launchers, the scripts of benchmark/, and that of one of the variants.
OTHER_FLAGS = set(
    "help no-index nproc-per-node nnodes node-rank master-addr master-port nodes ntasks-per-node gpus-per-node".split()
    + "rdzv-backend rdzv-endpoint rdzv-id cpu model baseline judge case algorithms steps pairs overlong-cache".split()
    + ["answer", "episodes", "rounds", "threads", "entropy-coef", "page"]
)


@one_text
def test_every_flag_that_a_page_names_exists(script):
    unknown = []
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", page.read_text(encoding="utf-8")))
        unknown += [(page.name, name) for name in named - FLAGS - OTHER_FLAGS if not name.startswith("no-")]
    assert not unknown


@one_text
def test_every_name_in_code_style_exists(script):
    """A metric, function, file or test that a page writes `like_this` stands in the repository's Python."""
    sources = "".join(path.read_text(encoding="utf-8") for path in HERE.rglob("*.py") if ".venv" not in path.parts)
    unknown = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.name in ("coming_from.md", "migration.md"):  # They name other trainers, and older scripts.
            continue
        for name in set(re.findall(r"`([a-z]\w*(?:[_/]\w+)+)`", text)):
            if name not in sources and not (HERE / name).exists() and not (page.parent / name).exists():
                unknown.append((page.name, name))
    assert not unknown


@one_text
def test_every_documented_metric_is_logged_by_a_script(script):
    """The first column of docs/metrics.md holds names that stand in the text of a script."""
    sources = "".join((HERE / f"{name}.py").read_text(encoding="utf-8") for name in SCRIPTS)
    rows = re.findall(r"^\| (`[^|]+`) \|", (HERE / "docs/metrics.md").read_text(), re.M)
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row)} - {"reward/<name>"}
    assert len(names) > 30
    assert not [name for name in names if f'"{name}"' not in sources]


@one_text
def test_the_readme_is_read_in_five_minutes(script):
    """At most 180 lines and 1,800 words. Lines of prose are at most 120 characters wide, on all pages."""
    assert len(README.splitlines()) <= 180 and len(README.split()) <= 1800
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            is_code_or_table = line.startswith(("|", "![", "    "))
            assert len(line) <= 120 or is_code_or_table, (page.name, line)
