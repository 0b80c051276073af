"""The three scripts as texts and as programs: what may differ, how they read, flags, metrics, and what is written."""

import ast
import dataclasses
import io
import json
import re
import subprocess
import sys
import tokenize

import pytest
import transformers
import tyro
import yaml
from conftest import (
    HERE,
    MODULES,
    SCRIPTS,
    TIMES,
    base_flags,
    contents,
    distance,
    group_flag,
    launch,
    launch_twice,
    make_tokenizer,
    one_text,
    read_jsonl,
    weights_of,
)

# What has the same name in two scripts is the same text in both, comments included. This table lists the exceptions,
# each with its reason. If you need another one, add a line.
DIFFERENT = {
    "main": "each algorithm has its own rewards, advantages and loss",
    "update_metrics": "each loss has its own denominator and its own clips",
    "check_flags": "each script checks the flags that only it has",
    "start_accelerator": "PPO can drop updates, which DeepSpeed cannot",
    "Args.k": "the flag has the name from each paper; in PPO a group is one episode",
    "Args.kl_coef": "in GRPO the KL is in the loss, and it is off by default",
    "Args.whiten_advantages": "PPO whitens by default, and also subtracts the mean, which is not 0 there",
    "Args.num_ppo_epochs": "PPO makes more updates with a rollout, because its value model needs them",
    "Args.learning_rate": "it names RATES",
    "RATES": "at RLOO's rate, rounding grows faster in PPO, and micro-batches change more completions",
    "Args.num_train_epochs": "PPO samples one completion of a prompt, so the same number of episodes is more epochs",
}
PAIRS = [(a, b) for i, a in enumerate(SCRIPTS) for b in SCRIPTS[i + 1 :]]
# A word of the title of each section. The banner MACHINERY, which has no number, comes before the seventh.
SECTIONS = "flags arithmetic drawing algorithm training model data work models logging sharded checks".split()
BANNER = re.compile(r"^# =+ (?:(\d+)  )?(\w[^=]*?) =+$", re.MULTILINE)


def source_of(name):
    return (HERE / f"{name}.py").read_text(encoding="utf-8")


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def named_parts(name):
    """The text of every function, method, constant, class and flag of a script, by name, with the comments above it.

    A class is a part without its methods. Each flag is a part of its own, with its docstring.
    """
    source, parts = source_of(name), {}
    lines = source.splitlines()

    def add(prefix, body):
        rest = []  # lines of a class that are no part of their own: its docstring and its fields
        for before, node, after in zip([None, *body], body, [*body[1:], None]):
            first, last, key = node.lineno, node.end_lineno, None
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                key = node.name
                first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                key = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                last = after.end_lineno if after and is_docstring(after) else last
            elif isinstance(before, ast.AnnAssign):
                continue  # the docstring of a flag
            while lines[first - 2].strip().startswith("#"):
                first -= 1
            if isinstance(node, ast.ClassDef):
                header = lines[first - 1 : node.body[0].lineno - 1]
                parts[prefix + key] = "\n".join(header + add(f"{key}.", node.body))
            elif key and (prefix in ("", "Args.") or isinstance(node, ast.FunctionDef)):
                parts[prefix + key] = "\n".join(lines[first - 1 : last])
            else:
                rest += lines[first - 1 : last]
        return rest

    add("", ast.parse(source).body)
    return parts


def section_of(name, part):
    """The number of the section in which a name is defined."""
    banners = [match for match in BANNER.finditer(source_of(name)) if match[1]]
    definition = re.search(rf"^(?:def |class )?{part.split('.')[0]}\b", source_of(name), re.MULTILINE)
    return sum(banner.start() < definition.start() for banner in banners)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_scripts_do_not_drift(pair):
    """What has the same name is the same text, except what the table lists.

    Nothing differs in the sections that count, sample, load data and models, draw random numbers, and divide the work.
    """
    first, second = (named_parts(name) for name in pair)
    shared = first.keys() & second.keys()
    differing = {name for name in shared if first[name] != second[name]}
    assert differing <= DIFFERENT.keys(), f"{sorted(differing - DIFFERENT.keys())} differ between {pair}"
    assert {section_of(name, part) for name in pair for part in differing} <= {1, 5, 10, 12}
    alike = "Batch Args generate sample token_logprobs micro_batches forward_pass gather_rows evaluate load_state"
    assert set(alike.split()) <= shared - differing
    assert len(shared) > 110


