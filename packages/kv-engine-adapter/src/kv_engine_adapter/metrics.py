"""Counters and gauges of one engine, as plain values that add up over ranks and steps.

Law: a counter is a difference since the last report, so sums over steps and ranks are right; a gauge is kept by its
     source (a rank, or the scheduler), newest wins, so that a rank which did not report in a step keeps its value.
     Counters and samples of transfers are named with their labels, all of which are listed here: never a peer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NotRequired, TypedDict, cast

from kv_transfer.reports import Direction, Path, Stages, TransferReport

Counters = dict[str, float]
Gauges = dict[str, dict[str, float]]
Samples = dict[str, list[float]]
"""Seconds, by direction and stage, as `labelled` writes them."""

MAX_SAMPLES: Final = 4096
"""Of one series and report; those of an engine that nobody asks are dropped, newest last."""


class Report(TypedDict):
    """What one rank, or several merged, have to say; gauges by source."""

    counters: Counters
    gauges: Gauges
    samples: NotRequired[Samples]


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series of ours: its name in `/metrics` and what it means."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


COUNTERS: dict[str, Metric] = {
    "loads": Metric("kvferry:loads", "Loads from peers that ended well, counted on every rank."),
    "loads_failed": Metric("kvferry:loads_failed", "Loads from peers that failed, counted on every rank."),
    "sends": Metric("kvferry:sends", "Offered requests whose blocks were given back, counted on every rank."),
    "bytes_received": Metric("kvferry:bytes_received", "KV bytes received from peers."),
    "bytes_sent": Metric("kvferry:bytes_sent", "KV bytes written to peers."),
    "load_seconds": Metric("kvferry:load_seconds", "Time from order to last block, summed over loads."),
    "handovers_refused": Metric("kvferry:handovers_refused", "Requests whose kv_transfer_params were unusable."),
    "tier_hit_tokens": Metric("kvferry:tier_hit_tokens", "Tokens of prompts loaded from the host tier."),
    "tier_saved_tokens": Metric("kvferry:tier_saved_tokens", "Tokens copied to the host tier."),
    "tier_fetched_tokens": Metric("kvferry:tier_fetched_tokens", "Tokens read from disk into the host tier."),
    "tier_written_tokens": Metric("kvferry:tier_written_tokens", "Tokens written from the host tier to disk."),
    "tier_failures": Metric(
        "kvferry:tier_failures", "Loads, saves, reads and writes of the tiers that failed or fell short."
    ),
    "tier_no_room": Metric("kvferry:tier_no_room", "Prefixes not kept or not fetched: too many host slots in use."),
    "tier_disk_late": Metric(
        "kvferry:tier_disk_late", "Prompts that were computed after they had waited for the disk."
    ),
    "tier_hints_refused": Metric("kvferry:tier_hints_refused", "Hints of retention that could not be read."),
    "tier_load_bytes": Metric("kvferry:tier_load_bytes", "Bytes copied from host slots, on every rank."),
    "tier_load_seconds": Metric("kvferry:tier_load_seconds", "Time spent copying them."),
    "tier_save_bytes": Metric("kvferry:tier_save_bytes", "Bytes copied into host slots, on every rank."),
    "tier_save_seconds": Metric("kvferry:tier_save_seconds", "Time spent copying them."),
    "tier_disk_errors": Metric("kvferry:tier_disk_errors", "Records of the disk that could not be read or written."),
}

GAUGES: dict[str, Metric] = {
    "sessions": Metric("kvferry:sessions", "Transfer sessions now open."),
    "offers": Metric("kvferry:offers", "Offers now held for peers."),
    "loads": Metric("kvferry:loads_running", "Loads now running."),
    "leases": Metric("kvferry:staging_leases", "Staging regions now leased."),
    "quarantined": Metric("kvferry:staging_quarantined", "Staging regions a late writer may still write."),
    "tier_slots_held": Metric("kvferry:tier_slots_held", "Host slots in use by copies and by the disk."),
    "tier_jobs": Metric("kvferry:tier_jobs", "Copies, reads and writes of the tiers now open."),
    "tier_recompute_token_s": Metric("kvferry:tier_recompute_token_seconds", "What computing a token costs."),
    "tier_host_token_s": Metric("kvferry:tier_host_token_seconds", "What loading a token from host memory costs."),
    "tier_disk_token_s": Metric("kvferry:tier_disk_token_seconds", "What reading a token from disk costs."),
    "tier_break_even_host_tokens": Metric(
        "kvferry:tier_break_even_host_tokens", "From how many tokens on loading from host memory pays; +Inf: never."
    ),
    "tier_break_even_disk_tokens": Metric(
        "kvferry:tier_break_even_disk_tokens", "From how many tokens on loading from disk pays; +Inf: never."
    ),
    "threads_troubled": Metric("kvferry:threads_troubled", "Threads of ours that hang or have failed; see the log."),
}


WAYS: Final = tuple(product(Direction, Path))
STAGES: Final = (*Stages._fields, "total")

TRANSFERS: dict[str, Metric] = {
    "transfers": Metric(
        "kvferry:transfers", "Loads, and sessions that have sent, that have ended.", ("direction", "path", "outcome")
    ),
    "transfer_bytes": Metric("kvferry:transfer_bytes", "Bytes moved.", ("direction", "path")),
    "transfer_chunks": Metric("kvferry:transfer_chunks", "Chunks moved.", ("direction", "path")),
}
"""Counters of transfers, counted on every rank."""

SECONDS: Final = Metric(
    "kvferry:transfer_seconds",
    "Seconds of each stage of a transfer that went well; the stages add up to the stage total.",
    ("direction", "stage"),
)


def labelled(name: str, *labels: str) -> str:
    """A series of a metric with labels, as one key."""
    return "|".join((name, *labels))


def label_values(name: str) -> list[tuple[str, ...]]:
    """All label values that a metric of transfers can have."""
    if name == "transfers":
        return [(*way, outcome) for way in WAYS for outcome in ("ok", "failed")]
    return list(WAYS) if name in TRANSFERS else list(product(Direction, STAGES))


def counters_of(report: TransferReport) -> Counters:
    """What one transfer adds."""
    found: Counters = {labelled("transfers", report.direction, report.path, "ok" if report.ok else "failed"): 1}
    for leg in report.legs:
        for name, amount in (("transfer_bytes", leg.num_bytes), ("transfer_chunks", leg.num_chunks)):
            key = labelled(name, report.direction, leg.path)
            found[key] = found.get(key, 0) + amount
    return found


def samples_of(reports: Sequence[TransferReport]) -> Samples:
    """The seconds of those that went well."""
    found: Samples = {}
    for report in reports:
        if report.ok:
            for stage, seconds in (*report.stages._asdict().items(), ("total", report.stages.total)):
                found.setdefault(labelled("seconds", report.direction, stage), []).append(seconds)
    return found


def report_of(payload: Mapping[str, Any]) -> Report:
    """The report that a host's container carries; an empty container is an empty report."""
    return cast("Report", payload) if payload else Report(counters={}, gauges={})


def merged(ours: Report, theirs: Report) -> Report:
    """Two reports as one: counters add, gauges of the later report replace those of the same source."""
    counters = dict(ours["counters"])
    for name, value in theirs["counters"].items():
        counters[name] = counters.get(name, 0) + value
    report = Report(counters=counters, gauges={**ours["gauges"], **theirs["gauges"]})
    if samples := joined(ours.get("samples", {}), theirs.get("samples", {})):
        report["samples"] = samples
    return report


def joined(ours: Mapping[str, list[float]], theirs: Mapping[str, list[float]]) -> Samples:
    """The samples of both, series by series."""
    return {name: [*ours.get(name, []), *theirs.get(name, [])][:MAX_SAMPLES] for name in {**ours, **theirs}}


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
