"""Everything a copy needs besides the kernel: in which words and rows it is made, and over which grid.

In:  the two ends of a copy, checked, and its Extent.
Out: a Launch: grid, table, arguments, and the width of the words moved.
Law: offsets are 64 bit, the grid has one axis, and no upload waits for the device or reuses memory the device still
reads.

All planes are served by one launch: a table of int64 [source addresses | target addresses | source block ids | target
block ids] travels with it. A row is what lies together at both ends: the elements of one (token, head), of all heads of
a token, or of all tokens of a unit. It is copied in the widest words that sizes, strides and addresses allow.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from kv_kernels.tuning import Tuning

Backend = Literal["reference", "triton"]

MAX_GRID: Final = 2**31 - 1
MIN_TILE_HEIGHT: Final = 4
"""Rows of a tile, at least: runs of 4 KiB, four at a time, are the widest tile that is used."""


class Route(NamedTuple):
    """Which way a copy went: the implementation, and the bytes of the words it moved."""

    backend: Backend
    word_bytes: int


@dataclass(frozen=True, slots=True)
class End:
    """One end of a copy; element d of (plane p, token t, head h) lies `itemsize` times

        block_ids[g // T] * strides[0] + g % T * strides[1] + h * strides[2] + d * strides[3],  g = first_token + t

    after addresses[p], where T is `tokens_per_block`. A dense end has no block ids: its tokens all lie in block 0.
    """

    addresses: tuple[int, ...]
    strides: tuple[int, ...]
    block_ids: tuple[int, ...] | None = None
    tokens_per_block: int = 1
    first_token: int = 0


class Extent(NamedTuple):
    """What is copied of every plane, at least one token and one head; `itemsize` in bytes."""

    num_tokens: int
    num_heads: int
    head_size: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: `kernel[grid](table, *arguments, **constants)`."""

    grid: tuple[int]
    table: Tensor
    arguments: tuple[int, ...]
    constants: dict[str, int | bool]
    word_bytes: int


class _Rows(NamedTuple):
    """How tokens and heads fold into rows: `num_units` of `unit_tokens`, the first of which begins `skew` early."""

    elements: int
    num_heads: int
    unit_tokens: int
    skew: int


def choose_backend(device: torch.device, backend: Backend | None, *, interpreted: bool) -> Backend:
    """Triton for CUDA devices, the reference for others, unless told; ValueError if Triton cannot run there."""
    is_cuda = device.type == "cuda"
    chosen: Backend = backend or ("triton" if is_cuda else "reference")
    if chosen == "triton" and not (is_cuda or interpreted):
        raise ValueError(f"a Triton kernel needs a CUDA tensor or TRITON_INTERPRET=1: device={device}")
    return chosen


def plan_launch(source: End, target: End, extent: Extent, tuning: Tuning, device: torch.device) -> Launch:
    """The launch on `device` that copies `extent` from `source` to `target`."""
    ends = source, target
    word_bytes = _word_bytes(ends, extent)
    rows = _rows(ends, extent)
    grain = max(1, word_bytes // 8)
    num_words = rows.elements * extent.itemsize // word_bytes * grain
    tile_width = min(triton.next_power_of_2(num_words), tuning.tile_words // MIN_TILE_HEIGHT)
    tile_height = tuning.tile_words // tile_width
    num_units = triton.cdiv(rows.skew + extent.num_tokens, rows.unit_tokens)
    num_rows = num_units * rows.num_heads
    pieces_per_plane = triton.cdiv(num_rows, tile_height) * triton.cdiv(num_words, tile_width)
    num_pieces = _check_grid(len(source.addresses) * pieces_per_plane)
    return Launch(
        grid=(min(num_pieces, tuning.num_programs or num_pieces),),
        table=_upload(_table(ends), device),
        arguments=(
            len(source.addresses),
            len(source.block_ids or ()),
            *(num_pieces, pieces_per_plane),
            *(extent.num_tokens, rows.num_heads, num_rows, num_units, rows.unit_tokens, rows.skew),
            num_words // grain // rows.unit_tokens,
            *_arguments(source, extent.itemsize, word_bytes),
            *_arguments(target, extent.itemsize, word_bytes),
        ),
        constants={
            "SOURCE_PAGED": source.block_ids is not None,
            "TARGET_PAGED": target.block_ids is not None,
            "HEADS_INSIDE": _heads_inside(target if source.block_ids is None else source, rows.unit_tokens),
            "GRAIN": grain,
            "ROWS": tile_height,
            "WORDS": tile_width,
            "num_warps": tuning.num_warps,
        },
        word_bytes=word_bytes,
    )


def _word_bytes(ends: Sequence[End], extent: Extent) -> int:
    """16, 8, 4, 2 or 1: the widest word every row consists of. 16 means pairs of 8-byte words, aligned as pairs."""
    item = extent.itemsize
    if any(end.strides[3] != 1 for end in ends):
        return item
    strides = [stride for end in ends for stride in end.strides[:3]]
    # One number that a width divides if and only if it divides all of them.
    common = gcd(
        *(stride * item for stride in (*strides, extent.head_size)), *(a for end in ends for a in end.addresses)
    )
    return next(width for width in (16, 8, 4, 2, 1) if width == item or common % width == 0)


def _rows(ends: Sequence[End], extent: Extent) -> _Rows:
    """The longest rows that are in one piece at both ends, whatever the request's length.

    A unit of tokens is a block, or the largest part of blocks that both ends have whole.
    """
    elements, heads = extent.head_size, extent.num_heads
    if any(end.strides[3] != 1 for end in ends):
        return _Rows(elements, heads, 1, 0)
    if all(end.strides[2] == elements for end in ends):
        elements, heads = elements * heads, 1
    paged = [end for end in ends if end.block_ids is not None]
    unit = gcd(*(end.tokens_per_block for end in paged))
    skew = paged[0].first_token % unit
    if all(end.strides[1] == elements for end in ends) and all(end.first_token % unit == skew for end in paged):
        return _Rows(elements * unit, heads, unit, skew)
    return _Rows(elements, heads, 1, 0)


def _heads_inside(end: End, unit_tokens: int) -> bool:
    """Whether in a paged end the next head is nearer than the next unit."""
    return end.strides[2] < end.strides[0 if unit_tokens == end.tokens_per_block else 1]


def _arguments(end: End, itemsize: int, word_bytes: int) -> tuple[int, ...]:
    """Block, token and head strides in grains, the element stride in words."""
    *strides, element = end.strides
    return end.tokens_per_block, end.first_token, *(stride * itemsize // word_bytes for stride in strides), element


def _table(ends: Sequence[End]) -> list[int]:
    return [number for end in ends for number in end.addresses] + [
        block_id for end in ends for block_id in end.block_ids or ()
    ]


def _upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on `device`, copied by the current stream.

    Why a fresh pinned tensor each time: the host allocator gives its memory to nobody else before the copy has run, so
    there is nothing to wait for and nothing to overwrite.
    """
    table = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _check_grid(pieces: int) -> int:
    if pieces > MAX_GRID:
        raise ValueError(f"the copy needs too many programs: got={pieces}, most={MAX_GRID}")
    return pieces
