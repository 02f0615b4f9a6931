"""Negative controls: what the fleet's laws forbid is found when it is there."""

from dataclasses import replace

import pytest

from kv_core.ids import TransferId
from kv_testing.child import OrderFailed
from kv_testing.fleet.engine import Ended
from kv_testing.fleet.fleet import LawBroken, Request, check_ended
from kv_testing.fleet.traps import SCATTER, Trap

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]
over_shared_memory = pytest.mark.parametrize("shared_fleet", [None], ids=["shm"], indirect=True)

REQUEST = Request("r0", "p0", "d0", TransferId("0" * 32), allowed_s=5.0)
WELL = Ended("r0", True, (), 1.0, 0)


@over_shared_memory
def test_one_wrong_bit_is_found(fleet):
    """Flipped after the checksum was verified, so that nothing but the tags can tell."""
    fleet.ask("d0", "trap", Trap(SCATTER, "spoil", nth=7))
    request = fleet.request("p0", "d0")
    with pytest.raises(LawBroken, match=r"wrong bytes are said to be loaded: .*num_misplaced=1\b"):
        fleet.outcome(request)


@over_shared_memory
def test_whatever_is_left_is_found(fleet):
    leaks = {"lease": "d0", "slot": "d0", "byte": "d1", "thread": "d1", "handle": "p0"}
    for what, name in leaks.items():
        fleet.ask(name, "leak", what)
    with pytest.raises(LawBroken, match="left over"):
        fleet.check_at_rest(timeout_s=2.0)
    found = fleet.left_over()
    assert set(found) == {"open", "slots in use", "elements written into unused blocks", "threads or handles"}
    assert found["open"] == {"d0": {"rank 0": {"leases": 1, "staged_bytes": 4096}}}
    assert found["slots in use"] == {"d0": 1}
    assert found["elements written into unused blocks"] == {"d1": 1}
    assert set(found["threads or handles"]) == {"d1", "p0"}
    for name in set(leaks.values()):
        fleet.restart(name)


@over_shared_memory
def test_an_open_request_is_found(fleet):
    fleet.ask("p0", "hold", True)
    request = fleet.request("p0", "d0")
    with pytest.raises(LawBroken, match="left over"):
        fleet.check_at_rest(timeout_s=0.5)
    fleet.ask("p0", "hold", False)
    assert fleet.outcome(request).ok


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (replace(WELL, seconds=5.1), "comes late"),
        (replace(WELL, num_misplaced=1), "wrong bytes"),
        (replace(WELL, ok=False, reasons=("",)), "without a reason"),
    ],
)
def test_a_bad_outcome_is_found(ended, words):
    check_ended(REQUEST, WELL)
    with pytest.raises(LawBroken, match=words):
        check_ended(REQUEST, ended)


@over_shared_memory
def test_an_outcome_that_comes_twice_is_found(fleet):
    request = fleet.request("p0", "d0")
    del fleet.requests[request.name]
    with pytest.raises(LawBroken, match="an outcome of no request"):
        fleet.check_at_rest()


@over_shared_memory
def test_an_error_in_an_engine_reaches_the_test(fleet):
    with pytest.raises(OrderFailed, match="no such order"):
        fleet.ask("p0", "dance")
