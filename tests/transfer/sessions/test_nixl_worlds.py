"""Two processes, NIXL between them, over shared memory and TCP: hand over, kill -9, SIGSTOP."""

import time
from dataclasses import replace

import pytest

from kv_core.spans import Span
from kv_testing.engine_process import EngineProcess, make_nixl_side
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Switches, sides, state_of

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

PATIENT = replace(FAST, request_deadline_s=30.0)
HASTY = replace(FAST, request_deadline_s=2.0)


@pytest.fixture(params=[None, "tcp"], ids=["shm", "tcp"])
def tls(request):
    return request.param


def _decode(tls, config, tp=1):
    return make_nixl_side("d", state_of(tp), config, tls, Switches())


def _hand_over(p, d, request_id):
    transfer = p.ask("offer", f"p-{request_id}")
    d.order(p, transfer, request_id)
    received = d.outcome(request_id, 30)
    d.release(p, transfer, request_id)
    return received


def test_hand_over_between_processes(tls):
    with EngineProcess("p", tls, tp=2) as p, sides(_decode(tls, PATIENT)) as (d,):
        for number in range(3):
            received = _hand_over(p, d, f"d{number}")
            assert received.ok, received.reason
            assert d.misplaced() == 0
        d.check_clean()
        wait_for(lambda: not p.ask("open"), what="the prefill engine to be idle")


def test_long_runs_are_read_in_place_between_processes(tls):
    shared, owned = replace(PATIENT, share_in_place=True), replace(PATIENT, own_blocks=True, in_place_run_bytes=1)
    with EngineProcess("p", tls, tp=2, config=shared) as p, sides(_decode(tls, owned, tp=1)) as (d,):
        for number in range(3):
            received = _hand_over(p, d, f"d{number}")
            assert received.ok, received.reason
            assert d.misplaced() == 0
        assert d.count("bytes_read_in_place") == d.count("bytes_in") > 0
        d.check_clean()
        wait_for(lambda: not p.ask("open"), what="the prefill engine to be idle")


def test_a_prefill_engine_that_is_killed_while_it_is_read_is_noticed(tls):
    """Blocks of our own may be told as lost only when nothing is written into them any more."""
    shared, owned = replace(PATIENT, share_in_place=True), replace(PATIENT, own_blocks=True, in_place_run_bytes=1)
    with sides(_decode(tls, owned)) as (d,):
        with EngineProcess("p", tls, config=shared) as p:
            assert _hand_over(p, d, "d0").ok
            transfer = p.ask("offer", "p1")
            p.stop()
            d.order(p, transfer, "d1")
            p.kill()
            start = time.monotonic()
            assert not d.outcome("d1", 30).ok
            assert time.monotonic() - start < SOON_S
            d.check_clean()
        with EngineProcess("p", tls, config=shared) as again:
            assert _hand_over(again, d, "d2").ok


def test_kill_9_of_the_prefill_engine_in_the_middle_of_a_load(tls):
    with sides(_decode(tls, PATIENT)) as (d,):
        with EngineProcess("p", tls, tp=2) as p:
            assert _hand_over(p, d, "d0").ok
            p.ask("hold", True)
            d.order(p, p.ask("offer", "p1"), "d1")
            wait_for(lambda: p.ask("num_held"), what="a held write")
            start = time.monotonic()
            p.kill()
            received = d.outcome("d1", 10)
            assert "is dead" in received.reason
            assert time.monotonic() - start < SOON_S, "a dead peer must be noticed long before the deadline"
            d.check_clean()
            assert d.count("regions_freed_late") > 0
        with EngineProcess("p", tls) as again:
            assert _hand_over(again, d, "d2").ok
            d.check_clean()


def test_kill_9_of_the_decode_engine_in_the_middle_of_a_load(tls):
    faults = Switches(holds_writes=True)
    p = make_nixl_side("p", state_of(), PATIENT, tls, faults)
    with sides(p), EngineProcess("d", tls, config=PATIENT) as d:
        assert d.incarnation
        transfer = p.offer(lease_s=1.0)
        d.ask("order", p.door.address, transfer, "d0")
        wait_for(lambda: faults.num_held, what="a held write")
        d.kill()
        faults.holds_writes = False
        p.check_clean(10)
        assert p.sent == [(0, "p0")]


def test_a_stopped_prefill_engine_writes_late_into_quarantine_only(tls):
    """SIGSTOP past the deadline with a write held before its posting; then SIGCONT, and the write goes out."""
    with EngineProcess("p", tls, config=HASTY) as p, sides(_decode(tls, HASTY)) as (d,):
        assert _hand_over(p, d, "d0").ok
        filled = d.misplaced(Span(0, 0))
        p.ask("hold", True)
        transfer = p.ask("offer", "p1")
        d.order(p, transfer, "d1")
        wait_for(lambda: p.ask("num_held"), what="a held write")
        p.stop()
        start = time.monotonic()
        received = d.outcome("d1", 10)
        assert "deadline" in received.reason
        assert time.monotonic() - start < SOON_S
        time.sleep(1.0)
        arena = d.receive_arena()
        assert arena.num_quarantined > 0, "a stopped peer is still a writer"
        assert d.count("peers_died") == 0
        before = arena.region.memory.clone()
        arena.region.memory.fill_(0x33)
        p.resume()
        p.ask("hold", False)
        wait_for(lambda: not arena.num_quarantined, what="the end of quarantine")
        assert not (arena.region.memory == 0x33).all(), "the late bytes must land somewhere, or nothing was tested"
        assert before.numel() > 0
        assert d.misplaced(Span(0, 0)) == filled, "the engine's blocks were touched"
        d.release(p, transfer, "d1")
        d.check_clean()
        wait_for(lambda: not p.ask("open"), what="the prefill engine to be idle")
        assert _hand_over(p, d, "d2").ok
        assert d.misplaced() == 0
        d.check_clean()
