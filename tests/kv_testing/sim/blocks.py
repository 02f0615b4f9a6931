"""Blocks of simulated ranks, and copies into and out of them.

In:  a shape; what is offered, ordered, and given up.
Out: the elements of every request; SimCopier and SimCopies, which copy them by the simulated clock; a direct door.
Law: an element is a number that names its request, layer, head and token. Blocks are scattered into only while their
     order is open, each element once; they are gathered only while their offer is not over, and overwritten after it. A
     token is gathered only once it was said to be computed.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_core.ids import Rank, SessionId
from kv_core.spans import Span, ceil_div
from kv_testing.layouts import make_state
from kv_testing.sim.clockwork import Process, check
from kv_testing.sim.network import Network
from kv_testing.tagged import World, windows_of
from kv_transfer.agent.cards import DirectCard
from kv_transfer.copies import CorruptBytes
from kv_transfer.direct.base import CannotMap
from kv_transfer.direct.reads import Holding
from kv_transfer.gate import Gate
from kv_transfer.mover import Moved, Skipped
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import BlockLayout, CacheState, ParallelLayout
from kv_transfer.plan.context import ContextCut
from kv_transfer.plan.plan import Chunk
from kv_transfer.protocol.messages import Ask

NUM_LAYERS, NUM_HEADS, NUM_TOKENS, MAX_REQUESTS = 2, 4, 12, 8
ALL = Span(0, NUM_TOKENS)
POISON = np.uint64(0xDEAD_DEAD_DEAD_DEAD)
Elements = npt.NDArray[np.uint64]


@lru_cache
def state_of(
    tp: int, stages: tuple[int, ...], tokens_per_block: int, cp: int, cut: ContextCut, windows: tuple[int, ...]
) -> CacheState:
    """8 bytes for each (layer, head, token)."""
    return make_state(
        fingerprint="model",
        dtype="float32",
        head_size=2,
        num_planes=1,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
        tokens_per_block=tokens_per_block,
        windows=windows,
        layout=BlockLayout("head_major"),
        parallel=ParallelLayout.even(tp, list(stages), NUM_HEADS, cp=cp, context_cut=cut),
    )


@lru_cache
def tags(transfer: int) -> Elements:
    """[layer, head, token] of one transfer; never 0."""
    layers, heads, tokens = np.ogrid[:NUM_LAYERS, :NUM_HEADS, :NUM_TOKENS]
    return ((transfer + 1) << 24 | layers << 16 | heads << 8 | tokens).astype(np.uint64)


@lru_cache
def tables_of(slot: int, state: CacheState, rank: Rank) -> BlockTables:
    """The blocks of one request, nobody else's; layers with another window have them in another order."""
    num_blocks = ceil_div(NUM_TOKENS, state.tokens_per_block)
    table = [slot * num_blocks + (5 * block + slot) % num_blocks for block in range(num_blocks)]
    windows = windows_of(state, state.share_of(rank))
    return BlockTables(NUM_TOKENS, tuple((*table[w % num_blocks :], *table[: w % num_blocks]) for w in windows))


