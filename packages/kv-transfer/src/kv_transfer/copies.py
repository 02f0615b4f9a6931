"""The copies a session makes, as jobs for the mover.

In:  a chunk, the block tables of our own engine, staged bytes.
Out: callables that the mover runs: one fills staging from blocks, one fills blocks from verified staging.
Law: no chunk has arrived that has not been verified, if there is a checksum; nothing is scattered once the load has
     failed. On a GPU the checksum is taken in the very pass that copies: there bytes that turn out to be wrong lie in
     blocks of a load that fails, which nobody reads; elsewhere they are not scattered at all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import cast

from torch import Tensor

from kv_core.errors import PeerError
from kv_core.ids import BlockId, Rank, SessionId
from kv_kernels.block_table import Copied
from kv_transfer.checksum import Pending, Summer, known, pending
from kv_transfer.direct.base import Read, RemoteCaches
from kv_transfer.direct.reads import Holding, reads_of
from kv_transfer.faults import Faults, NoFaults
from kv_transfer.formatter.base import Formatter
from kv_transfer.formatter.conversion import Conversion, conversion_of
from kv_transfer.formatter.select import formatter_for
from kv_transfer.mover import Look, Run, Steps
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.plan import Chunk, Piece
from kv_transfer.plan.ranges import BlockRange, block_range
from kv_transfer.pools import PagedCaches
from kv_transfer.profiling import NO_RANGES, Ranges
from kv_transfer.protocol.messages import Ask
from kv_transfer.request_blocks import Shelf, pays


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
        # One each way, since each way has a stream.
        self._out, self._in = Shelf(caches), Shelf(caches)
        self._is_tabled = pays(caches)
        self._verifies_in_passing = self._is_tabled and type(faults) is NoFaults
        """Why not with faults: a test changes bytes between their verification and the scatter."""

    def gather(self, chunk: Chunk, tables: BlockTables, staged: Tensor, *, checksum: bool) -> Run:
        """A job that fills `staged`, uint8 [chunk.num_bytes], from our blocks, and answers its checksum if wanted."""

        def run() -> int | Look | None:
            formatter, sums = formatter_for(self._state), list[Tensor]()
            with self._ranges.around("gather"):
                for part, group, dense, at in self._parts(chunk, tables, staged):
                    if self._is_tabled:
                        blocks, summed_at = self._out.take(tables, group), at if checksum else None
                        sums += _sums(formatter.split_blocks(part, self._caches, blocks, dense, summed_at))
                    else:
                        formatter.split(part, self._caches, self._blocks(tables, group, part), dense)
                found = self._checksum(staged, sums) if checksum else None
            return found.known if isinstance(found, Pending) else found

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
    ) -> Run:
        """A job that verifies `staged` and fills our blocks from it, unless nobody wants that any more."""

        def run() -> Steps | Look | None:
            if not is_wanted():
                return None
            conversion = conversion_of(theirs, self._state)
            fill = partial(self._concat, chunk, tables, formatter_for(theirs), staged, conversion)
            if checksum is not None and self._verifies_in_passing and conversion is None:
                with self._ranges.around("scatter"):
                    found = self._checksum(staged, fill(is_summed=True))
                return partial(_verify, chunk, found, checksum)
            return verified_first(fill)

        def verified_first(fill: Callable[..., object]) -> Steps:
            if checksum is not None:
                _verify(chunk, (yield from known(self._summer.checksum(staged))), checksum)
                if not is_wanted():
                    return None
            with self._ranges.around("scatter"):
                self._faults.after_verify(session, chunk, staged)
                fill(is_summed=False)
            return None

        return run

    def _concat(
        self,
        chunk: Chunk,
        tables: BlockTables,
        formatter: Formatter,
        staged: Tensor,
        conversion: Conversion | None,
        *,
        is_summed: bool,
    ) -> list[Tensor]:
        """Fills our blocks; the parts of the checksum, if it is wanted."""
        sums = list[Tensor]()
        for part, group, dense, at in self._parts(chunk, tables, staged):
            if self._is_tabled:
                blocks, summed_at = self._in.take(tables, group), at if is_summed else None
                sums += _sums(formatter.concat_blocks(part, self._caches, blocks, dense, summed_at, conversion))
            else:
                formatter.concat(part, self._caches, self._blocks(tables, group, part), dense, conversion)
        return sums

    def _checksum(self, staged: Tensor, sums: list[Tensor]) -> int | Pending:
        """Of what the copies have added up; of the bytes, where they have not."""
        return pending(sums) if sums else self._summer.checksum(staged)

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

    def _parts(self, chunk: Chunk, tables: BlockTables, staged: Tensor) -> Iterator[tuple[Chunk, int, Tensor, int]]:
        """The chunk cut where our layers change their block table.

        (part in our own tokens, its layer group, its bytes, which byte of the chunk is their first)
        """
        tokens = self._state.token_share(self._context_rank, tables.num_tokens).local(chunk.tokens)
        layer_bytes = chunk.num_bytes // len(chunk.piece.layers)
        first = chunk.piece.layers.start
        for layers, group in self._caches.by_group(chunk.piece.layers):
            at, num_bytes = (layers.start - first) * layer_bytes, len(layers) * layer_bytes
            part = Chunk(chunk.seq, Piece(layers, chunk.piece.heads), tokens, num_bytes)
            yield part, group, staged[at : at + num_bytes], at

    def _blocks(self, tables: BlockTables, group: int, part: Chunk) -> BlockRange:
        table = cast("Sequence[BlockId]", tables.by_group[group])
        return block_range(table, part.tokens, self._caches.tokens_per_block)


def _sums(copies: Iterable[Copied]) -> list[Tensor]:
    return [copied.sums for copied in copies if copied.sums is not None]


def _verify(chunk: Chunk, found: int | Pending, stated: int) -> None:
    """CorruptBytes if this is not the checksum that was stated; what is pending is known by now."""
    ours = found.known() if isinstance(found, Pending) else found
    if ours != stated:
        raise CorruptBytes(f"checksums of chunk {chunk.seq} differ: ours={ours}, theirs={stated}")
