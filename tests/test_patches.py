"""Every patch of benchmark/ applies, trains, and does the one thing that it promises. So do the
lines of docs/papers.md and the broken functions.

The patches of benchmark/engine run with a stand-in for vLLM.
"""

import math
import re
import shutil
import subprocess
import sys
from glob import glob
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from conftest import (
    HERE,
    MODULES,
    SCRIPTS,
    column,
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

PATCHES = sorted(glob("benchmark/*/*.patch", root_dir=HERE))
REFUSED = "sampling and training give log-probabilities"
broken = import_file(HERE / "benchmark/failures/broken.py")


def changed_by(patch):
    """The scripts that a patch names."""
    return re.findall(r"^diff --git a/(\S+)", (HERE / patch).read_text(), re.M)


@mark.parametrize("patch", PATCHES)
def test_a_patch_applies(patch, tmp_path):
    """The scripts that it names stay clean."""
    for name in SCRIPTS:
        shutil.copy(HERE / f"{name}.py", tmp_path)
    subprocess.run(["git", "apply", HERE / patch], cwd=tmp_path, check=True)
    options = ["--quiet", "--config", HERE / ".ruff.toml", *changed_by(patch)]
    for command in ["check"], ["format", "--check"]:
        ruff = [sys.executable, "-m", "ruff", *command, *options]
        subprocess.run(ruff, cwd=tmp_path, check=True)


@fixture
def variant(run, monkeypatch, tmp_path):
    """variant(patch, **flags): a run of two iterations with the tiny policy. The patch changes one
    script only.

    Returns the patched script, the rows and the metrics of the first iteration, and the calls of
    `map_episodes`."""

    def variant(patch, **flags):
        [file] = changed_by(patch)
        module = patched(file.removesuffix(".py"), [patch], tmp_path)
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", 100)  # The head runs in pieces.
        calls = record_calls(monkeypatch, module, "map_episodes")
        flags = dict(ref_model_path="reference", total_episodes=24) | flags
        ran = run(module, **flags)
        line = ran.metrics[0]
        assert line["val/sampling_logprob_difference"] < 1e-4
        return SimpleNamespace(module=module, rows=ran.rows_of(1), line=line, calls=calls)

    return variant


def test_reinforce(variant, world, updates):
    """The scores are the advantages. The gradient is the mean of -score * grad log p(y)."""
    ran = variant("benchmark/ladder/reinforce.patch", kl_coef=0.0)
    assert column(ran.rows, "advantage") == approx(column(ran.rows, "score"))
    weights = token_weights(MODULES["rloo"], ran.rows)
    expected = plain_gradient(world.llama, ran.rows, weights)
    assert distance(expected, updates[0].gradients) < 1e-4
    with raises(ValueError, match="only one update"):
        ran.module.Args(num_ppo_epochs=2)


def test_reinforce_plus_plus(variant):
    """The return of a token has the score, and the KL from this token on. The tokens of a batch are
    whitened."""
    returns = []
    advantages = []
    for row in variant("benchmark/variants/reinforce_plus_plus.patch", k=1).rows:
        kl = np.subtract(row["logprobs"], row["ref_logprobs"])
        kl_to_come = kl[::-1].cumsum()[::-1]
        returns.extend(row["score"] - 0.05 * kl_to_come)
        advantages.extend(row["advantage"][: len(kl)])
    expected = (returns - np.mean(returns)) / np.std(returns, ddof=1)
    assert advantages == approx(expected, abs=2e-3)


def weights_of_tokens(ran):
    """p_old / q, [episodes, response]. The rollouts hold p_old, the trainer's. q is that of the
    bfloat16 sampler."""
    trainer = ran.calls[1].result
    difference = trainer - ran.calls[0].result["logprobs"]
    assert difference.abs().max() > 1e-3
    logprobs = [sum(row["logprobs"]) for row in ran.rows]
    assert trainer.sum(1).tolist() == approx(logprobs, abs=1e-4)
    return difference.exp()


def test_sampler_weights(variant):
    """Episodes have truncated weights."""
    ran = variant("benchmark/variants/sampler_weights.patch", kl_coef=0.0, weight_cap=1.01)
    weights = weights_of_tokens(ran).prod(1).clamp(max=1.01)
    assert 1 < len(set(weights.tolist())) < 12  # Some are cut.
    scores = torch.tensor(column(ran.rows, "score"))
    expected = ran.module.rloo_advantages(scores, 3) * weights
    assert column(ran.rows, "advantage") == approx(expected.tolist(), abs=1e-4)


MASKED = "benchmark/variants/masked_importance_sampling.patch"


def test_tokens_have_weights_or_are_masked(variant):
    ran = variant(MASKED, kl_coef=0.0, importance_low=0.99, importance_high=1.02)
    weights = weights_of_tokens(ran)
    weights *= (weights >= 0.99) & (weights <= 1.02)
    loss = 0.0
    for row, of_row in zip(ran.rows, weights):
        mean = of_row[: len(row["token_ids"])].mean().item()
        loss -= row["advantage"] * mean / 12
    assert ran.line["loss/policy_avg"] == approx(loss, abs=1e-5)  # The ratio is 1.
    assert 0 < ran.line["val/masked_fraction"] < 1


def test_a_completion_has_one_masked_weight(variant):
    """As in TRL: the product over its tokens, or 0."""
    ran = variant(
        MASKED, kl_coef=0.0, importance_level="sequence", importance_low=0.0, importance_high=1.001
    )
    weights = weights_of_tokens(ran).prod(1)
    weights *= weights <= 1.001
    assert 0 < (weights == 0).sum() < 12
    losses = -weights * torch.tensor(column(ran.rows, "advantage"))
    assert ran.line["loss/policy_avg"] == approx(losses.mean().item(), abs=1e-6)


def test_overlong_punishment(variant):
    """Of 6 tokens the last 5 cost a fifth each (arXiv 2503.14476, eq. 13)."""
    ran = variant("benchmark/variants/overlong_punishment.patch", reward="five")
    for row in ran.rows:
        assert row["score"] == approx(5 - (len(row["token_ids"]) - 1) / 5)


def test_dynamic_sampling(variant):
    """The trained prompts are those of the stream, in its order, without groups of equal scores."""
    ran = variant(
        "benchmark/variants/dynamic_sampling.patch",
        reward="seldom",
        kl_coef=0.0,
        sampling_rounds=99,
    )
    prompts = make_prompts(7)
    stream = [prompts[number] for number in ran.module.draw_prompts(1, 7, 0, 1000)]
    place = -1
    for i in range(0, 12, 3):
        group = ran.rows[i : i + 3]
        place = stream.index(group[0]["prompt"], place + 1)
        assert len(set(column(group, "score"))) > 1
    assert ran.line["generated_episodes"] == 3 * (place + 1) > 12


def test_unbiased_kl(variant):
    """The mean of the loss over all four tokens, weighted by p_old, is KL(p_new, p_ref), and so is
    its gradient."""
    ran = variant("benchmark/variants/unbiased_kl.patch", num_ppo_epochs=2)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    new, old, ref = logits.log_softmax(1)
    old = old.detach()
    ref = ref.detach()
    losses = old.exp() * ran.module.k3_kl(new, ref, new - old)
    kl = new.exp() * (new - ref)
    difference = (losses - kl).sum()
    [gradient] = torch.autograd.grad(difference, logits)
    assert abs(difference) < 1e-9
    assert gradient.abs().max() < 1e-9


def test_entropy_bonus(variant, world, updates):
    """The entropy has its gradient, by plain passes of all episodes. So it has one where the
    advantage is 0, too, which the script as it is leaves out."""
    rows = variant(
        "benchmark/variants/entropy_bonus.patch",
        reward="seldom",
        kl_coef=0.0,
        temperature=0.7,
        entropy_coef=0.3,
    ).rows
    assert 0 in column(rows, "advantage")
    model = load_policy(world.llama)
    for row in rows:
        prompt = encode(row["prompt"])
        logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0]
        p = (logits[len(prompt) - 1 : -1] / 0.7).softmax(-1)
        entropies = -(p * p.log()).sum(-1)
        (-0.3 / 12 * entropies.mean()).backward()
    weights = token_weights(MODULES["grpo"], rows)
    policy = plain_gradient(world.llama, rows, weights, 0.7)
    both = []
    for parameter, gradient in zip(model.parameters(), policy):
        both.append(parameter.grad + gradient)
    assert distance(both, updates[0].gradients) < 1e-4
    assert distance(both, policy) > 0.1


