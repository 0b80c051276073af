"""The pages: their links lead somewhere, their commands parse, what they name exists, and their tables are up to date.

README's commands are run, too, and those that hold a promise of docs/recipes.md (slow). A command is an indented line,
or text in code style, that begins with a program.
"""

import ast
import functools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest
import tables
import tyro
from accelerate.commands.launch import launch_command_parser
from conftest import HERE, MODULES, SCRIPTS, import_file
from torch.distributed.run import get_args_parser

README = HERE / "README.md"
RECIPES = HERE / "docs/recipes.md"
PAGES = sorted(tables.PAGES)
FOLDERS = ("", "benchmark/", "benchmark/*/", "docs/*/", "tests/", "tests/*/")
SOURCES = {  # the text of every program and patch, by its path
    str(path.relative_to(HERE)): path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for suffix in ("py", "patch")
    for path in HERE.glob(f"{folder}*.{suffix}")
}
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HERE)))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", read(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@of_each_page
def test_no_link_is_dead(page):
    """Links and figures lead to a file, and to a heading of it. Paths of benchmark/ and docs/ exist."""
    dead = []
    for link in re.findall(r"\]\(([^)]+)\)", read(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not path.startswith("http") and (not target.exists() or anchor and anchor not in anchors(target)):
            dead.append(link)
    for path in re.findall(r"(?<![\w/])(?:benchmark|docs)/[\w/.]+\w", read(page)):
        is_elsewhere = re.search("smollm2/model|docs/source", path)  # A program makes the first. TRL has the second.
        if not (HERE / path).exists() and not is_elsewhere:
            dead.append(path)
    assert not dead


@of_each_page
def test_every_name_in_code_style_exists(page):
    """A metric, function, file or test that a page writes `like_this` stands in the repository's programs."""
    if page.name == "coming_from.md":  # It names those of other trainers.
        return
    programs = "".join(SOURCES.values())
    names = set(re.findall(r"`([a-z]\w*(?:[_/]\w+)+)`", read(page)))
    names |= set(re.findall(r"\b([a-z]\w*_\w+)\(", read(README)))  # the functions of its loop
    assert not [
        name
        for name in names
        if name not in programs and not (HERE / name).exists() and not (page.parent / name).exists()
    ]


def test_every_documented_metric_is_logged():
    """The first column of docs/metrics.md holds names that stand in the text of a script."""
    scripts = "".join(SOURCES[f"{name}.py"] for name in SCRIPTS)
    rows = re.findall(r"^\| (`[^|]+`) \|", read(HERE / "docs/metrics.md"), re.M)
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row)} - {"reward/<name>", "eval/reward/<name>"}
    assert len(names) > 30
    assert not [name for name in names if f'"{name}"'.replace("<m>", "{m}") not in scripts]


@of_each_page
def test_lines_of_prose_are_narrow(page):
    prose = [line for line in read(page).splitlines() if not line.startswith(("|", "![", "    ", "<!--"))]
    assert not [line for line in prose if len(line) > 120]


def test_the_tables_are_up_to_date():
    """Writing them again changes nothing. No table stands twice, and each function of tables.py makes one."""
    used = []
    for page in PAGES:
        assert tables.write_tables(read(page)) == read(page), f"python benchmark/tables.py changes {page.name}"
        used += re.findall(r"<!-- table: (.*?) -->", read(page))
    assert len(used) == len(set(used))
    assert {words.split()[0] for words in used} == set(tables.TABLES)


PROGRAM = r"(?:[A-Z_]+=\S+ )*(?:pip|python|accelerate|torchrun|srun|git|pytest|cp) "
LAUNCHERS = {"torchrun": get_args_parser(), "launch": launch_command_parser()}


