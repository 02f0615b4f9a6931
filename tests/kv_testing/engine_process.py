"""A whole instance (door, ranks, NIXL agents) in a process of its own, to be stopped and killed.

In:  what to do, over a pipe; the UCX transports to use.
Out: its address, its outcomes, and what it has open.
Law: `with EngineProcess(...)` leaves no process behind, whatever its state. Its engine steps by itself.
"""

import contextlib
import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from kv_core.ids import Incarnation
from kv_testing.nixl_peer import ucx_tls
from kv_testing.worlds import FAST, Side, Switches, make_side, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.agent.nixl import NixlConfig, nixl_agent
from kv_transfer.config import TransferConfig
from kv_transfer.direct.cuda_ipc import cuda_door
from kv_transfer.plan.cache_state import CacheState

START_TIMEOUT_S = 180.0
STEP_S = 0.02


def make_nixl_side(
    name: str,
    state: CacheState,
    config: TransferConfig,
    tls: str | None,
    faults: Switches,
    device: str | None = None,
) -> Side:
    """A running instance whose agents are NIXL's; on a GPU it can also be read directly."""
    with ucx_tls(tls):
        on = None if device is None else torch.device(device)
        agents = [nixl_agent(NixlConfig(device=on)) for _ in state.parallel.ranks]
    return make_side(LoopbackHub(), name, state, config, faults, agents=agents, device=device, direct=cuda_door)


@dataclass(frozen=True)
class _Address:
    """As much of a door as `Side.order` needs of a peer."""

    address: tuple[str, int]


class EngineProcess:
    """The test's handle of the process; stands for a Side as far as a peer is concerned."""

    def __init__(
        self, name: str, tls: str | None, tp: int = 1, config: TransferConfig = FAST, gpu: int | None = None
    ) -> None:
        """`gpu`: the only one that the process sees, for its caches; in host memory if None."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "kv_transfer.transceiver"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, tls, tp, config, gpu), daemon=True)
        self._process.start()
        theirs.close()
        self._address: _Address | None = None

    @property
    def door(self) -> _Address:
        """Where its instance door is; waits for the process to be up."""
        if self._address is None:
            address, incarnation = self._receive()
            self._address, self._incarnation = _Address(address), Incarnation(incarnation)
        return self._address

    @property
    def incarnation(self) -> Incarnation:
        assert self.door
        return self._incarnation

    def ask(self, order: str, *arguments: Any) -> Any:
        """Has the process do something: see `_obey` for what it can."""
        assert self.door
        self._pipe.send((order, arguments))
        return self._receive()

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()
        self._process.join(10)
        assert not self._process.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _receive(self) -> Any:
        assert self._pipe.poll(START_TIMEOUT_S), "the engine process says nothing"
        return self._pipe.recv()


def _serve(pipe: Connection, name: str, tls: str | None, tp: int, config: TransferConfig, gpu: int | None) -> None:
    """The process: an engine that steps until the pipe closes."""
    faults = Switches()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    side = make_nixl_side(name, state_of(tp), config, tls, faults, None if gpu is None else "cuda:0")
    pipe.send((side.door.address, side.incarnation))
    with contextlib.suppress(EOFError):
        while True:
            side.step()
            if pipe.poll(STEP_S):
                order, arguments = pipe.recv()
                pipe.send(_obey(side, faults, order, arguments))
    side.close()


def _obey(side: Side, faults: Switches, order: str, arguments: tuple[Any, ...]) -> Any:
    match order:
        case "offer":
            return side.offer(*arguments)
        case "order":
            address, transfer, request_id = arguments
            return side.order(_Peer(_Address(address), Incarnation("")), transfer, request_id)
        case "hold":
            (faults.holds_writes,) = arguments
            return None
        case "num_held":
            return faults.num_held
        case "open":
            return side.open()
        case "sent":
            return side.sent
    raise ValueError(f"unknown order: {order}")


@dataclass(frozen=True)
class _Peer:
    door: _Address
    incarnation: Incarnation
