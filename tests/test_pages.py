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
from conftest import HERE, MODULES, SCRIPTS, import_file, read_jsonl
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
        # A program makes the first of these two. TRL has the second.
        if not (HERE / path).exists() and not re.search("smollm2/model|docs/source", path):
            dead.append(path)
    assert not dead


@of_each_page
def test_every_name_in_code_style_exists(page):
    """A metric, function, file or test that a page writes `like_this` stands in the repository's
    programs."""
    if page.name == "coming_from.md":  # It names those of other trainers.
        return
    programs = "".join(SOURCES.values())
    names = set(re.findall(r"`([a-z]\w*(?:[_/]\w+)+)`", read(page)))
    names |= set(re.findall(r"\b([a-z]\w*_\w+)\(", read(README)))  # the functions of its loop
    for name in names:
        is_file = (HERE / name).exists() or (page.parent / name).exists()
        assert is_file or name in programs, name


@of_each_page
def test_lines_of_prose_are_narrow(page):
    for line in read(page).splitlines():
        assert len(line) <= 120 or line.startswith(("|", "![", "    ", "<!--"))


def test_the_tables_are_up_to_date():
    """Writing them again changes nothing. Each table is one that can be written."""
    for page in PAGES:
        text = read(page)
        assert tables.write_tables(text) == text, f"python benchmark/tables.py changes {page.name}"
        assert len(tables.TABLE.findall(text)) == text.count("<!-- end of table -->")


# Phrases of pages, and where their numbers come from, as in a table's comment.
PHRASES = """
README.md
default/curves.json part=smollm2_rloo: {greedy_before:.2f} are right before,
default/curves.json part=smollm2_rloo: {greedy_after:.2f} (RLOO)
default/curves.json part=smollm2_grpo: {greedy_after:.2f} (GRPO)
default/curves.json part=smollm2_ppo: {greedy_after:.2f} (PPO) after {episode[-1]:,} episodes
default/curves.json part=default script=rloo: {greedy_before:.3f} -> {greedy_after:.3f} of the
parity/mini_batch.json part=same: differs by about {gradient:max.0e}
hardware/sharded.json: at most {relative_distance:max.1e} of
hardware/kill_and_resume.json bitwise=True: after {kills:sum} kills the same bits
hardware/kill_and_resume.json bitwise=False: after {kills:sum}, on one
hardware/kill_and_resume.json: by turns, within {relative_distance:max.1e}
hardware/rounding.json part=SmolLM2: {completions_that_differ} of {completions})
questions/questions.json side=TRL: {batch_256:range,}, in batches of 256 | {row}
questions/questions.json each=side: logs {logged_1:range.3f}, truly {mean_1:range.3f}
questions/questions.json side=Tally: at most {processes:max.1e} of the distance
questions/questions.json side=TRL: by {every_6:min.2f} or more
questions/questions.json: another seed makes {another_seed:min.2f} or more
throughput/throughput.json part=[acdeh]: {trl[lowest]:min.1f} to {trl[highest]:max.1f} times
throughput/gpu.json part=tokens64_.+: {trl[lowest]:min.1f} to {trl[highest]:max.1f} times on
docs/claims.md
claims/claims.json part=coin: training {scores[0]:.2f} are | pass@16 is {best_of_k[0]:.2f}
claims/claims.json part=coin script=rloo each=reward: {scores[1]:±.2f}
claims/claims.json part=coin script=rloo each=reward: {best_of_k[1]:±.2f}
claims/claims.json part=group|epochs|clip|learning_rate: {episode[-1]:,.0f} episodes (
claims/claims.json part=kl|eos|loss: ({episode[-1]:,.0f} with reward model, judge and losses)
claims/claims.json part=kl each=label: {held_out:.2f} at {label}
claims/claims.json part=eos label=1: and {held_out:±.2f} are right
claims/claims.json part=learning_rate label=5e-05|0.0002: all reach {held_out:min.2f} or more
claims/claims.json part=learning_rate label=1e-05 script=ppo: (PPO at 1e-5: {held_out:min.2f})
claims/claims.py cited
docs/ladder.md
ladder/ladder.json part=gradients rung=GRPO weights=start prompts=.: {cosine:interval.3f}
ladder/ladder.py cited
benchmark/README.md
hardware/rounding.json part=rloo.in.bfloat16: {completions_that_differ:sum,} of RLOO's
hardware/rounding.json part=SmolLM2: {completions_that_differ} of {completions} differs
hardware/rounding.json part=PPO,.shift.+: iteration {first_iteration:min}
hardware/rounding.json part=PPO,.shift.+: most {completions_that_differ:max} of
hardware/kill_and_resume.json: within {relative_distance:max.1e} of the distance
throughput/gpu.json part=tokens64_micro16 script=rloo: graphs {eager[token_ms]:.0f} ms
throughput/gpu.json part=tokens64_micro16 script=rloo: An update takes {tally[update_s]:.2f} s
throughput/gpu.json part=rows_micro16: A step took {shared_prompts[ratio]:.1f} times as long
docs/papers.md
default/curves.json part=smollm2_grpo: with GRPO alone {greedy_after:.2f}
"""


