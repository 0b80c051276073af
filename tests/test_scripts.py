"""The three scripts as texts and as programs: what may differ, flags, metrics, what is written."""

import ast
import dataclasses
import io
import itertools
import json
import operator
import os
import re
import subprocess
import sys
import tokenize
from unittest.mock import Mock

import tyro
import yaml
from conftest import (
    HERE,
    MODULES,
    SCRIPTS,
    base_flags,
    group_flag,
    launched,
    one_text,
    option,
    read_jsonl,
    result_of,
)
from pytest import approx, mark, raises, warns

# What has the same name in two scripts is the same text in both, comments included. This table
# lists the exceptions, each with its reason. If you need another one, add a line.
DIFFERENT = {
    "main": "each algorithm has its own rewards, advantages and loss",
    "update_metrics": "each loss has its own denominator and its own clips",
    "check_flags": "each script checks the flags that only it has",
    "Args.k": "the flag has the name from each paper; in PPO a group is one episode",
    "Args.kl_coef": "in GRPO the KL is in the loss, and it is off by default",
    "Args.num_ppo_epochs": "PPO's value model needs more updates with a rollout",
    "Args.learning_rate": "it names RATES",
    "RATES": "at RLOO's rate, rounding grows faster in PPO, and changes more completions",
    "Args.num_train_epochs": "PPO samples one completion of a prompt, so it needs more epochs",
}


def source_of(name):
    return (HERE / f"{name}.py").read_text(encoding="utf-8")


def named_parts(name):
    """The lines of each function, class, constant and flag of a script. The class Args is no part,
    but each name in it is one."""
    lines = source_of(name).splitlines()
    parts = {}

    def add(nodes, prefix=""):
        for node in nodes:
            key = getattr(node, "name", lines[node.lineno - 1].split()[0].rstrip(":"))
            if key == "Args":
                add(node.body, "Args.")
            elif not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)):
                parts[prefix + key] = "\n".join(lines[node.lineno - 1 : node.end_lineno])

    add(ast.parse(source_of(name)).body)
    return parts


def test_the_scripts_do_not_drift():
    """What has the same name is the same text, except what the table lists."""
    differing = set()
    for a, b in itertools.combinations(map(named_parts, SCRIPTS), 2):
        differing |= {name for name in a.keys() & b.keys() if a[name] != b[name]}
    assert differing == DIFFERENT.keys(), "make the texts equal, or change DIFFERENT"


LIMITS = {  # tokens of the script, and of its lecture, which stands above the banner MACHINERY
    "rloo": (11_100, 3_760),
    "grpo": (11_540, 4_140),
    "ppo": (12_300, 4_410),
}


def count_tokens(text):
    """Comments and docstrings are no tokens."""
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        word = token.string.strip()
        if word and not word.startswith(("#", '"""')):
            count += 1
    return count


@mark.parametrize("name", SCRIPTS)
def test_a_script_is_short(name):
    lecture, banner, _ = source_of(name).partition("= MACHINERY =")
    assert banner, f"{name}.py has no banner MACHINERY, which ends its lecture"
    tokens = count_tokens(source_of(name)), count_tokens(lecture)
    assert all(map(operator.le, tokens, LIMITS[name])), (
        f"{name}.py and its lecture have {tokens} tokens, and the limits are {LIMITS[name]}."
        " Write it shorter. If that makes it worse for a reader, raise the limit, and say why."
    )


def letters_of(text):
    """The letters and digits of a text. --help breaks lines, draws boxes, and quotes otherwise."""
    return re.sub(r"[^A-Za-z0-9]", "", text)


def test_help_documents_every_flag(script, capsys, monkeypatch):
    """Each flag has a comment in its line or a docstring below it, and --help shows it. The script
    reads each flag."""
    monkeypatch.setenv("COLUMNS", "200")
    with raises(SystemExit):
        tyro.cli(script.Args, args=["--help"], description=script.__doc__)
    text = capsys.readouterr().out
    source = source_of(script.__name__)
    for name in script.Args.__dataclass_fields__:
        found = re.search(
            rf'\n    {name}: .*?(?:  # |\n    """)(.+?)(?:"""|\n    [a-z#])', source, re.S
        )
        assert len(found[1].split()) >= 3, f"{name}: what does it do?"
        assert letters_of(found[1]) in letters_of(text), name
        assert option(name) in text
        assert re.search(rf"\b(args|self)\.{name}\b", source), f"nothing reads args.{name}"


