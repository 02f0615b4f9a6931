"""One rank of another instance, as we know it.

Out: PeerKey, Peer; Listener, whoever wants news of peers.
Law: a peer is one rank of one run; a restart makes another peer.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kv_core.ids import Incarnation, InstanceId, Rank
from kv_transfer.agent.cards import DirectCard
from kv_transfer.direct.base import RemoteCaches
from kv_transfer.in_place.caches import RemotePlanes
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.protocol.messages import RankCard
from kv_transfer.timers import Timer
from kv_transfer.wire import Link, Route


class PeerKey(NamedTuple):
    """One rank of one run of an instance."""

    incarnation: Incarnation
    rank: Rank


@dataclass(slots=True, eq=False)
class Peer:
    """What we know of one peer. More than seven fields, since it stands on both planes and may be met both ways."""

    key: PeerKey
    instance: InstanceId
    card: RankCard
    heard_at: float
    link: Link | None = None
    """We call it."""
    route: Route | None = None
    """It calls us."""
    agent_name: str | None = None
    """Set from the introduction on."""
    is_introduced: bool = False
    is_probed: bool = False
    hello: Timer | None = None
    direct: DirectCard | None = None
    """How to map its caches, if it has told."""
    planes: RemotePlanes | None = None
    """Where its blocks lie, if our agent can read them there."""
    mapping: RemoteCaches | None = None
    is_path_known: bool = False
    """Whether it is settled that its caches are mapped, or are not to be."""
    path_why: str = "it was not settled how to read it"
    """Why they are, or are not."""
    unmap: Timer | None = None
    used_at: float = 0.0
    """When a session with it has ended last."""

    @property
    def state(self) -> CacheState:
        return self.card.state

    @property
    def run(self) -> str:
        """The run of the instance that it is a rank of; its ranks share a fate, and so a share of our staging."""
        return f"{self.instance} ({self.key.incarnation})"

    @property
    def place(self) -> str:
        """Where it is, for people; without names that a peer gives itself."""
        return f"{self.card.host}:{self.card.port} rank {self.key.rank}"

    def __str__(self) -> str:
        return f"rank {self.key.rank} of {self.instance} at {self.card.host}:{self.card.port}"


class Listener(Protocol):
    """Whoever wants news of peers."""

    def peer_introduced(self, peer: Peer) -> None:
        """The peer answered our Hello, for the first time or again."""

    def peer_refused(self, peer: Peer, why: str) -> None:
        """We cannot exchange with this peer."""

    def peer_died(self, peer: Peer, why: str) -> None:
        """The peer is dead; it is forgotten after this."""

    def wants(self, peer: Peer) -> bool:
        """Whether something is open with this peer, so that its life matters."""
