"""Two processes with a transfer layer each: one offers requests, the other loads them.

In:  a Case: how both sides cut and lay out one cache, how many requests of how many tokens, settings of both.
Out: Pair.load, the seconds from the first order to the last Received; what each load told of its stages.
Law: every request has other bytes, made on either side from its number; what was loaded is compared bit by bit with
     what its sender was given. On GPUs each process sees one of them only.

32 layers of bfloat16, 8 heads of 128: 128 KiB a token.
"""

import multiprocessing as mp
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal

from kv_engine_adapter.cli.host_times import HostTimes, Took

LAYERS, HEADS, SIZE = 32, 8, 128
TOKEN_BYTES = 2 * LAYERS * HEADS * SIZE * 2
PROMPT = b"k" * 32
START_S = 180.0
LOAD_S = 120.0
HOST = "host"
"""Asks the sender what its chunks cost the host."""


@dataclass(frozen=True)
class Side:
    """How one instance keeps its cache: memory order of a block, tokens of a block, tensor ranks (on one device)."""

    order: Literal["head_major", "token_major"] = "head_major"
    block: int = 16
    tp: int = 1


@dataclass(frozen=True)
class Case:
    """What is handed over; `settings` and `limits` are those of TransferConfig and PumpLimits, of both sides."""

    theirs: Side = Side()
    ours: Side = Side()
    tokens: int = 8192
    num_requests: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    plain: Callable[[str, "Ranks"], Any] | None = None
    """Makes what the paths are held against, over the same blocks on each side; it has `card`, `meet` and `read`."""

    def num_bytes(self, num_requests: int) -> int:
        return num_requests * self.tokens * TOKEN_BYTES


class Ranks:
    """All ranks of one side in this process, each with a cache and a transceiver."""

    def __init__(self, name: str, side: Side, case: Case, device: str) -> None:
        from kv_transfer.config import TransferConfig

        self.side, self.case, self.device = side, case, device
        self.config = TransferConfig(
            **{"request_deadline_s": LOAD_S, "lease_s": 600.0, "stall_s": 60.0} | case.settings
        )
        self.state = state_of(side)
        per_request = -(-case.tokens // side.block)
        num_blocks = per_request * case.num_requests + 7
        shuffled = random.Random(name).sample(range(num_blocks), num_blocks)
        self.tables = [
            tuple(shuffled[number * per_request : (number + 1) * per_request]) for number in range(case.num_requests)
        ]
        self.planes = [self._planes(num_blocks) for _ in range(side.tp)]
        self.host = HostTimes()
        self.transceivers = [self._transceiver(name, rank) for rank in range(side.tp)]

    def fill(self) -> None:
        """Every request gets its own bytes."""
        from kv_kernels.scatter import scatter

        for number, planes, dense, blocks in self._parts():
            del number
            scatter(planes, dense, blocks, first_token=0, first_head=0)
        self._wait()

    def clear(self) -> None:
        for planes in self.planes:
            for plane in planes:
                plane.zero_()
        self._wait()

    def check(self) -> None:
        """AssertionError unless every request has its bytes."""
        import torch

        from kv_kernels.gather import gather

        for number, planes, dense, blocks in self._parts():
            found = torch.empty_like(dense)
            gather(found, planes, blocks, first_token=0, first_head=0)
            assert torch.equal(found.view(torch.int16), dense.view(torch.int16)), f"request {number} is not as sent"

    def close(self) -> None:
        for transceiver in self.transceivers:
            transceiver.close()

    def _parts(self) -> Iterator[tuple[int, list[Any], Any, tuple[int, ...]]]:
        """(request, planes, bytes [P, T, H of the rank, D], blocks) of each rank and request."""
        heads = HEADS // self.side.tp
        for number, blocks in enumerate(self.tables):
            whole = contents(number, self.case.tokens, self.device)
            for rank, planes in enumerate(self.planes):
                yield number, planes, whole[:, :, rank * heads : (rank + 1) * heads], blocks

    def _planes(self, num_blocks: int) -> list[Any]:
        """2 x LAYERS planes [B, T, H, D] of one allocation."""
        import torch

        side, heads = self.side, HEADS // self.side.tp
        axes = (heads, side.block) if side.order == "head_major" else (side.block, heads)
        whole = torch.zeros(2 * LAYERS, num_blocks, *axes, SIZE, dtype=torch.bfloat16, device=self.device)
        return list((whole.transpose(2, 3) if side.order == "head_major" else whole).unbind(0))

    def _transceiver(self, name: str, rank: int) -> Any:
        import torch

        from kv_transfer.agent.nixl import NixlConfig, nixl_agent
        from kv_transfer.agent.pump import PumpLimits
        from kv_transfer.direct.cuda_ipc import cuda_door
        from kv_transfer.pools import PagedCaches
        from kv_transfer.transceiver import Transceiver

        planes = self.planes[rank]
        layers = [planes[2 * layer : 2 * layer + 2] for layer in range(LAYERS)]
        caches = PagedCaches.of_layers(self.state.share_of(rank), layers, self.side.block)
        limits = PumpLimits(**self.case.limits) if self.case.limits else None
        agent = nixl_agent(NixlConfig(device=torch.device(self.device), limits=limits))
        agent._transport.post = self.host.timed("post", agent._transport.post)  # type: ignore[method-assign]
        door, host = cuda_door(caches), self.host
        return Transceiver(self.config, name, name, rank, self.state, caches, agent, direct=door, ranges=host)  # type: ignore[arg-type]

    def _wait(self) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()


def state_of(side: Side) -> Any:
    from kv_transfer.plan.cache_state import BlockLayout, CacheState, ParallelLayout

    return CacheState(
        fingerprint="bench",
        attention="full",
        dtype="bfloat16",
        head_size=SIZE,
        num_planes=2,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        tokens_per_block=side.block,
        layout=BlockLayout(side.order),
        parallel=ParallelLayout.even(side.tp, [LAYERS], HEADS),
    )


def contents(number: int, tokens: int, device: str) -> Any:
    """The bytes of one request, [P, T, H, D]; equal on devices of one kind."""
    import torch

    generator = torch.Generator(device).manual_seed(number)
    shape = (2 * LAYERS, tokens, HEADS, SIZE)
    drawn = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=generator)
    return drawn.view(torch.bfloat16)


