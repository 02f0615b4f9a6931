"""Where copies are queued, and when what was queued is over.

In:  copies out of an engine's blocks and into them; events of the engine's own stream.
Out: for each lane a stream on which the calling thread queues copies; the end of what it has been given so far.
Law: copies of one lane run in the order in which they were queued, those of different lanes side by side. A lane waits
     for the events it is given, on the device; nobody waits for a whole device. Without a GPU there are no streams, and
     whatever was queued is over.
"""

import enum
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from kv_transfer.threads import leave_pinned_core


class Lane(enum.Enum):
    """Which way a copy goes."""

    OUT = "out of the engine's blocks"
    IN = "into the engine's blocks"


Wake = Callable[[Exception | None], None]
"""Some copies are over: None; or their device is lost: why."""
IsOver = Callable[[], bool]
"""Whether some copies are over, without waiting for them; raises if their device is lost."""


class Lanes(Protocol):
    """The lanes of one device."""

    def mark(self) -> "torch.cuda.Event | None":
        """An event after all that the caller's current stream was given so far; None if there are no streams."""

    def on(self, lane: Lane, after: "torch.cuda.Event | None") -> AbstractContextManager[object]:
        """Makes the lane the current stream of this thread; what is queued there comes after the event."""

    def end_of(self, lane: Lane, wake: Wake) -> IsOver:
        """Of all that the lane was given so far; `wake` is called when it is over, unless it is so already."""

    def close(self) -> None:
        """Nothing more is queued, and all that was is over."""


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of caches on this device."""
    return CudaLanes(device) if device.type == "cuda" else HostLanes()


class HostLanes:
    """Copies of a CPU are over when their call returns."""

    def mark(self) -> None:
        return None

    def on(self, lane: Lane, after: "torch.cuda.Event | None") -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def end_of(self, lane: Lane, wake: Wake) -> IsOver:  # noqa: ARG002
        return _is_over

    def close(self) -> None:
        """Nothing runs behind a call that has returned."""


class CudaLanes:
    """A stream for each lane, and a thread that waits for its events one after the other, without the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in Lane}  # type: ignore[no-untyped-call]
        self._waiters = {lane: _Waiter(f"kvferry-lane-{lane.name.lower()}") for lane in Lane}

    def mark(self) -> "torch.cuda.Event":
        return _after(torch.cuda.current_stream(self._device))

    def on(self, lane: Lane, after: "torch.cuda.Event | None") -> AbstractContextManager[object]:
        if after is not None:
            self._streams[lane].wait_event(after)
        return torch.cuda.stream(self._streams[lane])

    def end_of(self, lane: Lane, wake: Wake) -> IsOver:
        event = _after(self._streams[lane])
        self._waiters[lane].watch(event, wake)
        return lambda: bool(event.query())  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for waiter in self._waiters.values():
            waiter.close()


class Event(Protocol):
    """A `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Waits until it has happened; raises if its device is lost."""


class _Waiter:
    """Says when events have happened, in the order in which they are named. Why not by looking again and again: every
    look takes the interpreter from the engine's thread, and finds the end of a copy late."""

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[Event, Wake] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def watch(self, event: Event, wake: Wake) -> None:
        self._asked.put((event, wake))

    def close(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        leave_pinned_core()
        while (asked := self._asked.get()) is not None:
            event, wake = asked
            wake(_lost_at(event))


def _lost_at(event: Event) -> Exception | None:
    """Waits for the event; why it will never happen, if so."""
    try:
        event.synchronize()
    except Exception as lost:
        return lost
    return None


def _after(stream: torch.cuda.Stream) -> "torch.cuda.Event":
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _is_over() -> bool:
    return True
