"""Killed runs. A run that was killed and started again is the run that was never stopped."""

import errno
import itertools
import json
import multiprocessing
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
from conftest import (
    KILLS,
    changed_copy,
    column,
    contents,
    encode,
    import_file,
    one_text,
    only,
    result_of,
)
from pytest import fixture, raises
from safetensors.torch import load_file

kill_at = import_file(KILLS).kill_at

SAVING = dict(  # four iterations of two updates, the last one of three episodes
    save_every=1,
    total_episodes=21,
    num_mini_batches=2,
    batch_size=6,
    num_sample_generations=4,
    lr_scheduler_type="cosine",
    warmup_steps=2,
)


@fixture
def flags(script):
    """Those of a run that saves and evaluates."""
    flags = SAVING | dict(eval_dataset=3, eval_every=2)
    if script.__name__ == "ppo":  # Here state.json hands more than counts to the next iteration.
        flags |= dict(adaptive_kl=True, kl_horizon=50, score_scaling=True, score_norm=True)
    return flags


@fixture
def expected(script, flags, run, cache={}):
    """The results of a run that is never stopped."""
    if script.__name__ not in cache:
        cache[script.__name__] = result_of(run(script, **flags).folder)
    return cache[script.__name__]


@fixture
def out(tmp_path):
    """The folder of the run that is killed."""
    return tmp_path / "out"


@fixture
def stopped_after(script, killed, out):
    """stopped_after(iteration, **flags) kills a run in the iteration after this."""

    def stopped_after(iteration, **flags):
        strike = partial(kill_at, script, "loading", iteration + 1)
        killed(script, strike, output_dir=out, **flags)

    return stopped_after


@fixture
def goes_on(script, run, flags, expected, out):
    """goes_on(**changed): the run in `out` is started again, and ends. Its results are those of the
    run that was never stopped. changed: flags that differ from `flags`"""

    def goes_on(**changed):
        run(script, **dict(output_dir=out, resume=True) | flags | changed)
        assert result_of(out) == expected

    return goes_on


