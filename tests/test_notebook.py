"""docs/notebook.ipynb: what this program makes of docs/nano/rloo.py and of the text below.

python tests/test_notebook.py       # writes the notebook again
"""

import json
import re
from textwrap import dedent

from conftest import HERE, launcher
from pytest import mark

STORED = HERE / "docs/notebook.ipynb"
# `%% nano` names pieces of the program, which is cut at two blank lines, and at `# ----`.
PAGE = """
%% markdown
# RLOO in a notebook

First the [short program](nano/README.md), with one iteration step by step. Then the script
`rloo.py`, its metrics and its policy. A CPU needs about a minute. In Colab, first clone the
repository and `%cd` into it.

%% code
import os

if not os.path.exists("rloo.py"):  # A notebook starts in its own folder.
    os.chdir("..")

%% code
%pip install -q -r requirements.txt matplotlib

%% markdown
## The short program

A small policy, wrong on most sums of two-digit numbers, learns to get them right. First the
settings, then the reward.

%% nano 0
%% nano 1
%% markdown
The two jobs of a model: computing the log-probability of each token, and sampling completions.

%% nano 2
%% nano 3
%% nano 4
%% nano 5
%% markdown
Prompts, models and optimizer:

%% nano 6
%% markdown
## One iteration

%% code
evaluate()
iteration, drawn = 1, batches[0]
drawn[:2]

%% nano 8
%% code
for row, completion in zip(rows[:8], completions):
    print(row["prompt"], completion)

%% nano 9
%% code
scores.view(-1, k)  # a row for each group

%% nano 10
%% code
advantages.view(-1, k)

%% nano 11
%% markdown
The loss is 0, because the advantages of a group add up to 0. Its gradient is not:

%% code
print(loss.item(), max(weight.grad.abs().max() for weight in trained))

%% markdown
## The other iterations

%% nano 7 8 9 10 11 12
%% markdown
## The script

It makes the same run in less time, on many processes, too. `main` returns the policy and the
metrics. Here is a shorter run.

%% code
import rloo

policy, metrics = rloo.main(rloo.Args(total_episodes=4096, eval_every=8))

%% code
import matplotlib.pyplot as plt

for name in ("objective/scores", "eval/scores"):
    rows = [row for row in metrics if name in row]
    plt.plot([row["episode"] for row in rows], [row[name] for row in rows], label=name)
plt.xlabel("episode")
plt.legend()
plt.show()

%% markdown
[What each metric means](metrics.md). What the policy says:

%% code
model = policy.language_model
for row in held_out[:8]:
    prompt = policy.tokenizer(row["prompt"], return_tensors="pt").to(model.device)
    tokens = model.generate(**prompt, max_new_tokens=8)[0]
    print(policy.tokenizer.decode(tokens, skip_special_tokens=True))

%% markdown
To change the algorithm: copy a script, and see [what is where](variants.md).
"""


def notebook():
    nano = (HERE / "docs/nano/rloo.py").read_text(encoding="utf-8")
    _, program = nano.split('"""\n', 1)
    pieces = re.split(r"\n\n\n|\n+(?=    # ----|evaluate\(\))", program)
    cells = []
    for part in PAGE.split("\n%% ")[1:]:
        kind, _, text = part.partition("\n")
        kind, *numbers = kind.split()
        if numbers:
            kind = "code"
            text = dedent("\n".join(pieces[int(number)] for number in numbers))
            # The first iteration has been made by hand.
            text = text.replace("(batches, start=1)", "(batches[1:], start=2)")
        lines = text.strip().splitlines(keepends=True)
        cell = dict(cell_type=kind, id=str(len(cells)), metadata={}, source=lines)
        if kind == "code":
            cell |= dict(execution_count=None, outputs=[])
        cells.append(cell)
    kernel = dict(display_name="Python 3", language="python", name="python3")
    page = dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
    return json.dumps(page, indent=1, sort_keys=True) + "\n"


def test_the_notebook_is_made_of_nano():
    assert STORED.read_text() == notebook(), "write it again: python tests/test_notebook.py"


@mark.slow
def test_the_notebook_runs(tmp_path):
    """In a kernel that starts in its folder. The short program makes a few iterations."""
    import nbclient
    import nbformat

    launcher.copy_script(tmp_path, "rloo")
    (tmp_path / "docs").mkdir()
    few = notebook().replace("batches[1:]", "batches[1:4]").replace("%pip", "#")
    nbclient.execute(nbformat.reads(few, as_version=4), cwd=tmp_path / "docs")


if __name__ == "__main__":
    STORED.write_text(notebook())
