"""Writes that outlive their session: they hit quarantine, never the engine's blocks, and never another's region."""

import time
from dataclasses import replace

import pytest

from kv_core.spans import Span
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Switches, pair, state_of
from kv_transfer.staging import StagingLease

SHORT = replace(FAST, request_deadline_s=0.8)


def test_a_write_past_the_deadline_hits_quarantine_only():
    faults = Switches(holds_writes=True)
    with pair(config=SHORT, prefill_faults=faults) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert not received.ok
        assert "deadline" in received.reason
        assert received.times.total_s < SOON_S
        assert d.misplaced(Span(0, 0)) == 0, "the engine's blocks were touched"
        arena = d.receive_arena()
        assert arena.num_quarantined == len(arena.writers) > 0
        time.sleep(0.5)
        assert arena.num_quarantined > 0, "time alone frees nothing"
        before = arena.region.memory.clone()
        # The engine's blocks have a new owner by now.
        d.order(p, p.offer("p1"), "d1", only_ranks=[])
        faults.holds_writes = False
        wait_for(lambda: not arena.num_quarantined, what="the end of quarantine")
        assert not arena.region.memory.equal(before), "the late bytes must land somewhere, or nothing was tested"
        assert d.misplaced(Span(0, 0)) == 0, "the engine's blocks were touched"
        d.release(p, transfer)
        p.withdraw("p1", "test")
        d.check_clean()
        p.check_clean()
        assert d.count("regions_quarantined") > 0


def test_the_blocks_of_a_failed_load_can_be_used_at_once():
    """The late writer's region is not given to the next load, whose bytes stay right."""
    faults = Switches(holds_writes=True)
    small = replace(SHORT, receive_arena_bytes=6 * 4096, chunks_in_flight=2)
    with pair(config=small, prefill_faults=faults) as (p, d, _):
        first = p.offer("p0")
        d.order(p, first, "d0")
        assert not d.outcome("d0", others=[p]).ok
        held = faults.num_held
        faults_seen = d.receive_arena().num_quarantined
        assert faults_seen == 2
        second = p.offer("p1")
        faults.holds_writes = False
        d.order(p, second, "d1")
        assert d.outcome("d1", others=[p]).ok
        assert d.misplaced() == 0
        assert held > 0
        for number, transfer in enumerate((first, second)):
            d.release(p, transfer, f"d{number}")
        d.check_clean()
        p.check_clean()


def test_control_without_quarantine_late_bytes_reach_another_load(monkeypatch):
    """The same schedule with quarantine switched off: the region is leased again, and the late writer hits it."""
    monkeypatch.setattr(StagingLease, "quarantine", lambda lease, writer: lease.release())
    faults = Switches(holds_writes=True)
    with pair(config=replace(SHORT, receive_arena_bytes=4096), prefill_faults=faults) as (p, d, _):
        d.order(p, p.offer("p0"), "d0")
        assert not d.outcome("d0", others=[p]).ok
        arena = d.receive_arena()
        assert arena.num_quarantined == 0
        victim = arena.lease(arena.max_lease_bytes, "victim")
        assert victim is not None, "the region came back although its writer is not quiet"
        victim.slice.tensor.fill_(0x55)
        faults.holds_writes = False
        wait_for(lambda: not (victim.slice.tensor == 0x55).all(), what="the late bytes in another's region")
        victim.release()


@pytest.mark.parametrize("ends", ["abort", "deadline"])
def test_quarantine_ends_with_the_writers_word(ends):
    faults = Switches(holds_writes=True)
    with pair(state_of(2), state_of(1), config=SHORT, prefill_faults=faults) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: faults.num_held, what="a held write")
        if ends == "abort":
            d.abort("d0")
        received = d.outcome(others=[p])
        assert ends in received.reason
        assert d.receive_arena().num_quarantined > 0
        assert d.cores[0].loads.receiver.num_sessions > 0, "the session stays until its writer is quiet"
        faults.holds_writes = False
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
