"""A small engine in which kv_core owns every block.

In:  jobs.
Out: answers; on the way copy orders go from the manager to the copy engine.
Law: the engine keeps no cache of its own: what the model reads, it reads from slots that the manager named after the
     copies of this step. A job that loses its blocks starts again from its tokens.

    step:   refresh -> grow what runs -> admit what waits -> copies -> model -> publish, rewind, release
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from kv_core.ids import RequestId
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.tiers import Tier
from kv_transfer.block_pools import BlockPools
from kv_transfer.copy_engine import CopyEngine
from paged_engine.generation import Answer, BeamSearch, Drafter, Generation, Job, Seat, start
from paged_engine.llama import Llama
from paged_engine.paged import Query, Slots, run_paged


class Totals(NamedTuple):
    """What has happened besides answers; jobs that were preempted or lost blocks have started again."""

    num_steps: int
    num_preempted: int
    num_rewound: int
    num_lost: int


class PagedEngine:
    """Serves jobs with at most `max_running` at once. `spoil` changes what the model reads (tests)."""

    def __init__(
        self,
        model: Llama,
        manager: KVCacheManager,
        pools: BlockPools,
        copies: CopyEngine,
        *,
        drafter: Drafter | None = None,
        max_running: int = 8,
        spoil: Callable[[Slots], Slots] | None = None,
    ) -> None:
        self._model, self._manager, self._pools, self._copies = model, manager, pools, copies
        self._drafter = drafter
        self._max_running = max_running
        self._spoil = spoil or (lambda slots: slots)
        self._waiting: deque[Seat] = deque()
        self._running: list[Seat] = []
        self._num_jobs = 0
        self._answers: dict[str, Answer] = {}
        self.totals = Totals(0, 0, 0, 0)
        self.moves: Counter[tuple[Tier, Tier]] = Counter()

    def run(self, jobs: Iterable[Job]) -> list[Answer]:
        """All answers, in the order of the jobs."""
        seats = [self._seat(job) for job in jobs]
        self._waiting.extend(seats)
        while self._waiting or self._running:
            self._step()
        return [self._answers.pop(seat.request_id) for seat in seats]

    def _seat(self, job: Job) -> Seat:
        self._num_jobs += 1
        return Seat(f"job-{self._num_jobs}", start(job, self._drafter))

    def _step(self) -> None:
        self._manager.refresh()
        self._grow()
        self._admit()
        self._copy()
        for seats in _alike(self._running):
            self._compute(seats)
        for seat in [seat for seat in self._running if seat.generation.is_done]:
            self._manager.release(RequestId(seat.request_id), num_filled=seat.num_filled)
            self._answers[seat.request_id] = seat.generation.answer(seat.num_cached or 0)
            self._running.remove(seat)
        self._manager.flush_events()
        self._count(num_steps=1)

    # Before the model runs.

    def _grow(self) -> None:
        """Room for what each running job computes next; the youngest ones give way if there is not enough."""
        at = 0
        while at < len(self._running):
            seat = self._running[at]
            num_tokens = seat.generation.propose()
            while not self._manager.grow(RequestId(seat.request_id), num_tokens):
                youngest = self._running[-1]
                self._preempt(youngest)
                if youngest is seat:
                    break
            else:
                at += 1

    def _admit(self) -> None:
        """As many of the waiting jobs as fit, in order; none whose prompt another one of this step computes as well."""
        computed = set()
        while self._waiting and len(self._running) < self._max_running:
            seat = self._waiting[0]
            request = Request(RequestId(seat.request_id), tuple(seat.generation.tokens), seat.generation.job.scope)
            missing = self._manager.missing_prefix(request)
            if missing in computed:
                break
            admission = self._manager.add(request, beam_width=seat.generation.job.beam_width)
            if admission is None:
                assert self._running, f"law: a job alone has room: {len(request.tokens or ())} tokens"
                break
            computed |= {missing} - {None}
            seat.num_filled = admission.num_prepopulated
            seat.num_cached = admission.num_cached if seat.num_cached is None else seat.num_cached
            self._running.append(self._waiting.popleft())

    def _copy(self) -> None:
        """Execute what the manager ordered. Whoever was to have a block that a file did not give back starts again."""
        orders = self._manager.take_copies()
        self.moves.update((order.source.tier, order.destination.tier) for order in orders)
        self._copies.submit(orders)
        progress = self._copies.wait()
        self._manager.copies_done(progress.below)
        victims = set(self._manager.lost(progress.lost))
        for seat in [seat for seat in self._running if seat.request_id in victims]:
            self._wait_again(seat)
            self._count(num_lost=1)

    def _preempt(self, seat: Seat) -> None:
        self._manager.release(RequestId(seat.request_id), num_filled=seat.num_filled)
        self._wait_again(seat)
        self._count(num_preempted=1)

    def _wait_again(self, seat: Seat) -> None:
        seat.generation.restart()
        self._running.remove(seat)
        self._waiting.appendleft(seat)

    # The model.

    def _compute(self, seats: Sequence[Seat]) -> None:
        if not seats:
            return
        queries = [self._queries(seat) for seat in seats]
        logits = iter(run_paged(self._model, self._pools, [query for group in queries for query in group]))
        for seat, group in zip(seats, queries, strict=True):
            self._accept(seat, [next(logits) for _ in group])

    def _queries(self, seat: Seat) -> list[Query]:
        inputs = seat.generation.inputs(seat.num_filled)
        stop = seat.num_filled + len(inputs[0])
        own = [self._slots(seat, beam, stop) for beam in range(seat.generation.job.beam_width)]
        adapter = seat.generation.job.scope.lora
        if len(inputs) == 1:
            return [Query(inputs[0], seat.num_filled, adapter, self._spoil(own[0]), own)]
        return [
            Query(tokens, seat.num_filled, adapter, self._spoil(_indirect(seat.generation, own, beam)), [own[beam]])
            for beam, tokens in enumerate(inputs)
        ]

    def _slots(self, seat: Seat, beam: int, stop: int) -> Slots:
        size = self._manager.config.tokens_per_block
        found = {}
        for window in self._pools.windows:
            table = self._manager.slots(RequestId(seat.request_id), window, beam)
            found[window] = [table[position // size] for position in range(stop)]
        return found

    def _accept(self, seat: Seat, logits: Sequence[Tensor]) -> None:
        """The tokens are computed: tell the manager what they were, and take the wrong ones back."""
        request_id, generation = RequestId(seat.request_id), seat.generation
        num_known = len(generation.tokens)
        num_wrong = generation.accept(logits)
        if num_wrong:
            assert self._manager.rewind(request_id, num_wrong), "law: drafts are not published"
            self._count(num_rewound=num_wrong)
        seat.num_filled = self._manager.num_tokens(request_id)
        self._manager.extend(request_id, generation.tokens[num_known:])
        self._manager.publish(request_id, seat.num_filled)

    def _count(self, **more: int) -> None:
        self.totals = self.totals._replace(**{name: getattr(self.totals, name) + more[name] for name in more})


def _alike(seats: Sequence[Seat]) -> list[list[Seat]]:
    """Jobs that begin apart from those that go on, since a batch is as wide as its longest input."""
    begins = [seat.num_filled < len(seat.generation.tokens) - 1 for seat in seats]
    return [[seat for seat, other in zip(seats, begins, strict=True) if other is group] for group in (True, False)]


def _indirect(generation: Generation, own: Sequence[Slots], beam: int) -> Slots:
    """The cache of a beam's tokens lies where it was written, in blocks of the beams that it descends from."""
    assert isinstance(generation, BeamSearch), "law: only beams differ"
    first = len(generation.job.prompt)
    owners = generation.beams[beam].owners
    found = {}
    for window, slots in own[beam].items():
        inherited = [own[owner][window][first + at] for at, owner in enumerate(owners)]
        found[window] = [*slots[:first], *inherited, slots[first + len(owners)]]
    return found
