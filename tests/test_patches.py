"""Every patch of benchmark/patches/ applies, trains, and does the one thing that it promises. So do
the lines of docs/papers.md and the broken functions.

test_turns.py tests turns.patch. Those of vLLM run with a stand-in for it.
"""

import functools
import re
import textwrap
from collections import ChainMap

import broken
import numpy as np
import torch
import vllm
from conftest import (
    HERE,
    MODULES,
    PAD,
    base_flags,
    changed,
    column,
    contents,
    distance,
    launch,
    launch_twice,
    launched,
    load_policy,
    losses,
    make_prompts,
    read_changes,
    read_copies,
    record_calls,
    stages,
    weights_of,
)
from plain import groups_of, row_logprobs, token_counts
from pytest import approx, fixture, mark, raises
from safetensors.torch import load_file

REFUSED = "sampling and training give log-probabilities"
ENTROPY = "grpo entropy_bonus.patch"

# Rows of docs/variants.md: episodes from elsewhere (the first one of each batch), another optimizer
# and schedule, and a new module, which learns the score from the prompt.
ROWS = read_copies("""
@@ replay
         samples = map_episodes(one_pass, prompt_lengths, size)
+        samples["tokens"][0] = torch.tensor([5, 4, 1, -1, -1, -1])
+        samples["logprobs"][0] = torch.tensor([-3.0, -3.0, -3.0, 0.0, 0.0, 0.0])
+        samples["entropies"][0] = 0
+        samples["ended"][0] = True

             difference = logprobs - batch.logprobs[to_train]
+            difference = difference * (to_train > 0)[:, None]

@@ old log p
-    if args.updates_per_batch == 1:
+    if False:

@@ optimizer
-    optimizer = torch.optim.AdamW(
-        trained_weights, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
-    )
+    optimizer = torch.optim.RMSprop(trained_weights, args.learning_rate / 10, momentum=0.9)

@@ schedule
+    schedules = torch.optim.lr_scheduler
+    parts = schedules.LinearLR(optimizer), schedules.ExponentialLR(optimizer, 0.5)
+    scheduler = schedules.SequentialLR(optimizer, parts, milestones=[2])
     accelerator.register_for_checkpointing(scheduler)

@@ all have a gradient
-has_gradient = (advantages != 0).any(1)
+has_gradient = torch.ones(num_episodes, dtype=torch.bool)

@@ probe
+    model.probe = torch.nn.Linear(model.config.hidden_size, 1)
     return prepare_for_training(args, model, 1)

+    if "output_hidden_states" in settings:
+        return outputs
     # By name: a mixture

+                        prompt_tokens, _ = pass_tokens(batch, episodes)
+                        outputs = forward(policy, prompt_tokens, output_hidden_states=True)
+                        hidden = outputs.hidden_states[-1][:, -1]
+                        values = accelerator.unwrap_model(policy).probe(hidden)
+                        losses = losses + 0.1 * (values - scores[episodes, None].float()) ** 2
                         # A second loss
""")

# A row of its own: a model in each iteration.
SAVE = "        save_checkpoint(args, state, output_dir, is_last)\n"
VARIANTS = (HERE / "docs/variants.md").read_text("utf-8")
[MODEL] = re.findall(r"models of the way .*`if .*: (.*?)` \|", VARIANTS)
CHANGES = {"rows": ChainMap(*ROWS.values()), "models": {SAVE: f"        {MODEL}\n{SAVE}"}}
# The changes that docs/papers.md shows, in its order: texts before, and after.
NAMES = "remax opo pass_at_4 gdpo two_sided dppo".split()
BLOCKS = re.findall(r"(?:^    [+-].*\n)+", (HERE / "docs/papers.md").read_text("utf-8"), re.M)
for name, block in zip(NAMES, BLOCKS, strict=True):
    CHANGES[name] = read_changes(textwrap.dedent(block))


@fixture(scope="module")
def load(tmp_path_factory):
    """load("rloo remax"): a script with these CHANGES, or with patches."""

    @functools.cache
    def load(name):
        script, _, change = name.partition(" ")
        folder = tmp_path_factory.mktemp("changed")
        if change in CHANGES:
            return changed(script, folder, texts=CHANGES[change])
        return changed(script, folder, change)

    return load


