"""Faults that a test orders in the calls of the tiers' disk."""

import errno
import json
import os

import pytest

pytest.importorskip("torch")

from kv_engine_adapter.hooks import ordered_file_calls

CONTENT = b"what was computed"


@pytest.fixture
def file(tmp_path):
    number = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def order(hooks, **wanted):
    (hooks / "files.json").write_text(json.dumps(wanted))


def both(calls, file):
    """What is read of what was written."""
    assert calls.write(file, memoryview(CONTENT)) == len(CONTENT)
    os.lseek(file, 0, os.SEEK_SET)
    found = bytearray(len(CONTENT))
    assert calls.read_into(file, memoryview(found)) == len(CONTENT)
    return bytes(found)


def test_nothing_differs_without_an_order_and_when_it_is_over(tmp_path, file):
    calls = ordered_file_calls(tmp_path)
    assert both(calls, file) == CONTENT
    order(tmp_path, errno=errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        calls.write(file, memoryview(CONTENT))
    (tmp_path / "files.json").unlink()
    os.lseek(file, 0, os.SEEK_SET)
    assert both(calls, file) == CONTENT


def test_a_full_disk_can_be_read_and_one_that_fails_cannot(tmp_path, file):
    calls = ordered_file_calls(tmp_path)
    both(calls, file)
    os.lseek(file, 0, os.SEEK_SET)
    order(tmp_path, errno=errno.ENOSPC)
    assert calls.read_into(file, memoryview(bytearray(4))) == 4
    order(tmp_path, errno=errno.EIO, read_errno=errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        calls.read_into(file, memoryview(bytearray(4)))


def test_calls_that_hang_go_through_in_the_end(tmp_path, file, monkeypatch):
    slept = []
    monkeypatch.setattr("kv_engine_adapter.hooks.time.sleep", slept.append)
    order(tmp_path, hang_s=0.5)
    assert both(ordered_file_calls(tmp_path), file) == CONTENT
    assert slept == [0.5, 0.5]
