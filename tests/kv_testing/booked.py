"""A door and a transceiver without sockets and copies, over the real books of leases and of offers.

For whoever plays an engine around the scheduler side and the worker side: offers open, grow and end as they do, and
nobody reads.
"""

from typing import cast

from kv_core.ids import RequestId, TransferId
from kv_engine_adapter.orders import Tables
from kv_testing.fake_door import FakeDoor
from kv_transfer.growth import Standing
from kv_transfer.leases import LeaseBook
from kv_transfer.offering import Offering
from kv_transfer.offers import OfferBook
from kv_transfer.orders import BlockTables, Offer, Progress
from kv_transfer.plan.frontier import Frontier
from kv_transfer.sender import Sender

LEASE_S, EARLY_LEASE_S = 10.0, 40.0


class LeasedDoor(FakeDoor):
    """A door whose leases are kept by the real book."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.now = LeaseBook(remember_s=20.0, early_s=5.0), 0.0

    def open_offer(
        self, transfer_id: TransferId, request_id: RequestId, prompt_key: bytes, lease_s: float | None = None
    ) -> None:
        end, limit = self.now + (lease_s or LEASE_S), self.now + EARLY_LEASE_S
        if (settled := self.book.open((transfer_id, prompt_key), request_id, self.now, end, limit)) is not None:
            self.settled.append(settled)

    def restart_lease(self, request_id: RequestId, lease_s: float | None = None) -> None:
        self.book.restart(request_id, self.now + (lease_s or LEASE_S), self.now + EARLY_LEASE_S)

    def withdraw_offer(self, request_id: RequestId, reason: str) -> None:
        if (end := self.book.withdraw(request_id, reason, self.now)) is not None:
            self.settled.append(end)


class BookedSender:
    """The sending half with nobody who reads."""

    def __init__(self) -> None:
        self.book, self.sent = OfferBook(remember_s=20.0), list[RequestId]()

    def offer(self, offer: Offer, filled: None, standing: Standing) -> None:
        if not self.book.add(offer, filled, 0.0, standing):
            self.sent.append(offer.request_id)

    def advance(self, request_id: RequestId, computed: Frontier, by_group: Tables, filled: None) -> None:
        if (held := self.book.get(request_id)) is not None:
            held.growth.advance(computed, by_group, filled)

    def complete(self, request_id: RequestId) -> None:
        if self.book.complete(request_id):
            self.sent.append(request_id)

    def abandon(self, request_id: RequestId, reason: str, *, comes_again: bool) -> None:
        self.book.abandon(request_id, reason, 0.0, comes_again=comes_again)
        self.book.check()

    def settle(self, transfer_id: TransferId, request_id: RequestId, reason: str) -> None:
        if self.book.settle(transfer_id, request_id, reason, 0.0):
            self.sent.append(request_id)


class BookedTransceiver:
    """What the worker side needs of a transceiver, over the real books of offers."""

    def __init__(self) -> None:
        self.sender = BookedSender()
        post = lambda run: run()  # noqa: E731
        self.offering = Offering(cast(Sender, self.sender), post, lambda: None, self.sender.sent.append)
        self.advance, self.complete = self.offering.advance, self.offering.complete
        self.abandon, self.settle = self.offering.abandon, self.offering.settle

    def offer(self, offer: Offer) -> None:
        self.offering.check_new(offer.request_id)
        self.offering.open(offer, is_troubled=False)

    def abort(self, request_id: RequestId) -> None:
        raise AssertionError(f"nobody loads: {request_id}")

    def receive(self, order: object) -> None:
        raise AssertionError(f"nobody loads: {order}")

    def poll(self) -> Progress:
        sent, self.sender.sent = tuple(self.sender.sent), []
        for request_id in sent:
            self.offering.forget(request_id)
        return Progress(sent, ())

    def readable(self) -> list[tuple[Offer, BlockTables, int]]:
        """Offers that can be read, and how far."""
        held = [each for each in self.sender.book._by_request.values() if not each.growth.standing.ended]
        return [(each.offer, each.growth.tables, each.growth.num_computed) for each in held]
