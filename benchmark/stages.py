"""Compute a run of a script, or of a copy, again, stage by stage: what is not the script's?

`record` notes weights, gradients and steps while the run is made. `judge` reads what it has
written. Each stage is computed in plain torch and transformers. It takes as given what the run
wrote before it, so that a difference stays in the stage where it arises.

    prompts        each iteration has the rows of the seed's stream
    sampling       each token is the one that its random number picks. Its log-probability, entropy
                   and value, the text and the ends are right
    scores         are those of the reward function, with penalty and normalization
    reference      the log-probabilities of the reference model, at the run's temperature
    mini-batches   their number, order and episodes
    loss           the gradient of each update is that of a stated loss, as in losses.py
    optimizer      is AdamW, as the flags say
    steps          each optimizer makes one of its kind for each mini-batch, with the clipped
                   gradient, and nothing else moves weights
    schedule       the learning rate of each step
    evaluation     as sampling and scores
    result         model/ is what the last step left
"""

import contextlib
import copy
import inspect
import traceback
from collections import Counter, defaultdict
from math import ceil, inf, nan
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from run import difference, grouped, import_script, read_rows
from safetensors.torch import load_file
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# Rounding made at most 1.1e-5, and a bonus of 0.01 that counts padding 2e-3.
ALLOWED = 1e-4
# Of log-probabilities and values. It is the limit of the scripts between two kinds of passes.
ALLOWED_OF_TOKENS = 1e-3


def points(completions, points, **_):
    """The reward of the small runs. A row has seven points, and a text gets one of them."""
    table = zip(completions, points)
    return [row[sum((i + 3) * ord(x) for i, x in enumerate(text)) % 7] for text, row in table]


class Stage:
    """How often something was compared, and the first difference."""

    def __init__(self):
        self.compared = 0
        self.first = None

    def hold(self, where, found, right, allowed=0.0):
        self.compared += 1
        if self.first is None and not difference(found, right) <= allowed:
            self.first = f"{where}: {shown(found)}, and not {shown(right)}"


def shown(value):
    return f"{value:.3g}" if isinstance(value, float) else f"{value!s:.80}"


# ======================================= while it runs =======================================
@contextlib.contextmanager
def record(module):
    """Inside, a script's run is noted in what is given. Its `updates` are one for each mini-batch.
    Of its `stages`, steps are held at once."""
    log = SimpleNamespace(updates=[], models=[], optimizers=[], weights={}, twins={})
    log.stages = defaultdict(Stage)
    draw = module.draw_mini_batches
    prepare = Accelerator.prepare
    clip = torch.nn.utils.clip_grad_norm_
    step = AcceleratedOptimizer.step

    def keep_prepared(accelerator, *objects):
        for thing in objects:
            if isinstance(thing, torch.nn.Module):
                log.models.append(thing)
                log.weights[thing] = weights_of(thing)
            elif isinstance(thing, torch.optim.Optimizer):
                log.optimizers.append(thing)
        return prepare(accelerator, *objects)

    def keep_episodes(args, iteration, ppo_epoch, *rest):
        for mini_batch in draw(args, iteration, ppo_epoch, *rest):
            update = SimpleNamespace(iteration=iteration, ppo_epoch=ppo_epoch, args=args)
            update.number = len(log.updates) + 1
            update.where = f"iteration {iteration}, update {update.number}"
            update.episodes = mini_batch.tolist()
            update.models = []  # of each its weights, and its gradient before it is clipped
            update.steps = Counter()  # of each optimizer
            update.rates = []
            log.updates.append(update)
            yield mini_batch

    def clip_and_note(*inputs, **settings):
        note_gradients(log)
        return clip(*inputs, **settings)

    def step_and_note(optimizer, *inputs):
        note_gradients(log)
        note_step(log, optimizer.optimizer, lambda: step(optimizer, *inputs))

    with (
        mock.patch.object(module, "draw_mini_batches", keep_episodes),
        mock.patch.object(Accelerator, "prepare", keep_prepared),
        mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip_and_note),
        mock.patch.object(AcceleratedOptimizer, "step", step_and_note),
    ):
        yield log


