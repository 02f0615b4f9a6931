"""The defects of the seed that the manager itself repairs, each as the smallest story that shows it (core spec 16)."""

import threading
import time

import pytest

from kv_core.config import CacheType, ManagerConfig, WindowConfig
from kv_core.errors import CallerError, CapacityError
from kv_core.events import Removed, Reset, Stored, Updated
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.retention import RangeRetention, RetentionConfig
from kv_core.tiers import Tier
from kv_testing.managers import Clock, found, manager, request, run

A = range(100, 164)
B = range(200, 264)


def keep(priority, duration_ms=None, decode=35):
    return RetentionConfig((RangeRetention(0, None, priority, duration_ms),), decode)


def events(ours):
    ours.flush_events()
    return [event.payload for event in ours.take_events()]


# Corruption.


def test_d1_a_detached_block_taken_again_by_its_own_request_is_stored_once():
    ours = manager(4, windows=(8,))
    ours.add(request("a", A[:9]))
    for token in A[9:24]:
        ours.extend("a", [token])
        assert ours.grow("a")
    table = ours.block_ids("a", 8)
    assert table[:4] == [None] * 4
    live = [block_id for block_id in table if block_id is not None]
    assert len(set(live)) == len(live)
    ours.release("a")
    assert ours.num_free() == 4


def test_d2_a_matched_block_that_another_took_after_its_detaching_is_not_stored_for_the_first():
    ours = manager(5, windows=(8,))
    run(ours, "a", A[:9])
    assert ours.add(request("b", A[:9])).num_cached == 8
    for token in A[9:16]:
        ours.extend("b", [token])
        assert ours.grow("b")
    assert ours.block_ids("b", 8)[0] is None
    first_of_a = 0
    before = ours.generation(8, first_of_a)
    ours.add(request("c", B[:8]))
    assert ours.generation(8, first_of_a) > before
    ours.release("b")
    assert found(ours, [*A[:4], 1]) == 0


def test_d3_a_block_published_in_part_and_then_grown_has_one_place():
    ours = manager(8, event_buffer_size=100)
    ours.add(request("a", A[:6]))
    ours.publish("a", 6, partial=True)
    for token in A[6:12]:
        ours.extend("a", [token])
        assert ours.grow("a")
    events(ours)
    ours.publish("a")
    kinds = [type(payload) for payload in events(ours)]
    assert kinds == [Removed, Stored]
    assert found(ours, [*A[:8], 1]) == 8
    assert found(ours, [*A[:6], 1]) == 6


def test_d4_one_prepopulated_length_for_all_windows():
    ours = manager((3,), (16,), windows=(8, 64), partial_reuse=False)
    run(ours, "a", A[:9])
    run(ours, "b", B[:9])
    assert ours.lookup(request("?", A[:8]), 64).num_tokens == 8
    assert ours.add(request("c", A[:9])).num_cached == 0
    assert len(set(ours.block_ids("c", 64)) & {0, 1}) == 0, "what is cached behind the length is not claimed"


@pytest.mark.parametrize(("length", "num_cached"), [(12, 6), (16, 4)])
def test_d5_the_source_of_a_copy_is_not_its_victim(length, num_cached):
    """Block 1 is the source; of 4 blocks the longer request needs the place of the source too, and does without."""
    ours = manager(4)
    run(ours, "a", A[:14])
    assert ours.add(request("b", [*A[:6], *range(length - 6)])).num_cached == num_cached
    orders = [(order.source.slot, order.destination.slot, order.num_tokens) for order in ours.take_copies()]
    assert orders == ([(1, ours.slots("b", 64)[1], 2)] if num_cached == 6 else [])
    assert (1 in ours.slots("b", 64)) == (num_cached == 4)


