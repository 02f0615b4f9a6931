"""The one kernel of this package: rows of one end of a copy to the same rows of the other end.

In:  a Launch (see `launch`), which says where the rows of both ends lie.
Out: the copy, queued on the current stream.
Law: every product of an index and a stride is taken in 64 bits; no byte outside the rows is read or written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# Device code is typed by Triton.

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.launch import Launch, Route
from kv_kernels.weighted_sum import weight

WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
"""Word type of each width in bytes; 16 bytes are moved as aligned pairs."""

PER_CALL = (
    "num_pieces",
    "pieces_per_plane",
    "num_tokens",
    "num_rows",
    "num_units",
    "skew",
    "source_addresses_at",
    "source_ids_at",
    "source_base",
    "source_plane_step",
    "source_first",
    "source_block_stride",
    "source_token_stride",
    "source_head_stride",
    "target_addresses_at",
    "target_ids_at",
    "target_base",
    "target_plane_step",
    "target_first",
    "target_block_stride",
    "target_token_stride",
    "target_head_stride",
    "sum_first",
    "sum_plane_step",
    "sum_token_stride",
    "sum_head_stride",
)
"""Arguments that change from call to call; the kernel is not compiled anew for their values."""


@triton.jit
def _row_address(
    table_ptr,
    addresses_at,
    ids_at,
    base,
    plane_step,
    plane,
    token,
    head,
    exists,
    tokens_per_block,
    first_token,
    block_stride,
    token_stride,
    head_stride,
    PAGED: tl.constexpr,
    GRAIN: tl.constexpr,
    WORD: tl.constexpr,
):
    """Where the rows (token, head) of one plane begin (see `launch.End`)."""
    position = first_token + token
    offset = head.to(tl.int64) * head_stride
    if PAGED:
        block_id = tl.load(table_ptr + ids_at + position // tokens_per_block, mask=exists, other=0)
        offset += block_id * block_stride + (position % tokens_per_block).to(tl.int64) * token_stride
        begin = tl.load(table_ptr + addresses_at + plane) + base
    else:
        offset += position.to(tl.int64) * token_stride
        begin = base + plane.to(tl.int64) * plane_step
    address = begin.to(tl.pointer_type(WORD))
    if GRAIN == 2:
        address = tl.multiple_of(address, 16)
    return address + offset * GRAIN


@triton.jit(do_not_specialize=PER_CALL)
def _copy_kernel(
    table_ptr,
    sums_ptr,
    num_pieces,
    pieces_per_plane,
    num_tokens,
    num_heads,
    num_rows,
    num_units,
    unit_tokens,
    skew,
    token_grains,
    source_addresses_at,
    source_ids_at,
    source_base,
    source_plane_step,
    source_tokens_per_block,
    source_first,
    source_block_stride,
    source_token_stride,
    source_head_stride,
    source_word_stride,
    target_addresses_at,
    target_ids_at,
    target_base,
    target_plane_step,
    target_tokens_per_block,
    target_first,
    target_block_stride,
    target_token_stride,
    target_head_stride,
    target_word_stride,
    sum_first,
    sum_plane_step,
    sum_token_stride,
    sum_head_stride,
    sum_word_stride,
    SOURCE_PAGED: tl.constexpr,
    TARGET_PAGED: tl.constexpr,
    SUM: tl.constexpr,
    HEADS_INSIDE: tl.constexpr,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD: tl.constexpr,
):
    """target[p, t, h, :] = source[p, t, h, :] for tokens t in [0, num_tokens).

    Row r of a plane is (unit, head) = (r // H, r % H) if HEADS_INSIDE, else (r % U, r // U). It covers the tokens
    [unit * unit_tokens - skew, (unit + 1) * unit_tokens - skew), of which those outside [0, num_tokens) are masked.
    A piece is ROWS rows times WORDS words of each. Strides count grains of GRAIN words.

    With SUM each program p also tells sums[p], its part of the weighted sum of the 64-bit words that what is copied
    makes up where the sum's strides put it. A narrower word is a part of one: what parts add is what the whole adds.

    Why grains and no hints: Triton keeps a hint with the operation it is given for, and drops both if it folds away;
    a product with 2 is always seen, and lets a pair of 8-byte words be one access.
    """
    segments = (unit_tokens * token_grains * GRAIN + WORDS - 1) // WORDS
    if SUM:
        total = tl.full((ROWS, WORDS), 0, tl.int64)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        plane = piece // pieces_per_plane
        within = piece % pieces_per_plane
        row = within // segments * ROWS + tl.arange(0, ROWS)
        exists = row < num_rows
        if HEADS_INSIDE:
            unit, head = row // num_heads, row % num_heads
        else:
            unit, head = row % num_units, row // num_units
        token = unit * unit_tokens - skew
        source = _row_address(
            table_ptr,
            source_addresses_at,
            source_ids_at,
            source_base,
            source_plane_step,
            plane,
            token,
            head,
            exists,
            source_tokens_per_block,
            source_first,
            source_block_stride,
            source_token_stride,
            source_head_stride,
            SOURCE_PAGED,
            GRAIN,
            WORD,
        )
        target = _row_address(
            table_ptr,
            target_addresses_at,
            target_ids_at,
            target_base,
            target_plane_step,
            plane,
            token,
            head,
            exists,
            target_tokens_per_block,
            target_first,
            target_block_stride,
            target_token_stride,
            target_head_stride,
            TARGET_PAGED,
            GRAIN,
            WORD,
        )
        start = tl.maximum(-token, 0) * token_grains * GRAIN
        stop = tl.where(exists, tl.minimum(num_tokens - token, unit_tokens), 0) * token_grains * GRAIN
        word = within % segments * WORDS + tl.arange(0, WORDS)
        mask = (word[None, :] >= start[:, None]) & (word[None, :] < stop[:, None])
        place = word.to(tl.int64)
        if SUM:
            values = tl.load(source[:, None] + (place * source_word_stride)[None, :], mask=mask, other=0)
        else:
            values = tl.load(source[:, None] + (place * source_word_stride)[None, :], mask=mask)
        tl.store(target[:, None] + (place * target_word_stride)[None, :], values, mask=mask)
        if SUM:
            grain = sum_first + plane.to(tl.int64) * sum_plane_step
            grain += token.to(tl.int64) * sum_token_stride + head.to(tl.int64) * sum_head_stride
            number = grain[:, None] * GRAIN + (place * sum_word_stride)[None, :]
            total += _weighted(values, number, WORD)
    if SUM:
        tl.store(sums_ptr + tl.program_id(0), tl.reduce(tl.reduce(total, 1, _added), 0, _added))


@triton.jit
def _added(one, other):
    """Why by hand: `tl.sum` is compiled before the interpreter can take it over."""
    return one + other


@triton.jit
def _weighted(values, number, WORD: tl.constexpr):
    """What words at these places, counted in their own width, add to the sum; int64."""
    bits: tl.constexpr = WORD.primitive_bitwidth
    if bits == 64:
        parts = values * weight(number)
    else:
        per_word: tl.constexpr = 64 // bits
        word = values.to(tl.int64) & ((1 << bits) - 1)
        parts = (word << (number % per_word * bits)) * weight(number // per_word)
    return parts


def is_interpreted() -> bool:
    """Whether the kernel runs on CPU tensors: TRITON_INTERPRET=1 was set before this module was imported."""
    return not isinstance(_copy_kernel, triton.JITFunction)


def run(launch: Launch) -> Route:
    """Queues the copy on the current stream of its device, and returns without waiting for it."""
    _run(launch, launch.table)
    return Route("triton", launch.word_bytes)


def run_summing(launch: Launch) -> tuple[Route, Tensor]:
    """The same with sums, int64 [n], which the stream fills: added up they are the weighted sum of what was copied."""
    sums = torch.empty(launch.num_sums, dtype=torch.int64, device=launch.table.device)
    _run(launch, sums)
    return Route("triton", launch.word_bytes), sums


def _run(launch: Launch, sums: Tensor) -> None:
    device = launch.table.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _copy_kernel[launch.grid](
            launch.table, sums, *launch.arguments, WORD=WORDS[launch.word_bytes], **launch.constants
        )
