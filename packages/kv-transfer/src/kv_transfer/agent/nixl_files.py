"""Moves slots between memory and files with NIXL: POSIX from host memory, GDS from a GPU's memory directly.

In:  the name of a backend, open files, memory.
Out: a `FileMover`, or NixlMissing or TransportError at the start.
Law: whatever the library says about a file is an OSError. One movement at a time: the library is called under one
     lock, and a movement that was given up moves nothing afterwards. Memory that the backend does not reach is moved by
     plain calls.

What NIXL 1.5.1 does here, as measured (2 cores, Linux 6.18, 2026-11-30; tests/transfer/copy_engine/ repeats it):

- POSIX loads without a GPU and uses Linux AIO, which on a file that is not opened with O_DIRECT copies within the post.
- A short read, a file that is not open for it, a full disk (EFBIG, ENOSPC): all the same NIXL_ERR_BACKEND, without the
  number; the cause is in the library's own log.
- GDS is found only where libcufile and a CUDA driver are; elsewhere its creation says NIXL_ERR_NOT_FOUND. On an H200
  without nvidia-fs it starts, and refuses each file when that is registered (cuFile 5027); files opened with O_TMPFILE
  it refuses whatever the machine (5019).
- A start takes 10-45 ms, a movement of any size 25-30 us more than a plain call (tools/bench/files.py).
"""

import errno
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import sleep
from typing import Any, Final, Literal

import torch
from torch import Tensor

from kv_transfer.agent.base import fresh_name
from kv_transfer.agent.nixl import import_nixl
from kv_transfer.agent.transport import TransportError
from kv_transfer.file_mover import PlainFiles

Backend = Literal["POSIX", "GDS"]

PIECE_BYTES: Final = 1 << 30
"""Most bytes of one movement: one read of the kernel moves less than 2 GiB."""
_PAUSES: Final = (20e-6, 1e-3)
"""First and longest pause between two looks at a movement; each is twice the one before."""


class NixlFiles:
    """A `FileMover` over one NIXL agent."""

    def __init__(self, backend: Backend) -> None:
        self._name = fresh_name("nixl-files")
        self._backend_name = backend
        self._nixl = import_nixl()
        self._plain = PlainFiles()
        self._lock = threading.Lock()
        self._kept: list[tuple[Tensor, Any]] = []
        settings = self._nixl.nixlAgentConfig()
        settings.useProgThread = False
        settings.useListenThread = False
        settings.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        settings.captureTelemetry = False
        try:
            self._agent: Any = self._nixl.nixlAgent(self._name, settings)
            self._backend = self._agent.createBackend(backend, {})
        except Exception as error:
            raise TransportError(f"NIXL cannot start {backend}: {error}") from error

    @property
    def name(self) -> str:
        return f"nixl {self._backend_name}"

    def reaches(self, device: torch.device) -> bool:
        return device.type == "cpu" or self._moves(device)

    def keep(self, memory: Tensor) -> None:
        with self._lock, self._as_file_error("cannot register memory"):
            if self._moves(memory.device):
                self._kept.append((memory, self._register(*self._memory(memory))))

    def write(self, file: int, content: Tensor) -> None:
        if self._moves(content.device):
            self._move(self._nixl.NIXL_WRITE, file, content)
        else:
            self._plain.write(file, content)

    def read(self, file: int, into: Tensor) -> None:
        if self._moves(into.device):
            self._move(self._nixl.NIXL_READ, file, into)
        else:
            self._plain.read(file, into)

    def close(self) -> None:
        with self._lock:
            for _, registered in self._kept:
                with suppress(Exception):
                    self._agent.deregisterMem(registered, [self._backend])
            self._kept.clear()
            self._agent = None

    def _moves(self, device: torch.device) -> bool:
        return device.type == ("cuda" if self._backend_name == "GDS" else "cpu")

    def _move(self, operation: Any, file: int, memory: Tensor) -> None:
        """All of it, in pieces one after another."""
        with self._lock, self._as_file_error("cannot move a slot"):
            assert self._agent is not None, "law: nothing is moved after close"
            file_kind = self._nixl.FILE_SEG
            with self._registered(file_kind, (0, memory.nbytes, file)), self._reachable(memory):
                kind, (address, num_bytes, device_id) = self._memory(memory)
                for at in range(0, num_bytes, PIECE_BYTES):
                    length = min(PIECE_BYTES, num_bytes - at)
                    ours = self._nixl.nixlXferDList(kind, [(address + at, length, device_id)])
                    theirs = self._nixl.nixlXferDList(file_kind, [(at, length, file)])
                    self._finish(self._agent.createXferReq(operation, ours, theirs, self._name, b"", [self._backend]))

    def _finish(self, handle: Any) -> None:
        """Post a movement and wait for its end."""
        pause, longest = _PAUSES
        try:
            status = self._agent.postXferReq(handle, b"")
            while status == self._nixl.NIXL_IN_PROG:
                status = self._agent.getXferStatus(handle)
                if status == self._nixl.NIXL_IN_PROG:
                    sleep(pause)
                    pause = min(2 * pause, longest)
            if status != self._nixl.NIXL_SUCCESS:
                raise OSError(errno.EIO, f"{self.name} ended a movement with {status}")
        finally:
            self._agent.releaseXferReq(handle)

    def _reachable(self, memory: Tensor) -> AbstractContextManager[None]:
        """Registered meanwhile, unless it is part of what is kept."""
        for kept, _ in self._kept:
            if kept.data_ptr() <= memory.data_ptr() and _end(memory) <= _end(kept):
                return nullcontext()
        return self._registered(*self._memory(memory))

    @contextmanager
    def _registered(self, kind: Any, segment: tuple[int, int, int]) -> Iterator[None]:
        registered = self._register(kind, segment)
        try:
            yield
        finally:
            self._agent.deregisterMem(registered, [self._backend])

    def _register(self, kind: Any, segment: tuple[int, int, int]) -> Any:
        registered = self._nixl.nixlRegDList(kind, [(*segment, "")])
        self._agent.registerMem(registered, [self._backend])
        return registered

    def _memory(self, memory: Tensor) -> tuple[Any, tuple[int, int, int]]:
        """The kind of segment, and address, bytes and device of a tensor."""
        on_device = memory.device.type == "cuda"
        kind = self._nixl.VRAM_SEG if on_device else self._nixl.DRAM_SEG
        return kind, (memory.data_ptr(), memory.nbytes, memory.device.index if on_device else 0)

    @contextmanager
    def _as_file_error(self, what: str) -> Iterator[None]:
        """The library raises bare Exceptions."""
        try:
            yield
        except (OSError, AssertionError):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{self.name} {what}: {error}") from error


def _end(memory: Tensor) -> int:
    return memory.data_ptr() + memory.nbytes
