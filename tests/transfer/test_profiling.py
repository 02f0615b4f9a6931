"""Ranges of a profiler: around what moves bytes, in the right thread, and none at all without a GPU."""

import threading
from contextlib import contextmanager

import torch

from kv_testing.worlds import pair
from kv_transfer.profiling import NO_RANGES, NvtxRanges, ranges_for


class FakeNvtx:
    """Notes what torch.cuda.nvtx would be told."""

    def __init__(self):
        self.open = {}
        self.said = []
        self.num_begun = 0

    @contextmanager
    def range(self, name):
        self.said.append((name, threading.current_thread().name))
        yield

    def range_start(self, name):
        self.num_begun += 1
        self.open[self.num_begun] = name
        return self.num_begun

    def range_end(self, number):
        self.said.append((self.open.pop(number), ""))


def test_without_a_gpu_nothing_is_marked():
    assert ranges_for(torch.device("cpu")) is NO_RANGES
    with NO_RANGES.around("gather") as nothing:
        assert nothing is None
    NO_RANGES.begin("wire")()


def test_each_range_is_begun_and_ended(monkeypatch):
    nvtx = FakeNvtx()
    monkeypatch.setattr("kv_transfer.transceiver.ranges_for", lambda device: NvtxRanges(nvtx))
    with pair() as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        num_chunks = d.count("chunks_in")
        d.release(p, transfer)
        p.check_clean()
    names = [name for name, _ in nvtx.said]
    assert {name: names.count(name) for name in set(names)} == {
        "kvferry gather": num_chunks,
        "kvferry wire": num_chunks,
        "kvferry scatter": num_chunks,
    }
    assert {thread for name, thread in nvtx.said if name != "kvferry wire"} == {"kvferry-mover"}
    assert not nvtx.open, "every range has ended"


def test_a_write_that_is_taken_back_or_fails_ends_its_range(monkeypatch):
    nvtx = FakeNvtx()
    monkeypatch.setattr("kv_transfer.transceiver.ranges_for", lambda device: NvtxRanges(nvtx))
    with pair() as (p, d, hub):
        hub.fail(p.agents[0].name, 100)
        transfer = p.offer()
        d.order(p, transfer)
        assert not d.outcome(others=[p]).ok
        d.release(p, transfer)
        p.check_clean()
        assert nvtx.num_begun > 0
        assert not nvtx.open
