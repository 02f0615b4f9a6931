"""What a caller hands to a copy, checked once for every implementation.

In:  planes, a dense view, block ids, and where the wanted tokens and heads begin.
Out: a Selection: exactly the blocks touched, and which tokens and heads of them; two for a copy between planes.
Law: a Selection that exists can be copied without touching memory outside the planes and the dense view.

A plane is a strided view [B, T, H, D] of one layer's K or V; one call takes several that are equal but for their
address. A dense view is [P, T', H', D], one entry per plane, with any strides. Legend: B blocks, P planes, T tokens
per block, H heads, D head size; T' and H' are the tokens and heads copied. An engine that stores opaque tiles has T =
1 and a D that spans the whole tile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring blocks of which the same slots are copied. Every field is half open: (start, stop)."""

    tokens: tuple[int, int]
    ordinals: tuple[int, int]
    slots: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of the planes one call copies; tokens count from slot 0 of `block_ids[0]`."""

    block_ids: tuple[int, ...]
    tokens_per_block: int
    first_token: int
    num_tokens: int
    first_head: int
    num_heads: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return not (self.num_tokens and self.num_heads)

    def segments(self) -> Iterator[Segment]:
        """At most three: the rest of the first block, whole blocks, the beginning of the last block.

        block      |. . a a|b b b b|b b b b|c . . .|
        tokens          0 2         10        11
        """
        if self.is_empty:
            return
        size, stop = self.tokens_per_block, self.first_token + self.num_tokens
        whole_start, whole_stop = -(-self.first_token // size), stop // size
        if whole_start > whole_stop:
            yield self._segment(self.first_token, stop)
            return
        for start, end in (
            (self.first_token, whole_start * size),
            (whole_start * size, whole_stop * size),
            (whole_stop * size, stop),
        ):
            if start < end:
                yield self._segment(start, end)

    def _segment(self, start: int, stop: int) -> Segment:
        size = self.tokens_per_block
        ordinals = start // size, -(-stop // size)
        slots = (start % size, stop - ordinals[0] * size) if ordinals[1] - ordinals[0] == 1 else (0, size)
        return Segment((start - self.first_token, stop - self.first_token), ordinals, slots)


@dataclass(frozen=True, slots=True)
class MappedPlanes:
    """Planes [B, T, H, D] by their addresses: those of another process, mapped into this one, or checked ones of ours.

    Strides count elements. Whoever has them answers for the memory being there until the copy has run. `device` is
    where they are written from, if they are ours.
    """

    addresses: tuple[int, ...]
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device | None = None

    @classmethod
    def of(cls, planes: Sequence[Tensor], moved_by: int = 0) -> "MappedPlanes":
        """Of planes that are equal but for their address; `moved_by`: where their memory is mapped, minus where it
        is."""
        _check_planes(planes)
        blocks, tokens, heads, head_size = planes[0].shape
        block, token, head, element = planes[0].stride()
        addresses = tuple(plane.data_ptr() + moved_by for plane in planes)
        shape, strides = (blocks, tokens, heads, head_size), (block, token, head, element)
        return cls(addresses, shape, strides, planes[0].dtype, planes[0].device)


class Corner(NamedTuple):
    """Where a copy begins in planes: `first_token` counts from slot 0 of the first block listed."""

    first_token: int = 0
    first_head: int = 0


ORIGIN: Final = Corner()


def select_pair(
    planes: Sequence[Tensor] | MappedPlanes,
    block_ids: Sequence[int],
    source: Sequence[Tensor] | MappedPlanes,
    source_ids: Sequence[int],
    *,
    num_tokens: int,
    num_heads: int,
    at: Corner,
    source_at: Corner,
) -> tuple[Selection, Selection]:
    """Checks one copy from paged planes to paged planes: what it writes, and what it reads. ValueError for a misfit."""
    (shape, kind), (source_shape, source_kind) = _shape_and_kind(planes), _shape_and_kind(source)
    if kind != source_kind:
        raise ValueError(f"the planes do not fit each other (number, D, dtype): ours={kind}, theirs={source_kind}")
    written = select_among(shape, block_ids, at, num_tokens, num_heads)
    check_distinct(written)
    return written, select_among(source_shape, source_ids, source_at, num_tokens, num_heads)


def _shape_and_kind(
    planes: Sequence[Tensor] | MappedPlanes,
) -> tuple[tuple[int, ...], tuple[int, int, torch.dtype]]:
    """(their shape, what must be equal on both sides of a copy), of planes that are alike."""
    if isinstance(planes, MappedPlanes):
        return planes.shape, (len(planes.addresses), planes.shape[3], planes.dtype)
    _check_planes(planes)
    return tuple(planes[0].shape), (len(planes), planes[0].shape[3], planes[0].dtype)


def select(
    dense: Tensor, planes: Sequence[Tensor], block_ids: Sequence[int], *, first_token: int, first_head: int
) -> Selection:
    """Checks one call; `first_token` counts from slot 0 of `block_ids[0]`. ValueError names both sides of a misfit."""
    _check_planes(planes)
    check_dense(dense, planes)
    return select_among(
        tuple(planes[0].shape), block_ids, Corner(first_token, first_head), dense.shape[1], dense.shape[2]
    )


def check_distinct(selection: Selection) -> None:
    """ValueError if a block would be written twice."""
    distinct = len(set(selection.block_ids))
    if distinct != len(selection.block_ids):
        raise ValueError(f"a block is written twice: blocks={len(selection.block_ids)}, distinct={distinct}")


def select_among(
    shape: tuple[int, ...], block_ids: Sequence[int], at: Corner, num_tokens: int, num_heads: int
) -> Selection:
    """Checks what is copied of planes of this shape. ValueError names both sides of a misfit."""
    num_blocks, tokens_per_block, heads_held, _ = shape
    _check_span("tokens", at.first_token, num_tokens, len(block_ids) * tokens_per_block)
    _check_span("heads", at.first_head, num_heads, heads_held)
    skipped = at.first_token // tokens_per_block
    stop = -(-(at.first_token + num_tokens) // tokens_per_block)
    touched = tuple(block_ids[skipped:stop]) if num_tokens else ()
    _check_ids(touched, num_blocks)
    first_token = at.first_token - skipped * tokens_per_block
    return Selection(touched, tokens_per_block, first_token, num_tokens, at.first_head, num_heads)


def _check_planes(planes: Sequence[Tensor]) -> None:
    if not planes:
        raise ValueError("no planes: got=0, least=1")
    shape, strides, dtype, device = first = _kind(planes[0])
    if len(shape) != 4:
        raise ValueError(f"a plane is not [B, T, H, D]: got={tuple(shape)}, axes=4")
    for plane in planes:
        # Why not as tuples: this runs for every plane of every call, and is most of the call's time on the host.
        if plane.shape != shape or plane.stride() != strides or plane.dtype != dtype or plane.device != device:
            raise ValueError(f"planes differ in shape, strides, dtype or device: first={first}, other={_kind(plane)}")


def _kind(plane: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return plane.shape, plane.stride(), plane.dtype, plane.device


def check_dense(dense: Tensor, planes: Sequence[Tensor]) -> None:
    """ValueError unless the dense view has an entry for each plane, of their kind, and can be reached from them."""
    if dense.ndim != 4 or dense.shape[0] != len(planes) or dense.shape[3] != planes[0].shape[3]:
        expected = f"[{len(planes)}, T', H', {planes[0].shape[3]}]"
        raise ValueError(f"the dense view does not fit the planes: got={tuple(dense.shape)}, expected={expected}")
    is_reachable = dense.device == planes[0].device or (planes[0].is_cuda and dense.is_pinned())
    if dense.dtype != planes[0].dtype or not is_reachable:
        ours, theirs = f"{dense.dtype} on {dense.device}", f"{planes[0].dtype} on {planes[0].device}"
        raise ValueError(f"the dense view is of another kind than the planes: dense={ours}, planes={theirs}")


def _check_span(what: str, first: int, count: int, held: int) -> None:
    if first < 0 or count < 0 or first + count > held:
        raise ValueError(f"{what} out of bounds: wanted=[{first}, {first + count}), held=[0, {held})")


def _check_ids(block_ids: tuple[int, ...], num_blocks: int) -> None:
    if block_ids and (min(block_ids) < 0 or max(block_ids) >= num_blocks):
        raise ValueError(f"block id out of bounds: got={min(block_ids)}..{max(block_ids)}, held=[0, {num_blocks})")
