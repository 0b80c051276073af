"""Two patches that change when the policy samples: turns with an environment, and batches that are one update late."""

import json
import shutil
import subprocess

import conftest
import pytest
import torch
from conftest import (
    EOS,
    HERE,
    MODULES,
    VOCAB,
    base_flags,
    compare_runs,
    distance,
    encode,
    import_file,
    launch,
    make_args,
    make_tokenizer,
    plain_logprobs,
    result_of,
    write_jsonl,
)
from plain import row_logprobs
from transformers import AutoModelForCausalLM

VARIANTS = HERE / "benchmark" / "variants"


def patched(patch, script, folder):
    """The patched script as a module, from a folder of its own."""
    folder.mkdir()
    for name in conftest.SCRIPTS:
        shutil.copy(HERE / f"{name}.py", folder)
    (folder / "benchmark").symlink_to(HERE / "benchmark")
    subprocess.run(["git", "apply", VARIANTS / patch], cwd=folder, check=True)
    return import_file((folder / f"{script}.py").rename(folder / f"{script}_{patch.split('.')[0]}.py"))


# ---- one batch late
@pytest.fixture(scope="module")
def late(tmp_path_factory):
    return patched("one_batch_late.patch", "grpo", tmp_path_factory.mktemp("late") / "scripts")


LATE = dict(k=3, total_episodes=45, kl_coef=0.0)  # four batches, the last one of 9 episodes
STEPS = ["iteration", "step", "episode", "epoch", "lr"]


def test_a_batch_comes_from_the_policy_of_one_iteration_before(late, run, world, updates):
    """The prompts and all counts are those of the script. The loss has the ratio to the older policy."""
    plain = run(MODULES["grpo"], **LATE)
    updates.clear()
    ran = run(late, **LATE)
    assert [[row[name] for name in STEPS] for row in ran.metrics] == [
        [row[name] for name in STEPS] for row in plain.metrics
    ]
    assert [row["prompt"] for row in ran.rollouts] == [row["prompt"] for row in plain.rollouts]
    assert ["val/sampling_logprob_difference" in row for row in ran.metrics] == [True, False, False, False]
    for iteration in range(1, 5):
        rows = [row for row in ran.rollouts if row["iteration"] == iteration]
        # An entry of `updates` has the weights before its step.
        sampler, trainer = (updates[max(0, i)].weights for i in (iteration - 2, iteration - 1))
        old, new = (row_logprobs(world.llama, rows, weights=weights) for weights in (sampler, trainer))
        for row, of_row in zip(rows, old):
            assert row["logprobs"] == pytest.approx(of_row, abs=1e-4)
        ratios = torch.tensor([b - a for of in zip(old, new) for a, b in zip(*of)]).exp()
        assert (iteration == 1) == bool((ratios - 1).abs().max() < 1e-3)
        model = AutoModelForCausalLM.from_pretrained(world.llama).eval()
        for parameter, weight in zip(model.parameters(), trainer):
            parameter.data = weight
        for row, of_row in zip(rows, old):
            logprobs = plain_logprobs(model, encode(row["prompt"]), row["token_ids"])
            ratio = (logprobs - torch.tensor(of_row)).exp()
            losses = torch.maximum(-row["advantage"] * ratio, -row["advantage"] * ratio.clamp(0.8, 1.2))
            (losses.mean() / len(rows)).backward()
        assert distance([p.grad for p in model.parameters()], updates[iteration - 1].gradients) < 1e-3


def test_the_ratio_may_be_left_out(late, run, updates):
    """Then no ratio is clipped. In bfloat16 the ratio of a completion would be rounding alone, so it is refused."""
    ran = run(late, **LATE, late_ratio=False)
    assert all(row["val/ratio"] == 1 and row["policy/clipfrac_avg"] == 0 for row in ran.metrics)
    flags = dict(importance_sampling_level="sequence", dtype="bfloat16")
    make_args(late, **flags, late_ratio=False)
    with pytest.raises(ValueError, match="--no-late-ratio"):
        make_args(late, **flags)


def test_a_checkpoint_holds_the_batch(late, run, tmp_path, monkeypatch):
    """A run that is killed before any iteration goes on bit for bit, also after the last one."""
    flags = LATE | dict(save_every=1, num_mini_batches=2, resume=True)
    expected = result_of(run(late, **flags, output_dir=str(tmp_path / "whole")).folder)
    for name, call in ("score_episodes", 2), ("score_episodes", 3), ("score_episodes", 4), ("finish", 1):
        killed, calls, original = f"{name}{call}", [], getattr(late, name)

        def struck(*args, call=call, calls=calls, original=original):
            calls.append(args)
            if len(calls) == call:
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(late, name, struck)
            run(late, **flags, output_dir=str(tmp_path / killed))
        assert result_of(run(late, **flags, output_dir=str(tmp_path / killed)).folder) == expected