def test_d5_the_source_of_a_copy_is_not_dropped_from_its_tier():
    """The source is on the host and would be the only host block that makes room for what the request displaces."""
    ours = manager(3, 1)
    run(ours, "a", A[:5])
    run(ours, "b", B[:12])
    ours.take_copies()
    assert ours.inspect(64, 0).tier == Tier.HOST
    assert ours.add(request("c", [*A[:2], 1, 2, 3, 4])).num_cached == 2
    [order] = [order for order in ours.take_copies() if order.num_tokens == 2]
    assert order.source == (64, Tier.HOST, 0)
    assert order.destination.tier == Tier.DEVICE


def test_d6_an_explicit_offload_follows_the_laws_of_eviction():
    ours = manager(4, 1, event_buffer_size=100)
    run(ours, "a", A[:9])
    assert not ours.offload(64, 0), "a block on which another of its tier depends stays"
    assert ours.offload(64, 1)
    assert ours.inspect(64, 1).tier == Tier.HOST
    assert ours.num_free(64, Tier.DEVICE) == 4
    assert ours.num_free(64, Tier.HOST) == 1
    assert ours.offload(64, 0), "the only host block goes, with its events"
    assert [type(payload) for payload in events(ours)][-2:] == [Updated, Removed]
    ours.add(request("b", A[:5]))
    assert not ours.offload(64, 0), "a block in use stays"
    assert not manager(4).offload(64, 0)


def test_d7_decoding_never_writes_to_a_published_block():
    ours = manager(8)
    ours.add(request("a", A[:9]))
    ours.publish("a")
    ours.add(request("b", A[:9]))
    before = ours.block_ids("a", 64)
    assert ours.rewind("a", 2)
    after = ours.block_ids("a", 64)
    assert after[0] == before[0]
    assert after[1] != before[1], "others read it: a private copy"
    assert [order.num_tokens for order in ours.take_copies()] == [3]
    assert ours.block_ids("b", 64)[:2] == before[:2]


def test_d7_a_rewind_without_other_readers_takes_the_block_back():
    ours = manager(3, event_buffer_size=10)
    ours.add(request("a", A[:9]))
    ours.publish("a")
    before = ours.block_ids("a", 64)
    assert ours.rewind("a", 2)
    assert ours.block_ids("a", 64) == before[:2]
    assert ours.take_copies() == ()
    assert [type(payload) for payload in events(ours)][-1] is Removed


def test_d7_a_sliding_window_keeps_what_a_rewind_may_need():
    strict, ours = manager(8, windows=(8,)), manager(8, windows=(8,), max_rewind=2)
    for each in (strict, ours):
        each.add(request("a", A[:11]))
        assert each.grow("a")
    assert strict.block_ids("a", 8)[0] is None
    with pytest.raises(CallerError, match="max_rewind"):
        strict.rewind("a", 2)
    assert strict.num_tokens("a") == 12
    assert ours.block_ids("a", 8)[0] is not None
    assert ours.rewind("a", 2)


def test_d8_a_cross_cache_is_stored_and_found_by_encoder_tokens():
    ours = manager(8, cache_type=CacheType.CROSS)
    run(ours, "a", A[:9])
    assert found(ours, A[:9]) == 8
    assert found(ours, B[:9]) == 0
    ours.add(request("b", A[:9]))
    with pytest.raises(CallerError):
        ours.grow("b")


def test_d9_inner_blocks_are_found_whole_and_only_the_last_in_part():
    ours = manager(8)
    run(ours, "a", A[:13])
    assert ours.lookup(request("?", A[:10]), 64) == (10, (0, 1, 2))
    assert ours.lookup(request("?", [*A[:3], 1, *A[4:8]]), 64) == (3, (0,))


def test_d10_a_request_beyond_the_longest_is_refused_before_anything_is_taken():
    ours = manager(40)
    with pytest.raises(CapacityError, match="ours=64, theirs=65"):
        ours.add(request("a", range(65)))
    ours.add(request("b", range(64)))
    with pytest.raises(CapacityError):
        ours.grow("b")
    assert ours.num_free() == 40 - 16


