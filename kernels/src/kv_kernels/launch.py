"""Everything a gather or scatter kernel needs besides its body: who runs it, in which words, over which grid.

In:  a checked Selection with its planes and dense view.
Out: a Launch: grid, arguments, and the Route that tells which way was taken.
Law: offsets are 64 bit, the grid has one axis, and no upload waits for the device or reuses memory the device still
reads.

All planes are served by one launch: a table of int64 [P addresses | block ids] travels with it. A row is the D
elements of one (token, head), copied in the widest words that sizes, strides and addresses allow.
"""

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Final, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from kv_kernels.layout import Selection
from kv_kernels.reference import WORDS

Backend = Literal["reference", "triton"]

WORDS_PER_PROGRAM: Final = 2048
MAX_WORDS_PER_ROW: Final = 1024
MAX_GRID: Final = 2**31 - 1


class Route(NamedTuple):
    """Which way a copy went: the implementation, and the bytes of the words it moved."""

    backend: Backend
    word_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: `kernel[grid](*arguments, **constants)`."""

    grid: tuple[int]
    arguments: tuple[object, ...]
    constants: dict[str, int | bool]
    word_bytes: int


def choose_backend(dense: Tensor, backend: Backend | None, *, interpreted: bool) -> Backend:
    """Triton for CUDA tensors, the reference for others, unless told; ValueError if Triton cannot run there."""
    chosen: Backend = backend or ("triton" if dense.is_cuda else "reference")
    if chosen == "triton" and not (dense.is_cuda or interpreted):
        raise ValueError(f"a Triton kernel needs a CUDA tensor or TRITON_INTERPRET=1: device={dense.device}")
    return chosen


def on_device(dense: Tensor) -> AbstractContextManager[object]:
    """Makes the device of `dense` the current one, since that is where Triton launches."""
    return torch.cuda.device(dense.device) if dense.is_cuda else nullcontext()


def plan_launch(dense: Tensor, planes: Sequence[Tensor], selection: Selection) -> Launch:
    """The launch that copies `selection`, at least one token and one head of it."""
    addresses = [plane.data_ptr() for plane in planes]
    word_bytes = _word_bytes(dense, planes[0], addresses)
    words = WORDS[min(word_bytes, 8)]
    dense_w, plane_w = dense.view(words), planes[0].view(words)
    num_words = dense_w.shape[3]
    words_per_step = min(triton.next_power_of_2(num_words), MAX_WORDS_PER_ROW)
    rows = WORDS_PER_PROGRAM // words_per_step
    programs_per_plane = triton.cdiv(selection.num_tokens * selection.num_heads, rows)
    return Launch(
        grid=(_check_grid(len(planes) * programs_per_plane),),
        arguments=(
            dense_w,
            _upload([*addresses, *selection.block_ids], dense.device),
            len(planes),
            programs_per_plane,
            *(selection.num_tokens, selection.num_heads, num_words),
            *(selection.tokens_per_block, selection.first_token, selection.first_head),
            *dense_w.stride(),
            *plane_w.stride(),
        ),
        constants={
            "HEADS_INSIDE": plane_w.stride(2) < plane_w.stride(1),
            "PAIRED": word_bytes == 16,
            "ROWS": rows,
            "WORDS": words_per_step,
        },
        word_bytes=word_bytes,
    )


def _word_bytes(dense: Tensor, plane: Tensor, addresses: Sequence[int]) -> int:
    """16, 8, 4, 2 or 1: the widest word every row consists of. 16 means pairs of 8-byte words, aligned as pairs."""
    item = dense.dtype.itemsize
    if dense.stride(3) != 1 or plane.stride(3) != 1:
        return item
    strides = (*dense.stride()[:3], *plane.stride()[:3], dense.shape[3])
    # One number that a width divides if and only if it divides all of them.
    common = gcd(*(stride * item for stride in strides), dense.data_ptr(), *addresses)
    return next(width for width in (16, 8, 4, 2, 1) if width == item or common % width == 0)


def _upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on `device`, copied by the current stream.

    Why a fresh pinned tensor each time: the host allocator gives its memory to nobody else before the copy has run, so
    there is nothing to wait for and nothing to overwrite.
    """
    table = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _check_grid(programs: int) -> int:
    if programs > MAX_GRID:
        raise ValueError(f"the copy needs too many programs: got={programs}, most={MAX_GRID}")
    return programs
