"""What runs in one engine's process: a door, ranks with NIXL agents, and just enough of an engine around them.

In:  orders over a pipe (`Engine.obey`).
Out: the outcome of each decode request, as all ranks together had it; what is open, and whether all bytes are right.
Law: a request's blocks are judged when its outcome is known, and hold filler again after that: what is written later
     is seen. A request is over when every rank has said so.
"""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kv_core.ids import Incarnation, RequestId, TransferId
from kv_core.spans import Span
from kv_testing.child import serve
from kv_testing.engine_process import BUSY_MACHINE, make_nixl_side
from kv_testing.fleet.slots import NUM_SLOTS, Slots, salt_of
from kv_testing.fleet.traps import Trap, Traps, Weather
from kv_testing.worlds import NUM_TOKENS, PROMPT, fresh_id
from kv_transfer.config import TransferConfig
from kv_transfer.core import Core
from kv_transfer.orders import Errand, Offer, Received, ReceiveOrder
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.staging import StagingLease

STEP_S = 0.01
ORDERS = frozenset({"offer", "order", "ended", "audit", "trap", "weather", "hold", "fill", "empty", "leak"})
"""What a test may have an engine do: its methods of these names."""


@dataclass(frozen=True)
class EngineSpec:
    """How an engine is made, again at every restart."""

    name: str
    state: CacheState
    config: TransferConfig
    tls: str | None
    seed: int
    ports: tuple[int, ...]
    """Of the door and of each rank."""


@dataclass(frozen=True)
class Whereabouts:
    """Where an engine is found, and which run of it."""

    address: tuple[str, int]
    incarnation: Incarnation


@dataclass(frozen=True)
class Ended:
    """The one outcome of one decode request, agreed by all ranks."""

    request_id: str
    ok: bool
    reasons: tuple[str, ...]
    seconds: float
    num_misplaced: int
    """Wrong elements, if it is said to be loaded; nothing is claimed of a failed one."""


@dataclass(frozen=True)
class Audit:
    """What an engine holds and has seen."""

    open: dict[str, Any]
    num_slots_used: int
    num_dirty: int
    """Elements written into blocks of no request."""
    num_known: int
    """Peers and links to doors."""
    counters: dict[str, int]
    happened: dict[str, int]
    """Faults, by action."""


@dataclass
class _Load:
    tokens: Span
    salt: int
    where: Whereabouts
    transfer_id: TransferId
    ordered_at: float
    received: dict[int, Received] = field(default_factory=dict)


