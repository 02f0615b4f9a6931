"""Every case of a folder through one driver; each is passed, deviates by rule, failed or pending.

    python -m pytest tests/contract/test_cases.py --cases DIR

By default the open cases in `cases/`. Kinds that judge the transfer are pending until their driver is there.
"""

from pathlib import Path

import pytest

from contract import functions, scenarios
from contract.case import CORE_TARGETS, Case, UnknownKind, load_cases
from contract.judge import Verdict, judge, load_rules
from contract.report import LINES

RULES = load_rules(Path(__file__).parent / "deviations.toml")


def pytest_generate_tests(metafunc):
    cases = load_cases(Path(metafunc.config.getoption("cases", default=Path(__file__).parent / "cases")))
    marked = [pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.is_heavy else []) for case in cases]
    metafunc.parametrize("case", marked)


def test_case(case, request):
    verdict = verdict_on(case)
    request.config.stash[LINES].append(verdict.line(case.file, case.name))
    if verdict.status == "pending" or (verdict.status == "failed" and case.is_uncertain):
        pytest.skip(verdict.reason or "uncertain")
    assert verdict.status != "failed", verdict.line(case.file, case.name)


def verdict_on(case: Case) -> Verdict:
    """Run one case and judge it."""
    if case.is_transfer:
        return Verdict("pending", reason="transfer")
    try:
        return judge(_observations(case), RULES)
    except UnknownKind as error:
        return Verdict("failed", reason=f"unknown {error}")
    except Exception as error:
        return Verdict("failed", reason=f"{type(error).__name__}: {error}")


def _observations(case):
    if case.kind == "function":
        return functions.observe(case)
    target = case.content.get("config", {}).get("target")
    if case.kind != "scenario" or target not in CORE_TARGETS:
        raise UnknownKind(f"kind {case.kind!r}, target {target!r}")
    return scenarios.observe(case)
