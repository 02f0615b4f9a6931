"""One side of random pairs of layouts, in a process of its own: all its ranks, each with a NIXL agent.

In:  the number of a pair (`layouts.random_pair`), orders over a pipe.
Out: how the hand-over ended at this side; whether every element moved once, to its place.
"""

from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from kv_core.ids import Incarnation, TransferId
from kv_core.spans import Span
from kv_testing.child import serve
from kv_testing.engine_process import BUSY_MACHINE, Address, Remote, make_nixl_side
from kv_testing.layouts import Pair, random_pair
from kv_testing.tagged import wanted
from kv_testing.worlds import FAST, Side
from kv_transfer.faults import NoFaults
from kv_transfer.orders import Received
from kv_transfer.plan.plan import widened

STEP_S = 0.005
ORDERS = frozenset({"begin", "offer", "fetch", "outcomes", "num_misplaced", "num_bytes_wanted", "spoil", "end"})


class PairSide:
    """The side that one process plays, of one pair after the other."""

    def __init__(self, role: str, tls: str | None) -> None:
        """`role`: "sender" or "receiver"."""
        self._role = role
        self._tls = tls
        self._side: Side | None = None

    def obey(self, order: str, *arguments: Any) -> Any:
        if order not in ORDERS:
            raise ValueError(f"no such order: {order}{arguments}")
        return getattr(self, order)(*arguments)

    def step(self) -> None:
        if self._side is not None:
            self._side.step()

    def begin(self, seed: int) -> tuple[tuple[str, int], Incarnation]:
        """Start all ranks of this side of the pair; answers where its door is, and which run it is."""
        self._pair: Pair = random_pair(seed)
        chunk_bytes = max(64, self._pair.max_bytes) if self._pair.max_bytes <= 1 << 14 else None
        config = replace(FAST, chunk_bytes=chunk_bytes, layers_per_chunk=self._pair.most_layers)
        state = self._pair.sender if self._role == "sender" else self._pair.receiver
        self._side = make_nixl_side(
            self._role, state, config, self._tls, NoFaults(), num_tokens=self._pair.tokens.stop, limits=BUSY_MACHINE
        )
        return self._side.door.address, self._side.incarnation

    def offer(self) -> TransferId:
        """Fill the sender's blocks with tags, and offer them."""
        return self._running.offer(num_tokens=self._pair.tokens.stop, group=self._pair.sender_group)

    def fetch(self, address: tuple[str, int], incarnation: Incarnation, transfer: TransferId) -> None:
        """Have every rank of the receiver's group fetch its part."""
        pair = self._pair
        self._peer, self._transfer = Remote(Address(address), incarnation), transfer
        self._running.order(
            self._peer, transfer, tokens=pair.tokens, from_group=pair.sender_group, to_group=pair.receiver_group
        )

    def outcomes(self) -> list[Received]:
        """What the ranks have reported so far."""
        return [received for _, received in self._running.received]

    def num_misplaced(self) -> int:
        """Elements that are not what the tags say, over all ranks and all blocks."""
        moved = widened(self._pair.tokens, self._pair.receiver)
        return self._running.misplaced(Span(moved.start, min(moved.stop, self._pair.tokens.stop)))

    def num_bytes_wanted(self) -> int:
        """Bytes that move if every element of every rank moves once."""
        pair = self._pair
        tokens = widened(pair.tokens, pair.sender)
        elements = sum(
            int(wanted(pair.receiver, rank, tokens, tokens.stop).sum())
            for rank in pair.receiver.parallel.ranks_of(pair.receiver_group)
        )
        return elements * pair.receiver.num_planes * pair.receiver.bytes_per_token_head

    def spoil(self) -> None:
        """Change one bit of one element, as a defect would."""
        caches = next(caches for caches in self._running.world.caches.values() if caches.planes)
        caches.planes[0].view(torch.uint8)[0, 0, 0, 0] ^= 1

    def end(self) -> None:
        """Nothing is left; the ranks go."""
        side, self._side = self._running, None
        if self._role == "receiver":
            side.release(self._peer, self._transfer)
        side.check_clean()
        side.close()

    @property
    def _running(self) -> Side:
        assert self._side is not None
        return self._side


def run_side(pipe: Connection, role: str, tls: str | None) -> None:
    """The process: one side of one pair after the other, until the pipe closes."""
    side = PairSide(role, tls)
    serve(pipe, side.obey, side.step, STEP_S)
