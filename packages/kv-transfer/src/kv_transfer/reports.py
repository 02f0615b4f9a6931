"""What one transfer was, once it is over: what moved, by which path and why, and where its time went.

Out: TransferReport, with a Leg for each peer; `line_of`, one line of it for a person.
Law: the stages of a report, and of a leg, follow one another and add up to its total. Chunks are pipelined: what of a
     later stage happens during an earlier one is counted there. A transfer that fails spends the rest of its time in
     the stage it was in. Torch-free values; times are seconds.

    load    order -prepare- Ready -queue- first grant -wire- last Data -scatter- last chunk in the blocks -finish- told
    direct  order -prepare- Ready -queue- the read begins -wire- it has ended -finish- proven, told
    send    Ask -prepare- Ready -queue- first gather -gather- first write -wire- last written -finish- Quiet
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kv_core.ids import RequestId, TransferId

MIB = 1 << 20


class Direction(enum.StrEnum):
    """Which way the bytes went, seen from us."""

    LOAD = "load"
    SEND = "send"


class Path(enum.StrEnum):
    """How they went."""

    DIRECT = "direct"
    """Read by a kernel where they lie (of a send: read by the peer, whichever way)."""
    IN_PLACE = "in place"
    """Read by the agent where they lie."""
    STAGED = "staged"
    LOCAL = "local"
    """Nothing was to be moved."""


class Stages(NamedTuple):
    """Seconds of each stage, one after the other."""

    prepare: float = 0.0
    queue: float = 0.0
    gather: float = 0.0
    wire: float = 0.0
    scatter: float = 0.0
    finish: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(slots=True)
class Marks:
    """When a transfer reached what ends each of its stages, by the reactor's clock; None: it has not, or never did."""

    begun: float
    ready: float | None = None
    granted: float | None = None
    gathered: float | None = None
    wired: float | None = None
    scattered: float | None = None

    def stages(self, ended: float) -> Stages:
        """From the beginning to the end without a gap."""
        found, at = [], self.begun
        for mark in (self.ready, self.granted, self.gathered, self.wired, self.scattered, ended):
            reached = max(at, ended if mark is None else min(mark, ended))
            found.append(reached - at)
            at = reached
        return Stages(*found)


def latest(begun: float, legs: Iterable[Marks]) -> Marks:
    """The marks of a whole: reached when the last of its legs has."""
    found = Marks(begun)
    for name in ("ready", "granted", "gathered", "wired", "scattered"):
        times = [getattr(leg, name) for leg in legs]
        setattr(found, name, max(times) if times and None not in times else None)
    return found


@dataclass(frozen=True, slots=True)
class Leg:
    """What went between us and one peer; `why` says what the path was chosen for."""

    peer: str
    path: Path
    why: str
    num_bytes: int
    num_chunks: int
    num_pieces: int
    stages: Stages


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One load of ours, or one session in which we sent. More than seven fields: this is all that is told of it."""

    direction: Direction
    name: RequestId
    """The request: ours of a load, that which was offered of a send."""
    transfer_id: TransferId
    ok: bool
    reason: str
    """Empty if ok; else why it failed, with both values where two sides differ."""
    num_tokens: int
    num_blocks: int
    """Blocks of ours that hold them, in one layer group."""
    legs: tuple[Leg, ...]
    stages: Stages

    def __str__(self) -> str:
        return line_of(self)

    @property
    def path(self) -> Path:
        """Staged if any of it was."""
        paths = {leg.path for leg in self.legs}
        return next((path for path in (Path.STAGED, Path.IN_PLACE, Path.DIRECT) if path in paths), Path.LOCAL)

    @property
    def why(self) -> str:
        """What that path was chosen for."""
        return next((leg.why for leg in self.legs if leg.path is self.path), "nothing to move")

    @property
    def num_bytes(self) -> int:
        return sum(leg.num_bytes for leg in self.legs)

    @property
    def num_chunks(self) -> int:
        return sum(leg.num_chunks for leg in self.legs)

    @property
    def num_pieces(self) -> int:
        return sum(leg.num_pieces for leg in self.legs)


def line_of(report: TransferReport) -> str:
    """One line for a log; times in milliseconds, stages that took none left out."""
    word = "from" if report.direction is Direction.LOAD else "to"
    whom = f" {word} {report.legs[0].peer}" if report.legs else ""
    if len(report.legs) > 1:
        whom += f" and {len(report.legs) - 1} more"
    took = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in report.stages._asdict().items() if s >= 5e-5)
    end = "" if report.ok else f" failed: {report.reason};"
    return (
        f"{report.direction} {report.name} (transfer {report.transfer_id[:8]}){whom}:{end} {report.num_blocks} blocks, "
        f"{report.num_bytes / MIB:.1f} MiB, {report.num_chunks} chunks in {1e3 * report.stages.total:.1f} ms"
        f"{f' ({took})' if took else ''}, {report.path}: {report.why}"
    )
