"""Two prefill and three decode engines, each in a process of its own, and the laws about them.

In:  requests between any two; traps, weather, signals.
Out: the outcome of each request; the proof that nothing is left.
Law, checked by `check_ended` and `check_at_rest` whatever was done:
     every request has one outcome, agreed by all ranks of its decode engine, within its deadline;
     what is said to be loaded is right to the last bit, and no other block is written;
     once every process runs or is dead, nothing is open, staging is whole, no thread and no file handle is left over;
     the next request works.
"""

import contextlib
import itertools
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import SystemRandom
from typing import Any, Self

from kv_core.ids import TransferId
from kv_core.spans import Span
from kv_testing.child import Child, Held
from kv_testing.fleet.engine import Ended, EngineSpec, Whereabouts, run_engine
from kv_testing.fleet.traps import Trap
from kv_testing.waiting import wait_for
from kv_testing.worlds import ALL, FAST, state_of
from kv_transfer.config import TransferConfig
from kv_transfer.plan.cache_state import CacheState

PATIENT_S, HASTY_S, SLACK_S = 60.0, 2.0, 30.0
"""Deadlines of loads; and how much later than that a busy machine may report."""
IDLE_S = 0.5
"""How long engines remember each other without a need; while they do, they hold connections."""
REST_S = 100.0
"""Far more than anything needs to end once everybody runs."""
FIXED_PORTS = (12_000, 32_000)
SPARE_HANDLES = 2
"""A fresh process that met peers while they went holds a socket more or less than its predecessor; it stays so."""
WAIT_S = 100.0
"""For what takes a moment, except on a machine that is busy with others."""

CONFIG = replace(
    FAST,
    request_deadline_s=PATIENT_S,
    lease_s=3.0,
    renew_s=0.5,
    tombstone_s=20.0,
    peer_idle_s=IDLE_S,
    send_arena_bytes=16 * 4096,
    receive_arena_bytes=16 * 4096,
)
"""Arenas have room for 16 chunks: less than what a few requests move at once."""

PREFILLS: dict[str, CacheState] = {"p0": state_of(2), "p1": state_of(1, (2, 2))}
DECODES: dict[str, CacheState] = {
    "d0": state_of(1),
    "d1": state_of(2, tokens_per_block=8),
    "d2": state_of(1, (1, 3), order="token_major"),
}
HASTY = "d2"
"""The decode engine that waits for HASTY_S only: for peers that are stopped longer than that."""


class LawBroken(AssertionError):
    """One of the laws above does not hold."""


def require(law: bool, *words: object) -> None:
    """Raises LawBroken unless the law is kept."""
    if not law:
        raise LawBroken(" ".join(map(str, words)))


@dataclass
class Request:
    """One prompt that a prefill engine has and a decode engine wants."""

    name: str
    prefill: str
    decode: str
    transfer_id: TransferId
    allowed_s: float
    ended: Ended | None = None


@dataclass
class Seat:
    """One engine: how it is made, its present process, what it held when nothing was wrong."""

    spec: EngineSpec
    child: Child
    where: Whereabouts | None = None
    at_rest: Held | None = None


