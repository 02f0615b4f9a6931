"""Sums over all transfers since the start, with label sets that are bounded by their types.

In:  TransferReports, one after the other.
Out: Totals: counts, bytes, chunks, pieces; histograms of seconds.
Law: a peer is never a label. Sums only grow; what failed is counted, with the bytes that had moved, and is left out of
     the histograms: a deadline says nothing of speed.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kv_transfer.reports import Direction, Path, TransferReport

BOUNDS_S: Final = (0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
"""Upper bounds of the buckets: from a message within a host to the deadline of a load."""


class Way(NamedTuple):
    """Labels of what moved."""

    direction: Direction
    path: Path


class End(NamedTuple):
    """Labels of what ended."""

    direction: Direction
    path: Path
    outcome: str
    """"ok" or "failed"."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many took at most each of BOUNDS_S (not summed up), the last of all more; and their sum."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True)
class Totals:
    """A snapshot; `seconds` by (direction, stage), where the stage "total" is the whole."""

    transfers: Mapping[End, int] = field(default_factory=dict)
    num_bytes: Mapping[Way, int] = field(default_factory=dict)
    chunks: Mapping[Way, int] = field(default_factory=dict)
    pieces: Mapping[Way, int] = field(default_factory=dict)
    seconds: Mapping[tuple[Direction, str], Histogram] = field(default_factory=dict)


NOTHING: Final = Totals()


@dataclass(slots=True)
class _Times:
    """A histogram that grows."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class Tally:
    """The sums; of one thread."""

    def __init__(self) -> None:
        self._transfers: Counter[End] = Counter()
        self._num_bytes: Counter[Way] = Counter()
        self._chunks: Counter[Way] = Counter()
        self._pieces: Counter[Way] = Counter()
        self._seconds: defaultdict[tuple[Direction, str], _Times] = defaultdict(_Times)

    def add(self, report: TransferReport) -> None:
        """One more transfer."""
        self._transfers[End(report.direction, report.path, "ok" if report.ok else "failed")] += 1
        for leg in report.legs:
            way = Way(report.direction, leg.path)
            self._num_bytes[way] += leg.num_bytes
            self._chunks[way] += leg.num_chunks
            self._pieces[way] += leg.num_pieces
        if report.ok:
            for stage, seconds in (*report.stages._asdict().items(), ("total", report.stages.total)):
                self._seconds[report.direction, stage].add(seconds)

    def snapshot(self) -> Totals:
        """The sums so far."""
        seconds = {key: Histogram(tuple(times.counts), times.sum_s) for key, times in self._seconds.items()}
        return Totals(dict(self._transfers), dict(self._num_bytes), dict(self._chunks), dict(self._pieces), seconds)
