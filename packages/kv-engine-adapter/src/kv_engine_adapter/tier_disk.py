"""The disk tier, scheduler side: prompts that wait for it, and what is written through to it.

In:  prompts of which the host tier lacks something; host slots that have been filled.
Out: orders to find, fetch and write.
Law: no call blocks. A prompt waits no longer than `disk_wait_s` after its first question, and is asked about once. What
     is fetched fills host slots and is found there; so a disk that fails, hangs or lies costs a wait and nothing else.
"""

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from kv_core.keys import Scope
from kv_core.retention import DEFAULT_PRIORITY, RetentionConfig
from kv_core.spans import Span
from kv_core.token_log import packed
from kv_engine_adapter.tier_costs import TierCosts
from kv_engine_adapter.tier_events import BlockName, TierEvents
from kv_engine_adapter.tier_jobs import Jobs
from kv_engine_adapter.tier_orders import Absent, FetchFromDisk, FindOnDisk, JobId, Prefix, Wish, WriteToDisk
from kv_engine_adapter.tier_parts import Wanted
from kv_engine_adapter.tier_slots import Found, HostSlots, Kept, scope_within
from kv_engine_adapter.tier_terms import TierTerms

NO_JOB: Final = JobId(-1)


class Stage(enum.Enum):
    """How far a question to the disk is."""

    UNASKED = enum.auto()
    FINDING = enum.auto()
    FETCHING = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True)
class Question:
    """A prompt that waits for its turn: all its tokens but the last, and what the host tier holds of them."""

    tokens: Sequence[int]
    scope: Scope
    retention: RetentionConfig | None
    found: Found
    names: Sequence[BlockName] = ()
    """Of its blocks, if anybody wants to hear of them."""
    stage: Stage = Stage.UNASKED
    job: JobId = NO_JOB
    deadline: float = 0.0
    from_disk: Span = field(default=Span(0, 0))
    """What of it was read from the disk for this very question."""
    answer: Span | None = None
    """What the engine was last told it can have."""


class Sources(NamedTuple):
    """Tokens of a load, by where they were when the request asked."""

    num_host: int
    num_disk: int


class Loading(NamedTuple):
    """A request's load that is under way."""

    slots: tuple[int, ...]
    sources: Sources


