"""Defects that the manager repairs: blocks that are lost or miscounted; each as a small story (core spec 16)."""

from kv_testing.managers import manager, request

A = range(100, 164)
B = range(200, 264)


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
