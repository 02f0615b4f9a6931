"""Releases of remote offers, each repeated until it is answered.

In:  releases that the engine wants said; answers; the time.
Out: messages on the wire.
Law: every release ends: answered, given up because nobody listens at that door any more (its offers are gone with it),
     or given up at its deadline (the lease ends the offer). A door is called by one link, however many releases wait.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_core.errors import CallerError
from kv_transfer.config import TransferConfig
from kv_transfer.protocol import codec
from kv_transfer.protocol.messages import Release, ReleaseReply
from kv_transfer.status import Counters
from kv_transfer.timers import Timer, Timers
from kv_transfer.wire import Link, Probe, UnusableAddress, Wire

logger = logging.getLogger(__name__)

Door = tuple[str, int]
Errand = tuple[str, bytes | None, str]
"""Transfer id, prompt key and consumer of a release."""


@dataclass(slots=True)
class _Errands:
    """What waits for one remote door."""

    door: Door
    link: Link
    waiting: dict[Errand, tuple[Release, float]] = field(default_factory=dict)
    pause_s: float = 0.0
    timer: Timer | None = None


class Releaser:
    """Says releases to remote doors until they are heard; lives in a reactor."""

    def __init__(self, config: TransferConfig, wire: Wire, timers: Timers, counters: Counters) -> None:
        self._config = config
        self._wire = wire
        self._timers = timers
        self._counters = counters
        self._doors: dict[Door, _Errands] = {}
        self._by_link: dict[Link, _Errands] = {}

    @property
    def num_waiting(self) -> int:
        # A copy, since other threads ask too.
        return sum(len(errands.waiting) for errands in list(self._doors.values()))

    def release(self, door: Door, message: Release) -> None:
        """Say this until it is answered."""
        try:
            codec.encode(message)
            errands = self._errands_at(door)
        except (CallerError, UnusableAddress) as error:
            logger.warning("cannot release transfer %s: %s", message.transfer_id, error)
            self._counters.add("releases_given_up")
            return
        deadline = self._timers.clock() + self._config.release_deadline_s
        errands.waiting[message.transfer_id, message.prompt_key, message.consumer] = (message, deadline)
        self._wire.send(errands.link, message)
        errands.pause_s = self._config.nudge_s
        self._wait(errands)

    def answered(self, link: Link, reply: ReleaseReply) -> None:
        """A door has heard us."""
        errands = self._by_link.get(link)
        if errands is None or not errands.waiting.pop((reply.transfer_id, reply.prompt_key, reply.consumer), None):
            return
        self._counters.add("releases_answered")
        if not reply.known:
            logger.info("the peer does not know transfer %s any more", reply.transfer_id)
        if not errands.waiting:
            self._wait(errands)

    def _errands_at(self, door: Door) -> _Errands:
        errands = self._doors.get(door)
        if errands is None:
            link = self._wire.call(*door)
            errands = self._doors[door] = self._by_link[link] = _Errands(door, link)
        return errands

    def _wait(self, errands: _Errands) -> None:
        if errands.timer is not None:
            errands.timer.cancel()
        if errands.waiting:
            errands.timer = self._timers.after(errands.pause_s, lambda: self._repeat(errands))
        else:
            errands.timer = self._timers.after(self._config.peer_idle_s, lambda: self._forget(errands))

    def _repeat(self, errands: _Errands) -> None:
        # Armed first: whatever goes wrong below, the next round comes.
        errands.pause_s = min(2 * errands.pause_s, self._config.nudge_limit_s)
        self._wait(errands)
        now = self._timers.clock()
        self._give_up(errands, lambda deadline: deadline <= now, "the deadline has passed")
        for message, _ in errands.waiting.values():
            self._wire.send(errands.link, message)
        if errands.waiting:
            self._wire.probe(*errands.door, lambda outcome: self._probed(errands, outcome))
        else:
            self._forget(errands)

    def _probed(self, errands: _Errands, outcome: Probe) -> None:
        if outcome == "refused" and errands.waiting:
            self._give_up(errands, lambda _: True, "nobody listens there any more")
            self._forget(errands)

    def _give_up(self, errands: _Errands, is_over: Callable[[float], bool], why: str) -> None:
        for errand, (message, deadline) in list(errands.waiting.items()):
            if is_over(deadline):
                del errands.waiting[errand]
                self._counters.add("releases_given_up")
                logger.warning("release of transfer %s at %s:%d given up: %s", message.transfer_id, *errands.door, why)

    def _forget(self, errands: _Errands) -> None:
        if errands.timer is not None:
            errands.timer.cancel()
        self._doors.pop(errands.door, None)
        self._by_link.pop(errands.link, None)
        self._wire.hang_up(errands.link)
