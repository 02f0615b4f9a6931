"""Offers of an instance and of a rank, against a naive model; and the instance door over real sockets."""

import time
from dataclasses import replace

import msgspec
import pytest

from kv_core.errors import CallerError
from kv_core.ids import Incarnation, InstanceId, RequestId
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, PROMPT, SOON_S, Switches, fresh_id, make_side, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.instance import InstanceDoor
from kv_transfer.orders import Errand, Settled


def _errand(door, *words):
    host, port = door.address
    return Errand(host, port, *words)


def _door(name, config=FAST, faults=None):
    return InstanceDoor(config, InstanceId(name), Incarnation(f"{name}-1"), faults)


@pytest.fixture
def doors():
    made = [_door(name) for name in ("p", "d")]
    yield made
    for door in made:
        door.close()


def _settled(door, number=1):
    found = []

    def enough():
        found.extend(door.poll_settled())
        return len(found) >= number

    wait_for(enough, what="settlements")
    return found


def test_a_release_that_is_there_before_its_offer_settles_it(doors):
    """A load that is given up at once may be quicker than the door that opens its offer."""
    p, d = doors
    transfer = fresh_id()
    d.release(_errand(p, transfer, PROMPT, "d-1/a", "p-1"))
    wait_for(lambda: d.status().counters.get("releases_answered", 0) == 1, what="the answer")
    assert p.status().counters["unknown_releases"] == 1
    p.open_offer(transfer, "r0", PROMPT)
    assert _settled(p) == [Settled(transfer, "r0", "released")]
    p.open_offer(transfer, "r1", PROMPT)
    wait_for(lambda: p.status().gauges["offers"] == 1, what="an offer that nobody has released")


def test_a_release_settles_the_oldest_offer_once_a_consumer(doors):
    p, d = doors
    transfer = fresh_id()
    for number in range(3):
        p.open_offer(transfer, f"r{number}", PROMPT)
    for _ in range(2):
        d.release(_errand(p, transfer, PROMPT, "d-1/a", "p-1"))
    d.release(_errand(p, transfer, PROMPT, "d-1/b", "p-1"))
    assert [each.request_id for each in _settled(p, 2)] == ["r0", "r1"]
    wait_for(lambda: d.status().counters.get("releases_answered", 0) >= 2, what="answers")
    time.sleep(0.1)
    assert p.poll_settled() == []
    assert p.status().gauges["offers"] == 1


def test_a_release_for_another_run_or_transfer_settles_nothing(doors):
    p, d = doors
    transfer = fresh_id()
    p.open_offer(transfer, "r0", PROMPT)
    d.release(_errand(p, transfer, PROMPT, "c", "p-0"))
    d.release(_errand(p, fresh_id(), PROMPT, "c", "p-1"))
    d.release(_errand(p, transfer, b"other prompt", "c", "p-1"))
    wait_for(lambda: p.status().counters.get("unknown_releases", 0) == 3, what="three unknown releases")
    wait_for(lambda: d.status().is_idle, what="answers")
    assert p.status().gauges["offers"] == 1


def test_a_lost_release_is_said_again():
    faults = Switches(dropped={"ReleaseReply"})
    p, d = _door("p", faults=faults), _door("d")
    try:
        transfer = fresh_id()
        p.open_offer(transfer, "r0", PROMPT)
        p.open_offer(transfer, "r1", PROMPT)
        d.release(_errand(p, transfer, PROMPT, "c"))
        wait_for(lambda: faults.num_said["ReleaseReply"] >= 3, what="repetitions")
        assert d.status().gauges["releases"] == 1
        faults.dropped = set()
        wait_for(lambda: d.status().is_idle, what="the answer")
        assert [each.request_id for each in p.poll_settled()] == ["r0"]
    finally:
        p.close()
        d.close()


def test_a_release_is_given_up_when_nobody_listens(doors):
    p, d = doors
    p.close()
    d.release(_errand(p, fresh_id(), PROMPT, "c"))
    wait_for(lambda: d.status().counters.get("releases_given_up") == 1, what="giving up")
    assert d.status().is_idle


def test_a_release_is_given_up_at_its_deadline():
    faults = Switches(dropped={"ReleaseReply"})
    p, d = _door("p", faults=faults), _door("d", replace(FAST, release_deadline_s=0.5))
    try:
        d.release(_errand(p, fresh_id(), PROMPT, "c"))
        wait_for(lambda: d.status().counters.get("releases_given_up") == 1, timeout_s=3, what="giving up")
        d.release(Errand("no such host", 7777, fresh_id(), PROMPT, "c"))
        wait_for(lambda: d.status().counters.get("releases_given_up") == 2, timeout_s=3, what="giving up")
        assert d.status().is_idle
    finally:
        p.close()
        d.close()


