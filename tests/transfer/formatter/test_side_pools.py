"""Block scales and index keys beside quantised keys and values: each element moves once, in whatever shapes."""

from dataclasses import replace
from random import Random

import msgspec
import pytest
import torch

from kv_core.config import WindowConfig
from kv_core.ids import LayerId
from kv_core.layout import IndexSpec, PoolKind, cache_pools
from kv_core.spans import Span
from kv_core.spec import CacheSpec, LayerSpec
from kv_testing.carrier import carry, chunks_between
from kv_testing.layouts import make_state, random_pair
from kv_testing.tagged import draw_form, fill, make_world, misplaced, moves, wanted
from kv_transfer.block_pools import BlockPools
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout
from kv_transfer.plan.compatibility import reasons
from kv_transfer.plan.plan import chunks_of, receive_plans, widened
from kv_transfer.plan.side_pools import indexer_pool, scale_pool
from kv_transfer.pools import PagedCaches

TOKENS = Span(5, 30)
HEAD_BYTES = 16
"""32 values of 4 bits, with two scales."""


def packed(**changes):
    """Keys and values of 4 bits, 32 a head."""
    return make_state(**({"dtype": "uint8", "head_size": HEAD_BYTES, "tokens_per_block": 8} | changes))


def parts(receiver, rank, sender, tokens=TOKENS):
    return [(plan.sender, plan.pieces) for plan in receive_plans(receiver, rank, sender, tokens)]


def test_scales_have_the_sizes_of_their_formats():
    """The pools of kv_core say the same of a rank's share."""
    nvfp4 = scale_pool(packed())
    assert (nvfp4.dtype, nvfp4.head_size, nvfp4.num_planes, nvfp4.num_kv_heads) == ("float8_e4m3fn", 2, 2, 4)
    mxfp8 = scale_pool(make_state(dtype="float8_e4m3fn", head_size=128, scales=()), 32, packed=1, dtype="uint8")
    assert (mxfp8.dtype, mxfp8.head_size) == ("uint8", 4)
    spec = CacheSpec.uniform(num_layers=2, num_heads=2, head_size=32, dtype="uint8", tokens_per_block=8)
    pools = {pool.kind: pool for pool in cache_pools(spec, fp4=True)}
    for state, kind in ((packed(), PoolKind.KV), (nvfp4, PoolKind.BLOCK_SCALE)):
        assert (pools[kind].head_size, pools[kind].dtype) == (state.head_size, state.dtype)


@pytest.mark.parametrize(("per_scale", "packing"), [(12, 2), (0, 2), (16, 0), (64, 2)])
def test_heads_that_do_not_divide_are_refused(per_scale, packing):
    with pytest.raises(ValueError, match="a head does not divide into scales"):
        scale_pool(packed(), per_scale, packed=packing)


def test_scales_are_never_exchanged_with_anything_else():
    """A cache may by chance have the shape of another one's scales."""
    scales = scale_pool(packed(convert_elements=True))
    alike = msgspec.structs.replace(scales, attention="full")
    assert [reason.field for reason in reasons(scales, alike)] == ["attention"]
    assert (scales.scales, scales.convert_elements) == ((), False)
    assert reasons(scale_pool(packed()), scale_pool(packed(tokens_per_block=4))) == ()


@pytest.mark.parametrize("windows", [(), (9, 0, 17, 0)])
@pytest.mark.parametrize("orders", [("head_major", "token_major"), ("token_major", "token_major")])
@pytest.mark.parametrize("cuts", [((1, (4,)), (3, (1, 3))), ((4, (2, 2)), (2, (4,))), ((3, (3, 1)), (2, (2, 2)))])
def test_scales_travel_with_what_they_scale(windows, orders, cuts):
    sender, receiver = (
        packed(
            windows=windows,
            layout=BlockLayout(order),
            tokens_per_block=size,
            parallel=ParallelLayout.even(cut[0], cut[1], 4),
        )
        for order, size, cut in zip(orders, (8, 4), cuts, strict=True)
    )
    worlds = [make_world(scale_pool(state), 30, "split BTHD", seed) for seed, state in enumerate((sender, receiver))]
    fill(worlds[0], Span(0, 30))
    for rank in receiver.parallel.ranks:
        assert parts(scale_pool(receiver), rank, scale_pool(sender)) == parts(receiver, rank, sender)
    of_values = sum(
        plan.num_bytes for rank in receiver.parallel.ranks for plan in receive_plans(receiver, rank, sender, TOKENS)
    )
    assert carry(worlds[0], worlds[1], TOKENS, 64) == of_values * 2 // HEAD_BYTES
    assert misplaced(worlds[1], TOKENS) == 0


