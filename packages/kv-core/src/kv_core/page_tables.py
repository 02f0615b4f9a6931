"""Tables of page offsets for a batch, as attention kernels read them (core spec 6.3, 6.4, D48).

In:  the manager, the requests of a batch in order, a window and one of its pools.
Out: a `PageTable`: for each request and beam a row of page offsets of keys and one of values.
Law: rows are found by request, never by position in an earlier batch; what a row does not use is NO_PAGE, whoever used
     it before. Blocks of a running request are on the device, so an offset needs no mark of its tier.
"""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from kv_core.ids import RequestId
from kv_core.layout import PoolShape
from kv_core.manager import KVCacheManager

NO_PAGE: Final = -1
"""Entry of a row without a block: behind the last one, or dropped from a sliding window."""


class PageTable(NamedTuple):
    """`rows[i]` belongs to (request, beam) `owners[i]`: offsets of the pages of keys, then of values (the same for a
    joint latent). `num_blocks` is the longest used length of a row.
    """

    owners: tuple[tuple[RequestId, int], ...]
    rows: tuple[tuple["array[int]", "array[int]"], ...]
    num_blocks: int


def page_table(manager: KVCacheManager, request_ids: Sequence[RequestId], window: int, pool: PoolShape) -> PageTable:
    """One row of keys and one of values for each beam of each request, as wide as the longest sequence.

    A layer that is `i`-th in the pool lies `i * num_planes` pages further on. CallerError for an unknown request.
    """
    width = manager.config.max_blocks_per_sequence
    owners = tuple((name, beam) for name in request_ids for beam in range(manager.beam_width(name)))
    slots = [manager.slots(name, window, beam) for name, beam in owners]
    rows = tuple(_row(pool, ours, width) for ours in slots)
    return PageTable(owners, rows, max(map(len, slots), default=0))


def _row(pool: PoolShape, slots: list[int | None], width: int) -> tuple["array[int]", "array[int]"]:
    pages = [(NO_PAGE, NO_PAGE) if slot is None else pool.page_offsets(slot) for slot in slots]
    pages += [(NO_PAGE, NO_PAGE)] * (width - len(slots))
    return array("q", [keys for keys, _ in pages]), array("q", [values for _, values in pages])
