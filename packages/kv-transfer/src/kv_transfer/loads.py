"""Orders of our engine, from the order to its one outcome.

In:  ReceiveOrders and aborts; cards of instances; news of sessions.
Out: sessions to open, one for each sender; Received, one for each order.
Law: every load is decided by its deadline, once; it is told when no copy for it is running. Where a card from memory
     turned out to be outdated before a byte moved, the load asks for a new one, once.
"""

import logging
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kv_core.errors import CapacityError
from kv_core.ids import RequestId
from kv_transfer.copies import Copier
from kv_transfer.directory import Directory, NotFound
from kv_transfer.gate import Gate
from kv_transfer.load import Load, ReceiveSession, Stamps
from kv_transfer.orders import Received, ReceiveOrder
from kv_transfer.peers import Peers
from kv_transfer.plan.compatibility import reasons
from kv_transfer.plan.plan import receive_plans
from kv_transfer.protocol.messages import InstanceCard
from kv_transfer.receiver import Receiver
from kv_transfer.room import Room
from kv_transfer.staging import Arena
from kv_transfer.wire import UnusableAddress

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Loads:
    """All orders that are not reported; of the reactor's thread."""

    def __init__(
        self,
        room: Room,
        peers: Peers,
        arena: Arena,
        copier: Copier,
        on_received: Callable[[Received], None],
        on_arrived: Callable[[RequestId, int], None] = lambda *_: None,
    ) -> None:
        """`on_received` is told the outcome of each order, once; `on_arrived` meanwhile how far it has come."""
        self.directory = Directory(room)
        self.receiver = Receiver(room, peers, arena, copier, self)
        self._room = room
        self._peers = peers
        self._on_received = on_received
        self._on_arrived = on_arrived
        self._loads: dict[RequestId, Load] = {}
        self._is_closing = False

    def __len__(self) -> int:
        """Number of orders that are not reported."""
        return len(self._loads)

    # -- from our engine ---------------------------------------------------------------------------------------------

    def order(self, order: ReceiveOrder, free: "torch.cuda.Event | None", gate: Gate | None = None) -> None:
        """One more order; one without tokens has succeeded already. `gate`: of its blocks, if the caller has it."""
        load = Load(order, free, Stamps(self._room.timers.clock()), gate or Gate())
        assert order.request_id not in self._loads, "law: a request has one order at a time"
        self._loads[order.request_id] = load
        if self._is_closing:
            self._decide(load, "closing")
        elif not order.tokens:
            self._decide(load, "")
        elif trouble := self._room.health.look():
            self._decide(load, f"nothing can be loaded: {trouble}")
        else:
            within_s = self._room.config.request_deadline_s
            load.deadline = self._room.timers.after(within_s, partial(self._too_late, load))
            self._resolve(load)

    def abort(self, request_id: RequestId) -> None:
        """Fails the order of this request, if it is open."""
        load = self._loads.get(request_id)
        if load is not None:
            self._decide(load, "aborted by the engine")

    def close(self, reason: str) -> None:
        """Fails all orders, now and from now on."""
        self._is_closing = True
        for load in list(self._loads.values()):
            self._decide(load, reason)
        self.directory.close()

    # -- news of sessions (receiver.SessionListener) -----------------------------------------------------------------

    def session_failed(self, session: ReceiveSession, why: str, *, is_outdated: bool) -> None:
        """A load fails with its first session, unless a newer card may help."""
        load = session.load
        if session not in load.sessions or not load.is_open:
            return
        if is_outdated and self._may_try_again(load):
            logger.info("request %s: asking for a new card: %s", load.order.request_id, why)
            self._try_again(load, why)
        else:
            self._decide(load, why)

    def session_moved(self, session: ReceiveSession) -> None:
        """Perhaps the load is complete, or is quiet at last; or it has come further."""
        load = session.load
        if load.is_open and load.sessions and all(each.is_done for each in load.sessions):
            self._decide(load, "")
        elif load.is_open and session in load.sessions:
            self._on_arrived(load.order.request_id, load.arrived)
        self._report(load)

    # -- a load's life -----------------------------------------------------------------------------------------------

    def _resolve(self, load: Load) -> None:
        door, wanted = (load.order.host, load.order.port), load.order.incarnation
        card = self.directory.known(door, wanted)
        if card is not None and not load.first_failure:
            load.card_of = card.incarnation
            self._open(load, card)
        else:
            load.card_of = None
            self.directory.ask(door, wanted, self._left_s(load), partial(self._resolved, load))

    def _resolved(self, load: Load, card: InstanceCard | NotFound) -> None:
        if not load.is_open:
            return
        if isinstance(card, NotFound):
            self._decide(load, f"no card of the instance at {load.order.host}:{load.order.port}: {card.why}")
        else:
            self._open(load, card)

    def _open(self, load: Load, card: InstanceCard) -> None:
        """A session for each rank of theirs that holds something of ours; or the reasons why there can be none."""
        why = self._unfit(card)
        if why:
            self._decide(load, why)
            return
        state, rank = self._room.identity.state, self._room.identity.card.rank
        # Why from the transfer: loads of one rank spread over replicas, and all ranks of an instance agree.
        spread = zlib.crc32(load.order.transfer_id.encode())
        try:
            plans = receive_plans(
                state,
                rank,
                card.ranks[0].state,
                load.order.tokens,
                spread,
                group=load.order.group,
                num_tokens=load.order.tables.num_tokens,
            )
            for plan in plans:
                peer = self._peers.meet(card.instance, card.incarnation, card.ranks[plan.sender])
                self.receiver.open(load, peer, plan, self._left_s(load))
        except (ValueError, CapacityError, UnusableAddress) as error:
            self._decide(load, f"no plan to take it from {card.instance}: {error}")
            return
        if not plans:
            self._decide(load, "")

    def _unfit(self, card: InstanceCard) -> str:
        """Why nothing can be taken from this instance, all reasons at once; empty if it can."""
        ours, theirs = self._room.identity.state, card.ranks[0].state
        found = reasons(ours, theirs)
        if found:
            return f"our cache and that of {card.instance} cannot exchange: " + "; ".join(map(str, found))
        ranks = [rank.rank for rank in card.ranks]
        if ranks != list(theirs.parallel.ranks) or any(rank.state != theirs for rank in card.ranks):
            return (
                f"the ranks of {card.instance} contradict each other: ranks={ranks}, wanted={theirs.parallel.num_ranks}"
            )
        return ""

    def _may_try_again(self, load: Load) -> bool:
        has_moved = load.num_scatters or load.num_chunks
        return load.card_of is not None and not load.first_failure and not has_moved and not self._is_closing

    def _try_again(self, load: Load, why: str) -> None:
        assert load.card_of is not None
        self.directory.forget((load.order.host, load.order.port), load.card_of)
        load.first_failure = why
        outdated, load.sessions = load.sessions, []
        for session in outdated:
            self.receiver.fail(session)
        self._resolve(load)

    def _too_late(self, load: Load) -> None:
        states = ", ".join(session.doing for session in load.sessions)
        self._decide(
            load, f"deadline of {self._room.config.request_deadline_s} s: {states or 'no card of the instance'}"
        )

    def _decide(self, load: Load, outcome: str) -> None:
        """The load's one outcome; whatever still runs for it is ended."""
        if outcome and load.first_failure:
            outcome = f"{outcome} (second try; the first: {load.first_failure})"
        if not load.decide(outcome):
            return
        if load.deadline is not None:
            load.deadline.cancel()
        if outcome:
            self._room.counters.add("loads_failed")
            logger.warning("request %s was not loaded: %s", load.order.request_id, outcome)
            for session in load.sessions:
                self.receiver.fail(session)
        else:
            self._room.counters.add("loads_done")
        self._report(load)

    def _report(self, load: Load) -> None:
        """Tell the engine, once nothing touches its blocks any more."""
        if load.is_open or self._loads.get(load.order.request_id) is not load or not load.gate.shut():
            return
        del self._loads[load.order.request_id]
        now = self._room.timers.clock()
        received = load.received(now)
        logger.debug("request %s: %s", load.order.request_id, received)
        self._on_received(received)
        self._room.history.add(load.report(now, self._room.identity.state.tokens_per_block))

    def _left_s(self, load: Load) -> float:
        end = load.stamps.ordered + self._room.config.request_deadline_s
        return max(0.0, end - self._room.timers.clock())
