"""Regions start on pages, slices lie inside them."""

import pytest
import torch

from kv_core.errors import CallerError
from kv_transfer.agent.cards import RemoteSlice
from kv_transfer.regions import PAGE_BYTES, RegionSlice, device_region, host_region


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES - 1, PAGE_BYTES, 10 * PAGE_BYTES + 3])
def test_a_host_region_is_zeroed_and_starts_on_a_page(num_bytes: int) -> None:
    region = host_region(num_bytes)
    assert region.address % PAGE_BYTES == 0
    assert region.address == region.memory.data_ptr()
    assert region.memory.shape == (num_bytes,)
    assert region.memory.dtype == torch.uint8
    assert not region.memory.any()
    assert (region.kind, region.device_id) == ("host", 0)


def test_a_slice_is_a_view_and_names_itself_for_a_peer() -> None:
    region = host_region(100)
    part = region.slice(10, 20)
    part.tensor.fill_(7)
    assert region.memory.tolist() == [0] * 10 + [7] * 20 + [0] * 70
    assert part.remote == RemoteSlice(address=region.address + 10, num_bytes=20, kind="host", device_id=0)
    assert region.whole.num_bytes == 100


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 101), (100, 1), (-1, 5), (0, 0), (3, -1)])
def test_a_slice_that_leaves_its_region_names_both(offset: int, num_bytes: int) -> None:
    region = host_region(100)
    with pytest.raises(CallerError, match=rf"slice=\[{offset}, {offset + num_bytes}\), region=\[0, 100\)"):
        RegionSlice(region, offset, num_bytes)


def test_regions_are_equal_only_to_themselves() -> None:
    assert host_region(8) != host_region(8)


def test_sizes_and_devices_are_checked() -> None:
    with pytest.raises(CallerError, match="num_bytes=0"):
        host_region(0)
    with pytest.raises(CallerError, match="device='cpu'"):
        device_region(8, torch.device("cpu"))


@pytest.mark.gpu
def test_a_device_region_names_its_device() -> None:
    region = device_region(1000, torch.device("cuda", torch.cuda.device_count() - 1))
    assert (region.kind, region.device_id) == ("device", torch.cuda.device_count() - 1)
    assert region.memory.data_ptr() == region.address
    assert not region.memory.any()
