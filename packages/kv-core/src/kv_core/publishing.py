"""Making a request's blocks findable, and taking that back (core spec 4.5).

In:  a table, the tokens that are filled, the keys of the blocks if anybody wants to hear of them.
Out: runs in the tree; `stored` events; the number of blocks that entered.
Law: what a table publishes becomes the continuation of its own path, so that one block has one place in the tree (core
     spec D3). Where equal content is there already, the table takes over the blocks of the tree and gives its own up
     (D30); where it is there on a lower tier or as a hole, the tree takes over the table's blocks.

The cost is that of the new blocks; what was published before is not looked at again (D42).
"""

from array import array
from typing import NamedTuple

from kv_core.events import StoredPiece
from kv_core.keys import BlockKey
from kv_core.pins import pin_runs, pins_own
from kv_core.retention import DEFAULT_PRIORITY, Retention
from kv_core.runs import Run
from kv_core.sequence import Sequence, Table
from kv_core.tiers import Tier
from kv_core.token_log import TokenLog
from kv_core.tree import common_blocks, next_item
from kv_core.window import Window


class Filled(NamedTuple):
    """What may be published: `stop` whole blocks and `tail_tokens` tokens of the block behind them.

    `keys` are those of the whole blocks and of the tail, or None if nobody listens.
    """

    stop: int
    tail_tokens: int
    keys: list[BlockKey] | None


def publish(window: Window, sequence: Sequence, table: Table, filled: Filled) -> int:
    """Enter the table's filled blocks into the tree; how many of them were new there."""
    log = sequence.log
    if log is None or table.stuck or not _anything_new(table, filled):
        return 0
    if table.partial is not None:
        withdraw_partial(window, sequence, table)
    chain = _Chain(window, sequence, table, log, filled.keys)
    chain.bridge(min(table.start, filled.stop))
    for start, stop, wish in window.wished(sequence, table, max(table.published, table.start), filled.stop):
        chain.blocks(start, stop, wish)
    if filled.tail_tokens and table.published == filled.stop and not table.stuck:
        chain.partial(filled)
    chain.flush()
    return chain.num_stored


def _anything_new(table: Table, filled: Filled) -> bool:
    if filled.stop > table.published:
        return True
    if filled.stop < table.published or not filled.tail_tokens or filled.stop < table.start:
        return False
    return table.partial is None or table.num_partial_tokens < filled.tail_tokens


