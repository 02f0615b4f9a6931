"""An engine with few device blocks over host slots and a disk, in which a token of cache is the prefix it stands for.

In:  a seed. Out: how many tokens came from the tiers; a `Broken` if a law is.
Law: whatever is loaded is what was computed for the very prompt; blocks of the device that a job needs are not used for
     anything else; every request ends; at the end no slot is held and no block is kept; who hears the events knows what
     is found in host memory.

What it does: prompts that share prefixes, some of them on the device still, chunks of a request that end anywhere,
loads and saves that fail, a disk that is late, forgets and holds less than it says, answers of ranks in different
steps, preemptions, aborts at any time, resets after the weights have changed, with requests that go on or begin anew,
priorities. The scheduler side is the real one. Ranks obey host jobs in order, and the disk's at any time after that.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random

from kv_core.ids import RequestId
from kv_core.spans import Span
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.tier import PrefixTiers
from kv_engine_adapter.tier_events import Medium
from kv_engine_adapter.tier_orders import (
    JobId,
    joined,
    tallied,
)
from kv_engine_adapter.tier_terms import BreakEven, TierTerms
from kv_testing.tier_listener import Listener, names_in_host
from kv_testing.tier_ranks import SIZE, Broken, TierRank, TierRequest

NUM_BLOCKS = 20


@dataclass(eq=False)
class Loading:
    """A request whose tokens of this span are loaded, as they were computed with these weights."""

    request: TierRequest
    tokens: Span
    weights: int
    is_aborted: bool = False


class TierEngine:
    """One engine of one or two ranks."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = Random(seed)
        self.now = 0.0
        self.weights = 0
        self.seen: Counter[str] = Counter()
        """What has happened, for those who want to know that it does."""
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
        self.loading: dict[RequestId, Loading] = {}
        self.leases: dict[JobId, list[int]] = {}
        self.num_requests = 0
        self.num_loaded = 0

    def play(self, num_steps: int = 60) -> int:
        """How many tokens came from the tiers."""
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
        if dice.random() < 0.03:
            self._change_weights()
        if dice.random() < 0.08:
            self._abort()
        if self.running and dice.random() < 0.08:
            self._preempt(dice.choice(self.running))

    def _change_weights(self) -> None:
        """Requests begin anew, or go on with what they have, which nobody else may get."""
        self.weights += 1
        if self.dice.random() < 0.5:
            for request in list(self.running):
                self._preempt(request)
        self.seen["resets while something is open"] += bool(self.tiers.gauges()["tier_jobs"])
        self.tiers.reset()

    def _preempt(self, request: TierRequest) -> None:
        """Its blocks are taken at once, and it begins anew, with what it has said already as a part of its prompt."""
        self.running.remove(request)
        self.free += request.blocks
        request.blocks, request.num_computed = [], 0
        self.waiting.insert(0, request)
        self.seen["preemptions while something is open"] += bool(self.tiers.gauges()["tier_jobs"])

    def _abort(self) -> None:
        """Somebody who waits, computes or loads is gone; an engine counts what is being loaded as computed."""
        alive = [*self.waiting, *self.running, *(each.request for each in self.loading.values() if not each.is_aborted)]
        if not alive:
            return
        gone = self.dice.choice(alive)
        if gone in self.running:
            self._finish(gone)
        elif gone in self.waiting:
            self.waiting.remove(gone)
            self.tiers.finished(gone, 0, ((),))
        else:
            load = self.loading[gone.request_id]
            load.is_aborted = True
            self.seen["aborts while loading"] += 1
            counted = load.tokens.stop if load.tokens.stop >= gone.num_prompt_tokens else 0
            if self.tiers.finished(gone, counted, self._tables(gone)) is not None:
                raise Broken("what is not there yet is kept")

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
        num_local = min(self.dice.choice((0, 0, 0, SIZE, 2 * SIZE)), (request.num_tokens - 1) // SIZE * SIZE)
        num_external = self.tiers.num_tokens(request, num_local)
        if num_external is None:
            return
        if self.tiers.num_tokens(request, num_local) != num_external:
            raise Broken("asked again, another answer")
        if not 0 <= num_external < max(1, request.num_tokens - num_local):
            raise Broken(f"more than there is: {num_local} and {num_external} of {request.num_tokens}")
        num_blocks = -(-(request.num_tokens + 6) // SIZE)
        if len(self.free) < num_blocks:
            return
        request.blocks = [self.free.pop(self.dice.randrange(len(self.free))) for _ in range(num_blocks)]
        self.waiting.remove(request)
        is_loading = self.tiers.allocated(request.request_id, self._tables(request), num_external)
        if is_loading != bool(num_external):
            raise Broken("a load is ordered exactly if something is to be loaded")
        for at in range(num_local):
            self._write(request, at)
        request.num_computed = num_local
        if is_loading:
            tokens = Span(num_local, num_local + num_external)
            self.loading[request.request_id] = Loading(request, tokens, self.weights)
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
            rank.device[request.blocks[at // SIZE], at % SIZE] = (self.weights, *request.label(at))

    def _finish(self, request: TierRequest) -> None:
        self.running.remove(request)
        num_filled = request.num_computed if request.num_computed >= request.num_prompt_tokens else 0
        job = self.tiers.finished(request, num_filled, self._tables(request))
        if job is None:
            self.free += request.blocks
        else:
            self.leases[job] = request.blocks

    def _end_loads(self) -> None:
        over = [name for name in self.loading if all(name in rank.received for rank in self.ranks)]
        failed = {name for name in over if any(name in rank.failed for rank in self.ranks)}
        self.tiers.loads_over(over, failed)
        for rank in self.ranks:
            rank.received.difference_update(over)
            rank.failed.difference_update(over)
        for name in over:
            load = self.loading.pop(name)
            request = load.request
            for rank in self.ranks if name not in failed else ():
                for at in load.tokens:
                    if rank.device[request.blocks[at // SIZE], at % SIZE] != (load.weights, *request.label(at)):
                        raise Broken(f"another prompt's cache, or other weights': {name}, token {at}")
            if load.is_aborted:
                self.free += request.blocks
            elif name in failed:
                self.free += request.blocks
                request.blocks, request.num_computed = [], 0
                self.waiting.insert(0, request)
            else:
                request.num_computed = load.tokens.stop
                self.num_loaded += len(load.tokens)
                self.running.append(request)
