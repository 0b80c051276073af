"""Judge the run of a copy beside a run of the script that it came from, stage for stage.

`record` notes weights, gradients and steps while the copy runs. Then a `Twin` makes the script's
run. In each stage it gets what the copy had, so a difference stays in the stage where it arises.

    stage          what the twin gets of the copy    what must be equal then
    prompts        the prompts so far                rows, texts and columns
    sampling       weights, prompts                  tokens, their log-probabilities, values, texts,
                                                     ends and entropy
    scores         completions                       scores, with their parts and penalties
    reference      completions                       its log-probabilities
    advantages     scores, log-probabilities,        advantages and returns
                   values
    mini-batches                                     their number, order and episodes
    loss           weights, and all of these         the gradient before it is clipped. It is the
                                                     twin's, or that of a stated loss
    optimizer      weights, gradients, rates         kinds, settings, and the weights after a step
    schedule                                         the rate of each step
    evaluation     weights                           rows, as in prompts, sampling and scores
    result         the last weights                  model/

A metric belongs to the stage that computes it. Only what the script has is compared.
"""

import contextlib
import copy
import inspect
import itertools
import re
import tempfile
import traceback
import typing
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from run import column, difference, grouped, import_script, load_weights, read_run
from torch.nn.utils import parameters_to_vector

# Of gradients and of steps, by their length. Rounding made at most 1.1e-5, and a bonus of 0.01 that
# counts padding 2e-3.
ALLOWED = 1e-4
# Of numbers in rows and metrics.
ALLOWED_OF_NUMBERS = 2e-5

STAGE_OF = {  # of metrics, and of entries of rows
    "prompts": "prompt|columns|episode|epoch",
    "sampling": "(policy|objective)/entropy.*|val/(num_eos|cut_off)_.*|response_length_mean",
    "scores": "score|reward/.*|objective/scores|val/num_unscored|group/.*",
    "reference": "objective/(kl|kl_coef|non_score_reward)",
    "advantages": "advantage|returns",
    "loss": "loss/.*|policy/(approxkl|clipfrac|skipped)_.*|val/(ratio|clipfrac).*",
    "optimizer": "grad_norm",
    "schedule": "lr|step",
    "evaluation": "eval/.*",
}


def points(completions, points, **_):
    """The reward of the small runs. A row has seven points, and a text gets one of them."""
    table = zip(completions, points)
    return [row[sum((i + 3) * ord(x) for i, x in enumerate(text)) % 7] for text, row in table]


class Verdict:
    """What was compared, and what differs."""

    def __init__(self):
        self.compared = Counter()  # how often, by stage
        self.first = {}  # the first difference of a stage
        self.missing = set()  # what the script has, and the copy has not
        self.ended = []  # stages with an exception

    def hold(self, stage, where, found, right, allowed=0.0):
        self.compared[stage] += 1
        if not difference(found, right) <= allowed:
            self.first.setdefault(stage, f"in {where}: {shown(found)}, and not {shown(right)}")

    def hold_entries(self, where, found, right, only=None):
        """Hold entries of a row, or metrics. only: their stage, if it is not that of their names"""
        for name, value in right.items():
            for stage, names in STAGE_OF.items():
                if stage != only and (only or not re.fullmatch(names, name)):
                    continue
                if name in found:
                    pair = found[name], value
                    self.hold(stage, f"{where}, {name}", *pair, ALLOWED_OF_NUMBERS)
                else:
                    self.missing.add(name)

    @contextlib.contextmanager
    def guard(self, now):
        """An exception inside is a difference of the stage to which the run has come."""
        try:
            yield
        except Misstated:
            raise
        except (Exception, SystemExit) as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            place = f"line {line.lineno} of {Path(line.filename).name}"
            self.first.setdefault(now.stage, f"it ended in {error!r}, in {place}")
            self.ended.append(now.stage)


def shown(value):
    return f"{value:.3g}" if isinstance(value, float) else f"{value!s:.80}"


