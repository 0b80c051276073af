"""docs/ladder.md and benchmark/ladder/: the page shows the code of today and the measured numbers. REINFORCE learns."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import HERE, MODULES, fresh_imports, import_file, make_args, read_jsonl, reset_accelerate

FOLDER = HERE / "benchmark/ladder"
ladder = import_file(FOLDER / "ladder.py")
TEXT = (HERE / "docs/ladder.md").read_text(encoding="utf-8")
ROWS = json.loads((FOLDER / "ladder.json").read_text())
SCRIPTS_OF_THE_PAGE = ("reinforce", "rloo", "grpo", "ppo")


@pytest.fixture(scope="module")
def reinforce(tmp_path_factory):
    """The patched script as a module."""
    return import_file(ladder.patched_scripts(tmp_path_factory.mktemp("ladder"))["reinforce"])


# ================================================== the page =================================================
def test_the_page_is_what_the_command_writes():
    """The tables are those of ladder.json, and the code is that of the scripts."""
    assert ladder.fill_in(TEXT, ROWS) == TEXT, "run: python benchmark/ladder/ladder.py --page"


def test_the_page_changes_with_a_script_and_with_a_number(monkeypatch):
    sources = ladder.sources()
    sources["grpo"] = sources["grpo"].replace("variance.sqrt() + 1e-4", "variance.sqrt() + 1e-3")
    monkeypatch.setattr(ladder, "sources", lambda: sources)
    assert "variance.sqrt() + 1e-3" in ladder.fill_in(TEXT, ROWS)
    other = [row | {"sampled": row["sampled"] + 0.1} if "sampled" in row else row for row in ROWS]
    assert ladder.learning_table(other) not in TEXT and ladder.learning_table(ROWS) in TEXT


def test_each_rung_adds_few_lines():
    """Each line of code counts that no rung below has. The page says how many there are."""
    excerpts = ladder.excerpts()
    counts = [ladder.new_lines(excerpts[script]) for script in SCRIPTS_OF_THE_PAGE[1:]]
    assert all(10 <= count <= 40 for count in counts), counts
    assert [int(count) for count in re.findall(r"\*\*New lines of code: (\d+)\.\*\*", TEXT)] == counts
    patch = ladder.PATCH.read_text().split("diff --git")[1]
    changed = [line for line in patch.splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert len(changed) <= 40 and f"changes {len(changed)} lines of `rloo.py`" in TEXT


def test_what_is_shown_stands_in_the_script():
    """Every line of an excerpt is a line of the script, and no part is empty."""
    sources = ladder.sources()
    for script, excerpt in ladder.excerpts().items():
        lines = set(sources[script].splitlines())
        for name, part in excerpt["parts"].items():
            assert len(part) > 2 and not [line for line in part if line not in lines and line.strip() != "# ..."], name
        text = "\n".join(excerpt["parts"]["4b to 4d"])
        assert "---- 4b" in text and "---- 4d" in text and "---- 4a" not in text and "---- 4e" not in text


def test_every_number_of_the_text_is_in_a_table():
    """A number with a point that the text names stands in the tables, where it may have more digits.

    Or it is the default of --lam, or the deviation of four scores of which one or two are 1."""
    prose = re.sub(r"<!-- (\w+ ?[\w-]*) -->[\s\S]*?<!-- end -->", "", TEXT)
    prose = re.sub(r"arXiv [\d.]+|`[^`]*`|\$[^$]*\$|^    .*$", "", prose, flags=re.M)
    tables = [ladder.learning_table(ROWS), ladder.baseline_table(ROWS)]
    tables += [ladder.gradient_table(ROWS, weights) for weights in ("start", "half-way")]
    measured = [float(x) for x in re.findall(r"\d+\.\d+(?:e[+-]\d+)?", "\n".join(tables))]
    measured += [MODULES["ppo"].Args.lam]
    measured += [torch.tensor(scores).std().item() for scores in ([1.0, 0, 0, 0], [1.0, 1, 0, 0])]
    named = re.findall(r"\d+\.\d+", prose)
    assert len(named) > 5
    unknown = [
        x for x in named if not any(abs(float(x) - y) <= 0.501 * 10.0 ** -len(x.split(".")[1]) for y in measured)
    ]
    assert not unknown


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS_OF_THE_PAGE)
def test_lines_that_are_left_out_do_not_run(name, tmp_path, monkeypatch):
    """Python reports each line of a run with the rung's flags. Of a block that is left out only the condition runs."""
    monkeypatch.chdir(HERE)
    path = ladder.patched_scripts(tmp_path)[name]
    module = import_file(path)
    source = open(path).read()
    left_out = ladder.left_out_lines(name, source)
    shown = set(ladder.FUNCTIONS[name]) | {"main"}
    ran = set()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != path or frame.f_code.co_name not in shown:
            return None
        ran.add(frame.f_lineno)
        return trace

    words = f"{ladder.COMMON} --total-episodes 128 --num-sample-generations 0 --output-dir {tmp_path / 'run'}".split()
    reset_accelerate()
    sys.settrace(trace)
    try:
        with fresh_imports():
            module.main(module.tyro.cli(module.Args, args=words))
    finally:
        sys.settrace(None)
    lines = source.splitlines()
    wrong = [lines[i - 1] for i in sorted(ran & left_out) if not lines[i - 1].lstrip().startswith(("if ", "elif "))]
    assert len(ran) > 60 and not wrong


