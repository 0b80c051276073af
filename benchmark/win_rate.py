"""How often a judge prefers one model's completions to another's, with a confidence interval.

    python rloo.py --model-path A --dataset D.jsonl --eval-dataset D.jsonl --reward none \\
        --eval-temperature 1 --total-episodes 0 --save-rollouts --output-dir runs/a
    python rloo.py --model-path B ... --seed 2 --output-dir runs/b
    python benchmark/win_rate.py --model runs/a --baseline runs/b --judge judge.py:better

The last evaluations of two runs are compared, which may also be runs that train. At a temperature
above 0 they need two seeds, so that their completions are independent.

Half of the pairs are shown in the other order. So a judge that only likes a position gives 50 %.
The win rate in each order is printed, too.

The judge is called once, by keywords. It gets `prompts`, as --model read them, `first` and
`second`, which are the completions in the order shown, and a list for each other column of the
dataset. For each pair it returns 0 if the first is better, 1 if the second is better, and 0.5 or
None for a tie:

    def better(first, second, **_):  # the shorter one
        return [0.5 if len(a) == len(b) else int(len(b) < len(a)) for a, b in zip(first, second)]

A tie counts half. The interval is Wilson's at 95 %. Ties make it wider than necessary, but never
too narrow. Every pair is written to `--output`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent))
from run import column, having, import_script, read_rows, write_rows

rloo = import_script("rloo")


@dataclass
class Args:
    model: Path  # the run whose wins are counted: its --output-dir
    baseline: str  # the run it is compared with, or column:NAME of the dataset
    judge: str  # FILE.py:FUNCTION or package.module:FUNCTION
    seed: int = 1  # of which pairs are swapped
    output: Path = Path("runs/win_rate.jsonl")  # every pair and its verdict


def last_evaluation(folder):
    files = sorted(Path(folder).glob("rollouts/eval_*.jsonl"))
    if not files:
        raise SystemExit(f"{folder}: its run needs --save-rollouts and an --eval-dataset")
    return read_rows(files[-1])


def baseline_of(args, rows):
    """What is compared with the completions of these rows."""
    if args.baseline.startswith("column:"):
        name = args.baseline.removeprefix("column:")
        return [row["columns"][name] for row in rows]
    others = last_evaluation(args.baseline)
    for name in ("row", "columns"):
        if column(rows, name) != column(others, name):
            raise SystemExit(f"{args.model} and {args.baseline} were evaluated on other rows")
    return column(others, "completion")


def judge_pairs(judge, rows, baselines, seed):
    """Show every pair to the judge, half of them swapped.

    rows: those of the model. Returns for each pair its texts, the model's place, and its win.
    """
    count = len(rows)
    rng = rloo.keyed_rng(seed, rloo.PROMPT_ORDER, 0)
    swapped = rng.permutation(count) < count // 2
    pairs = zip(column(rows, "completion"), baselines)
    first, second = zip(*(pair[::-1] if swap else pair for pair, swap in zip(pairs, swapped)))
    columns = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]}
    verdicts = judge(prompts=column(rows, "prompt"), first=first, second=second, **columns)
    if len(verdicts) != count:
        raise ValueError(f"the judge returned {len(verdicts)} verdicts for {count} pairs")
    pairs = []
    for i, verdict in enumerate(verdicts):
        prompt = rows[i]["prompt"]
        if verdict not in (0, 0.5, 1, None):
            raise ValueError(
                f"pair {i}, {first[i]!r} and {second[i]!r} for {prompt!r}: the judge said"
                f" {verdict!r}, not 0, 1, or for a tie 0.5 or None"
            )
        win = 0.5 if verdict is None else float(verdict)
        place = "second"
        if not swapped[i]:
            win = 1 - win
            place = "first"
        pair = dict(pair=i, prompt=prompt, model=rows[i]["completion"], baseline=baselines[i])
        pairs.append(pair | dict(model_shown=place, win=win))
    return pairs


def interval(win_rate, count):
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


def main(args):
    """Judge, print and write -> the win rate and its interval."""
    judge = rloo.load_reward(args.judge)
    rows = last_evaluation(args.model)
    pairs = judge_pairs(judge, rows, baseline_of(args, rows), args.seed)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_rows(args.output, pairs)

    wins = np.array(column(pairs, "win"))
    rate = wins.mean()
    low, high = interval(rate, len(wins))
    print(f"{args.model} against {args.baseline}, {len(wins):,} pairs in {args.output}:")
    print(f"win rate {100 * rate:.1f} %, 95 % interval {100 * low:.1f} to {100 * high:.1f} %")
    print(f"{(wins == 1).sum()} won, {(wins == 0.5).sum()} tied, {(wins == 0).sum()} lost")
    for place in ("first", "second"):
        at_place = column(having(pairs, model_shown=place), "win")
        print(f"shown {place}: {100 * np.mean(at_place):.1f} % of {len(at_place)}")
    return float(rate), low, high


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