# ======================================= while it runs =======================================
@contextlib.contextmanager
def record(module, then=lambda: None):
    """Inside, a script's run is noted in what is given. Its `updates` are one for each mini-batch:

    weights     before the update; of each trained model, by name
    gradients   before they are clipped, in the same way; none if PPO drops the update
    rates       of each step, the learning rates
    after       the weights after the update

    then() is called when gradients were noted.
    """
    log = SimpleNamespace(prompts=[], models=[], optimizers=[], trained=[], weights=None)
    log.updates = []
    load = module.load_prompts
    draw = module.draw_mini_batches
    prepare = Accelerator.prepare
    clip = torch.nn.utils.clip_grad_norm_
    step = AcceleratedOptimizer.step

    def keep_prompts(*inputs):
        prompts = load(*inputs)
        log.prompts += prompts
        return prompts

    def keep_prepared(accelerator, *objects, **settings):
        log.models += [x for x in objects if isinstance(x, torch.nn.Module)]
        log.optimizers += [x for x in objects if isinstance(x, torch.optim.Optimizer)]
        # Those of which an optimizer has weights.
        groups = [group for optimizer in log.optimizers for group in optimizer.param_groups]
        stepped = {id(weight) for group in groups for weight in group["params"]}
        log.trained = [x for x in log.models if stepped & set(map(id, trained(x).values()))]
        log.weights = None
        log.start = note_weights(log)
        return prepare(accelerator, *objects, **settings)

    def keep_updates(*inputs, **settings):
        named = inspect.signature(draw).bind(*inputs, **settings).arguments
        for mini_batch in draw(*inputs, **settings):
            update = SimpleNamespace(iteration=named["iteration"], ppo_epoch=named["ppo_epoch"])
            update.number = len(log.updates) + 1
            update.episodes = torch.as_tensor(mini_batch).tolist()
            update.weights = note_weights(log)
            update.gradients = []
            update.rates = []
            log.updates.append(update)
            try:
                yield mini_batch
            finally:
                update.after = note_weights(log)

    def note_gradients():
        for update in log.updates[-1:]:
            if not update.gradients:  # PPO makes two steps.
                update.gradients = list(map(gradient, log.trained))
                then()

    def clip_and_note(*inputs, **settings):
        note_gradients()
        return clip(*inputs, **settings)

    def step_and_note(optimizer, *inputs):
        note_gradients()
        for update in log.updates[-1:]:
            update.rates.append(column(optimizer.param_groups, "lr"))
        step(optimizer, *inputs)

    with (
        mock.patch.object(module, "load_prompts", keep_prompts),
        mock.patch.object(module, "draw_mini_batches", keep_updates),
        mock.patch.object(Accelerator, "prepare", keep_prepared),
        mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip_and_note),
        mock.patch.object(AcceleratedOptimizer, "step", step_and_note),
    ):
        yield log


