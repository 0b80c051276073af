"""The three scripts as texts and as programs: what may differ, how they read, flags, metrics, and what is written."""

import ast
import dataclasses
import difflib
import io
import json
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tokenize
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

# ============================================== three scripts, one text =========================================
# What has the same name in two scripts is the same text in both, comments included. This table lists the exceptions,
# each with its reason. If you need another one, add a line.
DIFFERENT = {
    "main": "each algorithm has its own rewards, advantages and loss",
    "LossInputs": "its fields are what the loss of the algorithm reads",
    "LossInputs.select": "in GRPO a field may be None, because there may be no reference",
    "LossTerms": "its fields are what the loss of the algorithm returns",
    "update_metrics": "each loss has its own denominator and its own clips",
    "kl_metrics": "PPO may estimate the KL in another way, and may change its weight during the run",
    "check_flags": "each script checks the flags that only it has",
    "MAY_BE_0": "it lists flags, also those that only one script has",
    "configure_deepspeed": "PPO can drop updates, which DeepSpeed cannot",
    "Args.k": "the flag has the name from each paper; in PPO a group is one episode",
    "Args.kl_coef": "in GRPO the KL is in the loss, and it is off by default",
    "Args.whiten_advantages": "PPO whitens by default, and also subtracts the mean, which is not 0 there",
    "Args.num_ppo_epochs": "PPO makes more updates with a rollout, because its value model needs them",
    "Args.learning_rate": "at RLOO's rate, rounding grows in PPO until micro-batches change the completions",
    "Args.num_train_epochs": "PPO samples one completion of a prompt, so the same number of episodes is more epochs",
}
NOT_COUNTED = {"Args.k", "LossInputs", "LossTerms", "MAY_BE_0"}  # neither flags nor functions
PAIRS = [(a, b) for i, a in enumerate(SCRIPTS) for b in SCRIPTS[i + 1 :]]
# A word of the title of each section. The banner MACHINERY, which has no number, comes before the sixth.
SECTIONS = "flags arithmetic algorithm training model data random models logging sharded checks".split()
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
    """What has the same name is the same text, except what the table lists. At most 5 flags and 8 functions differ.

    Nothing differs in the sections that count, sample, load data and models, draw random numbers, and divide the work.
    """
    first, second = (named_parts(name) for name in pair)
    shared = first.keys() & second.keys()
    differing = {name for name in shared if first[name] != second[name]}
    assert differing <= DIFFERENT.keys(), f"{sorted(differing - DIFFERENT.keys())} differ between {pair}"
    counted = differing - NOT_COUNTED
    assert sum(name.startswith("Args.") for name in counted) <= 5
    assert sum(not name.startswith("Args.") for name in counted) <= 8
    assert {section_of(name, part) for name in pair for part in differing} <= {1, 3, 4, 9, 10, 11}
    assert {"Batch", "CompletionModel.forward", "PassResults.gather", "JSONL_FILES", "Args"} <= shared - differing
    assert {
        "generate",
        "sample",
        "pass_logprobs",
        "token_logprobs",
        "micro_batches",
        "evaluate",
        "load_state",
    } <= shared - differing
    assert len(shared) > 130


def test_every_line_of_the_table_is_needed():
    """A name that is the same text in all scripts again is taken out of the table."""
    parts = [named_parts(name) for name in SCRIPTS]
    differing = {name for a in parts for b in parts for name in a.keys() & b.keys() if a[name] != b[name]}
    assert differing == DIFFERENT.keys()


# The share at least, and hunks at most. Lines that the two advantage functions have in common make two of the hunks.
SHARED_LINES = {("rloo", "grpo"): (0.9, 22), ("rloo", "ppo"): (0.8, None)}


@pytest.mark.parametrize("pair", SHARED_LINES, ids="-".join)
def test_most_lines_of_two_scripts_are_the_same(pair):
    """Blank lines do not count. The share is that of the script with fewer lines."""
    first, second = ([line.rstrip() for line in source_of(name).splitlines() if line.strip()] for name in pair)
    share, hunks = SHARED_LINES[pair]
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    common = sum(block.size for block in matcher.get_matching_blocks())
    assert common / min(len(first), len(second)) >= share
    assert hunks is None or sum(kind != "equal" for kind, *_ in matcher.get_opcodes()) <= hunks


# ================================================== how a script reads ===========================================
LIMITS = {
    "rloo": dict(lecture_lines=535, lecture_tokens=3_500, tokens=11_600, main=150, conditional_expressions=12),
    "grpo": dict(lecture_lines=590, lecture_tokens=4_000, tokens=12_000, main=160, conditional_expressions=12),
    "ppo": dict(lecture_lines=650, lecture_tokens=4_600, tokens=13_200, main=175, conditional_expressions=14),
}
ALL_LIMITS = dict(function=60, lecture_tokens_per_line=10, tokens_per_line=11, width=100, comprehensions_per_100=4)
ALL_LIMITS |= dict(tuple_assignments=4, nesting=6)
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def nesting(node, level=0):
    """How deep compound statements are nested. An elif is as deep as its if."""
    inner = level + isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try))
    depths = [inner]
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        depths.append(nesting(child, inner - is_elif))
    return max(depths)


