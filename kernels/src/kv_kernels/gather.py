"""Gather: from the blocks of a paged cache into one dense array.

In:  planes, block ids, where the wanted tokens and heads begin (see `layout`).
Out: a dense view [P, T', H', D] filled; the Route taken.
Law: bit-equal to `reference.gather`. On a GPU the copy is queued on the current stream, in one launch, without waiting.
"""

from collections.abc import Sequence

from torch import Tensor

from kv_kernels import paged_copy, reference
from kv_kernels.ends import dense_end, extent_of, paged_end
from kv_kernels.launch import Backend, Route, choose_backend, plan_launch, upload
from kv_kernels.layout import select
from kv_kernels.tuning import Tuning, tuning_for


def gather(
    out: Tensor,
    planes: Sequence[Tensor],
    block_ids: Sequence[int],
    *,
    first_token: int,
    first_head: int,
    backend: Backend | None = None,
    tuning: Tuning | None = None,
) -> Route:
    """Copies tokens `first_token..` and heads `first_head..` of the listed blocks of each plane into `out` [P, T',
    H', D].

    `first_token` counts from slot 0 of `block_ids[0]`. CUDA planes take the Triton kernel, others the torch reference,
    unless `backend` says otherwise; `out` may then also lie in pinned memory of the host. ValueError if the arguments
    do not fit each other; nothing is written then.
    """
    selection = select(out, planes, block_ids, first_token=first_token, first_head=first_head)
    if choose_backend(planes[0].device, backend, interpreted=paged_copy.is_interpreted()) == "reference":
        reference.gather_selected(out, planes, selection)
        return Route("reference", out.dtype.itemsize)
    if selection.is_empty:
        return Route("triton", out.dtype.itemsize)
    numbers: list[int] = []
    source, target, extent = paged_end(planes, selection, numbers), dense_end(out), extent_of(out)
    table = upload(numbers, planes[0].device)
    return paged_copy.run(plan_launch(source, target, extent, tuning or tuning_for(out), table))
