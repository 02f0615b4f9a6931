"""Caches that the agent knows: what ours tell a peer, and what those of a peer tell us.

In:  a rank's PagedCaches and its agent; the DirectCard of a peer.
Out: SharedCaches (registered, with a card), RemotePlanes (addresses in the peer's address space).
Law: a card describes planes as they lie. Whatever a peer says is bounded, and compared with its CacheState, before a
     byte is read; that its addresses lie in memory it has registered is for the transport to check.
"""

import logging
from bisect import bisect_right
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import torch

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_kernels.layout import MappedPlanes
from kv_transfer.agent.base import Agent
from kv_transfer.agent.cards import MAX_NAME_CHARS, DirectCard, MemoryKind
from kv_transfer.direct.base import CannotMap
from kv_transfer.direct.laid import MAX_PLANES, Address, Index, LaidPlanes, check_laid, laid
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.pools import PagedCaches
from kv_transfer.regions import Region, storage_region
from kv_transfer.thresholds import Link

logger = logging.getLogger(__name__)

KIND: Final = "in-place"


class _Blob(LaidPlanes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one rank's planes begin, and how they lie."""

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]
    memory: MemoryKind
    device_id: Index
    near: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    """`Agent.memory_host` of whoever holds them."""


class SharedCaches:
    """Our caches, registered with our agent, for peers to read and, if they are ours to write, for us to read into."""

    def __init__(self, caches: PagedCaches, agent: Agent, *, are_ours: bool) -> None:
        """Registers every allocation that a plane lies in; raises what the agent raises."""
        self.caches = caches
        self._are_ours = are_ours
        storages = {plane.untyped_storage().data_ptr(): plane for plane in caches.planes}
        self.regions = tuple(storage_region(storages[address]) for address in sorted(storages))
        self._starts = [region.address for region in self.regions]
        self._agent_kind = agent.kind
        self._near = agent.memory_host
        for region in self.regions:
            agent.register(region)

    def region_of(self, plane: torch.Tensor) -> Region:
        """The allocation that a plane of ours lies in."""
        return self.regions[bisect_right(self._starts, plane.data_ptr()) - 1]

    def card(self) -> DirectCard | None:
        """What a peer needs; None if there is nothing to read."""
        caches = self.caches
        if not caches.planes:
            return None
        blob = _Blob(
            addresses=tuple(plane.data_ptr() for plane in caches.planes),
            memory=self.regions[0].kind,
            device_id=self.regions[0].device_id,
            near=self._near,
            **laid(caches),
        )
        return DirectCard(kind=KIND, host=self._agent_kind, blob=msgspec.msgpack.encode(blob))

    def link_to(self, theirs: "RemotePlanes") -> Link:
        """Over what these planes of a peer are read."""
        if self.regions[0].kind == "device":
            return "device"
        return "shared memory" if self._near and self._near == theirs.blob.near else "network"

    def planes_of(self, card: DirectCard | None, state: CacheState, rank: Rank) -> "RemotePlanes | None":
        """Where the planes of a peer lie, this rank of that state; None if we are not to read them in place."""
        if card is None or not self._are_ours:
            return None
        try:
            return RemotePlanes.of(card, self._agent_kind, state, rank)
        except CannotMap as error:
            logger.warning("rank %s of a peer cannot be read in place, its bytes are staged: %s", rank, error)
            return None


@dataclass(frozen=True, slots=True)
class RemotePlanes:
    """The planes of a peer, by their addresses there."""

    blob: _Blob
    dtype: torch.dtype

    @classmethod
    def of(cls, card: DirectCard, agent_kind: str, state: CacheState, rank: Rank) -> "RemotePlanes":
        """CannotMap if this card is not one of ours, or does not fit the state of its rank."""
        if (card.kind, card.host) != (KIND, agent_kind):
            raise CannotMap(f"another path: ours={KIND} by {agent_kind}, theirs={card.kind} by {card.host}")
        try:
            blob = msgspec.msgpack.decode(card.blob, type=_Blob)
        except msgspec.DecodeError as error:
            raise CannotMap(f"the card cannot be read: {error}") from error
        check_laid(blob, len(blob.addresses), state, rank)
        return cls(blob, getattr(torch, blob.dtype))

    @property
    def groups(self) -> tuple[int, ...]:
        """The layer group of each of the peer's layers; none at all if all share one block table."""
        return self.blob.groups

    @property
    def num_kinds(self) -> int:
        """Planes of a layer."""
        return len(self.blob.strides)

    def planes(self, layers: Span, kind: int) -> MappedPlanes:
        """The planes of one kind of these global layers."""
        first = (layers.start - self.blob.first_layer) * self.num_kinds + kind
        stop = (layers.stop - self.blob.first_layer) * self.num_kinds
        addresses = self.blob.addresses[first : stop : self.num_kinds]
        return MappedPlanes(addresses, self.blob.shape, self.blob.strides[kind], self.dtype)


def planes_of_kind(caches: PagedCaches, layers: Span, kind: int) -> tuple[torch.Tensor, ...]:
    """Our planes of one kind (K, V) of these global layers."""
    return caches.planes_of_layers(layers)[kind :: caches.num_planes]


def check_dtypes(ours: PagedCaches, theirs: RemotePlanes) -> None:
    """CallerError unless bytes can move as they are."""
    if ours.planes[0].dtype != theirs.dtype:
        raise CallerError(f"element types differ: ours={ours.planes[0].dtype}, theirs={theirs.dtype}")