def trained(model):
    """The weights of a model that are trained, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def note_weights(log):
    """The weights of each trained model. Where none has moved, they need no memory again."""
    weights = []
    for model in log.trained:
        weights.append({name: x.detach().clone() for name, x in trained(model).items()})
    if not log.weights or farthest(weights, log.weights) > 0:
        log.weights = weights
    return log.weights


def farthest(models, others):
    """How far weights of the same names are apart, at most."""
    apart = [0.0]
    for weights, right in zip(models, others):
        apart += [float((weights[x] - right[x]).abs().max()) for x in weights.keys() & right.keys()]
    return max(apart)


def set_weights(log, noted):
    """Give the trained models weights that were noted of others."""
    with torch.no_grad():
        for model, weights in zip(log.trained, noted):
            for name, weight in trained(model).items():
                weight.copy_(weights.get(name, weight))


def gradient(model):
    """The gradient of a model, by name."""
    weights = trained(model).items()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad.clone() for name, x in weights}


def vector(model, gradients):
    """The gradients of all trained weights, one after the other; 0 where there is none."""
    weights = trained(model).items()
    return parameters_to_vector([gradients.get(name, torch.zeros_like(x)) for name, x in weights])


def settings(log):
    """The kinds and settings of the optimizers."""
    names = ("weight_decay", "betas", "eps", "maximize")
    found = []
    for optimizer in log.optimizers:
        groups = {
            str({name: group.get(name) for name in names}) for group in optimizer.param_groups
        }
        found.append(f"{type(optimizer).__name__} {sorted(groups)}")
    return found


def save(log, file):
    """Write what `record` has noted, for another process."""
    torch.save(dict(start=log.start, updates=log.updates, settings=settings(log)), file)


# ==================================== the run beside it ====================================
def follow(script, copied, verdict, has_scores=False):
    """Make a run of the script, each stage of which gets what the copy's stage had. Hold the copy's
    stages against it. Returns what `record` notes of it.

    script: its module; has_scores: in place of the reward it gets the scores of the copy
    """
    hold = verdict.hold
    own = SimpleNamespace(**vars(script))
    own.backward = Accelerator.backward
    own.step = AcceleratedOptimizer.step
    # Of the run: the stage to which it has come, the iteration with the copy's rows, the copy's
    # update that it makes, and the gradients after each pass of it.
    now = SimpleNamespace(stage="prompts", iteration=0)

    def draw_prompts(*inputs):
        now.stage = "prompts"
        now.iteration += 1
        now.rows = copied.rollouts.get(now.iteration, [])
        drawn = column(now.rows[:: copied.k], "row")
        numbers = [prompt.number for prompt in log.prompts]  # in the dataset
        right = [numbers[index] for index in own.draw_prompts(*inputs)]
        hold("prompts", f"iteration {now.iteration}, rows", drawn, right)
        return list(map(numbers.index, drawn))

    def sample_with_weights(iteration):
        """The models get the weights with which an iteration of the copy samples."""
        noted = [update.after for update in copied.updates if update.iteration < iteration]
        set_weights(log, [copied.start, *noted][-1])

    def generate(*inputs):
        if now.stage == "evaluation":
            return own.generate(*inputs)
        now.stage = "sampling"
        sample_with_weights(now.iteration)
        batch = own.generate(*inputs)
        for i, row in enumerate(now.rows):
            ids = batch.token_ids[i]
            right = dict(
                token_ids=ids,
                logprobs=batch.logprobs[i, : len(ids)].tolist(),
                ended=bool(batch.ended[i]),
                completion=batch.completions[i],
            )
            hold_episode(i, row, right, "sampling")
            ids = row["token_ids"]
            batch.tokens[i] = -1
            batch.tokens[i, : len(ids)] = torch.tensor(ids)
            batch.logprobs[i] = 0
            batch.logprobs[i, : len(ids)] = torch.tensor(row["logprobs"])
        now.stage = "scores"
        return replace(
            batch,
            completions=column(now.rows, "completion"),
            token_ids=column(now.rows, "token_ids"),
            ended=torch.tensor(column(now.rows, "ended")),
            mask=batch.tokens >= 0,
        )

    def hold_episode(i, row, right, stage):
        verdict.hold_entries(f"iteration {now.iteration}, episode {i}", row, right, stage)

    def score_episodes(*inputs):
        if not has_scores:
            return own.score_episodes(*inputs)
        scores = np.array(column(now.rows, "score"), float)  # None is nan
        return torch.from_numpy(scores), [{}] * len(scores)

    def map_episodes(one_pass, *inputs):
        """Log-probabilities of the reference, and values, are held. Then they are the copy's."""
        found = own.map_episodes(one_pass, *inputs)
        known = {"token_logprobs": "ref_logprobs", "token_values": "values"}
        name = known.get(getattr(getattr(one_pass, "func", None), "__name__", None))
        for i, row in enumerate(now.rows if name else []):
            right = found[i, : len(row["token_ids"])].tolist()
            hold_episode(i, row, {name: right}, "sampling" if name == "values" else "reference")
            found[i, : len(right)] = torch.tensor(row.get(name) or right)
        return found

    def draw_mini_batches(args, iteration, ppo_epoch, *inputs):
        now.stage = "mini-batches"
        right = own.draw_mini_batches(args, iteration, ppo_epoch, *inputs)
        epoch = (iteration, ppo_epoch)
        updates = [x for x in copied.updates if (x.iteration, x.ppo_epoch) == epoch]
        where = f"iteration {iteration}, PPO epoch {ppo_epoch + 1}, episodes"
        found = [update.episodes for update in updates]
        for pair in itertools.zip_longest(found, map(torch.Tensor.tolist, right)):
            hold("mini-batches", where, *pair)
        for now.update in updates:
            now.stage = "loss"
            now.passes = []
            set_weights(log, now.update.weights)
            yield torch.tensor(now.update.episodes)
            set_weights(log, now.update.after)

    def backward(*inputs, **settings):
        own.backward(*inputs, **settings)
        now.passes.append([vector(model, gradient(model)) for model in log.trained])

    def put_gradients():
        """Give the script the copy's gradients. Its own have been noted."""
        now.stage = "optimizer"
        for i, (model, gradients) in enumerate(zip(log.trained, now.update.gradients)):
            if is_by_pass(
                torch.stack([noted[i] for noted in now.passes]), vector(model, gradients)
            ):
                now.update.by_pass = True
            for name, weight in trained(model).items():
                if name in gradients:
                    weight.grad = gradients[name].clone()

    def step(optimizer, *inputs):
        """A step with the copy's rate. The schedule is another stage."""
        [group] = optimizer.param_groups
        rate = group["lr"]
        for rates in now.update.rates[len(log.updates[-1].rates) - 1 :][:1]:
            group["lr"] = rates[0]
        own.step(optimizer, *inputs)
        group["lr"] = rate

    def evaluate(*inputs):
        if has_scores:
            return {}
        now.stage = "evaluation"
        sample_with_weights(inputs[-1] + 1)
        return own.evaluate(*inputs)

    edits = dict(
        check_flags=copy.copy,  # The copy may allow more.
        draw_prompts=draw_prompts,
        generate=generate,
        score_episodes=score_episodes,
        map_episodes=map_episodes,
        draw_mini_batches=draw_mini_batches,
        compare_with_sampler=lambda *_: {},  # The copy may train on other log-probabilities.
        evaluate=evaluate,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(script, **edits),
        mock.patch.object(Accelerator, "backward", backward),
        mock.patch.object(AcceleratedOptimizer, "step", step),
        record(script, put_gradients) as log,
    ):
        run = Path(folder, "run")
        args = flags_for(script, copied, verdict) | dict(output_dir=str(run))
        if has_scores:  # They are what came of these.
            args["missing_eos_penalty"] = 0.0
            args |= {name: None for name in args if name.startswith("score_")}
        with verdict.guard(now):
            script.main(script.Args(**args))
        if (run / "metrics.jsonl").exists():
            hold_written(copied, understand(read_run(run), log), verdict)
        now.stage = "optimizer"
        with verdict.guard(now):
            hold_updates(copied, log, hold)
        now.stage = "result"
        with verdict.guard(now):
            hold_result(Path(copied.args.output_dir), run, hold)
    return log