def test_every_patch_is_tested():
    """Two patches have their tests in test_turns.py. Those of benchmark/engine have theirs
    below."""
    tests = ""
    for name in ("test_patches.py", "test_turns.py"):
        tests += (HERE / "tests" / name).read_text()
    for patch in PATCHES:
        assert "engine" in patch or f'"{patch}"' in tests, patch


# ---- the lines of docs/papers.md
PAPERS = "remax rejected opo pass_at_4 gdpo two_sided sapo dppo gmpo vespo masked entropy"


@fixture(scope="module")
def papers(tmp_path_factory):
    """The scripts with the changes that the page shows, in its order."""
    folder = tmp_path_factory.mktemp("papers")
    papers = SimpleNamespace()
    changes = diffs(HERE / "docs/papers.md")
    for name, (_, scripts) in zip(PAPERS.split(), changes, strict=True):
        path = folder / f"paper_{name}.py"
        _, text = scripts.popitem()  # of ppo.py, if it is among them
        path.write_text(text)
        setattr(papers, name, import_file(path))
    return papers


def loss_and_gradient(module, logprobs, advantage, old=-2.0, **flags):
    """Of one episode, whose tokens are divided by their number. Returns the loss, and the
    gradient by its tokens. old: log p_old of each token"""
    args = module.Args(num_ppo_epochs=2, **flags)
    logprobs = torch.tensor([logprobs], requires_grad=True)
    old_logprobs = torch.full_like(logprobs, old)
    advantages = torch.tensor([[advantage]])
    mask = logprobs < 0
    losses, *_ = module.grpo_loss(args, logprobs, old_logprobs, advantages, mask)
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
    found = loss_and_gradient(papers.dppo, [math.log(p)], advantage, old=math.log(p_old))
    assert found == approx([-advantage * weight] * 2, rel=1e-5)


