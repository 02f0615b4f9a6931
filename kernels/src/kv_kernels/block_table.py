"""The blocks of one request in one cache: checked and uploaded once, then copied in parts, one launch each.

In:  planes that are alike, and the block ids of the request in order; a negative id is a hole.
Out: `gather_part` fills a dense view from a part of the blocks, `scatter_part` a part of the blocks from a dense view;
     both answer the Route taken, and the weighted sum of what was copied if it is wanted.
Law: as `gather` and `scatter`; a part with a hole is refused. On a GPU the upload is queued with the first part, and a
     table is used on one stream alone: it may be dropped at any time, its memory is given to nobody else before what
     that stream has been given is over. The sum is of the very words that were copied, in the same pass.

Legend: [P, T', H', D] as in `layout`.
"""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from kv_kernels import paged_copy, reference
from kv_kernels.ends import dense_end, extent_of, listed_end, summed_end
from kv_kernels.launch import Backend, End, Listed, Route, choose_backend, plan_launch, upload
from kv_kernels.layout import Corner, MappedPlanes, Selection, check_dense, check_distinct, select_among
from kv_kernels.tuning import HOST, SUMMING, Tuning


class At(NamedTuple):
    """Where a part begins: which plane, which token from slot 0 of the first block on, which head."""

    first_plane: int = 0
    first_token: int = 0
    first_head: int = 0


class Copied(NamedTuple):
    """The route of a copy; int64 [n], whose sum modulo 2**64 is the weighted sum of what was copied, if it was wanted.

    On a GPU the stream fills it.
    """

    route: Route
    sums: Tensor | None


class BlockTable:
    """The blocks of one request. Of one stream."""

    __slots__ = ("_alignment", "_is_distinct", "_uploaded", "block_ids", "mapped", "planes")

    def __init__(self, planes: Sequence[Tensor], block_ids: Sequence[int], mapped: MappedPlanes | None = None) -> None:
        """`mapped`: `MappedPlanes.of(planes)`, if they are checked already."""
        self.planes = planes
        self.mapped = mapped or MappedPlanes.of(planes)
        self.block_ids = tuple(block_ids)
        self._is_distinct = len(set(self.block_ids)) == len(self.block_ids)
        self._alignment = gcd(*self.mapped.addresses)
        self._uploaded: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.planes[0].device

    def select(self, dense: Tensor, at: At, *, is_written: bool) -> Selection:
        """Checks one part, of the dense view's size. ValueError names both sides of a misfit."""
        planes = self.planes[at.first_plane : at.first_plane + dense.shape[0]] if at.first_plane >= 0 else ()
        if not planes:
            raise ValueError(f"planes out of bounds: first={at.first_plane}, held=[0, {len(self.planes)})")
        check_dense(dense, planes)
        corner = Corner(at.first_token, at.first_head)
        found = select_among(self.mapped.shape, self.block_ids, corner, dense.shape[1], dense.shape[2])
        if is_written and not self._is_distinct:
            check_distinct(found)
        return found

    def end(self, selected: Selection, at: At) -> End:
        """The selected part, as the table lists it."""
        mapped = self.mapped
        listed = Listed(at.first_plane, len(mapped.addresses) + at.first_token // mapped.shape[1])
        return listed_end(mapped.strides, mapped.dtype.itemsize, selected, listed, self._alignment)

    def uploaded(self) -> Tensor:
        """The addresses and block ids on the device."""
        if self._uploaded is None:
            self._uploaded = upload((*self.mapped.addresses, *self.block_ids), self.device)
        return self._uploaded


def gather_part(
    out: Tensor,
    blocks: BlockTable,
    at: At,
    *,
    summed_at: int | None = None,
    backend: Backend | None = None,
    tuning: Tuning | None = None,
) -> Copied:
    """Copies the part that begins at `at` into `out` [P, T', H', D].

    `summed_at`: the first element of `out` is this byte of what is summed as 64-bit words; without it nothing is.
    ValueError if the arguments do not fit each other; nothing is written then.
    """
    selected = blocks.select(out, at, is_written=False)
    if choose_backend(blocks.device, backend, interpreted=paged_copy.is_interpreted()) == "reference":
        return Copied(*reference.gather_part(out, blocks.planes[at.first_plane :], selected, summed_at))
    if selected.is_empty:
        return _nothing(out, summed_at)
    return _run(blocks, blocks.end(selected, at), dense_end(out), out, summed_at, tuning)


def scatter_part(
    blocks: BlockTable,
    src: Tensor,
    at: At,
    *,
    summed_at: int | None = None,
    backend: Backend | None = None,
    tuning: Tuning | None = None,
) -> Copied:
    """Copies `src` [P, T', H', D] to the part that begins at `at`; all else as `gather_part`."""
    selected = blocks.select(src, at, is_written=True)
    if choose_backend(blocks.device, backend, interpreted=paged_copy.is_interpreted()) == "reference":
        return Copied(*reference.scatter_part(blocks.planes[at.first_plane :], src, selected, summed_at))
    if selected.is_empty:
        return _nothing(src, summed_at)
    return _run(blocks, dense_end(src), blocks.end(selected, at), src, summed_at, tuning)


def _run(
    blocks: BlockTable, source: End, target: End, dense: Tensor, summed_at: int | None, tuning: Tuning | None
) -> Copied:
    summed = None if summed_at is None else summed_end(dense, summed_at)
    chosen = tuning or (SUMMING if dense.device == blocks.device else HOST)
    launch = plan_launch(source, target, extent_of(dense), chosen, blocks.uploaded(), summed)
    if summed is None:
        return Copied(paged_copy.run(launch), None)
    return Copied(*paged_copy.run_summing(launch))


def _nothing(dense: Tensor, summed_at: int | None) -> Copied:
    sums = None if summed_at is None else torch.zeros(0, dtype=torch.int64, device=dense.device)
    return Copied(Route("triton", dense.dtype.itemsize), sums)
