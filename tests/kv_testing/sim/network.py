"""Both planes between processes: messages that are late, lost, doubled or garbled, and writes that land late.

In:  what the session layer sends and writes.
Out: SimWire and SimAgent, a `Wire` and an `Agent` of one process; Network, which joins them.
Law: bytes land only in a region that its owner has leased to the very chunk that they belong to, or keeps in quarantine
     for it; each chunk once; from staging that is still leased. Bytes of a writer that died, or whose write failed, may
     land for a little less than `LATE_BYTES_GRACE_S` of its reader's running.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any

from kv_core.ids import SessionId
from kv_testing.messages import mutated
from kv_testing.sim.clockwork import Clockwork, Process, check, is_same_message
from kv_transfer.agent.base import LATE_BYTES_GRACE_S, AgentClosed, Completion, Pair, Ticket, UnknownPeer
from kv_transfer.agent.cards import AgentCard
from kv_transfer.protocol import codec
from kv_transfer.protocol.messages import Grant, Message
from kv_transfer.pulse import Pulse
from kv_transfer.regions import Region
from kv_transfer.staging import Arena, LeaseState, StagingLease
from kv_transfer.wire import Link, Probe, Route

KIND = "simulated"
ChunkName = tuple[SessionId, int]


class SimMemory:
    """Bytes that a Region may stand on, without torch."""

    def __init__(self, num_bytes: int) -> None:
        self._view = memoryview(bytearray(num_bytes))

    def narrow(self, _: int, offset: int, num_bytes: int) -> memoryview:
        return self._view[offset : offset + num_bytes]


@dataclass
class Network:
    """Who listens where, who calls whom, and whose memory is whose."""

    clockwork: Clockwork
    listeners: dict[tuple[str, int], Process] = field(default_factory=dict)
    callers: dict[bytes, tuple["SimWire", Link]] = field(default_factory=dict)
    agents: dict[str, "SimAgent"] = field(default_factory=dict)
    granted: dict[ChunkName, StagingLease] = field(default_factory=dict)
    landed: set[ChunkName] = field(default_factory=set)
    num_landed_late: int = 0
    mappable: dict[bytes, tuple[Process, Any]] = field(default_factory=dict)
    """Blocks of every rank of every run, by the name of its direct path."""
    books: dict[bytes, memoryview] = field(default_factory=dict)
    num_mapped: int = 0
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def next_number(self) -> int:
        return next(self._numbers)

    def region(self, num_bytes: int) -> Region:
        """Memory at an address of its own."""
        return Region(self.next_number() << 32, num_bytes, "host", 0, SimMemory(num_bytes))  # type: ignore[arg-type]

    def carry(self, message: Message, arrive: Callable[[bytes], None]) -> None:
        """Bring a message over, or not, or twice."""
        clockwork, weather, dice = self.clockwork, self.clockwork.weather, self.clockwork.dice
        packet = codec.encode(message)
        for _ in range(2 if clockwork.hits(weather.double) else 1):
            if clockwork.hits(weather.drop):
                continue
            sent = packet
            if clockwork.hits(weather.corrupt):
                sent = mutated(packet, dice)
                if is_same_message(sent, message) is False:
                    continue  # TCP has checksums: garbage is seen, but never another well-formed message
            delay_s = 0.001 + 0.003 * dice.random()
            if clockwork.hits(weather.delay):
                delay_s += weather.delay_s * dice.random()
            clockwork.after(delay_s, partial(arrive, sent))


class SimWire:
    """The control plane of one process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._names: dict[Link, tuple[bytes, tuple[str, int]]] = {}
        self._num_links = 0
        self.receive_lease: Callable[[Grant], StagingLease] | None = None

    @property
    def num_links(self) -> int:
        return len(self._names)

    def reply(self, route: Route, message: Message) -> None:
        self._network.carry(message, lambda packet: self._arrive(route, packet))

    def call(self, host: str, port: int) -> Link:
        self._num_links += 1
        link, name = Link(self._num_links), b"k%d" % self._network.next_number()
        self._names[link] = name, (host, port)
        self._network.callers[name] = self, link
        return link

    def send(self, link: Link, message: Message) -> None:
        if link not in self._names:
            return
        if isinstance(message, Grant) and self.receive_lease is not None:
            self._network.granted[message.session, message.seq] = self.receive_lease(message)
        name, address = self._names[link]

        def arrive(packet: bytes) -> None:
            listener = self._network.listeners.get(address)
            if listener is not None:
                listener.deliver(Route(name), packet)

        self._network.carry(message, arrive)

    def hang_up(self, link: Link) -> None:
        if link in self._names:
            del self._network.callers[self._names.pop(link)[0]]

    def probe(self, host: str, port: int, then: Callable[[Probe], None]) -> None:
        clockwork = self._network.clockwork

        def look() -> None:
            outcome: Probe = "open" if (host, port) in self._network.listeners else "refused"
            clockwork.after(0.01 * clockwork.dice.random(), lambda: self._process.do(lambda: then(outcome)))

        clockwork.after(0.01 * clockwork.dice.random(), look)

    def _arrive(self, route: Route, packet: bytes) -> None:
        wire, link = self._network.callers.get(route, (None, Link(0)))
        if wire is not None:
            wire._process.deliver(link, packet)


