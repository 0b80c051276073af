"""Hold a run of a script, or of a copy, against a loss such as those of losses.py.

`record` notes the weights and the gradient of each update. `compare` reads what the run has
written. It lets the models of transformers compute the log-probabilities again, an episode at a
time, without padding, and autograd the gradient of the loss.
"""

from types import SimpleNamespace

import torch
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

# Rounding makes about 3e-6, and a bonus of 0.01 that counts padding 2e-3.
ALLOWED = 1e-4


def record(module, change=setattr):
    """From now on, the updates of a script's run are noted in the list that is returned.

    change: how an attribute is set. `monkeypatch.setattr` sets it for one test
    """
    updates = []
    models = []
    draw = module.draw_mini_batches
    prepare = Accelerator.prepare
    step = AcceleratedOptimizer.step

    def keep_models(accelerator, *objects):
        models.extend(thing for thing in objects if isinstance(thing, torch.nn.Module))
        return prepare(accelerator, *objects)

    def keep_episodes(args, iteration, *rest):
        for mini_batch in draw(args, iteration, *rest):
            update = SimpleNamespace(iteration=iteration, episodes=mini_batch.tolist(), models=[])
            updates.append(update)
            yield mini_batch

    def keep_weights(optimizer, *inputs):
        if not updates[-1].models:  # PPO makes two steps. Both gradients are there at the first.
            for model in models:
                weights = [weight.detach().clone() for weight in trained(model)]
                updates[-1].models.append((model, weights, gradient(model)))
        return step(optimizer, *inputs)

    change(module, "draw_mini_batches", keep_episodes)
    change(Accelerator, "prepare", keep_models)
    change(AcceleratedOptimizer, "step", keep_weights)
    return updates


def trained(model):
    return [weight for weight in model.parameters() if weight.requires_grad]


def gradient(model):
    """Of all weights, one after the other."""
    gradients = []
    for weight in trained(model):
        gradients.append(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    return torch.nn.utils.parameters_to_vector(gradients)


def make_episode(row):
    """What a loss gets of a row in rollouts/. `run_models` adds to it."""
    episode = SimpleNamespace(**row)
    episode.old_logprobs = torch.tensor(row["logprobs"])
    episode.ref_logprobs = row["ref_logprobs"] and torch.tensor(row["ref_logprobs"])
    episode.old_values = torch.tensor(row.get("values", []))
    episode.logprobs = episode.values = None
    return episode


def run_models(episode, args, tokenizer, policy, value_model=None):
    prompt = tokenizer(episode.prompt)["input_ids"]
    row = torch.tensor([prompt + episode.token_ids])
    columns = slice(len(prompt) - 1, -1)  # Before each token stands what predicts it.
    episode.log_p = (policy(row).logits[0, columns] / args.temperature).log_softmax(-1)
    episode.logprobs = episode.log_p[range(len(episode.token_ids)), episode.token_ids]
    if value_model:
        episode.values = value_model(row).logits[0, columns].squeeze(-1)


def compare(run, updates, loss):
    """The gradients of a run beside those of a loss. run: what `read_run` gives

    Returns a row for each update and model, with its number, iteration, mini_batch, model, and what
    the loss returned. `its` is the gradient, and `stated` that of the loss.
    """
    args = SimpleNamespace(**run["args"])
    metrics = {row["iteration"]: row for row in run["metrics"]}
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_path)
    rows = []
    for number, update in enumerate(updates, 1):
        if not update.models:  # PPO has dropped it.
            continue
        models = [model for model, *_ in update.models]
        for model, weights, _ in update.models:
            model.zero_grad()
            for weight, old in zip(trained(model), weights):
                weight.data = old
        args.kl_coef = metrics[update.iteration].get("objective/kl_coef", args.kl_coef)
        batch = [make_episode(r) for r in run["rollouts"] if r["iteration"] == update.iteration]
        mini_batch = [batch[i] for i in update.episodes]
        for episode in mini_batch:
            run_models(episode, args, tokenizer, *models)
        losses = loss(mini_batch, batch, args)
        total = sum(losses) if isinstance(losses, tuple) else losses
        # The loss of no episode, where all are masked, has no gradient.
        (total + 0 * episode.logprobs.sum()).backward()
        for model, _, its in update.models:
            row = SimpleNamespace(number=number, iteration=update.iteration, mini_batch=mini_batch)
            row.model, row.losses, row.its, row.stated = model, losses, its, gradient(model)
            rows.append(row)
    return rows


def judge(rows):
    """The greatest distance of two gradients by their size, and what is wrong first, or None.

    A gradient that is 0 up to rounding counts as a twentieth of the greatest.
    """
    distances = []
    for row in rows:
        largest = max(other.its.norm() for other in rows if other.model is row.model)
        size = max(row.its.norm(), 0.05 * largest)
        distances.append(float((row.its - row.stated).norm() / size))
        if not distances[-1] <= ALLOWED:
            length = row.its @ row.stated / (row.stated @ row.stated)
            about = "another direction"
            if length > 0 and (row.its - length * row.stated).norm() <= ALLOWED * size:
                about = f"the same direction, and {length:.3g} of the length: is it a denominator?"
            return distances[-1], (
                f"from update {row.number} on, in iteration {row.iteration}: the gradient of"
                f" {type(row.model).__name__} is {distances[-1]:.2g} away. It has {about}"
            )
    return max(distances), None
