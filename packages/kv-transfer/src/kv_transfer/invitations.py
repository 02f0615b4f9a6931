"""What a sender tells those it serves: that they may take, how far, and where.

In:  sessions that are being served; ends of the work that fills their blocks.
Out: Ready, again whenever more is computed.
Law: a reader of blocks where they lie takes all at once, and cannot wait for them: it is told which they are once all
     that it asks for is computed, and they are filled. Of layers only they hear who cut their chunks by them.
"""

from functools import partial
from typing import Protocol

from kv_core.errors import CallerError, CapacityError
from kv_transfer.direct.reads import shared_blocks
from kv_transfer.lanes import Lane
from kv_transfer.mover import Moved
from kv_transfer.offers import HeldOffer
from kv_transfer.peers import Peers
from kv_transfer.plan.frontier import Frontier
from kv_transfer.protocol.messages import Ready, RefuseCode, SharedBlocks
from kv_transfer.protocol.session import Sending
from kv_transfer.room import Room
from kv_transfer.send_session import SendSession


class InvitationListener(Protocol):
    """Whoever serves the sessions."""

    def chunk_failed(self, session: SendSession, code: RefuseCode, why: str) -> None:
        """The session cannot be served after all."""


class Invitations:
    """All that is said of offers that are held; of the reactor's thread."""

    def __init__(self, room: Room, peers: Peers, listener: InvitationListener) -> None:
        self._room = room
        self._peers = peers
        self._listener = listener

    def say(self, session: SendSession) -> None:
        """That the offer is held, and how far it is computed; to a reader of blocks once they are filled."""
        assert session.held is not None, "law: only what is held is ready"
        if not session.ask.direct or session.lack:
            self._answer(session, session.held, None)
            return
        filled = session.held.growth.filled(session.ask.tokens)
        if filled is None or filled.query():  # type: ignore[no-untyped-call]
            self._readable(session, session.held, Moved(None, None, 0.0))
        else:
            then = partial(self._readable, session, session.held)
            self._room.copies.submit(lambda: None, filled, then, lane=Lane.OUT)

    def _readable(self, session: SendSession, held: HeldOffer, moved: Moved) -> None:
        if session.state is not Sending.SERVING or session.held is not held or session.revoked:
            # What has become of its offer is heard of, or was.
            return
        if moved.error is not None:
            self._listener.chunk_failed(session, RefuseCode.INTERNAL, f"the blocks were not filled: {moved.error}")
            return
        identity = self._room.identity
        share = identity.state.share_of(identity.card.rank)
        blocks = shared_blocks(session.ask, identity.state, share, held.growth.tables)
        try:
            self._answer(session, held, blocks)
            session.is_invited = True
        except (CallerError, CapacityError) as error:
            self._listener.chunk_failed(session, RefuseCode.UNFIT, f"the blocks are too many to be told: {error}")

    def _answer(self, session: SendSession, held: HeldOffer, blocks: SharedBlocks | None) -> None:
        told = session.tells(held.growth.computed)
        self._peers.answer(session.peer, _ready_of(session, told, blocks))


def _ready_of(session: SendSession, told: Frontier, blocks: SharedBlocks | None) -> Ready:
    return Ready(
        session=session.name,
        num_chunks=len(session.chunks),
        num_bytes=sum(chunk.num_bytes for chunk in session.chunks),
        num_computed=told.num_computed,
        ahead=told.ahead,
        blocks=blocks,
    )