def test_sentences_have_the_numbers_that_were_measured():
    for line in PHRASES.split("\n"):
        if line.endswith(".md"):
            text = " ".join(read(HERE / line).split()).replace("e-0", "e-")
        elif line:
            for phrases in tables.rows_of(line):
                for phrase in phrases:
                    assert phrase and phrase in text, f"{line} gives {phrase!r}"


PLACEHOLDER = r"\b(?:TODO|TBD|FIXME|TESTS)\b"


@of_each_page
def test_no_page_has_a_placeholder(page):
    """A word of capitals with underscores stands in a program, or is a variable that a command
    sets."""
    text = read(page)
    assert not re.search(PLACEHOLDER, text)
    for name in re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b(?!=)", text):
        assert any(name in source for source in SOURCES.values()), name


def test_the_readme_says_how_long_the_files_are():
    """Its round numbers are right within 5 %. No short program is longer than it says."""
    words = r"Of the ([\d,]+) lines of `rloo.py` the first (\d+) .* at most (\d+) lines"
    stated = re.search(words, " ".join(read(README).split())).groups()
    total, lecture, short = (int(number.replace(",", "")) for number in stated)
    lines = SOURCES["rloo.py"].splitlines()
    [banner] = (number for number, line in enumerate(lines) if " MACHINERY " in line)
    assert (len(lines), banner) == (approx(total, rel=0.05), approx(lecture, rel=0.05))
    assert max(len(SOURCES[f"docs/nano/{name}.py"].splitlines()) for name in SCRIPTS) <= short


PROGRAM = r"(?:[A-Z_]+=\S+ )*(?:pip|uv|python|accelerate|torchrun|srun|git|pytest|cp) "
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
    """Fail unless a launcher knows its flags, and a program of benchmark/ exists and names its
    flags."""
    for launcher, parser in LAUNCHERS.items():
        if launcher in words:
            flags = words[words.index(launcher) + 1 :]
            parser.parse_args([*flags, "a script"])
    if words[:2] == ["python", "-c"]:
        ast.parse(words[2])
    elif words[0] == "python" and words[1].startswith("benchmark/"):
        text = read(HERE / words[1]).replace("-", "_")
        for flag in words:
            if flag.startswith("--"):
                name = flag[2:].replace("-", "_")
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
    for patch in re.findall(r"git apply -R ([\w/.]+)", read(page)):
        assert f"git apply {patch}" in read(page), f"{page.name} takes back what it does not apply"


@of_each_page
def test_flags_in_the_text_exist(page):
    """A flag of a script, of a patch, or of a program of benchmark/; or one of another program,
    in a command."""
    programs = "\n".join(SOURCES.values())
    flags = re.findall(r"^\+?    (\w+): .* = ", programs, re.M)
    flags += re.findall(r'"--([\w-]+)"', programs)
    known = {name.replace("_", "-") for name in flags} | {"help"}
    in_commands = "\n".join(commands(page))
    for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", read(page)):
        assert flag.removeprefix("no-") in known or f"--{flag}" in in_commands, flag


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
def test_a_diff_of_a_page_fits(page):
    """Lines with + and - are a change of a script, where the lines with - stand once. Or they
    are from a patch."""
    patches = []
    for name, text in SOURCES.items():
        if name.endswith(".patch"):
            patches.append(set(text.splitlines()))
    for lines, changed in diffs(page):
        for text in changed.values():
            compile(text, page.name, "exec")
        assert changed or any(patch.issuperset(lines) for patch in patches), lines


