"""What an engine hands to a Transceiver, and what it polls for.

Out: Offer, ReceiveOrder (engine to us), with BlockTables; Received, Arrived, Progress (us to engine); Settled (instance
door to engine).
Law: torch-free values. Block ids are of the engine's own pool.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kv_core.ids import Incarnation, RequestId, TransferId
from kv_core.spans import Span
from kv_transfer.reports import TransferReport

Tables = tuple[tuple[int, ...], ...]
"""A block table for each group of layers that share one."""


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Where one rank keeps one sequence of `num_tokens`.

    `by_group` has a table for each group of layers that share one (`PagedCaches.groups`). A table lists the rank's own
    blocks, from the first of the sequence on: all of them, or with context parallelism those dealt to it
    (`plan.context`). `plan.ranges.HOLE` stands for a block that a window has left behind.
    """

    num_tokens: int
    by_group: Tables


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks of one prefill request that peers may read until it is settled.

    It may *grow*: be offered before its prompt is computed. `tables.num_tokens` is the length of the prompt all the
    same, but tables need not list more blocks than `num_computed` tokens take; `Transceiver.advance` tells the rest. In
    a table of layers with a window, blocks that the engine takes back while it computes are holes from the first.

    Several offers may share a transfer id (one client call cut into several requests); equal prompts then have equal
    prompt keys, and an ask is served from any live offer of its (transfer id, prompt key).
    """

    transfer_id: TransferId
    request_id: RequestId
    prompt_key: bytes
    tables: BlockTables
    num_computed: int | None = None
    """None: the prompt is computed. Else the offer grows, and tokens [0, num_computed) are computed so far."""

    @property
    def num_tokens(self) -> int:
        """Tokens that may be asked for: [0, num_tokens). Those not computed yet are waited for."""
        return self.tables.num_tokens


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Tokens of a prompt to be fetched from the instance whose door is at (host, port), into our own blocks.

    `tables.num_tokens` is the length of the prompt, on which both sides' context ranks must agree. `incarnation`, if
    known, is the run of the instance that the order is meant for; `group` the group of its ranks that has the prompt,
    if it has several (attention data parallelism).
    """

    request_id: RequestId
    transfer_id: TransferId
    prompt_key: bytes
    tokens: Span
    tables: BlockTables
    host: str
    port: int
    incarnation: Incarnation | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Where the time of one load went, in seconds; parts overlap, since chunks are pipelined."""

    total_s: float = 0.0
    ask_s: float = 0.0
    """From the order to the last sender's Ready."""
    wire_s: float = 0.0
    """From the first grant to the last Data."""
    scatter_s: float = 0.0
    """Spent verifying and scattering, summed over chunks."""


@dataclass(frozen=True, slots=True)
class Received:
    """The one outcome of one order. When this is reported, nothing of ours touches the order's blocks any more."""

    request_id: RequestId
    ok: bool
    reason: str
    """Empty if ok; else why, with both values where two sides differ."""
    num_bytes: int
    num_chunks: int
    num_senders: int
    times: LoadTimes


class Arrived(NamedTuple):
    """How far an order has come that is not reported yet.

    All that it wants of the tokens before `num_tokens` is verified and in our blocks. It may fail nevertheless.
    """

    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What has ended since the last poll, each request id once; and what orders have come further, if they run.

    `reports` tells of every load and of every session that has sent, whatever became of it.
    """

    sent: tuple[RequestId, ...]
    received: tuple[Received, ...]
    reports: tuple[TransferReport, ...] = ()
    arrived: tuple[Arrived, ...] = ()


class Errand(NamedTuple):
    """What is to be said to the door of another instance about an offer of it.

    `consumer` is unique over all instances, for example "<incarnation>/<request id>". Without a prompt key the offers
    of the whole transfer are meant; without an incarnation whichever run listens there.
    """

    host: str
    port: int
    transfer_id: TransferId
    prompt_key: bytes | None
    consumer: str
    incarnation: Incarnation | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """An offer that serves nobody from now on: `reason` is "released", "expired" or what the engine gave."""

    transfer_id: TransferId
    request_id: RequestId
    reason: str
