"""What every part of one rank's session layer shares.

Out: Room, handed to peers, sender and receiver when they are made.
Law: everything in it is used in the reactor's thread, or may be used in any. Clock, wire, agent, mover and
     the source of names are arguments, so a test may put in its own and turn the clock by hand.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_core.ids import Incarnation, InstanceId, SessionId
from kv_transfer.agent.base import Agent
from kv_transfer.agent.cards import AgentCard
from kv_transfer.config import TransferConfig
from kv_transfer.direct.base import DirectDoor
from kv_transfer.faults import Faults
from kv_transfer.gate import Gate
from kv_transfer.health import Health
from kv_transfer.history import History
from kv_transfer.in_place.caches import SharedCaches
from kv_transfer.lanes import Lane
from kv_transfer.mover import Moved, Run
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.profiling import NO_RANGES, Ranges
from kv_transfer.protocol.messages import RankCard
from kv_transfer.status import Counters
from kv_transfer.timers import Timers
from kv_transfer.wire import Wire


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are: one rank of one run of one instance."""

    instance: InstanceId
    incarnation: Incarnation
    card: RankCard
    agent: AgentCard
    """Of our agent, with both arenas registered."""

    @property
    def state(self) -> CacheState:
        """What our instance holds."""
        return self.card.state

    def __str__(self) -> str:
        return f"rank {self.card.rank} of {self.instance} ({self.incarnation})"


def random_session() -> SessionId:
    """A name that nobody can guess, and no other session has."""
    return SessionId(secrets.token_hex(16))


class Copies(Protocol):
    """A queue of copies, of which each end is posted to the reactor (see `mover.Mover`)."""

    def submit(
        self,
        run: Run,
        after: "torch.cuda.Event | None",
        then: Callable[[Moved], None],
        gate: Gate | None = None,
        *,
        lane: Lane = Lane.IN,
        is_alone: bool = False,
    ) -> None:
        """Run this in turn, unless its gate is shut by then; see there."""


@dataclass(frozen=True, slots=True)
class Room:
    """The shared surroundings. More than seven fields: this is the one list of what a session layer stands on."""

    config: TransferConfig
    identity: Identity
    wire: Wire
    timers: Timers
    counters: Counters
    faults: Faults
    agent: Agent
    copies: Copies
    health: Health
    """Of the threads of agent and copies."""
    history: History
    direct: DirectDoor | None = None
    """Our end of the direct path, if our caches can be mapped by peers."""
    ranges: Ranges = NO_RANGES
    shared: SharedCaches | None = None
    """Our caches as our agent knows them, if peers may read them in place."""
    new_session: Callable[[], SessionId] = random_session
