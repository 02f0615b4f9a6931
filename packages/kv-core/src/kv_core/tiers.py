"""Copies between tiers, as orders that a copy engine executes (core spec 9).

In:  the copies that the manager decides on, in the order in which it decides.
Out: `CopyOrder` values with the orders that each has to wait for.
Law: nothing is overwritten before it is copied: an order comes after the last writer of its source, and after the last
     writer and all readers of its destination. A place is (window, tier, slot), never a bare slot (core spec D12).

Within one order all pools of the window are copied. A block's tier is where its slot is; ids do not change.
"""

from enum import IntEnum
from typing import NamedTuple

from kv_core.errors import CallerError


class Tier(IntEnum):
    """Where a block's bytes are; lower is faster."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Place(NamedTuple):
    """One slot of one window's pools in one tier; slots are counted from 0 in each tier."""

    window: int
    tier: Tier
    slot: int


class CopyOrder(NamedTuple):
    """Copy the first `num_tokens` tokens of every pool from `source` to `destination`, after the orders `after`."""

    order_id: int
    source: Place
    destination: Place
    num_tokens: int
    after: tuple[int, ...]


class CopyLog:
    """Collects orders and knows what each of them must wait for, until it hears that they are done."""

    __slots__ = ("_next_id", "_orders", "_readers", "_writers")

    def __init__(self) -> None:
        self._next_id = 0
        self._orders: list[CopyOrder] = []
        self._readers: dict[Place, list[int]] = {}
        self._writers: dict[Place, int] = {}

    def copy(self, source: Place, destination: Place, num_tokens: int) -> None:
        """Record one copy behind all that it depends on."""
        if source == destination:
            raise CallerError(f"a copy goes elsewhere: source={source}, destination={destination}")
        waits = {self._writers.get(source), self._writers.get(destination), *self._readers.pop(destination, ())}
        order = CopyOrder(self._next_id, source, destination, num_tokens, tuple(sorted(waits - {None})))
        self._next_id += 1
        self._orders.append(order)
        self._readers.setdefault(source, []).append(order.order_id)
        self._writers[destination] = order.order_id

    def take(self) -> tuple[CopyOrder, ...]:
        """The orders recorded since the last call, oldest first."""
        orders = tuple(self._orders)
        self._orders.clear()
        return orders

    def done(self, below: int) -> None:
        """All orders with an id less than `below` have ended; nothing needs to wait for them."""
        self._writers = {place: at for place, at in self._writers.items() if at >= below}
        kept = ((place, [at for at in reads if at >= below]) for place, reads in self._readers.items())
        self._readers = {place: reads for place, reads in kept if reads}