@dataclass(eq=False)
class _Write:
    """One write on its way."""

    ticket: Ticket
    name: ChunkName
    pair: Pair
    source: StagingLease
    target: "SimAgent"
    is_posted: bool = False
    is_over: bool = False
    not_before: float = 0.0
    """When it may land, if its agent's thread has failed: nobody hears of it."""


class SimAgent:
    """The data plane of one process."""

    kind = KIND
    memory_host = "one for all"

    def __init__(self, network: Network, process: Process, name: str) -> None:
        self.name = name
        self.process = process
        self.pulse = Pulse("agent's thread")
        self.fails_from = float("inf")
        """Its thread ends in the first post from then on."""
        self.ill: Random | None = None
        self.send_arena: Arena | None = None
        self.writing: ChunkName | None = None
        self._network = network
        self._regions: dict[int, Region] = {}
        self._peers: dict[str, AgentCard] = {}
        self._writes: dict[Ticket, _Write] = {}
        self._ended: list[Completion] = []
        self._num_tickets = 0
        network.agents[name] = self
        process.on_death.append(self._die)

    def plan_failure(self, at: float, dice: Random) -> None:
        """Its thread ends then, at rest or in its next post."""
        self.ill = dice
        if dice.random() < 0.5:
            self.fails_from = at
        else:
            self._network.clockwork.after(at, lambda: self.fail(dice))

    def fail(self, dice: Random) -> None:
        """Its thread ends. What is posted moves on without it, what is not never will."""
        if not self.process.is_alive or self.pulse.failure:
            return
        for write in list(self._writes.values()):
            if write.is_posted:
                write.not_before = self._network.clockwork.now + 6.0 * dice.random()
            else:
                self._end(write, "its thread failed")
        self.pulse.ends("planted")

    def _check_open(self) -> None:
        if self.pulse.failure:
            raise AgentClosed(f"its thread failed: {self.pulse.failure}")

    def register(self, region: Region) -> None:
        self._regions[region.address >> 32] = region

    def card(self) -> AgentCard:
        return AgentCard(kind=KIND, name=self.name, blob=b"")

    def add_peer(self, card: AgentCard) -> None:
        self._check_open()
        self._peers[card.name] = card

    def remove_peer(self, name: str) -> None:
        self._check_open()
        if self._peers.pop(name, None) is not None:
            for write in [each for each in self._writes.values() if each.target.name == name]:
                self._end(write, "peer removed")

    def write(self, peer: str, pairs: Sequence[Pair]) -> Ticket:
        self._check_open()
        if peer not in self._peers:
            raise UnknownPeer(f"no such peer: wanted={peer!r}, known={sorted(self._peers)}")
        ours, _ = pairs[0]
        assert self.writing is not None
        assert self.send_arena is not None
        self._num_tickets += 1
        ticket = Ticket(self._num_tickets, peer, ours.num_bytes)
        source = next(lease for lease in self.send_arena._entries if lease.slice is ours)
        write = _Write(ticket, self.writing, pairs[0], source, self._network.agents[peer])
        self._writes[ticket] = write
        clockwork = self._network.clockwork
        clockwork.after(0.002 * clockwork.dice.random(), lambda: self._post(write))
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        write = self._writes.get(ticket)
        if write is None or write.is_posted:
            return False
        write.is_over = True
        del self._writes[ticket]
        return True

    def completions(self) -> list[Completion]:
        taken, self._ended = self._ended, []
        return taken

    def _post(self, write: _Write) -> None:
        clockwork = self._network.clockwork
        write.is_posted = True
        if self.fails_from <= clockwork.now < clockwork.weather.calm_at:
            assert self.ill is not None
            self.fail(self.ill)
        delay_s = 0.002 * clockwork.dice.random()
        if clockwork.hits(clockwork.weather.write_late):
            delay_s += clockwork.weather.write_late_s * clockwork.dice.random()
        clockwork.after(delay_s, lambda: self._try_to_land(write))

    def _try_to_land(self, write: _Write) -> None:
        """Both sides must be running; a dead target is an error."""
        clockwork = self._network.clockwork
        if write.is_over or not self.process.is_alive:
            return
        if clockwork.now < write.not_before:
            clockwork.after(write.not_before - clockwork.now, lambda: self._try_to_land(write))
            return
        for process in (self.process, write.target.process):
            if process.is_alive and process.is_stopped:
                process.on_resume.append(lambda: self._try_to_land(write))
                return
        if not write.target.process.is_alive:
            self._end(write, "the peer is gone")
        elif clockwork.hits(clockwork.weather.write_fail):
            self._land_later(write)
            self._end(write, "the wire broke")
        else:
            check(write.source.state is LeaseState.HELD, "staging was given back under a write:", write.name)
            self._land(write, bytes(write.pair[0].tensor))  # type: ignore[call-overload]
            self._end(write, "")

    def _land_later(self, write: _Write) -> None:
        """Perhaps the bytes are in the target's sockets already; what is not yet there never will be."""
        clockwork, target = self._network.clockwork, write.target.process
        if clockwork.dice.random() < 0.5 or not target.is_alive:
            return
        content = bytes(write.pair[0].tensor)  # type: ignore[call-overload]

        def land() -> None:
            if target.is_alive and target.is_stopped:
                # All at once when it goes on: measured, see LATE_BYTES_GRACE_S.
                wait_s = 0.1 * clockwork.dice.random()
                target.on_resume.append(lambda: clockwork.after(wait_s, land))
            elif target.is_alive:
                self._network.num_landed_late += 1
                self._land(write, content)

        clockwork.after(0.8 * LATE_BYTES_GRACE_S * clockwork.dice.random(), land)

    def _land(self, write: _Write, content: bytes) -> None:
        network, theirs = self._network, write.pair[1]
        lease = network.granted[write.name]
        check(lease.slice.address == theirs.address, "a chunk lands where it was not granted:", write.name)
        check(lease.state is not LeaseState.FREE, "memory was given back under a possible writer:", write.name)
        check(write.name not in network.landed, "a chunk is written twice:", write.name)
        network.landed.add(write.name)
        if network.clockwork.hits(network.clockwork.weather.write_corrupt):
            content = bytes([content[0] ^ 0x10]) + content[1:]
        region = write.target._regions[theirs.address >> 32]
        region.slice(theirs.address - region.address, theirs.num_bytes).tensor[:] = content  # type: ignore[assignment]

    def _end(self, write: _Write, failure: str) -> None:
        """A physical end; a removed peer's posts are given up as if it were dead."""
        write.is_over = True
        self._writes.pop(write.ticket, None)
        if self.pulse.failure:
            return
        self._ended.append(Completion(write.ticket, "error" if failure else "done", failure))
        self._network.clockwork.after(0.0005, lambda: self.process.do(lambda: None))

    def _die(self) -> None:
        """Bytes that have left may still land."""
        for write in self._writes.values():
            if write.is_posted and not write.is_over:
                self._land_later(write)
        self._network.listeners.pop(self.process.address, None)
