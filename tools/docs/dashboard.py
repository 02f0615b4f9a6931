"""Writes docs/grafana-dashboard.json: what to watch of FerryConnector, as panels for Grafana.

In:  the panels below, and vLLM's own labels (`model_name`, `engine`, and Prometheus's `instance`).
Out: the file, to be imported in Grafana (Dashboards > New > Import); it asks for the Prometheus data source.
Law: the file is what this prints; a test compares, and looks up every series in `kv_engine_adapter.metrics`.

Usage: .venv/bin/python tools/docs/dashboard.py
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "docs" / "grafana-dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
CHOSEN = 'model_name=~"$model", instance=~"$instance"'
WIDTH, HEIGHT, COLUMNS = 12, 8, 2
BY_ENGINE = "instance, engine"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: a title, what a reader should make of it, the unit Grafana shows, and (expression, legend) pairs."""

    title: str
    meaning: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(series: str, by: str, more: str = "") -> str:
    """Per second, summed by these labels."""
    return f"sum by ({by}) (rate({series}{{{CHOSEN}{more}}}[$__rate_interval]))"


def now(series: str) -> str:
    """Of each engine."""
    return f"sum by ({BY_ENGINE}) ({series}{{{CHOSEN}}})"


def quantile(which: float, by: str, more: str = "") -> str:
    """Of the seconds of transfers."""
    return f"histogram_quantile({which}, {rate('kvferry:transfer_seconds_bucket', f'le, {by}', more)})"


def mean(sums: str, counts: str, by: str, more: str = "") -> str:
    """Of each one counted."""
    return f"{rate(sums, by, more)} / {rate(counts, by, more)}"


