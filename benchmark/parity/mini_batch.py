"""Loss and gradient of one rollout, computed by Tally's scripts, by TRL's trainers, and for PPO by
torchrl.

    python benchmark/parity/mini_batch.py

It runs in the environment of trl_trainer.py. TRL and torchrl make each update at the weights at
which Tally made it. Otherwise rounding would grow to whole steps, because Adam divides a gradient
by its size.

The gradient is that before clipping. The measure is |ours - theirs| / |ours|, or |ours - theirs|
for a loss nearer to 0 than 0.01. `cut` is the share of ratios where the clip changes the loss
(cispo: the ratio). Writes mini_batch.json, a line for each update. The program stops at an
unexplained difference above 1e-5. In a smoke run Tally alone makes updates.
"""

import random
import tempfile
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import trl_trainer  # first: it makes the modules below importable
import tyro
from run import Part, column, import_script, main, run, write_rows
from torch.nn.utils import parameters_to_vector, vector_to_parameters

RESULT = Path(__file__).with_suffix(".json")
TOLERANCE = 1e-5
EPISODES = 24
# measure() replaces WORLD by a folder with random models.
COMMON = (
    "--model-path WORLD/policy --ref-model-path WORLD/reference --dataset WORLD/prompts.jsonl "
    "--save-rollouts "
    f"--batch-size {EPISODES} --total-episodes {EPISODES} --per-device-train-batch-size {EPISODES} "
    "--response-length 10 --learning-rate 2e-3 --lr-scheduler-type constant "
    "--reward benchmark/parity/mini_batch.py:score"
)


# ========== the world of the rollout ==========
def score(prompts, completions, of_equals=0.5, **_):
    """Differs between the completions of a prompt, but for prompts of three characters: theirs are
    of one score."""
    texts = [completion.replace("<pad>", "") for completion in completions]  # TRL hides it
    own = [len(set(text)) + 0.3 * text.count("1") for text in texts]
    return [of_equals if len(prompt) == 3 else value for prompt, value in zip(prompts, own)]


def equal_at_87(**columns):
    return score(**columns, of_equals=0.87)


def equal_at_zero(**columns):
    return score(**columns, of_equals=0.0)


def none_of_seven(prompts, completions, **_):
    """None for completions with a 7, and for one whole group. In another group a single completion
    has a score."""
    scores = score(prompts, completions)
    for i, (prompt, completion) in enumerate(zip(prompts, completions)):
        if "7" in completion or prompt.startswith("="):
            scores[i] = None
    return scores


def make_world(folder):
    """Prompts of 1 to 9 characters, and random models, sharp enough that a wrong position or mask
    shows. Three tokens end an episode."""
    import transformers

    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789+-=", k=length)) for length in (1, 3, 9, 4, 3, 7)]
    write_rows(folder / "prompts.jsonl", [dict(prompt=prompt) for prompt in prompts])
    tokenizer = transformers.AutoTokenizer.from_pretrained(trl_trainer.POLICY)
    llama = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    for name, seed, kind, shape in (
        ("policy", 1, "LlamaForCausalLM", llama),
        ("reference", 2, "LlamaForCausalLM", llama),
        ("value", 3, "LlamaForSequenceClassification", llama | dict(num_labels=1)),
        ("gpt2", 1, "GPT2LMHeadModel", dict(n_embd=32, n_layer=2, n_head=2, n_positions=64)),
    ):
        model_class = getattr(transformers, kind)
        ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        shape |= ids | dict(bos_token_id=None, vocab_size=len(tokenizer), initializer_range=0.2)
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**shape))
        if model.can_generate():
            ends = [tokenizer.eos_token_id, *tokenizer.encode("0+")]
            model.generation_config.eos_token_id = ends
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


# ========== updates of the programs ==========
def kept_updates(updates):
    """A patch, with which a list gets the gradient and the weights of every optimizer step, before
    the gradient is clipped."""
    from accelerate import Accelerator

    clip = Accelerator.clip_grad_norm_

    def vector(tensors):
        return parameters_to_vector(tensors).detach().double().numpy()

    def keep_and_clip(self, parameters, *settings):
        parameters = list(parameters)
        gradient = vector(p.grad for p in parameters)
        updates.append(SimpleNamespace(gradient=gradient, weights=vector(parameters)))
        return clip(self, parameters, *settings)

    return patch.object(Accelerator, "clip_grad_norm_", keep_and_clip)


