"""One rank's whole transfer layer, as its engine sees it.

In:  offers, orders and aborts of the engine's worker; the rank's caches; an agent.
Out: Progress, when polled: offers whose blocks are free again, orders that ended well or badly.
Law: no call but the constructor and `close` blocks; every order ends by its deadline in exactly one outcome, and is
     reported only when nothing of ours touches its blocks any more. That holds for threads that fail or hang as well:
     then the engine's own thread ends the orders here (docs/decisions/0005-threads-that-fail.md).

    engine's thread          reactor's thread                      others
    Transceiver  --post-->   Reactor > Resident > Core  --jobs-->  Mover (copies)
        ^                     Peers, Sender, Loads      --writes-> agent's own thread
        +------ deques ------    timers, sockets
"""

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import torch

from kv_core.errors import CallerError
from kv_core.ids import Incarnation, InstanceId, Rank, RequestId, TransferId
from kv_core.spans import ceil_div
from kv_transfer.agent.base import Agent
from kv_transfer.agent.cards import AgentCard
from kv_transfer.config import TransferConfig, default_arena_bytes, default_chunk_bytes
from kv_transfer.copies import Copier
from kv_transfer.core import Core
from kv_transfer.direct.base import DirectDoor
from kv_transfer.faults import Faults, NoFaults
from kv_transfer.gate import Gate
from kv_transfer.health import Health
from kv_transfer.history import History
from kv_transfer.in_place.caches import SharedCaches
from kv_transfer.mover import Mover
from kv_transfer.offering import Offering
from kv_transfer.orders import Arrived, BlockTables, LoadTimes, Offer, Progress, Received, ReceiveOrder, Tables
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.frontier import Ahead, Frontier
from kv_transfer.pools import PagedCaches
from kv_transfer.profiling import Ranges, ranges_for
from kv_transfer.protocol.messages import RankCard
from kv_transfer.pulse import Watcher
from kv_transfer.reactor import Reactor
from kv_transfer.regions import Region, device_region, host_region
from kv_transfer.reports import TransferReport
from kv_transfer.resident import Resident
from kv_transfer.room import Identity, Room
from kv_transfer.staging import Arena
from kv_transfer.status import Status

logger = logging.getLogger(__name__)

POLL_CLOSE_S: Final = 0.5
"""What `close` allows for the last steps, beyond the time in which it waits for peers."""

MAX_UNTOLD: Final = 4096
"""Reports that are kept for an engine that does not poll."""

DrainedT = TypeVar("DrainedT")


@dataclass(frozen=True, slots=True)
class _Ordered:
    """An order that was not reported yet: the gate of its blocks, and when the reactor should have ended it."""

    gate: Gate
    due_at: float


