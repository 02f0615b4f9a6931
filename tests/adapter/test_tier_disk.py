"""The disk behind the host tier: found, fetched through host slots, written through, and never waited for too long."""

import pytest

from kv_core.keys import Scope
from kv_core.spans import Span
from kv_core.token_log import packed
from kv_engine_adapter.tier_orders import (
    FetchFromDisk,
    Prefix,
    SaveBlocks,
    Wish,
)
from kv_engine_adapter.tier_terms import BreakEven
from kv_testing.tier_calls import Clock, answer, find, make, request, table


@pytest.fixture
def clock():
    return Clock()


def test_what_the_disk_has_comes_through_host_slots(clock):
    tiers = make(clock, has_disk=True)
    asked = request("a", 101)
    found = find(tiers, asked)
    answer(tiers, (found.job, 96))
    assert tiers.num_tokens(asked, 0) is None
    (fetch,) = tiers.take_orders().jobs
    assert isinstance(fetch, FetchFromDisk)
    assert fetch.tokens == Span(0, 96)
    assert len(fetch.slots) == 3
    answer(tiers, (fetch.job, 96))
    assert tiers.num_tokens(asked, 0) == 96
    assert tiers.num_tokens(request("b", 97), 0) == 96
    tiers.check()


@pytest.mark.parametrize("num_read", [0, 64, 70])
def test_what_could_not_be_read_is_computed(clock, num_read):
    tiers = make(clock, has_disk=True)
    asked = request("a", 101)
    answer(tiers, (find(tiers, asked).job, 100))
    (fetch,) = tiers.take_orders().jobs
    answer(tiers, (fetch.job, num_read))
    assert tiers.num_tokens(asked, 0) == num_read
    assert tiers.counts["fetches_short"] == 1
    assert tiers.counts["fetched_tokens"] == num_read
    tiers.check()


@pytest.mark.parametrize("is_found", [False, True])
def test_nobody_waits_for_a_disk_that_hangs(clock, is_found):
    tiers = make(clock, has_disk=True, disk_wait_s=2.0)
    asked = request("a", 101)
    late = find(tiers, asked)
    if is_found:
        answer(tiers, (late.job, 100))
        (late,) = tiers.take_orders().jobs
    clock.now += 1.9
    assert tiers.num_tokens(asked, 0) is None
    clock.now += 0.2
    assert tiers.num_tokens(asked, 0) == 0
    assert tiers.counts["disk_late"] == 1
    assert tiers.num_tokens(request("b", 101, first=1), 0) == 0, "the disk still hangs"
    assert tiers.take_orders().jobs == ()
    answer(tiers, (late.job, 100))
    assert tiers.take_orders().jobs == ()
    find(tiers, request("c", 101, first=2))
    tiers.check()


def test_a_disk_without_more_than_the_host_is_asked_and_not_read(clock):
    tiers = make(clock, has_disk=True)
    asked = request("a", 101)
    answer(tiers, (find(tiers, asked).job, 0))
    assert tiers.num_tokens(asked, 0) == 0
    assert tiers.take_orders().jobs == ()


def test_the_disk_is_not_asked_for_what_does_not_pay(clock):
    tiers = make(clock, has_disk=True, break_even=BreakEven(1e-4, 0, 1e-4))
    assert tiers.num_tokens(request("a", 101), 0) == 0
    tiers = make(clock, has_disk=True)
    assert tiers.num_tokens(request("b", 101), 100) == 0
    assert tiers.take_orders().jobs == ()


def test_what_is_kept_is_written_through_with_its_wishes(clock):
    tiers = make(clock, has_disk=True)
    ended = request("a", 101, num_prompt=80, arguments={"kvferry.retain": ["0-32:90:60s"]})
    job = tiers.finished(ended, 100, table(100))
    (save_order,) = tiers.take_orders().jobs
    write = save_order.write
    assert write.prefix == Prefix(packed(ended.tokens[:100]), Scope())
    assert write.slots == save_order.slots
    assert write.prompt_end == 79
    assert write.wishes == (Wish(Span(0, 32), 90, 60_000), Wish(Span(32, 100), 35))
    assert answer(tiers, (job, 100)) == [job]
    assert tiers.num_tokens(request("b", 101), 0) == 100
    assert not tiers.has_work(), "an idle engine does not step for a disk"
    assert tiers.gauges()["tier_slots_held"] == 4
    answer(tiers, (write.job, 100))
    assert tiers.gauges()["tier_slots_held"] == 0
    assert tiers.counts["written_tokens"] == 100
    tiers.check()


def test_what_the_disk_reads_is_given_to_nobody_else(clock):
    """Two requests of one prompt end together: the tree has the first's blocks, the second's are being written."""
    tiers = make(clock, has_disk=True, num_slots=8)
    jobs = [tiers.finished(request(name, 33), 32, table(32)) for name in "ab"]
    first, second = tiers.take_orders().jobs
    for job in jobs:
        answer(tiers, (job, 32))
    job = tiers.finished(request("flood", 225, first=10_000), 192, table(192))
    (flood,) = tiers.take_orders().jobs
    assert set(flood.slots).isdisjoint({*first.slots, *second.slots})
    for each in (first.write.job, second.write.job):
        answer(tiers, (each, 32))
    answer(tiers, (job, 192))
    tiers.check()


def test_a_slow_disk_holds_no_more_than_a_part_of_the_host(clock):
    tiers = make(clock, has_disk=True, num_slots=16)
    for number in range(3):
        tiers.finished(request(f"r{number}", 65, first=1000 * number), 64, table(64))
    orders = tiers.take_orders().jobs
    assert [isinstance(order, SaveBlocks) and order.write is not None for order in orders] == [True, True, False]
    assert tiers.counts["writes_skipped"] == 1
    tiers.check()


def test_a_reset_forgets_everything_and_what_was_open_before_it(clock):
    tiers = make(clock, has_disk=True)
    job = tiers.finished(request("a", 65), 64, table(64))
    (order,) = tiers.take_orders().jobs
    answer(tiers, (job, 64))
    tiers.reset()
    assert tiers.num_tokens(request("b", 65), 0) == 0
    assert tiers.finished(request("c", 65), 64, table(64)) is None
    answer(tiers, (order.write.job, 64))
    asked = request("d", 65)
    assert tiers.num_tokens(asked, 0) is None
    (found,) = tiers.take_orders().jobs
    assert found.prefix.scope != Scope(), "what the disk has from before is not found"
    answer(tiers, (found.job, 0))
    assert tiers.num_tokens(asked, 0) == 0
    tiers.check()
