"""The pages: their links lead somewhere, their commands parse, what they name exists, and their
tables are up to date.

README's commands are run, too, and those that hold a promise of docs/recipes.md (slow). A command
is an indented line, or text in code style, that begins with a program.
"""

import ast
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import tables
import tyro
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import HERE, MODULES, SCRIPTS, import_file
from pytest import approx, fixture, mark
from run import free_port
from torch.distributed.run import get_args_parser

README = HERE / "README.md"
RECIPES = HERE / "docs/recipes.md"
PAGES = sorted(tables.PAGES)
of_each_page = mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HERE)))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


SOURCES = {}  # the text of every program and patch, by its path
for pattern in ("*", "benchmark/*", "benchmark/*/*", "docs/*/*", "tests/*", "tests/*/*"):
    for path in HERE.glob(pattern):
        if path.suffix in (".py", ".patch"):
            SOURCES[str(path.relative_to(HERE))] = read(path)
EVERYTHING = "\n".join(SOURCES.values())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", read(page), re.M):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


@of_each_page
def test_no_link_is_dead(page):
    """Links and figures lead to a file, and to a heading of it. Paths of benchmark/ and docs/
    exist."""
    dead = []
    for link in re.findall(r"\]\(([^)]+)\)", read(page)):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    for path in re.findall(r"(?<![\w/])(?:benchmark|docs)/[\w/.]+\w", read(page)):
        # A program makes this one.
        if not (HERE / path).exists() and path != "benchmark/smollm2/model":
            dead.append(path)
    assert not dead


@of_each_page
def test_every_name_exists(page):
    """A metric, function or file that a page writes `like_this`, and a word of capitals with
    underscores, stand in a program. So do flags, but for those of another program in a command."""
    text = read(page)
    names = re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b(?!=)", text)
    if page.name != "coming_from.md":  # It names those of other trainers.
        names += re.findall(r"`([a-z]\w*(?:[_/]\w+)+)`", text)
    missing = [n for n in names if n not in EVERYTHING and not (page.parent / n).exists()]
    others = "".join(commands(page))
    for flag in re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z0-9-]*)", text):
        name = flag.replace("-", "_")
        declared = rf'^\+?    {name}: .* = |"--{flag}"'
        if flag not in others and not re.search(declared, EVERYTHING, re.M):
            missing.append(flag)
    assert not missing


@of_each_page
def test_the_tables_are_up_to_date(page):
    """Writing them again changes nothing. Each table is one that can be written."""
    text = read(page)
    assert tables.write_tables(text) == text, f"python benchmark/tables.py changes {page.name}"
    assert len(tables.TABLE.findall(text)) == text.count("<!-- end of table -->")


def test_the_readme_has_the_numbers_of_other_pages():
    """Of a table whose head or row begins with a link to a page: its numbers with a point, comma or
    exponent stand in a written table of this page."""
    number = r"\d+[.,][\d.,e-]*\d|\de-\d"
    found = 0
    written = ""
    for line in read(README).splitlines():
        link = re.match(r"\| \[[^]]*\]\(([^#)]*)", line)
        if link:
            written = " ".join(re.findall(r"-->\n(\|.*?)<!-- end", read(HERE / link[1]), re.S))
        elif not line.startswith("|"):
            written = ""
        if written:
            cells = line.split("|", 2)[2]
            here = set(re.findall(number, cells))
            assert here <= set(re.findall(number, written)), line
            found += len(here)
    assert found >= 10


def test_the_readme_says_how_long_the_scripts_are():
    """Its round numbers are right within 5 %."""
    total, lecture = re.search(r"Of the 1,(\d+) lines .* first (\d+)", read(README)).groups()
    above, below = SOURCES["rloo.py"].split("MACHINERY")
    assert above.count("\n") == approx(int(lecture), rel=0.05)
    assert (above + below).count("\n") == approx(1000 + int(total), rel=0.05)


PROGRAM = r"(?:[A-Z_]+=\S+ )*(?:pip|uv|python|accelerate|torchrun|srun|git|pytest|cp)\s"
LAUNCHERS = {"torchrun": get_args_parser(), "launch": launch_command_parser()}


def commands(page: Path) -> list[str]:
    """The commands of a page, in order. An indented line that ends with \\ goes on in the next."""
    text = read(page).replace(" \\\n", " ")
    found = []
    for line, in_style in re.findall(rf"^    ({PROGRAM}.*)$|`({PROGRAM}[^`]*)`", text, re.M):
        words = (line or in_style).split()
        found.append(" ".join(words))
    return found


