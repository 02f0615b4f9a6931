"""The same on a GPU, where copies are queued on a stream of their own."""

from random import Random

import pytest
import torch

from kv_core.config import WindowConfig
from kv_core.tiers import CopyLog, Place, Tier
from kv_testing.block_memory import WINDOWS, Memory, full_pools, plain_shapes
from kv_transfer.copy_engine import CopyEngine
from kv_transfer.device_memory import free_bytes, trim
from kv_transfer.files import FilesConfig, open_mover
from kv_transfer.pool_tables import allocated_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LARGE = (WindowConfig(8, 400_000), WindowConfig(64, 400_000))
PLACES = [
    Place(window.window, tier, slot) for window in WINDOWS for tier in Tier for slot in range(window.num_blocks[tier])
]


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("seed", range(10))
def test_random_copies_over_all_tiers(tmp_path, seed, num_workers):
    random, log = Random(seed), CopyLog()
    pools = full_pools(plain_shapes(), tmp_path, device="cuda")
    memory, engine = Memory(pools), CopyEngine(pools, num_workers=num_workers)
    written = {place for place in PLACES if place.tier is not Tier.DISK}
    for _ in range(20):
        for _ in range(10):
            source, destination = random.choice(PLACES), random.choice(PLACES)
            if source != destination and source.window == destination.window and source in written:
                log.copy(source, destination, random.randint(1, 4))
                written.add(destination)
        orders = log.take()
        engine.submit(orders)
        for order in orders:
            memory.apply(order)
        progress = engine.wait(60)
        assert progress.misses == ()
        log.done(progress.below)
        # The model writes a device slot behind the copies, and the next copies come behind the model.
        place = Place(8, Tier.DEVICE, random.randrange(4))
        for number, pool in enumerate(pools.windows[8].pools):
            pool.device[place.slot].add_(1)
            memory.places[place][number] = pool.device[place.slot].cpu().view(torch.uint8)
    torch.cuda.synchronize()
    assert memory.differs(pools) == []
    engine.close()
    pools.close()


def test_copies_wait_for_the_model_and_the_model_for_copies(tmp_path):
    """A slow kernel writes a slot, which then goes to the host and comes back elsewhere while the caller runs on."""
    pools = full_pools(plain_shapes(), tmp_path, device="cuda")
    engine, log = CopyEngine(pools), CopyLog()
    pool = pools.windows[64].pools[0]
    torch.cuda._sleep(200_000_000)
    pool.device[0].fill_(3.0)
    log.copy(Place(64, Tier.DEVICE, 0), Place(64, Tier.HOST, 1), 4)
    log.copy(Place(64, Tier.HOST, 1), Place(64, Tier.DEVICE, 2), 4)
    engine.submit(log.take())
    assert engine.wait().below == 2
    pool.device[0].fill_(5.0)
    doubled = pool.device[2] * 2
    assert doubled.eq(6.0).all()
    assert pool.host is not None
    assert pool.host.is_pinned()
    assert pool.host[1].eq(3.0).all()
    engine.close()
    pools.close()


def test_closed_pools_give_the_device_its_memory_back(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    trim(device)
    before = torch.cuda.mem_get_info(device)[0]
    pools = full_pools(plain_shapes(), tmp_path, device="cuda", windows=LARGE)
    taken = allocated_bytes(pools)[Tier.DEVICE]
    assert taken > 200 << 20
    assert before - free_bytes(device) >= taken
    pools.close()
    assert abs(before - torch.cuda.mem_get_info(device)[0]) < taken // 8


@pytest.mark.parametrize("way", ["posix", "gds"])
def test_every_way_to_files_that_works_here_brings_device_blocks_back(tmp_path, way):
    """Where GDS does not work, plain files took its place: the bytes are the same."""
    mover = open_mover(FilesConfig(way=way), tmp_path, torch.device("cuda", 0))
    pools = full_pools(plain_shapes(), tmp_path, device="cuda", mover=mover)
    memory, engine, log = Memory(pools), CopyEngine(pools, num_workers=1), CopyLog()
    for slot, other in ((0, 1), (2, 3)):
        log.copy(Place(8, Tier.DEVICE, slot), Place(8, Tier.DISK, slot), 4)
        log.copy(Place(8, Tier.DISK, slot), Place(8, Tier.DEVICE, other), 4)
    orders = log.take()
    engine.submit(orders)
    for order in orders:
        memory.apply(order)
    assert engine.wait(60).misses == ()
    torch.cuda.synchronize()
    assert memory.differs(pools) == []
    engine.close()
    pools.close()
