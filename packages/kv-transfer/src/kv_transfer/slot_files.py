"""Files that hold blocks: the slots of the disk tier.

In:  a directory that may be shared by processes and hosts, bytes of a slot.
Out: one file for each (window, pool, slot) that was written, below a directory that only this process uses.
Law: a file that exists is whole: it is written beside its place, then renamed. Writing a slot removes what it held
     before, so that a failed write leaves nothing instead of something old (core spec D11, D58). At most one file is
     open for each thread that writes or reads. What a file system that hangs still does later touches no slot and is
     not looked at: reads land in memory of their own, a slot holds what was written to it in time, and files are not
     touched again before it is over. `close` removes all.

    <directory>/kv-blocks-<pid>-<random>/lock                                    locked as long as the process lives
                                        /window-<window>/pool-<pool>/slot-<slot>
"""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from kv_transfer.checksum import Summer
from kv_transfer.file_mover import FileMover
from kv_transfer.file_threads import FileThreads
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

    With `sums` the bytes that are read are compared with those that were written. `threads` make the calls that may
    hang; without them the caller waits for as long as it takes.
    """

    def __init__(
        self,
        root: ProcessDirectory,
        window: int,
        pool: int,
        num_bytes: int,
        mover: FileMover,
        sums: Sums | None = None,
        threads: FileThreads | None = None,
    ) -> None:
        self.folder = root.path / f"window-{window}" / f"pool-{pool}"
        self.mover = mover
        self._num_bytes = num_bytes
        self._sums = sums
        self._threads = threads
        self._held: dict[int, int | None] = {}
        self._call(self.folder, lambda: self.folder.mkdir(parents=True))

    def write(self, slot: int, content: Tensor) -> None:
        """Replace what the slot holds by `content`, uint8. OSError if that fails; the slot then holds nothing.

        After Hung `content` may still be read; nobody sees what comes of it.
        """
        self._check_length(content)
        self._held.pop(slot, None)
        path = self.path_of(slot)
        self._call(path, lambda: self._replace(path, content))
        self._held[slot] = self._sums.of(content) if self._sums else None

    def read(self, slot: int, into: Tensor) -> None:
        """Fill `into`, uint8. OSError if the slot holds nothing, or other bytes; `into` then is as it was."""
        self._check_length(into)
        into.copy_(self.load(slot, into.device))
        if into.is_cuda:
            torch.cuda.current_stream(into.device).synchronize()

    def load(self, slot: int, device: torch.device) -> Tensor:
        """What the slot holds, uint8 in new memory; OSError as `read`.

        Why new: a read that is given up may go on, and nobody else may use the memory that it fills.
        """
        path = self.path_of(slot)
        if slot not in self._held:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        content = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        self._call(path, lambda: self._fill(path, content))
        stated = self._held[slot]
        if self._sums and (found := self._sums.of(content)) != stated:
            raise Corrupt(errno.EBADMSG, f"a slot file has another checksum: ours={stated}, theirs={found}")
        return content

    def path_of(self, slot: int) -> Path:
        """Where the slot's file is, or would be."""
        return self.folder / f"slot-{slot}"

    def _call(self, path: Path, run: Callable[[], None]) -> None:
        run() if self._threads is None else self._threads.call(str(path), run)

    def _replace(self, path: Path, content: Tensor) -> None:
        part = path.with_suffix(".part")
        path.unlink(missing_ok=True)
        try:
            with opened(part, os.O_CREAT | os.O_TRUNC | os.O_RDWR) as file:
                self.mover.write(file, content)
                self._check_file(file)
            part.rename(path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def _fill(self, path: Path, content: Tensor) -> None:
        with opened(path, os.O_RDONLY) as file:
            self._check_file(file)
            self.mover.read(file, content)

    def _check_file(self, file: int) -> None:
        length = os.fstat(file).st_size
        if length != self._num_bytes:
            raise OSError(errno.EIO, f"a slot file has another length: ours={self._num_bytes}, theirs={length}")

    def _check_length(self, memory: Tensor) -> None:
        assert memory.nbytes == self._num_bytes, f"law: whole slots: ours={self._num_bytes}, theirs={memory.nbytes}"
