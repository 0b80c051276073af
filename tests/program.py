"""What `forked` of conftest.py runs. It imports little, so a fork of a process that has the
libraries starts at once."""

import os
import runpy
import sys


def run_program(folder, words, variables):
    """Run a Python file in `folder` with these variables of the environment. It prints into files
    there, `stdout` and `stderr`."""
    os.chdir(folder)
    os.environ |= variables
    for number, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    program = os.path.abspath(words[0])
    sys.argv = [program, *words[1:]]
    # A program does not know the folders of pytest.ini. Those of Python have its name.
    installed = [path for path in sys.path if "python3" in path]
    sys.path[:] = [os.path.dirname(program), *installed]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    return {}
