"""Loss and gradient of one rollout, computed by Tally's scripts, by TRL's trainers, and for PPO by torchrl.

    OMP_NUM_THREADS=1 python benchmark/parity/mini_batch.py           # nine minutes on one core

It runs in the environment of trl_trainer.py. A tiny random model samples 24 completions of 1 to 10 tokens for prompts
of 1 to 9. Then `main` of the script trains on them, once or twice. TRL's trainer runs on the same episodes, with the
same reward function. Only its `_generate_single_turn` is replaced: it returns Tally's completions. torchrl's functions
get Tally's log-probabilities, values and scores. TRL and torchrl make each update at the weights at which Tally made
it. Otherwise rounding would grow to whole steps, because Adam divides a gradient by its size.

Two things are compared: the loss, and the gradient of all parameters before it is clipped. The measure is the norm of
the difference by the norm of ours, |ours - theirs| / |ours|. For a loss nearer to 0 than 0.01 it is |ours - theirs|.
A run makes one update, in which the ratio is 1, or two updates on the same rollout, and the second one is clipped.
`cut` is the share of ratios where the clip changes the loss (cispo: the ratio). In some cases flags of one name mean
different things, or no setting makes both the same. Then the row shows the difference as it is, with its name (`what`).
It is measured again after the change in `undone_by`. TRL's default KL is compared with grpo.py after
`unbiased_kl.patch` of benchmark/variants (`patch`).

Writes mini_batch.json, a line for each case. The exit status is 1 if an unexplained difference above 1e-5 is left.
"""

import contextlib
import functools
import importlib
import io
import itertools
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import transformers
import trl_trainer  # first: it makes the modules below importable
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from run import read_run, write_lines
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.trainer import grpo_trainer, rloo_trainer

import grpo
import ppo
import rloo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SCRIPTS = dict(rloo=rloo, grpo=grpo, ppo=ppo)
TRL_FILES = dict(rloo=rloo_trainer, grpo=grpo_trainer)
TOLERANCE = 1e-5
EPISODES, RESPONSE_LENGTH = 24, 10


# ========================================= the world of the rollout ==========================================
def score(prompts: list, completions: list, of_equals: float = 0.5, **_) -> list[float]:
    """Differs between the completions of a prompt, but for prompts of three characters: theirs are of one score."""
    own = [len(set(completion)) + 0.3 * completion.count("1") for completion in completions]
    return [of_equals if len(prompt) == 3 else value for prompt, value in zip(prompts, own)]


def equal_at_87(**columns) -> list[float]:
    return score(**columns, of_equals=0.87)


def equal_at_zero(**columns) -> list[float]:
    return score(**columns, of_equals=0.0)


def none_of_seven(prompts: list, completions: list, **_) -> list:
    """None for completions with a 7, and for one whole group. In another group a single completion has a score."""
    scores = score(prompts, completions)
    return [None if "7" in c or p.startswith("=") else s for p, c, s in zip(prompts, completions, scores)]


def none_of_long(prompts: list, completions: list, **_) -> list:
    """None for completions of more than four characters."""
    return [None if len(completion) > 4 else float(len(completion)) for completion in completions]


def two_parts(**columns) -> dict[str, list]:
    """Many completions have one part, and some have none. TRL gets the two functions."""
    return {"seven": none_of_seven(**columns), "long": none_of_long(**columns)}


TRL_REWARDS = {"two_parts": [none_of_seven, none_of_long]}


LLAMA = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
GPT2 = dict(n_embd=32, n_layer=2, n_head=2, n_positions=64)


def save_model(folder: Path, seed: int, auto_class=AutoModelForCausalLM, family="Llama", **shape) -> str:
    """A random model with the embedded policy's tokenizer, sharp enough that a wrong position or mask shows; three
    tokens end an episode."""
    tokenizer = AutoTokenizer.from_pretrained(trl_trainer.POLICY)
    special = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")
    model = auto_class.from_config(config(vocab_size=len(tokenizer), initializer_range=0.2, **special, **shape))
    if auto_class is AutoModelForCausalLM:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.encode("0+")]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_world(folder: Path) -> SimpleNamespace:
    """Paths of the models and of the prompts, which are of 1 to 9 characters."""
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789+-=", k=length)) for length in (1, 3, 9, 4, 3, 7)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    classifier = dict(auto_class=AutoModelForSequenceClassification, num_labels=1)
    return SimpleNamespace(
        folder=folder,
        dataset=str(folder / "prompts.jsonl"),
        policy=save_model(folder / "policy", seed=1, **LLAMA),
        reference=save_model(folder / "reference", seed=2, **LLAMA),
        value=save_model(folder / "value", seed=3, **classifier, **LLAMA),
        gpt2=save_model(folder / "gpt2", seed=1, family="GPT2", **GPT2),
    )


