"""docs/papers.md: its statements about gradients hold, and its commands are accepted.

The gradients are exact. A small policy writes two tokens of three, and every completion is enumerated. No number is
sampled, so two gradients that should be equal differ by rounding only.
"""

import inspect
import itertools
import re
import shlex
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
import tyro
from conftest import HERE, fresh_imports, import_file, one_text, only, reset_accelerate

PAGE = HERE / "docs/papers.md"
TEXT = PAGE.read_text(encoding="utf-8")
VARIANTS = HERE / "benchmark/variants"
TOKENS = 3
COMPLETIONS = torch.tensor(list(itertools.product(range(TOKENS), repeat=2)))  # [completions, 2]


# ========================================= a policy that is enumerated =======================================
def make_logits(seed):
    """The logits of the first token, then those of the second token after each first one: [1 + TOKENS, TOKENS]."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(1 + TOKENS, TOKENS, dtype=torch.float64, generator=generator)


def token_logprobs(logits):
    """The log-probability of both tokens of each completion: [completions, 2]."""
    logprobs = logits.log_softmax(-1)
    first, second = COMPLETIONS.T
    return torch.stack([logprobs[0, first], logprobs[1 + first, second]], 1)


@pytest.fixture
def case():
    """A policy, the policy that sampled, and a reference. They are clearly different."""
    logits = make_logits(1).requires_grad_()
    logprobs = token_logprobs(logits)
    old, ref = token_logprobs(make_logits(7)), token_logprobs(make_logits(8))
    return SimpleNamespace(logits=logits, logprobs=logprobs, old=old, ref=ref)


def gradient(case, loss):
    return torch.autograd.grad(loss, case.logits, retain_graph=True)[0]


def kl(p, q):
    """KL(p || q) of whole completions, as it is defined. p, q: [completions, 2]"""
    return (p.sum(1).exp() * (p.sum(1) - q.sum(1))).sum()


def kl_of_the_first_token(p, q):
    p, q = p[::TOKENS, 0], q[::TOKENS, 0]
    return (p.exp() * (p - q)).sum()


def kl_of_the_second_token(p, q):
    """The mean over the first tokens. Their probabilities are constants."""
    of_each_start = (p[:, 1].exp() * (p[:, 1] - q[:, 1])).view(TOKENS, TOKENS).sum(1)  # [first tokens]
    return (p[::TOKENS, 0].exp().detach() * of_each_start).sum()


def mean_under(p, values):
    """The mean over all completions. The probabilities are constants, as for completions that were sampled."""
    return (p.sum(1).exp().detach() * values).sum()


def same(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


# ================================================== the KL ===================================================
@only("ppo")
def test_k1_and_k3_estimate_the_kl_and_k2_does_not(script, case):
    """The means of k1 and k3 are the KL. The mean of k2 is not."""
    true = kl(case.logprobs, case.ref)
    p, ref = case.logprobs.sum(1), case.ref.sum(1)
    means = {name: mean_under(case.logprobs, script.token_kl(p, ref, name)) for name in ("k1", "k2", "k3")}
    assert same(means["k1"], true) and same(means["k3"], true)
    assert not torch.isclose(means["k2"], true, rtol=0.1)


@only("rloo")
def test_k1_in_the_reward_and_k2_in_the_loss_have_the_gradient_of_the_kl(script, case):
    """k1 goes through rloo.py's advantages and loss, averaged over all pairs of completions with k = 2."""
    true = gradient(case, kl(case.logprobs, case.ref))
    k1 = (case.logprobs - case.ref).sum(1).detach()
    pairs = torch.cartesian_prod(torch.arange(len(k1)), torch.arange(len(k1)))  # [pairs, 2], each a group
    episodes = pairs.flatten()
    given = script.LossInputs(case.logprobs[episodes].detach(), script.rloo_advantages(-k1[episodes], k=2))
    losses = script.rloo_loss(script.Args(), case.logprobs[episodes], given).losses
    probability = case.logprobs.sum(1).exp().detach()[pairs].prod(1)  # of each pair
    in_reward = gradient(case, (probability * losses.view(-1, 2).mean(1)).sum())
    k2 = (case.logprobs - case.ref).sum(1).square() / 2
    in_loss = gradient(case, mean_under(case.logprobs, k2))
    assert same(in_reward, true) and same(in_loss, true)
    assert true.abs().max() > 0.1


