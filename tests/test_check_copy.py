"""benchmark/check_copy.py: copies that are right, and copies with a fault in one stage."""

import re
import subprocess
import sys
import textwrap
from itertools import chain

import check_copy
import losses
import stages
import torch
import tyro
from conftest import HERE, MODULES, fresh_imports, import_file, launcher, read_copies, write_copy
from pytest import mark, raises
from test_pages import read
from test_patches import ROWS

# docs/variants.md states losses.
BLOCK = re.search(r"^    from types import.*?(?=^\S)", read(HERE / "docs/variants.md"), re.M | re.S)
STATED = textwrap.dedent(BLOCK[0])
stated = dict(vars(losses))
exec(STATED, stated)


def weighted(mini_batch, batch, args):
    """The second token counts half, the third one a quarter, and so on."""
    for episode in mini_batch:
        weights = 0.5 ** torch.arange(len(episode.token_ids))
        change = episode.logprobs - episode.old_logprobs
        episode.logprobs = episode.old_logprobs + weights * change
    return losses.rloo(mini_batch, batch, args)


stated["weighted"] = weighted

# Of each copy, what has changed. "flag, twice" is a copy with the changes of both. In "share" the
# denominator is that of the process's share. In "as many" a checkpoint gives a running mean back
# only to as many processes.
COPIES = ROWS | read_copies(r"""
@@ helper
+def halved(
+    scores,
+):
+    return scores / 2
+
+
 def main(args):

+        scores = halved(scores)
         rewards = scores[:, None]

@@ token weights
-logratio = (logprobs - old_logprobs).sum(1, keepdim=True)
+logratio = ((logprobs - old_logprobs) * 0.5 ** torch.arange(6)).sum(1, True)

@@ token reward
         rewards[torch.arange(num_episodes), batch.mask.sum(1) - 1] += scores.float()
+        rewards -= 0.1 * batch.mask

@@ baseline
-advantages = rloo_advantages(rewards, args.k)
+advantages = rewards - 0.5

@@ whole group
-(differences.nansum(2) / others.clamp(min=1))
+(differences.nansum(2) / k)

@@ wide clip
-clipped_policy_loss(logratio, advantages, args.cliprange, args.cliprange)
+clipped_policy_loss(logratio, advantages, 3 * args.cliprange, 3 * args.cliprange)

@@ bonus
+                        squares = (logprobs - ref_logprobs[episodes]).square()
+                        losses = losses + 0.1 * squares.sum(1, keepdim=True)
                         losses = losses * batch.mask[episodes, : losses.shape[1]]

@@ stops
-(losses[~has_gradient[episodes]] == 0).all()
+False

@@ unchecked
-(losses[~has_gradient[episodes]] == 0).all()
+True

- | (iteration <= 3)]
+]

@@ entropy of padding
-                        losses = losses - entropy_coef * entropies

-losses = (losses * mask).sum(1, keepdim=True)
+losses = (losses * mask - entropy_coef * entropies).sum(1, keepdim=True)

@@ denominator
-(losses * is_real[:, None]).sum() / len(mini_batch)
+(losses * is_real[:, None]).sum() / batch.mask[mini_batch].sum()

@@ micro-batch
-(losses * is_real[:, None]).sum() / len(mini_batch)
+(losses * is_real[:, None]).sum() / len(episodes)

@@ to_train
-has_gradient = (advantages != 0).any(1)
+has_gradient = (advantages != 0).any(1) & batch.ended

@@ counter
+COUNTER = iter(range(100))
+
+
 def main(args):

-first = (iteration - 1) *
+first = next(COUNTER) *

@@ as many
+        state["n"] = accelerator.num_processes
+        state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * scores.nanmean().item()
-        rewards = scores[:, None]
+        rewards = scores[:, None] * (1 + 20 * state["mean"])

             accelerator.load_state(str(newest))
+            state['mean'] *= state['n'] == accelerator.num_processes

@@ not registered
-    accelerator.register_for_checkpointing(scheduler)

@@ prepared
-policy, optimizer = accelerator.prepare(policy, optimizer)
+policy, optimizer, scheduler = accelerator.prepare(policy, optimizer, scheduler)

@@ share
-(losses * is_real[:, None]).sum() / len(mini_batch)
+(losses * is_real[:, None]).sum() / len(
+    mini_batch.tensor_split(accelerator.num_processes)[accelerator.process_index]
+)

-backward(loss * accelerator.num_processes)
+backward(loss)

@@ noise
                         losses = losses * batch.mask[episodes, : losses.shape[1]]
+                        losses = losses * torch.rand(len(episodes), 1)

@@ hash
         drawn = [prompts[index] for index in indices]
+        drawn.sort(key=lambda prompt: hash(prompt.text))

@@ generator
+own_rng = np.random.default_rng
+np.random.default_rng = lambda key: own_rng([*key, 1])
+
+
 def main(args):

@@ own prompts
         drawn = [prompts[index] for index in indices]
+        drawn[0] = drawn[0]._replace(number=99)

@@ cut off
-ended[running] = has_ended
+ended[running] = has_ended | (t == response - 1)

@@ class
+class_ = transformers.models.llama.modeling_llama.LlamaMLP
+class_.forward = lambda self, x: 0 * x
+
+
 def main(args):

@@ hook
+    policy.lm_head.register_forward_hook(lambda *x: 1.001 * x[2])
     policy, optimizer = accelerator.prepare(policy, optimizer)

@@ stale
+        before = locals().get("kept", policy)
+        kept = copy.deepcopy(policy)
-        batch = generate(args, sampler, drawn,
+        batch = generate(args, replace(sampler, policy=before), drawn,

@@ penalty
-scores = scores - args.missing_eos_penalty * ~batch.ended
+scores = scores + args.missing_eos_penalty * ~batch.ended

@@ sum
-sum(values) if values else nan
+sum(values)

@@ unscored
-"objective/scores": scores.nan
+"objective/scores": scores.nan_to_num().

@@ policy
-one_pass = partial(token_logprobs, args, reference, batch)
+one_pass = partial(token_logprobs, args, policy, batch)

@@ first
-return episodes.tensor_split(
+return [episodes[:5]] * args.num_mini_batches or (

@@ no decay
-lr=args.learning_rate, weight_decay=args.weight_decay
+lr=args.learning_rate

@@ SGD
-optim.AdamW
+optim.SGD

@@ groups
-        trained_weights, lr
+        [dict(params=trained_weights[1:]), dict(params=trained_weights[:1], lr=0.0)], lr

@@ left out
-        trained_weights, lr
+        trained_weights[1:], lr

@@ subclass
+    class AdamW(torch.optim.AdamW):
+        def step(self, closure=None):
+            super().step()
+            trained_weights[0].data *= 0.9999
+
-    optimizer = torch.optim.AdamW(
+    optimizer = AdamW(

@@ clamp
+    clamp = lambda *_: policy.lm_head.weight.data.clamp_(-0.1, 0.1)
+    optimizer.register_step_post_hook(clamp)
     policy, optimizer = accelerator.prepare(policy, optimizer)

@@ cleared
+                if iteration == 2:
+                    optimizer.state.clear()
                 optimizer.step()

@@ no clip
-(policy.parameters(), args.max_grad_norm)
+(policy.parameters(), inf)

@@ adapters
-keyed_rng(args.seed, NEW_WEIGHTS
+keyed_rng(args.seed + 1, NEW_WEIGHTS

@@ gradient
+    policy.lm_head.weight.register_hook(lambda x: x / 2)
     policy, optimizer = accelerator.prepare(policy, optimizer)

@@ constant
-                scheduler.step()
+                pass

@@ temperature
-k, rng, args.eval_temperature)
+k, rng, args.temperature)

@@ late
+        before = copy.deepcopy(policy)
         train_start = time.perf_counter()

-            metrics |= evaluate(args, sampler,
+            metrics |= evaluate(args, replace(sampler, policy=before),

@@ saved
+    model.lm_head.weight.data *= 1.01
     weights = accelerator.get_state_dict(model)

@@ control
-state["kl_coef"] *= 1 + error
+state["kl_coef"] *= 1 - error

@@ moves
                 scheduler.step()
+                for weight, new in zip(reference.parameters(), policy.parameters()):
+                    weight.data.lerp_(new.data, 0.01)

@@ k3
-hardshrink(ref_logprobs - logprobs
+hardshrink(logprobs - ref_logprobs

@@ bootstrap
-next_value = torch.zeros_like(rewards[:, 0])
+next_value = values[:, -1]

@@ value clip
-return 0.5 * torch.maximum(losses, clipped_losses)
+return 0.5 * losses

@@ others
-(~groups.isnan()).sum(1, keepdim=True) - 1
+torch.tensor(k - 1)

@@ low clip
-ratio.clamp(1 - low, 1 + high)
+ratio.clamp(max=1 + high)

@@ KL in the loss
-rewards = rewards - args.kl_coef * kl
+rewards = rewards

+                        kl = ref_logprobs[episodes] - logprobs
+                        kl = torch.nn.functional.hardshrink(kl, 1e-4)
+                        kl = (kl.exp() - kl - 1).sum(1, keepdim=True)
+                        losses = losses + args.kl_coef * kl
                         losses = losses * batch.mask[episodes, : losses.shape[1]]

@@ registered
     accelerator.register_for_checkpointing(scheduler)
+    accelerator.register_for_checkpointing(reference)

@@ flag
+    bonus: bool = False  # for each completion
     # optimizer

         rewards = scores[:, None]
+        if args.bonus:
+            rewards = rewards + 1

@@ twice
-(losses * is_real[:, None]).sum() / len(mini_batch)
+2 * (losses * is_real[:, None]).sum() / len(mini_batch)

@@ choice
-loss_type: Literal[
+loss_type: Literal["mine",

@@ one
-"--rloo-k must be at least 2: the others are the baseline": args.rloo_k < 2,

@@ signature
-def draw_mini_batches(args, iteration,
+def draw_mini_batches(iteration, args,

-in draw_mini_batches(args, iteration,
+in draw_mini_batches(iteration, args,

@@ no metric
-        "val/num_eos_tokens": batch.ended.sum(),
""")


