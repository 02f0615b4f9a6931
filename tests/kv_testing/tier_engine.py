"""An engine with few device blocks over host slots and a disk, in which a token of cache is the prefix it stands for.

In:  a seed. Out: how many tokens came from the tiers; a `Broken` if a law is.
Law: whatever is loaded is what was computed for the very prompt; blocks of the device that a job needs are not used for
     anything else; every request ends; at the end no slot is held and no block is kept; who hears the events knows what
     is found in host memory.

What it does: prompts that share prefixes, chunks of a request that end anywhere, loads and saves that fail, a disk that
is late, forgets and holds less than it says, answers of ranks in different steps, aborts, resets, priorities.
The scheduler side is the real one. Ranks obey host jobs in order, and the disk's at any time after that.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from kv_core.ids import RequestId
from kv_core.keys import Scope
from kv_core.token_log import unpacked
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.tier import PrefixTiers
from kv_engine_adapter.tier_events import BlockName, Medium
from kv_engine_adapter.tier_orders import (
    Answer,
    FetchFromDisk,
    FindOnDisk,
    Job,
    JobId,
    LoadTokens,
    SaveBlocks,
    WriteToDisk,
    joined,
    tallied,
)
from kv_engine_adapter.tier_terms import BreakEven, TierTerms
from kv_testing.tier_listener import Listener, named, names_in_host

SIZE = 4
NUM_BLOCKS = 20
Label = tuple[int, ...]
"""The tokens up to and including the one that a cache entry belongs to."""


class Broken(AssertionError):
    """A law does not hold."""


@dataclass(eq=False)
class TierRequest:
    """A request as the tiers read it."""

    request_id: RequestId
    tokens: list[int]
    num_prompt_tokens: int
    arguments: dict[str, object] | None = None
    needs_every_token: bool = False
    why_unshared: str = ""
    salt: str | None = None
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def all_tokens(self) -> Sequence[int]:
        return self.tokens

    def scope(self) -> Scope | str:
        return self.why_unshared or Scope(salt=self.salt)

    def block_names(self, tokens_per_block: int, hashes_per_block: int) -> list[BlockName]:
        assert hashes_per_block == 1
        return named(self.tokens, self.salt, tokens_per_block)

    def label(self, at: int) -> Label:
        return (hash(self.salt), *self.tokens[: at + 1])


class TierRank:
    """One rank: its device blocks, host slots and disk, as dictionaries."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.device: dict[tuple[int, int], Label] = {}
        self.host: dict[tuple[int, int], Label] = {}
        self.disk: dict[Label, Label] = {}
        self.host_jobs: deque[Job] = deque()
        self.disk_jobs: list[FindOnDisk | FetchFromDisk | WriteToDisk] = []
        self.received: set[RequestId] = set()
        self.failed: set[RequestId] = set()

    def obey(self, num_jobs: int) -> list[Answer]:
        """Some of what was ordered."""
        answers = []
        for _ in range(num_jobs):
            if self.host_jobs and self.dice.random() < 0.7:
                answers += self._host(self.host_jobs.popleft())
            elif self.disk_jobs:
                answers.append(self._on_disk(self.disk_jobs.pop(self.dice.randrange(len(self.disk_jobs)))))
        return answers

    def _host(self, job: Job) -> list[Answer]:
        if isinstance(job, FindOnDisk | FetchFromDisk):
            self.disk_jobs.append(job)
            return []
        good = self.dice.random() < 0.95
        first = job.tokens.start // SIZE * SIZE
        for at in job.tokens if good else ():
            place = job.slots[(at - first) // SIZE], at % SIZE
            block = job.tables[0][at // SIZE], at % SIZE
            if isinstance(job, SaveBlocks):
                self.host[place] = self.device[block]
            else:
                self.device[block] = self.host[place]
        if isinstance(job, LoadTokens):
            self.received.add(job.request_id)
            self.failed |= set() if good else {job.request_id}
        elif job.write is not None and good:
            self.disk_jobs.append(job.write)
        num_tokens = job.tokens.stop if good else 0
        unwritten = [Answer(job.write.job, 0)] if isinstance(job, SaveBlocks) and job.write and not good else []
        return [Answer(job.job, num_tokens), *unwritten]

    def _on_disk(self, job: FindOnDisk | FetchFromDisk | WriteToDisk) -> Answer:
        tokens, _ = unpacked(job.prefix.packed, 4)
        labels = [(hash(job.prefix.scope.salt), *tokens[: at + 1]) for at in range(len(tokens))]
        num_held = next((at for at, label in enumerate(labels) if label not in self.disk), len(labels))
        if isinstance(job, FindOnDisk):
            return Answer(job.job, num_held)
        if isinstance(job, WriteToDisk):
            for at, label in enumerate(labels):
                self.disk[label] = self.host[job.slots[at // SIZE], at % SIZE]
            return Answer(job.job, len(labels))
        num_read = min(num_held, job.tokens.stop) if self.dice.random() < 0.8 else job.tokens.start
        for at in range(job.tokens.start, num_read):
            self.host[job.slots[at // SIZE], at % SIZE] = self.disk[labels[at]]
        return Answer(job.job, max(num_read, job.tokens.start))


class TierEngine:
    """One engine of one or two ranks."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = Random(seed)
        self.now = 0.0
        self.ranks = [TierRank(dice) for _ in range(dice.choice((1, 2)))]
        terms = TierTerms(
            tokens_per_block=SIZE, num_slots=dice.choice((3, 8, 24)), bytes_per_token=1, max_tokens=64,
            num_ranks=len(self.ranks), break_even=BreakEven(1.0, 0.1, 0.1, start_s=dice.choice((0.0, 3.0))),
            has_disk=dice.random() < 0.7, disk_wait_s=dice.choice((1.0, 30.0)), hashes_per_block=1,
        )  # fmt: skip
        self.tiers = PrefixTiers(terms, clock=lambda: self.now)
        self.listener = Listener(SIZE)
        self.free = list(range(NUM_BLOCKS))
        self.waiting: list[TierRequest] = []
        self.running: list[TierRequest] = []
        self.loading: dict[RequestId, tuple[TierRequest, int, list[bool]]] = {}
        self.leases: dict[JobId, list[int]] = {}
        self.num_requests = 0
        self.num_loaded = 0

    def play(self, num_steps: int = 60) -> int:
        for _ in range(num_steps):
            self._clients()
            self._step()
        while self.waiting or self.running or self.loading or self.tiers.gauges()["tier_jobs"]:
            self.now += 0.5
            self._step(patient=False)
        self.tiers.check()
        if len(self.free) != NUM_BLOCKS or self.leases:
            raise Broken(f"blocks are kept: {self.leases}, free={len(self.free)}")
        return self.num_loaded

    def _clients(self) -> None:
        dice = self.dice
        self.now += dice.choice((0.0, 0.2, 1.0))
        if dice.random() < 0.6:
            self.num_requests += 1
            length = dice.randint(1, 24)
            tokens = [1000 * (at // 6 * dice.choice((0, 0, 0, 1))) + at for at in range(length)]
            arguments = {"kvferry.retain": [dice.choice(("0-8:90:2s", "4-:10", "nonsense"))]}
            request = TierRequest(
                RequestId(f"r{self.num_requests}"), tokens, length, dice.choice((None, arguments)),
                needs_every_token=dice.random() < 0.1, why_unshared=dice.choice(("", "", "", "", "because")),
                salt=dice.choice((None, None, "salt")),
            )  # fmt: skip
            self.waiting.append(request)
        if dice.random() < 0.02:
            self.tiers.reset()
        if self.waiting and dice.random() < 0.05:
            gone = self.waiting.pop(dice.randrange(len(self.waiting)))
            self.tiers.finished(gone, 0, ((),))

    def _step(self, *, patient: bool = True) -> None:
        for request in list(self.waiting):
            self._admit(request)
        orders = self.tiers.take_orders()
        for rank in self.ranks:
            rank.host_jobs.extend(orders.jobs)
        for request in list(self.running):
            self._compute(request)
        found: dict = {}
        for rank in self.ranks:
            answers = rank.obey(self.dice.choice((0, 1, 3)) if patient else 20)
            found = joined(found, tallied(answers))
        for job in self.tiers.answered(found):
            self.free += self.leases.pop(job)
        self._end_loads()
        self.tiers.check()
        self._listen()

    def _listen(self) -> None:
        """Who hears the events knows what is found."""
        self.listener.hear(self.tiers.take_events())
        found = set() if self.tiers._is_resetting else names_in_host(self.tiers, SIZE)
        if set(self.listener.held[Medium.HOST]) != found:
            raise Broken("told of host memory is what is found there")

    def _admit(self, request: TierRequest) -> None:
        num_external = self.tiers.num_tokens(request, 0)
        if num_external is None:
            return
        if self.tiers.num_tokens(request, 0) != num_external:
            raise Broken("asked again, another answer")
        if not 0 <= num_external < max(1, request.num_tokens):
            raise Broken(f"more than there is: {num_external} of {request.num_tokens}")
        num_blocks = -(-(request.num_tokens + 6) // SIZE)
        if len(self.free) < num_blocks:
            return
        request.blocks = [self.free.pop(self.dice.randrange(len(self.free))) for _ in range(num_blocks)]
        self.waiting.remove(request)
        is_loading = self.tiers.allocated(request.request_id, self._tables(request), num_external)
        if is_loading != bool(num_external):
            raise Broken("a load is ordered exactly if something is to be loaded")
        if is_loading:
            self.loading[request.request_id] = request, num_external, []
        else:
            self.running.append(request)

    def _tables(self, request: TierRequest) -> Tables:
        return (tuple(request.blocks),)

    def _compute(self, request: TierRequest) -> None:
        stop = min(request.num_tokens, request.num_computed + self.dice.choice((3, 8, 64)))
        for at in range(request.num_computed, stop):
            self._write(request, at)
        request.num_computed = stop
        if stop < request.num_tokens:
            return
        if request.num_tokens < request.num_prompt_tokens + self.dice.choice((1, 6)):
            request.tokens.append(self.dice.choice((7, 8)))
            return
        self._finish(request)

    def _write(self, request: TierRequest, at: int) -> None:
        for rank in self.ranks:
            rank.device[request.blocks[at // SIZE], at % SIZE] = request.label(at)

    def _finish(self, request: TierRequest) -> None:
        self.running.remove(request)
        job = self.tiers.finished(request, request.num_computed, self._tables(request))
        if job is None:
            self.free += request.blocks
        else:
            self.leases[job] = request.blocks

    def _end_loads(self) -> None:
        over = [name for name in self.loading if all(name in rank.received for rank in self.ranks)]
        failed = {name for name in over if any(name in rank.failed for rank in self.ranks)}
        self.tiers.loads_over(over, failed)
        for name in over:
            request, num_tokens, _ = self.loading.pop(name)
            self.running.append(request)
            if name in failed:
                continue
            request.num_computed = num_tokens
            self.num_loaded += num_tokens
            for rank in self.ranks:
                for at in range(num_tokens):
                    if rank.device[request.blocks[at // SIZE], at % SIZE] != request.label(at):
                        raise Broken(f"another prompt's cache: {name}, token {at}")
