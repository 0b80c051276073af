"""turns.patch changes when the policy samples: by turns with an environment."""

import shutil
from itertools import groupby
from operator import itemgetter

import torch
from conftest import (
    HERE,
    MANY_EOS,
    MODULES,
    VOCAB,
    base_flags,
    column,
    compare_runs,
    distance,
    encode,
    launched,
    load_policy,
    make_tokenizer,
    plain_logprobs,
    record_calls,
    result_of,
    write_jsonl,
)
from pytest import approx, fixture, mark
from test_pages import patched

ENVIRONMENT = '''
import os, pathlib

def talks(prompts, completions, number, **_):
    """A text of one to three tokens, by the conversation. None after an even number of tokens."""
    pathlib.Path(__file__).with_name("called_" + os.environ.get("RANK", "0")).touch()
    texts = []
    for chat in completions:
        said = sum(len(message["content"]) for message in chat)
        texts.append(None if said % 4 == 3 else "123"[: 1 + said % 3] + "=")
        chat.append("The script keeps its own copy.")
    return texts

def silent(prompts, **_):
    return [None] * len(prompts)

def kinds(completion_ids, **_):
    return [len(set(ids)) for ids in completion_ids]
'''
PATCH = "benchmark/patches/turns.patch"


@fixture(scope="module", params=["grpo", "rloo"])
def turns(request, tmp_path_factory):
    """A patched script."""
    folder = tmp_path_factory.mktemp("turns")
    text = (HERE / PATCH).read_text().replace("grpo.py", f"{request.param}.py")
    (folder / "patch").write_text(text)
    return patched(request.param, [folder / "patch"], folder)


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
            max_turns=2,
            kl_coef=0.0,
        )

    return flags


def test_only_the_tokens_of_the_policy_are_trained(turns, flags, run, world, updates):
    """Those of the environment are read, and count nowhere: not in gradients, KL, entropy or
    lengths."""
    ran = run(turns, **flags(), total_episodes=12)
    policy = load_policy(world.many_eos)
    reference = load_policy(world.reference)
    sums = []
    for row in ran.rollouts:
        mask = torch.tensor(row["mask"])
        ids = encode(row["prompt"]), row["token_ids"]
        logprobs = mask * plain_logprobs(policy, *ids)
        kl = logprobs - mask * plain_logprobs(reference, *ids)
        sums.append(torch.stack([mask.sum(), -logprobs.sum(), kl.sum()]).tolist())
        actions = mask.sum() if turns.__name__.startswith("grpo") else 1
        (-row["advantage"] / 12 / actions * logprobs.sum()).backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert distance(gradients, updates[0].gradients) < 1e-4
    names = ("response_length_mean", "objective/entropy", "objective/kl")
    found = [ran.metrics[0][name] for name in names]
    assert found == approx(torch.tensor(sums).mean(0).tolist(), rel=1e-4)


def turns_of(row):
    """The tokens of each turn. The policy has the first one."""
    pairs = zip(row["token_ids"], row["mask"], strict=True)
    return [[VOCAB[token] for token, _ in turn] for _, turn in groupby(pairs, itemgetter(1))]


def test_an_episode_is_the_conversation(turns, flags, run, monkeypatch):
    """Its tokens are its messages, by turns. The policy has at most --max-turns turns. A text of up
    to four tokens that does not fit ends the episode as cut off. Each turn has own random
    numbers."""
    calls = record_calls(monkeypatch, turns, "sample")
    rows = run(turns, **flags(), total_episodes=24).rollouts
    for row in rows:
        chat = row["completion"]
        assert column(chat, "role") == (["assistant", "user"] * 2)[: len(chat)]
        texts = ["".join(turn).removesuffix("<eos>") for turn in turns_of(row)]
        assert texts == column(chat, "content")
        if row["ended"]:
            assert row["token_ids"][-1] in MANY_EOS
        else:
            assert 10 <= len(row["token_ids"]) <= 14
    assert {len(row["completion"]) for row in rows} == {1, 3}
    assert len(set(column(rows, "ended"))) == 2
    numbers = torch.cat([call.args[2][:, 0] for call in calls[1:]])  # The first is a check.
    assert len(numbers.unique()) == len(numbers) > len(rows)


def test_an_environment_that_is_silent_changes_nothing(turns, flags, run):
    """Bit for bit the run of the script without the patch."""
    own = flags("silent")
    ran = run(turns, **own)
    del own["environment"], own["max_turns"]
    plain = run(MODULES[turns.__name__.partition("_")[0]], **own)
    assert result_of(ran.folder)[:2] == result_of(plain.folder)[:2]  # metrics and weights


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
        turns_in_row = turns_of(row)
        messages = row["completion"][1::2]
        for said, text, message in zip(turns_in_row[::2], turns_in_row[1::2], messages):
            ends.add(said[-1])
            end = "" if said[-1] == "<eos>" else "<pad><eos>"
            assert "".join(text) == f"{end}+={message['content']}<pad><eos>+{marker}"
    assert "<eos>" in ends
    assert len(ends) > 1


@mark.slow
def test_two_processes_make_the_same_run(turns, flags, run, world, tmp_path):
    """The main process alone calls the environment."""
    ran = run(turns, **flags(), per_device_rollout_batch_size=5)
    launched(turns, 2, tmp_path, base_flags(world, flags()))
    compare_runs(ran.folder, tmp_path / "out")
    assert not (tmp_path / "called_1").exists()
