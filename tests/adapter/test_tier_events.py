"""What the tiers tell of their blocks, in the engine's names: exactly what is found, in an order one can follow."""

import pytest

from kv_engine_adapter import tier_events
from kv_engine_adapter.tier_events import BlocksRemoved, BlocksStored, Medium
from kv_testing.tier_calls import SIZE, Clock, answer, find, make, request, save, table
from kv_testing.tier_listener import Listener, named, names_in_host


@pytest.fixture
def clock():
    return Clock()


def hashes(ended, num_blocks):
    return tuple(name.hash for name in ended.block_names(SIZE, 1)[:num_blocks])


def on_disk(tiers, ended):
    """Let a request end, be copied and be written."""
    order = save(tiers, ended)
    answer(tiers, (order.write.job, ended.num_tokens - 1))
    return order


def test_whole_blocks_are_told_when_they_are_found_and_not_before(clock):
    tiers = make(clock, hashes_per_block=1)
    first = request("a", 3 * SIZE + 9)
    job = tiers.finished(first, 3 * SIZE + 8, table(3 * SIZE + 8))
    assert len(tiers.take_orders().jobs) == 1
    assert tiers.take_events() == []
    answer(tiers, (job, 3 * SIZE + 8))
    names = first.block_names(SIZE, 1)
    assert tiers.take_events() == [BlocksStored(Medium.HOST, None, tuple(names), tuple(range(3 * SIZE)))]
    assert tiers.take_events() == []
    longer = request("b", 5 * SIZE + 1)
    save(tiers, longer)
    names = longer.block_names(SIZE, 1)
    tokens = tuple(range(3 * SIZE, 5 * SIZE))
    assert tiers.take_events()[1:] == [BlocksStored(Medium.HOST, names[2].hash, tuple(names[3:]), tokens)]


def test_salt_is_told_and_parts_of_blocks_are_not(clock):
    tiers = make(clock, hashes_per_block=1)
    save(tiers, request("a", SIZE))
    assert tiers.take_events() == []
    save(tiers, request("b", 2 * SIZE + 1, salt="s"))
    (told,) = tiers.take_events()
    assert [name.extra_keys for name in told.names] == [("s",), None]


def test_evictions_and_losses_are_told(clock):
    tiers = make(clock, hashes_per_block=1, num_slots=4)
    first, second = request("a", 3 * SIZE + 1), request("b", 3 * SIZE + 1, first=1000)
    save(tiers, first)
    tiers.take_events()
    save(tiers, second)
    removed, stored = tiers.take_events()
    assert removed == BlocksRemoved(Medium.HOST, hashes(first, 3)[:0:-1])
    assert stored.names == tuple(second.block_names(SIZE, 1))
    again = request("c", 3 * SIZE + 1, first=1000)
    tiers.allocated(again.request_id, table(3 * SIZE), tiers.num_tokens(again, 0))
    tiers.loads_over(["c"], {"c"})
    assert tiers.take_events() == [BlocksRemoved(Medium.HOST, hashes(second, 3)[::-1])]


def test_what_is_used_again_is_told_again_for_who_came_late(clock):
    tiers = make(clock, hashes_per_block=1)
    save(tiers, request("a", 3 * SIZE + 9))
    told = tiers.take_events()
    assert tiers.finished(request("b", 3 * SIZE + 9), 3 * SIZE + 8, table(3 * SIZE + 8)) is None
    assert tiers.take_events() == told
    longer = request("c", 4 * SIZE + 1)
    save(tiers, longer)
    again, new = tiers.take_events()
    assert [again] == told
    assert (new.parent, new.names) == (again.names[-1].hash, tuple(longer.block_names(SIZE, 1)[3:]))


def test_a_reset_is_told_at_once_and_silence_lasts_until_open_jobs_have_ended(clock):
    tiers = make(clock, hashes_per_block=1, has_disk=True)
    first = request("a", 2 * SIZE + 1)
    on_disk(tiers, first)
    open_job = tiers.finished(request("b", 2 * SIZE + 1, first=1000), 2 * SIZE, table(2 * SIZE))
    (order,) = tiers.take_orders().jobs
    tiers.take_events()
    tiers.reset()
    gone = hashes(first, 2)[::-1]
    assert tiers.take_events() == [BlocksRemoved(Medium.HOST, gone), BlocksRemoved(Medium.DISK, gone)]
    answer(tiers, (open_job, 2 * SIZE), (order.write.job, 2 * SIZE))
    assert tiers.take_events() == []
    save(tiers, first)
    (told,) = tiers.take_events()
    assert (told.medium, told.names) == (Medium.HOST, tuple(first.block_names(SIZE, 1)))


def test_the_disk_is_told_when_written_and_when_found_and_corrected_when_not(clock):
    tiers = make(clock, hashes_per_block=1, has_disk=True)
    first = request("a", 4 * SIZE + 1)
    on_disk(tiers, first)
    host, disk = tiers.take_events()
    assert (host.medium, disk.medium) == (Medium.HOST, Medium.DISK)
    assert disk[1:] == host[1:] == (None, tuple(first.block_names(SIZE, 1)), tuple(range(4 * SIZE)))

    # An engine that has just been started has told nothing.
    tiers = make(clock, hashes_per_block=1, has_disk=True)
    asked = find(tiers, request("b", 4 * SIZE + 1))
    answer(tiers, (asked.job, 3 * SIZE + 5))
    assert tiers.take_events() == [
        BlocksStored(Medium.DISK, None, tuple(first.block_names(SIZE, 1)[:3]), tuple(range(3 * SIZE)))
    ]
    (fetch,) = tiers.take_orders().jobs
    answer(tiers, (fetch.job, 2 * SIZE))
    (told,) = tiers.take_events()
    assert told[:3] == (Medium.HOST, None, tuple(first.block_names(SIZE, 1)[:2]))

    asked = find(tiers, request("c", 4 * SIZE + 1))
    answer(tiers, (asked.job, SIZE))
    assert tiers.take_events() == [BlocksRemoved(Medium.DISK, hashes(first, 3)[1:])]


def test_a_block_that_the_last_token_fills_was_not_looked_for(clock):
    tiers = make(clock, hashes_per_block=1, has_disk=True)
    asked = find(tiers, request("b", 2 * SIZE))
    answer(tiers, (asked.job, 2 * SIZE - 1))
    (told,) = tiers.take_events()
    assert len(told.names) == 1


def test_what_is_remembered_of_the_disk_is_bounded(clock, monkeypatch):
    monkeypatch.setattr(tier_events, "MAX_TOLD", 3)
    tiers = make(clock, hashes_per_block=1, has_disk=True)
    listener = Listener(SIZE)
    for number in range(4):
        on_disk(tiers, request(f"r{number}", 2 * SIZE + 1, first=1000 * number))
        listener.hear(tiers.take_events())
        assert len(listener.held[Medium.DISK]) == min(3, 2 * number + 2)
    assert set(listener.held[Medium.HOST]) == names_in_host(tiers, SIZE)


def test_without_readers_nothing_is_told(clock):
    tiers = make(clock, has_disk=True)
    on_disk(tiers, request("a", 2 * SIZE + 1))
    tiers.reset()
    assert tiers.take_events() == []
    assert tiers._slots._manager.config.event_buffer_size == 0


def test_names_depend_on_all_before_them():
    assert named([1, 2, 3, 4], None, 2)[1] != named([1, 1, 3, 4], None, 2)[1]
