"""Steps of an engine that compute nothing: whether they may wait a moment for what is under way.

In:  of each step whether it computes; that some step has ended; that a load has.
Out: whether the step that begins may wait; the wait.
Law: a step waits only while nothing is computed. Who errs loses one short wait, and never an answer.

Why wait: an engine whose requests all wait for loads steps again and again, and each of its steps takes the interpreter
from the threads that load for it. While it waits they have it, and it hears at once when one of them is done.
"""

import threading


class IdleSteps:
    """What the scheduler side knows of steps: which compute, and how many of those are not over."""

    def __init__(self, *, is_alone: bool) -> None:
        """`is_alone`: no other engine waits for our steps, as data-parallel ranks do for each other."""
        self._is_alone = is_alone
        self._num_computing = 0

    def begins(self, *, computes: bool) -> bool:
        """One more step; whether it may wait."""
        if computes:
            self._num_computing += 1
        return self._is_alone and self._num_computing == 0

    def ends(self) -> None:
        """A step is over. One that computes nothing may be told as well: then we wait once too often."""
        self._num_computing = max(0, self._num_computing - 1)


class IdleWait:
    """What the worker side does with such a step. Any thread may tell, one waits."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._news = threading.Event()

    def tell(self) -> None:
        """A load has ended. Never blocks."""
        self._news.set()

    def wait(self, *, is_worth: bool) -> None:
        """Until something was told since the last wait, `most_s` at most; not at all if it is not worth it.

        The caller looks afterwards at what has ended: what ends from here on is told for the next step.
        """
        if is_worth:
            self._news.wait(self._most_s)
        self._news.clear()