def keep(module):
    """Let a script return its updates, with the metrics of each."""
    updates = []
    kept_updates(updates).start()
    mean_metrics = module.mean_metrics

    def keep_metrics(rows):
        if "loss/policy_avg" in rows[0]:
            for update, row in zip(updates, rows, strict=True):
                update.loss = float(row["loss/policy_avg"])
                update.cut = float(row["policy/clipfrac_avg"])
                update.value_loss = float(row.get("loss/value_avg", 0))
        return mean_metrics(rows)

    module.mean_metrics = keep_metrics
    module.found = dict(updates=updates)


def run_tally(world, script, flags, *edits):
    """One iteration of a script: args, rollout, and of each update gradient, weights, loss and
    clipped share."""
    flags = flags.replace("WORLD", str(world))
    module = import_script(script.split()[0])
    result = run(script, flags, *edits, keep)
    return SimpleNamespace(
        script=script,
        module=module,
        args=tyro.cli(module.Args, args=flags.split()),
        rollout=result["rollouts"],
        updates=result["updates"],
    )


def settings_like(script, args):
    """TRL's settings that mean the same as a script's flags."""
    chosen = dict(
        beta=args.kl_coef,
        epsilon=args.cliprange,
        num_iterations=args.num_ppo_epochs,
        temperature=args.temperature,
        num_generations=args.k,
        max_completion_length=args.response_length,
    )
    if script == "rloo":
        return chosen
    epsilon_high = args.cliprange_high
    if args.loss_type == "cispo":  # the bound of the ratio, not of its distance from 1
        epsilon_high = 1 + (args.cliprange if epsilon_high is None else epsilon_high)
    return chosen | dict(
        loss_type=args.loss_type,
        scale_rewards=args.scale_rewards,
        importance_sampling_level=args.importance_sampling_level,
        mask_truncated_completions=args.mask_truncated_completions,
        epsilon_high=epsilon_high,
        use_bias_correction_kl="unbiased_kl" in script,
    )


def load_weights(update, model):
    vector_to_parameters(torch.from_numpy(update.weights).float(), model.parameters())


def run_trl(tally, world, reward=None, positions=False, **changes):
    """TRL's updates on Tally's rollout, each at Tally's weights: of each gradient and loss.

    reward: another than Tally's; positions: give the model position ids made from the mask;
    changes: of `settings_like`
    """
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl.trainer import grpo_trainer, rloo_trainer

    args, rollout = tally.args, tally.rollout
    algorithm = tally.script.split()[0]
    passes = EPISODES // args.per_device_train_batch_size
    micro_batches = passes // args.num_mini_batches  # of an update
    order = torch.cat(tally.module.draw_mini_batches(args, 1, 0, EPISODES))

    class TallyWeights(TrainerCallback):
        def on_step_begin(self, _, state, control, model, **inputs):
            load_weights(tally.updates[state.global_step], model)

    def permuted(columns):  # what TRL's rollout is made of, in Tally's order of the episodes
        for name, values in columns.items():
            if isinstance(values, torch.Tensor) and values.dim():
                columns[name] = values[order]
        return columns

    chosen = dict(
        batch=args.per_device_train_batch_size,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=passes,
        max_steps=len(tally.updates),
        shuffle_dataset=False,
        rows=[{"prompt": row["prompt"]} for row in rollout[:: args.k]],
        model=args.model_path,
        callbacks=[TallyWeights()],
        given=[[row["token_ids"] for row in rollout]],
        reward=reward or globals()[args.reward.split(":")[1]],
    )
    chosen |= settings_like(tally.script, args) | changes
    file = dict(rloo=rloo_trainer, grpo=grpo_trainer)[algorithm]
    losses = []
    updates = []
    trainer = trl_trainer.make_trainer(algorithm, folder=world / "trl", **chosen)
    if args.kl_coef:
        reference = AutoModelForCausalLM.from_pretrained(args.ref_model_path)
        trainer.ref_model.load_state_dict(reference.state_dict())
    forward, training_step = trainer.model.forward, trainer.training_step

    def forward_with_positions(**inputs):
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return forward(position_ids=positions, **inputs)

    def step(*inputs):
        losses.append(training_step(*inputs))
        return losses[-1]

    trainer.training_step = step
    if positions:
        trainer.model.forward = forward_with_positions
    file = dict(rloo=rloo_trainer, grpo=grpo_trainer)[algorithm]
    with kept_updates(updates), patch.object(file, "shuffle_sequence_dict", permuted):
        trainer.train()
    for i, update in enumerate(updates):
        update.loss = float(sum(losses[i * micro_batches : (i + 1) * micro_batches]))
    return updates


