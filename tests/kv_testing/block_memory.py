"""Block pools full of bytes of their own, and a model of them that is obviously right.

In:  the shapes of a cache and its windows.
Out: BlockPools whose device and host slots hold random bytes; Memory, the same bytes in a dictionary.
Law: the model executes copies one by one, in the order in which they were decided. Slots on disk hold nothing at first.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from kv_core.config import WindowConfig
from kv_core.layout import IndexSpec, PoolShape, cache_pools
from kv_core.spec import CacheSpec, LayerSpec
from kv_core.tiers import CopyOrder, Place, Tier
from kv_transfer.block_pools import BlockPools
from kv_transfer.file_mover import FILE_LIMIT_S, FileMover

TOKENS_PER_BLOCK = 4
WINDOWS = (WindowConfig(8, 4, 3, 3), WindowConfig(64, 5, 2, 2))
LAYERS = (
    LayerSpec(2, 4, 2, "float32", 8),
    LayerSpec(1, 4, 2, "float32"),
    LayerSpec(1, 8, 1, "bfloat16", 8),
    LayerSpec(1, 4, 2, "float32"),
)
"""Two windows; the smaller one has two pools of different heads, planes and dtypes."""


def plain_shapes() -> tuple[PoolShape, ...]:
    return cache_pools(CacheSpec(LAYERS, TOKENS_PER_BLOCK))


def packed_shapes() -> tuple[PoolShape, ...]:
    """The same two windows with 4-bit elements, their scales, and keys of an index."""
    layers = tuple(LayerSpec(2, 32, 2, "uint8", layer.window) for layer in LAYERS)
    return cache_pools(CacheSpec(layers, TOKENS_PER_BLOCK), fp4=True, index=IndexSpec(16, 8))


def full_pools(
    shapes: Iterable[PoolShape],
    directory: Path | None,
    *,
    device: str = "cpu",
    mover: FileMover | None = None,
    checksum: bool = True,
    windows: tuple[WindowConfig, ...] = WINDOWS,
    file_limit_s: float = FILE_LIMIT_S,
) -> BlockPools:
    """Pools whose every byte in memory is random, from a fixed seed."""
    pools = BlockPools(
        tuple(shapes),
        windows,
        device=torch.device(device),
        directory=directory,
        mover=mover,
        checksum=checksum,
        file_limit_s=file_limit_s,
    )
    generator = torch.Generator().manual_seed(0)
    for pool in pools.pools:
        for tensor in [pool.device, *([] if pool.host is None else [pool.host])]:
            random = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
            tensor.view(torch.uint8).view(-1).copy_(random)
    return pools


class Memory:
    """What every place holds, one byte tensor [L, C, H, T, D bytes] a pool; no entry where nothing is."""

    def __init__(self, pools: BlockPools) -> None:
        self.places: dict[Place, list[Tensor]] = {}
        for window, found in pools.windows.items():
            for tier in (Tier.DEVICE, Tier.HOST):
                for slot in range(found.config.num_blocks[tier]):
                    place = Place(window, tier, slot)
                    self.places[place] = [content.clone() for content in content_of(pools, place)]

    def apply(self, order: CopyOrder) -> None:
        """Copy now. A slot on disk is replaced as a whole."""
        source = self.places[order.source]
        if order.destination.tier is Tier.DISK:
            self.places[order.destination] = [content.clone() for content in source]
            return
        for theirs, ours in zip(source, self.places[order.destination], strict=True):
            ours[..., : order.num_tokens, :] = theirs[..., : order.num_tokens, :]

    def differs(self, pools: BlockPools) -> list[Place]:
        """The places that do not hold what they should."""
        return [
            place
            for place, wanted in self.places.items()
            if not all(torch.equal(ours, theirs) for ours, theirs in zip(wanted, content_of(pools, place), strict=True))
        ]


def content_of(pools: BlockPools, place: Place) -> list[Tensor]:
    """The bytes at a place, [L, C, H, T, D bytes] a pool, read without the code under test."""
    found = pools.windows[place.window].pools
    if place.tier is Tier.DISK:
        return [_from_file(pool.disk.path_of(place.slot), pool.device[0]) for pool in found]
    return [pool.tensor(place.tier)[place.slot].cpu().view(torch.uint8) for pool in found]


def _from_file(path: Path, like: Tensor) -> Tensor:
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return content.view(*like.shape[:-1], like.shape[-1] * like.itemsize)