def trained(model):
    return [weight for weight in model.parameters() if weight.requires_grad]


def weights_of(model):
    """All trained weights, one after the other."""
    return torch.cat([torch.zeros(0), *(weight.detach().flatten() for weight in trained(model))])


def gradient(model):
    gradients = []
    for weight in trained(model):
        gradients.append(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    return parameters_to_vector(gradients)


def weights_in(optimizer):
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def trained_models(log):
    """Those of which an optimizer has weights."""
    stepped = {id(weight) for optimizer in log.optimizers for weight in weights_in(optimizer)}
    return [model for model in log.models if stepped & set(map(id, trained(model)))]


def note_gradients(log):
    """The weights and gradients of an update, before they are clipped."""
    update = log.updates[-1]
    if update.models:  # They are noted. PPO makes two steps.
        return
    for model in trained_models(log):
        weights = weights_of(model)
        moved = float((weights - log.weights[model]).norm())
        where = f"{update.where}: {type(model).__name__}, moved without a step, by"
        log.stages["steps"].hold(where, moved, 0.0)
        if moved == 0:
            weights = log.weights[model]  # It needs no memory of its own.
        update.models.append((model, weights, gradient(model)))


def note_step(log, optimizer, step):
    """Make a step, and hold it against one of a copy of the optimizer."""
    update = log.updates[-1]
    stage = log.stages["steps"]
    raw = torch.cat([gradient for *_, gradient in update.models]).double()
    clipped = raw * min(1.0, update.args.max_grad_norm / (raw.norm() + 1e-6))
    its = torch.cat([gradient(model) for model, *_ in update.models])
    apart = float((its - clipped).norm() / clipped.norm().clamp(min=1e-12))
    where = f"{update.where}: from the clipped gradient, by its length, the gradient is away"
    stage.hold(where, apart, 0.0, ALLOWED)
    if not update.steps[optimizer]:
        update.rates += [group["lr"] for group in optimizer.param_groups]
    update.steps[optimizer] += 1
    twin = copy.deepcopy(optimizer)  # of weights and settings
    if optimizer in log.twins:  # What it remembers is what it was before.
        memory = log.twins[optimizer].state_dict()["state"]
        twin.load_state_dict(optimizer.state_dict() | {"state": memory})
    log.twins[optimizer] = twin
    pairs = list(zip(weights_in(optimizer), weights_in(twin)))
    for weight, other in pairs:
        other.grad = None if weight.grad is None else weight.grad.clone()
    twin.step()
    step()
    apart = max(float((weight - other).detach().abs().max()) for weight, other in pairs)
    name = type(optimizer).__name__
    stage.hold(f"{update.where}: from the step of {name}, a weight is away", apart, 0.0, 1e-7)
    log.weights |= {model: weights_of(model) for model, *_ in update.models}


# ========================================= the stages =========================================
def judge(found, log, loss, load_reward):
    """What the stages of a run are.

    found: what `read_run` gives; log: as in `record`; load_reward: the script's
    """
    run = understand(found, log)
    run.reward = load_reward(run.args.reward)
    run.eval_reward = load_reward(run.args.eval_reward or run.args.reward)
    not_judged = []
    for stage in JUDGES:
        try:
            JUDGES[stage](run)
        except Exception as error:  # The copy has not what it needs.
            line = traceback.extract_tb(error.__traceback__)[-1].lineno
            not_judged.append(f"{stage}: {error!r}, in line {line} of stages.py")
            if run.stages[stage].first is None:
                del run.stages[stage]
    try:
        rows = gradients(found, log, loss)
    except Misstated as error:
        return dict(misstated=str(error))
    distance, wrong = judge_gradients(rows)
    if wrong:
        wrong = f"{wrong.about}. {likely_cause(run, wrong)}"
    for model in trained_models(log)[len(run.models) :]:
        not_judged.append(f"the loss of {type(model).__name__}")
    if may_drop(run.args):
        not_judged.append("steps: their number, as PPO may drop updates with these flags")
    cases, without_gradient = count_cases(run, rows)
    return dict(
        stages={name: stage.first for name, stage in run.stages.items() if stage.compared},
        not_judged=not_judged,
        distance=distance,
        wrong_loss=wrong,
        cases=cases,
        without_gradient=without_gradient,
    )


def understand(found, log):
    """A run as the stages read it."""
    run = SimpleNamespace(log=log, stages=log.stages)
    run.args = args = SimpleNamespace(**found["args"])
    run.k = found["args"].get("rloo_k") or found["args"].get("num_generations", 1)
    run.batches = grouped(found["rollouts"], "iteration")
    run.evaluations = grouped(found["eval_rollouts"], "iteration")
    run.metrics = {row["iteration"]: row for row in found["metrics"]}
    run.tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_path)
    # Nothing states the loss of other models.
    run.models = trained_models(log)[: 1 + hasattr(args, "vf_coef")]
    return run


