"""Which free block is given up next (core spec 5).

In:  runs that became free, are held again, were cut or shortened.
Out: the next victim: a run, whose last block goes first, or its first one in a sliding window.
Law: of the free blocks of one tier on which no child on that tier depends, the one with the lowest (priority, stamp)
     goes first, and within a priority those released as `spare` before the others. Blocks are stamped when they become
     free, the last of a table first, in a sliding window the first; an order may prefer some over others within a
     priority. A block whose time is over moves behind all that was free with the default priority.

One heap entry, that of the next victim, stands for all blocks of a run. Entries are dropped lazily: an entry counts
only while its run still has the stamp in it. A run that still has children on its tier is *parked*: out of the heap,
with its stamp, until the last of them leaves. An entry is one integer, rank before stamp: a tuple would be one more
object that the garbage collector counts for each run.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from kv_core.config import Order
from kv_core.retention import DEFAULT_PRIORITY
from kv_core.runs import Run

_STAMP_BITS = 63
_STAMP = (1 << _STAMP_BITS) - 1
_SLACK = 64
_PROBATION_SHARE = 10


class Stamps:
    """Numbers in the order of release: growing at the back, falling at the front. The tiers of a window share them."""

    __slots__ = ("_back", "_front")

    def __init__(self) -> None:
        self._back = self._front = 1 << (_STAMP_BITS - 1)

    def behind(self, count: int) -> int:
        """The first of `count` numbers behind all others."""
        stamp = self._back
        self._back += count
        return stamp

    def before(self, count: int) -> int:
        """The first of `count` numbers before all others."""
        self._front -= count
        return self._front


class VictimQueue(Protocol):
    """The free runs of one tier: the contract that every order keeps."""

    @property
    def num_free(self) -> int:
        """Free blocks."""
        ...

    def release(self, run: Run, *, front: bool = False, spare: int = 0) -> None:
        """All blocks of the run became free.

        Of their priority, those before the ordinal `spare` go before others, `front` ones before others like them.
        """
        ...

    def claim(self, run: Run) -> None:
        """All blocks of the run are held again, or gone."""
        ...

    def shortened(self, run: Run, count: int) -> None:
        """The first `count` victims of a free run are gone; it has been made shorter already."""
        ...

    def enter(self, run: Run) -> None:
        """The run has a stamp that the queue does not know: it was cut off, or parked."""
        ...

    def restore(self, run: Run, stamp: int) -> None:
        """The run is free again in its old place."""
        ...

    def peek(self) -> Run | None:
        """The run that has the next victim."""
        ...

    def dropped(self, run: Run, inside: int) -> None:
        """Blocks of the run, number `inside` and some behind it, are about to lose their content for want of room."""
        ...

    def published(self, run: Run) -> None:
        """The run is new in the tree."""
        ...

    def __iter__(self) -> Iterator[Run]:
        """The free runs, in any order, without those that are parked."""
        ...


class LruQueue:
    """Priority first, then the longest unused."""

    __slots__ = ("_heap", "_leaf_first", "_limit", "_runs", "_stamps", "num_free")

    def __init__(self, stamps: Stamps, *, leaf_first: bool) -> None:
        self._heap: list[int] = []
        self._runs: dict[int, Run] = {}
        self._leaf_first = leaf_first
        self._stamps = stamps
        self._limit = _SLACK
        self.num_free = 0

    def release(self, run: Run, *, front: bool = False, spare: int = 0) -> None:
        count = len(run.ids)
        run.spare = spare
        run.rank = 2 * run.priority + (run.stop - count >= spare)
        run.stamp = self._stamps.before(count) if front else self._stamps.behind(count)
        self.num_free += count
        entry = run.rank << _STAMP_BITS | run.stamp
        self._runs[entry] = run
        heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._compact()

    def claim(self, run: Run) -> None:
        run.stamp = None
        run.parked = False
        self.num_free -= len(run.ids)

    def shortened(self, run: Run, count: int) -> None:
        assert run.stamp is not None, "law: only free blocks are given up"
        run.stamp += count
        self.num_free -= count
        self.enter(run)

    def enter(self, run: Run) -> None:
        assert run.stamp is not None, "law: what enters has a place in the order"
        run.parked = False
        entry = run.rank << _STAMP_BITS | run.stamp
        self._runs[entry] = run
        heappush(self._heap, entry)

    def restore(self, run: Run, stamp: int) -> None:
        run.stamp = stamp
        self.num_free += len(run.ids)
        self.enter(run)

    def peek(self) -> Run | None:
        heap, runs = self._heap, self._runs
        while heap:
            run = runs.get(heap[0])
            if run is not None and run.stamp == heap[0] & _STAMP:
                if not (self._leaf_first and run.kin):
                    return run
                run.parked = True
            runs.pop(heappop(heap), None)
        return None

    def dropped(self, run: Run, inside: int) -> None:
        """Nothing to remember."""

    def published(self, run: Run) -> None:
        """Nothing to recall."""

    def __iter__(self) -> Iterator[Run]:
        return iter([run for entry, run in self._runs.items() if run.stamp == entry & _STAMP])

    def _compact(self) -> None:
        """Drop entries that no longer count when they may be more than half."""
        self._runs = {entry: run for entry, run in self._runs.items() if run.stamp == entry & _STAMP}
        self._heap = list(self._runs)
        heapify(self._heap)
        self._limit = 2 * len(self._heap) + _SLACK


class S3FifoQueue:
    """Scan resistant: blocks that were never found again go before those that were (after S3-FIFO, SOSP 2023).

    Runs without a hit are *on probation*, those with one are *proven*. Within a priority the probation loses blocks
    while it has more than a tenth of all free ones, so that prompts that come once do not push out those that come
    again. What was dropped from probation is remembered by its first block; if it is published again, it is proven.
    """

    __slots__ = ("_ghosts", "_max_ghosts", "_probation", "_proven")

    def __init__(self, stamps: Stamps, *, leaf_first: bool, num_blocks: int) -> None:
        self._probation = LruQueue(stamps, leaf_first=leaf_first)
        self._proven = LruQueue(stamps, leaf_first=leaf_first)
        self._ghosts: dict[int, None] = {}
        self._max_ghosts = num_blocks

    @property
    def num_free(self) -> int:
        return self._probation.num_free + self._proven.num_free

    def release(self, run: Run, *, front: bool = False, spare: int = 0) -> None:
        self._of(run).release(run, front=front, spare=spare)

    def claim(self, run: Run) -> None:
        self._of(run).claim(run)

    def shortened(self, run: Run, count: int) -> None:
        self._of(run).shortened(run, count)

    def enter(self, run: Run) -> None:
        self._of(run).enter(run)

    def restore(self, run: Run, stamp: int) -> None:
        self._of(run).restore(run, stamp)

    def peek(self) -> Run | None:
        new, old = self._probation.peek(), self._proven.peek()
        if new is None or old is None:
            return old or new
        if new.rank != old.rank:
            return min(new, old, key=lambda run: run.rank)
        crowded = self._probation.num_free * _PROBATION_SHARE > self.num_free
        return new if crowded or new.parent is None else old

    def dropped(self, run: Run, inside: int) -> None:
        if not run.hot:
            self._ghosts[_ghost(run, inside)] = None
            if len(self._ghosts) > self._max_ghosts:
                del self._ghosts[next(iter(self._ghosts))]

    def published(self, run: Run) -> None:
        ghost = _ghost(run, 0)
        run.hot = ghost in self._ghosts
        self._ghosts.pop(ghost, None)

    def __iter__(self) -> Iterator[Run]:
        yield from self._probation
        yield from self._proven

    def _of(self, run: Run) -> LruQueue:
        return self._proven if run.hot else self._probation


def _ghost(run: Run, inside: int) -> int:
    """A number for a block and where in its chain it is; a collision costs a wrong guess, nothing else."""
    return hash((run.start + inside, run.block(inside)))


class Expiries:
    """Free runs whose priority falls back at a given time."""

    __slots__ = ("_clock_ms", "_heap")

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._heap: list[tuple[int, int, Run]] = []

    def released(self, run: Run) -> None:
        """The clock of a run starts when it becomes free, if it has a duration and something to lose."""
        if run.duration_ms is not None and run.priority != DEFAULT_PRIORITY:
            run.expires_at = self._clock_ms() + run.duration_ms
            self.enter(run)

    def enter(self, run: Run) -> None:
        """A run whose stamp is not known here: it was cut off, shortened or moved to another tier."""
        if run.expires_at is not None:
            assert run.stamp is not None, "law: only free blocks expire"
            heappush(self._heap, (run.expires_at, run.stamp, run))

    def due(self) -> list[Run]:
        """The runs whose time is over, earliest first; among equal ones in the order of victims."""
        if not self._heap:
            return []
        now = self._clock_ms()
        found: list[Run] = []
        while self._heap and self._heap[0][0] <= now:
            expires_at, stamp, run = heappop(self._heap)
            if run.expires_at == expires_at and run.stamp == stamp:
                run.expires_at = None
                found.append(run)
        return found


def victim_queue(order: Order, stamps: Stamps, *, leaf_first: bool, num_blocks: int) -> VictimQueue:
    """The queue that keeps `order`."""
    if order is Order.S3_FIFO:
        return S3FifoQueue(stamps, leaf_first=leaf_first, num_blocks=num_blocks)
    return LruQueue(stamps, leaf_first=leaf_first)