class Engine:
    """The engine of one process; of its main thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self.traps = Traps(spec.seed)
        self.side = make_nixl_side(
            spec.name,
            spec.state,
            spec.config,
            spec.tls,
            self.traps,
            door_faults=self.traps,
            num_tokens=NUM_SLOTS * NUM_TOKENS,
            ports=spec.ports,
            limits=BUSY_MACHINE,
        )
        for reactor in (self.side.door._reactor, *(rank._reactor for rank in self.side.ranks)):
            self.traps.corrupts(reactor.wire)
        self._slots = Slots(self.side.world, NUM_TOKENS)
        self._sending: dict[str, set[int]] = {}
        self._loads: dict[str, _Load] = {}
        self._ended: list[Ended] = []
        self._taken: list[tuple[Core, StagingLease]] = []
        self._leaked: list[Any] = []

    @property
    def whereabouts(self) -> Whereabouts:
        return Whereabouts(self.side.door.address, self.side.incarnation)

    def obey(self, order: str, *arguments: Any) -> Any:
        """Does what the test wants."""
        if order not in ORDERS:
            raise ValueError(f"no such order: {order}{arguments}")
        return getattr(self, order)(*arguments)

    def step(self) -> None:
        """One engine step."""
        due, self.traps.due = self.traps.due, None
        if due == "abort":
            self._abort_all()
        elif due == "close":
            self.side.close()
            raise SystemExit
        self.side.step()
        for number, request_id in self.side.sent:
            self._sent(number, request_id)
        for number, received in self.side.received:
            self._received(number, received)
        self.side.sent.clear()
        self.side.received.clear()

    def offer(self, request_id: str) -> TransferId | None:
        """Let peers read a request's blocks; None if there is no slot for it."""
        slot = self._slots.take(request_id)
        if slot is None:
            return None
        transfer = fresh_id()
        self._slots.fill(request_id, Span(0, NUM_TOKENS), salt_of(transfer))
        self._sending[request_id] = set(range(len(self.side.ranks)))
        self.side.door.open_offer(transfer, RequestId(request_id), PROMPT)
        for number, rank in enumerate(self.side.ranks):
            rank.offer(Offer(transfer, RequestId(request_id), PROMPT, slot.tables(number)))
        return transfer

    def order(self, request_id: str, where: Whereabouts, transfer_id: TransferId, tokens: Span) -> bool:
        """Fetch a request; False if there is no slot for it."""
        slot = self._slots.take(request_id)
        if slot is None:
            return False
        self._loads[request_id] = _Load(tokens, salt_of(transfer_id), where, transfer_id, time.monotonic())
        host, port = where.address
        self.side.door.hold(Errand(host, port, transfer_id, PROMPT, self._consumer(request_id), where.incarnation))
        for number, rank in enumerate(self.side.ranks):
            rank.receive(
                ReceiveOrder(
                    RequestId(request_id),
                    transfer_id,
                    PROMPT,
                    tokens,
                    slot.tables(number),
                    host,
                    port,
                    where.incarnation,
                )
            )
        return True

    def _sent(self, number: int, request_id: str) -> None:
        still = self._sending[request_id]
        still.remove(number)
        if not still:
            del self._sending[request_id]
            self._slots.give_back(request_id)

    def _received(self, number: int, received: Received) -> None:
        load = self._loads[received.request_id]
        assert number not in load.received, f"law: one outcome a rank: {received}, {load.received[number]}"
        load.received[number] = received
        if len(load.received) == len(self.side.ranks):
            self._over(received.request_id, self._loads.pop(received.request_id))

    def _over(self, request_id: str, load: _Load) -> None:
        """All ranks have said how it ended."""
        ok = all(each.ok for each in load.received.values())
        wrong = self._slots.misplaced(request_id, load.tokens, load.salt) if ok else 0
        reasons = tuple(each.reason for each in load.received.values() if not each.ok)
        self._ended.append(Ended(request_id, ok, reasons, time.monotonic() - load.ordered_at, wrong))
        self._slots.give_back(request_id)
        where = load.where
        self.side.door.release(
            Errand(*where.address, load.transfer_id, PROMPT, self._consumer(request_id), where.incarnation)
        )

    def _abort_all(self) -> None:
        """What is loaded is given up, what is offered is withdrawn."""
        for request_id in self._loads:
            self.side.abort(request_id)
        for request_id in self._sending:
            self.side.withdraw(request_id)

    def _consumer(self, request_id: str) -> str:
        return f"{self.side.incarnation}/{request_id}"

    def ended(self) -> list[Ended]:
        """What has ended since this was asked last."""
        ended, self._ended = self._ended, []
        return ended

    def trap(self, trap: Trap | None) -> None:
        """Set this trap."""
        self.traps.set(trap)

    def weather(self, weather: Weather) -> None:
        """From now on."""
        self.traps.weather = weather

    def hold(self, is_held: bool) -> None:
        """Write no chunk until told otherwise."""
        self.traps.holds_writes = is_held

    def fill(self) -> None:
        """Take all staging memory, as if it were in use for others, until `empty`."""
        self._in_reactors(self._fill)

    def empty(self) -> None:
        """Give it back."""
        self._in_reactors(self._empty)

    def audit(self) -> Audit:
        """What is held now, and was seen since the start."""
        for core in self.side.cores:
            core.sender.offers.check()
        for arena in self.side.arenas:
            arena.check()
        counters: dict[str, int] = {}
        for reactor in (self.side.door._reactor, *(rank._reactor for rank in self.side.ranks)):
            for name, count in reactor.counters.snapshot().items():
                counters[name] = counters.get(name, 0) + count
        gauges = [self.side.door.status().gauges, *(rank.status().gauges for rank in self.side.ranks)]
        num_known = sum(each.get("peers", 0) + each.get("links", 0) for each in gauges)
        slots, happened = self._slots, dict(self.traps.counts)
        return Audit(self.side.open(), slots.num_used, slots.num_dirty(), num_known, counters, happened)

    def _fill(self, core: Core) -> None:
        for arena in core._arenas:
            while lease := arena.lease(arena.granule, "nobody"):
                self._taken.append((core, lease))

    def _empty(self, core: Core) -> None:
        for owner, lease in self._taken:
            if owner is core:
                lease.release()
        self._taken = [(owner, lease) for owner, lease in self._taken if owner is not core]
        core.sender.passages.pump()
        core.loads.receiver.arrivals.pump()

    def _in_reactors(self, run: Callable[[Core], object]) -> None:
        """Have every rank's own thread do this, and wait for it."""
        for core, rank in zip(self.side.cores, self.side.ranks, strict=True):
            done = threading.Event()

            def in_reactor(core: Core = core, done: threading.Event = done) -> None:
                run(core)
                done.set()

            rank._reactor.post(in_reactor)
            done.wait(60)

    def leak(self, what: str) -> None:
        """What a defect would leave behind: for tests of the laws' own checks."""
        match what:
            case "lease":
                core = self.side.cores[0]
                self._in_reactors(lambda each: each is core and core._arenas[1].lease(1, "nobody"))
            case "thread":
                thread = threading.Thread(target=threading.Event().wait, daemon=True)
                thread.start()
                self._leaked.append(thread)
            case "handle":
                self._leaked += [socket.socket() for _ in range(3)]
            case "slot":
                self._slots.take("nobody")
            case "byte":
                self._slots.spoil()


def run_engine(pipe: Connection, spec: EngineSpec) -> None:
    """The process: an engine that steps until the pipe closes."""
    engine = Engine(spec)
    pipe.send(engine.whereabouts)
    serve(pipe, engine.obey, engine.step, STEP_S)
    engine.side.close()
