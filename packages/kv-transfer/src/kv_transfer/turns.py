"""Who takes memory next.

In:  sessions that want some; a way to serve one of them.
Out: each served in turn, a chunk a turn, while there is memory.
Law: whoever is first in the row and finds no memory is first again. Whoever has its share is passed over, and keeps
     nobody else from memory that is there.
"""

import enum
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

WaiterT = TypeVar("WaiterT")


class Turn(enum.Enum):
    """What came of a turn."""

    SERVED = "served"
    OVER = "over"
    """It wants nothing now; it joins again when it does."""
    HAS_SHARE = "has share"
    """It has as much as it may have for now."""
    NO_ROOM = "no room"


class Turns(Generic[WaiterT]):
    """One row; of one thread."""

    def __init__(self, serve: Callable[[WaiterT], Turn]) -> None:
        self._serve = serve
        self._row: deque[WaiterT] = deque()

    def join(self, waiter: WaiterT) -> None:
        """Stand at the end of the row; nothing happens to who stands in it."""
        if waiter not in self._row:
            self._row.append(waiter)

    def pump(self) -> None:
        """Serve, until there is no room, or nobody left who may have any."""
        num_passed = 0
        while num_passed < len(self._row):
            turn = self._serve(self._row[0])
            if turn is Turn.NO_ROOM:
                return
            if turn is Turn.OVER:
                self._row.popleft()
                continue
            self._row.rotate(-1)
            num_passed = num_passed + 1 if turn is Turn.HAS_SHARE else 0
