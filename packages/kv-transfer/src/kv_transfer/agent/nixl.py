"""Agents over NIXL with UCX: shared memory and TCP for host memory, NVLink and RDMA where UCX finds them.

In:  the environment's UCX settings (`UCX_TLS=tcp` and the like), which are left to the user.
Out: agents that keep the contract of `Agent`.
Law: the only module that imports NIXL, when an agent is made; `nixl_files` gets it from here. All calls come from the
     agent's own thread, so the library runs without locks of its own.

What NIXL 1.5.1 does, as measured on one host (2 cores, Linux 6.18, 2026-11-30); tests/transfer/agent/ repeats what
the rest of kvferry leans on:

- A post blocks while the CPU copies (shared memory: 3-5 GB/s), without the interpreter lock; hence bounded posts.
- Its Python wrapper lets the progress thread spin: 1 core for each idle agent. Hence the bindings below the wrapper,
  where the thread's pause can be set. The pause ends early when a socket is ready: throughput is the same.
- Its start spins until its progress thread has run: 0.1 s, but 45 s were seen on two cores with 40 busy processes.
- A killed peer: posts that moved end at once with NIXL_ERR_REMOTE_DISCONNECT, over TCP and shared memory, and so does
  every later post. A cut network says nothing: after 200 s without a link the post was still in progress, and all its
  bytes landed 20 s after the link was back. If the peer died behind the cut, only `remove_peer` ends its tickets soon.
- A stopped peer, TCP: posts stay in progress, and land when it goes on. Releasing them and removing the peer says
  success, and they land nevertheless.
- A stopped peer, shared memory: the kernel copies into it (cross memory attach) and the post is done at once. If the
  two never spoke before, the bytes are in place at once but the post stays in progress until the peer goes on. Where
  the kernel forbids that copy, shared memory behaves like TCP.
- A write into memory that the peer has deregistered still says done.
"""

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kv_core.errors import FerryError
from kv_transfer.agent.base import fresh_name
from kv_transfer.agent.cards import MemoryKind
from kv_transfer.agent.pieces import OURS, THEIRS, Piece
from kv_transfer.agent.pump import PumpedAgent, PumpLimits
from kv_transfer.agent.transport import TransportError
from kv_transfer.host import host_id
from kv_transfer.regions import Region
from kv_transfer.thresholds import DEVICE_POST

_log = logging.getLogger(__name__)

KIND: Final = "nixl"
BACKEND: Final = "UCX"
SHARED_MEMORY: Final = ("shm", "sm", "mm", "posix", "sysv", "cma", "knem", "xpmem")
"""UCX's names of transports between processes of one host."""


class NixlMissing(FerryError, ImportError):
    """The nixl package cannot be imported; says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlConfig:
    """Settings of one NIXL agent."""

    limits: PumpLimits | None = None
    """None: those of PumpLimits, and larger posts for a device, where a post does not block while bytes move."""
    progress_pause_us: int = 1000
    """Longest pause of the library's own thread. 0 spins on a core; 1000 costs about 2 % of one, and was no slower."""
    device: torch.device | None = None
    """The device of the regions; a CUDA device is made current in the agent's thread."""


def nixl_agent(config: NixlConfig = NixlConfig(), name: str | None = None) -> PumpedAgent["NixlPost"]:
    """A new agent, of a random name unless told; raises NixlMissing, or TransportError if UCX cannot start."""
    on_device = config.device is not None and config.device.type == "cuda"
    limits = config.limits or (PumpLimits(max_post_bytes=DEVICE_POST.num_bytes) if on_device else PumpLimits())
    return PumpedAgent(name or fresh_name(KIND), NixlTransport(import_nixl(), config), limits)


def shares_memory(transports: str | None) -> bool:
    """Whether UCX may use shared memory, by `UCX_TLS`: a list of what it may use or, after "^", of what it may not."""
    if transports is None:
        return True
    named = {name.strip() for name in transports.removeprefix("^").split(",")}
    if transports.startswith("^"):
        return not named & {"all", "shm", "sm", "mm"}
    return bool(named & {"all", *SHARED_MEMORY})


@dataclass(frozen=True, slots=True)
class NixlPost:
    """A transfer request of the library; `settled` when it was done as it was posted."""

    handle: int
    settled: bool


