"""The specification of the counts: episodes, iterations, steps, epochs, schedule points, on any sizes and processes.

    pytest test_accounting.py

Every script in this folder is tested that has `Args` and `batch_arithmetic`, a copy of one (cp grpo.py mine.py) like
the three: a run trains on exactly the episodes that were asked for, rounded up to whole groups; the progress bar ends
at its total; the schedule has as many points as there are steps; and `--plan` has said so before. What else is tested
is in tests/, with the helpers in tests/conftest.py.
"""

import math
import random
import re
import typing
from collections import Counter
from types import SimpleNamespace

import conftest
import pytest
import torch
import transformers
import yaml
from conftest import MODULES, base_flags, compare_runs, encode, group_flag, launch, make_args, make_prompts, read_jsonl

run, world, updates = conftest.run, conftest.world, conftest.updates  # fixtures


@pytest.fixture(params=MODULES)
def script(request):
    return MODULES[request.param]


# ============================================ the arithmetic =============================================
def deal(k, num_prompts, batch_size, num_mini_batches, num_ppo_epochs, num_train_epochs, total_episodes):
    """A run's counts by dealing cards, one prompt at a time -> [(episodes, steps) of each iteration]."""
    prompts = 0
    if total_episodes is None:
        while prompts + 0.5 <= num_train_epochs * num_prompts:
            prompts += 1
        prompts = max(prompts, 1)
    else:
        while prompts * k < total_episodes:
            prompts += 1
    hands, hand = [], 0
    for _ in range(prompts):
        hand += k
        if hand == batch_size:
            hands.append(hand)
            hand = 0
    hands += [hand] if hand else []
    iterations = []
    for hand in hands:
        piles = deal_out(hand, num_mini_batches)
        iterations.append((hand, num_ppo_epochs * sum(pile > 0 for pile in piles)))
    return iterations


def deal_out(cards, piles):
    """Cards dealt one by one to so many piles -> the size of each."""
    sizes = [0] * piles
    for card in range(cards):
        sizes[card % piles] += 1
    return sizes


def planned(args, num_prompts):
    """What `deal` says of a run's flags."""
    names = "k batch_size num_mini_batches num_ppo_epochs num_train_epochs total_episodes".split()
    return deal(num_prompts=num_prompts, **{name: getattr(args, name) for name in names})


def random_config(rng):
    """Flags of odd sizes: batches that do not divide the dataset, that are larger than it, fractions of an epoch."""
    k, num_mini_batches = rng.choice([2, 3, 4, 5, 7]), rng.choice([1, 1, 2, 3, 4, 8])
    flags = dict(k=k, num_mini_batches=num_mini_batches, num_ppo_epochs=rng.choice([1, 1, 2, 4]))
    flags["batch_size"] = math.lcm(k, num_mini_batches) * rng.choice([1, 2, 3, 5])
    flags["per_device_train_batch_size"] = rng.choice([1, 2, 3, 5, 64])
    flags["num_train_epochs"] = rng.choice([1.0, 2.0, 3.0, 0.5, 1.5, 0.01, 2.25, 1 / 3])
    flags["total_episodes"] = rng.choice([None, None, 1, 17, 100, 999])
    return flags, rng.choice([1, 2, 5, 7, 17, 100, 490]), rng.randint(1, 8)


def test_batch_arithmetic_equals_dealing_cards(script):
    """Every count of 400 odd configurations is what dealing the cards one by one gives."""
    rng = random.Random(0)
    for _ in range(400):
        flags, num_prompts, world_size = random_config(rng)
        args = make_args(script, **flags)
        plan = script.batch_arithmetic(args, num_prompts, world_size)
        iterations = planned(args, num_prompts)
        episodes, steps = (sum(counts) for counts in zip(*iterations))
        largest_mini_batch = max(deal_out(args.batch_size, args.num_mini_batches))
        largest_share = max(deal_out(largest_mini_batch, world_size))
        expected = dict(
            prompts=episodes // args.k,
            episodes=episodes,
            prompts_per_iteration=len(range(0, args.batch_size, args.k)),
            mini_batch_size=largest_mini_batch,
            iterations=len(iterations),
            last_batch_size=iterations[-1][0],
            steps=steps,
            epochs=episodes / args.k / num_prompts,
            gradient_accumulation_steps=len(range(0, largest_share, args.per_device_train_batch_size)),
        )
        assert vars(plan) == expected, (flags, num_prompts, world_size)


