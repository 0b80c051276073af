"""benchmark/check_copy.py: what it says about copies of rloo.py that are right, or have a fault."""

import re
import subprocess
import sys

from conftest import HERE
from pytest import mark
from test_pages import changed

LOSS = "(losses * is_real[:, None]).sum() / len(mini_batch)"
REWARDS = "rewards = scores[:, None]"
LOADED = "state = json.loads(file.read_text())"
COPIES = {  # the texts before and after
    "flag": {
        "    # optimizer\n": "    bonus: bool = False  # for each completion\n    # optimizer\n",
        REWARDS: f"{REWARDS}\n        if args.bonus:\n            rewards = rewards + 1",
    },
    # The same prompt scores more when it comes again. A resumed run has forgotten.
    "replay": {
        "\n\ndef main(args):": "\n\nSEEN = {}\n\n\ndef main(args):",
        REWARDS: f"""for i, prompt in enumerate(batch.prompts):
            scores[i] += SEEN.get(prompt.text, 0.0)
        SEEN.update((prompt.text, 1.0) for prompt in batch.prompts)
        {REWARDS}""",
    },
    # A running mean that only the main process takes from a checkpoint.
    "main process": {
        LOADED: f"""{LOADED}
        if not accelerator.is_main_process:
            state.pop("mean", None)""",
        REWARDS: f"""state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * scores.mean().item()
        {REWARDS} * (1 + 20 * state["mean"])""",
    },
    # A mean over the process's share of the mini-batch.
    "share": {
        LOSS: LOSS[:-1] + ".tensor_split(accelerator.num_processes)[accelerator.process_index])",
        "backward(loss * accelerator.num_processes)": "backward(loss)",
    },
    "evaluation": {"keyed_rng(args.seed, EVALUATION, iteration)": "np.random.default_rng()"},
}
# The copy, flags, the verdicts after kills and about the second process, with one update for each
# batch and with four, and the first thing that differs.
CASES = r"""
flag         | --bonus | right right right right | \nright\n
flag         |         | right right right right | line \d+: rewards = .*\nright, as far as it ran\n
replay       |         | BROKEN right BROKEN right | iteration 2: score is .*\n.* `state`
main process |         | BROKEN right BROKEN right | iteration 3: loss/policy_avg is .*\n.* `state`
share        |         | right right right BROKEN | iteration 1: loss/policy_avg .*\n.* a mean over
evaluation   |         | BROKEN BROKEN BROKEN BROKEN | iteration 0: eval/.*\n.* `keyed_rng`
"""


@mark.slow
@mark.parametrize("line", CASES.strip().splitlines())
def test_a_changed_copy_is_checked(line, tmp_path):
    copy, flags, verdicts, said = map(str.strip, line.split("|"))
    path = changed("rloo", tmp_path, texts=COPIES[copy]).__file__
    command = [sys.executable, HERE / "benchmark/check_copy.py", path, *flags.split()]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert re.findall(r": (right|BROKEN)[,;]", ran.stdout) == verdicts.split(), ran.stderr
    assert re.search(said, ran.stdout), ran.stdout
    assert ("not executed" in ran.stdout) == ("as far" in said)
    assert ran.returncode == ("BROKEN" in verdicts)
    assert not ran.stderr
