"""The worked bytes of transfer spec 6.9 for latent caches: one plane, stages and context ranks.

The spec writes a slot block by block, [layer][token] in each; here a chunk has one token axis for all its blocks.
"""

import pytest
import torch

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_testing.tagged import make_world
from kv_transfer.formatter.select import formatter_for
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout
from kv_transfer.plan.plan import chunks_of, receive_plans
from kv_transfer.plan.ranges import block_range


def tiny(stages=(2,), cp=1):
    """2 layers, 2 tokens a block, 1 byte a token."""
    return make_state(
        attention="latent",
        dtype="uint8",
        head_size=1,
        num_planes=1,
        num_layers=2,
        num_kv_heads=1,
        tokens_per_block=2,
        layout=BlockLayout("head_major"),
        parallel=ParallelLayout.even(1, stages, 1, cp=cp),
    )


def sent(receiver, num_tokens):
    """{receiving rank: names of the bytes that the one sender gives it, in order}."""
    sender = tiny()
    world = make_world(sender, num_tokens, "CBHTD", seed=3)
    for layer, plane in enumerate(world.caches[Rank(0)].planes):
        for token in range(num_tokens):
            plane[world.table[token // 2], token % 2, 0, 0] = 16 * layer + token
    slots = {}
    for rank in receiver.parallel.ranks:
        (plan,) = receive_plans(receiver, rank, sender, Span(0, num_tokens))
        (chunk,) = chunks_of(plan.pieces, plan.tokens, sender, 10_000)
        dense = torch.zeros(chunk.num_bytes, dtype=torch.uint8)
        blocks = block_range(world.table, chunk.tokens, 2)
        formatter_for(sender).split(chunk, world.caches[plan.sender], blocks, dense)
        slots[rank] = " ".join(f"k{byte // 16}t{byte % 16}" for byte in dense.tolist())
    return slots


WORKED = [
    ("PP1 to PP2", tiny((1, 1)), 2, {0: "k0t0 k0t1", 1: "k1t0 k1t1"}),
    ("CP1 to CP2, 3 blocks", tiny(cp=2), 6, {0: "k0t0 k0t1 k0t2 k0t3 k1t0 k1t1 k1t2 k1t3", 1: "k0t4 k0t5 k1t4 k1t5"}),
    (
        "PP2 CP2, 3 blocks",
        tiny((1, 1), cp=2),
        6,
        {0: "k0t0 k0t1 k0t2 k0t3", 2: "k1t0 k1t1 k1t2 k1t3", 1: "k0t4 k0t5", 3: "k1t4 k1t5"},
    ),
]


@pytest.mark.parametrize("row", WORKED, ids=lambda row: row[0])
def test_the_worked_bytes(row):
    _, receiver, num_tokens, expected = row
    assert sent(receiver, num_tokens) == expected
