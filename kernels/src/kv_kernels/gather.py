"""Gather: from the blocks of a paged cache into one dense array.

In:  planes, block ids, where the wanted tokens and heads begin (see `layout`).
Out: a dense view [P, T', H', D] filled; the Route taken.
Law: bit-equal to `reference.gather`. On a GPU the copy is queued on the current stream, in one launch, without waiting.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# Device code is typed by Triton.

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kv_kernels import reference
from kv_kernels.launch import Backend, Route, choose_backend, on_device, plan_launch
from kv_kernels.layout import select
from kv_kernels.rows import PER_CALL, rows_of_program


@triton.jit(do_not_specialize=PER_CALL)
def _gather_kernel(
    dense_ptr,
    table_ptr,
    num_planes,
    programs_per_plane,
    num_tokens,
    num_heads,
    num_words,
    tokens_per_block,
    first_token,
    first_head,
    dense_plane_stride,
    dense_token_stride,
    dense_head_stride,
    dense_word_stride,
    block_stride,
    token_stride,
    head_stride,
    word_stride,
    HEADS_INSIDE: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """dense[p, t, h, w] = planes[p][block_ids[g // T], g % T, first_head + h, w], where g = first_token + t."""
    cached, dense, exists = rows_of_program(
        dense_ptr,
        table_ptr,
        num_planes,
        programs_per_plane,
        num_tokens,
        num_heads,
        tokens_per_block,
        first_token,
        first_head,
        dense_plane_stride,
        dense_token_stride,
        dense_head_stride,
        block_stride,
        token_stride,
        head_stride,
        HEADS_INSIDE,
        PAIRED,
        ROWS,
    )
    for start in range(0, num_words, WORDS):
        word = (start + tl.arange(0, WORDS)).to(tl.int64)
        mask = exists[:, None] & (word < num_words)[None, :]
        values = tl.load(cached[:, None] + (word * word_stride)[None, :], mask=mask)
        tl.store(dense[:, None] + (word * dense_word_stride)[None, :], values, mask=mask)


def gather(
    out: Tensor,
    planes: Sequence[Tensor],
    block_ids: Sequence[int],
    *,
    first_token: int,
    first_head: int,
    backend: Backend | None = None,
) -> Route:
    """Copies tokens `first_token..` and heads `first_head..` of the listed blocks of each plane into `out` [P, T',
    H', D].

    `first_token` counts from slot 0 of `block_ids[0]`. CUDA tensors take the Triton kernel, others the torch reference,
    unless `backend` says otherwise. ValueError if the arguments do not fit each other; nothing is written then.
    """
    interpreted = not isinstance(_gather_kernel, triton.JITFunction)
    if choose_backend(out, backend, interpreted=interpreted) == "reference":
        reference.gather(out, planes, block_ids, first_token=first_token, first_head=first_head)
        return Route("reference", out.dtype.itemsize)
    selection = select(out, planes, block_ids, first_token=first_token, first_head=first_head)
    if selection.is_empty:
        return Route("triton", out.dtype.itemsize)
    launch = plan_launch(out, planes, selection)
    with on_device(out):
        _gather_kernel[launch.grid](*launch.arguments, **launch.constants)
    return Route("triton", launch.word_bytes)