def first_command(page: Path, beginning: str) -> str:
    """The first command of a page that begins so."""
    return next(command for command in commands(page) if command.startswith(beginning))


def patched(name, patches, folder):
    """A script with patches, as a module. folder: an empty one of its own"""
    for script in SCRIPTS:  # A patch may change all of them.
        shutil.copy(HERE / f"{script}.py", folder)
    (folder / "benchmark").symlink_to(HERE / "benchmark")
    for patch in patches:
        subprocess.run(["git", "apply", HERE / patch], cwd=folder, check=True)
    return import_file((folder / f"{name}.py").rename(folder / f"{name}_patched.py"))


@fixture(scope="session")
def load(tmp_path_factory):
    """load(name of a script, patches): the script with these patches, as a module."""

    @functools.cache
    def load(name, patches):
        if not patches:
            return MODULES[name]
        with mock.patch.dict(sys.modules, vllm=mock.MagicMock()):  # for one patch
            module = patched(name, patches, tmp_path_factory.mktemp("patched"))
        sys.modules[module.__name__] = module  # tyro looks there
        return module

    return load


SCRIPT_FILES = {f"{name}.py" for name in SCRIPTS}


def check_program(words: list[str]):
    """Fail unless a launcher knows its flags, and a program of benchmark/ names its flags."""
    for launcher, parser in LAUNCHERS.items():
        if launcher in words:
            parser.parse_args([*words[words.index(launcher) + 1 :], "a script"])
    if words[:2] == ["python", "-c"]:
        ast.parse(words[2])
    elif words[0] == "python" and words[1].startswith("benchmark/"):
        text = read(HERE / words[1]).replace("-", "_")
        for flag in re.findall(r"--(\S+)", " ".join(words)):
            name = flag.replace("-", "_")
            assert re.search(rf"(\b|__){name}\b", text), f"{words[1]} has no {flag}"


def check_command(command: str, patches: list[str], load):
    """Fail unless a command parses. What comes after the name of a script are flags of this script.

    patches: those that are applied before. The command may add one, or take one back.
    """
    for part in re.sub(r"\$\w+", "1", command).split(" && "):  # $RANK and its like are numbers
        words = shlex.split(re.sub(r"(?<!\S)([A-Z_]+=\S+|FLAGS|\.\.\.)(?!\S)", "", part))
        if words[:3] == ["git", "apply", "-R"]:
            patches[:] = [patch for patch in patches if patch not in words]
        elif words[:2] == ["git", "apply"]:
            patches += words[2:]
        elif words[:1] != ["git"] and (found := SCRIPT_FILES & set(words)):
            name = found.pop()
            end = words.index(name) + 1
            check_program(words[:end])
            script = load(name.removesuffix(".py"), tuple(patches))
            tyro.cli(script.Args, args=words[end:])
        else:
            check_program(words)


@of_each_page
def test_every_command_parses(page, load):
    applied = []  # by a command that does only this, until another takes it back
    for command in commands(page):
        try:
            check_command(command, applied.copy() if "&&" in command else applied, load)
        except SystemExit:  # The program's message was captured.
            pytest.fail(f"{page.name}: this is not accepted: {command}")


def diffs(page):
    """The changes of a script that a page shows: their lines, and the scripts with them, by
    name."""
    for block in re.findall(r"^(?:    [+-].*\n)*    \+.*\n(?:    [+-].*\n)*", read(page), re.M):
        lines = textwrap.dedent(block).splitlines()
        old = "\n".join(line[1:] for line in lines if line.startswith("-"))
        new = "\n".join(line[1:] for line in lines if line.startswith("+"))
        changed = {}
        for name in SCRIPTS:
            text = SOURCES[f"{name}.py"]
            if old and text.count(old) == 1:
                changed[name] = text.replace(old, new)
        yield lines, changed


@of_each_page
def test_code_of_a_page_fits(page):
    """Lines with + and - are a change of a script, where the lines with - stand once. Or they
    are from a patch. Other code compiles: indented lines from an import or a function on."""
    patches = [set(text.splitlines()) for name, text in SOURCES.items() if name.endswith(".patch")]
    for lines, changed in diffs(page):
        for text in changed.values():
            compile(text, page.name, "exec")
        assert changed or any(patch.issuperset(lines) for patch in patches), lines
    for block in re.findall(r"^    (?:import|from|def) .*\n(?:(?:    .*)?\n)*", read(page), re.M):
        compile(textwrap.dedent(block), page.name, "exec")


