"""One rank's tiers over real tensors, in few words: jobs that copy, fetch and write, and what was answered.

In:  a world of tensors whose elements tell where they belong (`tagged`).
Out: `Side`, which obeys jobs and collects answers; usual jobs over usual slots.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kv_core.ids import Rank, RequestId
from kv_core.keys import Scope
from kv_core.spans import Span
from kv_core.token_log import packed
from kv_engine_adapter.tier_memory import HostMemory
from kv_engine_adapter.tier_orders import (
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
from kv_engine_adapter.tier_worker import TierWorker
from kv_testing.tagged import FILLER
from kv_testing.waiting import wait_for

SIZE = 16
NUM_TOKENS = 75
SLOTS = (7, 2, 9, 4, 0)
ALL = Span(0, NUM_TOKENS)
PREFIX = Prefix(packed(range(NUM_TOKENS)), Scope())
WISHES = (Wish(Span(0, 32), 90, 60_000), Wish(Span(32, NUM_TOKENS), 35))


class Side:
    """A rank, its tiers and what it answered so far."""

    def __init__(self, world, rank=0, store=None, num_slots=10, measured=(), clock=time.monotonic, **more):
        self.world = world
        self.caches = world.caches[Rank(rank)]
        self.memory = HostMemory(world.state, self.caches, SIZE, num_slots, **more)
        groups = more.get("groups", (0,))
        self.worker = TierWorker(
            self.memory, lambda tables: tables, store, clock=clock, measured=measured, groups=groups
        )
        self.tables = world.tables(Rank(rank)).by_group
        self.answers, self.received, self.failed = [], set(), set()
        self.rates = Rates()

    def obey(self, *jobs):
        """Wait for the answers to all of these."""
        expected = len(self.answers) + len(jobs) + sum(getattr(job, "write", None) is not None for job in jobs)
        self.worker.run(TierOrders(jobs))
        wait_for(lambda: self.look() >= expected)
        return self.answers[expected - len(jobs) :]

    def look(self):
        ended = self.worker.poll()
        self.answers += ended.answers
        self.received |= ended.received
        self.failed |= ended.failed
        self.rates = slowest(self.rates, ended.rates or Rates())
        return len(self.answers)


@contextmanager
def making_sides() -> Iterator[Callable[..., Side]]:
    """Make sides, whose threads end with the context."""
    made: list[Side] = []

    def make(*args, **more):
        made.append(Side(*args, **more))
        return made[-1]

    try:
        yield make
    finally:
        for side in made:
            side.worker.close()


def save(side, job=1, tokens=ALL, write=None, within_s=60.0):
    slots = SLOTS[tokens.start // SIZE :]
    return SaveBlocks(JobId(job), tokens, slots, side.tables, within_s, write)


def load(side, job=2, tokens=ALL, within_s=60.0):
    blocks = tokens.blocks(SIZE)
    return LoadTokens(JobId(job), RequestId("r"), tokens, SLOTS[blocks.start : blocks.stop], side.tables, within_s)


def write(job=3, wishes=WISHES):
    return WriteToDisk(JobId(job), PREFIX, SLOTS, wishes)


def wipe(side):
    """Fill the device with what nobody wrote."""
    filler = torch.full((8,), FILLER, dtype=torch.uint8)
    for plane in side.caches.planes:
        plane.fill_(filler.view(plane.dtype)[0])
