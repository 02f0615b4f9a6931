"""Which chunks of a session wait for memory, and which of them is next.

In:  the chunks of a session, in order; how far their prompt is computed; what is granted.
Out: the next chunk to grant.
Law: each is named until it is granted, and only while it is computed: the first of those that are. So where the first
     layers of a step are computed, its chunks of other layers keep nobody behind them waiting.
"""

from collections.abc import Sequence

from kv_core.spans import Span
from kv_transfer.plan.frontier import Frontier
from kv_transfer.plan.plan import Chunk, needed


class Ungranted:
    """Of one session that wants these tokens."""

    def __init__(self, chunks: Sequence[Chunk], tokens: Span) -> None:
        self._chunks = chunks
        self._tokens = tokens
        self._first = 0
        self._granted: set[int] = set()
        """Behind the first one that is not."""

    def next(self, computed: Frontier) -> int | None:
        """The first chunk that is computed and not granted; None if there is none."""
        for seq in range(self._first, len(self._chunks)):
            wanted = needed(self._chunks[seq], self._tokens)
            if seq not in self._granted and computed.covers(wanted, self._chunks[seq].piece.layers):
                return seq
            if wanted.stop > computed.stop:
                # Chunks are in order of their last tokens.
                return None
        return None

    def grant(self, seq: int) -> None:
        """This one is granted."""
        self._granted.add(seq)
        while self._first in self._granted:
            self._granted.remove(self._first)
            self._first += 1
