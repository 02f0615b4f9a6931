"""One session at the sender: what it was asked for, and what of it is moving.

In:  the Ask; grants; the ends of gathers and writes.
Out: the chunks to move, each once, and what its table says to do.
Law: a chunk is begun at most once, however often it is granted; its Data, once known, never changes.
"""

from collections import deque
from dataclasses import dataclass, field

from kv_core.ids import SessionId
from kv_core.spans import Span
from kv_transfer.agent.base import Ticket
from kv_transfer.agent.cards import RemoteSlice
from kv_transfer.offers import HeldOffer, Pair
from kv_transfer.peer import Peer
from kv_transfer.plan.cache_state import CacheState, Share
from kv_transfer.plan.plan import Chunk, num_bytes_of, widened
from kv_transfer.protocol.messages import MAX_CHUNKS, Ask, Data, Grant, RefuseCode
from kv_transfer.protocol.session import SendEvent, Sending
from kv_transfer.staging import StagingLease
from kv_transfer.timers import Timer


@dataclass(frozen=True, slots=True)
class End:
    """Why a session ended badly, in the words of a Refuse."""

    code: RefuseCode
    detail: str


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
    state: Sending = Sending.NEW
    chunks: tuple[Chunk, ...] = ()
    moves: Moves = field(default_factory=Moves)
    held: HeldOffer | None = None
    end: End = End(RefuseCode.GONE, "the session has ended")
    deadline: Timer | None = None

    @property
    def pair(self) -> Pair:
        return self.ask.transfer_id, self.ask.prompt_key

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
        wanted = self.chunks[grant.seq].num_bytes
        if grant.slice.num_bytes != wanted:
            return f"chunk {grant.seq} and its grant differ in bytes: ours={wanted}, theirs={grant.slice.num_bytes}"
        return ""


def misfit(ask: Ask, state: CacheState, share: Share, max_chunk_bytes: int, held: HeldOffer | None) -> str:
    """Why this rank can never serve this ask, or not from this offer; empty if it can."""
    if held is not None and ask.tokens.stop > held.offer.num_tokens:
        return f"tokens are not offered: wanted={ask.tokens}, offered=[0, {held.offer.num_tokens})"
    for piece in ask.pieces:
        if not (share.layers.covers(piece.layers) and share.heads.covers(piece.heads)):
            ours = f"layers {share.layers} heads {share.heads}"
            return f"pieces are not ours: ours={ours}, theirs=layers {piece.layers} heads {piece.heads}"
    area = sum(_area(piece.layers, piece.heads) for piece in ask.pieces)
    if area > _area(share.layers, share.heads):
        return f"pieces overlap: their area={area}, ours={_area(share.layers, share.heads)}"
    if ask.chunk_bytes > max_chunk_bytes:
        return f"chunks are too large: ours={max_chunk_bytes}, theirs={ask.chunk_bytes}"
    moved = widened(ask.tokens, state)
    num_bytes = sum(num_bytes_of(piece.layers, piece.heads, moved, state) for piece in ask.pieces)
    # A chunk is at least half full, or the last of its row.
    if 2 * num_bytes // ask.chunk_bytes > MAX_CHUNKS:
        return f"too many chunks: bytes={num_bytes}, chunk={ask.chunk_bytes}, most={MAX_CHUNKS}"
    return ""


def _area(layers: Span, heads: Span) -> int:
    return len(layers) * len(heads)
