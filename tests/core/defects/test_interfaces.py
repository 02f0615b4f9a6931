"""Defects that the manager repairs: interfaces, hashes, events and counters; each as a small story (core spec 16)."""

import pytest

from kv_core.config import ManagerConfig, WindowConfig
from kv_core.errors import CallerError, CapacityError
from kv_core.events import Reset, Stored
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.tiers import Tier
from kv_testing.managers import found, manager, payloads, request, run

A = range(100, 164)
B = range(200, 264)


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
    stored = [payload for payload in payloads(ours) if isinstance(payload, Stored)]
    assert stored[1].parent == stored[0].blocks[0].key


def test_d52_events_name_their_scope_and_a_flood_leaves_a_mark():
    ours = manager(16, event_buffer_size=3)
    ours.add(request("a", A[:9], lora="l", salt="s"))
    ours.publish("a")
    [_, stored] = payloads(ours)
    assert (stored.scope.lora, stored.scope.salt) == ("l", "s")
    for step in range(5):
        run(ours, f"b{step}", range(1000 * step, 1000 * step + 5))
    flood = payloads(ours)
    assert isinstance(flood[0], Reset)
    assert flood[0].num_lost == 2
    assert len(flood) == 4
    whole = {block.key for event in ours.snapshot() for block in event.payload.blocks}
    assert len(whole) == 7


def test_d52_stored_blocks_and_the_snapshot_name_the_items_that_start_in_them():
    ours = manager(16, event_buffer_size=100)
    pictures = ((b"one", 2), (b"two", 9), (b"three", 9))
    run(ours, "a", A[:13], items=pictures, lora="l")
    [_, stored] = payloads(ours)
    assert (stored.scope.lora, set(stored.scope.extras)) == ("l", set(pictures))
    run(ours, "b", [*A[:8], *B[:6]], items=pictures[:1], lora="l")
    [again] = payloads(ours)
    assert again.scope.extras == (), "the first picture starts in a block that was told before"
    told = [event.payload.scope.extras for event in ours.snapshot()]
    assert sorted(one for extras in told for one in extras) == sorted(pictures)


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


def test_d55_hits_are_counted_in_tokens_by_the_tier_they_lay_in():
    ours = manager((8,), (4, 8), windows=(8, 64))
    run(ours, "a", A[:13])
    assert [ours.stats().tier_hit_rate(tier) for tier in Tier] == [0.0, 0.0, 0.0]
    run(ours, "b", B[:13])  # the wide window moves some of a to the host
    run(ours, "c", A[:12])
    stats = ours.stats()
    device, host, disk = (tier.num_hit_tokens for tier in stats.windows[1].tiers)
    assert device + host == stats.num_cached_tokens == 11
    assert host > 0 == disk
    assert stats.tier_hit_rate(Tier.HOST) == host / 38
    assert sum(stats.tier_hit_rate(tier) for tier in Tier) == pytest.approx(stats.token_hit_rate)
    assert stats.windows[0].tiers[0].num_hit_tokens == 7, "of eleven tokens the short window reads two blocks"


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
