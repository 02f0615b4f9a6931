"""What becomes of a case: observations held against expectations and deviation rules.

In:  observations (what was expected, what we returned, what is known at that moment), and the rules.
Out: a `Verdict`: passed, deviates, failed or pending, with every deviation and every failure in it.
Law: an observation that differs is excused only by a rule for its operation and field whose condition holds, whose
     *seed* expression gives what the case expects and whose *ours* expression gives what we returned.
"""

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.expressions import BadExpression, evaluate

TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Raised:
    """In place of a value: the call raised."""

    message: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raised)

    def __hash__(self) -> int:
        return hash(Raised)


RAISED = Raised()


@dataclass(frozen=True, slots=True)
class Observation:
    """One field of one operation. `known` holds the names that a rule may use; `derived` marks model values."""

    op: str
    field: str
    expected: Any
    actual: Any
    known: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: int | None = None
    derived: bool = False
    tolerance: float = TOLERANCE

    @property
    def holds(self) -> bool:
        return same(self.expected, self.actual, self.tolerance)


@dataclass(frozen=True, slots=True)
class Rule:
    """A documented deviation: in this condition the seed gives `seed`, and we give `ours`, because of `defect`."""

    defect: str
    op: str | list[str]
    field: str | list[str]
    when: str
    seed: str
    ours: str
    why: str

    def excuses(self, seen: Observation) -> bool:
        """Whether this rule explains the difference. BadExpression if its expressions cannot be evaluated."""
        if not self.concerns(seen):
            return False
        known = seen.known | {"op": seen.op, "field": seen.field}
        return bool(
            evaluate(self.when, known)
            and same(evaluate(self.seed, known), seen.expected, seen.tolerance)
            and same(evaluate(self.ours, known), seen.actual, seen.tolerance)
        )

    def concerns(self, seen: Observation) -> bool:
        """Whether the rule is about this operation and field."""
        ops, fields = ([one] if isinstance(one, str) else one for one in (self.op, self.field))
        return seen.op in ops and seen.field in fields


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one case."""

    status: str
    deviations: tuple[dict[str, Any], ...] = ()
    failures: tuple[dict[str, Any], ...] = ()
    reason: str = ""

    def line(self, file: str, name: str) -> str:
        """One line of JSON."""
        content: dict[str, Any] = {"case": name, "file": file, "status": self.status}
        if self.deviations:
            content["defects"] = sorted({deviation["defect"] for deviation in self.deviations})
            content["deviations"] = self.deviations
        if self.failures:
            content["failures"] = self.failures
        if self.reason:
            content["reason"] = self.reason
        return json.dumps(content, default=str)


def load_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a TOML file, groups of operations and fields written out; any other entry is an error."""
    content = tomllib.loads(path.read_text())
    groups: dict[str, list[str]] = content.get("groups", {})
    entries = (
        entry | {name: groups.get(str(entry[name]), entry[name]) for name in ("op", "field")}
        for entry in content.get("rule", [])
    )
    return tuple(Rule(**entry) for entry in entries)


def judge(observations: Iterable[Observation], rules: Sequence[Rule]) -> Verdict:
    """Hold every observation against its expectation, then against the rules."""
    deviations, failures = [], []
    for seen in observations:
        if seen.holds:
            continue
        rule, complaint = _excuse(seen, rules)
        if rule is None:
            failures.append(_account(seen) | ({"rule_error": complaint} if complaint else {}))
        else:
            deviations.append({"defect": rule.defect} | _account(seen))
    status = "failed" if failures else "deviates" if deviations else "passed"
    return Verdict(status, tuple(deviations), tuple(failures))


def same(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> bool:
    """Equal values; floats within `tolerance`, true and false never equal to 1 and 0, keys of maps as texts."""
    if isinstance(ours, float) or isinstance(theirs, float):
        numbers = isinstance(ours, int | float) and isinstance(theirs, int | float)
        return numbers and abs(ours - theirs) <= tolerance
    if isinstance(ours, dict) and isinstance(theirs, dict):
        one, two = ({str(key): value for key, value in each.items()} for each in (ours, theirs))
        return one.keys() == two.keys() and all(same(one[key], two[key], tolerance) for key in one)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(same(*pair, tolerance) for pair in zip(ours, theirs, strict=True))
    return isinstance(ours, bool) == isinstance(theirs, bool) and bool(ours == theirs)


def _excuse(seen: Observation, rules: Sequence[Rule]) -> tuple[Rule | None, str]:
    complaints = []
    for rule in rules:
        try:
            if rule.excuses(seen):
                return rule, ""
        except BadExpression as error:
            complaints.append(f"{rule.defect}: {error}")
    return None, "; ".join(complaints)


def _account(seen: Observation) -> dict[str, Any]:
    account = {"op": seen.op, "field": seen.field, "expected": seen.expected, "ours": seen.actual}
    if seen.step is not None:
        account["step"] = seen.step
    if seen.derived:
        account["derived"] = True
    return account
