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
stated = dict(vars(losses))
exec(STATED, stated)


def weighted(mini_batch, batch, args):
    """The second token counts half, the third one a quarter, and so on."""
    for episode in mini_batch:
        weights = 0.5 ** torch.arange(len(episode.token_ids))
        change = episode.logprobs - episode.old_logprobs
        episode.logprobs = episode.old_logprobs + weights * change
    return losses.rloo(mini_batch, batch, args)


stated["weighted"] = weighted

# Texts of rloo.py, of ppo.py, and of grpo.py with the entropy bonus.
CLIP = "clipped_policy_loss(logratio, advantages, args.cliprange, args.cliprange)"
DENOMINATOR = "(losses * is_real[:, None]).sum() / len(mini_batch)"
KL = "rewards = rewards - args.kl_coef * kl"
LAST_TOKEN = "rewards[torch.arange(num_episodes), batch.mask.sum(1) - 1] += scores.float()"
LOADED = "accelerator.load_state(str(newest))"
LOGRATIO = "logratio = (logprobs - old_logprobs).sum(1, keepdim=True)"
MAIN = "\n\ndef main(args):"
MASK = "losses = losses * batch.mask[episodes, : losses.shape[1]]"
PREPARE = "policy, optimizer = accelerator.prepare(policy, optimizer)"
REWARDS = "rewards = scores[:, None]"
TO_TRAIN = "to_train = mini_batch[(advantages[mini_batch] != 0).any(1)]"
WEIGHTS = "losses = (losses * mask).sum(1, keepdim=True) * weights[episodes]"

SAMPLES, DETACH, DIFFERENCE, _, SCHEDULE, *_ = ({old: ROWS[old]} for old in ROWS)
BONUS = {
    MASK: f"""squares = (logprobs - ref_logprobs[episodes]).square()
                        losses = losses + 0.1 * squares.sum(1, keepdim=True)
                        {MASK}"""
}
HELPER = {
    MAIN: f"\n\ndef halved(\n    scores,\n):\n    return scores / 2\n{MAIN}",
    REWARDS: f"scores = halved(scores)\n        {REWARDS}",
}
# The texts of each copy, and what takes their place.
COPIES = {
    "unchanged": {},
    # right, or another loss
    "helper": HELPER,
    "schedule": SCHEDULE,
    "replay": SAMPLES | DIFFERENCE | DETACH,
    "detached replay": SAMPLES | DIFFERENCE,
    "token weights": {
        LOGRATIO: "logratio = ((logprobs - old_logprobs) * 0.5 ** torch.arange(6)).sum(1, True)"
    },
    "token reward": {LAST_TOKEN: f"{LAST_TOKEN}\n        rewards -= 0.1 * batch.mask"},
    "baseline": {"advantages = rloo_advantages(rewards, args.k)": "advantages = rewards - 0.5"},
    "whole group": {"(differences.nansum(2) / others.clamp(min=1))": "(differences.nansum(2) / k)"},
    "sign": {KL: KL.replace("-", "+")},
    "wide clip": {CLIP: CLIP.replace(", args", ", 3 * args")},
    "second loss": BONUS | {TO_TRAIN: "to_train = mini_batch"},
    "bonus left out": BONUS,
    "entropy of padding": {
        "losses = losses - entropy_coef * entropies\n": "",
        WEIGHTS: WEIGHTS.replace("= (losses * mask", "= (losses * mask - entropy_coef * entropies"),
    },
    "denominator": {
        DENOMINATOR: DENOMINATOR.replace("len(mini_batch)", "batch.mask[mini_batch].sum()")
    },
    "micro-batch": {DENOMINATOR: DENOMINATOR.replace("mini_batch", "episodes")},
    "to_train": {TO_TRAIN: "to_train = mini_batch[batch.ended[mini_batch]]"},
    # kills and processes
    "counter": {
        MAIN: f"\n\nCOUNTER = iter(range(100))\n{MAIN}",
        "first = (iteration - 1) *": "first = next(COUNTER) *",
    },
    # A running mean that a checkpoint gives back only to as many processes.
    "as many": {
        REWARDS: f"""state["n"] = accelerator.num_processes
        state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * scores.mean().item()
        {REWARDS} * (1 + 20 * state["mean"])""",
        LOADED: f"{LOADED}\n            state['mean'] *= state['n'] == accelerator.num_processes",
    },
    "not registered": {"    accelerator.register_for_checkpointing(scheduler)\n": ""},
    "prepared": {
        PREPARE: "policy, optimizer, scheduler = accelerator.prepare(policy, optimizer, scheduler)"
    },
    # A mean over the process's share of the mini-batch.
    "share": {
        DENOMINATOR: DENOMINATOR[:-1]
        + ".tensor_split(accelerator.num_processes)[accelerator.process_index])",
        "backward(loss * accelerator.num_processes)": "backward(loss)",
    },
    "noise": {MASK: f"{MASK} * torch.rand(len(episodes), 1)"},
    "evaluation": {"keyed_rng(args.seed, EVALUATION, iteration)": "np.random.default_rng()"},
    # the verdict
    "flag": {
        "    # optimizer\n": "    bonus: bool = False  # for each completion\n    # optimizer\n",
        REWARDS: f"{REWARDS}\n        if args.bonus:\n            rewards = rewards + 1",
    },
    "twice": {DENOMINATOR: f"2 * {DENOMINATOR}"},
}
COPIES["flag, twice"] = COPIES["flag"] | COPIES["twice"]
COPIES["right"] = HELPER | SCHEDULE | COPIES["second loss"]


def copy_of(script, name, folder):
    """A copy of a script, or of grpo.py with a patch."""
    patch = None
    if script.endswith(".patch"):
        script, patch = "grpo", script
    return changed(script, folder, patch, COPIES[name])


