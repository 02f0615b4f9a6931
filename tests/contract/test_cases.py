"""Every case of a folder through one driver; each is passed, deviates by rule, or has failed.

    python -m pytest tests/contract/test_cases.py --cases DIR

By default the open cases in `cases/`. Heavy cases are left to the long run.
"""

from pathlib import Path

import pytest

from contract.case import load_cases
from contract.report import LINES
from contract.verdicts import verdict_on


def pytest_generate_tests(metafunc):
    folder = Path(metafunc.config.getoption("cases", default=Path(__file__).parent / "cases"))
    cases = load_cases(folder)
    if not cases:
        raise pytest.UsageError(f"no cases: {folder}")
    marked = [pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.is_heavy else []) for case in cases]
    metafunc.parametrize("case", marked)


def test_case(case, request):
    verdict = verdict_on(case)
    request.config.stash[LINES].append(verdict.line(case.file, case.name))
    if verdict.status == "failed" and case.is_uncertain:
        pytest.skip(verdict.reason or "uncertain")
    assert verdict.status != "failed", verdict.line(case.file, case.name)
