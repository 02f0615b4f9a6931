"""Which runs of bytes one copy is made of, where both sides' planes are known by their addresses.

In:  a Read; the planes of one kind of both sides.
Out: offsets and lengths of the runs, the same for every plane; how long a run is, before anything is asked for.
Law: every (token, head) of the Read lies in exactly one run; a run is contiguous on both sides, and as long as that
     allows. Addresses outside a plane's own blocks are refused.

Legend: N runs, T tokens and H heads of the Read; a row is one head of one token.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kv_core.errors import CallerError
from kv_kernels.layout import MappedPlanes
from kv_transfer.direct.base import Read
from kv_transfer.plan.part import Part

Offsets = NDArray[np.int64]


def runs_of(what: Read, ours: MappedPlanes, theirs: MappedPlanes) -> tuple[Offsets, Offsets, Offsets]:
    """(offset in our plane, offset in theirs, bytes) of each run, int64 [N].

    CallerError if the two sides' rows differ, or a block is not one of the planes'.
    """
    row = _row_bytes(ours)
    if row != _row_bytes(theirs) or ours.strides[3] != 1 or theirs.strides[3] != 1:
        sizes = f"ours={row} at stride {ours.strides[3]}, theirs={_row_bytes(theirs)} at stride {theirs.strides[3]}"
        raise CallerError(f"rows differ in bytes, or are not dense: {sizes}")
    to, of = _rows(what.target, what.num_heads, ours), _rows(what.source, what.num_heads, theirs)
    if theirs.strides[2] > theirs.strides[1]:
        order = np.argsort(of, kind="stable")
        to, of = to[order], of[order]
    breaks = (np.diff(to) != row) | (np.diff(of) != row)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    lengths = np.diff(np.concatenate([starts, [len(to)]])) * row
    return to[starts], of[starts], lengths


def run_bytes(ours: MappedPlanes, theirs: MappedPlanes, num_heads: int) -> int:
    """How long the runs of whole blocks are, if `num_heads` heads of each token are taken."""
    row, tokens = _row_bytes(ours), gcd(ours.shape[1], theirs.shape[1])
    sides = (ours, theirs)
    if all(side.strides[2] == side.shape[3] for side in sides):
        is_dense = all(side.strides[1] == num_heads * side.shape[3] for side in sides)
        return row * num_heads * (tokens if is_dense else 1)
    if all(side.strides[1] == side.shape[3] for side in sides):
        is_dense = all(side.strides[2] == tokens * side.shape[3] for side in sides)
        return row * tokens * (num_heads if is_dense else 1)
    return row


def _rows(part: Part, num_heads: int, planes: MappedPlanes) -> Offsets:
    """Where each row begins in a plane, token by token, int64 [T * H]."""
    num_blocks, block_tokens, all_heads, _ = planes.shape
    _check_blocks(part.block_ids, num_blocks)
    if part.first_head + num_heads > all_heads or part.first_head < 0:
        wanted = f"[{part.first_head}, {part.first_head + num_heads})"
        raise CallerError(f"heads are not in the planes: wanted={wanted}, held=[0, {all_heads})")
    item = planes.dtype.itemsize
    block, token, head, _ = (stride * item for stride in planes.strides)
    positions = part.first_token + np.arange(part.num_tokens)
    blocks: Offsets = np.array(part.block_ids, dtype=np.int64)[positions // block_tokens]
    tokens: Offsets = blocks * block + positions % block_tokens * token
    heads = (part.first_head + np.arange(num_heads)) * head
    rows: Offsets = (tokens[:, None] + heads[None, :]).ravel()
    return rows


def _check_blocks(block_ids: Sequence[int], num_blocks: int) -> None:
    wrong = [block for block in block_ids if not 0 <= block < num_blocks]
    if wrong:
        raise CallerError(f"a block is not in the planes: wanted={wrong[0]}, held=[0, {num_blocks})")


def _row_bytes(planes: MappedPlanes) -> int:
    return planes.shape[3] * planes.dtype.itemsize
