"""Kill, stop, abort at every step, and every message lost, late, doubled or garbled: real processes over NIXL.

The usual run plays a few of the cases over each transport, the long one all of them.
"""

import os
from random import Random

import pytest

from kv_testing.fleet.cases import all_cases, play
from kv_testing.fleet.traps import Action

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

CASES = all_cases()
USUAL: dict[str | None, tuple[tuple[Action, str, bool], ...]] = {
    None: (("kill", "p", False), ("stop", "d", False), ("drop", "p", False)),
    "tcp": (("kill", "d", False), ("stop", "p", True), ("corrupt", "d", False)),
}
"""What happens to whom, for long or not, by transport; the steps are drawn, always the same."""


@pytest.mark.parametrize("number", range(3))
def test_a_fault_at_a_step(fleet, number):
    action, role, is_long = USUAL[fleet.tls][number]
    fitting = [
        case for case in CASES if (case.trap.action, case.is_long) == (action, is_long) and case.victim.startswith(role)
    ]
    play(fleet, Random(number).choice(fitting))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_fault_at_every_step(fleet, record_property):
    cases = Random(int(os.environ.get("KVFERRY_SEED", "0"))).sample(CASES, len(CASES))
    record_property("cases", len(cases))
    for case in cases:
        try:
            play(fleet, case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


def test_the_cases_reach_what_they_promise():
    assert {case.trap.action for case in CASES} == {"kill", "stop", "abort", "drop", "double", "late", "corrupt"}
    assert {case.victim for case in CASES} == {"p0", "p1", "d0", "d1", "d2"}
    assert len(CASES) == len(set(CASES))
