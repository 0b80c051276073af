"""The three scripts as texts and as programs: what may differ, flags, metrics, what is written, sizes."""

import ast
import dataclasses
import json
import re
import shutil
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
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
    import_file,
    launch,
    make_tokenizer,
    one_text,
    only,
    read_jsonl,
    weights_of,
)

# ============================================ three scripts, one text =======================================
DIFFERENT = {  # flags and functions of the same name that may be another text, and why; a line more for one of yours
    "main": "the algorithm",
    "Args.__post_init__": "refuses what only its own flags can contradict",
    "Args.k": "the group's flag has the name that its paper gives it; PPO's group is one episode",
    "Args.kl_coef": "GRPO has the KL in the loss, off by default",
    "Args.whiten_advantages": "PPO whitens by default, and shifts, as its advantages have a mean (arXiv 2403.17031)",
    "Args.num_ppo_epochs": "PPO reuses a rollout, whose values need more updates",
    "Args.learning_rate": "PPO's rounding grows at RLOO's rate, until completions differ between micro-batches",
    "Args.num_train_epochs": "PPO draws one completion of a prompt: the same episodes are more epochs",
}
PAIRS = [(a, b) for i, a in enumerate(SCRIPTS) for b in SCRIPTS[i + 1 :]]
LIMITS = {"rloo": 900, "grpo": 950, "ppo": 1100}  # lines
BANNER = re.compile(r"^# =+ (\d)  ([\w ]+?)(?:: \w+)? =+$", re.MULTILINE)


def source_of(name):
    return (HERE / f"{name}.py").read_text(encoding="utf-8")


def named_parts(name):
    """The text of every function, also in `main`, of every constant, method and flag, with its comments -> by name."""
    lines, parts = source_of(name).splitlines(), {}

    def add(prefix, body):
        for node, after in zip(body, [*body[1:], None]):
            if isinstance(node, ast.ClassDef):
                add(f"{node.name}.", node.body)
                continue
            if isinstance(node, ast.FunctionDef):
                key, first = node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if key == "main":
                    add("main.", [inner for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef)][1:])
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                key, first = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target), node.lineno
            else:
                continue
            is_documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            parts[prefix + key] = "\n".join(lines[first - 1 : (after if is_documented else node).end_lineno])

    add("", ast.parse("\n".join(lines)).body)
    return parts


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_scripts_do_not_drift(pair):
    """Same name, same text, but for what the table names, at most six a pair: flags, `main`, of which what samples and
    evaluates is the same text again, and functions of the algorithm; never those of data, models, or saving."""
    first, second = (named_parts(name) for name in pair)
    shared = first.keys() & second.keys()
    differing = {name for name in shared if first[name] != second[name]}
    assert differing <= DIFFERENT.keys(), f"{sorted(differing - DIFFERENT.keys())} differ between {pair}"
    assert len(differing - {"Args.k"}) <= 6  # functions and flags
    algorithm = source_of(pair[0]).split("6  the algorithm")[1].split("7  main")[0]
    of_the_algorithm = {"main", *re.findall(r"^(?:def|class) (\w+)", algorithm, re.MULTILINE)}
    assert all(name in of_the_algorithm for name in differing if not name.startswith("Args."))
    assert {"main.generate", "main.completion_pass", "main.evaluate", "CompletionModel.sample"} <= shared - differing
    assert len(shared) > 70
    banners = [BANNER.findall(source_of(name)) for name in pair]
    assert banners[0] == banners[1] and [number for number, _ in banners[0]] == list("12345678")


def test_every_line_of_the_table_is_needed():
    """A name that no pair differs in any more is taken out."""
    parts = [named_parts(name) for name in SCRIPTS]
    differing = {name for a in parts for b in parts for name in a.keys() & b.keys() if a[name] != b[name]}
    assert differing == DIFFERENT.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_read_in_one_sitting(name):
    """The limits of its lines, and for rloo.py of its functions; no class but Args and the models."""
    source, tree = source_of(name), ast.parse(source_of(name))
    assert source.count("\n") <= LIMITS[name]
    assert max(map(len, source.splitlines())) <= 120
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert name != "rloo" or len(functions) <= 48
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert classes == ["Args", "CompletionModel"] + ["PolicyAndValue"] * (name == "ppo")


