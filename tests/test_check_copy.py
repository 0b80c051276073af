"""benchmark/check_copy.py: what it says about copies of rloo.py that are right, or have a fault."""

import os
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
RIGHT, BROKEN = "right", "BROKEN"


@mark.slow
@mark.parametrize(
    "copy, flags, verdicts, said",
    [
        ("flag", ["--bonus"], [RIGHT] * 4, r"\nright\n"),
        ("flag", [], [RIGHT] * 4, r"line \d+: rewards = rewards \+ 1.*\nright, as far as it ran\n"),
        ("replay", [], [BROKEN, RIGHT] * 2, "iteration 2: score is .*\n.* `state`"),
        ("main process", [], [BROKEN, RIGHT] * 2, "iteration 3: loss/policy_avg is .*\n.* `state`"),
        ("share", [], [RIGHT] * 3 + [BROKEN], "iteration 1: loss/policy_avg is .*\n.* a mean over"),
        ("evaluation", [], [BROKEN] * 4, "iteration 0: eval/.*\n.* `keyed_rng`"),
    ],
    ids=["right", "flag", "replay", "main process", "share", "evaluation"],
)
def test_a_changed_copy_is_checked(copy, flags, verdicts, said, tmp_path):
    """The verdicts after kills and about the second process, with one update for each batch, and
    with four; and the first thing that differs. Nothing stays of what the runs wrote and printed.
    """
    path = changed("rloo", tmp_path, texts=COPIES[copy]).__file__
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, HERE / "benchmark/check_copy.py", path, *flags]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert re.findall(r": (right|BROKEN)[,;]", ran.stdout) == verdicts, ran.stderr
    assert re.search(said, ran.stdout), ran.stdout
    assert ("not executed" in ran.stdout) == ("as far" in said)
    assert ran.returncode == (BROKEN in verdicts)
    assert not ran.stderr
    # PyTorch makes an empty folder of its own.
    left = [path for path in tmp_path.iterdir() if "torchinductor" not in path.name]
    assert sorted(left) == before
