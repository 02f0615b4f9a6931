"""Whether a thread of ours gets on, as others see it.

In:  the thread's own word: what it begins, that it rests, how it has ended.
Out: Pulse, which the thread writes and anybody reads; Watcher, which says what is wrong with it.
Law: a thread hangs when it is found in one and the same call at every look for `stall_s`. A look counts at most once
     in a tenth of that, however late it comes: a process that was stopped is not taken for one that hangs.
"""

from typing import Final, NamedTuple

from kv_transfer.timers import Clock

NUM_LOOKS: Final = 10


class Beat(NamedTuple):
    """What a thread is doing: the number of the thing it has begun last, and what it is ("" while it rests)."""

    number: int
    doing: str


class Pulse:
    """Written by one thread, or under one lock, and read by any; each write is one assignment."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.beat = Beat(0, "")
        self.failure = ""
        """Why the thread has ended, other than by our wish. It is not begun again."""

    def begins(self, what: str) -> None:
        """The thread begins something that may take time."""
        self.beat = Beat(self.beat.number + 1, what)

    def is_at(self, number: int | None, what: str) -> None:
        """What counts is this thing, and has been since it was first named; None: nothing does."""
        self.beat = Beat(self.beat.number, "") if number is None else Beat(number, what)

    def rests(self) -> None:
        """The thread waits for something to do."""
        self.beat = Beat(self.beat.number, "")

    def ends(self, failure: str) -> None:
        """The thread has failed; the first reason counts."""
        self.rests()
        self.failure = self.failure or failure

    def was_stuck_since(self, beat: Beat) -> bool:
        """Whether the thread has been in one call ever since."""
        return bool(beat.doing) and self.beat == beat


class Watcher:
    """Looks at one pulse; of one thread."""

    def __init__(self, pulse: Pulse, clock: Clock, stall_s: float) -> None:
        self._pulse = pulse
        self._clock = clock
        self._stall_s = stall_s
        self._seen = pulse.beat
        self._num_same = 0
        self._next_look = clock()

    def trouble(self) -> str:
        """What is wrong with the thread; empty if it rests or gets on."""
        pulse = self._pulse
        if pulse.failure:
            return f"the {pulse.name} has failed: {pulse.failure}"
        now, step_s = self._clock(), self._stall_s / NUM_LOOKS
        if not pulse.was_stuck_since(self._seen):
            # That it gets on is believed at once.
            self._seen, self._num_same, self._next_look = pulse.beat, 0, now + step_s
        elif now >= self._next_look:
            self._num_same, self._next_look = self._num_same + 1, now + step_s
        if self._num_same < NUM_LOOKS:
            return ""
        return f"the {pulse.name} hangs: it has been in '{self._seen.doing}' for {self._stall_s} s"
