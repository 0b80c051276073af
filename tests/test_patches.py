"""Every patch of benchmark/ applies, trains, and does the one thing that it promises. So do the broken functions.

The patches of benchmark/engine run with a stand-in for vLLM.
"""

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import conftest
import pytest
import torch
import tyro
from conftest import HERE, MODULES, distance, encode, import_file, make_prompts, read_jsonl
from plain import plain_gradient, token_weights
from test_pages import commands, diffs
from transformers import AutoModelForCausalLM

PATCHES = sorted(str(path.relative_to(HERE)) for path in HERE.glob("benchmark/*/*.patch"))
REFUSED = "sampling and training give log-probabilities"
broken = import_file(HERE / "benchmark/failures/broken.py")


def git_apply(patch: str, folder: Path, *options: str):
    subprocess.run(["git", "apply", *options, HERE / patch], cwd=folder, check=True)


@pytest.fixture
def folder(tmp_path):
    """The scripts in a folder of their own, and what their defaults need."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in conftest.SCRIPTS:
        shutil.copy(HERE / f"{name}.py", folder)
    (folder / "benchmark").symlink_to(HERE / "benchmark")
    return folder


@pytest.fixture
def patched(folder):
    """patched(patch, script): the patched script as a module."""

    def patched(patch, script):
        git_apply(patch, folder)
        return import_file((folder / f"{script}.py").rename(folder / f"{script}_patched.py"))

    return patched


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_applies(patch, folder):
    """The scripts that it names stay clean, and the others stay as they are."""
    before = {path: path.read_text() for path in folder.glob("*.py")}
    git_apply(patch, folder)
    changed = [path for path in before if path.read_text() != before[path]]
    assert {path.name for path in changed} == set(re.findall(r"^diff --git a/(\S+)", (HERE / patch).read_text(), re.M))
    for command in ("check", "format --check"):
        words = f"-m ruff {command} --quiet --line-length 100 --config {HERE}/.ruff.toml".split()
        subprocess.run([sys.executable, *words, *changed], check=True)


VARIANTS = {}  # of each patch the script, flags of two iterations with the tiny policy, and what checks the promise


def promise(name: str, script: str, **flags):
    return lambda check: VARIANTS.setdefault(name, (script, flags, check))


@promise("reinforce", "rloo", kl_coef=0.0)
def scores_are_the_advantages(module, rows, world, updates, **_):
    """The gradient is the mean of -score * grad log p(y)."""
    assert [row["advantage"] for row in rows] == pytest.approx([row["score"] for row in rows])
    expected = plain_gradient(world.llama, rows, token_weights(MODULES["rloo"], rows))
    assert distance(expected, updates[0].gradients) < 1e-4
    with pytest.raises(ValueError, match="only one update"):
        module.Args(num_ppo_epochs=2)


@promise("reinforce_plus_plus", "rloo", k=1)
def advantages_are_whitened_returns(rows, **_):
    """The return of a token has the score, and the KL from this token on. The tokens of a batch are whitened."""
    kl = [torch.tensor(row["logprobs"]) - torch.tensor(row["ref_logprobs"]) for row in rows]
    returns = torch.cat([row["score"] - 0.05 * of_row.flip(0).cumsum(0).flip(0) for row, of_row in zip(rows, kl)])
    advantages = torch.cat([torch.tensor(row["advantage"][: len(row["token_ids"])]) for row in rows])
    torch.testing.assert_close(advantages, (returns - returns.mean()) / returns.std(), atol=2e-3, rtol=1e-3)


def weights_of_tokens(calls, rows):
    """p_old / q, [episodes, response]. The rollouts hold p_old, the trainer's. q is that of the bfloat16 sampler."""
    sampler, trainer = calls[0].result["logprobs"], calls[1].result
    assert (trainer - sampler).abs().max() > 1e-3
    assert [sum(row["logprobs"]) for row in rows] == pytest.approx(trainer.sum(1).tolist(), abs=1e-4)
    return (trainer - sampler).exp()