# =================================================== flags ==================================================
def letters_of(text):
    """Without spaces, line breaks and a box's lines, and without what Python writes otherwise than it is shown."""
    return re.sub(r"[^A-Za-z0-9]", "", text)


def test_help_documents_every_flag(script, capsys, monkeypatch):
    """Each has a comment at its line's end or a docstring below, which --help shows beside its name."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        tyro.cli(script.Args, args=["--help"], description=script.__doc__)
    assert stopped.value.code == 0
    text, parts = capsys.readouterr().out, named_parts(script.__name__)
    shown = letters_of(text)
    for field in dataclasses.fields(script.Args):
        part = parts[f"Args.{field.name}"]
        documented = re.search(r'"""(.*)"""$', part, re.DOTALL) or re.search(r"  # ([^\n]*)$", part, re.MULTILINE)
        assert documented and len(documented[1]) > 20, field.name
        assert letters_of(documented[1]) in shown, field.name
        assert f"--{field.name.replace('_', '-')}" in text
        assert re.search(rf"\b(args|self)\.{field.name}\b", source_of(script.__name__)), f"nothing reads {field.name}"


def held_out(world):
    return {"eval_dataset": world.dataset(5, seed=9)}


def with_reference(world):
    return {"ref_model_path": world.reference}


ONE_UPDATE = dict(num_ppo_epochs=1, num_mini_batches=1)
LIVE = dict(num_ppo_epochs=2, num_mini_batches=2, learning_rate=0.01, kl_coef=0.1, batch_size=12, total_episodes=24)
FLAG_CHANGES = {  # flag: its other value, and what else both runs need for it to matter
    "seed": (2, {}),
    "save_every": (2, {}),
    "dtype": ("bfloat16", ONE_UPDATE),
    "model_path": (lambda world: world.gpt2, with_reference),
    "lora_r": (2, {}),
    "ref_model_path": (lambda world: world.reference, {}),
    "dataset": (lambda world: world.dataset(9), {}),
    "max_prompt_length": (8, {}),
    "reward": (lambda world: world.reward("number"), {}),
    "reward_model_path": (lambda world: world.classifier, {}),
    "eval_dataset": (lambda world: world.dataset(5, seed=9), {}),
    "eval_every": (1, held_out),
    "eval_temperature": (1.0, held_out),
    "eval_k": (2, lambda world: held_out(world) | {"eval_temperature": 1.0}),
    "eval_reward": (lambda world: world.reward("five"), held_out),
    "num_train_epochs": (3.0, {"total_episodes": None}),
    "total_episodes": (12, {}),
    "batch_size": (6, {}),
    "num_mini_batches": (1, {}),
    "num_ppo_epochs": (1, {}),
    "rloo_k": (2, {}),
    "num_generations": (2, {}),
    "response_length": (4, {}),
    "temperature": (0.7, {}),
    "stop_token_id": (7, {}),
    "kl_coef": (0.5, with_reference),
    "cliprange": (1e-3, {}),
    "cliprange_high": (1e-3, {}),
    "scale_rewards": ("none", {}),
    "loss_type": ("dapo", {}),
    "importance_sampling_level": ("sequence", {}),
    "mask_truncated_completions": (True, {}),
    "value_model_path": (lambda world: world.reference, {}),
    "kl_estimator": ("k3", with_reference),
    "adaptive_kl": (True, {"kl_horizon": 50}),
    "kl_target": (1e3, lambda world: with_reference(world) | {"adaptive_kl": True, "kl_horizon": 50}),
    "kl_horizon": (50, {"adaptive_kl": True}),
    "gamma": (0.9, {}),
    "lam": (0.5, {}),
    "cliprange_value": (1e-3, {}),
    "vf_coef": (1.0, {}),
    "target_kl": (1e-6, {}),
    "ratio_threshold": (1.0, {}),
    "whiten_advantages": (None, {}),  # the opposite of the default, below
    "whiten_rewards": (True, {}),
    "score_scaling": (True, {}),
    "score_norm": (True, {}),
    "missing_eos_penalty": (3.0, {}),
    "score_clip": (0.5, {}),
    "learning_rate": (0.02, {}),
    "weight_decay": (0.5, {}),
    "lr_scheduler_type": ("cosine", {}),
    "warmup_steps": (3, {}),
    "max_grad_norm": (0.01, {}),
    "num_sample_generations": (2, {}),
    "save_rollouts": (False, {}),
}
ELSEWHERE = {  # flags that other tests cover
    "output_dir": "every run here",
    "plan": "test_accounting.py",
    "resume": "test_resume.py",
    "log_with": "test_trackers_get_every_metric",
    "per_device_train_batch_size": "test_gradients.py",
    "per_device_rollout_batch_size": "test_sampling.py",
    "gradient_checkpointing": "test_logprobs.py",
}
seen = set()
FLAG_PAIRS = [
    pytest.param(MODULES[name], field.name, id=f"{name}-{field.name}")
    for name in SCRIPTS
    for field in dataclasses.fields(MODULES[name].Args)
    # what a sibling has too is the same text there, which the drift test holds: tried in the first
    if field.name not in ELSEWHERE and field.name not in seen
    if not seen.add(field.name)
]


@pytest.fixture(scope="module")
def live_results():
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("script, flag", FLAG_PAIRS)
def test_changing_a_flag_changes_the_run(script, run, world, live_results, flag):
    """No flag is dead: another value changes what a run computes or writes (args.yaml and plan.yaml aside)."""
    value, needs = FLAG_CHANGES[flag]  # KeyError: a new flag needs a line in FLAG_CHANGES
    value = (not script.Args.whiten_advantages) if flag == "whiten_advantages" else value
    needs = needs(world) if callable(needs) else needs

    def outputs(flags):
        folder = run(script, **LIVE | flags)[2]
        files = contents(folder)
        texts = {name: text for name, text in files.items() if name.endswith((".jsonl", ".safetensors"))}
        lines = [{n: x for n, x in row.items() if n not in TIMES} for row in read_jsonl(folder / "metrics.jsonl")]
        return files.keys(), lines, {name: text for name, text in texts.items() if name != "metrics.jsonl"}

    key = script.__name__, repr(sorted(needs.items()))
    if key not in live_results:
        live_results[key] = outputs(needs)
    name = "k" if flag == group_flag(script) else flag
    assert outputs(needs | {name: value(world) if callable(value) else value}) != live_results[key]


# ================================================== metrics =================================================
def test_every_logged_metric_is_documented(script, run, world):
    """Every name in metrics.jsonl stands in a table row of the README, and what a script always logs is there."""
    flags = dict(reward=world.reward("parts"), kl_coef=0.1, num_mini_batches=2, eval_dataset=world.dataset(5))
    metrics = run(script, **flags)[1]
    table = "\n".join(line for line in (HERE / "README.md").read_text().splitlines() if line.startswith("|"))
    documented = set(re.findall(r"`([^`]+)`", table))
    logged = {"reward/<name>" if name.startswith("reward/") else name for row in metrics for name in row}
    assert logged <= documented, f"not in README.md: {sorted(logged - documented)}"
    common = "iteration step episode epoch lr eps time/rollout_s time/train_s objective/scores objective/kl grad_norm"
    common += " objective/entropy policy/entropy_avg loss/policy_avg policy/approxkl_avg policy/clipfrac_avg val/ratio"
    common += " val/ratio_var val/num_eos_tokens response_length_mean eval/scores val/sampling_logprob_difference"
    assert set(common.split()) <= logged


def test_no_metric_is_always_zero(script, run, world):
    """In a run where all of it matters, every metric is another number than 0 at some time, and finite."""
    flags = dict(num_mini_batches=2, num_ppo_epochs=2, learning_rate=0.02, num_train_epochs=3, cliprange=0.02)
    flags |= dict(kl_coef=0.1, ref_model_path=world.reference, model_path=world.many_eos, batch_size=6)
    flags |= dict(target_kl=0.01, cliprange_value=0.01) if script.__name__ == "ppo" else dict(k=2, response_length=2)
    metrics = run(script, **flags, eval_dataset=world.dataset(5, seed=9))[1]
    always_zero = {name for row in metrics for name in row if not any(other.get(name) for other in metrics)}
    assert not always_zero
    assert all(abs(x) < float("inf") for row in metrics for x in row.values())


# =============================================== what is written ============================================
def test_what_a_run_writes(script, run, world, capsys):
    """args.yaml, plan.yaml, metrics, samples, rollouts, a model that loads and is not the first; a closing line."""
    capsys.readouterr()
    args, metrics, output_dir = run(script, num_train_epochs=2, num_sample_generations=2, batch_size=6)
    printed = capsys.readouterr().out
    names = {"args.yaml", "plan.yaml", "metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "model"}
    assert {path.name for path in output_dir.iterdir()} == names
    assert yaml.safe_load((output_dir / "args.yaml").read_text()) == vars(args)
    assert (output_dir / "plan.yaml").read_text() in printed
    assert yaml.safe_load((output_dir / "plan.yaml").read_text())["steps"] == metrics[-1]["step"]
    assert distance(weights_of(world.llama), weights_of(output_dir / "model")) > 1e-4
    assert transformers.AutoTokenizer.from_pretrained(output_dir / "model").get_vocab() == make_tokenizer().get_vocab()
    assert all(row["time/rollout_s"] > 0 and row["time/train_s"] > 0 and row["eps"] > 0 for row in metrics)
    closing = printed.strip().splitlines()[-1]
    assert f"{metrics[-1]['episode']} episodes, {metrics[-1]['step']} steps, 2 epochs" in closing
    assert str(output_dir / "model") in closing
    card = (output_dir / "model" / "README.md").read_text()
    assert closing.split(" in ")[0] in card and f"torch {torch.__version__}" in card

    rollouts = read_jsonl(output_dir / "rollouts.jsonl")
    columns = "iteration index prompt completion score token_ids logprobs advantage ref_logprobs".split()
    assert list(rollouts[0]) == columns + ["values", "returns"] * (script.__name__ == "ppo")
    assert len(rollouts) == metrics[-1]["episode"]
    samples = read_jsonl(output_dir / "samples.jsonl")
    sampled_at = [row["iteration"] for row in samples]
    assert len(set(sampled_at)) == 2 and max(sampled_at) == metrics[-1]["iteration"]
    by_place = {(row["iteration"], row["index"]): row for row in rollouts}
    for row in samples:  # one of a group
        assert row["index"] % args.k == 0
        assert row == {name: by_place[row["iteration"], row["index"]][name] for name in columns[:5]}
    assert printed.count("samples at episode") == 2 and str(samples[-1]["score"]) in printed


def test_rollouts_are_written_only_when_asked(script, run):
    output_dir = run(script, save_rollouts=False, num_sample_generations=0, total_episodes=3)[2]
    assert not (output_dir / "rollouts.jsonl").exists() and not (output_dir / "samples.jsonl").exists()


@only("rloo")
def test_the_table_of_samples_shows_what_is_there(script, capsys):
    """Brackets are no markup to it; trackers that have tables get the rows, and only the main process prints."""
    tables = []
    trackers = [SimpleNamespace(log_table=lambda name, **table: tables.append((name, table))), SimpleNamespace()]
    sample = dict(iteration=1, index=0, prompt="[bold]1+1=[/bold]", completion="[/]2", score=1.0)
    for is_main in (True, False):
        script.show_samples(SimpleNamespace(is_main_process=is_main, trackers=trackers), [sample], episode=7)
        printed = capsys.readouterr().out
        assert ("[bold]1+1=[/bold]" in printed and "[/]2" in printed and "episode 7" in printed) == is_main
    rows = [list(sample.values())]
    assert tables[0] == ("samples", dict(columns=list(sample), data=rows, step=7))


def test_trackers_get_every_metric(script, run, world):
    """--log-with tensorboard writes what metrics.jsonl has, against episodes, into the run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = dict(batch_size=6, eval_dataset=world.dataset(3, seed=4), log_with="tensorboard")
    _, metrics, output_dir = run(script, **flags)
    [folder] = {path.parent for path in output_dir.glob("**/events.out.tfevents.*") if path.parent.name == "tally"}
    events = EventAccumulator(str(folder))
    events.Reload()
    for name in ("objective/scores", "grad_norm", "eval/scores"):
        logged = {event.step: event.value for event in events.Scalars(name)}
        assert logged == pytest.approx({row["episode"]: row[name] for row in metrics if name in row}, rel=1e-5)