# ---- advantages and scores
def whitened_returns(ran):
    """The return of a token has the score, and the KL from this token on."""
    returns = []
    for row in ran.rollouts:
        kl = np.subtract(row["logprobs"], row["ref_logprobs"])
        returns.extend(row["score"] - 0.05 * kl[::-1].cumsum()[::-1])
    return (returns - np.mean(returns)) / np.std(returns, ddof=1)


def minus_mean_by_length(ran):
    advantages = []
    for group in groups_of(ran.rollouts):
        scores = np.array(column(group, "score"))
        advantages.extend(scores - np.average(scores, weights=token_counts(group)))
    return advantages


def minus_greedy(ran):
    """The evaluation before training has the score of each prompt's most likely completion."""
    greedy = {row["prompt"]: row["score"] for row in ran.eval_rollouts[:7]}
    return [row["score"] - greedy[row["prompt"]] for row in ran.rollouts]


def advantages_of(name, scores):
    advantage = vars(losses)[f"{name}_advantage"]
    more = [3, "group"] if name == "grpo" else [3]
    return np.array([advantage(scores, i, *more) for i in range(len(scores))])


def normalized_parts(ran):
    advantages = 0
    for name in ("reward/length", "reward/ones"):
        advantages += advantages_of("grpo", column(ran.rollouts, name))
    return advantages / advantages.std(ddof=1)


@mark.parametrize(
    "name, expected, flags",
    [
        ("rloo reinforce_plus_plus.patch", whitened_returns, dict(k=1, ref_model_path="reference")),
        ("rloo opo", minus_mean_by_length, dict(reward="seldom", kl_coef=0.0)),
        ("rloo remax", minus_greedy, dict(kl_coef=0.0)),
        ("grpo gdpo", normalized_parts, dict(reward="parts")),
    ],
)
def test_advantages(name, expected, flags, load, run, world):
    ran = run(load(name), **flags, total_episodes=12, eval_dataset=world.dataset(7))
    assert np.hstack(column(ran.rollouts, "advantage")) == approx(expected(ran), abs=2e-3)


def test_pass_at_4(load):
    # Of 6 answers 1 is right: it is in 10 of the 15 sets of 4, and in 6 of the 10 that hold a
    # certain wrong answer.
    advantages = load("grpo pass_at_4").grpo_advantages(torch.eye(6)[0], 6, "none")
    expected = np.array([1 / 3] + [0.6 - 2 / 3] * 5) / (2 / 9) ** 0.5
    assert advantages.tolist() == approx(expected, abs=1e-3)


def test_overlong_punishment(load, run):
    """Of 6 tokens the last 5 cost a fifth each (arXiv 2503.14476, eq. 13)."""
    rows = run(load("grpo overlong_punishment.patch"), reward="five").rollouts
    assert column(rows, "score") == approx([5 - (n - 1) / 5 for n in token_counts(rows)])


@mark.parametrize("more", [None, "overlong_punishment.patch"])
def test_dynamic_sampling(more, load, run):
    """The trained prompts are those of the stream, in its order, without groups of equal scores.
    With DAPO's other patch and flags, lengths make no group differ, but they are punished."""
    flags = dict(reward="seldom", kl_coef=0.0, sampling_rounds=99, total_episodes=12)
    name = "grpo dynamic_sampling.patch"
    if more:
        name += f" {more}"
        flags |= dict(loss_type="dapo", cliprange_high=0.28, num_mini_batches=4)
    ran = run(load(name), **flags)
    prompts = make_prompts(7)
    stream = [prompts[number] for number in MODULES["grpo"].draw_prompts(1, 7, 0, 1000)]
    place = -1
    for group in groups_of(ran.rollouts):
        place = stream.index(group[0]["prompt"], place + 1)
        punished = np.array(token_counts(group)) - 1 if more else 0  # by a fifth for each
        assert np.ptp(np.array(column(group, "score")) + punished / 5) > 0.5
    assert ran.metrics[0]["generated_episodes"] == 3 * (place + 1) > 12


