"""Scatter: from one dense array into the blocks of a paged cache.

In:  a dense view [P, T', H', D], block ids, where its tokens and heads go (see `layout`).
Out: these tokens and heads of the planes filled; the Route taken.
Law: bit-equal to `reference.scatter`; nothing else in the planes is written. On a GPU the copy is queued on the current
stream, in one launch, without waiting.
"""

from collections.abc import Sequence

from torch import Tensor

from kv_kernels import paged_copy, reference
from kv_kernels.ends import dense_end, extent_of, paged_end
from kv_kernels.launch import Backend, Route, choose_backend, plan_launch, upload
from kv_kernels.layout import check_distinct, select
from kv_kernels.tuning import Tuning, tuning_for


def scatter(
    planes: Sequence[Tensor],
    src: Tensor,
    block_ids: Sequence[int],
    *,
    first_token: int,
    first_head: int,
    backend: Backend | None = None,
    tuning: Tuning | None = None,
) -> Route:
    """Copies `src` [P, T', H', D] to tokens `first_token..` and heads `first_head..` of the listed, distinct blocks.

    `first_token` counts from slot 0 of `block_ids[0]`. CUDA planes take the Triton kernel, others the torch reference,
    unless `backend` says otherwise; `src` may then also lie in pinned memory of the host. ValueError if the arguments
    do not fit each other; nothing is written then.
    """
    selection = select(src, planes, block_ids, first_token=first_token, first_head=first_head)
    check_distinct(selection)
    if choose_backend(planes[0].device, backend, interpreted=paged_copy.is_interpreted()) == "reference":
        reference.scatter_selected(planes, src, selection)
        return Route("reference", src.dtype.itemsize)
    if selection.is_empty:
        return Route("triton", src.dtype.itemsize)
    numbers: list[int] = []
    source, target, extent = dense_end(src), paged_end(planes, selection, numbers), extent_of(src)
    table = upload(numbers, planes[0].device)
    return paged_copy.run(plan_launch(source, target, extent, tuning or tuning_for(src), table))
