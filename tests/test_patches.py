"""Every patch of benchmark/ applies, trains, and does the one thing that it promises. So do the
lines of docs/papers.md and the broken functions.

The patches of benchmark/engine run with a stand-in for vLLM.
"""

import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from conftest import (
    HERE,
    MODULES,
    SCRIPTS,
    distance,
    encode,
    fresh_imports,
    import_file,
    load_policy,
    make_prompts,
    read_jsonl,
    record_calls,
    reset_accelerate,
    weights_of,
)
from plain import plain_gradient, token_weights
from pytest import approx, fixture, mark, raises
from test_pages import commands, diffs, patched

PATCHES = sorted(str(path.relative_to(HERE)) for path in HERE.glob("benchmark/*/*.patch"))
REFUSED = "sampling and training give log-probabilities"
broken = import_file(HERE / "benchmark/failures/broken.py")


@mark.parametrize("patch", PATCHES)
def test_a_patch_applies(patch, tmp_path):
    """The scripts that it names stay clean."""
    for name in SCRIPTS:
        shutil.copy(HERE / f"{name}.py", tmp_path)
    subprocess.run(["git", "apply", HERE / patch], cwd=tmp_path, check=True)
    named = re.findall(r"^diff --git a/(\S+)", (HERE / patch).read_text(), re.M)
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--quiet", "--line-length", "100", "--config", HERE / ".ruff.toml"]
    for command in ["check"], ["format", "--check"]:
        subprocess.run([*ruff, *command, *options, *named], cwd=tmp_path, check=True)


# The patch, its script, flags of two iterations with the tiny policy, and what checks the promise.
VARIANTS = []


def promise(patch, script, **flags):
    return lambda check: VARIANTS.append((f"benchmark/{patch}.patch", script, flags, check))


@promise("ladder/reinforce", "rloo", kl_coef=0.0)
def scores_are_the_advantages(module, rows, world, updates, **_):
    """The gradient is the mean of -score * grad log p(y)."""
    scores = [row["score"] for row in rows]
    assert [row["advantage"] for row in rows] == approx(scores)
    expected = plain_gradient(world.llama, rows, token_weights(MODULES["rloo"], rows))
    assert distance(expected, updates[0].gradients) < 1e-4
    with raises(ValueError, match="only one update"):
        module.Args(num_ppo_epochs=2)


@promise("variants/reinforce_plus_plus", "rloo", k=1)
def advantages_are_whitened_returns(rows, **_):
    """The return of a token has the score, and the KL from this token on. The tokens of a batch are
    whitened."""
    returns = []
    advantages = []
    for row in rows:
        kl = np.subtract(row["logprobs"], row["ref_logprobs"])
        returns.extend(row["score"] - 0.05 * kl[::-1].cumsum()[::-1])
        advantages.extend(row["advantage"][: len(kl)])
    expected = (returns - np.mean(returns)) / np.std(returns, ddof=1)
    assert advantages == approx(expected, abs=2e-3)


def weights_of_tokens(calls, rows):
    """p_old / q, [episodes, response]. The rollouts hold p_old, the trainer's. q is that of the
    bfloat16 sampler."""
    sampler = calls[0].result["logprobs"]
    trainer = calls[1].result
    assert (trainer - sampler).abs().max() > 1e-3
    logprobs = [sum(row["logprobs"]) for row in rows]
    assert trainer.sum(1).tolist() == approx(logprobs, abs=1e-4)
    return (trainer - sampler).exp()


@promise("variants/sampler_weights", "rloo", kl_coef=0.0, weight_cap=1.01)
def episodes_have_truncated_weights(module, rows, calls, **_):
    weights = weights_of_tokens(calls, rows).prod(1).clamp(max=1.01)
    assert 1 < len(set(weights.tolist())) < 12  # Some are cut.
    scores = torch.tensor([row["score"] for row in rows])
    expected = module.rloo_advantages(scores, 3) * weights
    advantages = [row["advantage"] for row in rows]
    assert advantages == approx(expected.tolist(), abs=1e-4)


MASKED = dict(patch="variants/masked_importance_sampling", script="grpo", kl_coef=0.0)


