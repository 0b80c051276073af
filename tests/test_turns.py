"""A patch that changes when the policy samples: by turns with an environment."""

import shutil
from types import SimpleNamespace

import numpy as np
import torch
from conftest import (
    EOS,
    MODULES,
    VOCAB,
    base_flags,
    column,
    compare_runs,
    distance,
    encode,
    launch_forked,
    launched,
    load_policy,
    make_tokenizer,
    plain_logprobs,
    read_jsonl,
    result_of,
    write_jsonl,
)
from pytest import approx, fixture, mark, raises
from test_pages import patched
from tokenizers import pre_tokenizers

ENVIRONMENT = '''
import json, os, pathlib

folder = pathlib.Path(__file__).parent

def talks(prompts, completions, number, **_):
    """A text of one to three tokens, by the conversation. None after an even number of tokens."""
    with open(folder / ("calls_" + os.environ.get("RANK", "0")), "a") as file:
        file.write(json.dumps([prompts, completions]) + "\\n")
    texts = []
    for chat, row in zip(completions, number):
        said = sum(len(message["content"]) for message in chat)
        texts.append(None if said % 4 == 3 else "123"[: 1 + said % 3] + "=")
        chat.append("The script keeps its own copy.")
    return texts

def silent(prompts, **_):
    return [None] * len(prompts)

def sometimes_long(completions, **_):
    return ["1" * (100 if len(chat[0]["content"]) % 2 else 1) for chat in completions]

def fails(prompts, **_):
    raise KeyError("the tool is gone")

number = lambda prompts, **_: 3
numbers = lambda prompts, **_: [3] * len(prompts)
wrong_count = lambda prompts, **_: [None] * (len(prompts) - 1)
empty = lambda prompts, **_: [""] * len(prompts)
strange = lambda prompts, **_: ["1?"] * len(prompts)
wrong_names = lambda tools, **_: []

def kinds(completion_ids, **_):
    return [len(set(ids)) for ids in completion_ids]
'''


@fixture(scope="module", params=["grpo", "rloo"])
def turns(request, tmp_path_factory):
    """A patched script."""
    folder = tmp_path_factory.mktemp("turns")
    return patched(request.param, ["benchmark/patches/turns.patch"], folder)


@fixture
def flags(tmp_path):
    """flags(name): those of a run with this environment. Most episodes have several turns."""
    (tmp_path / "talk.py").write_text(ENVIRONMENT)

    def flags(name="talks"):
        return dict(
            model_path="many_eos",
            ref_model_path="reference",
            reward=f"{tmp_path}/talk.py:kinds",
            environment=f"{tmp_path}/talk.py:{name}",
            response_length=14,
            k=3,
        )

    return flags


def check_passes(rows, policy, reference, gradients, script):
    """The log-probabilities, and the gradient, are those of plain passes over the policy's
    tokens."""
    model = load_policy(policy)
    reference = load_policy(reference)
    for row in rows:
        mask = torch.tensor(row["mask"])
        ids = encode(row["prompt"]), row["token_ids"]
        logprobs = mask * plain_logprobs(model, *ids)
        assert row["logprobs"] == approx(logprobs.tolist(), abs=1e-4)
        ref_logprobs = mask * plain_logprobs(reference, *ids)
        assert row["ref_logprobs"] == approx(ref_logprobs.tolist(), abs=1e-4)
        loss = -row["advantage"] * logprobs.sum() / len(rows)
        if script.__name__ == "grpo_patched":
            loss = loss / mask.sum()
        loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert distance(found, gradients) < 1e-4


def test_only_the_tokens_of_the_policy_are_trained(turns, flags, run, world, updates):
    """Those of the environment are read, and count nowhere: not in gradients, KL, entropy or
    lengths."""
    kl_coef = 0.0 if turns.__name__ == "grpo_patched" else 0.05
    ran = run(turns, **flags(), kl_coef=kl_coef, total_episodes=12)
    rows = ran.rollouts
    [line] = ran.metrics
    check_passes(rows, world.many_eos, world.reference, updates[0].gradients, turns)
    means = {}  # of the sums over tokens; those of the environment have 0
    for name in ("mask", "logprobs", "ref_logprobs"):
        means[name] = np.mean([sum(row[name]) for row in rows])
    assert line["response_length_mean"] == approx(means["mask"])
    assert line["objective/entropy"] == approx(-means["logprobs"], rel=1e-4)
    kl = means["logprobs"] - means["ref_logprobs"]
    assert line["objective/kl"] == approx(kl, rel=1e-4)
    assert len(set(map(len, column(rows, "completion")))) > 2  # One, two and more turns.


def test_an_episode_is_the_conversation(turns, flags, run, tmp_path):
    """Ids are appended. A call has the episodes that go on. The policy has at most --max-turns
    turns."""
    rows = run(turns, **flags(), total_episodes=12, max_turns=2).rollouts
    [[prompts, asked]] = read_jsonl(tmp_path / "calls_0")
    assert len(prompts) == len(asked) <= 12
    for row in rows:
        chat = row["completion"]
        assert column(chat, "role") in (["assistant"], ["assistant", "user", "assistant"])
        assert len(chat) == 1 or chat[:1] in asked
        texts = {0: "", 1: ""}  # of the environment, and of the policy
        for token, is_own in zip(row["token_ids"], row["mask"]):
            if token != EOS:
                texts[is_own] += VOCAB[token]
        contents = column(chat, "content")
        assert texts == {0: "".join(contents[1::2]), 1: "".join(contents[::2])}
        length = len(row["token_ids"])
        assert length <= 14
        assert row["ended"] or length >= 14 - 4  # A text of up to 4 tokens did not fit.


