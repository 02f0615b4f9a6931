"""Which tokens of a sequence each context-parallel rank holds, and where among its own blocks.

In:  how an instance deals the blocks of a sequence, the sequence's length, a context rank.
Out: TokenShare: its runs of global tokens; the place of each run among the rank's own tokens.
Law: the shares of all context ranks cover the sequence once. A rank may hold nothing. Transfer spec 5.9; defect A6.

A rank's own block table lists only its own blocks, ascending; `local` turns global tokens into positions there.

    7 blocks over 4 ranks     contiguous   |0 1|2 3|4 5|6|      round robin   |0 4|1 5|2 6|3|
"""

from dataclasses import dataclass
from typing import Literal

from kv_core.errors import CallerError
from kv_core.spans import Span, ceil_div

ContextCut = Literal["contiguous", "round_robin"]


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The part of one sequence that one of `num_ranks` context ranks holds."""

    cut: ContextCut
    num_ranks: int
    rank: int
    tokens_per_block: int
    num_tokens: int

    @property
    def blocks(self) -> range:
        """Global ordinals of the rank's blocks, ascending; its own ordinal of each is the position here."""
        num_blocks = ceil_div(self.num_tokens, self.tokens_per_block)
        if self.cut == "round_robin":
            return range(self.rank, num_blocks, self.num_ranks)
        each, rest = divmod(num_blocks, self.num_ranks)
        first = each * self.rank + min(self.rank, rest)
        return range(first, first + each + (self.rank < rest))

    @property
    def runs(self) -> tuple[Span, ...]:
        """The rank's tokens as few spans of global tokens, ascending."""
        blocks = self.blocks
        if not blocks:
            return ()
        if blocks.step == 1:
            return (self._tokens(blocks.start, blocks.stop),)
        return tuple(self._tokens(block, block + 1) for block in blocks)

    def local(self, tokens: Span) -> Span:
        """Where a span of global tokens lies among the rank's own.

        CallerError unless the rank holds all its blocks, as neighbours. Of the sequence's last block all tokens count.
        """
        blocks, wanted = self.blocks, tokens.blocks(self.tokens_per_block)
        is_held = wanted and wanted.start in blocks and wanted.stop - 1 in blocks
        if not is_held or (blocks.step > 1 and len(wanted) > 1):
            raise CallerError(f"no run of this rank holds these tokens: wanted={tokens}, context rank={self.rank}")
        shift = (wanted.start - blocks.index(wanted.start)) * self.tokens_per_block
        return Span(tokens.start - shift, tokens.stop - shift)

    def _tokens(self, start: int, stop: int) -> Span:
        size = self.tokens_per_block
        return Span(start * size, min(stop * size, self.num_tokens))
