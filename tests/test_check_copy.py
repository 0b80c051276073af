"""benchmark/check_copy.py: what it says about copies that are right, or have a fault."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import check_copy
import losses
import oracle
import torch
from conftest import HERE
from pytest import mark, raises
from test_pages import changed, read
from test_patches import ROWS

# docs/variants.md states losses.
BLOCK = re.search(
    r"^    from losses import.*?(?=^\S)", read(HERE / "docs/variants.md"), re.M | re.S
)
STATED = textwrap.dedent(BLOCK[0])
stated = {}
exec(STATED, stated)


def weighted(mini_batch, batch, args):
    """The second token counts half, the third one a quarter, and so on."""
    for episode in mini_batch:
        weights = 0.5 ** torch.arange(len(episode.token_ids))
        change = episode.logprobs - episode.old_logprobs
        episode.logprobs = episode.old_logprobs + weights * change
    return losses.rloo(mini_batch, batch, args)


# Texts of rloo.py and of grpo.py.
ADVANTAGES = "advantages = rloo_advantages(rewards, args.k)"
BASELINE = "(differences.nansum(2) / others.clamp(min=1))"
CLIP = "clipped_policy_loss(logratio, advantages, args.cliprange, args.cliprange)"
SUM = "(losses * is_real[:, None]).sum()"
DENOMINATOR = f"{SUM} / len(mini_batch)"
KL = "rewards = rewards - args.kl_coef * kl"
LOGRATIO = "logratio = (logprobs - old_logprobs).sum"
TOKEN_WEIGHTS = "logratio = ((logprobs - old_logprobs) * 0.5 ** torch.arange(6)).sum"
MAIN = "\n\ndef main(args):"
MASK = "losses = losses * batch.mask[episodes, : losses.shape[1]]"
PREPARE = "policy, optimizer = accelerator.prepare(policy, optimizer)"
REGISTER = "    accelerator.register_for_checkpointing(scheduler)\n"
REWARDS = "rewards = scores[:, None]"
FIRST = "first = (iteration - 1) * plan.prompts_per_iteration"
TO_TRAIN = "to_train = mini_batch[(advantages[mini_batch] != 0).any(1)]"
WEIGHTS = "losses = (losses * mask).sum(1, keepdim=True) * weights[episodes]"
BONUS = "entropy_coef * entropies"

SAMPLES, DETACH, DIFFERENCE, _, SCHEDULE, *_ = ({old: ROWS[old]} for old in ROWS)
DETACHED = SAMPLES | DIFFERENCE
HELPER = {
    MAIN: f"\n\ndef halved(\n    scores,\n):\n    return scores / 2\n{MAIN}",
    REWARDS: f"scores = halved(scores)\n        {REWARDS}",
}
SECOND_LOSS = {
    TO_TRAIN: "to_train = mini_batch",
    MASK: f"""squares = (logprobs - ref_logprobs[episodes]).square()
                        losses = losses + 0.1 * squares.sum(1, keepdim=True)
                        {MASK}""",
}
ENTROPY, DYNAMIC = "entropy_bonus.patch", "dynamic_sampling.patch"
PADDED = {
    f"losses = losses - {BONUS}": "",
    WEIGHTS: WEIGHTS.replace("= (losses * mask)", f"= (losses * mask - {BONUS})"),
}
WRONG = "another direction"
# A patch of grpo.py, texts, the loss that is stated, and what is said if the copy has another one.
LOSSES = {
    "helper": (None, HELPER, losses.rloo, None),
    "schedule": (None, SCHEDULE, losses.rloo, None),
    "replay": (None, DETACHED | DETACH, losses.rloo, None),
    "replay, detached": (None, DETACHED, losses.rloo, "update 1 on"),
    "dynamic sampling": (DYNAMIC, {}, losses.grpo, None),
    "token weights": (None, {LOGRATIO: TOKEN_WEIGHTS}, weighted, None),
    "baseline": (
        None,
        {ADVANTAGES: "advantages = scores[:, None] - 0.5"},
        stated["baseline"],
        None,
    ),
    "whole group": (
        None,
        {BASELINE: "(differences.nansum(2) / k)"},
        losses.rloo,
        "0.667 of the length",
    ),
    "sign": (None, {KL: KL.replace("-", "+")}, losses.rloo, WRONG),
    "wide clip": (
        None,
        {CLIP: CLIP.replace(", args", ", 3 * args")},
        losses.rloo,
        "from update [2-9] on",
    ),
    "second loss": (None, SECOND_LOSS, stated["second_loss"], None),
    "second loss, left out": (None, {MASK: SECOND_LOSS[MASK]}, stated["second_loss"], WRONG),
    "entropy": (ENTROPY, {}, stated["entropy"], None),
    "entropy of padding": (ENTROPY, PADDED, stated["entropy"], WRONG),
    "denominator": (
        None,
        {DENOMINATOR: f"{SUM} / batch.mask[mini_batch].sum()"},
        stated["denominator"],
        None,
    ),
    "micro-batch": (None, {DENOMINATOR: f"{SUM} / len(episodes)"}, losses.rloo, "update 1 on"),
    "to_train": (
        None,
        {TO_TRAIN: "to_train = mini_batch[batch.ended[mini_batch]]"},
        stated["to_train"],
        None,
    ),
}


@mark.parametrize("case", LOSSES)
def test_a_copy_is_held_against_a_loss(case, hold, tmp_path, monkeypatch):
    patch, texts, loss, said = LOSSES[case]
    copy = changed("grpo" if patch else "rloo", tmp_path, patch, texts)
    monkeypatch.setattr(copy, "LOGITS_AT_ONCE", 100)  # Four tokens: logits are read in pieces.
    flags = dict(ref_model_path="reference", per_device_train_batch_size=5, learning_rate=0.01)
    if "replay" not in case:
        flags |= dict(num_mini_batches=2, num_ppo_epochs=2, cliprange=0.1)
    if patch or "second" in case:  # Some advantages are 0.
        flags |= dict(reward="seldom", kl_coef=0.0)
    _, rows = hold(copy, loss, **flags)
    _, wrong = oracle.judge(rows)
    assert re.search(said, wrong or "right") if said else wrong is None


# Texts of a copy, how many updates a batch has, and the verdicts after kills and on two processes.
SEEN = """for i, prompt in enumerate(batch.prompts):
            scores[i] += SEEN.get(prompt.text, 0.0)
        SEEN.update((prompt.text, 1.0) for prompt in batch.prompts)"""
LOADED = "state = json.loads(file.read_text())"
RUNS = {
    # The same prompt scores more when it comes again. A resumed run has forgotten.
    "seen": (
        {MAIN: f"\n\nSEEN = {{}}\n{MAIN}", REWARDS: f"{SEEN}\n        {REWARDS}"},
        (1, "BROKEN right", r"iteration 2: score is .*\n.* `state`"),
    ),
    "counter": (
        {
            MAIN: f"\n\nCOUNTER = itertools.count()\n{MAIN}",
            FIRST: "first = next(COUNTER) * plan.prompts_per_iteration",
            "import json\n": "import itertools\nimport json\n",
        },
        (1, "BROKEN right", r"iteration 2: prompt is .*\n.* `state`"),
    ),
    # A running mean that only the main process takes from a checkpoint.
    "main process": (
        {
            LOADED: f"""{LOADED}
        if not accelerator.is_main_process:
            state.pop("mean", None)""",
            REWARDS: f"""state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * scores.mean().item()
        {REWARDS} * (1 + 20 * state["mean"])""",
        },
        (1, "BROKEN right", r"iteration 2: grad_norm is .*\n.* `state`"),
    ),
    "not registered": (
        {REGISTER: ""},
        (1, "BROKEN right", r"iteration 3: lr is .*\n.*`accelerator.register_for_checkpointing`"),
    ),
    "prepared": (
        {PREPARE: PREPARE.replace("optimizer =", "optimizer, scheduler =")[:-1] + ", scheduler)"},
        (1, "right BROKEN", r"iteration 2: lr is .*\n.*never through `prepare`"),
    ),
    # A mean over the process's share of the mini-batch.
    "share": (
        {
            DENOMINATOR: DENOMINATOR[:-1]
            + ".tensor_split(accelerator.num_processes)[accelerator.process_index])",
            "backward(loss * accelerator.num_processes)": "backward(loss)",
        },
        (4, "right BROKEN", r"iteration 1: loss/policy_avg .*\n.* a mean over"),
    ),
    "noise": (
        {MASK: f"{MASK} * torch.rand(len(episodes), 1)"},
        (4, "right BROKEN", r"iteration 1: loss/policy_avg .*\n.* inside of the loop"),
    ),
    "evaluation": (
        {"keyed_rng(args.seed, EVALUATION, iteration)": "np.random.default_rng()"},
        (1, "BROKEN BROKEN", r"iteration 0: eval/.*\n.* `keyed_rng`"),
    ),
}


@mark.slow
@mark.parametrize("case", RUNS)
def test_kills_and_processes(case, tmp_path, capsys):
    texts, (count, verdicts, said) = RUNS[case]
    path = changed("rloo", tmp_path, texts=texts).__file__
    flags = check_copy.make_flags(tmp_path, count)
    assert not check_copy.check_processes(path, flags, tmp_path, tmp_path / "lines")
    printed = capsys.readouterr().out
    assert re.findall(r": (right|BROKEN)[,;]", printed) == verdicts.split(), printed
    assert re.search(said, printed), printed


@mark.slow
def test_a_right_copy(tmp_path):
    """All runs, as a program. No changed line was left out, the `def` of a function neither."""
    copy = changed("rloo", tmp_path, texts=HELPER | SECOND_LOSS | SCHEDULE).__file__
    (tmp_path / "my_loss.py").write_text(STATED)
    command = [sys.executable, HERE / "benchmark/check_copy.py", copy]
    command += ["--loss", tmp_path / "my_loss.py:second_loss"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert re.findall(r": (right|BROKEN)[,;]", ran.stdout) == ["right"] * 6, ran.stderr
    assert ran.stdout.endswith("iterations\nright\n") and "not exec" not in ran.stdout, ran.stdout
    assert ran.returncode == 0 and not ran.stderr


# A patch of grpo.py, texts, more arguments, the exit status, and what is said.
FLAG = {
    "    # optimizer\n": "    bonus: bool = False  # for each completion\n    # optimizer\n",
    REWARDS: f"{REWARDS}\n        if args.bonus:\n            rewards = rewards + 1",
}
TWICE = {SUM: f"2 * {SUM}"}
MINE = "benchmark/losses.py:rloo"
RIGHT = r"\nnot judged: sampl.*\nright\n$"
FAR = r"\nright, as far as it was judged\n$"
NO_FILE = "--loss no.py:loss: there is no such file; it is FILE.py:FUNCTION"
VERDICTS = {
    "right": (None, FLAG, None, ["--bonus"], 0, f"rloo, in all 24 .*{RIGHT}"),
    "patch": (DYNAMIC, {}, None, [], 0, f"grpo, in all 24 .*{RIGHT}"),
    "not judged": (
        *(None, FLAG | TWICE, None, [], 0),
        rf"2 of the length(.|\n)*line \d+: rewards = .*\nnot judged: the loss.*\n.*{FAR}",
    ),
    "stated": (None, TWICE, MINE, [], 1, r"2 of the length(.|\n)*\nBROKEN\n$"),
    "no file": (None, {}, "no.py:loss", [], NO_FILE, "^$"),
}


@mark.slow
@mark.parametrize("case", VERDICTS)
def test_verdicts(case, tmp_path, monkeypatch, capsys):
    """About the loss and the lines. No other runs are made."""
    patch, texts, loss, flags, status, said = VERDICTS[case]
    copy = changed("grpo" if patch else "rloo", tmp_path, patch, texts).__file__
    monkeypatch.setattr(check_copy, "check_processes", lambda *_: True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(HERE)
    with raises(SystemExit) as stopped:
        check_copy.main(check_copy.Args(Path(copy), loss), flags)
    printed = capsys.readouterr().out
    assert re.search(said, printed), printed
    assert stopped.value.code == status
