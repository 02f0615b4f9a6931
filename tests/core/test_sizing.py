"""Sizing: the worked examples, exactness, and every claim of fitting against the requirement itself."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError, CapacityError
from kv_core.sizing import (
    Budget,
    NumBlocks,
    SequenceShape,
    agreed_blocks,
    blocks_for_memory,
    blocks_per_beam,
    equal_token_shares,
    explicit_shares,
    largest_batch,
    largest_window,
    memory_budget,
    proportional_shares,
    sink_bubble,
    temporary_window,
)

GIB = 2**30
LAYER_BYTES = 8 * 128 * 2 * 2 * 32
"""Bytes of a block of one layer in the examples of core spec 11.2: 8 heads, head 128, 2 planes, 2 bytes, 32 tokens."""


@pytest.mark.parametrize(
    ("layers", "options", "aside", "expected"),
    [
        ({8192: 32}, {}, 0, {8192: NumBlocks(4096, 1024)}),
        ({8192: 32}, {"max_tokens": 50001}, 0, {8192: NumBlocks(1563, 1024)}),
        ({512: 24, 8192: 8}, {}, GIB, {512: NumBlocks(2560, 682), 8192: NumBlocks(7680, 2048)}),
        (
            {512: 24, 8192: 8},
            {"shares": explicit_shares([8192, 512], "0.2,0.6")},
            GIB,
            {512: NumBlocks(1280, 341), 8192: NumBlocks(11520, 3072)},
        ),
    ],
)
def test_worked_examples(layers, options, aside, expected):
    block_bytes = {window: count * LAYER_BYTES for window, count in layers.items()}
    budget = Budget(16 * GIB, 4 * GIB).without(aside)
    assert blocks_for_memory(block_bytes, budget, tokens_per_block=32, **options) == expected


def test_a_cap_on_tokens_holds_for_every_window():  # core spec D28
    budget = Budget(16 * GIB, 4 * GIB)
    found = blocks_for_memory({512: LAYER_BYTES, 8192: LAYER_BYTES}, budget, tokens_per_block=32, max_tokens=64)
    assert [blocks.primary for blocks in found.values()] == [2, 2]


def test_a_token_more_than_whole_blocks_is_no_block():  # core spec D28
    assert blocks_for_memory({64: 1024 * 32}, Budget(1024 * 1025), tokens_per_block=32) == {64: NumBlocks(32)}


@given(
    st.dictionaries(st.integers(1, 9), st.integers(1, 50), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from([equal_token_shares, proportional_shares, lambda _: None]),
)
def test_never_more_than_the_memory(block_bytes, primary, secondary, policy):
    found = blocks_for_memory(block_bytes, Budget(primary, secondary), tokens_per_block=4, shares=policy(block_bytes))
    assert sum(found[window].primary * block_bytes[window] for window in found) <= primary
    assert sum(found[window].secondary * block_bytes[window] for window in found) <= secondary


def test_equal_tokens_means_equally_many_blocks():
    block_bytes = {512: 3, 8192: 1}
    found = blocks_for_memory(block_bytes, Budget(4000), tokens_per_block=4, shares=equal_token_shares(block_bytes))
    assert found == {512: NumBlocks(1000), 8192: NumBlocks(1000)}


def test_more_aside_than_there_is():  # core spec D28: no wrap-around
    with pytest.raises(CapacityError, match="primary=10, aside=11"):
        Budget(10).without(11)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({1024: 1, 2048: 2, 4096: 3}, [0.0588, 0.2353, 0.7059]),
        ({1024: 1, 4096: 3, 8192: 2}, [0.0345, 0.4138, 0.5517]),
        ({1024: 8, 4096: 2, 8192: 1}, [0.3333, 0.3333, 0.3333]),
        ({1024: 1}, [1.0]),
    ],
)
def test_proportional_shares(layers, expected):
    assert [round(float(share), 4) for share in proportional_shares(layers).values()] == expected


def test_shares_sum_to_one_exactly():  # core spec D20: 0.99999994 in 32-bit floats
    assert sum(proportional_shares({1024: 1, 2048: 6, 8192: 3}).values()) == 1


def test_a_float_share_is_the_number_it_prints_as():
    assert explicit_shares([2, 1], [0.1, 0.3]) == {1: Fraction(1, 4), 2: Fraction(3, 4)}


@pytest.mark.parametrize("numbers", ["0.5", "0,0", "2,-1", "1,x", "1,2"])
def test_refused_shares(numbers):
    with pytest.raises(CallerError):
        explicit_shares([8, 64], numbers)


@pytest.mark.parametrize("shares", [{8: Fraction(1)}, {8: Fraction(1, 2), 64: Fraction(1, 3)}])
def test_shares_must_cover_the_windows_and_sum_to_one(shares):
    with pytest.raises(CallerError):
        blocks_for_memory({8: 1, 64: 1}, Budget(100), tokens_per_block=4, shares=shares)


def test_budget():
    assert memory_budget(100, 200, 7) == Budget(90, 7)
    assert memory_budget(1001, 2000, fraction=0.3) == Budget(300)
    assert Budget(101, 11).split(0.5) == (Budget(51, 6), Budget(50, 5))
    with pytest.raises(CallerError, match="free=3, total=2"):
        memory_budget(3, 2)
    with pytest.raises(CallerError):
        memory_budget(1, 2, fraction=1)


def test_ranks_agree_on_the_minimum():
    """A rank with less memory decides, level by level; different windows are refused with both lists."""
    ours, theirs = {8: NumBlocks(100, 12)}, {8: NumBlocks(90, 20)}
    assert agreed_blocks([ours, theirs]) == {8: NumBlocks(90, 12)} == agreed_blocks([theirs, ours])
    with pytest.raises(CallerError, match=r"rank 0=\[8, 32\], rank 1=\[8\]"):
        agreed_blocks([{8: NumBlocks(1), 32: NumBlocks(1)}, ours])


@pytest.mark.parametrize(("sink", "tokens_per_block", "expected"), [(0, 64, 0), (64, 64, 0), (65, 64, 63), (1, 64, 63)])
def test_sink_bubble(sink, tokens_per_block, expected):
    assert sink_bubble(sink, tokens_per_block) == expected


def test_temporary_window():
    assert temporary_window(512, 8192, 2048) == 2048
    assert temporary_window(512, 1000, 2048) == 488
    assert temporary_window(512, 512, 2048) == 0 == temporary_window(512, 100, 2048)


@pytest.mark.parametrize(
    ("num_tokens", "sink", "window", "expected"),
    [(512, 0, 1024, 8), (513, 0, 1024, 9), (512, 0, 256, 5), (512, 64, 257, 6), (513, 65, 1024, 9), (512, 65, 256, 6)],
)
def test_blocks_per_beam(num_tokens, sink, window, expected):
    assert blocks_per_beam(num_tokens, window, 64, sink) == expected


@pytest.mark.parametrize(
    ("inp", "out", "window", "beams", "expected"),
    [
        (1000, 24, 4096, 1, 16),
        (1000, 200, 512, 1, 9),
        (1000, 200, 512, 4, 24),
        (1000, 600, 512, 4, 36),
        (100, 50, 4096, 4, 9),
        (64, 64, 128, 1, 2),
        (65, 64, 128, 1, 3),
        (257, 255, 128, 4, 12),
        (257, 255, 412, 4, 26),
    ],
)
def test_blocks_of_a_sequence(inp, out, window, beams, expected):
    assert SequenceShape(inp, out, beams).num_blocks(window, 64) == expected


@pytest.mark.parametrize(
    ("inp", "out", "beams", "capacity", "expected"),
    [(1000, 64, 1, 20, 1064), (1000, 200, 4, 3, 0), (1000, 200, 4, 40, 1200), (1024, 256, 1, 20, 1280)],
)
def test_largest_window(inp, out, beams, capacity, expected):
    assert largest_window(SequenceShape(inp, out, beams), capacity, 64) == expected


def test_largest_window_counts_the_sliding_block():  # core spec D27: a window of 320 needs 6 blocks
    shape = SequenceShape(1000, 64)
    assert shape.num_blocks(320, 64) == 6
    assert largest_window(shape, 5, 64) == 256
    assert shape.num_blocks(256, 64) == 5


@given(
    st.integers(0, 60), st.integers(1, 60), st.integers(1, 4), st.integers(0, 9), st.integers(0, 60), st.integers(1, 9)
)
def test_largest_window_is_the_largest(inp, out, beams, sink, capacity, tokens_per_block):
    shape = SequenceShape(inp, out, beams, sink)
    fitting = [w for w in range(1, inp + out + 1) if shape.num_blocks(w, tokens_per_block) <= capacity]
    assert largest_window(shape, capacity, tokens_per_block) == max(fitting, default=0)


@pytest.mark.parametrize(
    ("shape", "blocks", "tokens_per_block", "expected"),
    [
        (SequenceShape(1000, 200), {512: NumBlocks(100), 4096: NumBlocks(300)}, 64, 11),
        (SequenceShape(100, 28), {1024: NumBlocks(64)}, 32, 16),
        (SequenceShape(96, 32, 4), {1024: NumBlocks(64)}, 32, 9),
        (SequenceShape(4096, 100), {8192: NumBlocks(16)}, 64, 0),
    ],
)
def test_largest_batch(shape, blocks, tokens_per_block, expected):
    assert largest_batch(shape, blocks, tokens_per_block) == expected
