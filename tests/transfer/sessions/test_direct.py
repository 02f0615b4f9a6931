"""The direct path: blocks are read where they lie, counted only when their owner proves that it held them."""

import time
from dataclasses import replace
from threading import Event

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import make_state, random_pair
from kv_testing.waiting import wait_for
from kv_testing.worlds import ALL, FAST, NUM_TOKENS, Switches, hang_until, make_side, pair, sides, state_of
from kv_transfer.agent.cards import DirectCard
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.direct.base import CannotMap
from kv_transfer.direct.in_process import InProcessCaches, InProcessDoor, InProcessHub
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.ranges import HOLE
from kv_transfer.protocol.errors import UnexpectedMessage
from kv_transfer.protocol.messages import Quiet


@pytest.fixture
def doors():
    return InProcessHub()


def windowed(tp=1, **cut):
    parallel = ParallelLayout.even(tp, [4], 4, **cut)
    return make_state(dtype="float32", head_size=4, tokens_per_block=4, windows=(0, 9, 0, 9), parallel=parallel)


SHAPES = {
    "tp1-tp1": (state_of(), state_of()),
    "tp2-tp1": (state_of(2), state_of(1)),
    "tp3-pp13": (state_of(3), state_of(stages=(1, 3))),
    "other blocks": (state_of(tokens_per_block=4), state_of(tokens_per_block=8, order="token_major")),
    "smaller blocks": (state_of(tokens_per_block=16), state_of(2, tokens_per_block=4)),
    "windows, cp": (windowed(cp=2, context_cut="round_robin"), windowed(2)),
}


@pytest.mark.parametrize("tokens", [ALL, Span(7, 33), Span(39, 40)], ids=str)
@pytest.mark.parametrize(("prefill", "decode"), SHAPES.values(), ids=SHAPES)
def test_blocks_of_any_shape_are_read_where_they_lie(prefill, decode, tokens, doors):
    with pair(prefill, decode, direct=doors.door) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer, tokens=tokens)
        received = d.outcomes(others=[p])
        assert all(each.ok for each in received), received
        assert d.misplaced(tokens) == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
        assert d.count("bytes_read_directly") == sum(each.num_bytes for each in received) > 0
        assert p.count("bytes_out") == 0, "nothing goes over the wire"
    assert doors.num_open == 0


@pytest.mark.drawn
@pytest.mark.parametrize("seed", [seed for seed in range(60) if random_pair(seed).tokens][:12])
def test_drawn_pairs_are_read_as_they_are_sent(seed, doors):
    drawn, hub = random_pair(seed), LoopbackHub()
    p, d = (
        make_side(hub, name, state, replace(FAST, chunk_bytes=None), num_tokens=drawn.tokens.stop, direct=doors.door)
        for name, state in (("p", drawn.sender), ("d", drawn.receiver))
    )
    with sides(p, d):
        transfer = p.offer(num_tokens=drawn.tokens.stop, group=drawn.sender_group)
        d.order(p, transfer, tokens=drawn.tokens, from_group=drawn.sender_group, to_group=drawn.receiver_group)
        assert all(each.ok for each in d.outcomes(others=[p]))
        start = drawn.tokens.start // drawn.sender.tokens_per_unit * drawn.sender.tokens_per_unit
        assert d.misplaced(Span(start, drawn.tokens.stop)) == 0
        d.release(p, transfer)
        d.check_clean()


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_side_without_a_direct_path_is_served_all_the_same(side, doors):
    hub = LoopbackHub()
    p, d = (make_side(hub, name, state_of(), **({} if name == side else {"direct": doors.door})) for name in ("p", "d"))
    with sides(p, d):
        _hand_over(p, d)
        assert (d.count("bytes_read_directly"), p.count("bytes_out") > 0) == (0, True)


