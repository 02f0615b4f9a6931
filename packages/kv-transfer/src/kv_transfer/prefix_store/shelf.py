"""Files of records: how one comes to be, is opened, and goes.

In:  a key, a name, a function that fills a file; or a key and a name.
Out: a published file, or an open one; Missed or OSError if not.
Law: a file with a record's name was filled to its end: it is filled in the directory of this process and then renamed.
     Nothing but a plain file is opened, and no link is followed.
"""

import itertools
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kv_core.keys import BlockKey
from kv_transfer.prefix_store.misses import Miss, Missed
from kv_transfer.prefix_store.names import RecordName, key_folder, records_in
from kv_transfer.prefix_store.quota import Quota
from kv_transfer.process_directory import ProcessDirectory, opened

_DIRECTORY_MODE = 0o700


class Shelf:
    """The files of one namespace; may be used by several threads."""

    def __init__(self, namespace: Path, own: ProcessDirectory, quota: Quota, *, sync: bool) -> None:
        self.namespace = namespace
        self._quota = quota
        self._sync = sync
        self._numbers = itertools.count()
        self.move(own)

    def move(self, own: ProcessDirectory) -> None:
        """From now on fill files here, and make the namespace if it is not there."""
        self._own = own
        self.namespace.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)

    def path_of(self, key: BlockKey, name: RecordName) -> Path:
        return self.namespace / key_folder(key) / str(name)

    def publish(self, key: BlockKey, name: RecordName, num_bytes: int, fill: Callable[[int], None]) -> None:
        """Make the file, or nothing. `fill` writes all bytes to the descriptor it is given."""
        part = self._own.path / f"{next(self._numbers)}.part"
        try:
            self._quota.reserve(part, num_bytes, name.priority)
            with opened(part, os.O_RDWR | os.O_NOFOLLOW) as file:
                fill(file)
                if os.fstat(file).st_size != num_bytes or os.lseek(file, 0, os.SEEK_CUR) != num_bytes:
                    raise Missed(Miss.TRUNCATED)
                if self._sync:
                    os.fsync(file)
            self._place(part, self.path_of(key, name))
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        self._remove_former(key, name)

    @contextmanager
    def opened(self, key: BlockKey, name: RecordName, num_bytes: int) -> Iterator[int]:
        """The file, at its beginning, whole."""
        path = self.path_of(key, name)
        # Why not to block: what is no plain file may wait for somebody.
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
            seen = os.fstat(file)
            if not stat.S_ISREG(seen.st_mode):
                raise Missed(Miss.UNREADABLE)
            if seen.st_size != num_bytes:
                raise Missed(Miss.TRUNCATED)
            yield file

    def touch(self, key: BlockKey, name: RecordName) -> None:
        """It was used now."""
        with suppress(OSError):
            os.utime(self.path_of(key, name))

    def cool(self, key: BlockKey, name: RecordName, num_bytes: int) -> None:
        """Let the file be on the disk, and nowhere else."""
        with self.opened(key, name, num_bytes) as file:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def discard(self, key: BlockKey, name: RecordName) -> None:
        """Remove a file that is of no use."""
        path = self.path_of(key, name)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()

    def _place(self, part: Path, path: Path) -> None:
        try:
            self._rename(part, path)
        except FileNotFoundError:
            # The last other file of the key was evicted in between, and the folder with it.
            self._rename(part, path)

    def _rename(self, part: Path, path: Path) -> None:
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
        part.rename(path)
        if self._sync:
            for folder in (path.parent, path.parent.parent, self.namespace):
                with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as file:
                    os.fsync(file)

    def _remove_former(self, key: BlockKey, name: RecordName) -> None:
        """The same part under another priority."""
        with suppress(OSError):
            for former in records_in(self.namespace / key_folder(key)):
                if former != name and former.box == name.box:
                    self.path_of(key, former).unlink(missing_ok=True)