@promise(**MASKED, importance_low=0.99, importance_high=1.02)
def tokens_have_weights_or_are_masked(rows, metrics, calls, **_):
    weights = weights_of_tokens(calls, rows)
    weights = weights * ((weights >= 0.99) & (weights <= 1.02))
    loss = 0.0
    for row, of_row in zip(rows, weights):
        loss -= row["advantage"] * of_row[: len(row["token_ids"])].mean().item() / 12
    assert metrics[0]["loss/policy_avg"] == approx(loss, abs=1e-5)  # The ratio is 1.
    assert 0 < metrics[0]["val/masked_fraction"] < 1


@promise(**MASKED, importance_level="sequence", importance_low=0.0, importance_high=1.001)
def a_completion_has_one_masked_weight(rows, metrics, calls, **_):
    """As in TRL: the product over its tokens, or 0."""
    weights = weights_of_tokens(calls, rows).prod(1)
    kept = weights * (weights <= 1.001)
    assert 0 < (kept == 0).sum() < 12
    loss = -np.mean([row["advantage"] * weight for row, weight in zip(rows, kept.tolist())])
    assert metrics[0]["loss/policy_avg"] == approx(loss, abs=1e-6)


@promise("variants/overlong_punishment", "grpo", reward="five")
def long_completions_lose_points(rows, **_):
    """Of 6 tokens the last 5 cost a fifth each (arXiv 2503.14476, eq. 13)."""
    for row in rows:
        assert row["score"] == approx(5 - (len(row["token_ids"]) - 1) / 5)


@promise("variants/dynamic_sampling", "grpo", reward="seldom", kl_coef=0.0, sampling_rounds=99)
def equal_groups_are_replaced(module, rows, metrics, **_):
    """The trained prompts are those of the stream, in its order, without groups of equal scores."""
    prompts = make_prompts(7)
    stream = [prompts[number] for number in module.draw_prompts(1, 7, 0, 1000)]
    place = -1
    for i in range(0, 12, 3):
        place = stream.index(rows[i]["prompt"], place + 1)
        assert len({row["score"] for row in rows[i : i + 3]}) > 1
    assert metrics[0]["generated_episodes"] == 3 * (place + 1) > 12


