"""The programs of benchmark/: their command lines, their jobs, their smoke runs, and what they
compute."""

import math
import os
import re
import runpy
import shlex
import sys
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import run as launcher
import tables
import tyro
from conftest import (
    HERE,
    MODULES,
    SCRIPTS,
    fresh_imports,
    import_file,
    make_prompts,
    make_rows,
    one_text,
    read_jsonl,
    save_classifier,
    save_model,
    write_jsonl,
)

plot = import_file(HERE / "benchmark" / "plot.py")
win_rate = import_file(HERE / "benchmark" / "win_rate.py")
gsm8k = import_file(HERE / "benchmark" / "gsm8k" / "gsm8k.py")


everything = import_file(HERE / "benchmark" / "all.py")
WITH_MAIN = [
    path
    for path in sorted(HERE.glob("benchmark/**/*.py"))
    if '"__main__"' in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", WITH_MAIN, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_help_helps(path, monkeypatch, capsys, tmp_path):
    """Every program prints its help, and does nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with fresh_imports(), pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(path), run_name="__main__")
    assert stopped.value.code == 0
    assert "usage" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", everything.PROGRAMS)
def test_every_job_parses(program, tmp_path, monkeypatch):
    """Every run that a program would start has flags that its script knows. Each result belongs to
    a part."""
    path = HERE / "benchmark" / f"{program}.py"
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.syspath_prepend(HERE / "tests/stand_in_engine")
    for name in (*SCRIPTS, path.stem, "vllm"):  # Afterwards each name is its module again.
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    del sys.modules["vllm"]
    parts = import_file(path).PARTS
    scripts = {}
    for part in parts.values():
        for script, flags in {
            (job[0], re.sub(r"--seed \d+", "", f"{job[1]} {part.short}")) for job in part.jobs
        }:
            if script not in scripts:
                name, *patch = script.split()
                folder = tmp_path / str(len(scripts))
                scripts[script] = import_file(launcher.copy_script(folder, name, *patch))
            tyro.cli(
                scripts[script].Args, args=[*flags.split(), "--output-dir", str(tmp_path / "run")]
            )
    assert launcher.read_result(path.with_suffix(".json"))["parts"].keys() <= parts.keys()


@pytest.mark.slow
@pytest.mark.parametrize("program", everything.PROGRAMS)
def test_a_smoke_run(program):
    """A short version of each part runs to its end, and its fingerprint has numbers."""
    found = everything.smoke(program)
    kept = launcher.read_result(HERE / "benchmark" / f"{program}.json")["parts"]
    assert kept.keys() <= found.keys()
    assert all(found.values())
    for part, stamp in kept.items():
        if "fingerprint" in stamp:  # A metric that is missing now had another name.
            assert stamp["fingerprint"].keys() == found[part].keys()


STAMP = dict(commit="c", date="d", minutes=2.0, machine=launcher.machine(), fingerprint={"x": 1.0})


def test_all_measures_again_what_is_stale(monkeypatch, capsys):
    """Cheapest first. On another processor, and without a fingerprint, nothing is known."""
    parts = {
        "slow": STAMP,
        "quick": STAMP | dict(minutes=1.0),
        "same": STAMP | dict(fingerprint={"x": 1.5}),
        "elsewhere": STAMP | dict(machine="another processor, threads 1"),
        "old": {name: STAMP[name] for name in ("commit", "date", "minutes", "machine")},
    }
    today = {part: {"x": 1.5} for part in parts}
    started = []
    monkeypatch.setattr(everything, "PROGRAMS", ["a/b"])
    monkeypatch.setattr(everything, "smoke", lambda program: today)
    monkeypatch.setattr(everything, "read_result", lambda path: dict(parts=parts))

    def start(command, **_):
        started.append(command[-1])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(everything.subprocess, "run", start)
    everything.main(everything.Options(stale=True))
    printed = capsys.readouterr().out
    assert started == ["quick", "slow"]
    assert "a/b same: as today; c, d, 2.0 min" in printed
    assert "a/b elsewhere: unknown: another processor" in printed
    assert "a/b old: unknown: no fingerprint" in printed


def test_a_part_is_measured_alone(tmp_path):
    """Its rows and its stamp are new. Those of the other parts stay."""
    path = tmp_path / "result.json"
    old = [dict(part="first", x=1), dict(part="second", x=2)]
    launcher.write_result(path, {"first": STAMP, "second": STAMP}, old)
    part = launcher.Part({}, measure=lambda jobs, smoke: [dict(x=3 + smoke, seconds=5.0)])
    launcher.measure_part(path, "first", {"first": part, "second": part})
    found = launcher.read_result(path)
    assert found["rows"] == [dict(part="first", x=3, seconds=5.0), old[1]]
    assert found["parts"]["second"] == STAMP
    stamp = found["parts"]["first"]
    assert stamp["fingerprint"] == {"x": 4.0}  # of the smoke run, without times
    assert stamp["machine"] == STAMP["machine"] and re.match("[0-9a-f]{7}", stamp["commit"])


JUDGES = """
def first_shown(prompts, first, second, answer, **_):
    return [0] * len(prompts)

def failed(prompts, **_):
    return [0, 1, 0.5, -1] + [0] * (len(prompts) - 4)

def short(prompts, **_):
    return [0] * (len(prompts) - 1)
"""


@pytest.fixture
def compare(world, tmp_path):
    """compare(judge, **flags) returns the win rate, and the pairs that were written."""
    (tmp_path / "judges.py").write_text(JUDGES)
    rows = [row | {"reference": str(row["number"])} for row in make_rows(make_prompts(12, seed=5))]
    dataset = write_jsonl(tmp_path / "held_out.jsonl", rows)

    def compare(judge, **flags):
        judge = judge if judge == "exact_match" else f"{tmp_path / 'judges.py'}:{judge}"
        flags = (
            dict(model=world.llama, baseline=world.reference, dataset=dataset, temperature=1.0)
            | flags
        )
        args = win_rate.Args(judge=judge, output=tmp_path / "deep" / "pairs.jsonl", **flags)
        with fresh_imports():
            rate = win_rate.main(args)[0]
        return rate, read_jsonl(args.output)

    return compare


def test_a_judge_that_likes_a_position_gives_one_half(compare, capsys):
    """Exactly half of the pairs are swapped. The win rate of each place shows the bias. A column
    may be a side."""
    rate, pairs = compare("first_shown")
    assert rate == 0.5 and [row["model_shown"] for row in pairs].count("first") == 6
    assert [row["win"] for row in pairs] == [float(row["model_shown"] == "first") for row in pairs]
    assert "shown first: 100.0 % of 6; shown second: 0.0 % of 6" in capsys.readouterr().out
    of_column = compare("first_shown", baseline="column:reference", batch_size=5)[1]
    assert [row["model"] for row in of_column] == [row["model"] for row in pairs]
    assert [row["baseline"] for row in of_column] == [str(i) for i in range(12)]


def test_every_verdict_is_counted_for_the_right_side():
    """Verdicts are 0, 1, 0.5 or None, and numbers of Python or of numpy."""
    said, shown = [0, 1, 0.5, None, np.int64(1), np.float32(0), True] * 3, []
    rows = [{"prompt": str(i)} for i in range(len(said))]
    models, baselines = [f"m{i}" for i in range(len(said))], [f"b{i}" for i in range(len(said))]
    pairs = win_rate.judge_pairs(
        lambda **columns: shown.append(columns) or said, rows, models, baselines, 1
    )
    for row, first, verdict in zip(pairs, shown[0]["first"], said, strict=True):
        model_is = 1 if first[0] == "b" else 0
        assert row["win"] == (0.5 if verdict in (0.5, None) else float(verdict == model_is))


@pytest.mark.parametrize(
    "judge, message", [("failed", "^pair 3, .*the judge said -1"), ("short", "11 verdicts for 12")]
)
def test_a_verdict_that_is_none_is_refused(compare, judge, message):
    with pytest.raises(ValueError, match=message):
        compare(judge)


def test_the_interval_is_wilsons():
    """The observed rate is z standard errors away from each end, with the standard error at that
    end."""
    for wins, count in ((0, 10), (10, 10), (1, 1), (7, 20), (512, 1000)):
        rate = wins / count
        low, high = win_rate.interval(rate, count)
        assert 0 <= low <= rate <= high <= 1
        for p in {low, high} - {rate}:
            assert abs(rate - p) == pytest.approx(
                1.959964 * math.sqrt(p * (1 - p) / count), rel=1e-6
            )


@one_text
def test_plot_draws_seeds_as_one_curve(script, run, tmp_path):
    """Runs that differ only in the seed are one curve, their mean. The labels of other runs show
    their flags."""
    (_, first, a), (_, second, b), (_, _, c) = (
        run(script, **flags) for flags in ({}, dict(seed=2), dict(kl_coef=0.3))
    )
    groups = plot.group_runs([a, b, c])
    assert {label: len(group) for label, group in groups.items()} == {
        "run0, kl_coef 0.05": 2,
        "run2, kl_coef 0.3": 1,
    }
    _, values = plot.points(groups["run0, kl_coef 0.05"], "objective/scores", "episode")
    assert values.tolist() == [
        [row["objective/scores"] for row in rows] for rows in (first, second)
    ]
    plot.main(plot.Args(folders=(a, b, c), output=tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_pass_at_m_is_the_mean_over_all_choices():
    """Of m samples, over all choices of them: the share in which at least one is right."""
    for right, samples in ((0, 4), (1, 6), (3, 6), (6, 6)):
        scores = [1] * right + [0] * (samples - right)
        for m in range(1, samples + 1):
            choices = [max(chosen) for chosen in combinations(scores, m)]
            assert tables.pass_at(m, right, samples) == pytest.approx(np.mean(choices))


def test_mirrored_questions_are_one_cluster():
    """A second copy of each question, mirrored, tells nothing new: the interval stays as wide."""
    prompts, values = ["12+34=", "56+78=", "90+11="], [0.0, 1.0, 0.25]
    mirrored = ["34+12=", "78+56=", "11+90="]
    expected = np.mean(values), 1.96 * np.std(values, ddof=1) / 3**0.5
    assert tables.over_questions(values, prompts) == pytest.approx(expected)
    assert tables.over_questions(values * 2, prompts + mirrored) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_recipe_of_tldr_runs(name, run, tmp_path, monkeypatch):
    """Each command runs for one iteration on tiny models of the same architecture, which lie where
    the Hub has them."""
    text = (HERE / "benchmark" / "tldr" / "README.md").read_text().replace("\\\n", " ")
    shown = "rloo" if name == "grpo" else name  # The page has one command for both.
    words = shlex.split(re.search(rf" {shown}\.py (.*)", text)[1])
    flags = vars(tyro.cli(MODULES[name].Args, args=words))
    monkeypatch.chdir(tmp_path)
    model = dict(max_position_embeddings=128, initializer_range=0.3)
    save_model(tmp_path / flags["model_path"], "neox", **model)
    save_classifier(tmp_path / flags["reward_model_path"], architecture="neox", **model)
    for split in ("train", "validation"):
        (tmp_path / "trl-lib" / "tldr").mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / "trl-lib" / "tldr" / f"{split}.jsonl", make_rows(make_prompts(40)))
    few = dict(k=4, total_episodes=64, batch_size=64, eval_dataset="trl-lib/tldr:validation[:8]")
    _, (before, after), output_dir = run(MODULES[name], **flags | few | dict(plan=None))
    assert after["episode"] == 64 and after["step"] == (4 if name == "ppo" else 1)
    assert "eval/scores" in before and 0 < after["val/num_eos_tokens"] <= 64
    assert (output_dir / "model").exists()


# Three columns of ten rows: `question`, the working and the last line of `answer`, as the Hub has
# them.
GSM8K = [
    ("Ana has 3 pens and buys 4. How many has she?", "3 + 4 = <<3+4=7>>7 pens.", "7"),
    ("Of 12 eggs 5 break. How many are whole?", "12 - 5 = <<12-5=7>>7 eggs.", "7"),
    (
        "A hall has 40 rows of 30 seats. How many seats?",
        "40 * 30 = <<40*30=1200>>1,200 seats.",
        "1,200",
    ),
    ("Ben has $2 and owes $7. What is left?", "2 - 7 = <<2-7=-5>>-5 dollars.", "-5"),
    (
        "A farm sells 50% of 90 sheep. How many stay?",
        "90 * .5 = <<90*.5=45>>45 go.\n90 - 45 = <<90-45=45>>45.",
        "45",
    ),
    ("Six cups cost $2.50 each. What is paid?", "6 * 2.5 = $<<6*2.5=15.00>>15.00.", "15"),
    (
        "A city of 1,000,000 grows by 234,567.",
        "That is <<1000000+234567=1234567>>1,234,567.",
        "1,234,567",
    ),
    ("Two cats have 9 kittens each. How many?", "2 * 9 = <<2*9=18>>18 kittens.", "18"),
    ("How many hours has a week?", "7 * 24 = <<7*24=168>>168 hours.", "168"),
    ("Nobody came. How many came?", "Nobody is <<0=0>>0.", "0"),
]
READ = {
    "-5": ["it is -5.", "= \u22125", "-$5.00"],
    "5": ["10-5", "$10 - $5", "5.0%"],
    "0.5": ["$.50"],
    "42": [
        "#### 42\nin 3 days",
        r"$\boxed{42}$ in 3 days",
        r"\boxed{7}, no: \boxed{6 * 7 = 42}",
        "**42**",
        "#### $42",
    ],
    "1000.5": ["1,000.5", r"\boxed{1{,}000.50}", r"\(\$1\,000.5\)", "#### 1,000.5."],
}


def test_gsm8k_reads_answers_as_published_evaluations_do(tmp_path, monkeypatch):
    """The Hub's rows become prompts. Their own answers are right, also by the patterns of lm-eval
    and of verl."""
    rows = [
        {"question": question, "answer": f"{working}\n#### {end}"}
        for question, working, end in GSM8K
    ]
    hub = {"train": rows[:8], "test": rows[8:]}
    monkeypatch.setitem(
        sys.modules,
        "datasets",
        SimpleNamespace(load_dataset=lambda name, config, split: hub[split]),
    )
    gsm8k.main(tmp_path)
    written = [row for split in hub for row in read_jsonl(tmp_path / f"gsm8k_{split}.jsonl")]
    assert [row["prompt"][0]["content"].split("\n")[0] for row in written] == [
        row["question"] for row in rows
    ]
    texts, answers = [row["answer"] for row in rows], [row["answer"] for row in written]
    for pattern in (
        r"#### (\-?[0-9\.\,]+)",
        r"(-?[$0-9.,]{2,}|-?[0-9]+)",
    ):  # of both; lm-eval's flexible one
        assert [re.findall(pattern, text)[-1].replace(",", "") for text in texts] == answers
    completions = [[{"content": text}] for text in texts] + [working for _, working, _ in GSM8K]
    assert gsm8k.score(completions, answers * 2) == [1.0] * 20
    assert gsm8k.score(texts, answers[1:] + ["1"]) == [1.0] + [0.0] * 9
    assert all(
        set(gsm8k.score(texts, [number] * len(texts))) == {1.0} for number, texts in READ.items()
    )
    assert gsm8k.last_number("####, or none.") is None
