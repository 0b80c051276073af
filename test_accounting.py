"""The specification of the counts: episodes, iterations, steps, epochs, and the points of the schedule.

    pytest test_accounting.py              # the fast tests
    pytest test_accounting.py -m slow      # more runs, and runs on several processes

Start with the worked cases. You can check each of them by hand. Then episodes are counted one by one, like cards, and
the counts are compared. Then real runs must train on exactly the planned episodes, in exactly the planned steps.

Every script in this folder is tested, also your copy of one (cp grpo.py mine.py). tests/conftest.py has the helpers:

    script                         one of the scripts, as a module
    group_flag(script)             the script's name for the group size k, such as "rloo_k"; None in PPO, where k is 1
    make_args(script, **flags)     script.Args(**flags), with `k` under the script's name for it; PPO takes no k
    run(script, **flags)           runs script.main in this process, with a tiny model. Returns its Args, the rows of
                                   metrics.jsonl, and the output folder. Flags that are not given are those of
                                   base_flags(world): 7 prompts, k = 3, a batch of 12, one update for each batch.
    updates                        a list; every optimizer step adds an entry, with its learning rate as `lr`
    world.dataset(n)               a file with the n different prompts of make_prompts(n)
    encode(text)                   the tokens of a text
    record_calls(.., owner, name)  a list; every call of owner.name adds an entry with its `args` and its `result`
    launch(script, n, folder, ..)  runs the script as a program, on n processes
"""

import math
import random
import typing
from collections import Counter
from types import SimpleNamespace

import conftest
import pytest
import torch
import transformers
import yaml
from conftest import MODULES, base_flags, compare_runs, encode, group_flag, launch, make_args, make_prompts, read_jsonl

# Tests take these as arguments. pytest finds them only under their own names in this file.
run, world, updates = conftest.run, conftest.world, conftest.updates


@pytest.fixture(params=MODULES)
def script(request):
    return MODULES[request.param]


