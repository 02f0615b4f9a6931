"""A NIXL agent in a process of its own, to be stopped and killed.

In:  what to do, over a pipe; the UCX transports to use.
Out: its card, its completions, and its memory, which the test sees through a shared mapping even while the process is
     stopped or dead.
Law: `with NixlPeer(...)` leaves no process behind, whatever its state.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kv_testing.waiting import wait_for
from kv_transfer.agent.cards import AgentCard, RemoteSlice
from kv_transfer.agent.nixl import NixlConfig, nixl_agent
from kv_transfer.agent.pump import PumpLimits
from kv_transfer.regions import Region

ANSWER_TIMEOUT_S = 100.0
"""Seen on 2 cores with 40 processes that compute: 45 s until the library's own thread first ran, of which its start
waits spinning. Alone, a start takes 0.6 s."""


def shared_region(path: Path, num_bytes: int) -> Region:
    """A host region that other processes can map too."""
    memory = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    return Region(memory.data_ptr(), num_bytes, "host", 0, memory)


@contextlib.contextmanager
def ucx_tls(tls: str | None) -> Iterator[None]:
    """UCX's choice of transports for agents made inside; None leaves it to UCX."""
    before = os.environ.get("UCX_TLS")
    _set_ucx_tls(tls)
    try:
        yield
    finally:
        _set_ucx_tls(before)


class NixlPeer:
    """The test's handle of the process."""

    def __init__(
        self, tls: str | None, num_bytes: int, name: str | None = None, limits: PumpLimits | None = None
    ) -> None:
        """Starts the process, and returns at once: `card` waits for it."""
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        handle, self._path = tempfile.mkstemp(prefix="kvferry-test-", dir=folder)
        os.close(handle)
        self.region = shared_region(Path(self._path), num_bytes)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "kv_transfer.agent.pump"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, tls, self._path, num_bytes, name, limits or PumpLimits()), daemon=True
        )
        self._process.start()
        theirs.close()
        self._card: AgentCard | None = None

    @property
    def card(self) -> AgentCard:
        """How to reach it."""
        if self._card is None:
            self._card, self._address = self._receive()
        return self._card

    @property
    def name(self) -> str:
        return self.card.name

    def slice(self, offset: int, num_bytes: int) -> RemoteSlice:
        """Bytes of its region, in its own address space."""
        assert self.card
        return RemoteSlice(address=self._address + offset, num_bytes=num_bytes, kind="host", device_id=0)

    def ask(self, order: str, *arguments: object) -> Any:
        """Has the process do something: see `_serve` for what it can."""
        assert self.card
        self._pipe.send((order, arguments))
        return self._receive()

    def stop(self) -> None:
        """SIGSTOP; returns when every thread of the process has stopped."""
        os.kill(self._pid, signal.SIGSTOP)
        wait_for(lambda: set(self._thread_states()) == {"T"}, what="the process to stop")

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone. Its memory stays visible."""
        self._process.kill()
        self._process.join(10)
        assert not self._process.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()
        Path(self._path).unlink()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _thread_states(self) -> list[str]:
        tasks = Path(f"/proc/{self._pid}/task").iterdir()
        return [(task / "stat").read_text().rsplit(")", 1)[1].split()[0] for task in tasks]

    def _receive(self) -> Any:
        assert self._pipe.poll(ANSWER_TIMEOUT_S), "the peer process says nothing"
        return self._pipe.recv()


def _serve(pipe: Connection, tls: str | None, path: str, num_bytes: int, name: str | None, limits: PumpLimits) -> None:
    """The process: an agent with one region, doing what it is told until the pipe closes."""
    _set_ucx_tls(tls)
    region = shared_region(Path(path), num_bytes)
    agent = nixl_agent(NixlConfig(limits=limits), name)
    agent.register(region)
    pipe.send((agent.card(), region.address))
    with contextlib.suppress(EOFError):
        while True:
            match pipe.recv():
                case "add_peer", (card,):
                    agent.add_peer(card)
                    pipe.send(None)
                case "write", (peer, theirs):
                    pipe.send(agent.write(peer, [(region.slice(0, theirs.num_bytes), theirs)]))
                case "completions", ():
                    pipe.send(agent.completions())


def _set_ucx_tls(tls: str | None) -> None:
    if tls is None:
        os.environ.pop("UCX_TLS", None)
    else:
        os.environ["UCX_TLS"] = tls