def test_d11_where_a_block_is_belongs_to_the_block():
    ours = manager(4, 2, 4)
    run(ours, "a", A[:13])
    run(ours, "b", B[:16])
    ours.take_copies()
    tiers = {block_id: ours.inspect(64, block_id).tier for block_id in range(10)}
    assert set(tiers.values()) == {Tier.DEVICE, Tier.HOST, Tier.DISK}
    ours.add(request("c", A[:9]))
    ups = [order for order in ours.take_copies() if order.destination.tier == Tier.DEVICE]
    assert {order.source.tier for order in ups} <= {Tier.HOST, Tier.DISK}
    assert len(ups) == 2


def test_d12_a_place_is_window_tier_and_slot():
    ours = manager(2, 2)
    run(ours, "a", A[:5])
    ours.add(request("b", B[:8]))
    [order] = ours.take_copies()
    assert order.source == (64, Tier.DEVICE, 0)
    assert order.destination.tier == Tier.HOST
    assert order.after == ()


def test_d12_a_copy_waits_for_those_that_read_or_write_its_places():
    ours = manager(2, 1)
    run(ours, "a", A[:5])
    ours.add(request("b", B[:8]))
    ours.release("b", publish=False)
    ours.add(request("c", A[:5]))
    first, second = ours.take_copies()
    assert second.source == first.destination
    assert second.after == (first.order_id,)
    ours.copies_done(second.order_id + 1)


def test_d14_no_more_is_published_than_there_are_blocks():
    ours = manager(8)
    ours.add(request("a", A[:5]))
    ours.extend("a", A[5:30])
    ours.release("a")
    assert found(ours, A[:30]) == 8


# Crashes and contracts.


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


# Leaks and capacity.


def test_d25_each_sliding_window_detaches_by_itself():
    ours = manager(16, windows=(8, 16))
    ours.add(request("a", A[:9]))
    for _ in range(20):
        assert ours.grow("a")
    assert ours.block_ids("a", 8).count(None) == 5
    assert ours.block_ids("a", 16).count(None) == 3
    ours.release("a")
    assert ours.num_free() == 32


def test_d29_rewinding_frees_by_blocks_whatever_the_window():
    ours = manager(8, windows=(10,), max_rewind=64)
    ours.add(request("a", A[:9]))
    assert ours.rewind("a", 1)
    assert len(ours.block_ids("a", 10)) == 2
    assert ours.grow("a", 2)
    assert len(ours.block_ids("a", 10)) == 3
    assert ours.rewind("a", 3)
    assert len(ours.block_ids("a", 10)) == 2


def test_d30_of_two_copies_of_one_content_one_goes():
    ours = manager(8)
    ours.add(request("a", A[:9]))
    ours.add(request("b", A[:9]))
    assert ours.num_free() == 2
    ours.publish("a")
    ours.publish("b")
    assert ours.block_ids("b", 64)[:2] == ours.block_ids("a", 64)[:2]
    assert ours.num_free() == 4
    ours.release("a")
    ours.release("b")
    assert ours.num_free() == 8


def test_d30_a_duplicate_goes_before_all_that_is_cached():
    ours = manager(4)
    ours.add(request("a", A[:5]))
    ours.add(request("b", A[:5]))
    own = ours.block_ids("b", 64)[0]
    ours.publish("a")
    ours.publish("b")
    ours.release("a")
    ours.release("b")
    ours.add(request("c", B[:4]))
    assert ours.block_ids("c", 64) == [own]


def test_d30_a_request_takes_over_what_lies_before_a_pinned_block_of_its_own():
    ours = manager(8, windows=(12,))
    ours.add(request("a", A[:9]))
    pin = ours.pin("a")
    ours.unpin(pin, {12: [0]})
    ours.add(request("b", A[:9]))
    ours.publish("b")
    ours.publish("a")
    assert ours.block_ids("a", 12) == [3, 1, 2], "the second is pinned, so it cannot be exchanged"
    assert ours.num_free() == 3
    ours.release("a")
    ours.release("b")
    ours.unpin(pin)
    assert ours.num_free() == 8


# Reuse and eviction.