def test_a_release_that_no_peer_would_take_is_given_up_at_once(doors):
    p, d = doors
    d.release(_errand(p, fresh_id(), PROMPT, "d/" + "r" * 200))
    wait_for(lambda: d.status().counters.get("releases_given_up") == 1, what="giving up")
    assert d.status().is_idle
    assert not d.status().counters.get("internal_errors")


def test_a_lease_ends_by_itself_and_a_late_release_changes_nothing(doors):
    p, d = doors
    transfer = fresh_id()
    start = time.monotonic()
    p.open_offer(transfer, "r0", PROMPT, lease_s=0.3)
    assert _settled(p) == [Settled(transfer, RequestId("r0"), "expired")]
    assert 0.25 < time.monotonic() - start < SOON_S
    d.release(_errand(p, transfer, PROMPT, "c"))
    wait_for(lambda: d.status().counters.get("releases_answered") == 1, what="the answer")
    assert p.poll_settled() == []


def test_one_offer_a_request(doors):
    p, _ = doors
    p.open_offer(fresh_id(), "r0", PROMPT)
    with pytest.raises(CallerError, match="request=r0"):
        p.open_offer(fresh_id(), "r0", PROMPT)
    p.withdraw_offer("r0", "aborted")
    assert [each.reason for each in _settled(p)] == ["aborted"]
    p.open_offer(fresh_id(), "r0", PROMPT)


def test_cards_must_be_whole_and_agree():
    hub = LoopbackHub()
    with sides(make_side(hub, "p", state_of(2))) as (p,):
        cards = [rank.card for rank in p.ranks]
        with pytest.raises(CallerError, match=r"got=\[0\], wanted=2 ranks"):
            p.door.set_cards(cards[:1])
        with pytest.raises(CallerError, match="at least 1"):
            p.door.set_cards([])
        other = msgspec.structs.replace(cards[1].state, fingerprint="other")
        with pytest.raises(CallerError, match="disagree on its cache"):
            p.door.set_cards([cards[0], msgspec.structs.replace(cards[1], state=other)])


def test_a_held_offer_outlives_its_lease_and_ends_with_its_release():
    """The consumer's queue is longer than a lease: it renews as long as it waits."""
    p, d = _door("p", replace(FAST, lease_s=0.4)), _door("d", replace(FAST, renew_s=0.1))
    try:
        held, other = fresh_id(), fresh_id()
        p.open_offer(held, "held", PROMPT)
        p.open_offer(other, "other", PROMPT)
        d.hold(_errand(p, held, PROMPT, "c", "p-1"))
        assert _settled(p) == [Settled(other, RequestId("other"), "expired")]
        time.sleep(1.0)
        assert p.poll_settled() == []
        assert d.status().gauges["holds"] == 1
        d.release(_errand(p, held, PROMPT, "c", "p-1"))
        assert _settled(p) == [Settled(held, RequestId("held"), "released")]
        wait_for(lambda: d.status().is_idle, what="the answer")
    finally:
        p.close()
        d.close()


def test_a_consumer_that_dies_holds_nothing_longer_than_a_lease():
    p, d = _door("p", replace(FAST, lease_s=0.5)), _door("d", replace(FAST, renew_s=0.1))
    try:
        transfer = fresh_id()
        p.open_offer(transfer, "r0", PROMPT)
        d.hold(_errand(p, transfer, PROMPT, "c", "p-1"))
        wait_for(lambda: p.status().counters.get("leases_renewed", 0) > 2, what="renewals")
        d.close()
        assert _settled(p) == [Settled(transfer, RequestId("r0"), "expired")]
    finally:
        p.close()
        d.close()


def test_a_hold_for_another_run_or_with_a_limit_behind_it_holds_nothing():
    p, d = _door("p", replace(FAST, lease_s=0.3, max_lease_s=0.8)), _door("d", replace(FAST, renew_s=0.1))
    try:
        start, transfer = time.monotonic(), fresh_id()
        p.open_offer(transfer, "r0", PROMPT)
        d.hold(_errand(p, transfer, PROMPT, "c", "p-0"))
        assert _settled(p) == [Settled(transfer, RequestId("r0"), "expired")]
        transfer = fresh_id()
        p.open_offer(transfer, "r1", PROMPT)
        d.hold(_errand(p, transfer, PROMPT, "c", "p-1"))
        assert _settled(p) == [Settled(transfer, RequestId("r1"), "expired")]
        assert 0.8 < time.monotonic() - start < SOON_S
    finally:
        p.close()
        d.close()


def test_a_hold_at_a_door_that_nobody_keeps_ends_with_its_release(doors):
    p, d = doors
    p.close()
    transfer = fresh_id()
    d.hold(_errand(p, transfer, PROMPT, "c"))
    d.hold(Errand("no such host", 7777, transfer, PROMPT, "c"))
    d.release(_errand(p, transfer, PROMPT, "c"))
    wait_for(lambda: d.status().counters.get("releases_given_up") == 1, what="giving up")
    assert d.status().is_idle
