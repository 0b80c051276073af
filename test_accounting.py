"""The specification of the counts: episodes, iterations, steps, epochs, and the schedule.

    pytest test_accounting.py              # the fast tests
    pytest test_accounting.py -m slow      # more runs, and runs on several processes

Start with the worked cases. You can check each of them by hand. Then episodes are counted one by
one, like cards, and the counts are compared. Then real runs must train on exactly the planned
episodes, in exactly the planned steps.

Every script in this folder is tested, also your copy of one (cp grpo.py mine.py).
tests/conftest.py has the helpers:

    script                    one of the scripts, as a module
    group_flag(script)        the script's name for the group size k; None in PPO, where k is 1
    make_args(script, ..)     script.Args(..), with `k` under the script's name for it; PPO takes
                              no k
    run(script, **flags)      runs script.main in this process, with a tiny model. Returns its Args,
                              the rows of metrics.jsonl, and the output folder. Flags that are not
                              given are those of base_flags(world): 7 prompts, k = 3, a batch of 12,
                              one update for each batch.
    updates                   a list; every optimizer step adds an entry, with its learning rate
    dataset=n                 a file with the n different prompts of make_prompts(n)
    read_rollouts(folder)     the rows that --save-rollouts wrote
    record_calls(.., name)    a list; every call of the function adds an entry with its inputs and
                              its result
    elsewhere(script, n, ..)  runs it here, and as a program on n processes: both must be the same
"""

import math
import random
import typing
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import conftest
import torch
import transformers
import yaml
from conftest import (
    EVERYTHING,
    MODULES,
    base_flags,
    group_flag,
    make_args,
    make_prompts,
    read_rollouts,
    record_calls,
)
from pytest import approx, fixture, mark

# Tests take these as arguments. pytest finds them only under their own names in this file.
run = conftest.run
world = conftest.world
elsewhere = conftest.elsewhere
updates = conftest.updates


@fixture(params=MODULES)
def script(request):
    return MODULES[request.param]