@one_text
def test_plot_draws_seeds_as_one_curve(script, run, tmp_path):
    """benchmark/plot.py: runs that differ in the seed alone are averaged; others are told apart by their flags."""
    plot = import_file(HERE / "benchmark" / "plot.py")
    (_, first, a), (_, second, b), (_, _, c) = (run(script, **flags) for flags in ({}, dict(seed=2), dict(kl_coef=0.3)))
    groups = plot.group_runs([a, b, c])
    assert {label: len(group) for label, group in groups.items()} == {"run0, kl_coef 0.05": 2, "run2, kl_coef 0.3": 1}
    x, values = plot.points(groups["run0, kl_coef 0.05"], "objective/scores", "episode")
    assert x.tolist() == [row["episode"] for row in first]
    assert values.tolist() == [[row["objective/scores"] for row in rows] for rows in (first, second)]
    mean, band = plot.draw.mean_and_band([[0.0, 1.0], [2.0, 1.0]])
    assert mean.tolist() == [1.0, 1.0] and band.tolist() == pytest.approx([12.71, 0.0])
    plot.main(plot.Args(folders=(a, b, c), output=tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 10_000


# ================================================ as programs ===============================================
def read_wandb(path) -> SimpleNamespace:
    """The id, name, config, history and files of an offline run of wandb: records in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, text = path.read_bytes(), 7, b""  # after the file's header
    kept = SimpleNamespace(config={}, history=[], files=[])
    while position + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, position + 4)  # after a checksum
        text += data[position + 7 : position + 7 + length]
        position += 7 + length
        position += (-position % 32768) * (-position % 32768 < 7)  # no header crosses the end of a block
        if kind in (1, 4):  # whole, or the last part
            record, text = Record.FromString(text), b""
            if record.HasField("run"):
                kept.id, kept.name = record.run.run_id, record.run.display_name
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                kept.history.append({name: json.loads(value) for name, value in items.items()})
            kept.config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            kept.files += [file.path for file in record.files.files]
    return kept


@one_text
@pytest.mark.slow
def test_wandb_offline(script, world, tmp_path):
    """--log-with wandb without network: config, every metric against `episode`, tables of samples; a run that is
    resumed goes on in the same run of wandb."""
    flags = base_flags(world) | dict(log_with="wandb", output_dir=tmp_path / "out", batch_size=6, save_every=1)
    flags |= dict(total_episodes=18, resume=True, num_sample_generations=3)
    for _ in range(2):
        finished = launch(script, 1, tmp_path, flags, WANDB_MODE="offline")
        assert finished.returncode == 0, finished.stderr
        shutil.rmtree(tmp_path / "out" / "model")
        shutil.rmtree(tmp_path / "out" / "checkpoints" / "iteration_00000003")  # the last iteration is made again
    metrics = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    first, second = map(read_wandb, sorted(tmp_path.glob("**/wandb/offline-run-*/*.wandb")))
    assert first.id == second.id and first.name == "out"
    assert first.config["total_episodes"] == 18 and first.config["kl_coef"] == flags["kl_coef"]
    for name in ("objective/scores", "grad_norm"):
        logged = {row["episode"]: row[name] for row in first.history if name in row}
        assert logged == pytest.approx({row["episode"]: row[name] for row in metrics}, rel=1e-5)
    assert [row["episode"] for row in second.history if "episode" in row] == [18]
    assert any(path.endswith(".table.json") for path in first.files)


@one_text
@pytest.mark.slow
def test_importing_a_script_starts_nothing(script, tmp_path):
    """No file, no process group, no device, and none of the libraries that only a flag asks for."""
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
    """--help and a refusal of tyro's with status 2; a run in the folder that is named after script, seed and time."""
    refused = launch(script, 1, tmp_path, base_flags(world) | dict(batch_size=0))
    assert refused.returncode == 2 and "--batch-size must be above 0" in refused.stdout + refused.stderr
    ran = launch(script, 1, tmp_path, base_flags(world) | dict(total_episodes=12))
    assert ran.returncode == 0, ran.stderr
    assert "12 episodes, 1 steps" in ran.stdout.splitlines()[-1]
    assert [path.name.split("__")[:2] for path in (tmp_path / "runs").iterdir()] == [[script.__name__, "1"]]
