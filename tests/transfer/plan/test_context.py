"""Blocks dealt to context ranks: the worked numbers of transfer spec 5.9, and where each lies in a rank's table."""

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.context import TokenShare


@pytest.mark.parametrize(
    ("cut", "blocks"),
    [
        ("contiguous", [(0, 1), (2, 3), (4, 5), (6,)]),
        ("round_robin", [(0, 4), (1, 5), (2, 6), (3,)]),
    ],
)
def test_seven_blocks_over_four_ranks(cut, blocks):
    shares = [TokenShare(cut, 4, rank, 4, 27) for rank in range(4)]
    assert [tuple(share.blocks) for share in shares] == blocks
    assert sorted(token for share in shares for run in share.runs for token in run) == list(range(27))


@pytest.mark.parametrize(
    ("cut", "blocks"),
    [
        ("contiguous", [(0, 1, 2, 3), (4, 5), (6, 7), (8,)]),
        ("round_robin", [(0, 1, 8), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_nine_blocks_over_four_ranks_two_at_a_time(cut, blocks):
    shares = [TokenShare(cut, 4, rank, 4, 35, blocks_per_deal=2) for rank in range(4)]
    assert [tuple(share.blocks) for share in shares] == blocks
    assert sorted(token for share in shares for run in share.runs for token in run) == list(range(35))


def test_a_run_lies_in_the_ranks_own_table():
    assert TokenShare("round_robin", 4, 2, 4, 28).local(Span(25, 27)) == Span(5, 7)
    assert TokenShare("contiguous", 4, 1, 4, 28).local(Span(9, 15)) == Span(1, 7)
    assert TokenShare("round_robin", 4, 0, 4, 35, blocks_per_deal=2).local(Span(33, 35)) == Span(9, 11)


@pytest.mark.parametrize("tokens", [Span(3, 6), Span(24, 28)])
def test_tokens_of_another_rank_are_refused(tokens):
    with pytest.raises(ValueError, match="no run of this rank holds these tokens"):
        TokenShare("round_robin", 4, 0, 4, 28).local(tokens)


@pytest.mark.parametrize(
    ("tokens", "ranks", "blocks"), [(3, 4, [1, 0, 0, 0]), (8, 4, [1, 1, 0, 0]), (20, 4, [2, 1, 1, 1]), (20, 2, [3, 2])]
)
def test_br24_a_prompt_with_fewer_blocks_than_context_ranks(tokens, ranks, blocks):
    for cut in ("contiguous", "round_robin"):
        assert [len(TokenShare(cut, ranks, rank, 4, tokens).blocks) for rank in range(ranks)] == blocks


@pytest.mark.parametrize("numbering", ["context_inner", "tensor_inner"])
def test_coordinates_name_each_rank_once(numbering):
    parallel = ParallelLayout.even(3, [2, 2], 3, cp=2, numbering=numbering)
    assert [parallel.rank_at(*parallel.coordinates_of(rank)) for rank in parallel.ranks] == list(range(12))
    tensor_rank, context_rank = (0, 1) if numbering == "context_inner" else (1, 0)
    assert parallel.coordinates_of(Rank(1)) == (0, tensor_rank, context_rank)


def test_groups_must_divide_and_agree():
    with pytest.raises(ValueError, match="groups=2, tensor ranks=3"):
        ParallelLayout.even(3, [1], 2, groups=2)
    with pytest.raises(ValueError, match="blocks_per_deal out of bounds: got=0, allowed=1"):
        ParallelLayout.even(2, [1], 2, blocks_per_deal=0)
    with pytest.raises(ValueError, match=r"different numbers of heads: got=\[1, 2\]"):
        ParallelLayout((Span(0, 1),), (Span(0, 1), Span(0, 2)), num_groups=2)
