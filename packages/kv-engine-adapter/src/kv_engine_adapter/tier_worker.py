"""The worker side of the tiers: obeys `TierOrders` on two threads of its own, reports what has ended.

In:  the orders of each engine step, in order.
Out: an `Answer` for every job, and the requests whose loads are over, each once.
Law: no caller waits. Host jobs are obeyed one after the other, and what a disk job needs of host slots is there when
     its turn comes; the disk's thread never holds up the host's. Whatever the disk does is an answer. A job that fails
     or comes too late is answered as failed; nothing of ours touches its blocks any more when it is.
"""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import TYPE_CHECKING, Final

from kv_core.ids import BlockId
from kv_core.keys import TOKEN_BYTES
from kv_core.spans import Span
from kv_core.token_log import unpacked
from kv_engine_adapter.metrics import Report
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.tier_memory import Damaged, HostMemory
from kv_engine_adapter.tier_orders import (
    Answer,
    FetchFromDisk,
    FindOnDisk,
    Job,
    JobId,
    LoadTokens,
    Prefix,
    Rates,
    SaveBlocks,
    TierOrders,
    Wish,
    WriteToDisk,
    slowest,
)
from kv_transfer.plan.ranges import HOLE
from kv_transfer.prefix_store.boxes import Box
from kv_transfer.prefix_store.chain import PrefixChain
from kv_transfer.prefix_store.misses import Miss
from kv_transfer.prefix_store.store import PrefixStore
from kv_transfer.threads import leave_pinned_core

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DiskJob = FindOnDisk | FetchFromDisk | WriteToDisk

AWAITED: Final = (LoadTokens, FindOnDisk, FetchFromDisk)
"""Jobs for which a prompt waits."""

_TURN: Final[Mapping[type[DiskJob], int]] = {FindOnDisk: 0, FetchFromDisk: 1, WriteToDisk: 2}
"""Prompts that wait go before what nobody waits for."""
_LAST_TURN: Final = 3
_ERRORS: Final = frozenset(
    f"{what} {why}" for what in ("lookup", "read", "write") for why in Miss if why != Miss.ABSENT
)


@dataclass(frozen=True, slots=True)
class TierEnded:
    """What ended since the last look; a load that failed is received as well."""

    answers: tuple[Answer, ...] = ()
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    rates: Rates | None = None


