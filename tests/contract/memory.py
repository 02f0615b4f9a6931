"""What the pools would hold: a tag for every token slot, moved by the manager's copy orders.

In:  fills of blocks, and copy orders in the order in which they were taken.
Out: the tags in a block's slot.
Law: an order copies what its source holds when all orders before it are done; nothing else changes a slot.
"""

from collections.abc import Iterable

from kv_core.tiers import CopyOrder, Place

Tag = int | str | None


class TaggedMemory:
    """Token slots of all places of all windows; a slot never filled holds 0."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._slots: dict[Place, list[Tag]] = {}

    def fill(self, place: Place, tag: Tag) -> None:
        self._slots[place] = [tag] * self._tokens_per_block

    def tags(self, place: Place) -> list[Tag]:
        return list(self._slots.get(place, [0] * self._tokens_per_block))

    def execute(self, orders: Iterable[CopyOrder]) -> None:
        for order in orders:
            moved = self.tags(order.source)[: order.num_tokens]
            self._slots[order.destination] = moved + self.tags(order.destination)[order.num_tokens :]
