"""The copies a session makes, as jobs for the mover.

In:  a chunk, the block tables of our own engine, staged bytes.
Out: callables that the mover runs: one fills staging from blocks, one fills blocks from verified staging.
Law: nothing is scattered that has not been verified, if there is a checksum; nothing at all once the load has failed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from torch import Tensor

from kv_core.errors import PeerError
from kv_core.ids import BlockId, Rank, SessionId
from kv_transfer.checksum import Summer, known
from kv_transfer.direct.base import Read, RemoteCaches
from kv_transfer.direct.reads import Holding, reads_of
from kv_transfer.faults import Faults
from kv_transfer.formatter.conversion import conversion_of
from kv_transfer.formatter.select import formatter_for
from kv_transfer.mover import Steps
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.plan import Chunk, Piece
from kv_transfer.plan.ranges import BlockRange, block_range
from kv_transfer.pools import PagedCaches
from kv_transfer.profiling import NO_RANGES, Ranges
from kv_transfer.protocol.messages import Ask


class CorruptBytes(PeerError):
    """What arrived is not what was sent."""


class Copier:
    """Makes jobs over one rank's caches. The jobs run in the mover's thread, one at a time."""

    def __init__(
        self, caches: PagedCaches, state: CacheState, rank: Rank, faults: Faults, ranges: Ranges = NO_RANGES
    ) -> None:
        self._caches = caches
        self._state = state
        self._rank = rank
        self._context_rank = state.share_of(rank).context_rank
        self._faults = faults
        self._ranges = ranges
        self._summer = Summer()

    def gather(self, chunk: Chunk, tables: BlockTables, staged: Tensor, *, checksum: bool) -> Callable[[], Steps]:
        """A job that fills `staged`, uint8 [chunk.num_bytes], from our blocks, and answers its checksum if wanted."""

        def run() -> Steps:
            formatter = formatter_for(self._state)
            with self._ranges.around("gather"):
                for part, blocks, dense in self._parts(chunk, tables, staged):
                    formatter.split(part, self._caches, blocks, dense)
                found = self._summer.checksum(staged) if checksum else None
            return (yield from known(found))

        return run

    def scatter(
        self,
        session: SessionId,
        chunk: Chunk,
        tables: BlockTables,
        theirs: CacheState,
        staged: Tensor,
        checksum: int | None,
        is_wanted: Callable[[], bool],
    ) -> Callable[[], Steps]:
        """A job that verifies `staged` and fills our blocks from it, unless nobody wants that any more."""

        def run() -> Steps:
            if not is_wanted():
                return None
            if checksum is not None:
                found = yield from known(self._summer.checksum(staged))
                if found != checksum:
                    raise CorruptBytes(f"checksums of chunk {chunk.seq} differ: ours={found}, theirs={checksum}")
                if not is_wanted():
                    return None
            with self._ranges.around("scatter"):
                self._faults.after_verify(session, chunk, staged)
                formatter, conversion = formatter_for(theirs), conversion_of(theirs, self._state)
                for part, blocks, dense in self._parts(chunk, tables, staged):
                    formatter.concat(part, self._caches, blocks, dense, conversion)
            return None

        return run

    def read(
        self,
        ask: Ask,
        tables: BlockTables,
        theirs: Holding,
        mapping: RemoteCaches,
        is_wanted: Callable[[], bool],
    ) -> Callable[[], None]:
        """A job that fills our blocks from those of a mapped peer, unless nobody wants that any more."""

        def run() -> None:
            if not is_wanted():
                return
            with self._ranges.around("direct read"):
                # All of them first: what does not fit is found before anything is written.
                for what in self.reads(ask, tables, theirs):
                    mapping.read(what, self._caches)

        return run

    def reads(self, ask: Ask, tables: BlockTables, theirs: Holding) -> list[Read]:
        """The copies that fill our blocks from those of a peer whose blocks can be read."""
        ours = Holding(self._state, self._rank, self._caches.groups, 0, tables.by_group)
        return list(reads_of(ask, ours, theirs))

    def _parts(self, chunk: Chunk, tables: BlockTables, staged: Tensor) -> Iterator[tuple[Chunk, BlockRange, Tensor]]:
        """The chunk cut where our layers change their block table: (part in our own tokens, its blocks, its bytes)."""
        tokens = self._state.token_share(self._context_rank, tables.num_tokens).local(chunk.tokens)
        layer_bytes = chunk.num_bytes // len(chunk.piece.layers)
        first = chunk.piece.layers.start
        for layers, group in self._caches.by_group(chunk.piece.layers):
            dense = staged[(layers.start - first) * layer_bytes : (layers.stop - first) * layer_bytes]
            part = Chunk(chunk.seq, Piece(layers, chunk.piece.heads), tokens, len(layers) * layer_bytes)
            table = cast("Sequence[BlockId]", tables.by_group[group])
            yield part, block_range(table, tokens, self._caches.tokens_per_block), dense
