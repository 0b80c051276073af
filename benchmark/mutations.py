"""Proves that the tests can fail: breaks the scripts one line at a time, and names the test that must notice.

    python benchmark/mutations.py                             # all, about two minutes on two cores
    python benchmark/mutations.py --script ppo                # those of one script
    python benchmark/mutations.py --only "KL sign"            # one of them

Each mutation is a piece of one line of a script, what stands there instead, and a test. Every script that the mutation
is for is copied into a folder of its own, beside the test file; there the line is changed, and the test must fail by an
assertion, not by an error. First the same tests must pass on the scripts as they are. Prints a line for each, and exits
with status 1 if a mutation survives, or if its old text is not in exactly one line of its script.
"""

import argparse
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

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

import pytest

REPO = Path(__file__).resolve().parent.parent
ALL, GROUPED = ("rloo", "grpo", "ppo"), ("rloo", "grpo")  # a group of PPO's is one episode
BATCH = "batch_arithmetic_equals_dealing_cards[{}]"
GRADIENT = "gradient_is_that_of_plain_passes[{}-llama]"
MICRO_BATCH = "gradient_does_not_depend_on_the_micro_batch[{}]"
SHARED = "a_shared_prompt_gives_what_rows_of_their_own_give[{}-equal-llama]"
PASSES = "every_pass_gives_the_same_logprobs[{}]"
TWO_PROCESSES = "two_processes_are_one_run[{}]"

LIBRARIES = ["accelerate", "tyro", "transformers.trainer_pt_utils"]
LIBRARIES += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "gpt_neox", "gpt2")]

