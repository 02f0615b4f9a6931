"""Each dimension in which two instances may differ, on its own: bytes equal, and as many as there must be."""

import msgspec
import pytest
import torch

from kv_core.ids import BlockId, Rank
from kv_core.spans import Span
from kv_testing.carrier import carry
from kv_testing.layouts import make_state
from kv_testing.tagged import FORMS, fill, make_world, misplaced
from kv_transfer.formatter.select import formatter_for
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout
from kv_transfer.plan.plan import chunks_of, receive_plans
from kv_transfer.plan.ranges import block_range
from kv_transfer.plan.side_pools import indexer_pool

ROW = 4 * 4 * 2 * 8 * 2
"""Bytes of one token: 4 layers, 4 heads, K and V, 8 elements of 2 bytes."""


def even(tp=1, stages=(4,), heads=4, **more):
    return ParallelLayout.even(tp, stages, heads, **more)


def worlds(sender, receiver, num_tokens, *, group=0):
    made = [
        make_world(state, num_tokens, FORMS[state.layout.order][0], seed)
        for seed, state in enumerate((sender, receiver))
    ]
    fill(made[0], Span(0, num_tokens), group)
    return made


@pytest.mark.parametrize(
    "cuts", [("contiguous", "contiguous"), ("round_robin", "contiguous"), ("contiguous", "round_robin")]
)
@pytest.mark.parametrize("ranks", [(1, 4), (4, 1), (2, 4), (3, 2)])
def test_context_ranks_of_any_number_dealt_either_way(cuts, ranks):
    states = [
        make_state(parallel=even(cp=cp, context_cut=cut), tokens_per_block=4)
        for cp, cut in zip(ranks, cuts, strict=True)
    ]
    sender, receiver = worlds(states[0], states[1], 27)
    assert carry(sender, receiver, Span(0, 27)) == 27 * ROW
    assert misplaced(receiver, Span(0, 27)) == 0


def test_a_context_rank_without_blocks_waits_for_nothing():
    receiver = make_state(parallel=even(cp=4), tokens_per_block=4)
    plans = [receive_plans(receiver, Rank(rank), make_state(tokens_per_block=4), Span(0, 3)) for rank in range(4)]
    assert [bool(found) for found in plans] == [True, False, False, False]


@pytest.mark.parametrize(("from_group", "to_group"), [(0, 0), (1, 2), (0, 1)])
def test_attention_data_parallelism_on_both_sides(from_group, to_group):
    sender, receiver = worlds(
        make_state(parallel=even(4, groups=2)), make_state(parallel=even(6, groups=3)), 20, group=from_group
    )
    assert carry(sender, receiver, Span(0, 20), from_group=from_group, to_group=to_group) == 20 * ROW
    assert misplaced(receiver, Span(0, 20), to_group) == 0


def latent(**changes):
    usual = {"attention": "latent", "num_planes": 1, "num_kv_heads": 1, "parallel": even(heads=1)}
    return make_state(**(usual | changes))


def test_a_latent_cache_is_sent_once_to_each_rank_that_holds_it():
    sender, receiver = worlds(latent(parallel=even(4, heads=1)), latent(parallel=even(2, (1, 3), heads=1, cp=2)), 40)
    assert carry(sender, receiver, Span(0, 40)) == 2 * 40 * 4 * 8 * 2
    assert misplaced(receiver, Span(0, 40)) == 0


def test_a_latent_cache_has_one_head():
    with pytest.raises(ValueError, match="a latent cache has one head: got=2, allowed=1"):
        latent(num_kv_heads=2, parallel=even(heads=2))


def test_the_indexer_pool_is_a_cache_of_its_own():
    states = [
        indexer_pool(latent(parallel=parallel), 256, 128) for parallel in (even(2, heads=1), even(1, (2, 2), heads=1))
    ]
    sender, receiver = worlds(states[0], states[1], 20)
    assert carry(sender, receiver, Span(0, 20)) == 20 * 4 * 264
    assert misplaced(receiver, Span(0, 20)) == 0


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (48, 32)])
@pytest.mark.parametrize("orders", [("head_major", "token_major"), ("token_major", "head_major")])
@pytest.mark.parametrize("tokens", [Span(0, 130), Span(37, 130), Span(64, 129)])
def test_other_block_sizes_and_orders_from_a_held_prefix_to_a_partial_block(sizes, orders, tokens):
    parallel = even(3), even(2, (1, 3))
    states = [
        make_state(tokens_per_block=size, layout=BlockLayout(order), parallel=cut)
        for size, order, cut in zip(sizes, orders, parallel, strict=True)
    ]
    sender, receiver = worlds(states[0], states[1], 130)
    assert carry(sender, receiver, tokens, max_bytes=5000) == len(tokens) * ROW
    assert misplaced(receiver, tokens) == 0


@pytest.mark.parametrize("windows", [(10, 0, 10, 0), (0, 0, 7, 3), (8, 16, 8, 0)])
@pytest.mark.parametrize("stages", [((2, 2), (1, 1, 2)), ((1, 3), (4,))])
def test_windowed_layers_take_what_the_next_token_sees(windows, stages):
    states = [make_state(windows=windows, parallel=even(2, cut), tokens_per_block=4) for cut in stages]
    sender, receiver = worlds(states[0], states[1], 23)
    # By whole blocks of 4.
    taken = sum(23 - max(0, 23 - window + 1) // 4 * 4 if window else 23 for window in windows)
    assert carry(sender, receiver, Span(0, 23)) == taken * ROW // 4
    assert misplaced(receiver, Span(0, 23)) == 0


def test_windows_are_one_for_each_layer():
    with pytest.raises(ValueError, match="for each layer: got=3, layers=4"):
        make_state(windows=(8, 8, 8))


@pytest.mark.parametrize(("wanted", "held"), [(Span(1, 2), 1), (Span(0, 1), 2)])
def test_a_latent_row_of_another_head_is_refused(wanted, held):
    """Before anything moves: a chunk of a head that no latent cache has, and caches of several."""
    state = latent()
    caches = make_world(state if held == 1 else make_state(num_planes=1, parallel=even(heads=4)), 20, "CBHTD", 1).caches
    (chunk,) = chunks_of(receive_plans(state, Rank(0), state, Span(0, 20))[0].pieces, Span(0, 20), state, 1 << 20)
    other = msgspec.structs.replace(chunk, piece=msgspec.structs.replace(chunk.piece, heads=wanted))
    blocks = block_range([BlockId(0), BlockId(1)], Span(0, 20), 16)
    dense = torch.zeros(chunk.num_bytes, dtype=torch.uint8)
    for move in (formatter_for(state).split, formatter_for(state).concat):
        with pytest.raises(ValueError, match="a latent row has one head"):
            move(other, caches[Rank(0)], blocks, dense)
