"""benchmark/compare.py: what it says about scores, and how it makes runs."""

import json
import os
import subprocess
import sys
import time
from itertools import product

import compare
import numpy as np
import tyro
from conftest import HERE, MODULES, base_flags, command_line, reset_accelerate, with_group
from pytest import approx, mark, raises


def test_p_is_exact_and_corrected():
    """p is the share of all signs with a sum at least as far from 0. Holm's example has three
    values."""
    differences = np.array([0.3, -0.1, 0.2, 0.2, 0.5, -0.1, 0.1])
    sums = np.abs([np.dot(signs, differences) for signs in product((-1, 1), repeat=7)])
    expected = np.mean(sums >= differences.sum() - 1e-9)
    assert 0.01 < expected < 0.2
    assert compare.sign_flips(differences) == approx(expected)
    assert compare.holm([0.03, 0.01, 0.04, 0.5]) == approx([0.09, 0.04, 0.09, 0.5])


@mark.parametrize("seeds", (6, 10))
def test_a_visible_difference_is_seen_in_four_of_five_cases(seeds):
    samples = np.random.default_rng(1).normal(size=(1000, seeds))
    p = compare.sign_flips(samples + compare.visible(seeds, 0.05))
    assert np.mean(p < 0.05) == approx(0.8, abs=0.05)


def test_verdicts():
    """Three standard deviations are always seen. Two comparisons take seven seeds."""
    first, noise = np.random.default_rng(0).normal(size=(2, 10))
    second = first + noise / 4
    for shift, verdict in ((1, "better"), (-1, "worse"), (0, "no difference is seen; one of ")):
        [entry] = compare.judge([first, second + shift])
        assert entry["verdict"].startswith(verdict)
    expected = 10 * (first.var() + second.var()) / (noise / 4).var()
    assert entry["worth"] == approx(expected)
    assert compare.judge([first, first])[0]["verdict"].startswith("equal in all seeds")
    almost = [1] * 6 + [-0.1]  # p is 4 / 128
    for others, verdict in (([almost], "better"), ([almost] * 2, "no difference")):
        assert compare.judge([[0] * 7, *others])[0]["verdict"].startswith(verdict)
    for seeds, verdict in ((6, "no verdict, which takes 7 seeds"), (7, "better")):
        table = [first[:seeds], *[second[:seeds] + 1] * 2]
        assert compare.judge(table)[1]["verdict"].startswith(verdict)


def test_a_comparison_of_finished_runs(world, tmp_path, monkeypatch, capsys):
    """Its table has the scores of the runs. A second number of seeds is a second look. What has no
    such metric is named, and so is a script that was edited."""
    monkeypatch.chdir(tmp_path)
    script = MODULES["rloo"]
    (tmp_path / "rloo.py").write_bytes(script.SCRIPT)
    flags = command_line(with_group(script, base_flags(world, dict(eval_dataset=8))))
    args = compare.Args(("rloo.py", "rloo.py --learning-rate 0.3"), seeds=7)
    for own in ([], ["--learning-rate", "0.3"]):
        runs = compare.runs_of(args, ["rloo.py", *flags, *own], range(1, 8))
        for folder, words in runs.items():
            reset_accelerate()
            script.main(tyro.cli(script.Args, args=[*words[1:], "--output-dir", str(folder)]))
    for seeds in (6, 7, 7):
        compare.main(compare.Args(args.methods, seeds), flags)
    said = capsys.readouterr().out
    assert said.count("There are 2 verdicts") == 2
    result = json.loads((args.folder / "compare.json").read_text())
    last = compare.read_run(folder)["metrics"][-1]
    assert result["scores"][1][6] == last["eval/scores"]
    assert (args.folder / "compare.png").stat().st_size > 10_000
    with raises(SystemExit, match="rloo.py, seed 1: its metrics have no value_loss"):
        compare.main(compare.Args(args.methods, metric="value_loss", seeds=6), flags)
    (tmp_path / "rloo.py").write_text("# mine\n")
    with raises(SystemExit, match="rloo.py differs from its copy"):
        compare.main(args, flags)


REWARD = """
import os

def score(completions, **_):
    with open("gpus", "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    if os.path.exists(__file__.replace(".py", "_fails")):
        raise ValueError("planted")
    return [len(text) for text in completions]
"""


@mark.slow
def test_kills_and_a_run_that_fails(world, tmp_path):
    """The program is killed. Started again, it names the runs that fail, and makes the others. When
    the fault is gone, it makes only those. Both methods are the same, so scores must be equal. Each
    of two runs side by side has one of two GPUs."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(REWARD)
    (tmp_path / "two_fails").touch()
    flags = base_flags(world, dict(eval_dataset=8, total_episodes=48, save_every=1))
    del flags["reward"]
    flags = command_line(with_group(MODULES["rloo"], flags))
    methods = [f"{HERE}/rloo.py --reward {name}.py:score" for name in ("one", "two")]
    words = [sys.executable, f"{HERE}/benchmark/compare.py", *methods, "--seeds", "2"]
    words += ["--at-once", "2", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    pipes["env"] = os.environ | dict(CUDA_VISIBLE_DEVICES="4,6")
    program = subprocess.Popen(words, **pipes)
    while not [*tmp_path.glob("runs/compare/*/1/checkpoints/iteration*")]:
        assert program.poll() is None
        time.sleep(0.1)
    program.kill()
    ran = subprocess.run(words, **pipes)
    assert ran.returncode == 1
    assert ran.stdout.count("ValueError: planted") == ran.stdout.count("status 1: ") == 2
    assert ran.stdout.endswith("2 of 4 runs failed; this command tries them again\n")
    assert len([*tmp_path.glob("runs/compare/*/*/model")]) == 2
    (tmp_path / "two_fails").unlink()
    ran = subprocess.run(words, **pipes)
    assert ran.returncode == 0, ran.stdout
    assert "equal in all seeds; did the other lines run?" in ran.stdout
    assert set((tmp_path / "gpus").read_text().split()) == {"4", "6"}
