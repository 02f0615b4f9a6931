"""Taking free blocks: what is given up for them, and what moves a tier down instead.

In:  how many blocks of a window are wanted.
Out: their ids, in the order of victims; copy orders; events.
Law: victims are chosen for the whole request before any is dealt with. A block that moves down is not dropped again by
     the same request: of those that could move, only as many as find room to stay do (core spec D63). A block is copied
     before its slot is given to anyone. Nothing that is held, and no source of a copy to come, is ever chosen.

    dropped    the block leaves the tree; its id is the one given out
    moved      the block keeps its id and swaps slots with a free block of the tier below, whose id is given out
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kv_core.keys import BlockKey
from kv_core.retention import DEFAULT_PRIORITY, UNSET
from kv_core.runs import Run
from kv_core.tiers import Tier
from kv_core.window import IN_TRANSIT, Window


def take(window: Window, count: int) -> "array[int]":
    """`count` free device blocks; the caller knows that there are as many."""
    if window.pool.has_lower_tiers and window.config.onboard:
        room = _make_room(window, Tier.DEVICE, count, 0)
        _tell(window, room.notes)
        found = room.ids
    else:
        found = _take_plainly(window, count)
    window.counters.allocated += count
    window.pool.given_up(found)
    return found


def _take_plainly(window: Window, count: int) -> "array[int]":
    queue = window.queues[0]
    found = array("i")
    wanted = count
    while wanted:
        run = queue.peek()
        assert run is not None, "law: every free block can be taken"
        taken = run.num_alike
        if taken > wanted:
            taken = wanted
        if run.parent is None:
            window.counters.fresh += taken
        found += give_up(window, run, taken)
        wanted -= taken
    return found


def give_up(window: Window, run: Run, count: int) -> "array[int]":
    """The next `count` victims of a free run lose their content; their ids, in the order of victims."""
    num_left = len(run.ids) - count
    if window.is_sliding and run.parent is not None:
        inside, ids = run.num_gone, run.ids[:count]
    else:
        inside, ids = num_left, run.ids[: -count - 1 : -1]
    if run.parent is not None:
        window.counters.dropped += count
        window.queues[run.tier].dropped(run, inside)
        if window.events is not None and run.keys is not None:
            window.events.removed(window.size, window.by_turn(run.keys[inside : inside + count]))
    if num_left:
        _shorten(window, run, count)
    else:
        window.queues[run.tier].claim(run)
        _vanish(window, run)
    return ids


def _shorten(window: Window, run: Run, count: int) -> None:
    if window.is_sliding and run.parent is not None:
        run.forget(count)
    else:
        if run.children or run.anchors:  # a path that is not held may end here; what follows it is a hole then
            window.cut(run, run.count - count)
        run.shorten(count)
    window.queues[run.tier].shortened(run, count)
    window.expiries.enter(run)


def _vanish(window: Window, run: Run) -> None:
    """A run without blocks leaves the tree, or stays as a hole if something depends on its place."""
    if run.parent is None:
        return
    run.expires_at = run.duration_ms = None
    run.priority = DEFAULT_PRIORITY
    if run.children or run.anchors:
        run.ids = array("i")
        run.move(Tier.DEVICE)
    else:
        window.unlink(run)


# With lower tiers.

Note = tuple[BlockKey, int | None]
"""What became of a block: removed (None), or moved to this tier."""


class _Room(NamedTuple):
    """Blocks to give out, in the order of victims, and for each of them what happened to make it free."""

    ids: "array[int]"
    notes: list[list[Note]]


class _Piece(NamedTuple):
    """A chosen victim: a run of its own, out of its queue; whether it moves down a tier."""

    run: Run
    moves: bool


def take_and_onboard(window: Window, runs: Sequence[Run], count: int) -> "array[int]":
    """Bring these runs of lower tiers, which the caller holds, to the device; then take `count` blocks.

    The places that they leave are empty and go first on their tier, so that nothing is dropped there in their stead.
    """
    if not runs:
        return take(window, count)
    num_brought = sum(run.count for run in runs)
    fresh = window.counters.fresh
    room = _make_room(window, Tier.DEVICE, num_brought, max(0, count - num_brought))
    _tell(window, room.notes)
    carriers = room.ids
    left: dict[int, array[int]] = {}
    for run in runs:
        tier = run.tier
        _bring(window, run, carriers[: run.count])
        left.setdefault(tier, array("i")).extend(carriers[: run.count])
        del carriers[: run.count]
    for tier, ids in left.items():
        window.release_duplicates(ids[::-1], tier)
    window.counters.onboarded += num_brought
    window.counters.fresh = fresh
    return take(window, count)


def _bring(window: Window, run: Run, carriers: "array[int]") -> None:
    """Swap a run's blocks with free device blocks."""
    tier = run.tier
    for at, (block_id, carrier) in enumerate(zip(run.ids, carriers, strict=True)):
        _swap(window, block_id, carrier)
        if window.events is not None and run.keys is not None:
            window.events.tier_changed(window.size, run.keys[at], tier, Tier.DEVICE)
    run.move(Tier.DEVICE)


