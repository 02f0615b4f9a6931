"""The door of an instance: where its ranks are, and who may free what.

In:  the ranks' cards, offers as their requests finish; releases by consumers of other instances.
Out: an InstanceCard to whoever asks; settled offers, when polled; releases of ours to other instances.
Law: torch-free; no call but the constructor and `close` blocks. Every offer is settled once: released by its consumer,
     expired, or withdrawn.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, TypedDict

from kv_core.errors import CallerError
from kv_core.ids import Incarnation, InstanceId, RequestId, TransferId
from kv_transfer.config import TransferConfig
from kv_transfer.faults import Faults
from kv_transfer.leases import LeaseBook
from kv_transfer.orders import Errand, Settled
from kv_transfer.protocol import codec
from kv_transfer.protocol.errors import ProtocolError, UnexpectedMessage
from kv_transfer.protocol.messages import (
    InstanceCard,
    InstanceHello,
    InstanceRefused,
    Message,
    Ping,
    Pong,
    RankCard,
    Rejected,
    Release,
    ReleaseReply,
    Renew,
    StatusReply,
    StatusRequest,
)
from kv_transfer.reactor import Reactor
from kv_transfer.releases import Releaser
from kv_transfer.status import Status
from kv_transfer.timers import Timer
from kv_transfer.wire import Link, Route

logger = logging.getLogger(__name__)

EXPIRY_PERIOD_S: Final = 0.1
IDLE_PERIOD_S: Final = 10.0
_REASONS: Final = frozenset({"released", "expired"})


class InstanceDoor:
    """One thread that answers for a whole instance; lives in the engine's scheduler process."""

    def __init__(
        self, config: TransferConfig, instance: InstanceId, incarnation: Incarnation, faults: Faults | None = None
    ) -> None:
        """Listens at once; a port in use raises CannotListen naming host, port and the settings."""
        self._config = config
        self._settled: deque[Settled] = deque()
        self._open: set[RequestId] = set()
        self._reactor = Reactor(f"kvferry-instance-{instance}", config, faults)
        self._porter = _Porter(config, instance, incarnation, self._reactor, self._settled)
        self._reactor.start(self._porter)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that peers are to call: what `kv_transfer_params` carry."""
        return self._config.call_host, self._reactor.wire.port

    def set_cards(self, cards: Sequence[RankCard]) -> None:
        """Tells the door all ranks of its instance. Raises CallerError if they are not ranks 0..n-1 of one state.

        Until then whoever asks is told to ask again.
        """
        ranks = tuple(sorted(cards, key=lambda card: card.rank))
        _check_cards(ranks)
        card = InstanceCard(instance=self._porter.instance, incarnation=self._porter.incarnation, ranks=ranks)
        codec.encode(card, self._config.max_message_bytes)
        self._reactor.post(lambda: self._porter.set_card(card))

    def open_offer(
        self, transfer_id: TransferId, request_id: RequestId, prompt_key: bytes, lease_s: float | None = None
    ) -> None:
        """One more offer, for one consumer, for `lease_s` from now (the configured lease if None).

        Raises CallerError if an offer of this request is open.
        """
        if request_id in self._open:
            raise CallerError(f"the request is offered already: request={request_id}")
        self._open.add(request_id)
        ends = self._ends(lease_s)
        self._reactor.post(lambda: self._porter.open(transfer_id, request_id, prompt_key, *ends))

    def restart_lease(self, request_id: RequestId, lease_s: float | None = None) -> None:
        """The lease of an offer that grew begins now, when its prompt is computed; nothing happens if it is not open.

        Such an offer is opened with a lease that covers the computation, so that it can be released meanwhile.
        """
        ends = self._ends(lease_s)
        self._reactor.post(lambda: self._porter.restart(request_id, *ends))

    def withdraw_offer(self, request_id: RequestId, reason: str) -> None:
        """Settles an offer for a reason of the engine's own; nothing happens if it is not open."""
        self._reactor.post(lambda: self._porter.withdraw(request_id, reason))

    def poll_settled(self) -> list[Settled]:
        """Offers that ended since the last poll, each once; the engine passes them to `Transceiver.settle`."""
        settled = []
        while self._settled:
            settled.append(self._settled.popleft())
        self._open.difference_update(each.request_id for each in settled)
        return settled

    def hold(self, errand: Errand) -> None:
        """Keeps the leases of this pair from ending, until `release` says that `consumer` is done with one offer.

        Renewed every `renew_s`; nothing happens if nobody listens there any more. Without a prompt key all offers of
        the transfer are held.
        """
        message = Renew(**_words_of(errand))
        self._reactor.post(lambda: self._porter.releaser.hold((errand.host, errand.port), message))

    def release(self, errand: Errand) -> None:
        """Tells a remote door that `consumer` is done with one offer of this pair.

        Without a prompt key the transfer's only prompt is meant; if it has several, only their leases end the offer.

        Repeated until it is answered, nobody listens there any more, or `release_deadline_s` has passed. A consumer
        name must be unique over all instances, for example "<incarnation>/<request id>".
        """
        message = Release(**_words_of(errand))
        self._reactor.post(lambda: self._porter.releaser.release((errand.host, errand.port), message))

    def _ends(self, lease_s: float | None) -> tuple[float, float]:
        """When a lease that begins now ends, and when at the latest."""
        now = self._reactor.timers.clock()
        return now + (self._config.lease_s if lease_s is None else lease_s), now + self._config.max_lease_s

    def status(self) -> Status:
        """Gauges "offers", "holds" of remote offers and "releases" (not yet answered), and counters."""
        return self._porter.status()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and closes the sockets; open offers end unsettled. Idempotent."""
        if not self._reactor.stop(timeout_s):
            logger.error("the door of the instance did not close within %s s", timeout_s)


class _Porter:
    """What the door knows and answers; of the reactor's thread."""

    def __init__(
        self,
        config: TransferConfig,
        instance: InstanceId,
        incarnation: Incarnation,
        reactor: Reactor,
        settled: deque[Settled],
    ) -> None:
        self.instance = instance
        self.incarnation = incarnation
        self.releaser = Releaser(config, reactor.wire, reactor.timers, reactor.counters)
        self._reactor = reactor
        self._settled = settled
        self._config = config
        self._leases = LeaseBook(config.tombstone_s, config.lease_s)
        self._card: InstanceCard | None = None
        self._expiry: Timer | None = None

    def set_card(self, card: InstanceCard) -> None:
        self._card = card

    def open(
        self, transfer_id: TransferId, request_id: RequestId, prompt_key: bytes, lease_end: float, limit: float
    ) -> None:
        now = self._reactor.timers.clock()
        self._reactor.counters.add("offers_opened")
        self._end(self._leases.open((transfer_id, prompt_key), request_id, now, lease_end, limit))
        self._arm(EXPIRY_PERIOD_S)

    def restart(self, request_id: RequestId, lease_end: float, limit: float) -> None:
        self._leases.restart(request_id, lease_end, limit)

    def withdraw(self, request_id: RequestId, reason: str) -> None:
        self._end(self._leases.withdraw(request_id, reason, self._reactor.timers.clock()))

    def status(self) -> Status:
        gauges = {
            "offers": len(self._leases),
            "holds": self.releaser.num_holds,
            "releases": self.releaser.num_waiting,
            "links": self._reactor.wire.num_links,
        }
        return Status(gauges, self._reactor.counters.snapshot())

    def from_door(self, route: Route, message: Message) -> None:
        wire = self._reactor.wire
        match message:
            case InstanceHello():
                wire.reply(route, self._introduce(message.incarnation))
            case Release():
                wire.reply(route, self._released(message))
            case Renew():
                self._renewed(message)
            case Ping():
                wire.reply(route, Pong(incarnation=self.incarnation, rank=None))
            case StatusRequest():
                status = self.status()
                gauges, counters = dict(status.gauges), dict(status.counters)
                wire.reply(
                    route, StatusReply(incarnation=self.incarnation, rank=None, gauges=gauges, counters=counters)
                )
            case _:
                raise UnexpectedMessage(f"the door of an instance takes no {type(message).__name__}")

    def from_link(self, link: Link, message: Message) -> None:
        match message:
            case ReleaseReply():
                self.releaser.answered(link, message)
            case Rejected():
                logger.warning("a peer rejected a release: %s: %s", message.code, message.detail)
            case _:
                raise UnexpectedMessage(f"we asked nothing that {type(message).__name__} answers")

    def bad_link(self, link: Link, error: ProtocolError) -> None:  # noqa: ARG002 - the deadline ends what waits
        logger.warning("a peer's door answered badly: %s", error)

    def turn(self) -> None:
        """Nothing is left over between messages."""

    def ended(self) -> None:
        """Open offers end with the engine, unanswered releases with their lease."""

    def _introduce(self, wanted: Incarnation | None) -> InstanceCard | InstanceRefused:
        if wanted is not None and wanted != self.incarnation:
            detail = f"this is another run of the instance: ours={self.incarnation}, theirs={wanted}"
            return InstanceRefused(incarnation=self.incarnation, code="wrong_incarnation", detail=detail)
        if self._card is None:
            detail = "the ranks of this instance are not up yet"
            return InstanceRefused(incarnation=self.incarnation, code="not_ready", detail=detail)
        return self._card

    def _released(self, message: Release) -> ReleaseReply:
        known = False
        if message.incarnation in (None, self.incarnation):
            now = self._reactor.timers.clock()
            known, settled = self._leases.release(message.transfer_id, message.prompt_key, message.consumer, now)
            self._end(settled)
        if not known:
            self._reactor.counters.add("unknown_releases")
            logger.info("consumer %s released transfer %s, which is unknown", message.consumer, message.transfer_id)
        return ReleaseReply(
            transfer_id=message.transfer_id, prompt_key=message.prompt_key, consumer=message.consumer, known=known
        )

    def _renewed(self, message: Renew) -> None:
        if message.incarnation in (None, self.incarnation):
            end = self._reactor.timers.clock() + self._config.lease_s
            if self._leases.renew(message.transfer_id, message.prompt_key, message.consumer, end):
                self._reactor.counters.add("leases_renewed")

    def _expire(self) -> None:
        # Armed first: whatever goes wrong below, the next round comes. Without open offers only old pairs are left.
        self._arm(EXPIRY_PERIOD_S if len(self._leases) else IDLE_PERIOD_S)
        for settled in self._leases.expire(self._reactor.timers.clock()):
            logger.warning(
                "the lease of request %s (transfer %s) has ended unreleased", settled.request_id, settled.transfer_id
            )
            self._end(settled)

    def _arm(self, period_s: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._reactor.timers.after(period_s, self._expire)

    def _end(self, settled: Settled | None) -> None:
        if settled is not None:
            self._reactor.counters.add(f"offers_{settled.reason if settled.reason in _REASONS else 'withdrawn'}")
            self._settled.append(settled)


class _Words(TypedDict):
    """What Renew and Release say."""

    transfer_id: TransferId
    prompt_key: bytes | None
    consumer: str
    incarnation: Incarnation | None


def _words_of(errand: Errand) -> _Words:
    _, _, transfer_id, prompt_key, consumer, incarnation = errand
    return _Words(transfer_id=transfer_id, prompt_key=prompt_key, consumer=consumer, incarnation=incarnation)


def _check_cards(ranks: tuple[RankCard, ...]) -> None:
    numbers = [card.rank for card in ranks]
    if not ranks or numbers != list(ranks[0].state.parallel.ranks):
        wanted = len(ranks[0].state.parallel.ranks) if ranks else "at least 1"
        raise CallerError(f"cards of all ranks are needed, each once: got={numbers}, wanted={wanted} ranks")
    for card in ranks:
        if card.state != ranks[0].state:
            raise CallerError(
                f"ranks of one instance disagree on its cache: rank 0={ranks[0].state}, rank {card.rank}={card.state}"
            )
