"""The way that is configured is taken if it works; else plain files are, and the log says why."""

import importlib
import logging

import pytest
import torch

from kv_testing.block_memory import full_pools, plain_shapes
from kv_transfer import files
from kv_transfer.agent import nixl_files
from kv_transfer.agent.nixl_files import NixlFiles
from kv_transfer.config import ConfigError
from kv_transfer.file_mover import FileCalls, PlainFiles
from kv_transfer.files import FilesConfig, open_mover

CPU = torch.device("cpu")


def refusals(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def chosen(config, directory, device=CPU):
    mover = open_mover(config, directory / "new" / "disk", device)
    mover.close()
    return mover.name


def test_plain_files_unless_told(tmp_path, caplog):
    assert FilesConfig() == FilesConfig(way="plain", checksum=True)
    assert chosen(FilesConfig(), tmp_path) == "plain"
    assert refusals(caplog) == []


@pytest.mark.nixl
def test_posix_is_taken_where_nixl_is(tmp_path, caplog):
    assert chosen(FilesConfig(way="posix"), tmp_path) == "nixl POSIX"
    assert refusals(caplog) == []


def test_gds_is_refused_without_a_gpu(tmp_path, caplog):
    assert chosen(FilesConfig(way="gds"), tmp_path) == "plain"
    (message,) = refusals(caplog)
    assert "gds is refused" in message
    assert "pools are on cpu" in message


@pytest.mark.nixl
@pytest.mark.skipif(torch.cuda.is_available(), reason="proves what happens where the plugin cannot load")
def test_gds_is_refused_where_its_plugin_does_not_load(tmp_path, caplog):
    """The pools are said to be on a GPU, which this machine has not; nothing gets as far as asking it."""
    assert chosen(FilesConfig(way="gds"), tmp_path, torch.device("cuda")) == "plain"
    assert "NIXL cannot start GDS" in refusals(caplog)[0]


def test_nixl_that_is_not_installed_is_a_refusal(tmp_path, caplog, monkeypatch):
    def missing(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert chosen(FilesConfig(way="posix"), tmp_path) == "plain"
    assert "pip install" in refusals(caplog)[0]


class Fake(PlainFiles):
    """A mover of another name, whose end a test can see."""

    closed = 0
    name = "fake"

    def close(self):
        Fake.closed += 1


def failing(file, content):
    raise OSError("it cannot")


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (FileCalls(write=failing), "does not work in"),
        (FileCalls(read_into=lambda file, buffer: len(buffer)), "it reads other bytes than it wrote"),
    ],
)
def test_a_way_that_does_not_work_there_is_refused_and_closed(tmp_path, caplog, monkeypatch, calls, reason):
    monkeypatch.setattr(Fake, "closed", 0)
    monkeypatch.setattr(files, "NixlFiles", lambda backend, limit_s: Fake(calls))
    assert chosen(FilesConfig(way="posix"), tmp_path) == "plain"
    assert reason in refusals(caplog)[0]
    assert Fake.closed == 1


class Forgetful(PlainFiles):
    """It cannot keep memory, as GDS cannot keep more than a device lets it."""

    def keep(self, memory):
        raise OSError("too much at once")


def test_memory_that_cannot_be_kept_moves_nevertheless(tmp_path, caplog):
    pools = full_pools(plain_shapes(), tmp_path, mover=Forgetful())
    pool = pools.windows[8].pools[0]
    slot, found = pool.device[0].view(-1).view(torch.uint8), torch.zeros(pool.device[0].nbytes, dtype=torch.uint8)
    pool.disk.write(0, slot)
    pool.disk.read(0, found)
    assert torch.equal(found, slot)
    assert "plain moves" in refusals(caplog)[0]
    assert "too much at once" in refusals(caplog)[0]
    pools.close()


def test_a_directory_that_nobody_can_write_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError):
        open_mover(FilesConfig(), tmp_path / "file", CPU)


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigError, match="allowed=plain, posix, gds"):
        FilesConfig(way="nfs")


@pytest.mark.nixl
def test_a_slot_larger_than_one_movement_is_moved_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(nixl_files, "PIECE_BYTES", 1000)
    mover, content = NixlFiles("POSIX"), torch.arange(3500).to(torch.uint8)
    found = torch.zeros_like(content)
    with (tmp_path / "file").open("wb+", buffering=0) as file:
        mover.write(file.fileno(), content)
        mover.read(file.fileno(), found)
        assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()
    assert torch.equal(found, content)
    mover.close()
