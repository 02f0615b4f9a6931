"""Host slots over caches of the CPU: copies of many blocks go a few at a time, and move the same."""

import pytest
import torch

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_engine_adapter import tier_memory
from kv_engine_adapter.tier_memory import HostMemory
from kv_kernels import block_copy
from kv_testing.stores import cut, full_world, num_wrong
from kv_testing.tagged import empty

SIZE, NUM_TOKENS = 16, 75
SLOTS = (7, 2, 9, 4, 0)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [Span(0, NUM_TOKENS), Span(30, 70)])
def test_many_blocks_are_copied_a_few_at_a_time(monkeypatch, num_blocks, tokens):
    world = full_world(cut(order="head_major"), NUM_TOKENS, "CBHTD")
    tables = world.tables(Rank(0)).by_group
    memory = HostMemory(world.state, world.caches[Rank(0)], SIZE, 10)
    seen: list[int] = []

    def copy(planes, ids, *them, **more):
        seen.append(len(ids))
        return block_copy.copy_blocks(planes, ids, *them, **more)

    monkeypatch.setattr(tier_memory, "copy_blocks", copy)
    monkeypatch.setattr(tier_memory, "_BATCH_BYTES", num_blocks * memory.num_bytes(Span(0, SIZE)) + 1)
    memory.save(Span(0, NUM_TOKENS), SLOTS, tables, None)
    empty(world)
    blocks = tokens.blocks(SIZE)
    memory.load(tokens, SLOTS[blocks.start : blocks.stop], tables, None)
    assert num_wrong(world, tokens) == 0
    assert max(seen) == num_blocks


def test_slots_are_token_major_whatever_the_device_is():
    found = []
    for order, form in (("head_major", "CBHTD"), ("token_major", "BTH(CD)")):
        world = full_world(cut(order=order), NUM_TOKENS, form)
        memory = HostMemory(world.state, world.caches[Rank(0)], SIZE, 10)
        memory.save(Span(0, NUM_TOKENS), SLOTS, world.tables(Rank(0)).by_group, None)
        found.append(torch.stack([plane[list(SLOTS[:-1])] for plane in memory.caches.planes]))
    assert torch.equal(*found)