@promise("variants/unbiased_kl", "grpo", num_ppo_epochs=2)
def the_kl_has_its_gradient(module, **_):
    """The mean of the loss over all four tokens, weighted by p_old, is KL(p_new, p_ref), and so is
    its gradient."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    new, old, ref = logits.log_softmax(1)
    old = old.detach()
    ref = ref.detach()
    mean = (old.exp() * module.k3_kl(new, ref, new - old)).sum()
    difference = mean - (new.exp() * (new - ref)).sum()
    [gradient] = torch.autograd.grad(difference, logits)
    assert abs(difference) < 1e-9
    assert gradient.abs().max() < 1e-9


@promise(
    "variants/entropy_bonus",
    "grpo",
    reward="seldom",
    kl_coef=0.0,
    temperature=0.7,
    entropy_coef=0.3,
)
def the_entropy_has_its_gradient(rows, world, updates, **_):
    """By plain passes of all episodes: also of those with advantage 0, which the script as it is
    leaves out."""
    assert any(row["advantage"] == 0 for row in rows)
    model = load_policy(world.llama)
    for row in rows:
        prompt = encode(row["prompt"])
        logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0]
        p = (logits[len(prompt) - 1 : -1] / 0.7).softmax(-1)
        (0.3 / 12 * (p * p.log()).sum(-1).mean()).backward()
    entropy = [parameter.grad for parameter in model.parameters()]
    policy = plain_gradient(world.llama, rows, token_weights(MODULES["grpo"], rows), 0.7)
    both = [a if b is None else a + b for a, b in zip(entropy, policy)]
    assert distance(both, updates[0].gradients) < 1e-4
    assert distance(both, policy) > 0.1


@mark.parametrize(
    "patch, script, flags, check", VARIANTS, ids=[check.__name__ for *_, check in VARIANTS]
)
def test_a_variant_keeps_its_promise(
    patch, script, flags, check, run, world, updates, monkeypatch, tmp_path
):
    module = patched(script, [patch], tmp_path)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 100)  # The head runs in pieces.
    calls = record_calls(monkeypatch, module, "map_episodes")
    flags = dict(reward="letters", ref_model_path="reference", total_episodes=24) | flags
    ran = run(module, **flags)
    metrics = ran.metrics
    assert metrics[0]["val/sampling_logprob_difference"] < 1e-4
    rows = ran.rows_of(1)
    check(module=module, rows=rows, metrics=metrics, world=world, updates=updates, calls=calls)


def test_every_patch_is_tested():
    """test_turns.py has the tests of two patches, and the patches of benchmark/engine have one
    below. A patch changes only the script of its test."""
    others = ["turns", "one_batch_late"]
    tested = {patch for patch, *_ in VARIANTS} | {f"benchmark/variants/{x}.patch" for x in others}
    assert {patch for patch in PATCHES if "engine" not in patch} == tested
    for patch, script, *_ in VARIANTS:  # It changes no other script.
        changed = re.findall(r"^diff --git a/(\S+)", (HERE / patch).read_text(), re.M)
        assert changed == [f"{script}.py"], patch


# ---- the lines of docs/papers.md
PAPERS = "remax rejected opo maxrl pass_at_4 gdpo two_sided sapo dppo gmpo vespo masked ppo entropy"


@fixture(scope="module")
def papers(tmp_path_factory):
    """The scripts with the changes that the page shows, in its order."""
    folder = tmp_path_factory.mktemp("papers")
    modules = {}
    for name, (_, scripts) in zip(PAPERS.split(), diffs(HERE / "docs/papers.md"), strict=True):
        _, text = scripts.popitem()  # of ppo.py, if it is among them
        path = folder / f"paper_{name}.py"
        path.write_text(text)
        modules[name] = import_file(path)
    return SimpleNamespace(**modules)


def loss_and_gradient(module, old_logprobs, logprobs, advantage, **flags):
    """Of one episode, whose tokens are divided by their number. Returns the loss, and the
    gradient by its tokens."""
    args = module.Args(num_ppo_epochs=2, **flags)
    logprobs = torch.tensor([logprobs], requires_grad=True)
    mask = logprobs < 0
    advantages = torch.tensor([[advantage]])
    losses, *_ = module.grpo_loss(args, logprobs, torch.tensor([old_logprobs]), advantages, mask)
    loss = (losses * mask).mean()
    loss.backward()
    return [loss.item(), *logprobs.grad[0].tolist()]


@mark.parametrize(
    "p_old, p, advantage, weight",
    [
        (0.5, 0.75, 2.0, 0),  # 0.25 more likely, which is more than 0.2
        (0.5, 0.75, -2.0, 1.5),
        (0.5, 0.25, -2.0, 0),
        (0.5, 0.25, 2.0, 0.5),
        (0.01, 0.1, 2.0, 10),  # The ratio would be clipped.
    ],
)
def test_dppo(papers, p_old, p, advantage, weight):
    found = loss_and_gradient(papers.dppo, [math.log(p_old)], [math.log(p)], advantage)
    assert found == approx([-advantage * weight] * 2, rel=1e-5)


@mark.parametrize(
    "first, second, advantage, mean, first_moves",
    [
        (-1.0, -2.2, 1.0, (0.4 - 0.2) / 2, 0),
        (-1.0, -2.2, -1.0, (1 - 0.2) / 2, 1),
        (-3.0, -1.8, -1.0, (-0.4 + 0.2) / 2, 0),
        (-3.0, -1.8, 1.0, (-1 + 0.2) / 2, 1),
    ],
)
def test_gmpo(papers, first, second, advantage, mean, first_moves):
    flags = dict(importance_sampling_level="sequence", cliprange=1.0)
    found = loss_and_gradient(papers.gmpo, [-2.0, -2.0], [first, second], advantage, **flags)
    loss = -advantage * math.exp(mean)
    assert found == approx([loss, loss * first_moves / 2, loss / 2])


@mark.parametrize("advantage, power, rate", [(2.0, 2, 3), (-2.0, 3, 2)])
def test_vespo(papers, advantage, power, rate):
    found = loss_and_gradient(papers.vespo, [-2.0, -2.0], [-1.5, -2.2], advantage)
    w = math.exp(0.5 - 0.2)  # of the completion
    slope = -advantage * w**power * math.exp(rate * (1 - w)) / 2
    assert found == approx([slope * (-1.5 - 2.2), slope, slope])


def test_advantages_of_papers(papers):
    one_of_8 = torch.eye(8)[0]
    assert papers.maxrl.grpo_advantages(one_of_8, 4, "group").tolist() == [
        3,
        -1,
        -1,
        -1,
        0,
        0,
        0,
        0,
    ]
    # Of 6 answers 1 is right: it is in 10 of the 15 sets of 4, and in 6 of the 10 that hold a
    # certain wrong answer.
    advantages = papers.pass_at_4.grpo_advantages(torch.eye(6)[0], 6, "none")
    expected = np.array([1.0, *[6 / 10] * 5]) - 10 / 15
    deviation = (10 / 15 * 5 / 15) ** 0.5
    assert advantages.tolist() == approx(expected / deviation, abs=1e-3)


def test_losses_of_papers(papers):
    logratio = torch.tensor([0.0, 0, 100, 100], requires_grad=True)
    signs = torch.tensor([1, -1, 1, -1])
    expected = {"two_sided": [-1, 1, -1.2, 3], "sapo": [-2, 2 / 1.05, -4, 4 / 1.05]}
    for name, losses in expected.items():
        found, _ = getattr(papers, name).clipped_policy_loss(logratio, signs, 0.2, 0.2)
        assert found.tolist() == approx(losses)
        [gradient] = torch.autograd.grad(found.sum(), logratio)
        assert gradient.tolist() == approx([-1, 1, 0, 0])
    masked = papers.masked
    is_left = []
    for drift, advantage in (0.6, -1.0), (0.4, -1.0), (0.6, 1.0):
        [loss, *_] = loss_and_gradient(masked, [-1.0, -1.0], [-1.0, -1.0 - 2 * drift], advantage)
        is_left.append(loss != 0)
    assert is_left == [False, True, True]


def test_remax(papers, run, monkeypatch):
    rollouts = record_calls(monkeypatch, papers.remax, "generate")
    ran = run(papers.remax, reward="letters", kl_coef=0.0, total_episodes=12)
    _, greedy = rollouts
    assert greedy.inputs["temperature"] == 0
    for i, row in enumerate(ran.rollouts):
        assert greedy.result.prompts[i // 3].text == row["prompt"]
        text = greedy.result.completions[i // 3]
        length = len(text) * (len(row["prompt"]) % 3)
        baseline = len(set(text)) + 0.3 * text.count("1") - 0.1 * length  # `letters`
        assert row["advantage"] == approx(row["score"] - baseline, abs=1e-5)


@mark.parametrize("name", ["rejected", "opo"])
def test_baselines_of_papers(papers, run, name):
    flags = dict(reward="seldom", kl_coef=0.0, total_episodes=12)
    rows = run(getattr(papers, name), **flags).rollouts
    for i in range(0, 12, 3):
        group = rows[i : i + 3]
        scores = np.array([row["score"] for row in group])
        lengths = [len(row["token_ids"]) for row in group]
        expected = scores * (scores.max() > scores.min())
        if name == "opo":
            expected = scores - np.average(scores, weights=lengths)
        assert [row["advantage"] for row in group] == approx(expected, abs=1e-5)


def test_gdpo(papers, run):
    rows = run(papers.gdpo, reward="parts", total_episodes=12).rollouts
    advantages = torch.zeros(12)
    for name in ("reward/length", "reward/ones"):
        part = torch.tensor([row[name] for row in rows])
        advantages += MODULES["grpo"].grpo_advantages(part, 3, "group")
    expected = (advantages / advantages.std()).tolist()
    assert [row["advantage"] for row in rows] == approx(expected, abs=1e-3)


def test_vapo(papers, run):
    """At the start, values are 0. Completions have at most 6 tokens, so lambda is 0."""
    flags = dict(kl_coef=0.0, whiten_advantages=False, total_episodes=12)
    for row in run(papers.ppo, **flags).rollouts:
        count = len(row["token_ids"])
        assert row["returns"] == approx([row["score"]] * count)
        assert row["advantage"] == approx([0.0] * (count - 1) + [row["score"]])


def test_top_entropy_tokens(papers, run, monkeypatch):
    rollouts = record_calls(monkeypatch, papers.entropy, "generate")
    losses = record_calls(monkeypatch, papers.entropy, "grpo_loss")
    run(papers.entropy, ref_model_path="reference", total_episodes=12)
    batch = rollouts[0].result
    entropies = batch.entropies[batch.mask].tolist()
    is_trained = batch.entropies >= np.quantile(entropies, 0.8)
    trained = losses[0].args[4]
    assert sorted(trained.sum(1).tolist()) == sorted((is_trained & batch.mask).sum(1).tolist())


# ---- the engine, and the broken functions
ENGINE_FLAGS = dict(
    num_train_epochs=4.0, temperature=0.7, stop_token_id=9, stop_string="1", kl_coef=0.0
)


def load_engine(script, folder):
    """The stand-in for vLLM, and the patched script."""
    vllm = import_file(HERE / "tests/stand_in_engine/vllm.py")
    return vllm, patched(script, [f"benchmark/engine/{script}.patch"], folder)


@mark.parametrize("script", ["rloo", "grpo"])
def test_the_engine_makes_the_plain_run(script, run, tmp_path):
    """The same completions and weights. The engine is shut down."""
    vllm, module = load_engine(script, tmp_path)
    ran = run(module, **ENGINE_FLAGS)
    plain = run(MODULES[script], **ENGINE_FLAGS)
    completions = [row["completion"] for row in ran.rollouts]
    assert any("1" in completion for completion in completions)
    for name in ("completion", "token_ids"):
        assert [row[name] for row in ran.rollouts] == [row[name] for row in plain.rollouts]
    norm = plain.metrics[0]["grad_norm"]
    assert ran.metrics[0]["grad_norm"] == approx(norm, rel=1e-3)
    weights = [weights_of(folder / "model") for folder in (ran.folder, plain.folder)]
    assert distance(*weights) < 1e-5
    assert vllm.engines[0].is_shut_down
    cut = run(module, **ENGINE_FLAGS | dict(num_train_epochs=1.0), weight_cap=1e-6)
    assert cut.metrics[0]["grad_norm"] < 1e-4 * norm


@mark.parametrize("forgotten", ["collective_rpc", "reset_prefix_cache"])
def test_an_engine_with_old_weights_or_old_prompts_stops_the_run(
    forgotten, run, tmp_path, monkeypatch
):
    vllm, module = load_engine("rloo", tmp_path)
    monkeypatch.setattr(vllm.LLM, forgotten, lambda *_, **__: None)
    with raises((RuntimeError, AssertionError), match=f"{REFUSED}|the prefix cache holds"):
        run(module, **ENGINE_FLAGS)


def train(module, command, tmp_path):
    """Run a command of a page with one batch. Returns the metrics."""
    reset_accelerate()
    flags = f"{command} --total-episodes 64 --num-sample-generations 0 --output-dir {tmp_path}/run"
    with fresh_imports():
        module.main(tyro.cli(module.Args, args=flags.split()))
    return read_jsonl(tmp_path / "run/metrics.jsonl")[1]


def test_the_judge_of_long_answers_trains(tmp_path, monkeypatch):
    """The command of docs/variants.md, with its patch."""
    monkeypatch.chdir(HERE)
    page = HERE / "docs/variants.md"
    [command] = [command for command in commands(page) if "long_judge" in command]
    module = patched("grpo", ["benchmark/variants/overlong_punishment.patch"], tmp_path)
    train(module, command.removeprefix("python grpo.py "), tmp_path)


SYMPTOMS = {  # of the broken functions that run to the end
    "temperature no_check": lambda row: row["policy/clipfrac_avg"] > 0.1,
    "eos_masked no_check": lambda row: row["val/sampling_logprob_difference"] > 0.1,
    "interleaved": lambda row: row["group/equal_scores_fraction"] == 0,
}
FAILURES = HERE / "docs/failures.md"
BROKEN = [re.search(r"broken.py (.*) (\w+)\.py (.*)", command) for command in commands(FAILURES)]
BROKEN = [found.groups() for found in BROKEN if found]


@mark.parametrize("breaks, script, flags", BROKEN)
def test_a_broken_function_shows_its_symptom(breaks, script, flags, tmp_path, monkeypatch):
    """The page's commands with one batch. The healthy script has no symptom. Where a run stops, the
    page shows why."""
    monkeypatch.chdir(HERE)
    module = broken.load(script, breaks.split())
    if breaks in SYMPTOMS:
        assert SYMPTOMS[breaks](train(module, flags, tmp_path / "broken"))
        assert not SYMPTOMS[breaks](train(MODULES[script], flags, tmp_path / "healthy"))
        return
    with raises(RuntimeError, match=REFUSED) as refused:
        train(module, flags, tmp_path)
    assert f"RuntimeError: {refused.value}" in FAILURES.read_text()