@mark.parametrize(
    "first, second, advantage, logratio, first_moves",
    [
        (-1.0, -2.2, 1.0, 0.4 - 0.2, 0),
        (-1.0, -2.2, -1.0, 1 - 0.2, 1),
        (-3.0, -1.8, -1.0, -0.4 + 0.2, 0),
        (-3.0, -1.8, 1.0, -1 + 0.2, 1),
    ],
)
def test_gmpo(papers, first, second, advantage, logratio, first_moves):
    found = loss_and_gradient(
        papers.gmpo, [first, second], advantage, importance_sampling_level="sequence", cliprange=1.0
    )
    loss = -advantage * math.exp(logratio / 2)
    assert found == approx([loss, loss * first_moves / 2, loss / 2])


@mark.parametrize("advantage, power, rate", [(2.0, 2, 3), (-2.0, 3, 2)])
def test_vespo(papers, advantage, power, rate):
    found = loss_and_gradient(papers.vespo, [-1.5, -2.2], advantage)
    w = math.exp(0.5 - 0.2)  # of the completion
    slope = -advantage * w**power * math.exp(rate * (1 - w)) / 2
    assert found == approx([slope * (-1.5 - 2.2), slope, slope])


def test_advantages_of_papers(papers):
    # Of 6 answers 1 is right: it is in 10 of the 15 sets of 4, and in 6 of the 10 that hold a
    # certain wrong answer.
    advantages = papers.pass_at_4.grpo_advantages(torch.eye(6)[0], 6, "none")
    means = np.array([1, 0.6, 0.6, 0.6, 0.6, 0.6])
    deviation = (10 / 15 * 5 / 15) ** 0.5
    expected = (means - 10 / 15) / deviation
    assert advantages.tolist() == approx(expected, abs=1e-3)


def test_losses_of_papers(papers):
    logratio = torch.tensor([0.0, 0, 100, 100], requires_grad=True)
    signs = torch.tensor([1, -1, 1, -1])
    expected = {"two_sided": [-1, 1, -1.2, 3], "sapo": [-2, 2 / 1.05, -4, 4 / 1.05]}
    for name, losses in expected.items():
        found, _ = getattr(papers, name).clipped_policy_loss(logratio, signs, 0.2, 0.2)
        assert found.tolist() == approx(losses)
        [gradient] = torch.autograd.grad(found.sum(), logratio)
        assert gradient.tolist() == approx([-1, 1, 0, 0])
    is_left = []
    for second, advantage in (-3.2, -1.0), (-2.8, -1.0), (-3.2, 1.0):
        loss, *_ = loss_and_gradient(papers.masked, [-2.0, second], advantage)
        is_left.append(loss != 0)
    assert is_left == [False, True, True]