# ===================================== 1  worked cases ======================================
# Each case has what is given, and every count that follows from it. What a case does not say stands
# in GIVEN and COUNTS. world_size is the number of processes.
# PPO samples one completion of each prompt. So the cases with k = 1 are for PPO, and the others for
# the other scripts.
GIVEN = dict(
    num_train_epochs=1.0,
    num_mini_batches=1,
    num_ppo_epochs=1,
    per_device_train_batch_size=64,
    world_size=1,
)
COUNTS = dict(epochs=1.0, warmup_steps=0, gradient_accumulation_steps=1)
WORKED_CASES = yaml.safe_load("""
# 490 prompts * 2 = 980 episodes. 980 / 4 = 245 iterations, and each is one step.
bug report, k = 2:
  given: {num_prompts: 490, k: 2, batch_size: 4}
  counts: {prompts: 490, episodes: 980, prompts_per_iteration: 2, mini_batch_size: 4,
           iterations: 245, last_batch_size: 4, steps: 245}
# 490 prompts * 4 = 1960 episodes. 1960 / 4 = 490 iterations, and each is one step.
bug report, k = 4:
  given: {num_prompts: 490, k: 4, batch_size: 4}
  counts: {prompts: 490, episodes: 1960, prompts_per_iteration: 1, mini_batch_size: 4,
           iterations: 490, last_batch_size: 4, steps: 490}
# 490 episodes = 122 iterations * 4 + 2. The other 2 are one more iteration, number 123.
bug report, PPO:
  given: {num_prompts: 490, k: 1, batch_size: 4}
  counts: {prompts: 490, episodes: 490, prompts_per_iteration: 4, mini_batch_size: 4,
           iterations: 123, last_batch_size: 2, steps: 123}
# 490 prompts * 4 = 1960 episodes = 30 iterations * 64 + 40. The last iteration has 40 episodes.
# 0.1 * 31 = 3.1 steps of warm-up are rounded up: 4 steps.
a share of warm-up:
  given: {num_prompts: 490, k: 4, batch_size: 64, warmup_steps: 0.1}
  counts: {prompts: 490, episodes: 1960, prompts_per_iteration: 16, mini_batch_size: 64,
           iterations: 31, last_batch_size: 40, steps: 31, warmup_steps: 4}
# 5 * 2 = 10 episodes = 8 + 2. Each mini-batch has one episode: 8 steps, then 2 steps.
few episodes left:
  given: {num_prompts: 5, k: 2, batch_size: 8, num_mini_batches: 8}
  counts: {prompts: 5, episodes: 10, prompts_per_iteration: 4, mini_batch_size: 1,
           iterations: 2, last_batch_size: 2, steps: 10}
# 0.25 * 10 = 2.5 prompts. A half is rounded up: 3 prompts * 4 = 12 episodes = 8 + 4.
a quarter of an epoch:
  given: {num_prompts: 10, k: 4, num_train_epochs: 0.25, batch_size: 8}
  counts: {prompts: 3, episodes: 12, prompts_per_iteration: 2, mini_batch_size: 8,
           iterations: 2, last_batch_size: 4, steps: 2, epochs: 0.3}
# 0.01 * 10 = 0.1 prompts would be rounded to 0. A run has at least one prompt.
almost nothing, PPO:
  given: {num_prompts: 10, k: 1, num_train_epochs: 0.01, batch_size: 8}
  counts: {prompts: 1, episodes: 1, prompts_per_iteration: 8, mini_batch_size: 8,
           iterations: 1, last_batch_size: 1, steps: 1, epochs: 0.1}
# 3 * 4 = 12 episodes are one iteration. A whole batch takes 64 / 16 = 4 passes.
fewer prompts than a batch:
  given: {num_prompts: 3, k: 4, batch_size: 64, per_device_train_batch_size: 16}
  counts: {prompts: 3, episodes: 12, prompts_per_iteration: 16, mini_batch_size: 64,
           iterations: 1, last_batch_size: 12, steps: 1, gradient_accumulation_steps: 4}
# 10 episodes = 8 + 2. They make 4 and 2 mini-batches: 2 * (4 + 2) = 12 steps.
several PPO epochs, PPO:
  given: {num_prompts: 10, k: 1, batch_size: 8, num_mini_batches: 4, num_ppo_epochs: 2}
  counts: {prompts: 10, episodes: 10, prompts_per_iteration: 8, mini_batch_size: 2,
           iterations: 2, last_batch_size: 2, steps: 12}
# 1000 / 3 = 333.3, so it has 334 groups: 334 * 3 = 1002 episodes = 20 * 48 + 42.
a number of episodes:
  given: {num_prompts: 100, k: 3, total_episodes: 1000, batch_size: 48}
  counts: {prompts: 334, episodes: 1002, prompts_per_iteration: 16, mini_batch_size: 48,
           iterations: 21, last_batch_size: 42, steps: 21, epochs: 3.34}
# 10 * 2 = 20 episodes = 10 + 10. The processes get 4, 3 and 3 of 10. 4 take 2 passes of 3.
three processes:
  given: {num_prompts: 10, k: 2, batch_size: 10, world_size: 3, per_device_train_batch_size: 3}
  counts: {prompts: 10, episodes: 20, prompts_per_iteration: 5, mini_batch_size: 10,
           iterations: 2, last_batch_size: 10, steps: 2, gradient_accumulation_steps: 2}
# 0 episodes need no prompt, no iteration and no step.
only an evaluation:
  given: {num_prompts: 10, k: 2, total_episodes: 0, batch_size: 8}
  counts: {prompts: 0, episodes: 0, prompts_per_iteration: 4, mini_batch_size: 8,
           iterations: 0, last_batch_size: 0, steps: 0, epochs: 0.0}
""")


def test_worked_cases(script):
    """The script computes exactly the counts of the table. So does the count with cards below.

    Bugs: trl#2515, #2433, #2516 (wrong counts)."""
    for case, worked in WORKED_CASES.items():
        flags = GIVEN | worked["given"]
        if (flags["k"] == 1) == (group_flag(script) is None):
            num_prompts = flags.pop("num_prompts")
            world_size = flags.pop("world_size")
            args = make_args(script, **flags)
            computed = vars(script.batch_arithmetic(args, num_prompts, world_size))
            assert computed == COUNTS | worked["counts"], case
            assert count_with_cards(args, num_prompts, world_size) == computed, case


# ================================== 2  counting with cards ==================================
def deal(cards, piles):
    """Deal so many cards to so many piles, one by one. Returns the size of each pile."""
    sizes = [0] * piles
    for card in range(cards):
        sizes[card % piles] += 1
    return sizes


