"""Where every result of this folder comes from: its commit, date, minutes and machine.

    python benchmark/all.py                      # a line for each part of each program
    python benchmark/default/curves.py clipping  # measures a part again

After a change of a default, an algorithm or random numbers, measure again what depends on it. Most
parts take minutes.
"""

import tyro
from run import BENCHMARK, read_result

# The programs that measure. The data of each lies beside it.
PROGRAMS = []
for path in sorted(BENCHMARK.glob("*/*.json")):
    if path.with_suffix(".py").exists():
        PROGRAMS.append(path.relative_to(BENCHMARK).with_suffix(".py"))


def main():
    for program in PROGRAMS:
        parts = read_result(BENCHMARK / program.with_suffix(".json"))["parts"]
        for name, stamp in parts.items():
            about = ", ".join(f"{entry} {value}" for entry, value in stamp.items())
            print(f"{program} {name}: {about}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
