"""Which blocks come into the tiers and leave them, in the engine's own names: for routers that look at more than load.

In:  events of the manager of the host slots; how much of a prefix the disk was found to hold; the names that the
     engine has for the blocks of a request.
Out: `BlocksStored` and `BlocksRemoved`, in the order in which they happened.
Law: whole blocks only. Of host memory is told exactly what is found there. Of the disk, which others share and clean
     up, is told what was written or found, until it is looked for and not found. Only what was told is removed. What
     another request has used is told again, as vLLM does of the device: whoever began to read in between learns of it.
"""

import enum
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from kv_core.events import Event, Removed, Stored
from kv_core.keys import BlockKey
from kv_core.token_log import unpacked

MAX_TOLD: Final = 1 << 17
"""Blocks told of the disk and remembered; beyond, the oldest are told to be gone. 160 bytes each."""


class Medium(enum.Enum):
    """Where a block lies."""

    HOST = enum.auto()
    DISK = enum.auto()


class BlockName(NamedTuple):
    """The engine's hash of a block; `extra_keys` is what entered it beside tokens, as the engine has it."""

    hash: bytes
    extra_keys: tuple[object, ...] | None = None


class BlocksStored(NamedTuple):
    """Consecutive blocks that follow `parent` (None: the first of a prompt), with all their tokens."""

    medium: Medium
    parent: bytes | None
    names: tuple[BlockName, ...]
    tokens: tuple[int, ...]


class BlocksRemoved(NamedTuple):
    """Blocks that are there no more."""

    medium: Medium
    hashes: tuple[bytes, ...]


TierEvent = BlocksStored | BlocksRemoved


class _Told(NamedTuple):
    """A block of host memory that was told: its place in its prompt, and its name."""

    ordinal: int
    hash: bytes


class TierEvents:
    """What is told of one engine's tiers."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._news: list[TierEvent] = []
        self._host: dict[BlockKey, _Told] = {}
        self._in_host: set[bytes] = set()
        self._disk: dict[bytes, None] = {}

    def take(self) -> list[TierEvent]:
        """What was told since the last call."""
        news, self._news = self._news, []
        return news

    def host_changed(self, events: Iterable[Event], names: Sequence[BlockName]) -> None:
        """The manager's events of one call; `names` are those of the request whose blocks it published."""
        for event in events:
            if isinstance(event.payload, Stored):
                self._host_stored(event.payload, names)
            elif isinstance(event.payload, Removed):
                told = [self._host.pop(key).hash for key in event.payload.keys if key in self._host]
                self._in_host.difference_update(told)
                self._removed(Medium.HOST, told)

    def host_used(self, tokens: Sequence[int], names: Sequence[BlockName], num_tokens: int) -> None:
        """A request ended of which the first `num_tokens` are in host memory already."""
        used = takewhile(lambda name: name.hash in self._in_host, names[: num_tokens // self._tokens_per_block])
        if num_blocks := sum(1 for _ in used):
            self._stored(Medium.HOST, names, 0, tokens, num_blocks)

    def on_disk(self, tokens: Sequence[int], names: Sequence[BlockName], num_tokens: int) -> None:
        """The disk holds the first `num_tokens` of these tokens, and none of the others."""
        names = names[: len(tokens) // self._tokens_per_block]
        num_blocks = min(num_tokens // self._tokens_per_block, len(names))
        gone = [name.hash for name in names[num_blocks:] if name.hash in self._disk]
        for each in gone:
            del self._disk[each]
        self._removed(Medium.DISK, gone)
        for start, stop in _untold(names[:num_blocks], self._disk):
            self._stored(Medium.DISK, names, start, tokens[start * self._tokens_per_block :], stop - start)
        # Why told anew: the oldest are forgotten first.
        for name in names[:num_blocks]:
            self._disk.pop(name.hash, None)
            self._disk[name.hash] = None
        self._forget_oldest()

    def forget(self) -> None:
        """All blocks are gone.

        Why one by one: vLLM's word for "all" would say so of the device's blocks as well.
        """
        self._removed(Medium.HOST, [told.hash for told in reversed(self._host.values())])
        self._removed(Medium.DISK, list(reversed(self._disk)))
        self._host.clear()
        self._in_host.clear()
        self._disk.clear()

    def _host_stored(self, event: Stored, names: Sequence[BlockName]) -> None:
        before = _Told(-1, b"") if event.parent is None else self._host.get(event.parent)
        if before is None:
            return
        start, size = before.ordinal + 1, self._tokens_per_block
        keys = [key for piece in event.pieces for key in piece.keys]
        tokens = [token for piece in event.pieces for token in unpacked(piece.content, piece.width)[0]]
        num_blocks = min(len(tokens) // size, len(names) - start)
        if num_blocks > 0:
            self._stored(Medium.HOST, names, start, tokens, num_blocks)
            self._host |= {keys[at]: _Told(start + at, names[start + at].hash) for at in range(num_blocks)}
            self._in_host.update(name.hash for name in names[start : start + num_blocks])

    def _stored(
        self, medium: Medium, names: Sequence[BlockName], start: int, tokens: Sequence[int], num_blocks: int
    ) -> None:
        parent = names[start - 1].hash if start else None
        told = tuple(tokens[: num_blocks * self._tokens_per_block])
        self._news.append(BlocksStored(medium, parent, tuple(names[start : start + num_blocks]), told))

    def _removed(self, medium: Medium, hashes: list[bytes]) -> None:
        if hashes:
            self._news.append(BlocksRemoved(medium, tuple(hashes)))

    def _forget_oldest(self) -> None:
        num_over = len(self._disk) - MAX_TOLD
        if num_over > 0:
            oldest = list(self._disk)[:num_over]
            for each in oldest:
                del self._disk[each]
            self._removed(Medium.DISK, oldest)


def _untold(names: Sequence[BlockName], told: dict[bytes, None]) -> Iterable[tuple[int, int]]:
    """Runs of blocks that were not told, as [start, stop)."""
    start: int | None = None
    for at, name in enumerate(names):
        if name.hash in told:
            if start is not None:
                yield start, at
            start = None
        elif start is None:
            start = at
    if start is not None:
        yield start, len(names)
