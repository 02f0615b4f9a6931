"""A file that fails is a lost place: reported, never read as something else, forgotten once it is filled again."""

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from kv_core.tiers import Place, Tier
from kv_testing.block_memory import WINDOWS, content_of, full_pools, plain_shapes
from kv_testing.copy_bench import CopyBench
from kv_transfer.file_mover import FileCalls, PlainFiles
from kv_transfer.process_directory import ProcessDirectory
from kv_transfer.slot_files import SlotFiles

DEVICE, HOST, DISK = (lambda slot, tier=tier: Place(8, tier, slot) for tier in Tier)


class Bench(CopyBench):
    """Over a disk whose calls a test may spoil."""

    def __init__(self, directory, num_workers=0):
        self.write, self.read_into = os.write, FileCalls().read_into
        calls = FileCalls(lambda *call: self.write(*call), lambda *call: self.read_into(*call))
        super().__init__(full_pools(plain_shapes(), directory, mover=PlainFiles(calls)), num_workers)

    def paths(self, slot):
        return [pool.disk.path_of(slot) for pool in self.pools.windows[8].pools]

    def close(self):
        self.engine.close()
        self.pools.close()


@pytest.fixture(params=[0, 2], ids=["inline", "threads"])
def bench(tmp_path, request):
    bench = Bench(tmp_path / "disk", request.param)
    yield bench
    bench.close()
    assert list((tmp_path / "disk").iterdir()) == []


