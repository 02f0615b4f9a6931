"""The sending half of a rank: serves asks from offers.

In:  offers and settlements of our engine; Ask, Grant, Close and Cancel of peers; ends of chunks, from `passages`.
Out: Ready, Refuse, Data and Quiet; the requests whose blocks are free again.
Law: what is settled is read to the end by those who read it, and by nobody else. Quiet is said only when nothing of the
     session can be written any more. A session that has ended never begins again. Of a prompt that is being computed
     only that is read; when its engine takes it back, its sessions go on with an equal offer, or fail.
"""

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from kv_core.ids import RequestId, SessionId, TransferId
from kv_transfer.admission import not_admitted, unserved
from kv_transfer.copies import Copier
from kv_transfer.growth import Filled, Standing
from kv_transfer.invitations import Invitations
from kv_transfer.offers import HeldOffer, OfferBook
from kv_transfer.orders import Offer, Tables
from kv_transfer.passages import Passages
from kv_transfer.peer import Peer
from kv_transfer.peers import Peers
from kv_transfer.plan.frontier import Frontier
from kv_transfer.plan.plan import chunks_of
from kv_transfer.protocol.errors import UnexpectedMessage
from kv_transfer.protocol.messages import (
    Ask,
    Cancel,
    Close,
    Data,
    Grant,
    Quiet,
    Refuse,
    RefuseCode,
    clipped,
)
from kv_transfer.protocol.session import SENDER, IllegalEvent, SendAction, SendEvent, Sending, sender_joint, step
from kv_transfer.publisher import Publisher
from kv_transfer.room import Room
from kv_transfer.send_session import End, Passage, SendSession
from kv_transfer.staging import Arena
from kv_transfer.succession import is_handed_on
from kv_transfer.tombstones import Tombstones

logger = logging.getLogger(__name__)


