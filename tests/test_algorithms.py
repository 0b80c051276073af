"""What makes RLOO, GRPO and PPO: advantages, losses, KL, score scaling, dropped updates, and their
metrics.
"""

import math

import numpy as np
import torch
import yaml
from conftest import MODULES, column, flat, load_policy, losses, one_text, only, save_model, stages
from plain import groups_of, token_counts, without_none
from pytest import approx, mark
from safetensors.torch import load_file


def test_a_token_of_probability_zero_adds_nothing(script, run, tmp_path):
    """To -sum p log p, and not nan: all metrics of a run are finite."""
    path = save_model(tmp_path / "policy", "phi")
    model = load_policy(path)
    model.lm_head.bias.data[[3, 7]] = -math.inf
    model.save_pretrained(path)
    run(script, model_path=path)


# A script, and its flags.
UPDATES = yaml.safe_load("""
rloo: {}
rloo lora: {lora_r: 2, learning_rate: 0.05}
grpo: {cliprange_high: 0.5, scale_rewards: batch}
grpo sequence: {importance_sampling_level: sequence, mask_truncated_completions: true}
grpo dapo: {loss_type: dapo, scale_rewards: none}
grpo dapo sequence: {loss_type: dapo, importance_sampling_level: sequence, lora_r: 2,
                     mask_truncated_completions: true, learning_rate: 0.05}
grpo dr_grpo: {loss_type: dr_grpo, mask_truncated_completions: true}
grpo dr_grpo sequence: {loss_type: dr_grpo, importance_sampling_level: sequence}
grpo cispo: {loss_type: cispo, mask_truncated_completions: true}
grpo cispo sequence: {loss_type: cispo, importance_sampling_level: sequence}
ppo: {cliprange_value: 0.05}
ppo lora: {lora_r: 2, learning_rate: 0.05}
""")


def ratios_of(episode, args):
    """Those of its tokens, or one of them all, and where they are clipped."""
    flags = vars(args)
    logratio = episode.logprobs - episode.old_logprobs
    if "rloo_k" in flags:
        logratio = logratio.sum(0, keepdim=True)
    if flags.get("importance_sampling_level") == "sequence":
        logratio = logratio.mean(0, keepdim=True)
    ratio = logratio.exp()
    high = flags.get("cliprange_high") or args.cliprange
    cut = ratio != ratio.clamp(1 - args.cliprange, 1 + high)
    if flags.get("loss_type") != "cispo":
        cut &= (ratio - 1) * torch.tensor(episode.advantage) > 0
    return ratio, cut


@mark.parametrize("case", UPDATES)
def test_updates_are_those_of_the_textbook(case, hold):
    """The gradients of all updates of two batches, and the mean of the first one's metrics. Some
    episodes have no score, and some are cut off. Micro-batches, and the last mini-batches, of 5 and
    4 episodes, split groups, which must change nothing."""
    name = case.split()[0]
    flags = dict(kl_coef=0.3, ref_model_path="reference", cliprange=0.1, learning_rate=0.01)
    flags |= dict(batch_size=24, total_episodes=33, num_mini_batches=2, num_ppo_epochs=2, seed=5)
    flags |= dict(reward="letters" if name == "ppo" else "unsure", temperature=0.7)
    ran, updates = hold(MODULES[name], per_device_train_batch_size=5, **flags | UPDATES[case])
    args = ran.args
    distance, wrong = stages.judge_gradients(updates)
    assert wrong is None
    rows = ran.rows_of(1)
    assert len(set(column(rows, "ended"))) == 2, "the test needs completions that are cut off"
    if name != "ppo":
        groups = [without_none(group) for group in groups_of(column(rows, "score"))]
        assert set(map(len, groups)) == {0, 1, 2, 3}, "the test needs groups with 0 to 3 scores"
        equal = np.mean([len(set(group)) <= 1 for group in groups])
        assert ran.metrics[0]["group/equal_scores_fraction"] == approx(equal)
    found = []
    for update in updates[: 8 if name == "ppo" else 4]:
        episodes = update.mini_batch
        if vars(args).get("mask_truncated_completions"):
            episodes = [episode for episode in episodes if episode.ended]
        if name == "rloo":  # It makes no pass without a gradient.
            episodes = [episode for episode in episodes if episode.advantage]
        ratio, cut = map(torch.cat, zip(*[ratios_of(episode, args) for episode in episodes]))
        shares = [clip.float().mean() for clip in (cut, cut & (ratio < 1), cut & (ratio > 1))]
        kl = ratio.log().square().mean() / 2
        losses = update.losses if name == "ppo" else [update.losses, torch.zeros(())]
        found.append(torch.stack([*losses, kl, ratio.mean(), ratio.var(correction=0), *shares]))
    means = torch.stack(found).mean(0).tolist()
    means[1] /= vars(args).get("vf_coef", 1)
    assert 0 < means[5] < 1, "the test needs clipped ratios"
    names = "loss/policy_avg loss/value_avg policy/approxkl_avg val/ratio val/ratio_var".split()
    names += ["policy/clipfrac_avg", "policy/clipfrac_low_avg", "policy/clipfrac_high_avg"]
    for metric, expected in zip(names, means):
        if metric in ran.metrics[0]:
            assert ran.metrics[0][metric] == approx(expected, rel=1e-3, abs=1e-5), metric


