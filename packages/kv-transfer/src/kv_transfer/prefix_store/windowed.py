"""Layers with windows: which parts of a record a rank's tables have blocks for.

In:  a rank's caches, and tables with holes where a window has left blocks behind.
Out: boxes of layers, neighbours joined.
Law: only where a layer has a window its table has holes.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kv_core.ids import BlockId
from kv_core.spans import Span
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.ranges import HOLE
from kv_transfer.pools import PagedCaches
from kv_transfer.prefix_store.boxes import Box, Boxes

Tables = Sequence[Sequence[BlockId]]


def boxes_by_window(box: Box, state: CacheState) -> dict[int, Boxes]:
    """The layers of a box by their windows; under 0, first, those that see all tokens, which may be none."""
    found: dict[int, list[Box]] = {0: []}
    for window, run in groupby(box.layers, key=state.window_of):
        layers = list(run)
        found.setdefault(window, []).append(Box(Span(layers[0], layers[-1] + 1), box.heads))
    return {window: tuple(boxes) for window, boxes in found.items()}


def wanted_boxes(tokens: Span, caches: PagedCaches, tables: Tables) -> Boxes:
    """The layers for which a table has a block of these tokens."""
    return _joined(caches, (layers for layers, held in _by_table(tokens, caches, tables) if any(held)))


def filled_boxes(tokens: Span, caches: PagedCaches, tables: Tables, state: CacheState) -> Boxes | None:
    """The layers for which a table has the blocks of all these tokens; None if one lacks some that sees all."""
    found = []
    for layers, held in _by_table(tokens, caches, tables):
        if all(held):
            found.append(layers)
        elif not state.window_of(layers.start):
            return None
    return _joined(caches, found)


def _by_table(tokens: Span, caches: PagedCaches, tables: Tables) -> Iterator[tuple[Span, list[bool]]]:
    blocks = tokens.blocks(caches.tokens_per_block)
    for layers, group in caches.by_group(caches.layers):
        yield layers, [block != HOLE for block in tables[group][blocks.start : blocks.stop]]


def _joined(caches: PagedCaches, runs: Iterable[Span]) -> Boxes:
    """Neighbouring layers as one box."""
    found: list[Span] = []
    for layers in runs:
        if found and found[-1].stop == layers.start:
            found[-1] = Span(found[-1].start, layers.stop)
        else:
            found.append(layers)
    return tuple(Box(layers, caches.heads) for layers in found)
