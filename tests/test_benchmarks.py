"""The programs of benchmark/: their command lines, their jobs, their smoke runs, and what they
compute."""

import importlib
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ladder
import mbpp
import numpy as np
import plot
import run as launcher
import tasks
import throughput
import tyro
import win_rate
from conftest import (
    HERE,
    MODULES,
    base_flags,
    changed,
    column,
    command_line,
    fresh_imports,
    make_prompts,
    make_rows,
    one_text,
    read_jsonl,
    save_classifier,
    save_model,
    with_group,
    write_jsonl,
)
from pytest import approx, mark, raises
from test_pages import first_command

of_each_program = mark.parametrize("program", launcher.PROGRAMS, ids=str)
WITH_MAIN = [
    path
    for path in sorted(HERE.glob("benchmark/**/*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]


# those that README lists: some programs need one of them
MORE_PACKAGES = first_command(HERE / "README.md", "pip install peft").split()[2:]


@mark.parametrize("path", WITH_MAIN, ids=lambda path: f"{path.parent.name}/{path.stem}")
@mark.parametrize("missing", [[], MORE_PACKAGES], ids=["all packages", "few"])
def test_help_helps(path, missing, monkeypatch, capsys, tmp_path):
    """Every program prints its help, and does nothing else. One that lacks a package says in one
    line which."""
    for name in [*missing, "draw"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "draw")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with fresh_imports(), raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    lacks = str(ended.value).startswith("this program needs ")
    assert ("usage" in capsys.readouterr().out) != (missing and lacks)
    assert not list(tmp_path.iterdir())


@of_each_program
def test_every_job_parses(program, tmp_path, monkeypatch):
    """Every run that a program would start has flags that its script knows. Each result belongs to
    a part, or its stamp says that the part is gone."""
    path = HERE / "benchmark" / program
    monkeypatch.setattr(sys, "path", [*sys.path])
    parts = launcher.import_script(path).PARTS
    scripts = {}
    for part in parts.values():
        for script, flags, *_ in replace(part, seeds=[1]).jobs():
            if script not in scripts:
                name, *patch = script.split()
                scripts[script] = changed(name, tmp_path / script, *patch)
            for more in ("", part.short):
                words = f"{flags} {more} --output-dir {tmp_path}/run".split()
                tyro.cli(scripts[script].Args, args=words)
    stamps = launcher.read_result(path.with_suffix(".json"))["parts"]
    assert {name for name in stamps if "gone" not in stamps[name]} <= parts.keys()


@mark.slow
@of_each_program
def test_a_smoke_run(program, monkeypatch):
    """A short version of each part runs to its end, and the figures are drawn. Its runs are forks
    of the process that other tests have started."""
    monkeypatch.setattr(sys, "argv", [program.name, "--smoke"])
    monkeypatch.setattr(launcher, "SEEN", set())
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(HERE)
    with fresh_imports():
        module = launcher.import_script(HERE / "benchmark" / program)
        if module.main is launcher.main:
            module.main("", module.RESULT, module.PARTS, getattr(module, "plot", None))
        else:
            tyro.cli(module.main)


def test_a_part_is_measured_alone(tmp_path, monkeypatch):
    """Its rows and its stamp are new. Those of the others stay."""
    monkeypatch.chdir(HERE)
    path = tmp_path / "result.json"
    parts = {name: launcher.Part([], measure=lambda *_: [dict(x=2)]) for name in ("one", "two")}
    launcher.write_result(path, dict.fromkeys(parts, "old"), [dict(part="one", x=1)])
    launcher.measure_part(path, "two", parts)
    found = launcher.read_result(path)
    assert found["rows"] == [dict(part="one", x=1), dict(part="two", x=2)]
    assert found["parts"].pop("two")["machine"]
    assert found["parts"] == dict(one="old")


def test_speed(monkeypatch):
    """The first two iterations do not count. What fails is in the row, and so is other work. If the
    time on a GPU is over, the program stops, and writes nothing."""

    def runs(*seconds, tokens=8):
        counted = dict(tokens=[tokens] * 4, scores=[0.0] * 4)
        return [counted | dict(seconds=[9, 9, n, n], peak_gib=n) for n in seconds]

    found = throughput.summary(runs(2, 3), runs(1, 2))
    assert [found[name] for name in ("ratio", "lowest", "highest")] == [1.75, 1.5, 2]
    assert found["peak_gib"] == 3
    for run in runs(1, tokens=6) + [dict(failed="tokens of a completion")]:
        assert "tokens of a completion" in throughput.summary([run], runs(1))["failed"]
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setitem(sys.modules, "throughput", throughput)  # Another test may import it anew.
    monkeypatch.setattr(throughput, "START", -throughput.GPU_LIMIT)
    part = throughput.part_of(replace(throughput.CASES["a"], on_gpu=True))
    with raises(SystemExit, match="the time is over"):
        part.rows()


def test_curves():
    """A metric of training is the mean since the evaluation before, and at first that of iteration
    1. It may be absent from some rows, and from all."""
    metrics = [dict(iteration=0, episode=0, seconds=0.0)]
    for iteration in range(1, 5):
        metrics.append(dict(iteration=iteration, episode=8 * iteration, seconds=float(iteration)))
        metrics[-1] |= {"x": iteration} if iteration != 3 else {}
    evaluations = [metrics[i] | {"eval/y": i / 8} for i in (0, 2, 4)]
    found = launcher.curves(dict(metrics=metrics, evaluations=evaluations), "x eval/y seconds z")
    expected = dict(episode=[0, 16, 32], x=[1, 1.5, 4], seconds=[0, 2, 4])
    assert found == expected | {"eval/y": [0, 0.25, 0.5]}


READERS = r"""
import locale, pathlib, look, run, tables
assert locale.getencoding() not in ("utf-8", "UTF-8")
nano = {}
for program in pathlib.Path("nano").iterdir():
    exec(program.read_text("utf-8").partition("stream = ")[0], nano)  # the part that reads
    assert nano["train_rows"] == nano["held_out"] == [dict(prompt="\u00e9")], program
    del nano["train_rows"], nano["held_out"]
folder = pathlib.Path("run")
assert look.load_run(folder)[0]["reward"] == "\u00e9" == run.read_run(folder)["args"]["reward"]
result = pathlib.Path("result.json").absolute()
assert [*tables.rows_of(f"{result}: {{name}}")] == [[run.read_result(result)["rows"][0]["name"]]]
assert nano
"""


@mark.slow
def test_files_are_utf8_on_every_machine(tmp_path):
    """Also where the machine's own encoding is ASCII. What reads data does so as the scripts do."""
    shutil.copytree(HERE / "docs/nano", tmp_path / "nano", ignore=shutil.ignore_patterns("*.md"))
    files = {
        "benchmark/default/train.jsonl": '{"prompt": "\u00e9"}\n',
        "benchmark/default/eval.jsonl": '{"prompt": "\u00e9"}\n',
        "run/args.yaml": f"{{reward: \u00e9, model_path: {launcher.POLICY}}}",
        "run/metrics.jsonl": "",
        "result.json": '{"rows": [{"name": "\u00e9"}]}',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    ascii_machine = dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONPATH=str(HERE / "benchmark"))
    words = [sys.executable, "-X", "utf8=0", "-c", READERS]
    environment = os.environ | ascii_machine
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


ONE_DIES = (
    "import os, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(60)"
)


@mark.slow
def test_a_process_that_fails_dies_or_hangs_says_so():
    """Also if another one waits for it."""
    assert "SystemExit: no" in launcher.apart(sys.exit, "no")["failed"]
    assert "no result in 1 s" in launcher.apart(time.sleep, 60, seconds=1)["failed"]
    found = launcher.apart(exec, ONE_DIES, {}, processes=2, seconds=30)["failed"]
    assert "exit code -9" in found
    assert "no result" not in found


def test_a_judge_that_likes_a_position_gives_one_half(run, tmp_path, capsys):
    """Exactly half of the pairs are swapped. The win rate of each place shows the bias. The last
    evaluation of a run counts. A column may be a side. The interval is Wilson's."""
    (tmp_path / "judge.py").write_text("def first_shown(prompts, **_): return [0] * len(prompts)")
    model, other, short = (
        run(MODULES["rloo"], eval_dataset=count, eval_temperature=1.0, seed=seed)
        for count, seed in ((12, 1), (12, 2), (11, 1))
    )
    output = tmp_path / "deep" / "pairs.jsonl"

    def compared_with(baseline):
        judge = f"{tmp_path}/judge.py:first_shown"
        with fresh_imports():
            found = win_rate.main(win_rate.Args(model.folder, baseline, judge, output=output))
        assert found == approx((0.5, 0.2538, 0.7462), abs=1e-4)
        return column(read_jsonl(output), "baseline")

    assert compared_with("column:number") == list(range(12))
    assert compared_with(str(other.folder)) == column(other.eval_rollouts[-12:], "completion")
    assert "shown first: 100.0 % of 6\nshown second: 0.0 % of 6" in capsys.readouterr().out
    assert win_rate.interval(0, 10) == approx((0, 0.2775), abs=1e-4)
    with raises(SystemExit, match="on other rows"):
        compared_with(str(short.folder))


def test_every_verdict_is_counted_for_the_right_side():
    """Verdicts are 0, 1, 0.5 or None, and numbers of Python or of numpy. Another verdict is
    refused, and so is another number of them."""

    def judge(verdicts):
        rows = [dict(prompt="1+1=", completion="m", columns={})] * 21
        return column(win_rate.judge_pairs(verdicts, rows, ["b"] * 21, 1), "win")

    kinds = [int, bool, np.float32] * 7
    assert judge(lambda first, **_: [k(text == "b") for k, text in zip(kinds, first)]) == [1] * 21
    assert judge(lambda **_: [0.5, None, np.float64(0.5)] * 7) == [0.5] * 21
    with raises(ValueError, match="^pair 3, .*the judge said -1"):
        judge(lambda **_: [1, 1, 1, -1] + [1] * 17)
    with raises(ValueError, match="20 verdicts for 21"):
        judge(lambda **_: [1] * 20)


@one_text
def test_plot_draws_seeds_as_one_curve(script, run):
    """Runs that differ only in the seed are one curve, their mean. The labels of other runs show
    their flags, and how many lines of their scripts differ."""
    runs = [run(script), run(script, seed=2), run(script, kl_coef=0.3)]
    groups = plot.group_runs([ran.folder for ran in runs])
    assert list(map(len, groups.values())) == [2, 1]
    first, second = groups
    assert (first, second) == ("run0, kl_coef 0.05", "run2, kl_coef 0.3")
    with open(runs[1].folder / f"{script.__name__}.py", "a") as file:
        file.write("# mine\n")
    labels = list(plot.group_runs([ran.folder for ran in runs]))
    assert labels == [first, "run1, kl_coef 0.05, 1 lines differ", second]
    _, values = plot.points(groups[first], "objective/scores", "episode")
    assert values.tolist() == [column(ran.metrics, "objective/scores") for ran in runs[:2]]


@mark.slow
@one_text
def test_the_recipe_of_tldr_runs(script, run, tmp_path, monkeypatch):
    """The command runs for one iteration on tiny models of the same architecture, which lie where
    the Hub has them."""
    command = first_command(HERE / "benchmark/tldr/README.md", "accelerate launch")
    words = shlex.split(command.partition("rloo.py")[2])
    flags = vars(tyro.cli(script.Args, args=words))
    monkeypatch.chdir(tmp_path)
    model = dict(max_position_embeddings=128, initializer_range=0.3)
    save_model(tmp_path / flags["model_path"], "neox", **model)
    save_classifier(tmp_path / flags["reward_model_path"], architecture="neox", **model)
    datasets = tmp_path / "trl-lib" / "tldr"
    datasets.mkdir(parents=True)
    for split in ("train", "validation"):
        write_jsonl(datasets / f"{split}.jsonl", make_rows(make_prompts(40)))
    flags |= dict(k=4, total_episodes=64, batch_size=64)
    before, after = run(script, **flags).metrics
    assert (after["episode"], after["step"]) == (64, 1)
    assert "eval/scores" in before


TASKS = """
tasks | 3 + 4 = 7. | 7 | 1
tasks | 5-9 | 9 | 1
tasks | 1, or \u22121,000 | -1000 | 1
tasks | 7 or 8 | 7 | 0
tasks | none | 0 | 0
gsm8k | 7 or 42.0. | 42 | 1
gsm8k | $1,000 | 1000 | 1
gsm8k | 10% of 77-70% | 70 | 1
gsm8k | 3 - 5 = \u2212$2.50 | -2.5 | 1
gsm8k | \\boxed{1{,}000\\text{ km}^2} in 3 days | 1000 | 1
gsm8k | 7 or 8 | 7 | 0
gsm8k | none | 0 | 0
"""


def test_tasks(tmp_path, monkeypatch):
    """One answer of a completion counts, in gsm8k.py, too. The program writes the committed
    questions, mirrored ones on one side, if it draws them in another order and twice."""
    for line in TASKS.strip().split("\n"):
        name, text, answer, expected = line.split(" | ")
        program = importlib.import_module(name)
        two = [text, [dict(content=text)]]
        assert program.score(two, [answer] * 2) == [float(expected)] * 2
    paths = HERE.glob("benchmark/smollm2/*.jsonl")
    files = {path.name: read_jsonl(path) for path in paths}
    entries = []
    for row in sum(files.values(), []):
        question = row["prompt"][1]["content"]
        entries += [dict(question=question, answer=row["answer"])] * 2
    factory = SimpleNamespace(DATASETS=dict(chain_sum=(lambda settings: entries[::-1], dict)))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    monkeypatch.setattr(sys, "argv", ["", "chain_sum", f"--folder={tmp_path}"])
    tasks.main()
    for name, rows in files.items():
        assert rows == read_jsonl(tmp_path / name)
    entries.append(dict(question="Who?", answer="Ann"))
    with raises(SystemExit, match="the answers of chain_sum are not all numbers"):
        tasks.main()


# The score of a program, and the program. Each ¦ is a new line.
PROGRAMS = """
1 | def f(x): return x + 1
1 | Or:¦```¦def f(x): return 0¦```¦Better:¦  ```python¦def f(x): return x + 1¦  ```¦Good.
1 | ```py¦def f(x): return x + 1
0 | def f(x): return x
0 | def f(x
0 | def f(x): exit()
0 | import os; os._exit(0)
0 | import atexit; atexit.register(print)
0 | def exit(): pass¦def f(x): return x¦exit()
1 | def exit(): pass¦def f(x): return x + 1¦exit()
0 | import builtins; builtins.exec = print; builtins.AssertionError = KeyError; f = abs
0 | import os, sys; sys.modules["os"] = os._exit = print; f = abs
1 | import os, sys; sys.modules["os"] = os._exit = os.write = print; f = lambda x: x + 1
1 | import pickle¦class A: x = 2¦def f(x): return pickle.loads(pickle.dumps(A())).x
0 | import sys; print(sys.stdin.read(), sys.argv, open("/proc/self/cmdline").read())
0 | input(); f = lambda x: x + 1
1 | import sys; f = lambda x: x + 1 + len(sys.stdin.read())
1 | import os; f = lambda x: 2 if os.environ.keys() <= {"PYTHONHASHSEED", "LC_CTYPE"} else 0
1 | import os; f = lambda x: 2 + len(os.listdir())
1 | import os; f = lambda x: 1 + len(os.sched_getaffinity(0))
0 | while True: pass
0 | import time; time.sleep(1e6)
0 | import os; os.dup2(1, 2)¦while True: os.write(2, b"1" * 10**6)
0 | open("x", "w").write("1" * 10**7); f = lambda x: x + 1
0 | x = bytearray(3 * 10**9); f = lambda x: x + 1
0 | import ctypes; ctypes.string_at(0)
0 | import os, time¦while True: os.fork(); time.sleep(0.02)
0 | import os, time; os.kill(os.getppid(), 9); time.sleep(1e6)
0 | import os, time; os.kill(os.getppid(), 19); time.sleep(1e6)
0 | import os; os.killpg(0, 9)
1 | f = lambda x: x + 1; import os; os.fork() or os.setsid() or os.execvp("sleep", ["sleep", "1e6"])
1 | f = lambda x: x + 1; import os¦for _ in range(1100): os.mkdir("x"); os.chdir("x")
"""


def left_behind():
    """The command lines of processes that came out of the sandbox."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # It has just ended.
            commands.append(path.read_bytes())
    return [command for command in commands if b"sandbox.py" in command or b"1e6" in command]


@mark.slow
def test_programs_that_a_policy_writes(monkeypatch):
    """Each has its score, in order, and leaves no process. Nor does a run that is killed. None is a
    fault of the sandbox."""
    monkeypatch.setattr(mbpp, "LIMITS", mbpp.LIMITS | {"RLIMIT_CPU": 1})
    monkeypatch.setattr(mbpp, "SECONDS", 3)
    lines = [line.replace("¦", "\n").split(" | ", 1) for line in PROGRAMS.strip().split("\n")]
    scores, programs = zip(*lines)
    tests = [["", "assert f(1) == 2"]] * len(lines)
    assert mbpp.score(programs, tests) == [*map(float, scores)]
    assert not left_behind()
    killed = "import mbpp; mbpp.score(['import time; time.sleep(1e6)'], [[]])"
    with raises(subprocess.TimeoutExpired):
        folder = HERE / "benchmark/code"
        subprocess.run([sys.executable, "-c", killed], cwd=folder, timeout=2)
    time.sleep(1)
    assert not left_behind()
    monkeypatch.setattr(mbpp, "LIMITS", {"RLIMIT_UNKNOWN": 1})
    assert mbpp.score(programs[:1], tests[:1]) == [None]


def test_the_measured_gradients_of_the_ladder(world, tmp_path):
    """One of each update. metrics.jsonl has their lengths."""
    words = " ".join(command_line(with_group(MODULES["rloo"], base_flags(world))))
    keep = partial(ladder.keep_gradients, str(tmp_path / "gradients"))
    metrics = launcher.run("rloo", words, keep)["metrics"]
    gradients = np.fromfile(tmp_path / "gradients", np.float32).reshape(len(metrics), -1)
    assert np.linalg.norm(gradients, axis=1) == approx(column(metrics, "grad_norm"), rel=1e-4)


def test_moments_are_unbiased():
    """Over many tries, the means of both estimates are the true squared length, 0.3, and the
    true variance, 6.25."""
    noise = np.random.default_rng(0).normal(size=(4000, 8, 4)) * [1, 2, 0.5, 1]
    found = []
    for gradients in noise + [0.3, -0.2, 0.1, 0.4]:
        found.append(ladder.moments(gradients @ gradients.T))
    assert np.mean(found, 0) == approx([0.3, 6.25], abs=0.05)
