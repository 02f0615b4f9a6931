"""A directory of one process below one that others share, and the end of those whose process has died.

In:  a directory that may be shared by processes and hosts.
Out: a directory below it that only this process uses; its lock is held as long as the process lives.
Law: a directory with the final name is locked, so nobody takes a new one for an abandoned one. A directory whose
     process died without `close` is removed by the next one that starts beside it.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "kv-blocks-"
LOCK: Final = "lock"
_UNBORN: Final = ".new-" + PREFIX


class ProcessDirectory:
    """A directory of this process below `parent`, which is made if it is not there. Removed by `close`."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        unborn = Path(tempfile.mkdtemp(prefix=f"{_UNBORN}{os.getpid()}-", dir=parent))
        self._lock = os.open(unborn / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unborn.rename(parent / unborn.name.removeprefix(".new-"))

    def close(self) -> None:
        """Remove the directory with all files. Idempotent."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """The file's descriptor, closed in the end; a new file is its owner's alone."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes that have died."""
    for found in parent.glob(f"{PREFIX}*"):
        # Another process may be removing the same one, or its own.
        with suppress(OSError), opened(found / LOCK, os.O_RDWR) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(found)


def _remove(directory: Path) -> None:
    """All of it, the lock last: a removal that is cut short leaves what the next process knows as abandoned."""
    for found in _children(directory):
        if found.is_dir():
            shutil.rmtree(found, ignore_errors=True)
        elif found.name != LOCK:
            with suppress(OSError):
                found.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _children(directory: Path) -> list[Path]:
    """Nothing if it is gone already."""
    try:
        return list(directory.iterdir())
    except OSError:
        return []