def test_d32_a_sliding_window_is_matched_by_need():
    ours = manager(6, windows=(8,))
    ours.add(request("a", A[:9]))
    for token in A[9:29]:
        ours.publish("a")
        ours.extend("a", [token])
        assert ours.grow("a")
    ours.release("a")
    ours.add(request("b", B[:9]))
    ours.release("b", publish=False)
    admission = ours.add(request("c", [*A[:28], 1]))
    assert admission.num_cached == 28, "the beginning is gone and not needed"
    assert ours.block_ids("c", 8)[:5] == [None] * 5
    assert len([block_id for block_id in ours.block_ids("c", 8) if block_id is not None]) == 3


def test_d32_a_short_window_does_not_keep_the_others_from_storing():
    ours = manager((3,), (16,), windows=(8, 64))
    ours.add(request("a", A[:9]))
    for token in A[9:20]:
        ours.extend("a", [token])
        assert ours.grow("a")
    ours.release("a")
    assert ours.lookup(request("?", A[:19]), 64).num_tokens == 19
    assert found(ours, [*A[:19], 1]) == 19


def test_d33_a_request_loses_only_what_was_taken_from_it():
    ours = manager(6, 2)
    run(ours, "a", A[:5])
    ours.add(request("b", [*A[:4], *B[:5]]))
    assert ours.rewind("b", 1)
    ours.add(request("c", range(8)))
    ours.release("b")
    assert found(ours, [*A[:4], *B[:4], 1]) == 7


def test_d34_a_limit_trims_a_block_instead_of_rejecting_it():
    ours = manager((4,), (16,), windows=(8, 64))
    run(ours, "a", A[:13])
    run(ours, "b", B[:13])
    run(ours, "c", A[:7])
    assert ours.lookup(request("?", A[:12]), 64).num_tokens == 12
    assert found(ours, [*A[:12], 1]) == 6


def test_d35_a_full_leaf_is_copied_while_there_is_room_and_taken_over_with_an_event_otherwise():
    for num_blocks, remains in ((4, True), (2, False)):
        ours = manager(num_blocks, event_buffer_size=100)
        ours.add(request("a", A[:8]))
        ours.release("a", num_filled=8)
        events(ours)
        admission = ours.add(request("b", A[:8]))
        assert admission.num_cached == 7
        kinds = [type(payload) for payload in events(ours)]
        assert (Removed in kinds) != remains
        assert len(ours.take_copies()) == remains


def test_d36_a_match_is_claimed_before_blocks_are_taken_for_it():
    ours = manager(4, 4)
    run(ours, "a", A[:17][:16])
    run(ours, "b", B[:16])
    assert ours.add(request("c", A[:13])).num_cached == 12


def test_d36_requests_of_one_step_do_not_evict_what_the_others_found():
    alone, together = manager(6), manager(6)
    for ours in (alone, together):
        run(ours, "a", A[:9])
        run(ours, "b", B[:9])
    first, second = request("c", range(8)), request("d", A[:9])
    assert alone.add(first).num_cached == 0
    assert alone.add(second).num_cached < 8
    assert [one.num_cached for one in together.add_all([first, second])] == [0, 8]


def test_d37_children_go_before_their_parents():
    ours = manager(4, event_buffer_size=100)
    ours.add(request("a", A[:9]))
    ours.publish("a")
    ours.set_priority(64, 1, 80)
    ours.release("a")
    events(ours)
    ours.add(request("b", B[:12]))
    assert ours.block_ids("b", 64) == [3, 2, 1]
    assert found(ours, A[:9]) == 4, "the parent outlives its child of higher priority"


def test_d38_priority_and_duration_survive_matches_and_moves():
    clock = Clock()
    ours = manager(4, 4, clock=clock)
    run(ours, "a", A[:5], retention=keep(80, 50))
    run(ours, "b", A[:5])
    assert ours.inspect(64, 0).priority == 80
    clock.now = 49
    assert ours.refresh() == 0
    run(ours, "c", B[:16])
    assert ours.inspect(64, 0).tier == Tier.HOST
    clock.now = 50
    assert ours.refresh() == 1
    assert ours.inspect(64, 0).priority == 35