def flags_for(script, copied, verdict):
    """The copy's flags, but for those and for choices that the script has not."""
    given = vars(copied.args) | dict(log_with=None)
    found = {}
    for name, kind in typing.get_type_hints(script.Args).items():
        is_choice = typing.get_origin(kind) is typing.Literal
        if name not in given:
            verdict.missing.add(f"--{name.replace('_', '-')}")
        elif not is_choice or given[name] in typing.get_args(kind):
            found[name] = given[name]
    return found


def hold_written(copied, right, verdict):
    """Hold the rows and metrics that a run wrote."""
    for name, stage in dict(metrics=None, rollouts=None, eval_rollouts="evaluation").items():
        ours, its = vars(copied)[name], vars(right)[name]
        if its and not verdict.ended:
            verdict.hold(stage or "prompts", f"the iterations of {name}", [*ours], [*its])
        for iteration, rows in its.items():
            for row, other in zip(ours.get(iteration, []), rows):
                episode = f", episode {other['index']}" if "index" in other else ""
                verdict.hold_entries(f"iteration {iteration}{episode}", row, other, stage)


def hold_updates(copied, log, hold):
    """Hold what optimizers are, and what they did."""
    for pair in zip(copied.settings, settings(log)):
        hold("optimizer", "kind and settings", *pair)
    before = log.start
    for update, its in zip(copied.updates, log.updates):
        where = f"iteration {update.iteration}, update {update.number}"
        about = f"{where}: weights moved without a step, by"
        hold("optimizer", about, farthest(update.weights, before), 0.0)
        for rates, [right] in zip(update.rates, its.rates):
            hold("schedule", f"{where}: rates", rates, [right] * len(rates))
        where += (
            f": from where {len(its.rates)} steps of the script lead, by their length, weights are"
        )
        apart = farthest(update.after, its.after) / max(farthest(its.after, its.weights), 1e-12)
        hold("optimizer", where, apart, 0.0, ALLOWED)
        before = update.after


def hold_result(folder, right, hold):
    """The models are what the last step left."""
    for model in right.glob("*model"):
        written = load_weights(folder / model.name)
        for name, weights in load_weights(model).items():
            where = f"{model.name}/, {name}, from what the last step left"
            hold("result", where, float(abs(written[name] - weights).max()), 0.0)


