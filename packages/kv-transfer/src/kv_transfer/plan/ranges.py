"""Which blocks of a request hold a span of its tokens.

In:  the request's block table (block ids by ordinal, from 0) and the half-open span of tokens wanted.
Out: a BlockRange: the ordinals and the ids of the blocks that hold at least one of these tokens.
Law: nothing is inferred from the table's length; a span the table does not hold is an error, the empty span is an empty
range. A table may have holes, where a window has moved on: they are never part of a range. Transfer spec 5.11;
defects B2, B9.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.errors import CallerError
from kv_core.ids import BlockId
from kv_core.spans import Span

HOLE: Final = BlockId(-1)
"""In a block table: the request has no block here (any more)."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks chosen for one transfer: `ids[i]` is the block with ordinal `ordinals.start + i`."""

    ordinals: Span
    ids: tuple[BlockId, ...]

    def __post_init__(self) -> None:
        if len(self.ordinals) != len(self.ids):
            raise CallerError(f"a block range is not one id per ordinal: ordinals={self.ordinals}, ids={len(self.ids)}")

    def for_tokens(self, tokens: Span, tokens_per_block: int) -> "BlockRange":
        """The part of this range that holds `tokens`; CallerError if it holds only some of them."""
        wanted = tokens.blocks(tokens_per_block)
        if not self.ordinals.covers(wanted):
            raise CallerError(f"the range lacks blocks of these tokens: wanted={wanted}, held={self.ordinals}")
        if not wanted:
            return BlockRange(wanted, ())
        return BlockRange(wanted, self.ids[wanted.start - self.ordinals.start : wanted.stop - self.ordinals.start])


def block_range(table: Sequence[BlockId], tokens: Span, tokens_per_block: int) -> BlockRange:
    """The blocks of `table` that hold `tokens`; CallerError if the table is too short, or has a hole there."""
    ordinals = tokens.blocks(tokens_per_block)
    if tokens.start < 0 or ordinals.stop > len(table):
        raise CallerError(
            f"the block table does not hold these tokens: wanted={tokens}, held={len(table) * tokens_per_block}"
        )
    ids = tuple(table[ordinals.start : ordinals.stop])
    if HOLE in ids:
        hole = ordinals.start + ids.index(HOLE)
        raise CallerError(f"the block table has a hole among these tokens: wanted={tokens}, hole at block={hole}")
    return BlockRange(ordinals, ids)
