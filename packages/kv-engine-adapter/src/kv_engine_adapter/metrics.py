"""Counters and gauges of one engine, as plain values that add up over ranks and steps.

Law: a counter is a difference since the last report, so sums over steps and ranks are right; a gauge is kept by its
     source (a rank, or the scheduler), newest wins, so that a rank which did not report in a step keeps its value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

Counters = dict[str, float]
Gauges = dict[str, dict[str, float]]


class Report(TypedDict):
    """What one rank, or several merged, have to say; gauges by source."""

    counters: Counters
    gauges: Gauges


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series of ours: its name in `/metrics` and what it means."""

    name: str
    help: str


COUNTERS: dict[str, Metric] = {
    "loads": Metric("kvferry:loads", "Loads from peers that ended well, counted on every rank."),
    "loads_failed": Metric("kvferry:loads_failed", "Loads from peers that failed, counted on every rank."),
    "sends": Metric("kvferry:sends", "Offered requests whose blocks were given back, counted on every rank."),
    "bytes_received": Metric("kvferry:bytes_received", "KV bytes received from peers."),
    "bytes_sent": Metric("kvferry:bytes_sent", "KV bytes written to peers."),
    "load_seconds": Metric("kvferry:load_seconds", "Time from order to last block, summed over loads."),
    "handovers_refused": Metric("kvferry:handovers_refused", "Requests whose kv_transfer_params were unusable."),
}

GAUGES: dict[str, Metric] = {
    "sessions": Metric("kvferry:sessions", "Transfer sessions now open."),
    "offers": Metric("kvferry:offers", "Offers now held for peers."),
    "loads": Metric("kvferry:loads_running", "Loads now running."),
    "leases": Metric("kvferry:staging_leases", "Staging regions now leased."),
    "quarantined": Metric("kvferry:staging_quarantined", "Staging regions a late writer may still write."),
    "threads_troubled": Metric("kvferry:threads_troubled", "Threads of ours that hang or have failed; see the log."),
}


def report_of(payload: Mapping[str, Any]) -> Report:
    """The report that a host's container carries; an empty container is an empty report."""
    return cast("Report", payload) if payload else Report(counters={}, gauges={})


def merged(ours: Report, theirs: Report) -> Report:
    """Two reports as one: counters add, gauges of the later report replace those of the same source."""
    counters = dict(ours["counters"])
    for name, value in theirs["counters"].items():
        counters[name] = counters.get(name, 0) + value
    return Report(counters=counters, gauges={**ours["gauges"], **theirs["gauges"]})


def totals(gauges: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The gauges summed over their sources."""
    sums: dict[str, float] = {}
    for values in gauges.values():
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def summary(report: Report) -> dict[str, int | float]:
    """One line for a log: what moved, how fast, what failed."""
    counters = report["counters"]
    loads, seconds = counters.get("loads", 0), counters.get("load_seconds", 0)
    received = counters.get("bytes_received", 0)
    return {
        "loads": int(loads),
        "failed loads": int(counters.get("loads_failed", 0)),
        "sends": int(counters.get("sends", 0)),
        "MB received": round(received / 1e6, 3),
        "MB sent": round(counters.get("bytes_sent", 0) / 1e6, 3),
        "mean load ms": round(1e3 * seconds / loads, 3) if loads else 0.0,
        "quarantined regions": int(totals(report["gauges"]).get("quarantined", 0)),
    }
