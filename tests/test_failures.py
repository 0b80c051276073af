"""docs/failures.md: its commands run, its numbers are measured, and its patches break what they say.

From a metric's row in docs/metrics.md a reader finds the failure, and back.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tyro
from conftest import HERE, MODULES, fresh_imports, import_file, one_text, read_jsonl, reset_accelerate
from test_readme import anchors, commands

PAGE = HERE / "docs/failures.md"
TEXT = PAGE.read_text(encoding="utf-8")
METRICS = (HERE / "docs/metrics.md").read_text(encoding="utf-8")
FOLDER = HERE / "benchmark/failures"
program = import_file(FOLDER / "failures.py")
judges = import_file(FOLDER / "judges.py")
RESULTS = json.loads(program.RESULT.read_text())
FAILURES = {failure.name: failure for failure in program.FAILURES}
PATCHES = {"temperature": ["ppo"], "eos_masked": ["rloo"], "interleaved": ["grpo"], "no_check": ["rloo", "grpo", "ppo"]}
REFUSED = "sampling and training give log-probabilities"
SECTIONS = {}  # of each failure, its anchor and its text: the section that shows its figure
for section in TEXT.split("\n## ")[1:]:
    for name in re.findall(r"\]\(\.\./benchmark/failures/(\w+)\.png\)", section):
        SECTIONS[name] = (re.sub(r"[^\w\- ]", "", section.split("\n")[0].lower()).replace(" ", "-"), section)


def command_lines(text):
    """The commands of a text, in their order. A line that ends with \\ goes on in the next one."""
    lines = re.findall(r"^    ((?:python|git) .*)$", text.replace(" \\\n", " "), re.M)
    return [re.sub(" +", " ", line) for line in lines]


def patched(folder, *patches):
    return program.copy_scripts(folder, patches)


# ================================================ the page ================================================
def test_every_failure_has_a_section_a_figure_and_results():
    assert SECTIONS.keys() == FAILURES.keys() == {row["failure"] for row in RESULTS}
    assert {path.stem for path in FOLDER.glob("*.png")} == set(FAILURES)
    assert {anchor for anchor, _ in SECTIONS.values()} <= anchors(PAGE)
    for failure in FAILURES.values():
        for run in program.COLORS:
            assert [row["seed"] for row in program.runs_of(RESULTS, failure, run)] == list(program.SEEDS)


@pytest.mark.parametrize("name", FAILURES)
def test_the_numbers_are_those_of_the_runs(name):
    """Each row of a section's table is what failures.json says. The commands are those of the runs."""
    failure, (_, section) = FAILURES[name], SECTIONS[name]
    rows = re.findall(r"^\| \[?`([\w/]+)`(?:\]\([^)]*\))? \| (.*?) \| (.*?) \|$", section, re.M)
    assert {metric: tuple(ends) for metric, *ends in rows} == program.table(RESULTS, failure)
    for run in program.COLORS:
        assert program.command(failure, run) in command_lines(section)
        for row in program.runs_of(RESULTS, failure, run):
            assert row["command"] == program.command(failure, run)
    for patch in failure.patches:
        assert f"git apply benchmark/failures/{patch}.patch" in command_lines(section)
        assert f"git apply -R benchmark/failures/{patch}.patch" in command_lines(section)


@pytest.mark.parametrize("name", FAILURES)
def test_the_failure_is_worse_than_its_healthy_run(name):
    """In every seed: fewer held-out answers are right. A wrong temperature is seen where the policy samples."""
    metric = "objective/scores" if name == "temperature" else "eval/scores"
    failed, healthy = (
        [program.end_of(row, metric) for row in program.runs_of(RESULTS, FAILURES[name], run)] for run in program.COLORS
    )
    assert max(failed) < min(healthy), (failed, healthy)


def test_a_metric_leads_to_its_failures_and_back():
    """A metric with a link in a failure's table is a symptom. Each symptom has a link in the metric's row of
    docs/metrics.md and in the page's first table, and there are no other links."""
    symptoms = set()
    for anchor, section in SECTIONS.values():
        for metric, heading in re.findall(r"^\| \[`([\w/]+)`\]\(metrics\.md#([\w-]+)\)", section, re.M):
            symptoms.add((metric, anchor))
            part = next(part for part in METRICS.split("\n## ") if part.lower().startswith(heading.replace("-", " ")))
            assert re.search(rf"^\| [^|]*`{metric}`", part, re.M), (metric, heading)
    assert {anchor for _, anchor in symptoms} == {anchor for anchor, _ in SECTIONS.values()}
    for links in (rows_with_links(METRICS, r"failures\.md#"), rows_with_links(TEXT[: TEXT.index("\n## ")], "#")):
        for metric, anchor in symptoms:
            assert any(metric in names and anchor == of for names, of in links), f"{metric} leads not to {anchor}"
        for names, anchor in links:
            assert any((name, anchor) in symptoms for name in names), f"{names} is no symptom of {anchor}"


