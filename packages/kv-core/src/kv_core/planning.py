"""What admitting a request would find and cost in each window (core spec 4.3, D4, D5, D32, D34, D35).

In:  the request's tokens and the trees.
Out: one `Plan` a window, all for one length.
Law: nothing is changed. The length is the longest that all windows can serve; a window says how many blocks it needs
     and how many there are.

    ordinal   0 ...... start ............ num_whole ... num_whole + 1 ............ num_blocks
              not needed   claimed        copied or     empty, one a beam where
              (sliding)                   taken over    beams differ
"""

from itertools import cycle
from typing import NamedTuple

from kv_core.runs import Run
from kv_core.sequence import Sequence, Table
from kv_core.spans import ceil_div
from kv_core.tiers import Tier
from kv_core.tree import Match, Source
from kv_core.window import Window


class Plan(NamedTuple):
    """What a window will do for a request that finds `num_cached` tokens; volatile.

    `run` ends the claimed path; `inside` of its blocks belong to it. `source` serves the block behind in part: it
    leaves the tree (`takes_over`) or is copied. `num_taken` blocks are taken for the request itself; with those that
    onboarding takes they are the `num_needed`. `num_available` are free and not part of the match, `num_claimed` are
    free and part of it.
    """

    num_cached: int
    start: int
    num_whole: int
    run: Run
    inside: int
    source: Source | None
    takes_over: bool
    num_taken: int
    num_needed: int
    num_available: int
    num_claimed: int
    num_reused: int
    num_missed: int

    @property
    def fits(self) -> bool:
        """Whether the window has the blocks now."""
        return self.num_needed <= self.num_available


def decide(windows: list[Window], sequence: Sequence, limit: int) -> list[Plan]:
    """One plan a window, all for the longest length of at most `limit` tokens on which they agree (core spec D4).

    If a partly matched block stands in the way of having enough blocks, it is done without (D5).
    """
    pairs = list(zip(windows, sequence.tables, strict=True))
    found = [match(window, sequence, table, limit) for window, table in pairs]
    while True:
        length = agreed(windows, found, limit)
        plans = [plan(window, sequence, match, length) for window, match in zip(windows, found, strict=True)]
        tail = length % windows[0].tokens_per_block
        if not tail or all(decided.fits for decided in plans):
            return plans
        limit = length - tail


def agreed(windows: list[Window], found: list[Match], limit: int) -> int:
    """The longest prefix of at most `limit` tokens that all windows can serve."""
    length, num_agreed = limit, 0
    for window, match in cycle(zip(windows, found, strict=True)):
        shorter = longest(window, match, length)
        num_agreed = num_agreed + 1 if shorter == length else 1
        length = shorter
        if num_agreed == len(windows):
            break
    return length


def match(window: Window, sequence: Sequence, table: Table, num_tokens: int) -> Match:
    """What of the first `num_tokens` tokens the window has."""
    log, config = sequence.log, window.config
    if log is None or not num_tokens:
        return Match(table.root, 0, 0, None)
    eligible = window.may_serve_in_part if config.partial_reuse else None
    found = window.tree.match(table.root, log, num_tokens, eligible)
    if not config.copy_on_partial and found.num_blocks >= num_shared_blocks(window, sequence):
        return found._replace(source=None)  # each beam would have to take the block over
    return found


def longest(window: Window, found: Match, limit: int) -> int:
    """The longest cached prefix of at most `limit` tokens that the window can serve (core spec D32, D34)."""
    size = window.tokens_per_block
    whole = found.num_blocks * size
    length = min(limit, whole + (found.source.num_tokens if found.source is not None else 0))
    if length < whole and length % size and _path_source(window, found, length) is None:
        length -= length % size
    return _longest_sliding(window, found, length) if window.is_sliding else length


