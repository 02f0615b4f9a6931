"""Offers as the engine of one rank hands them in, until it is told their end.

In:  offers, what becomes of them, and settlements: calls of the engine.
Out: the same to the sender, in the reactor's thread, in order; requests that are sent without it.
Law: of the engine's thread; nothing waits. A request has one offer at a time. While a thread of ours is in trouble no
     offer reaches the sender: nobody could be served from it, and nobody could say when it is over.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_core.errors import CallerError
from kv_core.ids import RequestId, TransferId
from kv_core.spans import Span
from kv_transfer.growth import GrowingBook
from kv_transfer.orders import Offer, Tables
from kv_transfer.plan.frontier import EVERY_LAYER, Ahead
from kv_transfer.sender import Sender

if TYPE_CHECKING:
    import torch

Post = Callable[[Callable[[], None]], None]
Mark = Callable[[], "torch.cuda.Event | None"]


class Offering:
    """What one rank offers; the arguments of its methods are checked by whoever owns it."""

    def __init__(
        self,
        sender: Sender,
        post: Post,
        mark: Mark,
        on_sent: Callable[[RequestId], None],
        layers: Span = EVERY_LAYER,
    ) -> None:
        """`layers` are the rank's own."""
        self.growing = GrowingBook(layers)
        self._sender = sender
        self._post = post
        self._mark = mark
        self._on_sent = on_sent
        self._offered: dict[RequestId, TransferId] = {}
        self._settled: set[RequestId] = set()
        self._unopened: set[RequestId] = set()
        self._abandoned: dict[RequestId, bool] = {}
        """Whose settlements have not come yet; they mean something only if it comes again, to those who wait for it."""

    def __len__(self) -> int:
        """Offers that the engine was not told the end of."""
        return len(self._offered)

    @property
    def settled(self) -> list[RequestId]:
        """Those of them that are settled, and complete."""
        return [each for each in self._offered if each in self._settled and each not in self.growing]

    def check_new(self, request_id: RequestId) -> None:
        """CallerError if the request is offered already."""
        if request_id in self._offered:
            raise CallerError(f"the request is offered already: request={request_id}")

    def open(self, offer: Offer, *, is_troubled: bool) -> None:
        """See `Transceiver.offer`."""
        self._offered[offer.request_id] = offer.transfer_id
        self._abandoned.pop(offer.request_id, None)
        standing = self.growing.open(offer)
        if is_troubled:
            self._unopened.add(offer.request_id)
            return
        filled = self._mark()
        self._post(lambda: self._sender.offer(offer, filled, standing))

    def advance(self, request_id: RequestId, num_computed: int, by_group: Tables, ahead: Ahead | None = None) -> None:
        """See `Transceiver.advance`."""
        computed = self.growing.advance(request_id, num_computed, by_group, ahead)
        if request_id not in self._unopened:
            filled = self._mark()
            self._post(lambda: self._sender.advance(request_id, computed, by_group, filled))

    def complete(self, request_id: RequestId) -> None:
        """See `Transceiver.complete`."""
        self.growing.complete(request_id)
        if request_id not in self._unopened:
            self._post(lambda: self._sender.complete(request_id))
        elif request_id in self._settled:
            self._end(request_id)

    def abandon(self, request_id: RequestId, reason: str, *, comes_again: bool) -> None:
        """See `Transceiver.abandon`."""
        why = self.growing.abandon(request_id, reason)
        is_unopened = request_id in self._unopened
        if request_id not in self._settled:
            self._abandoned[request_id] = comes_again and not is_unopened
        self.forget(request_id)
        if not is_unopened:
            self._post(lambda: self._sender.abandon(request_id, why, comes_again=comes_again))

    def settle(self, transfer_id: TransferId, request_id: RequestId, reason: str) -> None:
        """See `Transceiver.settle`."""
        if (is_awaited := self._abandoned.pop(request_id, None)) is not None:
            if is_awaited:
                self._post(lambda: self._sender.settle(transfer_id, request_id, reason))
            return
        self._settled.add(request_id)
        if request_id not in self._unopened:
            self._post(lambda: self._sender.settle(transfer_id, request_id, reason))
        elif request_id not in self.growing:
            self._end(request_id)

    def forget(self, request_id: RequestId) -> None:
        """Its engine knows that it is over."""
        self._offered.pop(request_id, None)
        self._settled.discard(request_id)
        self._unopened.discard(request_id)

    def check(self) -> None:
        """Proves the invariants; for tests."""
        self.growing.check()
        offered = self._offered.keys()
        assert len(self.growing) == sum(each in self.growing for each in offered), "law: what grows is offered"
        assert self._settled <= offered, f"law: what is settled is still offered: {self._settled - offered}"
        assert self._unopened <= offered, f"law: what was kept from the sender is offered: {self._unopened - offered}"
        both = self._abandoned.keys() & offered
        assert not both, f"law: what was abandoned is over: {both}"

    def _end(self, request_id: RequestId) -> None:
        """Sent, although it never reached the sender."""
        self._unopened.discard(request_id)
        self._on_sent(request_id)
