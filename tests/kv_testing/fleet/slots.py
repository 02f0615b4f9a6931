"""The block pool of one engine, cut into slots for requests; every element tells its request and its place.

In:  a tagged World that covers the whole pool (`tagged`); the names of requests, and their salts.
Out: for each request a slot with a block table of its own; how many elements are not what they must be.
Law: a block that no request uses holds filler, so whatever writes it is seen. A request's elements are its tags xored
     with its salt: bytes of another request are as wrong as any. A slot rests before it is used again.
"""

import zlib
from collections import deque
from dataclasses import replace

import torch

from kv_core.spans import Span, ceil_div
from kv_testing.tagged import FILLER, World, expected_planes

NUM_SLOTS = 12
NOTHING = Span(0, 0)
FILLER_WORD = int.from_bytes(bytes([FILLER] * 4), "little", signed=True)
"""Of caches whose elements have 4 bytes, as all of these have; no tag is equal to it."""


class Slots:
    """All slots of one engine, over all its ranks."""

    def __init__(self, world: World, num_tokens: int) -> None:
        """Requests have `num_tokens` tokens; `world` has room for NUM_SLOTS of them."""
        size = ceil_div(num_tokens, world.state.tokens_per_block)
        parts = [world.table[first : first + size] for first in range(0, size * NUM_SLOTS, size)]
        self._world = world
        self._free = deque(replace(world, table=part, num_tokens=num_tokens) for part in parts)
        self._used: dict[str, World] = {}

    @property
    def num_used(self) -> int:
        return len(self._used)

    def take(self, name: str) -> World | None:
        """The slot of this request from now on; None if none is free."""
        if not self._free:
            return None
        slot = self._used[name] = self._free.popleft()
        return slot

    def fill(self, name: str, tokens: Span, salt: int) -> None:
        """Writes what the request's blocks hold once these tokens are computed."""
        self._write(self._used[name], tokens, salt)

    def misplaced(self, name: str, tokens: Span, salt: int) -> int:
        """Elements of the request's blocks that differ from: its tags for these tokens, filler for all others."""
        return self._count(self._used[name], tokens, salt)

    def give_back(self, name: str) -> None:
        """The request is over; its blocks hold filler again."""
        slot = self._used.pop(name)
        self._write(slot, NOTHING, 0)
        self._free.append(slot)

    def num_dirty(self) -> int:
        """Elements of unused blocks that are no filler: somebody wrote blocks that are not his."""
        return sum(self._count(slot, NOTHING, 0) for slot in self._free)

    def spoil(self) -> None:
        """Writes one element of an unused block, as a defect would."""
        slot = self._free[-1]
        plane, _ = self._planes(slot, NOTHING, 0)[0]
        plane[slot.table[0], 0, 0, 0] = 0

    def _write(self, slot: World, tokens: Span, salt: int) -> None:
        blocks = list(slot.table)
        for plane, expected in self._planes(slot, tokens, salt):
            plane[blocks] = expected[blocks]

    def _count(self, slot: World, tokens: Span, salt: int) -> int:
        blocks = list(slot.table)
        return sum(
            int((plane[blocks] != expected[blocks]).sum()) for plane, expected in self._planes(slot, tokens, salt)
        )

    def _planes(self, slot: World, tokens: Span, salt: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(plane, what it must hold in the slot's blocks), of every rank."""
        return [
            (plane, torch.where(content == FILLER_WORD, content, content ^ salt))
            for rank in slot.caches
            for planes, expected in expected_planes(slot, rank, tokens)
            for plane, content in zip(planes, expected, strict=True)
        ]


def salt_of(transfer_id: str) -> int:
    """A number of the request that both sides know; positive, and of 31 bits."""
    return zlib.crc32(transfer_id.encode()) >> 1
