"""Every patch of benchmark/patches/ applies, trains, and does the one thing that it promises. So do
the lines of docs/papers.md and the broken functions.

The patch vllm_rloo runs with a stand-in for vLLM.
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
    PAD,
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
from plain import groups_of, plain_advantages, plain_gradient, token_counts, token_weights
from pytest import approx, fixture, mark, raises
from test_pages import commands, diffs, patched

PATCHES = sorted(glob("benchmark/patches/*", root_dir=HERE))
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
    ran = variant("benchmark/patches/reinforce.patch", kl_coef=0.0)
    assert column(ran.rows, "advantage") == approx(column(ran.rows, "score"))
    weights = token_weights(MODULES["rloo"], ran.rows)
    expected = plain_gradient(world.llama, ran.rows, weights)
    assert distance(expected, updates[0].gradients) < 1e-4


def test_reinforce_plus_plus(variant):
    """The return of a token has the score, and the KL from this token on. The tokens of a batch are
    whitened."""
    returns = []
    advantages = []
    for row in variant("benchmark/patches/reinforce_plus_plus.patch", k=1).rows:
        kl = np.subtract(row["logprobs"], row["ref_logprobs"])
        kl_to_come = kl[::-1].cumsum()[::-1]
        returns.extend(row["score"] - 0.05 * kl_to_come)
        advantages.extend(row["advantage"][: len(kl)])
    expected = (returns - np.mean(returns)) / np.std(returns, ddof=1)
    assert advantages == approx(expected, abs=2e-3)


MASKED = "benchmark/patches/masked_importance_sampling.patch"
CORRECTIONS = {  # the flags, and the weight of an episode, by those of its tokens
    "benchmark/patches/sampler_weights.patch": (
        dict(weight_cap=1.01),
        lambda weights: weights.prod().clamp(max=1.01),
    ),
    f"{MASKED} token": (
        dict(importance_low=0.99, importance_high=1.02),
        lambda weights: (weights * ((weights >= 0.99) & (weights <= 1.02))).mean(),
    ),
    f"{MASKED} sequence": (
        dict(importance_level="sequence", importance_low=0.0, importance_high=1.001),
        lambda weights: weights.prod() * (weights.prod() <= 1.001),
    ),
}


@mark.parametrize("case", CORRECTIONS)
def test_corrections_of_the_sampler(variant, case):
    """Each advantage has the weight p_old / q. The rollouts hold p_old, the trainer's. q is that of
    the bfloat16 sampler."""
    patch = case.split()[0]
    flags, weight_of = CORRECTIONS[case]
    ran = variant(patch, kl_coef=0.0, **flags)
    sampler, trainer, *_ = (call.result for call in ran.calls)
    [name] = changed_by(patch)
    advantages = plain_advantages(MODULES[name.removesuffix(".py")], column(ran.rows, "score"))
    losses = []
    weights = set()
    for i, row in enumerate(ran.rows):
        own = slice(len(row["token_ids"]))
        assert row["logprobs"] == approx(trainer[i, own].tolist(), abs=1e-4)
        weight = weight_of((trainer - sampler["logprobs"])[i, own].exp()).item()
        losses.append(-advantages[i] * weight)
        weights.add(weight)
    assert 1 < len(weights)
    assert case == f"{MASKED} token" or len(weights) < 12  # Some are cut, or 0.
    assert ran.line["loss/policy_avg"] == approx(np.mean(losses), abs=1e-4)


def test_overlong_punishment(variant):
    """Of 6 tokens the last 5 cost a fifth each (arXiv 2503.14476, eq. 13)."""
    ran = variant("benchmark/patches/overlong_punishment.patch", reward="five")
    for row in ran.rows:
        assert row["score"] == approx(5 - (len(row["token_ids"]) - 1) / 5)


def test_dynamic_sampling(variant):
    """The trained prompts are those of the stream, in its order, without groups of equal scores."""
    ran = variant(
        "benchmark/patches/dynamic_sampling.patch", reward="seldom", kl_coef=0.0, sampling_rounds=99
    )
    prompts = make_prompts(7)
    stream = [prompts[number] for number in ran.module.draw_prompts(1, 7, 0, 1000)]
    place = -1
    for group in groups_of(ran.rows):
        place = stream.index(group[0]["prompt"], place + 1)
        assert len(set(column(group, "score"))) > 1
    assert ran.line["generated_episodes"] == 3 * (place + 1) > 12


def test_unbiased_kl(variant):
    """The mean of the loss over all four tokens, weighted by p_old, is KL(p_new, p_ref), and so is
    its gradient."""
    ran = variant("benchmark/patches/unbiased_kl.patch", num_ppo_epochs=2)
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
        "benchmark/patches/entropy_bonus.patch",
        reward="seldom",
        kl_coef=0.0,
        temperature=0.7,
        entropy_coef=0.3,
    ).rows
    assert 0 in column(rows, "advantage")
    model = load_policy(world.llama)
    weights = token_weights(MODULES["grpo"], rows)
    for row, weight in zip(rows, weights):
        prompt = encode(row["prompt"])
        logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0]
        log_p = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        entropies = -(log_p.exp() * log_p).sum(-1)
        of_tokens = log_p.gather(-1, torch.tensor(row["token_ids"])[:, None]).squeeze(1)
        loss = -weight @ of_tokens - 0.3 / 12 * entropies.mean()
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert distance(gradients, updates[0].gradients) < 1e-4


def test_adaptive_entropy(run, tmp_path):
    """Where the entropy is low, the weight grows. Elsewhere it shrinks, and does not count."""
    module = patched("grpo", ["benchmark/patches/entropy_bonus.patch"], tmp_path)
    flags = dict(entropy_target=9.0, entropy_coef=0.004)
    ran = run(module, **flags, total_episodes=24)
    assert column(ran.metrics, "entropy_coef") == approx([0.004, 0.009])
    args = module.Args(**flags)
    state = {}
    found = [module.adapt_entropy_coef(args, entropy, state) for entropy in (10, 9, 8, 7, 10, 8)]
    assert found == approx([0, 0, 0.005, 0.01, 0, 0.01])


def test_every_patch_is_tested():
    """turns.patch has its tests in test_turns.py. vllm_rloo.patch has its own below."""
    tests = ""
    for name in ("test_patches.py", "test_turns.py"):
        tests += (HERE / "tests" / name).read_text()
    for patch in PATCHES:
        assert f'"{patch}"' in tests, patch


# ---- the lines of docs/papers.md
PAPERS = "remax opo pass_at_4 gdpo two_sided sapo dppo gmpo vespo masked entropy"


@fixture(scope="module")
def papers(tmp_path_factory):
    """The scripts with the changes that the page shows, in its order."""
    folder = tmp_path_factory.mktemp("papers")
    papers = SimpleNamespace()
    changes = diffs(HERE / "docs/papers.md")
    for name, (_, scripts) in zip(PAPERS.split(), changes, strict=True):
        path = folder / f"paper_{name}.py"
        path.write_text(scripts.get("grpo") or scripts.popitem()[1])
        setattr(papers, name, import_file(path))
    return papers


def slope_of_vespo(advantage, power, rate):
    w = math.exp(0.5 - 0.2)  # of the completion
    return -advantage * w**power * math.exp(rate * (1 - w)) / 2


SHORT = math.exp(-1.2)
A = slope_of_vespo(2, 2, 3)
B = slope_of_vespo(-2, 3, 2)


@mark.parametrize(
    "paper, old, logprobs, advantage, expected",  # the loss, and its gradient by each token
    [
        ("two_sided", -2.0, [-2.0], -1.0, [1, 1]),
        ("two_sided", -9.0, [-2.0], 1.0, [-1.2, 0]),
        ("two_sided", -9.0, [-2.0], -1.0, [3, 0]),
        ("sapo", -2.0, [-2.0], 1.0, [-2, -1]),
        ("sapo", -2.0, [-2.0], -1.0, [2 / 1.05, 1]),
        ("sapo", -99.0, [-2.0], 1.0, [-4, 0]),
        # 0.25 more likely, which is more than 0.2. Then a ratio of 10, which would be clipped.
        ("dppo", math.log(0.5), [math.log(0.75)], 2.0, [0, 0]),
        ("dppo", math.log(0.5), [math.log(0.25)], 2.0, [-1, -1]),
        ("dppo", math.log(0.01), [math.log(0.1)], 2.0, [-20, -20]),
        ("gmpo", -2.0, [-1.0, -2.2], 1.0, [-math.exp(0.1), 0, -math.exp(0.1) / 2]),
        ("gmpo", -2.0, [-1.0, -2.2], -1.0, [math.exp(0.4)] + [math.exp(0.4) / 2] * 2),
        ("vespo", -2.0, [-1.5, -2.2], 2.0, [A * (-1.5 - 2.2), A, A]),
        ("vespo", -2.0, [-1.5, -2.2], -2.0, [B * (-1.5 - 2.2), B, B]),
        ("masked", -2.0, [-2.0, -3.2], -1.0, [0, 0, 0]),
        ("masked", -2.0, [-2.0, -2.8], -1.0, [0.9, 0.5, 0]),
        ("masked", -2.0, [-2.0, -3.2], 1.0, [-(1 + SHORT) / 2, -0.5, -SHORT / 2]),
    ],
)
def test_losses_of_papers(papers, paper, old, logprobs, advantage, expected):
    """Of one episode, whose tokens are divided by their number. old: log p_old of each token"""
    module = getattr(papers, paper)
    args = module.Args(num_ppo_epochs=2)
    if paper == "gmpo":
        args = module.Args(num_ppo_epochs=2, importance_sampling_level="sequence", cliprange=1.0)
    logprobs = torch.tensor([logprobs], requires_grad=True)
    old_logprobs = torch.full_like(logprobs, old)
    mask = logprobs < 0
    losses, *_ = module.grpo_loss(args, logprobs, old_logprobs, torch.tensor([[advantage]]), mask)
    loss = (losses * mask).mean()
    loss.backward()
    assert [loss.item(), *logprobs.grad[0].tolist()] == approx(expected, rel=1e-4, abs=1e-6)


def test_advantages_of_papers(papers):
    # Of 6 answers 1 is right: it is in 10 of the 15 sets of 4, and in 6 of the 10 that hold a
    # certain wrong answer.
    advantages = papers.pass_at_4.grpo_advantages(torch.eye(6)[0], 6, "none")
    means = np.array([1, 0.6, 0.6, 0.6, 0.6, 0.6])
    deviation = (10 / 15 * 5 / 15) ** 0.5
    expected = (means - 10 / 15) / deviation
    assert advantages.tolist() == approx(expected, abs=1e-3)


def test_remax(papers, run, world, monkeypatch):
    rollouts = record_calls(monkeypatch, papers.remax, "generate")
    rows = run(papers.remax, kl_coef=0.0, total_episodes=12).rollouts
    greedy = rollouts[1]
    assert greedy.inputs["temperature"] == 0
    letters = import_file(world.folder / "rewards.py").letters
    prompts = column(rows[::3], "prompt")
    baselines = np.repeat(letters(prompts, greedy.result.completions), 3)
    expected = column(rows, "score") - baselines
    assert column(rows, "advantage") == approx(expected, abs=1e-5)


def test_opo(papers, run):
    rows = run(papers.opo, reward="seldom", kl_coef=0.0, total_episodes=12).rollouts
    for group in groups_of(rows):
        scores = np.array(column(group, "score"))
        expected = scores - np.average(scores, weights=token_counts(group))
        assert column(group, "advantage") == approx(expected, abs=1e-5)


def test_gdpo(papers, run):
    rows = run(papers.gdpo, reward="parts", total_episodes=12).rollouts
    advantages = torch.zeros(12)
    for name in ("reward/length", "reward/ones"):
        part = torch.tensor(column(rows, name))
        advantages += MODULES["grpo"].grpo_advantages(part, 3, "group")
    expected = advantages / advantages.std()
    assert column(rows, "advantage") == approx(expected.tolist(), abs=1e-3)


@mark.parametrize("level", ["token", "sequence"])
def test_top_entropy_tokens(papers, run, monkeypatch, level):
    """The others lose their advantage. The KL keeps all tokens, and the denominator counts all."""
    rollouts = record_calls(monkeypatch, papers.entropy, "generate")
    flags = dict(ref_model_path="reference", kl_coef=0.3, total_episodes=12)
    ran = run(papers.entropy, importance_sampling_level=level, **flags)
    batch = rollouts[0].result
    highest = np.quantile(batch.entropies[batch.mask].tolist(), 0.8)
    losses = []
    for row, entropies in zip(ran.rollouts, batch.entropies.tolist()):
        d = np.subtract(row["ref_logprobs"], row["logprobs"])
        is_high = np.array(entropies[: len(d)]) >= highest
        losses.append(np.mean(0.3 * (np.exp(d) - d - 1) - row["advantage"] * is_high))
    assert ran.metrics[0]["loss/policy_avg"] == approx(np.mean(losses), abs=1e-5)


# ---- the engine, and the broken functions
# Its stop string is a special token, which vLLM hides by default.
ENGINE_FLAGS = dict(
    model_path="emits_pad",
    num_train_epochs=4.0,
    temperature=0.7,
    stop_token_id=9,
    stop_string="<pad>",
    kl_coef=0.0,
)


def load_engine(folder):
    """The stand-in for vLLM, and the patched script."""
    vllm = import_file(HERE / "tests/stand_in_engine/vllm.py")
    return vllm, patched("rloo", ["benchmark/patches/vllm_rloo.patch"], folder)


@mark.parametrize("rank", [None, 2])
def test_the_engine_makes_the_plain_run(rank, run, tmp_path):
    """The same completions and weights. The engine is shut down. The script itself compares its
    log-probabilities with those of the trainer."""
    vllm, module = load_engine(tmp_path)
    ran = run(module, lora_r=rank, **ENGINE_FLAGS)
    plain = run(MODULES["rloo"], lora_r=rank, **ENGINE_FLAGS)
    assert any(row["token_ids"][-1] == PAD for row in ran.rollouts)
    assert column(ran.rollouts, "token_ids") == column(plain.rollouts, "token_ids")
    norm = plain.metrics[0]["grad_norm"]
    assert ran.metrics[0]["grad_norm"] == approx(norm, rel=1e-3)
    weights = weights_of(ran.folder / "model")
    assert distance(weights, weights_of(plain.folder / "model")) < 1e-5
    assert vllm.engines[0].is_shut_down


@mark.parametrize("forgotten", ["collective_rpc", "reset_prefix_cache"])
def test_an_engine_with_old_weights_or_old_prompts_stops_the_run(
    forgotten, run, tmp_path, monkeypatch
):
    vllm, module = load_engine(tmp_path)
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
