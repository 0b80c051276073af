"""Killed runs. A run that was killed and started again is the run that was never stopped."""

import errno
import itertools
import os
import re
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import accelerate
import torch
import yaml
from conftest import column, contents, one_text, only, read_jsonl, result_of
from kill_and_resume import kill_at
from pytest import fixture, mark, raises
from safetensors.torch import load_file


@fixture
def flags(script):
    """Those of a run of four iterations of two updates. The last one has three episodes."""
    flags = dict(
        save_every=1,
        total_episodes=21,
        num_mini_batches=2,
        batch_size=6,
        num_sample_generations=4,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        eval_dataset=3,
        eval_every=2,
    )
    if script.__name__ == "ppo":  # Here state.json hands more than counts to the next iteration.
        flags |= dict(adaptive_kl=True, kl_horizon=50, score_scaling=True, score_norm=True)
    return flags


@fixture
def out(tmp_path):
    """The folder of the run that is killed."""
    return tmp_path / "out"


def write_half(name):
    """Let the process end when it has written a half of a file whose name begins so."""

    def strike(method):
        def struck(path, content):
            if path.name.startswith(name):
                method(path, content[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return method(path, content)

        return struck

    Path.write_text = strike(Path.write_text)
    Path.write_bytes = strike(Path.write_bytes)


@fixture
def killed_in(script, run, out, flags):
    """killed_in(phase, call, **changed): the run in `out` is started in a forked process, and
    killed in a phase. The phase "loading" is the start of an iteration. A file's name is a phase:
    half of it is written. changed: flags that differ from `flags`"""

    def killed_in(phase, call=1, **changed):
        child = os.fork()
        if child == 0:
            try:
                if "." in phase:
                    write_half(phase)
                else:
                    kill_at(script, phase, call)
                run(script, **dict(output_dir=out, resume=True) | flags | changed)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the moment never came"

    return killed_in


@fixture
def goes_on(script, run, out, flags):
    """goes_on(): the run in `out` is started, and ends. Its results are those of a run that is
    never stopped."""

    def goes_on():
        run(script, **flags, output_dir=out, resume=True)
        assert result_of(out) == result_of(run(script, **flags).folder)

    return goes_on


def whole_checkpoints(output_dir):
    return [file.parent.name[-1] for file in sorted(output_dir.glob("checkpoints/*/state.json"))]


def test_a_run_killed_in_every_phase(script, killed_in, goes_on):
    """One command is killed in each phase, and started again each time.

    Bug: trl 1.16 (resumed, some prompts came twice)."""
    for phase, call in (
        (f"{script.__name__}.py", 1),
        ("rollout", 1),  # of the first iteration
        ("training", 4),  # of the second iteration, which has made one of its two updates
        ("metrics", 2),
        ("state.json", 1),
        ("args.yaml", 1),
        ("written", 1),
        ("loading", 1),
        ("removing", 1),
        ("model", 1),
    ):
        killed_in(phase, call)
    goes_on()


@one_text
def test_a_folder_belongs_to_one_process(script, run, out, flags, goes_on, monkeypatch):
    """Another one is refused, before models are loaded. A notebook may go on in the same process:
    after an interrupt the traceback, and so the lock, still exists."""
    out.mkdir()
    lock = script.filelock.FileLock(out / ".lock", blocking=False)
    with lock, raises(script.UsageError, match=f"--output-dir {out}: another run writes into it"):
        run(script, output_dir=out, **flags)
    with monkeypatch.context() as patch, raises(KeyboardInterrupt) as interrupted:
        patch.setattr(script, "load_policy", Mock(side_effect=KeyboardInterrupt))
        run(script, output_dir=out, **flags)
    with raises(script.filelock.Timeout):
        lock.acquire()
    goes_on()
    assert interrupted.traceback
    del interrupted


@only("rloo", "ppo")
def test_only_the_runs_own_files_are_changed(
    script, run, killed_in, world, out, flags, goes_on, capsys
):
    """Lines that were written after the checkpoint are cut off, also a half line. What a kill left
    unfinished goes, and so do checkpoints before the newest two. Other files stay. A damaged
    checkpoint is named. Without it the run goes on from the one before."""
    out.mkdir()
    flags["dataset"] = shutil.copy(world.dataset(7), out / "train.jsonl")
    killed_in("loading", 4)
    assert whole_checkpoints(out) == ["2", "3"]
    checkpoints = out / "checkpoints"
    (checkpoints / "mine.txt").write_text("kept")
    before = contents(out)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 4, "step": 7}\n{"iteration": 5, "st')
    killed_in("loading", 1)
    assert contents(out) == before
    newest = checkpoints / "iteration_00000003"
    (newest / "state.json").write_text("{")
    with raises(RuntimeError, match=f"cannot load {newest}; if it is damaged, remove it"):
        run(script, **flags, output_dir=out, resume=True)
    newest.rename(checkpoints / "unfinished")
    goes_on()
    assert "resuming after iteration 2\n" in capsys.readouterr().out
    assert os.listdir(checkpoints) == ["mine.txt"]


@one_text
def test_a_folder_that_stays_does_not_stop_the_run(script, run, flags, monkeypatch):
    """A network disk may keep some files of a folder that is deleted."""
    monkeypatch.setattr(os, "rmdir", Mock(side_effect=OSError("not empty")))
    folder = run(script, **flags).folder
    assert (folder / "model").exists()
    assert os.listdir(folder / "checkpoints")


@one_text
def test_a_checkpoint_is_made_after_ten_minutes(script, killed_in, out, monkeypatch):
    """Here each look at the clock takes 400 seconds: one at the start, and one in an iteration."""
    clock = SimpleNamespace(
        time=time.time,
        monotonic=partial(next, itertools.count(0, 400)),
        perf_counter=time.perf_counter,
    )
    monkeypatch.setattr(script, "time", clock)
    killed_in("loading", 4, save_every=100)
    assert whole_checkpoints(out) == ["2"]


@one_text
def test_a_finished_run_makes_no_step(script, run, out, monkeypatch, capsys):
    """A finished run that is started again says so, and changes nothing. Its rows may hold objects,
    such as images. Their addresses do not make other rows of them.

    Bug: verl#6232 (resuming a finished run makes a step)."""
    images = [object(), object()]

    def load_dataset(name, split):
        return [{"prompt": "1+1=", "image": images.pop()}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    flags = dict(output_dir=out, resume=True, dataset="some:train")
    run(script, **flags)
    before = contents(out)
    with raises(SystemExit) as stopped:
        run(script, **flags)
    assert not stopped.value.code
    assert contents(out) == before
    assert f"nothing to do: the run in {out} is finished" in capsys.readouterr().out


@one_text
def test_another_run_is_refused(script, run, killed_in, world, tmp_path, out, flags, goes_on):
    """A folder that holds a run needs --resume. Where there is a checkpoint or a model, another
    script or reward is refused, and so are other rows, and by its name a flag that would make
    another run. Nothing is changed. A folder that holds only a model is no run."""
    dataset = shutil.copy(world.dataset(7), tmp_path / "growing.jsonl")
    flags["dataset"] = dataset
    killed_in("loading", 3)

    def is_refused(message, **changed):
        before = contents(out)
        with raises(script.UsageError, match=message):
            run(script, **dict(output_dir=out, resume=True) | flags | changed)
        assert contents(out) == before

    holds = "--output-dir .*: it holds a run; --resume continues a run"
    is_refused(holds, resume=False)
    metrics = (out / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    is_refused(holds, resume=False)  # Its checkpoints are there.
    metrics.rename(out / "metrics.jsonl")
    (tmp_path / "mine/model").mkdir(parents=True)
    for resume, message in ((False, holds), (True, "No such file .*mine/args.yaml")):
        is_refused(message, output_dir=tmp_path / "mine", resume=resume)
    for flag, value in dict(seed=9, reward="exact_match", lora_r=2, weight_decay=0.5).items():
        is_refused(f"--resume: {flag} is ", **{flag: value})
    for file, old, new, message in (
        (dataset, '"1"', '"2"', "--resume: prompts is SHA-256 "),
        # A template that writes the date makes other prompts of the same rows.
        (out / "args.yaml", "prompts: SHA-256 ", "prompts: ", "--resume: prompts is SHA-256 "),
        (out / "args.yaml", "weight_decay: 0.0\n", "", "--resume: weight_decay is 0.0, but None"),
        (out / "rloo.py", "0.2", "0.3", f"--output-dir {out}: rloo.py differs from its copy; copy"),
        (out / "rewards.py", "0.3", "0.2", "rewards.py differs from its copy"),
    ):
        text = file.read_text()
        file.write_text(text.replace(old, new))
        is_refused(message)
        file.write_text(text)
    # After an update, the script is named. It may have other flags, and hash prompts otherwise.
    update = (out / "rloo.py").rename(tmp_path / "rloo.py")
    arguments = out / "args.yaml"
    text = arguments.read_text().replace("versions: torch", "versions: other")
    arguments.write_text(text.replace("prompts: SHA-256 ", "old: 1\nprompts: "))
    is_refused("rloo.py differs from its copy")
    arguments.write_text(text)
    update.rename(out / "rloo.py")
    # The same rows are the same dataset.
    flags["dataset"] = dataset.rename(tmp_path / "moved.jsonl")
    goes_on()
    is_refused("--resume: seed is ", seed=9)  # though it is finished
    (out / "rloo.py").write_text("another")
    is_refused("rloo.py differs from its copy")


STOPS = """
calls = []
def f(prompts, **_):
    calls.append(1)
    return None if len(calls) == %d else [1.0, 2, 3]
"""


def rename_no_full_folder(rename, source, *more):
    """As gcsfuse and goofys do it."""
    if os.path.isdir(source) and os.listdir(source):
        raise OSError(errno.EMFILE, "Too many open files", str(source))
    return rename(source, *more)


@one_text
@mark.parametrize("kind", ["file", "broken link", "below a file", "not writable", "bucket"])
def test_a_folder_that_cannot_be_used_is_refused(script, run, tmp_path, monkeypatch, kind):
    """In one line, before models are loaded."""
    out = tmp_path / "out"
    if kind == "file":
        out.touch()
    elif kind == "broken link":
        out.symlink_to(tmp_path / "nowhere" / "deeper")
    elif kind == "below a file":
        out.touch()
        out = out / "below"
    elif kind == "not writable":
        monkeypatch.setattr(os, "mkdir", Mock(side_effect=PermissionError("not permitted")))
    else:
        monkeypatch.setattr(os, "rename", partial(rename_no_full_folder, os.rename))
    monkeypatch.delattr(script, "load_policy")
    with raises(script.UsageError, match=f"^--output-dir {out}: "):
        run(script, output_dir=out)


@one_text
def test_a_failed_start_leaves_the_folder_free(script, run, out, tmp_path):
    """A reward that fails in its first call is mended, and the same command runs. After its first
    metrics a start needs --resume. Until there is a checkpoint, it then takes other flags and
    another reward, too. Of the start that failed no rows stay."""
    files = [tmp_path / name for name in ("mine.py", "other.py")]
    flags = dict(output_dir=out, batch_size=3, total_episodes=9)

    def stops_in(call, **flags):
        # Python's cache knows a file by its size and the second of its last change.
        files[0].write_text(STOPS % call + call * "#")
        with raises(script.UsageError, match="--reward gave None"):
            run(script, **flags, reward=f"{files[0]}:f")

    stops_in(1, **flags)
    stops_in(3, **flags)
    assert len(read_jsonl(out / "metrics.jsonl")) == 2
    with raises(script.UsageError, match="holds a run"):
        run(script, **flags)
    (out / "rollouts/mine.jsonl").touch()
    files[1].write_text(STOPS % 9)
    flags["total_episodes"] = 3
    run(script, **flags, reward=f"{files[1]}:f", resume=True)
    assert column(read_jsonl(out / "metrics.jsonl"), "iteration") == [1]
    assert set(os.listdir(out / "rollouts")) == {"00000001.jsonl", "mine.jsonl"}
    assert (out / "other.py").read_text() == STOPS % 9
    assert yaml.safe_load((out / "args.yaml").read_text())["reward"] == f"{files[1]}:f"


@one_text
def test_a_run_that_came_between(script, run, out, flags, monkeypatch):
    """Another run begins and ends just before a start has the folder. The start, with another seed,
    is refused."""
    first = run(script, **flags).folder
    acquire = script.filelock.FileLock.acquire

    def acquire_late(lock):
        shutil.copytree(first, out, dirs_exist_ok=True)
        return acquire(lock)

    monkeypatch.setattr(script.filelock.FileLock, "acquire", acquire_late)
    with raises(script.UsageError, match="--resume: seed is 9, but 1"):
        run(script, **flags, output_dir=out, resume=True, seed=9)
    assert contents(out) == contents(first)


@only("rloo", "ppo")
def test_a_checkpoint_of_lora_holds_what_is_trained(killed_in, out, flags, goes_on):
    """The adapters and their optimizer are in the checkpoint. The base model is not."""
    flags |= dict(lora_r=2, learning_rate=0.02)
    killed_in("loading", 3)
    for file in out.glob("checkpoints/iteration_00000002/model*.safetensors"):
        assert all(re.search("lora_|score", name) for name in load_file(file))
    goes_on()


@one_text
def test_a_resumed_run_knows_that_it_has_learned(
    script, run, killed_in, out, flags, monkeypatch, capsys
):
    """Its last updates have no gradient. It does not warn, since those before the kill had one."""
    killed_in("loading", 4)
    monkeypatch.setattr(script, "rloo_advantages", lambda rewards, k: torch.zeros_like(rewards))
    for folder, is_warned in ((out, False), (out.with_name("new"), True)):
        run(script, **flags, output_dir=folder, resume=True)
        assert ("warning: no update had" in capsys.readouterr().err) == is_warned


@only("rloo")
def test_a_full_disk_leaves_the_checkpoint_before(script, run, monkeypatch, out, flags, goes_on):
    """The third checkpoint finds no room. The two before it stay, and the run goes on from them,
    also on a disk without locks."""
    save_state = accelerate.Accelerator.save_state

    def save_without_room(accelerator, folder):
        save_state(accelerator, folder)
        if whole_checkpoints(out) == ["1", "2"]:
            raise OSError("no space left on device")

    with monkeypatch.context() as patch, raises(OSError, match="no space left"):
        patch.setattr(accelerate.Accelerator, "save_state", save_without_room)
        run(script, output_dir=out, **flags)
    assert whole_checkpoints(out) == ["1", "2"]
    assert not (out / "model").exists()
    monkeypatch.setattr(script.filelock.FileLock, "acquire", Mock(side_effect=OSError))
    goes_on()
