"""The blocks of one sequence in our caches, kept for all of its chunks.

In:  our caches; the BlockTables of sequences that are copied.
Out: for each of them, and each layer group, RequestBlocks: the block ids, and the same on the device.
Law: what is kept is what was given: BlockTables are values, known by their identity while they are kept. Tables of a
     shelf are used on one stream alone (`kv_kernels.block_table`), so one may be dropped while copies use it.

Why kept: listing and uploading 64 planes and a thousand ids takes longer on the host than the copy takes on a GPU.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from torch import Tensor

from kv_core.ids import BlockId
from kv_core.spans import Span
from kv_kernels.block_table import BlockTable
from kv_kernels.layout import MappedPlanes
from kv_transfer.orders import BlockTables
from kv_transfer.plan.ranges import BlockRange, block_range
from kv_transfer.pools import PagedCaches

MAX_HELD: Final = 256
"""Tables on a shelf, of a few KiB each: those of more requests than can be under way at once."""

Kind = tuple[tuple[Tensor, ...], MappedPlanes]
"""Planes that are equal but for their address; and the same checked."""


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Of one layer group: `kinds` has one table, or one for each kind of plane (K, V) if they differ in strides."""

    block_ids: tuple[BlockId, ...]
    kinds: tuple[BlockTable, ...]

    def holding(self, tokens: Span, tokens_per_block: int) -> BlockRange:
        """The blocks of these tokens; CallerError if there are none, or a hole among them."""
        return block_range(self.block_ids, tokens, tokens_per_block)


class Shelf:
    """The tables of the sequences that were copied last, one way. Of the copy thread."""

    def __init__(self, caches: PagedCaches) -> None:
        self._caches = caches
        self._kinds: tuple[Kind, ...] | None = None
        self._held: OrderedDict[tuple[int, int], tuple[BlockTables, RequestBlocks]] = OrderedDict()

    def take(self, tables: BlockTables, group: int) -> RequestBlocks:
        """The blocks of one layer group."""
        key = id(tables), group
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = tables, self._made(tables, group)
            if len(self._held) > MAX_HELD:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(key)
        return found[1]

    def _made(self, tables: BlockTables, group: int) -> RequestBlocks:
        if self._kinds is None:
            self._kinds = kinds_of(self._caches)
        ids = tuple(cast("Sequence[BlockId]", tables.by_group[group]))
        return RequestBlocks(ids, tuple(BlockTable(planes, ids, mapped) for planes, mapped in self._kinds))


def pays(caches: PagedCaches) -> bool:
    """Whether copies of these caches wait for the host: on a GPU."""
    return bool(caches.planes) and caches.planes[0].is_cuda


def kinds_of(caches: PagedCaches) -> tuple[Kind, ...]:
    """All planes, if all are equal but for their address; else those of each kind. They have an order within each."""
    if len({plane.stride() for plane in caches.planes}) == 1:
        return ((caches.planes, MappedPlanes.of(caches.planes)),)
    kinds = (caches.planes[kind :: caches.num_planes] for kind in range(caches.num_planes))
    return tuple((planes, MappedPlanes.of(planes)) for planes in kinds)
