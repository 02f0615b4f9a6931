"""From checked tensors to the ends of a copy.

In:  planes or mapped planes with a Selection, or a dense view.
Out: an End or an Extent for `launch.plan_launch`.
Law: an End reaches exactly what was selected: the first head lies in its addresses, the tokens in its block ids.
"""

from collections.abc import Sequence

from torch import Tensor

from kv_kernels.launch import End, Extent
from kv_kernels.layout import MappedPlanes, Selection


def extent_of(dense: Tensor) -> Extent:
    """All of a dense view [P, T', H', D]."""
    _, tokens, heads, head_size = dense.shape
    return Extent(tokens, heads, head_size, dense.dtype.itemsize)


def dense_end(dense: Tensor) -> End:
    """All of a dense view [P, T', H', D]."""
    plane, token, head, element = dense.stride()
    start, step = dense.data_ptr(), plane * dense.dtype.itemsize
    return End(tuple(start + number * step for number in range(dense.shape[0])), (0, token, head, element))


def paged_end(planes: Sequence[Tensor] | MappedPlanes, selection: Selection) -> End:
    """The selected tokens and heads of the planes."""
    if isinstance(planes, MappedPlanes):
        addresses, itemsize = planes.addresses, planes.dtype.itemsize
        strides: tuple[int, ...] = planes.strides
    else:
        addresses = tuple(plane.data_ptr() for plane in planes)
        strides, itemsize = planes[0].stride(), planes[0].dtype.itemsize
    skipped = selection.first_head * strides[2] * itemsize
    return End(
        tuple(address + skipped for address in addresses),
        tuple(strides),
        selection.block_ids,
        selection.tokens_per_block,
        selection.first_token,
    )
