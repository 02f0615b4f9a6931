"""Target ranks: the law of the specimen, restated; and the choice among copies (defects A1, A5, A7, A13)."""

from collections import Counter
from itertools import pairwise
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.strategies import parallel_pairs
from kv_transfer.plan.cache_state import ParallelLayout, Share
from kv_transfer.plan.targets import Target, holding_ranks, target_ranks


def parts(share):
    return [(layer, head) for layer in share.layers for head in share.heads]


@given(parallel_pairs(), st.integers(0, 9))
def test_every_part_has_exactly_one_source(pair, spread):
    ours, peer = pair
    for rank in ours.ranks:
        share = ours.share_of(rank)
        targets = target_ranks(share, peer, spread)
        assert Counter(part for target in targets for part in parts(target)) == Counter(parts(share))
        assert all(set(parts(target)) <= set(parts(peer.share_of(target.rank))) for target in targets)


@given(parallel_pairs())
def test_targets_are_ordered_and_neighbours_of_one_rank_are_one(pair):
    ours, peer = pair
    for rank in ours.ranks:
        targets = target_ranks(ours.share_of(rank), peer)
        assert list(targets) == sorted(targets, key=lambda target: (target.layers, target.heads))
        for left, right in pairwise(targets):
            assert (left.rank, left.layers) != (right.rank, right.layers) or left.heads.stop < right.heads.start


@given(parallel_pairs())
def test_every_holder_is_chosen_by_some_spread(pair):
    ours, peer = pair
    share = ours.share_of(Rank(0))
    for group in range(peer.num_groups):
        found = {
            target.rank
            for spread in range(lcm(*range(1, 9)))
            for context_rank in range(peer.num_context_ranks)
            for target in target_ranks(share, peer, spread, group=group, context_rank=context_rank)
        }
        holders = {rank for rank in peer.ranks_of(group) if set(parts(share)) & set(parts(peer.share_of(rank)))}
        assert found == holders == set(holding_ranks(share, peer, group))


def test_neighbouring_ranks_ask_different_copies():
    ours, peer = ParallelLayout.even(4, [2], 1), ParallelLayout.even(4, [2], 1)
    chosen = [target_ranks(ours.share_of(rank), peer)[0].rank for rank in ours.ranks]
    assert chosen == [0, 1, 2, 3]


def test_partially_overlapping_holders():
    peer = ParallelLayout(layers=(Span(0, 1),), heads=(Span(0, 3), Span(2, 5), Span(5, 6)))
    share = Share(Rank(0), Span(0, 1), Span(0, 6))
    layer = Span(0, 1)
    assert target_ranks(share, peer) == (
        Target(Rank(0), layer, Span(0, 3)),
        Target(Rank(1), layer, Span(3, 5)),
        Target(Rank(2), layer, Span(5, 6)),
    )
    assert target_ranks(share, peer, spread=1)[:2] == (
        Target(Rank(0), layer, Span(0, 2)),
        Target(Rank(1), layer, Span(2, 5)),
    )


def test_an_empty_stage_has_no_targets():
    ours = ParallelLayout.even(1, [2, 0, 2], 4)
    assert target_ranks(ours.share_of(Rank(1)), ParallelLayout.even(1, [4], 4)) == ()


@pytest.mark.parametrize(
    ("layers", "heads", "words"),
    [
        (Span(0, 5), Span(0, 4), r"lacks layers of ours: ours=\[0, 5\), theirs=\[0, 4\)"),
        (Span(0, 4), Span(3, 5), r"lacks heads of ours: ours=\[3, 5\), theirs=\[0, 4\)"),
    ],
)
def test_what_the_peer_lacks_is_an_error(layers, heads, words):
    with pytest.raises(ValueError, match=words):
        target_ranks(Share(Rank(0), layers, heads), ParallelLayout.even(2, [4], 4))