class _Chain:
    """One call of `publish`: the place in the tree where the table's path ends, and what has been stored so far."""

    def __init__(
        self, window: Window, sequence: Sequence, table: Table, log: TokenLog, keys: list[BlockKey] | None
    ) -> None:
        self.window = window
        self.sequence = sequence
        self.table = table
        self.items = log.items
        self.told = log.told
        self.width = log.width
        self.block_bytes = log.block_bytes
        self.keys = keys
        self.num_stored = 0
        self._news: list[Run] = []

    def bridge(self, stop: int) -> None:
        """Blocks before `stop` were dropped before they were published: holes lead over them."""
        table, window = self.table, self.window
        while table.published < stop:
            at = table.published
            last = min(stop, next_item(self.items, at))
            child = self._child(at)
            if child is None:
                child = self._new_run(at, last, array("i"))
            else:
                child = self._cut_to(child, at, last)
            window.move_anchor(table, child)
            table.published = child.stop

    def blocks(self, start: int, stop: int, wish: Retention) -> None:
        """Publish whole blocks that have one wish."""
        table = self.table
        while table.published < stop and not table.stuck:
            at = max(start, table.published)
            last = min(stop, next_item(self.items, at))
            child = self._child(at)
            if child is None:
                self._enter(self._new_run(at, last, table.ids[at - table.start : last - table.start]), wish)
                continue
            child = self._cut_to(child, at, min(last, child.first) if child.num_gone else last)
            if child.is_hole:
                child.ids = table.ids[at - table.start : child.stop - table.start]
                self._enter(child, wish)
            else:
                self.flush()
                self._take_over(child)

    def partial(self, filled: Filled) -> None:
        """Publish the block that is not full; not if an item starts in it, which could not be told from tokens."""
        table, window = self.table, self.window
        at = filled.stop
        if at >= table.stop or at in self.items or at < table.start:
            return
        first = at * self.block_bytes
        tokens = self.told[first : first + filled.tail_tokens * self.width]
        if tokens in table.tail.children:
            return
        run = Run(table.tail, at, tokens, table.ids[at - table.start : at - table.start + 1], self.block_bytes)
        run.is_partial = True
        self._link(run, at + 1)
        [(_, _, wish)] = window.wished(self.sequence, table, at, at + 1)
        run.priority, run.duration_ms = _or_default(wish, run)
        self._hold(run)
        table.partial = run
        self.num_stored += 1
        self._news += pin_runs(window, run) if window.pins else [run]

    def flush(self) -> None:
        """Tell what was stored since the last time, as one chain."""
        events = self.window.events
        if events is not None and self._news:
            parent = self._news[0].parent
            key = parent.keys[-1] if parent is not None and parent.keys else None
            scope = self.table.root.scope_of(self._news)
            events.stored(self.window.size, key, scope, [self._piece(run) for run in self._news])
        self._news = []

    def _piece(self, run: Run) -> StoredPiece:
        keys = tuple(run.keys or ())
        return StoredPiece(keys, run.content(), self.width, self.window.tokens_per_block, run.tier, run.priority)

    def _child(self, at: int) -> Run | None:
        key = self.told[at * self.block_bytes : (at + 1) * self.block_bytes]
        if self.items and at in self.items:
            key += self.items[at]
        return self.table.tail.children.get(key)

    def _cut_to(self, child: Run, at: int, stop: int) -> Run:
        """The part of the child that the table's content shares, as a run of its own."""
        common = common_blocks(child, self.told, at, stop)
        return self.window.cut(child, common) if common < child.count else child

    def _new_run(self, at: int, stop: int, ids: "array[int]") -> Run:
        run = Run(self.table.tail, at, self.told, ids, self.block_bytes)
        run.base = at * self.block_bytes
        run.count = stop - at
        run.stop = stop
        run.settle()
        if self.items and at in self.items:
            run.items = self.items[at]
        self._link(run, stop)
        return run

    def _link(self, run: Run, stop: int) -> None:
        assert run.parent is not None
        run.parent.adopt(run, run.key())
        if self.keys is not None:
            run.keys = self.keys[run.start : stop]

    def _enter(self, run: Run, wish: Retention) -> None:
        """Private blocks of the table have become those of a run."""
        run.priority, run.duration_ms = _or_default(wish, run)
        self.window.queues[0].published(run)
        self._hold(run)
        self.num_stored += run.count
        self._news += pin_runs(self.window, run) if self.window.pins else [run]
        self._advance(run)

    def _hold(self, run: Run) -> None:
        self.window.forget_overrides(run.ids)
        run.holders += 1
        run.used = self.window.now

    def _advance(self, run: Run) -> None:
        self.window.move_anchor(self.table, run)
        self.table.published = run.stop

    def _take_over(self, run: Run) -> None:
        """Equal content is in the tree: one of the two copies goes, but no block of ours that a pin holds."""
        table, window = self.table, self.window
        if window.pins:
            own_ids = table.ids[run.start - table.start : run.stop - table.start]
            pinned = next((at for at, block_id in enumerate(own_ids) if block_id in window.pins), run.count)
            if not pinned:
                table.stuck = True
                return
            run = window.cut(run, pinned) if pinned < run.count else run
        own = slice(run.start - table.start, run.stop - table.start)
        if run.tier == Tier.DEVICE:
            window.forget_overrides(table.ids[own])
            window.release_duplicates(table.ids[own])
            table.ids[own] = run.ids
            window.hold(run, run.start)
        else:
            self._raise_up(run, table.ids[own])
        self._advance(run)

    def _raise_up(self, run: Run, ids: "array[int]") -> None:
        """The tree takes the table's blocks for its own, which lie on a lower tier."""
        window, tier = self.window, run.tier
        window.queues[tier].claim(run)
        run.expires_at = None
        window.release_duplicates(run.ids, tier)
        run.ids = ids
        if window.events is not None:
            for key in run.keys or ():
                window.events.tier_changed(window.size, key, tier, Tier.DEVICE)
        run.move(Tier.DEVICE)
        self._hold(run)


def withdraw_partial(window: Window, sequence: Sequence, table: Table) -> None:
    """The block that was published without being full is private again, before it is published anew (core spec D3)."""
    run = table.partial
    assert run is not None
    make_private(window, sequence, run)
    table.partial = None


def make_private(window: Window, sequence: Sequence, run: Run) -> None:
    """A run of one block that only its table holds leaves the tree; the block is kept for as long as before."""
    [(_, _, wish)] = sequence.wished(run.start, run.start + 1)
    kept = Retention(run.priority, run.duration_ms)
    if kept != (Retention(DEFAULT_PRIORITY) if wish.priority is None else wish):
        window.overrides[run.ids[0]] = kept
    pins_own(window, run)
    window.remove(run)


def _or_default(wish: Retention, run: Run) -> tuple[int, int | None]:
    if wish.priority is None:
        return run.priority, run.duration_ms
    return wish.priority, wish.duration_ms