def test_every_line_of_the_table_is_needed():
    """A name that is the same text in all scripts again is taken out of the table."""
    parts = [named_parts(name) for name in SCRIPTS]
    differing = {name for a in parts for b in parts for name in a.keys() & b.keys() if a[name] != b[name]}
    assert differing == DIFFERENT.keys()


LIMITS = {  # tokens of the script, and of its lecture, which stands above the banner MACHINERY
    "rloo": (11_350, 3_720),
    "grpo": (11_720, 4_060),
    "ppo": (12_740, 4_250),
}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short(name):
    """Comments and docstrings are no tokens. A limit that makes the text worse for a reader may be changed."""
    source, limits = source_of(name), LIMITS[name]
    banner = source[: source.index(" MACHINERY ")].count("\n")
    docstrings = [node for node in ast.walk(ast.parse(source)) if is_docstring(node)]
    inside = {line for node in docstrings for line in range(node.lineno, node.end_lineno + 1)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in LAYOUT]
    lines = [token.start[0] for token in tokens if token.start[0] not in inside]
    counts = len(lines), sum(line <= banner for line in lines)
    message = f"{name}.py has %d tokens, its lecture %d. The limits are %d and %d."
    assert counts[0] <= limits[0] and counts[1] <= limits[1], message % (*counts, *limits)


# Names and their sections. The first six sections are the lecture.
LECTURE = dict(Args=1, batch_arithmetic=2, keyed_rng=3, draw_prompts=3, draw_mini_batches=3, Batch=4, main=5)
LECTURE |= dict(generate=6, sample=6, token_logprobs=6, micro_batches=6)
OWN_LECTURE = {name: {f"{name}_advantages": 4, f"{name}_loss": 4} for name in ("rloo", "grpo")}
OWN_LECTURE["ppo"] = dict(gae=4, ppo_loss=4)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_a_lecture_and_machinery(name):
    """All scripts have the same twelve sections. The lecture has what a reader needs to understand the algorithm."""
    banners = BANNER.findall(source_of(name))
    assert banners == BANNER.findall(source_of("rloo"))
    number, title = banners.pop(6)
    assert number == "" and title.startswith("MACHINERY")
    assert [number for number, _ in banners] == [str(number) for number in range(1, 13)]
    for word, (_, title) in zip(SECTIONS, banners, strict=True):
        assert word in title.replace(",", "").split()
    sections = LECTURE | OWN_LECTURE[name]
    assert {part: section_of(name, part) for part in sections} == sections


def letters_of(text):
    """The letters and digits of a text. --help breaks lines, draws boxes, and shows quotes in another way."""
    return re.sub(r"[^A-Za-z0-9]", "", text)


