"""Everything a copy needs besides the kernel: in which words and rows it is made, and over which grid.

In:  the two ends of a copy, checked, its Extent, and a table on the device with what its ends list.
Out: a Launch: grid, table, arguments, and the width of the words moved.
Law: offsets are 64 bit, the grid has one axis, and no upload waits for the device or reuses memory the device still
reads.

All planes are served by one launch: a table of int64 has the addresses of the planes of its paged ends, and their block
ids. It is made for one copy, or kept for many (see `block_table`). A row is what lies together at both ends: the
elements of one (token, head), of all heads of a token, or of all tokens of a unit. It is copied in the widest words
that sizes, strides and addresses allow.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Final, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from kv_kernels.tuning import Tuning

Backend = Literal["reference", "triton"]

MAX_GRID: Final = 2**31 - 1
MAX_WORD_BYTES: Final = 16
MIN_TILE_HEIGHT: Final = 4
"""Rows of a tile, at least: runs of 4 KiB, four at a time, are the widest tile that is used."""


class Route(NamedTuple):
    """Which way a copy went: the implementation, and the bytes of the words it moved."""

    backend: Backend
    word_bytes: int


class Listed(NamedTuple):
    """Where a table has what a paged end needs: the addresses of its planes, one after the other, and its block ids."""

    addresses_at: int
    ids_at: int


class Lie(NamedTuple):
    """How one end of a copy lies, wherever that is; element d of (plane p, token t, head h) lies `itemsize` times

        block_ids[g // T] * strides[0] + g % T * strides[1] + h * strides[2] + d * strides[3],  g = first_token + t

    after the beginning of plane p, where T is `tokens_per_block`. The planes of a dense end begin `plane_step` bytes
    apart, and its tokens all lie in block 0; T is 0. Those of a paged end are listed.
    """

    strides: tuple[int, int, int, int]
    plane_step: int = 0
    tokens_per_block: int = 0
    first_token: int = 0

    @property
    def is_paged(self) -> bool:
        return self.tokens_per_block > 0


class End(NamedTuple):
    """One end of a copy: its planes begin `base` after their addresses in a table, or after 0 if it is dense.

    `alignment` in bytes divides every such beginning.
    """

    lie: Lie
    base: int
    alignment: int
    listed: Listed = Listed(0, 0)


class Extent(NamedTuple):
    """What is copied of every plane, at least one token and one head; `itemsize` in bytes."""

    num_planes: int
    num_tokens: int
    num_heads: int
    head_size: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: `kernel[grid](table, sums, *arguments, **constants)`.

    `num_sums`: programs that tell the sum of what they copied; 0 if nobody asks for it.
    """

    grid: tuple[int]
    table: Tensor
    arguments: tuple[int, ...]
    constants: dict[str, int | bool]
    word_bytes: int
    num_sums: int = 0


class _Rows(NamedTuple):
    """How tokens and heads fold into rows: `num_units` of `unit_tokens`, the first of which begins `skew` early."""

    elements: int
    num_heads: int
    unit_tokens: int
    skew: int


@dataclass(frozen=True, slots=True)
class _Fold:
    """All of a Launch that does not say where its ends are."""

    num_programs: int
    word_bytes: int
    rows: tuple[int, ...]
    lies: tuple[tuple[int, ...], ...]
    """Arguments of source, target and sum, without their places."""
    constants: dict[str, int | bool]


def choose_backend(device: torch.device, backend: Backend | None, *, interpreted: bool) -> Backend:
    """Triton for CUDA devices, the reference for others, unless told; ValueError if Triton cannot run there."""
    is_cuda = device.type == "cuda"
    chosen: Backend = backend or ("triton" if is_cuda else "reference")
    if chosen == "triton" and not (is_cuda or interpreted):
        raise ValueError(f"a Triton kernel needs a CUDA tensor or TRITON_INTERPRET=1: device={device}")
    return chosen


def plan_launch(
    source: End, target: End, extent: Extent, tuning: Tuning, table: Tensor, summed: End | None = None
) -> Launch:
    """The launch that copies `extent` from `source` to `target`, on the device of the table that they list.

    `summed`: a dense end that says at which byte of a row of 64-bit words each element counts; the launch then also
    tells the weighted sum of these words (see `weighted_sum`).
    """
    ends = (source, target) if summed is None else (source, target, summed)
    # Why no more than 16: wider words than that there are none, and equal folds are made once.
    alignment = gcd(MAX_WORD_BYTES, *(end.alignment for end in ends))
    fold = _fold(tuple(end.lie for end in ends), alignment, extent, tuning)
    from_source, from_target, from_sum = fold.lies
    return Launch(
        grid=(fold.num_programs,),
        table=table,
        arguments=(
            *fold.rows,
            *(*source.listed, source.base, *from_source),
            *(*target.listed, target.base, *from_target),
            *(0 if summed is None else summed.base // fold.word_bytes, *from_sum),
        ),
        constants=fold.constants,
        word_bytes=fold.word_bytes,
        num_sums=0 if summed is None else fold.num_programs,
    )


@lru_cache(maxsize=1024)
def _fold(lies: tuple[Lie, ...], alignment: int, extent: Extent, tuning: Tuning) -> _Fold:
    """Kept, since the chunks of a request differ only in where they are."""
    lies = _alike(lies, extent)
    source, target, *_ = lies
    word_bytes = _word_bytes(lies, alignment, extent)
    rows = _rows(lies, extent)
    grain = max(1, word_bytes // 8)
    num_words = rows.elements * extent.itemsize // word_bytes * grain
    tile_width = min(triton.next_power_of_2(num_words), tuning.tile_words // MIN_TILE_HEIGHT)
    tile_height = tuning.tile_words // tile_width
    num_units = triton.cdiv(rows.skew + extent.num_tokens, rows.unit_tokens)
    num_rows = num_units * rows.num_heads
    pieces_per_plane = triton.cdiv(num_rows, tile_height) * triton.cdiv(num_words, tile_width)
    num_pieces = _check_grid(extent.num_planes * pieces_per_plane)
    return _Fold(
        num_programs=min(num_pieces, tuning.num_programs or num_pieces),
        word_bytes=word_bytes,
        rows=(
            *(num_pieces, pieces_per_plane),
            *(extent.num_tokens, rows.num_heads, num_rows, num_units, rows.unit_tokens, rows.skew),
            num_words // grain // rows.unit_tokens,
        ),
        lies=(
            _arguments(source, extent.itemsize, word_bytes),
            _arguments(target, extent.itemsize, word_bytes),
            _summed_arguments(lies[2] if len(lies) > 2 else _NOT_SUMMED, extent.itemsize, word_bytes),
        ),
        constants={
            "SOURCE_PAGED": source.is_paged,
            "TARGET_PAGED": target.is_paged,
            "SUM": len(lies) > 2,
            "HEADS_INSIDE": _heads_inside(source if source.is_paged else target, rows.unit_tokens),
            "GRAIN": grain,
            "ROWS": tile_height,
            "WORDS": tile_width,
            "num_warps": tuning.num_warps,
        },
    )


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on `device`, copied by the current stream.

    Why a fresh pinned tensor each time: the host allocator gives its memory to nobody else before the copy has run, so
    there is nothing to wait for and nothing to overwrite. The table itself is given to nobody else before what the
    stream was given until it was dropped, so whoever uses it on this stream alone need not wait either.
    """
    table = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _word_bytes(lies: Sequence[Lie], alignment: int, extent: Extent) -> int:
    """16, 8, 4, 2 or 1: the widest word every row consists of. 16 means pairs of 8-byte words, aligned as pairs."""
    item = extent.itemsize
    if any(lie.strides[3] != 1 for lie in lies):
        return item
    lengths = [extent.head_size, *(stride for lie in lies for stride in lie.strides[:3])]
    # One number that a width divides if and only if it divides all of them.
    common = gcd(alignment, *(length * item for length in lengths))
    return next(width for width in (16, 8, 4, 2, 1) if width == item or common % width == 0)


def _rows(lies: Sequence[Lie], extent: Extent) -> _Rows:
    """The longest rows that are in one piece at both ends, whatever the request's length.

    A unit of tokens is a block, or the largest part of blocks that both ends have whole.
    """
    elements, heads = extent.head_size, extent.num_heads
    if any(lie.strides[3] != 1 for lie in lies):
        return _Rows(elements, heads, 1, 0)
    if all(lie.strides[2] == elements for lie in lies):
        elements, heads = elements * heads, 1
    paged = [lie for lie in lies if lie.is_paged]
    unit = gcd(*(lie.tokens_per_block for lie in paged))
    skew = paged[0].first_token % unit
    if all(lie.strides[1] == elements for lie in lies) and all(lie.first_token % unit == skew for lie in paged):
        return _Rows(elements * unit, heads, unit, skew)
    return _Rows(elements, heads, 1, 0)


def _alike(lies: tuple[Lie, ...], extent: Extent) -> tuple[Lie, ...]:
    """A single token of a dense end is never stepped over, so it folds as the blocks do: with no kernel of its own."""
    if extent.num_tokens > 1:
        return lies
    token = next(lie for lie in lies if lie.is_paged).strides[1]
    return tuple(
        lie if lie.is_paged else lie._replace(strides=(lie.strides[0], token, *lie.strides[2:])) for lie in lies
    )


def _heads_inside(lie: Lie, unit_tokens: int) -> bool:
    """Whether in a paged end the next head is nearer than the next unit."""
    return lie.strides[2] < lie.strides[0 if unit_tokens == lie.tokens_per_block else 1]


def _arguments(lie: Lie, itemsize: int, word_bytes: int) -> tuple[int, ...]:
    """The plane step in bytes; block, token and head strides in grains, the element stride in words."""
    *strides, element = lie.strides
    grains = (stride * itemsize // word_bytes for stride in strides)
    return lie.plane_step, max(1, lie.tokens_per_block), lie.first_token, *grains, element


def _summed_arguments(lie: Lie, itemsize: int, word_bytes: int) -> tuple[int, ...]:
    """Plane, token and head strides in grains, the element stride in words."""
    _, token, head, element = lie.strides
    return (*(step // word_bytes for step in (lie.plane_step, token * itemsize, head * itemsize)), element)


_NOT_SUMMED: Final = Lie((0, 0, 0, 1))


def _check_grid(pieces: int) -> int:
    if pieces > MAX_GRID:
        raise ValueError(f"the copy needs too many programs: got={pieces}, most={MAX_GRID}")
    return pieces
