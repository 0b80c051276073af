"""Proves that the tests can fail: it breaks the scripts one line at a time, and a test must notice.

    python benchmark/mutations.py                             # all
    python benchmark/mutations.py --only "KL sign, RLOO"      # one of them

A mutation changes a line in a copy of a script, which lies in a folder of its own, beside the
tests. Then its test must fail, in one of two ways: by an assertion, or because the script itself
stops the run (OWN_CHECKS). Another error does not count. Before that, the same tests must pass on
the scripts as they are. Code that the three scripts share is broken in one of them only, because a
test keeps it equal in all three. The exit status is 1 if a mutation survives, or if its old text
does not occur exactly once.
"""

import contextlib
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Literal

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
# With it pytest shows the whole difference of two runs, and needs minutes to find it.
os.environ.pop("CI", None)

import pytest
import tyro

REPO = Path(__file__).resolve().parent.parent
OWN_CHECKS = ("sampling and training give log-probabilities", "is not run by")
LIBRARIES = ["accelerate", "tyro", "datasets", "torch.utils.checkpoint", "torch.testing"]
LIBRARIES += [
    f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "gpt_neox", "gpt2")
]

NAMES = "sampling logprobs gradients algorithms rewards processes resume input".split()
SAMPLING, LOGPROBS, GRADIENTS, ALGORITHMS, REWARDS, PROCESSES, RESUME, INPUT = (
    f"tests/test_{x}.py::test_" for x in NAMES
)
COUNTS = "test_accounting.py::test_"
MISSING = "tests/test_missing_scores.py::test_"
BATCH = COUNTS + "batch_arithmetic_equals_dealing_cards"
SHARED = LOGPROBS + "a_shared_prompt_gives_what_rows_of_their_own_give[beyond-the-window-gpt2-rloo]"
MICRO_BATCH = PROCESSES + "memory_flags_give_the_same_run"
GRADIENT = GRADIENTS + "gradient_is_that_of_plain_passes"
TWO_PROCESSES = PROCESSES + "any_hardware_gives_the_same_run[rloo]"
GRPO_LOSSES = ALGORITHMS + "grpo_losses_by_plain_passes"
VALUES = ALGORITHMS + "ppo_values_and_returns_by_plain_passes"
WAY = INPUT + "the_first_way_that_works_is_taken"
MASK = 'mask=samples["tokens"] >= 0'

