"""Split and concat of full attention: the worked bytes of transfer spec 6.9, opaque tiles, and what is refused."""

import pytest
import torch

from kv_core.ids import BlockId, Rank
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_testing.tagged import fill, make_world, misplaced
from kv_transfer.formatter.attention import AttentionFormatter
from kv_transfer.formatter.select import formatter_for
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout
from kv_transfer.plan.plan import Chunk, Piece, chunks_of, receive_plans
from kv_transfer.plan.ranges import block_range

TWO_TOKENS = Span(0, 2)


def tiny(tp, stages, heads=2, order="head_major"):
    """2 layers, 2 heads, 2 tokens a block, 1 byte a head: the model of the worked example."""
    return make_state(
        dtype="uint8",
        head_size=1,
        num_layers=2,
        num_kv_heads=heads,
        tokens_per_block=2,
        layout=BlockLayout(order),
        parallel=ParallelLayout.even(tp, stages, heads),
    )


def named(layer, kind, head, token):
    """The byte that stands for, say, k0h1t0."""
    return layer * 64 + kind * 32 + head * 8 + token


def spell(byte):
    layer, kind, head, token = byte // 64, byte // 32 % 2, byte // 8 % 4, byte % 8
    return f"{'kv'[kind]}{layer}h{head}t{token}"


def sent(sender, receiver, rank, tokens=TWO_TOKENS, spread=0):
    """{sending rank: names of the bytes it sends to `rank`, in order}."""
    world = make_world(sender, tokens.stop, "CBHTD" if sender.layout.order == "head_major" else "CBTHD", seed=3)
    write_names(world, tokens)
    slots = {}
    for plan in receive_plans(receiver, Rank(rank), sender, tokens, spread):
        (chunk,) = chunks_of(plan.pieces, plan.tokens, sender, 10_000)
        dense = torch.zeros(chunk.num_bytes, dtype=torch.uint8)
        blocks = block_range(world.table, chunk.tokens, sender.tokens_per_block)
        formatter_for(sender).split(chunk, world.caches[plan.sender], blocks, dense)
        slots[plan.sender] = " ".join(map(spell, dense.tolist()))
    return slots


