"""A file system that hangs costs a miss in bounded time; what it does later touches nothing that is in use."""

import errno
import gc
import os
import threading

import pytest
import torch

from kv_core.tiers import Place, Tier
from kv_testing.block_memory import full_pools, plain_shapes
from kv_testing.copy_bench import CopyBench
from kv_testing.hangs import planted
from kv_testing.impatience import PATIENT_S, SOON_S, Soon, impatient
from kv_testing.waiting import wait_for
from kv_transfer.file_mover import FileCalls, Hung, NotAsked, PlainFiles
from kv_transfer.file_threads import FileThreads
from kv_transfer.process_directory import ProcessDirectory
from kv_transfer.slot_files import SlotFiles, Sums

DEVICE, HOST, DISK = (lambda slot, tier=tier: Place(8, tier, slot) for tier in Tier)


def num_threads():
    return sum(thread.name == "kvferry-files" for thread in threading.enumerate())


@pytest.fixture
def threads():
    before = num_threads()
    made = FileThreads(PATIENT_S)
    yield made
    assert made.close()
    wait_for(lambda: num_threads() == before, what="the threads to end")


# -- threads ---------------------------------------------------------------------------------------------------------


def test_calls_return_and_raise_what_they_do(threads):
    assert threads.call("a", lambda: 7) == 7
    error = TimeoutError(errno.ETIMEDOUT, "of the server")
    with pytest.raises(TimeoutError) as raised:
        threads.call("b", lambda: (_ for _ in ()).throw(error))
    assert raised.value is error
    assert threads.hung == ()


def test_one_caller_needs_one_thread(threads):
    before = num_threads()
    for number in range(20):
        assert threads.call("turn", lambda number=number: number) == number
    assert num_threads() == before + 1


def test_a_call_that_hangs_is_given_up_and_nothing_is_asked_until_it_ends(threads):
    go_on, asked = threading.Event(), []
    with impatient(threads), Soon(), pytest.raises(Hung, match="the first did not end within 0.1 s") as raised:
        threads.call("the first", lambda: go_on.wait(60))
    assert not isinstance(raised.value, NotAsked)
    for _ in range(3):
        with Soon(), pytest.raises(NotAsked, match="the first has not ended"):
            threads.call("another", lambda: asked.append(1))
    assert threads.hung == ("the first",)
    go_on.set()
    wait_for(lambda: threads.hung == (), what="the first to end")
    assert asked == []
    assert threads.call("another", lambda: asked.append(1)) is None
    assert asked == [1]


def test_what_a_call_keeps_is_kept_until_it_ends(threads):
    go_on, gone = threading.Event(), threading.Event()

    class Memory:
        def __del__(self):
            gone.set()

    def use(memory):
        with impatient(threads), pytest.raises(Hung):
            threads.call("use", lambda: (go_on.wait(60), memory)[0])

    use(Memory())
    gc.collect()
    assert not gone.is_set()
    go_on.set()
    wait_for(lambda: gc.collect() is not None and gone.is_set(), what="the memory to be free")


def test_closing_leaves_behind_what_hangs(threads):
    go_on = threading.Event()
    with impatient(threads), pytest.raises(Hung):
        threads.call("for ever", lambda: go_on.wait(60))
    with Soon():
        assert not threads.close()
    with pytest.raises(OSError, match="files are closed"):
        threads.call("late", lambda: None)
    go_on.set()
    wait_for(lambda: threads.hung == (), what="it to end")


# -- slots -----------------------------------------------------------------------------------------------------------


def content_of(seed, num_bytes=1000):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Disk:
    """Slots over calls that a test may let hang."""

    def __init__(self, directory, threads):
        self.write, self.read_into = os.write, FileCalls().read_into
        calls = FileCalls(lambda *call: self.write(*call), lambda *call: self.read_into(*call))
        self.root = ProcessDirectory(directory)
        self.slots = SlotFiles(self.root, 8, 0, 1000, PlainFiles(calls), Sums(), threads)


@pytest.fixture
def disk(tmp_path, threads):
    disk = Disk(tmp_path, threads)
    yield disk
    disk.root.close()
    assert list(tmp_path.iterdir()) == []


def test_a_late_read_does_not_touch_the_memory_it_was_for(disk, threads):
    disk.slots.write(0, content_of(1))
    into = content_of(2)
    with planted(disk, "read_into") as plant:
        plant.hang()
        with impatient(threads), Soon(), pytest.raises(Hung):
            disk.slots.read(0, into)
        plant.go_on()
        wait_for(lambda: threads.hung == (), what="the read to end")
    assert torch.equal(into, content_of(2))
    disk.slots.read(0, into)
    assert torch.equal(into, content_of(1))


