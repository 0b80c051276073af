"""Proves that the tests can fail: it breaks the scripts one line at a time, and a test must notice.

    python benchmark/mutations.py                             # all
    python benchmark/mutations.py --only "KL sign, RLOO"      # one of them

A mutation changes a line of a script in a folder of its own, beside copies of the tests. Then its
test must fail: by an assertion, or because the script refuses to go on. Another error does not
count, and neither does a test that fails without the mutation. Code that the three scripts share is
broken in one of them only, because a test keeps it equal in all three. The exit status is 1 if a
mutation survives, or if its old text does not occur exactly once.

tests/test_other_device.py plants bugs of its own.
"""

import os
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Literal

import pytest
import tyro
from run import DEFAULTS, ROOT, SCRIPTS, apart, copy_script

# name: script, the test that must fail, old text, new text
# fmt: off
MUTATIONS = {
    # counts
    "episodes without k": (
        "rloo", "accounting/batch_arithmetic_equals_dealing_cards[rloo]",
        "plan.episodes = plan.prompts * args.k",
        "plan.episodes = plan.prompts"),
    "last batch dropped": (
        "grpo", "accounting/batch_arithmetic_equals_dealing_cards[grpo]",
        "plan.iterations = ceil(plan.episodes / args.batch_size)",
        "plan.iterations = max(1, plan.episodes // args.batch_size)"),
    # processes
    "schedule stepped once per process": (
        "rloo", "accounting/processes_change_no_count[rloo]",
        "policy, optimizer = accelerator.prepare(policy, optimizer)",
        "policy, optimizer, scheduler = accelerator.prepare(policy, optimizer, scheduler)"),
    "repeated episode counted": (
        "rloo", "accounting/processes_change_no_count[rloo]",
        "(losses * is_real[:, None]).sum()",
        "losses.sum()"),
    "mean of means": (
        "rloo", "training/a_run_is_that_of_plain_passes[llama-rloo]",
        "is_real[:, None]).sum() / len(mini_batch)",
        "is_real[:, None]).sum() / len(episodes)"),
    "a reward that sees half of a group": (
        "rloo", "rewards/processes_score_whole_groups_of_any_rows[rloo]",
        "torch.arange(len(batch.prompts)).view(-1, batch.k)",
        "torch.arange(len(batch.prompts)).view(-1, 1)"),
    "FSDP2 gathers weights at each token": (
        "ppo", "processes/fsdp2_is_the_run_of_one_process[ppo]",
        "model.set_reshard_after_forward(False)",
        "pass"),
    # sampling
    "groups interleaved in the batch": (
        "rloo", "training/a_run_is_that_of_plain_passes[llama-rloo]",
        "[prompt for prompt in drawn for _ in range(k)]",
        "[prompt for _ in range(k) for prompt in drawn]"),
    "sampler without temperature": (
        "rloo", "training/a_run_is_that_of_plain_passes[llama-rloo]",
        "logits[:, -1].float() / (temperature or 1.0)",
        "logits[:, -1].float()"),
    "searchsorted from the left": (
        "rloo", "sampling/no_token_of_probability_zero_is_ever_drawn",
        "right=True).squeeze(1)",
        "right=False).squeeze(1)"),
    "positions count padding": (
        "rloo", "sampling/greedy_sampling_equals_generate[gpt2-rloo]",
        "positions = (mask.cumsum(-1) - 1).clamp(min=0)",
        "positions = (torch.ones_like(mask).cumsum(-1) - 1)"),
    "another row's cache after an end": (
        "rloo", "sampling/greedy_sampling_equals_generate[neox-rloo]",
        "cache.reorder_cache(goes_on)",
        "cache.reorder_cache(torch.arange(len(goes_on)))"),
    "recorded logits of other rows": (
        "rloo", "sampling/a_run_with_recorded_steps_is_the_same",
        "next(recorded_steps)[running]",
        "next(recorded_steps)[: len(running)]"),
    # passes
    "EOS masked out": (
        "rloo", "training/a_run_is_that_of_plain_passes[llama-rloo]",
        'mask = samples["tokens"] >= 0',
        'mask = samples["tokens"] > 1'),
    "masked by token id": (
        "ppo", "training/a_run_is_that_of_plain_passes[emits_pad-ppo]",
        'mask = samples["tokens"] >= 0',
        'mask = samples["tokens"] > 0'),
    "another group's keys and values": (
        "rloo", "training/a_run_is_that_of_plain_passes[llama-rloo]",
        "cache.reorder_cache(row_of)",
        "cache.reorder_cache(torch.arange(len(prompts)) % len(different))"),
    "passes without temperature": (
        "rloo", "training/a_run_is_that_of_plain_passes[llama-rloo]",
        "logits.float() / args.temperature",
        "logits.float()"),
    "dropout with checkpointing": (
        "ppo", "training/a_run_is_that_of_plain_passes[gpt2-ppo]",
        "module.training = now",
        "module.train(now)"),
    "episodes that carry KL left out": (
        "grpo", "training/episodes_without_gradient_take_no_pass[0.1-reference-grpo]",
        "((advantages != 0) | (reference is not None))",
        "(advantages != 0)"),
    "rounding is trained": (
        "rloo", "processes/rounding_does_not_choose_what_is_trained[rloo]",
        "hardshrink(batch.logprobs - ref_logprobs, 1e-4)",
        "hardshrink(batch.logprobs - ref_logprobs, 0)"),
    # scores
    "penalty of a missing EOS after the clip": (
        "ppo", "training/a_run_is_that_of_plain_passes[llama-ppo]",
        "scores = scores - args.missing_eos_penalty",
        "scores = scores.clamp(max=args.score_clip) - args.missing_eos_penalty"),
    "reward model does not read the EOS": (
        "rloo", "training/a_run_is_that_of_plain_passes[llama-rloo]",
        "token_ids + batch.token_ids[i] for i",
        "token_ids + batch.token_ids[i][:-1] for i"),
    "None counted as 0": (
        "rloo", "algorithms/updates_are_those_of_the_textbook[rloo]",
        "sum(values) if values else nan",
        "sum(values)"),
    "unscored episode in the baseline": (
        "rloo", "algorithms/updates_are_those_of_the_textbook[rloo]",
        "(~groups.isnan()).sum(1, keepdim=True) - 1",
        "torch.full_like(groups[:, :1], k - 1)"),
    "unscored episode without KL": (
        "grpo", "algorithms/updates_are_those_of_the_textbook[grpo]",
        "(advantages != 0) | (reference is not None)",
        "(advantages != 0) | ((reference is not None) & ~rewards.isnan())"),
    # algorithms
    "ratio to the policy of now": (
        "rloo", "algorithms/updates_are_those_of_the_textbook[rloo]",
        "if args.updates_per_batch == 1:",
        "if True:"),
    "baseline has the episode itself": (
        "rloo", "algorithms/updates_are_those_of_the_textbook[rloo]",
        "others.clamp(min=1)",
        "(others + 1).clamp(min=1)"),
    "KL sign, RLOO": (
        "rloo", "algorithms/updates_are_those_of_the_textbook[rloo]",
        "rewards - args.kl_coef * kl",
        "rewards + args.kl_coef * kl"),
    "k3 the wrong way round": (
        "grpo", "algorithms/updates_are_those_of_the_textbook[grpo]",
        "hardshrink(ref_logprobs - logprobs, 1e-4)",
        "hardshrink(logprobs - ref_logprobs, 1e-4)"),
    "dr_grpo divided by the mean length": (
        "grpo", "algorithms/updates_are_those_of_the_textbook[grpo dr_grpo]",
        "(included.sum().clamp(min=1) * args.response_length)",
        "(included.sum().clamp(min=1) * lengths.float().mean())"),
    "GSPO with the sum of the log-ratio": (
        "grpo", "algorithms/updates_are_those_of_the_textbook[grpo sequence]",
        "keepdim=True) / mask.sum(1, keepdim=True)",
        "keepdim=True)"),
    "score on the last column": (
        "ppo", "algorithms/ppo_advantages_by_plain_computation[plain-ppo]",
        "rewards[torch.arange(num_episodes), batch.mask.sum(1) - 1] += scores.float()",
        "rewards[:, -1] += scores.float()"),
    "value read one position late": (
        "ppo", "training/a_run_is_that_of_plain_passes[llama-ppo]",
        "[:, prompts.shape[1] - 1 :].float().squeeze(-1)",
        "[:, prompts.shape[1] - 1 :].float().squeeze(-1).roll(-1, 1)"),
    "value after the end is not 0": (
        "ppo", "algorithms/ppo_advantages_by_plain_computation[plain-ppo]",
        "next_value = torch.zeros_like(rewards[:, 0])",
        "next_value = values[:, -1]"),
    "returns from whitened advantages": (
        "ppo", "algorithms/ppo_advantages_by_plain_computation[plain-ppo]",
        "advantages[batch.mask] = whiten(advantages[batch.mask])",
        "advantages[batch.mask] = whiten(advantages[batch.mask]); returns = advantages + values"),
    "--target-kl compared the wrong way round": (
        "ppo", "algorithms/ppo_counts_dropped_updates[target_kl-ppo]",
        '["policy/approxkl_avg"] > 1.5',
        '["policy/approxkl_avg"] < 1.5'),
    # kills
    "schedule not in a checkpoint": (
        "rloo", "resume/a_run_killed_in_every_phase[rloo]",
        "accelerator.register_for_checkpointing(scheduler)",
        "pass"),
    "lines after the checkpoint kept": (
        "rloo", "resume/only_the_runs_own_files_are_changed[rloo]",
        'os.truncate(metrics, state.get("metrics_bytes", 0))',
        "pass"),
    "only one checkpoint kept": (
        "rloo", "resume/a_full_disk_leaves_the_checkpoint_before",
        '.glob("iteration_*"))[:-2]',
        '.glob("iteration_*"))[:-1]'),
    # text
    "a script drifts": (
        "grpo", "scripts/the_scripts_do_not_drift",
        "-p.mul_(log_p.clamp_(min=-104))",
        "-p.mul_(log_p.clamp_(min=-105))"),
}
# fmt: on


