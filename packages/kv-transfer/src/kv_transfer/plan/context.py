"""Which tokens of a sequence each context-parallel rank holds, and where among its own blocks.

In:  how an instance deals the blocks of a sequence, the sequence's length, a context rank.
Out: TokenShare: its runs of global tokens; the place of each run among the rank's own tokens.
Law: the shares of all context ranks cover the sequence once. A rank may hold nothing. Transfer spec 5.9; defect A6.

A rank's own block table lists only its own blocks, ascending; `local` turns global tokens into positions there.

    7 blocks over 4 ranks     contiguous   |0 1|2 3|4 5|6|      round robin   |0 4|1 5|2 6|3|
    9 blocks, 2 a deal        contiguous   |0 1 2 3|4 5|6 7|8|  round robin   |0 1 8|2 3|4 5|6 7|
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kv_core.errors import CallerError
from kv_core.spans import Span, ceil_div

ContextCut = Literal["contiguous", "round_robin"]


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The part of one sequence that one of `num_ranks` context ranks holds; `blocks_per_deal` blocks go together."""

    cut: ContextCut
    num_ranks: int
    rank: int
    tokens_per_block: int
    num_tokens: int
    blocks_per_deal: int = 1

    @property
    def blocks(self) -> Sequence[int]:
        """Global ordinals of the rank's blocks, ascending; its own ordinal of each is the position here."""
        deals, each, num_blocks = self._deals, self.blocks_per_deal, ceil_div(self.num_tokens, self.tokens_per_block)
        if each == 1:
            return deals
        if deals.step == 1:
            return range(deals.start * each, min(deals.stop * each, num_blocks))
        return tuple(block for deal in deals for block in range(deal * each, min((deal + 1) * each, num_blocks)))

    @property
    def runs(self) -> tuple[Span, ...]:
        """The rank's tokens as few spans of global tokens, ascending."""
        deals = self._deals
        if not deals:
            return ()
        if deals.step == 1:
            return (self._tokens(deals.start, deals.stop),)
        return tuple(self._tokens(deal, deal + 1) for deal in deals)

    def local(self, tokens: Span) -> Span:
        """Where a span of global tokens lies among the rank's own.

        CallerError unless the rank holds all its blocks, as neighbours. Of the sequence's last block all tokens count.
        """
        deals, wanted = self._deals, tokens.blocks(self._tokens_per_deal)
        is_held = wanted and wanted.start in deals and wanted.stop - 1 in deals
        if not is_held or (deals.step > 1 and len(wanted) > 1):
            raise CallerError(f"no run of this rank holds these tokens: wanted={tokens}, context rank={self.rank}")
        shift = (wanted.start - deals.index(wanted.start)) * self._tokens_per_deal
        return Span(tokens.start - shift, tokens.stop - shift)

    @property
    def _tokens_per_deal(self) -> int:
        return self.tokens_per_block * self.blocks_per_deal

    @property
    def _deals(self) -> range:
        """What the rank is dealt, ascending, of all deals of the sequence."""
        num_deals = ceil_div(self.num_tokens, self._tokens_per_deal)
        if self.cut == "round_robin":
            return range(self.rank, num_deals, self.num_ranks)
        each, rest = divmod(num_deals, self.num_ranks)
        first = each * self.rank + min(self.rank, rest)
        return range(first, first + each + (self.rank < rest))

    def _tokens(self, start: int, stop: int) -> Span:
        size = self._tokens_per_deal
        return Span(start * size, min(stop * size, self.num_tokens))
