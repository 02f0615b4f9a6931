"""What the scheduler side tells the worker side, one value for each engine step.

Out: `StepOrders`, picklable, torch-free, travelling inside the engine's own step metadata.
Law: an order names blocks of this engine only; nothing a client sent is copied into it unchecked.

A request has one block table for each of the model's cache groups, as long as its tokens need; where a window has
left a block behind, a table has a `kv_transfer.plan.ranges.HOLE`.
"""

from dataclasses import dataclass, field

from kv_core.ids import Incarnation, RequestId, TransferId
from kv_core.keys import BlockKey
from kv_core.spans import Span

Tables = tuple[tuple[int, ...], ...]
"""The scheduler's block ids by cache group, and in a group by ordinal."""


@dataclass(frozen=True, slots=True)
class OpenOffer:
    """Blocks of a finished prefill that a peer may read until they are settled; completes an offer that grows."""

    request_id: RequestId
    transfer_id: TransferId
    prompt_key: BlockKey
    num_tokens: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class GrowOffer:
    """A prompt whose first `num_computed` tokens are computed by now; opens its offer, or advances it."""

    request_id: RequestId
    transfer_id: TransferId
    prompt_key: BlockKey
    num_tokens: int
    num_computed: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class AbandonOffer:
    """The blocks of a growing offer are taken back: heard before the step that may use them for something else.

    If it `comes_again` the request lives, and is offered anew when it has finished, or settled.
    """

    request_id: RequestId
    reason: str
    comes_again: bool = False


@dataclass(frozen=True, slots=True)
class SettleOffer:
    """The end of an offer: serve no new reader, report the request as sent once the present ones are done."""

    request_id: RequestId
    transfer_id: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Tokens of a prompt to be fetched from the offer of a peer into our own blocks."""

    request_id: RequestId
    transfer_id: TransferId
    prompt_key: BlockKey
    tokens: Span
    tables: Tables
    host: str
    port: int
    incarnation: Incarnation | None


@dataclass(frozen=True, slots=True)
class StepOrders:
    """Everything one engine step asks of every worker rank."""

    offers: tuple[OpenOffer, ...] = ()
    settled: tuple[SettleOffer, ...] = ()
    loads: tuple[LoadBlocks, ...] = ()
    aborts: tuple[RequestId, ...] = ()
    growing: tuple[GrowOffer, ...] = ()
    abandoned: tuple[AbandonOffer, ...] = ()


@dataclass(slots=True)
class Pending:
    """Orders of the scheduler side, gathered since the last engine step."""

    offers: list[OpenOffer] = field(default_factory=list)
    loads: list[LoadBlocks] = field(default_factory=list)
    aborts: list[RequestId] = field(default_factory=list)
