"""A whole instance (door, ranks, NIXL agents) in a process of its own, to be stopped and killed.

In:  what to do, over a pipe; the UCX transports to use.
Out: its address, its outcomes, and what it has open.
Law: its engine steps by itself.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from kv_core.ids import Incarnation
from kv_testing.child import Child, serve
from kv_testing.nixl_peer import ucx_tls
from kv_testing.worlds import FAST, NUM_TOKENS, Side, Switches, make_side, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.agent.nixl import NixlConfig, nixl_agent
from kv_transfer.agent.pump import PumpLimits
from kv_transfer.config import TransferConfig
from kv_transfer.direct.cuda_ipc import cuda_door
from kv_transfer.faults import Faults
from kv_transfer.plan.cache_state import CacheState

STEP_S = 0.02
BUSY_MACHINE = PumpLimits(patience_s=60.0)
"""For agents of many processes on few cores: a first contact took 5 s there."""


def make_nixl_side(
    name: str,
    state: CacheState,
    config: TransferConfig,
    tls: str | None,
    faults: Faults,
    device: str | None = None,
    *,
    door_faults: Faults | None = None,
    num_tokens: int = NUM_TOKENS,
    ports: Sequence[int] = (),
    limits: PumpLimits | None = None,
) -> Side:
    """A running instance whose agents are NIXL's; on a GPU it can also be read directly."""
    with ucx_tls(tls):
        on = None if device is None else torch.device(device)
        agents = [nixl_agent(NixlConfig(device=on, limits=limits or PumpLimits())) for _ in state.parallel.ranks]
    return make_side(
        LoopbackHub(),
        name,
        state,
        config,
        faults,
        agents=agents,
        device=device,
        direct=cuda_door,
        door_faults=door_faults,
        num_tokens=num_tokens,
        ports=ports,
    )


@dataclass(frozen=True)
class Address:
    """As much of a door as callers need of a peer."""

    address: tuple[str, int]


@dataclass(frozen=True)
class Remote:
    """An engine of which only the place is known, for those who call it."""

    door: Address
    incarnation: Incarnation


class EngineProcess(Child):
    """The test's handle of the process; stands for a Side as far as a peer is concerned."""

    def __init__(
        self, name: str, tls: str | None, tp: int = 1, config: TransferConfig = FAST, gpu: int | None = None
    ) -> None:
        """`gpu`: the only one that the process sees, for its caches; in host memory if None."""
        super().__init__(_serve, name, tls, tp, config, gpu)
        self._address: Address | None = None

    @property
    def door(self) -> Address:
        """Where its instance door is; waits for the process to be up."""
        if self._address is None:
            address, incarnation = self.first_word()
            self._address, self._incarnation = Address(address), Incarnation(incarnation)
        return self._address

    @property
    def incarnation(self) -> Incarnation:
        assert self.door
        return self._incarnation

    def ask(self, order: str, *arguments: object) -> Any:
        """Has the process do something: see `_obey` for what it can."""
        assert self.door
        return super().ask(order, *arguments)


def _serve(pipe: Connection, name: str, tls: str | None, tp: int, config: TransferConfig, gpu: int | None) -> None:
    """The process: an engine that steps until the pipe closes."""
    faults = Switches()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    side = make_nixl_side(name, state_of(tp), config, tls, faults, None if gpu is None else "cuda:0")
    pipe.send((side.door.address, side.incarnation))
    serve(pipe, partial(_obey, side, faults), side.step, STEP_S)
    side.close()


def _obey(side: Side, faults: Switches, order: str, *arguments: Any) -> Any:
    match order:
        case "offer":
            return side.offer(*arguments)
        case "order":
            address, transfer, request_id = arguments
            return side.order(Remote(Address(address), Incarnation("")), transfer, request_id)
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
