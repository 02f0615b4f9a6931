"""A NIXL agent in a process of its own, to be stopped and killed.

In:  what to do, over a pipe; the UCX transports to use.
Out: its card, its completions, and its memory, which the test sees through a shared mapping even while the process is
     stopped or dead.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kv_testing.child import Child, serve
from kv_transfer.agent.cards import AgentCard, RemoteSlice
from kv_transfer.agent.nixl import NixlConfig, nixl_agent
from kv_transfer.agent.pump import PumpLimits
from kv_transfer.regions import Region


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


class NixlPeer(Child):
    """The test's handle of the process."""

    def __init__(
        self, tls: str | None, num_bytes: int, name: str | None = None, limits: PumpLimits | None = None
    ) -> None:
        """Starts the process, and returns at once: `card` waits for it."""
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        handle, self._path = tempfile.mkstemp(prefix="kvferry-test-", dir=folder)
        os.close(handle)
        self.region = shared_region(Path(self._path), num_bytes)
        self._card: AgentCard | None = None
        super().__init__(_serve, tls, self._path, num_bytes, name, limits or PumpLimits())

    @property
    def card(self) -> AgentCard:
        """How to reach it."""
        if self._card is None:
            self._card, self._address = self.first_word()
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
        return super().ask(order, *arguments)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        Path(self._path).unlink()


def _serve(pipe: Connection, tls: str | None, path: str, num_bytes: int, name: str | None, limits: PumpLimits) -> None:
    """The process: an agent with one region, doing what it is told until the pipe closes."""
    _set_ucx_tls(tls)
    region = shared_region(Path(path), num_bytes)
    agent = nixl_agent(NixlConfig(limits=limits), name)
    agent.register(region)

    def obey(order: str, *arguments: Any) -> Any:
        match order, arguments:
            case "add_peer", (card,):
                return agent.add_peer(card)
            case "remove_peer", (peer,):
                return agent.remove_peer(peer)
            case "write", (peer, theirs):
                return agent.write(peer, [(region.slice(0, theirs.num_bytes), theirs)])
            case "completions", ():
                return agent.completions()
        raise ValueError(f"unknown order: {order}")

    pipe.send((agent.card(), region.address))
    serve(pipe, obey)


def _set_ucx_tls(tls: str | None) -> None:
    if tls is None:
        os.environ.pop("UCX_TLS", None)
    else:
        os.environ["UCX_TLS"] = tls
