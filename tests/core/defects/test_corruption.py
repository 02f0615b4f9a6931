"""Defects that the manager repairs: content that is not what its key says; each as a small story (core spec 16)."""

import pytest

from kv_core.config import CacheType
from kv_core.errors import CallerError, CapacityError
from kv_core.events import Removed, Stored, Updated
from kv_core.tiers import Tier
from kv_testing.managers import found, manager, payloads, request, run

A = range(100, 164)
B = range(200, 264)


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
    payloads(ours)
    ours.publish("a")
    kinds = [type(payload) for payload in payloads(ours)]
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
    assert [type(payload) for payload in payloads(ours)][-2:] == [Updated, Removed]
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
    assert [type(payload) for payload in payloads(ours)][-1] is Removed


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
