"""How far the chunks of one session have come, in tokens.

In:  the chunks of a session, in order; which of them are in our blocks.
Out: the token before which nothing is missing.
Law: it never goes back. Chunks end in any order, and those of several pieces hold the same tokens.
"""

from collections.abc import Sequence
from itertools import accumulate

from kv_core.spans import Span
from kv_transfer.plan.plan import Chunk


class Watermark:
    """Of one session that wants these tokens."""

    def __init__(self, chunks: Sequence[Chunk], tokens: Span) -> None:
        self._tokens = tokens
        # Of each chunk and those behind it, the first token that any of them holds.
        firsts = accumulate((chunk.tokens.start for chunk in reversed(chunks)), min)
        self._missing_from = [*reversed(list(firsts)), tokens.stop]
        self._next = 0
        self._ahead: set[int] = set()

    @property
    def stop(self) -> int:
        """Nothing of the tokens before this one is missing."""
        return min(max(self._missing_from[self._next], self._tokens.start), self._tokens.stop)

    def reach(self, seq: int) -> None:
        """One more chunk is in our blocks."""
        self._ahead.add(seq)
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1
