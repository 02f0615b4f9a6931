"""Files that hold blocks: the slots of the disk tier.

In:  a directory that may be shared by processes and hosts, bytes of a slot.
Out: one file for each (window, pool, slot) that was written, below a directory that only this process uses.
Law: a file that exists is whole: it is written beside its place, then renamed. Writing a slot removes what it held
     before, so that a failed write leaves nothing instead of something old (core spec D11, D58). At most one file is
     open for each thread that writes or reads. `close` removes all.

    <directory>/kv-blocks-<pid>-<random>/lock                                    locked as long as the process lives
                                        /window-<window>/pool-<pool>/slot-<slot>

A directory whose process died without `close` is removed by the next one that starts beside it.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from torch import Tensor

from kv_transfer.checksum import Summer
from kv_transfer.file_mover import FileMover

_PREFIX: Final = "kv-blocks-"
_UNBORN: Final = ".new-" + _PREFIX


class Corrupt(OSError):
    """A file holds as many bytes as it should, but others."""


class Sums(threading.local):
    """Computes checksums; shared by the files of one manager, with weights of its own for each thread."""

    def __init__(self) -> None:
        self._summer = Summer()

    def of(self, content: Tensor) -> int:
        """The checksum of uint8 [n], wherever it begins."""
        return self._summer.checksum_now(content if content.storage_offset() % 8 == 0 else content.clone())


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
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


class SlotFiles:
    """The files of one pool of one window, each of `num_bytes` bytes. Two threads never use one slot at once.

    With `sums` the bytes that are read are compared with those that were written.
    """

    def __init__(
        self,
        root: ProcessDirectory,
        window: int,
        pool: int,
        num_bytes: int,
        mover: FileMover,
        sums: Sums | None = None,
    ) -> None:
        self.folder = root.path / f"window-{window}" / f"pool-{pool}"
        self.folder.mkdir(parents=True)
        self.mover = mover
        self._num_bytes = num_bytes
        self._sums = sums
        self._written: dict[int, int] = {}

    def write(self, slot: int, content: Tensor) -> None:
        """Replace what the slot holds by `content`, uint8. OSError if that fails; the slot then holds nothing."""
        self._check_length(content)
        path = self.path_of(slot)
        part = path.with_suffix(".part")
        path.unlink(missing_ok=True)
        try:
            with _opened(part, os.O_CREAT | os.O_TRUNC | os.O_RDWR) as file:
                self.mover.write(file, content)
                self._check_file(file)
            if self._sums:
                self._written[slot] = self._sums.of(content)
            part.rename(path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def read(self, slot: int, into: Tensor) -> None:
        """Fill `into`, uint8. OSError if the slot holds nothing, or other bytes; `into` then holds anything."""
        self._check_length(into)
        with _opened(self.path_of(slot), os.O_RDONLY) as file:
            self._check_file(file)
            self.mover.read(file, into)
        if self._sums and (found := self._sums.of(into)) != self._written[slot]:
            raise Corrupt(
                errno.EBADMSG, f"a slot file has another checksum: ours={self._written[slot]}, theirs={found}"
            )

    def path_of(self, slot: int) -> Path:
        """Where the slot's file is, or would be."""
        return self.folder / f"slot-{slot}"

    def _check_file(self, file: int) -> None:
        length = os.fstat(file).st_size
        if length != self._num_bytes:
            raise OSError(errno.EIO, f"a slot file has another length: ours={self._num_bytes}, theirs={length}")

    def _check_length(self, memory: Tensor) -> None:
        assert memory.nbytes == self._num_bytes, f"law: whole slots: ours={self._num_bytes}, theirs={memory.nbytes}"


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
            _remove(found)


def _remove(directory: Path) -> None:
    """All of it, the lock last: a removal that is cut short leaves what the next process knows as abandoned."""
    for window in directory.glob("window-*"):
        shutil.rmtree(window, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