PLAIN_SEEDS = [seed for seed in range(150) if random_pair(seed).sender.layout.is_plain]


def beside(state, kind):
    """Scales of 4-bit values, or keys of an index, beside a cache of 16 bytes a head."""
    values = msgspec.structs.replace(state, dtype="uint8", head_size=HEAD_BYTES, scales=(), convert_elements=False)
    return scale_pool(values) if kind == "scales" else indexer_pool(values, 3, 1)


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["scales", "index"])
@pytest.mark.parametrize("first", range(0, len(PLAIN_SEEDS), 40))
def test_every_element_of_a_drawn_pair_moves_once(first, kind):
    for seed in PLAIN_SEEDS[first : first + 40]:
        drawn = random_pair(seed)
        pair = replace(drawn, sender=beside(drawn.sender, kind), receiver=beside(drawn.receiver, kind))
        tokens = widened(pair.tokens, pair.sender)
        assert once(pair, tokens), f"seed={seed}"
        sender, receiver = (
            make_world(state, tokens.stop, draw_form(Random(seed).randint, state), seed)
            for state in (pair.sender, pair.receiver)
        )
        fill(sender, Span(0, tokens.stop), pair.sender_group)
        groups = {"from_group": pair.sender_group, "to_group": pair.receiver_group}
        for dense, concat in chunks_between(sender, receiver, tokens, 1 << 20, seed, **groups):
            concat(dense)
        assert misplaced(receiver, tokens, pair.receiver_group) == 0, f"seed={seed}"


def once(pair, tokens):
    """Whether the chunks for each receiving rank hold each of its elements exactly once."""
    for rank in pair.receiver.parallel.ranks_of(pair.receiver_group):
        plans = receive_plans(pair.receiver, rank, pair.sender, tokens, group=pair.sender_group)
        chunks = [chunk for plan in plans for chunk in chunks_of(plan.pieces, plan.tokens, pair.sender, 1 << 20)]
        held = moves(pair.receiver, chunks, tokens.stop + 1)
        if not (held == wanted(pair.receiver, rank, tokens, tokens.stop)).all():
            return False
    return True


KINDS = {PoolKind.KV: lambda state: state, PoolKind.BLOCK_SCALE: scale_pool,
         PoolKind.INDEXER: lambda state: indexer_pool(state, 16, 8)}  # fmt: skip


def block_pools(share):
    """One rank's memory for its share of a model with 4-bit elements and an index."""
    layers = tuple(LayerSpec(len(share.heads), 32, 2, "uint8") for _ in share.layers)
    pools = cache_pools(CacheSpec(layers, 8), fp4=True, index=IndexSpec(16, 8))
    return BlockPools(pools, (WindowConfig(64, 6),), device=torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_pools_of_our_own_blocks_are_served(kind):
    """The planes of kv_core's blocks, of every kind, are caches that formatters read and write."""
    sender = packed(parallel=ParallelLayout.even(1, (4,), 4))
    receiver = packed(parallel=ParallelLayout.even(2, (1, 3), 4))
    worlds = []
    for seed, state in enumerate((sender, receiver)):
        state_of_kind = KINDS[kind](state)
        world = make_world(state_of_kind, 30, "split BHTD", seed)
        caches = {}
        for rank in state.parallel.ranks:
            share, pools = state.share_of(rank), block_pools(state.share_of(rank))
            planes = [pools.planes(LayerId(layer), kind) for layer in range(len(share.layers))]
            caches[rank] = PagedCaches.of_layers(state_of_kind.share_of(rank), planes, 8)
            caches[rank].check(state_of_kind, state_of_kind.share_of(rank))
            for plane in caches[rank].planes:
                plane.view(torch.uint8).fill_(0xEE)
        worlds.append(replace(world, caches=caches))
    fill(worlds[0], Span(0, 30))
    assert misplaced(worlds[1], TOKENS) > 0, "nothing has arrived"
    carry(worlds[0], worlds[1], TOKENS)
    assert misplaced(worlds[1], TOKENS) == 0
