"""Whom a rank may have to do with: every holder of a common layer, head and token, and nobody else."""

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import random_pair
from kv_testing.tagged import World
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.plan import counterparts, receive_plans


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_they_share_a_layer_a_head_and_a_token(first):
    for pair in map(random_pair, range(first, first + 50)):
        length, group = max(1, pair.tokens.stop), pair.sender_group
        for rank in pair.receiver.parallel.ranks_of(pair.receiver_group):
            mine = held(pair.receiver, rank, length)
            holders = {
                other
                for other in pair.sender.parallel.ranks_of(group)
                if all(ours & theirs for ours, theirs in zip(mine, held(pair.sender, other, length), strict=True))
            }
            found = counterparts(pair.receiver, rank, pair.sender, length, group=group)
            assert set(found) == holders
            assert len(found) == len(holders)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_sender_of_a_plan_is_one(first):
    for pair in map(random_pair, range(first, first + 50)):
        for rank in pair.receiver.parallel.ranks_of(pair.receiver_group):
            plans = receive_plans(pair.receiver, rank, pair.sender, pair.tokens, group=pair.sender_group)
            around = counterparts(pair.receiver, rank, pair.sender, pair.tokens.stop, group=pair.sender_group)
            assert {plan.sender for plan in plans} <= set(around)


def test_copies_are_counted_per_group():
    layout = ParallelLayout.even(8, [2], 2, groups=2)
    assert [layout.num_copies(head, group) for group in range(2) for head in range(3)] == [2, 2, 0, 2, 2, 0]
    overlapping = ParallelLayout(layers=(Span(0, 1),), heads=(Span(0, 3), Span(2, 5)))
    assert [overlapping.num_copies(head) for head in range(5)] == [1, 1, 2, 1, 1]


def held(state, rank, length):
    """(layers, heads, tokens) of a rank, told without the plan."""
    share, size = state.share_of(Rank(rank)), state.tokens_per_block
    blocks = World(state, {}, (), length).blocks_of(rank)
    tokens = {token for block in blocks for token in range(block * size, min((block + 1) * size, length))}
    return set(share.layers), set(share.heads), tokens