def measure(source):
    """How much there is to read in a script, and how dense it is. Comments and docstrings are not counted as tokens."""
    lines, tree = source.splitlines(), ast.parse(source)
    [banner] = [number for number, line in enumerate(lines, start=1) if line.startswith("#") and "MACHINERY" in line]
    nodes, docstring_lines = list(ast.walk(tree)), set()
    for node in filter(is_docstring, nodes):
        docstring_lines.update(range(node.lineno, node.end_lineno + 1))
    token_lines = []  # for each token its line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in docstring_lines:
            token_lines.append(token.start[0])
    in_lecture = [line for line in token_lines if line < banner]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    lengths = [(node.name, node.end_lineno - node.lineno + 1) for node in functions]
    comprehensions = sum(isinstance(node, COMPREHENSIONS) for node in nodes)
    to_tuples = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)]
    return dict(
        lecture_lines=banner - 1,
        lecture_tokens=len(in_lecture),
        tokens=len(token_lines),
        lecture_tokens_per_line=round(len(in_lecture) / len(set(in_lecture)), 1),
        tokens_per_line=round(len(token_lines) / len(set(token_lines)), 1),
        width=max(map(len, lines)),
        main=max(length for function, length in lengths if function == "main"),
        function=max(length for function, length in lengths if function != "main"),
        nesting=nesting(tree),
        comprehensions_per_100=round(100 * comprehensions / len(set(token_lines)), 1),
        conditional_expressions=sum(isinstance(node, ast.IfExp) for node in nodes),
        tuple_assignments=sum(isinstance(node.value, ast.Tuple) for node in to_tuples),
    )


