"""What the tiers of an engine have done, in the words of its metrics.

In:  counts of everything that has happened so far; present gauges.
Out: a Report of what is new, or none.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from kv_engine_adapter.metrics import Report

_TOLD: Final = (
    "hit_tokens", "saved_tokens", "fetched_tokens", "written_tokens", "no_room", "disk_late", "hints_refused"
)  # fmt: skip
_FAILURES: Final = ("loads_failed", "saves_failed", "fetches_short", "writes_failed")


class TierReports:
    """Remembers what was told."""

    def __init__(self) -> None:
        self._told: Counter[str] = Counter()
        self._gauges: Mapping[str, float] = {}

    def take(self, counts: Mapping[str, int], gauges: Mapping[str, float]) -> Report | None:
        """Counters since the last report and present gauges; `None` when nothing changed."""
        new = {name: float(number - self._told[name]) for name, number in counts.items()}
        counters = {f"tier_{name}": new[name] for name in _TOLD if new.get(name)}
        if failures := sum(new.get(name, 0) for name in _FAILURES):
            counters["tier_failures"] = failures
        if not counters and gauges == self._gauges:
            return None
        self._told, self._gauges = Counter(counts), gauges
        return Report(counters=counters, gauges={"tiers": dict(gauges)})
