"""Every patch of benchmark/patches/ applies, trains, and does the one thing that it promises. So do
the lines of docs/papers.md and the broken functions.

turns.patch has its tests in test_turns.py. vllm_rloo.patch runs with a stand-in for vLLM.
"""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from conftest import (
    HERE,
    MODULES,
    PAD,
    base_flags,
    column,
    compare_runs,
    distance,
    encode,
    fresh_imports,
    import_file,
    launch_twice,
    load_policy,
    make_prompts,
    record_calls,
    reset_accelerate,
    weights_of,
)
from plain import (
    groups_of,
    plain_advantages,
    plain_gradient,
    row_logprobs,
    token_counts,
    token_weights,
)
from pytest import approx, fixture, mark, raises
from safetensors.torch import load_file
from test_pages import diffs, patched

REFUSED = "sampling and training give log-probabilities"
broken = import_file(HERE / "benchmark/failures/broken.py")


def load(patch, folder):
    """The script that a patch changes, with it."""
    [name] = re.findall(r"^--- a/(\w+)", (HERE / patch).read_text(), re.M)
    return patched(name, [patch], folder)


@fixture
def variant(run, monkeypatch, tmp_path):
    """variant(patch, **flags): a run of two iterations. Returns the patched script, and of the
    first iteration rows, metrics, and what the sampler gave."""

    def variant(patch, **flags):
        module = load(patch, tmp_path)
        # The patches change what `generate` returns, so this is recorded inside of it.
        calls = record_calls(monkeypatch, module, "map_episodes")
        ran = run(module, **dict(ref_model_path="reference", total_episodes=24) | flags)
        samples = calls[0].result
        rows = ran.rows_of(1)
        return SimpleNamespace(module=module, rows=rows, line=ran.metrics[0], samples=samples)

    return variant


def test_reinforce(variant, world, updates):
    """The scores are the advantages. The gradient is the mean of -score * grad log p(y)."""
    rows = variant("benchmark/patches/reinforce.patch", kl_coef=0.0).rows
    assert column(rows, "advantage") == approx(column(rows, "score"))
    expected = plain_gradient(world.llama, rows, token_weights(MODULES["rloo"], rows))
    assert distance(expected, updates[0].gradients) < 1e-4


def test_reinforce_plus_plus(variant):
    """The return of a token has the score, and the KL from this token on. The tokens of a batch are
    whitened."""
    returns = []
    advantages = []
    for row in variant("benchmark/patches/reinforce_plus_plus.patch", k=1).rows:
        kl = np.subtract(row["logprobs"], row["ref_logprobs"])
        returns.extend(row["score"] - 0.05 * kl[::-1].cumsum()[::-1])
        advantages.extend(row["advantage"])
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
def test_corrections_of_the_sampler(variant, world, case):
    """Each advantage has the weight p_old / q. The rollouts hold p_old, the trainer's. q is that of
    the bfloat16 sampler."""
    flags, weight_of = CORRECTIONS[case]
    ran = variant(case.split()[0], kl_coef=0.0, **flags)
    script = MODULES["grpo" if case.startswith(MASKED) else "rloo"]
    weights = []
    for row, logprobs, q in zip(
        ran.rows, row_logprobs(world.llama, ran.rows), ran.samples["logprobs"]
    ):
        assert row["logprobs"] == approx(logprobs, abs=1e-4)
        weights.append(weight_of((torch.tensor(logprobs) - q[: len(logprobs)]).exp()).item())
    assert np.ptp(weights) > 1e-3
    losses = -np.multiply(plain_advantages(script, column(ran.rows, "score")), weights)
    assert ran.line["loss/policy_avg"] == approx(losses.mean(), abs=1e-4)


def test_overlong_punishment(variant):
    """Of 6 tokens the last 5 cost a fifth each (arXiv 2503.14476, eq. 13)."""
    rows = variant("benchmark/patches/overlong_punishment.patch", reward="five").rows
    assert column(rows, "score") == approx([5 - (n - 1) / 5 for n in token_counts(rows)])


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
    difference = (losses - new.exp() * (new - ref)).sum()
    [gradient] = torch.autograd.grad(difference, logits)
    assert max(abs(difference), gradient.abs().max()) < 1e-9


ENTROPY = "benchmark/patches/entropy_bonus.patch"