# ---- losses
def test_reinforce(load, hold):
    """The loss of an episode is -score log p."""

    def loss(mini_batch, batch, args):
        losses = [-episode.score * episode.logprobs.sum() for episode in mini_batch]
        return sum(losses) / len(mini_batch)

    _, updates = hold(load("rloo reinforce.patch"), loss, kl_coef=0.0)
    assert stages.judge_gradients(updates)[1] is None


MASKED = "grpo masked_importance_sampling.patch"


@mark.parametrize(
    "name, flags, weight_of",  # The weight of an episode, by those of its tokens
    [
        (
            "rloo sampler_weights.patch",
            dict(weight_cap=1.01),
            lambda weights: weights.prod().clamp(max=1.01),
        ),
        (
            MASKED,
            dict(importance_low=0.99, importance_high=1.02),
            lambda weights: (weights * ((weights >= 0.99) & (weights <= 1.02))).mean(),
        ),
        (
            MASKED,
            dict(importance_level="sequence", importance_low=0.0, importance_high=1.001),
            lambda weights: weights.prod() * (weights.prod() <= 1.001),
        ),
        (
            "rloo vllm_rloo.patch",
            dict(dtype="bfloat16", weight_cap=1.01),
            lambda weights: weights.prod().clamp(max=1.01),
        ),
        (
            "grpo vllm_grpo.patch",
            dict(dtype="bfloat16", weight_cap=1.01),
            lambda weights: weights.clamp(max=1.01).mean(),
        ),
    ],
)
def test_corrections_of_the_sampler(name, flags, weight_of, load, run, world, monkeypatch):
    """Each advantage has the weight p_old / q. The rollouts hold p_old, the trainer's. q is that of
    the bfloat16 sampler, or of the engine."""
    module = load(name)
    # The patch changes what `generate` returns, so this is recorded inside of it.
    calls = record_calls(monkeypatch, module, "map_episodes")
    ran = run(module, kl_coef=0.0, total_episodes=12, **flags)
    rows = ran.rollouts
    weights = []
    for row, p, q in zip(rows, row_logprobs(world.llama, rows), calls[0].result["logprobs"]):
        assert row["logprobs"] == approx(p, abs=0.2 if "dtype" in flags else 1e-4)
        weights.append(weight_of((torch.tensor(row["logprobs"]) - q[: len(p)]).exp()).item())
    assert np.ptp(weights) > 1e-3
    expected = -np.mean(advantages_of(name.split()[0], column(rows, "score")) * weights)
    assert ran.metrics[0]["loss/policy_avg"] == approx(expected, abs=2e-6)


def test_unbiased_kl(load, run):
    """Of a token that is e times as likely as before, and e^2 times as likely as the reference
    says. The gradient is that of the KL: p / p_old (log p - log p_ref)."""
    module = load("grpo unbiased_kl.patch")
    run(module, num_ppo_epochs=2)
    logprob = torch.tensor(-1.0, requires_grad=True)
    kl = module.k3_kl(logprob, torch.tensor(-3.0), logprob + 2)
    kl.backward()
    expected = [np.e * (np.exp(-2) + 1), np.e * 2]
    assert [kl.item(), logprob.grad.item()] == approx(expected, rel=1e-5)


def test_adaptive_entropy(load):
    """Where the entropy is low, the weight grows. Elsewhere it shrinks, and does not count."""
    module = load(ENTROPY)
    args = module.Args(entropy_target=9.0, entropy_coef=0.004)
    state = {}
    found = [module.adapt_entropy_coef(args, entropy, state) for entropy in (8, 10, 7, 10, 8)]
    assert found == approx([0.004, 0, 0.004, 0, 0.004])


# Of one token: log p_old and log p, its advantage, the loss, and its gradient. DPPO's first one is
# 0.25 more likely than before. Its second one has a ratio of 10.
LOSSES = """
grpo two_sided | -9       -2        -1 | 3   0
grpo dppo      | -0.69315 -0.28768  2  | 0   0
grpo dppo      | -4.60517 -2.302585 2  | -20 -20
"""


