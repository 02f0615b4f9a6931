"""All blocks of one attention window: who holds them, which are free, and how they change hands.

In:  runs and tables.
Out: `Window`, whose methods hold, let go, cut and unlink runs and free private blocks.
Law: free blocks are exactly those that nobody holds. In a window that is not sliding a table holds its whole chain, so
     a run that nobody holds has no held descendant and every free block can be taken. In a sliding window spans are
     held, a run loses its first blocks first, and one without any remains as a hole until its last descendant goes.
"""

from array import array
from collections.abc import Callable
from typing import Final, Protocol, Self, TypeVar

from kv_core.config import CacheType, ManagerConfig, WindowConfig
from kv_core.event_log import EventLog
from kv_core.eviction import Expiries, Stamps, victim_queue
from kv_core.keys import Scope
from kv_core.pool import BlockPool
from kv_core.retention import DEFAULT_PRIORITY, MIN_PRIORITY, UNSET, Retention
from kv_core.runs import Run, heal, path
from kv_core.sequence import Sequence, Table
from kv_core.spans import ceil_div
from kv_core.stats import Counters
from kv_core.tiers import CopyLog, Tier
from kv_core.tree import Root, Source, Tree

IN_TRANSIT: Final = -1
"""Tier of a run that was chosen as victim and is not yet dealt with; no tier's queue and no kin counts it."""
_ALL: Final = 1 << 62


class _Ordered(Protocol):
    def __getitem__(self, part: slice, /) -> Self: ...


Parts = TypeVar("Parts", bound=_Ordered)