def count_iterations(args, num_prompts):
    """The episodes and steps of each iteration, counted one by one: [(episodes, steps), ...]."""
    prompts = 0
    if args.total_episodes is None:
        while prompts + 0.5 <= args.num_train_epochs * num_prompts:
            prompts += 1
        prompts = max(prompts, 1)
    else:
        while prompts * args.k < args.total_episodes:
            prompts += 1
    batches = []
    for _ in range(prompts):
        if not batches or batches[-1] == args.batch_size:
            batches.append(0)
        batches[-1] += args.k
    iterations = []
    for episodes in batches:
        mini_batches = deal(episodes, args.num_mini_batches)
        steps = args.num_ppo_epochs * (len(mini_batches) - mini_batches.count(0))
        iterations.append((episodes, steps))
    return iterations


def count_with_cards(args, num_prompts, world_size):
    """Every count of `batch_arithmetic`, from episodes and steps that were counted one by one."""
    iterations = count_iterations(args, num_prompts)
    episodes = sum(episodes for episodes, _ in iterations)
    mini_batch_size = max(deal(args.batch_size, args.num_mini_batches))
    process_share = max(deal(mini_batch_size, world_size))
    steps = sum(steps for _, steps in iterations)
    warmup = args.warmup_steps * steps if args.warmup_steps < 1 else args.warmup_steps
    warmup_steps = 0
    while warmup_steps < warmup:
        warmup_steps += 1
    return dict(
        prompts=episodes // args.k,
        episodes=episodes,
        prompts_per_iteration=args.batch_size // args.k,
        mini_batch_size=mini_batch_size,
        iterations=len(iterations),
        last_batch_size=iterations[-1][0] if iterations else 0,
        steps=steps,
        warmup_steps=warmup_steps,
        epochs=episodes / args.k / num_prompts,
        gradient_accumulation_steps=math.ceil(process_share / args.per_device_train_batch_size),
    )


def test_batch_arithmetic_equals_dealing_cards(script):
    """The formulas give what counting one by one gives, in 400 random cases of odd sizes.

    Bug: trl 1.16 drops prompts that do not fill a batch."""
    draw = random.Random(0).choice
    for _ in range(400):
        k = draw([2, 3, 4, 5, 7])
        num_mini_batches = draw([1, 1, 2, 3, 4, 8])
        flags = dict(
            k=k,
            num_mini_batches=num_mini_batches,
            num_ppo_epochs=draw([1, 1, 2, 4]),
            batch_size=math.lcm(k, num_mini_batches) * draw([1, 2, 3, 5]),
            per_device_train_batch_size=draw([1, 2, 3, 5, 64]),
            num_train_epochs=draw([1.0, 2.0, 3.0, 0.5, 1.5, 0.01, 2.25, 1 / 3]),
            total_episodes=draw([None, None, 0, 1, 17, 100, 999]),
            warmup_steps=draw([0, 3, 0.1, 1 / 3, 0.99]),
        )
        num_prompts = draw([1, 2, 5, 7, 17, 100, 490])
        world_size = draw(range(1, 9))
        args = make_args(script, **flags)
        counts = vars(script.batch_arithmetic(args, num_prompts, world_size))
        assert counts == count_with_cards(args, num_prompts, world_size), (flags, num_prompts)


