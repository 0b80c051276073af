"""benchmark/memory.py: what it predicts is what the tensors of a run take."""

import json
import sys

import memory
import transformers
import tyro
import yaml
from conftest import (
    HERE,
    MODULES,
    base_flags,
    launcher,
    make_args,
    make_rows,
    make_tokenizer,
    save_classifier,
    save_model,
    write_jsonl,
)
from pytest import approx, mark, raises

FITS = HERE / "benchmark/hardware/fits.py"
CASES = yaml.safe_load("""
all weights: {}
checkpointing: {gradient_checkpointing: true}
LoRA, bfloat16: {lora_r: 4, share_prompts: true, dtype: bfloat16}
one pass: {per_device_train_batch_size: 12}
# Sampling has the highest peak, beside the gradients of the update before.
sampling: {per_device_train_batch_size: 1, response_length: 36, gradient_checkpointing: true}
mini-batches: {num_mini_batches: 2, per_device_train_batch_size: 12}
shared: {share_prompts: true}
reward model: {reward_model_path: classifier}
no KL: {kl_coef: 0.0}
experts: {model: {architecture: mixtral}}
# A recorded cache has room for all tokens in every layer, also where a window is shorter.
recorded: {model: {architecture: gemma3, head_dim: 128}, cuda_graphs: true, response_length: 228,
           per_device_train_batch_size: 1, gradient_checkpointing: true}
""")
OTHERS = ["grpo: all weights", "ppo: all weights", "ppo: LoRA, bfloat16", "ppo: reward model"]


def plain_steps(model, rows, cache):
    """The passes of `record_steps`, which are not recorded."""
    while True:
        yield MODULES["rloo"].forward(model, rows, cache, cache.layers[0].cumulative_length[None])


@mark.parametrize("case", [*[f"rloo: {case}" for case in CASES], *OTHERS])
def test_a_prediction_is_the_peak_of_a_run(case, world, run, tmp_path, monkeypatch):
    """Within a few percent. The run has real tensors, of equal lengths, as no token ends one."""
    name, case = case.split(": ")
    script = MODULES[name]
    shape = dict(vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=2)
    shape |= dict(tokenizer=make_tokenizer(eos_token=None), initializer_range=0.02)
    shape |= dict(max_position_embeddings=256)
    prompts = [f"{number:024b}" for number in range(8)]
    flags = dict(
        dataset=write_jsonl(tmp_path / "data.jsonl", make_rows(prompts)),
        total_episodes=24,
        response_length=12,
        reward="squares",
        per_device_train_batch_size=4,  # of 12, which are divided evenly
        num_sample_generations=0,
        save_every=None,
    )
    flags |= dict(share_prompts=False, cuda_graphs=False) | CASES[case]
    shape |= flags.pop("model", {})
    flags["model_path"] = save_model(tmp_path / "model", eos_ids=None, **shape)
    if "reward_model_path" in flags:
        flags["reward_model_path"], _ = save_classifier(tmp_path / "classifier", **shape)
    monkeypatch.setattr(script, "can_record", lambda args: args.cuda_graphs)
    monkeypatch.setattr(script, "record_steps", plain_steps)
    counted = memory.Memory()
    with counted:
        run(script, **flags)
    args = script.check_flags(make_args(script, **base_flags(world, flags)))
    row = memory.measure(script, args, 24)
    assert memory.peak(row) == approx(counted.peak, rel=0.04)
    assert ("scoring" in row) == (case != "no KL")


def test_a_line_through_few_layers_is_what_all_take(world, tmp_path):
    """Also where few layers have the peak of a stage in another part of it."""
    script = MODULES["ppo"]
    shape = dict(hidden_size=64, intermediate_size=256, vocab_size=1000, tie_word_embeddings=True)
    path = save_model(tmp_path, num_hidden_layers=24, max_position_embeddings=128, **shape)
    flags = dict(model_path=path, response_length=48, dtype="bfloat16", share_prompts=False)
    flags |= dict(batch_size=18, per_device_train_batch_size=4, gradient_checkpointing=True)
    args = script.check_flags(make_args(script, **base_flags(world, flags)))
    inputs = script, args, 40
    assert memory.equal_layers(*inputs) == 24
    assert memory.measure(*inputs, line=24) == approx(memory.measure(*inputs), rel=1e-4)


