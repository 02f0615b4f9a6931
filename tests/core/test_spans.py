"""Spans against sets of integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.spans import Span, ceil_div

bounds = st.integers(-40, 40)
spans = st.builds(lambda start, length: Span(start, start + length), bounds, st.integers(0, 30))


def test_a_span_cannot_end_before_it_starts():
    with pytest.raises(CallerError, match="start=3, stop=2"):
        Span(3, 2)


@given(spans)
def test_a_span_is_the_set_of_its_integers(span):
    members = set(span)
    assert members == set(range(span.start, span.stop))
    assert len(span) == len(members)
    assert bool(span) == bool(members)
    assert all(item in span for item in members)
    assert span.start - 1 not in span
    assert span.stop not in span


@given(spans, spans)
def test_intersection_and_covering_agree_with_sets(left, right):
    assert set(left & right) == set(left) & set(right)
    assert left.covers(right) == (set(right) <= set(left))


@given(st.integers(0, 200), st.integers(0, 60), st.integers(1, 20))
def test_blocks_are_those_that_hold_a_token(start, length, tokens_per_block):
    span = Span(start, start + length)
    assert list(span.blocks(tokens_per_block)) == sorted({token // tokens_per_block for token in span})


@given(st.integers(-1000, 1000), st.integers(1, 50))
def test_ceil_div_is_exact(numerator, denominator):
    quotient = ceil_div(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator


def test_ceil_div_is_exact_where_floats_are_not():
    assert ceil_div(2**60 + 1, 2) == 2**59 + 1


def test_a_span_reads_as_half_open():
    assert str(Span(2, 5)) == "[2, 5)"
