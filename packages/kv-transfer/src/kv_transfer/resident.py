"""A Core in its reactor: how one rank's threads begin and end together.

In:  what the reactor hands in; the engine's wish to close.
Out: the same to the core; at the end, mover and agent closed.
Law: after `ended` nothing of ours touches the engine's blocks. Memory that a peer may still write, or that our agent
     may still read, outlives us: it is kept until the process ends, and never used again.
"""

import logging
from collections.abc import Sequence
from typing import Final

from kv_transfer.agent.base import Agent
from kv_transfer.core import Core
from kv_transfer.mover import Mover
from kv_transfer.protocol.errors import ProtocolError
from kv_transfer.protocol.messages import Message
from kv_transfer.reactor import Reactor
from kv_transfer.regions import Region
from kv_transfer.staging import Arena
from kv_transfer.wire import Link, Route

logger = logging.getLogger(__name__)

MOVER_CLOSE_S: Final = 5.0
"""Far more than a copy of one chunk takes; blocks must not be given back before it ends."""

AGENT_CLOSE_S: Final = 0.3

_in_doubt: Final[list[Region]] = []
"""Law: memory given to a possible writer is never reused before it is quiet. The only state of this module."""


class Resident:
    """What lives in a rank's reactor."""

    def __init__(
        self,
        core: Core,
        reactor: Reactor,
        mover: Mover,
        agent: Agent,
        arenas: Sequence[Arena],
        shared: Sequence[Region],
    ) -> None:
        """`shared`: the caches that the agent knows; kept as the arenas are, if it cannot be ended."""
        self._shared = shared
        self._core = core
        self._reactor = reactor
        self._mover = mover
        self._agent = agent
        self._arenas = arenas
        self._close_by: float | None = None

    def close(self, within_s: float) -> None:
        """Fail what is open, and end the thread as soon as nothing moves, at the latest within that time."""
        if self._close_by is None:
            self._close_by = self._reactor.timers.clock() + within_s
            self._core.close("closing")
            self._reactor.timers.after(within_s, self._reactor.wake)

    def from_door(self, route: Route, message: Message) -> None:
        self._core.from_door(route, message)

    def from_link(self, link: Link, message: Message) -> None:
        self._core.from_link(link, message)

    def bad_link(self, link: Link, error: ProtocolError) -> None:
        self._core.bad_link(link, error)

    def turn(self) -> None:
        """See whether we can end; whatever goes wrong in the core, we do by the deadline."""
        if self._close_by is not None and self._reactor.timers.clock() >= self._close_by:
            self._reactor.end()
        self._core.turn()
        if self._close_by is not None and self._core.is_quiet:
            self._reactor.end()

    def ended(self) -> None:
        """The thread ends: so do mover and agent, before anybody is told."""
        self._core.unpublish()
        self._core.publish_last()
        if not self._mover.close(MOVER_CLOSE_S):
            logger.error("a copy did not end within %s s; the blocks it works on are never given back", MOVER_CLOSE_S)
        is_closed = self._agent.close(AGENT_CLOSE_S)
        in_doubt = [arena.region for arena in self._arenas if not is_closed or arena.num_leases + arena.num_quarantined]
        in_doubt += [] if is_closed else self._shared
        if in_doubt:
            logger.warning("staging memory may still be written or read by peers; kept: %s", in_doubt)
            _in_doubt.extend(in_doubt)
