"""What every direct path can do: show a peer our caches, and map those of a peer.

In:  our PagedCaches; the DirectCard of a peer.
Out: DirectDoor, one a rank; RemoteCaches, one a peer that is mapped.
Law: a mapping is read, never written. Whoever opens it closes it when nothing reads it any more: as long as it is open,
     the memory of the peer stays taken, even if the peer is dead.
"""

from dataclasses import dataclass
from typing import Protocol, TypedDict

from kv_core.errors import PeerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_kernels.layout import Corner
from kv_transfer.agent.cards import DirectCard
from kv_transfer.direct.book import Book, BookReader
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.part import Part
from kv_transfer.pools import PagedCaches


class CannotMap(PeerError):
    """The peer's caches cannot be read from here; another path can still carry them."""


@dataclass(frozen=True, slots=True)
class Read:
    """One copy: some layers, from the peer's part to ours; both parts have as many tokens."""

    layers: Span
    num_heads: int
    source: Part
    target: Part

    @property
    def extent(self) -> "Extent":
        """What is copied and where it begins on both sides, in the words of the kernels."""
        return Extent(
            num_tokens=self.target.num_tokens,
            num_heads=self.num_heads,
            at=Corner(self.target.first_token, self.target.first_head),
            source_at=Corner(self.source.first_token, self.source.first_head),
        )


class Extent(TypedDict):
    """Keyword arguments of `copy_blocks` and `peer_copy`."""

    num_tokens: int
    num_heads: int
    at: Corner
    source_at: Corner


class RemoteCaches(Protocol):
    """The caches of one peer, mapped into this process."""

    @property
    def groups(self) -> tuple[int, ...]:
        """The layer group of each of the peer's layers; none at all if all share one block table."""

    @property
    def book(self) -> BookReader | None:
        """What the peer offers, if it can be seen from here."""

    def read(self, what: Read, into: PagedCaches) -> None:
        """Queues the copy on the current stream; CallerError or ValueError if the parts do not fit each other."""

    def close(self) -> None:
        """Ends the mapping; nothing may read it any more. Idempotent."""


class DirectDoor(Protocol):
    """One rank's end of a direct path."""

    def card(self) -> DirectCard | None:
        """What a peer needs to map our caches; None if nobody can."""

    @property
    def book(self) -> Book | None:
        """Where we tell those who map our caches what we offer; None if nobody can see it."""

    def close(self) -> None:
        """Nothing that our book tells stands any more. Idempotent."""

    def can_map(self, card: DirectCard) -> bool:
        """Whether it is worth trying: the same kind of path, on the same host."""

    def map(self, card: DirectCard, state: CacheState, rank: Rank) -> RemoteCaches:
        """Maps the caches of a peer, which is this rank of that state.

        Takes milliseconds, and runs in the mover's thread. CannotMap if they cannot be, or are not of that state.
        """
