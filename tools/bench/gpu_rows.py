"""Rows of a GPU benchmark: timed, printed as a table, kept as CSV, and summed up in one JSON line.

In:  copies to time, the bytes each moves, and the bar it is held to.
Out: a table on standard output whose last line is one JSON object; lines appended to a CSV file.
Law: a row names commit and GPU; a figure is the median of its repetitions, between two events on the stream.
"""

import csv
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One figure in GB/s (10^9 bytes); `bar` is the least it must reach, 0 if none."""

    commit: str
    gpu: str
    case: str
    tuning: str
    gbps: float
    bar: float


class Table:
    """The rows of one run."""

    def __init__(self, claim: str) -> None:
        self.claim = claim
        self.rows: list[Row] = []
        self._commit = os.environ.get("KVFERRY_COMMIT") or _head()
        self._gpu = torch.cuda.get_device_name()

    def add(self, case: str, gbps: float, *, tuning: str = "default", bar: float = 0.0) -> float:
        """Prints the row at once, so that a run that is cut short has told what it knew."""
        row = Row(self._commit, self._gpu, case, tuning, round(gbps, 1), round(bar, 1))
        self.rows.append(row)
        verdict = "" if not bar else f"  bar {row.bar:.0f}: {'reached' if gbps >= bar else 'MISSED'}"
        print(f"{case:48} {tuning:22} {row.gbps:9.1f} GB/s{verdict}", flush=True)
        return gbps

    def finish(self, folder: Path = RESULTS) -> None:
        """Appends to the claim's CSV and prints the JSON line."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.claim}.csv"
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(self.rows[0])))
            if is_new:
                writer.writeheader()
            writer.writerows(asdict(row) for row in self.rows)
        missed = [row.case for row in self.rows if row.gbps < row.bar]
        print(json.dumps({"claim": self.claim, "rows": len(self.rows), "missed": missed}))


def seconds(copy: Callable[[], object], repetitions: int = 10) -> float:
    """Median time of one call on the current stream, after three to warm up."""
    for _ in range(3):
        copy()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for start, stop in events:
        # Why: behind a sleep of a millisecond the host is ahead, and its own time is not counted.
        torch.cuda._sleep(2_000_000)
        start.record()
        copy()
        stop.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(stop) for start, stop in events) / 1e3


def _head() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