# ======================================== the verdict ========================================
def judge(script, folder, file, loss):
    """What the stages of a copy's run are.

    script: the module of the script that it came from; folder: of the run; file: what `save` wrote;
    loss: a function, or None for that of the script
    """
    found = read_run(folder)
    noted = torch.load(file, weights_only=False)
    copied = understand(found, SimpleNamespace(trained=[], **noted))
    verdict = Verdict()
    log = follow(script, copied, verdict)
    if "scores" in verdict.first:  # What follows from them is judged with those of the copy.
        for stage in ("advantages", "loss"):
            verdict.first.pop(stage, None)
        log = follow(script, copied, verdict, has_scores=True)
    not_judged = [f"what follows {stage}, which ended" for stage in verdict.ended]
    others = log.updates
    log.updates = copied.updates if loss else copied.updates[: len(others)]
    run = understand(found, log)
    for place in range(len(run.models), len(copied.start)):
        not_judged.append(f"the loss of trained model {place + 1}")
    report = dict(not_judged=not_judged, cases=Counter())
    with verdict.guard(SimpleNamespace(stage="loss")):
        rows = gradients(found, log, loss, others)
        report["cases"] = count_cases(run, rows)
        report["distance"], wrong = judge_gradients(rows)
        if loss:  # The metrics of another loss are not the script's.
            verdict.first.pop("loss", None)
        if wrong:
            verdict.first["loss"] = f"{wrong.about}. {likely_cause(run, wrong)}"
        if not rows:
            verdict.first.setdefault("loss", "no update was compared")
    return report | vars(verdict)


def understand(found, log):
    """A run as the stages read it."""
    run = SimpleNamespace(**vars(log), args=SimpleNamespace(**found["args"]))
    run.k = found["args"].get("rloo_k") or found["args"].get("num_generations", 1)
    for name in ("rollouts", "eval_rollouts", "metrics"):
        vars(run)[name] = grouped(found[name], "iteration")
    # Nothing states the loss of other models.
    run.models = log.trained[: 1 + hasattr(run.args, "vf_coef")]
    return run


# ========================================== the loss ==========================================
class Misstated(Exception):
    """What is wrong with the function of a loss."""


