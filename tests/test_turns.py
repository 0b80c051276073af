"""turns.patch changes when the policy samples: by turns with an environment.

grpo.py gets prompts that are text, and rloo.py chats. Both read them in the same way.
"""

from itertools import groupby
from operator import itemgetter

import torch
from conftest import (
    EOS,
    HERE,
    MANY_EOS,
    MODULES,
    VOCAB,
    changed,
    column,
    make_tokenizer,
    record_calls,
    result_of,
    save_model,
    stages,
    write_jsonl,
)
from pytest import approx, fixture, mark

ENVIRONMENT = '''
import os, pathlib

def talks(prompts, completions, number, **_):
    """A text of one to three tokens, by the conversation. None after some. Two of them stand in the
    end of a turn, too."""
    pathlib.Path(__file__).with_name("called_" + os.environ.get("RANK", "0")).touch()
    texts = []
    for chat in completions:
        said = sum(len(message["content"]) for message in chat)
        texts.append(None if said % 4 == 3 else ["a", "e", "12="][said % 3])
        chat.append("The script keeps its own copy.")
    return texts

def silent(prompts, **_):
    return [None] * len(prompts)

def kinds(completion_ids, **_):
    return [len(set(ids)) for ids in completion_ids]
'''
CHAT = (
    "{% for m in messages %}{{ '=' if m['role'] == 'user' else '-' }}"
    "{{ m['content'] }}<pad><eos>+{% endfor %}"
    "{{ mark or '-' if add_generation_prompt else '' }}"
)
TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = CHAT


@fixture(scope="module", params=["grpo", "rloo"])
def turns(request, tmp_path_factory):
    """A patched script."""
    folder = tmp_path_factory.mktemp("turns")
    text = (HERE / "benchmark/patches/turns.patch").read_text(encoding="utf-8")
    patch = folder / "own.patch"
    patch.write_text(text.replace("grpo.py", f"{request.param}.py"))
    return changed(request.param, folder, str(patch))


@fixture
def flags(turns, tmp_path):
    """Those of a run with the environment `talks`. Most episodes have several turns."""
    (tmp_path / "talk.py").write_text(ENVIRONMENT)
    flags = dict(
        model_path=save_model(tmp_path / "policy", eos_ids=MANY_EOS, tokenizer=TOKENIZER),
        ref_model_path="reference",
        reward=f"{tmp_path}/talk.py:kinds",
        environment=f"{tmp_path}/talk.py:talks",
        response_length=14,
        max_turns=2,
        kl_coef=0.0,
        total_episodes=24,
    )
    if turns.__name__.startswith("rloo"):
        rows = []
        for text in ("12", "3", "4+4"):
            rows.append({"prompt": [{"role": "user", "content": text}], "number": 1})
        rows[0]["chat_template_kwargs"] = {"mark": "f-"}
        dataset = write_jsonl(tmp_path / "chat.jsonl", rows)
        flags |= dict(dataset=dataset, response_length=24)
    return flags


def turns_of(row):
    """The text of each turn. The policy has the first one."""
    pairs = zip(row["token_ids"], row["mask"], strict=True)
    for _, turn in groupby(pairs, itemgetter(1)):
        yield "".join(VOCAB[token] for token, _ in turn)


def test_an_episode_is_the_conversation(turns, flags, run, monkeypatch):
    """Its tokens are its messages, by turns. In a chat the template wraps the text of the
    environment. The end of a turn is there once, also where it is two tokens, or one that the
    template does not write. The policy has at most --max-turns turns. A text that does not fit ends
    the episode as cut off. Each turn has own random numbers."""
    calls = record_calls(monkeypatch, turns, "sample")
    rows = run(turns, **flags).rollouts
    is_chat = "dataset" in flags
    room = 13 if is_chat else 4  # for the longest text of the environment
    for row in rows:
        chat = row["completion"]
        assert column(chat, "role") == ["assistant", "user", "assistant"][: len(chat)]
        texts = column(chat, "content")
        found = list(turns_of(row))
        if is_chat and len(texts) > 1:
            end = "" if found[0].endswith("<eos>") else "<pad><eos>"
            texts[1] = f"{end}+={texts[1]}<pad><eos>+{'f-' if row['row'] == 0 else '-'}"
        assert [turn.removesuffix("<eos>") for turn in found] == texts
        if row["ended"]:
            assert row["token_ids"][-1] in MANY_EOS
        else:
            assert 0 <= flags["response_length"] - len(row["token_ids"]) <= room
    assert {len(row["completion"]) for row in rows} == {1, 3}
    assert len(set(column(rows, "ended"))) == 2
    numbers = torch.cat([call.args[2][:, 0] for call in calls[1:]])  # The first is a check.
    assert len(numbers.unique()) == len(numbers) > len(rows)


def test_an_empty_answer_of_the_environment(turns):
    """Its turn is there, and the end of the policy's turn is not doubled."""
    row = {"prompt": [{"role": "user", "content": "1"}]}
    assert TOKENIZER.decode(turns.environment_tokens(TOKENIZER, row, "", EOS)) == "+=<pad><eos>+-"


def test_only_the_tokens_of_the_policy_are_trained(turns, flags, hold):
    """Those of the environment are read, and count nowhere: not in gradients, KL, entropy or
    lengths."""

    def loss(mini_batch, batch, args):
        total = 0
        for episode in mini_batch:
            mask = torch.tensor(episode.mask)
            assert not torch.stack([episode.old_logprobs, episode.ref_logprobs])[:, ~mask].any()
            actions = mask.sum() if "num_generations" in vars(args) else 1
            total = total - episode.advantage * episode.logprobs[mask].sum() / actions
        return total / len(mini_batch)

    ran, updates = hold(turns, loss, **flags)
    assert stages.judge_gradients(updates)[1] is None
    lengths = [sum(row["mask"]) for row in ran.rows_of(1)]
    assert ran.metrics[0]["response_length_mean"] == approx(sum(lengths) / 12)


def test_an_environment_that_is_silent_changes_nothing(turns, flags, run):
    """Bit for bit the run of the script without the patch."""
    silent = flags.pop("environment").replace("talks", "silent")
    ran = run(turns, environment=silent, **flags)
    del flags["max_turns"]
    plain = run(MODULES[turns.__name__.partition("_")[0]], **flags)
    assert result_of(ran.folder)[:2] == result_of(plain.folder)[:2]  # metrics and weights


@mark.slow
def test_two_processes_make_the_same_run(turns, flags, elsewhere, tmp_path):
    """The main process alone calls the environment."""
    elsewhere(turns, 2, **flags)
    assert not (tmp_path / "called_1").exists()