# What was copied, the copy, the loss that is stated, and what is said if it has another one.
LOSSES = """
rloo | helper          | rloo         |
rloo | schedule        | rloo         |
rloo | replay          | rloo         |
rloo | detached replay | rloo         | update 1 on
rloo | token weights   | weighted     |
ppo  | token reward    | token_reward |
rloo | baseline        | baseline     |
rloo | whole group     | rloo         | the same direction, and 0.667 of the length
rloo | sign            | rloo         | another direction
rloo | wide clip       | rloo         | from update [2-9] on
rloo | second loss     | second_loss  |
rloo | bonus left out  | second_loss  | another direction
rloo | denominator     | denominator  |
rloo | micro-batch     | rloo         | update 1 on
rloo | to_train        | to_train     |
entropy_bonus.patch    | unchanged          | entropy |
entropy_bonus.patch    | entropy of padding | entropy | another direction
dynamic_sampling.patch | unchanged          | grpo    |
"""


def cells(table):
    return mark.parametrize("line", table.strip().splitlines())


@cells(LOSSES)
def test_a_copy_is_held_against_a_loss(line, hold, tmp_path, monkeypatch):
    script, name, loss, said = map(str.strip, line.split("|"))
    copy = copy_of(script, name, tmp_path)
    monkeypatch.setattr(copy, "LOGITS_AT_ONCE", 100)  # Four tokens: logits are read in pieces.
    flags = dict(ref_model_path="reference", per_device_train_batch_size=5, learning_rate=0.01)
    if "replay" not in name:
        flags |= dict(num_mini_batches=2, num_ppo_epochs=2, cliprange=0.1)
    if "patch" in script or loss in ("second_loss", "baseline"):
        flags |= dict(reward="seldom", kl_coef=0.0)  # Some advantages are 0.
    _, wrong = oracle.judge(hold(copy, stated[loss], **flags)[1])
    assert re.search(said, wrong or "right") if said else wrong is None


# The copy, how many updates a batch has, which comparison is broken, and the first thing that
# differs. 1: two processes, or one; 2: after two kills; 3: killed on one process, resumed on two
RUNS = r"""
prepared       | 1 | 1 | iteration 2: lr is .*\n.*never through `prepare`
share          | 4 | 1 | iteration 1: loss/policy_avg .*\n.* a mean over
noise          | 4 | 1 | iteration 1: loss/policy_avg .*\n.* inside of the loop
evaluation     | 1 | 1 | iteration 0: eval/.*\n.* `keyed_rng`
counter        | 1 | 2 | iteration 2: prompt is .*\n.* `state`
not registered | 1 | 2 | iteration 3: lr is .*\n.*`accelerator.register_for_
as many        | 1 | 3 | iteration 2: .*\n.* `state`
"""


@mark.slow
@cells(RUNS)
def test_kills_and_processes(line, tmp_path, capsys):
    name, count, broken, said = map(str.strip, line.split("|"))
    path = copy_of("rloo", name, tmp_path).__file__
    flags = check_copy.make_flags(tmp_path, count)
    assert not check_copy.check_processes(path, flags, tmp_path, tmp_path / "lines")
    printed = capsys.readouterr().out
    verdicts = ["right"] * (int(broken) - 1) + ["BROKEN"]
    assert re.findall(r": (right|BROKEN)[,;]", printed) == verdicts, printed
    assert re.search(said, printed), printed


@mark.slow
def test_a_right_copy(tmp_path):
    """All runs, as a program. No changed line was left out, the `def` of a function neither."""
    path = copy_of("rloo", "right", tmp_path).__file__
    (tmp_path / "my_loss.py").write_text(STATED)
    command = [sys.executable, HERE / "benchmark/check_copy.py", path]
    command += ["--loss", tmp_path / "my_loss.py:second_loss"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert re.findall(r": (right|BROKEN)[,;]", ran.stdout) == ["right"] * 6, ran.stdout + ran.stderr
    assert ran.stdout.endswith("iterations\nright\n") and "not exec" not in ran.stdout, ran.stdout
    assert ran.returncode == 0 and not ran.stderr


FAR = r"\nright, as far as it was judged\n$"
NO_FILE = "--loss no.py:loss: there is no such file; it is FILE.py:FUNCTION"
# What was copied, the copy, --loss, flags, the exit status, and what is said.
VERDICTS = {
    "right": ("rloo", "flag", None, ["--bonus"], 0, r"rloo, in all 24 .*\nnot .*\nright\n$"),
    "not judged": (
        *("rloo", "flag, twice", None, [], 0),
        rf"2 of the length(.|\n)*line \d+: rewards = .*\nnot judged: the loss.*\n.*{FAR}",
    ),
    "stated": ("rloo", "twice", "benchmark/losses.py:rloo", [], 1, r"2 of the(.|\n)*\nBROKEN\n$"),
    "patch": ("dynamic_sampling.patch", "unchanged", None, [], 0, r"grpo, in .*\n.*\nright\n$"),
    "no file": ("rloo", "unchanged", "no.py:loss", [], NO_FILE, "^$"),
}


@mark.slow
@mark.parametrize("case", VERDICTS)
def test_verdicts(case, tmp_path, monkeypatch, capsys):
    """About the loss and the lines. No other runs are made."""
    script, name, loss, flags, status, said = VERDICTS[case]
    path = copy_of(script, name, tmp_path).__file__
    monkeypatch.setattr(check_copy, "check_processes", lambda *_: True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(HERE)
    with raises(SystemExit) as stopped:
        check_copy.main(check_copy.Args(Path(path), loss), flags)
    printed = capsys.readouterr().out
    assert re.search(said, printed), printed
    assert stopped.value.code == status
