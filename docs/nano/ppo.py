"""PPO in one short program: `python docs/nano/ppo.py` makes the run of `python ppo.py`.

It is for reading, and for small models: it checks nothing. docs/nano/README.md has the rest.
"""

import json
from copy import deepcopy

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

model_path = "benchmark/default/policy"
dataset = "benchmark/default/train.jsonl"
eval_dataset = "benchmark/default/eval.jsonl"
seed = 1
batch_size = 64  # episodes of one iteration
response_length = 8  # token limit of a completion
cliprange = 0.2  # clips the ratio to 1 - this .. 1 + this
num_train_epochs = 4  # passes over the prompts of the dataset
num_ppo_epochs = 2  # passes over the batch of each iteration
learning_rate = 5e-5  # of the first step; it falls linearly to 0
gamma = 1.0  # discount of rewards, for each token
lam = 0.95  # lambda of generalized advantage estimation
cliprange_value = 0.2  # clips a value to the old one - this .. + this
vf_coef = 0.1  # weight of the value loss
kl_coef = 0.01  # weight of the KL to the reference
# torch.set_default_device("cuda")  # with a GPU


def score(completions, rows):
    return torch.tensor([float(c.strip() == row["answer"]) for c, row in zip(completions, rows)])


# In all rows of tokens, -1 means that there is no token: before a prompt, after a completion.
def forward(model, rows):
    """The logits at each column, [rows, columns, vocabulary]."""
    mask = (rows >= 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # Padding on the left does not count.
    return model(rows.clamp(min=0), attention_mask=mask, position_ids=positions).logits


def token_logprobs(model, prompts, tokens):
    """Log-probability of each completion token, [episodes, response]. It is 0 after the end."""
    rows = torch.cat([prompts, tokens[:, :-1]], dim=1)  # Nothing follows the last token.
    log_p = forward(model, rows)[:, prompts.shape[1] - 1 :].log_softmax(-1)  # of the next token
    return log_p.gather(-1, tokens.clamp(min=0)[:, :, None]).squeeze(-1) * (tokens >= 0)


def token_values(prompts, tokens):
    """Value of each completion token, read at the one before: [episodes, response]."""
    rows = torch.cat([prompts, tokens[:, :-1]], dim=1)
    return forward(value_model, rows)[:, prompts.shape[1] - 1 :].squeeze(-1) * (tokens >= 0)


@torch.no_grad()
def sample(rows, uniforms=None):
    """Complete each prompt. uniforms: [episodes, response]; None: take the most likely tokens."""
    prompts = [torch.tensor(tokenizer(row["prompt"]).input_ids) for row in rows]
    prompts = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")
    tokens = prompts[:, :0]  # [episodes, tokens so far]
    for t in range(response_length):
        ended = torch.isin(tokens, eos_ids).any(1)  # [episodes]; the EOS is part of a completion
        if ended.all():
            break
        logits = forward(policy, torch.cat([prompts, tokens], dim=1))
        p = logits[:, -1].softmax(-1)  # [episodes, vocabulary]
        picked = p.argmax(-1)  # [episodes]
        if uniforms is not None:  # the first token whose cumulative probability is above its dart
            cumulative = p.cumsum(-1, dtype=torch.double)
            darts = uniforms[:, t, None] * cumulative[:, -1:]  # times 1, up to rounding
            picked = (cumulative <= darts).sum(-1)
        tokens = torch.cat([tokens, picked.where(~ended, -1)[:, None]], dim=1)
    texts = []
    for last, y in zip(prompts[:, -1:], tokens):  # After another token, no first space is lost.
        text = tokenizer.decode(torch.cat([last, y[~torch.isin(y, hidden)]]))
        texts.append(text.removeprefix(tokenizer.decode(last)))
    return prompts, tokens, texts


def evaluate():
    *_, completions = sample(held_out)
    print(f"held-out score {score(completions, held_out).mean():.3f}")


train_rows = [json.loads(line) for line in open(dataset, "rb")]
held_out = [json.loads(line) for line in open(eval_dataset, "rb")]
stream = []  # the prompts of the whole run: each epoch is a permutation
for epoch in range(num_train_epochs):
    order = np.random.default_rng([seed, 1, epoch]).permutation(len(train_rows))  # 1: for prompts
    stream += [train_rows[i] for i in order]
batches = [stream[i : i + batch_size] for i in range(0, len(stream), batch_size)]

tokenizer = AutoTokenizer.from_pretrained(model_path)
policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)  # in eval mode
eos_ids = {*np.ravel(policy.generation_config.eos_token_id), tokenizer.eos_token_id} - {None}
hidden = [i for i in eos_ids if not tokenizer.decode(i, skip_special_tokens=True)]
hidden = torch.tensor([-1, *hidden])  # A special token that ends a text is not shown in it.
eos_ids = torch.tensor([*eos_ids])  # one or several
reference = deepcopy(policy)  # It is not trained.
value_model = deepcopy(policy)  # It gets a new head of one output, which begins at 0.
value_model.set_output_embeddings(torch.nn.Linear(policy.config.hidden_size, 1))
for weight in value_model.get_output_embeddings().parameters():
    torch.nn.init.zeros_(weight)
