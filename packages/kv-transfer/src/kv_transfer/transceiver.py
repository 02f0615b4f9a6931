"""One rank's whole transfer layer, as its engine sees it.

In:  offers, orders and aborts of the engine's worker; the rank's caches; an agent.
Out: Progress, when polled: offers whose blocks are free again, orders that ended well or badly.
Law: no call but the constructor and `close` blocks; every order ends by its deadline in exactly one outcome, and is
     reported only when nothing of ours touches its blocks any more.
"""

from typing import TYPE_CHECKING

from kv_core.ids import Incarnation, InstanceId, Rank, RequestId, TransferId
from kv_transfer.config import TransferConfig
from kv_transfer.faults import Faults
from kv_transfer.orders import Offer, Progress, ReceiveOrder
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.protocol.messages import RankCard
from kv_transfer.status import Status

if TYPE_CHECKING:
    from kv_transfer.agent.base import Agent
    from kv_transfer.pools import PagedCaches


class Transceiver:
    """Sends and receives KV cache for one rank; owns one reactor thread, one copy thread, and the agent it is given."""

    def __init__(
        self,
        config: TransferConfig,
        instance: InstanceId,
        incarnation: Incarnation,
        rank: Rank,
        state: CacheState,
        caches: "PagedCaches",
        agent: "Agent",
        faults: Faults | None = None,
    ) -> None:
        """Listens at once; a port in use raises AddressInUse naming host, port and the setting."""
        raise NotImplementedError

    @property
    def card(self) -> RankCard:
        """Where peers find this rank; goes to `InstanceDoor.set_cards`."""
        raise NotImplementedError

    def offer(self, offer: Offer) -> None:
        """Lets peers read the blocks of a finished request until `settle`; on CUDA, after the current stream's work."""
        raise NotImplementedError

    def settle(self, transfer_id: TransferId, request_id: RequestId, reason: str) -> None:
        """Serves no new reader from this offer; `poll` reports the request as sent once the present readers are done.

        May come before its offer, which is then settled on arrival.
        """
        raise NotImplementedError

    def receive(self, order: ReceiveOrder) -> None:
        """Fetches the order's tokens into its blocks; ends in one Received. A second one of a request is an error."""
        raise NotImplementedError

    def abort(self, request_id: RequestId) -> None:
        """Fails the order of this request, if it is still running; it is reported like any other."""
        raise NotImplementedError

    def poll(self) -> Progress:
        """What has ended since the last poll."""
        raise NotImplementedError

    def status(self) -> Status:
        """Gauges and counters, at most 0.1 s old while the reactor runs."""
        raise NotImplementedError

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends everything within `timeout_s`: running orders fail, and can still be polled. Idempotent."""
        raise NotImplementedError
