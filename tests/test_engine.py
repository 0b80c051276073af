"""benchmark/engine/: the patches are short, apply, and make the run of the plain scripts with a stand-in engine.

The stand-in is tests/stand_in_engine. benchmark/engine/run.py runs the patches with the real engine.
"""

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    HERE,
    distance,
    flat,
    import_file,
    make_tokenizer,
    read_jsonl,
    record_calls,
    reset_accelerate,
    weights_of,
)

ENGINE = HERE / "benchmark" / "engine"
STAND_IN = HERE / "tests" / "stand_in_engine"
PATCHED = pytest.mark.parametrize("name", ["rloo", "grpo"])


def copy_script(folder, name, is_patched=True):
    """A script in a folder of its own, and what its defaults need."""
    folder.mkdir()
    shutil.copy(HERE / f"{name}.py", folder)
    (folder / "benchmark").symlink_to(HERE / "benchmark")
    if is_patched:
        subprocess.run(["git", "apply", ENGINE / f"{name}.patch"], cwd=folder, check=True)
    return folder / f"{name}.py"


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, as the module vllm."""
    stand_in = import_file(STAND_IN / "vllm.py")
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    return stand_in


@pytest.fixture
def patched(vllm, tmp_path):
    """patched(name, old, new): the patched script as a module. `old` is replaced, if it is given."""

    def patched(name, old="", new=""):
        path = copy_script(tmp_path / "patched", name)
        text = path.read_text()
        assert not old or text.count(old) == 1
        path.write_text(text.replace(old, new) if old else text)
        return import_file(path.rename(path.with_name(f"{name}_engine.py")))

    return patched


# ================================================= patches ==================================================
@PATCHED
def test_a_patch_is_short_and_applies(name, tmp_path):
    """At most 60 lines are added to one script, which stays clean. `-R` brings it back."""
    head, diff = re.split(r"^(?=diff --git)", (ENGINE / f"{name}.patch").read_text(), maxsplit=1, flags=re.M)
    added = [line for line in diff.splitlines() if re.match(r"\+(?!\+\+ )", line)]
    assert 0 < len(added) <= 60
    assert f"    git apply benchmark/engine/{name}.patch && VLLM_LOGGING_LEVEL=ERROR python {name}.py" in head
    script = copy_script(tmp_path / name, name)
    assert script.read_bytes() != (HERE / f"{name}.py").read_bytes()
    for command in (["check"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, "--quiet", "--config", HERE / ".ruff.toml"]
        subprocess.run([*words, "--line-length", "100", script], check=True)
    subprocess.run(["git", "apply", "-R", ENGINE / f"{name}.patch"], cwd=script.parent, check=True)
    assert script.read_bytes() == (HERE / f"{name}.py").read_bytes()


@PATCHED
def test_what_the_engine_cannot_do_is_refused(name, patched):
    """LoRA where the flags are read, FSDP and DeepSpeed where the engine would be made. Each is named."""
    module = patched(name)
    with pytest.raises(ValueError, match="--lora-r: the engine needs whole weights"):
        module.Args(lora_r=4)
    for kind in ("FSDP", "DEEPSPEED"):
        accelerator = SimpleNamespace(distributed_type=module.accelerate.DistributedType[kind])
        with pytest.raises(ValueError, match=f"{kind}: the engine needs one process or DDP"):
            module.load_engine(module.Args(), accelerator, [])


# ============================================ with the stand-in =============================================
# Without KL: that of the plain script has the rounding of sampling, that of the patched one the rounding of training.
# Where the KL is 0 up to rounding, Adam makes full steps of both.
FLAGS = dict(num_train_epochs=4.0, temperature=0.7, stop_token_id=9, kl_coef=0.0)


def tokens_of(output_dir):
    return [row["token_ids"] for row in read_jsonl(output_dir / "rollouts.jsonl")]


@PATCHED
def test_the_engine_makes_the_plain_run(name, patched, vllm, run):
    """The same completions and weights. The engine gets new weights before every rollout, and is shut down."""
    _, metrics, output_dir = run(patched(name), **FLAGS)
    _, plain_metrics, plain_dir = run(import_file(HERE / f"{name}.py"), **FLAGS)
    assert tokens_of(output_dir) == tokens_of(plain_dir)
    assert distance(weights_of(output_dir / "model"), weights_of(plain_dir / "model")) < 1e-5
    for row, plain in zip(metrics, plain_metrics, strict=True):
        for metric in ("objective/scores", "response_length_mean", "val/num_eos_tokens"):
            assert row[metric] == plain[metric]
    assert metrics[0]["val/num_eos_tokens"] < 12  # The last token of a cut completion is no EOS.
    assert all(0 < row["val/sampling_logprob_difference"] < 1e-4 for row in metrics)
    assert all(row["val/sampler_weight_std"] < 1e-4 for row in metrics)
    assert all(0 < row["policy/entropy_avg"] < 3 for row in metrics)
    [engine] = vllm.engines
    assert engine.is_shut_down


BREAKS = {
    "old prompts": ("    model.engine.reset_prefix_cache()", "    pass", AssertionError, "prefix cache"),
    "old weights": (
        '    model.engine.collective_rpc("reload_weights"',
        '    dict(method="reload_weights"',
        RuntimeError,
        "sampling and training give log-probabilities",
    ),
    "an option of the engine": ("max_model_len=", "max_length=", TypeError, "unexpected keyword argument 'max_length'"),
    "an option of sampling": ("flat_logprobs=", "flat=", TypeError, "unexpected keyword argument 'flat'"),
    "an option of generate": ("use_tqdm=", "tqdm=", TypeError, "unexpected keyword argument 'tqdm'"),
    "an option of the weights": ('"weights_iterator"', '"weights"', TypeError, "unexpected keyword argument 'weights'"),
    "a value": ('"processed_logprobs"', '"logprobs"', AssertionError, None),
    "too little room": (
        " + args.response_length,\n        logprobs_mode",
        ",\n        logprobs_mode",
        AssertionError,
        None,
    ),
    "a field of the result": ("completion.finish_reason", "completion.reason", AttributeError, "reason"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_patch_is_noticed(what, patched, run):
    """A line of the patch is broken on purpose. The run stops, and the message says why."""
    old, new, error, message = BREAKS[what]
    with pytest.raises(error, match=message):
        run(patched("rloo", old, new), **FLAGS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stop_token_ids=model.eos_ids, ", ""),
        ("seed=int(u * 2**53)", "seed=1"),
        ("dict(temperature=temperature, ", "dict("),
        ("prompts, requests, use_tqdm", "prompts[::-1], requests, use_tqdm"),
    ],
    ids=["stop tokens", "seeds", "temperature", "order"],
)
def test_a_broken_patch_makes_another_run(old, new, patched, run):
    """Each of these would go unseen without the plain run beside it, or stops the run."""
    try:
        _, _, output_dir = run(patched("rloo", old, new), **FLAGS)
    except RuntimeError as error:
        assert "sampling and training give log-probabilities" in str(error)
        return
    _, _, plain_dir = run(import_file(HERE / "rloo.py"), **FLAGS)
    assert tokens_of(output_dir) != tokens_of(plain_dir)


@PATCHED
def test_importance_weights_by_plain_python(name, patched, vllm, run, monkeypatch):
    """A bfloat16 engine under float32 training. min(p_old / q, cap) of an episode, or of a token in GRPO."""
    calls = record_calls(monkeypatch, vllm.LLM, "generate")
    flags = FLAGS | dict(engine_dtype="bfloat16", weight_cap=1.001, num_train_epochs=1.0)
    _, metrics, output_dir = run(patched(name), **flags)
    rollouts = read_jsonl(output_dir / "rollouts.jsonl")
    engine = {}  # prompt and completion, as tokens: log-probabilities
    for output in [output for call in calls for output in call.result]:
        completion = output.outputs[0]
        engine[*output.prompt_token_ids, *completion.token_ids] = completion.logprobs.logprobs
    assert metrics[0]["val/sampling_logprob_difference"] > 1e-3
    assert any(row["val/sampler_weight_std"] > 1e-4 for row in metrics)
    first = [row for row in rollouts if row["iteration"] == 1]
    tokenizer = make_tokenizer()
    losses = []
    for start in range(0, len(first), 3):
        group = first[start : start + 3]
        scores = torch.tensor([row["score"] for row in group])
        for row in group:
            tokens = (*tokenizer(row["prompt"])["input_ids"], *row["token_ids"])
            logratio = torch.tensor(row["logprobs"]) - torch.tensor(engine[tokens])
            if name == "rloo":
                advantage = (row["score"] - scores.mean()) * 3 / 2
                advantage = advantage * logratio.sum().exp().clamp(max=1.001)
                assert row["advantage"] == pytest.approx(advantage.item(), abs=1e-5)
                losses.append(-advantage)
            else:
                losses.append(-row["advantage"] * logratio.exp().clamp(max=1.001).mean())
    assert metrics[0]["loss/policy_avg"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-6)


# =========================================== the default task ===============================================
@PATCHED
@pytest.mark.slow
def test_512_episodes_of_the_default_task(name, patched, vllm, tmp_path):
    """The patched script learns as the plain one: the same completions on one and on two processes, and once more."""
    module = patched(name)
    folders = {run: tmp_path / run for run in ("plain", "one", "again", "two")}
    for run in ("plain", "one", "again"):
        script = import_file(HERE / f"{name}.py") if run == "plain" else module
        reset_accelerate()
        script.main(script.Args(total_episodes=512, save_rollouts=True, output_dir=str(folders[run])))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", module.__file__]
    command += ["--total-episodes", "512", "--save-rollouts", "--output-dir", folders["two"]]
    environment = os.environ | {"PYTHONPATH": str(STAND_IN)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]

    start = flat(weights_of(module.Args().model_path))
    plain = flat(weights_of(folders["plain"] / "model"))
    for run in ("one", "again", "two"):
        assert tokens_of(folders[run]) == tokens_of(folders["plain"])
        assert (flat(weights_of(folders[run] / "model")) - plain).norm() / (plain - start).norm() < 1e-3
    models = [(folders[run] / "model" / "model.safetensors").read_bytes() for run in ("one", "again")]
    assert models[0] == models[1]
    metrics = read_jsonl(folders["one"] / "metrics.jsonl")
    assert metrics[0]["eval/scores"] < 0.15 and metrics[-1]["eval/scores"] > 0.3
    assert max(row.get("val/sampling_logprob_difference", 0) for row in metrics) < 1e-4
