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
from typing import Any

import torch
from torch import Tensor

from kv_kernels.tuning import Tuning

LAYERS, HEADS, SIZE = 32, 8, 128
DEVICE = "cuda"
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

    def __init__(self, claim: str, gpu: str | None = None) -> None:
        """`gpu`: told, if this process is not to begin CUDA (see `device_name`)."""
        self.claim = claim
        self.rows: list[Row] = []
        self.commit = os.environ.get("KVFERRY_COMMIT") or _head()
        self.gpu = torch.cuda.get_device_name() if gpu is None else gpu

    def add(self, case: str, gbps: float, *, tuning: str = "default", bar: float = 0.0) -> float:
        """Prints the row at once, so that a run that is cut short has told what it knew."""
        row = Row(self.commit, self.gpu, case, tuning, round(gbps, 1), round(bar, 1))
        self.rows.append(row)
        verdict = "" if not bar else f"  bar {row.bar:.0f}: {'reached' if gbps >= bar else 'MISSED'}"
        print(f"{case:48} {tuning:22} {row.gbps:9.1f} GB/s{verdict}", flush=True)
        return gbps

    def timed(self, case: str, num_bytes: int, seconds: list[float], **more: Any) -> float:
        """The row of the median of these times; the slowest and the fastest stand in its tuning."""
        slow, fast = (num_bytes / pick(seconds) / 1e9 for pick in (max, min))
        return self.add(case, num_bytes / median(seconds) / 1e9, tuning=f"{slow:.1f}..{fast:.1f}", **more)

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


def device_name(device: str) -> str:
    """What a row says of the machine, asked of the driver's own tool: CUDA is not begun in this process."""
    if device == "cpu":
        return "CPU"
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def num_gpus() -> int:
    """GPUs of this host; CUDA is not begun in this process."""
    return torch.cuda.device_count()


def seconds(copy: Callable[[], object], repetitions: int = 10) -> float:
    """Median time of one call on the current stream, after three to warm up."""
    for _ in range(3):
        copy()
    events = [(_event(), _event()) for _ in range(repetitions)]
    for start, stop in events:
        # Why: behind a sleep of a millisecond the host is ahead, and its own time is not counted.
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        start.record()
        copy()
        stop.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(stop) for start, stop in events)) / 1e3


def planes_of(order: str, block: int = 16, heads: int = HEADS, held: int = 12288) -> list[Tensor]:
    """2 x LAYERS planes [B, T, H, D] in token-major ("BTHD") or head-major ("BHTD") memory, random bits."""
    shape = (2 * LAYERS, held // block, block, heads, SIZE)
    if order == "BHTD":
        shape = (2 * LAYERS, held // block, heads, block, SIZE)
    whole = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
    return list((whole.transpose(2, 3) if order == "BHTD" else whole).unbind(0))


def ids_of(planes: list[Tensor], tokens: int) -> list[int]:
    """Random blocks for so many tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(planes[0].shape[0], generator=generator)[: -(-tokens // planes[0].shape[1])].tolist()


def label(tuning: Tuning) -> str:
    """A tuning in a few words."""
    return f"{tuning.tile_words}w {tuning.num_warps}warps {tuning.num_programs or 'all'}"


def device_copy(table: Table) -> float:
    """The figure that others are held against: payload of a plain copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    gbps = source.nbytes / seconds(lambda: target.copy_(source)) / 1e9
    return table.add("device copy", gbps)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _head() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