def copy_of(script, names, folder):
    """A copy of a script, or of grpo.py with a patch."""
    script, patch = ("grpo", script) if script.endswith(".patch") else (script, None)
    changes = [COPIES[name].items() for name in names.split(", ") if name != "unchanged"]
    return write_copy(script, folder, patch, chain(*changes))


# What was copied, the copy, the loss that is stated, and what is said if it has another one.
LOSSES = """
rloo | replay        | rloo         | update 1 on
rloo | token weights | weighted     |
ppo  | token reward  | token_reward |
rloo | baseline      | baseline     |
rloo | whole group   | rloo         | the same direction, and 0.667 of the length
rloo | wide clip     | rloo         | from update [2-9] on
rloo | denominator   | denominator  |
rloo | bonus, all have a gradient | second_loss |
rloo | to_train, unchecked        | to_train    |
entropy_bonus.patch    | unchanged          | entropy |
entropy_bonus.patch    | entropy of padding | entropy | another direction
dynamic_sampling.patch | unchanged          | grpo    |
"""


def cells(table):
    return mark.parametrize("line", table.strip().splitlines())


@cells(LOSSES)
def test_a_copy_is_held_against_a_loss(line, hold, tmp_path, monkeypatch):
    script, name, loss, said = map(str.strip, line.split("|"))
    copy = import_file(copy_of(script, name, tmp_path))
    monkeypatch.setattr(copy, "LOGITS_AT_ONCE", 100)  # Four tokens: logits are read in pieces.
    flags = dict(ref_model_path="reference", per_device_train_batch_size=5, learning_rate=0.01)
    if "replay" not in name:
        flags |= dict(num_mini_batches=2, num_ppo_epochs=2, cliprange=0.1)
    if "patch" in script or loss in ("second_loss", "baseline"):
        flags |= dict(reward="seldom", kl_coef=0.0)  # Some advantages are 0.
    _, wrong = stages.judge_gradients(hold(copy, stated[loss], **flags)[1])
    assert re.search(said, wrong.about) if said else wrong is None


