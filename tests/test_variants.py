"""benchmark/variants/: the patches are short, apply, compute what their papers say, learn, and do what they promise.

Runs are real: the embedded policy, patched and as it is, some seconds each (pytest -m slow).
"""

import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import (
    HERE,
    MODULES,
    VOCAB,
    distance,
    encode,
    import_file,
    make_prompts,
    make_rows,
    plain_logprobs,
    read_jsonl,
    record_calls,
    result_of,
    write_jsonl,
)
from plain import plain_gradient, token_weights
from transformers import AutoModelForCausalLM

VARIANTS = HERE / "benchmark" / "variants"
curves = import_file(VARIANTS / "curves.py")
# of each patch the scripts that it changes
PATCHES = {}
for variant in curves.VARIANTS:
    PATCHES.setdefault(variant.patch, []).append(variant.script)
LONGEST = {"dynamic_sampling": 60}  # changed lines in a script; 30 in all others


@pytest.fixture
def patched(tmp_path):
    """patched(name): the patched script as a module, under a name of its own, with its `benchmark` beside it."""

    def patched(name, script=None):
        script = script or PATCHES[name][0]
        folder = curves.copy_scripts(tmp_path / f"{name}_{script}_module", name)
        return import_file((folder / f"{script}.py").rename(folder / f"{name}_{script}.py"))

    return patched


@pytest.fixture
def train(tmp_path):
    """train(name, flags): run a variant (None: the script as it is), to its end or error -> what it wrote."""

    numbers = itertools.count()

    def train(name, flags, script=None, edit=lambda text: text):
        script = script or PATCHES[name][0]
        folder = curves.copy_scripts(tmp_path / f"{name}_{script}_{next(numbers)}", name)
        path = folder / f"{script}.py"
        path.write_text(edit(path.read_text()))
        command = [sys.executable, path, *flags.split(), "--save-rollouts", "--output-dir", folder / "run"]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if finished.returncode:
            return SimpleNamespace(error=finished.stderr)
        metrics, rollouts = (read_jsonl(folder / "run" / f"{file}.jsonl") for file in ("metrics", "rollouts"))
        evaluations = [row["eval/scores"] for row in metrics if "eval/scores" in row]
        found = dict(evaluations=evaluations, output=finished.stdout, error=None)
        return SimpleNamespace(metrics=metrics[1:], rollouts=rollouts, **found)

    return train


def learned(run, at_least):
    """Right answers to held-out prompts: hardly any before, most of them after."""
    assert run.error is None, run.error[-3000:]
    assert run.evaluations[0] < 0.15 and run.evaluations[-1] > at_least, run.evaluations
    scores = [row["objective/scores"] for row in run.metrics]
    assert np.mean(scores[-4:]) > np.mean(scores[:4]) + 0.2, scores
    return True


