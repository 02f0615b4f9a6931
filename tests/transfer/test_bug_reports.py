"""Public bug reports of such systems that concern the transfer, each with the outcome that is right (BR-nn)."""

import time
from dataclasses import replace

import msgspec
import pytest
import torch

from kv_core.config import ManagerConfig, WindowConfig
from kv_core.ids import Rank, RequestId
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.spans import Span
from kv_testing.carrier import carry
from kv_testing.layouts import make_state
from kv_testing.tagged import FORMS, fill, make_world, misplaced
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Switches, fresh_id, make_side, pair, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.copies import Copier
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout
from kv_transfer.plan.plan import receive_plans, send_plans


def even(tp=1, stages=(4,), heads=4, **more):
    return ParallelLayout.even(tp, stages, heads, **more)


def worlds(sender, receiver, num_tokens):
    """A filled sender and an empty receiver."""
    made = [
        make_world(state, num_tokens, FORMS[state.layout.order][0], seed)
        for seed, state in enumerate((sender, receiver))
    ]
    fill(made[0], Span(0, num_tokens))
    return made


def two_heads(tp):
    return make_state(
        dtype="float16", head_size=8, num_layers=1, num_kv_heads=2, tokens_per_block=4, parallel=even(tp, (1,), 2)
    )


def test_br_20_each_rank_gets_its_head_once():
    sender, receiver = worlds(two_heads(1), two_heads(4), 4)
    plans = [receive_plans(receiver.state, Rank(rank), sender.state, Span(0, 4)) for rank in range(4)]
    assert [[plan.num_bytes for plan in found] for found in plans] == [[128]] * 4
    assert carry(sender, receiver, Span(0, 4)) == 4 * 128
    assert misplaced(receiver, Span(0, 4)) == 0, "also: nothing past the block is written"
    held = [torch.stack(receiver.caches[rank].planes).flatten() for rank in range(4)]
    assert [torch.equal(held[0].view(torch.int16), other.view(torch.int16)) for other in held] == [
        True,
        True,
        False,
        False,
    ]
    assert torch.equal(held[2].view(torch.int16), held[3].view(torch.int16))


def test_br_20_of_ranks_with_equal_heads_one_gives():
    sender, receiver = worlds(two_heads(4), two_heads(1), 4)
    giving = [bool(send_plans(sender.state, Rank(rank), receiver.state, Span(0, 4))) for rank in range(4)]
    assert (giving[:2].count(True), giving[2:].count(True)) == (1, 1)
    assert carry(sender, receiver, Span(0, 4)) == 256
    assert misplaced(receiver, Span(0, 4)) == 0


def test_br_22_layers_are_told_and_not_divided():
    states = [make_state(num_layers=10, parallel=even(1, stages)) for stages in ((3, 3, 2, 2), (5, 5))]
    sender, receiver = worlds(states[0], states[1], 20)
    layers = [
        [(plan.sender, *map(list, (piece.layers for piece in plan.pieces))) for plan in plans]
        for plans in (receive_plans(states[1], Rank(rank), states[0], Span(0, 20)) for rank in range(2))
    ]
    assert layers == [[(0, [0, 1, 2]), (1, [3, 4])], [(1, [5]), (2, [6, 7]), (3, [8, 9])]]
    carry(sender, receiver, Span(0, 20))
    assert misplaced(receiver, Span(0, 20)) == 0


def test_br_22_stages_that_do_not_sum_to_the_model_are_refused():
    with pytest.raises(ValueError, match="stated=10, laid out=9"):
        make_state(num_layers=10, parallel=even(1, (3, 3, 2, 1)))


