"""Which pieces wait, which move, and which tickets have ended.

In:  movements as pieces; the end of each post; withdrawals; the death of peers.
Out: the next piece to post; completions.
Law: every accepted ticket is withdrawn or gets exactly one completion, and gets it only when none of its pieces moves.
     After the first failure of a ticket nothing more of it is posted.

    submit -> waiting pieces -- next_piece -> moving -- ended -> (none waits, none moves) -> Completion
                    |                             |
                    +-- withdraw, failure: dropped +-- drop_peer: taken as ended, the peer is dead

Fair: peers take turns, and so do the tickets of one peer, piece by piece. A peer has at most `max_posts_per_peer`
pieces moving, so that one which is stopped takes nothing from the others.
Ownership: the agent, which locks around every call.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kv_transfer.agent.base import Completion, Ticket
from kv_transfer.agent.pieces import Piece
from kv_transfer.regions import Region


@dataclass(slots=True, eq=False)
class _Job:
    """A ticket that has not ended."""

    ticket: Ticket
    regions: frozenset[Region]
    waiting: deque[Piece]
    num_moving: int = 0
    failure: str = ""


@dataclass(slots=True)
class _Queue:
    """The tickets of one peer: `jobs` are those that have waiting pieces, in the order of their turns."""

    jobs: deque[_Job] = field(default_factory=deque)
    num_open: int = 0
    num_moving: int = 0


class Ledger:
    """The books of one agent."""

    def __init__(self, max_posts_per_peer: int) -> None:
        self._max_posts_per_peer = max_posts_per_peer
        self._num_tickets = 0
        self._jobs: dict[Ticket, _Job] = {}
        self._queues: dict[str, _Queue] = {}
        self._turns: deque[str] = deque()
        self._completions: list[Completion] = []

    @property
    def num_open(self) -> int:
        """Tickets that have not ended."""
        return len(self._jobs)

    @property
    def num_completions(self) -> int:
        """Completions that nobody has taken yet."""
        return len(self._completions)

    def uses(self, region: Region) -> bool:
        """Whether a ticket that has not ended moves bytes of this region of ours."""
        return any(region in job.regions for job in self._jobs.values())

    def submit(self, peer: str, pieces: Sequence[Piece], regions: Iterable[Region]) -> Ticket:
        """Accepts a movement of at least one piece."""
        self._num_tickets += 1
        ticket = Ticket(self._num_tickets, peer, sum(piece.num_bytes for piece in pieces))
        job = _Job(ticket, frozenset(regions), deque(pieces))
        self._jobs[ticket] = job
        if peer not in self._queues:
            self._queues[peer] = _Queue()
            self._turns.append(peer)
        self._queues[peer].jobs.append(job)
        self._queues[peer].num_open += 1
        return ticket

    def can_post(self) -> bool:
        """Whether `next_piece` has one."""
        return any(self._may_post(queue) for queue in self._queues.values())

    def next_piece(self) -> tuple[Ticket, Piece] | None:
        """The piece whose turn it is; from now on it moves."""
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            queue = self._queues[self._turns[-1]]
            if self._may_post(queue):
                return self._take(queue)
        return None

    def ended(self, ticket: Ticket, failure: str = "") -> None:
        """One moving piece of this ticket moves no more; with a failure, the waiting ones are dropped."""
        job = self._jobs[ticket]
        assert job.num_moving > 0, f"law: only a moving piece ends: {ticket}"
        job.num_moving -= 1
        self._queues[ticket.peer].num_moving -= 1
        if failure:
            self._fail(job, failure)
        self._settle(job)

    def withdraw(self, ticket: Ticket) -> bool:
        """See `Agent.withdraw`."""
        job = self._jobs.get(ticket)
        if job is None:
            return False
        if job.num_moving == 0 and not job.failure and self._is_untouched(job):
            self._drop_waiting(job)
            self._forget(job)
            return True
        if job.waiting:
            self._fail(job, "withdrawn")
            self._settle(job)
        return False

    def drop_waiting(self, reason: str) -> None:
        """Nothing more is posted; tickets that still have waiting pieces fail."""
        for job in list(self._jobs.values()):
            if job.waiting:
                self._fail(job, reason)
                self._settle(job)

    def drop_peer(self, peer: str, reason: str) -> None:
        """Ends every ticket of a peer whose posts will never be asked for again."""
        for job in [job for job in self._jobs.values() if job.ticket.peer == peer]:
            self._queues[peer].num_moving -= job.num_moving  # before the last job takes the queue with it
            job.num_moving = 0
            self._fail(job, reason)
            self._settle(job)

    def drop_all(self, reason: str) -> None:
        """Ends every ticket."""
        for peer in list(self._queues):
            self.drop_peer(peer, reason)

    def take_completions(self) -> list[Completion]:
        """Those not taken yet, oldest first."""
        taken, self._completions = self._completions, []
        return taken

    def check(self) -> None:
        """Proves the invariants; for tests."""
        assert sorted(self._turns) == sorted(self._queues), "law: every queue has one turn"
        for ticket, job in self._jobs.items():
            assert job.waiting or job.num_moving, f"law: an open ticket waits or moves: {ticket}"
            assert not (job.failure and job.waiting), f"law: nothing is posted after a failure: {ticket}"
            assert (job in self._queues[ticket.peer].jobs) == bool(job.waiting), f"law: who waits has a turn: {ticket}"
        for peer, queue in self._queues.items():
            jobs = [job for job in self._jobs.values() if job.ticket.peer == peer]
            moving = sum(job.num_moving for job in jobs)
            assert queue.num_open == len(jobs) > 0, f"law: tickets are counted: {peer}"
            assert queue.num_moving == moving <= self._max_posts_per_peer, f"law: posts are counted: {peer}"
        ended = {completion.ticket for completion in self._completions}
        assert len(ended) == len(self._completions), "law: a ticket ends once"
        assert ended.isdisjoint(self._jobs), "law: a ticket that ended is not open"

    def _may_post(self, queue: _Queue) -> bool:
        return bool(queue.jobs) and queue.num_moving < self._max_posts_per_peer

    def _take(self, queue: _Queue) -> tuple[Ticket, Piece]:
        job = queue.jobs.popleft()
        piece = job.waiting.popleft()
        job.num_moving += 1
        queue.num_moving += 1
        if job.waiting:
            queue.jobs.append(job)
        return job.ticket, piece

    def _is_untouched(self, job: _Job) -> bool:
        return sum(piece.num_bytes for piece in job.waiting) == job.ticket.num_bytes

    def _fail(self, job: _Job, failure: str) -> None:
        """Keeps the first failure; it is the cause of the others."""
        job.failure = job.failure or failure
        self._drop_waiting(job)

    def _drop_waiting(self, job: _Job) -> None:
        if job.waiting:
            job.waiting.clear()
            self._queues[job.ticket.peer].jobs.remove(job)

    def _settle(self, job: _Job) -> None:
        """Completes a ticket of which nothing waits and nothing moves."""
        if job.waiting or job.num_moving:
            return
        outcome = Completion(job.ticket, "error", job.failure) if job.failure else Completion(job.ticket, "done")
        self._completions.append(outcome)
        self._forget(job)

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.ticket]
        peer = job.ticket.peer
        self._queues[peer].num_open -= 1
        if not self._queues[peer].num_open:
            del self._queues[peer]
            self._turns.remove(peer)