def commands(page: Path) -> list[str]:
    """The commands of a page, in order. An indented line that ends with \\ goes on in the next."""
    text = read(page).replace(" \\\n", " ")
    found = re.findall(rf"^    ({PROGRAM}.*)$|`({PROGRAM}[^`]*)`", text, re.M)
    return [" ".join((line or in_style).split()) for line, in_style in found]


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """load(name of a script, patches): the script with these patches, as a module."""

    @functools.cache
    def load(name, patches):
        if not patches:
            return MODULES[name]
        folder = tmp_path_factory.mktemp("patched")
        for script in SCRIPTS:  # a patch may change all of them
            shutil.copy(HERE / f"{script}.py", folder)
        for patch in patches:
            subprocess.run(["git", "apply", HERE / patch], cwd=folder, check=True)
        with mock.patch.dict(sys.modules, vllm=mock.MagicMock()):  # The patches of benchmark/engine import it.
            module = import_file((folder / f"{name}.py").rename(folder / f"patched_{name}.py"))
        sys.modules[module.__name__] = module  # tyro looks there
        return module

    return load


def check_program(words: list[str]):
    """Fail unless a launcher knows its flags, and a program of benchmark/ exists and names its flags."""
    for launcher, parser in LAUNCHERS.items():
        if launcher in words:
            parser.parse_args([*words[words.index(launcher) + 1 :], "a script"])
    if words[:2] == ["python", "-c"]:
        ast.parse(words[2])
    elif words[0] == "python" and words[1].startswith("benchmark/"):
        text = read(HERE / words[1]).replace("-", "_")
        for flag in [word for word in words if word.startswith("--")]:
            assert re.search(rf"\b{flag.removeprefix('--').replace('-', '_')}\b", text), f"{words[1]} has no {flag}"


def check_command(command: str, patches: list[str], load):
    """Fail unless a command parses. What comes after the name of a script are flags of this script.

    patches: those that are applied before. The command may add one, or take one back.
    """
    for part in re.sub(r"\$\w+", "1", command).split(" && "):  # $RANK and its like are numbers
        words = [word for word in shlex.split(part) if not re.match(r"[A-Z_]+=|FLAGS$|\.\.\.$", word)]
        if words[:2] == ["git", "apply"]:
            given = [word for word in words[2:] if word != "-R"]
            patches[:] = [patch for patch in patches if patch not in given]
            patches += [] if "-R" in words else given
            continue
        name = next((word for word in words if word in ("rloo.py", "grpo.py", "ppo.py")), None)
        if words[0] not in ("python", "accelerate", "torchrun", "srun") or name is None:
            check_program(words)
            continue
        end = words.index(name) + 1
        check_program(words[:end])
        tyro.cli(load(name.removesuffix(".py"), tuple(patches)).Args, args=words[end:])


@of_each_page
def test_every_command_parses(page, load):
    applied = []  # by a command that does only this, until another takes it back
    for command in commands(page):
        try:
            check_command(command, [*applied] if "&&" in command else applied, load)
        except SystemExit:
            pytest.fail(f"{page.name}: this is not accepted: {command}")  # The program's message was captured.


@of_each_page
def test_flags_in_the_text_exist(page):
    """A flag of a script, of a patch, or of a program of benchmark/; or one of another program, in a command."""
    flags = set(re.findall(r"^\+?    (\w+): .* = ", "\n".join(SOURCES.values()), re.M))
    flags |= set(re.findall(r'"--([\w-]+)"', "\n".join(SOURCES.values())))
    flags = {name.replace("_", "-") for name in flags}
    in_commands = " ".join(commands(page)) + " --help"
    named = re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", read(page))
    assert not [n for n in named if n.removeprefix("no-") not in flags and f"--{n}" not in in_commands]


