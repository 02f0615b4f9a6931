"""One session at the sender: what it was asked for, and what of it is moving.

In:  the Ask; grants; the ends of gathers and writes.
Out: the chunks to move, each once, and what its table says to do.
Law: a chunk is begun at most once, however often it is granted; its Data, once known, never changes.
"""

from collections import deque
from dataclasses import dataclass, field

from kv_core.ids import RequestId, SessionId
from kv_transfer.agent.base import Ticket
from kv_transfer.agent.cards import RemoteSlice
from kv_transfer.gate import Gate
from kv_transfer.offers import HeldOffer, Pair
from kv_transfer.peer import Peer
from kv_transfer.plan.frontier import Frontier
from kv_transfer.plan.plan import Chunk, needed
from kv_transfer.protocol.messages import Ask, Data, Grant, RefuseCode, clipped
from kv_transfer.protocol.session import SendEvent, Sending
from kv_transfer.reports import Direction, Leg, Marks, Path, TransferReport
from kv_transfer.staging import StagingLease
from kv_transfer.timers import Timer


@dataclass(frozen=True, slots=True)
class End:
    """Why a session ended badly, in the words of a Refuse."""

    code: RefuseCode
    detail: str
    is_clean: bool = False
    """Ended by its Close, with the offer held until then."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One chunk on its way: granted memory there, staging here."""

    chunk: Chunk
    target: RemoteSlice
    lease: StagingLease
    checksum: int | None = None


@dataclass(slots=True)
class Moves:
    """What of a session is moving, and what waits to."""

    waiting: deque[Grant] = field(default_factory=deque)
    begun: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    held: dict[int, Passage] = field(default_factory=dict)
    writes: dict[Ticket, Passage] = field(default_factory=dict)
    done: dict[int, Data] = field(default_factory=dict)

    @property
    def num_reads(self) -> int:
        """Gathers queued or running."""
        return len(self.reads)

    @property
    def num_writes(self) -> int:
        """Chunks that may still be written."""
        return len(self.held) + len(self.writes)