def write_half(stem):
    """Let the process end when it has written a half of a file whose name begins so."""
    write_text = Path.write_text

    def struck(path, text, **settings):
        if path.stem == stem:
            write_text(path, text[: len(text) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write_text(path, text, **settings)

    Path.write_text = struck


def whole_checkpoints(output_dir):
    return [file.parent.name[-1] for file in sorted(output_dir.glob("checkpoints/*/state.json"))]


def test_a_run_killed_in_every_phase(script, killed, out, flags, goes_on):
    """One command is killed in each phase, and started again each time.

    Bug: trl 1.16 (resumed, some prompts came twice)."""
    for phase, call in (
        ("rollout", 1),  # of the first iteration
        ("training", 4),  # of the second iteration, which has made one of its two updates
        ("metrics", 2),
        ("half of the state", 1),
        ("written", 1),
        ("loading", 1),
        ("removing", 1),
        ("model", 1),
    ):
        strike = partial(kill_at, script, phase, call)
        if phase == "half of the state":
            strike = partial(write_half, "state")
        killed(script, strike, output_dir=out, resume=True, **flags)
    goes_on()


@one_text
def test_a_killed_start_does_not_stand_in_the_way(
    script, killed, stopped_after, out, flags, goes_on, monkeypatch
):
    """A start that ends before its first metrics leaves the folder free for other flags. A start
    was killed while it wrote args.yaml. The same command starts it again, also on a disk without
    locks."""
    stopped_after(0, learning_rate=1.0, **SAVING)
    stopped_after(1, **flags)
    killed(script, partial(write_half, "args"), output_dir=out, resume=True, **flags)
    no_locks = Mock(side_effect=OSError(errno.EOPNOTSUPP, "no locks"))
    monkeypatch.setattr(script.filelock.FileLock, "acquire", no_locks)
    goes_on()


@one_text
def test_a_folder_belongs_to_one_process(script, run, out, flags, goes_on, capsys):
    """Another process is refused as long as the first one lives. SIGKILL gives the folder back."""
    flags |= dict(output_dir=out, resume=True)
    fork = multiprocessing.get_context("fork")
    has_begun = fork.Event()

    def first():
        script.draw_prompts = lambda *args: has_begun.set() or time.sleep(600)
        run(script, **flags)

    process = fork.Process(target=first, daemon=True)
    process.start()
    assert has_begun.wait(60)
    with raises(script.UsageError, match=f"another run writes into {out}"):
        run(script, **flags)
    process.kill()
    process.join()
    goes_on()
    assert "no checkpoint, starting at 0" in capsys.readouterr().out


@one_text
def test_a_notebook_goes_on_in_the_same_process(script, run, out, flags, goes_on, monkeypatch):
    """After an interrupt the traceback, and so the lock, may still exist."""
    with monkeypatch.context() as patch, raises(KeyboardInterrupt):
        patch.setattr(script, "generate", Mock(side_effect=KeyboardInterrupt))
        run(script, output_dir=out, **flags)
    lock = script.accelerator.lock
    assert lock.is_locked
    goes_on()


@only("rloo", "ppo")
def test_only_the_runs_own_lines_are_cut(stopped_after, world, out, flags, goes_on, capsys):
    """Lines that were written after the checkpoint are cut off, also a half line. Other files in
    the folder, such as a dataset, stay as they are. Without the newest checkpoint the run goes on
    from the one before."""
    out.mkdir()
    flags["dataset"] = shutil.copy(world.dataset(7), out / "train.jsonl")
    stopped_after(2, resume=True, **flags)
    notes = out / "checkpoints/mine.txt"
    notes.write_text("kept")
    before = contents(out)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 3, "step": 5}\n{"iteration": 4, "st')
    stopped_after(0, resume=True, **flags)
    assert contents(out) == before
    shutil.rmtree(out / "checkpoints/iteration_00000002")
    goes_on()
    assert "resuming after iteration 1\n" in capsys.readouterr().out
    assert list(notes.parent.iterdir()) == [notes]  # A finished run removes its own checkpoints.
    assert (out / "train.jsonl").read_bytes() == before["train.jsonl"]


@one_text
def test_the_newest_two_checkpoints_are_kept(stopped_after, out):
    """Older ones are removed. What a kill left unfinished is cleared."""
    stopped_after(2, **SAVING)
    assert whole_checkpoints(out) == ["1", "2"]
    checkpoints = out / "checkpoints"
    shutil.copytree(checkpoints / "iteration_00000001", checkpoints / "unfinished")
    stopped_after(1, resume=True, **SAVING)
    assert sorted(path.name[-1] for path in checkpoints.iterdir()) == ["2", "3"]


@one_text
def test_a_checkpoint_is_made_after_ten_minutes(script, stopped_after, out, goes_on, monkeypatch):
    """Here each look at the clock takes 400 seconds: one at the start, and one in an iteration."""
    clock = SimpleNamespace(time=partial(next, itertools.count(0, 400)), perf_counter=time.time)
    with monkeypatch.context() as patch:
        patch.setattr(script, "time", clock)
        stopped_after(3, **SAVING | dict(save_every=100, eval_dataset=3, eval_every=2))
    assert whole_checkpoints(out) == ["2"]
    goes_on()


@one_text
def test_a_finished_run_makes_no_step(script, run, capsys, caplog):
    """A finished run that is started again says so, and changes nothing. Saving tied weights gives
    no warning.

    Bug: verl#6232 (resuming a finished run makes a step)."""
    flags = SAVING | dict(model_path="gpt2")
    output_dir = run(script, **flags).folder
    assert "shared" not in caplog.text
    before = contents(output_dir)
    with raises(SystemExit) as stopped:
        run(script, output_dir=output_dir, resume=True, **flags)
    assert not stopped.value.code
    assert contents(output_dir) == before
    assert f"nothing to do: the run in {output_dir} is finished" in capsys.readouterr().out


@one_text
def test_another_run_is_refused(
    script, run, stopped_after, world, tmp_path, out, flags, goes_on, monkeypatch
):
    """A folder that holds a run needs --resume. With it a flag that would make another run is
    refused by name, and so is a dataset with other rows, and a run of older scripts. Nothing is
    changed."""
    dataset = shutil.copy(world.dataset(7), tmp_path / "growing.jsonl")
    flags["dataset"] = dataset
    stopped_after(2, **flags)

    def is_refused(message, resume=True, **changed):
        before = contents(out)
        with raises(script.UsageError, match=message):
            run(script, output_dir=out, resume=resume, **flags | changed)
        assert contents(out) == before

    is_refused("--output-dir .* holds a run; --resume", resume=False)
    others = dict(seed=9, reward="exact_match", lora_r=2, num_train_epochs=5.0, weight_decay=0.5)
    for flag, value in others.items():
        is_refused(f"--resume: {flag} is ", **{flag: value})
    text = dataset.read_text()
    dataset.write_text(text.replace('"1"', '"2"'))
    is_refused("--resume: dataset_rows is ")
    dataset.write_text(text)
    with monkeypatch.context() as patch:
        # A template that writes the date makes other prompts of the same rows.
        patch.setattr(script, "tokenize", lambda *_, **__: ("2", encode("2")))
        is_refused("--resume: prompt_tokens is ")
    args_file = out / "args.yaml"
    written = args_file.read_text()
    args_file.write_text(written + "keep_checkpoints: null\n")
    is_refused("--resume: keep_checkpoints is unknown")
    args_file.write_text(written.replace("weight_decay: 0.0\n", ""))
    is_refused("--resume: weight_decay is 0.0, but unknown")
    args_file.write_text(written)
    # The same rows are the same dataset.
    goes_on(dataset=dataset.rename(tmp_path / "moved.jsonl"))


@only("grpo", "ppo")
def test_flags_that_do_not_make_another_run_may_change(
    script, run, stopped_after, out, flags, expected
):
    """These flags change memory, or what is shown and kept. They do not change what is computed."""
    stopped_after(2, **flags)
    flags |= dict(
        output_dir=out,
        resume=True,
        per_device_train_batch_size=2,
        per_device_rollout_batch_size=3,
        gradient_checkpointing=True,
        save_every=2,
        num_sample_generations=1,
        eval_every=None,
        eval_temperature=1.0,
    )
    ran = run(script, **flags)
    lines, _, rollouts = expected
    trained = "".join(rollouts[name] for name in sorted(rollouts) if not name.startswith("eval"))
    rows = [json.loads(line) for line in trained.splitlines()]
    for name in ("iteration", "index", "token_ids", "score"):
        assert column(ran.rollouts, name) == column(rows, name)
    assert column(ran.metrics, "step") == column(lines, "step")


@only("rloo", "ppo")
def test_a_resumed_lora_run_is_the_run_that_never_stopped(script, run, stopped_after, out):
    """The adapters and their optimizer are in the checkpoint. The base model is not."""
    flags = SAVING | dict(lora_r=2, learning_rate=0.02)
    stopped_after(2, **flags)
    for file in out.glob("checkpoints/iteration_00000002/model*.safetensors"):
        assert all(re.search("lora_|score", name) for name in load_file(file))
    run(script, output_dir=out, resume=True, **flags)
    unbroken = result_of(run(script, **flags).folder)
    assert list(unbroken[1]) == ["adapter_model.safetensors"]
    assert result_of(out) == unbroken


@one_text
def test_any_schedule_goes_on(script, run, killed, tmp_path, out):
    """In a changed copy a schedule may have a state of its own. It is in the checkpoint."""
    scheduler = """transformers.get_scheduler(
        args.lr_scheduler_type, optimizer, plan.warmup_steps, plan.steps
    )"""
    two = """torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.9, 0.5)],
        milestones=[3],
    )"""
    copy = import_file(changed_copy(script, tmp_path, scheduler, two).__file__)
    unbroken = result_of(run(copy, **SAVING).folder)
    assert len(set(column(unbroken[0], "lr"))) == 4
    killed(copy, partial(kill_at, copy, "loading", 3), output_dir=out, **SAVING)
    run(copy, output_dir=out, resume=True, **SAVING)
    assert result_of(out) == unbroken


@only("rloo")
def test_a_full_disk_leaves_the_checkpoint_before(script, run, monkeypatch, out, flags, goes_on):
    """The third checkpoint finds no room. The two before it stay, and the run goes on from them."""
    save_state = accelerate.Accelerator.save_state

    def save_without_room(accelerator, folder):
        save_state(accelerator, folder)
        if whole_checkpoints(out) == ["1", "2"]:
            raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(accelerate.Accelerator, "save_state", save_without_room)
        with raises(OSError, match="no space left"):
            run(script, output_dir=out, **flags)
    assert whole_checkpoints(out) == ["1", "2"]
    assert not (out / "model").exists()
    goes_on()


@only("rloo")
def test_rows_may_hold_objects(script, run, stopped_after, monkeypatch, out):
    """A column of a Hub dataset may hold images. Their addresses do not make other rows of them."""

    held = []  # Objects that stay have addresses of their own.

    def load_dataset(*_, **__):
        held.append([{"prompt": prompt, "image": object()} for prompt in ("1+1=", "2+2=")])
        return held[-1]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    flags = SAVING | dict(dataset="some:train")
    stopped_after(2, **flags)
    load_dataset()
    run(script, output_dir=out, resume=True, **flags)
    assert (out / "model").exists()