def test_caches_that_cannot_be_mapped_are_staged(doors, monkeypatch):
    """The reason is told once; nothing fails by it."""

    def refuse(self, card, state, rank):
        raise CannotMap("the driver refuses")

    with pair(direct=doors.door) as (p, d, _):
        monkeypatch.setattr("kv_transfer.direct.in_process.InProcessDoor.map", refuse)
        _hand_over(p, d, "one")
        _hand_over(p, d, "two")
        assert (d.count("maps_failed"), d.count("bytes_read_directly")) == (1, 0)


def test_a_card_too_long_to_be_told_leaves_all_to_staging(doors, monkeypatch):
    card = DirectCard(kind="in-process", host=doors.name, blob=bytes(5000))
    monkeypatch.setattr(InProcessDoor, "card", lambda self: card)
    with pair(config=replace(FAST, max_message_bytes=4096), direct=doors.door) as (p, d, _):
        _hand_over(p, d)
        assert (d.count("bytes_read_directly"), p.count("internal_errors")) == (0, 0)


def test_the_setting_switches_it_off(doors):
    with pair(config=replace(FAST, direct=False), direct=doors.door) as (p, d, _):
        _hand_over(p, d)
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


def test_a_read_that_fails_is_told_and_costs_nothing_else(doors, monkeypatch):
    with pair(state_of(2), direct=doors.door) as (p, d, _):
        with monkeypatch.context() as patch:
            patch.setattr(InProcessCaches, "read", lambda self, what, into: 1 / 0)
            transfer = p.offer("bad")
            d.order(p, transfer, "bad")
            received = d.outcome("bad", others=[p])
            assert "could not be read: division by zero" in received.reason
            d.release(p, transfer, "bad")
        _hand_over(p, d, "good")


def test_a_hole_is_never_read(doors):
    with pair(windowed(), windowed(), direct=doors.door) as (p, d, _):
        full, window = p.world.tables(0).by_group
        tables = BlockTables(NUM_TOKENS, (full, (HOLE,) * 9 + window[9:]))
        offer = replace(p.make_offer(), tables=tables)
        p.door.open_offer(offer.transfer_id, offer.request_id, offer.prompt_key)
        p.ranks[0].offer(offer)
        d.order(p, offer.transfer_id)
        received = d.outcome(others=[p])
        assert "hole among these tokens" in received.reason
        assert d.misplaced(Span(0, 0)) == 0, "what does not fit is found before anything is written"


@pytest.mark.parametrize("lost", ["Ready", "Close", "Quiet"])
def test_lost_messages_are_said_again(lost, doors):
    switches = Switches(dropped={lost})
    with pair(prefill_faults=switches, decode_faults=switches, direct=doors.door) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: switches.num_said[lost] >= 2, 10, f"{lost} again")
        d.step()
        assert d.received == [], "nothing counts before it is proven"
        switches.dropped = set()
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def test_a_mapping_ends_with_its_peer(doors):
    """Its memory stays taken as long as we map it: also when nothing is wanted of it, its death is noticed."""
    with pair(direct=doors.door) as (p, d, _):
        _hand_over(p, d)
        assert (doors.num_open, d.cores[0].measure().gauges["mappings"]) == (1, 1)
        p.close()
        wait_for(lambda: doors.num_open == 0, 10, "the end of the mapping")


def test_a_mapping_ends_when_it_is_not_used_and_comes_back_when_it_is(doors):
    with pair(config=replace(FAST, unmap_idle_s=0.3), direct=doors.door) as (p, d, _):
        _hand_over(p, d, "one")
        wait_for(lambda: doors.num_open == 0, 10, "the end of the mapping")
        _hand_over(p, d, "two")
        assert d.count("bytes_read_directly") == 2 * d.received[0][1].num_bytes


def test_a_mapping_ends_with_its_owner(doors):
    with pair(direct=doors.door) as (p, d, _):
        _hand_over(p, d)
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
            _hand_over(p, d, f"r{number}")
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


def _hand_over(p, d, name="r"):
    transfer = p.offer(name)
    d.order(p, transfer, name)
    received = d.outcome(name, others=[p])
    assert received.ok, received.reason
    assert d.misplaced() == 0
    d.release(p, transfer, name)
    d.check_clean()
    p.check_clean()
