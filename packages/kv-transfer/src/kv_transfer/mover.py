"""The one thread that copies between an engine's blocks and staging.

In:  jobs: callables over tensors, each with what it must wait for.
Out: for each job a Moved, posted to the reactor, in order.
Law: jobs run one at a time, in order of submission; whatever a job raises is its own result. On CUDA a job runs on the
     mover's stream, after the event it was given, and its result, good or bad, is posted when that stream is done: it
     never waits for another stream, nor makes one wait. Transfer spec 14 F1, F2, F4.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kv_transfer.threads import leave_pinned_core

Post = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """The end of one job: what it returned, or what it raised; and how long it took."""

    value: int | None
    error: Exception | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], int | None]
    after: "torch.cuda.Event | None"
    then: Callable[[Moved], None]


class Mover:
    """A thread with a queue of copies, for caches on `device`."""

    def __init__(self, device: torch.device, post: Post) -> None:
        self._device = device
        self._post = post
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        torch.get_num_threads()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvferry-mover", daemon=True)
        self._thread.start()

    def mark(self) -> "torch.cuda.Event | None":
        """An event after all that the caller's current stream was given so far; None if there are no streams."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def submit(
        self, run: Callable[[], int | None], after: "torch.cuda.Event | None", then: Callable[[Moved], None]
    ) -> None:
        """Run this in turn; `then` gets its end, in the reactor's thread. Never blocks."""
        self._jobs.put(_Job(run, after, then))

    def close(self, timeout_s: float) -> bool:
        """Runs what is queued, then ends the thread; False if it did not end in time. Idempotent."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        leave_pinned_core()
        if self._stream is None:
            # Why: copies of one chunk do not gain from OpenMP, and on busy cores its threads wait for each other:
            # 0.05 to 0.5 GB/s with two threads, 0.9 to 2.4 with one (AMD EPYC, 2 cores, loaded). The engine's own
            # thread keeps its number: it has been asked for it, which makes it that thread's own.
            torch.set_num_threads(1)
        with self._on_stream():
            while (job := self._jobs.get()) is not None:
                moved = self._end_of(job)
                self._post(lambda then=job.then, moved=moved: then(moved))  # type: ignore[misc]

    def _end_of(self, job: _Job) -> Moved:
        start = time.perf_counter()
        value, error = self._value_of(job)
        try:
            # Also after an error: what the job has queued before it still writes.
            if self._stream is not None:
                self._stream.synchronize()
        except Exception as lost:
            error = error or lost
        return Moved(None if error else value, error, time.perf_counter() - start)

    def _value_of(self, job: _Job) -> tuple[int | None, Exception | None]:
        """What the job returns, or what it raises; its copies may still be running."""
        try:
            if self._stream is not None and job.after is not None:
                self._stream.wait_event(job.after)
            return job.run(), None
        except Exception as error:
            return None, error

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