def test_a_late_write_leaves_a_slot_that_holds_nothing(disk, threads):
    disk.slots.write(0, content_of(1))
    with planted(disk, "write") as plant:
        plant.hang()
        with impatient(threads), Soon(), pytest.raises(Hung):
            disk.slots.write(0, content_of(2))
        plant.go_on()
        wait_for(lambda: threads.hung == (), what="the write to end")
    assert disk.slots.path_of(0).exists(), "the late writer has made its file"
    with pytest.raises(FileNotFoundError):
        disk.slots.read(0, content_of(3))
    disk.slots.write(0, content_of(4))
    assert torch.equal(disk.slots.load(0, torch.device("cpu")), content_of(4))


def test_a_write_that_is_not_asked_leaves_nothing_of_the_old_content(disk, threads):
    for slot in range(2):
        disk.slots.write(slot, content_of(slot))
    with planted(disk, "read_into") as plant:
        plant.hang()
        with impatient(threads), pytest.raises(Hung):
            disk.slots.read(0, content_of(5))
        with pytest.raises(NotAsked):
            disk.slots.write(1, content_of(6))
        plant.go_on()
        wait_for(lambda: threads.hung == (), what="the read to end")
    with pytest.raises(FileNotFoundError):
        disk.slots.read(1, content_of(5))


def test_a_file_whose_opening_hangs_is_given_up(disk, threads):
    """A pipe that nobody writes: a real call that a real kernel holds."""
    disk.slots.write(0, content_of(1))
    disk.slots.path_of(0).unlink()
    os.mkfifo(disk.slots.path_of(0))
    with impatient(threads), Soon(), pytest.raises(Hung):
        disk.slots.read(0, content_of(2))
    os.close(os.open(disk.slots.path_of(0), os.O_WRONLY))
    wait_for(lambda: threads.hung == (), what="the opening to end")


# -- the engine ------------------------------------------------------------------------------------------------------


class Bench(CopyBench):
    """Over a disk that may hang."""

    def __init__(self, directory, num_workers):
        self.write, self.read_into = os.write, FileCalls().read_into
        calls = FileCalls(lambda *call: self.write(*call), lambda *call: self.read_into(*call))
        pools = full_pools(plain_shapes(), directory, mover=PlainFiles(calls), file_limit_s=PATIENT_S)
        super().__init__(pools, num_workers, SOON_S)

    def run(self, *copies):
        with Soon():
            return super().run(*copies)

    @property
    def threads(self):
        return self.pools._threads


@pytest.fixture(params=[0, 2], ids=["inline", "threads"])
def bench(tmp_path, request):
    bench = Bench(tmp_path / "disk", request.param)
    yield bench
    assert bench.engine.close()
    bench.pools.close()
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("call", ["read_into", "write"])
def test_a_file_system_that_hangs_is_a_miss_and_the_engine_goes_on(bench, call):
    bench.run((DEVICE(0), DISK(0)), (DEVICE(1), DISK(1)))
    copy = (DISK(0), DEVICE(2)) if call == "read_into" else (DEVICE(2), DISK(0))
    with planted(bench, call) as plant:
        plant.hang()
        with impatient(bench.threads):
            progress = bench.run(copy, (DEVICE(3), HOST(0)))
        assert [miss.order.destination for miss in progress.misses] == [copy[1]] == list(progress.lost)
        assert "hang" in progress.misses[0].reason
        # What comes later is told at once, and what needs no file does not notice.
        progress = bench.run((DISK(1), HOST(1)), (HOST(0), HOST(2)), (DEVICE(3), DISK(2)))
        assert {miss.order.destination for miss in progress.misses} == {HOST(1), DISK(2)}
        assert plant.num_met == 1
        plant.go_on()
        wait_for(lambda: bench.threads.hung == (), what="the call to end")
    assert bench.run((DISK(1), HOST(1)), (DEVICE(3), DISK(2)), (DISK(2), DEVICE(0))).misses == ()
    assert bench.engine.totals.num_hung == 3
    assert bench.engine.totals.num_missed == 3
    bench.memory.places.pop(DISK(0), None)  # lost, if it was the destination
    assert bench.memory.differs(bench.pools) == []


def test_engine_and_pools_close_while_a_file_system_hangs(tmp_path):
    bench = Bench(tmp_path / "disk", 1)
    with planted(bench, "write") as plant:
        plant.hang()
        with impatient(bench.threads), Soon():
            bench.run((DEVICE(0), DISK(0)))
            assert bench.engine.close()
            bench.pools.close()
            bench.pools.close()
        (left,) = (tmp_path / "disk").iterdir()
        plant.go_on()
        wait_for(lambda: bench.threads.hung == (), what="the call to end")
    assert left.exists(), "the next process removes it"


def test_an_order_that_cannot_end_is_left_behind(tmp_path):
    bench = Bench(tmp_path / "disk", 1)
    with planted(bench.engine._copier, "copy") as plant:
        plant.hang()
        bench.log.copy(DEVICE(0), DEVICE(1), 4)
        bench.engine.submit(bench.log.take())
        plant.wait_until_met()
        with Soon():
            assert not bench.engine.close(0.1)
    assert bench.engine.close()
    bench.pools.close()