def _longest_sliding(window: Window, found: Match, length: int) -> int:
    """Only what the last `window - 1` tokens overlap has to be there; before what is gone the prefix ends."""
    size = window.tokens_per_block
    run = found.run
    while length and run.parent is not None:
        first_needed = max(0, length - window.size + 1) // size
        if run.stop <= first_needed:
            break
        if max(run.start, first_needed) < min(run.first, length // size):
            length = run.start * size
        run = run.parent
    return length


def plan(window: Window, sequence: Sequence, found: Match, length: int) -> Plan:
    """How to serve `length` cached tokens."""
    size = window.tokens_per_block
    num_whole = length // size
    start = max(0, length - window.size + 1) // size if window.is_sliding else 0
    run = found.run
    while run.start >= num_whole and run.parent is not None:
        run = run.parent
    inside = num_whole - run.start
    source = _source(window, found, length)
    num_blocks = ceil_div(sequence.num_tokens, size)
    num_positions, num_empty = num_blocks - num_whole, num_empty_blocks(window, sequence, num_whole, num_blocks)
    num_claimed, num_onboarded = _claimed(run, inside, start)
    available = window.num_free - num_claimed
    takes_over = False
    if source is not None:
        is_free = not source.run.is_needed
        is_shared = num_whole < num_shared_blocks(window, sequence)
        takes_over = is_shared and _prefers_to_take_over(window, source, num_empty + num_onboarded, available)
        available -= is_free and source.run.tier == Tier.DEVICE
        if takes_over:
            num_empty -= 1
            num_claimed += is_free and source.run.tier == Tier.DEVICE
            num_onboarded += source.run.tier != Tier.DEVICE
    num_reused = num_missed = 0
    if window.config.reuse and sequence.log is not None:
        num_reused = num_whole + (source is not None)
        num_missed = num_positions - (source is not None)
    num_needed = num_empty + num_onboarded
    return Plan(
        length,
        start,
        num_whole,
        run,
        inside,
        source,
        takes_over,
        num_empty,
        num_needed,
        available,
        num_claimed,
        num_reused,
        num_missed,
    )


def num_empty_blocks(window: Window, sequence: Sequence, start: int, stop: int) -> int:
    """Blocks that ordinals `start <= i < stop` of a new request need: one, or one a beam where beams differ."""
    shared = max(start, num_shared_blocks(window, sequence))
    return (shared - start) + (stop - shared) * sequence.beam_width if stop > shared else stop - start


def num_shared_blocks(window: Window, sequence: Sequence) -> int:
    """Leading blocks of a prompt that all beams share: those to which decoding does not write (core spec 4.3, 8.4)."""
    size = window.tokens_per_block
    num_blocks = ceil_div(sequence.num_tokens, size)
    if sequence.beam_width == 1 or window.is_cross:
        return num_blocks
    ends_on_block = sequence.num_tokens % size == 0 and not window.config.reuse
    return num_blocks if ends_on_block else num_blocks - 1


def _claimed(run: Run, inside: int, start: int) -> tuple[int, int]:
    """Blocks of a path that are free on the device, and blocks that are on lower tiers."""
    num_free = num_lower = 0
    stop = run.start + inside
    while stop > start:
        count = stop - max(run.start, start)
        if run.tier != Tier.DEVICE:
            num_lower += count
        elif not run.is_needed:
            num_free += count
        assert run.parent is not None, "law: the path begins at a root"
        run = run.parent
        stop = run.stop
    return num_free, num_lower


def _source(window: Window, found: Match, length: int) -> Source | None:
    size = window.tokens_per_block
    if length % size == 0:
        return None
    if length > found.num_blocks * size:
        assert found.source is not None, "law: a length beyond whole blocks has a source"
        return found.source._replace(num_tokens=length % size)
    return _path_source(window, found, length)


def _path_source(window: Window, found: Match, length: int) -> Source | None:
    """The block of the matched path in which `length` ends, if it may serve in part."""
    ordinal = length // window.tokens_per_block
    run = found.run
    while run.start > ordinal:
        assert run.parent is not None, "law: the path begins at a root"
        run = run.parent
    source = Source(run, ordinal - run.start, length % window.tokens_per_block)
    if ordinal < run.first or not window.config.partial_reuse or not window.may_serve_in_part(source):
        return None
    return source


def _prefers_to_take_over(window: Window, source: Source, needed: int, available: int) -> bool:
    """Whether the block itself becomes the request's: if it is not full, or if it cannot be copied (core spec D35)."""
    if source.run.is_needed or not source.is_leaf:
        return False
    if source.run.is_partial or not window.config.copy_on_partial:
        return True
    return needed > available - (source.run.tier == Tier.DEVICE)