@of_each_page
def test_python_of_a_page_compiles(page):
    """Indented lines from an import or a function on."""
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
    rows = [json.loads(row) for row in re.findall(r'^    (\{"prompt".*)$', read(README), re.M)]
    assert {type(row["prompt"]) for row in rows} == {str, list}
    for row in rows:
        text = row["answer"]
        if isinstance(row["prompt"], list):
            text = [{"role": "assistant", "content": text}]
        ids = [[1] * 256]
        parts = names["score"](completions=[text], completion_ids=ids, answer=[row["answer"]])
        assert parts["right"] == [1.0] and sum(sum(parts.values(), [])) > 0


RENAMED = {
    "num_iterations": "num_ppo_epochs",
    "max_completion_length": "response_length",
    "beta": "kl_coef",
    "epsilon": "cliprange",
    "epsilon_high": "cliprange_high",
    "report_to": "log_with",
}


def test_the_ported_configuration_makes_the_steps_of_trl(capsys):
    """TRL's configuration and the command below it say the same, and --plan prints TRL's steps."""
    page = HERE / "docs/coming_from.md"
    call = re.search(r"^    config = (GRPOConfig\(.*?^    \))", read(page), re.M | re.S)[1]
    trl = {}
    for keyword in ast.parse(call).body[0].value.keywords:
        trl[keyword.arg] = ast.literal_eval(keyword.value)
    command = first_command(page, "accelerate launch")
    processes, flags = re.search(r"--num_processes (\d+) grpo.py (.*)", command).groups()
    grpo = MODULES["grpo"]
    # These replace `your/model` and its like.
    flags += f" --model-path {grpo.Args.model_path} --dataset None"
    args = tyro.cli(grpo.Args, args=[*flags.split(), "--plan", processes])
    grpo.main(args)
    plan = yaml.safe_load(capsys.readouterr().out)
    episodes = trl["per_device_train_batch_size"] * int(processes)
    ours = vars(args) | dict(
        max_steps=plan["steps"],
        gradient_accumulation_steps=plan["gradient_accumulation_steps"],
        steps_per_generation=args.batch_size / episodes,
        save_steps=args.save_every * args.updates_per_batch,
        bf16=args.dtype == "bfloat16",
        scale_rewards=args.scale_rewards != "none",
    )
    del trl["reward_weights"]  # They are part of the reward function.
    for name, value in trl.items():
        assert ours[RENAMED.get(name, name)] == value, name


FIELDS = json.loads(read(HERE / "benchmark/parity/fields.json"))
# Each of its paragraphs is one line.
COMING_FROM = re.sub(r"(?<!\n)\n *(?!\n)", " ", read(HERE / "docs/coming_from.md"))
DEFAULT = r"`([\w.]+)` \((.*?), here (.*?)\)"  # a name, the other's default, and ours


def defaults_of(script):
    """For another model than the built-in one."""
    return vars(script.check_flags(script.Args(model_path="your/model", dataset="your.jsonl")))


def test_the_fields_of_trl_are_on_the_page():
    """The page has each default of PPOConfig (TRL 1.12) that differs from ours. What has no
    counterpart is in TRL 1.16. The stored lists were read from the sources: what each class itself
    defines, the defaults that verl generates (not all), and the options of OpenRLHF."""
    args = defaults_of(MODULES["ppo"])
    args["local_rollout_forward_batch_size"] = args["per_device_rollout_batch_size"]
    paragraph = re.search("Defaults that differ: .*", COMING_FROM)[0]
    differ = []
    for name, trl in FIELDS["PPOConfig"].items():
        ours = args.get(name, trl)
        if ours != trl and not name.endswith("_path"):
            differ.append((name, str(trl), str(ours).removesuffix(".0")))
    assert sorted(re.findall(DEFAULT, paragraph)) == sorted(differ)
    without = re.search("no counterpart: (.*?) callbacks", COMING_FROM)[1]
    names = set(re.findall(r"`(\w+)`", without))
    assert names <= FIELDS["GRPOConfig"].keys() | FIELDS["RLOOConfig"].keys()
    assert not names & vars(MODULES["grpo"].Args()).keys()


RENAMED |= {
    "lr_scheduler": "lr_scheduler_type",
    "lr_warmup_ratio": "warmup_steps",
    "value_clip": "cliprange_value",
    "lambd": "lam",
}


