"""The receiving half of a rank: takes what a load wants from its senders.

In:  sessions to open, from `loads`; Ready, Refuse, Data and Quiet of peers; ends of chunks, from `arrivals`.
Out: Ask, Close and Cancel; news of each session to its load.
Law: memory is granted only after Ready. A session that ends with memory granted and not accounted for stays until its
     sender says Quiet, or is dead; its load need not wait for that.
"""

import logging
from functools import partial
from typing import Final, Protocol

import msgspec

from kv_core.errors import CallerError
from kv_core.ids import SessionId
from kv_transfer.arrivals import Arrivals
from kv_transfer.copies import Copier
from kv_transfer.load import Load, ReceiveSession
from kv_transfer.mappings import Mappings
from kv_transfer.peer import Peer
from kv_transfer.peers import Peers
from kv_transfer.plan.plan import SessionPlan, chunks_of
from kv_transfer.protocol import codec
from kv_transfer.protocol.errors import UnexpectedMessage
from kv_transfer.protocol.messages import (
    MAX_PIECES,
    Ask,
    Cancel,
    Close,
    Data,
    Quiet,
    Ready,
    Refuse,
    RefuseCode,
    clipped,
)
from kv_transfer.protocol.session import (
    RECEIVER,
    IllegalEvent,
    ReceiveAction,
    ReceiveEvent,
    Receiving,
    receiver_joint,
    step,
)
from kv_transfer.reads import Reads
from kv_transfer.reports import Path
from kv_transfer.room import Room
from kv_transfer.staging import Arena

logger = logging.getLogger(__name__)

ASK_LATER_S: Final = 0.0005


class SessionListener(Protocol):
    """Whoever opened the sessions."""

    def session_failed(self, session: ReceiveSession, why: str, *, is_outdated: bool) -> None:
        """The session ends badly; `is_outdated`: the card of its peer was, so a new one may help."""

    def session_moved(self, session: ReceiveSession) -> None:
        """A copy for the session has ended, or the session is complete."""