def load_loss(spec):
    """The function that FILE.py:FUNCTION names."""
    file, _, name = spec.rpartition(":")
    if not Path(file).is_file():
        raise Misstated("there is no such file; it is FILE.py:FUNCTION")
    try:
        module = import_script(Path(file).resolve())
    except (Exception, SystemExit) as error:
        raise Misstated(f"importing it, {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Misstated(f"{Path(file).name} has no function of this name")
    return function


def call_loss(loss, *inputs):
    """What a loss returns, and its sum."""
    try:
        losses = loss(*inputs)
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise Misstated(f"it raises {error!r}, in line {line}") from error
    parts = losses if isinstance(losses, tuple) else (losses,)
    for part in parts:
        if not isinstance(part, (torch.Tensor, int, float)):
            raise Misstated(f"it returns {part!r:.40}, and not a number with a gradient")
        part = torch.as_tensor(part)
        if part.ndim:
            raise Misstated(f"it returns a tensor of shape {list(part.shape)}, and not a number")
        if not part.isfinite():
            raise Misstated(f"it returns {part.item()}")
    return losses, sum(parts)


def make_episode(row):
    """What a loss gets of a row in rollouts/. `run_models` adds to it."""
    episode = SimpleNamespace(**row)
    episode.old_logprobs = torch.tensor(row["logprobs"])
    reference = row.get("ref_logprobs")
    episode.ref_logprobs = None if reference is None else torch.tensor(reference)
    episode.old_values = torch.tensor(row.get("values", []))
    episode.logprobs = episode.values = None
    return episode


def run_models(run, episodes):
    """Give episodes log-probabilities and values. Rows are padded on the right, where no token
    before the padding sees it."""
    policy, *others = run.models
    known = {prompt.text: prompt.token_ids for prompt in run.prompts}
    prompts = [known[episode.prompt] for episode in episodes]
    rows = [torch.tensor([*prompt, *e.token_ids]) for prompt, e in zip(prompts, episodes)]
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logits = policy(rows).logits
    values = others[0](rows).logits if others else None
    for i, (prompt, episode) in enumerate(zip(prompts, episodes)):
        count = len(episode.token_ids)
        columns = slice(len(prompt) - 1, len(prompt) - 1 + count)  # A token's predictor.
        episode.log_p = (logits[i, columns] / run.args.temperature).log_softmax(-1)
        episode.logprobs = episode.log_p[range(count), episode.token_ids]
        if others:
            episode.values = values[i, columns].squeeze(-1)


def gradients(found, log, loss, others=None):
    """The gradients of a run beside those of a loss.

    others: the updates of another run, whose gradients are taken if there is no loss
    Returns a row for each update and model, with its number, iteration, mini_batch, model, and what
    the loss returned. `its` is the gradient, and `stated` that of the loss.
    """
    run = understand(found, log)
    kl_coef = run.args.kl_coef
    rows = []
    has_gradient = not loss
    for update in log.updates:
        if not update.gradients:  # PPO has dropped it.
            continue
        set_weights(run, update.weights)
        [metrics] = run.metrics[update.iteration]
        run.args.kl_coef = metrics.get("objective/kl_coef", kl_coef)
        batch = list(map(make_episode, run.rollouts[update.iteration]))
        mini_batch = [batch[i] for i in update.episodes]
        losses = None
        with torch.set_grad_enabled(bool(loss)):
            run_models(run, mini_batch)
        if loss:
            losses, total = call_loss(loss, mini_batch, batch, run.args)
            has_gradient |= torch.as_tensor(total).requires_grad
            for model in run.models:
                model.zero_grad()
            # The loss of no episode, where all are masked, has no gradient.
            (total + 0 * mini_batch[0].logprobs.sum()).backward()
            stated = list(map(gradient, run.models))
        else:
            stated = others[update.number - 1].gradients
        for model, its, right in zip(run.models, update.gradients, stated):
            row = copy.copy(update)
            row.mini_batch, row.model, row.losses = mini_batch, model, losses
            row.its, row.stated = vector(model, its), vector(model, right)
            if not row.stated.isfinite().all():
                raise Misstated(f"its gradient is not finite, in update {row.number}")
            rows.append(row)
    if rows and not has_gradient:
        raise Misstated("what it returns has no gradient; is it detached?")
    return rows


def judge_gradients(rows):
    """The greatest distance of two gradients by their size, and the first row that is wrong, or
    None. `about` of the row says how.

    A gradient that is 0 up to rounding counts as a twentieth of the greatest.
    """
    distances = [0.0]
    for row in rows:
        largest = max(other.its.norm() for other in rows if other.model is row.model)
        size = max(float(row.its.norm()), 0.05 * float(largest), 1e-12)
        distances.append(float((row.its - row.stated).norm() / size))
        if not distances[-1] <= ALLOWED:
            length = row.its @ row.stated / (row.stated @ row.stated)
            about = "another direction"
            if length > 0 and (row.its - length * row.stated).norm() <= ALLOWED * size:
                about = f"the same direction, and {length:.3g} of the length, as by a denominator"
            row.about = (
                f"from update {row.number} on, in iteration {row.iteration}: the gradient of"
                f" {type(row.model).__name__} is {distances[-1]:.2g} away. It has {about}"
            )
            return distances[-1], row
    return max(distances), None


def outside(episode, args):
    """Where the ratios of an episode are above the clip and its advantage is positive, and where
    they are below and it is negative: there the clip acts."""
    change = (episode.logprobs - episode.old_logprobs).detach()
    if hasattr(args, "rloo_k"):  # A completion has one ratio.
        change = change.sum(0, keepdim=True)
    elif vars(args).get("importance_sampling_level") == "sequence":
        change = change.mean(0, keepdim=True)
    ratio = change.exp()
    advantage = torch.tensor(np.array(vars(episode).get("advantage", 0), float))
    high = vars(args).get("cliprange_high") or args.cliprange
    is_above = (ratio > 1 + high) & (advantage > 0)
    return is_above, (ratio < 1 - args.cliprange) & (advantage < 0)


def values_outside(episode, args):
    """Where the clip of values acts: a clipped one is farther from its return."""
    values = episode.values.detach()
    limit = args.cliprange_value
    clipped = episode.old_values + (values - episode.old_values).clamp(-limit, limit)
    returns = torch.tensor(episode.returns)
    return (clipped - returns).abs() > (values - returns).abs()


def count_cases(run, rows):
    """How often each case has come in which a stage could go wrong."""
    args = run.args
    norms = Counter()  # of the gradients of each update, squared
    for row in rows:
        norms[row.number] += float(row.its.norm()) ** 2
    cases = Counter({"updates": len(norms)})
    cases["updates with a gradient"] = sum(norm > 0 for norm in norms.values())
    episodes = [row for batch in run.rollouts.values() for row in batch]
    cases["completions cut off"] = sum(not row["ended"] for row in episodes)
    if run.k > 1:
        scores = [row["score"] for row in episodes]
        groups = [scores[i : i + run.k] for i in range(0, len(scores), run.k)]
        missing = [group.count(None) for group in groups if len(group) - group.count(None) > 1]
        cases["episodes without a score, beside two with one"] = sum(missing)
        cases["groups of equal scores"] = sum(len({*group} - {None}) == 1 for group in groups)
    cases["gradients clipped"] = sum(norm > args.max_grad_norm**2 for norm in norms.values())
    for row in rows:
        for episode in row.mini_batch:
            if row.model is run.models[0]:
                above, below = outside(episode, args)
                cases["ratios above the clip"] += int(above.sum())
                cases["ratios below the clip"] += int(below.sum())
            else:
                cases["values outside of the clip"] += int(values_outside(episode, args).sum())
    return cases


def likely_cause(run, row):
    """What a wrong gradient comes from.

    A gradient is a sum over tokens: of the gradients of their log-probabilities, or of their
    values, with factors. So one that differs in some episodes alone differs by such a sum of these.
    """
    if vars(row).get("by_pass"):
        return (
            "Each pass has a factor of its own: is it a mean over a micro-batch? Divide by the size"
            " of the mini-batch. Passes are sorted by length, so it may also be that of lengths"
        )
    set_weights(run, row.weights)
    run_models(run, row.mini_batch)
    weights = list(trained(row.model).values())
    by_episode = {}
    kinds = defaultdict(list)
    for episode in row.mini_batch:
        numbers = episode.logprobs if row.model is run.models[0] else episode.values
        vectors = [torch.autograd.grad(x, weights, retain_graph=True) for x in numbers]
        by_episode[episode.index] = torch.stack([*map(parameters_to_vector, vectors)])
        clips = [*outside(episode, run.args)]
        if episode.values is not None:
            clips.append(values_outside(episode, run.args))
        is_of_kind = {
            "without a score": episode.score is None,
            "of advantage 0 (is it `has_gradient`?)": not np.any(vars(episode).get("advantage", 1)),
            "cut off": not episode.ended,
            "where a clip acts": any(clip.any() for clip in clips),
            f"of one group, that of episode {episode.index // run.k * run.k}": True,
        }
        for kind in filter(is_of_kind.get, is_of_kind):
            kinds[kind].append(episode.index)
    difference = row.its - row.stated
    right = []
    for kind, episodes in kinds.items():
        vectors = torch.cat([by_episode[i] for i in episodes])
        if len(episodes) < len(row.mini_batch) and explain(vectors, difference):
            right.append(kind)
    if right:
        return f"Only episodes differ that are {', or '.join(right)}"
    if explain(torch.cat([*by_episode.values()]), difference):
        return "Episodes of all kinds differ"
    return "No log-probability of a sampled token makes the difference; is it an entropy?"


def explain(vectors, difference):
    """Whether a sum of these vectors, with factors, makes a difference of gradients."""
    directions, _ = torch.linalg.qr(vectors.T)
    rest = difference - directions @ (directions.T @ difference)
    return bool(rest.norm() < 0.05 * difference.norm())


def is_by_pass(sums, its):
    """Whether each pass has a factor of its own in a gradient, and none has 1.

    sums: the right gradients after each pass
    """
    if (its - sums[-1]).norm() <= ALLOWED * its.norm():
        return False
    passes = sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))
    passes = passes[passes.norm(dim=1) > 0].T
    factors = torch.linalg.lstsq(passes, its[:, None]).solution
    is_explained = (its[:, None] - passes @ factors).norm() < 0.01 * its.norm()
    are_new = ((factors - 1).abs() > 0.01).all() and factors.std() > 0.01
    return bool(is_explained and are_new)
