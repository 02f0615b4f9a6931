"""Tables of the pools, as kernels and operators want them (core spec 6.2, D31).

In:  BlockPools.
Out: for every pool its kind, element type, bytes and addresses, by its absolute number; for every layer its pools.
Law: one number means one pool in every table: rows of kinds that are not asked for are left out, never renumbered.
     Bytes are those of the tensors and files themselves.
"""

from typing import NamedTuple

from kv_core.layout import PoolKind, PoolPosition
from kv_core.tiers import Tier
from kv_transfer.block_pools import BlockPools, Pool


class PoolRow(NamedTuple):
    """One pool. `device` and `host` are addresses; None where the tier has no slots. Strides are bytes per slot."""

    number: int
    window: int | None
    kind: PoolKind
    dtype: str
    bytes_per_block: int
    device: int
    host: int | None


def pool_rows(pools: BlockPools, kind: PoolKind | None = None) -> tuple[PoolRow, ...]:
    """All pools in absolute order, or those of one kind."""
    rows = (_row(number, pool) for number, pool in enumerate(pools.pools))
    return tuple(row for row in rows if kind in (None, row.kind))


def layer_rows(pools: BlockPools, kind: PoolKind = PoolKind.KV) -> tuple[PoolPosition, ...]:
    """For each layer (absolute number of its pool of this kind, which of the pool's layers it is)."""
    return tuple(pools.position(layer, kind) for layer in range(pools.num_layers))


def allocated_bytes(pools: BlockPools) -> dict[Tier, int]:
    """Bytes that each tier takes when all its slots are written."""
    return {tier: sum(_bytes(pool, tier, pools) for pool in pools.pools) for tier in Tier}


def _row(number: int, pool: Pool) -> PoolRow:
    shape = pool.shape
    host = None if pool.host is None else pool.host.data_ptr()
    address = pool.device.data_ptr()
    return PoolRow(number, shape.window, shape.kind, shape.dtype, shape.bytes_per_block, address, host)


def _bytes(pool: Pool, tier: Tier, pools: BlockPools) -> int:
    if tier is Tier.DISK:
        return pools.config_of(pool).num_disk * pool.shape.bytes_per_block
    tensor = pool.device if tier is Tier.DEVICE else pool.host
    return 0 if tensor is None else tensor.nbytes
