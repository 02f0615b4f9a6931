"""Peer copy: from a paged cache of another process, mapped into ours, straight into blocks of our own.

In:  our planes, the peer's MappedPlanes, block ids on both sides, where the tokens and heads begin in each.
Out: these tokens and heads of our planes filled; the Route taken.
Law: bit-equal to `reference.copy_blocks` of the peer's planes; nothing else is written, and nothing of the peer's. On a
GPU the copy is queued on the current stream, in one launch, without waiting. There is no torch way to memory that no
tensor owns: planes on a CPU need the interpreter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_kernels import paged_copy
from kv_kernels.ends import paged_end
from kv_kernels.launch import Extent, Route, choose_backend, plan_launch, upload
from kv_kernels.layout import ORIGIN, Corner, MappedPlanes, select_pair
from kv_kernels.tuning import PEER, Tuning


def peer_copy(
    planes: Sequence[Tensor] | MappedPlanes,
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

    Block size, order of axes, number of heads and number of blocks may differ between the sides. Planes that are
    copied often are given as `MappedPlanes.of(planes)`, which checks them once. ValueError if the arguments do not fit
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
    dtype, device = (planes if isinstance(planes, MappedPlanes) else planes[0]).dtype, _device_of(planes)
    choose_backend(device, "triton", interpreted=paged_copy.is_interpreted())
    if written.is_empty:
        return Route("triton", dtype.itemsize)
    extent = Extent(len(source.addresses), num_tokens, num_heads, source.shape[3], dtype.itemsize)
    numbers: list[int] = []
    ends = paged_end(source, read, numbers), paged_end(planes, written, numbers)
    return paged_copy.run(plan_launch(*ends, extent, tuning, upload(numbers, device)))


def _device_of(planes: Sequence[Tensor] | MappedPlanes) -> torch.device:
    device = planes.device if isinstance(planes, MappedPlanes) else planes[0].device
    if device is None:
        raise ValueError("the planes to write are not ours: device=None, wanted=a device")
    return device
