"""Granted regions whose writer has not been heard of.

In:  leases with a possible late writer; proof that a writer is quiet, or dead.
Out: their memory, given back to the arena.
Law: a region in quarantine is leased to nobody. It comes back at once when its own chunk is reported done; after a
     grace when its session is quiet or its peer is dead, since bytes that are already in this process's sockets still
     land (`agent.base.LATE_BYTES_GRACE_S`). That grace counts only while our own agent gets on: whoever reads the
     sockets may be held up with it. Of an agent whose thread has failed nothing is known; then it is kept for good.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kv_core.ids import Incarnation, Rank, SessionId
from kv_transfer.agent.base import LATE_BYTES_GRACE_S
from kv_transfer.peer import PeerKey
from kv_transfer.pulse import Beat
from kv_transfer.room import Room
from kv_transfer.staging import Arena, StagingLease

logger = logging.getLogger(__name__)

ALARM_PERIOD_S: Final = 10.0
"""How often it is said that much of the arena is in quarantine."""


class Writer(NamedTuple):
    """Who may still write a granted region: one chunk of one session of one rank of one run."""

    incarnation: Incarnation
    rank: Rank
    session: SessionId
    seq: int


class Quarantine:
    """The part of the receiving arena that late writers may still touch."""

    def __init__(self, room: Room, arena: Arena, on_freed: Callable[[], None]) -> None:
        self._room = room
        self._arena = arena
        self._on_freed = on_freed
        self._is_watching = False

    def keep(self, lease: StagingLease, writer: Writer) -> None:
        """This region may be written at any time from now on."""
        lease.quarantine(writer)
        self._room.counters.add("regions_quarantined")
        if not self._is_watching and self._is_much():
            # Most writers are heard of at once: after an abort this is nothing to speak of.
            self._is_watching = True
            self._room.timers.after(self._room.config.peer_timeout_s, self._alarm)

    def writers_of(self, key: PeerKey) -> list[Writer]:
        """The writers of one peer that keep memory here."""
        return [writer for writer in self._arena.writers if isinstance(writer, Writer) and writer[:2] == key]

    def free(self, writers: Sequence[Writer]) -> None:
        """These have no byte on the way any more."""
        self._room.counters.add("regions_freed_late", sum(self._arena.quiet(writer) for writer in writers))
        self._on_freed()

    def free_later(self, writers: Sequence[Writer]) -> None:
        """These write no more; what they sent before may still land for a moment."""
        if writers:
            beat = self._room.agent.pulse.beat
            self._room.timers.after_running(LATE_BYTES_GRACE_S, lambda: self._grace_over(writers, beat))

    def _grace_over(self, writers: Sequence[Writer], beat: Beat) -> None:
        pulse = self._room.agent.pulse
        if pulse.failure:
            self._room.counters.add("regions_lost", len(writers))
        elif pulse.was_stuck_since(beat):
            self.free_later(writers)
        else:
            self.free(writers)

    def _is_much(self) -> bool:
        return 4 * sum(self._arena.quarantined_bytes.values()) > self._arena.region.num_bytes

    def _alarm(self) -> None:
        """Say who keeps more than a quarter of the arena from use, as long as that is so."""
        self._is_watching = self._is_much()
        if not self._is_watching:
            return
        self._room.timers.after(ALARM_PERIOD_S, self._alarm)
        kept = self._arena.quarantined_bytes
        logger.error(
            "%d of %d bytes of the receive arena wait for peers that may still write and are not heard of: %s",
            sum(kept.values()),
            self._arena.region.num_bytes,
            ", ".join(f"{owner}: {num_bytes} bytes" for owner, num_bytes in sorted(kept.items())),
        )