def test_help_documents_every_flag(script, capsys, monkeypatch):
    """Each flag has a comment in its line or a docstring below it, and --help shows it. The script reads each flag."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        tyro.cli(script.Args, args=["--help"], description=script.__doc__)
    assert stopped.value.code == 0
    text, parts = capsys.readouterr().out, named_parts(script.__name__)
    shown = letters_of(text)
    for field in dataclasses.fields(script.Args):
        part = parts[f"Args.{field.name}"]
        documented = re.search(r'"""(.*)"""$', part, re.DOTALL) or re.search(r"^ *[^ #].*  # (.*)$", part, re.MULTILINE)
        assert documented and len(documented[1].split()) >= 3, field.name
        assert letters_of(documented[1]) in shown, field.name
        assert f"--{field.name.replace('_', '-')}" in text
        assert re.search(rf"\b(args|self)\.{field.name}\b", source_of(script.__name__)), f"nothing reads {field.name}"


LIVE = dict(num_ppo_epochs=2, num_mini_batches=2, learning_rate=0.01, kl_coef=0.1, batch_size=12, total_episodes=24)
# For each flag another value. A word that begins with @ is one of the paths that the fixture `world` has.
OTHER = dict(seed=2, dtype="bfloat16", model_path="@gpt2", lora_r=2, lora_alpha=64, ref_model_path="@reference")
OTHER |= dict(dataset="@dataset 9", max_prompt_length=8, reward="@reward number", reward_model_path="@classifier")
OTHER |= dict(eval_dataset="@dataset 5", eval_every=1, eval_temperature=1.0, eval_k=2, eval_reward="@reward five")
OTHER |= dict(num_train_epochs=3.0, total_episodes=12, batch_size=6, num_mini_batches=1, num_ppo_epochs=1, rloo_k=2)
OTHER |= dict(num_generations=2, response_length=4, temperature=0.7, stop_token_id=7, stop_string="1")
OTHER |= dict(kl_coef=0.5, cliprange=1e-3)
OTHER |= dict(cliprange_high=1e-3, scale_rewards="none", loss_type="dapo", importance_sampling_level="sequence")
OTHER |= dict(mask_truncated_completions=True, value_model_path="@reference", kl_estimator="k3", adaptive_kl=True)
OTHER |= dict(kl_target=1e3, kl_horizon=50, gamma=0.9, lam=0.5, cliprange_value=1e-3, vf_coef=1.0, target_kl=1e-6)
OTHER |= dict(ratio_threshold=1.0, whiten_rewards=True, score_scaling=True, score_norm=True, missing_eos_penalty=3.0)
OTHER |= dict(score_clip=0.5, learning_rate=0.02, weight_decay=0.5, lr_scheduler_type="cosine", warmup_steps=3)
OTHER |= dict(max_grad_norm=0.01, save_rollouts=False)
OTHER |= dict(whiten_advantages=not MODULES[SCRIPTS[0]].Args.whiten_advantages)
REFERENCE, HELD_OUT = dict(ref_model_path="@reference"), dict(eval_dataset="@dataset 5")
ADAPTIVE = REFERENCE | dict(adaptive_kl=True, kl_horizon=60)
NEEDS = dict(model_path=REFERENCE, kl_coef=REFERENCE, kl_estimator=REFERENCE, eval_every=HELD_OUT, eval_reward=HELD_OUT)
NEEDS |= dict(eval_temperature=HELD_OUT, eval_k=HELD_OUT | dict(eval_temperature=1.0), adaptive_kl=dict(kl_horizon=50))
NEEDS |= dict(kl_target=ADAPTIVE, kl_horizon=ADAPTIVE, num_train_epochs=dict(total_episodes=None))
NEEDS |= dict(lora_alpha=dict(lora_r=2))
NEEDS |= dict(dtype=dict(num_ppo_epochs=1, num_mini_batches=1))  # the flags with which another value matters
# Other tests cover these.
ELSEWHERE = {"output_dir", "plan", "resume", "save_every", "keep_checkpoints", "log_with", "gradient_checkpointing"}
ELSEWHERE |= {"per_device_train_batch_size", "per_device_rollout_batch_size", "num_sample_generations"}
FIRST_WITH = {  # Each flag is tried in the first script that has it. The drift test keeps its text equal in the others.
    field.name: name for name in reversed(SCRIPTS) for field in dataclasses.fields(MODULES[name].Args)
}
FLAG_PAIRS = [pytest.param(MODULES[name], flag, id=flag) for flag, name in FIRST_WITH.items() if flag not in ELSEWHERE]


@pytest.fixture(scope="module")
def live_results():
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("script, flag", FLAG_PAIRS)
def test_changing_a_flag_changes_the_run(script, run, world, live_results, flag):
    """Another value of a flag changes what a run computes or writes. args.yaml and plan.yaml do not count."""

    def outputs(flags):
        flags = LIVE | flags
        for name, value in flags.items():
            if str(value).startswith("@"):
                path, *words = value[1:].split()
                found = getattr(world, path)
                flags[name] = found(int(words[0]) if path == "dataset" else words[0]) if words else found
        folder = run(script, **flags)[2]
        files = {name: text for name, text in contents(folder).items() if not name.endswith((".yaml", "metrics.jsonl"))}
        return files, [{n: x for n, x in row.items() if n not in TIMES} for row in read_jsonl(folder / "metrics.jsonl")]

    needs = NEEDS.get(flag, {})
    key = script.__name__, repr(sorted(needs.items()))
    if key not in live_results:
        live_results[key] = outputs(needs)
    # KeyError: a new flag needs a value in OTHER.
    assert outputs(needs | {"k" if flag == group_flag(script) else flag: OTHER[flag]}) != live_results[key]


def test_every_logged_metric_is_documented_and_not_always_zero(script, run, world):
    """Every name in metrics.jsonl stands in a row of a table of docs/metrics.md. Each script logs the common ones. In
    this run each metric is different from 0 at least once, and all of them are finite."""
    flags = dict(num_mini_batches=2, num_ppo_epochs=2, learning_rate=0.02, num_train_epochs=3, cliprange=0.02)
    flags |= dict(kl_coef=0.1, ref_model_path=world.reference, model_path=world.many_eos, batch_size=6)
    flags |= dict(target_kl=0.01, cliprange_value=0.01) if script.__name__ == "ppo" else dict(k=2, response_length=2)
    flags |= dict(reward=world.reward("parts"), eval_dataset=world.dataset(40, seed=9), eval_temperature=1.0)
    metrics = run(script, **flags).metrics
    table = "\n".join(line for line in (HERE / "docs/metrics.md").read_text().splitlines() if line.startswith("|"))
    documented = set(re.findall(r"`([^`]+)`", table.replace("reward/<name>", "<>").replace("<m>", "<>")))
    logged = {re.sub("reward/.*|(?<=best_of_)[0-9]+", "<>", name) for row in metrics for name in row}
    assert logged <= documented, f"not in docs/metrics.md: {sorted(logged - documented)}"
    common = "iteration step episode epoch lr eps time/rollout_s time/train_s objective/scores objective/kl grad_norm"
    common += " objective/entropy policy/entropy_avg loss/policy_avg policy/approxkl_avg policy/clipfrac_avg val/ratio"
    common += " val/ratio_var val/num_eos_tokens response_length_mean eval/scores val/sampling_logprob_difference"
    assert set(common.split()) <= logged
    always_zero = {name for row in metrics for name in row if not any(other.get(name) for other in metrics)}
    assert always_zero == {"val/num_unscored", "eval/num_unscored"}
    assert all(abs(x) < float("inf") for row in metrics for x in row.values())


def test_what_a_run_writes(script, run, world, capsys):
    """A run writes args.yaml, metrics, rollouts and a model, which training has changed. It prints a few samples with
    the parts of their scores, and a last line that sums the run up."""
    capsys.readouterr()
    flags = dict(num_train_epochs=2, num_sample_generations=2, batch_size=6, reward=world.reward("parts"))
    args, metrics, output_dir = ran = run(script, **flags)
    printed = capsys.readouterr().out
    names = {".lock", "args.yaml", "checkpoints", "metrics.jsonl", "rollouts.jsonl", "model"}
    names |= {"value_model"} if script.__name__ == "ppo" else set()
    assert {path.name for path in output_dir.iterdir()} == names
    assert yaml.safe_load((output_dir / "args.yaml").read_text()) == vars(args)
    assert distance(weights_of(world.llama), weights_of(output_dir / "model")) > 1e-4
    assert transformers.AutoTokenizer.from_pretrained(output_dir / "model").get_vocab() == make_tokenizer().get_vocab()
    assert all(row["time/rollout_s"] > 0 and row["time/train_s"] > 0 and row["eps"] > 0 for row in metrics)
    closing = printed.strip().splitlines()[-1]
    assert f"{metrics[-1]['episode']} episodes, {metrics[-1]['step']} steps, 2 epochs; objective/scores " in closing
    assert str(output_dir / "model") in closing

    rollouts = ran.rollouts
    columns = "iteration index row prompt completion token_ids ended columns score reward/length reward/ones"
    columns += " logprobs advantage ref_logprobs" + " values returns" * (script.__name__ == "ppo")
    assert list(rollouts[0]) == columns.split()
    assert len(rollouts) == metrics[-1]["episode"]
    last = [row for row in rollouts if row["iteration"] == metrics[-1]["iteration"]]
    for row in last[:: args.k][:4]:
        names = ["prompt", "completion", "score", "reward/length", "reward/ones"]
        names += ["advantage"] * (script.__name__ != "ppo")  # In PPO it has one for each token.
        assert f"episode {len(rollouts)}: { ({name: row[name] for name in names}) }" in printed
    assert len({line.split(":")[0] for line in printed.splitlines() if line.startswith("episode ")}) == 2


def test_a_run_that_only_evaluates(script, run, world, capsys):
    """--total-episodes 0 writes the row of the evaluation before training, and no model."""
    _, [row], output_dir = run(script, total_episodes=0, eval_dataset=world.dataset(5))
    first = run(script, eval_dataset=world.dataset(5))[1][0]
    assert row == first and {row[name] for name in ("iteration", "step", "episode", "epoch")} == {0}
    assert {path.name for path in output_dir.iterdir()} == {
        ".lock",
        "args.yaml",
        "metrics.jsonl",
        "eval_rollouts.jsonl",
    }
    assert re.search(r"\n0 episodes, 0 steps, 0 epochs; eval/scores \S+ -> \S+\n", capsys.readouterr().out)


def test_trackers_get_every_metric(script, run, world, monkeypatch):
    """--log-with tensorboard writes the numbers of metrics.jsonl into the run's folder. Its steps are episodes. wandb's
    variable for the project counts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = dict(batch_size=6, eval_dataset=world.dataset(3, seed=4), log_with="tensorboard")
    monkeypatch.setenv("WANDB_PROJECT", "sums")
    _, metrics, output_dir = run(script, **flags)
    [folder] = {path.parent for path in output_dir.glob("**/events.out.tfevents.*") if path.parent.name == "sums"}
    events = EventAccumulator(str(folder))
    events.Reload()
    for name in ("objective/scores", "grad_norm", "eval/scores"):
        logged = {event.step: event.value for event in events.Scalars(name)}
        assert logged == pytest.approx({row["episode"]: row[name] for row in metrics if name in row}, rel=1e-5)


