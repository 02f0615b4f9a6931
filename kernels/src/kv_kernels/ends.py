"""From checked tensors to the ends of a copy.

In:  planes or mapped planes with a Selection, or a dense view.
Out: an End or an Extent for `launch.plan_launch`; what a table must have for paged ends.
Law: an End reaches exactly what was selected: the first head lies in its base, the tokens in its block ids.
"""

from collections.abc import Sequence
from math import gcd

from torch import Tensor

from kv_kernels.launch import End, Extent, Lie, Listed
from kv_kernels.layout import MappedPlanes, Selection


def extent_of(dense: Tensor) -> Extent:
    """All of a dense view [P, T', H', D]."""
    planes, tokens, heads, head_size = dense.shape
    return Extent(planes, tokens, heads, head_size, dense.dtype.itemsize)


def dense_end(dense: Tensor) -> End:
    """All of a dense view [P, T', H', D]."""
    return _dense(dense, dense.data_ptr())


def summed_end(dense: Tensor, at_byte: int) -> End:
    """The same view where it counts in a sum: its first element is byte `at_byte` of what is summed."""
    return _dense(dense, at_byte)


def paged_end(planes: Sequence[Tensor] | MappedPlanes, selection: Selection, table: list[int]) -> End:
    """The selected tokens and heads of the planes; what it lists is appended to `table`."""
    if isinstance(planes, MappedPlanes):
        addresses, strides, itemsize = planes.addresses, planes.strides, planes.dtype.itemsize
    else:
        addresses, itemsize = tuple(plane.data_ptr() for plane in planes), planes[0].dtype.itemsize
        strides = planes[0].stride()  # type: ignore[assignment]
    listed = Listed(len(table), len(table) + len(addresses))
    table += addresses
    table += selection.block_ids
    return listed_end(strides, itemsize, selection, listed, gcd(*addresses))


def listed_end(
    strides: tuple[int, int, int, int], itemsize: int, selection: Selection, listed: Listed, alignment: int
) -> End:
    """The selected tokens and heads of planes that a table has; `alignment` in bytes divides their addresses."""
    base = selection.first_head * strides[2] * itemsize
    lie = Lie(strides, 0, selection.tokens_per_block, selection.first_token)
    return End(lie, base, gcd(base, alignment), listed)


def _dense(dense: Tensor, base: int) -> End:
    plane, token, head, element = dense.stride()
    step = plane * dense.dtype.itemsize if len(dense) > 1 else 0
    return End(Lie((0, token, head, element), step), base, gcd(base, step))