@promise("sampler_weights", "rloo", kl_coef=0.0, weight_cap=1.01)
def episodes_have_truncated_weights(module, rows, calls, **_):
    weights = weights_of_tokens(calls, rows).prod(1).clamp(max=1.01)
    assert 1 < len(set(weights.tolist())) < 12  # Some are cut.
    advantages = module.rloo_advantages(torch.tensor([row["score"] for row in rows]), 3) * weights
    assert [row["advantage"] for row in rows] == pytest.approx(advantages.tolist(), abs=1e-4)


@promise("masked_importance_sampling", "grpo", kl_coef=0.0, importance_low=0.99, importance_high=1.02)
def tokens_have_weights_or_are_masked(rows, metrics, calls, **_):
    weights = weights_of_tokens(calls, rows)
    weights = weights * ((weights >= 0.99) & (weights <= 1.02))
    of_rows = [weights[i, : len(row["token_ids"])] for i, row in enumerate(rows)]
    losses = [-row["advantage"] * of_row.mean().item() for row, of_row in zip(rows, of_rows)]  # the ratio is 1
    assert metrics[0]["loss/policy_avg"] == pytest.approx(sum(losses) / 12, abs=1e-5)
    assert 0 < metrics[0]["val/masked_fraction"] < 1


@promise("overlong_punishment", "grpo", reward="five")
def long_completions_lose_points(rows, **_):
    """Of 6 tokens the last 5 cost a fifth each (arXiv 2503.14476, eq. 13)."""
    assert [row["score"] for row in rows] == pytest.approx([5 - (len(row["token_ids"]) - 1) / 5 for row in rows])


@promise("dynamic_sampling", "grpo", reward="seldom", kl_coef=0.0, sampling_rounds=99)
def equal_groups_are_replaced(module, rows, metrics, **_):
    """The trained prompts are those of the stream, in its order, without groups of equal scores."""
    stream = [make_prompts(7)[number] for number in module.draw_prompts(1, 7, 0, 1000)]
    place = -1
    for row in rows[::3]:
        place = stream.index(row["prompt"], place + 1)
    assert metrics[0]["generated_episodes"] == 3 * (place + 1) > 12
    assert all(len({row["score"] for row in rows[i : i + 3]}) > 1 for i in range(0, 12, 3))


@promise("unbiased_kl", "grpo", num_ppo_epochs=2)
def the_kl_has_its_gradient(module, **_):
    """The mean of the loss over all four tokens, weighted by p_old, is KL(p_new, p_ref), and so is its gradient."""
    logits = torch.tensor([0.3, -1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    old, ref = torch.tensor([[1.0, 0.2, -0.4, 0.1], [-0.3, 0.7, 1.5, 0.4]], dtype=torch.float64).log_softmax(1)
    logprobs = logits.log_softmax(0)
    mean = (old.exp() * module.k3_kl(logprobs, ref, logprobs - old)).sum()
    difference = mean - (logprobs.exp() * (logprobs - ref)).sum()
    [gradient] = torch.autograd.grad(difference, logits)
    assert abs(difference) < 1e-9 and gradient.abs().max() < 1e-9


@promise("entropy_bonus", "grpo", reward="seldom", kl_coef=0.0, temperature=0.7, entropy_coef=0.3)
def the_entropy_has_its_gradient(rows, world, updates, **_):
    """By plain passes of all episodes: also of those with advantage 0, which the script as it is leaves out."""
    assert any(row["advantage"] == 0 for row in rows)
    model = AutoModelForCausalLM.from_pretrained(world.llama).eval()
    for row in rows:
        prompt = encode(row["prompt"])
        logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0, len(prompt) - 1 : -1]
        p = (logits / 0.7).softmax(-1)
        (0.3 / 12 * (p * p.log()).sum(-1).mean()).backward()
    policy = plain_gradient(world.llama, rows, token_weights(MODULES["grpo"], rows), 0.7)
    both = [p.grad + (0 if of_policy is None else of_policy) for p, of_policy in zip(model.parameters(), policy)]
    assert distance(both, updates[0].gradients) < 1e-4 and distance(both, policy) > 0.1


OWN_TESTS = ("turns", "one_batch_late")  # in test_turns.py


@pytest.mark.parametrize(
    "patch", [path for path in PATCHES if "/engine/" not in path and Path(path).stem not in OWN_TESTS]
)
def test_a_variant_keeps_its_promise(patch, patched, run, world, updates, monkeypatch):
    script, flags, check = VARIANTS[Path(patch).stem]
    module = patched(patch, script)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 100)  # The head runs in pieces.
    world_flags = dict(reward=world.reward(flags.get("reward", "letters")), ref_model_path=world.reference)
    calls = conftest.record_calls(monkeypatch, module, "map_episodes")
    ran = run(module, **dict(total_episodes=24) | flags | world_flags)
    assert ran.metrics[0]["val/sampling_logprob_difference"] < 1e-4
    rows = [row for row in ran.rollouts if row["iteration"] == 1]
    check(module=module, rows=rows, metrics=ran.metrics, world=world, updates=updates, calls=calls)


