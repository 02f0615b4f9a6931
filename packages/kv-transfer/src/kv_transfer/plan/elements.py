"""What the elements of a cache are, and when those of one cache may become those of another.

In:  element types by their torch names, and scales.
Out: sizes; checks; whether a pair of caches is converted, and why it must not be.
Law: elements are never converted unless both sides ask for it (`CacheState.convert_elements`), and codes of 8 bits only
where their scale is told. What travels is always the sender's element; the receiver converts it, in `formatter`.

A scale is per tensor: an element stands for the value `element * scale`. One number is the scale of a whole cache; else
there is one for each plane of a layer (K, V), or for each plane of each layer in order. No scale at all: the element is
the value. Two caches have the same scales if every plane of every layer has, however they tell them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from kv_core.errors import CallerError
from kv_core.spec import ELEMENT_BYTES

ITEM_BYTES: Final = ELEMENT_BYTES
"""Bytes per element of each element type, by its torch name."""

SCALED: Final = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Types that may have a scale, and are converted only with one."""

CONVERTIBLE: Final = SCALED | {"float32", "float16", "bfloat16"}

MAX_SHOWN: Final = 4


class Elements(Protocol):
    """As much of a CacheState as elements have to do with."""

    @property
    def dtype(self) -> str: ...
    @property
    def scales(self) -> tuple[float, ...]: ...
    @property
    def convert_elements(self) -> bool: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_planes(self) -> int: ...


def check_elements(dtype: str, scales: Sequence[float], num_layers: int, num_planes: int) -> None:
    """CallerError for an unknown type, for scales that it cannot have, or that are not one of the lawful numbers."""
    if dtype not in ITEM_BYTES:
        raise CallerError(f"unknown dtype: got={dtype[:256]!r}, known={', '.join(ITEM_BYTES)}")
    if not scales:
        return
    if dtype not in SCALED:
        raise CallerError(f"elements of this type have no scale: dtype={dtype}, scales={shown(scales)}")
    lawful = (1, num_planes, num_layers * num_planes)
    if len(scales) not in lawful:
        raise CallerError(
            f"scales are not one for all, each plane, or each plane of each layer: got={len(scales)}, allowed={lawful}"
        )
    if not all(math.isfinite(scale) and scale > 0 for scale in scales):
        raise CallerError(f"a scale is not a positive number: got={shown(scales)}")


def each_scale(side: Elements) -> tuple[float, ...]:
    """The scale of each plane of each layer, in order; nothing if elements have none."""
    if not side.scales:
        return ()
    return side.scales * (side.num_layers * side.num_planes // len(side.scales))


def differ(ours: Elements, theirs: Elements) -> bool:
    """Whether elements of one cache would mean something else in the other."""
    return ours.dtype != theirs.dtype or _scales_differ(ours, theirs)


def objections(ours: Elements, theirs: Elements) -> Iterator[tuple[str, str, str]]:
    """(field, ours, theirs) of everything that keeps elements from being exchanged; nothing if they may be."""
    if not differ(ours, theirs):
        return
    if not (ours.convert_elements and theirs.convert_elements):
        yield from _differences(ours, theirs)
        if ours.convert_elements != theirs.convert_elements:
            yield "convert_elements", str(ours.convert_elements), str(theirs.convert_elements)
        return
    if not {ours.dtype, theirs.dtype} <= CONVERTIBLE:
        yield "dtype (not convertible)", ours.dtype, theirs.dtype
    if any(side.dtype in SCALED and not side.scales for side in (ours, theirs)):
        yield "scales (needed)", _scale_of(ours), _scale_of(theirs)


def shown(scales: Sequence[float]) -> str:
    """The scales as words: all of them if they are few."""
    if not scales:
        return "none"
    rest = f" and {len(scales) - MAX_SHOWN} more" if len(scales) > MAX_SHOWN else ""
    return ", ".join(f"{scale:g}" for scale in scales[:MAX_SHOWN]) + rest


def _differences(ours: Elements, theirs: Elements) -> Iterator[tuple[str, str, str]]:
    if ours.dtype != theirs.dtype:
        yield "dtype", ours.dtype, theirs.dtype
    if _scales_differ(ours, theirs):
        yield _scales_apart(ours, theirs)


def _scales_differ(ours: Elements, theirs: Elements) -> bool:
    return ours.scales != theirs.scales and each_scale(ours) != each_scale(theirs)


def _scales_apart(ours: Elements, theirs: Elements) -> tuple[str, str, str]:
    """The scales of both sides; where layers have their own, those of the first layer in which they differ."""
    planes = ours.num_planes
    alike = (planes, ours.num_layers) == (theirs.num_planes, theirs.num_layers)
    if not alike or not ours.scales or not theirs.scales or max(len(ours.scales), len(theirs.scales)) <= planes:
        return "scales", shown(ours.scales), shown(theirs.scales)
    mine, other = each_scale(ours), each_scale(theirs)
    layer = next(at for at in range(len(mine)) if mine[at] != other[at]) // planes
    of_layer = slice(layer * planes, (layer + 1) * planes)
    return f"scales of layer {layer}", shown(mine[of_layer]), shown(other[of_layer])


def _scale_of(side: Elements) -> str:
    return f"{shown(side.scales)} of {side.dtype}"
