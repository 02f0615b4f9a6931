"""Prompts that are offered before they are computed, under a transfer id that the client chose for both engines.

In:  prefill requests as they come; what each engine step computes; preemptions, settlements, ends.
Out: orders for the workers: so many tokens are computed and lie here; or, the blocks were taken back. Offers at the
     door.
Law: what a step computes is told with the orders of a later one, when it has run; of what was there before the first
     nothing is told until then. Another connector may load such a prefix while the step runs, and say only with the
     step's outcome that it failed: nothing is told before that outcome is known. A prompt that was preempted, whose
     progress went back, or whose blocks turn out to be invalid is given up at once, and offered again only when its
     request has finished.

                 announced: opened -> (step: advanced ...) -> completed
                                   |  preempted, aborted
                                   +--> given up -----------> completed: offered as any other; or forgotten
"""

import logging
from collections.abc import Collection, Container
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from kv_core.ids import RequestId, TransferId
from kv_core.keys import BlockKey
from kv_core.spans import ceil_div
from kv_engine_adapter.handover import HandoverError, chosen_transfer, wants_load, wants_offer
from kv_engine_adapter.orders import AbandonOffer, GrowOffer, Tables
from kv_engine_adapter.ports import Door, RequestView, ScheduledRequest

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Early:
    """One prompt. More than seven fields: what is offered, how far it is, and how it ended at workers and door."""

    transfer_id: TransferId
    prompt_key: BlockKey
    num_tokens: int
    tables: tuple[list[int], ...]
    computed_by_step: int = 0
    """Tokens computed once the last step that we heard of has run."""
    told: int = 0
    """Tokens that the workers were told of."""
    proven_at: int | None = None
    """From which step on it is known whether the prefix that it began with was loaded; None before it has begun."""
    is_given_up: bool = False
    is_settled: bool = False


class EarlyTerms(NamedTuple):
    """How long an offer may wait until its prompt is computed, when its lease begins; how many block tables a request
    has, of which blocks."""

    lease_s: float
    num_groups: int
    tokens_per_block: int
    num_in_flight: int = 1
    """Steps that an engine may have begun, and not heard of the end of, once it has begun another."""


