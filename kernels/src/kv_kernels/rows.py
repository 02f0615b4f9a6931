"""Device code shared by gather and scatter: where the rows of one program lie in the planes and in the dense view.

In:  the program's number and the arguments of a Launch.
Out: for each of its rows the address in the plane, the address in the dense view, and whether the row exists.
Law: every product of an index and a stride is taken in 64 bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# Device code is typed by Triton.

import triton
import triton.language as tl

PER_CALL = (
    "num_planes",
    "programs_per_plane",
    "num_tokens",
    "first_token",
    "dense_plane_stride",
    "dense_token_stride",
    "dense_head_stride",
)
"""Arguments that change from call to call; the kernels are not compiled anew for their values."""


@triton.jit
def rows_of_program(
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
    HEADS_INSIDE: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Row r of a plane is (token, head) = (r // H', r % H') if HEADS_INSIDE, else (r % T', r // T').

    cached = plane + block_ids[(first_token + token) // T] * block_stride
                   + (first_token + token) % T * token_stride + (first_head + head) * head_stride
    """
    program = tl.program_id(0)
    plane = program // programs_per_plane
    row = (program % programs_per_plane) * ROWS + tl.arange(0, ROWS)
    exists = row < num_tokens * num_heads
    if HEADS_INSIDE:
        token, head = row // num_heads, row % num_heads
    else:
        token, head = row % num_tokens, row // num_tokens
    position = first_token + token
    block_id = tl.load(table_ptr + num_planes + position // tokens_per_block, mask=exists, other=0)
    slot = (position % tokens_per_block).to(tl.int64)
    cached_offset = block_id * block_stride + slot * token_stride + (first_head + head).to(tl.int64) * head_stride
    dense_offset = token.to(tl.int64) * dense_token_stride + head.to(tl.int64) * dense_head_stride
    if PAIRED:
        cached_offset = tl.multiple_of(cached_offset, 2)
        dense_offset = tl.multiple_of(dense_offset, 2)
    plane_ptr = tl.load(table_ptr + plane).to(dense_ptr.dtype)
    dense_ptr += plane.to(tl.int64) * dense_plane_stride
    if PAIRED:
        plane_ptr = tl.multiple_of(plane_ptr, 16)
        dense_ptr = tl.multiple_of(dense_ptr, 16)
    return plane_ptr + cached_offset, dense_ptr + dense_offset, exists
