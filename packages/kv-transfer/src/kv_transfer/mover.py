"""The one thread that copies between an engine's blocks and staging.

In:  jobs: callables over tensors, each with what it must wait for.
Out: for each job a Moved, posted to the reactor.
Law: jobs begin one at a time, in order of submission; whatever a job raises is its own result. On CUDA a job is queued
     on its lane, after the event it was given, and its result, good or bad, is posted when all that it has queued there
     is over. Until then others begin: their copies overlap, and the thread waits for none of them on the device.
     Transfer spec 14 F1, F2, F4.
     Whoever sees the end of a job's copies first tells it: this thread, or the one that waits for its lane.
     A job may be done in steps: it yields, and goes on when what it has queued so far is over. If all that is left
     then is to look at what was copied, it returns a Look: whoever tells the job's end takes it, without another turn.
     A job with a gate runs inside it, and leaves when its copies are over. When the thread fails every job ends badly,
     those that are queued and those that come later; those that run, once their copies are over. A copy that is not
     over `GIVE_UP_S` after that keeps its gate, and with it its blocks and its staging, until its lane says that it is.
     Two pulses: of the thread, and of what has been in flight for longest, which no other copy's end makes younger.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from kv_core.errors import FerryError
from kv_transfer.gate import Gate
from kv_transfer.lanes import IsOver, Lane, Lanes, lanes_for
from kv_transfer.pulse import Pulse
from kv_transfer.threads import leave_pinned_core

logger = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]
Look = Callable[[], int | None]
"""What a job does last, when its copies are over, in whatever thread sees that: short, and it queues nothing."""
Steps = Generator[None, None, int | Look | None]
Run = Callable[[], int | Look | Steps | None]

MAX_FLIGHTS: Final = 16
"""Jobs that have begun and are not over. More than chunks in flight keep a link busy; each keeps a table of its own."""

LOOK_S: Final = 1e-3
"""Longest pause between looks at copies that run; their lane wakes us when one is over."""


GIVE_UP_S: Final = 5.0
"""How long a thread that has failed waits for the copies that it has begun."""


def _always() -> bool:
    return True


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
    run: Run
    after: "torch.cuda.Event | None"
    then: Callable[[Moved], None]
    gate: Gate | None
    lane: Lane
    is_alone: bool


@dataclass(slots=True, eq=False)
class _Flight:
    """A job that has begun, inside its gate. `number` counts what it has waited for: older news means nothing."""

    job: _Job
    began_at: float
    steps: Steps | None
    """What is left of it once `is_over`."""
    is_over: IsOver = field(default=_always)
    value: int | Look | None = None
    error: Exception | None = None
    number: int = 0
    since: int = 0
    """How many steps of any job had been queued when its last was; 0 while that is being queued."""

    def outcome(self) -> tuple[int | None, Exception | None]:
        """What it has returned, or raised; its copies are over."""
        if self.error is not None:
            return None, self.error
        if not callable(self.value):
            return self.value, None
        try:
            return self.value(), None
        except Exception as error:
            return None, error


class Mover:
    """A thread with a queue of copies, for caches on `device`."""

    def __init__(self, device: torch.device, post: Post, lanes: Lanes | None = None) -> None:
        self._device = device
        self._post = post
        self._lanes = lanes or lanes_for(device)
        torch.get_num_threads()
        self.pulse = Pulse("copy thread")
        self.oldest = Pulse("oldest copy in flight")
        self._num_steps = 0
        self._lock = threading.Condition()  # guards the queue, and who ends a flight
        self._jobs: deque[_Job] = deque()
        self._is_closing = False
        self._flights: list[_Flight] = []
        self._is_woken = False
        self._thread = threading.Thread(target=self._run, name="kvferry-mover", daemon=True)
        self._thread.start()

    def mark(self) -> "torch.cuda.Event | None":
        """An event after all that the caller's current stream was given so far; None if there are no streams."""
        return self._lanes.mark()

    def submit(
        self,
        run: Run,
        after: "torch.cuda.Event | None",
        then: Callable[[Moved], None],
        gate: Gate | None = None,
        *,
        lane: Lane = Lane.IN,
        is_alone: bool = False,
    ) -> None:
        """Run this in turn; `then` gets its end, in the reactor's thread. Never blocks.

        `is_alone`: all that began before is over then. A job whose gate was shut before its turn is Skipped.
        """
        job = _Job(run, after, then, gate, lane, is_alone)
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
        try:
            leave_pinned_core()
            self._choose_threads()
            while self._has_more():
                if (job := self._next()) is not None:
                    self._begin(job)
                self._look()
        except BaseException as error:
            logger.critical("the copy thread ends by an error of its own", exc_info=True)
            self._fail(repr(error))
        self._lanes.close()

    def _choose_threads(self) -> None:
        if self._device.type == "cpu":
            # Why: copies of one chunk do not gain from OpenMP, and on busy cores its threads wait for each other:
            # 0.05 to 0.5 GB/s with two threads, 0.9 to 2.4 with one (AMD EPYC, 2 cores, loaded). The engine's own
            # thread keeps its number: it has been asked for it, which makes it that thread's own.
            torch.set_num_threads(1)

    def _has_more(self) -> bool:
        """Waits until there is something to begin or to look at; False when we are closed and nothing is left."""
        with self._lock:
            if self._flights:
                if not self._may_begin() and not self._is_woken:
                    self._lock.wait(LOOK_S)
                if self._is_woken:
                    self._is_woken = False
                    self.pulse.begins("copy")
                return True
            self.pulse.rests()
            while not self._jobs and not self._is_closing:
                self._lock.wait()
            return bool(self._jobs)

    def _next(self) -> _Job | None:
        """The job whose turn it is, if it may begin now."""
        with self._lock:
            return self._jobs.popleft() if self._may_begin() else None

    def _may_begin(self) -> bool:
        """A job that is alone is over before the next begins: it copies nothing that is queued."""
        if not self._jobs or len(self._flights) >= MAX_FLIGHTS:
            return False
        return not (self._flights and self._jobs[0].is_alone)

    def _begin(self, job: _Job) -> None:
        if job.gate is not None and not job.gate.enter():
            self._tell(job, Moved(None, Skipped("its blocks were taken back before its turn"), 0.0))
            return
        flight = _Flight(job, time.perf_counter(), steps=_steps_of(job.run))
        self._flights.append(flight)
        self._go_on(flight, job.after)

    def _look(self) -> None:
        """Goes on with jobs whose copies so far are over, until each waits for some or has ended."""
        for flight in list(self._flights):
            while self._is_over(flight):
                if flight.steps is None:
                    self._end(flight)
                    break
                self._go_on(flight, None)

    def _go_on(self, flight: _Flight, after: "torch.cuda.Event | None") -> None:
        """One more step of a job; also after an error what it has queued runs to its end."""
        self.pulse.begins("copy")
        assert flight.steps is not None, "law: what has ended does not go on"
        with self._lock:
            flight.number += 1
            flight.since = 0
            self._see_oldest()
            steps, flight.steps = flight.steps, None
        lane = flight.job.lane
        try:
            with self._lanes.on(lane, after):
                next(steps)
            flight.steps = steps
        except StopIteration as end:
            flight.value = end.value
        except Exception as error:
            flight.error = error
        except BaseException as end:
            # Why here: whoever waits for the lane may tell the job before this thread has failed.
            flight.error = MoverFailed(f"the copy thread has failed: {end!r}")
            raise
        finally:
            self._watch(flight, lane)

    def _see_oldest(self) -> None:
        """Under the lock."""
        self.oldest.is_at(min((each.since for each in self._flights if each.since), default=None), "copy")

    def _watch(self, flight: _Flight, lane: Lane) -> None:
        """From now on the job waits for what its lane has been given."""
        try:
            flight.is_over = self._lanes.end_of(lane, partial(self._is_told, flight, flight.number))
        except Exception as lost:
            self._is_lost(flight, lost)
        with self._lock:
            self._num_steps += 1
            flight.since = self._num_steps
            self._see_oldest()

    def _is_over(self, flight: _Flight) -> bool:
        try:
            return flight.is_over()
        except Exception as lost:
            self._is_lost(flight, lost)
            return True

    @staticmethod
    def _is_lost(flight: _Flight, lost: Exception) -> None:
        """Nothing runs any more on a device that is lost."""
        flight.error, flight.steps, flight.is_over = flight.error or lost, None, _always

    def _is_told(self, flight: _Flight, number: int, lost: Exception | None) -> None:
        """A lane's own thread says that what the job waited for is over. If nothing of it is left, it is told from
        here: another change of threads would only be waited for."""
        with self._lock:
            self._is_woken = True
            self._lock.notify()
            has_ended = lost is None and flight.number == number and flight.steps is None
        if has_ended:
            self._end(flight)

    def _end(self, flight: _Flight) -> None:
        with self._lock:
            if flight not in self._flights:
                return
            self._flights.remove(flight)
            self._see_oldest()
        value, error = flight.outcome()
        self._leave(flight.job)
        self._tell(flight.job, Moved(value, error, time.perf_counter() - flight.began_at))

    def _fail(self, failure: str) -> None:
        """Whoever waits for a copy is told that it will not be made, and that it runs no more."""
        with self._lock:
            flights, self._flights = self._flights, []
        until = time.monotonic() + GIVE_UP_S
        while time.monotonic() < until and not all(self._is_over(flight) for flight in flights):
            time.sleep(LOOK_S)
        with self._lock:
            self.pulse.ends(failure)
            queued, self._jobs = self._jobs, deque()
            for flight in flights:
                flight.steps, flight.error = None, flight.error or self._lost().error
            # From here on their lanes' own threads may tell them.
            self._flights = list(flights)
            self._see_oldest()
        for job in queued:
            self._tell(job, self._lost())
        for flight in flights:
            if self._is_over(flight):
                self._end(flight)
            else:
                logger.critical("a copy is still not over: its blocks and its staging are kept until it is")

    def _lost(self) -> Moved:
        return Moved(None, MoverFailed(f"the copy thread has failed: {self.pulse.failure}"), 0.0)

    @staticmethod
    def _leave(job: _Job) -> None:
        if job.gate is not None:
            job.gate.leave()

    def _tell(self, job: _Job, moved: Moved) -> None:
        self._post(lambda: job.then(moved))


def _steps_of(run: Run) -> Steps:
    """A job in steps, also if it is done in one."""
    found = run()
    return (yield from found) if isinstance(found, Generator) else found
