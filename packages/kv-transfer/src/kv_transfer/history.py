"""The transfers that have ended, kept for whoever asks, and told to the log.

In:  TransferReports, as loads and sends end.
Out: the last of them; sums over all; one line of log for each.
Law: bounded. Lines come at INFO, one a second at most, with the number of those in between; all others at DEBUG.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from kv_transfer.reports import TransferReport
from kv_transfer.tally import NOTHING, Tally
from kv_transfer.timers import Clock

logger = logging.getLogger(__name__)

NUM_RECENT: Final = 256
LINE_PERIOD_S: Final = 1.0


class History:
    """Of one rank; of the reactor's thread."""

    def __init__(self, clock: Clock, on_report: Callable[[TransferReport], None] = lambda _: None) -> None:
        """`on_report` is told each transfer, once."""
        self.recent: tuple[TransferReport, ...] = ()
        """The last ones, oldest first, as of the last `publish`; may be read by any thread."""
        self.totals = NOTHING
        """Likewise, the sums over all."""
        self._clock = clock
        self._on_report = on_report
        self._tally = Tally()
        self._kept: deque[TransferReport] = deque(maxlen=NUM_RECENT)
        self._is_published = True
        self._next_line = clock()
        self._num_unsaid = 0

    def add(self, report: TransferReport) -> None:
        """One more transfer has ended."""
        self._kept.append(report)
        self._is_published = False
        self._tally.add(report)
        self._say(report)
        self._on_report(report)

    def publish(self) -> tuple[TransferReport, ...]:
        """Let others see what has come since."""
        if not self._is_published:
            self.recent, self.totals, self._is_published = tuple(self._kept), self._tally.snapshot(), True
        return self.recent

    def _say(self, report: TransferReport) -> None:
        now = self._clock()
        if now < self._next_line:
            self._num_unsaid += 1
            logger.debug("%s", report)
            return
        more = f" (and {self._num_unsaid} more since the last line)" if self._num_unsaid else ""
        logger.info("%s%s", report, more)
        self._next_line, self._num_unsaid = now + LINE_PERIOD_S, 0
