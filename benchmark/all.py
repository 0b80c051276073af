"""Every result of this folder: where it comes from, and whether the programs would give another one
today.

    python benchmark/all.py                # a line for each part of each program, in six minutes
    python benchmark/all.py --stale        # and then measures again what is stale, cheapest first

A result keeps a fingerprint: numbers of a smoke run, which is short, made when it was measured. It
is stale where a smoke run of today has other numbers. It is unknown on another processor, whose
rounding differs, and where no fingerprint was kept. An effect that comes late in a run escapes a
smoke run. `--stale` writes each part when it is finished, so it goes on where it was stopped.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import tyro
from run import BENCHMARK, DEFAULTS, ROOT, machine, read_result

PROGRAMS = """
default/curves failures/failures ladder/ladder claims/claims
ablations/ablations variants/curves variants/one_batch_late
hardware/rounding hardware/architectures
hardware/sharded hardware/kill_and_resume
parity/mini_batch parity/replay throughput/throughput engine/measure
""".split()


@dataclass
class Options:
    stale: bool = False
    """measure again what is stale"""


def smoke(program: str) -> dict[str, dict]:
    """A smoke run of a program in a process of its own: the fingerprint of each part."""
    command = [sys.executable, BENCHMARK / f"{program}.py", "--smoke"]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | DEFAULTS
    )
    if ran.returncode:
        raise SystemExit(f"{program}.py --smoke failed:\n{ran.stderr[-4000:]}")
    found = {}
    for line in ran.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def state(stamp: dict, today: dict) -> str:
    """Whether the result would be another one today."""
    if stamp["machine"].split(",")[0] != machine().split(",")[0]:
        return "unknown: another processor"
    if "fingerprint" not in stamp:
        return "unknown: no fingerprint"
    return "as today" if stamp["fingerprint"] == today else "stale"


def main(options: Options):
    stale, total = [], 0.0
    for program in PROGRAMS:
        today = smoke(program)
        for part, stamp in read_result(BENCHMARK / f"{program}.json")["parts"].items():
            found = state(stamp, today[part])
            minutes = f"{stamp['minutes']} min{' by hand' if 'by_hand' in stamp else ''}"
            made = f"{stamp['commit']}, {stamp['date']}, {minutes}, {stamp['machine']}"
            print(f"{program} {part}: {found}; {made}")
            total += stamp["minutes"]
            if found == "stale":
                stale.append((stamp["minutes"], program, part))
    print(f"all: {total / 60:.1f} hours; {len(stale)} stale")
    for minutes, program, part in sorted(stale) if options.stale else ():
        print(f"measuring {program} {part}, some {minutes} min", flush=True)
        ran = subprocess.run([sys.executable, BENCHMARK / f"{program}.py", part], cwd=ROOT)
        if ran.returncode:
            print(f"{program} {part} failed; it may need other packages, see its --help")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
