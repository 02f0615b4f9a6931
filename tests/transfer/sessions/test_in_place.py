"""The in-place path: long runs are read by the agent where they lie, into blocks that are memory of our own."""

from dataclasses import replace

import pytest

from kv_core.spans import Span
from kv_testing.layouts import make_state, random_pair
from kv_testing.waiting import wait_for
from kv_testing.worlds import ALL, FAST, NUM_TOKENS, Switches, make_side, pair, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.direct.in_process import InProcessHub
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.ranges import HOLE

ALWAYS = replace(FAST, own_blocks=True, in_place_run_bytes=1)
SHARED = replace(FAST, share_in_place=True)


def windowed(tp=1, **cut):
    parallel = ParallelLayout.even(tp, [4], 4, **cut)
    return make_state(dtype="float32", head_size=4, tokens_per_block=4, windows=(0, 9, 0, 9), parallel=parallel)


SHAPES = {
    "tp1-tp1": (state_of(), state_of()),
    "tp2-tp1": (state_of(2), state_of(1)),
    "tp3-pp13": (state_of(3), state_of(stages=(1, 3))),
    "token major": (state_of(2, order="token_major"), state_of(order="token_major")),
    "other blocks": (state_of(tokens_per_block=4), state_of(tokens_per_block=8, order="token_major")),
    "smaller blocks": (state_of(tokens_per_block=16), state_of(2, tokens_per_block=4)),
    "windows, cp": (windowed(cp=2, context_cut="round_robin"), windowed(2)),
}


@pytest.mark.parametrize("tokens", [ALL, Span(7, 33), Span(39, 40)], ids=str)
@pytest.mark.parametrize(("prefill", "decode"), SHAPES.values(), ids=SHAPES)
def test_blocks_of_any_shape_are_read_where_they_lie(prefill, decode, tokens):
    with pair(prefill, decode, config=ALWAYS, prefill_config=SHARED) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer, tokens=tokens)
        received = d.outcomes(others=[p])
        assert all(each.ok for each in received), received
        assert d.misplaced(tokens) == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
        assert d.count("bytes_read_in_place") == sum(each.num_bytes for each in received) > 0
        assert p.count("bytes_out") == 0, "nothing is gathered"


@pytest.mark.drawn
@pytest.mark.parametrize("seed", [seed for seed in range(60) if random_pair(seed).tokens][:12])
def test_drawn_pairs_are_read_as_they_are_sent(seed):
    drawn, hub = random_pair(seed), LoopbackHub()
    p, d = (
        make_side(hub, name, state, replace(ALWAYS, chunk_bytes=None), num_tokens=drawn.tokens.stop)
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


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (FAST, ALWAYS),
        (SHARED, replace(SHARED, in_place_run_bytes=1)),
        (SHARED, replace(ALWAYS, in_place_run_bytes=257)),
    ],
    ids=["sender does not share", "blocks of an engine", "runs too short"],
)
def test_whatever_else_is_staged(prefill, decode):
    """A whole block of all four heads is a run of 4 tokens * 4 heads * 4 floats."""
    with pair(config=decode, prefill_config=prefill) as (p, d, _):
        _hand_over(p, d)
        assert (d.count("bytes_read_in_place"), p.count("bytes_out") > 0) == (0, True)


def test_runs_that_are_just_long_enough_are_read_in_place():
    with pair(config=replace(ALWAYS, in_place_run_bytes=256), prefill_config=SHARED) as (p, d, _):
        _hand_over(p, d)
        assert d.count("bytes_read_in_place") > 0


def test_what_is_mapped_is_not_read_by_the_agent():
    doors = InProcessHub()
    with pair(config=ALWAYS, direct=doors.door) as (p, d, _):
        _hand_over(p, d)
        assert (d.count("bytes_read_in_place"), d.count("bytes_read_directly") > 0) == (0, True)


def test_a_card_too_long_to_be_told_leaves_all_to_staging(monkeypatch):
    monkeypatch.setattr("kv_transfer.in_place.caches.SharedCaches.card", lambda self: _card(bytes(5000)))
    with pair(config=replace(ALWAYS, max_message_bytes=4096)) as (p, d, _):
        _hand_over(p, d)
        assert (d.count("bytes_read_in_place"), p.count("internal_errors")) == (0, 0)


def test_a_card_that_cannot_be_read_leaves_all_to_staging(monkeypatch):
    monkeypatch.setattr("kv_transfer.in_place.caches.SharedCaches.card", lambda self: _card(b"no blob"))
    with pair(config=ALWAYS) as (p, d, _):
        _hand_over(p, d)
        assert d.count("bytes_read_in_place") == 0


def test_blocks_that_were_given_up_during_the_read_prove_nothing(monkeypatch):
    """The sender's engine takes the offer back while it is read: what was read is not counted."""
    with pair(config=ALWAYS) as (p, d, hub):
        _hand_over(p, d, "first")
        hub.stop(p.agents[0].name)
        transfer = p.offer("taken")
        d.order(p, transfer, "taken")
        wait_for(lambda: d.cores[0].loads.receiver.reads._in_place._posted, 10, "the read")
        (session,) = p.cores[0].sender._sessions.values()
        p.ranks[0]._reactor.post(lambda: p.cores[0].sender.chunk_failed(session, "gone", "the engine took it back"))
        wait_for(lambda: d.step() is not None and not p.cores[0].sender._sessions, 10, "the end of the session")
        hub.resume(p.agents[0].name)
        received = d.outcome("taken", others=[p])
        assert not received.ok
        assert "took it back" in received.reason
        d.release(p, transfer, "taken")
        _hand_over(p, d, "next")


