"""The direct path: blocks are read where they lie, counted only when their owner proves that it held them."""

import time
from dataclasses import replace
from threading import Event

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.exchanges import hand_over
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, Switches, hang_until, make_side, pair, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.direct.base import CannotMap
from kv_transfer.direct.in_process import InProcessCaches, InProcessDoor, InProcessHub
from kv_transfer.protocol.errors import UnexpectedMessage
from kv_transfer.protocol.messages import Quiet


@pytest.fixture
def doors():
    return InProcessHub()


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_side_without_a_direct_path_is_served_all_the_same(side, doors):
    hub = LoopbackHub()
    p, d = (make_side(hub, name, state_of(), **({} if name == side else {"direct": doors.door})) for name in ("p", "d"))
    with sides(p, d):
        hand_over(p, d)
        assert (d.count("bytes_read_directly"), p.count("bytes_out") > 0) == (0, True)


def test_caches_that_cannot_be_mapped_are_staged(doors, monkeypatch):
    """The reason is told once; nothing fails by it."""

    def refuse(self, card, state, rank):
        raise CannotMap("the driver refuses")

    with pair(direct=doors.door) as (p, d, _):
        monkeypatch.setattr("kv_transfer.direct.in_process.InProcessDoor.map", refuse)
        hand_over(p, d, name="one")
        hand_over(p, d, name="two")
        assert (d.count("maps_failed"), d.count("bytes_read_directly")) == (1, 0)


def test_the_setting_switches_it_off(doors):
    with pair(config=replace(FAST, direct=False), direct=doors.door) as (p, d, _):
        hand_over(p, d)
        assert d.count("bytes_read_directly") == 0


def test_an_offer_that_ends_while_it_is_read_fails_the_load(doors, monkeypatch):
    """Its blocks are somebody else's before the last of them is read: what was read is not believed."""
    # The sender's own deadline is short: it lets go of the offer while the receiver still reads, and is not heard.
    unheard, prefill = Switches(dropped={"Refuse", "Quiet"}), replace(FAST, request_deadline_s=0.5)
    with pair(prefill_config=prefill, prefill_faults=unheard, direct=doors.door) as (p, d, _):
        read = InProcessCaches.read

        def slowly(self, what, into):
            p.withdraw()
            wait_for(lambda: p.step() and p.sent, 10, "the end of the offer")
            for plane in p.world.caches[Rank(0)].planes:
                plane.fill_(7)
            read(self, what, into)
            unheard.dropped = set()

        monkeypatch.setattr(InProcessCaches, "read", slowly)
        transfer = p.offer()
        d.order(p, transfer)
        received = d.outcome(timeout_s=20)
        assert not received.ok
        assert "is not proven" in received.reason
        assert d.misplaced() > 0, "the control: what was read is not what was offered"
        monkeypatch.setattr(InProcessCaches, "read", read)
        d.check_clean()
        p.check_clean()


def test_no_block_is_freed_under_a_reader(doors, monkeypatch):
    """Settled meanwhile, the offer stays until the Close; then its request is over."""
    with pair(direct=doors.door) as (p, d, _):
        read = InProcessCaches.read

        def slowly(self, what, into):
            wait_for(lambda: p.cores[0].sender.num_sessions, what="the Ask")
            p.withdraw()
            time.sleep(0.3)
            p.step()
            assert p.sent == [], "freed under a reader"
            read(self, what, into)

        monkeypatch.setattr(InProcessCaches, "read", slowly)
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        p.check_clean()
        assert p.sent == [(0, "p0")]


def test_a_mapping_ends_with_its_peer(doors):
    """Its memory stays taken as long as we map it: also when nothing is wanted of it, its death is noticed."""
    with pair(direct=doors.door) as (p, d, _):
        hand_over(p, d)
        assert (doors.num_open, d.cores[0].measure().gauges["mappings"]) == (1, 1)
        p.close()
        wait_for(lambda: doors.num_open == 0, 10, "the end of the mapping")


def test_a_mapping_ends_when_it_is_not_used_and_comes_back_when_it_is(doors):
    with pair(config=replace(FAST, unmap_idle_s=0.3), direct=doors.door) as (p, d, _):
        hand_over(p, d, name="one")
        wait_for(lambda: doors.num_open == 0, 10, "the end of the mapping")
        hand_over(p, d, name="two")
        assert d.count("bytes_read_directly") == 2 * d.received[0][1].num_bytes


def test_a_mapping_ends_with_its_owner(doors):
    with pair(direct=doors.door) as (p, d, _):
        hand_over(p, d)
        d.close()
        assert doors.num_open == 0


def test_a_mapping_stays_while_it_is_used_now_and_then(doors, monkeypatch):
    """No session is open at the moment the time is up, but one was a moment ago."""
    made, map_ = [], InProcessDoor.map

    def counted(*args):
        made.append(map_(*args))
        return made[-1]

    monkeypatch.setattr(InProcessDoor, "map", counted)
    with pair(config=replace(FAST, unmap_idle_s=2.0), direct=doors.door) as (p, d, _):
        for number in range(6):
            hand_over(p, d, name=f"r{number}")
            time.sleep(0.5)
        assert (len(made), doors.num_open) == (1, 1)


def test_a_mapping_made_while_its_owner_closes_is_closed_too(doors, monkeypatch):
    """Its end is not heard any more, but the mover still runs what was queued."""
    begun, map_ = Event(), InProcessDoor.map

    def slowly(*args):
        begun.set()
        time.sleep(0.5)
        return map_(*args)

    monkeypatch.setattr(InProcessDoor, "map", slowly)
    with pair(direct=doors.door) as (p, d, _):
        d.order(p, p.offer())
        assert begun.wait(10)
        d.close()
        assert doors.num_open == 0


def test_blocks_too_many_to_be_told_end_the_session(doors):
    """What cannot be said is refused at once, instead of being tried until the deadline."""
    short = replace(FAST, max_message_bytes=4096, request_deadline_s=60)
    state = state_of(tokens_per_block=1)
    hub = LoopbackHub()
    p, d = (make_side(hub, name, state, short, num_tokens=2500, direct=doors.door) for name in ("p", "d"))
    with sides(p, d):
        d.order(p, p.offer(num_tokens=2500), tokens=Span(0, 2500))
        received = d.outcome(timeout_s=10, others=[p])
        assert "too long" in received.reason
        assert p.count("internal_errors") == 0


def test_a_proof_before_the_first_ask_proves_nothing(doors, monkeypatch):
    """An illegal message changes nothing: a Quiet in a session that waits to be asked is no word about its Close."""
    with pair(direct=doors.door) as (p, d, _):
        begun, go, map_ = Event(), Event(), InProcessDoor.map

        def slowly(*args):
            begun.set()
            hang_until(go)
            return map_(*args)

        monkeypatch.setattr(InProcessDoor, "map", slowly)
        d.order(p, p.offer())
        assert begun.wait(10)
        (session,) = d.cores[0].loads.receiver._sessions.values()
        with pytest.raises(UnexpectedMessage):
            d.cores[0].loads.receiver.quiet(session.peer, Quiet(session=session.name, clean=True))
        assert not session.is_proven
        go.set()
        assert d.outcome(others=[p]).ok