# ======================================= 3  real runs =======================================
def check_run(args, metrics, output_dir, num_prompts):
    """Compare what a run wrote with the count one by one. Returns the number of steps."""
    step = 0
    episode = 0
    positions = []
    iterations = count_iterations(args, num_prompts)
    for row, (episodes, steps) in zip(metrics, iterations, strict=True):
        step += steps
        episode += episodes
        assert (row["step"], row["episode"]) == (step, episode)
        assert row["epoch"] == approx(episode / args.k / num_prompts)
        positions += [(row["iteration"], index) for index in range(episodes)]
    rollouts = read_rollouts(output_dir)
    assert [(row["iteration"], row["index"]) for row in rollouts] == positions
    groups = [row["prompt"] for row in rollouts[:: args.k]]
    # The k episodes of a group are neighbours.
    for i, row in enumerate(rollouts):
        assert row["prompt"] == groups[i // args.k]
    # Every prompt is drawn once in each whole epoch, and some prompts are drawn once more.
    whole_epochs, rest = divmod(len(groups), num_prompts)
    drawn = [groups.count(prompt) for prompt in make_prompts(num_prompts)]
    assert drawn.count(whole_epochs + 1) == rest
    assert drawn.count(whole_epochs) == num_prompts - rest
    return step


# The flags of each run. The dataset is the number of its prompts.
REAL_RUNS = yaml.safe_load("""
smaller last iteration:
  {dataset: 7, k: 3, batch_size: 6, num_mini_batches: 2, num_ppo_epochs: 2, num_train_epochs: 2.0}
batch larger than dataset:
  {dataset: 5, k: 2, batch_size: 32, num_mini_batches: 4, num_train_epochs: 8.0}
fewer than mini-batches:
  {dataset: 7, k: 2, batch_size: 8, num_mini_batches: 8, num_ppo_epochs: 3, total_episodes: 9}
""")


@mark.parametrize("case", REAL_RUNS)
def test_real_runs_train_on_exactly_what_was_asked(script, run, monkeypatch, updates, case):
    """The run makes the planned steps, and each episode takes exactly one training pass in each PPO
    epoch.

    Bug: trl#2531 (too few steps, ratios never written)."""
    flags = REAL_RUNS[case]
    calls = record_calls(monkeypatch, script, "token_logprobs")
    # With this reward no advantage is 0. An episode with advantage 0 may take no pass.
    args, metrics, output_dir = run(script, reward="squares", **flags)
    assert len(updates) == check_run(args, metrics, output_dir, flags["dataset"])
    passes = Counter()
    for call in calls:
        if call.training:  # not a pass of the reference, or of the check at the start
            *_, batch, episodes = call.args
            for i in episodes.tolist():
                passes[batch.prompts[i].text, batch.completions[i]] += 1
    expected = Counter()
    for row in read_rollouts(output_dir):
        expected[row["prompt"], row["completion"]] += args.num_ppo_epochs
    assert passes == expected


# ========================= 4  prompts, mini-batches, micro-batches ==========================
def test_an_epoch_is_a_permutation(script):
    """Each epoch has every prompt once, in a new order. It does not matter where the iterations
    divide the epochs."""
    stream = script.draw_prompts(1, 7, 0, 70)  # ten epochs of 7 prompts
    orders = set()
    for first in range(0, 70, 7):
        epoch = stream[first : first + 7]
        assert sorted(epoch) == list(range(7))
        orders.add(str(epoch))
    assert len(orders) > 5
    for count in (1, 5, 14):  # prompts of an iteration
        drawn = []
        for first in range(0, 70, count):
            drawn += script.draw_prompts(1, 7, first, count)
        assert drawn == stream
    assert script.draw_prompts(2, 7, 0, 70) != stream  # another seed


def test_mini_batches_are_near_equal_and_keep_groups(script):
    """The mini-batches of a PPO epoch have every episode once. The k episodes of a group stay
    neighbours. There is a new order in each iteration and each PPO epoch."""
    for episodes, k, count in ((12, 3, 4), (10, 2, 4), (8, 4, 3), (6, 3, 8)):
        args = make_args(script, k=k, num_mini_batches=count, batch_size=math.lcm(k, count))
        mini_batches = script.draw_mini_batches(args, 1, 0, episodes)
        sizes = [len(mini_batch) for mini_batch in mini_batches]
        assert sorted(sizes) == sorted(deal(episodes, count))[-len(sizes) :]
        groups = torch.cat(mini_batches).view(-1, args.k).tolist()
        assert sorted(groups) == torch.arange(episodes).view(-1, args.k).tolist()
    args = make_args(script, k=2, batch_size=24)
    orders = set()
    for iteration, ppo_epoch in ((1, 0), (1, 1), (2, 0), (2, 1)):
        orders.add(str(script.draw_mini_batches(args, iteration, ppo_epoch, 24)))
    assert len(orders) == 4


def test_processes_share_every_episode_once(script, monkeypatch):
    """Each episode counts once, on any number of processes. All make the same number of passes,
    which the plan says."""
    for count, processes, size in ((12, 1, 5), (12, 5, 2), (7, 3, 64), (13, 2, 3), (1, 8, 1)):
        args = make_args(
            script, k=2, num_mini_batches=2, batch_size=2 * count, per_device_train_batch_size=size
        )
        plan = script.batch_arithmetic(args, 9, processes)
        episodes = torch.randperm(count)
        lengths = torch.randint(1, 30, (count,))
        times_counted = Counter()
        for rank in range(processes):
            process = SimpleNamespace(num_processes=processes, process_index=rank, device="cpu")
            monkeypatch.setattr(script, "accelerator", process, raising=False)
            passes = list(script.micro_batches(episodes, lengths, size))
            assert len(passes) == plan.gradient_accumulation_steps
            for number, (chosen, is_real, is_last) in enumerate(passes, start=1):
                assert len(chosen) <= size
                assert is_last == (number == len(passes))
                # A repeated episode, which is not real, does not count.
                times_counted.update(chosen[is_real].tolist())
        assert times_counted == Counter(episodes.tolist())


# ===================================== 5  the schedule ======================================
def schedule_rates(name, learning_rate, warmup_steps, steps):
    """The learning rate of each update in a schedule over exactly `steps`, and the value at which
    it stands then."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate)
    scheduler = transformers.get_scheduler(name, optimizer, warmup_steps, steps)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates, scheduler.get_last_lr()[0]


@mark.parametrize("schedule", typing.get_args(next(iter(MODULES.values())).Schedule))
def test_schedule_is_transformers_own_over_exactly_the_steps(
    script, run, monkeypatch, updates, schedule
):
    """Every update has its own rate of the schedule. The log has the last rate of an iteration."""
    calls = record_calls(monkeypatch, transformers, "get_scheduler")
    asked = {"constant": 0, "linear": 0.2}.get(schedule, 3)
    flags = dict(
        batch_size=6,
        num_mini_batches=2,
        num_ppo_epochs=2,
        response_length=1,
        lr_scheduler_type=schedule,
        warmup_steps=asked,
        kl_coef=0.0,
    )
    args, metrics, _ = run(script, **flags)
    steps = metrics[-1]["step"]
    warmup_steps = math.ceil(asked * steps) if asked < 1 else asked
    rates, final = schedule_rates(schedule, args.learning_rate, warmup_steps, steps)
    assert [update.lr for update in updates] == approx(rates, rel=1e-9)
    for row in metrics:
        assert row["lr"] == approx(rates[row["step"] - 1], rel=1e-9)
    at_the_end = calls[0].result.get_last_lr()[0]
    assert at_the_end == approx(final, rel=1e-9, abs=1e-15)


# =================================== 6  several processes ===================================
@mark.slow
@mark.parametrize("name", MODULES)
def test_processes_change_no_count(name, elsewhere):
    """A run on several processes has the completions, metrics and weights of the run on one. Here
    they divide neither 5 prompts nor mini-batches of 3 nor 6.

    Bugs: accelerate#2926, LLaMA-Factory#424 (a schedule steps once per process)."""
    script = MODULES[name]
    processes = 3 if name == "rloo" else 2
    flags = dict(
        batch_size=6,
        num_mini_batches=2,
        num_ppo_epochs=2,
        num_train_epochs=3.0,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        kl_coef=0.1,
        learning_rate=1e-3,
        dataset=5,
        eval_dataset=3,
    )
    ran, printed = elsewhere(script, processes, **flags | EVERYTHING.get(name, {}))
    assert f"\n{processes} x cpu (DDP), float32, " in printed
    # The first row is the evaluation before training.
    before, *metrics = ran.metrics
    assert (before["step"], before["episode"], before["epoch"]) == (0, 0, 0)
    args = replace(ran.args, per_device_train_batch_size=1)
    plan = vars(script.batch_arithmetic(args, 5, processes))
    assert plan["steps"] == check_run(args, metrics, ran.folder, 5)
    assert yaml.safe_dump(plan, sort_keys=False) in printed


# ======================================== 7  --plan =========================================
def test_plan_is_yaml_and_that_of_the_run(script, run, world, monkeypatch, capsys, tmp_path):
    """--plan prints every count, as YAML, for any number of processes. A run prints the same."""
    flags = dict(
        num_mini_batches=2,
        num_ppo_epochs=3,
        per_device_train_batch_size=2,
        output_dir=tmp_path / "out",
    )
    flags = base_flags(world, flags)
    for processes in (3, 1):
        args = make_args(script, **flags, plan=processes)
        with monkeypatch.context() as patch:
            patch.setattr(script, "load_model", None)  # --plan loads no model.
            script.main(args)
        printed = capsys.readouterr().out
        assert yaml.safe_load(printed) == count_with_cards(args, 7, processes)
    assert not (tmp_path / "out").exists()
    run(script, **flags)
    assert printed in capsys.readouterr().out