# name, script, old text, new text, the test that must fail
Mutation = namedtuple("Mutation", "name script old new test")
# fmt: off
MUTATIONS = [Mutation(*fields) for fields in (
    # counts
    ("episodes without k", "rloo",
     "plan.episodes = plan.prompts * args.k", "plan.episodes = plan.prompts", BATCH),
    ("last batch dropped", "grpo", "plan.iterations = ceil(plan.episodes / args.batch_size)",
     "plan.iterations = max(1, plan.episodes // args.batch_size)", BATCH),
    # processes
    ("schedule stepped once per process", "rloo",
     "policy, optimizer = accelerator.prepare(policy, optimizer)",
     "policy, optimizer, scheduler = accelerator.prepare(policy, optimizer, scheduler)",
     TWO_PROCESSES),
    ("repeated episode counted", "rloo", "(losses * is_real[:, None]).sum()",
     "losses.sum()", TWO_PROCESSES),
    ("a reward that sees half of a group", "rloo",
     "ceil(len(batch.prompts) // batch.k / accelerator.num_processes) * batch.k",
     "ceil(len(batch.prompts) / accelerator.num_processes)",
     PROCESSES + "a_reward_sees_whole_groups[2-rloo]"),
    # rollout
    ("groups interleaved in the batch", "grpo", "[prompt for prompt in drawn for _ in range(k)]",
     "[prompt for _ in range(k) for prompt in drawn]",
     REWARDS + "a_reward_that_names_its_prompt_comes_back_to_it"),
    ("sampler without temperature", "rloo",
     "logits[:, -1].float() / (temperature or 1.0)", "logits[:, -1].float()",
     SAMPLING + "sampling_follows_the_exact_distribution[llama-rloo]"),
    ("searchsorted from the left", "rloo", "right=True).squeeze(1)", "right=False).squeeze(1)",
     SAMPLING + "no_token_of_probability_zero_is_ever_drawn"),
    ("EOS masked out", "grpo", MASK, 'mask=samples["tokens"] > 1', GRADIENT + "[grpo-llama]"),
    ("masked by token id", "ppo", MASK, 'mask=samples["tokens"] > 0', GRADIENT + "[ppo-emits_pad]"),
    # passes
    ("dropout left on", "ppo", "setattr(config, key, 0.0)", "setattr(config, key, value)",
     LOGPROBS + "ratio_is_one_while_the_weights_stand_still[ppo-dropout]"),
    ("another group's keys and values", "rloo", "cache.reorder_cache(row_of)",
     "cache.reorder_cache(torch.arange(len(prompts)) % len(different))", SHARED),
    ("padding of a shared prompt seen", "rloo", "attention_mask=mask,",
     "attention_mask=mask | (cache is not None and start > 0),", SHARED),
    ("temperature missing in the passes", "rloo",
     "head_logits(model.language_model, hidden) / model.temperature",
     "head_logits(model.language_model, hidden)", SHARED),
    ("a new token over the one before", "rloo", "column = self.cache.column.add_(1)",
     "column = self.cache.column",
     SAMPLING + "greedy_sampling_equals_generate[llama-RecordedSteps-rloo]"),
    ("logits that a graph has not computed", "rloo",
     "return logits[running]", "return self.logits[running]",
     SAMPLING + "greedy_sampling_equals_generate[llama-RecordedSteps-rloo]"),
    ("steps tried in short rows alone", "rloo",
     "room = max(longest_row - start, tokens.shape[1])", "room = tokens.shape[1]", WAY),
    ("logits of -inf compared", "rloo", "counts = alone > -1e9", "counts = alone == alone", WAY),
    ("ratio to the policy of now", "rloo", "if args.updates_per_batch == 1:", "if True:",
     ALGORITHMS + "updates_are_those_of_the_textbook[rloo]"),
    ("episodes that carry KL left out", "grpo",
     "((advantages != 0) | (reference is not None))", "(advantages != 0)",
     GRADIENTS + "episodes_without_gradient_take_no_pass[0.1-reference-grpo]"),
    ("mean of means, RLOO", "rloo",
     "is_real[:, None]).sum() / len(mini_batch)", "is_real[:, None]).sum() / len(episodes)",
     MICRO_BATCH),
    # scores
    ("penalty of a missing EOS after the clip", "ppo", "= normalize_scores(args, state, scores)",
     "= normalize_scores(args, state, scores + (x := args.missing_eos_penalty * ~batch.ended)) - x",
     REWARDS + "order_of_a_score"),
    ("reward model does not read the EOS", "rloo", "token_ids + batch.token_ids[i]",
     "token_ids + batch.token_ids[i][:-1]",
     REWARDS + "reward_model_reads_the_episode_with_its_eos[rloo-llama-0]"),
    # episodes without a score
    ("None counted as 0", "rloo", "[sum(values) if values else nan for",
     "[sum(values) for",
     MISSING + "gradient_without_some_scores[0.2-reference-rloo]"),
    ("unscored episode in the baseline", "rloo",
     "(~groups.isnan()).sum(1, keepdim=True) - 1", "torch.full_like(groups[:, :1], k - 1)",
     MISSING + "gradient_without_some_scores[0.2-reference-rloo]"),
    ("unscored episode without KL", "grpo", "(advantages != 0) | (reference is not None)",
     "(advantages != 0) | ((reference is not None) & ~rewards.isnan())",
     MISSING + "gradient_without_some_scores[0.2-reference-grpo]"),
    # algorithms
    ("baseline has the episode itself", "rloo",
     "others.clamp(min=1)", "(others + 1)", ALGORITHMS + "advantages_by_hand[3-rloo]"),
    ("KL sign, RLOO", "rloo", "rewards - args.kl_coef * kl", "rewards + args.kl_coef * kl",
     MISSING + "gradient_without_some_scores[0.2-reference-rloo]"),
    ("dr_grpo divided by the mean length", "grpo",
     "(included.sum().clamp(min=1) * args.response_length)",
     "(included.sum().clamp(min=1) * lengths.float().mean())",
     GRPO_LOSSES + "[dr_grpo-False-token-grpo]"),
    ("k3 the wrong way round", "grpo", "hardshrink(ref_logprobs - logprobs, 1e-4)",
     "hardshrink(logprobs - ref_logprobs, 1e-4)", GRPO_LOSSES + "[grpo-False-token-grpo]"),
    ("GSPO with the sum of the log-ratio", "grpo", "keepdim=True) / mask.sum(1, keepdim=True)",
     "keepdim=True)", GRPO_LOSSES + "[grpo-False-sequence-grpo]"),
    ("score on the last column", "ppo", "rewards[all_episodes, batch.mask.sum(1) - 1] += scores",
     "rewards[:, -1] += scores", VALUES + "[value_model_path-False-ppo]"),
    ("value read one position late", "ppo",
     "separate_rows(model.value_trunk, prompts, tokens)",
     "separate_rows(model.value_trunk, prompts, tokens).roll(-1, 1)",
     VALUES + "[value_model_path-False-ppo]"),
    ("returns from whitened advantages", "ppo",
     "advantages[batch.mask] = whiten(advantages[batch.mask])",
     "returns = values + advantages.masked_scatter_(batch.mask, whiten(advantages[batch.mask]))",
     VALUES + "[reward_model_path-True-ppo]"),
    ("value after the end is not 0", "ppo", "next_value = torch.zeros_like(rewards[:, 0])",
     "next_value = values[:, -1]",
     VALUES + "[value_model_path-False-ppo]"),
    ("--target-kl compared the wrong way round", "ppo",
     'update.get("policy/approxkl_avg", 0.0)) > limit',
     'update.get("policy/approxkl_avg", 0.0)) < limit',
     ALGORITHMS + "ppo_counts_dropped_updates[target_kl-ppo]"),
    # resuming
    ("resumed without the schedule's position", "rloo", 'scheduler.last_epoch = state["step"]',
     "scheduler.last_epoch = 0", RESUME + "a_run_killed_in_every_phase"),
    ("what was written after the checkpoint kept", "rloo",
     'os.truncate(file, state["jsonl_sizes"].get(file.name, 0))', "pass",
     RESUME + "only_the_runs_own_lines_are_cut[rloo]"),
)]
# fmt: on


