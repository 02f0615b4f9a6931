"""The host and disk tiers, scheduler side: what is kept of requests that end, and what a new prompt finds again.

In:  requests of the engine, its block tables, the answers of the workers.
Out: token counts for the engine's scheduler, `TierOrders` for the workers, the jobs for which device blocks are kept.
Law: no call blocks or moves bytes. What is answered to the scheduler lies in host memory; what is in host memory is
     found only after every rank has copied it. A job's device blocks are kept until every rank has answered it.

    request ends     finished -> SaveBlocks -> (ranks) -> found, device blocks free -> (disk) -> host slots free
    prompt arrives   num_tokens: host lookup -> [FindOnDisk -> (ranks) -> FetchFromDisk -> (ranks)] -> number of tokens
                     allocated -> LoadTokens -> (ranks) -> loads_over
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from kv_core.ids import RequestId
from kv_core.retention import RetentionConfig
from kv_core.spans import Span
from kv_engine_adapter.metrics import Report
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.ports import CachedRequest
from kv_engine_adapter.retain import hints_of
from kv_engine_adapter.tier_costs import TierCosts
from kv_engine_adapter.tier_disk import DiskTier, Loading, Question, Sources, Stage
from kv_engine_adapter.tier_events import BlockName, TierEvent, TierEvents
from kv_engine_adapter.tier_jobs import Jobs
from kv_engine_adapter.tier_orders import JobId, LoadTokens, SaveBlocks, Tally, TierOrders
from kv_engine_adapter.tier_parts import Wanted
from kv_engine_adapter.tier_reports import TierReports
from kv_engine_adapter.tier_saves import Computed, Saves
from kv_engine_adapter.tier_slots import HostSlots, Kept
from kv_engine_adapter.tier_terms import TierTerms

logger = logging.getLogger(__name__)

MAX_FAILED: Final = 4096
"""Requests remembered of which a load has failed: of some it is told when they have ended already."""


class PrefixTiers:
    """What one engine keeps in host memory and on disk."""

    def __init__(self, terms: TierTerms, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        """What has happened so far, by name."""
        self._reports = TierReports()
        self.costs = TierCosts(terms, clock)
        """Told by whoever sees the engine's steps and hears the ranks."""
        self._terms = terms
        self._events = TierEvents(terms.tokens_per_block) if terms.hashes_per_block else None
        self._slots = HostSlots(terms, clock, self._events)
        self._jobs = Jobs(terms.num_ranks)
        self._disk = DiskTier(terms, self.costs, self._slots, self._jobs, self.counts, clock, self._events)
        self._questions: dict[RequestId, Question] = {}
        self._wishes: dict[RequestId, RetentionConfig | None] = {}
        self._begun: dict[RequestId, int] = {}
        self._loading: dict[RequestId, Loading] = {}
        self._failed: dict[RequestId, None] = {}
        self._saves = Saves()
        self._copying: dict[JobId, Span] = {}
        self._freed: list[JobId] = []
        self._is_resetting = False
        self._num_resets = 0

    # -- a prompt that arrives -----------------------------------------------------------------------------------

    def num_tokens(self, request: CachedRequest, num_computed: int) -> int | None:
        """How many tokens behind the first `num_computed` come from here; `None`: ask again in the next step.

        Never counts the last token: the engine computes it to get its first logits.
        """
        self._begun[request.request_id] = self._num_resets
        question = None if self._is_resetting else self._question(request)
        if question is None:
            return 0
        if self._disk.waits(question, num_computed):
            return None
        if not self._slots.is_there(question.found):
            question.from_disk = Span(0, 0)
            question.found = self._slots.find(question.tokens, question.scope)
        num_found = max(0, question.found.num_tokens - num_computed)
        if not self.costs.pays(num_found, from_disk=False):
            num_found = 0
        question.answer = Span(num_computed, num_computed + num_found)
        return num_found

    def repeated(self, request_id: RequestId, num_tokens: int, num_computed: int) -> int | None:
        """What was answered last, if the same is asked and it is still there; `None`: it must be looked at anew."""
        # Why: this is asked for all that wait, in every step. Whether loading pays is not asked again.
        question = self._questions.get(request_id)
        if question is None or (answer := question.answer) is None or answer.start != num_computed:
            return None
        is_same = len(question.tokens) == num_tokens - 1 and self._slots.is_there(question.found)
        return answer.stop - num_computed if is_same else None

    def sources(self, request_id: RequestId) -> Sources | None:
        """Where the tokens come from that are being loaded for this request; `None`: not from here."""
        loading = self._loading.get(request_id)
        return None if loading is None else loading.sources

    def allocated(self, request_id: RequestId, tables: Tables, num_external: int) -> bool:
        """The engine gave blocks for what was answered last, or (0) needs none of it; whether a load was ordered."""
        question = self._drop(request_id)
        if question is None or not num_external:
            return False
        assert question.answer is not None, "law: an engine takes what was answered"
        assert num_external == len(question.answer), "law: an engine takes all that was answered, or nothing"
        blocks = question.answer.blocks(self._terms.tokens_per_block)
        slots = question.found.slots[blocks.start : blocks.stop]
        num_disk = len(question.answer & question.from_disk)
        self._loading[request_id] = Loading(slots, Sources(num_external - num_disk, num_disk))
        job = self._jobs.new(lambda _: None)
        self._jobs.order(LoadTokens(job, request_id, question.answer, slots, tables, self._terms.copy_within_s))
        self.counts["loads"] += 1
        self.counts["hit_tokens"] += num_external
        return True

    def loads_over(self, request_ids: Iterable[RequestId], failed: Collection[RequestId] = ()) -> None:
        """Every rank reported these loads over, ours or others'; what failed of ours is not found again.

        A request of which a load has failed, from anywhere, is computed. Why: vLLM (0.32) goes on reserving the blocks
        of a load that failed, so that a second one which needs more than half of all blocks would never be admitted.
        """
        self._failed.update(dict.fromkeys(failed))
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        for request_id in request_ids:
            loading = self._loading.pop(request_id, None)
            if loading is not None and request_id in failed:
                self.counts["loads_failed"] += 1
                self._slots.lose(loading.slots)

    def forget(self, request_id: RequestId) -> None:
        """It will have its tokens from elsewhere."""
        self._begun[request_id] = self._num_resets
        self._drop(request_id)

    # -- a request that ends -------------------------------------------------------------------------------------

    def computed(self, request: CachedRequest, good: Span, tables: Tables) -> JobId | None:
        """A running request has computed these tokens, whole blocks in `tables`; the job for which they are kept.

        For models with windows, which leave their blocks behind before the request ends.
        """
        is_stale = self._begun.get(request.request_id, self._num_resets) != self._num_resets
        return None if is_stale or self._is_resetting else self._save(request, good, tables, is_last=False)

    def finished(self, request: CachedRequest, num_filled: int, tables: Tables) -> JobId | None:
        """A request ended with its first `num_filled` tokens in `tables`; the job for which those blocks are kept."""
        self._drop(request.request_id)
        self._retention(request)
        self._failed.pop(request.request_id, None)
        is_stale = self._begun.pop(request.request_id, self._num_resets) != self._num_resets
        job = None
        if num_filled > 0 and not is_stale and not self._is_resetting and request.request_id not in self._loading:
            job = self._save(request, Span(0, num_filled), tables, is_last=True)
        del self._wishes[request.request_id]
        return job

    def copied_by(self, job: JobId) -> Span:
        """The tokens whose device blocks a save needs."""
        return self._copying[job]

    def _save(self, request: CachedRequest, good: Span, tables: Tables, *, is_last: bool) -> JobId | None:
        scope, terms = request.scope(), self._terms
        if isinstance(scope, str):
            self.counts["unshared"] += is_last
            return None
        good = good & Span(0, terms.capacity)
        if not good:
            return None
        computed = Computed(
            request.request_id, request.all_tokens()[: good.stop], scope, good, tables, self._retention(request),
            self._names(request), request.num_prompt_tokens, is_last,
        )  # fmt: skip
        if not self._saves.is_saving(request.request_id):
            return self._begin_save(computed, None)
        # Why not at once: what is being copied is not found yet, and would be copied once more.
        job = self._jobs.new(lambda _: None)
        self._copying[job] = good
        self._saves.add(job, computed)
        return job

    def _begin_save(self, computed: Computed, job: JobId | None) -> JobId | None:
        """Order the copy of what is lacking, as this job or a new one; None if nothing is, or there is no room."""
        tokens, scope, names = computed.tokens, computed.scope, computed.names
        held = self._slots.held(tokens, scope)
        if self._events is not None and computed.is_last:
            self._events.host_used(tokens, names, held.num_tokens)
        wanted = self._slots.parts.to_save(held.slots, held.num_tokens, computed.good, computed.tables)
        if wanted is None:
            if computed.is_last:
                self.counts["held_already"] += 1
                self._slots.touch(tokens, scope, computed.retention)
            return None
        kept = self._slots.keep(tokens, scope, computed.retention, names)
        if kept is None:
            self.counts["no_room"] += 1
            return None
        return self._copy(kept, wanted, computed, job)

    def _copy(self, kept: Kept, wanted: Wanted, computed: Computed, job: JobId | None) -> JobId:
        write = None
        if computed.is_last:
            absent = self._slots.parts.absent_with(kept.slots, wanted)
            write = self._disk.write(kept, computed.retention, computed.num_prompt_tokens, absent)
        end = partial(self._saved, computed.request_id, kept, wanted, is_written=write is not None)
        if job is None:
            job = self._jobs.new(end)
            self._saves.add(job, computed)
        first = wanted.tokens.start // self._terms.tokens_per_block
        self._copying[job] = wanted.tokens
        within_s = self._terms.copy_within_s
        self._jobs.order(
            SaveBlocks(job, wanted.tokens, kept.slots[first:], computed.tables, within_s, write, wanted.absent), end
        )
        return job

    def _saved(self, request_id: RequestId, kept: Kept, wanted: Wanted, num_tokens: int, *, is_written: bool) -> None:
        num_saved = num_tokens if num_tokens == kept.num_tokens else 0
        self.counts["saves" if num_saved else "saves_failed"] += 1
        self.counts["saved_tokens"] += num_saved
        if is_written:
            # The slots stay held until the disk has them.
            self._slots.publish(kept, num_saved, wanted)
        else:
            self._slots.release(kept, num_saved, wanted)
        self._next_save(request_id)

    def _next_save(self, request_id: RequestId) -> None:
        """The job of a request's first save has ended, and so do those behind it that have nothing to do."""
        self._free(self._saves.first(request_id))
        while (following := self._saves.ended(request_id)) is not None:
            job, computed = following
            if not self._is_resetting and self._begin_save(computed, job) is not None:
                return
            self._jobs.drop(job)
            self._free(job)

    def _free(self, job: JobId) -> None:
        del self._copying[job]
        self._freed.append(job)

    # -- every step ----------------------------------------------------------------------------------------------

    def take_orders(self) -> TierOrders:
        """What the workers have to do from now on; each order is given once."""
        self._slots.refresh()
        return self._jobs.take_orders()

    def answered(self, tallies: Mapping[JobId, Tally]) -> list[JobId]:
        """What ranks answered in a step; the jobs whose device blocks are not needed any more, each told once."""
        self._jobs.answered(tallies)
        if self._is_resetting:
            self._restart()
        freed, self._freed = self._freed, []
        return freed

    def has_work(self) -> bool:
        """Whether the engine should go on stepping without requests, so that orders are given and blocks come free.

        Not for the disk, which may hang.
        """
        return self._jobs.has_orders or bool(self._copying)

    def reset(self) -> None:
        """Forget all that was kept, at once; host slots are used again when the jobs now open have ended.

        What lies on disk is not found any more either: weights may have changed under an unchanged checkpoint. Nor is
        what requests have computed before that go on, unless they begin anew.
        """
        self._is_resetting = True
        self._num_resets += 1
        self._disk.disown(secrets.token_hex(16))
        self._slots.silence()
        if self._events is not None:
            self._events.forget()
        for request_id in list(self._questions):
            self._drop(request_id)
        self.counts["resets"] += 1
        self._restart()

    def _restart(self) -> None:
        if not self._jobs:
            self._slots.restart()
            self._is_resetting = False

    def take_events(self) -> list[TierEvent]:
        """Which blocks came into the tiers and left them since the last call; none unless the terms ask for them."""
        return [] if self._events is None else self._events.take()

    def gauges(self) -> dict[str, float]:
        """Host slots in use and jobs now, and what loading costs."""
        return {"tier_slots_held": self._slots.num_held, "tier_jobs": len(self._jobs), **self.costs.gauges()}

    def take_report(self) -> Report | None:
        """Counters since the last report and present gauges; `None` when nothing changed."""
        return self._reports.take(self.counts, self.gauges())

    def check(self) -> None:
        """Prove all invariants; AssertionError names the broken law."""
        self._slots.check()
        assert self._disk.num_writing <= self._terms.max_written_slots, "law: writes hold no more than their part"
        assert self._jobs or not self._slots.num_held, "law: without jobs no slot is held"

    # -- requests ------------------------------------------------------------------------------------------------

    def _question(self, request: CachedRequest) -> Question | None:
        """What is known of the request; `None` if it takes nothing from here."""
        known = self._questions.get(request.request_id)
        if known is not None and len(known.tokens) == request.num_tokens - 1:
            return known
        self._drop(request.request_id)
        if request.needs_every_token or request.num_tokens < 2 or request.request_id in self._failed:
            return None
        if isinstance(scope := request.scope(), str):
            return None
        tokens = request.all_tokens()[: request.num_tokens - 1]
        found, names = self._slots.find(tokens, scope), self._names(request) if self._terms.has_disk else ()
        question = Question(tokens, scope, self._retention(request), found, names)
        self._questions[request.request_id] = question
        return question

    def _drop(self, request_id: RequestId) -> Question | None:
        """Whatever the disk still tells of it, nobody waits for it."""
        question = self._questions.pop(request_id, None)
        if question is not None:
            question.stage = Stage.OVER
        return question

    def _names(self, request: CachedRequest) -> Sequence[BlockName]:
        """What the engine calls its blocks, if anybody wants to hear."""
        terms = self._terms
        return request.block_names(terms.tokens_per_block, terms.hashes_per_block) if terms.hashes_per_block else ()

    def _retention(self, request: CachedRequest) -> RetentionConfig | None:
        """What the request wishes; its bad hints are logged and counted once."""
        if request.request_id not in self._wishes:
            hints = hints_of(request.arguments)
            for refusal in hints.refused:
                logger.warning("kvferry: request %s: hint refused: %s", request.request_id, refusal)
            self.counts["hints_refused"] += len(hints.refused)
            self._wishes[request.request_id] = hints.config(request.num_prompt_tokens)
        return self._wishes[request.request_id]