# =========================================== 1  worked cases ============================================
# Each case has what is given, and every count that follows from it. Where they are not given, num_mini_batches,
# num_ppo_epochs and world_size (the number of processes) are 1, per_device_train_batch_size is 64, warmup_steps is 0.
# PPO samples one completion of each prompt. So the cases with k = 1 are for PPO, and the others for the other scripts.
# fmt: off
WORKED_CASES = {
    "bug report, k = 2": (  # 490 prompts * 2 = 980 episodes. 980 / 4 = 245 iterations, and each is one step.
        dict(num_prompts=490, k=2, num_train_epochs=1.0, batch_size=4, per_device_train_batch_size=4),
        dict(prompts=490, episodes=980, prompts_per_iteration=2, mini_batch_size=4, iterations=245,
             last_batch_size=4, steps=245, epochs=1.0, gradient_accumulation_steps=1)),
    "bug report, k = 4": (  # 490 prompts * 4 = 1960 episodes. 1960 / 4 = 490 iterations, and each is one step.
        dict(num_prompts=490, k=4, num_train_epochs=1.0, batch_size=4, per_device_train_batch_size=4),
        dict(prompts=490, episodes=1960, prompts_per_iteration=1, mini_batch_size=4, iterations=490,
             last_batch_size=4, steps=490, epochs=1.0, gradient_accumulation_steps=1)),
    "bug report, PPO": (  # 490 episodes = 122 iterations * 4 + 2. The other 2 are one more iteration, number 123.
        dict(num_prompts=490, k=1, num_train_epochs=1.0, batch_size=4, per_device_train_batch_size=4),
        dict(prompts=490, episodes=490, prompts_per_iteration=4, mini_batch_size=4, iterations=123,
             last_batch_size=2, steps=123, epochs=1.0, gradient_accumulation_steps=1)),
    "README": (  # 490 prompts * 4 = 1960 episodes = 30 iterations * 64 + 40. The last iteration has 40 episodes.
        dict(num_prompts=490, k=4, num_train_epochs=1.0, batch_size=64),
        dict(prompts=490, episodes=1960, prompts_per_iteration=16, mini_batch_size=64, iterations=31,
             last_batch_size=40, steps=31, epochs=1.0, gradient_accumulation_steps=1)),
    "two mini-batches": (  # 7 * 3 = 21 episodes = 12 + 9. The mini-batches have 6, 6, 5 and 4: these are 4 steps.
        dict(num_prompts=7, k=3, num_train_epochs=1.0, batch_size=12, num_mini_batches=2),
        dict(prompts=7, episodes=21, prompts_per_iteration=4, mini_batch_size=6, iterations=2,
             last_batch_size=9, steps=4, epochs=1.0, gradient_accumulation_steps=1)),
    "two mini-batches, PPO": (  # 7 episodes = 4 + 3. The mini-batches have 2, 2, 2 and 1: these are 4 steps.
        dict(num_prompts=7, k=1, num_train_epochs=1.0, batch_size=4, num_mini_batches=2),
        dict(prompts=7, episodes=7, prompts_per_iteration=4, mini_batch_size=2, iterations=2,
             last_batch_size=3, steps=4, epochs=1.0, gradient_accumulation_steps=1)),
    "few episodes left": (  # 5 * 2 = 10 episodes = 8 + 2. Each mini-batch has one episode: 8 steps, then 2 steps.
        dict(num_prompts=5, k=2, num_train_epochs=1.0, batch_size=8, num_mini_batches=8),
        dict(prompts=5, episodes=10, prompts_per_iteration=4, mini_batch_size=1, iterations=2,
             last_batch_size=2, steps=10, epochs=1.0, gradient_accumulation_steps=1)),
    "a quarter of an epoch": (  # 0.25 * 10 = 2.5 prompts. A half is rounded up: 3 prompts * 4 = 12 episodes = 8 + 4.
        dict(num_prompts=10, k=4, num_train_epochs=0.25, batch_size=8),
        dict(prompts=3, episodes=12, prompts_per_iteration=2, mini_batch_size=8, iterations=2,
             last_batch_size=4, steps=2, epochs=0.3, gradient_accumulation_steps=1)),
    "almost nothing, PPO": (  # 0.01 * 10 = 0.1 prompts would be rounded to 0. A run has at least one prompt.
        dict(num_prompts=10, k=1, num_train_epochs=0.01, batch_size=8),
        dict(prompts=1, episodes=1, prompts_per_iteration=8, mini_batch_size=8, iterations=1,
             last_batch_size=1, steps=1, epochs=0.1, gradient_accumulation_steps=1)),
    "fewer prompts than a batch": (  # 3 * 4 = 12 episodes are one iteration. A whole batch takes 64 / 16 = 4 passes.
        dict(num_prompts=3, k=4, num_train_epochs=1.0, batch_size=64, per_device_train_batch_size=16),
        dict(prompts=3, episodes=12, prompts_per_iteration=16, mini_batch_size=64, iterations=1,
             last_batch_size=12, steps=1, epochs=1.0, gradient_accumulation_steps=4)),
    "several PPO epochs": (  # 2 * 100 * 4 = 800 episodes. 800 / 40 = 20 iterations, each of 3 * 2 steps.
        dict(num_prompts=100, k=4, num_train_epochs=2.0, batch_size=40, num_mini_batches=2, num_ppo_epochs=3),
        dict(prompts=200, episodes=800, prompts_per_iteration=10, mini_batch_size=20, iterations=20,
             last_batch_size=40, steps=120, epochs=2.0, gradient_accumulation_steps=1)),
    "several PPO epochs, PPO": (  # 10 episodes = 8 + 2. They make 4 and 2 mini-batches: 2 * (4 + 2) = 12 steps.
        dict(num_prompts=10, k=1, num_train_epochs=1.0, batch_size=8, num_mini_batches=4, num_ppo_epochs=2),
        dict(prompts=10, episodes=10, prompts_per_iteration=8, mini_batch_size=2, iterations=2,
             last_batch_size=2, steps=12, epochs=1.0, gradient_accumulation_steps=1)),
    "a number of episodes": (  # 1000 / 3 = 333.3, so it has 334 groups: 334 * 3 = 1002 episodes = 20 * 48 + 42.
        dict(num_prompts=100, k=3, total_episodes=1000, batch_size=48),
        dict(prompts=334, episodes=1002, prompts_per_iteration=16, mini_batch_size=48, iterations=21,
             last_batch_size=42, steps=21, epochs=3.34, gradient_accumulation_steps=1)),
    "three processes": (  # 10 * 2 = 20 episodes = 10 + 10. The processes get 4, 3 and 3 of 10. 4 take 2 passes of 3.
        dict(num_prompts=10, k=2, num_train_epochs=1.0, batch_size=10, world_size=3, per_device_train_batch_size=3),
        dict(prompts=10, episodes=20, prompts_per_iteration=5, mini_batch_size=10, iterations=2,
             last_batch_size=10, steps=2, epochs=1.0, gradient_accumulation_steps=2)),
    "a share of warm-up": (  # 490 * 4 = 1960 episodes are 31 steps. 0.1 * 31 = 3.1 is rounded up: 4 steps.
        dict(num_prompts=490, k=4, num_train_epochs=1.0, batch_size=64, warmup_steps=0.1),
        dict(prompts=490, episodes=1960, prompts_per_iteration=16, mini_batch_size=64, iterations=31,
             last_batch_size=40, steps=31, warmup_steps=4, epochs=1.0, gradient_accumulation_steps=1)),
    "only an evaluation": (  # 0 episodes need no prompt, no iteration and no step.
        dict(num_prompts=10, k=2, total_episodes=0, batch_size=8),
        dict(prompts=0, episodes=0, prompts_per_iteration=4, mini_batch_size=8, iterations=0,
             last_batch_size=0, steps=0, epochs=0.0, gradient_accumulation_steps=1)),
}
# fmt: on


