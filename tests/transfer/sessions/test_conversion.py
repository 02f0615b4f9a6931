"""Whole hand-overs between caches of other elements: converted where both ask, staged always, else refused."""

from dataclasses import replace

import pytest

from kv_core.spans import Span
from kv_testing.exchanges import small_state
from kv_testing.valued import offer_numbers, wrong_numbers
from kv_testing.worlds import ALL, FAST, NUM_TOKENS, fresh_id, pair
from kv_transfer.direct.book import BookReader
from kv_transfer.direct.in_process import InProcessHub
from kv_transfer.formatter.conversion import Conversion
from kv_transfer.passages import Passages
from kv_transfer.plan.cache_state import LATENT, BlockLayout
from kv_transfer.plan.elements import ITEM_BYTES

TOKEN_MAJOR = BlockLayout("token_major")


def state(dtype, scales=(), asks=True, layout=None, **shape):
    fields = {"dtype": dtype, "scales": scales, "convert_elements": asks, "head_size": 8}
    return small_state(fields=fields | ({"layout": layout} if layout else {}), **shape)


EACH = tuple(0.25 * number for number in range(1, 9))
"""A scale for each plane of each of the 4 layers."""
ELEMENTS = {
    "float32 to bfloat16": (("float32",), ("bfloat16",)),
    "bfloat16 to float16": (("bfloat16",), ("float16",)),
    "float16 to float32": (("float16",), ("float32",)),
    "bfloat16 to e4m3": (("bfloat16",), ("float8_e4m3fn", (0.5,))),
    "bfloat16 to e5m2": (("bfloat16",), ("float8_e5m2", (2.0, 0.75))),
    "e4m3 to bfloat16": (("float8_e4m3fn", (0.5, 0.25)), ("bfloat16",)),
    "bfloat16 to e4m3, scales of layers": (("bfloat16",), ("float8_e4m3fn", EACH)),
    "e5m2 to float32, scales of layers": (("float8_e5m2", EACH), ("float32",)),
    "e5m2 to e4m3, scales of layers": (("float8_e5m2", EACH), ("float8_e4m3fn", (3.0,))),
    "e4m3 to e4m3 of other scales": (("float8_e4m3fn", EACH), ("float8_e4m3fn", tuple(reversed(EACH)))),
}
SHAPES = {
    "alike": ({}, {}),
    "other ranks, blocks and order": (
        {"tp": 2, "stages": (1, 3)},
        {"tp": 3, "tokens_per_block": 8, "layout": TOKEN_MAJOR},
    ),
}


def handed_over(p, d, tokens=ALL):
    """One hand-over of numbers; answers the bytes that were on the wire."""
    transfer = offer_numbers(p, NUM_TOKENS)
    d.order(p, transfer, tokens=tokens)
    received = d.outcomes(others=[p])
    assert all(each.ok for each in received), received
    assert wrong_numbers(d, p.world.state, tokens) == 0
    d.release(p, transfer)
    d.check_clean()
    p.check_clean()
    return sum(each.num_bytes for each in received)


