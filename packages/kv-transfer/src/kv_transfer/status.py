"""What is open now, and what has happened since the start, by name.

In:  counts from whoever keeps them.
Out: Status, for engines, tests, operators and the StatusReply on the wire.
Law: every gauge in OPEN is 0 when nothing is open and no peer is in doubt; counters only grow.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kv_transfer.reports import TransferReport
from kv_transfer.tally import NOTHING, Totals

OPEN: Final = (
    "sessions",
    "sessions_sending",
    "sessions_receiving",
    "parked",
    "offers",
    "growing",
    "loads",
    "leases",
    "quarantined",
    "staged_bytes",
    "holds",
    "releases",
)
"""Gauges that must come back to 0. `leases` counts staging regions in use, `quarantined` those a late writer may still
write, and `staged_bytes` all that is not free of both arenas. `peers` and `links` are gauges too, but stay;
`threads_troubled` counts threads of ours that hang or have failed."""


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of one rank or one instance door."""

    gauges: Mapping[str, int]
    counters: Mapping[str, int]
    trouble: str = ""
    """Why nothing new is begun: a thread of ours that hangs or has failed; empty if all is well."""
    reports: tuple[TransferReport, ...] = ()
    """The last transfers that have ended (`history.NUM_RECENT` at most), oldest first."""
    totals: Totals = NOTHING
    """Sums over all of them since the start."""

    @property
    def open(self) -> dict[str, int]:
        """The gauges in OPEN that are not 0."""
        return {name: self.gauges[name] for name in OPEN if self.gauges.get(name)}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open: no session, offer, load or staging region."""
        return not self.open


class Counters:
    """Named counts that only grow; of one thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        return dict(self._counts)
