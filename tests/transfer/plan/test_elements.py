"""Elements of two types or scales: exchanged only where both ask for it, and codes only with their scale."""

import itertools

import msgspec
import pytest

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_transfer.plan.cache_state import BlockLayout, CacheState
from kv_transfer.plan.compatibility import is_converted, reasons
from kv_transfer.plan.side_pools import indexer_pool

WIDE = ("float32", "float16", "bfloat16")
CODES = ("float8_e4m3fn", "float8_e5m2")
E4M3 = {"dtype": "float8_e4m3fn", "scales": (0.5,)}


def asking(**fields):
    return make_state(convert_elements=True, **fields)


def words(ours, theirs):
    return [str(reason) for reason in reasons(ours, theirs)]


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.permutations((*WIDE, *CODES), 2)))
def test_types_may_differ_where_both_ask(ours, theirs):
    pair = [asking(dtype=dtype, scales=(0.5,) if dtype in CODES else ()) for dtype in (ours, theirs)]
    assert reasons(*pair) == ()
    assert is_converted(*pair)


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product((False, True), repeat=2)))
def test_both_must_ask(ours, theirs):
    found = words(
        make_state(dtype="float16", convert_elements=ours), make_state(dtype="float32", convert_elements=theirs)
    )
    if ours and theirs:
        assert found == []
        return
    expected = ["dtype differs: ours=float16, theirs=float32"]
    if ours != theirs:
        expected.append(f"convert_elements differs: ours={ours}, theirs={theirs}")
    assert found == expected


@pytest.mark.parametrize("ask", list(itertools.product((False, True), repeat=2)))
def test_asking_changes_nothing_for_equal_elements(ask):
    pair = [make_state(convert_elements=each, **E4M3) for each in ask]
    assert reasons(*pair) == ()
    assert not is_converted(*pair)


def test_equal_codes_of_other_scales_are_other_elements():
    other = E4M3 | {"scales": (0.25, 0.125)}
    assert words(make_state(**E4M3), make_state(**other)) == ["scales differs: ours=0.5, theirs=0.25, 0.125"]
    assert reasons(asking(**E4M3), asking(**other)) == ()
    assert is_converted(asking(**E4M3), asking(**other))


EACH = tuple(0.25 * number for number in range(1, 9))
"""A scale for each plane of each of the 4 layers."""


@pytest.mark.parametrize(
    ("place", "words_of_both"),
    [
        (0, "scales of layer 0 differs: ours=0.25, 0.5, theirs=9, 0.5"),
        (5, "scales of layer 2 differs: ours=1.25, 1.5, theirs=1.25, 9"),
    ],
)
def test_of_scales_of_layers_the_first_that_differ_are_told(place, words_of_both):
    other = (*EACH[:place], 9.0, *EACH[place + 1 : -1], 7.0)
    ours, theirs = (E4M3 | {"scales": scales} for scales in (EACH, other))
    assert words(make_state(**ours), make_state(**theirs)) == [words_of_both]
    assert words(make_state(**ours), make_state(dtype="float8_e4m3fn")) == [
        "scales differs: ours=0.25, 0.5, 0.75, 1 and 4 more, theirs=none"
    ]
    assert reasons(asking(**ours), asking(**theirs)) == ()
    assert is_converted(asking(**ours), asking(**theirs))


@pytest.mark.parametrize(
    ("short", "spread"), [((0.5,), (0.5,) * 8), ((0.5,), (0.5, 0.5)), ((0.5, 2.0), (0.5, 2.0) * 4)]
)
def test_equal_scales_are_equal_however_they_are_told(short, spread):
    ours, theirs = (asking(dtype="float8_e5m2", scales=scales) for scales in (short, spread))
    assert reasons(ours, theirs) == reasons(theirs, ours) == ()
    assert not is_converted(ours, theirs)
    off = (*spread[:-1], 3.0)
    assert is_converted(ours, asking(dtype="float8_e5m2", scales=off)), "negative control"


@pytest.mark.parametrize("dtype", CODES)
def test_codes_without_a_scale_are_not_converted(dtype):
    assert words(asking(dtype=dtype), asking(dtype="bfloat16")) == [
        f"scales (needed) differs: ours=none of {dtype}, theirs=none of bfloat16"
    ]
    assert words(asking(**E4M3), asking(dtype=dtype)) == [
        f"scales (needed) differs: ours=0.5 of float8_e4m3fn, theirs=none of {dtype}"
    ]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float64"])
def test_types_that_are_never_converted(dtype):
    assert words(asking(dtype=dtype), asking(dtype="bfloat16")) == [
        f"dtype (not convertible) differs: ours={dtype}, theirs=bfloat16"
    ]


def test_opaque_tiles_are_not_converted():
    opaque = BlockLayout("head_major", "amx")
    assert words(asking(layout=opaque), asking(layout=opaque, dtype="bfloat16")) == [
        "dtype (in opaque tiles) differs: ours=float16, theirs=bfloat16"
    ]


@pytest.mark.parametrize(
    ("scales", "of_layers_1_to_3"),
    [
        ((), None),
        ((2.0,), (2.0, 2.0, 2.0, 2.0)),
        ((2.0, 3.0), (2.0, 3.0, 2.0, 3.0)),
        (tuple(float(n) for n in range(1, 9)), (3.0, 4.0, 5.0, 6.0)),
    ],
)
def test_a_scale_for_all_for_each_plane_or_for_each_plane_of_each_layer(scales, of_layers_1_to_3):
    assert make_state(dtype="float8_e5m2", scales=scales).scales_of(Span(1, 3)) == of_layers_1_to_3


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dtype": "float16", "scales": (1.0,)}, "no scale: dtype=float16, scales=1"),
        ({"dtype": "uint8", "scales": (1.0,)}, "no scale: dtype=uint8"),
        (E4M3 | {"scales": (1.0,) * 3}, r"each plane of each layer: got=3, allowed=\(1, 2, 8\)"),
        (E4M3 | {"scales": (0.0,)}, "not a positive number: got=0"),
        (E4M3 | {"scales": (1.0, -1.0)}, "not a positive number: got=1, -1"),
        (E4M3 | {"scales": (float("inf"),)}, "not a positive number: got=inf"),
        (E4M3 | {"scales": (float("nan"),) * 8}, "got=nan, nan, nan, nan and 4 more"),
    ],
)
def test_scales_that_cannot_be(fields, why):
    card = msgspec.to_builtins(make_state()) | fields
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.msgpack.decode(msgspec.msgpack.encode(card), type=CacheState)


def test_scales_survive_the_wire():
    state = asking(dtype="float8_e5m2", scales=(0.1, 1 / 3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=CacheState) == state


def test_an_indexers_bytes_have_no_scale():
    pool = indexer_pool(asking(**E4M3), 256, 128)
    assert (pool.dtype, pool.scales, pool.convert_elements) == ("uint8", (), False)


def test_a_state_is_made_with_the_callers_error():
    with pytest.raises(CallerError, match="no scale"):
        CacheState(
            fingerprint="f", dtype="float32", head_size=1, num_layers=4, num_kv_heads=4, tokens_per_block=1,
            layout=BlockLayout("head_major"), parallel=make_state().parallel, scales=(1.0,),
        )  # fmt: skip