# ---- turns with an environment
ENVIRONMENT = '''
import json, os, pathlib, signal

folder = pathlib.Path(__file__).parent

def talks(prompts, completions, number, **_):
    """A text that depends on the conversation, of one to three tokens. None after an even number of tokens."""
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

def killed(prompts, completions, **columns):
    calls = folder / "calls_0"
    if calls.exists() and len(calls.read_text().splitlines()) == 5:
        calls.write_text(calls.read_text() + "killed\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return talks(prompts, completions, **columns)

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


@pytest.fixture(params=["grpo", "rloo"])
def turns(request, tmp_path):
    """A patched script."""
    (tmp_path / "talk.py").write_text(ENVIRONMENT)
    return patched("turns.patch", request.param, tmp_path / "scripts")


@pytest.fixture
def flags(world, tmp_path):
    """flags(name): those of a run with this environment, in which most episodes have several turns."""

    def flags(name="talks"):
        rewarded = dict(model_path=world.many_eos, reward=f"{tmp_path}/talk.py:kinds", response_length=14)
        return rewarded | dict(environment=f"{tmp_path}/talk.py:{name}", ref_model_path=world.reference, k=3)

    return flags


def conversations(folder):
    return [json.loads(line) for line in (folder / "calls_0").read_text().splitlines()]


def check_passes(rows, policy, reference, gradients, script):
    """The log-probabilities, and the gradient, are those of plain passes over the tokens of the policy."""
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (policy, reference)]
    for row in rows:
        mask = torch.tensor(row["mask"])
        prompt = make_tokenizer()(row["prompt"])["input_ids"]
        expected = [plain_logprobs(model, prompt, row["token_ids"]) for model in models]
        for name, of_all in zip(("logprobs", "ref_logprobs"), expected):
            assert row[name] == pytest.approx((of_all * mask).tolist(), abs=1e-4)
        divisor = mask.sum() if script.__name__.startswith("grpo") else 1
        (-row["advantage"] * (expected[0] * mask).sum() / divisor / len(rows)).backward()
    assert distance([p.grad for p in models[0].parameters()], gradients) < 1e-4


def test_only_the_tokens_of_the_policy_are_trained(turns, flags, run, world, updates, tmp_path):
    """Those of the environment are read, and count nowhere: not in gradients, KL, entropy or lengths."""
    kl_coef = 0.0 if turns.__name__.startswith("grpo") else 0.05
    ran = run(turns, **flags(), kl_coef=kl_coef, total_episodes=12)
    rows, metrics = ran.rollouts, ran.metrics[0]
    check_passes(rows, world.many_eos, world.reference, updates[0].gradients, turns)
    own = [[ratio for ratio, is_own in zip(row["logprobs"], row["mask"]) if is_own] for row in rows]
    assert metrics["response_length_mean"] == pytest.approx(sum(map(len, own)) / 12)
    assert metrics["objective/entropy"] == pytest.approx(-sum(map(sum, own)) / 12, rel=1e-4)
    kl = sum(sum(row["logprobs"]) - sum(row["ref_logprobs"]) for row in rows) / 12
    assert metrics["objective/kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["val/sampling_logprob_difference"] < 1e-4
    assert len({len(row["completion"]) for row in rows}) > 2  # One, two and more turns.


def test_an_episode_is_the_conversation(turns, flags, run, tmp_path):
    """Ids are appended. A call has the episodes that go on. The policy has at most --max-turns turns."""
    rows = run(turns, **flags(), total_episodes=12, max_turns=2).rollouts
    calls = conversations(tmp_path)
    assert [len(prompts) for prompts, _ in calls][0] <= 12 and len(calls) == 1
    for row in rows:
        roles = [message["role"] for message in row["completion"]]
        assert roles == (["assistant", "user"] * 3)[: len(roles)] and len(roles) in (1, 3)
        kept = "".join(VOCAB[token] for token in row["token_ids"] if token > EOS)
        assert kept == "".join(message["content"] for message in row["completion"])
        texts = "".join(VOCAB[token] for token, own in zip(row["token_ids"], row["mask"]) if not own)
        assert texts == "".join(message["content"] for message in row["completion"][1::2])
        asked = [chat for _, chats in calls for chat in chats if chat == row["completion"][: len(chat)]]
        assert len(row["token_ids"]) <= 14 and len(asked) >= len(roles) // 2
        assert row["ended"] or len(row["token_ids"]) >= 14 - 4  # A text of up to 4 tokens did not fit.


def test_an_environment_that_is_silent_changes_nothing(turns, flags, run):
    """Bit for bit the run of the script without the patch, but for the form of completions, and the mask."""
    results = []
    for script in (MODULES[turns.__name__.split("_")[0]], turns):
        own = flags("silent")
        if script is not turns:
            del own["environment"]
        metrics, weights, rollouts = result_of(run(script, **own).folder)
        rows = [json.loads(line) for line in rollouts.splitlines()]
        for row in rows:
            assert all(row.pop("mask", [True]))
            if script is turns:
                [message] = row["completion"]
                row["completion"] = message["content"]
        results.append((metrics, weights, rows))
    assert results[0] == results[1]
    assert result_of(run(turns, **own).folder)[:2] == results[0][:2]  # without an environment


def test_a_text_that_does_not_fit_cuts_the_episode_off(turns, flags, run):
    rows = run(turns, **flags("sometimes_long"), total_episodes=24).rollouts
    cut = [row for row in rows if len(row["completion"][0]["content"]) % 2 and len(row["token_ids"]) < 14]
    assert cut and len(cut) < 24
    for row in cut:
        assert not row["ended"] and all(row["mask"]) and len(row["completion"]) == 1


MISTAKES = {
    "number": "list of [0-9]+: texts .* it returned 3",
    "numbers": "it returned .3, 3",
    "wrong_count": "it returned .None, None",
    "empty": "not empty",
    "strange": "--environment, with the text '1.'",
    "fails": "the tool is gone",
    "wrong_names": "environment, which is called with prompts.*tools",
    "missing": "--environment: .*missing",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_environment_is_clear(turns, flags, run, name):
    with pytest.raises(Exception, match=MISTAKES[name]):
        run(turns, **flags(name), total_episodes=12)


CHAT = (
    "{% for m in messages %}{{ '=' if m['role'] == 'user' else '-' }}{{ m['content'] }}<eos>+{% endfor %}"
    "{{ mark or '-' if add_generation_prompt else '' }}"
)


def test_the_template_wraps_a_text_in_a_chat(turns, flags, run, world, updates, tmp_path):
    """The tokens of an episode are those of the rendered conversation. The end of a turn is there once: also where the
    policy ends it with a token that the template does not write."""
    policy, tokenizer = shutil.copytree(world.many_eos, tmp_path / "policy"), make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(policy)
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "1", "number": 1} for text in ("12", "3", "4+4")]
    rows[0]["chat_template_kwargs"] = {"mark": "f-"}
    own = flags() | dict(model_path=str(policy), dataset=write_jsonl(tmp_path / "chat.jsonl", rows), response_length=24)
    ran = run(turns, **own, kl_coef=0.0, total_episodes=24)
    ends = set()
    for row in ran.rollouts:
        numbers = [i for i, token in enumerate(row["token_ids"]) if not row["mask"][i]]
        text = "".join(VOCAB[row["token_ids"][i]] for i in numbers)
        last = [row["token_ids"][i - 1] for i in numbers if row["mask"][i - 1]]
        marker = "f-" if row["row"] == 0 else "-"
        texts = [message["content"] for message in row["completion"][1::2]]
        assert text == "".join("<eos>" * (end != EOS) + f"+={x}<eos>+{marker}" for end, x in zip(last, texts))
        ends |= set(last)
    assert EOS in ends and len(ends) > 1
    check_passes(ran.rollouts[:12], str(policy), world.reference, updates[0].gradients, turns)


def test_the_last_message_is_the_answer(turns):
    chat = [{"role": r, "content": c} for r, c in (("assistant", "3"), ("user", "no"), ("assistant", "4"))]
    assert turns.exact_match([chat, chat, "4"], ["4", "3", 4]) == [1, 0, 1]


@pytest.mark.slow
def test_two_processes_make_the_same_run(turns, flags, run, world, tmp_path):
    """The main process alone calls the environment, for all episodes. Its error ends both."""
    ran = run(turns, **flags(), per_device_rollout_batch_size=5)
    calls = conversations(tmp_path)
    (tmp_path / "calls_0").unlink()
    both = base_flags(world) | flags()
    finished = launch(turns, 2, tmp_path, both | dict(output_dir=tmp_path / "out"))
    assert finished.returncode == 0, finished.stderr
    compare_runs(ran.folder, tmp_path / "out")
    assert conversations(tmp_path) == calls and not (tmp_path / "calls_1").exists()
    finished = launch(turns, 2, tmp_path, both | flags("fails") | dict(output_dir=tmp_path / "failed"))
    assert finished.returncode != 0 and "KeyError: 'the tool is gone'" in finished.stderr


@pytest.mark.slow
def test_a_killed_run_goes_on(turns, flags, run, world, tmp_path):
    """kill -9 after the first iteration. The run that resumes is bit for bit the run that was never stopped."""
    expected = result_of(run(turns, **flags(), save_every=1, total_episodes=36).folder)
    (tmp_path / "calls_0").unlink()
    again = base_flags(world) | flags("killed") | dict(save_every=1, total_episodes=36, resume=True)
    again["output_dir"] = tmp_path / "out"
    codes = [launch(turns, 1, tmp_path, again).returncode for _ in range(2)]
    assert codes == [-9, 0] and "killed" in (tmp_path / "calls_0").read_text()
    assert result_of(tmp_path / "out") == expected