class Receiver:
    """All sessions in which this rank receives; of the reactor's thread."""

    def __init__(self, room: Room, peers: Peers, arena: Arena, copier: Copier, listener: SessionListener) -> None:
        self.arrivals = Arrivals(room, peers, arena, copier, self)
        self.mappings = Mappings(room, in_use=self._is_used, on_known=self._path_known)
        self.reads = Reads(room, copier, self)
        self._copier = copier
        self._room = room
        self._peers = peers
        self._listener = listener
        self._sessions: dict[SessionId, ReceiveSession] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions that are not ended."""
        return len(self._sessions)

    # -- for loads ---------------------------------------------------------------------------------------------------

    def open(self, load: Load, peer: Peer, plan: SessionPlan, ttl_s: float) -> ReceiveSession:
        """A session for this part of the load.

        ValueError if no chunk can hold a unit of the peer's cache. That, or CapacityError, for too many pieces to say.
        """
        if len(plan.pieces) > MAX_PIECES:
            raise CallerError(f"too many pieces for one session: got={len(plan.pieces)}, most={MAX_PIECES}")
        chunk_bytes = min(self._room.identity.card.max_chunk_bytes, peer.card.max_chunk_bytes)
        ask = Ask(
            session=self._room.new_session(),
            incarnation=peer.key.incarnation,
            transfer_id=load.order.transfer_id,
            prompt_key=load.order.prompt_key,
            tokens=plan.tokens,
            num_tokens=load.order.tables.num_tokens,
            pieces=plan.pieces,
            chunk_bytes=chunk_bytes,
            layers_per_chunk=self._room.config.layers_per_chunk,
            checksum=self._room.config.checksum,
            direct=False,
            ttl_ms=int(ttl_s * 1000),
        )
        codec.encode(ask, self._room.config.max_message_bytes)
        chunks = chunks_of(plan.pieces, plan.tokens, peer.state, chunk_bytes, ask.layers_per_chunk)
        session = ReceiveSession(ask, peer, load, chunks, len(chunks), self._room.timers.clock())
        self._sessions[session.name] = session
        load.sessions.append(session)
        self._rest(session)
        if peer.is_introduced:
            self._greeted(session)
        return session

    def fail(self, session: ReceiveSession) -> None:
        """The load of this session has failed."""
        self._on(session, ReceiveEvent.FAIL)

    # -- from peers --------------------------------------------------------------------------------------------------

    def ready(self, peer: Peer, ready: Ready) -> None:
        """The sender holds the offer for us."""
        session = self._heard(peer, ready.session)
        if session is None:
            # Ended before it was answered; what the sender holds for it is to be let go.
            self._peers.tell(peer, Cancel(session=ready.session, reason="the session has ended"))
            return
        theirs, ours = (ready.num_chunks, ready.num_bytes), (len(session.chunks), session.num_bytes)
        if theirs != ours:
            self._fail_load(session, f"{peer} plans otherwise in (chunks, bytes): ours={ours}, theirs={theirs}")
            return
        if session.state is Receiving.ASKING:
            session.is_told(self._room.timers.clock())
        session.hears(ready)
        self._on(session, ReceiveEvent.READY)

    def refused(self, peer: Peer, refuse: Refuse) -> None:
        """The sender ends the session badly."""
        if (session := self._heard(peer, refuse.session)) is not None:
            self._room.counters.add(f"asks_refused_{refuse.code}")
            is_outdated = refuse.code is RefuseCode.WRONG_INCARNATION
            why = f"{peer} refused: {refuse.code}: {refuse.detail}"
            self._on(session, ReceiveEvent.REFUSE, why=why, is_outdated=is_outdated)

    def data(self, peer: Peer, data: Data) -> None:
        """A chunk lies in the region we granted for it, and will not be written again."""
        session = self._heard(peer, data.session)
        if session is not None and (data.seq in session.granted or data.seq in session.doubted):
            self._on(session, ReceiveEvent.DATA, data=data)
        else:
            self._room.counters.add("late_messages")

    def quiet(self, peer: Peer, quiet: Quiet) -> None:
        """No write of this session will come any more."""
        if (session := self._heard(peer, quiet.session)) is not None:
            # Before our Close it would prove nothing.
            session.is_proven |= quiet.clean and session.state is Receiving.CLOSING
            # One that has ended unanswered was refused, perhaps for its card: that word may still be on its way.
            is_unanswered = session.state is Receiving.ASKING
            self._on(session, ReceiveEvent.QUIET, why=f"{peer} has ended the session", is_outdated=is_unanswered)

    # -- news of peers (peer.Listener) ------------------------------------------------------------------------------

    def peer_introduced(self, peer: Peer) -> None:
        """The peer can be asked now, or again."""
        for session in self._with(peer):
            self._greeted(session)

    def peer_refused(self, peer: Peer, why: str) -> None:
        """We cannot exchange with this run of the peer; what is remembered of it may be of a run that is over."""
        for session in self._with(peer):
            self._listener.session_failed(session, f"{peer} and we cannot exchange: {why}", is_outdated=True)

    def peer_died(self, peer: Peer, why: str) -> None:
        """The peer writes no more."""
        for session in self._with(peer):
            self._on(session, ReceiveEvent.PEER_DEAD, why=f"{peer} is dead: {why}", is_outdated=True)
        self.arrivals.peer_died(peer)
        self.mappings.release(peer)

    def wants(self, peer: Peer) -> bool:
        """Whether a session with this peer is open (with regions in quarantine it is), or its caches are mapped."""
        # Why those: a dead peer's memory stays taken until we close the mapping, so its death must be noticed.
        return peer.mapping is not None or self._is_used(peer)

    # -- news of chunks (arrivals.ArrivalListener) -------------------------------------------------------------------

    def chunk_scattered(self, session: ReceiveSession) -> None:
        """Perhaps it was the last."""
        if (event := receiver_joint(session.state, session.num_unscattered)) is not None:
            self._on(session, event)

    def chunk_bad(self, session: ReceiveSession, why: str) -> None:
        """The load fails with its chunk."""
        self._fail_load(session, why)

    def chunk_over(self, session: ReceiveSession) -> None:
        """The load may have waited for this."""
        self._listener.session_moved(session)

    # -- a session's life --------------------------------------------------------------------------------------------

    def _on(
        self,
        session: ReceiveSession,
        event: ReceiveEvent,
        *,
        why: str = "",
        data: Data | None = None,
        is_outdated: bool = False,
    ) -> None:
        """One event and its actions; then what it means for the load, which may lead to more events."""
        try:
            session.state, actions = step(RECEIVER, session.state, event)
        except IllegalEvent as error:
            raise UnexpectedMessage(f"{session}: {error}") from error
        if session.state is Receiving.ENDED:
            self._sessions.pop(session.name, None)
            session.rest()
            self.mappings.used(session.peer)
            self.reads.drop(session)
            if session.ask.direct and session.num_unscattered == 0:
                self._proven(session, why)
        for action in actions:
            if action is not ReceiveAction.FAIL_LOAD:
                self._act(session, action, data)
        if ReceiveAction.FAIL_LOAD in actions:
            self._listener.session_failed(session, why, is_outdated=is_outdated)

    def _act(self, session: ReceiveSession, action: ReceiveAction, data: Data | None) -> None:
        match action:
            case ReceiveAction.SAY_ASK | ReceiveAction.SAY_CLOSE | ReceiveAction.SAY_CANCEL:
                self._say(session, action)
            case ReceiveAction.ASK_PROGRESS:
                if not session.is_all_computed:
                    self._say(session, ReceiveAction.SAY_ASK)
            case ReceiveAction.SAY_GRANTS:
                self.arrivals.remind(session)
            case ReceiveAction.GRANT:
                self._take(session)
            case ReceiveAction.QUARANTINE:
                self.arrivals.doubt(session)
            case ReceiveAction.FREE_ALL:
                self.arrivals.settle_all(session)
            case ReceiveAction.TAKE_CHUNK:
                assert data is not None
                self.arrivals.take(session, data)
            case ReceiveAction.FREE_CHUNK:
                assert data is not None
                self.arrivals.settle(session, data)

    def _take(self, session: ReceiveSession) -> None:
        """What is computed, in memory of ours; or where it lies, once all of it is computed."""
        if session.path is Path.STAGED:
            self.arrivals.wait(session)
        elif session.is_all_computed and not session.is_read:
            session.is_read = True
            self.reads.begin(session)

    def _say(self, session: ReceiveSession, action: ReceiveAction) -> None:
        message: Ask | Close | Cancel
        if action is ReceiveAction.SAY_ASK:
            left_s = max(0.0, session.expires_at - self._room.timers.clock())
            message = msgspec.structs.replace(session.ask, ttl_ms=int(left_s * 1000))
        elif action is ReceiveAction.SAY_CLOSE:
            message = Close(session=session.name)
        else:
            message = Cancel(session=session.name, reason=clipped(session.load.outcome or "the load is tried again"))
        self._peers.tell(session.peer, message)

    def _fail_load(self, session: ReceiveSession, why: str) -> None:
        """The session failed by our own judgement."""
        self._listener.session_failed(session, why, is_outdated=False)

    # -- blocks that are read where they lie -------------------------------------------------------------------------

    def _greeted(self, session: ReceiveSession) -> None:
        """The peer can be asked; the first time only once it is known how it will be read."""
        if session.state is not Receiving.WAITING or session.is_read:
            self._introduced(session)
        elif not session.peer.is_path_known:
            self.mappings.settle(session.peer)
        else:
            session.path, session.path_why = self.reads.path_of(session)
            session.ask = msgspec.structs.replace(session.ask, direct=session.path is not Path.STAGED)
            if not self.reads.finds(session):
                self._introduced(session)
                return
            session.is_told(self._room.timers.clock())
            session.is_read = True
            self.reads.begin(session)
            # The Ask that holds the offer for us, a little later: saying it takes the interpreter from the read.
            self._room.timers.after(ASK_LATER_S, partial(self._ask, session))

    def _ask(self, session: ReceiveSession) -> None:
        if session.state is Receiving.WAITING:
            self._introduced(session)

    def _introduced(self, session: ReceiveSession) -> None:
        self._on(session, ReceiveEvent.INTRODUCED)
        self.chunk_scattered(session)

    def _path_known(self, peer: Peer) -> None:
        for session in self._with(peer):
            if session.state is Receiving.WAITING:
                self._greeted(session)

    def _proven(self, session: ReceiveSession, why: str) -> None:
        """A session that has read has ended: what was read counts only if the sender held it all the time."""
        if session.is_proven:
            self._listener.session_moved(session)
        else:
            self._fail_load(session, f"what was read from {session.peer} is not proven: {why or 'it did not answer'}")

    # -- a session's clockwork ---------------------------------------------------------------------------------------

    def _heard(self, peer: Peer, name: SessionId) -> ReceiveSession | None:
        """The session of this name; it needs no nudge for a while."""
        session = self._sessions.get(name)
        if session is None:
            self._room.counters.add("late_messages")
            return None
        if session.peer is not peer:
            raise UnexpectedMessage(f"session {name} is another peer's")
        self._rest(session)
        return session

    def _rest(self, session: ReceiveSession) -> None:
        session.pause_s = self._room.config.nudge_s
        session.rest(self._room.timers.after(session.pause_s, partial(self._nudge, session)))

    def _nudge(self, session: ReceiveSession) -> None:
        """Nothing was heard for a while: say the last thing again."""
        session.pause_s = min(2 * session.pause_s, self._room.config.nudge_limit_s)
        session.rest(self._room.timers.after(session.pause_s, partial(self._nudge, session)))
        is_ending = session.state in (Receiving.CLOSING, Receiving.CANCELLING)
        is_past = self._room.timers.clock() >= session.expires_at
        expires = is_ending and is_past and not session.doubted
        self._on(session, ReceiveEvent.EXPIRED if expires else ReceiveEvent.NUDGE)

    def _is_used(self, peer: Peer) -> bool:
        return any(session.peer is peer for session in self._sessions.values())

    def _with(self, peer: Peer) -> list[ReceiveSession]:
        return [session for session in self._sessions.values() if session.peer is peer]
