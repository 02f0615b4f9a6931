"""Tables of windows with scales and index keys: one number means one pool, and bytes are those that are there."""

import weakref

import pytest
import torch

from kv_core.errors import CallerError
from kv_core.layout import PoolKind, PoolPosition
from kv_core.tiers import Tier
from kv_testing.block_memory import WINDOWS, full_pools, packed_shapes, plain_shapes
from kv_transfer.device_memory import MemoryUnknown, free_bytes, trim
from kv_transfer.pool_tables import allocated_bytes, layer_rows, pool_rows

KV, SCALE, INDEX = PoolKind.KV, PoolKind.BLOCK_SCALE, PoolKind.INDEXER


@pytest.fixture
def pools(tmp_path):
    pools = full_pools(packed_shapes(), tmp_path)
    yield pools
    pools.close()


def test_one_number_means_one_pool_in_every_table(pools):  # core spec D31
    rows = pool_rows(pools)
    assert [(row.number, row.window, row.kind) for row in rows] == [
        (0, 8, KV), (1, 8, SCALE), (2, 8, INDEX), (3, None, KV), (4, None, SCALE), (5, None, INDEX),
    ]  # fmt: skip
    for kind, numbers in ((KV, [0, 3]), (SCALE, [1, 4]), (INDEX, [2, 5])):
        assert pool_rows(pools, kind) == tuple(rows[number] for number in numbers)
        positions = layer_rows(pools, kind)
        assert positions == tuple(PoolPosition(numbers[layer % 2], layer // 2) for layer in range(4))
        for layer, (number, ordinal) in enumerate(positions):
            plane = pools.planes(layer, kind)[0]
            page = plane.nbytes // plane.shape[0]
            assert plane.data_ptr() == rows[number].device + ordinal * len(pools.planes(layer, kind)) * page


def test_addresses_are_those_of_the_slots(pools):
    for row, pool in zip(pool_rows(pools), pools.pools, strict=True):
        assert row.dtype == str(pool.device.dtype).removeprefix("torch.")
        for slot in range(pool.device.shape[0]):
            assert pool.device[slot].data_ptr() == row.device + slot * row.bytes_per_block
        assert pool.host is not None
        assert row.host is not None
        assert pool.host[1].data_ptr() == row.host + row.bytes_per_block


def test_bytes_are_counted_by_the_elements_that_are_stored(pools):
    """Packed elements and their scales are a byte each, index keys too: none at half, none at the size of the cache."""
    data, scales, index = 2 * 2 * 2 * (32 // 2) * 4, 2 * 2 * 2 * (32 // 16) * 4, 2 * (16 + 2 * 4) * 4
    assert [row.bytes_per_block for row in pool_rows(pools)] == 2 * [data, scales, index]
    for tier in Tier:
        slots = sum(config.num_blocks[tier] for config in WINDOWS)
        assert allocated_bytes(pools)[tier] == slots * (data + scales + index)


def test_pools_that_are_not_there_are_refused(tmp_path):
    pools = full_pools(plain_shapes(), tmp_path)
    assert pool_rows(pools, SCALE) == ()
    with pytest.raises(CallerError, match="kind=block_scale"):
        layer_rows(pools, SCALE)
    pools.close()


def test_closed_pools_hold_no_memory(tmp_path):
    pools = full_pools(plain_shapes(), tmp_path)
    held = [weakref.ref(pool.device) for pool in pools.pools]
    assert all(found() is not None for found in held)
    pools.close()
    assert all(found() is None for found in held)


def test_the_host_says_what_is_free():
    total = 1 << 50
    assert 0 < free_bytes(torch.device("cpu")) < total
    trim(torch.device("cpu"))


class Cuda:
    """What torch.cuda says of a device of 100 bytes."""

    def __init__(self, free, reserved, allocated):
        self.free, self.reserved, self.allocated, self.calls = free, reserved, allocated, []

    def synchronize(self, device):
        self.calls.append("synchronize")

    def mem_get_info(self, device):
        self.calls.append("ask")
        return self.free, 100

    def memory_reserved(self, device):
        return self.reserved

    def memory_allocated(self, device):
        return self.allocated

    def empty_cache(self):
        self.calls.append("empty")


def test_what_torch_keeps_for_later_is_free(monkeypatch):
    cuda, device = Cuda(30, 50, 20), torch.device("cuda", 0)
    monkeypatch.setattr(torch, "cuda", cuda)
    assert free_bytes(device) == 60
    assert cuda.calls == ["synchronize", "ask"], "what is queued may still free memory"
    trim(device)
    assert cuda.calls[-1] == "empty"
    cuda.reserved = 95
    with pytest.raises(MemoryUnknown, match="free=30, kept by torch=75, total=100"):
        free_bytes(device)