def test_what_doubles_what(script):
    """Doubling k doubles episodes; doubling PPO epochs or mini-batches doubles steps; nothing else changes either."""

    def counts(world_size=1, **changes):
        flags = dict(k=4, batch_size=48, num_mini_batches=2, num_ppo_epochs=3, num_train_epochs=2.0)
        plan = script.batch_arithmetic(make_args(script, **flags | changes), 120, world_size)
        return plan.episodes, plan.steps

    episodes, steps = counts()
    if group_flag(script):
        assert counts(k=8) == (2 * episodes, 2 * steps)
    assert counts(num_ppo_epochs=6) == (episodes, 2 * steps)
    assert counts(num_mini_batches=4) == (episodes, 2 * steps)
    assert counts(num_train_epochs=4.0) == (2 * episodes, 2 * steps)
    for world_size in (2, 3, 64):
        assert counts(world_size) == (episodes, steps)
    for size in (1, 3, 1000):
        assert counts(per_device_train_batch_size=size, per_device_rollout_batch_size=size) == (episodes, steps)


REFUSED = {
    "a part of a mini-batch": ("--batch-size", dict(batch_size=18, num_mini_batches=4)),
    "a part of a group": ("--batch-size", dict(batch_size=13)),
    "no batch": ("--batch-size", dict(batch_size=0)),
    "no mini-batch": ("--num-mini-batches", dict(num_mini_batches=0)),
    "no PPO epoch": ("--num-ppo-epochs", dict(num_ppo_epochs=0)),
    "no epoch": ("--num-train-epochs", dict(num_train_epochs=0.0)),
    "less than no epoch": ("--num-train-epochs", dict(num_train_epochs=-0.5)),
    "epochs without end": ("--num-train-epochs", dict(num_train_epochs=math.inf)),
    "epochs that are no number": ("--num-train-epochs", dict(num_train_epochs=math.nan)),
    "no episode": ("--total-episodes", dict(total_episodes=0)),
    "no micro-batch": ("--per-device-train-batch-size", dict(per_device_train_batch_size=0)),
    "no rollout": ("--per-device-rollout-batch-size", dict(per_device_rollout_batch_size=-3)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_cannot_be_are_refused(script, case):
    """Nothing is rounded in silence: such flags are refused, by name, where they are made."""
    flag, sizes = REFUSED[case]
    if case == "a part of a group" and not group_flag(script):
        pytest.skip("a group is one episode")
    with pytest.raises(ValueError, match=f"{flag} must"):
        make_args(script, **dict(k=3, batch_size=12) | sizes)


# ========================================== what a run trains on =========================================
@pytest.mark.parametrize("k", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_bug_report(script, run, world, monkeypatch, k):
    """490 prompts, micro-batch 4, batch 4, one epoch: 490 k episodes in their exact steps, epoch and bar end at 1."""
    if not group_flag(script):
        if k > 2:
            pytest.skip("a group is one episode")
        k = 1
    bars = []

    class Bar(script.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr(script, "tqdm", Bar)
    sizes = dict(k=k, batch_size=4, per_device_train_batch_size=4, num_train_epochs=1.0)
    small = dict(model_path=world.smallest, response_length=1, kl_coef=0.0)  # hundreds of iterations
    _, metrics, output_dir = run(script, dataset=world.dataset(490), **small, **sizes)
    episodes, steps = {1: (490, 123), 2: (980, 245), 4: (1960, 490)}[k]
    plan = yaml.safe_load((output_dir / "plan.yaml").read_text())
    assert (plan["episodes"], plan["steps"], plan["epochs"]) == (episodes, steps, 1)
    last = metrics[-1]
    assert (last["iteration"], last["step"], last["episode"], last["epoch"]) == (steps, steps, episodes, 1)
    assert len(metrics) == steps
    assert len(read_jsonl(output_dir / "rollouts.jsonl")) == episodes
    assert [(bar.total, bar.n) for bar in bars] == [(steps, steps)]


def episode_of(prompt_ids, token_ids):
    return tuple(prompt_ids), tuple(token_ids)


def record_passes(script, monkeypatch):
    """The episodes of every training pass of a run -> a list, filled as it runs: (iteration, prompt, tokens)."""
    passes, iteration, forward = [], 0, script.CompletionModel.forward

    def recorded(self, method, *inputs):
        nonlocal iteration
        iteration += method.__name__ == "sample"  # all of an iteration at once
        if torch.is_grad_enabled() and method.__name__ != "sample":
            prompts, tokens, mask, _ = inputs
            rows = [row[row_mask].tolist() for row, row_mask in zip(tokens, mask)]
            passes.extend((iteration, *episode_of(*episode)) for episode in zip(prompts, rows))
        return forward(self, method, *inputs)

    monkeypatch.setattr(script.CompletionModel, "forward", recorded)
    return passes


def check_run(args, metrics, output_dir, num_prompts):
    """The lines of metrics.jsonl and rollouts.jsonl hold what the flags asked for, dealt card by card -> the steps."""
    step = episode = 0
    iterations = planned(args, num_prompts)
    for row, (episodes, steps) in zip(metrics, iterations, strict=True):
        step, episode = step + steps, episode + episodes
        assert (row["step"], row["episode"]) == (step, episode)
        assert row["epoch"] == pytest.approx(episode / args.k / num_prompts)
    rollouts = read_jsonl(output_dir / "rollouts.jsonl")
    positions = [(i, j) for i, (episodes, _) in enumerate(iterations, start=1) for j in range(episodes)]
    assert [(row["iteration"], row["index"]) for row in rollouts] == positions
    used = Counter(row["prompt"] for row in rollouts)
    whole, rest = divmod(episode // args.k, num_prompts)
    times = [args.k * (whole + 1)] * rest + [args.k * whole] * (num_prompts - rest)
    assert sorted((used[prompt] for prompt in make_prompts(num_prompts)), reverse=True) == times
    assert used.total() == episode
    for position in range(0, len(rollouts), args.k):
        assert len({row["prompt"] for row in rollouts[position : position + args.k]}) == 1  # groups side by side
    return step


REAL_RUNS = {
    "leftovers": (7, dict(k=3, batch_size=6, num_mini_batches=2, num_ppo_epochs=2, num_train_epochs=2.0)),
    "one-group-left": (7, dict(k=2, batch_size=4, num_train_epochs=1.0, per_device_train_batch_size=3)),
    "batch-over-dataset": (5, dict(k=2, batch_size=32, num_mini_batches=4, num_train_epochs=8.0)),
    "fraction": (7, dict(k=5, batch_size=15, num_mini_batches=3, num_train_epochs=1.5)),
    "fewer-than-mini-batches": (7, dict(k=2, batch_size=8, num_mini_batches=8, num_ppo_epochs=3, total_episodes=9)),
}


@pytest.mark.parametrize("config", REAL_RUNS)
def test_real_runs_train_on_exactly_what_was_asked(script, run, world, monkeypatch, updates, config):
    """Each prompt is used exactly `epochs` times, each episode trained on exactly num_ppo_epochs times."""
    num_prompts, flags = REAL_RUNS[config]
    passes = record_passes(script, monkeypatch)
    reward = world.reward("squares")  # no advantage is 0: such an episode may take no pass
    args, metrics, output_dir = run(script, dataset=world.dataset(num_prompts), reward=reward, **flags)
    assert len(updates) == check_run(args, metrics, output_dir, num_prompts)
    expected = Counter()
    for row in read_jsonl(output_dir / "rollouts.jsonl"):
        expected[row["iteration"], *episode_of(encode(row["prompt"]), row["token_ids"])] += args.num_ppo_epochs
    assert Counter(passes) == expected


@pytest.mark.slow
def test_random_configurations_run_as_planned(script, run, world, updates):
    """Twenty random configurations as real runs, with leftovers of every kind."""
    rng = random.Random(1)
    for _ in range(20):
        flags, num_prompts, _ = random_config(rng)
        num_prompts = min(num_prompts, 17)
        if flags["total_episodes"] is not None:
            flags["total_episodes"] = min(flags["total_episodes"], 50)
        updates.clear()
        args, metrics, output_dir = run(script, dataset=world.dataset(num_prompts), response_length=2, **flags)
        assert len(updates) == check_run(args, metrics, output_dir, num_prompts), flags


# ==================================== prompts, mini-batches, micro-batches ===============================
def test_an_epoch_is_a_permutation(script):
    """The endless stream of prompts is a new permutation every epoch, wherever an iteration cuts it."""
    stream = script.draw_prompts(1, 7, 0, 70)
    epochs = [stream[i : i + 7] for i in range(0, 70, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 5
    for count in (1, 5, 16):
        cut = [p for first in range(0, 80, count) for p in script.draw_prompts(1, 7, first, count)]
        assert cut[:70] == stream
    assert script.draw_prompts(2, 7, 0, 70) != stream


def test_mini_batches_are_near_equal_and_keep_groups(script):
    """A PPO epoch's mini-batches hold every episode once, in near-equal sizes, groups whole where sizes allow."""
    for num_episodes, k, count in ((12, 3, 2), (12, 3, 4), (10, 2, 4), (8, 4, 3), (6, 3, 8), (2, 2, 1)):
        args = make_args(script, k=k, num_mini_batches=count, batch_size=math.lcm(k, count))
        pieces = [piece.tolist() for piece in script.draw_mini_batches(args, 1, 0, num_episodes)]
        order = [i for piece in pieces for i in piece]
        assert sorted(order) == list(range(num_episodes))
        assert sorted(map(len, pieces)) == sorted(size for size in deal_out(num_episodes, count) if size)
        for i in range(0, num_episodes, args.k):
            assert order[i : i + args.k] == list(range(order[i], order[i] + args.k))
            assert order[i] % args.k == 0
    args = make_args(script, k=2, batch_size=24)
    orders = {str(script.draw_mini_batches(args, i, e, 24)) for i in range(3) for e in range(3)}
    assert len(orders) == 9  # a fresh order in each iteration and each PPO epoch


def test_processes_share_every_episode_once(script):
    """Whatever the number of processes and the micro-batch: each episode has weight 1 once, all make as many passes, of
    near-equal sizes, and no more than the plan says; what is repeated has weight 0."""
    for count, world_size, size in ((12, 1, 5), (12, 5, 2), (7, 3, 64), (2, 3, 1), (13, 2, 3), (1, 8, 1)):
        episodes, lengths = torch.randperm(count) + 100, torch.randint(1, 30, (count + 100,))
        shares, weighed = [], Counter()
        for rank in range(world_size):
            process = SimpleNamespace(num_processes=world_size, process_index=rank, device="cpu")
            share = script.micro_batches(process, episodes, lengths, size)
            assert [is_last for *_, is_last in share] == [False] * (len(share) - 1) + [True]
            sizes = [len(indices) for indices, *_ in share]
            assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
            in_order = [int(lengths[i]) for indices, *_ in share for i in indices]
            assert in_order == sorted(in_order)
            shares.append(sizes)
            for indices, weights, _ in share:
                assert set(weights.tolist()) <= {0.0, 1.0} and len(indices) == len(weights)
                weighed.update(dict.fromkeys(indices[weights > 0].tolist(), 1))
        assert weighed == Counter(episodes.tolist())
        assert all(sizes == shares[0] for sizes in shares)
        args = make_args(script, k=2, batch_size=2 * count, num_mini_batches=2, per_device_train_batch_size=size)
        assert len(shares[0]) == script.batch_arithmetic(args, 100, world_size).gradient_accumulation_steps


# =============================================== schedule ================================================
ANY_SCRIPT = next(iter(MODULES.values()))
SCHEDULES = typing.get_args(typing.get_type_hints(ANY_SCRIPT.Args)["lr_scheduler_type"])


def curve(name, learning_rate, warmup_steps, steps, get_scheduler=transformers.get_scheduler):
    """transformers' own schedule over exactly `steps`: the rates of the updates, and the value it stands at after."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=steps)
    rates = []
    for _ in range(steps + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates[:-1], rates[-1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_is_transformers_own_over_exactly_the_steps(script, run, monkeypatch, updates, schedule):
    """Every update uses its rate of the curve, the log has the iteration's last one, the end is the final value."""
    made, warmup_steps = (
        conftest.record_calls(monkeypatch, transformers, "get_scheduler"),
        0 if schedule == "constant" else 3,
    )
    sizes = dict(batch_size=6, k=3, num_mini_batches=2, num_ppo_epochs=2, num_train_epochs=1.0)
    flags = dict(lr_scheduler_type=schedule, warmup_steps=warmup_steps, response_length=1, kl_coef=0.0)
    args, metrics, _ = run(script, **flags, **sizes)
    rates, final = curve(schedule, args.learning_rate, warmup_steps, metrics[-1]["step"])
    assert [update.lr for update in updates] == pytest.approx(rates, rel=1e-9)
    assert [row["lr"] for row in metrics] == pytest.approx([rates[row["step"] - 1] for row in metrics], rel=1e-9)
    assert made[0].result.get_last_lr()[0] == pytest.approx(final, rel=1e-9, abs=1e-15)
    if schedule == "cosine":
        assert all(after <= before for before, after in zip(rates[3:], rates[4:]))
        assert metrics[-1]["lr"] == min(row["lr"] for row in metrics)
        assert final == pytest.approx(0, abs=1e-12)


# =============================================== processes ===============================================
UNEVEN = dict(batch_size=6, num_mini_batches=2, num_ppo_epochs=2, num_train_epochs=3.0, warmup_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, processes", [*((name, 2) for name in MODULES), *((x, 3) for x in conftest.SCRIPTS[:1])]
)
def test_processes_change_no_count(script, run, world, tmp_path, processes):
    """Several processes make the steps, use the rates and ask for the scores of one, and are the run of one, with sizes
    that none divides: 5 prompts, mini-batches of 3, an epoch's end within an iteration. There really are several."""
    script = MODULES[script]
    sizes = UNEVEN | dict(dataset=world.dataset(5), eval_dataset=world.dataset(3, seed=4), lr_scheduler_type="cosine")
    flags = base_flags(world) | sizes | dict(reward=f"{tmp_path / 'probe.py'}:probe", per_device_train_batch_size=1)
    output_dir = tmp_path / "out"
    finished = launch(script, processes, tmp_path, flags | dict(output_dir=output_dir))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(f"{processes} x cpu, float32")

    args, (before, *metrics) = make_args(script, **flags), read_jsonl(output_dir / "metrics.jsonl")
    assert (before["step"], before["episode"], before["epoch"]) == (0, 0, 0)
    steps = check_run(args, metrics, output_dir, 5)
    plan = yaml.safe_load((output_dir / "plan.yaml").read_text())
    assert plan == vars(script.batch_arithmetic(args, 5, processes)) and plan["steps"] == steps

    calls = read_jsonl(tmp_path / "calls.jsonl")
    assert {(call["rank"], call["world_size"]) for call in calls} == {(str(i), processes) for i in range(processes)}
    assert {call["type"] for call in calls} == {"DistributedType.MULTI_CPU"}
    assert sum(call["count"] for call in calls) == plan["episodes"] + 2 * 3  # without repeats; evaluated twice

    rates, final = curve("cosine", args.learning_rate, 2, steps)
    assert [row["lr"] for row in metrics] == pytest.approx([rates[row["step"] - 1] for row in metrics], rel=1e-9)
    for rank in range(processes):
        assert float((tmp_path / f"last_lr_{rank}").read_text()) == pytest.approx(final, abs=1e-12)
    compare_runs(run(script, **sizes)[2], output_dir)


# ================================================= --plan ================================================
def test_plan_is_yaml_and_that_of_the_run(script, run, world, monkeypatch, capsys, tmp_path):
    """--plan prints the YAML that the run keeps as plan.yaml, with every count and its formula, and loads no model."""
    flags = dict(num_mini_batches=2, num_ppo_epochs=3, num_train_epochs=1.5, per_device_train_batch_size=2)
    _, _, output_dir = run(script, **flags)
    assert (output_dir / "plan.yaml").read_text() in capsys.readouterr().out  # the run prints it, too
    printed = {}
    for world_size in (1, 3):
        flags |= dict(model_path="no/such/model", output_dir=str(tmp_path / "out"), plan=world_size)
        plan_args = make_args(script, **base_flags(world) | flags)
        monkeypatch.setattr(script, "load_model", None)
        script.main(plan_args)
        printed[world_size] = capsys.readouterr().out
        expected = vars(script.batch_arithmetic(plan_args, 7, world_size))
        assert yaml.safe_load(printed[world_size]) == expected
        for line in printed[world_size].splitlines():
            value, formula = re.fullmatch(r"\w+: +(\S+) +# .+ = (.+)", line.replace(": ", ":  ", 1)).groups()
            formula = re.sub(r"\b(floor|ceil)\b", r"math.\1", formula.split(", at least")[0])
            assert eval(formula) == pytest.approx(float(value)), line  # its numbers give the count
    assert printed[1] == (output_dir / "plan.yaml").read_text()
    assert printed[3] != printed[1]
    assert not (tmp_path / "out").exists()


def test_plan_of_long_and_fractional_counts_is_yaml(script):
    """Columns that are too narrow for a number still give one value a line."""
    args = make_args(script, k=2, batch_size=10**9, per_device_train_batch_size=1, total_episodes=10**9)
    plan = yaml.safe_load(script.plan_table(args, 7, 1))
    assert plan == vars(script.batch_arithmetic(args, 7, 1)) and plan["gradient_accumulation_steps"] == 10**9


def test_plan_counts_only_prompts_that_stay(script, run, world, capsys):
    """With --max-prompt-length the plan reads the tokenizer and counts what is left, as the run does."""
    limit = sorted(map(len, make_prompts(7)))[3]
    kept = sum(len(prompt) <= limit for prompt in make_prompts(7))
    script.main(make_args(script, **base_flags(world) | dict(plan=1, max_prompt_length=limit)))
    dropped, *lines = capsys.readouterr().out.splitlines()
    assert f"{7 - kept} of 7 prompts dropped" in dropped
    assert yaml.safe_load("\n".join(lines))["prompts"] == kept
    _, metrics, output_dir = run(script, max_prompt_length=limit, num_train_epochs=2.0)
    assert metrics[-1]["epoch"] == 2
    used = Counter(row["prompt"] for row in read_jsonl(output_dir / "rollouts.jsonl"))
    assert len(used) == kept and len(set(used.values())) == 1
