"""benchmark/compare.py: what it says about scores, and how it makes runs."""

import json
import os
import shutil
import subprocess
import sys
import time

import compare
import numpy as np
import psutil
from conftest import HERE, MODULES, base_flags, command_line, launcher, with_group, write_jsonl
from pytest import approx, mark, raises


@mark.parametrize("seeds", (6, 10))
def test_a_visible_difference_is_seen_in_four_of_five_cases(seeds):
    samples = np.random.default_rng(1).normal(size=(1000, seeds))
    p = compare.sign_flips(samples + compare.visible(seeds, 0.05))
    assert np.mean(p < 0.05) == approx(0.8, abs=0.05)


def test_verdicts():
    """Three standard deviations are always seen. Other comparisons and looks make p larger. p is
    exact: the share of all signs with a sum at least as far from 0. Holm's example has four values.
    """
    first, noise = np.random.default_rng(0).normal(size=(2, 11))
    second = first + noise / 4
    for shift, verdict in ((1, "better"), (-1, "worse"), (0, "no difference is seen; one of ")):
        [entry] = compare.judge([first, second + shift], looks=30)
        assert entry["verdict"].startswith(verdict)
    expected = 11 * (first.var() + second.var()) / (noise / 4).var()
    assert entry["worth"] == approx(expected)
    assert compare.judge([first, first])[0]["verdict"].startswith("equal in all seeds")
    for others, looks, verdict in ((1, 1, "better"), (2, 1, "no difference"), (1, 2, "no differ")):
        found = compare.judge([[0] * 7, *[ALMOST] * others], looks)
        assert found[0]["p"] == approx(others * looks * 4 / 128)
        assert found[0]["verdict"].startswith(verdict)
    assert compare.holm([0.03, 0.01, 0.6, 0.7]) == approx([0.09, 0.04, 1, 1])


ALMOST = [1, 2] * 3 + [-0.1]  # p is 4 / 128


