"""benchmark/gpu/measure.py: its figures for a tiny model, and what it says of runs that do not fit or fail."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import HERE, import_file

PROGRAM = HERE / "benchmark" / "gpu" / "measure.py"
WORKERS = HERE / "benchmark" / "throughput"
measure = import_file(PROGRAM)
CPU = dict(kind="cpu", name="a processor", memory_gib=1e6)

# A GPU whose time and memory are known. Each wait takes 0.1 s.
ON_A_GPU = """
import json, os, sys, time, torch
waits = []
torch.cuda.synchronize = lambda: (waits.append(1), time.sleep(0.1))
torch.cuda.max_memory_allocated = lambda: 3 * 2**30
import tally_worker
job = json.loads(sys.argv[1])
result = tally_worker.measure(tally_worker.load_script(job), job)
print(json.dumps(result | dict(waits=len(waits), use_cpu="ACCELERATE_USE_CPU" in os.environ)))
"""


def run_measure(folder, *flags):
    """A run without TRL. Returns what it wrote as JSON and as Markdown, and the finished process."""
    command = [sys.executable, PROGRAM, "--no-trl", "--threads", "1", "--results", folder / "figures.json", *flags]
    finished = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=HERE)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads((folder / "figures.json").read_text()), (folder / "figures.md").read_text(), finished


def collect(pythons, folder, device=CPU, **flags):
    """All entries that `measure_all` gives, by model, algorithm and program."""
    entries = measure.measure_all(measure.Args(threads=1, **flags), device, pythons, folder)
    return {(entry["model"], entry["algorithm"], entry["program"]): entry for entry in entries}


@pytest.mark.slow
def test_tiny(tmp_path):
    """The figures are those of completions with a known number of tokens, on a device with a name."""
    report, table, finished = run_measure(tmp_path, "--tiny", "--minutes", "5")
    assert report["device"]["name"] == measure.describe_device()["name"] != ""
    assert [entry["algorithm"] for entry in report["results"]] == ["rloo", "grpo"]
    for entry in report["results"]:
        assert entry["tokens_per_step"] == 16 * 16  # 16 completions with 16 tokens each
        rates = [entry["rollout_tokens_per_second"], entry["training_tokens_per_second"]]
        assert min(rates) > 0 and entry["seconds_per_step"] > 0
        assert 0.1 < entry["peak_memory_gib"] < 5
        row = f"| {rates[0]:,.0f} | {rates[1]:,.0f} | {entry['peak_memory_gib']:.2f} |"
        assert f"| tiny | {entry['algorithm'].upper()} | Tally {row}" in " ".join(table.split())
    assert table.startswith(report["device"]["name"] + ", float32, ")
    assert "TRL was not measured" in table and table in finished.stdout


@pytest.mark.slow
def test_without_time_every_case_is_named(tmp_path):
    report, table, _ = run_measure(tmp_path, "--minutes", "0")
    assert [entry["model"] for entry in report["results"]] == ["default"] * 2 + ["135M"] * 2 + ["1B"] * 2
    for entry in report["results"]:
        # The large models may also be too large for this machine.
        assert entry["skipped"].startswith(("only 0 s were left", "needs over")) and "tokens_per_step" not in entry
        assert f"- {entry['model']}, {entry['algorithm'].upper()}, Tally: skipped: {entry['skipped']}" in table


@pytest.mark.slow
def test_on_a_gpu(tmp_path):
    """Each clock waits for the GPU, the memory is the GPU's, and the script may use it."""
    job = measure.make_job("tiny", measure.TINY["tiny"], CPU | dict(kind="cuda"), 1, tmp_path / "tiny")
    assert job["dtype"] == "bfloat16"
    job |= dict(algorithm="rloo", output_dir=str(tmp_path / "run"))
    command = [sys.executable, "-c", ON_A_GPU, json.dumps(job)]
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    finished = subprocess.run(command, capture_output=True, text=True, cwd=WORKERS, env=environment)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["peak_gib"] == 3 and not result["use_cpu"]
    # In a step: its begin, and before and after sampling, the reference's pass and (only after) training. Then the end.
    assert result["waits"] == 6 * job["steps"] + 1
    assert all(step["train"] > 0.1 and step["generation"] > 0.1 for step in result["steps"])


