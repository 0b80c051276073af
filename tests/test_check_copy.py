"""benchmark/check_copy.py: copies that are right, and copies with a fault in one stage."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import check_copy
import losses
import stages
import torch
import tyro
from conftest import HERE, MODULES, changed, fresh_imports, import_file, reset_accelerate
from pytest import fixture, mark, raises
from test_pages import read
from test_patches import ROWS

# docs/variants.md states losses.
BLOCK = re.search(r"^    from types import.*?(?=^\S)", read(HERE / "docs/variants.md"), re.M | re.S)
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
ADVANTAGES = "advantages = rloo_advantages(rewards, args.k)"
CLIP = "clipped_policy_loss(logratio, advantages, args.cliprange, args.cliprange)"
DENOMINATOR = "(losses * is_real[:, None]).sum() / len(mini_batch)"
DRAWN = "drawn = [prompts[index] for index in indices]"
HAS_GRADIENT = "has_gradient = (advantages != 0).any(1)"
KL = "rewards = rewards - args.kl_coef * kl"
LAST_TOKEN = "rewards[torch.arange(num_episodes), batch.mask.sum(1) - 1] += scores.float()"
LOADED = "accelerator.load_state(str(newest))"
LOGRATIO = "logratio = (logprobs - old_logprobs).sum(1, keepdim=True)"
MAIN = "\n\ndef main(args):"
MASK = "losses = losses * batch.mask[episodes, : losses.shape[1]]"
OPTIMIZER = "lr=args.learning_rate, weight_decay=args.weight_decay"
PENALTY = "scores = scores - args.missing_eos_penalty * ~batch.ended"
PREPARE = "policy, optimizer = accelerator.prepare(policy, optimizer)"
REFERENCE = "one_pass = partial(token_logprobs, args, reference, batch)"
REGISTER = "    accelerator.register_for_checkpointing(scheduler)\n"
REWARDS = "rewards = scores[:, None]"
STEP = "                optimizer.step()\n                scheduler.step()\n"
SKIPPED = "(losses[~has_gradient[episodes]] == 0).all()"
VALUE_LOSS = "return 0.5 * torch.maximum(losses, clipped_losses)"
WEIGHTS = "losses = (losses * mask).sum(1, keepdim=True) * weights[episodes]"

SAMPLES, DETACH, DIFFERENCE, _, SCHEDULE, *_ = ({old: ROWS[old]} for old in ROWS)
BONUS = {
    MASK: f"""squares = (logprobs - ref_logprobs[episodes]).square()
                        losses = losses + 0.1 * squares.sum(1, keepdim=True)
                        {MASK}"""
}
ALL = {HAS_GRADIENT: "has_gradient = torch.ones(num_episodes, dtype=torch.bool)"}
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
    "baseline": {ADVANTAGES: "advantages = rewards - 0.5"},
    "whole group": {"(differences.nansum(2) / others.clamp(min=1))": "(differences.nansum(2) / k)"},
    "sign": {KL: KL.replace("-", "+")},
    "wide clip": {CLIP: CLIP.replace(", args", ", 3 * args")},
    "second loss": BONUS | ALL,
    "bonus left out": BONUS | {SKIPPED: "True", " | (iteration <= 3)]": "]"},
    "entropy of padding": {
        "                        losses = losses - entropy_coef * entropies\n": "",
        WEIGHTS: WEIGHTS.replace("= (losses * mask", "= (losses * mask - entropy_coef * entropies"),
    },
    "denominator": {
        DENOMINATOR: DENOMINATOR.replace("len(mini_batch)", "batch.mask[mini_batch].sum()")
    },
    "micro-batch": {DENOMINATOR: DENOMINATOR.replace("mini_batch", "episodes")},
    "to_train": {
        HAS_GRADIENT: f"{HAS_GRADIENT} & batch.ended",
        " | (iteration <= 3)]": "]",
        SKIPPED: "True",
    },
    # kills and processes
    "counter": {
        MAIN: f"\n\nCOUNTER = iter(range(100))\n{MAIN}",
        "first = (iteration - 1) *": "first = next(COUNTER) *",
    },
    # A running mean that a checkpoint gives back only to as many processes.
    "as many": {
        REWARDS: f"""state["n"] = accelerator.num_processes
        state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * scores.nanmean().item()
        {REWARDS} * (1 + 20 * state["mean"])""",
        LOADED: f"{LOADED}\n            state['mean'] *= state['n'] == accelerator.num_processes",
    },
    "not registered": {REGISTER: ""},
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
    # stages
    "hash": {DRAWN: f"{DRAWN}\n        drawn.sort(key=lambda prompt: hash(prompt.text))"},
    "cut off": {"ended[running] = has_ended": "ended[running] = has_ended | (t == response - 1)"},
    "penalty": {PENALTY: PENALTY.replace("- args", "+ args")},
    "sum": {"sum(values) if values else nan": "sum(values)"},
    "policy": {REFERENCE: REFERENCE.replace("reference", "policy")},
    "first": {
        "return episodes.tensor_split(": "return [episodes[:5]] * args.num_mini_batches or ("
    },
    "no decay": {OPTIMIZER: "lr=args.learning_rate"},
    "two steps": {STEP: f"                optimizer.step()\n{STEP}"},
    "one optimizer": {"                    value_optimizer.step()\n": ""},
    "no clip": {"(policy.parameters(), args.max_grad_norm)": "(policy.parameters(), inf)"},
    "constant": {STEP: STEP.splitlines(True)[0]},
    "temperature": {"k, rng, args.eval_temperature)": "k, rng, args.temperature)"},
    "saved": {
        "    weights = accelerator.get_state_dict(model)": "    model.lm_head.weight.data *= 1.01"
        "\n    weights = accelerator.get_state_dict(model)"
    },
    "bootstrap": {"next_value = torch.zeros_like(rewards[:, 0])": "next_value = values[:, -1]"},
    "value clip": {VALUE_LOSS: "return 0.5 * losses"},
    "others": {"(~groups.isnan()).sum(1, keepdim=True) - 1": "torch.tensor(k - 1)"},
    "low clip": {"ratio.clamp(1 - low, 1 + high)": "ratio.clamp(max=1 + high)"},
    # of papers
    "KL in the loss": ALL
    | {
        KL: "rewards = rewards",
        MASK: f"""kl = torch.nn.functional.hardshrink(ref_logprobs[episodes] - logprobs, 1e-4)
                        kl = (kl.exp() - kl - 1).sum(1, keepdim=True)
                        losses = losses + args.kl_coef * kl
                        {MASK}""",
    },
    "annealed": {
        PENALTY: f"""{PENALTY}
        anneal = 1 - iteration / plan.iterations
        scores = scores - 0.1 * anneal * batch.mask.sum(1)"""
    },
    "average": {
        STEP: STEP
        + """                for weight, new in zip(reference.parameters(), policy.parameters()):
                    weight.data.lerp_(new.data, 0.1)
