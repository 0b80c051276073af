"""The floor of benchmark/throughput/throughput.py: the bare model's passes for one step, with nothing around them.

    python benchmark/throughput/floor_worker.py JOB.json RESULT.json

All rows of the batch are as long as the longest one, and every prompt is repeated k times. A step has these passes:

    one prefill, and one decoding step for each further token
    one forward pass of the reference, where there is one
    one forward and backward pass of the log-probabilities of the completion's tokens
    one step of AdamW

PPO also has a value model, of the size of the policy. It makes a forward pass for the old values. Each of its updates
makes a forward and backward pass of both models, and a step. There is no sampling, no mask, no score and no metric.
This is a limit for programs that compute every padded token. A program that computes fewer tokens can be faster.
"""

import itertools
import json
import sys
import time
from pathlib import Path

import torch
from tally_worker import read_kilobytes
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache


def completion_logprobs(model, tokens: torch.Tensor, completion_tokens: int) -> torch.Tensor:
    """Log-probabilities of the last tokens of every row, [rows, completion_tokens]."""
    logits = model(tokens[:, :-1], logits_to_keep=completion_tokens, use_cache=False).logits.float()
    targets = tokens[:, -completion_tokens:, None]
    return torch.log_softmax(logits, dim=-1).gather(-1, targets).squeeze(-1)


def completion_values(trunk, tokens: torch.Tensor, completion_tokens: int) -> torch.Tensor:
    """A value for each of the last tokens of every row, [rows, completion_tokens]; a mean stands for the head."""
    return trunk(tokens[:, :-1], use_cache=False).last_hidden_state[:, -completion_tokens:].mean(-1)


def main(job: dict) -> dict:
    """Seconds of every part of a step, once for each repeat, and the memory of it all."""
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    if job["kl_coef"] > 0:
        reference = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    is_ppo, parameters = job["algorithm"] == "ppo", list(model.parameters())
    if is_ppo:
        trunk = AutoModel.from_pretrained(job["model"], dtype=torch.float32)
        parameters += trunk.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=job["learning_rate"])
    prompt_tokens, completion_tokens = job["longest_prompt"], job["longest_completion"]
    tokens = torch.randint(model.config.vocab_size, (job["batch"], prompt_tokens + completion_tokens))
    steps = []
    for _ in range(job["steps"]):
        moments = [time.perf_counter()]
        with torch.autocast("cpu", torch.bfloat16, enabled=job["dtype"] == "bfloat16"):
            with torch.no_grad():
                cache, new_tokens = DynamicCache(config=model.config), tokens[:, :prompt_tokens]
                for t in range(completion_tokens):
                    model(new_tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                    new_tokens = tokens[:, prompt_tokens + t, None]
                del cache
                moments.append(time.perf_counter())
                for micro_batch in tokens.split(job["micro_batch"]):
                    if job["kl_coef"] > 0:
                        completion_logprobs(reference, micro_batch, completion_tokens)
                    if is_ppo:
                        completion_values(trunk, micro_batch, completion_tokens)
                moments.append(time.perf_counter())
        step = dict(zip(("generation", "logprobs"), (end - begin for begin, end in itertools.pairwise(moments))))
        step |= dict(train=0.0, optimizer=0.0)
        for _ in range(job.get("updates", 1)):
            started = time.perf_counter()
            for micro_batch in tokens.split(job["micro_batch"]):
                with torch.autocast("cpu", torch.bfloat16, enabled=job["dtype"] == "bfloat16"):
                    loss = completion_logprobs(model, micro_batch, completion_tokens).mean()
                    if is_ppo:
                        loss = loss + completion_values(trunk, micro_batch, completion_tokens).mean()
                loss.backward()
            step["train"] += time.perf_counter() - started
            started = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            step["optimizer"] += time.perf_counter() - started
        steps.append(step | dict(seconds=sum(step.values())))
    return dict(steps=steps, peak_gib=read_kilobytes("VmHWM") / 2**20)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