def test_the_readme_shows_the_loop_of_nano():
    nano = SOURCES["docs/nano/rloo.py"]
    loop = re.search(r"^for iteration.*?(?=^    print)", nano, re.M | re.S)[0]
    assert textwrap.indent(loop, "    ") in read(README)


def readme_reward() -> str:
    code = re.search(r"^    def score\(completions.*?\n\n", read(README), re.M | re.S)[0]
    return textwrap.dedent(code)


def test_the_reward_of_the_readme_fits_its_rows():
    """A right answer pays, also if it is long: as text, and as a chat."""
    names = {}
    exec(readme_reward(), names)
    for row in map(json.loads, re.findall(r'^    (\{"prompt".*)$', read(README), re.M)):
        text = row["answer"]
        if isinstance(row["prompt"], list):
            text = [{"role": "assistant", "content": text}]
        parts = names["score"]([text], completion_ids=[[1] * 256], answer=[row["answer"]])
        assert parts["right"] == [1.0] and parts["length"][0] > -1


def test_the_translated_configuration_makes_the_steps_of_trl(capsys):
    """--plan, with the command, prints the steps of TRL's configuration above it."""
    page = HERE / "docs/coming_from.md"
    trl = dict(re.findall(r"(\w+)=(\d+)", read(page)))
    command = first_command(page, "accelerate launch")
    processes, flags = re.search(r"--num_processes (\d+) grpo.py (.*)", command).groups()
    # These replace `your/model` and its like.
    flags += f" --model-path {MODULES['grpo'].Args.model_path} --dataset None --plan {processes}"
    MODULES["grpo"].main(tyro.cli(MODULES["grpo"].Args, args=flags.split()))
    plan = yaml.safe_load(capsys.readouterr().out)
    assert plan["steps"] == int(trl["max_steps"])
    assert plan["gradient_accumulation_steps"] == int(trl["gradient_accumulation_steps"])


FEW = " --total-episodes 64 --num-sample-generations 0 --save-rollouts"


@fixture
def run(tmp_path):
    """run(command) runs it, a script with few episodes, in a copy of the repository with what
    README's commands take as yours. Returns what it prints."""
    made = shutil.ignore_patterns("smollm2", "runs", "__pycache__", ".*")  # by programs
    shutil.copytree(HERE, tmp_path, ignore=made, dirs_exist_ok=True)
    shutil.copytree(HERE / "benchmark/default/policy", tmp_path / "your/model")
    shutil.copy(HERE / "benchmark/default/train.jsonl", tmp_path / "prompts.jsonl")
    shutil.copy(HERE / "benchmark/default/eval.jsonl", tmp_path / "held_out.jsonl")
    (tmp_path / "reward.py").write_text(readme_reward())
    environment = os.environ | dict(PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")

    def run(command):
        if "rloo.py" in command:
            command += FEW
        words = ["bash", "-c", command]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ran = subprocess.run(words, cwd=tmp_path, env=environment, timeout=300, **pipes)
        assert ran.returncode == 0, ran.stdout
        assert FEW not in command or "--plan" in command or "64 episodes, " in ran.stdout
        return ran.stdout

    return run


@mark.slow
def test_the_commands_of_the_readme(run, tmp_path):
    """One after the other, in one folder."""
    run("python rloo.py --output-dir runs/mine")
    for command in commands(README):
        if not re.match("pip|uv|git", command):
            run(command.replace("--response-length 256", "--response-length 12"))
    assert (tmp_path / "runs/plot.png").stat().st_size > 10_000
    assert "reward/length" in "".join(map(read, tmp_path.glob("runs/*/metrics.jsonl")))
    assert "eval/scores" in read(tmp_path / "runs/look.html")


@mark.slow
def test_the_recipe_of_merging_adapters(run):
    run("python rloo.py --lora-r 2 --output-dir runs/x")
    run(first_command(RECIPES, 'python -c "import peft'))
    dataset = "benchmark/default/train.jsonl"
    run(f"python rloo.py --model-path merged --dataset {dataset} --response-length 8")


@mark.slow
def test_the_recipe_of_two_machines(run):
    """Two launchers on one machine, of one process each."""
    command = first_command(RECIPES, "torchrun --nnodes 2") + FEW
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 1")
    command = command.replace("29500", str(free_port()))
    both = f"(export RANK=1; {command}) & export RANK=0; {command} && wait $!"
    assert "2 x cpu" in run(f"export FIRST=127.0.0.1; {both} #")
