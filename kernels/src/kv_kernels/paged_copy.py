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

from kv_kernels.launch import Launch, Route

WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
"""Word type of each width in bytes; 16 bytes are moved as aligned pairs."""

PER_CALL = (
    "num_planes",
    "num_source_ids",
    "num_pieces",
    "pieces_per_plane",
    "num_tokens",
    "num_rows",
    "num_units",
    "skew",
    "source_first",
    "source_block_stride",
    "source_token_stride",
    "source_head_stride",
    "target_first",
    "target_block_stride",
    "target_token_stride",
    "target_head_stride",
)
"""Arguments that change from call to call; the kernel is not compiled anew for their values."""


@triton.jit
def _row_address(
    table_ptr,
    base,
    block_ids,
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
    """Where the rows (token, head) of one plane begin; `base` and `block_ids` are places in the table."""
    position = first_token + token
    offset = head.to(tl.int64) * head_stride
    if PAGED:
        block_id = tl.load(table_ptr + block_ids + position // tokens_per_block, mask=exists, other=0)
        offset += block_id * block_stride + (position % tokens_per_block).to(tl.int64) * token_stride
    else:
        offset += position.to(tl.int64) * token_stride
    address = tl.load(table_ptr + base).to(tl.pointer_type(WORD))
    if GRAIN == 2:
        address = tl.multiple_of(address, 16)
    return address + offset * GRAIN


@triton.jit(do_not_specialize=PER_CALL)
def _copy_kernel(
    table_ptr,
    num_planes,
    num_source_ids,
    num_pieces,
    pieces_per_plane,
    num_tokens,
    num_heads,
    num_rows,
    num_units,
    unit_tokens,
    skew,
    token_grains,
    source_tokens_per_block,
    source_first,
    source_block_stride,
    source_token_stride,
    source_head_stride,
    source_word_stride,
    target_tokens_per_block,
    target_first,
    target_block_stride,
    target_token_stride,
    target_head_stride,
    target_word_stride,
    SOURCE_PAGED: tl.constexpr,
    TARGET_PAGED: tl.constexpr,
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

    Why grains and no hints: Triton keeps a hint with the operation it is given for, and drops both if it folds away;
    a product with 2 is always seen, and lets a pair of 8-byte words be one access.
    """
    segments = (unit_tokens * token_grains * GRAIN + WORDS - 1) // WORDS
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
            plane,
            2 * num_planes,
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
            num_planes + plane,
            2 * num_planes + num_source_ids,
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
        values = tl.load(source[:, None] + (place * source_word_stride)[None, :], mask=mask)
        tl.store(target[:, None] + (place * target_word_stride)[None, :], values, mask=mask)


def is_interpreted() -> bool:
    """Whether the kernel runs on CPU tensors: TRITON_INTERPRET=1 was set before this module was imported."""
    return not isinstance(_copy_kernel, triton.JITFunction)


def run(launch: Launch) -> Route:
    """Queues the copy on the current stream of its device, and returns without waiting for it."""
    device = launch.table.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _copy_kernel[launch.grid](launch.table, *launch.arguments, WORD=WORDS[launch.word_bytes], **launch.constants)
    return Route("triton", launch.word_bytes)