def test_a_comparison_of_finished_runs(run, tmp_path, monkeypatch, capsys):
    """A run stands for those of two methods, with planted scores. All verdicts beside the same
    script are looks. What cannot have a verdict is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "find_original", lambda *_: ("rloo", None, None))
    ran = run(MODULES["rloo"], eval_dataset=8)
    shutil.copy(ran.folder / "rloo.py", ".")
    methods = ("rloo.py", "rloo.py --cliprange 0.3")
    args = compare.Args(methods, seeds=7)
    flags = ["--kl-coef", "0"]
    for own, scores in (([], [0] * 7), (["--cliprange=0.3"], ALMOST)):
        for folder, score in zip(
            compare.runs_of(args, ["rloo.py", *own, *flags], range(1, 8)), scores
        ):
            shutil.copytree(ran.folder, folder)
            ran.metrics[-1]["eval/scores"] = score
            write_jsonl(folder / "metrics.jsonl", ran.metrics)
    unrelated = dict(baseline="grpo.py", looks=8)
    (args.folder / "compare.json").write_text(json.dumps(dict(comparisons=[unrelated])))
    for seeds, verdict in ((6, "better"), (6, "better"), (7, "no difference")):
        compare.main(compare.Args(methods, seeds), flags)
        said = capsys.readouterr().out
        assert f": {verdict}" in said
        assert ("multiplied by the 2 verdicts beside rloo.py" in said) == (seeds == 7)
        assert ("The interval says otherwise" in said) == (seeds == 7)
    result = json.loads((args.folder / "compare.json").read_text())
    [other, _, last] = result["comparisons"]
    assert other == unrelated
    assert last["scores"] == [[0] * 7, ALMOST]
    assert last["flags"] == flags
    assert "torch" in last["versions"][0]
    assert (args.folder / "compare.png").stat().st_size > 10_000
    three = dict(methods=methods[:1] * 3, folder=tmp_path)
    for message, asked in {
        "7 is enough. Comparisons: 1. .*: 3, with": dict(methods=methods[::-1]),
        "7 is enough. Comparisons: 2. .*: 1, with": three,
        "needs --eval-every": dict(of="run", seeds=7),
        "have no value_loss": dict(metric="value_loss", seeds=7),
    }.items():
        with raises(SystemExit, match=message):
            compare.main(compare.Args(**dict(methods=methods, seeds=6) | asked), flags)
    (tmp_path / "rloo.py").write_text("# mine\n")
    with raises(SystemExit, match="rloo.py differs from its copy"):
        compare.main(args, flags)


def test_the_best_of_rates(monkeypatch, capsys):
    """Here the highest rate is best. Beside two others it is the end of a list. A rate of the list
    and one by the flag are the same run."""
    made = {}

    def read(folder):
        return dict(metrics=[{compare.TRAINING: float(made[folder][2])}])

    monkeypatch.setattr(compare, "make_runs", lambda args, runs: made.update(runs))
    monkeypatch.setattr(compare, "read_run", read)
    for rates in (["1e-4", "2e-4"], ["1e-4", "2e-4", "5e-5"]):
        args = compare.Args(("rloo.py", "my_rloo.py"), rates=rates)
        best, scores = compare.choose_rate(args, "rloo.py", ["rloo.py"])
        assert best == "2e-4"
        assert scores["1e-4"] == [1e-4] * 3
        assert ("Try further rates" in capsys.readouterr().out) == (len(rates) == 3)
    by_flag = compare.runs_of(args, ["rloo.py", "--learning-rate=1e-4"], compare.RATE_SEEDS)
    assert by_flag.keys() <= made.keys()


def test_commits(tmp_path, monkeypatch, capsys):
    """A copy of an older script is named, and so is a script that was changed in place. Without
    git, a copy is held against the script of now."""
    monkeypatch.chdir(tmp_path)
    for module in (compare, launcher):
        monkeypatch.setattr(module, "ROOT", tmp_path)

    def commit(text):
        (tmp_path / "rloo.py").write_text(text)
        for words in ("init -q", "add .", "-c user.name=a -c user.email=a commit -qm a"):
            subprocess.run(["git", *words.split()], check=True)
        return launcher.git("rev-parse", "--short", "HEAD")

    def warning(script):
        compare.warn_of_commits(script)
        return capsys.readouterr().out

    for name in ("grpo", "ppo"):
        (tmp_path / f"{name}.py").write_text(name)
    first = commit("a\nb\nc\n")
    copy = tmp_path / "mine.py"
    copy.write_text("a\nb\nmine\n")
    assert not warning("mine.py")
    commit("a\nB\nc\n")
    assert f"mine.py was made of rloo.py of commit {first}, which has changed" in warning("mine.py")
    script, commit_of_copy, file = launcher.find_original(copy, tmp_path / "original")
    assert (script, commit_of_copy, file.read_text()) == ("rloo", first, "a\nb\nc")
    assert not warning("rloo.py")
    now = tmp_path / "rloo.py"
    now.write_text("a\nB\n")
    assert "rloo.py is not as it was committed" in warning("rloo.py")
    monkeypatch.setattr(launcher, "git", lambda *_: "")
    assert launcher.find_original(copy, tmp_path) == ("rloo", None, now)


REWARD = """
import os

def score(completions, **_):
    with open("gpus", "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    if __file__.endswith("two.py"):
        raise ValueError("planted")
    return [len(text) for text in completions]
"""


@mark.slow
def test_kills_and_a_run_that_fails(world, tmp_path):
    """The program is killed. Started again, it waits for its two runs, which live on, each with one
    of two GPUs. One of them fails, so hardly one of the 18 others is started."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(REWARD)
    flags = base_flags(world, dict(eval_dataset=8, total_episodes=48))
    del flags["reward"]
    flags = command_line(with_group(MODULES["rloo"], flags))
    methods = [f"{HERE}/rloo.py --reward {name}.py:score" for name in ("one", "two")]
    words = [sys.executable, f"{HERE}/benchmark/compare.py", *methods, "--at-once", "2", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    pipes["env"] = os.environ | dict(CUDA_VISIBLE_DEVICES="4,6")
    program = subprocess.Popen(words, **pipes)
    while len(psutil.Process(program.pid).children()) < 2:
        assert program.poll() is None
        time.sleep(0.01)
    program.kill()
    ran = subprocess.run(words, **pipes)
    assert ran.returncode == 1
    assert ran.stdout.count("waiting for the run") == 2
    assert ran.stdout.count("status 1: ") == ran.stdout.count("ValueError: planted") > 0
    assert ran.stdout.endswith("a run failed. This command goes on where it stopped\n")
    assert len([*tmp_path.glob("runs/compare/*/*")]) < 5
    assert [*tmp_path.glob("runs/compare/*/1/model")]
    assert set((tmp_path / "gpus").read_text().split()) == {"4", "6"}
