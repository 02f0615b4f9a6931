"""The option that names a folder of cases, and the report: one JSON line a case at the end of the run."""

from pathlib import Path

from contract.judge import Verdict
from contract.report import LINES

HERE = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption(
        "--cases", default=str(HERE / "cases"), help="folder of case files (tests/contract/cases/README.md)"
    )


def pytest_configure(config):
    config.stash[LINES] = []


def pytest_deselected(items):
    """Heavy cases that are left to `make test-long` are reported too."""
    for item in items:
        if item.path != HERE / "test_cases.py" or not hasattr(item, "callspec"):
            continue
        case = item.callspec.params.get("case")
        if case is not None and case.is_heavy:
            pending = Verdict("pending", reason="heavy: runs with -m long")
            item.config.stash[LINES].append(pending.line(case.file, case.name))


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash[LINES]:
        terminalreporter.write_line(line)
