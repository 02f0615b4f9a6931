"""Which peers' caches are mapped, from the first need to the last.

In:  peers that are introduced and wanted; their deaths; the time.
Out: `peer.mapping`, once `peer.is_path_known`.
Law: of the reactor's thread; maps and closes run in the mover's, in order, so that a mapping is closed after the last
     read of it. What cannot be mapped is carried another way, for as long as the peer lives. A mapping ends with its
     peer, with us, and after `unmap_idle_s` without use.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from kv_transfer.agent.cards import DirectCard
from kv_transfer.direct.base import DirectDoor, RemoteCaches
from kv_transfer.mover import Moved
from kv_transfer.peer import Peer
from kv_transfer.plan.compatibility import is_converted
from kv_transfer.room import Room

logger = logging.getLogger(__name__)

MAX_WHY: Final = 200


class Mappings:
    """All mappings of one rank."""

    def __init__(self, room: Room, in_use: Callable[[Peer], bool], on_known: Callable[[Peer], None]) -> None:
        """`in_use`: whether a session with the peer is open. `on_known` is told when a peer's path is settled."""
        self._room = room
        self._in_use = in_use
        self._on_known = on_known
        self._mapping: dict[Peer, list[RemoteCaches]] = {}
        """Peers whose map is queued or running, and what it has made."""
        self._mapped: set[Peer] = set()

    def __len__(self) -> int:
        """Number of peers that are mapped."""
        return len(self._mapped)

    def settle(self, peer: Peer) -> None:
        """Find out how this peer is read; `on_known` is told, at once or later."""
        way = self._way(peer)
        if isinstance(way, str):
            peer.is_path_known, peer.path_why = True, way
            self._on_known(peer)
        elif peer not in self._mapping:
            door, card = way
            made = self._mapping[peer] = []
            run = lambda: made.append(door.map(card, peer.state, peer.key.rank))  # noqa: E731
            self._room.copies.submit(run, None, partial(self._settled, peer, made))

    def _way(self, peer: Peer) -> tuple[DirectDoor, DirectCard] | str:
        """Both ends of the direct path; or why all is staged."""
        door, card = self._room.direct, peer.direct
        if door is None or not self._room.config.direct:
            return "no direct path here"
        if card is None:
            return "its caches cannot be mapped"
        if is_converted(self._room.identity.state, peer.state):
            # A read is a copy.
            return "its elements are converted"
        return (door, card) if door.can_map(card) else "other host"

    def _settled(self, peer: Peer, made: list[RemoteCaches], moved: Moved) -> None:
        if self._mapping.get(peer) is not made:
            # Released meanwhile, and closed after it was made.
            return
        del self._mapping[peer]
        if moved.error is not None:
            logger.warning("%s cannot be read directly, its bytes are staged: %s", peer, moved.error)
            self._room.counters.add("maps_failed")
            peer.path_why = f"mapping failed: {moved.error}"[:MAX_WHY]
        else:
            logger.info("the caches of %s are mapped", peer)
            peer.mapping, peer.path_why = made[0], "same host"
            self._mapped.add(peer)
            self.used(peer)
            self._watch(peer, self._room.config.unmap_idle_s)
        peer.is_path_known = True
        self._on_known(peer)

    def release(self, peer: Peer) -> None:
        """Close the mapping of this peer after what is queued; a new need maps it again."""
        if (made := self._mapping.pop(peer, None)) is not None:
            # Queued behind its map, and not left to the end of that: when we close, nobody hears of it any more.
            self._close(made)
        self._mapped.discard(peer)
        if peer.unmap is not None:
            peer.unmap.cancel()
        if peer.mapping is not None:
            self._close([peer.mapping])
            logger.info("the caches of %s are mapped no more", peer)
        peer.mapping, peer.is_path_known = None, False

    def used(self, peer: Peer) -> None:
        """A session with this peer has ended: the time without use begins."""
        peer.used_at = self._room.timers.clock()

    def close(self) -> None:
        """Close all mappings."""
        for peer in [*self._mapped, *self._mapping]:
            self.release(peer)

    def _watch(self, peer: Peer, pause_s: float) -> None:
        peer.unmap = self._room.timers.after(pause_s, partial(self._idle, peer))

    def _idle(self, peer: Peer) -> None:
        idle_s = 0.0 if self._in_use(peer) else self._room.timers.clock() - peer.used_at
        if (left_s := self._room.config.unmap_idle_s - idle_s) > 0:
            self._watch(peer, left_s)
        else:
            self.release(peer)

    def _close(self, mapped: list[RemoteCaches]) -> None:
        def run() -> None:
            for caches in mapped:
                caches.close()

        self._room.copies.submit(run, None, _closed, is_alone=True)


def _closed(moved: Moved) -> None:
    if moved.error is not None:
        logger.error("a mapping did not close: %s", moved.error)
