"""The copies a session makes, as jobs for the mover.

In:  a chunk, a block table of our own engine, staged bytes.
Out: callables that the mover runs: one fills staging from blocks, one fills blocks from verified staging.
Law: nothing is scattered that has not been verified, if there is a checksum; nothing at all once the load has failed.
"""

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from kv_core.errors import PeerError
from kv_core.ids import BlockId, SessionId
from kv_transfer.checksum import Summer
from kv_transfer.faults import Faults
from kv_transfer.formatter.select import formatter_for
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.plan import Chunk
from kv_transfer.plan.ranges import BlockRange, block_range
from kv_transfer.pools import PagedCaches


class CorruptBytes(PeerError):
    """What arrived is not what was sent."""


class Copier:
    """Makes jobs over one rank's caches. The jobs run in the mover's thread, one at a time."""

    def __init__(self, caches: PagedCaches, faults: Faults) -> None:
        self._caches = caches
        self._faults = faults
        self._summer = Summer()

    def gather(
        self, chunk: Chunk, table: Sequence[int], ours: CacheState, staged: Tensor, *, checksum: bool
    ) -> Callable[[], int | None]:
        """A job that fills `staged`, uint8 [chunk.num_bytes], from our blocks, and answers its checksum if wanted."""

        def run() -> int | None:
            formatter_for(ours).split(chunk, self._caches, self._blocks(chunk, table), staged)
            return self._summer.checksum(staged) if checksum else None

        return run

    def scatter(
        self,
        session: SessionId,
        chunk: Chunk,
        table: Sequence[int],
        theirs: CacheState,
        staged: Tensor,
        checksum: int | None,
        is_wanted: Callable[[], bool],
    ) -> Callable[[], None]:
        """A job that verifies `staged` and fills our blocks from it, unless nobody wants that any more."""

        def run() -> None:
            if not is_wanted():
                return
            if checksum is not None and (found := self._summer.checksum(staged)) != checksum:
                raise CorruptBytes(f"checksums of chunk {chunk.seq} differ: ours={found}, theirs={checksum}")
            self._faults.after_verify(session, chunk, staged)
            formatter_for(theirs).concat(chunk, self._caches, self._blocks(chunk, table), staged)

        return run

    def _blocks(self, chunk: Chunk, table: Sequence[int]) -> BlockRange:
        return block_range(cast("Sequence[BlockId]", table), chunk.tokens, self._caches.tokens_per_block)
