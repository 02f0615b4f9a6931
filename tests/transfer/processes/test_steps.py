"""Kill, stop, abort, close at every step, and every message lost, late, doubled or garbled: real processes over NIXL.

The usual run plays a few of the cases over each transport, the long one all of them.
"""

import os
from random import Random

import pytest

from kv_testing.fleet.cases import Until, all_cases, play
from kv_testing.fleet.traps import Action

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

CASES = all_cases()
ACTIONS: tuple[Action, ...] = ("kill", "stop", "close", "abort", "drop", "double", "late", "corrupt")
KINDS = tuple(dict.fromkeys((case.trap.action, case.until) for case in CASES))
USUAL: dict[str | None, tuple[tuple[Action, str, Until], ...]] = {
    None: (
        ("kill", "p", "a moment later"),
        ("stop", "d", "a moment later"),
        ("drop", "p", "a moment later"),
    ),
    "tcp": (
        ("kill", "d", "a moment later"),
        ("stop", "p", "the deadline has passed"),
        ("corrupt", "d", "a moment later"),
    ),
}
"""What happens to whom, and until when, by transport; the steps are drawn, always the same."""


@pytest.mark.parametrize("number", range(3))
def test_a_fault_at_a_step(fleet, number):
    action, role, until = USUAL[fleet.tls][number]
    fitting = [
        case for case in CASES if (case.trap.action, case.until) == (action, until) and case.victim.startswith(role)
    ]
    play(fleet, Random(number).choice(fitting))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("action", "until"), KINDS)
def test_every_fault_at_every_step(fleet, action, until, record_property):
    cases = [case for case in CASES if (case.trap.action, case.until) == (action, until)]
    record_property("cases", len(cases))
    for case in Random(int(os.environ.get("KVFERRY_SEED", "0"))).sample(cases, len(cases)):
        try:
            play(fleet, case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


def test_the_cases_reach_what_they_promise():
    assert {case.trap.action for case in CASES} == set(ACTIONS)
    assert {case.victim for case in CASES} == {"p0", "p1", "d0", "d1", "d2"}
    assert len(CASES) == len(set(CASES))