@pytest.mark.parametrize("tps", [(2, 1), (1, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("order", ["head_major", "token_major"])
@pytest.mark.parametrize("other", ["head_major", "token_major"])
def test_br_23_every_element_arrives_at_its_coordinates_in_any_order(tps, order, other):
    common = {"head_size": 2, "num_layers": 2, "tokens_per_block": 4}
    states = [
        make_state(**common, layout=BlockLayout(one), parallel=even(tp, (2,)))
        for tp, one in zip(tps, (order, other), strict=True)
    ]
    sender, receiver = worlds(states[0], states[1], 8)
    carry(sender, receiver, Span(0, 8))
    assert misplaced(receiver, Span(0, 8)) == 0


@pytest.mark.parametrize(
    ("num_tokens", "cp", "blocks"),
    [(3, 4, [1, 0, 0, 0]), (8, 4, [1, 1, 0, 0]), (20, 4, [2, 1, 1, 1]), (20, 2, [3, 2])],
)
def test_br_24_context_ranks_without_blocks_finish(num_tokens, cp, blocks):
    hub = LoopbackHub()
    p = make_side(hub, "p", make_state(tokens_per_block=4, parallel=even(2)), num_tokens=num_tokens)
    d = make_side(hub, "d", make_state(tokens_per_block=4, parallel=even(cp=cp)), num_tokens=num_tokens)
    with sides(p, d):
        transfer = p.offer(num_tokens=num_tokens)
        d.order(p, transfer, tokens=Span(0, num_tokens))
        received = d.outcomes(others=[p])
        assert all(each.ok for each in received), received
        assert [bool(each.num_bytes) for each in received] == [bool(count) for count in blocks]
        assert [len(d.world.blocks_of(Rank(rank))) for rank in range(cp)] == blocks
        assert d.misplaced(Span(0, num_tokens)) == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def four_blocks():
    return KVCacheManager(
        ManagerConfig(tokens_per_block=4, windows=(WindowConfig(64, 4),), max_sequence_length=64, partial_reuse=False)
    )


def nine(name, first=0):
    return Request(RequestId(name), range(first, first + 9))


def finished(manager, name):
    """A prompt that was computed: its request is over, its blocks are pinned for those who read them."""
    assert manager.add(nine(name)) is not None
    pin = manager.pin(RequestId(name))
    manager.release(RequestId(name))
    return pin


def test_br_25_blocks_on_offer_are_given_to_nobody_until_they_are_sent():
    manager, faults, hub = four_blocks(), Switches(holds_writes=True), LoopbackHub()
    p = make_side(hub, "p", state_of(), faults=faults, num_tokens=9)
    d = make_side(hub, "d", state_of(), num_tokens=9)
    with sides(p, d):
        pin = finished(manager, "a")
        p.world = replace(p.world, table=tuple(pin.block_ids[64]))
        transfer = p.offer("a", num_tokens=9)
        d.order(p, transfer, tokens=Span(0, 9))
        wait_for(lambda: faults.num_held, what="a held write")
        d.release(p, transfer)
        assert p.step() == []
        assert manager.num_free() == 1
        assert manager.add(nine("b", 100)) is None
        faults.holds_writes = False
        assert d.outcome(others=[p]).ok
        wait_for(lambda: p.step() == [(0, "a")], what="the end of the offer")
        manager.unpin(pin)
        assert manager.add(nine("b", 100)) is not None
        manager.release(RequestId("b"))
        assert d.misplaced(Span(0, 9)) == 0
        assert manager.num_free() == 4


def test_br_25_a_sender_that_cannot_serve_says_so():
    manager, hub = four_blocks(), LoopbackHub()
    p, d = make_side(hub, "p", state_of(), num_tokens=9), make_side(hub, "d", state_of(), num_tokens=9)
    with sides(p, d):
        pin = finished(manager, "a")
        transfer = fresh_id()
        d.order(p, transfer, "wanted", Span(0, 9))
        wait_for(lambda: p.ranks[0].status().gauges["parked"], what="a parked ask")
        start = time.monotonic()
        p.settle(transfer, "a", "blocks lost")
        p.ranks[0].offer(p.make_offer("a", transfer, num_tokens=9))
        received = d.outcome("wanted", others=[p])
        assert time.monotonic() - start < SOON_S
        assert (received.request_id, received.ok) == ("wanted", False)
        assert "blocks lost" in received.reason
        wait_for(lambda: p.step() == [(0, "a")], what="the end of the offer")
        manager.unpin(pin)
        assert manager.num_free() == 4
        d.check_clean()
        p.check_clean()


def failing_split(patch, p, hub):
    def gather(self, *args, **named):
        def run():
            raise RuntimeError("no split today")

        return run

    patch.setattr(Copier, "gather", gather)
    return "no split today"


def failing_post(patch, p, hub):
    hub.fail(p.agents[0].name, 1)
    return "write_failed"


def peer_refusal(patch, p, hub):
    patch.setattr(p.cores[0].sender.offers, "why_gone", lambda pair: "taken back")
    return "taken back"


def time_out(patch, p, hub):
    patch.setattr(p.cores[0].sender.offers, "find", lambda pair, num_tokens: None)
    return "came in time"


def abort(patch, p, hub):
    return "aborted by the engine"


FAILURES = [failing_split, failing_post, peer_refusal, abort]
TWO = replace(FAST, send_arena_bytes=2 * 4096, receive_arena_bytes=2 * 4096, request_deadline_s=2.0)
"""Room for two chunks on either side."""


@pytest.mark.patient
def test_br_26_whatever_fails_leaves_nothing_open(monkeypatch):
    """One failure after the other, and no new request between them that might clean up."""
    with pair(config=TWO) as (p, d, hub):
        for number, fail in enumerate([*FAILURES, time_out, *FAILURES]):
            transfer = p.offer(f"p{number}")
            with monkeypatch.context() as patch:
                reason = fail(patch, p, hub)
                d.order(p, transfer, f"d{number}")
                if fail is abort:
                    d.abort(f"d{number}")
                received = d.outcome(f"d{number}", others=[p])
            assert not received.ok
            # A load that times out hears it from its sender, or from its own clock.
            assert reason in received.reason or (fail is time_out and "deadline" in received.reason)
            d.release(p, transfer, f"d{number}")
            d.check_clean()
            p.check_clean()
            assert (0, f"p{number}") in p.sent, "the blocks are the engine's again"
        transfer = p.offer("good")
        d.order(p, transfer, "good")
        assert d.outcome("good", others=[p]).ok
        assert d.misplaced() == 0


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("dtype", {"dtype": "float16"}),
        ("head_size", {"head_size": 8}),
        ("num_layers", {"num_layers": 5, "parallel": even(1, (5,))}),
        ("attention", {"attention": "latent", "num_kv_heads": 1, "parallel": even(1, (4,), 1)}),
        ("num_planes", {"num_planes": 1}),
    ],
)
def test_br_27_unequal_caches_are_refused_at_first_contact(field, changes):
    other = msgspec.convert(msgspec.structs.asdict(state_of()) | changes, type(state_of()))
    with pair(state_of(), other) as (p, d, _):
        d.order(p, p.offer())
        received = d.outcome(others=[p])
        theirs, ours = (getattr(state, field) for state in (state_of(), other))
        assert f"{field} differs: ours={ours}, theirs={theirs}" in received.reason
        assert (p.count("chunks_out"), d.misplaced(Span(0, 0))) == (0, 0)
        p.withdraw("p0", "test")
        p.check_clean()
        d.check_clean()
        assert [side.ranks[0].status().gauges["peers"] for side in (p, d)] == [0, 0]


def test_br_27_blocks_of_other_sizes_are_converted():
    with pair(state_of(tokens_per_block=16), state_of(tokens_per_block=32)) as (p, d, _):
        d.order(p, p.offer())
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0


def test_br_28_a_restarted_peer_is_met_again_and_others_are_not_disturbed():
    hub = LoopbackHub()
    p, q = make_side(hub, "p", state_of()), make_side(hub, "q", state_of())
    with sides(make_side(hub, "d", state_of()), q) as (d, q):
        transfer = p.offer()
        d.order(p, transfer, "before")
        assert d.outcome("before", others=[p]).ok
        with_q = q.offer("q0")
        d.order(q, with_q, "q0")
        ports = [p.door.address[1], *(rank.card.port for rank in p.ranks)]
        old = p.incarnation
        for agent in p.agents:
            hub.kill(agent.name)
        p.close(0.1)
        with sides(make_side(hub, "p", state_of(), ports=ports)) as (again,):
            d.order(again, transfer, "outdated", incarnation=old)
            outdated = d.outcome("outdated", others=[again, q])
            assert (outdated.ok, outdated.num_chunks) == (False, 0)
            assert "another run" in outdated.reason or old in outdated.reason
            fresh = again.offer("p1")
            change_content(again)
            d.order(again, fresh, "fresh")
            assert d.outcome("fresh", others=[again, q]).ok
            assert holds(d, again)
            assert d.outcome("q0", others=[again, q]).ok
            d.release(again, fresh, "fresh")
            d.release(q, with_q, "q0")
            again.check_clean()
            q.check_clean()


def change_content(side):
    for rank, caches in side.world.caches.items():
        for plane in caches.planes:
            plane.view(torch.int32).add_(1 + rank)


def holds(ours, theirs):
    """Whether the request's blocks are equal, ordinal by ordinal."""
    tables = [list(side.world.table) for side in (ours, theirs)]
    planes = [side.world.caches[Rank(0)].planes for side in (ours, theirs)]
    return all(
        torch.equal(mine[tables[0]].view(torch.int32), other[tables[1]].view(torch.int32))
        for mine, other in zip(*planes, strict=True)
    )


@pytest.mark.parametrize(("num_held", "blocks"), [(12, [3]), (0, [0, 1, 2, 3]), (16, [])])
def test_br_29_blocks_are_paired_by_their_place_in_the_sequence(num_held, blocks):
    """Decode has a block more than prefill, for the token that it computes."""
    hub = LoopbackHub()
    p, d = make_side(hub, "p", state_of(), num_tokens=16), make_side(hub, "d", state_of(), num_tokens=17)
    with sides(p, d):
        transfer = p.offer(num_tokens=16)
        d.order(p, transfer, tokens=Span(num_held, 16))
        received = d.outcome(others=[p])
        assert received.ok, received.reason
        assert received.num_bytes == len(blocks) * 4 * 4 * 4 * 2 * 16
        assert d.misplaced(Span(num_held, 16)) == 0
        d.release(p, transfer)
        wait_for(lambda: p.step() == [(0, "p0")], what="the word that prefill may free")
        d.check_clean()
        p.check_clean()
