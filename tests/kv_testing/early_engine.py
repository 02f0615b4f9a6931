"""An engine that computes prompts in steps over few blocks, and whose prompts are offered meanwhile.

In:  a seed. Out: the number of tokens that could be read while they were computed; a `Broken` if a law is.
Law: whatever an offer says is computed lies in its blocks, after every word to the workers and after every step, until
     the offer is over; nothing that a client or an engine may do raises; at the end nothing is left of anybody.

What it does: chunks that end anywhere, prefixes that are there before the first step, prefixes that another connector
loads during it and whose failure is known only with its outcome, preemption, resumption, aborts, tokens that are
guessed and refused, requests that name both roles, transfer ids that come twice, names that come again, releases and
leases that end at any time, one step that is scheduled before the one before it has run. The scheduler side, the worker
side and the books of offers and leases are the real ones; a token is a label in a dictionary.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from kv_core.ids import Incarnation, InstanceId, RequestId, TransferId
from kv_engine_adapter.early import EarlyTerms
from kv_engine_adapter.known_peers import KnownPeers
from kv_engine_adapter.orders import StepOrders
from kv_engine_adapter.ports import ScheduledRequest
from kv_engine_adapter.scheduler import FerryScheduler, Identity
from kv_engine_adapter.worker import FerryWorker
from kv_testing.booked import EARLY_LEASE_S, LEASE_S, BookedTransceiver, LeasedDoor
from kv_testing.fake_door import FakeRequest
from kv_transfer.transceiver import Transceiver

SIZE = 4
NUM_BLOCKS = 14
IDS = [TransferId(digit * 32) for digit in "abc"]
Label = tuple[object, int]
WRONG: Label = ("wrong", -1)
"""What could not be loaded, and whatever is computed from it."""
Load = tuple[int, int]
"""How many tokens a step is to load before it runs, and how many of them it can."""


class Broken(AssertionError):
    """A law does not hold."""


@dataclass(eq=False)
class Work:
    """A request as the engine sees it."""

    view: FakeRequest
    prompt: object
    num_computed: int = 0
    num_answers: int = 1
    blocks: list[int] = field(default_factory=list)
    is_told: bool = False
    """Of its blocks, to the connector, in the step that it began or resumed with."""

    load: Load | None = None
    """What its first step loads, until the engine knows how that has ended."""

    @property
    def num_wanted(self) -> int:
        return self.view.num_prompt_tokens + self.num_answers - 1


@dataclass(eq=False)
class Run:
    """What a step does for one request: it computes tokens [start, start + count), after a load."""

    work: Work
    start: int
    count: int
    blocks: list[int]
    load: Load | None = None


class EarlyEngine:
    """One engine: its scheduler with the connector's half, and a worker that runs its steps in order."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.is_async = self.dice.random() < 0.5
        self.door = LeasedDoor()
        identity = Identity(InstanceId("engine"), Incarnation("run"), 1, 1)
        self.scheduler = FerryScheduler(
            identity, self.door, lease_s=LEASE_S, patience_s=60.0, shares_prefixes=True, tokens_per_block=SIZE,
            peers=KnownPeers.of(["10.0.0.0/24"]), early=self._terms(), clock=lambda: self.door.now,
        )  # fmt: skip
        self.transceiver = BookedTransceiver()
        self.worker = FerryWorker(cast(Transceiver, cast(Any, self.transceiver)), lambda tables: tables, SIZE)
        self.free = list(range(1, NUM_BLOCKS + 1))
        self.content: dict[tuple[int, int], Label] = {}
        self.waiting: list[Work] = []
        self.running: list[Work] = []
        self.kept: dict[RequestId, list[int]] = {}
        self.preempted: set[RequestId] = set()
        self.steps: deque[tuple[StepOrders, list[Run]]] = deque()
        self.num_read = 0
        self.num_lost = 0
        """Loads that have failed."""

    def _terms(self) -> EarlyTerms:
        return EarlyTerms(EARLY_LEASE_S, 1, SIZE, num_in_flight=1 + self.is_async)

    def play(self, num_steps: int = 40) -> int:
        for _ in range(num_steps):
            self._clients()
            self._schedule()
            while len(self.steps) > self.is_async:
                self._run()
        self._end()
        return self.num_read

    # -- clients and peers -------------------------------------------------------------------------------------------

    def _clients(self) -> None:
        dice = self.dice
        self.door.now += dice.choice((0.0, 0.1, 1.0, 5.0))
        if dice.random() < 0.5:
            self._request()
        works = self.waiting + self.running
        if works and dice.random() < 0.1:
            self._finish(dice.choice(works), complete=False)
        pairs = list(self.door.book._pairs)
        if pairs and dice.random() < 0.2:
            _, end = self.door.book.release(*dice.choice(pairs), f"consumer {dice.randrange(99)}", self.door.now)
            self.door.settled += [end] if end is not None else []
        self.door.settled += self.door.book.expire(self.door.now)

    def _request(self) -> None:
        dice = self.dice
        name = RequestId(f"r{dice.randrange(8)}")
        if any(name == each.view.request_id for each in self.waiting + self.running):
            return
        prompt = dice.randrange(3)
        params: dict[str, object] = {"do_remote_decode": True}
        if dice.random() < 0.9:
            params["transfer_id"] = dice.choice([*IDS, "none"])
        if dice.random() < 0.1:
            params |= {"do_remote_prefill": True, "remote_host": "10.0.0.2"}
        length = (1, 9, 17)[prompt] if dice.random() < 0.8 else dice.randint(1, 20)
        tokens = [100 * prompt + place for place in range(length)]
        view = FakeRequest(name, tokens, params if dice.random() < 0.9 else None, family=name)
        work = Work(view, prompt, num_answers=dice.choice((1, 1, 2, 6)))
        self.waiting.append(work)
        self._announce(work)

    def _announce(self, work: Work) -> None:
        self.scheduler.announced(work.view)
        self.scheduler.early.announced(work.view)

    # -- the engine --------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        dice, scheduled = self.dice, list[ScheduledRequest]()
        runs: list[Run] = []
        for work in list(self.running):
            if work in self.running and dice.random() < 0.9:
                self._schedule_one(work, scheduled, runs)
        if not self.preempted and dice.random() < 0.7:
            for work in self.waiting[:1]:
                self._begin(work)
                self._schedule_one(work, scheduled, runs)
        # Preempted after it was scheduled: taken out of the step again.
        gone = self.preempted
        scheduled = [each for each in scheduled if each.request_id not in gone]
        runs = [each for each in runs if each.work.view.request_id not in gone]
        self.preempted = set()
        early = self.scheduler.early
        known = [each for each in scheduled if each.request_id in early]
        early.stepped(known, gone, may_load=any(each.load for each in runs))
        self.steps.append((self.scheduler.take_orders(), runs))
        for each in runs:
            each.work.num_computed = each.start + each.count
        for work in [each.work for each in runs if each.work.num_computed >= each.work.num_wanted]:
            if not self.is_async or work.load:
                self._run_all()
            if work.num_computed >= work.num_wanted:
                self._finish(work, complete=True)

    def _begin(self, work: Work) -> None:
        """Its first step, or its first after a preemption; perhaps a prefix is in the cache."""
        self.waiting.remove(work)
        self.running.append(work)
        num_cached = SIZE * self.dice.randint(0, (work.view.num_prompt_tokens - 1) // SIZE)
        num_blocks = num_cached // SIZE
        if num_cached and self.dice.random() < 0.5 and len(self.free) > num_blocks:
            work.blocks = [self._take() for _ in range(num_blocks)]
            work.num_computed = num_cached
            # Why not while a load runs: its outcome is not heard in the middle of a step that is put together.
            if not any(each.load for _, runs in self.steps for each in runs) and self.dice.random() < 0.5:
                self._run_all()
                self._write(work.prompt, 0, num_cached, work.blocks)
            else:
                work.load = num_cached, SIZE * self.dice.choice((num_blocks, self.dice.randrange(num_blocks)))
        self._announce(work)

    def _schedule_one(self, work: Work, scheduled: list[ScheduledRequest], runs: list[Run]) -> None:
        left = max(1, work.view.num_prompt_tokens - work.num_computed)
        count = self.dice.choice((left, left, 1, self.dice.randint(1, left)))
        guessed = SIZE * self.dice.choice((0, 0, 0, 1, 2)) if work.num_computed + count > len(work.view.tokens) else 0
        new: list[int] = []
        while (len(work.blocks) + len(new)) * SIZE < work.num_computed + count + guessed:
            if not self.free and not self._preempt(work):
                self.free += new
                if work.blocks or self.running != [work]:
                    self._preempt_one(work)
                return
            new.append(self._take())
        work.blocks += new
        told = new if work.is_told else work.blocks
        load = None if work.is_told else work.load
        work.is_told = True
        start = work.num_computed
        scheduled.append(ScheduledRequest(work.view.request_id, start, count, (tuple(told),) if told else ()))
        runs.append(Run(work, start, count, list(work.blocks), load))

    def _preempt(self, besides: Work) -> bool:
        others = [each for each in self.running if each is not besides and each.blocks]
        if others:
            self._preempt_one(self.dice.choice(others))
        return bool(others)

    def _preempt_one(self, work: Work) -> None:
        self.running.remove(work)
        self.waiting.insert(0, work)
        self.free += work.blocks
        work.blocks, work.num_computed, work.is_told, work.load = [], 0, False, None
        self.preempted.add(work.view.request_id)

    def _finish(self, work: Work, *, complete: bool) -> None:
        name = work.view.request_id
        (self.running if work in self.running else self.waiting).remove(work)
        is_whole = complete and work.num_computed >= work.view.num_prompt_tokens
        while (len(work.blocks) - 1) * SIZE >= max(1, work.num_computed):
            self.free.append(work.blocks.pop())
        kept, _ = self.scheduler.finished(work.view, (tuple(work.blocks),), complete=is_whole)
        if kept:
            assert name not in self.kept, "law: blocks of a name are kept once"
            self.kept[name] = work.blocks
        else:
            self.free += work.blocks

    def _take(self) -> int:
        return self.free.pop(self.dice.randrange(len(self.free)))

    # -- the worker --------------------------------------------------------------------------------------------------

    def _run_all(self) -> None:
        while self.steps:
            self._run()

    def _run(self) -> None:
        orders, runs = self.steps.popleft()
        self.worker.hear(orders)
        self._check("a word")
        is_late = self.dice.random() < 0.5
        if not is_late:
            self.worker.run(orders)
        for each in runs:
            self._compute(each)
        if is_late:
            self.worker.run(orders)
        self._check("a step")
        for name in self.worker.poll().sent:
            self.free += self.kept.pop(RequestId(name))
            self.scheduler.sends_over([RequestId(name)])
        for each in runs:
            if each.load is not None and each.work.load is each.load:
                self._loaded(each)

    def _compute(self, run: Run) -> None:
        prompt = run.work.prompt
        if run.load is not None:
            wanted, loaded = run.load
            self._write(prompt, 0, loaded, run.blocks)
            self._write(None, loaded, wanted - loaded, run.blocks)
        is_sound = all(self.content.get((run.blocks[at // SIZE], at % SIZE)) == (prompt, at) for at in range(run.start))
        self._write(prompt if is_sound else None, run.start, run.count, run.blocks)

    def _loaded(self, run: Run) -> None:
        """The engine hears how a load has ended: what was not loaded it computes again, and all that follows."""
        assert run.load is not None
        wanted, loaded = run.load
        run.work.load = None
        if loaded < wanted:
            run.work.num_computed = loaded
            self.scheduler.early.blocks_lost(set(run.blocks[loaded // SIZE : wanted // SIZE]))
            self.num_lost += 1

    def _write(self, prompt: object, start: int, count: int, blocks: list[int]) -> None:
        """`prompt` None: nothing of use."""
        for place in range(start, start + count):
            self.content[blocks[place // SIZE], place % SIZE] = WRONG if prompt is None else (prompt, place)

    def _check(self, after: str) -> None:
        for offer, tables, computed in self.transceiver.readable():
            (table,) = tables.by_group
            found = [self.content.get((table[place // SIZE], place % SIZE)) for place in range(computed)]
            first = found[0] if found else None
            wanted = [(first[0] if first else None, place) for place in range(computed)]
            if found != wanted:
                raise Broken(f"after {after}: offer={offer.request_id}, found={found}, computed={computed}")
            self.num_read += computed if offer.num_computed is not None else 0
        self.scheduler.early.check()
        self.transceiver.offering.check()
        self.transceiver.sender.book.check()
        self.door.book.check()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        for work in self.waiting + self.running:
            self._finish(work, complete=False)
        self.door.now += 2 * EARLY_LEASE_S
        self.door.settled += self.door.book.expire(self.door.now)
        for _ in range(3):
            self._schedule()
            self._run_all()
        left = {
            "early": len(self.scheduler.early),
            "ended": len(self.scheduler.early._ended),
            "offered": self.scheduler.gauges()["offers"],
            "growing": len(self.worker._growing),
            "offers": len(self.transceiver.sender.book),
            "awaited": len(self.transceiver.sender.book._returning),
            "untold": len(self.transceiver.offering),
            "abandoned": len(self.transceiver.offering._abandoned),
            "settled": len(self.transceiver.offering._settled),
            "leases": len(self.door.book),
            "kept": len(self.kept),
            "blocks": NUM_BLOCKS - len(self.free),
        }
        if any(left.values()):
            raise Broken(f"left at the end: {left}")
