"""One order on its way, and the sessions that serve it.

In:  a ReceiveOrder; what its sessions report.
Out: exactly one Received.
Law: the outcome is write-once. It is told only when no copy for this load is running, and none ever will.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_core.ids import Incarnation, SessionId
from kv_transfer.direct.book import Entry
from kv_transfer.gate import Gate
from kv_transfer.orders import LoadTimes, Received, ReceiveOrder
from kv_transfer.peer import Peer
from kv_transfer.plan.frontier import NOTHING, Frontier
from kv_transfer.plan.plan import Chunk
from kv_transfer.protocol.messages import Ask, Ready, SharedBlocks
from kv_transfer.protocol.session import Receiving
from kv_transfer.quarantine import Writer
from kv_transfer.reports import Direction, Leg, Marks, Path, TransferReport, latest
from kv_transfer.staging import StagingLease
from kv_transfer.timers import Timer
from kv_transfer.ungranted import Ungranted
from kv_transfer.watermark import Watermark

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Stamps:
    """When things happened to a load, by the reactor's clock; None: not yet."""

    ordered: float
    ready: float | None = None
    granted: float | None = None
    arrived: float | None = None
    scatter_s: float = 0.0


@dataclass(slots=True, eq=False)
class Load:
    """One order. More than seven fields: the order, its outcome, and what is under way for it."""

    order: ReceiveOrder
    free: "torch.cuda.Event | None"
    """The event after which the order's blocks may be written (CUDA)."""
    stamps: Stamps
    gate: Gate = field(default_factory=Gate)
    """Every copy into the order's blocks goes through it; shut before the engine is told."""
    deadline: Timer | None = None
    sessions: list["ReceiveSession"] = field(default_factory=list)
    num_scatters: int = 0
    num_bytes: int = 0
    num_chunks: int = 0
    first_failure: str = ""
    """Why the load is tried a second time; empty the first time."""
    card_of: Incarnation | None = None
    """The run whose card was taken from memory; None if it was asked for."""
    outcome: str | None = None
    """None: open; empty: well; else why it failed."""

    @property
    def is_open(self) -> bool:
        return self.outcome is None

    @property
    def arrived(self) -> int:
        """All that the order wants of the tokens before this one is in our blocks."""
        return min((each.arrived for each in self.sessions), default=self.order.tokens.start)

    def decide(self, outcome: str) -> bool:
        """The one outcome; False if there was one already."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        return True

    def report(self, now: float, tokens_per_block: int) -> TransferReport:
        """What is told of it."""
        begun, tokens = self.stamps.ordered, self.order.tokens
        return TransferReport(
            direction=Direction.LOAD,
            name=self.order.request_id,
            transfer_id=self.order.transfer_id,
            ok=self.outcome == "",
            reason=self.outcome or "",
            num_tokens=len(tokens),
            num_blocks=len(tokens.blocks(tokens_per_block)),
            legs=tuple(each.leg(now) for each in self.sessions),
            stages=latest(begun, [each.marks for each in self.sessions]).stages(now),
        )

    def received(self, now: float) -> Received:
        """What the engine is told."""
        assert self.outcome is not None, "law: an open load is not reported"
        assert self.gate.shut(), "law: a load that still writes blocks is not reported"
        stamps = self.stamps
        times = LoadTimes(
            total_s=now - stamps.ordered,
            ask_s=(stamps.ready or now) - stamps.ordered,
            wire_s=(stamps.arrived - stamps.granted) if stamps.arrived and stamps.granted else 0.0,
            scatter_s=stamps.scatter_s,
        )
        return Received(
            self.order.request_id,
            self.outcome == "",
            self.outcome,
            self.num_bytes,
            self.num_chunks,
            len(self.sessions),
            times,
        )


@dataclass(slots=True, eq=False)
class ReceiveSession:
    """One sender's part of a load. More than seven fields: identity, demand, state, memory, and its clockwork."""

    ask: Ask
    peer: Peer
    load: Load
    chunks: tuple[Chunk, ...]
    num_unscattered: int
    opened_at: float
    marks: Marks = field(init=False)
    """From the order of the load on."""
    path: Path = Path.STAGED
    path_why: str = "it was not settled how to read it"
    state: Receiving = Receiving.WAITING
    granted: dict[int, StagingLease] = field(default_factory=dict)
    """Regions that the sender may write now."""
    doubted: set[int] = field(default_factory=set)
    """Chunks whose regions are in quarantine."""
    computed: Frontier = NOTHING
    """How much of the prompt is computed, as the sender has told us."""
    blocks: SharedBlocks | None = None
    """Where a sender that is read directly keeps what was asked for."""
    is_read: bool = False
    """Its one read has begun, or has failed to."""
    entry: Entry | None = None
    """Where the sender's book told `blocks`, before the sender could answer."""
    is_proven: bool = False
    """The sender has said that what was read directly is what it offered."""
    num_arrived: int = 0
    ungranted: Ungranted = field(init=False)
    scattered: Watermark = field(init=False)
    num_moved: int = 0
    """Chunks that are in our blocks."""
    moved_bytes: int = 0
    pause_s: float = 0.0
    nudge: Timer | None = None

    def __post_init__(self) -> None:
        self.marks = Marks(self.load.stamps.ordered)
        self.ungranted = Ungranted(self.chunks, self.ask.tokens)
        self.scattered = Watermark(self.chunks, self.ask.tokens)

    @property
    def name(self) -> SessionId:
        return self.ask.session

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    def is_told(self, now: float) -> None:
        """It is known that what it wants is there."""
        if self.marks.ready is None:
            self.load.stamps.ready = self.marks.ready = now

    def begins_to_move(self, now: float) -> None:
        """Memory for the first chunk is granted, or the read begins."""
        if self.marks.granted is None:
            self.marks.granted = self.marks.gathered = now

    def arrives(self, now: float) -> None:
        """One more chunk has come."""
        self.num_arrived += 1
        if self.num_arrived == len(self.chunks):
            self.marks.wired = now

    def is_moved(self, num_chunks: int, num_bytes: int, now: float) -> None:
        """So much more is in our blocks."""
        self.num_unscattered -= num_chunks
        self.num_moved += num_chunks
        self.moved_bytes += num_bytes
        self.load.num_chunks += num_chunks
        self.load.num_bytes += num_bytes
        if self.num_unscattered == 0:
            self.marks.scattered = now

    @property
    def arrived(self) -> int:
        """All that it takes of the tokens before this one is in our blocks, and counts."""
        if self.ask.direct:
            return self.ask.tokens.stop if self.is_done else self.ask.tokens.start
        return self.scattered.stop

    def leg(self, now: float) -> Leg:
        """What is told of it."""
        return Leg(
            peer=self.peer.place,
            path=self.path,
            why=self.path_why,
            num_bytes=self.moved_bytes,
            num_chunks=self.num_moved,
            num_pieces=len(self.ask.pieces),
            stages=self.marks.stages(now),
        )

    @property
    def is_done(self) -> bool:
        """Whether all of it is in our blocks, and proven."""
        return self.num_unscattered == 0 and (self.is_proven or not self.ask.direct)

    @property
    def expires_at(self) -> float:
        """When the sender's own deadline has passed, if it got our first Ask at once."""
        return self.opened_at + self.ask.ttl_ms / 1000

    @property
    def next_seq(self) -> int | None:
        """The next chunk that waits for memory, of those that are computed; None if there is none."""
        return self.ungranted.next(self.computed) if self.state is Receiving.MOVING else None

    @property
    def is_all_computed(self) -> bool:
        """Whether the sender need not tell us of progress any more."""
        return self.computed.num_computed >= self.ask.tokens.stop

    def hears(self, ready: Ready) -> None:
        """So much is computed; Readys may come in any order."""
        self.computed = self.computed.with_(Frontier(ready.num_computed, ready.ahead))
        self.blocks = self.blocks or ready.blocks

    @property
    def doing(self) -> str:
        """What it is about, for whoever waited in vain."""
        is_waiting = self.state is Receiving.MOVING and not self.is_all_computed
        lack = f", computed={self.computed}, wanted={self.ask.tokens}" if is_waiting else ""
        return f"{self.peer}: {self.state.name.lower()}{lack}"

    def writer(self, seq: int) -> Writer:
        """The name under which a region of this chunk is kept in quarantine."""
        return Writer(self.peer.key.incarnation, self.peer.key.rank, self.name, seq)

    def rest(self, until: Timer | None = None) -> None:
        """No nudge but the one given."""
        if self.nudge is not None:
            self.nudge.cancel()
        self.nudge = until

    def __str__(self) -> str:
        return f"session {self.name} with {self.peer}"
