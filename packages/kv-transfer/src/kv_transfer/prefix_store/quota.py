"""Room in a directory that several processes fill: reservations, and who has to go.

In:  bytes wanted with a priority; the directory.
Out: an empty file of the wanted size; Missed if there is no room.
Law: records and files being written never take more than the quota together. Whoever reserves holds the lock of the
     directory, and a file counts with its whole size from then on, so a process that dies leaves nothing uncounted.
     Keys go whole, in the order (priority, last use), never one with a higher priority than what comes.

`usage` is an upper bound of what is used, kept so that the directory is walked only when it seems full. Then a tenth of
the quota is freed at once, where keys of no higher priority allow it.
"""

import fcntl
import heapq
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kv_transfer.prefix_store.misses import Miss, Missed
from kv_transfer.prefix_store.names import NAMESPACE, Found, scan
from kv_transfer.process_directory import PREFIX, opened, remove_abandoned

_USAGE: Final = struct.Struct("<Q")
_PAUSE_S: Final = 0.002
_SPARE: Final = 10
"""One part in so many is freed beyond what is needed."""


class Quota:
    """Of one directory; may be used by several threads."""

    def __init__(
        self,
        directory: Path,
        quota_bytes: int,
        lock_timeout_s: float,
        clock: Callable[[], float],
        on_evicted: Callable[[int], None],
    ) -> None:
        """`on_evicted` is told the bytes of each key that goes."""
        self._directory = directory
        self._quota_bytes = quota_bytes
        self._lock_timeout_s = lock_timeout_s
        self._clock = clock
        self._on_evicted = on_evicted

    def reserve(self, part: Path, num_bytes: int, priority: int) -> None:
        """Make the file `part`, of this size. Missed if there is no room or no turn; OSError if that fails."""
        if num_bytes > self._quota_bytes:
            raise Missed(Miss.QUOTA)
        with self._locked():
            used = self._usage()
            if used is None or used + num_bytes > self._quota_bytes:
                used = self._make_room(num_bytes, priority)
            # Why first: if we die in between, too much is counted rather than too little.
            self._set_usage(used + num_bytes)
            with opened(part, os.O_CREAT | os.O_EXCL | os.O_RDWR) as file:
                os.ftruncate(file, num_bytes)

    def settle(self) -> None:
        """Count what is there. Missed if others hold the lock for too long; OSError if that fails."""
        with self._locked():
            self._set_usage(self._used())

    def _make_room(self, num_bytes: int, priority: int) -> int:
        """What is used when room has been made."""
        remove_abandoned(self._directory)
        used = self._used()
        for files in self._victims(used + num_bytes - self._quota_bytes, priority):
            used -= _remove(files)
            self._on_evicted(sum(found.num_bytes for found in files))
        if used + num_bytes > self._quota_bytes:
            self._set_usage(used)
            raise Missed(Miss.QUOTA)
        return used

    def _used(self) -> int:
        # Why these first: what is published meanwhile is then counted twice rather than not at all.
        used = sum(_size(path) for path in self._directory.glob(f"{PREFIX}*/*.part"))
        return used + sum(found.num_bytes for files in self._keys() for found in files)

    def _victims(self, excess: int, priority: int) -> list[list[Found]]:
        """The keys to remove, for `excess` bytes and some to spare; none if that does not suffice.

        Remembers only as many as it names.
        """
        if excess <= 0:
            return []
        now, freed, wanted = self._clock(), 0, excess + self._quota_bytes // _SPARE
        # The first of the heap is the one that would go last.
        heap: list[tuple[int, float, str, int, list[Found]]] = []
        for files in self._keys():
            worth = max(found.name.priority_at(now) for found in files)
            if worth > priority:
                continue
            size, last_use = sum(found.num_bytes for found in files), max(found.used_at for found in files)
            heapq.heappush(heap, (-worth, -last_use, str(files[0].path), size, files))
            freed += size
            while freed - heap[0][3] >= wanted:
                freed -= heapq.heappop(heap)[3]
        # Nothing goes in vain.
        return [files for *_, files in heap] if freed >= excess else []

    def _keys(self) -> Iterator[list[Found]]:
        for namespace in self._directory.iterdir():
            if NAMESPACE.fullmatch(namespace.name):
                yield from scan(namespace)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Missed if others hold the lock for too long: a stopped process must not stop us."""
        deadline = time.monotonic() + self._lock_timeout_s
        with opened(self._directory / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW) as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise Missed(Miss.BUSY) from None
                time.sleep(_PAUSE_S)
            yield

    def _usage(self) -> int | None:
        """None if it is not known."""
        try:
            with opened(self._directory / "usage", os.O_RDONLY | os.O_NOFOLLOW) as file:
                return int(_USAGE.unpack(os.read(file, _USAGE.size + 1))[0])
        except (OSError, struct.error):
            return None

    def _set_usage(self, num_bytes: int) -> None:
        with opened(self._directory / "usage", os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW) as file:
            os.pwrite(file, _USAGE.pack(num_bytes), 0)
            os.ftruncate(file, _USAGE.size)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0


def _remove(files: list[Found]) -> int:
    """Remove a key; how many bytes are gone, also by somebody else."""
    gone = 0
    for found in files:
        with suppress(OSError):
            found.path.unlink(missing_ok=True)
            gone += found.num_bytes
    with suppress(OSError):
        files[0].path.parent.rmdir()
    return gone
