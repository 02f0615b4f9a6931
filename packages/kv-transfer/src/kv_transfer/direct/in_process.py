"""A direct path between ranks of one process: their caches are at hand.

In:  PagedCaches of all ranks of a hub.
Out: doors that map each other, for CPU and for one GPU.
Law: as `base`. A rank that is withdrawn can be mapped no more; what is mapped stays readable, as with a dead process.
"""

import secrets

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_kernels.block_copy import copy_blocks
from kv_transfer.agent.cards import DirectCard
from kv_transfer.direct.base import CannotMap, Read
from kv_transfer.direct.book import CELL_BYTES, NUM_CELLS, Book, BookReader
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.pools import PagedCaches

KIND = "in-process"


class InProcessHub:
    """Who is where."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self.caches: dict[bytes, PagedCaches] = {}
        self.books: dict[bytes, memoryview] = {}
        self.num_open = 0

    def door(self, caches: PagedCaches) -> "InProcessDoor":
        """The door of one more rank."""
        name = secrets.token_bytes(16)
        self.caches[name] = caches
        self.books[name] = memoryview(bytearray(NUM_CELLS * CELL_BYTES))
        return InProcessDoor(self, name)


class InProcessDoor:
    """A `DirectDoor` of one hub."""

    def __init__(self, hub: InProcessHub, name: bytes) -> None:
        self._hub = hub
        self._name = name
        self.book = Book(hub.books[name])

    def card(self) -> DirectCard | None:
        return DirectCard(kind=KIND, host=self._hub.name, blob=self._name)

    def can_map(self, card: DirectCard) -> bool:
        return (card.kind, card.host) == (KIND, self._hub.name)

    def map(self, card: DirectCard, state: CacheState, rank: Rank) -> "InProcessCaches":
        caches = self._hub.caches.get(card.blob)
        if caches is None:
            raise CannotMap(f"no such caches in this process: wanted={card.blob.hex()}, known={len(self._hub.caches)}")
        try:
            caches.check(state, state.share_of(rank))
        except CallerError as error:
            raise CannotMap(str(error)) from error
        return InProcessCaches(self._hub, caches, BookReader(self._hub.books[card.blob].toreadonly()))

    def close(self) -> None:
        self.book.close()

    def withdraw(self) -> None:
        """Nobody can map our caches from now on."""
        self._hub.caches.pop(self._name, None)


class InProcessCaches:
    """`RemoteCaches` that are in truth at hand."""

    def __init__(self, hub: InProcessHub, caches: PagedCaches, book: BookReader) -> None:
        self._hub = hub
        self.book: BookReader | None = book
        self._caches: PagedCaches | None = caches
        hub.num_open += 1

    @property
    def groups(self) -> tuple[int, ...]:
        return self._theirs.groups

    def read(self, what: Read, into: PagedCaches) -> None:
        for ours, theirs in zip(by_kind(into, what.layers), by_kind(self._theirs, what.layers), strict=True):
            copy_blocks(ours, what.target.block_ids, theirs, what.source.block_ids, **what.extent)

    def close(self) -> None:
        if self._caches is not None:
            self._caches = self.book = None
            self._hub.num_open -= 1

    @property
    def _theirs(self) -> PagedCaches:
        assert self._caches is not None, "law: what is closed is not read"
        return self._caches


def by_kind(caches: PagedCaches, layers: Span):  # type: ignore[no-untyped-def]
    """The planes of these layers, those of one kind (K, V) together."""
    planes = caches.planes_of_layers(layers)
    return [planes[kind :: caches.num_planes] for kind in range(caches.num_planes)]
