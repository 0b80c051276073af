"""The pages: their links lead somewhere, their commands parse, what they name exists, and their
tables are up to date.

README's commands are run, too, and those that hold a promise of docs/recipes.md (slow). A command
is an indented line, or text in code style, that begins with a program.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

import compare
import datasets
import memory
import tables
import tyro
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import HERE, MODULES, forked, import_file, launcher, make_tokenizer, save_model
from pytest import fixture, mark
from torch.distributed.run import get_args_parser

README = HERE / "README.md"
RECIPES = HERE / "docs/recipes.md"
PAGES = sorted(tables.PAGES)
of_each_page = mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HERE)))


def read(page):
    return page.read_text(encoding="utf-8")


FOLDERS = (
    "*.py benchmark/**/*.py benchmark/**/*.patch benchmark/**/*.sbatch docs/**/*.py tests/**/*.py"
)
# the text of every program and patch
EVERYTHING = "\n".join(read(path) for folder in FOLDERS.split() for path in HERE.glob(folder))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", read(page).lower(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@of_each_page
def test_no_link_is_dead(page):
    """Links and figures lead to a file, and to a heading of it. Paths of benchmark/ and docs/
    exist."""
    dead = []
    for link in re.findall(r"\]\((?!http)([^)]+)\)", read(page)):
        path, _, anchor = link.partition("#")
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
    # Two pages name what other trainers have, or what is gone.
    if page.name not in ("coming_from.md", "CHANGELOG.md"):
        names += re.findall(r"`([a-z]\w*(?:[_/]\w+)+)`", text)
    missing = [n for n in names if n not in EVERYTHING and not (page.parent / n).exists()]
    others = "".join(commands(page))
    for flag in re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z0-9-]*)", text):
        declared = rf'^\+?    {flag.replace("-", "_")}: .* = |"--{flag}"'
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


PROGRAM = r"(?:[A-Z_]+=\S+ )*(?:pip|uv|python|accelerate|torchrun|sbatch|git|pytest|cp|sed)\s"
# programs that hand flags on to scripts
HAND_ON = {"benchmark/compare.py": compare.Args, "benchmark/memory.py": memory.Options}
LAUNCHERS = {"torchrun": get_args_parser(), "launch": launch_command_parser()}


def commands(page):
    """The commands of a page, in order. An indented line that ends with \\ goes on in the next."""
    text = read(page).replace(" \\\n", " ")
    found = re.findall(rf"^    ({PROGRAM}.*)$|`({PROGRAM}[^`]*)`", text, re.M)
    return [" ".join((line or in_style).split()) for line, in_style in found]


def first_command(page, beginning):
    """The first command of a page that begins so."""
    return next(command for command in commands(page) if command.startswith(beginning))


def check_command(command, folder):
    """Fail unless its launcher and its script know their flags, or a program of benchmark/ names
    them. A copy that it makes with patches is made, and has their flags."""
    scripts = dict(MODULES)
    made = re.match(r"cp (\w+)\.py (my_\w+)\.py( && patch \S+ < \S+)+", command)
    if made:
        launcher.copy_script(folder, made[1])
        ran = subprocess.run(made[0], shell=True, cwd=folder, capture_output=True, text=True)
        assert ran.returncode == 0 and "fuzz" not in ran.stdout, ran.stdout + ran.stderr
        scripts[made[2]] = import_file(folder / f"{made[2]}.py")
        command = command[made.end() :]
    command = re.sub(r"\$\w+", "1", command.split(" && ")[-1])  # $RANK and its like are numbers
    words = shlex.split(re.sub(r"(?<!\S)([A-Z_]+=\S+|\.\.\.)(?!\S)", "", command))
    if not words or words[0] in ("git", "sed"):
        return
    for program in words:
        if program in HAND_ON:
            after = words[words.index(program) + 1 :]
            options, flags = tyro.cli(HAND_ON[program], args=after, return_unknown_args=True)
            # memory.py reads no dataset.
            for method in vars(options).get("methods") or [f"{options.script} --dataset none"]:
                name, *own = shlex.split(method.removeprefix("my_"))
                tyro.cli(MODULES[name.removesuffix(".py")].Args, args=[*flags, *own])
            return
    for number in reversed(range(len(words))):
        word, after = words[number], words[number + 1 :]
        name = word.removesuffix(".py")
        if name in scripts:
            tyro.cli(scripts[name].Args, args=after)
            del words[number + 1 :]  # A program before the script has other flags.
        elif word in LAUNCHERS:
            LAUNCHERS[word].parse_args(after)
        elif word == "-c":
            ast.parse(after[0])
        elif word.startswith("benchmark/") and word.endswith(".py"):
            text = read(HERE / word).replace("-", "_")
            for flag in re.findall(r"--(\S+)", " ".join(after)):
                flag = flag.replace("-", "_")
                assert re.search(rf"(\b|__){flag}\b", text), f"{word} has no --{flag}"


@of_each_page
def test_every_command_parses(page, tmp_path):
    for command in commands(page):
        try:
            check_command(command, tmp_path)
        except SystemExit as error:  # The program's message was captured.
            raise AssertionError(f"this is not accepted: {command}") from error


CODE = re.compile(r"^    (?:import|from|def) .*\n(?:(?:    .*)?\n)*", re.M)


@of_each_page
def test_code_of_a_page_compiles(page):
    """It is indented lines from an import or a function on."""
    for block in CODE.findall(read(page)):
        compile(textwrap.dedent(block), page.name, "exec")


def test_the_readme_shows_the_loop_of_nano():
    nano = read(HERE / "docs/nano/rloo.py")
    loop = re.search(r"^for iteration.*?(?=^    print)", nano, re.M | re.S)[0]
    assert textwrap.indent(loop, "    ") in read(README)


def readme_code(beginning):
    """Indented lines of README that begin so."""
    code = re.search(rf"^    {beginning}.*?\n\n", read(README), re.M | re.S)[0]
    return textwrap.dedent(code)


def readme_reward():
    return readme_code(r"def score\(completions")


def test_the_reward_of_the_readme_fits_its_rows():
    """A right answer pays, as text and as a chat."""
    names = {}
    exec(readme_reward(), names)
    text, chat = map(json.loads, re.findall(r'^    (\{"prompt".*)$', read(README), re.M))
    for row, said in ((text, "95"), (chat, [{"role": "assistant", "content": "7"}])):
        parts = names["score"]([said], completion_ids=[[1]], answer=[row["answer"]])
        assert parts["right"] == [1.0]


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
YOURS = {"your/model": "policy", "prompts.jsonl": "train.jsonl", "held_out.jsonl": "eval.jsonl"}


@fixture
def run(tmp_path):
    """run(command) runs it, a script with few episodes, in a copy of the repository. A Python
    file, also by torchrun on one machine, runs as `forked` does. Returns what it prints."""
    made = shutil.ignore_patterns("smollm2", "runs", "__pycache__", ".*")  # by programs
    shutil.copytree(HERE, tmp_path, ignore=made, dirs_exist_ok=True)
    (tmp_path / "reward.py").write_text(readme_reward())
    (tmp_path / "my_loss.py").write_text(readme_code("from losses"))
    environment = os.environ | dict(PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    of_python = r"(?:python|\S+ torchrun --nproc-per-node (\d)) (\S+\.py.*)"

    def run(command):
        for yours, ours in YOURS.items():
            command = command.replace(yours, f"benchmark/default/{ours}")
        if "rloo.py" in command and not re.search("^sed|git |check_copy", command):
            command += FEW
        match = re.fullmatch(of_python, command)
        if match:
            ran = forked(tmp_path, shlex.split(match[2]), int(match[1] or 1))
            assert not ran.returncode, ran.stdout + ran.stderr
            return ran.stdout
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        ran = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, **pipes)
        assert ran.returncode == 0, ran.stdout
        return ran.stdout

    return run


@mark.slow
def test_the_commands_of_the_readme(run, tmp_path):
    """One after the other, in one folder. The copy is right. It is checked as test_check_copy.py
    checks others after kills, so here only its stages are."""
    run("python rloo.py --output-dir runs/mine")
    shorter = {"--response-length 256": "--response-length 12", "--seeds 10": "--seeds 6"}
    shorter["--prompt-tokens 300"] = "--prompt-tokens 30"
    shorter["my_loss.py:by_tokens"] = "my_loss.py:by_tokens --stages-only"
    printed = ""
    for command in commands(README):
        if not re.match("pip|uv|git", command):
            for long, short in shorter.items():
                command = command.replace(long, short)
            printed += run(command)
    assert "the loss is my_loss.py:by_tokens, in all" in printed
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
    command = command.replace("29500", str(launcher.free_port()))
    both = f"(export RANK=1; {command}) & export RANK=0; {command} && wait $!"
    assert "2 x cpu" in run(f"export FIRST=127.0.0.1; {both} #")


@mark.slow
def test_a_copy_that_grows_old(run, tmp_path):
    """What changed since the copy was made comes into it, and nothing else. The copy has a baseline
    of its own."""
    page = HERE / "docs/variants.md"
    show, merge = (first_command(page, beginning) for beginning in ("git show", "git merge-file"))
    check = [command for command in commands(page) if "my_loss.py:baseline" in command][-1]
    history = subprocess.check_output(
        ["git", "rev-parse", "--absolute-git-dir"], cwd=HERE, text=True
    )
    run(f"export GIT_DIR={history.strip()}; {show}")
    own = ("rloo_advantages(rewards, args.k)", "(rewards - 0.5).nan_to_num()")
    copy = tmp_path / "my_rloo.py"
    copy.write_text(read(tmp_path / "base.py").replace(*own))
    run(merge)
    assert read(copy) == read(HERE / "rloo.py").replace(*own) != read(HERE / "rloo.py")
    (tmp_path / "my_loss.py").write_text(textwrap.dedent(CODE.search(read(page))[0]))
    run(f"{check} --kl-coef 0 --stages-only")


SLURM = {  # what stands in for it
    "srun": """#!/bin/bash
