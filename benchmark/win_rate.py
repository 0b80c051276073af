"""How often a judge prefers one model's completions to another's, with a confidence interval.

    python benchmark/win_rate.py --model runs/mine/model --baseline benchmark/default/policy \\
        --judge exact_match
    python benchmark/win_rate.py --model runs/mine/model --baseline column:summary \\
        --dataset held_out.jsonl --response-length 53 --judge judge.py:better

Both models complete the same held-out prompts, as the scripts sample. Half of the pairs are shown
in the other order. So a judge that only likes a position gives 50 %. The win rate in each order is
printed, too.

The judge is called once, by keywords. It gets `prompts`, `first` and `second`, which are the
completions in the order shown, and a list for each other column. A completion is a text, or a list
of messages if the prompt of the row is one. For each pair the judge returns 0 if the first is
better, 1 if the second is better, and 0.5 or None for a tie:

    def better(first, second, **_):  # the shorter one
        return [0.5 if len(a) == len(b) else int(len(b) < len(a)) for a, b in zip(first, second)]

A tie counts half. The interval is Wilson's at 95 %. Ties make it wider than necessary, but never
too narrow. Every pair is written to `--output`. It uses a GPU if there is one.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rloo


@dataclass
class Args:
    model: str  # the model whose wins are counted, with its tokenizer: a folder or Hub name
    baseline: str  # the model it is compared with, or column:NAME of the dataset
    judge: str  # FILE.py:FUNCTION, package.module:FUNCTION, or exact_match (of the row's `answer`)
    dataset: str = str(rloo.DEFAULT / "eval.jsonl")  # held-out prompts, .jsonl or NAME:SPLIT
    num_prompts: int | None = None  # only the first so many; None: all
    response_length: int = 8  # longest completion, in tokens, its EOS included
    temperature: float = 0.0  # of sampling; 0 takes the most likely token
    batch_size: int = 64  # completions sampled at once; changes memory, never the result
    seed: int = 1  # of sampling, and of which pairs are swapped
    output: Path = Path("runs/win_rate.jsonl")  # every pair and its verdict


def exact_match(first: list, second: list, answer: list, **_) -> list[float]:
    """The judge of that name: the completion that is the row's `answer`. A tie where both or none
    are."""
    a = rloo.exact_match(first, answer)
    b = rloo.exact_match(second, answer)
    return [0.5 + (y - x) / 2 for x, y in zip(a, b)]


def load_prompts(args: Args, tokenizer) -> list:
    prompts = rloo.load_prompts(rloo.Args(), args.dataset, "none", tokenizer)
    return prompts[: args.num_prompts]


def complete(
    language_model, tokenizer, prompts: list, uniforms, temperature=1.0, at_once=2**20
) -> tuple:
    """Complete prompts as the scripts do -> the tokens of each completion, and which ones ended.

    uniforms: [prompts, length], the random numbers; at_once: how many are sampled together
    """
    eos_ids = rloo.find_eos_ids(language_model, tokenizer, None)
    language_model.can_share_prompts = True
    language_model.step_fault = "rows may have any length"
    model = rloo.CompletionModel(language_model, tokenizer, eos_ids, rloo.Args())
    token_ids = []
    ended = []
    for i in range(0, len(prompts), at_once):
        some = slice(i, i + at_once)
        rows = torch.from_numpy(uniforms[some]).to(language_model.device)
        tokens = rloo.pad_left(prompts[some]).to(rows.device)
        batch = rloo.sample(model, tokens, rows, temperature)
        for row in batch["tokens"].tolist():
            token_ids.append([token for token in row if token >= 0])
        ended += batch["ended"].tolist()
    return token_ids, ended


def sample(args: Args, path: str, index: int) -> tuple[list[str], float]:
    """A completion of every prompt, and the share that ended. index: of the random numbers"""
    tokenizer = AutoTokenizer.from_pretrained(path)
    rloo.start_accelerator(rloo.Args())
    if (Path(path) / "adapter_config.json").exists():  # with the base model that the adapters name
        language_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        language_model = language_model.to(rloo.accelerator.device)
    else:
        language_model = rloo.load_model(path, "float32", positions=0)
    prompts = [prompt.token_ids for prompt in load_prompts(args, tokenizer)]
    rng = rloo.keyed_rng(args.seed, rloo.EVALUATION, index)
    uniforms = rng.random((len(prompts), args.response_length))
    token_ids, ended = complete(
        language_model, tokenizer, prompts, uniforms, args.temperature, args.batch_size
    )
    shown = map(partial(rloo.without_end, tokenizer), token_ids, ended)
    texts = tokenizer.batch_decode(list(shown))
    return texts, float(np.mean(ended))


def as_message(row: dict, text):
    """As in the scripts, the completion of messages is a message."""
    if isinstance(row["prompt"], list) and isinstance(text, str):
        return [{"role": "assistant", "content": text}]
    return text


def judge_pairs(
    judge, rows: list[dict], completions: list, baselines: list, seed: int
) -> list[dict]:
    """Show every pair to the judge, half of them swapped.

    Returns for each pair its texts, the model's place, and its win.
    """
    count = len(rows)
    rng = rloo.keyed_rng(seed, rloo.PROMPT_ORDER, 0)
    swapped = rng.permutation(count) < count // 2
    shown = []
    for pair, swap in zip(zip(completions, baselines), swapped):
        if swap:
            pair = pair[::-1]
        shown.append(pair)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["prompts"] = columns.pop("prompt")
    for i, place in enumerate(("first", "second")):
        columns[place] = [as_message(row, pair[i]) for row, pair in zip(rows, shown)]
    verdicts = judge(**columns)
    if len(verdicts) != count:
        raise ValueError(f"the judge returned {len(verdicts)} verdicts for {count} pairs")
    pairs = []
    for i, verdict in enumerate(verdicts):
        prompt = rows[i]["prompt"]
        if verdict not in (0, 0.5, 1, None):
            first, second = shown[i]
            pair = f"pair {i}, {first!r} and {second!r} for {prompt!r}"
            expected = "0, 1, or for a tie 0.5 or None"
            raise ValueError(f"{pair}: the judge said {verdict!r}, not {expected}")
        win = 0.5 if verdict is None else float(verdict)
        place = "second"
        if not swapped[i]:
            win = 1 - win
            place = "first"
        pair = dict(pair=i, prompt=prompt, model=completions[i], baseline=baselines[i])
        pairs.append(pair | dict(model_shown=place, win=win))
    return pairs


def interval(win_rate: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a mean of `count` numbers from 0 to 1.

    Their variance is at most p (1 - p), which it is where none is a tie. The interval holds all p
    that are less than z standard errors of their own from the mean.
    """
    z = 1.959964
    scale = 1 + z**2 / count
    center = (win_rate + z**2 / (2 * count)) / scale
    variance = win_rate * (1 - win_rate) / count
    half = z / scale * (variance + z**2 / (4 * count**2)) ** 0.5
    low = max(0.0, center - half)
    high = min(1.0, center + half)
    return min(win_rate, low), max(win_rate, high)  # whatever rounding does