def script_and_case(beginning="", slow=None):
    """Parameters of a test: each script with each of its worked cases whose name has this beginning."""
    for name, script in MODULES.items():
        for case, (given, _) in WORKED_CASES.items():
            if case.startswith(beginning) and (given["k"] == 1) == (group_flag(script) is None):
                marks = [pytest.mark.slow] if case == slow else []
                yield pytest.param(script, case, id=f"{name}-{case}", marks=marks)


@pytest.mark.parametrize("script, case", script_and_case())
def test_worked_cases(script, case):
    """The script computes exactly the counts of the table. So does the count with cards below."""
    given, counts = WORKED_CASES[case]
    counts = dict(warmup_steps=0) | counts
    flags = dict(num_mini_batches=1, num_ppo_epochs=1, per_device_train_batch_size=64, world_size=1) | given
    num_prompts, world_size = flags.pop("num_prompts"), flags.pop("world_size")
    args = make_args(script, **flags)
    assert vars(script.batch_arithmetic(args, num_prompts, world_size)) == counts
    assert count_with_cards(args, num_prompts, world_size) == counts


# ========================================= 2  counting with cards =========================================
def deal(cards, piles):
    """Deal so many cards to so many piles, one by one. Returns the size of each pile."""
    sizes = [0] * piles
    for card in range(cards):
        sizes[card % piles] += 1
    return sizes


def count_iterations(args, num_prompts):
    """The episodes and the steps of each iteration, counted one by one. Returns [(episodes, steps), ...]."""
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
        mini_batches = [size for size in deal(episodes, args.num_mini_batches) if size > 0]
        iterations.append((episodes, args.num_ppo_epochs * len(mini_batches)))
    return iterations


def count_with_cards(args, num_prompts, world_size):
    """Every count of `batch_arithmetic`, from the episodes and steps that were counted one by one."""
    iterations = count_iterations(args, num_prompts)
    episodes = sum(episodes for episodes, _ in iterations)
    mini_batch_size = max(deal(args.batch_size, args.num_mini_batches))
    process_share = max(deal(mini_batch_size, world_size))
    steps, warmup_steps = sum(steps for _, steps in iterations), 0
    while warmup_steps < args.warmup_steps * (steps if args.warmup_steps < 1 else 1):
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


def random_case(rng):
    """Flags of odd sizes, a number of prompts, and a number of processes."""
    k, num_mini_batches = rng.choice([2, 3, 4, 5, 7]), rng.choice([1, 1, 2, 3, 4, 8])
    flags = dict(k=k, num_mini_batches=num_mini_batches, num_ppo_epochs=rng.choice([1, 1, 2, 4]))
    flags["batch_size"] = math.lcm(k, num_mini_batches) * rng.choice([1, 2, 3, 5])
    flags["per_device_train_batch_size"] = rng.choice([1, 2, 3, 5, 64])
    flags["num_train_epochs"] = rng.choice([1.0, 2.0, 3.0, 0.5, 1.5, 0.01, 2.25, 1 / 3])
    flags["total_episodes"] = rng.choice([None, None, 0, 1, 17, 100, 999])
    flags["warmup_steps"] = rng.choice([0, 3, 0.1, 1 / 3, 0.99])
    return flags, rng.choice([1, 2, 5, 7, 17, 100, 490]), rng.randint(1, 8)