# For each flag another value.
other_values = yaml.safe_load("""
seed: 2
dtype: bfloat16
model_path: gpt2
lora_r: 2
ref_model_path: reference
dataset: 9
max_prompt_length: 8
reward: number
reward_model_path: classifier
eval_dataset: 5
eval_every: 1
eval_temperature: 1.0
eval_k: 2
eval_reward: five
num_train_epochs: 3.0
total_episodes: 12
batch_size: 6
num_mini_batches: 1
num_ppo_epochs: 1
response_length: 4
temperature: 0.7
stop_token_id: 7
stop_string: "1"
rloo_k: 2
num_generations: 2
kl_coef: 0.5
cliprange: 0.001
cliprange_high: 0.001
scale_rewards: none
loss_type: dapo
importance_sampling_level: sequence
mask_truncated_completions: true
value_model_path: reference
kl_estimator: k3
adaptive_kl: true
kl_target: 1000.0
kl_horizon: 50
gamma: 0.9
lam: 0.5
cliprange_value: 0.001
vf_coef: 1.0
target_kl: 0.000001
ratio_threshold: 1.0
whiten_advantages: false
whiten_rewards: true
score_scaling: true
score_norm: true
score_clip: 0.5
missing_eos_penalty: 3.0
lr_scheduler_type: cosine
learning_rate: 0.02
weight_decay: 0.5
warmup_steps: 3
max_grad_norm: 0.01
save_rollouts: false
""")
# The flags with which another value matters, in both runs.
needed_flags = yaml.safe_load("""
dtype: {num_ppo_epochs: 1, num_mini_batches: 1}
model_path: {ref_model_path: reference}
eval_every: {eval_dataset: 5}
eval_temperature: {eval_dataset: 5}
eval_k: {eval_dataset: 5, eval_temperature: 1.0}
eval_reward: {eval_dataset: 5}
num_train_epochs: {total_episodes: null}
kl_coef: {ref_model_path: reference}
kl_estimator: {ref_model_path: reference}
adaptive_kl: {kl_horizon: 50}
kl_target: {ref_model_path: reference, adaptive_kl: true, kl_horizon: 60}
kl_horizon: {ref_model_path: reference, adaptive_kl: true, kl_horizon: 60}
""")
# Other tests cover these.
ELSEWHERE = """
    output_dir plan resume save_every log_with share_prompts gradient_checkpointing
    per_device_train_batch_size per_device_rollout_batch_size num_sample_generations cuda_graphs
""".split()
# Each flag is tried in the first script that has it. In the others the drift test holds the text
# that reads it.
FIRST_WITH = {
    field.name: name
    for name in reversed(SCRIPTS)
    for field in dataclasses.fields(MODULES[name].Args)
}
TRIED = [flag for flag in FIRST_WITH if flag not in ELSEWHERE]


def test_every_flag_is_tried():
    """The slow test below knows another value of each flag."""
    about = "give each flag another value, which changes a run, or name it in ELSEWHERE"
    assert set(TRIED) == other_values.keys(), about
    assert {*needed_flags, *ELSEWHERE} <= FIRST_WITH.keys()
    # A run that goes on may change these, and what is shown or kept.
    shown = """
        dataset eval_dataset eval_every eval_temperature eval_k eval_reward save_rollouts
        processes versions
    """
    for module in MODULES.values():
        assert set(module.FREE_FLAGS) == {*ELSEWHERE, *shown.split()}


@mark.slow
@mark.parametrize("flag", TRIED)
def test_changing_a_flag_changes_the_run(run, flag, cache={}):
    """Another value of a flag changes the metrics, the weights or the rollouts of a run."""
    script = MODULES[FIRST_WITH[flag]]
    usual = dict(num_ppo_epochs=2, num_mini_batches=2, learning_rate=0.01, kl_coef=0.1)
    usual |= dict(batch_size=12, total_episodes=24)
    needs = usual | needed_flags.get(flag, {})
    key = script.__name__, repr(needs)
    if key not in cache:
        cache[key] = result_of(run(script, **needs).folder)
    name = "k" if flag == group_flag(script) else flag
    changed = needs | {name: other_values[flag]}
    assert result_of(run(script, **changed).folder) != cache[key]


def test_every_logged_metric_is_documented_and_not_always_zero(script, run):
    """docs/metrics.md has a row for each metric that a script logs, and for no other. A row may
    name the only scripts that log it. In this run each metric is different from 0 at least once,
    and all are finite."""
    flags = dict(
        num_mini_batches=2,
        num_ppo_epochs=2,
        learning_rate=0.02,
        num_train_epochs=3,
        cliprange=0.02,
        kl_coef=0.1,
        ref_model_path="reference",
        model_path="many_eos",
        batch_size=6,
        reward="parts",
        eval_dataset=40,
        eval_temperature=1.0,
    )
    if script.__name__ == "ppo":
        flags |= dict(target_kl=0.01, cliprange_value=0.01)
    else:
        flags |= dict(k=2, response_length=2)
    rows = run(script, **flags).metrics
    names = set().union(*rows)
    always_zero = {name for name in names if not any(row.get(name) for row in rows)}
    assert always_zero == {"val/num_unscored", "eval/num_unscored"}, "these are 0 in each row"
    documented = set()
    page = (HERE / "docs/metrics.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| `.*", page, re.MULTILINE):
        only_in = re.search(r"\(((RLOO|GRPO|PPO)(, GRPO)?)\)", row)
        if only_in is None or script.__name__.upper() in only_in[1]:
            documented.update(re.findall("`(.*?)`", row.split("|")[1]))
    # The page has reward/<name> and eval/best_of_<k>.
    logged = {re.sub("(?<=reward/).*|(?<=best_of_).*", "", name) for name in names}
    documented = {re.sub("<.*", "", name) for name in documented}
    assert logged == documented, "docs/metrics.md has a row for each"


