"""The worked numbers of transfer spec 5.7, 5.8 and 5.9: which blocks travel."""

import pytest

from kv_core.ids import BlockId
from kv_core.spans import Span
from kv_transfer.plan.context import TokenShare
from kv_transfer.plan.plan import seen_by_next
from kv_transfer.plan.ranges import block_range

ALLOCATED = tuple(BlockId(number) for number in range(10, 16))

# (prompt, tokens held already, blocks that travel, the spec's `index_from_end`): 4 tokens a block
RANGES = [
    (23, 0, [10, 11, 12, 13, 14, 15], 5),
    (23, 8, [12, 13, 14, 15], 3),
    (23, 10, [12, 13, 14, 15], 3),
]


@pytest.mark.parametrize(("prompt", "held", "blocks", "index_from_end"), RANGES)
def test_the_blocks_of_the_table(prompt, held, blocks, index_from_end):
    found = block_range(ALLOCATED, Span(held, prompt), 4)
    assert list(found.ids) == blocks
    assert len(found.ids) - 1 == index_from_end


@pytest.mark.parametrize("prompt", [24, 20])
def test_of_a_prompt_that_is_held_nothing_travels(prompt):
    """The spec's rows fetch one block nevertheless (15, and 14); that is defect B9."""
    assert block_range(ALLOCATED, Span(prompt, prompt), 4).ids == ()


def test_the_other_side_names_the_same_blocks_of_its_own():
    chain = tuple(BlockId(number) for number in range(6))
    assert list(block_range(chain, Span(8, 23), 4).ids) == [2, 3, 4, 5]


# (window, first block of the spec, first block of ours): 20 blocks of 4 tokens
TAILS = [(8, 17, 18), (16, 15, 16), (10, 17, 17), (128, 0, 0)]


@pytest.mark.parametrize(("window", "first_of_spec", "first"), TAILS)
def test_the_tail_of_a_window(window, first_of_spec, first):
    """Ours begins where the next token sees (5.12); the spec's count of `W // 4 + 1` blocks is never less here."""
    seen = seen_by_next(Span(0, 80), window).blocks(4)
    assert (seen.start, seen.stop) == (first, 20)
    assert 20 - first_of_spec == min(20, window // 4 + 1)
    assert first_of_spec <= first


@pytest.mark.parametrize(
    ("cut", "blocks"),
    [("contiguous", [(0, 1), (2, 3), (4, 5), (6,)]), ("round_robin", [(0, 4), (1, 5), (2, 6), (3,)])],
)
def test_seven_blocks_over_four_context_ranks(cut, blocks):
    shares = [TokenShare(cut, 4, rank, 4, 28) for rank in range(4)]
    assert [tuple(share.blocks) for share in shares] == blocks


@pytest.mark.parametrize("num_blocks", range(13))
@pytest.mark.parametrize("ranks", range(1, 6))
def test_the_formula_of_the_contiguous_cut(num_blocks, ranks):
    shares = [TokenShare("contiguous", ranks, rank, 4, 4 * num_blocks) for rank in range(ranks)]
    for rank, share in enumerate(shares):
        each, over = divmod(num_blocks, ranks)
        start = each * rank + min(rank, over)
        assert list(share.blocks) == list(range(start, start + each + (over > rank)))