class DiskTier:
    """What one engine asks of its disk."""

    def __init__(
        self,
        terms: TierTerms,
        costs: TierCosts,
        slots: HostSlots,
        jobs: Jobs,
        counts: Counter[str],
        clock: Callable[[], float],
        events: TierEvents | None = None,
    ) -> None:
        self._terms = terms
        self._costs = costs
        self._events = events
        self._slots = slots
        self._jobs = jobs
        self._counts = counts
        self._clock = clock
        self._num_writing = 0
        self._secret = ""
        self._late: set[JobId] = set()

    @property
    def num_writing(self) -> int:
        """Host slots that wait for the disk."""
        return self._num_writing

    def disown(self, secret: str) -> None:
        """From now on share nothing with what is on disk, by a name that nobody else knows."""
        self._secret = secret

    def waits(self, question: Question, num_computed: int) -> bool:
        """Whether the prompt waits for the disk; begins to, once, if what it may hold is worth it."""
        if question.stage in (Stage.FINDING, Stage.FETCHING):
            if self._clock() < question.deadline:
                return True
            self._counts["disk_late"] += 1
            self._late.add(question.job)
            question.stage = Stage.OVER
        if question.stage is Stage.OVER or not self._terms.has_disk:
            return False
        if self._late:
            # Why: each prompt would wait, one after the other, as long as the disk hangs.
            self._counts["disk_skipped"] += 1
            question.stage = Stage.OVER
            return False
        num_more = len(question.tokens) - max(num_computed, question.found.num_tokens)
        if not self._costs.pays(num_more, from_disk=True):
            question.stage = Stage.OVER
            return False
        question.stage, question.deadline = Stage.FINDING, self._clock() + self._terms.disk_wait_s
        question.job = job = self._jobs.new(partial(self._told, question))
        self._jobs.order(FindOnDisk(job, self._prefix(question.tokens, question.scope), self._terms.disk_wait_s))
        return True

    def write(
        self, kept: Kept, retention: RetentionConfig | None, num_prompt: int, absent: Absent
    ) -> WriteToDisk | None:
        """The order that writes what is kept and then releases it; `None` if there is no disk, or it is far behind.

        `absent` is what its slots will not hold.
        """
        tokens, scope = kept.tokens, kept.scope
        if not self._terms.has_disk:
            return None
        if self._num_writing + len(kept.slots) > self._terms.max_written_slots:
            self._counts["writes_skipped"] += 1
            return None
        self._num_writing += len(kept.slots)
        self._slots.pin(kept)
        job = self._jobs.new(partial(self._written, kept, tokens, self._secret))
        wishes, prompt_end = self._wishes(retention, len(tokens)), min(num_prompt - 1, len(tokens))
        return WriteToDisk(job, self._prefix(tokens, scope), kept.slots, wishes, prompt_end, absent)

    def _told(self, question: Question, num_tokens: int) -> None:
        """The disk holds so many tokens; if they pay, host slots are filled with them."""
        self._late.discard(question.job)
        if question.stage is not Stage.FINDING:
            return
        question.stage = Stage.OVER
        self._tell(question.tokens, question.names, num_tokens)
        question.found = found = self._slots.find(question.tokens, question.scope)
        if not self._costs.pays(num_tokens - found.num_tokens, from_disk=True):
            return
        tokens = question.tokens[: min(num_tokens, self._terms.capacity)]
        held = self._slots.held(tokens, question.scope)
        wanted = self._slots.parts.to_fetch(held.slots, held.num_tokens, len(tokens))
        if wanted is None:
            return
        kept = self._slots.keep(tokens, question.scope, question.retention, question.names)
        if kept is None:
            self._counts["no_room"] += 1
            return
        self._slots.pin(kept)
        question.job = job = self._jobs.new(partial(self._fetched, question, kept, wanted))
        prefix = self._prefix(question.tokens, question.scope)
        within_s = max(0.0, question.deadline - self._clock())
        self._jobs.order(FetchFromDisk(job, prefix, wanted.tokens, kept.slots, within_s, wanted.absent))
        question.stage = Stage.FETCHING

    def _fetched(self, question: Question, kept: Kept, wanted: Wanted, num_tokens: int) -> None:
        self._late.discard(question.job)
        self._counts["fetched_tokens"] += max(0, num_tokens - wanted.tokens.start)
        self._counts["fetches_short"] += num_tokens < wanted.tokens.stop
        self._slots.release(kept, num_tokens if num_tokens > wanted.tokens.start else 0, wanted)
        if question.stage is Stage.FETCHING:
            question.stage = Stage.OVER
            question.from_disk = Span(wanted.tokens.start, max(wanted.tokens.start, num_tokens))
            question.found = self._slots.find(question.tokens, question.scope)

    def _written(self, kept: Kept, tokens: Sequence[int], secret: str, num_tokens: int) -> None:
        self._num_writing -= len(kept.slots)
        if secret == self._secret:
            self._tell(tokens, kept.names, num_tokens)
        self._counts["written_tokens"] += num_tokens
        self._counts["writes_failed"] += num_tokens < kept.num_tokens
        self._slots.release(kept)

    def _tell(self, tokens: Sequence[int], names: Sequence[BlockName], num_tokens: int) -> None:
        if self._events is not None:
            self._events.on_disk(tokens, names, num_tokens)

    def _wishes(self, retention: RetentionConfig | None, num_tokens: int) -> tuple[Wish, ...]:
        size = self._terms.tokens_per_block
        return tuple(
            Wish(
                Span(blocks.start * size, min(blocks.stop * size, num_tokens)),
                DEFAULT_PRIORITY if wish.priority is None else wish.priority,
                wish.duration_ms,
            )
            for blocks, wish in (retention or RetentionConfig()).runs(size, num_tokens)
        )

    def _prefix(self, tokens: Sequence[int], scope: Scope) -> Prefix:
        scope = scope_within(scope, len(tokens))
        if self._secret:
            scope = Scope(scope.lora, f"{self._secret} {scope.salt!r}", scope.extras)
        return Prefix(packed(tokens), scope)
