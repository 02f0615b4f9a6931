"""Peer copy: from a paged cache of another process, mapped into ours, straight into blocks of our own.

In:  our planes, the peer's MappedPlanes, block ids on both sides, where the tokens and heads begin in each.
Out: these tokens and heads of our planes filled; the Route taken.
Law: bit-equal to `reference.copy_blocks` of the peer's planes; nothing else is written, and nothing of the peer's. On a
GPU the copy is queued on the current stream, in one launch, without waiting. There is no torch way to memory that no
tensor owns: planes on a CPU need the interpreter.
"""

from collections.abc import Sequence

from torch import Tensor

from kv_kernels import paged_copy
from kv_kernels.ends import paged_end
from kv_kernels.launch import Extent, Route, choose_backend, plan_launch
from kv_kernels.layout import ORIGIN, Corner, MappedPlanes, select_pair
from kv_kernels.tuning import PEER, Tuning


def peer_copy(
    planes: Sequence[Tensor],
    block_ids: Sequence[int],
    source: MappedPlanes,
    source_ids: Sequence[int],
    *,
    num_tokens: int,
    num_heads: int,
    at: Corner = ORIGIN,
    source_at: Corner = ORIGIN,
    tuning: Tuning = PEER,
) -> Route:
    """Copies `num_tokens` and `num_heads` from the peer's blocks `source_ids`, beginning at `source_at`, to distinct
    blocks of ours, `block_ids`, beginning at `at`.

    Block size, order of axes, number of heads and number of blocks may differ between the sides. ValueError if the
    arguments do not fit each other; nothing is written then.
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
    choose_backend(planes[0], "triton", interpreted=paged_copy.is_interpreted())
    itemsize = planes[0].dtype.itemsize
    if written.is_empty:
        return Route("triton", itemsize)
    extent = Extent(num_tokens, num_heads, planes[0].shape[3], itemsize)
    launch = plan_launch(paged_end(source, read), paged_end(planes, written), extent, tuning, planes[0].device)
    return paged_copy.run(launch)
