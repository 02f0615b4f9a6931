"""Plans and chunks: cover everything once, stay within bounds, are the same on both sides."""

import msgspec
import pytest
from hypothesis import assume, given

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_testing.strategies import layout_pairs
from kv_testing.tagged import moves
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout
from kv_transfer.plan.plan import Chunk, Piece, SessionPlan, chunks_of, receive_plans, send_plans, widened


def state(tpb=4, tile="plain", layers=6, heads=2, parallel=None):
    return make_state(
        dtype="uint8",
        head_size=5,
        num_layers=layers,
        num_kv_heads=heads,
        tokens_per_block=tpb,
        layout=BlockLayout("head_major", tile),
        parallel=parallel or ParallelLayout.even(1, [layers], heads),
    )


@given(layout_pairs())
def test_chunks_stay_within_bounds_and_add_up_to_their_plan(pair):
    for rank in pair.receiver.parallel.ranks:
        for plan in receive_plans(pair.receiver, rank, pair.sender, pair.tokens):
            chunks = chunks_of(plan.pieces, plan.tokens, pair.sender, pair.max_bytes, pair.most_layers)
            assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
            assert all(0 < chunk.num_bytes <= pair.max_bytes for chunk in chunks)
            assert sum(chunk.num_bytes for chunk in chunks) == plan.num_bytes
            assert all(chunk.num_bytes == size_of(chunk, pair.sender) for chunk in chunks)


def size_of(chunk, sender):
    cells = len(chunk.piece.layers) * len(chunk.piece.heads) * len(chunk.tokens)
    return cells * sender.num_planes * sender.bytes_per_token_head


@given(layout_pairs())
def test_chunks_hold_every_part_of_their_pieces_once(pair):
    moved = widened(pair.tokens, pair.sender)
    for rank in pair.receiver.parallel.ranks:
        for plan in receive_plans(pair.receiver, rank, pair.sender, pair.tokens):
            whole = [Chunk(0, piece, widened(piece.tokens or moved, pair.sender), 0) for piece in plan.pieces]
            cut = chunks_of(plan.pieces, plan.tokens, pair.sender, pair.max_bytes, pair.most_layers)
            assert (moves(pair.sender, cut, moved.stop) == moves(pair.sender, whole, moved.stop)).all()


@given(layout_pairs())
def test_sender_and_receiver_make_the_same_plans(pair):
    received = [
        plan
        for rank in pair.receiver.parallel.ranks_of(pair.receiver_group)
        for plan in receive_plans(pair.receiver, rank, pair.sender, pair.tokens, 3, group=pair.sender_group)
    ]
    groups = {"group": pair.sender_group, "peer_group": pair.receiver_group}
    sent = [
        plan
        for rank in pair.sender.parallel.ranks
        for plan in send_plans(pair.sender, rank, pair.receiver, pair.tokens, 3, **groups)
    ]
    assert sorted(sent, key=lambda plan: (plan.receiver, plan.sender)) == received
    assert len({(plan.receiver, plan.sender) for plan in received}) == len(received)


@given(layout_pairs())
def test_a_plan_survives_the_wire(pair):
    assume(pair.tokens)
    for plan in receive_plans(pair.receiver, pair.receiver.parallel.ranks[-1], pair.sender, pair.tokens):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=SessionPlan) == plan


def test_no_tokens_are_no_plans():
    assert receive_plans(state(), Rank(0), state(), Span(7, 7)) == ()
    assert send_plans(state(), Rank(0), state(), Span(7, 7)) == ()


def test_a_stage_without_layers_has_no_plans():
    ours = state(parallel=ParallelLayout.even(1, [6, 0], 2))
    assert receive_plans(ours, Rank(1), state(), Span(0, 7)) == ()


def test_two_rectangles_of_one_sender_are_one_plan():
    """Heads [0, 2) and [4, 6) are chosen from rank 0, with [2, 4) from rank 1 between them."""
    peer = state(heads=6, parallel=ParallelLayout((Span(0, 6),), (Span(0, 6), Span(2, 4))))
    ours = state(heads=6)
    first, second = receive_plans(ours, Rank(0), peer, Span(0, 4), spread=1)
    assert first.pieces == (Piece(Span(0, 6), Span(0, 2)), Piece(Span(0, 6), Span(4, 6)))
    assert second.pieces == (Piece(Span(0, 6), Span(2, 4)),)


