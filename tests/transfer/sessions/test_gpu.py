"""The same on a GPU: device staging, and copies that wait for the engine's stream and for no other."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kv_testing.worlds import FAST, Side, make_side, sides, state_of
from kv_transfer.agent import loopback
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.checksum import Summer
from kv_transfer.mover import Mover
from kv_transfer.passages import Passages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NAP_CYCLES = 1_000_000_000
"""About half a second of a GPU's stream, far longer than a gather takes to be queued."""


def nap():
    torch.cuda._sleep(NAP_CYCLES)


@pytest.fixture
def world(monkeypatch) -> Iterator[tuple[Side, Side]]:
    move = loopback.move

    def finished(post):
        move(post)
        torch.cuda.synchronize()

    # "done" means that the bytes are in place; the loopback agent knows no streams.
    monkeypatch.setattr(loopback, "move", finished)
    hub, config = LoopbackHub(), replace(FAST, chunks_in_flight=2)
    p = make_side(hub, "p", state_of(2), config, device="cuda")
    with sides(p, make_side(hub, "d", state_of(1), config, device="cuda")) as (p, d):
        yield p, d


def _hand_over(p, d, name):
    transfer = p.offer(f"p-{name}")
    d.order(p, transfer, name)
    received = d.outcome(name, others=[p])
    assert received.ok, received.reason
    d.release(p, transfer, name)
    d.check_clean()
    p.check_clean()


def _empty(*emptied):
    """Else what is read too early, and what is not read at all, is what an earlier hand-over left there."""
    for side in emptied:
        for caches in side.on_device.values():
            for plane in caches.planes:
                plane.zero_()
    torch.cuda.synchronize()


def test_hand_over_between_device_caches(world):
    p, d = world
    for number in range(3):
        _hand_over(p, d, f"d{number}")
    assert d.misplaced() == 0
    assert {arena.region.kind for arena in (*p.arenas, *d.arenas)} == {"device"}


def test_a_gather_waits_for_what_the_engine_has_queued(world):
    p, d = world
    p.work_before = nap
    _hand_over(p, d, "d0")
    assert d.misplaced() == 0


def test_control_without_the_event_it_reads_too_early(world, monkeypatch):
    p, d = world
    _hand_over(p, d, "first")  # memory and kernels of the lanes are there: making them waits for the whole device
    _empty(p, d)
    monkeypatch.setattr(Mover, "mark", lambda mover: None)
    p.work_before = nap
    d.order(p, p.offer("p0"))
    assert d.outcome(others=[p]).ok
    assert d.misplaced() > 0


def test_a_scatter_waits_for_what_the_engine_has_queued(world):
    """Blocks that are given to a load may still be read or written by earlier work of the engine's stream."""
    p, d = world
    transfer = p.offer("p0")
    torch.cuda.synchronize()
    nap()
    for caches in d.on_device.values():
        for plane in caches.planes:
            plane.fill_(0)
            plane.view(torch.uint8).fill_(0xEE)
    d.order(p, transfer)
    assert d.outcome(others=[p]).ok
    assert d.misplaced() == 0


def test_checksums_are_added_up_in_passing(world, monkeypatch):
    passes, compute = [], Summer.checksum

    def counted(summer, staged):
        passes.append(staged.numel())
        return compute(summer, staged)

    monkeypatch.setattr(Summer, "checksum", counted)
    p, d = world
    p.work_before = nap
    _hand_over(p, d, "d0")
    assert d.misplaced() == 0
    assert not passes


def test_a_bit_that_changes_on_its_way_fails_the_load(world, monkeypatch):
    p, d = world
    _hand_over(p, d, "first")
    write = Passages._write

    def spoilt(self, session, seq):
        session.moves.held[seq].lease.slice.tensor[5] ^= 1
        torch.cuda.synchronize()
        write(self, session, seq)

    monkeypatch.setattr(Passages, "_write", spoilt)
    d.order(p, p.offer("p1"), "d1")
    received = d.outcome("d1", others=[p])
    assert not received.ok
    assert "checksums of chunk" in received.reason
    d.check_clean()