def test_a_completion_has_one_masked_weight(patched, run, world, monkeypatch):
    """With --importance-level sequence, as in TRL: the product over its tokens, or 0."""
    module = patched("benchmark/variants/masked_importance_sampling.patch", "grpo")
    calls = conftest.record_calls(monkeypatch, module, "map_episodes")
    flags = dict(importance_level="sequence", importance_low=0.0, importance_high=1.001)
    ran = run(module, kl_coef=0.0, total_episodes=12, **flags)
    weights = weights_of_tokens(calls, ran.rollouts).prod(1)
    kept = weights * (weights <= 1.001)
    assert 0 < (kept == 0).sum() < 12
    losses = [-row["advantage"] * weight / 12 for row, weight in zip(ran.rollouts, kept.tolist())]
    assert ran.metrics[0]["loss/policy_avg"] == pytest.approx(sum(losses), abs=1e-6)


def loss_and_gradient(module, args, old_logprobs, logprobs, advantage):
    """Of one episode, whose tokens are divided by their number. Returns the loss, and the gradient by its tokens."""
    old_logprobs = torch.tensor([old_logprobs])
    logprobs = torch.tensor([logprobs], requires_grad=True)
    mask = logprobs < 0
    losses, *_ = module.grpo_loss(args, logprobs, old_logprobs, torch.tensor([[advantage]]), mask)
    loss = (losses * mask).mean()
    return [loss.item(), *torch.autograd.grad(loss, logprobs)[0][0].tolist()]