def test_k1_in_the_loss_has_no_gradient(case):
    in_loss = gradient(case, mean_under(case.logprobs, (case.logprobs - case.ref).sum(1)))
    assert same(in_loss, torch.zeros_like(in_loss))


def test_k2_of_single_tokens_misses_what_a_token_does_to_later_ones(case):
    """Its gradient is that of each token's KL, with the tokens before it held fixed."""
    k2 = (case.logprobs - case.ref).square().sum(1) / 2
    in_loss = gradient(case, mean_under(case.logprobs, k2))
    first = kl_of_the_first_token(case.logprobs, case.ref)
    fixed_start = first + kl_of_the_second_token(case.logprobs, case.ref)
    assert same(in_loss, gradient(case, fixed_start))
    assert not torch.allclose(in_loss, gradient(case, kl(case.logprobs, case.ref)), atol=0.01)


@only("grpo")
def test_k3_in_the_loss_has_the_gradient_of_the_other_kl(script, case):
    """That of KL(ref || p), for a token: the first one of the completion."""
    k3 = script.k3_kl(case.logprobs, case.ref)[:, 0]
    in_loss = gradient(case, mean_under(case.logprobs, k3))
    assert same(in_loss, gradient(case, kl_of_the_first_token(case.ref, case.logprobs)))
    true = gradient(case, kl_of_the_first_token(case.logprobs, case.ref))
    assert not torch.allclose(in_loss, true, atol=0.01)


@only("grpo")
def test_k3_times_the_ratio_has_the_gradient_of_the_kl(script, case):
    """Also if another policy sampled. Without the ratio neither the mean nor the gradient is right then."""
    ratio = (case.logprobs - case.old).exp()[:, 0]
    k3 = script.k3_kl(case.logprobs, case.ref)[:, 0]
    true = kl_of_the_first_token(case.logprobs, case.ref)
    assert same(mean_under(case.old, ratio * k3), true)
    assert same(gradient(case, mean_under(case.old, ratio * k3)), gradient(case, true))
    assert not torch.isclose(mean_under(case.old, k3), true, rtol=0.1)
    assert not torch.allclose(gradient(case, mean_under(case.old, k3)), gradient(case, true), atol=0.01)


@only("ppo")
def test_what_the_estimators_of_ppo_do_in_the_reward(script, case):
    """k1 gives the gradient of the KL. k3 gives that of KL(p || ref) - KL(ref || p). k2 gives neither."""
    p, ref = case.logprobs[:, :1], case.ref[:, :1]

    def in_reward(estimator):
        penalty = script.token_kl(p, ref, estimator).detach()
        return gradient(case, mean_under(case.logprobs, (penalty * p).sum(1)))

    forward = gradient(case, kl_of_the_first_token(case.ref, case.logprobs))
    reverse = gradient(case, kl_of_the_first_token(case.logprobs, case.ref))
    assert same(in_reward("k1"), reverse)
    assert same(in_reward("k3"), reverse - forward)
    for other in (reverse, forward, reverse - forward):
        assert not torch.allclose(in_reward("k2"), other, atol=0.01)


@only("ppo")
def test_near_the_reference_only_k1_pulls_back(script, case):
    """In the reward, k2 and k3 vanish with the square of the distance. k1 vanishes with the distance."""
    direction = make_logits(4)

    def pull(estimator, distance):
        logits = (make_logits(8) + distance * direction).requires_grad_()
        p, ref = token_logprobs(logits), token_logprobs(make_logits(8))
        penalty = script.token_kl(p, ref, estimator).sum(1).detach()
        loss = mean_under(p, penalty * p.sum(1))
        return torch.autograd.grad(loss, logits)[0].norm()

    for estimator, power in (("k1", 1), ("k2", 2), ("k3", 2)):
        assert float(pull(estimator, 2e-4) / pull(estimator, 1e-4)) == pytest.approx(2**power, rel=0.01)