# name, scripts, old text, new text, the test that must fail (without `test_`, with the script's name for {})
Mutation = namedtuple("Mutation", "name scripts old new test")
MUTATIONS = [Mutation(*fields) for fields in (
    ("schedule stepped once per process", ("rloo",), "model, optimizer = accelerator.prepare(trained_model, optimizer)",
     "model, optimizer, scheduler = accelerator.prepare(trained_model, optimizer, scheduler)", TWO_PROCESSES),
    ("repeated episode counted", ("grpo",), "(positions < len(indices)).float()", "torch.ones(size)", TWO_PROCESSES),
    ("loss not times num_processes", ("ppo",), "accelerator.backward(loss * accelerator.num_processes)",
     "accelerator.backward(loss)", TWO_PROCESSES),
    ("episodes without k", GROUPED, "plan.episodes = plan.prompts * args.k", "plan.episodes = plan.prompts", BATCH),
    ("last batch dropped", ALL, "plan.iterations = math.ceil(plan.episodes / args.batch_size)",
     "plan.iterations = max(1, plan.episodes // args.batch_size)", BATCH),
    ("half a prompt rounded down", ALL, "math.floor(args.num_train_epochs * num_prompts + 0.5)",
     "int(args.num_train_epochs * num_prompts)", BATCH),
    ("every epoch in the same order", ALL, "keyed_rng(seed, PROMPT_ORDER, epoch)", "keyed_rng(seed, PROMPT_ORDER, 0)",
     "an_epoch_is_a_permutation[{}]"),
    ("every PPO epoch in the same order", ALL, "keyed_rng(seed, MINI_BATCHES, iteration, ppo_epoch)",
     "keyed_rng(seed, MINI_BATCHES, iteration, 0)", "mini_batches_are_near_equal_and_keep_groups[{}]"),
    ("groups interleaved in the batch", GROUPED, "[prompts[i] for i in drawn for _ in range(args.k)]",
     "[prompts[i] for _ in range(args.k) for i in drawn]", "a_reward_that_names_its_prompt_comes_back_to_it[{}]"),
    ("resumed without the schedule's position", ALL, 'scheduler.last_epoch = state["step"]', "scheduler.last_epoch = 0",
     "a_resumed_run_is_the_run_that_never_stopped[{}]"),
    ("sampler without temperature", ALL, "torch.softmax(logits.double() / temperature, dim=-1)",
     "torch.softmax(logits.double(), dim=-1)", "sampling_follows_the_exact_distribution[{}-llama]"),
    ("searchsorted from the left", ALL, "right=True).squeeze(1)", "right=False).squeeze(1)",
     "no_token_of_probability_zero_is_ever_drawn[{}]"),
    ("dropout left on", ALL, "setattr(config, name, 0.0)", "setattr(config, name, value)",
     "ratio_is_one_while_the_weights_stand_still[{}-dropout]"),
    ("positions that go on from one completion to the next", GROUPED,
     "row_positions += range(len(prompt), len(prompt) + len(inputs))",
     "row_positions += range(len(row_positions), len(row_positions) + len(inputs))", SHARED),
    ("completions in a row see each other", GROUPED, "(parts[:, None] == 0) | (parts[:, None] == parts[:, :, None])",
     "(parts[:, None] >= 0) | (parts[:, None] == parts[:, :, None])", SHARED),
    ("first token predicted one output early", ALL, "predict_at += [number * width + len(prompt) - 1, ",
     "predict_at += [max(0, number * width + len(prompt) - 2), ", PASSES),
    ("prompts shared under a sliding window", GROUPED, "    if any(getattr(config, name, None) for name in windows):",
     "    if False:", "models_that_cannot_share_prompts_use_rows_of_their_own[{}-mistral]"),
    ("capped logits read without their cap", ALL, "self.has_plain_head = has_plain_head(without_peft(language_model))",
     "self.has_plain_head = True", "logits_in_chunks_give_the_same[{}-gemma2]"),
    ("episodes that carry KL left out", ("grpo",), ".cpu() & single_update & (reference is None)",
     ".cpu() & single_update", "episodes_that_have_a_gradient_are_never_left_out[{}-0.1-1]"),
    ("episodes left out in every update", ("rloo",), "(advantages[mini_batch] == 0).cpu() & single_update",
     "(advantages[mini_batch] == 0).cpu()", "episodes_that_have_a_gradient_are_never_left_out[{}-0.0-2]"),
    ("episodes left out of the metrics, too", GROUPED, "batch.entropies[skipped], units, seen)",
     "batch.entropies[skipped], units * 0, seen * 0)", "episodes_without_gradient_are_left_out[{}-5]"),
    ("old logprobs with a single update", GROUPED, "if not single_update:", "if True:",
     "old_logprobs_take_a_pass_only_with_several_updates[{}]"),
    ("old logprobs with a single update", ("ppo",), "value_pass if single_update else model", "model",
     "old_logprobs_take_a_pass_only_with_several_updates[{}]"),
    ("temperature missing in the passes", ALL, "token_logprobs(head(hidden), targets, temperature, ",
     "token_logprobs(head(hidden), targets, 1.0, ", PASSES),
    ("EOS masked out", ALL, "batch.mask = torch.arange(args.response_length, device=device) < batch.lengths[:, None]",
     "batch.mask = torch.arange(args.response_length, device=device) < batch.lengths[:, None] - 1", GRADIENT),
    ("masked by token id where pad is EOS", ALL,
     "batch.mask = torch.arange(args.response_length, device=device) < batch.lengths[:, None]",
     "batch.mask = batch.tokens != pad_token_id", "gradient_is_that_of_plain_passes[{}-pad_is_eos]"),
    ("mean of means", ("rloo",), "loss = (losses * weights).sum() / len(mini_batch)",
     "loss = (losses * weights).sum() / len(micro)", MICRO_BATCH),
    ("mean of means", ("grpo",), "loss = (losses * mask * (loss_weights[micro] * weights)[:, None]).sum()",
     "loss = (losses * mask * (loss_weights[micro] * weights)[:, None]).sum() * len(mini_batch) / len(micro)",
     MICRO_BATCH),
    ("mean of means", ("ppo",), "policy_loss = (losses * units).sum() / mini_batch_tokens",
     "policy_loss = (losses * units).sum() / units.sum()", MICRO_BATCH),
    ("penalty of a missing EOS after the clip", ALL, "scores = scores.clamp(-args.score_clip, args.score_clip)",
     "scores = scores.add(x := args.missing_eos_penalty * (batch.ended == 0)).clamp(max=args.score_clip) - x",
     "order_of_a_score[{}]"),
    ("reward model does not read the EOS", ALL, "return prompt.token_ids + token_ids",
     "return prompt.token_ids + token_ids[:-1]", "reward_model_reads_the_episode_with_its_eos[{}-llama]"),
    ("baseline has the episode itself", ("rloo",), "baselines = (groups.sum(1, keepdim=True) - groups) / (k - 1)",
     "baselines = groups.mean(1, keepdim=True)", "rloo_advantages_by_hand[{}]"),
    ("KL sign", ("rloo",), "rewards = scores - args.kl_coef * kl", "rewards = scores + args.kl_coef * kl",
     "rloo_with_a_single_update_is_reinforce[{}]"),
    ("deviation of the population", ("grpo",), "groups.std(1, keepdim=True)",
     "groups.std(1, keepdim=True, correction=0)", "grpo_advantages_by_hand[{}]"),
    ("dr_grpo divided by the mean length", ("grpo",), "(included.sum().clamp(min=1) * response_length)",
     "(included.sum().clamp(min=1) * lengths.float().mean())", "grpo_losses_by_plain_passes[dr_grpo-False-token-{}]"),
    ("truncated episodes counted, dapo", ("grpo",), "return included / (included * lengths).sum().clamp(min=1)",
     "return included / lengths.sum()", "grpo_losses_by_plain_passes[dapo-True-token-{}]"),
    ("k3 the wrong way round", ("grpo",), "difference = ref_logprobs - logprobs",
     "difference = logprobs - ref_logprobs", "grpo_losses_by_plain_passes[grpo-False-token-{}]"),
    ("--cliprange-high ignored", ("grpo",), "cliprange_high = args.cliprange if args.cliprange_high is None else",
     "cliprange_high = args.cliprange if True else", "grpo_clip_fractions_count_what_is_cut[{}]"),
    ("GSPO with the sum of the log-ratio", ("grpo",), "keepdim=True) / batch.lengths[micro][:, None]", "keepdim=True)",
     "grpo_losses_by_plain_passes[grpo-False-sequence-{}]"),
    ("score on the last column", ("ppo",), "last_token = batch.lengths - 1",
     "last_token = batch.lengths * 0 + args.response_length - 1",
     "ppo_values_and_returns_by_plain_passes[value_model_path-False-{}]"),
    ("KL sign", ("ppo",), 'rewards = -state["kl_coef"] * kl_in_reward', 'rewards = state["kl_coef"] * kl_in_reward',
     "ppo_without_values_is_reinforce_on_reward_to_go[llama-{}]"),
    ("value read one position late", ("ppo",), "last_hidden_state.flatten(0, 1)[predict_at]",
     "last_hidden_state.roll(-1, 1).flatten(0, 1)[predict_at]",
     "ppo_values_and_returns_by_plain_passes[value_model_path-False-{}]"),
    ("returns from whitened advantages", ("ppo",), "advantages[batch.mask] = whiten(advantages[batch.mask])",
     "returns = values + advantages.masked_scatter_(batch.mask, whiten(advantages[batch.mask]))",
     "ppo_values_and_returns_by_plain_passes[reward_model_path-True-{}]"),
    ("value after the end is not 0", ("ppo",), "next_advantage = next_value = torch.zeros_like(rewards[:, 0])",
     "next_advantage, next_value = torch.zeros_like(rewards[:, 0]), values[:, -1]",
     "gae_equals_a_loop_over_each_episode[{}]"),
    ("--target-kl compared the wrong way round", ("ppo",), "approxkl > 1.5 * args.target_kl",
     "approxkl < 1.5 * args.target_kl", "ppo_counts_dropped_updates[target_kl-{}]"),
    ("the same numbers in every iteration", ALL, "keyed_rng(args.seed, purpose, iteration).random",
     "keyed_rng(args.seed, purpose).random", "every_iteration_draws_its_own_numbers[{}]"),
    ("ratio to the policy of now", ALL, "new_logprobs.detach() if single_update else logprobs[micro, : mask.shape[1]]",
     "new_logprobs.detach()", "the_ratio_moves_with_the_weights[{}]"),
    ("adapted kl_coef not used", ("ppo",), 'rewards = -state["kl_coef"]', "rewards = -args.kl_coef",
     "ppo_pays_with_the_adapted_kl_coefficient[{}]"),
    ("--whiten-rewards moves the mean", ("ppo",), "rewards = rewards * torch.rsqrt(",
     "rewards = (rewards - rewards[batch.mask].mean()) * torch.rsqrt(",
     "ppo_whitens_rewards_without_moving_their_mean[{}]"),
)]