def check_losses(dppo, gmpo, vespo):
    """Losses and gradients by hand."""
    for p_old, p, advantage, weight in (
        (0.5, 0.75, 2.0, 0),  # 0.25 more likely, which is more than 0.2
        (0.5, 0.75, -2.0, 1.5),
        (0.5, 0.25, -2.0, 0),
        (0.5, 0.25, 2.0, 0.5),
        (0.01, 0.1, 2.0, 10),  # The ratio would be clipped.
    ):
        found = loss_and_gradient(dppo, dppo.Args(num_ppo_epochs=2), [math.log(p_old)], [math.log(p)], advantage)
        assert found == pytest.approx([-advantage * weight] * 2, rel=1e-5)
    args = gmpo.Args(importance_sampling_level="sequence", cliprange=1.0, num_ppo_epochs=2)
    for logprobs, advantage, mean, moves in (
        ([-1.0, -2.2], 1.0, (0.4 - 0.2) / 2, [0, 1]),
        ([-1.0, -2.2], -1.0, (1 - 0.2) / 2, [1, 1]),
        ([-3.0, -1.8], -1.0, (-0.4 + 0.2) / 2, [0, 1]),
        ([-3.0, -1.8], 1.0, (-1 + 0.2) / 2, [1, 1]),
    ):
        expected = [-advantage * math.exp(mean) * factor for factor in [1, moves[0] / 2, moves[1] / 2]]
        assert loss_and_gradient(gmpo, args, [-2.0, -2.0], logprobs, advantage) == pytest.approx(expected)
    w = math.exp(0.5 - 0.2)  # of the completion
    for advantage, phi in (2.0, math.exp(3) * w**2 * math.exp(-3 * w)), (-2.0, math.exp(2) * w**3 * math.exp(-2 * w)):
        expected = [-phi * advantage * factor for factor in ((-1.5 - 2.2) / 2, 1 / 2, 1 / 2)]
        assert loss_and_gradient(
            vespo, vespo.Args(num_ppo_epochs=2), [-2.0, -2.0], [-1.5, -2.2], advantage
        ) == pytest.approx(expected)
    grpo, lengths = MODULES["grpo"], torch.tensor([1, 3])  # LUSPO: the mean of |y| times the loss of GSPO
    args = grpo.Args(importance_sampling_level="sequence", loss_type="dr_grpo", num_ppo_epochs=2)
    mask = torch.arange(3) < lengths[:, None]
    weights = grpo.token_weights(args, lengths[:, None], mask[:, :1])
    signs = torch.tensor([[1.0], [-1.0]])
    losses, *_ = grpo.grpo_loss(args, mask * torch.tensor([-1.9, -1.9, -2.0]), mask * -2.0, signs, mask)
    losses = (losses * mask).sum(1) * weights.squeeze(1) * args.response_length
    assert losses.tolist() == pytest.approx([-1 * math.exp(0.1) / 2, 3 * math.exp(0.2 / 3) / 2])


