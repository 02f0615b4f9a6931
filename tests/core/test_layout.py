"""Pools: grouping, numbering, bytes and offsets of the worked examples."""

import pytest

from kv_core.errors import CallerError
from kv_core.layout import IndexSpec, PoolKind, block_bytes, cache_pools, layer_positions
from kv_core.spec import CacheSpec, LayerSpec


def spec_of(heads, windows=(None,), head_size=64, planes=2, tokens_per_block=64):
    layers = (
        LayerSpec(count, head_size, planes, "float16", windows[at % len(windows)]) for at, count in enumerate(heads)
    )
    return CacheSpec(tuple(layers), tokens_per_block)


def test_layers_of_one_head_count_share_a_pool():
    pools = cache_pools(spec_of([3, 2, 1, 2]))
    assert [pool.page_elements for pool in pools] == [4096, 8192, 12288]
    assert [len(pool.layers) for pool in pools] == [1, 2, 1]
    assert layer_positions(pools) == ((2, 0), (1, 0), (0, 0), (1, 1))


def test_windows_ascend_and_number_their_pools():
    pools = cache_pools(spec_of([2, 2, 2, 2], windows=(32, 8)))
    assert [pool.window for pool in pools] == [8, 32]
    assert layer_positions(pools) == ((1, 0), (0, 0), (1, 1), (0, 1))


def test_scale_and_index_pools_follow_the_data_pools_of_their_window():  # core spec D31
    pools = cache_pools(spec_of([2, 1, 2], windows=(8, 32), head_size=16), fp4=True, index=IndexSpec(128))
    kinds = [(pool.window, pool.kind.value) for pool in pools]
    assert kinds == [
        (8, "kv"),
        (8, "block_scale"),
        (8, "indexer_k"),
        (32, "kv"),
        (32, "block_scale"),
        (32, "indexer_k"),
    ]
    assert layer_positions(pools) == ((0, 0), (3, 0), (0, 1))
    by_hand = [sum(p.bytes_per_block for p in pools if p.window == window) for window in (8, 32)]
    assert list(block_bytes(pools).values()) == by_hand


def test_four_bit_elements():
    data, scales = cache_pools(spec_of([6] * 6, head_size=16, tokens_per_block=4), fp4=True)
    assert (data.page_elements, scales.page_elements) == (192, 24)
    assert scales.kind is PoolKind.BLOCK_SCALE
    assert block_bytes([data, scales]) == {None: 6 * 2 * (192 + 24)}  # each at one byte, none at half


@pytest.mark.parametrize("head_size", [15, 24])
def test_heads_that_do_not_divide_are_refused(head_size):
    with pytest.raises(CallerError, match=f"head_size={head_size}"):
        cache_pools(spec_of([1], head_size=head_size), fp4=True)


def test_index_bytes():
    assert IndexSpec(128).bytes_per_token == 132
    assert IndexSpec(64).bytes_per_token == 64
    assert IndexSpec(256, 64).bytes_per_token == 272


@pytest.mark.parametrize(("layers", "planes", "slot", "expected"), [(3, 2, 5, (30, 31)), (3, 1, 5, (15, 15))])
def test_page_offsets(layers, planes, slot, expected):
    (pool,) = cache_pools(spec_of([1] * layers, planes=planes))
    assert pool.page_offsets(slot) == expected
    assert pool.shape(7) == (7, layers, planes, 64 * 64)


def test_bytes_equal_those_of_the_spec_when_nothing_is_added():
    spec = spec_of([3, 2, 1, 2], windows=(8, 32))
    assert sum(block_bytes(cache_pools(spec)).values()) == spec.bytes_per_block
