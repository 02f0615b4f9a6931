"""Keeping blocks beyond the request that they belong to (core spec D16, D47).

In:  the table of a running request.
Out: `Pin`, a handle on all blocks that the table had; given back once, whole or piece by piece.
Law: pinning and holding are one operation. A pinned block is never free, whoever else gives it up, and never gets
     another request's content; its own request goes on writing into it where it is private. When it is published by its
     request, the pin holds it in the tree, as it is. In a window that does not slide a pin lets go from its end only: a
     block is of no use without those before it, and none goes before what hangs on it.

A pin holds the published path like a table does, and private blocks one by one: `Window.pins` counts them. A private
block that is published becomes a run of its own (`pinned_runs`); one that its table gives up waits as an *orphan*.
"""

from array import array
from collections.abc import Collection, Container
from itertools import groupby, takewhile
from typing import NamedTuple

from kv_core.errors import CallerError
from kv_core.ids import BlockId
from kv_core.runs import Run
from kv_core.sequence import Table
from kv_core.window import Window


class Held(NamedTuple):
    """Blocks of one window without a gap: `path` from ordinal `start` to the end of `tail`, then private ones."""

    window: Window
    tail: Run
    start: int
    path: "array[int]"
    private: "array[int]"


class Pin:
    """Blocks kept until `KVCacheManager.unpin`, which alone changes it. It belongs to the manager that gave it.

    `waiting` blocks were given up, but others of the pin still hang on them.
    """

    __slots__ = ("held", "waiting")

    def __init__(self, held: list[Held]) -> None:
        self.held = held
        self.waiting: dict[int, set[BlockId]] = {held.window.size: set() for held in held}

    @property
    def block_ids(self) -> dict[int, tuple[BlockId, ...]]:
        """What is held now, by window, in the order of the sequence."""
        found: dict[int, tuple[BlockId, ...]] = dict.fromkeys(self.waiting, ())
        for held in self.held:
            found[held.window.size] += tuple(BlockId(block_id) for block_id in held.path + held.private)
        return found

    def left(self, size: int) -> set[BlockId]:
        """What may still be given up in the window of this length."""
        return set(self.block_ids.get(size, ())) - self.waiting.get(size, set())

    def check_left(self, size: int, block_ids: Collection[BlockId]) -> None:
        """CallerError for blocks that are not in this pin, or were given up before."""
        left = self.left(size)
        if not left.issuperset(block_ids):
            raise CallerError(f"not pinned: window={size}, ours={sorted(left)}, theirs={sorted(block_ids)}")

    def give_up(self, window: Window, block_ids: Collection[BlockId]) -> None:
        """Let go of these blocks of one window, as far as nothing that is kept hangs on them."""
        waiting = self.waiting[window.size]
        waiting.update(block_ids)
        given = waiting.copy()
        if not window.is_sliding:
            given = set(takewhile(waiting.__contains__, reversed(self.block_ids[window.size])))
        waiting -= given
        kept = [unpin(held, given) if held.window is window else [held] for held in window.by_turn(self.held)]
        self.held = [piece for pieces in window.by_turn(kept) for piece in pieces]


def pin_table(window: Window, table: Table) -> Held:
    """Hold all blocks that a table has."""
    window.hold(table.tail, table.start)
    table.tail.anchors += 1
    border = max(table.published, table.start)
    private = table.private_ids(border, table.stop)
    for block_id in private:
        window.pins[block_id] = window.pins.get(block_id, 0) + 1
    if table.partial is not None:
        pin_runs(window, table.partial)
    return Held(window, table.tail, table.start, table.private_ids(table.start, border), private)


def unpin(held: Held, given: Container[int]) -> list[Held]:
    """Give up these of its blocks, the last one first, in a sliding window the first; what is kept, in pieces."""
    window, run, stop = held.window, held.tail, held.tail.stop
    let_go: list[tuple[Run, int]] = []
    private = array("i", [block_id for block_id in held.private if block_id not in given])
    pieces: list[Held] = []
    if private:
        pieces.append(Held(window, run, max(held.start, stop), array("i"), private))
        run.anchors += 1
    for is_given, group in reversed([(key, array("i", ids)) for key, ids in groupby(held.path, given.__contains__)]):
        start = stop - len(group)
        above = window.border(run, start)
        if is_given:
            let_go.append((run, start))
        else:
            pieces.append(Held(window, run, start, group, array("i")))
            run.anchors += 1
        run, stop = above, start
    given_private = [block_id for block_id in window.by_turn(held.private) if block_id in given]
    if not window.is_sliding:
        _unpin_private(window, given_private)
    for tail, start in reversed(let_go) if window.is_sliding else let_go:
        window.let_go(tail, start)
    if window.is_sliding:
        _unpin_private(window, given_private)
    window.lift_anchor(held.tail)
    return pieces[::-1]


def _unpin_private(window: Window, block_ids: list[int]) -> None:
    for block_id in block_ids:
        if block_id in window.pinned_runs:
            _unpin_run(window, block_id)
        else:
            _unpin_one(window, block_id)


def _unpin_one(window: Window, block_id: int) -> None:
    window.pins[block_id] -= 1
    if not window.pins[block_id]:
        del window.pins[block_id]
        wish = window.orphans.pop(block_id, None)
        if wish is not None:
            window.release_empty(array("i", [block_id]), wish)


def pin_runs(window: Window, run: Run) -> list[Run]:
    """Private blocks that pins hold are in the tree now, and held there; the pieces of the run, in order."""
    pieces: list[Run] = []
    for inside in reversed(range(run.count)):
        num_pins = window.pins.pop(run.ids[inside], 0)
        if num_pins:
            if inside + 1 < run.count:
                pieces.append(run)
                run = window.cut(run, inside + 1)
            upper = window.cut(run, inside) if inside else run
            run.holders += num_pins
            num_pins += window.pinned_runs.get(run.ids[0], (run, 0))[1]
            window.pinned_runs[run.ids[0]] = run, num_pins
            if upper is not run:
                pieces.append(run)
                run = upper
    return [run, *reversed(pieces)]


def _unpin_run(window: Window, block_id: int) -> None:
    """One pin less for a block that was private when it was pinned and is in the tree now."""
    run, num_pins = window.pinned_runs.pop(block_id)
    if num_pins > 1:
        window.pinned_runs[block_id] = run, num_pins - 1
    window.let_go_one(run)


def pins_own(window: Window, run: Run) -> None:
    """A run of one block leaves the tree while its table goes on: what pins held there is private again."""
    if run.ids[0] in window.pinned_runs:
        _, num_pins = window.pinned_runs.pop(run.ids[0])
        window.pins[run.ids[0]] = num_pins
