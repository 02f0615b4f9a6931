"""Time to write a slot to a file and to read it back, by each way to move files and with a checksum.

In:  a directory, sizes of slots, the device that they lie on.
Out: a table; the last line is one JSON object with `claim`, `ours` (the way that is the default), `against`, `ratio`
     and all figures, in GB/s. With `--append` it is also added to a file.
Law: all ways move the same bytes by the same code (`SlotFiles`: a new file beside the old one, then renamed) and take
     turns. Files are read right after they were written, from the page cache; with `--cold` the cache is emptied of
     them before (written through to the disk and dropped). A way that does not reach the device goes through host
     memory, as the copy engine does. A way that does not work here is left out and said so.

    python tools/bench/files.py [--device cuda] [--kib 64 1024 16384] [--turns 7] [--cold] [--append FILE]
"""

import argparse
import json
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from kv_transfer.files import WAYS, FilesConfig, Way, open_mover
from kv_transfer.process_directory import ProcessDirectory
from kv_transfer.slot_files import SlotFiles, Sums

DEFAULT = FilesConfig()
SLOTS = 8
"""Files written and read in a turn."""

Key = tuple[str, int, str]
"""Way (with `+ sum` where checksums are on), KiB of a slot, `write` or `read`."""


@dataclass(frozen=True)
class Contender:
    """Files of one way and size."""

    name: str
    kib: int
    files: SlotFiles

    def write(self, content: Tensor) -> None:
        is_reached = self.files.mover.reaches(content.device)
        for slot in range(SLOTS):
            self.files.write(slot, content if is_reached else content.cpu())

    def read(self, into: Tensor) -> None:
        if self.files.mover.reaches(into.device):
            for slot in range(SLOTS):
                self.files.read(slot, into)
            return
        host = torch.empty_like(into, device="cpu")
        for slot in range(SLOTS):
            self.files.read(slot, host)
            into.copy_(host)

    def drop(self) -> None:
        """Leave nothing of the files in the page cache."""
        for slot in range(SLOTS):
            with self.files.path_of(slot).open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def contenders(directory: Path, kib: int, device: torch.device) -> Iterator[list[Contender]]:
    """One of each way that works here, with and without a checksum."""
    root, made = ProcessDirectory(directory), []
    for number, way in enumerate(WAYS):
        mover = open_mover(FilesConfig(way=way), directory, device)
        if way != "plain" and mover.name == "plain":
            print(f"not measured: {way} does not work here")
            continue
        for checksum in (False, True):
            name = way + (" + sum" if checksum else "")
            sums = Sums() if checksum else None
            made.append(Contender(name, kib, SlotFiles(root, number, checksum, kib << 10, mover, sums)))
    yield made
    for mover in {id(one.files.mover): one.files.mover for one in made}.values():
        mover.close()
    root.close()


def measured(
    directory: Path, sizes: list[int], turns: int, device: torch.device, *, cold: bool
) -> dict[Key, list[float]]:
    """Seconds of each turn but the first, which warms up."""
    seconds: dict[Key, list[float]] = {}
    for kib in sizes:
        content = torch.randint(0, 256, (kib << 10,), dtype=torch.uint8, device=device)
        with contenders(directory, kib, device) as ways:
            for number in range(turns + 1):
                for way in ways:
                    times = turn(way, content, cold=cold)
                    if number:
                        for what, time in zip(("write", "read"), times, strict=True):
                            seconds.setdefault((way.name, kib, what), []).append(time)
    return seconds


def turn(way: Contender, content: Tensor, *, cold: bool) -> tuple[float, float]:
    """Seconds to write all slots and to read them."""
    found = torch.zeros_like(content)
    settle(content.device)
    start = perf_counter()
    way.write(content)
    written = perf_counter() - start
    if cold:
        way.drop()
    start = perf_counter()
    way.read(found)
    settle(content.device)
    read = perf_counter() - start
    assert torch.equal(found, content), "law: what is read is what was written"
    return written, read


def settle(device: torch.device) -> None:
    """Wait for what is queued there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gbps(key: Key, times: list[float]) -> float:
    return SLOTS * (key[1] << 10) / median(times) / 1e9


def summary(seconds: dict[Key, list[float]], device: torch.device, *, cold: bool) -> dict[str, object]:
    """The last line. `ratio`: speed of the default over that of its fastest rival, turn by turn; the median of all."""
    ours = name_of(DEFAULT.way)
    ratios: list[float] = []
    for (name, kib, what), times in seconds.items():
        rivals = [seconds[rival, kib, what] for rival in RIVALS if (rival, kib, what) in seconds]
        if name == ours and rivals:
            ratios += [theirs / mine for mine, theirs in zip(times, min(rivals, key=median), strict=True)]
    return {
        "commit": commit(),
        "machine": f"{os.cpu_count()} x {platform.machine()}",
        "claim": "files " + ("from the disk" if cold else "from the page cache") + f", {device.type}",
        "ours": ours,
        "against": list(RIVALS),
        "ratio": round(median(ratios), 3) if ratios else None,
        "gbps": {
            f"{name} {kib} KiB {what}": round(gbps((name, kib, what), times), 2)
            for (name, kib, what), times in seconds.items()
        },
    }


def name_of(way: Way) -> str:
    return way + (" + sum" if DEFAULT.checksum else "")


RIVALS = tuple(name_of(way) for way in WAYS if way != DEFAULT.way)


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def main() -> None:
    logging.basicConfig(format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--directory", type=Path, default=None, help="default: a temporary one")
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--append", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        seconds = measured(Path(scratch), options.kib, options.turns, options.device, cold=options.cold)
    print(f"{'way':<14} {'KiB':>6} {'write GB/s':>11} {'read GB/s':>10}")
    for name, kib in dict.fromkeys((name, kib) for name, kib, _ in seconds):
        write, read = (gbps((name, kib, what), seconds[name, kib, what]) for what in ("write", "read"))
        print(f"{name:<14} {kib:>6} {write:>11.2f} {read:>10.2f}")
    line = json.dumps(summary(seconds, options.device, cold=options.cold))
    if options.append:
        with options.append.open("a") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
