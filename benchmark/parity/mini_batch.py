"""The losses of TRL, and of torchrl for PPO, beside those of Tally's scripts: do they agree?

    python benchmark/parity/mini_batch.py

It runs in the environment of trl_trainer.py. `trl` and `torchrl` state the losses of the others as
losses.py states Tally's. The other library computes advantages and loss. Log-probabilities and
values are those of Tally's run, at the weights of each update. So check_copy.py takes them, too:

    python benchmark/check_copy.py grpo.py --stages-only --loss benchmark/parity/mini_batch.py:trl

The runs have the prompts and the reward of check_copy.py, and two iterations. Compared are
gradients before clipping, by |ours - theirs| / |ours|, of all updates the largest: `left`. It must
be below TOLERANCE. Of a known difference `gradient` is what it makes, and `left` what is left
without it. `cut` is the share of ratios where the clip changes the loss (cispo: the ratio), in one
of the two iterations. Writes mini_batch.json, a line for each run. In a smoke run Tally alone makes
updates.
"""

import tempfile
from functools import partial
from itertools import product

import torch
import trl_trainer  # first: it makes the modules below importable
from check_copy import make_flags
from run import BENCHMARK, Part, main, read_run, run
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

RESULT = BENCHMARK / "parity/mini_batch.json"
TOLERANCE = 1e-5


# ========== the losses of the others ==========
def settings_like(args):
    """TRL's settings that mean the same as a script's flags."""
    flags = vars(args)
    same = "loss_type scale_rewards importance_sampling_level mask_truncated_completions"
    chosen = {name: flags[name] for name in same.split() if name in flags} | dict(
        beta=args.kl_coef,
        epsilon=args.cliprange,
        num_iterations=args.num_ppo_epochs,
        num_generations=flags.get("rloo_k") or args.num_generations,
        max_completion_length=args.response_length,
        steps_per_generation=args.num_mini_batches,
        batch=args.batch_size // args.num_mini_batches,
    )
    if "loss_type" in flags:
        high = args.cliprange if args.cliprange_high is None else args.cliprange_high
        # In cispo it bounds the ratio, and not its distance from 1.
        chosen["epsilon_high"] = high + (args.loss_type == "cispo")
        chosen["use_bias_correction_kl"] = False
    return chosen


