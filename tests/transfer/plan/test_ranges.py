"""Block ranges against a model that asks for every single token where it lies (defects B2, B9)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import BlockId
from kv_core.spans import Span
from kv_testing.strategies import spans
from kv_transfer.plan.ranges import BlockRange, block_range

tables = st.lists(st.integers(0, 1000).map(BlockId), min_size=12, max_size=20, unique=True)


@given(tables, spans(high=60), st.integers(5, 20))
def test_a_range_is_the_blocks_of_its_tokens(table, tokens, tokens_per_block):
    found = block_range(table, tokens, tokens_per_block)
    assert list(found.ordinals) == sorted({token // tokens_per_block for token in tokens})
    assert list(found.ids) == [table[ordinal] for ordinal in found.ordinals]


@given(tables, spans(high=60), spans(high=60), st.integers(5, 20))
def test_a_part_of_a_range_is_the_range_of_the_part(table, tokens, part, tokens_per_block):
    held = block_range(table, tokens, tokens_per_block)
    wanted = tokens & part
    assert held.for_tokens(wanted, tokens_per_block).ids == block_range(table, wanted, tokens_per_block).ids


def test_a_table_that_is_too_short_is_an_error_with_both_lengths():
    with pytest.raises(ValueError, match=r"wanted=\[4, 9\), held=8"):
        block_range([BlockId(1), BlockId(2)], Span(4, 9), 4)


def test_a_negative_token_is_an_error():
    with pytest.raises(ValueError, match=r"wanted=\[-1, 2\)"):
        block_range([BlockId(1)], Span(-1, 2), 4)


def test_a_range_does_not_hold_other_tokens():
    held = block_range([BlockId(5), BlockId(6), BlockId(7)], Span(4, 8), 4)
    with pytest.raises(ValueError, match=r"wanted=\[1, 3\), held=\[1, 2\)"):
        held.for_tokens(Span(4, 9), 4)


def test_a_range_has_one_id_per_ordinal():
    with pytest.raises(ValueError, match=r"ordinals=\[0, 2\), ids=1"):
        BlockRange(Span(0, 2), (BlockId(1),))


def test_no_tokens_are_no_blocks():
    assert block_range([], Span(0, 0), 4) == BlockRange(Span(0, 0), ())
    assert block_range([BlockId(3)], Span(2, 2), 4).ids == ()