def test_entropy_bonus(variant, world, updates, monkeypatch):
    """The entropy has its gradient, by plain passes of all episodes. So it has one where the
    advantage is 0, too, which the script as it is leaves out."""
    rows = variant(ENTROPY, reward="seldom", kl_coef=0.0, temperature=0.7, entropy_coef=0.3).rows
    assert 0 in column(rows, "advantage")
    gradients = plain_gradient(world.llama, rows, token_weights(MODULES["grpo"], rows), 0.7)
    model = load_policy(world.llama)
    for row in rows:
        prompt = encode(row["prompt"])
        logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0]
        log_p = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        (0.3 / 12 * (log_p.exp() * log_p).sum(-1).mean()).backward()
    for gradient, parameter in zip(gradients, model.parameters()):
        gradient += parameter.grad
    assert distance(gradients, updates[0].gradients) < 1e-4


def test_adaptive_entropy(tmp_path):
    """Where the entropy is low, the weight grows. Elsewhere it shrinks, and does not count."""
    module = load(ENTROPY, tmp_path)
    args = module.Args(entropy_target=9.0, entropy_coef=0.004)
    state = {}
    found = [module.adapt_entropy_coef(args, entropy, state) for entropy in (8, 10, 7, 10, 8)]
    assert found == approx([0.004, 0, 0.004, 0, 0.004])


PROCESSES = {  # what can differ between processes, or be lost in a kill
    "benchmark/patches/dynamic_sampling.patch": dict(temperature=0.3),
    ENTROPY: dict(entropy_target=9.0, kl_coef=0.0),
    "benchmark/patches/reinforce_plus_plus.patch": {},
}


@fixture
def resumed(run, world, tmp_path):
    """resumed(module, **flags): fails unless two processes, stopped and resumed, make the run of
    one process. Returns this."""

    def resumed(module, **flags):
        flags = flags | dict(num_train_epochs=3.0, save_every=1)
        ran = run(module, **flags)
        out = tmp_path / "out"
        launch_twice(module, 2, tmp_path, base_flags(world, flags | dict(output_dir=out)))
        compare_runs(ran.folder, out)
        return ran

    return resumed


@mark.slow
@mark.parametrize("patch", PROCESSES)
def test_two_processes_stopped_and_resumed_make_the_same_run(patch, resumed, tmp_path):
    resumed(load(patch, tmp_path), **PROCESSES[patch])


# Three rows of docs/variants.md in one copy: lines of rloo.py, and what takes their place.
ROWS = {
    # Episodes from elsewhere: the first one of each batch.
    """        samples = map_episodes(one_pass, prompt_lengths, size)
""": """        samples = map_episodes(one_pass, prompt_lengths, size)
        samples["tokens"][0] = torch.tensor([5, 4, 1, -1, -1, -1])
        samples["logprobs"][0] = torch.tensor([-3.0, -3.0, -3.0, 0.0, 0.0, 0.0])
        samples["entropies"][0] = 0
        samples["ended"][0] = True
""",
    """    if args.updates_per_batch == 1:
""": """    if False:
""",
    """        difference = new_logprobs - batch.logprobs[to_train]
""": """        difference = new_logprobs - batch.logprobs[to_train]
                        difference = difference * (to_train > 0)[:, None]
""",
    # Another optimizer and schedule.
    """    return torch.optim.AdamW(
        trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )
""": """    return torch.optim.RMSprop(trained, lr=args.learning_rate / 10, momentum=0.9)
""",
    """    accelerator.register_for_checkpointing(scheduler)
""": """    schedules = torch.optim.lr_scheduler
    parts = schedules.LinearLR(optimizer), schedules.ExponentialLR(optimizer, 0.5)
    scheduler = schedules.SequentialLR(optimizer, parts, milestones=[2])
    accelerator.register_for_checkpointing(scheduler)
""",
    # A new module: it learns the score from the prompt.
    """    model.tokenizer = tokenizer
""": """    model.probe = torch.nn.Linear(model.config.hidden_size, 1)
    model.tokenizer = tokenizer
""",
    """    return outputs[0]
""": """    return outputs if settings.get("output_hidden_states") else outputs[0]
""",
    """                to_train = mini_batch[(advantages[mini_batch] != 0).any(1)]
""": """                to_train = mini_batch
""",
    """                        # [episodes, actions]; a second loss""": """
                        prompt_tokens, _ = pass_tokens(batch, episodes)
                        outputs = forward(policy, prompt_tokens, output_hidden_states=True)
                        hidden = outputs.hidden_states[-1][:, -1]
                        values = accelerator.unwrap_model(policy).probe(hidden)
                        losses = losses + 0.1 * (values - scores[episodes, None].float()) ** 2
                        # [episodes, actions]; a second loss""",
}