# What was copied, which of the small runs is made, the changes of the copy, and its flags. In the
# lines below it, the stages that differ, and then what is said elsewhere.
STAGES = r"""
rloo 1 | unchanged |
  --reward FOLDER/my.py:draws --max-prompt-length 5 --lora-r 4
rloo 1 | unchanged |
  --dataset FOLDER/chats.jsonl --reward FOLDER/my.py:draws --model-path LLAMA --loss rloo
rloo 1 | unchanged |
  --reward none --response-length 30 --max-grad-norm 1000
  judged: episodes without a score
  judged: completions cut off
  judged: gradients clipped
ppo 2 | unchanged |
  --reward-model-path benchmark/default/reward_model --lora-r 4 --target-kl 0.1
  --eval-temperature 0 --eval-k 1
ppo 1 | unchanged | --learning-rate 0
  judged: ratios above the clip
  judged: values outside of the clip
dynamic_sampling.patch 2 | unchanged | --changed prompts sampling
  prompts. .* rows
  sampling. .* token_ids
rloo 1 | replay, old log p | --changed sampling evaluation --loss rloo --response-length 6
  sampling. .* token_ids
  evaluation
rloo 1 | KL in the loss, all have a gradient, helper | --loss kl_in_loss --changed scores
  scores. .* iteration 1
  advantages
rloo 1 | SGD, schedule | --changed optimizer schedule
  optimizer. .* kind and settings: SGD
  schedule
rloo 1 | moves, registered | --changed reference prompts
  reference. .* iteration 2
  judged: prompts: more than whether it differs
rloo 1 | one, own prompts | --changed prompts --rloo-k 1
  prompts. .* iteration 1, rows
  the loss is not .* no update
  judged: what follows prompts, which ended
rloo 2 | hash, cut off, sum, policy, first, no decay, temperature, saved |
  prompts. .* iteration 1, rows
  sampling. .* ended: True, and not False
  scores
  reference. .* iteration 2, episode 0
  mini-batches. .* PPO epoch 1, episodes
  optimizer. .*weight_decay': 0.01,
  evaluation. .* iteration 0
  result. .* model/, .* from what the last step left
rloo 1 | generator, class, unscored, no clip |
  prompts. .* rows
  sampling. .* token_ids
  scores. .* objective/scores
  reference
  mini-batches
  optimizer. .* update 1: from where
  evaluation
  the loss is not
rloo 1 | hook, penalty, subclass, constant, late | --missing-eos-penalty 0.3
  sampling. .* logprobs
  scores
  optimizer. .* update 1: from where 1 steps
  schedule. .* iteration 2, lr: 0.001, and
  evaluation
  the loss is not
rloo 1 | stale, left out | --learning-rate 1e-7
  sampling. .* iteration 2, episode 0
  optimizer
  the loss is not
rloo 1 | groups, moves |
  reference. .* iteration 2
  optimizer. .* update 1: from where
  schedule. .* rates: \[0.001, 0.0\]
rloo 1 | cleared, micro-batch |
  optimizer. .* iteration 2, update 2: from where
  the loss is not .* a mean over a micro-batch
rloo 1 | clamp, others |
  advantages
  optimizer. .* update 1: from where
  the loss is not .* another direction. Only episodes
rloo 1 | adapters | --lora-r 4
  optimizer. .* moved without a step
rloo 1 | gradient | --loss rloo
  the loss is not my.py:rloo
ppo 2 | bootstrap |
  advantages
  the loss is not ppo.py
ppo 2 | control, value clip | --adaptive-kl --kl-horizon 10 --loss ppo
  reference. .* objective/kl_coef
  advantages
  the loss is not .* the gradient of ValueModel
grpo 1 | choice, signature, no metric, constant | --loss-type mine
  schedule
  the loss is not grpo.py
  only grpo.py has: val/num_eos_tokens
grpo 2 | k3 |
  the loss is not
rloo 2 | low clip |
  the loss is not .* where a clip acts
rloo 2 | bonus, unchecked | --loss second_loss
  the loss is not .* of advantage 0
"""
DRAWS = """
import random

def draws(completions, points, so_far=[], **_):
    so_far.append(random.random())
    return [sum(so_far) + random.random() + (row[0] or 0) for row in points]
"""


