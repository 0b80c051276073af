"""A reward model with a tokenizer of its own, as a reward function:

    REWARD_MODEL=your/model python rloo.py --reward benchmark/reward_model.py:score

It reads what such models are trained on: a text in its own tokens, and a chat as its own template
shows it. Both decide how a text ends, so the score knows nothing of a completion that was cut off.
--reward-model-path takes a model that has the policy's tokenizer. It reads the policy's tokens.
"""

import os

import accelerate
import torch
import transformers

path = os.environ["REWARD_MODEL"]  # a classifier with one label: a folder, or a Hub name
tokenizer = transformers.AutoTokenizer.from_pretrained(path)
model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
    path, num_labels=1, output_loading_info=True
)
if info["missing_keys"]:  # They would be random.
    raise ValueError(f"REWARD_MODEL: {path} lacks weights: {info['missing_keys']}")
model.to(accelerate.PartialState().device)


@torch.no_grad()
def score(prompts, completions, **_):
    """The model's score of each prompt with its completion, texts or lists of messages.

    It reads one at a time: there is no padding, and equal texts get equal scores.
    """
    scores = []
    for prompt, completion in zip(prompts, completions):
        if isinstance(prompt, str):
            inputs = tokenizer(prompt + completion)
        else:
            inputs = tokenizer.apply_chat_template(prompt + completion, return_dict=True)
        tokens = torch.tensor([inputs["input_ids"]], device=model.device)
        scores.append(model(tokens).logits.item())
    return scores