@dataclass(slots=True, eq=False)
class SendSession:
    """One receiver's demand. More than seven fields: identity, demand, state, and what holds it."""

    name: SessionId
    peer: Peer
    ask: Ask
    asked_at: float
    marks: Marks = field(init=False)
    state: Sending = Sending.NEW
    chunks: tuple[Chunk, ...] = ()
    layer_stops: frozenset[int] = frozenset()
    """Where the layers of its chunks end."""
    moves: Moves = field(default_factory=Moves)
    held: HeldOffer | None = None
    gate: Gate = field(default_factory=Gate)
    """Every copy out of the offer's blocks goes through it; shut before they are given back."""
    end: End = End(RefuseCode.GONE, "the session has ended")
    deadline: Timer | None = None
    told: list[Frontier] = field(default_factory=list)
    """How much its receiver was told is computed; several only if it went on with another offer."""
    is_invited: bool = False
    """Its receiver was told the very blocks, and reads them without asking again."""

    def __post_init__(self) -> None:
        self.marks = Marks(self.asked_at)

    def is_cut(self, chunks: tuple[Chunk, ...]) -> None:
        """These are its chunks."""
        self.chunks = chunks
        self.layer_stops = frozenset(chunk.piece.layers.stop for chunk in chunks)

    def is_cancelled(self, reason: str) -> None:
        """Its receiver wants no more, unless it is ending already."""
        if self.state in (Sending.PARKED, Sending.SERVING):
            self.end = End(RefuseCode.GONE, clipped(f"cancelled by its receiver: {reason}"))

    @property
    def pair(self) -> Pair:
        return self.ask.transfer_id, self.ask.prompt_key

    def report(self, now: float, tokens_per_block: int) -> TransferReport:
        """What is told of it, once it has ended. Of a direct session we see no more than the reader's Close."""
        done, ask = self.moves.done.values(), self.ask
        num_read = len(self.chunks) if ask.direct and self.end.is_clean else 0
        leg = Leg(
            peer=self.peer.place,
            path=Path.DIRECT if ask.direct else Path.STAGED,
            why="its reader asks for it",
            num_bytes=sum(each.num_bytes for each in (self.chunks[:num_read] or done)),
            num_chunks=num_read or len(done),
            num_pieces=len(ask.pieces),
            stages=self.marks.stages(now),
        )
        return TransferReport(
            direction=Direction.SEND,
            name=RequestId("unknown") if self.held is None else self.held.offer.request_id,
            transfer_id=ask.transfer_id,
            ok=self.end.is_clean,
            reason="" if self.end.is_clean else f"{self.end.code}: {self.end.detail}",
            num_tokens=len(ask.tokens),
            num_blocks=len(ask.tokens.blocks(tokens_per_block)),
            legs=(leg,),
            stages=leg.stages,
        )

    @property
    def num_readers(self) -> int:
        """Gathers that read the offer's blocks, or may yet: none that has not begun when the session stops."""
        stops = self.state in (Sending.STOPPING, Sending.DRAINING)
        return 0 if stops and self.gate.shut() else self.moves.num_reads

    @property
    def lack(self) -> str:
        """What of the offer's prompt is wanted and not computed; empty if nothing is, or there is no offer."""
        return "" if self.held is None else self.held.growth.lack(self.ask.tokens)

    def lack_of(self, chunk: Chunk) -> str:
        """The same of one chunk."""
        wanted = needed(chunk, self.ask.tokens)
        return "" if self.held is None else self.held.growth.lack(wanted, chunk.piece.layers)

    @property
    def is_by_layers(self) -> bool:
        """Whether its receiver can do something with layers of a step that is being computed."""
        return bool(self.ask.layers_per_chunk) and not self.ask.direct

    def tells(self, computed: Frontier) -> Frontier:
        """As much of this as its receiver is to be told, and is told from now on."""
        telling = computed if self.is_by_layers else Frontier(computed.num_computed)
        if not any(each.includes(telling) for each in self.told):
            self.told = [*(each for each in self.told if not telling.includes(each)), telling]
        return telling

    def is_news(self, before: Frontier, computed: Frontier) -> bool:
        """Whether its receiver may do more than before: of layers only those count with which a chunk of it ends."""
        if computed.num_computed > before.num_computed:
            return True
        if computed.ahead is None or not self.is_by_layers:
            return False
        is_same_step = before.ahead is not None and before.ahead.token_stop == computed.ahead.token_stop
        first = before.ahead.layer_stop if before.ahead is not None and is_same_step else 0
        return any(first < stop <= computed.ahead.layer_stop for stop in self.layer_stops)

    @property
    def revoked(self) -> str:
        """Why the engine has taken the offer's blocks back; empty if it has not, or there is no offer."""
        ended = "" if self.held is None else self.held.growth.standing.ended
        return f"{ended}, wanted={self.ask.tokens}" if ended else ""

    @property
    def num_in_flight(self) -> int:
        """Chunks between their first gather and the end of their write."""
        return self.moves.num_reads + self.moves.num_writes

    def event_of(self, grant: Grant) -> SendEvent | None:
        """What a grant means now; None if its chunk is on its way."""
        if grant.seq in self.moves.done:
            return SendEvent.GRANT_AGAIN
        known = grant.seq in self.moves.begun or any(grant.seq == other.seq for other in self.moves.waiting)
        return None if known else SendEvent.GRANT

    def misfit(self, grant: Grant) -> str:
        """Why this grant cannot take its chunk; empty if it can."""
        if grant.seq >= len(self.chunks):
            return f"no such chunk: seq={grant.seq}, chunks={len(self.chunks)}"
        chunk = self.chunks[grant.seq]
        is_told = any(each.covers(needed(chunk, self.ask.tokens), chunk.piece.layers) for each in self.told)
        if not is_told and (lack := self.lack_of(chunk)):
            return f"chunk {grant.seq} is granted too early: {lack}"
        wanted = chunk.num_bytes
        if grant.slice.num_bytes != wanted:
            return f"chunk {grant.seq} and its grant differ in bytes: ours={wanted}, theirs={grant.slice.num_bytes}"
        return ""