class Failures(dict):
    """A pytest plugin that keeps each test that fails, and the kind of its error."""

    def pytest_exception_interact(self, node, call):
        self[node.nodeid] = type(call.excinfo.value).__name__


def node(test):
    """The name that pytest gives a test."""
    file, name = test.split("/")
    return f"tests/test_{file}.py::test_{name}"


def run_tests(tests, script, old, new):
    """Run tests in this process, on copies of the scripts with `new` for `old` in one of them.

    Returns how they have `ended`, those that are `failing`, and the end of the `log`.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for other in SCRIPTS:
            copy_script(Path(folder), other)
        shutil.copytree(ROOT / "tests", f"{folder}/tests")
        shutil.copy(ROOT / "test_accounting.py", f"{folder}/tests")
        shutil.copy(ROOT / "pytest.ini", folder)
        path = Path(folder, f"{script}.py")
        path.write_text(path.read_text().replace(old, new))
        os.chdir(folder)
        words = "-q --tb=short -o addopts= -p no:cacheprovider --basetemp tmp".split()
        failures = Failures()
        with open("log", "w+") as log, redirect_stdout(log), redirect_stderr(log):
            status = pytest.main([*words, *map(node, tests)], [failures])
            log.seek(0)
            text = log.read()[-3000:]
        os.chdir(ROOT)
    ended = "error" if status else "passed"
    if {"AssertionError", "Failed", "UsageError"} & {*failures.values()}:
        ended = "killed"
    return dict(ended=ended, failing=[*failures], log=text)


def attempt(name):
    """Make a mutation, and run its test."""
    script, test, old, new = MUTATIONS[name]
    count = (ROOT / f"{script}.py").read_text().count(old)
    if count != 1:
        return dict(ended=f"stale, its old text occurs {count} times", log="")
    return apart(run_tests, [test], script, old, new)


def main(only: Literal[tuple(MUTATIONS)] | None = None):
    os.environ |= DEFAULTS | dict(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    # With it pytest shows the whole difference of two runs, and needs minutes to find it.
    os.environ.pop("CI", None)
    names = [only] if only else list(MUTATIONS)
    tests = {MUTATIONS[name][1] for name in names}
    wrong = 0
    with ThreadPool(2) as pool:
        # The tests, once on the scripts as they are
        unbroken = pool.apply_async(apart, (run_tests, tests, "rloo", "", ""))
        for name, found in zip(names, pool.imap(attempt, names)):
            script, test, *_ = MUTATIONS[name]
            ended = found.get("ended", "error")
            before = unbroken.get()
            if node(test) in before.get("failing", map(node, tests)):
                found = before
                ended = "fails without it"
            print(f"{ended:8}  {script}: {name} ({test})", flush=True)
            if ended != "killed":
                wrong += 1
                print(found.get("failed", found.get("log")))
    print(f"{len(names)} mutations, {wrong} not as they should be")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