def test_remax(papers, run, world, monkeypatch):
    rollouts = record_calls(monkeypatch, papers.remax, "generate")
    rows = run(papers.remax, kl_coef=0.0, total_episodes=12).rollouts
    _, greedy = rollouts
    assert greedy.inputs["temperature"] == 0
    letters = import_file(world.folder / "rewards.py").letters
    for i, row in enumerate(rows):
        assert greedy.result.prompts[i // 3].text == row["prompt"]
        [baseline] = letters([row["prompt"]], [greedy.result.completions[i // 3]])
        assert row["advantage"] == approx(row["score"] - baseline, abs=1e-5)


@mark.parametrize("name", ["rejected", "opo"])
def test_baselines_of_papers(papers, run, name):
    rows = run(getattr(papers, name), reward="seldom", kl_coef=0.0, total_episodes=12).rollouts
    for i in range(0, 12, 3):
        group = rows[i : i + 3]
        scores = np.array(column(group, "score"))
        expected = scores * (scores.max() > scores.min())
        if name == "opo":
            lengths = [len(row["token_ids"]) for row in group]
            expected = scores - np.average(scores, weights=lengths)
        assert column(group, "advantage") == approx(expected, abs=1e-5)


def test_gdpo(papers, run):
    rows = run(papers.gdpo, reward="parts", total_episodes=12).rollouts
    advantages = torch.zeros(12)
    for name in ("reward/length", "reward/ones"):
        part = torch.tensor(column(rows, name))
        advantages += MODULES["grpo"].grpo_advantages(part, 3, "group")
    expected = advantages / advantages.std()
    assert column(rows, "advantage") == approx(expected.tolist(), abs=1e-3)


def test_top_entropy_tokens(papers, run, monkeypatch):
    rollouts = record_calls(monkeypatch, papers.entropy, "generate")
    losses = record_calls(monkeypatch, papers.entropy, "grpo_loss")
    run(papers.entropy, ref_model_path="reference", total_episodes=12)
    batch = rollouts[0].result
    entropies = batch.entropies[batch.mask].tolist()
    expected = (batch.entropies >= np.quantile(entropies, 0.8)) & batch.mask
    trained = losses[0].args[4]
    # The loss takes the episodes in another order.
    assert sorted(trained.sum(1).tolist()) == sorted(expected.sum(1).tolist())


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
    assert "1" in "".join(column(ran.rollouts, "completion"))
    assert column(ran.rollouts, "token_ids") == column(plain.rollouts, "token_ids")
    norm = plain.metrics[0]["grad_norm"]
    assert ran.metrics[0]["grad_norm"] == approx(norm, rel=1e-3)
    weights = weights_of(ran.folder / "model")
    assert distance(weights, weights_of(plain.folder / "model")) < 1e-5
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


def train(module, flags, tmp_path):
    """Run a command of a page with one batch. Returns the metrics."""
    reset_accelerate()
    flags += f" --total-episodes 64 --num-sample-generations 0 --output-dir {tmp_path}/run"
    with fresh_imports():
        module.main(tyro.cli(module.Args, args=flags.split()))
    return read_jsonl(tmp_path / "run/metrics.jsonl")[1]


def test_the_judge_of_long_answers_trains(tmp_path, monkeypatch):
    """The command of docs/variants.md, with its patch."""
    monkeypatch.chdir(HERE)
    page = "\n".join(commands(HERE / "docs/variants.md"))
    [flags] = re.findall("python grpo.py (.*long_judge.*)", page)
    module = patched("grpo", ["benchmark/variants/overlong_punishment.patch"], tmp_path)
    train(module, flags, tmp_path)


SYMPTOMS = {  # of the broken functions that run to the end
    "temperature no_check": lambda row: row["policy/clipfrac_avg"] > 0.1,
    "eos_masked no_check": lambda row: row["val/sampling_logprob_difference"] > 0.1,
    "interleaved": lambda row: row["group/equal_scores_fraction"] == 0,
}
FAILURES = HERE / "docs/failures.md"
BROKEN = []
for words in re.findall(r"broken.py (.*) (\w+)\.py (.*)", "\n".join(commands(FAILURES))):
    BROKEN.append(words)
    unchecked = f"{words[0]} no_check"
    if unchecked in SYMPTOMS:
        BROKEN.append((unchecked, *words[1:]))


@mark.parametrize("breaks, script, flags", BROKEN)
def test_a_broken_function_shows_its_symptom(breaks, script, flags, tmp_path, monkeypatch):
    """The page's commands with one batch. The healthy script has no symptom. Where a run stops, the
    page shows why."""
    monkeypatch.chdir(HERE)
    module = broken.load(script, breaks.split())
    if breaks in SYMPTOMS:
        has_symptom = SYMPTOMS[breaks]
        assert has_symptom(train(module, flags, tmp_path / "broken"))
        assert not has_symptom(train(MODULES[script], flags, tmp_path / "healthy"))
        return
    with raises(RuntimeError, match=REFUSED) as refused:
        train(module, flags, tmp_path)
    assert f"RuntimeError: {refused.value}" in FAILURES.read_text()