def write_names(world, tokens):
    for caches in world.caches.values():
        for number, plane in enumerate(caches.planes):
            layer, kind = caches.first_layer + number // 2, number % 2
            for token in tokens:
                block, slot = world.table[token // 2], token % 2
                for head in caches.heads:
                    plane[block, slot, head - caches.first_head, 0] = named(layer, kind, head, token)


HEAD_0 = "k0h0t0 k0h0t1 v0h0t0 v0h0t1 k1h0t0 k1h0t1 v1h0t0 v1h0t1"
HEAD_1 = "k0h1t0 k0h1t1 v0h1t0 v0h1t1 k1h1t0 k1h1t1 v1h1t0 v1h1t1"
LAYER_0 = "k0h0t0 k0h0t1 k0h1t0 k0h1t1 v0h0t0 v0h0t1 v0h1t0 v0h1t1"
LAYER_1 = "k1h0t0 k1h0t1 k1h1t0 k1h1t1 v1h0t0 v1h0t1 v1h1t0 v1h1t1"

# (case, sender TP and stages, receiver TP and stages, receiving rank, what each sender sends it)
WORKED = [
    ("TP1 to TP2", (1, [2]), (2, [2]), 0, {0: HEAD_0}),
    ("TP1 to TP2", (1, [2]), (2, [2]), 1, {0: HEAD_1}),
    ("TP2 to TP1", (2, [2]), (1, [2]), 0, {0: HEAD_0, 1: HEAD_1}),
    ("PP2 to PP1", (1, [1, 1]), (1, [2]), 0, {0: LAYER_0, 1: LAYER_1}),
    ("PP1 to PP2", (1, [2]), (1, [1, 1]), 0, {0: LAYER_0}),
    ("PP1 to PP2", (1, [2]), (1, [1, 1]), 1, {0: LAYER_1}),
    ("TP1 to TP4, 2 heads", (1, [2]), (4, [2]), 1, {0: HEAD_0}),
    ("TP1 to TP4, 2 heads", (1, [2]), (4, [2]), 2, {0: HEAD_1}),
    ("TP4 to TP1, 2 heads", (4, [2]), (1, [2]), 0, {0: HEAD_0, 2: HEAD_1}),
    ("TP1 to TP2 PP2", (1, [2]), (2, [1, 1]), 0, {0: "k0h0t0 k0h0t1 v0h0t0 v0h0t1"}),
    ("TP1 to TP2 PP2", (1, [2]), (2, [1, 1]), 2, {0: "k1h0t0 k1h0t1 v1h0t0 v1h0t1"}),
    ("TP1 to TP2 PP2", (1, [2]), (2, [1, 1]), 3, {0: "k1h1t0 k1h1t1 v1h1t0 v1h1t1"}),
]


@pytest.mark.parametrize("row", WORKED, ids=lambda row: row[0])
def test_the_worked_bytes(row):
    _, sender, receiver, rank, expected = row
    assert sent(tiny(*sender), tiny(*receiver), rank) == expected


def test_tokens_of_several_blocks_lie_side_by_side():
    """The spec repeats its row per block; here a chunk's tokens are one axis, so that block sizes may differ."""
    found = sent(tiny(1, [2]), tiny(2, [2]), 0, Span(1, 4))
    assert found == {0: "k0h0t1 k0h0t2 k0h0t3 v0h0t1 v0h0t2 v0h0t3 k1h0t1 k1h0t2 k1h0t3 v1h0t1 v1h0t2 v1h0t3"}


def test_the_wire_has_the_senders_order():
    expected = {0: "k0h0t0 k0h1t0 k0h0t1 k0h1t1 v0h0t0 v0h1t0 v0h0t1 v0h1t1"}
    assert sent(tiny(1, [1, 1], order="token_major"), tiny(1, [1, 1]), 0) == expected


def opaque(tpb=4):
    return make_state(tokens_per_block=tpb, layout=BlockLayout("head_major", "amx"), dtype="float32")


def test_opaque_tiles_are_copied_whole():
    sender, receiver = make_world(opaque(), 12, "split BHD", 1), make_world(opaque(), 12, "split BHD", 2)
    fill(sender, Span(0, 12))
    for rank in receiver.caches:
        for plan in receive_plans(receiver.state, rank, sender.state, Span(5, 12)):
            for chunk in chunks_of(plan.pieces, plan.tokens, sender.state, 10_000):
                move(chunk, sender, plan.sender, receiver, rank)
    assert misplaced(receiver, Span(4, 12)) == 0


def move(chunk, sender, sending_rank, receiver, rank):
    dense = torch.zeros(chunk.num_bytes, dtype=torch.uint8)
    formatter = formatter_for(sender.state)
    formatter.split(chunk, sender.caches[sending_rank], block_range(sender.table, chunk.tokens, 4), dense)
    formatter.concat(chunk, receiver.caches[rank], block_range(receiver.table, chunk.tokens, 4), dense)


def test_half_an_opaque_tile_is_refused():
    world = make_world(opaque(), 8, "split BHD", 1)
    chunk = Chunk(0, Piece(Span(0, 1), Span(0, 1)), Span(2, 8), 2 * 6 * 8 * 4)
    with pytest.raises(ValueError, match=r"tiles move only whole: tokens=\[2, 8\), tokens per block=4"):
        formatter_for(world.state).split(chunk, world.caches[Rank(0)], block_range(world.table, chunk.tokens, 4), EMPTY)


EMPTY = torch.zeros(0, dtype=torch.uint8)


def usual_world():
    return make_world(make_state(), 32, "CBHTD", 1)


def split(world, piece, tokens, num_bytes, dense_bytes):
    chunk = Chunk(0, piece, tokens, num_bytes)
    blocks = block_range(world.table, Span(0, 32), 16)
    dense = torch.zeros(dense_bytes, dtype=torch.uint8)
    return formatter_for(world.state).split(chunk, world.caches[Rank(0)], blocks, dense)


@pytest.mark.parametrize(
    ("piece", "tokens", "sizes", "words"),
    [
        (Piece(Span(1, 3), Span(0, 2)), Span(0, 4), (512, 512), r"layers are not held: wanted=\[1, 3\), held=\[0, 2\)"),
        (Piece(Span(0, 1), Span(1, 3)), Span(0, 4), (256, 256), r"heads are not held: wanted=\[1, 3\), held=\[0, 2\)"),
        (Piece(Span(0, 1), Span(0, 2)), Span(30, 34), (256, 256), r"wanted=\[1, 3\), held=\[0, 2\)"),
        (Piece(Span(0, 1), Span(0, 2)), Span(0, 4), (256, 128), "array=128, chunk=256, blocks=256"),
        (Piece(Span(0, 1), Span(0, 2)), Span(0, 4), (128, 128), "array=128, chunk=128, blocks=256"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(piece, tokens, sizes, words):
    with pytest.raises(ValueError, match=words):
        split(usual_world(), piece, tokens, *sizes)


def test_a_block_id_beyond_the_cache_is_refused():
    world = usual_world()
    chunk = Chunk(0, Piece(Span(0, 1), Span(0, 2)), Span(0, 4), 256)
    foreign, src = block_range([BlockId(77)], Span(0, 4), 16), torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"block id out of bounds: got=77..77, held=\[0, 4\)"):
        formatter_for(world.state).concat(chunk, world.caches[Rank(0)], foreign, src)


def test_one_copy_serves_k_and_v_if_their_strides_agree():
    """And the route is told: 4 tokens of 2 heads of K and V of one layer."""
    piece = Piece(Span(0, 1), Span(0, 2))
    assert split(usual_world(), piece, Span(0, 4), 256, 256) == (("reference", 2),)
    transposed = make_world(make_state(), 32, "BH(CDT) BH(CTD)", 1)
    assert split(transposed, piece, Span(0, 4), 256, 256) == (("reference", 2),) * 2


def test_only_known_attention_is_served():
    assert formatter_for(make_state()) == AttentionFormatter("head_major")
    with pytest.raises(ValueError, match="no formatter for this attention: got='linear', known='full', 'latent'"):
        formatter_for(make_state(attention="linear"))
