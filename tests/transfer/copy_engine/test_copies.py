"""Copies arrive byte for byte, in any order that their dependencies allow, in threads as in the caller."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.config import WindowConfig
from kv_core.errors import CallerError
from kv_core.layout import cache_pools
from kv_core.spec import CacheSpec
from kv_core.tiers import CopyLog, CopyOrder, Place, Tier
from kv_testing.block_memory import (
    TOKENS_PER_BLOCK,
    WINDOWS,
    Memory,
    content_of,
    full_pools,
    packed_shapes,
    plain_shapes,
)
from kv_transfer.block_pools import BlockPools
from kv_transfer.copy_engine import CopyEngine
from kv_transfer.copy_queue import CopyQueue
from kv_transfer.slot_copier import SlotCopier

PLACES = [
    Place(window.window, tier, slot) for window in WINDOWS for tier in Tier for slot in range(window.num_blocks[tier])
]
TIERS = [(source, destination) for source in Tier for destination in Tier]


def log_copies(moves):
    """Orders for these (source, destination, tokens), of which those that make sense are kept."""
    log, written = CopyLog(), {place for place in PLACES if place.tier is not Tier.DISK}
    for source, destination, num_tokens in moves:
        if source != destination and source.window == destination.window and source in written:
            log.copy(source, destination, num_tokens)
            written.add(destination)
    return log.take()


def taken(queue, at=0):
    order = queue.take(at)
    assert order is not None
    return order


moves = st.lists(
    st.tuples(st.sampled_from(PLACES), st.sampled_from(PLACES), st.integers(1, TOKENS_PER_BLOCK)), max_size=60
)


@pytest.mark.parametrize(("source", "destination"), TIERS, ids=lambda tier: tier.name)
@pytest.mark.parametrize("num_tokens", [1, 3, TOKENS_PER_BLOCK])
def test_a_copy_brings_the_first_tokens_and_nothing_else(tmp_path, source, destination, num_tokens):
    pools = full_pools(plain_shapes(), tmp_path)
    memory = Memory(pools)
    log = CopyLog()
    log.copy(Place(8, Tier.DEVICE, 3), Place(8, Tier.DISK, 1), TOKENS_PER_BLOCK)
    if (source, destination) != (Tier.DEVICE, Tier.DISK):
        log.copy(Place(8, source, 1), Place(8, destination, 2), num_tokens)
    orders = log.take()
    engine = CopyEngine(pools)
    engine.submit(orders)
    progress = engine.wait()
    for order in orders:
        memory.apply(order)
    assert progress == (len(orders), (), ())
    assert memory.differs(pools) == []
    pools.close()


def test_elements_with_packed_scales_are_copied_whole(tmp_path):
    pools = full_pools(packed_shapes(), tmp_path)
    source, destination = Place(8, Tier.DEVICE, 0), Place(8, Tier.DEVICE, 1)
    wanted = [content.clone() for content in content_of(pools, source)]
    assert len(wanted) == 3
    SlotCopier(pools).copy(CopyOrder(0, source, destination, 1, ()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(wanted, content_of(pools, destination), strict=True))
    pools.close()


@given(moves, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_order_that_dependencies_allow_gives_the_same_bytes(tmp_path_factory, copies, random: Random):
    pools = full_pools(plain_shapes(), tmp_path_factory.mktemp("disk"))
    memory, queue, copier = Memory(pools), CopyQueue(), SlotCopier(pools)
    orders = log_copies(copies)
    running = []
    queue.add(orders)
    while queue.num_open:
        # Several orders are handed out before the first of them ends, as several threads would.
        while queue.num_ready and random.random() < 0.7:
            running.append(taken(queue, random.randrange(queue.num_ready)))
        if running:
            order = running.pop(random.randrange(len(running)))
            copier.copy(order)
            queue.end(order.order_id)
        queue.check()
    for order in orders:
        memory.apply(order)
    assert memory.differs(pools) == []
    pools.close()


@given(moves)
@settings(max_examples=15)
def test_threads_give_the_same_bytes(tmp_path_factory, copies):
    pools = full_pools(plain_shapes(), tmp_path_factory.mktemp("disk"))
    memory, engine = Memory(pools), CopyEngine(pools, num_workers=3)
    orders = log_copies(copies)
    for at in range(0, len(orders), 7):
        engine.submit(orders[at : at + 7])
        assert engine.poll().lost == ()
    assert engine.wait(timeout_s=30).below == len(orders)
    engine.close()
    for order in orders:
        memory.apply(order)
    assert memory.differs(pools) == []
    pools.close()


def test_without_dependencies_the_bytes_are_wrong(tmp_path):
    """The negative control: a chain of moves, each into the place that the one before has left, run backwards."""
    pools = full_pools(plain_shapes(), tmp_path)
    memory, copier = Memory(pools), SlotCopier(pools)
    orders = log_copies([(Place(64, Tier.DEVICE, slot + 1), Place(64, Tier.DEVICE, slot), 4) for slot in range(4)])
    assert [order.after for order in orders] == [(), (0,), (1,), (2,)]
    for order in orders:
        memory.apply(order)
    for order in reversed(orders):
        copier.copy(order)
    assert len(memory.differs(pools)) == 3
    pools.close()


def test_an_order_waits_for_what_it_names():
    queue = CopyQueue()
    places = [Place(8, Tier.DEVICE, slot) for slot in range(4)]
    queue.add([CopyOrder(5, places[0], places[1], 4, (2,)), CopyOrder(6, places[1], places[2], 4, (5,))])
    assert (queue.below, queue.num_ready, queue.num_open) == (5, 1, 2)
    assert taken(queue).order_id == 5
    assert queue.take() is None
    queue.end(5)
    assert (queue.below, taken(queue).order_id) == (6, 6)
    queue.end(6)
    assert (queue.below, queue.num_open) == (7, 0)
    for wrong in (CopyOrder(8, places[0], places[1], 4, ()), CopyOrder(7, places[0], places[1], 4, (7,))):
        with pytest.raises(CallerError):
            queue.add([wrong])
    assert (queue.below, queue.num_open) == (7, 0)


WRONG = {
    "two windows": (Place(8, Tier.DEVICE, 0), Place(64, Tier.DEVICE, 0), 4),
    "no such window": (Place(9, Tier.DEVICE, 0), Place(9, Tier.DEVICE, 1), 4),
    "no such slot": (Place(8, Tier.DEVICE, 0), Place(8, Tier.HOST, 3), 4),
    "negative slot": (Place(8, Tier.DEVICE, -1), Place(8, Tier.HOST, 1), 4),
    "no token": (Place(8, Tier.DEVICE, 0), Place(8, Tier.DEVICE, 1), 0),
    "more than a block": (Place(8, Tier.DEVICE, 0), Place(8, Tier.DEVICE, 1), 5),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_impossible_order_raises_and_copies_nothing(tmp_path, wrong, num_workers):
    pools = full_pools(plain_shapes(), tmp_path)
    memory, engine = Memory(pools), CopyEngine(pools, num_workers=num_workers)

    def execute():
        engine.submit([CopyOrder(0, wrong[0], wrong[1], wrong[2], ())])
        engine.wait(30)

    with pytest.raises(CallerError):
        execute()
    assert memory.differs(pools) == []
    engine.close()
    pools.close()


def test_a_wait_ends_in_time(tmp_path):
    pools = full_pools(plain_shapes(), tmp_path)
    engine = CopyEngine(pools, num_workers=1)
    engine._changed.acquire()  # no worker can take anything
    try:
        engine.submit([CopyOrder(0, Place(8, Tier.DEVICE, 0), Place(8, Tier.HOST, 0), 4, ())])
        with pytest.raises(TimeoutError, match="open=1"):
            engine.wait(0)
    finally:
        engine._changed.release()
    assert engine.wait(30).below == 1
    engine.close()
    engine.close()
    pools.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_closed_engine_takes_nothing_and_nobody_waits_for_it(tmp_path, num_workers):
    pools = full_pools(plain_shapes(), tmp_path)
    engine, order = CopyEngine(pools, num_workers=num_workers), log_copies([(*PLACES[:2], 4)])
    engine.close()
    with pytest.raises(CallerError, match="closed"):
        engine.submit(order)
    assert engine.wait(1).below == 0
    pools.close()


def test_planes_are_views_in_which_one_slot_means_one_block():
    spec = CacheSpec.uniform(
        num_layers=3, num_heads=2, head_size=4, dtype="float32", tokens_per_block=4, windows=(8, None)
    )
    pools = BlockPools(cache_pools(spec), (WindowConfig(8, 3), WindowConfig(64, 5)), device=torch.device("cpu"))
    assert [pools.window_of(layer) for layer in range(3)] == [8, 64, 8]
    keys, values = pools.planes(2)
    assert keys.shape == values.shape == (3, 4, 2, 4)
    keys[1, 2, 0] = 7.0
    values[1, 3, 1] = 9.0
    number, ordinal = pools.position(2)
    assert pools.pools[number].device[1, ordinal, 0, 0, 2].tolist() == [7.0] * 4
    assert pools.pools[number].device[1, ordinal, 1, 1, 3].tolist() == [9.0] * 4
    assert sum(int(pool.device.count_nonzero()) for pool in pools.pools) == 8


def test_pools_fit_the_windows_of_the_manager():
    cpu = torch.device("cpu")
    with pytest.raises(CallerError, match="theirs=8"):
        BlockPools(plain_shapes(), (WindowConfig(4, 2), WindowConfig(64, 2)), device=cpu)
    with pytest.raises(CallerError, match=r"without=\[16\]"):
        BlockPools(plain_shapes(), (WindowConfig(8, 2), WindowConfig(16, 2), WindowConfig(64, 2)), device=cpu)
    with pytest.raises(CallerError, match="directory"):
        BlockPools(plain_shapes(), WINDOWS, device=cpu)
    pools = BlockPools(plain_shapes(), (WindowConfig(8, 2),), device=cpu)
    assert pools.directory is None
    assert {pools.window_of(layer) for layer in range(4)} == {8}
    with pytest.raises(CallerError, match="HOST"):
        pools.pools[0].tensor(Tier.HOST)
