"""What a direct reader copies, from the pieces it has asked for.

In:  the Ask; where the receiver keeps the sequence, and where the sender does.
Out: Reads, each of layers that share a block table on either side.
Law: every (layer, head, token) of the pieces is read once. CallerError if a side does not hold what it should.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from kv_core.ids import BlockId, Rank
from kv_core.spans import Span
from kv_transfer.direct.base import Read
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import CacheState, Share
from kv_transfer.plan.part import Geometry, Part
from kv_transfer.plan.plan import widened
from kv_transfer.plan.ranges import block_range
from kv_transfer.protocol.messages import Ask, SharedBlocks


@dataclass(frozen=True, slots=True)
class Holding:
    """Where one rank keeps one sequence: of each layer group its own blocks, from its `first` on.

    `groups` has the layer group of each layer of the rank; none at all if all share one table.
    """

    state: CacheState
    rank: Rank
    groups: tuple[int, ...]
    first: int
    by_group: Sequence[Sequence[int]]

    def group_of(self, layer: int) -> int:
        """Which table has the blocks of a global layer."""
        return self.groups[layer - self.state.share_of(self.rank).layers.start] if self.groups else 0

    def part(self, heads: Span, tokens: Span, group: int, num_tokens: int) -> Part:
        """Where these heads and global tokens lie."""
        share, size = self.state.share_of(self.rank), self.state.tokens_per_block
        local, skipped = self.state.token_share(share.context_rank, num_tokens).local(tokens), self.first * size
        local = Span(local.start - skipped, local.stop - skipped)
        held = Geometry(share.heads, size, self.state.layout.tile)
        table = cast("Sequence[BlockId]", self.by_group[group])
        return Part.of(heads, local, held, block_range(table, local, size))


def reads_of(ask: Ask, ours: Holding, theirs: Holding) -> Iterator[Read]:
    """Everything that this Ask wants, from `theirs` to `ours`."""
    for piece in ask.pieces:
        tokens = widened(ask.tokens if piece.tokens is None else piece.tokens, theirs.state)
        for layers, to, of in _runs(piece.layers, ours, theirs):
            target = ours.part(piece.heads, tokens, to, ask.num_tokens)
            yield Read(layers, len(piece.heads), theirs.part(piece.heads, tokens, of, ask.num_tokens), target)


def _runs(layers: Span, ours: Holding, theirs: Holding) -> Iterator[tuple[Span, int, int]]:
    """Neighbouring layers with one table on either side, and these two tables."""
    start = layers.start
    for layer in layers:
        tables = ours.group_of(layer), theirs.group_of(layer)
        is_last = layer + 1 == layers.stop
        if is_last or (ours.group_of(layer + 1), theirs.group_of(layer + 1)) != tables:
            yield Span(start, layer + 1), *tables
            start = layer + 1


def shared_blocks(ask: Ask, state: CacheState, share: Share, tables: BlockTables) -> SharedBlocks:
    """The blocks of the tokens asked for, of a rank with this share, which keeps the prompt in these tables."""
    wanted = widened(ask.tokens, state).blocks(state.tokens_per_block)
    held = state.token_share(share.context_rank, tables.num_tokens).blocks
    first, stop = bisect_left(held, wanted.start), bisect_left(held, wanted.stop)
    return SharedBlocks(first=first, by_group=tuple(table[first:stop] for table in tables.by_group))
