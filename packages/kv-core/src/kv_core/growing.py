"""What happens to a table as its request grows and shrinks (core spec 7.4, 8.2).

In:  a table and the request's new length.
Out: blocks taken, dropped from a sliding window, or given up.
Law: a window says how many blocks it needs before it changes anything. Decoding writes only to blocks that no one else
     may read: a published block that will be written to is withdrawn, or copied if others hold it (core spec D7).
"""

from array import array

from kv_core.admitting import copy
from kv_core.errors import CallerError
from kv_core.publishing import make_private, withdraw_partial
from kv_core.sequence import Sequence, Table
from kv_core.spans import ceil_div
from kv_core.victims import take
from kv_core.window import Window


def front(window: Window, table: Table, num_held: int) -> int:
    """The first ordinal that the window still reads when tokens follow the `num_held` that the request has room for.

    Why the held ones and not the new length: the first of several new tokens reads a whole window before itself, so
    a growth of many tokens drops no more than a growth of one. Unconfirmed tokens are taken off before.
    """
    if not window.is_sliding:
        return 0
    confirmed = num_held + 1 - window.config.max_rewind - window.size
    return max(table.start, confirmed // window.tokens_per_block)


def num_needed(window: Window, sequence: Sequence, table: Table, num_tokens: int) -> int:
    """Blocks to take for a length. CallerError if beams would have to drop blocks, which they share unequally."""
    if sequence.beam_width > 1 and front(window, table, sequence.num_tokens) > table.start:
        raise CallerError(f"a sliding window drops no blocks of beams: window={window.size}, num_tokens={num_tokens}")
    return max(0, ceil_div(num_tokens, window.tokens_per_block) - table.stop) * sequence.beam_width


def can_grow(window: Window, sequence: Sequence, table: Table, num_tokens: int) -> bool:
    """Whether there are enough free blocks for a length, with those that the table will drop."""
    needed = num_needed(window, sequence, table, num_tokens)
    return needed <= window.num_free or needed <= window.num_free + num_detachable(window, table, sequence.num_tokens)


def num_detachable(window: Window, table: Table, num_held: int) -> int:
    """Blocks that become free when the table drops what it no longer reads."""
    stop = front(window, table, num_held)
    first_private = max(table.published, table.start)
    private = table.ids[first_private - table.start : max(0, stop - table.start)]
    found = sum(block_id not in window.pins for block_id in private)
    if table.partial is not None and stop > table.published:
        found -= table.partial.holders > 1
    run = table.tail
    while run.stop > table.start:
        if run.start < stop and run.holders == 1:
            found += min(run.stop, stop) - max(run.start, table.start)
        assert run.parent is not None, "law: the path begins at a root"
        run = run.parent
    return found


def grow(window: Window, sequence: Sequence, table: Table, num_tokens: int) -> None:
    """Drop what is no longer read, then take what is missing."""
    stop = front(window, table, sequence.num_tokens)
    if stop > table.start:
        window.detach(sequence, table, stop)
    needed = num_needed(window, sequence, table, num_tokens)
    if not needed:
        return
    taken = take(window, needed)
    beams = sequence.beam_width
    if beams == 1:
        table.ids += taken
        return
    table.ids += taken[::beams]
    for beam in range(1, beams):
        table.others[beam - 1] += taken[beam::beams]


def room(window: Window, table: Table) -> int:
    """The length up to which the window has nothing to do."""
    fits = table.stop * window.tokens_per_block
    if not window.is_sliding:
        return fits
    return min(fits, (table.start + 1) * window.tokens_per_block + window.size + window.config.max_rewind - 1)


# Shrinking.


def check_rewind(window: Window, table: Table, num_tokens: int) -> None:
    """CallerError if a sliding window dropped blocks that it would read again."""
    if window.is_sliding and table.start > max(0, num_tokens - window.size) // window.tokens_per_block:
        raise CallerError(
            f"the window would read dropped blocks again: window={window.size}, num_tokens={num_tokens}, "
            f"first block={table.start}, max_rewind={window.config.max_rewind}"
        )


def needs_copy(window: Window, table: Table, num_tokens: int) -> bool:
    """Whether the block in which `num_tokens` ends is published and has other readers or successors in the tree."""
    ordinal, inside = divmod(num_tokens, window.tokens_per_block)
    if not inside or ordinal >= table.published:
        return False
    tail = table.tail
    return tail.stop > ordinal + 1 or tail.holders > 1 or tail.anchors > 1 or bool(tail.children)


def can_shrink(window: Window, table: Table, num_tokens: int) -> bool:
    """Whether there is a block for the copy, should one be needed."""
    return not needs_copy(window, table, num_tokens) or window.num_free > 0


def shrink(window: Window, sequence: Sequence, table: Table, num_tokens: int) -> None:
    """Give up the blocks behind the first `num_tokens` tokens, and make the block they end in writable."""
    copies = needs_copy(window, table, num_tokens)
    stop = ceil_div(num_tokens, window.tokens_per_block)
    while table.stop > max(stop, table.published + (table.partial is not None)):
        _pop(window, sequence, table)
    _shrink_partial(window, sequence, table, num_tokens, stop)
    if stop < table.published:
        _unpublish(window, table, stop)
        del table.ids[stop - table.start :]
    ordinal, inside = divmod(num_tokens, window.tokens_per_block)
    if inside and ordinal < table.published:
        if copies:
            _replace(window, table, ordinal, inside)
        else:
            _withdraw(window, sequence, table, ordinal)


def _shrink_partial(window: Window, sequence: Sequence, table: Table, num_tokens: int, stop: int) -> None:
    run = table.partial
    if run is None:
        return
    if stop <= table.published:
        window.let_go_one(run)
        table.partial = None
        table.ids.pop()
    elif table.published * window.tokens_per_block + table.num_partial_tokens > num_tokens:
        withdraw_partial(window, sequence, table)


def _pop(window: Window, sequence: Sequence, table: Table) -> None:
    """The last private block becomes free, first in line among those of its priority."""
    [(_, _, wish)] = window.wished(sequence, table, table.stop - 1, table.stop)
    window.release_private(array("i", [table.ids.pop()]), wish, front=True)


def _unpublish(window: Window, table: Table, ordinal: int) -> None:
    """The table's path ends before `ordinal`; what was behind stays in the tree."""
    tail = table.tail
    upper = window.border(tail, ordinal)
    window.let_go(tail, max(ordinal, table.start))
    window.move_anchor(table, upper)
    table.published = ordinal


def _withdraw(window: Window, sequence: Sequence, table: Table, ordinal: int) -> None:
    """The last published block, which nobody else reads, is private again."""
    tail = table.tail
    upper = window.border(tail, ordinal)
    window.move_anchor(table, upper)
    table.published = ordinal
    make_private(window, sequence, tail)


def _replace(window: Window, table: Table, ordinal: int, num_tokens: int) -> None:
    """The table gets copies of the published blocks from `ordinal` on, of which the last has `num_tokens`."""
    old = table.ids[ordinal - table.start : table.published - table.start]
    new = take(window, len(old))
    for source_id, block_id in zip(old, new, strict=True):
        copy(window, source_id, array("i", [block_id]), num_tokens)
    table.ids[ordinal - table.start : table.published - table.start] = new
    _unpublish(window, table, ordinal)


# Writing where others read.


def num_to_separate(sequence: Sequence, table: Table, ordinal: int) -> int:
    """Blocks to take so that every beam has the blocks from `ordinal` on to itself (core spec 8.7, D49)."""
    shared = max(0, table.shared - ordinal) * (sequence.beam_width - 1)
    return shared + max(0, table.published - ordinal)


def separate(window: Window, sequence: Sequence, table: Table, ordinal: int) -> None:
    """Every beam gets copies of the blocks from `ordinal` on that it shares, with the tree or with other beams."""
    if table.partial is not None and ordinal <= table.published:
        withdraw_partial(window, sequence, table)
    if table.others and ordinal < table.shared:
        _separate_beams(window, table, ordinal)
    if ordinal < table.published:
        _replace(window, table, ordinal, window.tokens_per_block)


def _separate_beams(window: Window, table: Table, ordinal: int) -> None:
    own = table.ids[ordinal - table.start : table.shared - table.start]
    taken = take(window, len(own) * len(table.others))
    for beam in range(len(table.others)):
        ids = taken[beam :: len(table.others)]
        for source_id, block_id in zip(own, ids, strict=True):
            copy(window, source_id, array("i", [block_id]), window.tokens_per_block)
        table.others[beam] = ids + table.others[beam]
    table.shared = ordinal