def short_write(file, buffer):
    return os.write(file, buffer[: max(1, len(buffer) // 3)])


def short_read(file, buffer):
    return os.readv(file, [buffer[: max(1, len(buffer) // 3)]])


def disk_full(file, buffer):
    os.write(file, buffer[: len(buffer) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_short_writes_and_reads_move_everything_in_the_end(bench):
    bench.write, bench.read_into = short_write, short_read
    assert bench.run((DEVICE(0), DISK(0)), (DISK(0), DEVICE(1)), (DISK(0), HOST(1))).misses == ()
    assert bench.memory.differs(bench.pools) == []


@pytest.mark.parametrize("pool", [0, 1])
def test_a_missing_file_is_a_lost_place(bench, pool):
    bench.run((DEVICE(0), DISK(0)))
    bench.paths(0)[pool].unlink()
    progress = bench.run((DISK(0), DEVICE(1)), (DEVICE(2), DEVICE(3)))
    assert [miss.order.destination for miss in progress.misses] == [DEVICE(1)]
    assert "No such file" in progress.misses[0].reason
    assert progress.lost == (DEVICE(1),)
    assert bench.engine.poll().lost == (), "it is told once"


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_a_lost_place(bench, change):
    bench.run((DEVICE(0), DISK(0)))
    path = bench.paths(0)[0]
    os.truncate(path, path.stat().st_size + change)
    progress = bench.run((DISK(0), DEVICE(1)))
    assert progress.lost == (DEVICE(1),)
    assert f"ours={path.stat().st_size - change}, theirs={path.stat().st_size}" in progress.misses[0].reason


def test_a_file_that_shrinks_while_it_is_read_is_a_lost_place(bench):
    bench.run((DEVICE(0), DISK(0)))
    bench.read_into = lambda file, buffer: 0
    assert bench.run((DISK(0), DEVICE(1))).lost == (DEVICE(1),)


def test_a_slot_never_written_is_a_lost_place(bench):
    assert bench.run((DISK(2), HOST(1))).lost == (HOST(1),)


def test_a_full_disk_leaves_nothing_of_the_old_content(bench):
    bench.run((DEVICE(0), DISK(0)))
    bench.write = disk_full
    progress = bench.run((DEVICE(1), DISK(0)))
    assert progress.lost == (DISK(0),)
    assert "No space left" in progress.misses[0].reason
    assert not bench.paths(0)[0].exists()
    assert [path.name for path in bench.paths(0)[0].parent.iterdir()] == []
    bench.write = os.write
    assert bench.run((DISK(0), DEVICE(2))).lost == (DEVICE(2),), "a place stays lost until something is copied to it"
    progress = bench.run((DEVICE(3), DISK(0)), (DISK(0), DEVICE(2)))
    assert (progress.misses, progress.lost) == ((), ())
    del bench.memory.places[DEVICE(1)]
    assert bench.memory.differs(bench.pools) == []


def test_the_second_file_of_a_slot_fails(bench):
    """The first pool has the new content, the second one has none: the slot as a whole is lost."""
    bench.run((DEVICE(0), DISK(0)))
    written = []

    def second_fails(file, buffer):
        written.append(file)
        return disk_full(file, buffer) if len(written) == 2 else os.write(file, buffer)

    bench.write = second_fails
    assert bench.run((DEVICE(1), DISK(0))).lost == (DISK(0),)
    assert [path.exists() for path in bench.paths(0)] == [True, False]
    assert bench.run((DISK(0), DEVICE(2))).lost == (DEVICE(2),)


def test_nothing_is_copied_from_a_lost_place(bench):
    before = [content.clone() for content in content_of(bench.pools, DEVICE(3))]
    progress = bench.run((DISK(1), HOST(0)), (HOST(0), DEVICE(2)), (DEVICE(2), DEVICE(3)), (DEVICE(2), DISK(2)))
    assert [miss.order.destination for miss in progress.misses] == [HOST(0), DEVICE(2), *progress.lost[1:2], DISK(2)]
    assert progress.lost == (DEVICE(2), DEVICE(3), HOST(0), DISK(2))
    assert "lost before" in progress.misses[-1].reason
    assert all((ours == theirs).all() for ours, theirs in zip(before, content_of(bench.pools, DEVICE(3)), strict=True))


def test_a_place_that_is_filled_in_the_same_step_is_not_lost(bench):
    progress = bench.run((DISK(1), HOST(0)), (DEVICE(0), HOST(0)), (HOST(0), DEVICE(2)))
    assert len(progress.misses) == 1
    assert progress.lost == ()
    assert bench.memory.differs(bench.pools) == []


def test_a_device_slot_is_the_models_again_once_the_engine_knows(bench):
    assert bench.run((DISK(1), DEVICE(0))).lost == (DEVICE(0),)
    assert bench.run((DEVICE(0), DEVICE(1))).misses == (), "the model has written the slot meanwhile"


def test_files_have_an_identity_of_their_own(tmp_path):
    benches = [Bench(tmp_path) for _ in range(2)]
    paths = {
        pool.disk.path_of(slot)
        for bench in benches
        for config in WINDOWS
        for pool in bench.pools.windows[config.window].pools
        for slot in range(config.num_disk)
    }
    assert len(paths) == 2 * (2 * 3 + 2)
    for number, bench in enumerate(benches):
        bench.run((DEVICE(number), DISK(0)))
    assert all(bench.memory.differs(bench.pools) == [] for bench in benches)
    benches[0].close()
    assert benches[1].memory.differs(benches[1].pools) == [], "closing one removes its own files only"
    benches[1].close()
    assert list(tmp_path.iterdir()) == []


def test_rewriting_a_slot_leaves_one_file_of_the_right_length(tmp_path):
    root = ProcessDirectory(tmp_path)
    files = SlotFiles(root, 8, 0, 100, PlainFiles())
    for byte in range(3):
        files.write(5, torch.full((100,), byte, dtype=torch.uint8))
    assert files.path_of(5).read_bytes() == bytes([2]) * 100
    assert len(list(files.folder.iterdir())) == 1
    root.close()
    root.close()


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path):
    leave = (
        "import os, sys, torch; from pathlib import Path; from kv_transfer.slot_files import *;"
        "from kv_transfer.process_directory import *;"
        "from kv_transfer.file_mover import PlainFiles;"
        "root = ProcessDirectory(Path(sys.argv[1]));"
        "SlotFiles(root, 8, 0, 4, PlainFiles()).write(0, torch.zeros(4, dtype=torch.uint8));"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", leave, str(tmp_path)], check=True)
    living = ProcessDirectory(tmp_path)
    (found,) = tmp_path.iterdir()
    assert found == living.path, "the dead one's directory is gone"
    second = ProcessDirectory(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.path, second.path])
    living.close()
    second.close()


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("call", ["unlink", "rmdir"])
@pytest.mark.parametrize("num_removed", range(5))
def test_what_a_process_left_that_died_while_it_removed_it_is_removed(tmp_path, monkeypatch, call, num_removed):
    """Engines are killed some seconds after they were told to end, and a full tier takes longer to remove."""
    root = ProcessDirectory(tmp_path)
    for pool in range(4):
        SlotFiles(root, 8, pool, 4, PlainFiles()).write(0, torch.zeros(4, dtype=torch.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", by_name(os.scandir))
        patch.setattr(os, call, killing(getattr(os, call), num_removed))
        with pytest.raises(Killed):
            root.close()
    os.close(root._lock)
    living = ProcessDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == [living.path]
    living.close()


def by_name(scandir):
    """A file system that lists a lock before what it guards."""

    @contextmanager
    def listed(*args):
        with scandir(*args) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name))

    return listed


def killing(remove, num_removed):
    """Removes so much, and no more."""
    left = iter(range(num_removed))

    def removed(*args, **kwargs):
        if next(left, None) is None:
            raise Killed
        return remove(*args, **kwargs)

    return removed


def test_a_directory_is_locked_before_it_has_its_name(tmp_path):
    root = ProcessDirectory(tmp_path)
    other = os.open(root.path / "lock", os.O_RDWR)
    with pytest.raises(OSError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    root.close()