def test_batch_arithmetic_equals_dealing_cards(script):
    """The formulas give what counting one by one gives, in 400 random cases."""
    rng = random.Random(0)
    for _ in range(400):
        flags, num_prompts, world_size = random_case(rng)
        args = make_args(script, **flags)
        counts = vars(script.batch_arithmetic(args, num_prompts, world_size))
        assert counts == count_with_cards(args, num_prompts, world_size), (flags, num_prompts, world_size)


# ============================================== 3  real runs ==============================================
def record_passes(script, monkeypatch):
    """Returns a list. Each training pass of a run adds (iteration, prompt, completion) for each of its episodes."""
    passes, iteration, forward = [], 0, script.CompletionModel.forward

    def recorded(self, function):  # All passes of a model go through its forward, as a `partial`.
        nonlocal iteration
        inputs = function.keywords
        if function.func is script.sample:  # It is called once for each iteration.
            iteration += 1
        elif torch.is_grad_enabled():
            for row in zip(inputs["prompts"].tolist(), inputs["tokens"].tolist()):
                passes.append((iteration, *(tuple(token for token in tokens if token >= 0) for tokens in row)))
        return forward(self, function)

    monkeypatch.setattr(script.CompletionModel, "forward", recorded)
    return passes


def check_run(args, metrics, output_dir, num_prompts):
    """Compare what a run wrote with the count one by one. Returns the number of steps."""
    step = episode = 0
    iterations = count_iterations(args, num_prompts)
    for row, (episodes, steps) in zip(metrics, iterations, strict=True):
        step, episode = step + steps, episode + episodes
        assert (row["step"], row["episode"]) == (step, episode)
        assert row["epoch"] == pytest.approx(episode / args.k / num_prompts)
    rollouts = read_jsonl(output_dir / "rollouts.jsonl")
    positions = [(i, index) for i, (episodes, _) in enumerate(iterations, start=1) for index in range(episodes)]
    assert [(row["iteration"], row["index"]) for row in rollouts] == positions
    # Every prompt is drawn once in each whole epoch, and some prompts are drawn once more.
    used = Counter(row["prompt"] for row in rollouts)
    whole_epochs, rest = divmod(episode // args.k, num_prompts)
    expected = [args.k * (whole_epochs + 1)] * rest + [args.k * whole_epochs] * (num_prompts - rest)
    assert sorted((used[prompt] for prompt in make_prompts(num_prompts)), reverse=True) == expected
    for first in range(0, len(rollouts), args.k):  # The k episodes of a group are neighbours.
        assert len({row["prompt"] for row in rollouts[first : first + args.k]}) == 1
    return step


REAL_RUNS = {  # a name: the number of prompts, and the flags
    "smaller last iteration": (7, dict(k=3, batch_size=6, num_mini_batches=2, num_ppo_epochs=2, num_train_epochs=2.0)),
    "one group left": (7, dict(k=2, batch_size=4, num_train_epochs=1.0, per_device_train_batch_size=3)),
    "batch larger than dataset": (5, dict(k=2, batch_size=32, num_mini_batches=4, num_train_epochs=8.0)),
    "fraction of an epoch": (7, dict(k=5, batch_size=15, num_mini_batches=3, num_train_epochs=1.5)),
    "fewer than mini-batches": (7, dict(k=2, batch_size=8, num_mini_batches=8, num_ppo_epochs=3, total_episodes=9)),
}


@pytest.mark.parametrize("case", REAL_RUNS)
def test_real_runs_train_on_exactly_what_was_asked(script, run, world, monkeypatch, updates, case):
    """The run makes the planned steps, and each episode takes exactly one training pass in each PPO epoch."""
    num_prompts, flags = REAL_RUNS[case]
    passes = record_passes(script, monkeypatch)
    reward = world.reward("squares")  # With it no advantage is 0. An episode with advantage 0 may take no pass.
    args, metrics, output_dir = run(script, dataset=world.dataset(num_prompts), reward=reward, **flags)
    assert len(updates) == check_run(args, metrics, output_dir, num_prompts)
    expected = Counter()
    for row in read_jsonl(output_dir / "rollouts.jsonl"):
        expected[row["iteration"], tuple(encode(row["prompt"])), tuple(row["token_ids"])] += args.num_ppo_epochs
    assert Counter(passes) == expected


# ================================ 4  prompts, mini-batches, micro-batches ================================
def test_an_epoch_is_a_permutation(script):
    """Each epoch has every prompt once, in a new order. It does not matter where the iterations divide the epochs."""
    seed, num_prompts = 1, 7
    stream = script.draw_prompts(seed, num_prompts, 0, 70)  # ten epochs
    epochs = [stream[first : first + 7] for first in range(0, 70, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 5
    for count in (1, 5, 16):  # prompts of an iteration
        parts = [script.draw_prompts(seed, num_prompts, first, count) for first in range(0, 80, count)]
        assert sum(parts, [])[:70] == stream
    assert script.draw_prompts(2, num_prompts, 0, 70) != stream


def test_mini_batches_are_near_equal_and_keep_groups(script):
    """The mini-batches of a PPO epoch have every episode once. The k episodes of a group stay neighbours."""
    for num_episodes, k, count in ((12, 3, 2), (12, 3, 4), (10, 2, 4), (8, 4, 3), (6, 3, 8), (2, 2, 1)):
        args = make_args(script, k=k, num_mini_batches=count, batch_size=math.lcm(k, count))
        mini_batches = [piece.tolist() for piece in script.draw_mini_batches(args, 1, 0, num_episodes)]
        order = [episode for mini_batch in mini_batches for episode in mini_batch]
        assert sorted(order) == list(range(num_episodes))
        assert sorted(map(len, mini_batches)) == sorted(size for size in deal(num_episodes, count) if size > 0)
        for first in range(0, num_episodes, args.k):
            assert order[first] % args.k == 0  # A group starts here.
            assert order[first : first + args.k] == list(range(order[first], order[first] + args.k))
    args = make_args(script, k=2, batch_size=24)
    orders = {str(script.draw_mini_batches(args, iteration, epoch, 24)) for iteration in range(3) for epoch in range(3)}
    assert len(orders) == 9  # There is a new order in each iteration and each PPO epoch.


def test_processes_share_every_episode_once(script):
    """Each episode counts once, on any number of processes. All make the same number of passes, which the plan says."""
    for count, world_size, size in ((12, 1, 5), (12, 5, 2), (7, 3, 64), (2, 3, 1), (13, 2, 3), (1, 8, 1)):
        episodes, lengths = torch.randperm(count) + 100, torch.randint(1, 30, (count + 100,))
        sizes_of_processes, times_counted = [], Counter()
        for rank in range(world_size):
            script.accelerator = SimpleNamespace(num_processes=world_size, process_index=rank, device="cpu")
            share = script.micro_batches(episodes, lengths, size)
            assert [micro_batch.is_last for micro_batch in share] == [False] * (len(share) - 1) + [True]
            sizes = [len(micro_batch.episodes) for micro_batch in share]
            assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
            in_order = [int(lengths[episode]) for micro_batch in share for episode in micro_batch.episodes]
            assert in_order == sorted(in_order)  # Neighbours of similar lengths need less padding.
            sizes_of_processes.append(sizes)
            for micro_batch in share:
                is_real = micro_batch.is_real  # [size, 1], False for a repeated episode
                assert is_real.dtype == torch.bool and is_real.shape == (len(micro_batch.episodes), 1)
                times_counted.update(micro_batch.episodes[is_real[:, 0]].tolist())
        assert times_counted == Counter(episodes.tolist())
        assert all(sizes == sizes_of_processes[0] for sizes in sizes_of_processes)
        args = make_args(script, k=2, batch_size=2 * count, num_mini_batches=2, per_device_train_batch_size=size)
        assert len(sizes) == script.batch_arithmetic(args, 100, world_size).gradient_accumulation_steps


# ============================================== 5  the schedule ============================================
def schedule_rates(name, learning_rate, warmup_steps, steps):
    """The learning rate of each update in a schedule over exactly `steps`, and the value at which it stands then."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate)
    scheduler = transformers.get_scheduler(name, optimizer, warmup_steps, steps)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates, scheduler.get_last_lr()[0]


@pytest.mark.parametrize("schedule", typing.get_args(next(iter(MODULES.values())).Schedule))
def test_schedule_is_transformers_own_over_exactly_the_steps(script, run, monkeypatch, updates, schedule):
    """Every update has its own rate of the schedule. The log has the last rate of an iteration."""
    calls = conftest.record_calls(monkeypatch, transformers, "get_scheduler")
    asked = {"constant": 0, "linear": 0.2}.get(schedule, 3)
    flags = dict(k=3, batch_size=6, num_mini_batches=2, num_ppo_epochs=2, num_train_epochs=1.0, response_length=1)
    flags |= dict(lr_scheduler_type=schedule, warmup_steps=asked, kl_coef=0.0)
    args, metrics, _ = run(script, **flags)
    warmup_steps = math.ceil(asked * metrics[-1]["step"]) if asked < 1 else asked
    rates, final = schedule_rates(schedule, args.learning_rate, warmup_steps, metrics[-1]["step"])
    assert [update.lr for update in updates] == pytest.approx(rates, rel=1e-9)
    assert [row["lr"] for row in metrics] == pytest.approx([rates[row["step"] - 1] for row in metrics], rel=1e-9)
    assert calls[0].result.get_last_lr()[0] == pytest.approx(final, rel=1e-9, abs=1e-15)  # at the run's end
    if schedule == "cosine":  # It never climbs again after the warm-up, and it ends at 0.
        assert all(after <= before for before, after in zip(rates[3:], rates[4:]))
        assert metrics[-1]["lr"] == min(row["lr"] for row in metrics)
        assert final == pytest.approx(0, abs=1e-12)


# ============================================ 6  several processes =========================================
@pytest.mark.slow
@pytest.mark.parametrize("script, processes", [(name, 3 if name == "rloo" else 2) for name in MODULES])
def test_processes_change_no_count(script, run, world, tmp_path, processes):
    """A run on several processes is the run on one. Here they divide neither 5 prompts nor mini-batches of 3 nor 6."""
    script = MODULES[script]
    sizes = dict(batch_size=6, num_mini_batches=2, num_ppo_epochs=2, num_train_epochs=3.0, warmup_steps=2)
    sizes |= dict(dataset=world.dataset(5), eval_dataset=world.dataset(3, seed=4), lr_scheduler_type="cosine")
    # This reward function writes down who called it, for how many episodes. Its file, probe.py, also makes every
    # process write down the last rate of its schedule.
    flags = base_flags(world) | sizes | dict(reward=f"{tmp_path / 'probe.py'}:probe", per_device_train_batch_size=1)
    output_dir = tmp_path / "out"
    finished = launch(script, processes, tmp_path, flags | dict(output_dir=output_dir))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(f"{processes} x cpu, float32")
    args = make_args(script, **flags)
    before, *metrics = read_jsonl(output_dir / "metrics.jsonl")  # The first row is the evaluation before training.
    assert (before["step"], before["episode"], before["epoch"]) == (0, 0, 0)
    steps = check_run(args, metrics, output_dir, 5)
    plan = vars(script.batch_arithmetic(args, 5, processes))
    assert yaml.safe_dump(plan, sort_keys=False) in finished.stdout and plan["steps"] == steps
    calls = read_jsonl(tmp_path / "calls.jsonl")
    assert {(call["rank"], call["world_size"]) for call in calls} == {(str(i), processes) for i in range(processes)}
    assert {call["type"] for call in calls} == {"DistributedType.MULTI_CPU"}  # There really are several processes.
    assert sum(call["count"] for call in calls) == plan["episodes"] + 2 * 3  # two evaluations of 3 prompts; no repeats

    rates, final = schedule_rates("cosine", args.learning_rate, 2, steps)
    assert [row["lr"] for row in metrics] == pytest.approx([rates[row["step"] - 1] for row in metrics], rel=1e-9)
    for rank in range(processes):
        assert float((tmp_path / f"last_lr_{rank}").read_text()) == pytest.approx(final, abs=1e-12)
    _, _, output_dir_of_one = run(script, **sizes)
    compare_runs(output_dir_of_one, output_dir)  # the same completions, metrics and final weights


# ================================================= 7  --plan ===============================================
def test_plan_is_yaml_and_that_of_the_run(script, run, world, monkeypatch, capsys, tmp_path):
    """--plan prints every count, as YAML, for any number of processes. A run prints the same."""
    flags = dict(num_mini_batches=2, num_ppo_epochs=3, num_train_epochs=1.5, per_device_train_batch_size=2)
    run(script, **flags)
    of_run = capsys.readouterr().out
    monkeypatch.setattr(script, "load_model", None)  # --plan loads no model.
    printed = []
    for world_size in (1, 3):
        args = make_args(script, **base_flags(world) | flags | dict(output_dir=str(tmp_path / "out"), plan=world_size))
        script.main(args)
        printed.append(capsys.readouterr().out)
        assert yaml.safe_load(printed[-1]) == count_with_cards(args, 7, world_size)
    assert printed[0] in of_run and printed[1] != printed[0]
    assert not (tmp_path / "out").exists()