@pytest.mark.parametrize(("p_shape", "d_shape"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("sent", "kept"), ELEMENTS.values(), ids=ELEMENTS)
def test_elements_are_converted_by_the_receiver(sent, kept, p_shape, d_shape):
    """The wire carries the sender's: that is what chunks and checksums count."""
    with pair(state(*sent, **p_shape), state(*kept, **d_shape)) as (p, d, _):
        num_bytes = handed_over(p, d)
        assert num_bytes == p.count("bytes_out") == NUM_TOKENS * 4 * 2 * 4 * 8 * ITEM_BYTES[sent[0]]


@pytest.mark.parametrize("asks", [False, True], ids=["nobody asks", "both ask"])
@pytest.mark.parametrize("scales", [(EACH, EACH), ((0.5,), (0.5,) * 8)], ids=["of layers", "told in two ways"])
def test_codes_of_equal_scales_are_handed_over_as_they_are(asks, scales, monkeypatch):
    convert, converted = Conversion.converted, []

    def counted(self, dense, layers):
        converted.append(layers)
        return convert(self, dense, layers)

    monkeypatch.setattr(Conversion, "converted", counted)
    codes = [state("float8_e4m3fn", own, asks) for own in scales]
    with pair(*codes) as (p, d, _):
        handed_over(p, d)
    assert converted == []
    with pair(state("float8_e4m3fn", scales[0]), state("float8_e4m3fn", EACH[::-1])) as (p, d, _):
        handed_over(p, d)
    assert converted, "negative control"


def test_elements_that_are_converted_are_not_read_in_place():
    """Also where the runs would be long enough: a read is a copy."""
    config = replace(FAST, own_blocks=True, in_place_run_bytes=1)
    with pair(state("float32"), state("bfloat16"), config=config) as (p, d, _):
        assert handed_over(p, d) == p.count("bytes_out")
        assert d.count("bytes_read_in_place") == 0


@pytest.mark.parametrize(
    "shape",
    [
        {"windows": (0, 9, 0, 9)},
        {"cp": 2, "context_cut": "round_robin"},
        {"heads": 1, "attention": LATENT},
    ],
    ids=["windows", "context ranks", "latent"],
)
@pytest.mark.parametrize("tokens", [ALL, Span(7, 33)], ids=str)
def test_in_every_shape(shape, tokens):
    with pair(state("bfloat16", **shape), state("float8_e4m3fn", (0.5,), **shape)) as (p, d, _):
        handed_over(p, d, tokens)


def test_without_checksums_as_well():
    with pair(state("float32"), state("float16"), config=replace(FAST, checksum=False)) as (p, d, _):
        handed_over(p, d)


def test_checksums_are_of_what_travels(monkeypatch):
    """A bit that the conversion would round away is missed all the same."""
    write = Passages._write

    def spoilt(self, session, seq):
        session.moves.held[seq].lease.slice.tensor[0] ^= 1
        write(self, session, seq)

    monkeypatch.setattr(Passages, "_write", spoilt)
    with pair(state("float32"), state("float16")) as (p, d, _):
        d.order(p, offer_numbers(p, NUM_TOKENS))
        assert "checksums of chunk" in d.outcome(others=[p]).reason
        assert d.misplaced(Span(0, 0)) == 0, "nothing is written"
        p.withdraw()
        d.check_clean()


# -- never directly ----------------------------------------------------------------------------------------------------


def test_converted_elements_are_staged_where_the_caches_could_be_read():
    doors = InProcessHub()
    with pair(state("bfloat16"), state("float16"), direct=doors.door) as (p, d, _):
        handed_over(p, d)
        assert (d.count("bytes_read_directly"), doors.num_open) == (0, 0)
    with pair(state("bfloat16"), state("bfloat16"), direct=doors.door) as (p, d, _):
        handed_over(p, d)
        assert d.count("bytes_read_directly") > 0, "negative control"


def test_a_sender_refuses_who_would_read_what_is_to_be_converted(monkeypatch):
    """A receiver of ours does not ask; one that does is told both types."""
    monkeypatch.setattr("kv_transfer.mappings.is_converted", lambda ours, theirs: False)
    monkeypatch.setattr(BookReader, "find", lambda *_: None)
    with pair(state("bfloat16"), state("float16"), direct=InProcessHub().door) as (p, d, _):
        d.order(p, offer_numbers(p, NUM_TOKENS))
        reason = d.outcome(others=[p]).reason
        assert "elements that are converted are not read where they lie: ours=bfloat16, theirs=float16" in reason
        p.withdraw()
        d.check_clean()
        p.check_clean()


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (state("float32", asks=False), state("bfloat16", asks=False), ["dtype differs: ours=bfloat16, theirs=float32"]),
        (
            state("float32", asks=False),
            state("bfloat16"),
            ["dtype differs: ours=bfloat16, theirs=float32", "convert_elements differs: ours=True, theirs=False"],
        ),
        (
            state("float32"),
            state("bfloat16", asks=False),
            ["dtype differs: ours=bfloat16, theirs=float32", "convert_elements differs: ours=False, theirs=True"],
        ),
        (
            state("bfloat16"),
            state("float8_e4m3fn"),
            ["scales (needed) differs: ours=none of float8_e4m3fn, theirs=none of bfloat16"],
        ),
        (
            state("float8_e4m3fn", (0.5,), asks=False),
            state("float8_e4m3fn", (0.25,), asks=False),
            ["scales differs: ours=0.25, theirs=0.5"],
        ),
        (
            state("float8_e5m2", EACH, asks=False),
            state("float8_e5m2", (*EACH[:5], 3.0, *EACH[6:]), asks=False),
            ["scales of layer 2 differs: ours=1.25, 3, theirs=1.25, 1.5"],
        ),
        (state("int8"), state("bfloat16"), ["dtype (not convertible) differs: ours=bfloat16, theirs=int8"]),
    ],
    ids=[
        "nobody asks",
        "the receiver alone",
        "the sender alone",
        "no scale",
        "other scales",
        "other scales of a layer",
        "no number",
    ],
)
def test_elements_are_never_converted_in_silence(prefill, decode, words):
    with pair(prefill, decode) as (p, d, _):
        d.order(p, fresh_id())
        reason = d.outcome(others=[p]).reason
        assert all(each in reason for each in words), reason
        assert d.misplaced(Span(0, 0)) == 0, "nothing is written"
        d.check_clean()
        p.check_clean()