# One token of one layer is 2 heads x 2 planes x 5 bytes = 20 bytes; a block of 4 tokens of 6 layers is 480.
CUTS = [
    # max_bytes, tokens, (layers, tokens) of each chunk
    (10_000, (3, 14), [("0-6", "3-14")]),
    (960, (3, 14), [("0-6", "3-8"), ("0-6", "8-14")]),
    (959, (3, 14), [("0-6", "3-4"), ("0-6", "4-8"), ("0-6", "8-12"), ("0-6", "12-14")]),
    (400, (2, 6), [("0-5", "2-4"), ("5-6", "2-4"), ("0-5", "4-6"), ("5-6", "4-6")]),
    (79, (2, 6), [(f"{layer}-{layer + 1}", part) for part in ("2-3", "3-6") for layer in range(6)]),
]


@pytest.mark.parametrize(("max_bytes", "tokens", "expected"), CUTS)
def test_tokens_are_cut_first_at_block_boundaries(max_bytes, tokens, expected):
    chunks = chunks_of([Piece(Span(0, 6), Span(0, 2))], Span(*tokens), state(), max_bytes)
    assert [(text(chunk.piece.layers), text(chunk.tokens)) for chunk in chunks] == expected


BY_LAYERS = [
    # max_bytes, tokens, most layers, (layers, tokens) of each chunk
    (10_000, (3, 14), 6, [("0-6", "3-14")]),
    (10_000, (3, 14), 4, [("0-4", "3-14"), ("4-6", "3-14")]),
    (960, (3, 14), 3, [("0-3", "3-8"), ("3-6", "3-8"), ("0-3", "8-14"), ("3-6", "8-14")]),
    (400, (2, 6), 2, [(layers, part) for part in ("2-4", "4-6") for layers in ("0-2", "2-4", "4-6")]),
    (79, (2, 6), 2, [(f"{layer}-{layer + 1}", part) for part in ("2-3", "3-6") for layer in range(6)]),
]


@pytest.mark.parametrize(("max_bytes", "tokens", "most_layers", "expected"), BY_LAYERS)
def test_layers_are_cut_within_the_tokens_of_a_whole_chunk(max_bytes, tokens, most_layers, expected):
    """So a chunk of few layers waits for no more tokens than one of all layers does."""
    chunks = chunks_of([Piece(Span(0, 6), Span(0, 2))], Span(*tokens), state(), max_bytes, most_layers)
    assert [(text(chunk.piece.layers), text(chunk.tokens)) for chunk in chunks] == expected


@given(layout_pairs())
def test_chunks_are_in_the_order_in_which_they_are_computed(pair):
    """Whatever the pieces: by their last tokens, and of the same ones by layers."""
    for rank in pair.receiver.parallel.ranks:
        for plan in receive_plans(pair.receiver, rank, pair.sender, pair.tokens):
            chunks = chunks_of(plan.pieces, plan.tokens, pair.sender, pair.max_bytes, pair.most_layers)
            places = [(chunk.tokens.stop, chunk.piece.layers.start) for chunk in chunks]
            assert places == sorted(places)
            most = pair.most_layers or pair.sender.num_layers
            assert all(len(chunk.piece.layers) <= most for chunk in chunks)


def text(span):
    return f"{span.start}-{span.stop}"


def test_opaque_tiles_move_in_whole_blocks():
    chunks = chunks_of([Piece(Span(0, 6), Span(0, 2))], Span(3, 9), state(tile="amx"), 480)
    assert [text(chunk.tokens) for chunk in chunks] == ["0-4", "4-8", "8-12"]
    assert widened(Span(3, 9), state(tile="amx")) == Span(0, 12)
    assert widened(Span(3, 3), state(tile="amx")) == Span(3, 3)


@pytest.mark.parametrize(
    ("tile", "max_bytes", "unit"), [("plain", 19, 20), ("amx", 79, 80), ("plain", 0, 20), ("plain", -5, 20)]
)
def test_a_unit_that_does_not_fit_is_an_error_with_both_sizes(tile, max_bytes, unit):
    with pytest.raises(ValueError, match=f"unit={unit} bytes, max_bytes={max_bytes}"):
        chunks_of([Piece(Span(0, 6), Span(0, 2))], Span(3, 9), state(tile=tile), max_bytes)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (Piece, {"layers": (0, 0), "heads": (0, 1)}, "layers are empty"),
        (Piece, {"layers": (-1, 1), "heads": (0, 1)}, "layers are empty or out of bounds"),
        (Piece, {"layers": (0, 1), "heads": (0, 1 << 60)}, "heads are empty or out of bounds"),
        (Chunk, {"seq": 0, "piece": None, "tokens": (0, 1 << 60), "num_bytes": 0}, "tokens are empty or out of bounds"),
    ],
)
def test_false_bytes_are_refused(kind, fields, words):
    card = {name: {"start": v[0], "stop": v[1]} if isinstance(v, tuple) else v for name, v in fields.items()}
    if "piece" in card:
        card["piece"] = {"layers": {"start": 0, "stop": 1}, "heads": {"start": 0, "stop": 1}}
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.msgpack.decode(msgspec.msgpack.encode(card), type=kind)
