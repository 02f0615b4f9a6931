"""Callbacks at times to come.

In:  a clock (seconds, monotonic) and callbacks with delays.
Out: the callbacks, run by whoever calls `run_due`, in order of time, ties in order of setting.
Law: a cancelled timer never runs; one that raises leaves the others in place.
"""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Final

Clock = Callable[[], float]

GRACE_TICKS: Final = 10


class Timer:
    """One callback to come; `cancel` is idempotent and also legal after it ran."""

    __slots__ = ("_run", "when")

    def __init__(self, when: float, run: Callable[[], None]) -> None:
        self.when = when
        self._run: Callable[[], None] | None = run

    def cancel(self) -> None:
        """Never run, and let go of whatever the callback holds."""
        self._run = None

    @property
    def is_live(self) -> bool:
        return self._run is not None

    def fire(self) -> None:
        """Run once, if not cancelled."""
        run, self._run = self._run, None
        if run is not None:
            run()


class Timers:
    """A heap of timers; of one thread."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()

    def after(self, delay_s: float, run: Callable[[], None]) -> Timer:
        """Run the callback `delay_s` from now."""
        timer = Timer(self.clock() + delay_s, run)
        heapq.heappush(self._heap, (timer.when, next(self._order), timer))
        return timer

    def after_running(self, span_s: float, run: Callable[[], None]) -> None:
        """Run the callback after `span_s`, the last half of which this thread has really been running.

        Why: a stopped process takes in what waits in its sockets only after it goes on, whatever the clock says.
        """
        _Endurance(self, span_s / GRACE_TICKS, run).tick()

    def next_delay(self) -> float | None:
        """Seconds until the next timer is due, at least 0; None if there is none."""
        heap = self._heap
        while heap and not heap[0][2].is_live:
            heapq.heappop(heap)
        return max(0.0, heap[0][0] - self.clock()) if heap else None

    def run_due(self) -> None:
        """Run all that are due now; those they set run next time, even if due at once."""
        heap, now, due = self._heap, self.clock(), []
        while heap and heap[0][0] <= now:
            due.append(heapq.heappop(heap)[2])
        while due:
            try:
                due.pop(0).fire()
            except BaseException:
                for timer in due:
                    heapq.heappush(self._heap, (timer.when, next(self._order), timer))
                raise


class _Endurance:
    """Ticks, one after the other; after one that comes late at least half of them are still to come."""

    def __init__(self, timers: Timers, period_s: float, run: Callable[[], None]) -> None:
        self._timers = timers
        self._period_s = period_s
        self._run = run
        self._left = GRACE_TICKS
        self._due = timers.clock()

    def tick(self) -> None:
        if self._timers.clock() - self._due > self._period_s:
            self._left = max(self._left, GRACE_TICKS // 2)
        if self._left == 0:
            self._run()
            return
        self._left -= 1
        self._due = self._timers.clock() + self._period_s
        self._timers.after(self._period_s, self.tick)
