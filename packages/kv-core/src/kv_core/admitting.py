"""Admitting a request in one window as it was planned (core spec D5, D36).

In:  a plan.
Out: the request's table; copy orders.
Law: what the request matches is held before blocks are taken, and the source of a copy is out of the victims' way, so
     neither can be chosen as victim. No more blocks are taken than the plan said.
"""

from array import array
from typing import NamedTuple

from kv_core.planning import Plan, num_shared_blocks
from kv_core.retention import DEFAULT_PRIORITY, Retention
from kv_core.runs import Run
from kv_core.sequence import Sequence, Table
from kv_core.tiers import Tier
from kv_core.tree import Source
from kv_core.victims import take_and_onboard
from kv_core.window import Window


def carry_out(window: Window, sequence: Sequence, table: Table, decided: Plan) -> None:
    """Do what was planned."""
    source = decided.source
    if decided.inside < decided.run.count:
        upper = window.cut(decided.run, decided.inside)
        if source is not None and source.run is decided.run:
            source = source._replace(inside=source.inside - decided.inside)
        tail = upper
    else:
        tail = decided.run
    window.move_anchor(table, tail)
    if decided.start:
        window.border(tail, decided.start)
    window.hold(tail, decided.start)
    _apply_wishes(window, sequence, tail, decided)
    _take(window, sequence, table, tail, decided, source)
    _count(window, decided)


def _take(window: Window, sequence: Sequence, table: Table, tail: Run, decided: Plan, source: Source | None) -> None:
    lower = [run for run in _path(tail, decided.start) if run.tier != Tier.DEVICE]
    if source is not None and decided.takes_over:
        own = _take_over(window, source)
        [(_, _, wish)] = sequence.wished(decided.num_whole, decided.num_whole + 1)
        kept = Retention(own.priority, own.duration_ms)
        if wish.priority is None and kept != Retention(DEFAULT_PRIORITY):
            window.overrides[own.ids[0]] = kept  # core spec D38
        lower += [own] if own.tier != Tier.DEVICE else []
        taken = take_and_onboard(window, lower, decided.num_taken)
        taken = own.ids + taken
    else:
        source_id = None if source is None else source.block_id
        aside = None if source is None else _set_aside(window, source)
        taken = take_and_onboard(window, lower, decided.num_taken)
        if aside is not None:
            window.unreserve(aside)
        if source is not None and source_id is not None:
            is_shared = decided.num_whole < num_shared_blocks(window, sequence)
            copies = taken[: 1 if is_shared else sequence.beam_width]
            copy(window, source_id, copies, source.num_tokens)
    _fill_table(window, sequence, table, tail, decided, taken)


def _fill_table(
    window: Window, sequence: Sequence, table: Table, tail: Run, decided: Plan, taken: "array[int]"
) -> None:
    table.start, table.published = decided.start, max(decided.num_whole, decided.start)
    ids = array("i")
    for run in _path(tail, decided.start):
        ids += run.ids
    add_blocks(sequence, table, ids, taken, num_shared_blocks(window, sequence))


def add_blocks(sequence: Sequence, table: Table, ids: "array[int]", taken: "array[int]", shared: int) -> None:
    """Fill a table with claimed blocks, then with taken ones, which beams share before ordinal `shared`."""
    beams = sequence.beam_width
    table.shared = shared
    alike = max(0, shared - table.start - len(ids))
    table.ids = ids + taken[:alike]
    if beams > 1:
        rest = taken[alike:]
        table.ids += rest[::beams]
        table.others = [rest[beam::beams] for beam in range(1, beams)]
    else:
        table.ids += taken[alike:]


def _apply_wishes(window: Window, sequence: Sequence, tail: Run, decided: Plan) -> None:
    if sequence.wishes is None:
        return
    for start, stop, wish in sequence.wished(decided.start, decided.num_whole):
        if wish.priority is not None:
            window.border(tail, start)
            run = window.border(tail, stop)
            while run.stop > start:
                window.keep(run, wish)
                assert run.parent is not None
                run = run.parent


def _take_over(window: Window, source: Source) -> Run:
    """The source leaves the tree and becomes the request's own block, as a run of its own."""
    run = source.run
    if source.inside:
        window.cut(run, source.inside)
    window.queues[run.tier].claim(run)
    run.expires_at = None
    window.remove(run)
    window.pool.given_up(run.ids)
    return run


def _set_aside(window: Window, source: Source) -> Run | None:
    """Keep a free source, as a run of its own, out of the victims' way; None if somebody holds it anyway."""
    run = source.run
    if run.holders:
        return None
    if source.inside + 1 < run.count:
        run = window.cut(run, source.inside + 1)
    if source.inside:
        window.cut(run, source.inside)
    window.reserve(run)
    return run


def copy(window: Window, source_id: int, block_ids: "array[int]", num_tokens: int) -> None:
    """Order copies of the first tokens of a block."""
    place = window.pool.place(source_id)
    for block_id in block_ids:
        window.copies.copy(place, window.pool.place(block_id), num_tokens)
    window.counters.copied += len(block_ids)


def _count(window: Window, decided: Plan) -> None:
    if not window.config.reuse:
        return
    window.counters.reused += decided.num_whole + (decided.source is not None)
    window.counters.missed += decided.num_missed


def _path(tail: Run, start: int) -> list[Run]:
    """The runs of a path from ordinal `start` on, in order."""
    runs: list[Run] = []
    run = tail
    while run.stop > start:
        runs.append(run)
        assert run.parent is not None, "law: the path begins at a root"
        run = run.parent
    runs.reverse()
    return runs


# Several requests of one step.


class Reservation(NamedTuple):
    """What a request that waits for its turn has found in one window, out of the victims' way (core spec D36)."""

    tail: Run
    start: int
    source: Run | None


def reserve(window: Window, decided: Plan) -> Reservation:
    """Set aside what was found, until `cancel`."""
    run, source = decided.run, decided.source
    tail = window.cut(run, decided.inside) if decided.inside < run.count else run
    if source is not None and source.run is run and tail is not run:
        source = source._replace(inside=source.inside - decided.inside)
    window.border(tail, decided.start)
    for part in _path(tail, decided.start):
        window.reserve(part)
    tail.anchors += 1
    return Reservation(tail, decided.start, None if source is None else _set_aside(window, source))


def cancel(window: Window, reserved: Reservation) -> None:
    """The request's turn has come: what it found is free again in its old place, unless somebody holds it."""
    for part in _path(reserved.tail, reserved.start):
        window.unreserve(part)
    if reserved.source is not None:
        window.unreserve(reserved.source)
    window.lift_anchor(reserved.tail)
