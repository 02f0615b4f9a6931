"""Whole hand-overs where ranks share a sequence, groups hold other requests, or layers have windows of their own."""

import os
from dataclasses import replace

import pytest

from kv_core.spans import Span
from kv_testing.exchanges import hand_over
from kv_testing.exchanges import small_state as state
from kv_testing.layouts import random_pair
from kv_testing.worlds import FAST, NUM_TOKENS, make_side, pair, sides
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import LATENT
from kv_transfer.plan.ranges import HOLE

MAX_RANKS = 12
NUM_DRAWN = 24


SHAPES = {
    "cp2 to cp1": (state(cp=2), state(tp=2)),
    "cp1 to cp3 round robin": (state(tp=2), state(cp=3, context_cut="round_robin")),
    "cp2 to cp4, both cuts, other blocks": (
        state(cp=2, context_cut="round_robin"),
        state(cp=4, tokens_per_block=8, numbering="tensor_inner"),
    ),
    "tp2 cp2 to pp2 cp3": (state(tp=2, cp=2), state(stages=(1, 3), cp=3)),
    "more context ranks than blocks": (state(cp=4, tokens_per_block=16), state()),
    "alternating windows": (state(tp=2, windows=(0, 9, 0, 9)), state(stages=(1, 3), windows=(0, 9, 0, 9))),
    "three windows, cp2": (state(cp=2, windows=(0, 9, 21, 9)), state(tp=3, windows=(0, 9, 21, 9))),
    "latent": (state(tp=2, heads=1, attention=LATENT), state(tp=1, heads=1, attention=LATENT, cp=2)),
}


@pytest.mark.parametrize("tokens", [Span(0, NUM_TOKENS), Span(7, 33)], ids=str)
@pytest.mark.parametrize(("prefill", "decode"), SHAPES.values(), ids=SHAPES)
def test_hand_over_between_shapes(prefill, decode, tokens):
    with pair(prefill, decode) as (p, d, _):
        hand_over(p, d, tokens)


@pytest.mark.parametrize(("from_group", "to_group"), [(0, 1), (1, 0), (1, 1)])
def test_a_request_lives_in_one_group_of_each_side(from_group, to_group):
    with pair(state(tp=4, groups=2), state(tp=2, groups=2, stages=(2, 2))) as (p, d, _):
        hand_over(p, d, Span(0, NUM_TOKENS), from_group, to_group)


def test_another_group_has_not_what_is_asked_for():
    """Negative control: the request was offered by group 0 alone."""
    config = replace(FAST, request_deadline_s=1.0)
    with pair(state(tp=2, groups=2), state(), config=config) as (p, d, _):
        transfer = p.offer(group=0)
        d.order(p, transfer, from_group=1)
        received = d.outcome(others=[p])
        assert not received.ok
        assert "deadline" in received.reason or "never_came" in received.reason
        p.withdraw()
        d.check_clean()


def drawn_pairs(start, stop):
    """Seeds of pairs that a handful of threads can play."""
    pairs = ((seed, random_pair(seed)) for seed in range(start, stop))
    return [
        seed
        for seed, drawn in pairs
        if drawn.tokens and max(drawn.sender.parallel.num_ranks, drawn.receiver.parallel.num_ranks) <= MAX_RANKS
    ]


def play(seed):
    drawn, hub = random_pair(seed), LoopbackHub()
    chunk_bytes = max(64, drawn.max_bytes) if drawn.max_bytes <= 1 << 14 else None
    config = replace(FAST, chunk_bytes=chunk_bytes, layers_per_chunk=drawn.most_layers)
    p, d = (
        make_side(hub, name, state, config, num_tokens=drawn.tokens.stop)
        for name, state in (("p", drawn.sender), ("d", drawn.receiver))
    )
    with sides(p, d):
        hand_over(p, d, drawn.tokens, drawn.sender_group, drawn.receiver_group, drawn.tokens.stop)


@pytest.mark.drawn
@pytest.mark.parametrize("seed", drawn_pairs(0, 200)[:NUM_DRAWN])
def test_drawn_pairs(seed):
    play(seed)


@pytest.mark.long
def test_many_drawn_pairs(record_property):
    first = 10_000 * (1 + int(os.environ.get("KVFERRY_SEED", "0")))
    seeds = drawn_pairs(first, first + 3000)
    record_property("pairs", len(seeds))
    for seed in seeds:
        play(seed)


def test_context_ranks_that_share_another_length_are_refused():
    """Which blocks a context rank holds depends on the length: both sides must mean the same."""
    with pair(state(cp=2), state()) as (p, d, _):
        transfer = p.offer()
        order = d.make_order(*p.door.address, transfer, tokens=Span(0, 16))
        d.ranks[0].receive(replace(order, tables=replace(order.tables, num_tokens=20)))
        received = d.outcome(others=[p])
        assert "context ranks share a sequence of another length: ours=40, theirs=20" in received.reason
        p.withdraw()
        d.check_clean()
        p.check_clean()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_block_that_a_window_left_behind_is_never_touched(side):
    """The load fails with the reason; a window that does not need the block is served."""
    windows = (0, 9, 0, 9)
    with pair(state(windows=windows), state(windows=windows)) as (p, d, _):
        full, window = (p if side == "prefill" else d).world.tables(0).by_group
        for missing, ok in ((range(7), True), (range(8), True), (range(9), False)):
            holes = tuple(HOLE if block in missing else place for block, place in enumerate(window))
            name, transfer = f"r{len(missing)}", p.offer(f"r{len(missing)}")
            tables = BlockTables(NUM_TOKENS, (full, holes))
            if side == "prefill":
                p.withdraw(name)
                p.step()
                transfer = _offer_with(p, f"h{len(missing)}", tables)
            order = d.make_order(*p.door.address, transfer, f"d{len(missing)}")
            d.ranks[0].receive(order if side == "prefill" else replace(order, tables=tables))
            received = d.outcome(f"d{len(missing)}", others=[p])
            assert received.ok == ok, received
            assert ok or "hole among these tokens" in received.reason


def _offer_with(p, name, tables):
    offer = replace(p.make_offer(name), tables=tables)
    p.door.open_offer(offer.transfer_id, offer.request_id, offer.prompt_key)
    p.ranks[0].offer(offer)
    return offer.transfer_id


def test_tables_that_do_not_fit_are_refused_at_once():
    with pair(state(windows=(0, 9, 0, 9)), state(cp=2)) as (p, d, _):
        offer = p.make_offer()
        with pytest.raises(ValueError, match="not one block table a layer group: .* tables=1, layer groups=2"):
            p.ranks[0].offer(replace(offer, tables=BlockTables(40, offer.tables.by_group[:1])))
        with pytest.raises(ValueError, match="tokens=40, blocks wanted=10, held=9"):
            p.ranks[0].offer(replace(offer, tables=BlockTables(40, tuple(t[:9] for t in offer.tables.by_group))))
        order = d.make_order(*p.door.address, offer.transfer_id)
        with pytest.raises(ValueError, match="tokens=40, blocks wanted=5, held=4"):
            d.ranks[1].receive(replace(order, tables=BlockTables(40, (order.tables.by_group[0][:4],))))
        with pytest.raises(ValueError, match=r"wanted=\[0, 41\), num_tokens=40"):
            d.ranks[1].receive(replace(order, tokens=Span(0, 41)))
        p.check_clean()
        d.check_clean()
