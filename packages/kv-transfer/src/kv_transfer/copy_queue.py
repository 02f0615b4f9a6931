"""Which copy orders may run now.

In:  copy orders in the order of their ids; which of them have ended.
Out: orders whose predecessors have all ended.
Law: an order is handed out once, and not before all of its `after` have ended. Ids follow each other without a gap, so
     an id that is not waited for has ended.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from kv_core.errors import CallerError
from kv_core.tiers import CopyOrder


class CopyQueue:
    """Orders between the manager's decision and their end. Of one thread, or under one lock."""

    __slots__ = ("_followers", "_next_id", "_num_missing", "_open", "_ready")

    def __init__(self) -> None:
        self._next_id: int | None = None
        self._open: dict[int, CopyOrder] = {}
        self._num_missing: dict[int, int] = {}
        self._followers: dict[int, list[int]] = {}
        self._ready: list[int] = []

    def add(self, orders: Iterable[CopyOrder]) -> None:
        """Take orders on. CallerError for a gap between ids, or an order that waits for itself or a later one."""
        for order in orders:
            self._check(order)
            self._next_id = order.order_id + 1
            self._open[order.order_id] = order
            waits = [other for other in set(order.after) if other in self._open]
            for other in waits:
                self._followers.setdefault(other, []).append(order.order_id)
            if waits:
                self._num_missing[order.order_id] = len(waits)
            else:
                heappush(self._ready, order.order_id)

    @property
    def num_ready(self) -> int:
        """Orders that could be handed out now."""
        return len(self._ready)

    @property
    def num_open(self) -> int:
        """Orders that have not ended."""
        return len(self._open)

    @property
    def below(self) -> int:
        """All orders with a smaller id have ended: what `KVCacheManager.copies_done` wants to hear."""
        return next(iter(self._open), self._next_id or 0)

    def take(self, at: int = 0) -> CopyOrder | None:
        """Hand out an order that may run: the oldest, or another (`at` below `num_ready`). None if there is none."""
        if not self._ready:
            return None
        if not at:
            return self._open[heappop(self._ready)]
        order_id = self._ready.pop(at)
        heapify(self._ready)
        return self._open[order_id]

    def end(self, order_id: int) -> None:
        """An order that was handed out has ended."""
        del self._open[order_id]
        for follower in self._followers.pop(order_id, ()):
            self._num_missing[follower] -= 1
            if not self._num_missing[follower]:
                del self._num_missing[follower]
                heappush(self._ready, follower)

    def check(self) -> None:
        """Prove that what waits, waits for something that is open."""
        waiting = dict.fromkeys(self._num_missing, 0)
        for other, followers in self._followers.items():
            assert other in self._open, "law: nothing waits for an order that has ended"
            for follower in followers:
                waiting[follower] += 1
        assert waiting == self._num_missing, "law: the number of orders waited for is right"
        assert not set(self._ready) & set(waiting), "law: what is ready waits for nothing"

    def _check(self, order: CopyOrder) -> None:
        if self._next_id is not None and order.order_id != self._next_id:
            raise CallerError(f"ids of orders follow each other: ours={self._next_id}, theirs={order.order_id}")
        if any(other >= order.order_id for other in order.after):
            raise CallerError(f"an order waits for earlier ones only: {order}")