@dataclass
class Fleet:
    """The engines, and every request that is not over. Its methods raise LawBroken."""

    tls: str | None
    seats: dict[str, Seat] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._numbers = itertools.count()
        self._start()
        return self

    def _start(self) -> None:
        for number, (name, state) in enumerate((PREFILLS | DECODES).items()):
            ports = fixed_ports(1 + state.parallel.num_ranks)
            spec = EngineSpec(name, state, config_of(name), self.tls, number, ports)
            self.seats[name] = Seat(spec, Child(run_engine, spec))

    def __exit__(self, *_: object) -> None:
        for seat in self.seats.values():
            seat.child.__exit__()

    def renew(self) -> None:
        """All engines made anew, whatever state they are in; then at rest."""
        self.__exit__()
        self.requests.clear()
        self._start()
        self.hand_over_all()
        self.note_held()

    # -- engines -----------------------------------------------------------------------------------------------------

    def where(self, name: str) -> Whereabouts:
        """Where the engine is found; waits for it to be up."""
        seat = self.seats[name]
        if seat.where is None:
            seat.where = seat.child.first_word()
        return seat.where

    def ask(self, name: str, order: str, *arguments: Any) -> Any:
        """What the engine answers (`Engine.obey`)."""
        self.where(name)
        return self.seats[name].child.ask(order, *arguments)

    def restart(self, name: str) -> None:
        """Kill -9, and another run at the same ports; its requests are nobody's any more."""
        seat = self.seats[name]
        seat.child.__exit__()
        seat.spec = replace(seat.spec, seed=seat.spec.seed + 100)
        seat.child, seat.where = Child(run_engine, seat.spec), None
        self.requests = {key: each for key, each in self.requests.items() if each.decode != name}

    def wait_sprung(self, name: str, trap: Trap, timeout_s: float = WAIT_S) -> None:
        """The step must have been taken, or the test has tested nothing."""
        child = self.seats[name].child

        def has_sprung() -> bool:
            match trap.action:
                case "kill" | "close":
                    return not child.is_alive
                case "stop":
                    return child.is_stopped
                case _:
                    return bool(self.ask(name, "audit").happened.get("sprung"))

        wait_for(has_sprung, timeout_s, f"{name} to reach {trap}")

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(self, prefill: str, decode: str, tokens: Span = ALL, *, allowed_s: float = 0.0) -> Request:
        """A request on its way, once both engines have a slot for it."""
        made = self._offered(prefill, decode, allowed_s)
        order = (made.name, self.where(prefill), made.transfer_id, tokens)
        wait_for(lambda: self.ask(decode, "order", *order), WAIT_S, f"a free slot of {decode}")
        return made

    def request_in_danger(self, prefill: str, decode: str, *, allowed_s: float = 0.0) -> Request:
        """The same, of a decode engine that has slots and may stop or die before it answers.

        `allowed_s`: how long it may be stopped beyond its deadline.
        """
        made = self._offered(prefill, decode, allowed_s)
        self.where(decode)
        self.seats[decode].child.tell("order", made.name, self.where(prefill), made.transfer_id, ALL)
        return made

    def collect(self, names: Iterable[str] = tuple(DECODES)) -> None:
        """Take what has ended there, and judge it."""
        for name in names:
            for ended in self.ask(name, "ended"):
                request = self.requests.pop(ended.request_id, None)
                if request is None:
                    raise LawBroken(f"an outcome of no request, or a second one: {ended}")
                request.ended = ended
                check_ended(request, ended)

    def outcome(self, request: Request) -> Ended:
        """How the request ended, at the latest when it has to."""
        end = time.monotonic() + request.allowed_s + SLACK_S
        while request.ended is None:
            require(time.monotonic() < end, "no outcome:", request)
            self.collect([request.decode])
        return request.ended

    def hand_over(self, prefill: str, decode: str) -> Ended:
        """One request that nothing is in the way of: it works."""
        ended = self.outcome(self.request(prefill, decode))
        tries = 1
        # A hasty engine may be too hasty for a busy machine.
        while not ended.ok and decode == HASTY and tries < 10:
            require("deadline" in str(ended.reasons), "a request fails that nothing is in the way of:", ended)
            ended = self.outcome(self.request(prefill, decode))
            tries += 1
        require(ended.ok, f"the next request fails, {prefill} to {decode}:", ended)
        return ended

    def hand_over_all(self) -> None:
        """One request between every two."""
        for prefill, decode in itertools.product(PREFILLS, DECODES):
            self.hand_over(prefill, decode)

    def _offered(self, prefill: str, decode: str, allowed_s: float) -> Request:
        name = f"r{next(self._numbers)}"
        transfer = wait_for(lambda: self.ask(prefill, "offer", name), WAIT_S, f"a free slot of {prefill}")
        allowed_s += self.seats[decode].spec.config.request_deadline_s + SLACK_S
        made = self.requests[name] = Request(name, prefill, decode, transfer, allowed_s)
        return made

    # -- laws --------------------------------------------------------------------------------------------------------

    def check_at_rest(self, timeout_s: float = REST_S) -> None:
        """Everybody runs: what is open ends, and nothing is left."""
        end = time.monotonic() + timeout_s
        while found := self.left_over():
            require(time.monotonic() < end, "left over:", found)
            time.sleep(0.02)

    def note_held(self) -> None:
        """Threads and handles of the engines are now what they are at rest; everybody should have met everybody."""
        self.check_at_rest()
        for seat in self.seats.values():
            seat.at_rest = seat.child.held

    def left_over(self) -> dict[str, Any]:
        """All that is not to be there at rest, by what it is and by engine; what is open ends by itself in time."""
        self.collect()
        audits = {name: self.ask(name, "audit") for name in self.seats}
        found: dict[str, dict[str, Any]] = {
            "open": {name: audit.open for name, audit in audits.items()},
            "slots in use": {name: audit.num_slots_used for name, audit in audits.items()},
            "elements written into unused blocks": {name: audit.num_dirty for name, audit in audits.items()},
            "errors of our own": {name: audit.counters.get("internal_errors", 0) for name, audit in audits.items()},
            # While engines know each other they hold connections, so this is no law but comes before the next.
            "peers not forgotten": {name: audit.num_known for name, audit in audits.items()},
            "threads or handles": {name: self._too_much(seat) for name, seat in self.seats.items()},
            "requests": self.requests,
        }
        found = {what: {name: each for name, each in by.items() if each} for what, by in found.items()}
        return {what: by for what, by in found.items() if by}

    def _too_much(self, seat: Seat) -> tuple[Held, Held] | None:
        """What it holds at rest and now, if that is more."""
        if seat.at_rest is None:
            return None
        now, then = seat.child.held, seat.at_rest
        is_more = now.num_threads > then.num_threads or now.num_handles > then.num_handles + SPARE_HANDLES
        return (then, now) if is_more else None


def fixed_ports(count: int) -> tuple[int, ...]:
    """Free ports that stay ours between two runs of an engine: the system gives callers only higher ones."""
    found: list[int] = []
    while len(found) < count:
        port = SystemRandom().randrange(*FIXED_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return tuple(found)


def config_of(name: str) -> TransferConfig:
    """The settings of this engine."""
    return replace(CONFIG, request_deadline_s=HASTY_S) if name == HASTY else CONFIG


def check_ended(request: Request, ended: Ended) -> None:
    """In time; right bytes, or a failure with its reason."""
    require(ended.seconds <= request.allowed_s, "an outcome comes late:", request, ended)
    require(not ended.num_misplaced, "wrong bytes are said to be loaded:", request, ended)
    require(ended.ok or all(ended.reasons), "a failure without a reason:", request, ended)
