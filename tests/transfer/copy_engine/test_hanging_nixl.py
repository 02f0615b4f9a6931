"""NIXL moves the bytes of files, and a movement hangs: what it may touch is kept, and nobody waits for it."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from kv_testing.fake_nixl import FakeNixl
from kv_testing.hangs import planted
from kv_testing.impatience import LIMIT_S, PATIENT_S, Soon, impatient
from kv_testing.waiting import wait_for
from kv_transfer import files
from kv_transfer.agent import nixl_files
from kv_transfer.agent.nixl_files import NixlFiles
from kv_transfer.config import ConfigError
from kv_transfer.file_mover import FileCalls, Hung, NotAsked, PlainFiles
from kv_transfer.file_threads import FileThreads
from kv_transfer.files import FilesConfig, open_mover


def content_of(seed, num_bytes=1000):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def num_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def nixl(monkeypatch):
    fake = FakeNixl()
    monkeypatch.setattr(nixl_files, "import_nixl", lambda: fake)
    monkeypatch.setattr(nixl_files, "_in_doubt", [])
    yield fake
    assert (fake.registered, fake.open) == ([], []), "everything was given back"


@pytest.fixture
def file(tmp_path):
    opened = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.write(opened, content_of(1).numpy().tobytes())
    yield opened
    os.close(opened)


def test_the_fake_moves_bytes_as_nixl_does(nixl, file):
    mover, found = NixlFiles("POSIX", PATIENT_S), content_of(2)
    mover.read(file, found)
    assert torch.equal(found, content_of(1))
    mover.write(file, content_of(3))
    assert os.pread(file, 1000, 0) == content_of(3).numpy().tobytes()
    mover.close()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_movement_that_hangs_keeps_what_it_may_touch_until_it_ends(nixl, file, operation):
    mover, memory, before = NixlFiles("POSIX", PATIENT_S), content_of(2), num_open_files()
    nixl.hangs = True
    with impatient(mover), Soon(), pytest.raises(Hung):
        getattr(mover, operation)(file, memory)
    assert len(nixl.registered) == 2
    assert num_open_files() == before + 1
    for _ in range(2):
        with Soon(), pytest.raises(NotAsked, match="an earlier movement"):
            mover.read(file, content_of(3))
    assert len(nixl.open) == 1
    expected = memory.clone() if operation == "write" else content_of(1)
    del memory
    gc.collect()
    nixl.go_on()  # into memory and a file that are still there
    found = content_of(3)
    mover.read(file, found)
    assert torch.equal(found, expected)
    assert num_open_files() == before
    mover.close()


def test_a_limit_holds_for_all_pieces_together(nixl, file, monkeypatch):
    """Each piece is slow, none hangs."""
    monkeypatch.setattr(nixl_files, "PIECE_BYTES", 1)
    mover = NixlFiles("POSIX", PATIENT_S)

    def slow(movement, post=nixl.postXferReq):
        time.sleep(0.02)
        return post(movement, b"")

    monkeypatch.setattr(nixl, "postXferReq", lambda movement, _: slow(movement))
    with impatient(mover), Soon(), pytest.raises(Hung):
        mover.read(file, content_of(2))
    mover.close()


def test_who_waits_for_a_call_that_does_not_return_is_told(nixl, file):
    mover = NixlFiles("POSIX", PATIENT_S)
    with planted(nixl, "postXferReq") as plant:
        plant.hang()
        first = threading.Thread(target=mover.read, args=(file, content_of(2)))
        first.start()
        plant.wait_until_met()
        with impatient(mover), Soon(), pytest.raises(NotAsked, match="was busy"):
            mover.read(file, content_of(3))
        with Soon():
            mover.close()
        assert nixl_files._in_doubt == [mover]
    first.join()
    mover.close()


def test_closing_keeps_what_a_movement_may_still_touch(nixl, file):
    mover, kept = NixlFiles("POSIX", PATIENT_S), content_of(2)
    mover.keep(kept)
    nixl.hangs = True
    with impatient(mover), pytest.raises(Hung):
        mover.write(file, kept)
    with Soon():
        mover.close()
        mover.close()
    assert nixl_files._in_doubt == [mover]
    assert len(nixl.registered) == 2, "the memory that is kept, and the file"
    nixl.go_on()
    assert mover._has_ended(mover._late)
    nixl.registered.clear()  # what was kept stays for good


@pytest.mark.nixl
def test_nixl_itself_holds_nobody_but_its_caller(tmp_path):
    """A pipe that nobody writes: its post does not return, this thread goes on."""
    threads = FileThreads(LIMIT_S)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    mover, into = NixlFiles("POSIX", PATIENT_S), content_of(2)
    with Soon(), pytest.raises(Hung):
        threads.call("a read", lambda: mover.read(pipe, into))
    os.write(pipe, bytes(1000))
    wait_for(lambda: threads.hung == (), what="the read to end")
    os.close(pipe)
    mover.close()
    assert threads.close()


@pytest.mark.parametrize("call", ["write", "read_into"])
def test_a_way_that_hangs_when_it_is_tried_is_refused(tmp_path, caplog, monkeypatch, call):
    go_on = threading.Event()

    def hang(file, buffer):
        go_on.wait(60)
        return len(buffer)

    monkeypatch.setattr(files, "NixlFiles", lambda backend, limit_s: PlainFiles(FileCalls(**{call: hang})))
    with Soon():
        mover = open_mover(FilesConfig(way="posix", limit_s=0.5), tmp_path, torch.device("cpu"))
    assert mover.name == "plain"
    assert "posix is refused" in caplog.text
    assert "hangs" in caplog.text
    go_on.set()


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_number_of_seconds(limit_s):
    with pytest.raises(ConfigError, match="limit_s is out of range"):
        FilesConfig(limit_s=limit_s)