def serve(pipe: Connection, case: Case, gpu: str | None) -> None:
    """The sender: answers None with its end, HOST with its host times, transfer ids with word that they are offered."""
    device = see_only(gpu)
    from kv_transfer.instance import InstanceDoor
    from kv_transfer.orders import BlockTables, Offer

    ranks = Ranks("sender", case.theirs, case, device)
    ranks.fill()
    door = InstanceDoor(ranks.config, "sender", "sender")  # type: ignore[arg-type]
    door.set_cards([transceiver.card for transceiver in ranks.transceivers])
    plain = case.plain("plain sender", ranks) if case.plain else None
    pipe.send((door.address, plain and plain.card(), ranks.tables))
    while True:
        if pipe.poll(0.005):
            if (transfers := pipe.recv()) is None:
                break
            if transfers == HOST:
                pipe.send(ranks.host.told())
                continue
            for blocks, transfer in zip(ranks.tables, transfers, strict=False):
                door.open_offer(transfer, transfer, PROMPT)
                tables = BlockTables(case.tokens, (blocks,))
                for transceiver in ranks.transceivers:
                    transceiver.offer(Offer(transfer, transfer, PROMPT, tables))
            pipe.send("offered")
        for settled in door.poll_settled():
            for transceiver in ranks.transceivers:
                transceiver.settle(settled.transfer_id, settled.request_id, settled.reason)
        for transceiver in ranks.transceivers:
            transceiver.poll()
    ranks.close()
    door.close()


def see_only(gpu: str | None) -> str:
    """The device of this process; before CUDA is begun."""
    if gpu is None:
        return "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return "cuda:0"


