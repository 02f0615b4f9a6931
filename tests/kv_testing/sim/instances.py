"""Instances of several ranks: production Core and door, over simulated surroundings and tagged blocks.

In:  a shape; offers, orders, aborts, deaths.
Out: Instance, one run after the other at the same addresses; SimRank, one rank of one run.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from kv_core.ids import Incarnation, InstanceId, Rank, RequestId, SessionId, TransferId
from kv_testing.sim.blocks import SimCopier, SimCopies, SimDirect
from kv_testing.sim.clockwork import Process
from kv_testing.sim.network import Network, SimAgent, SimWire
from kv_testing.sim.places import places_of
from kv_transfer.config import TransferConfig
from kv_transfer.core import Core
from kv_transfer.health import Health
from kv_transfer.history import History
from kv_transfer.instance import _Porter
from kv_transfer.orders import Offer, Received, ReceiveOrder, Settled
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.plan import Chunk
from kv_transfer.protocol.messages import InstanceCard, Message, RankCard
from kv_transfer.room import Identity, Room
from kv_transfer.staging import Arena


class SimFaults:
    """Holds writes back, and tells the agent whose chunk is written next."""

    def __init__(self, process: Process, agent: SimAgent) -> None:
        self._clockwork = process.clockwork
        self._agent = agent

    def after_verify(self, session: SessionId, chunk: Chunk, received: object) -> None:
        """Not asked: our copier has bytes of its own."""

    def before_write(self, session: SessionId, seq: int) -> bool:
        self._agent.writing = session, seq
        return self._clockwork.hits(self._clockwork.weather.hold)

    def outgoing(self, message: Message) -> Sequence[float]:
        return (0.0,)


@dataclass(eq=False)
class SimRank:
    """One rank of one run."""

    process: Process
    core: Core
    copier: SimCopier
    card: RankCard
    arenas: tuple[Arena, Arena]
    agent: SimAgent


class Instance:
    """One engine: a door and its ranks, and what it is told."""

    def __init__(
        self, network: Network, name: str, state: CacheState, config: TransferConfig, *, is_mappable: bool
    ) -> None:
        self.network = network
        self.name = name
        self.state = state
        self.places = places_of(state)
        self.config = config
        self.is_mappable = is_mappable
        self.on_sent: Callable[[Instance, int, RequestId], None] = lambda *_: None
        self.on_received: Callable[[Instance, int, Received], None] = lambda *_: None
        self.on_arrived: Callable[[Instance, int, RequestId, int], None] = lambda *_: None
        self.on_settled: Callable[[Instance, Settled], None] = lambda *_: None
        self.num_runs = 0
        self.start()

    @property
    def processes(self) -> list[Process]:
        return [self.door, *(rank.process for rank in self.ranks)]

    @property
    def is_whole(self) -> bool:
        return all(process.is_alive for process in self.processes)

    @property
    def address(self) -> tuple[str, int]:
        return self.door.address

    def start(self) -> None:
        """A new run at the same addresses."""
        self.num_runs += 1
        self.incarnation = Incarnation(f"{self.name}-{self.num_runs}")
        self.settled: deque[Settled] = deque()
        self.unsettled: set[RequestId] = set()
        self.door = self._process(0)
        self.porter = _Porter(
            self.config,
            InstanceId(self.name),
            self.incarnation,
            SimpleNamespace(wire=self.door.wire, timers=self.door.timers, counters=self.door.counters),  # type: ignore[arg-type]
            self.settled,
        )
        self.door.resident = self.porter
        self.ranks = [self._rank(rank) for rank in self.state.parallel.ranks]
        cards = tuple(rank.card for rank in self.ranks)
        self.porter.set_card(InstanceCard(instance=InstanceId(self.name), incarnation=self.incarnation, ranks=cards))

    def offer(self, offer_at: Callable[[Rank], Offer], transfer: int) -> None:
        """Blocks are filled; door and ranks learn of it one after the other."""
        clockwork, offer = self.network.clockwork, offer_at(Rank(0))
        self.open(offer.transfer_id, offer.request_id, offer.prompt_key)
        for rank in self.ranks:
            offered = offer_at(rank.card.rank)
            rank.copier.fill(offered.tables, transfer)
            hand_in = lambda rank=rank, it=offered: rank.process.do(lambda: rank.core.sender.offer(it, None))  # noqa: E731
            clockwork.after(0.01 * clockwork.dice.random(), hand_in)

    def open(self, transfer_id: TransferId, request_id: RequestId, prompt_key: bytes) -> None:
        """The door learns of an offer."""
        door, porter, ends = self.door, self.porter, self._ends()
        door.do(lambda: porter.open(transfer_id, request_id, prompt_key, *ends))
        self.unsettled.add(request_id)
        if len(self.unsettled) == 1:
            self._collect(door)

    def restart_lease(self, request_id: RequestId) -> None:
        """The door learns that its prompt is computed; in the door's process."""
        self.porter.restart(request_id, *self._ends())

    def _ends(self) -> tuple[float, float]:
        now = self.network.clockwork.now
        return now + self.config.lease_s, now + 3 * self.config.lease_s

    def order(self, number: int, order: ReceiveOrder, began: Callable[[], None]) -> None:
        """One rank begins to fetch its part, once it runs."""
        rank = self.ranks[number]
        rank.copier.writable.add(order.tables)

        def begin() -> None:
            began()
            rank.core.loads.order(order, None)

        rank.process.do(begin)

    def _collect(self, door: Process) -> None:
        """Pass on settlements, as an engine does at every step."""
        if not door.is_alive or door is not self.door:
            return
        while self.settled:
            settled = self.settled.popleft()
            self.unsettled.discard(settled.request_id)
            self.on_settled(self, settled)
        if self.unsettled:
            self.network.clockwork.after(0.1, lambda: self._collect(door))

    def pass_on(self, settled: Settled) -> None:
        for rank in self.ranks:
            rank.process.do(
                lambda rank=rank: rank.core.sender.settle(settled.transfer_id, settled.request_id, settled.reason)  # type: ignore[misc]
            )

    def _process(self, number: int) -> Process:
        made = Process(self.network.clockwork, (self.name, 1000 + number))
        made.wire = SimWire(self.network, made)
        self.network.listeners[made.address] = made
        return made

    def _rank(self, number: Rank) -> SimRank:
        process, network, config = self._process(1 + number), self.network, self.config
        agent = SimAgent(network, process, f"{self.incarnation}/{number}")
        send, receive = (Arena(network.region(size)) for size in (config.send_arena_bytes, config.receive_arena_bytes))
        agent.send_arena = send
        agent.register(send.region)
        agent.register(receive.region)
        host, port = process.address
        card = RankCard(rank=number, host=host, port=port, state=self.state, max_chunk_bytes=config.chunk_bytes)
        copier, name = SimCopier(self.places[number]), f"{self.incarnation}/{number}".encode()
        network.mappable[name] = process, copier
        room = Room(
            config=config,
            identity=Identity(InstanceId(self.name), self.incarnation, card, agent.card()),
            wire=process.wire,
            timers=process.timers,
            counters=process.counters,
            faults=SimFaults(process, agent),
            agent=agent,  # type: ignore[arg-type]
            copies=SimCopies(process),  # type: ignore[arg-type]
            health=Health(process.timers, [agent.pulse], config.stall_s),
            history=History(process.timers.clock),
            direct=SimDirect.of(network, name) if self.is_mappable else None,  # type: ignore[arg-type]
            new_session=lambda: SessionId(f"{network.next_number():032x}"),
        )
        sent = lambda request_id: self.on_sent(self, number, request_id)  # noqa: E731
        received = lambda outcome: self.on_received(self, number, outcome)  # noqa: E731
        arrived = lambda request_id, stop: self.on_arrived(self, number, request_id, stop)  # noqa: E731
        core = Core(room, send, receive, copier, sent, received, arrived)  # type: ignore[arg-type]
        # Why: nobody reads the published status here, and measuring it is a quarter of a schedule's time.
        core._publish_at = float("inf")
        sessions = core.loads.receiver._sessions
        process.wire.receive_lease = lambda grant: sessions[grant.session].granted[grant.seq]  # type: ignore[attr-defined]
        process.resident = core  # type: ignore[assignment]
        return SimRank(process, core, copier, card, (send, receive), agent)
