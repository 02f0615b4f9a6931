"""Block copy: from blocks of one paged cache to blocks of another, whose blocks may look different.

In:  planes on both sides, block ids on both sides, where the tokens and heads begin in each (see `layout`).
Out: these tokens and heads of our planes filled; the Route taken.
Law: bit-equal to `reference.copy_blocks`; nothing else is written. On a GPU the copy is queued on the current stream,
in one launch, without waiting. Both sides may be one cache, if no block that is written is also read.
"""

from collections.abc import Sequence

from torch import Tensor

from kv_kernels import paged_copy, reference
from kv_kernels.ends import paged_end
from kv_kernels.launch import Backend, Extent, Route, choose_backend, plan_launch, upload
from kv_kernels.layout import ORIGIN, Corner, select_pair
from kv_kernels.tuning import LOCAL, Tuning


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
    backend: Backend | None = None,
    tuning: Tuning = LOCAL,
) -> Route:
    """Copies `num_tokens` and `num_heads` from the blocks `source_ids`, beginning at `source_at`, to distinct blocks
    `block_ids`, beginning at `at`.

    Block size, order of axes, number of heads and number of blocks may differ between the sides. CUDA planes take the
    Triton kernel, others the torch reference, unless `backend` says otherwise. ValueError if the arguments do not fit
    each other; nothing is written then.
    """
    written, read = select_pair(
        planes,
        block_ids,
        source,
        source_ids,
        num_tokens=num_tokens,
        num_heads=num_heads,
        at=at,
        source_at=source_at,
    )
    if planes[0].device != source[0].device:
        raise ValueError(f"the planes are on two devices: ours={planes[0].device}, theirs={source[0].device}")
    itemsize = planes[0].dtype.itemsize
    if choose_backend(planes[0].device, backend, interpreted=paged_copy.is_interpreted()) == "reference":
        reference.copy_selected(planes, source, written, read)
        return Route("reference", itemsize)
    if written.is_empty:
        return Route("triton", itemsize)
    extent = Extent(len(source), num_tokens, num_heads, planes[0].shape[3], itemsize)
    numbers: list[int] = []
    ends = paged_end(source, read, numbers), paged_end(planes, written, numbers)
    return paged_copy.run(plan_launch(*ends, extent, tuning, upload(numbers, planes[0].device)))
