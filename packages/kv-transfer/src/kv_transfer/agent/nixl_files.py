"""Moves slots between memory and files with NIXL: POSIX from host memory, GDS from a GPU's memory directly.

In:  the name of a backend, open files, memory.
Out: a `FileMover`, or NixlMissing or TransportError at the start.
Law: whatever the library says about a file is an OSError. One movement at a time: the library is called under one
     lock. A movement that has not ended in time is Hung; its memory, its registrations and a descriptor of its own are
     kept until it has, for good if we are closed before, and meanwhile nothing else is moved. Memory that the backend
     does not reach is moved by plain calls, which take as long as they take: who cannot wait has `file_threads`.

What NIXL 1.5.1 does here, as measured (2 cores, Linux 6.18, 2026-11-30; tests/transfer/copy_engine/ repeats it):

- POSIX loads without a GPU and uses Linux AIO, which on a file that is not opened with O_DIRECT copies within the post.
- A short read, a file that is not open for it, a full disk (EFBIG, ENOSPC): all the same NIXL_ERR_BACKEND, without the
  number; the cause is in the library's own log.
- GDS is found only where libcufile and a CUDA driver are; elsewhere its creation says NIXL_ERR_NOT_FOUND. On an H200
  without nvidia-fs it starts, and refuses each file when that is registered (cuFile 5027); files opened with O_TMPFILE
  it refuses whatever the machine (5019).
- A post holds the caller as long as the file system does, and nobody else.
- A start takes 10-45 ms, a movement of any size 25-30 us more than a plain call (tools/bench/files.py).
"""

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from time import monotonic, sleep
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from kv_transfer.agent.base import fresh_name
from kv_transfer.agent.nixl import import_nixl
from kv_transfer.agent.transport import TransportError
from kv_transfer.file_mover import FILE_LIMIT_S, Hung, NotAsked, PlainFiles

logger = logging.getLogger(__name__)

Backend = Literal["POSIX", "GDS"]

PIECE_BYTES: Final = 1 << 30
"""Most bytes of one movement: one read of the kernel moves less than 2 GiB."""
_PAUSES: Final = (20e-6, 1e-3)
"""First and longest pause between two looks at a movement; each is twice the one before."""
_CLOSE_S: Final = 1.0
"""Copies have ended before: who still moves something then, hangs."""

_in_doubt: Final[list[object]] = []
"""Law: memory that the library may still touch is never used again. The only state of this module."""


class _Late(NamedTuple):
    """A movement that was given up, and what it may still touch."""

    handle: Any
    memory: Tensor
    held: ExitStack


class NixlFiles:
    """A `FileMover` over one NIXL agent."""

    def __init__(self, backend: Backend, limit_s: float = FILE_LIMIT_S) -> None:
        self.limit_s = limit_s
        self._late: _Late | None = None
        self._is_closed = False
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
        with self._turn(monotonic() + self.limit_s), self._as_file_error("cannot register memory"):
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
        if not self._lock.acquire(timeout=_CLOSE_S):
            self._keep_for_good("a call into it has not returned")
            return
        try:
            if self._is_closed:
                return
            self._is_closed = True
            if self._late is not None and not self._has_ended(self._late):
                self._keep_for_good("a movement has not ended")
                return
            for _, registered in self._kept:
                with suppress(Exception):
                    self._agent.deregisterMem(registered, [self._backend])
            self._kept.clear()
            self._agent = None
        finally:
            self._lock.release()

    def _keep_for_good(self, why: str) -> None:
        """Neither agent nor memory may go."""
        if self not in _in_doubt:
            logger.warning("%s is closed, but %s; what it knows is kept: %d tensors", self.name, why, len(self._kept))
            _in_doubt.append(self)

    def _moves(self, device: torch.device) -> bool:
        return device.type == ("cuda" if self._backend_name == "GDS" else "cpu")

    def _move(self, operation: Any, file: int, memory: Tensor) -> None:
        """All of it, in pieces one after another."""
        by = monotonic() + self.limit_s
        with self._turn(by), self._as_file_error("cannot move a slot"), _on(memory.device), ExitStack() as held:
            own = os.dup(file)
            held.callback(os.close, own)
            file_kind = self._nixl.FILE_SEG
            held.enter_context(self._registered(file_kind, (0, memory.nbytes, own)))
            held.enter_context(self._reachable(memory))
            kind, (address, num_bytes, device_id) = self._memory(memory)
            for at in range(0, num_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, num_bytes - at)
                ours = self._nixl.nixlXferDList(kind, [(address + at, length, device_id)])
                theirs = self._nixl.nixlXferDList(file_kind, [(at, length, own)])
                handle = self._agent.createXferReq(operation, ours, theirs, self._name, b"", [self._backend])
                if not self._finish(handle, by):
                    self._late = _Late(handle, memory, held.pop_all())
                if self._late is not None or monotonic() > by:
                    raise Hung(errno.ETIMEDOUT, f"{self.name} did not move a slot within {self.limit_s} s")

    def _finish(self, handle: Any, by: float) -> bool:
        """Post a movement and wait for its end; False if it is not seen in time."""
        pause, longest = _PAUSES
        try:
            status = self._agent.postXferReq(handle, b"")
            while status == self._nixl.NIXL_IN_PROG and monotonic() < by:
                sleep(pause)
                pause = min(2 * pause, longest)
                status = self._agent.getXferStatus(handle)
        except Exception:
            self._agent.releaseXferReq(handle)
            raise
        if status == self._nixl.NIXL_IN_PROG:
            return False
        self._agent.releaseXferReq(handle)
        if status != self._nixl.NIXL_SUCCESS:
            raise OSError(errno.EIO, f"{self.name} ended a movement with {status}")
        return True

    @contextmanager
    def _turn(self, by: float) -> Iterator[None]:
        """The library to ourselves; NotAsked if somebody else has it for too long, or a movement hangs."""
        if not self._lock.acquire(timeout=max(0.0, by - monotonic())):
            raise NotAsked(errno.ETIMEDOUT, f"{self.name} was busy for {self.limit_s} s")
        try:
            assert not self._is_closed, "law: nothing is moved after close"
            if self._late is not None and not self._has_ended(self._late):
                raise NotAsked(errno.ETIMEDOUT, f"{self.name} moves nothing: an earlier movement has not ended")
            yield
        finally:
            self._lock.release()

    def _has_ended(self, late: _Late) -> bool:
        """Whether a movement that was given up is over; then what was kept for it is given back."""
        with suppress(Exception):
            if self._agent.getXferStatus(late.handle) == self._nixl.NIXL_IN_PROG:
                return False
        with suppress(Exception):
            self._agent.releaseXferReq(late.handle)
        with suppress(Exception):
            late.held.close()
        self._late = None
        logger.warning("%s: a movement has ended after all", self.name)
        return True

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


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: a thread that is not the engine's has chosen none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _end(memory: Tensor) -> int:
    return memory.data_ptr() + memory.nbytes
