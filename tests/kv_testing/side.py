"""One instance of a world, driven as an engine would: it offers, fetches, polls and ends.

In:  its door, ranks, agents and tagged caches (`worlds.make_side`).
Out: what its ranks have reported, and the proof that nothing is left.
Law: the caches are tagged (`tagged`), so that a wrong, missing or additional byte is seen; `check_clean` proves that
     nothing is open on a side and that its arenas are whole.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kv_core.ids import Incarnation, InstanceId, Rank, RequestId, TransferId
from kv_core.spans import Span
from kv_testing.tagged import World, fill, misplaced
from kv_testing.usual import ALL, NUM_TOKENS, PROMPT, fresh_id
from kv_testing.waiting import wait_for
from kv_transfer.agent.base import Agent
from kv_transfer.core import Core
from kv_transfer.instance import InstanceDoor
from kv_transfer.orders import Errand, Offer, Received, ReceiveOrder
from kv_transfer.pools import PagedCaches
from kv_transfer.staging import Arena
from kv_transfer.transceiver import Transceiver


class Door(Protocol):
    """As much of a door as its callers need."""

    @property
    def address(self) -> tuple[str, int]: ...


class Callee(Protocol):
    """As much of an instance as its peers need."""

    @property
    def door(self) -> Door: ...
    @property
    def incarnation(self) -> Incarnation: ...


@dataclass
class Side:
    """One run of one instance: its door, its ranks, its tagged caches, and what its ranks have reported."""

    name: InstanceId
    incarnation: Incarnation
    world: World
    door: InstanceDoor
    ranks: tuple[Transceiver, ...]
    agents: tuple[Agent, ...]
    on_device: dict[Rank, PagedCaches] = field(default_factory=dict)
    """What the ranks really hold, if that is not the world's own memory."""
    work_before: Callable[[], None] = lambda: None
    group: int = 0
    """Whose ranks fetch."""
    received: list[tuple[int, Received]] = field(default_factory=list)
    sent: list[tuple[int, RequestId]] = field(default_factory=list)
    arrived: dict[tuple[int, str], int] = field(default_factory=dict)
    """How far each order had come at its last news: by rank and request."""

    # -- as a prefill engine -----------------------------------------------------------------------------------------

    def offer(
        self,
        request_id: str = "p0",
        transfer_id: str | None = None,
        prompt_key: bytes = PROMPT,
        num_tokens: int = NUM_TOKENS,
        lease_s: float | None = None,
        group: int = 0,
    ) -> TransferId:
        """Fill the blocks of the group's ranks with their tags, and let peers read them."""
        transfer = TransferId(transfer_id or fresh_id())
        fill(self.world, Span(0, num_tokens), group)
        self.push()
        self.door.open_offer(transfer, RequestId(request_id), prompt_key, lease_s)
        for rank in self.world.state.parallel.ranks_of(group):
            self.ranks[rank].offer(self.make_offer(request_id, transfer, prompt_key, num_tokens, rank))
        return transfer

    def make_offer(
        self,
        request_id: str = "p0",
        transfer_id: str | None = None,
        prompt_key: bytes = PROMPT,
        num_tokens: int = NUM_TOKENS,
        rank: int = 0,
    ) -> Offer:
        """An offer of one rank's blocks, not handed in."""
        transfer = TransferId(transfer_id or fresh_id())
        return Offer(transfer, RequestId(request_id), prompt_key, self.world.tables(Rank(rank), num_tokens))

    def settle(self, transfer_id: str, request_id: str = "p0", reason: str = "aborted") -> None:
        """End an offer at every rank, without its door."""
        for rank in self.ranks:
            rank.settle(TransferId(transfer_id), RequestId(request_id), reason)

    def withdraw(self, request_id: str = "p0", reason: str = "aborted") -> None:
        """End an offer as the engine does."""
        self.door.withdraw_offer(RequestId(request_id), reason)

    def step(self) -> list[tuple[int, RequestId]]:
        """What an engine does at every step: pass on settlements, collect what has ended. Answers all sent so far."""
        for settled in self.door.poll_settled():
            for rank in self.ranks:
                rank.settle(settled.transfer_id, settled.request_id, settled.reason)
        for number, rank in enumerate(self.ranks):
            progress = rank.poll()
            self.sent += [(number, request_id) for request_id in progress.sent]
            self.received += [(number, received) for received in progress.received]
            self.arrived |= {(number, request_id): num_tokens for request_id, num_tokens in progress.arrived}
        return self.sent

    # -- as a decode engine ------------------------------------------------------------------------------------------

    def order(
        self,
        peer: Callee,
        transfer_id: str,
        request_id: str = "d0",
        tokens: Span = ALL,
        prompt_key: bytes = PROMPT,
        incarnation: str | None = None,
        only_ranks: Sequence[int] | None = None,
        from_group: int = 0,
        to_group: int = 0,
    ) -> None:
        """Have every rank of the group fetch its part."""
        self.group = to_group
        of_group = self.world.state.parallel.ranks_of(to_group)
        for rank in of_group if only_ranks is None else only_ranks:
            order = self.make_order(
                *peer.door.address, transfer_id, request_id, tokens, prompt_key, incarnation, rank, from_group
            )
            self.ranks[rank].receive(order)

    def make_order(
        self,
        host: str,
        port: int,
        transfer_id: str,
        request_id: str = "d0",
        tokens: Span = ALL,
        prompt_key: bytes = PROMPT,
        incarnation: str | None = None,
        rank: int = 0,
        from_group: int = 0,
    ) -> ReceiveOrder:
        """An order into one rank's blocks, not handed in."""
        run = Incarnation(incarnation) if incarnation else None
        request, transfer = RequestId(request_id), TransferId(transfer_id)
        tables = self.world.tables(Rank(rank))
        return ReceiveOrder(request, transfer, prompt_key, tokens, tables, host, port, run, from_group)

    def abort(self, request_id: str = "d0") -> None:
        """Give an order up, at every rank."""
        for rank in self.ranks:
            rank.abort(RequestId(request_id))

    def release(self, peer: Callee, transfer_id: str, request_id: str = "d0", prompt_key: bytes = PROMPT) -> None:
        """Say that this consumer is done."""
        errand = Errand(
            *peer.door.address,
            TransferId(transfer_id),
            prompt_key,
            f"{self.incarnation}/{request_id}",
            peer.incarnation,
        )
        self.door.release(errand)

    def outcomes(
        self, request_id: str = "d0", timeout_s: float = 60.0, *, others: Sequence["Side"] = ()
    ) -> list[Received]:
        """What every rank reported for this request, by rank, once all have; steps the other sides meanwhile."""

        def reported() -> list[Received]:
            for side in (self, *others):
                side.step()
            found = {rank: each for rank, each in self.received if each.request_id == request_id}
            num_ranks = len(self.world.state.parallel.ranks_of(self.group))
            return [found[rank] for rank in sorted(found)] if len(found) == num_ranks else []

        return wait_for(reported, timeout_s, f"the outcomes of {request_id}")

    def outcome(self, request_id: str = "d0", timeout_s: float = 60.0, *, others: Sequence["Side"] = ()) -> Received:
        """The worst of the ranks' outcomes."""
        return min(self.outcomes(request_id, timeout_s, others=others), key=lambda each: each.ok)

    # -- proofs ------------------------------------------------------------------------------------------------------

    @property
    def cores(self) -> list[Core]:
        return [rank._core for rank in self.ranks]

    @property
    def arenas(self) -> list[Arena]:
        return [arena for core in self.cores for arena in core._arenas]

    def receive_arena(self, rank: int = 0) -> Arena:
        return self.cores[rank]._arenas[1]

    def misplaced(self, tokens: Span = ALL) -> int:
        """Elements that differ from: tags for these tokens, filler everywhere else."""
        self.pull()
        return misplaced(self.world, tokens, self.group)

    def pull(self) -> None:
        """Copies the device's memory to the world's."""
        for ours, theirs in self._planes():
            ours.copy_(theirs)

    def push(self) -> None:
        """Queues the copy of the world's memory to the device, on the current stream, behind `work_before`."""
        staged = [(ours.to(theirs.device), theirs) for ours, theirs in self._planes()]
        self.work_before()
        for ours, theirs in staged:
            theirs.copy_(ours)

    def _planes(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rank, caches in self.on_device.items():
            yield from zip(self.world.caches[rank].planes, caches.planes, strict=True)

    def open(self) -> dict[str, Any]:
        """What is open on this side, by gauge."""
        self.step()
        found = {f"rank {number}": rank.status().open for number, rank in enumerate(self.ranks)}
        return {name: gauges for name, gauges in {**found, "door": self.door.status().open}.items() if gauges}

    def count(self, counter: str) -> int:
        """A counter, summed over the ranks."""
        return sum(rank._reactor.counters[counter] for rank in self.ranks)

    def check_clean(self, timeout_s: float = 30.0) -> None:
        """Nothing is open, and every arena is whole."""
        deadline = time.monotonic() + timeout_s
        while found := self.open():
            assert time.monotonic() < deadline, f"{self.name} still has open: {found}"
            time.sleep(0.01)
        for core in self.cores:
            core.sender.offers.check()
        for arena in self.arenas:
            arena.check()

    def close(self, timeout_s: float = 5.0) -> None:
        for rank in self.ranks:
            rank.close(timeout_s)
        self.door.close()
