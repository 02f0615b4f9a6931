"""What others ask of an agent's thread, and wait for.

In:  things to do, from any thread; a turn of the agent's thread.
Out: their results, to whoever asked.
Law: whoever asks gets an answer: the result, the refusal of an agent that has ended, or AgentStuck when the thread
     stays in one call for longer than his patience. What he no longer waits for is not begun.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final, TypeVar

from kv_transfer.agent.base import AgentStuck
from kv_transfer.pulse import Beat, Pulse

NUM_STEPS: Final = 20
"""A caller waits in so many steps: if the process was stopped, most of them are still to come."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do in the thread, and how to tell its caller that it will not be done."""

    name: str
    run: Callable[[], None]
    refuse: Callable[[Exception], None]


class Calls:
    """The calls of one agent; its owner's lock guards the queue."""

    def __init__(self, lock: threading.Condition, pulse: Pulse) -> None:
        self._lock = lock
        self._pulse = pulse
        self._queue: deque[_Call] = deque()
        self._given_up_in: Beat | None = None

    def __bool__(self) -> bool:
        """Whether a call waits."""
        return bool(self._queue)

    def ask(self, name: str, do: Callable[[], ResultT], check_open: Callable[[], None], patience_s: float) -> ResultT:
        """Has something done in the thread, and waits for it. `check_open` raises if there is no thread any more."""
        result: Future[ResultT] = Future()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(do())
                except Exception as error:
                    result.set_exception(error)
                except BaseException as error:
                    result.set_exception(error)
                    raise

        def refuse(error: Exception) -> None:
            if result.set_running_or_notify_cancel():
                result.set_exception(error)

        with self._lock:
            check_open()
            self._check_awake(name)
            self._queue.append(_Call(name, run, refuse))
            self._lock.notify()
        self._wait(name, result, patience_s)
        return result.result()

    def run_all(self) -> None:
        """Does what was asked so far; of the agent's thread."""
        # One at a time: if one ends the thread, the others are still there to be refused.
        while (call := self._next()) is not None:
            self._pulse.begins(call.name)
            call.run()

    def refuse_all(self, error: Exception) -> None:
        """Nothing that was asked is done any more."""
        while (call := self._next()) is not None:
            call.refuse(error)

    def _next(self) -> _Call | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def _wait(self, name: str, result: "Future[ResultT]", patience_s: float) -> None:
        beat, num_left = self._pulse.beat, NUM_STEPS
        while not wait([result], patience_s / NUM_STEPS).done:
            if not self._pulse.was_stuck_since(beat):
                beat, num_left = self._pulse.beat, NUM_STEPS
            num_left -= 1
            if num_left <= 0:
                result.cancel()
                self._given_up_in = beat
                raise AgentStuck(f"the agent's thread does not answer: asked={name}, it has been in '{beat.doing}'")

    def _check_awake(self, name: str) -> None:
        """Who has waited in vain did so for all others: while the thread is in that call, nobody waits again."""
        if self._given_up_in is not None and self._pulse.was_stuck_since(self._given_up_in):
            doing = self._given_up_in.doing
            raise AgentStuck(f"the agent's thread hangs: asked={name}, it has been in '{doing}'")