def test_d38_of_concurrent_wishes_the_strongest_prevails():
    ours = manager(8)
    ours.add(request("a", A[:5], retention=keep(80)))
    ours.publish("a")
    ours.add(request("b", A[:5], retention=keep(10)))
    assert ours.inspect(64, 0).priority == 80
    ours.release("a")
    ours.release("b")
    ours.add(request("c", A[:5], retention=keep(10)))
    assert ours.inspect(64, 0).priority == 10, "alone, the last request decides"


def test_d39_a_copy_is_kept_as_its_request_wishes():
    ours = manager(8)
    run(ours, "a", A[:13], retention=keep(70))
    ours.add(request("b", [*A[:6], 1, 2], retention=keep(15)))
    copy = ours.block_ids("b", 64)[1]
    assert ours.inspect(64, copy).priority == 15


@pytest.mark.parametrize("partial", [True, False])
def test_d40_an_exact_block_that_is_not_full_obeys_the_flags(partial):
    ours = manager(8, partial_reuse=partial)
    run(ours, "a", A[:7])
    assert found(ours, [*A[:6], 1]) == (6 if partial else 4)


def test_d41_ties_are_broken_by_tier_then_use_then_id():
    ours = manager(8)
    run(ours, "a", [1, 2, 3, 4, 5])
    run(ours, "b", [1, 2, 8, 9, 5])
    ours.take_copies()
    admission = ours.add(request("c", [1, 2, 7]))
    [order] = ours.take_copies()
    assert admission.num_cached == 2
    assert order.source.slot == 2, "the later used"


def test_d42_publishing_goes_on_from_where_it_was():
    ours = manager(16, event_buffer_size=100)
    ours.add(request("a", A[:6]))
    assert ours.publish("a") == 1
    ours.extend("a", A[6:15])
    assert ours.grow("a", 9)
    assert ours.publish("a") == 2
    assert ours.publish("a") == 0


def test_d43_only_requests_with_equal_prefixes_wait_for_each_other():
    ours = manager((8,), (16,), windows=(8, 64))
    run(ours, "a", A[:9])
    wanted = ours.missing_prefix(request("b", A[:16]))
    assert wanted.num_tokens == 12
    assert wanted == ours.missing_prefix(request("c", [*A[:12], 1, 2, 3, 4]))
    assert wanted != ours.missing_prefix(request("d", A[:16], salt="s"))
    assert wanted != ours.missing_prefix(request("e", A[:16], lora="l"))
    item = (b"picture", 9)
    assert wanted != ours.missing_prefix(request("f", A[:16], items=[item]))
    assert ours.missing_prefix(request("g", A[:8])) is None


def test_d44_all_beams_get_the_part_of_the_last_block_that_is_cached():
    ours = manager(12, max_beam_width=3)
    run(ours, "a", A[:13])
    assert ours.add(request("b", [*A[:7], 1]), beam_width=3).num_cached == 7
    lasts = [ours.block_ids("b", 64, beam)[1] for beam in range(3)]
    assert len(set(lasts)) == 3
    assert sorted(order.destination.slot for order in ours.take_copies()) == sorted(lasts)


def test_d46_blocks_of_one_token():
    ours = manager(16, tokens_per_block=1)
    run(ours, "a", A[:6])
    assert found(ours, A[:6]) == 5
    assert ours.add(request("b", A[:6])).stats.reused == 5


# Interfaces.


def test_d47_a_pin_knows_its_blocks_in_every_window():
    ours = manager(8, windows=(8, 64))
    ours.add(request("a", A[:9]))
    pin = ours.release("a", pin=True)
    assert pin.block_ids == {8: (0, 1, 2), 64: (0, 1, 2)}
    assert ours.num_free() == 10
    ours.unpin(pin)
    assert ours.num_free() == 16


