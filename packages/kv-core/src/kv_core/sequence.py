"""One admitted request: its tokens and, for each window, the table of its blocks.

In:  the request, the blocks that windows give and take.
Out: `Sequence`, `Table`.
Law: the first `published` ordinals of a table that are not dropped are in the tree, as the path that ends at `tail`;
     the others are private. Dropped ordinals are a prefix.

    ordinal   0 ........ start ........ published ........ stop
              dropped    in the tree    private
"""

from array import array

from kv_core.ids import BlockId, RequestId
from kv_core.keys import BlockKey, Scope
from kv_core.request import Request
from kv_core.retention import UNSET, Retention
from kv_core.runs import Run
from kv_core.spans import Span, ceil_div
from kv_core.token_log import TokenLog
from kv_core.tree import Root


class Table:
    """The blocks of one request in one window.

    `ids` are those of beam 0 from `start` on; beam b differs from ordinal `shared` on, where it has `others[b - 1]`.
    `partial` is the run of the block behind `published` if it was published without being full. A table is `stuck`
    if equal content was in the tree but it could not take that over; it publishes no more.
    """

    __slots__ = ("ids", "others", "partial", "published", "root", "shared", "start", "stuck", "tail")

    def __init__(self, root: Root) -> None:
        self.root = root
        self.tail: Run = root
        self.start = 0
        self.published = 0
        self.ids = array("i")
        self.others: list[array[int]] = []
        self.shared = 0
        self.partial: Run | None = None
        self.stuck = False

    @property
    def stop(self) -> int:
        """The ordinal behind the last block."""
        return self.start + len(self.ids)

    @property
    def num_partial_tokens(self) -> int:
        """Tokens of the published block that is not full."""
        return 0 if self.partial is None else len(self.partial.tokens) // self.root.width

    def private_ids(self, start: int, stop: int) -> "array[int]":
        """Blocks of ordinals `start <= i < stop`, of all beams, by ordinal and then by beam."""
        own = self.ids[start - self.start : stop - self.start]
        if not self.others or stop <= self.shared:
            return own
        alike = max(0, self.shared - start)
        beams = [own[alike:], *(other[max(0, start - self.shared) : stop - self.shared] for other in self.others)]
        mixed = array("i", bytes(own.itemsize * len(beams) * len(beams[0])))
        for beam, ids in enumerate(beams):
            mixed[beam :: len(beams)] = ids
        return own[:alike] + mixed

    def beam_ids(self, beam: int) -> list[BlockId | None]:
        """The whole table of one beam; None where blocks were dropped."""
        ids = self.ids if beam == 0 else self.ids[: self.shared - self.start] + self.others[beam - 1]
        found: list[BlockId | None] = [None] * self.start
        found += ids.tolist()  # type: ignore[arg-type]
        return found


class Sequence:
    """One request in the manager. `room` tokens fit before any window has to act; `num_published` blocks were offered
    to the trees; `keys` of the first blocks have been made.
    """

    __slots__ = (
        "beam_width",
        "keys",
        "log",
        "num_published",
        "num_tokens",
        "request",
        "request_id",
        "room",
        "scope",
        "tables",
        "wishes",
    )

    def __init__(self, request: Request, beam_width: int, log: TokenLog | None, tables: list[Table]) -> None:
        self.request = request
        self.request_id: RequestId = request.request_id
        self.scope: Scope = request.scope
        self.beam_width = beam_width
        self.log = log
        self.num_tokens = request.length
        self.tables = tables
        self.room = 0
        self.num_published = 0
        self.keys: list[BlockKey] = []
        self.wishes: tuple[tuple[Span, Retention], ...] | None = None

    def wish(self, tokens_per_block: int) -> None:
        """Work out how long the request wants its blocks to be kept."""
        config = self.request.retention
        if config is not None:
            runs = config.runs(tokens_per_block, self.request.length)
            end = ceil_div(self.request.length, tokens_per_block)
            self.wishes = (*runs, (Span(end, 1 << 62), config.decode))

    def wished(self, start: int, stop: int) -> list[tuple[int, int, Retention]]:
        """The wishes for ordinals `start <= i < stop`, in order."""
        if self.wishes is None:
            return [(start, stop, UNSET)] if start < stop else []
        return [
            (max(start, span.start), min(stop, span.stop), wish)
            for span, wish in self.wishes
            if span.start < stop and span.stop > start
        ]

    def forget_behind(self, num_tokens: int, tokens_per_block: int) -> None:
        """Tokens behind the first `num_tokens` never were."""
        if self.log is not None:
            self.log.truncate(num_tokens)
        del self.keys[num_tokens // tokens_per_block :]
        self.num_published = min(self.num_published, num_tokens // tokens_per_block)