@mark.slow
def test_rows_of_variants(resumed, tmp_path):
    text = Path(MODULES["rloo"].__file__).read_text()
    for old, new in ROWS.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "benchmark").symlink_to(HERE / "benchmark")
    (tmp_path / "rows.py").write_text(text)
    ran = resumed(import_file(tmp_path / "rows.py"))
    assert abs(ran.metrics[-1]["val/ratio"] - 1) > 1e-3
    assert "probe.weight" in load_file(ran.folder / "model/model.safetensors")


# ---- the lines of docs/papers.md
PAPERS = "remax opo pass_at_4 gdpo two_sided sapo dppo gmpo vespo masked entropy"


@fixture(scope="module")
def papers(tmp_path_factory):
    """The scripts with the changes that the page shows, in its order."""
    folder = tmp_path_factory.mktemp("papers")
    (folder / "benchmark").symlink_to(HERE / "benchmark")
    papers = SimpleNamespace()
    changes = diffs(HERE / "docs/papers.md")
    for name, (_, scripts) in zip(PAPERS.split(), changes, strict=True):
        path = folder / f"paper_{name}.py"
        path.write_text(scripts.get("grpo") or scripts.popitem()[1])
        setattr(papers, name, import_file(path))
    return papers


def vespo(advantage, power, rate):
    """Its loss and gradients in the table below, where the completion's log-ratio is 0.3."""
    w = math.exp(0.3)
    slope = -advantage * w**power * math.exp(rate * (1 - w)) / 2
    return [slope * (-1.5 - 2.2), slope, slope]


@mark.parametrize(
    "paper, old, logprobs, advantage, expected",  # the loss, and its gradient by each token
    [
        ("two_sided", -9.0, [-2.0], -1.0, [3, 0]),
        ("sapo", -2.0, [-2.0], 1.0, [-2, -1]),
        ("sapo", -2.0, [-2.0], -1.0, [2 / 1.05, 1]),
        # 0.25 more likely, which is more than 0.2. Then a ratio of 10, which would be clipped.
        ("dppo", math.log(0.5), [math.log(0.75)], 2.0, [0, 0]),
        ("dppo", math.log(0.01), [math.log(0.1)], 2.0, [-20, -20]),
        ("gmpo", -2.0, [-1.0, -2.2], 1.0, [-math.exp(0.1), 0, -math.exp(0.1) / 2]),
        ("vespo", -2.0, [-1.5, -2.2], 2.0, vespo(2, 2, 3)),
        ("vespo", -2.0, [-1.5, -2.2], -2.0, vespo(-2, 3, 2)),
        ("masked", -2.0, [-2.0, -3.2], -1.0, [0, 0, 0]),
        ("masked", -2.0, [-2.0, -2.8], -1.0, [0.9, 0.5, 0]),
    ],
)
def test_losses_of_papers(papers, paper, old, logprobs, advantage, expected):
    """Of one episode, whose tokens are divided by their number. old: log p_old of each token"""
    module = getattr(papers, paper)
    flags = dict(importance_sampling_level="sequence", cliprange=1.0) if paper == "gmpo" else {}
    args = module.Args(num_ppo_epochs=2, **flags)
    logprobs = torch.tensor([logprobs], requires_grad=True)
    old_logprobs = torch.full_like(logprobs, old)
    mask = logprobs < 0
    losses, *_ = module.grpo_loss(args, logprobs, old_logprobs, torch.tensor([[advantage]]), mask)
    loss = (losses * mask).mean()
    loss.backward()
    assert [loss.item(), *logprobs.grad[0].tolist()] == approx(expected, rel=1e-4, abs=1e-6)


def test_pass_at_4(papers):
    # Of 6 answers 1 is right: it is in 10 of the 15 sets of 4, and in 6 of the 10 that hold a
    # certain wrong answer.
    advantages = papers.pass_at_4.grpo_advantages(torch.eye(6)[0], 6, "none")
    expected = np.array([1 / 3] + [0.6 - 2 / 3] * 5) / (2 / 9) ** 0.5
    assert advantages.tolist() == approx(expected, abs=1e-3)


def test_remax(papers, run, world, monkeypatch):
    greedy = record_calls(monkeypatch, papers.remax, "score_episodes")
    rows = run(papers.remax, kl_coef=0.0, total_episodes=12).rollouts
    baselines = greedy[1].result[0].repeat_interleave(3)
    assert greedy[1].args[0].k == 1
    expected = column(rows, "score") - baselines.numpy()
    assert column(rows, "advantage") == approx(expected, abs=1e-5)


