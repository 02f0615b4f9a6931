"""What consumers tell the doors of remote offers: that they still wait, and, until it is answered, that they are done.

In:  holds and releases that the engine wants said; answers; the time.
Out: messages on the wire.
Law: a hold is renewed until its release. Every release ends: answered, given up because nobody listens at that door any
     more (its offers are gone with it), or given up at its deadline (the lease ends the offer). A door is called by one
     link, however much is to be said there.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_core.errors import CallerError
from kv_transfer.config import TransferConfig
from kv_transfer.protocol import codec
from kv_transfer.protocol.messages import Release, ReleaseReply, Renew
from kv_transfer.status import Counters
from kv_transfer.timers import Timer, Timers
from kv_transfer.wire import Link, Probe, UnusableAddress, Wire

logger = logging.getLogger(__name__)

Door = tuple[str, int]
Errand = tuple[str, bytes | None, str]
"""Transfer id, prompt key and consumer of a hold or a release."""


@dataclass(slots=True)
class _Errands:
    """What waits for one remote door, and what is held there."""

    door: Door
    link: Link
    held: dict[Errand, Renew] = field(default_factory=dict)
    renewal: Timer | None = None
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

    @property
    def num_holds(self) -> int:
        """Remote offers that are kept from ending."""
        return sum(len(errands.held) for errands in list(self._doors.values()))

    def hold(self, door: Door, message: Renew) -> None:
        """Say this now and then, until the same consumer's release; nothing happens if that is under way."""
        errands = self._reached(door, message)
        if errands is None or _errand(message) in errands.waiting:
            return
        errands.held[_errand(message)] = message
        self._wire.send(errands.link, message)
        if errands.renewal is None:
            self._renew_later(errands)

    def release(self, door: Door, message: Release) -> None:
        """Say this until it is answered."""
        errands = self._reached(door, message)
        if errands is None:
            self._counters.add("releases_given_up")
            return
        errands.held.pop(_errand(message), None)
        deadline = self._timers.clock() + self._config.release_deadline_s
        errands.waiting[_errand(message)] = (message, deadline)
        self._wire.send(errands.link, message)
        errands.pause_s = self._config.nudge_s
        self._wait(errands)

    def answered(self, link: Link, reply: ReleaseReply) -> None:
        """A door has heard us."""
        errands = self._by_link.get(link)
        if errands is None or not errands.waiting.pop(_errand(reply), None):
            return
        self._counters.add("releases_answered")
        if not reply.known:
            logger.info("the peer does not know transfer %s any more", reply.transfer_id)
        if not errands.waiting:
            self._wait(errands)

    def _reached(self, door: Door, message: Renew | Release) -> _Errands | None:
        """Where to say this; None, with a line in the log, if it cannot be said."""
        try:
            codec.encode(message)
            return self._errands_at(door)
        except (CallerError, UnusableAddress) as error:
            logger.warning("cannot hold or release transfer %s: %s", message.transfer_id, error)
            return None

    def _renew_later(self, errands: _Errands) -> None:
        errands.renewal = self._timers.after(self._config.renew_s, lambda: self._renew(errands))

    def _renew(self, errands: _Errands) -> None:
        errands.renewal = None
        if not errands.held:
            return
        self._renew_later(errands)
        for message in errands.held.values():
            self._wire.send(errands.link, message)

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
        if outcome == "refused" and (errands.waiting or errands.held):
            self._give_up(errands, lambda _: True, "nobody listens there any more")
            errands.held.clear()
            self._forget(errands)

    def _give_up(self, errands: _Errands, is_over: Callable[[float], bool], why: str) -> None:
        for errand, (message, deadline) in list(errands.waiting.items()):
            if is_over(deadline):
                del errands.waiting[errand]
                self._counters.add("releases_given_up")
                logger.warning("release of transfer %s at %s:%d given up: %s", message.transfer_id, *errands.door, why)

    def _forget(self, errands: _Errands) -> None:
        """Hang up, unless something is held there."""
        if errands.held:
            return
        for timer in (errands.timer, errands.renewal):
            if timer is not None:
                timer.cancel()
        self._doors.pop(errands.door, None)
        self._by_link.pop(errands.link, None)
        self._wire.hang_up(errands.link)


def _errand(message: Renew | Release | ReleaseReply) -> Errand:
    return message.transfer_id, message.prompt_key, message.consumer