def test_an_environment_that_is_silent_changes_nothing(turns, flags, run):
    """Bit for bit the run of the script without the patch, but for the form of completions, and the
    mask."""
    own = flags("silent")
    ran = run(turns, **own)
    del own["environment"]
    name, _ = turns.__name__.split("_")
    plain = run(MODULES[name], **own)
    for other in (ran, run(turns, **own)):
        assert result_of(other.folder)[:2] == result_of(plain.folder)[:2]  # metrics and weights
    for row, other in zip(ran.rollouts, plain.rollouts, strict=True):
        assert all(row.pop("mask"))
        [message] = row["completion"]
        assert row | {"completion": message["content"]} == other


def test_a_text_that_does_not_fit_cuts_the_episode_off(turns, flags, run):
    cut = 0
    for row in run(turns, **flags("sometimes_long"), total_episodes=24).rollouts:
        [first, *others] = row["completion"]
        if len(first["content"]) % 2 and len(row["token_ids"]) < 14:
            cut += 1
            assert not others
            assert not row["ended"]
    assert 0 < cut < 24


def test_no_pass_is_wider_than_the_trial(turns, flags, run, monkeypatch):
    """Short and long conversations are in one pass. The trial at the start has the widest row."""
    widths = []

    class Steps(turns.PlainSteps):
        def __init__(self, network, rows, start):
            widths.append(rows.shape[1])
            super().__init__(network, rows, start)

    monkeypatch.setattr(turns, "PlainSteps", Steps)
    run(turns, **flags(), total_episodes=24)
    assert max(widths) == widths[0]


MISTAKES = "number numbers wrong_count empty strange fails wrong_names missing".split()


@mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_environment_is_clear(turns, flags, run, name):
    with raises(Exception, match="environment|tool"):
        run(turns, **flags(name), total_episodes=12)


CHAT = (
    "{% for m in messages %}{{ '=' if m['role'] == 'user' else '-' }}"
    "{{ m['content'] }}<pad><eos>+{% endfor %}"
    "{{ mark or '-' if add_generation_prompt else '' }}"
)


def test_the_template_wraps_a_text_in_a_chat(turns, flags, run, world, tmp_path):
    """The tokens of an episode are those of the rendered conversation. The end of a turn is there
    once, also where it is two tokens, or one that the template does not write."""
    policy = shutil.copytree(world.many_eos, tmp_path / "policy")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(policy)
    rows = []
    for text in ("12", "3", "4+4"):
        rows.append({"prompt": [{"role": "user", "content": text}], "number": 1})
    rows[0]["chat_template_kwargs"] = {"mark": "f-"}
    flags = flags() | dict(model_path=policy, response_length=24, total_episodes=24)
    flags["dataset"] = write_jsonl(tmp_path / "chat.jsonl", rows)
    ends = set()
    for row in run(turns, **flags).rollouts:
        marker = "f-" if row["row"] == 0 else "-"
        texts = iter(row["completion"][1::2])
        text = ""
        expected = ""
        is_own = True
        end = None  # of the policy's turn
        for token, next_is_own in zip(row["token_ids"], row["mask"]):
            if is_own and not next_is_own:  # The text of the environment begins here.
                ends.add(end)
                expected += "" if end == EOS else "<pad><eos>"
                expected += f"+={next(texts)['content']}<pad><eos>+{marker}"
            if not next_is_own:
                text += VOCAB[token]
            is_own = next_is_own
            end = token
        assert text == expected
    assert EOS in ends
    assert len(ends) > 1


def test_no_space_comes_before_a_text(turns):
    """Some tokenizers put one before the first word."""
    tokenizer = make_tokenizer()
    backend = tokenizer.backend_tokenizer
    spaced = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([spaced, backend.pre_tokenizer])
    assert tokenizer("12")["input_ids"] == encode(" 12")
    prompt = SimpleNamespace(row={"prompt": "1"})
    assert turns.environment_tokens(tokenizer, prompt, "12", EOS) == encode("12")


def test_the_last_message_is_the_answer(turns):
    chat = [{"content": "3"}, {"content": "4"}]
    assert turns.exact_match([chat, chat], ["4", "3"]) == [1, 0]


@mark.slow
def test_two_processes_make_the_same_run(turns, flags, run, world, tmp_path):
    """The main process alone calls the environment, for all episodes. Its error ends both."""
    ran = run(turns, **flags(), per_device_rollout_batch_size=5)
    calls = (tmp_path / "calls_0").rename(tmp_path / "calls")
    launched(turns, 2, tmp_path, base_flags(world, flags()))
    compare_runs(ran.folder, tmp_path / "out")
    assert read_jsonl(tmp_path / "calls_0") == read_jsonl(calls)
    assert not (tmp_path / "calls_1").exists()
    finished = launch_forked(turns, 2, tmp_path, base_flags(world, flags("fails")))
    assert finished.returncode != 0
    assert "KeyError: 'the tool is gone'" in finished.stderr