def diffs(page):
    """The changes of a script that a page shows: their lines, and the scripts with them, by name."""
    for block in re.findall(r"^(?:    [+-].*\n)*    \+.*\n(?:    [+-].*\n)*", read(page), re.M):
        lines = [line[4:] for line in block.splitlines()]
        old, new = ("\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
        scripts = {name: SOURCES[f"{name}.py"] for name in SCRIPTS}
        yield lines, {name: text.replace(old, new) for name, text in scripts.items() if old and text.count(old) == 1}


@of_each_page
def test_a_diff_of_a_page_fits(page):
    """Lines with + and - are a change of a script, where the lines with - stand once. Or they are from a patch."""
    patches = [text for name, text in SOURCES.items() if name.endswith(".patch")]
    for lines, changed in diffs(page):
        for text in changed.values():
            compile(text, page.name, "exec")
        assert changed or any(all(f"\n{line}\n" in patch for line in lines) for patch in patches), lines


def test_the_readme_shows_the_loop_of_nano():
    loop = re.search(r"^for iteration.*?(?=^    print)", SOURCES["docs/nano/rloo.py"], re.M | re.S)[0]
    assert textwrap.indent(loop, "    ") in read(README)


def test_the_two_commands_of_the_readme_are_those_of_ci():
    """.ci/run looks for README's lines that begin with pip install, by their ends."""
    ends = re.findall(r"\$\(readme_command '?(.*?)'?\)", (HERE / ".ci/run").read_text())
    expected = sorted(f"pip install -r requirements.txt && {end}" for end in ends)
    assert len(ends) == 2 and expected == sorted(c for c in commands(README) if c.startswith("pip"))


def test_the_ported_configuration_makes_the_steps_of_trl(capsys):
    """TRL's configuration and the command below it say the same, and --plan prints TRL's steps."""
    page = HERE / "docs/coming_from.md"
    call = re.search(r"^    config = (GRPOConfig\(.*?^    \))", read(page), re.M | re.S)[1]
    trl = {word.arg: ast.literal_eval(word.value) for word in ast.parse(call).body[0].value.keywords}
    [command] = [command for command in commands(page) if command.startswith("accelerate")]
    for name, path in {"your/model": "policy", "prompts.jsonl": "train.jsonl"}.items():
        command = command.replace(name, f"{HERE}/benchmark/default/{path}")
    words = shlex.split(command)
    processes, start = words[words.index("--num_processes") + 1], words.index("grpo.py") + 1
    args = tyro.cli(MODULES["grpo"].Args, args=[*words[start:], "--plan", processes])
    MODULES["grpo"].main(args)
    plan = dict(re.findall(r"^(\w+): (\d+)$", capsys.readouterr().out, re.M))
    assert int(plan["steps"]) == trl.pop("max_steps")
    assert int(plan["gradient_accumulation_steps"]) == trl.pop("gradient_accumulation_steps")
    assert args.batch_size == trl["per_device_train_batch_size"] * int(processes) * trl.pop("steps_per_generation")
    assert args.save_every * args.updates_per_batch == trl.pop("save_steps")
    assert (args.dtype, args.scale_rewards) == ("bfloat16", "none") and trl.pop("bf16") and not trl.pop("scale_rewards")
    names = dict(num_iterations="num_ppo_epochs", max_completion_length="response_length", beta="kl_coef")
    names |= dict(epsilon="cliprange", epsilon_high="cliprange_high", report_to="log_with")
    del trl["reward_weights"]
    assert {name: getattr(args, names.get(name, name)) for name in trl} == trl


def test_the_fields_of_trl_are_in_the_tables():
    """The page has each field of PPOConfig (TRL 1.12), with its default where ours differs. What it says about RLOO and
    has no counterpart is in TRL 1.16. The stored list was read from TRL's sources: what each class itself defines."""
    text = read(HERE / "docs/coming_from.md")
    fields = json.loads((HERE / "benchmark/parity/trl_fields.json").read_text())
    args = vars(MODULES["ppo"].Args(model_path="your/model"))
    table = re.search(r"PPOConfig`.*?\n\n(.*?)\n\n", text, re.S)[1]
    named = []
    for line in table.splitlines()[2:]:
        _, theirs, here, _ = line.split("|")
        [flag] = re.findall(r"`--([\w-]+)`", here) or [None]
        for name, trl, ours in re.findall(r"`(\w+)`(?: \((\S+), here (\S+)\))?", theirs):
            named.append(name)
            mine = args.get(flag.replace("-", "_") if flag else name)
            if trl:
                assert (trl, ours) == (str(fields["PPOConfig"][name]), str(mine).removesuffix(".0")), name
            elif "same name" in here:
                assert mine == fields["PPOConfig"][name]
            else:
                assert flag or here.strip() in ("`--plan W`, for W processes", "always", "not here")
    assert sorted(named) == sorted(fields["PPOConfig"])
    of_trl = fields["GRPOConfig"] | fields["RLOOConfig"]
    without, changes = re.search(r"no counterpart: (.*?)callbacks.*?\n- In GRPO, (.*?)\n\n", text, re.S).groups()
    names = set(re.findall(r"`(\w+)`", without + changes))
    assert len(names) == 15 and names <= of_trl.keys() - vars(MODULES["grpo"].Args()).keys()
    k, beta = re.search(r"`num_generations` is (\S+) and `beta` is (\S+)\.", text).groups()
    assert (int(k), float(beta)) == (fields["RLOOConfig"]["num_generations"], fields["RLOOConfig"]["beta"])


FEW = " --total-episodes 64 --num-sample-generations 0"


@pytest.fixture
def run(tmp_path):
    """run(command) runs it in a copy of scripts and benchmark/, with what README's commands take as yours."""
    for script in SCRIPTS:
        shutil.copy(HERE / f"{script}.py", tmp_path)
    made = shutil.ignore_patterns("smollm2", "__pycache__", ".*")  # They hold what programs made.
    shutil.copytree(HERE / "benchmark", tmp_path / "benchmark", ignore=made)
    shutil.copytree(HERE / "benchmark/default/policy", tmp_path / "your/model")
    shutil.copy(HERE / "benchmark/default/train.jsonl", tmp_path / "prompts.jsonl")
    shutil.copy(HERE / "benchmark/default/eval.jsonl", tmp_path / "held_out.jsonl")
    code = re.search(r"^    def score\(completions.*?\n\n", read(README) + read(RECIPES), re.M | re.S)[0]
    (tmp_path / "reward.py").write_text(re.sub("^    ", "", code, flags=re.M))
    environment = os.environ | dict(PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")

    def run(command, wait=True, **variables):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        process = subprocess.Popen(["bash", "-c", command], cwd=tmp_path, env=environment | variables, **pipes)
        if not wait:
            return process
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        return output

    run.folder = tmp_path
    return run


def run_few(run, command):
    """With few episodes."""
    output = run(command + FEW)
    assert output.splitlines()[-1].startswith("64 episodes, "), output
    return output


def recipe(beginning: str) -> str:
    """The command of docs/recipes.md that begins so."""
    return next(command for command in commands(RECIPES) if command.startswith(beginning))


README_COMMANDS = [c for c in dict.fromkeys(commands(README)) if not c.startswith(("pip", "pytest"))]


@pytest.mark.slow
@pytest.mark.parametrize("command", README_COMMANDS)
def test_the_commands_of_the_readme(command, run):
    if "plot.py" in command:
        run_few(run, "python rloo.py")
        run(command)
        assert (run.folder / "runs/plot.png").stat().st_size > 10_000
    elif "look.py" in command:
        run_few(run, "python rloo.py --save-rollouts")
        assert re.search(r"(\d+) of \1 episodes", run(command))
    elif "--plan" in command:
        assert "steps: 256" in run(command)
    elif "your/model" in command:
        run_few(run, command.replace("--response-length 256", "--response-length 12"))
        [folder] = (run.folder / "runs").iterdir()
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert {"reward/right", "reward/length"} <= last.keys()
    elif re.search(r"(rloo|grpo|ppo)\.py", command):
        run_few(run, command)
    else:
        run(command)


@pytest.mark.slow
def test_the_recipe_of_resuming(run):
    """Its run is killed after the first checkpoint."""
    command = recipe("python rloo.py --output-dir runs/mine").replace("--save-every 20", "--save-every 1")
    command = f"exec {command} --total-episodes 640"
    process = run(command, wait=False)
    while not list(run.folder.glob("runs/mine/checkpoints/iteration_*")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert re.search(r"--resume from \S+iteration_0*[1-9]", run(command))


@pytest.mark.slow
def test_the_recipe_of_merging_adapters(run):
    run_few(run, "python rloo.py --lora-r 2 --output-dir runs/x")
    run(recipe("python -c"))
    run_few(run, "python rloo.py --model-path merged --response-length 8")


@pytest.mark.slow
def test_the_recipe_of_two_machines(run):
    """Two launchers on one machine, of one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = recipe("torchrun --nnodes 2").replace("--nproc-per-node 8", "--nproc-per-node 1")
    command = command.replace("29500", str(port)) + FEW + " --output-dir runs/two"
    other = run(command, wait=False, RANK="1", FIRST="127.0.0.1")
    assert "2 x cpu" in run(command, RANK="0", FIRST="127.0.0.1")
    assert other.wait(timeout=60) == 0