@mark.parametrize("line", LOSSES.strip().splitlines())
def test_losses_of_papers(line, load):
    name, given, expected = line.split("|")
    module = load(name.strip())
    old_logprobs, logprobs, advantages = torch.tensor([[[float(x)]] for x in given.split()])
    logprobs.requires_grad_()
    args = module.Args(num_ppo_epochs=2)
    [[loss]], *_ = module.grpo_loss(args, logprobs, old_logprobs, advantages, logprobs < 0)
    loss.backward()
    found = [loss.item(), logprobs.grad.item()]
    assert found == approx([*map(float, expected.split())], rel=1e-4, abs=1e-6)


# ---- processes and kills
PROCESSES = {  # what can differ between processes, or be lost in a kill
    "grpo dynamic_sampling.patch": dict(temperature=0.3),
    ENTROPY: dict(entropy_target=9.0, kl_coef=0.0),
    "rloo reinforce_plus_plus.patch": {},
    "rloo rows": {},
}


@mark.slow
@mark.parametrize("name", PROCESSES)
def test_two_processes_stopped_and_resumed_make_the_run_of_one(name, load, elsewhere):
    module = load(name)
    flags = PROCESSES[name] | dict(num_train_epochs=3.0, save_every=1)
    ran, _ = elsewhere(module, 2, launch_twice, **flags)
    if name == "rloo rows":
        assert abs(ran.metrics[-1]["val/ratio"] - 1) > 1e-3
        assert "probe.weight" in load_file(ran.folder / "model/model.safetensors")


KILLS = """
import os, pathlib, runpy, sys, transformers

def save(tokenizer, folder, **more):
    if pathlib.Path(folder).name == "2" and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), 9)
    return keep(tokenizer, folder, **more)

keep = transformers.PreTrainedTokenizerBase.save_pretrained
transformers.PreTrainedTokenizerBase.save_pretrained = save
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@mark.slow
def test_models_of_the_way(load, run, world, tmp_path):
    """A kill in the middle leaves a part of one, which the resumed run replaces."""
    module = load("rloo models")
    flags = dict(total_episodes=36, save_every=1)
    expected = contents(run(module, **flags).folder / "models")
    (tmp_path / "kills.py").write_text(KILLS)
    out = tmp_path / "out"
    flags = base_flags(world, flags | dict(output_dir=out, resume=True))
    killed = launch(module, 1, tmp_path, flags, program=tmp_path / "kills.py")
    assert "exit code -9" in killed.stderr
    found = contents(out / "models")
    assert "2/model.safetensors" in found and "2/tokenizer.json" not in found
    launched(module, 1, tmp_path, flags, program=tmp_path / "kills.py")
    assert contents(out / "models") == expected
    load_policy(out / "models/3")


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


of_both = mark.parametrize("script", ["rloo", "grpo"])


@of_both
@mark.parametrize("rank", [None, 2])
def test_the_engine_makes_the_plain_run(script, rank, load, run):
    """The same completions and weights. The engine is shut down. The script itself compares its
    log-probabilities with those of the trainer."""
    scripts = load(f"{script} vllm_{script}.patch"), MODULES[script]
    ran, plain = (run(script, lora_r=rank, **ENGINE_FLAGS) for script in scripts)
    assert any(row["token_ids"][-1] == PAD for row in ran.rollouts)
    assert column(ran.rollouts, "token_ids") == column(plain.rollouts, "token_ids")
    weights = weights_of(ran.folder / "model")
    assert distance(weights, weights_of(plain.folder / "model")) < 1e-5
    assert vllm.LLM.is_shut_down


@of_both
def test_an_engine_with_old_weights_stops_the_run(script, load, run, monkeypatch):
    module = load(f"{script} vllm_{script}.patch")
    monkeypatch.setattr(vllm.LLM, "collective_rpc", lambda *_, **__: None)
    with raises(module.UsageError, match=REFUSED):
        run(module, **ENGINE_FLAGS)


@mark.parametrize("name, breaks", [("ppo", "temperature"), ("rloo", "eos_masked")])
def test_a_script_notices_that_it_is_broken(name, breaks, run):
    module = broken.load(name, [breaks])
    with raises(module.UsageError, match=REFUSED):
        run(module, num_ppo_epochs=2)
