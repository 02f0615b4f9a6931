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
from kv_core.runs import Run, path
from kv_core.sequence import Sequence, Table
from kv_core.tiers import Tier
from kv_core.tree import Source
from kv_core.victims import take_and_onboard
from kv_core.window import Window


def carry_out(window: Window, sequence: Sequence, table: Table, decided: Plan) -> None:
    """Do what was planned."""
    run, source, start = decided.run, decided.source, decided.start
    tail = window.cut(run, decided.inside) if decided.inside < run.count else run
    if source is not None and source.run is run and tail is not run:
        source = source._replace(inside=source.inside - decided.inside)
    window.move_anchor(table, tail)
    if start:
        window.border(tail, start)
    window.hold(tail, start)
    if sequence.wishes is not None:
        _apply_wishes(window, sequence, tail, decided)
    claimed = path(tail, start)
    _count_hits(window, claimed, source)
    taken = _take(window, sequence, claimed, decided, source)
    table.start, table.published = start, max(decided.num_whole, start)
    ids = array("i")
    for ours in claimed:
        ids += ours.ids
    add_blocks(sequence, table, ids, taken, num_shared_blocks(window, sequence))
    window.counters.reused += decided.num_reused
    window.counters.missed += decided.num_missed


def _count_hits(window: Window, claimed: list[Run], source: Source | None) -> None:
    """Where what is found lies, before any of it comes to the device."""
    hit_tokens = window.counters.hit_tokens
    for run in claimed:
        hit_tokens[run.tier] += run.count * window.tokens_per_block
    if source is not None:
        hit_tokens[source.run.tier] += source.num_tokens


def _take(window: Window, sequence: Sequence, claimed: list[Run], decided: Plan, source: Source | None) -> "array[int]":
    """The blocks behind the claimed ones; those that are claimed on lower tiers come to the device."""
    lower = [run for run in claimed if run.tier != Tier.DEVICE] if window.pool.has_lower_tiers else []
    if source is None:
        return take_and_onboard(window, lower, decided.num_taken)
    if decided.takes_over:
        own = _take_over(window, source)
        _keep_as_before(window, sequence, own, decided)
        lower += [own] if own.tier != Tier.DEVICE else []
        return own.ids + take_and_onboard(window, lower, decided.num_taken)
    source_id = source.block_id
    aside = _set_aside(window, source)
    taken = take_and_onboard(window, lower, decided.num_taken)
    if aside is not None:
        window.unreserve(aside)
    is_shared = decided.num_whole < num_shared_blocks(window, sequence)
    copy(window, source_id, taken[: 1 if is_shared else sequence.beam_width], source.num_tokens)
    return taken


def _keep_as_before(window: Window, sequence: Sequence, own: Run, decided: Plan) -> None:
    """A block that was taken over is kept as long as before unless the request has a wish (core spec D38)."""
    [(_, _, wish)] = sequence.wished(decided.num_whole, decided.num_whole + 1)
    kept = Retention(own.priority, own.duration_ms)
    if wish.priority is None and kept != Retention(DEFAULT_PRIORITY):
        window.overrides[own.ids[0]] = kept


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
    for part in path(tail, decided.start):
        window.reserve(part)
    tail.anchors += 1
    return Reservation(tail, decided.start, None if source is None else _set_aside(window, source))


def cancel(window: Window, reserved: Reservation) -> None:
    """The request's turn has come: what it found is free again in its old place, unless somebody holds it."""
    for part in path(reserved.tail, reserved.start):
        window.unreserve(part)
    if reserved.source is not None:
        window.unreserve(reserved.source)
    window.lift_anchor(reserved.tail)