trained = [*policy.parameters(), *value_model.parameters()]
optimizer = torch.optim.AdamW(trained, learning_rate, weight_decay=0.0)
scheduler = get_scheduler("linear", optimizer, 0, len(batches) * num_ppo_epochs)

evaluate()
for iteration, rows in enumerate(batches, start=1):
    # ---- rollout: sample a completion of each drawn prompt
    uniforms = np.random.default_rng([seed, 2, iteration]).random((len(rows), response_length))
    prompts, tokens, completions = sample(rows, torch.tensor(uniforms))

    # ---- score
    scores = score(completions, rows)  # [episodes]
    with torch.no_grad():  # sample() knew old_logprobs. Computing them again is less code.
        old_logprobs = token_logprobs(policy, prompts, tokens)  # [episodes, response]
        ref_logprobs = token_logprobs(reference, prompts, tokens)
        old_values = token_values(prompts, tokens)

    # ---- advantages
    is_token = tokens >= 0  # [episodes, response]
    rewards = -kl_coef * (old_logprobs - ref_logprobs)  # [episodes, response]
    rewards[range(len(rows)), is_token.sum(1) - 1] += scores  # at the last token
    next_values = torch.nn.functional.pad(old_values[:, 1:], (0, 1))  # 0 after the last token
    advantages = rewards + gamma * next_values - old_values  # so far only delta_t
    for t in reversed(range(tokens.shape[1] - 1)):
        advantages[:, t] += gamma * lam * advantages[:, t + 1]
    returns = advantages + old_values
    real = advantages[is_token]  # [tokens]
    advantages = (advantages - real.mean()) / (real.var(correction=0) + 1e-8).sqrt()  # whitened

    # ---- optimize
    for ppo_epoch in range(num_ppo_epochs):
        logprobs = token_logprobs(policy, prompts, tokens)
        # In the first PPO epoch the ratio is 1. Only its gradient counts: that of the logprobs.
        ratio = (logprobs - old_logprobs).exp()  # [episodes, response]
        clipped = ratio.clamp(1 - cliprange, 1 + cliprange)
        losses = torch.maximum(-advantages * ratio, -advantages * clipped)
        values = token_values(prompts, tokens)
        clipped = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
        errors = torch.maximum((values - returns).square(), (clipped - returns).square())
        loss = (losses + vf_coef / 2 * errors)[is_token].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, max_norm=1.0)
        optimizer.step()
        scheduler.step()
    print(f"iteration {iteration} of {len(batches)}: score {scores.mean():.3f}")
evaluate()
policy.save_pretrained("runs/nano_ppo")
