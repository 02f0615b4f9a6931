"""The kernels in plain torch: their oracle, and the way taken on CPU tensors.

In:  planes, a dense view, block ids (see `layout`); words.
Out: `gather` fills the dense view from the planes, `scatter` the planes from the dense view; weighted sums of words.
Law: bytes are moved, never converted; nothing outside the selection is written. A call that raises has written nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kv_kernels.launch import Route
from kv_kernels.layout import ORIGIN, Corner, Selection, check_distinct, select, select_pair
from kv_kernels.rows import row_pairs
from kv_kernels.words import widened


def gather(
    out: Tensor, planes: Sequence[Tensor], block_ids: Sequence[int], *, first_token: int, first_head: int
) -> None:
    """Copies tokens `first_token..` and heads `first_head..` of the listed blocks into `out` [P, T', H', D]."""
    gather_selected(out, planes, select(out, planes, block_ids, first_token=first_token, first_head=first_head))


def gather_selected(out: Tensor, planes: Sequence[Tensor], selection: Selection) -> None:
    """The same for arguments that are checked."""
    if (pairs := row_pairs(out, planes, selection)) is not None:
        for rows, places, ours in pairs:
            np.take(rows, places, axis=0, out=ours, mode="clip")
        return
    for cached, ids, dense in _pairs(out, planes, selection):
        torch.index_select(cached, 0, ids, out=dense)


def scatter(
    planes: Sequence[Tensor], src: Tensor, block_ids: Sequence[int], *, first_token: int, first_head: int
) -> None:
    """Copies `src` [P, T', H', D] to tokens `first_token..` and heads `first_head..` of the listed, distinct blocks."""
    selection = select(src, planes, block_ids, first_token=first_token, first_head=first_head)
    check_distinct(selection)
    scatter_selected(planes, src, selection)


def copy_blocks(
    planes: Sequence[Tensor],
    block_ids: Sequence[int],
    source: Sequence[Tensor],
    source_ids: Sequence[int],
    *,
    num_tokens: int,
    num_heads: int,
    at: Corner = ORIGIN,
    source_at: Corner = ORIGIN,
) -> None:
    """Copies `num_tokens` and `num_heads` from the blocks `source_ids`, beginning at `source_at`, to `block_ids`."""
    window = {"num_tokens": num_tokens, "num_heads": num_heads}
    copy_selected(
        planes, source, *select_pair(planes, block_ids, source, source_ids, **window, at=at, source_at=source_at)
    )


def copy_selected(planes: Sequence[Tensor], source: Sequence[Tensor], written: Selection, read: Selection) -> None:
    """The same for arguments that are checked."""
    shape = len(planes), read.num_tokens, read.num_heads, planes[0].shape[3]
    between = torch.empty(shape, dtype=planes[0].dtype, device=planes[0].device)
    gather_selected(between, source, read)
    scatter_selected(planes, between, written)


def scatter_selected(planes: Sequence[Tensor], src: Tensor, selection: Selection) -> None:
    """The same as `scatter` for arguments that are checked."""
    if (pairs := row_pairs(src, planes, selection)) is not None:
        for rows, places, ours in pairs:
            rows[places] = ours
        return
    for cached, ids, dense in _pairs(src, planes, selection):
        cached.index_copy_(0, ids, dense)


def gather_part(
    out: Tensor, planes: Sequence[Tensor], selection: Selection, summed_at: int | None
) -> tuple[Route, Tensor | None]:
    """The twin of `block_table.gather_part`, for arguments that are checked; the first planes are those meant."""
    gather_selected(out, planes[: len(out)], selection)
    return Route("reference", out.dtype.itemsize), None if summed_at is None else sum_of(out, summed_at)


def scatter_part(
    planes: Sequence[Tensor], src: Tensor, selection: Selection, summed_at: int | None
) -> tuple[Route, Tensor | None]:
    """The twin of `block_table.scatter_part`."""
    scatter_selected(planes[: len(src)], src, selection)
    return Route("reference", src.dtype.itemsize), None if summed_at is None else sum_of(src, summed_at)


MIX: Final = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))
"""The two factors of the finalizer of MurmurHash3, as signed words."""


def weighted_sum(words: Tensor) -> Tensor:
    """int64 [1], of int64 words [n]: sum(w[i] * k[i]) modulo 2**64 (see `weights`)."""
    return (words * weights(words.numel()).to(words.device)).sum(0, keepdim=True)


def sum_of(dense: Tensor, at_byte: int) -> Tensor:
    """int64 [1]: what the elements of a dense view add to the sum of words of which its first element is a byte."""
    elements = dense.contiguous().view(torch.uint8)
    strides = *(step * dense.dtype.itemsize for step in dense.stride()[:3]), 1
    assert dense.stride(3) == 1, "law: the elements of a row lie together in what is summed"
    places = torch.full((1,) * 4, at_byte)
    for axis, (length, step) in enumerate(zip(elements.shape, strides, strict=True)):
        shape = [1] * 4
        shape[axis] = length
        places = places + (torch.arange(length) * step).view(shape)
    if not elements.numel():
        return torch.zeros(1, dtype=torch.int64)
    of_word = weights(int(places.max()) // 8 + 1)[places // 8]
    return ((elements.cpu().to(torch.int64) << places % 8 * 8) * of_word).sum().view(1)


def weights(num_words: int) -> Tensor:
    """k[0 .. num_words), int64: the finalizer of MurmurHash3 over i + 1, made odd."""
    mixed = torch.arange(1, num_words + 1, dtype=torch.int64)
    for factor in MIX:
        mixed = (mixed ^ _shifted(mixed)) * factor
    return (mixed ^ _shifted(mixed)) | 1


def _shifted(words: Tensor) -> Tensor:
    """Each word shifted right by 33 bits, zeroes coming in."""
    return (words >> 33) & ((1 << 31) - 1)


def _pairs(dense: Tensor, planes: Sequence[Tensor], selection: Selection) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(cache view [B, ...], ids [n], dense view [n, ...]) of each segment of each plane, in words as wide as can be.

    index_select and index_copy_ move strided views in one pass: 7 to 25 GB/s for blocks of 16 tokens, 8 heads, 256
    bytes on 2 cores (torch 2.13), where a loop over blocks reaches 2 to 6.
    """
    heads = slice(selection.first_head, selection.first_head + selection.num_heads)
    all_ids = torch.tensor(selection.block_ids, dtype=torch.int64).to(dense.device)
    for segment in selection.segments():
        ids = all_ids[slice(*segment.ordinals)]
        cached = [plane[:, slice(*segment.slots), heads] for plane in planes]
        parts = [part.view(len(ids), -1, *part.shape[1:]) for part in dense[:, slice(*segment.tokens)]]
        for wide, moved in widened(cached, parts):
            yield wide, ids, moved
