"""What a rank has moved, for Prometheus: a collector over its status.

In:  for each rank, how to ask for its Status.
Out: TransferCollector, to be registered with a registry of prometheus_client.
Law: the only module that knows prometheus_client, which is optional (`kv-transfer[metrics]`). Nothing is counted here:
     a scrape reads sums that the rank keeps anyway. Labels are bounded: ranks as the caller names them, and words of
     our own; never a peer, a request or a reason.

    from prometheus_client import REGISTRY
    REGISTRY.register(TransferCollector({"0": transceiver.status}))
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kv_transfer.status import Status
from kv_transfer.tally import BOUNDS_S, Histogram, Totals


class TransferCollector(Collector):
    """One scrape asks every rank once."""

    def __init__(self, ranks: Mapping[str, Callable[[], Status]]) -> None:
        """`ranks`: the label of each, and how to ask it; from the scrape's thread, so its status must allow that."""
        self._ranks = dict(ranks)

    def describe(self) -> Iterator[Metric]:
        """Names alone, so that registering asks nobody."""
        return iter(_Families().all)

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        for rank, ask in self._ranks.items():
            status = ask()
            families.add_totals(rank, status.totals)
            families.add_status(rank, status)
        return iter(families.all)


class _Families:
    """The series of one scrape."""

    def __init__(self) -> None:
        way = ["rank", "direction", "path"]
        self._transfers = CounterMetricFamily(
            "kvferry_transfers", "Loads, and sessions that have sent, that have ended.", labels=[*way, "outcome"]
        )
        self._moved = {
            "num_bytes": CounterMetricFamily("kvferry_transfer_bytes", "Bytes moved.", labels=way),
            "chunks": CounterMetricFamily("kvferry_transfer_chunks", "Chunks moved.", labels=way),
            "pieces": CounterMetricFamily("kvferry_transfer_pieces", "Pieces of plans asked for.", labels=way),
        }
        self._seconds = HistogramMetricFamily(
            "kvferry_transfer_seconds",
            "Seconds of each stage of a transfer that went well; they add up to the stage total.",
            labels=["rank", "direction", "stage"],
        )
        self._open = GaugeMetricFamily("kvferry_open", "What is open now.", labels=["rank", "what"])
        self._events = CounterMetricFamily("kvferry_events", "What has happened.", labels=["rank", "event"])

    @property
    def all(self) -> list[Metric]:
        return [self._transfers, *self._moved.values(), self._seconds, self._open, self._events]

    def add_totals(self, rank: str, totals: Totals) -> None:
        for end, count in totals.transfers.items():
            self._transfers.add_metric([rank, *end], count)
        for name, family in self._moved.items():
            for way, amount in getattr(totals, name).items():
                family.add_metric([rank, *way], amount)
        for (direction, stage), histogram in totals.seconds.items():
            self._seconds.add_metric([rank, direction, stage], _buckets(histogram), histogram.sum_s)

    def add_status(self, rank: str, status: Status) -> None:
        for name, value in status.gauges.items():
            self._open.add_metric([rank, name], value)
        for name, value in status.counters.items():
            self._events.add_metric([rank, name], value)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bound and how many took at most that, as Prometheus has it."""
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
