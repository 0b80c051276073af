"""Writes every table of measured numbers into its page, from the data in benchmark/.

    python benchmark/tables.py

A table stands in a page below a comment that says where its rows come from. Its head is written by
hand. Each line of the comment makes rows:

    <!-- table: default/curves.json part=default each=script: {script}|{greedy_after:±.3f} -->
    | script | right answers |
    |---|---|
    <!-- end of table -->

The first word is a file of results, or several with commas between. NAME=PATTERN chooses those of
its rows whose entry NAME fits a regular expression. `each` has names: every group of rows with
equal entries of these names makes one row of the table, and without `each` all of them make one.
After ": " stands that row, with fields:

    {script}                     an entry that is equal in the group
    {score:.3f}                  the mean of the group's numbers
    {score:±.3f}                 with half of its 95 % interval; or min, max, sum, count
    {score:range.3f}             the smallest and the largest, or one where they are equal
    {distance:apart}             the same of how far runs are apart. 0 means the same bits.
    {eval/scores[-1]:.2f}        of lists the last number
    {score@method=PPO:.2f}       of the rows that fit this, in place of the group's own entry
    {after - before:±.3f}        the differences, row by row

A cell is empty where a number is missing. Where a line names a program and one of its functions,
this function yields the cells of each row: `<!-- table: ladder/ladder.py fresh -->`.

So a number is measured by a program, stored once as JSON, and shown once. tests/test_pages.py
checks that writing the tables again changes nothing.
"""

import json
import re
from statistics import mean

import tyro
from draw import mean_and_band
from run import BENCHMARK, ROOT, having, import_script

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *BENCHMARK.glob("**/*.md")]
TABLE = re.compile(
    r"(<!-- table: ((?:.|\n)*?) -->\n\|.*\n\|.*\n)(?:\|.*\n)*(<!-- end of table -->)"
)


def pretty(number, form):
    """A number without leading zeros in its exponent."""
    return f"{number:{form}}".replace("e-0", "e-")


def number(value):
    """With one, two or three decimals, and in powers of ten what is smaller."""
    size = abs(value)
    if size >= 10:
        return f"{value:,.1f}"
    if size >= 0.01 or size == 0:
        return f"{value:.2f}"
    if size >= 0.001:
        return f"{value:.3f}"
    return pretty(value, ".0e")


def with_band(values, form=".2f"):
    """The mean, and half of its 95 % interval."""
    middle, band = mean_and_band(values)
    return f"{middle:{form}} ± {band:{form.removeprefix('+')}}"


FUNCTIONS = {"": mean, "min": min, "max": max, "sum": sum, "count": len}


def show(values, how):
    """The values of a field, as the words after its colon say."""
    function, form = re.fullmatch(r"([a-z±]*)(.*)", how).groups()
    if function == "±":
        return with_band(values, form)
    if function in ("range", "apart"):
        ends = (min(values), max(values))
        texts = [pretty(value, form) for value in ends]
        if function == "apart":
            texts = [number(value) if value else "same bits" for value in ends]
        return " to ".join(dict.fromkeys(texts))
    return pretty(FUNCTIONS[function](values), form)


def fitting(rows, patterns):
    """The rows that have entries of these names, which fit the patterns."""
    for name, pattern in patterns.items():
        rows = [row for row in rows if re.fullmatch(pattern, str(row.get(name, "")))]
    return rows


def values_of(rows, group, words):
    """What NAME[INDEX]@NAME=PATTERN means in a group of rows."""
    words, *conditions = words.split("@")
    patterns = dict(condition.split("=") for condition in conditions)
    name, *index = re.findall(r"[^][]+", words)
    if not any(name in row for row in rows):
        raise KeyError(f"no row has {name}")
    own = {key: group[key] for key in group if key not in patterns}
    values = []
    for row in fitting(having(rows, **own), patterns):
        value = row.get(name)
        if value is not None:
            for place in index:
                value = value[int(place) if isinstance(value, list) else place]
            values += value if isinstance(value, list) else [value]
    return values


def fill(cell, rows, group):
    """A cell with its fields filled in, for a group of rows."""
    for field in re.findall(r"\{(.*?)\}", cell):
        words, _, how = field.partition(":")
        values, *others = (values_of(rows, group, words) for words in words.split(" - "))
        for other in others:
            values = [a - b for a, b in zip(values, other, strict=True)]
        if not values:
            return ""
        text = values[0]
        if how:
            text = show(values, how)
        elif any(value != text for value in values):
            raise ValueError(f"{field} is not equal in the group: {values}")
        cell = cell.replace(f"{{{field}}}", str(text))
    return cell


def rows_of(line):
    """The cells of each row that a line of a comment makes."""
    source, _, template = line.partition(": ")
    path, *words = source.split()
    if path.endswith(".py"):
        function, *arguments = words
        yield from getattr(import_script(BENCHMARK / path), function)(*arguments)
        return
    patterns = dict(word.split("=") for word in words)
    each = patterns.pop("each", "").split(",")
    rows = []
    for file in path.split(","):
        rows += fitting(json.loads((BENCHMARK / file).read_bytes())["rows"], patterns)
    groups = []
    for row in rows:
        group = {name: row[name] for name in each if name in row}
        if group not in groups:
            groups.append(group)
            yield [fill(cell.strip(), rows, group) for cell in template.split("|")]


def write_tables(text):
    """The text of a page with all its tables written again."""

    def write(found):
        written = ""
        for line in found[2].splitlines():
            for cells in rows_of(line.strip()):
                written += f"| {' | '.join(map(str, cells))} |\n"
        return found[1] + written + found[3]

    return TABLE.sub(write, text)


def main():
    """Write all tables."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = write_tables(text)
        if written != text:
            page.write_text(written, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
