"""Keeping blocks beyond the request that they belong to (core spec D16, D47).

In:  the table of a running request.
Out: `Pin`, a handle on all blocks that the table had; given back once.
Law: pinning and holding are one operation. A pinned block is never free, whoever else gives it up, and never loses its
     content; when it is published by its request, the pin holds it in the tree.

A pin holds the published path like a table does, and private blocks one by one: `Window.pins` counts them. A private
block that is published becomes a run of its own (`pinned_runs`); one that its table gives up waits as an *orphan*.
"""

from array import array
from typing import NamedTuple

from kv_core.ids import BlockId
from kv_core.runs import Run
from kv_core.sequence import Table
from kv_core.window import Window


class Held(NamedTuple):
    """What a pin holds in one window: the path that ends with `tail` from `start` on, and private blocks."""

    window: Window
    tail: Run
    start: int
    private: "array[int]"


class Pin:
    """Blocks kept until `unpin`. It belongs to the manager that gave it; `block_ids` lists them by window."""

    __slots__ = ("block_ids", "held")

    def __init__(self, held: list[Held], block_ids: dict[int, tuple[BlockId, ...]]) -> None:
        self.held = held
        self.block_ids = block_ids


def pin_table(window: Window, table: Table) -> Held:
    """Hold all blocks that a table has."""
    window.hold(table.tail, table.start)
    table.tail.anchors += 1
    private = table.private_ids(max(table.published, table.start), table.stop)
    for block_id in private:
        window.pins[block_id] = window.pins.get(block_id, 0) + 1
    if table.partial is not None:
        pin_runs(window, table.partial)
    return Held(window, table.tail, table.start, private)


def unpin(held: Held) -> None:
    """Give everything up, the last block first."""
    window = held.window
    for block_id in reversed(held.private):
        if block_id in window.pinned_runs:
            _unpin_run(window, block_id)
        else:
            _unpin_private(window, block_id)
    window.let_go(held.tail, held.start)
    window.lift_anchor(held.tail)


def _unpin_private(window: Window, block_id: int) -> None:
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
