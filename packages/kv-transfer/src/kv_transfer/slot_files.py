"""Files that hold blocks: the slots of the disk tier.

In:  a directory that may be shared by processes and hosts, bytes of a slot.
Out: one file for each (window, pool, slot) that was written, below a directory that only this process uses.
Law: a file that exists is whole: it is written beside its place, then renamed. Writing a slot removes what it held
     before, so that a failed write leaves nothing instead of something old (core spec D11, D58). At most one file is
     open for each thread that writes or reads. `close` removes all.

    <directory>/kv-blocks-<pid>-<random>/lock                                    locked as long as the process lives
                                        /window-<window>/pool-<pool>/slot-<slot>
"""

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from kv_transfer.checksum import Summer
from kv_transfer.file_mover import FileMover
from kv_transfer.process_directory import ProcessDirectory, opened


class Corrupt(OSError):
    """A file holds as many bytes as it should, but others."""


class Sums(threading.local):
    """Computes checksums; shared by the files of one manager, with weights of its own for each thread."""

    def __init__(self) -> None:
        self._summer = Summer()

    def of(self, content: Tensor) -> int:
        """The checksum of uint8 [n], wherever it begins."""
        return self._summer.checksum_now(content if content.storage_offset() % 8 == 0 else content.clone())


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
            with opened(part, os.O_CREAT | os.O_TRUNC | os.O_RDWR) as file:
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
        with opened(self.path_of(slot), os.O_RDONLY) as file:
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
