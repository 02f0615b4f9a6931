"""Agents of one process that copy memory: for tests, and as the simplest example of a transport.

In:  a hub that the agents share, passed to each; what should go wrong, told to the hub by a test.
Out: agents that keep the whole contract of `Agent`.
Law: the bytes of a post move at once, when it is polled and neither side is stopped; until then none has moved. As on
     a real wire, a post that its agent gave up while a side was stopped still moves when that side goes on.

What a test may do to an agent, by name:

    stop, resume    like SIGSTOP and SIGCONT of its process: nothing from it or to it moves in between
    kill            like SIGKILL: posts from it or to it end with an error, now and later
    fail            the next posts from it end with an error
    delay           later posts from it take at least this long
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kv_transfer.agent.base import fresh_name
from kv_transfer.agent.cards import MemoryKind
from kv_transfer.agent.pieces import Piece
from kv_transfer.agent.pump import PumpedAgent, PumpLimits
from kv_transfer.agent.transport import TransportError
from kv_transfer.host import host_id
from kv_transfer.regions import Region, RegionSlice

KIND: Final = "loopback"


@dataclass(slots=True, eq=False)
class _Mate:
    """One run of an agent, as the hub knows it."""

    name: str
    regions: list[Region] = field(default_factory=list)
    stopped: bool = False
    gone: bool = False
    num_failures: int = 0
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LoopbackPost:
    """A piece on its way between two runs of agents."""

    source: _Mate
    peer: _Mate
    piece: Piece
    due: float


class LoopbackHub:
    """Where loopback agents find each other, and where a test makes things go wrong. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self._mates: list[_Mate] = []
        self._orphans: list[LoopbackPost] = []

    def agent(self, name: str | None = None, limits: PumpLimits | None = None) -> PumpedAgent[LoopbackPost]:
        """A new agent, of a random name unless told."""
        return PumpedAgent(name or fresh_name(KIND), LoopbackTransport(self), limits or PumpLimits())

    def stop(self, name: str) -> None:
        """Nothing from or to this agent moves until `resume`."""
        with self.lock:
            for mate in self._named(name):
                mate.stopped = True

    def resume(self, name: str) -> None:
        """Ends `stop`. Posts that were given up meanwhile have moved when this returns."""
        with self.lock:
            for mate in self._named(name):
                mate.stopped = False
            late, self._orphans = self._orphans, []
            for post in late:
                self.give_up(post)

    def kill(self, name: str) -> None:
        """Posts from or to this agent end with an error from now on."""
        with self.lock:
            for mate in self._named(name):
                mate.gone = True

    def fail(self, name: str, num_posts: int = 1) -> None:
        """The next posts from this agent that would have moved end with an error."""
        with self.lock:
            for mate in self._named(name):
                mate.num_failures += num_posts

    def delay(self, name: str, delay_s: float) -> None:
        """Later posts from this agent take at least this long."""
        with self.lock:
            for mate in self._named(name):
                mate.delay_s = delay_s

    # For its transports.

    def enter(self, name: str) -> _Mate:
        """A new run of an agent."""
        with self.lock:
            self._mates.append(_Mate(name))
            return self._mates[-1]

    def number_of(self, mate: _Mate) -> int:
        return self._mates.index(mate)

    def mate(self, number: int) -> _Mate:
        return self._mates[number]

    def give_up(self, post: LoopbackPost) -> None:
        """A post that nobody polls any more: it moves now, or when its sides go on, unless one of them is gone."""
        with self.lock:
            if post.source.gone or post.peer.gone:
                return
            if post.source.stopped or post.peer.stopped:
                self._orphans.append(post)
            else:
                move(post)

    def _named(self, name: str) -> Iterator[_Mate]:
        return (mate for mate in self._mates if mate.name == name and not mate.gone)


class LoopbackTransport:
    """A `Transport` that finds its peers in a hub."""

    def __init__(self, hub: LoopbackHub) -> None:
        self._hub = hub
        self._self: _Mate | None = None
        self._peers: dict[str, _Mate] = {}
        self._open_posts: set[LoopbackPost] = set()

    @property
    def kind(self) -> str:
        return KIND

    @property
    def memory_host(self) -> str:
        return host_id()

    def open(self, name: str) -> None:
        self._self = self._hub.enter(name)

    def register(self, region: Region) -> None:
        with self._hub.lock:
            self._mate.regions.append(region)

    def deregister(self, region: Region) -> None:
        with self._hub.lock:
            self._mate.regions.remove(region)

    def blob(self) -> bytes:
        return self._hub.number_of(self._mate).to_bytes(8, "little")

    def add_peer(self, name: str, blob: bytes) -> None:
        self._peers[name] = self._hub.mate(int.from_bytes(blob, "little"))

    def remove_peer(self, name: str) -> None:
        del self._peers[name]

    def post(self, peer: str, piece: Piece) -> LoopbackPost:
        with self._hub.lock:
            post = LoopbackPost(self._mate, self._peers[peer], piece, self._hub.clock() + self._mate.delay_s)
            _check_alive(post)
            list(_ends(post))
        self._open_posts.add(post)
        return post

    def poll(self, post: LoopbackPost) -> bool:
        with self._hub.lock:
            _check_alive(post)
            if post.source.stopped or post.peer.stopped or self._hub.clock() < post.due:
                return False
            self._open_posts.remove(post)
            if post.source.num_failures > 0:
                post.source.num_failures -= 1
                raise TransportError("a test wants this post to fail")
            move(post)
            return True

    def release(self, post: LoopbackPost) -> None:
        if post in self._open_posts:
            self._open_posts.remove(post)
            self._hub.give_up(post)

    def close(self) -> None:
        if self._self is not None:
            self._self.gone = True

    @property
    def _mate(self) -> _Mate:
        assert self._self is not None, "law: a transport is opened first"
        return self._self


def move(post: LoopbackPost) -> None:
    """Copies what the post says, where both sides still have the memory."""
    for ours, theirs in _ends(post):
        target, source = (theirs, ours) if post.piece.direction == "write" else (ours, theirs)
        target.tensor.copy_(source.tensor)


def _check_alive(post: LoopbackPost) -> None:
    for mate in (post.source, post.peer):
        if mate.gone:
            raise TransportError(f"the agent is gone: {mate.name!r}")


def _ends(post: LoopbackPost) -> Iterator[tuple[RegionSlice, RegionSlice]]:
    """Both ends of each move; raises TransportError if one is in no region."""
    piece = post.piece
    for each in piece.moves:
        yield (
            _find(post.source, piece.our_kind, each.our_device, each.our_address, each.num_bytes),
            _find(post.peer, piece.their_kind, each.their_device, each.their_address, each.num_bytes),
        )


def _find(mate: _Mate, kind: MemoryKind, device_id: int, address: int, num_bytes: int) -> RegionSlice:
    for region in mate.regions:
        offset = address - region.address
        if (region.kind, region.device_id) == (kind, device_id) and 0 <= offset <= region.num_bytes - num_bytes:
            return RegionSlice(region, offset, num_bytes)
    regions = [f"[{region.address:#x}, {region.address + region.num_bytes:#x})" for region in mate.regions]
    raise TransportError(
        f"a slice lies in no region of {mate.name!r}: slice=[{address:#x}, {address + num_bytes:#x}) {kind}, "
        f"regions={', '.join(regions) or 'none'}"
    )
