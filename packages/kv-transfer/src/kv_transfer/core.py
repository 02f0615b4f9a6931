"""The session layer of one rank, without threads and sockets: whoever runs it hands it what happens.

In:  messages with where they came from; calls of the engine; completions of the agent.
Out: through the Room: messages, writes, copies; through callbacks: what the engine is told.
Law: of one thread. A message that may not be sent here or now raises ProtocolError and changes nothing.
"""

import logging
from collections.abc import Callable
from typing import Final

from kv_core.ids import RequestId
from kv_transfer.agent.base import Completion
from kv_transfer.copies import Copier
from kv_transfer.loads import Loads
from kv_transfer.orders import Received
from kv_transfer.peer import Peer
from kv_transfer.peers import Peers
from kv_transfer.protocol.errors import ForeignVersion, ProtocolError, UnexpectedMessage
from kv_transfer.protocol.messages import (
    Ask,
    Cancel,
    Close,
    Data,
    Grant,
    Hello,
    HelloRefused,
    HelloReply,
    InstanceCard,
    InstanceRefused,
    Message,
    Ping,
    Pong,
    Quiet,
    Ready,
    Refuse,
    RejectCode,
    Rejected,
    StatusReply,
    StatusRequest,
)
from kv_transfer.room import Room
from kv_transfer.sender import Sender
from kv_transfer.staging import Arena
from kv_transfer.status import Status
from kv_transfer.timers import Timer
from kv_transfer.wire import Link, Route

logger = logging.getLogger(__name__)

PUBLISH_S: Final = 0.02