# ================================================= REINFORCE =================================================
def test_the_patch_applies_and_goes_back(tmp_path):
    source = (HERE / "rloo.py").read_text()
    (tmp_path / "rloo.py").write_text(source)
    subprocess.run(["git", "apply", ladder.PATCH], cwd=tmp_path, check=True)
    assert (tmp_path / "rloo.py").read_text() != source
    for command in (["check"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, "--quiet", "--config", HERE / ".ruff.toml"]
        subprocess.run([*words, "--line-length", "100", tmp_path / "rloo.py"], check=True)
    subprocess.run(["git", "apply", "-R", ladder.PATCH], cwd=tmp_path, check=True)
    assert (tmp_path / "rloo.py").read_text() == source


def test_reinforce_by_hand(reinforce):
    """The advantage is the reward. The loss is -A log p(y), so its slope is -A at each token."""
    rewards = torch.tensor([1.0, 0.0, float("nan"), -0.5])
    advantages = reinforce.reinforce_advantages(rewards)
    assert advantages.tolist() == [1.0, 0.0, 0.0, -0.5]
    logprobs = torch.tensor([[-1.0, -2.0]] * 4, requires_grad=True)
    given = reinforce.LossInputs(logprobs.detach(), advantages)
    terms = reinforce.reinforce_loss(SimpleNamespace(), logprobs, given)
    assert terms.losses.tolist() == [3.0, 0.0, 0.0, -1.5]
    assert not terms.is_clipped.any() and not terms.logratio.any()
    slope = torch.autograd.grad(terms.losses.sum(), logprobs)[0]
    assert slope.tolist() == [[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [0.5, 0.5]]


def test_another_zero_of_the_scores_changes_reinforce_and_not_rloo(reinforce):
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    rloo = MODULES["rloo"].rloo_advantages
    assert torch.allclose(rloo(rewards, 4), rloo(rewards + 1, 4))
    assert not torch.allclose(reinforce.reinforce_advantages(rewards), reinforce.reinforce_advantages(rewards + 1))
    shifted = import_file(FOLDER / "shifted.py")
    episodes = dict(completions=[" 42", "7"], answer=["42", "42"])
    assert (shifted.plus_one(**episodes), shifted.minus_one(**episodes)) == ([2.0, 1.0], [0.0, -1.0])


def test_reinforce_refuses_a_second_update(reinforce):
    with pytest.raises(ValueError, match="only one update"):
        make_args(reinforce, num_ppo_epochs=2)
    assert make_args(reinforce, rloo_k=1).k == 1  # It needs no group.


@pytest.mark.slow
def test_reinforce_learns(reinforce, tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    words = f"{ladder.COMMON} --total-episodes 2048 --save-rollouts --output-dir {tmp_path / 'run'}".split()
    reset_accelerate()
    with fresh_imports():
        reinforce.main(reinforce.tyro.cli(reinforce.Args, args=words))
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert rows[0]["eval/scores"] < 0.15 and rows[-1]["eval/scores"] > 0.3
    rollouts = read_jsonl(tmp_path / "run/rollouts.jsonl")
    assert {row["score"] for row in rollouts} == {0.0, 1.0}
    assert all(row["advantage"] == row["score"] for row in rollouts)


# ================================================= the numbers ===============================================
def test_moments_of_known_gradients():
    """Normal numbers with a known mean and variance. Both estimates are unbiased, so their means over many tries are
    right. The plain squared mean is not: it is too long by variance / 8."""
    rng = np.random.default_rng(0)
    mean = np.array([0.3, -0.2, 0.1, 0.4])
    found, plain = [], []
    for _ in range(4000):
        gradients = mean + rng.normal(size=(8, 4)) * [1, 2, 0.5, 1]
        found.append(ladder.moments(gradients @ gradients.T))
        plain.append((gradients.mean(0) ** 2).sum())
    squared_length, variance = np.mean(found, 0)
    assert variance == pytest.approx(6.25, rel=0.02)
    assert squared_length == pytest.approx(0.30, abs=0.04)
    assert np.mean(plain) == pytest.approx(0.30 + 6.25 / 8, rel=0.05)


def test_what_must_be_equal_is_equal():
    """Without its two divisions GRPO's advantage is RLOO's times (k - 1) / k, and its loss is divided by the longest
    response, 8. So noise and direction are RLOO's."""
    for weights in ("start", "half-way"):
        for prompts in (*ladder.SETS, "fresh"):
            rows = {
                row["rung"]: row
                for row in ROWS
                if row["measured"] == "gradient" and (row["weights"], row["prompts"]) == (weights, prompts)
            }
            rloo, grpo = rows["RLOO"], rows["GRPO, no deviation, no lengths"]
            factor = (3 / 4 / 8) ** 2
            assert grpo["variance"] == pytest.approx(rloo["variance"] * factor, rel=1e-3)
            assert grpo["squared_mean"] == pytest.approx(rloo["squared_mean"] * factor, rel=1e-3)


def test_ladder_json_has_every_run():
    learning = {(row["rung"], row["seed"]) for row in ROWS if row["measured"] == "learning"}
    assert learning == {(rung.name, seed) for rung in ladder.LEARNING for seed in ladder.SEEDS}
    gradients = [(row["rung"], row["weights"], row["prompts"]) for row in ROWS if row["measured"] == "gradient"]
    assert len(gradients) == len(set(gradients)) == len(ladder.GRADIENTS) * 2 * 6
    assert all(row["repetitions"] == 64 for row in ROWS if row["measured"] == "gradient")
    assert all(row["episode"][-1] == 4096 for row in ROWS if row["measured"] == "learning")


@pytest.mark.slow
def test_the_gradients_are_measured_again(tmp_path):
    """Few repetitions of one set: the start's variance of RLOO's gradient is near that of ladder.json."""
    command = "python benchmark/ladder/ladder.py --only gradients --sets 1 --repetitions 16 --episodes 64"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=HERE, capture_output=True, text=True)
    for file in files.stdout.split():
        if (HERE / file).exists() and not file.startswith("tests/"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_bytes((HERE / file).read_bytes())
    finished = subprocess.run([sys.executable, *command.split()[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]

    def variance(rows, rung):
        found = [r["variance"] for r in rows if (r["rung"], r.get("weights"), r.get("prompts")) == (rung, "start", 1)]
        assert len(found) == 1
        return found[0]

    again = json.loads((tmp_path / "benchmark/ladder/ladder.json").read_text())
    for rung in ("REINFORCE", "RLOO", "GRPO", "PPO"):
        before, after = variance(ROWS, rung), variance(again, rung)
        assert before != after == pytest.approx(before, rel=0.4), rung