class NixlTransport:
    """A `Transport` of one NIXL agent."""

    def __init__(self, nixl: Any, config: NixlConfig) -> None:
        self._nixl = nixl
        self._config = config
        self._agent: Any = None
        self._registrations: dict[Region, Any] = {}

    @property
    def kind(self) -> str:
        return KIND

    @property
    def memory_host(self) -> str:
        return host_id() if shares_memory(os.environ.get("UCX_TLS")) else ""

    def open(self, name: str) -> None:
        if self._config.device is not None and self._config.device.type == "cuda":
            torch.cuda.set_device(self._config.device)
        settings = self._nixl.nixlAgentConfig()
        settings.useProgThread = True
        settings.useListenThread = False
        settings.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        settings.pthrDelay = self._config.progress_pause_us
        settings.captureTelemetry = False
        with _refusal(f"NIXL cannot start {BACKEND}"):
            self._agent = self._nixl.nixlAgent(name, settings)
            self._agent.createBackend(BACKEND, {})

    def register(self, region: Region) -> None:
        described = self._nixl.nixlRegDList(
            self._segment(region.kind), [(region.address, region.num_bytes, region.device_id, "")]
        )
        with _refusal(f"NIXL cannot register {region}"):
            self._agent.registerMem(described, [])
        self._registrations[region] = described

    def deregister(self, region: Region) -> None:
        with _refusal(f"NIXL cannot deregister {region}"):
            self._agent.deregisterMem(self._registrations.pop(region), [])

    def blob(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def add_peer(self, name: str, blob: bytes) -> None:
        with _refusal(f"NIXL does not take the metadata of {name!r}"):
            self._agent.loadRemoteMD(blob)

    def remove_peer(self, name: str) -> None:
        with _refusal(f"NIXL cannot remove {name!r}"):
            self._agent.invalidateRemoteMD(name)

    def post(self, peer: str, piece: Piece) -> NixlPost:
        handle = self._prepare(peer, piece)
        try:
            with _refusal(f"NIXL cannot post to {peer!r}"):
                status = self._agent.postXferReq(handle, b"")
            return NixlPost(handle, self._is_done(status))
        except TransportError:
            self.release(NixlPost(handle, settled=False))
            raise

    def poll(self, post: NixlPost) -> bool:
        if post.settled:
            return True
        with _refusal("NIXL gave up"):
            status = self._agent.getXferStatus(post.handle)
        return self._is_done(status)

    def release(self, post: NixlPost) -> None:
        try:
            self._agent.releaseXferReq(post.handle)
        except Exception:
            # It could not be cancelled. Its end is known to nobody then; the agent's end frees it.
            _log.exception("NIXL cannot release a post")

    def close(self) -> None:
        # The library joins its thread and closes its sockets when the object goes; measured: 7 ms, posts open or not.
        self._agent = None

    def _prepare(self, peer: str, piece: Piece) -> int:
        ours, theirs = np.ascontiguousarray(piece.table[:, OURS]), np.ascontiguousarray(piece.table[:, THEIRS])
        operation = self._nixl.NIXL_WRITE if piece.direction == "write" else self._nixl.NIXL_READ
        with _refusal(f"NIXL finds no way to {peer!r}; slices that lie in no region of it? theirs={_brief(theirs)}"):
            handle: int = self._agent.createXferReq(
                operation,
                self._nixl.nixlXferDList(self._segment(piece.our_kind), ours),
                self._nixl.nixlXferDList(self._segment(piece.their_kind), theirs),
                peer,
                b"",
                [],
            )
        return handle

    def _segment(self, kind: MemoryKind) -> Any:
        return self._nixl.DRAM_SEG if kind == "host" else self._nixl.VRAM_SEG

    def _is_done(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise TransportError(f"NIXL ended a post with {status}")


@contextmanager
def _refusal(what: str) -> Iterator[None]:
    """Turns an exception of the library, which are all bare Exceptions, into a TransportError."""
    try:
        yield
    except Exception as error:
        raise TransportError(f"{what}: {error}") from error


def _brief(theirs: NDArray[np.uint64]) -> str:
    """The first slices of a list, for a message."""
    shown = ", ".join(f"[{address:#x}, {address + num_bytes:#x})" for address, num_bytes, _ in theirs[:3].tolist())
    return shown if len(theirs) <= 3 else f"{shown} and {len(theirs) - 3} more"


def import_nixl() -> Any:
    """The library's bindings; NixlMissing if they cannot be imported."""
    try:
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise NixlMissing(
            f"the NIXL agent needs the nixl package (pip install 'kv-transfer[nixl]'): {error}"
        ) from error