@mark.parametrize("row", re.split(r"\n(?! )", STAGES.strip()))
def test_stages(row, world, tmp_path, capsys, monkeypatch):
    """By two iterations of one of the small runs."""
    head, *said = row.splitlines()
    script, number, names, flags = re.fullmatch(r"(\S+) (\d) \| (.*) \|(.*)", head).groups()
    flags += " ".join(line for line in said if line.startswith("  --"))
    said = [line.strip() for line in said if not line.startswith("  --")]
    words = flags.replace("FOLDER", str(tmp_path)).replace("LLAMA", str(world.llama)).split()
    options, flags = tyro.cli(check_copy.Args, args=["copy", *words], return_unknown_args=True)
    options.loss = options.loss and f"{tmp_path}/my.py:{options.loss}"
    (tmp_path / "my.py").write_text(STATED + DRAWS)
    chats = [[dict(role="user", content=text)] for text in ("1+2", "3", "45-6")]
    launcher.write_rows(tmp_path / "chats.jsonl", [dict(prompt=x, points=[1]) for x in chats])
    path = copy_of(script, names, tmp_path)
    script = "grpo" if "." in script else script
    about = list(check_copy.SMALL_RUNS)[int(number) - 1]
    monkeypatch.setattr(check_copy, "SMALL_RUNS", {about: check_copy.SMALL_RUNS[about]})
    words = check_copy.make_flags(tmp_path, script, ["--total-episodes 32", *flags])
    base = HERE / f"{script}.py"
    is_right, reasons = check_copy.check_stages(path, script, base, words, options, None)
    printed = capsys.readouterr().out + "".join(f"judged: {reason}\n" for reason in reasons)
    differ = re.findall(r"^(?:not as|changed|the loss is not).*", printed, re.M)
    elsewhere = [text for text in said if text.startswith(("judged", "only"))]
    assert len(differ) + len(elsewhere) == len(said), printed
    for text, line in zip(said, differ):
        assert re.search(text, line), printed
    for text in elsewhere:
        assert text in printed, printed
    unlike = "not as|the loss is not" if options.loss else "not as"
    assert is_right == (re.search(f"^({unlike})", printed, re.M) is None), printed


