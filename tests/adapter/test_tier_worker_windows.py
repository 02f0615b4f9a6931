"""Models with windows on the worker side of the tiers, over tensors: what is absent is neither read nor written."""

import pytest
import torch

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_engine_adapter.tier_memory import HostMemory
from kv_engine_adapter.tier_orders import Answer, FetchFromDisk, FindOnDisk, JobId, WriteToDisk
from kv_testing.stores import config_of, cut, full_world
from kv_testing.tier_side import ALL, NUM_TOKENS, PREFIX, SIZE, SLOTS, WISHES, load, making_sides, save, wipe
from kv_transfer.plan.ranges import HOLE
from kv_transfer.prefix_store.store import PrefixStore


@pytest.fixture
def sides():
    with making_sides() as make:
        yield make


def test_groups_are_those_of_the_caches():
    state = cut(windows=(0, 32, 0))
    with pytest.raises(CallerError, match="groups are not"):
        HostMemory(state, full_world(state, NUM_TOKENS).caches[Rank(0)], SIZE, 10)


HOLED = frozenset({0, 1})
"""Blocks of which the middle layer, which has a window, has nothing."""


def windowed(sides, **more):
    side = sides(full_world(cut(windows=(0, 32, 0)), NUM_TOKENS), groups=(0, 1), **more)
    full, slid = side.tables
    side.tables = full, tuple(HOLE if at in HOLED else block for at, block in enumerate(slid))
    return side


def rows(side, layer, tokens):
    caches = side.caches
    table, planes = (
        side.world.tables(Rank(0)).by_group[caches.groups[layer]],
        caches.planes_of_layers(Span(layer, layer + 1)),
    )
    return torch.stack([torch.stack([plane[table[at // SIZE], at % SIZE] for at in tokens]) for plane in planes])


def demand_but_for_holes(side, before):
    """All tokens of layers that see all, and of the other one those that are there; the rest is as it was wiped."""
    for layer in range(3):
        for at in range(NUM_TOKENS):
            found, is_there = rows(side, layer, [at]), layer != 1 or at // SIZE not in HOLED
            assert torch.equal(found, before[layer][:, at : at + 1]) == is_there


@pytest.mark.parametrize("verify", [True, False])
def test_of_a_window_only_blocks_that_are_there_are_copied(sides, verify):
    side = windowed(sides, verify=verify)
    before = [rows(side, layer, ALL) for layer in range(3)]
    side.obey(save(side))
    wipe(side)
    side.obey(load(side))
    assert not side.failed
    demand_but_for_holes(side, before)


def test_of_a_window_only_blocks_that_are_there_go_to_disk_and_back(sides, tmp_path):
    state = cut(windows=(0, 32, 0))
    side = windowed(sides, store=PrefixStore(config_of(tmp_path), state), verify=True)
    before = [rows(side, layer, ALL) for layer in range(3)]
    absent = frozenset(), HOLED
    side.obey(save(side, write=WriteToDisk(JobId(3), PREFIX, SLOTS, WISHES, 0, absent)))
    side.memory.caches.planes[0].zero_()
    (told,) = side.obey(FindOnDisk(JobId(5), PREFIX, 60.0))
    assert told.num_tokens == NUM_TOKENS
    assert side.obey(FetchFromDisk(JobId(6), PREFIX, ALL, SLOTS, 60.0, absent)) == [Answer(6, NUM_TOKENS)]
    wipe(side)
    side.obey(load(side))
    assert not side.failed
    demand_but_for_holes(side, before)
