"""Chunks copied by a table kept for the request: the same bytes as chunk by chunk, and the checksum in passing."""

import pytest
import torch

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_kernels.block_table import BlockTable
from kv_testing.carrier import own_view
from kv_testing.layouts import make_state, random_pair
from kv_testing.tagged import draw_form, fill, make_world, misplaced
from kv_transfer.checksum import Summer, pending
from kv_transfer.formatter.select import formatter_for
from kv_transfer.orders import BlockTables
from kv_transfer.plan.plan import chunks_of, receive_plans, widened
from kv_transfer.request_blocks import MAX_HELD, Shelf

PAIRS = 200


def sides_of(seed):
    from random import Random

    pair, dice = random_pair(seed), Random(seed)
    tokens = widened(pair.tokens, pair.sender)
    made = [
        make_world(state, tokens.stop, draw_form(dice.randint, state), seed + number)
        for number, state in enumerate((pair.sender, pair.receiver))
    ]
    fill(made[0], Span(0, tokens.stop), pair.sender_group)
    return pair, tokens, *made


def chunks_between(pair, sender, receiver):
    """(sending rank, receiving rank, chunk) of everything that the receiver takes."""
    for rank in receiver.state.parallel.ranks_of(pair.receiver_group):
        for plan in receive_plans(
            receiver.state, rank, sender.state, pair.tokens, group=pair.sender_group, num_tokens=sender.num_tokens
        ):
            for chunk in chunks_of(plan.pieces, plan.tokens, sender.state, pair.max_bytes, pair.most_layers):
                yield plan.sender, rank, chunk


class Shelves:
    """One a rank, and the tables of each window."""

    def __init__(self, world):
        self.world, self.made, self.tables = world, {}, {}

    def take(self, rank, chunk):
        window = self.world.state.window_of(chunk.piece.layers.start)
        ids = self.world.table_of(window)
        tables = self.tables.setdefault(window, BlockTables(self.world.num_tokens, (ids,)))
        return self.made.setdefault(rank, Shelf(self.world.caches[rank])).take(tables, 0)


def sums_of(copied):
    return [part.sums for part in copied]


@pytest.mark.drawn
@pytest.mark.parametrize("first", range(0, PAIRS, 50))
def test_random_pairs_move_the_same_bytes_with_the_checksum(first):
    at_byte, num_chunks = 0, 0
    for seed in range(first, first + 50):
        pair, tokens, sender, receiver = sides_of(seed)
        formatter, givers, takers, summer = formatter_for(pair.sender), Shelves(sender), Shelves(receiver), Summer()
        for giving, taking, chunk in chunks_between(pair, sender, receiver):
            own, caches, blocks = own_view(sender, giving, chunk)
            by_chunk, by_table = (torch.empty(chunk.num_bytes, dtype=torch.uint8) for _ in range(2))
            formatter.split(own, caches, blocks, by_chunk)
            copied = formatter.split_blocks(own, caches, givers.take(giving, chunk), by_table, at_byte)
            assert torch.equal(by_chunk, by_table)
            stated = summer.checksum(by_chunk)
            assert pending(sums_of(copied)).known() == stated
            own, caches, _ = own_view(receiver, taking, chunk)
            copied = formatter.concat_blocks(own, caches, takers.take(taking, chunk), by_table, at_byte)
            assert pending(sums_of(copied)).known() == stated
            num_chunks += 1
        assert misplaced(receiver, tokens, pair.receiver_group) == 0, f"seed={seed}"
    assert num_chunks > 50


def test_a_shelf_makes_a_table_once_and_keeps_the_last(monkeypatch):
    made = []
    init = BlockTable.__init__

    def counted(self, *told):
        made.append(told[1])
        init(self, *told)

    monkeypatch.setattr(BlockTable, "__init__", counted)
    world = make_world(make_state(), 8, draw_form(lambda low, high: low, make_state()), 0)
    shelf = Shelf(next(iter(world.caches.values())))
    asked = [BlockTables(8, ((number % 2, 1),)) for number in range(MAX_HELD + 1)]
    first = shelf.take(asked[0], 0)
    assert shelf.take(asked[0], 0) is first
    assert len(made) == len(first.kinds)
    for tables in asked[1:]:
        assert shelf.take(tables, 0).block_ids == tables.by_group[0]
    again = shelf.take(asked[0], 0)
    assert again is not first
    assert again.block_ids == first.block_ids
    assert len(shelf._held) == MAX_HELD


def test_what_is_not_held_is_refused():
    world = make_world(make_state(), 8, draw_form(lambda low, high: low, make_state()), 0)
    (rank, caches), *_ = world.caches.items()
    blocks = Shelf(caches).take(BlockTables(8, (world.table,)), 0)
    pair = receive_plans(world.state, rank, world.state, Span(0, 8))
    chunk, *_ = chunks_of(pair[0].pieces, pair[0].tokens, world.state, 1 << 20)
    beyond = type(chunk)(0, chunk.piece, Span(4, 4 + 800), chunk.num_bytes)
    with pytest.raises(CallerError, match="does not hold these tokens"):
        formatter_for(world.state).split_blocks(beyond, caches, blocks, torch.empty(chunk.num_bytes, dtype=torch.uint8))
    other = type(chunk)(0, type(chunk.piece)(Span(90, 91), chunk.piece.heads), chunk.tokens, chunk.num_bytes)
    with pytest.raises(CallerError, match="layers are not held"):
        formatter_for(world.state).split_blocks(other, caches, blocks, torch.empty(chunk.num_bytes, dtype=torch.uint8))