def main(args: Args) -> tuple[float, float, float]:
    """Sample, judge, print and write -> the win rate and its interval."""
    rloo.transformers.utils.logging.disable_progress_bar()
    judge = exact_match
    if args.judge != "exact_match":
        judge = rloo.load_reward(args.judge)
    prompts = load_prompts(args, AutoTokenizer.from_pretrained(args.model))
    rows = [prompt.row for prompt in prompts]
    is_column = args.baseline.startswith("column:")
    column = args.baseline.removeprefix("column:")
    if is_column and column not in rows[0]:
        columns = ", ".join(rows[0])
        raise ValueError(f"--baseline {args.baseline}: the columns of {args.dataset} are {columns}")
    completions, share = sample(args, args.model, 0)
    ended = f"{100 * share:.0f} % of the model's completions ended"
    if is_column:
        baselines = [row[column] for row in rows]
    else:
        baselines, share = sample(args, args.baseline, 1)
        ended += f", of the baseline's {100 * share:.0f} %"
    pairs = judge_pairs(judge, rows, completions, baselines, args.seed)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with open(args.output, "w", encoding="utf-8") as file:
        for pair in pairs:
            file.write(json.dumps(pair, ensure_ascii=False) + "\n")

    wins = np.array([pair["win"] for pair in pairs])
    rate = wins.mean()
    low, high = interval(rate, len(wins))
    print(f"{args.model} against {args.baseline}, {len(wins):,} pairs:")
    print(
        f"win rate {100 * rate:.1f} %, 95 % interval {100 * low:.1f} to {100 * high:.1f} %; ",
        end="",
    )
    print(f"{(wins == 1).sum()} won, {(wins == 0.5).sum()} tied, {(wins == 0).sum()} lost")
    for place in ("first", "second"):
        at_place = [pair["win"] for pair in pairs if pair["model_shown"] == place]
        print(f"shown {place}: {100 * np.mean(at_place):.1f} % of {len(at_place)}", end="; ")
    print(f"{ended}; pairs in {args.output}")
    return float(rate), low, high


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