class Sender:
    """All sessions in which this rank sends; of the reactor's thread."""

    def __init__(
        self, room: Room, peers: Peers, arena: Arena, copier: Copier, on_sent: Callable[[RequestId], None]
    ) -> None:
        """`on_sent` is told each request whose offer is over, once."""
        self.offers = OfferBook(room.config.tombstone_s, Publisher(room))
        self.passages = Passages(room, arena, copier, self.offers, self)
        self._invitations = Invitations(room, peers, self)
        self._room = room
        self._peers = peers
        self._on_sent = on_sent
        self._sessions: dict[SessionId, SendSession] = {}
        self._ended: Tombstones[SessionId, End] = Tombstones(room.config.tombstone_s)
        self._is_closing = False

    @property
    def num_sessions(self) -> int:
        """Sessions that are not ended, parked ones included."""
        return len(self._sessions)

    @property
    def num_parked(self) -> int:
        """Asks that wait for their offer."""
        # A copy, since other threads ask too.
        return sum(session.state is Sending.PARKED for session in list(self._sessions.values()))

    # -- from our engine ---------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, filled: Filled, standing: Standing | None = None) -> None:
        """Serve the blocks of this request, also to those who asked before."""
        if not self.offers.add(offer, filled, self._room.timers.clock(), standing):
            self._on_sent(offer.request_id)
        self._consider_parked(offer.transfer_id)

    def advance(self, request_id: RequestId, computed: Frontier, by_group: Tables, filled: Filled) -> None:
        """More of a growing offer may be served."""
        if (held := self.offers.get(request_id)) is not None:
            before, waiting = held.growth.computed, [session for session in self._serving(held) if session.lack]
            held.growth.advance(computed, by_group, filled)
            for session in waiting:
                if session.is_news(before, computed):
                    self._on(session, SendEvent.ADVANCED)
                self.passages.go_on(session)
            self._consider_parked(held.offer.transfer_id)

    def complete(self, request_id: RequestId) -> None:
        """A growing offer is as any other from now on."""
        if self.offers.complete(request_id):
            self._on_sent(request_id)

    def abandon(self, request_id: RequestId, reason: str, *, comes_again: bool = False) -> None:
        """A growing offer ends without its prompt, and with it whoever is served from it and finds no equal one."""
        held = self.offers.abandon(request_id, reason, self._room.timers.clock(), comes_again=comes_again)
        if held is not None:
            for session in self._serving(held):
                if is_handed_on(session, self.offers, self._room):
                    self._on(session, SendEvent.ADVANCED)
                    self.passages.go_on(session)
                else:
                    self.chunk_failed(session, RefuseCode.GONE, f"{reason}, wanted={session.ask.tokens}")
            self._consider_parked(held.offer.transfer_id)

    def settle(self, transfer_id: TransferId, request_id: RequestId, reason: str) -> None:
        """Serve no new reader from this offer."""
        if self.offers.settle(transfer_id, request_id, reason, self._room.timers.clock()):
            self._on_sent(request_id)
        self._consider_parked(transfer_id)

    def close(self, reason: str) -> None:
        """Admit nobody, and end what is being served."""
        self._is_closing = True
        for session in list(self._sessions.values()):
            if session.state in (Sending.PARKED, Sending.SERVING):
                session.end = End(RefuseCode.CLOSING, reason)
            self._on(session, SendEvent.TURN_AWAY if session.state is Sending.PARKED else SendEvent.FAIL)
        for request_id in self.offers.settle_all(reason, self._room.timers.clock()):
            self._on_sent(request_id)

    def fail(self, reason: str) -> None:
        """A thread of ours has failed: nothing that is being served, or waits to be, can end well."""
        for session in list(self._sessions.values()):
            if session.state is Sending.PARKED:
                session.end = End(RefuseCode.INTERNAL, clipped(reason))
                self._on(session, SendEvent.TURN_AWAY)
            elif session.state is Sending.SERVING:
                self.chunk_failed(session, RefuseCode.INTERNAL, reason)

    # -- from peers --------------------------------------------------------------------------------------------------

    def asked(self, peer: Peer, ask: Ask) -> None:
        """A peer wants a session, for the first time or again."""
        session = self._session_of(peer, ask.session)
        if (end := self._ended.word(ask.session)) is not None:
            self._peers.answer(peer, Refuse(session=ask.session, code=end.code, detail=end.detail))
            self._peers.answer(peer, Quiet(session=ask.session, clean=end.is_clean))
        elif session is None:
            self._sessions[ask.session] = session = SendSession(ask.session, peer, ask, self._room.timers.clock())
            self._consider(session)
        elif msgspec.structs.replace(ask, ttl_ms=session.ask.ttl_ms) == session.ask:
            self._on(session, SendEvent.ASK)
        else:
            raise UnexpectedMessage(f"session {ask.session} was asked for something else before")

    def granted(self, peer: Peer, grant: Grant) -> None:
        """A peer has memory for one chunk."""
        session = self._session_of(peer, grant.session)
        if session is None:
            self._unknown(peer, grant.session)
        elif session.state is Sending.SERVING and (why := session.misfit(grant)):
            self.chunk_failed(session, RefuseCode.UNFIT, why)
        elif (event := session.event_of(grant)) is not None:
            self._on(session, event, grant=grant, data=session.moves.done.get(grant.seq))
            self.passages.pump()

    def closed(self, peer: Peer, close: Close) -> None:
        """A peer has everything."""
        self._ended_by_peer(peer, close.session, SendEvent.CLOSE)

    def cancelled(self, peer: Peer, cancel: Cancel) -> None:
        """A peer wants no more."""
        if (session := self._session_of(peer, cancel.session)) is not None:
            session.is_cancelled(cancel.reason)
        self._ended_by_peer(peer, cancel.session, SendEvent.CANCEL)

    # -- news of peers (peer.Listener) ------------------------------------------------------------------------------

    def peer_introduced(self, peer: Peer) -> None:
        """Whom we serve calls us; that we can call him too changes nothing."""

    def peer_refused(self, peer: Peer, why: str) -> None:
        """Likewise."""

    def peer_died(self, peer: Peer, why: str) -> None:
        """Nobody waits for these sessions any more."""
        for session in [each for each in self._sessions.values() if each.peer is peer]:
            session.end = End(RefuseCode.GONE, clipped(why))
            self._on(session, SendEvent.PEER_DEAD)

    def wants(self, peer: Peer) -> bool:
        """Whether a session with this peer is open."""
        return any(session.peer is peer for session in self._sessions.values())

    # -- news of chunks (passages.PassageListener, invitations.InvitationListener) ------------------------------------

    def chunk_written(self, session: SendSession, passage: Passage) -> None:
        """Tell the receiver."""
        chunk = passage.chunk
        data = Data(session=session.name, seq=chunk.seq, num_bytes=chunk.num_bytes, checksum=passage.checksum)
        session.moves.done[chunk.seq] = data
        if len(session.moves.done) == len(session.chunks):
            session.marks.wired = session.marks.scattered = self._room.timers.clock()
        self._on(session, SendEvent.WRITTEN, data=data)

    def chunk_failed(self, session: SendSession, code: RefuseCode, why: str) -> None:
        """The session ends with its chunk."""
        if session.state is Sending.SERVING:
            session.end = End(code, clipped(why))
            logger.warning("session %s with %s failed: %s: %s", session.name, session.peer, code, why)
        self._on(session, SendEvent.FAIL)

    def chunk_dropped(self, session: SendSession) -> None:
        """A session that is ending has come nearer to its end."""
        event = sender_joint(session.state, session.num_readers, session.moves.num_writes)
        if event is not None:
            self._on(session, event)

    # -- a session's life --------------------------------------------------------------------------------------------

    def _serving(self, held: HeldOffer) -> list[SendSession]:
        sessions = self._sessions.values()
        return [session for session in sessions if session.held is held and session.state is Sending.SERVING]

    def _consider_parked(self, transfer_id: TransferId) -> None:
        for session in list(self._sessions.values()):
            if session.state is Sending.PARKED and session.ask.transfer_id == transfer_id:
                self._consider(session)

    def _consider(self, session: SendSession) -> None:
        """Open, park or turn away a session that is new or parked."""
        ask = session.ask
        held = self.offers.find(session.pair, ask.tokens.stop)
        session.held = held
        end = self._objection(session, held)
        try:
            if held is not None and end is None and not session.chunks:
                state = self._room.identity.state
                session.is_cut(chunks_of(ask.pieces, ask.tokens, state, ask.chunk_bytes, ask.layers_per_chunk))
        except ValueError as error:
            end = End(RefuseCode.UNFIT, clipped(str(error)))
        if end is not None:
            session.end = end
            self._on(session, SendEvent.TURN_AWAY)
            return
        self._arm(session)
        if held is not None:
            session.marks.ready = self._room.timers.clock()
            self._on(session, SendEvent.OPEN)
        elif session.state is Sending.NEW:
            self._on(session, SendEvent.PARK)

    def _objection(self, session: SendSession, held: HeldOffer | None) -> End | None:
        """Why this session is to be turned away."""
        is_full = len(self._sessions) > self._room.config.max_sessions
        if end := not_admitted(session, self._room, is_closing=self._is_closing, is_full=is_full):
            return end
        if gone := self.offers.why_gone(session.pair):
            return End(RefuseCode.GONE, clipped(f"the offer of transfer {session.ask.transfer_id} is gone: {gone}"))
        return End(RefuseCode.UNFIT, clipped(why)) if (why := unserved(session, self._room, held)) else None

    def _arm(self, session: SendSession) -> None:
        """A session lives as long as its receiver waits, but never longer than we allow; asking again adds nothing."""
        if session.deadline is None:
            ttl_s = min(session.ask.ttl_ms / 1000, self._room.config.request_deadline_s)
            session.deadline = self._room.timers.after(ttl_s, partial(self._too_late, session))

    def _too_late(self, session: SendSession) -> None:
        if session.state is Sending.PARKED:
            session.end = End(RefuseCode.NEVER_CAME, f"no offer of transfer {session.ask.transfer_id} came in time")
        elif session.state is Sending.SERVING:
            session.end = End(RefuseCode.DEADLINE, session.lack or "the session's deadline has passed at the sender")
        self._on(session, SendEvent.DEADLINE)

    def _ended_by_peer(self, peer: Peer, name: SessionId, event: SendEvent) -> None:
        session = self._session_of(peer, name)
        if session is None:
            self._unknown(peer, name)
            return
        if session.state is Sending.SERVING and event is SendEvent.CLOSE:
            revoked = session.revoked
            session.end = End(RefuseCode.GONE, clipped(revoked) or "the session has ended", is_clean=not revoked)
            if session.ask.direct:
                session.marks.wired = session.marks.scattered = self._room.timers.clock()
        self._on(session, event)

    def _unknown(self, peer: Peer, name: SessionId) -> None:
        """Ended before, or never heard of: either way it will never write."""
        end = self._ended.word(name)
        if end is None:
            end = End(RefuseCode.GONE, "the session ended before it began")
            self._ended.bury(name, end, self._room.timers.clock())
        self._peers.answer(peer, Quiet(session=name, clean=end.is_clean))

    def _session_of(self, peer: Peer, name: SessionId) -> SendSession | None:
        session = self._sessions.get(name)
        if session is not None and session.peer is not peer:
            raise UnexpectedMessage(f"session {name} is another peer's")
        return session

    def _on(
        self, session: SendSession, event: SendEvent, *, grant: Grant | None = None, data: Data | None = None
    ) -> None:
        """One event, its actions, and the joint rules until none applies."""
        following: SendEvent | None = event
        while following is not None:
            try:
                session.state, actions = step(SENDER, session.state, following)
            except IllegalEvent as error:
                raise UnexpectedMessage(f"session {session.name}: {error}") from error
            for action in actions:
                self._act(session, action, grant, data)
            following = sender_joint(session.state, session.num_readers, session.moves.num_writes)
        if session.state is Sending.ENDED and session.name in self._sessions:
            del self._sessions[session.name]
            if session.deadline is not None:
                session.deadline.cancel()
            now, size = self._room.timers.clock(), self._room.identity.state.tokens_per_block
            self._ended.bury(session.name, session.end, now)
            self._room.history.add(session.report(now, size))

    def _act(self, session: SendSession, action: SendAction, grant: Grant | None, data: Data | None) -> None:
        say = partial(self._peers.answer, session.peer)
        match action:
            case SendAction.HOLD_OFFER:
                assert session.held is not None
                self.offers.hold(session.held)
            case SendAction.FREE_OFFER:
                assert session.held is not None
                if self.offers.free(session.held):
                    self._on_sent(session.held.offer.request_id)
            case SendAction.QUEUE_CHUNK:
                assert grant is not None
                self.passages.queue(session, grant)
            case SendAction.DROP_CHUNKS:
                self.passages.drop(session)
            case SendAction.SAY_READY:
                self._invitations.say(session)
            case SendAction.SAY_REFUSE:
                self._room.counters.add(f"refused_{session.end.code}")
                say(Refuse(session=session.name, code=session.end.code, detail=session.end.detail))
            case SendAction.SAY_DATA:
                assert data is not None
                say(data)
            case SendAction.SAY_QUIET:
                say(Quiet(session=session.name, clean=session.end.is_clean))
