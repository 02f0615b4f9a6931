"""What a cache state holds, and that nothing false can be made of the bytes of a card."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_testing.strategies import layout_pairs, parallel_pairs
from kv_transfer.plan.cache_state import MAX_RANKS, BlockLayout, CacheState, ParallelLayout, Share


def test_ranks_count_tensor_ranks_first():
    layout = ParallelLayout.even(2, [3, 0, 1], 4)
    assert layout.ranks == (0, 1, 2, 3, 4, 5)
    assert layout.share_of(Rank(1)) == Share(Rank(1), Span(0, 3), Span(2, 4))
    assert layout.share_of(Rank(2)) == Share(Rank(2), Span(3, 3), Span(0, 2))
    assert layout.share_of(Rank(5)) == Share(Rank(5), Span(3, 4), Span(2, 4))


@pytest.mark.parametrize(
    ("tp", "heads", "starts", "stops"),
    [
        (1, 4, [0], [4]),
        (2, 4, [0, 2], [2, 4]),
        (4, 2, [0, 0, 1, 1], [1, 1, 2, 2]),
        (8, 2, [0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2]),
        (3, 8, [0, 2, 5], [2, 5, 8]),
        (3, 2, [0, 0, 1], [1, 1, 2]),
        (8, 1, [0] * 8, [1] * 8),
    ],
)
def test_even_cuts(tp, heads, starts, stops):
    assert ParallelLayout.even(tp, [1], heads).heads == tuple(map(Span, starts, stops))


@given(st.integers(1, 32), st.integers(1, 32))
def test_an_even_cut_covers_every_head_and_differs_by_one_at_most(tp, heads):
    spans = ParallelLayout.even(tp, [1], heads).heads
    assert {head for span in spans for head in span} == set(range(heads))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


def test_bytes():
    assert make_state().bytes_per_token_head == 16
    assert make_state(dtype="float32").bytes_per_token_head == 32
    assert make_state().tokens_per_unit == 1
    assert make_state(layout=BlockLayout("head_major", "amx")).tokens_per_unit == 16


@given(layout_pairs())
def test_a_state_survives_the_wire(pair):
    packed = msgspec.msgpack.encode(pair.sender)
    assert msgspec.msgpack.decode(packed, type=CacheState) == pair.sender


FALSE = [
    ("head_size", 0, "head_size out of bounds: got=0"),
    ("head_size", 1 << 40, "head_size out of bounds: got=1099511627776, allowed=1..65536"),
    ("num_planes", 9, "num_planes out of bounds: got=9, allowed=1..8"),
    ("tokens_per_block", -1, "tokens_per_block out of bounds: got=-1"),
    ("num_layers", 5, "num_layers contradicts the parallel layout: stated=5, laid out=4"),
    ("num_kv_heads", 3, "num_kv_heads contradicts the parallel layout: stated=3, laid out=4"),
    ("dtype", "float17", "unknown dtype: got='float17'"),
    ("fingerprint", "", "fingerprint is empty or too long: characters=0"),
    ("attention", "x" * 300, "attention is empty or too long: characters=300, most=256"),
    ("layout", {"order": "sideways"}, "Invalid enum value 'sideways'"),
    ("layout", {"order": "head_major", "tile": ""}, "tile is empty or too long"),
    ("parallel", {"layers": [], "heads": []}, "an instance has no rank: stages=0, tensor ranks=0"),
    (
        "parallel",
        {"layers": [{"start": 0, "stop": 0}], "heads": [{"start": 0, "stop": 4}]},
        "layers out of bounds: got=0",
    ),
    (
        "parallel",
        {"layers": [{"start": 0, "stop": 2}, {"start": 3, "stop": 4}], "heads": [{"start": 0, "stop": 4}]},
        "stages leave a gap or overlap: stage=1, start=3, expected=2",
    ),
    (
        "parallel",
        {"layers": [{"start": 0, "stop": 3}, {"start": 2, "stop": 4}], "heads": [{"start": 0, "stop": 4}]},
        "stages leave a gap or overlap: stage=1, start=2, expected=3",
    ),
    (
        "parallel",
        {"layers": [{"start": 0, "stop": 4}], "heads": [{"start": 0, "stop": 1}, {"start": 2, "stop": 4}]},
        "no tensor rank holds some heads: held up to=1, next held=2",
    ),
    (
        "parallel",
        {"layers": [{"start": 0, "stop": 4}], "heads": [{"start": 0, "stop": 4}, {"start": 2, "stop": 2}]},
        "heads are empty or out of bounds",
    ),
    (
        "parallel",
        {"layers": [{"start": 0, "stop": 4}], "heads": [{"start": 0, "stop": 1 << 62}]},
        "heads are empty or out of bounds",
    ),
    (
        "parallel",
        {"layers": [{"start": 0, "stop": 1 << 62}], "heads": [{"start": 0, "stop": 4}]},
        "number of layers out of bounds",
    ),
    ("parallel", {"layers": [{"start": 4, "stop": 0}], "heads": [{"start": 0, "stop": 4}]}, "ends before it starts"),
    (
        "parallel",
        {"layers": [{"start": 0, "stop": 4}], "heads": [{"start": 0, "stop": 4}] * (MAX_RANKS + 1)},
        "too many",
    ),
    ("surplus", 1, "unknown field `surplus`"),
]


@pytest.mark.parametrize(("field", "value", "words"), FALSE)
def test_false_bytes_are_refused_with_both_values(field, value, words):
    card = msgspec.to_builtins(make_state()) | {field: value}
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.msgpack.decode(msgspec.msgpack.encode(card), type=CacheState)
    assert words in str(refusal.value)


@pytest.mark.parametrize("rank", [-1, 4])
def test_no_such_rank(rank):
    with pytest.raises(ValueError, match=f"no such rank: got={rank}, ranks=4"):
        make_state().share_of(Rank(rank))


@given(parallel_pairs())
def test_the_shares_of_all_ranks_cover_the_model(pair):
    for layout in pair:
        shares = [layout.share_of(rank) for rank in layout.ranks]
        held = {(layer, head) for share in shares for layer in share.layers for head in share.heads}
        assert held == {(layer, head) for layer in range(layout.num_layers) for head in range(layout.num_kv_heads)}