class Transceiver:
    """Sends and receives KV cache for one rank; owns one reactor thread, one copy thread, and the agent it is given.

    Its methods belong to one thread, the engine's.
    """

    def __init__(
        self,
        config: TransferConfig,
        instance: InstanceId,
        incarnation: Incarnation,
        rank: Rank,
        state: CacheState,
        caches: PagedCaches,
        agent: Agent,
        faults: Faults | None = None,
        direct: DirectDoor | None = None,
        ranges: Ranges | None = None,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        """Listens at once; a port in use raises CannotListen naming host, port and the settings.

        Raises ValueError if the caches are not those that `state` describes for this rank. Staging lies where the
        caches lie; chunks are at most as large as both arenas can hold. Once made, we close the agent with ourselves.
        `on_news` is called when an order has ended, by a thread of ours: it returns at once.
        """
        caches.check(state, state.share_of(rank))
        device = caches.planes[0].device if caches.planes else torch.device("cpu")
        sizes = (config.send_arena_bytes, config.receive_arena_bytes)
        usual = default_arena_bytes(_memory_of(device), config.chunk_bytes)
        send, receive = (Arena(_region(size or usual, device)) for size in sizes)
        faults, ranges = faults or NoFaults(), ranges or ranges_for(device)
        self._reports: deque[TransferReport] = deque(maxlen=MAX_UNTOLD)
        self._reactor = Reactor(f"kvferry-rank-{rank}", config, faults)
        self._mover = Mover(device, self._reactor.post)
        try:
            self._card = _card_of(config, rank, state, self._reactor.wire.port, (send, receive), device.type)
            is_shared = config.share_in_place or config.own_blocks
            shared = SharedCaches(caches, agent, are_ours=config.own_blocks) if is_shared and caches.planes else None
            room = Room(
                config=config,
                identity=Identity(instance, incarnation, self._card, _prepared(agent, (send, receive), self._reactor)),
                wire=self._reactor.wire,
                timers=self._reactor.timers,
                counters=self._reactor.counters,
                faults=faults,
                agent=agent,
                copies=self._mover,
                health=Health(
                    self._reactor.timers, (agent.pulse, self._mover.pulse, self._mover.oldest), config.stall_s
                ),
                history=History(self._reactor.timers.clock, self._reports.append),
                ranges=ranges,
                direct=direct if config.direct else None,
                shared=shared,
            )
        except BaseException:
            self._mover.close(POLL_CLOSE_S)
            self._reactor.discard()
            raise
        self._sent: deque[RequestId] = deque()
        self._received: deque[Received] = deque()
        self._arrived: dict[RequestId, int] = {}
        copier = Copier(caches, state, rank, faults, ranges)
        self._on_news = on_news
        on_ends = self._sent.append, self._has_received, self._arrived.__setitem__
        self._core = Core(room, send, receive, copier, *on_ends)
        caches_in_doubt = shared.regions if shared else ()
        self._resident = Resident(self._core, self._reactor, self._mover, agent, (send, receive), caches_in_doubt)
        # What the engine has handed in and was not told the end of.
        ways = self._reactor.post, self._mover.mark, self._sent.append
        self._offering = Offering(self._core.sender, *ways, layers=state.share_of(rank).layers)
        self._ordered: dict[RequestId, _Ordered] = {}
        self._given_up: Counter[RequestId] = Counter()
        """Orders that were ended here, and that the reactor will report too, should it ever go on."""
        self._deadline_s = config.request_deadline_s
        self._watcher = Watcher(self._reactor.pulse, time.monotonic, config.stall_s)
        self._state = state
        self._num_groups = caches.num_groups
        self._reactor.start(self._resident)

    @property
    def card(self) -> RankCard:
        """Where peers find this rank; goes to `InstanceDoor.set_cards`."""
        return self._card

    def offer(self, offer: Offer) -> None:
        """Lets peers read the blocks of a request until `settle`; on CUDA, after the current stream's work.

        Of an offer that grows, as much as is computed; `advance` tells the rest, and `complete` or `abandon` the end.
        Raises CallerError if the request is offered already, or its blocks are fewer than its tokens need.
        """
        self._offering.check_new(offer.request_id)
        self._check_tables(offer.request_id, offer.tables, offer.num_computed)
        self._offering.open(offer, is_troubled=bool(self._watcher.trouble()))

    def advance(self, request_id: RequestId, num_computed: int, by_group: Tables, ahead: Ahead | None = None) -> None:
        """Tokens [0, num_computed) of a growing offer are computed in all layers, those `ahead` in its first ones.

        On CUDA once the current stream's work is done. `by_group` lists all blocks so far; none that was told before
        may have changed. Raises CallerError, with both values, if one has, if progress goes back or beyond the prompt
        or our layers, if blocks are too few, or no offer of the request is growing; then nothing has happened.
        """
        tables = BlockTables(self._offering.growing.length(request_id), by_group)
        self._check_tables(request_id, tables, Frontier(num_computed, ahead).stop)
        self._offering.advance(request_id, num_computed, by_group, ahead)

    def complete(self, request_id: RequestId) -> None:
        """A growing offer is as any other from now on: its blocks are kept until it is sent.

        Raises CallerError, with both values, if the prompt is not computed to its end.
        """
        self._offering.complete(request_id)

    def abandon(self, request_id: RequestId, reason: str, *, comes_again: bool = False) -> None:
        """A growing offer ends without its prompt: it was preempted, or aborted. It is not reported as sent.

        Called before the engine uses the blocks for anything else: what is read from now on is not believed, and who is
        served from the offer fails for this reason. The request may be offered anew; a settlement of this offer that
        comes before that means nothing. With `comes_again` who asks meanwhile waits for that, or for that settlement.
        """
        self._offering.abandon(request_id, reason, comes_again=comes_again)

    def settle(self, transfer_id: TransferId, request_id: RequestId, reason: str) -> None:
        """Serves no new reader from this offer; `poll` reports the request as sent once the present readers are done.

        May come before its offer, which is then settled on arrival. One that grows is over when it is complete.
        """
        self._offering.settle(transfer_id, request_id, reason)

    def receive(self, order: ReceiveOrder) -> None:
        """Fetches the order's tokens into its blocks; ends in one Received. On CUDA, after the current stream's work.

        Raises CallerError if the request has an order that was not reported yet, or too few blocks.
        """
        if order.request_id in self._ordered:
            raise CallerError(f"the request has an order already: request={order.request_id}")
        if order.tokens.stop > order.tables.num_tokens:
            both = f"wanted={order.tokens}, num_tokens={order.tables.num_tokens}"
            raise CallerError(f"tokens beyond the prompt: request={order.request_id}, {both}")
        self._check_tables(order.request_id, order.tables)
        self._arrived.pop(order.request_id, None)
        gate, within_s = Gate(), 0.0 if self._watcher.trouble() else self._deadline_s
        self._ordered[order.request_id] = _Ordered(gate, time.monotonic() + within_s)
        free = self._mover.mark()
        self._reactor.post(lambda: self._core.loads.order(order, free, gate))

    def abort(self, request_id: RequestId) -> None:
        """Fails the order of this request, if it is still running; it is reported like any other."""
        self._reactor.post(lambda: self._core.loads.abort(request_id))

    def poll(self) -> Progress:
        """What has ended since the last poll."""
        ended = not self._reactor.is_alive
        sent, received = _drained(self._sent), [each for each in _drained(self._received) if self._is_news(each)]
        self._forget(sent, received)
        more_sent, more_received = self._ends_of_our_own(ended=ended)
        self._forget(more_sent, more_received)
        return Progress(
            (*sent, *more_sent), (*received, *more_received), tuple(_drained(self._reports)), self._news_of_arrivals()
        )

    def _has_received(self, received: Received) -> None:
        self._received.append(received)
        self._on_news()

    def _news_of_arrivals(self) -> tuple[Arrived, ...]:
        """How far the orders that still run have come, if further than at the last poll."""
        # A copy, since the reactor adds to it meanwhile.
        news = [Arrived(request_id, self._arrived.pop(request_id)) for request_id in list(self._arrived)]
        return tuple(each for each in news if each.request_id in self._ordered)

    def _is_news(self, received: Received) -> bool:
        """False for an order that was ended here before the reactor got to it."""
        if not self._given_up[received.request_id]:
            return True
        self._given_up[received.request_id] -= 1
        return False

    def _ends_of_our_own(self, *, ended: bool) -> tuple[list[RequestId], list[Received]]:
        """What is over although the reactor does not say so: it has ended, or hangs and is late.

        An order is over only if its gate can be shut: a copy that hangs keeps its blocks. An offer is over only if no
        copy can be reading its blocks, and a reactor that hangs may still have readers.
        """
        if ended:
            failure = self._reactor.failure
            reason = "closed" if failure is None else f"the transfer layer has failed: {failure!r}"
            sent = [] if self._mover.is_alive else self._offering.settled
            return sent, [_lost(each, reason) for each in sorted(self._ordered) if self._ordered[each].gate.shut()]
        if not (trouble := self._watcher.trouble()):
            return [], []
        now = time.monotonic()
        late = [each for each, order in sorted(self._ordered.items()) if order.due_at <= now and order.gate.shut()]
        for request_id in late:
            self._given_up[request_id] += 1
            self.abort(request_id)
        return [], [_lost(request_id, trouble) for request_id in late]

    def status(self) -> Status:
        """Gauges and counters, at most 0.1 s old while the reactor runs; never less than what the engine waits for."""
        status = self._core.status
        waited_for = {"offers": len(self._offering), "loads": len(self._ordered)}
        ours = self._watcher.trouble()
        gauges = {**(status.gauges if self._reactor.is_alive else {}), **waited_for}
        gauges["threads_troubled"] = gauges.get("threads_troubled", 0) + bool(ours)
        trouble = "; ".join(filter(None, (ours, status.trouble)))
        return replace(status, gauges=gauges, trouble=trouble)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends everything within `timeout_s`: running orders fail, and can still be polled. Idempotent.

        Waits for peers to stop writing; memory of those who do not is never given back to anybody.
        """
        end = time.monotonic() + timeout_s
        self._reactor.post(lambda: self._resident.close(max(0.0, timeout_s - POLL_CLOSE_S)))
        if not self._reactor.join(end - time.monotonic()):
            logger.error("the reactor of rank %s did not end within %s s", self._card.rank, timeout_s)

    def _check_tables(self, request_id: RequestId, tables: BlockTables, num_computed: int | None = None) -> None:
        """CallerError unless there is a table for each layer group, with all blocks of ours, or those computed."""
        if len(tables.by_group) != self._num_groups:
            tables_and_groups = f"tables={len(tables.by_group)}, layer groups={self._num_groups}"
            raise CallerError(f"not one block table a layer group: request={request_id}, {tables_and_groups}")
        context_rank = self._state.share_of(self._card.rank).context_rank
        tokens = tables.num_tokens if num_computed is None else num_computed
        ours = self._state.token_share(context_rank, tables.num_tokens).blocks
        wanted = bisect_left(ours, ceil_div(tokens, self._state.tokens_per_block))
        for table in tables.by_group:
            if len(table) < wanted:
                blocks = f"tokens={tokens}, blocks wanted={wanted}, held={len(table)}"
                raise CallerError(f"too few blocks: request={request_id}, {blocks}")

    def _forget(self, sent: list[RequestId], received: list[Received]) -> None:
        for request_id in sent:
            self._offering.forget(request_id)
        for each in received:
            self._ordered.pop(each.request_id, None)


def _card_of(
    config: TransferConfig, rank: Rank, state: CacheState, port: int, arenas: Sequence[Arena], device_type: str
) -> RankCard:
    largest = min(arena.max_lease_bytes for arena in arenas)
    # Why a quarter: a chunk that fills an arena waits for the one before it.
    chunk_bytes = config.chunk_bytes or min(default_chunk_bytes(device_type), largest // 4)
    return RankCard(rank=rank, host=config.call_host, port=port, state=state, max_chunk_bytes=min(chunk_bytes, largest))


def _prepared(agent: Agent, arenas: Sequence[Arena], reactor: Reactor) -> AgentCard:
    """The card of the agent, once it may move bytes of both arenas and wakes the reactor when it has."""
    for arena in arenas:
        agent.register(arena.region)
    agent.on_completion(reactor.wake)
    return agent.card()


def _memory_of(device: torch.device) -> int | None:
    """Bytes that a GPU has; None for a host."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _region(num_bytes: int, device: torch.device) -> Region:
    return device_region(num_bytes, device) if device.type == "cuda" else host_region(num_bytes)


def _drained(queue: "deque[DrainedT]") -> list[DrainedT]:
    taken = []
    while queue:
        taken.append(queue.popleft())
    return taken


def _lost(request_id: RequestId, reason: str) -> Received:
    return Received(request_id, False, reason, 0, 0, 0, LoadTimes())
