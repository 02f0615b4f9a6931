"""A weighted sum of 64-bit words in one pass, the checksum of staged bytes on a GPU.

In:  int64 words [n], in one piece.
Out: int64 [1] on their device: sum(w[i] * k[i]) modulo 2**64, with k[i] = mix(i + 1) | 1, the finalizer of MurmurHash3.
Law: equal to `reference.weighted_sum`. The words are read once and nothing else is; weights are computed, not stored.
The sum is the same in any order. On a GPU it is queued on the current stream, without waiting.

Each program adds up many tiles in registers; what is left, a tile a program, is added up by torch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# Device code is typed by Triton.

from contextlib import nullcontext
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.reference import MIX

TILE: Final = 2048
NUM_WARPS: Final = 8
NUM_PROGRAMS: Final = 264
"""Two a multiprocessor of an H200."""

_FIRST: Final = tl.constexpr(MIX[0])
_SECOND: Final = tl.constexpr(MIX[1])
_LOW: Final = tl.constexpr((1 << 31) - 1)


@triton.jit
def weight(place):
    """k[i] of the words at these places, int64."""
    mixed = place + 1
    # Shifts of signed words let ones in; the mask takes them out.
    mixed = (mixed ^ ((mixed >> 33) & _LOW)) * _FIRST
    mixed = (mixed ^ ((mixed >> 33) & _LOW)) * _SECOND
    return (mixed ^ ((mixed >> 33) & _LOW)) | 1


@triton.jit
def _sum_kernel(words_ptr, partial_ptr, num_words, TILE: tl.constexpr):
    """partial[p, j] = sum of w[i] * k[i] over the words j of the tiles of program p."""
    lane = tl.arange(0, TILE).to(tl.int64)
    total = lane * 0
    step = tl.num_programs(0).to(tl.int64) * TILE
    start = tl.program_id(0).to(tl.int64) * TILE
    for first in range(start, num_words, step):
        place = first + lane
        word = tl.load(words_ptr + place, mask=place < num_words, other=0)
        total += word * weight(place)
    tl.store(partial_ptr + start + lane, total)


def weighted_sum(words: Tensor) -> Tensor:
    """int64 [1], of int64 words [n]; ValueError for anything else, or words of a CPU without the interpreter."""
    if words.dtype != torch.int64 or words.ndim != 1 or not words.is_contiguous():
        got = f"{words.dtype} {tuple(words.shape)} strides={words.stride()}"
        raise ValueError(f"not words in one piece: got={got}, wanted=torch.int64 [n]")
    if not (words.is_cuda or is_interpreted()):
        raise ValueError(f"a Triton kernel needs a CUDA tensor or TRITON_INTERPRET=1: device={words.device}")
    num_programs = max(1, min(NUM_PROGRAMS, triton.cdiv(words.numel(), TILE)))
    partial = torch.empty(num_programs * TILE, dtype=torch.int64, device=words.device)
    with torch.cuda.device(words.device) if words.is_cuda else nullcontext():
        _sum_kernel[(num_programs,)](words, partial, words.numel(), TILE=TILE, num_warps=NUM_WARPS)
    return partial.sum(0, keepdim=True)


def is_interpreted() -> bool:
    """Whether the kernel runs on CPU tensors: TRITON_INTERPRET=1 was set before this module was imported."""
    return not isinstance(_sum_kernel, triton.JITFunction)
