"""What moves bytes between our regions and a peer's: the contract of every agent.

In:  registered regions, cards of peers, pairs of equally long slices (ours, theirs) or tables of runs.
Out: a `Ticket` at once; later, and once, a `Completion`.
Law: a completion is a physical fact: when it is handed out, this agent moves no byte of its ticket any more, and
     "done" means that all bytes are in place. Time is no reason for a completion. No call blocks on a peer.

What the caller must know:
- An agent knows no streams: the bytes of a write are in place before `write`, those of a read are free for it.
- Neither side's memory may be used for anything else before the completion.
- A peer that is silent is not dead. `remove_peer` says "dead": it ends the peer's tickets although a peer that is
  only stopped may still take their bytes (docs/decisions/0001).
- Also a completion with "error", or a writer's death, can leave bytes on the way *to* memory: in the sockets of the
  process that owns it. That owner waits LATE_BYTES_GRACE_S, in which it must itself have been running.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kv_core.errors import CallerError, FerryError
from kv_transfer.agent.cards import AgentCard, MemoryKind, RemoteSlice
from kv_transfer.pulse import Pulse
from kv_transfer.regions import Region, RegionSlice

Pair = tuple[RegionSlice, RemoteSlice]
"""Our bytes and the peer's, equally many."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Many short movements in one value: run i is `lengths[i]` bytes at `ours[i]` and at `theirs[i]`, all uint64 [N].

    All of ours lie in `region`; CallerError if one does not, or is empty, or the arrays are not equally long.
    """

    region: Region
    their_kind: MemoryKind
    their_device: int
    ours: NDArray[np.uint64]
    theirs: NDArray[np.uint64]
    lengths: NDArray[np.uint64]

    def __post_init__(self) -> None:
        if not len(self.ours) == len(self.theirs) == len(self.lengths) > 0:
            sizes = f"ours={len(self.ours)}, theirs={len(self.theirs)}, lengths={len(self.lengths)}"
            raise CallerError(f"runs have as many addresses as lengths, and there is one at least: {sizes}")
        first, stop = int(self.ours.min()), int((self.ours + self.lengths).max())
        held = self.region.address, self.region.address + self.region.num_bytes
        if self.lengths.min() < 1 or first < held[0] or stop > held[1]:
            raise CallerError(
                f"a run is empty or leaves its region: runs=[{first}, {stop}), region=[{held[0]}, {held[1]})"
            )


Movement = Sequence[Pair] | Sequence[Runs]

Direction = Literal["write", "read"]

Outcome = Literal["done", "error"]

LATE_BYTES_GRACE_S = 1.0
"""How long memory stays in quarantine after a writer died, or failed.

Evidence: over UCX TCP on one host (2 cores, 2026-11-30), 7.4 MiB of a killed writer were still in the sockets of a
stopped receiver, and landed within 0.1 s of its resumption; tests/transfer/agent/test_nixl_processes.py repeats it.
"""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One accepted movement; the number is unique for its agent."""

    number: int
    peer: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The physical end of a ticket; `reason` is empty when it is done."""

    ticket: Ticket
    outcome: Outcome
    reason: str = ""


class UnknownPeer(CallerError):
    """A movement names a peer that was never added, or was removed."""


class AgentClosed(FerryError):
    """The agent takes no more work: it was closed, or its thread failed; the message says which."""


class AgentStuck(FerryError):
    """The agent's thread does not come back from a call; what was asked is not begun unless it is that very call."""


def fresh_name(kind: str) -> str:
    """A name for an agent that no other agent has, ever: two incarnations of one rank must differ."""
    return f"{kind}-{secrets.token_hex(16)}"


class Agent(Protocol):
    """Moves bytes for one owner. Calls may come from any thread but the agent's own; completions are the owner's.

    Its thread may fail or hang: then calls raise AgentClosed or AgentStuck, no ticket ends that may be moving, and
    `pulse` says so. No call waits for a thread that hangs for longer than a bound.
    """

    @property
    def name(self) -> str:
        """Random, of this incarnation only; what a peer's `remove_peer` and our messages call us."""

    @property
    def kind(self) -> str:
        """Which transport: "nixl" or "loopback". Only agents of one kind can talk."""

    @property
    def memory_host(self) -> str:
        """The host within which its bytes go through shared memory (`host.host_id`); empty: they never do."""

    @property
    def pulse(self) -> Pulse:
        """Whether the agent's thread gets on."""

    def register(self, region: Region) -> None:
        """Lets peers and us move bytes of this region; raises CallerError if it is registered already."""

    def deregister(self, region: Region) -> None:
        """Takes that back; raises CallerError if it is not registered, or a ticket of ours still uses it."""

    def card(self) -> AgentCard:
        """What a peer needs; covers the regions that are registered now, so taken after `register`."""

    def add_peer(self, card: AgentCard) -> None:
        """Makes a peer reachable; raises CallerError for another kind, or a blob that the transport refuses.

        Idempotent for an equal card. A new blob of the same agent adds its new regions. A new agent of the same name
        replaces the earlier one, which is taken as dead: its tickets end with "error".
        """

    def remove_peer(self, name: str) -> None:
        """Forgets a peer that is dead; its tickets end with "error". Nothing happens for an unknown name."""

    def write(self, peer: str, movement: Movement) -> Ticket:
        """Moves our bytes to the peer; returns at once.

        Raises UnknownPeer, or CallerError for nothing to move, unequal lengths, or a region that is not registered.
        """

    def read(self, peer: str, movement: Movement) -> Ticket:
        """Moves the peer's bytes to us; otherwise as `write`."""

    def withdraw(self, ticket: Ticket) -> bool:
        """True: nothing of it moved, nothing will, and no completion follows.

        False: its bytes may be moving. What is not posted yet never will be, and a completion follows, unless it was
        handed out before: "error" if anything was dropped.
        """

    def completions(self) -> list[Completion]:
        """Those not handed out yet, oldest first."""

    def on_completion(self, waker: Callable[[], None]) -> None:
        """Calls `waker` from the agent's thread whenever completions wait; it must neither block nor raise."""

    def close(self, timeout_s: float) -> bool:
        """Drops what is not posted, waits for the rest, and ends the agent's thread; idempotent.

        False: time ran out while bytes were still moving, or the transport did not end; unfinished tickets end with
        "error", and their memory is in doubt until this process has ended.
        """