def distance(ours, theirs):
    """Norm of the difference, relative to the norm of the first."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours))


def difference(ours, theirs, factor=1.0):
    """Of loss and gradient, see above. factor: theirs are multiplied by it"""
    loss = abs(ours.loss - theirs.loss * factor)
    if abs(ours.loss) > 0.01:
        loss /= abs(ours.loss)
    return dict(loss=loss, gradient=distance(ours.gradient, theirs.gradient * factor))


# ========== RLOO and GRPO ==========
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "cispo")
LEVELS = ("token", "sequence")
SCALES = ("group", "batch", "none")
TWICE = "--num-ppo-epochs 2"
NONE = "RLOO and GRPO with a reward that returns None"
NO_SCORE = f"{TWICE} --reward benchmark/parity/mini_batch.py:none_of_seven"
PIECES = "RLOO and GRPO in four micro-batches"
UNBIASED = "GRPO with `unbiased_kl.patch`, TRL with its default KL"


def grpo_flags(loss_type, level, scale="group", kl=0.05):
    """cispo: --cliprange 1 takes Tally's lower bound away, which TRL has not."""
    low, high = dict(token=(0.2, 0.28), sequence=(0.05, 0.07))[level]
    if loss_type == "cispo":
        low = 1.0
    flags = f"--loss-type {loss_type} --importance-sampling-level {level} --scale-rewards {scale}"
    return f"{flags} --cliprange {low} --cliprange-high {high} --kl-coef {kl}"


def same_runs():
    """Runs of Tally's whose settings in TRL mean the same."""
    runs = []

    def add(what, script, flags):
        runs.append((dict(what=what), script, flags))

    for kl in ("--kl-coef 0.0", "--kl-coef 0.05"):
        add("RLOO", "rloo", kl)
        add("RLOO", "rloo", f"{kl} {TWICE}")
    add("RLOO", "rloo", f"--kl-coef 0.05 --temperature 0.7 {TWICE}")
    for loss_type in LOSS_TYPES:
        add(f"GRPO, {loss_type}", "grpo", f"--loss-type {loss_type} --kl-coef 0.05")
        for settings in product(LEVELS, SCALES, (0.0, 0.05)):
            add(f"GRPO, {loss_type}", "grpo", f"{grpo_flags(loss_type, *settings)} {TWICE}")
    for kl in (0.0, 0.05):
        add(NONE, "rloo", f"--kl-coef {kl} {NO_SCORE}")
    for loss_type, scale in product(LOSS_TYPES, SCALES):
        add(NONE, "grpo", f"{grpo_flags(loss_type, 'token', scale)} {NO_SCORE}")
    small = "--kl-coef 0.05 --per-device-train-batch-size 6"
    add(PIECES, "rloo", small)
    for loss_type in LOSS_TYPES:
        add(PIECES, "grpo", f"--loss-type {loss_type} {small}")
    for settings in product(LOSS_TYPES, LEVELS):
        add(UNBIASED, "grpo unbiased_kl.patch", f"{grpo_flags(*settings, kl=0.5)} {TWICE}")
    return runs


def compare_same(world, job, names):
    """Both programs with the same settings: a row for each update."""
    tally = run_tally(world, *job)
    rows = []
    for ours, theirs in zip(tally.updates, run_trl(tally, world), strict=True):
        rows.append(names | dict(update=len(rows) + 1, cut=ours.cut) | difference(ours, theirs))
    return rows


