"""The fleet: five engines in processes of their own, started once for all tests of this folder."""

from collections.abc import Iterator

import pytest

from kv_testing.fleet.fleet import Fleet


@pytest.fixture(scope="session", params=[None, "tcp"], ids=["shm", "tcp"])
def shared_fleet(request) -> Iterator[Fleet]:
    with Fleet(request.param) as fleet:
        fleet.hand_over_all()
        fleet.note_held()
        yield fleet


@pytest.fixture
def fleet(shared_fleet) -> Iterator[Fleet]:
    """At rest. After a test that failed its engines are made anew, so that one failure does not look like many."""
    try:
        yield shared_fleet
        shared_fleet.check_at_rest()
    except BaseException:
        shared_fleet.renew()
        raise