def offload(window: Window, run: Run) -> bool:
    """Move one block of the tree, a run of its own, a tier down; False if it is held or has no room there (D6)."""
    tier = run.tier
    blocked = run.kin > 0 and not window.is_sliding
    if (
        not window.config.onboard
        or run.holders
        or blocked
        or tier + 1 == len(Tier)
        or not window.queues[tier + 1].num_free
    ):
        return False
    window.queues[tier].claim(run)
    parent = run.parent
    assert parent is not None, "law: only a block of the tree is moved"
    run.move(IN_TRANSIT)
    window.unpark(parent)
    room = _move(window, run, tier, _make_room(window, tier + 1, 1, 0))
    _tell(window, room.notes)
    window.release_empty(room.ids, UNSET, tier=tier)
    return True


def onboard(window: Window, run: Run) -> bool:
    """Bring one block of the tree, a run of its own, to the device; False without room, or before its parent.

    The blocks before it are held meanwhile, so that they do not make room for it; all of them count as just used.
    """
    parent = run.parent
    assert parent is not None, "law: only a block of the tree is moved"
    if parent.tier != Tier.DEVICE and not window.is_sliding:
        return False
    start = run.start if window.is_sliding else 0
    window.hold(run, start)
    if window.num_free:
        take_and_onboard(window, [run], 0)
    window.let_go(run, start)
    return run.tier == Tier.DEVICE


def _make_room(window: Window, tier: int, count: int, count_later: int) -> _Room:
    """Free `count` blocks of a tier; `count_later` more will be wanted by the same request."""
    chosen = _decide(window, tier, _choose(window, tier, count), count_later)
    rooms = [_Room(array("i"), []) if piece.moves else _drop(window, piece.run, tier) for piece in chosen]
    num_moved = sum(piece.run.count for piece in chosen if piece.moves)
    below = _make_room(window, tier + 1, num_moved, 0) if num_moved else None
    room = _Room(array("i"), [])
    for piece, dropped in zip(chosen, rooms, strict=True):
        done = _move(window, piece.run, tier, below) if piece.moves and below is not None else dropped
        room.ids.extend(done.ids)
        room.notes.extend(done.notes)
    return room


def _choose(window: Window, tier: int, count: int) -> list[_Piece]:
    """Take the next `count` victims of a tier out of its queue, each piece as a run of its own.

    A piece may move if it is wanted for long enough, or if what stays below or may move depends on it (core spec D37).
    """
    queue = window.queues[tier]
    has_below = tier + 1 < len(window.pool.num_blocks) and window.pool.num_blocks[tier + 1] > 0
    chosen: list[_Piece] = []
    movable: set[Run] = set()
    while count:
        run = queue.peek()
        assert run is not None, "law: every free block can be taken"
        taken = min(count, run.num_alike)
        count -= taken
        if run.parent is None:
            window.counters.fresh += taken if tier == Tier.DEVICE else 0
            chosen.append(_Piece(Run(None, 0, b"", window.by_turn(give_up(window, run, taken))), moves=False))
            continue
        run = _cut_off(window, run, taken)
        queue.claim(run)
        below_it = () if window.is_sliding else run.children.values()
        is_needed = any(child.tier != IN_TRANSIT or child in movable for child in below_it)
        if has_below and (is_needed or run.priority >= window.config.offload_min_priority):
            movable.add(run)
        parent = run.parent
        assert parent is not None, "law: only a block of the tree is moved"
        run.move(IN_TRANSIT)
        window.unpark(parent)
        chosen.append(_Piece(run, moves=run in movable))
    return chosen