def masked_factor(tally, _):
    """Episodes for one that ended."""
    return EPISODES / sum(column(tally.rollout, "ended"))


def mini_batch_factor(tally, number):
    """The mean number of a mini-batch's tokens, for one of this mini-batch."""
    lengths = torch.tensor([len(row["token_ids"]) for row in tally.rollout])
    mini_batches = tally.module.draw_mini_batches(tally.args, 1, 0, EPISODES)
    return float(lengths.sum() / len(mini_batches) / lengths[mini_batches[number]].sum())


def whiten(rloo):
    """Divide advantages by the deviation of the batch."""
    compute = rloo.rloo_advantages

    def rloo_advantages(*inputs):
        advantages = compute(*inputs)  # Their mean is 0.
        return advantages * torch.rsqrt(advantages.square().mean() + 1e-8)

    rloo.rloo_advantages = rloo_advantages


def whitening_factor(tally, _):
    """TRL's deviation + 1e-4, for one of Tally's."""
    scores = torch.tensor(column(tally.rollout, "score"))[:, None]
    advantages = tally.module.rloo_advantages(scores, tally.args.k)
    return float((advantages.std() + 1e-4) * torch.rsqrt(advantages.var(correction=0) + 1e-8))


@dataclass
class Difference:
    """Where the programs mean different things, and what takes the difference away."""

    what: str
    undone_by: str
    script: str
    flags: list[str]  # of Tally
    edits: tuple = ()  # functions that change Tally's script
    theirs: dict = field(default_factory=dict)  # what TRL gets besides `settings_like` them
    undone_flags: str = ""  # other flags for Tally
    undone_theirs: dict = field(default_factory=dict)  # other settings for TRL
    factor: object = lambda *_: 1.0  # for TRL's loss and gradient


CISPO_TWICE = f"{TWICE} --loss-type cispo --cliprange-high 0.28"
TWO = f"--num-mini-batches 2 --per-device-train-batch-size {EPISODES // 2}"
TWO += " --cliprange 1.0 --cliprange-high 0.28"
MASKED = f"{TWICE} --mask-truncated-completions"
DIFFERENCES = [
    Difference(
        "GRPO with KL: TRL multiplies the KL by the ratio (its default), Tally adds it without",
        "`use_bias_correction_kl=False`",
        "grpo",
        [f"{TWICE} --kl-coef 0.05"],
        theirs=dict(use_bias_correction_kl=True),
    ),
    Difference(
        "cispo: `epsilon_high` bounds the ratio itself, `--cliprange-high` its distance from 1",
        "`epsilon_high` = 1 + `--cliprange-high`",
        "grpo",
        [f"{CISPO_TWICE} --cliprange 1.0"],
        theirs=dict(epsilon_high=0.28),
    ),
    Difference(
        "cispo: TRL has no lower bound of the ratio, Tally has 1 - `--cliprange`",
        "`--cliprange 1`",
        "grpo",
        [f"{CISPO_TWICE} --cliprange 0.2"],
        undone_flags="--cliprange 1",
    ),
    Difference(
        "dapo, cispo, two mini-batches: TRL divides by the mean of their tokens, Tally by its own",
        "times mean tokens / its tokens",
        "grpo",
        [f"{TWO} --loss-type {loss_type}" for loss_type in ("dapo", "cispo")],
        factor=mini_batch_factor,
    ),
    Difference(
        "grpo, dr_grpo, truncated ones masked: TRL divides by all episodes, Tally by those left",
        "times episodes / those left",
        "grpo",
        [f"{MASKED} --loss-type {loss_type}" for loss_type in ("grpo", "dr_grpo")],
        factor=masked_factor,
    ),
    Difference(
        "RLOO, whitened: TRL divides by a sample's deviation + 1e-4, Tally by the population's",
        "times the quotient of the two",
        "rloo",
        [f"{TWICE} --kl-coef 0.0"],
        edits=(whiten,),
        theirs=dict(normalize_advantages=True),
        undone_theirs=dict(normalize_advantages=True),
        factor=whitening_factor,
    ),
    Difference(
        "GRPO, equal scores with a rounded mean: TRL divides the rest by 1e-4, in Tally it is 0",
        "scores of 0 for 0.87",
        "grpo",
        ["--num-generations 3 --reward benchmark/parity/mini_batch.py:equal_at_87"],
        undone_theirs=dict(reward=equal_at_zero),
    ),
    Difference(
        "absolute positions (GPT-2): TRL counts the padding of shorter prompts, Tally does not",
        "position ids from the mask",
        "rloo",
        ["--model-path WORLD/gpt2 --kl-coef 0.0"],
        undone_theirs=dict(positions=True),
    ),
]


