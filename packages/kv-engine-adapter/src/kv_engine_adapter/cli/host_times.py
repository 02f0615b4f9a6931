"""What a chunk costs the host: how long its launches and its post take, and how much of that its thread runs.

In:  the ranges that a transfer layer marks; calls to time.
Out: for each name the medians in microseconds, since they were told last.
Law: what is measured is queueing, not copying: on a GPU a launch returns before its copy runs. The rest of `took` above
     `ran` is waiting: for the interpreter, for a core, for the driver.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import NamedTuple, ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


class Took(NamedTuple):
    """Medians of one name, microseconds: from begin to end, and of the thread's own processor time."""

    times: int
    took_us: float
    ran_us: float


class HostTimes:
    """The Ranges of a transfer layer that is measured."""

    def __init__(self) -> None:
        self._taken: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def around(self, name: str) -> AbstractContextManager[object]:
        """See `kv_transfer.profiling.Ranges`."""
        return self._around(name)

    def begin(self, name: str) -> Callable[[], None]:
        """See `kv_transfer.profiling.Ranges`; it may end in another thread, so nothing is said of processor time."""
        began = time.perf_counter()
        return lambda: self._taken[name].append((time.perf_counter() - began, 0.0))

    def timed(self, name: str, call: Callable[ArgumentsT, ResultT]) -> Callable[ArgumentsT, ResultT]:
        """The same call, measured."""

        def run(*told: ArgumentsT.args, **more: ArgumentsT.kwargs) -> ResultT:
            with self._around(name):
                return call(*told, **more)

        return run

    def told(self) -> dict[str, Took]:
        """The medians; they begin anew."""
        taken, self._taken = self._taken, defaultdict(list)
        return {
            name: Took(len(each), *(round(1e6 * median(one[kind] for one in each), 1) for kind in (0, 1)))
            for name, each in taken.items()
        }

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        began, ran = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self._taken[name].append((time.perf_counter() - began, time.thread_time() - ran))