def _cut_off(window: Window, run: Run, count: int) -> Run:
    """The next `count` victims of a run as a run of their own."""
    if run.num_gone:
        window.cut(run, run.num_gone)
    if count == run.count:
        return run
    if window.is_sliding:
        return window.cut(run, count)
    window.cut(run, run.count - count)
    return run


def _decide(window: Window, tier: int, chosen: list[_Piece], count_later: int) -> list[_Piece]:
    """Of the pieces that may move, only as many of the last blocks do as find room to stay; cut where that changes."""
    left = 0
    if any(piece.moves for piece in chosen):
        left = max(0, window.queues[tier + 1].num_free - count_later)
    decided: list[_Piece] = []
    for run, may_move in reversed(chosen):
        num_moved = min(left, run.count) if may_move else 0
        left -= num_moved
        if num_moved == run.count:
            decided.append(_Piece(run, moves=True))
        elif num_moved:
            upper = window.cut(run, run.count - num_moved if window.is_sliding else num_moved)
            later, sooner = (run, upper) if window.is_sliding else (upper, run)
            decided += [_Piece(later, moves=True), _Piece(sooner, moves=False)]
        else:
            decided.append(_Piece(run, moves=False))
    decided.reverse()
    return decided


def _drop(window: Window, run: Run, tier: int) -> _Room:
    """The blocks of a chosen run lose their content, and in a window that does not slide all that depends on them."""
    lost: list[Note] = []
    if run.children and not window.is_sliding:
        lost = _drop_descendants(window, run)
    if run.parent is not None:
        window.counters.dropped += run.count
        window.queues[tier].dropped(run, run.count)
    notes: list[list[Note]] = [[(key, None)] for key in window.by_turn(run.keys or [])] or [[] for _ in run.ids]
    notes[0] = lost + notes[0]
    room = _Room(window.by_turn(run.ids), notes)
    _vanish(window, run)
    return room


def drop_free(window: Window, run: Run) -> None:
    """A run that nobody holds loses its content, and in a window that does not slide all that depends on it."""
    notes = _drop_descendants(window, run) if run.children and not window.is_sliding else []
    notes += [(key, None) for key in reversed(run.keys or ())]
    ids, tier = run.ids, run.tier
    window.queues[tier].claim(run)
    window.counters.dropped += run.count
    _vanish(window, run)
    window.release_duplicates(ids[::-1], tier)
    _tell(window, [notes])


def _drop_descendants(window: Window, run: Run) -> list[Note]:
    """Empty the blocks below a run, children before their parents; nobody holds them."""
    order: list[Run] = []
    waiting = list(run.children.values())
    while waiting:
        order.append(waiting.pop())
        waiting.extend(order[-1].children.values())
    notes: list[Note] = []
    for below in reversed(order):
        notes += [(key, None) for key in reversed(below.keys or ())]
        window.counters.dropped += below.count
        window.queues[below.tier].claim(below)
        below.expires_at = None
        window.unlink(below)
        window.release_duplicates(below.ids[::-1], below.tier)
    return notes


def _move(window: Window, run: Run, tier: int, below: _Room) -> _Room:
    """The blocks of a chosen run go down a tier, to the next of the places below; their own are given out."""
    carriers, below_notes = below.ids[: run.count], below.notes[: run.count]
    del below.ids[: run.count], below.notes[: run.count]
    for block_id, carrier in zip(window.by_turn(run.ids), carriers, strict=True):
        _swap(window, block_id, carrier)
    run.move(tier + 1)
    window.queues[tier + 1].release(run)
    window.expiries.enter(run)
    window.counters.offloaded += run.count
    moved: list[list[Note]] = [[(key, tier + 1)] for key in window.by_turn(run.keys or [])] or [[] for _ in run.ids]
    return _Room(carriers, [ours + theirs for ours, theirs in zip(moved, below_notes, strict=True)])


def _swap(window: Window, block_id: int, carrier: int) -> None:
    """Copy a block into the place of a free one, and let them change places."""
    pool = window.pool
    window.copies.copy(pool.place(block_id), pool.place(carrier), window.tokens_per_block)
    pool.swap(block_id, carrier)


def _tell(window: Window, notes: list[list[Note]]) -> None:
    if window.events is None:
        return
    for key, tier in (note for notes_of_block in notes for note in notes_of_block):
        if tier is None:
            window.events.removed(window.size, (key,))
        else:
            window.events.tier_changed(window.size, key, tier - 1, tier)