def different_runs():
    runs = []
    for case in DIFFERENCES:
        names = dict(what=case.what, undone_by=case.undone_by)
        runs += [(names, case.script, flags, *case.edits) for flags in case.flags]
    return runs


def compare_different(world, job, names):
    """Both programs, as they are and with the difference undone: a row for each update."""
    case = next(case for case in DIFFERENCES if case.what == names["what"])
    script, flags, *edits = job
    tally = run_tally(world, *job)
    undone = run_tally(world, script, f"{flags} {case.undone_flags}", *edits)
    as_is = run_trl(tally, world, **case.theirs)
    corrected = run_trl(undone, world, **case.undone_theirs)
    rows = []
    for i, update in enumerate(tally.updates):
        row = names | dict(update=i + 1) | difference(update, as_is[i])
        left = difference(undone.updates[i], corrected[i], case.factor(tally, i))
        rows.append(row | {f"undone_{name}": x for name, x in left.items()})
    return rows


# ========== PPO ==========
class Rows(torch.nn.Module):
    """A model's outputs [tokens, outputs] for completion tokens, from rows without padding."""

    def __init__(self, model, tokenizer, rollout):
        super().__init__()
        self.model = model
        self.rows = [(tokenizer.encode(row["prompt"]), row["token_ids"]) for row in rollout]

    def forward(self, index):
        found = []
        for prompt, completion in self.rows:
            logits = self.model(torch.tensor([prompt + completion])).logits
            # the position before each completion token
            found.append(logits[0, len(prompt) - 1 : -1])
        return torch.cat(found)[index]


def tokens_of(rollout, name):
    """A column of lists, one after the other, [tokens]."""
    return torch.cat([torch.tensor(row[name]) for row in rollout])


def torchrl_columns(rollout, args):
    """The rollout as torchrl's losses read it, a row for each token, with torchrl's GAE of Tally's
    log-probabilities, values and scores. `shifted_valid`: all tokens count"""
    from tensordict import TensorDict
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    names = ("values", "logprobs", "ref_logprobs")
    values, logprobs, ref_logprobs = (tokens_of(rollout, name)[:, None] for name in names)
    ends = torch.tensor([len(row["token_ids"]) for row in rollout]).cumsum(0) - 1
    rewards = -args.kl_coef * (logprobs - ref_logprobs)
    rewards[ends, 0] += torch.tensor([row["score"] for row in rollout])
    done = torch.zeros_like(values).bool()
    done[ends] = True
    next_values = torch.cat([values[1:], torch.zeros(1, 1)])
    advantages, returns = generalized_advantage_estimate(
        args.gamma, args.lam, values, next_values, rewards, done
    )
    columns = dict(
        advantage=advantages,
        value_target=returns,
        state_value=values,
        action=tokens_of(rollout, "token_ids"),
        action_log_prob=logprobs[:, 0],
        index=torch.arange(len(values)),
        shifted_valid=torch.ones(len(values), dtype=torch.bool),
    )
    return TensorDict(columns, batch_size=[len(values)])


