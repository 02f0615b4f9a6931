"""Defects that the manager repairs: what is found again, and what goes first; each as a small story (core spec 16)."""

import pytest

from kv_core.events import Removed
from kv_core.tiers import Tier
from kv_testing.managers import Clock, found, keep, manager, payloads, request, run

A = range(100, 164)
B = range(200, 264)


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
        payloads(ours)
        admission = ours.add(request("b", A[:8]))
        assert admission.num_cached == 7
        kinds = [type(payload) for payload in payloads(ours)]
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
    payloads(ours)
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