class SimCopier:
    """The blocks of one rank, and the copies into and out of them."""

    def __init__(self, state: CacheState, rank: Rank) -> None:
        self.share = share = state.share_of(rank)
        size = state.tokens_per_block
        num_places = MAX_REQUESTS * ceil_div(NUM_TOKENS, size) * size
        self.elements: Elements = np.zeros((len(share.layers), len(share.heads), num_places), dtype=np.uint64)
        self.times_written = np.zeros(self.elements.shape, dtype=np.int8)
        self.num_computed: dict[int, int] = {}
        """Of each request whose blocks may be read: so many tokens are computed, and were said to be."""
        self.writable: set[BlockTables] = set()
        self._size = size
        self._windows = [state.window_of(layer) for layer in share.layers]
        groups = windows_of(state, share)
        self._groups = [groups.index(window) for window in self._windows]
        # The rule of the spec (5.9), block by block: World has it, and not from the plan.
        self.own_blocks = World(state, {}, (), NUM_TOKENS).blocks_of(rank)
        self._places: dict[tuple[tuple[int, ...], int], npt.NDArray[np.int64]] = {}

    def fill(self, tables: BlockTables, transfer: int, computed: Span = ALL) -> None:
        """What a prefill leaves in its blocks; `computed` follows what was computed before."""
        self.num_computed[self._slot_of(tables)] = computed.stop
        for layer, (held, places) in enumerate(self._held(tables)):
            new = (held >= computed.start) & (held < computed.stop)
            self.elements[layer][:, places[new]] = self._tags(transfer, layer)[:, held[new]]

    def begin(self, tables: BlockTables) -> None:
        """The engine uses the blocks for something else; for those who look too early, or too late, they are poison."""
        self.num_computed.setdefault(self._slot_of(tables), 0)
        for layer, (_, places) in enumerate(self._held(tables)):
            self.elements[layer][:, places] = POISON

    def poison(self, tables: BlockTables) -> None:
        """Likewise, and nobody may look any more."""
        self.begin(tables)
        del self.num_computed[self._slot_of(tables)]

    def gather(
        self, chunk: Chunk, tables: BlockTables, staged: memoryview, *, checksum: bool
    ) -> Callable[[], int | None]:
        def run() -> int | None:
            computed = self.num_computed.get(self._slot_of(tables))
            check(computed is not None, "blocks are read after their request was reported as sent")
            check(chunk.tokens.stop <= (computed or 0), "tokens are read before they were said to be computed:", chunk)
            staged[:] = b"".join(self.elements[layer][where].tobytes() for layer, where in self._where(chunk, tables))
            return zlib.crc32(staged) if checksum else None

        return run

    def scatter(
        self,
        session: SessionId,
        chunk: Chunk,
        tables: BlockTables,
        theirs: CacheState,
        staged: memoryview,
        checksum: int | None,
        is_wanted: Callable[[], bool],
    ) -> Callable[[], None]:
        def run() -> None:
            if not is_wanted():
                return
            if checksum is not None and zlib.crc32(staged) != checksum:
                raise CorruptBytes("checksums differ")
            check(tables in self.writable, "blocks are written after their order was reported")
            shape = (len(chunk.piece.layers), len(chunk.piece.heads), len(chunk.tokens))
            dense = np.frombuffer(staged, np.uint64).reshape(shape)
            for part, (layer, where) in zip(dense, self._where(chunk, tables), strict=True):
                self.elements[layer][where] = part
                self.times_written[layer][where] += 1

        return run

    def read(
        self, ask: Ask, tables: BlockTables, theirs: Holding, mapping: "SimMapping", is_wanted: Callable[[], bool]
    ) -> Callable[[], None]:
        """Whatever lies in the peer's blocks now: whether they were still offered is for the sessions to prove."""

        def run() -> None:
            if not is_wanted():
                return
            check(tables in self.writable, "blocks are written after their order was reported")
            for piece in ask.pieces:
                chunk = Chunk(0, piece, ask.tokens if piece.tokens is None else piece.tokens, 1)
                source = mapping.copier._where(chunk, BlockTables(0, theirs.by_group), theirs.first)
                for (layer, where), (their_layer, their_where) in zip(self._where(chunk, tables), source, strict=True):
                    self.elements[layer][where] = mapping.copier.elements[their_layer][their_where]
                    self.times_written[layer][where] += 1

        return run

    def check_arrived(self, tables: BlockTables, tokens: Span, stop: int, transfer: int, *, why: str) -> None:
        """Each wanted element before `stop` is here, and right."""
        for layer, (held, places) in enumerate(self._held(tables)):
            window = self._windows[layer]
            first = max(tokens.start, tokens.stop - window + 1) if window else tokens.start
            is_here = (held >= first) & (held < stop)
            found, wanted = self.elements[layer][:, places[is_here]], self._tags(transfer, layer)[:, held[is_here]]
            check(bool((found == wanted).all()), "what is said to have arrived has not:", why, stop)

    def check_loaded(self, tables: BlockTables, tokens: Span, transfer: int, *, why: str) -> None:
        """Each wanted element is here, right, and was written once; no other of these blocks was touched."""
        for layer, (held, places) in enumerate(self._held(tables)):
            window = self._windows[layer]
            seen = max(0, tokens.stop - window + 1) if window else 0
            first = max(tokens.start, seen // self._size * self._size)
            is_wanted = (held >= first) & (held < tokens.stop)
            wanted = self._tags(transfer, layer)[:, held[is_wanted]]
            found = self.elements[layer][:, places[is_wanted]]
            check(bool((found == wanted).all()), "wrong bytes are reported as received:", why)
            times = self.times_written[layer]
            check(bool((times[:, places[is_wanted]] == 1).all()), "an element was not moved exactly once:", why)
            check(not times[:, places[~is_wanted]].any(), "elements that nobody asked for were moved:", why)

    def _tags(self, transfer: int, layer: int) -> Elements:
        heads = self.share.heads
        return tags(transfer)[self.share.layers.start + layer, heads.start : heads.stop]

    def _held(self, tables: BlockTables) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """(global tokens held, their places) of each layer."""
        for group in self._groups:
            places = self._places_of(tables.by_group[group])
            held = np.flatnonzero(places >= 0)
            yield held, places[held]

    def _where(self, chunk: Chunk, tables: BlockTables, skipped: int = 0) -> Iterator[tuple[int, Any]]:
        """(layer, index of the chunk's elements in it: [heads, places])."""
        heads, first = chunk.piece.heads, self.share.heads.start
        for layer in chunk.piece.layers:
            number = layer - self.share.layers.start
            table = tables.by_group[self._groups[number]]
            places = self._places_of(table, skipped)[chunk.tokens.start : chunk.tokens.stop]
            check(bool((places >= 0).all()), "tokens of another context rank are moved:", chunk)
            yield number, (slice(heads.start - first, heads.stop - first), places)

    def _slot_of(self, tables: BlockTables) -> int:
        """Whose blocks these are; those of a rank that holds nothing are nobody's."""
        return next((table[0] // ceil_div(NUM_TOKENS, self._size) for table in tables.by_group if table), -1)

    def _places_of(self, table: tuple[int, ...], skipped: int = 0) -> npt.NDArray[np.int64]:
        """The place of each global token; -1 for those of other context ranks, and of blocks that are left out."""
        if (table, skipped) not in self._places:
            places = np.full(NUM_TOKENS, -1, dtype=np.int64)
            for block, place in zip(self.own_blocks[skipped:], table, strict=False):
                tokens = np.arange(block * self._size, min((block + 1) * self._size, NUM_TOKENS))
                places[tokens] = place * self._size + tokens % self._size
            self._places[table, skipped] = places
        return self._places[table, skipped]


class SimMapping:
    """The blocks of another rank, at hand."""

    def __init__(self, network: Network, copier: SimCopier) -> None:
        self.copier = copier
        self.groups = tuple(copier._groups)
        self._network = network
        network.num_mapped += 1

    def close(self) -> None:
        self._network.num_mapped -= 1


@dataclass(frozen=True)
class SimDirect:
    """A `DirectDoor`: who is alive can be mapped."""

    network: Network
    name: bytes

    def card(self) -> DirectCard:
        return DirectCard(kind="sim", host="sim", blob=self.name)

    def can_map(self, card: DirectCard) -> bool:
        return True

    def map(self, card: DirectCard, state: CacheState, rank: Rank) -> SimMapping:
        process, copier = self.network.mappable.get(card.blob, (None, None))
        if process is None or not process.is_alive:
            raise CannotMap("its owner is dead, or never was")
        return SimMapping(self.network, copier)


class SimCopies:
    """One copy after the other, each taking its time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._jobs: deque[tuple[Callable[[], int | None], Callable[[Moved], None], Gate | None]] = deque()

    def submit(
        self,
        run: Callable[[], int | None],
        after: None,
        then: Callable[[Moved], None],
        gate: Gate | None = None,
        **_: object,
    ) -> None:
        """In turn: each lane is the only one, and each copy alone."""
        self._jobs.append((run, then, gate))
        if len(self._jobs) == 1:
            self._begin()

    def _begin(self) -> None:
        clockwork = self._process.clockwork
        clockwork.after(clockwork.copy_s * clockwork.dice.random(), self._finish)

    def _finish(self) -> None:
        """Its thread stops and dies with its process."""
        if self._process.is_stopped and self._process.is_alive:
            self._process.on_resume.append(self._finish)
            return
        if not self._process.is_alive:
            return
        run, then, gate = self._jobs.popleft()
        moved = _moved(run, gate)
        if self._jobs:
            self._begin()
        self._process.do(lambda: then(moved))


def _moved(run: Callable[[], int | None], gate: Gate | None) -> Moved:
    """The whole copy happens at its end."""
    if gate is not None and not gate.enter():
        return Moved(None, Skipped("taken back"), 0.0)
    try:
        return Moved(run(), None, 0.0)
    except (CorruptBytes, CannotMap) as error:
        return Moved(None, error, 0.0)
    finally:
        if gate is not None:
            gate.leave()