# ================================================= two-sided clipping ========================================
def lines_of_the_page(sign):
    """The lines of the page's patch that begin with + or -, without the sign."""
    block = TEXT[TEXT.index("    -    return torch.maximum") :].split("\n\n")[0]
    return [line[5:] for line in block.splitlines() if line.startswith(f"    {sign}")]


def test_the_two_sided_clip_of_the_page_is_bounded(script):
    """With the page's lines no loss exceeds 3 |A|, and nothing else changes. Above the bound the gradient is 0."""
    source = inspect.getsource(script.clipped_policy_loss)
    old, new = "\n".join(lines_of_the_page("-")), "\n".join(lines_of_the_page("+"))
    assert source.count(old) == 1 and len(lines_of_the_page("+")) == 3
    patched = {"torch": torch}
    exec(source.replace(old, new), patched)
    logratio = torch.tensor([-2.0, 0.0, 0.5, 1.0, 1.2, 5.0]).repeat(2).requires_grad_()  # log 3 is 1.0986
    advantages = torch.tensor([-0.5, 2.0]).repeat_interleave(6)
    before, _ = script.clipped_policy_loss(logratio, advantages, 0.2, 0.2)
    after, _ = patched["clipped_policy_loss"](logratio, advantages, 0.2, 0.2)
    is_bounded = (advantages < 0) & (logratio > 1.0986)
    assert is_bounded.tolist() == [False] * 4 + [True] * 2 + [False] * 6
    assert torch.equal(after[~is_bounded], before[~is_bounded])
    assert after[is_bounded].tolist() == [1.5, 1.5] and (before[is_bounded] > 1.5).all()
    slope = torch.autograd.grad(after.sum(), logratio)[0]
    assert (slope[is_bounded] == 0).all() and slope[3] > 0


# ================================================= the page's commands =======================================
COMMANDS = re.findall(r"`(?:git apply (\S+) && )?(python (?:rloo|grpo|ppo)\.py[^`]*)`", TEXT)


def load(patch, name, folder):
    """The script as a module, patched if the command applies a patch."""
    if not patch:
        return import_file(HERE / f"{name}.py")
    (folder / "benchmark").symlink_to(HERE / "benchmark")
    for script in ("rloo", "grpo", "ppo"):  # a patch may change all of them
        shutil.copy(HERE / f"{script}.py", folder)
    subprocess.run(["git", "apply", str(HERE / patch)], cwd=folder, check=True)
    return import_file(folder / f"{name}.py")


def run_command(patch, command, flags, folder):
    """Run a command of the page in this process, in the root of the repository, with some more flags."""
    words = shlex.split(command)
    script = load(patch, words[1].removesuffix(".py"), folder)
    reset_accelerate()
    with fresh_imports():
        script.main(tyro.cli(script.Args, args=[*words[2:], *flags]))


def test_there_are_commands():
    assert len(COMMANDS) >= 20
    names = "overlong_punishment reinforce_plus_plus sampler_weights masked_importance_sampling dynamic_sampling"
    patches = {f"benchmark/variants/{name}.patch" for name in [*names.split(), "unbiased_kl", "entropy_bonus"]}
    assert patches <= {patch for patch, _ in COMMANDS}


@one_text
@pytest.mark.parametrize("patch, command", COMMANDS, ids=lambda text: text[-40:])
def test_every_command_is_accepted(script, patch, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    run_command(patch, command, ["--plan", "1"], tmp_path)
    assert re.search(r"^steps: \d+", capsys.readouterr().out, re.M)


@one_text
@pytest.mark.slow
@pytest.mark.parametrize("patch, command", COMMANDS, ids=lambda text: text[-40:])
def test_every_command_trains(script, patch, command, tmp_path, monkeypatch):
    """With 64 episodes, or with one batch."""
    monkeypatch.chdir(HERE)
    few = f"--total-episodes 64 --num-sample-generations 0 --output-dir {tmp_path / 'run'}"
    run_command(patch, command, few.split(), tmp_path)
    assert (tmp_path / "run/model/config.json").exists()