class Pair:
    """Both sides; this process is the receiver."""

    def __init__(self, pipe: Connection, case: Case, device: str) -> None:
        self.case, self._pipe = case, pipe
        self.ranks = Ranks("receiver", case.ours, case, device)
        assert pipe.poll(START_S), "the sender does not start"
        self.address, card, self._their_tables = pipe.recv()
        self._plain = case.plain("plain receiver", self.ranks) if case.plain else None
        if self._plain is not None:
            self._plain.meet("plain sender", *card)
        self.reports: list[Any] = []

    def load(self, num_requests: int | None = None) -> float:
        """Seconds in which so many requests (None: all) are loaded, each offered anew; all are in flight at once."""
        from kv_core.spans import Span
        from kv_transfer.orders import BlockTables, ReceiveOrder

        case, (host, port) = self.case, self.address
        transfers = [secrets.token_hex(16) for _ in range(num_requests or case.num_requests)]
        self._pipe.send(transfers)
        assert self._pipe.poll(LOAD_S), "the sender does not answer"
        self._pipe.recv()
        self.reports.clear()
        tokens = Span(0, case.tokens)
        orders = [
            ReceiveOrder(each, each, PROMPT, tokens, BlockTables(case.tokens, (blocks,)), host, port)  # type: ignore[arg-type]
            for each, blocks in zip(transfers, self.ranks.tables, strict=False)
        ]
        began, received, wanted = time.perf_counter(), list[Any](), len(orders) * len(self.ranks.transceivers)
        for order in orders:
            for transceiver in self.ranks.transceivers:
                transceiver.receive(order)
        while len(received) < wanted:
            for transceiver in self.ranks.transceivers:
                progress = transceiver.poll()
                received += progress.received
                self.reports += progress.reports
            time.sleep(0.0001)
        seconds = time.perf_counter() - began
        assert all(each.ok for each in received), next(each.reason for each in received if not each.ok)
        return seconds

    def prove(self) -> None:
        """Two rounds of all requests: the first connects and compiles, the second is compared."""
        self.load()
        self.ranks.clear()
        self.load()
        self.ranks.check()

    def read_plainly(self) -> float:
        """Seconds in which what the paths are held against reads the blocks of all requests, one after the other."""
        assert self._plain is not None, "the case has no plain agent"
        began = time.perf_counter()
        for ours, theirs in zip(self.ranks.tables, self._their_tables, strict=True):
            self._plain.read(ours, theirs)
        return time.perf_counter() - began

    def host(self) -> dict[str, dict[str, Took]]:
        """What a chunk has cost the host on either side, since this was asked last."""
        self._pipe.send(HOST)
        assert self._pipe.poll(LOAD_S), "the sender does not answer"
        return {"sender": self._pipe.recv(), "receiver": self.ranks.host.told()}

    @property
    def paths(self) -> set[str]:
        """How the requests of the last round came."""
        return {str(report.path) for report in self._loads()}

    def stages(self) -> dict[str, float]:
        """Medians over the requests of the last round, milliseconds."""
        loads = list(self._loads())
        names = loads[0].stages._fields if loads else ()
        found = {name: 1e3 * median(getattr(load.stages, name) for load in loads) for name in names}
        return {name: round(ms, 2) for name, ms in found.items() if ms >= 0.01}

    def _loads(self) -> Iterator[Any]:
        time.sleep(0.05)
        for transceiver in self.ranks.transceivers:
            self.reports += transceiver.poll().reports
        yield from self.reports


@contextmanager
def pair(case: Case, gpus: tuple[str, str] | None) -> Iterator[Pair]:
    """A sender in a process of its own, on the first GPU; the receiver here, on the second. None: both on the CPU.

    This process must not have begun CUDA.
    """
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=serve, args=(theirs, case, gpus and gpus[0]), daemon=True)
    sender.start()
    theirs.close()
    made = Pair(ours, case, see_only(gpus and gpus[1]))
    try:
        yield made
    finally:
        made.ranks.close()
        with suppress(OSError):
            ours.send(None)
        sender.join(20)
        sender.kill()