def torchrl_objective(tally, update, **settings):
    """torchrl's clipped loss of the policy and value model at the weights of an update, in the
    order of the parameters. critic_coeff: half of vf_coef, as torchrl has no 1/2 before the
    square"""
    from tensordict.nn import TensorDictModule
    from torchrl.modules import ProbabilisticActor
    from torchrl.objectives import ClipPPOLoss
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

    args = tally.args
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    policy = AutoModelForCausalLM.from_pretrained(args.model_path)
    value = AutoModelForTokenClassification.from_pretrained(args.model_path, num_labels=1)
    load_weights(update, torch.nn.ModuleList([policy, value]))
    logits, values = (
        TensorDictModule(
            Rows(model, tokenizer, tally.rollout), in_keys=["index"], out_keys=[output]
        )
        for model, output in ((policy, "logits"), (value, "state_value"))
    )
    actor = ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=torch.distributions.Categorical
    )
    chosen = dict(
        clip_epsilon=args.cliprange,
        clip_value=args.cliprange_value,
        critic_coeff=args.vf_coef / 2,
        normalize_advantage=True,
        entropy_bonus=False,
        loss_critic_type="l2",
        functional=False,
    )
    return ClipPPOLoss(actor, values, **chosen | settings)


def ppo_difference(tally, update, columns, **settings):
    """Of losses and gradient of an update, by ppo.py and by torchrl at the same weights; and what
    torchrl clipped."""
    objective = torchrl_objective(tally, update, **settings)
    losses = objective(columns)
    (losses["loss_objective"] + losses["loss_critic"]).backward()
    found = {name: float(loss) for name, loss in losses.detach().items()}
    gradient = parameters_to_vector(parameter.grad for parameter in objective.parameters())
    theirs = SimpleNamespace(loss=found["loss_objective"], gradient=gradient.double().numpy())
    value = tally.args.vf_coef * update.value_loss
    row = dict(cut=found["clip_fraction"]) | difference(update, theirs)
    return row | dict(value_loss=abs(value - found["loss_critic"]) / value)


def compare_ppo(world, job, names):
    """Both updates of a run, by ppo.py and by torchrl with its own GAE and whitening, and two
    differences."""
    tally = run_tally(world, *job)
    columns = torchrl_columns(tally.rollout, tally.args)
    rows = []
    for update in tally.updates:
        row = names | dict(update=len(rows) + 1)
        rows.append(row | ppo_difference(tally, update, columns))
    as_is = ppo_difference(tally, update, columns, critic_coeff=tally.args.vf_coef)
    whiten = torchrl_objective(tally, update)._maybe_normalize_advantage
    of_sample = columns.exclude("shifted_valid")
    theirs = whiten(of_sample["advantage"], of_sample, update_norm=False)[:, 0].numpy()
    ours = tokens_of(tally.rollout, "advantage").numpy()
    n = len(ours)
    whitening = dict(
        what="PPO, whitening: torchrl takes the deviation of a sample, Tally that of the"
        " population",
        undone_by="times ((n - 1) / n) ** -0.5",
        value=distance(ours, theirs),
        undone_value=distance(ours, theirs * (n / (n - 1)) ** 0.5),
    )
    value_loss = dict(
        what="PPO, value loss: Tally halves the square, torchrl does not",
        undone_by="`critic_coeff` = `vf_coef` / 2",
        gradient=as_is["gradient"],
        undone_gradient=rows[-1]["gradient"],
    )
    return [*rows, whitening, value_loss]


# ========== result ==========
def measure(compare, jobs, smoke):
    """The rows of compare(world, job, names). In a smoke run Tally alone makes updates."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as world:
        world = Path(world)
        make_world(world)
        for job, names in jobs.items():
            if smoke:
                run_tally(world, *job)
            else:
                rows += compare(world, job, names)
    for row in rows:
        prefix = "undone_" if "undone_by" in row else ""
        for name in ("loss", "gradient", "value_loss", "value"):
            if row.get(prefix + name, 0) >= TOLERANCE:
                raise SystemExit(f"not explained: {row}")
    return rows


FLAGS = "--value-model-path WORLD/value --kl-coef 0.05 --num-ppo-epochs 2 --gamma 0.98"
FLAGS += " --cliprange-value 0.5 --vf-coef 0.5"
PPO_RUN = (dict(what="PPO and torchrl's `ClipPPOLoss`"), "ppo", FLAGS)


PARTS = {}
for name, runs, compare in (
    ("same", same_runs(), compare_same),
    ("ppo", [PPO_RUN], compare_ppo),
    ("different", different_runs(), compare_different),
):
    PARTS[name] = Part(runs, COMMON, measure=partial(measure, compare), short="")

if __name__ == "__main__":
    main(__doc__, RESULT, PARTS)