@one_text
@pytest.mark.slow
def test_wandb_offline(script, world, tmp_path):
    """--log-with wandb without network keeps flags, metrics and tables of samples. With wandb's own variables a resumed
    run continues the same run of wandb."""
    flags = base_flags(world) | dict(log_with="wandb", output_dir=tmp_path / "out", batch_size=6, save_every=1)
    flags |= dict(total_episodes=18, num_sample_generations=3)
    wandb = dict(WANDB_MODE="offline", WANDB_NAME="my first sums", WANDB_RUN_ID="sums1", WANDB_RESUME="allow")
    launch_twice(lambda flags: launch(script, 1, tmp_path, flags, **wandb), tmp_path, flags)
    first, second = sorted(tmp_path.glob("**/wandb/offline-run-*/*.wandb"))
    assert first.name == second.name  # the id of the run
    scores = [json.dumps(row["objective/scores"]).encode() for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")]
    assert b"my first sums" in first.read_bytes()
    assert b"total_episodes" in first.read_bytes() and list(first.parent.glob("**/samples*.table.json"))
    found = [[score in file.read_bytes() for score in scores] for file in (first, second)]
    assert found == [[True, True, False], [False, False, True]]


@one_text
@pytest.mark.slow
def test_importing_a_script_starts_nothing(script, tmp_path):
    """An import makes no file, no process group and no CUDA context. It imports no library that only a flag needs."""
    code = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import {script.__name__}, torch
from accelerate.state import PartialState
assert not PartialState._shared_state and not torch.cuda.is_initialized()
assert not {{"datasets", "wandb", "peft", "deepspeed", "tensorboard"}} & set(sys.modules), set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
    assert not list(tmp_path.iterdir())


@one_text
@pytest.mark.slow
def test_the_program_as_a_person_starts_it(script, world, tmp_path):
    """A run's folder is named after script, seed, time and process."""
    ran = launch(script, 1, tmp_path, base_flags(world) | dict(total_episodes=12))
    assert ran.returncode == 0, ran.stderr
    assert "12 episodes, 1 steps" in ran.stdout.splitlines()[-1]
    [name] = [path.name for path in (tmp_path / "runs").iterdir()]
    assert re.fullmatch(rf"{script.__name__}__1__\d+__\d+", name)
