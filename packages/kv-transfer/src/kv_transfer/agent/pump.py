"""An agent made of a transport, a ledger and one thread.

In:  the calls of `Agent`, from any thread; a transport.
Out: completions, and a waker called from the thread.
Law: only this thread touches the transport, from its opening to its close. A movement is accepted without waiting for
     it; the calls that the transport must answer (register, card, add_peer, ...) wait for one turn of the thread,
     which lasts as long as a few bounded posts at most, and give up on a thread that hangs. While nothing is posted
     the thread sleeps. If it fails, what waits ends; what was posted may still be moving, and has no end.

One turn:   calls -> a few posts -> poll all posts -> announce -> rest
Rest:       a moment while things move; POLL_S and longer while posts are open; until woken when there are none.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kv_core.errors import CallerError
from kv_transfer.agent.base import AgentClosed, Completion, Direction, Movement, Ticket, UnknownPeer
from kv_transfer.agent.blob import TOKEN_BYTES, Blob, pack_blob, unpack_blob
from kv_transfer.agent.calls import Calls
from kv_transfer.agent.cards import AgentCard
from kv_transfer.agent.ledger import Ledger
from kv_transfer.agent.pieces import check_movement, cut, regions_of
from kv_transfer.agent.transport import PostT, Transport, TransportError
from kv_transfer.pulse import Pulse
from kv_transfer.regions import Region
from kv_transfer.threads import leave_pinned_core

POSTS_A_TURN = 4
"""So that polling, calls and other peers are never behind more than a few posts."""

SPIN_S = 0.001
"""How long after the last progress the thread looks again soon: a device moves 64 MiB in less than this."""

LOOK_PAUSE_S = 50e-6
"""Pause between such looks. Why not none: whoever gives up the interpreter and asks for it at once mostly gets it back
before another thread has woken up, so that copies and messages wait for it, up to 5 ms at a time."""

POLL_S = 0.001
POLL_LIMIT_S = 0.02
"""Shortest and longest pause between looks at posts that do not move; in between, a tenth of the silence so far.
Evidence: four posts to a stopped peer cost 8 % of a core at a steady millisecond (2 cores, 2026-11-30)."""

TEARDOWN_S = 2.0
"""How much longer than its timeout `close` waits for the transport to end."""

START_PATIENCE_S = 120.0
"""As `PumpLimits.patience_s`, for opening and registering, which nobody but their caller waits for. Evidence:
agent/nixl.py."""

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PumpLimits:
    """Bounds of one agent; see `pieces` and `ledger` for what they bound."""

    max_post_bytes: int = 16 << 20
    max_posts_per_peer: int = 4
    patience_s: float = 10.0
    """How long a caller waits for a thread that stays in one call. Far more than a few posts take, also on a machine
    with fifty times more to do than cores; less than a load's deadline: the caller is the reactor, for which everybody
    waits."""

    def __post_init__(self) -> None:
        if self.max_post_bytes < 1 or self.max_posts_per_peer < 1 or self.patience_s <= 0:
            raise CallerError(
                f"limits are positive: max_post_bytes={self.max_post_bytes}, "
                f"max_posts_per_peer={self.max_posts_per_peer}, patience_s={self.patience_s}"
            )


class PumpedAgent(Generic[PostT]):
    """An `Agent` over any transport. Many fields: an owner's half under the lock, and the thread's own half."""

    def __init__(
        self,
        name: str,
        transport: Transport[PostT],
        limits: PumpLimits = PumpLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the thread and opens the transport in it; raises what the opening raises."""
        self._name = name
        self._transport = transport
        self._limits = limits
        self._clock = clock
        self.pulse = Pulse("agent's thread")
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._wake = threading.Condition()  # guards everything up to the thread's own half
        self._ledger = Ledger(limits.max_posts_per_peer)
        self._peers: dict[str, Blob] = {}
        self._regions: set[Region] = set()
        self._calls = Calls(self._wake, self.pulse)
        self._waker: Callable[[], None] = _no_waker
        self._num_announced = 0
        self._closed_because: str | None = None
        self._close_at = 0.0
        self._in_doubt = False
        # The thread's own half:
        self._posts: list[tuple[Ticket, PostT]] = []
        self._moved_at = clock()
        self._thread = threading.Thread(target=self._run, name=f"agent-{name[:24]}", daemon=True)
        self._thread.start()
        try:
            self._call("open", lambda: transport.open(name), START_PATIENCE_S)
        except BaseException:
            self.close(0)
            raise

    @property
    def name(self) -> str:
        return self._name

    @property
    def kind(self) -> str:
        return self._transport.kind

    @property
    def memory_host(self) -> str:
        return self._transport.memory_host

    def register(self, region: Region) -> None:
        if region in self._regions:
            raise CallerError(f"a region is registered once: agent={self._name!r}, {region}")
        self._call("register", lambda: self._transport.register(region), START_PATIENCE_S)
        self._regions.add(region)

    def deregister(self, region: Region) -> None:
        with self._wake:
            if region not in self._regions:
                raise CallerError(f"the region is not registered: agent={self._name!r}, {region}")
            if self._ledger.uses(region):
                raise CallerError(f"bytes of the region may be moving: agent={self._name!r}, {region}")
        self._call("deregister", lambda: self._transport.deregister(region))
        self._regions.remove(region)

    def card(self) -> AgentCard:
        blob = pack_blob(self._token, self._call("blob", self._transport.blob))
        return AgentCard(kind=self.kind, name=self._name, blob=blob)

    def add_peer(self, card: AgentCard) -> None:
        if card.kind != self.kind:
            raise CallerError(f"agents of different kinds cannot talk: ours={self.kind!r}, theirs={card.kind!r}")
        if card.name == self._name:
            raise CallerError(f"a peer bears our own name: {card.name!r}")
        blob = unpack_blob(card.blob)
        if self._peers.get(card.name) != blob:
            self._call("add_peer", lambda: self._learn(card.name, blob))

    def remove_peer(self, name: str) -> None:
        if name in self._peers:
            self._call("remove_peer", lambda: self._forget(name, "peer removed"))

    def write(self, peer: str, movement: Movement) -> Ticket:
        return self._submit("write", peer, movement)

    def read(self, peer: str, movement: Movement) -> Ticket:
        return self._submit("read", peer, movement)

    def withdraw(self, ticket: Ticket) -> bool:
        with self._wake:
            withdrawn = self._ledger.withdraw(ticket)
            self._wake.notify()
        return withdrawn

    def completions(self) -> list[Completion]:
        with self._wake:
            self._num_announced = 0
            return self._ledger.take_completions()

    def on_completion(self, waker: Callable[[], None]) -> None:
        with self._wake:
            self._waker, self._num_announced = waker, 0
            self._wake.notify()

    def close(self, timeout_s: float) -> bool:
        with self._wake:
            if self._closed_because is None:
                self._closed_because = "it was closed"
                self._close_at = self._clock() + timeout_s
                self._ledger.drop_waiting("agent closed")
                self._wake.notify()
        self._thread.join(timeout_s + TEARDOWN_S)
        with self._wake:
            is_over = not self._thread.is_alive() and not self.pulse.failure
            self._in_doubt |= not is_over or self._ledger.num_open > 0
            self._ledger.drop_all("agent closed while bytes were moving")
        return not self._in_doubt

    def _submit(self, direction: Direction, peer: str, movement: Movement) -> Ticket:
        pieces = cut(direction, movement, self._limits.max_post_bytes)
        with self._wake:
            self._check_open()
            if peer not in self._peers:
                raise UnknownPeer(f"no such peer: wanted={peer!r}, known={sorted(self._peers)}")
            check_movement(movement, self._regions)
            ticket = self._ledger.submit(peer, pieces, regions_of(movement))
            self._wake.notify()
        return ticket

    def _call(self, name: str, do: Callable[[], ResultT], patience_s: float | None = None) -> ResultT:
        """Does something in the thread, and waits for it."""
        assert threading.current_thread() is not self._thread, "law: a waker does not call its agent"
        return self._calls.ask(name, do, self._check_open, patience_s or self._limits.patience_s)

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise AgentClosed(f"the agent takes no more work: agent={self._name!r}, {self._closed_because}")

    def _run(self) -> None:
        try:
            leave_pinned_core()
            while self._turn():
                pass
            self._refuse_all("it was closed")
            self._tear_down()
            self.pulse.rests()
        except BaseException as error:
            _log.critical("agent %s: its thread failed", self._name, exc_info=True)
            self._refuse_all(f"its thread failed: {error!r}")
            self.pulse.ends(repr(error))
        self._announce()

    def _turn(self) -> bool:
        """One turn; False when the agent is closed and has nothing left to wait for."""
        self._calls.run_all()
        moved = self._post_some()
        moved |= self._poll_posts()
        self._announce()
        return self._rest(moved)

    def _post_some(self) -> bool:
        for num_posted in range(POSTS_A_TURN):
            with self._wake:
                due = self._ledger.next_piece()
            if due is None:
                return num_posted > 0
            ticket, piece = due
            self.pulse.begins("post")
            try:
                self._posts.append((ticket, self._transport.post(ticket.peer, piece)))
            except TransportError as error:
                self._ended(ticket, str(error))
        return True

    def _poll_posts(self) -> bool:
        """Looks at every post once; whether any has ended."""
        looked_at, self._posts = self._posts, []
        for ticket, post in looked_at:
            failure = ""
            self.pulse.begins("poll")
            try:
                if not self._transport.poll(post):
                    self._posts.append((ticket, post))
                    continue
            except TransportError as error:
                failure = str(error)
            self._transport.release(post)
            self._ended(ticket, failure)
        return len(self._posts) < len(looked_at)

    def _ended(self, ticket: Ticket, failure: str) -> None:
        with self._wake:
            self._ledger.ended(ticket, failure)

    def _announce(self) -> None:
        with self._wake:
            fresh = self._has_news()
            self._num_announced = self._ledger.num_completions
            waker = self._waker
        if not fresh:
            return
        try:
            waker()
        except Exception:
            _log.exception("agent %s: the waker raised, which it must not; completions wait", self._name)

    def _rest(self, moved: bool) -> bool:
        now = self._clock()
        if moved:
            self._moved_at = now
        silent_s = now - self._moved_at
        hot = bool(self._posts) and silent_s < SPIN_S
        with self._wake:
            if self._closed_because is not None and (not self._posts or now >= self._close_at):
                return False
            if not hot and not self._has_work():
                self.pulse.rests()
                self._wake.wait(min(POLL_LIMIT_S, max(POLL_S, silent_s / 10)) if self._posts else None)
        if hot:
            time.sleep(LOOK_PAUSE_S)
        return True

    def _has_work(self) -> bool:
        return self._has_news() or bool(self._calls) or self._ledger.can_post()

    def _has_news(self) -> bool:
        return self._ledger.num_completions > self._num_announced

    def _refuse_all(self, reason: str) -> None:
        """Nothing new comes in, and nothing more is posted."""
        with self._wake:
            self._closed_because = self._closed_because or reason
            self._ledger.drop_waiting(reason)
        self._calls.refuse_all(AgentClosed(f"the agent takes no more work: agent={self._name!r}, {reason}"))

    def _tear_down(self) -> None:
        self.pulse.begins("close")
        for _, post in self._posts:
            self._transport.release(post)
        try:
            self._transport.close()
        except TransportError:
            _log.exception("agent %s: its transport did not close", self._name)

    def _learn(self, name: str, blob: Blob) -> None:
        known = self._peers.get(name)
        if known is not None and known.token != blob.token:
            self._forget(name, "peer replaced")
        self._transport.add_peer(name, blob.transport)
        with self._wake:
            self._peers[name] = blob

    def _forget(self, name: str, reason: str) -> None:
        for ticket, post in self._posts:
            if ticket.peer == name:
                self._transport.release(post)
        self._posts = [(ticket, post) for ticket, post in self._posts if ticket.peer != name]
        with self._wake:
            self._peers.pop(name, None)
            self._ledger.drop_peer(name, reason)
        self._transport.remove_peer(name)


def _no_waker() -> None:
    """Until the owner sets one."""
