"""How the planes of one rank lie: what every card says of them, whichever way they are read.

In:  a rank's PagedCaches; or what a peer's card says.
Out: the fields of a card; CannotMap for a card that is not of its owner's CacheState.
Law: what is told is bounded, and what is said of a cache does not depend on who says it. Where each plane begins is for
     the cards of each path to say.
"""

from typing import Annotated, TypedDict

import msgspec

from kv_core.ids import Rank
from kv_transfer.direct.base import CannotMap
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.pools import PagedCaches, dtype_name

MAX_PLANES = 1 << 15

Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Length = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
Four = tuple[Length, Length, Length, Length]


class LaidPlanes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape [B, T, H, D] and strides of a rank's planes; what a card adds says where they are."""

    shape: Four
    strides: Annotated[tuple[Four, ...], msgspec.Meta(min_length=1, max_length=8)]
    """In elements, of the planes of each kind (K, V) of a layer."""
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    first_layer: Index
    groups: Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 14)]


class Laid(TypedDict):
    """The fields of `LaidPlanes`."""

    shape: Four
    strides: tuple[Four, ...]
    dtype: str
    first_layer: int
    groups: tuple[int, ...]


def laid(caches: PagedCaches) -> Laid:
    """How ours lie; there is at least one plane."""
    first = caches.planes[0]
    return {
        "shape": tuple(first.shape),  # type: ignore[typeddict-item]
        "strides": tuple(tuple(plane.stride()) for plane in caches.planes[: caches.num_planes]),  # type: ignore[misc]
        "dtype": dtype_name(first),
        "first_layer": caches.first_layer,
        "groups": caches.groups,
    }


def check_laid(planes: LaidPlanes, num_planes: int, state: CacheState, rank: Rank) -> None:
    """CannotMap unless these, so many of them, are the planes of this rank of the state."""
    share, is_plain = state.share_of(rank), state.layout.is_plain
    elements = state.head_size * (1 if is_plain else state.tokens_per_block)
    block = (state.tokens_per_block if is_plain else 1, len(share.heads), elements, state.dtype)
    layers = (len(share.layers) * state.num_planes, state.num_planes, share.layers.start)
    told_block, told_layers = (*planes.shape[1:], planes.dtype), (num_planes, len(planes.strides), planes.first_layer)
    if (block, layers) != (told_block, told_layers):
        raise CannotMap(f"the caches are not as stated: caches={told_block} {told_layers}, stated={block} {layers}")
    if planes.groups and len(planes.groups) != len(share.layers):
        sizes = f"layers={len(share.layers)}, told={len(planes.groups)}"
        raise CannotMap(f"the caches are not as stated: not one group for each layer: {sizes}")