# ========================================= updates of the programs ===========================================
def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


@contextlib.contextmanager
def kept_updates():
    """A list that gets the gradient and the weights of every optimizer step, before the gradient is clipped."""
    updates, clip = [], Accelerator.clip_grad_norm_

    def keep_and_clip(self, parameters, *settings):
        parameters = list(parameters)
        weights = [p.detach().clone() for p in parameters]
        updates.append(SimpleNamespace(gradient=flat(p.grad for p in parameters), weights=weights))
        return clip(self, parameters, *settings)

    with patch.object(Accelerator, "clip_grad_norm_", keep_and_clip):
        yield updates


@contextlib.contextmanager
def quiet_and_fresh():
    """accelerate keeps its state in singletons: begin without that of the run before, and print nothing."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield


def run_tally(world, algorithm: str, **flags) -> SimpleNamespace:
    """`main` of a script, one iteration -> args, rollout, and of each update gradient, weights, loss and metrics."""
    script, metrics = SCRIPTS[algorithm], []
    mean_metrics = script.mean_metrics
    flags = dict(model_path=world.policy, dataset=world.dataset, ref_model_path=world.reference, reward="score") | flags
    flags |= dict(batch_size=EPISODES, total_episodes=EPISODES, response_length=RESPONSE_LENGTH, save_rollouts=True)
    flags |= dict(learning_rate=2e-3, lr_scheduler_type="constant", reward=f"{__name__}:{flags['reward']}")

    def keep(rows):
        metrics.extend(row for row in rows if "loss/policy_avg" in row)
        return mean_metrics(rows)

    with tempfile.TemporaryDirectory(dir=world.folder) as folder:
        args = script.Args(output_dir=f"{folder}/run", **flags)
        with quiet_and_fresh(), kept_updates() as updates, patch.object(script, "mean_metrics", keep):
            script.main(args)
        rollout = read_run(args.output_dir)["rollouts"]
    for update, row in zip(updates, metrics, strict=True):
        update.metrics, update.loss = row, float(row["loss/policy_avg"])
    return SimpleNamespace(args=args, rollout=rollout, updates=updates)


class TallyWeights(TrainerCallback):
    """Each update is made at the weights at which Tally made it."""

    def __init__(self, updates):
        self.updates = updates

    def on_step_begin(self, args, state, control, model, **_):
        with torch.no_grad():
            for parameter, weights in zip(model.parameters(), self.updates[state.global_step].weights, strict=True):
                parameter.copy_(weights)


def settings_like(args) -> dict:
    """TRL's settings that mean the same as a script's flags."""
    chosen = dict(beta=args.kl_coef, epsilon=args.cliprange, num_iterations=args.num_ppo_epochs)
    chosen |= dict(temperature=args.temperature, num_generations=args.k, max_completion_length=args.response_length)
    if isinstance(args, rloo.Args):
        return chosen | dict(normalize_advantages=args.whiten_advantages)
    names = "loss_type scale_rewards importance_sampling_level mask_truncated_completions"
    chosen |= {name: getattr(args, name) for name in names.split()}
    chosen |= dict(epsilon_high=args.cliprange_high, use_bias_correction_kl=False)
    if args.loss_type == "cispo":  # the bound of the ratio, where Tally's flag is what it may exceed 1 by
        chosen["epsilon_high"] = 1 + (args.cliprange if args.cliprange_high is None else args.cliprange_high)
    return chosen


def run_trl(world, algorithm: str, tally, micro_batches: int = 1, reward=None, positions=False, **changes) -> list:
    """TRL's updates on Tally's rollout, each at Tally's weights -> of each gradient and loss.
    micro_batches: of an update; reward: if another; positions: give the model position ids made from the mask, which
    TRL does not; changes: of `settings_like`"""
    args, rollout = tally.args, tally.rollout
    completion_ids, passes = [row["token_ids"] for row in rollout], args.num_mini_batches * micro_batches
    size = dict(batch=EPISODES // passes, gradient_accumulation_steps=micro_batches, steps_per_generation=passes)
    size |= dict(max_steps=len(tally.updates), shuffle_dataset=False)
    order = torch.cat(SCRIPTS[algorithm].draw_mini_batches(args, 1, 0, EPISODES))
    in_order = patch.object(TRL_FILES[algorithm], "shuffle_sequence_dict", lambda columns: permuted(columns, order))
    data = dict(rows=[{"prompt": row["prompt"]} for row in rollout[:: args.k]], model=args.model_path)
    name = args.reward.split(":")[1]
    data["reward"] = reward or TRL_REWARDS.get(name) or globals()[name]
    data["callbacks"] = [TallyWeights(tally.updates)]
    with (
        tempfile.TemporaryDirectory(dir=world.folder) as folder,
        quiet_and_fresh(),
        kept_updates() as updates,
        in_order,
    ):
        trainer = trl_trainer.make_trainer(algorithm, folder=folder, **data, **size, **settings_like(args) | changes)
        if args.kl_coef:
            reference = AutoModelForCausalLM.from_pretrained(args.ref_model_path)
            trainer.ref_model.load_state_dict(reference.state_dict())
        if positions:
            forward = trainer.model.forward
            trainer.model.forward = lambda **inputs: forward(position_ids=positions_of(inputs), **inputs)
        losses, training_step = [], trainer.training_step
        trainer._generate_single_turn = lambda *_: completion_ids if algorithm == "rloo" else (completion_ids, None)
        trainer.training_step = lambda *inputs: losses.append(training_step(*inputs)) or losses[-1]
        trainer.train()
    for i, update in enumerate(updates):
        update.loss = float(sum(losses[i * micro_batches : (i + 1) * micro_batches]))
    return updates


def positions_of(inputs: dict) -> torch.Tensor:
    return (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)


def permuted(columns: dict, order: torch.Tensor) -> dict:
    """What TRL's rollout is made of, in another order of the episodes."""
    return {n: x[order] if isinstance(x, torch.Tensor) and x.dim() else x for n, x in columns.items()}


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference, relative to the norm of the first."""
    return float((ours - theirs).norm() / ours.norm())


def difference(ours, theirs, factor: float = 1.0) -> dict[str, float]:
    """Of loss and gradient, see above. factor: theirs are multiplied by it"""
    loss = abs(ours.loss - theirs.loss * factor) / (abs(ours.loss) if abs(ours.loss) > 0.01 else 1.0)
    return dict(loss=loss, gradient=distance(ours.gradient, theirs.gradient * factor))


# ============================================== RLOO and GRPO ================================================
def same_cases() -> list[dict]:
    """Flags of Tally's whose settings in TRL mean the same; `micro_batches`: of an update, TRL's and Tally's."""
    rloo_kl = [dict(algorithm="rloo", kl_coef=kl_coef) for kl_coef in (0.0, 0.05)]
    cases, loss_types = rloo_kl + [rloo_kl[1] | dict(temperature=0.7)], ("grpo", "dapo", "dr_grpo", "cispo")
    for loss_type, scale, level in itertools.product(loss_types, ("group", "batch", "none"), ("token", "sequence")):
        # cispo: --cliprange 1 takes Tally's lower bound away, which TRL has not
        low, high = (0.2, 0.28) if level == "token" else (0.05, 0.07)
        case = dict(algorithm="grpo", loss_type=loss_type, scale_rewards=scale, importance_sampling_level=level)
        case |= dict(cliprange=1.0 if loss_type == "cispo" else low, cliprange_high=high)
        cases += [case | dict(kl_coef=kl_coef) for kl_coef in (0.0, 0.05)]
    cases += [case | dict(reward=reward) for case in cases_without_scores(cases) for reward in WITHOUT_SCORES]
    cases = [case | dict(num_ppo_epochs=2) for case in cases]
    grpo_kl = [dict(algorithm="grpo", loss_type=loss_type, kl_coef=0.05) for loss_type in loss_types]
    in_pieces = [case | dict(micro_batches=4) for case in (rloo_kl[1], *grpo_kl)]
    return cases + rloo_kl + grpo_kl + in_pieces + unbiased_kl_cases()


