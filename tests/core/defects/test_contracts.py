"""Defects that the manager repairs: crashes and broken contracts; each as a small story (core spec 16)."""

import threading
import time

import pytest

from kv_core.errors import CallerError, CapacityError
from kv_core.tiers import Tier
from kv_testing.managers import manager, request, run

A = range(100, 164)
B = range(200, 264)


def test_d15_a_dry_run_counts_live_blocks_that_nobody_else_holds():
    ours = manager(8, windows=(8,))
    ours.add(request("a", A[:11]))
    assert ours.grow("a")
    assert ours.num_free() == 6
    dry = ours.dry_run()
    dry.release("a")
    assert dry.num_free(8) == 8
    with pytest.raises(CallerError):
        dry.release("a")


def test_d16_a_pinned_block_is_neither_evicted_nor_freed_twice():
    ours = manager(4)
    run(ours, "a", A[:9])
    ours.add(request("b", A[:9]))
    pin = ours.release("b", pin=True)
    assert ours.num_free() == 1
    assert ours.add(request("c", B[:8])) is None
    ours.unpin(pin)
    assert ours.num_free() == 4
    with pytest.raises(CallerError, match="before"):
        ours.unpin(pin)


def test_d16_detached_blocks_are_not_pinned():
    ours = manager(8, windows=(8,))
    ours.add(request("a", A[:11]))
    assert ours.grow("a")
    pin = ours.pin("a")
    assert len(pin.block_ids[8]) == 2
    ours.release("a")
    assert ours.num_free() == 6
    ours.unpin(pin)
    assert ours.num_free() == 8


def test_d17_a_full_window_has_a_length_limit_and_no_detaching():
    ours = manager(20, windows=(64,))
    ours.add(request("a", range(63)))
    assert ours.grow("a")
    with pytest.raises(CapacityError):
        ours.grow("a")
    assert None not in ours.block_ids("a", 64)


def test_d18_only_windows_that_exist_count():
    ours = manager(8, windows=(8,))
    assert ours.config.max_blocks_per_sequence == 16
    assert ours.add(request("a", A[:6])) is not None


def test_d19_adding_is_all_or_nothing_over_all_windows():
    ours = manager((8,), (3,), windows=(8, 64))
    ours.add(request("a", A[:9]))
    free, stats = [ours.num_free(8), ours.num_free(64)], ours.stats()
    assert ours.add(request("b", B[:9])) is None
    assert [ours.num_free(8), ours.num_free(64)] == free
    assert ours.stats() == stats


def test_d22_readers_of_events_can_be_stopped():
    ours = manager(8, event_buffer_size=10)
    ours.flush_events()
    ours.take_events()
    seen = []
    reader = threading.Thread(target=lambda: seen.append(ours.real.take_events(timeout_s=None)))
    reader.start()
    ours.close()
    reader.join(timeout=10)
    assert seen == [[]]


def test_d22_waiting_for_events_ends_in_time():
    ours = manager(8, event_buffer_size=10)
    ours.flush_events()
    assert len(ours.take_events(timeout_s=5)) == 1
    started = time.monotonic()
    assert ours.take_events(timeout_s=0.05) == []
    assert time.monotonic() - started < 5


def test_d23_each_free_block_is_in_the_queue_of_its_tier():
    ours = manager(2, 2)
    for step in range(50):
        run(ours, f"a{step}", range(1000 * step, 1000 * step + 8))
        run(ours, f"b{step}", range(1000 * max(0, step - 2), 1000 * max(0, step - 2) + 8))
        assert [ours.num_free(64, tier) for tier in Tier] == [2, 2, 0]


def test_d24_a_request_has_a_token():
    with pytest.raises(CallerError):
        request("a", [])