@one_text
@mark.parametrize(
    "advantage, loss, is_clipped", [(0.0, 0.0, False), (1.0, -1.2, True), (-1.0, math.inf, False)]
)
def test_a_ratio_of_inf(script, advantage, loss, is_clipped):
    """Above e^88 a float32 ratio is inf. Where it is clipped, or the advantage is 0, its gradient
    is 0, and not nan. With a negative advantage it stops the run."""
    logratio = torch.tensor([200.0], requires_grad=True)
    losses, cut = script.clipped_policy_loss(logratio, torch.tensor([advantage]), 0.2, 0.2)
    losses.sum().backward()
    assert (losses.item(), cut.item()) == (approx(loss), is_clipped)
    assert (logratio.grad.item() == 0) == (advantage >= 0)


@only("rloo", "grpo")
def test_equal_rewards_give_no_advantage(script):
    """Whatever their mean rounds to. So does a single score. With a reward for each token, as a
    copy may have, the tokens at one place of a group's completions are compared."""
    torch.manual_seed(1)
    rewards = torch.randn(9, 2)
    rewards[:3] = 1000.1  # The mean of three in float32 is another number.
    rewards[4:6] = math.nan  # This group has one score.
    of_script = getattr(script, f"{script.__name__}_advantages")
    for scale in [()] if script.__name__ == "rloo" else [("batch",), ("none",), ("group",)]:
        advantages = of_script(rewards, 3, *scale)
        assert advantages[6:].all() and not advantages[:6].any()
        assert not of_script(rewards[3:6, :1], 3, *scale).any()  # a batch with one score
    torch.testing.assert_close(advantages[:, :1], of_script(rewards[:, :1], 3, *scale))


@only("grpo")
def test_grpo_with_every_completion_truncated_learns_nothing(script, run, updates):
    """All episodes are masked. The gradient is zero, and no metric is NaN."""
    flags = dict(model_path="endless", num_mini_batches=2, num_ppo_epochs=2, kl_coef=0.1)
    run(script, mask_truncated_completions=True, **flags)
    for update in updates:
        assert not flat(update.gradients).any()


ADVANTAGES = yaml.safe_load("""
plain: {}
centred scores: {score_norm: true, kl_estimator: abs}
scaled scores: {score_scaling: true, kl_estimator: k2}
clipped scores: {score_norm: true, score_scaling: true, score_clip: 0.5}
whitened rewards: {whiten_rewards: true, kl_estimator: k3}
a low KL: {adaptive_kl: true, kl_target: 1000.0}
a high KL: {adaptive_kl: true, kl_target: 0.001}
""")