# ================================================= patches ==================================================
def test_every_patch_is_known():
    assert {path.stem for path in VARIANTS.glob("*.patch")} == set(PATCHES)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_short_and_applies(name, tmp_path):
    """The scripts that it changes stay clean. `-R` brings them back. The text above says how, whose idea it is, and
    what was measured."""
    head, diff = re.split(r"^(?=diff --git)", (VARIANTS / f"{name}.patch").read_text(), maxsplit=1, flags=re.M)
    scripts = [f"{script}.py" for script in PATCHES[name]]
    for of_script in re.split(r"^(?=diff --git)", diff, flags=re.M)[1:]:
        changed = [line for line in of_script.splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]
        assert 0 < len(changed) <= LONGEST.get(name, 30)
    for script in scripts:
        assert f"    git apply benchmark/variants/{name}.patch && python {script}" in head
    assert re.search(r"arXiv \d{4}\.\d{5}|Ionides 2008", head) and "Measured" in head
    folder = curves.copy_scripts(tmp_path / name)
    before = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    subprocess.run(["git", "apply", VARIANTS / f"{name}.patch"], cwd=folder, check=True)
    after = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert {path for path in before if before[path] != after[path]} == set(scripts)
    for command in (["check"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, "--quiet", "--config", HERE / ".ruff.toml"]
        subprocess.run([*words, "--line-length", "100", *(folder / script for script in scripts)], check=True)
    subprocess.run(["git", "apply", "-R", VARIANTS / f"{name}.patch"], cwd=folder, check=True)
    assert before == {path.name: path.read_bytes() for path in folder.glob("*.py")}


# =============================================== mathematics ================================================
def test_reinforce_advantages_by_hand(patched):
    """Two episodes of 2 and 1 tokens with scores 1 and 0, and KL penalties 0.5 and -0.5, and 1. R is 1 - 0 and 0 - 1;
    from the second token on the first has 1 + 0.5 = 1.5. The tokens 1, 1.5 and -1 have mean 0.5, deviation 1.3229."""
    rewards, mask = torch.tensor([1.0, -1.0]), torch.tensor([[True, True], [True, False]])
    penalties = torch.tensor([[0.5, -0.5], [1.0, 0.0]])
    advantages = patched("reinforce_plus_plus").reinforce_advantages(rewards, penalties, mask)
    assert advantages[mask].tolist() == pytest.approx([0.5 / 1.3229, 1.0 / 1.3229, -1.5 / 1.3229], rel=1e-3)


def test_soft_overlong_punishment_by_hand(patched):
    """Of 8 tokens the last 5 are punished: nothing up to 3, then a fifth for each (arXiv 2503.14476, eq. 13)."""
    punishment = patched("overlong_punishment").soft_overlong_punishment
    lengths = torch.tensor([1, 3, 4, 5, 7, 8])
    assert punishment(lengths, 8, 5).tolist() == pytest.approx([0, 0, -0.2, -0.4, -0.8, -1.0])
    assert punishment(torch.tensor([16384, 18432, 20480]), 20480, 4096).tolist() == [0, -0.5, -1.0]  # the paper's


def test_sampler_weights_by_hand(patched):
    """Two completions, of probability 1/2 each to the sampler, 0.8 and 0.2 to the trainer: weights 1.6 and 0.4. A mean
    under the sampler, weighted, is the trainer's; a cap of 1.5 binds the first alone. Tokens multiply."""
    weights = patched("sampler_weights").sampler_weights
    trainer, sampler = torch.tensor([[0.8], [0.2]]).log(), torch.tensor([[0.5], [0.5]]).log()
    exact = weights(trainer, sampler, 2.0)
    assert exact.tolist() == pytest.approx([1.6, 0.4])
    values = torch.tensor([3.0, 7.0])
    assert (0.5 * exact * values).sum().item() == pytest.approx(0.8 * 3 + 0.2 * 7)
    assert weights(trainer, sampler, 1.5).tolist() == pytest.approx([1.5, 0.4])
    two_tokens = weights(torch.tensor([[0.9, 0.8]]).log(), torch.tensor([[0.6, 0.8]]).log(), 2.0)
    assert two_tokens.item() == pytest.approx(1.5)


def test_masked_importance_by_hand(patched):
    """Four tokens, sampled with probability 0.4 each. The trainer gives them 0.6, 0.1, 0.4 and 0.9. In a band of 0.5 to
    2 the ratios 1.5 and 1 are weights, and 0.25 and 2.25 are masked. The bounds themselves are inside."""
    module = patched("masked_importance_sampling")
    trainer, sampler = torch.tensor([[0.6, 0.1], [0.4, 0.9]]).log(), torch.full((2, 2), 0.4).log()
    weights = module.masked_importance(trainer, sampler, 0.5, 2.0)
    assert weights.flatten().tolist() == pytest.approx([1.5, 0, 1, 0])
    exact = torch.tensor([[-1.0, 1.0, 2.0]])  # as powers of 2, so that nothing is rounded
    assert (module.masked_importance(exact * np.log(2.0), exact * 0, 0.5, 2.0) > 0).tolist() == [[True, True, False]]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_importance_weighs_the_policy_loss_alone(patched, loss_type, level):
    """The loss and its gradient are those of each token by itself, times its weight; the KL has no weight."""
    module = patched("masked_importance_sampling")
    args = module.Args(loss_type=loss_type, importance_sampling_level=level, kl_coef=0.1)
    torch.manual_seed(0)
    logprobs = (-torch.rand(3, 4)).requires_grad_()
    old, ref, advantages, weights = -torch.rand(3, 4), -torch.rand(3, 4), torch.randn(3), torch.rand(3)
    mask = torch.arange(4) < torch.tensor([[4], [2], [3]])
    logprobs.data, old, ref = logprobs.data * mask, old * mask, ref * mask
    importance = torch.tensor([1.3, 0.0, 0.8, 1.0]).expand(3, 4)

    def loss_of(importance, coef):
        given = module.LossInputs(old, advantages, weights, mask, ref, importance)
        args.kl_coef = coef
        losses = module.grpo_loss(args, logprobs, given).losses
        return losses.detach(), torch.autograd.grad(losses.sum(), logprobs)[0]

    whole = loss_of(importance, 0.1)
    kl = [x - y for x, y in zip(loss_of(importance, 0.1), loss_of(importance, 0.0))]
    tokens = torch.eye(4)[:, None].expand(4, 3, 4)  # one token alone has the weight 1
    of_tokens = [loss_of(token, 0.0) for token in tokens]
    for part in (0, 1):
        plain = sum(float(importance[0, t]) * of_tokens[t][part] for t in range(4)) + kl[part]
        torch.testing.assert_close(whole[part], plain, atol=1e-6, rtol=1e-5)
    assert whole[1].abs().sum() > 0.1


def test_masked_importance_compares_the_trainer_with_the_sampler(patched, run, world, monkeypatch):
    """In a run the first is the float32 policy, and the second the bfloat16 one. The tokens have their quotient."""
    module = patched("masked_importance_sampling")
    calls = record_calls(monkeypatch, module, "masked_importance")
    _, _, folder = run(module, kl_coef=0.0, total_episodes=12)
    trainer, sampler, *_ = calls[0].args
    model = AutoModelForCausalLM.from_pretrained(world.llama).eval()
    for i, row in enumerate(read_jsonl(folder / "rollouts.jsonl")):
        tokens = row["token_ids"]
        plain = plain_logprobs(model, encode(row["prompt"]), tokens).detach()
        torch.testing.assert_close(trainer[i, : len(tokens)], plain, atol=1e-5, rtol=1e-5)
        quotient = (plain - sampler[i, : len(tokens)]).exp()
        assert row["importance"][: len(tokens)] == pytest.approx(quotient.tolist(), abs=1e-4)
    assert (trainer - sampler).abs().max() > 1e-3


@pytest.mark.parametrize("is_on_policy", [True, False])
def test_unbiased_kl_has_the_gradient_of_the_kl(patched, is_on_policy):
    """One token of four, and all four are enumerated, with the probability that the sampling policy gives them. The
    mean of the loss is KL(p_new, p_ref), and so is its gradient. The script as it is has neither, off policy."""
    torch.manual_seed(0)
    logits = torch.randn(4, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(4, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    old = logprobs.detach() if is_on_policy else torch.randn(4, dtype=torch.float64).log_softmax(0)
    true = (logprobs.exp() * (logprobs - ref)).sum()
    true_gradient = torch.autograd.grad(true, logits, retain_graph=True)[0]

    def mean_and_gradient(module):
        column = torch.zeros(4, 1, dtype=torch.float64)
        given = module.LossInputs(old[:, None], column[:, 0], old.exp(), column == 0, ref[:, None])
        mean = module.grpo_loss(module.Args(kl_coef=1.0), logprobs[:, None], given).losses.sum()
        return mean, torch.autograd.grad(mean, logits, retain_graph=True)[0]

    mean, gradient = mean_and_gradient(patched("unbiased_kl"))
    torch.testing.assert_close(mean, true)
    torch.testing.assert_close(gradient, true_gradient)
    mean, gradient = mean_and_gradient(MODULES["grpo"])
    assert is_on_policy == torch.isclose(mean, true).item()
    assert not torch.allclose(gradient, true_gradient, atol=0.01)


def entropy_gradient(model_path, rows, weights, temperature):
    """The gradient of -sum weight * entropy over all tokens, by plain passes, an episode at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    for row, weight in zip(rows, weights):
        prompt = encode(row["prompt"])
        logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0, len(prompt) - 1 : -1]
        p = (logits / temperature).softmax(-1)
        (weight * (p * p.log()).sum(-1)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["rloo", "grpo", "ppo"])
@pytest.mark.parametrize("logits_at_once", [2**25, 5 * len(VOCAB)], ids=["one_piece", "pieces"])
def test_the_entropy_has_its_exact_gradient(patched, world, run, updates, monkeypatch, name, logits_at_once):
    """A run's first update is that of the original, plus coefficient times the gradient of the mean entropy of all
    episodes, also of those whose advantage is 0. It is the same if the head runs in pieces, and in micro-batches."""
    module = patched("entropy_bonus", name)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", logits_at_once)
    pieces = record_calls(monkeypatch, module, "checkpoint")
    flags = dict(reward=world.reward("seldom"), kl_coef=0.0, temperature=0.7, total_episodes=12)
    _, metrics, folder = run(module, entropy_coef=0.3, per_device_train_batch_size=5, **flags)
    assert bool(pieces) == (logits_at_once < 2**25)
    rows = read_jsonl(folder / "rollouts.jsonl")
    lengths = [len(row["token_ids"]) for row in rows]
    denominators = {"rloo": [len(rows)] * len(rows), "grpo": [n * len(rows) for n in lengths]}
    weights = [0.3 / n for n in denominators.get(name, [sum(lengths)] * len(rows))]
    bonus = entropy_gradient(world.llama, rows, weights, 0.7)
    policy = plain_gradient(world.llama, rows, token_weights(MODULES[name], rows), 0.7)
    expected = [a + (0 if b is None else b) for a, b in zip(bonus, policy)]
    assert distance(expected, updates[0].gradients[: len(expected)]) < 1e-4
    assert distance(expected, policy) > 0.1
    if name != "ppo":
        assert any(row["advantage"] == 0 for row in rows)  # The original leaves these episodes out.
    assert metrics[-1]["val/sampling_logprob_difference"] < 1e-4


ODD = '''
def odd(number, **_):
    """Other scores for each completion of a prompt with an odd number. For the other prompts all scores are 5."""
    return [float(i) if n % 2 else 5.0 for i, n in enumerate(number)]
'''


@pytest.mark.parametrize("rounds", [10, 2])
def test_dynamic_sampling_by_hand(patched, run, tmp_path, monkeypatch, rounds):
    """The groups of even prompts are replaced by the next prompts of the stream; the last round keeps all its groups.
    The counts are those of a plain walk along the stream. Every rollout has its own random numbers."""
    module = patched("dynamic_sampling")
    (tmp_path / "odd.py").write_text(ODD)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", make_rows(make_prompts(9)))
    calls = record_calls(monkeypatch, module, "generate")
    flags = dict(dataset=prompts, reward=f"{tmp_path / 'odd.py'}:odd", sampling_rounds=rounds, total_episodes=42)
    _, metrics, folder = run(module, kl_coef=0.0, **flags)
    rows = read_jsonl(folder / "rollouts.jsonl")
    assert [metrics[-1]["episode"], len(rows)] == [42, 42]
    stream, drawn = iter(module.draw_prompts(1, 9, 0, 1000)), 0
    for iteration, wanted in enumerate([4, 4, 4, 2], start=1):
        kept, equal = [], 0
        for sampling_round in range(1, rounds + 1):
            for _ in range(wanted - len(kept)):
                number, drawn = next(stream), drawn + 1
                if number % 2 or sampling_round == rounds:
                    kept.append((sampling_round, number))
                    equal += number % 2 == 0
            if len(kept) == wanted:
                break
        texts = [row["prompt"] for row in rows if row["iteration"] == iteration][::3]
        assert texts == [make_prompts(9)[number] for _, number in kept]
        row = metrics[iteration - 1]
        assert row["generated_episodes"] == 3 * drawn and row["epoch"] == pytest.approx(drawn / 9)
        assert row["group/zero_advantage_fraction"] == pytest.approx(equal / wanted)
    assert drawn > 14 and (rounds == 2) == any(row["group/zero_advantage_fraction"] for row in metrics)
    numbers = np.concatenate([call.args[4].flatten() for call in calls])
    assert len(numbers) == 3 * 6 * drawn == len(np.unique(numbers))


def test_dynamic_sampling_keeps_the_rows_of_an_episode_together(patched, run, world, monkeypatch):
    """A kept episode has its own tokens, log-probabilities, score and length, from whichever round it is."""
    module = patched("dynamic_sampling")
    sampled = record_calls(monkeypatch, module, "score_episodes")
    joined = record_calls(monkeypatch, module, "sample_groups")
    run(module, reward=world.reward("seldom"), kl_coef=0.0, total_episodes=24)
    known = {}  # of each sampled episode, by its tokens and log-probabilities, everything about it
    for call in sampled:
        for i, parts in enumerate(call.result[1]):
            values = {name: column[i] for name, column in vars(call.args[1]).items()}
            known[str((values["token_ids"], values["logprobs"].tolist()))] = values, float(call.result[0][i]), parts
    assert len(sampled) > len(joined) == 2
    for call in joined:
        scores, parts, batch = call.result
        assert len(scores) == len(parts) == len(batch.prompts) == len(batch.tokens) == 12
        for i in range(12):
            values, score, its_parts = known[str((batch.token_ids[i], batch.logprobs[i].tolist()))]
            assert (float(scores[i]), parts[i]) == (score, its_parts)
            for name, column in vars(batch).items():
                same = torch.equal if isinstance(column, torch.Tensor) else (lambda a, b: a == b)
                assert same(column[i], values[name]), name


class Killed(BaseException):
    """Ends a run as a signal would."""


def kill_after_metrics(monkeypatch, module, iteration):
    """The run ends when it has written the metrics of this iteration, before its checkpoint."""
    write_metrics = module.write_metrics

    def struck(accelerator, output_dir, metrics, progress):
        write_metrics(accelerator, output_dir, metrics, progress)
        if metrics["iteration"] == iteration:
            raise Killed

    monkeypatch.setattr(module, "write_metrics", struck)


def test_dynamic_sampling_resumes_exactly(patched, run, world, tmp_path, monkeypatch):
    """A run that was killed in its third iteration and started again is bit for bit the run that was never stopped."""
    module = patched("dynamic_sampling")
    flags = dict(reward=world.reward("seldom"), kl_coef=0.0, total_episodes=48, save_every=1)
    _, metrics, whole = run(module, **flags)
    assert metrics[-1]["generated_episodes"] > 60
    killed = dict(output_dir=str(tmp_path / "killed"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after_metrics(patch, module, iteration=3)
        run(module, **flags, **killed)
    again = run(module, **flags, **killed, resume=True)[2]
    assert result_of(whole) == result_of(again)


def test_dynamic_sampling_goes_on_after_a_run_without_it(patched, run, world, tmp_path, monkeypatch):
    """A checkpoint of the script as it is does not know its place in the stream. It follows from the iteration."""
    flags = dict(reward=world.reward("letters"), kl_coef=0.0, total_episodes=36, save_every=1)
    flags["output_dir"] = str(tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after_metrics(patch, MODULES["grpo"], iteration=3)
        run(MODULES["grpo"], **flags)
    module = patched("dynamic_sampling")
    calls = record_calls(monkeypatch, module, "draw_prompts")
    run(module, **flags, resume=True)
    assert [call.args[2:] for call in calls][0] == (8, 4)


def test_dynamic_sampling_says_which_counts_are_lower_bounds(patched, capsys):
    """`--plan` does, and the run's last line has the true numbers."""
    module = patched("dynamic_sampling")
    module.main(module.Args(plan=2, total_episodes=512))
    table = capsys.readouterr().out
    bounds = {line.split(":")[0] for line in table.splitlines() if "at least" in line.split("#")[1].split(";")[0]}
    assert bounds == {"epochs", "generated_episodes"}
    assert yaml.safe_load(table)["generated_episodes"] == 512


# ================================================== runs ====================================================
@pytest.mark.slow
def test_reinforce_plus_plus_learns_from_one_completion_of_a_prompt(train):
    """Which the original refuses; every token's advantage is the paper's, computed plainly from what was sampled."""
    flags = "--rloo-k 1 --total-episodes 1536"
    assert "--rloo-k must be at least 2" in train(None, flags, script="rloo").error
    variant = train("reinforce_plus_plus", flags)
    assert learned(variant, at_least=0.5)
    for iteration in (1, 20):
        episodes = [row for row in variant.rollouts if row["iteration"] == iteration]
        returns = []
        for row in episodes:
            kl = [new - ref for new, ref in zip(row["logprobs"], row["ref_logprobs"])]
            returns += [row["score"] - 0.01 * sum(kl[t:]) for t in range(len(kl))]
        expected = (np.array(returns) - np.mean(returns)) / np.std(returns, ddof=1)
        advantages = [row["advantage"][: len(row["token_ids"])] for row in episodes]
        np.testing.assert_allclose(np.concatenate(advantages), expected, atol=2e-3)
        loss = -np.mean([np.mean(of_episode) for of_episode in advantages])  # the ratio is 1
        assert variant.metrics[iteration - 1]["loss/policy_avg"] == pytest.approx(loss, abs=1e-4)
    assert len({round(advantage, 4) for advantage in np.concatenate(advantages)}) > 2  # the KL differs by token


@pytest.mark.slow
def test_overlong_punishment_keeps_completions_short(train):
    """A judge pays for long answers: GRPO makes them long and wrong; with the punishment they are short and right."""
    flags = f"{curves.JUDGE} --total-episodes 3072 --lr-scheduler-type constant"
    original, variant = train(None, flags, script="grpo"), train("overlong_punishment", flags)
    assert learned(variant, at_least=0.6)
    lengths = [np.mean([row["response_length_mean"] for row in run.metrics[-4:]]) for run in (original, variant)]
    assert lengths[1] < 4 < lengths[0] - 0.5, lengths
    assert original.evaluations[-1] < variant.evaluations[-1] - 0.3
    judge = import_file(VARIANTS / "long_judge.py").score
    answers = {row["prompt"]: row["answer"] for row in read_jsonl(HERE / "benchmark" / "default" / "train.jsonl")}
    for row in variant.rollouts[:640] + original.rollouts[-640:]:
        [score] = judge([row["completion"]], [row["token_ids"]], [answers[row["prompt"]]])
        is_punished = row in variant.rollouts[:640]
        punishment = max(0, len(row["token_ids"]) - 3) / 5 if is_punished else 0
        assert row["score"] == pytest.approx(score - punishment, abs=1e-5)


@pytest.mark.slow
def test_sampler_weights_let_a_bfloat16_sampler_train_in_float32(train):
    """A sampler of another precision stops the original; the variant learns, with weights near 1, not equal to it."""
    patch = (VARIANTS / "sampler_weights.patch").read_text()
    [was] = re.findall(r"^-( +with torch.autocast.*\n)", patch, re.M)
    [lines] = re.findall(r"^\+( +is_bfloat16 = .*\n)\+( +with torch.autocast.*\n)", patch, re.M)
    refused = train(None, "--total-episodes 256", script="rloo", edit=lambda text: text.replace(was, "".join(lines)))
    assert re.search(r"sampling and training give log-probabilities 0\.\d+ apart", refused.error)
    variant = train("sampler_weights", "--total-episodes 2048")
    assert learned(variant, at_least=0.5)
    assert all(0.003 < row["val/sampler_weight_std"] < 0.2 for row in variant.metrics)
    assert all(row.get("val/sampling_logprob_difference", 0) < 1e-4 for row in variant.metrics)
    weights = []
    for i in range(0, len(variant.rollouts), 4):  # the stored log-probabilities are the trainer's
        group = variant.rollouts[i : i + 4]
        rewards = [r["score"] - 0.01 * (sum(r["logprobs"]) - sum(r["ref_logprobs"])) for r in group]
        plain = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
        weights += [row["advantage"] / x for row, x in zip(group, plain) if abs(x) > 0.1]
    assert np.mean(weights) == pytest.approx(1, abs=0.01) and 0.003 < np.std(weights) < 0.1


@pytest.mark.slow
def test_masked_importance_masks_the_tokens_outside_of_the_band(train):
    """The sampler is bfloat16. The band is narrow here, so that tokens are masked; the policy learns from the others.
    The loss is that of the paper, computed plainly from what was written."""
    variant = train("masked_importance_sampling", "--total-episodes 2048 --importance-low 0.99 --importance-high 1.02")
    assert learned(variant, at_least=0.5)
    assert all(row.get("val/sampling_logprob_difference", 0) < 1e-4 for row in variant.metrics)
    for iteration in (1, 32):
        episodes = [row for row in variant.rollouts if row["iteration"] == iteration]
        weights = np.concatenate([row["importance"] for row in episodes])
        is_masked = weights == 0
        assert 0.01 < is_masked.mean() < 0.8
        assert ((weights >= 0.99) & (weights <= 1.02))[~is_masked].all() and len(set(weights)) > 20
        metrics = variant.metrics[iteration - 1]
        assert metrics["val/masked_fraction"] == pytest.approx(is_masked.mean(), abs=1e-6)
        loss = -np.mean([row["advantage"] * np.mean(row["importance"]) for row in episodes])  # the ratio is 1
        assert metrics["loss/policy_avg"] == pytest.approx(loss, abs=1e-5) and abs(loss) > 1e-4


@pytest.mark.slow
def test_dynamic_sampling_trains_on_groups_that_differ(train):
    variant = train("dynamic_sampling", "--total-episodes 1536")
    assert variant.evaluations[0] < 0.15 and variant.evaluations[-1] > 0.6
    groups = np.array([row["score"] for row in variant.rollouts]).reshape(-1, 4)
    differ = groups.std(1) > 0
    for row in variant.metrics:
        of_iteration = differ[16 * (row["iteration"] - 1) : 16 * row["iteration"]]
        assert row["group/zero_advantage_fraction"] == pytest.approx(1 - of_iteration.mean(), abs=1e-6)
    assert differ.mean() > 0.95  # Later on, some batches need more rounds than there are.
    generated = [row["generated_episodes"] for row in variant.metrics]
    assert generated[0] > 64 and all(b - a >= 64 for a, b in zip(generated, generated[1:]))
    epochs = generated[-1] / 4 / len(read_jsonl(HERE / "benchmark/default/train.jsonl"))
    assert f"1,536 of {generated[-1]:,} generated episodes, 24 steps, {epochs:g} epochs" in variant.output


@pytest.mark.slow
def test_the_unbiased_kl_holds_the_policy_near_the_reference(train):
    """It learns with a small coefficient, and stays where it is with a large one."""
    free, held = (train("unbiased_kl", f"--total-episodes 1536 --kl-coef {coef}") for coef in (0.05, 5))
    assert learned(free, at_least=0.5)
    assert held.error is None and held.evaluations[-1] < 0.2
    assert held.metrics[-1]["objective/kl"] < 0.1 * free.metrics[-1]["objective/kl"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo", "grpo", "ppo"])
def test_the_entropy_bonus_keeps_the_policy_random(train, tmp_path, name):
    """All completions have the same score. Then GRPO and RLOO have no other gradient, and the entropy rises."""
    (tmp_path / "equal.py").write_text("def equal(prompts, **_):\n    return [1.0] * len(prompts)\n")
    flags = f"--total-episodes 512 --entropy-coef 1 --eval-reward exact_match --reward {tmp_path / 'equal.py'}:equal"
    variant = train("entropy_bonus", flags, script=name)
    assert variant.error is None, variant.error[-3000:]
    entropies = [row["policy/entropy_avg"] for row in variant.metrics]
    assert entropies[-1] > 1.3 * entropies[0], entropies
    if name == "grpo":
        assert learned(train("entropy_bonus", "--total-episodes 1536 --entropy-coef 0.1", script=name), at_least=0.5)