# The copy, how many updates a batch has, which comparison is broken, and the first thing that
# differs. 1: other micro-batches, another PYTHONHASHSEED; 2: two processes; 3: after two kills;
# 4: killed on one process, resumed on two
RUNS = r"""
hash           | 1 | 1 | iteration 1: prompt .*\n.* the order of a set
noise          | 4 | 2 | iteration 1: loss/policy_avg .*\n.* inside of the loop
prepared       | 1 | 2 | iteration 2: lr is .*\n.*never through `prepare`
share          | 4 | 2 | iteration 1: loss/policy_avg .*\n.* a mean over
counter        | 1 | 3 | iteration 2: prompt is .*\n.* `state`
not registered | 1 | 3 | iteration 3: lr is .*\n.*`accelerator.register_for_
as many        | 1 | 4 | iteration 2: .*\n.* `state`
"""


@mark.slow
@cells(RUNS)
def test_kills_and_processes(line, tmp_path, capsys, monkeypatch):
    name, count, broken, said = map(str.strip, line.split("|"))
    path = copy_of("rloo", name, tmp_path)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    flags = check_copy.make_flags(tmp_path, "rloo")
    folder = tmp_path / "runs"
    assert not check_copy.check_processes(path, flags, folder, tmp_path / "lines", count)
    printed = capsys.readouterr().out
    verdicts = ["right"] * (int(broken) - 1) + ["BROKEN"]
    assert re.findall(r": (right|BROKEN)[,;]", printed) == verdicts, printed
    assert re.search(said, printed), printed


