"""The option --answer, and what `pytest docs/exercises --answer my_answers.py` prints."""

import importlib.util
import os
import sys
import traceback
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before torch is imported

import pytest

TEMPLATE = Path(__file__).parent / "answers.py"
NOT_WRITTEN = "not written yet"
HOW_TO_BEGIN = """No --answer was given, so this was the template. To begin:
    cp docs/exercises/answers.py my_answers.py
    pytest docs/exercises --answer my_answers.py
docs/exercises/README.md has the exercises."""


def pytest_addoption(parser):
    parser.addoption(
        "--answer", metavar="FILE.py", help="your answers: a copy of docs/exercises/answers.py"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """A short report, from one process. The project's own tests take two, which start later."""
    config.option.numprocesses = 0
    config.option.dist = "no"
    if not any(word.startswith("-v") for word in config.invocation_params.args):
        config.option.verbose = -1
        config.option.no_header = True
        config.option.reportchars = "N"


def pytest_configure(config):
    """Import the answers. If Python can't, there is one message, and no test is run."""
    path = config.invocation_params.dir / (config.getoption("answer", None) or TEMPLATE)
    if not path.is_file() or path.suffix != ".py":
        raise pytest.UsageError(
            f"--answer {path}: there is no such Python file; copy docs/exercises/answers.py"
        )
    spec = importlib.util.spec_from_file_location("answer", path)
    config.answer = sys.modules["answer"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(config.answer)
    except Exception:
        about = f"--answer {path}: Python stops\n{traceback.format_exc(-1)}"
        raise pytest.UsageError(about) from None


@pytest.fixture
def answer(pytestconfig):
    """The file of answers, as a module."""
    return pytestconfig.answer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A traceback ends at a line of the answers. What libraries do below it is left out."""
    last = None
    entry = call.excinfo.tb if call.excinfo is not None else None
    while entry is not None:
        if entry.tb_frame.f_code.co_filename == item.config.answer.__file__:
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
    report = yield
    # The error of the template has no message. PyTorch raises this type with a message.
    is_template = call.excinfo is not None and call.excinfo.errisinstance(NotImplementedError)
    if is_template and not str(call.excinfo.value):
        report.longrepr = NOT_WRITTEN
    return report


def pytest_report_teststatus(report):
    if report.longrepr == NOT_WRITTEN:
        return NOT_WRITTEN, "-", NOT_WRITTEN


def pytest_terminal_summary(terminalreporter, config):
    """One line for each exercise."""
    found = {}
    shown = {"passed": "right", "failed": "wrong", "error": "wrong", NOT_WRITTEN: NOT_WRITTEN}
    for category, words in shown.items():
        for report in terminalreporter.getreports(category):
            _, _, name = report.nodeid.partition("::test_")
            found[name.replace("_", " ")] = words
    terminalreporter.write_line("")
    for name in sorted(found):
        terminalreporter.write_line(f"exercise {name}".ljust(58) + found[name])
    if config.getoption("answer", None) is None:
        terminalreporter.write_line(f"\n{HOW_TO_BEGIN}")