def test_the_device_is_the_gpu_where_there_is_one(monkeypatch):
    card = SimpleNamespace(name="a card", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert measure.describe_device() == dict(kind="cuda", name="a card", memory_gib=24)


def test_what_needs_too_much_memory_is_skipped(tmp_path):
    """No model is made for it."""
    found = collect(dict(tally="", trl=""), tmp_path, CPU | dict(memory_gib=1e-6))
    assert len(found) == 12 and all(entry["skipped"].startswith("needs over") for entry in found.values())
    assert "needs over 23.1 GiB" in found["1B", "grpo", "trl"]["skipped"]
    assert not list(tmp_path.iterdir())


def test_a_case_without_memory_gets_no_share_of_the_time(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(measure, "make_job", lambda *args: {})
    monkeypatch.setattr(measure, "measure", lambda *args: limits.append(args[-1]) or dict(tokens_per_step=1))
    collect(dict(tally=""), tmp_path, CPU | dict(memory_gib=10), minutes=1)
    assert limits == [pytest.approx(60 / runs, rel=0.05) for runs in (4, 3, 2, 1)]


def test_a_run_is_stopped_after_its_share_of_the_time(tmp_path, monkeypatch):
    """The other algorithm of this program is not tried. It has the same reason."""
    monkeypatch.setattr(measure, "SHORTEST_RUN", 0)
    programs, limits, run = [], [], measure.throughput.run

    def note(worker, job, folder, python, limit):
        programs.append((job["algorithm"], worker))
        limits.append(limit)
        return run(worker, job, folder, python, 0.2)

    monkeypatch.setattr(measure.throughput, "run", note)
    found = collect(dict(tally=sys.executable, trl=sys.executable), tmp_path, tiny=True, minutes=2)
    assert programs == [("rloo", "tally_worker.py"), ("rloo", "trl_worker.py")]
    assert limits == [pytest.approx(120 / runs, rel=0.2) for runs in (4, 2)]  # the second: only TRL has runs to do
    assert all(entry["skipped"].startswith("not done after ") for entry in found.values())
    assert found["tiny", "rloo", "trl"]["skipped"] == found["tiny", "grpo", "trl"]["skipped"]


@pytest.mark.parametrize("factor", [1, 0.5])
def test_figures_of_known_steps(factor, tmp_path, monkeypatch):
    """Medians without the first two steps. A run with another number of tokens has failed."""
    job = measure.WORK | measure.TINY["tiny"]
    step = dict(tokens=round(256 * factor), seconds=3.0, train=2.0)
    steps = [step | dict(seconds=99.0, train=98.0)] * 2 + [step, step | dict(seconds=50.0, train=1.0), step]
    result = dict(steps=steps, episodes=80, peak_gib=1.5, versions={})
    monkeypatch.setattr(measure.throughput, "run", lambda *args: result)
    found = measure.measure("tally", job, tmp_path, "", math.inf)
    if factor == 1:
        rates = dict(rollout_tokens_per_second=256.0, training_tokens_per_second=128.0, seconds_per_step=3.0)
        assert found == rates | dict(peak_memory_gib=1.5, tokens_per_step=256, versions={})
    else:
        assert found == dict(failed="it counted [128] tokens a step and 80 episodes instead of 256 and 80")


def test_a_run_that_fails_is_named(tmp_path, monkeypatch):
    """The last line of its output is the reason, and the program goes on."""
    (tmp_path / "broken").write_text("#!/bin/sh\necho first\necho CUDA out of memory.\nexit 1\n")
    (tmp_path / "broken").chmod(0o755)
    job = measure.WORK | measure.TINY["tiny"] | dict(threads=1)
    found = measure.measure("trl", job, tmp_path / "run", str(tmp_path / "broken"), 60)
    assert found == dict(failed="CUDA out of memory.")


def test_without_trl_tally_is_measured_alone(tmp_path, monkeypatch):
    """The half of an environment that was made is removed, so that the next start makes a new one."""
    environment = tmp_path / "environment"
    environment.mkdir()

    def install(given):
        raise subprocess.CalledProcessError(1, ["pip", "install", "trl"])

    monkeypatch.setattr(measure.throughput, "TRL_ENVIRONMENT", environment)
    monkeypatch.setattr(measure.throughput, "trl_python", install)
    pythons, notes = measure.find_pythons(measure.Args())
    assert list(pythons) == ["tally"] and not environment.exists()
    assert notes[0].startswith("TRL could not be installed, so Tally was measured alone: ")