def rows_with_links(text, target):
    """(metrics of the first column, anchor) of every link in a table's row."""
    found = []
    for line in text.splitlines():
        if line.startswith("|"):
            names = re.findall(r"`([\w/]+)`", line.split("|")[1])
            found += [(names, anchor) for anchor in re.findall(rf"\]\({target}([\w-]+)\)", line)]
    return found


# ================================================ patches and judges ======================================
def test_every_patch_is_known():
    assert {path.stem for path in FOLDER.glob("*.patch")} == set(PATCHES)
    assert {patch for failure in FAILURES.values() for patch in failure.patches} == set(PATCHES)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_short_and_applies(name, tmp_path):
    """It changes at most six lines of a script. `-R` takes it back."""
    head, diff = re.split(r"^(?=diff --git)", (FOLDER / f"{name}.patch").read_text(), maxsplit=1, flags=re.M)
    assert f"git apply benchmark/failures/{name}.patch" in head
    for of_script in re.split(r"^(?=diff --git)", diff, flags=re.M)[1:]:
        changed = [line for line in of_script.splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]
        assert 0 < len(changed) <= 6
    folder = patched(tmp_path / name)
    before = {path.stem: path.read_text() for path in folder.glob("*.py")}
    subprocess.run(["git", "apply", FOLDER / f"{name}.patch"], cwd=folder, check=True)
    after = {path.stem: path.read_text() for path in folder.glob("*.py")}
    assert {script for script in before if before[script] != after[script]} == set(PATCHES[name])
    for script in PATCHES[name]:
        assert ("# BROKEN" in after[script]) == (name != "no_check")
    words = [sys.executable, "-m", "ruff", "format", "--check", "--quiet", "--config", HERE / ".ruff.toml"]
    subprocess.run([*words, "--line-length", "100", *folder.glob("*.py")], check=True)
    subprocess.run(["git", "apply", "-R", FOLDER / f"{name}.patch"], cwd=folder, check=True)
    assert before == {path.stem: path.read_text() for path in folder.glob("*.py")}


def test_judges_by_hand():
    columns = dict(prompts=["37+58=", "90+15="], completions=["95 ", "21057"], answer=["95", "105"])
    columns["completion_ids"] = [[11, 7, 15, 1], [4, 3, 2, 7, 9]]
    assert judges.likes_length(**columns) == pytest.approx([1.8, 2.0])
    assert judges.likes_length_a_little(**columns) == pytest.approx([1.008, 1.01])
    assert judges.first_two_digits(**columns) == [1, 0]
    assert judges.first_two_digits(["10", "105"], ["105", "105"]) == [1, 0]
    assert judges.kinder_to_some_prompts(**columns) == [4, 9]


def test_the_masked_eos_has_no_gradient(run, world, tmp_path):
    """Its log-probability is 0 in training. So the check finds the largest one of the sampler."""
    flags = dict(model_path=world.many_eos, learning_rate=0.0, kl_coef=0.0, total_episodes=12)
    folder = patched(tmp_path / "patched", "eos_masked", "no_check")
    _, broken, rollouts = run(import_file(folder / "rloo.py"), **flags)
    _, healthy, _ = run(MODULES["rloo"], **flags)
    rows = read_jsonl(rollouts / "rollouts.jsonl")
    ends = [-row["logprobs"][-1] for row in rows if row["token_ids"][-1] == 1 and row["advantage"] != 0]
    assert broken[0]["val/sampling_logprob_difference"] == pytest.approx(max(ends), rel=1e-3)
    assert healthy[0]["val/sampling_logprob_difference"] < 1e-4
    assert broken[0]["grad_norm"] != pytest.approx(healthy[0]["grad_norm"], rel=0.01)