class EarlyOffers:
    """Of one engine."""

    def __init__(self, door: Door, terms: EarlyTerms | None, offered: Container[RequestId]) -> None:
        """`terms` None: nothing is offered early. `offered`: the requests that have finished and are on offer."""
        self._door = door
        self._terms = terms
        self._offered = offered
        self._early: dict[RequestId, _Early] = {}
        self._ended: set[RequestId] = set()
        """Given up for good, and not settled yet."""
        self._growing: list[GrowOffer] = []
        self._abandoned: list[AbandonOffer] = []
        self._step = 0
        self._loads_proven_at = 0
        """The first step that is begun when the outcome of all loads of other connectors so far is known."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._early

    def __len__(self) -> int:
        return len(self._early)

    @property
    def has_orders(self) -> bool:
        return bool(self._growing or self._abandoned)

    def take_orders(self) -> tuple[tuple[GrowOffer, ...], tuple[AbandonOffer, ...]]:
        """What the workers have to hear before their next step; each once."""
        growing, abandoned = tuple(self._growing), tuple(self._abandoned)
        self._growing, self._abandoned = [], []
        return growing, abandoned

    def announced(self, request: RequestView) -> None:
        """A new request, which may wait for its turn: if its client chose an id, it is offered from now on."""
        name = request.request_id
        if self._terms is None or name in self._early or self._is_taken(name) or not _may_be_early(request):
            return
        transfer_id = chosen(request, tells=False)
        prompt_key = request.prompt_key() if transfer_id else ""
        if transfer_id is None or isinstance(prompt_key, str):
            return
        tables: tuple[list[int], ...] = tuple([] for _ in range(self._terms.num_groups))
        self._early[name] = early = _Early(transfer_id, prompt_key, request.num_prompt_tokens, tables)
        self._door.open_offer(transfer_id, name, prompt_key, self._terms.lease_s)
        self._tell(name, early)

    def _is_taken(self, name: RequestId) -> bool:
        """An earlier request of this name is on offer, or its end is still on its way to the workers."""
        is_told = any(name == each.request_id for each in self._abandoned)
        return is_told or name in self._offered or name in self._ended

    def stepped(
        self, scheduled: Collection[ScheduledRequest], preempted: Collection[str], *, may_load: bool = False
    ) -> None:
        """A step will compute this; every step before it has run, or will have when its orders are heard.

        `may_load`: in this step another connector may load what a request begins with.
        """
        self._step += 1
        if may_load and self._terms is not None:
            self._loads_proven_at = self._step + self._terms.num_in_flight
        for request_id in preempted:
            self._give_up(RequestId(request_id), "preempted")
        for each in scheduled:
            early = self._early.get(each.request_id)
            if early is not None and not early.is_given_up:
                self._advance(each, early)

    def blocks_lost(self, blocks: Collection[int]) -> None:
        """A step has ended in which these could not be loaded: the engine computes them again, and what follows."""
        for request_id, early in self._early.items() if blocks else ():
            if not set(blocks).isdisjoint(chain(*early.tables)):
                self._give_up(request_id, "another connector could not load its blocks")

    def _advance(self, each: ScheduledRequest, early: _Early) -> None:
        for table, new in zip(early.tables, each.blocks, strict=True) if each.blocks else ():
            table.extend(new)
        if early.proven_at is None:
            # What is computed here from its first token on depends on nobody's load; a prefix may be anybody's.
            early.proven_at = self._loads_proven_at if each.num_computed else 0
        computed = min(early.computed_by_step, each.num_computed, early.num_tokens)
        early.computed_by_step = each.num_computed + each.num_scheduled
        if computed < early.told:
            self._give_up(each.request_id, f"computed again: told={early.told}, computed now={computed}")
        elif computed > early.told and self._step >= early.proven_at:
            early.told = computed
            self._tell(each.request_id, early)

    def _tell(self, request_id: RequestId, early: _Early) -> None:
        assert self._terms is not None, "law: without terms nothing is early"
        # Why cut: a block for tokens behind the prompt may be gone at the end, if they were guessed and refused.
        num_blocks = ceil_div(early.num_tokens, self._terms.tokens_per_block)
        tables: Tables = tuple(tuple(table[:num_blocks]) for table in early.tables)
        order = request_id, early.transfer_id, early.prompt_key, early.num_tokens, early.told, tables
        self._growing.append(GrowOffer(*order))

    def _give_up(self, request_id: RequestId, reason: str, *, comes_again: bool = True) -> None:
        early = self._early.get(request_id)
        if early is not None and not early.is_given_up:
            early.is_given_up = True
            self._abandoned.append(AbandonOffer(request_id, reason, comes_again=comes_again))

    def reason_of(self, request_id: RequestId, reason: str) -> str:
        """Why an offer serves nobody from now on: one that has waited too long says for what."""
        early = self._early.get(request_id)
        if early is None or reason != "expired":
            return reason
        assert self._terms is not None, "law: without terms nothing is early"
        why = f"max_wait_s={self._terms.lease_s:g} s are over, computed=[0, {early.told}) of [0, {early.num_tokens})"
        logger.warning("kvferry: request %s is offered no more: %s", request_id, why)
        return f"it was not computed in time: {why}"

    def settled(self, request_id: RequestId) -> bool:
        """The door says that an offer serves nobody from now on; whether it is, or was, one of these."""
        early = self._early.get(request_id)
        if early is not None:
            early.is_settled = True
            return True
        is_ended = request_id in self._ended
        self._ended.discard(request_id)
        return is_ended

    def completed(self, request_id: RequestId) -> TransferId | None:
        """The request has finished with its prompt: it is offered as any other, and its lease begins now.

        The id under which the door has it already; None if it has it no more, or never had.
        """
        early = self._early.pop(request_id, None)
        if early is None or (early.is_given_up and early.is_settled):
            return None
        self._door.restart_lease(request_id)
        return early.transfer_id

    def objection(self, request_id: RequestId, prompt_key: BlockKey) -> str:
        """Why a request that has finished cannot be offered; empty if it can."""
        if request_id in self._ended:
            return "an offer of an earlier request of this id is ending"
        early = self._early.get(request_id)
        if early is not None and early.prompt_key != prompt_key:
            return "its prompt is not the one that was offered early"
        if early is not None and early.is_given_up and early.is_settled:
            return "it was given up, and its consumer has gone meanwhile"
        return ""

    def aborted(self, request_id: RequestId) -> None:
        """The request ended without its prompt, or will not be offered."""
        self._give_up(request_id, "aborted", comes_again=False)
        early = self._early.pop(request_id, None)
        if early is not None and not early.is_settled:
            self._ended.add(request_id)
            self._door.withdraw_offer(request_id, "aborted")

    def check(self) -> None:
        """Proves the invariants; for tests."""
        assert self._terms is not None or not (self._early or self.has_orders), "law: without terms nothing is early"
        both = self._ended & self._early.keys()
        assert not both, f"law: what has ended is not early: {both}"
        revoked = {each.request_id for each in self._abandoned}
        for name, early in self._early.items():
            assert 0 <= early.told <= early.num_tokens, f"law: what is told is of the prompt: {name}, {early.told}"
            if not early.is_given_up:
                assert early.told <= early.computed_by_step, f"law: what is told is computed: {name}, {early}"
                assert name not in revoked, f"law: what workers are told to end is given up: {name}"


def _may_be_early(request: RequestView) -> bool:
    """Whether it is a prefill. A request that is loaded ends as one, and is never offered."""
    return wants_offer(request.params) and not wants_load(request.params) and not request.is_rejected


def chosen(request: RequestView, *, tells: bool = True) -> TransferId | None:
    """The id that the client chose; None if it chose none, or something that is none.

    `tells` the log of that: once, when it is offered, and not each time that it is looked at.
    """
    try:
        return chosen_transfer(request.params)
    except HandoverError as error:
        if tells:
            logger.warning("kvferry: request %s is offered under an id of ours: %s", request.request_id, error)
        return None