@only("ppo")
@mark.parametrize("case", ADVANTAGES)
def test_ppo_advantages_by_plain_computation(script, hold, case):
    """Moments of scores are those of all scores so far. The rest is as in losses.py: rewards, their
    KL, and advantages. After each iteration kl_coef *= 1 + clip(kl / target - 1, -0.2, 0.2) *
    episodes / horizon.

    Bugs: trl#2596 (whitening on each process alone), #3750 (the score after the EOS; disputed
    there)."""
    flags = dict(kl_coef=0.2, kl_horizon=10, gamma=0.8, lam=0.9, ref_model_path="reference")
    flags |= dict(model_path="pad_is_eos", reward="parts", batch_size=5, total_episodes=15)
    ran, updates = hold(script, **flags | ADVANTAGES[case])
    assert stages.judge_gradients(updates)[1] is None
    args = ran.args
    assert min(token_counts(ran.rollouts)) < 6, "the test needs an episode that ended early"
    coefficient = 0.2
    so_far = []
    for line in ran.metrics:
        rows = ran.rows_of(line["iteration"])
        scores = np.add(column(rows, "reward/length"), column(rows, "reward/ones"))
        so_far += scores.tolist()
        scores = scores - args.score_norm * np.mean(so_far)
        if args.score_scaling:
            scores = scores / np.std(so_far)
        if args.score_clip is not None:
            scores = scores.clip(-0.5, 0.5)
        assert column(rows, "score") == approx(scores, abs=1e-5)
        args.kl_coef = coefficient
        rewards = [losses.token_rewards(stages.make_episode(row), args) for row in rows]
        without_scores = torch.cat(rewards).sum().item() - sum(scores)
        assert line["objective/non_score_reward"] == approx(without_scores / 5, rel=1e-4)
        assert line["objective/kl_coef"] == approx(coefficient, rel=1e-5)
        if args.adaptive_kl:
            coefficient *= 1.1 if args.kl_target < 1 else 0.9


@only("ppo")
def test_ppo_divides_by_no_rounding_error(script, run):
    """Equal scores stay, and equal entries are whitened to 0. In float32 the mean of some counts is
    not the entry. Scores that are small without being equal are scaled as others are."""
    flags = dict(score_scaling=True, learning_rate=0.0, batch_size=3)

    def scores_of(reward):
        return column(run(script, reward=reward, **flags).rollouts, "score")

    assert set(scores_of("five")) == {5.0}
    assert scores_of("tiny") == approx(scores_of("number"), rel=1e-4)
    for count in range(3, 400):
        assert not script.whiten(torch.full((count,), 1000.1)).any()


@only("ppo")
def test_ppo_writes_its_value_model(script, run):
    """--value-model-path takes the folder value_model/ of a run: the next run begins with the
    values it ended with."""
    flags = dict(kl_coef=0.0, total_episodes=12)
    first = run(script, **flags).folder
    flags |= dict(model_path=first / "model", value_model_path=first / "value_model")
    second = run(script, learning_rate=0.0, **flags).folder
    before = load_file(first / "value_model/model.safetensors")
    after = load_file(second / "value_model/model.safetensors")
    assert flat(before.values()).equal(flat(after.values()))
    assert before["score.bias"].abs() > 1e-4
    assert not (run(script, lora_r=2, total_episodes=12).folder / "value_model").exists()


@only("ppo")
@mark.parametrize("flag", ["target_kl", "ratio_threshold"])
def test_ppo_counts_dropped_updates(script, run, updates, flag):
    """--target-kl ends the updates of an iteration. --ratio-threshold drops each update whose ratio
    is above it.

    Dropped updates never reach the optimizer. They still count in `step`, in the schedule and in
    the log. This holds also for the first update of a run."""
    flags = dict(num_ppo_epochs=3, num_mini_batches=2, num_train_epochs=3, learning_rate=0.01)
    ran = run(script, per_device_train_batch_size=2, **flags, **{flag: 1e-9})
    taken = flag == "target_kl"  # The first has a KL of 0 and a ratio of 1.
    rates = np.linspace(0.01, 0, 6 * len(ran.metrics), endpoint=False)
    assert [update.lr for update in updates] == approx(rates[::6] if taken else [])
    for iteration, line in enumerate(ran.metrics, start=1):
        assert line["step"] == 6 * iteration
        assert line["policy/skipped_updates"] == 6 - taken
        assert line["lr"] == approx(rates[line["step"] - 1])
        assert ("grad_norm" in line) == taken
