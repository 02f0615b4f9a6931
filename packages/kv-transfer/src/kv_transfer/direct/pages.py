"""Memory of this process that others of its user and host may read, for as long as this process lives.

In:  a size; the card of another process.
Out: SharedPages, with a card; the same bytes, read-only, of another process.
Law: nothing is left behind when a process dies, however it dies. A card leads to the memory that it was made for, or to
     CannotMap: another container may have another process under the same number.
"""

import mmap
import os
import secrets
from typing import Annotated, Final

import msgspec

from kv_transfer.direct.base import CannotMap

_TOKEN_BYTES: Final = 32
_HEAD_BYTES: Final = mmap.PAGESIZE

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class PagesCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which file of which process; the memory begins with `token`."""

    pid: Number
    descriptor: Number
    token: Annotated[bytes, msgspec.Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]


class SharedPages:
    """`num_bytes` zeroes of ours; pages that were never written take no memory. OSError if the system has none."""

    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create("kvferry", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, _HEAD_BYTES + num_bytes)
            self._pages = mmap.mmap(self._descriptor, _HEAD_BYTES + num_bytes)
        except OSError:
            os.close(self._descriptor)
            raise
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._pages[:_TOKEN_BYTES] = token
        self.card = PagesCard(pid=os.getpid(), descriptor=self._descriptor, token=token, num_bytes=num_bytes)
        self.memory = memoryview(self._pages)[_HEAD_BYTES:]

    def close(self) -> None:
        """Nobody new can map them; who has keeps them. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MappedPages:
    """Those of another process. CannotMap if they cannot be had from here, or are others."""

    def __init__(self, card: PagesCard) -> None:
        try:
            descriptor = os.open(f"/proc/{card.pid}/fd/{card.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CannotMap(f"the book of process {card.pid} cannot be opened: {error}") from error
        try:
            pages = mmap.mmap(descriptor, _HEAD_BYTES + card.num_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise CannotMap(f"the book of process {card.pid} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        if not secrets.compare_digest(pages[:_TOKEN_BYTES], card.token):
            pages.close()
            raise CannotMap(f"process {card.pid} here is not the one that told of its book")
        self.memory = memoryview(pages)[_HEAD_BYTES:]

    def close(self) -> None:
        """They are read no more. Idempotent."""
        self.memory.release()