class TierWorker:
    """One rank's half of the tiers."""

    def __init__(
        self,
        memory: HostMemory,
        kernel_tables: Callable[[Tables], Tables],
        store: PrefixStore | None = None,
        *,
        on_news: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        measured: Tables = (),
        groups: Sequence[int] = (0,),
    ) -> None:
        """`kernel_tables` turns the scheduler's tables into those of the tensors. The store is closed with us.

        `groups` are the scheduler's that have layers on this rank.

        `measured` are tables of a block that nobody uses; with them both threads begin by measuring what copies cost.
        `on_news` is called, by a thread of ours, when there is something to poll.
        """
        self._memory = memory
        self._kernel_tables = kernel_tables
        self._groups = tuple(groups)
        self._store = store
        self._on_news = on_news
        self._clock = clock
        self._wall_clock = wall_clock
        self._host: queue.SimpleQueue[tuple[Job, torch.cuda.Event | None, float] | None] = queue.SimpleQueue()
        self._disk: queue.PriorityQueue[tuple[int, int, DiskJob | None, float]] = queue.PriorityQueue()
        self._turns = count()
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._awaited: set[JobId] = set()  # not answered, and a prompt waits for them
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._measured = measured
        self._rates: Rates | None = None
        self._num_errors = 0
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._threads = [self._thread("host", self._obey_host)]
        if store is not None:
            self._threads.append(self._thread("disk", self._obey_disk))

    def run(self, orders: TierOrders) -> None:
        """Begin with these orders, after what the calling thread has queued on the device so far."""
        if orders.jobs:
            fence, now = self._memory.fence(), self._clock()
            with self._lock:
                self._awaited |= {job.job for job in orders.jobs if isinstance(job, AWAITED)}
            for job in orders.jobs:
                self._host.put((job, fence, now))

    @property
    def is_awaited(self) -> bool:
        """Whether a prompt waits for a job of ours."""
        return bool(self._awaited)

    def poll(self) -> TierEnded:
        """What ended since the last call."""
        if not self._answers and self._rates is None:
            return TierEnded()
        with self._lock:
            ended = TierEnded(tuple(self._answers), self._received, self._failed, self._rates)
            self._answers, self._received, self._failed, self._rates = [], set(), set(), None
        return ended

    def take_report(self) -> Report | None:
        """Counters since the last report; `None` when nothing changed."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(float)
        counters = {f"tier_{name}": number for name, number in counts.items() if number}
        errors = sum(number for name, number in self.disk_counts().items() if name in _ERRORS)
        if errors > self._num_errors:
            counters["tier_disk_errors"], self._num_errors = errors - self._num_errors, errors
        return Report(counters=counters, gauges={}) if counters else None

    def disk_counts(self) -> Mapping[str, int]:
        """What the store says of itself, since it was made."""
        return {} if self._store is None else self._store.counts

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads; what has not begun is dropped. A disk that hangs is left behind."""
        self._host.put(None)
        self._disk.put((_LAST_TURN, next(self._turns), None, 0.0))
        for thread in self._threads:
            thread.join(timeout_s)
        if self._store is not None and not self._threads[-1].is_alive():
            self._store.close()

    # -- host ----------------------------------------------------------------------------------------------------

    def _obey_host(self) -> None:
        self._try("measuring", self._measure_host)
        while (found := self._host.get()) is not None:
            job, fence, since = found
            if isinstance(job, SaveBlocks | LoadTokens):
                self._copy(job, fence, since)
            else:
                self._pass_on(job, since)

    def _measure_host(self) -> None:
        if self._measured and self._memory.caches.planes:
            save_s, load_s = self._memory.measure(self._kernel_tables(self._measured), self._clock)
            self._tell(Rates(host_token_s=load_s), "device to host", save_s, "host to device", load_s)

    def _tell(self, rates: Rates, there: str, there_s: float, back: str, back_s: float) -> None:
        """Of a token of this rank."""
        num_bytes = self._memory.num_bytes(Span(0, 1))
        logger.info(
            "kvferry: tiers: %s %.2f GB/s, %s %.2f GB/s",
            *(there, num_bytes / max(there_s, 1e-12) / 1e9, back, num_bytes / max(back_s, 1e-12) / 1e9),
        )
        with self._lock:
            self._rates = rates if self._rates is None else slowest(self._rates, rates)

    def _copy(self, job: SaveBlocks | LoadTokens, fence: "torch.cuda.Event | None", since: float) -> None:
        way = "save" if isinstance(job, SaveBlocks) else "load"
        began = self._clock()
        ok = began - since <= job.within_s and self._try(way, lambda: self._move(job, fence))
        took = self._clock() - began
        num_tokens = job.tokens.stop if ok else 0
        with self._lock:
            self._counts[f"{way}_bytes"] += self._memory.num_bytes(job.tokens) if ok else 0
            self._counts[f"{way}_seconds"] += took if ok else 0
            if isinstance(job, LoadTokens):
                self._received.add(job.request_id)
                self._failed |= set() if ok else {job.request_id}
        self._answer(Answer(job.job, num_tokens))
        if isinstance(job, SaveBlocks) and job.write is not None:
            self._pass_on(job.write, since) if ok else self._answer(Answer(job.write.job, 0))

    def _move(self, job: SaveBlocks | LoadTokens, fence: "torch.cuda.Event | None") -> int:
        tables = self._kernel_tables(job.tables)
        if isinstance(job, SaveBlocks):
            self._memory.save(job.tokens, job.slots, tables, fence, job.absent)
        else:
            self._memory.load(job.tokens, job.slots, tables, fence)
        return job.tokens.stop

    def _pass_on(self, job: DiskJob, since: float) -> None:
        assert self._store is not None, "law: without a disk nothing is ordered of it"
        self._disk.put((_TURN[type(job)], next(self._turns), job, since))

    # -- disk ----------------------------------------------------------------------------------------------------

    def _obey_disk(self) -> None:
        assert self._store is not None, "law: this thread runs where there is a disk"
        self._try("measuring", self._measure_disk)
        while (job := (found := self._disk.get())[2]) is not None:
            in_time = isinstance(job, WriteToDisk) or self._clock() - found[3] <= job.within_s
            self._answer(Answer(job.job, self._on_disk(self._store, job) if in_time else self._none_of(job)))

    def _measure_disk(self) -> None:
        assert self._store is not None, "law: this thread runs where there is a disk"
        caches = self._memory.caches
        if self._measured and caches.planes and (took := self._store.measure(caches, self._clock)) is not None:
            self._tell(Rates(disk_token_s=took.read_s), "host to disk", took.write_s, "disk to host", took.read_s)

    def _on_disk(self, store: PrefixStore, job: DiskJob) -> int:
        """Up to which token it went well."""
        caches, reached = self._memory.caches, [self._none_of(job)]

        def obey() -> None:
            chain = _chain(store, job.prefix)
            if isinstance(job, FindOnDisk):
                reached[0] = (
                    store.lookup(chain, Box(caches.layers, caches.heads)) if caches.planes else chain.num_tokens
                )
            elif isinstance(job, FetchFromDisk):
                reached[0] += store.read(chain, job.tokens, caches, self._tables(job))
                first = job.tokens.start // caches.tokens_per_block
                self._memory.filled(job.tokens, job.slots[first:], job.absent)
            else:
                reached[0] = self._write(store, chain, job)

        way = {FindOnDisk: "find", FetchFromDisk: "fetch", WriteToDisk: "write"}[type(job)]
        self._try(way, obey)
        return reached[0]

    def _write(self, store: PrefixStore, chain: PrefixChain, job: WriteToDisk) -> int:
        size, reached = chain.tokens_per_record, 0
        for wish in by_record(job.wishes, size):
            last = Span(job.prompt_end // size * size, job.prompt_end)
            # Why first: what a prompt that comes again finds at its end is not among the records of a longer one.
            for tokens in (last, wish.tokens) if last and wish.tokens.covers(last) else (wish.tokens,):
                until = 0 if wish.duration_ms is None else int(self._wall_clock() + wish.duration_ms / 1000)
                outcome = store.write(chain, tokens, self._memory.caches, self._tables(job), wish.priority, until)
                if outcome.why is not None:
                    return wish.tokens.start + (outcome.num_tokens if tokens == wish.tokens else 0)
            reached = wish.tokens.stop
        return reached

    def _tables(self, job: FetchFromDisk | WriteToDisk) -> tuple[tuple[BlockId, ...], ...]:
        """To the store a slot is a block."""
        absent = [job.absent[group] for group in self._groups] if job.absent else [frozenset[int]()] * len(self._groups)
        return tuple(
            tuple(HOLE if at in left_out else BlockId(slot) for at, slot in enumerate(job.slots)) for left_out in absent
        )

    def _none_of(self, job: DiskJob) -> int:
        """The answer to a job of which nothing was done."""
        return job.tokens.start if isinstance(job, FetchFromDisk) else 0

    # -- both ----------------------------------------------------------------------------------------------------

    def _try(self, what: str, obey: Callable[[], object]) -> bool:
        """Whether it went well; else the log says why. No error ends a thread: its jobs would never be answered."""
        try:
            obey()
        except Damaged as error:
            logger.warning("kvferry: tiers: %s: %s", what, error)
        except Exception:
            logger.exception("kvferry: tiers: %s failed", what)
        else:
            return True
        return False

    def _answer(self, answer: Answer) -> None:
        with self._lock:
            self._answers.append(answer)
            self._awaited.discard(answer.job)
        self._on_news()

    def _thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        def begin() -> None:
            leave_pinned_core()
            run()

        thread = threading.Thread(target=begin, name=f"kvferry-tier-{name}", daemon=True)
        thread.start()
        return thread


def by_record(wishes: Sequence[Wish], tokens_per_record: int) -> Iterator[Wish]:
    """One wish for each record, the strongest of those that touch it; neighbours with one wish together."""
    stop = wishes[-1].tokens.stop if wishes else 0
    starts = range(0, stop, tokens_per_record)
    records = [Span(start, min(start + tokens_per_record, stop)) for start in starts]
    strongest = [max((wish for wish in wishes if wish.tokens & record), key=_strength) for record in records]
    for (priority, duration_ms), run in groupby(zip(strongest, records, strict=True), key=lambda pair: pair[0][1:]):
        spans = [record for _, record in run]
        yield Wish(Span(spans[0].start, spans[-1].stop), priority, duration_ms)


def _strength(wish: Wish) -> tuple[int, float]:
    return wish.priority, float("inf") if wish.duration_ms is None else wish.duration_ms


def _chain(store: PrefixStore, prefix: Prefix) -> PrefixChain:
    tokens, _ = unpacked(prefix.packed, TOKEN_BYTES)
    return store.chain(tokens, prefix.scope)