def test_d47_a_pin_is_given_up_piece_by_piece_from_its_end():
    ours = manager(8)
    ours.add(request("a", A[:13]))
    pin = ours.release("a", pin=True)
    ours.unpin(pin, {64: [3]})
    assert (ours.num_free(), pin.block_ids) == (5, {64: (0, 1, 2)})
    ours.unpin(pin, {64: [1]})
    assert (ours.num_free(), pin.block_ids) == (5, {64: (0, 1, 2)}), "the third block hangs on the second"
    for gone in (1, 3, 7):
        with pytest.raises(CallerError, match=f"theirs=\\[{gone}\\]"):
            ours.unpin(pin, {64: [gone]})
    ours.unpin(pin, {64: [2]})
    assert (ours.num_free(), pin.block_ids) == (7, {64: (0,)})
    assert ours.add(request("b", B[:28])) is not None
    assert found(ours, A[:13]) == 4, "what is still pinned stays, the rest made room"
    ours.unpin(pin)
    with pytest.raises(CallerError, match="before"):
        ours.unpin(pin, {})


def test_d47_a_sliding_window_gives_up_any_block_of_a_pin():
    ours = manager(8, windows=(8, 64))
    ours.add(request("a", A[:13]))
    pin = ours.pin("a")
    ours.release("a")
    ours.unpin(pin, {8: [1, 3], 64: [1]})
    assert pin.block_ids == {8: (0, 2), 64: (0, 1, 2, 3)}
    assert [ours.num_free(size) for size in (8, 64)] == [6, 4]
    ours.unpin(pin, {8: [0, 2]})
    ours.unpin(pin, {64: [0, 2, 3]})
    assert ours.num_free() == 16
    with pytest.raises(CallerError, match="before"):
        ours.unpin(pin)


def test_d48_slots_belong_to_requests_and_have_no_leftovers():
    ours = manager(4, 4)
    run(ours, "a", A[:13])
    ours.add(request("b", B[:8]))
    assert len(ours.slots("b", 64)) == 2
    assert all(0 <= slot < 4 for slot in ours.slots("b", 64))


def test_d49_a_block_made_writable_is_copied_for_every_beam():
    ours = manager(12, max_beam_width=2)
    ours.add(request("a", A[:9]), beam_width=2)
    assert ours.make_writable("a", 1)
    ones, twos = ours.block_ids("a", 64, 0), ours.block_ids("a", 64, 1)
    assert ones[0] == twos[0]
    assert ones[1] != twos[1]
    [order] = ours.take_copies()
    assert (order.source.slot, order.destination.slot) == (ones[1], twos[1])
    with pytest.raises(CallerError):
        ours.make_writable("a", 3)


def test_d49_without_room_nothing_is_made_writable():
    ours = manager(5, max_beam_width=2)
    ours.add(request("a", A[:13]), beam_width=2)
    before = ours.block_ids("a", 64, 1)
    assert not ours.make_writable("a", 0)
    assert ours.block_ids("a", 64, 1) == before


def test_d50_equal_keys_mean_equal_content():
    ours = manager(32)
    ways = [
        request("a", A[:8]),
        request("b", A[:8], lora="7"),
        request("c", A[:8], salt="7"),
        request("d", A[:8], extra_ids=[0] * 8),
        request("e", A[:8], items=[(b"7", 0)]),
        request("f", A[:8], items=[(b"7", 1)]),
    ]
    for way in ways:
        assert ours.add(way).num_cached <= 1, "one token comes before the picture of the last"
        ours.publish(way.request_id, 8)
    keys = [key for way in ways for key in ours.block_keys(way.request_id)]
    assert len(set(keys)) == len(keys)


def test_d51_a_copied_block_hangs_on_its_own_predecessor():
    ours = manager(8, event_buffer_size=100)
    run(ours, "a", A[:13])
    run(ours, "b", [*A[:6], *B[:6]])
    stored = [payload for payload in events(ours) if isinstance(payload, Stored)]
    assert stored[1].parent == stored[0].blocks[0].key