def unbiased_kl_cases() -> list[dict]:
    """grpo.py with unbiased_kl.patch. TRL's default KL is the same."""
    cases = []
    for loss_type, level in itertools.product(("grpo", "dapo", "dr_grpo", "cispo"), ("token", "sequence")):
        low, high = (0.2, 0.28) if level == "token" else (0.05, 0.07)
        case = dict(algorithm="grpo", patch="unbiased_kl", loss_type=loss_type, importance_sampling_level=level)
        cases.append(case | dict(cliprange=1.0 if loss_type == "cispo" else low, cliprange_high=high))
    return [case | dict(kl_coef=0.5, num_ppo_epochs=2) for case in cases]


@contextlib.contextmanager
def patched(world, algorithm: str, name: str | None):
    """Inside, a script is a copy of itself with a patch of benchmark/variants. None: the script as it is."""
    if name is None:
        yield
        return
    folder = world.folder / name
    if not folder.exists():
        folder.mkdir()
        shutil.copy(ROOT / f"{algorithm}.py", folder)
        subprocess.run(["git", "apply", ROOT / f"benchmark/variants/{name}.patch"], cwd=folder, check=True)
        (folder / f"{algorithm}.py").rename(folder / f"{algorithm}_with_{name}.py")
        sys.path.append(str(folder))
    module = importlib.import_module(f"{algorithm}_with_{name}")
    with patch.dict(SCRIPTS, {algorithm: module}):
        yield


