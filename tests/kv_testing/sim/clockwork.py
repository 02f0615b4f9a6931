"""Time, processes and what may happen to them.

In:  callbacks at times to come.
Out: Clockwork, which runs them in order; Process, which lives, stops, goes on and dies.
Law: of one thread, and a function of the dice alone. A stopped process runs nothing; what came for it meanwhile runs
     when it goes on, in order. A dead one never runs again. An error that no message explains is a Violation.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from kv_testing.sim.weather import Weather
from kv_transfer.protocol import codec
from kv_transfer.protocol.errors import MalformedMessage, ProtocolError, UnexpectedMessage
from kv_transfer.protocol.messages import Message, RejectCode, Rejected, clipped
from kv_transfer.reactor import Resident
from kv_transfer.status import Counters
from kv_transfer.timers import Timers
from kv_transfer.wire import Link, Route, Wire

Run = Callable[[], None]

NEXT_S = 1e-6
"""The least step to a timer that is due: it must not come before its time by a rounding error."""
CALM_COPY_S = 0.02


class Violation(AssertionError):
    """A law of the session layer is broken."""


class Clockwork:
    """The one clock, and all that is to come."""

    def __init__(self, dice: Random, weather: Weather) -> None:
        self.now = 0.0
        self.dice = dice
        self.weather = weather
        self.num_events = 0
        self._heap: list[tuple[float, int, Run]] = []
        self._order = count()

    def after(self, delay_s: float, run: Run) -> None:
        """Run this later."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), run))

    def run_until(self, end: float) -> None:
        """Run all that is due by then."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, run = heapq.heappop(heap)
            self.num_events += 1
            run()
        self.now = end

    @property
    def copy_s(self) -> float:
        """How long a copy takes at most now: slow ones, too, are weather. Dozens in a row would outlast a deadline."""
        return self.weather.copy_s if self.now < self.weather.calm_at else min(self.weather.copy_s, CALM_COPY_S)

    def hits(self, chance: float) -> bool:
        """Whether something of this chance goes wrong now."""
        return chance > 0.0 and self.now < self.weather.calm_at and self.dice.random() < chance


@dataclass(eq=False)
class Process:
    """What runs in one thread of one process, and its address."""

    clockwork: Clockwork
    address: tuple[str, int]
    timers: Timers = field(init=False)
    counters: Counters = field(default_factory=Counters)
    wire: Wire = field(init=False)
    resident: Resident = field(init=False)
    is_alive: bool = True
    is_stopped: bool = False
    resumed_at: float = 0.0
    on_resume: list[Run] = field(default_factory=list)
    on_death: list[Run] = field(default_factory=list)
    _wakes_at: float = float("inf")

    def __post_init__(self) -> None:
        clockwork = self.clockwork
        self.timers = Timers(lambda: clockwork.now)

    def do(self, run: Run) -> None:
        """Run this in the thread, now or when it goes on; then its timers and its turn."""
        if not self.is_alive:
            return
        if self.is_stopped:
            self.on_resume.append(partial(self.do, run))
            return
        run()
        self._turn()

    def deliver(self, source: Route | Link, packet: bytes, *, limit: int = codec.MAX_MESSAGE_BYTES) -> None:
        """A packet is here; as `Reactor` would have it."""
        self.do(partial(self._take, source, packet, limit))

    def stop(self) -> None:
        self.is_stopped = True

    def resume(self) -> None:
        """Go on, with all that came meanwhile."""
        self.is_stopped, self.resumed_at = False, self.clockwork.now
        waiting, self.on_resume = self.on_resume, []
        for run in waiting:
            run()
        self.do(_nothing)

    def die(self) -> None:
        if self.is_alive:
            self.is_alive = False
            for run in self.on_death:
                run()
            self.on_resume.clear()

    def _take(self, source: Route | Link, packet: bytes, limit: int) -> None:
        is_link = isinstance(source, int)
        try:
            message = codec.decode(packet, limit)
            if is_link:
                self.resident.from_link(Link(source), message)  # type: ignore[arg-type]
            else:
                self.resident.from_door(Route(source), message)  # type: ignore[arg-type]
        except ProtocolError as error:
            self.counters.add("bad_messages")
            if is_link:
                self.resident.bad_link(Link(source), error)  # type: ignore[arg-type]
            else:
                code = RejectCode.UNEXPECTED if isinstance(error, UnexpectedMessage) else RejectCode.MALFORMED
                self.wire.reply(Route(source), Rejected(code=code, detail=clipped(str(error))))  # type: ignore[arg-type]

    def _turn(self) -> None:
        self.timers.run_due()
        self.resident.turn()
        delay = self.timers.next_delay()
        if delay is None:
            return
        now = self.clockwork.now
        at = now + max(delay, NEXT_S)
        if at < self._wakes_at or self._wakes_at <= now:
            self._wakes_at = at
            self.clockwork.after(at - now, partial(self._wake, at))

    def _wake(self, at: float) -> None:
        if at == self._wakes_at:
            self._wakes_at = float("inf")
            self.do(_nothing)


def _nothing() -> None:
    """A turn is all that is wanted."""


def is_same_message(packet: bytes, wanted: Message) -> bool | None:
    """Whether a changed packet still says the same; None if it says nothing at all."""
    try:
        return codec.decode(packet) == wanted
    except MalformedMessage:
        return None
    except ProtocolError:
        return False


def check(law: bool, *words: object) -> None:
    """Raise Violation unless the law is kept."""
    if not law:
        raise Violation(" ".join(map(str, words)))


def check_none(found: Sequence[object], *words: object) -> None:
    """Raise Violation if anything is found."""
    check(not found, *words, *found)
