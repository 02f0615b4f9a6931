"""How the bytes of a slot get into an open file and back.

In:  an open file; memory, uint8 [n], contiguous.
Out: all n bytes moved, from or to the beginning of the file.
Law: a mover moves everything or raises OSError. It opens and closes no file, and it may be used by several threads.
     After Hung, but for NotAsked, the memory may still be read or written: whoever lent it does not use it again.

`PlainFiles` moves by the calls of the operating system, and is what everything else falls back on.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

FILE_LIMIT_S: Final = 10.0
"""How long a slot may take. Far more than a disk that works needs: one that does not costs a miss, not an engine."""


class Hung(OSError):
    """A file system has not answered in time; what it was asked may still happen."""


class NotAsked(Hung):
    """A file system has not answered what it was asked before; nothing of this call will happen."""


class FileMover(Protocol):
    """Moves whole buffers between memory and files."""

    @property
    def name(self) -> str:
        """For logs and tables."""

    def reaches(self, device: torch.device) -> bool:
        """Whether memory of this device can be moved without a copy in host memory; host memory always can."""

    def keep(self, memory: Tensor) -> None:
        """This memory is there until `close`: parts of it will be moved often.

        OSError if it cannot be kept; parts of it move all the same.
        """

    def write(self, file: int, content: Tensor) -> None:
        """Fill the file."""

    def read(self, file: int, into: Tensor) -> None:
        """Fill the memory; after OSError it holds anything."""

    def close(self) -> None:
        """Give everything back; nothing is moved afterwards. Idempotent."""


@dataclass(frozen=True, slots=True)
class FileCalls:
    """The two calls that move bytes. Both may move fewer than asked for; tests make them fail."""

    write: Callable[[int, memoryview], int] = os.write
    read_into: Callable[[int, memoryview], int] = lambda file, buffer: os.readv(file, [buffer])


@dataclass(frozen=True, slots=True)
class PlainFiles:
    """Blocking calls in the caller's thread, host memory only."""

    calls: FileCalls = FileCalls()

    @property
    def name(self) -> str:
        return "plain"

    def reaches(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def keep(self, memory: Tensor) -> None:
        """Nothing is to be done."""

    def write(self, file: int, content: Tensor) -> None:
        _move_all(self.calls.write, file, content.numpy().data)

    def read(self, file: int, into: Tensor) -> None:
        _move_all(self.calls.read_into, file, into.numpy().data)

    def close(self) -> None:
        """Nothing is held."""


def _move_all(move: Callable[[int, memoryview], int], file: int, buffer: memoryview) -> None:
    """Call `move` until all bytes have moved."""
    while buffer:
        moved = move(file, buffer)
        if moved < 1:
            raise OSError(errno.EIO, f"a file ends early: {len(buffer)} bytes are left")
        buffer = buffer[moved:]