def test_the_measures_count_what_they_say():
    """In this small text everything can be counted by hand."""
    lines = ["def main(x):  # no token", '    """No token,', '    and none here."""', "    a, b = 1, [y for y in x]"]
    lines += ["    if a:", "        pass", "    elif b:", "        for c in x:", "            pass"]
    lines += ["    return a if b else c", "# ===== MACHINERY =====", "def other(): return ()"]
    # The lines of the lecture have 6, 13, 3, 1, 3, 5, 1 and 6 tokens. The line below the banner has 8.
    expected = dict(lecture_lines=10, lecture_tokens=38, tokens=46, main=10, function=1, nesting=2, width=28)
    expected |= dict(lecture_tokens_per_line=4.8, tokens_per_line=5.1, comprehensions_per_100=11.1)
    assert measure("\n".join(lines)) == expected | dict(conditional_expressions=1, tuple_assignments=1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_easy_to_read(name):
    """No measure of a script is over its limit. A limit that makes the text worse for a reader may be changed."""
    counts, limits = measure(source_of(name)), ALL_LIMITS | LIMITS[name]
    assert counts.keys() == limits.keys()
    over = {what: f"{counts[what]}, at most {limits[what]}" for what in limits if counts[what] > limits[what]}
    assert not over


# Names and their sections. The first five sections are the lecture.
LECTURE = dict(Args=1, batch_arithmetic=2, Batch=3, main=4, generate=5, sample=5, completion_logprobs=5)
LECTURE |= dict(pass_logprobs=5, micro_batches=5)
OWN_LECTURE = {name: {f"{name}_advantages": 3, f"{name}_loss": 3} for name in ("rloo", "grpo")}
OWN_LECTURE["ppo"] = dict(gae=3, ppo_loss=3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_a_lecture_and_machinery(name):
    """All scripts have the same eleven sections. The lecture has what a reader needs to understand the algorithm."""
    banners = BANNER.findall(source_of(name))
    assert banners == BANNER.findall(source_of("rloo"))
    number, title = banners.pop(5)
    assert number == "" and title.startswith("MACHINERY")
    assert [number for number, _ in banners] == [str(number) for number in range(1, 12)]
    for word, (_, title) in zip(SECTIONS, banners, strict=True):
        assert word in title.replace(",", "").split()
    sections = LECTURE | OWN_LECTURE[name]
    assert {part: section_of(name, part) for part in sections} == sections


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_loop_is_in_main(name):
    """Three plain loops, one inside the other, are inside the loop over iterations. `main` defines no functions."""
    [main] = [node for node in ast.parse(source_of(name)).body if getattr(node, "name", None) == "main"]
    assert not [node for node in ast.walk(main) if isinstance(node, (ast.FunctionDef, ast.Lambda)) and node is not main]
    body, called = main.body, []
    for variable in ("iteration", "ppo_epoch", "mini_batch", "micro_batch"):
        [loop] = [node for node in body if isinstance(node, ast.For) and ast.unparse(node.target) == variable]
        called.append(ast.unparse(loop.iter.func))
        body = loop.body
    assert called == ["range", "range", "draw_mini_batches", "micro_batches"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_program_reads_a_docstring(name):
    """Docstrings are for people. Only tyro gets one, and shows it as it is."""
    nodes = list(ast.walk(ast.parse(source_of(name))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {"re", "inspect"} & imported
    assert sum("__doc__" in vars(node).values() for node in nodes) == 1
    [call] = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "tyro.cli"]
    assert ast.unparse(call) == "tyro.cli(Args, description=__doc__)"


# =================================================== flags ==================================================
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


def held_out(world):
    return {"eval_dataset": world.dataset(5, seed=9)}


def with_reference(world):
    return {"ref_model_path": world.reference}


ONE_UPDATE = dict(num_ppo_epochs=1, num_mini_batches=1)
LIVE = dict(num_ppo_epochs=2, num_mini_batches=2, learning_rate=0.01, kl_coef=0.1, batch_size=12, total_episodes=24)
FLAG_CHANGES = {  # for each flag another value, and the flags that both runs need so that it matters
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
    # A flag of two scripts is tried in the first one. The drift test makes sure that its text is the same in both.
    if field.name not in ELSEWHERE and field.name not in seen
    if not seen.add(field.name)
]


@pytest.fixture(scope="module")
def live_results():
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("script, flag", FLAG_PAIRS)
def test_changing_a_flag_changes_the_run(script, run, world, live_results, flag):
    """Another value of a flag changes what a run computes or writes. args.yaml and plan.yaml do not count."""
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
    """Every name in metrics.jsonl stands in a row of a table of docs/metrics.md. Each script logs the common ones."""
    flags = dict(reward=world.reward("parts"), kl_coef=0.1, num_mini_batches=2, eval_dataset=world.dataset(5))
    metrics = run(script, **flags)[1]
    table = "\n".join(line for line in (HERE / "docs/metrics.md").read_text().splitlines() if line.startswith("|"))
    documented = set(re.findall(r"`([^`]+)`", table))
    logged = {"reward/<name>" if name.startswith("reward/") else name for row in metrics for name in row}
    assert logged <= documented, f"not in docs/metrics.md: {sorted(logged - documented)}"
    common = "iteration step episode epoch lr eps time/rollout_s time/train_s objective/scores objective/kl grad_norm"
    common += " objective/entropy policy/entropy_avg loss/policy_avg policy/approxkl_avg policy/clipfrac_avg val/ratio"
    common += " val/ratio_var val/num_eos_tokens response_length_mean eval/scores val/sampling_logprob_difference"
    assert set(common.split()) <= logged


def test_no_metric_is_always_zero(script, run, world):
    """In this run each metric is different from 0 at least once, and all of them are finite."""
    flags = dict(num_mini_batches=2, num_ppo_epochs=2, learning_rate=0.02, num_train_epochs=3, cliprange=0.02)
    flags |= dict(kl_coef=0.1, ref_model_path=world.reference, model_path=world.many_eos, batch_size=6)
    flags |= dict(target_kl=0.01, cliprange_value=0.01) if script.__name__ == "ppo" else dict(k=2, response_length=2)
    metrics = run(script, **flags, eval_dataset=world.dataset(5, seed=9))[1]
    always_zero = {name for row in metrics for name in row if not any(other.get(name) for other in metrics)}
    assert not always_zero
    assert all(abs(x) < float("inf") for row in metrics for x in row.values())


# =============================================== what is written ============================================
def test_what_a_run_writes(script, run, world, capsys):
    """A run writes args.yaml, plan.yaml, metrics, samples, rollouts and a model. The model loads, and training has
    changed it. The last line that is printed sums the run up."""
    capsys.readouterr()
    args, metrics, output_dir = run(script, num_train_epochs=2, num_sample_generations=2, batch_size=6)
    printed = capsys.readouterr().out
    names = {"args.yaml", "plan.yaml", "metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "model"}
    names |= {"value_model"} if script.__name__ == "ppo" else set()
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
    assert (
        closing.split(" in ")[0] in card
        and f"`{shlex.join(sys.argv)}`" in card
        and f"torch {torch.__version__}" in card
    )

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
    """The table shows brackets as they are. Only the main process prints it. Trackers that have tables get the rows."""
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
    """--log-with tensorboard writes the numbers of metrics.jsonl into the run's folder. Its steps are episodes."""
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
    """benchmark/plot.py averages runs that differ only in the seed. The labels of other runs show their flags."""
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
    """The id, name, config, history and files of an offline run of wandb. The file is in LevelDB's log format."""
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
    """--log-with wandb without network writes the config, the metrics of each episode, and tables of samples. A resumed
    run continues the same run of wandb."""
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
    """A bad flag ends the program with status 2. The folder of a run is named after script, seed and time."""
    refused = launch(script, 1, tmp_path, base_flags(world) | dict(batch_size=0))
    assert refused.returncode == 2 and "--batch-size must be above 0" in refused.stdout + refused.stderr
    ran = launch(script, 1, tmp_path, base_flags(world) | dict(total_episodes=12))
    assert ran.returncode == 0, ran.stderr
    assert "12 episodes, 1 steps" in ran.stdout.splitlines()[-1]
    assert [path.name.split("__")[:2] for path in (tmp_path / "runs").iterdir()] == [[script.__name__, "1"]]