def test_a_stopped_peer_keeps_the_blocks_it_may_still_fill_and_nothing_else():
    """A load is decided by its deadline, and told when no byte can come any more: here when the peer goes on."""
    with pair(config=replace(ALWAYS, request_deadline_s=1.0)) as (p, d, hub):
        _hand_over(p, d, "first")
        hub.stop(p.agents[0].name)
        transfer = p.offer("late")
        d.order(p, transfer, "late")
        wait_for(lambda: d.cores[0].loads._loads and not _load(d, "late").is_open, 10, "the deadline")
        d.step()
        assert [each for _, each in d.received if each.request_id == "late"] == [], "its blocks may still be written"
        hub.resume(p.agents[0].name)
        received = d.outcome("late", others=[p])
        assert "deadline" in received.reason
        d.release(p, transfer, "late")
        _hand_over(p, d, "next")


def test_a_dead_peer_gives_the_blocks_back_after_a_grace():
    with pair(config=replace(ALWAYS, request_deadline_s=1.0)) as (p, d, hub):
        _hand_over(p, d, "first")
        hub.stop(p.agents[0].name)
        d.order(p, p.offer("lost"), "lost")
        wait_for(lambda: d.cores[0].loads.receiver.reads._in_place._posted, 10, "the read")
        hub.kill(p.agents[0].name)
        received = d.outcome("lost", others=[p])
        assert "could not be read in place: the agent is gone" in received.reason
        p.close()
        d.check_clean()


def test_a_load_that_was_read_for_is_not_tried_again():
    """Its peer is dead, and a newer run might have the prompt; but what the dead one sent may still land."""
    with pair(config=ALWAYS) as (p, d, hub):
        _hand_over(p, d, "first")
        hub.stop(p.agents[0].name)
        d.order(p, p.offer("lost"), "lost")
        wait_for(lambda: d.cores[0].loads.receiver.reads._in_place._posted, 10, "the read")
        (session,) = d.cores[0].loads.receiver._sessions.values()
        d.ranks[0]._reactor.post(lambda: d.cores[0].peers.dead(session.peer, "a test says so"))
        assert "is dead: a test says so" in d.outcome("lost", others=[p]).reason
        d.check_clean()


def test_an_abort_ends_a_read():
    with pair(config=ALWAYS) as (p, d, hub):
        _hand_over(p, d, "first")
        hub.delay(d.agents[0].name, 0.3)
        transfer = p.offer("given up")
        d.order(p, transfer, "given up")
        wait_for(lambda: d.cores[0].loads.receiver.reads._in_place._posted, 10, "the read")
        d.abort("given up")
        assert "aborted" in d.outcome("given up", others=[p]).reason
        d.release(p, transfer, "given up")
        hub.delay(d.agents[0].name, 0.0)
        _hand_over(p, d, "next")


def test_a_read_that_fails_is_told_and_costs_nothing_else():
    with pair(state_of(2), config=ALWAYS) as (p, d, hub):
        hub.fail(d.agents[0].name)
        transfer = p.offer("bad")
        d.order(p, transfer, "bad")
        received = d.outcome("bad", others=[p])
        assert "could not be read in place: a test wants this post to fail" in received.reason
        d.release(p, transfer, "bad")
        _hand_over(p, d, "good")


def test_a_hole_is_never_read():
    with pair(windowed(), windowed(), config=ALWAYS) as (p, d, _):
        full, window = p.world.tables(0).by_group
        offer = replace(p.make_offer(), tables=BlockTables(NUM_TOKENS, (full, (HOLE,) * 9 + window[9:])))
        p.door.open_offer(offer.transfer_id, offer.request_id, offer.prompt_key)
        p.ranks[0].offer(offer)
        d.order(p, offer.transfer_id)
        assert "hole among these tokens" in d.outcome(others=[p]).reason
        assert d.misplaced(Span(0, 0)) == 0


@pytest.mark.parametrize("lost", ["Ready", "Close", "Quiet"])
def test_lost_messages_are_said_again(lost):
    switches = Switches(dropped={lost})
    with pair(config=ALWAYS, prefill_faults=switches, decode_faults=switches) as (p, d, _):
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


def _load(side, request_id):
    return side.cores[0].loads._loads[request_id]


def _card(blob):
    from kv_transfer.agent.cards import DirectCard

    return DirectCard(kind="in-place", host="loopback", blob=blob)


def _hand_over(p, d, name="r"):
    transfer = p.offer(name)
    d.order(p, transfer, name)
    received = d.outcome(name, others=[p])
    assert received.ok, received.reason
    assert d.misplaced() == 0
    d.release(p, transfer, name)
    d.check_clean()
    p.check_clean()
