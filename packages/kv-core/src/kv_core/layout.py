"""Pools of a cache as shapes and bytes: what is kept for each block, and where in it a layer lies (core spec 6).

In:  a CacheSpec, whether elements are packed to 4 bits, whether layers keep keys of a sparse-attention index.
Out: `PoolShape` values in absolute order, the table layer -> pool, bytes of a block, offsets of a block's pages.
Law: one list of pools is the only source; every table and every byte count follows from it (core spec D31). One block
     takes the same slot in every pool of its window.

    windows ascending, full attention last; inside a window: keys and values by head count ascending, their scales in
    the same order, index keys in the same order

    pool:  slot x layer x plane x (heads x head size x tokens)          a page is what stands in parentheses
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Final, NamedTuple

from kv_core.errors import CallerError
from kv_core.ids import LayerId
from kv_core.spec import CacheSpec, element_bytes

FP4_PER_BYTE: Final = 2
FP4_PER_SCALE: Final = 16


class PoolKind(Enum):
    """What a pool holds."""

    KV = "kv"
    BLOCK_SCALE = "block_scale"
    INDEXER = "indexer_k"


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Keys of a sparse-attention index: `head_size` bytes a token, and 4 bytes of scale for every `quant_block`."""

    head_size: int
    quant_block: int = 128

    def __post_init__(self) -> None:
        if min(self.head_size, self.quant_block) < 1:
            raise CallerError(f"sizes of an index are at least 1: {self}")

    @property
    def bytes_per_token(self) -> int:
        return self.head_size + self.head_size // self.quant_block * 4


@dataclass(frozen=True, slots=True)
class PoolShape:
    """One pool of one window. `head_size` counts stored elements of `dtype`."""

    window: int | None
    kind: PoolKind
    layers: tuple[LayerId, ...]
    num_planes: int
    num_heads: int
    head_size: int
    tokens_per_block: int
    dtype: str

    @property
    def page_elements(self) -> int:
        """Elements of one plane of one layer of a block."""
        return self.num_heads * self.head_size * self.tokens_per_block

    @property
    def bytes_per_block(self) -> int:
        return len(self.layers) * self.num_planes * self.page_elements * element_bytes(self.dtype)

    def shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape of the pool's tensor for so many blocks."""
        return num_blocks, len(self.layers), self.num_planes, self.page_elements

    def page_offsets(self, slot: int) -> tuple[int, int]:
        """Pages before the keys and before the values of a slot's first layer; equal where they are one (6.3).

        A layer that is `i`-th in the pool lies `i * num_planes` pages further on.
        """
        keys = slot * len(self.layers) * self.num_planes
        return keys, keys + self.num_planes - 1


class PoolPosition(NamedTuple):
    """Where a layer lies: the pool's absolute number, and which of its layers this is."""

    pool: int
    ordinal: int


def cache_pools(spec: CacheSpec, *, fp4: bool = False, index: IndexSpec | None = None) -> tuple[PoolShape, ...]:
    """All pools in absolute order (core spec 6.1, 6.2).

    With `fp4` the spec counts 4-bit elements, whatever its dtype: two share a byte and 16 share a scale. CallerError
    if a head does not divide into them.
    """
    pools: list[PoolShape] = []
    for window, layers in spec.groups().items():
        data = list(_data_pools(spec, window, layers))
        pools += [_packed(pool) for pool in data] if fp4 else data
        pools += [_scales(pool) for pool in data] if fp4 else []
        pools += [_indexer(pool, index) for pool in data] if index else []
    return tuple(pools)


def layer_positions(pools: Sequence[PoolShape], kind: PoolKind = PoolKind.KV) -> tuple[PoolPosition, ...]:
    """For each layer, in order of their numbers, its pool of this kind; nothing at all if there is no such pool."""
    found = {
        layer: PoolPosition(number, at)
        for number, pool in enumerate(pools)
        if pool.kind is kind
        for at, layer in enumerate(pool.layers)
    }
    return tuple(found[layer] for layer in sorted(found))


def block_bytes(pools: Iterable[PoolShape]) -> dict[int | None, int]:
    """Bytes of a block of each window, over all its pools: what `sizing` divides memory by."""
    return {
        window: sum(pool.bytes_per_block for pool in group)
        for window, group in groupby(pools, key=lambda pool: pool.window)
    }


def _data_pools(spec: CacheSpec, window: int | None, layers: Iterable[LayerId]) -> Iterator[PoolShape]:
    """Layers of one window that have the same head count share a pool, fewest heads first."""

    def shape(layer: LayerId) -> tuple[int, int, int, str]:
        it = spec.layers[layer]
        return it.num_heads, it.head_size, it.num_planes, it.dtype

    for (heads, head_size, planes, dtype), group in groupby(sorted(layers, key=shape), key=shape):
        yield PoolShape(window, PoolKind.KV, tuple(group), planes, heads, head_size, spec.tokens_per_block, dtype)


def _packed(pool: PoolShape) -> PoolShape:
    return _resized(pool, PoolKind.KV, _divided(pool.head_size, FP4_PER_BYTE), "uint8")


def _scales(pool: PoolShape) -> PoolShape:
    return _resized(pool, PoolKind.BLOCK_SCALE, _divided(pool.head_size, FP4_PER_SCALE), "float8_e4m3fn")


def _indexer(pool: PoolShape, index: IndexSpec) -> PoolShape:
    size = index.bytes_per_token
    return PoolShape(pool.window, PoolKind.INDEXER, pool.layers, 1, 1, size, pool.tokens_per_block, "uint8")


def _resized(pool: PoolShape, kind: PoolKind, head_size: int, dtype: str) -> PoolShape:
    return PoolShape(
        pool.window, kind, pool.layers, pool.num_planes, pool.num_heads, head_size, pool.tokens_per_block, dtype
    )


def _divided(head_size: int, divisor: int) -> int:
    if head_size % divisor:
        raise CallerError(f"4-bit heads divide by {divisor}: head_size={head_size}")
    return head_size // divisor