class Outcome:
    """A pytest plugin that keeps how tests failed."""

    def __init__(self):
        self.failures = []

    def pytest_exception_interact(self, call):
        self.failures.append(call.excinfo.value)


def run_tests(job: tuple[str, str, str, str, list[str]]):
    """Run tests on a copy of a script with `new` for `old`.

    Returns its name, the script, what ran, what came out, seconds and the log.
    """
    (name, script, old, new, tests), started, outcome = job, time.perf_counter(), Outcome()
    multiprocessing.current_process().daemon = False  # A daemon may not fork the runs of the tests.
    test = tests[0] if old else f"all {len(tests)} tests of the mutations below"
    source = (REPO / f"{script}.py").read_text()
    if old and source.count(old) != 1:
        return name, script, test, f"STALE: its old text occurs {source.count(old)} times", 0.0, ""
    with (
        tempfile.TemporaryDirectory(prefix="mutation-") as folder,
        open(f"{folder}/log", "w+") as log,
    ):
        for file in ("test_accounting.py", "README.md"):
            shutil.copy(REPO / file, folder)
        shutil.copytree(REPO / "tests", f"{folder}/tests")
        Path(folder, "benchmark").symlink_to(REPO / "benchmark")
        Path(folder, f"{script}.py").write_text(source.replace(old, new) if old else source)
        Path(folder, "pytest.ini").write_text("[pytest]\npythonpath = . tests\nmarkers = slow\n")
        os.chdir(folder)
        words = f"-q -x --tb=short -p no:cacheprovider --basetemp {folder}/tmp".split()
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            status = pytest.main([*words, *tests], [outcome])
        result = {0: "SURVIVED" if old else "passed"}.get(status, f"ERROR: status {int(status)}")
        for error in outcome.failures:
            is_own = any(words in str(error) for words in OWN_CHECKS)
            if isinstance(error, (AssertionError, pytest.fail.Exception)) or is_own:
                result = "killed"
        os.chdir(REPO)
        log.seek(0)
        return name, script, test, result, time.perf_counter() - started, log.read()


def main(only: Literal[tuple(m.name for m in MUTATIONS)] | None = None):
    started = time.perf_counter()
    chosen = [
        (m.name, m.script, m.old, m.new, [m.test]) for m in MUTATIONS if only in (None, m.name)
    ]
    tests_of = {
        job[1]: sorted({test for _, script, *_, [test] in chosen if script == job[1]})
        for job in chosen
    }
    unmutated = [("(no mutation)", script, "", "", tests) for script, tests in tests_of.items()]

    for library in LIBRARIES:  # once here, not in each of the processes forked below
        importlib.import_module(library)
    sys.dont_write_bytecode = True
    failed = []
    # a process forked for each run: nothing of a mutation is left for the next
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for jobs, expected in ((unmutated, "passed"), (chosen, "killed")):
            for name, script, test, result, seconds, log in pool.imap(run_tests, jobs):
                print(f"{result:8}  {seconds:5.1f} s  {script}: {name} ({test})", flush=True)
                if result != expected:
                    failed.append(name)
                    print(log[-3000:])
            if failed:
                break
    seconds = time.perf_counter() - started
    print(f"{len(chosen)} mutations, {len(failed)} not as they should be, in {seconds:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
