"""Blocks that are read where they lie: by a kernel (direct), or by the agent (in place).

In:  sessions that are about to ask, and those whose sender has told its blocks; ends of reads.
Out: the path of each session; for each read one report to the receiver: in our blocks, or bad.
Law: nothing is granted, so nothing can be written late. What is read counts only once it is proven that the sender held
     the blocks until then: by its book, which told them and tells them still, or by its answer to our Close.
"""

from functools import partial

from kv_transfer.agent.base import Completion, Ticket
from kv_transfer.arrivals import ArrivalListener
from kv_transfer.copies import Copier
from kv_transfer.direct.book import Entry
from kv_transfer.direct.reads import Holding, shared_blocks
from kv_transfer.in_place.reads import InPlaceReads
from kv_transfer.load import ReceiveSession
from kv_transfer.mover import Moved, Skipped
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.protocol.messages import Ask
from kv_transfer.reports import Path
from kv_transfer.room import Room


class Reads:
    """All reads of one rank; of the reactor's thread."""

    def __init__(self, room: Room, copier: Copier, listener: ArrivalListener) -> None:
        self._room = room
        self._copier = copier
        self._listener = listener
        self._in_place = InPlaceReads(room, copier, self)

    def __contains__(self, ticket: Ticket) -> bool:
        """Whether the agent's ticket is one of these reads."""
        return ticket in self._in_place

    def path_of(self, session: ReceiveSession) -> tuple[Path, str]:
        """How this session is carried, and why; chosen once, before it asks."""
        if session.peer.mapping is not None:
            return Path.DIRECT, session.peer.path_why
        pays, why = self._in_place.pays(session.peer, session.ask.pieces)
        return (Path.IN_PLACE, why) if pays else (Path.STAGED, why or session.peer.path_why)

    def finds(self, session: ReceiveSession) -> bool:
        """Whether the sender's book tells its blocks, so that they can be read before it answers."""
        mapping, ask, peer = session.peer.mapping, session.ask, session.peer
        if session.path is not Path.DIRECT or mapping is None or mapping.book is None:
            return False
        entry = mapping.book.find((ask.transfer_id, ask.prompt_key))
        if entry is None or not _is_of(entry, ask, peer.state):
            return False
        tables, share = BlockTables(entry.num_tokens, entry.by_group), peer.state.share_of(peer.key.rank)
        session.entry, session.blocks = entry, shared_blocks(ask, peer.state, share, tables)
        return True

    def begin(self, session: ReceiveSession) -> None:
        """The sender has told its blocks: fill ours from them."""
        stamps, now = session.load.stamps, self._room.timers.clock()
        stamps.granted = stamps.granted or now
        if session.path is Path.DIRECT:
            self._read(session)
        else:
            self._in_place.begin(session)

    def drop(self, session: ReceiveSession) -> None:
        """The session has ended: begin nothing more for it."""
        self._in_place.drop(session)

    def completed(self, completion: Completion) -> None:
        """The agent reports the physical end of a read."""
        self._in_place.completed(completion)

    # -- the direct path ---------------------------------------------------------------------------------------------

    def _read(self, session: ReceiveSession) -> None:
        load, peer, mapping, blocks = session.load, session.peer, session.peer.mapping, session.blocks
        if mapping is None or blocks is None:
            told = f"mapped={mapping is not None}, blocks told={blocks is not None}"
            self._listener.chunk_bad(session, f"{peer} cannot be read directly any more: {told}")
            return
        load.num_scatters += 1
        theirs = Holding(peer.state, peer.key.rank, mapping.groups, blocks.first, blocks.by_group)
        job = self._copier.read(session.ask, load.order.tables, theirs, mapping, lambda: load.is_open)
        self._room.copies.submit(job, load.free, partial(self._has_read, session), load.gate)

    def _has_read(self, session: ReceiveSession, moved: Moved) -> None:
        session.load.num_scatters -= 1
        session.load.stamps.scatter_s += moved.seconds
        session.begins_to_move(self._room.timers.clock() - moved.seconds)
        if moved.error is not None:
            self._room.counters.add("reads_skipped" if isinstance(moved.error, Skipped) else "reads_failed")
            self._listener.chunk_bad(session, f"{session.peer} could not be read: {moved.error}")
        else:
            self._is_read(session, "bytes_read_directly")
        self._listener.chunk_over(session)

    # -- the in-place path (in_place.reads.ReadListener) -------------------------------------------------------------

    def blocks_read(self, session: ReceiveSession) -> None:
        """The agent has read what the session wants."""
        self._is_read(session, "bytes_read_in_place")

    def read_failed(self, session: ReceiveSession, why: str) -> None:
        """The agent could not."""
        self._room.counters.add("reads_failed")
        self._listener.chunk_bad(session, f"{session.peer} could not be read in place: {why}")

    def read_over(self, session: ReceiveSession) -> None:
        """The agent touches our blocks no more."""
        self._listener.chunk_over(session)

    def _is_read(self, session: ReceiveSession, counter: str) -> None:
        """All is in our blocks, and still to be proven."""
        load, now = session.load, self._room.timers.clock()
        load.stamps.arrived = now
        if load.is_open:
            session.is_proven = session.is_proven or self._stands(session)
            session.marks.wired = now
            session.is_moved(session.num_unscattered, session.num_bytes, now)
            self._room.counters.add("bytes_in", session.num_bytes)
            self._room.counters.add(counter, session.num_bytes)
            self._listener.chunk_scattered(session)

    @staticmethod
    def _stands(session: ReceiveSession) -> bool:
        """Whether the sender's book says still what it said before the read."""
        mapping = session.peer.mapping
        book = None if mapping is None else mapping.book
        return session.entry is not None and book is not None and book.stands(session.entry)


def _is_of(entry: Entry, ask: Ask, state: CacheState) -> bool:
    """Whether this is an offer of what is asked for. Context ranks share a sequence, so they must mean the same."""
    is_whole = state.parallel.num_context_ranks == 1 or entry.num_tokens == ask.num_tokens
    return is_whole and entry.num_tokens >= ask.tokens.stop