def test_other_layers_have_no_line(world, tmp_path, monkeypatch):
    """A copy freezes some of them, fails with few, or they are of several kinds."""
    script = MODULES["rloo"]
    load = script.load_policy

    def freeze(*inputs):
        policy = load(*inputs)
        policy.model.layers[:6].requires_grad_(False)
        return policy

    def need_all(*inputs):
        policy = load(*inputs)
        assert len(policy.model.layers) == 12
        return policy

    kinds = dict(architecture="gemma3", head_dim=16)
    for edit, shape in (freeze, {}), (need_all, {}), (load, kinds):
        monkeypatch.setattr(script, "load_policy", edit)
        path = save_model(tmp_path / edit.__name__, num_hidden_layers=12, **shape)
        args = script.check_flags(make_args(script, **base_flags(world, dict(model_path=path))))
        assert memory.equal_layers(script, args, 8) is None


@mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_prediction_is_what_two_processes_took(sharding, tmp_path, monkeypatch):
    """In each stage. fits.json has what they took."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    fits = launcher.import_script(FITS)
    rows = launcher.read_result(FITS.with_suffix(".json"))["rows"]
    [row] = launcher.having(rows, part="two_processes", sharding=sharding)
    sizes = dict(zip(fits.NAMES, fits.LLAMAS[row["size"]]))
    transformers.LlamaConfig(**sizes, tie_word_embeddings=True).save_pretrained(tmp_path)
    flags = f"{fits.PARTS['two_processes'].flags} --model-path {tmp_path} --dataset none"
    found = fits.predict("rloo", flags, 32, processes=2, sharding=sharding)
    for stage in memory.STAGES:
        assert found[stage] == approx(row[f"real_{stage}"], rel=0.02)


MESSAGES = """
none.py --prompt-tokens 4 | none.py: no such script
rloo.py --prompt-tokens 0 | must be above 0
rloo.py --prompt-tokens 4 --processes 0 | must be above 0
rloo.py --prompt-tokens 4 --model-path no/such | no/such: .
rloo.py --model-path no/such --dataset none | no/such: .
rloo.py --prompt-tokens 4 --model-path FOLDER/t5 | encoder-decoder
rloo.py --prompt-tokens 4 --model-path FOLDER/code | custom code
rloo.py --prompt-tokens 2000 | positions
rloo.py --prompt-tokens 4 --lora-r 4 | peft
"""


@mark.parametrize("line", MESSAGES.strip().split("\n"))
def test_what_cannot_be_counted_is_refused_in_one_line(line, tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    monkeypatch.setitem(sys.modules, "peft", None)
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    (tmp_path / "code").mkdir()
    config = dict(model_type="mine", auto_map=dict(AutoConfig="mine.Config"))
    (tmp_path / "code" / "config.json").write_text(json.dumps(config))
    words, said = line.replace("FOLDER", str(tmp_path)).split(" | ")
    with raises(SystemExit, match=f"^error: .*{said}[^\n]*$"):
        memory.main(*tyro.cli(memory.Options, args=words.split(), return_unknown_args=True))


def test_a_report_ends_where_nothing_fits(monkeypatch, capsys):
    """Sizes end at the first that does not fit. Advice that cannot be tried says why."""
    monkeypatch.chdir(HERE)
    monkeypatch.setitem(sys.modules, "peft", None)
    memory.main(memory.Options(HERE / "rloo.py", prompt_tokens=4, gib=1e-3), [])
    printed = capsys.readouterr().out
    assert "micro-batch                1\n" in printed
    assert "nothing stays below 85% of 0.001 GiB" in printed
    assert "FSDP2 on 8 processes, each with an eighth of the batch" in printed
    assert "?  --lora-r 16: " in printed
