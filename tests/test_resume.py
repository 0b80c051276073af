"""Killed runs. A run that was killed and started again is the run that was never stopped."""

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
import yaml
from conftest import (
    KILLS,
    column,
    contents,
    encode,
    import_file,
    one_text,
    only,
    option,
    record_calls,
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
    script, killed, stopped_after, out, flags, goes_on
):
    """The run was killed while it wrote args.yaml. The same command starts it again."""
    killed(script, partial(write_half, "args"), output_dir=out, resume=True, **flags)
    # The next start fails before its first metrics. Then the folder is free for other flags.
    stopped_after(0, learning_rate=1.0, **SAVING)
    goes_on(resume=False)


@one_text
def test_a_folder_belongs_to_one_process(script, run, out, flags, goes_on):
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


@one_text
def test_a_notebook_goes_on_in_the_same_process(script, run, out, flags, goes_on, monkeypatch):
    """After an interrupt the traceback, and so the lock, may still exist."""
    with monkeypatch.context() as patch, raises(KeyboardInterrupt):
        claimed = record_calls(patch, script, "claim_folder")
        patch.setattr(script, "generate", Mock(side_effect=KeyboardInterrupt))
        run(script, output_dir=out, **flags)
    assert claimed[0].result.is_locked
    goes_on()


@one_text
def test_damaged_files(script, run, stopped_after, out, flags, expected, goes_on, capsys):
    """A newest checkpoint that is damaged is named. Without it the run goes on from the one before,
    also without its log."""
    flags["resume"] = True
    run(script, output_dir=out.with_name("new"), **flags)
    assert "no checkpoint, starting at 0" in capsys.readouterr().out
    stopped_after(2, **flags)
    newest = out / "checkpoints/iteration_00000002"
    for name in ("model.safetensors", "optimizer.bin", "state.json"):
        file = newest / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with raises(script.UsageError, match=f"{newest} may be damaged"):
            run(script, output_dir=out, **flags)
        file.write_bytes(whole)
    without_log = shutil.copytree(out, out.with_name("without_log"))
    (without_log / "metrics.jsonl").unlink()
    run(script, output_dir=without_log, **flags)
    assert result_of(without_log)[1] == expected[1]
    shutil.rmtree(newest)
    goes_on()
    assert "resuming after iteration 1\n" in capsys.readouterr().out


@only("rloo", "ppo")
def test_only_the_runs_own_lines_are_cut(stopped_after, world, out, flags, goes_on):
    """Lines that were written after the checkpoint are cut off, also a half line. Other files in
    the folder, such as a dataset, stay as they are."""
    out.mkdir()
    flags["dataset"] = shutil.copy(world.dataset(7), out / "train.jsonl")
    stopped_after(2, resume=True, **flags)
    notes = out / "checkpoints/mine.txt"
    notes.write_text("kept")
    before = contents(out)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with open(out / name, "a") as file:
            file.write('{"iteration": 3, "step": 5}\n{"iteration": 4, "st')
    stopped_after(0, resume=True, **flags)
    assert contents(out) == before
    goes_on()
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
    assert f"{output_dir} is finished" in capsys.readouterr().out


@one_text
def test_another_run_is_refused(
    script, run, stopped_after, world, tmp_path, out, flags, goes_on, monkeypatch
):
    """A folder that holds a run or a model needs --resume. With it a flag that would make another
    run is refused by name, and so is a dataset with other rows. Nothing is changed. A flag that is
    newer than the run had its default."""
    dataset = shutil.copy(world.dataset(7), tmp_path / "growing.jsonl")
    flags["dataset"] = dataset
    stopped_after(2, **flags)

    def is_refused(message, folder=out, resume=True, **changed):
        before = contents(folder)
        with raises(ValueError, match=message):
            run(script, output_dir=folder, resume=resume, **flags | changed)
        assert contents(folder) == before

    is_refused("--output-dir .*--resume", resume=False)
    for left in ("checkpoints", "model"):  # The run's model would replace the one that is there.
        (tmp_path / left / left).mkdir(parents=True)
        is_refused("--output-dir .*--resume", tmp_path / left, resume=False)
    args_file = out / "args.yaml"
    older = yaml.safe_load(args_file.read_text())
    del older["weight_decay"]
    args_file.write_text(yaml.safe_dump(older | {"flag_of_another": 1}))
    is_refused("--flag-of-another")
    args_file.write_text(yaml.safe_dump(older))
    others = dict(seed=9, reward="exact_match", lora_r=2, num_train_epochs=5.0, weight_decay=0.5)
    for flag, value in others.items():
        is_refused(option(flag), **{flag: value})
    text = dataset.read_text()
    dataset.write_text(text.replace('"1"', '"2"'))
    is_refused("--dataset-rows")
    dataset.write_text(text)
    # A template that writes the date makes other prompts of the same rows.
    monkeypatch.setattr(script, "tokenize", lambda *_, **__: ("2", encode("2")))
    is_refused("other tokens .* template")
    monkeypatch.undo()
    del older["prompt_tokens"]  # An older run has no such entry.
    args_file.write_text(yaml.safe_dump(older))
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
    rows = [json.loads(line) for line in rollouts.splitlines()]
    trained = [row for row in rows if "advantage" in row]  # not held-out ones
    for name in ("iteration", "index", "token_ids", "score"):
        assert column(ran.rollouts, name) == column(trained, name)
    assert column(ran.metrics, "step") == column(lines, "step")


@only("rloo", "ppo")
def test_a_resumed_lora_run_is_the_run_that_never_stopped(script, run, stopped_after, out):
    """The adapters and their optimizer are in the checkpoint. The base model is not."""
    flags = SAVING | dict(lora_r=2, learning_rate=0.02)
    stopped_after(2, **flags)
    kept = load_file(out / "checkpoints/iteration_00000002/model.safetensors")
    assert kept
    assert all(re.search("lora_|value_head", name) for name in kept)
    run(script, output_dir=out, resume=True, **flags)
    unbroken = result_of(run(script, **flags).folder)
    assert list(unbroken[1]) == ["adapter_model.safetensors"]
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