@pytest.mark.parametrize("p", [0.01, 0.5, 0.99])
def test_a_masked_eos_is_learned_p_times_as_fast(p):
    """One place: the EOS, with probability p and the score 1, or another token with the score 0. The advantages have
    mean 0. The mean gradient with the EOS masked is p times the right one."""
    logits = torch.tensor([p, 1 - p], dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    advantages = torch.tensor([1.0, 0.0], dtype=torch.float64) - p
    terms = logprobs.exp().detach() * advantages * logprobs
    [right] = torch.autograd.grad(terms.sum(), logits, retain_graph=True)
    [masked] = torch.autograd.grad(terms[1], logits)
    assert right[0] > 0
    torch.testing.assert_close(masked, p * right)


def test_interleaved_groups_mix_prompts(run, world, tmp_path):
    """The rows of a group have k different prompts. The healthy script has one prompt in a group."""
    folder = patched(tmp_path / "patched", "interleaved")
    for script, prompts_of_a_group in ((import_file(folder / "grpo.py"), 3), (MODULES["grpo"], 1)):
        _, metrics, rollouts = run(script, reward=world.reward("number"), total_episodes=12, kl_coef=0.0)
        rows = read_jsonl(rollouts / "rollouts.jsonl")
        groups = [{row["prompt"] for row in rows[first : first + 3]} for first in range(0, 12, 3)]
        assert {len(group) for group in groups} == {prompts_of_a_group}
        # The score says which prompt it is. So it is equal in a right group, and different in a wrong one.
        assert metrics[0]["group/zero_advantage_fraction"] == (prompts_of_a_group == 1)


def test_the_sampler_of_another_temperature_moves_the_ratio(run, tmp_path):
    """With two updates for a batch the ratio is not 1 before the first one. The script stops."""
    flags = dict(learning_rate=0.0, total_episodes=12, num_ppo_epochs=2)
    with pytest.raises(RuntimeError, match=REFUSED):
        run(import_file(patched(tmp_path / "checked", "temperature") / "ppo.py"), **flags)
    folder = patched(tmp_path / "unchecked", "temperature", "no_check")
    _, [row], _ = run(import_file(folder / "ppo.py"), **flags)
    assert row["val/ratio_var"] > 0.1 and row["val/sampling_logprob_difference"] > 1
    _, [row], _ = run(MODULES["ppo"], **flags)
    assert row["val/ratio_var"] < 1e-6


# ================================================== the commands ==============================================
def test_every_command_is_run_or_marked():
    """A command stands in the section of a failure, where the next test runs it, or the page says that CI does not."""
    run = {line for _, section in SECTIONS.values() for line in command_lines(section)}
    assert len(run) > 2 * len(FAILURES)
    for command, before in commands(PAGE):
        assert command in run or "CI does not run it" in before


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_every_command_runs(name, tmp_path, monkeypatch):
    """In the order of the page, with one batch. With a patch that the script notices, the first run is refused."""
    monkeypatch.chdir(HERE)
    folder = patched(tmp_path / "scripts")
    applied = []
    for number, line in enumerate(command_lines(SECTIONS[name][1])):
        words = line.split()
        if words[0] == "git":
            subprocess.run([*words[:-1], HERE / words[-1]], cwd=folder, check=True)
            patch = Path(words[-1]).stem
            applied.remove(patch) if "-R" in words else applied.append(patch)
            continue
        assert words[:2] in (["python", f"{script}.py"] for script in MODULES)
        flags = [
            *words[2:],
            *f"--total-episodes 64 --num-sample-generations 0 --output-dir {tmp_path}/{number}".split(),
        ]
        if applied in (["temperature"], ["eos_masked"]):  # The page shows the message.
            with pytest.raises(RuntimeError, match=REFUSED) as refused:
                train(folder / words[1], flags)
            assert f"\n    RuntimeError: {refused.value}\n" in SECTIONS[name][1]
        else:
            train(folder / words[1], flags)
            assert (tmp_path / f"{number}/model/config.json").exists()
    assert not applied


def train(path, flags):
    """Run a script in this process, and return the rows of metrics.jsonl."""
    script = import_file(path)
    reset_accelerate()
    with fresh_imports():
        args = tyro.cli(script.Args, args=[str(flag) for flag in flags])
        script.main(args)
    return read_jsonl(Path(args.output_dir) / "metrics.jsonl")


@one_text
@pytest.mark.slow
@pytest.mark.parametrize("name", ["learning_rate", "interleaved"])
def test_a_short_run_shows_the_symptom(script, name, tmp_path, monkeypatch):
    """1,024 episodes with one seed are enough for these two."""
    monkeypatch.chdir(HERE)
    torch.set_num_threads(1)
    ends = {}
    for run, patches in (("failure", FAILURES[name].patches), ("healthy", ())):
        folder = patched(tmp_path / run, *patches)
        flags = program.run_flags(FAILURES[name], run, seed=1).replace("4096", "1024").split()
        rows = train(folder / f"{FAILURES[name].script}.py", [*flags, "--output-dir", tmp_path / run / "run"])
        ends[run] = rows[-1]
    assert ends["failure"]["eval/scores"] < ends["healthy"]["eval/scores"] - 0.1, ends
    if name == "learning_rate":
        assert ends["failure"]["objective/kl"] > 3 * ends["healthy"]["objective/kl"]
    else:
        assert ends["failure"]["group/zero_advantage_fraction"] < 0.05
