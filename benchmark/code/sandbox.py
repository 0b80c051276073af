"""Run one program, and leave no process behind. mbpp.py starts this file. Nothing imports it.

From stdin it reads, as JSON, the program's sources in their order, a secret word, and limits. The
word is written to stdout if no source raises an error. There are three processes:

    the keeper   waits, and then kills all that came from it. Their orphans become its children.
    the parent   only waits: a program may kill its parent, and then the keeper ends the program.
    the program  runs the sources.

The exit status is 1 only if one of the first two has failed.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from types import ModuleType

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


def descendants(before):
    """The process group of each process that came from this one. before: entries of /proc that are
    older, so that a large machine is read quickly"""
    groups, children = {}, {}
    for process in set(os.listdir("/proc")) - before:
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                _, parent, group, *_ = file.read().rpartition(b")")[2].split()
        except OSError:  # It has just ended.
            continue
        groups[int(process)] = int(group)
        children.setdefault(int(parent), []).append(int(process))
    found = [os.getpid()]
    for process in found:
        found += children.get(process, [])
    return [groups[process] for process in found[1:]]


def keep(parent, before, seconds, processes):
    """Wait until the parent or the run ends, or there are too many seconds or processes. Then kill
    everything. Returns the exit status of the parent."""
    run = os.getppid()
    end = time.monotonic() + seconds
    pause = 0.005
    while True:
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)
        ended, status = os.waitpid(parent, os.WNOHANG)
        is_late = time.monotonic() > end or os.getppid() != run
        if ended or is_late or len(descendants(before)) > processes:
            break
    end = time.monotonic() + 10  # Processes that run away from it could keep it busy forever.
    while time.monotonic() < end:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # All children are gone, and so is every descendant.
            break
        for group in set(descendants(before)):  # A group can't fork while it is killed.
            try:
                os.killpg(group, signal.SIGKILL)
            except OSError:  # It has ended, or has become another user's.
                pass
    return os.waitstatus_to_exitcode(status)


def run(sources, word):
    """Run the sources. They may replace any function, so what is needed afterwards is kept."""
    sys.path[0] = os.getcwd()
    sys.modules["__main__"] = ModuleType("__main__")
    names = vars(sys.modules["__main__"])
    execute, write, leave = exec, os.write, os._exit
    try:
        os.dup2(1, 2)
        for source in sources:
            execute(source, names)
        write(1, word)
    finally:
        leave(0)


sources, word, limits, seconds, processes = json.load(sys.stdin)
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
before = set(os.listdir("/proc"))
parent = os.fork()
if parent:
    sys.exit(keep(parent, before, seconds, processes) == 1)
os.setsid()
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, name), (limit, limit))
# With one core, libraries start as many threads as on any other machine.
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
program = os.fork()
if program:
    os.waitpid(program, 0)
else:
    run(sources, word.encode())
