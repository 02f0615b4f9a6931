"""All admitted requests over all windows of a manager: how they come in, grow, are published and shrink.

In:  requests and lengths.
Out: changed tables in every window, or nothing changed in any.
Law: all windows are asked before one is changed; they agree on one prepopulated length (core spec D4). What is counted
     was admitted: a refused request leaves no trace.
"""

from collections.abc import Callable, Iterator

from kv_core import growing
from kv_core.admitting import Reservation, cancel, carry_out, reserve
from kv_core.config import CacheType, ManagerConfig
from kv_core.errors import CallerError, CapacityError
from kv_core.event_log import EventLog
from kv_core.ids import BlockOrdinal, RequestId
from kv_core.keys import BlockKey, Scope, chain_keys, scope_key
from kv_core.planning import Plan, agreed, decide, match
from kv_core.publishing import Filled, publish
from kv_core.request import Admission, ExternalCache, MissingPrefix, Probe, Request, RequestStats
from kv_core.sequence import Sequence, Table
from kv_core.spans import Span, ceil_div
from kv_core.tiers import CopyLog
from kv_core.token_log import PLAIN_BYTES, TokenLog
from kv_core.window import Window


class Registry:
    """See the module. `external` supplies what is cached elsewhere."""

    def __init__(self, config: ManagerConfig, clock_ms: Callable[[], int], external: ExternalCache | None) -> None:
        self.config = config
        self.copies = CopyLog()
        self.events = EventLog(config.event_buffer_size, config.rank) if config.event_buffer_size else None
        self.windows = [Window(config, window, self.copies, self.events, clock_ms) for window in config.windows]
        self.sizes = {window.size: at for at, window in enumerate(self.windows)}
        self.sequences: dict[RequestId, Sequence] = {}
        self.num_input = self.num_cached = self.num_external = 0
        self._external = external
        self._now = 0

    # Finding.

    def find(self, request_id: RequestId) -> Sequence:
        """The request. CallerError if there is none of this id."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            raise CallerError(f"no such request: {request_id!r}")
        return sequence

    def window(self, size: int) -> Window:
        """The window of this length. CallerError if there is none."""
        if size not in self.sizes:
            raise CallerError(f"no such window: ours={list(self.sizes)}, theirs={size}")
        return self.windows[self.sizes[size]]

    def pairs(self, sequence: Sequence) -> list[tuple[Window, Table]]:
        """Each window with the request's table."""
        return list(zip(self.windows, sequence.tables, strict=True))

    def tables(self, window: Window) -> Iterator[tuple[Sequence, Table]]:
        """All requests with their tables of one window."""
        at = self.sizes[window.size]
        return ((sequence, sequence.tables[at]) for sequence in self.sequences.values())

    # Coming in.

    def begin(self, request: Request, beam_width: int = 1) -> Sequence:
        """The request as it would be held, with empty tables; ends with `admit` or `forget`."""
        config = self.config
        log: TokenLog | None = None
        if request.tokens is not None and config.reuse:
            log = TokenLog(request.tokens, request.scope, config.tokens_per_block, request.extra_ids)
        width = None if log is None else log.width
        tables = [window.new_table(request.scope, width) for window in self.windows]
        sequence = Sequence(request, beam_width, log, tables)
        if config.reuse:
            sequence.wish(config.tokens_per_block)
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """The request is not admitted."""
        for window, table in self.pairs(sequence):
            window.forget(table)

    def check_capacity(self, request: Request, beam_width: int) -> None:
        """Raise what admitting the request could never do right."""
        config = self.config
        if request.request_id in self.sequences:
            raise CallerError(f"this request is present: {request.request_id!r}")
        if not 1 <= beam_width <= config.max_beam_width:
            raise CallerError(f"beams: ours=1..{config.max_beam_width}, theirs={beam_width}")
        length = request.length + request.max_new_tokens
        if length > config.max_sequence_length:
            raise CapacityError(f"too many tokens: ours={config.max_sequence_length}, theirs={length}")
        for window in self.windows:
            tokens = min(length, window.size) if window.is_sliding else length
            _check_blocks(window, ceil_div(tokens, config.tokens_per_block))

    def admit(self, sequence: Sequence) -> Admission | None:
        """Give the request its blocks in all windows; None, and forgotten, if there are not enough now."""
        plans = decide(self.windows, sequence, _usable(sequence))
        for window, plan in zip(self.windows, plans, strict=True):
            if not plan.fits:
                self.forget(sequence)
                _check_blocks(window, plan.num_needed)  # a sliding window takes what of the prompt is not cached
                return None
        num_cached = plans[0].num_cached
        num_external = 0 if self._external is None else self._num_from_outside(self._external, sequence, num_cached)
        return self._commit(sequence, plans, num_cached, num_external)

    def admit_all(self, requests: list[Request]) -> list[Admission | None]:
        """Admit in turn, while what the later ones found is out of the victims' way (core spec D36)."""
        waiting: list[tuple[Sequence, list[Reservation]]] = []
        admissions: list[Admission | None] = []
        try:
            for request in requests:
                sequence = self.begin(request)
                plans = decide(self.windows, sequence, _usable(sequence))
                found = [reserve(window, plan) for window, plan in zip(self.windows, plans, strict=True)]
                waiting.insert(0, (sequence, found))
            while waiting:
                sequence, found = waiting.pop()
                self._cancel(found)
                admissions.append(self.admit(sequence))
        finally:  # an error of the external cache, or in what a request says
            for sequence, found in waiting:
                self._cancel(found)
                self.forget(sequence)
        return admissions

    def _cancel(self, found: list[Reservation]) -> None:
        for window, reserved in zip(self.windows, found, strict=True):
            cancel(window, reserved)

    def _num_from_outside(self, external: ExternalCache, sequence: Sequence, num_cached: int) -> int:
        if sequence.log is None or sequence.request.is_dummy:
            return 0
        try:
            matched = external.num_matched_tokens(sequence.request, num_cached)
        except BaseException:
            self.forget(sequence)
            raise
        return max(0, min(matched, sequence.num_tokens - 1 - num_cached))

    def _commit(self, sequence: Sequence, plans: list[Plan], num_cached: int, num_external: int) -> Admission:
        allocated = fresh = reused = missed = 0
        self._now += 1
        for window, table, plan in zip(self.windows, sequence.tables, plans, strict=True):
            window.now = self._now
            counters = window.counters
            allocated -= counters.allocated
            fresh -= counters.fresh
            carry_out(window, sequence, table, plan)
            allocated += counters.allocated
            fresh += counters.fresh
            reused += plan.num_reused
            missed += plan.num_missed
        if self.events is not None and num_cached:
            sequence.keys = _path_keys(sequence.tables[0])
        self.sequences[sequence.request_id] = sequence
        sequence.room = self.room(sequence)
        sequence.num_published = num_cached // self.config.tokens_per_block
        self.num_input += sequence.num_tokens
        self.num_cached += num_cached
        self.num_external += num_external
        return Admission(num_cached, num_external, RequestStats(allocated, fresh, reused, missed))

    def probe(self, request: Request, beam_width: int) -> Probe:
        """What admitting the request would find and cost."""
        self.check_capacity(request, beam_width)
        sequence = self.begin(request, beam_width)
        plans = decide(self.windows, sequence, _usable(sequence))
        self.forget(sequence)
        by_size = dict(zip(self.sizes, plans, strict=True))
        return Probe(
            plans[0].num_cached,
            {size: plan.num_needed for size, plan in by_size.items()},
            {size: plan.num_available for size, plan in by_size.items()},
            {size: plan.num_needed + plan.num_claimed for size, plan in by_size.items()},
        )

    def missing_prefix(self, request: Request) -> MissingPrefix | None:
        """The prompt up to its first whole block that some window does not have."""
        sequence = self.begin(request)
        log, size = sequence.log, self.config.tokens_per_block
        whole = request.length // size * size
        found = [match(window, sequence, table, whole) for window, table in self.pairs(sequence)]
        stop = agreed(self.windows, found, whole) // size * size + size
        self.forget(sequence)
        if log is None or stop > whole:
            return None
        extras = tuple(item for item in request.scope.extras if item[1] < stop)
        scope = Scope(request.scope.lora, request.scope.salt, extras)
        return MissingPrefix(scope, stop, log.content(0, stop))

    # Growing and shrinking.

    def room(self, sequence: Sequence) -> int:
        """The length up to which no window has anything to do."""
        if self.config.cache_type is CacheType.CROSS:
            return sequence.num_tokens
        room = self.config.max_sequence_length
        for window, table in zip(self.windows, sequence.tables, strict=True):
            room = min(room, growing.room(window, table))
        return room

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for more tokens where windows have to act; False if there are not enough blocks."""
        length = sequence.num_tokens + num_tokens
        if num_tokens < 1 or self.config.cache_type is CacheType.CROSS:
            raise CallerError(f"no such growth: num_tokens={num_tokens}, cache={self.config.cache_type.value}")
        if length > self.config.max_sequence_length:
            raise CapacityError(f"too many tokens: ours={self.config.max_sequence_length}, theirs={length}")
        for window, table in self.pairs(sequence):
            if not growing.can_grow(window, sequence, table, length):
                return False
        for window, table in self.pairs(sequence):
            self._publish_what_goes(window, sequence, table, growing.front(window, table, sequence.num_tokens))
            growing.grow(window, sequence, table, length)
        sequence.num_tokens = length
        sequence.room = self.room(sequence)
        return True

    def _publish_what_goes(self, window: Window, sequence: Sequence, table: Table, stop: int) -> None:
        """Blocks that a sliding window is about to drop become findable first, as far as is known what they hold."""
        log = sequence.log
        if log is None or sequence.request.is_dummy or sequence.beam_width > 1:
            return
        stop = min(stop, len(log) // self.config.tokens_per_block)
        if stop > max(table.published, table.start):
            publish(window, sequence, table, Filled(stop, 0, self._filled_keys(sequence, log, stop, 0)))

    def rewind(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take tokens back in all windows; False if a block is needed for a copy and there is none."""
        length = sequence.num_tokens - num_tokens
        if num_tokens < 0 or length < 1 or sequence.beam_width > 1:
            beams = sequence.beam_width
            raise CallerError(f"no such rewind: tokens={sequence.num_tokens}, theirs={num_tokens}, beams={beams}")
        for window, table in self.pairs(sequence):
            growing.check_rewind(window, table, length)
        if not all(growing.can_shrink(window, table, length) for window, table in self.pairs(sequence)):
            return False
        for window, table in self.pairs(sequence):
            growing.shrink(window, sequence, table, length)
        sequence.num_tokens = length
        sequence.forget_behind(length, self.config.tokens_per_block)
        sequence.room = self.room(sequence)
        return True

    def make_writable(self, sequence: Sequence, ordinal: BlockOrdinal) -> bool:
        """Copies for every beam from a block on, in all windows; False if there are not enough blocks."""
        pairs = self.pairs(sequence)
        if any(not table.start <= ordinal < table.stop for _, table in pairs):
            raise CallerError(f"no such block: ours={[(t.start, t.stop) for _, t in pairs]}, theirs={ordinal}")
        if any(growing.num_to_separate(sequence, table, ordinal) > window.num_free for window, table in pairs):
            return False
        for window, table in pairs:
            growing.separate(window, sequence, table, ordinal)
        sequence.num_published = min(sequence.num_published, ordinal)
        return True

    # Publishing.

    def publish(self, sequence: Sequence, num_filled: int | None, *, partial: bool) -> int:
        """Enter what is filled into the trees; how many blocks were new there."""
        log, size = sequence.log, self.config.tokens_per_block
        if log is None or sequence.request.is_dummy:
            return 0
        num_filled = len(log) - 1 if num_filled is None else min(num_filled, len(log))
        stop, tail_tokens = divmod(max(0, num_filled), size)
        if not partial and stop <= sequence.num_published:
            return 0
        table = sequence.tables[0]
        last = min(ours.shared for ours in sequence.tables) if sequence.beam_width > 1 else table.stop
        if stop >= last or sequence.beam_width > 1:
            stop, tail_tokens = min(stop, last), 0
        sequence.num_published = max(sequence.num_published, stop)
        filled = Filled(stop, tail_tokens if partial else 0, self._filled_keys(sequence, log, stop, tail_tokens))
        num_stored = 0
        for window, table in zip(self.windows, sequence.tables, strict=True):
            num_stored += publish(window, sequence, table, filled)
        return num_stored

    def _filled_keys(self, sequence: Sequence, log: TokenLog, stop: int, tail_tokens: int) -> list[BlockKey] | None:
        if self.events is None:
            return None
        keys = self.keys(sequence, log, stop)
        if not tail_tokens:
            return keys
        num_filled = stop * self.config.tokens_per_block + tail_tokens
        return keys[:stop] + self._chain(sequence, log, num_filled, Span(stop, stop + 1))

    def keys(self, sequence: Sequence, log: TokenLog, stop: int) -> list[BlockKey]:
        """The keys of at least the first `stop` blocks; those that are missing are made."""
        if len(sequence.keys) < stop:
            sequence.keys += self._chain(sequence, log, len(log), Span(len(sequence.keys), stop))
        return sequence.keys

    def _chain(self, sequence: Sequence, log: TokenLog, num_tokens: int, ordinals: Span) -> list[BlockKey]:
        parent = sequence.keys[ordinals.start - 1] if ordinals.start else scope_key(sequence.request.scope)
        size = self.config.tokens_per_block
        content = log.content(ordinals.start * size, min(num_tokens, ordinals.stop * size))
        return chain_keys(parent, content, size * log.width, ordinals, log.items, plain=log.width == PLAIN_BYTES)


def _usable(sequence: Sequence) -> int:
    """How many prompt tokens may be found: at least one is left to compute."""
    return 0 if sequence.log is None else sequence.num_tokens - 1


def _path_keys(table: Table) -> list[BlockKey]:
    """The keys of all blocks up to the end of the table's path, dropped ones included."""
    keys: list[BlockKey] = []
    run = table.tail
    while run.parent is not None:
        keys[:0] = run.keys or ()
        run = run.parent
    return keys


def _check_blocks(window: Window, needed: int) -> None:
    present = window.pool.num_blocks[0]
    if needed > present:
        raise CapacityError(f"too many blocks: ours={present}, theirs={needed}, window={window.size}")
