"""The recipe in benchmark/tldr/README.md. Its commands run as they stand, on tiny models of the same architecture.

They run in a folder that holds models and data under the names that they have on the Hub. Only three sizes are
replaced: there is one iteration, it has fewer episodes, and there are fewer held-out prompts.
"""

import json
import re
import shlex
import sys
from pathlib import Path
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
    fresh_imports,
    import_file,
    launch,
    read_jsonl,
    reset_accelerate,
    write_jsonl,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

README = (HERE / "benchmark" / "tldr" / "README.md").read_text(encoding="utf-8")
NUM_PROMPTS = 116_722  # rows of the dataset's training split
SFT, REWARD = (f"cleanrl/EleutherAI_pythia-1b-deduped__{stage}__tldr" for stage in ("sft", "reward"))
END = "<|endoftext|>"
# Pythia's config with other sizes. The vocabulary has more rows than the tokenizer has tokens.
SHAPE = dict(vocab_size=272, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
SHAPE |= dict(rotary_pct=0.25, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, initializer_range=0.3)


def commands():
    """The command lines of the recipe, each as a list of words."""
    blocks = re.findall(r"^    \S.*?(?=\n\n)", README, re.DOTALL | re.MULTILINE)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


def command_of(name):
    """The words before the script in its command line, and the words after it."""
    [words] = [words for words in commands() if f"{name}.py" in words]
    place = words.index(f"{name}.py")
    return words[:place], words[place + 1 :]


def flags_of(words):
    """The flags of a command line, by name. A flag without a value is True."""
    values = [*words[1:], "--"]
    return {
        word[2:].replace("-", "_"): True if value.startswith("--") else value
        for word, value in zip(words, values)
        if word.startswith("--")
    }


def make_bytes_tokenizer(**special):
    """A tokenizer of bytes, as that of GPT-NeoX, without merges. Its EOS is token 0."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({token: i for i, token in enumerate([END, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = dict(bos_token=END, eos_token=END, unk_token=END) | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def make_row(i):
    prompt = f"SUBREDDIT: r/test\n\nTITLE: Post {i}\n\nPOST: {'It is long. ' * (i % 5)}\n\nTL;DR:"
    return {"prompt": prompt, "completion": f" It is post {i}."}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with everything that the recipe names: policy, reward model, a dataset with two splits, and benchmark/.

    The policy's tokenizer has a padding token. That of the reward model has none.
    """
    folder = tmp_path_factory.mktemp("tldr")
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(**SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / SFT)
    make_bytes_tokenizer(pad_token="[PAD]").save_pretrained(folder / SFT)
    config = transformers.GPTNeoXConfig(**SHAPE, num_labels=1, classifier_dropout=0.1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / REWARD)
    make_bytes_tokenizer().save_pretrained(folder / REWARD)
    (folder / "trl-lib" / "tldr").mkdir(parents=True)
    for split, count in (("train", 300), ("validation", 20)):
        write_jsonl(folder / "trl-lib" / "tldr" / f"{split}.jsonl", [make_row(i) for i in range(count)])
    (folder / "benchmark").symlink_to(HERE / "benchmark")
    return folder


@pytest.fixture
def here(models, monkeypatch, tmp_path):
    """Change to a temporary folder with links to all of that."""
    import datasets

    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


SIZES = {"total_episodes": "64", "batch_size": "64", "eval_dataset": "trl-lib/tldr:validation[:8]"}  # one iteration


def run_command(name, **changes):
    """Run the command of a script in this process, for one iteration. Returns its Args, metrics and output folder."""
    script, flags = MODULES[name], flags_of(command_of(name)[1]) | SIZES | changes
    words = [x for flag, value in flags.items() for x in (f"--{flag.replace('_', '-')}", value) if x is not True]
    args = tyro.cli(script.Args, args=words)
    reset_accelerate()
    with fresh_imports():
        script.main(args)
    return args, read_jsonl(Path(args.output_dir) / "metrics.jsonl"), Path(args.output_dir)


def plain_score(row):
    """The reward model's score of an episode, by one plain pass over its text. It is 1 less where no EOS came."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(REWARD)
    model = AutoModelForSequenceClassification.from_pretrained(REWARD, dtype=torch.bfloat16).eval()
    ended = row["token_ids"][-1] == 0
    tokens = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [0] * ended
    hidden = model.gpt_neox(torch.tensor([tokens])).last_hidden_state[:, -1]
    return model.score(hidden).item() - (0 if ended else 1)


# ================================================== counts ==================================================
def test_the_readme_fits_a_screen_or_two_and_says_what_it_is():
    lines = README.splitlines()
    assert len(lines) <= 80 and "**Not run here**" in README
    assert [words[:2] for words in commands()] == [["accelerate", "launch"]] * 3 + [["python", "benchmark/win_rate.py"]]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_counts_are_those_that_plan_prints(name, monkeypatch, capsys):
    """The rows of the README's table are what `--plan 8` prints for the command as it stands, with NUM_PROMPTS rows."""
    script = MODULES[name]
    tokenizer, asked = SimpleNamespace(from_pretrained=lambda path: path), []
    monkeypatch.setattr(script.transformers, "AutoTokenizer", tokenizer)
    monkeypatch.setattr(script, "load_prompts", lambda *flags: asked.append(flags) or [None] * NUM_PROMPTS)
    capsys.readouterr()
    script.main(tyro.cli(script.Args, args=[*command_of(name)[1], "--plan", "8"]))
    assert asked == [("trl-lib/tldr:train", None, SFT, 512)]
    plan = yaml.safe_load(capsys.readouterr().out)
    header, *rows = re.findall(r"^\| (\S*) \| (\S+) \| (\S+) \| (\S+) \|$", README, re.MULTILINE)
    column = header.index(name)
    assert {row[0]: float(row[column].replace(",", "")) for row in rows} == pytest.approx(plan, abs=5e-4)


def test_the_launcher_takes_its_words(models):
    """accelerate reads them as FSDP2 on eight processes. The layer class is that of the recipe's architecture."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    model = AutoModelForCausalLM.from_pretrained(models / SFT)
    for name in SCRIPTS:
        before, after = command_of(name)
        before = [str(HERE / word) if word.endswith(".yaml") else word for word in before]
        args = launch_command_parser().parse_args([*before[2:], str(HERE / f"{name}.py"), *after])
        args = _validate_launch_command(args)[0]
        assert (args.use_fsdp, args.fsdp_version, args.num_processes, args.mixed_precision) == (True, 2, 8, "no")
        layers = [type(module).__name__ for module in model.modules()]
        assert layers.count(args.fsdp_transformer_layer_cls_to_wrap) == SHAPE["num_hidden_layers"]
        assert args.training_script_args == after


# =================================================== runs ===================================================
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_iteration_with_every_flag(name, here, capsys):
    """The command runs and uses every flag. Its scores are those of a plain pass, and its model loads."""
    args, metrics, output_dir = run_command(name, save_rollouts=True)
    given = flags_of(command_of(name)[1]) | SIZES
    for flag, value in given.items():
        used = yaml.safe_load((output_dir / "args.yaml").read_text())[flag]
        assert used == (value if isinstance(used, (str, bool)) else float(value)), flag
    before, after = metrics
    assert after["episode"] == 64 and after["step"] == (4 if name == "ppo" else 1)
    assert "eval/scores" in before and "eval/scores" in after
    assert 0 < after["val/num_eos_tokens"] < 64 and after["response_length_mean"] < 53

    rows = read_jsonl(output_dir / "rollouts.jsonl")
    assert len(rows) == 64 and max(len(row["token_ids"]) for row in rows) == 53
    assert all(row["token_ids"].index(0) == len(row["token_ids"]) - 1 for row in rows if 0 in row["token_ids"])
    is_group = [len({row["prompt"] for row in rows[i : i + 4]}) == 1 for i in range(0, 64, 4)]
    assert all(is_group) == (name != "ppo")
    ended, cut = ([row for row in rows if (row["token_ids"][-1] == 0) == ends][:4] for ends in (True, False))
    assert ended and cut
    for row in ended + cut:
        assert row["score"] == pytest.approx(plain_score(row), abs=0.05), row
    assert "its scores are random" not in capsys.readouterr().err

    assert list(output_dir.glob("checkpoints/*/state.json"))
    trained = AutoModelForCausalLM.from_pretrained(output_dir / "model")
    assert trained.config.model_type == "gpt_neox"
    run_command(name)  # The command has --resume, so it finds the run finished.
    assert "nothing to do: the run is finished" in capsys.readouterr().out


FSDP2 = """
import sys
sys.path.insert(0, {folder!r})
import fsdp2_cpu
fsdp2_cpu.SETTINGS["FSDP_TRANSFORMER_CLS_TO_WRAP"] = {layer!r}
fsdp2_cpu.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo"])
def test_one_iteration_under_fsdp2(name, here):
    """Both models of PPO are sharded over two processes, as the launcher's words say. The run is that of one process,
    up to the rounding of bfloat16."""
    _, metrics, _ = run_command(name)
    before, after = command_of(name)
    [path] = HERE.glob("benchmark/**/fsdp2_cpu.py")
    layer = flags_of(before)["fsdp_transformer_layer_cls_to_wrap"]
    (here / "sharded_run.py").write_text(FSDP2.format(folder=str(path.parent), layer=layer))
    flags = flags_of(after) | SIZES | dict(output_dir="sharded")
    cache = dict(HF_DATASETS_CACHE=str(here / "cache"))
    finished = launch(MODULES[name], 2, here, flags, program=here / "sharded_run.py", **cache)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    gathers = json.loads(finished.stdout.splitlines()[-1])
    assert gathers["while_sampling"] == SHAPE["num_hidden_layers"] * gathers["samplings"] < gathers["gathers"]
    for row, other in zip(metrics, read_jsonl(here / "sharded" / "metrics.jsonl"), strict=True):
        assert row.keys() == other.keys()
        for metric in ("eval/scores", "objective/scores", "objective/kl", "val/num_eos_tokens", "step"):
            assert row.get(metric, 0) == pytest.approx(other.get(metric, 0), rel=0.05, abs=0.05), metric


def test_the_win_rate_with_the_judge_filled_in(here, monkeypatch, capsys):
    """The README's last command runs as it stands, on the policy before training. A function replaces the judge's
    language model."""
    [words] = [words for words in commands() if "benchmark/win_rate.py" in words]
    win_rate = import_file(HERE / "benchmark" / "win_rate.py")
    words = [word.replace("[:1000]", "[:8]").replace("runs/tldr_rloo/model", SFT) for word in words[2:]]
    words[words.index("--response-length") + 1] = "8"
    with fresh_imports(), pytest.raises(NotImplementedError, match="fill in `ask`"):
        win_rate.main(tyro.cli(win_rate.Args, args=words))
    with fresh_imports():
        sys.path.append(str((here / "benchmark" / "tldr").resolve()))
        import judge

        asked = []
        answer = lambda question: asked.append(question) or (" 1\n" if "Summary 1: It is post" in question else "0")  # noqa: E731
        monkeypatch.setattr(judge, "ask", answer)
        args = tyro.cli(win_rate.Args, args=words)
        assert win_rate.main(args)[0] == 0.0
        monkeypatch.setattr(judge, "ask", lambda question: "neither")
        assert win_rate.main(args)[0] == 0.5
    rows = read_jsonl(args.output)
    assert [row["baseline"] for row in rows] == [f" It is post {i}." for i in range(8)]
    assert len(asked) == 8 and all("POST:" in question and "TL;DR:" not in question for question in asked)


def test_the_published_figures_have_wilsons_intervals():
    win_rate = import_file(HERE / "benchmark" / "win_rate.py")
    rows = re.findall(r"\| ([\d.]+) % \| ([\d.]+) to ([\d.]+) % \|", README)
    assert len(rows) == 3
    for rate, low, high in rows:
        expected = [100 * bound for bound in win_rate.interval(float(rate) / 100, 1000)]
        assert [float(low), float(high)] == pytest.approx(expected, abs=0.051)