shift
SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@" &
wait -n && wait -n || { kill $(jobs -p); wait; exit 1; }
""",
    "scontrol": """#!/bin/bash
case $1 in show) echo 127.0.0.1; echo another;; requeue) touch requeued;; esac
""",
    # In its third call, Slurm says that the time is over. It then ends the job.
    "reward.py": """
import itertools, os, pathlib, signal, time
calls = itertools.count(1)
def score(completions, **_):
    requeued = pathlib.Path("requeued")
    if next(calls) == 3 and os.environ["RANK"] == "0" and not requeued.exists():
        os.kill(int(os.environ["BATCH"]), signal.SIGUSR1)
        while not requeued.exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text)) for text in completions]
""",
}


@mark.slow
def test_a_job_of_slurm_goes_on(run, tmp_path):
    """Two launchers of one process each. When the time is over, the job asks for another start, and
    this continues the run."""
    for name, text in SLURM.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    job = first_command(HERE / "docs/slurm.md", "sbatch").partition("benchmark/")[2]
    job = job.replace("dtype bfloat16", "save-every 1").replace(" --log-with wandb", "")
    one_job = "SLURM_JOB_ID=7 SLURM_NNODES=2 SLURM_GPUS_ON_NODE=1 SLURM_JOB_NODELIST=2"
    one_job += " SLURM_CPUS_PER_TASK=1 ACCELERATE_USE_CPU=true PATH=$PWD:$PATH BATCH=$BASHPID"
    job = f"export {one_job}; exec bash benchmark/{job} --total-episodes 320"
    run(f"! ({job})")
    assert (tmp_path / "requeued").exists()
    printed = run(job)
    assert "resuming after" in printed and "2 x cpu (DDP)" in printed
    assert "320 episodes, 5 steps" in printed and (tmp_path / "runs/7/model").exists()


TASKS = {  # a row of the form, and what is made of it
    "gsm8k": (dict(question="Ann has 8?", answer="8 = <<8=8>>8\n#### 8,000"), '"answer": "8000"'),
    "code": (
        dict(text="Add 1.", test_setup_code="", test_list=["assert f(1) == 2", "x"]),
        'assert f(1) == 2"}], "tests": ["", "assert f(1) == 2", "x"]',
    ),
}


@mark.slow
@mark.parametrize("name", TASKS)
def test_the_commands_of_a_task(name, run, tmp_path):
    """Eight rows of its form make two iterations of a tiny policy with a chat template."""
    page = HERE / f"benchmark/{name}/README.md"
    row, made = TASKS[name]
    datasets.Dataset.from_list([row] * 8).to_parquet(tmp_path / "8.parquet")
    prepare, _, _ = first_command(page, "python benchmark").partition(" --parquet")
    run(prepare + " --parquet 8.parquet 8.parquet")
    assert made in read(tmp_path / f"runs/{name}_test.jsonl")
    tokenizer = make_tokenizer(vocab=["<pad>", "<eos>", *map(chr, range(128))])
    save_model(tmp_path / "tiny", tokenizer=tokenizer, vocab_size=130, max_position_embeddings=512)
    tiny = " --model-path tiny --batch-size 32 --response-length 8 --num-train-epochs 1"
    printed = run(first_command(page, "python grpo.py") + tiny)
    assert "64 episodes, 2 steps, 1 epochs" in printed
