"""The threads that one rank leans on, watched from its reactor.

In:  their pulses; the time.
Out: `trouble`, why nothing new is begun; one call to `on_failed` when a thread has failed for good.
Law: while a thread hangs nothing new is begun, and what is under way ends by its own deadlines; if it goes on, so do
     we. A thread that has failed is not begun again: what it was doing is in doubt until the process ends.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.pulse import NUM_LOOKS, Pulse, Watcher
from kv_transfer.timers import Timers

logger = logging.getLogger(__name__)


class Health:
    """The state of some threads; of the reactor's thread."""

    def __init__(self, timers: Timers, pulses: Sequence[Pulse], stall_s: float) -> None:
        self.trouble = ""
        """Why nothing new is begun; empty if all is well. May be read by any thread."""
        self.num_troubled = 0
        self._timers = timers
        self._stall_s = stall_s
        self._pulses = pulses
        self._watchers = [Watcher(pulse, timers.clock, stall_s) for pulse in pulses]
        self._on_failed: Callable[[str], None] = lambda _: None
        self._has_failed = False

    def start(self, on_failed: Callable[[str], None]) -> None:
        """Begin to watch; `on_failed` is told once, with the reason."""
        self._on_failed = on_failed
        self._tick()

    def look(self) -> str:
        """See how they are now, and say what has changed."""
        found = [trouble for watcher in self._watchers if (trouble := watcher.trouble())]
        if found or self.trouble:
            self._tell(found)
        return self.trouble

    def _tell(self, found: list[str]) -> None:
        before, self.trouble, self.num_troubled = self.trouble, "; ".join(found), len(found)
        if self.trouble and self.trouble != before:
            logger.error("nothing new is begun: %s", self.trouble)
        elif not self.trouble:
            logger.warning("all is well again, after: %s", before)
        if not self._has_failed and any(pulse.failure for pulse in self._pulses):
            self._has_failed = True
            # Not at once: whoever looks is about to decide on a session that this may end.
            self._timers.after(0.0, partial(self._on_failed, self.trouble))

    def _tick(self) -> None:
        # Armed first: whatever goes wrong below, the next look comes.
        self._timers.after(self._stall_s / NUM_LOOKS, self._tick)
        self.look()
