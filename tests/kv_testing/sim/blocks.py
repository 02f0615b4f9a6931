"""Blocks of simulated ranks, and copies into and out of them.

In:  the places of a rank; what is offered, ordered, and given up.
Out: SimCopier and SimCopies, which copy elements by the simulated clock; a direct door.
Law: blocks are scattered into only while their order is open, each element once; they are gathered only while their
     offer is not over, and overwritten after it. A token of a layer is gathered only once it was said to be computed.
"""

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from kv_core.ids import Rank, SessionId
from kv_core.spans import Span
from kv_testing.sim.clockwork import Process, check
from kv_testing.sim.network import Network
from kv_testing.sim.places import (
    NUM_LAYERS,
    NUM_TOKENS,
    Elements,
    Indices,
    Mask,
    Places,
    laid,
    own_tags,
    seen,
    wanted,
)
from kv_transfer.agent.cards import DirectCard
from kv_transfer.copies import CorruptBytes
from kv_transfer.direct.base import CannotMap
from kv_transfer.direct.book import Book, BookReader
from kv_transfer.direct.reads import Holding
from kv_transfer.gate import Gate
from kv_transfer.mover import Moved, Skipped
from kv_transfer.orders import BlockTables, Tables
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.plan import Chunk
from kv_transfer.protocol.messages import Ask

ALL, ALL_LAYERS = Span(0, NUM_TOKENS), Span(0, NUM_LAYERS)
NUM_CELLS, CELL_BYTES = 8, 512
POISON = np.uint64(0xDEAD_DEAD_DEAD_DEAD)


class SimCopier:
    """The blocks of one rank, and the copies into and out of them."""

    def __init__(self, places: Places) -> None:
        self.places = places
        num_elements = prod(places.shape)
        self.elements: Elements = np.zeros(num_elements, dtype=np.uint64)
        self.times_written = np.zeros(num_elements, dtype=np.int8)
        self.computed: dict[int, Mask] = {}
        """[layer, token] of each request whose blocks may be read: what is computed, and was said to be."""
        self.writable: set[BlockTables] = set()

    def fill(self, tables: BlockTables, transfer: int, tokens: Span = ALL, layers: Span = ALL_LAYERS) -> None:
        """What a prefill leaves in its blocks; these tokens in these of its layers."""
        self._computed_of(tables)[layers.start : layers.stop, tokens.start : tokens.stop] = True
        held, ours, new = (
            laid(self.places, tables.by_group),
            self.places.share.layers,
            layers & self.places.share.layers,
        )
        where = np.s_[
            new.start - ours.start : new.stop - ours.start, :, held.before(tokens.start) : held.before(tokens.stop)
        ]
        self.elements[held.places[where]] = own_tags(self.places, transfer)[where]

    def begin(self, tables: BlockTables) -> None:
        """The engine uses the blocks for something else; for those who look too early, or too late, they are poison."""
        self._computed_of(tables)
        self.elements[laid(self.places, tables.by_group).places] = POISON

    def poison(self, tables: BlockTables) -> None:
        """Likewise, and nobody may look any more."""
        self.begin(tables)
        del self.computed[self.places.slot_of(tables)]

    def gather(
        self, chunk: Chunk, tables: BlockTables, staged: memoryview, *, checksum: bool
    ) -> Callable[[], int | None]:
        def run() -> int | None:
            slot = self.places.slot_of(tables)
            check(slot >= 0, "tokens are read before they were said to be computed, and where:", chunk)
            check(slot in self.computed, "blocks are read after their request was reported as sent")
            layers, tokens = chunk.piece.layers, chunk.tokens
            computed = self.computed[slot][layers.start : layers.stop, tokens.start : tokens.stop]
            check(computed.all(), "tokens are read before they were said to be computed:", chunk)
            staged[:] = self.elements[self._where(chunk, tables.by_group)].tobytes()
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
            where = self._where(chunk, tables.by_group)
            self._write(where, np.frombuffer(staged, np.uint64).reshape(where.shape))

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
                source = mapping.copier._where(chunk, tuple(map(tuple, theirs.by_group)), theirs.first)
                self._write(self._where(chunk, tables.by_group), mapping.copier.elements[source])

        return run

    def check_arrived(self, tables: BlockTables, tokens: Span, stop: int, transfer: int, *, why: str) -> None:
        """Each wanted element before `stop` is here, and right."""
        held = laid(self.places, tables.by_group)
        num = held.before(stop)
        wrong = self.elements[held.places[..., :num]] != own_tags(self.places, transfer)[..., :num]
        is_right = not (wrong & seen(self.places, tokens)[..., :num]).any()
        check(is_right, "what is said to have arrived has not:", why, stop)

    def check_loaded(self, tables: BlockTables, tokens: Span, transfer: int, *, why: str) -> None:
        """Each wanted element is here, right, and was written once; no other of these blocks was touched."""
        where, is_wanted = laid(self.places, tables.by_group).places, wanted(self.places, tokens)
        wrong = self.elements[where] != own_tags(self.places, transfer)
        check(not (wrong & is_wanted).any(), "wrong bytes are reported as received:", why)
        miscounted = self.times_written[where] != is_wanted
        check(not (miscounted & is_wanted).any(), "an element was not moved exactly once:", why)
        check(not miscounted.any(), "elements that nobody asked for were moved:", why)

    def _computed_of(self, tables: BlockTables) -> Mask:
        return self.computed.setdefault(self.places.slot_of(tables), np.zeros((NUM_LAYERS, NUM_TOKENS), np.bool_))

    def _write(self, where: Indices, content: Elements) -> None:
        self.elements[where] = content
        self.times_written[where] += 1

    def _where(self, chunk: Chunk, by_group: Tables, skipped: int = 0) -> Indices:
        """[layer, head, token] of the chunk, among our elements."""
        where = laid(self.places, by_group, skipped).of(chunk, self.places.share)
        check(where is not None, "tokens of another context rank are moved:", chunk)
        assert where is not None
        return where


class SimMapping:
    """The blocks of another rank, at hand."""

    def __init__(self, network: Network, copier: SimCopier, book: BookReader) -> None:
        self.copier = copier
        self.book = book
        self.groups = tuple(copier.places.groups)
        self._network = network
        network.num_mapped += 1

    def close(self) -> None:
        self._network.num_mapped -= 1


@dataclass(frozen=True)
class SimDirect:
    """A `DirectDoor`: who is alive can be mapped."""

    network: Network
    name: bytes
    memory: memoryview
    book: Book

    @classmethod
    def of(cls, network: Network, name: bytes) -> "SimDirect":
        memory = memoryview(bytearray(NUM_CELLS * CELL_BYTES))
        network.books[name] = memory
        return cls(network, name, memory, Book(memory, CELL_BYTES))

    def close(self) -> None:
        self.book.close()

    def card(self) -> DirectCard:
        return DirectCard(kind="sim", host="sim", blob=self.name)

    def can_map(self, card: DirectCard) -> bool:
        return True

    def map(self, card: DirectCard, state: CacheState, rank: Rank) -> SimMapping:
        process, copier = self.network.mappable.get(card.blob, (None, None))
        if process is None or not process.is_alive:
            raise CannotMap("its owner is dead, or never was")
        return SimMapping(self.network, copier, BookReader(self.network.books[card.blob], CELL_BYTES))


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