class Core:
    """One rank: its peers, what it sends and what it loads."""

    def __init__(
        self,
        room: Room,
        send_arena: Arena,
        receive_arena: Arena,
        copier: Copier,
        on_sent: Callable[[RequestId], None],
        on_received: Callable[[Received], None],
        on_arrived: Callable[[RequestId, int], None] = lambda *_: None,
    ) -> None:
        self.peers = Peers(room)
        self.sender = Sender(room, self.peers, send_arena, copier, on_sent)
        self.loads = Loads(room, self.peers, receive_arena, copier, on_received, on_arrived)
        self._room = room
        self._arenas = (send_arena, receive_arena)
        self._room_bytes = sum(arena.num_free_bytes for arena in self._arenas)
        self._publishing: Timer | None = None
        self._publish_at = room.timers.clock()
        self.status = self.measure()
        """At most PUBLISH_S old; may be read by any thread."""
        self.peers.start((self.sender, self.loads.receiver))
        room.health.start(self.sender.fail)

    # -- from the wire (reactor.Resident) ----------------------------------------------------------------------------

    def from_door(self, route: Route, message: Message) -> None:
        """Somebody called: a receiver, or anybody who asks for a sign of life or for our status."""
        peer = self.peers.at_route(route)
        match message:
            case Hello():
                self.peers.greeted(route, message)
            case Ping():
                self._room.wire.reply(route, self._pong())
            case Pong():
                pass  # a sign of life, noted above
            case StatusRequest():
                self._room.wire.reply(route, self._status_reply())
            case Ask() | Grant() | Close() | Cancel():
                if peer is None:
                    self._room.wire.reply(route, Rejected(code=RejectCode.STRANGER, detail="say hello first"))
                else:
                    self._serve(peer, message)
            case _:
                raise UnexpectedMessage(f"the door of a rank takes no {type(message).__name__}")

    def from_link(self, link: Link, message: Message) -> None:
        """A door that we call answered: that of an instance, or that of a sender."""
        if self.loads.directory.owns(link):
            self._look_up(link, message)
            return
        peer = self.peers.at_link(link)
        match message:
            case HelloReply():
                self.peers.answered(link, message)
            case HelloRefused():
                self.peers.refused(link, message)
            case Ping():
                self.peers.tell(peer, self._pong())
            case Pong():
                self.peers.pong(peer, message.incarnation, message.rank)
            case Rejected(code=RejectCode.STRANGER):
                self.peers.stranger(link)
            case Rejected():
                self._room.counters.add("rejected")
                logger.warning("%s rejects a message of ours: %s: %s", peer, message.code, message.detail)
            case Ready() | Refuse() | Data() | Quiet():
                self._take(peer, message)
            case _:
                raise UnexpectedMessage(f"we asked nothing that {type(message).__name__} answers")

    def bad_link(self, link: Link, error: ProtocolError) -> None:
        """A door that we call says what we cannot read."""
        if not isinstance(error, ForeignVersion):
            return
        if self.loads.directory.owns(link):
            self.loads.directory.garbled(link, str(error))
        else:
            self.peers.garbled(link, error)

    def turn(self) -> None:
        """Take what the agent has done."""
        for completion in self._room.agent.completions():
            self._completed(completion)
        self._publish()

    # -- as a whole --------------------------------------------------------------------------------------------------

    def measure(self) -> Status:
        """Gauges and counters now."""
        sending, receiving = self.sender.num_sessions, self.loads.receiver.num_sessions
        gauges = {
            "sessions": sending + receiving,
            "sessions_sending": sending,
            "sessions_receiving": receiving,
            "parked": self.sender.num_parked,
            "offers": len(self.sender.offers),
            "growing": self.sender.offers.num_growing,
            "loads": len(self.loads),
            "leases": sum(arena.num_leases for arena in self._arenas),
            "quarantined": sum(arena.num_quarantined for arena in self._arenas),
            "staged_bytes": self._room_bytes - sum(arena.num_free_bytes for arena in self._arenas),
            "peers": len(self.peers),
            "mappings": len(self.loads.receiver.mappings),
            "threads_troubled": self._room.health.num_troubled,
        }
        history = self._room.history
        return Status(gauges, self._room.counters.snapshot(), self._room.health.trouble, history.recent, history.totals)

    def unpublish(self) -> None:
        """Nobody finds our offers any more without asking."""
        if self._room.direct is not None:
            self._room.direct.close()

    def publish_last(self) -> None:
        """As of now, and for good."""
        self._room.history.publish()
        self.status = self.measure()

    def _publish(self) -> None:
        """Now, or if the last time was just now, a little later; then the timer leads to one more turn."""
        now = self._room.timers.clock()
        if now >= self._publish_at:
            self._room.history.publish()
            self.status = self.measure()
            self._publish_at = now + PUBLISH_S
        elif self._publishing is None or not self._publishing.is_live:
            self._publishing = self._room.timers.after(self._publish_at - now, lambda: None)

    def close(self, reason: str) -> None:
        """Begin to end: everything that is open fails; `is_quiet` tells when nothing moves any more."""
        self.sender.close(reason)
        self.loads.close(reason)
        self.loads.receiver.mappings.close()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is open, and no peer may write to us."""
        return self.measure().is_idle

    def _completed(self, completion: Completion) -> None:
        """One error of ours may not cost the completions behind it: they were taken, and come only once."""
        try:
            reads = self.loads.receiver.reads
            (reads if completion.ticket in reads else self.sender.passages).completed(completion)
        except Exception:
            self._room.counters.add("internal_errors")
            logger.exception("an error of our own with %s; going on", completion.ticket)

    def _serve(self, peer: Peer, message: Ask | Grant | Close | Cancel) -> None:
        match message:
            case Ask():
                self.sender.asked(peer, message)
            case Grant():
                self.sender.granted(peer, message)
            case Close():
                self.sender.closed(peer, message)
            case Cancel():
                self.sender.cancelled(peer, message)

    def _take(self, peer: Peer, message: Ready | Refuse | Data | Quiet) -> None:
        receiver = self.loads.receiver
        match message:
            case Ready():
                receiver.ready(peer, message)
            case Refuse():
                receiver.refused(peer, message)
            case Data():
                receiver.data(peer, message)
            case Quiet():
                receiver.quiet(peer, message)

    def _look_up(self, link: Link, message: Message) -> None:
        match message:
            case InstanceCard():
                self.loads.directory.answered(link, message)
            case InstanceRefused():
                self.loads.directory.refused(link, message)
            case Rejected():
                self.loads.directory.rejected(link, f"its door rejects us: {message.code}: {message.detail}")
            case _:
                raise UnexpectedMessage(f"we asked for a card, and got {type(message).__name__}")

    def _pong(self) -> Pong:
        identity = self._room.identity
        return Pong(incarnation=identity.incarnation, rank=identity.card.rank)

    def _status_reply(self) -> StatusReply:
        identity, status = self._room.identity, self.measure()
        return StatusReply(
            incarnation=identity.incarnation,
            rank=identity.card.rank,
            gauges=dict(status.gauges),
            counters=dict(status.counters),
        )