WITHOUT_SCORES = ("none_of_seven", "two_parts")


def cases_without_scores(cases: list[dict]) -> list[dict]:
    """The cases that are run again with rewards that return None: every advantage, every loss, and with KL."""
    chosen = [case for case in cases if case["algorithm"] == "rloo" and "temperature" not in case]
    for case in cases:
        if case["algorithm"] == "grpo" and case["importance_sampling_level"] == "token":
            is_default = (case["loss_type"], case["scale_rewards"]) == ("grpo", "group")
            chosen += [case] if case["kl_coef"] or is_default else []
    return chosen


def compare_same(world, case: dict) -> list[dict]:
    """Both programs with the same settings -> a row for each update."""
    flags = {"per_device_train_batch_size": EPISODES // case.get("micro_batches", 1)} | case
    algorithm, micro_batches = flags.pop("algorithm"), flags.pop("micro_batches", 1)
    name = flags.pop("patch", None)
    changes = {"use_bias_correction_kl": True} if name == "unbiased_kl" else {}
    with patched(world, algorithm, name):
        tally = run_tally(world, algorithm, **flags)
        theirs = run_trl(world, algorithm, tally, micro_batches, **changes)
    rows = []
    for number, (update, their_update) in enumerate(zip(tally.updates, theirs, strict=True), start=1):
        row = dict(peer="trl") | case | dict(update=number, updates=len(theirs))
        cut = float(update.metrics.get("policy/clipfrac_avg", 0.0))
        rows.append(row | dict(cut=cut) | difference(update, their_update))
    return rows


def masked_factor(tally, _) -> float:
    """Episodes for one that ended."""
    eos_ids = AutoModelForCausalLM.from_pretrained(tally.args.model_path).generation_config.eos_token_id
    return EPISODES / sum(row["token_ids"][-1] in eos_ids for row in tally.rollout)


def mini_batch_factor(tally, number: int) -> float:
    """The mean number of a mini-batch's tokens, for one of this mini-batch."""
    mini_batch = SCRIPTS["grpo"].draw_mini_batches(tally.args, 1, 0, EPISODES)[number].tolist()
    lengths = [len(row["token_ids"]) for row in tally.rollout]
    return sum(lengths) / tally.args.num_mini_batches / sum(lengths[i] for i in mini_batch)


def whitening_factor(tally, _) -> float:
    """TRL's deviation + 1e-4, for one of Tally's.

    Neither counts an episode without a score. TRL also leaves out an episode that alone has a score in its group."""
    groups = torch.tensor([math.nan if row["score"] is None else row["score"] for row in tally.rollout])
    groups = groups.view(-1, tally.args.k)
    has_score = ~groups.isnan()
    others = (has_score.sum(1, keepdim=True) - 1).clamp(min=1)
    advantages = (groups - groups.nanmean(1, keepdim=True)) * (others + 1) / others  # R_i - mean of the others
    theirs = advantages[has_score & (has_score.sum(1, keepdim=True) > 1)].std() + 1e-4
    return float(theirs * torch.rsqrt(advantages[has_score].var(correction=0) + 1e-8))


# flags of Tally's, and what TRL gets besides `settings_like` them; then what takes the difference away: other flags for
# Tally, other settings for TRL, or a factor for TRL's loss and gradient
GRPO_TWICE = dict(algorithm="grpo", num_ppo_epochs=2)
CISPO_TWICE = GRPO_TWICE | dict(loss_type="cispo", cliprange_high=0.28)
DIFFERENCES = [
    dict(
        what="GRPO with KL: TRL multiplies the KL by the ratio (its default), Tally adds it without",
        flags=GRPO_TWICE | dict(kl_coef=0.05),
        theirs=dict(use_bias_correction_kl=True),
        undone_by="`use_bias_correction_kl=False`",
    ),
    dict(
        what="cispo: `epsilon_high` is the upper bound of the ratio, `--cliprange-high` its distance from 1",
        flags=CISPO_TWICE | dict(cliprange=1.0),
        theirs=dict(epsilon_high=0.28),
        undone_by="`epsilon_high` = 1 + `--cliprange-high`",
    ),
    dict(
        what="cispo: TRL has no lower bound of the ratio, Tally has 1 - `--cliprange`",
        flags=CISPO_TWICE | dict(cliprange=0.2),
        undo=dict(flags=dict(cliprange=1.0)),
        undone_by="`--cliprange 1`",
    ),
    *(
        dict(
            what="dapo and cispo, two mini-batches: TRL divides each by their mean number of tokens, Tally by its own",
            flags=dict(algorithm="grpo", loss_type=loss_type, num_mini_batches=2, cliprange=1.0, cliprange_high=0.28),
            undo=dict(factor=mini_batch_factor),
            undone_by="times mean tokens / its tokens",
        )
        for loss_type in ("dapo", "cispo")
    ),
    *(
        dict(
            what="grpo, dr_grpo, truncated completions masked: TRL divides by all episodes, Tally by those included",
            flags=GRPO_TWICE | dict(loss_type=loss_type, mask_truncated_completions=True),
            undo=dict(factor=masked_factor),
            undone_by="times episodes / included",
        )
        for loss_type in ("grpo", "dr_grpo")
    ),
    *(
        dict(
            what="RLOO, whitened: TRL divides by the deviation of a sample, plus 1e-4, Tally by the population's",
            flags=dict(algorithm="rloo", whiten_advantages=True, num_ppo_epochs=2, kl_coef=0.0, reward=reward),
            undo=dict(factor=whitening_factor),
            undone_by="times the quotient of the two",
        )
        for reward in ("score", "none_of_seven")
    ),
    dict(
        what="GRPO, a group of equal scores whose mean is rounded: TRL divides the rest by 1e-4, in Tally it is 0",
        flags=dict(algorithm="grpo", reward="equal_at_87", num_generations=3),
        undo=dict(theirs=dict(reward=equal_at_zero)),
        undone_by="scores of 0 for 0.87",
    ),
    dict(
        what="absolute positions (GPT-2): TRL counts the padding of shorter prompts, Tally does not",
        flags=dict(algorithm="rloo", model="gpt2", kl_coef=0.0),
        undo=dict(theirs=dict(positions=True)),
        undone_by="position ids from the mask",
    ),
]


def compare_different(world, what: str, flags: dict, undone_by: str, theirs={}, undo={}) -> list[dict]:
    """Both programs, as they are and with the difference undone -> a row for each update."""
    flags, rows = dict(flags), []
    algorithm, model = flags.pop("algorithm"), getattr(world, flags.pop("model", "policy"))
    tally = undone = run_tally(world, algorithm, model_path=model, **flags)
    if "flags" in undo:
        undone = run_tally(world, algorithm, model_path=model, **flags | undo["flags"])
    as_is, corrected = (
        run_trl(world, algorithm, tally, **theirs),
        run_trl(world, algorithm, undone, **undo.get("theirs", {})),
    )
    factor = undo.get("factor", lambda *_: 1.0)
    for i, updates in enumerate(zip(tally.updates, as_is, undone.updates, corrected, strict=True)):
        row = dict(peer="trl", algorithm=algorithm, what=what) | flags | dict(update=i + 1, updates=len(as_is))
        left = difference(*updates[2:], factor(tally, i))
        row |= difference(*updates[:2]) | dict(undone_by=undone_by)
        rows.append(row | {f"undone_{name}": x for name, x in left.items()})
    return rows


# =================================================== PPO =====================================================
class Rows(torch.nn.Module):
    """A model's outputs [tokens, outputs] for completion tokens, from rows without padding on the left."""

    def __init__(self, model, head, rollout: list[dict], tokenizer):
        super().__init__()
        self.model, self.head = model, head
        prompt_ids = [tokenizer.encode(row["prompt"]) for row in rollout]
        rows = [torch.tensor(prompt + row["token_ids"]) for prompt, row in zip(prompt_ids, rollout)]
        self.tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        # the position before each completion token
        places = [(i, len(p) + t - 1) for i, p in enumerate(prompt_ids) for t in range(len(rollout[i]["token_ids"]))]
        self.rows, self.places = torch.tensor(places).T

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        outputs = self.model(self.tokens)
        outputs = outputs.logits if self.head is None else self.head(outputs.last_hidden_state)
        return outputs[self.rows, self.places][index]


def tokens_of(rollout: list[dict], name: str) -> torch.Tensor:
    """A column of lists, one after the other, [tokens]."""
    return torch.cat([torch.tensor(row[name]) for row in rollout])


def torchrl_advantages(rollout: list[dict], args) -> tuple[torch.Tensor, torch.Tensor]:
    """torchrl's GAE of Tally's log-probabilities, values and scores -> advantages and returns, [tokens]."""

    def column(name):  # [episodes, time, 1]
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rollout], batch_first=True)[
            ..., None
        ]

    values, lengths = column("values"), torch.tensor([len(row["token_ids"]) for row in rollout])
    rewards, done = -args.kl_coef * (column("logprobs") - column("ref_logprobs")), torch.zeros_like(values).bool()
    last = torch.arange(len(rollout)), lengths - 1, torch.zeros_like(lengths)
    rewards[last] += torch.tensor([row["score"] for row in rollout])
    done[last] = True
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    both = generalized_advantage_estimate(args.gamma, args.lam, values, next_values, rewards, done)
    mask = torch.arange(values.shape[1]) < lengths[:, None]
    return tuple(x[mask].squeeze(-1) for x in both)