""",
        REGISTER: f"{REGISTER}    accelerator.register_for_checkpointing(reference)\n",
    },
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
    _, wrong = stages.judge_gradients(hold(copy, stated[loss], **flags)[1])
    assert re.search(said, wrong.about) if said else wrong is None


# What was copied, the copy, which of the small runs is made, with which flags, and what is said
# first that is no usual line.
STAGES = r"""
rloo | unchanged       | 1 |                          |
grpo | unchanged       | 2 |                          |
ppo  | unchanged       | 2 |                          |
rloo | unchanged       | 1 | --lora-r 4               |
rloo | helper          | 2 | --changed scores         | changed: scores
rloo | KL in the loss  | 2 | --loss kl_in_loss        |
rloo | second loss     | 1 | --loss second_loss       |
rloo | annealed        | 1 | --changed scores         | changed: scores. .* iteration 1, episode
rloo | average         | 2 | --changed reference      | changed: reference. .* iteration 2,
rloo | schedule        | 1 | --changed schedule       | changed: schedule
rloo | annealed        | 1 | --changed prompts scores | judged: prompts: it is named
rloo | hash            | 1 |                          | prompts. .*, in iteration 1, rows
rloo | cut off         | 1 |                          | sampling. .*, ended: True, and not False
rloo | penalty         | 2 |                          | scores. .*, in iteration 1, episode
rloo | sum             | 1 |                          | scores. .*: 0, and not nan
rloo | policy          | 1 |                          | reference. .*, in iteration 2, episode 0
rloo | first           | 2 |                          | mini-batches. .* PPO epoch 1, episodes
rloo | no decay        | 2 |                          | optimizer. .* weight_decay 0.01,
rloo | two steps       | 1 |                          | steps. .*: steps of AdamW 1: 2, and not 1
ppo  | one optimizer   | 1 |                          | steps. .*: steps of AdamW 2: 0, and not 1
rloo | no clip         | 1 |                          | steps. .* from the clipped gradient
rloo | constant        | 1 |                          | schedule. .*, update 2: rate: 0.001, and
rloo | temperature     | 1 |                          | evaluation. .* iteration 0, .*, tokens
rloo | saved           | 1 |                          | result. .*/, from what the last step left,
ppo  | bootstrap       | 2 |                          | the loss is not losses.py:ppo
ppo  | value clip      | 2 |                          | the gradient of ValueModel
rloo | others          | 1 |                          | another direction. Only episodes
rloo | low clip        | 2 |                          | differ that are where a clip acts
rloo | bonus left out  | 2 | --loss second_loss       | of advantage 0
rloo | unchanged       | 2 | --learning-rate 0        | judged: ratios above the clip
ppo  | unchanged       | 2 | --learning-rate 0        | judged: values outside of the clip
rloo | unchanged       | 1 | --reward none            | judged: episodes without a score
rloo | unchanged       | 1 | --max-grad-norm 1000     | judged: gradients clipped
rloo | unchanged       | 1 | --response-length 30     | judged: completions cut off
"""


@fixture
def judge(tmp_path, monkeypatch):
    """judge(path, script, run, loss, changed, flags): the stages of a copy, by two iterations of
    one of the small runs, in this process."""

    def run_here(path, flags, *edits):
        module = import_file(Path(path))
        for edit in edits:
            edit(module)
        words = [*flags.split(), "--output-dir", str(tmp_path / "run")]
        reset_accelerate()
        with fresh_imports():
            module.main(tyro.cli(module.Args, args=words))
        return module.found

    def judge(path, script, number, loss, changed, flags):
        about = list(check_copy.SMALL_RUNS)[int(number) - 1]
        with monkeypatch.context() as patch:
            patch.setattr(check_copy, "SMALL_RUNS", {about: check_copy.SMALL_RUNS[about]})
            patch.setattr(check_copy, "run", run_here)
            patch.setattr(check_copy, "coverage", None)
            words = check_copy.make_flags(tmp_path, script, ["--total-episodes 32", *flags])
            stated = loss or f"{HERE}/benchmark/losses.py:{script}"
            args = check_copy.Args(Path(path), stated, tuple(changed))
            return check_copy.check_stages(path, script, words, stated, args, tmp_path)

    return judge


@cells(STAGES)
def test_stages(line, judge, tmp_path, capsys):
    script, name, number, flags, said = map(str.strip, line.split("|"))
    (tmp_path / "my_loss.py").write_text(STATED)
    options, flags = tyro.cli(
        check_copy.Args, args=["copy", *flags.split()], return_unknown_args=True
    )
    loss = options.loss and f"{tmp_path}/my_loss.py:{options.loss}"
    path = copy_of(script, name, tmp_path).__file__
    is_right, not_judged = judge(path, script, number, loss, options.changed, flags)
    said_all = capsys.readouterr().out + "".join(f"judged: {reason}\n" for reason in not_judged)
    assert re.search(said, said_all), said_all
    assert is_right == (said.startswith(("changed", "judged")) or not said), said_all


# The copy, how many updates a batch has, which comparison is broken, and the first thing that
# differs. 1: other micro-batches, another PYTHONHASHSEED; 2: two processes; 3: after two kills;
# 4: killed on one process, resumed on two
RUNS = r"""
hash           | 1 | 1 | iteration 1: prompt .*\n.* the order of a set
noise          | 4 | 2 | iteration 1: loss/policy_avg .*\n.* inside of the loop
prepared       | 1 | 2 | iteration 2: lr is .*\n.*never through `prepare`
share          | 4 | 2 | iteration 1: loss/policy_avg .*\n.* a mean over
counter        | 1 | 3 | iteration 2: prompt is .*\n.* `state`
not registered | 1 | 3 | iteration 3: lr is .*\n.*`accelerator.register_for_
as many        | 1 | 4 | iteration 2: .*\n.* `state`
"""


@mark.slow
@cells(RUNS)
def test_kills_and_processes(line, tmp_path, capsys, monkeypatch):
    name, count, broken, said = map(str.strip, line.split("|"))
    path = copy_of("rloo", name, tmp_path).__file__
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    flags = check_copy.make_flags(tmp_path, "rloo")
    folder = tmp_path / "runs"
    assert not check_copy.check_processes(path, flags, folder, tmp_path / "lines", count)
    printed = capsys.readouterr().out
    verdicts = ["right"] * (int(broken) - 1) + ["BROKEN"]
    assert re.findall(r": (right|BROKEN)[,;]", printed) == verdicts, printed
    assert re.search(said, printed), printed


def check(path, *words):
    command = [sys.executable, HERE / "benchmark/check_copy.py", path, *words]
    return subprocess.run(command, capture_output=True, text=True)


@mark.slow
def test_a_right_copy(tmp_path):
    """All runs, as a program, of a copy in another folder. No changed line was left out, the `def`
    of a function neither."""
    path = copy_of("rloo", "right", tmp_path / "copied").__file__
    path = Path(path).rename(tmp_path / "my_rloo.py")
    (tmp_path / "my_loss.py").write_text(STATED)
    words = ["--changed", "scores", "schedule"]
    ran = check(path, "--loss", tmp_path / "my_loss.py:second_loss", *words)
    assert re.findall(r": (right|BROKEN)[,;]", ran.stdout) == ["right"] * 8, ran.stdout + ran.stderr
    assert (
        ran.stdout.endswith("\nright, as far as it was judged\n") and "not exec" not in ran.stdout
    ), ran.stdout
    assert ran.returncode == 0 and not ran.stderr


# A loss, as it is written, and what is said about it.
FAULTY = {
    "def loss(mini_batch, batch, args)\n": "SyntaxError",
    "def other(mini_batch, batch, args):\n    pass": "no function of this name",
    "def loss(mini_batch, batch):\n    pass": r"it takes \(mini_batch, batch\), and not",
    "def loss(m, batch, args):\n    pass": "it returns None",
    "def loss(m, batch, args):\n    return m[0].logprobs": "a tensor of shape",
    "def loss(m, batch, args):\n    return m[0].logprobs.sum().detach()": "is it detached",
    "def loss(m, batch, args):\n    return m[0].logprobs.sum() / 0": "it returns -inf",
    "def loss(m, batch, args):\n    return m[0].rewards": "no attribute 'rewards'.*in line 2",
}


@mark.parametrize("text", FAULTY)
def test_a_faulty_loss(text, hold, tmp_path):
    (tmp_path / "faulty.py").write_text(text)
    with fresh_imports(), raises(stages.Misstated, match=FAULTY[text]):
        hold(MODULES["rloo"], stages.load_loss(f"{tmp_path}/faulty.py:loss"), total_episodes=12)


NO_LOSS = "--loss no.py:loss: there is no such file; it is FILE.py:FUNCTION\n"
# The copy, its flags, the exit status, and what is said.
VERDICTS = {
    "not judged": (
        *("flag, twice", [], 0),
        r"2 of the length(.|\n)*line \d+: rewards = .*\nnot judged: the loss.*\n.*kills\nright, as",
    ),
    "stated": (
        "twice",
        ["--loss", "benchmark/losses.py:rloo"],
        1,
        r"2 of the len(.|\n)*\nBROKEN\n$",
    ),
    "no loss": ("unchanged", ["--loss", "no.py:loss"], 1, f"^{NO_LOSS}$"),
    "no copy": (None, [], 1, "^.*no.py: there is no such file\n$"),
}


@mark.slow
@mark.parametrize("case", VERDICTS)
def test_verdicts(case, tmp_path):
    name, words, status, said = VERDICTS[case]
    path = copy_of("rloo", name, tmp_path).__file__ if name else tmp_path / "no.py"
    ran = check(path, "--stages-only", *words)
    assert re.search(said, ran.stdout + ran.stderr), ran.stdout + ran.stderr
    assert ran.returncode == status
