"""docs/notebook.ipynb: what this program makes of docs/nano/rloo.py and of the text below, with
the outputs of its cells.

python tests/test_notebook.py       # runs the notebook, and writes it again
"""

import re
import tempfile
from pathlib import Path
from textwrap import dedent

import nbclient
import nbformat
from conftest import HERE, launcher
from nbformat import v4
from pytest import approx, mark

STORED = HERE / "docs/notebook.ipynb"
# `%% nano` names pieces of the program, which is cut at two blank lines, and at `# ----`.
PAGE = r"""
%% markdown
# RLOO in a notebook

First the [short program](nano/README.md), with one iteration step by step. Then the script
`rloo.py`, its metrics and its policy. A CPU needs about a minute. In Colab, first clone the
repository and `%cd` into it.

RLOO samples $k$ completions $y_1, \dots, y_k$ of each prompt, with the policy $p_\text{old}$. A
reward is the score, minus a KL that holds the policy near a reference model:

$$R_i = \text{score}_i - \beta\, (\log p_\text{old}(y_i) - \log p_\text{ref}(y_i))$$

$$A_i = R_i - \frac{1}{k - 1} \sum_{j \neq i} R_j \qquad r_i = \frac{p(y_i)}{p_\text{old}(y_i)}$$

$$L = \text{mean over } i \text{ of } \max(-A_i r_i,\; -A_i\, \text{clip}(r_i, 1 - c, 1 + c))$$

- The **advantage** $A_i$ says how much better a completion is than the others of its prompt.
- The **ratio** $r_i$ says how much likelier a completion is now than when it was sampled.
- The **clip** limits how far one batch can push. A good completion whose ratio is above $1 + c$ has
  a constant loss, so no gradient. So has a bad one whose ratio is below $1 - c$.

In the code $\beta$ is `kl_coef`, and $c$ is `cliprange`.

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

%% markdown
**Rollout**: each prompt stands $k$ times in a row, so four completions in a row are a group.

%% nano 8
%% code
for row, completion in zip(rows[:8], completions):
    print(row["prompt"], completion)

%% markdown
**Score**: 1 for a right sum, else 0.

%% nano 9
%% code
scores.view(-1, k)  # a row for each group

%% markdown
**Advantages**: if one of four is right, its advantage is 1, and that of each other one is -1/3.
Where all four scores are equal, the advantages are 0 (later the KL adds a little).

%% nano 10
%% code
advantages.view(-1, k)

%% markdown
**The clipped loss over the ratio**: an update goes to where the loss is lower. So the ratio of a
good completion grows, and that of a bad one shrinks, until the line is flat.

%% code
import matplotlib.pyplot as plt

r = torch.linspace(0.5, 1.5, 101)
figure, axes = plt.subplots(1, 2, figsize=(7, 2.5))
for axis, A in zip(axes, (1, -1)):
    axis.plot(r, torch.maximum(-A * r, -A * r.clamp(1 - cliprange, 1 + cliprange)))
    axis.set_xticks((1 - cliprange, 1, 1 + cliprange), ("1 - c", "1", "1 + c"))
    axis.grid(axis="x")
    axis.set_title("a good completion, A = 1" if A > 0 else "a bad one, A = -1")
    axis.set_xlabel("ratio r")
axes[0].set_ylabel("loss")
plt.show()

%% markdown
**Optimize**: here one step for each rollout. So the ratio is 1 in every step, and nothing is
clipped. With more PPO epochs it is.

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

It makes the same run in less time, on many processes, too. `main` returns the policy, which is a
model of transformers, and the metrics. Here is a shorter run.

%% code
import rloo

model, metrics = rloo.main(rloo.Args(total_episodes=4096, eval_every=8))

%% code
plt.figure(figsize=(5, 2.5))
for name in ("objective/scores", "eval/scores"):
    rows = [row for row in metrics if name in row]
    plt.plot([row["episode"] for row in rows], [row[name] for row in rows], label=name)
plt.xlabel("episode")
plt.legend()
plt.show()

%% markdown
[What each metric means](metrics.md). What the policy says:

%% code
for row in held_out[:8]:
    prompt = tokenizer(row["prompt"], return_tensors="pt").to(model.device)
    tokens = model.generate(**prompt, max_new_tokens=8)[0]
    print(tokenizer.decode(tokens, skip_special_tokens=True))

%% markdown
To change the algorithm: copy a script, and see [what is where](variants.md).
"""


def notebook():
    nano = (HERE / "docs/nano/rloo.py").read_text(encoding="utf-8")
    _, program = nano.split('"""\n', 1)
    pieces = re.split(r"\n\n\n|\n+(?=    # ----|evaluate\(\))", program)
    kernel = dict(display_name="Python 3", language="python", name="python3")
    page = v4.new_notebook(metadata=dict(kernelspec=kernel))
    for part in PAGE.split("\n%% ")[1:]:
        kind, _, text = part.partition("\n")
        kind, *numbers = kind.split()
        if numbers:
            text = dedent("\n".join(pieces[int(number)] for number in numbers))
            # The first iteration has been made by hand.
            text = text.replace("(batches, start=1)", "(batches[1:], start=2)")
        make = v4.new_markdown_cell if kind == "markdown" else v4.new_code_cell
        page.cells.append(make(text.strip(), id=str(len(page.cells))))
    return page


def run_notebook(old="", new=""):
    """The notebook with its outputs, after it has run in a kernel that starts in its folder.

    old, new: what is replaced in the cells that run
    """
    page = notebook()
    ran = notebook()
    for cell in ran.cells:
        cell.source = cell.source.replace("%pip", "#").replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        launcher.copy_script(Path(folder), "rloo")
        Path(folder, "docs").mkdir()
        nbclient.execute(ran, cwd=f"{folder}/docs")
    ran = nbformat.reads(nbformat.writes(ran).replace(f"{folder}/", ""), as_version=4)
    for cell, done in zip(page.cells, ran.cells):
        if cell.cell_type == "code":
            cell.execution_count = done.execution_count
            cell.outputs = printed(done.outputs)
    return page


def printed(outputs):
    """What is stored: the printed text as one output, the first and last lines of many; and what is
    no text. Warnings and progress bars are not."""
    text = "".join(output.text for output in outputs if output.get("name") == "stdout")
    lines = text.splitlines(keepends=True)
    if len(lines) > 24:
        lines = [*lines[:12], "...\n", *lines[-12:]]
    kept = [output for output in outputs if output.output_type != "stream"]
    if lines:
        kept.insert(0, v4.new_output("stream", name="stdout", text="".join(lines)))
    return kept


def numbers_in(cell):
    """Those in the text of a cell's outputs."""
    numbers = []
    for output in cell.get("outputs", []):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        numbers += map(float, re.findall(r"\d[\d.]*(?:e-?\d+)?", text))
    return numbers


def test_the_notebook_is_made_of_nano():
    stored = nbformat.read(STORED, as_version=4)
    cells = [cell.source for cell in stored.cells]
    ours = [cell.source for cell in notebook().cells]
    assert cells == ours, "write it again: python tests/test_notebook.py"


@mark.slow
def test_the_notebook_runs():
    """No cell stops it. The first iteration has the stored numbers. Few iterations follow."""
    few = run_notebook("batches[1:]", "batches[1:4]").cells
    stored = nbformat.read(STORED, as_version=4).cells
    end = [cell.source for cell in few].index("## The other iterations")
    for ours, theirs in zip(few[:end], stored):
        assert numbers_in(ours) == approx(numbers_in(theirs), abs=1e-3)


if __name__ == "__main__":
    nbformat.write(run_notebook(), STORED)
