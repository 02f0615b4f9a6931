"""Looking at a window as it is: single blocks, token paths, counters, and the proof that its laws hold.

In:  a window, and the tables and pins that hold its blocks.
Out: values; `check_window` raises AssertionError with the law that is broken.
Law: nothing here changes what can be observed, but for `set_priority`. All but `lookup` cost what the tree is large.
"""

from collections import Counter
from collections.abc import Iterable

from kv_core.errors import CallerError
from kv_core.events import Event, Stored, StoredPiece
from kv_core.ids import BlockId, BlockOrdinal
from kv_core.keys import BlockKey, chain_keys, scope_key
from kv_core.pins import Held
from kv_core.request import BlockView, Lookup
from kv_core.retention import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY, Retention
from kv_core.runs import Run, path
from kv_core.sequence import Sequence, Table
from kv_core.spans import Span
from kv_core.stats import TierStats, WindowStats
from kv_core.tiers import Tier
from kv_core.token_log import PLAIN_BYTES, TokenLog
from kv_core.tree import Root
from kv_core.window import Window


def lookup(window: Window, root: Run, log: TokenLog) -> Lookup:
    """The cached blocks of a token path: whole ones, and the last one in part (core spec D9)."""
    found = window.tree.match(root, log, len(log), lambda _: True)
    num_tokens = found.num_blocks * window.tokens_per_block
    block_ids: list[BlockId | None] = []
    run, inside = found.run, found.inside
    while run.parent is not None:
        ids = [*[None] * run.num_gone, *(BlockId(block_id) for block_id in run.ids)]
        block_ids = [*ids[:inside], *block_ids]
        run = run.parent
        inside = run.count
    if found.source is not None:
        num_tokens += found.source.num_tokens
        block_ids.append(BlockId(found.source.block_id))
    return Lookup(num_tokens, tuple(block_ids))


def find(window: Window, block_id: BlockId) -> tuple[Run, int] | None:
    """The run of the tree that has the block, and where in it."""
    for run in window.tree.runs():
        if block_id in run.ids:
            return run, run.num_gone + run.ids.index(block_id)
    return None


def inspect(window: Window, block_id: BlockId, tables: Iterable[tuple[Sequence, Table]]) -> BlockView:
    """One block as it is now."""
    place = window.pool.place(block_id)
    found = find(window, block_id)
    if found is not None:
        run, inside = found
        return BlockView(
            place.tier,
            place.slot,
            run.priority,
            run.holders > 0,
            True,
            BlockOrdinal(run.start + inside),
            _before(*found),
        )
    for sequence, table in tables:
        for start, stop, wish in window.wished(sequence, table, max(table.published, table.start), table.stop):
            if block_id in table.private_ids(start, stop):
                priority = DEFAULT_PRIORITY if wish.priority is None else wish.priority
                return BlockView(place.tier, place.slot, priority, True, False, None, None)
    for run in window.queues[place.tier]:
        if block_id in run.ids:
            return BlockView(place.tier, place.slot, run.priority, False, False, None, None)
    return BlockView(place.tier, place.slot, window.orphans[block_id].priority or 0, True, False, None, None)


