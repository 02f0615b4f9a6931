"""Files that hold blocks: the slots of the disk tier.

In:  a directory that may be shared by processes and hosts, bytes of a slot.
Out: one file for each (window, pool, slot) that was written, below a directory that only this process uses.
Law: a file that exists is whole: it is written beside its place, then renamed. Writing a slot removes what it held
     before, so that a failed write leaves nothing instead of something old (core spec D11, D58). `close` removes all.

    <directory>/kv-blocks-<pid>-<random>/lock                                    locked as long as the process lives
                                        /window-<window>/pool-<pool>/slot-<slot>

A directory whose process died without `close` is removed by the next one that starts beside it.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PREFIX: Final = "kv-blocks-"
_UNBORN: Final = ".new-" + _PREFIX


@dataclass(frozen=True, slots=True)
class FileCalls:
    """The two calls that move bytes. Both may move fewer than asked for; tests make them fail."""

    write: Callable[[int, memoryview], int] = os.write
    read_into: Callable[[int, memoryview], int] = lambda file, buffer: os.readv(file, [buffer])


class ProcessDirectory:
    """A directory of this process below `parent`, which is made if it is not there. Removed by `close`."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        unborn = Path(tempfile.mkdtemp(prefix=f"{_UNBORN}{os.getpid()}-", dir=parent))
        self._lock = os.open(unborn / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        # Why renamed: a directory with the final name is locked, so nobody can take a new one for an abandoned one.
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unborn.rename(parent / unborn.name.removeprefix(".new-"))

    def close(self) -> None:
        """Remove the directory with all files. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


class SlotFiles:
    """The files of one pool of one window, each of `num_bytes` bytes. Two threads never use one slot at once."""

    def __init__(self, root: ProcessDirectory, window: int, pool: int, num_bytes: int, calls: FileCalls) -> None:
        self.folder = root.path / f"window-{window}" / f"pool-{pool}"
        self.folder.mkdir(parents=True)
        self._num_bytes = num_bytes
        self._calls = calls

    def write(self, slot: int, content: memoryview) -> None:
        """Replace what the slot holds. OSError if that fails; the slot then holds nothing."""
        self._check_length(len(content))
        path = self.path_of(slot)
        part = path.with_suffix(".part")
        path.unlink(missing_ok=True)
        try:
            with _opened(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) as file:
                _move_all(self._calls.write, file, content)
            part.rename(path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def read(self, slot: int, into: memoryview) -> None:
        """Fill `into`. OSError if the slot holds nothing, or not as many bytes; `into` then holds anything."""
        self._check_length(len(into))
        with _opened(self.path_of(slot), os.O_RDONLY) as file:
            length = os.fstat(file).st_size
            if length != self._num_bytes:
                raise OSError(errno.EIO, f"a slot file has another length: ours={self._num_bytes}, theirs={length}")
            _move_all(self._calls.read_into, file, into)

    def path_of(self, slot: int) -> Path:
        """Where the slot's file is, or would be."""
        return self.folder / f"slot-{slot}"

    def _check_length(self, length: int) -> None:
        assert length == self._num_bytes, f"law: whole slots move: ours={self._num_bytes}, theirs={length}"


def _move_all(move: Callable[[int, memoryview], int], file: int, buffer: memoryview) -> None:
    """Call `move` until all bytes have moved."""
    while buffer:
        moved = move(file, buffer)
        if moved < 1:
            raise OSError(errno.EIO, f"a file ends early: {len(buffer)} bytes are left")
        buffer = buffer[moved:]


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _remove_abandoned(parent: Path) -> None:
    for found in parent.glob(f"{_PREFIX}*"):
        # Another process may be removing the same one, or its own.
        with suppress(OSError), _opened(found / "lock", os.O_RDWR) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(found, ignore_errors=True)
