"""Ranks of an engine whose device blocks, host slots and disk are dictionaries, and requests as its tiers read them.

In:  the jobs of `TierOrders`. Out: answers, when the dice say so.
Law: host jobs are obeyed in order, the disk's at any time after that; where something lies, its label says what it is.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from kv_core.ids import RequestId
from kv_core.keys import Scope
from kv_core.token_log import unpacked
from kv_engine_adapter.tier_events import BlockName
from kv_engine_adapter.tier_orders import Answer, FetchFromDisk, FindOnDisk, Job, LoadTokens, SaveBlocks, WriteToDisk
from kv_testing.tier_listener import named

SIZE = 4
Label = tuple[int, ...]
"""The tokens up to and including the one that a cache entry belongs to, after their salt, and after the number of the
weights with which it was computed."""


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