def test_d52_events_name_their_scope_and_a_flood_leaves_a_mark():
    ours = manager(16, event_buffer_size=3)
    ours.add(request("a", A[:9], lora="l", salt="s"))
    ours.publish("a")
    [_, stored] = events(ours)
    assert (stored.scope.lora, stored.scope.salt) == ("l", "s")
    for step in range(5):
        run(ours, f"b{step}", range(1000 * step, 1000 * step + 5))
    flood = events(ours)
    assert isinstance(flood[0], Reset)
    assert flood[0].num_lost == 2
    assert len(flood) == 4
    whole = {block.key for event in ours.snapshot() for block in event.payload.blocks}
    assert len(whole) == 7


def test_d53_extra_ids_and_items_bound_partial_matches():
    ours = manager(16)
    run(ours, "a", A[:5], extra_ids=[0] * 5)
    assert found(ours, A[:5]) == 0
    run(ours, "b", B[:9], items=[(b"one", 2)])
    assert found(ours, B[:9], items=[(b"two", 2)]) == 2
    assert found(ours, B[:9], items=[(b"one", 2)]) == 8


def test_d54_tiers_are_told_apart():
    ours = manager(4, 2)
    ours.add(request("a", A[:9]))
    [stats] = ours.stats().windows
    assert [(tier.num_blocks, tier.num_free, tier.num_used) for tier in stats.tiers] == [
        (4, 1, 3),
        (2, 2, 0),
        (0, 0, 0),
    ]


def test_d55_rates_are_of_tokens_and_never_divide_by_zero():
    ours = manager(8, 2)
    assert ours.stats().token_hit_rate == 0.0
    assert ours.stats().block_hit_rate == 0.0
    run(ours, "a", A[:10])
    run(ours, "b", A[:10])
    assert ours.stats().token_hit_rate == 9 / 20


def test_d59_a_chain_may_be_longer_than_any_stack():
    ours = manager(5_000, tokens_per_block=1, max_sequence_length=5_000)
    for length in range(200, 5_000, 400):
        run(ours.real, f"a{length}", range(length))
    ours.check()
    assert found(ours, range(4_000)) == 3_999


def test_d60_what_is_found_is_credited():
    ours = manager(8)
    ours.add(request("a", A[:9]))
    ours.publish("a")
    probe = ours.probe(request("b", A[:9]))
    assert (probe.num_cached, probe.num_used) == (8, {64: 1})
    ours.release("a")
    assert ours.probe(request("b", A[:9])).num_used == {64: 3}


def test_d61_what_beams_share_is_stored():
    ours = manager(16, max_beam_width=3)
    ours.add(request("a", A[:12]), beam_width=3)
    ours.release("a")
    assert found(ours, A[:12]) == 8


def test_d62_no_growth_beyond_the_longest():
    ours = manager(16, max_sequence_length=10)
    ours.add(request("a", A[:9]))
    assert ours.grow("a")
    with pytest.raises(CapacityError, match="ours=10, theirs=11"):
        ours.grow("a")
    assert ours.num_tokens("a") == 10


def test_d63_no_block_is_moved_only_to_be_dropped_by_the_same_request():
    ours = manager(6, 2)
    run(ours, "a", A[:17][:16])
    ours.add(request("b", B[:24]))
    orders = ours.take_copies()
    assert len(orders) == 2
    assert len({order.destination for order in orders}) == 2
    assert ours.stats().windows[0].num_offloaded == 2


def test_d64_the_caller_says_what_is_filled():
    ours = manager(8)
    ours.add(request("a", A[:9]))
    assert ours.publish("a", 3) == 0
    assert ours.publish("a", 4) == 1
    ours.release("a", num_filled=6)
    assert found(ours, A[:9]) == 6


def test_d57_one_thread_calls_and_the_events_are_the_only_edge():
    """The two threads of test_manager_stateful play this for long; here: a reader cannot see half a step."""
    ours = KVCacheManager(
        ManagerConfig(tokens_per_block=4, windows=(WindowConfig(64, 8),), max_sequence_length=64, event_buffer_size=10)
    )
    ours.add(Request("a", list(A[:9])))
    ours.publish("a")
    assert ours.take_events() == [], "nothing before the flush"
    ours.flush_events()
    assert len(ours.take_events()) == 2
