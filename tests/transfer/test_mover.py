"""The copy thread, over lanes that only count: what a job has queued ends before its end is told, and nobody waits."""

import pytest

from kv_testing.copy_thread import WAIT_S, Thread
from kv_transfer.gate import Gate
from kv_transfer.lanes import Lane
from kv_transfer.mover import MAX_FLIGHTS


@pytest.fixture
def thread():
    made = Thread()
    yield made
    assert made.close()


def test_copies_overlap_and_lanes_do_not_wait_for_each_other(thread):
    thread.copy("in 1")
    thread.copy("in 2")
    thread.copy("out 1", Lane.OUT)
    assert [thread.next_begun() for _ in range(3)] == ["in 1", "in 2", "out 1"]
    thread.lanes.let_on(Lane.OUT)
    assert thread.next_end()[0] == "out 1"
    thread.lanes.let_on(Lane.IN)
    assert thread.next_end()[0] == "in 1"
    thread.lanes.let_on(Lane.IN)
    assert thread.next_end()[0] == "in 2"


def test_what_is_alone_waits_for_all_before_it(thread):
    """A mapping is closed when nothing reads it any more."""
    thread.copy("read")
    thread.copy("close", num=0, is_alone=True)
    thread.copy("later")
    assert thread.next_begun() == "read"
    thread.lanes.let_on(Lane.IN)
    assert [thread.next_begun() for _ in range(2)] == ["close", "later"]
    assert [thread.next_end()[0] for _ in range(2)] == ["read", "close"]


def test_no_more_than_so_many_run(thread):
    for number in range(MAX_FLIGHTS + 1):
        thread.copy(number)
    assert [thread.next_begun() for _ in range(MAX_FLIGHTS)] == list(range(MAX_FLIGHTS))
    assert thread.begun.empty()
    thread.lanes.let_on(Lane.IN)
    assert thread.next_end()[0] == 0
    assert thread.next_begun() == MAX_FLIGHTS


def test_a_job_in_steps_goes_on_when_what_it_has_queued_is_over(thread):
    seen = []

    def steps():
        thread.lanes.queue(Lane.IN)
        seen.append("queued")
        thread.begun.put("steps")
        yield
        seen.append(thread.lanes.num_over[Lane.IN])
        return 7

    thread.mover.submit(steps, None, lambda moved: thread.ends.put(("steps", moved)))
    thread.next_begun()
    thread.nothing_ends()
    assert seen == ["queued"]
    thread.lanes.let_on(Lane.IN)
    _, moved = thread.next_end()
    assert (moved.value, seen) == (7, ["queued", 1])


@pytest.mark.parametrize("fails", [None, ValueError("not what was sent")])
def test_a_last_look_is_taken_when_the_copies_are_over_by_whoever_tells_the_end(monkeypatch, fails):
    """The copy thread would look a minute later, and nothing more is waited for."""
    monkeypatch.setattr("kv_transfer.mover.LOOK_S", 60)
    thread, seen = Thread(), []

    def look():
        seen.append(thread.lanes.num_over[Lane.IN])
        if fails is not None:
            raise fails
        return 7

    def run():
        thread.lanes.queue(Lane.IN)
        return look

    thread.mover.submit(run, None, lambda moved: thread.ends.put(("look", moved)))
    wake = thread.lanes.wakes.get(timeout=WAIT_S)
    assert seen == []
    thread.lanes.let_on(Lane.IN)
    wake(None)
    _, moved = thread.next_end()
    assert (moved.value, moved.error, seen) == (None if fails else 7, fails, [1])
    wake(None)
    assert thread.ends.empty(), "it was told twice"
    assert thread.lanes.wakes.empty(), "the end of a copy was waited for twice"
    assert thread.mover.close(WAIT_S)


def test_a_gate_stays_entered_until_the_copies_are_over(thread):
    gate = Gate()
    thread.copy("a", gate=gate)
    thread.next_begun()
    assert not gate.shut()
    thread.lanes.let_on(Lane.IN)
    thread.next_end()
    assert gate.shut()


def test_a_lanes_own_thread_tells_the_end(monkeypatch):
    """At once: the copy thread would look a minute later."""
    monkeypatch.setattr("kv_transfer.mover.LOOK_S", 60)
    thread = Thread()
    thread.copy("a")
    wake = thread.lanes.wakes.get(timeout=WAIT_S)
    thread.lanes.let_on(Lane.IN)
    wake(None)
    assert thread.next_end()[0] == "a"
    wake(None)
    assert thread.ends.empty(), "it was told twice"
    assert thread.mover.close(WAIT_S)


def test_old_news_of_a_lane_does_not_end_a_job_that_went_on(thread):
    def steps():
        thread.lanes.queue(Lane.IN)
        yield
        thread.lanes.queue(Lane.IN)

    thread.mover.submit(steps, None, lambda moved: thread.ends.put(("steps", moved)))
    first = thread.lanes.wakes.get(timeout=WAIT_S)
    thread.lanes.let_on(Lane.IN)
    second = thread.lanes.wakes.get(timeout=WAIT_S)
    first(None)
    assert thread.ends.empty()
    thread.lanes.let_on(Lane.IN)
    second(None)
    assert thread.next_end()[0] == "steps"
