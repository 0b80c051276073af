"""docs/notebook.ipynb has docs/nano/rloo.py in its cells, and what they print.

python tests/test_notebook.py       # runs the notebook, and stores what its cells print
"""

import re
import tempfile
from pathlib import Path
from textwrap import dedent

import nbclient
import nbformat
from conftest import HERE, launcher
from pytest import approx, mark

STORED = HERE / "docs/notebook.ipynb"


def read_notebook():
    return nbformat.read(STORED, as_version=4)


def test_the_notebook_has_nano():
    """All of it, but for empty lines. The first iteration is made by hand, with a stage in a cell.
    Then the loop makes the others."""

    def lines_of(text):
        return re.sub("\n+", "\n", text.strip())

    cells = lines_of("\n".join(cell.source for cell in read_notebook().cells))
    nano = (HERE / "docs/nano/rloo.py").read_text(encoding="utf-8")
    _, program = nano.split('"""\n', 1)
    program = program.replace("(batches, start=1)", "(batches[1:], start=2)")
    beginning, loop = program.split("evaluate()\n", 1)
    _, *stages, _ = re.split(r"(?=    # ----)|(?=    print)", loop)
    for part in [*beginning.split("\n\n\n"), *map(dedent, stages), loop]:
        assert lines_of(part) in cells, f"copy it into a cell:\n{part}"


def run_notebook(old="", new=""):
    """The notebook with its outputs, after it has run in a kernel that starts in its folder.

    old, new: what is replaced in the cells that run
    """
    page = read_notebook()
    sources = [cell.source for cell in page.cells]
    for cell in page.cells:
        cell.source = cell.source.replace("%pip", "#").replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        launcher.copy_script(Path(folder), "rloo")
        Path(folder, "docs").mkdir()
        nbclient.execute(page, cwd=f"{folder}/docs", coalesce_streams=True)
    page = nbformat.reads(nbformat.writes(page).replace(f"{folder}/", ""), as_version=4)
    for cell, cell.source in zip(page.cells, sources):
        if cell.cell_type == "code":
            del cell.metadata["execution"]  # its times
            # Warnings and progress bars are not stored.
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
            for output in cell.outputs:
                shorten(output)
    return page


def shorten(output):
    """Of a long text, the first and last lines stay."""
    lines = output.get("text", "").splitlines(keepends=True)
    if len(lines) > 24:
        output.text = "".join([*lines[:12], "...\n", *lines[-12:]])


def numbers_in(cell):
    """Those in the text of a cell's outputs."""
    numbers = []
    for output in cell.get("outputs", []):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        numbers += map(float, re.findall(r"\d[\d.]*(?:e-?\d+)?", text))
    return numbers


@mark.slow
def test_the_notebook_runs():
    """No cell stops it. The first iteration has the stored numbers. Few iterations follow."""
    for ours, stored in zip(
        run_notebook("batches[1:]", "batches[1:4]").cells, read_notebook().cells
    ):
        if stored.source == "## The other iterations":
            break
        assert numbers_in(ours) == approx(numbers_in(stored), abs=1e-3)


if __name__ == "__main__":
    nbformat.write(run_notebook(), STORED)
