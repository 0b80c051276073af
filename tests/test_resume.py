"""Killed runs. A run that was killed and started again gives the same results as a run that was never stopped."""

import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
import torch
import yaml
from conftest import HERE, contents, one_text, only, result_of, write_jsonl
from safetensors.torch import load_file

# four iterations of two updates, the last one of three episodes
SAVING = dict(save_every=1, total_episodes=21, num_mini_batches=2, batch_size=6, num_sample_generations=4)
SAVING |= dict(lr_scheduler_type="cosine", warmup_steps=2)
# With these flags state.json hands more than the counts to the next iteration.
CARRIED = {"ppo": dict(adaptive_kl=True, kl_horizon=50, score_scaling=True, score_norm=True)}


@pytest.fixture
def flags(script, world):
    """Those of a run that saves and evaluates."""
    evaluation = dict(eval_dataset=world.dataset(3, seed=4), eval_every=2)
    return SAVING | evaluation | CARRIED.get(script.__name__, {})


@pytest.fixture
def expected(script, flags, run, cache={}):
    """The results of a run that is never stopped."""
    if script.__name__ not in cache:
        cache[script.__name__] = result_of(run(script, **flags).folder)
    return cache[script.__name__]


class Killed(BaseException):
    """Ends a run as a signal would."""


