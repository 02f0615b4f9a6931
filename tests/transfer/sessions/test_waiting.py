"""Asks that come before their offer, after its end, or never find it; and leases that end while they are read."""

import threading
import time
from dataclasses import replace

from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Switches, fresh_id, make_side, pair, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub


def test_an_early_ask_waits_for_its_offer():
    with pair(state_of(2), state_of(1)) as (p, d, _):
        transfer = fresh_id()
        d.order(p, transfer)
        wait_for(lambda: all(rank.status().gauges["parked"] for rank in p.ranks), what="parked asks")
        p.offer(transfer_id=transfer)
        received = d.outcome(others=[p])
        assert received.ok, received.reason
        assert d.misplaced() == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def test_an_ask_for_nothing_ends_by_its_deadline():
    with pair(config=replace(FAST, request_deadline_s=0.6)) as (p, d, _):
        start = time.monotonic()
        d.order(p, fresh_id())
        received = d.outcome(others=[p])
        assert not received.ok
        assert "never_came" in received.reason or "deadline of 0.6 s" in received.reason
        assert 0.5 < time.monotonic() - start < SOON_S
        d.check_clean()
        p.check_clean()


def test_a_late_ask_is_refused_at_once():
    with pair() as (p, d, _):
        transfer = p.offer(lease_s=0.1)
        wait_for(p.step, what="the end of the lease")
        start = time.monotonic()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert "gone" in received.reason
        assert "expired" in received.reason
        assert time.monotonic() - start < SOON_S
        d.check_clean()
        p.check_clean()


def test_a_lease_that_ends_never_cuts_a_running_read():
    faults = Switches(holds_writes=True)
    with pair(state_of(1), state_of(1), prefill_faults=faults) as (p, d, _):
        transfer = p.offer(lease_s=0.3)
        d.order(p, transfer)
        wait_for(lambda: faults.num_held, what="a held write")
        time.sleep(0.6)
        p.step()
        assert p.sent == []
        assert p.door.status().gauges["offers"] == 0
        faults.holds_writes = False
        received = d.outcome(others=[p])
        assert received.ok, received.reason
        assert d.misplaced() == 0
        d.check_clean()
        p.check_clean()
        assert p.sent == [(0, "p0")]


def test_a_settled_offer_takes_no_new_reader_while_it_is_read():
    faults = Switches(holds_writes=True)
    with pair(prefill_faults=faults) as (p, d, _):
        transfer = p.offer(lease_s=0.2)
        d.order(p, transfer, "d0")
        wait_for(lambda: faults.num_held, what="a held write")
        wait_for(lambda: (p.step(), p.door.status().gauges["offers"] == 0)[1], what="the end of the lease")
        time.sleep(0.1)
        d.order(p, transfer, "d1")
        assert "gone" in d.outcome("d1", others=[p]).reason
        faults.holds_writes = False
        assert d.outcome("d0", others=[p]).ok
        d.check_clean()
        p.check_clean()
        assert p.sent == [(0, "p0")]


def test_a_settlement_may_come_before_its_offer():
    with pair() as (p, d, _):
        transfer = fresh_id()
        p.settle(transfer)
        p.offer("p0", transfer)
        wait_for(p.step, what="the offer's end")
        d.order(p, transfer)
        assert "gone: the offer" in d.outcome(others=[p]).reason
        p.withdraw("p0", "aborted")
        d.check_clean()
        p.check_clean()
        assert p.sent == [(0, "p0")]


def test_a_parked_ask_hears_of_the_end_of_its_offer():
    """One sibling was served and settled before the other consumer's ask came: the pair is gone, not waited for."""
    with pair() as (p, d, _):
        transfer = fresh_id()
        d.order(p, transfer)
        wait_for(lambda: p.ranks[0].status().gauges["parked"], what="a parked ask")
        p.settle(transfer)
        p.ranks[0].offer(p.make_offer(transfer_id=transfer))
        received = d.outcome(others=[p])
        assert "gone" in received.reason
        d.check_clean()
        p.check_clean()


def test_an_order_for_another_run_of_the_instance_fails_at_once():
    with pair() as (p, d, _):
        d.order(p, p.offer(), incarnation="p-before")
        received = d.outcome(others=[p])
        assert "another run" in received.reason
        assert f"theirs={p.incarnation}" in received.reason
        assert "ours=p-before" in received.reason
        p.withdraw("p0", "test")
        d.check_clean()
        p.check_clean()


def test_busy_senders_say_so():
    with pair(prefill_config=replace(FAST, max_sessions=1)) as (p, d, _):
        d.order(p, fresh_id(), "d0")
        wait_for(lambda: p.ranks[0].status().gauges["parked"], what="a parked ask")
        d.order(p, p.offer(), "d1")
        assert "busy: too many sessions: most=1" in d.outcome("d1", others=[p]).reason
        d.abort("d0")
        assert not d.outcome("d0", others=[p]).ok
        d.order(p, p.offer("p1"), "d2")
        assert d.outcome("d2", others=[p]).ok


def test_news_of_an_order_comes_when_there_is_something_to_poll():
    """Well or badly, once each; nothing else is told."""
    hub, told = LoopbackHub(), threading.Semaphore(0)
    p, d = make_side(hub, "p", state_of()), make_side(hub, "d", state_of(), on_news=told.release)
    with sides(p, d):
        transfer = p.offer()
        for request_id, make in (("good", lambda: transfer), ("bad", fresh_id)):
            d.order(p, make(), request_id)
            if request_id == "bad":
                d.abort("bad")
            assert told.acquire(timeout=SOON_S)
            (received,) = d.ranks[0].poll().received
            assert (received.request_id, received.ok) == (request_id, request_id == "good")
        assert not told.acquire(timeout=0.05)