class Window:
    """See the module. `pins` counts the pins that hold a private block, `orphans` are such blocks without a table.

    `overrides` tells how long private blocks are kept whose request does not decide that.
    """

    __slots__ = (
        "config",
        "copies",
        "counters",
        "events",
        "expiries",
        "is_sliding",
        "now",
        "orphans",
        "overrides",
        "pinned_runs",
        "pins",
        "pool",
        "queues",
        "size",
        "tokens_per_block",
        "tree",
    )

    def __init__(
        self,
        config: ManagerConfig,
        window: WindowConfig,
        copies: CopyLog,
        events: EventLog | None,
        clock_ms: Callable[[], int],
    ) -> None:
        self.config = config
        self.size = window.window
        self.is_sliding = config.is_sliding(window.window)
        self.tokens_per_block = config.tokens_per_block
        self.copies = copies
        self.events = events
        self.pool = BlockPool(window.window, window.num_blocks)
        self.tree = Tree(config.tokens_per_block)
        stamps = Stamps()
        self.queues = [
            victim_queue(config.order, stamps, leaf_first=not self.is_sliding, num_blocks=num_blocks)
            for num_blocks in window.num_blocks
        ]
        self.expiries = Expiries(clock_ms)
        self.counters = Counters()
        self.now = 0
        self.pins: dict[int, int] = {}
        self.orphans: dict[int, Retention] = {}
        self.overrides: dict[int, Retention] = {}
        self.pinned_runs: dict[int, tuple[Run, int]] = {}
        for tier in Tier:
            self.release_empty(self.by_turn(array("i", self.pool.ids_of(tier))), UNSET, tier=tier)

    @property
    def num_free(self) -> int:
        """Free device blocks."""
        return self.queues[0].num_free

    def new_table(self, scope: Scope, width: int | None) -> Table:
        """An empty table that begins at the root of its scope; width None: at one that nobody else finds."""
        root = Root(scope, (None, None, 0)) if width is None else self.tree.root(scope, width)
        root.anchors += 1
        return Table(root)

    def forget(self, table: Table) -> None:
        """An empty table is not used after all."""
        self.lift_anchor(table.root)

    @property
    def is_cross(self) -> bool:
        return self.config.cache_type is CacheType.CROSS

    # Holding runs.

    def hold(self, tail: Run, start: int) -> None:
        """One more holder for the path that ends with `tail`, from ordinal `start` on (a border of runs)."""
        run = tail
        while run.stop > start:
            self._hold_one(run)
            assert run.parent is not None, "law: the path begins at a root"
            run = run.parent

    def _hold_one(self, run: Run) -> None:
        if run.reserved is not None:
            run.reserved = run.expires_at = None
        elif not run.holders:
            self.queues[run.tier].claim(run)
            run.expires_at = None
        run.holders += 1
        run.used = self.now
        run.hot = True

    def by_turn(self, parts: Parts) -> Parts:
        """What is in the order of a table, in the order in which it is given up, and the other way round."""
        return parts if self.is_sliding else parts[::-1]

    def let_go(self, tail: Run, start: int) -> None:
        """One holder less for the path that ends with `tail`."""
        for run in self.by_turn(path(tail, start)):
            self.let_go_one(run)

    def let_go_one(self, run: Run, *, spare: int = 0) -> None:
        """One holder less; of what nobody holds any more, blocks before the ordinal `spare` go first."""
        run.holders -= 1
        assert run.holders >= 0, "law: only what is held is let go"
        if not run.holders:
            self.queues[run.tier].release(run, spare=spare)
            self.expiries.released(run)
            if run.wants:
                self._set_aside(run)

    def reserve(self, run: Run) -> None:
        """The run is wanted: it cannot be chosen as victim until it is held or nobody wants it any more."""
        run.wants += 1
        if run.stamp is not None:
            self._set_aside(run)

    def _set_aside(self, run: Run) -> None:
        run.reserved = run.stamp
        self.queues[run.tier].claim(run)

    def unreserve(self, run: Run) -> None:
        """One request less that wants the run; if nobody holds it either, it is free in its old place."""
        run.wants -= 1
        if not run.wants and run.reserved is not None:
            self.queues[run.tier].restore(run, run.reserved)
            run.reserved = None
            self.expiries.enter(run)

    def keep(self, run: Run, wish: Retention) -> None:
        """Apply what a holder wishes: other holders' stronger wishes prevail (core spec D38)."""
        if wish.priority is None:
            return
        if run.holders > 1:
            wish = Retention(run.priority, run.duration_ms).stronger(wish)
        assert wish.priority is not None, "law: the stronger of two wishes has a priority"
        if self.events is not None and run.priority != wish.priority and run.keys is not None:
            self.events.priority_changed(self.size, run.keys, run.priority, wish.priority)
        run.priority, run.duration_ms = wish.priority, wish.duration_ms

    # The tree.

    def may_serve_in_part(self, source: Source) -> bool:
        """Whether the block may be copied, or may leave the tree for whoever wants it (core spec 4.2, D40)."""
        return self.config.copy_on_partial or (source.is_leaf and not source.run.is_needed)

    def cut(self, run: Run, count: int) -> Run:
        """Cut a run behind its first `count` blocks; the upper part is returned."""
        upper = run.cut(count, front_first=self.is_sliding)
        if upper.stamp is not None:
            for part in (upper, run) if self.is_sliding else (upper,):
                self.queues[part.tier].enter(part)
                self.expiries.enter(part)
        return upper

    def border(self, tail: Run, ordinal: int) -> Run:
        """Make `ordinal` a border of runs on the path that ends with `tail`; the run above the border is returned."""
        run = tail
        while run.start >= ordinal and run.parent is not None:
            run = run.parent
        return self.cut(run, ordinal - run.start) if run.stop > ordinal else run

    def unlink(self, run: Run) -> None:
        """Take a run without children out of the tree, and the holes that only led to it."""
        while True:
            parent = run.parent
            assert parent is not None, "law: what is unlinked is in the tree"
            assert not run.children, "law: a run goes after its children"
            parent.disown(run, run.key())
            run.parent = None
            self.unpark(parent)
            if parent.children or parent.anchors or parent.ids:
                return
            if isinstance(parent, Root):
                self.tree.roots.pop(parent.scope_key, None)
                return
            run = parent

    def remove(self, run: Run) -> None:
        """A run without children leaves the tree; whoever asks has the block from now on."""
        if self.events is not None and run.keys is not None:
            self.events.removed(self.size, run.keys[::-1])
        run.keys = None
        self.unlink(run)

    def unpark(self, run: Run) -> None:
        """The run may have lost its last child on its tier."""
        if run.parked and not run.kin:
            self.queues[run.tier].enter(run)

    def move_anchor(self, table: Table, tail: Run) -> None:
        """The table's path ends elsewhere now. Anchors keep a path in place whose blocks are not held."""
        old = table.tail
        if tail is not old:
            tail.anchors += 1
            table.tail = tail
            self.lift_anchor(old)

    def lift_anchor(self, run: Run) -> None:
        """One table or pin less whose path ends with the run."""
        run.anchors -= 1
        if run.anchors or run.children or run.ids:
            return
        if isinstance(run, Root):
            self.tree.roots.pop(run.scope_key, None)
        elif run.parent is not None:
            self.unlink(run)

    # Private blocks.

    def release_empty(
        self, ids: "array[int]", wish: Retention, *, front: bool = False, tier: int = Tier.DEVICE
    ) -> None:
        """These blocks hold nothing that is wanted; in the order of a table, or in `front` the last goes first."""
        if not ids:
            return
        if self.is_sliding and not front:
            ids = ids[::-1]  # of empty blocks the last goes first everywhere: a long array shrinks at its end only
        run = Run(None, 0, b"", ids)
        run.tier = tier
        run.priority = DEFAULT_PRIORITY if wish.priority is None else wish.priority
        run.duration_ms = wish.duration_ms
        self.queues[tier].release(run, front=front, spare=_ALL if self.is_sliding else 0)
        self.expiries.released(run)

    def release_private(self, ids: "array[int]", wish: Retention, *, front: bool = False) -> None:
        """A table gives up private blocks; those that a pin holds become orphans instead of free."""
        self.forget_overrides(ids)
        if self.pins:
            kept = [block_id for block_id in ids if block_id in self.pins]
            self.orphans.update(dict.fromkeys(kept, wish))
            ids = array("i", [block_id for block_id in ids if block_id not in self.pins])
        self.release_empty(ids, wish, front=front)

    def release_duplicates(self, ids: "array[int]", tier: int = Tier.DEVICE) -> None:
        """Blocks whose content the tree has elsewhere go before all others (core spec D30)."""
        self.release_empty(ids, Retention(MIN_PRIORITY), front=True, tier=tier)

    # Tables.

    def wished(self, sequence: Sequence, table: Table, start: int, stop: int) -> list[tuple[int, int, Retention]]:
        """How long the private blocks of these ordinals are to be kept, in order."""
        wishes = sequence.wished(start, stop)
        if not self.overrides:
            return wishes
        return [
            (ordinal, ordinal + 1, self.overrides.get(table.ids[ordinal - table.start], wish))
            for first, last, wish in wishes
            for ordinal in range(first, last)
        ]

    def forget_overrides(self, ids: "array[int]") -> None:
        """These blocks are private no more."""
        if self.overrides:
            for block_id in ids:
                self.overrides.pop(block_id, None)

    def release_table(self, sequence: Sequence, table: Table) -> None:
        """Give up everything a table holds."""
        spare = 0
        if self.is_sliding:
            # Spare is what no match reads that ends within the last window of what is published. Why not all before
            # the last window: the next prompt may go on a little before the end of this one.
            spare = table.published - ceil_div(2 * self.size, self.tokens_per_block)
            heal(table.tail, table.start)
        self._give_up(sequence, table, table.stop, spare)
        self.lift_anchor(table.tail)

    def detach(self, sequence: Sequence, table: Table, front: int) -> None:
        """Drop all blocks before ordinal `front`."""
        self._give_up(sequence, table, front, 0)
        del table.ids[: front - table.start]
        table.start = front

    def _give_up(self, sequence: Sequence, table: Table, stop: int, spare: int) -> None:
        """Give up what a table holds before ordinal `stop`, the last block first, in a sliding window the first."""
        published = min(stop, table.published)
        runs = path(self.border(table.tail, published), table.start)
        first_private = max(published, table.start)
        if table.partial is not None and stop > published:
            runs.append(table.partial)
            table.partial = None
            first_private += 1
        if not self.is_sliding:
            self._release_private_span(sequence, table, first_private, stop)
        for run in self.by_turn(runs):
            self.let_go_one(run, spare=spare)
        if self.is_sliding:
            self._release_private_span(sequence, table, first_private, stop)

    def _release_private_span(self, sequence: Sequence, table: Table, start: int, stop: int) -> None:
        """Give up the private blocks of these ordinals, each with the priority that was wished."""
        if start < stop:
            for first, last, wish in self.by_turn(self.wished(sequence, table, start, stop)):
                self.release_private(table.private_ids(first, last), wish)

    def refresh(self) -> int:
        """Priorities fall back whose time is over; the number of blocks."""
        num_blocks = 0
        for run in self.expiries.due():
            num_blocks += len(run.ids)
            if self.events is not None and run.keys is not None:
                self.events.priority_changed(self.size, run.live_keys, run.priority, DEFAULT_PRIORITY)
            run.priority, run.duration_ms = DEFAULT_PRIORITY, None
            queue = self.queues[run.tier]
            queue.claim(run)
            queue.release(run, spare=_ALL if self.is_sliding and run.parent is None else 0)
        return num_blocks
