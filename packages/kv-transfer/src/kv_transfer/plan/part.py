"""Where some heads and tokens lie in one rank's planes.

In:  heads and tokens wanted, a rank's BlockRange and the Geometry of its blocks.
Out: a Part: block ids, and which token and head of them comes first.
Law: tokens are the rank's own. Where tiles are opaque, the token axis counts blocks, and only whole blocks move.
"""

from dataclasses import dataclass

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_transfer.plan.cache_state import PLAIN
from kv_transfer.plan.ranges import BlockRange


@dataclass(frozen=True, slots=True)
class Geometry:
    """The heads a rank holds, and how many tokens its blocks have, in which tiles."""

    heads: Span
    tokens_per_block: int
    tile: str = PLAIN


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of some blocks, from one head on; tokens are blocks where tiles are opaque."""

    block_ids: tuple[int, ...]
    first_token: int
    num_tokens: int
    first_head: int

    @classmethod
    def of(cls, heads: Span, tokens: Span, held: Geometry, block_range: BlockRange) -> "Part":
        """CallerError if heads or tokens are not held, or cut an opaque tile."""
        if not held.heads.covers(heads):
            raise CallerError(f"heads are not held: wanted={heads}, held={held.heads}")
        size, blocks = held.tokens_per_block, block_range.for_tokens(tokens, held.tokens_per_block)
        first_head = heads.start - held.heads.start
        if held.tile == PLAIN:
            return cls(blocks.ids, tokens.start - blocks.ordinals.start * size, len(tokens), first_head)
        if tokens.start % size or tokens.stop % size:
            raise CallerError(f"opaque tiles move only whole: tokens={tokens}, tokens per block={size}")
        return cls(blocks.ids, 0, len(blocks.ids), first_head)
