"""The way of a chunk at the sender: from the engine's blocks into our staging, from there into granted memory.

In:  grants of sessions that are being served; ends of gathers (mover) and of writes (agent).
Out: for each chunk one report to the sender: written, failed, or nothing of it is under way any more.
Law: a chunk is written only by a session that is being served, from an offer that is still the same after the gather.
     Only what is computed is gathered. What was gathered from an offer that its engine has taken back is gathered again
     if the session goes on with an equal one.
     What is posted keeps its staging until its physical end, or until the agent has taken it back.

Sessions take turns for memory (turns). What chunks for one instance hold of the arena is at most its share
(`Arena.has_share`): one that is stopped keeps no memory from the others.

     queue --> gather (mover) --> [held by a fault] --> write (agent) --> written
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from kv_transfer.agent.base import Completion, Ticket
from kv_transfer.copies import Copier
from kv_transfer.lanes import Lane
from kv_transfer.mover import Moved
from kv_transfer.offers import HeldOffer, OfferBook
from kv_transfer.plan.plan import needed
from kv_transfer.protocol.messages import Grant, RefuseCode
from kv_transfer.protocol.session import Sending
from kv_transfer.room import Room
from kv_transfer.send_session import Passage, SendSession
from kv_transfer.staging import Arena, StagingLease
from kv_transfer.turns import Turn, Turns

HELD_WRITE_S: Final = 0.01
"""How often a write that a fault holds is tried again."""


class PassageListener(Protocol):
    """Whoever queued the chunks."""

    def chunk_written(self, session: SendSession, passage: Passage) -> None:
        """All bytes are in the granted memory."""

    def chunk_failed(self, session: SendSession, code: RefuseCode, why: str) -> None:
        """The chunk will not come; nothing of it is under way."""

    def chunk_dropped(self, session: SendSession) -> None:
        """The session was over before the write; nothing of the chunk is under way."""


class Passages:
    """All chunks on their way; of the reactor's thread."""

    def __init__(self, room: Room, arena: Arena, copier: Copier, offers: OfferBook, listener: PassageListener) -> None:
        self._room = room
        self._arena = arena
        self._copier = copier
        self._offers = offers
        self._listener = listener
        self._turns: Turns[SendSession] = Turns(self._serve)
        self._tickets: dict[Ticket, SendSession] = {}
        self._ranges: dict[Ticket, Callable[[], None]] = {}
        """How the range of each write ends."""

    def queue(self, session: SendSession, grant: Grant) -> None:
        """One more chunk of this session waits for its turn."""
        session.moves.waiting.append(grant)
        self._turns.join(session)

    def go_on(self, session: SendSession) -> None:
        """Its chunks may have waited for what is computed by now, or for an offer."""
        if session.moves.waiting:
            self._turns.join(session)
        self.pump()

    def drop(self, session: SendSession) -> None:
        """Forget what is not begun; take back what the agent has not posted."""
        session.moves.waiting.clear()
        for ticket, passage in list(session.moves.writes.items()):
            if self._room.agent.withdraw(ticket):
                del session.moves.writes[ticket], self._tickets[ticket]
                self._ranges.pop(ticket)()
                passage.lease.release()

    def pump(self) -> None:
        """Begin the gathers that there is memory for."""
        self._turns.pump()

    def completed(self, completion: Completion) -> None:
        """The agent reports the physical end of a write."""
        session = self._tickets.pop(completion.ticket)
        self._ranges.pop(completion.ticket)()
        passage = session.moves.writes.pop(completion.ticket)
        passage.lease.release()
        if completion.outcome == "done":
            self._room.counters.add("bytes_out", passage.chunk.num_bytes)
            self._room.counters.add("chunks_out")
            self._listener.chunk_written(session, passage)
        else:
            self._room.counters.add("writes_failed")
            self._listener.chunk_failed(session, RefuseCode.WRITE_FAILED, completion.reason)
        self.go_on(session)

    def _serve(self, session: SendSession) -> Turn:
        if not session.moves.waiting or session.num_in_flight >= self._room.config.chunks_in_flight:
            # It comes back when a chunk of it has ended.
            return Turn.OVER
        grant, owner = session.moves.waiting[0], session.peer.run
        if session.revoked or session.lack_of(session.chunks[grant.seq]):
            # Until its offer has been taken from it, or has come as far as the one before had.
            return Turn.OVER
        num_bytes = session.chunks[grant.seq].num_bytes
        if not self._arena.has_share(num_bytes, owner):
            return Turn.HAS_SHARE
        lease = self._arena.lease(num_bytes, owner)
        if lease is None:
            return Turn.NO_ROOM
        session.moves.waiting.popleft()
        self._gather(session, grant, lease)
        return Turn.SERVED

    def _gather(self, session: SendSession, grant: Grant, lease: StagingLease) -> None:
        """Copy the chunk into our staging."""
        chunk, held = session.chunks[grant.seq], session.held
        assert held is not None, "law: only what is offered is gathered"
        session.marks.granted = session.marks.granted or self._room.timers.clock()
        session.moves.begun.add(chunk.seq)
        session.moves.reads.add(chunk.seq)
        job = self._copier.gather(chunk, held.growth.tables, lease.slice.tensor, checksum=session.ask.checksum)
        then = partial(self._gathered, session, Passage(chunk, grant.slice, lease), held)
        filled = held.growth.filled(needed(chunk, session.ask.tokens), chunk.piece.layers)
        self._room.copies.submit(job, filled, then, session.gate, lane=Lane.OUT)

    def _gathered(self, session: SendSession, passage: Passage, held: HeldOffer, moved: Moved) -> None:
        """The chunk lies in our staging: write it, if it is still wanted and still what was offered."""
        session.moves.reads.discard(passage.chunk.seq)
        why = self._unsound(session, held, moved)
        if not why and session.state is Sending.SERVING:
            session.moves.held[passage.chunk.seq] = replace(passage, checksum=moved.value)
            self._write(session, passage.chunk.seq)
            return
        passage.lease.release()
        if session.state is not Sending.SERVING:
            self._listener.chunk_dropped(session)
        elif held.growth.standing.ended:
            # Whether it goes on with another offer is decided when the end of this one is heard of, or was.
            session.moves.waiting.appendleft(Grant(session=session.name, seq=passage.chunk.seq, slice=passage.target))
        else:
            self._listener.chunk_failed(session, RefuseCode.INTERNAL, why)
        self.go_on(session)

    def _unsound(self, session: SendSession, held: HeldOffer, moved: Moved) -> str:
        """Why what was gathered is not what was offered; empty if it is."""
        if moved.error is not None:
            return f"the gather failed: {moved.error}"
        is_sound = session.held is held and self._offers.is_current(held)
        return "" if is_sound else "the offer changed while it was read"

    def _write(self, session: SendSession, seq: int) -> None:
        """Post the write; from here on only its physical end, or the agent's taking back, accounts for it."""
        if self._room.faults.before_write(session.name, seq):
            self._room.timers.after(HELD_WRITE_S, partial(self._write, session, seq))
            return
        passage = session.moves.held.pop(seq)
        try:
            assert session.peer.agent_name is not None, "law: only an introduced peer is served"
            ticket = self._room.agent.write(session.peer.agent_name, [(passage.lease.slice, passage.target)])
        except Exception as error:
            passage.lease.release()
            self._listener.chunk_failed(session, RefuseCode.WRITE_FAILED, str(error))
            self.go_on(session)
            return
        session.marks.gathered = session.marks.gathered or self._room.timers.clock()
        self._ranges[ticket] = self._room.ranges.begin("wire")
        session.moves.writes[ticket] = passage
        self._tickets[ticket] = session
