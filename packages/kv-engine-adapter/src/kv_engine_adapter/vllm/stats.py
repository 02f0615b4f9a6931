"""Our reports in the shapes vLLM logs and serves at `/metrics`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kv_engine_adapter import metrics
from kv_transfer.tally import BOUNDS_S

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class FerryStats(KVConnectorStats):
    """One report (`kv_engine_adapter.metrics`) as vLLM carries it from worker to log and `/metrics`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "FerryStats":
        self.data = dict(metrics.merged(metrics.report_of(self.data), metrics.report_of(other.data)))
        return self

    def reduce(self) -> dict[str, int | float]:
        return metrics.summary(metrics.report_of(self.data))

    def is_empty(self) -> bool:
        return not self.data


def own_report(stats: KVConnectorStats | None) -> metrics.Report:
    """Our report in what vLLM hands over, which under MultiConnector is a container of all its children's stats."""
    if stats is not None and not isinstance(stats, FerryStats):
        stats = stats.data.get("FerryConnector")
    return metrics.report_of(stats.data) if isinstance(stats, FerryStats) else metrics.report_of({})


class FerryPromMetrics(KVConnectorPromMetrics):
    """What `kv_engine_adapter.metrics` names as Prometheus series, one child for each engine and set of labels."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {name: self._series(self._counter_cls, metric) for name, metric in metrics.COUNTERS.items()}
        self._gauges = {name: self._series(self._gauge_cls, metric) for name, metric in metrics.GAUGES.items()}
        for name, metric in metrics.TRANSFERS.items():
            self._counters.update(self._labelled(self._counter_cls, name, metric))
        self._histograms = self._labelled(self._histogram_cls, "seconds", metrics.SECONDS, buckets=list(BOUNDS_S))
        self._latest: dict[int, metrics.Gauges] = {}

    def _labelled(self, kind: Any, name: str, metric: metrics.Metric, **more: Any) -> dict[str, dict[int, Any]]:
        """A child for each engine and each set of label values, all made now: their number is known."""
        labels = [*self._labelnames, *metric.labels]
        made = kind(name=metric.name, documentation=metric.help, labelnames=labels, **more)
        engines = self.per_engine_labelvalues
        return {
            metrics.labelled(name, *values): create_metric_per_engine(
                made, {engine: [*ours, *values] for engine, ours in engines.items()}
            )
            for values in metrics.label_values(name)
        }

    def _series(self, kind: Any, metric: metrics.Metric) -> dict[int, Any]:
        made = kind(name=metric.name, documentation=metric.help, labelnames=self._labelnames)
        children: dict[int, Any] = create_metric_per_engine(made, self.per_engine_labelvalues)
        return children

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.get("counters", {}).items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
        for name, values in transfer_stats_data.get("samples", {}).items():
            for value in values if name in self._histograms else ():
                self._histograms[name][engine_idx].observe(value)
        latest = self._latest.setdefault(engine_idx, {})
        latest.update(transfer_stats_data.get("gauges", {}))
        for name, value in metrics.totals(latest).items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