class Outcome:
    """A pytest plugin that keeps how tests failed."""

    def __init__(self):
        self.failures = []

    def pytest_exception_interact(self, call):
        self.failures.append(call.excinfo.type)


def run_tests(job: tuple[str, str, str, str, list[str]]):
    """Run tests on a copy of a script with `new` for `old` -> name, script, what ran, what came out, seconds, log."""
    (name, script, old, new, tests), started, outcome = job, time.perf_counter(), Outcome()
    test = tests[0] if old else f"all {len(tests)} tests of the mutations below"
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, open(f"{folder}/log", "w+") as log:
        for file in ("test_accounting.py", "pytest.ini", "README.md"):
            shutil.copy(REPO / file, folder)
        Path(folder, "benchmark").symlink_to(REPO / "benchmark")
        source = (REPO / f"{script}.py").read_text()
        if old and source.count(old) != 1:
            return name, script, test, f"STALE: its old text occurs {source.count(old)} times", 0.0, ""
        Path(folder, f"{script}.py").write_text(source.replace(old, new) if old else source)
        os.chdir(folder)
        arguments = ["-q", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider", "--basetemp", f"{folder}/tmp"]
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            status = pytest.main([*arguments, *(f"test_accounting.py::test_{test}" for test in tests)], [outcome])
        by_assertion = [issubclass(kind, (AssertionError, pytest.fail.Exception)) for kind in outcome.failures]
        result = "killed" if status == 1 and by_assertion == [True] else f"ERROR: status {int(status)}"
        if status == 0:
            result = "SURVIVED" if old else "passed"
        os.chdir(REPO)
        log.seek(0)
        return name, script, test, result, time.perf_counter() - started, log.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=ALL)
    parser.add_argument("--only", metavar="NAME", choices={m.name for m in MUTATIONS})
    args = parser.parse_args()
    started = time.perf_counter()
    named = [m for m in MUTATIONS if args.only in (None, m.name)]
    chosen = [(m.name, s, m.old, m.new, [m.test.format(s)]) for m in named for s in m.scripts]
    chosen = [job for job in chosen if args.script in (None, job[1])]
    tests_of = {script: sorted({job[4][0] for job in chosen if job[1] == script}) for script in ALL}
    unmutated = [("(no mutation)", script, "", "", tests) for script, tests in tests_of.items() if tests]

    for library in LIBRARIES:  # once here, not in each of the processes forked below
        importlib.import_module(library)
    sys.dont_write_bytecode = True
    width = max(len(m.name) for m in MUTATIONS)
    print(f"{'name':{width}}  script  {'test':72}  {'result':8}  seconds")
    failed = []
    # a process forked for each run: nothing of a mutation is left for the next
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for jobs, expected in ((unmutated, "passed"), (chosen, "killed")):
            for name, script, test, result, seconds, log in pool.imap(run_tests, jobs):
                print(f"{name:{width}}  {script:6}  {test:72}  {result:8}  {seconds:7.1f}", flush=True)
                if result != expected:
                    failed.append((name, script, result))
                    print(log[-3000:])
            if failed:
                break
    seconds = time.perf_counter() - started
    print(f"{len(chosen)} mutations, {len(failed)} not as they should be, in {seconds:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