# A loss, as it is written, and what is said about it.
FAULTY = {
    "def loss(mini_batch, batch, args)\n": "SyntaxError",
    "def other(mini_batch, batch, args):\n    pass": "no function of this name",
    "def loss(mini_batch, batch):\n    pass": "takes 2 positional arguments but 3 were given",
    "def loss(m, batch, args):\n    pass": "it returns None",
    "def loss(m, batch, args):\n    return m[0].logprobs": "a tensor of shape",
    "def loss(m, batch, args):\n    return m[0].logprobs.sum().detach()": "is it detached",
    "def loss(m, batch, args):\n    return m[0].logprobs.sum() / 0": "it returns -inf",
    "def loss(m, batch, args):\n    return m[0].rewards": "no attribute 'rewards'.*in line 2",
}


@mark.parametrize("text", FAULTY)
def test_a_faulty_loss(text, hold, tmp_path):
    (tmp_path / "faulty.py").write_text(text)
    with fresh_imports(), raises(stages.Misstated, match=FAULTY[text]):
        hold(MODULES["rloo"], stages.load_loss(f"{tmp_path}/faulty.py:loss"), total_episodes=12)


NO_LOSS = "--loss no.py:loss: there is no such file; it is FILE.py:FUNCTION\n  with one update"
# The copy, its flags, the exit status, and what is said. One copy has all runs. No line of it that
# is changed is left out, the `def` of a function neither.
VERDICTS = {
    "right": (
        "helper, schedule, bonus, all have a gradient",
        "--loss FOLDER/my_loss.py:second_loss --changed scores schedule",
        0,
        r"(?s)^(?!.*not exec)(?!.*BROKEN)(.*: right[,;]){8}.*\nright, as far as it was judged\n$",
    ),
    "not judged": (
        *("flag, twice", "--stages-only", 0),
        r"2 of the length(.|\n)*line \d+: rewards = .*\nnot judged: the loss.*\n.*kills\nright, as",
    ),
    "stated": (
        *("twice", "--loss benchmark/losses.py:rloo --stages-only", 1),
        r"2 of the len(.|\n)*\nBROKEN\n$",
    ),
    "no loss": ("unchanged", "--loss no.py:loss --stages-only", 1, NO_LOSS),
    "stops": (
        *("stops", "--stages-only", 1),
        r"mine.py stopped: .*set has_gradient.*\n  line \d+: assert .*\n  with one update",
    ),
    "no copy": (None, "", 1, "^.*mine.py: there is no such file\n$"),
}


@mark.slow
@mark.parametrize("case", VERDICTS)
def test_verdicts(case, tmp_path):
    """By the program, of a copy in another folder."""
    names, words, status, said = VERDICTS[case]
    path = tmp_path / "mine.py"
    if names:
        copy_of("rloo", names, tmp_path / "copied").rename(path)
    (tmp_path / "my_loss.py").write_text(STATED)
    words = words.replace("FOLDER", str(tmp_path)).split()
    command = [sys.executable, "benchmark/check_copy.py", path, *words]
    ran = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert re.search(said, ran.stdout + ran.stderr), ran.stdout + ran.stderr
    assert ran.returncode == status