def test_names_and_defaults_of_others_are_theirs():
    """In the table of names, and in the list of defaults."""
    args = {}
    for name in SCRIPTS:
        args |= defaults_of(MODULES[name])
    args["kl_coef"] = MODULES["rloo"].Args().kl_coef

    def default(peer, name):
        fields = FIELDS[peer]
        found = fields[name if name in fields else f"actor_rollout_ref.{name}"]
        return str(found).strip("[]")

    for row in re.findall(r"\| `--[^|]*\|[^|]*\|([^|]*)\|([^|]*)\|", COMING_FROM):
        for peer, cell in zip(("verl", "OpenRLHF"), row):
            for name in re.findall(r"`([\w.]+)`", cell):
                default(peer, name)
    for peer in ("GRPOConfig", "RLOOConfig", "verl", "OpenRLHF"):
        item = re.search(rf"\*\*{peer}\*\*: (.*?)( - |\n)", COMING_FROM)[1]
        for name, theirs, ours in re.findall(DEFAULT, item):
            assert theirs == default(peer, name)
            last = name.split(".")[-1]
            flag = args.get(RENAMED.get(last, last), ours)
            assert theirs != ours == str(flag).removesuffix(".0"), name


FEW = " --total-episodes 64 --num-sample-generations 0"


@fixture
def run(tmp_path):
    """run(command) runs it in a copy of scripts and benchmark/, with what README's commands take
    as yours."""
    for script in SCRIPTS:
        shutil.copy(HERE / f"{script}.py", tmp_path)
    made = shutil.ignore_patterns("smollm2", "__pycache__", ".*")  # They hold what programs made.
    shutil.copytree(HERE / "benchmark", tmp_path / "benchmark", ignore=made)
    shutil.copytree(HERE / "benchmark/default/policy", tmp_path / "your/model")
    shutil.copy(HERE / "benchmark/default/train.jsonl", tmp_path / "prompts.jsonl")
    shutil.copy(HERE / "benchmark/default/eval.jsonl", tmp_path / "held_out.jsonl")
    (tmp_path / "reward.py").write_text(readme_reward())
    environment = os.environ | dict(PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")

    def run(command):
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stdout
        return ran.stdout

    return run


def run_few(run, command):
    """With few episodes."""
    output = run(command + FEW)
    assert output.splitlines()[-1].startswith("64 episodes, "), output


ELSEWHERE = ("pip", "uv", "git", "pytest")
README_COMMANDS = [c for c in dict.fromkeys(commands(README)) if not c.startswith(ELSEWHERE)]


@mark.slow
@mark.parametrize("command", README_COMMANDS)
def test_the_commands_of_the_readme(command, run, tmp_path):
    if "plot.py" in command:
        run_few(run, "python rloo.py")
        run(command)
        assert (tmp_path / "runs/plot.png").stat().st_size > 10_000
    elif "look.py" in command:
        run_few(run, "python rloo.py --save-rollouts")
        assert re.search(r"(\d+) of \1 episodes", run(command))
    elif "--plan" in command:
        assert "steps: 256" in run(command)
    elif "your/model" in command:
        run_few(run, command.replace("--response-length 256", "--response-length 12"))
        [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
        last = read_jsonl(metrics)[-1]
        assert {"reward/right", "reward/length"} <= last.keys()
    elif re.search(r"(rloo|grpo|ppo)\.py", command):
        run_few(run, command)
    else:
        run(command)


@mark.slow
def test_the_recipe_of_merging_adapters(run):
    run_few(run, "python rloo.py --lora-r 2 --output-dir runs/x")
    run(first_command(RECIPES, 'python -c "import peft'))
    dataset = "benchmark/default/train.jsonl"
    run_few(run, f"python rloo.py --model-path merged --dataset {dataset} --response-length 8")


@mark.slow
def test_the_recipe_of_two_machines(run):
    """Two launchers on one machine, of one process each."""
    command = first_command(RECIPES, "torchrun --nnodes 2") + FEW
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 1")
    command = command.replace("29500", str(free_port()))
    both = f"export RANK=1; {command} & export RANK=0; {command} && wait $!"
    assert "2 x cpu" in run(f"export FIRST=127.0.0.1; {both}")
