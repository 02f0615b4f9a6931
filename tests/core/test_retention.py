"""Retention wishes: the worked examples, refusals, and every range against a naive walk over tokens."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.retention import UNSET, RangeRetention, Retention, RetentionConfig
from kv_core.spans import Span, ceil_div


def config(*ranges):
    return RetentionConfig(tuple(RangeRetention(*one) for one in ranges))


def priorities(ranges, tokens_per_block, num_tokens):
    return [wish.priority for wish in config(*ranges).per_block(tokens_per_block, num_tokens)]


@pytest.mark.parametrize(
    ("ranges", "tokens_per_block", "num_tokens", "expected"),
    [
        ([(0, 40, 90), (40, None, 20)], 32, 130, [90, 90, 20, 20, 20]),
        ([(0, 17, 80)], 16, 48, [80, 80, None]),
        ([(0, 64, 80), (64, 128, 50)], 64, 256, [80, 50, None, None]),
        ([(50, 100, 70), (0, 50, 20)], 25, 110, [20, 20, 70, 70, None]),
        # core spec D45: no range is lost, although no block starts in it
        ([(10, 70, 90)], 32, 130, [90, 90, 90, None, None]),
        ([(33, 40, 80)], 32, 130, [None, 80, None, None, None]),
        ([(0, 4, 10), (4, 8, 60), (8, None, 20)], 8, 12, [60, 20]),
    ],
)
def test_per_block(ranges, tokens_per_block, num_tokens, expected):
    assert priorities(ranges, tokens_per_block, num_tokens) == expected


@pytest.mark.parametrize("ranges", [[(0, 64), (90, 128)], [(50, 100), (30, 40)], [(0, None)], [(0, 4), (4, 8)]])
def test_valid(ranges):
    starts = [wish.start for wish in config(*ranges).ranges]
    assert starts == sorted(starts)


@pytest.mark.parametrize(
    "ranges", [[(0, None), (30, 50)], [(0, 64), (60, 80)], [(5, 5)], [(-1, 5)], [(0, 64), (64, 32)], [(0, 5, 101)]]
)
def test_refused(ranges):
    with pytest.raises(CallerError):
        config(*ranges)


@pytest.mark.parametrize("priority", [-1, 101])
def test_decode_priority_is_checked_like_the_others(priority):  # core spec D21
    with pytest.raises(CallerError, match=f"priority={priority}"):
        RetentionConfig(decode_priority=priority)


def test_stronger_prefers_priority_then_a_longer_duration():
    for_ever, short, long = Retention(50), Retention(50, 10), Retention(50, 20)
    assert for_ever.stronger(short) == for_ever == short.stronger(for_ever)
    assert short.stronger(long) == long
    assert UNSET.stronger(Retention(0, 1)) == Retention(0, 1)


def test_decode_wish():
    assert RetentionConfig(decode_priority=7, decode_duration_ms=9).decode == Retention(7, 9)


@st.composite
def range_lists(draw):
    cuts = sorted(draw(st.lists(st.integers(0, 60), min_size=2, max_size=9, unique=True)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    durations = st.none() | st.integers(0, 5)
    return draw(st.permutations([(*pair, draw(st.integers(0, 100)), draw(durations)) for pair in pairs]))


@given(range_lists(), st.integers(1, 9), st.integers(0, 70))
def test_runs_equal_a_walk_over_tokens(ranges, tokens_per_block, num_tokens):
    wishes = config(*ranges)
    naive = []
    for ordinal in range(ceil_div(num_tokens, tokens_per_block)):
        tokens = Span(ordinal * tokens_per_block, min((ordinal + 1) * tokens_per_block, num_tokens))
        found = UNSET
        for start, stop, priority, duration in ranges:
            if tokens & Span(start, stop):
                found = found.stronger(Retention(priority, duration))
        naive.append(found)
    assert list(wishes.per_block(tokens_per_block, num_tokens)) == naive
    runs = wishes.runs(tokens_per_block, num_tokens)
    assert all(span for span, _ in runs)
    assert all(one[1] != two[1] for one, two in pairwise(runs))
