"""From a case to its verdict.

In:  a case of any kind.
Out: its `Verdict`.
Law: a case always gets one: whatever the driver does not know or cannot run has failed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from contract import functions, scenarios, transfer_pair
from contract.case import Case, UnknownKind
from contract.judge import Observation, Rule, Verdict, judge, load_rules

RULES = load_rules(Path(__file__).parent / "deviations.toml")


def verdict_on(case: Case, rules: Sequence[Rule] = RULES) -> Verdict:
    """Run one case and judge it."""
    try:
        return judge(_observations(case), rules)
    except UnknownKind as error:
        return Verdict("failed", reason=f"unknown {error}")
    except Exception as error:
        return Verdict("failed", reason=f"{type(error).__name__}: {error}")


def _observations(case: Case) -> Iterator[Observation]:
    if _is_pair(case):
        return transfer_pair.observe(case)
    if case.kind == "function":
        return functions.observe(case)
    target = case.content.get("config", {}).get("target")
    if case.kind != "scenario" or target not in scenarios.DRIVERS:
        raise UnknownKind(f"kind {case.kind!r}, target {target!r}")
    return scenarios.observe(case)


def _is_pair(case: Case) -> bool:
    return case.kind == "scenario" and case.content.get("config", {}).get("target") == "transfer_pair"