def test_what_a_run_writes(script, run, capsys):
    """A run writes args.yaml, metrics, rollouts and a model. It prints scores, a few samples with
    the parts of their scores, and a last line that sums the run up."""
    flags = dict(num_train_epochs=2, num_sample_generations=2, share_prompts=False)
    ran = run(script, batch_size=6, reward="parts", **flags)
    printed = capsys.readouterr().out
    files = (
        f".lock args.yaml {script.__name__}.py rewards.py checkpoints metrics.jsonl rollouts model"
    )
    columns = (
        "iteration index row prompt completion token_ids ended columns score reward/length"
        " reward/ones logprobs advantage ref_logprobs"
    )
    if script.__name__ == "ppo":
        files += " value_model"
        columns += " values returns"
    assert set(os.listdir(ran.folder)) == set(files.split())
    assert set(ran.rollouts[0]) == set(columns.split())
    written = yaml.safe_load((ran.folder / "args.yaml").read_text())
    assert re.fullmatch("SHA-256 \\w+", written.pop("prompts"))
    assert re.fullmatch("torch .*, transformers .*, accelerate .*", written.pop("versions"))
    assert written.pop("processes") == 1
    assert written == vars(script.check_flags(ran.args))
    for row in ran.metrics:
        # Without a terminal there is a line in place of a bar.
        line = f"episode {row['episode']}: objective/scores {row['objective/scores']:.3f}"
        assert line in printed
    closing = printed.strip().splitlines()[-1]
    assert f"{row['episode']} episodes, {row['step']} steps, 2 epochs" in closing
    assert str(ran.folder / "model") in closing
    for sample in ran.rows_of(row["iteration"])[:: ran.args.k][:4]:
        lines = [f"---- a sample of episode {row['episode']}"]
        for name in ("prompt", "completion", "score", "reward/length", "reward/ones"):
            lines.append(f"{name}: {sample[name]}")
        assert "\n".join(lines) in printed
    assert len(set(re.findall(r"a sample of episode \d+", printed))) == 2


@one_text
@mark.slow
def test_trackers(script, world, tmp_path):
    """--log-with writes the numbers of metrics.jsonl. In tensorboard the steps are episodes. wandb
    without network has flags and tables of samples, too, and its variable for the project counts.
    The run has the name of its folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = base_flags(world, dict(log_with="all", total_episodes=24))
    launched(script, 1, tmp_path, flags, WANDB_MODE="offline", WANDB_PROJECT="sums")
    rows = read_jsonl(tmp_path / "out/metrics.jsonl")
    [events] = tmp_path.glob("out/sums/events.out.tfevents.*")
    events = EventAccumulator(str(events))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("objective/scores")}
    assert logged == approx({row["episode"]: row["objective/scores"] for row in rows})
    [file] = tmp_path.glob("out/wandb/offline-run-*/*.wandb")
    for text in ("total_episodes", json.dumps(rows[0]["grad_norm"]), "\4sums", "\3out"):
        assert text.encode() in file.read_bytes()
    assert list(file.parent.glob("**/samples*.table.json"))


@one_text
def test_a_tracker_that_fails_is_a_warning(script, run, monkeypatch):
    """It gets nothing more. The run goes on, its own row is written before, and other trackers get
    all."""
    trackers = [Mock() for _ in range(4)]
    gone = ConnectionResetError("gone")
    trackers[0].name = "log"
    trackers[0].log.side_effect = trackers[1].log_table.side_effect = [None, gone]
    trackers[2].finish.side_effect = gone
    announce = script.announce

    def announce_and_add(*args):
        announce(*args)
        script.accelerator.trackers.extend(trackers)

    monkeypatch.setattr(script, "announce", announce_and_add)
    with warns(UserWarning, match="--log-with log fails, and gets nothing more: .*gone"):
        ran = run(script, batch_size=6, num_sample_generations=100)
    called = [[name for name, *_ in tracker.mock_calls] for tracker in trackers]
    all_calls = ["log", "log_table"] * len(ran.metrics) + ["finish"]
    assert called == [all_calls[:3], all_calls[:4], all_calls, all_calls]
    assert (ran.folder / "model").exists()


@one_text
@mark.slow
def test_importing_a_script_starts_nothing(script, tmp_path):
    """An import makes no file, no process group and no CUDA context. It imports no library that
    only a flag needs."""
    code = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import {script.__name__}, torch
from accelerate.state import PartialState
assert not PartialState._shared_state and not torch.cuda.is_initialized()
for_flags = {{"datasets", "wandb", "peft", "deepspeed", "tensorboard"}}
assert not for_flags & set(sys.modules), set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
    assert not list(tmp_path.iterdir())
