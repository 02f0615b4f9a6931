"""Offers of an instance and of a rank, against a naive model; and the instance door over real sockets."""

import time
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.ids import Incarnation, InstanceId, RequestId, TransferId
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, PROMPT, SOON_S, Switches, fresh_id, make_side, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.instance import InstanceDoor
from kv_transfer.leases import LeaseBook
from kv_transfer.offers import OfferBook
from kv_transfer.orders import BlockTables, Errand, Offer, Settled

PAIR = (TransferId("a" * 32), b"k")

ACTIONS = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 5), st.integers(1, 9)),
    st.tuples(st.just("renew"), st.integers(0, 3), st.integers(1, 30)),
    st.tuples(st.just("release"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("withdraw"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 4), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=40))
def test_a_lease_book_settles_each_offer_once(actions):
    """The naive model: a list of open offers, oldest first, and the names of consumers that settled one."""
    book, now, offers, consumers = LeaseBook(remember_s=3), 0.0, list[tuple[str, float]](), set[str]()
    limits = dict[str, float]()
    for kind, number, more in actions:
        if kind == "open" and all(request_id != f"r{number}" for request_id, _ in offers):
            book.open(PAIR, RequestId(f"r{number}"), now + more, now + 20)
            offers.append((f"r{number}", now + more))
            limits[f"r{number}"] = now + 20
        elif kind == "renew":
            waits = f"c{number}" not in consumers
            assert book.renew(*PAIR, f"c{number}", now + more) == (waits and bool(offers))
            if waits:
                offers = [(name, max(end, min(now + more, limits[name]))) for name, end in offers]
        elif kind == "release":
            known, settled = book.release(*PAIR, f"c{number}", now)
            assert not offers or known
            if offers and f"c{number}" not in consumers:
                consumers.add(f"c{number}")
                assert settled == Settled(PAIR[0], RequestId(offers.pop(0)[0]), "released")
            else:
                assert settled is None
        elif kind == "withdraw":
            settled = book.withdraw(RequestId(f"r{number}"), "why", now)
            assert (settled is not None) == any(request_id == f"r{number}" for request_id, _ in offers)
            offers = [each for each in offers if each[0] != f"r{number}"]
        elif kind == "wait":
            now += number
            expired = {settled.request_id for settled in book.expire(now)}
            assert expired == {request_id for request_id, end in offers if end <= now}
            offers = [each for each in offers if each[1] > now]
            if not offers and not book.release(*PAIR, "nobody", now)[0]:
                consumers.clear()
        assert len(book) == len(offers)
        book.check()


def test_a_renewal_reaches_no_further_than_the_limit():
    book = LeaseBook(remember_s=10)
    book.open(PAIR, RequestId("r"), 5, 8)
    book.open((PAIR[0], b"another prompt"), RequestId("other"), 5)
    assert book.renew(*PAIR, "c", 30)
    assert not book.renew(PAIR[0], b"a third prompt", "c", 30)
    assert book.renew(PAIR[0], None, "c", 30), "all pairs of the transfer"
    assert [each.request_id for each in book.expire(5)] == ["other"], "opened without a limit: no renewal holds it"
    assert book.expire(7.9) == []
    assert [each.request_id for each in book.expire(8)] == ["r"]
    assert not book.renew(*PAIR, "c", 30), "an ended lease is never renewed"


def test_a_release_without_a_prompt_key_means_the_only_pair():
    book = LeaseBook(remember_s=10)
    book.open(PAIR, RequestId("r"), 5)
    book.open(PAIR, RequestId("sibling"), 5)
    assert book.release(PAIR[0], None, "c", 1) == (True, Settled(PAIR[0], RequestId("r"), "released"))
    assert book.release(PAIR[0], None, "c", 1) == (True, None)
    book.open((PAIR[0], b"another prompt"), RequestId("other"), 5)
    assert book.release(PAIR[0], None, "d", 1) == (True, None), "which one is meant cannot be known"
    assert book.release(TransferId("b" * 32), None, "d", 1) == (False, None)
    assert len(book) == 2


def test_a_pair_is_forgotten_after_a_while():
    book = LeaseBook(remember_s=10)
    book.open(PAIR, RequestId("r"), 5)
    assert book.release(*PAIR, "c", 1)[1] == Settled(PAIR[0], RequestId("r"), "released")
    assert book.release(*PAIR, "c", 2) == (True, None)
    book.expire(10.9)
    assert book.release(*PAIR, "c", 2) == (True, None)
    book.expire(11)
    assert book.release(*PAIR, "c", 11) == (False, None)


def _offer(number, num_tokens=8):
    return Offer(PAIR[0], RequestId(f"r{number}"), PAIR[1], BlockTables(num_tokens, ((0, 1),)))


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "settle", "read", "end"]), st.integers(0, 3)),
        max_size=40,
    )
)
def test_an_offer_book_never_frees_under_a_reader_and_frees_once(actions):
    book, readers, over = OfferBook(100), [], []
    added, settled = set(), set()
    for kind, number in actions:
        request_id = f"r{number}"
        if kind == "add" and request_id not in added:
            added.add(request_id)
            if not book.add(_offer(number), None, 0):
                over.append(request_id)
        elif kind == "settle":
            settled.add(request_id)
            if book.settle(PAIR[0], RequestId(request_id), "x", 0):
                over.append(request_id)
        elif kind == "read" and (held := book.find(PAIR, 8)) is not None:
            assert held.offer.request_id not in settled
            book.hold(held)
            readers.append(held)
        elif kind == "end" and readers:
            held = readers.pop(number % len(readers))
            assert held.offer.request_id not in over, "freed under a reader"
            if book.free(held):
                over.append(held.offer.request_id)
        book.check()
    read = {held.offer.request_id for held in readers}
    assert sorted(over) == sorted((added & settled) - read)
    serving = added - settled
    assert (book.find(PAIR, 8) is not None) == bool(serving)
    assert (book.why_gone(PAIR) is None) == bool(serving or not added & settled)


def test_the_offer_with_enough_tokens_is_found():
    book = OfferBook(100)
    assert book.add(_offer(0, 4), None, 0)
    assert book.add(_offer(1, 8), None, 0)
    found = [book.find(PAIR, num_tokens) for num_tokens in (4, 8, 9)]
    # For 9 the longest, so that a refusal can name its length.
    assert [held and held.offer.request_id for held in found] == ["r0", "r1", "r1"]


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
