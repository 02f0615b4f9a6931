"""The one thread that copies between an engine's blocks and staging.

In:  jobs: callables over tensors, each with what it must wait for.
Out: for each job a Moved, posted to the reactor, in order.
Law: jobs run one at a time, in order of submission; whatever a job raises is its own result. On CUDA a job runs on the
     mover's stream, after the event it was given, and its result, good or bad, is posted when that stream is done: it
     never waits for another stream, nor makes one wait. Transfer spec 14 F1, F2, F4.
     A job with a gate runs inside it, and leaves when its copies are over. When the thread fails every job ends badly,
     those that are queued and those that come later.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kv_core.errors import FerryError
from kv_transfer.gate import Gate
from kv_transfer.pulse import Pulse
from kv_transfer.threads import leave_pinned_core

logger = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """The end of one job: what it returned, or what it raised; and how long it took."""

    value: int | None
    error: Exception | None
    seconds: float


class MoverFailed(FerryError):
    """The copy thread has ended; nothing is copied any more."""


class Skipped(FerryError):
    """The blocks of a job were taken back before its turn; it was not run."""


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], int | None]
    after: "torch.cuda.Event | None"
    then: Callable[[Moved], None]
    gate: Gate | None


class Mover:
    """A thread with a queue of copies, for caches on `device`."""

    def __init__(self, device: torch.device, post: Post) -> None:
        self._device = device
        self._post = post
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        torch.get_num_threads()
        self.pulse = Pulse("copy thread")
        self._lock = threading.Condition()  # guards the queue
        self._jobs: deque[_Job] = deque()
        self._is_closing = False
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
        self,
        run: Callable[[], int | None],
        after: "torch.cuda.Event | None",
        then: Callable[[Moved], None],
        gate: Gate | None = None,
    ) -> None:
        """Run this in turn; `then` gets its end, in the reactor's thread. Never blocks.

        A job whose gate was shut before its turn is Skipped.
        """
        job = _Job(run, after, then, gate)
        with self._lock:
            is_lost = bool(self.pulse.failure)
            if not is_lost:
                self._jobs.append(job)
                self._lock.notify()
        if is_lost:
            self._tell(job, self._lost())

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended: a copy of it may be running."""
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> bool:
        """Runs what is queued, then ends the thread; False if it did not end in time. Idempotent."""
        with self._lock:
            self._is_closing = True
            self._lock.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        running: _Job | None = None
        try:
            leave_pinned_core()
            self._choose_threads()
            with self._on_stream():
                while (running := self._next()) is not None:
                    job, moved = running, self._end_of(running)
                    running = None
                    self._tell(job, moved)
        except BaseException as error:
            logger.critical("the copy thread ends by an error of its own", exc_info=True)
            self._fail(repr(error), running)

    def _choose_threads(self) -> None:
        if self._stream is None:
            # Why: copies of one chunk do not gain from OpenMP, and on busy cores its threads wait for each other:
            # 0.05 to 0.5 GB/s with two threads, 0.9 to 2.4 with one (AMD EPYC, 2 cores, loaded). The engine's own
            # thread keeps its number: it has been asked for it, which makes it that thread's own.
            torch.set_num_threads(1)

    def _next(self) -> _Job | None:
        """The job whose turn it is, once there is one; None when we are closed and nothing is left."""
        with self._lock:
            self.pulse.rests()
            while not self._jobs and not self._is_closing:
                self._lock.wait()
            return self._jobs.popleft() if self._jobs else None

    def _end_of(self, job: _Job) -> Moved:
        if job.gate is None:
            return self._copied(job)
        if not job.gate.enter():
            return Moved(None, Skipped("its blocks were taken back before its turn"), 0.0)
        try:
            return self._copied(job)
        finally:
            job.gate.leave()

    def _copied(self, job: _Job) -> Moved:
        """The job, and whatever it has queued: also after an error that still writes."""
        self.pulse.begins("copy")
        start = time.perf_counter()
        try:
            value, error = self._value_of(job)
        finally:
            lost = self._drained()
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

    def _drained(self) -> Exception | None:
        """Waits for our stream; the error of a device that is lost, on which nothing runs any more."""
        try:
            if self._stream is not None:
                self._stream.synchronize()
        except Exception as lost:
            return lost
        return None

    def _fail(self, failure: str, running: _Job | None) -> None:
        """Whoever waits for a copy is told that it will not be made."""
        with self._lock:
            self.pulse.ends(failure)
            lost, self._jobs = [*([] if running is None else [running]), *self._jobs], deque()
        for job in lost:
            self._tell(job, self._lost())

    def _lost(self) -> Moved:
        return Moved(None, MoverFailed(f"the copy thread has failed: {self.pulse.failure}"), 0.0)

    def _tell(self, job: _Job, moved: Moved) -> None:
        self._post(lambda: job.then(moved))

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