def test_opo(papers, run):
    rows = run(papers.opo, reward="seldom", kl_coef=0.0, total_episodes=12).rollouts
    for group in groups_of(rows):
        scores = np.array(column(group, "score"))
        expected = scores - np.average(scores, weights=token_counts(group))
        assert column(group, "advantage") == approx(expected, abs=1e-5)


def test_gdpo(papers, run):
    rows = run(papers.gdpo, reward="parts", total_episodes=12).rollouts
    parts = [column(rows, f"reward/{name}") for name in ("length", "ones")]
    advantages = np.sum([plain_advantages(MODULES["grpo"], part) for part in parts], axis=0)
    expected = advantages / advantages.std(ddof=1)
    assert column(rows, "advantage") == approx(expected, abs=1e-3)


def test_top_entropy_tokens(papers, run, monkeypatch):
    """The others lose their advantage. The denominator counts all."""
    rollouts = record_calls(monkeypatch, papers.entropy, "generate")
    ran = run(papers.entropy, kl_coef=0.0, total_episodes=12)
    batch = rollouts[0].result
    is_high = batch.entropies >= np.quantile(batch.entropies[batch.mask], 0.8)
    fractions = (is_high & batch.mask).sum(1) / batch.mask.sum(1)
    losses = -fractions.numpy() * column(ran.rollouts, "advantage")
    assert ran.metrics[0]["loss/policy_avg"] == approx(losses.mean(), abs=1e-5)


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
    return vllm, load("benchmark/patches/vllm_rloo.patch", folder)


@mark.parametrize("rank", [None, 2])
def test_the_engine_makes_the_plain_run(rank, run, tmp_path):
    """The same completions and weights. The engine is shut down. The script itself compares its
    log-probabilities with those of the trainer."""
    vllm, module = load_engine(tmp_path)
    ran = run(module, lora_r=rank, **ENGINE_FLAGS)
    plain = run(MODULES["rloo"], lora_r=rank, **ENGINE_FLAGS)
    assert any(row["token_ids"][-1] == PAD for row in ran.rollouts)
    assert column(ran.rollouts, "token_ids") == column(plain.rollouts, "token_ids")
    weights = weights_of(ran.folder / "model")
    assert distance(weights, weights_of(plain.folder / "model")) < 1e-5
    assert vllm.engines[0].is_shut_down


@mark.parametrize("forgotten", ["collective_rpc", "reset_prefix_cache"])
def test_an_engine_with_old_weights_or_old_prompts_stops_the_run(
    forgotten, run, tmp_path, monkeypatch
):
    vllm, module = load_engine(tmp_path)
    monkeypatch.setattr(vllm.LLM, forgotten, lambda *_, **__: None)
    with raises((module.UsageError, AssertionError), match=f"{REFUSED}|the prefix cache holds"):
        run(module, **ENGINE_FLAGS)


def train(module, flags, folder):
    """Run a command of docs/failures.md with one batch. Returns its metrics."""
    reset_accelerate()
    flags += f" --total-episodes 64 --num-sample-generations 0 --output-dir {folder}"
    with fresh_imports():
        return module.main(tyro.cli(module.Args, args=flags.split()))[1][1]


@mark.parametrize(
    "breaks, script, flags, has_symptom",
    [
        ("temperature", "ppo", "", lambda row: row["policy/clipfrac_avg"] > 0.1),
        (
            "eos_masked",
            "rloo",
            "--reward benchmark/failures/judges.py:first_two_digits --temperature 2",
            lambda row: row["val/sampling_logprob_difference"] > 0.1,
        ),
        (
            "interleaved",
            "grpo",
            "--reward benchmark/failures/judges.py:kinder_to_some_prompts",
            lambda row: row["group/equal_scores_fraction"] == 0,
        ),
    ],
)
def test_a_broken_function_shows_its_symptom(
    breaks, script, flags, has_symptom, tmp_path, monkeypatch
):
    """The healthy script has no symptom. Where the script notices the break, the page shows what it
    says."""
    monkeypatch.chdir(HERE)
    assert not has_symptom(train(MODULES[script], flags, tmp_path / "healthy"))
    if breaks != "interleaved":
        module = broken.load(script, [breaks])
        with raises(module.UsageError, match=REFUSED) as refused:
            train(module, flags, tmp_path / "stopped")
        assert str(refused.value).partition(";")[0] in (HERE / "docs/failures.md").read_text()
    assert has_symptom(train(broken.load(script, [breaks, "no_check"]), flags, tmp_path / "broken"))
