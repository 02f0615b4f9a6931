"""What every way to move files must do: all bytes or an OSError, with few handles and nothing left behind."""

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kv_core.tiers import Place, Tier
from kv_testing.block_memory import WINDOWS, full_pools, plain_shapes
from kv_testing.copy_bench import CopyBench
from kv_transfer.copy_engine import CopyTotals
from kv_transfer.process_directory import ProcessDirectory
from kv_transfer.slot_files import Corrupt, SlotFiles, Sums

DEVICE, HOST, DISK = (lambda slot, tier=tier: Place(8, tier, slot) for tier in Tier)
NUM_BYTES = 100_003


def content_of(seed, num_bytes=NUM_BYTES):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@contextmanager
def opened(path, flags=os.O_RDWR | os.O_CREAT):
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def largest_file(num_bytes):
    """No file of this process may grow beyond this: what a full disk says, without filling one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def open_handles():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def files(tmp_path, mover):
    root = ProcessDirectory(tmp_path / "disk")
    yield SlotFiles(root, 8, 0, NUM_BYTES, mover, Sums())
    root.close()
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("num_bytes", [1, 8, 4095, 4097, (1 << 20) + 3])
def test_what_is_written_is_read_back(tmp_path, mover, num_bytes):
    content, found = content_of(0, num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
    with opened(tmp_path / "file") as file:
        mover.write(file, content)
        assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()
    with opened(tmp_path / "file", os.O_RDONLY) as file:
        mover.read(file, found)
    assert torch.equal(found, content)


def test_memory_may_begin_anywhere_and_its_surroundings_stay(files):
    written, found = content_of(1, NUM_BYTES + 8), torch.zeros(NUM_BYTES + 8, dtype=torch.uint8)
    files.write(0, written[3 : 3 + NUM_BYTES])
    files.read(0, found[5 : 5 + NUM_BYTES])
    assert torch.equal(found[5:-3], written[3:-5])
    assert found[:5].tolist() + found[-3:].tolist() == [0] * 8


def test_memory_that_is_kept_moves_as_any_other(tmp_path, mover):
    kept = content_of(2, 64)
    mover.keep(kept)
    with opened(tmp_path / "file") as file:
        mover.write(file, kept[16:48])
    assert (tmp_path / "file").read_bytes() == kept[16:48].numpy().tobytes()


@pytest.mark.parametrize("length", [0, NUM_BYTES - 1, NUM_BYTES + 1])
def test_a_file_of_another_length_is_an_error(files, length):
    files.write(0, content_of(0))
    os.truncate(files.path_of(0), length)
    with pytest.raises(OSError, match=f"theirs={length}"):
        files.read(0, content_of(1))


def test_a_file_that_is_shorter_than_its_length_said_is_an_error(tmp_path, mover):
    """It shrinks between the look at its length and the read."""
    (tmp_path / "file").write_bytes(bytes(100))
    with opened(tmp_path / "file", os.O_RDONLY) as file, pytest.raises(OSError):
        mover.read(file, content_of(0, 101))


def test_a_missing_file_is_an_error(files):
    with pytest.raises(FileNotFoundError):
        files.read(0, content_of(0))


def test_what_cannot_be_read_is_an_error(files, tmp_path, mover):
    files.write(0, content_of(0))
    with opened(files.path_of(0), os.O_WRONLY) as file, pytest.raises(OSError):
        mover.read(file, content_of(0))
    files.path_of(1).mkdir()
    with pytest.raises(OSError):
        files.read(1, content_of(0))


def test_what_cannot_be_written_is_an_error(files, mover):
    files.write(0, content_of(0))
    with opened(files.path_of(0), os.O_RDONLY) as file, pytest.raises(OSError):
        mover.write(file, content_of(1))
    with opened("/dev/full", os.O_RDWR) as file, pytest.raises(OSError):
        mover.write(file, content_of(1))


def test_a_full_disk_leaves_nothing_and_the_next_write_works(files):
    files.write(0, content_of(0))
    with largest_file(NUM_BYTES // 2), pytest.raises(OSError):
        files.write(0, content_of(1))
    assert list(files.folder.iterdir()) == []
    found = content_of(3)
    files.write(0, content_of(1))
    files.read(0, found)
    assert torch.equal(found, content_of(1))


@pytest.mark.parametrize("at", [0, 50_000, NUM_BYTES - 1])
def test_a_flipped_bit_is_an_error(files, at):
    files.write(0, content_of(0))
    held = bytearray(files.path_of(0).read_bytes())
    held[at] ^= 1
    files.path_of(0).write_bytes(held)
    with pytest.raises(Corrupt):
        files.read(0, content_of(1))


def test_without_a_checksum_nobody_notices(tmp_path, mover):
    """The negative control."""
    root = ProcessDirectory(tmp_path)
    files, found = SlotFiles(root, 8, 0, 4, mover), torch.zeros(4, dtype=torch.uint8)
    files.write(0, torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    files.path_of(0).write_bytes(bytes([1, 2, 3, 5]))
    files.read(0, found)
    assert found.tolist() == [1, 2, 3, 5]
    root.close()


def test_handles_stay_as_few_as_they_were(files):
    content = content_of(0)
    files.write(0, content)
    before = open_handles()
    for slot in range(50):
        files.write(slot, content)
        files.read(slot, content)
        with pytest.raises(OSError):
            files.read(1000, content)
    assert open_handles() == before


def test_threads_move_different_files_at_once(files):
    most, before = [], open_handles()

    def serve(seed):
        found = content_of(0)
        for turn in range(10):
            files.write(seed, content_of(100 * turn + seed))
            files.read(seed, found)
            most.append(open_handles())
            assert torch.equal(found, content_of(100 * turn + seed))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(serve, range(4)))
    assert max(most) <= before + 4 + 1, "one file for each thread, and the folder that counts them"


class Bench(CopyBench):
    """With two workers, over one mover."""

    def __init__(self, directory, mover):
        super().__init__(full_pools(plain_shapes(), directory, mover=mover), num_workers=2)

    def path(self, slot, pool=0):
        return self.pools.windows[8].pools[pool].disk.path_of(slot)


@pytest.fixture
def bench(tmp_path, mover):
    threads = threading.active_count()
    bench = Bench(tmp_path / "disk", mover)
    yield bench
    bench.engine.close()
    bench.pools.close()
    bench.pools.close()
    assert threading.active_count() == threads
    assert list((tmp_path / "disk").iterdir()) == []


def test_blocks_of_all_tiers_go_through_files(bench):
    there = [(DEVICE(0), DISK(0)), (HOST(0), DISK(1)), (DISK(0), DISK(2))]
    back = [(DISK(2), HOST(1)), (DISK(1), DEVICE(2)), (DISK(0), DEVICE(3))]
    assert bench.run(*there, *back) == (6, (), ())
    assert bench.memory.differs(bench.pools) == []
    assert bench.engine.totals == CopyTotals(6, 0, 0)


def spoil_length(bench):
    os.truncate(bench.path(0), 1)


def spoil_bit(bench):
    held = bytearray(bench.path(0, 1).read_bytes())
    held[-1] ^= 0x80
    bench.path(0, 1).write_bytes(held)


def spoil_name(bench):
    bench.path(0).unlink()
    bench.path(0).mkdir()


SPOILED = {
    "short": (spoil_length, 0),
    "flipped bit": (spoil_bit, 1),
    "unreadable": (spoil_name, 0),
    "missing": (lambda bench: bench.path(0).unlink(), 0),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_failing_file_is_a_counted_miss_and_the_engine_goes_on(bench, spoil):
    do, num_corrupt = SPOILED[spoil]
    bench.run((DEVICE(0), DISK(0)))
    do(bench)
    progress = bench.run((DISK(0), DEVICE(1)), (DEVICE(0), DISK(1)), (DISK(1), HOST(1)))
    assert [miss.order.destination for miss in progress.misses] == [DEVICE(1)] == list(progress.lost)
    assert bench.engine.totals == CopyTotals(4, 1, num_corrupt)


def test_a_full_disk_is_a_miss_and_the_engine_goes_on(bench):
    size = bench.pools.windows[8].pools[0].shape.bytes_per_block
    with largest_file(size // 2):
        progress = bench.run((DEVICE(0), DISK(0)), (DISK(0), HOST(0)))
    assert [miss.order.destination for miss in progress.misses] == [DISK(0), HOST(0)]
    assert bench.run((DEVICE(0), DISK(0)), (DISK(0), HOST(0))).misses == ()
    assert bench.engine.totals == CopyTotals(4, 2, 0)


def test_the_disk_of_a_window_has_as_many_files_as_slots_at_most(bench):
    for turn in range(3):
        bench.run(*((DEVICE(turn), DISK(slot)) for slot in range(WINDOWS[0].num_disk)))
    found = [path for path in bench.pools.directory.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(found) == 2 * WINDOWS[0].num_disk
