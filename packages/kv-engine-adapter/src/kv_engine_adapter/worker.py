"""The worker side of the connector: hands the step's orders to the transceiver, reports what has ended.

In:  `StepOrders` from the scheduler side.
Out: request ids that were sent, received, or failed, each reported exactly once by this rank.
Law: nothing here waits; a request that failed is reported as received too, because the engine frees its wait state so.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_core.ids import RequestId
from kv_engine_adapter.metrics import Report, Samples, counters_of, joined, samples_of
from kv_engine_adapter.orders import GrowOffer, LoadBlocks, OpenOffer, StepOrders, Tables
from kv_transfer.orders import BlockTables, Offer, Received, ReceiveOrder
from kv_transfer.plan.ranges import HOLE
from kv_transfer.protocol.messages import RankCard
from kv_transfer.transceiver import Transceiver

logger = logging.getLogger(__name__)

KernelTables = Callable[[Tables], Tables]


@dataclass(frozen=True, slots=True)
class Ended:
    """What ended since the last look."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class FerryWorker:
    """One rank's half of the connector."""

    def __init__(self, transceiver: Transceiver, kernel_tables: KernelTables, tokens_per_block: int) -> None:
        """`kernel_tables` turns the scheduler's tables into those of the tensors, which may be cut finer.

        `tokens_per_block` is the scheduler's.
        """
        self._transceiver = transceiver
        self._kernel_tables = kernel_tables
        self._tokens_per_block = tokens_per_block
        self._loading: dict[RequestId, LoadBlocks] = {}
        self._growing: set[RequestId] = set()
        self._failed_blocks: set[int] = set()
        self._counters: dict[str, float] = {}
        self._samples: Samples = {}
        self._last_gauges: dict[str, float] = {}
        self._last_bytes_sent = 0

    @property
    def card(self) -> RankCard:
        return self._transceiver.card

    @property
    def is_loading(self) -> bool:
        """Whether a load has not been reported."""
        return bool(self._loading)

    def run_now(self, orders: StepOrders) -> None:
        """All of it at once."""
        self.hear(orders)
        self.run(orders)

    def hear(self, orders: StepOrders) -> None:
        """What must be known before the step of these orders runs: which blocks it may use for something else.

        And which tokens are computed: the work of this thread so far, and not what the step will add to it.
        """
        for each in orders.growing:
            if each.request_id in self._growing:
                tables = self._kernel_tables(each.tables)
                self._transceiver.advance(each.request_id, each.num_computed, tables)
            else:
                self._growing.add(each.request_id)
                self._offer(each, each.num_computed)
        for end in orders.abandoned:
            self._growing.remove(end.request_id)
            self._transceiver.abandon(end.request_id, end.reason, comes_again=end.comes_again)

    def run(self, orders: StepOrders) -> None:
        """Start what else the scheduler side ordered; an offer opens before it settles."""
        for offer in orders.offers:
            if offer.request_id in self._growing:
                self._growing.remove(offer.request_id)
                tables = self._kernel_tables(offer.tables)
                self._transceiver.advance(offer.request_id, offer.num_tokens, tables)
                self._transceiver.complete(offer.request_id)
            else:
                self._offer(offer)
        for end in orders.settled:
            self._transceiver.settle(end.transfer_id, end.request_id, end.reason)
        for load in orders.loads:
            self._load(load)
        for request_id in orders.aborts:
            self._transceiver.abort(request_id)

    def _offer(self, offer: OpenOffer | GrowOffer, num_computed: int | None = None) -> None:
        tables = BlockTables(offer.num_tokens, self._kernel_tables(offer.tables))
        made = Offer(offer.transfer_id, offer.request_id, offer.prompt_key, tables, num_computed)
        self._transceiver.offer(made)

    def poll(self) -> Ended:
        """What ended since the last call."""
        progress = self._transceiver.poll()
        ended = Ended(sent=set(progress.sent))
        for received in progress.received:
            ended.received.add(received.request_id)
            if not received.ok:
                ended.failed.add(received.request_id)
            self._account(received)
        self._count("sends", len(progress.sent))
        for report in progress.reports:
            for name, value in counters_of(report).items():
                self._count(name, value)
        self._samples = joined(self._samples, samples_of(progress.reports))
        return ended

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose load failed, for engines that cannot be told of failed requests; each is told once."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> Report | None:
        """Counters since the last report and present gauges; `None` when nothing changed."""
        status = self._transceiver.status()
        sent = status.counters.get("bytes_out", 0)
        self._count("bytes_sent", sent - self._last_bytes_sent)
        self._last_bytes_sent = sent
        gauges: dict[str, float] = {
            "sessions": status.gauges.get("sessions", 0),
            "leases": status.gauges.get("leases", 0),
            "quarantined": status.gauges.get("quarantined", 0),
            "threads_troubled": status.gauges.get("threads_troubled", 0),
        }
        if not self._counters and gauges == self._last_gauges:
            return None
        counters, self._counters, self._last_gauges = self._counters, {}, gauges
        report = Report(counters=counters, gauges={f"rank{self.card.rank}": gauges})
        if self._samples:
            report["samples"], self._samples = self._samples, {}
        return report

    def close(self) -> None:
        """Stop transfers; what still runs ends as failed."""
        self._transceiver.close()

    def _load(self, load: LoadBlocks) -> None:
        self._loading[load.request_id] = load
        self._transceiver.receive(
            ReceiveOrder(
                request_id=load.request_id,
                transfer_id=load.transfer_id,
                prompt_key=load.prompt_key,
                tokens=load.tokens,
                tables=BlockTables(load.tokens.stop, self._kernel_tables(load.tables)),
                host=load.host,
                port=load.port,
                incarnation=load.incarnation,
            )
        )

    def _account(self, received: Received) -> None:
        load = self._loading.pop(received.request_id)
        if received.ok:
            logger.debug(
                "kvferry: request %s: %d tokens, %.3f MB from %d ranks of %s:%d in %.1f ms",
                received.request_id, len(load.tokens), received.num_bytes / 1e6, received.num_senders,
                load.host, load.port, 1e3 * received.times.total_s,
            )  # fmt: skip
            self._count("loads", 1)
            self._count("load_seconds", received.times.total_s)
        else:
            logger.warning(
                "kvferry: loading request %s from %s:%d failed: %s",
                received.request_id, load.host, load.port, received.reason,
            )  # fmt: skip
            self._count("loads_failed", 1)
            wanted = load.tokens.blocks(self._tokens_per_block)
            self._failed_blocks.update(table[i] for table in load.tables for i in wanted if table[i] != HOLE)
        self._count("bytes_received", received.num_bytes)

    def _count(self, name: str, value: float) -> None:
        if value:
            self._counters[name] = self._counters.get(name, 0) + value