PARTS = ', direction="load", stage!="total"'
ENGINE = "{{instance}} engine {{engine}}"
PANELS = (
    Panel(
        "Loads that failed",
        "Should be 0. Each has its reason in the engine's log; the request is recomputed or failed as "
        "kv_load_failure_policy says.",
        "ops",
        ((rate("kvferry:loads_failed_total", BY_ENGINE), ENGINE),),
    ),
    Panel(
        "Threads in trouble",
        "Above 0 for long: restart the engine (decisions/0005-threads-that-fail.md).",
        "short",
        ((now("kvferry:threads_troubled"), ENGINE),),
    ),
    Panel(
        "Loads and sends",
        "Loads that ended well, and requests whose blocks were given back; both are counted on every rank.",
        "ops",
        (
            (rate("kvferry:loads_total", BY_ENGINE), f"loads, {ENGINE}"),
            (rate("kvferry:sends_total", BY_ENGINE), f"sends, {ENGINE}"),
        ),
    ),
    Panel(
        "Hand-overs refused",
        "Requests whose kv_transfer_params were unusable: a router or client is set up wrongly, or a host is not in "
        "`peers`.",
        "ops",
        ((rate("kvferry:handovers_refused_total", BY_ENGINE), ENGINE),),
    ),
    Panel(
        "Tokens of the tiers",
        "Loaded from host memory, copied to it, read from disk, written to it.",
        "ops",
        tuple(
            (rate(f"kvferry:tier_{what}_tokens_total", BY_ENGINE), f"{what}, {ENGINE}")
            for what in ("hit", "saved", "fetched", "written")
        ),
    ),
    Panel(
        "Copies of the tiers",
        "Bytes a second while copying between device and host memory; host slots in use and jobs now open.",
        "short",
        (
            *(
                (
                    mean(f"kvferry:tier_{way}_bytes_total", f"kvferry:tier_{way}_seconds_total", BY_ENGINE),
                    f"{way}, {ENGINE}",
                )
                for way in ("load", "save")
            ),
            (now("kvferry:tier_slots_held"), f"slots held, {ENGINE}"),
            (now("kvferry:tier_jobs"), f"jobs, {ENGINE}"),
        ),
    ),
    Panel(
        "When the tiers load",
        "From how many tokens on loading from host memory or disk beats computing them; no line: never.",
        "short",
        tuple((now(f"kvferry:tier_break_even_{what}_tokens"), f"{what}, {ENGINE}") for what in ("host", "disk")),
    ),
    Panel(
        "A token of the tiers",
        "What computing one costs, and loading it from host memory or (on top) from disk.",
        "s",
        tuple(
            (now(f"kvferry:tier_{what}_token_seconds"), f"{what}, {ENGINE}") for what in ("recompute", "host", "disk")
        ),
    ),
    Panel(
        "What the tiers did not do",
        "Failures and disk errors should be 0; the engine's log has the reasons. No room: raise tier_host_bytes. Late: "
        "the disk is slow, lower tier_disk_wait_s or take a faster one. Hints refused: a client writes them wrongly.",
        "ops",
        tuple(
            (rate(f"kvferry:tier_{what}_total", BY_ENGINE), f"{what}, {ENGINE}")
            for what in ("failures", "disk_errors", "no_room", "disk_late", "hints_refused")
        ),
    ),
    Panel(
        "Bytes by path",
        "direct: one kernel over a mapped cache; staged: gather, NIXL, scatter; in place: read by the agent.",
        "Bps",
        ((rate("kvferry:transfer_bytes_total", "direction, path"), "{{direction}} {{path}}"),),
    ),
    Panel(
        "KV bytes received and sent",
        "By engine; compare with what the network can carry.",
        "Bps",
        (
            (rate("kvferry:bytes_received_total", BY_ENGINE), f"received, {ENGINE}"),
            (rate("kvferry:bytes_sent_total", BY_ENGINE), f"sent, {ENGINE}"),
        ),
    ),
    Panel(
        "Time of a load",
        "From the order to the report, of loads that went well.",
        "s",
        tuple(
            (quantile(which, "direction", ', direction="load", stage="total"'), f"p{round(100 * which)}")
            for which in (0.5, 0.95, 0.99)
        ),
    ),
    Panel(
        "Where that time goes",
        "Mean of each stage; prepare grows with late offers, queue with full or quarantined staging, wire with the "
        "network.",
        "s",
        ((mean("kvferry:transfer_seconds_sum", "kvferry:transfer_seconds_count", "stage", PARTS), "{{stage}}"),),
    ),
    Panel(
        "Open now",
        "Sessions, offers held for peers, loads running. Offers that only grow: nobody fetches them.",
        "short",
        (
            (now("kvferry:sessions"), f"sessions, {ENGINE}"),
            (now("kvferry:offers"), f"offers, {ENGINE}"),
            (now("kvferry:loads_running"), f"loads, {ENGINE}"),
        ),
    ),
    Panel(
        "Staging",
        "Regions leased, and those a late writer may still write; the latter fall when that peer is quiet or dead.",
        "short",
        (
            (now("kvferry:staging_leases"), f"leased, {ENGINE}"),
            (now("kvferry:staging_quarantined"), f"quarantined, {ENGINE}"),
        ),
    ),
    Panel(
        "Transfers by outcome",
        "Loads, and sessions that have sent.",
        "ops",
        ((rate("kvferry:transfers_total", "direction, outcome"), "{{direction}} {{outcome}}"),),
    ),
    Panel(
        "Bytes of a chunk",
        "Small chunks mean small staging or short prompts.",
        "bytes",
        ((mean("kvferry:transfer_bytes_total", "kvferry:transfer_chunks_total", "direction"), "{{direction}}"),),
    ),
)


def dashboard() -> dict[str, Any]:
    """The whole dashboard as Grafana imports it."""
    return {
        "__inputs": [
            {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"},
        ],
        "title": "kvferry",
        "uid": "kvferry",
        "tags": ["vllm", "kv cache"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_variable("model", "model_name"), _variable("instance", "instance")]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _variable(name: str, label: str) -> dict[str, Any]:
    """A choice of values of one label, all of them at first."""
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values(kvferry:sessions, {label})",
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": list(_targets(panel)),
    }


def _targets(panel: Panel) -> Iterator[dict[str, Any]]:
    for letter, (expression, legend) in zip("ABCDEFGH", panel.queries, strict=False):
        yield {"refId": letter, "datasource": SOURCE, "expr": expression, "legendFormat": legend}


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
