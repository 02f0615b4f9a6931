"""Both eviction orders against one contract, and what each adds to it."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.config import ManagerConfig, Order, WindowConfig
from kv_core.eviction import Expiries, LruQueue, S3FifoQueue, Stamps, victim_queue
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.runs import Run, heal
from kv_testing.managers import Clock, found, manager, request, run

ORDERS = pytest.mark.parametrize("order", list(Order))


def empty(*ids):
    return Run(None, 0, b"", array("i", ids))


def drain(queue):
    """All block ids in the order of victims."""
    ids = []
    while (first := queue.peek()) is not None:
        ids += reversed(first.ids)
        queue.claim(first)
    return ids


@ORDERS
def test_the_last_block_of_the_longest_free_run_goes_first(order):
    queue = victim_queue(order, Stamps(), leaf_first=True, num_blocks=8)
    for ours in (empty(0, 1, 2), empty(3), empty(4, 5)):
        queue.release(ours)
    assert queue.num_free == 6
    assert drain(queue) == [2, 1, 0, 3, 5, 4]
    assert queue.num_free == 0


@ORDERS
def test_lower_priorities_go_first_and_the_front_before_the_rest(order):
    queue = victim_queue(order, Stamps(), leaf_first=True, num_blocks=8)
    low, high, late, front = empty(0), empty(1), empty(2), empty(3)
    high.priority = 80
    for ours in (high, low, late):
        queue.release(ours)
    queue.release(front, front=True)
    assert drain(queue) == [3, 0, 2, 1]


@ORDERS
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=60))
def test_every_free_block_is_a_victim_once(order, steps):
    queue = victim_queue(order, Stamps(), leaf_first=True, num_blocks=64)
    held = [empty(*range(4 * at, 4 * at + 4)) for at in range(8)]
    free: list[Run] = []
    for kind, number, front in steps:
        if kind == 0 and held:
            ours = held.pop(number % len(held))
            ours.hot = front
            queue.release(ours, front=front)
            free.append(ours)
        elif kind == 1 and free:
            ours = free.pop(number % len(free))
            queue.claim(ours)
            held.append(ours)
        elif kind == 2 and free and free[number % len(free)].count > 1:
            ours = free[number % len(free)]
            ours.shorten(1)
            queue.shortened(ours, 1)
    left = sorted(block_id for ours in free for block_id in ours.ids)
    assert queue.num_free == len(left)
    assert sorted(drain(queue)) == left


def test_stale_entries_do_not_pile_up():
    queue = LruQueue(Stamps(), leaf_first=True)
    ours = empty(0)
    for _ in range(5_000):
        queue.release(ours)
        queue.claim(ours)
    assert len(queue._heap) < 1_000


def test_expiry_is_earliest_first_and_forgets_what_was_claimed():
    clock = Clock()
    expiries, queue = Expiries(clock), LruQueue(Stamps(), leaf_first=True)
    runs = [empty(at) for at in range(3)]
    for ours, duration in zip(runs, (30, 10, 20), strict=True):
        ours.priority, ours.duration_ms = 80, duration
        queue.release(ours)
        expiries.released(ours)
    queue.claim(runs[2])
    clock.now = 9
    assert expiries.due() == []
    clock.now = 40
    assert expiries.due() == [runs[1], runs[0]]


def test_proven_runs_outlive_a_scan():
    """What is found again survives many prompts that come once; with LRU it does not."""
    kept = {}
    for order in Order:
        ours = manager(24, order=order)
        for again in range(3):
            run(ours, f"hot{again}", range(9))
        for step in range(20):
            run(ours, f"scan{step}", range(100 * step + 100, 100 * step + 113))
        kept[order] = found(ours, range(9))
    assert kept == {Order.LRU: 0, Order.S3_FIFO: 8}


def test_what_comes_back_after_it_was_dropped_is_proven():
    queue = S3FifoQueue(Stamps(), leaf_first=True, num_blocks=8)
    root = Run(None, 0, b"", array("i"))
    dropped, back, other = (Run(root, 0, bytes([token] * 4), array("i", [at]), 4) for at, token in enumerate((1, 1, 2)))
    queue.dropped(dropped, 0)
    queue.published(back)
    queue.published(other)
    assert (back.hot, other.hot) == (True, False)


@ORDERS
def test_the_laws_hold_under_every_order(order):
    ours = KVCacheManager(
        ManagerConfig(
            tokens_per_block=4,
            windows=(WindowConfig(8, 10, 4), WindowConfig(64, 16, 6, 4)),
            max_sequence_length=64,
            order=order,
        )
    )
    for step in range(120):
        prompt = [1] * (step * 7 % 11) + [step % 5] * (step * 5 % 17 + 1)
        if run_if_possible(ours, f"r{step}", prompt):
            ours.check()


def run_if_possible(ours, name, prompt):
    from kv_core.request import Request

    if ours.add(Request(name, prompt)) is None:
        return False
    ours.release(name)
    return True


def test_a_sliding_window_gives_up_first_what_no_match_near_the_end_reads():
    """Empty blocks go first, then those before the last two windows, however new they are."""
    ours = manager((24,), (64,), windows=(8, 64))
    old, new = list(range(100, 117)), list(range(49))
    run(ours, "old", old)
    run(ours, "new", new)
    assert ours.add(Request("other", list(range(200, 244)))) is not None, "11 blocks: 7 empty ones, 4 of the new prompt"
    assert found(ours, [*old, 1]) == 16, "what is older but needed is there"
    assert [found(ours, [*new[:end], -1, -1, -1, -1, -1]) for end in (40, 44, 48)] == [40, 44, 48]
    assert found(ours, new[:25]) == 24, "the first blocks go first"
    assert found(ours, new[:21]) == 0, "of which this match would read the last"


def test_a_sliding_window_gives_up_spare_blocks_then_the_first_of_the_longest_free_run():
    queue = LruQueue(Stamps(), leaf_first=False)
    for ours, spare in ((empty(0, 1, 2, 3), 2), (empty(4, 5, 6), 1), (empty(7, 8), 0)):
        queue.release(ours, spare=spare)
    ids = []
    while (first := queue.peek()) is not None:
        count = first.num_alike
        ids += first.ids[:count]
        if count < len(first.ids):
            first.forget(count)
            queue.shortened(first, count)
        else:
            queue.claim(first)
    assert ids == [0, 1, 4, 2, 3, 5, 6, 7, 8]
    assert queue.num_free == 0


def held_in_two_pieces(inside):
    """A request's path of eleven blocks, cut in two."""
    ours = manager(24, windows=(8,))
    assert ours.add(request("a", range(45))) is not None
    ours.publish("a")
    window = ours.real._registry.windows[0]
    [root] = window.tree.roots.values()
    [lower] = root.children.values()
    whole = shown(lower)
    upper = window.cut(lower, inside)
    ours.check()
    return ours, upper, lower, whole


def shown(run):
    return run.start, run.ids.tolist(), run.content(), run.holders


@pytest.mark.parametrize("inside", [1, 5, 10])
def test_what_one_table_holds_is_joined_again(inside):
    """A cut leaves two runs that nothing tells apart; joined, they are what they were."""
    ours, _, lower, whole = held_in_two_pieces(inside)
    heal(lower, 0)
    assert shown(lower) == whole
    ours.check()
    ours.release("a")
    assert found(ours, range(45)) == 44


def test_what_is_told_apart_is_not_joined():
    _, upper, lower, _ = held_in_two_pieces(3)
    assert lower.continues(upper)
    for piece, name in ((lower, "priority"), (upper, "anchors"), (lower, "holders"), (upper, "used")):
        before = getattr(piece, name)
        setattr(piece, name, before + 1)
        assert not lower.continues(upper), name
        setattr(piece, name, before)
    assert lower.continues(upper)