def torchrl_columns(rollout: list[dict], args) -> TensorDict:
    """The rollout as torchrl's losses read it, a row for each token; `shifted_valid`: all of them count."""
    advantages, returns = torchrl_advantages(rollout, args)
    columns = dict(index=torch.arange(len(advantages)), action=tokens_of(rollout, "token_ids"))
    columns |= dict(action_log_prob=tokens_of(rollout, "logprobs"), advantage=advantages[:, None])
    columns |= dict(value_target=returns[:, None], state_value=tokens_of(rollout, "values")[:, None])
    columns["shifted_valid"] = torch.ones(len(advantages), dtype=torch.bool)
    return TensorDict(columns, batch_size=[len(advantages)])


def torchrl_objective(tally, weights: list, **settings) -> ClipPPOLoss:
    """torchrl's clipped loss of the policy and value model at these weights, in the order of the parameters.
    critic_coeff: half of vf_coef, as torchrl has no 1/2 before the square"""
    args, rollout = tally.args, tally.rollout
    policy, trunk = (c.from_pretrained(args.model_path) for c in (AutoModelForCausalLM, AutoModel))
    head, tokenizer = torch.nn.Linear(trunk.config.hidden_size, 1), AutoTokenizer.from_pretrained(args.model_path)
    with torch.no_grad():
        for parameter, ours in zip(
            [*policy.parameters(), *trunk.parameters(), *head.parameters()], weights, strict=True
        ):
            parameter.copy_(ours)
    logits = TensorDictModule(Rows(policy, None, rollout, tokenizer), in_keys=["index"], out_keys=["logits"])
    values = TensorDictModule(Rows(trunk, head, rollout, tokenizer), in_keys=["index"], out_keys=["state_value"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=torch.distributions.Categorical)
    chosen = dict(clip_epsilon=args.cliprange, clip_value=args.cliprange_value, critic_coeff=args.vf_coef / 2)
    chosen |= dict(normalize_advantage=True, entropy_bonus=False, loss_critic_type="l2", functional=False)
    return ClipPPOLoss(actor, values, **chosen | settings)


def torchrl_update(objective: ClipPPOLoss, columns: TensorDict) -> SimpleNamespace:
    """Losses and gradient."""
    losses = objective(columns)
    (losses["loss_objective"] + losses["loss_critic"]).backward()
    losses = losses.detach()
    gradient = flat(parameter.grad for parameter in objective.parameters())
    cut = dict(cut=float(losses["clip_fraction"]), value_cut=float(losses["value_clip_fraction"]))
    return SimpleNamespace(
        loss=float(losses["loss_objective"]), value=float(losses["loss_critic"]), gradient=gradient, **cut
    )


def ppo_difference(args, ours, theirs) -> dict[str, float]:
    value = args.vf_coef * float(ours.metrics["loss/value_avg"])
    return difference(ours, theirs) | dict(value_loss=abs(value - theirs.value) / value)


def compare_ppo(world) -> list[dict]:
    """GAE, whitening, and both updates of a run, by ppo.py and by torchrl."""
    flags = dict(kl_coef=0.05, num_ppo_epochs=2, gamma=0.98, cliprange_value=0.5, vf_coef=0.5)
    tally = run_tally(world, "ppo", value_model_path=world.value, **flags)
    columns, case = torchrl_columns(tally.rollout, tally.args), dict(peer="torchrl", algorithm="ppo")
    returns, ours = tokens_of(tally.rollout, "returns"), tokens_of(tally.rollout, "advantage")
    gae = returns - tokens_of(tally.rollout, "values")
    objective = torchrl_objective(tally, tally.updates[0].weights)
    theirs = objective._maybe_normalize_advantage(columns["advantage"], columns, update_norm=False)[:, 0]
    sampled = objective._maybe_normalize_advantage(
        columns["advantage"], columns.exclude("shifted_valid"), update_norm=False
    )
    rows = [case | dict(of="advantages (GAE)", value=distance(gae, columns["advantage"][:, 0]))]
    rows.append(case | dict(of="returns", value=distance(returns, columns["value_target"][:, 0])))
    rows.append(case | dict(of="whitened advantages", value=distance(ours, theirs)))
    n = len(ours)
    named = dict(what="PPO, whitening: torchrl takes the deviation of a sample, Tally that of the population")
    named |= dict(value=distance(ours, sampled[:, 0]), undone_by="times ((n - 1) / n) ** -0.5")
    rows.append(case | named | dict(undone_value=distance(ours, sampled[:, 0] * (n / (n - 1)) ** 0.5)))
    for number, update in enumerate(tally.updates, start=1):
        theirs = torchrl_update(torchrl_objective(tally, update.weights), columns)
        row = case | flags | dict(update=number, updates=2, cut=theirs.cut, value_cut=theirs.value_cut)
        rows.append(row | ppo_difference(tally.args, update, theirs))
    as_is = torchrl_update(torchrl_objective(tally, update.weights, critic_coeff=tally.args.vf_coef), columns)
    named = dict(
        what="PPO, value loss: Tally halves the square, torchrl does not", undone_by="`critic_coeff` = `vf_coef` / 2"
    )
    named |= dict(update=2, updates=2) | ppo_difference(tally.args, update, as_is)
    undone = {f"undone_{name}": x for name, x in ppo_difference(tally.args, update, theirs).items()}
    return rows + [case | named | undone]


# ================================================== result ===================================================
MEASURES = ("loss", "gradient", "value_loss", "value")


def check(row: dict) -> bool:
    """Whether the two agree, of themselves or with the named difference undone."""
    prefix = "undone_" if "undone_by" in row else ""
    return all(row[prefix + name] < TOLERANCE for name in MEASURES if prefix + name in row)


def main():
    transformers.utils.logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        jobs = [functools.partial(compare_same, case=case) for case in same_cases()] + [compare_ppo]
        jobs += [functools.partial(compare_different, **case) for case in DIFFERENCES]
        for job in jobs:
            for row in job(world):
                print("" if check(row) else "NOT EXPLAINED: ", json.dumps(row), flush=True)
                rows.append(row)
    write_lines(HERE / "mini_batch.json", rows)
    unexplained = sum(not check(row) for row in rows)
    same = [max(row[name] for name in MEASURES if name in row) for row in rows if "what" not in row]
    print(f"{len(same)} of the same settings, the furthest {max(same):.1e} apart")
    print(f"{len(rows) - len(same)} of named differences; {unexplained} not explained to {TOLERANCE}")
    sys.exit(unexplained > 0)


if __name__ == "__main__":
    main()