def load_policy(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def batch_sizes(run, num_prompts):
    """The episodes of each iteration."""
    args = run.args
    drawn = max(1, int(args.num_train_epochs * num_prompts + 0.5))
    if args.total_episodes is not None:
        drawn = ceil(args.total_episodes / run.k)
    full, rest = divmod(drawn * run.k, args.batch_size)
    return [args.batch_size] * full + [rest] * (rest > 0)


def set_weights(run, iteration):
    """Those with which an iteration samples."""
    weights = run.log.weights  # of the end
    for update in reversed(run.log.updates):
        if update.iteration >= iteration and update.models:
            weights = {model: vector for model, vector, _ in update.models}
    for model in run.models:
        vector_to_parameters(weights[model], trained(model))


def judge_prompts(run):
    stage = run.stages["prompts"]
    prompts = read_rows(run.args.dataset)
    run.sizes = batch_sizes(run, len(prompts))
    stage.hold("iterations", sorted(run.batches), list(range(1, len(run.sizes) + 1)))
    epochs = range(sum(run.sizes) // run.k // len(prompts) + 1)
    stream = np.hstack([keyed(run, 1, epoch).permutation(len(prompts)) for epoch in epochs])
    stream = np.split(stream.repeat(run.k), np.cumsum(run.sizes))
    for (iteration, batch), drawn in zip(run.batches.items(), stream):
        stage.hold(f"iteration {iteration}, rows", [row["row"] for row in batch], drawn.tolist())
        hold_rows(stage, batch, prompts)


def hold_rows(stage, batch, prompts):
    """The texts and columns of episodes are those of their rows."""
    for row in batch:
        given = {"prompt": row["prompt"]} | row["columns"]
        where = f"iteration {row['iteration']}, episode {row['index']}, row {row['row']}"
        stage.hold(where, given, prompts[row["row"]])


def keyed(run, *key):
    return np.random.default_rng([run.args.seed, *key])


def judge_sampling(run):
    stage = run.stages["sampling"]
    for iteration, batch in run.batches.items():
        set_weights(run, iteration)
        numbers = keyed(run, 2, iteration).random((len(batch), run.args.response_length))
        episodes = hold_completions(stage, run, batch, numbers, run.args.temperature)
        log_p = torch.cat([episode.log_p for episode in episodes])
        entropy = float(-(log_p.exp() * log_p.clamp(min=-104)).sum(1).mean())
        logged = run.metrics[iteration]["policy/entropy_avg"]
        stage.hold(f"iteration {iteration}, policy/entropy_avg", logged, entropy, ALLOWED)


def hold_completions(stage, run, batch, numbers, temperature):
    """Completions, their log-probabilities and values are those of random numbers and weights."""
    args = run.args
    if args.stop_string is not None or temperature == 0:
        raise ValueError("--stop-string, or temperature 0")
    ends = run.log.models[0].generation_config.eos_token_id
    ends = {*np.ravel(ends).tolist(), run.tokenizer.eos_token_id, args.stop_token_id}
    episodes = list(map(make_episode, batch))
    with torch.no_grad():
        run_models(run, episodes, temperature)
    for row, episode, uniforms in zip(batch, episodes, numbers):
        where = f"iteration {episode.iteration}, episode {episode.index}"
        tokens = episode.token_ids
        stage.hold(f"{where}, tokens", tokens, picked(episode, uniforms))
        for name in ("logprobs", "values"):
            if name in row:  # Evaluations have no values.
                right = vars(episode)[name].tolist()
                stage.hold(f"{where}, {name}", row[name], right, ALLOWED_OF_TOKENS)
        is_end = [token in ends for token in tokens]
        stage.hold(f"{where}, ended", row["ended"], is_end[-1])
        length = is_end.index(True) + 1 if True in is_end else args.response_length
        stage.hold(f"{where}, number of tokens", len(tokens), length)
        hides = is_end[-1] and not run.tokenizer.decode(tokens[-1:], skip_special_tokens=True)
        text = run.tokenizer.decode(tokens[: len(tokens) - hides])
        stage.hold(f"{where}, text", row["completion"], text)
    return episodes


def picked(episode, uniforms):
    """The tokens that random numbers pick. Up to 1e-5 from a boundary, its neighbour may be."""
    tokens = torch.tensor(episode.token_ids)[:, None]
    p = episode.log_p.double().exp()
    upper = p.cumsum(1)
    numbers = torch.from_numpy(uniforms)[: len(tokens), None] * upper[:, -1:]
    right = torch.searchsorted(upper, numbers, right=True)
    top = upper.gather(1, tokens)
    bottom = top - p.gather(1, tokens)
    is_near = (bottom - 1e-5 <= numbers) & (numbers <= top + 1e-5)
    return torch.where(is_near, tokens, right).squeeze(1).tolist()


def judge_scores(run):
    if run.args.reward_model_path is not None:
        raise ValueError("--reward-model-path")
    so_far = []  # for PPO's normalization
    prompts = read_rows(run.args.dataset)
    for batch in run.batches.values():
        scores = score(batch, prompts, run.reward)
        scores -= run.args.missing_eos_penalty * np.array([not row["ended"] for row in batch])
        so_far.extend(scores)
        if vars(run.args).get("score_norm"):
            scores = scores - np.mean(so_far)
        if vars(run.args).get("score_scaling") and np.std(so_far) > 0:
            scores = scores / np.std(so_far)
        limit = vars(run.args).get("score_clip") or inf
        hold_scores(run.stages["scores"], batch, scores.clip(-limit, limit))


def score(batch, prompts, reward):
    """What a reward function gives for the texts of a batch, nan for None."""
    rows = [copy.deepcopy(prompts[row["row"]]) for row in batch]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["prompts"] = columns.pop("prompt")
    texts = [row["completion"] for row in batch]
    ids = [list(row["token_ids"]) for row in batch]
    scores = reward(completions=texts, completion_ids=ids, **columns)
    parts = scores.values() if isinstance(scores, dict) else [scores]
    table = [[value for value in values if value is not None] for values in zip(*parts)]
    return np.array([sum(values) if values else nan for values in table])


def hold_scores(stage, batch, scores):
    for row, right in zip(batch, scores.tolist()):
        where = f"iteration {row['iteration']}, episode {row['index']}"
        value = nan if row["score"] is None else row["score"]
        stage.hold(where, value, right, 1e-6)


def judge_reference(run):
    stage = run.stages["reference"]
    has_one = run.args.kl_coef != 0 or run.args.ref_model_path is not None
    reference = load_policy(run.args.ref_model_path or run.args.model_path)
    for iteration, batch in run.batches.items():
        episodes = list(map(make_episode, batch))
        with torch.no_grad():
            run_models(run, episodes, run.args.temperature, [reference])
        for row, episode in zip(batch, episodes):
            where = f"iteration {iteration}, episode {episode.index}"
            if has_one:
                right = episode.logprobs.tolist()
                stage.hold(where, row["ref_logprobs"], right, ALLOWED_OF_TOKENS)
            elif row["ref_logprobs"] is not None:
                stage.hold(where, row["ref_logprobs"], None)


def judge_mini_batches(run):
    stage = run.stages["mini-batches"]
    for iteration, batch in run.batches.items():
        right = {}
        for ppo_epoch in range(run.args.num_ppo_epochs):
            groups = np.arange(len(batch)).reshape(-1, run.k)
            groups = groups[keyed(run, 4, iteration, ppo_epoch).permutation(len(groups))]
            pieces = min(run.args.num_mini_batches, len(batch))
            right[ppo_epoch] = [x.tolist() for x in np.array_split(groups.ravel(), pieces)]
        found = {}
        for update in run.log.updates:
            if update.iteration == iteration:
                found.setdefault(update.ppo_epoch, []).append(update.episodes)
        for epoch in right | found:
            where = f"iteration {iteration}, PPO epoch {epoch + 1}"
            stage.hold(f"{where}, number", len(found.get(epoch, [])), len(right.get(epoch, [])))
            for pair in zip(found.get(epoch, []), right.get(epoch, [])):
                stage.hold(f"{where}, episodes", *pair)


def judge_optimizers(run):
    """Their kinds and settings. PPO's value model has a second one."""
    names = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
    right = torch.optim.AdamW([torch.zeros(1)], weight_decay=run.args.weight_decay)

    def text(optimizer):
        group = optimizer.param_groups[0]
        settings = [f"{name} {group[name]}" for name in names if name in group]
        return ", ".join([type(optimizer).__name__, *settings])

    stage = run.stages["optimizer"]
    stage.hold("prepared optimizers", len(run.log.optimizers), 1 + hasattr(run.args, "vf_coef"))
    for optimizer in run.log.optimizers:
        stage.hold("an optimizer", text(optimizer), text(right))


def judge_steps(run):
    """`note_step` has held each step. Here they are counted."""
    stage = run.stages["steps"]
    if run.args.lora_r is None:
        start = weights_of(load_policy(run.args.model_path))
        _, weights, _ = next(update for update in run.log.updates if update.models).models[0]
        moved = float((weights[: len(start)] - start).norm())
        stage.hold("from --model-path, before the first step, the policy is away", moved, 0.0)
    for update in run.log.updates:
        for model in run.log.optimizers:
            name = f"{type(model).__name__} {run.log.optimizers.index(model) + 1}"
            where = f"{update.where}: steps of {name}"
            if not may_drop(run.args):
                stage.hold(where, update.steps[model], 1)


def may_drop(args):
    """With these flags, PPO drops updates."""
    return bool(vars(args).get("target_kl") or vars(args).get("ratio_threshold"))


def judge_schedule(run):
    args = run.args
    planned = args.num_ppo_epochs * sum(min(args.num_mini_batches, size) for size in run.sizes)
    warmup = args.warmup_steps if args.warmup_steps >= 1 else args.warmup_steps * planned
    optimizer = torch.optim.SGD([torch.zeros(1)], args.learning_rate)
    kind = args.lr_scheduler_type
    schedule = transformers.get_scheduler(kind, optimizer, ceil(warmup), planned)
    for update in run.log.updates:
        for rate in update.rates:
            run.stages["schedule"].hold(f"{update.where}: rate", rate, schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def judge_evaluation(run):
    args = run.args
    stage = run.stages["evaluation"]
    prompts = read_rows(args.eval_dataset)
    last = len(run.sizes)
    right = [i for i in range(last + 1) if i in (0, last) or i % (args.eval_every or last) == 0]
    stage.hold("iterations", sorted(run.evaluations), right)
    drawn = np.arange(len(prompts)).repeat(args.eval_k).tolist()
    for iteration, batch in run.evaluations.items():
        where = f"iteration {iteration}"
        stage.hold(f"{where}, rows", [row["row"] for row in batch], drawn)
        hold_rows(stage, batch, prompts)
        set_weights(run, iteration + 1)
        numbers = keyed(run, 3, iteration).random((len(batch), args.response_length))
        hold_completions(stage, run, batch, numbers, args.eval_temperature)
        scores = score(batch, prompts, run.eval_reward)
        hold_scores(stage, batch, scores)
        best = scores.reshape(-1, args.eval_k).max(1)
        for name, values in {"scores": scores, f"best_of_{args.eval_k}": best}.items():
            logged = run.metrics[iteration][f"eval/{name}"]
            stage.hold(f"{where}, eval/{name}", logged, float(np.nanmean(values)), 1e-6)


def judge_result(run):
    set_weights(run, inf)
    folders = ["model", "value_model"] if run.args.lora_r is None else ["model"]
    for model, folder in zip(run.models, folders):
        [file] = Path(run.args.output_dir, folder).glob("*.safetensors")
        written = load_file(file)
        stage = run.stages["result"]
        sizes = [sum(weight.numel() for weight in x) for x in (written.values(), trained(model))]
        stage.hold(f"{folder}/, weights", *sizes)
        for name, weight in model.state_dict().items():
            name = name.replace(".default.", ".")  # of adapters
            if name in written:  # Of tied weights, one is.
                apart = float((written[name] - weight).abs().max())
                where = f"{folder}/, from what the last step left, {name} is away"
                stage.hold(where, apart, 0.0)


JUDGES = {  # in the order of a run
    "prompts": judge_prompts,
    "sampling": judge_sampling,
    "scores": judge_scores,
    "reference": judge_reference,
    "mini-batches": judge_mini_batches,
    "optimizer": judge_optimizers,
    "steps": judge_steps,
    "schedule": judge_schedule,
    "evaluation": judge_evaluation,
    "result": judge_result,
}


# ========================================== the loss ==========================================
class Misstated(Exception):
    """What is wrong with the function of a loss."""


def load_loss(spec):
    """The function that FILE.py:FUNCTION names."""
    file, _, name = spec.rpartition(":")
    if not file:
        raise Misstated("it is FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise Misstated("there is no such file; it is FILE.py:FUNCTION")
    try:
        module = import_script(Path(file).resolve())
    except (Exception, SystemExit) as error:
        raise Misstated(f"importing it, {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Misstated(f"{Path(file).name} has no function of this name")
    try:
        inspect.signature(function).bind([], [], None)
    except TypeError:
        signature = inspect.signature(function)
        raise Misstated(f"it takes {signature}, and not (mini_batch, batch, args)") from None
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


def run_models(run, episodes, temperature, models=None):
    """Give episodes log-probabilities and values. Rows are padded on the right, where no token
    before the padding sees it."""
    policy, *others = models or run.models
    prompts = [run.tokenizer(episode.prompt)["input_ids"] for episode in episodes]
    rows = [torch.tensor([*prompt, *e.token_ids]) for prompt, e in zip(prompts, episodes)]
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logits = policy(rows).logits
    values = others[0](rows).logits if others else None
    for i, (prompt, episode) in enumerate(zip(prompts, episodes)):
        count = len(episode.token_ids)
        columns = slice(len(prompt) - 1, len(prompt) - 1 + count)  # A token's predictor.
        episode.log_p = (logits[i, columns] / temperature).log_softmax(-1)
        episode.logprobs = episode.log_p[range(count), episode.token_ids]
        if others:
            episode.values = values[i, columns].squeeze(-1)


def gradients(found, log, loss):
    """The gradients of a run beside those of a loss.

    Returns a row for each update and model, with its number, iteration, mini_batch, model, and what
    the loss returned. `its` is the gradient, and `stated` that of the loss.
    """
    run = understand(found, log)
    args = run.args
    kl_coef = args.kl_coef
    rows = []
    has_gradient = False
    for update in log.updates:
        if not update.models:  # PPO has dropped it.
            continue
        models = [noted for noted in update.models if noted[0] in run.models]
        for model, weights, _ in models:
            vector_to_parameters(weights, trained(model))
            model.zero_grad()
        args.kl_coef = run.metrics[update.iteration].get("objective/kl_coef", kl_coef)
        batch = list(map(make_episode, run.batches[update.iteration]))
        mini_batch = [batch[i] for i in update.episodes]
        run_models(run, mini_batch, args.temperature)
        losses, total = call_loss(loss, mini_batch, batch, args)
        has_gradient |= torch.as_tensor(total).requires_grad
        # The loss of no episode, where all are masked, has no gradient.
        (total + 0 * mini_batch[0].logprobs.sum()).backward()
        for model, weights, its in models:
            row = SimpleNamespace(number=update.number, iteration=update.iteration)
            row.mini_batch, row.model, row.losses = mini_batch, model, losses
            row.weights, row.its, row.stated = weights, its, gradient(model)
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
    """How often each case has come in which a stage could go wrong, and the iterations without a
    gradient."""
    args = run.args
    cases = Counter({"updates": 0, "updates with a gradient": 0})
    episodes = [row for batch in run.batches.values() for row in batch]
    cases["completions cut off"] = sum(not row["ended"] for row in episodes)
    if run.k > 1:
        scores = [row["score"] for row in episodes]
        groups = [scores[i : i + run.k] for i in range(0, len(scores), run.k)]
        missing = [group.count(None) for group in groups if len(group) - group.count(None) > 1]
        cases["episodes without a score, beside two with one"] = sum(missing)
        cases["groups of equal scores"] = sum(len({*group} - {None}) == 1 for group in groups)
    has_gradient = {}
    for update in run.log.updates:
        norm = torch.cat([torch.zeros(1), *(its for *_, its in update.models)]).norm()
        cases["updates"] += bool(update.models)
        cases["updates with a gradient"] += bool(norm > 0)
        has_gradient[update.iteration] = has_gradient.get(update.iteration, False) or norm > 0
        if args.max_grad_norm < inf:
            cases["gradients clipped"] += bool(norm > args.max_grad_norm)
    for row in rows:
        for episode in row.mini_batch:
            if row.model is run.models[0]:
                above, below = outside(episode, args)
                cases["ratios above the clip"] += int(above.sum())
                cases["ratios below the clip"] += int(below.sum())
            else:
                cases["values outside of the clip"] += int(values_outside(episode, args).sum())
    return cases, [iteration for iteration in has_gradient if not has_gradient[iteration]]


def likely_cause(run, row):
    """Which episodes of a mini-batch a wrong gradient comes from.

    A gradient is a sum over tokens: of the gradients of their log-probabilities, or of their
    values, with factors. So one that differs in some episodes alone differs by such a sum of these.
    """
    vector_to_parameters(row.weights, trained(row.model))
    run_models(run, row.mini_batch, run.args.temperature, None)
    by_episode = {}
    for episode in row.mini_batch:
        numbers = episode.logprobs if row.model is run.models[0] else episode.values
        vectors = [torch.autograd.grad(x, trained(row.model), retain_graph=True) for x in numbers]
        by_episode[episode.index] = torch.stack([*map(parameters_to_vector, vectors)])
    kinds = defaultdict(list)
    for episode in row.mini_batch:
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
        if len(episodes) < len(row.mini_batch) and explain(by_episode, episodes, difference):
            right.append(kind)
    if right:
        return f"Only episodes differ that are {', or '.join(right)}"
    if explain(by_episode, by_episode, difference):
        return "Episodes of all kinds differ"
    return "No log-probability of a sampled token makes the difference; is it an entropy?"


def explain(by_episode, episodes, difference):
    """Whether a sum of the gradients of these episodes' tokens makes a difference of gradients."""
    directions, _ = torch.linalg.qr(torch.cat([by_episode[i] for i in episodes]).T)
    rest = difference - directions @ (directions.T @ difference)
    return bool(rest.norm() < 0.05 * difference.norm())