def set_priority(window: Window, block_id: BlockId, priority: int, tables: Iterable[tuple[Sequence, Table]]) -> bool:
    """Write the priority of a block that is published or some request's; False if it is neither."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise CallerError(f"priority outside of {MIN_PRIORITY}..{MAX_PRIORITY}: priority={priority}")
    found = find(window, block_id)
    if found is None:
        if any(block_id in table.ids for _, table in tables):
            window.overrides[block_id] = Retention(priority)
            return True
        return False
    run = isolate(window, *found)
    if window.events is not None and run.keys is not None and run.priority != priority:
        window.events.priority_changed(window.size, run.keys, run.priority, priority)
    run.priority = priority
    return True


def isolate(window: Window, run: Run, inside: int) -> Run:
    """One block of a run as a run of its own."""
    if inside + 1 < run.count:
        run = window.cut(run, inside + 1)
    if inside:
        window.cut(run, inside)
    return run


def snapshot(window: Window) -> list[Event]:
    """The whole tree as events, parents before their children."""
    events: list[Event] = []
    for run in window.tree.runs():
        if run.is_hole or run.parent is None or run.keys is None:
            continue
        root = run.parent
        while not isinstance(root, Root):
            assert root.parent is not None, "law: chains begin at roots"
            root = root.parent
        before = [*(run.parent.keys or ()), *run.keys[: run.num_gone]]
        parent = before[-1] if before else None
        content = run.content()[run.num_gone * run.block_bytes :]
        piece = StoredPiece(tuple(run.live_keys), content, root.width, window.tokens_per_block, run.tier, run.priority)
        events.append(Event(0, window.size, Stored(parent, root.scope_of([run]), (piece,))))
    return events


def window_stats(window: Window) -> WindowStats:
    """Occupancy and totals."""
    counters = window.counters
    tiers = tuple(
        TierStats(num_blocks, queue.num_free, num_hit_tokens)
        for num_blocks, queue, num_hit_tokens in zip(
            window.pool.num_blocks, window.queues, counters.hit_tokens, strict=True
        )
    )
    return WindowStats(
        window=window.size,
        tiers=tiers,
        num_allocated=counters.allocated,
        num_fresh=counters.fresh,
        num_reused=counters.reused,
        num_missed=counters.missed,
        num_onboarded=counters.onboarded,
        num_offloaded=counters.offloaded,
        num_copied=counters.copied,
        num_dropped=counters.dropped,
    )


def _before(run: Run, inside: int) -> BlockId | None:
    if inside:
        return BlockId(run.ids[inside - 1 - run.num_gone]) if inside > run.num_gone else None
    parent = run.parent
    return BlockId(parent.ids[-1]) if parent is not None and parent.ids else None


# The laws.


def check_window(window: Window, tables: list[tuple[Sequence, Table]], pins: list[Held]) -> None:
    """Prove every law of core spec 16.6 and of docs/decisions/0003 that concerns one window."""
    window.pool.check()
    runs = list(window.tree.runs())
    _check_links(window, runs)
    _check_keys(window)
    _check_holders(window, runs, tables, pins)
    empty = [run for queue in window.queues for run in queue if run.parent is None]
    _check_places(window, runs, empty, tables)
    _check_queues(window, runs, empty)
    for sequence, table in tables:
        _check_table(table)
        _check_content(sequence, table)


def _check_links(window: Window, runs: list[Run]) -> None:
    roots: list[Run] = list(window.tree.roots.values())
    assert all(root.children or root.anchors for root in roots), "law: a root is needed"
    for parent in [*roots, *runs]:
        for key, child in parent.children.items():
            assert child.parent is parent, "law: a child knows its parent"
            assert key == child.key(), "law: a child begins with the key it is known by"
            assert child.start == parent.stop, "law: a child starts where its parent stops"
        assert parent.kin == sum(child.tier == parent.tier for child in parent.children.values()), "law: kin"
        assert parent.order is None or parent.order == sorted(parent.children), "law: siblings are in order"
    for run in runs:
        assert run.count >= 1, "law: a run has blocks"
        assert not run.wants, "law: reservations end with the call that made them"
        assert run.reserved is None, "law: reservations end with the call that made them"
        assert not run.num_gone or window.is_sliding, "law: only a sliding window forgets the first blocks of a run"
        assert not run.num_gone or not run.holders, "law: what is held is there"
        assert not (run.is_partial and (run.children or run.count > 1)), "law: inner blocks are full"
        assert not run.items or run.count == 1, "law: items start in a run of one block"
        assert run.keys is None or len(run.keys) == run.count, "law: a key a block"
        assert (run.keys is None) == (window.events is None), "law: keys are kept when somebody listens"
        if run.is_partial:
            assert 0 < len(run.tokens) < run.block_bytes, "law: a block that is not full has tokens"
        else:
            assert len(run.content()) == run.count * run.block_bytes, "law: a run has its tokens"
            assert len(run.tokens) * 2 <= run.count * run.block_bytes * 3, "law: at most half as much again is kept"
        if run.is_hole:
            assert run.children or run.anchors, "law: a hole leads somewhere"
            assert run.stamp is None, "law: a hole is not free"
            assert not run.holders, "law: nobody holds a hole"
        elif not window.is_sliding and run.parent is not None and not isinstance(run.parent, Root):
            assert run.parent.tier <= run.tier, "law: a parent is never on a lower tier than its children"
            assert run.parent.holders >= run.holders, "law: who holds a block holds those before it"


def _check_keys(window: Window) -> None:
    """Each key is that of the block's content behind its parent's key (core spec 16.6, law 5)."""
    for root in window.tree.roots.values() if window.events is not None else ():
        waiting: list[tuple[Run, BlockKey]] = [(child, scope_key(root.scope)) for child in root.children.values()]
        while waiting:
            run, parent = waiting.pop()
            items = {run.start: run.items} if run.items else {}
            plain = root.width == PLAIN_BYTES
            keys = chain_keys(parent, run.content(), run.block_bytes, Span(run.start, run.stop), items, plain=plain)
            assert run.keys == keys, "law: a key is that of content and parent"
            waiting += [(child, keys[-1]) for child in run.children.values()]


def _check_holders(window: Window, runs: list[Run], tables: list[tuple[Sequence, Table]], pins: list[Held]) -> None:
    holders: Counter[int] = Counter()
    anchors: Counter[int] = Counter()
    for tail, start in [(table.tail, table.start) for _, table in tables] + [(held.tail, held.start) for held in pins]:
        anchors[id(tail)] += 1
        run = tail
        while run.stop > start:
            assert run.start >= start, "law: what is held ends at borders of runs"
            holders[id(run)] += 1
            assert run.parent is not None, "law: a path begins at a root"
            run = run.parent
    for _, table in tables:
        if table.partial is not None:
            holders[id(table.partial)] += 1
    for run, num_pins in window.pinned_runs.values():
        holders[id(run)] += num_pins
    for run in runs:
        assert run.holders == holders[id(run)], "law: holders are tables and pins"
        assert run.anchors == anchors[id(run)], "law: anchors are tables and pins that end here"
        assert not run.holders or run.tier == Tier.DEVICE, "law: what is held is on the device"


def _check_places(window: Window, runs: list[Run], empty: list[Run], tables: list[tuple[Sequence, Table]]) -> None:
    """Every block is in exactly one place: a run of the tree, an empty run, one table, or an orphan of pins."""
    places: Counter[int] = Counter()
    for run in [*runs, *empty]:
        places.update(run.ids)
        for block_id in run.ids:
            assert window.pool.place(block_id).tier == run.tier, "law: a run is on one tier"
    for _, table in tables:
        first = max(table.published, table.start) + (table.partial is not None)
        private = table.private_ids(first, table.stop)
        places.update(private)
        for block_id in private:
            assert window.pool.place(block_id).tier == Tier.DEVICE, "law: what is held is on the device"
    places.update(window.orphans.keys())
    assert places == Counter(range(sum(window.pool.num_blocks))), "law: every block is in one place"
    assert all(block_id in window.pins for block_id in window.orphans), "law: orphans are pinned"


def _check_queues(window: Window, runs: list[Run], empty: list[Run]) -> None:
    free = [run for run in [*runs, *empty] if not run.holders and not run.is_hole]
    for tier, queue in enumerate(window.queues):
        ours = [run for run in free if run.tier == tier]
        assert queue.num_free == sum(len(run.ids) for run in ours), "law: free blocks are those that nobody holds"
        queued = {id(run) for run in queue}
        for run in ours:
            assert run.stamp is not None, "law: a free run has a place in the order"
            assert run.rank % 2 == (run.first >= run.spare), "law: spare blocks go before others"
            assert run.parked != (id(run) in queued), "law: a free run is parked or in the heap"
            assert not run.parked or run.kin, "law: a run is parked because of its children"
    for run in runs:
        assert not run.holders or (run.stamp is None and not run.parked), "law: what is held is in no queue"


def _check_table(table: Table) -> None:
    assert 0 <= table.start <= table.stop, "law: a table is a span of ordinals"
    assert table.published <= table.stop, "law: only blocks that there are are published"
    run, stop = table.tail, table.published
    assert run.stop == stop, "law: a path ends where publishing ended"
    while run.stop > table.start:
        assert table.ids[run.start - table.start : run.stop - table.start] == run.ids, (
            "law: published ids are the path's"
        )
        assert run.parent is not None, "law: a path begins at a root"
        run = run.parent
    if table.partial is not None:
        assert table.partial.parent is table.tail, "law: the block that is not full follows the path"
        assert table.partial.ids[0] == table.ids[table.published - table.start], "law: and is the table's"


def _check_content(sequence: Sequence, table: Table) -> None:
    """What a request published is what it told, with the items that start there."""
    log = sequence.log
    if log is None:
        return
    runs = path(table.tail, 0) + ([] if table.partial is None else [table.partial])
    for run in runs:
        start = run.start * run.block_bytes
        content = run.content()
        assert log.told.startswith(content, start), "law: published content is the request's own"
        assert run.items == log.items.get(run.start, b""), "law: published items are the request's own"