def trl(mini_batch, batch, args, scores=None, **changes):
    """The loss of TRL's trainer.

    scores: others than those of the batch; changes: of `settings_like`
    """
    scores = scores or [episode.score for episode in batch]
    rows = [dict(prompt=episode.prompt) for episode in batch]
    trainer = trl_trainer.make_trainer(
        "rloo" if "rloo_k" in vars(args) else "grpo",
        rows,
        lambda **_: scores,
        args.output_dir,
        args.model_path,
        given=[[episode.token_ids for episode in batch]],
        **settings_like(args) | changes,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()

    def given(model, ids, mask, columns, *_, **__):
        """In place of a pass: log-probabilities, entropies, and no loss of a mixture's balance."""
        if torch.is_grad_enabled():
            found = [episode.logprobs for episode in mini_batch]
        elif model is trainer.model:
            found = [episode.old_logprobs for episode in batch]
        else:
            found = [episode.ref_logprobs for episode in batch]
        found = pad_sequence(found, batch_first=True)
        found = pad(found, (0, columns - found.shape[1]))
        return found, found.detach(), None

    trainer._get_per_token_logps_and_entropies = given
    inputs = trainer._generate_and_score_completions(rows)
    places = [episode.index for episode in mini_batch]
    for name, values in inputs.items():
        if isinstance(values, torch.Tensor) and values.ndim:
            inputs[name] = values[places]
    return trainer._compute_loss(trainer.model, inputs)


def torchrl(mini_batch, batch, args, valid=True, **changes):
    """The losses of torchrl's ClipPPOLoss, with its GAE. The mini-batch is the whole batch.

    valid: without it, torchrl whitens by the deviation of a sample
    """
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.modules import ProbabilisticActor
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    def tokens(name):
        return torch.cat([torch.as_tensor(vars(episode)[name]) for episode in mini_batch])

    old, old_values = tokens("old_logprobs"), tokens("old_values")[:, None]
    ends = torch.tensor([len(episode.token_ids) for episode in mini_batch]).cumsum(0) - 1
    rewards = -args.kl_coef * (old - tokens("ref_logprobs"))[:, None]
    rewards[ends, 0] += torch.tensor([episode.score for episode in mini_batch])
    done = torch.zeros_like(old_values).bool()
    done[ends] = True
    next_values = torch.cat([old_values[1:], torch.zeros(1, 1)])
    advantages, returns = generalized_advantage_estimate(
        args.gamma, args.lam, old_values, next_values, rewards, done
    )
    columns = dict(
        advantage=advantages,
        value_target=returns,
        state_value=old_values,
        action=tokens("token_ids"),
        action_log_prob=old,
        index=torch.arange(len(old)),
    )
    if valid:
        columns["shifted_valid"] = torch.ones(len(old), dtype=torch.bool)
    log_p, values = tokens("log_p"), tokens("values")[:, None]
    policy = TensorDictModule(lambda i: log_p[i], in_keys=["index"], out_keys=["logits"])
    critic = TensorDictModule(lambda i: values[i], in_keys=["index"], out_keys=["state_value"])
    actor = ProbabilisticActor(
        policy, in_keys=["logits"], distribution_class=torch.distributions.Categorical
    )
    settings = dict(
        clip_epsilon=args.cliprange,
        clip_value=args.cliprange_value,
        critic_coeff=args.vf_coef / 2,  # It has no 1/2 before the square.
        normalize_advantage=True,
        entropy_bonus=False,
        loss_critic_type="l2",
        functional=False,
    )
    objective = ClipPPOLoss(actor, critic, **settings | changes)
    losses = objective(TensorDict(columns, batch_size=[len(old)]))
    return losses["loss_objective"], losses["loss_critic"]


# ========== the cases: what it is, script, flags, and losses by what is measured ==========
TWICE = "--num-ppo-epochs 2"
PPO = f"{TWICE} --kl-coef 0.05 --learning-rate 1e-3"


def grpo_flags(loss_type, level="token", scale="group", kl=0.05):
    low, high = dict(token=(0.1, 0.4), sequence=(0.02, 0.1))[level]
    if loss_type == "cispo":
        low, high = 1.0, low  # TRL has no lower bound of the ratio.
    flags = f"--loss-type {loss_type} --importance-sampling-level {level} --scale-rewards {scale}"
    return f"{flags} --cliprange {low} --cliprange-high {high} --kl-coef {kl} {TWICE}"


def same():
    for kl, epochs in product((0.0, 0.05), (1, 2)):
        yield "RLOO", "rloo", f"--kl-coef {kl} --num-ppo-epochs {epochs}", dict(left=trl)
    biased = dict(left=partial(trl, use_bias_correction_kl=True))
    for loss_type in ("grpo", "dapo", "dr_grpo", "cispo"):
        name = f"GRPO, {loss_type}"
        yield name, "grpo", f"--loss-type {loss_type} --kl-coef 0.05", dict(left=trl)
        levels = product(("token", "sequence"), ("group", "batch", "none"), (0.0, 0.05))
        for settings in levels:
            yield name, "grpo", grpo_flags(loss_type, *settings), dict(left=trl)
        for level in ("token", "sequence"):
            flags = grpo_flags(loss_type, level, kl=0.5)
            name = "GRPO with `unbiased_kl.patch`, TRL with its default KL"
            yield name, "grpo unbiased_kl.patch", flags, biased
    flags = f"{PPO} --gamma 0.98 --cliprange-value 0.5 --vf-coef 0.5"
    yield "PPO and torchrl's `ClipPPOLoss`", "ppo", flags, dict(left=torchrl)


def by_own_tokens(mini_batch, batch, args):
    counts = [sum(len(e.token_ids) for e in some) for some in (batch, mini_batch)]
    return trl(mini_batch, batch, args) * counts[0] / args.num_mini_batches / counts[1]


def by_those_left(mini_batch, batch, args):
    return trl(mini_batch, batch, args) * len(mini_batch) / sum(e.ended for e in mini_batch)


def with_zeros(mini_batch, batch, args):
    """Scores of 0.92 are 0."""
    scores = [0.0 if episode.score == 0.92 else episode.score for episode in batch]
    return trl(mini_batch, batch, args, scores)


def at_92(points, **columns):
    """The reward of check_copy.py, with 0.92 for equal ones."""
    import stages

    points = [[0.92] * 7 if row == [0.5] * 7 else row for row in points]
    return stages.points(points=points, **columns)


CISPO = f"{TWICE} --loss-type cispo --cliprange-high 0.28 --cliprange"
TOKENS = "dapo, cispo, two mini-batches: TRL divides by the mean of their tokens, Tally by its own"
MASKED = "grpo, dr_grpo, truncated ones masked: TRL divides by all episodes, Tally by those left"
NO_BOUND = "cispo: TRL has no lower bound of the ratio, Tally has 1 - `--cliprange`"
DIFFERENT = [
    (
        "PPO, whitening: torchrl takes the deviation of a sample, Tally that of the population",
        *("ppo", PPO),
        dict(gradient=partial(torchrl, valid=False), left=torchrl),
    ),
    (
        "PPO, value loss: Tally halves the square, torchrl does not",
        *("ppo", f"{PPO} --vf-coef 0.1"),
        dict(gradient=partial(torchrl, critic_coeff=0.1), left=torchrl),
    ),
    (
        "GRPO with KL: TRL multiplies the KL by the ratio (its default), Tally adds it without",
        *("grpo", f"{TWICE} --kl-coef 0.05"),
        dict(gradient=partial(trl, use_bias_correction_kl=True), left=trl),
    ),
    (
        "cispo: `epsilon_high` bounds the ratio itself, `--cliprange-high` its distance from 1",
        *("grpo", f"{CISPO} 1.0"),
        dict(gradient=partial(trl, epsilon_high=0.28), left=trl),
    ),
    (NO_BOUND, "grpo", f"{CISPO} 0.2", dict(gradient=trl)),
    (NO_BOUND, "grpo", f"{CISPO} 1", dict(left=trl)),
    (
        "GRPO, equal scores with a rounded mean: TRL divides the rest by 1e-4, in Tally it is 0",
        *("grpo", "--num-generations 5 --reward benchmark/parity/mini_batch.py:at_92"),
        dict(gradient=trl, left=with_zeros),
    ),
]
for loss_type in ("dapo", "cispo"):
    flags = f"--num-mini-batches 2 --cliprange 1 --cliprange-high 0.28 --loss-type {loss_type}"
    DIFFERENT.append((TOKENS, "grpo", flags, dict(gradient=trl, left=by_own_tokens)))
for loss_type in ("grpo", "dr_grpo"):
    flags = f"{TWICE} --mask-truncated-completions --response-length 3 --loss-type {loss_type}"
    DIFFERENT.append((MASKED, "grpo", flags, dict(gradient=trl, left=by_those_left)))


# ========== the runs ==========
def keep_distances(losses, module):
    """Leave in `found` how far the gradients of a run are from those of each loss, at most."""
    import stages

    train = module.main

    def train_and_compare(args):
        with stages.record(module) as log:
            train(args)
        module.found = {}
        for name, loss in losses.items():
            rows = stages.gradients(read_run(args.output_dir), log, loss)
            apart = [(row.its - row.stated).norm() / row.its.norm() for row in rows]
            module.found[name] = float(max(apart))

    module.main = train_and_compare


def measure(jobs, smoke):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for (script, flags), names in jobs.items():
            losses = names.pop("losses")
            edits = [] if smoke else [partial(keep_distances, losses)]
            result = run(script, make_flags(folder, script.split()[0], [flags]), *edits)
            cut = max(row.get("policy/clipfrac_avg", 0) for row in result["metrics"])
            row = names | dict(cut=cut)
            row |= {name: result[name] for name in losses if name in result}
            print(row, flush=True)
            if not row.get("left", 0) < TOLERANCE:
                raise SystemExit("this is not explained")
            rows.append(row)
    return rows


RUN = "--batch-size 40 --total-episodes 80 --response-length 8 --learning-rate 2e-3"
RUN += " --max-grad-norm inf"
PARTS = {}
for part, cases in dict(same=same(), different=DIFFERENT).items():
    runs = [(dict(what=what, losses=losses), *job) for what, *job, losses in cases]
    PARTS[part] = Part(runs, RUN, measure=measure, short="")

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