@pytest.fixture
def killed(run, monkeypatch):
    """killed(script, owner, name, ..) runs a script. Among the calls of this function for which `applies` is True, call
    number `call` only does `first`, and then ends the run."""

    def killed(script, owner, name, call=1, applies=lambda *args: True, first=lambda *args: None, **flags):
        calls, original = 0, getattr(owner, name)

        def struck(*args, **kwargs):
            nonlocal calls
            calls += applies(*args)
            if calls == call and applies(*args):
                first(*args)
                raise Killed
            return original(*args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(owner, name, struck)
            run(script, **flags)

    return killed


@pytest.fixture
def stopped_after(killed):
    """stopped_after(script, folder, iteration, **flags) kills a run in the iteration after this one. Returns its
    folder."""

    def stopped_after(script, folder, iteration, **flags):
        killed(script, script, "draw_prompts", iteration + 1, output_dir=str(folder), **flags)
        return folder

    return stopped_after


def write_half(path, text, **_):
    with open(path, "a") as file:
        file.write(text[: len(text) // 2])


def remove_half(folder, *_):
    for file in sorted(Path(folder).iterdir())[::2]:
        file.unlink()


def is_named(*names):
    return lambda path, *_: Path(path).name in names


def is_metrics(path, rows):
    return path.name == "metrics.jsonl"


def half_a_line(path, rows):
    write_half(path, json.dumps(rows[0]))


# The moments of a run, in their order. Each says which function is called then, and which of its calls ends the run.
PHASES = {  # of each phase the arguments of `killed`
    "evaluation before the first update": lambda script: (script, "pick_tokens"),
    "rollout": lambda script: (script, "draw_prompts", 2),
    "scores": lambda script: (script, "score_episodes", 3),
    # The second iteration has made one of its two updates.
    "training": lambda script: (script.accelerate.Accelerator, "backward", 4),
    "half a line": lambda script: (script, "append_jsonl", 2, is_metrics, half_a_line),
    "half of the state": lambda script: (Path, "write_text", 1, is_named("state.json"), write_half),
    "a checkpoint without its name": lambda script: (Path, "rename", 1, is_named("unfinished")),
    "removing the oldest": lambda script: (script.shutil, "rmtree", 1, Path.exists, remove_half),
    "model": lambda script: (Path, "rename", 1, is_named("model.tmp")),
}
# Evaluation takes the most likely token. So the first call of `pick_tokens` belongs to the first rollout.


def whole_checkpoints(output_dir):
    return [file.parent.name[-1] for file in sorted(output_dir.glob("checkpoints/*/state.json"))]


def test_a_run_killed_in_every_phase(script, run, killed, tmp_path, flags, expected):
    """One command is killed in each phase, and started again each time. The results are those of an unbroken run."""
    flags |= dict(output_dir=str(tmp_path / "out"), resume=True)
    for phase in PHASES:
        calls_in_one_start = phase in ("rollout", "scores", "training", "half a line")
        if calls_in_one_start and whole_checkpoints(tmp_path / "out")[-1:] == ["3"]:
            continue  # Only one iteration is left, and these phases need more.
        killed(script, *PHASES[phase](script), **flags)
    run(script, **flags)
    assert result_of(tmp_path / "out") == expected


@only("ppo")
@pytest.mark.slow
def test_kill_and_resume(script, tmp_path):
    """Real SIGKILLs in every phase, on one and on two processes by turns, give the results of an unbroken run."""
    program = HERE / "benchmark" / "hardware" / "kill_and_resume.py"
    command = [sys.executable, program, "--scripts", script.__name__, "--runs", "1, 2 by turns"]
    command += ["--results", tmp_path / "results.json"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [row] = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert row["kills"] >= 8 and row["fine"] and row["relative_distance"] < 1e-3


@one_text
def test_a_killed_start_does_not_stand_in_the_way(script, run, killed, stopped_after, tmp_path, flags, expected):
    """The run was killed while it wrote args.yaml. The same command starts it again. Files of others are not cut."""
    own = Path(write_jsonl(tmp_path / "metrics.jsonl", [{"mine": 1}]))
    with pytest.raises(FileNotFoundError, match="args.yaml"):
        run(script, output_dir=str(tmp_path), resume=True)
    assert own.stat().st_size > 0
    flags |= dict(output_dir=str(tmp_path / "out"), resume=True)
    killed(script, Path, "write_text", 1, lambda path, _: path.stem == "args", write_half, **flags)
    # The next start fails before its first metrics. Then the folder is free for a run with other flags.
    stopped_after(script, tmp_path / "out", 0, **SAVING | dict(learning_rate=1.0))
    run(script, **flags | dict(resume=False))
    assert result_of(tmp_path / "out") == expected


@one_text
def test_a_folder_belongs_to_one_process(script, run, tmp_path, flags, expected):
    """Another process is refused as long as the first one lives. SIGKILL gives the folder back."""
    flags |= dict(output_dir=str(tmp_path / "out"), resume=True)
    fork = multiprocessing.get_context("fork")
    has_begun = fork.Event()

    def first():
        script.draw_prompts = lambda *args: has_begun.set() or time.sleep(600)
        run(script, **flags)

    process = fork.Process(target=first, daemon=True)
    process.start()
    assert has_begun.wait(60)
    with pytest.raises(filelock.Timeout, match=str(tmp_path / "out" / ".lock")):
        run(script, **flags)
    process.kill(), process.join()
    run(script, **flags)
    assert result_of(tmp_path / "out") == expected


class Malicious(str):
    """A path that becomes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (str(self),)


DAMAGES = [  # a file of the newest checkpoint, and what it holds then
    *[("model.safetensors", bytes(100)), ("optimizer.bin", b""), ("state.json", b"")],
    *[("optimizer.bin", pickle.dump), ("optimizer.bin", torch.save)],
]


@one_text
def test_damaged_files(script, run, stopped_after, tmp_path, flags, expected, capsys):
    """A newest checkpoint that is damaged is named, and no pickle in it is executed. Without it the run goes on from
    the one before. A run also goes on without the end of its logs."""
    flags |= dict(resume=True)
    malicious = Malicious(tmp_path / "struck")
    pickle.loads(pickle.dumps(malicious))
    (tmp_path / "struck").rmdir()  # The side effect works where pickles are loaded.
    stopped = stopped_after(script, tmp_path / "out", 2, **flags)
    newest = stopped / "checkpoints" / "iteration_00000002"
    for name, damage in DAMAGES:
        whole = (newest / name).read_bytes()
        with open(newest / name, "wb") as file:
            damage(malicious, file) if callable(damage) else file.write(damage)
        with pytest.raises(Exception):  # a library's own, after a line that names the folder
            run(script, output_dir=str(stopped), **flags)
        assert f"--resume from {newest}; remove it if it is damaged" in capsys.readouterr().out
        (newest / name).write_bytes(whole)
    assert not (tmp_path / "struck").exists()
    cut, empty = (shutil.copytree(stopped, tmp_path / name) for name in ("cut", "empty"))
    (cut / "metrics.jsonl").write_bytes((cut / "metrics.jsonl").read_bytes().splitlines(True)[0])
    (empty / "metrics.jsonl").unlink()
    shutil.rmtree(newest)
    for folder in (stopped, cut, empty):
        run(script, output_dir=str(folder), **flags)
        assert result_of(folder)[1] == expected[1] and b"\0" not in (folder / "metrics.jsonl").read_bytes()
    assert result_of(stopped) == expected


@only("rloo", "ppo")
def test_only_the_runs_own_lines_are_cut(script, run, stopped_after, world, tmp_path, flags, expected):
    """Lines that were written after the checkpoint are cut off, also a half line. Other files in the folder, such as a
    dataset, stay as they are."""
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    dataset = shutil.copy(world.dataset(7), output_dir / "train.jsonl")
    notes = write_jsonl(output_dir / "notes.jsonl", [{"note": 1}])
    flags |= dict(dataset=str(dataset))
    stopped_after(script, output_dir, 2, **flags)
    before, mine = contents(output_dir), {Path(path).name: Path(path).read_bytes() for path in (dataset, notes)}
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with open(output_dir / name, "a") as file:
            file.write('{"iteration": 3, "step": 5}\n{"iteration": 4, "st')
    stopped_after(script, output_dir, 0, resume=True, **flags)
    after = contents(output_dir)
    assert before.pop("args.yaml") != after.pop("args.yaml")  # It says `resume: true` now.
    assert after == before
    mine_too = output_dir / "checkpoints" / "mine.txt"
    mine_too.write_text("kept")
    run(script, output_dir=str(output_dir), resume=True, **flags)
    assert result_of(output_dir) == expected
    assert mine_too.exists() and len(list(mine_too.parent.iterdir())) == 1  # A finished run removes its own.
    assert contents(output_dir).items() >= mine.items()


@one_text
def test_the_newest_two_checkpoints_are_kept(script, stopped_after, tmp_path):
    """Older ones are removed. What a kill left unfinished is cleared."""
    flags = SAVING | dict(num_ppo_epochs=1)
    output_dir = stopped_after(script, tmp_path / "out", 2, **flags)
    assert whole_checkpoints(output_dir) == ["1", "2"]
    shutil.copytree(output_dir / "checkpoints/iteration_00000001", output_dir / "checkpoints/unfinished")
    stopped_after(script, output_dir, 1, resume=True, **flags)
    assert sorted(path.name[-1] for path in (output_dir / "checkpoints").iterdir()) == ["2", "3"]
    state = json.loads((output_dir / "checkpoints" / "iteration_00000003" / "state.json").read_text())
    assert (state["iteration"], state["step"]) == (3, 6)
    sizes = {name: len(data) for name, data in contents(output_dir).items() if name in state["jsonl_sizes"]}
    assert state["jsonl_sizes"] == sizes and len(sizes) == 2


@one_text
def test_a_finished_run_makes_no_step(script, run, world, capsys, caplog, updates):
    """A finished run that is started again says so, and changes nothing. Saving tied weights gives no warning."""
    flags = SAVING | dict(model_path=world.gpt2)
    output_dir = run(script, **flags)[2]
    assert "shared" not in caplog.text
    before = contents(output_dir)
    updates.clear(), capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(script, output_dir=str(output_dir), resume=True, **flags)
    assert not stopped.value.code and not updates and contents(output_dir) == before
    assert f"nothing to do: the run in {output_dir} is finished" in capsys.readouterr().out


@one_text
def test_another_run_is_refused(script, run, stopped_after, world, tmp_path, flags, expected):
    """A folder that holds a run or a model needs --resume. With it a flag that would make another run is refused by
    name, and so is a dataset with other rows. Nothing is changed. A flag that is newer than the run had its default."""
    dataset = Path(shutil.copy(world.dataset(7), tmp_path / "growing.jsonl"))
    flags |= dict(dataset=str(dataset))
    stopped = stopped_after(script, tmp_path / "out", 2, **flags)
    older = yaml.safe_load((stopped / "args.yaml").read_text())
    del older["weight_decay"]
    (stopped / "args.yaml").write_text(yaml.safe_dump(older | {"flag_of_another": 1}))

    def is_refused(message, **changed):
        before = contents(stopped)
        with pytest.raises(ValueError, match=message):
            run(script, **flags | dict(output_dir=str(stopped), resume=True) | changed)
        assert contents(stopped) == before

    is_refused(rf"{stopped} holds a run of another script, with \['flag_of_another'\]", kl_coef=0.1)
    (stopped / "args.yaml").write_text(yaml.safe_dump(older))
    is_refused(f"--output-dir {stopped} holds a run; --resume", resume=False)
    (stopped / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")  # The checkpoints are still there.
    is_refused("holds a run", resume=False)
    (tmp_path / "metrics.jsonl").rename(stopped / "metrics.jsonl")
    taken = tmp_path / "taken"  # The run's model would replace the one that is there.
    (taken / "model").mkdir(parents=True)
    is_refused(f"--output-dir {taken} holds a run", resume=False, output_dir=str(taken))
    others = dict(learning_rate=1.0, seed=9, num_train_epochs=5.0, reward="exact_match", response_length=7, lora_r=2)
    others |= dict(dataset=world.dataset(7, seed=5), kl_coef=0.1, num_mini_batches=1, temperature=0.9, weight_decay=0.5)
    for flag, value in others.items():
        name = (
            "the rows of --dataset changed: 7, SHA-256 .*"
            if flag == "dataset"
            else f"--{flag.replace('_', '-')} {value}"
        )
        is_refused(f"{name}: the run in {stopped} has .* To train longer, ", **{flag: value})
    text = dataset.read_text()
    for other, count in ((text + text, 14), (text.replace('"answer": "1"', '"answer": "2"'), 7)):
        dataset.write_text(other)
        is_refused(f"the rows of --dataset changed: {count}, SHA-256 .*: the run in {stopped} has 7, SHA-256 ")
    dataset.write_text(text)
    flags["dataset"] = str(dataset.rename(tmp_path / "moved.jsonl"))  # The same rows are the same dataset.
    run(script, output_dir=str(stopped), resume=True, **flags)
    assert result_of(stopped) == expected


@only("grpo", "ppo")
def test_flags_that_do_not_make_another_run_may_change(script, run, stopped_after, tmp_path, flags, expected):
    """These flags change memory, or what is shown and kept. They do not change what is computed."""
    stopped = stopped_after(script, tmp_path / "out", 2, **flags)
    changed = dict(per_device_train_batch_size=2, per_device_rollout_batch_size=3, gradient_checkpointing=True)
    changed |= dict(save_every=2, num_sample_generations=1, eval_every=None, eval_temperature=1.0)
    ran = run(script, output_dir=str(stopped), resume=True, **flags | changed)
    lines, _, rollouts = expected
    trained = [row for row in map(json.loads, rollouts.splitlines()) if "advantage" in row]  # not held-out ones
    for row, mine in zip(ran.rollouts, trained, strict=True):
        assert all(row[name] == mine[name] for name in ("iteration", "index", "token_ids", "score"))
    assert [row["step"] for row in ran.metrics] == [row["step"] for row in lines]


@only("rloo", "ppo")
def test_a_resumed_lora_run_is_the_run_that_never_stopped(script, run, stopped_after, tmp_path):
    """The adapters and their optimizer are in the checkpoint. The base model is not."""
    flags = SAVING | dict(lora_r=2, learning_rate=0.02)
    stopped = stopped_after(script, tmp_path / "out", 2, **flags)
    kept = load_file(stopped / "checkpoints" / "iteration_00000002" / "model.safetensors")
    assert kept and all(re.search("lora_|value_head", name) for name in kept)
    run(script, output_dir=str(stopped), resume=True, **flags)
    unbroken = run(script, **flags)[2]
    assert [name for name in result_of(unbroken)[1]] == ["adapter_model.safetensors"]
    assert result_of(stopped) == result_of(unbroken)


@only("rloo")
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_a_full_disk_leaves_the_checkpoint_before(script, run, monkeypatch, tmp_path, name, flags, expected):
    """There is no room for the last byte of a file of the third checkpoint. The two before it stay, and the run goes on
    from them."""
    output_dir, save_checkpoint, limit = tmp_path / "full", script.save_checkpoint, resource.RLIMIT_FSIZE

    def save_without_room(args, policy, state, folder):
        soft, hard = resource.getrlimit(limit)
        if state["iteration"] == 3:  # Python ignores the signal, so to write more raises an error.
            room = (output_dir / "checkpoints" / "iteration_00000002" / name).stat().st_size - 1
            resource.setrlimit(limit, (room, hard))
        try:
            save_checkpoint(args, policy, state, folder)
        finally:
            resource.setrlimit(limit, (soft, hard))

    flags |= dict(output_dir=str(output_dir))
    monkeypatch.setattr(script, "save_checkpoint", save_without_room)
    with pytest.raises(Exception, match="(?i)file too large|iostream|write"):
        run(script, **flags)
    assert whole_checkpoints(output_dir) == ["1", "2"] and not (output_dir / "model").exists()
    monkeypatch.undo()
    run(script, **flags | dict(resume=True))
    assert result_of(output_dir) == expected