def test_the_lines_of_papers(run, world, tmp_path, monkeypatch):
    """Each change of a script that docs/papers.md shows does what its row says."""
    modules = []
    for number, (_, scripts) in enumerate(diffs(HERE / "docs/papers.md")):
        name, text = scripts.popitem()  # ppo.py, if it is among them
        (tmp_path / f"{name}_{number}.py").write_text(text)
        modules.append(import_file(tmp_path / f"{name}_{number}.py"))
    remax, rejected, opo, maxrl, pass_at_4, gdpo, *modules = modules
    two_sided, sapo, dppo, gmpo, vespo, masked, ppo, entropy = modules
    check_losses(dppo, gmpo, vespo)
    assert maxrl.grpo_advantages(torch.eye(8)[0], 4, "group").tolist() == [3, -1, -1, -1, 0, 0, 0, 0]
    # Of 6 answers 1 is right: it is in 10 of the 15 sets of 4, and in 6 of the 10 that hold a certain wrong answer.
    advantages = pass_at_4.grpo_advantages(torch.eye(6)[0], 6, "none") * (10 / 15 * 5 / 15) ** 0.5
    assert advantages.tolist() == pytest.approx([1 - 10 / 15, *[6 / 10 - 10 / 15] * 5], abs=1e-3)
    logratio, signs = torch.tensor([0.0, 0, 100, 100]).requires_grad_(), torch.tensor([1, -1, 1, -1])
    for module, expected in (two_sided, [-1, 1, -1.2, 3]), (sapo, [-2, 2 / 1.05, -4, 4 / 1.05]):
        losses = module.clipped_policy_loss(logratio, signs, 0.2, 0.2)[0]
        assert losses.tolist() == pytest.approx(expected)
        assert torch.autograd.grad(losses.sum(), logratio)[0].tolist() == pytest.approx([-1, 1, 0, 0])
    drift = torch.tensor([[0.5, 0.7], [0.5, 0.3], [0.5, 0.7]])
    several, signs = masked.Args(num_ppo_epochs=2), torch.tensor([[-1.0], [-1], [1]])
    losses, *_ = masked.grpo_loss(several, 0 * drift, drift, signs, drift > 0)
    assert (losses != 0).any(1).tolist() == [False, True, True]
    rollouts = conftest.record_calls(monkeypatch, remax, "generate")
    rows = run(remax, reward=world.reward("letters"), kl_coef=0.0, total_episodes=12).rollouts
    sampled, greedy = rollouts
    assert greedy.inputs["temperature"] == 0 and sampled.result.prompts[::3] == greedy.result.prompts
    for row, text in zip(rows, [text for text in greedy.result.completions for _ in range(3)], strict=True):
        baseline = len(set(text)) + 0.3 * text.count("1") - 0.1 * len(text) * (len(row["prompt"]) % 3)  # `letters`
        assert row["advantage"] == pytest.approx(row["score"] - baseline, abs=1e-5)
    for module in (rejected, opo):
        rows = run(module, reward=world.reward("seldom"), kl_coef=0.0, total_episodes=12).rollouts
        groups = [rows[first : first + 3] for first in range(0, 12, 3)]
        for group in groups:
            scores = [row["score"] for row in group]
            lengths = [len(row["token_ids"]) for row in group]
            expected = scores if len(set(scores)) > 1 else [0.0] * 3
            if module is opo:
                baseline = sum(map(math.prod, zip(scores, lengths, strict=True))) / sum(lengths)
                expected = [score - baseline for score in scores]
            assert [row["advantage"] for row in group] == pytest.approx(expected, abs=1e-5)
    rows = run(gdpo, reward=world.reward("parts"), total_episodes=12).rollouts
    parts = [torch.tensor([row[f"reward/{name}"] for row in rows]) for name in ("length", "ones")]
    advantages = sum(MODULES["grpo"].grpo_advantages(part, 3, "group") for part in parts)
    assert [row["advantage"] for row in rows] == pytest.approx((advantages / advantages.std()).tolist(), abs=1e-3)
    flags = dict(kl_coef=0.0, whiten_advantages=False, total_episodes=12)  # At the start, values are 0.
    for row in run(ppo, **flags).rollouts:
        assert row["returns"] == pytest.approx([row["score"]] * len(row["token_ids"]))
        assert row["advantage"] == pytest.approx([0.0] * (len(row["token_ids"]) - 1) + [row["score"]])
    rollouts, losses = (conftest.record_calls(monkeypatch, entropy, name) for name in ("generate", "grpo_loss"))
    run(entropy, ref_model_path=world.reference, total_episodes=12)
    batch, is_high = rollouts[0].result, losses[0].args[4]
    highest = batch.entropies[batch.mask].sort().values[-(-4 * (batch.mask.sum() - 1) // 5) :]  # the fifth
    assert is_high.sum(1).sort().values.equal(torch.isin(batch.entropies, highest).sum(1).sort().values)


def train(module, words, tmp_path):
    """Run a command of a page with one batch. Returns the metrics."""
    conftest.reset_accelerate()
    few = ["--total-episodes", "64", "--num-sample-generations", "0", "--output-dir", f"{tmp_path}/run"]
    with conftest.fresh_imports():
        module.main(tyro.cli(module.Args, args=[*words, *few]))
    return read_jsonl(tmp_path / "run/metrics.jsonl")[1]


def test_the_commands_of_the_variants_page(folder, tmp_path, monkeypatch):
    """They apply overlong_punishment.patch, train, and take it back."""
    monkeypatch.chdir(HERE)
    before = (folder / "grpo.py").read_text()
    for command in commands(HERE / "docs/variants.md"):
        words = command.split()
        if "turns.patch" in command:
            continue
        if words[:2] == ["git", "apply"]:
            git_apply(words[-1], folder, *words[2:-1])
        else:
            assert "long_judge" in command and (folder / "grpo.py").read_text() != before
            train(import_file(folder / words[1]), words[2:], tmp_path)
    assert (folder / "grpo.py").read_text() == before


def test_top_p_stops_the_run(folder, tmp_path):
    """With the words that docs/coming_from.md quotes."""
    [quoted] = re.findall(r'"(sampling and training[^"]*)"', (HERE / "docs/coming_from.md").read_text())
    line = "        log_p = torch.log_softmax(logits, dim=-1)  # [active, vocabulary]\n"
    before, after = (folder / "rloo.py").read_text().split(line)
    top_p = "        logits = transformers.TopPLogitsWarper(0.95)(None, logits)\n"
    (folder / "top_p.py").write_text(before + top_p + line + after)
    with pytest.raises(RuntimeError, match=" ".join(quoted.split())):
        train(import_file(folder / "top_p.py"), [], tmp_path)


@pytest.mark.parametrize(
    "script, forgotten", [("rloo", None), ("grpo", None), ("rloo", "collective_rpc"), ("rloo", "reset_prefix_cache")]
)
def test_the_engine_makes_the_plain_run(script, forgotten, patched, run, monkeypatch):
    """The same completions and weights. The engine is shut down. With old weights or old prompts the run stops."""
    vllm = import_file(HERE / "tests/stand_in_engine/vllm.py")
    module = patched(f"benchmark/engine/{script}.patch", script)
    flags = dict(num_train_epochs=4.0, temperature=0.7, stop_token_id=9, stop_string="1", kl_coef=0.0)
    if forgotten:  # as if the patch did not call it
        monkeypatch.setattr(vllm.LLM, forgotten, lambda *_, **__: None)
        with pytest.raises((RuntimeError, AssertionError), match=f"{REFUSED}|the prefix cache holds"):
            run(module, **flags)
        return
    runs = [run(module, **flags) for module in (module, MODULES[script])]
    tokens = [[row["token_ids"] for row in ran.rollouts] for ran in runs]
    norms = [[row["grad_norm"] for row in ran.metrics] for ran in runs]
    assert any("1" in row["completion"] for row in runs[0].rollouts)
    assert tokens[0] == tokens[1] and norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert distance(*(conftest.weights_of(ran.folder / "model") for ran in runs)) < 1e-5
    assert vllm.engines[0].is_shut_down
    assert run(module, **flags, weight_cap=1e-6)[1][0]["grad_norm"] < 1e-4 * norms[0][0]  # All weights are cut.


SYMPTOMS = {  # of the broken functions that run to the end
    "temperature no_check": lambda row: row["policy/clipfrac_avg"] > 0.1,
    "eos_masked no_check": lambda row: row["val/sampling_logprob_difference"] > 0.1,
    "interleaved": lambda row: row["group/equal_scores_fraction"] == 0,
}
BROKEN = [c.split("broken.py ")[1] for c in commands(HERE / "docs/failures.md") if "failures/broken.py " in c]


@pytest.mark.parametrize("command", BROKEN)
def test_a_broken_function_shows_its_symptom(command, tmp_path, monkeypatch):
    """The page's commands with one batch. The healthy script has no symptom. Where a run stops, the page shows why."""
    monkeypatch.chdir(HERE)
    breaks, script, flags = re.match(r"(.*) (\w+)\.py (.*)", command).groups()
    monkeypatch.setitem(sys.modules, script, MODULES[script])  # `load` puts the broken script there.
    module = broken.load(script, breaks.split())
    if breaks in SYMPTOMS:
        assert SYMPTOMS[breaks](train(module, flags.split(), tmp_path / "broken"))
        assert not SYMPTOMS[breaks](train(MODULES[script], flags.split(), tmp_path / "healthy"))
        return
    with pytest.raises(RuntimeError, match=REFUSED) as refused:
        train(module, flags.split(), tmp_path)
    assert f"RuntimeError: {refused.value}" in (HERE / "docs/failures.md").read_text()
